"""What a tactic of the cuda target is: one way of running an operator, with the configurations it can be run in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder

PROVIDERS = ("own", "cudnn", "cublaslt")
"""Whose kernels a tactic runs: this project's own, or a library's."""


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
    @property
    def takes_along(self) -> bool:
        """Whether its launch does the work of the operator behind or before, too. Times of others, which leave that to another launch,
        say nothing beside its own, so where it does not refuse it is the only one: whether to take it along is its own judgement."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        """Why it cannot run the operator, or None. A pure function of the operator and the target."""

    def unable(self, b: Builder, op: Op) -> str | None:
        """Why the library that it calls turns the operator down, where it is at hand to be asked; slow, hence not part of
        ``refuse``: it is asked before an operator is given to it unmeasured."""

    def absorbs(self, b: Builder, op: Op) -> Op | None:
        """An operator before this one that its launch computes, too, so that the other's own is dropped."""

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
    takes_along: ClassVar[bool] = False

    def unable(self, b: Builder, op: Op) -> str | None:
        """There is no library to ask."""
        return None

    def absorbs(self, b: Builder, op: Op) -> Op | None:
        """None: it computes the operator alone."""
        return None

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
            self.emit(b, op)
            return tuple(b.offered)

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        """See :class:`Tactic`."""
        raise NotImplementedError
