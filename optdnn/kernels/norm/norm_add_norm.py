"""Rows that are normalized, added to other rows and normalized again, in one launch: the sandwich norms of Gemma 2 and GLM-4.

The launch is emitted at the addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.kernels.norm.add_norm import AddNorm, norm_of
from optdnn.kernels.norm.norm_add import normalized_operand, of_another_launch
from optdnn.kernels.norm.rows_once import OPERATIONS, RowsOnce, parameters
from optdnn.kernels.tactic import Region
from optdnn.ops.norm_regions import HeldNormAttrs, NormAddNormAttrs

_ROWS = RowsOnce()


class NormAddNorm(AddNorm):
    """LayerNorm or RMSNorm of rows, Add of a tensor of the same shape, then LayerNorm or RMSNorm of the sum."""

    name = "norm_add_norm"

    def refuse(self, b: Builder, op: Op) -> str | None:
        found = normalized_operand(b.graph, op)
        if found is None:
            return "it is not the only reader of a normalization of rows"
        first, _ = found
        if (why := of_another_launch(b.graph, first)) is not None:
            return why
        if b.graph.type(first.value) != op.outputs[0].type:
            return "the normalized rows are repeated"
        if (why := _ROWS.refuse_rows(b, first)) is not None:
            return f"the normalization before it: {why}"
        return super().refuse(b, op)

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The normalization before it, and the readers of the sum."""
        found = normalized_operand(graph, op)
        return [*([] if found is None else found[:1]), *super().neighbors(graph, op)]

    def region(self, b: Builder, op: Op) -> Region:
        """The addition, and the normalizations before and after it."""
        return replace(super().region(b, op), before=(self._first(b, op),))

    @staticmethod
    def _first(b: Builder, op: Op) -> Op:
        found = normalized_operand(b.graph, op)
        assert found is not None
        return found[0]

    @staticmethod
    def _operands(b: Builder, op: Op) -> tuple[Value, Value, int] | None:
        """The rows that are normalized first, and their addend."""
        found = normalized_operand(b.graph, op)
        if found is None or found[0].inputs[0] is None:
            return None
        return found[0].inputs[0], found[1], 0

    def problem(self, b: Builder, op: Op) -> rows.Problem:
        first = self._first(b, op)
        scale, bias = (first.input(k) is not None for k in (1, 2))
        norm = rows.FirstNorm(OPERATIONS[first.kind], scale, bias, first.attrs.epsilon)
        return replace(super().problem(b, op), first=norm)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        first, norm, (x, other) = self._first(b, op), norm_of(b, op), self.sources(b, op)
        assert norm is not None
        operands: dict[str, TensorView] = {
            "input": x, "addend": other, "sum": b.target(op.value), "output": b.target(norm.value),
        }  # fmt: skip
        names = ("scale", "bias", "first_scale", "first_bias")
        operands |= parameters(b, norm, names[:2]) | parameters(b, first, names[2:])
        covers = replace(op, src=op.src | norm.src | first.src)
        attrs = NormAddNormAttrs(norm.kind, norm.attrs, HeldNormAttrs(first.kind, first.attrs)).plain()
        reads = [x, other, *(operands.get(name) for name in names)]
        writes = [operands["sum"], operands["output"]]
        b.emit(covers, self.launch(b, op, config), operands, "NormAddNorm", attrs, reads, writes)
