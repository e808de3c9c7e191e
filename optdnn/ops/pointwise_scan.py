"""PointwiseScan: a recurrence of pointwise steps. Each reads one position of every sequence and the states of the previous step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.base import Attrs, Call, Cost, Result, Stage
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Export
from optdnn.ops.fused import export_registers, stage_calls, stages_flops
from optdnn.types import Array, Shape, TensorType


@dataclass(frozen=True)
class PointwiseScanAttrs(Attrs):
    """``steps`` repetitions of the same ``stages``.

    Operands are of three groups: initial states, sequences, and others. A stage reads an operand slot: for a state,
    its present value; for a sequence, position ``starts[k] + t`` along ``axes[k]`` at step ``t`` (``starts[k] - t`` if the scan
    goes ``backward``); any other operand unchanged. Register 0 is operand 0. ``views[k]``: the axes of a position as axes of the
    sequence, in their order; -1: an axis of size 1.

    ``following``: the next states, named like the operands and registers of stages. ``results``: the values that are stacked along
    ``result_axes``; an axis is new unless ``result_kept``. A backward scan stacks its first step last.
    """

    stages: tuple[Stage, ...]
    states: int
    steps: int
    axes: tuple[int, ...]
    starts: tuple[int, ...]
    views: tuple[tuple[int, ...], ...]
    following: tuple[int, ...]
    results: tuple[int, ...]
    result_axes: tuple[int, ...]
    result_kept: tuple[bool, ...]
    backward: bool = False


def stacked_shape(part: Shape, axis: int, kept: bool, steps: int) -> Shape:
    """The shape of a result stacked over all steps."""
    return (*part[:axis], steps, *part[axis + kept :])


def step_types(attrs: Any, types: Sequence[TensorType | None]) -> list[TensorType]:
    """The types of the operands as a step reads them. Raises ShapeError for a position that a sequence does not have."""
    found: list[TensorType] = []
    for k, t in enumerate(types):
        if t is None or t.shape is None:
            raise ShapeError(f"PointwiseScan needs operand {k}, of known rank")
        at = k - attrs.states
        if not 0 <= at < len(attrs.axes):
            found.append(t)
            continue
        axis, start = attrs.axes[at], attrs.starts[at]
        end = start + (attrs.steps - 1) * (-1 if attrs.backward else 1)
        size = t.shape[axis] if axis < len(t.shape) else None
        if not isinstance(size, int) or not 0 <= min(start, end) <= max(start, end) < size:
            raise ShapeError(f"PointwiseScan reads positions {start} to {end} along axis {axis} of {t}")
        found.append(TensorType(t.dtype, tuple(1 if i < 0 else t.shape[i] for i in attrs.views[at])))
    return found


def _infer(call: Call) -> Result:
    a = call.attrs
    given = step_types(a, call.types)
    registers = [given[0], *(result.types[0] for _, result in stage_calls(a.stages, given[0], given))]

    def named(arg: int) -> TensorType:
        return registers[~arg] if arg < 0 else given[arg]

    for k, arg in enumerate(a.following):
        if not named(arg).agrees(given[k]):
            raise ShapeError(f"state {k} of a PointwiseScan begins as {given[k]} and becomes {named(arg)}")
    types = []
    for arg, axis, kept in zip(a.results, a.result_axes, a.result_kept, strict=True):
        t = named(arg)
        if kept and t.dims[axis] != 1:
            raise ShapeError(f"a result of a PointwiseScan, {t}, has more than one position along axis {axis}")
        types.append(TensorType(t.dtype, stacked_shape(t.dims, axis, kept, a.steps)))
    return Result(tuple(types))


def _cost(call: Call, result: Result) -> Cost:
    given = step_types(call.attrs, call.types)
    return Cost(call.attrs.steps * stages_flops(call.attrs.stages, given[0], given))


def _export(attrs: Any, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """The steps, unrolled."""

    def integers(*values: int) -> Array:
        return np.array(values, np.int64)

    given = step_types(attrs, [e.type(name) for name in inputs])
    count, states = len(attrs.axes), list(inputs[: attrs.states])
    rows: list[list[str]] = [[] for _ in attrs.results]
    for t in range(attrs.steps):
        positions: list[str] = []
        for k, name in enumerate(inputs[attrs.states : attrs.states + count]):
            at = attrs.starts[k] + (-t if attrs.backward else t)
            (part,) = e.node("Gather", [name, e.const(np.array(at, np.int64))], 1, axis=attrs.axes[k])
            ones = [i for i, axis in enumerate(attrs.views[k]) if axis < 0]
            positions += e.node("Unsqueeze", [part, e.const(integers(*ones))], 1) if ones else [part]
            e.declare(positions[-1], given[attrs.states + k])
        operands = [*states, *positions, *inputs[attrs.states + count :]]
        registers = export_registers(attrs.stages, operands[0], given[0], operands, e)

        def named(arg: int, registers: Sequence[str] = registers, operands: Sequence[str] = operands) -> str:
            return registers[~arg] if arg < 0 else operands[arg]

        states = [named(arg) for arg in attrs.following]
        for row, arg, axis, kept in zip(rows, attrs.results, attrs.result_axes, attrs.result_kept, strict=True):
            name = named(arg)
            row += [name] if kept else e.node("Unsqueeze", [name, e.const(integers(axis))], 1)
    if attrs.backward:
        rows = [row[::-1] for row in rows]
    return [e.node("Concat", row, 1, axis=axis)[0] for row, axis in zip(rows, attrs.result_axes, strict=True)]


DEFS: tuple[OpDef, ...] = (OpDef("PointwiseScan", _infer, PointwiseScanAttrs, {}, _export, cost=_cost),)
