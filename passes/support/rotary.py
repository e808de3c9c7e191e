"""What the rules of rotary embeddings share: the angles of each position, and the op between its Transposes."""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.attention import RotaryAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.support.facts import RESHAPES, operand
from optdnn.types import Shape

SWAP = (0, 2, 1, 3)
"""Exchanges heads and positions."""


def turned(patch: Patch, x: Value, caches: Sequence[Value | None], attrs: RotaryAttrs, *, swapped: bool) -> Value:
    """A RotaryEmbedding of x; ``swapped``: of x whose positions come before its heads."""
    if swapped:
        x = patch.add("Transpose", [x], TransposeAttrs(SWAP))
    y = patch.add("RotaryEmbedding", [x, *caches], attrs)
    return patch.add("Transpose", [y], TransposeAttrs(SWAP)) if swapped else y


def per_position(dims: Shape, angles: Shape, axis: int) -> bool:
    """Whether all heads of a tensor of shape ``dims`` have the same angles for each position along ``axis``, -2 or -3; the heads
    lie along the other one."""
    heads = -5 - axis
    if not -axis <= len(angles) <= len(dims) or angles[-1] != dims[-1] or angles[axis] != dims[axis]:
        return False
    return (len(angles) < -heads or angles[heads] == 1) and (len(angles) < 4 or angles[0] in (1, dims[0]))


def cache_shape(shape: Shape, axis: int) -> Shape:
    """The shape (batch or 1, positions, numbers) of angles whose positions lie along ``axis``."""
    batch = shape[0] if len(shape) == 4 else 1
    return (batch, shape[axis], shape[-1])


def unshaped(graph: Graph, value: Value) -> Value:
    """The value without the Reshapes that make it."""
    chain = behind(graph, value)
    return operand(chain[-2]) if len(chain) > 1 else value


def behind(graph: Graph, value: Value) -> list[Op]:
    """The Reshapes that make a value, the last one first, and the op in front of them."""
    ops = [graph.op(value)]
    while ops[-1].kind in RESHAPES:
        ops.append(graph.op(operand(ops[-1])))
    return ops
