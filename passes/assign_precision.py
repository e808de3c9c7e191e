"""The one approximation: each op in the precision that the plan asks for.

First, quantization. Ops that the plan puts in int8 or fp8 get QuantizeLinear and DequantizeLinear around them, on every target
(:mod:`optdnn.passes.support.quantize`). Weights are packed into 4 or 8 bits where the plan asks for it
(:mod:`optdnn.passes.support.packed_products`).

Then, floating point. The fp32 operands of an op in fp16 or bf16 become 16-bit tensors. Casts are placed between ops of different
precision, one per value and type. On the CPU this is only for mixtures of float precisions: a library that runs the whole network
in one precision rounds by itself.

Constants are rounded once. A finite constant never becomes infinite: masks of -1e9 or -3.4e38 saturate. A scalar constant never
becomes zero. Weights that would be subnormal are enlarged (:mod:`optdnn.passes.support.small_weights`). Parameters that a kernel
reads in fp32 anyway stay fp32: biases of convolutions, statistics of batch normalization, scales. Recurrences keep their states
and constants in fp32 (:mod:`optdnn.passes.support.scans_in_fp32`), and in bf16 their decays
(:mod:`optdnn.passes.support.decays`). Accumulators, statistics and exponentials are fp32 in the kernels. Values that decide
indices stay fp32 (:mod:`optdnn.passes.support.decisions`), and so do ops that depend on a constant beyond fp16
(:mod:`optdnn.passes.support.guards`), and products that are divided by their own sums
(:mod:`optdnn.passes.support.own_sums`). Where these ops are pointwise, they read and store fp16 if they can, and convert in
registers.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from optdnn.config import OF_PRODUCTS, PACKED_WEIGHTS, QUANTIZED
from optdnn.errors import ShapeError, UsageError
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import Graph, Op, Output, Value
from optdnn.ir.inference import infer
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.packed_layout import PackedGatherAttrs
from optdnn.ops.quant import DequantizeAttrs
from optdnn.ops.sampled_sum import MOST_IMAGES
from optdnn.passes.base import Fired, Pass, PassContext, PassReport, Refused, node_names
from optdnn.passes.support.angles import angles
from optdnn.passes.support.coordinates import coordinates
from optdnn.passes.support.data_sizes import sized_by_data
from optdnn.passes.support.decays import decays
from optdnn.passes.support.decisions import decisions
from optdnn.passes.support.exponents import exponents
from optdnn.passes.support.facts import is_pointwise
from optdnn.passes.support.guards import Guards, guards
from optdnn.passes.support.in_registers import in_registers
from optdnn.passes.support.integer_sums import integer_sums
from optdnn.passes.support.large_biases import large_biases
from optdnn.passes.support.large_indices import large_indices
from optdnn.passes.support.large_scales import large_scales
from optdnn.passes.support.overflows import growing, overflows, ranges_seen
from optdnn.passes.support.own_sums import own_sums
from optdnn.passes.support.packed_products import pack_products
from optdnn.passes.support.precision import ANCHORS, PrecisionPlan, key
from optdnn.passes.support.precision_report import PrecisionLog, ask, half_risks, hazards
from optdnn.passes.support.quantize import quantize, without_data
from optdnn.passes.support.ranges import Calibration
from optdnn.passes.support.rounded_constants import LARGEST, RoundedConstants
from optdnn.passes.support.running_sums import differences
from optdnn.passes.support.scans_in_fp32 import in_fp32
from optdnn.passes.support.small_weights import enlarged, exponent
from optdnn.passes.support.trial import largest_values
from optdnn.types import BF16, FP16, FP32, Array, DType

NARROW: Mapping[str, DType] = {"fp16": FP16, "bf16": BF16}

_LEAST_NORMAL = 2.0**-14
"""The smallest normal fp16 number: smaller ones lose precision."""

KEEPS_FP32: Mapping[str, frozenset[int]] = {
    "GridSample": frozenset({1}),
    "SampledSum": frozenset(range(1, 2 * MOST_IMAGES, 2)),
    "Resize": frozenset({1, 2}),
    "RoiAlign": frozenset({1}),
    "MaxRoiPool": frozenset({1}),
    "Conv": frozenset({2}),
    "ConvTranspose": frozenset({2}),
    "BatchNormalization": frozenset({1, 2, 3, 4}),
    "QuantizeLinear": frozenset({1}),
    "DequantizeLinear": frozenset({1}),
    "DynamicRange": frozenset({0}),
    "SampleToken": frozenset({1, 3}),
}
"""Kind -> operand slots where fp32 constants stay fp32. For the kinds in :data:`ANY_TYPE`, computed values stay fp32 too."""

ANY_TYPE = frozenset(
    {
        *("Cast", "DequantizeLinear", "DynamicRange", "GridSample", "QuantizeLinear"),
        *("MaxRoiPool", "RoiAlign", "SampledSum", "SampleToken"),
    }
)
"""Kinds with an operand that may have any float type, independently of the other operands."""

PACKED = frozenset({"PackedGather", "PackedMatMul"})
"""Kinds with packed weights. Scales (operand 2) and zero points share one type; the other values may have another."""

KEEPS_FP32_CPU: Mapping[str, frozenset[int]] = {
    k: KEEPS_FP32[k] for k in ("Resize", "QuantizeLinear", "DequantizeLinear")
}
"""As :data:`KEEPS_FP32`, for the CPU's libraries. They follow ONNX's types: a bias has the type of the sum."""


class AssignPrecision(Pass):
    """Carries out ``PassContext.plan``. Without a plan, every op gets ``PassContext.precision``."""

    name = "assign_precision"

    def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
        plan = context.plan or PrecisionPlan.of_option(context.precision)
        log = context.precision_log if context.precision_log is not None else PrecisionLog()
        log.asked = ask(graph, plan)
        keys = {op.id: key(op) for op in graph.ops() if op.outputs}
        own = plan.quantizes and context.calibration is None
        if own:
            _check_own_ranges(graph, plan)
        found = context.calibration
        if callable(found):
            found = found(graph) if plan.uses_ranges(context.on_gpu) else None
        if context.on_gpu and any(p in NARROW for p in plan.floats):
            keeps: Mapping[str, frozenset[int]] | None = KEEPS_FP32
        else:
            keeps = KEEPS_FP32_CPU if context.target == "cpu" and plan.is_mixture else None
        guarded = Guards({}) if keeps is None else _guarded(graph, plan, log, found)
        sized: Mapping[int, str] = {}
        biased: Mapping[int, str] = {}
        if keeps is not None and context.on_gpu:
            sized, biased = sized_by_data(graph), large_biases(graph)
            found_by = (coordinates, large_indices, angles, exponents, differences)
            others = {i: reason for find in found_by for i, reason in find(graph).items()} | sized | biased
            others |= {i: reason for i, reason in decays(graph).items() if _float(plan, graph.op(i)) == "bf16"}
            guarded = guarded.also({i: r for i, r in others.items() if not plan.named(graph.op(i))})
        if (
            "fp16" in plan.floats and context.precision_log is not None
        ):  # reads every weight, so only if there is a report
            log.risks = half_risks(graph, plan, found, {keys[i] for i in guarded.reasons}, context.on_gpu)
        if own:
            log.refused.update(without_data(graph, plan, context.target, report))
        elif found is not None and plan.quantizes:
            log.calibrated = {"method": found.method, "batches": found.samples}
            for op_id, reason in quantize(graph, plan, found, context.target, report).items():
                log.refused[keys[op_id]] = reason
        if plan.packs:
            products = pack_products(graph, plan, report, context.kept, context.moments, context.target)
            log.refused |= products.refused
            log.packed = products.packed
            if context.moments is not None and products.packed:
                log.calibrated = {**log.calibrated, "weights": "gptq"}
        if keeps is not None:
            assignment = _Assignment(graph, plan, report, keeps, guarded, sized, context.kept, context.on_gpu)
            assignment.run()
            log.refused.update({keys[i]: reason for i, reason in assignment.refused.items()})
            log.converted |= {keys[i] for i in assignment.converted}
        if context.on_gpu and "tf32" in plan.floats:
            _allow_tf32(graph, plan)
        for op in (graph.op(i) for i in biased):  # its operands are of 16 bits, so that rounding them loses nothing
            if _float(plan, op) in NARROW and op.outputs[0].type.dtype == FP32:
                graph.set_op(replace(op, attrs=replace(op.attrs, factors="tf32")))
        log.hazards = hazards(graph)


_OWN_INTEGERS = frozenset(
    {
        "ConvInteger",
        "DynamicQuantizeLinear",
        "DynamicRange",
        "MatMulInteger",
        "QLinearConv",
        "QLinearMatMul",
        "QuantizeLinear",
    }
)


def _check_own_ranges(graph: Graph, plan: PrecisionPlan) -> None:
    """Raise UsageError for a quantized plan without calibration data, unless the model has ranges of its own."""
    if _OWN_INTEGERS.isdisjoint(graph.kinds()):
        precision = next(p for p in (plan.default, *plan.nodes.values()) if p in QUANTIZED)
        raise UsageError(
            f"precision {precision} needs calibration data",
            hint="give --calib DATA (.npz, .npy or a folder of pictures); --calib-cache saves its work, and does not replace it",
        )


def _guarded(graph: Graph, plan: PrecisionPlan, log: PrecisionLog, data: Calibration | None) -> Guards:
    """The ops that stay fp32 although the plan asks for fp16 (not by name): a constant or a value is too large for fp16.

    ``data``: the ranges of calibration data. Without them, the network is run on generated inputs."""
    if "fp16" not in plan.floats:
        return Guards({})
    found, scaled = guards(graph), large_scales(graph)
    if data is None:
        largest = largest_values(graph)
        log.tried, large = largest is not None, overflows(graph, largest or {})
    else:
        seen = ranges_seen(graph, data)
        log.tried, large = bool(seen), overflows(graph, {}, seen)
        largest = {v: r.largest for v, r in seen.items()} if seen else None
    trial = {**own_sums(graph, largest), **large}
    others = {**trial, **integer_sums(graph), **growing(graph)}
    reasons = {**others, **found.reasons, **scaled.reasons}
    ops = {i: graph.op(i) for i in reasons}
    stay = {i: reasons[i] for i, op in ops.items() if not plan.named(op) and _float(plan, op) == "fp16"}
    return Guards(stay, {*found.saturates, *scaled.saturates} & stay.keys())


def _float(plan: PrecisionPlan, op: Op) -> str:
    """The requested float precision of an op, or of its float parts between integers."""
    precision = plan.of(op)
    return (
        plan.base if precision in OF_PRODUCTS or (op.kind == "DequantizeLinear" and not plan.named(op)) else precision
    )


def _allow_tf32(graph: Graph, plan: PrecisionPlan) -> None:
    """Let the products for which tf32 was requested round their fp32 factors; no type changes."""
    for op in graph.of_kind(*sorted({*ANCHORS, "Attention", "PackedMatMul"})):
        precision = plan.base if plan.of(op) in PACKED_WEIGHTS else plan.of(op)
        if precision == "tf32" and op.outputs[0].type.dtype == FP32:
            graph.set_op(replace(op, attrs=replace(op.attrs, factors="tf32")))


def _subnormal(scales: Array | None) -> bool:
    """Whether one of these numbers is subnormal in fp16, and would lose precision."""
    if scales is None:
        return False
    sizes = np.abs(scales[scales != 0])
    return bool(sizes.size) and float(sizes.min()) < _LEAST_NORMAL


class _Assignment:
    def __init__(
        self,
        graph: Graph,
        plan: PrecisionPlan,
        report: PassReport,
        keeps_fp32: Mapping[str, frozenset[int]],
        guarded: Guards,
        sized: Collection[int],
        kept: ConstantCache,
        enlarges: bool,
    ):
        self.graph, self.plan, self.report, self.keeps_fp32 = graph, plan, report, keeps_fp32
        self.wide = {v for op in graph.ops() for v in op.values if graph.type(v).dtype == FP32}
        """The values that were fp32 before the pass: it may narrow them."""
        self.narrowed: dict[tuple[Value, DType], Value] = {}
        """(value, type) -> the value converted to the type."""
        self.bounded: dict[Value, Value] = {}
        """value -> the value within the range of fp16."""
        self.decisions = decisions(graph)
        self.guarded = guarded
        self.sized = sized
        """Ops whose results the CPU computes, in fp32."""
        self.enlarges = enlarges
        """Whether products of small weights get stages that make larger ones possible."""
        self.refused: dict[int, str] = {}
        self.converted: set[int] = set()
        """Ops that compute in fp32 and store 16-bit results."""
        self.constants = RoundedConstants(kept)

    def run(self) -> None:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "optdnn-round") as pool:
            dtype = NARROW.get(self.plan.base)
            if dtype is not None and not self.plan.is_mixture:
                self.constants.begin(self.graph, dtype, pool)
            self._assign()

    def _assign(self) -> None:
        for op in self.graph.order():
            if op.kind in ("Input", "Constant"):
                continue
            if op.kind == "Output":
                self._output(op)
            else:
                self._op(op)
        self._drop_idle_casts()
        self.converted = in_registers(self.graph, self.guarded)
        self.graph.remove_dead([op.id for op in self.graph.order() if op.kind == "Constant"])

    def _drop_idle_casts(self) -> None:
        """Remove casts to the type that their operand has now, such as casts of inputs in the network's own precision."""
        for one in self.graph.of_kind("Cast"):
            if one.id not in self.graph:
                continue
            op = self.graph.op(one.id)  # its current form: an idle cast may have been before it
            value = op.inputs[0]
            if value is not None and self.graph.type(value).dtype == op.outputs[0].type.dtype:
                self.graph.replace_uses(op.value, value)
                self.graph.remove_dead([op.id])

    def _wanted(self, op: Op) -> DType:
        """The floating type that an op computes in."""
        return NARROW.get(_float(self.plan, op), FP32)

    def _output(self, op: Op) -> None:
        value = op.inputs[0]
        assert value is not None
        wanted = op.outputs[0].type
        if self.graph.type(value).dtype == wanted.dtype:
            return
        made = self._cast(value, wanted.dtype, self.graph.op(value).src)
        self.graph.set_op(replace(op, inputs=(made,)))

    def _op(self, op: Op) -> None:
        if op.kind == "Cast" and self._at_the_border(op):
            return
        dtype = self._wanted(op)
        moves = dtype != FP32 and self._moves_rounded(op, dtype)
        if dtype != FP32 and op.id in self.decisions and not self.plan.named(op) and not moves:
            self._keep(op)
            return
        if op.id in self.guarded.reasons and not moves:
            self._stay(op, self.guarded.reasons[op.id])
            return
        keep = self.keeps_fp32.get(op.kind, frozenset({0}) if op.kind == "Cast" else frozenset())
        if op.kind == "QuantizeLinear":
            keep = frozenset({0, 1})
        elif op.kind in PACKED and dtype == FP16 and _subnormal(self.graph.constant_value(op.input(2))):
            keep = frozenset({2, 3})
        if dtype == FP16 and self.enlarges and (more := exponent(self.graph, op)):
            op, constants = enlarged(self.graph, op, more)
            self.wide.update(constants)
            self.report.fired.append(Fired("enlarge", tuple(sorted(op.src)) or (op.outputs[0].name,)))
        if op.kind == "PointwiseScan" and dtype != FP32 and {*op.inputs[: op.attrs.states]} <= self.wide:
            inputs, attrs = self._scan(op, dtype)
        else:
            inputs = tuple(
                v if v is None or (i in keep and self._may_stay(op, v)) else self._in(v, dtype, op)
                for i, v in enumerate(op.inputs)
            )
            attrs = op.attrs if dtype == FP32 else _retyped(op.attrs, dtype)
        types = [None if v is None else self.graph.type(v) for v in inputs]
        values = [self.graph.known(v) for v in inputs]
        try:
            found = infer(op.kind, attrs, types, values, len(op.outputs), self.graph.fresh_symbol)
        except ShapeError as error:
            self._stay(op, error.message)
            return
        outputs = tuple(
            Output(o.name, o.type.with_dtype(t.dtype), o.known) for o, t in zip(op.outputs, found.types, strict=False)
        )
        self.graph.set_op(replace(op, inputs=inputs, attrs=attrs, outputs=outputs))

    def _scan(self, op: Op, dtype: DType) -> tuple[tuple[Value | None, ...], Attrs]:
        """The operands and attributes of a PointwiseScan. It reads states, constants, and what else stays in fp32, as fp32."""
        inputs, narrow = list(op.inputs), list[int]()
        for k, v in enumerate(op.inputs):
            assert v is not None
            constant = self.graph.constant_value(v) is not None
            wide = k < op.attrs.states or constant or v.op in self.guarded.reasons
            inputs[k] = made = self._in(v, FP32 if wide else dtype, op)
            if k >= op.attrs.states and v in self.wide and self.graph.type(made).dtype == dtype:
                narrow.append(k)
        computed = [k for k, v in enumerate(op.values) if v in self.wide]
        return tuple(inputs), in_fp32(op.attrs, narrow, computed, dtype)

    def _moves_rounded(self, op: Op, dtype: DType) -> bool:
        """Whether an op only moves numbers that are rounded to ``dtype`` already: moving them in ``dtype`` is exact."""
        wide = [v for v in op.inputs if v in self.wide]
        moves = op.definition.traits.movement and op.id not in self.sized
        return moves and bool(wide) and all(self.graph.type(v).dtype == dtype for v in wide)

    def _may_stay(self, op: Op, value: Value) -> bool:
        """Whether ``value`` is a constant parameter, or ``op`` is in :data:`ANY_TYPE`."""
        return op.kind in ANY_TYPE or self.graph.constant_value(value) is not None

    def _at_the_border(self, op: Op) -> bool:
        """Whether a cast to fp32 is read only by fp32 outputs: the pass would place the same cast there."""
        users = self.graph.users(op.value)
        return bool(users) and op.outputs[0].type.dtype == FP32 and all(
            u.kind == "Output" and u.outputs[0].type.dtype == FP32 for u in users)  # fmt: skip

    def _keep(self, op: Op) -> None:
        """Keep an op in fp32, because a decision depends on it."""
        decider = self.decisions[op.id]
        name = next(iter(node_names([decider])), decider.outputs[0].name)
        if any(v in self.wide for v in op.inputs) or any(o.type.dtype == FP32 for o in op.outputs):
            self._stay(op, f"{decider.kind} {name} decides by it")

    def _stay(self, op: Op, reason: str) -> None:
        """Keep an op in fp32, because it has no 16-bit form or must not have one. Its operands are cast back to fp32."""
        self.refused[op.id] = reason
        self.report.refused.append(Refused("narrow", node_names([op]), f"{op.kind} stays fp32: {reason}"))
        self.graph.set_op(replace(op, inputs=tuple(v if v is None else self._in(v, FP32, op) for v in op.inputs)))

    def _in(self, value: Value, dtype: DType, op: Op) -> Value:
        """``value`` as ``op`` reads it: converted to ``dtype`` if it was fp32 before the pass, else unchanged."""
        if value not in self.wide or self.graph.type(value).dtype == dtype:
            return value
        array, producer = self.graph.constant_value(value), self.graph.op(value)
        # Products read the integers behind it. The results of pointwise operators saturate in registers.
        bounded = (
            dtype == FP16
            and value.op in self.guarded.saturates
            and op.kind not in ANCHORS
            and not is_pointwise(producer)
        )
        if bounded:
            value = self._bounded(value)
        item = (value, dtype)
        if item not in self.narrowed:
            if array is not None:
                rounded = self._rounded(array, producer, dtype)
                self.narrowed[item] = self.graph.add_constant(rounded, producer.outputs[0].name, producer.src)
            else:
                self.narrowed[item] = self._cast(value, dtype, op.src)
        return self.narrowed[item]

    def _bounded(self, value: Value) -> Value:
        """``value`` within the range of fp16."""
        if value not in self.bounded:
            out = self.graph.output(value)
            ends = [
                self.graph.add_constant(np.array(sign * LARGEST[FP16], np.float32), "fp16_largest") for sign in (-1, 1)
            ]
            clip = self.graph.add("Clip", [value, *ends], names=[f"{out.name}.bounded"], src=self.graph.op(value).src)
            self.bounded[value] = clip.value
        return self.bounded[value]

    def _rounded(self, array: Array, op: Op, dtype: DType) -> Array:
        saturates, rounded = self.constants.rounded(array, dtype)
        if saturates:
            self.report.fired.append(Fired("saturate", tuple(sorted(op.src)) or (op.outputs[0].name,)))
        return rounded

    def _cast(self, value: Value, dtype: DType, src: frozenset[str]) -> Value:
        name = self.graph.output(value).name
        self.report.fired.append(Fired("cast", tuple(sorted(src)) or (name,)))
        return self.graph.add("Cast", [value], CastAttrs(dtype), names=[f"{name}.{dtype.name}"], src=src).value


def _retyped(attrs: Any, dtype: DType) -> Any:
    """Attributes of operators that convert other types to fp32, changed to convert to ``dtype``; also in fused stages."""
    if not is_dataclass(attrs) or not isinstance(attrs, Attrs):
        return attrs
    changes: dict[str, Any] = {}
    for f in fields(attrs):
        value = getattr(attrs, f.name)
        integers = isinstance(attrs, DequantizeAttrs) and f.name == "output_dtype" and value in (None, FP32)
        makes = isinstance(attrs, (CastAttrs, PackedGatherAttrs)) and isinstance(value, np.dtype) and value == FP32
        if integers or makes:
            changes[f.name] = dtype
        elif isinstance(value, tuple) and value and isinstance(value[0], Stage):
            changes[f.name] = tuple(replace(s, attrs=_retyped(s.attrs, dtype)) for s in value)
    return replace(attrs, **changes) if changes else attrs
