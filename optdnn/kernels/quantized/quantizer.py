"""The quantization, or the conversion to fp16, after an operator's float result: the operator's own kernel can compute it.

A QuantizeLinear that no other operator absorbed is a Pointwise of a division, a rounding, a clip and a cast
(:mod:`optdnn.passes.rules.quantized_stages`). This module recognizes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder
from optdnn.ops.base import attrs_dict
from optdnn.ops.requantize import BOUNDS, QuantParams
from optdnn.types import FP16, FP32, INT8, UINT8, is_float


@dataclass(frozen=True)
class Quantizer:
    """``op`` quantizes a value to 8 bits with the parameters ``to``, or converts it from fp32 to fp16, and does nothing else."""

    op: Op
    to: QuantParams


def quantization(graph: Graph, op: Op) -> tuple[Value, QuantParams] | None:
    """The operand and the parameters of a Pointwise that only quantizes; None for any other op, and for scales per channel."""
    if op.kind != "Pointwise" or op.inputs[0] is None or op.attrs.prologue or op.outputs[0].type.dtype.itemsize != 1:
        return None
    source, dtype, stages = graph.type(op.inputs[0]).dtype, op.outputs[0].type.dtype, list(op.attrs.epilogue)
    if dtype.name not in BOUNDS or not is_float(source):
        return None
    kinds = [*(["Cast"] if source != FP32 else []), "Div", *([] if is_float(dtype) else ["Round"])]
    kinds += [*(["Add"] if len(stages) == len(kinds) + 3 else []), "Clip", "Cast"]
    numbers = _numbers(graph, op, kinds)
    if numbers is None or (source != FP32 and stages[0].attrs.to != FP32):
        return None
    if tuple(numbers["Clip"]) != tuple(map(float, BOUNDS[dtype.name])):
        return None
    (scale,) = numbers["Div"]
    (zero,) = numbers.get("Add", [0.0])
    return (op.inputs[0], QuantParams(dtype.name, scale, int(zero))) if np.isfinite(scale) and scale > 0 else None


def dequantization(graph: Graph, op: Op) -> tuple[Value, QuantParams] | None:
    """The 8-bit integers and the parameters of a Pointwise that only dequantizes them; None for any other op."""
    if op.kind != "Pointwise" or op.inputs[0] is None or op.attrs.prologue:
        return None
    dtype, to, stages = graph.type(op.inputs[0]).dtype, op.outputs[0].type.dtype, list(op.attrs.epilogue)
    if dtype not in (INT8, UINT8) or not is_float(to):
        return None
    last = ["Cast"] if to != FP32 else []
    kinds = ["Cast", *(["Sub"] if len(stages) == 3 + len(last) else []), "Mul", *last]
    numbers = _numbers(graph, op, kinds)
    if numbers is None or stages[0].attrs.to != FP32:
        return None
    (scale,) = numbers["Mul"]
    (zero,) = numbers.get("Sub", [0.0])
    return op.inputs[0], QuantParams(dtype.name, scale, int(zero))


def rounded_range(graph: Graph, op: Op) -> Op | None:
    """The DynamicRange of the operand of a Pointwise that only rounds this operand to uint8, by this range; None for any other op.

    Data that are never negative have the constant zero point 0: it is that of the range, too.
    """
    if op.kind != "Pointwise" or op.inputs[0] is None or op.attrs.prologue or op.outputs[0].type.dtype != UINT8:
        return None
    producers = [graph.op(v) for v in op.inputs[1:] if v is not None]
    found = next((p for p in producers if p.kind == "DynamicRange" and p.inputs[0] == op.inputs[0]), None)
    if found is None or Value(found.id, 0) not in op.inputs:
        return None
    scale, zero = op.inputs.index(Value(found.id, 0)), Value(found.id, 1)
    expected: list[tuple[str, tuple[int, ...]]] = []

    def add(kind: str, *args: int) -> int:
        expected.append((kind, args))
        return ~len(expected)

    at = add("Cast", -1) if graph.type(op.inputs[0]).dtype != FP32 else -1
    at = add("Div", at, scale)
    wide = add("Cast", op.inputs.index(zero)) if zero in op.inputs else None
    at = add("Round", at)
    at = at if wide is None else add("Add", at, wide)
    *stages, clip, last = op.attrs.epilogue
    if [(s.kind, s.args) for s in stages] != expected or (clip.kind, clip.args[:1]) != ("Clip", (at,)):
        return None
    bounds = [graph.constant_value(op.inputs[a]) for a in clip.args[1:] if a is not None and a > 0]
    whole = [float(a.reshape(-1)[0]) for a in bounds if a is not None and a.size == 1]
    return found if last.kind == "Cast" and whole == [0.0, 255.0] else None


def _numbers(graph: Graph, op: Op, kinds: Sequence[str]) -> dict[str, list[float]] | None:
    """Kind of each stage of a Pointwise -> its constant scalars; None unless its stages are a chain of these kinds, without other
    operands."""
    stages = op.attrs.epilogue
    if [s.kind for s in stages] != list(kinds) or any(s.args[0] != ~k for k, s in enumerate(stages)):
        return None
    numbers: dict[str, list[float]] = {}
    for stage in stages:
        arrays = [graph.constant_value(op.inputs[a]) if a is not None and a >= 0 else None for a in stage.args[1:]]
        if any(a is None or a.size != 1 for a in arrays):
            return None
        numbers[stage.kind] = [float(a.reshape(-1)[0]) for a in arrays if a is not None]
    return numbers


def quantizer_of(b: Builder, value: Value, *, dense: bool = False) -> Quantizer | None:
    """The op that quantizes a value; None unless there is exactly one, or if the place of its result is reserved (``dense``:
    reserved with gaps or in another order: an output of the network has neither)."""
    return _only(b, value, quantization, dense=dense)


def narrowing_of(b: Builder, value: Value, *, dense: bool = False) -> Quantizer | None:
    """The op that converts a value from fp32 to fp16, in the same way."""
    return _only(b, value, _narrowing, dense=dense)


def _narrowing(graph: Graph, op: Op) -> tuple[Value, QuantParams] | None:
    source = op.inputs[0] if op.kind == "Cast" else None
    if source is None or op.outputs[0].type.dtype != FP16 or graph.type(source).dtype != FP32:
        return None
    return source, QuantParams("float16", 1.0)


def _only(
    b: Builder, value: Value, find: Callable[[Graph, Op], tuple[Value, QuantParams] | None], *, dense: bool
) -> Quantizer | None:
    found = [(u, q) for u in b.graph.users(value) if (q := find(b.graph, u)) is not None]
    place = b.reserved.get(found[0][0].value) if len(found) == 1 else None
    if len(found) != 1 or (place is not None and not (dense and place.dense and place.offset % 16 == 0)):
        return None
    return Quantizer(found[0][0], found[0][1][1])


def meaning(
    op: Op, to: Quantizer, kept: bool, attrs: dict[str, Any] | None = None, kind: str = "", which: int = 0
) -> dict[str, Any]:
    """The attributes of a "Quantized" or "Narrowed" step (:class:`optdnn.ops.regions.QuantizedAttrs`): attributes and kind of ``op`` (or
    ``attrs`` and ``kind``), and the quantization of its result ``which``. ``kept``: the float result is stored, too."""
    own = attrs_dict(op.attrs) if attrs is None else attrs
    low, high = BOUNDS[to.to.dtype]
    return {
        "own": tuple(sorted(own)), **own, "of": kind or op.kind, "through": op.outputs[0].type.dtype,
        "factor": float(np.float32(1.0 / to.to.scale)), "low": float(low - to.to.zero), "high": float(high - to.to.zero),
        "zero": to.to.zero, "narrow": to.op.outputs[0].type.dtype, "kept": kept, "which": which,
    }  # fmt: skip
