"""Copies of copies read the first source: a conversion of a joined tensor becomes conversions of its parts.

A decoder whose caches are fp32 converts them, joins them with new keys, and converts the result back. The three copies need not wait for
one another, if each reads the caches and the keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from optdnn.kernels.builder import TensorView
from optdnn.kernels.layout.copies import Part

MOST_PIECES = 4
"""Most parts that a copy becomes."""
Box = tuple[tuple[int, int], ...]
"""Begin and end along each axis."""


def traced(part: Part, makers: Sequence[Part]) -> list[Part] | None:
    """``part`` as copies from the sources of ``makers``, the copies that wrote the buffer that it reads; None if they did not write all
    that it reads, or in another order of axes."""
    x = part.source
    pieces, boxes = list[Part](), list[Box]()
    for maker in makers:
        made = maker.target
        if made.shape == x.shape and made.offset == x.offset and made.is_like(x.strides):
            return [Part(maker.source, part.target)]
        if (source := _source_of(x, maker)) is not None:
            return [Part(source, part.target)]
        both = _boxes(x, made)
        if both is None:
            return None
        wanted, given = both
        inside = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, given, strict=True))
        if all(a < b for a, b in inside):
            boxes.append(inside)
            pieces.append(Part(_cut(maker.source, given, inside), _cut(part.target, wanted, inside)))
    apart = all(_apart(a, b) for a, b in combinations(boxes, 2))
    whole = sum(math.prod(b - a for a, b in box) for box in boxes) == x.size
    return pieces if apart and whole and len(pieces) <= MOST_PIECES else None


def _source_of(x: TensorView, maker: Part) -> TensorView | None:
    """What a view of a copy's result shows of its source, if each axis of the view is an axis of the result, or repeats elements."""
    made = maker.target
    if x.offset != made.offset or x.dtype != made.dtype:
        return None
    left = {step: k for k, (n, step) in enumerate(zip(made.shape, made.strides, strict=True)) if n > 1}
    strides = list[int]()
    for n, step in zip(x.shape, x.strides, strict=True):
        if n == 1 or step == 0:
            strides.append(0)
        elif (k := left.pop(step, None)) is not None and n <= made.shape[k]:
            strides.append(maker.source.strides[k])
        else:
            return None
    return maker.source.view(x.shape, strides)


def _boxes(x: TensorView, y: TensorView) -> tuple[Box, Box] | None:
    """Two views of a buffer as boxes in common coordinates; None if there are none."""
    if len(x.shape) != len(y.shape) or x.dtype != y.dtype:
        return None
    axes = [k for k, (n, m) in enumerate(zip(x.shape, y.shape, strict=True)) if max(n, m) > 1]
    axes.sort(key=lambda k: -x.strides[k])
    if any(x.strides[k] != y.strides[k] or x.strides[k] < 1 for k in axes):
        return None
    found = [_box(view, axes) for view in (x, y)]
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def _box(x: TensorView, axes: Sequence[int]) -> Box | None:
    """A view as a box. ``axes``: those with more than one element, the largest stride first; others have the coordinate 0."""
    box, rest, room = [(0, 1)] * len(x.shape), x.offset, 0
    for k in axes:
        begin, rest = divmod(rest, x.strides[k])
        box[k] = (begin, begin + x.shape[k])
        if room and (room % x.strides[k] or box[k][1] > room // x.strides[k]):
            return None
        room = x.strides[k]
    return None if rest else tuple(box)


def _cut(x: TensorView, whole: Box, inside: Box) -> TensorView:
    """The box ``inside`` of a view that is the box ``whole``."""
    offset = sum((a - begin) * s for (a, _), (begin, _), s in zip(inside, whole, x.strides, strict=True))
    return x.view([b - a for a, b in inside], x.strides, offset)


def _apart(a: Box, b: Box) -> bool:
    return any(end <= begin or other_end <= first for (first, end), (begin, other_end) in zip(a, b, strict=True))
