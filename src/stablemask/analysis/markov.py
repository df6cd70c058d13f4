r"""Sources of tokens whose information is known exactly: Markov chains given as matrices.

A source is a distribution of N tokens X_1 … X_N over V symbols, in which X_{m+1} depends on X_m alone. Then
what a prefix says about a later token is what its last token says::

    I(X_≤i; X_{n+1}) = I(X_i; X_{n+1}),     i ≤ n < N

which is a sum over V × V pairs, whatever N is. Probabilities and entropies are float64, in nats. Tables of
rows n and columns i are 0-based: row n − 1, column i − 1, as in an attention map of the first N − 1 tokens.
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Annotated

import torch
from torch import Tensor

Rows = Annotated[Tensor, "N-1 N-1"]
Sequences = Annotated[Tensor, "S T"]

_MOST_SEQUENCES = 1 << 20


@dataclass(frozen=True, eq=False)
class MarkovSource:
    """N tokens over V symbols.

    Attributes:
        start: Distribution of X_1.
        steps: ``steps[m − 1]`` is the matrix from X_m to X_{m+1}: rows are distributions.

    Examples:
        >>> source = markov_source(torch.tensor([[0.9, 0.1], [0.1, 0.9]]), length=4)
        >>> source.information()[2].tolist()  # I(X_1; X_4), I(X_2; X_4), I(X_3; X_4)
        [0.14..., 0.22..., 0.36...]
    """

    start: Annotated[Tensor, "V"]
    steps: Annotated[Tensor, "N-1 V V"]

    def __post_init__(self) -> None:
        if self.start.ndim != 1 or self.steps.shape[1:] != 2 * self.start.shape or not len(self.steps):
            shapes = f"{tuple(self.start.shape)} and {tuple(self.steps.shape)}"
            raise ValueError(f"start, steps: got shapes {shapes}; allowed: (V,) and (N − 1, V, V) with N ≥ 2")
        for name in ("start", "steps"):
            table = getattr(self, name).double()
            sums = table.sum(-1)
            if bool((table < 0).any()) or not torch.allclose(sums, torch.ones_like(sums), atol=1e-6):
                raise ValueError(f"{name}: got {getattr(self, name).tolist()}; allowed: rows ≥ 0 of sum 1")
            object.__setattr__(self, name, table / sums.unsqueeze(-1))

    @property
    def symbols(self) -> int:
        """V."""
        return self.start.shape[0]

    @property
    def length(self) -> int:
        """N."""
        return self.steps.shape[0] + 1

    def marginals(self) -> Annotated[Tensor, "N V"]:
        """The distribution of every token."""
        found = [self.start]
        for step in self.steps:
            found.append(found[-1] @ step)
        return torch.stack(found)

    def passage(self, first: int, last: int) -> Annotated[Tensor, "V V"]:
        """p(X_last | X_first), counted from 1."""
        matrix = torch.eye(self.symbols, dtype=torch.float64)
        for step in self.steps[first - 1 : last - 1]:
            matrix = matrix @ step
        return matrix

    def information(self) -> Rows:
        """I(X_≤i; X_{n+1}) for i ≤ n < N, NaN elsewhere."""
        marginals = self.marginals()
        table = torch.full((self.length - 1, self.length - 1), torch.nan, dtype=torch.float64)
        for n in range(1, self.length):
            onward = torch.eye(self.symbols, dtype=torch.float64)
            for i in range(n, 0, -1):
                onward = self.steps[i - 1] @ onward  # p(X_{n+1} | X_i)
                table[n - 1, i - 1] = _information(marginals[i - 1], onward, marginals[n])
        return table

    def entropies(self) -> Rows:
        """H(X_{n+1} | X_≤i) for i ≤ n < N, NaN elsewhere."""
        marginals = self.marginals()
        return entropy(marginals[1:]).unsqueeze(-1) - self.information()

    def shares(self) -> Rows:
        """I(X_≤i; X_{n+1}) / I(X_≤n; X_{n+1}), NaN where i > n and where the denominator is 0."""
        information = self.information()
        whole = information.diagonal().unsqueeze(-1)
        return torch.where(whole > 0, information / whole, torch.nan)

    def sequences(self, length: int | None = None) -> Sequences:
        """Every sequence of the first ``length`` tokens, N by default, in lexicographic order."""
        length = self.length if length is None else length
        if self.symbols**length > _MOST_SEQUENCES:
            got = f"{self.symbols} symbols, {length} tokens"
            raise ValueError(f"length: got {got}; allowed: at most {_MOST_SEQUENCES} sequences to enumerate")
        counted = torch.arange(self.symbols**length).unsqueeze(-1)
        return counted // self.symbols ** torch.arange(length - 1, -1, -1) % self.symbols

    def probabilities(self, sequences: Sequences) -> Annotated[Tensor, "S"]:
        """p(X_≤T = x) of each sequence."""
        chance = self.start[sequences[:, 0]]
        for step, (left, right) in zip(
            self.steps, zip(sequences.T, sequences.T[1:], strict=False), strict=False
        ):
            chance = chance * step[left, right]
        return chance

    def sample(self, count: int, generator: torch.Generator) -> Annotated[Tensor, "count N"]:
        """So many sequences of all N tokens."""
        tokens = [torch.multinomial(self.start, count, replacement=True, generator=generator)]
        for step in self.steps:
            tokens.append(torch.multinomial(step[tokens[-1]], 1, generator=generator).squeeze(-1))
        return torch.stack(tokens, 1)

    def anisotropy(self) -> float:
        """How far the source is from causally isotropic: 0 if it is.

        The largest difference, over n, sets Λ of tokens up to n and values x_Λ, x'_Λ that occur, between
        H(X_{n+1} | X_Λ = x_Λ) and H(X_{n+1} | X_Λ = x'_Λ). By enumeration, as the paper defines it.
        """
        worst = 0.0
        for n in range(1, self.length):
            joint = self.probabilities(self.sequences(n + 1)).view([self.symbols] * (n + 1))
            for size in range(1, n + 1):
                for kept in combinations(range(n), size):
                    dropped = [d for d in range(n) if d not in kept]
                    table = (joint.sum(dropped) if dropped else joint).reshape(-1, self.symbols)
                    chance = table.sum(-1)
                    found = entropy(table[chance > 0] / chance[chance > 0].unsqueeze(-1))
                    worst = max(worst, float(found.max() - found.min()))
        return worst


def markov_source(
    matrix: Annotated[Tensor, "V V"], length: int, start: Annotated[Tensor, "V"] | None = None
) -> MarkovSource:
    """The source with the same matrix at every step.

    Args:
        matrix: Row x is the distribution of the token after x.
        length: N.
        start: Distribution of the first token; uniform by default.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"matrix: got shape {tuple(matrix.shape)}; allowed: (V, V)")
    if length < 2:
        raise ValueError(f"length: got {length}; allowed: from 2 on")
    if start is None:
        start = torch.full(matrix.shape[:1], 1 / matrix.shape[0], dtype=torch.float64)
    return MarkovSource(start, matrix.expand(length - 1, -1, -1))


def soft_copy_last(symbols: int, length: int) -> MarkovSource:
    """The paper's softCopyLast: token n is token n − 1 with probability 1 − e^−n, else random, as token 1 is.

    A random token may be the last one again.
    """
    if symbols < 2 or length < 2:
        raise ValueError(f"symbols, length: got {symbols}, {length}; allowed: both from 2 on")
    random = torch.exp(-torch.arange(2.0, length + 1, dtype=torch.float64))[:, None, None]
    uniform = torch.full((symbols, symbols), 1 / symbols, dtype=torch.float64)
    copy = torch.eye(symbols, dtype=torch.float64)
    return MarkovSource(uniform[0], (1 - random) * copy + random * uniform)


def identical_probability(source: MarkovSource) -> float:
    """The probability that all N tokens are the same."""
    return float((source.start * source.steps.diagonal(dim1=-2, dim2=-1).prod(0)).sum())


def entropy(chances: Annotated[Tensor, "... V"]) -> Annotated[Tensor, "..."]:
    """H of each distribution, in nats."""
    surprise: Tensor = torch.special.xlogy(chances, chances)
    return -surprise.sum(-1)


def _information(
    left: Annotated[Tensor, "V"], passage: Annotated[Tensor, "V V"], right: Annotated[Tensor, "V"]
) -> Annotated[Tensor, ""]:
    """I from p(x), p(y | x) and p(y), as a sum of terms ≥ 0, so that a small I keeps its digits."""
    seen = right > 0
    excess = passage[:, seen] / right[seen] - 1
    terms: Tensor = torch.special.xlog1py(1 + excess, excess) - excess
    return (left.unsqueeze(-1) * right[seen] * terms).sum().clamp(min=0)
