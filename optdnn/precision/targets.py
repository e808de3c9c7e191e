"""A target's interface for the precision search: engines of plans, times of operators, and races of whole engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from optdnn.config import ON_REQUEST, PACKED_WEIGHTS, PRECISIONS, ROUNDED_ROWS, Progress
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import Graph
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import Moments, PassContext, PassReport, run_pipeline
from optdnn.passes.pipelines import PIPELINE
from optdnn.passes.support.precision import PrecisionPlan, no_rounded_rows
from optdnn.passes.support.precision_report import PrecisionLog
from optdnn.passes.support.ranges import Calibration
from optdnn.precision.latency import OperatorTimes
from optdnn.runtime.engine import Engine
from optdnn.target_name import TargetName


class SearchTarget(Protocol):
    """A target of the search. ``offers`` are option texts of single precisions ("fp32", "int8+bf16"), fp32 first; ``notes``
    explain why it lacks others. The graphs that it gets have their precisions assigned."""

    offers: tuple[str, ...]
    notes: dict[str, str]

    def operator_times(self, graph: Graph, calibration: Calibration | None, say: Progress) -> list[OperatorTimes]:
        """Times of the operators of ``graph`` (still without precisions), in each library that is worth a search."""

    def quick(self, graph: Graph, plan: PrecisionPlan, library: str) -> Engine:
        """An engine for judging accuracy. Raises RunError, UnsupportedError."""

    def built(self, graph: Graph, plan: PrecisionPlan, label: str, say: Progress) -> Engine:
        """The engine of a build, before tuning."""

    def tuned(self, graph: Graph, shares: int, say: Progress) -> Engine | None:
        """The engine after its tactics were tuned, in one of ``shares`` shares of the budget; None if ``built`` already tunes."""

    def race(self, engines: Mapping[str, Engine], say: Progress) -> dict[str, float]:
        """Milliseconds of whole engines, measured in turns; empty if nothing can be measured."""

    def predicted(self, engine: Engine) -> float | None:
        """Microseconds of a whole engine by a cost model; None where :meth:`race` measures."""


def assigned(
    graph: Graph,
    plan: PrecisionPlan,
    target: str,
    calibration: Calibration | None,
    level: int = 3,
    precision_log: PrecisionLog | None = None,
    *,
    moments: Moments | None = None,
    kept: ConstantCache | None = None,
) -> tuple[Graph, list[PassReport]]:
    """A copy of ``graph`` with the plan applied by the target's pipeline, from precision assignment on, and the passes' reports.
    ``kept``: constants from earlier plans."""
    copy, machine = graph.copy(), str(TargetName.parse(target).machine)
    pipeline = PIPELINE(level, machine)
    names = [p.name for p in pipeline]
    rest = pipeline[names.index(AssignPrecision.name) :] if AssignPrecision.name in names else (AssignPrecision(),)
    kept = ConstantCache() if kept is None else kept
    context = PassContext(
        target=machine, plan=plan, calibration=calibration, moments=moments, precision_log=precision_log, kept=kept
    )
    return copy, run_pipeline(copy, rest, context)


def beside_packed(target: str, candidates: Sequence[str] | None) -> str:
    """The float precision of activations beside packed weights: 16 bits on GPUs, if the user's candidates allow it."""
    narrow = ("fp16", "bf16") if TargetName.parse(target).on_gpu else ()
    return next((p for p in narrow if candidates is None or p in candidates), "fp32")


def packed_offers(target: str, candidates: Sequence[str] | None) -> list[str]:
    """The single precisions with packed weights that a target has."""
    beside = beside_packed(target, candidates)
    if TargetName.parse(target).on_gpu and beside == "fp32":
        return []  # the kernels of packed weights need 16-bit activations
    able = PACKED_WEIGHTS if no_rounded_rows(target) is None else PACKED_WEIGHTS - {ROUNDED_ROWS}
    return [p if beside == "fp32" else f"{p}+{beside}" for p in PRECISIONS if p in able]


def permitted(offers: Sequence[str], candidates: Sequence[str] | None) -> tuple[str, ...]:
    """The single precisions ("int8+fp16") of ``offers`` that the user's candidates allow; without candidates all except those
    that are used only on request."""
    return tuple(
        text
        for text in offers
        if all(p == "fp32" or (p not in ON_REQUEST if candidates is None else p in candidates) for p in text.split("+"))
    )
