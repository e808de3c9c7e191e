"""Shared parts of the command-line tests: the result of a call (fixture ``cli`` of tests/cli), strict JSON, a mark."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

libraries = pytest.mark.usefixtures("_libraries")
"""A mark for tests that need ONNX Runtime and OpenVINO."""


class Result(NamedTuple):
    """The exit code, standard output and standard error of a call."""

    code: int
    out: str
    err: str


Cli = Callable[..., Result]


def strict(text: str) -> Any:
    """Reads JSON that follows the standard: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)
