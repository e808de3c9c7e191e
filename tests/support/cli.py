"""What a call of the command line gives (the fixture ``cli`` of tests/cli)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Result(NamedTuple):
    """Exit code, standard output, standard error."""

    code: int
    out: str
    err: str


Cli = Callable[..., Result]
