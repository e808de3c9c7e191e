"""Values beyond 65504, which fp16 cannot hold.

A recurrence without bounding activations, a long sum or a power may exceed fp16's range although the network's results are small.
In fp16 such a value would be infinite, and all results computed from it infinite or NaN. So the operators that write or read such a
value stay fp32. They are found in three ways:

* The state of a recurrent layer may grow with each step, for some inputs, if its activations do not bound it. The layer stays
  fp32, and so do the readers of its results, up to an operator that bounds them. A plain layer with a known number of steps is run
  alone, on generated inputs: if its state hardly grows, the layer may be fp16.
* Calibration data, if the build has any, show which values are large on real samples.
* Without such data, a trial run on generated inputs shows it (:mod:`optdnn.passes.support.trial`).

A value that is large because of a large constant (the fill of a mask) does not belong here: it saturates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.passes.support.guards import MASK
from optdnn.passes.support.precision_report import FP16_LARGEST
from optdnn.passes.support.ranges import Calibration, Range
from optdnn.types import FP32, Array

MARGIN = 2.0
"""Other inputs than those that were seen may give values this many times as large."""
FACTORS = {"Conv": 2, "ConvTranspose": 2, "GRU": 3, "Gemm": 2, "LSTM": 3, "MatMul": 2, "RNN": 3}
"""Kinds that sum up products -> how many of their first operands are factors."""
SCALES = frozenset({"Div", "Mul"})
"""Kinds whose operands scale data."""
BOUNDED = frozenset({"HardSigmoid", "ScaledTanh", "Sigmoid", "Softsign", "Tanh"})
"""Activations with bounded results."""
UNIT = frozenset({"HardSigmoid", "Sigmoid"})
"""Activations between 0 and 1: a state multiplied by them does not grow."""
BOUNDS = frozenset(
    {
        *("DeviationNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization"),
        *("LpNormalization", "MeanVarianceNormalization", "RMSNormalization", "Sinkhorn", "Softmax"),
        *("ArgMax", "ArgMin", "FarthestPoints", "TopK"),
        *("Atan", "Cos", "Erf", "HardSigmoid", "Sigmoid", "Sign", "Sin", "Softsign", "Tanh"),
    }
)
"""Kinds whose results are small for any operands, or are indices."""
RECURRENT = frozenset({"GRU", "LSTM", "RNN"})
MOST_GROWTH = 128.0
"""If a state grows by at most this factor, it stays in the range of fp16 for input products of up to 512."""
GROWTH_COLUMNS = 4
"""The number of generated inputs with which a layer is tried."""
GROWTH_FLOPS = 2e10
"""A layer is tried if that takes at most this many operations."""


def growing(graph: Graph) -> dict[int, str]:
    """Op id -> why it must not be fp16: recurrent layers whose state may grow with each step, and the readers of their results."""
    found: dict[int, str] = {}
    large: dict[Value, str] = {}
    for op in graph.order():
        if op.kind in STRUCTURAL:
            continue
        reason = next((large[v] for v in op.inputs if v in large), None) if op.inputs else None
        function = _unbounding(op) if op.kind in RECURRENT else None
        if function is not None and (growth := _growth(graph, op)) is not None and growth <= MOST_GROWTH:
            function = None
        if function is not None:
            reason = f"its activation {function} does not bound its state, which may grow beyond 65504, where fp16 ends"
        if reason is None:
            continue
        found[op.id] = reason
        stages = getattr(op.attrs, "epilogue", ())
        last = stages[-1].kind if stages else op.kind
        if last not in BOUNDS and (op.kind not in RECURRENT or function is not None):
            reason = reason if function is None else f"it reads {op.kind} {op.name}, whose state may grow beyond 65504"
            large.update(dict.fromkeys(op.values, reason))
    return found


def _growth(graph: Graph, op: Op) -> float | None:
    """The ratio of a plain layer's largest state to its input products, for generated inputs.

    Infinity if the state exceeds fp16. None if the layer is not tried: it has another cell or activation, its weights or its number
    of steps are not known, or it takes too many operations."""
    matrices = graph.constant_value(op.inputs[2])
    steps = graph.type(op.inputs[0]).dims[0] if op.inputs[0] is not None else None
    if op.kind != "RNN" or matrices is None or not isinstance(steps, int) or set(op.attrs.activations) != {"Relu"}:
        return None
    if 2 * steps * matrices.size * GROWTH_COLUMNS > GROWTH_FLOPS:
        return None
    rng, most = np.random.default_rng(1), 0.0
    for matrix in matrices.astype(np.float32):
        state: Array = np.zeros((matrix.shape[1], GROWTH_COLUMNS), np.float32)
        for _ in range(steps):
            given = rng.standard_normal(state.shape, np.float32)
            given[:, 0] = 1.0  # one column always in the same direction
            state = np.maximum(matrix @ state + given, 0)
            largest = float(state.max())
            if not largest <= FP16_LARGEST:
                return math.inf
            most = max(most, largest)
    return most


def _unbounding(op: Op) -> str | None:
    """The activation of a recurrent layer that lets its state grow, or None."""
    a = op.attrs
    each = {"RNN": 1, "GRU": 2, "LSTM": 3}[op.kind]
    for start in range(0, len(a.activations), each):
        names = a.activations[start : start + each]
        gates, state = (names[:0], names[:1]) if op.kind == "RNN" else (names[:1], names[1:2])
        growing = [n for n in gates if n not in UNIT] + [n for n in state if n not in BOUNDED and a.clip is None]
        if growing:
            return str(growing[0])
    return None


def ranges_seen(graph: Graph, data: Calibration) -> dict[Value, Range]:
    """The range of each fp32 value on calibration data, where it is known."""
    found: dict[Value, Range] = {}
    for op in graph.ops():
        for v in op.values:
            seen = data.seen.get(graph.output(v).name)
            if seen is not None and graph.type(v).dtype == FP32:
                found[v] = seen
    return found


def overflows(
    graph: Graph, largest: Mapping[Value, float], seen: Mapping[Value, Range] | None = None
) -> dict[int, str]:
    """Op id -> why it must not be fp16: the ops that write or read a value beyond fp16's range.

    ``seen``: the ranges on calibration data, which count instead of ``largest``. Their signs are known: the fill of a mask is
    negative there, or at least :data:`MASK`."""
    found: dict[int, str] = {}
    limit, source = FP16_LARGEST / MARGIN, "for generated inputs"
    if seen is not None:
        largest, source = {v: r.largest for v, r in seen.items()}, "on the calibration data"
    masks: set[Value] = set()
    for op in graph.order():
        if op.kind in STRUCTURAL:
            continue
        read = [v for v in op.inputs if v is not None and graph.type(v).dtype == FP32]
        large = [v for v in (*op.values, *read) if largest.get(v, 0.0) > limit]
        fills = seen is None or not any(limit < seen[v].high < MASK for v in large)
        if fills and _makes_mask(graph, op, read, masks):
            masks.update(v for v in op.values if v in large)
            continue
        for v in large:
            if v not in masks:
                what = "its result" if v.op == op.id else f"its operand {graph.output(v).name!r}"
                found[op.id] = f"{what} reaches {largest[v]:.3g} {source}, fp16 ends at 65504"
                break
    return found


def _makes_mask(graph: Graph, op: Op, read: list[Value], masks: set[Value]) -> bool:
    """Whether an op's results are large because of a constant or a mask, or computed only from constants.

    The factors of a product are no masks: saturated ones would make other sums. Nor are those of a multiplication or division
    below :data:`MASK`."""
    arrays = {v: graph.constant_value(v) for v in read}
    if all(a is not None for a in arrays.values()) or not masks.isdisjoint(read):
        return True
    factors, scales = op.inputs[: FACTORS.get(op.kind, 0)], _scales(op)
    for v, a in arrays.items():
        if a is not None and a.size and v not in factors:
            size = float(np.abs(a).max())
            if not size <= (MASK if v in scales else FP16_LARGEST):
                return True
    return False


def _scales(op: Op) -> set[Value]:
    """The operands of multiplications and divisions: of the op itself, or of its stages."""
    found = {v for v in op.inputs if v is not None and op.kind in SCALES}
    for stage in (*getattr(op.attrs, "prologue", ()), *getattr(op.attrs, "epilogue", ())):
        if stage.kind in SCALES:
            found |= {v for a in stage.args if a is not None and a >= 0 and (v := op.inputs[a]) is not None}
    return found
