"""Generated sliding-window kernels over one to three spatial axes: the common parts of pools, depthwise and direct convolutions.

One thread computes ``vec`` neighboring channels of one output position if both tensors are channels-last and aligned,
else one element. Sums are fp32 in the order of the taps. Any stages follow, on operands of any strides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.pointwise.expressions import CPP, arithmetic, body
from optdnn.kernels.pointwise.strides import broadcast
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.runtime.reference.window import resolve_pads
from optdnn.types import DType, TensorType, is_float

THREADS = 128


def pads_of(op: Op, shape: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
    """The pads (begins, then ends) of an operator that slides a kernel over the spatial axes of an operand."""
    a = op.attrs
    pads = resolve_pads(a.auto_pad, a.pads, shape[2:], kernel, a.strides, a.dilations)
    assert pads is not None
    return pads


def pool_attrs(op: Op, shape: Sequence[int]) -> dict[str, Any]:
    """The attributes of a pool over an operand of this shape, as its reference kernel takes them."""
    a = op.attrs
    return {
        "kernel_shape": a.kernel_shape, "strides": a.strides, "pads": pads_of(op, shape, a.kernel_shape),
        "dilations": a.dilations, "ceil_mode": a.ceil_mode and a.auto_pad == "NOTSET", "auto_pad": "NOTSET",
    }  # fmt: skip


@dataclass(frozen=True)
class Window:
    """Geometry over three spatial axes (leading ones of size 1); ``pads``: begins, then ends."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]

    @classmethod
    def make(
        cls, kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int]
    ) -> Window:
        lead, rank = 3 - len(kernel), len(kernel)
        ones, zeros = (1,) * lead, (0,) * lead
        begins, ends = (*zeros, *pads[:rank]), (*zeros, *pads[rank:])
        return cls((*ones, *kernel), (*ones, *strides), (*begins, *ends), (*ones, *dilations))


def spatial3(x: TensorView) -> TensorView:
    """A feature map [n, c, ...] of one to three spatial axes as [n, c, d, h, w]."""
    lead = 5 - len(x.shape)
    return x.view((*x.shape[:2], *(1,) * lead, *x.shape[2:]), (*x.strides[:2], *(0,) * lead, *x.strides[2:]))


def channel_vector_width(tensors: Sequence[TensorView]) -> int:
    """Neighboring channels that are one access in each of these feature maps: 1, 2, 4 or 8."""
    best = 1
    for count in (2, 4, 8):
        for t in tensors:
            others = [s for i, (n, s) in enumerate(zip(t.shape, t.strides, strict=True)) if i != 1 and n > 1]
            aligned = t.strides[1] == 1 and t.offset % count == 0 and all(s % count == 0 for s in others)
            if not aligned or t.shape[1] % count or count * t.dtype.itemsize > 16:
                return best
        best = count
    return best


def position(out: TensorView, vec: int) -> str:
    """C++ that computes n, c (the first of ``vec`` channels), d, h, w of the output from the thread's index."""
    n, c, d, h, w = out.shape
    sizes = {"n": n, "c": c // vec, "d": d, "h": h, "w": w}
    order = ["c", "w", "h", "d", "n"] if out.strides[1] == 1 and c > 1 else ["w", "h", "d", "c", "n"]
    lines = ["u32 rest = index;"]
    for name in order[:-1]:
        times = f" * {vec}" if name == "c" and vec > 1 else ""
        lines.append(f"const int {name} = rest % {sizes[name]}u{times}; rest /= {sizes[name]}u;")
    return " ".join([*lines, "const int n = rest;"])


Edges = tuple[int, ...]
"""Repetitions of the first elements of three spatial axes before them, then of the last elements after them."""


def taps(window: Window, *, transposed: bool = False, edges: Edges = ()) -> tuple[str, str]:
    """C++ of the loops over the taps (with the input's coordinates id, ih, iw and the bounds test), and of their closing braces.

    ``transposed``: the loops visit the input elements that a transposed convolution adds to this output element.
    ``edges``: repeated edges of the input, which the window's coordinates include; empty: no edges are repeated.
    """
    lines, close = [], ""
    for i, x in enumerate("dhw"):
        k, stride, pad, dilation = window.kernel[i], window.strides[i], window.pads[i], window.dilations[i]
        unroll = "#pragma unroll\n        " if k <= 9 else ""
        at = f"const int i{x} = {x} * {stride} - {pad} + k{x} * {dilation}; "
        if transposed:
            at = (
                f"const int t{x} = {x} + {pad} - k{x} * {dilation}; if (t{x} < 0 || t{x} % {stride}) continue; "
                f"const int i{x} = t{x} / {stride}; "
            )
        bounds = f"if (i{x} < 0 || i{x} >= p.size_{x}) continue;"
        if edges:
            at = at.replace(f"const int i{x} =", f"const int e{x} =")
            more, before = edges[i] + edges[3 + i], edges[i]
            bounds = f"if (e{x} < 0 || e{x} >= p.size_{x} + {more}) continue; const int i{x} = min(max(e{x} - {before}, 0), p.size_{x} - 1);"
        lines.append(f"\n        {unroll}for (int k{x} = 0; k{x} < {k}; k{x}++) {{ {at}{bounds}")
        close += "}"
    return "".join(lines), close


TOGETHER = 9
"""Most taps whose loads are in flight together."""
MOST_APART = 49
"""Most taps that are unrolled with lines of their own."""
WARP, FEW_THREADS = 32, 1 << 13
"""With more taps and fewer threads than this, a warp shares the taps of a result: one thread would add 100 elements in 10 us."""


def together(window: Window, apart: Callable[[int, str], tuple[str, str]]) -> str:
    """C++ that loads some rows of taps, adds them, and goes on to the next rows. A tap outside of the input loads an
    element inside and does not add it: with a branch around it, each load would wait for the previous one."""
    lines = list[str]()
    for i, x in enumerate("dhw"):
        stride, pad, dilation = window.strides[i], window.pads[i], window.dilations[i]
        for k in range(window.kernel[i]):
            lines.append(f"const int i{x}{k} = {x} * {stride} - {pad} + {k * dilation};")
            lines.append(f"const bool o{x}{k} = i{x}{k} >= 0 && i{x}{k} < p.size_{x};")
            lines.append(f"const i64 a{x}{k} = i64(o{x}{k} ? i{x}{k} : 0) * p.xs[{2 + i}];")
    taps = list(itertools.product(*(range(k) for k in window.kernel)))
    row = window.kernel[2]
    step = max(1, TOGETHER // row) * row
    for first in range(0, len(taps), step):
        some = [(k, taps[k]) for k in range(first, min(first + step, len(taps)))]
        found = [(d, h, w, *apart(k, f"x + ad{d} + ah{h} + aw{w}")) for k, (d, h, w) in some]
        lines += [load for *_, load, _ in found]
        lines += [f"if (od{d} && oh{h} && ow{w}) {{ {add} }}" for d, h, w, _, add in found]
    return "\n    ".join(lines)


@dataclass
class Rendered:
    """The parts of a window kernel.

    ``start`` declares the accumulators of ``tap``. ``tap`` can use the tap (kd, kh, kw), the input's coordinates (id,
    ih, iw) and the address ``at`` of the element of channel 0 there. ``end`` leaves the result of channel ``c + j`` in
    ``value``, of the arithmetic type of the output. ``arguments`` are further tensors (``p.a0``, …), ``numbers``
    further integers (``p.m[0]``, …).
    """

    start: str
    tap: str
    end: str
    arguments: Sequence[TensorView] = ()
    numbers: Sequence[int] = ()
    apart: Callable[[int, str], tuple[str, str]] | None = None
    """``tap`` in two parts, load and addition, for the index of a tap and the address of its element of channel 0. With
    them, the loads of several taps are in flight together."""
    combined: str = ""
    """C++ of ``acc[j]`` and the accumulator of another thread, ``other``, together; empty: taps are not shared."""


def emit_window(
    b: Builder,
    op: Op,
    window: Window,
    x: TensorView,
    out: TensorView,
    parts: Rendered,
    *,
    vec: int,
    kind: str,
    attrs: dict[str, Any],
    reads: Sequence[TensorView | None],
    stages: Sequence[Stage] = (),
    operands: Sequence[TensorView | None] = (),
    transposed: bool = False,
    writes: TensorView | None = None,
    edges: Edges = (),
    computed: DType | None = None,
) -> None:
    """Render the kernel and add its launch. ``stages`` apply to the result and read ``operands`` (by slot, from 1 on).
    ``edges``: as of :func:`taps`. ``computed``: the type of the result before the stages (None: the output's type).

    ``writes``: the view of the result in the launch's meaning, if it is not ``out``.
    """
    x5, y5 = spatial3(x), spatial3(out)
    used = sorted({a for s in stages for a in s.args if a is not None and a > 0})
    extra = {a: p for a in used if (p := operands[a]) is not None}
    packs = {a: p for a, p in extra.items() if vec > 1 and _in_packs(p, out, vec)}
    finish = finishing(stages, extra, len(operands), out, packs, computed)
    count = y5.size // vec
    if not count:
        return
    few = count <= FEW_THREADS and math.prod(window.kernel) > MOST_APART and not b.row_invariant
    lanes = WARP if few and parts.combined and not edges else 1
    text = _kernel(window, x, out, parts, (extra, packs), finish, (vec, lanes), transposed, edges)
    placed = {
        "x": x,
        "y": out,
        **{f"a{i}": t for i, t in enumerate(parts.arguments)},
        **{f"e{a}": p for a, p in extra.items()},
    }
    parameters = Parameters().pointer(*placed).i32(*x5.shape[2:]).u32(count).i64(*x5.strides, *y5.strides)
    for p in extra.values():
        parameters.i64(*spatial3(out.view(out.shape, broadcast(p, out.shape))).strides)
    parameters.i64(*parts.numbers)
    launch = parameters.generated(b.arch, text, "window", -(-count * lanes // THREADS), THREADS)
    b.emit(op, launch, placed, kind, attrs, reads, [writes or out])


def _kernel(
    window: Window, x: TensorView, out: TensorView, parts: Rendered,
    read: tuple[dict[int, TensorView], dict[int, TensorView]], finish: str, each: tuple[int, int], transposed: bool, edges: Edges,
) -> str:  # fmt: skip
    """The kernel's source. ``read``: the stages' operands by slot, and those of them that are loaded in packs;
    ``finish``: C++ of the stages (:func:`finishing`). ``each``: channels of a thread, and threads that share the taps of a result."""
    (extra, packs), (vec, lanes), tx, ty = read, each, CPP[x.dtype], CPP[out.dtype]
    opening, closing = taps(window, transposed=transposed, edges=edges)
    if (
        parts.apart is not None
        and not edges
        and math.prod(window.kernel) <= MOST_APART
        and window.kernel[2] <= TOGETHER
    ):
        inside = "\n    " + together(window, parts.apart)
    elif lanes > 1:
        inside = _shared_taps(window, parts, tx, vec)
    else:
        inside = f"""{opening}
            const {tx}* at = x + id * p.xs[2] + ih * p.xs[3] + iw * p.xs[4];
            {parts.tap}
        {closing}"""
    # The stages have a scope of their own, since their names (v0, r0, …) may be names of loads.
    if vec > 1:
        results = f"for (int j = 0; j < {vec}; j++) {{ {parts.end} {finish} r.lane[j] = stored; }}"
        # These loads are in flight with those of the taps. After the taps, they would be a second wait.
        early = "".join(f"const Pack<{CPP[p.dtype]}, {vec}> q{a}({_element(a, 'c')});\n    " for a, p in packs.items())
        store = f"Pack<{ty}, {vec}> r;\n    {results}\n    r.store(y);"
    else:
        early = ""
        store = f"{{ const int j = 0; {parts.end} {finish} *y = stored; }}"
    fields = [f"const {CPP[t.dtype]}* a{i};" for i, t in enumerate(parts.arguments)]
    fields += [f"const {CPP[p.dtype]}* e{a};" for a, p in extra.items()]
    fields += ["int size_d, size_h, size_w; u32 count; i64 xs[5], ys[5];"]
    fields += [f"i64 es{a}[5];" for a in extra] + ([f"i64 m[{len(parts.numbers)}];"] if parts.numbers else [])
    return f"""struct Params {{ const {tx}* x; {ty}* y; {" ".join(fields)} }};

extern "C" __global__ void __launch_bounds__({THREADS}) window(const __grid_constant__ Params p) {{
    launch_dependents();
    const u32 index = {f"(blockIdx.x * {THREADS} + threadIdx.x) / {lanes}" if lanes > 1 else f"blockIdx.x * {THREADS} + threadIdx.x"};
    {position(spatial3(out), vec)}
    wait_for_predecessor();
    if (index >= p.count) return;
    const {tx}* x = p.x + n * p.xs[0];
    {early}{parts.start}{inside}
    {ty}* y = p.y + n * p.ys[0] + c * p.ys[1] + d * p.ys[2] + h * p.ys[3] + w * p.ys[4];
    {store}
}}
"""


def _shared_taps(window: Window, parts: Rendered, tx: str, vec: int) -> str:
    """C++ of a warp's taps of one result; the first lane has their sum and continues."""
    (_, kh, kw), lines = window.kernel, list[str]()
    for x, tap, stride, pad, step in zip(
        "dhw", (f"t / {kh * kw}", f"t / {kw} % {kh}", f"t % {kw}"), window.strides, window.pads, window.dilations,
        strict=False,
    ):  # fmt: skip
        lines.append(f"const int k{x} = {tap}, i{x} = {x} * {stride} - {pad} + k{x} * {step};")
        lines.append(f"if (i{x} < 0 || i{x} >= p.size_{x}) continue;")
    other = "const auto other = __shfl_xor_sync(~0u, acc[j], half);"
    return f"""
    for (int t = threadIdx.x % {WARP}; t < {math.prod(window.kernel)}; t += {WARP}) {{
        {" ".join(lines)}
        const {tx}* at = x + id * p.xs[2] + ih * p.xs[3] + iw * p.xs[4];
        {parts.tap}
    }}
    for (int half = {WARP // 2}; half; half /= 2) for (int j = 0; j < {vec}; j++) {{ {other} {parts.combined} }}
    if (threadIdx.x % {WARP}) return;"""


def finishing(
    stages: Sequence[Stage], extra: dict[int, TensorView], slots: int, out: TensorView, packs: Collection[int] = (),
    computed: DType | None = None,
) -> str:  # fmt: skip
    """C++ that applies the stages to ``value`` and leaves the result in ``stored``, of the output's element type.
    ``packs``: slots of operands that are already loaded, as ``q1.lane[j]``. ``computed``: the element type of ``value`` (None: the
    output's)."""
    ty, given = CPP[out.dtype], computed or out.dtype
    if not stages:
        return f"const {ty} stored = narrow<{ty}>(value);"
    met = _types_met(stages, given)
    types = [TensorType(given, out.shape)] + [
        TensorType(_common(extra[a].dtype, met.get(a, given)), extra[a].shape) if a in extra else TensorType(given, ())
        for a in range(1, slots)
    ]
    lines, result, _ = body(stages, types)
    at = {a: f"q{a}.lane[j]" if a in packs else f"*({_element(a, '(c + j)')})" for a in extra}
    loads = [f"const {arithmetic(p.dtype)} v{a} = widen({at[a]});" for a, p in extra.items()]
    head = f"const {arithmetic(given)} v0 = value;"
    return " ".join([head, *loads, *lines, f"const {ty} stored = narrow<{ty}>({result});"])


def _element(slot: int, channel: str) -> str:
    """C++ of the address of an operand's element."""
    at = zip(("n", channel, "d", "h", "w"), range(5), strict=True)
    return " + ".join([f"p.e{slot}", *(f"{x} * p.es{slot}[{k}]" for x, k in at)])


def _in_packs(x: TensorView, out: TensorView, vec: int) -> bool:
    """Whether ``vec`` neighboring channels of an operand, broadcast to the output, are one aligned access."""
    view = out.view(out.shape, broadcast(x, out.shape))
    return x.dtype.itemsize * vec <= 16 and channel_vector_width([replace(view, offset=x.offset, dtype=x.dtype)]) >= vec


def _types_met(stages: Sequence[Stage], given: DType) -> dict[int, DType]:
    """The element type that the first stage of each operand computes with, by slot: the type of the results and of the earlier
    operands that it reads. ``given``: the type before all stages. Only a Cast changes it: int16 quantization is computed in fp32
    between two of them."""
    registers, met = [given], dict[int, DType]()
    for stage in stages:
        slots = [a for a in stage.args if a is not None]
        read = [met[a] for a in slots if a in met] + [registers[~a] for a in slots if a < 0]
        here = next((t for t in read if is_float(t)), given)
        for a in slots:
            if a > 0:
                met.setdefault(a, here)
        registers.append(stage.attrs.to if isinstance(stage.attrs, CastAttrs) else here)
    return met


def _common(given: DType, met: DType) -> DType:
    """The type of an operand in the stages. A float operand counts as the type that it meets, even if it is wider, as an
    fp32 bias is."""
    return met if is_float(given) and is_float(met) else given


def load_channels(type: str, vec: int, pointer: str, name: str) -> str:
    """C++ that loads ``vec`` channels from ``pointer`` as ``name.lane``."""
    if vec > 1:
        return f"const Pack<{type}, {vec}> {name}({pointer});"
    return f"struct {{ {type} lane[1]; }} {name}; {name}.lane[0] = *({pointer});"
