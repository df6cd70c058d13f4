"""What holds for every test."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _leaves_torch_as_it_was() -> Iterator[None]:
    """A test that switches gradients off for all that follow would let them pass or fail for no reason."""
    before = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_inference_mode_enabled())
    yield
    after = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_inference_mode_enabled())
    torch.set_grad_enabled(before[0])
    assert after == before, "gradients, default dtype or inference mode were changed"
