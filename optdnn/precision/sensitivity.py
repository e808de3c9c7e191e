"""How much each op at each precision disturbs the network: its own error by the oracle, carried on to the outputs.

An op's error is found by letting the pass itself assign the precision to that op alone, cut out of the network with its real
operands, and evaluating what the pass made of it in NumPy: casts, scales, rounded weights, saturation, all as they will be.
:class:`~optdnn.precision.inject.Injector` then carries the difference through the rest of the network in fp32.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from optdnn.errors import OptdnnError
from optdnn.ir.evaluate import evaluate
from optdnn.ir.extract import single
from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.support.precision import ANCHORS, PrecisionPlan, key
from optdnn.passes.support.ranges import Calibration
from optdnn.precision.inject import Injector, noise
from optdnn.precision.metrics import Metric
from optdnn.runtime.atomic import check_writable, write_atomic
from optdnn.types import Array, is_float, to_tf32

FORMAT = "optdnn-sensitivities 1"
LARGEST: Mapping[str, float] = {"fp16": 65504.0, "bf16": 3.3895313892515355e38}
SMALLEST: Mapping[str, float] = {"fp16": 2.0**-24, "bf16": 2.0**-133}
"""Smallest magnitudes that are not rounded to zero (subnormal)."""


@dataclass(frozen=True)
class Sensitivity:
    """One op at one precision, all others in fp32.

    ``error`` is its own: root mean square over that of its output. ``noise`` is what arrives at the network's outputs
    (:func:`optdnn.precision.inject.noise`), ``drop`` what that makes in the metric on the same samples. ``hazard`` names an
    overflow or underflow in words.
    """

    error: float
    noise: float
    drop: float
    hazard: str | None = None

    def to_plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"error": _round(self.error), "noise": _round(self.noise), "drop": _round(self.drop)}
        return plain | ({"hazard": self.hazard} if self.hazard else {})


class Kept:
    """Sensitivities of one network on one data set, kept in a JSON file beside the calibration's ranges; no path: not kept.

    A file of another network, data, metric or target is written anew. Raises OutputError where it cannot be written.
    """

    def __init__(self, path: Path | None, digest: str):
        self.path, self.digest = path, digest
        self.table: dict[tuple[str, str], Sensitivity] = {}
        if path is None:
            return
        check_writable(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] == FORMAT and data["digest"] == digest:
                rows = [(k, p, [_number(v) for v in row[:3]], row[3]) for k, p, *row in data["rows"]]
                self.table = {(k, p): Sensitivity(v[0], v[1], v[2], h) for k, p, v, h in rows}
        except (OSError, ValueError, KeyError, TypeError):
            self.table = {}

    def save(self, found: Mapping[tuple[str, str], Sensitivity]) -> None:
        """Keep what was measured; what time did not suffice for is measured the next time."""
        if self.path is None:
            return
        rows = [
            [k, p, *(v if math.isfinite(v) else str(v) for v in (s.error, s.noise, s.drop)), s.hazard]
            for (k, p), s in found.items()
            if not math.isnan(s.drop)
        ]
        text = json.dumps({"format": FORMAT, "digest": self.digest, "rows": rows}, indent=1)
        write_atomic(self.path, [(text + "\n").encode()])


def _number(value: Any) -> float:
    return float(value)


@dataclass
class Sensitivities:
    """By op and precision. ``skipped`` are those that time did not suffice for: their damage is taken from their error."""

    table: dict[tuple[str, str], Sensitivity] = field(default_factory=dict)
    samples: int = 0
    library: str = ""
    skipped: int = 0
    failed: dict[tuple[str, str], str] = field(default_factory=dict)


def mean(found: Sequence[Sensitivities]) -> Sensitivities:
    """Over several batches: noise and drop on average, the error as a root mean square, any hazard."""
    first = found[0]
    table = {}
    for item in first.table:
        rows = [f.table[item] for f in found if item in f.table]
        table[item] = Sensitivity(
            math.sqrt(sum(r.error**2 for r in rows) / len(rows)),
            sum(r.noise for r in rows) / len(rows),
            sum(r.drop for r in rows) / len(rows),
            next((r.hazard for r in rows if r.hazard), None),
        )
    failed = {k: why for f in found for k, why in f.failed.items()}
    return Sensitivities(table, sum(f.samples for f in found), first.library, max(f.skipped for f in found), failed)


def measure(
    graph: Graph,
    wanted: Sequence[tuple[Op, Sequence[str]]],
    feeds: Mapping[str, Array],
    labels: Any,
    metric: Metric,
    *,
    target: str,
    calibration: Calibration | None,
    deadline: float = math.inf,
    kept: Kept | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Sensitivities:
    """The sensitivity of each op of ``graph`` (fp32) to each of the precisions beside it, on one batch of feeds.

    ``deadline`` is a time of ``time.perf_counter``: what is not done by then is judged by the op's own error, as if it arrived
    at the outputs undiminished. What ``kept`` holds is taken from there.
    """
    known = {} if kept is None else kept.table
    if known and all((key(op), p) in known or p == "fp32" for op, precisions in wanted for p in precisions):
        progress("sensitivities from the cache")
        same = {(key(op), "fp32"): Sensitivity(0.0, 0.0, 0.0) for op, _ in wanted}
        return Sensitivities({**same, **known}, len(next(iter(feeds.values()), np.empty(0))), "the cache")
    ops = [op for op, _ in wanted]
    injector = Injector(graph, [place(graph, op) for op in ops], _operand_places(graph, ops), feeds)
    found = Sensitivities(samples=len(next(iter(feeds.values()), np.empty(0))), library=injector.library)
    total = sum(len(p) for _, p in wanted)
    done = 0
    for op, precisions in wanted:
        for precision in precisions:
            done += 1
            if precision == "fp32":
                found.table[key(op), precision] = Sensitivity(0.0, 0.0, 0.0)
                continue
            if (key(op), precision) in known:
                found.table[key(op), precision] = known[key(op), precision]
                continue
            progress(f"sensitivity {done} of {total}: {op.name} in {precision}")
            try:
                got = alone(graph, op, precision, injector.recorded, target, calibration)
            except OptdnnError as error:
                found.failed[key(op), precision] = error.message
                continue
            clean = injector.recorded[graph.output(place(graph, op)).name]
            found.table[key(op), precision] = _judge(
                graph,
                op,
                precision,
                got,
                clean,
                injector,
                metric,
                labels,
                late=time.perf_counter() > deadline,
                found=found,
            )
    if kept is not None:
        kept.save(found.table)
    return found


def _judge(
    graph: Graph,
    op: Op,
    precision: str,
    got: Array,
    clean: Array,
    injector: Injector,
    metric: Metric,
    labels: Any,
    *,
    late: bool,
    found: Sensitivities,
) -> Sensitivity:
    hazard = _hazard(op, precision, got, clean)
    error = _relative(got, clean)
    if not np.isfinite(got[np.isfinite(clean)]).all():
        return Sensitivity(math.inf, math.inf, math.inf, hazard)
    if late:
        found.skipped += 1
        return Sensitivity(error, error * error, math.nan, hazard)
    outputs = injector.outputs(graph.output(place(graph, op)).name, got.astype(clean.dtype) - clean)
    return Sensitivity(error, noise(outputs, injector.clean), metric.drop(outputs, injector.clean, labels), hazard)


def alone(
    graph: Graph,
    op: Op,
    precision: str,
    recorded: Mapping[str, Array],
    target: str,
    calibration: Calibration | None,
) -> Array:
    """The result of ``op`` (see :func:`place`) at ``precision`` on recorded operands: what the pass makes of it, in NumPy."""
    part = single(graph, op)
    plan = PrecisionPlan(nodes={key(op): precision})
    AssignPrecision()(part, PassContext(target=target, plan=plan, calibration=calibration))
    feeds = {part.op(i).outputs[0].name: recorded[part.op(i).outputs[0].name] for i in part.inputs}
    if precision == "tf32":
        feeds = _with_rounded_factors(part, feeds)
    return evaluate(part, feeds)[graph.output(place(graph, op)).name]


def _with_rounded_factors(part: Graph, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """``feeds``, and in place the constants of ``part``, with what is multiplied rounded as tensor cores do: NumPy rounds nothing
    by itself. (Before a prologue, which on the GPU comes first: the rounding is as large on either side of it.)"""
    found = dict(feeds)
    for op in part.of_kind(*sorted(ANCHORS)):
        if op.attrs.factors != "tf32":
            continue
        for v in op.inputs[:2]:
            source = None if v is None else part.op(v)
            if source is not None and source.kind == "Input":
                found[source.outputs[0].name] = to_tf32(feeds[source.outputs[0].name])
            elif source is not None and source.kind == "Constant":
                part.set_op(replace(source, attrs=replace(source.attrs, value=to_tf32(source.attrs.value))))
    return found


def place(graph: Graph, op: Op) -> Value:
    """The output by which an op is judged: the first that anything reads."""
    return next((v for i in range(len(op.outputs)) if graph.uses(v := Value(op.id, i))), op.value)


def _operand_places(graph: Graph, ops: Sequence[Op]) -> list[Value]:
    """Every value that one of the ops reads and that is no constant."""
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


def _round(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
