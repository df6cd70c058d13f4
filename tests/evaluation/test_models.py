"""What tables call a model."""

import pytest

from stablemask.evaluation.models import describe


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("runs/plain/model", "plain"),
        ("runs/plain/model/", "plain"),
        ("a-model", "a-model"),
        ("model", "model"),
        ("HuggingFaceTB/SmolLM2-135M", "SmolLM2-135M"),
        ("/", "/"),
    ],
)
def test_the_name_of_a_model(path: str, name: str) -> None:
    assert describe(path) == name
