"""The interface of a target: the steps of a build in which targets differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optdnn.config import BuildOptions, Progress
from optdnn.errors import InternalError
from optdnn.ir.graph import Graph
from optdnn.lowering.cpu.base import Measured
from optdnn.passes.base import PassReport
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.precision_report import PrecisionLog
from optdnn.runtime.engine import Engine
from optdnn.runtime.program import Plain, Program
from optdnn.target_name import TargetName
from optdnn.tuning.timing_cache import TimingCache

if TYPE_CHECKING:
    from optdnn.lowering.cpu.counterpart import Counterpart
    from optdnn.shapes.plans import Planned
    from optdnn.tuning.first_run import Tried

Meta = Callable[[Graph, Sequence[PassReport]], dict[str, Plain]]
"""The deterministic facts of a build that its engine keeps, from the graph and the passes' reports."""


@dataclass(frozen=True)
class Source:
    """The model of a graph. ``sizes`` are its inputs that hold only sizes, axes or places (empty but for GPUs)."""

    model: Any
    sizes: Sequence[str] = ()


@dataclass(frozen=True)
class Optimized:
    """A graph whose passes are done and whose precisions are assigned, ready to be compiled.

    ``plan`` is what was requested for each operator, ``label`` the name of that precision; ``in_fp32`` makes the same network
    in fp32. ``planned`` holds its plans where sizes vary and the target has one program for each. ``like`` is the program of
    the same network with other weights: what its build decided by measurement is taken, and nothing is measured.
    """

    graph: Graph
    source: Source
    plan: PrecisionPlan
    label: str
    meta: dict[str, Plain]
    in_fp32: Callable[[], Graph]
    planned: Planned | None = None
    like: Program | None = None


@dataclass
class Compiled:
    """A program, and the account of how its tactics were chosen.

    ``engine`` is set where choosing has loaded it already. ``ran`` has the precision that operators run in by node where that is
    known, ``otherwise`` why others run in another one than requested, ``base`` the float precision of those that nothing names.
    """

    program: Program
    engine: Engine | None = None
    measured: list[Measured] = field(default_factory=list)
    fallbacks: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    tuning: dict[str, Any] | None = None
    first_runs: list[Tried] = field(default_factory=list)
    beside_fp32: Counterpart | None = None
    ran: Mapping[str, str] | None = None
    otherwise: str = ""
    base: str = "fp32"


class Target(ABC):
    """One target. ``one_size``: its programs are for fixed sizes, so that ranges of them need several."""

    one_size = False

    def __init__(self, name: TargetName):
        self.name = name

    def size_inputs(self, graph: Graph) -> Sequence[str]:
        """Shape inputs: sizes, axes or places, whose values get their own plans."""
        return ()

    @abstractmethod
    def compile(self, work: Optimized, options: BuildOptions, cache: TimingCache, progress: Progress) -> Compiled:
        """The program of a graph, its tactics chosen as the options say. Raises UnsupportedError, MissingDependency, GpuFault."""

    def load(self, program: Program) -> Engine:
        """The engine of a program that was just compiled."""
        return Engine(program)

    def plan_sizes(
        self,
        source: Source,
        symbolic: Graph,
        options: BuildOptions,
        meta: Meta,
        account: PrecisionLog,
        cache: TimingCache,
        progress: Progress,
        like: Program | None = None,
    ) -> Planned:
        """Plans for the ranges of sizes of ``symbolic``, by a target of one size. ``account`` is filled for the first
        plan; ``like`` is as in :class:`Optimized`."""
        raise InternalError(f"programs of {self.name} take all sizes: there are no plans to make")
