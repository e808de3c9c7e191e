"""Exported models run in other runtimes, and are the same after another import."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, numpy_helper

from optdnn.dim import symbol
from optdnn.errors import UnsupportedError, UsageError
from optdnn.importers.onnx import import_model
from optdnn.ir import export_onnx
from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph, Value
from optdnn.ir.onnx_protos import node_attributes, tensor_proto
from optdnn.ops.base import Attrs, Stage, Unsupported
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.exchange import OPSET
from optdnn.ops.fused import PointwiseAttrs
from optdnn.ops.table import OPDEFS
from optdnn.types import BF16, DTYPES, FP32, Array, TensorType, tensor

ort = pytest.importorskip("onnxruntime")


def run_ort(model: onnx.ModelProto | bytes, feeds: dict[str, Array], weights: dict[str, Array] | None = None):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if weights:
        values = [ort.OrtValue.ortvalue_from_numpy(w) for w in weights.values()]
        options.add_external_initializers(list(weights), values)
    data = model if isinstance(model, bytes) else model.SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def assert_same(a: dict[str, Array], b: dict[str, Array], tolerance: float = 1e-5) -> None:
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].shape == b[name].shape
        assert np.abs(a[name] - b[name]).max() <= tolerance * np.abs(b[name]).max()


def network() -> onnx.ModelProto:
    """Convolution, activation, residual, pooling, shape arithmetic, a large and a small weight."""
    rng = np.random.default_rng(0)
    m = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 17]>
        g (float[N, 8, 8, 8] x) => (float[N, M] y, int64[2] s) <int64[1] minus = {-1}, int64 zero = {0}, int64[1] ax = {0}> {
          [conv] c = Conv<pads = [1, 1, 1, 1]>(x, w, b)  [relu] r = Relu(c)  [add] a = Add(r, x)
          [pool] p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(a)
          shape = Shape(p)  n = Gather(shape, zero)  nn = Unsqueeze(n, ax)  s = Concat<axis = 0>(nn, minus)
          [flat] f = Reshape(p, s)  [act] y = HardSwish(f) }"""
    )
    for name, shape in (("w", (8, 8, 3, 3)), ("b", (8,))):
        m.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    return m


def test_round_trip():
    graph = import_model(network())
    feeds = random_feeds(graph)
    want = evaluate(graph, feeds)
    exported = export_model(graph)
    onnx.checker.check_model(exported.proto, full_check=True)
    assert exported.proto.opset_import[0].version == OPSET
    assert_same(run_ort(exported.proto, feeds), want)
    back = import_model(exported.proto)
    again = evaluate(back, feeds)
    assert_same(again, want, 0.0)
    assert exported.to_bytes() == export_model(import_model(network())).to_bytes()
    assert back.kinds() == graph.kinds()


def test_names_types_and_symbols_are_kept():
    proto = export_model(import_model(network())).proto
    (x,) = proto.graph.input
    assert x.name == "x"
    assert [d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim] == ["N", 8, 8, 8]
    assert [(o.name, o.type.tensor_type.elem_type) for o in proto.graph.output] == [("y", 1), ("s", 7)]
    assert [d.dim_param or d.dim_value for d in proto.graph.output[0].type.tensor_type.shape.dim] == ["N", 128]
    assert [n.name for n in proto.graph.node if n.op_type in ("Conv", "Relu", "MaxPool")] == ["conv", "relu", "pool"]
    assert {t.name for t in proto.graph.initializer} >= {"w", "b"}


# ---------------------------------------------------------------- weights


def test_external_weights_are_given_from_memory():
    graph = import_model(network())
    feeds = random_feeds(graph)
    exported = export_model(graph, external_weights=True)
    assert list(exported.weights) == ["w"]
    assert exported.weights["w"] is graph.constant_value(graph.of_kind("Conv")[0].inputs[1])
    assert len(exported.to_bytes()) < 2000
    assert_same(run_ort(exported.to_bytes(), feeds, exported.weights), evaluate(graph, feeds))


def test_weights_as_inputs():
    graph = import_model(network())
    feeds = random_feeds(graph)
    exported = export_model(graph, weights_as_inputs=True)
    assert [v.name for v in exported.proto.graph.input] == ["x", "w"]
    onnx.checker.check_model(exported.proto)
    assert_same(run_ort(exported.to_bytes(), {**feeds, **exported.weights}), evaluate(graph, feeds))
    with pytest.raises(UsageError, match="cannot be saved"):
        exported.save("never.onnx")


def test_int64_constants_stay_and_both_forms_at_once_are_refused():
    graph = Graph()
    table = graph.add_constant(np.arange(500), "table")
    x = graph.add_input("x", tensor(np.int64, 500))
    graph.add_output(graph.add("Add", [x, table]).value, "y")
    assert export_model(graph, external_weights=True).weights == {}
    with pytest.raises(UsageError, match="not both"):
        export_model(graph, external_weights=True, weights_as_inputs=True)


def test_saving_with_and_without_external_weights(tmp_path):
    graph = import_model(network())
    feeds = random_feeds(graph)
    want = evaluate(graph, feeds)
    for external in (False, True):
        path = tmp_path / f"net{external}.onnx"
        export_model(graph, external_weights=external).save(path)
        assert path.with_name(path.name + ".data").exists() == external
        onnx.checker.check_model(path)
        got = evaluate(import_model(path), feeds)
        assert all(np.array_equal(got[k], want[k]) for k in want)


def test_a_protobuf_cannot_exceed_two_gigabytes(monkeypatch):
    exported = export_model(import_model(network()))
    monkeypatch.setattr(export_onnx, "_PROTOBUF_LIMIT", 100)
    with pytest.raises(UsageError, match="2 GiB"):
        exported.to_bytes()


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_constants_of_every_type(name):
    array = np.array([[0, 1], [1, 0]]).astype(DTYPES[name])
    t = tensor_proto(array, "t")
    back = numpy_helper.to_array(t)
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()


def test_raw_data_is_little_endian_on_big_endian_machines(monkeypatch):
    monkeypatch.setattr("sys.byteorder", "big")
    assert tensor_proto(np.array([1.0], np.float32), "t").raw_data == np.array([1.0], ">f4").tobytes()
    assert tensor_proto(np.array([1.0], BF16), "t").raw_data == b"\x3f\x80"
    assert tensor_proto(np.array([1j], np.complex64), "t").raw_data == np.array([0, 1.0], ">f4").tobytes()


# ---------------------------------------------------------------- fused stages


def fused() -> Graph:
    """A convolution with a prologue (scale, shift, Relu) and an epilogue (residual, Swish), as after fusion."""
    rng = np.random.default_rng(1)

    def constant(*shape: int) -> Value:
        return graph.add_constant(rng.standard_normal(shape).astype(np.float32), "c")

    graph = Graph()
    x = graph.add_input("x", TensorType(FP32, (symbol("N"), 4, 6, 6)))
    z = graph.add_input("z", TensorType(FP32, (symbol("N"), 5, 4, 4)))
    swish = OPDEFS["Swish"].attrs
    attrs = ConvAttrs(
        pads=(0, 0, 0, 0),
        strides=(1, 1),
        dilations=(1, 1),
        group=1,
        prologue=(Stage("Mul", (~0, 3)), Stage("Add", (~1, 4)), Stage("Relu", (~2,))),
        epilogue=(Stage("Add", (~0, 5)), Stage("Swish", (~1,), swish()), Stage("Mul", (~2, ~0))),
    )
    operands = [x, constant(5, 4, 3, 3), None, constant(4, 1, 1), constant(4, 1, 1), z]
    op = graph.add("Conv", operands, attrs, names=["out"], src=["conv1", "bn1", "relu1", "add1", "swish1", "mul1"])
    graph.add_output(op.value, "y")
    return graph


def test_fused_stages_become_nodes():
    graph = fused()
    exported = export_model(graph)
    onnx.checker.check_model(exported.proto, full_check=True)
    kinds = [n.op_type for n in exported.proto.graph.node]
    assert kinds == ["Mul", "Add", "Relu", "Conv", "Add", "Sigmoid", "Mul", "Mul"]
    names = [n.name for n in exported.proto.graph.node]
    assert len(set(names)) == len(names)
    assert names[0] == "add1 + bn1 + conv1 + mul1 + 2 more"
    assert set(exported.nodes[names[3]]) == {"conv1", "bn1", "relu1", "add1", "swish1", "mul1"}
    feeds = random_feeds(graph)
    want = evaluate(graph, feeds)
    back = import_model(exported.proto)
    assert_same(evaluate(back, feeds), want, 1e-6)
    assert_same(run_ort(exported.proto, feeds), want)


def test_a_pointwise_op_becomes_its_body():
    graph = Graph()
    x, z = (graph.add_input(n, tensor(np.float32, 2, 3)) for n in "xz")
    body = (Stage("Add", (~0, 1)), Stage("Exp", (~1,)), Stage("Sub", (~2, ~0)))
    graph.add_output(graph.add("Pointwise", [x, z], PointwiseAttrs(epilogue=body), src=["a", "b"]).value, "y")
    exported = export_model(graph)
    assert [n.op_type for n in exported.proto.graph.node] == ["Add", "Exp", "Sub"]
    feeds = random_feeds(graph)
    assert_same(run_ort(exported.proto, feeds), evaluate(graph, feeds))


def test_stages_that_do_nothing_still_name_the_output():
    graph = Graph()
    x = graph.add_input("x", tensor(np.float32, 2))
    graph.add_output(graph.add("Pointwise", [x], PointwiseAttrs()).value, "y")
    exported = export_model(graph)
    assert [n.op_type for n in exported.proto.graph.node] == ["Identity"]
    assert_same(run_ort(exported.proto, random_feeds(graph)), evaluate(graph, random_feeds(graph)))


# ---------------------------------------------------------------- names of outputs


def test_outputs_that_are_inputs_constants_or_named_twice():
    graph = Graph()
    x = graph.add_input("x", tensor(np.float32, 2))
    y = graph.add("Relu", [x], names=["v"]).value
    other = graph.add("Abs", [x], names=["first"]).value  # an inner value with an output's name
    last = graph.add("Add", [y, other], names=["w"]).value
    graph.add_output(x, "copy")
    graph.add_output(graph.add_constant(np.ones(2, np.float32), "k"), "one")
    graph.add_output(y, "first")
    graph.add_output(y, "second")
    graph.add_output(last, "last")
    feeds = {"x": np.array([-1, 2], np.float32)}
    exported = export_model(graph)
    onnx.checker.check_model(exported.proto, full_check=True)
    got = run_ort(exported.proto, feeds)
    want = {"copy": [-1, 2], "one": [1, 1], "first": [0, 2], "second": [0, 2], "last": [1, 4]}
    assert {k: v.tolist() for k, v in got.items()} == want


def test_unused_constants_are_not_written():
    graph = Graph()
    x = graph.add_input("x", tensor(np.float32, 2))
    graph.add_constant(np.ones(2, np.float32), "unused")
    graph.add_output(graph.add("Relu", [x]).value, "y")
    assert len(export_model(graph).proto.graph.initializer) == 0


# ---------------------------------------------------------------- refusals


def test_every_op_that_the_opset_lacks_is_listed():
    graph = Graph()
    x = graph.add_input("x", tensor(np.int32, 2))
    axis = graph.add_constant(np.array(0))
    y = graph.add("CumProd", [x, axis], src=["product1"]).value
    graph.add_output(graph.add("BitCast", [y], OPDEFS["BitCast"].attrs(FP32), src=["cast1"]).value, "y")
    with pytest.raises(UnsupportedError) as e:
        export_model(graph)
    assert [(n.node, n.op_type) for n in e.value.nodes] == [("product1", "CumProd"), ("cast1", "BitCast")]
    assert "opset 21" in str(e.value)


def test_attributes_that_an_opset_does_not_know():
    assert node_attributes("Cast", "", 13, {"to": FP32, "saturate": 1}, 1)[0].i == TensorProto.FLOAT
    assert (
        len(node_attributes("Cast", "", 13, {"to": FP32, "saturate": True}, 1)) == 1
    )  # the default, which has no effect
    with pytest.raises(Unsupported, match="attribute saturate=0 of Cast does not exist"):
        node_attributes("Cast", "", 13, {"to": FP32, "saturate": 0}, 1)
    with pytest.raises(Unsupported, match="there is no Nonsense"):
        node_attributes("Nonsense", "", 13, {}, 1)
    with pytest.raises(Unsupported, match="Upsample was removed"):
        node_attributes("Upsample", "", 13, {}, 1)
    with pytest.raises(Unsupported, match="only 1 operands"):
        node_attributes("Relu", "", 13, {}, 2)
    kinds = {a.name: a.type for a in node_attributes("Elu", "", 13, {"alpha": 1}, 1)}
    assert kinds == {"alpha": onnx.AttributeProto.FLOAT}  # the type of the schema, not of the value


def test_absent_attributes_and_operands():
    graph = Graph()
    x = graph.add_input("x", tensor(np.float32, 2))
    top = graph.add_constant(np.array(1, np.float32), "top")
    graph.add_output(graph.add("Clip", [x, None, top], OPDEFS["Clip"].attrs(), names=["c"]).value, "y")
    (node,) = export_model(graph).proto.graph.node
    assert list(node.input) == ["x", "", "top"]
    assert isinstance(OPDEFS["Clip"].attrs(), Attrs)
