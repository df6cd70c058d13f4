"""What tests and benchmarks share: inputs, the error budget, and one comparison of out, lse', all gradients.

The budget is derived, not chosen. A tensor x may be as wrong as plain causal attention in that dtype::

    ‖x − x64‖ / ‖x64‖  ≤  2 · (the same of stock scaled_dot_product_attention)  +  2·eps(dtype)

x64 is computed in float64 from the inputs *after* they were rounded to the dtype. The error is relative, so
outputs near 1e-9 under a strong sink meet the same standard as outputs near 1. Five clarifications make the
rule apply everywhere:

* **Counterparts.** dsink is made of rowsum(dout ⊙ out'), so its yardstick is that of out. dbias and
  dalibi_slopes are sums of dS, and dq is dS·k, so theirs is that of dq. These are often a few numbers, which
  scatter more than the norm of many: their budget doubles. Stock attention returns no lse. It is a float32
  number even in 16-bit calls, where kernels take exponentials to about 14 bits: lse' may be off by 2⁻¹³
  there, elsewhere by 4·eps. A 16-bit lse is too coarse.
* **Sums that cancel.** A sum of few random terms may be near 0, and then its relative error has no bound;
  dq of a row with one key is a difference of equal numbers. A sum cannot be more accurate than its terms, so
  the root of the sum of the squared terms replaces ‖x64‖ where it is larger (``term_norms``). For terms of
  random sign the two are equal on average.
* **Logits.** A logit of size L in float32 is known to eps·L/2, and exp makes that a relative error:
  eps(float32)·max |lse'| over the rows that see a key is added, as the root of the sum of squares. Rows with
  one key are exact in plain attention, whose softmax is then 1: the yardstick is at least eps(float32).
* **float64.** There the truth is a float64 number too, as wrong as what it judges: the budget doubles.
* **Infinities and NaN** must sit at exactly the same places; finite entries are then compared. A number below
  the smallest subnormal of the dtype may become zero.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stablemask.attention import sink_attention, stable_attention
from stablemask.backends._call import accumulate_dtype
from stablemask.pseudo import PseudoScores
from stablemask.shapes import Keys, Output, Queries, RowLogits, Sink, Values

Layout = Literal["contiguous", "bthd", "qkv", "strided", "expanded"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "bthd", "qkv", "strided", "expanded")


def make_qkv(
    generator: torch.Generator,
    *,
    batch: int = 2,
    heads: int = 6,
    kv_heads: int = 3,
    num_queries: int = 11,
    num_keys: int = 13,
    dim: int = 5,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: Layout = "contiguous",
    size: float = 1.0,
) -> tuple[Queries, Keys, Values]:
    """Random q, k, v whose sizes all differ, so that no two dimensions can be mistaken for one another.

    Args:
        generator: A CPU generator; the numbers do not depend on the device.
        batch: B.
        heads: H.
        kv_heads: G.
        num_queries: Tq.
        num_keys: Tk.
        dim: D.
        value_dim: Dv; D by default.
        dtype: Of all three.
        device: Of all three.
        layout: How they lie in memory. ``contiguous``; ``bthd``: [B, T, H, D] seen as [B, H, T, D]; ``qkv``:
            slices of one fused projection, q of its last Tq rows; ``strided``: every other number of the last
            dimension; ``expanded``: k and v of one head seen as many, with stride 0.
        size: Standard deviation of the numbers.
    """
    value_dim = dim if value_dim is None else value_dim
    shapes = ((heads, num_queries, dim), (kv_heads, num_keys, dim), (kv_heads, num_keys, value_dim))

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * size).to(device, dtype)

    if layout == "contiguous":
        q, k, v = (draw(batch, *shape) for shape in shapes)
    elif layout == "bthd":
        q, k, v = (draw(batch, t, h, d).transpose(1, 2) for h, t, d in shapes)
    elif layout == "strided":
        q, k, v = (draw(batch, h, t, 2 * d)[..., ::2] for h, t, d in shapes)
    elif layout == "expanded":
        q = draw(batch, *shapes[0])
        k, v = (draw(batch, 1, t, d).expand(batch, h, t, d) for h, t, d in shapes[1:])
    else:
        widths = [h * d for h, _, d in shapes]
        parts = torch.split(draw(batch, max(num_queries, num_keys), sum(widths)), widths, -1)
        q, k, v = (
            part.reshape(batch, part.shape[1], h, d).transpose(1, 2)[:, :, part.shape[1] - t :]
            for part, (h, t, d) in zip(parts, shapes, strict=True)
        )
    return q, k, v


@dataclasses.dataclass(frozen=True)
class Example:
    """One call of the operation together with the gradients that come back into out and lse'.

    ``sink`` is what ``sink_attention`` takes, or a ``PseudoScores`` for ``stable_attention``. ``options`` are
    their other keyword arguments, without ``backend``.
    """

    q: Queries
    k: Keys
    v: Values
    sink: PseudoScores | Sink | float | None = None
    grad_out: Output | None = None
    grad_lse: RowLogits | None = None
    return_lse: bool = True
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """The floating-point tensors of the call by the name of their argument."""
        given = {"q": self.q, "k": self.k, "v": self.v, "sink": self.sink, **self.options}
        return {name: t for name, t in given.items() if isinstance(t, Tensor) and t.is_floating_point()}

    def replace(self, tensors: Mapping[str, Tensor]) -> "Example":
        """The same call on other tensors."""
        own = {name: tensors[name] for name in ("q", "k", "v", "sink") if name in tensors}
        options = {name: tensors.get(name, value) for name, value in self.options.items()}
        return dataclasses.replace(self, **own, options=options)  # type: ignore[arg-type]

    def double(self) -> "Example":
        """The same call in float64, on the same numbers."""
        return self.replace({name: t.double() for name, t in self.tensors().items()})


Results = dict[str, Tensor]
Operation = Callable[[Example], tuple[Output, RowLogits | None]]


def make_gradients(example: Example, generator: torch.Generator) -> Example:
    """The example with random gradients to send back into out, and into lse' where it is returned."""
    q, v = example.q, example.v
    out = torch.randn((*q.shape[:3], v.shape[3]), generator=generator).to(q.device, q.dtype)
    lse = torch.randn(q.shape[:3], generator=generator).to(q.device, accumulate_dtype(q.dtype))
    return dataclasses.replace(example, grad_out=out, grad_lse=lse if example.return_lse else None)


def attend(example: Example, backend: str | None = None) -> tuple[Output, RowLogits | None]:
    """The call of an example through ``stable_attention`` or ``sink_attention``."""
    operation: Any = stable_attention if isinstance(example.sink, PseudoScores) else sink_attention
    options = {**example.options, "return_lse": example.return_lse, "backend": backend}
    result = operation(example.q, example.k, example.v, example.sink, **options)
    return result if example.return_lse else (result, None)


def evaluate(operation: Operation, example: Example, wrt: Sequence[str] | None = None) -> Results:
    """out, lse' and, where gradients are sent back, the gradient "d…" of every tensor named in ``wrt``.

    By default that is every floating-point tensor of the call. Rows whose lse' is infinite send nothing back.
    """
    sent = example.grad_out is not None or example.grad_lse is not None
    names = list(example.tensors() if wrt is None else wrt) if sent else []
    leaves = {name: example.tensors()[name].detach().requires_grad_() for name in names}
    out, lse = operation(example.replace(leaves))
    results = {"out": out.detach()} if lse is None else {"out": out.detach(), "lse": lse.detach()}
    loss = out.new_zeros(())
    if example.grad_out is not None:
        loss = loss + (out * example.grad_out).sum(dtype=accumulate_dtype(out.dtype))
    if example.grad_lse is not None and lse is not None:
        loss = loss + (torch.where(lse.isfinite(), lse, 0.0) * example.grad_lse).sum()
    if names and loss.requires_grad:
        wanted = list(leaves.values())
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        results |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return results


class Terms(NamedTuple):
    """The dense quantities in float64 from which ``term_norms`` bounds how far sums may cancel."""

    weights: Tensor  # (B, H, Tq, Tk), softmax with the sink in the denominator
    sink_mass: Tensor  # (B, H, Tq), the share of the sink
    slope: Tensor | float = 1.0  # (B, H, Tq, Tk), d(score after softcap) / d(score before)
    distance: Tensor | float = 0.0  # broadcastable to (B, H, Tq, Tk), P_k − P_q
    scale: float = 1.0


def term_norms(terms: Terms, example: Example) -> dict[str, float]:
    """For every tensor of a comparison, √Σt² over the terms t whose sum it is: ‖x‖ if nothing cancelled."""
    finite = example.double().replace(
        {name: t.double().nan_to_num(0, 0, 0) for name, t in example.tensors().items()}
    )
    repeats = finite.q.shape[1] // max(finite.k.shape[1], 1)
    q, k, v = (finite.q, *(t.repeat_interleave(repeats, 1) for t in (finite.k, finite.v)))
    w, slope = terms.weights, terms.slope * terms.scale
    products = q.square() @ k.square().mT * terms.scale**2  # (B, H, Tq, Tk), squared terms of each score
    norms = {"out": w.square() @ v.square(), "lse": 1 + (w.square() * products).sum(-1)}
    if finite.grad_out is None and finite.grad_lse is None:
        return {name: math.sqrt(float(t.sum())) for name, t in norms.items()}
    dout = v.new_zeros(*q.shape[:3], v.shape[3]) if finite.grad_out is None else finite.grad_out.double()
    dlse = q.new_zeros(q.shape[:3]) if finite.grad_lse is None else finite.grad_lse.double()
    ds = w.square() * (dout.square() @ v.square().mT + dlse.square().unsqueeze(-1))
    norms |= {
        "dq": (ds * slope**2) @ k.square(),
        "dk": (ds * slope**2).mT @ q.square(),
        "dv": w.square().mT @ dout.square(),
        "dsink": terms.sink_mass.square() * ((norms["out"] * dout.square()).sum(-1) + dlse.square()),
        "dbias": ds,
        "dalibi_slopes": ds * torch.as_tensor(terms.distance).double().square(),
    }
    return {name: math.sqrt(float(t.sum())) for name, t in norms.items()}


def plain_errors(example: Example, *, causal: bool = True) -> dict[str, float]:
    """The yardstick: relative errors of stock attention, causal and nothing else, on q, k, v and grad_out.

    With fewer queries than keys its mask is aligned at the bottom right. 0 takes the place of inputs that are
    not finite.
    """
    tensors = {name: example.tensors()[name].nan_to_num(0, 0, 0) for name in ("q", "k", "v")}
    plain = Example(**tensors, grad_out=example.grad_out)  # type: ignore[arg-type]
    if min(t.numel() for t in tensors.values()) == 0:
        return dict.fromkeys(("out", "dq", "dk", "dv"), 0.0)
    num_queries, num_keys = plain.q.shape[2], plain.k.shape[2]
    causal = causal and num_queries <= num_keys
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=plain.q.device).tril(
        num_keys - num_queries
    )
    weights: list[Tensor] = []

    def stock(e: Example) -> tuple[Tensor, None]:
        square = num_queries == num_keys
        out = F.scaled_dot_product_attention(
            e.q,
            e.k,
            e.v,
            attn_mask=mask if causal and not square else None,
            is_causal=causal and square,
            enable_gqa=True,
        )
        return out, None

    def exact(e: Example) -> tuple[Tensor, None]:
        k, v = (t.repeat_interleave(e.q.shape[1] // t.shape[1], 1) for t in (e.k, e.v))
        scores = e.q @ k.mT / math.sqrt(e.q.shape[3])
        weights.append((scores.masked_fill(~mask, -math.inf) if causal else scores).softmax(-1))
        return weights[0] @ v, None

    got, expected = evaluate(stock, plain), evaluate(exact, plain.double())
    terms = Terms(weights[0].detach(), plain.q.double()[..., 0] * 0, scale=1 / math.sqrt(plain.q.shape[3]))
    norms = term_norms(terms, plain)
    return {name: _relative_error(got[name], expected[name], norms[name]) for name in got}


class Deviation(NamedTuple):
    """How far a tensor is off and may be, relative to the size of the exact one; or what else is wrong."""

    name: str
    error: float
    budget: float
    complaint: str = ""

    @property
    def ok(self) -> bool:
        """True if the tensor is within its budget."""
        return not self.complaint and self.error <= self.budget

    def __str__(self) -> str:
        mark = "ok" if self.ok else "WRONG"
        return (
            f"{self.name}: {self.complaint or f'error {self.error:.2e}, budget {self.budget:.2e}'} ({mark})"
        )


def compare(
    actual: Results,
    expected: Results,
    plain: Mapping[str, float],
    *,
    dtype: torch.dtype,
    norms: Mapping[str, float] | None = None,
) -> list[Deviation]:
    """Every tensor of ``expected`` against its counterpart in ``actual``, all of them, right or wrong.

    Args:
        actual: Results of the back end under test; without lse' if the call did not ask for it.
        expected: Results in float64, on the same numbers, with lse'.
        plain: ``plain_errors`` of the same example.
        dtype: Dtype of q, k and v.
        norms: ``term_norms`` of the same example; without them a tensor is measured against its own norm.
    """
    logit = _largest_logit(expected)
    deviations = []
    for name, exact in expected.items():
        if name == "lse" and "lse" not in actual:
            continue
        if name not in actual:
            deviations.append(Deviation(name, math.inf, 0.0, "missing"))
            continue
        x = actual[name]
        complaint = _complaint(name, x, exact, dtype)
        error = (
            math.inf
            if complaint
            else _relative_error(x, exact, 0.0 if norms is None else norms.get(name, 0.0))
        )
        budget = _budget(name, x.dtype, dtype, plain, logit)
        deviations.append(Deviation(name, error, budget, complaint))
    return deviations


def assert_within_budget(
    actual: Results,
    expected: Results,
    plain: Mapping[str, float],
    *,
    dtype: torch.dtype,
    norms: Mapping[str, float] | None = None,
) -> None:
    """Raise an AssertionError that lists every tensor, if ``compare`` finds one that is wrong."""
    deviations = compare(actual, expected, plain, dtype=dtype, norms=norms)
    if not all(d.ok for d in deviations):
        raise AssertionError("outside the error budget\n" + "\n".join(f"  {d}" for d in deviations))


def check_backend(example: Example, backend: str) -> list[Deviation]:
    """Compare a back end with the reference in float64 on the same numbers: the gate before a benchmark."""
    wrt = [name for name in example.tensors() if name in ("q", "k", "v", "sink")]
    actual = evaluate(lambda e: attend(e, backend), example, wrt)
    with_lse = dataclasses.replace(example.double(), return_lse=True)
    expected = evaluate(lambda e: attend(e, "reference"), with_lse, wrt)
    plain = plain_errors(example, causal=example.options.get("causal", True))
    return compare(actual, expected, plain, dtype=example.q.dtype)


_YARDSTICK = {"dsink": "out", "dbias": "dq", "dalibi_slopes": "dq"}


def _budget(
    name: str, own: torch.dtype, dtype: torch.dtype, plain: Mapping[str, float], logit: float
) -> float:
    if name == "lse" and dtype in (torch.bfloat16, torch.float16):
        return 2.0**-13
    carried = torch.finfo(accumulate_dtype(dtype)).eps
    doubt = 2.0 if dtype == torch.float64 or name in _YARDSTICK else 1.0
    if name == "lse":
        return doubt * 4 * carried
    eps = max(torch.finfo(dtype).eps, torch.finfo(own).eps)
    yardstick = max(plain[_YARDSTICK.get(name, name)], carried)
    return doubt * math.hypot(2 * yardstick + 2 * eps, carried * logit)


def _largest_logit(expected: Results) -> float:
    """max |lse'| over the rows that see a key."""
    lse, out = expected["lse"], expected["out"]
    rows = lse.isfinite() & (out != 0).any(-1)
    return float(lse[rows].abs().max()) if bool(rows.any()) else 0.0


def _complaint(name: str, x: Tensor, exact: Tensor, dtype: torch.dtype) -> str:
    expected_dtype = {
        "out": dtype,
        "dq": dtype,
        "dk": dtype,
        "dv": dtype,
        "lse": accumulate_dtype(dtype),
    }.get(name)
    if x.shape != exact.shape:
        return f"shape {tuple(x.shape)} instead of {tuple(exact.shape)}"
    if expected_dtype is not None and x.dtype != expected_dtype:
        return f"{x.dtype} instead of {expected_dtype}"
    for what, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(x) != test(exact)
        if bool(wrong.any()):
            place = tuple(wrong.nonzero()[0].tolist())
            got, wanted = float(x[place]), float(exact[place])
            return f"{what} differs at {int(wrong.sum())} places, first at {place}: {got}, exact {wanted}"
    return ""


def _relative_error(x: Tensor, exact: Tensor, norm: float) -> float:
    """‖x − exact‖ / max(‖exact‖, norm) over finite entries, less what underflow to zero explains."""
    finite = exact.isfinite() & x.isfinite()
    exact_numbers = exact[finite].double()
    error = float((x[finite].double() - exact_numbers).norm())
    info = torch.finfo(x.dtype)
    error = max(0.0, error - info.smallest_normal * info.eps * math.sqrt(exact_numbers.numel()))
    size = max(float(exact_numbers.norm()), norm)
    if size == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / size
