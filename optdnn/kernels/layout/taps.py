"""Resize and Pad as one generated kernel: each axis has a table of places and weights that is known when the engine is built.

A thread computes several results. The kernel has five forms, by the results of a thread: neighbors in both tensors, neighbors of
several pixels of a row, channels of a pixel that are neighbors only in the operand, pixels of a row, or pixels of a column.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.pointwise.expressions import CPP, arithmetic, literal
from optdnn.kernels.pointwise.pointwise import AHEAD, MANY, SHORT
from optdnn.types import Array

THREADS = 256
ROWS = 8
"""Rows of a resized image for which a thread computes one pixel each."""
FEW_TAPS = 4
"""Most taps of an axis for which a thread keeps places and weights in registers."""
PIXELS = 8
"""Most neighbors of a resized row that a thread computes."""
FEW_COLUMNS = 8
"""Most elements of a row that a thread reads for all of its neighbors together."""
VECTORS, FEW_VECTORS = 4, 6
"""Pixels of a row for which a thread computes several channels each, and the most pixels that it reads for them."""
MANY_THREADS = 1 << 15
"""Threads of one pixel each: with fewer, the launch would not fill a large GPU."""


@dataclass(frozen=True)
class AxisTable:
    """The taps t of result o along an axis: ``index[o, t]`` (negative: the fill value) and ``weight[o, t]`` (None: a copy)."""

    axis: int
    index: Array
    weight: Array | None = None

    @property
    def taps(self) -> int:
        """Elements of the operand that one result reads along the axis."""
        return int(self.index.shape[1])


@dataclass(frozen=True)
class Taps:
    """The sum over taps of (product of weights) * ``x[indices]``, and the C++ that all forms of its kernel share."""

    x: TensorView
    out: TensorView
    tables: dict[int, AxisTable]
    """Axis -> its table; the other axes are copied."""
    fill: float

    @property
    def accumulator(self) -> str:
        """The C++ type of sums and weights."""
        return arithmetic(self.x.dtype)

    @property
    def blends(self) -> bool:
        """Whether any axis has weights; otherwise each result copies one element."""
        return any(table.weight is not None for table in self.tables.values())

    @property
    def order(self) -> list[int]:
        """The axes of the result by stride, the fastest one first; of equal strides, the last axis first."""
        return sorted(range(len(self.out.shape)), key=lambda i: (self.out.strides[i], -i))

    @property
    def outside(self) -> str:
        """C++ condition: the tap reads the fill value."""
        return " || ".join(f"k{i} < 0" for i, table in self.tables.items() if (table.index < 0).any()) or "false"

    def weights(self, but: int | None = None) -> str:
        """C++: the product of the weights of all axes, or of all ``but`` one."""
        factors = [f"w{i}" for i, table in self.tables.items() if table.weight is not None and i != but]
        return " * ".join(factors) or "1"

    def operand_offset(self) -> list[str]:
        """C++: the terms of the element's offset in ``x``, one per axis; in 32 bits if all offsets fit."""
        strides = zip(self.x.strides, self.x.shape, strict=True)
        small = self.blends and sum(abs(s) * (n - 1) for s, n in strides) < 1 << 31
        places = [f"{'k' if i in self.tables else 'o'}{i}" for i in range(len(self.out.shape))]
        return [f"{at} * int(p.sx[{i}])" if small else f"i64({at}) * p.sx[{i}]" for i, at in enumerate(places)]

    def result_offset(self) -> str:
        """C++: the element's offset in the result."""
        return " + ".join(f"i64(o{i}) * p.sy[{i}]" for i in range(len(self.out.shape))) or "0"

    def value(self, loaded: str) -> str:
        """C++: a loaded element, or the fill value, in the accumulator's type."""
        return f"({self.outside}) ? {literal(self.fill, self.accumulator)} : {self.accumulator}(widen({loaded}))"

    def in_loops(self, step: str, but: int | None = None) -> str:
        """C++: ``step`` in a loop over the taps of each axis (all, or all ``but`` one)."""
        opening, closing = "", ""
        for i, table in sorted(self.tables.items()):
            if i == but:
                continue
            opening += "\n    #pragma unroll\n    " if self.blends and table.taps <= FEW_TAPS else ""
            opening += f"for (int t{i} = 0; t{i} < {table.taps}; t{i}++) {{ const int k{i} = p.n{i}[o{i} * {table.taps} + t{i}]; "
            closing += "}"
            if table.weight is not None:
                opening += (
                    f"const {self.accumulator} w{i} = p.f{i}[o{i} * {table.taps} + t{i}]; if (w{i} == 0) continue; "
                )
        return opening + step + closing


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


def emit_taps(
    b: Builder, op: Op, x: TensorView, out: TensorView, tables: Sequence[AxisTable], fill: float, *, kind: str, attrs: dict[str, Any],
    reads: Sequence[TensorView | None],
) -> None:  # fmt: skip
    """Emits ``out[o] = sum over taps of (product of weights) * x[indices]`` over the axes of ``tables``; the other axes are copied."""
    if not out.size:
        return
    taps = Taps(x, out, {table.axis: table for table in tables}, fill)
    work = _work(b, taps)
    fields, arguments = _constants(b, op, taps, {} if work.table is None else {work.table.axis: work.table})
    placed = {"x": x, "y": out, **{f"a{i}": a for i, a in enumerate(arguments)}}
    count = math.prod(-(-n // work.wide.get(i, 1)) for i, n in enumerate(out.shape))
    parameters = Parameters().pointer(*placed).u32(count).i64(*(x.strides or (0,)), *(out.strides or (0,)))
    blocks = -(-count // (THREADS * work.ahead))
    launch = parameters.generated(b.arch, _source(taps, work, fields), "taps", blocks, THREADS)
    b.emit(op, launch, placed, kind, attrs, reads, [out])


def _work(b: Builder, taps: Taps) -> ThreadWork:
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


def _constants(b: Builder, op: Op, taps: Taps, others: Mapping[int, AxisTable]) -> tuple[list[str], list[TensorView]]:
    """The kernel's parameter fields of the tables, and their constants. ``others``: tables that replace those of their axes."""
    fields, arguments = [], []
    name, t = op.outputs[0].name, taps.accumulator
    for i, table in sorted({**taps.tables, **others}.items()):
        arguments.append(b.constant(np.ascontiguousarray(table.index.astype(np.int32)), f"{name}.index{i}"))
        fields.append(f"const int* n{i};")
        if table.weight is not None:
            weight = table.weight.astype(np.float64 if t == "double" else np.float32)
            arguments.append(b.constant(np.ascontiguousarray(weight), f"{name}.weight{i}"))
            fields.append(f"const {t}* f{i};")
    return fields, arguments


def _source(taps: Taps, work: ThreadWork, fields: Sequence[str]) -> str:
    """The kernel's text: a thread computes its place in the result, sums, and stores."""
    x, out = CPP[taps.x.dtype], CPP[taps.out.dtype]
    rank = max(len(taps.out.shape), 1)
    split = ["u32 rest = index;"]
    for i in taps.order:
        n = taps.out.shape[i]
        wide = work.wide.get(i, 1)
        split.append(
            f"const int o{i} = rest % {-(-n // wide)}u{f' * {wide}' if wide > 1 else ''}; rest /= {-(-n // wide)}u;"
        )
    inside = f"""const u32 index = blockIdx.x * {THREADS} + threadIdx.x;
    {" ".join(split)}
    wait_for_predecessor();
    if (index >= p.count) return;
    {work.text}"""
    if work.later:
        places = f"#pragma unroll\n    for (int u = 0; u < {AHEAD}; u++)"
        inside = f"""const u32 first = blockIdx.x * {THREADS * AHEAD} + threadIdx.x;
    {work.kept}
    wait_for_predecessor();
    {places} {{
        const u32 index = first + u * {THREADS} < p.count ? first + u * {THREADS} : p.count - 1;
        {" ".join(split)}
        {work.text}
    }}
    {places} {{
        if (first + u * {THREADS} >= p.count) break;
        {work.later}
    }}"""
    return f"""struct Params {{ const {x}* x; {out}* y; {" ".join(fields)} u32 count; i64 sx[{rank}], sy[{rank}]; }};

extern "C" __global__ void __launch_bounds__({THREADS}) taps(const __grid_constant__ Params p) {{
    launch_dependents();
    {inside}
}}
"""


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
