"""Phrases of the commands for an engine's precision and for the libraries that run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from optdnn.report.words import counted

LIBRARY_NAMES = {"openvino": "OpenVINO", "onnxruntime": "ONNX Runtime"}
_ON_INTEGERS = frozenset({"QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"})
_EIGHT_BITS = ("int8", "fp8")


def precision_text(precision: str, meta: Mapping[str, Any]) -> str:
    """The precision of an engine in words. A model with its own Q/DQ has two: theirs, and the one between them. If a mixture was
    asked for, one of its precisions may have been chosen for all operators.

    ``meta`` are the engine's facts. A build for int8 or fp8 places Q and DQ itself, and its label says so."""
    asked = meta.get("mixture", {}).get("asked", precision)
    if asked != precision:
        return f"{precision} ({asked} is not predicted to be faster)"
    passes: Sequence[Mapping[str, Any]] = meta.get("passes") or ()
    kinds: Mapping[str, int] = passes[0]["kinds_before"] if passes else {}
    if precision.partition("+")[0] in _EIGHT_BITS or not (kinds.keys() & {"QuantizeLinear", *_ON_INTEGERS}):
        return precision
    runs: Mapping[str, int] = meta.get("precision", {}).get("runs", {})
    eight = [p for p in _EIGHT_BITS if p in runs] or (["int8"] if kinds.keys() & _ON_INTEGERS else [])
    if not eight:
        return f"{precision} (the Q/DQ of the model stay)"
    return f"{' and '.join(eight)} (Q/DQ of the model), {precision} elsewhere"


def runs_on(program: Any) -> str:
    """The libraries or kernels that run a program's steps, in a line."""
    meta, steps = program.meta, program.steps
    found = []
    for executor, n in Counter(step.executor for step in steps).items():
        if executor in LIBRARY_NAMES:
            tactic = meta.get("tactic", {})
            threads = f", {counted(tactic['threads'], 'thread')}" if tactic.get("library") == executor else ""
            found.append(LIBRARY_NAMES[executor] + (f" ({n} parts{threads})" if n > 1 else threads))
        elif executor == "reference":
            found.append(counted(n, "NumPy kernel"))
        elif executor == "cuda":
            found.append(counted(n, "GPU kernel") + _families(steps))
        elif executor == "copy":
            found.append(counted(n, "copy", "copies"))
        else:
            found.append(f"{n} {executor}")
    return " + ".join(found) or "nothing: the outputs are constants or inputs"


def _families(steps: Sequence[Any]) -> str:
    """Whose GPU kernels they are, the most frequent first."""
    tactics = [step.params.get("tactic") for step in steps if step.executor == "cuda"]
    families = Counter(tactic.partition(" ")[0] for tactic in sorted(t for t in tactics if isinstance(t, str)))
    most = families.most_common(4)
    others = len(tactics) - sum(n for _, n in most)
    rest = f", {counted(others, 'other')}" if others else ""
    return f" ({', '.join(f'{n} {name}' for name, n in most)}{rest})" if most else ""
