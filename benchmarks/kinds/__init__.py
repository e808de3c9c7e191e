"""The kinds of measurement and the commands, by name: the first line of a module's docstring says what it does."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from benchmarks.harness import Kind
from optdnn.errors import UsageError

KINDS = (
    "speed", "correctness", "cases", "invariance", "soak", "precision", "waits", "ranges", "roofline", "decode",
)  # fmt: skip
"""Kinds that the harness runs: modules of this folder."""
COMMANDS = {
    "random": "kinds.random:main", "sanitize": "kinds.sanitize:main", "compile": "kinds.compile:main",
    "faults": "kinds.faults:main", "pictures": "kinds.pictures:main", "serve": "kinds.serving:serving",
    "operators": "kinds.small:operators", "cliffs": "kinds.small:cliffs", "keep": "kinds.small:keep",
}  # fmt: skip
"""Commands of their own: name -> module and function."""


def kind_of(name: str) -> Kind:
    """A kind by its name, or by the dotted name of a module that holds ``KIND``. Raises UsageError for another one."""
    if name not in KINDS and "." not in name:
        every = ", ".join((*KINDS, *COMMANDS))
        raise UsageError(f"there is no kind of measurement {name!r}", hint=f"take one of {every}")
    found: Kind = importlib.import_module(name if "." in name else f"benchmarks.kinds.{name}").KIND
    return found


def command_of(name: str) -> Callable[[Sequence[str]], int]:
    """The function of a command, which takes the words of the command line."""
    module, _, function = COMMANDS[name].partition(":")
    found: Callable[[Sequence[str]], int] = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    return found


def about(name: str) -> str:
    """The description of a kind or a command, in one line."""
    text = kind_of(name).about if name in KINDS else command_of(name).__doc__ or ""
    return text.splitlines()[0]
