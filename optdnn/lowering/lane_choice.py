"""Whether a network's independent steps run side by side: by the options of its build, and by what tuning measured of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from optdnn.config import AUTO, BuildOptions
from optdnn.lowering.lanes import MOST_LANES, with_lanes
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted
from optdnn.runtime.program import Program

WAYS = ((4, False), (4, True), (2, True))
"""What tuning tries: most lanes, and whether for any gain that is predicted (or for clear ones alone)."""
NOTHING = "nothing is predicted to gain side by side"
CLEAR = 0.99
"""Lanes are kept where they bring the network's time below this part of what it is in one lane, twice."""


@dataclass(frozen=True)
class LaneChoice:
    """What tuning found: the way (see :data:`WAYS`; ``most`` 1: one lane) that is the fastest in the whole network, the measured
    ``seconds`` of operators by signature that lanes are made by, and milliseconds of an inference in one lane and with lanes."""

    most: int = 1
    forced: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    one_ms: float | None = None
    lanes_ms: float | None = None

    def to_plain(self) -> dict[str, Any]:
        """For the timing cache. The seconds of one lane are of no use."""
        kept = {k: round(s * 1e6, 4) for k, s in sorted(self.seconds.items())} if self.most > 1 else {}
        return {"most": self.most, "forced": self.forced, "us": kept, "one_ms": self.one_ms, "lanes_ms": self.lanes_ms}

    @classmethod
    def of_plain(cls, plain: Any) -> LaneChoice | None:
        """The inverse; None for anything else."""
        match plain:
            case {"most": int(most), "forced": bool(forced), "us": dict(us), "one_ms": one, "lanes_ms": lanes} if (
                1 <= most <= 8 and all(isinstance(v, (int, float)) for v in us.values())
            ):
                return cls(most, forced, {str(k): v / 1e6 for k, v in us.items()}, one, lanes)
        return None

    def why(self) -> str:
        """In a sentence."""
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
    """The program, its steps side by side as ``options.streams`` wants it: "auto" where tuning found it to be faster, or, untuned,
    where a clear gain is predicted.

    ``seconds`` by step are predicted or measured. ``meta["streams"]`` says what was decided.
    """
    wanted, model = options.streams, fitted(gpu)
    if wanted == 1:
        return program
    if wanted != AUTO:
        assert isinstance(wanted, int)
        return with_lanes(program, model, seconds, wanted, forced=True)
    if streams is None:  # not tuned: the cost model decides, where what forks and joins cost was measured
        if not gpu.hopper:
            return program
        streams = LaneChoice(MOST_LANES)
    if streams.most > 1:
        program = with_lanes(program, model, seconds, streams.most, forced=streams.forced)
    why = streams.why() if program.lanes or streams.lanes_ms is not None else NOTHING
    program.meta["streams"] = {"lanes": 1, **program.meta.get("streams", {}), "why": why}
    return program
