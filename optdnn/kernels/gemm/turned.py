"""Products whose launch rotates heads of its result: queries and keys with rotary position embeddings (``conv_turns.cuh``).

Queries and keys are columns of one product. Views separate them, and a RotaryEmbedding rotates each. The product's
launch rotates them in its output tile in shared memory, before the store. So attention reads all of them from the
product's result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.errors import UnsupportedError
from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView, row_major
from optdnn.kernels.conv.fused import Convolution
from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.conv.row_forms import HeadTurn
from optdnn.kernels.gemm.hopper import HopperGemm
from optdnn.kernels.gemm.normed import NormedGemm
from optdnn.kernels.gemm.row_norms import refuse_order, stages_of
from optdnn.kernels.layout.views import VIEWS
from optdnn.kernels.tactic import Region
from optdnn.types import BF16, FP16, Array

LEAST_ROWS = 32
"""Least rows. Products of fewer rows have kernels of their own, which sum in another order."""
VECTOR = 8
"""Pairs whose cosines, and then sines, are neighbors in memory."""
_PARTS = frozenset({"Reshape", "Transpose", "Split", "Slice", "Identity", "Squeeze", "Unsqueeze"})


@dataclass(frozen=True)
class Heads:
    """The RotaryEmbeddings that read a product's columns, the views of their heads in its result, and their common parameters.

    The kernel sees the parts of a head as heads that take turns."""

    ops: tuple[Op, ...]
    views: tuple[TensorView, ...]
    turn: HeadTurn

    def angles(self, graph: Graph) -> Array:
        """The cosines and sines of each position, in vectors of eight pairs: (positions, parts * turned / 16, 2, 8)."""
        halves = []
        for value in self.ops[0].inputs[1:3]:
            given = _of_each_image(graph, value)
            assert given is not None
            halves.append(given.reshape(self.turn.positions, -1, VECTOR))
        return np.ascontiguousarray(np.stack(halves, axis=2))


def _of_each_image(graph: Graph, value: Value | None) -> Array | None:
    """Constant angles (positions, pairs) that are the same for each image, or None."""
    given = graph.constant_value(value)
    return None if given is None or not len(given) or not np.array_equal(given[1:], given[:-1]) else given[0]


def _read(graph: Graph, value: Value) -> Iterator[tuple[Op, Value | None]]:
    """The readers of a value, through views: (view, None), each after the view that it reads, and (operator, value that
    it reads)."""
    for user in graph.users(value):
        if user.kind in _PARTS and user.inputs[0] == value:
            yield user, None
            for inner in user.values:
                yield from _read(graph, inner)
        else:
            yield user, value


def heads_of(b: Builder, op: Op) -> Heads | str:
    """The heads that the launch of a product may rotate, or why there are none."""
    graph, shape = b.graph, op.outputs[0].type.static_shape
    found = list(_read(graph, op.value))
    ops = [x for x, value in found if x.kind == "RotaryEmbedding" and value == x.inputs[0]]
    if not ops:
        return "no rotary embedding reads its result"
    whole, tried = TensorView(0, 0, shape, row_major(shape), op.outputs[0].type.dtype), b.fork()
    tried.place[op.value] = whole
    try:
        for x, value in found:
            if value is None:
                VIEWS[x.kind](tried, x)
    except UnsupportedError as error:
        return error.message
    turning = {x.id for x in ops}
    rest = [tried.place[value] for x, value in found if value is not None and x.id not in turning]
    return _joined(b, ops, [tried.place[x.inputs[0]] for x in ops if x.inputs[0] is not None], rest, shape[-1])


def _joined(
    b: Builder, ops: Sequence[Op], views: Sequence[TensorView], rest: Sequence[TensorView], columns: int
) -> Heads | str:
    """The heads of these embeddings, or why they do not fit. ``views``: their places in rows of ``columns``; ``rest``:
    the values that other operators read."""
    if any(x.inputs[1:] != ops[0].inputs[1:] or x.attrs != ops[0].attrs for x in ops):
        return "its heads are rotated by different angles"
    if ops[0].attrs.own_angles:
        return "each feature of its heads has an angle of its own"
    if (why := next((why for x in ops if (why := _refuse_reader(b, x)) is not None), None)) is not None:
        return why
    _, _, positions, size = views[0].shape
    if any(_of_each_image(b.graph, value) is None for value in ops[0].inputs[1:]):
        return "the angles are not constants, or differ from image to image"
    end = 0
    for x in sorted(views, key=lambda x: x.offset):
        _, heads, rows, own = x.shape
        steps = (rows * columns, size, columns, 1)
        placed = all(n == 1 or s == step for n, s, step in zip(x.shape, x.strides, steps, strict=True))
        if x.buffer != 0 or not placed or x.offset != end or (rows, own) != (positions, size):
            return "its heads are not the first of its columns, one after the other"
        end += heads * size
    if any(x.buffer != 0 or x.offset % columns < end for x in rest):
        return "others read its heads before the rotation"
    attrs = ops[0].attrs
    turned = attrs.rotary_embedding_dim or size
    if attrs.parts > 1 and turned != size:
        return "some features beside the parts of its heads do not turn"
    turn = HeadTurn(size // attrs.parts, turned // attrs.parts, attrs.interleaved, end, positions, attrs.parts)
    return turn.refuse() or Heads(tuple(ops), tuple(views), turn)


def _refuse_reader(b: Builder, op: Op) -> str | None:
    """Why the embedding's result cannot take the place of the product's own columns, or None."""
    reader = b.graph.sole_user(op.value)
    if reader is None or reader.kind != "Attention" or op.value not in reader.inputs[:2]:
        return "its heads are not those of one attention alone"
    if reader.input(4) is not None or op.value in b.reserved:
        return "its keys have a place beside those of the past"
    return None


class TurnsHeads(HopperGemm):
    """A tactic of products that also rotates heads."""

    @staticmethod
    def _heads(b: Builder, op: Op) -> Heads:
        found = heads_of(b, op)
        assert isinstance(found, Heads)
        return found

    def refuse(self, b: Builder, op: Op) -> str | None:
        shape = op.outputs[0].type.static_shape
        few = bool(shape) and int(np.prod(shape[:-1])) < LEAST_ROWS and not b.row_invariant
        if op.outputs[0].type.dtype not in (FP16, BF16) or not shape or few:
            return f"it is for at least {LEAST_ROWS} rows of 16-bit floats"
        if isinstance(found := heads_of(b, op), str):
            return found
        if (why := super().refuse(b, op) or super().defer(b, op)) is not None:
            return why
        ep = stages_of(b.graph, op)
        if ep.rest or ep.residual is not None or op.value in b.reserved or shape[-1] % VECTOR:
            return "its epilogue leaves stages, adds a residual, or its result has another place"
        if (why := refuse_order(op, self._order(b, op))) is not None:
            return why
        return None if self.configs(b, op) else "no tile holds its pairs"

    def defer(self, b: Builder, op: Op) -> str | None:
        """Never: a region with operators after it has no other tactic, so :meth:`refuse` asks the cost model."""
        return None

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The neighbors of the product, and the embeddings."""
        return [*super().neighbors(graph, op), *(x for x, value in _read(graph, op.value) if value is not None)]

    def region(self, b: Builder, op: Op) -> Region:
        """The region of the product, and the embeddings."""
        return replace(super().region(b, op), after=self._heads(b, op).ops)

    def place(self, b: Builder, op: Op) -> None:
        """Place the product's result. The embeddings' results are columns of it."""
        super().place(b, op)
        whole, found = b.place[op.value], self._heads(b, op)
        for x, view in zip(found.ops, found.views, strict=True):
            b.place[x.value] = replace(view, buffer=whole.buffer, offset=whole.offset + view.offset)

    def convolution(self, b: Builder, op: Op) -> Convolution:
        c: Convolution = super().convolution(b, op)
        return replace(c, covered=c.covered.union(*(x.src for x in self._heads(b, op).ops)))

    def problem_of(self, b: Builder, op: Op, c: Convolution) -> Problem:
        problem: Problem = super().problem_of(b, op, c)
        return replace(problem, turn=self._heads(b, op).turn)

    def angles(self, b: Builder, op: Op) -> TensorView | None:
        """The constant cosines and sines."""
        found = self._heads(b, op)
        return b.constant(found.angles(b.graph), f"{op.outputs[0].name}.angles")


class TurnedGemm(TurnsHeads):
    """One product that rotates heads."""

    name = "gemm_turned_sm90"


class NormedTurnedGemm(TurnsHeads, NormedGemm):
    """One product that normalizes its rows and rotates heads."""

    name = "gemm_normed_turned_sm90"
