"""``stablemask theory``: the paper's theorems, put to the test one by one."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from stablemask.analysis.disproportionality import Disproportion, disproportion, steepen
from stablemask.analysis.enumeration import (
    CASES,
    EQUAL,
    TOKENS,
    enumerate_propositions,
    fitted_decoder,
    small_decoder,
    symmetric_chain,
)
from stablemask.analysis.markov import MarkovSource, identical_probability, soft_copy_last
from stablemask.analysis.theory import CONSTANT, Limits, construct, last_distinct, limits, read, xi
from stablemask.cli.terminal import make_console, make_progress
from stablemask.measuring import threads
from stablemask.model import StableMaskForCausalLM

_TOKENS = TOKENS
_LIMITS_NOTE = """\
The last i up to which something is right. "ξ rounded": consecutive ξ, correctly rounded, still differ;
"ξ computed": those that the attention of the decoder outputs do. "position": the decoder's answers, with
thresholds from the formula, and with thresholds between what its attention outputs. "then": what that one
answers next. "error": of ξ, in units of eps / 2."""
_PROPOSITION_NOTE = f"""\
All sequences of {_TOKENS - 1} tokens through two layers in float64. The number is how much room a statement
has, the smallest over layers, i ≤ n and ω: below zero it fails. (2) and (4) are equations: minus the largest
difference. "shares" is I(X≤i)/I(X≤n) ≥ I(Ω≤i)/I(Ω≤n). "forgotten": the largest H(Xn+1|Ω≤n) − H(Xn+1|X≤n),
in nats. "collapsed": the first layer forgets its newest token."""
_DEGREE_NOTE = f"""\
Every sequence of {_TOKENS - 1} tokens over two symbols, RoPE, two layers of four heads. "loss": above the
entropy of the source, in nats per token. "degree": the probability of disproportional inputs by the
definition with ε = 0, the smallest and the largest of the heads; "identical": the share of all-identical
inputs among them. "excess": the mean over inputs of the smallest ε that would clear a head. "weak": the
degree with the threshold of the theorem's proof, which is 0."""


@dataclass(frozen=True)
class Options:
    """Put the paper's theorems to the test: its weights in a real decoder, its entropies by enumeration.

    Args:
        length: n of the construction of Appendix C, and its horizon.
        gammas: Decays of the pseudo scores there.
        steps: Training steps of the small models on which disproportional attention is measured.
    """

    length: int = 1024
    gammas: tuple[float, ...] = (0.0, 1 / 256, 1 / 128, 1 / 64, 1 / 16, 1 / 2)
    steps: int = 200


class Claim(NamedTuple):
    """A statement of the paper, where it stands, whether it holds (None: in part), and what was found."""

    place: str
    statement: str
    holds: bool | None
    found: str


_VERDICTS = {
    True: "[green]holds[/green]",
    None: "[yellow]in part[/yellow]",
    False: "[red]does not hold[/red]",
}


def run(options: Options) -> int:
    """Print a table for each theorem, and all claims with their verdicts.

    0: done; 1: a control failed; 2: something in the options is wrong.
    """
    problem = _wrong(options)
    if problem is not None:
        print(f"stablemask theory: {problem}", file=sys.stderr)
        return 2
    console = make_console()
    torch.manual_seed(0)
    with make_progress(console) as progress, threads(1):
        construction, exact = _construction(console, options, progress)
        entropies, proven = _proposition(console, progress)
        copies = _disproportion(console, options, progress)
    claims = [*construction, *entropies, *copies]
    table = _table("The paper's statements", "where", "statement", "verdict", "found")
    for claim in claims:
        table.add_row(claim.place, claim.statement, _VERDICTS[claim.holds], claim.found)
        table.add_section()
    console.print(table)
    if not (exact and proven):
        console.print("A control failed: see the tables above.", style="bold red")
    return 0 if exact and proven else 1


def _wrong(options: Options) -> str | None:
    for name, least in (("length", 2), ("steps", 1)):
        if getattr(options, name) < least:
            return f"{name}: got {getattr(options, name)}; allowed: from {least} on"
    for gamma in options.gammas:
        if not 0 <= gamma < math.inf:
            return f"gammas: got {gamma}; allowed: finite numbers ≥ 0"
    return None if options.gammas else "gammas: got none; allowed: one or more"


def _construction(console: Console, options: Options, progress: Progress) -> tuple[list[Claim], bool]:
    table = _table(
        f"Appendix C: positions 1 … n recovered by the first layer, n = {options.length}",
        *("dtype", "γ", "ξ rounded", "ξ computed", "position, formula", "fitted", "then", "error"),
    )
    found: dict[tuple[torch.dtype, float], Limits] = {}
    cases = [(dtype, gamma) for dtype in (torch.float32, torch.float64) for gamma in options.gammas]
    for dtype, gamma in progress.track(cases, description="the weights of Appendix C"):
        reach = found[dtype, gamma] = limits(gamma, options.length, dtype)
        then = "–" if reach.beyond is None else f"{reach.fitted + 1} → {reach.beyond:g}"
        counts = (reach.rounded, reach.decoder, reach.by_formula, reach.fitted)
        table.add_row(str(dtype)[6:], f"{gamma:g}", *map(str, counts), then, f"{reach.error:.1f}")
    console.print(table)
    console.print(_LIMITS_NOTE, "", style="dim")
    whole = [case for case, reach in found.items() if reach.fitted == options.length]
    short = [f"{str(d)[6:]} γ = {g:g} to {r.fitted}" for (d, g), r in found.items() if (d, g) not in whole]
    claim = Claim(
        "Appendix C",
        "The first layer recovers positions 1 … n, for any n",
        None if whole and short else not short,
        f"All n = {options.length} right for {len(whole)} of {len(found)} pairs of dtype and γ"
        + "".join(f"; {text}" for text in short),
    )
    exact = all(reach.fitted == reach.decoder and reach.error < 100 for reach in found.values())
    return [claim, *_left_out(options.length)], exact


def _left_out(length: int) -> Iterator[Claim]:
    """What the proof does not say: normalisation, ALiBi, rows past the horizon."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(length + 1, (length,), generator=generator)
    truth = torch.arange(1, length + 1)
    free = torch.randn(length + 1, 13, generator=generator)
    equal = torch.nn.functional.normalize(free.double(), dim=1)
    gamma, dtype = 1 / 128, torch.float64
    right = []
    for constant, embeddings in ((1.0, free), (1.0, equal), (CONSTANT, free)):
        model = construct(gamma, length, constant=constant, embeddings=embeddings, dtype=dtype)
        right.append(int((read(model, tokens).answer == truth).sum()))
    yield Claim(
        "Appendix C",
        "Embeddings need a 1 and a 0 in two dimensions; the rest is free",
        True if right[0] == length else None if right[1] == length else False,
        f"With normalisation {right[0]} of {length} positions are right for embeddings of any norm, "
        f"{right[1]} for equal norms, {right[2]} with 2^40 in place of 1",
    )
    reading = read(construct(gamma, length, position="alibi", dtype=dtype), tokens)
    apart = float((reading.xi - xi(gamma, length)).abs().max())
    kept = int((reading.answer == truth).sum())
    yield Claim(
        "Appendix C",
        "W_Q = W_K = 0 makes every score 0 and the output ξ_i = i / (i + Σ e^−jγ)",
        True if apart < EQUAL else None if kept == length else False,
        f"With RoPE, T5 (bias 0) and no encoding. With ALiBi scores are its biases and the output is up to "
        f"{apart:.2f} away from ξ_i; it grows all the same, {kept} of {length} positions are right",
    )
    yield _past_the_horizon(gamma, length)


def _past_the_horizon(gamma: float, length: int) -> Claim:
    tokens = torch.randint(length + 1, (2 * length,), generator=torch.Generator().manual_seed(2))
    readings = [read(construct(gamma, length, dtype=d), tokens) for d in (torch.float32, torch.float64)]
    differ = [length + last_distinct(reading.xi[length:]) for reading in readings]
    late = readings[1].position[length:]
    return Claim(
        "§3.4",
        "Past the training length N the score −nγ goes on encoding positions, asymptotically",
        True if differ[0] == 2 * length else None if differ[1] > length + 1 else False,
        f"At γ = 1/128 ξ of rows N + 1 … 2N grows up to row {differ[0]} in float32, {differ[1]} in float64, "
        "but only from ξ of row N − 1 towards that of N: the weights above read these rows as "
        f"{late.min():g} … {late.max():g}",
    )


def _proposition(console: Console, progress: Progress) -> tuple[list[Claim], bool]:
    table = _table(
        "Proposition 1: what the states of a layer leave unknown about the next token",
        *("source", "isotropic", "decoder", "contextual", "(1)", "(2)", "(3)", "(4)", "shares", "forgotten"),
    )
    sound = True
    strict, shares, broken = 0.0, 0.0, set[str]()
    cases = enumerate_propositions(_TOKENS)
    for case in progress.track(cases, total=CASES, description="all sequences"):
        found, met = case.found, case.met()
        slack, forgotten = found.slack(), float(found.loss().max())
        rooms = map(_room, (*slack.values(), forgotten))
        table.add_row(case.name, _yes(case.isotropic), case.decoder, _yes(found.contextual), *rooms)
        fails = {statement for statement, room in slack.items() if room < -EQUAL}
        sound &= not any(met[statement] for statement in fails)
        sound &= met["2"] == (case.decoder == "random")
        broken |= fails - {"shares"}
        strict, shares = max(strict, forgotten), min(shares, slack["shares"])
    console.print(table)
    console.print(_PROPOSITION_NOTE, "", style="dim")
    proposed = Claim(
        "Appendix A",
        "Proposition 1: (1) always, (2) if contextual, (3) if isotropic, (4) if both",
        sound,
        f"By enumeration, to 1e-9, each under its conditions; without them ({'), ('.join(sorted(broken))}) "
        f"fail. In the collapsed layer (1) is strict, by up to {strict:.3f} nats",
    )
    always = Claim(
        "Appendix A",
        "I(X≤i)/I(X≤n) ≥ I(Ω≤i)/I(Ω≤n) always",
        None if sound and shares < -EQUAL else sound,
        "It does with a contextual decoder, as the definition of disproportionality presupposes; a collapsed "
        f"layer breaks it by up to {-shares:.3f}",
    )
    return [proposed, always], sound and strict > 0.01 and broken == {"2", "3", "4"}


def _disproportion(console: Console, options: Options, progress: Progress) -> list[Claim]:
    copy = soft_copy_last(2, _TOKENS)
    sources = {"softCopyLast": copy, "symmetric chain": symmetric_chain(_TOKENS)}
    columns = ("source", "decoder", "loss", "layer", "degree", "identical", "excess", "weak")
    table = _table("Appendix A and B.1: disproportional attention towards initial tokens", *columns)
    task = progress.add_task("training on the sources", total=len(sources) * 2 * options.steps)
    found: dict[tuple[str, str], Disproportion] = {}
    copiers = {}
    for name, source in sources.items():
        for remedy in ("none", "stablemask"):
            advance = partial(progress.advance, task)
            model, loss = fitted_decoder(source, remedy, options.steps, advance)
            found[name, remedy] = result = disproportion(model, source)
            if source is copy:
                copiers[remedy] = model
            for layer, cells in enumerate(_degrees(result)):
                shown = (name, _label(remedy), f"{loss:.4f}") if layer == 0 else ("", "", "")
                table.add_row(*shown, str(layer + 1), *cells)
            table.add_section()
    progress.remove_task(task)
    console.print(table)
    console.print(_DEGREE_NOTE, "", style="dim")
    return [*_copy_claims(copy, found), _unit_test(copiers)]


def _copy_claims(copy: MarkovSource, found: dict[tuple[str, str], Disproportion]) -> Iterator[Claim]:
    likely = [identical_probability(soft_copy_last(symbols, _TOKENS)) for symbols in (2, 3, 1000)]
    spread = copy.anisotropy()
    yield Claim(
        "Appendix B.1",
        "softCopyLast is causally isotropic and concentrates on all-identical sequences",
        spread < EQUAL and min(likely) > 0.5,
        f"Entropies differ by {spread:.0e}; {_TOKENS} tokens over 2, 3 and 1000 symbols are all-identical "
        f"with probability {', '.join(f'{p:.3f}' for p in likely)}",
    )
    plain, ours = found["softCopyLast", "none"], found["softCopyLast", "stablemask"]
    steep = small_decoder(copy)
    steepen(steep)
    weak = [float(d.degree(weak=True).min()) for d in (plain, ours, disproportion(steep, copy))]
    yield Claim(
        "Appendix B.1",
        "Any regular decoder is probably weakly disproportional on softCopyLast, in all layers",
        True if min(weak) > 0.5 else None if weak[0] > 0.5 else False,
        f"Smallest degree of all heads, ε = 0: {weak[0]:.3f} trained, {weak[1]:.3f} trained with StableMask, "
        f"which is no cure for it. {weak[2]:.3f} with steep RoPE scores: what the others get underflows in "
        "float32, and without rounding it is below any ε > 0",
    )
    degrees = plain.degree()
    yield Claim(
        "Appendix B.1",
        "… and disproportional by the definition of Appendix A",
        float(degrees.min()) > 0.5,
        f"Degrees of the heads from {degrees.min():.3f} to {degrees.max():.3f}. Copies carry the first token "
        f"along: I(X1; Xn+1) is {copy.shares()[-1, 0]:.2f} of I(Xn; Xn+1) at n = {_TOKENS - 1}, a high "
        "threshold. The proof has I(X≤i; Xn+1 | Xn) = 0 in its place",
    )
    chain = [float(found["symmetric chain", r].degree().mean()) for r in ("none", "stablemask")]
    yield Claim(
        "Appendix A",
        "Pseudo scores handle disproportional attention (as defined)",
        chain[1] <= chain[0] / 2,
        f"Mean degree of the heads on the symmetric chain, ε = 0: {chain[0]:.3f} without, {chain[1]:.3f} "
        "with; it would hold if it halved. The definition divides by the row sum: for given scores a sink "
        "changes nothing",
    )


def _unit_test(models: dict[str, StableMaskForCausalLM]) -> Claim:
    """How much the distributions that a model gives on identical tokens differ from position to position."""
    tokens = torch.zeros(1, _TOKENS - 1, dtype=torch.long)
    spread = {}
    for name, model in models.items():
        with torch.no_grad():
            said = model.double()(tokens, use_cache=False).logits[0].softmax(-1)[:, 0]
        spread[name] = float(said.max() - said.min())
    return Claim(
        "Appendix B.1",
        "On identical tokens a relative encoding alone cannot tell positions apart; with StableMask it can",
        spread["none"] < EQUAL < spread["stablemask"],
        "Trained on softCopyLast, the probability of the same token again varies over positions "
        f"1 to {_TOKENS - 1} by {spread['none']:.0e} with RoPE and by {spread['stablemask']:.3f} with "
        f"StableMask; in the source by {(math.exp(-2) - math.exp(-_TOKENS)) / 2:.3f}",
    )


def _degrees(found: Disproportion) -> Iterator[tuple[str, str, str, str]]:
    """The cells of each layer."""
    identical = found.identical()
    mass = found.chance[identical].sum()
    same = (found.over[..., identical] > 0).double() @ found.chance[identical] / mass
    columns = (found.degree(), same, found.over @ found.chance, found.degree(weak=True))
    for layer in range(found.over.shape[0]):
        low, high = ([float(c[layer].aminmax()[side]) for c in columns] for side in (0, 1))
        cells = [f"{a:.3f}" if a == b else f"{a:.3f} … {b:.3f}" for a, b in zip(low, high, strict=True)]
        yield cells[0], cells[1], cells[2], cells[3]


def _label(remedy: str) -> str:
    return "StableMask" if remedy == "stablemask" else "plain"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _room(value: float) -> str:
    return "0" if abs(value) < EQUAL else f"{value:.3f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        text = column in ("where", "statement", "verdict", "found")
        left = text or column in ("source", "decoder", "dtype")
        table.add_column(column, justify="left" if left else "right", no_wrap=not text)
    return table
