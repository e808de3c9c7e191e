"""Features of queries and keys that are reordered alike keep their order: the products of attention do not depend on it.

DeepSeek's attention (DeepSeek-AI, 2024) rotates pairs of neighboring features, and joins the halves of the pairs after it, as the
code that it was derived from expects. The rotated features are one part of a head, and those of a key are the same for all heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, rule
from optdnn.passes.support.facts import RESHAPES, exchange_last, operand, producer, shape_of
from optdnn.types import normalize_axis


@rule("turned_features", {"Attention"})
def turned_features(graph: Graph, op: Op) -> Match | None:
    """Both operands of the scores, or the same parts of both, have their features in the same other order."""
    if len(op.outputs) > 1 or any(v is not None for v in op.inputs[4:6]):
        return None
    parts = [_parts(graph, operand(op, k)) for k in (0, 1)]
    shapes = [[shape_of(graph, v) for v in each] for each in parts]
    if len(parts[0]) != len(parts[1]) or any(not a or not b or a[-1] != b[-1] for a, b in zip(*shapes, strict=True)):
        return None
    orders = [[_order(graph, v) for v in each] for each in parts]
    if orders[0] != orders[1] or not any(orders[0]):
        return None

    def build(patch: Patch) -> Value:
        joined = [_joined(graph, patch, operand(op, k), each) for k, each in enumerate(parts)]
        return patch.add("Attention", [*joined, *op.inputs[2:]], op.attrs)

    return Match((op,), build)


def _parts(graph: Graph, value: Value) -> Sequence[Value]:
    """The parts of the last axis that only an attention reads, in a Concat; the value itself if it is none."""
    concat = producer(graph, value, {"Concat"}, alone=True)
    if concat is None or normalize_axis(concat.attrs.axis, len(concat.outputs[0].type.dims)) != 3:
        return [value]
    return [operand(concat, k) for k in range(len(concat.inputs))]


def _order(graph: Graph, value: Value) -> tuple[int, int] | None:
    """(m, n) if the features are those of another value, as rows of an (m, n) matrix that is transposed; else None."""
    found = _turned(graph, value)
    return None if found is None else found[1]


def _turned(graph: Graph, value: Value) -> tuple[Value, tuple[int, int]] | None:
    """The value with its features in the order before the exchange, and the matrix that they form."""
    spread = producer(graph, value, {"Expand"})
    join = producer(graph, value if spread is None else spread.inputs[0], RESHAPES)
    turn = None if join is None else producer(graph, join.inputs[0], {"Transpose"})
    cut = None if turn is None else producer(graph, turn.inputs[0], RESHAPES)
    if join is None or turn is None or cut is None or turn.attrs.perm is None:
        return None
    before, matrix, after = (shape_of(graph, v) for v in (cut.inputs[0], cut.value, join.value))
    if before is None or matrix is None or before != after or matrix[:-2] != before[:-1]:
        return None
    m, n = matrix[-2:]
    if turn.attrs.perm != exchange_last(len(matrix)) or not isinstance(m, int) or not isinstance(n, int):
        return None
    kept = spread is None or graph.type(spread.value).dims[-1] == before[-1]
    return (operand(cut), (m, n)) if kept else None


def _joined(graph: Graph, patch: Patch, value: Value, parts: Sequence[Value]) -> Value:
    """The operand ``value`` of ``parts`` with all features in the order before exchanges."""
    made = []
    for part in parts:
        found, spread = _turned(graph, part), producer(graph, part, {"Expand"})
        x = part if found is None else found[0]
        if found is not None and spread is not None:
            x = patch.add("Expand", [x, spread.inputs[1]], src=spread.src)
        made.append(x)
    concat = graph.op(value)
    return made[0] if len(made) == 1 else patch.add("Concat", made, concat.attrs, src=concat.src)
