"""The report on precisions: the requested and the actual precision of each op, hazards of quantization, risks of fp16."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optdnn.config import OF_PRODUCTS, PACKED_WEIGHTS, QUANTIZED
from optdnn.ir.graph import STRUCTURAL, Graph, Op
from optdnn.passes.base import PassReport
from optdnn.passes.support.facts import operand
from optdnn.passes.support.moved_values import from_integers, moved
from optdnn.passes.support.precision import ANCHORS, SHARES_SCALE, PrecisionPlan, asks_packed, key, no_integers
from optdnn.passes.support.quantized_values import is_dequantized
from optdnn.passes.support.ranges import Calibration
from optdnn.passes.support.small_weights import MOST, exponent
from optdnn.types import BF16, DTYPES, FP16, FP32, Array, DType, is_float

FP16_LARGEST, FP16_NORMAL, FP16_LEAST = 65504.0, 2.0**-14, 2.0**-25
"""The largest fp16 number, the smallest normal one, and the largest magnitude that rounds to zero."""
FLUSHED = 0.1
"""The share of a constant's elements that may vanish in fp16 without a report."""
_FLOATS: Mapping[DType, str] = {FP32: "fp32", FP16: "fp16", BF16: "bf16", DTYPES["fp64"]: "fp64"}
_EIGHT: Mapping[DType, str] = {
    DTYPES["int8"]: "int8",
    DTYPES["uint8"]: "int8",
    DTYPES["fp8_e4m3"]: "fp8",
    DTYPES["fp8_e5m2"]: "fp8",
}
_ON_FLOATS: Mapping[str, str] = {
    "AveragePool": "its kernel adds floats; it reads and stores integers where both are quantized",
    "ConvTranspose": "there is no kernel for it on integers",
}
"""Kind -> why an op between Q and DQ computes floats on a GPU."""
_CONVERT = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "DynamicRange", "Cast", "Layout"})


@dataclass(frozen=True)
class PrecisionRequest:
    """One op that computes, as ``assign_precision`` saw it: its key, kind, ONNX nodes and the requested precision."""

    key: str
    kind: str
    nodes: tuple[str, ...]
    precision: str
    reason: str | None = None


@dataclass(frozen=True)
class PrecisionOutcome:
    """The precision that an op runs in. ``reason``: why it differs from the request; None if it does not."""

    asked: PrecisionRequest
    runs: str
    reason: str | None = None

    @property
    def differs(self) -> bool:
        return self.runs != self.asked.precision

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {"op": self.asked.key, "kind": self.asked.kind, "nodes": list(self.asked.nodes)}
        row |= {"asked": self.asked.precision, "runs": self.runs}
        row |= {"because": self.asked.reason} if self.asked.reason else {}
        return row | ({"reason": self.reason} if self.reason else {})


@dataclass(frozen=True)
class Remark:
    """A hazard or a risk of one op; ``what`` is its text."""

    key: str
    kind: str
    nodes: tuple[str, ...]
    what: str

    def to_json(self) -> dict[str, Any]:
        return {"op": self.key, "kind": self.kind, "nodes": list(self.nodes), "what": self.what}


def _remark(op: Op, what: str) -> Remark:
    return Remark(key(op), op.kind, tuple(sorted(op.src)), what)


@dataclass
class PrecisionLog:
    """A build's notes on its precisions: ``assign_precision`` fills in requests, refusals and risks."""

    asked: list[PrecisionRequest] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Key -> why the op does not run in the requested precision."""
    packed: dict[str, str] = field(default_factory=dict)
    """Key -> the precision of the weights that the build packed."""
    converted: set[str] = field(default_factory=set)
    """Keys of ops that compute in fp32 and store 16-bit results."""
    risks: list[Remark] = field(default_factory=list)
    calibrated: dict[str, Any] = field(default_factory=dict)
    """How ranges were found: the method, and the number of batches."""
    tried: bool | None = None
    """Whether a trial run looked for values that fp16 cannot hold; None if fp16 was not requested."""
    hazards: list[Remark] | None = None
    """Hazards of the graph while it still has its Q and DQ, which later passes fold away; None if no pass looked."""


def ask(graph: Graph, plan: PrecisionPlan) -> list[PrecisionRequest]:
    """The requests of a plan, for each op that computes.

    An op has no request if it only moves data, or only follows its neighbors into integers. An op without a quantized form has a
    request only if the plan names it.
    """
    found = []
    for op in graph.order():
        if not _computes(op):
            continue
        precision, reason = plan.of(op), None
        own = next(o.type.dtype for o in op.outputs if is_float(o.type.dtype))
        given = structural(graph, op)
        makes_products = op.kind in ANCHORS
        if given in QUANTIZED:  # the model has Q and DQ around the op
            precision = given
        elif own != FP32:  # the type of the model stays
            if not (makes_products and precision in QUANTIZED) and not asks_packed(graph, plan, op):
                precision = _FLOATS.get(own, "fp8")
        else:
            reason = plan.reason(op)
            if precision in PACKED_WEIGHTS and not asks_packed(graph, plan, op):
                precision = plan.base
            if precision == "tf32" and not plan.named(op) and not (makes_products or op.kind == "Attention"):
                precision = "fp32"  # an op without products rounds no factors
            if precision in QUANTIZED and not plan.named(op) and not makes_products:
                precision = plan.base
                if no_integers(graph, op) is None:
                    continue
        found.append(PrecisionRequest(key(op), op.kind, tuple(sorted(op.src)), precision, reason))
    return found


def _computes(op: Op) -> bool:
    """Whether an op computes floats: it neither only moves data, nor converts, nor computes a shape."""
    if op.kind in STRUCTURAL or op.kind in _CONVERT:
        return False
    traits = op.definition.traits
    return not traits.movement and not traits.shape_only and any(is_float(o.type.dtype) for o in op.outputs)


def outcome(
    graph: Graph,
    log: PrecisionLog,
    ran: Mapping[str, str] | None = None,
    who: str = "",
    hint: str = "fp32",
    passes: Sequence[PassReport] = (),
) -> list[PrecisionOutcome]:
    """The precision that each requested op runs in, from the final graph and the library ``who`` (``ran``: key -> precision).

    ``hint``: the precision in which the library computes the graph's fp32. ``passes``: reports with the reasons why a product
    between Q and DQ did not become an operator on integers.
    """
    why = {n: r.reason for p in passes if p.name == "fold_quantized" for r in p.refused for n in r.nodes
           if not r.reason.startswith("DequantizeLinear stays")}  # fmt: skip
    by_key = {key(op): op for op in graph.ops() if op.kind not in STRUCTURAL}
    integer = {n: p for op in graph.ops() if (p := _on_eight_bits(graph, op)) is not None for n in op.src}
    # A product that rounds its result took over the name of the rounded value.
    rounds = [op for op in graph.of_kind(*ANCHORS) if any(s.kind == "FakeQuantize" for s in op.attrs.epilogue)]
    rounded = {(op.kind, n): op for op in rounds for n in op.src}
    rows = []
    for one in log.asked:
        op = by_key.get(one.key) or next((rounded[one.kind, n] for n in one.nodes if (one.kind, n) in rounded), None)
        runs = None
        if op is not None and op.kind == one.kind:
            runs = structural(graph, op)
        elif any(n in integer for n in one.nodes):
            runs = next(integer[n] for n in one.nodes if n in integer)
        elif op is not None:
            runs = _on_eight_bits(graph, op) or structural(graph, op)
        if runs in ("fp16", "bf16") and one.key in log.converted:
            runs = "fp32"
        if runs is None or (one.kind in SHARES_SCALE and runs in QUANTIZED):
            continue  # merged into another op, folded away, or only moved with the integers of its neighbors
        reason = log.refused.get(one.key)
        if runs == "fp32":
            runs = hint
        reported = (ran or {}).get(one.key)
        if one.key in log.packed:
            runs = log.packed[one.key]
        elif reported is not None and reported != runs:
            runs = reported
            reason = reason or next((why[n] for n in one.nodes if n in why), None) or f"{who} runs it in {reported}"
        if runs == one.precision:
            reason = None
        elif reason is None:
            reason = next((why[n] for n in one.nodes if n in why), None)
            reason = reason or _half_quantized(graph, op) or _ON_FLOATS.get(one.kind) or f"the graph has it in {runs}"
        rows.append(PrecisionOutcome(one, runs, reason))
    return rows


def _half_quantized(graph: Graph, op: Op | None) -> str | None:
    """The reason, if the model quantizes only the first operand of a product; else None."""
    if op is None or op.kind not in ANCHORS or is_dequantized(graph, op.input(1)):
        return None
    return "its input is quantized, but its second operand is not" if is_dequantized(graph, op.input(0)) else None


def _on_eight_bits(graph: Graph, op: Op) -> str | None:
    """int8 or fp8 for an op whose first operand is a stored 8-bit tensor; else None."""
    if op.kind in STRUCTURAL or op.kind in _CONVERT or op.input(0) is None:
        return None
    return _EIGHT.get(graph.type(op.inputs[0]).dtype)  # type: ignore[arg-type]


def on_gpu(graph: Graph, rounded: Collection[str]) -> dict[str, str]:
    """Key -> the precision of the GPU kernel, for each op of the optimized graph whose kernel ignores its Q and DQ or its tf32.

    An op that the passes left between DQ and Q computes on floats, since no library folds them on a GPU. ``rounded``: the ONNX
    nodes whose kernels round factors to tf32.
    """
    found = {}
    for op in graph.ops():
        if op.kind in STRUCTURAL or op.kind in _CONVERT or not op.outputs:
            continue
        declared = structural(graph, op)
        emulated = declared in QUANTIZED and _on_eight_bits(graph, op) is None
        if emulated or (getattr(op.attrs, "factors", "") == "tf32" and not op.src & set(rounded)):
            found[key(op)] = _FLOATS.get(op.outputs[0].type.dtype, "fp32")
    return found


def structural(graph: Graph, op: Op) -> str | None:
    """The precision of an op in the graph: int8 or fp8 if all its data comes from DequantizeLinear, else the result's type."""
    direct = _on_eight_bits(graph, op)
    if direct is not None:
        return direct
    whole = is_dequantized(graph, op.input(0)) or from_integers(graph, op.input(0))
    if op.kind in ANCHORS and is_dequantized(graph, op.input(1)) and whole:
        first = operand(op)
        while not is_dequantized(graph, first):
            first = moved(graph.op(first))[0]
        return _EIGHT.get(graph.type(operand(graph.op(first))).dtype, "fp32")
    data = [v for v in op.inputs if v is not None and is_float(graph.type(v).dtype)]
    if op.kind not in ANCHORS and data and all(is_dequantized(graph, v) for v in data):
        users = [u for u in graph.users(op.value) if u.kind != "Output"]
        if users and all(u.kind == "QuantizeLinear" for u in users):
            stored = graph.op(data[0]).inputs[0]
            return _EIGHT.get(graph.type(stored).dtype)  # type: ignore[arg-type]
    if getattr(op.attrs, "factors", "") in ("tf32", "fp16"):
        return "tf32"  # fp16 factors have the same significant bits
    return next((_FLOATS[o.type.dtype] for o in op.outputs if o.type.dtype in _FLOATS), None)


def _has_computed_scale(graph: Graph, op: Op) -> bool:
    """Whether the scale of a product's data is computed at run time. The result then has no scale before its range is known."""
    data = graph.op(operand(op))
    return data.kind == "DequantizeLinear" and graph.constant_value(data.inputs[1]) is None


def hazards(graph: Graph) -> list[Remark]:
    """Hazards of quantization: quantized products with a float result, and scales that are not normal positive numbers.

    A float result costs a conversion, and more bytes are written and read than with 8 bits."""
    found = []
    for op in graph.of_kind("QuantizeLinear", "DequantizeLinear"):
        scale = graph.constant_value(op.inputs[1])
        if scale is not None and not (np.isfinite(scale) & (scale >= np.finfo(np.float32).tiny)).all():
            odd = scale[~(np.isfinite(scale) & (scale >= np.finfo(np.float32).tiny))].reshape(-1)[0]
            what = f"its scale {float(odd):g} is not a normal positive number: libraries treat it differently"
            found.append(_remark(op, what))
    for op in graph.of_kind(*ANCHORS):
        if structural(graph, op) not in QUANTIZED or _has_computed_scale(graph, op):
            continue
        readers = [u for u in graph.users(op.value) if u.kind not in ("QuantizeLinear", "Output")]
        if readers:
            names = ", ".join(f"{u.kind} {u.short_name}" for u in readers[:3]) + (" …" if len(readers) > 3 else "")
            what = f"its result stays float: {names} {'reads' if len(readers) == 1 else 'read'} it"
            found.append(_remark(op, what))
    return found


# ---------------------------------------------------------------- fp16


def half_risks(
    graph: Graph,
    plan: PrecisionPlan,
    calibration: Calibration | None,
    kept: Collection[str] = (),
    enlarges: bool = False,
) -> list[Remark]:
    """Ops requested in fp16 with values that overflow or vanish in fp16, found by calibration, or from the weights without it.

    ``kept``: keys of ops that stay fp32. ``enlarges``: whether small weights are enlarged
    (:mod:`optdnn.passes.support.small_weights`).
    """
    found = []
    for op in graph.order():
        if op.kind in STRUCTURAL or plan.of(op) not in ("fp16", *(OF_PRODUCTS if plan.base == "fp16" else ())):
            continue
        if not any(o.type.dtype == FP32 for o in op.outputs):
            continue
        if key(op) in kept:
            continue
        for what in (*_by_weights(graph, op, calibration is None, enlarges), *_by_ranges(op, calibration)):
            found.append(_remark(op, what))
    return found


def _by_ranges(op: Op, calibration: Calibration | None) -> list[str]:
    seen = None if calibration is None else calibration.seen.get(key(op))
    if seen is None:
        return []
    if seen.largest > FP16_LARGEST:
        return [f"overflow: {key(op)!r} reaches {seen.largest:.3g}, fp16 ends at 65504"]
    if 0 < seen.largest < FP16_NORMAL:
        return [f"underflow: {key(op)!r} is at most {seen.largest:.3g}, fp16 is subnormal below {FP16_NORMAL:.2g}"]
    return []


def _by_weights(graph: Graph, op: Op, alone: bool, enlarges: bool) -> list[str]:
    found, more = [], exponent(graph, op) if enlarges else 0
    more = more if more < MOST else 0  # the products of even smaller weights vanish, too
    for slot, value in enumerate(op.inputs):
        array = graph.constant_value(value)
        if array is None or array.dtype != FP32 or not array.size or (op.kind in ANCHORS and slot == 2):
            continue
        size = np.ldexp(np.abs(array), more) if slot < 2 else np.abs(array)
        name = graph.output(value).name  # type: ignore[arg-type]
        if not size.max() <= FP16_LARGEST:  # or there is a NaN
            hides = op.kind == "Attention" and slot == 3  # large negative mask elements hide keys in fp16, too
            finite = size[np.isfinite(size) & ((array > 0) | (not hides))]
            if finite.size and finite.max() > FP16_LARGEST and array.ndim:
                found.append(f"overflow: the constant {name!r} reaches {finite.max():.3g}, fp16 ends at 65504")
        lost = np.count_nonzero(size <= FP16_LEAST) / array.size  # also counts elements that are zero already
        if lost > FLUSHED:
            lost = np.count_nonzero((size > 0) & (size <= FP16_LEAST)) / array.size
        if vanishes(array):
            found.append(
                f"underflow: the constant {name!r} is {array.flat[0]:.3g}, fp16 has nothing below {2 * FP16_LEAST:.2g}"
            )
        elif lost > FLUSHED:
            found.append(f"underflow: {lost:.0%} of the constant {name!r} are zero in fp16")
    weights = graph.constant_value(op.input(1)) if op.kind in ("Conv", "Gemm", "MatMul") else None
    if alone and weights is not None and weights.ndim >= 2 and weights.dtype == FP32:
        rows = weights.reshape(len(weights), -1) if op.kind == "Conv" or _transposed(op) else weights
        axis = 1 if op.kind == "Conv" or _transposed(op) else -2
        if float(np.abs(rows).max(initial=0.0)) * rows.shape[axis] <= FP16_LARGEST:
            return found
        reach = float(np.abs(rows.astype(np.float64)).sum(axis=axis).max())
        if reach > FP16_LARGEST:
            found.append(f"overflow: its weights sum to {reach:.3g}, so that operands of 1 may give more than 65504")
    return found


def vanishes(array: Array) -> bool:
    """Whether a constant is a scalar, or a vector of equal elements, that fp16 rounds to zero."""
    return bool(
        array.ndim <= 1 and array.size and 0 < abs(array.flat[0]) <= FP16_LEAST and (array == array.flat[0]).all()
    )


def _transposed(op: Op) -> bool:
    return op.kind == "Gemm" and bool(op.attrs.transB)


def to_plain(
    plan: PrecisionPlan, rows: list[PrecisionOutcome], dangers: list[Remark], log: PrecisionLog
) -> dict[str, Any]:
    """JSON data for an engine: the plan, the number of ops per precision, and every difference, hazard and risk.

    If there are several precisions, the data also lists the ONNX nodes of each."""
    counts: dict[str, int] = {}
    where: dict[str, dict[str, None]] = {}
    for r in rows:
        counts[r.runs] = counts.get(r.runs, 0) + 1
        where.setdefault(r.runs, {}).update(dict.fromkeys(r.asked.nodes))
    return {
        "plan": plan.to_json(),
        **({"calibration": log.calibrated} if log.calibrated else {}),
        "runs": dict(sorted(counts.items())),
        **({"nodes": {p: list(nodes) for p, nodes in sorted(where.items())}} if len(where) > 1 else {}),
        "differs": [r.to_json() for r in rows if r.differs],
        "hazards": [h.to_json() for h in dangers],
        "risks": [r.to_json() for r in log.risks],
        **({} if log.tried is None else {"fp16_tried": log.tried}),
    }
