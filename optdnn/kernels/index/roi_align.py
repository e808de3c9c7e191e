"""RoiAlign: means (or maxima) of bilinear samples in the bins of regions, with a thread for some neighboring channels of a bin.

The places of the samples and their weights are computed once for all channels of a thread. If channels are contiguous in memory, a tap
is one load of up to 16 bytes, and a warp reads whole rows of channels.
"""

from __future__ import annotations

import math
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.index.index_kernel import POINTS_LIMIT, emit_index_kernel, needed, operands_of
from optdnn.kernels.index.sampling import LAUNCH, PLACES, UNROLLED, each, together, vector_of
from optdnn.kernels.pointwise.expressions import CPP, arithmetic, literal
from optdnn.kernels.tactic import Tactic
from optdnn.types import is_float

ADAPTIVE = 2
"""Samples along an axis of a bin that the cost model assumes if their number depends on the region."""
CACHE = 8e12
"""Bytes of taps per second: neighboring samples read the same pixels (1,000 regions of 7 x 7 bins and 256 channels: 50 to 58 us on an H100)."""
MOST_UNROLLED = 4
"""Most samples of a bin whose loads are in flight at once; each has four taps."""
TAPS = (("low", "low"), ("low", "high"), ("high", "low"), ("high", "high"))


class RoiChannels(Tactic):
    """RoiAlign of images whose channels are contiguous in memory."""

    name = "roi_channels"

    def refuse(self, b: Builder, op: Op) -> str | None:
        x = needed(b, op, 0)
        if not is_float(x.dtype):
            return f"it does not interpolate {x.dtype.name}"
        if 0 in x.shape or not 0 < math.prod(op.outputs[0].type.static_shape) < POINTS_LIMIT:
            return "no elements, or more than the kernel can count"
        return self.lacks(op, x)

    def lacks(self, op: Op, x: TensorView) -> str | None:
        """Why this form of the kernel cannot read the images, or None."""
        return "its channels are not contiguous and aligned" if self.width(op, x) == 1 else None

    def width(self, op: Op, x: TensorView) -> int:
        """Number of channels per thread."""
        return vector_of(op.outputs[0].type.static_shape[1], [x])

    def seconds(self, b: Builder, op: Op) -> float | None:
        x, out = needed(b, op, 0), op.outputs[0].type
        samples = float(math.prod(out.static_shape) * (op.attrs.sampling_ratio or ADAPTIVE) ** 2)
        return LAUNCH + max(samples * len(TAPS) * x.dtype.itemsize / CACHE, samples / self.width(op, x) / PLACES)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        x, rois, batch, out = needed(b, op, 0), needed(b, op, 1), needed(b, op, 2), b.target(op.value)
        vec = self.width(op, x)
        regions, channels, *bins = out.shape
        inner = x.strides[1] == 1
        space = [regions, *bins, channels // vec] if inner else [regions, channels, *bins]
        names = ("o0", "o1", "o2", "o3") if inner else ("o0", "o2", "o3", "o1")
        text = _text(op, x, out, vec, names)
        emit_index_kernel(b, op, space, {"x": x, "r": rois, "b": batch}, {"y": out}, text, reads=operands_of(b, op))


class RoiPixels(RoiChannels):
    """The same for any strides, with a thread per channel."""

    name = "roi_pixels"

    def lacks(self, op: Op, x: TensorView) -> str | None:
        return None

    def width(self, op: Op, x: TensorView) -> int:
        return 1


def _text(op: Op, x: TensorView, out: TensorView, vec: int, names: tuple[str, str, str, str]) -> str:
    """C++ of a thread. ``names``: the coordinates that count regions, rows and columns of bins, and vectors of channels."""
    region, row, column, vectors = names
    number, element, greatest = arithmetic(x.dtype), CPP[x.dtype], op.attrs.mode == "max"
    lines = [
        f"const i64 channel = {vectors} * {vec}, image = i64(p.b[at_b({region})]);",
        f"{number} acc[{vec}];{each(vec)} acc[j] = {number}(0);",
        *(_axis(op, k, region, at, x.shape[3 - k], number) for k, at in enumerate((column, row))),
        f"bool any = {' || '.join(f'begin_{axis} > 0 || end_{axis} < n_{axis}' for axis in 'yx')};" if greatest else "",
        *_loop(op, "y", x.shape[2], number),
        "const i64 row_low = at_x(image, channel, low_y, 0), row_high = at_x(image, channel, high_y, 0);",
        *_loop(op, "x", x.shape[3], number),
    ]
    values = []
    for k, (above, left) in enumerate(TAPS):
        at = f"row_{above} + {left}_x * p.s_x[3]"
        lines.append(
            f"const Pack<{element}, {vec}> v{k}(p.x + {at});" if vec > 1 else f"const {element} v{k} = p.x[{at}];"
        )
        parts = [
            f"part_{axis}" if side == "high" else f"(1 - part_{axis})" for axis, side in (("y", above), ("x", left))
        ]
        values.append(f"{number}(widen(v{k}{'.lane[j]' if vec > 1 else ''})) * ({' * '.join(parts)})")
    if greatest:
        taken = [f"{{ const {number} t = inside ? {v} : {number}(0); acc[j] = {'any' if not k else 'true'} && !(t > acc[j]) ? acc[j] : t; }}"
                 for k, v in enumerate(values)]  # fmt: skip
        lines.append(f"const bool inside = valid_y && valid_x;{each(vec)} {{ {' '.join(taken)} }} any = true; }}}}")
    else:
        lines.append(f"if (valid_y && valid_x) {{{each(vec)} acc[j] += {' + '.join(values)}; }} }}}}")
        lines.append(
            f"const {number} count = n_y > 0 && n_x > 0 ? {number}(n_y * n_x) : {number}(1);{each(vec)} acc[j] /= count;"
        )
    at_y = f"at_y({region}, channel, {row}, {column})"
    if vec > 1 and together(out, vec):
        lines.append(
            f"Pack<{element}, {vec}> v;{each(vec)} v.lane[j] = narrow<{element}>(acc[j]); v.store(p.y + {at_y});"
        )
    else:
        lines.append(f"{each(vec)} p.y[{at_y.replace('channel', 'channel + j')}] = narrow<{element}>(acc[j]);")
    return " ".join(lines)


def _axis(op: Op, k: int, region: str, at: str, size: int, number: str) -> str:
    """C++ that finds the first place of a bin along x (``k`` = 0) or y, the step between bins, and the samples to visit.

    A bin of a huge region has as many samples as pixels. All that may lie in the image are visited, and no more than twice its size: the
    samples are at least half a pixel apart."""
    a, axis = op.attrs, "xy"[k]
    offset = 0.5 if a.coordinate_transformation_mode == "half_pixel" else 0.0
    count = (a.output_width, a.output_height)[k]
    first, last = (
        f"{number}(widen(p.r[at_r({region}, {k + 2 * i})])) * {literal(a.spatial_scale, number)} - {literal(offset, number)}"
        for i in (0, 1)
    )
    least = "" if offset else f" extent_{axis} = extent_{axis} < 1 ? 1.0 : extent_{axis};"
    found = (
        f"const double low_end_{axis} = double({first}); double extent_{axis} = double({last}) - low_end_{axis};{least} "
        f"const double step_{axis} = extent_{axis} / {count}, first_{axis} = low_end_{axis} + double({at}) * step_{axis};"
    )
    if a.sampling_ratio > 0:
        return f"{found} const double n_{axis} = {a.sampling_ratio}; const int begin_{axis} = 0, end_{axis} = {a.sampling_ratio};"
    return (
        f"{found} const double n_{axis} = ceil(step_{axis}), apart_{axis} = n_{axis} / step_{axis}; "
        f"const double from_{axis} = fmax(0.0, floor((-1 - first_{axis}) * apart_{axis} - 1)); "
        f"const double to_{axis} = fmin(ceil(({size} - first_{axis}) * apart_{axis} + 1), from_{axis} + {2 * size + 8}); "
        f"const double begin_{axis} = fmin(from_{axis}, n_{axis}), end_{axis} = fmin(to_{axis}, n_{axis});"
    )


def _loop(op: Op, axis: str, size: int, number: str) -> list[str]:
    """C++ head of the loop over the samples of a bin along an axis: the two pixels of each, and the weight of the second one.

    The pixels of a sample outside of the image are read at its edge, so that no branch precedes the loads; they are not added."""
    ratio = op.attrs.sampling_ratio
    unrolled = UNROLLED if 0 < ratio * ratio <= MOST_UNROLLED else ""
    return [
        f"{unrolled}for ({'int' if ratio > 0 else 'double'} j_{axis} = begin_{axis}; j_{axis} < end_{axis}; j_{axis}++) {{",
        f"double place_{axis} = first_{axis} + (j_{axis} + 0.5) * step_{axis} / n_{axis};",
        f"const bool valid_{axis} = place_{axis} >= -1 && place_{axis} <= {size};",
        f"place_{axis} = place_{axis} > {size - 1} ? double({size - 1}) : place_{axis} > 0 ? place_{axis} : 0.0;",
        f"i64 low_{axis} = i64(place_{axis}); low_{axis} = low_{axis} > {max(size - 2, 0)} ? {max(size - 2, 0)} : low_{axis};",
        f"const i64 high_{axis} = low_{axis} + 1 < {size} ? low_{axis} + 1 : {size - 1};",
        f"const {number} part_{axis} = {number}(place_{axis} - low_{axis});",
    ]
