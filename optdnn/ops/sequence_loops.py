"""Import of loops that carry sequences of tensors: they stack results instead, or are unrolled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optdnn.ops.base import Unsupported
from optdnn.ops.bodies import LoopAttrs, build_body, symbols
from optdnn.ops.checks import emit
from optdnn.ops.exchange import Emit, NodeSpec, Ref, Subgraph
from optdnn.ops.index import SplitAttrs
from optdnn.ops.sequences import Stack, TensorList
from optdnn.types import BOOL, INT64, TensorType

MOST_WRITTEN_OUT = 512
"""The most nodes for which a Loop is unrolled although it could stack results instead."""
MOST_UNROLLED = 8192
"""The most nodes for which a Loop with other states is unrolled."""
MOST_REPEATED = 4096
"""The most iterations of a Loop that carries sequences of tensors."""


def import_sequence_loop(node: NodeSpec, e: Emit, body: Subgraph, initial: list[Ref]) -> Sequence[Ref]:
    """A Loop with sequences among its initial values. Raises Unsupported."""
    return _appended(node, e, body, initial) or _stacks(node, e, body, initial) or _repeated(node, e, body, initial)


def _appended(node: NodeSpec, e: Emit, body: Subgraph, initial: list[Ref]) -> Sequence[Ref] | None:
    """A Loop that only appends to sequences, as a Loop that stacks its results, and the sequences as the rows of the stacks.

    None for other loops, and for loops that become few nodes when they are unrolled.
    """
    found = body.stacking([node.input(0), node.input(1), *initial])
    if found is None or body.repeats(found.trips, MOST_WRITTEN_OUT):
        return None
    lists = [v for v in initial if isinstance(v, TensorList)]
    rows = found.body.outputs[len(found.body.outputs) - len(lists) :]
    if not all(t.is_static for t in rows):
        return None
    trips = e.const(np.array(found.trips, np.int64))
    made = e.op("Loop", [trips, None, *found.captured], LoopAttrs(found.body, 0), outputs=len(found.body.outputs) - 1)
    stacks = made[len(made) - len(lists) :]
    parts = iter([TensorList(_rows(e, v, found.trips, t)) for v, t in zip(stacks, rows, strict=True)])
    last = iter([e.const(v) for v in found.last])
    return [*(next(parts if isinstance(v, TensorList) else last) for v in initial), *made[: len(made) - len(lists)]]


def _stacks(node: NodeSpec, e: Emit, body: Subgraph, initial: list[Ref]) -> Sequence[Ref] | None:
    """A Loop that only appends to sequences, as a Loop that stacks its results.

    Its trip count follows from data or from a symbolic size; or it has more nodes than are unrolled. None for other loops, and
    if the tensors of two iterations may differ in shape.
    """
    trips = None if node.input(0) is None else _number(e, node.inputs[0])
    if node.input(0) is None or (trips is not None and body.repeats(trips, MOST_UNROLLED)):
        return None
    plain = body.appending([node.input(0), node.input(1), *initial])
    carried = [v for v in initial if not isinstance(v, TensorList)]
    counter, flag = TensorType(INT64, ()), TensorType(BOOL, ())
    if plain is None or (trips is not None and not plain.builds([counter, flag, *(e.type(v) for v in carried)])):
        return None
    built, captured = build_body(plain, [counter, flag], [e.type(v) for v in carried], [], 1)
    first = len(built.outputs) - (len(initial) - len(carried))
    outside = symbols([e.type(v) for v in captured])
    if any(t.shape is None or symbols([t]) - outside for t in built.outputs[first:]):
        return None
    operands = [node.input(0), node.input(1), *carried, *captured]
    made = e.op("Loop", operands, LoopAttrs(built, len(carried)), outputs=len(built.outputs) - 1)
    lists, last = (_parts(e, v, trips) for v in made[first - 1 :]), iter(made[: len(carried)])
    return [*(next(lists if isinstance(v, TensorList) else last) for v in initial), *made[len(carried) : first - 1]]


def _parts(e: Emit, stack: Ref, trips: int | None) -> TensorList:
    """The sequence of the tensors of a stack. ``trips``: the most iterations. All of them run if the stack has as many rows."""
    dims = e.type(stack).dims
    if trips is None or dims[0] != trips or not all(isinstance(n, int) for n in dims):
        return Stack([stack])
    return TensorList(_rows(e, stack, trips, replace(e.type(stack), shape=dims[1:])))


def _number(e: Emit, ref: Ref) -> int | None:
    """The number that a ref holds; None if it is unknown or symbolic."""
    known = e.value(ref)
    return None if known is None or known.dtype == object else int(known.reshape(-1)[0])


def _rows(e: Emit, stack: Ref, trips: int, row: TensorType) -> Sequence[Ref]:
    """The ``trips`` tensors of a stack."""
    dims = row.static_shape
    if not dims:
        parts = e.op("Split", [stack, np.ones(trips, np.int64)], SplitAttrs(0), outputs=trips)
        return [emit(e, "Squeeze", part, np.array([0])) for part in parts]
    joined = emit(e, "Reshape", stack, np.array([trips * dims[0], *dims[1:]], np.int64))
    return e.op("Split", [joined, np.full(trips, dims[0], np.int64)], SplitAttrs(0), outputs=trips)


def _repeated(node: NodeSpec, e: Emit, body: Subgraph, state: list[Ref]) -> Sequence[Ref]:
    """A Loop that carries sequences of tensors, unrolled; the number of iterations must be known."""
    most = None if node.input(0) is None else _number(e, node.inputs[0])
    if node.input(0) is not None and most is None:
        raise Unsupported(
            "a Loop that carries a sequence of tensors must have a constant number of iterations: give the inputs a shape (--shape)"
        )
    go_on: Ref = e.const(np.array(True)) if node.input(1) is None else node.inputs[1]
    rows: list[list[Ref]] = [[] for _ in range(body.outputs - 1 - len(state))]
    count = 0
    while most is None or count < most:
        known = _number(e, go_on)
        if known is None:
            raise Unsupported("a Loop that carries a sequence of tensors must have a condition that is known")
        if not known:
            break
        if count == MOST_REPEATED:
            raise Unsupported(f"a Loop that carries a sequence of tensors has more than {MOST_REPEATED} iterations")
        go_on, *made = body.inline([e.const(np.array(count)), go_on, *state])
        state = made[: len(state)]
        for row, value in zip(rows, made[len(state) :], strict=True):
            row.append(emit(e, "Unsqueeze", value, np.array([0])))
        count += 1
    if rows and not count:
        raise Unsupported("a Loop that carries a sequence of tensors and has results of no iteration")
    return [*state, *(emit(e, "Concat", *row, axis=0) for row in rows)]
