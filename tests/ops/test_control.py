"""If, Loop and Scan: import, inference, evaluation against ONNX Runtime, engines, export, every refusal."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx.parser
import pytest
from onenode import onnxruntime_run
from onnx import helper, numpy_helper

import optdnn
from optdnn.errors import EngineError, ShapeError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate, promote
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.ir.text import to_text
from optdnn.passes.base import PassContext, run_pipeline
from optdnn.passes.pipelines import PIPELINE
from optdnn.runtime.reference.nested import PlainGraph
from optdnn.runtime.steps.attrs import attrs_from_plain, attrs_to_plain
from optdnn.types import Array

F = np.float32


def model(text: str, opset: int = 17) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}')


def check(m: onnx.ModelProto, *feeds: dict[str, Array]) -> Graph:
    """The graph, its promoted form, its exports, and its engines give the results of ONNX Runtime."""
    graph = import_model(m)
    again = import_model(export_model(graph).proto)
    engine = optdnn.build(m, target="reference", opt_level=3)
    for feed in feeds:
        expected = onnxruntime_run(m, feed)
        for got in (evaluate(graph, feed), evaluate(again, feed), engine.run(feed)):
            for a, b in zip(got.values(), expected, strict=True):
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        wide = evaluate(promote(graph), {k: v.astype(np.float64) if v.dtype == F else v for k, v in feed.items()})
        for a, b in zip(wide.values(), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        exported = export_model(graph).proto
        onnx.checker.check_model(exported, full_check=True)
        exported.ir_version = min(10, exported.ir_version)
        for a, b in zip(onnxruntime_run(exported, feed), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    return graph


X = np.random.default_rng(0).standard_normal((3, 4)).astype(F)

BRANCHES = """g (bool c, float[3,4] x, float[3,4] z) => (y, w) {
    r = Relu(x)
    y, w = If (c) <
      then_branch = a () => (float[3,4] p, float[N] q) {
        p = Add(r, z)  i = Constant<value = int64[1] {-1}>()  q = Reshape(x, i)
      },
      else_branch = b () => (float[3,4] p2, float[M] q2) {
        p2 = Mul(r, r)  j = Constant<value = int64[1] {0}>()  s = Gather(x, j)
        k = Constant<value = int64[1] {-1}>()  q2 = Reshape(s, k)
      }
    >
}"""


def test_if_captures_outer_values() -> None:
    feeds = [{"c": np.array(c), "x": X, "z": X * 2} for c in (True, False)]
    graph = check(model(BRANCHES), *feeds)
    (op,) = graph.of_kind("If")
    assert str(op.outputs[0].type) == "fp32[3, 4]"
    assert len(op.outputs[1].type.dims) == 1
    assert not isinstance(op.outputs[1].type.dims[0], int)
    assert graph.kinds() == {"If": 1, "Relu": 1}


@pytest.mark.parametrize("c", [True, False])
def test_if_of_a_known_condition_is_the_branch(c: bool) -> None:
    m = model(BRANCHES)
    m.graph.initializer.append(numpy_helper.from_array(np.array(c), "c"))
    del m.graph.input[0]
    graph = check(m, {"x": X, "z": X * 2})
    assert "If" not in graph.kinds()
    assert graph.kinds()["Add" if c else "Mul"] == 1
    assert all(op.src for op in graph.ops() if op.kind in ("Add", "Mul"))


def test_a_branch_that_sizes_contradict_names_the_way_out() -> None:
    """Silero VAD's form: the branches are for different sampling rates."""
    m = model("""g (bool c, float[3,4] x, float[3,5] z) => (y) {
        y = If (c) < then_branch = t () => (p) { p = Relu(x) }, else_branch = e () => (q) { q = Add(x, z) } >
    }""")
    with pytest.raises(ShapeError) as e:
        import_model(m)
    assert e.value.hint is not None
    assert "--value" in e.value.hint
    engine = optdnn.build(m, target="reference", values={"c": True})
    np.testing.assert_array_equal(engine.run({"x": X, "z": np.zeros((3, 5), F)})["y"], np.maximum(X, 0))


def test_a_condition_that_shapes_decide() -> None:
    text = """g (float[3,4] x) => (y) {
      s = Shape(x)  i = Constant<value = int64 {0}>()  d = Gather(s, i)  three = Constant<value = int64 {3}>()
      c = Equal(d, three)
      y = If (c) <then_branch = a () => (p) { p = Neg(x) }, else_branch = b () => (q) { q = Abs(x) }>
    }"""
    graph = import_model(model(text))
    assert "If" not in graph.kinds()
    assert graph.kinds()["Neg"] == 1
    np.testing.assert_array_equal(evaluate(graph, {"x": X})["y"], -X)


LOOP = """g (int64 n, float[3] x) => (float[3] last, float[K,3] all) {
    t = Constant<value = bool {1}>()
    last, all = Loop (n, t, x) <
      body = b (int64 i, bool going, float[3] v) => (going2, v2, row) {
        limit = Constant<value = float {100.0}>()
        f = Cast<to = 1>(i)  k = Add(v, f)  v2 = Add(k, x)  row = Mul(v2, v2)
        m = ReduceMax<keepdims = 0>(v2)
        going2 = Less(m, limit)
      }
    >
}"""


@pytest.mark.parametrize("n", [0, 1, 4, 1000])
def test_loop_with_scan_outputs_and_a_condition(n: int) -> None:
    feed = {"n": np.array(n), "x": np.array([1, 2, 3], F)}
    graph = check(model(LOOP), feed)
    (op,) = graph.of_kind("Loop")
    assert str(op.outputs[0].type) == "fp32[3]"
    assert op.outputs[1].type.dims[1] == 3


def test_a_carried_size_that_grows() -> None:
    text = """g (int64 n, float[2] x) => (float[N] y) {
      t = Constant<value = bool {1}>()
      y = Loop (n, t, x) <
        body = b (int64 i, bool c, float[L] v) => (c2, w) { c2 = Identity(c)  w = Concat<axis = 0>(v, x) }
      >
    }"""
    graph = check(model(text), {"n": np.array(3), "x": np.array([1, 2], F)})
    (op,) = graph.of_kind("Loop")
    assert not isinstance(op.outputs[0].type.dims[0], int)


def test_a_list_that_grows_is_read_or_not() -> None:
    """Two lists: the body only appends to one of them, and also reads the other. One is empty at the beginning."""
    text = """g (int64 n, float[0,2] x, float[1,2] z) => (float[k,2] y, float[j,2] w)
    <bool t = {1}, int64[1] axes = {0}, int64[2] row = {1, 2}> {
      y, w = Loop (n, t, x, z) <
        body = b (int64 i, bool c, float[a,2] v, float[b,2] u) => (bool d, float[a1,2] v2, float[b1,2] u2) {
          d = Identity(c)  s = ReduceSum<keepdims = 0>(u)  f = Cast<to = 1>(i)  e = Add(s, f)  r = Expand(e, row)
          v2 = Concat<axis = 0>(v, r)  u2 = Concat<axis = 0>(u, r) }>
    }"""
    for n in (0, 1, 4):
        check(model(text), {"n": np.array(n), "x": np.zeros((0, 2), F), "z": np.ones((1, 2), F)})


def test_a_known_count_is_the_length() -> None:
    text = """g (float[3] x) => (float[5,3] y) {
      n = Constant<value = int64 {5}>()
      t = Constant<value = bool {1}>()
      v, y = Loop (n, t, x) <
        body = b (int64 i, bool c, float[3] v) => (c2, w, row) { c2 = Identity(c)  w = Add(v, x)  row = Identity(w) }
      >
    }"""
    graph = check(model(text), {"x": np.array([1, 2, 3], F)})
    assert str(graph.op(graph.outputs[0]).outputs[0].type) == "fp32[5, 3]"


def test_loops_and_branches_inside_of_one_another() -> None:
    text = """g (int64 n, float[3] x, bool flip) => (float[3] y) {
      t = Constant<value = bool {1}>()
      y = Loop (n, t, x) <
        body = b (int64 i, bool c, float[3] v) => (c2, w) {
          c2 = Identity(c)
          w = If (flip) <
            then_branch = p () => (u) {
              two = Constant<value = int64 {2}>()
              u = Loop (two, c, v) <body = d (int64 j, bool e, float[3] a) => (e2, a2) { e2 = Identity(e)  a2 = Sub(a, x) }>
            },
            else_branch = q () => (s) { s = Add(v, x) }
          >
        }
      >
    }"""
    feeds = [{"n": np.array(3), "x": np.array([1, 2, 3], F), "flip": np.array(f)} for f in (True, False)]
    check(model(text), *feeds)


def test_scan() -> None:
    text = """g (float[2] s, float[5,2] x, float[2,5] z) => (float[2] last, float[2,5] rows, float[5,2] sums) {
      last, rows, sums = Scan <
        num_scan_inputs = 2, scan_input_axes = [0, 1], scan_input_directions = [0, 1],
        scan_output_axes = [1, 0], scan_output_directions = [0, 1],
        body = b (float[2] a, float[2] v, float[2] w) => (a2, row, sum) {
          a2 = Add(a, v)  row = Mul(a2, w)  sum = Add(row, s)
        }
      > (s, x, z)
    }"""
    rng = np.random.default_rng(1)
    feed = {k: rng.standard_normal(d).astype(F) for k, d in (("s", 2), ("x", (5, 2)), ("z", (2, 5)))}
    graph = check(model(text), feed)
    assert [str(graph.op(i).outputs[0].type) for i in graph.outputs] == ["fp32[2]", "fp32[2, 5]", "fp32[5, 2]"]


def test_the_state_of_a_scan_keeps_its_shape() -> None:
    text = """g (float[2] s, float[3,2] x) => (float[k,l] last) {
      last = Scan <num_scan_inputs = 1, body = b (float[2] a, float[2] v) => (c) { c = Mul(a, x) }> (s, x)
    }"""
    with pytest.raises(optdnn.ShapeError, match=r"begins as fp32\[2\], and the body turns it into fp32\[3, 2\]"):
        import_model(model(text))


def test_large_constants_of_a_body_become_operands() -> None:
    big = np.random.default_rng(2).standard_normal((100, 100)).astype(F)

    def branch(name: str, op: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(name, 1, [100, 100])
        return helper.make_graph([helper.make_node(op, ["x", "W"], [name])], name, [], [out],
                                 [numpy_helper.from_array(big, "W")] if op == "Add" else [])  # fmt: skip

    node = helper.make_node("If", ["c"], ["y"], then_branch=branch("p", "Add"), else_branch=branch("q", "Sub"))
    info = helper.make_tensor_value_info
    g = helper.make_graph([node], "g", [info("c", 9, []), info("x", 1, [100, 100])], [info("y", 1, [100, 100])],
                          [numpy_helper.from_array(big * 2, "W")])  # fmt: skip
    m = helper.make_model(g, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    graph = import_model(m)
    x = np.ones((100, 100), F)
    np.testing.assert_array_equal(evaluate(graph, {"c": np.array(True), "x": x})["y"], x + big)
    np.testing.assert_array_equal(evaluate(graph, {"c": np.array(False), "x": x})["y"], x - big * 2)
    (op,) = graph.of_kind("If")
    assert len(op.inputs) == 5
    assert all(c.size <= 4096 for c in op.attrs.then_branch.plain.constants)
    engine = optdnn.build(m, target="reference")
    np.testing.assert_array_equal(engine.run({"c": np.array(True), "x": x})["y"], x + big)


def test_cpu_engine() -> None:
    engine = optdnn.build(model(LOOP), target="cpu", threads=1)
    feed = {"n": np.array(4), "x": np.array([1, 2, 3], F)}
    for a, b in zip(engine.run(feed).values(), onnxruntime_run(model(LOOP), feed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


NO_TRIPS = {
    "a loop": """g (int64 n, float[3] x) => (float[3] last, float[K,3] rows, float[L,2,3] more) {
      t = Constant<value = bool {1}>()  i = Constant<value = int64[2] {0, 0}>()  zero = Constant<value = int64[1] {0}>()
      last, rows, more = Loop (n, t, x) <
        body = b (int64 i, bool c, float[3] v) => (c2, w, row, two) {
          c2 = Identity(c)  w = Add(v, x)  row = Identity(w)  u = Unsqueeze(w, zero)  two = Concat<axis = 0>(u, u)
        }
      >
    }""",
    "in a loop": """g (int64 n, float[3] x) => (float[3] last, float[K,L,3] rows) {
      t = Constant<value = bool {1}>()  two = Constant<value = int64 {2}>()
      last, rows = Loop (two, t, x) <
        body = b (int64 i, bool c, float[3] v) => (c2, w, inner) {
          c2 = Identity(c)
          w, inner = Loop (n, t, v) <
            body = d (int64 j, bool e, float[3] a) => (e2, a2, row) { e2 = Identity(e)  a2 = Neg(a)  row = Identity(a2) }
          >
        }
      >
    }""",
    "in a branch": """g (int64 n, float[3] x) => (float[K,3] rows) {
      t = Constant<value = bool {1}>()  one = Constant<value = int64 {1}>()  c = Less(n, one)
      rows = If (c) <
        then_branch = p () => (float[L,3] u) {
          last, u = Loop (n, t, x) <
            body = d (int64 j, bool e, float[3] a) => (e2, a2, row) { e2 = Identity(e)  a2 = Neg(a)  row = Identity(a2) }
          >
        },
        else_branch = q () => (float[1,3] s) { zero = Constant<value = int64[1] {0}>()  s = Unsqueeze(x, zero) }
      >
    }""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NO_TRIPS)
@pytest.mark.parametrize("trips", [[0, 2, 0], [2, 0, 1]])
def test_no_trips_give_no_rows_on_every_target(name: str, trips: list[int]) -> None:
    m, x = model(NO_TRIPS[name]), np.array([1, 2, 3], F)
    check(m, *({"n": np.array(n), "x": x} for n in trips))
    engines = [optdnn.build(m, target=t) for t in ("cpu", "simulate")]
    for n in trips:
        feed = {"n": np.array(n), "x": x}
        for engine in engines:
            for got, want in zip(engine.run(feed).values(), onnxruntime_run(m, feed), strict=True):
                assert got.shape == want.shape
                np.testing.assert_array_equal(got, want)


def test_fewer_than_no_trips_are_none() -> None:
    text = """g (float[3] x) => (float[3] last, float[K,3] rows) {
      n = Constant<value = int64 {-1}>()
      last, rows = Loop (n, , x) <body = b(int64 i, bool c, float[3] v) => (bool c2, float[3] w, float[3] row) {
          c2 = Identity(c)  w = Neg(v)  row = Exp(v)
        }
      >
    }"""
    m, x = model(text), np.array([1, 2, 3], F)
    check(m, {"x": x})
    for target in ("cpu", "simulate"):
        got = optdnn.build(m, target=target).run({"x": x})
        assert got["rows"].shape == (0, 3)
        assert (got["last"] == x).all()


def test_rows_of_no_iterations_have_the_sizes_of_the_bodys_operands() -> None:
    text = """g (int64 n, float[B,3] x) => (float[K,B,3] rows, float[K,C] twice, float[K,D] some) {
      t = Constant<value = bool {1}>()  one = Constant<value = int64[1] {-1}>()
      last, rows, twice, some = Loop (n, t, x) <
        body = b (int64 i, bool c, float[B,3] v) => (c2, w, row, both, kept) {
          c2 = Identity(c)  w = Identity(v)  row = Neg(x)  both = Reshape(v, one)  f = Cast<to = 9>(both)  kept = Compress(both, f)
        }
      >
    }"""
    graph = import_model(model(text))
    got = evaluate(graph, {"n": np.array(0), "x": np.ones((4, 3), F)})
    assert [a.shape for a in got.values()] == [(0, 4, 3), (0, 12), (0, 0)]


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_scan_of_nothing_gives_its_state_and_no_rows(length: int) -> None:
    text = """g (float[2] s, float[N,2] x) => (float[2] last, float[2,N] rows, float[N,2,2] more) {
      last, rows, more = Scan <num_scan_inputs = 1, scan_output_axes = [1, 0], scan_output_directions = [0, 1],
        body = b (float[2] a, float[2] v) => (a2, row, square) {
          a2 = Add(a, v)  row = Mul(a2, v)
          i = Constant<value = int64[1] {0}>()  u = Unsqueeze(a2, i)  square = Concat<axis = 0>(u, u)
        }
      > (s, x)
    }"""
    m = model(text)
    feed = {"s": np.array([1, 2], F), "x": np.ones((length, 2), F)}
    if length:
        check(m, feed)
    for target in ("reference", "simulate"):
        engine = optdnn.build(m, target=target, **({"shapes": {"x": (length, 2)}} if target == "simulate" else {}))
        last, rows, more = engine.run(feed).values()
        np.testing.assert_array_equal(last, feed["s"] + length)
        assert (rows.shape, more.shape) == ((2, length), (length, 2, 2))


def test_a_loop_that_does_not_run_gives_its_state_as_no_rows_of_its_type() -> None:
    text = """
    g (int64 n, int32 x) => (int32 y, int32[t] all) {
        y, all = Loop(n, , x) <body = b (int64 i, bool c, int32 v) => (bool d, int32 w, int32 v2)
            { d = Identity(c)  w = Add(v, v)  v2 = Identity(v) }>
    }"""
    graph = import_model(model(text))
    run_pipeline(graph, PIPELINE(3, "cpu"), PassContext("cpu"))
    got = evaluate(graph, {"n": np.array(0), "x": np.array(3, np.int32)})
    assert [(a.dtype, a.shape) for a in got.values()] == [(np.int32, ()), (np.int32, (0,))]


def test_text_form_shows_bodies_by_their_digests() -> None:
    (body,) = re.findall("body=@[0-9a-f]{16}", to_text(import_model(model(LOOP))))
    assert body in to_text(import_model(model(LOOP)))
    other = LOOP.replace("row = Mul(v2, v2)", "row = Add(v2, v2)")  # as many ops as before
    assert body not in to_text(import_model(model(other)))


def test_plain_form_survives_an_engine_file(monkeypatch: pytest.MonkeyPatch) -> None:
    (op,) = import_model(model(LOOP)).of_kind("Loop")
    plain = attrs_to_plain({"body": op.attrs.body.plain})
    (back,) = attrs_from_plain(plain).values()
    assert isinstance(back, PlainGraph)
    assert back.outputs == op.attrs.body.plain.outputs
    assert [o.kind for o in back.ops] == [o.kind for o in op.attrs.body.plain.ops]
    inputs, constants, ops, outputs, shapes = plain["body"]["graph"]
    assert back.shapes == op.attrs.body.plain.shapes
    (old,) = attrs_from_plain({"body": {"graph": [inputs, constants, ops, outputs]}}).values()
    assert old.shapes == ()
    for broken in (
        [inputs, constants, ops, outputs, shapes[:-1]],
        [inputs, constants, ops, outputs, [*shapes[:-1], [-3]]],
        [inputs, constants, ops, outputs, [*shapes[:-1], 3]],
        [inputs, constants, ops, outputs, shapes, shapes],
        [inputs, constants, ops, [999]],
        [inputs, constants, [[*ops[0][:1], [77], *ops[0][2:]]], outputs],
        [inputs, constants, [["Evil", *ops[0][1:]]], [0]],
        [inputs, constants, [ops[0][:2]], [0]],
        [inputs, [1], [], [0]],
        [-1, [], [], []],
        [inputs, constants, [[ops[0][0], ["a"], *ops[0][2:]]], [0]],
    ):
        with pytest.raises(EngineError, match="malformed"):
            attrs_from_plain({"body": {"graph": broken}})
