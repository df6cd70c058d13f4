"""Reading piece by piece: the same logits as at once, in our decoder and in others."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

import stablemask.hf
from stablemask.evaluation.reading import METHODS, Method, Reader, why_not
from tests.model import tiny

LENGTH, KEYS, PINNED = 24, 8, 2
SPLITS = {"at once": [24], "chunks": [5, 4, 1, 9, 5]}
SMALL = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}

ROUNDED = 1e-5  # transformers works out rotations, norms and ALiBi in float32, whatever the weights are


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def read(model: PreTrainedModel, method: Method, split: str, batch: int = 2) -> Tensor:
    reader = Reader(model, method, keys=KEYS, pinned=PINNED)
    return torch.cat([reader(piece) for piece in tiny.tokens(batch, LENGTH).split(SPLITS[split], 1)], 1)


def llama(remedy: str) -> LlamaForCausalLM:
    """The weights of our small decoder in the class of transformers."""
    ours = tiny.model("rope", remedy)
    c = ours.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
    )
    model = LlamaForCausalLM(config).double().eval()
    model.load_state_dict(ours.state_dict())
    if remedy == "stablemask":
        stablemask.hf.enable(model, gamma=0.5, horizon=tiny.HORIZON)
    return model


@pytest.mark.parametrize("split", ["at once", "chunks"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("remedy", ["none", "stablemask"])
def test_other_architectures_read_as_ours_does(method: Method, remedy: str, split: str) -> None:
    """Ours are proven against the published rule, token by token, where they are at home."""
    ours, theirs = (read(model, method, split) for model in (tiny.model("rope", remedy), llama(remedy)))
    assert tiny.difference(theirs, ours) < ROUNDED


@pytest.mark.parametrize("model", [tiny.model("rope"), llama("none")], ids=["ours", "llama"])
def test_the_methods_differ_once_the_window_is_full(model: PreTrainedModel) -> None:
    full, window, pinned = (read(model, method, "at once") for method in METHODS)
    for other in (window, pinned):
        assert tiny.difference(other[:, :KEYS], full[:, :KEYS]) < tiny.EXACT
        assert tiny.difference(other[:, KEYS:], full[:, KEYS:]) > 1e-3
    assert tiny.difference(window[:, KEYS:], pinned[:, KEYS:]) > 1e-3


@pytest.mark.parametrize(("position", "remedy"), tiny.EVERY)
def test_full_is_one_forward_pass(position: str, remedy: str) -> None:
    model = tiny.model(position, remedy)
    whole = model(tiny.tokens(2, LENGTH), use_cache=False).logits
    assert tiny.difference(read(model, "full", "chunks"), whole) < tiny.EXACT


@pytest.mark.parametrize(("position", "remedy"), tiny.EVERY)
def test_every_model_of_ours_has_its_methods(position: str, remedy: str) -> None:
    model = tiny.model(position, remedy, max_position_embeddings=20)
    table = position == "learned" or remedy == "urpe"
    for method in METHODS:
        movable = method != "pinned" or position not in ("learned", "sinusoidal")
        assert (why_not(model, method) is None) == movable
        assert (why_not(model, method, 21) is None) == (movable and not table)
        assert (why_not(model, method, 20) is None) == movable


OTHERS: dict[str, tuple[Any, str | None]] = {
    "gpt_neox": (GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL, rotary_pct=0.5, intermediate_size=16)), None),
    "cohere": (CohereForCausalLM(CohereConfig(**SMALL, intermediate_size=16)), "in another way than Llama"),
    "gpt2": (GPT2LMHeadModel(GPT2Config(**SMALL, n_positions=32)), "its table of positions ends at 32"),
    "bloom": (BloomForCausalLM(BloomConfig(**SMALL)), "no rotary encoding"),
    "mistral": (
        MistralForCausalLM(
            MistralConfig(**SMALL, intermediate_size=16, sliding_window=4, num_key_value_heads=2)
        ),
        "a window of their own",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_other_architectures_can_do(name: str) -> None:
    model, reason = OTHERS[name]
    model = model.double().eval()
    found = why_not(model, "pinned")
    assert found is None if reason is None else reason in str(found)
    whole = model(tiny.tokens(2, LENGTH), use_cache=False).logits
    assert tiny.difference(read(model, "full", "chunks"), whole) < ROUNDED
    split = [read(model, "window", split) for split in SPLITS]
    assert tiny.difference(split[1], split[0]) < ROUNDED
    if name == "gpt2":
        assert why_not(model, "full", 33) == "its table of positions ends at 32"
        assert why_not(model, "full", 32) is None


def test_a_rotation_of_a_part_of_the_head_is_taken_back() -> None:
    """One layer sees the kept tokens as if they stood side by side; two see further."""
    kept = torch.cat([tiny.tokens(1, LENGTH)[:, :PINNED], tiny.tokens(1, LENGTH)[:, PINNED - KEYS :]], 1)
    for layers, side_by_side in ((1, True), (2, False)):
        settings = {**SMALL, "num_hidden_layers": layers, "initializer_range": 0.3}
        config = GPTNeoXConfig(**settings, rotary_pct=0.5, intermediate_size=16)
        torch.manual_seed(0)
        model = GPTNeoXForCausalLM(config).double().eval()
        split = [read(model, "pinned", split, batch=1) for split in SPLITS]
        assert tiny.difference(split[1], split[0]) < ROUNDED
        expected = model(kept, use_cache=False).logits[:, -1]
        assert (tiny.difference(split[0][:, -1], expected) < ROUNDED) == side_by_side


def test_held_bytes_stay_constant() -> None:
    for model in (tiny.model(), llama("none")):
        for method, grows in (("full", True), ("window", False), ("pinned", False)):
            reader = Reader(model, method, keys=KEYS, pinned=PINNED)  # type: ignore[arg-type]
            reader(tiny.tokens(1, KEYS + 1))
            before = reader.held_bytes()
            reader(tiny.tokens(1, 5))
            assert (reader.held_bytes() > before) == grows
            if not grows:
                assert before == 2 * 2 * 2 * KEYS * 6 * 8  # layers, k and v, heads, keys, width, bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "some"}, "method: got 'some'; allowed: full, window, pinned"),
        ({"keys": 0}, "keys: got 0"),
        ({"method": "pinned", "keys": 4, "pinned": 4}, "pinned: got 4; allowed: from 1 to 3"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reader(tiny.model(), **{"method": "window", "keys": 4, **options})
    with pytest.raises(ValueError, match="cannot be given other places"):
        Reader(tiny.model("learned"), "pinned", keys=4)
