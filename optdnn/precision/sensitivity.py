"""How much each op at each precision disturbs the network: its own error by the oracle, carried on to the outputs.

An op's error is found by letting the pass itself assign the precision to that op alone, cut out of the network with its real
operands, and evaluating what the pass made of it in NumPy: casts, scales, rounded weights, saturation, all as they will be.
:class:`~optdnn.precision.inject.Injector` then carries the difference through the rest of the network in fp32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optdnn.errors import OptdnnError
from optdnn.ir.evaluate import evaluate
from optdnn.ir.extract import single
from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.precision import PrecisionPlan, key
from optdnn.passes.ranges import Calibration
from optdnn.precision.inject import Injector, noise
from optdnn.precision.metrics import Metric
from optdnn.types import Array, is_float

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


@dataclass
class Sensitivities:
    """By op and precision. ``skipped`` are those that time did not suffice for: their damage is taken from their error."""

    table: dict[tuple[str, str], Sensitivity] = field(default_factory=dict)
    samples: int = 0
    library: str = ""
    skipped: int = 0
    failed: dict[tuple[str, str], str] = field(default_factory=dict)


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
    progress: Callable[[str], None] = lambda text: None,
) -> Sensitivities:
    """The sensitivity of each op of ``graph`` (fp32) to each of the precisions beside it, on one batch of feeds.

    ``deadline`` is a time of ``time.perf_counter``: what is not done by then is judged by the op's own error, as if it arrived
    at the outputs undiminished.
    """
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
    return evaluate(part, feeds)[graph.output(place(graph, op)).name]


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
