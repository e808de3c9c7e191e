"""Sequences of tensors with a length that is known at import.

No graph holds a sequence: it is a :class:`TensorList` of values, and its operators pick, join and split these. That covers the
operators that exporters write for lists of tensors (``split``, ``chunk``, ``unbind``). A Loop that carries a sequence is unrolled.
A Loop that only appends to it, an unknown number of times, makes a :class:`Stack`, as does a split into single elements along an
axis of unknown size. Sequences that a Scan carries, and sequences that are inputs or outputs of the model, are refused. An optional
value is its element; one without an element is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optdnn.dim import Dim, floordiv
from optdnn.errors import ShapeError
from optdnn.ops.base import Unsupported
from optdnn.ops.bodies import ScanAttrs, build_body, subgraph, symbols
from optdnn.ops.checks import emit, required
from optdnn.ops.exchange import Emit, FromOnnx, NodeSpec, Ref, Subgraph, normalized_axis
from optdnn.ops.index import SplitAttrs

MOST = 4096
"""The most tensors that one node may split another into."""


class TensorList(tuple[Ref, ...]):
    """The values in a sequence."""


class Stack(TensorList):
    """A sequence of an unknown number of tensors of one shape. Its only value holds them all, stacked along the first axis."""


def _sequence(node: NodeSpec) -> TensorList:
    found = node.input(0)
    if not isinstance(found, TensorList):
        raise ShapeError("its first operand is not a sequence")
    return found


def _list(node: NodeSpec) -> TensorList:
    found = _sequence(node)
    if isinstance(found, Stack):
        raise Unsupported("the number of tensors in its sequence is not known: give the inputs a shape (--shape)")
    return found


def _position(node: NodeSpec, e: Emit, slot: int, length: int, last: int) -> int:
    """The position in a sequence of ``length`` that operand ``slot`` gives, at most ``last``; ``last`` without the operand."""
    ref = node.input(slot)
    if ref is None:
        return last
    known = e.value(ref)
    if known is None or known.size != 1 or not isinstance(at := known.reshape(-1).tolist()[0], int):
        raise Unsupported("the position in a sequence has to be a constant")
    place = at + length if at < 0 else at
    if not 0 <= place <= last:
        raise ShapeError(f"position {at} is outside of a sequence of {length} tensors")
    return place


def _construct(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    return [TensorList(node.inputs)]


def _at(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    held = _sequence(node)
    if isinstance(held, Stack):
        return [emit(e, "Gather", held[0], node.inputs[1], axis=0)]
    if e.value(node.inputs[1]) is None and _alike(e, held):
        rows = [emit(e, "Unsqueeze", x, np.array([0], np.int64)) for x in held]
        return [emit(e, "Gather", emit(e, "Concat", *rows, axis=0), node.inputs[1], axis=0)]
    return [held[_position(node, e, 1, len(held), len(held) - 1)]]


def _alike(e: Emit, held: TensorList) -> bool:
    """Whether the tensors have the same type and known shape, so that one may be picked at run time."""
    types = [e.type(x) for x in held]
    return bool(types) and types[0].shape is not None and all(t == types[0] for t in types)


def _erase(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    held = _list(node)
    at = _position(node, e, 1, len(held), len(held) - 1)
    if not held:
        raise ShapeError("nothing is erased: the sequence is empty")
    return [TensorList((*held[:at], *held[at + 1 :]))]


def _insert(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    held = _list(node)
    at = _position(node, e, 2, len(held), len(held))
    return [TensorList((*held[:at], node.input(1), *held[at:]))]


def _length(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    held = _sequence(node)
    if isinstance(held, Stack):
        return [emit(e, "Gather", emit(e, "Shape", held[0]), np.array(0, np.int64), axis=0)]
    return [e.const(np.array(len(held), np.int64))]


def _concat(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    held, axis = _sequence(node), int(required(node, "axis"))
    if isinstance(held, Stack):
        return [_unstacked(e, held[0], axis, bool(node.get("new_axis", 0)))]
    if not held:
        raise ShapeError("nothing is joined: the sequence is empty")
    if node.get("new_axis", 0):
        rank = e.type(held[0]).rank
        if rank is None:
            raise Unsupported("the rank of its tensors is not known")
        at = np.array([axis % (rank + 1)], np.int64)
        held = TensorList(emit(e, "Unsqueeze", x, at) for x in held)
    return [emit(e, "Concat", *held, axis=axis)]


def _unstacked(e: Emit, stack: Ref, axis: int, new_axis: bool) -> Ref:
    """The tensors along the first axis of ``stack``, joined along an existing axis, or along a new one."""
    rank = len(e.type(stack).dims)
    at = axis % (rank if new_axis else rank - 1)
    order = [*range(1, at + 1), 0, *range(at + 1, rank)]
    turned = emit(e, "Transpose", stack, perm=order) if at else stack
    if new_axis:
        return turned
    sizes, cuts = emit(e, "Shape", turned), (0, at, at + 1, at + 2, rank)
    parts = [emit(e, "Slice", sizes, *(np.array([n], np.int64) for n in cuts[i : i + 2])) for i in range(4)]
    shape = emit(e, "Concat", parts[0], emit(e, "Mul", *parts[1:3]), parts[3], axis=0)
    return emit(e, "Reshape", turned, shape, allowzero=True)


def _split(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    x, axis = node.input(0), normalized_axis(node, e, 0)
    shape = e.type(x).shape
    size = None if shape is None else shape[axis]
    if isinstance(size, Dim) and _step(node, e) == 1:
        return [Stack([_ones(node, e, axis)])]
    count = _equal_parts(node, e, size)
    if count is not None and count <= MOST:
        return [TensorList(e.op("Split", [x], SplitAttrs(axis, num_outputs=count), outputs=count))]
    sizes = _sizes(node, e, size)
    if len(sizes) > MOST:
        raise Unsupported(f"it makes {len(sizes)} tensors, at most {MOST} are taken")
    parts = e.op("Split", [x, np.array(sizes, np.int64)], SplitAttrs(axis), outputs=len(sizes))
    if not _kept(node, e):
        parts = tuple(emit(e, "Squeeze", part, np.array([axis], np.int64)) for part in parts)
    return [TensorList(parts)]


def _step(node: NodeSpec, e: Emit) -> int | None:
    """The size of each part, if there is one for all of them."""
    if node.input(1) is None:
        return 1
    known = e.value(node.inputs[1])
    return None if known is None or known.ndim or not isinstance(at := known.tolist(), int) else at


def _ones(node: NodeSpec, e: Emit, axis: int) -> Ref:
    """The parts of one element along ``axis``, stacked along the first axis."""
    rank = len(e.type(node.inputs[0]).dims)
    order = [axis, *(k for k in range(rank) if k != axis)]
    stack = emit(e, "Transpose", node.inputs[0], perm=order) if axis else node.inputs[0]
    return emit(e, "Unsqueeze", stack, np.array([axis + 1], np.int64)) if _kept(node, e) else stack


def _kept(node: NodeSpec, e: Emit) -> bool:
    """Whether the parts keep the axis. ONNX says that ``keepdims`` has no effect if sizes are given. But PyTorch writes ``unbind``
    with a size of 1 and ``keepdims=0``, and ONNX Runtime removes the axis then."""
    return bool(node.get("keepdims", 1)) or _step(node, e) != 1


def _equal_parts(node: NodeSpec, e: Emit, size: object) -> int | None:
    """The number of parts if their size is symbolic and divides ``size``: ``chunk(2)`` of two batches, one after the other."""
    known = None if node.input(1) is None else e.value(node.inputs[1])
    step = None if known is None or known.ndim else known.item()
    if not isinstance(step, Dim) or not isinstance(size, Dim):
        return None
    count = floordiv(size, step)
    return count if isinstance(count, int) and count * step == size else None


def _sizes(node: NodeSpec, e: Emit, size: object) -> list[int]:
    """The sizes of the parts: given, equal except for the last, or 1."""
    known = None if node.input(1) is None else e.value(node.input(1))
    if node.input(1) is not None and (known is None or not all(isinstance(n, int) for n in known.reshape(-1).tolist())):
        raise Unsupported("the sizes that it splits into have to be constants")
    if known is not None and known.ndim:
        return [int(n) for n in known.tolist()]
    if not isinstance(size, int):
        raise Unsupported("the size that it splits has to be known: give the input a shape")
    step = 1 if known is None else int(known)
    if step <= 0 or size == 0:
        raise ShapeError(f"{size} elements cannot be split into parts of {step}")
    if size > step * MOST:
        raise Unsupported(f"it makes {-(-size // step)} tensors, at most {MOST} are taken")
    return [min(step, size - at) for at in range(0, size, step)]


def _map(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """The body, once for each position. Operands after the first are sequences too, or tensors that each position reads."""
    body, held = subgraph(node, "body"), _sequence(node)
    if body.inputs != len(node.inputs):
        raise ShapeError(f"its body takes {body.inputs} values, {len(node.inputs)} are fed")
    if all(isinstance(v, Stack) for v in node.inputs):
        return _scanned(node, e, body)
    held = _list(node)
    for other in node.inputs[1:]:
        if isinstance(other, Stack):
            raise Unsupported(
                "the number of tensors in one of its sequences is not known: give the inputs a shape (--shape)"
            )
        if isinstance(other, TensorList) and len(other) != len(held):
            raise ShapeError(f"it maps sequences of {len(held)} and of {len(other)} tensors")
    if not body.repeats(len(held), MOST):
        raise Unsupported(f"its body is repeated {len(held)} times, which makes too many nodes")
    rows = [body.inline([v[i] if isinstance(v, TensorList) else v for v in node.inputs]) for i in range(len(held))]
    if any(isinstance(made, TensorList) for row in rows for made in row):
        raise Unsupported("its body yields a sequence of tensors")
    return [TensorList(row[k] for row in rows) for k in range(body.outputs)]


def _scanned(node: NodeSpec, e: Emit, body: Subgraph) -> Sequence[Ref]:
    """The body for each row of stacks, as a Scan without states."""
    stacks = [v[0] for v in node.inputs if isinstance(v, Stack)]
    rows = [e.type(v).with_shape(e.type(v).dims[1:]) for v in stacks]
    built, captured = build_body(body, [], [], rows, 0)
    outside = symbols([*map(e.type, captured), *rows])
    if any(t.shape is None or symbols([t]) - outside for t in built.outputs):
        raise Unsupported("the tensors of its results may have different shapes, and their number is not known")
    first, made = (0,) * len(stacks), (0,) * len(built.outputs)
    results = e.op("Scan", [*stacks, *captured], ScanAttrs(built, 0, first, first, made, made), outputs=len(made))
    return [Stack([v]) for v in results]


def _optional(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    found = node.input(0)
    if found is None:
        raise Unsupported("an optional value without an element is not a tensor")
    return [found]


def _has_element(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    return [e.const(np.array(node.input(0) is not None))]


IMPORTERS: dict[str, FromOnnx] = {
    "SequenceConstruct": _construct,
    "SequenceEmpty": _construct,
    "SequenceAt": _at,
    "SequenceErase": _erase,
    "SequenceInsert": _insert,
    "SequenceLength": _length,
    "ConcatFromSequence": _concat,
    "SequenceMap": _map,
    "SplitToSequence": _split,
    "Optional": _optional,
    "OptionalGetElement": _optional,
    "OptionalHasElement": _has_element,
}
"""ONNX operator -> its import function."""
