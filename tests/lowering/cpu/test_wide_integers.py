"""Integers beyond 32 bits: OpenVINO gets no operator that can produce them, and no call whose inputs hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from support.needs import needs_libraries
from support.sweep import sweep

import optdnn
from optdnn.errors import RunError
from optdnn.importers.onnx import import_model
from optdnn.lowering.cpu.unsafe import PARAMETERS, openvino_must_not
from optdnn.lowering.cpu.wide_integers import beyond_32_bits
from optdnn.runtime.cpu import openvino
from optdnn.runtime.cpu.library import EXACT_INTEGER
from optdnn.runtime.engine import Engine
from optdnn.types import Array

needs_libraries()

BIG = 2**40 + 3
EDGE = EXACT_INTEGER
LIMITS = np.array([1, -5, EDGE, -EDGE, EDGE - 1, 77], np.int64)
"""The largest integer in calls of OpenVINO."""
X, XB, Y = "int64[6] x", "int64[6] x, int64[6] b", "int64[6] y"
FLOATS = np.array([1.5, -2.5, 3e9, -5e9, 1e12, 7], np.float32)
AXIS = "int64[1] a = {0}"

# name: inputs, outputs, constants, nodes, the operators that OpenVINO must not run
CASES: dict[str, tuple[str, str, str, str, set[str]]] = {
    "a sum": (XB, Y, "", "y = Add(x, b)", set()),
    "a sum of sums": (XB, Y, "", " ".join(f"s{i + 1} = Add(s{i}, s{i})" for i in range(1, 8)).join(
        ["s1 = Add(x, b) ", " y = Sub(s8, x)"]), {"Add"}),
    "a product": (XB, Y, "", "y = Mul(x, b)", {"Mul"}),
    "a product as a float": (XB, "float[6] y", "", "p = Mul(x, b) y = Cast<to = 1>(p)", {"Mul"}),
    "a product with little": (X, Y, "int64 c = {100}", "y = Mul(x, c)", set()),
    "a product with much": (X, Y, "int64 c = {1000003}", "y = Mul(x, c)", {"Mul"}),
    "a constant beyond": (X, Y, f"int64 c = {{{BIG}}}", "y = Add(x, c)", {"Add"}),
    "a constant beyond, compared": (X, "bool[6] y", f"int64 c = {{{BIG}}}", "y = Less(x, c)", {"Less"}),
    "a constant beyond, chosen": (
        X, Y, f"int64 z = {{0}}, int64 c = {{{BIG}}}", "t = Greater(x, z) y = Where(t, x, c)", {"Where"},
    ),
    "an end beyond": (X, "int64[n] y", f"int64[1] s = {{1}}, int64[1] e = {{{2**63 - 1}}}", "y = Slice(x, s, e)", set()),
    "a table of what is beyond": (
        "int64[2] x", "int64[2] y", f"int64[3] t = {{1, {BIG}, {-BIG}}}", "y = Gather(t, x)", {"Gather"},
    ),
    "a table of little": ("int64[2] x", "int64[2] y", "int64[3] t = {1, 7, 9}", "y = Gather(t, x)", set()),
    "a difference": (XB, Y, "", "y = Sub(x, b)", set()),
    "a quotient": (XB, Y, "", "y = Div(x, b)", set()),
    "a quotient of sums": (XB, Y, "", "s = Add(x, b) y = Div(s, b)", {"Div"}),
    "a running sum": (X, Y, "int64 a = {0}", "y = CumSum(x, a)", set()),
    "a running sum of many": ("int64[200] x", "int64[200] y", "int64 a = {0}", "y = CumSum(x, a)", {"CumSum"}),
    "a running sum of truths": (
        "int64[N] x", "int64[N] y", "int64 z = {0}",
        "t = Greater(x, z) i = Cast<to = 7>(t) c = CumSum(i, z) y = Mul(c, i)", set(),
    ),
    "a sum along an axis": (X, "int64[1] y", AXIS, "y = ReduceSum(x, a)", {"ReduceSum"}),
    "the number of truths": (
        X, "int64[1] y", f"{AXIS}, int64 z = {{0}}", "t = Greater(x, z) i = Cast<to = 7>(t) y = ReduceSum(i, a)", set(),
    ),
    "the largest": (X, "int64[1] y", AXIS, "y = ReduceMax(x, a)", set()),
    "the largest of sums": (XB, "int64[1] y", AXIS, "s = Add(x, b) y = ReduceMax(s, a)", {"ReduceMax"}),
    "the largest of int32": ("int32[6] x", "int32[1] y", AXIS, "y = ReduceMax(x, a)", {"ReduceMax"}),
    "squares": (X, "int64[1] y", AXIS, "y = ReduceSumSquare(x, a)", {"ReduceSumSquare"}),
    "a cast of floats": ("float[6] x", Y, "", "y = Cast<to = 7>(x)", {"Cast"}),
    "a cast of bounded floats": ("float[6] x", Y, "", "s = Tanh(x) y = Cast<to = 7>(s)", set()),
    "a cast of clipped floats": (
        "float[6] x", Y, "float l = {-9}, float h = {9}", "c = Clip(x, l, h) y = Cast<to = 7>(c)", set(),
    ),
    "a cast of int32": ("int32[6] x", Y, "", "y = Cast<to = 7>(x)", set()),
    "a sum of int32, cast": ("int32[6] x", Y, "", "i = Cast<to = 7>(x) y = Add(i, i)", {"Add"}),
    "the opposite of a product": (XB, Y, "", "p = Mul(x, b) y = Neg(p)", {"Mul"}),
    "a power": (X, Y, "int64 c = {2}", "y = Pow(x, c)", {"Pow"}),
    "uint64": ("uint64[6] x", "uint64[6] y", "", "y = Mul(x, x)", {"Mul"}),
    "the place of the largest": (X, "int64[1] y", "", "y = ArgMax<axis = 0>(x)", set()),
    "where rows begin": (
        "float[N, 3] x", "int64[K] y", "int64 o = {0}, int64 l = {1}, int64 c = {768}",
        "s = Shape<start = 0, end = 1>(x) n = Squeeze(s) r = Range(o, n, l) y = Mul(r, c)", set(),
    ),
    "where long rows begin": (
        "float[N, 3] x", "int64[K] y", "int64 o = {0}, int64 l = {1}, int64 c = {70000}",
        "s = Shape<start = 0, end = 1>(x) n = Squeeze(s) r = Range(o, n, l) y = Mul(r, c)", {"Mul"},
    ),
    "sizes": (
        "float[N, M] x", "float[K] y", AXIS,
        "s = Shape(x) n = ReduceProd<keepdims = 1>(s, a) y = Reshape(x, n)", set(),
    ),
    "sizes as results": (
        "float[N, M] x", "int64[1] y", f"{AXIS}, int64[1] c = {{1000003}}",
        "s = Shape(x) n = ReduceProd<keepdims = 1>(s, a) y = Mul(n, c)", {"ReduceProd", "Mul"},
    ),
    "known sizes as results": (
        "float[3, 4] x", "int64[1] y", f"{AXIS}, int64[1] c = {{3}}",
        "s = Shape(x) n = ReduceProd<keepdims = 1>(s, a) y = Mul(n, c)", set(),
    ),
}  # fmt: skip
VALUES: dict[str, Array] = {
    "a table of what is beyond": np.array([1, 2]), "a table of little": np.array([1, 2]),
    "a running sum of many": np.full(200, EDGE), "a running sum of truths": np.arange(5) - 2,
    "a cast of floats": FLOATS, "a cast of bounded floats": FLOATS, "a cast of clipped floats": FLOATS,
    "a cast of int32": np.array([1, 2**31 - 1, -(2**31), 5, 6, 7], np.int32),
    "a sum of int32, cast": np.array([1, 2**31 - 1, -(2**31), 5, 6, 7], np.int32),
    "the largest of int32": np.array([1, 2**30 + 1, 2**30 + 3, 5, 6, 7], np.int32),
    "uint64": np.abs(LIMITS).astype(np.uint64), "sizes": np.ones((3, 5), np.float32),
    "where rows begin": np.ones((5, 3), np.float32), "where long rows begin": np.ones((40_000, 3), np.float32),
    "sizes as results": np.ones((300, 50), np.float32), "known sizes as results": np.ones((3, 4), np.float32),
}  # fmt: skip


def model_of(case: str) -> onnx.ModelProto:
    inputs, outputs, constants, nodes, _ = CASES[case]
    head = f'<ir_version: 10, opset_import: ["" : 21]> g ({inputs}) => ({outputs})'
    return onnx.parser.parse_model(f"{head} {f'<{constants}>' if constants else ''} {{ {nodes} }}")


def feeds_of(case: str) -> dict[str, Array]:
    x = VALUES.get(case, LIMITS)
    return {"x": x} | ({"b": x[::-1].copy()} if "b" in CASES[case][0].split()[-1:] else {})


@pytest.mark.parametrize("case", sweep(CASES, *list(CASES)[::3]))
def test_integers_that_openvino_cannot_hold_are_computed_elsewhere(case: str) -> None:
    graph = import_model(model_of(case))
    assert {graph.op(i).kind for i in beyond_32_bits(graph, PARAMETERS)} == CASES[case][4]
    engine = optdnn.build(model_of(case), target="cpu", tactics="openvino", threads=1)
    feeds = feeds_of(case)
    want = optdnn.build(model_of(case), target="reference").run(feeds)["y"]
    got = engine.run(feeds)["y"]
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def on_openvino(engine: Engine) -> bool:
    return [step.executor for step in engine.program.steps] == ["openvino"]


@pytest.mark.parametrize("value", [EDGE + 1, -EDGE - 1, 2**31, -(2**31) - 1, BIG, 2**63 - 1, -(2**63)])
def test_inputs_that_openvino_cannot_hold_run_elsewhere(value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = optdnn.build(model_of("a sum"), target="cpu", tactics="openvino", threads=1)
    assert on_openvino(engine)
    asked = []
    other = openvino.OpenVinoModel.elsewhere
    monkeypatch.setattr(openvino.OpenVinoModel, "elsewhere", lambda *args: asked.append(1) or other(*args))
    x, b = LIMITS.copy(), np.zeros(6, np.int64)
    np.testing.assert_array_equal(engine.run({"x": x, "b": x})["y"], 2 * x)
    assert not asked
    x[3] = value
    np.testing.assert_array_equal(engine.run({"x": x, "b": b})["y"], x)
    assert asked == [1]
    np.testing.assert_array_equal(engine.run({"x": b, "b": b})["y"], b)


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_unsigned_inputs_that_openvino_cannot_hold(dtype: Any) -> None:
    kind = np.dtype(dtype).name
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g ({kind}[3] x, {kind}[3] b) => ({kind}[3] y) {{ y = Max(x, b) }}'
    )
    engine = optdnn.build(model, target="cpu", tactics="openvino", threads=1)
    assert on_openvino(engine)
    x = np.array([1, 2**31 + 7, np.iinfo(dtype).max], dtype)
    np.testing.assert_array_equal(engine.run({"x": x, "b": np.full(3, 5, dtype)})["y"], np.maximum(x, 5))


def test_without_the_other_library_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = optdnn.build(model_of("a sum"), target="cpu", tactics="openvino", threads=1)

    def none(*args: object) -> None:
        raise RunError("onnxruntime does not take this network: no")

    monkeypatch.setattr(openvino, "OnnxRuntimeModel", none)
    with pytest.raises(RunError, match="nor such integers here, and onnxruntime cannot be asked"):
        engine.run({"x": np.full(6, BIG), "b": LIMITS})


def loop(body: str, carried: str = "c0") -> onnx.ModelProto:
    """Three iterations over the carried ``c``, whose next value is ``d``."""
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g (int64[2] c0) => (int64[2] y) <int64 n = {{3}}, bool t = {{1}}>
        {{ y = Loop (n, t, {carried}) <body = b (int64 i, bool go, int64[2] c) => (bool on, int64[2] d)
           {{ on = Identity(go) {body} }}> }}""")


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ("d = Identity(c)", False),
        ("d = Add(c, c)", True),
        ("d = Mul(c, c)", True),
        ("e = Sub(c, i) d = Sign(e)", False),
    ],
)
def test_integers_that_grow_in_a_loop(body: str, refused: bool) -> None:
    graph = import_model(loop(body))
    assert (graph.of_kind("Loop")[0].id in openvino_must_not(graph)) == refused
    x = np.array([3, EDGE])
    engine = optdnn.build(loop(body), target="cpu", tactics="openvino", threads=1)
    want = optdnn.build(loop(body), target="reference").run({"c0": x})["y"]
    np.testing.assert_array_equal(engine.run({"c0": x})["y"], want)


def test_token_ids_and_masks_stay_on_openvino() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (int64[N, S] ids, int64[N, S] mask) => (float[N, S, 4] y) <float one = {1}, int64[1] axis = {2}, float low = {-1e9}>
        { e = Gather(table, ids) m = Cast<to = 1>(mask) u = Unsqueeze(m, axis) i = Sub(one, u) p = Mul(i, low) y = Add(e, p) }"""
    )
    table = np.arange(40, dtype=np.float32).reshape(10, 4)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    assert beyond_32_bits(import_model(model), PARAMETERS) == {}
    engine = optdnn.build(model, target="cpu", tactics="openvino", threads=1)
    assert on_openvino(engine)
    ids = np.array([[1, 9, 3]])
    np.testing.assert_array_equal(engine.run({"ids": ids, "mask": np.ones_like(ids)})["y"], table[ids])
