"""Tactics of the cuda target: ways to run an operator, each with its configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder
from optdnn.runtime.cuda.gpu_facts import GpuFacts

PROVIDERS = ("own", "cudnn", "cublaslt")
"""The origin of a tactic's kernels: this project, or a library."""


@dataclass(frozen=True)
class Region:
    """Operators that one tactic computes together.

    Its launches stand at ``anchor``, the first place in the graph's order with all operands computed. ``before`` and ``after`` are
    the other operators, in that order.
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


def readers(graph: Graph, op: Op) -> list[Op]:
    """The operators that read a result."""
    return [user for port in range(len(op.outputs)) for user in graph.users(Value(op.id, port))]


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


MANY = 32
"""With ``row_invariant``, one configuration serves every batch size: the one that is fastest at this batch size."""


class Tactic(Protocol):
    """One way to run an operator.

    ``provider`` is one of :data:`PROVIDERS`. ``deterministic``: equal inputs give equal bits. ``row_invariant``: a row's result does
    not depend on the other rows of the batch or on their number. If that holds for some configurations only, their offers say so.
    """

    @property
    def name(self) -> str: ...
    @property
    def provider(self) -> str: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def row_invariant(self) -> bool: ...
    def region(self, b: Builder, op: Op) -> Region:
        """The operators that its launches compute, if it does not refuse ``op``: that operator, and perhaps neighbours.

        A region with operators after the anchor excludes all other tactics. A region with operators before the anchor competes with
        their own launches; if it is chosen, these are dropped.
        """

    def neighbours(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The operators that a region with this anchor may contain as well, whether the tactic refuses ``op`` or not. Their facts are part
        of the operator's signature."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        """The reason why it cannot run the operator, or None. A pure function of the operator and the target."""

    def defer(self, b: Builder, op: Op) -> str | None:
        """The reason why untuned builds prefer other tactics, or None: they are predicted to be faster, or its library has no algorithm
        for the operator. It is slow, so it is not part of ``refuse``."""

    def place(self, b: Builder, op: Op) -> None:
        """Decide the places of the region's results (``Builder.place``). Nothing is launched. :meth:`Builder.move` records the views that
        must be copied."""

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        """The configurations for an operator that it does not refuse, the best predicted first; empty if there is no choice.

        A pure function of the graph, the places of values and the GPU: nothing is placed or launched.
        """

    def named(self, b: Builder, op: Op, name: str) -> Offer | None:
        """The configuration of this name; None if there is none. Raises InternalError if it cannot run the operator."""

    def variant(self, b: Builder, op: Op) -> str:
        """The kernel's form, for reports, if the tactic has no configurations; "" if there is one form only."""

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        """Add the launches in a configuration of :meth:`configs` (None: the tactic has none)."""


class OwnTactic:
    """A tactic on this project's own kernels."""

    provider: ClassVar[str] = "own"
    deterministic: ClassVar[bool] = True
    row_invariant: ClassVar[bool] = True

    def region(self, b: Builder, op: Op) -> Region:
        """The operator alone."""
        return Region(op)

    def neighbours(self, graph: Graph, op: Op) -> Sequence[Op]:
        """None: the region is the operator alone."""
        return ()

    def defer(self, b: Builder, op: Op) -> str | None:
        """Never: the order of preference decides."""
        return None

    def place(self, b: Builder, op: Op) -> None:
        """Each result in its reserved place, or in a new buffer."""
        for port in range(len(op.outputs)):
            b.target(Value(op.id, port))

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        """None: there is no choice."""
        return ()

    def named(self, b: Builder, op: Op, name: str) -> Offer | None:
        """Found among all configurations."""
        return next((offer for offer in self.configs(b, op) if offer.name == name), None)

    def variant(self, b: Builder, op: Op) -> str:
        """The kernel has one form."""
        return ""


class ProblemTactic(OwnTactic):
    """A tactic whose configurations follow from a problem, which is plain data."""

    def problem(self, b: Builder, op: Op) -> Any:
        """What its launch computes: sizes, types, strides and stages."""
        raise NotImplementedError

    def offers(self, problem: Any, gpu: GpuFacts) -> Sequence[Offer]:
        """The configurations for a problem, the best predicted first."""
        raise NotImplementedError

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        """Those for its problem."""
        return self.offers(self.problem(b, op), b.gpu)
