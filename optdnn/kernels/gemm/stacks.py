"""Matrix products of any operands as stacks of matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optdnn.kernels.builder import TensorView, up
from optdnn.kernels.pointwise.strides import broadcast, merge


@dataclass(frozen=True)
class Matrices:
    """A product as stacks of matrices. ``extra``: the operands of the stages, as views of the result's shape.

    ``dims`` are the merged axes of the stack. ``steps`` are the strides along them, of the result, both factors and
    each of ``extra``.
    """

    left: TensorView
    right: TensorView
    result: TensorView
    extra: Mapping[int, TensorView]
    dims: Sequence[int]
    steps: Sequence[Sequence[int]]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, columns and terms of a matrix."""
        return self.result.shape[-2], self.result.shape[-1], self.left.shape[-1]

    @property
    def count(self) -> int:
        return math.prod(self.dims)

    def together(self) -> int:
        """Neighboring terms of a row of ``left`` that are one access of 16 bytes, or 1. The last access of a row may read beyond it, but
        not beyond its pitch."""
        lanes, x, (rows, _, k) = 16 // self.left.dtype.itemsize, self.left, self.sizes
        pitch, step = x.strides[-2:]
        aligned = not any(s % lanes for s in (x.offset, pitch, *self.steps[1]))
        return lanes if step == 1 and k > 1 and aligned and pitch >= up(k, lanes) and rows > 1 else 1


def matrices_of(left: TensorView, right: TensorView, out: TensorView, extra: Mapping[int, TensorView]) -> Matrices:
    """The product with vectors as matrices of one row or column. All leading axes form the stack."""
    shape, result = out.shape, out
    if len(left.shape) == 1:
        left = left.view((1, *left.shape), (0, *left.strides))
        at = len(shape) - (len(right.shape) > 1)
        result = result.view((*shape[:at], 1, *shape[at:]), (*result.strides[:at], 0, *result.strides[at:]))
    if len(right.shape) == 1:
        right = right.view((*right.shape, 1), (*right.strides, 0))
        result = result.view((*result.shape, 1), (*result.strides, 0))
    stack = result.shape[:-2]
    one, two = (broadcast(p.view(p.shape[:-2], p.strides[:-2]), stack) for p in (left, right))
    wide = {a: out.view(shape, broadcast(p, shape)) for a, p in extra.items()}
    if result.shape != shape:  # a factor is a vector: the stages' operands get the same view
        wide = {a: result.view(result.shape, _like(result, shape, p.strides)) for a, p in wide.items()}
    dims, steps = merge(stack, [result.strides[:-2], one, two, *(p.strides[:-2] for p in wide.values())])
    return Matrices(left, right, result, wide, dims, steps)


def _like(result: TensorView, shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Strides for the shape of ``result``: ``shape`` with axes of size 1 at its end, one for each vector operand."""
    rest, missing = list(strides), len(result.shape) - len(shape)
    if missing == 2:
        return [*rest, 0, 0]
    row = result.shape[-2] == 1 and (result.shape[-1] == shape[-1] if shape else False) and result.strides[-2] == 0
    return [*rest[:-1], 0, rest[-1]] if row else [*rest, 0]
