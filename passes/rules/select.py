"""Selections by a mask: arithmetic becomes Where, and a Compress with a known mask becomes a Gather."""

from __future__ import annotations

from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import reshaped
from optdnn.passes.support.pattern import ConstantVar, Pattern, Var, node
from optdnn.passes.support.pattern_rule import pattern_rule
from optdnn.types import BOOL, Array, is_float

_C, _X, _Y = Var("condition"), Var("x"), Var("y")
_NOT, _KEPT_NOT = node("Not", _C), node("Not", _C, name="kept")


def _masked(mask: Pattern) -> Pattern:
    return node("Mul", mask, _X, name="product", alone=True)


@pattern_rule(
    "select_is_where",
    node("Add", _masked(ConstantVar("mask")), ConstantVar("low")),
    node("Add", _masked(node("Cast", _C)), node("Mul", node("Cast", _NOT), _Y)),
    node("Add", _masked(node("Cast", _KEPT_NOT)), node("Mul", node("Cast", _C), _Y)),
)
def select_is_where(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """``c * x + (1 - c) * y`` with a mask c of zeros and ones becomes ``where(c, x, y)``. tf2onnx writes SelectV2 in this form.

    The mask is a Cast of a boolean, and its complement a Cast of the Not of this boolean; or both are constants, and ``y`` is one
    number. (If the mask hides an infinity or a NaN, the arithmetic gives NaN; the Where does not.)
    """
    x: Value = found["x"]
    choice: tuple[Value | Array, Value | Array] | None
    if "mask" in found:
        choice = _constants(graph.op(found["mask"]).attrs.value, graph.op(found["low"]).attrs.value)
    else:
        condition = found["kept"].value if "kept" in found else found["condition"]
        choice = (condition, found["y"]) if graph.type(condition).dtype == BOOL else None
    if choice is None or not is_float(root.outputs[0].type.dtype):
        return None
    if graph.type(x).shape != root.outputs[0].type.shape:
        return Miss("the mask enlarges its operand")

    def build(patch: Patch) -> Value:
        named = zip(choice, ("mask", "hidden"), strict=True)
        mask, hidden = (v if isinstance(v, Value) else patch.constant(v, name) for v, name in named)
        return patch.add("Where", [mask, x, hidden])

    return Match((root, found["product"]), build)


def _constants(mask: Array, low: Array) -> tuple[Array, Array] | None:
    """The mask as booleans and the number that replaces hidden elements; None if the constants do not have this form."""
    if not ((mask == 0) | (mask == 1)).all() or mask.all() or not mask.any():
        return None
    wide, values = np.broadcast_arrays(mask, low)
    rest = np.unique(values[wide == 0])
    if values[wide == 1].any() or rest.size != 1 or wide.shape != mask.shape:
        return None
    return mask.astype(BOOL), rest.reshape(()).astype(low.dtype)


@rule("known_compress", {"Compress"})
def known_compress(graph: Graph, op: Op) -> Match | None:
    """A Compress with a constant condition becomes a Gather. tf2onnx removes the edges of symmetric padding in this form."""
    condition = graph.constant_value(op.inputs[1])
    if condition is None or op.inputs[0] is None:
        return None
    source, axis = op.inputs[0], op.attrs.axis

    def build(patch: Patch) -> Value:
        indices = patch.constant(np.flatnonzero(condition).astype(np.int64), "kept")
        x = reshaped(patch, source, (-1,)) if axis is None else source
        return patch.add("Gather", [x, indices], GatherAttrs(0 if axis is None else axis))

    return Match((op,), build)
