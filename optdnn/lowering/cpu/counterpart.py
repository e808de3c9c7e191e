"""The cpu target in fp32 compared with an engine of another precision: a lower precision gains nothing if this processor
emulates it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from optdnn.config import BuildOptions
from optdnn.errors import RunError, UnsupportedError
from optdnn.ir.evaluate import random_feeds
from optdnn.ir.graph import Graph
from optdnn.lowering.cpu.base import Measured, fastest, take_turns
from optdnn.lowering.cpu.partition import LibraryChoice, choose
from optdnn.lowering.cpu.typical_sizes import typical_sizes
from optdnn.runtime.contexts.base import BaseContext
from optdnn.runtime.measuring.latency import quiet, sample
from optdnn.tuning.timing_cache import TimingCache
from optdnn.types import Array, is_int

SLOWER = 1.05
"""An engine that takes more than this factor of fp32's time is called slower. Two measurements of one engine differ by less."""


@dataclass(frozen=True)
class Counterpart:
    """An engine's tactic and time, and the best of the same network in fp32, with the same number of threads."""

    precision: str
    own: Measured
    fp32: Measured

    @property
    def ratio(self) -> float:
        """The engine's time divided by fp32's time."""
        return (self.own.median_ms or 0.0) / (self.fp32.median_ms or 1.0)

    @property
    def slower(self) -> bool:
        return self.ratio > SLOWER

    def to_json(self) -> dict[str, Any]:
        return {
            "precision": self.precision,
            "own": {"tactic": self.own.name, "median_ms": self.own.median_ms},
            "fp32": {"tactic": self.fp32.name, "median_ms": self.fp32.median_ms},
            "slower": self.slower,
        }


def fp32_of(options: BuildOptions) -> BuildOptions:
    """The options of the same build in fp32: without the options of other precisions, and without output files."""
    return replace(
        options, precision="fp32", precision_map={}, strict_precision=False, calib=None, calib_cache=None, images=None,
        metric="top1", max_drop=None, labels=None, candidates=None, dump=None, emit_onnx=None,
    )  # fmt: skip


def beside_fp32(
    graph: Callable[[], Graph],
    choice: LibraryChoice,
    label: str,
    options: BuildOptions,
    cache: TimingCache,
    progress: Callable[[str], None] = lambda text: None,
) -> Counterpart | None:
    """The times of ``choice``, whose precision is called ``label``, and of the network in fp32 (``graph()``), by the libraries
    that ``options`` allow and with the threads of the choice. None if either has no time, or if no library runs the network in
    fp32."""
    tactic = choice.engine.meta["tactic"]
    own = next((r for r in choice.rows if r.name == tactic["name"]), None)
    if own is None or own.median_ms is None:
        return None
    wanted = replace(fp32_of(options), threads=tactic["threads"])
    in_fp32 = graph()
    try:
        other = choose(in_fp32, wanted, cache, {}, lambda text: progress(f"fp32: {text}"), base="fp32", label="fp32")
    except (UnsupportedError, RunError):
        return None
    best = fastest(other.rows)
    if best is None:
        return None
    if not (own.cached and best.cached):
        own, best = _in_turns(choice, own, other, best, in_fp32, progress)
    return Counterpart(label, own, best)


def _in_turns(
    choice: LibraryChoice,
    own: Measured,
    other: LibraryChoice,
    best: Measured,
    graph: Graph,
    progress: Callable[[str], None],
) -> tuple[Measured, Measured]:
    """Both measured once more, in turns, so that other load on the machine affects both. The earlier times are returned if made-up
    inputs may be invalid for the network (integers, scalars)."""
    feeds = random_feeds(graph, seed=1, sizes=typical_sizes(graph))
    if any(is_int(a.dtype) or a.ndim < 2 for a in feeds.values()):
        return own, best
    progress("compare it with fp32")
    engines = {"own": choice.engine, "fp32": other.engine}
    runners = {name: partial(_turn, engine.context(), feeds) for name, engine in engines.items()}
    with quiet():
        times = take_turns(runners, give_up_ratio=float("inf"), budget_seconds=2.0)
    return replace(own, median_ms=round(times["own"], 4)), replace(best, median_ms=round(times["fp32"], 4))


def _turn(context: BaseContext, feeds: Mapping[str, Array], seconds: float) -> list[float]:
    """Milliseconds of the runs of one turn."""
    return [ns / 1e6 for ns in sample(lambda: context.run(feeds), warmup=1, duration=seconds)]
