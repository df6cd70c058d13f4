"""Random calls against the second oracle for some minutes: ``python -m tests.fuzz --minutes 5 [--seed 17]``.

Prints its seed. The same seed draws the same calls in the same order, however long it runs.
"""

import argparse
import secrets
import sys
import time

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.strategies import Drawn, calls
from tests.test_properties import check

ROUND = 25


def fuzz_round(number: int) -> None:
    """The calls of one seed; Hypothesis shrinks a failing one before it is raised."""

    @seed(number)
    @settings(
        max_examples=ROUND,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(calls())
    def agrees(drawn: Drawn) -> None:
        check(drawn)

    agrees()


def main() -> int:
    parser = argparse.ArgumentParser(description="Random calls against the second oracle.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument(
        "--seed", type=int, help="repeat the calls of an earlier run, or of one of its rounds"
    )
    arguments = parser.parse_args()
    first = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    torch.set_num_threads(1)
    print(f"seed {first}", flush=True)
    start, rounds = time.monotonic(), 0
    while rounds == 0 or time.monotonic() - start < 60 * arguments.minutes:
        try:
            fuzz_round(first + rounds)
        except Exception:
            print(
                f"\nfailed: python -m tests.fuzz --minutes 0 --seed {first + rounds}",
                file=sys.stderr,
                flush=True,
            )
            raise
        rounds += 1
        elapsed = time.monotonic() - start
        print(f"\r{rounds * ROUND} calls within the budget, {elapsed:.0f} s", end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
