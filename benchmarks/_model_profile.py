"""Where the time of a training step goes, and how long it waits for its data."""

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics

from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, RandomSampler
from transformers import default_data_collator

from benchmarks._model_cases import TRAINING_LENGTH
from benchmarks._models import Subject, draw_tokens, make_model, training_step
from stablemask.data import DataConfig, prepare
from stablemask.measuring import threads
from stablemask.model.sizes import named_config

PROFILES: tuple[Subject, ...] = ("stock", "decoder", "enabled")
DATA = "data/71m"

_SIZE = "71m"
_STEPS = 3
_BATCHES = 500
# The first that is part of an operation's name decides.
_KINDS = {
    "flash": "attention and its sink",
    "sigmoid": "attention and its sink",
    "logaddexp": "attention and its sink",
    "stablemask": "attention and its sink",
    "aten::mm": "products with weights of the layers",
    "addmm": "products with weights of the layers",
    "adamw": "AdamW and clipping",
    "linalg": "AdamW and clipping",
    "_softmax": "softmax and loss",
    "nll_loss": "softmax and loss",
    "exp_": "softmax and loss",
    "scatter_add": "softmax and loss",
    "embedding": "embedding",
    "fill_": "filling with zeros",
    "aten::": "other element-wise operations, sums and copies",
}
_VOCABULARY = "products with the output layer"
_OVERHEAD = "Python and autograd"


def step_profile(subject: Subject) -> dict[str, float]:
    """Share of each kind of operation in the time that the profiler sees, on 1 thread."""
    config = named_config(_SIZE, horizon=TRAINING_LENGTH)
    with threads(1):
        step = training_step(
            make_model(subject, config), draw_tokens(config, 1, TRAINING_LENGTH), optimizer=True
        )
        step()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
            for _ in range(_STEPS):
                step()
    times: Counter[str] = Counter()
    for event in profiled.key_averages(group_by_input_shape=True):
        sizes = {size for shape in event.input_shapes for size in shape if isinstance(size, int)}
        times[_kind(event.key, config.vocab_size in sizes)] += event.self_cpu_time_total
    total = sum(times.values())
    return {"seconds a step": 1e-6 * total / _STEPS} | {
        kind: spent / total for kind, spent in times.most_common()
    }


def data_waiting() -> dict[str, float]:
    """Seconds to load a sequence of real text, in the process that trains, beside those of a step on it."""
    with tempfile.TemporaryDirectory() as folder, threads(1):
        blocks = prepare(_data(Path(folder)), TRAINING_LENGTH, progress=False).train
        sampler = RandomSampler(blocks, replacement=True, num_samples=_BATCHES)
        loader = iter(DataLoader(blocks, sampler=sampler, collate_fn=default_data_collator))
        batch = next(loader)
        loads = [_seconds(lambda: next(loader)) for _ in range(_BATCHES - 1)]
        model = make_model("decoder", named_config(_SIZE, horizon=TRAINING_LENGTH))
        step = training_step(model, batch["input_ids"], optimizer=True)
        step()
        steps = [_seconds(step) for _ in range(_STEPS)]
    load, trained = statistics.median(loads), statistics.median(steps)
    return {"seconds to load": load, "seconds a step": trained, "share of the step": load / trained}


def _data(folder: Path) -> DataConfig:
    """A text that every Python brings."""
    text = folder / "text.txt"
    text.write_text(Path(topics.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    source = str(text)
    return DataConfig(source, valid=source, test=source, tokenizer="bytes", cache=str(folder / "cache"))


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _kind(operation: str, vocabulary: bool) -> str:
    product = "aten::mm" in operation or "addmm" in operation
    if product and vocabulary:
        return _VOCABULARY
    return next((kind for part, kind in _KINDS.items() if part in operation), _OVERHEAD)
