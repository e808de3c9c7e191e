"""Sampling positions in images are computed in fp32 from the results of inputs and layers."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.check import from_text

import optdnn
from optdnn.ir.verify import verify
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.support.coordinates import coordinates
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.types import FP16, FP32

HEAD = '<ir_version: 9, opset_import: ["": 17]>\n'
WARP = (
    HEAD
    + """g (float[1,2,9,700] x, float[1,2,3] m, float[1,3,8] p) => (float[1,2,1,8] y)
<float[1] third = {0.00285714}, int64[2] one = {1, 0}, int64[1] front = {1}, int64[1] last = {0}>
{ q = MatMul(m, p) s = Mul(q, third) t = Transpose<perm = [0, 2, 1]>(s) g = Unsqueeze(t, front) f = Relu(x)
  y = GridSample<align_corners = 1>(f, g) }"""
)


def names(text: str) -> set[str]:
    graph = from_text(text)
    return {graph.op(i).outputs[0].name for i in coordinates(graph)}


def test_places_of_inputs_stay_fp32() -> None:
    graph = from_text(WARP)
    assert {graph.op(i).outputs[0].name for i in coordinates(graph)} == {"q", "s", "t", "g"}
    report = AssignPrecision()(graph, PassContext(target="cuda:sm_90a", plan=PrecisionPlan("fp16")))
    verify(graph)
    (op,) = graph.of_kind("GridSample")
    image, places = (graph.type(v).dtype for v in op.inputs[:2] if v is not None)
    assert (image, places, op.outputs[0].type.dtype) == (FP16, FP32, FP16)
    assert any("it computes positions that GridSample y reads" in r.reason for r in report.refused)


def test_corners_of_regions_stay_fp32() -> None:
    text = (
        HEAD
        + """g (float[1,2,9,700] x, float[5,4] r, int64[5] i) => (float[5,2,1,8] y)
    <float scale = {700}> { s = Mul(r, scale) y = RoiAlign<output_height = 1, output_width = 8>(x, s, i) }"""
    )
    assert names(text) == {"s"}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_images_are_read_at_the_right_places(precision: str) -> None:
    """The picture is a ramp: an error of the position is an error of the result. In fp16 it would be a quarter of a pixel."""
    rng = np.random.default_rng(0)
    ramp = np.broadcast_to(np.arange(700, dtype=np.float32) % 32, (1, 2, 9, 700))
    at = np.floor(rng.uniform(0, 680, 8) / 32) * 32 + 10.4
    m = np.array([[[1, 0, -349.5], [0, 1, 0]]], np.float32)
    p = np.stack([at, np.zeros(8), np.ones(8)]).astype(np.float32)[None]
    proto = onnx.parser.parse_model(WARP.replace("0.00285714", str(2 / 699)))
    found = optdnn.build(proto, target="simulate", precision=precision).run({"x": ramp.copy(), "m": m, "p": p})["y"]
    np.testing.assert_allclose(found, np.full((1, 2, 1, 8), 10.4), atol=0.01 if precision == "fp16" else 0.04)


PREDICTED = """g (float[1,2,8,8] x, float[2,2,1,1] w, float[1,8,8,2] base) => (float[1,2,8,8] y)
<float two = {{2}}> {{ c = Conv(x, w) {g} y = GridSample(x, g) }}"""


@pytest.mark.parametrize(
    ("arithmetic", "kept"),
    [
        ("t = Transpose<perm = [0, 2, 3, 1]>(c) s = Mul(t, two) g = Add(s, base)", {"s", "g"}),
        ("s = Tanh(c) g = Transpose<perm = [0, 2, 3, 1]>(s)", {"s", "g"}),
        ("g = Transpose<perm = [0, 2, 3, 1]>(c)", set()),
        ("s = Softmax(base) g = Add(s, base)", {"g"}),
    ],
    ids=["offsets", "a bound", "only moved", "a softmax"],
)
def test_predictions_of_a_layer_are_rounded_once(arithmetic: str, kept: set[str]) -> None:
    assert names(HEAD + PREDICTED.format(g=arithmetic)) == kept


FLOW = (
    HEAD
    + """g (float[1,2,8,8] x, float[2,2,1,1] w, float[1,2,8,8] pixels) => (float[1,2,8,8] flow)
{ c = Conv(x, w) p = Add(pixels, c) g = Transpose<perm = [0, 2, 3, 1]>(p) y = GridSample(x, g) d = Conv(y, w) e = Add(p, d)
  flow = Sub(e, pixels) }"""
)


def test_places_that_layers_move_and_their_distances_stay_fp32() -> None:
    assert names(FLOW) == {"p", "g", "e", "flow"}
    reasons = set(coordinates(from_text(FLOW)).values())
    assert "it moves sampling positions of an image, or computes distances from them" in reasons


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ("flow = Sub(e, pixels)", "f = Mul(e, pixels) flow = Sub(f, c)", {"p", "g", "e"}),
        ("e = Add(p, d)", "z = GlobalAveragePool(p) e = Add(z, d)", {"p", "g"}),
    ],
    ids=["products", "a mean"],
)
def test_other_sums_do_not(old: str, new: str, kept: set[str]) -> None:
    assert names(FLOW.replace(old, new)) == kept


@pytest.mark.parametrize(("precision", "bound"), [("fp16", 0.02), ("bf16", 0.1), ("fp32", 1e-3)])
def test_the_flow_of_far_pixels_is_right(precision: str, bound: float) -> None:
    """At pixel 700, fp16 has steps of a half, and bf16 of four. The images there are empty, so only the first layer moves."""
    rng = np.random.default_rng(0)
    shapes = {"x": (1, 2, 8, 8), "w": (2, 2, 1, 1)}
    feeds = {k: rng.uniform(-1, 1, s).astype(np.float32) for k, s in shapes.items()}
    feeds["pixels"] = np.full((1, 2, 8, 8), 700, np.float32)
    engine = optdnn.build(onnx.parser.parse_model(FLOW), target="simulate", precision=precision)
    want = np.einsum("oi,bihw->bohw", feeds["w"][..., 0, 0], feeds["x"])
    np.testing.assert_allclose(engine.run(feeds)["flow"], want, atol=bound)


def test_long_rows_are_features() -> None:
    text = WARP.replace("float[1,2,3] m, float[1,3,8] p", "float[1,2,5] m, float[1,5,8] p")
    assert names(text) == {"s", "t", "g"}


def test_a_plan_that_names_the_operator_is_obeyed() -> None:
    graph = from_text(WARP)
    named = {next(iter(graph.op(i).src)): "fp16" for i in coordinates(graph)}
    AssignPrecision()(graph, PassContext(target="cuda:sm_90a", plan=PrecisionPlan("fp16", nodes=named)))
    (op,) = graph.of_kind("GridSample")
    assert graph.type(op.inputs[1]).dtype == FP16  # type: ignore[arg-type]


GRID = (
    HEAD
    + """g (float[900,2] x, float[900] t) => (float[900] y, float[900] z)
<float many = {800}, float[2] one = {1, 1}, int64[1] last = {1}>
{ p = Mul(x, many) f = Floor(p) i = Cast<to = 7>(f) a = Gather(t, i) d = Sub(p, f) e = Sub(one, d) w = Mul(e, a)
  y = ReduceSum<keepdims = 0>(w, last) q = Relu(x) z = ReduceSum<keepdims = 0>(q, last) }"""
)


def test_places_in_a_table_and_distances_from_them_stay_fp32() -> None:
    assert names(GRID) == {"p", "f", "i", "d"}
    reasons = coordinates(from_text(GRID)).values()
    assert set(reasons) == {
        "it computes positions that Gather a reads",
        "it computes distances from positions in a table",
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("i = Cast<to = 7>(f)", "i = ArgMax<axis = 1>(p)"),
        ("a = Gather(t, i)", "a = Cast<to = 1>(i)"),
    ],
    ids=["ranked", "not read as a place"],
)
def test_other_integers_are_no_places_in_tables(old: str, new: str) -> None:
    assert names(GRID.replace(old, new)) == set()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_tables_are_read_at_the_right_places(precision: str) -> None:
    """The table is a ramp of short steps, read between its elements. In fp16, positions near 700 have steps of a half."""
    proto = onnx.parser.parse_model(GRID)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.random((900, 2)).astype(np.float32), "t": (np.arange(900, dtype=np.float32) % 8)}
    want = optdnn.build(proto, target="reference").run(feeds)["y"]
    found = optdnn.build(proto, target="simulate", precision=precision).run(feeds)["y"]
    np.testing.assert_allclose(found, want, atol=0.02 if precision == "fp16" else 0.15)


def test_a_cast_that_another_operator_absorbs() -> None:
    """The model's own rounding of a distance to 16 bits is a cast that stays fp32 itself."""
    text = GRID.replace(
        "d = Sub(p, f)",
        "h = Cast<to = 10>(p) p2 = Cast<to = 1>(h) i2 = Cast<to = 7>(p2) b = Gather(t, i2) d0 = Sub(p, f) d = Add(d0, b)",
    )
    graph = from_text(text)
    AssignPrecision()(graph, PassContext(target="cuda:sm_90a", plan=PrecisionPlan("fp16")))
    verify(graph)
    assert {op.outputs[0].type.dtype for op in graph.of_kind("Gather")} == {FP16}
