"""A convolution of an image that was enlarged to nearest pixels becomes a transposed convolution of the image itself.

Decoders enlarge an image by repeating its pixels, and filter the result (Odena et al., "Deconvolution and checkerboard
artifacts", 2016): the decoders of latent diffusion and of VQGAN, ESRGAN, and GANs. Several taps of a filter then read the same
pixel, so their weights can be added when the network is built. With a factor of 2 and a filter of 3 x 3, each result has 4
products per channel and not 9, and the enlarged image is never stored.

Tap ``t`` of result ``o`` reads the enlarged image at ``o + t - pad``, which is place ``r`` in the block of pixel ``j``: ``o + t -
pad = j * factor + r``. A transposed convolution with the stride ``factor`` carries pixel ``j`` by tap ``m`` to ``o = j * factor +
m - cut``. With ``cut = taps - 1 - pad``, tap ``m`` has the sum of the weights ``t = taps - 1 - m + r`` over all places ``r``.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.conv import ConvTransposeAttrs, resolved
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import operand, producer
from optdnn.runtime.reference.resize import coordinates, plan, rounded
from optdnn.types import Array

RANKS = (3, 4)
"""Of images of one and of two axes. Transposed convolutions over three axes have no kernel of their own."""
MOST_FACTOR = 4
"""A block of ``factor ** 2`` pixels has its own filters: with more, most of their weights are zeros."""


def _factors(graph: Graph, resize: Op) -> tuple[int, ...] | None:
    """How many times a Resize repeats the pixels along each spatial axis; None for other Resizes."""
    a = resize.attrs
    shape, after = graph.type(operand(resize)), resize.outputs[0].type
    if not (shape.is_static and after.is_static) or a.mode != "nearest" or 0 in after.static_shape:
        return None
    scales, sizes = (None if v is None else graph.constant_value(v) for v in (resize.input(2), resize.input(3)))
    if a.coordinate_transformation_mode == "tf_crop_and_resize" or (scales is None and sizes is None):
        return None
    factors = [1] * len(shape.static_shape)
    for p in plan(shape.static_shape, None, scales, sizes, a.axes, a.keep_aspect_ratio_policy):
        if p.out % p.size:
            return None
        factors[p.axis] = p.out // p.size
        read = np.clip(rounded(coordinates(p, a.coordinate_transformation_mode), a.nearest_mode), 0, p.size - 1)
        if not np.array_equal(read, np.arange(p.out) // factors[p.axis]):
            return None
    return tuple(factors[2:]) if factors[:2] == [1, 1] else None


def _summed(weight: Array, factors: tuple[int, ...]) -> Array:
    """The turned filters of the transposed convolution: along each axis, the sums of ``factor`` weights next to one another."""
    spatial = tuple(range(weight.ndim - len(factors), weight.ndim))
    turned: Array = np.flip(weight, spatial).astype(np.float64)
    for axis, factor in zip(spatial, factors, strict=True):
        size = list(turned.shape)
        size[axis] += factor - 1
        total = np.zeros(size)
        for r in range(factor):
            total[(*[slice(None)] * axis, slice(r, r + turned.shape[axis]))] += turned
        turned = total
    return turned.astype(weight.dtype)


def _transposed(weight: Array, group: int) -> Array:
    """Filters [outputs, inputs / group, …] of a convolution as [inputs, outputs / group, …]."""
    outputs, inputs, *taps = weight.shape
    parts = weight.reshape(group, outputs // group, inputs, *taps).swapaxes(1, 2)
    return np.ascontiguousarray(parts.reshape(group * inputs, outputs // group, *taps))


@rule("upsampled_convolution", {"Conv"})
def upsampled_convolution(graph: Graph, op: Op) -> Match | Miss | None:
    """``conv(enlarge(x))`` is a transposed convolution of x."""
    resize, weight = producer(graph, operand(op), {"Resize"}), graph.constant_value(op.input(1))
    if resize is None or weight is None or weight.ndim not in RANKS or op.attrs.prologue or op.attrs.epilogue:
        return None
    factors = _factors(graph, resize)
    if factors is None or set(factors) == {1} or len(op.inputs) > 3:
        return None
    taps = weight.shape[2:]
    if all(n == 1 for n, factor in zip(taps, factors, strict=True) if factor > 1):
        return None
    if max(factors) > MOST_FACTOR:
        return Miss(f"{resize.name} enlarges the image {max(factors)} times (at most {MOST_FACTOR})")
    if graph.sole_user(resize.value) is None:
        return Miss(f"the enlarged image {resize.name} is used {graph.use_count(resize.value)} times")
    a = resolved(op.attrs, graph.type(operand(op)), graph.type(operand(op, 1)))
    if any(n != 1 for n in (*a.strides, *a.dilations)) or a.auto_pad != "NOTSET":
        return Miss(f"{op.name} has strides or dilations")
    if a.group not in (1, weight.shape[0]) or (a.group > 1 and weight.shape[1] > 1):
        return Miss(f"{op.name} has {a.group} groups of channels")
    rank = len(taps)
    cuts = [n - 1 - pad for n, pad in zip(taps * 2, a.pads, strict=True)]
    if min(cuts) < 0:
        return Miss(f"the padding of {op.name} is wider than its filter")
    attrs = ConvTransposeAttrs(factors, tuple(cuts), (1,) * rank, (0,) * rank, a.group)
    filters = _transposed(_summed(weight, factors), a.group)

    def build(patch: Patch) -> Value:
        return patch.add("ConvTranspose", [operand(resize), patch.constant(filters, "filters"), *op.inputs[2:]], attrs)

    return Match((op, resize), build)


class UpsampledConvolutions(RulePass):
    name = "upsampled_convolutions"
    rules = (upsampled_convolution,)
