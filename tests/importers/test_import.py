"""Importing: names, order, operands, constants, dead code, symbols, given shapes and files."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxtext import constants, model, out_type, sources

import optdnn
from optdnn.errors import ModelError, ShapeError, UnsupportedError, UsageError
from optdnn.importers.model import open_model
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.verify import verify


def test_types_constants_and_provenance():
    m = model(
        """g (float[N, 3, 8, 8] x) => (float[N, 4, 6, 6] y)
        <float[4, 3, 3, 3] w, float[4] b = {1, 2, 3, 4}, float[7] unused = {0, 0, 0, 0, 0, 0, 0}>
        { [conv] c = Conv(x, w, b)  [act] y = Relu(c) }"""
    )
    m.graph.initializer.append(numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float32), "w"))
    graph = import_model(m)
    verify(graph)
    assert sources(graph) == [("Conv", "conv"), ("Relu", "act")]
    assert constants(graph) == ["b", "w"]  # the dead one is removed
    assert out_type(graph) == "fp32[N, 4, 6, 6]"
    assert graph.op(graph.inputs[0]).outputs[0].name == "x"
    assert [graph.op(i).outputs[0].name for i in graph.outputs] == ["y"]


def test_unnamed_and_repeated_names_are_made_unique():
    m = model(
        """g (float[2] x) => (float[2] y) {
        a = Relu(x)  [Relu_0] b = Relu(a)  [n] c = Relu(b)  [n] d = Relu(c)  [n] y = Relu(d) }"""
    )
    assert [name for _, name in sources(import_model(m))] == ["Relu_0#2", "Relu_0", "n", "n#2", "n#3"]


def test_nodes_out_of_order_are_sorted():
    m = model("g (float[2] x) => (float[2] y) { [last] y = Exp(b)  [mid] b = Neg(a)  [first] a = Abs(x) }")
    graph = import_model(m)
    assert [name for _, name in sources(graph)] == ["first", "mid", "last"]
    assert evaluate(graph, {"x": np.array([1, -1], np.float32)})["y"] == pytest.approx(np.exp([-1, -1]))


def test_cycle_names_its_nodes():
    m = model("g (float[2] x) => (float[2] y) { [p] a = Add(x, b)  [q] b = Relu(a)  [r] y = Relu(b) }")
    with pytest.raises(
        ModelError, match=r"cycle: q \(Relu\) -> p \(Add\) -> q|cycle: p \(Add\) -> q \(Relu\) -> p"
    ) as e:
        import_model(m)
    assert "r (Relu)" not in e.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("g (float[2] x) => (float[2] y) { [n] y = Relu(z) }", r"n \(Relu\) reads 'z', which nothing produces"),
        ("g (float[2] x) => (float[2] z) { y = Relu(x) }", "output 'z' is produced by no node"),
        ("g (float[2] x) => (float[2] y) { [a] y = Relu(x) [b] y = Abs(x) }", r"'y' is produced by b \(Abs\) and by a"),
        (
            "g (float[2] x) => (float[2] y) { [a] x = Relu(x) y = Abs(x) }",
            r"'x' is produced by a \(Relu\) and by an input",
        ),
        ("g (float[2] x, float[2] x) => (float[2] y) { y = Relu(x) }", "input 'x' is declared twice"),
        ("g (float[2] x) => () { y = Relu(x) }", "has no outputs"),
        (
            "g (float[2] x) => (int64[2] y) { y = Relu(x) }",
            "output 'y' is declared as int64, but its node computes fp32",
        ),
        ("g (float[2] x) => (float[2] y) { [n] y = Relu(x, x) }", r"n \(Relu\): has 2 operands, needs 1"),
        ("g (float[2] x) => (float[2] y) { [n] y = Relu<alpha = 1.0>(x) }", "unknown attribute 'alpha'"),
        ("g (float[2] x) => (float[2] y) { [n] y = Elu<alpha = 1>(x) }", "'alpha' is of type INT, must be FLOAT"),
        ("g (float[2] x) => (float[2] y) { [n] y = Cast(x) }", r"n \(Cast\): lacks its attribute 'to'"),
        ("g (float[2] x) => (float[2] y) { [n] y = Add(x, ) }", r"has 1 operands, needs 2"),
        (
            "g (float[2] x) => (float[2] y) { [n] y, z = Relu(x) w = Add(y, z) }",
            "has 2 outputs, the operator has at most 1",
        ),
        ("g (float[2] x) => (float[2] y) { [n] y = my.domain.Relu(x) }", None),
    ],
)
def test_invalid_models(text, message):
    if message is None:
        m = model(text)
        with pytest.raises(UnsupportedError, match=r"n: my.domain.Relu: .*unknown"):
            import_model(m)
        return
    with pytest.raises(ModelError, match=message):
        import_model(model(text))


def test_an_output_that_is_listed_again_gets_a_number():
    """torch's exporters list a tensor like this if a module returns it twice."""
    text = "g (float[2] x) => (float[2] y, float[2] y, float[2] z, float[2] y) { y = Relu(x) z = Neg(x) }"
    m = model(text)
    m.graph.output[2].name = m.graph.node[1].output[0] = "y.2"
    outputs = evaluate(import_model(m), {"x": np.array([-1, 2], np.float32)})
    assert list(outputs) == ["y", "y.3", "y.2", "y.4"]
    for name in ("y", "y.3", "y.4"):
        np.testing.assert_array_equal(outputs[name], [0, 2])
    np.testing.assert_array_equal(outputs["y.2"], [1, -2])


def test_absent_required_operand():
    m = model("g (float[2] x) => (float[2] y) { [n] y = Add(x, x) }")
    m.graph.node[0].input[0] = ""
    with pytest.raises(ModelError, match=r"n \(Add\): lacks its operand 'A'") as found:
        import_model(m)
    assert "export the model again" in str(found.value.hint)


def test_absent_operand_of_many():
    m = model("g (float[2] x) => (float[2] y) { [n] y = Sum(x, x, x) }")
    m.graph.node[0].input[1] = ""
    with pytest.raises(ModelError, match=r"n \(Sum\): lacks its operand 1"):
        import_model(m)
    m.graph.node[0].input[1], m.graph.node[0].input[2] = "x", ""
    import_model(m)


def test_shape_error_names_node_operator_opset_and_operand_types():
    m = model("g (float[2, 3] x, float[4, 5] w) => (float[2, 5] y) { [mm] y = MatMul(x, w) }", opset=13)
    with pytest.raises(ShapeError, match=r"mm \(MatMul\), opset 13: .*; operands: fp32\[2, 3\], fp32\[4, 5\]"):
        import_model(m)


def test_initializer_that_is_also_an_input_is_a_constant():
    m = model("g (float[2] x, float[2] w = {1, 2}) => (float[2] y) { y = Mul(x, w) }")
    assert len(m.graph.input) == 2
    graph = import_model(m)
    assert len(graph.inputs) == 1
    assert constants(graph) == ["w"]
    with pytest.raises(UsageError, match="no input 'w'") as e:
        import_model(m, shapes={"w": (2,)})
    assert "'x'" in str(e.value)


def test_optional_operands_and_unused_outputs():
    m = model(
        """g (float[2, 4] x) => (float[2, 4] y) <float top = {6.0}>
        { [clip] c = Clip(x, , top)  [drop] y, mask = Dropout(c) }"""
    )
    graph = import_model(m)
    clip = graph.of_kind("Clip")[0]
    assert [v is None for v in clip.inputs] == [False, True, False]
    assert evaluate(graph, {"x": np.full((2, 4), 9, np.float32)})["y"].max() == 6


def test_an_output_may_be_an_input_or_a_weight():
    m = model("g (float[2] x) => (float[2] x, float[2] w, float[2] y) <float[2] w = {3, 4}> { y = Identity(x) }")
    graph = import_model(m)
    out = evaluate(graph, {"x": np.array([1, 2], np.float32)})
    assert {k: v.tolist() for k, v in out.items()} == {"x": [1, 2], "w": [3, 4], "y": [1, 2]}


def test_sparse_initializer():
    values = numpy_helper.from_array(np.array([5, 7], np.float32), "w")
    indices = numpy_helper.from_array(np.array([[0, 1], [1, 2]], np.int64), "i")
    m = model("g (float[2, 3] x) => (float[2, 3] y) { y = Add(x, w) }")
    m.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2, 3]))
    zeros = np.zeros((2, 3), np.float32)
    assert evaluate(import_model(m), {"x": zeros})["y"].tolist() == [[0, 5, 0], [0, 0, 7]]
    m.graph.sparse_initializer[0].indices.CopyFrom(numpy_helper.from_array(np.array([1, 5], np.int64), "i"))
    assert evaluate(import_model(m), {"x": zeros})["y"].tolist() == [[0, 5, 0], [0, 0, 7]]
    m.graph.sparse_initializer[0].indices.CopyFrom(numpy_helper.from_array(np.array([1, 6], np.int64), "i"))
    with pytest.raises(ModelError, match="index outside of its shape"):
        import_model(m)
    m.graph.sparse_initializer[0].dims[:] = [1 << 20, 1 << 20]
    with pytest.raises(ModelError, match=r"takes 4.1e\+03 GiB"):
        import_model(m)
    m.graph.sparse_initializer[0].indices.CopyFrom(numpy_helper.from_array(np.array([1], np.int64), "i"))
    m.graph.sparse_initializer[0].dims[:] = [2, 3]
    with pytest.raises(ModelError, match=r"has \[2\] values and \[1\] indices"):
        import_model(m)


# ---------------------------------------------------------------- symbols and shapes


def test_unnamed_dimensions_get_symbols_and_equal_names_are_one():
    m = model("g (float[N, 3] x, float[N, 3] z) => (float[N, 3] y) { y = Add(x, z) }")
    assert out_type(import_model(m)) == "fp32[N, 3]"
    m.graph.input[0].type.tensor_type.shape.dim[1].Clear()
    m.graph.input[1].type.tensor_type.shape.dim[0].dim_value = -1  # old exporters write an unknown size like this
    graph = import_model(m)
    assert [str(graph.op(i).outputs[0].type) for i in graph.inputs] == ["fp32[N, x.1]", "fp32[z.0, 3]"]


def test_a_question_mark_is_no_name():
    m = model("g (float[N, 3] x) => (float[N, 3] y) { y = Relu(x) }")
    for d in m.graph.input[0].type.tensor_type.shape.dim:  # paddle2onnx writes an unknown size like this
        d.dim_param = "?"
    m.graph.output[0].type.tensor_type.shape.CopyFrom(m.graph.input[0].type.tensor_type.shape)
    assert out_type(import_model(m)) == "fp32[x.0, x.1]"
    assert out_type(import_model(m, shapes={"x": (2, 48)})) == "fp32[2, 48]"


def test_given_shapes_bind_symbols_everywhere():
    m = model("g (float[N, C, 4] x, float[N, 2] z) => (float[N, M] y, float[N, 2] w) { y = Flatten(x) w = Relu(z) }")
    graph = import_model(m, shapes={"x": (5, None, 4)})
    assert (out_type(graph, 0), out_type(graph, 1)) == ("fp32[5, 4*C]", "fp32[5, 2]")


@pytest.mark.parametrize(
    ("shapes", "error", "message"),
    [
        ({"q": (1,)}, UsageError, r"has no input 'q'"),
        (
            {"x": (1, 4)},
            ShapeError,
            r"input 'x' is \[N, 3\], the shape given is \[1, 4\]: they differ in axis 1\n  hint: 3 is fixed",
        ),
        ({"x": (1, 3, 1)}, ShapeError, r"input 'x' is \[N, 3\], the shape given is \[1, 3, 1\]: they differ in rank"),
        (
            {"x": (1, 3), "z": (2, 3)},
            ShapeError,
            r"input 'z' is \[N, 3\].*sets N to 2, but the shape given for 'x' .* 1",
        ),
        ({"x": (-1, 3)}, ShapeError, r"'x': the shape given, \[-1, 3\], has a negative dimension"),
    ],
)
def test_contradicting_shapes(shapes, error, message):
    m = model("g (float[N, 3] x, float[N, 3] z) => (float[N, 3] y) { y = Add(x, z) }")
    with pytest.raises(error, match=message):
        import_model(m, shapes=shapes)


def test_input_without_a_shape_needs_one():
    m = model("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    m.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ShapeError, match="input 'x' has no shape") as e:
        import_model(m)
    assert "--shape x=" in str(e.value)
    assert out_type(import_model(m, shapes={"x": (3, None)})) == "fp32[3, x.1]"


def test_shape_arithmetic_is_known_after_import():
    m = model(
        """g (float[N, 3, 4] x) => (float[A, B] y, int64[2] s)
        <int64 zero = {0}, int64[1] axis = {0}, int64[1] minus = {-1}> {
          shape = Shape(x)  n = Gather(shape, zero)  n1 = Unsqueeze(n, axis)  s = Concat<axis = 0>(n1, minus)
          y = Reshape(x, s) }"""
    )
    graph = import_model(m)
    assert out_type(graph) == "fp32[N, 12]"
    static = import_model(m, shapes={"x": (2, 3, 4)})
    known = static.known(static.op(static.outputs[1]).inputs[0])
    assert known is not None
    assert known.tolist() == [2, -1]


def test_ranks_that_cannot_be_inferred_are_taken_from_the_model():
    m = model(
        """g (float[1, 3] x, int64[A] axes) => (float[D, 3] y) {
        [s] h = Unsqueeze(x, axes)  [r] y = Squeeze(h, axes) }"""
    )
    graph = import_model(m)
    assert str(graph.of_kind("Unsqueeze")[0].outputs[0].type) == "fp32[?]"
    assert out_type(graph) == "fp32[D, 3]"
    verify(graph)


# ---------------------------------------------------------------- files


def test_reading_files(tmp_path):
    m = model("g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul(x, w) }")
    path = tmp_path / "net.onnx"
    onnx.save(m, path)
    assert len(import_model(path)) == len(import_model(path.read_bytes())) == len(import_model(str(path))) == 1
    with pytest.raises(UsageError, match=r"there is no file .*none\.onnx"):
        import_model(tmp_path / "none.onnx")
    with pytest.raises(ModelError, match="cannot be read"):
        import_model(tmp_path)


@pytest.mark.slow
def test_truncated_and_corrupt_files_name_the_file(tmp_path):
    m = model(
        """g (float[2, 3] x) => (float[2, 3] y) <float[3] w = {1, 2, 3}>
        { [a] h = Mul(x, w) [b] y = Elu<alpha = 2.0>(h) }"""
    )
    data = m.SerializeToString()
    path = tmp_path / "bad.onnx"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises((ModelError, UnsupportedError), match=r"bad\.onnx"):
            import_model(path)
    rng = np.random.default_rng(0)
    survived = 0
    for _ in range(2000):  # any flipped bit gives a typed error or a valid model
        broken = bytearray(data)
        broken[rng.integers(len(data))] ^= 1 << rng.integers(8)
        message = _error(bytes(broken))
        assert message is None or "bad.onnx" in message
        survived += message is None
    assert 0 < survived < 1500
    path.write_bytes(b"")
    with pytest.raises(ModelError, match=r"bad\.onnx is empty"):
        import_model(path)


def _error(data: bytes) -> str | None:
    try:
        import_model(open_model(data, "bad.onnx"))
    except (ModelError, UnsupportedError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("field", ["producer_name", "domain", "doc_string", "graph", "key", "value"])
def test_descriptions_that_are_not_utf_8(field: str) -> None:
    """Protobuf gives such text as bytes, which no engine could hold."""
    node = helper.make_node("Relu", ["x"], ["y"])
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy")
    model = helper.make_model(helper.make_graph([node], "g", [x], [y]), ir_version=8)
    entry = model.metadata_props.add(key="author", value="nobody")
    setattr(
        {"graph": model.graph, "key": entry, "value": entry}.get(field, model),
        {"graph": "doc_string"}.get(field, field),
        "MARK",
    )
    broken = onnx.ModelProto.FromString(model.SerializeToString().replace(b"MARK", b"M\xff\xfeK"))
    graph = import_model(broken)
    assert str(graph.description).count("M\ufffd\ufffdK") == 1
    assert optdnn.build(broken, target="reference").program.meta["model"]["description"] == graph.description
