"""Two processes train what one does: data parallel and sharded, whole and resumed."""

from pathlib import Path
from typing import Any

import pytest

from stablemask.training import train
from tests import scenes
from tests.training import small, two_processes

TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return scenes.play("tests.training.two_processes", tmp_path_factory.mktemp("two"), "runs")["runs"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*two_processes.TWO, "ddp, ended in one"])
def test_two_processes_have_the_losses_of_one(name: str, found: Found) -> None:
    precision = "bf16" if "bf16" in name else "fp32"
    assert two_processes.apart(found["curves"][name], found["curves"][precision]) <= TOLERANCE[precision]


@pytest.mark.slow
def test_other_losses_would_be_seen(found: Found) -> None:
    assert two_processes.apart(found["curves"]["bf16"], found["curves"]["fp32"]) > 10 * TOLERANCE["fp32"]


@pytest.mark.slow
@pytest.mark.parametrize("name", two_processes.TWO)
def test_the_model_is_copied_or_spread_as_the_recipe_says(name: str, found: Found) -> None:
    expected = ["DistributedDataParallel", "whole"]
    if "fsdp" in name:
        expected = ["FSDPStableMaskForCausalLM", "in parts"]
    assert [process["spread"][name] for process in found["processes"]] == [expected] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", two_processes.RESUMED)
def test_a_run_that_was_interrupted_ends_the_same(name: str, found: Found) -> None:
    assert [process["resumed"][name] for process in found["processes"]] == [[], []]


@pytest.mark.slow
def test_no_copies_instead_of_parts(found: Found) -> None:
    for process in found["processes"]:
        inactive, batch = process["refused"]
        assert "distribution: got 'fsdp', but " in inactive
        assert "are whole" in inactive
        assert "batch_size: got 3 sequences; allowed: multiples of accumulation × processes = 1 × 2" in batch


def test_one_process_cannot_spread_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="distribution: got 'fsdp' in a single process; allowed"):
        train(small.recipe(tmp_path, distribution="fsdp"), tmp_path / "run", progress=False)
