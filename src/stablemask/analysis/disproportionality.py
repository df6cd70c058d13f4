r"""Disproportional attention (Appendix A of the paper), on sources whose information is known exactly.

An attention layer is disproportional on an input when, for some i < n < N::

    Σ_{j≤i} Ã_nj  >  share_ni · Σ_{j≤n} Ã_nj + ε,     share_ni = I(X_≤i; X_{n+1}) / I(X_≤n; X_{n+1})

and its degree is the probability of such inputs. The paper's theorem about softCopyLast speaks of *weakly*
disproportional attention, which it does not define; its proof compares the left side with ε alone, because
I(X_≤i; X_{n+1} | X_n) = 0. Both are measured here, per head, as the paper's Ã has no heads.

With ε = 0 the definition divides by the row sum, so for given scores it is the same with a sink and without:
StableMask scales both sides by α_n. It only changes the verdict through what training makes of the scores.

Proposition 1 compares H(X_{n+1} | Ω^(l)_≤i), the entropy that is left when the states of a layer are known,
with H(X_{n+1} | X_≤i). Layers are those of a real decoder; all sequences are enumerated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stablemask.analysis.capture import capture
from stablemask.analysis.markov import MarkovSource, Rows, Sequences, entropy
from stablemask.model import StableMaskForCausalLM

PerInput = Annotated[Tensor, "L H S"]
PerLayer = Annotated[Tensor, "layers N-1 N-1"]

_SEQUENCES_AT_ONCE = 256
_SAME = 1e-12


def excess(weights: Annotated[Tensor, "... T T"], shares: Rows) -> Annotated[Tensor, "..."]:
    """The largest Σ_{j≤i} Ã_nj − share_ni · Σ_{j≤n} Ã_nj over i < n: what ε has to stay below.

    Args:
        weights: Attention after softmax; row n is what token n gives to each key, as ``capture`` returns it.
        shares: From ``MarkovSource.shares``; pairs that are NaN are left out. Zeros give the weak form.

    Returns:
        −∞ where every pair is left out.
    """
    length = weights.shape[-1]
    if length < 2 or shares.shape != (length, length) or weights.shape[-2] != length:
        got = f"{tuple(weights.shape)}, {tuple(shares.shape)}"
        raise ValueError(f"weights, shares: got shapes {got}; allowed: (…, T, T) and (T, T) with T ≥ 2")
    given = weights.double().cumsum(-1)
    over = given - shares * given[..., -1:]
    pairs = torch.ones(length, length, dtype=torch.bool).tril(-1) & ~shares.isnan()
    return over.masked_fill(~pairs, -torch.inf).flatten(-2).amax(-1)


@dataclass(frozen=True, eq=False)
class Disproportion:
    """The attention of a model on every input of a source.

    L layers, H heads, S sequences.

    Attributes:
        sequences: All inputs, the first N − 1 tokens.
        chance: Their probabilities.
        over: ``excess`` of each head on each input, by the definition.
        weak: The same with shares of 0: the largest Σ_{j≤i} Ã_nj over i < n.
    """

    sequences: Sequences
    chance: Annotated[Tensor, "S"]
    over: PerInput
    weak: PerInput

    def degree(self, epsilon: float = 0.0, *, weak: bool = False) -> Annotated[Tensor, "L H"]:
        """The probability of the inputs on which a head is disproportional."""
        if not epsilon >= 0:
            raise ValueError(f"epsilon: got {epsilon}; allowed: numbers ≥ 0")
        found = ((self.weak if weak else self.over) > epsilon).double() @ self.chance
        return found.clamp(max=1.0)

    def identical(self) -> Annotated[Tensor, "S"]:
        """Which inputs are one token again and again."""
        return (self.sequences == self.sequences[:, :1]).all(-1)


def disproportion(
    model: PreTrainedModel, source: MarkovSource, *, on_batch: Callable[[int], object] | None = None
) -> Disproportion:
    """Evaluate the definition on every input of a source.

    Args:
        model: Any model that ``capture`` can look into, with a vocabulary of at least V.
        source: What the inputs are drawn from.
        on_batch: Called with the number of sequences that are done.
    """
    _check_vocabulary(model, source)
    sequences = source.sequences(source.length - 1)
    shares = source.shares()
    over, weak = [], []
    for batch in sequences.split(_SEQUENCES_AT_ONCE):
        with capture(model) as layers, torch.no_grad():
            model(batch, use_cache=False)
        for s in range(len(batch)):
            weights = torch.stack([layer.rows(slice(None), sequence=s) for layer in layers])
            over.append(excess(weights, shares))
            weak.append(excess(weights, torch.zeros_like(shares)))
        if on_batch is not None:
            on_batch(len(batch))
    return Disproportion(
        sequences, source.probabilities(sequences), torch.stack(over, -1), torch.stack(weak, -1)
    )


def fit(
    model: PreTrainedModel,
    source: MarkovSource,
    *,
    steps: int = 300,
    batch_size: int = 128,
    learning_rate: float = 3e-3,
    on_step: Callable[[int], object] | None = None,
) -> float:
    """Train a small model on samples of a source with AdamW.

    Returns:
        How far its cross-entropy is above that of the source itself, in nats per token, exactly: the mean
        over every sequence, by its probability.
    """
    _check_vocabulary(model, source)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    model.train()
    for _ in range(steps):
        batch = source.sample(batch_size, generator)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if on_step is not None:
            on_step(1)
    model.eval()
    return _regret(model, source)


@dataclass(frozen=True, eq=False)
class Proposition:
    """Both sides of Proposition 1, in every layer. Layer 0 is the embeddings, the last is behind the norm.

    Attributes:
        source: The source.
        contextual: The last layer separates inputs whose next token has different distributions.
        mean: H(X_{n+1} | Ω_≤i).
        least: The smallest H(X_{n+1} | Ω_≤i = ω) over ω.
        most: The largest.
    """

    source: MarkovSource
    contextual: bool
    mean: PerLayer
    least: PerLayer
    most: PerLayer

    def slack(self) -> dict[str, float]:
        """Each statement as a number that is ≥ 0 where it holds, to rounding.

        ``1``: H(Ω_≤i) − H(X_≤i); ``2``: −|H(Ω_≤n) − H(X_≤n)|; ``3``: H(Ω_≤i = ω) − H(X_≤i); ``4``:
        −|H(Ω_≤n = ω) − H(X_≤n)|; ``shares``: I(X_≤i) / I(X_≤n) − I(Ω_≤i) / I(Ω_≤n), which the paper derives
        from them. Each the smallest over layers, i ≤ n and ω.
        """
        known = self.source.entropies()
        pairs = ~known.isnan()
        last = known.diagonal()
        means, leasts, mosts = (t.diagonal(dim1=1, dim2=2) for t in (self.mean, self.least, self.most))
        information = entropy(self.source.marginals()[1:]).unsqueeze(-1) - self.mean
        whole = information.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        ratio = torch.where(whole > _SAME, information / whole, torch.nan)
        shares = self.source.shares() - ratio
        return {
            "1": float((self.mean - known)[:, pairs].min()),
            "2": -float((means - last).abs().max()),
            "3": float((self.least - known)[:, pairs].min()),
            "4": -float(torch.maximum((leasts - last).abs(), (mosts - last).abs()).max()),
            "shares": float(shares[~shares.isnan()].min()),
        }

    def loss(self) -> Annotated[Tensor, "layers"]:
        """The largest H(X_{n+1} | Ω_≤n) − H(X_{n+1} | X_≤n) of each layer: what it has forgotten."""
        known = self.source.entropies().diagonal()
        return (self.mean.diagonal(dim1=1, dim2=2) - known).amax(-1)


def proposition(model: PreTrainedModel, source: MarkovSource) -> Proposition:
    """Enumerate all inputs of a source through the layers of a decoder of ours, and compare entropies."""
    _check_vocabulary(model, source)
    length = source.length - 1
    with torch.no_grad():
        found = model.base_model(source.sequences(length), use_cache=False, output_hidden_states=True)
    layers = [_entropies(source, states) for states in found.hidden_states]
    mean, least, most = (torch.stack(tables) for tables in zip(*layers, strict=True))
    return Proposition(source, _contextual(source, found.hidden_states[-1]), mean, least, most)


def steepen(model: StableMaskForCausalLM, factor: float = 1e4) -> None:
    """Make each row of a RoPE decoder look at itself alone where all tokens are the same.

    Keys become the queries times ``factor``: then the score of equal tokens is highest at distance 0, and the
    rest gets as little as one likes; in float32 it gets nothing at all, as the exponential underflows.
    """
    config = model.config
    if config.position != "rope" or config.num_key_value_heads != config.num_attention_heads:
        got = f"{config.position!r} positions, {config.num_key_value_heads} key heads"
        raise ValueError(f"model: got {got}; allowed: 'rope', {config.num_attention_heads} as of queries")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.copy_(factor * layer.self_attn.q_proj.weight)


class Collapsed(nn.Module):
    """A layer that forgets its newest token: each row is what the layer computes one row earlier.

    It is still layer-wise, and inputs that differ in their last token alone collapse into one: H(X_{n+1} |
    Ω_≤i) is then H(X_{n+1} | X_≤i−1).
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Annotated[Tensor, "B T width"], *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output, one row late."""
        return nn.functional.pad(self.layer(hidden, *args, **kwargs)[:, :-1], (0, 0, 1, 0))


def _entropies(source: MarkovSource, states: Annotated[Tensor, "S T width"]) -> tuple[Rows, Rows, Rows]:
    """Mean, least and largest entropy of X_{n+1} over the states of the first i tokens."""
    length = source.length - 1
    tables = torch.full((3, length, length), torch.nan, dtype=torch.float64)
    classes = torch.zeros(1, dtype=torch.long)
    for i in range(1, length + 1):
        prefixes = source.sequences(i)
        own = _clusters(states[:: source.symbols ** (length - i), i - 1])
        pairs = torch.stack([classes.repeat_interleave(source.symbols), own], 1)
        classes = pairs.unique(dim=0, return_inverse=True)[1]
        chance = source.probabilities(prefixes)
        mass = torch.zeros(int(classes.max()) + 1, dtype=torch.float64).index_add(0, classes, chance)
        occurs = mass > 0
        for n in range(i, length + 1):
            joint = chance.unsqueeze(-1) * source.passage(i, n + 1)[prefixes[:, -1]]
            summed = torch.zeros(len(mass), source.symbols, dtype=torch.float64).index_add(0, classes, joint)
            found = entropy(summed[occurs] / mass[occurs].unsqueeze(-1))
            tables[:, n - 1, i - 1] = torch.stack([mass[occurs] @ found, found.min(), found.max()])
    return tables[0], tables[1], tables[2]


def _contextual(source: MarkovSource, states: Annotated[Tensor, "S T width"]) -> bool:
    """Whether equal states of the last layer imply equal distributions of the next token."""
    length = source.length - 1
    for n in range(1, length + 1):
        prefixes = source.sequences(n)
        occurs = source.probabilities(prefixes) > 0
        own = _clusters(states[:: source.symbols ** (length - n), n - 1])[occurs]
        coming = source.steps[n - 1][prefixes[occurs, -1]]
        index = own.unsqueeze(-1).expand_as(coming)
        empty = torch.zeros(int(own.max()) + 1, source.symbols, dtype=torch.float64)
        low, high = (empty.scatter_reduce(0, index, coming, r, include_self=False) for r in ("amin", "amax"))
        if float((high - low).max()) > _SAME:
            return False
    return True


def _clusters(states: Annotated[Tensor, "S width"]) -> Annotated[Tensor, "S"]:
    """A number for each state, the same where two are equal but for rounding.

    They are told apart on a random line: distinct ones lie some 1e-8 of its length apart, equal ones 1e-15.
    """
    direction = torch.randn(states.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    places, order = (states.double() @ direction).sort()
    gaps = places.diff() > _SAME * places.abs().max()
    return torch.zeros_like(order).scatter(0, order, nn.functional.pad(gaps.long().cumsum(0), (1, 0)))


@torch.no_grad()
def _regret(model: PreTrainedModel, source: MarkovSource) -> float:
    sequences = source.sequences()
    chance = source.probabilities(sequences)
    total = 0.0
    for ids, weight in zip(sequences.split(4096), chance.split(4096), strict=True):
        said = model(ids[:, :-1], use_cache=False).logits.double().log_softmax(-1)
        surprise = -said.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1).mean(-1)
        total += float(weight @ surprise)
    return total - float(source.entropies().diagonal().mean())


def _check_vocabulary(model: PreTrainedModel, source: MarkovSource) -> None:
    if model.config.vocab_size < source.symbols:
        raise ValueError(
            f"source: got {source.symbols} symbols; allowed: up to the vocabulary of the model, "
            f"{model.config.vocab_size}"
        )
