"""unroll, branch_for_none: suppressions that PyTorch guards against a lack of boxes are computed without asking."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from support.check import check_pass, check_refused, check_untouched
from support.fallback import BOOL, I64, F, model, node

import optdnn
from optdnn.importers.onnx import import_model
from optdnn.passes.base import PassContext
from optdnn.passes.unroll import Unroll

GPU = PassContext(target="cuda:sm_90a")


def detector(
    tested: str = "boxes",
    extra: tuple[onnx.NodeProto, ...] = (),
    last: str = "kept",
    nothing: int = 0,
) -> Any:
    """The boxes that a mask selects, moved by their largest coordinate; without boxes, the branch gives ``nothing`` indices."""
    none = node("Constant", "", "none", value=helper.make_tensor("none", I64, [nothing], [7] * nothing))
    then = helper.make_graph([none], "then", [], [helper.make_tensor_value_info("none", I64, [nothing])])
    inner = [
        node("ReduceMax", "boxes", "top", keepdims=0),
        node("Add", "boxes top", "moved"),
        node("Unsqueeze", "moved first", "b"),
        node("Reshape", "some target", "s"),
        node("NonMaxSuppression", "b s most overlap", "found"),
        node("Gather", "found column", "picked", axis=1),
        node("Squeeze", "picked last", "kept"),
        *extra,
    ]
    other = helper.make_graph(inner, "else", [], [helper.make_tensor_value_info(last, I64, [None])])
    nodes = [
        node("NonZero", "mask", "places"),
        node("Squeeze", "places first", "index"),
        node("Gather", "x index", "boxes"),
        node("Gather", "scores index", "some"),
        node("Shape", tested, "sizes"),
        node("ReduceProd", "sizes", "count", keepdims=0),
        node("Equal", "count zero", "empty"),
        node("Cast", "empty", "which", to=BOOL),
        node("If", "which", "y", then_branch=then, else_branch=other),
    ]
    constants = {
        **{
            "zero": np.array(0, np.int64),
            "first": np.array([0], np.int64),
            "target": np.array([1, 1, -1], np.int64),
            "same": np.array([0, 1], np.int64),
        },
        **{"most": np.array([5], np.int64), "overlap": np.array([0.5], np.float32)},
        **{"column": np.array([2], np.int64), "last": np.array([1], np.int64)},
    }
    inputs = [("x", F, [40, 4]), ("scores", F, [40]), ("mask", BOOL, [40]), ("other", F, ["n"])]
    return model(nodes, inputs, [("y", I64, None)], **constants)


def test_a_guarded_suppression_is_computed_without_asking() -> None:
    graph = import_model(detector())
    result, _ = check_pass(Unroll(), graph, changes=1, rules={"branch_for_none": 1}, context=GPU)
    assert "If" not in result.kinds()
    assert result.kinds()["NonMaxSuppression"] == 1
    check_untouched(Unroll(), graph, context=PassContext(target="cpu"))


@pytest.mark.parametrize("some", [True, False])
def test_no_boxes_give_no_indices(some: bool) -> None:
    engine = optdnn.build(detector(), target="simulate", shapes={"other": (3,)})
    rng = np.random.default_rng(2)
    corner = rng.random((40, 2), dtype=np.float32)
    mask = (np.arange(40) % 3 == 0) & some
    feeds = {"x": np.concatenate([corner, corner + 0.2], 1), "scores": rng.random(40, dtype=np.float32), "mask": mask}
    result = engine.run({**feeds, "other": np.zeros(3, np.float32)})["y"]
    assert result.shape == ((5,) if some else (0,))


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ({"tested": "other"}, "does not say whether there are boxes"),
        (
            {"extra": (node("NonZero", "kept", "z"), node("Squeeze", "z first", "w")), "last": "w"},
            "no suppression of boxes",
        ),
        ({"extra": (node("ArgMax", "some", "best"),)}, "may fail where it is not taken"),
        ({"extra": (node("Reshape", "some same", "column_of"),)}, "may fail where it is not taken"),
        ({"nothing": 1}, "its branches do not give the same sizes"),
    ],
)
def test_refusals(change: dict[str, Any], because: str) -> None:
    check_refused(Unroll(), import_model(detector(**change)), because=because, context=GPU)
