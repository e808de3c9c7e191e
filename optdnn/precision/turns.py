"""Races of engines: rounds with a turn of every engine, compared within rounds; and times kept in the timing cache.

A machine's clock, neighbors and caches drift by more than the difference between engines of small networks, but within a round
they affect all engines alike. So engines are compared by their ratios in the same rounds. An engine with two names is timed once.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import TypeVar

from optdnn.runtime.engine import Engine
from optdnn.tuning.timing_cache import TimingCache

RACE_SECONDS = 30.0
"""No round of a race begins after this time."""
T = TypeVar("T")
Rounds = Mapping[str, Sequence[float]]
"""Engine -> milliseconds, one entry per round; an engine that was given up has fewer."""


def identity(engine: Engine) -> str:
    """A digest of everything that an engine's speed depends on: steps, kernels and memory; on a GPU, only the sizes of
    constants."""
    program = engine.program
    digest = hashlib.sha256(repr(program.arena_bytes).encode())
    for step in program.steps:
        digest.update(repr((step.executor, sorted(step.params.items(), key=str), step.inputs, step.outputs)).encode())
    for kernel in program.kernels:
        digest.update(repr((kernel.function, kernel.arch, kernel.options, kernel.source)).encode())
        digest.update(repr(sorted(kernel.generated.items())).encode())
    for buffer in program.buffers:
        digest.update(repr((buffer.dtype, buffer.shape, buffer.offset, buffer.blob is None)).encode())
    if not program.kernels:  # CPU libraries examine constants, and their models are constants, too
        for blob in program.blobs:
            digest.update(blob.tobytes())
    return digest.hexdigest()[:32]


def once_each(
    engines: Mapping[str, Engine], measure: Callable[[Mapping[str, Engine]], Mapping[str, T]]
) -> dict[str, T]:
    """The results of ``measure`` for each engine, by name. Of identical engines, ``measure`` gets only one."""
    first: dict[str, str] = {}
    alias = {n: first.setdefault(identity(e), n) for n, e in engines.items()}
    found = measure({n: engines[n] for n in dict.fromkeys(alias.values())})
    return {n: found[a] for n, a in alias.items() if a in found}


def stored_times(cache: TimingCache, head: str, measure: Callable[[], Mapping[str, float]]) -> dict[str, float]:
    """Times by name: from the cache's entries under ``head``; missing ones are measured and stored there."""
    found = {k.removeprefix(head + " "): us for k, us in cache.entries.items() if k.startswith(head + " ")}
    if not found:
        found = {name: round(us, 3) for name, us in measure().items()}
        for name, us in found.items():
            cache.put(f"{head} {name}", us)
    return found


def remembered(
    engines: Mapping[str, Engine],
    cache: TimingCache,
    machine: str,
    measure: Callable[[Mapping[str, Engine]], Rounds],
) -> dict[str, float]:
    """:func:`paired` milliseconds of engines on a machine: from the cache if it has all of them, otherwise measured."""
    keys = {n: f"whole engine in turns {machine} {identity(e)}" for n, e in engines.items()}
    known = {n: cache.get(k) for n, k in keys.items()}
    if None not in known.values():
        return {n: float(v or 0.0) for n, v in known.items()}
    found = {n: round(ms, 5) for n, ms in paired(once_each(engines, measure)).items()}
    for n, ms in found.items():
        cache.put(keys[n], ms)
    return found


def in_turns(
    turns: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    give_up_ratio: float,
    tick: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """Milliseconds of each turn in ``rounds`` rounds. The starting engine changes from round to round.

    After each round, engines with a best time beyond ``give_up_ratio`` times the best of all are given up. No further
    round begins after :data:`RACE_SECONDS`.
    """
    found: dict[str, list[float]] = {name: [] for name in turns}
    active = list(turns)
    deadline = time.perf_counter() + RACE_SECONDS
    for k in range(rounds):
        for name in active[k % len(active) :] + active[: k % len(active)]:
            tick(name)
            found[name].append(turns[name]())
        best = min(min(found[n]) for n in active)
        active = [n for n in active if min(found[n]) <= best * give_up_ratio]
        if time.perf_counter() > deadline or len(active) == 1:
            break
    return found


def paired(rounds: Rounds) -> dict[str, float]:
    """Milliseconds of each engine: the fastest engine's time, multiplied by the mean ratio to it in the same rounds."""
    most = max((len(r) for r in rounds.values()), default=0)
    if not most:
        return {}
    base = min((n for n, r in rounds.items() if len(r) == most), key=lambda n: interquartile_mean(rounds[n]))
    scale = interquartile_mean(rounds[base])
    return {
        n: scale * interquartile_mean([a / b for a, b in zip(r, rounds[base], strict=False)])
        for n, r in rounds.items()
        if r
    }


def interquartile_mean(values: Sequence[float]) -> float:
    """The mean of the middle half (of all values, if fewer than four). It excludes disturbed rounds. If the values form two
    clusters, it moves with their proportions; a median does not."""
    skip = len(values) // 4
    return statistics.fmean(sorted(values)[skip : len(values) - skip])


def turn_of(run: Callable[[], object], *, seconds: float, rest: float) -> Callable[[], float]:
    """A turn by the host's clock: a pause (threads of the last engine spin for a while), two runs that do not count, and then the
    median of the runs in ``seconds``, in milliseconds."""

    def turn() -> float:
        time.sleep(rest)
        run()
        run()
        taken: list[float] = []
        end = time.perf_counter() + seconds
        while not taken or time.perf_counter() < end:
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken) * 1e3

    return turn


def alternating(turns: Sequence[Callable[[], float]]) -> Callable[[], float]:
    """A turn that runs one of these per call, in rotation."""
    again = cycle(turns)
    return lambda: next(again)()
