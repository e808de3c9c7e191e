"""Generated kernels of softmax and normalizations: statistics of each row in fp32, in a fixed order, then a pointwise result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.views import reshaped
from optdnn.kernels.layout.walks import walk
from optdnn.kernels.norm.activation import NormOutput, output_of
from optdnn.kernels.norm.row_forms import LONG, THREADS, Form, apart_seconds, form_of, whole_rows_seconds
from optdnn.kernels.pointwise.expressions import CPP, arithmetic
from optdnn.kernels.pointwise.strides import broadcast, merge
from optdnn.kernels.reduce.reduce import limits
from optdnn.kernels.tactic import Region, Tactic, TakesAfter
from optdnn.ops.base import attrs_dict
from optdnn.types import normalize_axis


@dataclass(frozen=True)
class Statistic:
    """One reduction over a row, in C++ expressions: from ``start`` on, ``combine`` folds in the ``term`` of each element ``v``; ``post`` is
    applied to the result ``s``. Earlier statistics are ``t0``, ….

    ``merged``: the term of a part of a row, where ``u0``, ``u1``, … are the statistics of its ``n`` elements before ``post``."""

    start: str
    term: str
    combine: str = "a + b"
    post: str = "s"
    merged: str = "u0"


def _each(lanes: int, count: int, body: str) -> str:
    """C++ of a loop over the elements ``i`` of a row that belong to a lane."""
    return f"if (live) for (u32 i = lane; i < {count}u; i += {lanes}) {{ {body} }}"


def _each_kept(lanes: int, count: int, body: str) -> str:
    """The same, unrolled; ``j`` is the element's number within the lane."""
    return (
        f"#pragma unroll\n    for (u32 j = 0; j < {-(-count // lanes)}; j++) "
        f"{{ const u32 i = lane + j * {lanes}; if (live && i < {count}u) {{ {body} }} }}"
    )


def _reduced(name: str, s: Statistic, t: str, count: int, form: Form, each: Callable[[str], str], value: str) -> str:
    """CUDA source that computes the statistic ``name`` of type ``t``: ``each`` repeats a statement for the elements of a thread, which
    ``value`` loads, and the threads of a row add up their results in shared memory."""
    start, term, combine, post = (
        z.format(T=t, N=count, LOW=limits(t)[0]) for z in (s.start, s.term, s.combine, s.post)
    )
    return (
        f"{t} {name}; {{ {t} s = {start};\n    {each(f'{value} const {t} a = s, b = {t}({term}); s = {combine};')}\n"
        f"    __syncthreads(); {form.of('lane')} = s; __syncthreads();\n"
        f"    for (int half = {form.lanes // 2}; half; half /= 2) {{ if (lane < half) {{ const {t} a = {form.of('lane')}, "
        f"b = {form.of('lane + half')}; {form.of('lane')} = {combine}; }} __syncthreads(); }}\n"
        f"    s = {form.of('0')}; {name} = {post}; }}"
    )


def emit_rows(
    b: Builder, op: Op, x: TensorView, axes: Sequence[int], out: TensorView, statistics: Sequence[Statistic], result: str,
    extras: Sequence[TensorView] = (), *, kind: str, attrs: dict[str, Any], reads: Sequence[TensorView | None], writes: TensorView,
) -> None:  # fmt: skip
    """Emits ``out = result(v, t0, …, e0, …)``. ``extras`` (``e0``, …) have the shape of ``x``. ``{N}`` is the length of a row."""
    if not out.size:
        return
    kept = [i for i in range(len(x.shape)) if i not in axes]
    tensors = [out, x, *extras]
    dims, outer = merge([x.shape[i] for i in kept], [[t.strides[i] for i in kept] for t in tensors])
    inner, steps = merge([x.shape[i] for i in axes], [[t.strides[i] for i in axes] for t in tensors])
    rows, count = math.prod(dims), math.prod(inner)
    form = form_of(b, x, axes, out)
    lanes, t = form.lanes, arithmetic(x.dtype)
    load = f"i64 at = bx; {walk('r', 'i', 'inner', len(inner), [('at', 'ix')])}"
    each, value, held = partial(_each, lanes, count), f"{load} const {t} v = widen(p.x[at]);", ""
    if form.kept(count):
        each, value = partial(_each_kept, lanes, count), f"const {t} v = kept[j];"
        held = f"{t} kept[{-(-count // lanes)}];\n    {each(f'{load} kept[j] = widen(p.x[at]);')}"
    names = ["y", "x", *(f"e{i}" for i in range(len(extras)))]
    fields = [f"{'' if n == 'y' else 'const '}{CPP[p.dtype]}* {n};" for n, p in zip(names, tensors, strict=True)]
    fields += [f"u32 rows; Size dims[{len(dims)}], inner[{len(inner)}];"]
    fields += [f"i64 o{n}[{len(dims)}], i{n}[{len(inner)}];" for n in names]
    text = [_reduced(f"t{k}", s, t, count, form, each, value) for k, s in enumerate(statistics)]
    offsets = [("at_" + n, "i" + n) for n in names]
    begin = " ".join(f"i64 at_{n} = b{n};" for n in names)
    loads = " ".join(f"const {arithmetic(p.dtype)} e{i} = widen(p.e{i}[at_e{i}]);" for i, p in enumerate(extras))
    newline = "\n    "
    stored = f"""
        {begin} {walk("r", "i", "inner", len(inner), offsets)}
        const {t} v = {"kept[j]" if held else "widen(p.x[at_x])"}; {loads}
        p.y[at_y] = narrow<{CPP[out.dtype]}>({t}({result.format(T=t, N=count)}));
    """
    source = f"""struct Params {{ {" ".join(fields)} }};

extern "C" __global__ void __launch_bounds__({form.threads}) rows(const __grid_constant__ Params p) {{
    __shared__ {t} partial[{form.threads}];
    launch_dependents();
    const u32 lane = {form.lane}, group = {form.group}, row = blockIdx.x * {form.rows} + group;
    const bool live = row < p.rows;
    {" ".join(f"i64 b{n} = 0;" for n in names)}
    if (live) {{ {walk("q", "row", "dims", len(dims), [("b" + n, "o" + n) for n in names])} }}
    wait_for_predecessor();
    {held}
    {newline.join(text)}
    {each(stored)}
}}
"""
    parameters = Parameters().pointer(*names).u32(rows).sizes(*dims, *inner)
    for o, i in zip(outer, steps, strict=True):
        parameters.i64(*o, *i)
    launch = parameters.generated(b.arch, source, "rows", -(-rows // form.rows), form.threads)
    b.emit(op, launch, dict(zip(names, tensors, strict=True)), kind, attrs, reads, [writes])


MEAN = Statistic("{T}(0)", "v", post="s / {T}({N})")


def _squares(post: str) -> Statistic:
    """Sum of squared differences from the mean ``t0``."""
    return Statistic("{T}(0)", "(v - t0) * (v - t0)", post=post, merged="(u1 + n * (u0 / n - t0) * (u0 / n - t0))")


def _variance(epsilon: float) -> Statistic:
    return _squares(f"{{T}}(1) / sqrt(s / {{T}}({{N}}) + {{T}}({epsilon!r}))")


@dataclass(frozen=True)
class RowPlan:
    """``target = result(v, t0, …, e0, …)`` of the rows of ``source`` over ``axes``; ``extras`` (``e0``, …) are broadcast to its shape by
    their strides. ``reads`` and ``writes`` are the operands of the operator's meaning."""

    source: TensorView
    target: TensorView
    axes: tuple[int, ...]
    statistics: tuple[Statistic, ...]
    result: str
    extras: tuple[TensorView, ...]
    reads: tuple[TensorView | None, ...]
    writes: TensorView

    def strides(self, axes: Sequence[int]) -> list[list[int]]:
        """Strides of the target, the source and the extras along ``axes``."""
        return [[t.strides[i] for i in axes] for t in (self.target, self.source, *self.extras)]

    @property
    def length(self) -> int:
        """Elements of a row."""
        return math.prod(self.source.shape[i] for i in self.axes)

    @property
    def kept(self) -> list[int]:
        """The axes that are not reduced."""
        return [i for i in range(len(self.source.shape)) if i not in self.axes]


class Rows(Tactic):
    """Softmax, LogSoftmax, and every normalization with statistics per row."""

    name = "rows"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not op.outputs[0].type.dims:
            return "a scalar has no rows"
        if any(b.graph.uses(v) for v in op.values[1:]):
            return "it does not keep the statistics"
        return None

    def seconds(self, b: Builder, op: Op) -> float | None:
        return _seconds(b, row_plan(b, op, b.result(op.value)))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        plan = row_plan(b, op, b.target(op.value))
        _emit(b, op, plan, op.kind, attrs_dict(op.attrs), plan.reads)


class WidenedRows(TakesAfter, Rows):
    """A softmax of 16-bit rows whose elements lie apart, as over the channels of images, and the conversion to fp32 after it."""

    name = "rows_widened"

    def refuse(self, b: Builder, op: Op) -> str | None:
        to = _widened(b, op)
        if [stage.kind for stage in to.epilogue.stages] != ["Cast"]:
            return "the only reader of its result is not a conversion to fp32"
        if (why := super().refuse(b, op)) is not None:
            return why
        plan = row_plan(b, op, b.result(to.value))
        apart = form_of(b, plan.source, plan.axes, plan.target).apart
        return None if apart else "neighboring threads would not read and write the elements of neighboring rows"

    def region(self, b: Builder, op: Op) -> Region:
        """The softmax and the conversion after it."""
        return _widened(b, op).region

    def place(self, b: Builder, op: Op) -> None:
        """Place the result of the conversion."""
        b.target(_widened(b, op).value)

    def seconds(self, b: Builder, op: Op) -> float | None:
        return _seconds(b, row_plan(b, op, b.result(_widened(b, op).value)))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        to = _widened(b, op)
        plan, (kind, attrs) = row_plan(b, op, b.target(to.value)), to.meaning()
        _emit(b, to.covers, plan, kind, attrs, (*plan.reads, None, None))


def _widened(b: Builder, op: Op) -> NormOutput:
    """The operator, and the conversion to fp32 after it."""
    return output_of(b, op, wide=True)


def _seconds(b: Builder, plan: RowPlan) -> float | None:
    """The predicted time of a launch; None for short rows of neighboring elements."""
    rows, passes = plan.source.size // max(1, plan.length), len(plan.statistics) + 1
    form = form_of(b, plan.source, plan.axes, plan.target)
    if form.apart:
        itemsize = (plan.source.dtype.itemsize + plan.target.dtype.itemsize) / 2  # an element is read and written
        return apart_seconds(rows, plan.length, itemsize, passes, form)
    if plan.length <= LONG * THREADS:
        return None
    return whole_rows_seconds(rows, plan.length, passes - 1, b.gpu)


def _emit(
    b: Builder, op: Op, plan: RowPlan, kind: str, attrs: dict[str, Any], reads: Sequence[TensorView | None]
) -> None:
    emit_rows(
        b, op, plan.source, plan.axes, plan.target, plan.statistics, plan.result, plan.extras,
        kind=kind, attrs=attrs, reads=reads, writes=plan.writes,
    )  # fmt: skip


def row_plan(b: Builder, op: Op, out: TensorView) -> RowPlan:
    """The row kernels' plan of an operator with its result at ``out``."""
    operands = tuple(None if v is None else b.operand(v) for v in op.inputs)
    x = operands[0]
    assert x is not None
    a, rank = op.attrs, len(x.shape)
    source, target, extras = x, out, [p for p in operands[1:] if p is not None]
    axes: tuple[int, ...]
    shift = " + e1" if len(extras) > 1 else ""
    match op.kind:
        case "Softmax" | "LogSoftmax":
            axes = (normalize_axis(a.axis, rank),)
            sums = Statistic("{T}(0)", "exp(v - t0)", merged="(u0 == {LOW} ? {T}(0) : u1 * exp(u0 - t0))")
            statistics = [Statistic("{LOW}", "v", "max_nan(a, b)"), sums]
            result = "exp(v - t0) / t1" if op.kind == "Softmax" else "(v - t0) - log(t1)"
        case "LayerNormalization":
            axes = tuple(range(normalize_axis(a.axis, rank), rank))
            statistics, result = [MEAN, _variance(a.epsilon)], f"(v - t0) * t1 * e0{shift}"
        case "RMSNormalization":
            axes = tuple(range(normalize_axis(a.axis, rank), rank))
            mean = Statistic("{T}(0)", "v * v", post=f"sqrt(s / {{T}}({{N}}) + {{T}}({a.epsilon!r}))")
            statistics, result = [mean], "v / t0 * e0"
        case "DeviationNormalization":
            axes = tuple(range(normalize_axis(a.axis, rank), rank))
            root = f"sqrt(s / {{T}}({{N}}) + {{T}}({a.epsilon!r})) + {{T}}({a.root_epsilon!r})"
            about_zero = Statistic("{T}(0)", "v * v", post=root)
            statistics = [MEAN, _squares(root)] if a.about_mean else [about_zero]
            result = f"{'(v - t0)' if a.centered else 'v'} / t{len(statistics) - 1} * e0{shift}"
        case "InstanceNormalization" | "GroupNormalization":
            source, target, extras = _groups(op, x, out, extras)
            axes = tuple(range(2, len(source.shape)))
            statistics, result = [MEAN, _variance(a.epsilon)], "(v - t0) * t1 * e0 + e1"
        case "LpNormalization":
            axes = (normalize_axis(a.axis, rank),)
            term, post = ("fabs(v)", "s") if a.p == 1 else ("v * v", "sqrt(s)")
            least = f"max_nan({post}, {{T}}({a.epsilon!r}))" if a.epsilon else post
            statistics, result = [Statistic("{T}(0)", term, post=least)], "v / (t0 == 0 ? {T}(1) : t0)"
        case _:
            axes = tuple(sorted(normalize_axis(i, rank) for i in a.axes))
            statistics, result = [MEAN, _squares("sqrt(s / {T}({N})) + {T}(1e-9)")], "(v - t0) / t1"
    extras = [e if e.shape == source.shape else e.view(source.shape, broadcast(e, source.shape)) for e in extras]
    return RowPlan(source, target, axes, tuple(statistics), result, tuple(extras), operands, out)


def _groups(
    op: Op, x: TensorView, out: TensorView, extras: Sequence[TensorView]
) -> tuple[TensorView, TensorView, list[TensorView]]:
    """Input, result, scale and bias of a group or instance norm, as [images, groups, channels of a group, ...]."""
    n, c = x.shape[:2]
    groups = c if op.kind == "InstanceNormalization" else op.attrs.num_groups
    split = (n, groups, c // groups, *x.shape[2:])
    views = [reshaped(p, split) for p in (x, out)]
    assert views[0] is not None
    assert views[1] is not None
    per = [(0, e.strides[0] * (c // groups), e.strides[0], *(0,) * (len(split) - 3)) for e in extras]
    return views[0], views[1], [e.view(split, s) for e, s in zip(extras, per, strict=True)]
