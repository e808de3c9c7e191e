"""Tactics on vendors' libraries: convolutions by cuDNN, matrix products by cuBLASLt, with the epilogues that the libraries support.

They come after our own in every list, so the cost model never chooses them: only timings or a request (``--tactics``) do. Without
the library there is no such tactic. With a GPU, the library itself decides whether it can run an operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from optdnn.ir.epilogue import RESIDUAL, Epilogue, channel_vector, plan_epilogue, summed_dtype
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, channels_last, map_dtype, row_major
from optdnn.kernels.conv.fused import conv_attrs, finish, result_place, stage_operands
from optdnn.kernels.conv.hopper import bias_of, entering, has_computed_bias, image, planar
from optdnn.kernels.gemm.hopper import product_refusal
from optdnn.kernels.layout.views import reshaped
from optdnn.kernels.pointwise.pointwise import copied, emit_pointwise, shared_copy
from optdnn.kernels.tactic import Offer, Tactic
from optdnn.ops.base import Stage, attrs_dict
from optdnn.ops.fused import plain_stages
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.libraries.calls import Convolution, MatMul, Norm, Operation
from optdnn.runtime.cuda.libraries.handles import ranked
from optdnn.types import BF16, FP16, FP32, Array, normalize_axis

MOST = 6
"""Number of algorithms from a library's own ranking that are offered."""
_TYPES = (FP16, BF16, FP32)
_ACTIVATIONS: dict[tuple[object, ...], str] = {
    ("relu",): "relu", ("sigmoid",): "sigmoid", ("tanh",): "tanh", ("silu",): "swish", ("gelu",): "gelu",
    ("gelu_tanh",): "gelu_tanh",
}  # fmt: skip
"""Our rendering of a stage -> cuDNN's name. (cuDNN's clipped ReLU has two plans, and both take 2 to 100 times as long; we clip in
another launch.)"""


@dataclass(frozen=True)
class Rank:
    """A place in a library's own ranking."""

    place: int

    def __str__(self) -> str:
        return f"rank{self.place}"


class Called(Tactic):
    """Shared parts of the tactics of both libraries. :meth:`_add` adds the call and returns its operation."""

    row_invariant: ClassVar[bool] = False
    most: ClassVar[int] = MOST

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        """The first places of the library's ranking. If the library ranks fewer, the other configurations fail when they are timed;
        asking beforehand would be as slow."""
        return tuple(Offer(Rank(i), row_invariant=False) for i in range(self.most))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        """See :class:`~optdnn.kernels.tactic.Tactic`."""
        self._add(b, op, config.place)

    def defer(self, b: Builder, op: Op) -> str | None:
        """The reason if the library has no algorithm for the operation, as far as it can be asked."""
        tried = b.fork()
        self.place(tried, op)
        operation = self._add(tried, op, 0)
        return f"{self.provider} has no algorithm for it" if ranked(operation) == 0 else None

    def _add(self, b: Builder, op: Op, rank: int) -> Operation:
        raise NotImplementedError


def _accepts(stages: Sequence[render.Stage], activations: Sequence[tuple[object, ...]]) -> bool:
    """Whether the stages are at most one addition of a tensor, then at most one activation."""
    rest = list(stages[1:] if stages[:1] == [("add",)] else stages)
    return not rest or (len(rest) == 1 and tuple(rest[0]) in activations)


class CudnnConv(Called):
    """Convolutions over one or two spatial axes of channels-last floats, with a bias, the addition of a tensor and one activation."""

    name = "conv_cudnn"
    provider = "cudnn"

    def refuse(self, b: Builder, op: Op) -> str | None:
        t, weight = op.outputs[0].type, b.graph.constant_value(op.inputs[1])
        if weight is None or weight.ndim not in (3, 4):
            return "its weights are not constant, or of three spatial axes"
        if t.dtype not in _TYPES or weight.dtype != t.dtype:
            return "its type is not fp16, bf16 or fp32"
        if has_computed_bias(b, op):
            return "its bias is not constant"
        if 0 in t.static_shape or 0 in weight.shape:
            return "it is empty"
        if t.dtype != FP32 and t.static_shape[1] % 8:
            return "its number of channels is not a multiple of 8"
        return None

    def _add(self, b: Builder, op: Op, rank: int) -> Operation:
        a, weight = op.attrs, b.weights(op)
        # cuDNN only has a fast kernel for grouped convolutions without an epilogue: one of our kernels computes the rest.
        whole = a.group == 1
        known = tuple(_ACTIVATIONS) if whole else ()
        ep = plan_epilogue(
            b.graph, op, channel_axis=1, accepts=lambda s: whole and _accepts(s, known), allow_bias=whole
        )
        bias = ep.added_to(bias_of(b, op))
        later, bias = (None, bias) if whole else (bias, None)
        weight, strides, pads, dilations = planar(weight, a)
        x = b.made(_packed(b, op, image(entering(b, op))))
        target = b.target(op.value)
        out = image(target)
        fits = later is None and out.is_like(channels_last(out.shape, out.shape[1]))
        between = b.made(result_place(b, op, ep, target, fits, target.shape[1]))
        y = image(between)
        residual = b.made(_packed(b, op, image(b.operand(ep.residual)))) if ep.residual is not None else None
        k, c, r, s = weight.shape
        w = b.constant(np.ascontiguousarray(weight.transpose(0, 2, 3, 1)), f"{op.outputs[0].name}.weights")
        w = w.view((k, c, r, s), (c * r * s, 1, s * c, c))
        stages = ["bias"] if bias is not None else []
        stages += ["add" if stage == ("add",) else _ACTIVATIONS[tuple(stage)] for stage in ep.rendered]
        operation = Convolution(
            map_dtype(target.dtype), x.shape, _strides(x), w.shape, _strides(w), y.shape, _strides(y), strides, pads, dilations,
            tuple(stages), _strides(residual) if residual is not None else (), rank,
        )  # fmt: skip
        operands = {"x": x, "w": w, "y": y}
        if bias is not None:
            operands["bias"] = b.constant(bias.astype(target.dtype), f"{op.outputs[0].name}.bias")
        if residual is not None:
            operands["z"] = residual
        attrs = conv_attrs((strides, pads, dilations), a.group, ep.stages)
        reads = [x, w, operands.get("bias"), *stage_operands(b, ep, residual)]
        b.call(op, operation, operands, "Conv", attrs, reads, [y])
        if later is None:
            finish(b, op, ep, between, target)
        else:
            _after(b, op, ep, later, between, target)
        return operation


def _after(b: Builder, op: Op, ep: Epilogue, bias: Array, between: TensorView, target: TensorView) -> None:
    """Emits the stages that the convolution did not compute: the bias, then the rest of the epilogue."""
    column = (1, len(bias), *(1,) * (len(target.shape) - 2))
    placed = b.constant(bias.astype(target.dtype).reshape(column), f"{op.outputs[0].name}.bias")
    operands = [between, *map(b.operand, ep.rest_operands), placed]
    moved = [replace(s, args=tuple(x - 1 if x is not None and x < 0 else x for x in s.args)) for s in ep.rest]
    emit_pointwise(b, op, [Stage("Add", (-1, len(operands) - 1)), *moved], operands, target)


def _of_half_factors(op: Op) -> str | None:
    """Why a product in tf32 with factors of fp16 does not fit: its stages read fp32 sums, which fp16 may not hold."""
    return "it would store its sums in fp16" if op.attrs.factors == "fp16" else None


class CublasLtGemm(Called):
    """MatMul and Gemm of rows with a constant matrix, with a bias, the addition of a tensor, and ReLU or GELU (tanh)."""

    name = "gemm_cublaslt"
    provider = "cublaslt"

    def refuse(self, b: Builder, op: Op) -> str | None:
        dtype, weight = summed_dtype(b.graph, op), b.graph.constant_value(op.inputs[1])
        if (why := product_refusal(b, op)) is not None:
            return why
        if weight is None or dtype not in _TYPES or weight.dtype != dtype:
            return "its type is not fp16, bf16 or fp32"
        return _of_half_factors(op)

    def _add(self, b: Builder, op: Op, rank: int) -> Operation:
        weight = b.weights(op)
        alpha, bias = 1.0, None
        if op.kind == "Gemm":
            a = op.attrs
            weight, alpha = (weight if a.transB else weight.T), float(a.alpha)
            given = bias_of(b, op)
            if given is not None:
                bias = channel_vector(given, op.outputs[0].type.static_shape, -1)
                assert bias is not None
                bias = bias * np.float32(a.beta)
        else:
            weight = weight.T
        ep = plan_epilogue(b.graph, op, channel_axis=-1, accepts=lambda s: _accepts(s, (("relu",), ("gelu_tanh",))))
        bias = ep.added_to(bias)
        x = _rows(b, op, b.operand(op.inputs[0]))
        residual = _rows(b, op, b.operand(ep.residual)) if ep.residual is not None else None
        target = b.target(op.value)
        between, out = target, None if ep.rest else _matrix(target)
        if out is None:
            between = b.new(f"{op.outputs[0].name}.gemm", weight.dtype, target.shape)
            out = _matrix(between)
            assert out is not None
        (m, k), n = x.shape, weight.shape[0]
        w = b.constant(np.ascontiguousarray(weight), f"{op.outputs[0].name}.weights")
        operands = {"a": x, "b": w, "d": out}
        if bias is not None:
            operands["bias"] = b.constant(bias.astype(weight.dtype), f"{op.outputs[0].name}.bias")
        if residual is not None:
            operands["c"] = residual
        activation = next((_ACTIVATIONS[tuple(s)] for s in ep.rendered if s != ("add",)), "")
        operation = MatMul(
            map_dtype(weight.dtype), m, n, k, _pitch(x), k, _pitch(out), alpha=alpha, bias=bias is not None,
            ldc=0 if residual is None else _pitch(residual), activation=activation, algorithm=rank,
        )  # fmt: skip
        attrs = {"alpha": alpha, "beta": 1.0, "transA": False, "transB": True, "prologue": (),
                 "epilogue": plain_stages(ep.stages), "arity": RESIDUAL}  # fmt: skip
        reads = [x, w, operands.get("bias"), *stage_operands(b, ep, residual)]
        b.call(op, operation, operands, "Gemm", attrs, reads, [out])
        finish(b, op, ep, between, target)
        return operation


class CublasLtBatched(Called):
    """MatMul of two computed stacks of matrices with a constant stride between matrices."""

    name = "matmul_cublaslt"
    provider = "cublaslt"

    def refuse(self, b: Builder, op: Op) -> str | None:
        t = op.outputs[0].type
        if op.kind != "MatMul" or None in op.inputs[:2]:
            return "it is not a plain product"
        if t.dtype not in _TYPES or 0 in t.static_shape or len(t.static_shape) < 2:
            return "its type is not fp16, bf16 or fp32, or it is not a matrix"
        if op.attrs.prologue:
            return "it has a prologue"
        if (why := _of_half_factors(op)) is not None:
            return why
        if self._operands(b, op) is None:
            return "its matrices do not have a constant stride, or are not stored in rows"
        return None

    @staticmethod
    def _operands(b: Builder, op: Op) -> tuple[TensorView, TensorView, bool] | None:
        """Both stacks as [batch, rows, columns], and whether the second one is transposed in memory; None if they do not fit."""
        left, right = (b.operand(v) for v in op.inputs[:2] if v is not None)
        if left.dtype != op.outputs[0].type.dtype or right.dtype != left.dtype:
            return None
        if left.shape[:-2] != right.shape[:-2] or min(len(left.shape), len(right.shape)) < 2:
            return None
        found = []
        for x in (left, right):
            batch = math.prod(x.shape[:-2])
            leading = reshaped(x.view(x.shape[:-2], x.strides[:-2]), (batch,))
            if leading is None:
                return None
            found.append(x.view((batch, *x.shape[-2:]), (*leading.strides, *x.strides[-2:])))
        one, two = found
        turned = two.strides[1] == 1 and two.strides[2] >= two.shape[1]
        rows = one.strides[2] == 1 and one.strides[1] >= one.shape[2]
        if not rows or not (turned or (two.strides[2] == 1 and two.strides[1] >= two.shape[2])):
            return None
        return one, two, turned

    def _add(self, b: Builder, op: Op, rank: int) -> Operation:
        found = self._operands(b, op)
        assert found is not None
        left, right, turned = found
        ep = plan_epilogue(b.graph, op, channel_axis=-1, accepts=lambda s: not s, allow_bias=False)
        target = b.target(op.value)
        between = target
        if ep.rest or not target.dense:
            between = b.new(f"{op.outputs[0].name}.product", target.dtype, target.shape)
        (batch, m, k), n = left.shape, right.shape[2]
        out = between.view((batch, m, n), row_major((batch, m, n)))
        pitch = right.strides[2] if turned else right.strides[1]
        strides = (left.strides[0], right.strides[0], 0, m * n)
        operation = MatMul(
            map_dtype(target.dtype), m, n, k, left.strides[1], pitch, n, turned, batch, strides, algorithm=rank
        )
        operands = {"a": left, "b": right, "d": out}
        attrs = {"prologue": (), "epilogue": (), "arity": 2}
        b.call(op, operation, operands, "MatMul", attrs, [left, right], [out])
        finish(b, op, ep, between, target)
        return operation


class CudnnNorm(Called):
    """LayerNormalization and RMSNormalization of dense rows."""

    name = "norm_cudnn"
    provider = "cudnn"
    most = 1

    def refuse(self, b: Builder, op: Op) -> str | None:
        t = op.outputs[0].type
        shape = t.static_shape
        if t.dtype not in _TYPES or not shape or 0 in shape:
            return "its type is not fp16, bf16 or fp32, or it is empty"
        if normalize_axis(op.attrs.axis, len(shape)) != len(shape) - 1:
            return "its rows are not along the last axis"
        if any(b.graph.uses(v) for v in op.values[1:]):
            return "its statistics are also outputs"
        for value in op.inputs[1:]:
            array = b.graph.constant_value(value)
            if value is not None and (array is None or array.shape != shape[-1:]):
                return "its scale and bias are not constant rows"
        x = b.operand(op.inputs[0])
        if x.dtype != t.dtype or not x.dense or (op.value in b.reserved and not b.reserved[op.value].dense):
            return "its rows are not contiguous"
        return None

    def _add(self, b: Builder, op: Op, rank: int) -> Operation:
        x, y = b.operand(op.inputs[0]), b.target(op.value)
        size = x.shape[-1]
        layer = op.kind == "LayerNormalization"
        operation = Norm(map_dtype(y.dtype), "layer" if layer else "rms", x.size // size, size, float(op.attrs.epsilon))
        operands = {"x": x, "y": y}
        for name, value, default in (("scale", op.input(1), 1.0), ("bias", op.input(2), 0.0)):
            if name == "scale" or layer:
                array = b.graph.constant_value(value)
                filled = np.full(size, default) if array is None else array
                operands[name] = b.constant(filled.astype(np.float32), f"{op.outputs[0].name}.{name}")
        reads = [x, operands["scale"], *([operands["bias"]] if layer else [])]
        b.call(op, operation, operands, op.kind, attrs_dict(op.attrs), reads, [y])
        return operation


# ---------------------------------------------------------------- operands


def _strides(x: TensorView) -> tuple[int, ...]:
    """Strides of ``x``, with those of the dense channels-last order on axes of one element: libraries need positive strides."""
    dense = channels_last(x.shape, x.shape[1])
    return tuple(d if n == 1 else s for n, s, d in zip(x.shape, x.strides, dense, strict=True))


def _packed(b: Builder, op: Op, x: TensorView) -> TensorView:
    """``x`` (logical NCHW) in channels-last order without padding: itself, or a copy that is still to be made and that all readers share."""
    wanted = channels_last(x.shape, x.shape[1])
    pixels = all(n == 1 or s == d or d == 0 for n, s, d in zip(x.shape, x.strides, wanted, strict=True))
    if pixels and x.byte_offset % 16 == 0:
        return x
    return shared_copy(b, op, x, "packed", wanted)


def _matrix(x: TensorView) -> TensorView | None:
    """A tensor as a matrix of rows, if the rows have one pitch and no gaps inside; else None."""
    flat = reshaped(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    if flat is None or (flat.shape[1] > 1 and flat.strides[1] != 1) or flat.byte_offset % 16:
        return None
    return flat if flat.shape[0] == 1 or flat.strides[0] >= flat.shape[1] else None


def _rows(b: Builder, op: Op, x: TensorView) -> TensorView:
    found = _matrix(x)
    if found is None:
        found = _matrix(copied(b, op, x, "rows"))
        assert found is not None
    return found


def _pitch(x: TensorView) -> int:
    rows, columns = x.shape
    return x.strides[0] if rows > 1 else columns
