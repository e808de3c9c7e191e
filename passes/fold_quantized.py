"""DequantizeLinear, an operator and QuantizeLinear become one operator on 8-bit values, for which GPUs have kernels.

A product (Conv, Gemm, MatMul) of dequantized rows and dequantized constant weights accumulates integers exactly. Its epilogue
absorbs scales, bias, residual, activation and the rounding of the result, and what follows that up to the next rounding
(``passes/rules/rounded_results.py``). The remaining pointwise work becomes one Pointwise with
the conversions as stages. (Ops that only move or compare numbers run on integers already, by ``move_integers``.)

The float between an operator and its QuantizeLinear is no longer rounded. Apart from this, results equal the graph's results up to
one step of the last scale. So the pass belongs to a target's pipeline, after the assignment of precision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.epilogue import Epilogue, channel_vector
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops import requantize
from optdnn.ops.conv import ConvAttrs, resolved
from optdnn.ops.fused import PointwiseAttrs
from optdnn.ops.index import PadAttrs
from optdnn.ops.quantized import QuantizedConvAttrs, QuantizedMeanAttrs, RequantizeAttrs
from optdnn.ops.requantize import QuantParams, Scaling
from optdnn.passes.base import Match, Miss, Pass, PassContext, PassReport, Rule, RulePass, rule
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.fuse_pointwise import FuseGroup, FusePointwise
from optdnn.passes.integers import WEIGHTED
from optdnn.passes.patch_rows import quantized_patch_rows
from optdnn.passes.rules.integer_products import integer_product
from optdnn.passes.rules.quantized_results import (
    activated_result,
    dequantized_result,
    fake_quantize,
    quantized_siblings,
    repeated_dequantize,
    wide_result,
)
from optdnn.passes.rules.quantized_stages import dequantize_stages, quantize_stages
from optdnn.passes.rules.rounded_results import Rounded, longest
from optdnn.passes.support.centered import centered
from optdnn.passes.support.facts import RESHAPES, in_shape, integers, ints, operand, pads_image, producer
from optdnn.passes.support.integer_sums import SUMS
from optdnn.passes.support.paths import value_before
from optdnn.passes.support.precision import multiplies
from optdnn.passes.support.products import output_axis
from optdnn.passes.support.quantized_epilogue import quantized_epilogue
from optdnn.passes.support.quantized_values import (
    EIGHT_BITS,
    FEWER_BITS,
    dequantized,
    dequantized_channels,
    quantization,
    quantization_of_channels,
    source,
)
from optdnn.types import DTYPES, FP32, Array, is_float

MOVES = frozenset({"Concat", "Expand", "Gather", "Pad", "Slice", "Split", "Transpose"})
"""Kinds whose results are views or copies: their kernels do not round."""
PRODUCTS = frozenset({"QuantizedConv", "QuantizedMatMul"})
MAX_STAGES = 48
"""Most stages of one Pointwise op with conversions: a conversion has up to five, and a GELU of quantized operators 16 stages."""


@dataclass(frozen=True)
class RunParams:
    """Type, scale and zero point of data with a computed scale, and the QuantizeLinear that rounds them, if there is one."""

    dtype: str
    scale: Value
    zero: Value | None
    rounds: Op | None


def dequantized_in_run(graph: Graph, value: Value | None) -> tuple[Value, RunParams] | None:
    """The 8-bit value that is dequantized to ``value`` by one computed scale, with its parameters; None for other values."""
    op = source(graph, value)
    if op is None or graph.constant_value(op.inputs[0]) is not None or op.attrs.block_size:
        return None
    stored, scale, zero = operand(op), operand(op, 1), op.input(2)
    fits = graph.type(stored).dtype.name in ("int8", "uint8") and graph.type(scale).dtype == FP32
    if not fits or any(v is not None and graph.type(v).dims not in ((), (1,)) for v in (scale, zero)):
        return None
    if zero is not None and (known := graph.constant_value(zero)) is not None and not known.any():
        zero = None
    rounds = producer(graph, stored, {"QuantizeLinear"})
    return stored, RunParams(graph.type(stored).dtype.name, scale, zero, rounds)


def unrounded(graph: Graph, value: Value) -> Value:
    """The float before a value's rounding to 8 bits and back, if it has the same type; else the value itself.

    Reading the float is more exact, and saves the DequantizeLinear."""
    op = source(graph, value)
    quantizer = None if op is None else producer(graph, op.inputs[0], {"QuantizeLinear"})
    return value if quantizer is None or graph.type(operand(quantizer)) != graph.type(value) else operand(quantizer)


def weights(graph: Graph, value: Value | None) -> tuple[Array, Array, int] | None:
    """int8 (or fp8) weights, their scales (one or one per entry of an axis, float64), and that axis (counted from 0).

    Integers of 4 and 2 bits become int8, for which there are kernels."""
    op = source(graph, value)
    array = None if op is None else graph.constant_value(op.inputs[0])
    if op is None or array is None or array.dtype.name not in (*EIGHT_BITS, *FEWER_BITS) or op.attrs.block_size:
        return None
    scale, zero = graph.constant_value(op.inputs[1]), graph.constant_value(op.input(2))
    if scale is None or (op.input(2) is not None and zero is None):
        return None
    # uint8 around 128 is int8 around 0; so are other zero points, if the values do not use the whole range
    if not is_float(array.dtype):
        stored = centered(array, zero, op.attrs.axis % array.ndim)
        if stored is None:
            return None
        array = stored
    return array, scale.astype(np.float64).reshape(-1), op.attrs.axis % array.ndim


def _no_weights(graph: Graph, op: Op) -> str:
    """Why the second operand of a product is no weights on integers."""
    before = source(graph, op.inputs[1])
    if before is None:
        return "its input is quantized, but its second operand is not a quantized constant"
    array = graph.constant_value(before.inputs[0])
    if array is None:
        return "both of its operands are computed: there is no kernel that multiplies computed integers"
    if before.attrs.block_size:
        return "its weights have a scale per block"
    if array.dtype.name not in (*EIGHT_BITS, *FEWER_BITS):
        return f"its weights are {array.dtype.name}"
    known = all(v is None or graph.constant_value(v) is not None for v in before.inputs[1:])
    return "its weights minus their zero points exceed 8 bits" if known else "the scales of its weights are computed"


def depthwise_data(
    graph: Graph, op: Op, w: tuple[Array, Array, int]
) -> tuple[tuple[Value, QuantParams] | None, tuple[Array, Array, int]]:
    """Data with a scale per channel that a depthwise convolution reads, and its weights with these scales.

    Each result reads one channel of the data, so the scales may as well belong to the weights. NNCF quantizes images like this."""
    array, scale, axis = w
    found = dequantized_channels(graph, op.inputs[0], 1) if op.kind == "Conv" else None
    if found is None or array.shape[1] != 1 or (scale.size != 1 and axis != 0) or op.attrs.group != found[2].size:
        return None, w
    stored, params, scales = found
    return (stored, params), (array, scale * np.repeat(scales, array.shape[0] // scales.size), 0)


def bias(graph: Graph, value: Value | None) -> Array | None:
    """A constant operand in float64; it may be a DequantizeLinear of 32-bit integers."""
    array = graph.constant_value(value)
    if array is not None:
        return array.astype(np.float64)
    op = source(graph, value)
    stored = None if op is None else graph.constant_value(op.inputs[0])
    scale = None if op is None else graph.constant_value(op.inputs[1])
    if op is None or stored is None or scale is None:
        return None
    if op.input(2) is not None and np.any(graph.constant_value(op.input(2))):
        return None
    return np.asarray(stored.astype(np.float64) * scale.astype(np.float64).reshape(-1))


@rule("quantized_product", {"Conv", "Gemm", "MatMul"})
def quantized_product(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """Conv, Gemm or MatMul of dequantized rows and dequantized constant weights, with the QuantizeLinear after it."""
    x: tuple[Value, QuantParams | RunParams] | None = dequantized(graph, op.inputs[0])
    x, w = x or dequantized_in_run(graph, op.inputs[0]), weights(graph, op.inputs[1])
    if x is None and w is not None:
        x, w = depthwise_data(graph, op, w)
    if x is None and w is None:
        return None
    if x is None or w is None:
        return Miss("its weights are quantized, but its input is not" if x is None else _no_weights(graph, op))
    fp8 = "float8" in x[1].dtype and not multiplies(context.target, "fp8")
    reason = f"there are no kernels of fp8 for {context.target}" if fp8 else _refusal(graph, op, x[1], w)
    if reason is not None:
        return Miss(reason)
    first, scales = _stored(graph, op, x[1])
    of_channels = not isinstance(x[1], RunParams)
    ep, numbers = quantized_epilogue(graph, op, _axis(op), numbers=of_channels)
    residual = dequantized(graph, ep.residual) if ep.residual is not None else None
    if ep.residual is not None and first is not None and not _fits(residual, first[1]):
        ep, numbers = quantized_epilogue(graph, op, _axis(op), residual=False, numbers=of_channels)
    result = None
    if first is not None and not ep.rest and scales is not None:
        result, scales = Rounded.with_scales(*first, scales, ep.rendered, numbers)
    elif first is not None and not ep.rest:
        columns = 0 if numbers is not None else _columns(op, x[1])
        result = longest(graph, *first, adds=ep.residual is None, before=ep.rendered, columns=columns)
    if result is not None and result.stages:
        ep = replace(ep, rendered=[*ep.rendered, *result.stages])
        if result.residual is not None:
            ep, residual = replace(ep, residual=result.residual[0]), result.residual

    def build(patch: Patch) -> None:
        out = None if result is None else result.params
        dims, added = op.outputs[0].type.dims, residual
        if result is not None and result.residual is not None and graph.type(result.residual[0]).dims != dims:
            added = in_shape(patch, result.residual[0], dims), result.residual[1]
        more = numbers if result is None or result.numbers is None else result.numbers
        made = _product(patch, op, x, w, ep, out, added, more, None if result is None else scales)
        if ep.rest:
            made = patch.add("Pointwise", [made, *ep.rest_operands], PointwiseAttrs(epilogue=tuple(ep.rest)))
        if result is None:
            patch.replace(op.value, made)
            return
        shape = result.store.outputs[0].type.dims
        patch.replace(result.store.value, made if shape == dims else in_shape(patch, made, shape))

    covered = () if result is None else (*result.ops, result.store)
    return Match((op, *covered), build)


def _refusal(graph: Graph, op: Op, x: QuantParams | RunParams, w: tuple[Array, Array, int]) -> str | None:
    array, scale, axis = w
    if isinstance(x, RunParams) and pads_image(op) and x.rounds is None and x.zero is not None:
        return "it pads with a computed zero point, and its data are not rounded by a QuantizeLinear"
    if (x.dtype == "float8_e4m3fn") != (array.dtype.name == "float8_e4m3fn"):
        return f"no kernel multiplies {x.dtype} by {array.dtype.name}"
    if op.attrs.prologue:
        return "it has a prologue"
    if op.kind == "Gemm" and op.attrs.transA:
        return "its first operand is transposed"
    if array.ndim != (2 if op.kind != "Conv" else array.ndim) or array.ndim > 4:
        return f"its weights have {array.ndim} axes"
    if scale.size != 1 and axis != output_axis(op):
        return f"its weights have scales along axis {axis}, not per output channel"
    if not op.outputs[0].type.is_static or (op.kind != "Conv" and (graph.type(operand(op)).rank or 0) < 2):
        return "its size is not fixed"
    if op.input(2) is not None and op.kind != "MatMul":
        given = bias(graph, op.input(2))
        by_channel = given is not None and (
            op.kind == "Conv" or channel_vector(given, op.outputs[0].type.static_shape, -1) is not None
        )
        return None if by_channel else "its bias is not constant, or not per channel"
    return None


def _stored(graph: Graph, op: Op, x: QuantParams | RunParams) -> tuple[tuple[Op, QuantParams] | None, Array | None]:
    """The QuantizeLinear that reads the product alone, and its scales if each channel has its own."""
    first = quantization(graph, op.value)
    if first is not None or isinstance(x, RunParams) or "float8" in x.dtype:
        return first, None
    found = quantization_of_channels(graph, op.value, _axis(op))
    return (None, None) if found is None else (found[:2], found[2])


def _columns(op: Op, x: QuantParams | RunParams) -> int:
    """The columns of a product whose launch may add numbers to each, after a rounding; 0 for others."""
    return 0 if op.kind == "Conv" or isinstance(x, RunParams) else int(op.outputs[0].type.static_shape[-1])


def _axis(op: Op) -> int:
    return 1 if op.kind == "Conv" else -1


def _product(
    patch: Patch, op: Op, rows: tuple[Value, QuantParams | RunParams], w: tuple[Array, Array, int], ep: Epilogue,
    out: QuantParams | None, residual: tuple[Value, QuantParams] | None, added: Array | None, scales: Array | None,
) -> Value:  # fmt: skip
    graph, (stored, x), (array, scale, _) = patch.graph, rows, w
    channels = op.outputs[0].type.static_shape[_axis(op)]
    alpha = op.attrs.alpha if op.kind == "Gemm" else 1.0
    total = np.zeros(channels)
    given = bias(graph, op.input(2)) if op.kind != "MatMul" else None
    if given is not None:
        total = total + given.reshape(-1) * (op.attrs.beta if op.kind == "Gemm" else 1.0)
    if ep.bias is not None:
        total = total + ep.bias
    second: Value | None = ep.residual
    if second is not None and out is None and "float8" in x.dtype:
        second = unrounded(graph, second)
    around: QuantParams | None = QuantParams(op.outputs[0].type.dtype.name, 1.0) if second is not None else None
    if second is not None and out is not None:
        assert residual is not None
        second, around = residual
    factors = np.broadcast_to(scale * (1.0 if isinstance(x, RunParams) else x.scale) * alpha, (channels,))
    if op.kind == "MatMul" or (op.kind == "Gemm" and not op.attrs.transB):
        array = np.ascontiguousarray(array.T)
    if isinstance(x, QuantParams) and x.zero:  # the kernels accumulate stored values, without their zero point
        total = total - factors * (x.zero * array.astype(np.float64).reshape(channels, -1).sum(1))
    if scales is not None:
        factors, total = factors / scales, total / scales
    numbers = requantize.scaling(ep.rendered, factors, total, out=out, residual=around, numbers=added)
    if op.kind == "Conv":
        a: ConvAttrs = resolved(op.attrs, graph.type(operand(op)), graph.type(operand(op, 1)))
        fields, pads = _fields(numbers, op, out, around), a.pads
        if isinstance(x, RunParams) and x.zero is not None and any(pads):
            stored, pads = _padded(patch, x, pads), (0,) * len(pads)
        padding = x.zero if isinstance(x, QuantParams) and any(pads) else 0
        attrs: RequantizeAttrs = QuantizedConvAttrs(
            **fields, strides=a.strides, pads=pads, dilations=a.dilations, group=a.group, input_zero=padding
        )
    else:
        attrs = RequantizeAttrs(**_fields(numbers, op, out, around))
    name = op.outputs[0].name
    channel = numbers.channel
    last: list[Value | None] = [] if second is None else [second]
    if isinstance(x, RunParams):
        sums = array.astype(np.float32).reshape(channels, -1).sum(1, dtype=np.float64, keepdims=True)
        channel = np.concatenate([channel, sums.astype(np.float32)], 1)
        last = [second, None, x.scale, x.zero or patch.constant(np.zeros((), x.dtype))]
    operands = [stored, patch.constant(array, f"{name}.weights"), patch.constant(channel, f"{name}.scales")]
    kind = "QuantizedConv" if op.kind == "Conv" else "QuantizedMatMul"
    return patch.add(kind, [*operands, *last], attrs, name=name)


def _padded(patch: Patch, x: RunParams, pads: tuple[int, ...]) -> Value:
    """The rounded data with their zero point as padding: zeros around the unrounded data become the zero point."""
    graph, axes = patch.graph, len(pads) // 2
    assert x.rounds is not None
    data = operand(x.rounds)
    around = (0, 0, *pads[:axes], 0, 0, *pads[axes:])
    for pad in (u for u in graph.users(data) if u.kind == "Pad" and u.attrs == PadAttrs() and len(u.inputs) == 2):
        if ints(graph, pad.inputs[1]) != around:
            continue
        for user in graph.users(pad.value):
            if user.kind == "QuantizeLinear" and user.inputs[1:] == x.rounds.inputs[1:]:
                return user.value
    name = x.rounds.outputs[0].name
    image = patch.add("Pad", [data, integers(patch, around, "pads")], PadAttrs(), name=f"{name}.padded")
    return patch.add("QuantizeLinear", [image, *x.rounds.inputs[1:]], x.rounds.attrs, name=name)


def _fits(residual: tuple[Value, QuantParams] | None, out: QuantParams) -> bool:
    """Whether a kernel that stores its result with ``out`` can add that residual."""
    return residual is not None and ("float8" in residual[1].dtype) == ("float8" in out.dtype)


def _fields(numbers: Scaling, op: Op, out: QuantParams | None, residual: QuantParams | None) -> dict[str, Any]:
    r = numbers.requantize
    return {
        "stages": tuple(tuple(s) for s in numbers.stages), "residual_scale": r.residual_scale,
        "residual_zero": residual.zero if residual is not None else 0, "low": r.low, "high": r.high, "zero": r.zero,
        "output_dtype": op.outputs[0].type.dtype if out is None else np.dtype(_DTYPES[out.dtype]),
    }  # fmt: skip


_DTYPES = {d.name: d for d in DTYPES.values()}


@rule("quantized_mean", {"GlobalAveragePool"})
def quantized_mean(graph: Graph, op: Op) -> Match | Miss | None:
    """DQ -> GlobalAveragePool -> Q."""
    x, result = dequantized(graph, op.inputs[0]), quantization(graph, op.value)
    if x is None or result is None or not op.outputs[0].type.is_static:
        return None
    if "float8" in x[1].dtype or "float8" in result[1].dtype:
        return Miss("there is no mean of fp8")
    stored, given, out = x[0], x[1], result[1]
    if graph.type(stored).static_shape[1] % 4:
        return Miss("the mean of integers needs a multiple of 4 channels")
    pixels = int(np.prod(graph.type(stored).static_shape[2:]))
    low, high = (float(b - out.zero) for b in requantize.BOUNDS[out.dtype])
    factor = float(np.float32(given.scale / (out.scale * pixels)))
    attrs = QuantizedMeanAttrs(factor, given.zero, low, high, out.zero, _DTYPES[out.dtype])
    return Match((result[0], op), lambda patch: patch.add("QuantizedMean", [stored], attrs, name=op.outputs[0].name))


class _Sweep(RulePass):
    def __init__(self, *rules: Rule):
        self.rules = rules


class _Joined(FusePointwise):
    """Fuses pointwise work with conversions. A value that its producer's kernel can round stays with the producer."""

    rules = (FuseGroup(MAX_STAGES, lambda graph, one: not _stored_narrow(graph, one)),)


def _stored_narrow(graph: Graph, one: Op) -> bool:
    """Whether the producer of a pointwise op with an 8-bit result can round in its own kernel: it is no product, pointwise op,
    view or copy, its own result is a float, and the scale is constant."""
    if any(v is not None and graph.constant_value(v) is None for v in one.inputs[1:]):
        return False
    if graph.type(operand(one)).dtype.itemsize == 1:
        return False
    inner = graph.op(value_before(graph, operand(one), RESHAPES))
    pointwise = inner.kind in STRUCTURAL or inner.definition.traits.pointwise
    return one.outputs[0].type.dtype.itemsize == 1 and not pointwise and inner.kind not in WEIGHTED | PRODUCTS | MOVES


class FoldQuantized(Pass):
    """Only for GPUs. Products come first, and conversions become stages only if no other rule can absorb them."""

    name = "fold_quantized"
    sweeps = (
        _Sweep(quantized_product, quantized_mean, integer_product),
        _Sweep(quantized_patch_rows, quantized_siblings, wide_result),
        _Sweep(dequantized_result, activated_result),
        _Sweep(fake_quantize),
        FuseEpilogue(norms_add=True, rounded=True),  # sums of rounded values, which Q and DQ kept apart
        _Sweep(repeated_dequantize),
        _Sweep(quantize_stages),
        _Sweep(dequantize_stages),
        _Joined(),
    )

    def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
        quantized = graph.kinds().keys() & {"DequantizeLinear", "QuantizeLinear", *SUMS}
        if context.on_gpu and multiplies(context.target, "int8") and quantized:
            for sweep in self.sweeps:
                sweep.run(graph, context, report)
