"""What must be the same however it is computed, for every architecture."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, DynamicCache, PreTrainedModel

import stablemask.hf
from tests.hf import tiny

HORIZON = 20
PROMPT = 15
NEW = 9
TOLERANCE = 2e-5  # of the norm, in float32

every_architecture = pytest.mark.parametrize("name", tiny.SUPPORTED)


def enabled(name: str, **options: Any) -> PreTrainedModel:
    model = tiny.model(name, **options)
    stablemask.hf.enable(model, gamma=0.5, horizon=HORIZON)
    return model


def forward(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, **{"use_cache": False, **inputs}).logits
    return logits


def generate(model: PreTrainedModel, ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Tokens, and the logits each was chosen from."""
    options = {
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "do_sample": False,
        "disable_compile": True,
        **options,
    }
    out = model.generate(ids, return_dict_in_generate=True, output_logits=True, **options)
    return out.sequences, torch.stack(out.logits, 1)


def off_by(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def padded(ids: Tensor, pads: int, side: str) -> tuple[Tensor, Tensor]:
    """The tokens in a batch with other, longer ones, and the attention mask."""
    length = ids.shape[1] + pads
    filler = torch.zeros(ids.shape[0], pads, dtype=ids.dtype)
    row = torch.cat([filler, ids] if side == "left" else [ids, filler], 1)
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[0] = (torch.arange(length) >= pads) if side == "left" else (torch.arange(length) < ids.shape[1])
    return torch.cat([row, tiny.tokens(1, length, seed=5)]), mask


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "chunked prefill": {"prefill_chunk_size": 4},
    "chunked prefill, static": {"prefill_chunk_size": 4, "cache_implementation": "static"},
}


@pytest.mark.parametrize("cache", CACHES)
@every_architecture
def test_cached_is_uncached(name: str, cache: str) -> None:
    model = enabled(name)
    sequences, logits = generate(model, tiny.tokens(2, PROMPT), **CACHES[cache])
    assert off_by(logits, forward(model, sequences)[:, PROMPT - 1 : -1]) <= TOLERANCE


@every_architecture
def test_a_cache_can_be_continued(name: str) -> None:
    model, ids = enabled(name), tiny.tokens(2, 26)
    cache = DynamicCache(config=model.config)
    parts = [
        forward(model, part, past_key_values=cache, use_cache=True) for part in ids.split([11, 1, 9, 5], 1)
    ]
    assert off_by(torch.cat(parts, 1), forward(model, ids)) <= TOLERANCE


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@every_architecture
def test_left_padded_is_unpadded_in_generate(name: str, cache: str) -> None:
    model, ids = enabled(name), tiny.tokens(1, PROMPT)
    batch, mask = padded(ids, 6, "left")
    _, expected = generate(model, ids, **CACHES[cache])
    _, got = generate(model, batch, attention_mask=mask, **CACHES[cache])
    assert off_by(got[:1], expected) <= TOLERANCE


def positions_for(name: str, mask: Tensor) -> dict[str, Tensor]:
    """What a caller of the stock model has to pass beside a padding mask."""
    return {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if name in tiny.LEARNED_POSITIONS else {}


@pytest.mark.parametrize("side", ["left", "right"])
@every_architecture
def test_padded_is_unpadded_in_a_plain_forward(name: str, side: str) -> None:
    model, ids = enabled(name), tiny.tokens(1, 23)
    batch, mask = padded(ids, 6, side)
    got = forward(model, batch, attention_mask=mask, **positions_for(name, mask))
    kept = slice(6, None) if side == "left" else slice(23)
    assert off_by(got[:1, kept], forward(model, ids)) <= TOLERANCE
    assert off_by(got[1:], forward(model, batch[1:])) <= TOLERANCE


@pytest.mark.parametrize("name", tiny.LEARNED_POSITIONS)
def test_stock_models_with_learned_positions_need_position_ids_too(name: str) -> None:
    model, ids = tiny.model(name), tiny.tokens(1, 23)
    batch, mask = padded(ids, 6, "left")
    assert off_by(forward(model, batch, attention_mask=mask)[:1, 6:], forward(model, ids)) > 0.01
    assert (
        off_by(
            forward(model, batch, attention_mask=mask, **positions_for(name, mask))[:1, 6:],
            forward(model, ids),
        )
        <= TOLERANCE
    )


@every_architecture
def test_left_padding_goes_on_in_a_cache(name: str) -> None:
    model, ids = enabled(name), tiny.tokens(1, 23)
    batch, mask = padded(ids, 6, "left")
    positions = positions_for(name, mask).get("position_ids")
    cache, parts = DynamicCache(config=model.config), []
    for start, stop in ((0, 13), (13, 14), (14, 29)):
        given = {} if positions is None else {"position_ids": positions[:, start:stop]}
        parts.append(
            forward(
                model,
                batch[:, start:stop],
                attention_mask=mask[:, :stop],
                past_key_values=cache,
                use_cache=True,
                **given,
            )
        )
    assert off_by(torch.cat(parts, 1)[:1, 6:], forward(model, ids)) <= TOLERANCE


def packed(lengths: tuple[int, ...]) -> tuple[list[Tensor], dict[str, Tensor]]:
    documents = [tiny.tokens(1, length, seed=length) for length in lengths]
    collate = DataCollatorWithFlattening(return_tensors="pt")
    batch = collate([{"input_ids": document[0].tolist()} for document in documents])
    return documents, {"ids": batch["input_ids"], "position_ids": batch["position_ids"]}


@pytest.mark.parametrize("name", [name for name in tiny.SUPPORTED if name not in tiny.NO_PACKING])
def test_packed_is_separate(name: str) -> None:
    model = enabled(name)
    documents, batch = packed((10, 1, 24))
    separate = torch.cat([forward(model, document) for document in documents], 1)
    assert off_by(forward(model, **batch), separate) <= TOLERANCE


@pytest.mark.parametrize("name", tiny.NO_PACKING)
def test_packing_is_refused_where_the_stock_model_mixes_documents(name: str) -> None:
    documents, batch = packed((10, 24))
    stock = tiny.model(name)
    separate = torch.cat([forward(stock, document) for document in documents], 1)
    assert off_by(forward(stock, **batch), separate) > 0.01
    with pytest.raises(ValueError, match="does not keep the documents apart"):
        forward(enabled(name), **batch)


@every_architecture
def test_decoding_strategies_agree(name: str) -> None:
    model, ids = enabled(name), tiny.tokens(1, PROMPT)
    ids[:, 7:12] = ids[:, 1:6]  # something for prompt lookup to find
    greedy, _ = generate(model, ids)
    assistant = enabled(name, seed=3)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=3)[0], greedy)
    assert torch.equal(generate(model, ids, assistant_model=assistant)[0], greedy)
    beams = [generate(model, ids, num_beams=3, use_cache=cached)[0] for cached in (True, False)]
    assert torch.equal(*beams)


@every_architecture
def test_base_of_minus_infinity_is_the_stock_model(name: str) -> None:
    model, ids = tiny.model(name), tiny.tokens(2, 26)
    batch, mask = padded(ids[:1], 6, "right")
    stock = forward(model, ids), forward(model, batch, attention_mask=mask)
    stablemask.hf.enable(model, gamma=0.5, horizon=HORIZON, base=-torch.inf)
    assert off_by(forward(model, ids), stock[0]) <= TOLERANCE
    assert off_by(forward(model, batch, attention_mask=mask)[0, :26], stock[1][0, :26]) <= TOLERANCE


@every_architecture
def test_a_large_gamma_tends_to_the_stock_model(name: str) -> None:
    model, ids = tiny.model(name), tiny.tokens(2, 26)
    stock = forward(model, ids)
    distances = []
    for gamma in (1.0, 4.0, 1e4):
        stablemask.hf.enable(model, gamma=gamma, headwise=False, horizon=HORIZON)
        distances.append(off_by(forward(model, ids), stock))
    assert distances[0] > distances[1] > distances[2]
    assert distances[2] <= TOLERANCE


@every_architecture
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    model, ids = enabled(name).train(), tiny.tokens(2, 26)

    def gradients() -> Tensor:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    plain = gradients()
    model.activation_checkpointing_enable()
    assert off_by(gradients(), plain) <= TOLERANCE
