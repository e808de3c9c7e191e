"""Quantized products of the same data become one product. Rounded values that only operators on floats read stay floats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.epilogue import Epilogue, absorb_unary
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops import requantize
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.index import SplitAttrs
from optdnn.ops.quantized import RequantizeAttrs
from optdnn.ops.unary import FakeQuantizeAttrs
from optdnn.passes.base import Match, Miss, PassContext, rule
from optdnn.passes.fuse_siblings import LAUNCH_BYTES
from optdnn.passes.support.facts import RESHAPES, bytes_of, integers, is_pointwise, operand
from optdnn.passes.support.quantized_values import SIXTEEN_BITS, quant_params
from optdnn.passes.support.stages import ANCHORS, with_stages
from optdnn.runtime.cuda.compile import render
from optdnn.types import FP32, Array, DType, is_float

_RESIDUAL = 3
_ROUNDED = ("int8", "uint8", *SIXTEEN_BITS)


@rule("quantized_siblings", {"QuantizedConv", "QuantizedMatMul"})
def quantized_siblings(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """Products of the same data become one product with concatenated weights, and a Split, whose parts are read in place. So do
    convolutions, unless a copy of the parts would take longer than what is saved."""
    x = operand(op)
    others = [u for u in graph.users(x) if u.kind == op.kind and u.inputs[0] == x and u is not op]
    if not others:
        return None
    if _is_joined(graph, op):
        return Miss("a Concat joins the results, and each product writes directly into the Concat's result")
    alike = [u for u in others if _key(graph, u) == _key(graph, op) and not _is_joined(graph, u)]
    members = _with_equal_stages(graph, [op, *alike])
    if len(members) == 1:
        return Miss("no other product of this data has the same stages and the same type")
    ops = [m.op for m in members]
    if op.kind == "QuantizedConv" and op.attrs.group > 1:
        return Miss("a grouped convolution reads only its own channels")
    if any(u.input(_RESIDUAL) is not None for u in ops):
        return Miss("one of the products adds a tensor of its own")
    axis = 1 if op.kind == "QuantizedConv" else len(op.outputs[0].type.dims) - 1
    widths, unit = [len(m.channel) for m in members], 16 // op.outputs[0].type.dtype.itemsize
    if any(width % unit for width in widths):
        return Miss("its parts do not begin at multiples of 16 bytes, and would have to be copied")
    copied, saved = 2 * sum(bytes_of(graph, u.value) for u in ops), (len(ops) - 1) * (bytes_of(graph, x) + LAUNCH_BYTES)
    if op.kind == "QuantizedConv" and context.counted(copied) > saved:
        return Miss(f"copying the parts ({copied / 1e6:.1f} MB) would take longer than is saved ({saved / 1e6:.1f} MB)")
    arrays = [[m.weight for m in members], [m.channel for m in members]]
    name = f"{op.outputs[0].name}.siblings"

    def build(patch: Patch) -> None:
        names = ("weights", "scales")
        joined = [patch.constant(np.concatenate(a), f"{name}.{k}") for k, a in zip(names, arrays, strict=True)]
        merged = patch.add(op.kind, [x, *joined, *op.inputs[3:]], members[0].attrs, name=name)
        split = patch.add_op(
            "Split", [merged, integers(patch, widths, f"{name}.sizes")], SplitAttrs(axis),
            names=[u.outputs[0].name for u in ops], outputs=len(ops),
        )  # fmt: skip
        for k, member in enumerate(ops):
            patch.replace(member.value, Value(split.id, k))

    return Match(tuple(ops), build)


def _is_joined(graph: Graph, op: Op) -> bool:
    """Whether a Concat is the only reader of a product."""
    reader = graph.sole_user(op.value)
    return reader is not None and reader.kind == "Concat"


@dataclass(frozen=True)
class _Sibling:
    """A product with its constants; ``attrs``: as all siblings have them."""

    op: Op
    attrs: RequantizeAttrs
    weight: Array
    channel: Array


def _key(graph: Graph, op: Op) -> tuple[object, ...]:
    """A key for products: products with equal keys differ only in their weights, in numbers of channels, and in the last factor."""
    weight = graph.constant_value(op.inputs[1])
    shape = None if weight is None else weight.shape[1:]
    return (replace(op.attrs, stages=_but_factor(op.attrs.stages)), shape, op.inputs[4:])


def _but_factor(stages: tuple[render.Stage, ...]) -> tuple[render.Stage, ...]:
    """The stages without the last factor, which holds the scale of the result."""
    return stages[:-1] if stages and stages[-1][0] == "mul_const" else stages


def _with_equal_stages(graph: Graph, ops: Sequence[Op]) -> list[_Sibling]:
    """The products. If their last factors differ, each channel gets its own; products with such numbers already are left out."""
    taken = [
        _Sibling(u, u.attrs, *(a for v in u.inputs[1:3] if (a := graph.constant_value(v)) is not None)) for u in ops
    ]
    alike = [m for m in taken if m.attrs == taken[0].attrs]
    if len(alike) == len(taken):
        return alike
    plain = [m for m in taken if m.channel.shape[1] == 2]
    return [_with_factors(m) for m in plain] if taken[0] in plain else alike


def _with_factors(member: _Sibling) -> _Sibling:
    """The product, whose last factor is a number of each channel."""
    stages = member.attrs.stages
    factor = stages[-1][1] if _but_factor(stages) != stages else 1.0
    column = np.full((len(member.channel), 1), factor, member.channel.dtype)
    attrs = replace(member.attrs, stages=(*_but_factor(stages), ("channel_mul",)))
    return replace(member, attrs=attrs, channel=np.concatenate([member.channel, column], axis=1))


@rule("wide_result", {"QuantizedMatMul"})
def wide_result(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A product stores fp32 if a Cast to fp32 is the only reader of its 16-bit rows.

    Images are not concerned: the launch that converts them also puts them in plain order."""
    cast = graph.sole_user(op.value)
    if cast is None or cast.kind != "Cast" or cast.attrs.to != FP32 or op.attrs.output_dtype.itemsize != 2:
        return None
    if op.input(_RESIDUAL) is not None:
        return Miss("the tensor that it adds is not fp32")
    if op.outputs[0].type.static_shape[-1] * FP32.itemsize % 16:
        return Miss("rows of fp32 do not begin at multiples of 16 bytes, and would be copied")
    if context.counted(bytes_of(graph, cast.value)) > LAUNCH_BYTES:
        return Miss("storing fp32 results of this size would take longer than a launch for the Cast")
    attrs = replace(op.attrs, output_dtype=FP32)
    return Match((cast, op), lambda patch: patch.add(op.kind, op.inputs, attrs, name=cast.outputs[0].name))


VIEWS = RESHAPES | {"Transpose", "Split", "Slice"}
"""Kinds that only move elements, and are views of a product's rows in most networks."""


@dataclass(frozen=True)
class _Dequantized:
    """The DequantizeLinears that read a value or its views, their results as floats, and all operators from the value to these."""

    ends: list[Op]
    floats: list[Value]
    ops: list[Op]

    def on_the_way(self, graph: Graph) -> bool:
        """Whether a pointwise operator reads the floats: its launch could dequantize them."""
        return any(is_pointwise(user) for value in self.floats for user in graph.users(value))


def _dequantized(graph: Graph, value: Value) -> _Dequantized | None:
    """The readers of an 8-bit value that is only dequantized; None for other values."""
    readers = list(_readers(graph, value))
    ends = [reader for reader in readers if reader.kind not in VIEWS]
    if not ends or any(end.kind != "DequantizeLinear" for end in ends):
        return None
    floats = [_float(graph, end) for end in ends]
    casts = [graph.op(one) for one, end in zip(floats, ends, strict=True) if one != end.value]
    return _Dequantized(ends, floats, [*readers, *casts])


@rule("dequantized_result", {"QuantizedConv", "QuantizedMatMul"})
def dequantized_result(graph: Graph, op: Op) -> Match | Miss | None:
    """A product stores floats if its rounded result is only dequantized, for operators that take no integers: queries, keys and
    values in front of attention. The rounding becomes a stage."""
    found = _dequantized(graph, op.value)
    if found is None:
        return None
    types = {graph.type(value).dtype for value in found.floats}
    if len(types) > 1 or (dtype := types.pop()).itemsize > 2:
        return None
    given, *others = {quant_params(graph, end, operand(end)) for end in found.ends}
    if others or given is None or given.dtype not in ("int8", "uint8") or given.zero != op.attrs.zero:
        return Miss("its readers have other scales or zero points")
    if op.input(_RESIDUAL) is not None:
        return Miss("the tensor that it adds has 8 bits, like its result")
    if found.on_the_way(graph):
        return Miss("a pointwise operator dequantizes it on its way")
    attrs = _as_floats(op, given.scale, dtype)
    if isinstance(attrs, Miss):
        return attrs

    def build(patch: Patch) -> None:
        _moved(graph, patch, op.value, patch.add(op.kind, op.inputs, attrs, name=op.outputs[0].name))

    return Match((op, *found.ops), build)


def _as_floats(op: Op, scale: float, dtype: DType, further: Sequence[render.Stage] = ()) -> Attrs | Miss:
    """The attributes of a product that stores its rounded result, dequantized, as floats of ``dtype``, after ``further`` stages."""
    rounding = (("round",), ("clip", op.attrs.low, op.attrs.high), ("mul_const", scale))
    stages = (*op.attrs.stages, *rounding, *further)
    if len(render.constants_of(stages)) > requantize.MAX_CONSTANTS:
        return Miss("kernels do not hold the constants of one more rounding")
    unbounded = {"low": -requantize.LARGEST, "high": requantize.LARGEST, "zero": 0}
    made: Attrs = replace(op.attrs, stages=stages, output_dtype=dtype, **unbounded)
    return made


@rule("activated_result", {"QuantizedConv", "QuantizedMatMul"})
def activated_result(graph: Graph, op: Op) -> Match | Miss | None:
    """A product stores the activation of its rounded result as floats if an operator that takes no integers reads them: the means
    of squeeze-and-excitation after an activation whose result was not rounded for them."""
    end = graph.sole_user(op.value)
    if end is None or end.kind != "DequantizeLinear":
        return None
    value = _float(graph, end)
    after, given, into = graph.sole_user(value), quant_params(graph, end, operand(end)), Epilogue()
    if after is None or given is None or operand(after) != value:
        return None
    if not absorb_unary(graph, after, Stage(after.kind, (-1, *range(1, len(after.inputs))), after.attrs), into):
        return None
    readers, dtype = graph.users(after.value), after.outputs[0].type.dtype
    if all(is_pointwise(reader) or reader.kind == "QuantizeLinear" for reader in readers) or dtype.itemsize > 2:
        return None
    if any(_rounds_for_others(graph, reader) for reader in readers):
        return Miss("the launch of its activation rounds for other operators as well")
    if given.dtype not in ("int8", "uint8") or given.zero != op.attrs.zero:
        return Miss("its reader has another zero point, or it is fp8")
    if op.input(_RESIDUAL) is not None:
        return Miss("the tensor that it adds has 8 bits, like its result")
    attrs = _as_floats(op, given.scale, dtype, into.rendered)
    if isinstance(attrs, Miss):
        return attrs
    casts = [] if value == end.value else [graph.op(value)]
    name = after.outputs[0].name
    return Match((after, *casts, end, op), lambda patch: patch.add(op.kind, op.inputs, attrs, name=name))


def _rounds_for_others(graph: Graph, reader: Op) -> bool:
    """Whether an operator rounds its operand to integers that other operators than a DequantizeLinear read."""
    users = graph.users(reader.value) if reader.kind == "QuantizeLinear" else []
    return any(user.kind != "DequantizeLinear" for user in users)


@rule("fake_quantize", {"QuantizeLinear"})
def fake_quantize(graph: Graph, op: Op) -> Match | Miss | None:
    """A rounded value that is only dequantized, for operators that take no integers, stays a float: the scores in front of a
    softmax, and its weights. The product before it rounds in its epilogue; other launches may, too. Values of 16 bits always stay
    floats, since no kernel multiplies them."""
    found = _dequantized(graph, op.value)
    if found is None:
        return None
    x, own = operand(op), quant_params(graph, op, op.value, _ROUNDED)
    if own is None:
        return None
    if {quant_params(graph, end, operand(end), _ROUNDED) for end in found.ends} != {own}:
        return Miss("its readers have other scales or zero points")
    if {graph.type(value).dtype for value in found.floats} != {graph.type(x).dtype}:
        return Miss("its readers take another type of floats than it rounds")
    if graph.sole_user(x) is not op:
        return Miss("other operators read the value before it is rounded")
    before = graph.op(x)
    absorbs = before.kind in ANCHORS
    if found.on_the_way(graph) and own.dtype not in SIXTEEN_BITS and not absorbs and not is_pointwise(before):
        return Miss("a pointwise operator dequantizes it on its way")
    info = np.iinfo(own.dtype)
    attrs = FakeQuantizeAttrs(own.scale, float(info.min - own.zero), float(info.max - own.zero))
    rounded = _is_rounded(graph, x, attrs)

    def build(patch: Patch) -> None:
        if rounded:
            made = x
        elif absorbs:
            stage = Stage("FakeQuantize", (~len(before.attrs.epilogue),), attrs)
            made = patch.add(before.kind, before.inputs, with_stages(before.attrs, epilogue=[stage]))
        else:
            made = patch.add("FakeQuantize", [x], attrs, name=op.outputs[0].name)
        _moved(graph, patch, op.value, made)

    return Match((op, *([before] if absorbs and not rounded else []), *found.ops), build)


def _is_rounded(graph: Graph, value: Value, attrs: FakeQuantizeAttrs) -> bool:
    """Whether a value is the largest or only a moved element of one that is rounded to this grid."""
    op = graph.op(value)
    while op.kind in VIEWS or (op.kind == "MaxPool" and not op.attrs.indices):
        op = graph.op(operand(op))
    if op.kind == "FakeQuantize":
        return bool(op.attrs == attrs)
    epilogue: tuple[Stage, ...] = getattr(op.attrs, "epilogue", ())
    return bool(epilogue) and epilogue[-1].kind == "FakeQuantize" and epilogue[-1].attrs == attrs


@rule("repeated_dequantize", {"DequantizeLinear"})
def repeated_dequantize(graph: Graph, op: Op) -> Match | None:
    """A DequantizeLinear is repeated for each chain of pointwise operators that reads it: each launch then reads the integers."""
    if graph.constant_value(op.inputs[0]) is not None:
        return None
    chains: dict[int, list[Op]] = {-1: []}  # other readers than pointwise ones share the first DequantizeLinear
    for user in graph.users(op.value):
        chains.setdefault(_last(graph, user).id if is_pointwise(user) else -1, []).append(user)
    _, *further = [users for users in chains.values() if users]
    if not further:
        return None

    def build(patch: Patch) -> None:
        for users in further:
            again = patch.add(op.kind, op.inputs, op.attrs, name=op.outputs[0].name, src=op.src)
            for user in users:
                inputs = [again if v == op.value else v for v in user.inputs]
                patch.replace(user.value, patch.add(user.kind, inputs, user.attrs, src=user.src))

    return Match(tuple(user for users in further for user in users), build)


def _last(graph: Graph, op: Op) -> Op:
    """The last operator of a chain of pointwise operators, each the only reader of the one before."""
    while (user := graph.sole_user(op.value)) is not None and is_pointwise(user):
        op = user
    return op


def _readers(graph: Graph, value: Value) -> Iterator[Op]:
    """The readers of a value, and of its views."""
    for user in graph.users(value):
        yield user
        if user.kind in VIEWS and user.inputs[0] == value:
            for inner in user.values:
                yield from _readers(graph, inner)


def _float(graph: Graph, end: Op) -> Value:
    """The result of a DequantizeLinear, or of the conversion to another float type that is its only reader."""
    cast = graph.sole_user(end.value)
    return cast.value if cast is not None and cast.kind == "Cast" and is_float(cast.attrs.to) else end.value


def _moved(graph: Graph, patch: Patch, old: Value, new: Value) -> None:
    """Give the readers of ``old`` views of ``new``, and its dequantized values those views themselves."""
    for user in graph.users(old):
        if user.kind == "DequantizeLinear":
            patch.replace(_float(graph, user), new)
            continue
        names = [o.name for o in user.outputs]
        view = patch.add_op(user.kind, [new, *user.inputs[1:]], user.attrs, outputs=len(names), names=names)
        for port in range(len(names)):
            _moved(graph, patch, Value(user.id, port), Value(view.id, port))
