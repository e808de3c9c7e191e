"""Masks and position biases of attention: their sum, and their broadcasting over batch and heads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import ml_dtypes
import numpy as np

from optdnn.dim import DimLike
from optdnn.ir.graph import Graph, Value
from optdnn.ir.patch import Patch
from optdnn.passes.rules.input_sizes import can_read, can_reshape, reshaped_to, sizes
from optdnn.passes.support.constant_rows import constant_rows
from optdnn.passes.support.facts import scalar, with_rank
from optdnn.passes.support.views import groups
from optdnn.types import FP64, Array, DType, Shape

HIDDEN = -1e9
"""Mask elements up to this hide a score: after the softmax its weight is 0, unless all scores of the query are as small."""
HIDDEN_TWICE = -1e4
"""The same if the weights are masked again after the softmax (NeMo): the hidden scores could only change the sum of the weights."""
MOST_SHOWN = 1e4
"""Numbers up to this hide nothing, and show nothing that :data:`HIDDEN` hides."""
LARGE_BIAS = 32.0
"""fp16 rounds numbers up to this by at most 1 / 64."""
CENTERED = 1 << 24
"""At most this many elements of a mask get a row for each query."""
LARGEST = 1 << 28
"""At most this many elements of a mask are looked at: those of 16,384 tokens."""
BLOCK = 1 << 22
"""About this many at a time."""
_ABSORBS = -1e30
"""A score that is added to a number up to this vanishes in the rounding, even in float64."""


@dataclass(frozen=True)
class Bias:
    """``factor * value``, which is added to scores with the leading axes ``lead``.

    With ``condition`` (a Where that hides scores), it is added only where the condition differs from ``keeps``. ``certain``: the
    same condition masks the weights again after the softmax. Then -inf is added, and a query without keys gives zeros."""

    value: Value
    lead: Shape
    factor: float
    condition: Value | None = None
    keeps: bool = True
    certain: bool = False


def refuse(graph: Graph, bias: Bias, lead: Shape, keys: DimLike, dtype: DType) -> str | None:
    """The reason why a bias cannot be the mask of an attention with these leading axes, keys and dtype, or None."""
    for value in (bias.value, bias.condition):
        if value is None:
            continue
        t = graph.type(value)
        name = graph.output(value).name
        if t.shape is None:
            return f"the rank of the mask {name} is unknown"
        if value == bias.value and t.dtype != dtype:
            return f"the mask {name} is {t.dtype}, the scores {dtype}"
        if value == bias.condition or bias.condition is None:
            if not t.shape or t.shape[-1] != keys:
                return f"the mask {name} {t} does not have a number for each key"
            regrouped = regrouped_shapes(t.shape, bias.lead, lead)
            if regrouped is None or not _expressible(graph, t.shape, *regrouped):
                return f"the mask {name} {t} does not fit the leading axes [{', '.join(map(str, lead))}]"
    if bias.condition is not None and not bias.certain:
        low = scalar(graph, bias.value)
        if low is not None and bias.factor * low > HIDDEN:
            return f"scores of {bias.factor * low:g} may not hide their keys, unless the weights are masked again"
        condition = graph.constant_value(bias.condition)
        seen = condition is not None and bool((condition == bias.keeps).any(axis=-1).all())
        if not seen and not (low is not None and bias.factor * low <= _ABSORBS):
            return f"a query without keys gets equal weights, which an added mask of {low} does not give"
    return None


def _expressible(graph: Graph, before: Shape, expanded: Shape, shape: Shape) -> bool:
    """Whether :func:`added` can write the Expand and the Reshape from ``before``."""
    if _same_size(before, expanded):
        return shape == expanded or can_reshape(graph, before, shape)
    known = can_read(graph, expanded)
    return known and (shape == expanded or can_reshape(graph, expanded, shape))


def regrouped_shapes(shape: Shape, lead: Shape, wanted: Shape) -> tuple[Shape, Shape] | None:
    """The shapes (after an Expand, after a Reshape) that give a mask for leading axes ``lead`` the leading axes ``wanted``.

    None if no such pair exists."""
    full = (*(1,) * (len(lead) + 2 - len(shape)), *shape)
    if len(full) != len(lead) + 2:
        return None
    if lead == wanted:
        return full, full
    lined = groups(lead, wanted)
    if lined is None:
        return None
    expanded: list[DimLike] = list(full)
    out: list[DimLike] = [1] * len(wanted)
    for ours, theirs in lined:
        if all(full[i] == 1 for i in ours):
            continue
        for i in ours:
            expanded[i] = lead[i]
        for j in theirs:
            out[j] = wanted[j]
    return tuple(expanded), (*out, *full[-2:])


def constant_sum(graph: Graph, biases: Sequence[Bias], lead: Shape) -> Array | None:
    """The sum of all biases in float64; None if one is not constant or there is none."""
    total: Array | None = None
    for bias in biases:
        array = graph.constant_value(bias.value)
        if array is None:
            return None
        array = np.full((), -np.inf) if bias.certain else array.astype(FP64) * bias.factor
        if bias.condition is not None:
            condition = graph.constant_value(bias.condition)
            if condition is None:
                return None
            array = np.where(condition == bias.keeps, 0.0, array.reshape(()))
        regrouped = regrouped_shapes(array.shape, bias.lead, lead)
        assert regrouped is not None
        expanded, shape = regrouped
        if any(not isinstance(d, int) for d in (*expanded, *shape)):
            return None
        array = np.broadcast_to(with_rank(array, len(expanded)), expanded).reshape(shape)  # type: ignore[arg-type]
        total = array if total is None else total + array
    if total is not None:
        for axis in (0, 1):  # a batch of equal masks is one mask
            if total.shape[axis] > 1 and (total == total[:1] if axis == 0 else total == total[:, :1]).all():
                total = total[:1] if axis == 0 else total[:, :1]
    return total


def rounded(array: Array, dtype: DType) -> Array:
    """``array`` rounded to ``dtype``; finite numbers stay finite."""
    top = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return np.where(np.isfinite(array), np.clip(array, -top, top), array).astype(dtype)


Sight = tuple[bool, int, int]
"""Attention's attributes for a mask: ``is_causal``, ``left_window_size``, ``right_window_size``."""


@dataclass(frozen=True)
class KnownMask:
    """A constant mask: what attributes express, and the rest in float64, if it says more."""

    sight: Sight | None
    rest: Array | None


def known_mask(
    graph: Graph, biases: Sequence[Bias], lead: Shape, rows: DimLike, keys: DimLike, *, sunk: bool = False
) -> KnownMask | None:
    """The sum of all biases for (B, H, rows, keys); None if it is not constant or there is none.

    If one of them hides what attributes express (a causal mask), only the others remain (ALiBi: a number for each key). ``sunk``:
    the scores of a query are compared with a sink, so that no number may be added to all of them."""
    total = constant_sum(graph, biases, lead)
    if total is None and (sight := window_of_large(graph, biases, rows, keys)) is not None:
        return KnownMask(sight, None)
    if total is not None and (sight := window(total, rows, keys)) is not None:
        return KnownMask(sight, None)
    for i, bias in enumerate(biases):
        rest = constant_sum(graph, [*biases[:i], *biases[i + 1 :]], lead)
        if rest is None or not (np.abs(rest) <= MOST_SHOWN).all():
            continue
        alone = constant_sum(graph, [bias], lead)
        sight = window_of_large(graph, [bias], rows, keys) if alone is None else window(alone, rows, keys)
        if sight is not None:
            return KnownMask(sight, rest if sunk else _centered(rest, sight, rows))
    if total is None:
        return None
    hidden = total <= HIDDEN
    if (np.abs(total[~hidden]) <= MOST_SHOWN).all():
        sight = window(np.where(hidden, total, 0.0), rows, keys)
        if sight is not None:
            rest = np.where(hidden, 0.0, total)
            return KnownMask(sight, rest if sunk else _centered(rest, sight, rows))
    return KnownMask(None, total if total.any() else None)


def _centered(rest: Array, sight: Sight, rows: DimLike) -> Array:
    """A mask from each of whose rows the largest number that it shows was subtracted, if 16 bits would round the mask too much.

    That changes no weight. A mask with one row for all queries gets a row for each, unless it becomes too large."""
    assert isinstance(rows, int)
    causal, before, after = sight
    grows = rest.shape[2] == 1 and math.prod(rest.shape[:2]) * rows * rows > CENTERED
    if np.abs(rest).max() <= LARGE_BIAS or grows:
        return rest
    ahead = np.arange(rows) - np.arange(rows)[:, None]
    shown = (ahead <= (0 if causal else after if after >= 0 else rows)) & (-ahead <= (before if before >= 0 else rows))
    full = np.broadcast_to(rest, (*rest.shape[:2], rows, rows))
    largest = np.max(full, axis=-1, keepdims=True, where=shown, initial=-np.inf)
    return np.where(shown, full - largest, 0.0)


def window(array: Array, rows: DimLike, keys: DimLike) -> Sight | None:
    """Attention's attributes for a constant mask.

    None if they cannot express the mask, or if some query does not see its own position.
    """
    if rows != keys or not isinstance(rows, int) or rows < 2 or array.shape[-2:] != (rows, keys):
        return None
    return _sight([(0, array)], rows)


def window_of_large(graph: Graph, biases: Sequence[Bias], rows: DimLike, keys: DimLike) -> Sight | None:
    """The same for one mask for all heads and items, as the sum of biases that are too large to be constants.

    Their rows are computed from constants, some at a time."""
    if not biases or rows != keys or not isinstance(rows, int) or not 2 <= rows * rows <= LARGEST:
        return None
    seen = _SIGHTS.setdefault(graph, {})
    key = (tuple(biases), rows)
    if key not in seen:
        seen[key] = _sight(_blocks(graph, biases, rows), rows)
    return seen[key]


_SIGHTS: WeakKeyDictionary[Graph, dict[tuple[Sequence[Bias], int], Sight | None]] = WeakKeyDictionary()
"""What was found: all layers of a network have the same mask."""


def _blocks(graph: Graph, biases: Sequence[Bias], rows: int) -> Iterator[tuple[int, Array | None]]:
    """The first row and the rows of each part of a mask; None for rows that are not known."""
    step = max(1, BLOCK // rows)
    for first in range(0, rows, step):
        stop = min(first + step, rows)
        parts = [_rows_of(graph, bias, first, stop) for bias in biases]
        known = [p for p in parts if p is not None]
        yield first, np.broadcast_to(sum(known), (stop - first, rows)) if len(known) == len(parts) else None


def _rows_of(graph: Graph, bias: Bias, first: int, stop: int) -> Array | None:
    """Some rows of what a bias adds to all scores; None if they are not known, or differ between heads or items."""
    array = np.full((), -np.inf) if bias.certain else constant_rows(graph, bias.value, first, stop)
    if array is None:
        return None
    array = array.astype(FP64) * bias.factor
    if bias.condition is not None:
        condition = constant_rows(graph, bias.condition, first, stop)
        if condition is None:
            return None
        array = np.where(condition == bias.keeps, 0.0, array)
    return array.reshape(array.shape[-2:]) if math.prod(array.shape[:-2]) == 1 else None


def _sight(blocks: Iterable[tuple[int, Array | None]], rows: int) -> Sight | None:
    """``blocks``: a mask's first row and rows, from the first block to the last one; None for rows that are not known."""
    left = right = 0
    counts: Array | int = 0
    for first, block in blocks:
        if block is None:
            return None
        shown = (block == 0).reshape(-1, *block.shape[-2:])
        own = np.arange(first, first + shown.shape[1])
        if not (shown | (block <= HIDDEN).reshape(shown.shape)).all() or not shown[:, own - first, own].all():
            return None
        left = max(left, int((own - shown.argmax(-1)).max()))
        right = max(right, int((rows - 1 - shown[..., ::-1].argmax(-1) - own).max()))
        counts = counts + shown.sum((-2, -1))
    at = np.arange(rows)
    within = (np.minimum(at + right, rows - 1) - np.maximum(at - left, 0) + 1).sum()
    if (counts != within).any():  # what is shown lies within the window
        return None
    return right == 0, -1 if left == rows - 1 else left, -1 if right in (0, rows - 1) else right


def added(patch: Patch, biases: Sequence[Bias], lead: Shape, dtype: DType) -> Value:
    """Add ops that compute the sum of the biases, broadcastable to (B, H, L, S)."""
    total: Value | None = None
    for bias in biases:
        value = patch.constant(np.asarray(-np.inf, dtype), "hidden") if bias.certain else bias.value
        if bias.factor != 1.0 and not bias.certain:
            value = patch.add("Mul", [value, patch.constant(np.asarray(bias.factor, dtype), "scale")])
        if bias.condition is not None:
            zero = patch.constant(np.zeros((), dtype), "zero")
            value = patch.add("Where", [bias.condition, *((zero, value) if bias.keeps else (value, zero))])
        regrouped = regrouped_shapes(patch.type(value).dims, bias.lead, lead)
        assert regrouped is not None
        expanded, shape = regrouped
        if bias.lead != lead:
            own = patch.type(value).dims
            if own != expanded and not _same_size(own, expanded):
                value = patch.add("Expand", [value, sizes(patch, expanded)])
            value = reshaped_to(patch, value, shape)
        total = value if total is None else patch.add("Add", [total, value])
    assert total is not None
    return total


def _same_size(a: Shape, b: Shape) -> bool:
    return [d for d in a if d != 1] == [d for d in b if d != 1]
