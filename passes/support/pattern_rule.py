"""Rules that find their candidates by patterns, and the checks that such rules make before they replace a match."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from inspect import signature
from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, Rule
from optdnn.passes.support.pattern import Pattern, find, root_kinds

Accept = Callable[..., Match | Miss | None]
"""(graph, root, bindings) -> the answer of a rule. The bindings give the value, number or op of each name. A function with a fourth
parameter also gets the ids of the matched ops."""


class PatternRule(Rule):
    """A rule that finds its candidates by patterns, which are tried in order."""

    patterns: tuple[Pattern, ...] = ()

    def __init__(self) -> None:
        self.kinds = frozenset().union(*(root_kinds(p) for p in self.patterns))

    @abstractmethod
    def accept(self, graph: Graph, root: Op, found: dict[str, Any], ops: frozenset[int]) -> Match | Miss | None:
        """Decide on one match of a pattern. ``found`` has the bound names, ``ops`` the ids of the matched ops.

        A Miss is reported if no other match is accepted. None: this match is no candidate.
        """

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        if len(op.outputs) != 1:
            return None
        miss: Miss | None = None
        for pattern in self.patterns:
            for found in find(graph, op.value, pattern):
                if op.id not in found.ops:
                    continue
                answer = self.accept(graph, op, found.bound, found.ops)
                if isinstance(answer, Match):
                    return answer
                miss = miss or answer
        return miss


class PatternFunctionRule(PatternRule):
    """A pattern rule without state: ``function`` decides."""

    def __init__(self, name: str, patterns: tuple[Pattern, ...], function: Accept):
        self.name, self.patterns, self.function = name, patterns, function
        self._with_ops = len(signature(function).parameters) > 3
        super().__init__()

    def accept(self, graph: Graph, root: Op, found: dict[str, Any], ops: frozenset[int]) -> Match | Miss | None:
        return self.function(graph, root, found, ops) if self._with_ops else self.function(graph, root, found)


def pattern_rule(name: str, *patterns: Pattern) -> Callable[[Accept], PatternFunctionRule]:
    """Decorator: the function becomes a rule, and decides on each match of one of ``patterns``."""
    return lambda function: PatternFunctionRule(name, patterns, function)


def used_outside(graph: Graph, ops: Collection[int], root: int) -> Miss | None:
    """A Miss if an operator outside of ``ops`` reads one of their results other than the root's; else None."""
    for i in ops:
        op = graph.op(i)
        for port in range(len(op.outputs) if i != root else 0):
            for user in graph.users(Value(i, port)):
                if user.kind == "Output":
                    return Miss(f"an inner value is an output of the network: {op.outputs[port].name}")
                if user.id not in ops:
                    return Miss(f"an inner value is used elsewhere: {op.outputs[port].name}, by {user.name}")
    return None


def fused(graph: Graph, ops: Collection[int], root: Op, x: Value, build: Callable[[Patch], Value]) -> Match | Miss:
    """A Match over ``ops``, in the order of their ids, that replaces the result of ``root``.

    A Miss if an inner value is used outside, or if the result has another shape or dtype than ``x``, the operand of the new op.
    """
    before, after = root.outputs[0].type, graph.type(x)
    miss = used_outside(graph, sorted(ops), root.id)
    if miss is None and (before.dtype != after.dtype or before.shape != after.shape):
        miss = Miss(f"the result is {before}, its operand is {after}")
    return miss or Match(tuple(graph.op(i) for i in sorted(ops)), build, root.value)
