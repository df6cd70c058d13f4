"""Two processes compute what one does: data parallel, sharded, tensor parallel."""

import pytest
import torch
from torch import Tensor

from tests.hf import doors, two_processes
from tests.model.tiny import EXACT

TOLERANCE = 1e-5  # of float32, ten times what was seen
Results = list[dict[str, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("two")
    for name, make in two_processes.SPLIT.items():
        make().save_pretrained(folder / name)
    return two_processes.start(folder)


def different(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference in relation to the size of the second, where it is more than rounding."""
    assert a.keys() == b.keys()
    found = {name: float((t - b[name]).abs().max() / b[name].abs().max()) for name, t in a.items()}
    return {
        name: difference for name, difference in found.items() if not difference <= rounding(name, b[name])
    }


def rounding(name: str, t: Tensor) -> float:
    """What two orders of the same sums may differ by."""
    float64 = t.dtype == torch.float64 and not name.startswith(two_processes.PARTLY_FLOAT32)
    return EXACT if float64 else TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("part", two_processes.PARTS)
def test_two_processes_are_as_one(
    part: str, results: Results, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = two_processes.PARTS[part](tmp_path_factory.mktemp("one"))
    for found in results:
        assert different(found[part], expected) == {}


def test_the_decays_of_other_heads_would_be_found() -> None:
    """As if the second process had the decays of the first."""
    ids = doors.tokens(2)
    right, wrong = (
        doors.enabled("llama", gamma=gamma)(input_ids=ids).logits.detach()
        for gamma in ([0.5, 0.02, 0.1, 0.3], [0.5, 0.02, 0.5, 0.02])
    )
    assert different({"logits": wrong}, {"logits": right})["logits"] > 1e-2
