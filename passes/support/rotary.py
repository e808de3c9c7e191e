"""What the rules of rotary embeddings share: the angles of each position, and the op between its Transposes."""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.attention import RotaryAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.support.facts import RESHAPES, operand
from optdnn.types import Shape

PLAIN = (0, 1, 2, 3)
SWAP = (0, 2, 1, 3)
"""Exchanges heads and positions."""
HEADS_AS_IMAGES = (1, 0, 2, 3)
"""Exchanges images and heads: the op has its angles per image."""
ORDERS = (PLAIN, SWAP, HEADS_AS_IMAGES)
"""Between which Transposes the op may stand, the simplest first. Each is its own inverse."""


def turned(
    patch: Patch, x: Value, caches: Sequence[Value | None], attrs: RotaryAttrs, order: tuple[int, ...] = PLAIN
) -> Value:
    """A RotaryEmbedding of x, between two Transposes to ``order``."""
    if order == PLAIN:
        return patch.add("RotaryEmbedding", [x, *caches], attrs)
    y = patch.add("RotaryEmbedding", [patch.add("Transpose", [x], TransposeAttrs(order)), *caches], attrs)
    return patch.add("Transpose", [y], TransposeAttrs(order))


def order_of(dims: Shape, angles: Sequence[Shape]) -> tuple[int, ...] | None:
    """The first of ``ORDERS`` in which a tensor of shape ``dims`` and its angles are as the op wants them: an angle for each
    position, and for each image or all of them. None where there is no such order."""
    return next((order for order in ORDERS if all(_fits(dims, shape, order) for shape in angles)), None)


def _fits(dims: Shape, angles: Shape, order: tuple[int, ...]) -> bool:
    if len(dims) != 4 or not 1 <= len(angles) <= 4:
        return False
    images, heads, positions, numbers = _ordered(angles, order)
    wanted = _ordered(dims, order)
    return images in (1, wanted[0]) and heads == 1 and (positions, numbers) == wanted[2:]


def _ordered(shape: Shape, order: tuple[int, ...]) -> Shape:
    full = (1,) * (4 - len(shape)) + tuple(shape)
    return tuple(full[i] for i in order)


def cache_shape(shape: Shape, order: tuple[int, ...]) -> Shape:
    """The shape (images or 1, positions, numbers) of angles of this shape in an order that fits them."""
    images, _, positions, numbers = _ordered(shape, order)
    return (images, positions, numbers)


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
