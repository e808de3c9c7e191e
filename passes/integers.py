"""Ops that compute on integers through Q and DQ around them: what marks them, and the rules that keep and clean up that form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.quant import DequantizeAttrs, QuantizeAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rewrite, Rule, RulePass
from optdnn.passes.support.precision import SHARES_SCALE, no_integers
from optdnn.types import FP32, INT8, UINT8

WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_MOVES = frozenset({"Transpose", "Reshape", "Unsqueeze", "Squeeze"})


def is_dequantized(graph: Graph, value: Value | None) -> bool:
    return value is not None and graph.op(value).kind == "DequantizeLinear"


def holds_integers(graph: Graph, dequantize: Op) -> bool:
    """True for the DequantizeLinear of a constant that an op reads beside a DequantizeLinear of data: weights or a bias."""
    if graph.constant_value(dequantize.inputs[0]) is None:
        return False
    for user in graph.users(dequantize.value):
        if user.kind in _MOVES and user.inputs[0] == dequantize.value:
            readers = [(u, user.value) for u in graph.users(user.value)]
        else:
            readers = [(user, dequantize.value)]
        for reader, value in readers:
            data = reader.input(0)
            if reader.kind in WEIGHTED and data != value and _of_data(graph, data):
                return True
    return False


def _of_data(graph: Graph, value: Value | None) -> bool:
    return is_dequantized(graph, value) and graph.constant_value(graph.op(value).inputs[0]) is None  # type: ignore[arg-type]


class _SamePair(Rewrite):
    """QuantizeLinear of a DequantizeLinear with the same scale and zero point: the integers as they were."""

    name = "requantize_same"
    kinds = frozenset({"QuantizeLinear"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        if not is_dequantized(graph, op.inputs[0]):
            return None
        before = graph.op(op.inputs[0])  # type: ignore[arg-type]
        source = before.inputs[0]
        assert source is not None
        if graph.type(source).dtype != op.outputs[0].type.dtype or op.attrs.block_size or before.attrs.block_size:
            return None
        if before.outputs[0].type.dtype != FP32:
            return None
        if not all(_equal(graph, before.input(i), op.input(i)) for i in (1, 2)):
            return None
        scale = graph.type(before.inputs[1])  # type: ignore[arg-type]
        if scale.dims not in ((), (1,)) and op.attrs.axis != before.attrs.axis:
            return None
        # A scale that is zero, infinite or not a number leaves nothing of the integers.
        numbers = graph.constant_value(before.inputs[1])
        if numbers is None or not (np.isfinite(numbers) & (np.abs(numbers) >= np.finfo(np.float32).tiny)).all():
            return Miss("its scale is not a constant normal number")
        return Match((op,), lambda p: source)


def _equal(graph: Graph, a: Value | None, b: Value | None) -> bool:
    """Equal constants; a zero point that is absent is zero."""
    if a == b:
        return True
    x, y = graph.constant_value(a), graph.constant_value(b)
    if a is None or b is None:
        present = x if x is not None else y
        return present is not None and not present.any()
    return x is not None and y is not None and x.dtype == y.dtype and x.size == y.size and bool((x == y).all())


class _TransposedWeights(Rewrite):
    """Transpose of dequantized constant weights: the integers are transposed once, and dequantized along the axis that moved."""

    name = "transpose_integers"
    kinds = frozenset({"Transpose"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        if not is_dequantized(graph, op.inputs[0]):
            return None
        before = graph.op(op.inputs[0])  # type: ignore[arg-type]
        integers = graph.constant_value(before.inputs[0])
        if integers is None or before.attrs.block_size:
            return None
        perm = op.attrs.perm or tuple(reversed(range(integers.ndim)))
        scale, zero = before.inputs[1], before.input(2)
        axis = perm.index(before.attrs.axis % integers.ndim) if integers.ndim else 0

        def build(p: Patch) -> Value:
            constant = p.constant(np.ascontiguousarray(integers.transpose(perm)), graph.output(before.inputs[0]).name)  # type: ignore[arg-type]
            return p.add("DequantizeLinear", [constant, scale, zero], replace(before.attrs, axis=axis))

        return Match((op,), build)


class _Unfolded(Rule):
    """QLinearConv and QLinearMatMul as the float operator between Q and DQ: one form for what follows.

    The sum of products is exact either way, and scaled and rounded once: results are equal but where a value falls on the very
    edge between two integers.
    """

    name = "qlinear_to_qdq"
    kinds = frozenset({"QLinearConv", "QLinearMatMul"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        x_scale, w_scale = op.inputs[1], op.inputs[4]
        assert x_scale is not None
        assert w_scale is not None
        if op.kind == "QLinearMatMul" and any(graph.type(v).dims not in ((), (1,)) for v in (x_scale, w_scale)):
            return Miss("it has scales per row or column")
        if any(graph.type(v).dtype != FP32 for v in (x_scale, w_scale)):
            return Miss("its scales are not fp32")
        if op.input(8) is not None and any(graph.constant_value(v) is None for v in (x_scale, w_scale)):
            return Miss("its scales are not constant, and the bias has their product")
        return Match((op,))

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        (op,) = match.ops
        patch = Patch(graph, match.ops)
        x = patch.add("DequantizeLinear", op.inputs[0:3], DequantizeAttrs(axis=0))
        w = patch.add("DequantizeLinear", op.inputs[3:6], DequantizeAttrs(axis=0))
        operands = [x, w]
        bias = op.input(8)
        if bias is not None:
            x_scale, w_scale = (graph.constant_value(op.inputs[i]) for i in (1, 4))
            assert x_scale is not None
            assert w_scale is not None
            steps = (x_scale.astype(np.float64).reshape(()) * w_scale.astype(np.float64)).astype(np.float32)
            steps = steps.reshape(()) if steps.size == 1 else steps
            constant = patch.constant(steps, f"{op.outputs[0].name}/bias_scale")
            operands.append(patch.add("DequantizeLinear", [bias, constant, None], DequantizeAttrs(axis=0)))
        if op.kind == "QLinearConv":
            a = op.attrs
            y = patch.add("Conv", operands, ConvAttrs(a.strides, a.pads, a.dilations, a.group, a.auto_pad))
        else:
            y = patch.add("MatMul", operands, MatMulAttrs())
        dtype = op.outputs[0].type.dtype
        attrs = QuantizeAttrs(dtype, axis=0)
        patch.replace(op.value, patch.add("QuantizeLinear", [y, op.inputs[6], op.inputs[7]], attrs))
        return patch


class _Recentred(Rule):
    """int8 around -128 as uint8 around 0, and uint8 around 128 as int8 around 0: the same numbers, with padding that is 0.

    For what QuantizeLinear makes and DequantizeLinear alone reads: what a network takes in or gives out keeps its type.
    """

    name = "recentre"
    kinds = frozenset({"QuantizeLinear"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        dtype, users = op.outputs[0].type.dtype, graph.users(op.value)
        shift = {INT8: 128, UINT8: -128}.get(dtype)
        if shift is None or _zeros(graph, op) != {-shift}:
            return None
        if any(u.kind != "DequantizeLinear" or u.inputs[0] != op.value for u in users):
            return Miss(f"{dtype.name} with zero point {-shift} is read by others than DequantizeLinear")
        zeros = [_zeros(graph, u) for u in users]
        if any(z is None or not all(0 <= v + 128 * (shift > 0) <= 255 for v in z) for z in zeros):
            return Miss("a zero point that reads it is not constant")
        return Match((op, *users), shift)

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        (op, *users), shift = match.ops, match.data
        patch = Patch(graph, match.ops)
        dtype = UINT8 if shift > 0 else INT8
        made = patch.add(
            "QuantizeLinear", op.inputs[:2], replace(op.attrs, output_dtype=dtype), name=op.outputs[0].name
        )
        for user in users:
            zero = graph.constant_value(user.input(2))
            moved = ((0 if zero is None else zero.astype(np.int16)) + np.int16(shift)).astype(dtype)
            operands = [made, user.inputs[1], patch.constant(np.asarray(moved), f"{user.outputs[0].name}/zero_point")]
            patch.replace(
                user.value, patch.add("DequantizeLinear", operands, user.attrs, name=user.outputs[0].name, src=user.src)
            )
        return patch


def _zeros(graph: Graph, op: Op) -> set[int] | None:
    """The different zero points of a Q or DQ; None where they are not constant."""
    value = op.input(2)
    array = graph.constant_value(value)
    if array is None:
        return {0} if value is None else None
    return set(map(int, array.reshape(-1).tolist()))


class _OnIntegers(Rule):
    """An op that only moves or compares elements, between DequantizeLinear and QuantizeLinear, on the integers. An operand of
    another scale than the result's is requantized in front of it: the op takes elements one by one, or the largest."""

    name = "on_integers"
    kinds = frozenset({"QuantizeLinear"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        assert op.inputs[0] is not None
        moved = graph.op(op.inputs[0])
        operands = moved.inputs[:1] if moved.kind == "Pad" else moved.inputs
        data = [v for v in operands if v is not None and graph.type(v).dtype == moved.outputs[0].type.dtype]
        if moved.kind not in SHARES_SCALE or not data or not all(is_dequantized(graph, v) for v in data):
            return None
        if len(moved.outputs) > 1 or no_integers(graph, moved, ranged=True) is not None:
            return Miss(f"{moved.kind} {moved.name} has no form on integers")
        if graph.users(moved.value) != [op]:
            return Miss(f"the float result of {moved.name} is read as well")
        scale = op.inputs[1]
        assert scale is not None
        if graph.type(scale).dims not in ((), (1,)) or op.attrs.block_size:
            return Miss("it has a scale per channel")
        if moved.kind == "Pad" and _zeros(graph, op) is None:
            return Miss("it pads with a zero point that is not constant")
        return Match((op, moved), data)

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        op, moved = match.ops
        patch = Patch(graph, match.ops)
        inputs = [v if v is None or v not in match.data else self._stored(graph, patch, op, v) for v in moved.inputs]
        if moved.kind == "Pad" and moved.attrs.mode == "constant":
            (zero,) = _zeros(graph, op) or {0}
            filler = np.asarray(zero, op.outputs[0].type.dtype)
            value = patch.constant(filler, f"{moved.outputs[0].name}/zero_point") if zero else None
            inputs = [*inputs[:2], value, *inputs[3:]]
        patch.replace(op.value, patch.add(moved.kind, inputs, moved.attrs, name=moved.outputs[0].name))
        return patch

    @staticmethod
    def _stored(graph: Graph, patch: Patch, op: Op, value: Value) -> Value:
        """The integers behind a dequantized value, with the scale and zero point of ``op``."""
        before = graph.op(value)
        stored = before.inputs[0]
        assert stored is not None
        same = graph.type(stored).dtype == op.outputs[0].type.dtype and not before.attrs.block_size
        if same and all(_equal(graph, before.input(i), op.input(i)) for i in (1, 2)):
            return stored
        return patch.add("QuantizeLinear", [value, *op.inputs[1:]], op.attrs, name=f"{op.outputs[0].name}/requantized")


class RecentreIntegers(RulePass):
    """Before anything runs on integers, for kernels that pad with zeros."""

    name = "recentre_integers"
    rules = (_Recentred(),)


class MoveIntegers(RulePass):
    """After precisions are assigned, for lowerings that run such ops on the integers themselves."""

    name = "move_integers"
    rules = (_OnIntegers(),)


class CanonicalizeIntegers(RulePass):
    """One form for explicitly quantized networks: Q and DQ around float operators, each where something is computed."""

    name = "canonicalize_integers"
    rules = (_Unfolded(), _SamePair(), _TransposedWeights())
