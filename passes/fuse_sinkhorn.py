"""Sinkhorn's iterations become one op: they divide the rows and the columns of small matrices by their sums, alternately.

Hyper-connections on a manifold (DeepSeek-V4) mix the streams of each token by a matrix, which 20 such pairs of divisions make
doubly stochastic. PyTorch's ``normalize`` divides by ``max(sum(|x|), 1e-12)``. Each division is a reduction and a pointwise
operator: written out, they take most of a layer's launches.
"""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.sinkhorn import MOST_LINES, SinkhornAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.fuse_norm import reduced
from optdnn.passes.support.facts import integers, non_negative, operand, producer, scalar

LEAST = 4
"""Fewest divisions that become a Sinkhorn op."""


@dataclass(frozen=True)
class _Division:
    """``x / max(sum(x) + epsilon, floor)`` along ``axis``, counted from the front. ``ops``: its operators, last one first.

    ``absolute``: it is the sum of the magnitudes.
    """

    x: Value
    axis: int
    epsilon: float
    floor: float
    absolute: bool
    ops: tuple[Op, ...]

    def continues(self, before: _Division) -> bool:
        """Whether this is the same division of the result of ``before`` along another axis."""
        same = (self.epsilon, self.floor) == (before.epsilon, before.floor)
        return same and self.x == before.ops[0].value and self.axis != before.axis


def _division(graph: Graph, op: Op) -> _Division | None:
    """``op`` as a division by sums along one axis, or None."""
    if op.kind != "Div":
        return None
    x, divisor, epsilon, floor, ops = operand(op), operand(op, 1), 0.0, 0.0, [op]
    if (bounded := producer(graph, divisor, {"Clip"}, alone=True)) is not None:
        number = scalar(graph, bounded.input(1))
        if number is None or number < 0 or bounded.input(2) is not None:
            return None
        divisor, floor = operand(bounded), number
        ops.append(bounded)
    if (added := producer(graph, divisor, {"Add"}, alone=True)) is not None:
        number = scalar(graph, operand(added, 1))
        if number is None or number < 0:
            return None
        divisor, epsilon = operand(added), number
        ops.append(added)
    total = producer(graph, divisor, {"ReduceSum", "ReduceL1"}, alone=True)
    axes = None if total is None or operand(total) != x else reduced(graph, total)
    if total is None or not isinstance(axes, tuple) or len(axes) != 1:
        return None
    return _Division(x, axes[0], epsilon, floor, total.kind == "ReduceL1", (*ops, total))


def _chain(graph: Graph, op: Op) -> list[_Division]:
    """The divisions along two axes in turn that end in ``op``, last one first; none if they go on after ``op``."""
    last = _division(graph, op)
    if last is None or any(_follows(graph, user, last) for user in graph.users(op.value)):
        return []
    chain = [last]
    while (before := _division(graph, graph.op(chain[-1].x))) is not None and _follows(graph, chain[-1].ops[0], before):
        if len(chain) > 1 and before.axis != chain[-2].axis:
            break
        chain.append(before)
    return chain


@rule("sinkhorn", {"Div"})
def sinkhorn(graph: Graph, op: Op) -> Match | Miss | None:
    """The last of several divisions by sums, alternately along two axes with no others but of size 1 among and behind them."""
    chain = _chain(graph, op)
    if len(chain) < LEAST:
        return None
    first, dims = chain[-1], graph.type(op.value).dims
    rows, columns = sorted((first.axis, chain[-2].axis))
    ones = [k for k in range(rows + 1, len(dims)) if k != columns]
    if any(dims[k] != 1 for k in ones):
        return None
    if not all(isinstance(n, int) and n <= MOST_LINES for n in (dims[rows], dims[columns])):
        what = f"{dims[rows]} x {dims[columns]}"
        return Miss(
            f"the kernel takes matrices of up to {MOST_LINES} x {MOST_LINES} elements, those of {op.name} have {what}"
        )
    if any(division.absolute for division in chain) and not non_negative(graph, first.x):
        return Miss(f"{op.name} divides by sums of magnitudes, and {graph.op(first.x).name} may be negative")
    ops = tuple(o for division in chain for o in division.ops)

    def build(patch: Patch) -> Value:
        axis = -1 if first.axis == columns else -2
        attrs = SinkhornAttrs(axis, len(chain), first.epsilon, first.floor)
        if not ones:
            return patch.add("Sinkhorn", [first.x], attrs)
        axes = integers(patch, ones, "axes")
        made = patch.add("Sinkhorn", [patch.add("Squeeze", [first.x, axes])], attrs)
        return patch.add("Unsqueeze", [made, axes])

    return Match(ops, build)


def _follows(graph: Graph, op: Op, before: _Division) -> bool:
    """Whether ``op`` divides the result of ``before`` by its sums along another axis, and nothing else reads this result."""
    found = _division(graph, op)
    if found is None or not found.continues(before):
        return False
    return {user.id for user in graph.users(found.x)} == {found.ops[0].id, found.ops[-1].id}


class FuseSinkhorn(RulePass):
    """For GPUs only, which have a kernel for it."""

    name = "fuse_sinkhorn"
    rules = (sinkhorn,)
