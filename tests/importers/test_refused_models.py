"""Models that are refused: huge or wrong declarations, operators, types and opsets that are not supported."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper
from onnxtext import model, out_type

from optdnn.errors import ModelError, ShapeError, UnsupportedError
from optdnn.importers.model import open_model
from optdnn.importers.onnx import import_model


def test_huge_declarations_are_refused_before_any_allocation():
    m = model("g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul(x, w) }")
    m.graph.initializer[0].dims[:] = [1 << 40, 1 << 40]
    with pytest.raises(ModelError, match=r"tensor 'w' is declared as .* takes .* GiB"):
        import_model(m)
    m.graph.initializer[0].dims[:] = [0, 1 << 62]
    with pytest.raises(ModelError, match=r"takes .* GiB"):
        import_model(m)
    m.graph.initializer[0].dims[:] = [-2]
    with pytest.raises(ModelError, match="negative dimension"):
        import_model(m)
    m.graph.initializer[0].dims[:] = [3]
    with pytest.raises(ModelError, match=r"declared as \[3\] .* but holds 2"):
        import_model(m)
    big = model(f"g (float[{1 << 50}] x) => (float[2] y) {{ y = Relu(x) }}")
    with pytest.raises(ModelError, match=r"input 'x' is declared as .* takes .* GiB"):
        import_model(big)
    grown = model("g (float[65536, 1] x, float[1, 65536, 65536] z) => (float[a, b, c] y) { [n] y = Add(x, z) }")
    assert "65536" in out_type(import_model(grown))
    grown = model("g (float[1048576, 1] x, float[1, 1048576] z) => (float[a, b] y) { [n] y = Mul(x, z) }")
    with pytest.raises(ShapeError, match=r"n \(Mul\).*takes .* GiB"):
        import_model(grown)


def test_every_unsupported_node_is_reported_in_one_error():
    m = model(
        """g (float[2] x) => (float[2] y) <float[2] a, float[2] r> {
        [one] a = StringNormalizer(x)  [fine] b = Relu(a)  [two] c = ai.onnx.ml.DictVectorizer(b)
        [three] d = custom.Thing(c)  y = Add(d, b) [dead] z = custom.Other(x) }""",
        more_opsets=', "ai.onnx.ml" : 3, "custom" : 5',
    )
    with pytest.raises(UnsupportedError) as e:
        import_model(open_model(m, "net.onnx"))
    found = {n.node: (n.op_type, n.domain, n.opset, n.reason) for n in e.value.nodes}
    assert found == {
        "one": ("StringNormalizer", "", 17, "the operator is not supported"),
        "two": ("DictVectorizer", "ai.onnx.ml", 3, "maps are not tensors: give the features as a matrix"),
        "three": ("Thing", "custom", 5, "the custom operator is unknown"),
    }
    assert "net.onnx" in str(e.value)
    assert e.value.exit_code == 4


def test_files_that_onnx_runtime_wrote_for_one_cpu_are_refused():
    m = model(
        "g (float[1, 8, 4, 4] x) => (float[1, 8, 4, 4] y) { [n] y = com.microsoft.nchwc.ReorderInput(x) }",
        more_opsets=', "com.microsoft.nchwc" : 1',
    )
    with pytest.raises(UnsupportedError, match=r"wrote the file for its own kernels of this CPU.*ORT_ENABLE_EXTENDED"):
        import_model(m)


@pytest.mark.parametrize("domain", ["qonnx.custom_op.general", "finn.custom_op.general", "onnx.brevitas"])
def test_quantizations_of_qonnx_are_refused_with_advice(domain):
    m = model(
        f"g (float[4] x, float s, float z, float bits) => (float[4] y) {{ [n] y = {domain}.Quant(x, s, z, bits) }}",
        more_opsets=f', "{domain}" : 1',
    )
    with pytest.raises(UnsupportedError, match=r"QONNX's own operator.*export_onnx_qcdq.*QuantToQCDQ"):
        import_model(m)


def test_an_operator_that_onnx_lacks_is_named_whatever_its_attributes_hold():
    """tf2onnx leaves a StatefulPartitionedCall with a binary message as text."""
    m = model("g (float[2] x) => (float[2] y) { [n] y = Relu(x) }")
    m.graph.node[0].op_type = "StatefulPartitionedCall"
    m.graph.node[0].attribute.add(name="config_proto", type=onnx.AttributeProto.STRING, s=b"\xff\x01")
    with pytest.raises(UnsupportedError, match=r"n: StatefulPartitionedCall .*ONNX has no such operator") as caught:
        import_model(m)
    assert caught.value.hint is None
    m.producer_name = "tf2onnx"
    with pytest.raises(UnsupportedError, match=r"n: StatefulPartitionedCall .*ONNX has no such operator") as caught:
        import_model(m)
    assert "tf2onnx could not convert these operators of TensorFlow" in str(caught.value.hint)


def test_operators_are_of_the_models_own_opset():
    early = model("g (float[2, 4] x) => (float[2, 4] y) { [n] y = Mish(x) }", 13)
    with pytest.raises(UnsupportedError, match=r"n: Mish \(opset 13\): the operator came with opset 18"):
        import_model(early)
    late = model(
        "g (float[1, 1, 2, 2] x) => (float[1, 1, 4, 4] y) <float[4] s = {1, 1, 2, 2}> { [n] y = Upsample(x, s) }", 11
    )
    with pytest.raises(
        UnsupportedError, match=r"n: Upsample \(opset 11\): the operator was removed from ONNX in opset 10"
    ):
        import_model(late)


@pytest.mark.parametrize("opset", [11, 14])
def test_layer_norms_in_files_of_early_opsets(opset):
    """ONNX Runtime's optimizers write these operators."""
    text = "g (float[2, 4] x) => (float[2, 4] y) <float[4] s = {1, 2, 3, 4}> { y = LayerNormalization<epsilon = 0.001>(x, s) }"
    early, late = (import_model(model(text, n)) for n in (opset, 17))
    assert early.kinds() == late.kinds()
    assert [op.attrs for op in early.of_kind("LayerNormalization")] == [
        op.attrs for op in late.of_kind("LayerNormalization")
    ]


@pytest.mark.parametrize("opset", [0, 99])
def test_opsets_outside_of_the_range(opset):
    m = model("g (float[2] x) => (float[2] y) { y = Relu(x) }", 17)
    m.opset_import[0].version = opset
    with pytest.raises(UnsupportedError, match=f"uses ONNX opset {opset}; opsets 1 to [0-9]+ are supported"):
        import_model(m)


def test_contradicting_and_missing_opset_imports():
    m = model("g (float[2] x) => (float[2] y) { [n] y = Relu(x) }", 17)
    m.opset_import.add(domain="ai.onnx", version=16)
    with pytest.raises(ModelError, match="at versions 17 and 16"):
        import_model(m)
    del m.opset_import[:]
    with pytest.raises(ModelError, match=r"n \(Relu\): belongs to a domain that the model does not import"):
        import_model(m)


@pytest.mark.parametrize(
    ("type_proto", "reason"),
    [
        (helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [2])), "type sequence are not supported"),
        (helper.make_optional_type_proto(helper.make_tensor_type_proto(1, [2])), "type optional are not supported"),
        (helper.make_tensor_type_proto(TensorProto.STRING, [2]), "element type STRING is not supported"),
    ],
)
def test_unsupported_input_and_output_types(type_proto, reason):
    m = model("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    m.graph.input[0].type.CopyFrom(type_proto)
    with pytest.raises(UnsupportedError, match=f"x: graph input .*{reason}"):
        import_model(m)
    m = model("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    m.graph.output[0].type.CopyFrom(type_proto)
    with pytest.raises(UnsupportedError, match=f"y: graph output .*{reason}"):
        import_model(m)


def test_broken_attribute_values_are_model_errors():
    m = model("g (float[2, 3] x) => (float[3, 2] y) { [t] y = Transpose<perm = [0, 7]>(x) }")
    with pytest.raises(ModelError, match=r"t \(Transpose\)"):
        import_model(m)


def test_a_name_that_is_no_utf_8_is_refused() -> None:
    m = model("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    m.graph.node[0].name = "MARK"
    data = m.SerializeToString()
    assert data.count(b"MARK") == 1
    open_model(data)
    with pytest.raises(ModelError, match="a name that is not UTF-8 text"):
        open_model(data.replace(b"MARK", b"M\xbf\xffK"))


def test_a_view_that_is_declared_with_other_elements() -> None:
    text = "g (float[{n}, 3, 4] x, int64[1] axes) => (float[3, 4] y) {{ [view] y = Squeeze(x, axes) }}"
    assert out_type(import_model(model(text.format(n=1)))) == "fp32[3, 4]"
    with pytest.raises(
        ShapeError,
        match=r"view \(Squeeze\).*declared as fp32\[3, 4\], which has another number of elements than fp32\[2, 3, 4\]",
    ):
        import_model(model(text.format(n=2)))


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ("com.amd.quark.BFPQuantizeDequantize(x)", r"AMD Quark's own operator.*A8W8"),
        ("trt.TRT_FP4DynamicQuantize(x)", r"TensorRT's own operator.*FP8_DEFAULT_CFG"),
        ("com.microsoft.BeamSearch(x)", r"generates text.*optdnn.Generator"),
        ("com.microsoft.RemovePadding(x)", r"rows without padding.*convert_to_packing_mode"),
        ("com.microsoft.QOrderedMatMul(x)", r"order of cuBLASLt.*QuantFormat.QDQ"),
        ("com.microsoft.EPContext(x)", r"another execution provider has compiled"),
        ("com.microsoft.Tokenizer(x)", r"text is not computed"),
        ("ai.onnx.contrib.BertTokenizer(x)", r"operator of onnxruntime-extensions"),
        ("com.microsoft.SparseAttention(x)", r"the custom operator is unknown"),
    ],
)
def test_operators_of_other_tools_are_refused_with_advice(node: str, reason: str):
    domain = node.rpartition(".")[0]
    m = model(f"g (float[4] x) => (float[4] y) {{ [n] y = {node} }}", more_opsets=f', "{domain}" : 1')
    with pytest.raises(UnsupportedError, match=reason):
        import_model(m)


def test_many_nodes_of_one_operator_are_one_line_of_the_message():
    nodes = " ".join(f"[n{i}] y{i} = custom.Thing(x)" for i in range(5))
    outputs = ", ".join(f"float[2] y{i}" for i in range(5))
    m = model(
        f"g (float[2] x) => ({outputs}, float[2] z) {{ {nodes} [m] z = custom.Other(x) }}", more_opsets=', "custom" : 1'
    )
    with pytest.raises(UnsupportedError) as e:
        import_model(m)
    lines = str(e.value).splitlines()
    assert lines[1:3] == [
        "  n0, n1, n2 and 2 more: custom.Thing (opset 1): the custom operator is unknown",
        "  m: custom.Other (opset 1): the custom operator is unknown",
    ]
    assert len(e.value.nodes) == 6


def test_an_initializer_may_be_repeated_with_the_same_value():
    m = model("g (float[2] x) => (float[2] y) <float[2] w = {1.0, 2.0}> { y = Add(x, w) }")
    m.graph.initializer.append(m.graph.initializer[0])
    assert import_model(m).kinds() == {"Add": 1}
    m.graph.initializer[1].float_data[0] = 3.0
    with pytest.raises(ModelError, match="initializer 'w' is defined twice"):
        import_model(m)
