"""Control flow: If, Loop, Scan.

Bodies are attributes (``ops.base.Body``); the outer values that they read are operands, after the operator's own. An If
with a condition that is known at import is replaced by the branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from optdnn.dim import Dim, DimLike, dim_max
from optdnn.errors import ShapeError
from optdnn.ops.base import STEPS_TOL, Body, Call, Fresh, Result, Unsupported
from optdnn.ops.bodies import IfAttrs, LoopAttrs, ScanAttrs, build_body, subgraph, symbols
from optdnn.ops.checks import agree, emit, free
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, NodeSpec, Ref
from optdnn.ops.sequence_loops import import_sequence_loop
from optdnn.ops.sequences import TensorList
from optdnn.types import BOOL, INT64, TensorType, normalize_axis

# ---------------------------------------------------------------- inference


def _seen_outside(t: TensorType, known: set[str], fresh: Fresh) -> TensorType:
    """The outer type of a value inside of a body: sizes that are known only inside become new symbols."""
    if t.shape is None:
        return t
    inner = (bool(symbols([TensorType(t.dtype, (d,))]) - known) for d in t.shape)
    return t.with_shape([fresh("inner", d) if new else d for d, new in zip(t.shape, inner, strict=True)])


def _check_captured(body: Body, own: int, operands: Sequence[TensorType | None], what: str) -> None:
    wanted = body.inputs[own:]
    if len(operands) != len(wanted):
        raise ShapeError(f"{what} captures {len(wanted)} values and gets {len(operands)}")
    for given, declared in zip(operands, wanted, strict=True):
        if given is None or given.dtype != declared.dtype:
            raise ShapeError(f"{what} captures {declared} and gets {given}")


def _merge(a: TensorType, b: TensorType, fresh: Fresh, what: str) -> TensorType:
    """The type of a value that is either ``a`` or ``b``."""
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
    _check_captured(a.then_branch, 0, call.types[1:split], "the then branch of If")
    _check_captured(a.else_branch, 0, call.types[split:], "the else branch of If")
    if len(a.then_branch.outputs) != len(a.else_branch.outputs):
        raise ShapeError("the branches of If yield different numbers of values")
    known = symbols(call.types)
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
    n, known = 2 + a.carried, symbols(call.types)
    _check_captured(a.body, n, call.types[n:], "the body of Loop")
    _check_state(a.body.inputs[2:n], call.types[2:n], a.body.outputs[1 : 1 + a.carried], "Loop")
    # A size about which the body knows nothing changes from one iteration to the next.
    finals = [_seen_outside(t, known, call.fresh) for t in a.body.inputs[2:n]]
    trips = call.ints(0)
    always = not call.has(1) or _true(call.value(1))
    count: DimLike = (
        dim_max(trips[0], 0)
        if trips and always and _ends_by_count(a.body)
        else call.fresh("iterations", *(trips or ())[:1])
    )
    scans = [_stacked(_seen_outside(t, known, call.fresh), count, 0) for t in a.body.outputs[1 + a.carried :]]
    return Result((*finals, *scans))


def _true(value: Any) -> bool:
    return value is not None and value.size == 1 and bool(value.reshape(-1)[0])


def _ends_by_count(body: Body) -> bool:
    """Whether the body's condition is constantly true or passed through: only the count ends the loop."""
    plain = body.plain
    constants = plain.inputs + len(plain.constants)
    producers, register = {}, constants
    for op in plain.ops:
        producers[register] = op
        register += len(op.dtypes)
    register = plain.outputs[0]
    while register in producers and producers[register].kind in ("Identity", "Cast"):
        source = producers[register].inputs[0]
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
    n, known = a.states + len(a.scan_input_axes), symbols(call.types)
    _check_captured(a.body, n, call.types[n:], "the body of Scan")
    _check_state(a.body.inputs[: a.states], call.types[: a.states], a.body.outputs[: a.states], "Scan")
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
    then, other = (subgraph(node, name) for name in ("then_branch", "else_branch"))
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


def _import_loop(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    body = subgraph(node, "body")
    initial = list(node.inputs[2:])
    if any(v is None for v in initial):
        raise ShapeError("a carried value of Loop has no initial value")
    if body.inputs != 2 + len(initial):
        raise ShapeError(f"the body of Loop takes {body.inputs} values, 2 and {len(initial)} carried ones are fed")
    if any(isinstance(v, TensorList) for v in initial):
        return import_sequence_loop(node, e, body, initial)
    counter, flag = TensorType(INT64, ()), TensorType(BOOL, ())
    built, captured = build_body(body, [counter, flag], [e.type(v) for v in initial], [], 1)
    attrs = LoopAttrs(built, len(initial))
    return e.op("Loop", [node.input(0), node.input(1), *initial, *captured], attrs, outputs=len(node.outputs))


def _import_scan(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    if node.opset < 9:
        return _import_batched_scan(node, e)
    body, count = subgraph(node, "body"), int(node.attrs["num_scan_inputs"])
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
    built, captured = build_body(body, [], types[:states], rows, 0, keeps_shapes=True)
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


MOST_ROWS = 64
"""Largest batch of an opset 8 Scan. Each row becomes a separate Scan."""


def _import_batched_scan(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """Scan of opset 8: every operand has a leading batch axis, and the scanned axis is 1. One Scan per row of the batch."""
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


_control = partial(OpDef, cost=free, tol=STEPS_TOL)  # the cost is not known before it runs

DEFS: tuple[OpDef, ...] = (
    _control("If", _infer_if, IfAttrs, _import_if, _export_if),
    _control("Loop", _infer_loop, LoopAttrs, _import_loop, _export_loop),
    _control("Scan", _infer_scan, ScanAttrs, _import_scan, _export_scan),
)
