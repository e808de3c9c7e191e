"""Facts about values and ops, and helpers that add small ops. Several passes use them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from optdnn.dim import INF, Dim, DimLike, bounds, substitute, symbol
from optdnn.ir.graph import Graph, Op, Use, Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import Known
from optdnn.ops.checks import elements
from optdnn.ops.index import SplitAttrs
from optdnn.ops.reduce import reduced_axes
from optdnn.ops.shape import ReshapeAttrs
from optdnn.types import FP64, Array, Shape, is_float, normalize_axis

_DEPTH = 16
"""Most operators that a proof goes back."""

RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
"""Kinds that keep the elements in row-major order."""

VIEWS = RESHAPES | {"Transpose"}
"""Kinds that keep the elements, in the same or in another order."""

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})

NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
"""Kinds that normalize rows."""

_NON_NEGATIVE = frozenset(
    {
        *("Relu", "Abs", "Sigmoid", "HardSigmoid", "Softplus", "Exp", "Sqrt", "Softmax"),
        *("ReduceL1", "ReduceL2", "ReduceSumSquare"),
    }
)
_KEEPS_SIGN = frozenset(
    {
        *("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool"),
        *("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"),
        *("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand", "Tile", "Transpose", "Identity", "Slice", "Split"),
        *("DepthToSpace", "SpaceToDepth", "Gather", "Floor", "Ceil", "Round", "Cast"),
    }
)
"""Kinds whose result has no negative element if operand 0 has none."""
_KEEPS_SIGNS = frozenset({"Concat", "Add", "Mul", "Div", "Max", "Min", "Sum", "Mean"})
"""Kinds whose result has no negative element if no operand has one."""


def operand(op: Op, slot: int = 0) -> Value:
    """An operand that the operator requires."""
    value = op.inputs[slot]
    assert value is not None, f"{op.kind} {op.name} lacks operand {slot}"
    return value


def producer(graph: Graph, value: Value | None, kinds: Collection[str], *, alone: bool = False) -> Op | None:
    """The op that computes ``value`` if its kind is in ``kinds``, else None. ``alone``: the value must have a single use."""
    op = None if value is None else graph.op(value)
    if value is None or op is None or op.kind not in kinds or (alone and graph.sole_user(value) is None):
        return None
    return op


def resized_picture(graph: Graph, value: Value) -> Op | None:
    """The Resize of 8-bit pictures whose result, or a crop of it, is ``value``; each op is the only reader of the previous one."""
    crop = producer(graph, value, {"Slice"}, alone=True)
    found = producer(graph, operand(crop) if crop is not None else value, {"Resize"}, alone=True)
    cast = None if found is None else producer(graph, operand(found), {"Cast"}, alone=True)
    return found if cast is not None and graph.type(operand(cast)).dtype.kind == "u" else None


def shape_of(graph: Graph, value: Value | None) -> Shape | None:
    """The shape of a value; None if the value is absent or its rank is unknown."""
    return None if value is None else graph.type(value).shape


def sizes_of(graph: Graph, value: Value) -> tuple[int, ...] | None:
    """The shape of a value as plain integers; None if a size is not known."""
    t = graph.type(value)
    return t.static_shape if t.is_static else None


def heads_sizes(graph: Graph, op: Op) -> list[tuple[int, ...]] | None:
    """The shapes of an attention's queries, keys and values as plain integers; None unless each has four axes of known sizes."""
    found: list[tuple[int, ...]] = []
    for slot in range(3):
        sizes = sizes_of(graph, operand(op, slot))
        if sizes is None or len(sizes) != 4:
            return None
        found.append(sizes)
    return found


def bytes_of(graph: Graph, value: Value) -> int:
    """The size of a value in bytes; a symbolic dimension counts as its lowest value."""
    t = graph.type(value)
    return int(elements(t)) * t.dtype.itemsize


def same_shape(graph: Graph, op: Op) -> bool:
    """Whether the first result is known to have the shape of operand 0, including symbolic dimensions."""
    return op.outputs[0].type.shape is not None and shape_of(graph, op.inputs[0]) == op.outputs[0].type.shape


def depends_on_inputs(graph: Graph, value: Value) -> bool:
    """Whether a value is computed from inputs of the network. Quantized weights are not, although they are no constants."""
    return any(op.kind == "Input" for op in origins(graph, [value]))


def origins(graph: Graph, values: Iterable[Value]) -> Iterator[Op]:
    """Every operator that ``values`` depend on, including their producers, each once."""
    waiting, seen = [v.op for v in values], set[int]()
    while waiting:
        at = waiting.pop()
        if at not in seen:
            seen.add(at)
            yield (op := graph.op(at))
            waiting += [v.op for v in op.inputs if v is not None]


def is_pointwise(op: Op) -> bool:
    """Whether an op computes each element of its one result by itself."""
    return op.pointwise and len(op.outputs) == 1


def pads_image(op: Op) -> bool:
    """Whether an op is a convolution that pads its image."""
    return op.kind == "Conv" and (any(op.attrs.pads) or op.attrs.auto_pad.startswith("SAME"))


def is_depthwise(graph: Graph, op: Op) -> bool:
    """Whether ``op`` is a convolution of several channels with one constant filter per channel."""
    weight = graph.constant_value(op.input(1)) if op.kind == "Conv" else None
    return weight is not None and weight.shape[1] == 1 and 1 < op.attrs.group == weight.shape[0]


def is_filled(value: Known | None, number: float) -> bool:
    """Whether ``value`` is a known, non-empty array in which every element is ``number``."""
    return value is not None and value.dtype != object and value.size > 0 and bool(np.all(value == number))


def scalar(graph: Graph, value: Value | None) -> float | None:
    """The value of a constant with one element, as a float; None for anything else."""
    array = graph.constant_value(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def ints(graph: Graph, value: Value | None) -> tuple[int, ...] | None:
    """The elements of a known integer tensor; None if it is absent, unknown or symbolic."""
    known = graph.known(value)
    if known is None or any(isinstance(v, Dim) for v in known.reshape(-1)):
        return None
    return tuple(int(v) for v in known.reshape(-1))


def reduction_axes(graph: Graph, op: Op) -> tuple[int, ...] | None:
    """The axes of a reduction, counted from the front; None if they are not known."""
    shape = shape_of(graph, operand(op))
    given = () if op.input(1) is None else ints(graph, op.input(1))
    return None if shape is None or given is None else reduced_axes(op.attrs, given, len(shape))


def non_negative(graph: Graph, value: Value, depth: int = _DEPTH) -> bool:
    """Whether at most ``depth`` operators before ``value`` prove that none of its elements is negative (NaN aside)."""
    op = graph.op(value)
    if op.kind == "Constant":
        array: Array = op.attrs.value
        return bool(is_float(array.dtype)) and not bool(np.any(array.astype(FP64) < 0))
    if depth == 0 or not is_float(graph.type(value).dtype):
        return False
    epilogue = getattr(op.attrs, "epilogue", ())
    if epilogue:
        return bool(epilogue[-1].kind in _NON_NEGATIVE)
    if op.kind in _NON_NEGATIVE:
        return True
    if op.kind == "Clip":
        low = scalar(graph, op.input(1))
        return low is not None and low >= 0
    if op.kind == "Mul" and op.inputs[0] == op.inputs[1]:
        return True
    sources: Sequence[Value | None]
    if op.kind == "Pad":
        filler = op.input(2)
        sources = (op.inputs[0],) if op.attrs.mode != "constant" or filler is None else (op.inputs[0], filler)
    elif op.kind in _KEEPS_SIGN:
        sources = op.inputs[:1]
    elif op.kind in _KEEPS_SIGNS:
        sources = op.inputs
    else:
        return False
    return all(v is not None and non_negative(graph, v, depth - 1) for v in sources)


HEADS_FIRST = (0, 2, 1, 3)
"""The permutation that exchanges positions and heads: (B, S, H, D) -> (B, H, S, D), or back."""


def channels_to_last(rank: int) -> tuple[int, ...]:
    """The permutation that puts the second axis last: (N, C, ...) -> (N, ..., C)."""
    return (0, *range(2, rank), 1)


def exchange_last(rank: int) -> tuple[int, ...]:
    """The permutation that exchanges the last two axes."""
    return (*range(rank - 2), rank - 1, rank - 2)


def channels_from_last(rank: int) -> tuple[int, ...]:
    """The permutation that makes the last axis the second: (N, ..., C) -> (N, C, ...)."""
    return (0, rank - 1, *range(1, rank - 1))


def reshape_target(before: Shape, after: Shape) -> tuple[int, ...] | None:
    """A constant target with which ONNX Reshape (``allowzero`` off) turns ``before`` into ``after``.

    0 copies a symbolic dimension that keeps its axis; one -1 stands for another symbolic dimension. None if two would be needed, if
    a dimension is 0, which a target would read as "copy", or if a copied dimension may be 0 next to a -1, which is then undefined.
    """
    target = _target(before, after)
    if target is not None and -1 in target and any(not n and may_be_0(d) for d, n in zip(after, target, strict=True)):
        return None
    return target


def may_be_0(d: DimLike) -> bool:
    """Whether a dimension may be 0. Sizes without a range are taken to be positive: few networks run without elements."""
    if isinstance(d, int):
        return d == 0
    positive: dict[str, DimLike] = {s.name: symbol(s.name, 1) for s in d.symbols() if (s.lo, s.hi) == (0, INF)}
    return bounds(substitute(d, positive))[0] < 1


def _target(before: Shape, after: Shape) -> tuple[int, ...] | None:
    """:func:`reshape_target`, also where a copied dimension may be 0."""
    target: list[int] = []
    for i, d in enumerate(after):
        if isinstance(d, int):
            if d == 0:
                return None
            target.append(d)
        elif i < len(before) and before[i] == d:
            target.append(0)
        elif -1 in target:
            return None
        else:
            target.append(-1)
    return tuple(target)


def reshaped(patch: Patch, x: Value, target: tuple[int, ...], src: frozenset[str] | None = None) -> Value:
    """Add a Reshape to a constant target. A 0 copies the dimension. Where that would make elements that ``x`` does not have, it is
    a size."""
    attrs = ReshapeAttrs(allowzero=_has_sizes_of_0(patch.type(x).dims, target))
    return patch.add("Reshape", [x, integers(patch, target, "shape")], attrs, src=src)


def _has_sizes_of_0(given: Sequence[DimLike], target: tuple[int, ...]) -> bool:
    if 0 not in given or 0 not in target or -1 in target:
        return False
    beyond = 0 in target[len(given) :]
    return beyond or all(d != 0 for d, n in zip(given, target, strict=False) if n == 0)


def in_shape(patch: Patch, x: Value, shape: Shape, src: frozenset[str] | None = None) -> Value:
    """Add a Reshape to ``shape``. A constant target must be able to express it."""
    sizes = tuple(d for d in shape if isinstance(d, int))
    if 0 in sizes and len(sizes) == len(shape):
        return patch.add("Reshape", [x, integers(patch, sizes, "shape")], ReshapeAttrs(allowzero=True), src=src)
    target = _target(patch.type(x).dims, shape)
    assert target is not None, "no constant target can express the shape"
    return reshaped(patch, x, target, src)


def split_along(patch: Patch, x: Value, axis: int, sizes: Sequence[int], name: str = "sizes") -> list[Value]:
    """Add a Split of ``x`` into parts of these sizes along an axis, and return the parts."""
    return list(patch.add_op("Split", [x, integers(patch, sizes, name)], SplitAttrs(axis), outputs=len(sizes)).values)


def zeros_around(graph: Graph, op: Op) -> list[int] | None:
    """How many zeros a Pad adds before each axis, then after each; None if it does not pad with zeros, or crops."""
    rank = len(op.outputs[0].type.dims)
    pads = ints(graph, op.input(1))
    axes = tuple(range(rank)) if op.input(3) is None else ints(graph, op.input(3))
    filler = 0.0 if op.input(2) is None else scalar(graph, op.input(2))
    if pads is None or axes is None or filler != 0 or op.attrs.mode != "constant" or min(pads, default=0) < 0:
        return None
    found = [0] * (2 * rank)
    for k, axis in enumerate(axes):
        found[normalize_axis(axis, rank)] = pads[k]
        found[rank + normalize_axis(axis, rank)] = pads[len(axes) + k]
    return found


def integers(patch: Patch, numbers: Sequence[int], name: str) -> Value:
    """Add a constant int64 vector."""
    return patch.constant(np.asarray(numbers, np.int64), name)


def slice_limits(graph: Graph, op: Op) -> list[tuple[int, int, int, int]] | None:
    """(axis, start, end, step) for each axis that a Slice names, as its operands have them; None if one of them is not constant."""
    starts, ends, rank = ints(graph, op.input(1)), ints(graph, op.input(2)), graph.type(operand(op)).rank
    if starts is None or ends is None or rank is None:
        return None
    axes = range(len(starts)) if op.input(3) is None else ints(graph, op.input(3))
    steps = (1,) * len(starts) if op.input(4) is None else ints(graph, op.input(4))
    if axes is None or steps is None:
        return None
    return list(zip((normalize_axis(axis, rank) for axis in axes), starts, ends, steps, strict=True))


def sliced(patch: Patch, x: Value, begin: int, end: int, axis: int) -> Value:
    """Add a Slice of one axis."""
    return patch.add("Slice", [x, *(integers(patch, [n], "limit") for n in (begin, end, axis))])


def with_rank(array: Array, rank: int) -> Array:
    """``array`` with leading axes of size 1 up to ``rank``."""
    return array.reshape((1,) * (rank - array.ndim) + array.shape)


def set_operand(graph: Graph, use: Use, value: Value) -> None:
    """Replace one operand of an op by another value."""
    user = graph.op(use.op)
    graph.set_op(replace(user, inputs=tuple(value if i == use.slot else v for i, v in enumerate(user.inputs))))
