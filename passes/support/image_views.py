"""Images before and after the Reshapes to their tokens: which values are images, and where the channels are."""

from __future__ import annotations

from optdnn.dim import Dim
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.passes.base import Miss
from optdnn.passes.support.facts import RESHAPES, channels_from_last, channels_to_last, operand, shape_of
from optdnn.passes.support.stages import ACTIVATIONS
from optdnn.types import Shape

OF_IMAGES = frozenset({"Conv", "ConvTranspose", "MaxPool", "AveragePool", "Resize"})
"""Kinds that write or read images in channels-last order as well."""
NORMS = frozenset({"GroupNormalization", "InstanceNormalization"})
"""Kinds that run in either order, and may be between such a kind and the Reshape."""
PARTS = frozenset({"Concat", "Split", "Slice"})
"""Kinds that join images, or take parts of them, in either order."""
_BETWEEN = 4
"""Pointwise operators, norms and parts that may be between such a kind and the Reshape."""
INEXPRESSIBLE = Miss("no constant target can express its shape")


def is_flat(graph: Graph, flat: Op) -> bool:
    """Whether a Reshape turns an image into (B, C..., H * W)."""
    image, after = operand(flat), flat.outputs[0].type.dims
    before = shape_of(graph, image) or ()
    plain = len(before) > 3 and len(after) == 3 and before[:2] == after[:2]  # C may be 1
    return (plain or channel_axes(before, after) == range(1, len(after) - 1)) and is_image(graph, image)


def rows_of_pixels(graph: Graph, flat: Op) -> tuple[Shape, Shape]:
    """The shapes of a channels-last image, and of its pixels (B, H * W, C...)."""
    image, after = graph.type(operand(flat)).dims, flat.outputs[0].type.dims
    return (image[0], *image[2:], image[1]), (after[0], after[-1], *after[1:-1])


def channel_axes(image: Shape | None, tokens: Shape | None) -> range | None:
    """The axes of ``tokens`` that hold the channels of an ``image`` (B, C, positions...); None for other shapes.

    The Reshape from image to tokens keeps C, or splits it into parts, between batch and positions."""
    if image is None or tokens is None or len(image) < 3:
        return None
    first = 1 if tokens[:1] == image[:1] else _end(tokens, 0, image[0])
    end = None if first is None else _end(tokens, first, image[1])
    return None if first is None or end in (None, first) else range(first, end)


def _end(shape: Shape, start: int, size: int | Dim) -> int | None:
    """The first axis after ``start`` up to which ``shape`` holds ``size`` elements."""
    held: int | Dim = 1
    for end in range(start, len(shape) + 1):
        if held == size:
            return end
        held = held * shape[end] if end < len(shape) else held
    return None


def read_as_image(graph: Graph, value: Value) -> bool:
    """Whether an operator on images reads ``value``, perhaps after a few pointwise operators."""
    return any(_reads_image(graph, user, value) for user in graph.users(value))


def _reads_image(graph: Graph, op: Op, value: Value, within: int = _BETWEEN) -> bool:
    """Whether ``op``, a user of ``value``, works on images, joins ``value`` with an image, or turns an image into tokens.

    At most ``within`` activations, parts and pointwise operators with constants (a BatchNormalization before an activation) may
    precede such an operator."""
    if op.kind in OF_IMAGES | NORMS or _turns(op):
        return True
    if op.kind in ("Add", "Concat") and any(v is not None and v != value and is_image(graph, v) for v in op.inputs):
        return True
    others = [graph.constant_value(v) for v in op.inputs if v is not None and v != value]
    scaled = op.pointwise and all(c is not None for c in others)
    if within and (scaled or op.kind in PARTS | ACTIVATIONS):
        results = op.values
        return any(_reads_image(graph, user, y, within - 1) for y in results for user in graph.users(y))
    user = graph.sole_user(op.value) if op.kind in RESHAPES else None
    return user is not None and user.kind == "Transpose" and (user.attrs.perm or (0,))[-1] == 1


def _turns(op: Op) -> bool:
    """Whether a Transpose moves channels from the last axis to the second, or back."""
    if op.kind != "Transpose" or op.attrs.perm is None or len(op.attrs.perm) < 4:
        return False
    rank = len(op.attrs.perm)
    return op.attrs.perm in (channels_from_last(rank), channels_to_last(rank))


def is_image(graph: Graph, value: Value, within: int = _BETWEEN - 1) -> bool:
    """Whether an operator on images computes ``value``, with at most ``within`` pointwise operators and norms after it."""
    op = graph.op(value)
    if op.kind in OF_IMAGES or _turns(op):
        return True
    if within == 0 or op.kind in STRUCTURAL or op.input(0) is None:
        return False
    dims, sources = op.outputs[0].type.dims, [operand(op)]
    if op.definition.traits.pointwise:
        sources += [v for v in op.inputs[1:] if v is not None and graph.type(v).dims == dims]
    elif op.kind not in NORMS | PARTS:
        return False
    return any(is_image(graph, v, within - 1) for v in sources)
