"""Verdicts on claims, from finished cells: by the rule that was fixed before the runs, see ``statistics``."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stablemask.reproduce.cells import Document, table_of
from stablemask.reproduce.gather import Found
from stablemask.reproduce.statistics import Effect, Term, Verdict, decide, over_documents, over_seeds
from stablemask.reproduce.study import Claim, ClaimTerm, Entry

_TABLES = ("valid", "other")
_ALL = "all"


@dataclass(frozen=True)
class Judged:
    """A claim and what became of it.

    Attributes:
        claim: What was asked.
        verdict: What came out.
        seeds: Those of which every group of the claim has been measured.
        effect: The measured difference; None where nothing was measured.
        reason: Why there is no decision, where too little was measured.
    """

    claim: Claim
    verdict: Verdict
    seeds: tuple[int, ...]
    effect: Effect | None = None
    reason: str = ""


def judge(claim: Claim, found: Found) -> Judged:
    """Weigh what was measured, seed by seed: models of one seed began alike and read the same."""
    cells = {seed: _cells(claim, found, seed) for seed in _seeds(claim, found)}
    values = {seed: _value(claim, documents) for seed, documents in cells.items()}
    seeds = tuple(seed for seed, value in values.items() if value is not None)
    if not seeds:
        return Judged(claim, "not measured", (), reason=_what_is_missing(claim, found))
    effect = _effect(claim, [cells[seed] for seed in seeds], [v for v in values.values() if v is not None])
    if len(seeds) < claim.seeds:
        reason = f"{len(seeds)} of {claim.seeds} seeds"
        return Judged(claim, "undecided at this scale", seeds, effect, reason)
    return Judged(claim, decide(effect, claim.smallest, exact=claim.exact), seeds, effect)


def metric_of(document: Document, metric: str) -> float | None:
    """The value of a metric in a cell; None where it was not measured."""
    table = metric.partition("/")[0]
    if table not in _TABLES:
        value: float | None = document["values"].get(metric)
        return value
    columns = _columns(document, metric)
    if columns is None:
        return None
    nats, tokens, _ = table_of(document, table)
    count = float(tokens[:, columns].sum())
    return float(nats[:, columns].sum()) / count if count else None


def _columns(document: Document, metric: str) -> list[int] | None:
    """Which ranges of positions a metric of documents is about."""
    table, _, which = metric.partition("/")
    if table not in document.get("documents", {}):
        return None
    positions: list[str] = document["documents"][table]["positions"]
    if which == _ALL:
        return list(range(len(positions)))
    return [positions.index(which)] if which in positions else None


def _seeds(claim: Claim, found: Found) -> list[int]:
    """Those of which every group has a cell."""
    own = [set(found.seeds(term.group)) for term in claim.terms]
    return sorted(set.intersection(*own))


def _cells(claim: Claim, found: Found, seed: int) -> list[Document]:
    return [found.cells[Entry(term.group, seed)] for term in claim.terms]


def _value(claim: Claim, documents: Sequence[Document]) -> float | None:
    total = claim.offset
    for term, document in zip(claim.terms, documents, strict=True):
        value = metric_of(document, term.metric)
        if value is None:
            return None
        total += term.weight * value
    return total


def _effect(claim: Claim, cells: Sequence[Sequence[Document]], values: Sequence[float]) -> Effect:
    """The difference of each seed, its mean, and its intervals; ``cells`` holds those of each seed."""
    documents = None
    if {term.metric.partition("/")[0] for term in claim.terms} in ({table} for table in _TABLES):
        terms = [_term(term, [own[i] for own in cells]) for i, term in enumerate(claim.terms)]
        documents = over_documents(terms, claim.offset)
    return Effect(sum(values) / len(values), over_seeds(values), documents, tuple(values))


def _term(term: ClaimTerm, cells: Sequence[Document]) -> Term:
    """Losses of all seeds on the same documents."""
    table = term.metric.partition("/")[0]
    nats, tokens = [], []
    for document in cells:
        losses, counts, _ = table_of(document, table)
        columns = _columns(document, term.metric)
        nats.append(losses[:, columns].sum(1))
        tokens.append(counts[:, columns].sum(1))
    if any(not torch.equal(counts, tokens[0]) for counts in tokens):
        raise ValueError(f"cells: got other documents in {table!r} of {term.group}; allowed: the same in all")
    return Term(term.weight, torch.stack(nats), tokens[0])


def _what_is_missing(claim: Claim, found: Found) -> str:
    groups = dict.fromkeys(term.group for term in claim.terms)
    without = [group for group in groups if not found.seeds(group)]
    if without:
        return f"no cell of {', '.join(without)}"
    if not _seeds(claim, found):
        return "no seed that all groups have"
    documents = _cells(claim, found, _seeds(claim, found)[0])
    pairs = zip(claim.terms, documents, strict=True)
    absent = dict.fromkeys(f"{t.metric} of {t.group}" for t, d in pairs if metric_of(d, t.metric) is None)
    return f"the cells have no {', '.join(absent)}"
