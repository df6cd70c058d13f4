"""Random calls with every argument drawn together, on every back end, against the second oracle."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.checks import check_every_backend
from tests.strategies import Drawn, calls

EXAMPLES = {torch.float32: 220, torch.bfloat16: 110, torch.float16: 90, torch.float64: 100}


def check(drawn: Drawn) -> None:
    """Bands of a few rows let small calls cross their borders."""
    tiles = "stablemask.backends._cpu_tiles"
    with patch(f"{tiles}._BAND_ROWS", drawn.band_rows):
        check_every_backend(drawn.example, drawn.wrt)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EXAMPLES, ids=str)
def test_every_back_end_agrees_with_the_paper(dtype: torch.dtype) -> None:
    @settings(
        max_examples=EXAMPLES[dtype], derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(calls(dtype))
    def agrees(drawn: Drawn) -> None:
        check(drawn)

    agrees()
