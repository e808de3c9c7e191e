"""Scatters: ScatterElements, ScatterND and TensorScatter.

Each result searches for its updates, in their order. In a reduction of many updates, a warp searches: each lane reduces the
updates that it finds, and shuffles reduce the lanes. If the search would take long, each update is written to its place instead (of two
updates of a known place, the last one; ONNX does not define the result), or added there (:func:`_adds`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.index.index_kernel import (
    IndexKernel,
    coordinates,
    emit_index_kernel,
    needed,
    operand_at,
    operands_of,
    shape_at,
)
from optdnn.kernels.layout.views import reshaped
from optdnn.kernels.pointwise.expressions import CPP, arithmetic
from optdnn.kernels.pointwise.pointwise import copied, copy
from optdnn.types import DTYPES, FP16, FP64, normalize_axis

SCATTER_LIMIT = 1 << 31
"""Most pairs of a result and an update that a search visits. More than VISITS_LIMIT: threads read the same updates at the same time."""


WARP = 32

SHARED_SEARCH = 128
"""From this number of updates on, a warp searches for the updates of a result. On an H200, a thread takes 57 ns per update: 12,288
updates took 700 us, and 240 us with warps; 13,264 updates for the 2,708 x 80 results of a GCN took 15 ms, and 0.4 ms with warps."""
FEW_RESULTS = 1 << 15
"""Up to this number of results, a warp searches even if its lanes do not read contiguous indices."""

DIRECT = 1 << 20
"""If the search visits more (result, update) pairs than this, each update is written directly. On an H200 with 2^21 pairs, the search takes
35 us and the writes 3.3 us; the search grows with the number of pairs, the writes hardly do."""


def _rows(b: Builder, op: Op, x: TensorView, shape: tuple[int, ...]) -> TensorView:
    """``x`` in another shape: the same memory, or a dense copy."""
    found = reshaped(x, shape)
    if found is None:
        found = reshaped(copied(b, op, x, "dense"), shape)
        assert found is not None
    return found


_REDUCE = {"none": "u", "add": "v + u", "mul": "v * u", "max": "max_nan(v, u)", "min": "min_nan(v, u)"}


@dataclass(frozen=True)
class _Search:
    """C++ of a result's search for its updates among ``count``, by one thread or by the lanes of a warp. ``rank``: number of axes of the
    result space. ``number``: C++ type of the accumulators."""

    op: Op
    count: int
    rank: int
    number: str

    @property
    def shared(self) -> bool:
        """Whether the lanes of a warp share the search."""
        return self.op.attrs.reduction != "none" and self.count >= SHARED_SEARCH

    @property
    def first(self) -> str:
        return f"o{self.rank}" if self.shared else "0"

    @property
    def step(self) -> int:
        return WARP if self.shared else 1

    def space(self, results: Sequence[int]) -> tuple[int, ...]:
        return (*results, WARP) if self.shared else tuple(results)

    def begin(self, name: str, given: str) -> str:
        """C++ that initializes a lane's accumulator. In sums and products, only the first lane starts with operand 0."""
        if self.shared and self.op.attrs.reduction in ("add", "mul"):
            neutral = 0 if self.op.attrs.reduction == "add" else 1
            return f"{self.number} {name} = {self.number}({neutral}); if (o{self.rank} == 0) {name} = {given};"
        return f"{self.number} {name} = {given};"

    def end(self, names: Sequence[str], stores: str) -> str:
        """C++ that merges the lanes' accumulators; the first lane stores the result."""
        if not self.shared:
            return stores
        merge = " ".join(
            f"{{ const {self.number} v = {name}, u = __shfl_xor_sync(0xffffffffu, {name}, step); "
            f"{name} = {self.number}({_REDUCE[self.op.attrs.reduction]}); }}"
            for name in names
        )
        return f"""#pragma unroll
        for (int step = {WARP // 2}; step; step /= 2) {{ {merge} }}
        if (o{self.rank} == 0) {{ {stores} }}"""


def _scatter_elements(b: Builder, op: Op) -> None:
    x, index, updates, out = needed(b, op, 0), needed(b, op, 1), needed(b, op, 2), b.target(op.value)
    r, t = len(out.shape), arithmetic(x.dtype)
    axis = normalize_axis(op.attrs.axis, r)
    if _direct(b, op) or _adds(b, op):
        places = [(f"i64(p.i[at_i({coordinates(r)})])", axis)]
        _write_updates(
            b, op, _last(b, op, index), updates, places, [f"to{k}" if k == axis else f"o{k}" for k in range(r)]
        )
        return
    inside = " && ".join(f"o{k} < p.n_i[{k}]" for k in range(r) if k != axis) or "true"
    at, own = coordinates(r, {axis: "j"}), coordinates(r)
    search = _Search(op, index.shape[axis], r, t)
    near = index.strides[axis] == 1 or math.prod(out.shape) <= FEW_RESULTS
    search = search if near else replace(search, count=0)
    lines = f"""{search.begin("sum", f"widen(p.x[at_x({own})])")}
        if ({inside}) for (i64 j = {search.first}; j < p.n_i[{axis}]; j += {search.step}) {{
            i64 to = i64(p.i[at_i({at})]);
            to += to < 0 ? p.n_x[{axis}] : 0;
            if (to != o{axis}) continue;
            const {t} v = sum, u = widen(p.u[at_u({at})]);
            sum = {t}({_REDUCE[op.attrs.reduction]});
        }}
        {search.end(["sum"], f"p.y[at_y({own})] = narrow<{CPP[x.dtype]}>(sum);")}"""
    tensors = {"x": x, "i": index, "u": updates}
    emit_index_kernel(b, op, search.space(out.shape), tensors, {"y": out}, lines, reads=operands_of(b, op))


def _scatter_nd(b: Builder, op: Op) -> None:
    """Emits a ScatterND. A point of the space is a group of results that share one search (:func:`_together`)."""
    x, index, updates, out = needed(b, op, 0), needed(b, op, 1), needed(b, op, 2), b.target(op.value)
    r, t, depth = len(out.shape), arithmetic(x.dtype), index.shape[-1]
    count, each = math.prod(index.shape[:-1]), _together(out.shape, depth)
    flat = _rows(b, op, index, (count, depth))
    values = _rows(b, op, updates, (count, *x.shape[depth:]))
    if _direct(b, op) or _adds(b, op):
        places = [(f"i64(p.i[at_i(o0, {k})])", k) for k in range(depth)]
        at = [f"to{k}" for k in range(depth)] + [f"o{k + 1}" for k in range(r - depth)]
        _write_updates(b, op, _last(b, op, flat), values, places, at)
        return
    tests = " ".join(
        f"{{ i64 to = i64(p.i[at_i(j, {k})]); to += to < 0 ? p.n_x[{k}] : 0; hit = hit && to == o{k}; }}"
        for k in range(depth)
    )
    own = [coordinates(r, {r - 1: f"o{r - 1} * {each} + {e}"} if each > 1 else {}) for e in range(each)]
    first = ", ".join(f"o{k}" for k in range(depth, r - 1))
    last = [f"o{r - 1} * {each} + {e}" if each > 1 else f"o{r - 1}" for e in range(each)] if r > depth else [""]
    at = [", ".join(part for part in ("j", first, place) if part) for place in last]
    search = _Search(op, count, r, t)
    begin = " ".join(search.begin(f"v{e}", f"widen(p.x[at_x({own[e]})])") for e in range(each))
    merge = " ".join(
        f"{{ const {t} v = v{e}, u = widen(p.u[at_u({at[e]})]); v{e} = {t}({_REDUCE[op.attrs.reduction]}); }}"
        for e in range(each)
    )
    end = " ".join(f"p.y[at_y({own[e]})] = narrow<{CPP[x.dtype]}>(v{e});" for e in range(each))
    lines = f"""{begin}
        for (i64 j = {search.first}; j < {count}; j += {search.step}) {{
            bool hit = true;
            {tests}
            if (!hit) continue;
            {merge}
        }}
        {search.end([f"v{e}" for e in range(each)], end)}"""
    space = search.space((*out.shape[:-1], out.shape[-1] // each) if each > 1 else out.shape)
    emit_index_kernel(b, op, space, {"x": x, "i": flat, "u": values}, {"y": out}, lines, reads=operands_of(b, op))


def _direct(b: Builder, op: Op) -> bool:
    """Whether updates are written directly: many updates without a reduction."""
    return op.attrs.reduction == "none" and _lookups(b, op) > DIRECT


def _last(b: Builder, op: Op, index: TensorView) -> TensorView:
    """The indices of updates that are written directly. Of several updates of a place, the last one counts, as in ONNX Runtime: if the
    indices are constant, those of the others are beyond the end."""
    known = b.graph.constant_value(op.inputs[1])
    if known is None or op.attrs.reduction != "none":
        return index
    shape = shape_at(b, op, 0)
    if op.kind == "ScatterND":
        lines = known.reshape(-1, known.shape[-1])  # a row for each update
        place = np.ravel_multi_index(tuple((lines % shape[: lines.shape[1]]).T), shape[: lines.shape[1]])
    else:
        axis = normalize_axis(op.attrs.axis, known.ndim)
        lines = np.moveaxis(known, axis, 0)  # updates of one place differ in the first axis only
        others = np.arange(lines[0].size).reshape(lines.shape[1:])
        place = (lines % shape[axis] + others * shape[axis]).reshape(-1)
    last = len(place) - 1 - np.unique(place[::-1], return_index=True)[1]
    if len(last) == len(place):
        return index
    hidden = np.ones(len(place), bool)
    hidden[last] = False
    beyond = np.iinfo(known.dtype).max
    if op.kind == "ScatterND":
        return b.constant(np.where(hidden[:, None], beyond, lines), "indices")
    kept = np.where(hidden.reshape(lines.shape), beyond, lines)
    return b.constant(np.ascontiguousarray(np.moveaxis(kept, 0, axis)), "indices")


def _adds(b: Builder, op: Op) -> bool:
    """Whether updates are added in place, by atomic additions in float64.

    fp16 values are multiples of 2^-24. float64 adds them exactly up to 2^29, so the order does not matter. Sums of other types would
    depend on the order.
    """
    return op.attrs.reduction == "add" and op.outputs[0].type.dtype == FP16 and _lookups(b, op) > DIRECT


def _write_updates(
    b: Builder, op: Op, index: TensorView, updates: TensorView, places: Sequence[tuple[str, int]], at: Sequence[str]
) -> None:
    """Emits a copy of operand 0, and a launch that writes the updates into it, or adds them. ``places``: C++ of an index, and its axis of
    the result. ``at``: C++ coordinates of the result; they name these indices ``to0``, …."""
    x, result = needed(b, op, 0), b.target(op.value)
    adds = _adds(b, op)
    out = b.new(f"{op.outputs[0].name}.sums", FP64, result.shape) if adds else result
    copy(b, op, x, out)
    found = " ".join(f"i64 to{k} = {text}; to{k} += to{k} < 0 ? p.n_y[{k}] : 0;" for text, k in places)
    inside = " && ".join(f"to{k} >= 0 && to{k} < p.n_y[{k}]" for _, k in places)
    lines = f"""{found}
        if ({inside}) {{"""
    place, update = f"at_y({', '.join(at)})", f"p.u[at_u({coordinates(len(updates.shape))})]"
    lines += f" add_to(p.y + {place}, double(widen({update}))); }}" if adds else f" p.y[{place}] = {update}; }}"
    reads = [out, *operands_of(b, op)[1:]]
    emit_index_kernel(b, op, updates.shape, {"i": index, "u": updates}, {"y": out}, lines, reads=reads)
    if adds:
        copy(b, op, out, result)


def _together(shape: tuple[int, ...], depth: int) -> int:
    """Number of results along the last axis that share one search: all of them are in one row."""
    fits = (n for n in (8, 4, 2) if shape[-1] % n == 0) if len(shape) > depth else ()
    return next(iter(fits), 1)


def _tensor_scatter(b: Builder, op: Op) -> None:
    x, updates, start, out = needed(b, op, 0), needed(b, op, 1), operand_at(b, op, 2), b.target(op.value)
    r = len(out.shape)
    axis = normalize_axis(op.attrs.axis, r)
    copy(b, op, x, out)  # no launch if a cache is bound as its own successor
    first = "0" if start is None else "i64(p.w[at_w(o0)])"
    size = f"p.n_y[{axis}]"
    wrap = f"at = (at % {size} + {size}) % {size};" if op.attrs.mode == "circular" else ""
    lines = f"""i64 at = o{axis} + {first};
        {wrap}
        if (at >= 0 && at < {size}) p.y[at_y({coordinates(r, {axis: "at"})})] = p.u[at_u({coordinates(r)})];"""
    reads = [out, *operands_of(b, op)[1:]]
    moved, into = _words(updates, out) if axis < r - 1 else (updates, out)
    emit_index_kernel(b, op, moved.shape, {"u": moved, "w": start}, {"y": into}, lines, reads=reads, results=[out])


def _words(*tensors: TensorView) -> tuple[TensorView, ...]:
    """Views of the tensors in 8-byte words, if all rows consist of such words; else the tensors. For data that is only moved."""
    count = 8 // tensors[0].dtype.itemsize

    def whole(t: TensorView) -> bool:
        steps = [s for n, s in zip(t.shape[:-1], t.strides[:-1], strict=True) if n > 1]
        return t.strides[-1] == 1 and not any(x % count for x in (t.shape[-1], t.offset, *steps))

    if count <= 1 or not all(whole(t) for t in tensors):
        return tensors
    return tuple(
        replace(
            t, dtype=DTYPES["uint64"], offset=t.offset // count, shape=(*t.shape[:-1], t.shape[-1] // count),
            strides=(*(s // count for s in t.strides[:-1]), 1),
        )
        for t in tensors
    )  # fmt: skip


# ---------------------------------------------------------------- refusals


def _lookups(b: Builder, op: Op) -> float:
    """Number of (result, update) pairs that a search visits."""
    x, index = shape_at(b, op, 0), shape_at(b, op, 1)
    if op.kind == "ScatterElements":
        return math.prod(x) * index[normalize_axis(op.attrs.axis, len(x))]
    return math.prod(x) * math.prod(index[:-1]) / _together(x, index[-1])


def _limits(b: Builder, op: Op) -> str | None:
    if op.kind == "TensorScatter" or _direct(b, op) or _adds(b, op):
        return None
    visits = _lookups(b, op)
    return f"its results would compare {visits:.0f} updates in all" if visits > SCATTER_LIMIT else None


SCATTERS: dict[str, Callable[[Builder, Op], None]] = {
    "ScatterElements": _scatter_elements, "ScatterND": _scatter_nd, "TensorScatter": _tensor_scatter,
}  # fmt: skip
"""Kind -> the function that emits it."""

TACTIC = IndexKernel(SCATTERS, _limits)
