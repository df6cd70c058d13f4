"""Whether this process interprets Triton kernels: decided once, when Triton is imported."""

import os

import pytest

needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1, which `make test` sets"
)
