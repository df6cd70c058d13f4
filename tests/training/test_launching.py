"""Starting a run on many GPUs: configurations as accelerate reads them, and what a run says to others."""

import os
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed import run as torchrun

from stablemask.cli.train import parse
from stablemask.training import load_recipe, plan, train
from tests.training import small
from tests.training.launching import FOLDER, ROOT, of_configuration, of_the_page

MACHINES = {"one-machine": 1, "four-machines": 4}
GPUS = 8


def launched(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Set the environment that accelerate launch gives its processes; the command line that they run."""
    monkeypatch.chdir(ROOT)
    start, launch, *options = of_configuration(name)
    assert [start, launch] == ["accelerate", "launch"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(options))
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda _: False)
    before = dict(os.environ)
    for key, value in prepare_multi_gpu_env(arguments).items():
        if before.get(key) != value:
            monkeypatch.setenv(key, value)
    assert int(arguments.nproc_per_node) == GPUS
    assert arguments.module
    if MACHINES[name] > 1:
        assert (arguments.nnodes, arguments.node_rank) == (str(MACHINES[name]), 0)
        assert (arguments.rdzv_backend, arguments.rdzv_endpoint) == ("static", "10.0.0.1:29500")
    return [arguments.training_script, *arguments.training_script_args]


def test_nothing_is_left_out() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(MACHINES)


@pytest.mark.parametrize("name", MACHINES)
def test_configurations(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = ClusterConfig.from_yaml_file(FOLDER / f"{name}.yaml")
    assert config.distributed_type is DistributedType.MULTI_GPU
    assert (config.num_machines, config.num_processes) == (MACHINES[name], GPUS * MACHINES[name])
    assert "not run here" in (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")

    module, subcommand, *options = launched(name, monkeypatch)
    assert (module, subcommand) == ("stablemask.cli", "train")
    job = parse(options, "stablemask train")
    assert job.problem == ""
    assert job.recipe == load_recipe(ROOT / "recipes" / "pile-1.4b-rope-stablemask.toml")
    assert job.recipe.train.distribution == "fsdp"
    assert job.recipe.train.sequences % config.num_processes == 0
    takes = plan(job.recipe, config.num_processes)
    assert sum(takes.memory.values()) < 0.95 * 80 * 2**30
    # the run itself accepts the environment
    assert train(small.recipe(tmp_path, steps=1), tmp_path / "run", progress=False).steps == 1


def test_the_commands_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = of_the_page()
    torchruns = [options for start, *options in found if start == "torchrun"]
    machines = []
    for options in torchruns:
        config, _, (_, _, module, subcommand, *rest) = torchrun.config_from_args(torchrun.parse_args(options))
        assert (config.nproc_per_node, module, subcommand) == (GPUS, "stablemask.cli", "train")
        job = parse(rest, "stablemask train")
        assert job.recipe is not None, job.problem
        assert job.recipe.train.distribution == "fsdp"
        machines.append(config.min_nodes)
    assert machines == [1, 4]
    assert [line for line in found if line[0] == "accelerate"] == [of_configuration("one-machine")]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "ACCELERATE_USE_FSDP",
            "true",
            "got 'true' from the launcher; allowed: no, as the recipe's train.dist",
        ),
        ("ACCELERATE_USE_DEEPSPEED", "true", "allowed: no, as the recipe's train.distribution"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "allowed: no, as the recipe's train.distribution"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "allowed: no, as a training run is not compiled"),
        ("ACCELERATE_MIXED_PRECISION", "bf16", "got 'bf16' from the launcher; allowed: no, or the recipe's"),
    ],
)
@pytest.mark.parametrize("distribution", ["ddp", "fsdp"])
def test_what_the_launcher_may_not_add(
    name: str, value: str, message: str, distribution: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name) as refused:
        train(small.recipe(tmp_path, distribution=distribution), tmp_path / "run", progress=False)
    assert message in str(refused.value)


def test_a_launcher_that_asks_for_the_same_precision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    recipe = small.recipe(tmp_path, steps=1, precision="bf16")
    assert train(recipe, tmp_path / "run", progress=False).steps == 1
