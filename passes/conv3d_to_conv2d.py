"""Convolutions over three axes become convolutions over two, for which tensor cores have kernels.

Depth joins another axis where this needs no copy:

- If filters cover one frame, each frame is an image: the frames join the batch.
- If filters cover one pixel (the temporal half of R(2+1)D, Tran et al., 2018), depth becomes the rows of an image, and the pixels
  of a frame become its columns.
- If filters cover one element, scales, shifts, gates and activations before the convolution become those of an image, too
  (DenseNet, squeeze-and-excitation), and the convolution can apply them.
- If filters cover all three axes (C3D, I3D, R3D), the frames under the taps along depth become channels of one image. So a
  convolution stays one sum, rounded once, with one epilogue. Its operand is copied once for each tap, in one launch.

A transposed convolution whose frames do not overlap (as in U-Nets over volumes) becomes one convolution per tap along depth. The
frames of the results alternate, and kernels write them in place.

Channels are the last axis while axes are split and joined: between convolutions in channels-last order these steps are views.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.conv import ConvAttrs, ConvTransposeAttrs, resolved, resolved_transpose
from optdnn.ops.index import ConcatAttrs, PadAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass, rule
from optdnn.passes.rules.noop import no_op
from optdnn.passes.rules.shape import reshape_chain, transpose_chain
from optdnn.passes.support.facts import (
    channels_from_last,
    channels_to_last,
    in_shape,
    integers,
    operand,
    shape_of,
)
from optdnn.passes.support.stages import ACTIVATIONS
from optdnn.types import Array, Shape

LAST, FIRST = channels_to_last(5), channels_from_last(5)
"""Permutations that move the channels of a volume to the last axis, and back to the second axis."""
_LAST_2D, _FIRST_2D = channels_to_last(4), channels_from_last(4)
_ARITY = 3


@dataclass(frozen=True)
class Volume:
    """A convolution over three axes. ``attrs`` has explicit pads."""

    attrs: ConvAttrs
    x: Value
    weight: Array
    rows: bool
    """Whether depth becomes rows, and the pixels of a frame columns; else frames become images."""
    before: tuple[Op, ...] = ()
    """Operators on ``x`` that compute the convolution's operand, in order."""

    @property
    def taps(self) -> bool:
        """Whether the frames under the taps along depth become channels."""
        return not self.rows and self.weight.shape[2] > 1


def _no_volumes(graph: Graph, op: Op) -> str | None:
    """The reason if a size of the operand or the result, other than the batch, is unknown or 0; else None."""
    before, after = shape_of(graph, operand(op)), op.outputs[0].type.shape
    if before is None or after is None or not all(isinstance(d, int) for d in (*before[1:], *after[1:])):
        return "the sizes of its volumes are not known"
    return "it is empty" if 0 in (*before, *after) else None


@rule("conv3d_to_conv2d", {"Conv"})
def conv3d_to_conv2d(graph: Graph, op: Op) -> Match | Miss | None:
    """A Conv of rank 5 with constant weights, including its epilogue."""
    x, w = operand(op), operand(op, 1)
    if graph.type(w).rank != 5:
        return None
    weight, after = graph.constant_value(w), op.outputs[0].type.dims
    if weight is None:
        return Miss("its weights are not constant")
    if op.attrs.prologue:
        return Miss("it has a prologue, which runs before its padding")
    if (why := _no_volumes(graph, op)) is not None:
        return Miss(why)
    attrs = resolved(op.attrs, graph.type(x), graph.type(w))
    _, top, left, _, bottom, right = attrs.pads
    rows = weight.shape[2] > 1 and weight.shape[3:] == (1, 1) and not any((top, left, bottom, right))
    found = Volume(attrs, x, weight, rows)
    if found.taps and weight.shape[1] == 1 and attrs.group == weight.shape[0]:
        return Miss("it is depthwise, and another kernel runs depthwise convolutions over three axes")
    if weight.shape[2:] == (1, 1, 1) and attrs.group == 1 and not any(attrs.pads) and (before := _before(graph, x)):
        found = replace(found, x=_operands(graph, before[0])[0], rows=True, before=before)
    for value in op.inputs[_ARITY:]:
        if value is not None and _spread(graph.type(value).dims, after, found.rows) is None:
            return Miss("no constant target can express how an operand of its epilogue is repeated")
    return Match((op, *found.before), lambda patch: _as_images(graph, patch, op, found))


def _before(graph: Graph, x: Value) -> tuple[Op, ...]:
    """The operators that compute ``x`` from a volume, in order: a scale, shift or gate, and further ones or activations. No other
    operator reads their results."""
    chain, kept = list[Op](), 0
    while graph.sole_user(x) is not None:
        op = graph.op(x)
        activation = op.kind in ACTIVATIONS and len(op.inputs) == 1
        if not activation and (op.kind not in ("Mul", "Add") or len(_operands(graph, op)) != 2):
            break
        chain.append(op)
        kept = kept if activation else len(chain)
        x = _operands(graph, op)[0]
    return tuple(chain[:kept][::-1])


def _operands(graph: Graph, op: Op) -> list[Value]:
    """The operand in the shape of the result, and the other one, if it is a number, or one for each channel (of each image)."""
    first, *others = sorted(
        (v for v in op.inputs if v is not None), key=lambda v: graph.type(v).dims != op.outputs[0].type.dims
    )
    whole = graph.type(first).dims == op.outputs[0].type.dims
    return [first, *(v for v in others if whole and all(d == 1 for d in graph.type(v).dims[-3:]))]


def _as_images(graph: Graph, patch: Patch, op: Op, found: Volume) -> Value:
    a, weight, after = found.attrs, found.weight, op.outputs[0].type.dims
    source = _names(graph, found.x)
    x = last = _last(patch, found.x, source)
    if found.rows:
        x = _every(patch, x, {2: a.strides[1], 3: a.strides[2]})
        weight = weight[:, :, :, 0]
        pads = (a.pads[0], 0, a.pads[3], 0)
        geometry = replace(a, strides=(a.strides[0], 1), pads=pads, dilations=(a.dilations[0], 1))
    else:
        depth = after[2]
        assert isinstance(depth, int)
        x = _frames(patch, x, found, depth)
        # In the order of the frames' channels: per group, the channels under the first tap, then those under the next one.
        weight = np.moveaxis(weight, 2, 1).reshape(len(weight), -1, *weight.shape[3:])
        geometry = replace(a, strides=a.strides[1:], pads=(*a.pads[1:3], *a.pads[4:]), dilations=a.dilations[1:])
    image = _image(patch, x, found.rows, source if x == last else None)
    for link in found.before:
        own, *others = _operands(graph, link)
        given = {own: image, **{v: _per_channel(patch, graph, v) for v in others}}
        image = patch.add(link.kind, [None if v is None else given[v] for v in link.inputs], link.attrs, src=link.src)
    kernel = patch.constant(np.ascontiguousarray(weight), "conv3d.weight")
    operands = [None if v is None else _operand(patch, graph, v, after, found.rows) for v in op.inputs[_ARITY:]]
    y = patch.add("Conv", [image, kernel, *op.inputs[2:_ARITY], *operands], geometry)
    y = patch.add("Transpose", [y], TransposeAttrs(_LAST_2D))
    y = in_shape(patch, y, (after[0], *after[2:], after[1]))
    return patch.add("Transpose", [y], TransposeAttrs(FIRST))


@rule("transpose3d_to_transpose2d", {"ConvTranspose"})
def transpose3d_to_transpose2d(graph: Graph, op: Op) -> Match | Miss | None:
    """A ConvTranspose of rank 5 with constant weights, whose results do not overlap along depth."""
    x, w = operand(op), operand(op, 1)
    if graph.type(w).rank != 5:
        return None
    weight = graph.constant_value(w)
    if weight is None:
        return Miss("its weights are not constant")
    if (why := _no_volumes(graph, op)) is not None:
        return Miss(why)
    a = resolved_transpose(op.attrs, graph.type(x), graph.type(w))
    depth = weight.shape[2]
    if a.group > 1:
        return Miss("its channels are in groups")
    if depth != a.strides[0] or a.dilations[0] > 1 or a.pads[0] or a.pads[3] or a.output_padding[0]:
        return Miss("its results overlap, are cut or have gaps along depth")
    if a.prologue or any(v is not None for v in op.inputs[_ARITY:]):
        return Miss("it has a prologue, or an epilogue with operands")
    given = op.input(2)
    bias = None if given is None else graph.constant_value(given)
    if given is not None and bias is None:
        return Miss("its bias is not constant")
    return Match((op,), lambda patch: _grown(graph, patch, op, a, weight, bias))


def _grown(graph: Graph, patch: Patch, op: Op, a: ConvTransposeAttrs, weight: Array, bias: Array | None) -> Value:
    n, filters, depth, *size = op.outputs[0].type.dims
    source = _names(graph, operand(op))
    x = _last(patch, operand(op), source)
    image, taps = _image(patch, x, False, source), weight.shape[2]
    geometry = replace(
        a, strides=a.strides[1:], pads=(*a.pads[1:3], *a.pads[4:]), dilations=a.dilations[1:], output_padding=a.output_padding[1:],
        output_shape=(), auto_pad="NOTSET",
    )  # fmt: skip
    more = [] if bias is None else [patch.constant(bias, "conv3d.bias")]
    parts = []
    for tap in range(taps):
        kernel = patch.constant(np.ascontiguousarray(weight[:, :, tap]), "conv3d.weight")
        y = patch.add("ConvTranspose", [image, kernel, *more], geometry)
        y = patch.add("Transpose", [y], TransposeAttrs(_LAST_2D))
        parts.append(in_shape(patch, y, (patch.type(y).dims[0], 1, *size, filters)) if taps > 1 else y)
    y = patch.add("Concat", parts, ConcatAttrs(1)) if taps > 1 else parts[0]
    y = in_shape(patch, y, (n, depth, *size, filters))
    return patch.add("Transpose", [y], TransposeAttrs(FIRST))


def _names(graph: Graph, x: Value) -> frozenset[str] | None:
    """The provenance of a view of ``x``: that of its producer, since the view cancels with views there. None if it has none."""
    return graph.op(x).src or None


def _last(patch: Patch, x: Value, src: frozenset[str] | None) -> Value:
    """(N, C, D, H, W) -> (N, D, H, W, C)."""
    return patch.add("Transpose", [x], TransposeAttrs(LAST), src=src)


def _sliced(patch: Patch, x: Value, axis: int, start: int, end: int, step: int) -> Value:
    limits = [integers(patch, [n], "slice") for n in (start, end, axis, step)]
    return patch.add("Slice", [x, *limits])


def _every(patch: Patch, x: Value, steps: dict[int, int]) -> Value:
    """Every n-th element along some axes."""
    for axis, step in steps.items():
        if step > 1:
            size = patch.type(x).dims[axis]
            assert isinstance(size, int)
            x = _sliced(patch, x, axis, 0, size, step)
    return x


def _frames(patch: Patch, x: Value, found: Volume, depth: int) -> Value:
    """(N, D, H, W, C) -> (N, ``depth``, H, W, taps * C): for each frame of the result, the frames under the taps.

    With groups and several taps, the last axis is (groups, taps * C / groups), so that the channels of a group stay together."""
    a, taps = found.attrs, found.weight.shape[2]
    begin, end = a.pads[0], a.pads[3]
    if taps > 1 and a.group > 1:
        *outer, channels = patch.type(x).dims
        x = in_shape(patch, x, (*outer, a.group, channels // a.group))
    if begin or end:
        rest = (0,) * (len(patch.type(x).dims) - 2)
        x = patch.add("Pad", [x, integers(patch, [0, begin, *rest, 0, end, *rest], "pads")], PadAttrs())
    if taps == 1:
        return _every(patch, x, {1: a.strides[0]})
    reach = (depth - 1) * a.strides[0] + 1
    starts = [tap * a.dilations[0] for tap in range(taps)]
    parts = [_sliced(patch, x, 1, start, start + reach, a.strides[0]) for start in starts]
    return patch.add("Concat", parts, ConcatAttrs(len(patch.type(x).dims) - 1))


def _image(patch: Patch, x: Value, rows: bool, src: frozenset[str] | None) -> Value:
    """(N, D, H, W, C) as (N * D, C, H, W), or (``rows``) as (N, C, D, H * W)."""
    n, d, h, w, *channels = patch.type(x).dims
    c = math.prod(channels)
    x = in_shape(patch, x, (n, d, h * w, c) if rows else (n * d, h, w, c), src)
    return patch.add("Transpose", [x], TransposeAttrs(_FIRST_2D), src=src)


def _spread(own: Shape, result: Shape, rows: bool) -> tuple[Shape, tuple[int, ...] | None] | None:
    """How an operand of the epilogue is repeated before axes are joined: its dimensions, and the target of the Expand to them.

    The target is None if no Expand is needed: the operand varies along all joined axes, or along none. The result is None if no
    constant target can express the repetition.
    """
    dims = (*(1,) * (5 - len(own)), *own)
    joined = (3, 4) if rows else (0, 2)
    if all(dims[i] == 1 for i in joined) or all(dims[i] == result[i] for i in joined):
        return dims, None
    wide = tuple(result[i] if i in joined else d for i, d in enumerate(dims))
    if any(not isinstance(d, int) and d != before for before, d in zip(dims, wide, strict=True)):
        return None
    return wide, tuple(d if isinstance(d, int) else 1 for d in wide)


def _operand(patch: Patch, graph: Graph, value: Value, result: Shape, rows: bool) -> Value:
    """An operand of the epilogue, which broadcasts to ``result``, as the convolution over two axes needs it."""
    own = graph.type(value).dims
    spread = _spread(own, result, rows)
    assert spread is not None
    dims, target = spread
    if all(d == 1 for d in dims) and len(own) <= 4:
        return value
    if target is None and all(dims[i] == 1 for i in ((3, 4) if rows else (0, 2))):
        n, c, d, h, w = dims
        shape = (n, c, d, 1) if rows else (1, c, h, w)
        return in_shape(patch, value, shape)
    full = dims if target is None else (*(1,) * (5 - len(own)), *own)
    x = value if len(own) == 5 else in_shape(patch, value, full)
    if target is not None:
        x = patch.add("Expand", [x, integers(patch, target, "shape")])
    src = _names(graph, value)
    return _image(patch, _last(patch, x, src), rows, src)


def _per_channel(patch: Patch, graph: Graph, value: Value) -> Value:
    """A number, or one for each channel (of each image), for images."""
    array = graph.constant_value(value)
    if array is None:
        return in_shape(patch, value, (*(1, 1, 1, 1, 1, *graph.type(value).dims)[-5:-3], 1, 1))
    return patch.constant(array.reshape((*(1, 1, 1, 1, 1, *array.shape)[-5:-3], 1, 1)), "channels")


class Conv3dAsImages(RulePass):
    """Rewrites each convolution over three axes. The views between two of them cancel."""

    name = "conv3d_to_conv2d"
    rules = (conv3d_to_conv2d, transpose3d_to_transpose2d)
    views = (transpose_chain, reshape_chain, no_op)

    def rules_for(self, graph: Graph, context: PassContext) -> Sequence[Rule]:
        """Merges views only if there are volumes: earlier passes have merged all other views."""
        volumes = any(op.kind in ("Conv", "ConvTranspose") and op.outputs[0].type.rank == 5 for op in graph.ops())
        return (*self.rules, *self.views) if volumes else self.rules
