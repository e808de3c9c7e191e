"""Tactics of matrix products: Hopper's kernel for constant weights, and a tiled one that runs anything."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from optdnn.ir.epilogue import Epilogue, channel_vector, plan_epilogue
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, products, row_major, up
from optdnn.kernels.conv import hopper_launch as conv_sm90
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.hopper import bias_of, finish
from optdnn.kernels.layout.views import reshaped
from optdnn.kernels.pointwise.pointwise import copy
from optdnn.kernels.tactic import DryRunConfigs
from optdnn.types import Array


def rows_of(x: TensorView, *, aligned: bool = True) -> TensorView | None:
    """A tensor of any rank as NCHW of 1 x 1 images, one per row, where its rows lie at one pitch (``aligned``: a multiple of 16 bytes)."""
    flat = reshaped(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    if flat is None:
        return None
    (n, k), (pitch, step) = flat.shape, flat.strides
    if k > 1 and step != 1:
        return None
    found = flat.view((n, k, 1, 1), (pitch if n > 1 else up(k, 8), 1, pitch, pitch))
    return found if not aligned or conv_maps.pitch_of(found) is not None else None


def rows_in_memory(x: TensorView, *, aligned: bool = True) -> tuple[int, ...]:
    """The order of the axes in which rows are taken: as they lie in memory, where their logical order has no one pitch.

    A product of [position, batch, feature] with a matrix reads [batch, position, feature] without a copy so, and its result
    keeps that order.
    """
    logical = tuple(range(len(x.shape)))
    if rows_of(x, aligned=aligned) is not None:
        return logical
    leading = sorted(logical[:-1], key=lambda i: (-x.strides[i] if x.shape[i] > 1 else 0, i))
    order = (*leading, logical[-1])
    return order if rows_of(reordered(x, order), aligned=aligned) is not None else logical


def reordered(x: TensorView, order: tuple[int, ...]) -> TensorView:
    """The axes in this order."""
    return x.view([x.shape[i] for i in order], [x.strides[i] for i in order])


def padded_rows(shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Strides of a tensor that is dense in this order of axes but for rows that start at multiples of 8 elements."""
    order = order or tuple(range(len(shape)))
    strides = [1] * len(shape)
    for i, s in zip(order[:-1], row_major([shape[i] for i in order[:-1]]), strict=True):
        strides[i] = s * up(shape[-1], 8)
    return tuple(strides)


class HopperGemm(DryRunConfigs):
    """MatMul and Gemm of 16-bit floats whose second operand is a constant matrix: a 1x1 convolution over rows."""

    name = "gemm_sm90"
    aligned: ClassVar[bool] = True
    """Whether rows must begin at multiples of 16 bytes."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        geometry = ((1, 1), (1, 1), (0, 0, 0, 0), (1, 1))
        why = conv_sm90.refuse(b.arch, products(b, op), [geometry])
        return self._unsuitable(b, op) or why

    @staticmethod
    def _unsuitable(b: Builder, op: Op) -> str | None:
        """Why the operator is no product of rows with a constant matrix."""
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

    def read(self, name: str) -> conv_sm90.Config | None:
        """See :class:`optdnn.kernels.tactic.Tactic`."""
        return conv_sm90.read(name)

    @staticmethod
    def factors(b: Builder, op: Op) -> tuple[Array, Array | None]:
        """The matrix (columns, depth), and the row that is added."""
        weight = b.graph.constant_value(op.inputs[1])
        assert weight is not None
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

    def place(self, b: Builder, op: Op) -> None:
        """Rows in the order in which the operand's lie, at a pitch that the kernel can write, unless the place is reserved."""
        assert op.inputs[0] is not None
        order = rows_in_memory(b.operand(op.inputs[0]), aligned=self.aligned)
        out, shape = op.outputs[0], op.outputs[0].type.static_shape
        if op.value not in b.reserved and ((self.aligned and shape[-1] % 8) or order != tuple(range(len(shape)))):
            b.place[op.value] = b.new(out.name, out.type.dtype, shape, padded_rows(shape, order))
        super().place(b, op)

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        assert op.inputs[0] is not None
        weight, bias = self.factors(b, op)
        ep = plan_epilogue(b.graph, op, channel_axis=-1)
        bias = ep.added_to(bias)
        left = b.operand(op.inputs[0])
        order = rows_in_memory(left, aligned=self.aligned)
        x = self._rows(b, op, reordered(left, order))
        residual = (
            self._rows(b, op, reordered(b.operand(ep.residual), order), added=True) if ep.residual is not None else None
        )
        target = b.target(op.value)
        between = target
        out = None if ep.rest else rows_of(reordered(target, order), aligned=self.aligned)
        if out is None or not self._storable(b, out):
            between = b.new(f"{op.outputs[0].name}.gemm", target.dtype, target.shape, padded_rows(target.shape, order))
            out = rows_of(reordered(between, order))
            assert out is not None
        used = self._launch(b, op, x, weight[:, :, None, None], bias, ep, residual, out, config)
        finish(b, op, ep, between, target)
        return used

    @staticmethod
    def _launch(
        b: Builder, op: Op, x: TensorView, weight: Array, bias: Array | None, ep: Epilogue, residual: TensorView | None, out: TensorView,
        config: Any,
    ) -> str:  # fmt: skip
        """The product as a 1x1 convolution of 1x1 images."""
        feed = conv_maps.Feed(x, weight, (1, 1), (0, 0, 0, 0), (1, 1))
        return conv_sm90.emit_conv(b, op, [feed], bias, ep, residual, out, config)

    @staticmethod
    def _storable(b: Builder, x: TensorView) -> bool:
        """Whether a launch can write these rows, or add them."""
        return conv_maps.storable(b, x)

    def _rows(self, b: Builder, op: Op, x: TensorView, *, added: bool = False) -> TensorView:
        found = rows_of(x, aligned=self.aligned)
        if found is None or (added and not self._storable(b, found)):
            dense = b.new(f"{op.outputs[0].name}.rows", x.dtype, x.shape, padded_rows(x.shape))
            copy(b, op, x, dense)
            found = rows_of(dense)
            assert found is not None
        return found
