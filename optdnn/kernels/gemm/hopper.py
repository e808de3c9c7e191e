"""The tactic of products with a constant matrix on Hopper's kernel, and helpers that other tactics of products share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from optdnn.ir.epilogue import Epilogue, channel_vector, plan_epilogue, summed_dtype
from optdnn.ir.graph import Op
from optdnn.kernels.builder import NOWHERE, Builder, TensorView, products, row_major, up
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.fused import Convolution, ConvolutionKernel, finish
from optdnn.kernels.conv.hopper import bias_of, is_half
from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.layout.views import reshaped
from optdnn.kernels.pointwise.pointwise import copied_later
from optdnn.types import Array


def rows_of(x: TensorView, *, aligned: bool = True, unit: int = 8) -> TensorView | None:
    """A tensor of any rank as NCHW of 1 x 1 images, one per row; None if its rows have no constant pitch. ``aligned``:
    the pitch must be a multiple of 16 bytes. ``unit``: a single row's pitch is a multiple of this many elements, except of a
    tensor without a buffer yet, which has the elements that its strides say."""
    flat = reshaped(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    if flat is None:
        return None
    (n, k), (pitch, step) = flat.shape, flat.strides
    if k > 1 and step != 1:
        return None
    found = flat.view((n, k, 1, 1), (pitch if n > 1 or x.buffer == NOWHERE else up(k, unit), 1, pitch, pitch))
    return found if not aligned or conv_maps.pitch_of(found) is not None else None


def rows_in_memory(x: TensorView, *, aligned: bool) -> tuple[int, ...]:
    """The order of axes in which a product takes rows: memory order, if the logical order has no constant pitch.

    So a product of [position, batch, feature] with a matrix reads [batch, position, feature] without a copy, and its result
    keeps that order.
    """
    logical = tuple(range(len(x.shape)))
    if rows_of(x, aligned=aligned) is not None:
        return logical
    leading = sorted(logical[:-1], key=lambda i: (-x.strides[i] if x.shape[i] > 1 else 0, i))
    order = (*leading, logical[-1])
    return order if rows_of(x.permuted(order), aligned=aligned) is not None else logical


def padded_rows(shape: tuple[int, ...], order: tuple[int, ...] | None = None, unit: int = 8) -> tuple[int, ...]:
    """Strides of a tensor that is dense in this order of axes, except that rows start at multiples of ``unit`` elements."""
    order = order or tuple(range(len(shape)))
    strides = [1] * len(shape)
    for i, s in zip(order[:-1], row_major([shape[i] for i in order[:-1]]), strict=True):
        strides[i] = s * up(shape[-1], unit)
    return tuple(strides)


def product_refusal(b: Builder, op: Op) -> str | None:
    """Why the operator is no product of rows with a constant matrix, or None."""
    weight = b.graph.constant_value(op.inputs[1])
    if weight is None or weight.ndim != 2:
        return "its second operand is not a constant matrix"
    if op.kind == "Gemm" and op.attrs.transA:
        return "its first operand is transposed"
    if op.attrs.prologue:
        return "it has a prologue"
    shape = op.outputs[0].type.static_shape
    if (
        not shape
        or 0 in shape
        or 0 in weight.shape
        or op.inputs[0] is None
        or not b.graph.type(op.inputs[0]).static_shape[:-1]
    ):
        return "it is not a product of rows with a matrix"
    if op.kind == "Gemm" and op.input(2) is not None:
        bias = bias_of(b, op)
        if bias is None or channel_vector(bias, shape, -1) is None:
            return "its third operand is not a constant row"
    return None


@dataclass(frozen=True)
class Rows:
    """Operands and result of a product of rows with a matrix, as NCHW tensors of 1 x 1 images. Fields as of
    :class:`Convolution`."""

    ep: Epilogue
    x: TensorView
    residual: TensorView | None
    out: TensorView
    between: TensorView

    def finish(self, b: Builder, op: Op, out: TensorView) -> None:
        """Add the rest of the epilogue after the launch that writes ``out``."""
        between = self.between if self.between.buffer == out.buffer else replace(self.between, buffer=out.buffer)
        finish(b, op, self.ep, between, b.target(op.value))


class MatrixProduct(ConvolutionKernel):
    """Products of rows with a constant matrix: a 1x1 convolution of 1x1 images, one per row."""

    aligned: ClassVar[bool] = True
    """Whether rows must begin at multiples of 16 bytes."""

    @staticmethod
    def factors(b: Builder, op: Op) -> tuple[Array, Array | None]:
        """The matrix (columns, depth), and the row that is added."""
        weight = b.weights(op)
        bias: Array | None = None
        if op.kind == "Gemm":
            weight = weight if op.attrs.transB else weight.T
            if op.attrs.alpha != 1.0:
                weight = (weight.astype(np.float32) * np.float32(op.attrs.alpha)).astype(weight.dtype)
            given = bias_of(b, op)
            if given is not None:
                row = channel_vector(given, op.outputs[0].type.static_shape, -1)
                assert row is not None
                bias = row * np.float32(op.attrs.beta)
        else:
            weight = weight.T
        return weight, bias

    def _strides(self, b: Builder, op: Op) -> tuple[int, ...] | None:
        """Strides of the result if it has no place yet: rows in the operand's order, at a pitch that the kernel can write. None:
        those of its type."""
        order, shape = self._order(b, op), op.outputs[0].type.static_shape
        pitched = (self.aligned and shape[-1] % 8) or order != tuple(range(len(shape)))
        return padded_rows(shape, order) if pitched else None

    def _order(self, b: Builder, op: Op) -> tuple[int, ...]:
        """The order of the axes in which rows are taken."""
        return rows_in_memory(b.source(op.inputs[0]), aligned=self.aligned)

    def place(self, b: Builder, op: Op) -> None:
        """Rows in the operand's order, unless the place is reserved."""
        b.target(op.value, self._strides(b, op))

    def convolution(self, b: Builder, op: Op) -> Convolution:
        weight, bias = self.factors(b, op)
        rows = self.rows(b, op)
        feed = conv_maps.Feed(rows.x, weight[:, :, None, None], *conv_maps.POINTWISE)
        return Convolution((feed,), rows.ep.added_to(bias), rows.ep, rows.residual, rows.out, rows.between)

    def epilogue(self, b: Builder, op: Op) -> Epilogue:
        """The stages that the launch applies."""
        return plan_epilogue(b.graph, op, channel_axis=-1, allow_wide=True)

    def rows(self, b: Builder, op: Op) -> Rows:
        """The operands and the result in place, or as copies that are still to be made."""
        ep, order = self.epilogue(b, op), self._order(b, op)
        x, residual = self._rows(b, op, b.source(op.inputs[0]).permuted(order)), None
        if ep.residual is not None:
            residual = self._rows(b, op, b.source(ep.residual).permuted(order), added=True)
        between = b.result(op.value, self._strides(b, op))
        out = None if ep.rest else rows_of(between.permuted(order), aligned=self.aligned)
        if out is None or not self.stored(b, out):
            name, shape = f"{op.outputs[0].name}.gemm", between.shape
            dtype = ep.dtype(summed_dtype(b.graph, op)) if ep.rest else between.dtype
            between = b.later(name, dtype, shape, padded_rows(shape, order))
            out = rows_of(between.permuted(order))
            assert out is not None
        return Rows(ep, x, residual, out, between)

    def _rows(self, b: Builder, op: Op, x: TensorView, *, added: bool = False) -> TensorView:
        """Rows that the kernel can read: those of ``x``, or of a copy that is still to be made."""
        found = rows_of(x, aligned=self.aligned)
        if found is None or (added and not self.stored(b, found)):
            found = rows_of(copied_later(b, op, x, "rows", padded_rows(x.shape)))
            assert found is not None
        return found


class HopperGemm(hopper_launch.HopperKernel, MatrixProduct):
    """MatMul and Gemm of 16-bit floats whose second operand is a constant matrix."""

    name = "gemm_sm90"

    def refuse(self, b: Builder, op: Op) -> str | None:
        why = hopper_launch.refuse(b.arch, products(b, op), [((1, 1), *conv_maps.POINTWISE)], parts=self.parts)
        return product_refusal(b, op) or why

    def epilogue(self, b: Builder, op: Op) -> Epilogue:
        """The stages that the launch applies, also with factors and numbers per column. Its meaning has images of one pixel, where
        these are columns."""
        ep = plan_epilogue(b.graph, op, channel_axis=-1, allow_scale=True, allow_numbers=is_half(op), allow_wide=True)
        ep.constants = [c if c.size == 1 else c.reshape(-1, 1, 1) for c in ep.constants]
        return ep

    def output_with_moments(self, b: Builder, op: Op) -> TensorView | None:
        """View of the output whose moments the launch can write, as images of 1 x 1; None if it cannot write moments."""
        c = self.convolution(b, op)
        return None if c.ep.rest else c.out

    def launch(self, b: Builder, op: Op, c: Convolution, problem: Problem, config: Any) -> None:
        """Add the launch. It also writes the moments of its rows if a later launch normalizes them
        (:mod:`optdnn.kernels.gemm.normed`)."""
        moments = b.together.get(op.id)
        problem = replace(problem, moments=moments is not None)
        hopper_launch.emit_conv(b, op, c, problem, config, moments, self.angles(b, op))

    def angles(self, b: Builder, op: Op) -> TensorView | None:
        """The angles by which the launch rotates heads of its result (:mod:`optdnn.kernels.gemm.turned`); None: it rotates none."""
        return None
