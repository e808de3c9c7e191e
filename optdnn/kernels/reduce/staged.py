"""A reduction and the pointwise operator before it in one launch: the elements are computed, and never stored.

On an H200, distances of 4,096 and 1,024 points take 23 us instead of 82, sums over columns 7.7 us instead of 14, and 16,384 dot
products of 768 elements 15.6 us (30.7 us with one element per load).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.layout.views import ints
from optdnn.kernels.pointwise.before import moved, pointwise_before, stages_of
from optdnn.kernels.pointwise.expressions import arithmetic, body
from optdnn.kernels.pointwise.strides import STRIDES_LIMIT, broadcast
from optdnn.kernels.reduce.grid import space_of
from optdnn.kernels.reduce.parts import best_parts
from optdnn.kernels.reduce.reduce import POOLS, Reduction, Source, emit_reduce
from optdnn.kernels.tactic import TakesBefore
from optdnn.ops.fused import plain_stages
from optdnn.ops.reduce import reduced_axes
from optdnn.types import TensorType

MOST_TENSORS = 6
"""Most tensors that the stages read: a thread holds elements of all of them."""


class StagedReduction(TakesBefore, Reduction):
    """Every ONNX reduction, and pools over all positions. ReduceLogSumExp computes its elements twice."""

    name = "reduce_staged"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := super().refuse(b, op)) is not None:
            return why
        before = pointwise_before(b, op, floats=False)
        if isinstance(before, str):
            return before
        if not (axes := self._axes(b, op)):
            return "it reduces nothing"
        tensors = self._tensors(b, before, before.outputs[0].type.static_shape)
        if len(tensors) > MOST_TENSORS:
            return f"its operand is computed from {len(tensors)} tensors; {MOST_TENSORS} are the most"
        space = space_of(list(tensors.values()), axes, b.result(op.value))
        if max(len(space.dims), len(space.inner)) > STRIDES_LIMIT:
            return "its axes cannot be merged"
        return None if best_parts(space.grid, b.gpu) == 1 else "several blocks would share the terms of an output"

    def seconds(self, b: Builder, op: Op) -> float | None:
        return None

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        (before,) = self.neighbors(b.graph, op)
        axes = self._axes(b, op)
        t, tensors = before.outputs[0].type, self._tensors(b, before, before.outputs[0].type.static_shape)
        stages = stages_of(before)
        operands = [None if v is None else b.operand(v) for v in before.inputs]
        types = [TensorType(t.dtype, ()) if p is None else TensorType(p.dtype, p.shape) for p in operands]
        lines, result, dtype = body(stages, types)
        known = [f"const {arithmetic(x.dtype)} v{slot} = x{k};" for k, (slot, x) in enumerate(tensors.items())]
        value = " ".join([*known, *lines, f"const {arithmetic(dtype)} v = {result};"])
        named: list[TensorView] = []
        attrs: dict[str, Any] = {"epilogue": ()}
        if op.kind not in POOLS:
            named.append(b.constant(np.array(axes, np.int64), "axes"))
            attrs |= {"keepdims": op.attrs.keepdims, "noop_with_empty_axes": False}
        attrs |= {"prologue": plain_stages(moved(stages, len(named))), "arity": 1 + len(named)}
        source = Source(list(tensors.values()), arithmetic(dtype), value)
        reads = [operands[0], *named, *operands[1:]]
        covers = replace(op, src=op.src | before.src)
        emit_reduce(
            b,
            covers,
            POOLS.get(op.kind, op.kind),
            source,
            axes,
            b.target(op.value),
            kind=op.kind,
            attrs=attrs,
            reads=reads,
        )

    @staticmethod
    def _axes(b: Builder, op: Op) -> tuple[int, ...]:
        rank = len(b.graph.type(op.inputs[0]).dims) if op.inputs[0] is not None else 0
        if op.kind in POOLS:
            return tuple(range(2, rank))
        return tuple(reduced_axes(op.attrs, ints(b, op, 1), rank, op.kind))

    @staticmethod
    def _tensors(b: Builder, before: Op, shape: Sequence[int]) -> dict[int, TensorView]:
        """The operands of the stages by slot, in the shape of their result; the largest in memory first."""
        views = {slot: b.operand(v) for slot, v in enumerate(before.inputs) if v is not None}
        slots = sorted(views, key=lambda slot: -math.prod(views[slot].shape))
        return {slot: views[slot].view(tuple(shape), broadcast(views[slot], shape)) for slot in slots}
