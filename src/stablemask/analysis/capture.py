"""What attention does with a text: queries, keys, lse and σ of every layer, and maps on demand.

::

    with capture(model) as layers:
        model(input_ids)
    layers.attention_map(0, 3)     # (T, T), layer 0, head 3
    layers.pseudo_mass(0)          # (H, T), the share 1 − α of every row that no token gets

The model runs as it always does; what is kept of each layer has the size of its queries and keys, O(T·D),
plus the learned bias of T5 positions, which is T × T and one for all layers. A weight is then exp(score −
lse'), for as many rows at a time as one likes. It works in ``stablemask.model``, in every architecture that
``stablemask.hf`` supports, and in the same architectures without StableMask: those run for the time being
through the same operation with σ = −∞, which is plain attention.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, NoReturn, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stablemask import hf
from stablemask.attention import observing
from stablemask.backends._call import Call, additive_bias, kept_queries, visible
from stablemask.hf.config import is_switched
from stablemask.model import StableMaskConfig
from stablemask.shapes import Keys, Queries, RowLogits

Weights = Annotated[Tensor, "H rows T"]

BLOCK = 128
"""Rows of weights that exist at a time where a caller does not say otherwise."""


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """The attention of one layer in one forward pass.

    Rows are the tokens of the pass, columns the keys they could see, those of a cache included. Artificial
    tokens are neither: what they get is ``artificial_mass``.

    Attributes:
        call: The arguments of the operation, without values.
        lse: lse' of every row, sink included, artificial rows included.
        artificial: How many keys in front are artificial tokens.
    """

    call: Call
    lse: RowLogits
    artificial: int = 0

    @property
    def q(self) -> Queries:
        """Queries, after rotation; artificial rows included."""
        return self.call.q

    @property
    def k(self) -> Keys:
        """Keys, after rotation; artificial ones included."""
        return self.call.k

    @property
    def sigma(self) -> RowLogits:
        """σ of every row, artificial rows included; −∞ where the model has no sink."""
        sink = self.call.sink_logits()
        sink = self.lse.new_full((1, 1, 1), -torch.inf) if sink is None else sink
        return sink.expand(self.lse.shape)

    @property
    def num_heads(self) -> int:
        """H."""
        return self.q.shape[1]

    @property
    def num_rows(self) -> int:
        """T: rows of real tokens."""
        return self.q.shape[2] - self._artificial_rows

    @property
    def _artificial_rows(self) -> int:
        return self.artificial if self.q.shape[2] == self.k.shape[2] else 0  # else the cache has them already

    def attention_map(self, head: int, *, sequence: int = 0) -> Annotated[Tensor, "T T"]:
        """The weights of one head; row i holds what token i gives to each key, and sums to α_i."""
        head = _index("head", head, self.num_heads)
        return self._weights(slice(0, self.num_rows), [head], sequence)[0, :, self.artificial :]

    def rows(self, rows: slice, *, sequence: int = 0) -> Weights:
        """The weights of some rows in all heads."""
        return self._weights(rows, list(range(self.num_heads)), sequence)[:, :, self.artificial :]

    def blocks(self, *, sequence: int = 0, block: int = BLOCK) -> Iterator[tuple[slice, Weights]]:
        """All rows, ``block`` of them at a time: (which rows, their weights in all heads)."""
        if block < 1:
            raise ValueError(f"block: got {block}; allowed are integers ≥ 1")
        for start in range(0, self.num_rows, block):
            rows = slice(start, min(start + block, self.num_rows))
            yield rows, self.rows(rows, sequence=sequence)

    def pseudo_mass(self, *, sequence: int = 0) -> Annotated[Tensor, "H T"]:
        """1 − α: the share of every row that goes to σ; 0 on padding."""
        sequence = _index("sequence", sequence, self.lse.shape[0])
        lse, sigma = (t[sequence, :, self._artificial_rows :] for t in (self.lse, self.sigma))
        share = torch.where(sigma == -torch.inf, 0.0, torch.exp(sigma - lse))
        kept = kept_queries(self.call)
        return share if kept is None else share * kept[min(sequence, len(kept) - 1), self._artificial_rows :]

    def artificial_mass(self, *, sequence: int = 0) -> Annotated[Tensor, "H T"]:
        """The share of every row that goes to artificial tokens; 0 where there are none."""
        heads = list(range(self.num_heads))
        found = self.lse.new_zeros(self.num_heads, self.num_rows)
        for start in range(0, self.num_rows if self.artificial else 0, BLOCK):
            rows = slice(start, min(start + BLOCK, self.num_rows))
            found[:, rows] = self._weights(rows, heads, sequence)[:, :, : self.artificial].sum(-1)
        return found

    def _weights(self, rows: slice, heads: list[int], sequence: int) -> Annotated[Tensor, "heads rows Tk"]:
        """exp(score − lse') for real rows ``rows``; every key, artificial ones first."""
        start, stop, _ = rows.indices(self.num_rows)
        rows = slice(start + self._artificial_rows, stop + self._artificial_rows)
        sequence = _index("sequence", sequence, self.q.shape[0])
        call, dtype = self.call, self.call.accumulate_dtype
        groups = [head * call.k.shape[1] // call.q.shape[1] for head in heads]
        q, k = call.q[sequence, heads, rows].to(dtype), call.k[sequence, groups].to(dtype)
        scores = q @ k.transpose(-1, -2) * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        bias, mask = additive_bias(call, rows), visible(call, rows)
        if bias is not None:
            bias = bias[min(sequence, len(bias) - 1)]
            scores = scores + (bias if bias.shape[0] == 1 else bias[heads])
        weights = torch.exp(scores - self.lse[sequence, heads, rows].unsqueeze(-1))
        if mask is not None:
            weights = weights.masked_fill(~mask[min(sequence, len(mask) - 1)], 0.0)
        return weights


class Capture(Sequence[LayerAttention]):
    """The layers of the last forward pass, in order. Filled when the pass is over."""

    def __init__(self) -> None:
        self._layers: list[LayerAttention] = []

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> LayerAttention: ...

    @overload
    def __getitem__(self, index: slice) -> list[LayerAttention]: ...

    def __getitem__(self, index: int | slice) -> LayerAttention | list[LayerAttention]:
        if isinstance(index, slice):
            return self._layers[index]
        if not self._layers:
            raise ValueError(
                "layers: no forward pass was captured; call the model itself inside of `with capture`"
            )
        return self._layers[_index("layer", index, len(self._layers))]

    def attention_map(self, layer: int, head: int, *, sequence: int = 0) -> Annotated[Tensor, "T T"]:
        """As ``LayerAttention.attention_map``."""
        return self[layer].attention_map(head, sequence=sequence)

    def pseudo_mass(self, layer: int, *, sequence: int = 0) -> Annotated[Tensor, "H T"]:
        """As ``LayerAttention.pseudo_mass``."""
        return self[layer].pseudo_mass(sequence=sequence)


@contextmanager
def capture(model: PreTrainedModel) -> Iterator[Capture]:
    """Keep queries, keys, lse and σ of every layer of the model's forward passes in this block.

    Only the last call of ``model`` is kept; of one that a streaming cache cuts into pieces, the last piece.
    Tensors are detached. Weights are those before dropout. A model without StableMask computes its attention
    by the operation of this library inside of the block, and by its own afterwards; to anything but rounding
    they are the same.

    Args:
        model: One of ``stablemask.model``, or a causal language model of an architecture that
            ``stablemask.hf`` supports, with StableMask or without.

    Yields:
        The layers: a sequence of ``LayerAttention``, empty until a pass is over.

    Raises:
        IndexError: A layer, head or sequence that is not there.
        ValueError: The architecture is not supported; the message says why. The remedy URPE is not, because
            its factors make of the weights something that is no distribution.

    Examples:
        >>> with capture(model) as layers:
        ...     model(input_ids)
        >>> layers.attention_map(layer=0, head=3).shape == (input_ids.shape[1],) * 2
        True
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: got {type(model).__name__}; allowed is a PreTrainedModel of transformers")
    ours = isinstance(model.config, StableMaskConfig)
    if ours and model.config.remedy == "urpe":
        _reject("model", "the remedy 'urpe'", "remedies whose weights are a distribution: all others")
    artificial = model.config.num_artificial if ours else 0
    recorder = _Recorder(model.config.num_hidden_layers, artificial)
    with ExitStack() as undo:
        if not ours and not is_switched(model.config):
            hf.enable(model, gamma=0.0, horizon=1, base=-torch.inf)
            undo.callback(hf.disable, model)
        undo.callback(model.register_forward_pre_hook(recorder.begin).remove)
        undo.callback(model.register_forward_hook(recorder.end).remove)
        undo.enter_context(observing(recorder.see))
        yield recorder.capture


class _Recorder:
    """Collects the calls of the operation between the beginning and the end of a forward pass."""

    def __init__(self, num_layers: int, artificial: int) -> None:
        self.capture = Capture()
        self._num_layers = num_layers
        self._artificial = artificial
        self._running: list[LayerAttention] | None = None
        self._thread: int | None = None

    def begin(self, *_: object) -> None:
        self._running, self._thread = [], threading.get_ident()

    def see(self, call: Call, lse: RowLogits) -> None:
        if self._running is None or threading.get_ident() != self._thread:
            return
        if self._artificial and (call.documents is not None or call.key_positions is not None):
            got = "packed documents, or a streaming cache, with artificial tokens"
            _reject("model", got, "one document per sequence, and a cache that keeps every key")
        detached = (t.detach() if isinstance(t, Tensor) else t for t in call._replace(v=call.v[..., :0]))
        call = Call._make(detached)
        self._running.append(LayerAttention(call, lse.detach(), self._artificial))

    def end(self, *_: object) -> None:
        if self._running is None:  # a streaming cache cut the pass into pieces, which are passes themselves
            return
        if not self._running or len(self._running) % self._num_layers:
            got = f"{len(self._running)} calls of the attention in a pass"
            _reject("model", got, f"one in each of its {self._num_layers} layers, not compiled")
        self.capture._layers = self._running[-self._num_layers :]  # noqa: SLF001 - nothing else fills it
        self._running = None


def _index(name: str, index: int, size: int) -> int:
    if not -size <= index < size:
        raise IndexError(f"{name}: got {index}; allowed: 0 … {size - 1}")
    return index % size


def _reject(name: str, got: str, allowed: str) -> NoReturn:
    raise ValueError(f"{name}: got {got}; allowed: {allowed}")
