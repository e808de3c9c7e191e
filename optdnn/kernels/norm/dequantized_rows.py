"""A normalization of 8-bit integers that are only dequantized for it: its launch reads the integers.

Networks whose residual stream was quantized have one before each attention and each perceptron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder
from optdnn.kernels.layout.row_places import access, result_strides, walked
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.kernels.norm.rows_once import RowsOnce, is_stored, parameters, placed, row_problem
from optdnn.kernels.quantized.quantized_store import QuantizedStore
from optdnn.kernels.quantized.quantizer import Quantizer, dequantization, meaning, quantizer_of
from optdnn.kernels.tactic import Region
from optdnn.ops.base import attrs_dict
from optdnn.ops.fused import plain_stages
from optdnn.ops.requantize import QuantParams

_ARITY = 3


@dataclass(frozen=True)
class _Parts:
    """``before`` dequantizes ``stored`` by ``given``. ``to`` quantizes the result, if an operator does."""

    before: Op
    stored: Value
    given: QuantParams
    to: Quantizer | None


class DequantizedRows(RowsOnce):
    """LayerNorm or RMSNorm of rows of 8-bit integers. The result is stored in 8 bits, in 16, or in both."""

    name = "rows_dequantized"

    def refuse(self, b: Builder, op: Op) -> str | None:
        found = self._found(b, op)
        if found is None:
            return "its operand is not 8-bit integers that are dequantized for it alone"
        x = b.operand(found.stored)
        walk = () if x.dense else walked(x)
        if walk is None or any(n % access(x.dtype) for n in (x.offset, *(stride for _, stride in walk))):
            return "the rows of integers do not begin at multiples of 16 bytes, or are not contiguous"
        return self.refuse_narrow_rows(b, op)

    @staticmethod
    def _found(b: Builder, op: Op) -> _Parts | None:
        before = next(iter(_before(b.graph, op)), None)
        found = None if before is None else dequantization(b.graph, before)
        if before is None or found is None:
            return None
        to = quantizer_of(b, op.value, dense=True)
        integers = to is not None and not to.to.dtype.startswith("float8")
        return _Parts(before, *found, to if integers else None)

    def _parts(self, b: Builder, op: Op) -> _Parts:
        found = self._found(b, op)
        assert found is not None
        return found

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The operator that dequantizes, and the readers of the result: one may be a quantization."""
        return [*_before(graph, op), *graph.readers(op)]

    def region(self, b: Builder, op: Op) -> Region:
        """The operator that dequantizes, the norm, and the quantization."""
        parts = self._parts(b, op)
        return Region(op, before=(parts.before,), after=() if parts.to is None else (parts.to.op,))

    def place(self, b: Builder, op: Op) -> None:
        """Place the results that are stored."""
        to = self._parts(b, op).to
        if to is not None:
            b.target(to.op.value)
        if to is None or is_stored(b, op.value):
            super().place(b, op)

    def problem(self, b: Builder, op: Op) -> rows.Problem:
        """The norm's problem with its integers and its results."""
        parts = self._parts(b, op)
        out = b.result(op.value, result_strides(b, op.value))
        whole = replace(placed(row_problem(op), b.operand(parts.stored), out), stored=parts.given.dtype)
        return whole if parts.to is None else replace(whole, narrow=parts.to.to.dtype, wide=is_stored(b, op.value))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        parts = self._parts(b, op)
        before, to, problem = parts.before, parts.to, self.problem(b, op)
        operands = {"input": b.operand(parts.stored)}
        if problem.wide:
            operands["output"] = b.target(op.value)
        if to is not None:
            operands["narrow"] = b.target(to.op.value)
        writes = [operands[name] for name in ("output", "narrow") if name in operands]
        operands |= parameters(b, op)
        behind = [tuple(a if a is None or a < 0 else a + _ARITY - 1 for a in s.args) for s in before.attrs.epilogue]
        stages = plain_stages([replace(s, args=args) for s, args in zip(before.attrs.epilogue, behind, strict=True)])
        own = {"norm": op.kind, **attrs_dict(op.attrs), "prologue": stages, "epilogue": (), "arity": _ARITY}
        reads = [*(operands.get(n) for n in ("input", "scale", "bias")), *(b.operand(v) for v in before.inputs[1:])]
        store = None if to is None else QuantizedStore.of(to.to)
        made = rows.launch(problem, config, b.gpu, store, parts.given)
        kind, attrs, covers = "ActivatedNorm", own, replace(op, src=self.region(b, op).src)
        if to is not None:
            kind, attrs = "Quantized", meaning(op, to, problem.wide, own, kind)
        b.emit(covers, made, operands, kind, attrs, reads, writes)


def _before(graph: Graph, op: Op) -> list[Op]:
    """The Pointwise before a norm, if the norm is its only reader."""
    value = op.inputs[0]
    before = None if value is None else graph.op(value)
    only = before is not None and before.kind == "Pointwise" and graph.sole_user(before.value) is op
    return [before] if before is not None and only else []
