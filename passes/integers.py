"""Quantized networks get one form, float ops between DequantizeLinear and QuantizeLinear, and rules simplify this form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.checks import elements
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.quant import DequantizeAttrs, QuantizeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.moved_integers import dequantize_after_moves
from optdnn.passes.rules.never_nan import never_nan
from optdnn.passes.rules.quantized_concats import quantize_before_pool, quantize_parts
from optdnn.passes.rules.repeated_roundings import clipped_rounding, rescaled_rounding, same_grid, same_pair
from optdnn.passes.rules.rounded_pads import pad_after_rounding
from optdnn.passes.support.facts import operand, producer
from optdnn.passes.support.moved_values import from_integers
from optdnn.passes.support.paths import path_to, repeated
from optdnn.passes.support.precision import SHARES_SCALE, no_integers
from optdnn.passes.support.quantized_values import is_dequantized, same_scale, zeros_of
from optdnn.types import FP32, INT8, UINT8, is_float

WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_MOVES = frozenset({"Transpose", "Reshape", "Unsqueeze", "Squeeze"})


def holds_integers(graph: Graph, dequantize: Op) -> bool:
    """Whether a DequantizeLinear gives the constant weights of an op that also reads dequantized data, or elements of such data."""
    if graph.constant_value(dequantize.inputs[0]) is None:
        return False
    for user in graph.users(dequantize.value):
        if user.kind in _MOVES and user.inputs[0] == dequantize.value:
            readers = [(u, user.value) for u in graph.users(user.value)]
        else:
            readers = [(user, dequantize.value)]
        for reader, value in readers:
            data = reader.input(0)
            if reader.kind in WEIGHTED and data != value and from_integers(graph, data):
                return True
    return False


@rule("transpose_integers", {"Transpose"})
def transposed_weights(graph: Graph, op: Op) -> Match | Miss | None:
    """A Transpose of dequantized constant weights: the build transposes the integers, and the axis of the scales moves along."""
    before = producer(graph, op.inputs[0], {"DequantizeLinear"})
    stored = None if before is None else graph.constant_value(before.inputs[0])
    if before is None or stored is None or before.attrs.block_size:
        return None
    perm = op.attrs.perm or tuple(reversed(range(stored.ndim)))
    axis = perm.index(before.attrs.axis % stored.ndim) if stored.ndim else 0

    def build(patch: Patch) -> Value:
        name = graph.output(operand(before)).name
        constant = patch.constant(np.ascontiguousarray(stored.transpose(perm)), name)
        scale = [before.inputs[1], before.input(2)]
        return patch.add("DequantizeLinear", [constant, *scale], replace(before.attrs, axis=axis))

    return Match((op,), build)


@rule("qlinear_to_qdq", {"QLinearConv", "QLinearMatMul"})
def unfolded(graph: Graph, op: Op) -> Match | Miss | None:
    """QLinearConv and QLinearMatMul become the float operator between Q and DQ: one form for all later passes.

    Both forms sum the products exactly, and scale and round the sum once: results are equal except where a value falls on the
    edge between two integers.
    """
    scales = operand(op, 1), operand(op, 4)
    columns = op.kind == "QLinearMatMul" and graph.type(scales[1]).dims not in ((), (1,))
    if op.kind == "QLinearMatMul" and graph.type(scales[0]).dims not in ((), (1,)):
        return Miss("it has scales per row")
    if columns and not _per_column(graph, op):
        return Miss("its second operand has scales per column, and other zero points or axes than a matrix with these")
    if any(graph.type(v).dtype != FP32 for v in scales):
        return Miss("its scales are not fp32")
    constants = [a.astype(np.float64) for v in scales if (a := graph.constant_value(v)) is not None]
    if op.input(8) is not None and len(constants) < 2:
        return Miss("its scales are not constant, and the bias has their product")
    mixed = len({graph.type(operand(op, i)).dims in ((), (1,)) for i in (4, 5)}) > 1
    weights = [graph.constant_value(op.inputs[i]) for i in (4, 5)]
    if mixed and any(a is None for a in weights):
        return Miss("its weights have a scale or a zero point for each channel, not both, and they are not constant")

    def build(patch: Patch) -> Value:
        plain = DequantizeAttrs(axis=0)
        of_columns = DequantizeAttrs(axis=1) if columns else plain
        own = op.inputs[4:6]
        if mixed:  # DequantizeLinear wants both of one shape
            pair = np.broadcast_arrays(*(np.asarray(a).reshape(-1) for a in weights))
            own = tuple(patch.constant(np.array(a), f"{op.outputs[0].name}/weights") for a in pair)
        given = ((op.inputs[:3], plain), ((op.inputs[3], *own), of_columns))
        operands = [patch.add("DequantizeLinear", values, attrs) for values, attrs in given]
        if op.input(8) is not None:
            steps = (constants[0].reshape(()) * constants[1]).astype(np.float32)
            steps = steps.reshape(()) if steps.size == 1 else steps
            constant = patch.constant(steps, f"{op.outputs[0].name}/bias_scale")
            operands.append(patch.add("DequantizeLinear", [op.inputs[8], constant, None], plain))
        a = op.attrs
        if op.kind == "QLinearConv":
            y = patch.add("Conv", operands, ConvAttrs(a.strides, a.pads, a.dilations, a.group, a.auto_pad))
        else:
            y = patch.add("MatMul", operands, MatMulAttrs())
        attrs = QuantizeAttrs(op.outputs[0].type.dtype, axis=0)
        return patch.add("QuantizeLinear", [y, op.inputs[6], op.inputs[7]], attrs)

    return Match((op,), build)


def _per_column(graph: Graph, op: Op) -> bool:
    """Whether the second operand of a QLinearMatMul is a matrix with a scale and a zero point for each column."""
    scale, zero = graph.type(operand(op, 4)), graph.type(operand(op, 5))
    return len(graph.type(operand(op, 3)).dims) == 2 and len(scale.dims) == 1 and scale.dims == zero.dims


@rule("shift_zero_point", {"QuantizeLinear"})
def shift_zero_point(graph: Graph, op: Op) -> Match | Miss | None:
    """int8 with zero point -128 becomes uint8, uint8 with zero point 128 becomes int8, both with zero point 0: padding is then 0.

    Only for the result of a QuantizeLinear that is read only by DequantizeLinears: inputs and outputs of the network keep their
    types.
    """
    dtype, users = op.outputs[0].type.dtype, graph.users(op.value)
    shift = {INT8: 128, UINT8: -128}.get(dtype)
    if shift is None or zeros_of(graph, op) != {-shift}:
        return None
    if any(u.kind != "DequantizeLinear" or u.inputs[0] != op.value for u in users):
        return Miss(f"other operators than DequantizeLinear read {dtype.name} with zero point {-shift}")
    zeros = [zeros_of(graph, u) for u in users]
    if any(z is None or not all(0 <= v + 128 * (shift > 0) <= 255 for v in z) for z in zeros):
        return Miss("a zero point that reads it is not constant")
    shifted = replace(op.attrs, output_dtype=UINT8 if shift > 0 else INT8)

    def build(patch: Patch) -> None:
        quantized = patch.add("QuantizeLinear", op.inputs[:2], shifted, name=op.outputs[0].name)
        for user in users:
            name, zero = user.outputs[0].name, graph.constant_value(user.input(2))
            moved = ((0 if zero is None else zero.astype(np.int16)) + np.int16(shift)).astype(shifted.output_dtype)
            operands = [quantized, user.inputs[1], patch.constant(np.asarray(moved), f"{name}/zero_point")]
            new = patch.add("DequantizeLinear", operands, user.attrs, name=name, src=user.src)
            patch.replace(user.value, new)

    return Match((op, *users), build)


@rule("on_integers", {"QuantizeLinear"})
def on_integers(graph: Graph, op: Op) -> Match | Miss | None:
    """An op that only moves or compares elements, between DequantizeLinear and QuantizeLinear, runs on the integers.

    An operand with another scale than the result's is requantized before the op. That is allowed because the op only copies
    elements, or takes the largest one.
    """
    moved = graph.op(operand(op))
    operands = moved.inputs[:1] if moved.kind == "Pad" else moved.inputs
    data = [v for v in operands if v is not None and graph.type(v).dtype == moved.outputs[0].type.dtype]
    if moved.kind not in SHARES_SCALE or not data or not all(is_dequantized(graph, v) for v in data):
        return None
    if len(moved.outputs) > 1 or no_integers(graph, moved, ranged=True) is not None:
        return Miss(f"{moved.kind} {moved.name} has no integer form")
    narrow = op.outputs[0].type.dtype
    if moved.kind in ("MaxPool", "GlobalMaxPool") and narrow not in (INT8, UINT8) and not is_float(narrow):
        return Miss(f"{moved.kind} can compare only floats and 8-bit integers, not {narrow.name}")
    if graph.users(moved.value) != [op]:
        return Miss(f"the float result of {moved.name} has another reader")
    if graph.type(operand(op, 1)).dims not in ((), (1,)) or op.attrs.block_size:
        return Miss("it has a scale per channel")
    zeros = zeros_of(graph, op)
    if moved.kind == "Pad" and zeros is None:
        return Miss("it pads with a zero point that is not constant")

    def build(patch: Patch) -> Value:
        inputs = [_stored(graph, patch, op, v) if v in data else v for v in moved.inputs]
        if moved.kind == "Pad":  # other modes ignore the number to pad with, which is a float
            (zero,) = zeros or {0}
            filler = np.asarray(zero, op.outputs[0].type.dtype)
            used = zero and moved.attrs.mode == "constant"
            value = patch.constant(filler, f"{moved.outputs[0].name}/zero_point") if used else None
            inputs = [*inputs[:2], value, *inputs[3:]]
        return patch.add(moved.kind, inputs, moved.attrs, name=moved.outputs[0].name)

    return Match((op, moved), build)


def _stored(graph: Graph, patch: Patch, op: Op, value: Value) -> Value:
    """The integers of a dequantized value, with the scale and zero point of ``op``."""
    before = graph.op(value)
    stored = operand(before)
    if graph.type(stored).dtype == op.outputs[0].type.dtype and same_scale(graph, before, op):
        return stored
    return patch.add("QuantizeLinear", [value, *op.inputs[1:]], op.attrs, name=f"{op.outputs[0].name}/requantized")


@rule("split_integers", {"Split"})
def split_integers(graph: Graph, op: Op) -> Match | Miss | None:
    """A Split between DequantizeLinear and QuantizeLinears splits the integers; each part is dequantized by itself.

    A part of the same scale as its QuantizeLinear needs neither."""
    whole = operand(op)
    if not is_dequantized(graph, whole):
        return None
    before, stored, stays = graph.op(whole), operand(graph.op(whole)), False
    readers = {v: graph.users(v) for v in op.values}
    for part, users in readers.items():
        stays = stays or not users or any(u.kind != "QuantizeLinear" or u.inputs[0] != part for u in users)
    if stays:
        return Miss(f"a part of {op.name} is read as a float")
    if graph.type(operand(before, 1)).dims not in ((), (1,)) or before.attrs.block_size:
        return Miss("it has a scale per channel")

    def build(patch: Patch) -> None:
        names = [out.name for out in op.outputs]
        split = patch.add_op("Split", [stored, *op.inputs[1:]], op.attrs, outputs=len(names), names=names)
        for part, users in readers.items():
            made = Value(split.id, part.port)
            for user in users:
                if user.outputs[0].type.dtype == graph.type(stored).dtype and same_scale(graph, before, user):
                    patch.replace(user.value, made)
            patch.replace(part, patch.add("DequantizeLinear", [made, *before.inputs[1:]], before.attrs))

    return Match((op,), build)


class ShiftZeroPoints(RulePass):
    """int8 with zero point -128 becomes uint8 with zero point 0, and uint8 with 128 int8 with 0, for kernels that pad with zeros.

    Runs before any op is moved to integers."""

    name = "shift_zero_points"
    rules = (shift_zero_point,)


@rule("resized_integers", {"Resize"})
def resized_integers(graph: Graph, op: Op) -> Match | Miss | None:
    """Integers are interpolated as floats, rounded and kept within their range (in files of ONNX Runtime's QOperator format)."""
    dtype = op.outputs[0].type.dtype
    if op.attrs.mode == "nearest" or is_float(dtype):
        return None
    if not (dtype.kind in "iu" and dtype.itemsize <= 2):
        return Miss(f"it interpolates {dtype.name}, which fp32 cannot represent exactly")
    info = np.iinfo(dtype)

    def build(patch: Patch) -> Value:
        floats = patch.add("Cast", [operand(op)], CastAttrs(FP32))
        y = patch.add("Round", [patch.add("Resize", [floats, *op.inputs[1:]], op.attrs)])
        bounds = [patch.constant(np.array(n, np.float32)) for n in (info.min, info.max)]
        return patch.add("Cast", [patch.add("Clip", [y, *bounds])], CastAttrs(dtype))

    return Match((op,), build)


@rule("quantize_before_resize", {"QuantizeLinear"})
def quantize_before_resize(graph: Graph, op: Op) -> Match | Miss | None:
    """The nearest elements of a float image are selected after they are quantized, if they become more."""
    resize = producer(graph, op.inputs[0], {"Resize"})
    if resize is None or resize.attrs.mode != "nearest" or not graph.type(operand(resize)).is_static:
        return None
    if resize.attrs.coordinate_transformation_mode == "tf_crop_and_resize":
        return None  # it may fill with a number
    if not resize.outputs[0].type.is_static or elements(resize.outputs[0].type) <= elements(
        graph.type(operand(resize))
    ):
        return None
    if graph.users(resize.value) != [op]:
        return Miss(f"the float result of {resize.name} has another reader")
    if graph.type(operand(op, 1)).dims not in ((), (1,)) or op.attrs.block_size:
        return Miss("it has a scale per channel")

    def build(patch: Patch) -> Value:
        y = patch.add("QuantizeLinear", [operand(resize), *op.inputs[1:]], op.attrs)
        return patch.add("Resize", [y, *resize.inputs[1:]], resize.attrs, src=resize.src)

    return Match((op, resize), build)


_NARROWS = frozenset(
    {
        "Attention",
        "LayerNormalization",
        "RMSNormalization",
        "LpNormalization",
        "Softmax",
        "AveragePool",
        "GlobalAveragePool",
    }
)
"""Kinds whose launches may store their 16-bit results in 8 bits."""
_SUMS = WEIGHTED | {"GlobalAveragePool"}
"""Kinds that sum 8-bit data as integers, and may store 8 bits."""


@rule("quantize_before_moves", {"QuantizeLinear"})
def quantize_before_moves(graph: Graph, op: Op) -> Match | Miss | None:
    """A result is quantized before it is only moved: the launch that computes it can store 8 bits.

    After other operators, it is quantized between a Transpose and Reshapes: the launch that quantizes transposes as well."""
    moves = path_to(graph, operand(op), _MOVES)
    source = graph.op(operand(moves[-1])) if moves else None
    if source is None or source.kind == "DequantizeLinear":
        return None
    if not _may_store_integers(graph, source):
        turn = next((k for k, move in enumerate(moves) if move.kind == "Transpose"), 0)
        moves = moves[:turn]
    if not moves:
        return None
    if any(graph.users(move.value) != [user] for move, user in zip(moves, (op, *moves), strict=False)):
        return Miss("its float operand has another reader")
    if graph.type(operand(op, 1)).dims not in ((), (1,)) or op.attrs.block_size:
        return Miss("it has a scale per channel")

    def build(patch: Patch) -> Value:
        return repeated(patch, patch.add("QuantizeLinear", [operand(moves[-1]), *op.inputs[1:]], op.attrs), moves)

    return Match((op, *moves), build)


def _may_store_integers(graph: Graph, op: Op) -> bool:
    """Whether the launch of an operator on floats may store 8 bits."""
    if op.kind in _SUMS and is_dequantized(graph, op.inputs[0]):
        return True
    return op.kind in _NARROWS and op.outputs[0].type.dtype.itemsize == 2


class MoveIntegers(RulePass):
    """Ops that only move or compare elements, between DequantizeLinear and QuantizeLinear, run on the integers.

    Runs after precisions are assigned, for targets that run such ops on integers."""

    name = "move_integers"
    rules = (
        dequantize_after_moves,
        on_integers,
        split_integers,
        resized_integers,
        quantize_before_resize,
        quantize_before_pool,
        quantize_before_moves,
        quantize_parts,
    )


class CanonicalizeIntegers(RulePass):
    """Explicitly quantized networks get one form: QuantizeLinear and DequantizeLinear around float operators."""

    name = "canonicalize_integers"
    rules = (
        unfolded,
        never_nan,  # before repeated roundings: two may remain
        pad_after_rounding,  # before repeated roundings: two may remain
        same_pair,
        same_grid,
        clipped_rounding,
        rescaled_rounding,
        transposed_weights,
    )
