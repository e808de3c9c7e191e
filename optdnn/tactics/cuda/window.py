"""Sliding-window kernels, generated: pools, depthwise and direct convolutions, over one to three spatial axes.

One thread computes ``vec`` neighbouring channels of one output position where both tensors lie channels-last and aligned,
else one element. Sums are fp32 in the order of the taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.ir.graph import Op
from optdnn.runtime.cuda.nvrtc import Recipe
from optdnn.runtime.reference.window import resolve_pads
from optdnn.tactics.cuda.builder import Block, Builder, KernelSpec, Placed
from optdnn.tactics.cuda.pointwise import CPP, OPTIONS, arithmetic, literal
from optdnn.tactics.cuda.reduce import emit_reduce
from optdnn.types import is_float

THREADS = 128


@dataclass(frozen=True)
class Window:
    """Geometry over three spatial axes (leading ones of size 1)."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    """Begins, then ends."""
    dilations: tuple[int, ...]

    @classmethod
    def make(
        cls, kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int]
    ) -> Window:
        lead, rank = 3 - len(kernel), len(kernel)
        ones, zeros = (1,) * lead, (0,) * lead
        begins, ends = (*zeros, *pads[:rank]), (*zeros, *pads[rank:])
        return cls((*ones, *kernel), (*ones, *strides), (*begins, *ends), (*ones, *dilations))


def spatial3(x: Placed) -> Placed:
    """A feature map [n, c, ...] of one to three spatial axes as [n, c, d, h, w]."""
    lead = 5 - len(x.shape)
    return x.view((*x.shape[:2], *(1,) * lead, *x.shape[2:]), (*x.strides[:2], *(0,) * lead, *x.strides[2:]))


def channel_vector_width(tensors: Sequence[Placed]) -> int:
    """Neighbouring channels a thread can take as one access in every one of these feature maps."""
    best = 1
    for count in (2, 4, 8):
        for t in tensors:
            others = [s for i, (n, s) in enumerate(zip(t.shape, t.strides, strict=True)) if i != 1 and n > 1]
            aligned = t.strides[1] == 1 and t.offset % count == 0 and all(s % count == 0 for s in others)
            if not aligned or t.shape[1] % count or count * t.dtype.itemsize > 16:
                return best
        best = count
    return best


def position(out: Placed, vec: int) -> str:
    """C++ that turns the thread's index into n, c (of the first of ``vec`` channels), d, h, w of the output."""
    n, c, d, h, w = out.shape
    sizes = {"n": n, "c": c // vec, "d": d, "h": h, "w": w}
    order = ["c", "w", "h", "d", "n"] if out.strides[1] == 1 and c > 1 else ["w", "h", "d", "c", "n"]
    lines = ["u32 rest = index;"]
    for name in order[:-1]:
        lines.append(f"const int {name} = rest % {sizes[name]}u; rest /= {sizes[name]}u;")
    lines.append("const int n = rest;")
    text = " ".join(lines)
    return text.replace("const int c = rest %", "const int cv = rest %") + f" const int c = cv * {vec};"


def taps(window: Window) -> tuple[str, str]:
    """C++ of the loops over the taps (with the input's coordinates id, ih, iw and the bounds test), and their closing."""
    names = "dhw"
    lines, close = [], ""
    for i, x in enumerate(names):
        k, stride, pad, dilation = window.kernel[i], window.strides[i], window.pads[i], window.dilations[i]
        unroll = "#pragma unroll\n        " if k <= 9 else ""
        lines.append(
            f"\n        {unroll}for (int k{x} = 0; k{x} < {k}; k{x}++) {{ const int i{x} = {x} * {stride} - {pad} + k{x} * {dilation}; "
            f"if (i{x} < 0 || i{x} >= p.size_{x}) continue;"
        )
        close += "}"
    return "".join(lines), close


HEAD = """struct Params { const %s* x; %s* y; %sint size_d, size_h, size_w; u32 count; i64 xs[5], ys[5]; };

extern "C" __global__ void __launch_bounds__(%d) window(const __grid_constant__ Params p) {
    launch_dependents();
    const u32 index = blockIdx.x * %d + threadIdx.x;
    %s
    wait_for_predecessor();
    if (index >= p.count) return;
    const %s* x = p.x + n * p.xs[0];
"""


def emit_window(
    b: Builder, op: Op, window: Window, x: Placed, out: Placed, parts: dict[str, str], *, vec: int, extra: Sequence[Placed | None],
    fields: str, kind: str, attrs: dict[str, object], reads: Sequence[Placed | None],
) -> None:  # fmt: skip
    """Render and add the kernel. ``parts``: "start", "tap" (sees the tap's element address ``at``) and "end" (stores)."""
    x5, y5 = spatial3(x), spatial3(out)
    opening, closing = taps(window)
    tx, ty = CPP[x.dtype], CPP[out.dtype]
    text = HEAD % (tx, ty, fields, THREADS, THREADS, position(y5, vec), tx)
    text += f"""    {parts["start"]}{opening}
            const {tx}* at = x + id * p.xs[2] + ih * p.xs[3] + iw * p.xs[4];
            {parts["tap"]}
        {closing}
    {ty}* y = p.y + n * p.ys[0] + c * p.ys[1] + d * p.ys[2] + h * p.ys[3] + w * p.ys[4];
    {parts["end"]}
}}
"""
    count = y5.size // vec
    block = Block().pointer(x).pointer(out)
    for e in extra:
        block.pointer(e)
    block.i32(*x5.shape[2:]).u32(count).i64(*x5.strides).i64(*y5.strides)
    spec = KernelSpec(Recipe("general.cu", b.arch, {"generated.cuh": text}, OPTIONS), "window")
    b.emit(op, spec, (-(-count // THREADS), 1, 1), THREADS, block, kind, attrs, reads, [out])


class WindowPool:
    """Max, average and Lp pooling of any rank, padding, dilation and order."""

    name = "window_pool"
    deterministic, row_invariant = True, True

    def refuse(self, b: Builder, op: Op) -> str | None:
        if len(op.outputs) > 1:
            return "it does not give indices"
        if len(op.attrs.kernel_shape) > 3:
            return f"it has {len(op.attrs.kernel_shape)} spatial axes"
        dtype = op.outputs[0].type.dtype
        return None if is_float(dtype) or op.kind == "MaxPool" else f"it does not average {dtype.name}"

    def emit(self, b: Builder, op: Op) -> str:
        assert op.inputs[0] is not None
        a, x, out = op.attrs, b.operand(op.inputs[0]), b.target(op.value)
        pads = resolve_pads(a.auto_pad, a.pads, x.shape[2:], a.kernel_shape, a.strides, a.dilations)
        assert pads is not None
        window = Window.make(a.kernel_shape, a.strides, pads, a.dilations)
        vec = channel_vector_width([x, out])
        tx, ty, t = CPP[x.dtype], CPP[out.dtype], arithmetic(x.dtype)
        load = (
            f"const Pack<{tx}, {vec}> v(at + c * p.xs[1]);"
            if vec > 1
            else f"struct {{ {tx} lane[1]; }} v = {{at[c * p.xs[1]]}};"
        )
        each = f"#pragma unroll\n            for (int j = 0; j < {vec}; j++)"
        lowest = {"float": literal(float("-inf"), "float"), "double": literal(float("-inf"), "double")}.get(t)
        if op.kind == "MaxPool":
            if lowest is None:
                lowest = f"{t}(0)" if t.startswith("u") else f"{t}(~0ull << (8 * sizeof({t}) - 1))"
            step = "acc[j] = max_nan(acc[j], widen(v.lane[j]));"
            start, result = lowest, "acc[j]"
        else:
            lp = op.kind == "LpPool"
            power = a.p if lp else 1
            value = (
                "widen(v.lane[j])"
                if not lp
                else ("fabs(widen(v.lane[j]))" if power == 1 else f"pow(fabs(widen(v.lane[j])), {t}({power}))")
            )
            step, start = f"acc[j] += {value};", f"{t}(0)"
            result = (
                "acc[j] / counted" if not lp else ("acc[j]" if power == 1 else f"pow(acc[j], {t}(1) / {t}({power}))")
            )
        counted = self._counted(window, getattr(a, "count_include_pad", False), t) if op.kind == "AveragePool" else ""
        store = (f"Pack<{ty}, {vec}> r; {each} r.lane[j] = narrow<{ty}>({result}); r.store(y);" if vec > 1 else f"const int j = 0; *y = narrow<{ty}>({result});")  # fmt: skip
        parts = {
            "start": f"{t} acc[{vec}]; {each.replace(chr(10), chr(10))} acc[j] = {start};",
            "tap": f"{load} {each} {step}",
            "end": counted + store,
        }
        parts["start"] = f"{t} acc[{vec}]; for (int j = 0; j < {vec}; j++) acc[j] = {start};"
        parts["tap"] = f"{load} for (int j = 0; j < {vec}; j++) {step}"
        parts["end"] = parts["end"].replace("#pragma unroll\n            ", "")
        attrs = {"kernel_shape": a.kernel_shape, "strides": a.strides, "pads": pads, "dilations": a.dilations,
                 "ceil_mode": a.ceil_mode, "auto_pad": "NOTSET"}  # fmt: skip
        attrs |= {"count_include_pad": a.count_include_pad} if op.kind == "AveragePool" else {}
        attrs |= {"p": a.p} if op.kind == "LpPool" else {}
        if a.auto_pad != "NOTSET":
            attrs["ceil_mode"] = False
        emit_window(b, op, window, x, out, parts, vec=vec, extra=(), fields="", kind=op.kind, attrs=attrs, reads=[x])
        return f"x{vec}"

    @staticmethod
    def _counted(window: Window, padding: bool, t: str) -> str:
        """C++ that counts the elements (with ``padding``, of the padding too) under the window of this position."""
        lines = [f"{t} counted = 1;"]
        for i, x in enumerate("dhw"):
            k, stride, pad, dilation = window.kernel[i], window.strides[i], window.pads[i], window.dilations[i]
            low = -pad if padding else 0
            high = f"p.size_{x} + {window.pads[3 + i]}" if padding else f"p.size_{x}"
            lines.append(f"{{ int some = 0; for (int k = 0; k < {k}; k++) {{ const int at = {x} * {stride} - {pad} + k * {dilation}; "
                         f"some += at >= {low} && at < {high}; }} counted *= some; }}")  # fmt: skip
        return " ".join(lines) + "\n    "


class GlobalPool:
    """Pooling over all positions: a reduction."""

    name = "reduce"
    deterministic, row_invariant = True, True

    def refuse(self, b: Builder, op: Op) -> str | None:
        dtype = op.outputs[0].type.dtype
        return None if is_float(dtype) else f"it does not pool {dtype.name}"

    def emit(self, b: Builder, op: Op) -> str:
        assert op.inputs[0] is not None
        x, out = b.operand(op.inputs[0]), b.target(op.value)
        how = {"GlobalAveragePool": "ReduceMean", "GlobalMaxPool": "ReduceMax"}[op.kind]
        emit_reduce(b, op, how, x, tuple(range(2, len(x.shape))), out, kind=op.kind, attrs={}, reads=[x])
        return ""
