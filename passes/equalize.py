"""Exact rescaling of channels before quantization, so that one scale per tensor suits all of its channels.

Cross-layer equalization (Nagel et al., "Data-Free Quantization through Weight Equalization and Bias Correction", 2019): a
positive factor per channel moves from a depthwise convolution's weights to its neighbor's through a ReLU. Smoothing (Xiao et al.,
"SmoothQuant", 2023): a factor per channel moves from a LayerNormalization's result into the weights of the products after it.
Neither changes the results of the network.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optdnn.config import QUANTIZED
from optdnn.ir.graph import Graph, Op, Use, Value
from optdnn.passes.base import Fired, Pass, PassContext, PassReport, Refused, node_names
from optdnn.passes.support.facts import is_depthwise, operand, set_operand
from optdnn.passes.support.linear import by_group
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.types import FP32, Array

ROUNDS = 20
"""Passages over all pairs; a triple (expand, depthwise, project) settles after a few."""
SETTLED = 1e-3
MOST = 1e4
"""Bound of a factor: a channel with nearly no weight must not leave the range of fp32."""
STRENGTH = 0.5
"""SmoothQuant's alpha: how much of the difficulty moves from activations to weights."""
_HOMOGENEOUS = frozenset({"Relu", "LeakyRelu", "PRelu"})
"""f(s x) = s f(x) for every s > 0."""


class Equalize(Pass):
    """Does nothing unless something is to be quantized; smooths where there is calibration data."""

    name = "equalize"

    def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
        plan = context.plan or PrecisionPlan.of_option(context.precision)
        if not plan.quantizes:
            return
        _equalize(graph, plan, report)
        groups = _smoothable(graph, plan, report)
        if groups and context.calibration is not None:
            found = context.calibration(graph) if callable(context.calibration) else context.calibration
            for norm, users in groups:
                _smooth(graph, norm, users, found.channels.get(norm.outputs[0].name), report)


# ---------------------------------------------------------------- cross-layer equalization


def _equalize(graph: Graph, plan: PrecisionPlan, report: PassReport) -> None:
    pairs = [p for op in graph.of_kind("Conv") if (p := _pair(graph, op, plan, report)) is not None]
    if not pairs:
        return
    weights: dict[int, Array] = {}
    biases: dict[int, Array] = {}
    for op in {op.id: op for pair in pairs for op in pair}.values():
        w, bias = graph.constant_value(op.inputs[1]), graph.constant_value(op.input(2))
        assert w is not None
        weights[op.id] = w.astype(np.float64)
        if bias is not None:
            biases[op.id] = bias.astype(np.float64)
    total = {a.id: np.ones(len(weights[a.id])) for a, _ in pairs}
    for _ in range(ROUNDS):
        change = 0.0
        for a, b in pairs:
            first, second = weights[a.id], weights[b.id]
            out = np.abs(first.reshape(len(first), -1)).max(axis=1)
            into = _by_input(second, b.attrs.group)
            # s = sqrt(r1 / r2): afterward both ranges of a channel are their geometric mean.
            factor = np.where((out > 0) & (into > 0), np.sqrt(out / np.where(into > 0, into, 1.0)), 1.0)
            factor = np.clip(total[a.id] * factor, 1 / MOST, MOST) / total[a.id]
            weights[a.id] = first / factor.reshape(-1, *[1] * (first.ndim - 1))
            weights[b.id] = by_group(second, factor.reshape(b.attrs.group, 1, -1), b.attrs.group)
            if a.id in biases:
                biases[a.id] = biases[a.id] / factor
            total[a.id] = total[a.id] * factor
            change = max(change, float(np.abs(np.log(factor)).max(initial=0.0)))
        if change < SETTLED:
            break
    before = {i: graph.constant_value(graph.op(i).inputs[1]) for i in weights}
    moved = {i for i, w in weights.items() if not np.allclose(w, before[i], rtol=SETTLED)}  # type: ignore[arg-type]
    for i in sorted(moved):
        _set(graph, i, 1, weights[i])
        if i in biases:
            _set(graph, i, 2, biases[i])
    for a, b in pairs:
        if a.id in moved:
            report.fired.append(Fired("cross_layer", node_names([a, b])))


def _pair(graph: Graph, op: Op, plan: PrecisionPlan, report: PassReport) -> tuple[Op, Op] | None:
    """A convolution and its only reader, one of them depthwise, with nothing but a ReLU in between."""
    user = graph.sole_user(op.value)
    if user is None or user.kind != "Conv" or user.inputs[0] != op.value or user.attrs.prologue:
        return None
    if not (is_depthwise(graph, op) or is_depthwise(graph, user)):
        return None
    if not all(plan.of(o) in QUANTIZED for o in (op, user)):
        return None
    if not all(_own_weights(graph, o) for o in (op, user)):
        return None
    other = [s.kind for s in op.attrs.epilogue if s.kind not in _HOMOGENEOUS]
    if other:
        reason = f"{other[0]} is not homogeneous: a factor cannot pass it"
        report.refused.append(Refused("cross_layer", node_names([op, user]), reason))
        return None
    return op, user


def _own_weights(graph: Graph, op: Op) -> bool:
    """Constant fp32 weights (and bias) that can be changed for this op."""
    for slot in (1, 2):
        value = op.input(slot)
        if value is not None and (graph.constant_value(value) is None or graph.type(value).dtype != FP32):
            return False
    w = graph.constant_value(op.inputs[1])
    return w is not None and bool(np.isfinite(w).all())


def _by_input(w: Array, group: int) -> Array:
    """Largest magnitude of the weights that read each input channel."""
    rows = np.abs(w.reshape(group, len(w) // group, w.shape[1], -1)).max(axis=(1, 3))
    return np.asarray(rows.reshape(-1))


def _set(graph: Graph, op_id: int, slot: int, array: Array) -> None:
    """Another constant for one operand of one op."""
    constant = graph.op(operand(graph.op(op_id), slot))
    new = graph.add_constant(array.astype(FP32), constant.outputs[0].name, constant.src)
    set_operand(graph, Use(op_id, slot), new)
    graph.remove_dead([constant.id])


# ---------------------------------------------------------------- smoothing


def _smoothable(graph: Graph, plan: PrecisionPlan, report: PassReport) -> list[tuple[Op, list[Op]]]:
    """LayerNormalizations that only products with constant weights read."""
    found = []
    for op in graph.of_kind("LayerNormalization", "RMSNormalization"):
        users = graph.users(op.value)
        products = [u for u in users if _product(graph, u, op.value) and plan.of(u) in QUANTIZED]
        if not products:
            continue
        parameters = [v for v in op.inputs[1:] if v is not None]
        if len(op.outputs) > 1 or any(graph.constant_value(v) is None for v in parameters) or not parameters:
            continue
        if any(len(graph.type(v).dims) != 1 or graph.type(v).dtype != FP32 for v in parameters):
            continue
        others = [u for u in users if u not in products]
        if others:
            reason = f"its result is read by {others[0].kind} {others[0].name} as well"
            report.refused.append(Refused("smooth", node_names([op]), reason))
            continue
        found.append((op, products))
    return found


def _product(graph: Graph, op: Op, value: Value) -> bool:
    if op.kind not in ("MatMul", "Gemm") or op.inputs[0] != value or op.attrs.prologue:
        return False
    if op.kind == "Gemm" and op.attrs.transA:
        return False
    w = graph.constant_value(op.inputs[1])
    return w is not None and w.ndim == 2 and w.dtype == FP32 and list(op.inputs).count(value) == 1


def _smooth(graph: Graph, norm: Op, users: Sequence[Op], largest: Array | None, report: PassReport) -> None:
    """Divide the normalization's parameters by s = max|X|^a / max|W|^(1 - a) per channel, and multiply the weights by it."""
    weights = [_columns(u, w) for u in users if (w := graph.constant_value(u.inputs[1])) is not None]
    strongest = np.max([np.abs(w.astype(np.float64)).max(axis=1) for w in weights], axis=0)
    if largest is None or strongest.shape != largest.shape:
        report.refused.append(Refused("smooth", node_names([norm]), "calibration saw no fixed channels there"))
        return
    alive = (largest > 0) & (strongest > 0)
    safe_x, safe_w = np.where(alive, largest, 1.0), np.where(alive, strongest, 1.0)
    factor = np.where(alive, np.clip(safe_x**STRENGTH / safe_w ** (1 - STRENGTH), 1 / MOST, MOST), 1.0)
    factor = factor / np.exp(np.log(factor).mean())
    if np.abs(np.log(factor)).max() < SETTLED:
        return
    for slot, value in enumerate(norm.inputs):
        array = graph.constant_value(value)
        if slot and array is not None:
            _set(graph, norm.id, slot, array.astype(np.float64) / factor)
    for u, w in zip(users, weights, strict=True):
        _set(graph, u.id, 1, _columns(u, w.astype(np.float64) * factor[:, None]))
    report.fired.append(Fired("smooth", node_names([norm, *users])))


def _columns(op: Op, weights: Array) -> Array:
    """Weights (inputs, outputs) of a product as it stores them, and back."""
    return weights.T if op.kind == "Gemm" and op.attrs.transB else weights
