"""What the tests of the command line share: what a call gives (the fixture ``cli`` of tests/cli), strict JSON, a mark."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

libraries = pytest.mark.usefixtures("_libraries")
"""For tests that need ONNX Runtime and OpenVINO."""


class Result(NamedTuple):
    """Exit code, standard output, standard error."""

    code: int
    out: str
    err: str


Cli = Callable[..., Result]


def strict(text: str) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)
