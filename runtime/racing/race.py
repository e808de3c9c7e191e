"""The race: candidates measured side by side, each in its own worker process, in turns.

In one process the libraries' spinning thread pools disturb one another. In separate, consecutive measurements, the first candidate
benefits if the machine slows down later. So each candidate has its own process, and all others wait at their pipes while one runs.
Turns are short, and their order rotates from round to round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

import numpy as np

from optdnn.errors import UsageError
from optdnn.runtime.measuring.accuracy import errors_between
from optdnn.runtime.measuring.latency import LatencyStats
from optdnn.runtime.measuring.machine import machine, usable_cores, versions
from optdnn.runtime.program import Plain
from optdnn.runtime.racing.candidates import Candidate
from optdnn.runtime.workers.process import WorkerFailure, WorkerProcess
from optdnn.types import Array, is_float

CLOSE = 0.02
"""Speedups within this of 1 are called equal if the measurement is precise enough."""


@dataclass(frozen=True)
class Versus:
    """One candidate's speedup over another (median over rounds), its 95 % interval, and the verdict of :class:`Row`."""

    speedup: float
    range: tuple[float, float]
    verdict: str

    @classmethod
    def of(cls, medians: Sequence[float], base_medians: Sequence[float]) -> Versus:
        ratios = [b / m for b, m in zip(base_medians, medians, strict=False)]
        interval = median_interval(ratios)
        return cls(float(np.median(ratios)), interval, _verdict(interval))


@dataclass
class Row:
    """One candidate's result. If ``error`` is set, it failed, and the measurements are None.

    ``speedup`` is the median over rounds of the baseline's median latency divided by this one's in the same round, so that a
    slow phase of the machine cancels out; ``speedup_range`` is its 95 % confidence interval. ``verdict``:
    "baseline", "faster", "slower", "equal" (within 2 %) or "unstable" (too noisy to rank). Errors are against the race's
    error reference (see :func:`~optdnn.runtime.measuring.accuracy.errors_between`). ``round_medians_ms``: one median per round, in
    order; ``quantiles_ms``: the 0 %, 1 %, … 100 % quantiles of all latencies, enough to draw their distribution. ``clock``: "gpu"
    if latencies are GPU times with the arrays there, otherwise "host".
    """

    name: str
    kind: str
    stats: LatencyStats | None = None
    speedup: float | None = None
    speedup_range: tuple[float, float] | None = None
    verdict: str | None = None
    max_abs_err: float | None = None
    max_rel_err: float | None = None
    error: str | None = None
    facts: Mapping[str, Plain] = field(default_factory=dict)
    outputs: dict[str, Array] | None = None
    open_s: float | None = None
    clock: str = "host"
    round_medians_ms: list[float] = field(default_factory=list)
    quantiles_ms: list[float] = field(default_factory=list)
    energy: Mapping[str, Plain] | None = None
    """The result of :func:`optdnn.runtime.measuring.energy.energy`, if that was requested."""

    def to_plain(self) -> dict[str, Plain]:
        """The row of ``compare --json``, without the outputs themselves."""
        s = self.stats
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("stats", "outputs")}
        return own | {
            "median_ms": s and s.median,
            "p99_ms": s and s.p99,
            "throughput_per_s": s and s.throughput_per_s,
            "latency_ms": s and s.to_plain(),
            "n": s and s.n,
            "stable": s and s.stable,
            "speedup_range": None if self.speedup_range is None else list(self.speedup_range),
            "round_medians_ms": [round(v, 6) for v in self.round_medians_ms],
            "quantiles_ms": [round(v, 6) for v in self.quantiles_ms],
            "facts": dict(self.facts),
        }

    def fail(self, error: WorkerFailure, workers: dict[str, WorkerProcess]) -> None:
        """Keep the error, and end the candidate's worker."""
        self.error = str(error)
        if self.name in workers:
            workers.pop(self.name).close()


@dataclass
class Race:
    """All rows, and their references. ``input_difference`` is the max_rel_err that other inputs cause on the error
    reference: an error is small only if it is well below this value."""

    rows: list[Row]
    error_reference: str | None
    speedup_reference: str | None
    threads: int
    input_difference: float | None

    def row(self, name: str) -> Row:
        return next(r for r in self.rows if r.name == name)

    def versus(self, name: str, base: str) -> Versus | None:
        """Candidate ``name`` compared with another one than the race's speedup reference; None if one was not measured."""
        mine, other = self.row(name).round_medians_ms, self.row(base).round_medians_ms
        return Versus.of(mine, other) if mine and other else None

    def to_plain(self) -> dict[str, Plain]:
        """The report of ``compare --json``: rows, references, machine, versions."""
        return {
            "rows": [r.to_plain() for r in self.rows],
            "error_reference": self.error_reference,
            "speedup_reference": self.speedup_reference,
            "input_difference": self.input_difference,
            "threads": self.threads,
            "machine": machine(),
            "versions": versions(),
        }


def race(
    candidates: Sequence[Candidate],
    feeds: Mapping[str, Array],
    *,
    other_feeds: Mapping[str, Array] | None = None,
    error_reference: str | None = None,
    speedup_reference: str | None = None,
    threads: int | None = None,
    rounds: int = 10,
    turn_s: float = 0.25,
    settle_s: float = 0.03,
    timeout_s: float = 600.0,
    timing: bool = True,
    with_energy: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Race:
    """Run all candidates on ``feeds``, then let them take turns for ``rounds`` rounds of ``turn_s`` seconds each.

    The references default to the first candidate that works. ``threads`` (default: all usable cores) applies to all.
    A candidate that fails, crashes or exceeds ``timeout_s`` in one command becomes a row with its error; the others continue.
    ``timing=False`` compares outputs only; ``with_energy`` measures each candidate's energy after the race, alone. Raises
    UsageError for names that clash or do not exist.
    """
    names = [c.name for c in candidates]
    if len(set(names)) != len(names) or not names:
        raise UsageError(f"candidates need different names: {', '.join(names) or 'there are none'}")
    for reference in (error_reference, speedup_reference):
        if reference is not None and reference not in names:
            raise UsageError(f"the reference {reference!r} is not one of {', '.join(names)}")
    threads = threads or usable_cores()
    rows = {c.name: Row(c.name, c.kind) for c in candidates}
    workers: dict[str, WorkerProcess] = {}
    first_s: dict[str, float] = {}
    try:
        for c in candidates:
            progress(f"opening {c.name}")
            row = rows[c.name]
            try:
                workers[c.name] = worker = WorkerProcess(threads, timeout_s)
                answer, _ = worker.ask({"command": "open", "candidate": asdict(c), "threads": threads})
                row.facts, row.open_s, row.clock = answer["facts"], answer["open_s"], answer["clock"]
                _, arrays = worker.ask({"command": "feeds"}, feeds)
                row.outputs = dict(zip(answer["outputs"] or arrays, arrays.values(), strict=True))
                again, _ = worker.ask({"command": "feeds"}, feeds)
                first_s[c.name] = again["seconds"]
            except WorkerFailure as e:
                row.outputs = None
                row.fail(e, workers)
        working = [n for n in names if n in workers]
        error_reference = error_reference or next(iter(working), None)
        difference = _compare_outputs(rows, workers, error_reference, feeds, other_feeds)
        if timing:
            turns = _take_turns(rows, workers, first_s, rounds, turn_s, settle_s, progress)
            working = [n for n in names if turns.get(n)]
            speedup_reference = speedup_reference or next(iter(working), None)
            _judge(rows, turns, speedup_reference)
        if with_energy:
            _measure_energy(rows, workers, progress)
    finally:
        for worker in workers.values():
            worker.close()
    return Race(list(rows.values()), error_reference, speedup_reference if timing else None, threads, difference)


def _compare_outputs(
    rows: Mapping[str, Row],
    workers: dict[str, WorkerProcess],
    reference: str | None,
    feeds: Mapping[str, Array],
    other_feeds: Mapping[str, Array] | None,
) -> float | None:
    """Fill in the errors; returns the difference that other inputs cause on the reference, None if its results are not finite."""
    if reference is None or rows[reference].outputs is None:
        return None
    want = list((rows[reference].outputs or {}).values())
    for row in rows.values():
        if row.outputs is not None:
            got = list(row.outputs.values())
            if len(got) != len(want):
                row.error = f"it has {len(got)} outputs, {reference} has {len(want)}"
            else:
                row.max_abs_err, row.max_rel_err = errors_between(got, want)
    if other_feeds is None or all(is_float(a.dtype) and a.size and not np.isfinite(a).any() for a in want):
        return None  # NaN equals NaN, which proves nothing about inputs
    try:
        _, other = workers[reference].ask({"command": "feeds"}, other_feeds)
        workers[reference].ask({"command": "feeds"}, feeds)
        return errors_between(list(other.values()), want)[1]
    except WorkerFailure as e:
        rows[reference].fail(e, workers)
        return None


def _take_turns(
    rows: Mapping[str, Row],
    workers: dict[str, WorkerProcess],
    first_s: Mapping[str, float],
    rounds: int,
    turn_s: float,
    settle_s: float,
    progress: Callable[[str], None],
) -> dict[str, list[Array]]:
    """Latencies in nanoseconds: for each candidate one array per round."""
    turns: dict[str, list[Array]] = {n: [] for n in workers}
    for k in range(rounds):
        order = list(workers)
        for name in order[k % max(1, len(order)) :] + order[: k % max(1, len(order))]:
            # One call may take longer than a turn: then a turn is one call, and few turns are enough.
            slow = first_s[name] > turn_s
            if slow and len(turns[name]) >= 3 and sum(int(t.sum()) for t in turns[name]) > 4e9 * turn_s * rounds:
                continue
            progress(f"round {k + 1} of {rounds}: {name}")
            time.sleep(settle_s)  # the last candidate's threads stop spinning
            try:
                request = {
                    "command": "turn",
                    "warmup": 0 if slow else 1,
                    "seconds": turn_s,
                    "most": 1 if slow else None,
                }
                _, arrays = workers[name].ask(request)
                turns[name].append(arrays["ns"])
            except WorkerFailure as e:
                turns[name] = []
                rows[name].fail(e, workers)
    return turns


def _measure_energy(
    rows: Mapping[str, Row], workers: dict[str, WorkerProcess], progress: Callable[[str], None]
) -> None:
    """Fill in the energies, one candidate after another."""
    for name, worker in list(workers.items()):
        progress(f"energy of {name}")
        try:
            rows[name].energy = worker.ask({"command": "energy"})[0]
        except WorkerFailure as e:
            rows[name].fail(e, workers)


def _judge(rows: Mapping[str, Row], turns: Mapping[str, list[Array]], reference: str | None) -> None:
    for name, taken in turns.items():
        if taken:
            row, all_ns = rows[name], np.concatenate(taken)
            row.stats = LatencyStats.of(all_ns.tolist())
            row.round_medians_ms = [float(np.median(t)) / 1e6 for t in taken]
            row.quantiles_ms = (np.percentile(all_ns, range(101)) / 1e6).tolist()
    if reference is None or not turns.get(reference):
        return
    for name in turns:
        row = rows[name]
        if row.stats is None:
            continue
        if name == reference:
            row.speedup, row.speedup_range, row.verdict = 1.0, (1.0, 1.0), "baseline"
            continue
        versus = Versus.of(row.round_medians_ms, rows[reference].round_medians_ms)
        row.speedup, row.speedup_range, row.verdict = versus.speedup, versus.range, versus.verdict


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A confidence interval of the median (95 % if there are at least six values, otherwise their whole range).

    It is distribution-free: between order statistics, by the binomial distribution of the number of values below the median.
    """
    ordered = sorted(values)
    n = len(ordered)
    skip, below = 0, 0.5**n
    # Leave off k values at either end as long as the probability that the median is beyond them stays within 2.5 % per side.
    while (below := below + math.comb(n, skip + 1) * 0.5**n) <= 0.025:
        skip += 1
    return (ordered[skip], ordered[n - 1 - skip]) if n >= 6 else (ordered[0], ordered[-1])


def _verdict(interval: tuple[float, float]) -> str:
    low, high = interval
    if low > 1 + CLOSE:
        return "faster"
    if high < 1 - CLOSE:
        return "slower"
    return "equal" if low >= 1 - CLOSE and high <= 1 + CLOSE else "unstable"
