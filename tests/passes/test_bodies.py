"""Passes inside of the bodies of If, Loop and Scan."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

from optdnn.importers.onnx import import_model
from optdnn.ir.body import GraphBody
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.ir.verify import verify
from optdnn.passes import bodies
from optdnn.passes.base import PassContext
from optdnn.passes.bodies import OptimizeBodies

HEAD = '<ir_version: 8, opset_import: ["": 17]>'
LOOP = f"""{HEAD} g (int64 n, float[4] x) => (float[4] y) <bool go = {{1}}> {{
    y = Loop(n, go, x) <body = b (int64 i, bool c, float[4] v) => (bool d, float[4] w)
        <float[4] one = {{1, 1, 1, 1}}, float[4] two = {{2, 2, 2, 2}}> {{
        d = Identity(c)
        s = Mul(one, two)
        t = Mul(two, one)
        dead = Exp(v)
        a = Add(v, s)
        w = Add(a, t)
    }}>
}}"""
IF = f"""{HEAD} g (bool c, float[4] x) => (float[4] y) {{
    y = If(c) <then_branch = t () => (float[4] a) {{
        k = Constant<value = float[4] {{1, 2, 3, 4}}>()
        m = Neg(k)
        a = Add(x, m)
    }}, else_branch = e () => (float[4] b) {{ b = Relu(x) }}>
}}"""


def body_of(graph: Graph, name: str) -> Graph:
    (op,) = graph.of_kind("Loop", "If")
    found = getattr(op.attrs, name)
    assert isinstance(found, GraphBody)
    return found.graph


def optimized(text: str) -> tuple[Graph, Graph, Any]:
    before, after = (import_model(onnx.parser.parse_model(text)) for _ in range(2))
    report = OptimizeBodies()(after)
    verify(after)
    return before, after, report


def test_constants_in_a_loop_are_folded() -> None:
    before, after, report = optimized(LOOP)
    assert body_of(before, "body").kinds()["Mul"] == 2
    kinds = body_of(after, "body").kinds()
    assert "Mul" not in kinds
    assert "Exp" not in kinds
    assert report.changes >= 3
    assert not report.refused
    assert len(body_of(after, "body").inputs) == len(body_of(before, "body").inputs)
    feeds = {"n": np.array(3), "x": np.arange(4, dtype=np.float32)}
    np.testing.assert_array_equal(evaluate(after, feeds)["y"], evaluate(before, feeds)["y"])
    assert OptimizeBodies()(after).changes == 0  # idempotent


def test_branches_of_if() -> None:
    before, after, report = optimized(IF)
    assert body_of(after, "then_branch").kinds() == {"Add": 1}
    assert body_of(after, "else_branch").kinds() == {"Relu": 1}
    assert report.changes >= 1
    for c in (True, False):
        feeds = {"c": np.array(c), "x": np.arange(4, dtype=np.float32)}
        np.testing.assert_array_equal(evaluate(after, feeds)["y"], evaluate(before, feeds)["y"])


def test_bodies_within_bodies() -> None:
    inner = IF[IF.index("y = If") : IF.rindex("}")].replace("y = If(c)", "w = If(c)").replace("x", "v")
    text = f"""{HEAD} g (int64 n, float[4] x) => (float[4] y) <bool go = {{1}}> {{
        y = Loop(n, go, x) <body = b (int64 i, bool c, float[4] v) => (bool d, float[4] w) {{
            d = Identity(c)
            {inner}
        }}>
    }}"""
    _, after, _ = optimized(text)
    (op,) = body_of(after, "body").of_kind("If")
    assert op.attrs.then_branch.graph.kinds() == {"Add": 1}


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = import_model(onnx.parser.parse_model(LOOP))
    monkeypatch.setattr(bodies, "CONSTANT_LIMIT", 3)
    report = OptimizeBodies()(graph, PassContext())
    assert [r.reason for r in report.refused] == ["its body would hold constants that are too large"]
    assert body_of(graph, "body").kinds()["Mul"] == 2
