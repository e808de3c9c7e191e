"""An addition and the normalization of its sum in one launch, each operand read once: the residual stream of a transformer.

It serves additions that no product takes into its epilogue. The launch is emitted at the addition.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Launch
from optdnn.kernels.layout.pointwise_rows import PointwiseRows
from optdnn.kernels.layout.row_places import aligned, result_strides, row_pitch
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.kernels.norm.rows_once import RowsOnce, emit_norm, is_stored, placed, row_problem, rows_offers
from optdnn.kernels.quantized.quantized_store import QuantizedStore, no_conversion
from optdnn.kernels.quantized.quantizer import Quantizer, meaning, narrowing_of, quantizer_of
from optdnn.kernels.tactic import Offer, Region, TakesAfter
from optdnn.ops.base import attrs_dict

NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
_ROWS = RowsOnce()


def norm_of(b: Builder, op: Op) -> Op | None:
    """The first normalization that reads the sum, or None. Others (parallel branches, each with its own norm) read the stored sum."""
    return next((u for u in b.graph.users(op.value) if u.kind in NORMS and u.inputs[0] == op.value), None)


class AddsAndNormalizes(TakesAfter):
    """An addition and the normalization after it: one region, with both results."""

    def region(self, b: Builder, op: Op) -> Region:
        """The addition and the normalization."""
        norm = norm_of(b, op)
        assert norm is not None
        return Region(op, after=(norm,))

    def place(self, b: Builder, op: Op) -> None:
        """Place the sum and the normalized sum."""
        norm = norm_of(b, op)
        assert norm is not None
        strides = result_strides(b, op.value, norm.value)
        b.target(op.value, strides)
        b.target(norm.value, strides)

    @abstractmethod
    def sources(self, b: Builder, op: Op) -> tuple[TensorView, TensorView]:
        """The operand in rows, and its addend."""

    @abstractmethod
    def launch(self, b: Builder, op: Op, config: Any) -> Launch:
        """The launch in a configuration."""

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        norm, (first, second) = norm_of(b, op), self.sources(b, op)
        assert norm is not None
        operands = {"input": first, "addend": second, "sum": b.target(op.value), "output": b.target(norm.value)}
        joint, attrs = replace(op, src=op.src | norm.src), {"norm": norm.kind, **attrs_dict(norm.attrs)}
        emit_norm(b, joint, norm, self.launch(b, op, config), operands, "AddNorm", attrs)


class AddNorm(AddsAndNormalizes):
    """Add of two tensors of one shape, or of rows and repeated rows, then LayerNorm or RMSNorm of the sum's rows."""

    name = "add_norm"

    def refuse(self, b: Builder, op: Op) -> str | None:
        norm, t = norm_of(b, op), op.outputs[0].type
        if norm is None:
            return "no normalization reads the sum"
        why = _ROWS.refuse_rows(b, norm)
        if why is not None:
            return f"the normalization after it: {why}"
        if self._operands(b, op) is None:
            return "an operand is broadcast, but not by repeating whole rows"
        if len(PointwiseRows().neighbors(b.graph, op)) > 1 and PointwiseRows().refuse(b, op) is None:
            return "one launch gathers both operands and adds them"
        if b.row_invariant and any(b.graph.constant_value(v) is not None for v in op.inputs):
            return "its constant is broadcast over a larger batch, and the sum is rounded before it is normalized"
        (x, other), given = self.sources(b, op), b.fixed(op.value, norm.value)
        if t.layout or not aligned(x) or row_pitch(other) is None:
            return "its rows do not have a constant pitch"
        if any(not p.dense or p.offset % 8 for p in given) or any(p.dtype != t.dtype for p in (x, other, *given)):
            return "its results are not contiguous and aligned, or types differ"
        return None if self.configs(b, op) else "its rows do not fit the registers of a block"

    @staticmethod
    def _operands(b: Builder, op: Op) -> tuple[Value, Value, int] | None:
        """The operand of the result's shape, the other operand, and the number of rows after which the other one repeats (0: never)."""
        shape = op.outputs[0].type.static_shape
        for value, other in (op.inputs, op.inputs[::-1]):
            if value is None or other is None or b.graph.type(value).static_shape != shape:
                continue
            own = b.graph.type(other).static_shape
            if own == shape:
                return (other, value, 0) if row_pitch(b.operand(other)) is None else (value, other, 0)
            while own and own[0] == 1:
                own = own[1:]
            if own and own == shape[len(shape) - len(own) :]:
                return value, other, math.prod(own[:-1])
        return None

    def problem(self, b: Builder, op: Op) -> rows.Problem:
        """The kernel's problem."""
        norm, operands = norm_of(b, op), self._operands(b, op)
        assert norm is not None
        assert operands is not None
        whole = replace(row_problem(norm), add=True, sum=True, period=operands[2])
        out = b.result(norm.value, result_strides(b, op.value, norm.value))
        return placed(whole, b.operand(operands[0]), out, b.operand(operands[1]))

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        return rows_offers(self.problem(b, op), b.gpu)

    def sources(self, b: Builder, op: Op) -> tuple[TensorView, TensorView]:
        found = self._operands(b, op)
        assert found is not None
        return b.operand(found[0]), b.operand(found[1])

    def launch(self, b: Builder, op: Op, config: Any) -> Launch:
        return rows.launch(self.problem(b, op), config, b.gpu)


class StoresNarrower(TakesAfter):
    """A launch with a norm of its operator's result, and a narrower form of the normalized result. That result itself is stored only if it
    has other readers."""

    @abstractmethod
    def quantizer(self, b: Builder, norm: Op) -> Quantizer | None:
        """The operator that makes the narrower result of the norm."""

    def narrower(self, b: Builder, op: Op) -> tuple[Op, Quantizer] | None:
        """The norm, and the operator that makes its narrower result."""
        norm = norm_of(b, op)
        to = None if norm is None else self.quantizer(b, norm)
        return None if norm is None or to is None else (norm, to)

    def parts(self, b: Builder, op: Op) -> tuple[Op, Quantizer]:
        """Both, of an operator that is not refused."""
        found = self.narrower(b, op)
        assert found is not None
        return found

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The readers of the result, and those of its normalizations."""
        norms = graph.readers(op)
        return [*norms, *(user for norm in norms if norm.kind in NORMS for user in graph.readers(norm))]

    def region(self, b: Builder, op: Op) -> Region:
        """The operator, the norm and the operator that makes the narrower result."""
        norm, to = self.parts(b, op)
        return Region(op, after=(norm, to.op))

    def place(self, b: Builder, op: Op) -> None:
        """Place the result, its narrower normalized form, and the normalized result itself if it is stored."""
        norm, to = self.parts(b, op)
        strides = result_strides(b, op.value, norm.value)
        b.target(op.value, strides)
        b.target(to.op.value)
        if is_stored(b, norm.value):
            b.target(norm.value, strides)

    def with_narrower(self, b: Builder, op: Op, problem: rows.Problem) -> rows.Problem:
        """The launch's problem with the narrower result."""
        norm, to = self.parts(b, op)
        return replace(problem, narrow=to.to.dtype, wide=is_stored(b, norm.value))


class AddNormQuantized(StoresNarrower, AddNorm):
    """As :class:`AddNorm`, and the quantization of the normalized sum, which is stored in 16 bits only if it has other readers."""

    name = "add_norm_quantized"
    meaning: ClassVar[str] = "Quantized"

    def refuse(self, b: Builder, op: Op) -> str | None:
        found = self.narrower(b, op)
        if found is None:
            return "nothing quantizes the normalized sum"
        norm, to = found
        if norm.outputs[0].type.dtype.itemsize != 2:
            return "it is for rows of 16-bit floats"
        return no_conversion(to.to.dtype, b.arch) or super().refuse(b, op)

    def quantizer(self, b: Builder, norm: Op) -> Quantizer | None:
        return quantizer_of(b, norm.value)

    def problem(self, b: Builder, op: Op) -> rows.Problem:
        return self.with_narrower(b, op, super().problem(b, op))

    def launch(self, b: Builder, op: Op, config: Any) -> Launch:
        return rows.launch(self.problem(b, op), config, b.gpu, QuantizedStore.of(self.parts(b, op)[1].to))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        (norm, to), (first, second) = self.parts(b, op), self.sources(b, op)
        operands = {"input": first, "addend": second, "sum": b.target(op.value), "narrow": b.target(to.op.value)}
        kept = is_stored(b, norm.value)
        if kept:
            operands["output"] = b.target(norm.value)
        covers = replace(op, src=op.src | norm.src | to.op.src)
        attrs = meaning(norm, to, kept, {"norm": norm.kind, **attrs_dict(norm.attrs)}, "AddNorm", 1)
        emit_norm(b, covers, norm, self.launch(b, op, config), operands, self.meaning, attrs)


class AddNormNarrowed(AddNormQuantized):
    """As :class:`AddNorm`, and the conversion of the normalized sum from fp32 to fp16, which is stored in fp32 only if it has other
    readers."""

    name = "add_norm_narrowed"
    meaning = "Narrowed"

    def quantizer(self, b: Builder, norm: Op) -> Quantizer | None:
        return narrowing_of(b, norm.value)

    def refuse(self, b: Builder, op: Op) -> str | None:
        if self.narrower(b, op) is None:
            return "nothing converts the normalized sum to fp16"
        return AddNorm.refuse(self, b, op)
