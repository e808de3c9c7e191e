"""QuantizeLinear and DequantizeLinear as stages of a Pointwise, together with the pointwise op between them.

The arithmetic is theirs: fp32, rounded once a stage.
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
from optdnn.passes.base import Match, Miss, PassContext, Rewrite
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import DTYPES, FP32, NARROW_INTEGERS, Array, DType, is_float

FP8_LARGEST = {DTYPES["fp8_e4m3"]: 448.0, DTYPES["fp8_e5m2"]: 57344.0}
"""Largest finite value."""


class _Dag:
    """Stages and their operands under construction; operand slot 0 is register 0."""

    def __init__(self, patch: Patch):
        self.patch = patch
        self.operands: list[Value] = []
        self.stages: list[Stage] = []

    def slot(self, value: Value) -> int:
        """The argument that names an operand."""
        if value not in self.operands:
            self.operands.append(value)
        at = self.operands.index(value)
        return at if at else -1

    def add(self, stage: Stage) -> int:
        """The register of a stage's result."""
        self.stages.append(stage)
        return ~len(self.stages)

    def constant(self, array: Array) -> int:
        return self.slot(self.patch.constant(array))

    def wide(self, value: Value) -> int:
        """A value in fp32."""
        at = self.slot(value)
        return at if self.patch.type(value).dtype == FP32 else self.add(Stage("Cast", (at,), CastAttrs(FP32)))

    def dequantize(self, graph: Graph, op: Op) -> int:
        """DequantizeLinear: ``(x - zero) * scale`` in fp32."""
        stored, (scale, zero) = op.inputs[0], parameters(graph, op)
        assert stored is not None
        at = self.wide(stored)
        if zero.any():
            at = self.add(Stage("Sub", (at, self.constant(zero))))
        return self.add(Stage("Mul", (at, self.constant(scale))))

    def quantize(self, graph: Graph, op: Op, at: int) -> None:
        """QuantizeLinear: ``saturate(round(x / scale) + zero)`` in fp32."""
        scale, zero = parameters(graph, op)
        at = self.add(Stage("Div", (at, self.constant(scale))))
        if is_float(op.attrs.output_dtype):  # the cast rounds
            bounds = [-FP8_LARGEST[op.attrs.output_dtype], FP8_LARGEST[op.attrs.output_dtype]]
        else:
            at = self.add(Stage("Round", (at,)))
            if zero.any():
                at = self.add(Stage("Add", (at, self.constant(zero))))
            info = np.iinfo(op.attrs.output_dtype)
            bounds = [info.min, info.max]
        low, high = (self.constant(np.array(b, np.float32)) for b in bounds)
        self.add(Stage("Cast", (self.add(Stage("Clip", (at, low, high))),), CastAttrs(op.attrs.output_dtype)))


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


def _plain(graph: Graph, op: Op) -> str | None:
    """Why a Q or DQ cannot be stages."""
    if any(v is not None and graph.constant_value(v) is None for v in op.inputs[1:]):
        return "its scale or zero point is not constant"
    if op.attrs.block_size:
        return "it has a scale per block"
    integer: DType = op.outputs[0].type.dtype if op.kind == "QuantizeLinear" else graph.type(op.inputs[0]).dtype  # type: ignore[arg-type]
    if (is_float(integer) and integer not in FP8_LARGEST) or integer.itemsize > 2 or integer in NARROW_INTEGERS:
        return f"it is of {integer.name}"
    if is_float(integer) and op.kind == "QuantizeLinear" and not op.attrs.saturate:
        return "it does not saturate"
    precision = op.attrs.precision if op.kind == "QuantizeLinear" else op.attrs.output_dtype
    if precision is not None and precision.itemsize > 4:
        return "it is computed in double precision"
    return None if op.outputs[0].type.is_static else "its size is not fixed"


def _between(graph: Graph, op: Op) -> Op | None:
    """The pointwise op of floats whose result a QuantizeLinear alone reads."""
    assert op.inputs[0] is not None
    made = graph.op(op.inputs[0])
    if made.kind in STRUCTURAL or made.kind in ("Identity", "Cast") or len(made.outputs) != 1:
        return None
    pointwise = made.kind == "Pointwise" or made.definition.traits.pointwise
    return made if pointwise and graph.sole_user(made.value) == op else None


class QuantizeStages(Rewrite):
    """A QuantizeLinear with the pointwise op before it and the DequantizeLinears before that; or alone."""

    name = "quantize_stages"
    kinds = frozenset({"QuantizeLinear"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        reason = _plain(graph, op)
        if reason is not None:
            return Miss(f"{op.kind} stays: {reason}")
        middle = _between(graph, op)
        return Match((op, *([middle] if middle else [])), lambda patch: self._build(graph, op, middle, patch))

    @staticmethod
    def _build(graph: Graph, op: Op, middle: Op | None, patch: Patch) -> Value:
        dag = _Dag(patch)
        assert op.inputs[0] is not None
        if middle is None:
            at = _entering(graph, dag, op.inputs[0])
        else:
            given = [None if v is None else _entering(graph, dag, v) for v in middle.inputs]
            stages: Sequence[Stage] = middle.attrs.epilogue if middle.kind == "Pointwise" else _single(middle)
            types = [None if v is None else graph.type(v) for v in middle.inputs]
            assert types[0] is not None
            registers = [given[0]]
            for stage, (call, _) in zip(stages, stage_calls(stages, types[0], types), strict=True):
                args = tuple(None if a is None else registers[~a] if a < 0 else given[a] for a in stage.args)
                registers.append(_copied(dag, replace(stage, args=args), call))
            last = registers[-1]
            assert last is not None
            at = last
        dag.quantize(graph, op, at)
        return patch.add("Pointwise", dag.operands, PointwiseAttrs(epilogue=tuple(dag.stages)), name=op.outputs[0].name)


class DequantizeStages(Rewrite):
    """A DequantizeLinear that nothing else took: after all other rules."""

    name = "dequantize_stages"
    kinds = frozenset({"DequantizeLinear"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        reason = _plain(graph, op)
        if reason is not None:
            return Miss(f"{op.kind} stays: {reason}")
        if graph.constant_value(op.inputs[0]) is not None:
            return Match((op,), lambda patch: patch.constant(_evaluated(graph, op), op.outputs[0].name))
        return Match((op,), lambda patch: self._build(graph, op, patch))

    @staticmethod
    def _build(graph: Graph, op: Op, patch: Patch) -> Value:
        dag = _Dag(patch)
        at = dag.dequantize(graph, op)
        if op.outputs[0].type.dtype != FP32:
            dag.add(Stage("Cast", (at,), CastAttrs(op.outputs[0].type.dtype)))
        return patch.add("Pointwise", dag.operands, PointwiseAttrs(epilogue=tuple(dag.stages)), name=op.outputs[0].name)


def _evaluated(graph: Graph, op: Op) -> Array:
    """The floats of dequantized constants: weights of an operator that stays one of floats."""
    operands = [graph.constant_value(v) for v in op.inputs]
    (found,) = run_kernel(op.kind, operands, plain_attrs(op.definition, op.attrs), [op.outputs[0].type.dtype])
    return found


def _single(op: Op) -> list[Stage]:
    args = tuple(-1 if i == 0 else None if v is None else i for i, v in enumerate(op.inputs))
    return [Stage(op.kind, args, op.attrs)]


def _copied(dag: _Dag, stage: Stage, call: Call) -> int:
    """The register of a stage whose float operands are fp32 here; its result is fp32, too, where it is a float.

    ``call`` is its inference with the types of the graph. A Cast of floats to fp16 still rounds them.
    """
    cast = stage.attrs
    if not isinstance(cast, CastAttrs) or not is_float(cast.to) or cast.to == FP32:
        return dag.add(stage)
    if is_float(call.type(0).dtype):
        return dag.add(Stage("Cast", (dag.add(stage),), CastAttrs(FP32)))
    return dag.add(replace(stage, attrs=CastAttrs(FP32)))


def _entering(graph: Graph, dag: _Dag, value: Value) -> int:
    """An operand in fp32, from its integers where it is dequantized; what is no float stays as it is."""
    op = graph.op(value)
    if op.kind == "DequantizeLinear" and _plain(graph, op) is None and graph.constant_value(op.inputs[0]) is None:
        return dag.dequantize(graph, op)
    return dag.wide(value) if is_float(graph.type(value).dtype) else dag.slot(value)
