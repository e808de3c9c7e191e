"""Widens an axis of features: traces its producers and readers, and pads each group of features in their weights with zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import SplitAttrs
from optdnn.passes.support.facts import in_shape, integers, ints, operand, sliced
from optdnn.passes.support.parts import span
from optdnn.passes.support.products import output_axis
from optdnn.types import Array, Shape, normalize_axis, product


def widened(x: Array, axis: int, size: int, wide: int) -> Array:
    """``x`` in which each group of ``size`` elements along ``axis`` is padded with zeros to ``wide`` elements."""
    axis = axis % x.ndim
    groups = x.shape[axis] // size
    split = x.reshape(*x.shape[:axis], groups, size, *x.shape[axis + 1 :])
    pads = [(0, 0)] * split.ndim
    pads[axis + 1] = (0, wide - size)
    return np.pad(split, pads).reshape(*x.shape[:axis], groups * wide, *x.shape[axis + 1 :])


def other_axis(after: Shape, axis: int, before: Shape, size: int) -> int | None:
    """The axis of a Reshape's operand (shape ``before``) that holds the features of ``axis`` of its result (shape ``after``).

    None if there is no such axis, or if it is not known."""
    stride = product(after[axis + 1 :])
    found = 1
    if not isinstance(stride, int):
        return None
    for i in reversed(range(len(before))):
        d = before[i]
        if not isinstance(d, int):
            return None
        if found == stride and d % size == 0:
            return i
        found *= d
    return None


class Widths:
    """A plan that gives ``x``, an operand of ``reader``, ``wide`` features instead of ``size`` along ``axis``.

    ``traced``: the operators that are rebuilt. ``copied``: the values that no weights can widen, so a Pad must. ``together``: the
    other operands of ``reader`` are widened in the same way, and may come from the same operators.
    """

    def __init__(self, graph: Graph, reader: Op, x: Value, axis: int, size: int, wide: int, *, together: bool):
        self.graph, self.x, self.axis, self.size, self.wide = graph, x, axis, size, wide
        self.together = together
        self._blocked: set[int] = set()
        while True:
            self._wide_sources: dict[tuple[Value, int], bool] = {}
            """(value, axis) -> whether the operators before the value can compute it with wider features."""
            self._walk(x, axis)
            self.traced = list(
                {
                    v.op: graph.op(v)
                    for (v, _), possible in self._wide_sources.items()
                    if possible and not self._constant(v)
                }.values()
            )
            inside = {op.id for op in self.traced} | {reader.id}
            shared = {op.id for op in self.traced if not self._own(op, inside, reader)}
            if not shared:
                break
            self._blocked |= shared
        self.copied = self._leaves(x, axis)

    def _own(self, op: Op, inside: set[int], reader: Op) -> bool:
        """Whether only operators of this plan read ``op``; with ``together``, also operators that lead only to ``reader``."""
        return all(
            user.id in inside or (self.together and self._leads(user, reader))
            for value in op.values
            for user in self.graph.users(value)
        )

    def _leads(self, user: Op, reader: Op, depth: int = 8) -> bool:
        """Whether all results of ``user`` lead only to ``reader``, directly or through views and factors."""
        if depth == 0 or user.kind not in (*_VIEWS, "Mul", "LpNormalization"):
            return False
        users = [u for v in user.values for u in self.graph.users(v)]
        return bool(users) and all(u.id == reader.id or self._leads(u, reader, depth - 1) for u in users)

    def _constant(self, x: Value) -> bool:
        return self.graph.constant_value(x) is not None

    def _walk(self, x: Value, axis: int) -> bool:
        """Whether the operators before ``x`` can compute it with wider features."""
        key = (x, axis)
        if key not in self._wide_sources:
            self._wide_sources[key] = False
            op = self.graph.op(x)
            if self._constant(x):
                self._wide_sources[key] = True
            elif op.id not in self._blocked:
                step = _STEPS.get(op.kind)
                before = step(self.graph, op, axis, self.size) if step else None
                possible = before is not None and all(self._walk(v, a) or self._single(v, a) for v, a in before)
                self._wide_sources[key] = possible
        return self._wide_sources[key]

    def _single(self, x: Value, axis: int) -> bool:
        """Whether the axis holds a single group of features, which a Pad can widen."""
        return self.graph.type(x).dims[axis] == self.size

    def _leaves(self, x: Value, axis: int) -> list[Value]:
        """The values before ``x`` that no weights can widen."""
        if not self._wide_sources[(x, axis)]:
            return [x]
        op = self.graph.op(x)
        if self._constant(x):
            return []
        before = _STEPS[op.kind](self.graph, op, axis, self.size) or ()
        return [leaf for v, a in before for leaf in self._leaves(v, a)]

    def rebuilt(self, patch: Patch, built: dict[tuple[Value, int], Value]) -> Value:
        """Add the operators that compute the wider value. ``built``: (value, axis) -> the wider value, if it exists already."""
        return self._rebuilt(patch, self.x, self.axis, built)

    def _rebuilt(self, patch: Patch, x: Value, axis: int, built: dict[tuple[Value, int], Value]) -> Value:
        key = (x, axis)
        if key in built:
            return built[key]
        if (known := self.graph.constant_value(x)) is not None:
            built[key] = patch.constant(widened(known, axis, self.size, self.wide), "widened")
            return built[key]
        op = self.graph.op(x)
        before = _STEPS[op.kind](self.graph, op, axis, self.size) or ()
        new = [self._rebuilt(patch, v, a, built) for v, a in before]
        outputs = _BUILD.get(op.kind, _as_before)(patch, op, axis, new, self.size, self.wide)
        for i, y in enumerate(outputs):
            built[(Value(op.id, i), axis)] = y
        return built[key]


# ---------------------------------------------------------------- operators before the value

_VIEWS = ("Reshape", "Transpose", "Split", "Slice", "Gather")
Sources = Sequence[tuple[Value, int]] | None


def _of_reshape(graph: Graph, op: Op, axis: int, size: int) -> Sources:
    before = graph.type(operand(op)).dims
    found = other_axis(op.outputs[0].type.dims, axis, before, size)
    return None if found is None else [(operand(op), found)]


def _of_split(graph: Graph, op: Op, axis: int, size: int) -> Sources:
    if normalize_axis(op.attrs.axis, len(op.outputs[0].type.dims)) != axis:
        return [(operand(op), axis)]
    sizes = [part.type.dims[axis] for part in op.outputs]
    return [(operand(op), axis)] if all(isinstance(n, int) and n % size == 0 for n in sizes) else None


def _of_slice(graph: Graph, op: Op, axis: int, size: int) -> Sources:
    axes = ints(graph, op.input(3))
    rank = len(op.outputs[0].type.dims)
    other = axes is not None and all(a % rank != axis for a in axes)
    return [(operand(op), axis)] if other or _whole_groups(graph, op, axis, size) is not None else None


def _whole_groups(graph: Graph, op: Op, axis: int, size: int) -> tuple[int, int] | None:
    """First and one past the last group that a Slice of only this axis takes; None if it takes parts of a group."""
    dims = graph.type(operand(op)).dims
    width = dims[axis]
    found = span(graph, op, width, axis - len(dims)) if isinstance(width, int) else None
    if found is None or found[2] != 1 or any(n % size for n in (width, *found[:2])):
        return None
    return found[0] // size, found[1] // size


def _of_gather(graph: Graph, op: Op, axis: int, size: int) -> Sources:
    rank = len(graph.type(operand(op)).dims)
    at, added = normalize_axis(op.attrs.axis, rank), len(graph.type(operand(op, 1)).dims)
    if at <= axis < at + added:
        return None
    return [(operand(op), axis if axis < at else axis - added + 1)]


def _of_arithmetic(graph: Graph, op: Op, axis: int, size: int) -> Sources:
    """Add or Mul with a constant. A factor with one element per head stays as it is; an added constant must have all features."""
    rank = len(op.outputs[0].type.dims)
    first, second = operand(op), operand(op, 1)
    if graph.constant_value(first) is not None:
        first, second = second, first
    c = graph.constant_value(second)
    if (
        c is None
        or len(graph.type(first).dims) != rank
        or graph.type(first).dims[axis] != op.outputs[0].type.dims[axis]
    ):
        return None
    own = axis - rank + c.ndim
    if own < 0 or c.shape[own] == 1:
        return [(first, axis)] if op.kind == "Mul" else None
    return [(first, axis)]


def _of_norm(graph: Graph, op: Op, axis: int, size: int) -> Sources:
    dims = op.outputs[0].type.dims
    return [(operand(op), axis)] if normalize_axis(op.attrs.axis, len(dims)) == axis and dims[axis] == size else None


def _of_rotary(graph: Graph, op: Op, axis: int, size: int) -> Sources:
    """A RotaryEmbedding rotates only the first ``rotary_embedding_dim`` features of a head, and copies the zeros after them."""
    x = operand(op)
    return [(x, axis)] if axis == 3 and graph.type(x).dims[axis] == size else None


def _of_product(graph: Graph, op: Op, axis: int, size: int) -> Sources:
    """A product needs no wider operand: its weights are widened."""
    weights = graph.constant_value(op.input(1))
    if weights is None or weights.ndim != 2 or axis != len(op.outputs[0].type.dims) - 1 or has_stages_or_factors(op):
        return None
    bias = graph.constant_value(op.input(2)) if op.kind == "Gemm" else None
    columns = op.outputs[0].type.dims[-1]
    if op.kind == "Gemm" and op.input(2) is not None and (bias is None or bias.shape[-1:] != (columns,)):
        return None
    return []


def _of_convolution(graph: Graph, op: Op, axis: int, size: int) -> Sources:
    bias = op.input(2)
    constant = graph.constant_value(op.input(1)) is not None
    fits = bias is None or graph.constant_value(bias) is not None
    return [] if constant and fits and axis == 1 and op.attrs.group == 1 and not has_stages_or_factors(op) else None


def has_stages_or_factors(op: Op) -> bool:
    """Whether a product or convolution has fused stages, or multiplies factors of a special type."""
    return bool(op.attrs.prologue or op.attrs.epilogue or op.attrs.factors)


_STEPS: dict[str, Callable[[Graph, Op, int, int], Sources]] = {
    "Transpose": lambda graph, op, axis, size: [(operand(op), op.attrs.perm[axis])],
    "Reshape": _of_reshape,
    "Split": _of_split,
    "Slice": _of_slice,
    "Gather": _of_gather,
    "Add": _of_arithmetic,
    "Mul": _of_arithmetic,
    "LpNormalization": _of_norm,
    "RotaryEmbedding": _of_rotary,
    "MatMul": _of_product,
    "Gemm": _of_product,
    "Conv": _of_convolution,
}
"""Kind -> function that returns the operands, with their axes, that hold the features of an axis of the result, or None."""


def _as_before(patch: Patch, op: Op, axis: int, new: Sequence[Value], size: int, wide: int) -> Sequence[Value]:
    copy = patch.add_op(
        op.kind, [*new, *op.inputs[len(new) :]], op.attrs, outputs=len(op.outputs), names=[""] * len(op.outputs)
    )
    return [Value(copy.id, i) for i in range(len(op.outputs))]


def _reshape(patch: Patch, op: Op, axis: int, new: Sequence[Value], size: int, wide: int) -> Sequence[Value]:
    return [reshaped_to(patch, new[0], op.outputs[0].type.dims, axis, size, wide)]


def reshaped_to(patch: Patch, x: Value, after: Shape, axis: int, size: int, wide: int) -> Value:
    """Add a Reshape of ``x`` to ``after``, with ``wide`` instead of ``size`` features in each group along ``axis``."""
    dims = [*after]
    dims[axis] = int(dims[axis]) // size * wide  # type: ignore[arg-type]
    return in_shape(patch, x, tuple(dims))


def _rotary(patch: Patch, op: Op, axis: int, new: Sequence[Value], size: int, wide: int) -> Sequence[Value]:
    attrs = replace(op.attrs, rotary_embedding_dim=op.attrs.rotary_embedding_dim or size)
    return [patch.add("RotaryEmbedding", [*new, *op.inputs[1:]], attrs)]


def _split(patch: Patch, op: Op, axis: int, new: Sequence[Value], size: int, wide: int) -> Sequence[Value]:
    if normalize_axis(op.attrs.axis, len(op.outputs[0].type.dims)) != axis:
        return _as_before(patch, op, axis, new, size, wide)
    sizes = [int(part.type.dims[axis]) // size * wide for part in op.outputs]  # type: ignore[arg-type]
    count = len(sizes)
    inputs = [new[0], integers(patch, sizes, "sizes")]
    copy = patch.add_op("Split", inputs, SplitAttrs(axis), outputs=count, names=[""] * count)
    return [Value(copy.id, i) for i in range(count)]


def _slice(patch: Patch, op: Op, axis: int, new: Sequence[Value], size: int, wide: int) -> Sequence[Value]:
    groups = _whole_groups(patch.graph, op, axis, size)
    if groups is None:
        return _as_before(patch, op, axis, new, size, wide)
    return [sliced(patch, new[0], groups[0] * wide, groups[1] * wide, axis)]


def _arithmetic(patch: Patch, op: Op, axis: int, new: Sequence[Value], size: int, wide: int) -> Sequence[Value]:
    rank = len(op.outputs[0].type.dims)
    slot = 0 if patch.graph.constant_value(operand(op)) is not None else 1
    c = patch.graph.constant_value(operand(op, slot))
    assert c is not None
    own = axis - rank + c.ndim
    other = (
        operand(op, slot) if own < 0 or c.shape[own] == 1 else patch.constant(widened(c, own, size, wide), "widened")
    )
    return [patch.add(op.kind, [other, new[0]] if slot == 0 else [new[0], other], op.attrs)]


def _product(patch: Patch, op: Op, axis: int, new: Sequence[Value], size: int, wide: int) -> Sequence[Value]:
    inputs: list[Any] = [*op.inputs]
    inputs[1] = patch.constant(widened(constant_of(patch.graph, op, 1), output_axis(op), size, wide), "widened")
    if op.input(2) is not None:
        inputs[2] = patch.constant(widened(constant_of(patch.graph, op, 2), -1, size, wide), "widened")
    return [patch.add(op.kind, inputs, op.attrs)]


def constant_of(graph: Graph, op: Op, slot: int) -> Array:
    """The constant operand ``slot`` of an op, which must be constant."""
    found = graph.constant_value(operand(op, slot))
    assert found is not None
    return found


_BUILD = {
    "Reshape": _reshape,
    "RotaryEmbedding": _rotary,
    "Split": _split,
    "Slice": _slice,
    "Add": _arithmetic,
    "Mul": _arithmetic,
    **dict.fromkeys(("MatMul", "Gemm", "Conv"), _product),
}


# ---------------------------------------------------------------- readers of the value


class Readers:
    """The views after ``op``, and the product (``sink``) after them that is the only reader of its features.

    ``sink`` is None if there is no such product."""

    def __init__(self, graph: Graph, op: Op, axis: int, size: int):
        self.graph, self.size, self.start = graph, size, axis
        self.chain: list[Op] = []
        self.sink: Op | None = None
        at = op
        while (user := graph.sole_user(at.value)) is not None and self.sink is None:
            if _is_sink(graph, user, at.value, axis):
                self.sink = user
            else:
                after = _axis_after(user, graph, axis, size)
                if after is None:
                    break
                axis = after
            self.chain.append(user)
            at = user
        if self.sink is None:
            self.chain = []

    def rebuilt(self, patch: Patch, y: Value, wide: int) -> Value:
        """Add the views and the product for the wider value ``y``; returns the product's result."""
        axis = self.start
        for op in self.chain:
            if op is self.sink:
                weights = widened(constant_of(self.graph, op, 1), 1 - output_axis(op), self.size, wide)
                return patch.add(op.kind, [y, patch.constant(weights, "widened"), *op.inputs[2:]], op.attrs)
            after = _axis_after(op, self.graph, axis, self.size)
            assert after is not None
            if op.kind == "Transpose":
                y = patch.add("Transpose", [y], op.attrs)
            else:
                y = reshaped_to(patch, y, op.outputs[0].type.dims, after, self.size, wide)
            axis = after
        return y


def _axis_after(op: Op, graph: Graph, axis: int, size: int) -> int | None:
    """The axis of a view's result that holds the features of ``axis`` of its operand; None if it is not known."""
    if op.kind == "Transpose":
        return list(op.attrs.perm).index(axis)
    if op.kind == "Reshape":
        return other_axis(graph.type(operand(op)).dims, axis, op.outputs[0].type.dims, size)
    return None


def _is_sink(graph: Graph, op: Op, x: Value, axis: int) -> bool:
    """Whether ``op`` is a product or convolution with constant weights that sums over ``axis`` of ``x``."""
    weights = graph.constant_value(op.input(1)) if op.kind in ("MatMul", "Gemm", "Conv") else None
    if weights is None or op.inputs[0] != x or op.inputs[1] == x or has_stages_or_factors(op):
        return False
    if op.kind == "Conv":
        return axis == 1 and op.attrs.group == 1
    last = axis == len(graph.type(x).dims) - 1
    return last and weights.ndim == 2 and not (op.kind == "Gemm" and op.attrs.transA)
