"""Networks with symbolic sizes: a batch "N" and a length or picture size "S", run at several sizes."""

from __future__ import annotations

import numpy as np
from onnx import helper

from random_nets import attention, convolution, recurrent
from random_nets.blocks import activation, arithmetic, combined, cut, fits, linear, reduce, row_norm, softmax
from random_nets.draw import Draw, Value

SIZES = ((2, 8), (1, 7), (3, 16), (5, 11))
"""N and S of each run. The first ones are the optimum of the build."""


def _shaped(d: Draw, x: Value) -> Value | None:
    """Steps that compute with shapes: Expand, Reshape, Range, ConstantOfShape, Resize by a computed size."""
    r = d.random
    form = r.below(6)
    if form == 0:
        row = d.op("Gather", x, d.ints(0), axis=0)
        return d.typed("Expand", [row, d.op("Shape", x)], [(x.dtype, x.dims)])[0]
    if form == 1 and x.rank == 3 and isinstance(x.dims[2], int):
        y = linear(d, d.op("Reshape", x, d.ints(-1, x.dims[2])), r.choice([3, 5, 8]))
        width = y.dims[1]
        assert isinstance(width, int)
        shape = d.op("Shape", x)
        target = d.op("Concat", d.op("Slice", shape, d.ints(0), d.ints(2)), d.ints(width), axis=0)
        return d.typed("Reshape", [y, target], [(y.dtype, (*x.dims[:2], width))])[0]
    if form == 2 and x.rank > 1:
        n = d.op("Gather", d.op("Shape", x), d.scalar(1, np.int64), axis=0)
        steps = d.known_as(d.op("Range", d.scalar(0, np.int64), n, d.scalar(1, np.int64)), (x.dims[1],))
        at = d.op("Mul", d.op("Cast", steps, to=1), d.scalar(0.05))
        at = d.known_as(
            d.op("Unsqueeze", at, d.ints(*range(1, x.rank - 1))) if x.rank > 2 else at,
            (x.dims[1], *(1,) * (x.rank - 2)),
        )
        return d.known_as(d.op("Add", x, at), x.dims)
    if form == 3:
        (ones,) = d.typed("ConstantOfShape", [d.op("Shape", x)], [(x.dtype, x.dims)], value=ONE)
        return d.op("Sub", ones, x)
    if form == 4 and x.rank > 1 and x.dims[1] == "S":
        return d.known_as(cut(d, x, 1, -1, 2**31 - 1), (x.dims[0], 1, *x.dims[2:]))
    if form == 5 and x.rank > 2:
        return d.op("Flatten", x, axis=2)
    return None


ONE = helper.make_tensor("one", 1, [1], [1.0])


def _rows(d: Draw) -> None:
    """Pointwise steps, products, norms, softmax and reductions over [N, S, width] and [N, width]."""
    r = d.random
    width = r.choice([3, 4, 5, 8, 12, 16])
    first = r.choice(
        [("N", "S", width), ("N", width), ("S", width), ("N", r.choice([3, 5]), "S"), (r.choice([1, 2]), "S", width)]
    )
    d.keep(d.input(first))
    if r.chance(0.4):
        d.keep(d.input(first if r.chance(0.5) else (width,) if first[-1] == width else (1,)))
    for _ in range(r.between(3, 10)):
        x = d.pick(lambda v: v.is_float and v.rank > 0 and v.known and fits(v))
        if x is None:
            break
        form, last = r.below(9), x.dims[-1]
        if form == 0 and isinstance(last, int) and x.rank > 1:
            d.keep(linear(d, x, r.choice([3, 5, 8, width])))
        elif form == 1 and isinstance(last, int):
            d.keep(row_norm(d, x))
        elif form == 2:
            d.keep(softmax(d, x, r.below(x.rank)))
        elif form == 3:
            d.keep(
                reduce(
                    d,
                    r.choice(["ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2"]),
                    x,
                    [r.below(x.rank)],
                    r.chance(0.7),
                )
            )
        elif form in (4, 5):
            d.keep(combined(d, x) if form == 4 else arithmetic(d, x))
        elif form == 6 and x.rank > 1:
            d.keep(_selected(d, x))
        elif form == 7:
            d.keep(_shaped(d, x))
        else:
            d.keep(activation(d, x))


def _selected(d: Draw, x: Value) -> Value | None:
    r = d.random
    form = r.below(5)
    if form == 0:
        return d.op("Transpose", x, perm=r.shuffled(range(x.rank)))
    if form == 1:
        return d.op("Gather", x, d.scalar(0, np.int64), axis=r.below(x.rank))
    if form == 2:
        return d.op("ArgMax", x, axis=r.below(x.rank), keepdims=r.below(2))
    if form == 3:
        axis = r.below(x.rank)
        return d.op("Concat", x, activation(d, x), axis=axis)
    axis = r.below(x.rank)
    found = d.ops("TopK", x, d.ints(1), outputs=2, axis=axis)
    return found[0]


def _pictures(d: Draw) -> None:
    """A convolutional network with a symbolic batch, picture, or both."""
    r = d.random
    axes = r.choice([1, 2, 2])
    channels = r.choice([1, 3, 4, 5, 8])
    spatial: list[int | str] = ["S" if r.chance(0.6) else r.between(6, 12) for _ in range(axes)]
    d.keep(d.input(("N" if r.chance(0.7) else 1, channels, *spatial)))
    steps = (
        convolution.conv, convolution.conv, convolution.conv, convolution.norm, activation, convolution.pool,
        convolution.residual, convolution.gate, convolution.conv_transpose, arithmetic, combined,
    )  # fmt: skip
    for _ in range(r.between(2, 7)):
        x = d.pick(lambda v: v.rank == axes + 2 and fits(v) and isinstance(v.dims[1], int))
        y = None if x is None else r.choice(steps)(d, x)
        if y is not None and y.size <= 3000:
            d.keep(y)
    if r.chance(0.4):
        d.keep(convolution.head(d, d.values[-1]))


def _tokens(d: Draw) -> None:
    attention.draw(d, "N" if d.random.chance(0.7) else 2, "S")
    if d.random.chance(0.2):
        d.keep(d.op("Cast", d.op("Shape", d.values[0]), to=1))


def draw(d: Draw) -> None:
    """One of: rows, pictures, a transformer, a recurrent network, with symbolic sizes."""
    form = d.random.below(10)
    if form < 4:
        _rows(d)
    elif form < 7:
        _pictures(d)
    elif form < 9:
        _tokens(d)
    else:
        recurrent.draw(d, "N" if d.random.chance(0.7) else 2, "S")
