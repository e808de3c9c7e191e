"""Products of queries or keys with embeddings of relative positions lose their gathers and copies (DeBERTa: He et al., 2021).

Exporters write the bias of disentangled attention as products of B * H matrices with embeddings that are repeated B times. From
each product, GatherElements takes, for query i and key j, the column of i - j. The rules are independent of one another:

- ``split_leading``: the axis of B * H is split into B and H, through all operators up to the Reshapes that merged them.
- ``shifted_columns``: columns that move by one with each row are a view of the product. With N columns, column ``c + j - i`` of
  row i is element ``i * (N - 1) + c + j`` of the flat rows: a Reshape to rows of N - 1. Only the columns that are taken are
  computed.
- ``padded_shift``: the same view, for exporters that pad, flatten and cut the rows (BoTNet, HaloNet).
- ``consecutive_rows`` and ``scaled_view`` (:mod:`optdnn.passes.rules.scaled_views`): neighboring columns are a Slice, and the
  constant absorbs the scale of such a view.
- ``position_features`` (:mod:`optdnn.passes.rules.position_features`): terms of several axes become features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.fused import plain_attrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.position_features import position_features
from optdnn.passes.rules.scaled_views import consecutive_rows, scaled_view
from optdnn.passes.support.facts import (
    RESHAPES,
    integers,
    ints,
    operand,
    producer,
    reshaped,
    shape_of,
    sliced,
)
from optdnn.passes.support.paths import path_to
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import Array

_MOST = 64
"""Most operators between a Reshape and the Reshapes that it cancels."""
_ALIGNED = 8
"""16-bit columns in 16 bytes: the number of columns is padded to a multiple of this."""
_CUTS = RESHAPES | {"Pad", "Slice"}
_LINKS = 8
_PLACES = 1 << 22
"""Most elements of a product whose positions are traced through Pads and Slices."""
Made = Callable[[Patch], Value]
"""A function that adds a value to a patch."""


# ---------------------------------------------------------------- one axis becomes two again


@dataclass
class _Splitter:
    """Builds values whose first axis of ``outer * inner`` is split in two. ``seen``: the operators that are replaced."""

    graph: Graph
    outer: int
    inner: int
    seen: list[Op] = field(default_factory=list)

    def split(self, value: Value, rank: int, whole: bool = False) -> Made | str:
        """A function that adds ``value`` with its first axis split in two, or the reason why there is none. ``value`` is an operand
        of an operator whose result has ``rank`` axes. ``whole``: the operator does not broadcast it."""
        op, shape = self.graph.op(value), shape_of(self.graph, value)
        if shape is None or len(self.seen) > _MOST:
            return (
                f"{op.name} has no known shape"
                if shape is None
                else "there are too many operators between the reshapes"
            )
        array = self.graph.constant_value(value)
        if array is not None and array.ndim < rank:
            return lambda patch: value
        if array is not None and array.shape[0] == 1 and not whole:
            return lambda patch: patch.constant(array[None], "split")
        if len(shape) != rank or shape[0] != self.outer * self.inner:
            return f"{op.name} has another first axis"
        if array is not None:
            split = array.reshape(self.outer, self.inner, *array.shape[1:])
            once = not whole and bool((split == split[:1]).all())
            return lambda patch: patch.constant(split[:1] if once else split, "split")
        if op.kind in RESHAPES and (shape_of(self.graph, op.inputs[0]) or ()) == (self.outer, self.inner, *shape[1:]):
            return lambda patch: operand(op)
        repeated = self._repeated(op, shape, whole)
        return self._through(op, value, rank) if repeated is None else repeated

    def _repeated(self, op: Op, shape: tuple[object, ...], whole: bool) -> Made | None:
        """A constant that a Tile or Expand repeats along the batch: stored once, or expanded if ``whole``; None for other ops."""
        given = self.graph.constant_value(op.input(0)) if op.kind in ("Tile", "Expand") else None
        if given is None or given.ndim != len(shape) or any(not isinstance(n, int) for n in shape):
            return None
        if op.kind == "Tile" and not whole and ints(self.graph, op.input(1)) == (self.outer, *(1 for _ in shape[1:])):
            return lambda patch: patch.constant(given[None], "repeated")
        if op.kind == "Expand" and given.shape[0] == 1:
            target = (self.outer, self.inner, *(int(n) for n in shape[1:] if isinstance(n, int)))
            return lambda patch: patch.add(
                "Expand", [patch.constant(given[None], "repeated"), integers(patch, target, "shape")]
            )
        return None

    def _through(self, op: Op, value: Value, rank: int) -> Made | str:
        """The operator on split operands."""
        if self.graph.sole_user(value) is None:
            return f"{op.name} has another reader"
        if op.kind in ("Input", "Constant"):
            return f"{op.name} is not computed"
        attrs, kinds = op.attrs, op.definition.traits
        if op.kind == "Transpose" and attrs.perm is not None and attrs.perm[0] == 0:
            attrs = TransposeAttrs((0, 1, *(p + 1 for p in attrs.perm[1:])))
        elif op.kind == "GatherElements" and attrs.axis % rank != 0:
            attrs = replace(attrs, axis=attrs.axis % rank + 1)
        elif op.kind == "MatMul" and rank < 3:
            return f"{op.name} multiplies by one matrix, whose first axis is not a batch"
        elif (
            not (kinds.pointwise or (op.kind == "MatMul" and not attrs.prologue and not attrs.epilogue))
            or len(op.outputs) != 1
        ):
            return f"{op.name} ({op.kind}) does not treat the first axis as a batch"
        self.seen.append(op)
        made: list[Made | None] = []
        for given in op.inputs:
            found = None if given is None else self.split(given, rank, whole=op.kind == "GatherElements")
            if isinstance(found, str):
                return found
            made.append(found)
        return lambda patch: patch.add(op.kind, [None if m is None else m(patch) for m in made], attrs)


@rule("split_leading", {"Reshape"})
def split_leading(graph: Graph, op: Op) -> Match | Miss | None:
    """``(B * H, …) -> (B, H, …)`` moves up to the Reshapes that merged B and H, and cancels with them."""
    before, after = shape_of(graph, op.inputs[0]), op.outputs[0].type.shape
    if before is None or after is None or len(after) != len(before) + 1 or len(before) < 2 or after[2:] != before[1:]:
        return None
    outer, inner = after[:2]
    if (
        not isinstance(outer, int)
        or not isinstance(inner, int)
        or graph.op(operand(op)).kind in RESHAPES
        or outer * inner != before[0]
    ):
        return None
    splitter = _Splitter(graph, outer, inner)
    found = splitter.split(operand(op), len(before))
    if not splitter.seen:
        return None
    return Miss(found) if isinstance(found, str) else Match((op, *splitter.seen), found)


# ---------------------------------------------------------------- columns that move with the rows


def _matrix(graph: Graph, value: Value) -> Array | None:
    """The array of a constant, or of a Transpose of a constant; None for other values."""
    if (turn := producer(graph, value, {"Transpose"})) is not None and turn.attrs.perm is not None:
        array = graph.constant_value(turn.inputs[0])
        return None if array is None else array.transpose(turn.attrs.perm)
    return graph.constant_value(value)


def _indices(graph: Graph, value: Value) -> Array | None:
    """The constant indices (rows, columns) for all matrices of a stack; None if they differ or are not known."""
    spread = producer(graph, value, {"Expand"})
    array = graph.constant_value(value if spread is None else spread.inputs[0])
    shape = shape_of(graph, value)
    if array is None or shape is None or array.ndim < 2 or array.shape[-2:] != shape[-2:]:
        return None
    flat = array.reshape(-1, *array.shape[-2:])
    return flat[0] if bool((flat == flat[:1]).all()) else None


@rule("shifted_columns", {"GatherElements"})
def shifted_columns(graph: Graph, op: Op) -> Match | Miss | None:
    """``GatherElements(x @ W, c ± (j - i))`` along the columns, W constant, as a view of ``x @ columns of W``."""
    product = producer(graph, op.inputs[0], {"MatMul"}, alone=True)
    shape = op.outputs[0].type.shape
    if product is None or shape is None or product.attrs.prologue or product.attrs.epilogue:
        return None
    whole, weight = shape_of(graph, product.value), _matrix(graph, operand(product, 1))
    if whole is None or op.attrs.axis % len(shape) != len(shape) - 1 or shape[:-1] != whole[:-1]:
        return None
    if weight is None or weight.ndim < 2 or any(not isinstance(n, int) for n in shape):
        return Miss(f"the other factor of {product.name} is not constant")
    found = _indices(graph, operand(op, 1))
    if found is None:
        return Miss("its indices are not known, or not the same for all matrices")
    rows, columns = (int(n) for n in found.shape)
    step = 1 if columns < 2 else int(found[0, 1] - found[0, 0])
    wanted = found[0, 0] + step * (np.arange(columns) - np.arange(rows)[:, None])
    if (
        rows < 2
        or abs(step) != 1
        or not np.array_equal(found, wanted)
        or found.min() < 0
        or found.max() >= weight.shape[-1]
    ):
        return Miss("its indices do not move by one with each row and column")
    taken = int(found[-1, 0]) + step * np.arange(
        rows + columns - 1
    )  # from the last row's first one on, in the order of j - i
    stack = tuple(int(n) for n in shape[:-2] if isinstance(n, int))
    return Match(
        (op, product), lambda patch: _shifted(patch, operand(product), weight[..., taken], (*stack, rows, columns))
    )


def _shifted(patch: Patch, x: Value, matrix: Array, shape: tuple[int, ...]) -> Value:
    """Columns ``rows - 1 + j - i`` of ``x @ matrix``, for row i and column j of ``shape`` (…, rows, columns)."""
    *stack, rows, columns = shape
    spare = [(0, 0)] * (matrix.ndim - 1) + [(0, -matrix.shape[-1] % _ALIGNED)]
    y = patch.add("MatMul", [x, patch.constant(np.pad(matrix, spare), "positions")], MatMulAttrs())
    pitch = matrix.shape[-1] + spare[-1][1] - 1
    flat = _sliced(patch, reshaped(patch, y, (*stack, rows * (pitch + 1))), rows - 1, rows - 1 + rows * pitch)
    return _sliced(patch, reshaped(patch, flat, (*stack, rows, pitch)), 0, columns)


@rule("padded_shift", {"Slice"})
def padded_shift(graph: Graph, op: Op) -> Match | Miss | None:
    """Rows of a product that are padded, flattened and cut so that columns move by one per row become the same view.

    ``x @ W`` with 2 n - 1 columns is padded by one column, and the flattened rows by n - 1 elements. They are cut into rows of
    2 n - 1. Without their first n - 1 elements, these hold each query's bias for all keys (attention of images: Bello et al.,
    2019)."""
    chain, product = _cut_rows(graph, op)
    if product is None or not any(o.kind == "Pad" for o in chain):
        return None
    whole, weight = shape_of(graph, product.value), _matrix(graph, operand(product, 1))
    if weight is None:
        return Miss(f"the other factor of {product.name} is not constant")
    if whole is None or any(not isinstance(n, int) for n in whole) or np.prod(whole, dtype=np.int64) > _PLACES:  # type: ignore[arg-type]
        return Miss(f"{product.name} has no known shape, or too many elements")
    if len(whole) < 2:
        return None
    found = _places(graph, chain, np.arange(np.prod(whole, dtype=np.int64)).reshape(whole))  # type: ignore[arg-type]
    count, width = int(whole[-2]), int(whole[-1])  # type: ignore[arg-type]
    if found is None or found.ndim < 2 or found.shape[-2] != count or found.size % (count * found.shape[-1]):
        return Miss("its rows are not those of the product")
    columns = int(found.shape[-1])
    first = int(found.flat[0])
    moved = first + np.arange(columns) + np.arange(count)[:, None] * (width - 1)
    stacks = np.arange(found.size // (count * columns))[:, None, None] * (count * width)
    if found.size // columns != np.prod(whole[:-1], dtype=np.int64) or not np.array_equal(  # type: ignore[arg-type]
        found.reshape(-1, count, columns), moved + stacks
    ):
        return Miss("its columns do not move by one with each row, or are padding")
    if not count - 1 <= first <= width - columns:
        return Miss("its columns come from neighboring rows")
    cut = weight[..., first - count + 1 : first + columns]

    def build(patch: Patch) -> Value:
        stack = tuple(int(n) for n in whole[:-2])  # type: ignore[arg-type]
        return reshaped(patch, _shifted(patch, operand(product), cut, (*stack, count, columns)), found.shape)

    return Match((op, *chain[1:], product), build)


def _cut_rows(graph: Graph, op: Op) -> tuple[list[Op], Op | None]:
    """The Slices, Reshapes and Pads from ``op`` up to a plain product without other readers, and that product (or None)."""
    chain = [op, *path_to(graph, operand(op), _CUTS, alone=True, most=_LINKS - 1)]
    source = graph.op(operand(chain[-1]))
    plain = source.kind == "MatMul" and not (source.attrs.prologue or source.attrs.epilogue)
    return chain, source if plain and graph.sole_user(source.value) is not None else None


def _places(graph: Graph, chain: list[Op], numbers: Array) -> Array | None:
    """``numbers`` after the operators of ``chain`` (last operator first); -1 for padding. None if the result is not known."""
    for op in reversed(chain):
        if op.kind in RESHAPES:
            shape = op.outputs[0].type.shape
            if shape is None or any(not isinstance(n, int) for n in shape):
                return None
            numbers = numbers.reshape(shape)  # type: ignore[arg-type]
            continue
        given = [None if v is None else graph.constant_value(v) for v in op.inputs[1:]]
        if any(g is None and v is not None for g, v in zip(given, op.inputs[1:], strict=True)):
            return None
        if op.kind == "Pad":
            if op.attrs.mode != "constant":
                return None
            given[1:2] = [np.asarray(-1, numbers.dtype)]
        (numbers,) = run_kernel(op.kind, [numbers, *given], plain_attrs(op.definition, op.attrs))
    return numbers


def _sliced(patch: Patch, x: Value, start: int, end: int) -> Value:
    """Elements ``start`` to ``end`` along the last axis."""
    axis = len(patch.type(x).static_shape) - 1
    return sliced(patch, x, start, end, axis)


class RelativePositions(RulePass):
    name = "relative_positions"
    sinks_first = True  # an axis is split before gathers become slices
    rules = (split_leading, shifted_columns, padded_shift, consecutive_rows, scaled_view, position_features)
