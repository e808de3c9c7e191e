"""Images sampled between their pixels, with a thread for some neighboring channels of a result: GridSample and SampledSum.

The places and the weights of the taps are computed once for all channels of a thread. If channels are contiguous in memory, a tap is
one load of up to 16 bytes, and a warp reads whole rows of channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.index.index_kernel import POINTS_LIMIT, emit_index_kernel, operands_of
from optdnn.kernels.index.numeric import REFLECTED, first_tap, tap_index
from optdnn.kernels.layout.views import order_read
from optdnn.kernels.pointwise.expressions import CPP, arithmetic
from optdnn.kernels.tactic import Tactic

ACCESS = 16
"""Bytes of a thread's widest load."""
LAUNCH, CACHE, PLACES = 1.2e-6, 4e12, 1.5e11
"""Cost model: seconds of a launch, bytes of taps per second, and places per second of all threads together."""
FEWEST_THREADS = 4096
"""Threads that hide the latency of the taps. A thread takes fewer channels than it can where there would be fewer of them."""
MOST_UNROLLED = 32
"""Most taps whose loads are in flight at once: the loop over an image's points is unrolled so far. The loads of the taps depend on the load of
their place."""
UNROLLED = "\n        #pragma unroll\n        "
TAPS = {"nearest": 1, "linear": 2, "cubic": 4}
"""Mode -> number of pixels along an axis that a sample reads."""


class SampledChannels(Tactic):
    """GridSample of images with two spatial axes, and SampledSum, if the channels are contiguous in memory."""

    name = "sampled_channels"

    def refuse(self, b: Builder, op: Op) -> str | None:
        images, places, _ = _parts(b, op)
        if any(len(x.shape) != 4 for x in images):
            return "it is for images with two spatial axes"
        if any(0 in x.shape for x in images) or not 0 < math.prod(op.outputs[0].type.static_shape) < POINTS_LIMIT:
            return "no elements, or more than the kernel can count"
        return self.lacks(images, _channels(op, places))

    def lacks(self, images: Sequence[TensorView], channels: int) -> str | None:
        """Why this form of the kernel cannot read the images, or None."""
        return "its channels are not contiguous and aligned" if vector_of(channels, images) == 1 else None

    @staticmethod
    def width(op: Op, images: Sequence[TensorView], channels: int) -> int:
        """Number of channels per thread; ``channels``: those with the same places."""
        most, elements = vector_of(channels, images), math.prod(op.outputs[0].type.static_shape)
        return max((n for n in (1, 2, 4, 8) if n <= most and (n <= 2 or elements >= n * FEWEST_THREADS)), default=1)

    def place(self, b: Builder, op: Op) -> None:
        """Place the result in the order in which it is read."""
        b.target(op.value, order_read(b, op.value, rows=True))

    def seconds(self, b: Builder, op: Op) -> float | None:
        images, places, _ = _parts(b, op)
        out = op.outputs[0].type
        points = sum(p.shape[3] for p in places) if op.kind == "SampledSum" else 1
        count = float(math.prod(out.static_shape) * points)
        taps = count * TAPS[op.attrs.mode] ** 2 * out.dtype.itemsize
        return LAUNCH + max(taps / CACHE, count / self.width(op, images, _channels(op, places)) / PLACES)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        images, places, weights = _parts(b, op)
        out, vec = b.target(op.value), self.width(op, images, _channels(op, places))
        rows = out.shape[2:]
        tensors: dict[str, TensorView | None] = {f"image{k}": x for k, x in enumerate(images)}
        tensors |= {f"places{k}": x for k, x in enumerate(places)} | {"factors": weights}
        space = [out.shape[0], *rows, out.shape[1] // vec]
        text = _text(op, images, places, weights, out, vec)
        emit_index_kernel(b, op, space, tensors, {"y": out}, text, reads=operands_of(b, op), helpers=REFLECTED)


class SampledPixels(SampledChannels):
    """The same for any strides, with a thread per channel."""

    name = "sampled_pixels"

    def lacks(self, images: Sequence[TensorView], channels: int) -> str | None:
        return None


def _parts(b: Builder, op: Op) -> tuple[list[TensorView], list[TensorView], TensorView | None]:
    """Images, places and weights (None: there are no weights)."""
    given = [b.operand(v) for v in op.inputs]
    even = len(given) // 2 * 2
    return given[0:even:2], given[1:even:2], given[even] if len(given) > even else None


def _channels(op: Op, places: Sequence[TensorView]) -> int:
    """Number of channels with the same places: those of a group."""
    channels = op.outputs[0].type.static_shape[1]
    return channels // places[0].shape[1] if op.kind == "SampledSum" else channels


def vector_of(channels: int, images: Sequence[TensorView]) -> int:
    """Number of neighboring channels per thread, a divisor of ``channels``: up to 16 aligned bytes of each image."""
    best, item = 1, images[0].dtype.itemsize
    for count in (2, 4, 8):
        fits = channels % count == 0 and count * item <= ACCESS and all(together(x, count) for x in images)
        best = count if fits else best
    return best


def _text(
    op: Op,
    images: Sequence[TensorView],
    places: Sequence[TensorView],
    weights: TensorView | None,
    out: TensorView,
    vec: int,
) -> str:
    """C++ of a thread: the samples of each image in turn, then the store."""
    rank, number, element = len(out.shape), arithmetic(out.dtype), CPP[out.dtype]
    summed = op.kind == "SampledSum"
    lines = [
        f"const i64 channel = o{rank - 1} * {vec}, group = channel / {_channels(op, places)};",
        f"{number} acc[{vec}];{each(vec)} acc[j] = {number}(0);",
    ]
    done = 0
    for k, (x, at) in enumerate(zip(images, places, strict=True)):
        points = at.shape[3] if summed else 1
        ahead = max(1, MOST_UNROLLED // TAPS[op.attrs.mode] ** 2)
        step = max(n for n in range(1, ahead + 1) if points % n == 0)
        lines.append(
            f"for (int q0 = 0; q0 < {points}; q0 += {step}) {{{UNROLLED}for (int r = 0; r < {step}; r++) {{ const int q = q0 + r;"
        )
        where = "o0, group, o1, q" if summed else "o0, o1, o2"
        if weights is not None:
            spread = [
                i if n > 1 else "0" for i, n in zip(("o0", "group", "o1", f"{done} + q"), weights.shape, strict=True)
            ]
            lines.append(f"const {number} factor = {number}(widen(p.factors[at_factors({', '.join(spread)})]));")
        lines.append(_sample(op, k, x, where, number, element, vec, "factor" if weights is not None else ""))
        lines.append("}}")
        done += points
    at_y = ", ".join(["o0", "channel", *(f"o{k}" for k in range(1, rank - 1))])
    if vec > 1 and together(out, vec):
        narrowed = f"{each(vec)} v.lane[j] = narrow<{element}>(acc[j]);"
        lines.append(f"Pack<{element}, {vec}> v; {narrowed} v.store(p.y + at_y({at_y}));")
    else:
        at_j = at_y.replace("channel", "channel + j")
        lines.append(f"{each(vec)} p.y[at_y({at_j})] = narrow<{element}>(acc[j]);")
    return " ".join(lines)


def together(x: TensorView, count: int) -> bool:
    """Whether ``count`` neighboring channels are one aligned access."""
    apart = [s for k, s in enumerate(x.strides) if k != 1 and x.shape[k] > 1]
    return x.strides[1] == 1 and all(n % count == 0 for n in (x.offset, *apart))


def _sample(op: Op, k: int, x: TensorView, where: str, number: str, element: str, vec: int, factor: str) -> str:
    """C++ that adds the taps of one place in image ``k`` to ``acc``. A tap outside of the image is read at the image's edge, so that no
    branch precedes the load, and is not added."""
    a, lines, loops = op.attrs, [], []
    for axis in range(2):
        size = x.shape[2 + axis]
        low, high = (0.0, size - 1.0) if a.align_corners else (-0.5, size - 0.5)
        g, place = f"g{axis}", f"a{axis}"
        scaled = (
            f"({g} + 1) / 2 * {number}({size - 1})" if a.align_corners else f"(({g} + 1) * {number}({size}) - 1) / 2"
        )
        lines.append(f"const {number} {g} = {number}(widen(p.places{k}[at_places{k}({where}, {1 - axis})]));")
        lines.append(f"{number} {place} = {scaled};")
        if a.mode == "nearest":
            lines.append(f"{place} = rint({place});")
        if a.padding_mode == "border" and a.mode != "cubic":
            lines.append(
                f"{place} = {place} < 0 ? {number}(0) : {place} > {number}({size - 1}) ? {number}({size - 1}) : {place};"
            )
        elif a.padding_mode == "reflection":
            lines.append(
                f"if ({place} < {number}({low}) || {place} > {number}({high})) "
                f"{place} = reflected({place}, {number}({low}), {number}({high}));"
            )
        lines.append(first_tap(axis, a.mode, number))
        index = tap_index(a, f"f{axis} + t{axis}", size)
        before = "" if not axis else "inside0 && "
        inside = f"{before}i{axis} >= 0 && i{axis} < {size}" if a.padding_mode == "zeros" else "true"
        loops.append(
            f"{UNROLLED}for (int t{axis} = 0; t{axis} < {TAPS[a.mode]}; t{axis}++) {{ i64 i{axis} = {index}; "
            f"const bool inside{axis} = {inside}; i{axis} = i{axis} < 0 ? 0 : i{axis} >= {size} ? {size - 1} : i{axis};"
        )
    weight = " * ".join(["w0[t0]", "w1[t1]", *([factor] if factor else [])])
    at = f"at_image{k}(o0, channel, i0, i1)"
    load = (
        f"const Pack<{element}, {vec}> v(p.image{k} + {at});" if vec > 1 else f"const {element} v = p.image{k}[{at}];"
    )
    value = "v.lane[j]" if vec > 1 else "v"
    added = f"{each(vec)} acc[j] += {number}(widen({value})) * weight;"
    return " ".join([*lines, *loops, f"const {number} weight = {weight}; {load} if (inside1) {{{added} }}", "}}"])


def each(vec: int) -> str:
    """C++ head of a loop over a thread's channels."""
    return f"{UNROLLED}for (int j = 0; j < {vec}; j++)"
