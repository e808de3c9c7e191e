"""The forms of the kernel of Resize and Pad, by the results of a thread: neighbors in both tensors, neighbors of several pixels of a row,
channels of a pixel that are neighbors only in the operand, pixels of a row, or pixels of a column.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.layout.tap_tables import FEW_TAPS, AxisTable, Taps
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.kernels.pointwise.pointwise import AHEAD, MANY, SHORT
from optdnn.types import Array

ROWS = 8
"""Rows of a resized image for which a thread computes one pixel each."""
PIXELS = 8
"""Most neighbors of a resized row that a thread computes."""
FEW_COLUMNS = 8
"""Most elements of a row that a thread reads for all of its neighbors together."""
VECTORS, FEW_VECTORS = 4, 6
"""Pixels of a row for which a thread computes several channels each, and the most pixels that it reads for them."""
MANY_THREADS = 1 << 15
"""Threads of one pixel each: with fewer, the launch would not fill a large GPU."""


@dataclass(frozen=True)
class ThreadWork:
    """Work of a thread: it computes results along each axis of ``wide``. ``text`` is C++ with all sums and stores.

    ``table``: a table that replaces its axis's own (None: all axes have their own). ``later``: C++ that runs once the texts of AHEAD
    places ``u`` have run, for each of them: their loads are in flight together. ``kept`` declares what it takes from them.
    """

    wide: Mapping[int, int]
    text: str
    table: AxisTable | None = None
    later: str = ""
    kept: str = ""

    @property
    def ahead(self) -> int:
        """Places of a thread."""
        return AHEAD if self.later else 1


def thread_work(b: Builder, taps: Taps) -> ThreadWork:
    """The form of the kernel, as listed above; else one result per thread."""
    x, out, tables = taps.x, taps.out, taps.tables
    order = taps.order
    row = order[0] if order else -1
    wide = _in_a_row(x, out, row) if order and row not in tables else 1
    if wide == 1:
        channels = _channels_apart(b, x, out, tables)
        if channels is not None:
            return _channels(taps, channels)
        if row in tables and tables[row].weight is not None:
            strip = _contiguous_strip(x, out, tables[row])
            if strip is not None:
                return _pixels_of_a_row(taps, strip)
            column = next((i for i in order[1:] if _runs(out, tables.get(i))), None)
            if column is not None:
                return _pixels_of_a_column(taps, column)
    elif out.size >= MANY_THREADS * VECTORS * wide:
        pixels = next((i for i in order[1:] if i in tables), row)
        if pixels != row and tables[pixels].weight is not None:
            strip = _strip(x, out, tables[pixels], VECTORS)
            if strip is not None and strip.columns <= min(FEW_VECTORS, VECTORS * tables[pixels].taps // 2):
                return _vectors_of_a_row(taps, strip, row, wide)
    return _neighbors(taps, row, wide)


def _summed(taps: Taps, axis: int, wide: int, sums: str, stores: str, table: AxisTable | None = None) -> ThreadWork:
    """``wide`` results along ``axis``, which ``sums`` adds up in ``acc`` and ``stores`` writes."""
    zero = f"{taps.accumulator} acc[{wide}];\n    for (int v = 0; v < {wide}; v++) {{ acc[v] = 0; }}"
    return ThreadWork({axis: wide}, f"{zero}\n    {sums}\n    {stores}", table)


def _neighbors(taps: Taps, axis: int, wide: int) -> ThreadWork:
    """``wide`` elements that are neighbors in both tensors: one load and one store. Many small copies are in flight together."""
    if not taps.blends and wide * taps.out.dtype.itemsize <= SHORT and taps.out.size // wide >= MANY:
        t, each = taps.accumulator, f"for (int v = 0; v < {wide}; v++)"
        copied = f"{t} acc[{wide}];{_packed_sums(taps, wide)}\n    {each} {{ found[u][v] = acc[v]; }}"
        later = (
            f"{t} acc[{wide}]; {each} {{ acc[v] = found[u][v]; }}\n    {_stores(CPP[taps.out.dtype], wide, 'to[u]')}"
        )
        kept = f"{t} found[{AHEAD}][{wide}]; i64 to[{AHEAD}];"
        return ThreadWork({axis: wide}, f"{copied}\n    to[u] = {taps.result_offset()};", None, later, kept)
    return _summed(taps, axis, wide, _packed_sums(taps, wide), _stores(CPP[taps.out.dtype], wide, taps.result_offset()))


def _channels(taps: Taps, axis: int) -> ThreadWork:
    """Channels of a pixel that are neighbors only in ``x``: one load of 16 bytes, and a store per channel."""
    wide = 16 // taps.x.dtype.itemsize
    return _summed(taps, axis, wide, _packed_sums(taps, wide), _stores_apart(taps, wide, axis))


@dataclass(frozen=True)
class Strip:
    """``wide`` neighbors of a resized row as the product of a small matrix and the ``columns`` elements that they read together.

    ``first``: the first element that each strip reads, [strip, 1]. ``matrices``: all matrices, [strip, column, neighbor].
    """

    axis: int
    first: Array
    matrices: Array

    @property
    def columns(self) -> int:
        return int(self.matrices.shape[1])

    @property
    def wide(self) -> int:
        return int(self.matrices.shape[2])


def _contiguous_strip(x: TensorView, out: TensorView, table: AxisTable) -> Strip | None:
    """The strips of a row; None also if its results are not contiguous and aligned."""
    wide = min(PIXELS, 16 // out.dtype.itemsize)
    steps = [s for i, s in enumerate(out.strides) if i != table.axis and out.shape[i] > 1]
    if out.strides[table.axis] != 1 or any(s % wide for s in (out.offset, *steps)):
        return None
    return _strip(x, out, table, wide)


def _strip(x: TensorView, out: TensorView, table: AxisTable, wide: int) -> Strip | None:
    """The strips of a row; None if they are not whole, read the fill value, or read too many elements."""
    n, count = x.shape[table.axis], out.shape[table.axis]
    if count % wide:
        return None
    assert table.weight is not None
    index, weight = (a.reshape(count // wide, wide, table.taps) for a in (table.index, table.weight))
    read = weight != 0
    if (index[read] < 0).any():
        return None
    first = np.where(read, index, n).min(axis=(1, 2))
    columns = int(np.where(read, index - first[:, None, None], 0).max()) + 1
    if columns > FEW_COLUMNS:
        return None
    matrix = np.zeros((len(first), columns, wide))
    groups, pixels, _ = np.nonzero(read)
    np.add.at(matrix, (groups, (index - first[:, None, None])[read], pixels), weight[read])
    return Strip(table.axis, np.minimum(first, n - 1)[:, None], matrix)  # the minimum is for a strip that reads nothing


def _pixels_of_a_row(taps: Taps, strip: Strip) -> ThreadWork:
    """Neighbors of a row: each element is read once, and blended over the other axes before the neighbors share it.

    The weights are in the order [column, block of ``lanes`` neighbors, strip, lane], so that the loads of neighboring threads coalesce.
    """
    t, axis, wide, columns = taps.accumulator, strip.axis, strip.wide, strip.columns
    lanes, strips = min(wide, 2 if t == "double" else 4), len(strip.first)
    weights = strip.matrices.reshape(strips, columns, wide // lanes, lanes).transpose(1, 2, 0, 3)
    step = f"""
    #pragma unroll
    for (int s = 0; s < {columns}; s++) {{
        const int k{axis} = {_column(taps, axis)};
        line[s] += ({taps.weights(but=axis)}) * ({taps.value(f"p.x[{' + '.join(taps.operand_offset())}]")});
    }}"""
    sums = f"""const int strip = o{axis} / {wide}, first = p.n{axis}[strip];
    {t} line[{columns}];
    #pragma unroll
    for (int s = 0; s < {columns}; s++) line[s] = 0;
    {taps.in_loops(step, but=axis)}
    #pragma unroll
    for (int j = 0; j < {columns * wide // lanes}; j++) {{
        const Pack<{t}, {lanes}> w(p.f{axis} + (j * {strips} + strip) * {lanes});
        #pragma unroll
        for (int v = 0; v < {lanes}; v++) {{
            if (w.lane[v] != 0) acc[j * {lanes} % {wide} + v] += w.lane[v] * line[j * {lanes} / {wide}];
        }}
    }}"""
    stores = _stores(CPP[taps.out.dtype], wide, taps.result_offset())
    return _summed(taps, axis, wide, sums, stores, AxisTable(axis, strip.first, weights))


def _vectors_of_a_row(taps: Taps, strip: Strip, channels: int, wide: int) -> ThreadWork:
    """``wide`` neighboring channels of several pixels of a row, which share the loads of the pixels that they read.

    The weights are in the order [strip, pixel, column].
    """
    t, axis, columns = taps.accumulator, strip.axis, strip.columns
    pack, value = f"Pack<{CPP[taps.x.dtype]}, {wide}>", taps.value("in.lane[v]")
    step = f"""
    #pragma unroll
    for (int s = 0; s < {columns}; s++) {{
        const int k{axis} = {_column(taps, axis)};
        {pack} in;
        if (!({taps.outside})) in = {pack}(p.x + {" + ".join(taps.operand_offset())});
        #pragma unroll
        for (int v = 0; v < {wide}; v++) {{ line[s * {wide} + v] += ({taps.weights(but=axis)}) * ({value}); }}
    }}"""
    text = f"""const int strip = o{axis} / {strip.wide}, first = p.n{axis}[strip];
    {t} line[{columns * wide}];
    #pragma unroll
    for (int s = 0; s < {columns * wide}; s++) line[s] = 0;
    {taps.in_loops(step, but=axis)}
    #pragma unroll
    for (int j = 0; j < {strip.wide}; j++) {{
        {t} acc[{wide}];
        #pragma unroll
        for (int v = 0; v < {wide}; v++) {{ acc[v] = 0; }}
        #pragma unroll
        for (int s = 0; s < {columns}; s++) {{
            const {t} w = p.f{axis}[(strip * {strip.wide} + j) * {columns} + s];
            #pragma unroll
            for (int v = 0; v < {wide}; v++) {{ if (w != 0) acc[v] += w * line[s * {wide} + v]; }}
        }}
        {_stores(CPP[taps.out.dtype], wide, f"{taps.result_offset()} + i64(j) * p.sy[{axis}]")}
    }}"""
    table = AxisTable(axis, strip.first, strip.matrices.transpose(0, 2, 1))
    return ThreadWork({channels: wide, axis: strip.wide}, text, table)


def _column(taps: Taps, axis: int) -> str:
    """C++: the place along ``axis`` of column ``s`` of a strip. Past the last one, weights are 0."""
    last = taps.x.shape[axis] - 1
    return f"first + s < {last} ? first + s : {last}"


def _pixels_of_a_column(taps: Taps, axis: int) -> ThreadWork:
    """Pixels of a column: the places and weights of the column are in registers, and the taps of the other axes are read once."""
    t, per_pixel = taps.accumulator, taps.tables[axis].taps
    count = ROWS * per_pixel
    kept = f"""int places[{count}];
    {t} weights[{count}];
    #pragma unroll
    for (int j = 0; j < {count}; j++) {{ places[j] = p.n{axis}[o{axis} * {per_pixel} + j]; weights[j] = p.f{axis}[o{axis} * {per_pixel} + j]; }}"""
    step = f"""
    #pragma unroll
    for (int j = 0; j < {count}; j++) {{
        const int k{axis} = places[j];
        const {t} w{axis} = weights[j];
        if (w{axis} != 0) acc[j / {per_pixel}] += ({taps.weights()}) * ({taps.value(f"p.x[{' + '.join(taps.operand_offset())}]")});
    }}"""
    return _summed(taps, axis, ROWS, f"{kept}\n    {taps.in_loops(step, but=axis)}", _stores_apart(taps, ROWS, axis))


def _packed_sums(taps: Taps, wide: int) -> str:
    """C++ that loads ``wide`` neighbors at once for each tap."""
    pack, value = f"Pack<{CPP[taps.x.dtype]}, {wide}>", taps.value("in.lane[v]")
    add = f"acc[v] += ({taps.weights()}) * ({value});" if taps.blends else f"acc[v] = {value};"
    step = f"""{pack} in;
    if (!({taps.outside})) in = {pack}(p.x + {" + ".join(taps.operand_offset()) or "0"});
    for (int v = 0; v < {wide}; v++) {{ {add} }}"""
    return f"\n    {taps.in_loops(step)}"


def _stores(dtype: str, wide: int, to: str) -> str:
    """C++ that stores neighbors."""
    return f"""Pack<{dtype}, {wide}> result;
    for (int v = 0; v < {wide}; v++) {{ result.lane[v] = narrow<{dtype}>(acc[v]); }}
    result.store(p.y + {to});"""


def _stores_apart(taps: Taps, wide: int, axis: int) -> str:
    """C++ that stores the results of a thread one by one along ``axis``: the results of a warp's threads are neighbors."""
    dtype = CPP[taps.out.dtype]
    return f"""for (int v = 0; v < {wide}; v++) {{
        Pack<{dtype}, 1> result;
        result.lane[0] = narrow<{dtype}>(acc[v]);
        if (o{axis} + v < {taps.out.shape[axis]}) result.store(p.y + {taps.result_offset()} + i64(v) * p.sy[{axis}]);
    }}"""


def _channels_apart(b: Builder, x: TensorView, out: TensorView, tables: Collection[int]) -> int | None:
    """The axis along which elements are contiguous and aligned to 16 bytes in ``x``, but not contiguous in ``out``; or None.

    The last 16 bytes are read as a whole. All of them must therefore be inside of the buffer.
    """
    vector = 16 // x.dtype.itemsize
    found = [i for i, n in enumerate(x.shape) if i not in tables and n > 1 and (x.strides[i], out.shape[i]) == (1, n)]
    if len(found) != 1 or vector == 1 or out.strides[found[0]] == 1:
        return None
    (axis,) = found
    steps = [s for i, s in enumerate(x.strides) if i != axis and x.shape[i] > 1]
    if not steps or any(s % vector or s <= 0 for s in steps) or x.offset % vector:
        return None
    last = sum(s * (n - 1) for i, (s, n) in enumerate(zip(x.strides, x.shape, strict=True)) if i != axis)
    whole = math.prod(n for n in b.buffers[x.buffer].shape or () if isinstance(n, int))
    return axis if x.offset + last + -(-x.shape[axis] // vector) * vector <= whole else None


def _runs(out: TensorView, table: AxisTable | None) -> bool:
    """Whether a thread computes several results along an axis: its table has few taps, and its size is a multiple of :data:`ROWS`."""
    if table is None or table.weight is None or table.index.shape[1] > FEW_TAPS:
        return False
    return out.shape[table.axis] % ROWS == 0


def _in_a_row(x: TensorView, out: TensorView, axis: int) -> int:
    """Elements along ``axis`` that a thread moves at once: up to 16 bytes, aligned in both tensors."""
    best = 1
    for count in (2, 4, 8, 16):
        if count * max(x.dtype.itemsize, out.dtype.itemsize) > 16 or out.shape[axis] % count:
            break
        steps = [s for t in (x, out) for i, s in enumerate(t.strides) if i != axis and t.shape[i] > 1]
        if any(n % count for n in (x.offset, out.offset, *steps)) or (x.strides[axis], out.strides[axis]) != (1, 1):
            break
        best = count
    return best
