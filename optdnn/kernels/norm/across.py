"""Norms of tokens between products over tokens. The norms read or write transposed tensors, so that no launch has to transpose them.

A network that mixes tokens multiplies transposed rows by a matrix. The norm before the product writes its result transposed, as the
product reads it. The norm after the product reads the transposed result in place, adds it to the residual stream and normalizes the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, map_dtype, row_major, up
from optdnn.kernels.launch import Launch
from optdnn.kernels.norm import across_kernel as across
from optdnn.kernels.norm.add_norm import AddsAndNormalizes, norm_of
from optdnn.kernels.norm.rows_once import OPERATIONS, RowsOnce, emit_norm
from optdnn.kernels.tactic import Offer, Tactic, kernel_offers
from optdnn.ops.base import attrs_dict

_ROWS = RowsOnce()
_PRODUCTS = frozenset({"MatMul", "Gemm"})


def lying_across(x: TensorView) -> tuple[int, int] | None:
    """Strides of images and of columns of a stack of transposed matrices with contiguous columns; None for any other tensor."""
    if len(x.shape) < 2 or (x.shape[-2] > 1 and x.strides[-2] != 1) or x.offset % across.LANES:
        return None
    column = x.strides[-1]
    step, expected = 0, 0
    for n, stride in zip(reversed(x.shape[:-2]), reversed(x.strides[:-2]), strict=True):
        if n == 1:
            continue
        if step and stride != expected:
            return None  # images have no common stride
        step, expected = step or stride, stride * n
    return step or column * x.shape[-1], column


def turned_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a stack of transposed matrices, with columns at multiples of 16 bytes."""
    pitch = up(shape[-2], across.LANES)
    strides, step = [1, pitch], pitch * shape[-1]
    for n in reversed(shape[:-2]):
        strides.insert(0, step)
        step *= n
    return tuple(strides)


def _problem(
    norm: Op, add: tuple[int, int] | None, out: tuple[int, int] | None, *, turned: bool = False
) -> across.Problem:
    """The norm's problem. ``add``: strides of images and columns of a transposed addend (``turned``: of the transposed input).
    ``out``: strides of a transposed result."""
    t = norm.outputs[0].type
    shape = t.static_shape
    return across.Problem(
        OPERATIONS[norm.kind], math.prod(shape[:-2]), shape[-2], shape[-1], map_dtype(t.dtype), add is not None and not turned,
        out is not None, norm.input(1) is not None, norm.input(2) is not None, norm.attrs.epsilon, turned, add or (0, 0), out or (0, 0),
    )  # fmt: skip


class NormAcross(Tactic):
    """LayerNorm or RMSNorm with a result that a product over rows reads transposed: the launch writes the result transposed."""

    name = "norm_across"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := _ROWS.refuse_narrow_rows(b, op)) is not None:
            return why
        rank = len(op.outputs[0].type.static_shape)
        turned = b.graph.sole_user(op.value)
        exchange = (*range(rank - 2), rank - 1, rank - 2)
        if turned is None or turned.kind != "Transpose" or tuple(turned.attrs.perm or ()) != exchange:
            return "no transposition is the only reader of its result"
        if any(u.kind not in _PRODUCTS or u.inputs[0] != turned.value for u in b.graph.users(turned.value)):
            return "a reader of its transposed result is not a product of rows"
        if not b.operand(op.inputs[0]).dense or b.operand(op.inputs[0]).offset % across.LANES:
            return "its rows are not contiguous and aligned"
        return None if self.configs(b, op) else "its rows do not fit the registers of a warp"

    def place(self, b: Builder, op: Op) -> None:
        """Place the result, transposed."""
        b.target(op.value, turned_strides(op.outputs[0].type.static_shape))

    def problem(self, b: Builder, op: Op) -> across.Problem:
        """The kernel's problem."""
        shape = op.outputs[0].type.static_shape
        pitch = up(shape[-2], across.LANES)
        return _problem(op, None, (pitch * shape[-1], pitch))

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        """The configurations. A warp sums a row in an order that depends on the row's length only."""
        return kernel_offers(across, self.problem(b, op), b.gpu)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        operands = {"input": b.operand(op.inputs[0]), "output": b.target(op.value)}
        made = across.launch(self.problem(b, op), config, b.gpu)
        emit_norm(b, op, op, made, operands, op.kind, attrs_dict(op.attrs))


class NormOfAcross(NormAcross):
    """LayerNorm or RMSNorm of a transposed tensor, the result of a product over another axis. Its own result is in rows."""

    name = "norm_of_across"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := _ROWS.refuse_narrow_rows(b, op)) is not None:
            return why
        x = b.operand(op.inputs[0])
        if x.dense or lying_across(x) is None:
            return "its operand is not a stack of transposed matrices"
        if op.value in b.reserved and not b.reserved[op.value].dense:
            return "its result is not in contiguous rows"
        return None if self.configs(b, op) else "its rows do not fit the registers of a warp"

    def place(self, b: Builder, op: Op) -> None:
        """Place the result in contiguous rows."""
        b.target(op.value, row_major(op.outputs[0].type.static_shape))

    def problem(self, b: Builder, op: Op) -> across.Problem:
        return _problem(op, lying_across(b.operand(op.inputs[0])), None, turned=True)


class AddNormAcross(AddsAndNormalizes):
    """Add of rows and a transposed tensor, then LayerNorm or RMSNorm of the sum's rows."""

    name = "add_norm_across"

    def refuse(self, b: Builder, op: Op) -> str | None:
        norm, t = norm_of(b, op), op.outputs[0].type
        if norm is None:
            return "no normalization reads the sum"
        if (why := _ROWS.refuse_narrow_rows(b, norm)) is not None:
            return f"the normalization after it: {why}"
        if any(v is None or b.graph.type(v).shape != t.shape or b.graph.type(v).dtype != t.dtype for v in op.inputs):
            return "an operand is broadcast"
        if t.layout or any(not p.dense for p in b.fixed(op.value, norm.value)):
            return "its results are not in contiguous rows"
        if self._operands(b, op) is None:
            return "it is not the sum of an operand in rows and a transposed one"
        return None if self.configs(b, op) else "its rows do not fit the registers of a warp"

    @staticmethod
    def _operands(b: Builder, op: Op) -> tuple[TensorView, TensorView] | None:
        """The operand in rows and the transposed one; None if the operands are not such a pair."""
        first, second = (b.operand(v) for v in op.inputs)
        for rows, turned in ((first, second), (second, first)):
            if rows.dense and rows.offset % across.LANES == 0 and not turned.dense and lying_across(turned) is not None:
                return rows, turned
        return None

    def _problem(self, b: Builder, op: Op) -> across.Problem:
        norm, operands = norm_of(b, op), self._operands(b, op)
        assert norm is not None
        assert operands is not None
        return _problem(norm, lying_across(operands[1]), None)

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        return kernel_offers(across, self._problem(b, op), b.gpu)

    def sources(self, b: Builder, op: Op) -> tuple[TensorView, TensorView]:
        found = self._operands(b, op)
        assert found is not None
        return found

    def launch(self, b: Builder, op: Op, config: Any) -> Launch:
        return across.launch(self._problem(b, op), config, b.gpu)
