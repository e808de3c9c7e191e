"""Shared functions of the rules for rotary embeddings: the shapes of angles, and the op between two Transposes."""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.ir.graph import Value
from optdnn.ir.patch import Patch
from optdnn.ops.attention import RotaryAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.support.facts import HEADS_FIRST
from optdnn.types import Shape

PLAIN = (0, 1, 2, 3)
HEADS_AS_IMAGES = (1, 0, 2, 3)
"""Exchanges images and heads, since the op may have separate angles for each image but not for each head."""
ORDERS = (PLAIN, HEADS_FIRST, HEADS_AS_IMAGES)
"""Permutations of the Transposes around the op, the simplest first. Each is its own inverse."""


def rotated(
    patch: Patch, x: Value, caches: Sequence[Value | None], attrs: RotaryAttrs, order: tuple[int, ...]
) -> Value:
    """Add a RotaryEmbedding of ``x``, between two Transposes with permutation ``order``."""
    if order == PLAIN:
        return patch.add("RotaryEmbedding", [x, *caches], attrs)
    y = patch.add("RotaryEmbedding", [patch.add("Transpose", [x], TransposeAttrs(order)), *caches], attrs)
    return patch.add("Transpose", [y], TransposeAttrs(order))


def order_of(dims: Shape, angles: Sequence[Shape]) -> tuple[int, ...] | None:
    """The first of ``ORDERS`` in which the op accepts a tensor of shape ``dims`` and its angles, or None.

    The op needs an angle for each position, equal for all heads. Angles may differ by image."""
    return next((order for order in ORDERS if all(_fits(dims, shape, order) for shape in angles)), None)


def _fits(dims: Shape, angles: Shape, order: tuple[int, ...]) -> bool:
    if len(dims) != 4 or not 1 <= len(angles) <= 4:
        return False
    images, heads, positions, features = _ordered(angles, order)
    wanted = _ordered(dims, order)
    return images in (1, wanted[0]) and heads == 1 and (positions, features) == wanted[2:]


def _ordered(shape: Shape, order: tuple[int, ...]) -> Shape:
    full = (1,) * (4 - len(shape)) + tuple(shape)
    return tuple(full[i] for i in order)


def cache_shape(shape: Shape, order: tuple[int, ...]) -> Shape:
    """The shape (images or 1, positions, features) of the op's cosines and sines, from angles of ``shape`` that fit ``order``."""
    images, _, positions, features = _ordered(shape, order)
    return (images, positions, features)
