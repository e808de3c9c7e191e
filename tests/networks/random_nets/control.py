"""Control flow and sizes that depend on data: If, Loop, Scan, and selections that may be empty."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from random_nets.blocks import activation, arithmetic, fits, linear, reduce, row_norm
from random_nets.draw import BOOL, F32, I64, Draw, Value

SOME_NONE = (0.1, 90.0, -90.0, 0.4, 90.0, 0.2)
"""A threshold that differs between runs: some elements are above it, none, all, or fewer."""


def _inner(d: Draw, x: Value) -> Value:
    """One to three pointwise steps or products in a body, which keep x's dimensions."""
    y = x
    for _ in range(d.random.between(1, 3)):
        form = d.random.below(4)
        width = y.dims[-1] if y.rank > 1 else None
        if form == 0 and isinstance(width, int):
            y = linear(d, y, width)
        elif form == 1 and isinstance(width, int):
            y = row_norm(d, y)
        else:
            y = activation(d, y) if form < 3 else d.op("Mul", y, d.scalar(d.random.uniform(0.4, 1.1)))
    return d.known_as(d.op("Tanh", y), x.dims)


def _condition(d: Draw, x: Value) -> Value:
    """A bool scalar: given, constant, or computed from x."""
    form = d.random.below(4)
    if form == 0:
        return d.input((), BOOL, turns=(1, 0, 1, 0))
    if form == 1:
        return d.const(d.random.chance(0.5))
    axes = list(range(x.rank))
    mean = reduce(d, d.random.choice(["ReduceMean", "ReduceMax"]), x, axes, False)
    return d.op("Greater", mean, d.input((), turns=SOME_NONE) if form == 2 else d.scalar(0.05))


def branch(d: Draw, x: Value) -> Value | None:
    """If: both branches read x from outside. Their results have the same type, but sometimes not the same first dimension."""
    condition = _condition(d, x)
    uneven = d.random.chance(0.2) and x.static and x.rank > 1
    graphs = {}
    for name in ("then_branch", "else_branch"):
        inner = d.body()
        y = _inner(inner, x) if d.random.chance(0.8) else x
        if uneven and name == "then_branch":
            y = inner.op("Concat", y, y, axis=0)
        graphs[name] = d.subgraph(inner, [], [y])
    dims = (f"?{d.fresh('d')}", *x.dims[1:]) if uneven else x.dims
    return d.typed("If", [condition], [(x.dtype, dims)], **graphs)[0]


def loop(d: Draw, x: Value) -> Value | None:
    """Loop with a carried value and scan outputs. The number of iterations is constant or given (0 among them), or a condition
    ends it."""
    r = d.random
    form = r.below(4)
    trips = d.scalar(r.choice([0, 1, 2, 3, 4]), np.int64) if form == 0 else None
    if form in (1, 2):
        trips = d.input((), I64, turns=(2, 0, 3, 1))
    elif form == 3 or trips is None:
        trips = d.scalar(5, np.int64)
    start = d.const(True) if r.chance(0.7) else _condition(d, x)
    inner = d.body()
    i, go, carried = inner.local(I64, ()), inner.local(BOOL, ()), inner.local(x.dtype, x.dims)
    y = _inner(inner, carried)
    if r.chance(0.4):
        y = inner.known_as(inner.op("Add", y, inner.op("Mul", inner.op("Cast", i, to=1), inner.scalar(0.1))), x.dims)
    if r.chance(0.3):
        y = inner.known_as(inner.op("Mul", inner.op("Add", y, x), inner.scalar(0.5)), x.dims)
    again = go
    if r.chance(0.4):
        again = inner.op("Less", i, inner.scalar(r.below(4), np.int64))
    scans = []
    if r.chance(0.7):
        scans.append(y if r.chance(0.6) else reduce(inner, "ReduceMean", y, [x.rank - 1], False))
    if r.chance(0.3):
        scans.append(inner.op("Mul", i, inner.scalar(3, np.int64)))
    body = d.subgraph(inner, [i, go, carried], [again, y, *scans])
    types = [(x.dtype, x.dims), *((s.dtype, (f"?{d.fresh('d')}", *s.dims)) for s in scans)]
    made = d.typed("Loop", [trips, start, x], types, body=body)
    d.keep(*made[1:])
    return made[0]


def row_loop(d: Draw, x: Value) -> Value | None:
    """Loop over the rows of x, which appends a row to a carried value or to a scan output; rarely it reads what it appended."""
    if x.rank < 2 or not x.static:
        return None
    r, rest = d.random, x.dims[1:]
    trips = d.op("Squeeze", d.op("Gather", d.op("Shape", x), d.ints(0), axis=0), d.ints(0))
    inner = d.body()
    i, go = inner.local(I64, ()), inner.local(BOOL, ())
    row = inner.known_as(inner.op("Gather", x, i, axis=0), rest)
    y = _inner(inner, row)
    axes = list(range(len(rest)))
    if r.chance(0.4):
        bound = inner.op("Abs", reduce(inner, "ReduceMean", row, axes, False))
        y = inner.known_as(inner.op("Clip", y, inner.op("Neg", bound), bound if r.chance(0.5) else None), rest)
    if r.chance(0.3):
        y = inner.known_as(
            inner.op("Add", y, inner.const(r.choice([0.5, -0.25]) * np.ones(x.shape[1:]), np.float32)), rest
        )
    if r.chance(0.3):
        y = inner.op("Concat", y, row, axis=len(rest) - 1)
    results: tuple[object, tuple[int | str, ...]] = (x.dtype, (x.dims[0], *y.dims))
    if r.chance(0.4):
        return d.typed("Loop", [trips, None], [results], body=d.subgraph(inner, [i, go], [go, y]))[0]
    unknown = f"?{d.fresh('d')}"
    carried = inner.local(x.dtype, (unknown, *y.dims))
    if r.chance(0.15):
        y = inner.known_as(
            inner.op("Sub", y, reduce(inner, "ReduceSum", carried, list(range(y.rank + 1)), False)), y.dims
        )
    grown = inner.op("Concat", carried, inner.op("Unsqueeze", y, inner.ints(0)), axis=0)
    grown = inner.known_as(grown, (f"?{d.fresh('d')}", *y.dims))
    empty = d.const(np.zeros((0, *(n for n in y.dims if isinstance(n, int)))), np.float32)
    body = d.subgraph(inner, [i, go, carried], [go, grown])
    return d.typed("Loop", [trips, d.const(True), empty], [results], body=body)[0]


def scan(d: Draw, x: Value) -> Value | None:
    """Scan over x's first axis in either direction, with a state."""
    if x.rank < 2 or not x.static:
        return None
    r, rest = d.random, x.dims[1:]
    state = d.const(np.zeros(x.shape[1:], np.float32))
    inner = d.body()
    s, row = inner.local(F32, rest), inner.local(F32, rest)
    y = inner.op("Tanh", inner.op("Add", row, inner.op("Mul", s, inner.scalar(0.7))))
    if r.chance(0.5) and x.rank > 2:
        y = inner.op("Tanh", linear(inner, y, x.shape[-1]))
    y = inner.known_as(y, rest)
    emitted = inner.op("Mul", y, inner.scalar(0.5)) if r.chance(0.5) else y
    body = d.subgraph(inner, [s, row], [y, emitted])
    final, rows = d.typed(
        "Scan", [state, x], [(F32, rest), (F32, x.dims)], body=body, num_scan_inputs=1,
        scan_input_directions=[r.below(2)], scan_output_directions=[r.below(2)],
    )  # fmt: skip
    d.keep(final)
    return rows


# ---------------------------------------------------------------- sizes that depend on data


def _chosen_rows(d: Draw, x: Value) -> Value:
    """A bool for each row of x."""
    score = (
        reduce(d, d.random.choice(["ReduceMean", "ReduceMax"]), x, list(range(1, x.rank)), False) if x.rank > 1 else x
    )
    return d.op("Greater", score, d.input((), turns=SOME_NONE) if d.random.chance(0.75) else d.scalar(0.1))


def selected(d: Draw, x: Value) -> Value | None:
    """Rows of x that a condition selects, in one of the forms of real models."""
    unknown = f"?{d.fresh('d')}"
    form = d.random.below(4)
    if form == 0:
        return d.typed("Compress", [x, _chosen_rows(d, x)], [(x.dtype, (unknown, *x.dims[1:]))], axis=0)[0]
    if form == 1:
        (at,) = d.typed("NonZero", [_chosen_rows(d, x)], [(I64, (1, unknown))])
        rows = d.known_as(d.op("Squeeze", at, d.ints(0)), (unknown,))
        return d.known_as(d.op("Gather", x, rows, axis=0), (unknown, *x.dims[1:]))
    above = d.op("Greater", x, d.input((), turns=SOME_NONE) if d.random.chance(0.7) else d.scalar(0.3))
    if form == 2:
        (at,) = d.typed("NonZero", [above], [(I64, (x.rank, unknown))])
        ids = d.known_as(d.op("Transpose", at, perm=[1, 0]), (unknown, x.rank))
        return d.known_as(d.op("GatherND", x, ids), (unknown,))
    flat = d.known_as(d.op("Reshape", above, d.ints(-1)), (f"?{d.fresh('d')}",))
    return d.typed("Compress", [x, flat], [(x.dtype, (unknown,))])[0]


def unique(d: Draw, x: Value) -> Value | None:
    """Unique of a flat selection or of integers."""
    if x.rank != 1:
        return None
    unknown = f"?{d.fresh('d')}"
    y = d.op("Round", d.op("Mul", x, d.scalar(3))) if x.is_float else x
    n = (unknown,)
    types: list[tuple[object, Sequence[int | str]]] = [(y.dtype, n), (I64, n), (I64, x.dims), (I64, n)]
    made = d.typed("Unique", [y], types[: d.random.between(1, 4)], sorted=d.random.below(2))
    d.keep(*made[1:])
    return made[0]


def boxes(d: Draw, x: Value | None = None) -> Value | None:
    """NonMaxSuppression over drawn boxes, then the boxes and scores that it keeps."""
    r = d.random
    batch, n, classes = r.choice([1, 1, 2]), r.choice([3, 8, 20]), r.choice([1, 1, 3])
    corner = d.input((batch, n, 2), low=0.0, high=4.0)
    far = d.op("Add", corner, d.input((batch, n, 2), low=0.5, high=3.0))
    box = d.op("Concat", corner, far, axis=2)
    scores = d.input((batch, classes, n), low=0.0, high=1.0)
    threshold = d.input((1,), turns=(0.3, 5.0, 0.0, 0.8, 5.0, 0.5)) if r.chance(0.8) else d.const([0.25], np.float32)
    unknown = f"?{d.fresh('d')}"
    inputs = [box, scores, d.ints(r.choice([1, 3, 50])), d.const([0.4], np.float32), threshold]
    (kept,) = d.typed("NonMaxSuppression", inputs, [(I64, (unknown, 3))], center_point_box=0)
    d.keep(kept)
    at = d.known_as(d.op("GatherND", box, d.op("Gather", kept, d.ints(0, 2), axis=1)), (unknown, 4))
    d.keep(d.known_as(d.op("GatherND", scores, kept), (unknown,)))
    return at


def onward(d: Draw, x: Value) -> Value | None:
    """A step on a value whose first dimension may depend on data."""
    r = d.random
    form = r.below(7)
    if form == 0 and x.rank > 1 and isinstance(x.dims[-1], int):
        return linear(d, x, r.choice([3, 5, 8]))
    if form == 1:
        return reduce(d, "ReduceSum", d.op("Mul", x, d.scalar(0.1)), [0], r.chance(0.5))
    if form == 2 and x.rank > 1:
        return d.known_as(d.op("Concat", x, d.op("Tanh", x), axis=-1), (*x.dims[:-1], "?" + d.fresh("d")))
    if form == 3:
        return d.op("Concat", x, d.op("Neg", x), axis=0)
    if form == 4 and x.rank == 3 and all(isinstance(n, int) and n > 1 for n in x.dims[1:]):
        y = d.op("Unsqueeze", x, d.ints(1))
        return d.op("MaxPool", y, kernel_shape=[2, 2], strides=[1, 2])
    if form == 5 and x.rank > 1 and all(isinstance(n, int) for n in x.dims[1:]):
        return arithmetic(d, x)
    return activation(d, x)


STATIC = (branch, branch, loop, loop, loop, row_loop, scan, selected, selected, selected)


def draw(d: Draw) -> None:
    """A few steps of control flow or selection on float values, with pointwise steps and products between them."""
    r = d.random
    dims = [r.choice([1, 2, 3, 5, 8])] + [r.choice([2, 3, 4, 6, 8]) for _ in range(r.below(3))]
    d.keep(d.input(dims))
    if r.chance(0.2):
        d.keep(boxes(d))
    for k in range(r.between(2, 6)):
        x = d.pick(lambda v: v.is_float and v.rank > 0 and fits(v))
        if x is None:
            break
        if x.known and (k == 0 or r.chance(0.5)):
            d.keep(r.choice(STATIC)(d, x))
        elif r.chance(0.3) and x.rank == 1:
            d.keep(unique(d, x))
        elif x.rank < 5 and r.chance(0.15):
            d.keep(branch(d, x) if r.chance(0.5) else loop(d, x))
        else:
            d.keep(onward(d, x))
