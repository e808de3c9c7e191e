"""Products of two stacks of matrices on Hopper's kernel: implicit GEMM with computed weights.

The second stack is computed. The first one may be constant: one matrix for all products (a Fourier transform of
columns, or a product along tokens), which is loaded before the previous launch ends, or a stack, which is repeated
along axes of size 1. Besides a bias per column, the epilogue can apply a bias per row and a factor per column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.epilogue import Epilogue, plan_epilogue
from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, TensorView, map_dtype, unmade, up
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv.fused import bias_row, finish
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.conv.row_forms import MOMENT_CHANNELS
from optdnn.kernels.gemm.hopper import padded_rows, rows_of
from optdnn.kernels.gemm.matmul import MOST_TILES
from optdnn.kernels.gemm.thin import is_thin, thin_seconds
from optdnn.kernels.launch import tensor_map
from optdnn.kernels.layout.views import order_read
from optdnn.kernels.pointwise.pointwise import copied_later
from optdnn.kernels.pointwise.strides import broadcast, merge
from optdnn.ops.base import Stage, renumbered
from optdnn.ops.fused import plain_stages
from optdnn.runtime.cuda.launches.plan import TensorMap
from optdnn.types import BF16, FP16, Array

UNIT = 8
"""Elements in 16 bytes, which TMA addresses."""
LINE = 64
"""Elements in 128 bytes."""
SHORT = 16
"""Most terms of products with a vector that run without tensor cores."""
NEARLY_EMPTY = 64
"""Most results of a product with a vector whose tile is not worth its time, if there are more than MOST_TILES tiles."""
TILE_S, LEAST_TILES = 3e-9, 1024
"""Seconds per 64 x 64 tile of tensor cores, on all multiprocessors, of products whose tiles are nearly empty, and fewest such tiles that are
more than one wave."""


@dataclass(frozen=True)
class Stack:
    """A stack of matrices for TMA: contiguous columns, then rows at a pitch, then two axes of the stack.

    ``shape`` is (columns, rows, inner, outer). ``strides``, in elements, are those of all axes but the columns."""

    placed: TensorView
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]

    def map(self, name: str, box: tuple[int, int], span: int) -> TensorMap[str]:
        """The tensor map of the operand ``name``, with boxes of ``box`` (columns, rows)."""
        item, dtype = self.placed.dtype.itemsize, map_dtype(self.placed.dtype)
        return tensor_map(name, dtype, self.shape, [s * item for s in self.strides], (*box, 1, 1), span)


def walkable(x: TensorView) -> bool:
    """Whether TMA can walk these matrices: columns without gaps, all other strides positive multiples of 16 bytes."""
    steps = [s for n, s in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1]
    return (
        (x.shape[-1] == 1 or x.strides[-1] == 1)
        and x.offset % UNIT == 0
        and all(s > 0 and s % UNIT == 0 for s in steps)
    )


def _runs(stack: Sequence[int], shapes: Sequence[Sequence[int]]) -> int:
    """Number of axes of a stack after merging neighbors along which the same factors are broadcast. ``shapes``: the factors' stacks."""
    whole = [(1,) * (len(stack) - len(s)) + tuple(s) for s in shapes]
    axes = [tuple(s[k] == 1 for s in whole) for k, n in enumerate(stack) if n > 1]
    return sum(k == 0 or axes[k] != axes[k - 1] for k in range(len(axes)))


def swapped(x: TensorView) -> TensorView:
    """The matrices transposed."""
    return x.view((*x.shape[:-2], x.shape[-1], x.shape[-2]), (*x.strides[:-2], x.strides[-1], x.strides[-2]))


def stacked(x: TensorView, sizes: tuple[int, int], strides: Sequence[int]) -> Stack:
    """The stack of matrices whose (inner, outer) axes have these ``sizes`` and ``strides``."""
    rows, columns = x.shape[-2:]
    pitch = x.strides[-2] if rows > 1 else up(columns, UNIT)
    inner, outer = sizes
    step = strides[0] if inner > 1 else pitch * rows
    return Stack(x, (columns, rows, inner, outer), (pitch, step, strides[1] if outer > 1 else step * inner))


NAMES = ("left", "right", "residual")
"""Names of the operands that the launch reads."""


@dataclass(frozen=True)
class Stacks:
    """A product as the kernel runs it. ``read``: both factors, and the residual if there is one. ``out`` and ``read``
    may still have to be made. ``axes``: for ``out`` and each of ``read``, the strides of the stack's (inner, outer)
    axes."""

    problem: Problem
    ep: Epilogue
    out: TensorView
    read: Sequence[TensorView]
    axes: Sequence[tuple[int, int]]


class HopperMatMul(hopper_launch.HopperTactic):
    """MatMul of two stacks of 16-bit matrices. Each tile belongs to one product; the kernel runs the epilogue."""

    name = "matmul_sm90"

    def refuse(self, b: Builder, op: Op) -> str | None:
        out = op.outputs[0].type
        types = [b.graph.type(v) for v in op.inputs[:2] if v is not None]
        if out.dtype not in (FP16, BF16) or any(t.dtype != out.dtype for t in types):
            return "its matrices are not all of fp16 or all of bf16"
        if any(len(t.static_shape) < 2 or 0 in t.static_shape for t in types):
            return "it is not a product of matrices"
        stack = out.static_shape[:-2]
        matrix = b.graph.constant_value(op.inputs[0])
        several = math.prod(stack) > 1 or (b.row_invariant and len(stack) > 0)
        if len(types[1].static_shape) == 2 and several:
            return "all products share one second matrix"
        one = matrix is not None and _is_one(matrix)
        if _runs(stack, [types[1].static_shape[:-2], stack if one else types[0].static_shape[:-2]]) > 2:
            return "its stacks are broadcast along several axes"
        if op.attrs.prologue:
            return "it has a prologue"
        if op.attrs.factors == "fp16" and _epilogue(b, op).rest:
            return "a later launch would read its sums in fp16, which may exceed it"
        return hopper_launch.refuse(b.arch, map_dtype(out.dtype), [((1, 1), (1, 1), (0, 0, 0, 0), (1, 1))])

    def defer(self, b: Builder, op: Op) -> str | None:
        """Why a thread for each result is faster: tensor cores would need copies of both factors, and a tile for each product."""
        left, right = (b.graph.type(v).static_shape for v in op.inputs[:2] if v is not None)
        *stack, rows, depth = left
        columns, count = right[-1], int(b.counted(math.prod(stack)))
        if not is_thin(rows, columns, depth, count) or (b.row_invariant and not stack):  # the rows may be the batch
            return None
        tiles = count * -(-rows // LINE) * -(-columns // LINE)
        vector = min(rows, columns) == 1
        few = vector and count > MOST_TILES and rows * columns <= NEARLY_EMPTY
        many = not vector and tiles >= LEAST_TILES
        if few or (many and thin_seconds(rows, columns, depth, count, b.source(op.inputs[1])) < tiles * TILE_S):
            return f"threads that add up {depth} products each are faster: {tiles} tiles would be nearly empty"
        short = depth <= SHORT and columns == 1
        return f"a thread for each result adds up {depth} products with a vector" if short else None

    def place(self, b: Builder, op: Op) -> None:
        """Place the result with a row pitch that TMA can write, unless its place is reserved."""
        b.target(op.value, self._strides(b, op))

    @staticmethod
    def _strides(b: Builder, op: Op) -> tuple[int, ...] | None:
        """Strides of the result if it has no place yet: those that make the Transposes and Reshapes after it views, if TMA can write
        them, or padded rows. None: those of its type."""
        t = op.outputs[0].type
        if t.static_shape[-1] % UNIT:
            return None if t.layout else padded_rows(t.static_shape)
        read = order_read(b, op.value)
        return read if read is not None and read[-1] == 1 and not any(s % UNIT for s in read[:-1]) else None

    def problem(self, b: Builder, op: Op) -> Problem:
        return self._stacks(b, op).problem

    def _stacks(self, b: Builder, op: Op) -> Stacks:
        """The operands and the result in place, or as copies that are still to be made, and how TMA walks them."""
        ep = _epilogue(b, op)
        target = b.result(op.value, self._strides(b, op))
        shape = target.shape
        matrix = b.graph.constant_value(op.inputs[0])
        one = matrix is not None and _is_one(matrix)
        given = [_padded(b, op.inputs[0], len(shape))]
        given += [b.source(v) for v in (op.inputs[1], ep.residual) if v is not None]
        copies = [copied_later(b, op, x, name, padded_rows(x.shape)) for x, name in zip(given, NAMES, strict=False)]
        apart = b.later(f"{op.outputs[0].name}.product", target.dtype, shape, padded_rows(shape))
        out = apart if ep.rest or not walkable(target) else target
        across = walkable(given[1]) or not walkable(swapped(given[1]))
        lying = [walkable(given[0]), walkable(given[1]) or not across, *map(walkable, given[2:])]
        read = [x if fits else copy for x, fits, copy in zip(given, lying, copies, strict=True)]
        dims, strides = merge(shape[:-2], [broadcast(_leading(p), shape[:-2]) for p in (out, *read)])
        if len(dims) > 2:  # contiguous rows merge the stack into one axis
            out, read, across = apart, [copies[0] if matrix is None else read[0], *copies[1:]], True
            dims, strides = merge(shape[:-2], [broadcast(_leading(p), shape[:-2]) for p in (out, *read)])
        sizes = (dims[-1], dims[0] if len(dims) == 2 else 1)
        (m, k), wide = read[0].shape[-2:], up(shape[-1], UNIT)
        problem = Problem(
            m, wide, (Source(1, 1, up(k, UNIT)),), (("bias",), *ep.rendered), map_dtype(target.dtype), stack=sizes,
            across=across, one_matrix=one, row_bias=ep.row_bias is not None, dense=False,
        )  # fmt: skip
        return Stacks(problem, ep, out, read, [(s[-1], s[0]) for s in strides])

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        target, s = b.target(op.value, self._strides(b, op)), self._stacks(b, op)
        made = replace(s, out=b.made(s.out), read=[b.made(x) for x in s.read])
        emit_stacks(b, op, made, config, b.together.get(op.id))
        finish(b, op, s.ep, made.out, target)

    def output_with_moments(self, b: Builder, op: Op) -> TensorView | None:
        """View of the output rows whose moments the launch can write, or None if it cannot write moments."""
        s = self._stacks(b, op)
        return None if s.ep.rest or s.out != b.source(op.value) or s.out.shape[-1] % MOMENT_CHANNELS else rows_of(s.out)


def emit_stacks(b: Builder, op: Op, s: Stacks, config: Any, moments: TensorView | None = None) -> None:
    """Add the launch of a product whose tensors are made. ``moments``: where it writes the moments of the result's rows."""
    problem, ep, out = replace(s.problem, moments=moments is not None), s.ep, s.out
    first, second, *added = s.read
    sizes, n = problem.stack or (1, 1), out.shape[-1]
    tile, across = config.tile[0], problem.across
    weights = stacked(second if across else swapped(second), sizes, s.axes[2])
    left = stacked(first, (1, 1) if problem.one_matrix else sizes, s.axes[1])
    pixels = left.map("pixels0", (problem.block, config.bn), problem.span)
    results = [
        stacked(x, sizes, axes).map(name, (64, config.bn), problem.out_span)
        for x, axes, name in zip((out, *added), (s.axes[0], *s.axes[3:]), ("output", "residual"), strict=False)
    ]
    maps = [
        weights.map("weights", (64, 64 if across else tile), problem.span),
        pixels,
        pixels,
        results[0],
        results[-1],
    ]
    bias = bias_row(b, op, ep.bias, problem.channels)
    constants = [b.constant(c, "scalar") for c in ep.constants]
    stages = [Stage("Add", (-1, 2)), *renumbered(ep.stages, 1)]
    residual = added[0] if added else None
    reads = [first, second, bias.view((n,), (1,)), residual, *constants]
    kind, attrs = "MatMul", {"prologue": (), "epilogue": plain_stages(stages), "arity": 2}
    channel = hopper_launch.channel_row(b, op, ep.bias, ep, problem.channels, bias)
    operands = {"pixels0": first, "weights": second, "channel": channel, "output": out}
    if residual is not None:
        operands["residual"] = residual
    if ep.row_bias is not None:
        operands["row_bias"] = bias_row(b, op, ep.row_bias, up(len(ep.row_bias), 2))
    if moments is not None:
        operands["moments"] = moments
        kind, attrs = hopper_launch.with_moments(kind, attrs, len(out.shape) - 1)
    made = hopper_launch.launch_on(problem, config, b.gpu, maps, operands)
    hopper_launch.emit(b, op, made, problem, config, operands, (kind, attrs, reads), second=moments)


def _epilogue(b: Builder, op: Op) -> Epilogue:
    """The stages that the launch computes. If it leaves some to a later launch, it stores the product as 16-bit floats, before all
    casts."""
    whole, part = (
        plan_epilogue(b.graph, op, channel_axis=-1, allow_scale=True, allow_row_bias=True, allow_wide=wide)
        for wide in (True, False)
    )
    return part if whole.rest else whole


def _is_one(matrix: Array) -> bool:
    """Whether the constant is a single matrix, which all products of a stack share."""
    return math.prod(matrix.shape[:-2]) == 1


def _padded(b: Builder, value: Value | None, rank: int) -> TensorView:
    """The first factor. A constant has ``rank`` axes, and rows that begin at whole lines of L2."""
    matrix = b.graph.constant_value(value)
    if matrix is None:
        return b.source(value)
    shape = (1,) * (rank - matrix.ndim) + matrix.shape

    def make() -> int:
        made: Array = np.zeros((*shape[:-1], up(shape[-1], LINE)), matrix.dtype)
        made[..., : shape[-1]] = matrix
        return b.constant(made, "left").buffer

    return unmade(matrix.dtype, shape, padded_rows(shape, unit=LINE), make)


def _leading(x: TensorView) -> TensorView:
    """The stack's axes: a view of the first element of each matrix."""
    return x.view(x.shape[:-2], x.strides[:-2])
