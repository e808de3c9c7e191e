"""The rules of tensor parallelism: the parts of its operands that an operator needs for a part of its result.

A rank holds a part of a tensor (:mod:`optdnn.passes.support.tensor_parts`): some indices along one axis. A rule returns the parts
of the operands, and the attributes and constants that change. It raises :class:`Whole` if the operator needs whole operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op
from optdnn.ops.attention import SINKS
from optdnn.ops.packed_layout import blocks_of, row_bytes
from optdnn.ops.reduce import reduced_axes
from optdnn.passes.support.facts import NORMS, RESHAPES, depends_on_inputs, ints, operand
from optdnn.passes.support.tensor_parts import Asked, Needed, Part, Whole, coarse, viewed
from optdnn.types import Array, normalize_axis

PRODUCTS = ("MatMul", "Gemm", "PackedMatMul")
"""Products whose second factor may be a matrix of weights."""


def needed(graph: Graph, op: Op, parts: Mapping[int, Part]) -> Needed:
    """The operand parts that ``op`` needs for ``parts`` (output number -> part) of its results. Raises Whole."""
    asked = Asked(graph, op, parts)
    rule = RULES.get(op.kind, _pointwise if op.definition.traits.pointwise else None)
    if rule is None:
        raise Whole(f"{op.kind} {op.name!r} needs whole operands")
    return rule(asked)


# ---------------------------------------------------------------- rules


def _pointwise(q: Asked) -> Needed:
    found = Needed()
    for slot in range(len(q.op.inputs)):
        found.operands |= q.aligned(slot)
    return found


def _rows(q: Asked) -> Needed:
    """Softmax and norms: they must run over other axes than the split one."""
    axis = normalize_axis(q.op.attrs.axis, len(q.dims(0)))
    if q.axis == axis or (q.op.kind in NORMS and q.axis > axis):
        raise Whole(f"{q.op.kind} {q.op.name!r} runs over the axis that would be split")
    return Needed({0: q.part})


def _reduction(q: Asked) -> Needed:
    rank, axes = len(q.dims(0)), None
    if q.op.input(1) is not None:
        axes = ints(q.graph, q.op.input(1))
        if axes is None:
            raise Whole(f"the axes of {q.op.kind} {q.op.name!r} are computed")
    over = reduced_axes(q.op.attrs, axes, rank)
    kept = [a for a in range(rank) if q.op.attrs.keepdims or a not in over]
    if kept[q.axis] in over:
        raise Whole(f"{q.op.kind} {q.op.name!r} runs over the axis that would be split")
    return Needed({0: Part(kept[q.axis], q.part.take)})


def _transpose(q: Asked) -> Needed:
    perm = q.op.attrs.perm or tuple(reversed(range(len(q.out))))
    return Needed({0: Part(perm[q.axis], q.part.take)})


def _view(q: Asked) -> Needed:
    found = Needed({0: viewed(q.dims(0), q.out, q.part)})
    if q.op.kind == "Reshape":
        _resized(q, found)
    return found


def _resized(q: Asked, found: Needed) -> None:
    """Adapt operand 1, which holds the shape of the result, to the shape of the part."""
    known = q.graph.known(q.op.input(1))
    if known is None:
        raise Whole(f"the shape of {q.op.kind} {q.op.name!r} is computed from data")
    flat = known.reshape(-1)
    at = q.axis - (len(q.out) - len(flat))
    if at < 0 or not isinstance(flat[at], (int, np.integer)):
        raise Whole(f"the shape of {q.op.kind} {q.op.name!r} is computed")
    if flat[at] <= 0:
        return  # -1 or 0: the operator finds the size itself
    if known.dtype == object:
        by = np.ones(len(flat), np.int64)
        by[at] = int(flat[at]) // q.part.size
        found.divided[1] = by
        return
    shape = flat.copy()
    shape[at] = q.part.size
    found.constants[1] = shape


def _expand(q: Asked) -> Needed:
    found = Needed(q.aligned(0))
    _resized(q, found)
    return found


def _gather(q: Asked) -> Needed:
    axis, rank = normalize_axis(q.op.attrs.axis, len(q.dims(0))), len(q.dims(1))
    if axis <= q.axis < axis + rank:
        return Needed({1: Part(q.axis - axis, q.part.take)})
    return Needed({0: q.part if q.axis < axis else Part(q.axis - rank + 1, q.part.take)})


def _slice(q: Asked) -> Needed:
    count = len(q.graph.type(operand(q.op, 1)).dims)
    axes = ints(q.graph, q.op.input(3)) if q.op.input(3) is not None else tuple(range(int(q.dims(1)[0])))  # type: ignore[arg-type]
    if axes is None or len(axes) > len(q.out) or count != 1:
        raise Whole(f"the axes of Slice {q.op.name!r} are computed")
    if q.axis in [normalize_axis(a, len(q.out)) for a in axes] and q.dims(0)[q.axis] != q.out[q.axis]:
        raise Whole(f"Slice {q.op.name!r} cuts the axis that would be split")
    return Needed({0: q.part})


def _concat(q: Asked) -> Needed:
    if normalize_axis(q.op.attrs.axis, len(q.out)) == q.axis:
        raise Whole(f"Concat {q.op.name!r} is along the axis that would be split")
    return Needed(dict.fromkeys(range(len(q.op.inputs)), q.part))


def _split(q: Asked) -> Needed:
    axis = normalize_axis(q.op.attrs.axis, len(q.dims(0)))
    everywhere = range(len(q.op.outputs))
    if q.axis != axis:
        return Needed({0: q.part}, dict.fromkeys(everywhere, q.part))
    if set(q.parts) != set(everywhere):
        raise Whole(f"Split {q.op.name!r} has results that are not split")
    if any(p.axis != axis for p in q.parts.values()):
        raise Whole(f"the results of Split {q.op.name!r} would be split along different axes")
    found, indices, begin = Needed(), [], 0
    for port in everywhere:
        indices.append(q.parts[port].take + begin)
        begin += int(q.op.outputs[port].type.dims[axis])  # type: ignore[arg-type]
    found.operands[0] = Part(axis, np.concatenate(indices))
    if q.op.input(1) is not None:
        found.constants[1] = np.array([q.parts[port].size for port in everywhere], np.int64)
    elif len({q.parts[port].size for port in everywhere}) != 1:
        raise Whole(f"the parts of Split {q.op.name!r} would differ in size")
    return found


def _matmul(q: Asked) -> Needed:
    left, right, rank = q.dims(0), q.dims(1), len(q.out)
    if min(len(left), len(right)) < 2:
        raise Whole(f"MatMul {q.op.name!r} has a vector")
    from_end = rank - q.axis
    if from_end == 1:
        return Needed({1: Part(len(right) - 1, q.part.take)})
    if from_end == 2:
        return Needed({0: Part(len(left) - 2, q.part.take)})
    return Needed({**q.aligned(0), **q.aligned(1)})


def _gemm(q: Asked) -> Needed:
    a = q.op.attrs
    if q.axis == 0:
        return Needed({0: Part(int(a.transA), q.part.take), **q.aligned(2)})
    return Needed({1: Part(0 if a.transB else 1, q.part.take), **q.aligned(2)})


def _packed(q: Asked) -> Needed:
    """A PackedMatMul, whose weights have one row per output."""
    if q.axis != len(q.out) - 1:
        found = Needed({0: q.part})
    else:
        rows = (
            q.part.take
            if q.op.attrs.block_rows == 1
            else coarse(q.part.take, q.op.attrs.block_rows, "rows of one scale")
        )
        scales = {slot: Part(0, rows) for slot in (2, 3) if q.op.input(slot) is not None}
        found = Needed({1: Part(0, q.part.take), **scales})
    for slot in range(4, len(q.op.inputs)):  # operands of the epilogue
        found.operands |= q.aligned(slot)
    return found


def rows_of(graph: Graph, op: Op, take: Array) -> Needed:
    """The operand parts of a product that multiplies only the features ``take``. Raises Whole.

    If the product may round rows, the scale of a part is at most that of the whole row, so the rounding error does not grow."""
    last = len(graph.type(operand(op, 0)).dims) - 1
    if op.kind != "PackedMatMul":
        return Needed({0: Part(last, take), 1: Part(int(op.kind == "Gemm" and op.attrs.transB), take)})
    a = op.attrs
    if a.epilogue or a.prologue or a.block_size == a.K:
        raise Whole("its packed weights have a bias, or one scale for all features")
    blocks = coarse(take, a.block_size, "a block of packed weights")
    block_bytes = row_bytes(a.code, a.K, a.block_size) // blocks_of(a.K, a.block_size)
    columns = (blocks[:, None] * block_bytes + np.arange(block_bytes)).reshape(-1)
    scales = {slot: Part(1, blocks) for slot in (2, 3) if op.input(slot) is not None}
    return Needed({0: Part(last, take), 1: Part(1, columns), **scales}, attrs=replace(a, K=len(take)))


def matrix_of(graph: Graph, op: Op) -> tuple[int, int] | None:
    """The numbers of input features and of results per row of a product with a matrix of weights; None for any other operator."""
    if op.kind not in PRODUCTS or not graph.type(operand(op, 0)).dims:
        return None
    w = graph.type(operand(op, 1))
    if not w.is_static or len(w.dims) != 2 or depends_on_inputs(graph, operand(op, 1)):
        return None
    rows, columns = w.static_shape
    if op.kind == "PackedMatMul":
        return int(op.attrs.K), rows
    if op.kind == "Gemm" and op.attrs.transA:
        return None
    return (columns, rows) if op.kind == "Gemm" and op.attrs.transB else (rows, columns)


def _dequantize(q: Asked) -> Needed:
    axis, block = normalize_axis(q.op.attrs.axis, len(q.out)), q.op.attrs.block_size
    found = Needed({0: q.part})
    for slot in (1, 2):
        if q.op.input(slot) is None or not q.dims(slot):
            continue
        dims = q.dims(slot)
        if len(dims) == 1 and len(q.out) > 1:
            found.operands |= {slot: Part(0, q.part.take)} if q.axis == axis and dims[0] != 1 else {}
        elif q.axis == axis and block:
            found.operands[slot] = Part(axis, coarse(q.part.take, block, "blocks of quantized weights"))
        else:
            found.operands |= q.aligned(slot)
    return found


def _attention(q: Asked) -> Needed:
    if q.axis == 0 and 0 in q.parts:
        slots = [s for s in range(len(q.op.inputs)) if s not in (3, SINKS) and q.op.input(s) is not None]
        found = Needed(dict.fromkeys(slots, q.part), dict.fromkeys((1, 2, 3), q.part))
        found.operands |= q.aligned(3)
        return found
    if q.axis != 1 or 0 not in q.parts:
        raise Whole(f"Attention {q.op.name!r} splits only by samples and heads")
    heads, groups = q.dims(0)[1], q.dims(1)[1]
    if not isinstance(heads, int) or not isinstance(groups, int):
        raise Whole(f"the heads of Attention {q.op.name!r} are not known")
    shared = Part(1, coarse(q.part.take, heads // groups, "a group of query heads"))
    found = Needed({0: q.part, 1: shared, 2: shared}, {1: shared, 2: shared, 3: q.part})
    found.operands |= {slot: shared for slot in (4, 5) if q.op.input(slot) is not None}
    found.operands |= {SINKS: Part(0, q.part.take)} if q.op.input(SINKS) is not None else {}
    found.operands |= q.aligned(3)
    return found


def _first(axes: Callable[[Asked], Sequence[int]]) -> Callable[[Asked], Needed]:
    """The rule of an operator that runs over some axes and keeps the shape of its first operand."""

    def rule(q: Asked) -> Needed:
        if q.axis in [normalize_axis(a, len(q.out)) for a in axes(q)]:
            raise Whole(f"{q.op.kind} {q.op.name!r} runs over the axis that would be split")
        return Needed({0: q.part})

    return rule


def _rotary(q: Asked) -> Needed:
    if q.axis not in (0, 1):
        raise Whole(f"RotaryEmbedding {q.op.name!r} splits only by samples and heads")
    angles = {s: q.part for s in (1, 2) if q.axis == 0 and q.dims(s)[0] == q.out[0] != 1}
    return Needed({0: q.part, **angles})


def _scatter(q: Asked) -> Needed:
    if q.axis == normalize_axis(q.op.attrs.axis, len(q.out)):
        raise Whole(f"TensorScatter {q.op.name!r} writes along the axis that would be split")
    at = {2: q.part} if q.axis == 0 and q.op.input(2) is not None else {}
    return Needed({0: q.part, 1: q.part, **at})


def _samples(q: Asked) -> Needed:
    if q.axis != 0:
        raise Whole(f"{q.op.kind} {q.op.name!r} splits only by samples")
    return Needed({0: q.part})


RULES: Mapping[str, Callable[[Asked], Needed]] = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "LpNormalization", *NORMS), _rows),
    **dict.fromkeys(
        ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL2", "ReduceProd"), _reduction
    ),
    **dict.fromkeys(RESHAPES, _view),
    "Transpose": _transpose,
    "Expand": _expand,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": _concat,
    "Split": _split,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "PackedMatMul": _packed,
    "DequantizeLinear": _dequantize,
    "Attention": _attention,
    "RotaryEmbedding": _rotary,
    "TensorScatter": _scatter,
    **dict.fromkeys(
        ("Conv", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "BatchNormalization"), _samples
    ),
    "Trilu": _first(lambda q: (-2, -1)),
}
"""Kind -> its rule. Pointwise kinds need no entry."""
