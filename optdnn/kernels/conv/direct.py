"""Convolutions without tensor cores: depthwise ones, vectorized over channels, and any others, with one output per thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv.fused import conv_attrs
from optdnn.kernels.conv.hopper import entering
from optdnn.kernels.pointwise.expressions import CPP, arithmetic
from optdnn.kernels.pool.window import (
    MOST_APART,
    Edges,
    Rendered,
    Window,
    channel_vector_width,
    emit_window,
    load_channels,
)
from optdnn.kernels.tactic import Tactic
from optdnn.ops.base import Stage
from optdnn.ops.conv import ConvTransposeAttrs, resolved, resolved_transpose
from optdnn.runtime.reference.conv import transpose_pads
from optdnn.runtime.reference.window import resolve_pads
from optdnn.types import FP32, is_float

ARITY = 3
TAP_INSTRUCTIONS, UNROLLED, FEW_PRODUCT, PRODUCT, ISSUED, CLOCK = 47, 12, 22, 6, 128, 1.75e9
"""TAP_INSTRUCTIONS: instructions of a thread per tap in a loop (12 heads of 512 tokens and 64 features, 65 taps: 41 us
on an H200). UNROLLED: the same of unrolled taps, for each channel of the thread and once more (9 timings of CoaT on an H200: 57
channels, 56 x 56 pixels, batch 8, 7x7 56 us, 5x5 29 us). FEW_PRODUCT: instructions per product where the loads of all taps may be in
flight at once (FastViT-T8 in fp32, batch 8: 49 taps, 48 -> 96 channels, 32 x 32 pixels 31 us; 16 and 9.5 us at the next two
sizes). PRODUCT: the same in a loop over the input channels, an assumption: two loads, their addresses and the sum. ISSUED: thread
instructions that a multiprocessor issues per cycle; CLOCK: Hz."""


def _issue_seconds(b: Builder, instructions: float) -> float:
    """Seconds in which the GPU issues so many instructions of threads."""
    return instructions / (b.gpu.multiprocessors * ISSUED * CLOCK)


def _stages(op: Op) -> list[Stage]:
    """The epilogue on slots: 0 is the result, 1 the bias, and 2 and higher the stages' operands (the op's slot minus one)."""
    first = [Stage("Add", (-1, 1))] if op.input(2) is not None else []
    shift = len(first)
    moved = [
        Stage(s.kind, tuple(a if a is None else a - shift if a < 0 else a - 1 for a in s.args), s.attrs)
        for s in op.attrs.epilogue
    ]
    return [*first, *moved]


def _operands(b: Builder, op: Op, out: TensorView) -> list[TensorView | None]:
    """Operands by the slots of :func:`_stages`, with the bias broadcast along the channels."""
    found: list[TensorView | None] = [None, None]
    bias = op.input(2)
    if bias is not None:
        v = b.operand(bias)
        rank = len(out.shape) - 2
        found[1] = v.view((1, out.shape[1], *(1,) * rank), (0, v.strides[0], *(0,) * rank))
    return found + [None if v is None else b.operand(v) for v in op.inputs[ARITY:]]


def _meaning(b: Builder, op: Op, x: TensorView, weight: TensorView) -> list[TensorView | None]:
    """The operands of the reference kernel: input, weights, bias, and those of the stages."""
    rest = [None if v is None else b.operand(v) for v in op.inputs[2:]]
    return [x, weight, *rest] if rest else [x, weight, None]


@dataclass(frozen=True)
class Meant:
    """The kind and attributes of a launch's meaning, and the repeated edges of its input (:data:`.window.Edges`)."""

    kind: str
    attrs: dict[str, Any]
    edges: Edges = ()


class Depthwise(Tactic):
    """One filter per channel: a thread takes up to eight neighboring channels."""

    name = "depthwise"

    def source(self, b: Builder, op: Op) -> TensorView:
        """The input of the launch."""
        return entering(b, op)

    def meant(self, b: Builder, op: Op, kind: str, attrs: dict[str, Any]) -> Meant:
        """The meaning of a launch that computes an operator of this kind and attributes on its input."""
        return Meant(kind, attrs)

    def refuse(self, b: Builder, op: Op) -> str | None:
        weight = b.graph.constant_value(op.inputs[1])
        if weight is None:
            return "its weights are not constant"
        if weight.ndim > 5:
            return f"it has {weight.ndim - 2} spatial axes"
        if weight.shape[1] != 1 or op.attrs.group != weight.shape[0]:
            return f"it has {weight.shape[1]} channels per group and {weight.shape[0] / max(op.attrs.group, 1):g} filters per channel"
        return None

    def variant(self, b: Builder, op: Op) -> str:
        """The channels per thread, as ``x4``."""
        return f"x{self._width(self.source(b, op), b.result(op.value))}"

    @staticmethod
    def _width(x: TensorView, out: TensorView) -> int:
        return math.gcd(channel_vector_width([x, out]), x.shape[1])

    def seconds(self, b: Builder, op: Op) -> float | None:
        """Predicted seconds, from the instructions of all threads. Up to :data:`.window.MOST_APART` taps are unrolled; more run in a
        loop."""
        taps, width = math.prod(b.weights(op).shape[2:]), self._width(self.source(b, op), b.result(op.value))
        return self.instruction_seconds(b, op, TAP_INSTRUCTIONS if taps > MOST_APART else UNROLLED * (1 + width))

    def instruction_seconds(self, b: Builder, op: Op, each: float = TAP_INSTRUCTIONS) -> float:
        """Seconds in which the GPU issues the instructions of all threads, with ``each`` per tap."""
        taps, out = math.prod(b.weights(op).shape[2:]), b.result(op.value)
        threads = out.size / self._width(self.source(b, op), out)
        return _issue_seconds(b, threads * taps * each)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        x, out = b.made(self.source(b, op)), b.target(op.value)
        a = resolved(op.attrs, b.graph.type(op.inputs[0]), b.graph.type(op.inputs[1]))  # type: ignore[arg-type]
        window = Window.make(b.weights(op).shape[2:], a.strides, a.pads, a.dilations)
        attrs = conv_attrs((a.strides, a.pads, a.dilations), a.group, a.epilogue, arity=ARITY)
        self._emit(b, op, x, out, window, "Conv", attrs)

    def _emit(
        self, b: Builder, op: Op, x: TensorView, out: TensorView, window: Window, kind: str, attrs: dict[str, Any]
    ) -> None:
        """Emit the launch: a Conv, or a ConvTranspose."""
        array, vec = b.weights(op), self._width(x, out)
        channels, kernel = array.shape[0], array.shape[2:]
        # [taps][channels], so that neighboring channels' weights are one access
        packed = b.constant(np.ascontiguousarray(array.reshape(channels, -1).T), f"{op.outputs[0].name}.weights")
        logical = packed.view(array.shape, _tap_strides(kernel, channels))
        meant, transposed = self.meant(b, op, kind, attrs), kind == "ConvTranspose"
        parts = _of_channels(window, x, packed, vec, together=not transposed)
        emit_window(
            b, op, window, x, out, parts, vec=vec, kind=meant.kind, attrs=meant.attrs, reads=_meaning(b, op, x, logical),
            stages=_stages(op), operands=_operands(b, op, out), transposed=transposed, edges=meant.edges,
        )  # fmt: skip


def _of_channels(window: Window, x: TensorView, packed: TensorView, vec: int, *, together: bool) -> Rendered:
    """The parts of a kernel whose threads take ``vec`` channels, each with its own filter of ``packed`` [taps, channels].
    ``together``: the loads of several taps may be in flight at once."""
    _, kh, kw = window.kernel
    t, tw, channels = CPP[x.dtype], CPP[packed.dtype], packed.shape[1]
    tap = f"((kd * {kh} + kh) * {kw} + kw) * {channels} + c"
    loads = load_channels(t, vec, "at + c * p.xs[1]", "v") + load_channels(tw, vec, f"p.a0 + {tap}", "f")

    def apart(tap: int, at: str) -> tuple[str, str]:
        load = load_channels(t, vec, f"{at} + c * p.xs[1]", f"seen{tap}")
        load += " " + load_channels(tw, vec, f"p.a0 + {tap * channels} + c", f"filter{tap}")
        return (
            load,
            f"for (int j = 0; j < {vec}; j++) acc[j] += widen(seen{tap}.lane[j]) * widen(filter{tap}.lane[j]);",
        )

    return Rendered(
        f"float acc[{vec}] = {{}};",
        f"{loads} for (int j = 0; j < {vec}; j++) acc[j] += widen(v.lane[j]) * widen(f.lane[j]);",
        "const float value = acc[j];",
        [packed],
        apart=apart if together else None,
    )


def _tap_strides(kernel: Sequence[int], channels: int) -> tuple[int, ...]:
    strides, step = [], channels
    for k in reversed(kernel):
        strides.append(step)
        step *= k
    return (1, 0, *reversed(strides))


RUN = 32
"""Products of a partial sum. Rounding errors grow with the longest chain of additions, and a layer has thousands of
products, so partial sums are added up separately (Higham, "The accuracy of floating point summation", 1993)."""


def _summed(type: str, count: int, product: str) -> str:
    """C++ that adds ``product`` for i in 0 .. ``count`` to ``acc``, in partial sums of :data:`RUN` products."""
    if count <= RUN:
        return f"{type} part = 0; for (int i = 0; i < {count}; i++) part += {product}; acc += part;"
    end = f"min(i0 + {RUN}, {count})" if count % RUN else f"i0 + {RUN}"
    return (
        f"for (int i0 = 0; i0 < {count}; i0 += {RUN}) {{ {type} part = 0; "
        f"for (int i = i0; i < {end}; i++) part += {product}; acc += part; }}"
    )


FEW_INSIDE = 4
"""Most input channels of a filter whose loads of several taps are in flight at once."""


def _direct_seconds(b: Builder, op: Op, taps: float, inside: int, *, together: bool = False) -> float:
    """Seconds in which the GPU issues the instructions of a thread per result, with ``taps`` of ``inside`` channels each. ``together``:
    the loads of several taps may be in flight at once."""
    each = FEW_PRODUCT * inside if together and taps <= MOST_APART else TAP_INSTRUCTIONS + PRODUCT * inside
    return _issue_seconds(b, math.prod(op.outputs[0].type.static_shape) * taps * each)


class DirectConv(Tactic):
    """Any convolution of up to three spatial axes, grouped or not, with one output element per thread."""

    name = "conv_direct"

    def refuse(self, b: Builder, op: Op) -> str | None:
        axes = len(b.graph.type(op.inputs[1]).dims) - 2  # type: ignore[arg-type]
        if axes > 3:
            return f"it has {axes} spatial axes"
        return None if is_float(op.outputs[0].type.dtype) else "it is not of floating point"

    def seconds(self, b: Builder, op: Op) -> float | None:
        """Predicted seconds, from the instructions of all threads."""
        _, inside, *kernel = b.graph.type(op.inputs[1]).static_shape  # type: ignore[arg-type]
        return _direct_seconds(b, op, math.prod(kernel), inside, together=inside <= FEW_INSIDE)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        assert op.inputs[1] is not None
        x, weight, out = b.made(entering(b, op)), self._weights(b, op), b.target(op.value)
        a = resolved(op.attrs, b.graph.type(op.inputs[0]), b.graph.type(op.inputs[1]))  # type: ignore[arg-type]
        pads = resolve_pads(a.auto_pad, a.pads, x.shape[2:], weight.shape[2:], a.strides, a.dilations)
        assert pads is not None
        window = Window.make(weight.shape[2:], a.strides, pads, a.dilations)
        inside, outside = weight.shape[1], weight.shape[0] // a.group
        t = arithmetic(x.dtype)
        strides = (*(0,) * (3 - len(weight.shape[2:])), *weight.strides[2:])
        first, of_channel = f"i64(c / {outside} * {inside}) * p.xs[1]", "p.a0 + c * p.m[0]"
        tap = (
            f"const {CPP[x.dtype]}* v = at + {first}; "
            f"const {CPP[weight.dtype]}* f = {of_channel} + kd * p.m[2] + kh * p.m[3] + kw * p.m[4]; "
            f"{_summed(t, inside, 'widen(v[i * p.xs[1]]) * widen(f[i * p.m[1]])')}"
        )

        def apart(tap: int, at: str) -> tuple[str, str]:
            d, h, w = np.unravel_index(tap, window.kernel)
            own = f"{of_channel} + {d} * p.m[2] + {h} * p.m[3] + {w} * p.m[4]"
            loads = [
                f"const {t} seen{tap}_{i} = widen(({at})[{first} + {i} * p.xs[1]]), filter{tap}_{i} = widen(({own})[{i} * p.m[1]]);"
                for i in range(inside)
            ]
            return " ".join(loads), " ".join(f"acc += seen{tap}_{i} * filter{tap}_{i};" for i in range(inside))

        parts = Rendered(
            f"{t} acc = 0;", tap, f"const {t} value = acc;", [weight], [*weight.strides[:2], *strides],
            apart=apart if inside <= FEW_INSIDE else None,
        )  # fmt: skip
        attrs = conv_attrs((a.strides, pads, a.dilations), a.group, a.epilogue, arity=ARITY)
        emit_window(
            b, op, window, x, out, parts, vec=1, kind="Conv", attrs=attrs, reads=_meaning(b, op, x, weight),
            stages=_stages(op), operands=_operands(b, op, out),
        )  # fmt: skip

    @staticmethod
    def _weights(b: Builder, op: Op) -> TensorView:
        """The weights; constant ones of few channels as [taps, channels of a filter, filters], so that a warp's loads are neighbors."""
        value, known = op.inputs[1], b.graph.constant_value(op.inputs[1])
        assert value is not None
        if known is None or known.shape[1] > FEW_INSIDE:
            return b.operand(value)
        filters, inside, *kernel = known.shape
        packed = b.constant(np.ascontiguousarray(np.moveaxis(known, (0, 1), (-1, -2))), f"{op.outputs[0].name}.weights")
        return packed.view(known.shape, (1, filters, *_tap_strides(kernel, filters * inside)[2:]))


class DirectConvTranspose(Tactic):
    """Any transposed convolution of up to three spatial axes, with one output element per thread."""

    name = "conv_transpose_direct"

    def refuse(self, b: Builder, op: Op) -> str | None:
        return DirectConv().refuse(b, op)

    def seconds(self, b: Builder, op: Op) -> float | None:
        """Predicted seconds, from the instructions of all threads. A result meets one tap for each stride."""
        inside, _, *kernel = b.graph.type(op.inputs[1]).static_shape  # type: ignore[arg-type]
        return _direct_seconds(b, op, math.prod(kernel) / math.prod(op.attrs.strides), inside // op.attrs.group)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        assert op.inputs[1] is not None
        x, weight, out = b.made(entering(b, op)), b.operand(op.inputs[1]), b.target(op.value)
        window, attrs = _transposed(b, op)
        inside, outside = weight.shape[0] // op.attrs.group, weight.shape[1]
        t = arithmetic(x.dtype)
        strides = (*(0,) * (5 - len(weight.shape)), *weight.strides[2:])
        tap = (
            f"const int first = c / {outside} * {inside}; const {CPP[x.dtype]}* v = at + i64(first) * p.xs[1]; "
            f"const {CPP[weight.dtype]}* f = p.a0 + first * p.m[0] + c % {outside} * p.m[1] + kd * p.m[2] + kh * p.m[3] + kw * p.m[4]; "
            f"{_summed(t, inside, 'widen(v[i * p.xs[1]]) * widen(f[i * p.m[0]])')}"
        )
        parts = Rendered(f"{t} acc = 0;", tap, f"const {t} value = acc;", [weight], [*weight.strides[:2], *strides])
        emit_window(
            b, op, window, x, out, parts, vec=1, kind="ConvTranspose", attrs=attrs, reads=_meaning(b, op, x, weight),
            stages=_stages(op), operands=_operands(b, op, out), transposed=True,
        )  # fmt: skip


def with_pads(b: Builder, op: Op) -> ConvTransposeAttrs:
    """The attributes of a ConvTranspose with its pads, whatever determines them."""
    x, weight = b.graph.type(op.inputs[0]), b.graph.type(op.inputs[1])  # type: ignore[arg-type]
    a = resolved_transpose(op.attrs, x, weight)
    kernel, pads, out = weight.static_shape[2:], list(a.pads), op.outputs[0].type.static_shape
    if a.auto_pad != "NOTSET":
        # SAME: the output's size is the input's times the stride, and the excess is cut off on both sides.
        for i, (k, s, d) in enumerate(zip(kernel, a.strides, a.dilations, strict=True)):
            total = (x.static_shape[2 + i] - 1) * s + (k - 1) * d + 1 + a.output_padding[i] - out[2 + i]
            pads[i], pads[i + len(kernel)] = transpose_pads(max(total, 0), a.auto_pad)
    return replace(a, pads=tuple(pads), auto_pad="NOTSET")


def _transposed(b: Builder, op: Op) -> tuple[Window, dict[str, Any]]:
    """The window of a ConvTranspose, and the attributes of its meaning."""
    kernel, a = b.graph.type(op.inputs[1]).static_shape[2:], with_pads(b, op)  # type: ignore[arg-type]
    attrs = {"output_padding": tuple(a.output_padding), "output_shape": ()}
    attrs |= conv_attrs((a.strides, a.pads, a.dilations), a.group, a.epilogue, arity=ARITY)
    return Window.make(kernel, a.strides, a.pads, a.dilations), attrs


class DepthwiseTranspose(Depthwise):
    """A transposed convolution with one filter per channel: a thread takes up to eight neighboring channels."""

    name = "depthwise_transpose"

    def refuse(self, b: Builder, op: Op) -> str | None:
        dtype = op.outputs[0].type.dtype
        if not is_float(dtype) or dtype.itemsize > FP32.itemsize:
            return f"it is of {dtype.name}"
        why = super().refuse(b, op)
        if why is None and self._width(self.source(b, op), b.result(op.value)) == 1:
            return "no two of its channels are neighbors in memory"
        return why

    def seconds(self, b: Builder, op: Op) -> float | None:
        """None up to :data:`.window.MOST_APART` taps, since a result meets few of them: the default prediction holds."""
        return None if math.prod(b.weights(op).shape[2:]) <= MOST_APART else super().seconds(b, op)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        x, out = b.made(self.source(b, op)), b.target(op.value)
        window, attrs = _transposed(b, op)
        self._emit(b, op, x, out, window, "ConvTranspose", attrs)
