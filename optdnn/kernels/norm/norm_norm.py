"""Rows that are normalized twice in one launch with both results: the last norm of a Conformer layer and the first norm of the next
layer, or a norm of embeddings and the first norm of the first layer (CLIP, BLOOM).

The launch is emitted at the first norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.layout.row_places import aligned, result_strides
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.kernels.norm.add_norm import StoresNarrower, norm_of
from optdnn.kernels.norm.rows_once import OPERATIONS, RowsOnce, is_stored, parameters, placed, row_problem, rows_offers
from optdnn.kernels.quantized.quantized_store import QuantizedStore
from optdnn.kernels.quantized.quantizer import Quantizer, meaning, narrowing_of, quantizer_of
from optdnn.kernels.tactic import Offer, ProblemTactic, Region, TakesAfter
from optdnn.ops.norm_regions import HeldNormAttrs, NormAddNormAttrs
from optdnn.runtime.cuda.gpu_facts import GpuFacts

_ROWS = RowsOnce()
PARAMETERS = ("scale", "bias", "first_scale", "first_bias")
"""The constants of the second norm, and of the first one."""


class NormNorm(TakesAfter, ProblemTactic):
    """LayerNorm or RMSNorm of rows, then LayerNorm or RMSNorm of the result."""

    name = "norm_norm"

    def refuse(self, b: Builder, op: Op) -> str | None:
        second = norm_of(b, op)
        if second is None:
            return "no other normalization reads its result"
        for norm in (op, second):
            if (why := _ROWS.refuse_rows(b, norm)) is not None:
                return f"{norm.name}: {why}"
            if quantizer_of(b, norm.value) is not None:
                return f"the result of {norm.name} is quantized"
        places = b.fixed(op.value, second.value)
        if not aligned(b.operand(op.inputs[0])) or any(not p.dense or p.offset % 8 for p in places):
            return "its rows or its results are not contiguous and aligned"
        return None if self.configs(b, op) else "its rows do not fit the registers of a block"

    @staticmethod
    def _second(b: Builder, op: Op) -> Op:
        found = norm_of(b, op)
        assert found is not None
        return found

    def region(self, b: Builder, op: Op) -> Region:
        """Both normalizations."""
        return Region(op, after=(self._second(b, op),))

    def _values(self, b: Builder, op: Op) -> tuple[Value, Value]:
        return op.value, self._second(b, op).value

    def place(self, b: Builder, op: Op) -> None:
        """Place both results in rows of one pitch."""
        values = self._values(b, op)
        for value in values:
            b.target(value, result_strides(b, *values))

    def problem(self, b: Builder, op: Op) -> rows.Problem:
        second, values = self._second(b, op), self._values(b, op)
        scale, bias = (op.input(k) is not None for k in (1, 2))
        first = rows.FirstNorm(OPERATIONS[op.kind], scale, bias, op.attrs.epsilon)
        out = b.result(second.value, result_strides(b, *values))
        return placed(replace(row_problem(second), sum=True, first=first), b.operand(op.inputs[0]), out)

    def offers(self, problem: rows.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return rows_offers(problem, gpu)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        second, x = self._second(b, op), b.operand(op.inputs[0])
        operands: dict[str, TensorView] = {"input": x, "sum": b.target(op.value), "output": b.target(second.value)}
        operands |= parameters(b, second, PARAMETERS[:2]) | parameters(b, op, PARAMETERS[2:])
        attrs = _meaning(op, second)
        reads = [x, None, *(operands.get(name) for name in PARAMETERS)]
        writes = [operands["sum"], operands["output"]]
        made = rows.launch(self.problem(b, op), config, b.gpu)
        b.emit(replace(op, src=op.src | second.src), made, operands, "NormAddNorm", attrs, reads, writes)


class NormNormNarrowed(StoresNarrower, NormNorm):
    """As :class:`NormNorm`, and the conversion of the second result from fp32 to fp16. It is stored in fp32 only if it has other
    readers."""

    name = "norm_norm_narrowed"

    def quantizer(self, b: Builder, norm: Op) -> Quantizer | None:
        return narrowing_of(b, norm.value, dense=True)

    def refuse(self, b: Builder, op: Op) -> str | None:
        if self.narrower(b, op) is None:
            return "nothing converts the second result to fp16"
        return NormNorm.refuse(self, b, op)

    def problem(self, b: Builder, op: Op) -> rows.Problem:
        return self.with_narrower(b, op, super().problem(b, op))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        (second, to), x = self.parts(b, op), b.operand(op.inputs[0])
        kept = is_stored(b, second.value)
        operands: dict[str, TensorView] = {"input": x, "sum": b.target(op.value), "narrow": b.target(to.op.value)}
        if kept:
            operands["output"] = b.target(second.value)
        writes = [operands[n] for n in ("sum", "output", "narrow") if n in operands]
        operands |= parameters(b, second, PARAMETERS[:2]) | parameters(b, op, PARAMETERS[2:])
        attrs = meaning(second, to, kept, _meaning(op, second), "NormAddNorm", 1)
        reads = [x, None, *(operands.get(name) for name in PARAMETERS)]
        made = rows.launch(self.problem(b, op), config, b.gpu, QuantizedStore.of(to.to))
        b.emit(replace(op, src=op.src | second.src | to.op.src), made, operands, "Narrowed", attrs, reads, writes)


def _meaning(first: Op, second: Op) -> dict[str, Any]:
    """The attributes of both norms in the meaning of the launch."""
    return NormAddNormAttrs(second.kind, second.attrs, HeldNormAttrs(first.kind, first.attrs)).plain()
