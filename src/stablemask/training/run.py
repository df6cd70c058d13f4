"""A run: from a recipe and a folder to a trained model, also if it is killed on the way."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from transformers import PrinterCallback, TrainerCallback, TrainingArguments, set_seed
from transformers.integrations.integration_utils import get_available_reporting_integrations
from transformers.utils import logging as hf_logging

from stablemask.data import Splits, prepare
from stablemask.model import StableMaskForCausalLM
from stablemask.training import checkpoints
from stablemask.training.card import write_card
from stablemask.training.progress import Progress, say
from stablemask.training.recipe import Recipe
from stablemask.training.sequences import Sequences
from stablemask.training.sharded import ShardedTrainer
from stablemask.training.trainer import Metrics, PretrainingTrainer, Schedule

RUN = "run.json"
SUMMARY = "summary.json"
MODEL = "model"
# Set by accelerate launch for what the recipe decides, or nobody.
_LAUNCHER = {
    "ACCELERATE_USE_FSDP": "the recipe's train.distribution spreads the model",
    "ACCELERATE_USE_DEEPSPEED": "the recipe's train.distribution spreads the model",
    "ACCELERATE_USE_MEGATRON_LM": "the recipe's train.distribution spreads the model",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "the recipe's train.distribution spreads the model",
    "ACCELERATE_DYNAMO_BACKEND": "a training run is not compiled",
}
# A run may go on with other values of these: they change nothing in what it computes.
_FREE = (("name",), ("data", "cache"), ("train", "keep"), ("train", "report_to"))


@dataclass(frozen=True)
class Summary:
    """What a finished run came to.

    Attributes:
        model: Folder of the trained model, with its tokenizer and a card.
        perplexity: Of the validation text, at the end.
        loss: The same as a mean loss a token.
        steps: Updates.
        tokens: Tokens of training text.
        seconds: Time of the work, that before a kill included as far as a checkpoint kept it.
        parameters: Of the model.
    """

    model: Path
    perplexity: float
    loss: float
    steps: int
    tokens: int
    seconds: float
    parameters: int


def train(
    recipe: Recipe, folder: str | Path, *, progress: bool = True, callbacks: Sequence[TrainerCallback] = ()
) -> Summary:
    """Train the model of a recipe; the same call goes on where a killed run stopped.

    Under ``torchrun`` or ``accelerate launch`` every process calls it. A finished run is not repeated.

    Args:
        recipe: What to train, on what, and how.
        folder: Of the run: its checkpoints, ``metrics.jsonl``, and in the end ``model`` and ``summary.json``.
        progress: Show what happens on standard error.
        callbacks: More callbacks of transformers' Trainer.

    Raises:
        ValueError: Something in the recipe or about the text is wrong, or the folder holds another run.
        OSError: A file cannot be read or written.
        FloatingPointError: A loss, a gradient or a weight is no longer a finite number.

    Examples:
        >>> summary = train(load_recipe("recipes/tiny.toml"), "runs/tiny")  # doctest: +SKIP
    """
    recipe.check()
    folder = Path(folder)
    summary = _finished(recipe, folder)
    if summary is not None:
        return summary
    arguments = _arguments(recipe, folder)
    main = arguments.process_index == 0
    with _only_run(folder, main), _without_bars():
        splits = prepare(recipe.data, recipe.train.length, progress=progress and main)
        if main:
            _claim(recipe, folder, splits)
        trainer = _trainer(recipe, arguments, splits, progress and main, callbacks)
        checkpoint = _find_checkpoint(folder, main, progress)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, Progress):
                    callback.close()
        return _finish(recipe, folder, trainer, splits)


def _finished(recipe: Recipe, folder: Path) -> Summary | None:
    try:
        fields: dict[str, Any] = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        summary = Summary(**{**fields, "model": folder / MODEL})
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None
    if not summary.model.is_dir():
        return None
    _compare(recipe, folder)
    return summary


def _arguments(recipe: Recipe, folder: Path) -> TrainingArguments:
    config = recipe.train
    _refuse_other_settings(config.precision)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    pieces = config.accumulation * processes
    if config.sequences % pieces:
        raise ValueError(
            f"batch_size: got {config.sequences} sequences; allowed: multiples of accumulation × processes = "
            f"{config.accumulation} × {processes}"
        )
    trackers = get_available_reporting_integrations()
    for name in config.report_to:
        if name not in trackers:
            raise ValueError(
                f"report_to: got {name!r}; allowed: {', '.join(trackers) or 'nothing'}, the trackers of "
                "transformers that are installed here"
            )
    gpu = torch.cuda.is_available()
    if gpu and processes == 1 and torch.cuda.device_count() > 1:
        raise ValueError(
            f"processes: got 1 for {torch.cuda.device_count()} GPUs; allowed: one for each (torchrun "
            "--nproc-per-node), or fewer visible GPUs (CUDA_VISIBLE_DEVICES)"
        )
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=1,  # set when the length of the training split is known
        per_device_train_batch_size=config.sequences // pieces,
        per_device_eval_batch_size=config.sequences // pieces,
        gradient_accumulation_steps=config.accumulation,
        learning_rate=config.learning_rate,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_epsilon=config.epsilon,
        weight_decay=config.weight_decay,
        max_grad_norm=config.clipping,
        optim="adamw_torch_fused" if gpu else "adamw_torch",
        bf16=config.precision == "bf16",
        seed=config.seed,
        use_cpu=not gpu,
        report_to=list(config.report_to) or "none",
        run_name=recipe.name,
        # The recipe's own schedule decides when to log, validate and save.
        logging_strategy="no",
        save_strategy="no",
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=gpu,
        ddp_find_unused_parameters=False,
        average_tokens_across_devices=True,
    )


def _refuse_other_settings(precision: str) -> None:
    """What accelerate launch was told beside the recipe: transformers would follow it, or say nothing."""
    found = {name: os.environ.get(name, "no").lower() for name in _LAUNCHER}
    for name, setting in _LAUNCHER.items():
        if found[name] not in ("no", "false", "none", ""):
            raise ValueError(f"{name}: got {found[name]!r} from the launcher; allowed: no, as {setting}")
    given = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if given not in ("no", precision):
        raise ValueError(
            f"ACCELERATE_MIXED_PRECISION: got {given!r} from the launcher; allowed: no, or the recipe's "
            f"train.precision, {precision!r}"
        )


@contextmanager
def _only_run(folder: Path, main: bool) -> Iterator[None]:
    """Make the folder; only one run at a time may work in it."""
    if not main:
        yield
        return
    lock = FileLock(folder / ".lock")
    with checkpoints.writing(folder, folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"folder: got {str(folder)!r}, where another process trains; allowed: any other"
            ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _without_bars() -> Iterator[None]:
    """No bars for the files of a checkpoint."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _claim(recipe: Recipe, folder: Path, splits: Splits) -> None:
    """Write what the run in the folder is, or check that it is this one."""
    data = {"train": splits.train.fingerprint, "valid": splits.valid.fingerprint}
    if (folder / RUN).is_file():
        _compare(recipe, folder, data)
        return
    if checkpoints.find(folder):
        raise ValueError(
            f"folder: got {str(folder)!r}, which has checkpoints but no {RUN}; allowed: a new one"
        )
    about = {"recipe": recipe.table(), "data": data}
    with checkpoints.writing(folder / RUN, folder):
        checkpoints.write_atomically(folder / RUN, json.dumps(about, indent=1) + "\n")


def _compare(recipe: Recipe, folder: Path, data: dict[str, str] | None = None) -> None:
    try:
        about = json.loads((folder / RUN).read_text(encoding="utf-8"))
        before, of_data = _flat(about["recipe"]), about["data"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"folder: got {str(folder)!r}, whose {RUN} cannot be read ({error}), so that nobody knows which "
            f"run it holds; allowed: a new folder, or this one with its {RUN}"
        ) from error
    now = _flat(json.loads(json.dumps(recipe.table())))
    different = [
        f"{'.'.join(name)}: {before.get(name)!r} → {now.get(name)!r}"
        for name in sorted({*before, *now} - set(_FREE))
        if before.get(name) != now.get(name)
    ]
    if data is not None and of_data != data:
        different.append("the text of the data")
    if different:
        raise ValueError(
            f"folder: got {str(folder)!r}, which holds another run ({'; '.join(different)}); allowed: a new "
            "folder, or the recipe of the run that is there"
        )


def _flat(table: dict[str, Any], above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for name, value in table.items():
        found |= _flat(value, (*above, name)) if isinstance(value, dict) else {(*above, name): value}
    return found


def _trainer(
    recipe: Recipe,
    arguments: TrainingArguments,
    splits: Splits,
    progress: bool,
    callbacks: Sequence[TrainerCallback],
) -> PretrainingTrainer:
    config = recipe.train
    arguments.max_steps = config.updates(len(splits.train))
    sequences = Sequences(splits.train, arguments.max_steps * config.sequences, config.seed)
    set_seed(config.seed)
    end = splits.tokenizer.eos_token_id
    model = StableMaskForCausalLM(
        recipe.config(len(splits.tokenizer), bos_token_id=splits.tokenizer.bos_token_id, eos_token_id=end)
    )
    if config.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable()
    own: list[TrainerCallback] = [Schedule(config), Metrics(Path(str(arguments.output_dir)))]
    own += [Progress()] if progress else []
    kind = ShardedTrainer if config.distribution == "fsdp" else PretrainingTrainer
    trainer = kind(model, arguments, config, sequences, splits.valid, splits.tokenizer, [*own, *callbacks])
    trainer.remove_callback(PrinterCallback)
    return trainer


def _find_checkpoint(folder: Path, main: bool, progress: bool) -> Path | None:
    """The newest whole checkpoint, as the main process sees it."""
    found: list[Path | None] = [None]
    if main:
        found[0], damaged = checkpoints.newest_whole(folder)
        for checkpoint, reason in damaged.items():
            say(f"{checkpoint} is damaged: {reason}; it is passed over")
        if damaged and found[0] is None:
            say(f"no checkpoint in {folder} is whole: the run begins anew")
        if found[0] is not None and progress:
            say(f"going on from {found[0]}")
    return broadcast_object_list(found)[0]  # type: ignore[no-any-return]


def _finish(recipe: Recipe, folder: Path, trainer: PretrainingTrainer, splits: Splits) -> Summary:
    """Save the model, whole or not at all, and the summary."""
    history = trainer.state.log_history
    last = next(entry for entry in reversed(history) if "perplexity" in entry)
    summary = Summary(
        model=folder / MODEL,
        perplexity=last["perplexity"],
        loss=last["valid_loss"],
        steps=trainer.state.global_step,
        tokens=int(last["tokens"]),
        seconds=last["seconds"],
        parameters=sum(p.numel() for p in trainer.decoder.parameters()),
    )
    new = folder / f".{MODEL}.new"
    state = trainer.full_weights()
    if trainer.is_world_process_zero():
        try:
            with checkpoints.writing(summary.model, folder):
                shutil.rmtree(new, ignore_errors=True)
                trainer.decoder.config.use_cache = True
                trainer.decoder.save_pretrained(new, state_dict=state)
                splits.tokenizer.save_pretrained(new)
                write_card(new, recipe, splits, history, asdict(summary))
                checkpoints.flush(new)
                shutil.rmtree(summary.model, ignore_errors=True)
                new.rename(summary.model)
                fields = {**asdict(summary), "model": MODEL}
                checkpoints.write_atomically(folder / SUMMARY, json.dumps(fields, indent=1) + "\n")
        finally:
            shutil.rmtree(new, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    return summary
