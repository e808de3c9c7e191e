"""Checks that every pass must meet: exact counts and structure, invariants, idempotence, provenance, float64 equality."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx.parser

from optdnn.ir.evaluate import evaluate, promote, random_feeds
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.verify import verify
from optdnn.ops.base import FusedAttrs, attrs_dict
from optdnn.passes.base import Pass, PassContext, PassReport
from optdnn.types import Array, is_float

TOLERANCE = 1e-9
"""The largest error of an exact rewrite in promoted float64, relative to the largest element."""


def from_text(text: str) -> Graph:
    """The graph of a model in ONNX's text form (``onnx.parser``)."""
    from optdnn.importers.onnx import import_model

    return import_model(onnx.parser.parse_model(text))


def check_pass(
    one: Pass,
    before: Graph | str,
    *,
    changes: int,
    after: Graph | None = None,
    kinds: Mapping[str, int] | None = None,
    rules: Mapping[str, int] | None = None,
    promoted_changes: int | None = None,
    context: PassContext | None = None,
    sizes: Mapping[str, int] | None = None,
    seeds: Sequence[int] = (1, 2),
    drops: Sequence[str] = (),
    depends_on_input: bool = True,
) -> tuple[Graph, PassReport]:
    """Run ``one`` on a copy of ``before`` and return the result with its report.

    Asserts:

    - There are exactly ``changes`` rewrites (``rules``: by rule name), and a second run changes nothing.
    - The result has the structure of ``after``, or operators of these ``kinds``.
    - The graph's invariants hold, and outputs keep names, dtypes and shapes.
    - No provenance is lost except ``drops`` (nodes that disappear altogether).
    - For each seed, the pass on the float64 promotion keeps the outputs to 1e-9, and the pass on the graph itself keeps them within
      rounding of its dtype.
    - Outputs differ between seeds by far more than that; otherwise the comparison would show nothing
      (``depends_on_input=False`` for a constant network).

    ``promoted_changes``: the number of rewrites of the promoted graph, if it differs (casts between floats have no effect there).
    """
    graph = from_text(before) if isinstance(before, str) else before
    verify(graph)
    result = graph.copy()
    report = one(result, context)
    verify(result)
    assert report.changes == changes, (
        f"{report.changes} rewrites, not {changes}:\n{_explain(report)}\n{structure(result)}"
    )
    fired = {name: sum(f.rule == name for f in report.fired) for name in {f.rule for f in report.fired}}
    assert rules is None or fired == dict(rules), f"{fired}, not {dict(rules)}"
    if kinds is not None:
        assert result.kinds() == dict(sorted(kinds.items())), structure(result)
    if after is not None:
        assert structure(result) == structure(after)
    again = one(result.copy(), context)
    assert again.changes == 0, f"not idempotent:\n{_explain(again)}\n{structure(result)}"
    lost = sources(graph) - sources(result)
    assert lost == set(drops), f"provenance lost: {sorted(lost)}, expected {sorted(drops)}"

    wide = promote(graph)
    wide_result = wide.copy()
    wide_report = one(wide_result, context)
    assert wide_report.changes == (changes if promoted_changes is None else promoted_changes), _explain(wide_report)
    verify(wide_result)
    rounded = promote(result)
    unit = max(_roundoff(graph), _roundoff(result))  # of constants that the pass made, too
    answers = []
    for seed in seeds:
        feeds = random_feeds(wide, seed, sizes)
        expected = evaluate(wide, feeds)
        same(evaluate(wide_result, feeds), expected, TOLERANCE)
        same(evaluate(rounded, feeds), expected, max(TOLERANCE, 64 * unit))
        answers.append(expected)
    if depends_on_input:
        for name, first in answers[0].items():
            assert differs(first, answers[1][name], 1e-3), f"{name} hardly depends on the input"
    return result, report


def check_refused(
    one: Pass, before: Graph | str, *, because: str, rule: str | None = None, context: PassContext | None = None
) -> PassReport:
    """Run ``one`` on a copy of ``before``. It must change nothing, and give a reason that matches ``because``."""
    graph = from_text(before) if isinstance(before, str) else before
    result = graph.copy()
    report = one(result, context)
    assert report.changes == 0, _explain(report)
    assert structure(result) == structure(graph)
    found = [r for r in report.refused if re.search(because, r.reason) and rule in (None, r.rule)]
    assert found, f"no refusal matches {because!r}:\n{_explain(report)}"
    assert all(r.nodes for r in found)
    return report


def check_untouched(one: Pass, before: Graph | str, context: PassContext | None = None) -> None:
    """Run ``one`` on a copy of ``before``. It must change nothing and find no candidate."""
    graph = from_text(before) if isinstance(before, str) else before
    result = graph.copy()
    report = one(result, context)
    assert (report.changes, report.refused) == (0, []), _explain(report)
    assert structure(result) == structure(graph)


def same(actual: Mapping[str, Array], expected: Mapping[str, Array], tolerance: float) -> None:
    """Equal names, dtypes and shapes. Floats may differ by ``tolerance`` times the largest expected element; others not at all."""
    assert list(actual) == list(expected)
    for name, a in expected.items():
        b = actual[name]
        assert (b.dtype, b.shape) == (a.dtype, a.shape), name
        if not is_float(a.dtype):
            assert np.array_equal(a, b), name
            continue
        finite = np.isfinite(a)
        assert np.array_equal(finite, np.isfinite(b)), name
        assert np.array_equal(a[~finite], b[~finite], equal_nan=True), name
        scale = float(np.abs(a[finite]).max(initial=0.0)) or 1.0
        error = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
        assert error <= tolerance * scale, f"{name}: off by {error:.3g} of {scale:.3g}, more than {tolerance:.1g}"


def agree(graph: Graph, other: Graph, tolerance: float = 2e-6) -> None:
    """Both graphs give the :func:`same` results for large inputs with a mean other than 0."""
    rng = np.random.default_rng(4)
    feeds: dict[str, Array] = {}
    for i in graph.inputs:
        out = graph.op(i).outputs[0]
        feeds[out.name] = (20 * rng.standard_normal(out.type.static_shape) + 3).astype(out.type.dtype)
    same(evaluate(other, feeds), evaluate(graph, feeds), tolerance)


def differs(a: Array, b: Array, fraction: float) -> bool:
    if a.shape != b.shape or not is_float(a.dtype):
        return a.shape != b.shape or not np.array_equal(a, b)
    return float(np.abs(a - b).max(initial=0.0)) > fraction * float(np.abs(a).max(initial=0.0))


def sources(graph: Graph) -> set[str]:
    """The provenance of all ops together."""
    return set().union(*(op.src for op in graph.ops()))


def stages(graph: Graph, *kinds: str) -> list[tuple[str, ...]]:
    """For each fused op of these kinds, in topological order: the prologue's kinds, the op's kind in <>, the epilogue's kinds."""
    return [
        (*(s.kind for s in op.attrs.prologue), f"<{op.kind}>", *(s.kind for s in op.attrs.epilogue))
        for op in graph.order()
        if isinstance(op.attrs, FusedAttrs) and (not kinds or op.kind in kinds)
    ]


def structure(graph: Graph) -> str:
    """The graph as text that does not depend on ids, value names, or the contents of constants."""
    numbers: dict[int, str] = {}
    lines: list[str] = []

    def label(value: Value | None) -> str:
        if value is None:
            return "-"
        op = graph.op(value)
        if op.kind == "Input":
            return op.outputs[0].name
        if op.kind == "Constant":
            return f"const {op.outputs[0].type}"
        return numbers[op.id] + (f".{value.port}" if value.port else "")

    for op in _depth_first(graph):
        operands = ", ".join(label(v) for v in op.inputs)
        if op.kind == "Output":
            lines.append(f"{op.outputs[0].name} = {operands}")
        else:
            numbers[op.id] = f"%{len(numbers)}"
            shown = ", ".join(f"{k}={v}" for k, v in attrs_dict(op.attrs).items() if v not in (None, (), ""))
            lines.append(f"{numbers[op.id]} = {op.kind}({operands}){{{shown}}} -> {op.outputs[0].type}")
    return "\n".join(lines)


def _depth_first(graph: Graph) -> list[Op]:
    """Computing ops and outputs, operands first, in an order that depends only on the structure."""
    done: dict[int, Op] = {}
    for root in graph.outputs:
        stack: list[tuple[int, bool]] = [(root, False)]
        while stack:
            i, ready = stack.pop()
            if i in done:
                continue
            op = graph.op(i)
            if ready:
                done[i] = op
                continue
            stack.append((i, True))
            stack.extend((v.op, False) for v in reversed(op.inputs) if v is not None and v.op not in done)
    return [op for op in done.values() if op.kind not in STRUCTURAL or op.kind == "Output"]


def _roundoff(graph: Graph) -> float:
    """The largest machine epsilon of the floating types of constants."""
    import ml_dtypes

    dtypes = {op.outputs[0].type.dtype for op in graph.ops() if op.kind == "Constant"}
    return max((float(ml_dtypes.finfo(d).eps) for d in dtypes if is_float(d)), default=0.0)


def _explain(report: PassReport) -> str:
    lines: list[Any] = [f"  fired {f.rule}: {', '.join(f.nodes)}" for f in report.fired]
    return "\n".join(lines + [f"  refused {r.rule}: {', '.join(r.nodes)}: {r.reason}" for r in report.refused])


def check_export(graph: Graph, rtol: float) -> None:
    """The exported graph, with fp32 inputs, gives the same results in ONNX Runtime: within 1e-5 plus ``rtol`` times each
    element."""
    import onnxruntime

    from optdnn.ir.export_onnx import export_model

    session = onnxruntime.InferenceSession(export_model(graph).to_bytes(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(2)
    feeds = {i.name: rng.standard_normal(i.shape).astype(np.float32) for i in session.get_inputs()}
    for got, want in zip(session.run(None, feeds), evaluate(graph, feeds).values(), strict=True):
        np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-5)
