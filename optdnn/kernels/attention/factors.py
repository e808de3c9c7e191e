"""Attention with a bias that is the sum of two factors, in one launch: the bias is never stored (relative positions of images, Li
et al., 2022).

In image transformers such as SAM, the bias of query q and key (row, column) is ``rows[q, row] + columns[q, column]``. The sum has
an element for each pair of positions. The factors have one for each pair of a query and a row or column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.attention import hopper_kernel as attention
from optdnn.kernels.attention.hopper import HopperAttention
from optdnn.kernels.attention.operands import is_used, target_of
from optdnn.kernels.attention.problem import Factors, Problem
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.pointwise.pointwise import copy
from optdnn.kernels.tactic import Region
from optdnn.ops.attention import LENGTHS, SINKS
from optdnn.ops.fused import plain_attrs

_RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})


@dataclass(frozen=True)
class _Bias:
    """A bias as ``rows`` (N, query rows, query columns, key rows, 1) plus ``columns`` (N, query rows, query columns, 1, key columns).
    ``add``: the operator of the sum. ``ops``: the operators from the sum to the mask."""

    rows: Value
    columns: Value
    add: Op
    ops: tuple[Op, ...]


def _bias(graph: Graph, op: Op) -> _Bias | str:
    """The bias of an attention as a sum of two factors, or why it is not such a sum."""
    value, ops = op.input(3), list[Op]()
    if value is None:
        return "it has no mask"
    while (
        (source := graph.op(value)).kind in _RESHAPES
        and graph.sole_user(value) is not None
        and source.inputs[0] is not None
    ):
        ops.append(source)
        value = source.inputs[0]
    if source.kind != "Add" or graph.sole_user(value) is None:
        return "its mask is not a sum, or has other readers"
    batch, heads, queries, keys = op.outputs[0].type.static_shape[:3] + graph.type(op.inputs[1]).static_shape[2:3]  # type: ignore[arg-type]
    shape = source.outputs[0].type.static_shape
    if len(shape) != 5 or (shape[0], shape[1] * shape[2], shape[3] * shape[4]) != (batch * heads, queries, keys):
        return "its mask is not a sum over rows and columns of queries and keys"
    for rows, columns in (source.inputs, source.inputs[::-1]):
        if rows is None or columns is None:
            continue
        if graph.type(rows).shape == (*shape[:4], 1) and graph.type(columns).shape == (*shape[:3], 1, shape[4]):
            return _Bias(rows, columns, source, (source, *reversed(ops)))
    return "its mask is not the sum of a factor of rows and a factor of columns"


class FactoredAttention(HopperAttention):
    """Attention on Hopper's fused kernel. The kernel reads both factors of the bias."""

    name = "attention_factors_sm90"

    def refuse(self, b: Builder, op: Op) -> str | None:
        found = _bias(b.graph, op)
        if isinstance(found, str):
            return found
        if any(op.input(slot) is not None for slot in (4, 5, LENGTHS)) or any(is_used(b, op, port) for port in (1, 2)):
            return "its keys have a past or lengths, or its keys or values are results"
        if op.input(SINKS) is not None:
            return "its softmax has sinks"
        if self._quantizer(b, op) is not None:
            return "its result is stored in 8 bits"
        if any(x.strides[axis] != 1 or x.offset % 2 for x, axis in zip(self._places(b, found), (3, 4), strict=True)):
            return "the factors' last axes are not contiguous, or begin at odd elements"
        if (why := super().refuse(b, _bare(op))) is not None:
            return why
        problem = self.problem(b, op)
        return self.plans.refuse(problem, attention.Config(1, 16, 1)) or (
            None if self.offers(problem, b.gpu) else "no tile of the kernel fits it"
        )

    @staticmethod
    def _places(b: Builder, found: _Bias) -> tuple[TensorView, TensorView]:
        return b.operand(found.rows), b.operand(found.columns)

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The sum, the views after it, and the readers of the result."""
        found = _bias(graph, op)
        return [*super().neighbors(graph, op), *(() if isinstance(found, str) else found.ops)]

    def region(self, b: Builder, op: Op) -> Region:
        """The attention, and the sum before it."""
        found = _bias(b.graph, op)
        assert isinstance(found, _Bias)
        return Region(op, before=(found.add,))

    def place(self, b: Builder, op: Op) -> None:
        """Place the result in the order that its reader wants."""
        target_of(b, op)

    def problem(self, b: Builder, op: Op) -> Problem:
        found = _bias(b.graph, op)
        assert isinstance(found, _Bias)
        rows, columns = self._places(b, found)
        factors = Factors(_strides(rows, op), _strides(columns, op), columns.shape[4], rows.shape[2])
        return replace(self._tensors(b, _bare(op)).problem, factors=factors)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        found = _bias(b.graph, op)
        assert isinstance(found, _Bias)
        t = self._tensors(b, _bare(op))
        q, k, v, out = b.made(t.q), b.made(t.k), b.made(t.v), b.made(t.out)
        rows, columns = self._places(b, found)
        operands = {"q": q, "k": k, "v": v, "out": out, "rows": rows, "columns": columns}
        reads = [q, k, v, _by_head(rows, op, 3), _by_head(columns, op, 4)]
        made = self.plans.launch(self.problem(b, op), config, b.gpu)
        attrs = plain_attrs(op.definition, replace(op.attrs, softmax_precision=None))
        covers = replace(op, src=op.src | found.add.src)
        b.emit(covers, made, operands, "FactoredAttention", attrs, reads, [out])
        if t.out is not t.target:
            copy(b, op, out, t.target)


def _bare(op: Op) -> Op:
    """The attention without its mask."""
    return replace(op, inputs=(*op.inputs[:3], None, *op.inputs[4:]))


def _strides(x: TensorView, op: Op) -> tuple[int, int, int, int]:
    """Strides of (batch, head, row of the query, column of the query); 0 along axes of one element."""
    first, *others = (s if n > 1 else 0 for n, s in zip(x.shape[:3], x.strides[:3], strict=True))
    return (first * op.outputs[0].type.static_shape[1], first, others[0], others[1])


def _by_head(x: TensorView, op: Op, axis: int) -> TensorView:
    """A factor as (batch, head, query rows, query columns, keys along ``axis``)."""
    shape = (*op.outputs[0].type.static_shape[:2], *x.shape[1:3], x.shape[axis])
    return x.view(shape, (x.strides[0] * shape[1], *x.strides[:3], x.strides[axis]))
