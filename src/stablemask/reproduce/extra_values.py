"""The values of the cells beside the study, see ``extras``."""

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stablemask.analysis import capture
from stablemask.evaluation.latency import Latency, latency
from stablemask.evaluation.models import open_model
from stablemask.model import StableMaskForCausalLM
from stablemask.model.sizes import named_config
from stablemask.reproduce import extras, loop, theory
from stablemask.reproduce.corpus import Corpus, open_corpus
from stablemask.reproduce.measurements import CURVE_POINTS, mean_loss
from stablemask.reproduce.paper import load_paper
from stablemask.reproduce.study import Entry
from stablemask.training.plan import vocabulary_size

if TYPE_CHECKING:
    from stablemask.reproduce.cells import Job, OnShare

Content = dict[str, Any]

_SAME_LOSS = 2e-3  # of one model on another device; two seeds differ by ten times that
_TRAINING = 0.9  # of the work, where a model has to be trained first


def measure(job: "Job", entry: Entry, on_share: "OnShare") -> Content:
    """What the cell holds beside its settings."""
    kind, what = extras.kind(entry), entry.group.partition("/")[2]
    if kind == "sizes":
        return {"values": _sizes(what)}
    if kind == "theory":
        return {"values": theory.values(what)}
    if kind == "latency":
        return {"values": _latency(job, entry, on_share)}
    corpus = open_corpus(job.corpus)
    model = trained(job, entry, corpus, on_share)
    return _heads(model, corpus) if kind == "heads" else _downstream(job, model, corpus, on_share)


def trained(job: "Job", entry: Entry, corpus: Corpus, on_share: "OnShare") -> StableMaskForCausalLM:
    """The model that a cell looks at: from the folder of weights, or trained where it is not there.

    Raises:
        ValueError: The weights are not those of the finished cell of that model.
    """
    seen = extras.model_entry(entry)
    assert seen is not None
    if job.weights is None:
        raise ValueError(f"weights: got None; allowed: a folder for the model that {entry.group} looks at")
    folder = extras.weights_of(job.weights, seen)
    if not (folder / "config.json").exists():
        model = _train(job, seen, corpus, on_share)
        loop.save_model(model, folder)
        return model
    opened = open_model(str(folder), device=job.conditions.device, dtype="float32")
    assert isinstance(opened, StableMaskForCausalLM)
    expected = _loss_of_cell(job, seen)
    if expected is not None:
        length = job.study.recipe(seen.group).train.length
        loss = mean_loss(opened, corpus.documents["valid"], length)
        if not abs(loss - expected) < _SAME_LOSS:
            raise ValueError(
                f"weights: {str(folder)!r} has a loss of {loss:.4f}; allowed: {expected:.4f}, that of "
                f"the cell of {seen.group}, seed {seen.seed}; remove the folder to train the model again"
            )
    return opened


def _train(job: "Job", seen: Entry, corpus: Corpus, on_share: "OnShare") -> StableMaskForCausalLM:
    recipe = job.study.recipe(seen.group, seed=seen.seed, precision=job.conditions.precision)
    model = loop.make_model(recipe, corpus.vocabulary)
    nn.Module.to(model, job.conditions.device)
    blocks = corpus.blocks(recipe.train.length, recipe.data.packing)
    total = recipe.train.updates(len(blocks))
    loop.train(model, recipe, blocks, on_update=lambda done: on_share(_TRAINING * done / total))
    return model


def _loss_of_cell(job: "Job", seen: Entry) -> float | None:
    """On the first validation documents at the end of the training; None where there is no such cell."""
    path = job.path(seen)
    if not path.exists():
        return None
    values: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["values"]
    return values.get(f"curve/{CURVE_POINTS}")


def _sizes(name: str) -> dict[str, float]:
    """Million parameters, with the vocabulary of GPT-2: named, and as printed with a gate and without."""
    table = next(item for item in load_paper() if item.id == "table-5").tables[0]
    row = next(row for row in table.rows if row.name.lower() == name)
    printed = {column: int(value) for column, value in zip(table.columns, row.printed, strict=True)}
    vocabulary = printed["vocabulary"]
    widths = {
        "hidden_size": printed["embedding"],
        "intermediate_size": printed["feed-forward"],
        "num_hidden_layers": printed["layers"],
        "num_attention_heads": printed["heads"],
        "head_dim": printed["attention"] // printed["heads"],
    }
    configs = {
        "named": named_config(name, vocab_size=vocabulary, remedy="none"),
        "printed/plain": named_config(name, vocab_size=vocabulary, remedy="none", gated=False, **widths),
        "printed/gated": named_config(name, vocab_size=vocabulary, remedy="none", **widths),
    }
    with torch.device("meta"):
        models = {key: StableMaskForCausalLM(config) for key, config in configs.items()}
    return {key: sum(p.numel() for p in m.parameters()) / 1e6 for key, m in models.items()}


def _latency(job: "Job", entry: Entry, on_share: "OnShare") -> dict[str, float]:
    recipe = job.study.recipe(extras.LATENCY_MODEL)
    model = loop.make_model(recipe, vocabulary_size(recipe.data.tokenizer))
    nn.Module.eval(model)
    nn.Module.to(model, job.conditions.device)
    prompt, output = extras.lengths(entry)
    rounds = extras.LATENCY_ROUNDS
    done = 0

    def on_round(_: int) -> None:
        nonlocal done
        done += 1
        on_share(min(done / (2 * rounds), 1.0))

    setting = Latency((prompt,), (output,), rounds=rounds, max_seconds=extras.LATENCY_SECONDS)
    return dict(latency(model, prompt=prompt, output=output, setting=setting, on_round=on_round))


@torch.inference_mode()
def _heads(model: StableMaskForCausalLM, corpus: Corpus) -> Content:
    """Attention of every head on the first tokens of the first validation document that is long enough."""
    length = extras.HEADS_TOKENS
    ids = next((d.tokens[:length] for d in corpus.documents["valid"] if len(d.tokens) >= length), None)
    if ids is None:
        raise ValueError(f"corpus: got no validation document of {length} tokens; allowed: one at least")
    with capture(model) as layers:
        model(input_ids=ids.unsqueeze(0).to(model.device), use_cache=False)
    places = [(layer, head) for layer, each in enumerate(layers) for head in range(each.num_heads)]
    maps = {f"{layer}/{head}": layers.attention_map(layer, head).cpu() for layer, head in places}
    pseudo = {f"{layer}/{head}": layers.pseudo_mass(layer)[head].cpu() for layer, head in places}
    return {
        "values": {
            "first": float(torch.stack([found[1:, 0] for found in maps.values()]).mean()),
            "pseudo": float(torch.stack([found[1:] for found in pseudo.values()]).mean()),
        },
        "tokens": [corpus.tokenizer.decode([token]) for token in ids.tolist()],
        "maps": {place: [_rounded(row[: i + 1]) for i, row in enumerate(m)] for place, m in maps.items()},
        "pseudo mass": {place: _rounded(mass) for place, mass in pseudo.items()},
    }


def _downstream(job: "Job", model: StableMaskForCausalLM, corpus: Corpus, on_share: "OnShare") -> Content:
    from stablemask.evaluation import harness  # noqa: PLC0415 - importing lm-eval takes seconds, and few have it

    tasks = [task for task in harness.TASKS if _has_questions(job, task)]
    if not tasks:
        raise ValueError(
            f"downstream: got {str(job.downstream)!r}; allowed: a folder with questions of a task"
        )
    values: dict[str, float] = {}
    for number, task in enumerate(tasks, 1):
        found = harness.run_downstream(
            model, corpus.tokenizer, tasks=[task], data=job.downstream, limit=extras.DOWNSTREAM_LIMIT
        )
        values |= {name: value for name, value in found if name in extras.METRICS["downstream"]}
        on_share(_TRAINING + (1 - _TRAINING) * number / len(tasks))
    return {"values": values, "left out": [task for task in harness.TASKS if task not in tasks]}


def _has_questions(job: "Job", task: str) -> bool:
    """A folder need not have all tasks; those that it lacks are not measured, and the page says so."""
    from stablemask.evaluation import harness  # noqa: PLC0415 - as above

    try:
        harness.find_files([task], job.downstream)
    except ValueError:
        return False
    return True


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
