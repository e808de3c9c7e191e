"""Every error that optdnn raises on purpose, and the exit code of each family.

All derive from :class:`OptdnnError`. A message states where (file, ONNX node, operator), the fault, and the remedy.
Any other exception that escapes is a defect of optdnn.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class RefusedNode:
    """One node of a model that an error is about, with the reason. ``opset`` 0: the opset of optdnn's own operators."""

    node: str
    op_type: str
    domain: str
    opset: int
    reason: str

    def __str__(self) -> str:
        domain = f"{self.domain}." if self.domain else ""
        opset = f" (opset {self.opset})" if self.opset else ""
        return f"{self.node}: {domain}{self.op_type}{opset}: {self.reason}"


class OptdnnError(Exception):
    """Base of all errors that optdnn raises on purpose. ``hint`` tells what to do next, ``nodes`` lists the nodes at fault."""

    exit_code = 1

    def __init__(self, message: str, nodes: Sequence[RefusedNode] = (), *, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.nodes = tuple(nodes)
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def to_plain(self) -> dict[str, Any]:
        """The error as plain data, for JSON."""
        return {
            "type": type(self).__name__,
            "exit_code": self.exit_code,
            "message": self.message,
            "hint": self.hint,
            "nodes": [asdict(node) for node in self.nodes],
        }


class UsageError(OptdnnError):
    """Options or arguments contradict one another or name something that does not exist."""

    exit_code = 2


class ModelError(OptdnnError):
    """The model file cannot be read or is not valid ONNX."""

    exit_code = 3


class ShapeError(ModelError):
    """Shapes or types inside a model contradict one another, or the given input shapes do."""


SHOWN = 3
"""Most nodes of one operator that a message names; ``nodes`` of the error has all of them."""


def _lines(nodes: Sequence[RefusedNode]) -> Iterator[str]:
    """A line for each node, or for all nodes of one operator with one reason if they are more than :data:`SHOWN`."""
    alike: dict[tuple[str, str, int, str], list[RefusedNode]] = {}
    for node in nodes:
        alike.setdefault((node.op_type, node.domain, node.opset, node.reason), []).append(node)
    for some in alike.values():
        if len(some) <= SHOWN:
            yield from map(str, some)
        else:
            names = ", ".join(node.node for node in some[:SHOWN])
            yield str(replace(some[0], node=f"{names} and {len(some) - SHOWN} more"))


class UnsupportedError(OptdnnError):
    """The model is valid but contains something that optdnn does not support; ``nodes`` lists every such node."""

    exit_code = 4

    def __init__(self, message: str, nodes: Sequence[RefusedNode] = (), *, hint: str | None = None):
        super().__init__("\n  ".join([message, *_lines(nodes)]), nodes, hint=hint)


class EngineError(OptdnnError):
    """An engine file is truncated, corrupt, of another version, for another target, or not signed as required."""

    exit_code = 5


class EngineStale(EngineError):
    """An engine's kernels come from templates that have changed since; rebuild or pass ``--recompile``."""


class RunError(OptdnnError):
    """Running failed: an input of the wrong name, shape or dtype, or the machine ran out of something."""

    exit_code = 6


class GpuFault(RunError):
    """A new program does not run on this machine's GPU: one of its kernels hangs, crashes or writes outside of its
    memory (``step``: the number of the launch, if one is at fault), or its graph does not run in any form."""

    def __init__(self, message: str, *, hint: str | None = None, step: int | None = None):
        super().__init__(message, hint=hint)
        self.step = step


class RankError(RunError):
    """Ranks that run together cannot continue: one ended, they do not find one another, or their GPUs do not fit the engine."""


class InputError(RunError):
    """An input (or output buffer) of ``run`` does not fit the engine."""


class NotMet(OptdnnError):
    """The build or comparison finished but a requested bound is not met, or a check of ``verify`` failed."""

    exit_code = 7


class MissingDependency(OptdnnError):
    """An optional package is not installed; the message names the pip command that installs it (``extra`` "": the package
    itself), and ``otherwise`` a way to do without it."""

    exit_code = 8

    def __init__(self, package: str, extra: str, why: str, otherwise: str = ""):
        command = f"pip install 'optdnn[{extra}]'" if extra else f"pip install {package}"
        hint = command + (f"; or {otherwise}" if otherwise else "")
        super().__init__(f"{package} is needed {why}, and is not installed", hint=hint)


class OutputError(OptdnnError):
    """An output file cannot be written."""

    exit_code = 9


class InternalError(OptdnnError):
    """A broken invariant of optdnn itself: a patch that changes a type, a graph that does not verify."""

    exit_code = 70


@contextmanager
def machine_errors(what: str, nested: type[OptdnnError]) -> Iterator[None]:
    """Turn errors of the machine inside of a block about ``what`` into errors of optdnn: RunError if memory runs out,
    ``nested`` if something is nested more deeply than Python's stack. Every public function that reads a file uses it."""
    try:
        yield
    except MemoryError as error:
        raise RunError(
            f"{what} does not fit in memory: {error}", hint="use a machine with more, or smaller sizes"
        ) from error
    except RecursionError as error:
        raise nested(f"{what} is nested too deeply") from error


def printable(text: str) -> str:
    """``text`` with control characters escaped, except newlines: names from a model must not control a terminal."""
    return "".join(c if c == "\n" or c.isprintable() else repr(c)[1:-1] for c in text)


def printable_json(text: str) -> str:
    """JSON text with the same value, with the characters escaped that control a terminal: control characters, and marks that
    change the direction of text."""
    return "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text)


EXIT_CODES: dict[int, str] = {
    0: "success",
    1: "any other failure",
    2: "usage: options or arguments are wrong",
    3: "bad model: unreadable or invalid ONNX, contradicting shapes",
    4: "unsupported: valid ONNX that optdnn does not handle",
    5: "bad engine: truncated, corrupt, of another version, for another target, or not signed as required",
    6: "runtime failure: wrong inputs, or the machine ran out of something",
    7: "not met: a requested bound is not met, or a check of verify failed",
    8: "a package that the command needs is not installed",
    9: "an output file cannot be written",
    70: "internal error: please report it",
    130: "interrupted",
    143: "ended by SIGTERM (129: by SIGHUP)",
}
"""The documented exit codes of the command line."""


def did_you_mean(wrong: str, known: Iterable[str], most: int = 1) -> str | None:
    """``did you mean 'NAME'?`` with up to ``most`` known names that resemble or contain ``wrong``; None if there are none."""
    from difflib import get_close_matches

    names, text = {name.lower(): name for name in known}, wrong.lower()
    found = get_close_matches(text, names, most, cutoff=0.7)
    if not found and len(text) > 2:
        found = [name for name in names if text in name][:most]
    return f"did you mean {', '.join(repr(names[n]) for n in found)}?" if found else None


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the caller's line outside of optdnn."""
    frame, level = inspect.currentframe(), 1
    ours = ("optdnn", "contextlib")  # a function with a context manager as its decorator is called by contextlib
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ours:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
