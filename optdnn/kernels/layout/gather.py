"""Generated gathers: by tables that are known at build time (Resize, Pad), and by indices in a tensor (Gather and its relatives)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.row_places import result_strides
from optdnn.kernels.layout.tap_tables import AxisTable
from optdnn.kernels.layout.taps import emit_taps
from optdnn.kernels.layout.views import ints, settle
from optdnn.kernels.layout.walks import pieces, walk
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.kernels.pointwise.strides import merge
from optdnn.kernels.tactic import Tactic
from optdnn.ops.base import attrs_dict
from optdnn.runtime.reference import resize
from optdnn.types import Array, is_float, normalize_axis

THREADS = 256


class Resize(Tactic):
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


class Pad(Tactic):
    """Every mode of Pad over any axes; negative pads crop."""

    name = "taps"

    def refuse(self, b: Builder, op: Op) -> str | None:
        known = all(v is None or b.graph.known(v) is not None for v in op.inputs[1:])
        return None if known else "its pads or value are not known when the engine is built"

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        x, out = b.operand(op.inputs[0]), b.target(op.value)
        value = b.graph.known(op.input(2)) if op.input(2) is not None else None
        fill = 0.0 if value is None else np.asarray(value).reshape(-1)[0].item()
        tables = [AxisTable(axis, index[:, None]) for axis, index in self.indices(b, op, x.shape).items()]
        reads = [None if v is None else b.operand(v) for v in op.inputs]
        emit_taps(b, op, x, out, tables, fill, kind="Pad", attrs=attrs_dict(op.attrs), reads=reads)

    @staticmethod
    def indices(b: Builder, op: Op, shape: Sequence[int]) -> dict[int, Array]:
        """For each padded axis of a tensor of this shape, the element of the axis that each element of the result is; -1: the constant."""
        pads, axes = ints(b, op, 1) or [], ints(b, op, 3)
        which = list(range(len(shape))) if axes is None else [normalize_axis(i, len(shape)) for i in axes]
        ends = {axis: (pads[k], pads[k + len(which)]) for k, axis in enumerate(which)}
        return {axis: _pad_index(shape[axis], *both, op.attrs.mode) for axis, both in ends.items() if any(both)}


def _pad_index(n: int, before: int, after: int, mode: str) -> Array:
    """For each element of the padded axis, its element of the axis of ``n`` elements; -1 for the constant. Negative pads crop first."""
    first, size = max(-before, 0), n + min(before, 0) + min(after, 0)
    at = np.arange(-max(before, 0), size + max(after, 0))
    if mode == "constant":
        return np.where((at < 0) | (at >= size), -1, at + first)
    if mode == "edge":
        return np.clip(at, 0, size - 1) + first
    if mode == "wrap":
        return at % size + first
    period = max(2 * (size - 1), 1)
    folded = at % period
    return (np.minimum(folded, period - folded) if size > 1 else np.zeros_like(at)) + first


class GatherView(Tactic):
    """Gather as a view: of one index, or of indices with a constant step along each of their axes (for example windows), if they are known
    when the engine is built."""

    name = "gather_view"

    def refuse(self, b: Builder, op: Op) -> str | None:
        return None if self._progression(b, op) is not None else "its indices are not known, or have no constant step"

    @staticmethod
    def _progression(b: Builder, op: Op) -> tuple[int, int, tuple[int, ...], tuple[int, ...]] | None:
        """(axis, first index, steps, shape of the indices); None if the indices are not known or have no constant step."""
        index, data = b.graph.constant_value(op.inputs[1]), b.graph.type(op.inputs[0])  # type: ignore[arg-type]
        if index is None or not index.size:
            return None
        axis = normalize_axis(op.attrs.axis, len(data.static_shape))
        size = data.static_shape[axis]
        at = np.where(index < 0, index + size, index).astype(np.int64)
        first = int(at.flat[0])
        steps = tuple(int(at.take(1, i).flat[0]) - first if n > 1 else 1 for i, n in enumerate(at.shape))
        meant = first + sum(step * place for step, place in zip(steps, np.indices(at.shape), strict=True))
        if at.min() < 0 or at.max() >= size or (at != meant).any():
            return None
        return axis, first, steps, at.shape

    def place(self, b: Builder, op: Op) -> None:
        """Place the result as a view of the operand."""
        found = self._progression(b, op)
        assert found is not None
        axis, first, steps, shape = found
        x = b.operand(op.inputs[0])
        stride = x.strides[axis]
        middle = tuple(stride * step for step in steps)
        view = x.view(
            (*x.shape[:axis], *shape, *x.shape[axis + 1 :]),
            (*x.strides[:axis], *middle, *x.strides[axis + 1 :]),
            first * stride,
        )
        settle(b, op, 0, view)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        """Nothing: a view needs no launch."""


class GatherBy(Tactic):
    """Gather, GatherElements and GatherND with indices in memory."""

    name = "gather"

    def refuse(self, b: Builder, op: Op) -> str | None:
        return "it is a view" if op.kind == "Gather" and GatherView().refuse(b, op) is None else None

    def place(self, b: Builder, op: Op) -> None:
        """Place the result in rows padded for products, unless its place is reserved."""
        b.target(op.value, result_strides(b, op.value))

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
        text = f"""struct Params {{ const {t}* x; const {CPP[index.dtype]}* index; {t}* y; u32 count; Size dims[{rank}]; i64 sx[{rank}], si[{rank}], sy[{rank}]; }};

extern "C" __global__ void __launch_bounds__({THREADS}) gather(const __grid_constant__ Params p) {{
    launch_dependents();
    const u32 i = blockIdx.x * {THREADS} + threadIdx.x;
    i64 from = 0, n = 0, to = 0;
    {walk("r", "i", "dims", rank, [("from", "sx"), ("n", "si"), ("to", "sy")])}
    wait_for_predecessor();
    if (i >= p.count) return;
    bool ok = true;
    {steps}
    if (ok) {move}     // an index out of range leaves the element as it was: nothing else is read
}}
"""
        dims[-1] //= vec
        for strides in (sx, si, sy):
            strides[-1] *= vec
        count, placed = math.prod(dims), {"x": x, "index": index, "y": out}
        parameters = Parameters().pointer(*placed).u32(count).sizes(*dims).i64(*sx, *si, *sy)
        launch = parameters.generated(b.arch, text, "gather", -(-count // THREADS), THREADS)
        b.emit(op, launch, placed, op.kind, attrs_dict(op.attrs), [x, index], [out])
