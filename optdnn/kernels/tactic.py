"""What a tactic of the cuda target is: one way of running an operator, with the configurations it can be run in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder

PROVIDERS = ("own", "cudnn", "cublaslt")
"""Whose kernels a tactic runs: this project's own, or a library's."""


@dataclass(frozen=True)
class Region:
    """Operators that one tactic computes together.

    Its launches stand at ``anchor``: the first place in the graph's order at which all its operands are there. ``before`` and
    ``after`` are the other operators, as they stand in that order.
    """

    anchor: Op
    before: tuple[Op, ...] = ()
    after: tuple[Op, ...] = ()

    @property
    def ops(self) -> tuple[Op, ...]:
        """All of them, in the graph's order."""
        return (*self.before, self.anchor, *self.after)

    @property
    def src(self) -> frozenset[str]:
        """The ONNX nodes that it computes."""
        return frozenset().union(*(op.src for op in self.ops))


@dataclass(frozen=True)
class Offer:
    """A configuration that a tactic could run an operator in.

    ``config`` is the tactic's own object; ``str(config)`` names it in reports, timing caches and engines. ``seconds`` is the cost
    model's prediction (None: it has none). ``row_invariant``: sums are formed in one order, whatever the size of the batch.
    """

    config: Any
    seconds: float | None = None
    row_invariant: bool = True

    @property
    def name(self) -> str:
        return str(self.config)


MANY = 32
"""A batch of this many decides where all sizes of a batch must sum alike, and the order of a sum follows from the configuration: the
one that is best there is then taken for all."""


class Tactic(Protocol):
    """One way of running an operator.

    ``provider`` is one of :data:`PROVIDERS`. ``deterministic``: the same input gives the same bits; ``row_invariant``: a row of a
    batch does not depend on the others, nor on how many there are (where only some configurations are so, their offers say which).
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
        """What its launches compute, where it does not refuse ``op``: that operator, and perhaps neighbours of it.

        A region with operators after the anchor is the only one that is considered: nothing is stored between them. A region with
        operators before it is compared with the launches of these operators, whose own launches are left out if it is chosen.
        """

    def refuse(self, b: Builder, op: Op) -> str | None:
        """Why it cannot run the operator, or None. A pure function of the operator and the target."""

    def defer(self, b: Builder, op: Op) -> str | None:
        """Why other tactics go first as long as nothing was measured: they are predicted to be faster, or the library that it calls
        turns the operator down. Slow, hence not part of ``refuse``."""

    def place(self, b: Builder, op: Op) -> None:
        """Decide where the results of its region lie (``Builder.place``). Nothing is launched; views that have to be written out are
        noted by :meth:`Builder.move`."""

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        """The configurations it could run the operator in, the best predicted first; empty where there is no choice.

        For operators that it does not refuse. Leaves the builder as it was.
        """

    def read(self, name: str) -> Any:
        """The configuration of this name, where names alone tell what it is: whether it can run an operator shows when it is
        emitted (InternalError). None where configurations are found by their names among :meth:`configs`."""

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        """Add the launches, in a configuration of :meth:`configs` (None: the first); returns its name ("" where there is none)."""


class OwnTactic:
    """A tactic on this project's own kernels."""

    provider: ClassVar[str] = "own"
    deterministic: ClassVar[bool] = True
    row_invariant: ClassVar[bool] = True

    def region(self, b: Builder, op: Op) -> Region:
        """The operator alone."""
        return Region(op)

    def defer(self, b: Builder, op: Op) -> str | None:
        """Never: it is taken in the order of preference."""
        return None

    def place(self, b: Builder, op: Op) -> None:
        """Each result in its reserved place, or in a new buffer."""
        for port in range(len(op.outputs)):
            b.target(Value(op.id, port))

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        """Without a choice."""
        return ()

    def read(self, name: str) -> Any:
        """Names do not tell."""
        return None


class DryRunConfigs(OwnTactic):
    """One whose configurations are known when its launches are made: ``emit`` notes them by :meth:`Builder.offer`."""

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        """What ``emit`` offers, by making the launches and taking them back."""
        with b.rehearsal():
            self.place(b, op)
            self.emit(b, op)
            return tuple(b.offered)

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        """See :class:`Tactic`."""
        raise NotImplementedError
