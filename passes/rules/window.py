"""Convolutions and pools absorb Pads, activations move before max pools, and reductions of images become pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.reduce import reduced_axes
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import (
    ints,
    non_negative,
    operand,
    producer,
    reshape_target,
    reshaped,
    scalar,
    shape_of,
    sizes_of,
)
from optdnn.passes.support.stages import ACTIVATIONS, ANCHORS
from optdnn.types import is_float, normalize_axis


def _padding(graph: Graph, pad: Op, rank: int) -> tuple[tuple[int, ...], float] | Miss:
    """The spatial pads (begins, then ends) and the filler of a Pad that a window over ``rank`` spatial axes could absorb."""
    if pad.attrs.mode != "constant":
        return Miss(f"{pad.name} pads by {pad.attrs.mode}, not with a constant")
    pads, axes = ints(graph, pad.inputs[1]), ints(graph, pad.input(3))
    filler = scalar(graph, pad.input(2)) if pad.input(2) is not None else 0.0
    if pads is None or filler is None or (pad.input(3) is not None and axes is None):
        return Miss(f"the pads of {pad.name} are not constant")
    which = range(rank + 2) if axes is None else [normalize_axis(a, rank + 2) for a in axes]
    begins, ends = [0] * (rank + 2), [0] * (rank + 2)
    for i, axis in enumerate(which):
        begins[axis], ends[axis] = pads[i], pads[i + len(which)]
    if any(begins[:2]) or any(ends[:2]):
        return Miss(f"{pad.name} pads the batch or the channels")
    if min(begins + ends) < 0:
        return Miss(f"{pad.name} crops")
    return (*begins[2:], *ends[2:]), filler


@rule("pad_conv", {"Conv"})
def pad_conv(graph: Graph, op: Op) -> Match | Miss | None:
    """A convolution absorbs a Pad with zeros before it."""
    pad = producer(graph, op.inputs[0], {"Pad"})
    if pad is None:
        return None
    pads = conv_pads(graph, op, pad)
    if isinstance(pads, Miss):
        return pads
    inputs = (pad.inputs[0], *op.inputs[1:])
    return Match((op, pad), lambda patch: patch.add("Conv", inputs, replace(op.attrs, pads=pads)))


def conv_pads(graph: Graph, op: Op, pad: Op, zero: int = 0) -> tuple[int, ...] | Miss:
    """The pads of a convolution that absorbs a Pad of its operand. ``zero``: the zero point, if the Pad is one of integers."""
    found = _padding(graph, pad, len(op.attrs.strides))
    if isinstance(found, Miss):
        return found
    pads, filler = found
    if filler != zero:
        return Miss(f"{pad.name} pads with {filler:g}, a convolution pads with zeros")
    if op.attrs.auto_pad != "NOTSET" or op.attrs.prologue:
        return Miss(f"{op.name} has padding that depends on its input")
    return tuple(a + b for a, b in zip(op.attrs.pads, pads, strict=True))


@rule("drop_taps", {"Conv"})
def drop_taps(graph: Graph, op: Op) -> Match | Miss | None:
    """Taps at the ends of a filter are dropped if they read only padding.

    If the dilation is larger than the image, only the middle tap remains (DeepLab's widest branch on small images).
    """
    a, shape = op.attrs, shape_of(graph, operand(op))
    if not any(a.pads) or a.auto_pad != "NOTSET" or shape is None or max(a.dilations) == 1:
        return None
    weight, out = graph.constant_value(operand(op, 1)), op.outputs[0].type.shape
    if weight is None or out is None or not all(isinstance(n, int) for n in (*shape[2:], *out[2:])):
        return None
    rank = len(a.strides)
    found = [
        _useful(shape[2 + i], out[2 + i], weight.shape[2 + i], a.strides[i], a.pads[i], a.dilations[i])  # type: ignore[arg-type]
        for i in range(rank)
    ]
    if all(taps == range(k) for taps, k in zip(found, weight.shape[2:], strict=True)):
        return None
    if not all(found):
        return Miss(f"{op.name} reads nothing but padding")
    begins = [a.pads[i] - taps.start * a.dilations[i] for i, taps in enumerate(found)]
    ends = [a.pads[rank + i] - (weight.shape[2 + i] - taps.stop) * a.dilations[i] for i, taps in enumerate(found)]
    if min(*begins, *ends) < 0:
        return Miss(f"without its outer taps {op.name} would crop its input")
    kept = weight[(slice(None), slice(None), *(slice(taps.start, taps.stop) for taps in found))]

    def rewrite(patch: Patch) -> Value:
        inputs = [op.inputs[0], patch.constant(np.ascontiguousarray(kept), "taps.weight"), *op.inputs[2:]]
        return patch.add("Conv", inputs, replace(a, pads=(*begins, *ends)))

    return Match((op,), rewrite)


def _useful(size: int, out: int, taps: int, stride: int, pad: int, dilation: int) -> range:
    """The range of taps from the first to the last tap that reads an element of the axis; empty if none does."""
    windows = np.arange(out) * stride - pad
    reads = [t for t in range(taps) if ((windows + t * dilation >= 0) & (windows + t * dilation < size)).any()]
    return range(reads[0], reads[-1] + 1) if reads else range(0)


@rule("pad_pool", {"AveragePool", "MaxPool"})
def pad_pool(graph: Graph, op: Op) -> Match | Miss | None:
    """A pool absorbs a Pad before it.

    Zeros before an average count as elements (``count_include_pad``). A max pool pads with minus infinity. This gives the same
    result if no element is smaller than the Pad's filler and each window holds an element.
    """
    pad = producer(graph, op.inputs[0], {"Pad"})
    if pad is None:
        return None
    pads = pool_pads(graph, op, pad)
    if isinstance(pads, Miss):
        return pads
    attrs = replace(op.attrs, pads=pads, **({"count_include_pad": True} if op.kind == "AveragePool" else {}))
    return Match((op, pad), lambda patch: patch.add(op.kind, [pad.inputs[0]], attrs))


def pool_pads(graph: Graph, op: Op, pad: Op, zero: int = 0) -> tuple[int, ...] | Miss:
    """The pads of a pool that absorbs a Pad of its operand. ``zero``: as of :func:`conv_pads`."""
    x, a = operand(pad), op.attrs
    found = _padding(graph, pad, len(a.strides))
    if isinstance(found, Miss):
        return found
    if a.auto_pad != "NOTSET" or a.ceil_mode:
        return Miss(f"{op.name} rounds its output size up, or has padding that depends on its input")
    pads = tuple(p + q for p, q in zip(a.pads, found[0], strict=True))
    if _may_be_all_padding(pads, a.kernel_shape) or any(d != 1 for d in a.dilations):
        return Miss(f"a window of {op.name} could hold nothing but padding")
    average = op.kind == "AveragePool"
    reason = _refuse_average(op, pad, found[1] - zero) if average else _refuse_max(graph, op, pad, x, found[1])
    return pads if reason is None else Miss(reason)


def _may_be_all_padding(pads: Sequence[int], kernel: Sequence[int]) -> bool:
    return any(p >= k for p, k in zip(pads, (*kernel, *kernel), strict=True))


def _refuse_average(op: Op, pad: Op, filler: float) -> str | None:
    if filler != 0:
        return f"{pad.name} pads with {filler:g}, an average pads with zeros"
    if any(op.attrs.pads) and not op.attrs.count_include_pad:
        return f"{op.name} has its own padding, which it does not count"
    return None


def _refuse_max(graph: Graph, op: Op, pad: Op, x: Value, filler: float) -> str | None:
    if op.attrs.indices:
        return f"{op.name} returns indices, which count the padding"
    dtype = graph.type(x).dtype
    lowest = float(np.finfo(np.float32).min) if dtype.itemsize >= 4 and dtype.kind == "f" else -np.inf
    if filler > lowest and not (filler <= 0 and non_negative(graph, x)):
        return f"{pad.name} pads with {filler:g}, and elements may be smaller"
    return None


@rule("activation_before_pool", ACTIVATIONS)
def activation_before_pool(graph: Graph, op: Op) -> Match | Miss | None:
    """A monotone activation after a convolution and a MaxPool moves before the pool, into the convolution's epilogue."""
    pool = producer(graph, op.inputs[0], {"MaxPool"})
    if pool is None or not op.definition.traits.monotone:
        return None
    if any(v is not None and graph.constant_value(v) is None for v in op.inputs[1:]):
        return None
    x = operand(pool)
    if producer(graph, x, ANCHORS, alone=True) is None:
        return None
    if graph.sole_user(pool.value) is None:
        return Miss(f"the result of {pool.name} has other uses")
    a = pool.attrs
    empty = _may_be_all_padding(a.pads, a.kernel_shape) or a.ceil_mode
    if a.indices or empty or (any(a.pads) and any(d != 1 for d in a.dilations)):
        return Miss(f"a window of {pool.name} could hold nothing but padding, or it returns indices")

    def build(patch: Patch) -> Value:
        activated = patch.add(op.kind, [x, *op.inputs[1:]], op.attrs, src=op.src)
        return patch.add("MaxPool", [activated], a, src=pool.src)

    return Match((op, pool), build)


@rule("scale_before_resize", {"Mul", "Div"})
def scale_before_resize(graph: Graph, op: Op) -> Match | Miss | None:
    """A factor per channel moves before a Resize that enlarges an image: styles of StyleGAN2 (Karras et al., 2020)."""
    for slot in (0, 1) if op.kind == "Mul" else (0,):
        resize = producer(graph, op.inputs[slot], {"Resize"}, alone=True)
        factor = operand(op, 1 - slot)
        if resize is None or scalar(graph, factor) is not None:
            continue
        before, after, own = (shape_of(graph, v) for v in (operand(resize), op.value, factor))
        if before is None or after is None or own is None or resize.outputs[0].type.shape != after:
            return None
        resized = [k - len(after) for k, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        if any(len(own) >= -k and own[k] != 1 for k in resized) or not is_float(op.outputs[0].type.dtype):
            return None
        small, large = sizes_of(graph, operand(resize)), sizes_of(graph, op.value)
        if small is None or large is None or math.prod(small) >= math.prod(large):
            return Miss(f"{resize.name} does not enlarge the image: it gives fewer pixels, or as many")
        if resize.attrs.coordinate_transformation_mode == "tf_crop_and_resize":
            return Miss(f"{resize.name} may extrapolate: some results are no pixels of its image")

        def build(patch: Patch, resize: Op = resize, slot: int = slot) -> Value:
            inputs = [operand(resize) if k == slot else v for k, v in enumerate(op.inputs)]
            scaled = patch.add(op.kind, inputs, op.attrs, src=op.src)
            return patch.add("Resize", [scaled, *resize.inputs[1:]], resize.attrs, src=resize.src)

        return Match((op, resize), build)
    return None


@rule("spatial_reduction", {"ReduceMean", "ReduceMax"})
def spatial_reduction(graph: Graph, op: Op) -> Match | Miss | None:
    """ReduceMean and ReduceMax over all spatial axes become global pools, with a Reshape after them if the axes are dropped.

    Libraries run pools in their blocked layouts of images, but not general reductions. The Reshape is a view. The rule applies only
    to images and volumes (rank 4 and 5), since tensors of rank 3 are sequences.
    """
    x = operand(op)
    before, after = shape_of(graph, x), op.outputs[0].type.shape
    axes = ints(graph, op.input(1)) if op.input(1) is not None else ()
    if before is None or after is None or axes is None or len(before) not in (4, 5):
        return None
    if reduced_axes(op.attrs, axes, len(before)) != tuple(range(2, len(before))):
        return None
    if graph.type(x).dtype.kind in "biu":
        return None
    pooled = (*before[:2], *(1,) * (len(before) - 2))
    target = None if op.attrs.keepdims else reshape_target(pooled, after)
    if target is None and not op.attrs.keepdims:
        return Miss("no constant target can express the result's shape")
    kind = "GlobalAveragePool" if op.kind == "ReduceMean" else "GlobalMaxPool"

    def build(patch: Patch) -> Value:
        y = patch.add(kind, [x])
        return y if target is None else reshaped(patch, y, target)

    return Match((op,), build)


@rule("pool_of_all", {"MaxPool", "AveragePool"})
def pool_of_all(graph: Graph, op: Op) -> Match | None:
    """A pool whose only window is the whole image becomes a global pool.

    Exporters write adaptive pools with one result in this form. Sequences are left out, since OpenVINO has a fault
    in their global pools (``openvino_faults``)."""
    x, a = operand(op), op.attrs
    sizes = graph.type(x).dims[2:]
    if (
        a.kernel_shape != sizes
        or len(sizes) < 2
        or any(a.pads)
        or a.auto_pad not in ("NOTSET", "VALID")
        or len(op.outputs) > 1
    ):
        return None
    if not is_float(graph.type(x).dtype) or any(d != 1 for d in a.dilations):
        return None
    kind = "GlobalMaxPool" if op.kind == "MaxPool" else "GlobalAveragePool"
    return Match((op,), lambda patch: patch.add(kind, [x]))
