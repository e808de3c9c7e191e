"""QuantizeLinear and DequantizeLinear (Q and DQ) become stages of a Pointwise, together with the pointwise op between them.

The stages compute exactly as these operators do: in fp32, rounded once per stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import Call, Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.fused import PointwiseAttrs, plain_attrs, stage_calls
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import operand, producer
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import DTYPES, FP32, NARROW_INTEGERS, Array, DType, is_float

FP8_LARGEST = {DTYPES["fp8_e4m3"]: 448.0, DTYPES["fp8_e5m2"]: 57344.0}
"""Type -> its largest finite number."""


class _Body:
    """The stages of a Pointwise under construction, and their operands. Operand slot 0 is register 0."""

    def __init__(self, graph: Graph, patch: Patch):
        self.graph, self.patch = graph, patch
        self.operands: list[Value] = []
        self.stages: list[Stage] = []

    def slot(self, value: Value) -> int:
        """The stage argument of an operand, which is added if it is new."""
        if value not in self.operands:
            self.operands.append(value)
        at = self.operands.index(value)
        return at if at else -1

    def add(self, stage: Stage) -> int:
        """Add a stage; returns the register of its result."""
        self.stages.append(stage)
        return ~len(self.stages)

    def constant(self, array: Array) -> int:
        return self.slot(self.patch.constant(array))

    def wide(self, value: Value) -> int:
        """The register of a value in fp32."""
        at = self.slot(value)
        return at if self.patch.type(value).dtype == FP32 else self.add(Stage("Cast", (at,), CastAttrs(FP32)))

    def entering(self, value: Value) -> int:
        """The register of an operand in fp32. Dequantized operands are read as integers. Other types than floats stay."""
        op = producer(self.graph, value, {"DequantizeLinear"})
        if op is not None and _refuse(self.graph, op) is None and self.graph.constant_value(op.inputs[0]) is None:
            return self.dequantize(op)
        return self.wide(value) if is_float(self.graph.type(value).dtype) else self.slot(value)

    def dequantize(self, op: Op) -> int:
        """Add the stages of a DequantizeLinear, ``(x - zero) * scale`` in fp32; returns the register of the result."""
        at, zero = self.wide(operand(op)), self.parameter(op, 2)
        if zero is not None:
            at = self.add(Stage("Sub", (at, zero)))
        return self.add(Stage("Mul", (at, self.parameter(op, 1))))

    def parameter(self, op: Op, slot: int) -> int | None:
        """The stage argument of the scale (slot 1) or zero point (slot 2) of a Q or DQ, in fp32; None for a zero point of 0."""
        value = op.input(slot)
        if value is not None and self.graph.constant_value(value) is None:
            return self.wide(value)
        array = parameters(self.graph, op)[slot - 1]
        return self.constant(array) if slot == 1 or array.any() else None

    def copied(self, stage: Stage, call: Call) -> int:
        """Copy a stage, with its float operands and results in fp32; returns the register of its result.

        ``call`` is the stage's inference with the types of the graph. A Cast of floats to fp16 still rounds.
        """
        cast = stage.attrs
        if not isinstance(cast, CastAttrs) or not is_float(cast.to) or cast.to == FP32:
            return self.add(stage)
        if is_float(call.type(0).dtype):
            return self.add(Stage("Cast", (self.add(stage),), CastAttrs(FP32)))
        return self.add(replace(stage, attrs=CastAttrs(FP32)))

    def quantize(self, op: Op, at: int) -> None:
        """Add the stages of a QuantizeLinear of register ``at``: ``saturate(round(x / scale) + zero)`` in fp32."""
        at, zero = self.add(Stage("Div", (at, self.parameter(op, 1)))), self.parameter(op, 2)
        if is_float(op.attrs.output_dtype):  # the cast rounds
            bounds = [-FP8_LARGEST[op.attrs.output_dtype], FP8_LARGEST[op.attrs.output_dtype]]
        else:
            at = self.add(Stage("Round", (at,)))
            if zero is not None:
                at = self.add(Stage("Add", (at, zero)))
            info = np.iinfo(op.attrs.output_dtype)
            bounds = [info.min, info.max]
        low, high = (self.constant(np.array(b, np.float32)) for b in bounds)
        self.add(Stage("Cast", (self.add(Stage("Clip", (at, low, high))),), CastAttrs(op.attrs.output_dtype)))

    def pointwise(self, name: str) -> Value:
        return self.patch.add("Pointwise", self.operands, PointwiseAttrs(epilogue=tuple(self.stages)), name=name)


def parameters(graph: Graph, op: Op) -> tuple[Array, Array]:
    """Scale and zero point of a Q or DQ as fp32 arrays that broadcast against its operand."""
    rank = len(op.outputs[0].type.static_shape)
    found = []
    for slot in (1, 2):
        array = graph.constant_value(op.input(slot))
        array = np.zeros((), np.float32) if array is None else array.astype(np.float32)
        if array.size > 1:
            array = array.reshape([-1 if i == op.attrs.axis % rank else 1 for i in range(rank)])
        found.append(array.reshape(()) if array.size == 1 else array)
    return found[0], found[1]


def _refuse(graph: Graph, op: Op) -> str | None:
    """The reason why a Q or DQ cannot become stages, or None."""
    computed = [v for v in op.inputs[1:] if v is not None and graph.constant_value(v) is None]
    if any(graph.type(v).dims not in ((), (1,)) for v in computed):
        return "it has several scales or zero points, which are computed"
    if op.attrs.block_size:
        return "it has a scale per block"
    integer: DType = op.outputs[0].type.dtype if op.kind == "QuantizeLinear" else graph.type(op.inputs[0]).dtype  # type: ignore[arg-type]
    if (is_float(integer) and integer not in FP8_LARGEST) or integer.itemsize > 2 or integer in NARROW_INTEGERS:
        return f"its quantized type is {integer.name}"
    if is_float(integer) and op.kind == "QuantizeLinear" and not op.attrs.saturate:
        return "it does not saturate"
    precision = op.attrs.precision if op.kind == "QuantizeLinear" else op.attrs.output_dtype
    if precision is not None and precision.itemsize > 4:
        return "it is computed in double precision"
    return None if op.outputs[0].type.is_static else "its size is not fixed"


@rule("quantize_stages", {"QuantizeLinear"})
def quantize_stages(graph: Graph, op: Op) -> Match | Miss | None:
    """A QuantizeLinear becomes a Pointwise, together with the pointwise op before it and the DequantizeLinears of its operands."""
    reason = _refuse(graph, op)
    if reason is not None:
        return Miss(f"{op.kind} stays: {reason}")
    middle = _between(graph, op)

    def build(patch: Patch) -> Value:
        body = _Body(graph, patch)
        body.quantize(op, body.entering(operand(op)) if middle is None else _copy(body, middle))
        return body.pointwise(op.outputs[0].name)

    return Match((op, *([middle] if middle else [])), build)


def _between(graph: Graph, op: Op) -> Op | None:
    """The pointwise op before the QuantizeLinear ``op``, if its result has no other reader; else None."""
    before = graph.op(operand(op))
    if before.kind in STRUCTURAL or before.kind in ("Identity", "Cast") or len(before.outputs) != 1:
        return None
    pointwise = before.kind == "Pointwise" or before.definition.traits.pointwise
    return before if pointwise and graph.sole_user(before.value) == op else None


def _copy(body: _Body, op: Op) -> int:
    """Copy the stages of a pointwise op into ``body``; returns the register of its result."""
    given = [None if v is None else body.entering(v) for v in op.inputs]
    slots = tuple(-1 if i == 0 else None if v is None else i for i, v in enumerate(op.inputs))
    single = [Stage(op.kind, slots, op.attrs)]
    stages: Sequence[Stage] = op.attrs.epilogue if op.kind == "Pointwise" else single
    types = [None if v is None else body.graph.type(v) for v in op.inputs]
    assert types[0] is not None
    registers = [given[0]]
    for stage, (call, _) in zip(stages, stage_calls(stages, types[0], types), strict=True):
        args = tuple(None if a is None else registers[~a] if a < 0 else given[a] for a in stage.args)
        registers.append(body.copied(replace(stage, args=args), call))
    assert registers[-1] is not None
    return registers[-1]


@rule("dequantize_stages", {"DequantizeLinear"})
def dequantize_stages(graph: Graph, op: Op) -> Match | Miss | None:
    """A DequantizeLinear that no other rule has fused becomes a Pointwise, or a constant if it reads constants.

    This rule runs after all other rules."""
    constants = [graph.constant_value(v) for v in op.inputs]
    stored = all(v is None or array is not None for v, array in zip(op.inputs, constants, strict=True))
    reason = None if stored else _refuse(graph, op)
    if reason is not None:
        return Miss(f"{op.kind} stays: {reason}")
    dtype, name = op.outputs[0].type.dtype, op.outputs[0].name

    def build(patch: Patch) -> Value:
        if stored:  # weights and bias of an operator that still computes on floats
            (floats,) = run_kernel(op.kind, constants, plain_attrs(op.definition, op.attrs), [dtype])
            return patch.constant(floats, name)
        body = _Body(graph, patch)
        at = body.dequantize(op)
        if dtype != FP32:
            body.add(Stage("Cast", (at,), CastAttrs(dtype)))
        return body.pointwise(name)

    return Match((op,), build)
