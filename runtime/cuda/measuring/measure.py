"""Measures an engine on the GPU: the time of an inference, step by step, and of the copies of inputs and outputs.

GPU times are between events on the stream. The kernels of a run overlap (programmatic dependent launch). So a step's time is the
time that it adds to the run: the time of the graph up to this step, minus the time of the graph before it. The sum is the run's.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from optdnn.runtime.cuda.launches.chain import Chain
from optdnn.runtime.cuda.launches.graphs import Events, Flush, Graph, Stream, time_runs
from optdnn.runtime.cuda.launches.plan import CudaStep
from optdnn.runtime.cuda.measuring.clocks import ClockSample, Monitor
from optdnn.runtime.cuda.measuring.work import Ceilings, Work, work_of
from optdnn.runtime.cuda.runner import CudaContext
from optdnn.runtime.measuring.latency import UNSTABLE, LatencyStats, RunLimits, quiet
from optdnn.runtime.program import Plain
from optdnn.runtime.steps.host import CopyPlan
from optdnn.types import Array

BATCH = 32
"""Number of runs that are enqueued before the host waits: enough to keep the GPU busy, few enough to check the clock in between."""
CLOCK_DROP = 0.05
"""A larger drop of the multiprocessors' clock during a measurement is reported."""
FEW = 50
"""With fewer runs than this, percentiles are unreliable."""
ROWS = ("gpu_compute_ms", "enqueue_ms", "h2d_ms", "d2h_ms", "latency_ms", "host_latency_ms")


@dataclass
class GpuSamples:
    """``times``: nanoseconds of each run, by the names of :data:`ROWS`.

    Compute and enqueue times come from runs that follow one another without a pause. The others come from single runs from host
    arrays to host arrays: copies from and to pinned memory; the latency, from the first copy to the end of the last on the GPU;
    the same by the host's clock.
    """

    times: Mapping[str, array[int]]
    busy_ns: int
    """GPU time of all the runs of ``gpu_compute_ms``, including pauses between them."""
    clocks: list[ClockSample]


def replay_times(
    replay: Callable[[], object],
    stream: Stream,
    *,
    flush: Callable[[], object] | None = None,
    look: Callable[[], object] = lambda: None,
    **limits: Any,
) -> tuple[array[int], array[int], int]:
    """GPU nanoseconds and host (enqueue) nanoseconds of each ``replay()``, and the total GPU time: see :class:`GpuSamples`.

    ``flush`` is enqueued before each run, outside of its time. ``look`` is called between batches, while the GPU works. ``limits``
    are the fields of :class:`~optdnn.runtime.measuring.latency.RunLimits`, whose warmup is the caller's.
    """
    runs = RunLimits(**limits)
    taken, enqueue, busy = array("q"), array("q"), 0
    events, clock = Events(2 * BATCH + 1), time.perf_counter_ns
    with quiet():
        more = runs.begin()
        while more(len(taken)):
            n = BATCH if runs.iterations is None else min(BATCH, runs.iterations - len(taken))
            for k in range(n):
                if flush is not None:
                    flush()
                if k == 0 or flush is not None:
                    events.record(2 * k, stream)
                start = clock()
                replay()
                enqueue.append(clock() - start)
                events.record(2 * k + 1, stream)
            look()
            stream.synchronize()
            busy += events.nanoseconds(0, 2 * n - 1)
            for k in range(n):
                begin = 2 * k if k == 0 or flush is not None else 2 * k - 1
                taken.append(events.nanoseconds(begin, 2 * k + 1))
    events.close()
    return taken, enqueue, busy


def sampler_of(context: CudaContext, feeds: Mapping[str, Array]) -> Any:
    """The sampler of an engine: replays of its graph on these inputs."""
    context.run(feeds)
    graph = context.graph()
    return partial(sample_replays, partial(graph.replay, context.stream), context.stream)


def sample_replays(replay: Any, stream: Stream, seconds: float | None, most: int | None, warmup: int) -> array[int]:
    for _ in range(warmup):
        replay()
    return replay_times(replay, stream, duration=None if most else seconds, iterations=most)[0]


def sample_gpu(
    context: CudaContext, feeds: Mapping[str, Any], limits: RunLimits, *, flush_l2: bool = False
) -> GpuSamples:
    """Time runs on ``feeds`` (NumPy arrays). The duration is divided between consecutive runs and single runs."""
    context.run(feeds)  # stages the inputs and makes the graph
    graph, stream = context.graph(), context.stream
    monitor = Monitor.open()
    clocks: list[ClockSample] = []
    next_look = 0.0

    def look() -> None:
        nonlocal next_look
        if monitor is not None and time.perf_counter() > next_look:
            clocks.append(monitor.sample())
            next_look = time.perf_counter() + 0.1

    share = limits if limits.iterations is not None else replace(limits, duration=limits.seconds / 2)
    flush = Flush(2 * context.device.l2_bytes, stream) if flush_l2 else None
    try:
        for _ in range(max(1, limits.warmup)):
            graph.replay(stream)
        stream.synchronize()
        compute, enqueue, busy = replay_times(
            lambda: graph.replay(stream), stream, flush=flush, look=look, **asdict(share)
        )
    finally:
        if flush is not None:
            stream.synchronize()
            flush.close()
    times = (compute, enqueue, *_single_runs(context, graph, share, look))
    return GpuSamples(dict(zip(ROWS, times, strict=True)), busy, clocks)


def _single_runs(
    context: CudaContext, graph: Graph | Chain, limits: RunLimits, look: Callable[[], None]
) -> tuple[array[int], array[int], array[int], array[int]]:
    h2d, d2h, latency, host = (array("q") for _ in range(4))
    events, stream, memory, clock = Events(4), context.stream, context.memory, time.perf_counter_ns

    def once() -> None:
        for k, part in enumerate((memory.copy_in, graph.run, memory.copy_out)):
            events.record(k, stream)
            part(stream.handle)
        events.record(3, stream)
        stream.synchronize()

    for _ in range(3):
        once()
    with quiet():
        more = limits.begin()
        while more(len(h2d)):
            start = clock()
            once()
            host.append(clock() - start)
            h2d.append(events.nanoseconds(0, 1))
            d2h.append(events.nanoseconds(2, 3))
            latency.append(events.nanoseconds(0, 3))
            look()
    events.close()
    return h2d, d2h, latency, host


def gpu_report(
    context: CudaContext, feeds: Mapping[str, Any], limits: RunLimits, *, flush_l2: bool = False
) -> dict[str, Plain]:
    """The GPU's part of the report of ``optdnn bench``.

    Keys: device; cuda_driver (the CUDA version that the driver supports); l2 ("warm": each run finds the previous run's data in
    L2, or "flushed"); for each of :data:`ROWS` the statistics in milliseconds; distributions (the quantiles of each row);
    throughput_per_s (consecutive runs); iterations; spread; clocks; remarks (sentences about the reliability of the
    figures).
    """
    samples = sample_gpu(context, feeds, limits, flush_l2=flush_l2)
    report = report_of(samples, context.device.name, flushed=flush_l2, monitor=Monitor.open())
    return report | {"cuda_driver": ".".join(map(str, context.device.driver_version))}


def report_of(samples: GpuSamples, device: str, *, flushed: bool, monitor: Monitor | None) -> dict[str, Plain]:
    """The report of :func:`gpu_report` from samples."""
    stats = {name: LatencyStats.of(ns) for name, ns in samples.times.items()}
    compute = stats["gpu_compute_ms"]
    total = sum(samples.times["gpu_compute_ms"]) if flushed else samples.busy_ns
    report: dict[str, Plain] = {
        "device": device,
        "l2": "flushed" if flushed else "warm",
        **{name: s.to_plain() for name, s in stats.items()},
        "distributions": {name: s.distribution() for name, s in stats.items()},
        "throughput_per_s": compute.n / max(total / 1e9, 1e-12),
        "iterations": compute.n,
        "spread": compute.spread,
        "clocks": _clock_facts(samples.clocks, monitor),
        "processes": None if monitor is None else monitor.processes(),
    }
    report["remarks"] = remarks(report, samples.clocks)
    return report


def _clock_facts(clocks: Sequence[ClockSample], monitor: Monitor | None) -> dict[str, Plain] | None:
    seen = [c.sm_mhz for c in clocks if c.sm_mhz is not None]
    if not seen:
        return None
    powers = [c.power_w for c in clocks if c.power_w is not None]
    return {
        "sm_mhz": {"min": min(seen), "median": statistics.median(seen), "max": max(seen)},
        "sm_mhz_possible": None if monitor is None else monitor.most(),
        "memory_mhz": clocks[-1].memory_mhz,
        "power_w_max": max(powers, default=None),
        "temperature_c": clocks[-1].temperature_c,
        "held_by": sorted({reason for c in clocks for reason in c.held_by}),
    }


def remarks(report: Mapping[str, Any], clocks: Sequence[ClockSample]) -> list[str]:
    """Reasons to doubt the figures of a report, one sentence each."""
    sentences = []
    compute, enqueue = report["gpu_compute_ms"], report["enqueue_ms"]
    if report["iterations"] < FEW:
        sentences.append(
            f"only {report['iterations']} runs were measured: percentiles are unreliable (raise --duration)"
        )
    spread = report["spread"]
    if spread is not None and spread > UNSTABLE:
        sentences.append(f"the GPU time drifted by {spread:.0%} during the measurement: do not compare it with others")
    seen = [c.sm_mhz for c in clocks if c.sm_mhz is not None]
    if not seen:
        sentences.append("the clocks could not be read: whether they were stable is not known")
    elif min(seen) < (1 - CLOCK_DROP) * max(seen):
        sentences.append(f"the multiprocessors' clock moved between {min(seen)} and {max(seen)} MHz")
    held = sorted({reason for c in clocks for reason in c.held_by})
    if held:
        sentences.append(f"clocks were held down by: {', '.join(held)}")
    if (report.get("processes") or 0) > 1:
        sentences.append(f"{report['processes']} processes compute on this GPU: it is shared")
    if enqueue["median"] > compute["median"] * 0.9:
        sentences.append(
            "enqueueing a run takes the host about as long as the GPU runs it: throughput is bound by the host "
            "(larger batches, or several contexts)"
        )
    if report["h2d_ms"]["median"] + report["d2h_ms"]["median"] > compute["median"]:
        sentences.append(
            "copies to and from the GPU take longer than the inference: keep arrays on the GPU (context.bind)"
        )
    return sentences


# ---------------------------------------------------------------- step by step


PROFILE_S = 15.0
"""Approximate limit of the GPU time of a run's profile, in seconds."""
MEASURED_TWICE = 8
"""This many of the longest steps of a profile are measured twice."""


@dataclass(frozen=True)
class StepShare:
    """One step of a run. ``us``: the time that it adds to the run on the GPU. ``roofline``: the least time of its work
    over ``us`` (beyond 1 if operands are in L2). ``lane``: its stream (None: there is
    only one); a step may add nothing if another lane takes longer."""

    step: int
    src: tuple[str, ...]
    kind: str
    tactic: str
    us: float
    share: float
    work: Work
    roofline: float | None
    executor: str = "cuda"
    lane: int | None = None

    def to_plain(self) -> dict[str, Plain]:
        seconds = self.us * 1e-6
        return {
            "step": self.step,
            "executor": self.executor,
            **({} if self.lane is None else {"lane": self.lane}),
            "src": list(self.src),
            "kind": self.kind,
            "tactic": self.tactic,
            "us": self.us,
            "median_ms": self.us / 1e3,
            "share": self.share,
            "flops": self.work.flops,
            "bytes": self.work.bytes,
            "tflops": self.work.flops / seconds / 1e12 if seconds > 0 else None,
            "gbs": self.work.bytes / seconds / 1e9 if seconds > 0 else None,
            "roofline": self.roofline,
        }


def profile_gpu(
    context: CudaContext, feeds: Mapping[str, Any], *, repeats: int = 20, inner: int = 4
) -> list[StepShare]:
    """Every step of a run on ``feeds``, in program order; the shares add up to 1."""
    context.run(feeds)
    program, steps, ceilings = context.program, context.runner.steps, Ceilings.of(context.device)
    if all(isinstance(s, CudaStep) for s in steps):
        times = _added_times(context, repeats, inner)
    else:  # each step by itself: kernels and copies between events, the host by its clock
        runs = [context.profile(feeds)[1] for _ in range(max(1, repeats))]
        times = [statistics.median(one) / 1e3 for one in zip(*runs, strict=True)]
    total = max(sum(times), 1e-9)
    rows = []
    for k, (step, plan, us) in enumerate(zip(program.steps, steps, times, strict=True)):
        roofline = None
        if isinstance(plan, CudaStep):
            kind, tactic, work = plan.meaning.label, plan.tactic, work_of(step, plan, program)
            roofline = ceilings.seconds(work) * 1e6 / us if us > 0 else None
        elif isinstance(plan, CopyPlan):
            kind, tactic, work = f"copy to {plan.to}", "copy", Work(0, plan.nbytes, False, plan.dtype)
        else:
            kind, tactic, work = plan.kind, "NumPy on the CPU", Work(0, 0, False, plan.dtypes[0])
        lane = program.lanes[k].lane if program.lanes else None
        rows.append(StepShare(k, step.src, kind, tactic, us, us / total, work, roofline, step.executor, lane))
    return rows


def _added_times(context: CudaContext, repeats: int, inner: int) -> list[float]:
    """Microseconds that each launch adds to the graph of the launches before it. Long runs are repeated less often."""
    launches, stream = context.launches({}), context.stream
    if not launches:
        return []

    def prefix(count: int) -> Graph:
        return Graph(launches[:count], stream, context.runner.waits)

    whole = prefix(len(launches))
    once = statistics.median(time_runs(partial(whole.replay, stream), stream, warmup=2, repeats=3)) / 1e3
    whole.close()
    affordable = int(PROFILE_S / max(1e-9, once * len(launches)))
    inner = max(1, min(inner, affordable // repeats))
    repeats = max(5, min(repeats, affordable))

    def difference(shorter: Graph, graph: Graph) -> tuple[float, float]:
        """The additional time of ``graph`` over ``shorter``, and the time of ``graph``."""
        times = in_turns(partial(shorter.replay, stream), partial(graph.replay, stream), stream, repeats, inner)
        added = statistics.median(longer - less for less, longer in times)
        return added * 1e3, statistics.median(longer for _, longer in times) * 1e3

    added, total, shorter = [], 0.0, Graph([], stream)
    for k in range(1, len(launches) + 1):
        graph = prefix(k)
        us, total = difference(shorter, graph)
        added.append(us)
        shorter.close()
        shorter = graph
    shorter.close()

    def again(k: int) -> float:
        shorter, graph = prefix(k), prefix(k + 1)
        us, _ = difference(shorter, graph)
        shorter.close()
        graph.close()
        return us

    added = shorter_of_two(added, again)
    # A prefix never takes longer than the whole. Differences below the clock's noise are 0; the others are adjusted.
    ends = _rising([0.0, *accumulate(added)])
    scale = total / max(ends[-1], 1e-9)
    return [(end - begin) * scale for begin, end in pairwise(ends)]


def shorter_of_two(times: Sequence[float], again: Callable[[int], float]) -> list[float]:
    """``times`` with the longest ones measured once more; the shorter of the two values counts.

    A delay of the host, or a change of the GPU's clock, looks like a long step.
    """
    longest = sorted(range(len(times)), key=lambda k: -times[k])[:MEASURED_TWICE]
    return [min(us, again(k)) if k in longest else us for k, us in enumerate(times)]


def in_turns(
    first: Callable[[], Any], second: Callable[[], Any], stream: Stream, repeats: int, inner: int
) -> list[tuple[float, float]]:
    """GPU milliseconds of both, in turns, each the mean of ``inner`` runs. A change of the GPU's clock then affects few of the
    differences.
    """
    runs = (first, second)
    events = Events(3 * repeats)
    for run in runs:
        run()
    for k in range(0, 3 * repeats, 3):
        events.record(k, stream)
        for i, run in enumerate(runs, 1):
            for _ in range(inner):
                run()
            events.record(k + i, stream)
    stream.synchronize()
    times = [
        (events.milliseconds(k, k + 1) / inner, events.milliseconds(k + 1, k + 2) / inner)
        for k in range(0, 3 * repeats, 3)
    ]
    events.close()
    return times


def _rising(values: Sequence[float]) -> list[float]:
    """The nearest non-decreasing sequence (isotonic regression: decreasing neighbors are replaced by their mean)."""
    blocks: list[tuple[float, int]] = []
    for v in values:
        mean, count = v, 1
        while blocks and blocks[-1][0] > mean:
            other, n = blocks.pop()
            mean, count = (mean * count + other * n) / (count + n), count + n
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]
