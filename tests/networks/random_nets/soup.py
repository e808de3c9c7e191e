"""Pointwise operators, reductions and indexing in any order, over floats, integers and bool."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from random_nets.blocks import activation, arithmetic, combined, cut, fits, linear, reduce, row_norm, softmax, split
from random_nets.draw import BOOL, F32, I32, I64, Draw, Value

Step = Callable[[Draw, Value], Value | None]
INTEGERS = (I64, I64, I32, I32, np.dtype("int8"), np.dtype("uint8"))


def _axis(d: Draw, x: Value) -> int:
    axis = d.random.below(x.rank)
    return axis - x.rank if d.random.chance(0.3) else axis


def _size(x: Value, axis: int) -> int:
    n = x.dims[axis]
    assert isinstance(n, int)
    return n


# ---------------------------------------------------------------- pointwise


def unary(d: Draw, x: Value) -> Value | None:
    """A function that activations do not use, on a domain on which it is smooth."""
    kind = d.random.choice(["Sin", "Cos", "Exp", "Log", "Sqrt", "Reciprocal", "Atan", "Asinh", "Sinh", "Cosh", "Sign", "Floor",
                            "Ceil", "Round", "Tan", "Asin", "Acos", "Not", "Pow", "Acosh", "Atanh"])  # fmt: skip
    if kind == "Not":
        return d.op("Not", d.op("Greater", x, d.scalar(0.1)))
    if kind in ("Exp", "Sinh", "Cosh"):
        return d.op(kind, d.op("Clip", x, d.scalar(-2), d.scalar(2)))
    if kind in ("Log", "Sqrt", "Reciprocal", "Pow"):
        y = d.op("Add", d.op("Abs", x), d.scalar(0.3))
        return (
            d.op("Pow", y, d.scalar(d.random.choice([0.5, -1.0, 1.5, 2.0, -0.5]))) if kind == "Pow" else d.op(kind, y)
        )
    if kind in ("Tan", "Asin", "Acos", "Atanh"):
        return d.op(kind, d.op("Mul", d.op("Tanh", x), d.scalar(0.9)))
    if kind == "Acosh":
        return d.op(kind, d.op("Add", d.op("Abs", x), d.scalar(1.3)))
    return d.op(kind, x)


def compared(d: Draw, x: Value) -> Value | None:
    """A comparison with a constant or another value: bool."""
    kind = d.random.choice(["Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal"])
    if (kind in ("GreaterOrEqual", "LessOrEqual") and d.opset < 16) or x.dtype == BOOL:
        kind = "Equal"
    if kind == "Equal" and x.is_float:
        x = d.op("Sign", x)
    other = d.pick(lambda v: v.dtype == x.dtype and v.dims == x.dims) if x.dtype.itemsize > 1 else None
    if other is None or d.random.chance(0.5):
        other = d.const(d.random.array(x.dtype, (), 0, 3))
    return d.op(kind, x, other)


def logic(d: Draw, x: Value) -> Value | None:
    other = d.pick(lambda v: v.dtype == BOOL and v.dims == x.dims)
    return d.op("Not", x) if other is None else d.op(d.random.choice(["And", "Or", "Xor"]), x, other)


def chosen(d: Draw, x: Value) -> Value | None:
    """Where with a computed or constant condition."""
    c = d.pick(lambda v: v.dtype == BOOL and v.dims == x.dims)
    if c is None:
        c = d.const(d.random.array(BOOL, d.random.choice([x.shape, x.shape[-1:], ()]), 0, 1))
    other = d.pick(lambda v: v.dtype == x.dtype and v.dims == x.dims)
    if other is None or d.random.chance(0.3):
        other = d.const(d.random.array(x.dtype, (), 0, 3))
    return d.op("Where", c, *d.random.shuffled([x, other]))


def integers(d: Draw, x: Value) -> Value | None:
    """Arithmetic of integers that stays small."""
    t = x.dtype
    kinds = ["Add", "Sub", "Mul", "Max", "Min", "Mod", "Div", "Clip", "Abs", "Neg", "Sign"]
    if t.itemsize == 1:
        kinds = ["Max", "Min", "Clip", "Mod"]
    kinds += ["BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot"] * (d.opset >= 18)
    if t == np.uint8:
        kinds.append("BitShift")
    kind = d.random.choice(kinds)
    if kind in ("Abs", "Neg", "Sign", "BitwiseNot"):
        return d.op(kind, x)
    if kind == "BitShift":
        return d.op(kind, x, d.const(2, t), direction=d.random.choice(["LEFT", "RIGHT"]))
    if kind == "Clip":
        return d.op("Clip", x, d.const(1, t), d.const(9, t))
    if kind in ("Mod", "Div"):
        c = d.const(d.random.array(t, d.random.choice([(), x.shape[-1:]]), 2, 7))
        return d.op(kind, d.op("Abs", x) if kind == "Div" and t != np.uint8 else x, c)
    other = d.pick(lambda v: v.dtype == t and v.dims == x.dims)
    if other is None or d.random.chance(0.4):
        other = d.const(d.random.array(t, d.random.choice([(), x.shape[-1:], x.shape]), 0, 6))
    y = d.op(kind, *d.random.shuffled([x, other]))
    return d.op("Mod", y, d.const(50, t)) if kind == "Mul" else y


def cast(d: Draw, x: Value) -> Value | None:
    """A cast to another type. Floats are scaled first, so that integers differ; possibly negative values do not become unsigned."""
    options = [F32, I64, I32, BOOL, np.dtype("int8"), np.dtype("uint8"), np.dtype("float64")]
    to = d.random.choice([t for t in options if t != x.dtype])
    if x.is_float and to.kind in "iu":
        x = d.op("Clip", d.op("Mul", x, d.const(5, x.dtype)), d.const(-60, x.dtype), d.const(60, x.dtype))
    if to == np.uint8 and x.dtype != BOOL:
        x = d.op("Abs", x)
    number = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "bool": 9, "float64": 11}[to.name]
    y = d.op("Cast", x, to=number)
    if to == np.float64:
        return d.op("Cast", d.op("Add", y, d.const(0.25, np.float64)), to=1)
    if y.is_float and x.dtype.kind in "iu":
        return d.op("Mul", y, d.scalar(0.1))
    return y


# ---------------------------------------------------------------- reductions


def reduced(d: Draw, x: Value) -> Value | None:
    kinds = ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceSumSquare",
             "ReduceProd", "ReduceLogSum"]  # fmt: skip
    if x.dtype.kind in "iu":
        if x.dtype.itemsize == 1:
            return reduce(d, d.random.choice(["ReduceMax", "ReduceMin"]), x, [_axis(d, x)], d.random.chance(0.5))
        kinds = ["ReduceSum", "ReduceMax", "ReduceMin"]
    kind = d.random.choice(kinds)
    if kind in ("ReduceProd", "ReduceLogSum"):
        x = d.op("Add", d.op("Sigmoid", x), d.scalar(0.5))
    count = d.random.between(1, x.rank)
    axes = sorted(d.random.shuffled(range(x.rank))[:count])
    y = reduce(d, kind, x, axes, d.random.chance(0.6))
    if kind in ("ReduceSum", "ReduceSumSquare", "ReduceL1") and y.is_float:
        return d.op("Mul", y, d.scalar(1 / math.prod(_size(x, a) for a in axes)))
    if kind == "ReduceSum":
        return d.op("Mod", y, d.const(50, y.dtype))
    return y


def extreme(d: Draw, x: Value) -> Value | None:
    kind = d.random.choice(["ArgMax", "ArgMin"])
    return d.op(kind, x, axis=_axis(d, x), keepdims=d.random.below(2), select_last_index=d.random.below(2))


def top(d: Draw, x: Value) -> Value | None:
    axis = _axis(d, x)
    k = d.random.between(1, _size(x, axis))
    found = d.ops("TopK", x, d.ints(k), outputs=2, axis=axis, largest=d.random.below(2), sorted=1)
    d.keep(found[1])
    return found[0]


def scan(d: Draw, x: Value) -> Value | None:
    if x.is_float:
        y = d.op("CumSum", x, d.scalar(_axis(d, x), np.int64), exclusive=d.random.below(2), reverse=d.random.below(2))
        return d.op("Mul", y, d.scalar(0.3))
    return None


def row(d: Draw, x: Value) -> Value | None:
    n = x.dims[-1]
    if not isinstance(n, int):
        return None
    form = d.random.below(5)
    if form == 0:
        return softmax(d, x, _axis(d, x))
    if form == 1:
        return row_norm(d, x)
    if form == 2:
        return d.op("LpNormalization", d.op("Add", x, d.scalar(0.2)), axis=_axis(d, x), p=d.random.between(1, 2))
    if form == 3:
        return d.op("Hardmax", x, axis=_axis(d, x))
    return linear(d, x, d.random.choice([1, 3, 5, 8, 12]))


# ---------------------------------------------------------------- indexing


def _indices(d: Draw, n: int, shape: tuple[int, ...]) -> Value:
    """Constant indices into an axis of n, some counted from the end; sometimes a value of the network modulo n."""
    v = d.pick(lambda v: v.dtype in (I64, I32) and v.static and v.shape == shape)
    if v is not None and d.random.chance(0.5):
        return d.op("Mod", d.op("Abs", v), d.const(n, v.dtype))
    low = -n if d.random.chance(0.3) else 0
    return d.const(d.random.array(d.random.choice([I64, I64, I32]), shape, low, n - 1))


def gathered(d: Draw, x: Value) -> Value | None:
    axis, r = _axis(d, x), d.random
    n, form = _size(x, axis), r.below(3)
    if form == 0:
        shape = r.choice([(), (1,), (3,), (2, 3), (n,)])
        return d.op("Gather", x, _indices(d, n, shape), axis=axis)
    if form == 1:
        count = r.between(1, n + 2)
        places = tuple(count if i == axis % x.rank else s for i, s in enumerate(x.shape))
        return d.op("GatherElements", x, _indices(d, n, places), axis=axis)
    depth = r.between(1, x.rank)
    rows = r.between(1, 5)
    ids = np.stack([r.array(np.int64, (rows,), 0, x.shape[i] - 1) for i in range(depth)], -1)
    return d.op("GatherND", x, d.const(ids))


def scattered(d: Draw, x: Value) -> Value | None:
    """ScatterElements or ScatterND at distinct positions, or with a reduction."""
    r = d.random
    axis = r.below(x.rank)
    n = _size(x, axis)
    reduction = r.choice(["none", "none", "add", "max", "min"][: 5 if d.opset >= 18 else 3 if d.opset >= 16 else 2])
    if x.dtype == BOOL or (x.dtype.itemsize == 1 and reduction != "none"):
        return None
    more = {} if d.opset < 16 else {"reduction": reduction}
    if r.chance(0.5):
        k = r.between(1, n)
        order = np.array(r.shuffled(range(n))[:k], np.int64)
        shape = [s if i != axis else k for i, s in enumerate(x.shape)]
        ids = np.broadcast_to(order.reshape([k if i == axis else 1 for i in range(x.rank)]), shape)
        return d.op("ScatterElements", x, d.const(ids), d.const(r.array(x.dtype, shape, 0, 3)), axis=axis, **more)
    k = r.between(1, x.shape[0])
    ids = np.array(r.shuffled(range(x.shape[0]))[:k], np.int64)[:, None]
    return d.op("ScatterND", x, d.const(ids), d.const(r.array(x.dtype, (k, *x.shape[1:]), 0, 3)), **more)


# ---------------------------------------------------------------- layout


def moved(d: Draw, x: Value) -> Value | None:
    r = d.random
    form = r.choice(
        ["transpose", "transpose", "reshape", "reshape", "unsqueeze", "squeeze", "tile", "expand", "flatten", "trilu"]
    )
    if form == "transpose":
        return d.op("Transpose", x, perm=r.shuffled(range(x.rank)))
    if form == "reshape":
        return d.op("Reshape", x, d.ints(*_factors(d, math.prod(x.shape))))
    if form == "unsqueeze" and x.rank < 5:
        return d.op("Unsqueeze", x, d.ints(r.below(x.rank + 1)))
    if form == "squeeze":
        ones = [i for i, n in enumerate(x.shape) if n == 1]
        return d.op("Squeeze", x, d.ints(r.choice(ones))) if ones and x.rank > 1 else None
    if form == "tile":
        return d.op("Tile", x, d.ints(*(r.choice([1, 1, 2, 3]) for _ in x.dims)))
    if form == "expand":
        return d.op("Expand", x, d.ints(*r.choice([(2, *x.shape), x.shape[-1:], (3, *(1,) * x.rank)])))
    if form == "flatten":
        return d.op("Flatten", x, axis=r.below(x.rank + 1))
    return d.op("Trilu", x, upper=r.below(2)) if d.opset >= 14 and x.rank > 1 and x.dtype in (F32, I64) else None


def _factors(d: Draw, n: int) -> list[int]:
    dims = []
    for _ in range(d.random.below(3)):
        f = d.random.choice([k for k in range(1, min(n, 40) + 1) if n % k == 0])
        dims.append(f)
        n //= f
    return d.random.shuffled([*dims, n])


def pieces(d: Draw, x: Value) -> Value | None:
    """Split. Results of one part may join the others again."""
    axis, r = d.random.below(x.rank), d.random
    n = _size(x, axis)
    if n < 2:
        return None
    sizes = [1] * r.between(2, min(n, 4))
    for _ in range(n - len(sizes)):
        sizes[r.below(len(sizes))] += 1
    parts = split(d, x, axis, sizes)
    form = r.below(4)
    if form == 0:
        d.keep(*parts[1:])
        return parts[0]
    for _ in range(r.below(3) if x.is_float else 0):
        parts.insert(r.below(len(parts) + 1), activation(d, r.choice(parts)))
    if form == 1:
        parts = r.shuffled([*parts, r.choice(parts)])
    return d.op("Concat", *parts, axis=axis)


def joined(d: Draw, x: Value) -> Value | None:
    axis = d.random.below(x.rank)
    rest = x.dims[:axis] + x.dims[axis + 1 :]
    other = d.pick(lambda v: v.rank == x.rank and v.dtype == x.dtype and v.dims[:axis] + v.dims[axis + 1 :] == rest)
    if other is None or d.random.chance(0.2):
        other = d.const(d.random.array(x.dtype, x.shape, 0, 2))
    return d.op("Concat", *d.random.shuffled([x, other]), axis=axis)


def sliced(d: Draw, x: Value) -> Value | None:
    axis, r = d.random.below(x.rank), d.random
    n = _size(x, axis)
    if n < 2:
        return None
    start, step = r.below(n - 1), r.choice([1, 1, 2, -1])
    if step < 0:
        return cut(d, x, axis, n - 1 - start, -n - 1 if r.chance(0.5) else 0, -1)
    return cut(d, x, axis, start, r.choice([n, n + 5, 2**31 - 1]), step)


def padded(d: Draw, x: Value) -> Value | None:
    r = d.random
    if x.dtype == BOOL:
        return None
    pads = [r.below(3) for _ in range(2 * x.rank)]
    mode = r.choice(["constant", "constant", "edge", "reflect"])
    if mode == "reflect":
        pads = [min(p, n - 1) for p, n in zip(pads, x.shape * 2, strict=True)]
    value = [d.const(2, x.dtype)] if mode == "constant" and r.chance(0.5) else []
    return d.op("Pad", x, d.ints(*pads), *value, mode=mode)


def einsum(d: Draw, x: Value) -> Value | None:
    if x.rank == 2:
        k = x.shape[1]
        shape, equation = d.random.choice([((k, 5), "ij,jk->ik"), ((k,), "ij,j->i"), ((5, k), "ij,kj->ki")])
        return d.op("Einsum", x, d.weights(*shape, fan_in=k), equation=equation)
    if x.rank == 3:
        return d.op(
            "Einsum",
            x,
            d.weights(x.shape[2], 4, fan_in=x.shape[2]),
            equation=d.random.choice(["bij,jk->bik", "bij,jk->bki", "bij,jk->ibk"]),
        )
    return None


def counted(d: Draw, x: Value) -> Value | None:
    """OneHot of integers."""
    if x.dtype not in (I64, I32) or x.rank > 3:
        return None
    n = d.random.choice([3, 5])
    ids = d.op("Mod", d.op("Abs", x), d.const(n, x.dtype))
    ids = d.op("Cast", ids, to=7) if x.dtype == I32 else ids
    return d.op("OneHot", ids, d.const(n, np.int64), d.const([0.0, 1.0], np.float32), axis=d.random.choice([-1, 0]))


FLOATS: tuple[Step, ...] = (
    unary, unary, activation, activation, arithmetic, arithmetic, combined, combined, combined, compared, chosen, cast,
    cast, reduced, reduced, extreme, top, scan, row, row, gathered, gathered, scattered, moved, moved, moved, pieces,
    pieces, joined, sliced, padded, einsum,
)  # fmt: skip
WHOLE: tuple[Step, ...] = (
    integers, integers, integers, compared, chosen, cast, cast, reduced, gathered, scattered, moved, moved, pieces, joined, sliced,
    padded, counted, top, extreme,
)  # fmt: skip
BITS: tuple[Step, ...] = (logic, logic, cast, cast, moved, gathered, joined, sliced)


def step(d: Draw, x: Value) -> Value | None:
    """A random step that x's type allows."""
    table = BITS if x.dtype == BOOL else FLOATS if x.is_float else WHOLE
    one = d.random.choice(table)
    if one in (top, extreme, reduced) and x.dtype.itemsize == 1 and one is not reduced:
        return None
    return one(d, x)


def draw(d: Draw) -> None:
    """Any operators in any order over one to three inputs."""
    r = d.random
    base = [r.choice([1, 2, 3, 4, 5, 6, 7, 8, 11, 16]) for _ in range(r.between(1, 4))]
    for _ in range(r.between(1, 3)):
        dims = base if r.chance(0.6) else [r.between(1, 8) for _ in range(r.between(1, 4))]
        while math.prod(dims) > 2500:
            dims = dims[1:]
        if r.chance(0.6):
            d.keep(d.input(dims))
        else:
            t = r.choice([*INTEGERS, BOOL])
            d.keep(d.input(dims, t, 0 if t == np.uint8 else -9, 20))
    for _ in range(r.between(4, 16)):
        x = d.pick(lambda v: v.static and v.rank > 0 and fits(v))
        y = None if x is None else step(d, x)
        if y is not None and y.static and y.size <= 20000:
            d.keep(y)
