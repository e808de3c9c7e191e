"""The normalization of rows and the addition of other rows to its result in one launch: the residual stream of Swin V2.

The launch is emitted at the addition.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder
from optdnn.kernels.layout.row_places import aligned, result_strides, row_pitch
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.kernels.norm.add_norm import NORMS
from optdnn.kernels.norm.rows_once import RowsOnce, emit_norm, placed, row_problem, rows_offers
from optdnn.kernels.tactic import Offer, ProblemTactic, TakesBefore
from optdnn.ops.base import Stage, attrs_dict
from optdnn.ops.fused import plain_stages
from optdnn.runtime.cuda.gpu_facts import GpuFacts

_ROWS = RowsOnce()


def normalized_operand(graph: Graph, op: Op) -> tuple[Op, Value] | None:
    """The normalization with ``op`` as its only reader, and the addend; None if there is no such normalization."""
    for value, other in (op.inputs, op.inputs[::-1]):
        norm = None if value is None else graph.op(value)
        if norm is None or value is None or other is None or norm.kind not in NORMS or value.port:
            continue
        if graph.sole_user(value) is not None and graph.type(other).shape == op.outputs[0].type.shape:
            return norm, other
    return None


def of_another_launch(graph: Graph, norm: Op) -> str | None:
    """Why another launch computes the normalization before an addition, or None."""
    source = None if norm.inputs[0] is None else graph.op(norm.inputs[0])
    return (
        None if source is None or source.kind != "Add" else f"the normalization belongs to the launch of {source.name}"
    )


class FollowsNorm(TakesBefore, ProblemTactic):
    """An operator that the launch of the normalization before it also computes."""

    @abstractmethod
    def before(self, graph: Graph, op: Op) -> Op | None:
        """The normalization before the operator, or None."""

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The normalization before it."""
        norm = self.before(graph, op)
        return [] if norm is None else [norm]

    def place(self, b: Builder, op: Op) -> None:
        """Place the result in rows padded for products, unless its place is reserved."""
        b.target(op.value, result_strides(b, op.value))

    def offers(self, problem: rows.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return rows_offers(problem, gpu)


class NormAdd(FollowsNorm):
    """LayerNorm or RMSNorm of rows, then Add of a tensor of the same shape."""

    name = "norm_add"

    def refuse(self, b: Builder, op: Op) -> str | None:
        found, t = normalized_operand(b.graph, op), op.outputs[0].type
        if found is None:
            return "it is not the only reader of a normalization of rows"
        norm, other = found
        if (why := of_another_launch(b.graph, norm)) is not None:
            return why
        if b.graph.type(norm.value) != t:
            return "the normalized rows are repeated"
        if (why := _ROWS.refuse_rows(b, norm)) is not None:
            return f"the normalization before it: {why}"
        x, places = (
            b.operand(norm.inputs[0]),
            [b.operand(other), *b.fixed(op.value)],
        )
        if t.layout or not aligned(x) or any(row_pitch(p) is None for p in places):
            return "its rows do not have a constant pitch"
        return None if self.configs(b, op) else "its rows do not fit the registers of a block"

    def before(self, graph: Graph, op: Op) -> Op | None:
        found = normalized_operand(graph, op)
        return None if found is None else found[0]

    def problem(self, b: Builder, op: Op) -> rows.Problem:
        found = normalized_operand(b.graph, op)
        assert found is not None
        norm, other = found
        out = b.result(op.value, result_strides(b, op.value))
        whole = replace(row_problem(norm), add=True, last=True)
        return placed(whole, b.operand(norm.inputs[0]), out, b.operand(other))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        found = normalized_operand(b.graph, op)
        assert found is not None
        norm, other = found
        operands = {"input": b.operand(norm.inputs[0]), "addend": b.operand(other), "output": b.target(op.value)}
        attrs = {
            "norm": norm.kind,
            **attrs_dict(norm.attrs),
            "epilogue": plain_stages((Stage("Add", (-1, 3)),)),
            "arity": 3,
        }
        made, covers = rows.launch(self.problem(b, op), config, b.gpu), replace(op, src=op.src | norm.src)
        emit_norm(b, covers, norm, made, operands, "ActivatedNorm", attrs, last=True)
