"""How much each op at each precision disturbs the network: its own error in NumPy, carried on to the outputs.

To find its error, an op is cut out of the network with its real operands. The pass itself assigns the precision to it, and the
result is evaluated in NumPy. So casts, scales, rounded weights and saturation are the same as in the engine.
:class:`~optdnn.precision.inject.Injector` then carries the difference through the rest of the network in fp32.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from optdnn.calibration import input_specs
from optdnn.calibration.data import batch_of
from optdnn.config import PACKED_WEIGHTS
from optdnn.errors import OptdnnError
from optdnn.ir.digest import graph_digest
from optdnn.ir.evaluate import evaluate
from optdnn.ir.extract import single
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.attention import MULTIPLIED
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.support.precision import ANCHORS, PrecisionPlan, key
from optdnn.passes.support.ranges import Calibration
from optdnn.precision.inject import Injector, noise
from optdnn.precision.metrics import Metric
from optdnn.precision.samples import Samples
from optdnn.runtime.file.atomic import check_writable, write_atomic
from optdnn.runtime.file.json_file import read_json
from optdnn.types import Array, is_float, to_tf32

FORMAT = "optdnn-sensitivities 1"
SAMPLES, MOST_BATCHES = 32, 4
"""Samples for sensitivities, and the most batches that provide them if the network's own batch is small."""
LARGEST: Mapping[str, float] = {"fp16": 65504.0, "bf16": 3.3895313892515355e38}
SMALLEST: Mapping[str, float] = {"fp16": 2.0**-24, "bf16": 2.0**-133}
"""Smallest magnitudes that are not rounded to zero (subnormal)."""


@dataclass(frozen=True)
class Sensitivity:
    """One op at one precision, with all other ops in fp32.

    ``error`` is the op's own error: its root mean square over the output's. ``noise`` is the error at the network's
    outputs (:func:`optdnn.precision.inject.noise`), ``drop`` the resulting loss in the metric on the same samples. ``hazard``
    describes an overflow or underflow.
    """

    error: float
    noise: float
    drop: float
    hazard: str | None = None

    def to_plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "error": rounded(self.error, 4),
            "noise": rounded(self.noise, 4),
            "drop": rounded(self.drop, 4),
        }
        return plain | ({"hazard": self.hazard} if self.hazard else {})


class StoredSensitivities:
    """Sensitivities of one network on one data set, in a JSON file next to the calibration's ranges; without a path: not stored.

    A file of another network, data, metric or target is rewritten. Raises OutputError if the file cannot be written.
    """

    def __init__(self, path: Path | None, digest: str):
        self.path, self.digest = path, digest
        self.table: dict[tuple[str, str], Sensitivity] = {}
        if path is None:
            return
        check_writable(path)
        try:
            data = read_json(path)
            if data["format"] == FORMAT and data["digest"] == digest:
                rows = [(k, p, [float(v) for v in row[:3]], row[3]) for k, p, *row in data["rows"]]
                self.table = {(k, p): Sensitivity(e, n, d, hazard) for k, p, (e, n, d), hazard in rows}
        except (OSError, ValueError, KeyError, TypeError):
            self.table = {}

    @classmethod
    def beside(cls, ranges: Path | None, graph: Graph, parts: Sequence[Samples], about: str) -> StoredSensitivities:
        """The stored sensitivities of a network on these samples, in RANGES.sensitivity.json. ``about``: metric, target,
        calibrator."""
        digest = hashlib.sha256(f"{graph_digest(graph)} {about}".encode())
        for part in parts:
            for array in (*part.feeds.values(), *(() if part.labels is None else (part.labels,))):
                digest.update(np.ascontiguousarray(array).tobytes())
        return cls(None if ranges is None else ranges.with_name(f"{ranges.stem}.sensitivity.json"), digest.hexdigest())

    def save(self, found: Mapping[tuple[str, str], Sensitivity]) -> None:
        """Store the measurements, without those that were skipped for lack of time."""
        if self.path is None:
            return
        rows = [
            [k, p, *(v if math.isfinite(v) else str(v) for v in (s.error, s.noise, s.drop)), s.hazard]
            for (k, p), s in found.items()
            if not math.isnan(s.drop)
        ]
        text = json.dumps({"format": FORMAT, "digest": self.digest, "rows": rows}, indent=1)
        write_atomic(self.path, [(text + "\n").encode()])


@dataclass
class Sensitivities:
    """Sensitivities by op key and precision. ``skipped`` counts the entries with noise estimated from the error, for lack of time;
    ``library`` carried the errors to the outputs; ``failed``: why an op has no result at a precision."""

    table: dict[tuple[str, str], Sensitivity] = field(default_factory=dict)
    library: str = ""
    skipped: int = 0
    failed: dict[tuple[str, str], str] = field(default_factory=dict)


def batches_of(graph: Graph, samples: Samples) -> list[Samples]:
    """The batches for the average of sensitivities: one of SAMPLES, or up to MOST_BATCHES of the network's own or largest batch."""
    shapes = {n: a.shape for n, a in samples.feeds.items()}
    batch = batch_of(input_specs(graph), graph.profiles, SAMPLES, shapes)
    size = max(batch.least, min(batch.size, len(samples)))
    count = max(1, min(MOST_BATCHES, SAMPLES // size, len(samples) // size))
    return [samples.take(slice(k * size, (k + 1) * size)) for k in range(count)]


def measure_sensitivities(
    graph: Graph,
    wanted: Sequence[tuple[Op, Sequence[str]]],
    parts: Sequence[Samples],
    metric: Metric,
    *,
    target: str,
    calibration: Calibration | None,
    beside: str = "fp32",
    deadline: float = math.inf,
    stored: StoredSensitivities | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Sensitivities:
    """The sensitivity of each op of ``graph`` (fp32) to each of the other precisions, averaged over batches of samples.

    ``beside``: the float precision of activations beside packed weights. ``deadline`` is a time of ``time.perf_counter``. After the
    deadline, an op's own error is taken as the noise, as if it reached the outputs undiminished. Entries of ``stored`` are not
    measured again.
    """
    stored = stored or StoredSensitivities(None, "")
    found = Sensitivities(
        {(key(op), "fp32"): Sensitivity(0.0, 0.0, 0.0) for op, _ in wanted} | stored.table, "the cache"
    )
    missing = [(op, p) for op, precisions in wanted for p in precisions if (key(op), p) not in found.table]
    if not missing:
        progress("sensitivities from the cache")
        return found
    rows: dict[tuple[str, str], list[Sensitivity]] = {}
    for part in parts:
        ops = list({op.id: op for op, _ in missing}.values())
        injector = Injector(graph, [judged_output(graph, op) for op in ops], _operand_places(graph, ops), part.feeds)
        found.library = injector.library
        for k, (op, precision) in enumerate(missing):
            item, late = (key(op), precision), time.perf_counter() > deadline
            if item in found.failed or (late and item in rows):
                continue
            progress(f"sensitivity {k + 1} of {len(missing)}: {op.name} in {precision}")
            try:
                got = run_alone(graph, op, precision, injector.recorded, target, calibration, beside)
            except OptdnnError as error:
                found.failed[item] = error.message
                continue
            one = _sensitivity(graph, op, precision, got, injector, metric, part.labels, late=late)
            rows.setdefault(item, []).append(one)
            found.skipped += math.isnan(one.drop)
        if time.perf_counter() > deadline:
            break
    found.table |= {item: mean_sensitivity(each) for item, each in rows.items()}
    stored.save(found.table)
    return found


def mean_sensitivity(batches: Sequence[Sensitivity]) -> Sensitivity:
    """The average over several batches: mean noise and drop, root mean square of the error, any hazard."""
    return Sensitivity(
        math.sqrt(fmean(s.error**2 for s in batches)),
        fmean(s.noise for s in batches),
        fmean(s.drop for s in batches),
        next((s.hazard for s in batches if s.hazard), None),
    )


def _sensitivity(
    graph: Graph, op: Op, precision: str, got: Array, injector: Injector, metric: Metric, labels: Any, *, late: bool
) -> Sensitivity:
    """The sensitivity to a result ``got`` of an op. ``late``: there is no time to carry the error to the outputs."""
    name = graph.output(judged_output(graph, op)).name
    clean = injector.recorded[name]
    hazard, error = _hazard(op, precision, got, clean), _relative(got, clean)
    if not np.isfinite(got[np.isfinite(clean)]).all():
        return Sensitivity(math.inf, math.inf, math.inf, hazard)
    if late:
        return Sensitivity(error, error * error, math.nan, hazard)
    outputs = injector.outputs(name, got.astype(clean.dtype) - clean)
    return Sensitivity(error, noise(outputs, injector.clean), metric.drop(outputs, injector.clean, labels), hazard)


def run_alone(
    graph: Graph,
    op: Op,
    precision: str,
    recorded: Mapping[str, Array],
    target: str,
    calibration: Calibration | None,
    beside: str = "fp32",
) -> Array:
    """The result of ``op`` (see :func:`place`) at ``precision`` on recorded operands, as the pass rewrites it, in NumPy."""
    part = single(graph, op)
    plan = PrecisionPlan(nodes={key(op): precision}, base=beside if precision in PACKED_WEIGHTS else "fp32")
    AssignPrecision()(part, PassContext(target=target, plan=plan, calibration=calibration))
    feeds = {part.op(i).outputs[0].name: recorded[part.op(i).outputs[0].name] for i in part.inputs}
    if precision == "tf32":
        feeds = _with_rounded_factors(part, feeds)
    return evaluate(part, feeds)[graph.output(judged_output(graph, op)).name]


def _with_rounded_factors(part: Graph, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """``feeds``, and in place the constants of ``part``, with the factors of products rounded as tensor cores do: NumPy
    does not round them itself. (The GPU rounds after a prologue; the rounding error is as large before it.)"""
    found = dict(feeds)
    for op in part.of_kind(*sorted(ANCHORS), "Attention"):
        if op.attrs.factors != "tf32":
            continue
        for i in MULTIPLIED if op.kind == "Attention" else (0, 1):
            v = op.input(i)
            source = None if v is None else part.op(v)
            if source is not None and source.kind == "Input":
                found[source.outputs[0].name] = to_tf32(feeds[source.outputs[0].name])
            elif source is not None and source.kind == "Constant":
                part.set_op(replace(source, attrs=replace(source.attrs, value=to_tf32(source.attrs.value))))
    return found


def judged_output(graph: Graph, op: Op) -> Value:
    """The output by which an op is judged: the first output that has a reader."""
    return next((v for v in op.values if graph.uses(v)), op.value)


def _operand_places(graph: Graph, ops: Sequence[Op]) -> list[Value]:
    """Every value, except constants, that one of the ops reads."""
    return list(dict.fromkeys(v for op in ops for v in op.inputs if v is not None and graph.op(v).kind != "Constant"))


def _hazard(op: Op, precision: str, got: Array, clean: Array) -> str | None:
    if precision not in LARGEST or not is_float(clean.dtype) or not clean.size:
        return None
    finite = np.isfinite(clean)
    if not finite.any():
        return None
    top = float(np.abs(clean[finite]).max())
    if top > LARGEST[precision]:
        return f"overflow at {top:.2g} in {op.name}"
    if not np.isfinite(got[finite]).all():
        return f"overflow within {op.name}, whose result reaches {top:.2g}"
    lost = (got == 0) & (clean != 0)
    if lost.mean() > 0.01 and top < SMALLEST[precision] * 2**10:
        return f"underflow at {top:.2g} in {op.name}"
    return None


def _relative(got: Array, clean: Array) -> float:
    a, b = got.astype(np.float64), clean.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite):
        return math.inf
    power = float(np.mean(np.square(b[finite]))) if finite.any() else 0.0
    difference = float(np.mean(np.square((a - b)[finite]))) if finite.any() else 0.0
    return math.sqrt(difference / power) if power else (0.0 if not difference else math.inf)


def rounded(value: float, digits: int) -> float | None:
    """A number for JSON with this many significant digits; None if it is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
