"""Chains of reshapes and transposes as data, which can be simplified before it is written back as ops.

A :class:`View` is a base value and the moves (reshapes and transposes) that lead from it to another value. Moves are kept in a
normal form when one is appended:

- Neighboring moves of one kind merge, and moves without effect disappear.
- An exchange of the last two axes moves before a Reshape that does not change these axes.
- A Reshape that only splits axes moves before a Transpose, and merges with the Reshape there.
- A Transpose moves before a Reshape if it can then merge with another Transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from optdnn.dim import DimLike
from optdnn.ir.graph import Graph, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.support.facts import RESHAPES, exchange_last, operand, reshape_target, reshaped, shape_of
from optdnn.types import Shape


@dataclass(frozen=True)
class Move:
    """A Transpose by ``perm``, or a Reshape (``perm`` is None). ``shape`` is the shape of the result."""

    shape: Shape
    perm: tuple[int, ...] | None = None


@dataclass(frozen=True)
class View:
    """``moves`` applied to ``base``, which has the shape ``before``."""

    base: Value
    before: Shape
    moves: tuple[Move, ...] = ()

    @property
    def shape(self) -> Shape:
        return self.moves[-1].shape if self.moves else self.before

    def reshape(self, shape: Shape) -> View:
        """The view followed by a Reshape to ``shape``."""
        return self._with(Move(tuple(shape)))

    def transpose(self, perm: tuple[int, ...]) -> View:
        """The view followed by a Transpose."""
        return self._with(Move(tuple(self.shape[p] for p in perm), perm))

    def swap_last(self) -> View:
        """The view with its last two axes exchanged."""
        return self.transpose(exchange_last(len(self.shape)))

    def moved(self, moves: Sequence[Move]) -> View:
        """The view followed by ``moves``."""
        view = self
        for move in moves:
            view = view.reshape(move.shape) if move.perm is None else view.transpose(move.perm)
        return view

    def _with(self, move: Move) -> View:
        """The view followed by ``move``, in normal form."""
        last = self.moves[-1] if self.moves else None
        earlier = replace(self, moves=self.moves[:-1])
        if move.perm is None:
            if move.shape == self.shape:
                return self
            if last is None:
                return replace(self, moves=(move,))
            if last.perm is None:
                return earlier.reshape(move.shape)
            split = _split(earlier.shape, last.perm, move.shape) if earlier.moves else None
            if split is not None:
                return earlier.reshape(split[0]).transpose(split[1])
            return replace(self, moves=(*self.moves, move))
        if move.perm == tuple(range(len(move.perm))):
            return self
        if last is not None and last.perm is not None:
            inner = last.perm
            return earlier.transpose(tuple(inner[p] for p in move.perm))
        exchange = move.perm == exchange_last(len(move.perm))
        if exchange and last is not None and earlier.shape[-2:] == last.shape[-2:] and len(earlier.shape) >= 2:
            return earlier.swap_last().reshape(move.shape)
        if earlier.moves and earlier.moves[-1].perm is not None:
            passed = _through(earlier.shape, self.shape, move.perm)
            if passed is not None:
                return earlier.transpose(passed).reshape(move.shape)
        return replace(self, moves=(*self.moves, move))

    def add_to(self, patch: Patch) -> Value | None:
        """Add the ops of the view; None if no constant target can express one of its reshapes."""
        value, shape = self.base, self.before
        for move in self.moves:
            if move.perm is not None:
                value = patch.add("Transpose", [value], TransposeAttrs(move.perm))
            else:
                target = reshape_target(shape, move.shape)
                if target is None:
                    return None
                value = reshaped(patch, value, target)
            shape = move.shape
        return value

    @property
    def expressible(self) -> bool:
        """Whether :meth:`add_to` succeeds."""
        shapes = [self.before, *(m.shape for m in self.moves)]
        return all(
            m.perm is not None or reshape_target(shape, m.shape) is not None
            for shape, m in zip(shapes, self.moves, strict=False)
        )


def _through(before: Shape, after: Shape, perm: tuple[int, ...]) -> tuple[int, ...] | None:
    """The permutation of ``before`` that does the same as the permutation ``perm`` of its Reshape ``after``.

    None if ``perm`` separates axes that the Reshape splits from one group of axes."""
    lined = groups(before, after)
    if lined is None:
        return None
    owner = {j: (k, n) for k, (_, right) in enumerate(lined) for n, j in enumerate(right)}
    order: list[int] = []
    for position, axis in enumerate(perm):
        k, n = owner[axis]
        if n == 0:
            order.append(k)
        elif position == 0 or owner[perm[position - 1]] != (k, n - 1):
            return None
    dropped = [k for k, (_, right) in enumerate(lined) if not right]  # axes of size 1 that the Reshape removes
    front = [k for k in dropped if k < min(order, default=0)]  # a batch of one item stays in front
    return tuple(i for k in dict.fromkeys((*front, *order, *dropped)) for i in lined[k][0])


def _split(before: Shape, perm: tuple[int, ...], after: Shape) -> tuple[Shape, tuple[int, ...]] | None:
    """(shape, permutation) of a Reshape and a Transpose that do the same as Transpose ``perm`` and a Reshape to ``after``.

    None if the latter Reshape does more than split axes.
    """
    lined = groups(tuple(before[p] for p in perm), after)
    if lined is None or any(len(left) != 1 for left, _ in lined):
        return None
    parts = {perm[left[0]]: right for left, right in lined}  # axis of before -> axes of after
    shape = tuple(after[j] for axis in range(len(before)) for j in parts[axis])
    position = {j: n for n, j in enumerate(j for axis in range(len(before)) for j in parts[axis])}
    return shape, tuple(position[j] for j in range(len(after)))


def keeps_last_two(before: Shape | None, after: Shape | None) -> bool:
    """Whether a Reshape from ``before`` to ``after`` keeps the last two axes."""
    known = before is not None and after is not None and len(before) >= 2 and len(after) >= 2
    return known and before[-2:] == after[-2:]  # type: ignore[index]


def groups(fine: Shape, coarse: Shape) -> list[tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """The axes of two shapes in the smallest groups with equal products, in order; None if there are no such groups.

    (2, 64, 3) and (128, 3) give [((0, 1), (0,)), ((2,), (1,))].
    """
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    i = j = 0
    while i < len(fine) or j < len(coarse):
        first, second = i, j
        a: DimLike = 1
        b: DimLike = 1
        while True:
            if i < len(fine) and (i == first or _smaller(a, b)):
                a, i = a * fine[i], i + 1
            elif j < len(coarse):
                b, j = b * coarse[j], j + 1
            elif i < len(fine):
                a, i = a * fine[i], i + 1
            else:
                return None
            if a == b:
                break
        found.append((tuple(range(first, i)), tuple(range(second, j))))
    return found


def _smaller(a: DimLike, b: DimLike) -> bool:
    """Whether the product ``a`` of sizes is smaller than the product ``b``; symbols count as large."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    return isinstance(a, int)


def trace(graph: Graph, value: Value) -> View | None:
    """The view that ends at ``value``: all reshapes and transposes before it, and their base. None if its rank is unknown."""
    moves: list[Move] = []
    while True:
        op, shape = graph.op(value), shape_of(graph, value)
        if shape is None:
            return None
        if op.kind not in RESHAPES | {"Transpose"} or shape_of(graph, op.inputs[0]) is None:
            return View(value, shape).moved(moves[::-1])
        perm = None
        if op.kind == "Transpose":
            perm = tuple(op.attrs.perm or reversed(range(len(shape))))
        moves.append(Move(shape, perm))
        value = operand(op)


def transposed(patch: Patch, x: Value, perm: tuple[int, ...]) -> Value:
    """Add a Transpose, unless the permutation is the identity."""
    return x if perm == tuple(range(len(perm))) else patch.add("Transpose", [x], TransposeAttrs(perm))
