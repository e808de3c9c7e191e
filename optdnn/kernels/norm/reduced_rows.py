"""A reduction of short rows, and a pointwise operator on these rows and what they were reduced to, in one launch.

Global response norms (ConvNeXt V2: Woo et al., 2023) divide the norms of channels by their mean. The launch is emitted at the
pointwise operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder
from optdnn.kernels.layout.views import ints
from optdnn.kernels.norm.rows import THREADS, Statistic, emit_rows
from optdnn.kernels.pointwise.elementwise import Elementwise
from optdnn.kernels.pointwise.pointwise import arithmetic, body
from optdnn.kernels.pointwise.strides import broadcast
from optdnn.kernels.reduce.reduce import RULES
from optdnn.kernels.tactic import Region, Tactic
from optdnn.ops.fused import plain_stages
from optdnn.ops.reduce import reduced_axes
from optdnn.types import is_float

KINDS = ("ReduceMean", "ReduceSum", "ReduceMax")
LONGEST, MOST = 16 * THREADS, 1 << 16
"""Elements of a row, and of all rows, up to which a launch is most of the time."""
SHARED = 64
"""Elements of a row up to which several share a block. All rows together are few, and a warp would wait for ten loads of a row of 320."""


@dataclass(frozen=True)
class _Found:
    """The reduction whose result is operand ``slot`` of a pointwise operator, and the rows, which are operand ``row``."""

    reduce: Op
    slot: int
    row: int


def _found(graph: Graph, op: Op) -> _Found | None:
    for slot, value in enumerate(op.inputs):
        reduce = None if value is None else graph.op(value)
        if reduce is None or value is None or reduce.kind not in KINDS or graph.sole_user(value) is None:
            continue
        if op.inputs.count(value) == 1 and reduce.inputs[0] in op.inputs:
            return _Found(reduce, slot, op.inputs.index(reduce.inputs[0]))
    return None


class ReducedRows(Tactic):
    """A mean, sum or maximum of rows, and the pointwise operator that alone reads it, beside the rows."""

    name = "rows_reduced"

    def refuse(self, b: Builder, op: Op) -> str | None:
        found, t = _found(b.graph, op), op.outputs[0].type
        if found is None:
            return "it reads no reduction, which only it reads, beside the rows that are reduced"
        x, axes = found.reduce.inputs[0], self._axes(b, found.reduce)
        if not found.reduce.attrs.keepdims or not axes:
            return "what is reduced has fewer axes than the rows"
        if x is None or b.graph.type(x).static_shape != t.static_shape or not is_float(t.dtype):
            return "its result is not of the rows' shape"
        length, count = math.prod(t.static_shape[k] for k in axes), math.prod(t.static_shape)
        if not 0 < length <= LONGEST or count > MOST:
            return f"rows of {length} elements, {count} in all, are long or many"
        return Elementwise().refuse(b, op)

    @staticmethod
    def _axes(b: Builder, reduce: Op) -> tuple[int, ...]:
        rank = len(reduce.outputs[0].type.static_shape)
        return tuple(reduced_axes(reduce.attrs, ints(b, reduce, 1), rank, reduce.kind))

    def neighbours(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The reduction before it."""
        found = _found(graph, op)
        return [] if found is None else [found.reduce]

    def region(self, b: Builder, op: Op) -> Region:
        """The operator, and the reduction before it."""
        return Region(op, before=tuple(self.neighbours(b.graph, op)))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        found = _found(b.graph, op)
        assert found is not None
        reduce, stages, axes = found.reduce, list(op.attrs.epilogue), self._axes(b, found.reduce)
        out, x = b.target(op.value), b.operand(reduce.inputs[0])
        others = [k for k, v in enumerate(op.inputs) if v is not None and k not in (found.slot, found.row)]
        given = {k: b.operand(op.inputs[k]) for k in others}
        extras = [p.view(out.shape, broadcast(p, out.shape)) for p in given.values()]
        types = [b.graph.type(Value(op.id, 0) if v is None else v) for v in op.inputs]
        lines, result, _ = body(stages, types)
        t = arithmetic(x.dtype)
        names = [f"const {t} v{found.row} = v; const {t} v{found.slot} = t0;"]
        names += [f"const {arithmetic(p.dtype)} v{k} = e{i};" for i, (k, p) in enumerate(given.items())]
        start, term, combine, total = RULES[reduce.kind]
        statistic = Statistic(start, term, combine, total.replace("total", "s"))
        reads = [None if k == found.slot else x if k == found.row else given.get(k) for k in range(len(op.inputs))]
        attrs = {
            "reduce": reduce.kind,
            "axes": axes,
            "row": found.row,
            "slot": found.slot,
            "after": plain_stages(stages),
        }
        emit_rows(
            b, replace(op, src=op.src | reduce.src), x, axes, out, [statistic], result, extras,
            kind="ReducedRows", attrs=attrs, reads=reads, writes=out, before=" ".join([*names, *lines]),
            shared=SHARED,
        )  # fmt: skip
