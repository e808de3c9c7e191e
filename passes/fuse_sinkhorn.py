"""Sinkhorn's iterations become one op: they divide the rows and the columns of small matrices by their sums, alternately.

Hyper-connections on a manifold (DeepSeek-V4) mix the streams of each token by a matrix, which 20 such pairs of divisions make
doubly stochastic. Each division is a reduction and a pointwise operator: written out, they take most of a layer's launches.
"""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.sinkhorn import MOST_LINES, SinkhornAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.fuse_norm import reduced
from optdnn.passes.support.facts import operand, producer, scalar

LEAST = 4
"""Fewest divisions that become a Sinkhorn op."""


@dataclass(frozen=True)
class _Division:
    """``x / (sum(x) + epsilon)`` along an axis (-1 or -2). ``ops``: its operators, last one first."""

    x: Value
    axis: int
    epsilon: float
    ops: tuple[Op, ...]


def _division(graph: Graph, op: Op) -> _Division | None:
    """``op`` as a division by sums along one of the last two axes, or None."""
    if op.kind != "Div":
        return None
    x, divisor, epsilon, ops = operand(op), operand(op, 1), 0.0, [op]
    if (added := producer(graph, divisor, {"Add"}, alone=True)) is not None:
        number = scalar(graph, operand(added, 1))
        if number is None or number < 0:
            return None
        divisor, epsilon = operand(added), number
        ops.append(added)
    total = producer(graph, divisor, {"ReduceSum"}, alone=True)
    rank = graph.type(x).rank
    axes = None if total is None or operand(total) != x else reduced(graph, total)
    if total is None or not rank or not isinstance(axes, tuple) or len(axes) != 1 or axes[0] < rank - 2:
        return None
    return _Division(x, axes[0] - rank, epsilon, (*ops, total))


@rule("sinkhorn", {"Div"})
def sinkhorn(graph: Graph, op: Op) -> Match | Miss | None:
    """The last of several divisions by sums, alternately along the last two axes."""
    last = _division(graph, op)
    if last is None or any(_follows(graph, user, last) for user in graph.users(op.value)):
        return None
    chain = [last]
    while (before := _division(graph, graph.op(chain[-1].x))) is not None and _follows(graph, chain[-1].ops[0], before):
        chain.append(before)
    if len(chain) < LEAST:
        return None
    size = graph.type(op.value).dims[-2:]
    if not all(isinstance(n, int) and n <= MOST_LINES for n in size):
        what = " x ".join(map(str, size))
        return Miss(
            f"the kernel takes matrices of up to {MOST_LINES} x {MOST_LINES} elements, those of {op.name} have {what}"
        )
    first = chain[-1]
    ops = tuple(o for division in chain for o in division.ops)

    def build(patch: Patch) -> Value:
        return patch.add("Sinkhorn", [first.x], SinkhornAttrs(first.axis, len(chain), first.epsilon))

    return Match(ops, build)


def _follows(graph: Graph, op: Op, before: _Division) -> bool:
    """Whether ``op`` divides the result of ``before`` by its sums along the other axis, and nothing else reads this result."""
    found = _division(graph, op)
    if found is None or found.x != before.ops[0].value:
        return False
    readers = {user.id for user in graph.users(found.x)}
    return (
        found.axis != before.axis and found.epsilon == before.epsilon and readers == {found.ops[0].id, found.ops[-1].id}
    )


class FuseSinkhorn(RulePass):
    """For GPUs only, which have a kernel for it."""

    name = "fuse_sinkhorn"
    rules = (sinkhorn,)
