"""Products of a few rows and adjacent operators in one launch, which reads its matrices once. These operators are the RMS norm of
the rows, and a second product that multiplies the first one. A language model computes them for each token,
besides attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.epilogue import Epilogue, plan_epilogue
from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv.fused import Convolution, bias_row
from optdnn.kernels.conv.paired import stages_with_other
from optdnn.kernels.gemm import gemv_kernel as gemv
from optdnn.kernels.gemm.gemv import Gemv
from optdnn.kernels.gemm.hopper import rows_of
from optdnn.kernels.gemm.paired import multiplier
from optdnn.kernels.tactic import Region, Tactic
from optdnn.ops.fused import plain_stages
from optdnn.types import normalize_axis


@dataclass(frozen=True)
class Around:
    """The operators that a launch computes in addition to a product: the norm of its rows, and the product by which it
    is multiplied."""

    norm: Op | None
    other: Op | None
    beside: Epilogue | None

    @property
    def before(self) -> tuple[Op, ...]:
        """Both operators, as far as they exist, in the graph's order."""
        return tuple(x for x in (self.norm, self.other) if x is not None)


class TakesAround(Tactic):
    """A product with the norm before it, a second product, or both."""

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The product that multiplies ``op``, and the norm of its rows."""
        norm = None if op.input(0) is None else graph.op(op.inputs[0])  # type: ignore[arg-type]
        found = [multiplier(graph, op), norm if norm is not None and norm.kind == "RMSNormalization" else None]
        return [x for x in found if x is not None]

    def region(self, b: Builder, op: Op) -> Region:
        """The product and the adjacent operators."""
        return Region(op, before=around_of(b, op).before)

    @staticmethod
    def unfit(b: Builder, op: Op, alone: Callable[[Builder, Op], str | None]) -> str | None:
        """Why the launch cannot run the product with the adjacent operators, or None. ``alone``: the same of a product
        by itself."""
        if (why := alone(b, op)) is not None:
            return why
        around = around_of(b, op)
        if around.other is not None and (why := alone(b, around.other)) is not None:
            return f"the other product {around.other.name}: {why}"
        if not around.before:
            return norm_refusal(b, op, None) or "there is no norm and no other product around it"
        return "its stages have constants" if plan_epilogue(b.graph, op, channel_axis=-1).constants else None


class RowProduct(TakesAround, Gemv):
    """A product of one to four rows with the adjacent operators."""

    name = "gemv_rows"

    def refuse(self, b: Builder, op: Op) -> str | None:
        return self.unfit(b, op, super().refuse)

    def convolution(self, b: Builder, op: Op) -> Convolution:
        """The product of the rows before the norm."""
        c, around = super().convolution(b, op), around_of(b, op)
        if around.other is not None:
            c = replace(c, residual=None)  # nothing stores the other product
        src = frozenset[str]().union(*(x.src for x in around.before))
        if around.norm is None:
            return replace(c, covered=src)
        x = rows_of(b.source(around.norm.inputs[0]))
        assert x is not None
        return replace(c, feeds=(replace(c.feed, x=x),), covered=src)

    def problem_of(self, b: Builder, op: Op, c: Convolution) -> gemv.Problem:
        around = around_of(b, op)
        beside = None if around.beside is None else (("bias",), *around.beside.rendered)
        return replace(super().problem_of(b, op, c), norm=around.norm is not None, beside=beside)

    def launch(self, b: Builder, op: Op, c: Convolution, problem: gemv.Problem, config: gemv.Config) -> None:
        around = around_of(b, op)
        operands, x_pitch, out_pitch = self.operands(b, op, c, problem)
        weights, bias = operands["weights"], operands["bias"]
        size = (problem.columns, problem.depth)
        reads: list[TensorView | None] = [operands["x"].view((problem.rows, problem.depth), (x_pitch, 1)), None]
        epsilon, beside = 0.0, None if around.beside is None else around.beside.stages
        if around.norm is not None:
            scale = b.graph.constant_value(around.norm.inputs[1])
            assert scale is not None
            operands["scale"] = reads[1] = b.constant(scale.astype(np.float32), f"{around.norm.outputs[0].name}.scale")
            epsilon = around.norm.attrs.epsilon
        reads += [weights.view(size, (problem.depth, 1)), bias]
        if around.other is not None and around.beside is not None:
            matrix, row = self.factors(b, around.other)
            operands["beside"] = self.dense(b, around.other, matrix)
            operands["beside_bias"] = bias_row(b, around.other, around.beside.added_to(row), problem.columns)
            reads += [operands["beside"].view(size, (problem.depth, 1)), operands["beside_bias"]]
        elif problem.residual:
            reads += [None, None, operands["residual"].view((problem.rows, problem.columns), (out_pitch, 1))]
        out = c.out.view((problem.rows, problem.columns), (out_pitch, 1))
        attrs = {"epilogue": plain_stages(stages_with_other(c.ep)), "epsilon": epsilon}
        attrs |= {} if beside is None else {"beside": plain_stages(beside)}
        made = gemv.launch(problem, config, b.gpu, x_pitch, out_pitch, epsilon=epsilon)
        b.emit(op, made, operands, "RowProduct", attrs, reads, [out])


def around_of(b: Builder, op: Op) -> Around:
    """The adjacent operators that the launch of ``op`` can compute."""
    other = multiplier(b.graph, op)
    beside = None if other is None else plan_epilogue(b.graph, other, channel_axis=-1)
    if beside is not None and (beside.rest or beside.residual is not None or beside.constants):
        other = beside = None
    norm = None if norm_refusal(b, op, other) is not None else b.graph.op(op.inputs[0])  # type: ignore[arg-type]
    return Around(norm, other, beside)


def norm_refusal(b: Builder, op: Op, other: Op | None) -> str | None:
    """Why the launch does not normalize the rows of ``op``, which ``other`` reads too, or None."""
    value = op.input(0)
    norm = None if value is None else b.graph.op(value)
    if norm is None or value is None or norm.kind != "RMSNormalization":
        return "its rows are not normalized by their mean square"
    if {u.id for u in b.graph.users(value)} - {x.id for x in (op, other) if x is not None}:
        return "others read the normalized rows"
    shape, source = b.graph.type(value).static_shape, norm.inputs[0]
    scale = b.graph.constant_value(norm.inputs[1])
    if source is None or scale is None or scale.shape != shape[-1:]:
        return "its norm has no constant scale per channel"
    if normalize_axis(norm.attrs.axis, len(shape)) != len(shape) - 1 or b.graph.uses(Value(norm.id, 1)):
        return "its norm is not over rows alone"
    if b.graph.type(source).dtype != b.graph.type(value).dtype:
        return "its norm changes the type"
    if b.graph.op(source).kind == "Add":
        return "its norm follows an addition and shares a launch with it"
    if rows_of(b.source(source)) is None:
        return "the rows before its norm do not have a constant pitch"
    return None
