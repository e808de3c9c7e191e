"""Gathers, generated: by tables known at build time (Resize, Pad), and by indices in a tensor (Gather and its relatives)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.views import ints, settle
from optdnn.kernels.layout.walks import pieces, walk
from optdnn.kernels.pointwise.pointwise import CPP, arithmetic, literal, merge
from optdnn.kernels.tactic import OwnTactic
from optdnn.ops.base import attrs_dict
from optdnn.runtime.reference import resize
from optdnn.types import Array, is_float, normalize_axis

THREADS = 256
ROWS = 8
"""Rows of a resized image in which a thread makes one pixel each."""
FEW_TAPS = 4
"""Most taps of an axis whose places and weights a thread keeps in registers."""


@dataclass(frozen=True)
class AxisTable:
    """How one axis of the result is made: ``index[o, t]`` (negative: the fill value), and ``weight[o, t]`` (None: copy)."""

    axis: int
    index: Array
    weight: Array | None = None


def emit_taps(
    b: Builder, op: Op, x: TensorView, out: TensorView, tables: Sequence[AxisTable], fill: float, *, kind: str, attrs: dict[str, Any],
    reads: Sequence[TensorView | None],
) -> None:  # fmt: skip
    """``out[o] = sum over taps of the product of weights * x[indices]``, over the axes of ``tables``; the others are copied.

    A thread makes elements that are neighbours in both tensors. Where there are none, it makes pixels below one another, or some channels
    of a pixel, if these are neighbours in ``x`` alone.
    """
    if not out.size:
        return
    t, ty, rank = arithmetic(x.dtype), CPP[out.dtype], len(out.shape)
    order = sorted(range(rank), key=lambda i: (out.strides[i], -i))  # fastest last axis first
    fields, opening, closing = [], "", ""
    arguments: list[TensorView] = []
    by_axis = {table.axis: table for table in tables}
    blend = any(table.weight is not None for table in tables)
    row = order[0] if order else -1
    wide = _in_a_row(x, out, row) if order and row not in by_axis else 1
    planes = _channels_apart(b, x, out, by_axis) if wide == 1 else None
    run = None
    if planes is not None:
        row, wide = planes, 16 // x.dtype.itemsize
    elif wide == 1 and row in by_axis and by_axis[row].weight is not None:
        run = next((i for i in order[1:] if _runs(out, by_axis.get(i))), None)
        if run is not None:
            row, wide = run, ROWS
    at, before = [], ""
    small = blend and sum(abs(s) * (n - 1) for s, n in zip(x.strides, x.shape, strict=True)) < 1 << 31
    for i in range(rank):
        if i not in by_axis:
            at.append(f"o{i} * int(p.sx[{i}])" if small else f"i64(o{i}) * p.sx[{i}]")
            continue
        table, taps = by_axis[i], by_axis[i].index.shape[1]
        arguments.append(
            b.constant(np.ascontiguousarray(table.index.astype(np.int32)), f"{op.outputs[0].name}.index{i}")
        )
        fields.append(f"const int* n{i};")
        if i != run:
            opening += "\n    #pragma unroll\n    " if blend and taps <= FEW_TAPS else ""
            opening += f"for (int t{i} = 0; t{i} < {taps}; t{i}++) {{ const int k{i} = p.n{i}[o{i} * {taps} + t{i}]; "
            closing += "}"
        if table.weight is not None:
            weight = table.weight.astype(np.float64 if t == "double" else np.float32)
            arguments.append(b.constant(np.ascontiguousarray(weight), f"{op.outputs[0].name}.weight{i}"))
            fields.append(f"const {t}* f{i};")
            if i != run:
                opening += f"const {t} w{i} = p.f{i}[o{i} * {taps} + t{i}]; if (w{i} == 0) continue; "
        at.append(f"k{i} * int(p.sx[{i}])" if small else f"i64(k{i}) * p.sx[{i}]")
    outside = " || ".join(f"k{i} < 0" for i in by_axis) or "false"
    product = " * ".join(f"w{i}" for i, table in by_axis.items() if table.weight is not None)
    took = f"({outside}) ? {literal(fill, t)} : {t}(widen(in.lane[v]))"
    several = f"Pack<{CPP[x.dtype]}, {wide}>"
    step = f"""{several} in;
    if (!({outside})) in = {several}(p.x + {" + ".join(at) or "0"});
    for (int v = 0; v < {wide}; v++) {{ {f"acc[v] += ({product}) * ({took});" if blend else f"acc[v] = {took};"} }}"""
    if run is not None:
        taps = by_axis[run].index.shape[1]
        before = f"""int places[{wide * taps}];
    {t} weights[{wide * taps}];
    #pragma unroll
    for (int j = 0; j < {wide * taps}; j++) {{ places[j] = p.n{run}[o{run} * {taps} + j]; weights[j] = p.f{run}[o{run} * {taps} + j]; }}"""
        took = f"({outside}) ? {literal(fill, t)} : {t}(widen(p.x[{' + '.join(at)}]))"
        step = f"""
    #pragma unroll
    for (int j = 0; j < {wide * taps}; j++) {{
        const int k{run} = places[j];
        const {t} w{run} = weights[j];
        if (w{run} != 0) acc[j / {taps}] += ({product}) * ({took});
    }}"""
    split = ["u32 rest = index;"]
    for i in order:
        size, times = (-(-out.shape[i] // wide), f" * {wide}") if i == row else (out.shape[i], "")
        split.append(f"const int o{i} = rest % {size}u{times}; rest /= {size}u;")
    to = " + ".join(f"i64(o{i}) * p.sy[{i}]" for i in range(rank)) or "0"
    text = f"""struct Params {{ const {CPP[x.dtype]}* x; {ty}* y; {" ".join(fields)} u32 count; i64 sx[{max(rank, 1)}], sy[{max(rank, 1)}]; }};

extern "C" __global__ void __launch_bounds__({THREADS}) taps(const __grid_constant__ Params p) {{
    launch_dependents();
    const u32 index = blockIdx.x * {THREADS} + threadIdx.x;
    {" ".join(split)}
    wait_for_predecessor();
    if (index >= p.count) return;
    {t} acc[{wide}];
    for (int v = 0; v < {wide}; v++) {{ acc[v] = 0; }}
    {before}
    {opening}{step}{closing}
    {_stores(ty, wide, to) if planes is None and run is None else _stores_apart(ty, wide, to, row, out.shape[row])}
}}
"""
    count = out.size // wide if planes is None else out.size // out.shape[row] * -(-out.shape[row] // wide)
    placed = {"x": x, "y": out, **{f"a{i}": a for i, a in enumerate(arguments)}}
    parameters = Parameters().pointer(*placed).u32(count).i64(*(x.strides or (0,)), *(out.strides or (0,)))
    launch = parameters.generated(b.arch, text, "taps", -(-count // THREADS), THREADS)
    b.emit(op, launch, placed, kind, attrs, reads, [out])


def _stores(dtype: str, wide: int, to: str) -> str:
    """C++ that stores neighbours."""
    return f"""Pack<{dtype}, {wide}> result;
    for (int v = 0; v < {wide}; v++) {{ result.lane[v] = narrow<{dtype}>(acc[v]); }}
    result.store(p.y + {to});"""


def _stores_apart(dtype: str, wide: int, to: str, axis: int, size: int) -> str:
    """C++ that stores results along an axis on which they lie apart: those of a warp's threads are neighbours."""
    return f"""for (int v = 0; v < {wide}; v++) {{
        Pack<{dtype}, 1> result;
        result.lane[0] = narrow<{dtype}>(acc[v]);
        if (o{axis} + v < {size}) result.store(p.y + {to} + i64(v) * p.sy[{axis}]);
    }}"""


def _channels_apart(b: Builder, x: TensorView, out: TensorView, tables: Collection[int]) -> int | None:
    """The axis along which elements are neighbours in ``x``, 16 bytes of them aligned, and lie apart in ``out``; None where there is none.

    The last 16 bytes are read as a whole, so that all of them must lie in the buffer.
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
    """Whether a thread makes several results along an axis, by a table of few taps that a warp reads together."""
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


class Resize(OwnTactic):
    """Every mode of Resize, as tables of taps and weights per axis."""

    name = "taps"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if any(v is not None and b.graph.known(v) is None for v in op.inputs[1:]):
            return "its scales or sizes are not known when the engine is built"
        dtype = op.outputs[0].type.dtype
        return None if is_float(dtype) or op.attrs.mode == "nearest" else f"it does not interpolate {dtype.name}"

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        x, out, a = b.operand(op.inputs[0]), b.target(op.value), op.attrs
        roi, scales, sizes = (
            None if op.input(i) is None else np.asarray(b.graph.known(op.input(i))) for i in (1, 2, 3)
        )
        crop = a.coordinate_transformation_mode == "tf_crop_and_resize"
        tables = []
        for p in resize.plan(x.shape, roi if crop else None, scales, sizes, a.axes, a.keep_aspect_ratio_policy):
            if p.out == p.size and math.isclose(p.scale, 1.0) and p.roi == (0.0, 1.0):
                continue
            at = resize.coordinates(p, a.coordinate_transformation_mode)
            weights: Array | None = None
            if a.mode == "nearest":
                index = np.clip(resize.rounded(at, a.nearest_mode), 0, p.size - 1).astype(np.int64)[:, None]
            else:
                index, weights = resize.taps(p, at, a.mode, a.antialias, a.cubic_coeff_a, a.exclude_outside)
            if crop:
                index = np.where(np.asarray((at < 0) | (at > p.size - 1)).reshape(-1, 1), -1, index)
                weights = (
                    None
                    if weights is None
                    else np.where((index < 0).all(1, keepdims=True), 1 / index.shape[1], weights)
                )
            tables.append(AxisTable(p.axis, index, weights))
        reads = [None if v is None else b.operand(v) for v in op.inputs]
        emit_taps(b, op, x, out, tables, a.extrapolation_value, kind="Resize", attrs=attrs_dict(a), reads=reads)


class Pad(OwnTactic):
    """Every mode of Pad, of any axes; negative pads crop."""

    name = "taps"

    def refuse(self, b: Builder, op: Op) -> str | None:
        known = all(v is None or b.graph.known(v) is not None for v in op.inputs[1:])
        return None if known else "its pads or value are not known when the engine is built"

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        x, out = b.operand(op.inputs[0]), b.target(op.value)
        pads, axes = ints(b, op, 1) or [], ints(b, op, 3)
        which = [normalize_axis(i, len(x.shape)) for i in axes] if axes is not None else list(range(len(x.shape)))
        value = b.graph.known(op.input(2)) if op.input(2) is not None else None
        fill = 0.0 if value is None else np.asarray(value).reshape(-1)[0].item()
        tables = []
        for k, axis in enumerate(which):
            before, after, n = pads[k], pads[k + len(which)], x.shape[axis]
            if before or after:
                tables.append(AxisTable(axis, _pad_index(n, before, after, op.attrs.mode)[:, None]))
        reads = [None if v is None else b.operand(v) for v in op.inputs]
        emit_taps(b, op, x, out, tables, fill, kind="Pad", attrs=attrs_dict(op.attrs), reads=reads)


def _pad_index(n: int, before: int, after: int, mode: str) -> Array:
    """Which element of an axis of ``n`` each element of the padded axis is; -1 for the constant."""
    at = np.arange(-before, n + after)
    if mode == "constant":
        return np.where((at < 0) | (at >= n), -1, at)
    if mode == "edge":
        return np.clip(at, 0, n - 1)
    if mode == "wrap":
        return at % n
    period = max(2 * (n - 1), 1)
    folded = at % period
    return np.minimum(folded, period - folded) if n > 1 else np.zeros_like(at)


class GatherView(OwnTactic):
    """Gather of one index, or of indices at equal distances, known when the engine is built: another view."""

    name = "gather_view"

    def refuse(self, b: Builder, op: Op) -> str | None:
        return None if self._progression(b, op) is not None else "its indices are not known, or not at equal distances"

    @staticmethod
    def _progression(b: Builder, op: Op) -> tuple[int, int, int, tuple[int, ...]] | None:
        """(axis, first index, distance, shape of the indices)."""
        index, data = b.graph.constant_value(op.inputs[1]), b.graph.type(op.inputs[0])  # type: ignore[arg-type]
        if index is None or index.ndim > 1 or not index.size:
            return None
        axis = normalize_axis(op.attrs.axis, len(data.static_shape))
        size = data.static_shape[axis]
        flat = np.where(index < 0, index + size, index).reshape(-1).astype(np.int64)
        step = int(flat[1] - flat[0]) if flat.size > 1 else 1
        if flat.min() < 0 or flat.max() >= size or (flat != flat[0] + step * np.arange(flat.size)).any():
            return None
        return axis, int(flat[0]), step, index.shape

    def place(self, b: Builder, op: Op) -> None:
        """The result is a view of the operand."""
        found = self._progression(b, op)
        assert found is not None
        axis, first, step, shape = found
        x = b.operand(op.inputs[0])
        stride = x.strides[axis]
        middle = (stride * step,) if shape else ()
        view = x.view(
            (*x.shape[:axis], *shape, *x.shape[axis + 1 :]),
            (*x.strides[:axis], *middle, *x.strides[axis + 1 :]),
            first * stride,
        )
        settle(b, op, 0, view)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        """Nothing: a view needs no launch."""


class GatherBy(OwnTactic):
    """Gather, GatherElements and GatherND with indices in memory."""

    name = "gather"

    def refuse(self, b: Builder, op: Op) -> str | None:
        return "it is a view" if op.kind == "Gather" and GatherView().refuse(b, op) is None else None

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        x, index, out = b.operand(op.inputs[0]), b.operand(op.inputs[1]), b.target(op.value)
        components = [(0, 0, 0)]
        if op.kind == "Gather":
            axis = normalize_axis(op.attrs.axis, len(x.shape))
            middle = len(index.shape)
            data = (*x.strides[:axis], *(0,) * middle, *x.strides[axis + 1 :])
            rows = (*(0,) * axis, *index.strides, *(0,) * (len(x.shape) - axis - 1))
            components = [(0, x.strides[axis], x.shape[axis])]
        elif op.kind == "GatherElements":
            axis = normalize_axis(op.attrs.axis, len(x.shape))
            data = tuple(0 if i == axis else s for i, s in enumerate(x.strides))
            rows = index.strides
            components = [(0, x.strides[axis], x.shape[axis])]
        else:
            batch, depth = op.attrs.batch_dims, index.shape[-1]
            lead = len(index.shape) - 1
            data = (*x.strides[:batch], *(0,) * (lead - batch), *x.strides[batch + depth :])
            rows = (*index.strides[:-1], *(0,) * (len(x.shape) - batch - depth))
            components = [(j * index.strides[-1], x.strides[batch + j], x.shape[batch + j]) for j in range(depth)]
        if not out.size:
            return
        dims, (sy, sx, si) = merge(out.shape, [out.strides, data, rows])
        t, rank = CPP[x.dtype], len(dims)
        vec = pieces(x, out, dims, sy, sx, si, [step for _, step, _ in components])
        move = f"Pack<{t}, {vec}>(p.x + from).store(p.y + to);" if vec > 1 else "p.y[to] = p.x[from];"
        steps = " ".join(
            f"{{ i64 k = i64(p.index[n + {at}LL]); k += k < 0 ? {size}LL : 0; ok = ok && k >= 0 && k < {size}LL; from += k * {step}LL; }}"
            for at, step, size in components
        )
        text = f"""struct Params {{ const {t}* x; const {CPP[index.dtype]}* index; {t}* y; u32 count, dims[{rank}]; i64 sx[{rank}], si[{rank}], sy[{rank}]; }};

extern "C" __global__ void __launch_bounds__({THREADS}) gather(const __grid_constant__ Params p) {{
    launch_dependents();
    wait_for_predecessor();
    const u32 i = blockIdx.x * {THREADS} + threadIdx.x;
    if (i >= p.count) return;
    i64 from = 0, n = 0, to = 0;
    {walk("r", "i", "dims", rank, [("from", "sx"), ("n", "si"), ("to", "sy")])}
    bool ok = true;
    {steps}
    if (ok) {move}     // an index out of range leaves the element as it was: nothing else is read
}}
"""
        dims[-1] //= vec
        for strides in (sx, si, sy):
            strides[-1] *= vec
        count, placed = math.prod(dims), {"x": x, "index": index, "y": out}
        parameters = Parameters().pointer(*placed).u32(count, *dims).i64(*sx, *si, *sy)
        launch = parameters.generated(b.arch, text, "gather", -(-count // THREADS), THREADS)
        b.emit(op, launch, placed, op.kind, attrs_dict(op.attrs), [x, index], [out])
