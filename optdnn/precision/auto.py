"""Precision "auto" in a build: the search among the network's precisions, and the error if no engine is within the bound."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from optdnn.config import BuildOptions, Progress
from optdnn.errors import NotMet
from optdnn.ir.graph import Graph
from optdnn.optimize import optimize
from optdnn.precision.search_report import SearchReport
from optdnn.target_name import TargetName
from optdnn.tuning.timing_cache import TimingCache

if TYPE_CHECKING:
    from optdnn.precision.search import SearchResult


def found_precisions(
    graph: Graph, untouched: Graph, options: BuildOptions, cache: TimingCache, say: Progress
) -> SearchResult:
    """The outcome of ``precision="auto"``. Raises NotMet, before anything is written, if no engine is within the bound."""
    from optdnn.precision.search import search_precisions

    def whole(precision: str) -> Graph:
        copy = untouched.copy()
        optimize(copy, replace(alone_in(options, precision), dump=None), options.target)
        return copy

    on_gpu = TargetName.parse(options.target).on_gpu  # the passes of other targets do the same in all precisions
    found = search_precisions(graph, options, options.target, cache, say, whole if on_gpu else None)
    cache.save()
    if not found.met:
        raise not_met(found.report)
    return found


def not_met(report: SearchReport) -> NotMet:
    """The error if no engine is within the bound; it names the closest one."""
    c = report.candidate()
    verified = "" if c.verified is None else f", {c.verified:.3g} on unseen data"
    expected = "" if c.expected is None else f", {c.expected:.3g} expected from margins"
    return NotMet(
        f"no engine loses less than {report.bound:g} {report.unit}; the closest is {c.name}: {c.drop:.3g} on the data that the "
        f"search saw{verified}{expected}",
        hint=f"nothing was written; --max-drop {c.worst:.3g} would accept it, and so might fewer --pin options",
    )


def alone_in(options: BuildOptions, precision: str) -> BuildOptions:
    """The options of a build in one float precision, which needs no data."""
    unbound = replace(options, metric="top1", max_drop=None, labels=None, candidates=None)
    return replace(unbound, precision=precision, calib=None, calib_cache=None, images=None)
