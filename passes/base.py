"""Passes, the rules that they apply, and the reports that explain both.

A :class:`Rule` looks at one op and answers with a :class:`Match`, with a :class:`Miss` (a refused candidate and the reason), or
with None (not a candidate). Misses are kept: they explain the fusions that optdnn did not make.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

from optdnn.errors import InternalError
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.target_name import TargetName
from optdnn.types import Array

if TYPE_CHECKING:
    from optdnn.passes.support.precision import PrecisionPlan
    from optdnn.passes.support.precision_report import PrecisionLog
    from optdnn.passes.support.ranges import Calibration


@dataclass(frozen=True)
class Miss:
    """A candidate that a rule refused. ``reason`` is a full clause in the user's terms."""

    reason: str


@dataclass(frozen=True)
class Match:
    """A candidate that a rule accepts, and how to rewrite it.

    ``ops`` are the ops that the patch covers. ``build`` adds the new ops to a patch and returns the value that replaces
    ``result`` (by default the result of the first op); or it calls :meth:`Patch.replace` itself and returns None.
    """

    ops: tuple[Op, ...]
    build: Callable[[Patch], Value | None]
    result: Value | None = None

    def patch(self, graph: Graph) -> Patch:
        """The rewrite, not applied yet."""
        patch = Patch(graph, self.ops)
        new = self.build(patch)
        if new is not None:
            patch.replace(self.ops[0].value if self.result is None else self.result, new)
        return patch


@dataclass(frozen=True)
class Fired:
    """One applied rewrite, in ONNX names."""

    rule: str
    nodes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"rule": self.rule, "nodes": list(self.nodes)}


@dataclass(frozen=True)
class Refused:
    """One refused candidate, in ONNX names."""

    rule: str
    nodes: tuple[str, ...]
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {"rule": self.rule, "nodes": list(self.nodes), "reason": self.reason}


@dataclass
class PassReport:
    """What one pass did. ``seconds`` is not deterministic and never enters an engine."""

    name: str
    fired: list[Fired] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    nodes_before: int = 0
    nodes_after: int = 0
    kinds_before: dict[str, int] = field(default_factory=dict)
    kinds_after: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def changes(self) -> int:
        return len(self.fired)

    def to_json(self) -> dict[str, Any]:
        """The deterministic facts."""
        return {
            "name": self.name,
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "kinds_before": self.kinds_before,
            "kinds_after": self.kinds_after,
            "fired": [f.to_json() for f in self.fired],
            "refused": [r.to_json() for r in self.refused],
        }


Moments = Callable[[Graph, Sequence[Value]], Iterable[tuple[Value, Array]]]
"""Function that computes the second moments [K, K] of values [..., K] of a graph on calibration data, in any order."""


@dataclass(frozen=True)
class PassContext:
    """Everything that a pass may depend on besides the graph. ``target``: "cpu", "reference", "cuda:sm_90a" or "" (none)."""

    target: str = ""
    precision: str = "fp32"
    plan: PrecisionPlan | None = None
    """The precision of each op; None: ``precision`` for all."""
    calibration: Calibration | Callable[[Graph], Calibration] | None = None
    """Ranges of values, or a function that finds them for a graph."""
    moments: Moments | None = None
    """Computes second moments of values on calibration data, for weights of 4 and 8 bits; None without data."""
    precision_log: PrecisionLog | None = None
    """Log of ``assign_precision``: requested precisions, refusals and risks."""
    kept: ConstantCache = field(default_factory=ConstantCache)
    """Constants that earlier runs (for other sizes, for example) computed from the same constants."""
    row_invariant: bool = False
    """Whether a row of a batch must have the same bits for any batch size. Decisions on speed then use :meth:`counted`."""
    fold_limit_bytes: int = 1 << 24
    """Constant folding does not create a constant larger than this unless it shrinks its operands."""

    @property
    def only_precision(self) -> str | None:
        """The precision of every op; None if ops differ, or if the build has yet to find it."""
        asked = (
            {self.precision} if self.plan is None else {self.precision, self.plan.default, *self.plan.nodes.values()}
        )
        return self.precision if len(asked) == 1 else None

    def counted(self, size: float) -> float:
        """A size that grows with the batch (rows, elements, multiplications), as a decision on speed counts it.

        With ``row_invariant``, it is that of a batch without limit: one decision serves all batch sizes, as rewrites change
        roundings."""
        return math.inf if self.row_invariant else size

    @property
    def on_gpu(self) -> bool:
        """Whether the graph becomes launches of GPU kernels."""
        return TargetName.parse(self.target).on_gpu


class Pass(ABC):
    """One transformation of a graph, in place."""

    name: str = ""

    def __call__(self, graph: Graph, context: PassContext | None = None) -> PassReport:
        """Run on ``graph`` and report the changes."""
        report = PassReport(self.name, kinds_before=graph.kinds())
        start = time.perf_counter()
        self.run(graph, context or PassContext(), report)
        report.seconds = time.perf_counter() - start
        report.kinds_after = graph.kinds()
        report.nodes_before, report.nodes_after = sum(report.kinds_before.values()), sum(report.kinds_after.values())
        return report

    @abstractmethod
    def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
        """Change ``graph``; record each change in ``report.fired`` and each refusal in ``report.refused``."""


class Rule(ABC):
    """A local rewrite. ``kinds``: the kinds of op it is tried on (empty: all)."""

    name: str = ""
    kinds: frozenset[str] = frozenset()
    looks_far = False
    """Whether an answer may change with ops that are no neighbors. The rule is tried again after all other changes."""

    @abstractmethod
    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        """Whether the rule applies at ``op``; must not change the graph."""


class FunctionRule(Rule):
    """A rule without state: ``function`` matches. It takes the graph and the op, and the context if it has a third parameter."""

    def __init__(
        self, name: str, kinds: Collection[str], function: Callable[..., Match | Miss | None], far: bool = False
    ):
        self.name, self.kinds, self.function, self.looks_far = name, frozenset(kinds), function, far
        self._with_context = len(signature(function).parameters) > 2

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        return self.function(graph, op, context) if self._with_context else self.function(graph, op)


def rule(
    name: str, kinds: Collection[str] = (), *, looks_far: bool = False
) -> Callable[[Callable[..., Match | Miss | None]], FunctionRule]:
    """Decorator: make a :class:`FunctionRule`, tried on ops of these kinds (none: all). ``looks_far``: see :class:`Rule`."""
    return lambda function: FunctionRule(name, kinds, function, looks_far)


class _RulesByKind(dict[str, list[Rule]]):
    """The rules that are tried on an op of a kind, found when first asked for."""

    def __init__(self, rules: Sequence[Rule]):
        self._rules = rules

    def __missing__(self, kind: str) -> list[Rule]:
        self[kind] = [r for r in self._rules if ((kind in r.kinds) if r.kinds else (kind not in STRUCTURAL))]
        return self[kind]


_by_kind = cache(_RulesByKind)
"""The table of the rules of a class of passes, which are the same in each run."""


class RulePass(Pass):
    """Applies rules to a fixpoint with a worklist in topological (or, ``sinks_first``, reverse topological) order.

    After a rewrite, the new ops, the ops with changed operands, and the neighbors of both are queued again. When the list is empty,
    the candidates of rules that look far are queued again, until these change nothing. The number of rewrites is bounded, so two
    rules that undo each other raise InternalError instead of looping.
    """

    rules: Sequence[Rule] = ()
    rewrites_per_op = 16
    gpu_only = False
    """No rule is tried for other targets than GPUs."""
    sinks_first = False
    """Start at the last op: if candidates are nested, the larger one (its root comes later) is seen first."""

    def rules_for(self, graph: Graph, context: PassContext) -> Sequence[Rule]:
        """The rules of one run. A pass whose rules need facts of the whole graph gathers them here, once."""
        return self.rules if not self.gpu_only or context.on_gpu else ()

    def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
        rules = self.rules_for(graph, context)
        by_kind = _by_kind(tuple(rules)) if rules is type(self).rules else _RulesByKind(rules)
        if not any(by_kind[kind] for kind in (*graph.kinds(), *STRUCTURAL)):
            return
        ops = graph.order()
        budget = self.rewrites_per_op * (len(ops) + 16)
        order = [op.id for op in ops if by_kind[op.kind]]
        if self.sinks_first:
            order.reverse()
        queue, queued = deque(order), set(order)
        refused: dict[int, dict[str, Refused]] = {}
        far = frozenset().union(*(rule.kinds for rule in rules if rule.looks_far))
        seen = 0
        while queue or (far and len(report.fired) > seen):
            if not queue:
                seen = len(report.fired)
                queue.extend(op.id for op in graph.of_kind(*sorted(far)))
                queued.update(queue)
                continue
            op_id = queue.popleft()
            queued.discard(op_id)
            if op_id not in graph:
                continue
            refused.pop(op_id, None)
            for rule in by_kind[graph.op(op_id).kind]:
                op = graph.op(op_id)
                found = rule.match(graph, op, context)
                if found is None:
                    continue
                if isinstance(found, Miss):
                    refused.setdefault(op_id, {})[rule.name] = Refused(rule.name, node_names([op]), found.reason)
                    continue
                budget -= 1
                if budget < 0:
                    raise InternalError(f"pass {self.name}: rule {rule.name} does not come to an end at {op.name!r}")
                nodes = node_names(found.ops)
                applied = found.patch(graph).apply()
                report.fired.append(Fired(rule.name, nodes))
                changed = [*applied.added, *applied.touched, op_id]
                for dead in applied.removed:
                    refused.pop(dead.id, None)
                    changed.extend(self._freed(graph, dead))
                for again in self._again(graph, changed):
                    if again not in queued:
                        queue.append(again)
                        queued.add(again)
                break  # an op that is still there has been queued again
        report.refused.extend(r for _, at in sorted(refused.items()) for _, r in sorted(at.items()))

    @staticmethod
    def _freed(graph: Graph, dead: Op) -> list[int]:
        """Producers with one use left now that ``dead`` is gone: a match refused for a second use may succeed."""
        return [v.op for v in dead.inputs if v is not None and v.op in graph and graph.nx.out_degree(v.op) == 1]

    @staticmethod
    def _again(graph: Graph, ids: Sequence[int]) -> list[int]:
        near: dict[int, None] = {}
        for i in ids:
            if i in graph:
                near[i] = None
                near.update(dict.fromkeys(sorted(graph.nx.predecessors(i))))
                near.update(dict.fromkeys(sorted(graph.nx.successors(i))))
        return list(near)


NAMED = 1024
"""Most ONNX nodes that an entry of a report names."""


def node_names(ops: Sequence[Op]) -> tuple[str, ...]:
    """The ONNX node names of ops, sorted. Ops without names, or with more than :data:`NAMED` in all, are named by their output.

    In a long chain of rewrites, each op carries the nodes of all earlier ones: the report would grow by the square of the network.
    """
    few = sum(len(op.src) for op in ops) <= NAMED
    named = sorted(frozenset().union(*(op.src for op in ops))) if few else ()
    return tuple(named) or tuple(op.outputs[0].name for op in ops)


def run_pipeline(
    graph: Graph,
    pipeline: Sequence[Pass],
    context: PassContext | None = None,
    *,
    verify: bool = False,
    stop_after: str | None = None,
    after: Callable[[int, Pass, Graph, PassReport], object] | None = None,
) -> list[PassReport]:
    """Run passes in order and return their reports.

    ``verify`` checks the graph's invariants after each pass. ``stop_after`` names the last pass to run (its first occurrence).
    ``after(index, pass, graph, report)`` is called after each pass, for dumps and progress.
    """
    from optdnn.ir.verify import verify as check

    reports = []
    for index, one in enumerate(pipeline):
        report = one(graph, context)
        reports.append(report)
        if verify:
            try:
                graph.kept(check)  # a graph that the pass has left as it was is not checked again
            except InternalError as error:
                raise InternalError(f"after pass {one.name}: {error.message}") from error
        if after is not None:
            after(index, one, graph, report)
        if one.name == stop_after:
            break
    return reports
