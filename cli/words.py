"""How the commands say what an engine is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LIBRARY_NAMES = {"openvino": "OpenVINO", "onnxruntime": "ONNX Runtime"}
_ON_INTEGERS = frozenset({"QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"})
_EIGHT_BITS = ("int8", "fp8")


def precision_text(precision: str, meta: Mapping[str, Any]) -> str:
    """The precision of an engine: of a model with Q/DQ of its own also what these make of it.

    ``meta`` are the engine's facts. A build that was asked for int8 or fp8 places Q and DQ itself, and its label says so."""
    passes: Sequence[Mapping[str, Any]] = meta.get("passes") or ()
    kinds: Mapping[str, int] = passes[0]["kinds_before"] if passes else {}
    if precision.partition("+")[0] in _EIGHT_BITS or not (kinds.keys() & {"QuantizeLinear", *_ON_INTEGERS}):
        return precision
    runs: Mapping[str, int] = meta.get("precision", {}).get("runs", {})
    eight = [p for p in _EIGHT_BITS if p in runs] or (["int8"] if kinds.keys() & _ON_INTEGERS else [])
    if not eight:
        return f"{precision}, between the model's own Q/DQ"
    return f"{' and '.join(eight)} (Q/DQ of the model), {precision} elsewhere"


def runs_on(program: Any) -> str:
    """The libraries or kernels that run a program's steps, in a line."""
    meta, steps = program.meta, program.steps
    counts: dict[str, int] = {}
    for step in steps:
        counts[step.executor] = counts.get(step.executor, 0) + 1
    found = []
    for executor, n in counts.items():
        if executor in LIBRARY_NAMES:
            tactic = meta.get("tactic", {})
            threads = f", {_counted(tactic['threads'], 'thread')}" if tactic.get("library") == executor else ""
            found.append(LIBRARY_NAMES[executor] + (f" ({n} parts{threads})" if n > 1 else threads))
        elif executor == "reference":
            found.append(_counted(n, "NumPy kernel"))
        elif executor == "cuda":
            found.append(_counted(n, "GPU kernel") + _families(steps))
        elif executor == "copy":
            found.append(_counted(n, "copy", "copies"))
        else:
            found.append(f"{n} {executor}")
    return " + ".join(found) or "nothing: the outputs are constants"


def _families(steps: Sequence[Any]) -> str:
    """Whose GPU kernels they are, the most frequent first."""
    tactics: dict[str, int] = {}
    for step in steps:
        tactic = step.params.get("tactic")
        if step.executor == "cuda" and isinstance(tactic, str):
            family = tactic.partition(" ")[0]
            tactics[family] = tactics.get(family, 0) + 1
    most = sorted(tactics.items(), key=lambda item: (-item[1], item[0]))[:4]
    return f" ({', '.join(f'{n} {name}' for name, n in most)})" if most else ""


def _counted(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"
