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
    from optdnn.precision.mixture import Mixture
    from optdnn.shapes.plans import Planned
    from optdnn.tuning.first_run import Tried

Meta = Callable[[Graph, Sequence[PassReport]], dict[str, Plain]]
"""The deterministic facts of a build that its engine keeps, from the graph and the passes' reports."""


@dataclass(frozen=True)
class Source:
    """The model of a graph. ``sizes`` are its inputs that hold only sizes, axes or positions (empty except for GPUs)."""

    model: Any
    sizes: Sequence[str] = ()


@dataclass(frozen=True)
class Optimized:
    """A graph after its passes, with its precisions assigned, ready to be compiled.

    ``plan`` is the request for each operator, ``label`` the name of that precision; ``in_fp32`` makes the same network
    in fp32. ``planned`` holds its plans if sizes vary and the target has one program for each. ``like`` is the program of
    the same network with other weights: the measured decisions of its build are reused, and nothing is measured.
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
    """A program, and the record of how its tactics were chosen.

    ``engine`` is set if the choice has already loaded it. ``ran`` maps a node to the precision that it runs in, if that is
    known; ``otherwise`` is the reason why others run in another precision than requested; ``base`` is the float precision of nodes
    that are not listed.
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
    """One target. ``one_size``: its programs are for fixed sizes, so ranges of sizes need several programs."""

    one_size = False

    def __init__(self, name: TargetName):
        self.name = name

    def size_inputs(self, graph: Graph) -> Sequence[str]:
        """Shape inputs: sizes, axes or positions. Their values get their own plans."""
        return ()

    def mixture(self, graph: Graph, options: BuildOptions) -> Mixture | None:
        """The choice between the two precisions of a mixture for the imported ``graph``, on targets with a cost model; None if
        each op runs in the requested one."""
        return None

    @abstractmethod
    def compile(self, work: Optimized, options: BuildOptions, cache: TimingCache, progress: Progress) -> Compiled:
        """The program of a graph, with tactics chosen by the options. Raises UnsupportedError, MissingDependency, GpuFault."""

    def load(self, program: Program) -> Engine:
        """The engine of a program that was just compiled."""
        return Engine(program)

    def plan_sizes(
        self,
        source: Source,
        symbolic: Graph,
        options: BuildOptions,
        meta: Meta,
        precision_log: PrecisionLog,
        cache: TimingCache,
        progress: Progress,
        like: Program | None = None,
    ) -> Planned:
        """Plans for the ranges of sizes of ``symbolic``, by a target with ``one_size``. ``precision_log`` is filled for the first
        plan; ``like`` is as in :class:`Optimized`."""
        raise InternalError(f"programs of {self.name} take all sizes: there are no plans to make")
