"""One call of the operation on one back end, held against the second oracle: out, lse' and every gradient."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stablemask import PseudoScores, available_backends
from stablemask.testing import (
    Deviation,
    Example,
    Operation,
    Results,
    Terms,
    attend,
    compare,
    evaluate,
    plain_errors,
    term_norms,
)
from tests import oracle


class Truth:
    """What the second oracle says about an example, and how accurate a back end has to be there."""

    def __init__(self, example: Example, wrt: Sequence[str] | None = None) -> None:
        dense: list[oracle.Dense] = []

        def exact(e: Example) -> tuple[Tensor, Tensor]:
            dense.append(ask_oracle(e))
            return dense[0].out, dense[0].lse

        self.example = example
        self.wrt = wrt
        self.expected: Results = evaluate(exact, example.double(), wrt)
        options, found = example.options, dense[0]
        scale = options.get("scale")
        terms = Terms(
            weights=found.weights.detach(),
            sink_mass=found.mass.detach(),
            slope=found.slope.detach(),
            distance=found.distance[:, None],
            scale=1 / math.sqrt(example.q.shape[3]) if scale is None else scale,
        )
        self.norms = term_norms(terms, example)
        self.plain = plain_errors(example, causal=options.get("causal", True))

    def deviations(self, operation: Operation) -> list[Deviation]:
        actual = evaluate(operation, self.example, self.wrt)
        return compare(actual, self.expected, self.plain, dtype=self.example.q.dtype, norms=self.norms)

    def check(self, operation: Operation) -> None:
        """Fail with the whole list if one tensor is outside its budget."""
        deviations = self.deviations(operation)
        assert all(d.ok for d in deviations), "\n".join(map(str, deviations))

    def check_backend(self, backend: str) -> None:
        self.check(lambda e: attend(e, backend))


def ask_oracle(example: Example) -> oracle.Dense:
    """The second oracle on the raw arguments of an example."""
    options = dict(example.options)
    scores = example.sink
    if isinstance(scores, PseudoScores):
        gammas = paper_gammas(scores, example.q.shape[1])
        options |= {"gammas": gammas, "horizon": scores.horizon, "base": scores.base}
    else:
        options["sink"] = scores
    return oracle.attention(example.q, example.k, example.v, **options)


def paper_gammas(scores: PseudoScores, heads: int) -> Tensor:
    """γ of every head by ALiBi's rule, written out again: the published recursion on head counts."""

    def exponents(n: int) -> list[float]:
        if math.log2(n).is_integer():
            return [8 / n * (h + 1) for h in range(n)]
        closest = 2 ** math.floor(math.log2(n))
        return exponents(closest) + exponents(2 * closest)[0::2][: n - closest]

    if isinstance(scores.gamma, tuple):
        return torch.tensor(scores.gamma, dtype=torch.float64)
    if not scores.headwise:
        return torch.full((heads,), scores.gamma, dtype=torch.float64)
    return torch.tensor([scores.gamma**e for e in exponents(heads)], dtype=torch.float64)


def claims(example: Example, wrt: Sequence[str] = ()) -> dict[str, str | None]:
    """What ``available_backends`` says about an example whose tensors in ``wrt`` require gradients."""
    leaves = {name: example.tensors()[name].detach().requires_grad_() for name in wrt}
    e = example.replace(leaves)
    return available_backends(e.q, e.k, e.v, e.sink, **e.options, return_lse=e.return_lse)


def promised_on_cpu(example: Example, wrt: Sequence[str] = ()) -> set[str]:
    """The back ends that have to serve an example on CPU, gradients of ``wrt`` included."""
    options, promised = example.options, {"reference"}
    if "softcap" not in options:
        if not example.return_lse:
            promised.add("portable")
        equal_widths = example.v.shape[3] == example.q.shape[3]
        if equal_widths and options.get("scale", 1.0) > 0 and not {"bias", "alibi_slopes"} & set(wrt):
            promised.add("cpu_flash")
    if not wrt and example.q.numel() and example.k.numel():
        promised.add("flex")
    return promised


def check_every_backend(example: Example, wrt: Sequence[str] = ()) -> None:
    """Every back end but Triton, which has its own tests, serves what it promises, within the budget."""
    claimed = {name for name, reason in claims(example, wrt).items() if reason is None} - {"triton"}
    promised = promised_on_cpu(example, wrt)
    assert promised <= claimed, f"{promised - claimed} refuse: {claims(example, wrt)}"
    truth = Truth(example, wrt)
    for name in sorted(claimed):
        try:
            truth.check_backend(name)
        except AssertionError as error:
            raise AssertionError(f"back end {name}\n{error}") from error
