"""Opsets 1 to 6: their nodes are rewritten for opset 7 before the operator's own import function sees them.

Changes in opset 7: binary operators broadcast like NumPy (before: ``broadcast=1`` and ``axis`` aligned the second
operand), ``is_test`` and ``consumed_inputs`` were removed, and some attributes became operands or got another name or type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.base import Unsupported
from optdnn.ops.checks import emit, required
from optdnn.ops.exchange import Emit, NodeSpec, Ref, onnx_number
from optdnn.ops.values import static_ints
from optdnn.types import DTYPES, normalize_axis

FIRST_MODERN = 7
"""The first opset whose nodes need no rewriting."""

_DTYPE_NAMES = {
    "FLOAT": "fp32",
    "DOUBLE": "fp64",
    "FLOAT16": "fp16",
    **{t.upper(): t for t in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")},
}
_RULES: dict[str, Callable[[NodeSpec, Emit], NodeSpec]] = {}


def modernize(node: NodeSpec, e: Emit) -> NodeSpec:
    """A node of the default domain of opset 1 to 6, in the form of opset 7.

    Raises Unsupported for training-mode nodes and ShapeError for violations of the old operator's rules.
    """
    node = replace(node, attrs={k: v for k, v in node.attrs.items() if k != "consumed_inputs"})
    rule = _RULES.get(node.op_type)
    if rule is not None:
        node = rule(node, e)
    return replace(node, opset=FIRST_MODERN)


def _with(
    node: NodeSpec, drop: tuple[str, ...] = (), inputs: tuple[Ref | None, ...] | None = None, **set: Any
) -> NodeSpec:
    attrs = {k: v for k, v in node.attrs.items() if k not in drop} | set
    return replace(node, attrs=attrs, inputs=node.inputs if inputs is None else inputs)


def _aligned(node: NodeSpec, e: Emit) -> NodeSpec:
    """Binary operators: the second operand's axes match the first's from ``axis`` on (by default its last axes)."""
    a, b = node.inputs
    if node.get("broadcast", 0) and "axis" in node.attrs:
        rank, own = len(e.type(a).dims), e.type(b).dims
        axis = normalize_axis(int(node.attrs["axis"]), rank)
        after = rank - axis - len(own)
        if after < 0:
            raise ShapeError(f"{node.op_type}: {e.type(b)} does not fit {e.type(a)} from axis {axis} on")
        if after and own:
            b = emit(e, "Unsqueeze", b, np.arange(len(own), len(own) + after))
    return _with(node, ("broadcast", "axis"), (a, b))


def _slope(node: NodeSpec, e: Emit) -> NodeSpec:
    """PRelu: one slope per channel (axis 1)."""
    x, slope = node.inputs
    rank, own = len(e.type(x).dims), e.type(slope).dims
    if len(own) == 1 and own[0] != 1 and rank > 2:
        slope = emit(e, "Unsqueeze", slope, np.arange(1, rank - 1))
    return _with(node, inputs=(x, slope))


def _inference(node: NodeSpec, e: Emit) -> NodeSpec:
    """BatchNormalization and Dropout. ``is_test=0`` is the default and exporters often left it out. So, as in ONNX's own
    version converter, only a node with used further outputs is in training mode."""
    if not node.get("is_test", 0) and any(node.outputs[1:]):
        raise Unsupported("is_test=0 with more than one output (training); export the model for inference")
    if node.op_type == "Dropout" and any(node.outputs[1:]):
        # In test mode the mask was never written; Identity replaces it in the newer operator.
        raise Unsupported("the mask of Dropout in test mode, which this opset does not define")
    return _with(node, ("is_test", "momentum"))


def _cast(node: NodeSpec, e: Emit) -> NodeSpec:
    to = required(node, "to")
    if isinstance(to, str):
        if to.upper() not in _DTYPE_NAMES:
            raise Unsupported(f"Cast to {to!r}")
        to = onnx_number(DTYPES[_DTYPE_NAMES[to.upper()]])
    return _with(node, to=to)


def _reshape(node: NodeSpec, e: Emit) -> NodeSpec:
    """The shape was an attribute before opset 5."""
    if "shape" not in node.attrs:
        return node
    return _with(node, ("shape",), (node.inputs[0], e.const(np.asarray(node.ints("shape"), np.int64))))


def _tile(node: NodeSpec, e: Emit) -> NodeSpec:
    """Before opset 6: ``tiles`` copies along one ``axis``."""
    if len(node.inputs) < 3:
        return node
    x, tiles, axis = node.inputs
    where, count = static_ints(e, axis), static_ints(e, tiles)
    if where is None or count is None:
        raise Unsupported("tiles and axis must be constants at this opset")
    rank = len(e.type(x).dims)
    repeats = np.ones(rank, np.int64)
    repeats[normalize_axis(where[0], rank)] = count[0]
    return _with(node, inputs=(x, e.const(repeats)))


def _upsample(node: NodeSpec, e: Emit) -> NodeSpec:
    if "scales" in node.attrs:
        return node
    scales = [1.0, 1.0, float(required(node, "height_scale")), float(required(node, "width_scale"))]
    return _with(node, ("height_scale", "width_scale"), scales=scales)


def _renamed(**names: str) -> Callable[[NodeSpec, Emit], NodeSpec]:
    def rule(node: NodeSpec, e: Emit) -> NodeSpec:
        return replace(node, attrs={names.get(k, k): v for k, v in node.attrs.items()})

    return rule


def _defaults(before: int, **values: Any) -> Callable[[NodeSpec, Emit], NodeSpec]:
    """Attributes whose default was different below opset ``before``."""

    def rule(node: NodeSpec, e: Emit) -> NodeSpec:
        old: Mapping[str, Any] = values if node.opset < before else {}
        return replace(node, attrs={**old, **node.attrs})

    return rule


def _dropped(*names: str) -> Callable[[NodeSpec, Emit], NodeSpec]:
    return lambda node, e: _with(node, names)


_RULES |= dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less"), _aligned)
_RULES |= dict.fromkeys(("BatchNormalization", "Dropout"), _inference)
_RULES |= dict.fromkeys(("LSTM", "GRU", "RNN"), _dropped("output_sequence"))
_RULES |= {
    "PRelu": _slope,
    "Cast": _cast,
    "Reshape": _reshape,
    "Tile": _tile,
    "Upsample": _upsample,
    "Pad": _renamed(paddings="pads"),
    "Gemm": _dropped("broadcast"),
    "Concat": _defaults(4, axis=1),
    "Selu": _defaults(6, alpha=1.6732, gamma=1.0507),
}
