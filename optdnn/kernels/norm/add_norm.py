"""An addition and the normalization of its sum in one launch, each operand read once: the residual stream of a transformer.

For additions that no product takes into its epilogue. The launch is emitted at the addition; the normalization finds its result placed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.kernels.norm.half_rows import HalfRows, emit_norm, row_problem, rows_offers
from optdnn.kernels.tactic import Offer, OwnTactic, Region, readers
from optdnn.ops.base import attrs_dict

NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
_ROWS = HalfRows()


def norm_of(b: Builder, op: Op) -> Op | None:
    """The one normalization that reads the sum."""
    found = [u for u in b.graph.users(op.value) if u.kind in NORMS and u.inputs[0] == op.value]
    return found[0] if len(found) == 1 else None


class AddNorm(OwnTactic):
    """Add of two tensors of one shape, then LayerNorm or RMSNorm of its rows, in 16-bit floats."""

    name = "add_norm_half"

    def refuse(self, b: Builder, op: Op) -> str | None:
        norm, t = norm_of(b, op), op.outputs[0].type
        if norm is None:
            return "no normalization of its own reads the sum"
        why = _ROWS.refuse_rows(b, norm)
        if why is not None:
            return f"the normalization behind it: {why}"
        if any(v is None or b.graph.type(v).shape != t.shape for v in op.inputs):
            return "an operand is broadcast"
        if b.row_invariant and any(b.graph.constant_value(v) is not None for v in op.inputs):
            return "beside a larger batch its constant is broadcast, and the sum is rounded before it is normalized"
        places = [b.operand(v) for v in op.inputs if v is not None]
        places += [b.reserved[v] for v in (op.value, norm.value) if v in b.reserved]
        if t.layout or any(not p.dense or p.offset % 8 or p.dtype != t.dtype for p in places):
            return "its rows do not lie one after the other"
        return None if self.configs(b, op) else "its rows do not fit the registers of a block"

    def neighbours(self, graph: Graph, op: Op) -> Sequence[Op]:
        """What reads the result: perhaps a normalization."""
        return readers(graph, op)

    def region(self, b: Builder, op: Op) -> Region:
        """The addition and the normalization."""
        norm = norm_of(b, op)
        assert norm is not None
        return Region(op, after=(norm,))

    def place(self, b: Builder, op: Op) -> None:
        """The sum and its normalization."""
        norm = norm_of(b, op)
        assert norm is not None
        b.target(op.value)
        b.target(norm.value)

    @staticmethod
    def _problem(norm: Op) -> rows.Problem:
        return replace(row_problem(norm), add=True, sum=True)

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        norm = norm_of(b, op)
        assert norm is not None
        return rows_offers(self._problem(norm), b.gpu)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        norm = norm_of(b, op)
        assert norm is not None
        first, second = (b.operand(v) for v in op.inputs if v is not None)
        operands = {"input": first, "addend": second, "sum": b.target(op.value), "output": b.target(norm.value)}
        joint, attrs = replace(op, src=op.src | norm.src), {"norm": norm.kind, **attrs_dict(norm.attrs)}
        emit_norm(b, joint, norm, self._problem(norm), config, operands, "AddNorm", attrs)
