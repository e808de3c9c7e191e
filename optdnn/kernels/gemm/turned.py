"""Products whose launch turns the heads that it makes: the queries and keys of rotary position embeddings (``conv_turns.cuh``).

Queries and keys are columns of one product. Views take them apart, and a RotaryEmbedding turns each. The product's launch turns them where
its results wait for their store, so that attention reads all of them where the product has written them.
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
"""Products of fewer rows have kernels of their own."""
VECTOR = 8
"""Pairs whose angles lie together."""
_PARTS = frozenset({"Reshape", "Transpose", "Split", "Slice", "Identity", "Squeeze", "Unsqueeze"})


@dataclass(frozen=True)
class Heads:
    """The RotaryEmbeddings of a product's columns, where their heads lie in its result, and what they have in common."""

    ops: tuple[Op, ...]
    views: tuple[TensorView, ...]
    turn: HeadTurn

    def angles(self, graph: Graph) -> Array:
        """The cosines and sines of each position, of eight pairs each: (positions, turned / 16, 2, 8)."""
        halves = []
        for value in self.ops[0].inputs[1:3]:
            given = graph.constant_value(value)
            assert given is not None
            halves.append(given.reshape(self.turn.positions, -1, VECTOR))
        return np.ascontiguousarray(np.stack(halves, axis=2))


def _read(graph: Graph, value: Value) -> Iterator[tuple[Op, Value | None]]:
    """The views behind a value with None, in an order in which each comes after the one that it reads; and other operators with what
    they read."""
    for user in graph.users(value):
        if user.kind in _PARTS and user.inputs[0] == value:
            yield user, None
            for port in range(len(user.outputs)):
                yield from _read(graph, Value(user.id, port))
        else:
            yield user, value


def heads_of(b: Builder, op: Op) -> Heads | str:
    """The heads that the launch of a product may turn, or why there are none."""
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
    """The heads of these embeddings, which lie so in rows of so many columns, beside the ``rest`` that is read."""
    if any(x.inputs[1:] != ops[0].inputs[1:] or x.attrs != ops[0].attrs for x in ops):
        return "its heads are rotated by different angles"
    if ops[0].attrs.own_angles:
        return "each feature of its heads has an angle of its own"
    if (why := next((why for x in ops if (why := _refuse_reader(b, x)) is not None), None)) is not None:
        return why
    _, _, positions, size = views[0].shape
    cosines = b.graph.constant_value(ops[0].inputs[1])
    if cosines is None or b.graph.constant_value(ops[0].inputs[2]) is None or len(cosines) != 1:
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
    turn = HeadTurn(size, attrs.rotary_embedding_dim or size, attrs.interleaved, end, positions)
    return turn.refuse() or Heads(tuple(ops), tuple(views), turn)


def _refuse_reader(b: Builder, op: Op) -> str | None:
    """Why a product cannot store what the embedding makes where it stores its own result."""
    reader = b.graph.sole_user(op.value)
    if reader is None or reader.kind != "Attention" or op.value not in reader.inputs[:2]:
        return "its heads are not those of one attention alone"
    if reader.input(4) is not None or op.value in b.reserved:
        return "its keys have a place beside those of the past"
    return None


class TurnsHeads(HopperGemm):
    """What a tactic of products adds to turn heads."""

    @staticmethod
    def _heads(b: Builder, op: Op) -> Heads:
        found = heads_of(b, op)
        assert isinstance(found, Heads)
        return found

    def refuse(self, b: Builder, op: Op) -> str | None:
        shape = op.outputs[0].type.static_shape
        if op.outputs[0].type.dtype not in (FP16, BF16) or not shape or int(np.prod(shape[:-1])) < LEAST_ROWS:
            return f"it is for at least {LEAST_ROWS} rows of 16-bit floats"
        if isinstance(found := heads_of(b, op), str):
            return found
        if (why := super().refuse(b, op) or super().defer(b, op)) is not None:
            return why
        ep = stages_of(b.graph, op)
        if ep.rest or ep.residual is not None or op.value in b.reserved or shape[-1] % VECTOR:
            return "more is done to its results, or they have another place"
        if (why := refuse_order(op, self._order(b, op))) is not None:
            return why
        return None if self.configs(b, op) else "no tile holds its pairs"

    def defer(self, b: Builder, op: Op) -> str | None:
        """A region with operators after it has no other tactic: what the cost model says is part of :meth:`refuse`."""
        return None

    def neighbours(self, graph: Graph, op: Op) -> Sequence[Op]:
        """And the embeddings."""
        return [*super().neighbours(graph, op), *(x for x, value in _read(graph, op.value) if value is not None)]

    def region(self, b: Builder, op: Op) -> Region:
        """And the embeddings."""
        return replace(super().region(b, op), after=self._heads(b, op).ops)

    def place(self, b: Builder, op: Op) -> None:
        """The embeddings' results are columns of the product's."""
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
        """The constant that the launch reads."""
        found = self._heads(b, op)
        return b.constant(found.angles(b.graph), f"{op.outputs[0].name}.angles")


class TurnedGemm(TurnsHeads):
    """One product."""

    name = "gemm_turned_sm90"


class NormedTurnedGemm(TurnsHeads, NormedGemm):
    """One product of rows that it normalizes."""

    name = "gemm_normed_turned_sm90"
