"""Many cells in several processes, with the share of the work done and the time left.

Every process does one cell after the other; each finished one is on the disk at once. Whatever ends the run,
the next one goes on with what is missing.
"""

import fnmatch
import os
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

from stablemask.reproduce.cells import Job, updates, work
from stablemask.reproduce.study import Entry, Study

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

_POLL = 1.0  # seconds
_FEWER_POINTS = 0.01  # share of a cell between two reports of a process


class State(NamedTuple):
    """Where a run is.

    Attributes:
        share: Of the work, from 0 to 1.
        left: Seconds, from the speed until now; None before anything is known.
        message: A line about a cell that is finished, or empty.
    """

    share: float
    left: float | None
    message: str


OnState = Callable[[State], object]


def select(
    study: Study, patterns: Sequence[str] = (), seeds: int | None = None, first_seed: int = 0
) -> list[Entry]:
    """Entries of the study whose group matches one of the patterns; all without one.

    Args:
        study: The models.
        patterns: As file names: "small/rope/*".
        seeds: Seeds 0 … seeds − 1 of each group; by default as many as the study says.
        first_seed: Those before it are left out.
    """
    for name, value, least in (("seeds", seeds, 1), ("first_seed", first_seed, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name}: got {value}; allowed: from {least} on")
    found = study.entries()
    for pattern in patterns:
        if not any(fnmatch.fnmatch(e.group, pattern) for e in found):
            groups = sorted({e.group for e in found})
            raise ValueError(f"groups: got {pattern!r}; allowed: patterns of {', '.join(groups)}")
    if patterns:
        found = [e for e in found if any(fnmatch.fnmatch(e.group, p) for p in patterns)]
    if seeds is not None:
        groups = list(dict.fromkeys(e.group for e in found))
        found = [Entry(g, s) for s in range(seeds) for g in groups]
    return [entry for entry in found if entry.seed >= first_seed]


def missing(job: Job, entries: Iterable[Entry]) -> list[Entry]:
    """Entries without a finished cell."""
    return [entry for entry in entries if not job.path(entry).exists()]


def run(
    job: Job,
    entries: Sequence[Entry],
    *,
    jobs: int = 1,
    seconds: float | None = None,
    on_state: OnState = lambda _: None,
) -> list[Entry]:
    """Finish the cells of some entries, in their order.

    Args:
        job: What they share.
        entries: From ``missing``.
        jobs: Processes.
        seconds: No longer than this: at its end, cells that are being worked on are given up.
        on_state: Called about once a second, and for every finished cell.

    Returns:
        Those that are not finished: time was up, or something went wrong, which ``on_state`` was told. The
        others go on.
    """
    if jobs < 1:
        raise ValueError(f"jobs: got {jobs}; allowed: from 1 on")
    watch = _Watch(job.study, entries, on_state)
    if jobs == 1 and seconds is None:
        return [entry for entry in entries if not _work_here(job, entry, watch)]
    return _in_processes(job, entries, jobs, seconds, watch)


class _Watch:
    """Shares of all cells, and what follows from them."""

    def __init__(self, study: Study, entries: Sequence[Entry], on_state: OnState) -> None:
        self.costs = {entry: updates(study, entry) for entry in entries}
        self.shares = dict.fromkeys(entries, 0.0)
        self.began = time.monotonic()
        self.on_state = on_state

    def update(self, entry: Entry, share: float) -> None:
        self.shares[entry] = max(share, self.shares[entry])

    def finished(self, entry: Entry, error: BaseException | None = None) -> None:
        self.shares[entry] = 1.0
        done = sum(share == 1.0 for share in self.shares.values())
        failure = "" if error is None else f": FAILED, {type(error).__name__}: {error}"
        self.tell(f"{done}/{len(self.shares)}  {entry.group}, seed {entry.seed}{failure}")

    def tell(self, message: str = "") -> None:
        total = sum(self.costs.values())
        share = sum(self.costs[e] * s for e, s in self.shares.items()) / total if total else 1.0
        passed = time.monotonic() - self.began
        left = passed * (1 - share) / share if share > 0.005 else None
        self.on_state(State(share, left, message))


_reports: "Queue[tuple[Entry, float]] | None" = None


def _begin(reports: "Queue[tuple[Entry, float]]") -> None:
    global _reports  # noqa: PLW0603 - how a process of a pool is given a queue
    _reports = reports
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A run that is killed leaves no process behind that goes on working and then waits for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work_there(job: Job, entry: Entry) -> None:
    told = 0.0

    def on_share(share: float) -> None:
        nonlocal told
        if share >= told + _FEWER_POINTS:
            told = share
            assert _reports is not None
            _reports.put((entry, share))

    work(job, entry, on_share)


def _in_processes(
    job: Job, entries: Sequence[Entry], jobs: int, seconds: float | None, watch: _Watch
) -> list[Entry]:
    context = get_context("spawn")
    reports: Queue[tuple[Entry, float]] = context.Queue()
    pool = ProcessPoolExecutor(
        min(jobs, max(len(entries), 1)), mp_context=context, initializer=_begin, initargs=(reports,)
    )
    futures = {pool.submit(_work_there, job, entry): entry for entry in entries}
    open_ones: set[Future[None]] = set(futures)
    in_time = True
    try:
        while open_ones and in_time:
            done, open_ones = wait(open_ones, _POLL, FIRST_COMPLETED)
            _drain(reports, watch)
            for future in done:
                watch.finished(futures[future], future.exception())
            watch.tell()
            in_time = seconds is None or time.monotonic() - watch.began < seconds
    finally:
        _end(pool, at_once=bool(open_ones))
    return missing(job, entries)


def _end(pool: ProcessPoolExecutor, *, at_once: bool) -> None:
    """Cells being worked on are given up ``at_once``: their files do not exist yet."""
    processes = list((pool._processes or {}).values())  # noqa: SLF001 - the pool has no way to stop its work
    pool.shutdown(wait=not at_once, cancel_futures=True)
    if at_once:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _drain(reports: "Queue[tuple[Entry, float]]", watch: _Watch) -> None:
    while True:
        try:
            watch.update(*reports.get_nowait())
        except queue.Empty:
            return


def _work_here(job: Job, entry: Entry, watch: _Watch) -> bool:
    """Whether the cell was made."""

    def on_share(share: float) -> None:
        watch.update(entry, share)
        watch.tell()

    try:
        work(job, entry, on_share)
    except Exception as error:  # noqa: BLE001 - as in other processes, one cell does not stop the others
        watch.finished(entry, error)
        return False
    watch.finished(entry)
    return True
