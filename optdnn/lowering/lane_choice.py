"""Whether independent steps of a network run side by side on lanes: by build options, measurement or prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from optdnn.config import AUTO, BuildOptions
from optdnn.lowering.lanes import MOST_LANES, with_lanes
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted
from optdnn.runtime.program import Program

WAYS = (4, 2)
"""The maxima of lanes that tuning tries."""
NOTHING = "nothing is predicted to gain side by side"
CLEAR_LANES = 0.99
"""Tuning keeps lanes if they bring the network's time below this fraction of its time in one lane, twice."""


@dataclass(frozen=True)
class LaneChoice:
    """How steps are put on lanes: at most ``most`` (1: one lane).

    ``seconds`` by signature are the measured times that the schedule uses. ``one_ms`` and ``lanes_ms`` are the milliseconds of an
    inference in one lane and with lanes (None: not measured).
    """

    most: int = 1
    seconds: Mapping[str, float] = field(default_factory=dict)
    one_ms: float | None = None
    lanes_ms: float | None = None

    def to_plain(self) -> dict[str, Any]:
        """For the timing cache. With one lane, too: engines record the times of their steps."""
        us = {k: round(s * 1e6, 4) for k, s in sorted(self.seconds.items())}
        return {"most": self.most, "us": us, "one_ms": self.one_ms, "lanes_ms": self.lanes_ms}

    @classmethod
    def of_plain(cls, plain: Any) -> LaneChoice | None:
        """The inverse of :meth:`to_plain`; None for other data."""
        match plain:
            case {"most": int(most), "us": dict(us), "one_ms": one, "lanes_ms": lanes} if 1 <= most <= 8 and all(
                isinstance(v, (int, float)) for v in us.values()
            ):
                return cls(most, {str(k): v / 1e6 for k, v in us.items()}, one, lanes)
        return None

    def after_race(self, way: LaneChoice, ms: float, best_ms: float, *, won: bool) -> LaneChoice:
        """The choice after a race of the network on lanes (``way``, ``ms``) against the network with this choice (``best_ms``)."""
        one_ms = best_ms if self.one_ms is None else self.one_ms
        if won:
            return replace(way, one_ms=one_ms, lanes_ms=ms)
        if self.most > 1:
            return self
        return replace(self, one_ms=one_ms, lanes_ms=min(ms, self.lanes_ms or ms))

    def why(self) -> str:
        """The reason, for reports."""
        if self.lanes_ms is None:
            return "predicted, not measured" if self.most > 1 else NOTHING
        faster = "faster" if self.most > 1 else "not faster"
        return f"measured {faster}: {self.lanes_ms:.4f} ms with lanes, {self.one_ms:.4f} ms in one"


def on_lanes(
    program: Program,
    gpu: GpuFacts,
    seconds: Mapping[int, float],
    options: BuildOptions,
    streams: LaneChoice | None = None,
) -> Program:
    """The program with its steps on lanes, by ``options.streams``. "auto": if measured to be faster (``streams``), or, untuned,
    if a clear gain is predicted.

    ``seconds`` by step are predicted or measured. ``meta["streams"]`` describes the decision.
    """
    wanted, model = options.streams, fitted(gpu)
    if wanted == 1:
        return program
    if wanted != AUTO:
        assert isinstance(wanted, int)
        return with_lanes(program, model, seconds, wanted)
    if streams is None:  # not tuned: the cost model decides; the cost of forks and joins is known for Hopper only
        if not gpu.hopper:
            return program
        streams = LaneChoice(MOST_LANES)
    if streams.most > 1:
        program = with_lanes(program, model, seconds, streams.most)
    why = streams.why() if program.lanes or streams.lanes_ms is not None else NOTHING
    program.meta["streams"] = {"lanes": 1, **program.meta.get("streams", {}), "why": why}
    return program
