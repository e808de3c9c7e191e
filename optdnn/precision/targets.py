"""What automatic precision asks of a target: engines of plans, times of ops, and whole engines measured in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from optdnn.config import BuildOptions
from optdnn.ir.graph import Graph
from optdnn.passes.assign_precision import AssignPrecision, is_mixture
from optdnn.passes.base import PassContext, PassReport, run_pipeline
from optdnn.passes.pipelines import PIPELINE
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.precision_report import PrecisionLog
from optdnn.passes.support.ranges import Calibration
from optdnn.precision.latency import Latency
from optdnn.runtime.engine import Engine
from optdnn.target_name import TargetName
from optdnn.tuning.timing_cache import TimingCache

Say = Callable[[str], None]


@dataclass(frozen=True)
class Way:
    """One way to run plans: a library (or the target's own kernels), the precisions it has, and what its ops cost."""

    name: str
    precisions: tuple[str, ...]
    latency: Latency
    whole_ms: Mapping[str, float]
    """Predicted milliseconds of the whole network at one precision."""


class SearchTarget(Protocol):
    """A target to search on. ``offers`` are option texts of single precisions ("fp32", "int8+bf16"), fp32 first; ``notes`` say why
    it lacks others."""

    offers: tuple[str, ...]
    notes: dict[str, str]

    def ways(self, graph: Graph, calibration: Calibration | None, say: Say) -> list[Way]: ...

    def quick(self, graph: Graph, plan: PrecisionPlan, way: str) -> Engine:
        """An engine of a graph whose precisions are assigned, to judge its accuracy. Raises RunError, UnsupportedError."""

    def built(self, graph: Graph, plan: PrecisionPlan, label: str, say: Say) -> Engine:
        """The engine that a build would give of it, tactics chosen by measurement."""

    def tuned(self, graph: Graph, shares: int, say: Say) -> Engine | None:
        """The engine after its tactics were tuned, in one of ``shares`` shares of the budget; None where ``built`` did all."""

    def race(self, engines: Mapping[str, Engine], say: Say) -> dict[str, float] | None:
        """Milliseconds of whole engines, measured in turns; None where nothing can be measured."""


def assigned(
    graph: Graph,
    plan: PrecisionPlan,
    target: str,
    calibration: Calibration | None,
    level: int = 3,
    account: PrecisionLog | None = None,
) -> tuple[Graph, list[PassReport]]:
    """A copy of ``graph`` with the plan carried out, and what comes behind that in the target's pipeline; the passes' reports."""
    copy = graph.copy()
    machine = machine_of(target)
    pipeline = PIPELINE(level, machine)
    names = [p.name for p in pipeline]
    rest = pipeline[names.index(AssignPrecision.name) :] if AssignPrecision.name in names else (AssignPrecision(),)
    return copy, run_pipeline(
        copy, rest, PassContext(target=machine, plan=plan, calibration=calibration, account=account)
    )


def machine_of(target: str) -> str:
    """The target whose passes a target runs: simulate runs Hopper's program."""
    return str(TargetName.parse(target).machine)


def base_of(plan: PrecisionPlan) -> str:
    """The float precision to ask of a CPU library for a plan: fp32 where the graph itself says what computes in which."""
    return "fp32" if is_mixture(plan) else plan.floats[0]


def permitted(offers: Sequence[str], candidates: Sequence[str] | None) -> tuple[str, ...]:
    """The single precisions ("int8+fp16") of ``offers`` that the user's candidates allow; without candidates all but tf32."""
    return tuple(
        text
        for text in offers
        if all(p == "fp32" or (p != "tf32" if candidates is None else p in candidates) for p in text.split("+"))
    )


def target_of(options: BuildOptions, target: str, cache: TimingCache, *, calibrated: bool) -> SearchTarget:
    """The target that a build is for, as the search sees it."""
    if TargetName.parse(target).on_gpu:
        from optdnn.precision.gpu_target import GpuTarget

        return GpuTarget(options, target, cache, calibrated)
    from optdnn.precision.cpu_target import CpuTarget

    return CpuTarget(options, cache, calibrated)
