"""Control flow: If, Loop, Scan.

Bodies are attributes (``ops.base.Body``); the outer values that they read are operands, after the operator's own. An If
whose condition is known when the model is imported is replaced by the branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from optdnn.dim import Dim, DimLike, dim_max
from optdnn.errors import ShapeError
from optdnn.ops.base import Attrs, Body, Call, Fresh, Result, Tol, Unsupported
from optdnn.ops.checks import agree, emit, free
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, NodeSpec, Ref, Subgraph
from optdnn.ops.index import SplitAttrs
from optdnn.ops.sequences import Stack, TensorList
from optdnn.types import BOOL, INT64, TensorType, normalize_axis


@dataclass(frozen=True)
class IfAttrs(Attrs):
    """Operands: the condition, the ``then_captured`` outer values of the one branch, and those of the other."""

    then_branch: Body
    else_branch: Body
    then_captured: int


@dataclass(frozen=True)
class LoopAttrs(Attrs):
    """Operands: trip count, condition, ``carried`` initial values, captured values. Results: final values, scan outputs."""

    body: Body
    carried: int


@dataclass(frozen=True)
class ScanAttrs(Attrs):
    """Operands: ``states`` initial states, scanned inputs, captured values. A direction of 1 is backwards."""

    body: Body
    states: int
    scan_input_axes: tuple[int, ...]
    scan_input_directions: tuple[int, ...]
    scan_output_axes: tuple[int, ...]
    scan_output_directions: tuple[int, ...]


# ---------------------------------------------------------------- inference


def _symbols(types: Sequence[TensorType | None]) -> set[str]:
    found: set[str] = set()
    for t in types:
        for d in (t.shape or ()) if t is not None else ():
            if isinstance(d, Dim):
                found.update(s.name for s in d.symbols())
    return found


def _seen_outside(t: TensorType, known: set[str], fresh: Fresh) -> TensorType:
    """The outer type of a value inside of a body: sizes that are known only inside become new symbols."""
    if t.shape is None:
        return t
    inner = (bool(_symbols([TensorType(t.dtype, (d,))]) - known) for d in t.shape)
    return t.with_shape([fresh("inner", d) if new else d for d, new in zip(t.shape, inner, strict=True)])


def _check_captured(call: Call, body: Body, own: int, operands: Sequence[TensorType | None], what: str) -> None:
    wanted = body.inputs[own:]
    if len(operands) != len(wanted):
        raise ShapeError(f"{what} captures {len(wanted)} values and gets {len(operands)}")
    for given, declared in zip(operands, wanted, strict=True):
        if given is None or given.dtype != declared.dtype:
            raise ShapeError(f"{what} captures {declared} and gets {given}")


def _merge(a: TensorType, b: TensorType, fresh: Fresh, what: str) -> TensorType:
    """The type of a value that is an ``a`` or a ``b``."""
    if a.dtype != b.dtype:
        raise ShapeError(f"{what} is {a} in one branch and {b} in the other")
    if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
        return a.with_shape(None)
    pairs = zip(a.shape, b.shape, strict=True)
    return a.with_shape([x if x == y else fresh("either", dim_max(x, y)) for x, y in pairs])


def _infer_if(call: Call) -> Result:
    a: IfAttrs = call.attrs
    condition = call.type(0)
    if condition.dtype != BOOL:
        raise ShapeError(f"the condition of If is {condition}; it must be bool")
    split = 1 + a.then_captured
    _check_captured(call, a.then_branch, 0, call.types[1:split], "the then branch of If")
    _check_captured(call, a.else_branch, 0, call.types[split:], "the else branch of If")
    if len(a.then_branch.outputs) != len(a.else_branch.outputs):
        raise ShapeError("the branches of If yield different numbers of values")
    known = _symbols(call.types)
    types = [
        _merge(
            _seen_outside(t, known, call.fresh), _seen_outside(f, known, call.fresh), call.fresh, f"output {i} of If"
        )
        for i, (t, f) in enumerate(zip(a.then_branch.outputs, a.else_branch.outputs, strict=True))
    ]
    return Result(tuple(types))


def _infer_loop(call: Call) -> Result:
    a: LoopAttrs = call.attrs
    for i, name, dtype in ((0, "trip count", INT64), (1, "condition", BOOL)):
        if call.has(i) and call.type(i).dtype != dtype:
            raise ShapeError(f"the {name} of Loop is {call.type(i)}")
    n, known = 2 + a.carried, _symbols(call.types)
    _check_captured(call, a.body, n, call.types[n:], "the body of Loop")
    _check_state(call, a.body.inputs[2:n], call.types[2:n], a.body.outputs[1 : 1 + a.carried], "Loop")
    # A size about which the body knows nothing changes from one iteration to the next.
    finals = [_seen_outside(t, known, call.fresh) for t in a.body.inputs[2:n]]
    trips = call.ints(0)
    always = not call.has(1) or _true(call.value(1))
    count: DimLike = (
        trips[0] if trips and always and _ends_by_count(a.body) else call.fresh("iterations", *(trips or ())[:1])
    )
    scans = [_stacked(_seen_outside(t, known, call.fresh), count, 0) for t in a.body.outputs[1 + a.carried :]]
    return Result((*finals, *scans))


def _true(value: Any) -> bool:
    return value is not None and value.size == 1 and bool(value.reshape(-1)[0])


def _ends_by_count(body: Body) -> bool:
    """True where the body's condition is constantly true or the one it was given: only the count ends the loop."""
    plain = body.plain
    constants = plain.inputs + len(plain.constants)
    makers, register = {}, constants
    for op in plain.ops:
        makers[register] = op
        register += len(op.dtypes)
    register = plain.outputs[0]
    while register in makers and makers[register].kind in ("Identity", "Cast"):
        source = makers[register].inputs[0]
        if source is None:
            return False
        register = source
    return register == 1 or (plain.inputs <= register < constants and _true(plain.constants[register - plain.inputs]))


def _stacked(t: TensorType, count: DimLike, axis: int) -> TensorType:
    if t.shape is None:
        return t
    axis = normalize_axis(axis, len(t.shape) + 1)
    return t.with_shape((*t.shape[:axis], count, *t.shape[axis:]))


def _check_state(
    call: Call,
    declared: Sequence[TensorType],
    given: Sequence[TensorType | None],
    made: Sequence[TensorType],
    what: str,
) -> None:
    if not len(declared) == len(given) == len(made):
        raise ShapeError(f"{what} carries {len(given)} values, its body takes {len(declared)} and yields {len(made)}")
    for i, (d, g, m) in enumerate(zip(declared, given, made, strict=True)):
        if g is None or g.dtype != d.dtype or m.dtype != d.dtype:
            raise ShapeError(f"{what}: carried value {i} begins as {g}, and the body turns {d} into {m}")


def _infer_scan(call: Call) -> Result:
    a: ScanAttrs = call.attrs
    n, known = a.states + len(a.scan_input_axes), _symbols(call.types)
    _check_captured(call, a.body, n, call.types[n:], "the body of Scan")
    _check_state(call, a.body.inputs[: a.states], call.types[: a.states], a.body.outputs[: a.states], "Scan")
    length: DimLike | None = None
    for i, axis in enumerate(a.scan_input_axes):
        x = call.type(a.states + i)
        if x.shape is None:
            continue
        size = x.shape[normalize_axis(axis, len(x.shape), "Scan axis")]
        length = size if length is None else agree(length, size, "Scan: the scanned inputs have different lengths")
    count: DimLike = call.fresh("iterations") if length is None else length
    finals = [_seen_outside(t, known, call.fresh) for t in a.body.inputs[: a.states]]
    made = a.body.outputs[a.states :]
    scans = [
        _stacked(_seen_outside(t, known, call.fresh), count, axis)
        for t, axis in zip(made, a.scan_output_axes, strict=True)
    ]
    return Result((*finals, *scans))


# ---------------------------------------------------------------- import


def _import_if(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    then, other = (_subgraph(node, name) for name in ("then_branch", "else_branch"))
    condition = node.inputs[0]
    known = e.value(condition)
    if known is not None and known.size == 1 and not isinstance(known.reshape(-1)[0], Dim):
        return (then if bool(known.reshape(-1)[0]) else other).inline([])
    try:
        (one, captured), (two, more) = then.build([]), other.build([])
    except ShapeError as error:
        error.hint = error.hint or (
            "it is in a branch of an If: where inputs of these sizes never take this branch, give the input that decides a value "
            "(--value NAME=1, or values={...})"
        )
        raise
    attrs = IfAttrs(one, two, len(captured))
    return e.op("If", [condition, *captured, *more], attrs, outputs=len(node.outputs))


def _subgraph(node: NodeSpec, name: str) -> Subgraph:
    found: Subgraph = node.attrs[name]
    return found


def _build_body(
    graph: Subgraph,
    before: Sequence[TensorType],
    state: Sequence[TensorType],
    after: Sequence[TensorType],
    first: int,
    *,
    keeps_shapes: bool = False,
) -> tuple[Body, list[Ref]]:
    """The body for state types that hold in every iteration: a size that an iteration changes becomes a symbol.

    The body's inputs are ``before``, the state, ``after``; its state outputs begin at ``first``. Raises ShapeError where an
    iteration changes a type, or with ``keeps_shapes`` a shape.
    """
    types, varying = list(state), set[Dim]()
    while True:  # each round but the last turns a size into a symbol or a shape into an unknown one
        body, captured = graph.build([*before, *types, *after])
        made = body.outputs[first : first + len(types)]
        for t, m in zip(types, made, strict=False):
            if keeps_shapes and not t.agrees(m):
                raise ShapeError(f"a carried value begins as {t}, and the body turns it into {m}")
        wider = [_wider(t, m, graph, varying) for t, m in zip(types, made, strict=False)]
        if wider == types[: len(wider)]:
            return body, captured
        types[: len(wider)] = wider


def _wider(t: TensorType, made: TensorType, graph: Subgraph, varying: set[Dim]) -> TensorType:
    if t.dtype != made.dtype:
        raise ShapeError(f"a carried value begins as {t}, and the body turns it into {made}")
    if t.shape is None or made.shape is None or len(t.shape) != len(made.shape):
        return t.with_shape(None)
    dims: list[DimLike] = []
    for d, m in zip(t.shape, made.shape, strict=True):
        if d != m and d not in varying:
            d = graph.fresh()
            varying.add(d)
        dims.append(d)
    return t.with_shape(dims)


def _import_loop(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    body = _subgraph(node, "body")
    initial = list(node.inputs[2:])
    if any(v is None for v in initial):
        raise ShapeError("a carried value of Loop has no initial value")
    if body.inputs != 2 + len(initial):
        raise ShapeError(f"the body of Loop takes {body.inputs} values, 2 and {len(initial)} carried ones are fed")
    if any(isinstance(v, TensorList) for v in initial):
        return _appended(node, e, body, initial) or _stacks(node, e, body, initial) or _repeated(node, e, body, initial)
    counter, flag = TensorType(INT64, ()), TensorType(BOOL, ())
    built, captured = _build_body(body, [counter, flag], [e.type(v) for v in initial], [], 1)
    attrs = LoopAttrs(built, len(initial))
    return e.op("Loop", [node.input(0), node.input(1), *initial, *captured], attrs, outputs=len(node.outputs))


def _appended(node: NodeSpec, e: Emit, body: Subgraph, initial: list[Ref]) -> Sequence[Ref] | None:
    """A Loop that only appends to sequences, as one that stacks its results, and the sequences as their rows.

    None for other loops, and for those that become few nodes when they are written out.
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
    """A Loop that only appends to sequences, as often as data or a symbolic size says, as one that stacks its results.

    None for other loops, and where the tensors of two iterations may differ in shape.
    """
    plain = None
    if node.input(0) is not None and _number(e, node.inputs[0]) is None:
        plain = body.appending([node.input(0), node.input(1), *initial])
    if plain is None:
        return None
    carried = [v for v in initial if not isinstance(v, TensorList)]
    counter, flag = TensorType(INT64, ()), TensorType(BOOL, ())
    built, captured = _build_body(plain, [counter, flag], [e.type(v) for v in carried], [], 1)
    first = len(built.outputs) - (len(initial) - len(carried))
    outside = _symbols([e.type(v) for v in captured])
    if any(t.shape is None or _symbols([t]) - outside for t in built.outputs[first:]):
        return None
    operands = [node.input(0), node.input(1), *carried, *captured]
    made = e.op("Loop", operands, LoopAttrs(built, len(carried)), outputs=len(built.outputs) - 1)
    lists, last = iter(Stack([v]) for v in made[first - 1 :]), iter(made[: len(carried)])
    return [*(next(lists if isinstance(v, TensorList) else last) for v in initial), *made[len(carried) : first - 1]]


def _number(e: Emit, ref: Ref) -> int | None:
    """The number that a ref holds; None where it is not known, or symbolic."""
    known = e.value(ref)
    return None if known is None or known.dtype == object else int(known.reshape(-1)[0])


def _rows(e: Emit, stack: Ref, trips: int, row: TensorType) -> Sequence[Ref]:
    """The ``trips`` tensors that a value stacks."""
    dims = row.static_shape
    if not dims:
        parts = e.op("Split", [stack, np.ones(trips, np.int64)], SplitAttrs(0), outputs=trips)
        return [emit(e, "Squeeze", part, np.array([0])) for part in parts]
    joined = emit(e, "Reshape", stack, np.array([trips * dims[0], *dims[1:]], np.int64))
    return e.op("Split", [joined, np.full(trips, dims[0], np.int64)], SplitAttrs(0), outputs=trips)


def _repeated(node: NodeSpec, e: Emit, body: Subgraph, state: list[Ref]) -> Sequence[Ref]:
    """A Loop that carries sequences of tensors: its iterations one after the other, where their number is known."""
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


def _import_scan(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    if node.opset < 9:
        return _import_batched_scan(node, e)
    body, count = _subgraph(node, "body"), int(node.attrs["num_scan_inputs"])
    states = len(node.inputs) - count
    if states < 0 or body.inputs != len(node.inputs):
        raise ShapeError(f"the body of Scan takes {body.inputs} values, {len(node.inputs)} are fed")
    operands = list(node.inputs)
    types = [e.type(v) for v in operands]
    axes = node.ints("scan_input_axes") or (0,) * count
    rows = []
    for t, axis in zip(types[states:], axes, strict=True):
        at = normalize_axis(axis, len(t.dims), "Scan axis")
        rows.append(t.with_shape((*t.dims[:at], *t.dims[at + 1 :])))
    built, captured = _build_body(body, [], types[:states], rows, 0, keeps_shapes=True)
    made = body.outputs - states
    attrs = ScanAttrs(
        built,
        states,
        axes,
        node.ints("scan_input_directions") or (0,) * count,
        node.ints("scan_output_axes") or (0,) * made,
        node.ints("scan_output_directions") or (0,) * made,
    )
    return e.op("Scan", [*operands, *captured], attrs, outputs=len(node.outputs))


MOST_WRITTEN_OUT = 512
"""Nodes that a Loop becomes because it carries a sequence, where it could stack results instead."""
MOST_REPEATED = 4096
"""Iterations of a Loop that carries sequences of tensors."""
MOST_ROWS = 64
"""Largest batch of a Scan of opset 8. Each row becomes a separate Scan."""


def _import_batched_scan(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """Scan of opset 8: every operand has a batch axis in front, and the scanned axis is 1. A Scan per row of the batch."""
    if node.input(0) is not None:
        raise Unsupported("Scan of opset 8 with sequence_lens")
    operands = list(node.inputs[1:])
    rows = e.type(operands[0]).dims[0] if operands else 0
    if not isinstance(rows, int) or not 1 <= rows <= MOST_ROWS:
        raise Unsupported(f"Scan of opset 8 of a batch of {rows}: 1 to {MOST_ROWS} fixed rows are done")
    attrs = {"body": node.attrs["body"], "num_scan_inputs": node.attrs["num_scan_inputs"]}
    directions = node.ints("directions")
    if directions:
        attrs["scan_input_directions"] = list(directions)
    made = []
    for row in range(rows):
        own = tuple(emit(e, "Gather", v, np.array(row), axis=0) for v in operands)
        found = _import_scan(replace(node, opset=9, inputs=own, attrs=attrs), e)
        made.append([emit(e, "Unsqueeze", y, np.array([0])) for y in found])
    return [column[0] if rows == 1 else emit(e, "Concat", *column, axis=0) for column in zip(*made, strict=True)]


# ---------------------------------------------------------------- export


def _export_if(a: IfAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    split = 1 + a.then_captured
    then, other = e.subgraph(a.then_branch, inputs[1:split]), e.subgraph(a.else_branch, inputs[split:])
    return e.node("If", inputs[:1], len(a.then_branch.outputs), then_branch=then, else_branch=other)[:n_outputs]


def _export_loop(a: LoopAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    n = 2 + a.carried
    body = e.subgraph(a.body, inputs[n:])
    return e.node("Loop", inputs[:n], len(a.body.outputs) - 1, body=body)[:n_outputs]


def _export_scan(a: ScanAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    n = a.states + len(a.scan_input_axes)
    fields: dict[str, Any] = {
        "num_scan_inputs": len(a.scan_input_axes),
        "scan_input_axes": a.scan_input_axes,
        "scan_input_directions": a.scan_input_directions,
        "scan_output_axes": a.scan_output_axes,
        "scan_output_directions": a.scan_output_directions,
    }
    body = e.subgraph(a.body, inputs[n:])
    return e.node("Scan", inputs[:n], len(a.body.outputs), body=body, **fields)[:n_outputs]


# ---------------------------------------------------------------- definitions


_control = partial(OpDef, cost=free, tol=Tol(1e-4, 1e-5))  # the cost is not known before it runs

DEFS: tuple[OpDef, ...] = (
    _control("If", _infer_if, IfAttrs, _import_if, _export_if),
    _control("Loop", _infer_loop, LoopAttrs, _import_loop, _export_loop),
    _control("Scan", _infer_scan, ScanAttrs, _import_scan, _export_scan),
)
