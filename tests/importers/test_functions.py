"""Model-local functions, and ONNX's own operators that are defined by functions, are inlined."""

from __future__ import annotations

import numpy as np
import pytest
from onnxtext import model, out_type, sources

from optdnn.errors import ModelError, UnsupportedError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.verify import verify

FUNCTIONS = """
<domain: "f", opset_import: ["" : 17]>
leak <slope> (a) => (b) { [pick] b = LeakyRelu<alpha : float = @slope>(a) }
<domain: "f", opset_import: ["" : 17, "f" : 1]>
twice <slope> (a) => (b, h) { [first] h = f.leak<slope : float = @slope>(a)  b = f.leak<slope : float = @slope>(h) }
<domain: "f", opset_import: ["" : 17]>
shifted <s : float = 3.0> (a) => (b) { c = Constant<value_float : float = @s>()  b = Add(a, c) }
<domain: "old", opset_import: ["" : 9]>
squeezed (a) => (b) { b = Squeeze<axes = [0]>(a) }
"""


def imported(text, opset=17):
    graph = import_model(model(text, opset, FUNCTIONS, ', "f" : 1, "old" : 1'))
    verify(graph)
    return graph


def test_nested_functions_with_attribute_references():
    graph = imported("g (float[3] x) => (float[3] y) { [call] y, unused = f.twice<slope = 0.5>(x) }")
    assert sources(graph) == [("LeakyRelu", "call/first/pick"), ("LeakyRelu", "call/leak_1/pick")]
    out = evaluate(graph, {"x": np.array([-4, 0, 4], np.float32)})
    assert {k: v.tolist() for k, v in out.items()} == {"y": [-1, 0, 4]}
    assert [op.outputs[0].name for op in graph.of_kind("LeakyRelu")] == ["call/h", "y"]


def test_an_attribute_reference_that_the_call_does_not_give_is_left_off():
    graph = imported("g (float[3] x) => (float[3] y) { y = f.leak(x) }")
    assert graph.of_kind("LeakyRelu")[0].attrs.alpha == pytest.approx(0.01)


def test_attribute_defaults_of_a_function():
    x = {"x": np.zeros(1, np.float32)}
    assert evaluate(imported("g (float[1] x) => (float[1] y) { y = f.shifted(x) }"), x)["y"].tolist() == [3]
    assert evaluate(imported("g (float[1] x) => (float[1] y) { y = f.shifted<s = 5.0>(x) }"), x)["y"].tolist() == [5]


def test_a_function_is_read_at_its_own_opset():
    # In opset 9 the axes of Squeeze are an attribute; in the model's opset 17 they would be an operand.
    assert out_type(imported("g (float[1, 3] x) => (float[3] y) { y = old.squeezed(x) }")) == "fp32[3]"


def test_a_call_with_too_many_operands():
    with pytest.raises(ModelError, match=r"call \(f.leak\): is called with 2 operands, the function has 1"):
        imported("g (float[3] x) => (float[3] y) { [call] y = f.leak(x, x) }")


def test_a_call_for_too_many_outputs():
    with pytest.raises(ModelError, match=r"is called for 2 outputs, the function has 1"):
        imported("g (float[3] x) => (float[3] y, float[3] z) { [call] y, z = f.leak(x) }")


def test_recursion_is_refused():
    m = model(
        "g (float[3] x) => (float[3] y) { y = f.a(x) }",
        17,
        '<domain: "f", opset_import: ["f" : 1]> a (x) => (y) { y = f.a(x) }',
        ', "f" : 1',
    )
    with pytest.raises(ModelError, match="64 deep"):
        import_model(m)


def test_exponential_growth_is_refused(monkeypatch):
    """The count comes from the sizes of the functions, before anything is inlined."""
    monkeypatch.setattr("optdnn.importers.onnx.GraphImporter.nodes", None)
    functions = '<domain: "f", opset_import: ["" : 17]> f0 (x) => (y) { y = Relu(x) }\n' + "\n".join(
        f'<domain: "f", opset_import: ["f" : 1]> f{i} (x) => (y) {{ h = f.f{i - 1}(x)  y = f.f{i - 1}(h) }}'
        for i in range(1, 40)
    )
    m = model("g (float[3] x) => (float[3] y) { y = f.f39(x) }", 17, functions, ', "f" : 1')
    with pytest.raises(ModelError, match=f"has {(3 << 39) - 2} nodes once its functions are inlined") as refused:
        import_model(m)
    assert "OPTDNN_MAX_INLINED_NODES=N" in refused.value.hint


def test_a_function_that_does_not_produce_its_output():
    functions = '<domain: "f", opset_import: ["" : 17]> f (x) => (y) { z = Relu(x) }'
    m = model("g (float[3] x) => (float[3] y) { [call] y = f.f(x) }", 17, functions, ', "f" : 1')
    with pytest.raises(ModelError, match="function f does not produce its output 'y'"):
        import_model(m)


def test_functions_defined_twice():
    functions = '<domain: "f", opset_import: ["" : 17]> f (x) => (y) { y = Relu(x) }\n' * 2
    m = model("g (float[3] x) => (float[3] y) { y = f.f(x) }", 17, functions, ', "f" : 1')
    with pytest.raises(ModelError, match=r"function f\.f is defined twice"):
        import_model(m)


def test_unsupported_nodes_inside_of_functions_are_named_with_the_call():
    functions = '<domain: "f", opset_import: ["" : 17]> f (x) => (y) { [dice] y = Multinomial(x) }'
    m = model("g (float[3] x) => (float[3] y) { [call] y = f.f(x) }", 17, functions, ', "f" : 1')
    with pytest.raises(UnsupportedError) as e:
        import_model(m)
    assert [n.node for n in e.value.nodes] == ["call/dice"]


def test_operators_that_onnx_defines_by_functions_are_inlined():
    # Neither has its own kind: HannWindow is a plain function, CenterCropPad's function depends on its operands.
    graph = import_model(model("g (int64 n) => (float[N] y) { [window] y = HannWindow(n) }"))
    want = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(6) / 6)
    assert evaluate(graph, {"n": np.array(6)})["y"] == pytest.approx(want, abs=1e-6)
    assert all(name.startswith("window/") for _, name in sources(graph))
    m = model("g (float[N, 6] x, int64[1] s) => (float[N, M] y) { y = CenterCropPad<axes = [1]>(x, s) }", 18)
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    got = evaluate(import_model(m), {"x": x, "s": np.array([4])})["y"]
    assert got.tolist() == x[:, 1:5].tolist()
