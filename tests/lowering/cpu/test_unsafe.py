"""Operators that a library must not run: the target cpu runs them elsewhere, with right results."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from support.needs import needs_libraries
from support.quantized_nets import QNet

from optdnn.compiler import build_verbose
from optdnn.config import BuildOptions
from optdnn.dim import symbol
from optdnn.errors import RunError, ShapeError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.lowering.cpu.library import LIBRARIES, Contender
from optdnn.lowering.cpu.unsafe import (
    PARAMETERS,
    data_dependent,
    onnxruntime_must_not,
    openvino_must_not,
    sized_by_data,
)
from optdnn.ops.table import OPDEFS
from optdnn.types import DTYPES, FP32, INT64, TensorType, tensor


def cumulative() -> Graph:
    """Relu, then CumSum along an axis that is an input."""
    graph = Graph("cumulative")
    x, axis = graph.add_input("x", tensor(np.float32, 3, 4)), graph.add_input("axis", tensor(np.int64))
    relu = graph.add("Relu", [x], names=["r"], src=["relu"])
    graph.add_output(graph.add("CumSum", [relu.value, axis], OPDEFS["CumSum"].attrs(), src=["sum"]).value, "y")
    return graph


def test_openvino_gets_no_parameters_from_inputs():
    graph = cumulative()
    (cumsum,) = graph.of_kind("CumSum")
    assert list(openvino_must_not(graph)) == [cumsum.id]
    assert "'axis'" in openvino_must_not(graph)[cumsum.id]
    assert onnxruntime_must_not(graph) == {}


def test_openvino_gets_parameters_from_shapes_and_constants():
    graph = Graph()
    x = graph.add_input("x", TensorType(FP32, (symbol("N"), 4)))
    shape = graph.add("Shape", [x], OPDEFS["Shape"].attrs()).value
    axis = graph.add_constant(np.array(0), "axis")
    y = graph.add("CumSum", [x, axis], OPDEFS["CumSum"].attrs()).value
    graph.add_output(graph.add("Expand", [y, shape]).value, "y")
    assert openvino_must_not(graph) == {}
    assert shape.op not in data_dependent(graph)
    assert y.op in data_dependent(graph)


def test_openvino_gets_no_sizes_that_are_not_known():
    """The size is computed from a shape in floats, so nothing is known of it."""
    graph = Graph()
    x = graph.add_input("x", TensorType(FP32, (symbol("N"), 4)))
    shape = graph.add("Shape", [x], OPDEFS["Shape"].attrs()).value
    root = graph.add("Sqrt", [graph.add("Cast", [shape], OPDEFS["Cast"].attrs(to=FP32)).value]).value
    size = graph.add("Cast", [root], OPDEFS["Cast"].attrs(to=INT64), names=["size"]).value
    tile = graph.add("Tile", [x, size])
    graph.add_output(tile.value, "y")
    assert openvino_must_not(graph) == {
        tile.id: "openvino does not check 'size', which follows from sizes: a wrong value may crash it"
    }


def pads(dims, *amounts):
    graph = Graph()
    x = graph.add_input("x", TensorType(FP32, dims))
    op = graph.add("Pad", [x, graph.add_constant(np.array(amounts), "pads")], OPDEFS["Pad"].attrs())
    graph.add_output(op.value, "y")
    return graph


def test_pads_may_take_no_more_than_there_is():
    n = symbol("N")
    for graph, refused in (
        (pads((n,), 2, 3), False),
        (pads((n + 1,), -1, 0), False),
        (pads((n,), -1, 2), True),
        (pads((4, 4), 0, -4, 0, 1), False),
    ):
        assert bool(openvino_must_not(graph)) is refused


@pytest.mark.parametrize(
    ("dtype", "shape", "refused"),
    [(FP32, (4,), False), (FP32, (4, 3), False), (INT64, (4, 3), False), (INT64, (4,), True), (INT64, None, True)],
)
def test_openvino_gets_a_gather_that_gives_zeros_outside(dtype, shape, refused):
    graph = Graph()
    x, i = graph.add_input("x", TensorType(dtype, shape)), graph.add_input("i", tensor(INT64, 2))
    op = graph.add("Gather", [x, i], OPDEFS["Gather"].attrs(0))
    graph.add_output(op.value, "y")
    assert list(openvino_must_not(graph)) == ([op.id] if refused else [])
    assert onnxruntime_must_not(graph) == {}


def test_a_constant_outside_is_an_error_of_the_build():
    graph = Graph()
    x = graph.add_input("x", tensor(FP32, 1, 4))
    i = graph.add_constant(np.array([[0, 2]]), "i")
    graph.add_output(graph.add("GatherND", [x, i], OPDEFS["GatherND"].attrs()).value, "y")
    model = export_model(graph).proto
    (held,) = model.graph.initializer
    held.raw_data = np.array([[1_000_000, 2]]).tobytes()
    for target in ("cpu", "reference", "simulate"):
        with pytest.raises(ShapeError, match="GatherND index 1000000 is out of range for axis 0"):
            build_verbose(model, BuildOptions(target=target))


def test_the_nodes_that_the_exporter_writes_are_checked_too():
    """An operator that is exported as several nodes: the kinds of these nodes must be allowed, too."""
    graph = Graph()
    x = graph.add_input("x", tensor(FP32, 2, 4))
    slot = graph.add_input("i", tensor(INT64, 2))
    op = graph.add("TensorScatter", [graph.add_input("cache", tensor(FP32, 2, 6, 4)),
                                     graph.add("Unsqueeze", [x, graph.add_constant(np.array([1]), "a")]).value, slot],
                   OPDEFS["TensorScatter"].attrs())  # fmt: skip
    graph.add_output(op.value, "y")
    assert openvino_must_not(graph) == {}
    contender = Contender(graph, LIBRARIES["openvino"], "fp32")
    assert [f["operator"] for f in contender.fallbacks] == ["TensorScatter"]
    assert "does not check" in contender.fallbacks[0]["reason"]


def test_the_table_names_kinds_and_slots_that_exist():
    assert set(PARAMETERS) <= set(OPDEFS)


@pytest.mark.parametrize("tactics", ["auto", "openvino"])
def test_the_build_cuts_such_operators_out_and_reports_it(tactics):
    needs_libraries()
    graph = cumulative()
    built = build_verbose(export_model(graph).proto, BuildOptions(target="cpu", threads=1, tactics=tactics))
    (fallback,) = built.compiled.fallbacks["openvino"]
    assert (fallback["node"], fallback["operator"]) == ("sum", "CumSum")
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for axis in (0, 1):
        feeds = {"x": x, "axis": np.array(axis)}
        assert np.array_equal(built.engine.run(feeds)["y"], evaluate(graph, feeds)["y"])
    with pytest.raises(RunError):  # an error, not a crash of the process
        built.engine.run({"x": x, "axis": np.array(7)})


def test_onnxruntime_gets_no_maxunpool_with_an_output_shape():
    graph = Graph()
    x = graph.add_input("x", tensor(np.float32, 1, 1, 2, 2))
    i = graph.add_input("i", tensor(np.int64, 1, 1, 2, 2))
    attrs = OPDEFS["MaxUnpool"].attrs(kernel_shape=(2, 2), strides=(2, 2), pads=(0, 0, 0, 0))
    plain = graph.add("MaxUnpool", [x, i], attrs)
    shape = graph.add_constant(np.array([1, 1, 5, 5]), "shape")
    placed = graph.add("MaxUnpool", [x, i, shape], attrs)
    graph.add_output(plain.value, "p")
    graph.add_output(placed.value, "y")
    assert list(onnxruntime_must_not(graph)) == [placed.id]


@pytest.mark.parametrize(("ratio", "refused"), [(0, True), (2, False)])
def test_onnxruntime_gets_no_regions_sampled_by_their_size(ratio: int, refused: bool) -> None:
    graph = Graph()
    x, rois = graph.add_input("x", tensor(np.float32, 1, 2, 6, 6)), graph.add_input("r", tensor(np.float32, 3, 4))
    align = graph.add(
        "RoiAlign", [x, rois, graph.add_input("b", tensor(np.int64, 3))], OPDEFS["RoiAlign"].attrs(sampling_ratio=ratio)
    )
    graph.add_output(align.value, "y")
    assert ("takes all memory" in onnxruntime_must_not(graph).get(align.id, "")) == refused


def test_openvino_gets_no_transposed_convolution_of_weights_with_a_zero_point():
    for zero, refused in ((5, True), (0, False)):
        n = QNet()
        x = n.fake(n.input(1, 4, 5, 5), 0.02, 0)
        w = n.dq(n.const(n.rng.integers(-63, 64, (4, 3, 2, 2)), np.int8), 0.01, zero)
        op = n.op("ConvTranspose", x, w, attrs=OPDEFS["ConvTranspose"].attrs((2, 2), (0,) * 4, (1, 1), (0, 0)))
        found = openvino_must_not(n.done(op))
        assert list(found) == ([op.op] if refused else [])


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_no_library_gets_8_bit_floats(library):
    graph = Graph()
    x = graph.add_input("x", tensor(np.float32, 4))
    narrow = graph.add("Cast", [x], OPDEFS["Cast"].attrs(to=DTYPES["fp8_e4m3"]), src=["narrow"])
    graph.add_output(graph.add("Relu", [x]).value, "r")
    graph.add_output(narrow.value, "y")
    assert list(LIBRARIES[library].unsafe(graph)) == [narrow.id]
    built = build_verbose(export_model(graph).proto, BuildOptions(target="cpu", threads=1, tactics=library))
    got = built.engine.run({"x": np.array([-1, 0.3, 1000, 2], np.float32)})
    assert got["y"].tolist() == np.array([-1, 0.3, 448, 2]).astype(ml_dtypes.float8_e4m3fn).tolist()


def test_onnxruntime_gets_no_bfloat16():
    graph = Graph()
    x = graph.add_input("x", tensor(DTYPES["bf16"], 4))
    relu = graph.add("Relu", [x], names=["r"])
    graph.add_output(relu.value, "y")
    assert "no bf16 arrays" in onnxruntime_must_not(graph)[relu.id]
    assert openvino_must_not(graph) == {}
    built = build_verbose(export_model(graph).proto, BuildOptions(target="cpu", threads=1, tactics="onnxruntime"))
    assert built.engine.run({"x": np.array([-1, 2, 3, 0], DTYPES["bf16"])})["y"].tolist() == [0, 2, 3, 0]


def test_a_network_that_takes_no_made_up_input_is_not_timed():
    """A Reshape to a shape that only the user knows: no library is timed, and the engine is still right."""
    pytest.importorskip("onnxruntime")
    graph = Graph("reshape")
    x = graph.add_input("x", tensor(np.float32, 2, 3))
    shape = graph.add_input("shape", tensor(INT64, 3))
    graph.add_output(graph.add("Reshape", [x, shape], OPDEFS["Reshape"].attrs()).value, "y")
    built = build_verbose(export_model(graph).proto, BuildOptions(target="cpu", threads=1))
    assert built.compiled.measured[0].name == "onnxruntime/1t"
    assert "takes none of the made-up inputs" in str(built.compiled.measured[0].refused)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert built.engine.run({"x": x, "shape": np.array([3, 1, 2])})["y"].shape == (3, 1, 2)


def test_a_network_with_sizes_wrongly_declared_free_is_not_timed():
    """The exporter wrote the size of its example into a Reshape. Only size 12 runs, and the build cannot know that."""
    pytest.importorskip("onnxruntime")
    graph = Graph("baked")
    x = graph.add_input("x", tensor(np.float32, symbol("n"), 8))
    parts = graph.add("Reshape", [x, graph.add_constant(np.array([4, 24]))], OPDEFS["Reshape"].attrs())
    graph.add_output(graph.add("Relu", [parts.value]).value, "y")
    built = build_verbose(export_model(graph).proto, BuildOptions(target="cpu", threads=1))
    assert built.compiled.measured[0].name == "onnxruntime/1t"
    assert "takes none of the made-up inputs" in str(built.compiled.measured[0].refused)
    x = np.arange(96, dtype=np.float32).reshape(12, 8)
    assert built.engine.run({"x": x})["y"].tolist() == x.reshape(4, 24).tolist()


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_no_library_gets_fourier_transforms(library):
    graph = Graph()
    x = graph.add_input("x", tensor(np.float32, 2, 16, 1))
    spectrum = graph.add("DFT", [x], OPDEFS["DFT"].attrs(axis=1), src=["dft"])
    graph.add_output(graph.add("Relu", [spectrum.value]).value, "y")
    assert list(LIBRARIES[library].unsafe(graph)) == [spectrum.id]


def test_openvino_gets_no_scalar_by_reshape_after_a_product():
    pytest.importorskip("openvino")
    graph = Graph("scalar")
    x = graph.add_input("x", tensor(np.float32, 1, 5))
    w = graph.add_constant(np.arange(5, dtype=np.float32).reshape(5, 1), "w")
    product = graph.add("MatMul", [x, w], OPDEFS["MatMul"].attrs(), src=["product"])
    shape = graph.add_constant(np.zeros(0, np.int64), "shape")
    scalar = graph.add("Reshape", [product.value, shape], OPDEFS["Reshape"].attrs(), src=["scalar"])
    graph.add_output(scalar.value, "y")
    assert list(openvino_must_not(graph)) == [scalar.id]
    options = BuildOptions(target="cpu", threads=1, tactics="openvino", opt_level=0)
    built = build_verbose(export_model(graph).proto, options)
    assert [f["node"] for f in built.compiled.fallbacks["openvino"]] == ["scalar"]
    assert float(built.engine.run({"x": np.ones((1, 5), np.float32)})["y"]) == 10.0


def test_openvino_gets_no_attention_with_a_boolean_mask():
    for dtype, found in ((np.bool_, 1), (np.float32, 0)):
        graph = Graph("attention")
        q, k, v = (graph.add_input(n, tensor(np.float32, 1, 2, 4, 8)) for n in "qkv")
        mask = graph.add_input("mask", tensor(dtype, 4, 4))
        op = graph.add("Attention", [q, k, v, mask], OPDEFS["Attention"].attrs(), src=["attention"])
        graph.add_output(op.value, "y")
        assert len(openvino_must_not(graph)) == found


def selecting(batch: object = 4) -> Graph:
    """Rows of x (after Relu) that are positive, and their sum."""
    graph = Graph()
    x = graph.add_input("x", TensorType(FP32, (batch, 3)))  # type: ignore[arg-type]
    relu = graph.add("Relu", [x], src=["relu"])
    flags = graph.add(
        "ReduceMax", [relu.value, graph.add_constant(np.array([1]))], OPDEFS["ReduceMax"].attrs(keepdims=False)
    )
    chosen = graph.add("Greater", [flags.value, graph.add_constant(np.array(0, np.float32))])
    rows = graph.add(
        "Compress", [relu.value, chosen.value], OPDEFS["Compress"].attrs(axis=0), names=["rows"], src=["rows"]
    )
    total = graph.add(
        "ReduceSum", [rows.value, graph.add_constant(np.array([0]))], OPDEFS["ReduceSum"].attrs(keepdims=False)
    )
    graph.add_output(graph.add("Exp", [total.value]).value, "y")
    return graph


@pytest.mark.parametrize("batch", [4, symbol("N")])
def test_openvino_gets_no_operator_with_a_size_that_depends_on_data(batch):
    """Sizes that follow from known ones are known, too."""
    graph = selecting(batch)
    found = sized_by_data(graph)
    assert [graph.op(i).kind for i in found] == ["Compress", "ReduceSum"]
    assert set(openvino_must_not(graph)) == set(found)
    assert "the size of 'rows' depends on data" in openvino_must_not(graph)[next(iter(found))]


def test_the_number_of_boxes_that_a_suppression_keeps_depends_on_data():
    """Its parameter gives the largest number, not the number."""
    graph = import_model(onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]> g (float[1, 30, 4] boxes, float[1, 2, 30] scores) => (float[k] y)
        <int64 most = {20}, float overlap = {0.5}, float least = {0.5}>
        {
            kept = NonMaxSuppression(boxes, scores, most, overlap, least)
            found = GatherND(scores, kept)
            y = Relu(found)
        }"""))  # fmt: skip
    assert [graph.op(i).kind for i in sized_by_data(graph)] == ["NonMaxSuppression", "GatherND", "Relu"]


def test_openvino_gets_sizes_that_follow_from_shapes():
    graph = Graph()
    x = graph.add_input("x", TensorType(FP32, (symbol("N"), symbol("C"))))
    ones = graph.add(
        "ConstantOfShape", [graph.add("Shape", [x], OPDEFS["Shape"].attrs()).value], OPDEFS["ConstantOfShape"].attrs()
    )
    both = graph.add("Concat", [x, ones.value], OPDEFS["Concat"].attrs(axis=0))
    graph.add_output(both.value, "y")
    assert sized_by_data(graph) == {}
    assert openvino_must_not(graph) == {}


def test_openvino_gets_no_tensor_without_elements():
    graph = Graph()
    x = graph.add_input("x", tensor(np.int64, 0, 3))
    gather = graph.add("Gather", [x, graph.add_constant(np.array([0, 2]))], OPDEFS["Gather"].attrs(axis=1))
    graph.add_output(gather.value, "y")
    assert openvino_must_not(graph) == {gather.id: "openvino may crash on a tensor without elements"}


def test_bodies_are_checked_too():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]> g (bool c, float[4] x) => (float[n] y) {
            y = If<then_branch = a () => (float[n] t) { k = Greater(x, x) t = Compress(x, k) },
                   else_branch = b () => (float[n] e) { e = Relu(x) }>(c)
        }""")
    graph = import_model(model)
    (op,) = graph.of_kind("If")
    assert op.id in sized_by_data(graph)
    assert op.id in openvino_must_not(graph)
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]> g (bool c, float[4] x, int64[4] i) => (float[4] y) {
            y = If<then_branch = a () => (float[4] t) { t = GatherElements(x, i) },
                   else_branch = b () => (float[4] e) { e = Relu(x) }>(c)
        }""")
    graph = import_model(model)
    (reason,) = openvino_must_not(graph).values()
    assert reason.startswith("in its body, openvino does not check 'i")


@pytest.mark.parametrize("tactics", ["auto", "openvino"])
@pytest.mark.parametrize("batch", [40, symbol("N")])
def test_selections_of_all_sizes_are_right_in_any_order(tactics, batch):
    needs_libraries()
    graph = selecting(batch)
    built = build_verbose(export_model(graph).proto, BuildOptions(target="cpu", threads=1, tactics=tactics))
    x = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32) * 0.1
    for feed in (x, -np.abs(x), np.abs(x), 0 * x, x[::-1].copy(), -np.abs(x)):
        want = evaluate(graph, {"x": feed})["y"]
        np.testing.assert_allclose(built.engine.run({"x": feed})["y"], want, rtol=1e-4)


@pytest.mark.parametrize("tactics", ["auto", "openvino"])
def test_a_detector_without_a_detection_gives_no_box(tactics):
    """Boxes and scores, NonMaxSuppression, the rows of these boxes, and the best of them by a TopK whose number depends on the
    data."""
    needs_libraries()
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 30, 4] boxes, float[1, 2, 30] scores) => (float[d, 4] best, float[d] s, int64[d] label)
        <int64 most = {20}, float overlap = {0.5}, float least = {0.5}, int64 one = {1}, int64 two = {2}, int64[1] five = {5},
         int64[1] first = {0}, int64[1] second = {1}>
        {
            corner = Sigmoid(boxes)
            chosen = NonMaxSuppression(corner, scores, most, overlap, least)
            place = Gather<axis = 1>(chosen, two)
            kind = Gather<axis = 1>(chosen, one)
            table = Squeeze(corner, first)
            rows = Gather<axis = 0>(table, place)
            k1 = Unsqueeze(kind, second)
            p1 = Unsqueeze(place, second)
            at = Concat<axis = 1>(k1, p1)
            flat = Squeeze(scores, first)
            kept = GatherND(flat, at)
            count = Shape(kept)
            both = Concat<axis = 0>(count, five)
            k = ReduceMin<keepdims = 1>(both)
            s, order = TopK(kept, k)
            best = Gather<axis = 0>(rows, order)
            label = Gather<axis = 0>(kind, order)
        }""")
    engine = build_verbose(model, BuildOptions(target="cpu", threads=1, tactics=tactics)).engine
    rng = np.random.default_rng(0)
    boxes, scores = rng.standard_normal((1, 30, 4)).astype(np.float32), rng.random((1, 2, 30)).astype(np.float32)
    for scale, rows in ((1, 5), (0, 0), (1, 5), (0.4, 0)):
        got = engine.run({"boxes": boxes, "scores": scores * np.float32(scale)})
        assert [a.shape for a in got.values()] == [(rows, 4), (rows,), (rows,)]
        if rows:
            assert (got["s"] > 0.5).all()
