"""Networks that a GPU cannot run as a whole: operators without kernels, sizes that depend on data, control flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Info = tuple[str, int, list[int | str]]
F, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def model(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[Info], outputs: Sequence[Info], **constants: object
) -> onnx.ModelProto:
    """A model of opset 20; integers in ``constants`` are int64, other numbers fp32."""
    arrays = {k: np.asarray(v) for k, v in constants.items()}
    tensors = [
        numpy_helper.from_array(a.astype(np.float32) if a.dtype == np.float64 else a, k) for k, a in arrays.items()
    ]
    infos = [[helper.make_tensor_value_info(*x) for x in xs] for xs in (inputs, outputs)]
    graph = helper.make_graph(nodes, "fallback", infos[0], infos[1], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def node(op: str, inputs: str, outputs: str, **attrs: object) -> onnx.NodeProto:
    """A node that is named after its first output. Names are separated by blanks; "-" is an absent operand."""
    names = ["" if n == "-" else n for n in inputs.split()]
    return helper.make_node(op, names, outputs.split(), name=outputs.split()[0], **attrs)


def body(nodes: Sequence[onnx.NodeProto], inputs: Sequence[Info], outputs: Sequence[Info]) -> onnx.GraphProto:
    """The body of a Loop or a Scan."""
    infos = [[helper.make_tensor_value_info(*x) for x in xs] for xs in (inputs, outputs)]
    return helper.make_graph(nodes, "body", *infos)


def three() -> onnx.ModelProto:
    """Three operators that no GPU kernel runs (a determinant, Unique, and Compress), a kernel before, between and after."""
    nodes = [
        node("Relu", "x", "a"),
        node("Det", "square", "det"),
        node("Unique", "a", "unique", sorted=1),
        node("Compress", "a keep", "kept", axis=0),
        node("ReduceMax", "kept", "top", keepdims=0),
        node("Add", "a det", "b"),
        node("Mul", "b top", "y"),
    ]
    outputs: list[Info] = [("y", F, [4, 9]), ("unique", F, ["n"])]
    return model(nodes, [("x", F, [4, 9]), ("square", F, [3, 3]), ("keep", BOOL, [4])], outputs)


def detector() -> onnx.ModelProto:
    """A convolution, boxes decoded from it, NonMaxSuppression, and the kept boxes and scores as they come."""
    rng = np.random.default_rng(1)
    nodes = [
        node("Conv", "image w", "c", pads=[1, 1, 1, 1]),
        node("Reshape", "c flat", "r"),
        node("Transpose", "r", "t", perm=[0, 2, 1]),
        node("Split", "t sizes", "center extent logits", axis=2),
        node("Abs", "extent", "size"),
        node("Sub", "center size", "low"),
        node("Add", "center size", "high"),
        node("Concat", "low high", "boxes", axis=2),
        node("Sigmoid", "logits", "s"),
        node("Transpose", "s", "scores", perm=[0, 2, 1]),
        node("NonMaxSuppression", "boxes scores most iou floor", "selected"),
        node("Gather", "selected two", "which", axis=1),
        node("Squeeze", "which one", "index"),
        node("Squeeze", "boxes zero", "flatboxes"),
        node("Gather", "flatboxes index", "kept", axis=0),
    ]
    return model(
        nodes, [("image", F, [1, 3, 8, 8])], [("kept", F, ["n", 4]), ("scores", F, [1, 2, 64])],
        w=rng.standard_normal((6, 3, 3, 3)) * 0.3, flat=[1, 6, 64], sizes=[2, 2, 2], most=8, iou=np.float32(0.3),
        floor=np.float32(0.5), two=[2], one=[1], zero=[0],
    )  # fmt: skip


def loop() -> onnx.ModelProto:
    """A Loop whose trip count is an input, between two matrix products; an If that reads its result."""
    body = helper.make_graph(
        [node("Identity", "cond_in", "cond_out"), node("Mul", "v_in half", "scaled"), node("Add", "scaled v0", "v_out")],
        "body",
        [helper.make_tensor_value_info(n, t, s) for n, t, s in (("i", I64, []), ("cond_in", BOOL, []), ("v_in", F, [4, 8]))],
        [helper.make_tensor_value_info(n, t, s) for n, t, s in (("cond_out", BOOL, []), ("v_out", F, [4, 8]))],
    )  # fmt: skip
    then = helper.make_graph([node("Neg", "v", "yes")], "then", [], [helper.make_tensor_value_info("yes", F, [4, 8])])
    other = helper.make_graph([node("Exp", "v", "no")], "else", [], [helper.make_tensor_value_info("no", F, [4, 8])])
    nodes = [
        node("MatMul", "x w0", "v0"),
        node("Loop", "trips - v0", "v", body=body),
        node("ReduceMean", "v", "mean", keepdims=0),
        node("Greater", "mean nothing", "positive"),
        node("If", "positive", "chosen", then_branch=then, else_branch=other),
        node("MatMul", "chosen w1", "y"),
    ]
    rng = np.random.default_rng(2)
    return model(
        nodes, [("x", F, [4, 16]), ("trips", I64, [])], [("y", F, [4, 5])], w0=rng.standard_normal((16, 8)) * 0.2,
        w1=rng.standard_normal((8, 5)) * 0.2, half=np.float32(0.5), nothing=np.float32(0),
    )  # fmt: skip


def sizes_from_data() -> onnx.ModelProto:
    """NonZero, sizes that follow from it, static sizes after them; an output of each kind, and one that is an input."""
    nodes = [
        node("Greater", "x bound", "mask"),
        node("NonZero", "mask", "at"),
        node("Transpose", "at", "rows"),
        node("GatherND", "x rows", "found"),
        node("Exp", "found", "e"),
        node("ReduceSum", "e", "total", keepdims=0),
        node("Div", "x total", "y"),
        node("Shape", "found", "count"),
    ]
    return model(
        nodes, [("x", F, [5, 7]), ("bound", F, [])], [("y", F, [5, 7]), ("rows", I64, ["n", 2]), ("count", I64, [1])]
    )


NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    "three": three, "detector": detector, "loop": loop, "sizes_from_data": sizes_from_data,
}  # fmt: skip


def feeds(made: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs: normal floats, booleans that are not all false, small positive integers."""
    rng = np.random.default_rng(seed)
    found: dict[str, np.ndarray] = {}
    for value in made.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        kind = value.type.tensor_type.elem_type
        if kind == BOOL:
            found[value.name] = np.arange(int(np.prod(shape))).reshape(shape) % 2 == seed % 2
        elif kind == I64:
            found[value.name] = np.full(shape, 3 + seed, np.int64)
        else:
            found[value.name] = np.asarray(rng.standard_normal(shape), np.float32)
    return found
