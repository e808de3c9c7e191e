"""Operators that end the process in ONNX Runtime on some operands: guards avoid that."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import optdnn
from optdnn.importers.onnx import import_model
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.lowering.cpu.library import LIBRARIES
from optdnn.lowering.cpu.process_guards import guard, need_guards, unguarded
from optdnn.lowering.cpu.unsafe import openvino_must_not
from optdnn.ranges import DimRange

ort = pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")

STATES, INPUTS = 4, 3
CELLS = {"GRU": 3, "LSTM": 4}


def f32(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def recurrent(kind: str, attrs: str = "", directions: int = 1, initial: bool = False) -> onnx.ModelProto:
    """A layer with all of its outputs."""
    outputs = ["y", "h", "c"][: 3 if kind == "LSTM" else 2]
    given = "float[T, N, 3] x" + (f", float[{directions}, N, 4] h0" if initial else "")
    head = f'<ir_version: 10, opset_import: ["" : 21]> g ({given}) => ({", ".join(f"float {o}" for o in outputs)})'
    operands = "x, w, r" + (", , , h0" if initial else "")
    model = onnx.parser.parse_model(
        f"{head} {{ {', '.join(outputs)} = {kind} <hidden_size = 4 {attrs}> ({operands}) }}"
    )
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    for name, size in (("w", INPUTS), ("r", STATES)):
        weight = f32(directions, CELLS[kind] * STATES, size)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    return model


def volumes(attrs: str) -> onnx.ModelProto:
    """A transposed convolution of volumes of any size."""
    head = '<ir_version: 10, opset_import: ["" : 21]> g (float[N, 2, D, H, W] x) => (float[N, 3, A, B, C] y)'
    model = onnx.parser.parse_model(f"{head} {{ y = ConvTranspose {attrs} (x, w, b) }}")
    for name, shape in (("w", (2, 3, 3, 3, 3)), ("b", (3,))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(f32(*shape), name))
    return model


def agrees(model: onnx.ModelProto, feeds: dict[str, Any], tactics: str = "onnxruntime") -> None:
    """The library runs the network (with "auto" NumPy may, as times are measured), and its results are those of NumPy."""
    engine = optdnn.build(model, target="cpu", threads=1, tactics=tactics)
    (executor,) = (step.executor for step in engine.program.steps)
    assert executor == "onnxruntime" or (tactics == "auto" and executor == "reference")
    want, got = optdnn.build(model, target="reference").run(feeds), engine.run(feeds)
    for name, value in want.items():
        assert got[name].shape == value.shape
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize(("steps", "batch"), [(3, 0), (0, 2), (0, 0), (3, 2)])
def test_recurrent_layers_without_a_batch_or_steps(kind: str, steps: int, batch: int) -> None:
    agrees(recurrent(kind), {"x": f32(steps, batch, INPUTS)})


@pytest.mark.parametrize("kind", CELLS)
def test_both_directions_and_initial_states(kind: str) -> None:
    model = recurrent(kind, ', direction = "bidirectional"', 2, initial=True)
    for steps, batch in ((3, 0), (0, 2), (3, 2)):
        agrees(model, {"x": f32(steps, batch, INPUTS), "h0": f32(2, batch, STATES)})


def test_batches_in_front() -> None:
    """Layout 1 has the batch before the steps; only the shapes of zeros depend on it."""
    model = recurrent("GRU", ", layout = 1")
    guard(model, Graph())
    (branch,) = (a.g for node in model.graph.node for a in node.attribute if a.name == "then_branch")
    graph = onnx.helper.make_graph(
        list(branch.node), "zeros", list(model.graph.input), list(branch.output), list(model.graph.initializer)
    )
    made = onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=10)
    y, h = ort.InferenceSession(made.SerializeToString()).run(None, {"x": f32(0, 2, INPUTS)})
    assert (y.shape, h.shape, y.sum(), h.sum()) == ((0, 2, 1, STATES), (0, 1, STATES), 0, 0)


@pytest.mark.parametrize(
    "attrs",
    ["", "<strides = [2, 1, 2]>", "<strides = [2, 2, 2], output_padding = [1, 0, 1], pads = [1, 0, 1, 0, 1, 0]>",
     '<auto_pad = "SAME_UPPER", strides = [2, 2, 2]>', "<output_shape = [2, 4, 5]>"],
)  # fmt: skip
def test_volumes_without_depth_or_height(attrs: str) -> None:
    sizes = [(1, 2, 0, 4, 5), (0, 2, 2, 4, 5), (2, 2, 2, 4, 5)] if "shape" in attrs else [
        (1, 2, 0, 4, 5), (1, 2, 3, 0, 5), (2, 2, 0, 0, 0), (0, 2, 3, 4, 5), (2, 2, 3, 4, 5)
    ]  # fmt: skip
    for size in sizes:
        agrees(volumes(attrs), {"x": f32(*size)})


def filtered(attrs: str) -> onnx.ModelProto:
    """A convolution by a filter of any size, as in a tracker."""
    head = '<ir_version: 10, opset_import: ["" : 21]> g (float[N, 2, H, W] x, float[3, 2, A, B] f, float[3] b) => (float y)'
    model = onnx.parser.parse_model(f"{head} {{ y = Conv {attrs} (x, f, b) }}")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


@pytest.mark.parametrize(
    "attrs",
    [
        "",
        "<strides = [2, 1], dilations = [1, 2], pads = [0, 16, 0, 16]>",
        "<pads = [1, 0, 2, 1]>",
        '<auto_pad = "SAME_UPPER", strides = [2, 2]>',
    ],
)
def test_filters_without_elements(attrs: str) -> None:
    """ONNX Runtime would not end."""
    for kernel in ((3, 3),) if "SAME" in attrs else ((0, 0), (0, 3), (3, 0), (3, 3)):
        feeds = {"x": f32(2, 2, 9, 8), "f": f32(3, 2, *kernel), "b": f32(3)}
        agrees(filtered(attrs), feeds)


def of(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_an_operand_that_always_has_elements_needs_no_branch() -> None:
    for steps, guarded in ((DimRange(1, 3, 8), False), (3, False), (DimRange(0, 3, 8), True)):
        model = recurrent("GRU")
        graph = import_model(model, shapes={"x": (steps, 2, 3)})
        guard(model, graph)
        assert of(model) == (["Size", "Constant", "Equal", "If"] if guarded else ["GRU"])
        assert bool(need_guards(graph)) == guarded


def test_images_need_no_branch() -> None:
    head = '<ir_version: 10, opset_import: ["" : 21]> g (float[N, 2, H, W] x) => (float[N, 3, A, B] y)'
    model = onnx.parser.parse_model(f"{head} {{ y = ConvTranspose <kernel_shape = [3, 3]> (x, w) }}")
    model.graph.initializer.append(onnx.numpy_helper.from_array(f32(2, 3, 3, 3), "w"))
    graph = import_model(model)
    assert need_guards(graph) == {}
    exported = export_model(graph).proto
    guard(exported, Graph())
    assert of(exported) == ["ConvTranspose"]


def test_inner_graphs_get_guards_with_names_of_their_own() -> None:
    head = '<ir_version: 10, opset_import: ["" : 21]> g (bool c, float[T, N, 3] x, float w, float r) => (float y)'
    model = onnx.parser.parse_model(f"""{head} {{
        y = If (c) <then_branch = a () => (float p) {{ p, guard_0 = GRU <hidden_size = 4> (x, w, r) }},
                    else_branch = b () => (float q) {{ q = Identity (x) }}> }}""")
    guard(model, Graph())
    (inner,) = (a.g for a in model.graph.node[0].attribute if a.name == "then_branch")
    assert [node.op_type for node in inner.node] == ["Size", "Constant", "Equal", "If"]
    names = [name for node in inner.node for name in node.output]
    assert len(names) == len(set(names))
    (other,) = (a.g for a in inner.node[-1].attribute if a.name == "else_branch")
    assert [node.op_type for node in other.node] == ["GRU"]


def division(kind: str, divisor: str = "") -> onnx.ModelProto:
    given = f"{kind}[N] x" + ("" if divisor else f", {kind}[N] d")
    constants = f"<{kind}[1] d = {{{divisor}}}>" if divisor else ""
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g ({given}) => ({kind}[N] y) {constants} {{ y = Div (x, d) }}'
    )


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_the_least_integer_divided_by_minus_one(kind: str) -> None:
    least = np.iinfo(kind).min
    x, d = np.array([least, least, 7, -7, 8], kind), np.array([-1, 2, -1, 2, -3], kind)
    agrees(division(kind), {"x": x, "d": d})
    agrees(division(kind, "-1"), {"x": x})


@pytest.mark.parametrize(
    ("model", "guarded"),
    [(division("int64"), True), (division("int64", "-1"), True), (division("int64", "4"), False),
     (division("float"), False), (division("uint8"), False)],
)  # fmt: skip
def test_other_divisions_stay(model: onnx.ModelProto, guarded: bool) -> None:
    graph = import_model(model)
    assert bool(need_guards(graph)) == guarded
    guard(model, graph)
    assert (of(model) == ["Div"]) == (not guarded)


def test_a_division_by_a_size_stays() -> None:
    head = '<ir_version: 10, opset_import: ["" : 21]> g (float[N, 3] x, int64[1] k) => (int64[1] y)'
    model = onnx.parser.parse_model(f"{head} {{ s = Shape <start = 0, end = 1> (x) y = Div (k, s) }}")
    assert need_guards(import_model(model)) == {}


def test_openvino_leaves_them_to_onnxruntime() -> None:
    """ONNX Runtime runs OpenVINO's calls without elements, on a model without guards."""
    pytest.importorskip("openvino", reason="the cpu extra is not installed")

    graph = import_model(recurrent("LSTM"))
    (reason,) = openvino_must_not(graph).values()
    assert "ends the process, or hangs; sizes from 1 on avoid that" in reason
    fixed = import_model(recurrent("LSTM"), shapes={"x": (3, 2, INPUTS)})
    assert openvino_must_not(fixed) == {}
    agrees(recurrent("LSTM"), {"x": f32(3, 0, INPUTS)}, "auto")


def part_of(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Graph]:
    """The model as ONNX Runtime gets it, and its graph."""
    exported = LIBRARIES["onnxruntime"].export(import_model(model)).proto
    return exported, import_model(exported)


@pytest.mark.parametrize("model", [recurrent("GRU"), recurrent("LSTM"), volumes(""), filtered(""), division("int64")])
def test_a_file_without_the_guard_is_refused(model: onnx.ModelProto) -> None:
    exported, graph = part_of(model)
    assert unguarded(exported, graph) == {}
    plain = export_model(import_model(model)).proto
    (reason,) = unguarded(plain, import_model(plain)).values()
    assert "ends the process" in reason


@pytest.mark.parametrize("number", [0, -1, 1])
def test_a_guard_with_other_numbers_is_none(number: int) -> None:
    """The guard of a division has 1 and -1, the guard of a layer 0."""
    for model in (recurrent("GRU"), division("int64")):
        exported, graph = part_of(model)
        for node in exported.graph.node:
            if node.op_type == "Constant" and onnx.numpy_helper.to_array(node.attribute[0].t) == number:
                node.attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(np.array(5)))
                assert unguarded(exported, graph)
