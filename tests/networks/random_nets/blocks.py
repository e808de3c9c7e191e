"""Parts that several families draw: activations, normalizations, products, and forms that differ between opsets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from random_nets.draw import MAX_ELEMENTS, Draw, Value

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 8, 10, 12, 16, 16, 17, 20, 24, 32, 33)
"""Channels and units: odd numbers, and numbers that suit kernels."""


WIDE = (48, 64, 64, 96, 128, 130, 256)


# ---------------------------------------------------------------- forms by opset


def reduce(d: Draw, kind: str, x: Value, axes: Sequence[int], keep: bool = True) -> Value:
    """A reduction. Its axes are an attribute or an input, depending on the opset."""
    if kind == "ReduceSum" or d.opset >= 18:
        return d.op(kind, x, d.ints(*axes), keepdims=int(keep))
    return d.op(kind, x, axes=list(axes), keepdims=int(keep))


def split(d: Draw, x: Value, axis: int, sizes: Sequence[int]) -> list[Value]:
    """Split with sizes as an input, or by count if they are equal and the opset allows it."""
    if len(set(sizes)) == 1 and d.random.chance(0.5):
        count = len(sizes) if d.opset >= 18 else None
        return d.ops("Split", x, outputs=len(sizes), axis=axis, num_outputs=count)
    return d.ops("Split", x, d.ints(*sizes), outputs=len(sizes), axis=axis)


def cut(d: Draw, x: Value, axis: int, start: int, end: int, step: int = 1) -> Value:
    return d.op("Slice", x, d.ints(start), d.ints(end), d.ints(axis), d.ints(step))


def reshape(d: Draw, x: Value, target: Sequence[int | str]) -> Value:
    """Reshape to dimensions. Symbols are computed from the shape of ``x`` (or left to -1 if there is only one)."""
    symbols = [t for t in target if isinstance(t, str)]
    if not symbols:
        shape = d.ints(*(t for t in target if isinstance(t, int)))
    elif len(symbols) == 1 and d.random.chance(0.4):
        shape = d.ints(*(-1 if isinstance(t, str) else t for t in target))
    else:
        whole = d.op("Shape", x)
        parts = [
            d.op("Gather", whole, d.ints(x.dims.index(t)), axis=0) if isinstance(t, str) else d.ints(t) for t in target
        ]
        shape = d.op("Concat", *parts, axis=0)
    return d.typed("Reshape", [x, shape], [(x.dtype, target)])[0]


# ---------------------------------------------------------------- pointwise


def activation(d: Draw, x: Value) -> Value:
    """An activation, as one operator or written out."""
    if d.random.chance(0.35):
        return written_out(d, x)
    kinds = ["Relu"] * 4 + [
        "Sigmoid",
        "Tanh",
        "LeakyRelu",
        "Elu",
        "Selu",
        "Softplus",
        "Softsign",
        "HardSigmoid",
        "Celu",
    ]
    kinds += ["Clip", "PRelu", "Abs", "Neg", "Erf", "Identity"]
    kinds += ["HardSwish"] * (d.opset >= 14) + ["Mish"] * (d.opset >= 18) + ["Gelu"] * 2 * (d.opset >= 20)
    kind = d.random.choice(kinds)
    if kind == "Clip":
        low, high = sorted((d.random.uniform(-1, 2), d.random.uniform(-1, 2)))
        bounds = d.random.choice([(low, high), (low, None), (None, high), (0.0, 6.0)])
        return d.op("Clip", x, *(None if b is None else d.scalar(b) for b in _trimmed(bounds)))
    if kind == "PRelu":
        return d.op("PRelu", x, channelwise(d, x, 0.0, 0.5))
    attrs = {"LeakyRelu": {"alpha": 0.1}, "Elu": {"alpha": 0.7}, "Celu": {"alpha": 0.8}}.get(kind, {})
    if kind == "HardSigmoid":
        attrs = d.random.choice([{}, {"alpha": 0.3, "beta": 0.4}, {"alpha": 1 / 6, "beta": 0.5}])
    if kind == "Gelu" and d.random.chance(0.4):
        return d.op("Gelu", x, approximate="tanh")
    return d.op(kind, x, **attrs)


def _trimmed(bounds: Sequence[float | None]) -> Sequence[float | None]:
    return bounds[:-1] if bounds[-1] is None else bounds


def written_out(d: Draw, x: Value) -> Value:
    """Activations that exporters write out: SiLU, GELU in two forms, hard swish, a squared ReLU, a Mish."""
    form = d.random.below(6)
    if form == 0:
        return d.op("Mul", *d.random.shuffled([x, d.op("Sigmoid", x)]))
    if form == 1:
        e = d.op("Erf", d.op("Div", x, d.scalar(math.sqrt(2))))
        y = d.op("Mul", x, d.op("Add", e, d.scalar(1)))
        return d.op("Mul", y, d.scalar(0.5))
    if form == 2:
        cube = d.op("Mul", d.op("Mul", d.op("Mul", x, x), x), d.scalar(0.044715))
        t = d.op("Tanh", d.op("Mul", d.op("Add", x, cube), d.scalar(0.7978845608)))
        return d.op("Mul", d.op("Mul", x, d.scalar(0.5)), d.op("Add", t, d.scalar(1)))
    if form == 3:
        gate = d.op("Clip", d.op("Add", x, d.scalar(3)), d.scalar(0), d.scalar(6))
        return d.op("Div", d.op("Mul", x, gate), d.scalar(6))
    if form == 4:
        return d.op("Pow", d.op("Tanh", d.op("Relu", x)), d.scalar(2))
    return d.op("Mul", x, d.op("Tanh", d.op("Softplus", x)))


def channelwise(d: Draw, x: Value, low: float, high: float) -> Value:
    """A constant to combine with x: a number, one per channel, one per column, or one per element of a row."""
    forms: list[tuple[int, ...]] = [(), (1,)]
    if x.rank > 1 and isinstance(c := x.dims[1], int):
        forms += [(c, *(1,) * (x.rank - 2)), (1, c, *(1,) * (x.rank - 2))]
    if x.rank and isinstance(last := x.dims[-1], int):
        forms.append((last,))
    if x.rank > 1 and x.size < 512 and all(isinstance(n, int) for n in x.dims[1:]):
        forms.append(tuple(n for n in x.dims[1:] if isinstance(n, int)))
    return d.const(d.random.array(np.float32, d.random.choice(forms), low, high))


def breadth(d: Draw, usual: Sequence[int] = WIDTHS) -> int:
    """Channels or units; sometimes many, so that products are tiled, also along their depth."""
    return d.random.choice(WIDE if d.random.chance(0.06) else usual)


def arithmetic(d: Draw, x: Value) -> Value:
    """x with a constant, and sometimes the result with another one."""
    if d.random.chance(0.25):
        x = arithmetic(d, x)
    kind = d.random.choice(["Add", "Sub", "Mul", "Div", "Max", "Min", "Mul", "Add"])
    c = channelwise(d, x, 0.5, 1.5)
    return d.op(kind, *([x, c] if kind == "Div" or d.random.chance(0.6) else [c, x]))


def combined(d: Draw, x: Value) -> Value | None:
    """x with another value of its shape, or with one that broadcasts to it."""
    other = d.pick(lambda v: v.is_float and v.dtype == x.dtype and _broadcasts(v, x))
    if other is None:
        return None
    kind = d.random.choice(["Add", "Add", "Sub", "Mul", "Sum", "Max", "Min", "Mean", "Div"])
    if kind == "Mul":
        other = d.op("Tanh", other)
    if kind == "Div":
        other = d.op("Add", d.op("Abs", other), d.scalar(0.6))
        return d.op("Div", x, other)
    more = [x] if kind in ("Sum", "Max", "Mean") and d.random.chance(0.3) else []
    return d.op(kind, *d.random.shuffled([x, other, *more]))


def _broadcasts(v: Value, x: Value) -> bool:
    return v.known and v.rank <= x.rank and all(a in (1, b) for a, b in zip(v.dims[::-1], x.dims[::-1], strict=False))


# ---------------------------------------------------------------- products and normalizations


def linear(d: Draw, x: Value, units: int, bias: bool | None = None) -> Value:
    """x @ W + b over the last axis, with the bias as either addend."""
    k = x.dims[-1]
    assert isinstance(k, int)
    if x.rank == 2 and d.random.chance(0.5):
        return gemm(d, x, units)
    y = d.op("MatMul", x, d.weights(k, units, fan_in=k))
    if d.random.chance(0.7) if bias is None else bias:
        y = d.op("Add", *d.random.shuffled([y, d.weights(units, fan_in=3)]))
    return y


def gemm(d: Draw, x: Value, units: int) -> Value:
    k = x.dims[1]
    assert isinstance(k, int)
    trans = d.random.below(2)
    w = d.weights(*((units, k) if trans else (k, units)), fan_in=k)
    bias = [d.weights(*d.random.choice([(units,), (1, units), (1,), ()]), fan_in=3)] if d.random.chance(0.7) else []
    attrs = {"alpha": 0.5} if d.random.chance(0.2) else {}
    if bias and d.random.chance(0.2):
        attrs["beta"] = 0.7
    return d.op("Gemm", x, w, *bias, transB=trans, **attrs)


def row_norm(d: Draw, x: Value) -> Value:
    """Normalization over the last axis: LayerNormalization or RMS, as one operator or written out."""
    n = x.dims[-1]
    assert isinstance(n, int)
    scale, bias = d.positive(n), d.weights(n, fan_in=9)
    forms = ["layer", "rms"] + ["LayerNormalization"] * 2 * (d.opset >= 17) + ["RMSNormalization"] * (d.opset >= 23)
    form = d.random.choice(forms)
    epsilon = d.random.choice([1e-5, 1e-3, 1e-2])
    if form == "LayerNormalization":
        more = [bias] if d.random.chance(0.8) else []
        return d.op("LayerNormalization", x, scale, *more, axis=-1, epsilon=epsilon)
    if form == "RMSNormalization":
        return d.op("RMSNormalization", x, scale, axis=-1, epsilon=epsilon)
    if form == "layer":
        x = d.op("Sub", x, reduce(d, "ReduceMean", x, [-1]))
    square = d.op("Mul", x, x) if d.random.chance(0.5) else d.op("Pow", x, d.scalar(2))
    root = d.op("Sqrt", d.op("Add", reduce(d, "ReduceMean", square, [-1]), d.scalar(epsilon)))
    y = d.op("Div", x, root) if d.random.chance(0.6) else d.op("Mul", x, d.op("Reciprocal", root))
    y = d.op("Mul", *d.random.shuffled([y, scale]))
    return d.op("Add", y, bias) if form == "layer" else y


def softmax(d: Draw, x: Value, axis: int = -1) -> Value:
    """Softmax or LogSoftmax, sometimes written out."""
    if d.random.chance(0.25):
        e = d.op("Exp", d.op("Sub", x, reduce(d, "ReduceMax", x, [axis])))
        return d.op("Div", e, reduce(d, "ReduceSum", e, [axis]))
    return d.op("LogSoftmax" if d.random.chance(0.1) else "Softmax", x, axis=axis)


def pooled_row(d: Draw, x: Value) -> Value:
    """The mean, sum or maximum over the axes after the channels."""
    kind = d.random.choice(["ReduceMean", "ReduceMean", "ReduceMax", "ReduceL2"])
    return reduce(d, kind, x, list(range(2, x.rank)), d.random.chance(0.6))


def fits(v: Value) -> bool:
    return v.size <= MAX_ELEMENTS and all(n != 0 for n in v.dims)
