"""The search over plans: for every exchange rate between time and damage, the best precision of each node.

A node costs its measured time at a precision, and its *damage*: the noise that this precision of this node alone puts on the
network's outputs (:mod:`optdnn.precision.sensitivity`; independent roundings add up as powers do). Where neighbours differ, a
cast costs time too. For an exchange rate r the best plan minimizes time + r x damage: a labelling with a cost between
neighbours, which one minimum cut solves for two precisions, and alpha-expansion (a cut for each precision in turn; Boykov,
Veksler and Zabih, 2001) closely for more. Raising r from nothing makes nodes leave their fast precision in the order of what
they gain per damage. Exchange rates find the corners of the frontier alone; a greedy walk from the fastest plan, which raises
one node at a time where that takes most damage away per time, finds what lies between. The plans met on the way are the
*frontier*; their real accuracy is then measured, not believed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from optdnn.ir.cut import minimum_cut

Assignment = Mapping[str, str]
"""Node key -> precision."""
UNITS = 1 << 20
"""Cuts want whole numbers: how finely the largest cost is divided."""


@dataclass(frozen=True)
class Node:
    """One op that has a precision to choose. ``nodes`` are its ONNX nodes; ``times`` are microseconds; ``damage`` is noise power
    over signal power at the outputs. Both have an entry for each precision that may be chosen (pins leave one)."""

    key: str
    kind: str
    nodes: tuple[str, ...]
    times: Mapping[str, float]
    damage: Mapping[str, float]

    @property
    def precisions(self) -> tuple[str, ...]:
        return tuple(p for p in self.times if p in self.damage)


@dataclass(frozen=True)
class Problem:
    """``edges``: producer, consumer, bytes of the value at fp32. None stands for the network's inputs and outputs, which are
    fp32. ``cast`` gives microseconds of a cast between two precisions for a value of so many bytes."""

    nodes: Sequence[Node]
    edges: Sequence[tuple[str | None, str | None, int]]
    cast: Callable[[str, str, int], float]
    _by_key: dict[str, Node] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        self._by_key.update({n.key: n for n in self.nodes})

    def node(self, key: str) -> Node:
        return self._by_key[key]

    def time(self, plan: Assignment) -> float:
        """Predicted microseconds."""
        return sum(n.times[plan[n.key]] for n in self.nodes) + sum(self.casts(plan))

    def casts(self, plan: Assignment) -> Iterator[float]:
        for a, b, size in self.edges:
            p, q = _of(plan, a), _of(plan, b)
            if p != q:
                yield self.cast(p, q, size)

    def damage(self, plan: Assignment) -> float:
        """Predicted noise power over signal power at the outputs."""
        return sum(n.damage[plan[n.key]] for n in self.nodes)

    def uniform(self, precision: str) -> dict[str, str]:
        """``precision`` wherever it may be chosen, else the node's most accurate."""
        return {n.key: precision if precision in n.precisions else most_accurate(n) for n in self.nodes}


def most_accurate(node: Node) -> str:
    return min(node.precisions, key=lambda p: (node.damage[p], p != "fp32"))


def _of(plan: Assignment, key: str | None) -> str:
    return "fp32" if key is None else plan[key]


def frontier(problem: Problem, steps: int = 24) -> list[dict[str, str]]:
    """Distinct plans from the fastest (damage counts nothing) to the most accurate, by falling predicted damage."""
    if not problem.nodes:
        return [{}]
    found = [best(problem, 0.0)]
    gains = [_gain(n) for n in problem.nodes]
    rates = sorted(t / d for t, d in gains if t > 0 and d > 0)
    if rates:
        low, high = math.log(rates[0]) - 1, math.log(rates[-1]) + 1
        for k in range(steps):
            found.append(best(problem, math.exp(low + (high - low) * k / max(1, steps - 1)), found[-1]))
    found += raised(problem, found[0])
    accurate = {n.key: most_accurate(n) for n in problem.nodes}
    found.append(accurate)
    distinct: dict[tuple[str, ...], dict[str, str]] = {}
    for plan in found:
        distinct.setdefault(tuple(plan[n.key] for n in problem.nodes), plan)
    plans = sorted(distinct.values(), key=lambda p: (-problem.damage(p), problem.time(p)))
    # A plan that is slower than one of no more damage has no place on a frontier.
    kept: list[dict[str, str]] = []
    for plan in reversed(plans):
        if not kept or problem.time(plan) < problem.time(kept[-1]) or plan == accurate:
            kept.append(plan)
    return kept[::-1]


def raised(problem: Problem, start: Assignment) -> list[dict[str, str]]:
    """The plans of a greedy walk from ``start``: at each step one node gets the more accurate precision that takes most damage away
    per microsecond, until none is left to raise."""
    plan = dict(start)
    at: dict[str, list[tuple[str | None, str | None, int]]] = {n.key: [] for n in problem.nodes}
    for edge in problem.edges:
        for end in dict.fromkeys(edge[:2]):
            if end is not None:
                at[end].append(edge)

    def casts(key: str, precision: str) -> float:
        tried = {**plan, key: precision}
        ends = ((_of(tried, a), _of(tried, b), s) for a, b, s in at[key])
        return sum(problem.cast(p, q, s) for p, q, s in ends if p != q)

    found: list[dict[str, str]] = []
    while True:
        steps = []
        for n in problem.nodes:
            now = plan[n.key]
            for p in n.precisions:
                less = n.damage[now] - n.damage[p]
                if less > 0:
                    slower = n.times[p] - n.times[now] + casts(n.key, p) - casts(n.key, now)
                    steps.append((less / max(slower, 1e-9), n.key, p))
        if not steps:
            return found
        _, key, precision = max(steps)
        plan[key] = precision
        found.append(dict(plan))


def _gain(node: Node) -> tuple[float, float]:
    """What the node's fastest precision saves over its most accurate, and its damage."""
    slow, fast = most_accurate(node), min(node.precisions, key=lambda p: node.times[p])
    return node.times[slow] - node.times[fast], node.damage[fast] - node.damage[slow]


def best(problem: Problem, rate: float, start: Assignment | None = None) -> dict[str, str]:
    """The plan of least time + ``rate`` x damage, by cuts from ``start`` (default: each node by itself)."""

    def cost(node: Node, p: str) -> float:
        return node.times[p] + rate * node.damage[p]

    plan = {
        n.key: start[n.key] if start is not None else min(n.precisions, key=lambda p: (cost(n, p), p))
        for n in problem.nodes
    }
    labels = sorted({p for n in problem.nodes for p in n.precisions})
    energy = problem.time(plan) + rate * problem.damage(plan)
    improved = True
    while improved:
        improved = False
        for label in labels:
            tried = _expand(problem, plan, label, cost)
            new = problem.time(tried) + rate * problem.damage(tried)
            if new < energy * (1 - 1e-9) - 1e-9:
                plan, energy, improved = tried, new, True
    return plan


def _expand(problem: Problem, plan: Assignment, label: str, cost: Callable[[Node, str], float]) -> dict[str, str]:
    """The best plan in which any nodes change to ``label`` and all others stay: one minimum cut.

    On the source's side a node stays, on the sink's it changes. The cost between neighbours of different present labels is
    modelled with a node of its own, as alpha-expansion does.
    """
    stay, change = "stay", "change"
    arcs: list[tuple[object, object, float]] = []
    for n in problem.nodes:
        current = plan[n.key]
        if current == label or label not in n.precisions:
            # Pinned to its side by a cost that nothing outweighs.
            arcs.append((n.key, change, math.inf) if current == label else (stay, n.key, math.inf))
            continue
        arcs.append((n.key, change, cost(n, current)))  # cut where the node stays
        arcs.append((stay, n.key, cost(n, label)))  # cut where it changes
    for i, (a, b, size) in enumerate(problem.edges):
        p, q = _of(plan, a), _of(plan, b)
        # Both change: no cast. One changes: a cast between label and the other's. Both stay: p to q.
        only_a = problem.cast(label, q, size) if label != q else 0.0
        only_b = problem.cast(p, label, size) if label != p else 0.0
        both_stay = problem.cast(p, q, size) if p != q else 0.0
        ends = [stay if k is None else k for k in (a, b)]  # inputs and outputs stay what they are
        if p == q:
            arcs += [(ends[0], ends[1], only_b), (ends[1], ends[0], only_a)]
            continue
        middle = ("edge", i)
        arcs += [(middle, change, both_stay)]
        arcs += [(ends[0], middle, only_b), (middle, ends[0], only_b)]
        arcs += [(ends[1], middle, only_a), (middle, ends[1], only_a)]
    top = max((c for _, _, c in arcs if math.isfinite(c)), default=1.0) or 1.0
    scaled = [(a, b, c if math.isinf(c) else round(c / top * UNITS)) for a, b, c in arcs]
    _, changed = minimum_cut(scaled, stay, change)
    return {n.key: label if n.key in changed and label in n.precisions else plan[n.key] for n in problem.nodes}


def moves(problem: Problem, plan: Assignment) -> list[dict[str, str]]:
    """Neighbouring plans that are predicted to be faster: one node, or one node and those around it, at a faster precision.

    Most time won per damage first.
    """
    now_time, now_damage = problem.time(plan), problem.damage(plan)
    around: dict[str, set[str]] = {n.key: set() for n in problem.nodes}
    for a, b, _ in problem.edges:
        if a is not None and b is not None:
            around[a].add(b)
            around[b].add(a)
    found: dict[tuple[str, ...], tuple[float, dict[str, str]]] = {}
    for n in problem.nodes:
        for p in n.precisions:
            if p == plan[n.key]:
                continue
            near = {k for k in around[n.key] if p in problem.node(k).precisions}
            for group in ({n.key}, {n.key, *near}):
                tried = {**plan, **dict.fromkeys(group, p)}
                won, harm = now_time - problem.time(tried), problem.damage(tried) - now_damage
                if won > 1e-3 * now_time:
                    rate = won / max(harm, 1e-30)
                    found.setdefault(tuple(tried[m.key] for m in problem.nodes), (rate, tried))
    return [tried for _, tried in sorted(found.values(), key=lambda item: -item[0])]
