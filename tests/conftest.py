"""What holds for every test."""

from collections.abc import Iterator

import pytest
import torch

from tests.chromium import Chromium, chromium


@pytest.fixture(autouse=True)
def _leaves_torch_as_it_was() -> Iterator[None]:
    """A test that switches gradients off for all that follow would let them pass or fail for no reason."""
    before = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_inference_mode_enabled())
    yield
    after = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_inference_mode_enabled())
    torch.set_grad_enabled(before[0])
    assert after == before, "gradients, default dtype or inference mode were changed"


@pytest.fixture(scope="session")
def any_browser() -> Iterator[Chromium]:
    """A browser, whatever happens in it."""
    with chromium() as started:
        yield started


@pytest.fixture
def browser(any_browser: Chromium) -> Iterator[Chromium]:
    """A browser in which no page reports an error, or asks for anything but pages on the disk."""
    any_browser.requests.clear()
    any_browser.problems.clear()
    yield any_browser
    assert any_browser.problems == []
    others = [address for address in any_browser.requests if not address.startswith("data:")]
    assert all(address.startswith("file:") and address.endswith(".html") for address in others), others
