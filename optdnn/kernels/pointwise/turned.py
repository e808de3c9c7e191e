"""Pointwise operators of a tensor whose result is contiguous along another axis: a thread transposes a small tile in its registers.

A thread that moved one element at a time would use two bytes of each 32-byte sector that it reads (or writes). Here a thread reads
``high`` rows of ``wide`` elements, contiguous in the source, and writes ``wide`` rows of ``high`` elements, contiguous in the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.kernels.builder import TensorView
from optdnn.kernels.launch import Launch, Parameters
from optdnn.kernels.pointwise.strides import merge

THREADS = 256
ENOUGH_THREADS = 1 << 16
"""Number of threads that keep a GPU's memory busy: tiles are small enough to leave this many threads."""
WARP, LINE = 32, 128
"""Threads of a warp, and the bytes that it writes of each row of the target, if it can. So up to four threads read neighboring tiles of
the source's rows, and the next warps read the rest of the same rows. (64 x 1024 x 1024 elements to planes, fp16, H200: 93 us, which
memory bounds at 64. It took 138 us when a warp read 32 bytes of each row, and a distant warp the others.)"""
LEAST_ELEMENTS = 1 << 18
"""Least elements of such a copy: smaller copies take the time of a launch in any order."""


@dataclass(frozen=True)
class Turn:
    """The space of a copy: ``dims`` in the order of threads, the last one fastest, with their strides in ``source`` and ``target``. A tile
    has ``high`` rows of ``wide`` elements in the source. ``down``: from row to row of a tile in the source. ``across``: from row to row
    of it in the target. ``limit``: elements along the source's rows, if the last tile reads padding behind them, else 0; ``along``: the
    dimension of the tiles along the rows (-1: there is only one)."""

    dims: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]
    wide: int
    high: int
    down: int
    across: int
    limit: int = 0
    along: int = -1


@dataclass(frozen=True)
class Elements:
    """C++ types of the elements in the ``source`` and in the ``target``. ``compute``: C++ that computes ``result`` from an element of the
    source, ``v0`` of the type ``wide``. Without a result, elements of one type are moved."""

    source: str
    target: str
    wide: str = ""
    compute: tuple[str, ...] = ()
    result: str = ""

    def put(self, place: str, element: str) -> str:
        """C++ that stores the result of ``element``."""
        if not self.result:
            return f"{place} = {element};"
        lines = " ".join([f"const {self.wide} v0 = widen({element});", *self.compute])
        return f"{{ {lines} {place} = narrow<{self.target}>({self.result}); }}"


def turn_of(source: TensorView, target: TensorView, axes_limit: int) -> Turn | None:
    """The transposing copy of two tensors, if they are large and contiguous along different axes; else None."""
    count = math.prod(target.shape)
    if count < LEAST_ELEMENTS:
        return None
    dims, (to, of) = merge(target.shape, [target.strides, source.strides])
    along = next((k for k, s in enumerate(of) if s == 1), None)
    last = len(dims) - 1
    if along is None or along == last or to[last] != 1 or len(dims) + 2 > axes_limit:
        return None
    apart = [s for k, s in enumerate(of) if k != along]
    wide, limit = _vector(dims[along], source, apart), 0
    if (padded := _vector(0, source, apart)) > wide and _has_padding(dims[along], padded, source, apart):
        wide, limit = padded, dims[along]
    if wide * source.dtype.itemsize < 8:
        return None
    high = _vector(dims[last], target, [s for k, s in enumerate(to) if k != last])
    while high > 1 and count // (wide * high) < ENOUGH_THREADS:
        high //= 2
    tiles, columns = -(-dims[along] // wide), dims[last] // high
    row = high * target.dtype.itemsize
    beside = 1 if limit or columns == 1 else math.gcd(tiles, max(1, WARP * row // LINE))
    near = max(n for n in range(1, WARP // beside + 1) if columns % n == 0)
    near = near if near * row >= LINE else columns
    rows = (tiles // beside, wide * beside, wide * beside * to[along])
    order = [(dims[k], of[k], to[k]) for k in range(last) if k != along]
    order += [(columns // near, of[last] * high * near, high * near), rows]
    order += [(near, of[last] * high, high), (beside, wide, wide * to[along])]
    kept = [o for o in order if o[0] > 1] or [(1, 0, 0)]
    threads, reads, writes = zip(*kept, strict=True)
    at = kept.index(rows) if tiles > 1 and limit else -1
    return Turn(threads, reads, writes, wide, high, of[last], to[along], limit, at)


def _has_padding(size: int, wide: int, x: TensorView, others: Sequence[int]) -> bool:
    """Whether whole accesses of ``wide`` elements may read rows of ``size`` elements: what they read behind a row is its padding."""
    pitch = min(others, default=0)
    within = pitch > 0 and all(s % pitch == 0 for s in others)
    return within and x.offset % pitch + -(-size // wide) * wide <= pitch


def _vector(size: int, x: TensorView, others: Sequence[int]) -> int:
    """Consecutive elements of an access: a power of two, up to 16 bytes, that divides the axis, the offset and the other strides."""
    count = 16 // x.dtype.itemsize
    while count > 1 and (size % count or x.offset % count or any(s % count for s in others)):
        count //= 2
    return count


def launch(arch: str, turn: Turn, elements: Elements) -> Launch:
    count = math.prod(turn.dims)
    parameters = Parameters().pointer("out", "in0").u32(count).sizes(*turn.dims)
    parameters.i64(*turn.target, *turn.source, turn.down, turn.across)
    blocks = min(-(-count // THREADS), 65535 * 8)
    return parameters.generated(arch, _text(turn, elements), "turned", blocks, THREADS)


def _text(turn: Turn, elements: Elements) -> str:
    source, target = elements.source, elements.target
    walk, rank = [], len(turn.dims)
    for d in reversed(range(rank)):
        walk.append(f"k = rest % p.dims[{d}]; rest /= p.dims[{d}];" if d else "k = rest;")
        walk.append(f"o += k * p.so[{d}]; s += k * p.si[{d}];" + (f" a = k * {turn.wide};" if d == turn.along else ""))
    loads = [
        f"const Pack<{source}, {turn.wide}> x{t}(static_cast<const {source}*>(p.in0) + s + {t} * p.down);"
        for t in range(turn.high)
    ]
    stores = []
    for v in range(turn.wide):
        inside = f"if (a + {v} < {turn.limit}) " if turn.limit else ""
        if turn.high == 1:
            stores.append(inside + elements.put(f"static_cast<{target}*>(p.out)[o + {v} * p.across]", f"x0.lane[{v}]"))
            continue
        moved = " ".join(elements.put(f"y.lane[{t}]", f"x{t}.lane[{v}]") for t in range(turn.high))
        stored = f"y.store(static_cast<{target}*>(p.out) + o + {v} * p.across);"
        stores.append(f"{inside}{{ Pack<{target}, {turn.high}> y; {moved} {stored} }}")
    newline = "\n        "
    return f"""struct Params {{
    void* out; const void* in0;
    u32 count; Size dims[{rank}];
    i64 so[{rank}], si[{rank}], down, across;
}};

extern "C" __global__ void __launch_bounds__({THREADS}) turned(const __grid_constant__ Params p) {{
    launch_dependents();
    for (u32 i = blockIdx.x * {THREADS} + threadIdx.x; i < p.count; i += gridDim.x * {THREADS}) {{
        u32 rest = i, k{", a = 0" if turn.limit else ""};
        i64 o = 0, s = 0;
        {newline.join(walk)}
        wait_for_predecessor();
        {newline.join(loads)}
        {newline.join(stores)}
    }}
}}
"""
