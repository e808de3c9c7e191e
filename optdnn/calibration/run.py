"""Calibration: run a network on data, and gather the ranges of its values.

The data is read twice: for the smallest and largest elements, then (for methods that need one) for a histogram between them. So
neither the result nor the memory depends on the number of batches, and the result does not depend on their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from optdnn.calibration.cache import CalibrationCache, Extremes, Sweep, UnfinishedCalibration
from optdnn.calibration.data import CalibrationData, Pictures, no_samples, open_data
from optdnn.calibration.thresholds import BINS, CHOOSE, Histogram
from optdnn.config import CALIBRATORS
from optdnn.errors import InputError, MissingDependency, RunError, UnsupportedError, UsageError
from optdnn.ir.digest import graph_digest
from optdnn.ir.evaluate import groups, values
from optdnn.ir.graph import STRUCTURAL, Graph, Value
from optdnn.lowering.cpu.library import LIBRARIES
from optdnn.lowering.cpu.partition import compile_with
from optdnn.passes.rules.split_prologue import split_all
from optdnn.passes.support.ranges import Calibration, Range
from optdnn.runtime.engine import Engine
from optdnn.runtime.measuring.machine import usable_cores
from optdnn.types import FP32, Array, TensorSpec

GROUP_BYTES = 1 << 29
"""Values become outputs in groups of about this size: the values of a large network do not fit in memory together. Each group runs
the network again. The size is fixed: libraries fuse only what is no output, so the last bits of a value depend on its group."""
MOMENTS_BYTES = 1 << 31
"""Bytes of second moments that are gathered in one run over the data."""
MASKED = -1e30
"""Values below this, minus infinity included, are the fill of attention masks: no range needs to cover them."""
SAVE_SECONDS = 10.0
"""The interval at which an unfinished calibration is saved, if there is a cache."""


def calibrate(
    graph: Graph,
    data: Any,
    method: str = "mse",
    *,
    cache: str | Path | None = None,
    images: Pictures | None = None,
    bins: int = BINS,
    strict: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Ranges of all fp32 values of ``graph``, in the form that passes use.

    ``data`` is as in :func:`optdnn.calibration.data.open_data`, ``method`` one of :data:`optdnn.config.CALIBRATORS`. ``cache`` is a
    JSON file: it provides the result of an earlier calibration of the same graph and data by the same method, and an interrupted
    calibration continues where it stopped. ``strict``: NaN, infinity and constant data are errors; otherwise NaN and infinity are
    left out. ``progress`` is called with a line of text. ONNX Runtime or OpenVINO runs the network; if neither is installed, NumPy
    does, slowly.

    Raises UsageError for an unknown method or data that cannot be read, InputError for data that does not fit or is constant.
    """
    if method not in CALIBRATORS:
        raise UsageError(f"calibrator {method!r} is not one of {', '.join(CALIBRATORS)}")
    specs = input_specs(graph)
    source = open_data(data, specs, images, graph.profiles)
    rule = f"{method} {bins}" if strict else f"{method} {bins} of finite values"
    kept = CalibrationCache.open(cache, graph_digest(graph), source.digest, rule)
    if kept.result is not None:
        progress("calibration from the cache")
        return kept.result
    graph = split_all(graph)
    state = kept.progress or UnfinishedCalibration()
    if strict:
        _check_not_constant(source)
    runner = _Runner(graph, _wanted(graph))

    def extremes(name: str, array: Array) -> None:
        found = Extremes.of(array)
        state.extremes.table[name] = found.merged(state.extremes.table.get(name))

    _sweep(runner, source, state.extremes, partial(kept.save, state), extremes, "ranges", progress, strict)
    if method != "minmax":
        edges = {n: _edges(e, bins) for n, e in state.extremes.table.items()}

        if any(counts.size != bins for counts in state.counts.table.values()):
            raise kept.damaged()

        def count(name: str, array: Array) -> None:
            if name not in edges:
                raise kept.damaged()
            counts = np.histogram(array, edges[name])[0].astype(np.int64)
            state.counts.table[name] = state.counts.table.get(name, 0) + counts

        _sweep(runner, source, state.counts, partial(kept.save, state), count, "histograms", progress, strict)
    found = _result(method, state, bins)
    kept.finish(found)
    return found


def second_moments(
    graph: Graph,
    data: Any,
    wanted: Sequence[Value],
    *,
    images: Pictures | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[Value, Array]]:
    """Each value with the mean of ``x^T x`` (fp32 [K, K]) over its rows ``x`` of K numbers, on all of the data (as for
    :func:`calibrate`). Matrices that do not fit in memory together need further runs over the data.

    Raises UsageError for data that cannot be read, InputError for data that does not fit or has values that are not finite.
    """
    source = open_data(data, input_specs(graph), images, graph.profiles)
    _check_not_constant(source)
    for group in _fitting(graph, wanted, MOMENTS_BYTES):
        runner, sums, rows = _Runner(graph, group), dict[str, Array](), dict[str, int]()
        for k, feeds in enumerate(source.batches()):
            progress(f"calibrate: operands of products, batch {k + 1}")
            for name, array in runner.run(feeds):
                x = array.reshape(-1, array.shape[-1]).astype(np.float32, copy=False)
                with np.errstate(over="ignore", invalid="ignore"):
                    found = x.T @ x
                if not np.isfinite(found).all():
                    raise InputError(f"{source.name}: {name!r} is not finite, or too large, for batch {k}")
                sums[name] = sums[name] + found if name in sums else found
                rows[name] = rows.get(name, 0) + len(x)
        for v in group:
            name = graph.output(v).name
            yield v, sums[name] / np.float32(max(1, rows[name]))


def _fitting(graph: Graph, wanted: Sequence[Value], limit: int) -> Iterator[list[Value]]:
    """The values in groups of matrices of up to ``limit`` bytes in total, with at least one value per group."""
    group: list[Value] = []
    size = 0
    for v in wanted:
        own = 4 * int(graph.type(v).dims[-1]) ** 2  # type: ignore[arg-type]
        if group and size + own > limit:
            yield group
            group, size = [], 0
        group.append(v)
        size += own
    if group:
        yield group


def input_specs(graph: Graph) -> list[TensorSpec]:
    """The inputs of a network, as constraints on its data."""
    outputs = [graph.op(i).outputs[0] for i in graph.inputs]
    dims = [tuple(d if isinstance(d, int) else str(d) for d in o.type.dims) for o in outputs]
    return [TensorSpec(o.name, o.type.dtype, d) for o, d in zip(outputs, dims, strict=True)]


def _wanted(graph: Graph) -> list[Value]:
    """The computed fp32 values and the fp32 inputs."""
    return [
        Value(op.id, i)
        for op in graph.order()
        if op.kind not in ("Constant", "Output")
        for i, out in enumerate(op.outputs)
        if out.type.dtype == FP32 and graph.uses(Value(op.id, i))
    ]


def _check_not_constant(source: CalibrationData) -> None:
    """Raise InputError for data in which no input ever changes: such data gives no ranges."""
    first: dict[str, Any] = {}
    for feeds in source.batches():
        for name, a in feeds.items():
            if not (a == first.setdefault(name, a.reshape(-1)[0])).all():
                return
    if not first:
        raise no_samples(source.name)
    raise InputError(f"{source.name}: every element is the same", hint="calibrate with typical samples")


def _sweep(
    runner: _Runner,
    source: CalibrationData,
    sweep: Sweep,
    save: Callable[[], None],
    take: Callable[[str, Array], None],
    what: str,
    progress: Callable[[str], None],
    strict: bool,
) -> None:
    """Call ``take`` with every value of every batch that was not seen before; ``save`` the state from time to time."""
    if sweep.done:
        return
    saved = time.monotonic()
    total = f" of {source.count}" if source.count else ""
    for k, feeds in enumerate(source.batches()):
        if k < sweep.batches:
            continue
        progress(f"calibrate: {what}, batch {k + 1}{total}")
        for name, array in runner.run(feeds):
            if not strict:
                array = np.where(np.isfinite(array), array, np.float32(0.0))
            elif not (array < np.inf).all():
                raise InputError(
                    f"{source.name}: the network computes NaN or infinity in {name!r} for batch {k}",
                    hint="a network whose fp32 values are not finite cannot be calibrated",
                )
            if array.size:
                take(name, np.where(array <= MASKED, np.float32(0.0), array) if array.min() <= MASKED else array)
        sweep.batches = k + 1
        if time.monotonic() - saved > SAVE_SECONDS:
            save()
            saved = time.monotonic()
    sweep.done = True
    save()


def _edges(extremes: Extremes, bins: int) -> Array:
    """Evenly spaced edges over the elements seen; from -1 to 1 if all elements were zero."""
    top = np.float32(min(max(abs(extremes.low), abs(extremes.high)) or 1.0, 1e38))  # twice that is finite
    return np.asarray(np.histogram_bin_edges(np.zeros(0, np.float32), bins, (-top, top)))  # type: ignore[arg-type]


def _result(method: str, state: UnfinishedCalibration, bins: int) -> Calibration:
    ranges, seen, channels, means = {}, {}, {}, {}
    for name, e in state.extremes.table.items():
        seen[name] = ranges[name] = Range(e.low, e.high)
        if e.number:
            channels[name], means[name] = e.largest, e.sum / e.number
        counts = state.counts.table.get(name)
        if counts is not None and e.low < e.high:
            ranges[name] = CHOOSE[method](Histogram(counts, _edges(e, bins), e.low, e.high))
    return Calibration(method, ranges, seen, channels, means, state.extremes.batches)


# ---------------------------------------------------------------- running the graph


class _Runner:
    """The graph with its values as outputs: on a library if there is one, in groups that fit in memory."""

    def __init__(self, graph: Graph, wanted: Sequence[Value]):
        self.graph, self.wanted = graph, wanted
        self.engines: list[tuple[list[Value], Engine | None]] = []

    def run(self, feeds: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """(name, array) of every wanted value."""
        if not self.engines:
            self.engines = [(g, self._engine(g)) for g in groups(self.graph, self.wanted, feeds, GROUP_BYTES)]
        for group, engine in self.engines:
            names = [self.graph.output(v).name for v in group]
            if engine is None:
                yield from zip(names, values(self.graph, feeds, group), strict=True)
            else:
                named = {**feeds, **engine.run(feeds)}
                yield from ((n, np.asarray(named[n])) for n in names)

    def _engine(self, group: Sequence[Value]) -> Engine | None:
        """An engine whose outputs are these values under their own names; None: NumPy runs them."""
        exposed = self.graph.copy()
        for i in list(exposed.outputs):
            exposed.outputs.remove(i)
            exposed.remove(i)
        for v in group:
            if exposed.op(v).kind != "Input":
                exposed.add_output(v, exposed.output(v).name)
        exposed.remove_dead([op.id for op in exposed.ops() if op.kind not in STRUCTURAL])
        for library in ("onnxruntime", "openvino"):
            if LIBRARIES[library].version() is None:
                continue
            try:
                return compile_with(exposed, library, "fp32", usable_cores())
            except (RunError, UnsupportedError, MissingDependency):
                continue
        return None
