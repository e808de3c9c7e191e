"""Tuning's question to the whole network: is it faster with its independent steps side by side?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from optdnn.config import BuildOptions
from optdnn.lowering.assemble import placed
from optdnn.lowering.lane_choice import CLEAR, WAYS, LaneChoice, on_lanes
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.trials.process import NetworkLost
from optdnn.runtime.program import Program
from optdnn.tuning.result import Timer, Tuned


def race_lanes(
    found: Tuned,
    nets: dict[str, Any],
    program: Program,
    gpu: GpuFacts,
    seconds: Mapping[int, float],
    measured: Mapping[str, float],
    options: BuildOptions,
    timer: Timer,
    go_on: Callable[[], None],
) -> None:
    """Race ``program`` (in one lane; loaded as ``nets["best"]``) on lanes, in each of :data:`WAYS`; the fastest is then
    ``nets["best"]``, and ``found`` says which it is.

    ``seconds`` of steps by number are what lanes are made by, ``measured`` the same by signature, as they are to be kept.
    ``go_on`` raises where there is no time left: what was found so far stays. Lanes with which the network hangs or crashes are
    left out, with a line in ``found.lost``.
    """
    best = found.streams = LaneChoice()
    tried: set[Any] = set()
    for most, forced in WAYS:
        go_on()
        way = LaneChoice(most, forced, measured)
        laned = on_lanes(program, gpu, seconds, options, way)
        made = (laned.lanes, tuple(s.outputs for s in laned.steps))
        if not laned.lanes or made in tried:
            continue
        tried.add(made)
        try:
            nets["lanes"] = timer.load(placed(laned))
            ours, now = timer.race([nets["lanes"], nets["best"]], 1)
            if ours < CLEAR * now:
                ours, now = timer.race([nets["lanes"], nets["best"]], 3)
        except NetworkLost as lost:
            if lost.network is nets["best"]:
                raise
            if "lanes" in nets:
                nets.pop("lanes").close()
            found.lost.append(
                f"the network with its steps on {1 + max(s.lane for s in laned.lanes)} lanes: {lost.message}"
            )
            continue
        one = now if best.one_ms is None else best.one_ms
        if ours < CLEAR * now:
            nets["lanes"], nets["best"] = nets["best"], nets["lanes"]
            best, found.after_ms = replace(way, one_ms=one, lanes_ms=ours), ours
        elif best.most == 1:
            best = replace(best, one_ms=one, lanes_ms=min(ours, best.lanes_ms or ours))
        nets.pop("lanes").close()
        found.streams = best
