"""The user's pins: patterns over ONNX node names, each with a precision that the search must keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from optdnn.errors import UsageError
from optdnn.ir.graph import STRUCTURAL, Graph
from optdnn.passes.support.precision import fits, key, pin_of
from optdnn.passes.support.precision_choices import PrecisionChoice

SHOWN = 3


def check_pins(pins: Iterable[str], graph: Graph, known: Iterable[str]) -> None:
    """Raise UsageError for a pattern that fits no node: neither a node of ``graph`` (op names of a plan count, too) nor one of
    ``known``, the names of nodes before passes folded them away."""
    ops = [op for op in graph.ops() if op.kind not in STRUCTURAL]
    names = {n for op in ops for n in op.src} | {key(op) for op in ops} | set(known)
    for pattern in pins:
        if not any(fits(pattern, name) for name in names):
            close = get_close_matches(pattern.strip("*"), sorted(names), SHOWN, 0.5) or sorted(
                n for n in names if pattern.strip("*").lower() in n.lower()
            )
            what = "is like " + ", ".join(map(repr, close[:SHOWN])) if close else "is not one of the model's node names"
            raise UsageError(
                f"--pin {pattern!r} fits no node; it {what}",
                hint="use the node names of the ONNX model (* and ? stand for anything): optdnn inspect MODEL --nodes",
            )


def pinned(pins: Mapping[str, str], choices: Iterable[PrecisionChoice]) -> dict[str, tuple[str, str]]:
    """Op key -> (precision, its pattern: :func:`optdnn.passes.support.precision.pin_of`).

    Raises UsageError for a precision that the op does not have, with the reason.
    """
    found: dict[str, tuple[str, str]] = {}
    for choice in choices:
        names = (*choice.nodes, choice.key)
        pattern = pin_of(pins, names)
        if pattern is None:
            continue
        if pins[pattern] in choice.precisions:
            found[choice.key] = pins[pattern], pattern
        elif pattern in names:
            # A pattern that covers many nodes pins only the nodes that can have the precision; a node named in full must be able
            # to.
            why = choice.refused.get(pins[pattern], "the target does not offer it")
            raise UsageError(f"--pin {pattern}={pins[pattern]}: {choice.kind} cannot run in {pins[pattern]}: {why}")
    return found
