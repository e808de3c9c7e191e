"""Products of many rows with packed weights in int8. Launches before the product round the rows to int8 with one scale per row, and the
weights with one scale per column. Only operators that allow rounded rows are computed this way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, as_rows, map_dtype, up
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.gemm.hopper import MatrixProduct, Rows
from optdnn.kernels.packed import dense_kernel as dense
from optdnn.kernels.packed import row_bytes_kernel as row_bytes
from optdnn.kernels.packed.product import OPERANDS, UnpackedProblem, described, packed_operands, refusal, row_count
from optdnn.kernels.packed.tactics import LEAST_ROWS, PackedWgmma
from optdnn.kernels.tactic import Offer, costlier
from optdnn.ops.requantize import LARGEST, MAX_CONSTANTS, Requantize, pad_channels
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.reference.packed import by_number, numbers_of
from optdnn.runtime.reference.quantized import STAGES
from optdnn.types import DTYPES, FP32, FP64, INT8, Array, bits_of, is_float

UNIT = 16
"""int8 values in 16 bytes."""
_NUMBERS, _SCALES = (INT8, (-8,)), (FP32, (-32,))
"""Keys among the builder's copies: types, and numbers in the place of strides, for the int8 values and for the scales of rows."""


@lru_cache(maxsize=1024)
def _offers(problem: UnpackedProblem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The product's configurations, with the time of all three launches. Integer sums do not depend on their order."""
    packed = problem.packed
    first = dense.estimate(packed, 1) + row_bytes.estimate(packed.rows, packed.depth)
    return tuple(replace(o, seconds=first + o.predicted) for o in hopper_launch.ranked(problem.product, gpu))


def column_magnitudes(weights: Array, scales: Array, zeros: Array | None, attrs: Any) -> Array:
    """The largest magnitude of each column's weights, fp32 [N]. Arguments: operands and attributes of a PackedMatMul."""
    numbers = numbers_of(weights, attrs.code, attrs.K, attrs.block_size)
    dtype = DTYPES[attrs.code]
    numbers = numbers.astype(FP32) if is_float(dtype) else numbers.view(np.uint8)
    starts = np.arange(0, attrs.K, attrs.block_size)
    ends = [f.reduceat(numbers, starts, axis=1).astype(FP32) for f in (np.minimum, np.maximum)]
    rows, blocks = ends[0].shape
    each = [
        None if v is None else by_number(v, rows, blocks, 1, attrs.block_rows).astype(FP32) for v in (scales, zeros)
    ]
    assert each[0] is not None
    zero = np.float32(0 if is_float(dtype) else 1 << (bits_of(dtype) - 1)) if each[1] is None else each[1]
    found: Array = np.max([np.abs((end - zero) * each[0]) for end in ends], axis=(0, 2))
    return found


def inverted(magnitudes: Array) -> Array:
    """The factor that makes the largest magnitude of each column 127; 0 for columns of zeros."""
    return np.divide(np.float32(127), magnitudes, out=np.zeros_like(magnitudes), where=magnitudes > 0)


class PackedBytes(MatrixProduct):
    """PackedMatMul of rows that may be rounded to int8, on integer tensor cores."""

    name = "packed_8bit"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not op.attrs.rounded_rows:
            return "its rows must not be rounded to 8 bits (w4a8 lets them)"
        if not b.gpu.hopper:
            return f"it needs Hopper's wgmma and TMA (sm_90a), not {b.arch}"
        if (why := refusal(b, op)) is not None:
            return why
        if row_count(op) < LEAST_ROWS and not b.row_invariant:
            return f"it is for {LEAST_ROWS} rows and more, not {row_count(op)}"
        if op.attrs.K > row_bytes.DEEPEST:
            return f"its rows have {op.attrs.K} elements; {row_bytes.DEEPEST} are the most"
        zeros = b.graph.constant_value(op.input(3))
        if zeros is not None and zeros.dtype != np.uint8:
            return "its zero points are floats: their differences from codes would be rounded"
        stages = self.rows(b, op).ep.rendered
        if unknown := sorted({str(s[0]) for s in stages} - {"add", "mul", *STAGES}):
            return f"8-bit products have no stage {', '.join(unknown)}"
        if len(render.constants_of(stages)) > MAX_CONSTANTS:
            return "its stages have too many constants"
        return None

    def defer(self, b: Builder, op: Op) -> str | None:
        """Without timings, the cost model decides. Rows that are rounded have other bits: with ``row_invariant``, all are."""
        return None if b.row_invariant else costlier(b, op, self, PackedWgmma())

    def problem(self, b: Builder, op: Op) -> UnpackedProblem:
        return self._problem(b, op, self.rows(b, op))

    @staticmethod
    def _problem(b: Builder, op: Op, rows: Rows) -> UnpackedProblem:
        packed = described(b, op, rows)
        wide = up(packed.columns, 8)
        pitches = [conv_maps.pitch_of(x) for x in (rows.out, rows.residual) if x is not None]
        product = conv_problem.Problem(
            packed.rows, wide, (conv_problem.Source(1, 1, up(packed.depth, UNIT)),), packed.epilogue, "int8",
            map_dtype(rows.out.dtype), row_scale=True, dense=packed.columns == wide and set(pitches) == {wide},
        )  # fmt: skip
        return UnpackedProblem(packed, product)

    def offers(self, problem: UnpackedProblem, gpu: GpuFacts) -> Sequence[Offer]:
        return _offers(problem, gpu)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        rows = self.rows(b, op)
        problem = self._problem(b, op, rows)
        x, out = b.made(rows.x), b.made(rows.out)
        residual = None if rows.residual is None else b.made(rows.residual)
        numbers, scales = _rounded(b, op, x)
        constants = self._constants(b, op)
        magnitudes = b.kept.once(
            ("column magnitudes",),
            [a for a in constants if a is not None],
            lambda: column_magnitudes(*constants, op.attrs),
        )
        weights = self._unpacked(b, op, problem, inverted(magnitudes), x)
        self._multiply(
            b, op, problem, replace(rows, x=numbers, residual=residual, out=out), weights, scales, magnitudes, config
        )
        rows.finish(b, op, out)

    @staticmethod
    def _constants(b: Builder, op: Op) -> tuple[Array, Array, Array | None]:
        scales = b.graph.constant_value(op.input(2))
        assert scales is not None
        return (
            b.weights(op),
            scales.astype(FP32) if scales.dtype == FP64 else scales,
            b.graph.constant_value(op.input(3)),
        )

    @staticmethod
    def _unpacked(b: Builder, op: Op, problem: UnpackedProblem, inverse: Array, x: TensorView) -> TensorView:
        """Emits the launch that unpacks the weights to int8 ``[columns, depth]``. Its meaning reads the rows, so that it runs after
        them."""
        packed, name = problem.packed, op.outputs[0].name
        pitch = problem.product.k_steps * problem.product.block
        made = b.new(f"{name}.unpacked", INT8, (packed.columns, packed.depth), (pitch, 1))
        filled = np.zeros(up(packed.columns, 16), np.float32)
        filled[: len(inverse)] = inverse
        factors = b.constant(filled, f"{name}.inverse")
        operands = {**packed_operands(b, op, packed), "inverse": factors}
        attrs = {"code": packed.code, "K": packed.depth, "N": packed.columns, "block_size": packed.block}
        reads = [*map(operands.get, OPERANDS), factors.view((packed.columns,), (1,)), as_rows(x)]
        b.emit(
            op, dense.launch(packed, b.gpu, pitch), {**operands, "output": made}, "UnpackedBytes", attrs, reads, [made]
        )
        return made

    @staticmethod
    def _multiply(
        b: Builder, op: Op, problem: UnpackedProblem, rows: Rows, weights: TensorView, scales: TensorView, magnitudes: Array,
        config: Any,
    ) -> None:  # fmt: skip
        """Emits the product's launch. ``rows``: views with buffers, with an int8 ``x``."""
        product, columns = problem.product, problem.packed.columns
        channel = np.zeros((columns, 2), np.float32)
        channel[:, 0] = magnitudes / np.float32(127)
        if rows.ep.bias is not None:
            channel[:, 1] = rows.ep.bias
        pairs = b.constant(pad_channels(channel), f"{op.outputs[0].name}.channels")
        feed = conv_maps.Feed(rows.x, np.empty((columns, problem.packed.depth, 1, 1), np.int8), *conv_maps.POINTWISE)
        operands = {
            "weights": weights,
            "channel": pairs,
            "output": rows.out,
            "row_scales": scales,
            **hopper_launch.pixels([feed]),
        }
        if rows.residual is not None:
            operands["residual"] = rows.residual
        numbers = Requantize(low=-LARGEST, high=LARGEST)
        attrs = {
            "stages": product.epilogue, "residual_scale": 1.0, "residual_zero": 0, "low": -LARGEST, "high": LARGEST, "zero": 0,
            "output_dtype": rows.out.dtype,
        }  # fmt: skip
        reads = [
            as_rows(rows.x), weights, pairs.view((columns, 2), (2, 1)),
            None if rows.residual is None else as_rows(rows.residual), scales.view((problem.packed.rows,), (1,)),
        ]  # fmt: skip
        made = hopper_launch.launch(product, config, b.gpu, [feed], operands, requantize=numbers)
        hopper_launch.emit(b, op, made, product, config, operands, ("QuantizedMatMul", attrs, reads), as_rows(rows.out))


def _rounded(b: Builder, op: Op, x: TensorView) -> tuple[TensorView, TensorView]:
    """The rows of ``x`` as int8, and their scales (padded to an even number). One launch serves all products that read ``x``."""
    kept = [b.copies.get((x, *what)) for what in (_NUMBERS, _SCALES)]
    if kept[0] is not None and kept[1] is not None:
        return kept[0], kept[1]
    rows, depth = x.shape[:2]
    stored, name = up(depth, UNIT), op.outputs[0].name
    numbers = b.new(f"{name}.numbers", INT8, (rows, depth, 1, 1), (stored, 1, depth, depth))
    scales = b.new(f"{name}.row_scales", FP32, (up(rows, 2),))
    launch = row_bytes.launch(rows, depth, x.strides[0], stored, map_dtype(x.dtype), b.arch)
    written = [as_rows(numbers), scales.view((rows,), (1,))]
    b.emit(op, launch, {"x": x, "numbers": numbers, "scales": scales}, "RowBytes", {}, [as_rows(x)], written)
    b.copies[x, *_NUMBERS], b.copies[x, *_SCALES] = numbers, scales
    return numbers, scales
