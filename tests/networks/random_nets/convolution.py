"""Convolutional networks: windows over one to three axes, normalization, activations, pooling, branches that are joined."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from random_nets.blocks import (
    WIDTHS,
    activation,
    arithmetic,
    breadth,
    combined,
    cut,
    fits,
    linear,
    pooled_row,
    reduce,
    softmax,
    split,
)
from random_nets.draw import Draw, Value

KERNELS = (1, 1, 2, 3, 3, 3, 3, 4, 5, 7)


def image(d: Draw, axes: int, batch: int | str | None = None) -> Value:
    """An input with channels and ``axes`` spatial axes; sometimes a large picture."""
    r = d.random
    large = axes == 2 and r.chance(0.03)
    low, high = {1: (6, 48), 2: (4, 17), 3: (3, 7)}[axes]
    size = [r.between(70, 140) if large else r.between(low, high) for _ in range(axes)]
    channels = r.choice([1, 2, 3, 3] if large else WIDTHS[: 16 if axes < 3 else 9])
    if batch is None:
        batch = 1 if large else r.choice([1, 1, 1, 2, 3, 5])
    return d.input((batch, channels, *size))


def _windows(d: Draw, x: Value, kernels: tuple[int, ...] = KERNELS) -> dict[str, Any] | None:
    """Attributes of a window that fits: kernel_shape, strides, dilations, and pads or auto_pad."""
    r, size = d.random, x.dims[2:]
    axes = len(size)
    k = [r.choice(kernels)] * axes if r.chance(0.7) else [r.choice(kernels) for _ in size]
    dilations = [1] * axes if r.chance(0.8) else [r.choice([1, 2, 3]) for _ in size]
    strides = [r.choice([1, 1, 2])] * axes if r.chance(0.8) else [r.choice([1, 2, 3]) for _ in size]
    reach = [(a - 1) * b + 1 for a, b in zip(k, dilations, strict=True)]
    style = r.below(10)
    attrs: dict[str, Any] = {"kernel_shape": k, "strides": strides, "dilations": dilations}
    if any(isinstance(n, str) for n in size):  # for every size of the symbol, the result is not empty
        pads = [n // 2 for n in reach] * 2
    elif style == 0 and dilations == [1] * axes:
        attrs["auto_pad"] = r.choice(["VALID", "SAME_UPPER", "SAME_LOWER"])
        pads = [0 if attrs["auto_pad"] == "VALID" else s // 2 for s in reach] * 2
    elif style < 4:
        pads = [r.below(min(a, 3) + 1) if a > 1 else 0 for a in k * 2]
    else:
        pads = [n // 2 for n in reach] * 2 if style < 9 else [0] * (2 * axes)
    if "auto_pad" not in attrs:
        attrs["pads"] = pads
    return attrs if _fits(x, {**attrs, "pads": pads}) else None


def _fits(x: Value, attrs: dict[str, Any]) -> bool:
    """At least one window is inside of the padded input."""
    k, pads = attrs["kernel_shape"], attrs["pads"]
    reach = [(a - 1) * b + 1 for a, b in zip(k, attrs.get("dilations", [1] * len(k)), strict=True)]
    return all(not isinstance(n, int) or n + pads[i] + pads[i + len(k)] >= reach[i] for i, n in enumerate(x.dims[2:]))


def conv(d: Draw, x: Value, out: int | None = None) -> Value | None:
    """A convolution: dense, grouped or depthwise, sometimes with a multiplier."""
    c, attrs, r = x.dims[1], _windows(d, x), d.random
    if attrs is None or not isinstance(c, int):
        return None
    out = out or breadth(d)
    group = 1
    if r.chance(0.3):
        group = r.choice([g for g in range(1, c + 1) if c % g == 0] + [c] * 2)
        out = group * r.choice([1, 1, 2, c // group])
    per = c // group * math.prod(attrs["kernel_shape"])
    w = d.weights(out, c // group, *attrs["kernel_shape"], fan_in=per)
    bias = [d.weights(out, fan_in=4)] if r.chance(0.5) else []
    if r.chance(0.3):
        del attrs["kernel_shape"]
    return d.op("Conv", x, w, *bias, group=group, **attrs)


def conv_transpose(d: Draw, x: Value) -> Value | None:
    c, r = x.dims[1], d.random
    if not isinstance(c, int):
        return None
    axes = x.rank - 2
    k = [r.choice([1, 2, 3, 4])] * axes
    strides = [r.choice([1, 2, 2, 3])] * axes
    pads = [r.below(n) for n in k] * 2
    if r.chance(0.3):
        pads = [r.below(n) for n in k * 2]
    more = [r.below(s) for s in strides] if r.chance(0.3) else None
    dilations = [r.choice([1, 2])] * axes if r.chance(0.2) else None
    steps = [s * (n - 1) if isinstance(n, int) else 0 for n, s in zip(x.dims[2:], strides, strict=True)]
    reach = [(n - 1) * (dilations or [1])[0] for n in k]
    if any(n + m < a + b for n, m, a, b in zip(steps, reach, pads[:axes], pads[axes:], strict=True)):
        pads = [0] * (2 * axes)  # nothing would be left
    group = r.choice([g for g in range(1, c + 1) if c % g == 0]) if r.chance(0.3) else 1
    per_group = r.choice([1, 2, 3, 4, 6])
    w = d.weights(c, per_group, *k, fan_in=max(1, c // group * math.prod(k) // math.prod(strides)))
    bias = [d.weights(group * per_group, fan_in=4)] if r.chance(0.5) else []
    attrs = {"strides": strides, "output_padding": more, "dilations": dilations, "group": group, "kernel_shape": k}
    if r.chance(0.15) and k >= strides:  # for narrower kernels, ONNX Runtime's size differs from the specification's
        return d.op("ConvTranspose", x, w, *bias, auto_pad=r.choice(["SAME_UPPER", "SAME_LOWER", "VALID"]), **attrs)
    return d.op("ConvTranspose", x, w, *bias, pads=pads, **attrs)


def pool(d: Draw, x: Value) -> Value | None:
    """A pooling over windows, with ceil_mode, or over all positions."""
    r = d.random
    kind = r.choice(["MaxPool"] * 3 + ["AveragePool"] * 3 + ["LpPool", "GlobalAveragePool", "GlobalMaxPool"])
    if kind.startswith("Global"):
        return d.op(kind, x)
    attrs = _windows(d, x, (2, 2, 3, 3, 4))
    if attrs is None:
        return None
    if (kind == "LpPool" and d.opset < 18) or (kind == "AveragePool" and d.opset < 19):
        del attrs["dilations"]
    if "pads" in attrs:
        attrs["pads"] = [min(p, k - 1) for p, k in zip(attrs["pads"], attrs["kernel_shape"] * 2, strict=True)]
        if not _fits(x, attrs):
            return None
        if kind != "LpPool" or d.opset >= 18:
            attrs["ceil_mode"] = int(r.chance(0.3) and _ends_inside(d, attrs))
        if kind == "MaxPool" and not _sees_elements(x, attrs):
            return None
    if kind == "LpPool":
        attrs["p"] = r.choice([1, 2])
    if kind == "AveragePool":
        attrs["count_include_pad"] = r.below(2)
    return d.op(kind, x, **attrs)


def _sees_elements(x: Value, attrs: dict[str, Any]) -> bool:
    """Every window contains an element. The maximum of none is minus infinity, or ONNX Runtime's lowest number."""
    for i, (k, n) in enumerate(zip(attrs["kernel_shape"], x.dims[2:], strict=True)):
        step, dilation = attrs["strides"][i], attrs.get("dilations", [1] * (i + 1))[i]
        first, past = -attrs["pads"][i], attrs["pads"][i + len(attrs["kernel_shape"])]
        if isinstance(n, int):
            starts = range(first, n + past - (k - 1) * dilation, step)
            if not all(any(0 <= at + tap * dilation < n for tap in range(k)) for at in starts):
                return False
    return True


def _ends_inside(d: Draw, attrs: dict[str, Any]) -> bool:
    """No window of ceil_mode begins after the input. Until opset 22, ONNX's inference counts such windows, and nothing else
    does."""
    k = attrs["kernel_shape"]
    return d.opset >= 22 or (
        not any(attrs["pads"][len(k) :]) and all(a >= b for a, b in zip(k, attrs["strides"], strict=True))
    )


def norm(d: Draw, x: Value) -> Value | None:
    c, r = x.dims[1], d.random
    if not isinstance(c, int):
        return None
    kind = r.choice(
        ["BatchNormalization"] * 5 + ["InstanceNormalization", "LRN", "group", "LpNormalization", "channels"]
    )
    if kind == "BatchNormalization":
        stats = (d.weights(c, fan_in=3, offset=1.0), d.weights(c, fan_in=3), d.weights(c, fan_in=3), d.positive(c))
        return d.op(kind, x, *stats, epsilon=r.choice([1e-5, 1e-3]))
    if kind == "InstanceNormalization":
        return d.op(kind, x, d.positive(c), d.weights(c, fan_in=4), epsilon=1e-3)
    if kind == "LRN":
        return d.op(kind, x, size=r.choice([1, 3, 5]), alpha=r.choice([1e-4, 0.1]), beta=0.75) if x.rank == 4 else None
    if kind == "LpNormalization":
        return d.op(kind, d.op("Add", x, d.scalar(0.1)), axis=1, p=r.choice([1, 2]))
    groups = r.choice([g for g in range(1, c + 1) if c % g == 0])
    if kind == "group" and d.opset >= 21:
        operands = [x, d.positive(c), d.weights(c, fan_in=4)]
        return d.typed("GroupNormalization", operands, [(x.dtype, x.dims)], num_groups=groups, epsilon=1e-3)[0]
    if kind == "group" and x.static:
        y = d.op("Reshape", x, d.ints(0, groups, -1))
        y = d.op(
            "InstanceNormalization",
            y,
            d.const(np.ones(groups, np.float32)),
            d.const(np.zeros(groups, np.float32)),
            epsilon=1e-3,
        )
        y = d.typed("Reshape", [y, d.op("Shape", x)], [(x.dtype, x.dims)])[0]
        y = d.op("Mul", y, d.positive(c, *(1,) * (x.rank - 2)))
        return d.op("Add", y, d.weights(c, *(1,) * (x.rank - 2), fan_in=4))
    mean = reduce(d, "ReduceMean", x, [1])
    y = d.op("Sub", x, mean)
    var = reduce(d, "ReduceMean", d.op("Mul", y, y), [1])
    return d.op("Div", y, d.op("Sqrt", d.op("Add", var, d.scalar(1e-3))))


def gate(d: Draw, x: Value) -> Value | None:
    """Squeeze and excitation."""
    c = x.dims[1]
    if not isinstance(c, int):
        return None
    s = d.op("GlobalAveragePool", x) if d.random.chance(0.5) else reduce(d, "ReduceMean", x, list(range(2, x.rank)))
    for units in (max(1, c // 2), c):
        w = d.weights(units, c if units != c or c == 1 else max(1, c // 2), *(1,) * (x.rank - 2), fan_in=c)
        s = d.op("Conv", s, w)
        s = d.op("Relu", s) if units != c else s
    return d.op("Mul", *d.random.shuffled([x, d.op(d.random.choice(["Sigmoid", "HardSigmoid"]), s)]))


def residual(d: Draw, x: Value) -> Value | None:
    """A branch of one to three steps, which is added to x or concatenated with it."""
    r, y = d.random, x
    c = x.dims[1]
    assert isinstance(c, int)
    k = r.choice([1, 3])
    for _ in range(r.between(1, 2)):
        now = y.dims[1]
        assert isinstance(now, int)
        w = d.weights(c, now, *(k,) * (x.rank - 2), fan_in=now * k ** (x.rank - 2))
        y = d.op("Conv", y, w, pads=[k // 2] * (2 * (x.rank - 2)))
        made = norm(d, y) if r.chance(0.6) else y
        y = activation(d, made or y)
    if y.dims != x.dims or r.chance(0.3):
        return d.op("Concat", *r.shuffled([x, y]), axis=1) if y.dims[2:] == x.dims[2:] else y
    return d.op(r.choice(["Add", "Add", "Sum", "Sub"]), *r.shuffled([x, y]))


def joined(d: Draw, x: Value) -> Value | None:
    """Concat of values that differ only in their channels; among them parts of one Split and values computed from these."""
    r, c = d.random, x.dims[1]
    if isinstance(c, int) and c > 3 and r.chance(0.5):
        first = r.between(1, c - 2)
        second = r.between(1, c - first - 1)
        parts = split(d, x, 1, [first, second, c - first - second])
        if r.chance(0.4):
            parts[r.below(3)] = activation(d, r.choice(parts))
        for _ in range(r.below(3)):
            parts.insert(r.below(len(parts) + 1), activation(d, r.choice(parts)))
        return d.op("Concat", *(r.shuffled(parts) if r.chance(0.3) else parts), axis=1)
    other = d.pick(lambda v: v.rank == x.rank and v.is_float and v.dims[:1] + v.dims[2:] == x.dims[:1] + x.dims[2:])
    return None if other is None else d.op("Concat", x, other, *([x] if r.chance(0.15) else []), axis=1)


def moved(d: Draw, x: Value) -> Value | None:
    """Layout: pads, cuts, resizes, shuffles of channels, space to depth, channels last and back."""
    r, axes = d.random, x.rank - 2
    c = x.dims[1]
    form = r.choice(["pad", "resize", "shuffle", "blocks", "cut", "transpose"])
    if form == "pad":
        pads = [0, 0, *(r.below(3) for _ in range(axes)), 0, 0, *(r.below(3) for _ in range(axes))]
        mode = r.choice(["constant", "constant", "reflect", "edge"])
        value = [d.scalar(-0.5)] if mode == "constant" and r.chance(0.4) else []
        if mode == "reflect" and any(isinstance(n, int) and n < 4 for n in x.dims[2:]):
            return None
        return d.op("Pad", x, d.ints(*pads), *value, mode=mode)
    if form == "resize":
        return resized(d, x)
    if form == "shuffle" and isinstance(c, int) and x.static and c > 1:
        g = r.choice([g for g in range(1, c + 1) if c % g == 0])
        y = d.op("Reshape", x, d.ints(x.shape[0], g, c // g, *x.shape[2:]))
        y = d.op("Transpose", y, perm=[0, 2, 1, *range(3, x.rank + 1)])
        return d.op("Reshape", y, d.ints(*x.shape))
    if form == "blocks" and axes == 2 and x.static and isinstance(c, int):
        if c % 4 == 0 and r.chance(0.5):
            return d.op("DepthToSpace", x, blocksize=2, mode=r.choice(["DCR", "CRD"]))
        if all(n % 2 == 0 for n in x.shape[2:]):
            return d.op("SpaceToDepth", x, blocksize=2)
        return None
    if form == "cut":
        axis = r.between(1, x.rank - 1)
        n = x.dims[axis]
        if not isinstance(n, int) or n < 3:
            return None
        return cut(d, x, axis, r.below(2), r.choice([n, -1]), r.choice([1, 1, 2]))
    y = d.op("Transpose", x, perm=[0, *range(2, x.rank), 1])
    y = arithmetic(d, activation(d, y))
    return d.op("Transpose", y, perm=[0, x.rank - 1, *range(1, x.rank - 1)])


def resized(d: Draw, x: Value) -> Value | None:
    r, axes = d.random, x.rank - 2
    if not x.static:
        return None
    mode = r.choice(["nearest", "nearest", "linear", "cubic"] if axes == 2 else ["nearest", "linear"])
    way = r.choice(["asymmetric", "half_pixel", "align_corners", "pytorch_half_pixel"])
    attrs = {"mode": mode, "coordinate_transformation_mode": way}
    if mode == "nearest":
        attrs["nearest_mode"] = r.choice(["floor", "round_prefer_floor", "round_prefer_ceil", "ceil"])
    if r.chance(0.5):
        factor = [1.0, 1.0, *(r.choice([1.0, 2.0, 1.5, 0.5]) for _ in range(axes))]
        if way == "align_corners":  # ONNX and ONNX Runtime disagree about corners at a fraction of an element
            factor = [f if f * n % 1 == 0 else 2.0 for f, n in zip(factor, x.shape, strict=True)]
        return d.op("Resize", x, None, d.const(factor, np.float32), **attrs)
    sizes = [*x.shape[:2], *(max(1, n + r.between(-2, 5)) for n in x.shape[2:])]
    return d.op("Resize", x, None, None, d.ints(*sizes), **attrs)


def sampled(d: Draw, x: Value) -> Value | None:
    """GridSample at drawn positions, some of them outside."""
    if x.rank != 4 or not x.static or d.opset < 16:
        return None
    r = d.random
    grid = d.const(r.array(np.float32, (x.shape[0], r.between(1, 6), r.between(1, 6), 2), -1.2, 1.2))
    mode = r.choice(["bilinear", "nearest", "bicubic"] if d.opset < 20 else ["linear", "nearest", "cubic"])
    return d.op(
        "GridSample",
        x,
        grid,
        mode=mode,
        padding_mode=r.choice(["zeros", "border", "reflection"]),
        align_corners=r.below(2),
    )


def head(d: Draw, x: Value) -> Value:
    """From pictures to rows: pooled or flattened, a product, sometimes a softmax."""
    y = d.op("Flatten", x, axis=1) if x.static and x.size < 2000 and d.random.chance(0.4) else pooled_row(d, x)
    if y.rank > 2:
        y = d.op("Flatten", y, axis=1)
    if not isinstance(y.dims[1], int):
        return y
    y = linear(d, y, breadth(d))
    return softmax(d, y) if d.random.chance(0.5) else activation(d, y)


STEPS = (
    conv, conv, conv, conv, conv, conv, norm, norm, norm, activation, activation, activation, pool, pool, residual,
    residual, joined, joined, gate, moved, moved, moved, conv_transpose, arithmetic, combined, combined, sampled,
)  # fmt: skip


def draw(d: Draw) -> None:
    """A convolutional network over one to three axes."""
    r = d.random
    axes = r.choice([1, 2, 2, 2, 2, 3])
    d.keep(image(d, axes))
    if r.chance(0.15):
        first = d.values[0]
        d.keep(d.input(first.dims))
    for _ in range(r.between(3, 11)):
        x = d.pick(lambda v: v.rank == axes + 2 and fits(v))
        if x is None:
            break
        y = r.choice(STEPS)(d, x)
        if y is not None and y.size <= 4 * 6000 + 20 * x.size:
            d.keep(y)
    last = d.values[-1]
    if r.chance(0.35) and last.rank == axes + 2:
        d.keep(head(d, last))
