"""Captured maps are those of the dense decoder and of the models' own eager attention."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import stablemask.hf
from stablemask import attention
from stablemask.analysis import Capture, capture
from stablemask.model.cache import StreamingLLMCache
from stablemask.model.configuration import POSITIONS, REMEDIES
from tests.hf import tiny as stock
from tests.model import dense
from tests.model.tiny import EXACT, difference, model, tokens

LENGTH = 15  # past the horizon of tests.model.tiny
DISTRIBUTIONS = [remedy for remedy in REMEDIES if remedy != "urpe"]


def dense_maps(built: PreTrainedModel, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Weights (layer, head, row, key) of the decoder that ``tests.model.dense`` writes out."""
    rows: list[Tensor] = []
    weigh = dense.weigh

    def record(*args: Any) -> Tensor:
        rows.append(weigh(*args))
        return rows[-1]

    monkeypatch.setattr(dense, "weigh", record)
    settings = {**built.config.to_dict(), "head_dim": built.config.width_of_head}
    dense.logits(built.state_dict(), settings, ids)
    layers, heads = built.config.num_hidden_layers, built.config.num_attention_heads
    return torch.stack(rows).view(layers, heads, rows[0].shape[0], -1)


def captured(built: PreTrainedModel, ids: Tensor, **options: Any) -> Capture:
    with capture(built) as layers, torch.no_grad():
        built(ids, **options)
    return layers


def all_maps(layers: Capture, heads: int, sequence: int = 0) -> Tensor:
    found = [
        [layers.attention_map(i, h, sequence=sequence) for h in range(heads)] for i in range(len(layers))
    ]
    return torch.stack([torch.stack(row) for row in found])


@pytest.mark.parametrize("remedy", DISTRIBUTIONS)
@pytest.mark.parametrize("position", POSITIONS)
def test_maps_of_the_decoder(position: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    window = {"sliding_window": 6} if position in ("rope", "alibi") else {}
    built = model(position, remedy, **window)
    ids = tokens(2, LENGTH)
    layers = captured(built, ids)
    extra = built.config.num_artificial
    for sequence in range(2):
        expected = dense_maps(built, ids[sequence], monkeypatch)
        monkeypatch.undo()
        got = all_maps(layers, 4, sequence)
        assert difference(got, expected[:, :, extra:, extra:]) < EXACT
        for layer in range(2):
            artificial = layers[layer].artificial_mass(sequence=sequence)
            pseudo = layers.pseudo_mass(layer, sequence=sequence)
            assert torch.allclose(got[layer].sum(-1) + pseudo + artificial, torch.ones(4, LENGTH).double())
            assert torch.allclose(artificial, expected[layer, :, extra:, :extra].sum(-1))
            assert bool((pseudo > 0).any()) == (remedy in ("stablemask", "softmax_plus_one", "learned_sink"))


@pytest.mark.parametrize("name", sorted(set(stock.SUPPORTED) - {"gpt_oss", "opt"}))
def test_maps_of_a_stock_model(name: str) -> None:
    built = stock.model(name, attn_implementation="eager")
    ids = stock.tokens(2, LENGTH)
    expected = built(ids, output_attentions=True, use_cache=False)
    layers = captured(built, ids, use_cache=False)
    for sequence in range(2):
        maps = torch.stack([attentions[sequence] for attentions in expected.attentions])
        assert torch.allclose(all_maps(layers, maps.shape[1], sequence), maps, atol=1e-5), (
            "not the weights that the model's own attention reports"
        )
    assert all(not layers.pseudo_mass(layer).any() for layer in range(2))
    assert built.config._attn_implementation == "eager"
    assert torch.equal(built(ids, use_cache=False).logits, expected.logits)


def test_maps_of_opt_which_reports_no_weights() -> None:
    built = stock.model("opt")
    layers = captured(built, stock.tokens(1, LENGTH), use_cache=False)
    maps = all_maps(layers, stock.HEADS)
    assert torch.allclose(maps.sum(-1), torch.ones(2, stock.HEADS, LENGTH))
    assert not maps.triu(1).any()
    with torch.no_grad():
        values: list[Tensor] = []
        first = built.model.decoder.layers[0].self_attn
        first.v_proj.register_forward_hook(lambda *a: values.append(a[2]))
        outs: list[Tensor] = []
        first.out_proj.register_forward_hook(lambda *a: outs.append(a[1][0]))
        built(stock.tokens(1, LENGTH), use_cache=False)
        v = values[0].view(LENGTH, stock.HEADS, -1).transpose(0, 1)
    assert torch.allclose((maps[0] @ v).transpose(0, 1).reshape(LENGTH, -1), outs[0][0], atol=1e-5)


def test_learned_sinks_of_a_stock_model_are_pseudo_mass() -> None:
    built = stock.model("gpt_oss", attn_implementation="eager")
    ids = stock.tokens(1, LENGTH)
    expected = built(ids, output_attentions=True, use_cache=False).attentions
    layers = captured(built, ids, use_cache=False)
    for layer in range(2):
        got = all_maps(layers, stock.HEADS)[layer]
        assert torch.allclose(got, expected[layer][0, :, :, :LENGTH], atol=1e-5)
        assert torch.allclose(got.sum(-1) + layers.pseudo_mass(layer), torch.ones(stock.HEADS, LENGTH))
        assert layers.pseudo_mass(layer).min() > 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_stablemask_in_a_stock_architecture(name: str) -> None:
    built = stock.model(name)
    stablemask.hf.enable(built, gamma=0.5, horizon=12)
    layers = captured(built, stock.tokens(1, LENGTH), use_cache=False)
    assert built.config._attn_implementation == "stablemask"
    for layer in range(2):
        mass = layers.pseudo_mass(layer)
        assert torch.allclose(all_maps(layers, stock.HEADS)[layer].sum(-1) + mass, torch.ones(4, LENGTH))
        assert mass[:, 0].min() > 0.1
        if name == "llama":
            assert mass[:, 11].max() == 0  # the last row of the horizon


def test_padding_and_documents_stay_apart() -> None:
    built = model()
    ids = tokens(1, 9)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], 1)
    alone = all_maps(captured(built, ids), 4)
    left = captured(built, padded, attention_mask=(padded > 0))
    got = all_maps(left, 4)
    assert difference(got[:, :, 3:, 3:], alone) < EXACT
    assert not got[:, :, :3].any()
    assert not got[:, :, :, :3].any()
    assert not left.pseudo_mass(0)[:, :3].any()
    packed = captured(
        built, ids.repeat(1, 2), position_ids=torch.arange(9).repeat(2).unsqueeze(0), use_cache=False
    )
    assert difference(all_maps(packed, 4)[:, :, 9:, 9:], alone) < EXACT
    assert not all_maps(packed, 4)[:, :, 9:, :9].any()


@pytest.mark.parametrize("remedy", ["stablemask", "artificial_token"])
def test_rows_of_a_cached_pass(remedy: str) -> None:
    built = model(remedy=remedy)
    ids = tokens(1, 12)
    whole = captured(built, ids)
    with capture(built) as layers, torch.no_grad():
        cache = built(ids[:, :8], use_cache=True).past_key_values
        assert len(layers[0].attention_map(0)) == 8
        built(ids[:, 8:], past_key_values=cache)
    assert difference(all_maps(layers, 4), all_maps(whole, 4)[:, :, 8:]) < EXACT
    assert difference(layers.pseudo_mass(1) + 1, whole.pseudo_mass(1)[:, 8:] + 1) < EXACT


def test_the_last_piece_of_a_streaming_cache() -> None:
    for built in (model(), model().model):
        with capture(built) as layers, torch.no_grad():
            built(tokens(1, 12), past_key_values=StreamingLLMCache(pinned=1, window=5))
        assert [layer.q.shape[2] for layer in layers] == [layers[0].num_rows] * 2
        assert layers[0].num_rows < 12
        assert torch.allclose(
            layers[0].rows(slice(None)).sum(-1) + layers.pseudo_mass(0), torch.ones(()).double()
        )


def test_artificial_tokens_of_packed_documents_cannot_be_told_apart() -> None:
    built = model(remedy="artificial_token")
    places = torch.arange(4).repeat(2).unsqueeze(0)
    with pytest.raises(ValueError, match="with artificial tokens"):
        captured(built, tokens(1, 8), position_ids=places, use_cache=False)


def test_blocks_are_the_map() -> None:
    layers = captured(model("alibi", sliding_window=5), tokens(1, LENGTH))
    blocks = list(layers[1].blocks(block=4))
    assert [rows.stop - rows.start for rows, _ in blocks] == [4, 4, 4, 3]
    whole = layers.attention_map(1, 2)
    assert difference(torch.cat([weights for _, weights in blocks], 1)[2], whole) < EXACT
    assert difference(layers[1].rows(slice(7, 8))[2], whole[7:8]) < EXACT


def test_what_is_kept_is_linear_in_the_length() -> None:
    layers = captured(model(), tokens(1, 40))
    for layer in layers:
        kept = [t for t in (*layer.call, layer.lse) if isinstance(t, Tensor)]
        assert sum(t.numel() for t in kept) < 40 * 4 * 16
        assert not any(t.requires_grad for t in kept)


def test_nothing_is_watched_afterwards() -> None:
    built = model()
    with pytest.raises(ZeroDivisionError), capture(built):
        raise ZeroDivisionError
    llama = stock.model("llama")
    before = type(llama.config)
    with pytest.raises(ZeroDivisionError), capture(llama):
        raise ZeroDivisionError
    assert attention._observers == []
    assert type(llama.config) is before
    for each in (built, llama):
        assert not each._forward_hooks
        assert not each._forward_pre_hooks


def test_calls_outside_of_the_model_are_not_its_layers() -> None:
    built = model()
    with capture(built) as layers, torch.no_grad():
        built(tokens(1, 5))
        stablemask.sink_attention(*torch.randn(3, 1, 1, 2, 4))
        model(seed=1)(tokens(1, 7))
    assert len(layers) == 2
    assert layers[0].num_rows == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: model(remedy="urpe"), "'urpe'"),
        (lambda: stock.model("falcon"), "falcon cannot run StableMask"),
    ],
)
def test_what_cannot_be_captured_says_so(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message), capture(make()):
        pass


def test_errors_name_what_is_allowed() -> None:
    with capture(model()) as layers, pytest.raises(ValueError, match="no forward pass"):
        layers.attention_map(0, 0)
    layers = captured(model(), tokens(1, 5))
    for wrong, allowed in (((2, 0), "layer: got 2; allowed: 0 … 1"), ((0, 4), "head: got 4; allowed: 0 … 3")):
        with pytest.raises(IndexError, match=allowed):
            layers.attention_map(*wrong)
    with pytest.raises(IndexError, match="sequence: got 1; allowed: 0 … 0"):
        layers.pseudo_mass(0, sequence=1)
    with pytest.raises(ValueError, match="block: got 0"):
        next(layers[0].blocks(block=0))
    with pytest.raises(TypeError, match="model: got Linear"), capture(torch.nn.Linear(2, 2)):  # type: ignore[arg-type]
        pass
