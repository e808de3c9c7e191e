"""Pointwise operators with an operand that is contiguous along another axis than the result: a thread transposes a small tile of it in
its registers. Other operands are read where the tile is written.

A thread that moved one element at a time would use two bytes of each 32-byte sector that it reads (or writes). Here a thread reads
``high`` rows of ``wide`` elements, contiguous in the source, and writes ``wide`` rows of ``high`` elements, contiguous in the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.kernels.builder import TensorView
from optdnn.kernels.launch import Launch, Parameters
from optdnn.kernels.pointwise.strides import STRIDES_LIMIT, broadcast, merge

THREADS = 256
ENOUGH_THREADS = 1 << 16
"""Number of threads that keep a GPU's memory busy: tiles are small enough to leave this many threads."""
WARP, LINE = 32, 128
"""Threads of a warp, and the bytes that it writes of each row of the target, if it can. So up to four threads read neighboring tiles of
the source's rows, and the next warps read the rest of the same rows. (64 x 1024 x 1024 elements to planes, fp16, H200: 93 us, which
memory bounds at 64. It took 138 us when a warp read 32 bytes of each row, and a distant warp the others.)"""
MOST_BYTES = 384
"""Most bytes of operands that a thread loads: with more, it needs over 128 registers, or they spill."""
LEAST_ELEMENTS = 1 << 18
"""Least elements of such a copy: smaller copies take the time of a launch in any order."""


@dataclass(frozen=True)
class Beside:
    """How another operand is read: its ``strides`` in the space of the copy, and ``across``, from row to row of a tile in the target.
    ``together``: its elements are neighbors where the target's are; else it has the same element for a whole row of a tile."""

    strides: tuple[int, ...]
    across: int
    together: bool


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
    others: tuple[Beside, ...] = ()


@dataclass(frozen=True)
class Operand:
    """An operand: its ``slot`` among those of the operator, and the C++ types of its elements and of arithmetic with them."""

    slot: int
    type: str
    wide: str


@dataclass(frozen=True)
class Elements:
    """What a launch computes. ``source``: the operand that is transposed; ``others``: in the order of ``Turn.others``; ``target``: C++
    type of the result. ``compute``: C++ that computes ``result`` from the operands' elements ``v0``, ``v1``, ... Without a result,
    elements of one type are moved."""

    source: Operand
    target: str
    compute: tuple[str, ...] = ()
    result: str = ""
    others: tuple[Operand, ...] = ()

    def put(self, place: str, elements: Sequence[str]) -> str:
        """C++ that stores the result of an element of each operand, that of the source first."""
        if not self.result:
            return f"{place} = {elements[0]};"
        read = zip((self.source, *self.others), elements, strict=True)
        lines = " ".join([*(f"const {x.wide} v{x.slot} = widen({e});" for x, e in read), *self.compute])
        return f"{{ {lines} {place} = narrow<{self.target}>({self.result}); }}"


def turn_of(source: TensorView, target: TensorView, others: Sequence[TensorView] = ()) -> Turn | None:
    """The transposing copy of two tensors of one shape, if they are large and contiguous along different axes; else None. ``others``
    broadcast to the shape, and are contiguous where the target is, or do not change along that axis."""
    count = math.prod(target.shape)
    if count < LEAST_ELEMENTS or source.shape != target.shape:
        return None
    spread = [broadcast(x, target.shape) for x in others]
    dims, (to, of, *beside_them) = merge(target.shape, [target.strides, source.strides, *spread])
    along = next((k for k, s in enumerate(of) if s == 1), None)
    last = len(dims) - 1
    if along is None or along == last or to[last] != 1 or len(dims) + 2 > STRIDES_LIMIT:
        return None
    apart = [s for k, s in enumerate(of) if k != along]
    wide, limit = _vector(dims[along], source, apart), 0
    if any(strides[last] not in (0, 1) for strides in beside_them):
        return None
    padded = 0 if others else _vector(0, source, apart)  # behind their rows, others have no padding
    if padded > wide and _has_padding(dims[along], padded, source, apart):
        wide, limit = padded, dims[along]
    if wide * source.dtype.itemsize < 8:
        return None
    high = min(
        _vector(dims[last], x, [s for k, s in enumerate(own) if k != last])
        for x, own in ((target, to), *zip(others, beside_them, strict=True))
        if own[last] == 1
    )
    item = source.dtype.itemsize + sum(
        x.dtype.itemsize for x, own in zip(others, beside_them, strict=True) if own[last]
    )
    while high > 1 and (count // (wide * high) < ENOUGH_THREADS or item * wide * high > MOST_BYTES):
        high //= 2
    return _turn(dims, (of, to, *beside_them), (along, wide, high), limit, target.dtype.itemsize)


def _turn(
    dims: Sequence[int], strides: Sequence[Sequence[int]], tile: tuple[int, int, int], limit: int, item: int
) -> Turn:
    """The space of a copy. ``strides``: of the source, the target and others along ``dims``. ``tile``: the dimension along the source's
    rows, and the sizes of a tile along it and along the last dimension. ``item``: bytes of an element of the target."""
    (along, wide, high), last, walks = tile, len(dims) - 1, list(zip(*strides, strict=True))
    of, to, *beside_them = strides
    tiles, columns = -(-dims[along] // wide), dims[last] // high
    row = high * item
    beside = 1 if limit or columns == 1 else math.gcd(tiles, max(1, WARP * row // LINE))
    near = max(n for n in range(1, WARP // beside + 1) if columns % n == 0)
    near = near if near * row >= LINE else columns

    def part(size: int, k: int, step: int) -> tuple[int, tuple[int, ...]]:
        return size, tuple(step * stride for stride in walks[k])

    rows = part(tiles // beside, along, wide * beside)
    order = [part(dims[k], k, 1) for k in range(last) if k != along]
    order += [part(columns // near, last, high * near), rows, part(near, last, high), part(beside, along, wide)]
    kept = [o for o in order if o[0] > 1] or [(1, (0,) * len(strides))]
    reads, writes, *more = zip(*(steps for _, steps in kept), strict=True)
    at = kept.index(rows) if tiles > 1 and limit else -1
    besides = tuple(Beside(own, s[along], s[last] == 1) for own, s in zip(more, beside_them, strict=True))
    return Turn(tuple(n for n, _ in kept), reads, writes, wide, high, of[last], to[along], limit, at, besides)


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
    """The launch. Operands: ``out``, and ``in`` with the number of the slot for each operand."""
    count, others = math.prod(turn.dims), elements.others
    parameters = (
        Parameters().pointer("out", *(f"in{x.slot}" for x in (elements.source, *others))).u32(count).sizes(*turn.dims)
    )
    parameters.i64(*turn.target, *turn.source, turn.down, turn.across)
    for x in turn.others:
        parameters.i64(*x.strides, x.across)
    blocks = min(-(-count // THREADS), 65535 * 8)
    return parameters.generated(arch, _text(turn, elements), "turned", blocks, THREADS)


def _text(turn: Turn, elements: Elements) -> str:
    source, target, first = elements.source.type, elements.target, elements.source.slot
    others = list(zip(elements.others, turn.others, strict=True))
    walk, rank = [], len(turn.dims)
    for d in reversed(range(rank)):
        walk.append(f"k = rest % p.dims[{d}]; rest /= p.dims[{d}];" if d else "k = rest;")
        steps = [
            f"o += k * p.so[{d}];",
            f"s += k * p.si[{d}];",
            *(f"o{x.slot} += k * p.s{x.slot}[{d}];" for x, _ in others),
        ]
        walk.append(" ".join(steps) + (f" a = k * {turn.wide};" if d == turn.along else ""))
    loads = [
        f"const Pack<{source}, {turn.wide}> x{t}(static_cast<const {source}*>(p.in{first}) + s + {t} * p.down);"
        for t in range(turn.high)
    ]
    loads += [_read(x, beside, v, turn.high) for x, beside in others for v in range(turn.wide)]
    stores = []
    for v in range(turn.wide):
        inside = f"if (a + {v} < {turn.limit}) " if turn.limit else ""
        read = [[f"x{t}.lane[{v}]", *(_lane(x, beside, v, t) for x, beside in others)] for t in range(turn.high)]
        if turn.high == 1:
            stores.append(inside + elements.put(f"static_cast<{target}*>(p.out)[o + {v} * p.across]", read[0]))
            continue
        moved = " ".join(elements.put(f"y.lane[{t}]", read[t]) for t in range(turn.high))
        stored = f"y.store(static_cast<{target}*>(p.out) + o + {v} * p.across);"
        stores.append(f"{inside}{{ Pack<{target}, {turn.high}> y; {moved} {stored} }}")
    newline = "\n        "
    pointers = " ".join(f"const void* in{x.slot};" for x in (elements.source, *elements.others))
    strides = "".join(f"\n    i64 s{x.slot}[{rank}], across{x.slot};" for x, _ in others)
    return f"""struct Params {{
    void* out; {pointers}
    u32 count; Size dims[{rank}];
    i64 so[{rank}], si[{rank}], down, across;{strides}
}};

extern "C" __global__ void __launch_bounds__({THREADS}) turned(const __grid_constant__ Params p) {{
    launch_dependents();
    for (u32 i = blockIdx.x * {THREADS} + threadIdx.x; i < p.count; i += gridDim.x * {THREADS}) {{
        u32 rest = i, k{", a = 0" if turn.limit else ""};
        i64 o = 0, s = 0{"".join(f", o{x.slot} = 0" for x, _ in others)};
        {newline.join(walk)}
        wait_for_predecessor();
        {newline.join(loads)}
        {newline.join(stores)}
    }}
}}
"""


def _read(x: Operand, beside: Beside, row: int, high: int) -> str:
    """C++ that loads what a row of a tile in the target needs of another operand."""
    kind = f"Pack<{x.type}, {high if beside.together else 1}>"
    return f"const {kind} x{x.slot}_{row}(static_cast<const {x.type}*>(p.in{x.slot}) + o{x.slot} + {row} * p.across{x.slot});"


def _lane(x: Operand, beside: Beside, row: int, column: int) -> str:
    """C++ of an element that :func:`_read` loaded."""
    return f"x{x.slot}_{row}.lane[{column if beside.together else 0}]"
