"""Operators that only rearrange memory: a view if strides can express it, otherwise a copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from optdnn.errors import ShapeError, UnsupportedError
from optdnn.ir.graph import STRUCTURAL, Op, Value
from optdnn.kernels.builder import Builder, TensorView, row_major, unmade, up
from optdnn.kernels.layout.moves import joinable
from optdnn.kernels.pointwise.strides import STRIDES_LIMIT
from optdnn.types import is_float, normalize_axis


def ints(b: Builder, op: Op, slot: int) -> list[int] | None:
    """The known integers of an operand; None if it is absent. Raises UnsupportedError if they are not known."""
    value = op.input(slot)
    if value is None:
        return None
    known = b.graph.known(value)
    if known is None or known.dtype == object:
        raise UnsupportedError(
            f"{op.kind} {op.name}: the cuda target needs operand {slot} to be known when the engine is built"
        )
    return [int(x) for x in known.reshape(-1)]


def reshaped(x: TensorView, shape: Sequence[int]) -> TensorView | None:
    """``x`` with another shape over the same memory, or None if strides cannot express it.

    Raises ShapeError for a shape of another number of elements: the model may declare one for a Squeeze by unknown axes."""
    if math.prod(shape) != x.size:
        raise ShapeError(
            f"a tensor of sizes {list(x.shape)} is declared as {list(shape)}, which has another number of elements"
        )
    if x.size == 0:
        return x.view(shape, row_major(shape))
    old = [(n, s) for n, s in zip(x.shape, x.strides, strict=True) if n != 1]
    strides = [0] * len(shape)
    i = j = 0
    while i < len(old):
        # Grow a group of old axes and a group of new axes until both have the same number of elements.
        first, have, want, start = i, old[i][0], 1, j
        i += 1
        while have != want or j == start:
            if want < have or j == start:
                want *= shape[j]
                j += 1
            else:
                have *= old[i][0]
                i += 1
        for (_, a), (n, c) in zip(old[first : i - 1], old[first + 1 : i], strict=True):
            if a != n * c:
                return None
        step = old[i - 1][1]
        for k in reversed(range(start, j)):
            strides[k] = step
            step *= shape[k]
    return x.view(shape, strides)


def order_read(b: Builder, value: Value, *, rows: bool = False) -> tuple[int, ...] | None:
    """Strides of a result that make the Reshapes and Transposes after it views, with a dense last view; None if they are views of a dense
    result, or if there are no such strides. ``rows``: a Transpose of a dense result does not suffice, because its reader wants rows."""
    chain: list[Op] = []
    user = b.graph.sole_user(value)
    while user is not None and user.kind in {"Transpose", "Reshape"} and user.outputs[0].type.is_static:
        chain.append(user)
        user = b.graph.sole_user(user.value)
    t = b.graph.type(value)
    found: TensorView | None = unmade(t.dtype, t.static_shape)
    for op in chain:
        found = found and seen_by(op, found)
    if found is not None and not (rows and any(op.kind == "Transpose" for op in chain)):
        return None
    last = chain[-1].outputs[0].type
    found = unmade(t.dtype, last.static_shape, b.strides_for(last))
    for op in reversed(chain):
        before = b.graph.type(op.inputs[0]).static_shape  # type: ignore[arg-type]
        back = np.argsort(_permutation(op)).tolist() if op.kind == "Transpose" else None
        found = reshaped(found, before) if back is None else found.permuted(back)
        if found is None:
            return None
    return found.strides


def _permutation(op: Op) -> Sequence[int]:
    return op.attrs.perm or range(len(op.outputs[0].type.static_shape))[::-1]


def seen_by(op: Op, x: TensorView) -> TensorView | None:
    """``x`` after a Transpose or a kind of Reshape; None if that is not a view."""
    return x.permuted(_permutation(op)) if op.kind == "Transpose" else reshaped(x, op.outputs[0].type.static_shape)


def settle(b: Builder, op: Op, port: int, found: TensorView) -> None:
    """Place a result at ``found``, or record a copy from ``found`` to its reserved place."""
    value = Value(op.id, port)
    if value in b.reserved:
        target = b.target(value)
        if (found.buffer, found.offset) != (target.buffer, target.offset) or not found.is_like(target.strides):
            b.move(op, found, target)
    else:
        b.place[value] = found


def _rows_for_products(b: Builder, op: Op) -> tuple[int, ...] | None:
    """Strides of a copy that only products read: rows at multiples of 16 bytes, for TMA and wide loads. None: without gaps."""
    t = op.outputs[0].type
    shape = t.static_shape
    if t.dtype.itemsize != 2 or len(shape) < 2 or shape[-1] % 8 == 0:
        return None
    if any(u.kind not in ("MatMul", "Gemm") or u.inputs[0] != op.value for u in b.graph.users(op.value)):
        return None
    return (*(s * up(shape[-1], 8) for s in row_major(shape[:-1])), 1)


def _reshape(b: Builder, op: Op) -> None:
    x, value = b.operand(op.inputs[0]), op.value
    shape = op.outputs[0].type.static_shape
    found = reshaped(x, shape)
    if found is not None:
        settle(b, op, 0, found)
        return
    t = op.outputs[0].type
    strides = b.strides_for(t) if t.layout else _rows_for_products(b, op)
    anywhere = strides is None and value not in b.reserved
    if anywhere and x in b.flattened:  # another Reshape needed the same copy
        b.place[value] = b.flattened[x].view(shape, row_major(shape))
        return
    target = b.reserved.get(value) or b.new(op.outputs[0].name, x.dtype, shape, strides)
    back = reshaped(target, x.shape)
    if back is not None:
        b.move(op, x, back)
        b.place[value] = target
        if anywhere:
            b.flattened[x] = target
        return
    dense = b.new(op.outputs[0].name + ".dense", x.dtype, x.shape)
    b.move(op, x, dense)
    settle(b, op, 0, dense.view(shape, row_major(shape)))


def _transpose(b: Builder, op: Op) -> None:
    settle(b, op, 0, b.operand(op.inputs[0]).permuted(_permutation(op)))


def _identity(b: Builder, op: Op) -> None:
    settle(b, op, 0, b.operand(op.inputs[0]))


def cast_source(b: Builder, value: Value | None) -> Value:
    """The source of ``value`` through changes of layout and casts to a narrower floating type, as far as it is stored."""
    while True:
        assert value is not None
        op = b.graph.op(value)
        narrowing = op.kind == "Cast" and b.graph.type(op.inputs[0]).dtype.name == "float32" and (  # type: ignore[arg-type]
            op.outputs[0].type.dtype.name in ("float16", "bfloat16"))  # fmt: skip
        if (op.kind != "Layout" and not narrowing) or op.id in b.joined:
            return value
        value = op.inputs[0]


_BLOCKS = frozenset({"DepthToSpace", "SpaceToDepth"})
"""Kinds that move blocks of elements: their copies read any order."""


def _layout(b: Builder, op: Op) -> None:
    x, t = b.operand(op.inputs[0]), op.outputs[0].type
    # Images of one pixel are rows in either layout; the padding of their channels is between rows.
    rows = all(n == 1 for n in x.shape[2:]) and (x.shape[1] == 1 or x.strides[1] == 1)
    if t.layout:  # its pixels have to begin at whole vectors
        rows = rows and x.shape[1] % 8 == 0 and (x.shape[0] == 1 or x.strides[0] % 8 == 0)
    if (rows or x.is_like(b.strides_for(t))) and op.value not in b.reserved and x.offset % 8 == 0:
        b.place[op.value] = x
        return
    placed = op.value in b.reserved  # perhaps where the operand is
    if not (placed or t.layout) and all(
        u.kind in _BLOCKS or (u.kind == "MatMul" and _is_turned(x)) for u in b.graph.users(op.value)
    ):
        b.place[op.value] = x
        return
    if of_one_channel(op) and (placed or all(_reads_gaps(u, plain=not t.layout) for u in b.graph.users(op.value))):
        settle(b, op, 0, x)
        return
    b.move(op, b.operand(cast_source(b, op.inputs[0])), b.target(op.value))


def _is_turned(x: TensorView) -> bool:
    """Whether a tensor holds turned matrices that products read in place."""
    return (
        len(x.shape) == 3
        and x.strides[1] == 1
        and x.offset % 8 == 0
        and not any(s % 8 for s in (x.strides[0], x.strides[2]))
    )


def _reads_gaps(user: Op, *, plain: bool) -> bool:
    """Whether a reader takes one-channel pixels with or without gaps. Kernels of rows need rows without gaps."""
    if user.kind in STRUCTURAL:
        return False
    return user.definition.traits.pointwise or (plain and user.kind in ("Concat", "GlobalAveragePool", "Resize"))


def of_one_channel(op: Op) -> bool:
    """Whether a change of layout only changes the padding of channels: only convolutions need that padding."""
    return op.kind == "Layout" and len(op.outputs[0].type.static_shape) > 2 and op.outputs[0].type.static_shape[1] == 1


def consecutive(parts: Sequence[TensorView | None], axis: int) -> bool:
    """Whether the parts follow one another without gaps along an axis of one buffer."""
    first = parts[0]
    assert first is not None
    at = first.offset
    for p in parts:
        if p is None or p.buffer != first.buffer or p.offset != at or p.strides != first.strides:
            return False
        at += p.shape[axis] * p.strides[axis]
    return True


def _expand(b: Builder, op: Op) -> None:
    x = b.operand(op.inputs[0])
    shape = op.outputs[0].type.static_shape
    lead = len(shape) - len(x.shape)
    strides = [0] * lead + [
        0 if n == 1 and m != 1 else s for n, s, m in zip(x.shape, x.strides, shape[lead:], strict=True)
    ]
    settle(b, op, 0, x.view(shape, strides))


def _slice(b: Builder, op: Op) -> None:
    x = b.operand(op.inputs[0])
    starts, ends, axes, steps = (ints(b, op, i) for i in range(1, 5))
    assert starts is not None
    assert ends is not None
    axes = axes if axes is not None else list(range(len(starts)))
    steps = steps if steps is not None else [1] * len(starts)
    shape, strides, offset = list(x.shape), list(x.strides), 0
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = normalize_axis(axis, len(shape))
        taken = range(*slice(start, end, step).indices(x.shape[axis]))
        shape[axis] = len(taken)
        offset += taken.start * x.strides[axis] if len(taken) else 0
        strides[axis] *= step
    settle(b, op, 0, x.view(shape, strides, offset))


def _split(b: Builder, op: Op) -> None:
    x = b.operand(op.inputs[0])
    axis, at = normalize_axis(op.attrs.axis, len(x.shape)), 0
    for port, out in enumerate(op.outputs):
        shape = out.type.static_shape
        settle(b, op, port, x.view(shape, x.strides, at * x.strides[axis]))
        at += shape[axis]


def _depth_to_space(b: Builder, op: Op) -> None:
    x = b.operand(op.inputs[0])
    k, (n, c, h, w) = op.attrs.blocksize, x.shape
    out = _converted(b, op)
    deep = c // k // k
    split = (n, k, k, deep, h, w) if op.attrs.mode == "DCR" else (n, deep, k, k, h, w)
    perm = (0, 3, 4, 1, 5, 2) if op.attrs.mode == "DCR" else (0, 1, 4, 2, 5, 3)
    _permuted(b, op, x, split, perm, out)


def _space_to_depth(b: Builder, op: Op) -> None:
    x = b.operand(op.inputs[0])
    k, (n, c, h, w) = op.attrs.blocksize, x.shape
    perm = (0, 3, 5, 1, 2, 4) if op.attrs.mode == "DCR" else (0, 1, 3, 5, 2, 4)
    _permuted(b, op, x, (n, c, h // k, k, w // k, k), perm, _converted(b, op))


def _converted(b: Builder, op: Op) -> TensorView:
    """The target of a copy: the result of the conversion of floats that alone reads it, or its own result."""
    cast = b.graph.sole_user(op.value)
    plain = cast is not None and cast.kind == "Cast" and not cast.outputs[0].type.layout and op.value not in b.reserved
    if cast is not None and plain and is_float(cast.attrs.to) and is_float(op.outputs[0].type.dtype):
        b.place[op.value] = b.target(cast.value)
    return b.target(op.value)


def _permuted(b: Builder, op: Op, x: TensorView, split: Sequence[int], perm: Sequence[int], out: TensorView) -> None:
    source = reshaped(x, split)
    assert source is not None, "an axis can always be split"
    source = source.permuted(perm)
    target = reshaped(out, source.shape)
    assert target is not None, "an axis can always be split"
    b.move(op, source, target)


def _tile(b: Builder, op: Op) -> None:
    x = b.operand(op.inputs[0])
    repeats = ints(b, op, 1) or []
    out = b.target(op.value)
    shape = [n for r, m in zip(repeats, x.shape, strict=True) for n in (r, m)]
    strides = [s for t in x.strides for s in (0, t)]
    target = reshaped(out, shape)
    assert target is not None, "an axis can always be split"
    b.move(op, x.view(shape, strides), target)


def _concat(b: Builder, op: Op) -> None:
    if op.value not in b.reserved:
        parts = [b.operand(v) for v in op.inputs if v is not None]
        along = normalize_axis(op.attrs.axis, len(parts[0].shape))
        first = parts[0]
        if len(parts) > 1 and consecutive(parts, along):  # for example the states of stacked recurrent layers
            b.place[op.value] = first.view(op.outputs[0].type.static_shape, first.strides)
            return
    out = b.target(op.value)
    axis, at = normalize_axis(op.attrs.axis, len(out.shape)), 0
    pending: list[tuple[TensorView, TensorView]] = []
    for value in op.inputs:
        assert value is not None
        x = b.operand(value)
        part = out.view(x.shape, out.strides, at * out.strides[axis])
        at += x.shape[axis]
        if x.buffer != part.buffer or x.offset != part.offset or not x.is_like(part.strides):
            pending.append((x, part))
    pairs = _joined(pending, axis)
    if len(joins := _joins(pending, axis)) < len(pairs):
        for some in joins:
            sources, places = zip(*some, strict=True)
            size = sum(x.shape[axis] for x in sources)
            shape = (*out.shape[:axis], size, *out.shape[axis + 1 :])
            b.join(op, sources, places[0].view(shape, out.strides), axis)
        return
    for pair in pairs:
        b.move(op, *pair)


Pair: TypeAlias = tuple[TensorView, TensorView]
"""A part of a concatenation: its source, and its place in the result."""


def _joins(pairs: Sequence[Pair], axis: int) -> list[list[Pair]]:
    """The pairs in groups of neighbors that one launch moves; a pair without such neighbors is a group of its own."""
    found: list[list[Pair]] = []
    for pair in pairs:
        last = found[-1][-1][1] if found else None
        follows = last is not None and pair[1].offset == last.offset + last.shape[axis] * last.strides[axis]
        if follows and joinable([x for x, _ in (*found[-1], pair)]):
            found[-1].append(pair)
        else:
            found.append([pair])
    return found


def _joined(pairs: list[Pair], axis: int) -> list[Pair]:
    """The pairs, with each run of pairs merged into one, and also runs of such runs. For example, four quarters of an image's pixels are
    two by two."""
    while True:
        joined: list[Pair] = []
        for run in _runs(pairs):
            alone = len(run) == 1 or len(run[0][0].shape) == STRIDES_LIMIT
            joined += run if alone else [_repeated_pair(run, axis)]
        if len(joined) == len(pairs):
            return pairs
        pairs = joined


def _repeated_pair(run: Sequence[Pair], axis: int) -> Pair:
    """A run as one pair, with an additional axis for the number of the pair in the run."""
    source, target = (_repeated(p, len(run), d, axis) for p, d in zip(run[0], _distances(*run[:2]), strict=True))
    return source, target


def _runs(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """The pairs in runs that one copy can move: equal shapes and strides, and constant distances of sources and of destinations.

    Frames under the taps of a filter are such a run. A part between two others that is in place already has no pair. The
    distance of the destinations around it is then larger, and ends the run.
    """
    found: list[list[Pair]] = []
    for pair in pairs:
        if found:
            run = found[-1]
            alike = all(
                (p.buffer, p.shape, p.strides) == (first.buffer, first.shape, first.strides)
                for p, first in zip(pair, run[0], strict=True)
            )
            if alike and (len(run) == 1 or _distances(run[-1], pair) == _distances(run[0], run[1])):
                run.append(pair)
                continue
        found.append([pair])
    return found


def _distances(a: Pair, b: Pair) -> tuple[int, int]:
    """Elements from the source and from the destination of ``a`` to those of ``b``."""
    return b[0].offset - a[0].offset, b[1].offset - a[1].offset


def _repeated(x: TensorView, count: int, distance: int, axis: int) -> TensorView:
    """``count`` views like ``x``, ``distance`` elements apart, along an additional axis before ``axis``."""
    shape = (*x.shape[:axis], count, *x.shape[axis:])
    return x.view(shape, (*x.strides[:axis], distance, *x.strides[axis:]))


def _constant_of_shape(b: Builder, op: Op) -> None:
    out = op.outputs[0].type
    shape = out.static_shape
    settle(
        b, op, 0, b.constant(np.asarray(op.attrs.value, out.dtype), op.outputs[0].name).view(shape, (0,) * len(shape))
    )


EYE_LIMIT = 1 << 24
"""Most elements of an EyeLike: it is stored as a constant."""


def _eye_like(b: Builder, op: Op) -> None:
    out = op.outputs[0].type
    if out.size > EYE_LIMIT:  # type: ignore[operator]
        raise UnsupportedError(f"{op.kind} {op.name}: its result of {out.size} elements is too large to be stored")
    rows, columns = out.static_shape
    settle(b, op, 0, b.constant(np.eye(rows, columns, op.attrs.k).astype(out.dtype), op.outputs[0].name))


VIEWS: dict[str, Callable[[Builder, Op], None]] = {
    "Reshape": _reshape, "Flatten": _reshape, "Squeeze": _reshape, "Unsqueeze": _reshape, "Transpose": _transpose,
    "Identity": _identity, "Layout": _layout, "Expand": _expand, "Slice": _slice, "Split": _split, "Concat": _concat,
    "ConstantOfShape": _constant_of_shape, "EyeLike": _eye_like, "DepthToSpace": _depth_to_space, "SpaceToDepth": _space_to_depth, "Tile": _tile,
}  # fmt: skip
"""Kind -> the function that places it."""
