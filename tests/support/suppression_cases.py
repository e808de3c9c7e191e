"""Networks that suppress boxes, directly and in a body, with a number of boxes that depends on data."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper


def detector(boxes: int, classes: int, *, limit: int = 1000, threshold: float = 0.45, body: bool = False) -> ModelProto:
    """Boxes [1, n, 4] and scores [1, classes, n] -> selected [m, 3]. ``body``: in a branch of an If on the number of boxes."""
    info = helper.make_tensor_value_info
    constants = [
        numpy_helper.from_array(np.array([limit], np.int64), "limit"),
        numpy_helper.from_array(np.array([threshold], np.float32), "iou"),
        numpy_helper.from_array(np.array([0.05], np.float32), "least"),
        numpy_helper.from_array(np.array(0, np.int64), "zero"),
        numpy_helper.from_array(np.zeros((0, 3), np.int64), "none"),
        numpy_helper.from_array(np.float32(0.5), "half"),
    ]
    suppress = helper.make_node(
        "NonMaxSuppression", ["corners", "rated", "limit", "iou", "least"], ["found"], name="suppress"
    )
    before = [
        helper.make_node("Mul", ["boxes", "half"], ["corners"]), helper.make_node("Sigmoid", ["scores"], ["rated"]),
    ]  # fmt: skip
    given = [info("boxes", TensorProto.FLOAT, [1, boxes, 4]), info("scores", TensorProto.FLOAT, [1, classes, boxes])]
    out = [info("y", TensorProto.INT64, ["m", 3])]
    if not body:
        nodes = [*before, suppress, helper.make_node("Identity", ["found"], ["y"])]
        return _model(helper.make_graph(nodes, "detector", given, out, constants))
    chosen = helper.make_graph([suppress], "some", [], [info("found", TensorProto.INT64, ["k", 3])])
    empty = helper.make_graph(
        [helper.make_node("Identity", ["none"], ["nothing"])],
        "nobody",
        [],
        [info("nothing", TensorProto.INT64, [0, 3])],
    )
    nodes = [
        *before,
        helper.make_node("NonZero", ["rated"], ["places"]), helper.make_node("Size", ["places"], ["size"]),
        helper.make_node("Greater", ["size", "zero"], ["any"]),
        helper.make_node("If", ["any"], ["y"], name="branch", then_branch=chosen, else_branch=empty),
    ]  # fmt: skip
    return _model(helper.make_graph(nodes, "detector", given, out, constants))


def _model(graph: object) -> ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def feeds(boxes: int, classes: int, *, spread: float = 60.0, seed: int = 0) -> dict[str, np.ndarray]:
    """Boxes of 2 to 12 pixels whose corners lie in a square of ``spread`` pixels, with equal scores among them."""
    rng = np.random.default_rng(seed)
    low, size = rng.uniform(0, spread, (1, boxes, 2)), rng.uniform(2, 12, (1, boxes, 2))
    scores = rng.integers(-60, 60, (1, classes, boxes)) / 20
    return {
        "boxes": np.concatenate([low, low + size], -1).astype(np.float32),
        "scores": scores.astype(np.float32),
    }
