"""Concatenations and outputs without a launch: the producers of their parts write them in place."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, TensorView, row_major, up
from optdnn.kernels.layout.moves import MOST_ELEMENTS
from optdnn.kernels.layout.views import consecutive, of_one_channel, reshaped
from optdnn.types import normalize_axis

_TURNS = frozenset({"Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Views of a whole tensor."""
_ROWS = frozenset({"MatMul", "Gemm", "Attention"})
"""Kinds that write rows with any pitch."""
_NORMS = frozenset({"LayerNormalization", "LpNormalization", "RMSNormalization"})
"""Kinds of norms of rows; they also write rows with any pitch."""
_PRODUCTS = frozenset({"MatMul", "Gemm"})
_REDUCED = frozenset({"ReduceMax", "ReduceMean", "ReduceSum"})


def plan_concats(b: Builder, kernels: frozenset[str]) -> None:
    """Reserve joint buffers of concatenations. Producers of the parts then write them in place.

    The last concatenation chooses first. Chains of growing concatenations (DenseNet) therefore share one buffer, even if each is a
    part of the next. Along channels, another part must come from an operator of ``kernels`` (kinds that can write to any place), and
    begin at a multiple of 8 channels for TMA. If channels are the last axis (rows), only repetitions, and convolutions with a transposed
    result, write in place. Products and attention write rows in place (of images, and between other rows) if the part is a view of their
    whole result. If parts follow one another in memory, convolutions also write views of their results (the pixels of YOLO's levels),
    and so do other concatenations. Gathered rows of tables, and sums of them, are written in place along both axes. If only products
    read the rows (:func:`pitched`), products and pointwise operators also write them in place.
    """
    for op in reversed(b.graph.order()):
        if op.kind != "Concat" or any(v is not None and not b.graph.type(v).is_static for v in (*op.inputs, op.value)):
            continue
        out = op.outputs[0].type
        axis = normalize_axis(op.attrs.axis, len(out.static_shape))
        values = [v for v in op.inputs if v is not None]
        outer = all(d == 1 for d in out.static_shape[:axis])
        last = bool(out.layout) and axis == 1
        volume = len(out.static_shape) == 5 and axis == 1
        rows = not (out.layout or outer or volume) and axis == len(out.static_shape) - 1
        made = [v for v in values if b.graph.constant_value(v) is None]  # constants can be copied from any layout
        inner = not (out.layout or outer or volume or rows)
        if any(b.graph.type(v).layout != out.layout for v in made):
            continue
        held = [b.reserved.get(v) for v in values]
        if all(p is not None for p in held) and op.value not in b.reserved and consecutive(held, axis):
            first = held[0]
            assert first is not None
            b.reserved[op.value] = first.view(out.static_shape, first.strides)
            continue
        joint = b.reserved.get(op.value)
        sizes = [b.graph.type(v).static_shape[axis] for v in values]
        pitch = pitched(b, op)
        apart = any(n % 8 for n in sizes[:-1])  # a part that begins inside of a vector is copied
        if (last or (rows and pitch is None)) and apart:
            continue
        free = [
            v not in b.reserved
            and values.count(v) == 1
            and b.graph.constant_value(v) is None
            and (
                _is_made_in_place(b, v, kernels, last=last, volume=volume, rows=rows, inner=inner)
                or (rows and pitch is not None and _makes_rows(b, v))
            )
            for v in values
        ]
        if apart and rows and math.prod(out.static_shape) <= MOST_ELEMENTS:  # one launch joins all parts
            free = [False] * len(free)
        if inner and not all(free):
            free = [may and _adds_rows(b, _sole_producer(b, v)) for v, may in zip(values, free, strict=True)]
        if (not any(free) and (pitch is None or out.static_shape[-1] % 8 == 0)) or (
            inner and math.prod(out.static_shape[axis + 1 :]) % 8
        ):
            continue
        if joint is None and last and (wide := _with_outer_parts(b, op)) is not None:
            joint = b.reserved[op.value] = wide
        if joint is None:
            joint = b.new(op.outputs[0].name, out.dtype, out.static_shape, pitch or b.strides_for(out))
            b.reserved[op.value] = joint
        if joint.dtype != out.dtype:
            continue
        starts = np.cumsum([0, *sizes])
        for v, start, may in zip(values, starts, free, strict=False):
            turned = b.graph.op(v).kind in _TURNS
            aligned = (joint.offset + int(start) * joint.strides[axis]) % 8 == 0
            if may and (aligned or not (last or rows or turned)):
                shape = b.graph.type(v).static_shape
                b.reserved[v] = joint.view(shape, joint.strides, int(start) * joint.strides[axis])
                if volume or rows or inner or turned or b.graph.op(v).kind == "Layout":
                    _reserve_before(b, v)


def _with_outer_parts(b: Builder, op: Op) -> TensorView | None:
    """The place of a Concat of channels beside the other parts of a convolution: one of its parts begins or ends the Concat.

    The convolution's place is reserved. None if there is no such part (``passes/rules/outer_parts.py`` orders the parts)."""
    out = op.outputs[0].type
    for at in (len(op.inputs) - 1, 0):
        part = op.inputs[at]
        split = None if part is None else b.graph.op(part)
        if part is None or split is None or split.kind != "Split" or part in b.reserved:
            continue
        whole, end = split.inputs[0], 0 if at else len(split.outputs) - 1
        inner = [v for v in op.inputs if v is not None and v.op == split.id]
        if (
            whole is None
            or whole in b.reserved
            or part.port != end
            or len(inner) > 1
            or b.graph.sole_user(whole) is None
        ):
            continue
        t = b.graph.type(whole)
        channels, joined = t.static_shape[1], out.static_shape[1]
        width = b.graph.type(part).static_shape[1]
        extra = channels - width
        if (
            b.graph.op(whole).kind != "Conv"
            or (t.layout, t.dtype) != (out.layout, out.dtype)
            or extra % 8
            or joined % 8
        ):
            continue
        shape = (out.static_shape[0], joined + extra, *out.static_shape[2:])
        wide = b.new(op.outputs[0].name, out.dtype, shape, b.strides_for(replace(out, shape=shape)))
        b.reserved[whole] = wide.view(t.static_shape, wide.strides, joined - width if at else 0)
        return wide.view(out.static_shape, wide.strides, 0 if at else extra)
    return None


def pitched(b: Builder, op: Op) -> tuple[int, ...] | None:
    """Strides of joined rows at multiples of 16 bytes, if only products with constant matrices read them; else None."""
    t, users = op.outputs[0].type, list(b.graph.users(op.value))
    axis = normalize_axis(op.attrs.axis, len(t.static_shape))
    if t.layout or axis != len(t.static_shape) - 1 or t.dtype.itemsize != 2 or not users:
        return None
    for user in users:
        matrix = user.kind in _PRODUCTS and user.inputs.count(op.value) == 1 and b.graph.constant_value(user.inputs[1])
        if matrix is None or matrix is False or matrix.ndim != 2 or user.attrs.prologue or user.inputs[0] != op.value:
            return None
    return row_major((*t.static_shape[:-1], up(t.static_shape[-1], 8)))


def _makes_rows(b: Builder, value: Value) -> bool:
    """Whether the producer of the value is a product or a pointwise operator."""
    op = b.graph.op(value)
    return op.kind in _PRODUCTS or op.definition.traits.pointwise


def plan_outputs(b: Builder, kernels: frozenset[str]) -> None:
    """Reserve places through views: if a network's output is a view of a whole tensor, the producer of that tensor writes it in place.

    ``kernels``: kinds that can write to any place. Rows and pixels of 16-bit elements must have a multiple of 8 elements, for TMA stores.
    """
    for i in b.graph.outputs:
        value = b.graph.op(i).inputs[0]
        if value is None or value not in b.reserved or b.reserved[value].dtype != b.graph.type(value).dtype:
            continue
        made = _sole_producer(b, value)
        t = made.outputs[0].type
        if made.value == value or made.kind not in kernels | {"Concat"} or not t.is_static or not t.static_shape:
            continue
        if t.dtype.itemsize != 2 or t.static_shape[1 if t.layout else -1] % 8 == 0:
            _reserve_before(b, value)


def _is_made_in_place(
    b: Builder, value: Value, kernels: frozenset[str], *, last: bool, volume: bool, rows: bool, inner: bool
) -> bool:
    """Whether the producer of a part can write it into the joint buffer."""
    op = b.graph.op(value)
    if op.kind == "Tile":  # a copy to any place
        return True
    if rows:
        return _producer_of_view(b, value).kind == "Conv" or _adds_rows(b, _sole_producer(b, value))
    if inner:
        producer = _sole_producer(b, value)
        return producer.kind in _ROWS | _NORMS or _adds_rows(b, producer)
    if last and (_joins_channels(op) or (op.kind == "Transpose" and _sole_producer(b, value).kind in _ROWS)):
        return True
    if of_one_channel(op) and op.inputs[0] is not None and b.graph.use_count(op.inputs[0]) == 1:
        return b.graph.op(op.inputs[0]).kind in kernels
    if not last and op.kind in _TURNS:
        return _sole_producer(b, value).kind == "Conv"
    if not last and op.kind == "Concat":
        return True
    return op.kind in kernels or (volume and _producer_of_view(b, value).kind in {*kernels, "Concat"})


def _adds_rows(b: Builder, op: Op) -> bool:
    """Whether the operator gathers rows of a table, or sums them (embeddings, bags, edges of a graph). A Gather of rows with one stride
    is a view instead."""
    if op.kind != "Gather":
        return op.kind in _REDUCED or op.kind in ("GatherND", "SegmentSum")
    index = b.graph.constant_value(op.inputs[1])
    return index is None or (index.ndim == 1 and len(np.unique(np.diff(index))) > 1)


def _joins_channels(op: Op) -> bool:
    """Whether it is a concatenation along channels: its own parts can then be in the joint buffer."""
    return op.kind == "Concat" and normalize_axis(op.attrs.axis, len(op.outputs[0].type.static_shape)) == 1


def _producer_of_view(b: Builder, value: Value) -> Op:
    """The producer of the tensor that a value views."""
    op = b.graph.op(value)
    while op.kind in ("Transpose", "Reshape") and op.inputs[0] is not None:
        op = b.graph.op(op.inputs[0])
    return op


def _sole_producer(b: Builder, value: Value) -> Op:
    """The same, but only through views of tensors without other readers."""
    op = b.graph.op(value)
    while op.kind in _TURNS and op.inputs[0] is not None and b.graph.use_count(op.inputs[0]) == 1:
        op = b.graph.op(op.inputs[0])
    return op


def _reserve_before(b: Builder, value: Value) -> None:
    """Reserve the place of a view for the tensor that it views, if strides can express that."""
    op, x = b.graph.op(value), b.reserved[value]
    while op.kind in _TURNS or of_one_channel(op):
        source = op.inputs[0]
        assert source is not None
        if source in b.reserved or b.graph.constant_value(source) is not None:
            return
        if op.kind == "Transpose":
            perm = op.attrs.perm or tuple(reversed(range(len(x.shape))))
            order = [perm.index(i) for i in range(len(perm))]
            found: TensorView | None = x.view([x.shape[i] for i in order], [x.strides[i] for i in order])
        elif op.kind == "Layout":
            found = x
        else:
            found = reshaped(x, b.graph.type(source).static_shape)
        if found is None:
            return
        b.reserved[source] = x = found
        op = b.graph.op(source)
