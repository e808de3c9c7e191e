"""Tactics of normalizations and softmax that read each row once: a row fits the registers of the threads that share it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, TensorView, map_dtype
from optdnn.kernels.launch import Launch
from optdnn.kernels.layout.row_places import access, result_strides, row_pitch, walked
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.kernels.norm.activation import NormOutput, output_of
from optdnn.kernels.norm.group_norm import no_plain_norm, unlike_rows
from optdnn.kernels.quantized.quantized_store import QuantizedStore, no_conversion
from optdnn.kernels.quantized.quantizer import Quantizer, meaning, narrowing_of, quantizer_of
from optdnn.kernels.tactic import Offer, Region, Tactic, TakesAfter
from optdnn.ops.base import attrs_dict
from optdnn.runtime.cuda.gpu_facts import GpuFacts, no_kernels
from optdnn.types import BF16, FP16, FP32, normalize_axis

SHORT = tuple(1 << k for k in range(6))
"""Row lengths, in accesses of 16 bytes, that a power of two of lanes can share."""


@lru_cache(maxsize=1024)
def rows_offers(problem: rows.Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The offers. The configuration sets the order of a row's sum; the best one for many rows serves every number of rows."""
    found = rows.candidates(problem, gpu)
    best = rows.candidates(replace(problem, rows=4096, walk=(), period=0), gpu, limit=1)  # wherever the rows lie
    many = [c for c in best if rows.refuse(problem, c) is None]
    return tuple(Offer(c, rows.estimate(problem, c, gpu), c in many) for c in dict.fromkeys((*found, *many)))


OPERATIONS = {
    "Softmax": "softmax", "LogSoftmax": "log_softmax", "LayerNormalization": "layer_norm", "RMSNormalization": "rms_norm",
    "LpNormalization": "l2_norm",
}  # fmt: skip
"""Kind -> the row kernel's operation."""


class RowsOnce(Tactic):
    """LayerNorm, RMSNorm, L2 norm, Softmax and LogSoftmax of rows of 16-bit floats or fp32. The rows of the result have a constant pitch."""

    name = "rows_once"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := self.refuse_rows(b, op)) is not None:
            return why
        value = self.result(b, op)
        if value in b.reserved and row_pitch(b.reserved[value]) is None:
            return "the rows of its result do not have a constant pitch"
        x = b.operand(op.inputs[0])
        return _refuse_offset(x) if x.dense else _refuse_apart(b, op, x)

    def result(self, b: Builder, op: Op) -> Value:
        """The value that the launch writes in the type of its input."""
        return op.value

    def refuse_rows(self, b: Builder, op: Op) -> str | None:
        """Why it cannot run the operator for any place of its rows, or None."""
        t = op.outputs[0].type
        if (why := no_kernels(b.arch)) is not None:
            return why
        if t.dtype not in (FP16, BF16, FP32) or not t.static_shape:
            return "it is for rows of 16-bit floats or fp32"
        if op.kind == "LpNormalization" and op.attrs.p != 2:
            return "it computes L2 norms, no L1 norms"
        if b.graph.type(op.inputs[0]).dtype != t.dtype:  # type: ignore[arg-type]
            return "its operand and its result have different types"
        if normalize_axis(op.attrs.axis, len(t.static_shape)) != len(t.static_shape) - 1:
            return "its rows are not along the last axis"
        if any(b.graph.uses(v) for v in op.values[1:]):
            return "it does not keep the statistics"
        if any(v is not None and b.graph.constant_value(v) is None for v in op.inputs[1:]):
            return "its scale and bias are not constant"
        shape = t.static_shape
        if any(v is not None and b.graph.type(v).static_shape != shape[-1:] for v in op.inputs[1:]):
            return "its scale and bias do not have the shape of a row"
        if not rows_offers(row_problem(op), b.gpu):
            return f"rows of {shape[-1]} elements do not fit the registers of a block"
        return None

    def refuse_narrow_rows(self, b: Builder, op: Op) -> str | None:
        """Why a launch that only takes rows of 16-bit floats cannot run the operator, or None."""
        if op.outputs[0].type.dtype.itemsize != 2:
            return "it is for rows of 16-bit floats"
        return self.refuse_rows(b, op)

    def problem(self, b: Builder, op: Op) -> rows.Problem:
        """The kernel's problem."""
        out = b.result(self.result(b, op), result_strides(b, self.result(b, op)))
        return placed(row_problem(op), b.operand(op.inputs[0]), out)

    def place(self, b: Builder, op: Op) -> None:
        """Place the result in rows padded for products, unless its place is reserved."""
        b.target(self.result(b, op), result_strides(b, self.result(b, op)))

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        return rows_offers(self.problem(b, op), b.gpu)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        operands = {"input": b.operand(op.inputs[0]), "output": b.target(op.value)}
        made = rows.launch(self.problem(b, op), config, b.gpu)
        emit_norm(b, op, op, made, operands, op.kind, attrs_dict(op.attrs))


def placed(problem: rows.Problem, x: TensorView, out: TensorView, addend: TensorView | None = None) -> rows.Problem:
    """The problem with the strides of its rows."""
    pitches = ((row_pitch(addend) or 0) if addend is not None else 0, row_pitch(out) or 0)
    return replace(problem, walk=() if x.dense else walked(x) or (), pitches=pitches)


def _refuse_offset(x: TensorView) -> str | None:
    """Why the kernel cannot read contiguous rows from the offset of ``x`` on, or None. A narrower access may divide the rows."""
    unit = math.gcd(x.shape[-1], access(x.dtype))
    return f"its rows do not begin at multiples of {unit} elements" if x.offset % unit else None


def _refuse_apart(b: Builder, op: Op, x: TensorView) -> str | None:
    """Why the kernel cannot read the non-contiguous rows ``x`` in place, or None."""
    walk = walked(x)
    if walk is None:
        return "the elements of a row are not contiguous, or its rows have too many axes"
    unit = access(x.dtype)
    if x.offset % unit or any(stride % unit for _, stride in walk):
        return "its rows do not begin at multiples of 16 bytes"
    if not b.row_invariant and "Normalization" in op.kind and x.shape[-1] in [unit * n for n in SHORT]:
        return "short rows that are not contiguous have a kernel of their own"
    return None


def row_problem(op: Op) -> rows.Problem:
    """The problem of a normalization or softmax alone, with contiguous rows."""
    t = op.outputs[0].type
    shape = t.static_shape
    count = int(np.prod(shape[:-1], dtype=np.int64))
    norm = "Normalization" in op.kind
    found = rows.Problem(
        OPERATIONS.get(op.kind, "rms_norm"), count, shape[-1], map_dtype(t.dtype), scale=norm and op.input(1) is not None,
        bias=norm and op.input(2) is not None, epsilon=op.attrs.epsilon if norm else 1e-5,
    )  # fmt: skip
    if op.kind != "DeviationNormalization":
        return found
    operation, root = "layer_norm" if op.attrs.about_mean else "rms_norm", op.attrs.root_epsilon or None
    return replace(
        found, operation=operation, root_epsilon=root, uncentered=op.attrs.about_mean and not op.attrs.centered
    )


def parameters(b: Builder, norm: Op, names: Sequence[str] = ("scale", "bias")) -> dict[str, TensorView]:
    """The constant scale and bias of a norm in fp32, those that it has."""
    found = {name: b.graph.constant_value(value) for name, value in zip(names, norm.inputs[1:], strict=False)}
    given = {name: array.astype(np.float32) for name, array in found.items() if array is not None}
    return {name: b.constant(array, f"{norm.outputs[0].name}.{name}") for name, array in given.items()}


def emit_norm(
    b: Builder, covers: Op, norm: Op, made: Launch, operands: dict[str, TensorView], kind: str, attrs: dict[str, Any],
    *, last: bool = False, after: Sequence[TensorView | None] = (),
) -> None:  # fmt: skip
    """Add the launch of a normalization (or softmax). Its constant scale and bias are added to the ``operands``. ``covers``: the operator
    with the nodes that the launch computes. ``last``: in its meaning, the addend follows the parameters. ``after``: operands that the
    stages after the norm read in its meaning. In both cases, an absent scale or bias keeps its slot."""
    operands |= parameters(b, norm)
    reads: list[TensorView | None] = [operands[n] for n in ("input", "addend", "scale", "bias") if n in operands]
    writes = [operands[n] for n in ("sum", "output", "narrow") if n in operands]
    if last:
        reads = [operands.get(n) for n in ("input", "scale", "bias", "addend")]
    if kind == "ActivatedNorm" and not last:
        reads = [*(operands.get(n) for n in ("input", "scale", "bias")), *after]
    b.emit(covers, made, operands, kind, attrs, reads, writes)


def apart_halves(b: Builder, value: Value) -> str | None:
    """Why fp16 results of fp32 rows do not follow one another at the place of ``value``, or None."""
    width = b.graph.type(value).static_shape[-1]
    if width % access(FP16):
        return f"rows of {width} numbers of fp16 are not a multiple of 16 bytes"
    if any(not p.dense or p.offset % access(FP16) for p in b.fixed(value)):
        return "its fp16 result is not contiguous and aligned"
    return None


class FlatRows(RowsOnce):
    """LayerNorm over several last axes of a contiguous tensor: all of them are one row of the kernel."""

    name = "rows_flat"

    def refuse(self, b: Builder, op: Op) -> str | None:
        t = op.outputs[0].type
        if (why := no_kernels(b.arch) or no_plain_norm(b, op)) is not None:
            return why
        shape = t.static_shape
        own = shape[normalize_axis(op.attrs.axis, len(shape)) :]
        if len(own) < 2:
            return "its rows are along the last axis alone"
        if (why := unlike_rows(b, op)) is not None:
            return why
        places = [b.operand(op.inputs[0]), *b.fixed(op.value)]
        if t.layout or any(not p.dense or p.offset % access(p.dtype) for p in places):
            return "its rows are not contiguous and aligned"
        if not rows_offers(self.problem(b, op), b.gpu):
            return f"rows of {math.prod(own)} elements do not fit the registers of a block"
        return None

    def problem(self, b: Builder, op: Op) -> rows.Problem:
        shape = op.outputs[0].type.static_shape
        axis = normalize_axis(op.attrs.axis, len(shape))
        return replace(row_problem(op), rows=math.prod(shape[:axis]), length=math.prod(shape[axis:]))

    def place(self, b: Builder, op: Op) -> None:
        """Place the result without gaps."""
        b.target(op.value)


class ActivatedRows(TakesAfter, RowsOnce):
    """A norm or softmax with the activation, the rounding to a grid or the conversion to another float type after it."""

    name = "rows_activated"

    def refuse(self, b: Builder, op: Op) -> str | None:
        to = self._output(b, op)
        if to.last is op:
            return "the only reader of its result is not an activation or a conversion of floats"
        return super().refuse(b, op) or (apart_halves(b, to.value) if to.narrowed else None)

    @staticmethod
    def _output(b: Builder, op: Op) -> NormOutput:
        return output_of(b, op, wide=True, halves=True)

    def result(self, b: Builder, op: Op) -> Value:
        return self._output(b, op).value

    def region(self, b: Builder, op: Op) -> Region:
        """The norm and the operator after it."""
        return self._output(b, op).region

    def problem(self, b: Builder, op: Op) -> rows.Problem:
        """The norm's problem with the stages of the activation and the type of the result."""
        to, problem = self._output(b, op), super().problem(b, op)
        changed = replace(problem, epilogue=tuple(to.epilogue.rendered))
        if to.narrowed:
            return replace(changed, narrow="float16", wide=False)
        return replace(changed, widened=to.last.outputs[0].type.dtype != op.outputs[0].type.dtype)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        to = self._output(b, op)
        operands = {"input": b.operand(op.inputs[0]), "narrow" if to.narrowed else "output": b.target(to.value)}
        made = rows.launch(self.problem(b, op), config, b.gpu)
        emit_norm(b, to.covers, op, made, operands, *to.meaning(), after=to.operands(b))


def is_stored(b: Builder, value: Value) -> bool:
    """Whether a result that is quantized has a reserved place, or other readers."""
    return value in b.reserved or len(b.graph.uses(value)) > 1


class QuantizedRows(TakesAfter, RowsOnce):
    """A norm or softmax of 16-bit rows with the quantization of its result. The 16-bit result is stored only if it has other readers."""

    name = "rows_quantized"
    meaning: ClassVar[str] = "Quantized"

    def quantizer(self, b: Builder, op: Op) -> Quantizer | None:
        """The operator that makes the narrower result."""
        return quantizer_of(b, op.value, dense=True)

    def refuse(self, b: Builder, op: Op) -> str | None:
        to = self.quantizer(b, op)
        if to is None:
            return "nothing quantizes its result"
        if (why := no_conversion(to.to.dtype, b.arch)) is not None:
            return why
        return self.refuse_narrow_rows(b, op) or super().refuse(b, op)

    def region(self, b: Builder, op: Op) -> Region:
        """The norm and the operator that makes the narrower result."""
        to = self.quantizer(b, op)
        assert to is not None
        return Region(op, after=(to.op,))

    def place(self, b: Builder, op: Op) -> None:
        """Place the narrower result, and the norm's own if it is stored."""
        to = self.quantizer(b, op)
        assert to is not None
        b.target(to.op.value)
        if is_stored(b, op.value):
            super().place(b, op)

    def problem(self, b: Builder, op: Op) -> rows.Problem:
        """The norm's problem with both results."""
        to = self.quantizer(b, op)
        assert to is not None
        return replace(super().problem(b, op), narrow=to.to.dtype, wide=is_stored(b, op.value))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        to = self.quantizer(b, op)
        assert to is not None
        kept = is_stored(b, op.value)
        operands = {"input": b.operand(op.inputs[0]), "narrow": b.target(to.op.value)}
        if kept:
            operands["output"] = b.target(op.value)
        covers, attrs = replace(op, src=op.src | to.op.src), meaning(op, to, kept)
        made = rows.launch(self.problem(b, op), config, b.gpu, QuantizedStore.of(to.to))
        emit_norm(b, covers, op, made, operands, self.meaning, attrs)


class NarrowedRows(QuantizedRows):
    """A norm or softmax of fp32 rows with the conversion of its result to fp16. The fp32 result is stored only if it has other readers."""

    name = "rows_narrowed"
    meaning = "Narrowed"

    def quantizer(self, b: Builder, op: Op) -> Quantizer | None:
        return narrowing_of(b, op.value, dense=True)

    def refuse(self, b: Builder, op: Op) -> str | None:
        if self.quantizer(b, op) is None:
            return "nothing converts its result to fp16"
        return RowsOnce.refuse(self, b, op)
