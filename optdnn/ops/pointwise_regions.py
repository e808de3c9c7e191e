"""Regions of a lowered program around pointwise operators: several in one launch, and one that gathers its operands."""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.errors import ShapeError
from optdnn.ops.base import Attrs, Call, Cost, Result, Stage
from optdnn.ops.checks import agree, require_rank
from optdnn.ops.definition import OpDef
from optdnn.ops.fused import infer_stages, stages_flops
from optdnn.ops.held import region
from optdnn.types import TensorType


@dataclass(frozen=True)
class JointPointwiseAttrs(Attrs):
    """Chains of pointwise stages with one result each. Chain k reads the next ``counts[k]`` operands. Its stages number them from
    0, and its register 0 is the first of them."""

    counts: tuple[int, ...]
    stages: tuple[tuple[Stage, ...], ...]


def _infer_joint_pointwise(call: Call) -> Result:
    a: JointPointwiseAttrs = call.attrs
    agree(len(a.counts), len(a.stages), "JointPointwise: chains of stages")
    agree(sum(a.counts), len(call.types), "JointPointwise: operands of its chains")
    types, begin = list[TensorType](), 0
    for count, chain in zip(a.counts, a.stages, strict=True):
        if count < 1:
            raise ShapeError("JointPointwise has a chain without operands")
        own = call.types[begin : begin + count]
        types.append(infer_stages(chain, call.type(begin), own))
        begin += count
    return Result(tuple(types))


def _cost_joint_pointwise(call: Call, result: Result) -> Cost:
    a: JointPointwiseAttrs = call.attrs
    flops, begin = 0.0, 0
    for count, chain in zip(a.counts, a.stages, strict=True):
        flops += stages_flops(chain, call.type(begin), call.types[begin : begin + count])
        begin += count
    return Cost(flops)


@dataclass(frozen=True)
class PointwiseOfRowsAttrs(Attrs):
    """Stages of operands. Those at the slots ``rows`` are tables: their rows are read by the indices that follow the operands."""

    rows: tuple[int, ...]
    stages: tuple[Stage, ...]


def _of_rows(call: Call) -> list[TensorType | None]:
    """The types of the operands, with the gathered rows in the place of tables."""
    a: PointwiseOfRowsAttrs = call.attrs
    own = list(call.types[: len(call.types) - len(a.rows)])
    if not a.rows or max(a.rows) >= len(own):
        raise ShapeError(f"PointwiseOfRows of {len(own)} operands has tables at {a.rows}")
    for k, slot in enumerate(a.rows):
        table, index = call.type(slot), call.type(len(own) + k)
        require_rank(table, 2, "PointwiseOfRows table")
        own[slot] = table.with_shape((*index.dims, table.dims[1]))
    return own


def _infer_pointwise_of_rows(call: Call) -> Result:
    own = _of_rows(call)
    if own[0] is None:
        raise ShapeError("PointwiseOfRows has no operand 0")
    return Result((infer_stages(call.attrs.stages, own[0], own),))


def _cost_pointwise_of_rows(call: Call, result: Result) -> Cost:
    own = _of_rows(call)
    return Cost(stages_flops(call.attrs.stages, own[0], own) if own[0] is not None else 0.0)


DEFS: tuple[OpDef, ...] = (
    region("JointPointwise", _infer_joint_pointwise, JointPointwiseAttrs, cost=_cost_joint_pointwise),
    region("PointwiseOfRows", _infer_pointwise_of_rows, PointwiseOfRowsAttrs, cost=_cost_pointwise_of_rows),
)
