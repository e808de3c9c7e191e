"""Tactics of the cuda target: ways to run an operator, each with its configurations."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar

from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder
from optdnn.runtime.cuda.gpu_facts import GpuFacts

PROVIDERS = ("own", "cudnn", "cublaslt")
"""The origin of a tactic's kernels: this project, or a library."""


@dataclass(frozen=True)
class Region:
    """Operators that one tactic computes together.

    Its launches are emitted at ``anchor``, the first place in the graph's order where all operands are computed. ``before`` and
    ``after`` are the other operators, in the graph's order.
    """

    anchor: Op
    before: tuple[Op, ...] = ()
    after: tuple[Op, ...] = ()

    @property
    def ops(self) -> tuple[Op, ...]:
        """All operators, in the graph's order."""
        return (*self.before, self.anchor, *self.after)

    @property
    def src(self) -> frozenset[str]:
        """The ONNX nodes of its operators."""
        return frozenset().union(*(op.src for op in self.ops))


@dataclass(frozen=True)
class Offer:
    """A configuration in which a tactic can run an operator.

    ``config`` is an object of the tactic; ``str(config)`` is its name in reports, timing caches and engines. ``seconds`` is the cost
    model's prediction (None: there is none). ``row_invariant``: the order of its sums does not depend on the batch size.
    """

    config: Any
    seconds: float | None = None
    row_invariant: bool = True

    @property
    def name(self) -> str:
        return str(self.config)

    @property
    def predicted(self) -> float:
        """The prediction in seconds; 0 if there is none."""
        return self.seconds or 0.0


def least_seconds(offers: Iterable[Offer]) -> float:
    """The least prediction; infinity if there are no offers."""
    return min((o.predicted for o in offers), default=math.inf)


def best_first(offers: Iterable[Offer]) -> tuple[Offer, ...]:
    """The offers, the best predicted first."""
    return tuple(sorted(offers, key=lambda o: o.predicted))


@lru_cache(maxsize=8192)
def kernel_offers(kernel: ModuleType, problem: Any, gpu: GpuFacts, row_invariant: bool = True) -> tuple[Offer, ...]:
    """The ``candidates`` of a kernel's module for a problem, with the seconds of its ``estimate``."""
    return tuple(Offer(c, kernel.estimate(problem, c, gpu), row_invariant) for c in kernel.candidates(problem, gpu))


MANY = 32
"""With ``row_invariant``, one configuration serves every batch size: the fastest one at this batch size."""


class Tactic(ABC):
    """One way to run an operator. Its methods take the builder and the operator, and are pure but for ``place`` and ``emit``."""

    name: ClassVar[str]
    provider: ClassVar[str] = "own"
    """One of :data:`PROVIDERS`."""
    row_invariant: ClassVar[bool] = True
    """Whether a row's result is independent of the other rows of the batch and of their number. If that holds only for some
    configurations, :attr:`Offer.row_invariant` marks them."""

    @abstractmethod
    def refuse(self, b: Builder, op: Op) -> str | None:
        """The reason why it cannot run the operator, or None. It may depend on the choices for earlier operators (:attr:`Builder.chosen`)."""

    @abstractmethod
    def emit(self, b: Builder, op: Op, config: Any) -> None:
        """Add the launches in a configuration of :meth:`configs` (None: the tactic has none)."""

    def region(self, b: Builder, op: Op) -> Region:
        """The operators that its launches compute, if it does not refuse ``op``: that operator, and perhaps neighbors.

        A region with operators after the anchor excludes the tactics that do not compute these. A region with operators before the
        anchor competes with their own launches; if it is chosen, these are dropped.
        """
        return Region(op)

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The operators that a region with this anchor may contain as well, whether the tactic refuses ``op`` or not. Their facts are part
        of the operator's signature."""
        return ()

    def defer(self, b: Builder, op: Op) -> str | None:
        """The reason why untuned builds prefer other tactics, or None: they are predicted to be faster, or its library has no algorithm
        for the operator. It is slow, so it is not part of ``refuse``."""
        return None

    def place(self, b: Builder, op: Op) -> None:
        """Decide the places of the region's results (``Builder.place``): the reserved ones, or new buffers. Nothing is launched.
        :meth:`Builder.move` records the views that must be copied."""
        for value in op.values:
            b.target(value)

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        """The configurations for an operator that it does not refuse, the best predicted first; empty if there is no choice.

        A function of the graph, the places of values and the GPU: nothing is placed or launched.
        """
        return ()

    def named(self, b: Builder, op: Op, name: str) -> Offer | None:
        """The configuration of this name; None if there is none. Raises InternalError if it cannot run the operator."""
        return next((offer for offer in self.configs(b, op) if offer.name == name), None)

    def seconds(self, b: Builder, op: Op) -> float | None:
        """The predicted time, if the tactic has no configurations; None: its work sets it."""
        return None

    def variant(self, b: Builder, op: Op) -> str:
        """The kernel's form, for reports, if the tactic has no configurations; "" if there is one form only."""
        return ""


class TakesBefore(Tactic):
    """A tactic whose launches also compute the operators that :meth:`neighbors` gives. They are before the anchor."""

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The operator that computes operand 0."""
        return [] if op.inputs[0] is None else [graph.op(op.inputs[0])]

    def region(self, b: Builder, op: Op) -> Region:
        """The operator, and those before it."""
        return Region(op, before=tuple(self.neighbors(b.graph, op)))


class TakesAfter(Tactic):
    """A tactic whose launches may also compute a reader of the result."""

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The readers of the results."""
        return graph.readers(op)


def costlier(b: Builder, op: Op, own: Tactic, other: Tactic, margin: float = 1.0, more: float = 0.0) -> str | None:
    """The reason to defer ``own``: it is predicted to take more than ``margin`` times as long as ``other``; else None. ``more``: seconds
    of further launches that ``own`` needs."""
    seconds, theirs = (
        min((o.predicted for o in t.configs(b, op)), default=t.seconds(b, op) or 0.0) for t in (own, other)
    )
    seconds += more
    if seconds <= margin * theirs:
        return None
    return f"it is predicted to take {seconds * 1e6:.1f} us, {other.name} {theirs * 1e6:.1f}"


class ProblemTactic(Tactic):
    """A tactic with configurations that follow from a problem. The problem is plain data."""

    @abstractmethod
    def problem(self, b: Builder, op: Op) -> Any:
        """The launch's problem: sizes, types, strides and stages."""

    @abstractmethod
    def offers(self, problem: Any, gpu: GpuFacts) -> Sequence[Offer]:
        """The configurations for a problem, the best predicted first."""

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        """The configurations for the operator's problem."""
        return self.offers(self.problem(b, op), b.gpu)
