"""Linear ops with weights (Conv, ConvTranspose, Gemm, MatMul), which absorb scales and shifts.

:class:`Linear` finds an op's channels, constant weights and constant bias. It computes the weights and bias that absorb a scale and
shift per channel, after or before the op. Everything is computed in float64 and rounded once.

A product of two matrices with a bias is a Gemm: a MatMul that absorbs a shift becomes a Gemm. A batched product stays a MatMul,
which keeps the rank, followed by an Add of the bias; fuse_epilogue makes this Add its first stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import Attrs
from optdnn.ops.gemm import GemmAttrs
from optdnn.passes.base import Miss
from optdnn.passes.support.affine import IDENTITY, Affine, round_to
from optdnn.passes.support.facts import operand
from optdnn.passes.support.scaled_integers import ScaledIntegers
from optdnn.types import FP64, Array, DType

LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


@dataclass(frozen=True)
class Absorbed:
    """A linear op that has absorbed scales and shifts. If ``weight`` or ``bias`` is None, this operand stays as it is.

    The bias of a MatMul becomes an Add after it."""

    linear: Linear
    kind: str
    attrs: Attrs
    weight: Array | None
    bias: Array | None
    integers: ScaledIntegers | None = None
    """The weights, if they are dequantized."""

    def add_to(self, patch: Patch, x: Value) -> Value:
        """Add the new op to a patch, reading ``x``; returns its value."""
        old = self.linear.op
        arity = old.definition.arity
        operands: list[Value | None] = [x, *old.inputs[1:]]
        own, extra = operands[:arity], operands[arity:]
        own += [None] * (3 - len(own)) if self.kind != "MatMul" else []
        if self.weight is not None:
            own[1] = patch.constant(self.weight, "weight")
        if self.integers is not None:
            own[1] = self.integers.add_to(patch)
        bias = None if self.bias is None else patch.constant(self.bias, "bias")
        if self.kind != "MatMul" and bias is not None:
            own[2] = bias
        while own and own[-1] is None and not extra:
            own.pop()
        product = patch.add(self.kind, [*own, *extra], self.attrs)
        return product if self.kind != "MatMul" or bias is None else patch.add("Add", [product, bias])


@dataclass(frozen=True)
class Linear:
    """A linear op. ``axis`` and ``channels`` describe its result, ``in_axis`` and ``in_channels`` its operand 0.

    ``weight`` and ``bias`` are the constant arrays, or None. ``integers``: the weights, if they are dequantized constants.
    ``bias_unknown``: there is a bias that is not constant.
    """

    op: Op
    axis: int
    channels: int
    in_axis: int
    in_channels: int
    weight: Array | None
    bias: Array | None
    bias_unknown: bool
    can_hold_bias: bool
    dtype: DType
    integers: ScaledIntegers | None = None

    @staticmethod
    def of(graph: Graph, op: Op) -> Linear | None:
        """The description of ``op``; None if it is no linear op or its numbers of channels are not known."""
        w_type = graph.type(op.inputs[1]) if op.kind in LINEAR and op.inputs[1] is not None else None
        if w_type is None or not w_type.is_static or len(w_type.dims) < 2:
            return None
        dims, a = w_type.static_shape, op.attrs
        rank = op.outputs[0].type.rank
        x_rank = None if op.inputs[0] is None else graph.type(op.inputs[0]).rank
        if rank is None or x_rank is None:
            return None
        if op.kind == "MatMul" and x_rank < 2:
            return None
        holds = op.kind != "MatMul" or (rank == 2 and x_rank == 2 and len(dims) == 2 and not a.prologue)
        if op.kind == "Conv":
            axes = (1, dims[0], 1, dims[1] * a.group)
        elif op.kind == "ConvTranspose":
            axes = (1, dims[1] * a.group, 1, dims[0])
        elif op.kind == "Gemm":
            k, n = reversed(dims) if a.transB else dims
            axes = (1, n, 0 if a.transA else 1, k)
        else:
            axes = (rank - 1, dims[-1], x_rank - 1, dims[-2])
        bias = op.input(2) if op.kind != "MatMul" else None
        weight, known = graph.constant_value(op.inputs[1]), graph.constant_value(bias)
        integers = None if weight is not None else ScaledIntegers.of(graph, operand(op, 1), _output_axis(op))
        return Linear(op, *axes, weight, known, bias is not None and known is None, holds, w_type.dtype, integers)

    # ------------------------------------------------------------------ a chain after the op

    def refuses_after(self, chain: Affine) -> str | None:
        """The reason why a scale and shift after the op cannot be absorbed, or None."""
        if self.op.attrs.epilogue:
            return f"{self.op.name} already has the epilogue {self.op.attrs.epilogue[-1].kind}"
        if chain.scales and self.weight is None:
            if self.integers is None or (self.op.kind == "ConvTranspose" and self.op.attrs.group > 1):
                return f"the weights of {self.op.name} are not constant"
            if isinstance(scaled := self.integers.times(chain.scale), str):
                return f"{self.op.name} keeps its quantized weights: {scaled}"
        if self.bias_unknown:
            return f"the bias of {self.op.name} is not constant"
        if chain.shifts and not self.can_hold_bias:
            return f"{self.op.name} has no bias operand that could hold the shift, which stays an addition"
        return None

    def absorb_after(self, chain: Affine) -> Absorbed | Miss:
        """Absorb the scale ``s`` and shift ``t`` of the result: ``W' = W s``, ``b' = b s + t``, along the output channels."""
        weight = None if self.weight is None else self._scaled(chain.scale, chain.scales)
        bias = None
        if chain.shifts or (self.bias is not None and chain.scales):
            bias = np.broadcast_to(self._bias() * chain.scale + chain.shift, self._bias_shape())
        absorbed = self._absorbed(weight, bias)
        if self.integers is None or not chain.scales or isinstance(absorbed, Miss):
            return absorbed
        scaled = self.integers.times(chain.scale)
        return Miss(scaled) if isinstance(scaled, str) else replace(absorbed, integers=scaled)

    def _scaled(self, scale: Array, scales: bool) -> Array | None:
        """The weights with each output channel scaled, including Gemm's alpha; None if nothing changes."""
        assert self.weight is not None
        a, w = self.op.attrs, self.weight
        if not scales and getattr(a, "alpha", 1.0) == 1.0:
            return None
        wide = w.astype(FP64)
        if self.op.kind == "Gemm":
            return np.asarray(a.alpha * wide * (scale.reshape(-1, 1) if a.transB else scale))
        if self.op.kind == "MatMul" or scale.ndim == 0:
            return wide * scale
        if self.op.kind == "Conv":
            return wide * _column(scale, w.ndim)
        return by_group(wide, scale.reshape(a.group, 1, -1), a.group)

    # ------------------------------------------------------------------ a chain before the op

    def refuses_before(self, chain: Affine) -> str | None:
        """The reason why a scale and shift of operand 0 cannot be absorbed, or None."""
        a = self.op.attrs
        if self.weight is None:
            return f"the weights of {self.op.name} are not constant"
        if a.prologue:
            return f"{self.op.name} already has the prologue {a.prologue[0].kind}"
        if not chain.shifts:
            return None
        if self.op.kind == "Conv" and (any(a.pads) or a.auto_pad != "NOTSET"):
            return f"{self.op.name} pads with zeros, which the shift would have to change"
        if self.op.kind == "ConvTranspose":
            return f"{self.op.name} adds a different number of terms near the border"
        if self.bias_unknown:
            return f"the bias of {self.op.name} is not constant"
        if self.op.kind == "MatMul" and self.weight.ndim > 2:
            return f"{self.op.name} has a stack of matrices, and the shift would differ between them"
        if a.epilogue and self.op.kind == "MatMul":
            return f"{self.op.name} already has the epilogue {a.epilogue[-1].kind}"
        return None

    def absorb_before(self, chain: Affine) -> Absorbed | Miss:
        """Absorb the scale ``s`` and shift ``t`` of operand 0: ``W' = W s`` along the input channels, ``b' = b + W t``."""
        assert self.weight is not None
        a, w = self.op.attrs, self.weight.astype(FP64)
        scale = np.broadcast_to(chain.scale, (self.in_channels,))
        shift = np.broadcast_to(chain.shift, (self.in_channels,))
        moved: Array
        if self.op.kind == "Conv":
            weight = by_group(w, scale.reshape(a.group, 1, -1), a.group)
            moved = by_group(w, shift.reshape(a.group, 1, -1), a.group).reshape(w.shape[0], -1).sum(1)
        elif self.op.kind == "ConvTranspose":
            weight, moved = w * _column(scale, w.ndim), np.zeros(())
        elif self.op.kind == "Gemm":
            w = a.alpha * w
            weight = w * (scale if a.transB else scale[:, None])
            moved = (w if a.transB else w.T) @ shift
        else:
            weight, moved = w * scale[:, None], shift @ w if chain.shifts else np.zeros(())
        bias = np.broadcast_to(self._bias() + moved, self._bias_shape()) if chain.shifts else None
        return self._absorbed(weight, bias)

    # ------------------------------------------------------------------ both

    def _bias(self) -> Array:
        """The bias in float64, including Gemm's beta; 0 if there is no bias."""
        beta = getattr(self.op.attrs, "beta", 1.0)
        return np.zeros(()) if self.bias is None else beta * self.bias.astype(FP64)

    def _bias_shape(self) -> tuple[int, ...]:
        """The shape of the new bias: (channels,), broadcast with the shape of the present bias."""
        return np.broadcast_shapes((self.channels,), () if self.bias is None else self.bias.shape)

    def _absorbed(self, weight: Array | None, bias: Array | None) -> Absorbed | Miss:
        rounded = [None if wide is None else round_to(wide, self.dtype) for wide in (weight, bias)]
        for what, wide, narrow in zip(("weights", "bias"), (weight, bias), rounded, strict=True):
            if wide is not None and narrow is None:
                return Miss(f"the {what} of {self.op.name} would overflow {self.dtype}")
        a: Any = self.op.attrs
        if self.op.kind == "Gemm":
            a = replace(a, alpha=a.alpha if weight is None else 1.0, beta=a.beta if bias is None else 1.0)
        if self.op.kind == "MatMul" and bias is not None and self.can_hold_bias:
            return Absorbed(self, "Gemm", GemmAttrs(), rounded[0], rounded[1])
        return Absorbed(self, self.op.kind, a, rounded[0], rounded[1])


def absorb_scalars(graph: Graph, op: Op) -> Absorbed | Miss | None:
    """The Gemm ``op`` with alpha and beta multiplied into its constants; None if there is nothing to do."""
    linear = Linear.of(graph, op)
    if linear is None or op.kind != "Gemm":
        return None
    a, alpha, beta = op.attrs, linear.weight is not None, linear.bias is not None
    if not ((a.alpha != 1.0 and alpha) or (a.beta != 1.0 and beta)):
        return None
    weight = linear._scaled(IDENTITY.scale, False) if alpha else None
    return linear._absorbed(weight, linear._bias() if beta and a.beta != 1.0 else None)


def _output_axis(op: Op) -> int:
    """The axis of the output channels of an op's weights (of one group, for a ConvTranspose)."""
    if op.kind == "Gemm":
        return 0 if op.attrs.transB else 1
    return {"Conv": 0, "ConvTranspose": 1}.get(op.kind, -1)


def by_group(weights: Array, factors: Array, group: int) -> Array:
    """Weights [rows, columns, …] times ``factors`` of shape (group, 1 or rows per group, columns)."""
    grouped = weights.reshape(group, -1, *weights.shape[1:])
    return np.asarray((grouped * _column(factors, grouped.ndim)).reshape(weights.shape))


def _column(channels: Array, rank: int) -> Array:
    """``channels`` with axes of size 1 appended up to ``rank``."""
    return channels.reshape(channels.shape + (1,) * (rank - channels.ndim))
