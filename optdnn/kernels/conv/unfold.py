"""Sliding slices of a padded axis in one launch: the slices of a padded tensor side by side, without the padded tensor.

A convolution over three axes reads the frames under its taps as channels: Pad, one Slice per tap, Concat. Positions of
slices count along the padded axis. Elements beyond the operand are 0, or the zero point of integers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import CHANNEL_ALIGN, EIGHT_BITS, Builder, TensorView, row_major, up
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.walks import pieces, walk
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.kernels.pointwise.strides import STRIDES_LIMIT, merge
from optdnn.kernels.tactic import Region, Tactic
from optdnn.types import BF16, DTYPES, FP16, normalize_axis

THREADS = 256
WIDE, MOST_ELEMENTS = 8, 64
"""Bytes of an access that is wide enough for a thread of its own, and most elements of a pixel that one thread holds."""
_WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


@dataclass(frozen=True)
class Frames:
    """Slices of ``x``: slice ``t`` has positions ``first + t * distance + i * step`` along ``axis``, for i in 0 .. ``count``."""

    x: Value
    axis: int
    first: int
    distance: int
    step: int
    count: int
    fill: float | int = 0
    """Value of the elements beyond ``x``."""


def frames(graph: Graph, op: Op) -> Frames | None:
    """The slices that a Concat joins, if they are at equal distances in one tensor that is padded with a constant along
    one axis; else None."""
    slices = [graph.op(v) for v in op.inputs if v is not None]
    if len(slices) < 2 or any(s.kind != "Slice" or s.inputs[0] != slices[0].inputs[0] for s in slices):
        return None
    source = slices[0].inputs[0]
    pad = graph.op(source) if source is not None else op
    if pad.kind != "Pad" or pad.attrs.mode != "constant" or pad.inputs[0] is None or pad.input(3) is not None:
        return None
    pads, fill = _known(graph, pad.input(1)), _fill(graph, pad.input(2))
    if pads is None or fill is None:
        return None
    if not graph.type(pad.inputs[0]).is_static or not all(o.type.is_static for s in (op, *slices) for o in s.outputs):
        return None
    size = graph.type(pad.inputs[0]).static_shape
    padded = [i for i in range(len(size)) if pads[i] or pads[i + len(size)]]
    if len(padded) != 1 or min(pads) < 0 or padded[0] == normalize_axis(op.attrs.axis, len(size)):
        return None
    (axis,) = padded
    return equally_distant(pad.inputs[0], axis, [slice_along(graph, s, axis) for s in slices], pads[axis], fill)


def equally_distant(
    x: Value, axis: int, taken: Sequence[range | None], before: int, fill: float | int = 0
) -> Frames | None:
    """Slices of ``x``, given their positions in ``x`` with ``before`` positions of padding in front; None if they are
    not at equal distances and of equal form."""
    first = taken[0]
    if first is None or any(t is None or (len(t), t.step) != (len(first), first.step) for t in taken) or not first:
        return None
    starts = [t.start for t in taken if t is not None]
    distance = starts[1] - starts[0] if len(starts) > 1 else 1
    if any(b - a != distance for a, b in itertools.pairwise(starts)):
        return None
    return Frames(x, axis, starts[0] - before, distance, first.step, len(first), fill)


def _known(graph: Graph, value: Value | None) -> list[int] | None:
    known = None if value is None else graph.known(value)
    return None if known is None or known.dtype == object else [int(n) for n in known.reshape(-1)]


def _fill(graph: Graph, value: Value | None) -> float | int | None:
    """The value that a Pad adds around its operand; None if it is not known or not finite."""
    if value is None:
        return 0
    known = graph.known(value)
    if known is None or known.dtype == object or known.size != 1 or known.dtype.kind == "c":
        return None
    number: float | int = known.reshape(-1)[0].item()
    return number if math.isfinite(number) else None


def slice_along(graph: Graph, op: Op, axis: int) -> range | None:
    """The positions that a Slice takes along an axis; None if they are not known, or it cuts another axis."""
    parts = [_known(graph, op.input(i)) for i in range(1, 5)]
    (starts, ends, axes, steps), size = parts, graph.type(op.inputs[0]).static_shape  # type: ignore[arg-type]
    if starts is None or ends is None or len(starts) != 1 or (op.input(3) is not None and axes is None):
        return None
    if (op.input(4) is not None and steps is None) or normalize_axis((axes or [0])[0], len(size)) != axis:
        return None
    return range(*slice(starts[0], ends[0], (steps or [1])[0]).indices(size[axis]))


def _steps(found: Frames, x: TensorView) -> tuple[list[int], list[int]]:
    """Along each axis of a slice, the strides of the operand and of positions."""
    steps = [s * (found.step if i == found.axis else 1) for i, s in enumerate(x.strides)]
    return steps, [found.step if i == found.axis else 0 for i in range(len(x.shape))]


def _walk(b: Builder, op: Op, found: Frames, out: TensorView) -> tuple[list[int], list[list[int]], TensorView]:
    """The sizes of the merged axes; along them, the strides of the result, of the operand and of positions; and the
    result with an axis of slices."""
    x, along, taps = b.operand(found.x), normalize_axis(op.attrs.axis, len(out.shape)), len(op.inputs)
    part = out.shape[along] // taps
    # The slices are a separate axis before the axis along which they are joined.
    shape = (*out.shape[:along], taps, part, *out.shape[along + 1 :])
    to = out.view(shape, (*out.strides[:along], part * out.strides[along], *out.strides[along:]))
    steps, places = _steps(found, x)
    steps.insert(along, found.distance * x.strides[found.axis])
    places.insert(along, found.distance)
    dims, strides = merge(shape, [to.strides, steps, places])
    return dims, strides, to


class Unfold(Tactic):
    """A Concat of slices of a tensor padded along one axis: neither the padded tensor nor the slices are stored."""

    name = "unfold"

    def refuse(self, b: Builder, op: Op) -> str | None:
        found = frames(b.graph, op)
        if found is None:
            return "it does not put slices of a padded tensor side by side"
        if found.x not in b.place:
            return "the tensor that is padded is a constant"
        dims, _, _ = _walk(b, op, found, b.result(op.value, self._strides(b, op)))
        if len(dims) > STRIDES_LIMIT or math.prod(dims) >= 1 << 31:
            return f"it has {len(dims)} axes that do not merge, or too many elements"
        return None

    def region(self, b: Builder, op: Op) -> Region:
        """The Concat, its slices, and the Pad before them, except slices and a Pad that others read."""
        slices = list({v.op: b.graph.op(v) for v in op.inputs if v is not None}.values())
        own = [x for x in slices if all(u == op for u in b.graph.users(x.value))]
        pad = b.graph.op(slices[0].inputs[0])  # type: ignore[arg-type]
        whole = len(own) == len(slices) and all(u in slices for u in b.graph.users(pad.value))
        return Region(op, before=(*((pad,) if whole else ()), *own))

    @staticmethod
    def _strides(b: Builder, op: Op) -> tuple[int, ...] | None:
        """Strides of the result if it has no place yet; None: those of its type. Slices that are joined along the last
        axis are channels. For types of tensor cores, pixels are then padded to multiples of 16 bytes."""
        out = op.outputs[0].type
        *outer, channels = out.static_shape
        last = normalize_axis(op.attrs.axis, len(outer) + 1) == len(outer)
        packed = out.dtype in (FP16, BF16) or out.dtype.name in EIGHT_BITS
        if not last or out.layout or not packed:
            return None
        pitch = up(channels, max(CHANNEL_ALIGN, 16 // out.dtype.itemsize))
        return (*(n * pitch for n in row_major(outer)), 1)

    def place(self, b: Builder, op: Op) -> None:
        """Place the result, with pixels padded to multiples of 16 bytes for types of tensor cores."""
        b.target(op.value, self._strides(b, op))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        found = frames(b.graph, op)
        assert found is not None
        _emit_frames(b, op, found, b.target(op.value))


def _pixel(x: TensorView, to: TensorView, vec: int) -> int:
    """Elements of an access of a thread that writes a whole pixel of all taps; 0 if threads should move ``vec`` elements each. ``to``: the
    result, whose last two axes are those of taps and of their elements."""
    taps, part = to.shape[-2:]
    if to.strides[-2:] != (part, 1) or vec * x.dtype.itemsize >= WIDE or taps * part > MOST_ELEMENTS:
        return 0
    distances = (to.offset, *(s for n, s in zip(to.shape[:-2], to.strides[:-2], strict=True) if n > 1))
    return next(n for n in (16, 8, 4, 2, 1) if n * x.dtype.itemsize <= 16 and not any(d % n for d in distances))


def _outer(found: Frames, x: TensorView, to: TensorView) -> tuple[list[int], list[list[int]]]:
    """Sizes and strides, as of :func:`_walk`, of the axes before that of taps."""
    steps, places = _steps(found, x)
    return merge(to.shape[:-2], [to.strides[:-2], steps[:-1], places[:-1]])


def _by_pixels(found: Frames, x: TensorView, to: TensorView, t: str, fill: int, wide: int) -> str:
    """C++ that moves a pixel of all taps, and stores up to ``wide`` elements at once."""
    taps, part = to.shape[-2:]
    apart, channel, size = found.distance * x.strides[found.axis], x.strides[-1], x.shape[found.axis]
    count, stores, at = taps * part, list[str](), 0
    while at < count:
        some = wide
        while some > count - at or at % some:
            some //= 2
        lanes = " ".join(f"v.lane[{j}] = held[{at + j}];" for j in range(some))
        stores.append(f"{{ Pack<{t}, {some}> v; {lanes} v.store(p.y + to + {at}); }}")
        at += some
    newline = "\n    "
    return f"""{t} held[{count}];
    #pragma unroll
    for (int k = 0; k < {taps}; k++) {{
        const bool inside = n + k * {found.distance} >= 0 && n + k * {found.distance} < {size};
        #pragma unroll
        for (int c = 0; c < {part}; c++) held[k * {part} + c] = inside ? p.x[from + k * {apart}LL + c * {channel}LL] : {t}({fill}{"ull" * (fill > 0)});
    }}
    {newline.join(stores)}"""


def _emit_frames(b: Builder, op: Op, found: Frames, out: TensorView) -> None:
    """The launch that writes a Concat's result to ``out``."""
    x = b.operand(found.x)
    dims, (sy, sx, sn), to = _walk(b, op, found, out)
    pitch = x.strides[found.axis]
    vec = pieces(x, out, dims, sy, sx, sn, [found.first * pitch])
    word = DTYPES[_WORDS[x.dtype.itemsize]]  # elements are only moved
    t, fill = CPP[word], int(np.asarray(found.fill, x.dtype).reshape(1).view(word)[0])
    last = normalize_axis(op.attrs.axis, len(out.shape)) == len(out.shape) - 1
    if last and (pixel := _pixel(x, to, vec)):
        dims, (sy, sx, sn) = _outer(found, x, to)
        vec, move = 1, _by_pixels(found, x, to, t, fill, pixel)
    else:
        move = f"""Pack<{t}, {vec}> v;
    #pragma unroll
    for (int j = 0; j < {vec}; j++) v.lane[j] = {fill}{"ull" * (fill > 0)};
    if (n >= 0 && n < {x.shape[found.axis]}) v = Pack<{t}, {vec}>(p.x + from);
    v.store(p.y + to);"""
    rank = len(dims)
    text = f"""struct Params {{ const {t}* x; {t}* y; u32 count; Size dims[{rank}]; i64 sx[{rank}], sn[{rank}], sy[{rank}], from, n; }};

extern "C" __global__ void __launch_bounds__({THREADS}) frames(const __grid_constant__ Params p) {{
    launch_dependents();
    const u32 i = blockIdx.x * {THREADS} + threadIdx.x;
    i64 from = p.from, n = p.n, to = 0;
    {walk("r", "i", "dims", rank, [("from", "sx"), ("n", "sn"), ("to", "sy")])}
    wait_for_predecessor();
    if (i >= p.count) return;
    {move}
}}
"""
    dims[-1] //= vec
    for strides in (sx, sn, sy):
        strides[-1] *= vec
    count = math.prod(dims)
    parameters = (
        Parameters().pointer("x", "y").u32(count).sizes(*dims).i64(*sx, *sn, *sy, found.first * pitch, found.first)
    )
    launch = parameters.generated(b.arch, text, "frames", -(-count // THREADS), THREADS)
    attrs = {
        "axis": found.axis, "first": found.first, "distance": found.distance, "step": found.step, "count": found.count,
        "taps": len(op.inputs), "along": normalize_axis(op.attrs.axis, len(out.shape)), **({"fill": found.fill} if fill else {}),
    }  # fmt: skip
    b.emit(op, launch, {"x": x, "y": out}, "Frames", attrs, [x], [to])
