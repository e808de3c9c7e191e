"""Concatenations and outputs without a launch: the producers of their parts write them in place."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import NOWHERE, Builder, TensorView, row_major, rows_of_vectors
from optdnn.kernels.layout import copies
from optdnn.kernels.layout.moves import MOST_ELEMENTS
from optdnn.kernels.layout.views import consecutive, of_one_channel, reshaped, seen_by
from optdnn.types import normalize_axis

_TURNS = frozenset({"Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Views of a whole tensor."""
_ROWS = frozenset({"MatMul", "Gemm", "Attention"})
"""Kinds that write rows with any pitch."""
_NORMS = frozenset({"LayerNormalization", "LpNormalization", "RMSNormalization"})
"""Kinds of norms of rows; they also write rows with any pitch."""
_SOFTMAXES = frozenset({"LogSoftmax", "Softmax"})
_PRODUCTS = frozenset({"MatMul", "Gemm"})
FEW = 1 << 16
"""Elements of a norm's result that are stored one by one, rather than copied."""
ACCESS = 16
"""Bytes at whose multiples TMA reads and writes begin."""
_CONVOLUTIONS = frozenset({"Conv", "QuantizedConv"})
_REDUCED = frozenset({"ReduceMax", "ReduceMean", "ReduceSum"})


def plan_concats(b: Builder, kernels: frozenset[str]) -> None:
    """Reserve joint buffers of concatenations. Producers of the parts then write them in place.

    The last concatenation chooses first. Chains of growing concatenations (DenseNet) therefore share one buffer, even if each is
    a part of the next. Along channels, another part must come from an operator of ``kernels`` (kinds that can write to any
    place), and begin at a multiple of 8 channels for TMA. Parts that are all written by reductions (CBAM's means and maxima over
    channels) may begin anywhere, because reductions store one element after another. If channels are the last axis (rows), only
    repetitions, norms, selected elements, and convolutions with a transposed result, write in place. Products, attention, norms, pointwise
    operators and depthwise convolutions write rows in place (of images, and between other rows) if the part is a view of their
    whole result. If parts follow one another in memory, convolutions and concatenations also write views of their results (the pixels of YOLO's levels). Gathered
    rows of tables, and sums of them, are written in place along both axes. If only products read the rows (:func:`pitched`),
    products, pointwise operators and attention (FLUX's single blocks) write them in place.
    """
    for op in reversed(b.graph.order()):
        if op.kind == "Concat" and all(b.graph.type(v).is_static for v in (*op.inputs, op.value) if v is not None):
            _plan(b, _Join(b, op), kernels)


class _Join:
    """A concatenation: its parts and their sizes along its axis, and the kind of axis.

    ``outer``: the parts follow one another in memory. ``last``: channels of channels-last images. ``volume``: channels of volumes.
    ``rows``: the last axis of plain tensors. ``inner``: any other axis. ``apart``: a part begins inside of a vector. ``pixels``: all
    parts are the pixels of images, one after another. ``small``: one launch copies and converts all parts. ``single``: reductions store
    all parts of the channels of images, one element after another.
    """

    def __init__(self, b: Builder, op: Op):
        self.op, self.type = op, op.outputs[0].type
        rank = len(self.type.static_shape)
        self.axis = axis = normalize_axis(op.attrs.axis, rank)
        self.values = [v for v in op.inputs if v is not None]
        self.sizes = [b.graph.type(v).static_shape[axis] for v in self.values]
        self.outer = all(d == 1 for d in self.type.static_shape[:axis])
        self.last = bool(self.type.layout) and axis == 1
        self.volume = rank == 5 and axis == 1
        self.rows = not (self.type.layout or self.outer or self.volume) and axis == rank - 1
        self.inner = not (self.type.layout or self.outer or self.volume or self.rows)
        self.apart = any(n % 8 for n in self.sizes[:-1])
        self.small = b.counted(math.prod(self.type.static_shape)) <= copies.MOST_ELEMENTS
        self.pitch = pitched(b, op)
        self.single = self.last and all(_sole_producer(b, v).kind in _REDUCED for v in self.values)
        self.pixels = self.outer and not self.type.layout and all(self._is_pixels(b, v) for v in self.values)

    def _is_pixels(self, b: Builder, value: Value) -> bool:
        """Whether a part is the pixels of a convolution's image: rows of all of its channels."""
        producer = _sole_producer(b, value)
        rows = b.graph.op(value).kind in _TURNS and producer.kind in _CONVOLUTIONS
        return rows and producer.outputs[0].type.static_shape[1] == self.type.static_shape[-1]

    def is_in_memory_order(self, b: Builder) -> bool:
        """Whether no part has another layout. Constants can be copied from any layout."""
        made = [v for v in self.values if b.graph.constant_value(v) is None]
        return all(b.graph.type(v).layout == self.type.layout for v in made)


def _plan(b: Builder, join: _Join, kernels: frozenset[str]) -> None:
    """Reserve the places of a concatenation and of the parts that are written in place."""
    shape, value = join.type.static_shape, join.op.value
    if not join.is_in_memory_order(b):
        return
    held = [b.reserved.get(v) for v in join.values]
    if held[0] is not None and all(held) and value not in b.reserved and consecutive(held, join.axis):
        b.reserved[value] = held[0].view(shape, held[0].strides)
        return
    copied = [join.rows and _is_copied(b, v) and not _makes_rows_of(b, join, v) for v in join.values]
    apart = join.apart and not join.single
    if (join.last or (join.rows and join.pitch is None and not any(copied))) and apart:
        return
    free = copied if join.apart and join.pitch is None and join.rows else _written_in_place(b, join, kernels)
    free = [may or copy for may, copy in zip(free, copied, strict=True)]
    if not any(free) and (join.pitch is None or shape[-1] % 8 == 0):
        return
    if join.inner and math.prod(shape[join.axis + 1 :]) % 8:
        return
    joint = _place(b, join)
    if joint.dtype != join.type.dtype:
        return
    starts = np.cumsum([0, *join.sizes]).tolist()
    for v, start, may, copy in zip(join.values, starts, free, copied, strict=False):
        step, view = joint.strides[join.axis], b.graph.op(v).kind in _TURNS
        aligned = join.single or (joint.offset + start * step) % 8 == 0
        if may and (copy or aligned or not (join.last or join.rows or view)):
            b.reserved[v] = joint.view(b.graph.type(v).static_shape, joint.strides, start * step)
            if not copy and (
                join.single or join.volume or join.rows or join.inner or view or b.graph.op(v).kind == "Layout"
            ):
                _reserve_before(b, v)


def _written_in_place(b: Builder, join: _Join, kernels: frozenset[str]) -> list[bool]:
    """Whether the producer of each part writes it in place."""
    values, rows = join.values, join.rows
    free = [
        v not in b.reserved
        and values.count(v) == 1
        and b.graph.constant_value(v) is None
        and (_is_made_in_place(b, v, kernels, join) or _makes_rows_of(b, join, v))
        for v in values
    ]
    few = b.counted(math.prod(join.type.static_shape)) <= MOST_ELEMENTS
    if join.apart and rows and few:  # one launch joins all parts
        free = [False] * len(free)
    if join.inner and free.count(False) > (0 if join.small else 1):  # one launch copies several parts
        free = [may and _adds_rows(b, _sole_producer(b, v)) for v, may in zip(values, free, strict=True)]
    return free


def _place(b: Builder, join: _Join) -> TensorView:
    """The reserved place of a concatenation, or a new one."""
    op, t, found = join.op, join.type, b.reserved.get(join.op.value)
    if found is None and join.last:
        found = _beside_other_parts(b, op)
    if found is None:
        strides = join.pitch or _turned_order(b, join) or b.strides_for(t)
        if join.pixels:
            strides = rows_of_vectors(t.static_shape)  # convolutions write whole vectors
        found = b.new(op.outputs[0].name, t.dtype, t.static_shape, strides)
    b.reserved[op.value] = found
    return found


def _turned_order(b: Builder, join: _Join) -> tuple[int, ...] | None:
    """Strides in which a depthwise convolution of the heads of tokens writes the largest part in place: heads of (batch, heads, positions,
    features) are neighbors in memory. None if the largest part is another one."""
    made = [v for v in join.values if b.graph.constant_value(v) is None]
    part = max(made, key=lambda v: math.prod(b.graph.type(v).static_shape), default=None)
    turn = None if part is None or not join.inner else b.graph.op(part)
    if part is None or turn is None or turn.kind != "Transpose" or turn.attrs.perm != (0, 2, 1, 3):
        return None
    if not _filters_channels(b, _sole_producer(b, part)):
        return None
    _, heads, positions, features = join.type.static_shape
    return (positions * heads * features, features, heads * features, 1)


def _beside_other_parts(b: Builder, op: Op) -> TensorView | None:
    """The place of a Concat of channels beside the other parts of a convolution: one of its parts begins or ends the Concat.

    The convolution's place is reserved. None if there is no such part (``passes/rules/outer_parts.py`` orders the parts)."""
    out = op.outputs[0].type
    vector = ACCESS // out.dtype.itemsize
    for at in (len(op.inputs) - 1, 0):
        part, whole = op.inputs[at], _whole_of_outer_part(b, op, at)
        if part is None or whole is None:
            continue
        t, width = b.graph.type(whole), b.graph.type(part).static_shape[1]
        kept, more = out.static_shape[1] - width, t.static_shape[1] - width
        if (t.layout, t.dtype) != (out.layout, out.dtype) or kept % vector or more % vector:
            continue
        shape = (out.static_shape[0], kept + t.static_shape[1], *out.static_shape[2:])
        wide = b.new(op.outputs[0].name, out.dtype, shape, b.strides_for(replace(out, shape=shape)))
        b.reserved[whole] = wide.view(t.static_shape, wide.strides, kept if at else 0)
        return wide.view(out.static_shape, wide.strides, 0 if at else more)
    return None


def _whole_of_outer_part(b: Builder, op: Op, at: int) -> Value | None:
    """The result of a convolution that only a Split of channels reads, if operand ``at`` of the Concat, its last or first one, is the
    first or the last part of this Split; else None. The Concat reads no other part of it."""
    part = op.inputs[at]
    split = None if part is None or part in b.reserved else b.graph.op(part)
    if part is None or split is None or split.kind != "Split" or part.port != (0 if at else len(split.outputs) - 1):
        return None
    if normalize_axis(split.attrs.axis, len(split.outputs[0].type.static_shape)) != 1:
        return None
    whole = split.inputs[0]
    if whole is None or whole in b.reserved or b.graph.sole_user(whole) is None:
        return None
    if b.graph.op(whole).kind not in _CONVOLUTIONS or sum(v is not None and v.op == split.id for v in op.inputs) > 1:
        return None
    return whole


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
    return rows_of_vectors(t.static_shape)


def _makes_rows_of(b: Builder, join: _Join, value: Value) -> bool:
    """Whether only products read the joined rows, and a product, a pointwise operator or an attention makes this part of them."""
    if not join.rows or join.pitch is None:
        return False
    op = b.graph.op(value)
    return op.kind in _PRODUCTS or op.pointwise or _sole_producer(b, value).kind == "Attention"


def plan_outputs(b: Builder, kernels: frozenset[str]) -> None:
    """Reserve places through views: if a network's output is a view of a whole tensor, the producer of that tensor writes it in place.

    ``kernels``: kinds that can write to any place. Rows and pixels of 16-bit elements must have a multiple of 8 elements, for TMA stores.
    Norms and softmaxes of many rows write neighbors in memory: 4096 rows of 256 features took 31 us on an H200 with a store for each
    element; a norm and a copy are predicted to take 4.
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
            before = dict(b.reserved)
            _reserve_before(b, value)
            place = b.reserved.get(made.value)
            many = made.kind in _NORMS | _SOFTMAXES and b.counted(math.prod(t.static_shape)) > FEW
            if many and place is not None and not t.layout and place.strides[-1] != 1:
                b.reserved = before


def _is_made_in_place(b: Builder, value: Value, kernels: frozenset[str], join: _Join) -> bool:
    """Whether the producer of a part can write it into the joint buffer."""
    op = b.graph.op(value)
    if op.kind == "Tile" or join.single:  # a copy to any place, or an element after another
        return True
    producer = _sole_producer(b, value)
    if join.rows:
        rows = producer.kind in _NORMS or op.kind == "GatherElements"
        return rows or _producer_of_view(b, value).kind == "Conv" or _adds_rows(b, producer)
    if join.inner:
        kinds = _ROWS | _NORMS | {"Concat"} | (set() if join.small else {"RotaryEmbedding"})
        filtered = op.kind in _TURNS and _filters_channels(b, producer)
        return producer.kind in kinds or producer.pointwise or filtered or _adds_rows(b, producer)
    if join.last and (_joins_channels(op) or (op.kind == "Transpose" and producer.kind in _ROWS | _NORMS)):
        return True
    if of_one_channel(op) and op.inputs[0] is not None and b.graph.use_count(op.inputs[0]) == 1:
        return b.graph.op(op.inputs[0]).kind in kernels
    if not join.last and op.kind in _TURNS:
        pixels = join.pixels or (
            producer.kind in {*_CONVOLUTIONS, "ConvTranspose"} and producer.outputs[0].type.static_shape[1] % 8 == 0
        )
        return pixels or (producer.kind == "Concat" and op.kind != "Transpose")
    if op.kind == "Concat" and not join.last:
        return True
    return op.kind in kernels or (join.volume and _producer_of_view(b, value).kind in {*kernels, "Concat"})


def _is_copied(b: Builder, value: Value) -> bool:
    """Whether a part that only the concatenation reads is a copy: a Reshape that joins transposed axes. A copy writes to any place."""
    op = b.graph.op(value)
    if op.kind not in _TURNS - {"Transpose"} or b.graph.use_count(value) != 1 or value in b.reserved:
        return False
    turned = None if op.inputs[0] is None else b.graph.op(op.inputs[0])
    if turned is None or turned.kind != "Transpose" or turned.inputs[0] is None:
        return False
    source = b.graph.type(turned.inputs[0])
    if not source.is_static:
        return False
    shape = source.static_shape
    x = seen_by(turned, TensorView(NOWHERE, 0, shape, row_major(shape), source.dtype))
    return x is not None and reshaped(x, op.outputs[0].type.static_shape) is None


def _adds_rows(b: Builder, op: Op) -> bool:
    """Whether the operator gathers rows of a table, or sums them (embeddings, bags, edges of a graph). A Gather of rows with one stride
    is a view instead."""
    if op.kind != "Gather":
        return op.kind in _REDUCED or op.kind in ("GatherND", "SegmentSum")
    index = b.graph.constant_value(op.inputs[1])
    return index is None or (index.ndim == 1 and len(np.unique(np.diff(index))) > 1)


def _filters_channels(b: Builder, op: Op) -> bool:
    """Whether the operator is a depthwise convolution of vectors of channels: its kernels write images with gaps between them (those
    after a class token)."""
    weight = b.graph.constant_value(op.inputs[1]) if op.kind == "Conv" else None
    return weight is not None and weight.shape[1] == 1 and op.attrs.group == len(weight) and len(weight) % 8 == 0


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
    while (
        (op.kind in _TURNS or of_one_channel(op)) and op.inputs[0] is not None and b.graph.use_count(op.inputs[0]) == 1
    ):
        op = b.graph.op(op.inputs[0])
    return op


def _reserve_before(b: Builder, value: Value) -> None:
    """Reserve the place of a view for the tensor that it views, if strides can express that."""
    op, x = b.graph.op(value), b.reserved[value]
    while op.kind in _TURNS or of_one_channel(op):
        source = op.inputs[0]
        assert source is not None
        if (
            source in b.reserved
            or b.graph.constant_value(source) is not None
            or not b.graph.type(source).is_static  # its number of elements depends on data: it is computed on the host
        ):
            return
        if op.kind == "Transpose":
            perm = op.attrs.perm or tuple(reversed(range(len(x.shape))))
            order = [perm.index(i) for i in range(len(perm))]
            found: TensorView | None = x.permuted(order)
        elif op.kind == "Layout":
            found = x.view(x.shape, (x.strides[0], 1, *x.strides[2:])) if of_one_channel(op) else x
        else:
            found = reshaped(x, b.graph.type(source).static_shape)
        if found is None:
            return
        b.reserved[source] = x = found
        op = b.graph.op(source)
