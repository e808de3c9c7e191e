"""Loops with a known number of iterations become their iterations; an If becomes its branch, or both of them and a selection.

A GPU's program has no loops: a loop that is not unrolled runs on the CPU. Unrolled iterations are ordinary operators, which all
later passes can rewrite. Bounds limit the growth of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from optdnn.dim import Dim, floordiv
from optdnn.ir.body import GraphBody, bodies
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.single_steps import single_step
from optdnn.passes.support.facts import RESHAPES, in_shape, integers, operand, shape_of
from optdnn.passes.support.paths import value_before
from optdnn.types import is_float, normalize_axis

TRIPS = 256
"""Loops of more iterations are long: passes first look for a form without them."""
MOST_TRIPS = 1024
"""Most iterations that are unrolled."""
OPS = 8192
"""Most ops of one unrolled loop."""
SURE = frozenset(
    {
        "Attention", "AveragePool", "BatchNormalization", "Concat", "Conv", "ConvTranspose", "DepthToSpace",
        "Einsum", "Expand", "Flatten", "GRU", "Gemm", "GlobalAveragePool", "GlobalMaxPool", "GroupNormalization", "Identity",
        "InstanceNormalization", "LSTM", "LayerNormalization", "LogSoftmax", "LpNormalization", "MatMul", "MaxPool", "Pad",
        "RMSNormalization", "RNN", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
        "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Reshape", "Resize", "Shape", "Slice", "Softmax",
        "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where",
    }
)  # fmt: skip
"""Kinds, besides the pointwise ones, that never fail, whatever their data."""
SURE_OF_NONE = frozenset(
    {
        "Concat", "Constant", "Expand", "Identity", "NonMaxSuppression", "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMin",
        "ReduceProd", "ReduceSum", "ReduceSumSquare", "Shape", "Slice", "Squeeze", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Kinds, besides the pointwise ones, that never fail if an axis has no elements."""


def _replaced(op: Op, build: Callable[[Patch], list[Value]]) -> Match:
    """A match that covers only ``op``. ``build`` returns the new values of its results."""
    return Match((op,), lambda patch: patch.replace_each(op.values, build(patch)))


@rule("unroll_loop", {"Loop"})
def unroll_loop(graph: Graph, op: Op) -> Match | Miss | None:
    """A Loop with a known trip count and no earlier end."""
    body, carried = op.attrs.body, op.attrs.carried
    trips = number_of(graph, op.input(0))
    if trips is None:
        return Miss("its number of iterations is not known")
    going = op.input(1)
    known = True if going is None else number_of(graph, going)
    if known is None or not goes_on(body.graph):
        return Miss("its condition depends on data")
    trips = max(trips, 0) if known else 0
    scans = len(body.outputs) - 1 - carried
    if not trips and scans:
        return Miss("it runs zero times, but stacks results")
    return too_much(body, trips) or _replaced(op, lambda patch: _loop_results(patch, op, trips))


def _loop_results(patch: Patch, op: Op, trips: int) -> list[Value]:
    body, carried = op.attrs.body.graph, op.attrs.carried
    state, captured = _present(op.inputs[2 : 2 + carried]), op.inputs[2 + carried :]
    rows: list[list[Value]] = [[] for _ in range(len(body.outputs) - 1 - carried)]
    true = patch.constant(np.array(True), "going")
    for i in range(trips):
        number = patch.constant(np.array(i, np.int64), "iteration")
        results = _inline(patch, body, [number, true, *state, *captured])
        state = results[1 : 1 + carried]
        for row, value in zip(rows, results[1 + carried :], strict=True):
            row.append(value)
    return [*state, *(_stacked(patch, row, 0) for row in rows)]


@rule("unroll_scan", {"Scan"})
def unroll_scan(graph: Graph, op: Op) -> Match | Miss | None:
    """A Scan over sequences of known length."""
    a = op.attrs
    lengths = set()
    for value, axis in zip(op.inputs[a.states :], a.scan_input_axes, strict=False):
        dims = shape_of(graph, value)
        lengths.add(None if dims is None else dims[normalize_axis(axis, len(dims))])
    if len(lengths) != 1 or not isinstance(trips := lengths.pop(), int):
        return Miss("its number of iterations is not known")
    if not trips and a.scan_output_axes:
        return Miss("it runs zero times, but stacks results")
    return too_much(a.body, trips) or _replaced(op, lambda patch: _scan_results(patch, op, trips))


def _scan_results(patch: Patch, op: Op, trips: int) -> list[Value]:
    a, n = op.attrs, len(op.attrs.scan_input_axes)
    state, captured = _present(op.inputs[: a.states]), op.inputs[a.states + n :]
    sequences = op.inputs[a.states : a.states + n]
    rows: list[list[Value]] = [[] for _ in a.scan_output_axes]
    for i in range(trips):
        slices: list[Value] = []
        for value, axis, backwards in zip(sequences, a.scan_input_axes, a.scan_input_directions, strict=True):
            at = patch.constant(np.array(trips - 1 - i if backwards else i, np.int64), "at")
            slices.append(patch.add("Gather", [value, at], GatherAttrs(axis)))
        results = _inline(patch, a.body.graph, [*state, *slices, *captured])
        state = results[: a.states]
        for row, made in zip(rows, results[a.states :], strict=True):
            row.append(made)
    outputs = zip(rows, a.scan_output_axes, a.scan_output_directions, strict=True)
    return [*state, *(_stacked(patch, row[::-1] if back else row, axis) for row, axis, back in outputs)]


@rule("known_branch", {"If"})
def known_branch(graph: Graph, op: Op) -> Match | Miss | None:
    """An If whose condition is known."""
    condition = number_of(graph, op.inputs[0])
    if condition is None:
        return None
    a, first = op.attrs, 1 + op.attrs.then_captured
    body, captured = (a.then_branch, op.inputs[1:first]) if condition else (a.else_branch, op.inputs[first:])
    return _replaced(op, lambda patch: _inline(patch, body.graph, captured))


@rule("both_branches", {"If"})
def both_branches(graph: Graph, op: Op) -> Match | Miss | None:
    """An If whose condition depends on data computes both branches and selects.

    Both branches must always be computable, and must give the same types. On the host, even one branch would take longer."""
    a, first = op.attrs, 1 + op.attrs.then_captured
    if number_of(graph, op.inputs[0]) is not None:
        return None
    if _has_plans(graph, operand(op)):
        return Miss("its condition depends on the values of small inputs, for which an engine makes plans")
    branches: list[GraphBody] = [a.then_branch, a.else_branch]
    if branches[0].outputs != branches[1].outputs or not all(t.is_static for t in branches[0].outputs):
        return Miss("its condition depends on data, and its branches do not give the same sizes")
    inner = [o for body in branches for o in body.graph.ops() if o.kind not in STRUCTURAL]
    if len(inner) > OPS:
        return Miss(f"its condition depends on data, and its branches have {len(inner)} ops; {OPS} are the limit")
    for body, captured in zip(branches, (op.inputs[1:first], op.inputs[first:]), strict=True):
        place = {Value(i): v for i, v in zip(body.graph.inputs, captured, strict=True) if v is not None}
        if any(may_fail(body.graph, o) and not _takes_best(graph, body.graph, place, o) for o in body.graph.ops()):
            return Miss(
                "its condition depends on data, and a branch has an operator that may fail where it is not taken"
            )

    def build(patch: Patch) -> list[Value]:
        condition = operand(op) if graph.type(operand(op)).shape == () else in_shape(patch, operand(op), ())
        parts = [
            _inline(patch, b.graph, v) for b, v in zip(branches, (op.inputs[1:first], op.inputs[first:]), strict=True)
        ]
        return [patch.add("Where", [condition, *pair]) for pair in zip(*parts, strict=True)]

    return _replaced(op, build)


def _takes_best(graph: Graph, body: Graph, place: Mapping[Value, Value], op: Op) -> bool:
    """Whether an operator of a branch takes the row of the best of as many numbers as there are rows: a decoder's next token.

    ``place``: the captured values of the branch, around the If."""
    dims = shape_of(body, operand(op)) if op.kind == "Gather" else None
    if dims is None:
        return False
    passed = {"Identity", *RESHAPES}
    index = value_before(body, operand(op, 1), passed)
    if index not in place:
        return False
    best = graph.op(value_before(graph, place[index], passed))
    numbers = shape_of(graph, operand(best)) if best.kind in ("ArgMax", "ArgMin") else None
    count = None if numbers is None else numbers[normalize_axis(best.attrs.axis, len(numbers))]
    rows = dims[normalize_axis(op.attrs.axis, len(dims))]
    return isinstance(count, int) and isinstance(rows, int) and count <= rows


@rule("branch_for_none", {"If"})
def branch_for_none(graph: Graph, op: Op) -> Match | Miss | None:
    """``If(n == 0, nothing, suppression of n boxes)`` is the suppression: of no boxes, none remain.

    PyTorch's detectors guard each suppression in this way. The other operators of the branch must not fail without boxes; the
    largest of no elements is minus infinity."""
    size, nothing = _compared_with_zero(graph, operand(op)), op.attrs.then_branch
    if size is None or len(nothing.outputs) != 1 or nothing.outputs[0].shape != (0,):
        return None
    body: Graph = op.attrs.else_branch.graph
    suppression = body.op(value_before(body, operand(body.op(body.outputs[0])), _gives_none))
    if suppression.kind != "NonMaxSuppression":
        return Miss("its condition depends on data, and no suppression of boxes computes its result")
    boxes = body.type(operand(suppression)).dims[1]
    if not isinstance(boxes, Dim) or not isinstance(times := floordiv(size, boxes), int) or times * boxes != size:
        return Miss("its condition depends on data, and does not say whether there are boxes")
    if any(_fails_on_none(body, o) for o in body.ops()):
        return Miss("its condition depends on data, and a branch has an operator that may fail where it is not taken")
    return _replaced(op, lambda patch: _inline(patch, body, op.inputs[1 + op.attrs.then_captured :]))


def _compared_with_zero(graph: Graph, condition: Value) -> Dim | None:
    """The size that depends on data, if a condition is whether it is zero; None for other conditions."""
    op = graph.op(value_before(graph, condition, {"Cast", "Identity", *RESHAPES}))
    if op.kind != "Equal" or number_of(graph, op.inputs[1]) != 0:
        return None
    known = graph.known(op.inputs[0])
    size = known.reshape(-1)[0] if known is not None and known.size == 1 else None
    return size if isinstance(size, Dim) else None


def _gives_none(op: Op) -> bool:
    """Whether an operator gives no elements if its first operand has none."""
    return op.kind in {"Cast", "Identity", *RESHAPES} or (op.kind == "Gather" and op.attrs.axis == 1)


def _fails_on_none(body: Graph, op: Op) -> bool:
    """Whether an operator may fail if there are no boxes."""
    if op.kind == "Gather":
        dims = shape_of(body, operand(op))
        return dims is None or not isinstance(dims[op.attrs.axis], int) or body.known(op.inputs[1]) is None
    if op.kind == "Reshape":
        shape = body.constant_value(op.inputs[1])
        return shape is None or 0 in shape
    if op.kind in ("Div", "Mod"):
        return not is_float(op.outputs[0].type.dtype)
    return not (op.kind in SURE_OF_NONE or op.kind in STRUCTURAL or op.definition.traits.pointwise)


def _has_plans(graph: Graph, condition: Value) -> bool:
    """Whether a condition depends only on inputs of a few integers or booleans: an engine has a plan for each of their values."""
    left, seen = [condition], {condition}
    while left:
        source = graph.op(left.pop())
        t = source.outputs[0].type
        if source.kind == "Input" and (is_float(t.dtype) or t.rank is None or t.rank > 1):
            return False
        more = {v for v in source.inputs if v is not None} - seen
        left += more
        seen |= more
    return True


def may_fail(body: Graph, op: Op) -> bool:
    """Whether an operator may fail, or never end, for some data.

    Such operators read indices or an axis, divide integers, or have a loop or sizes that depend on data."""
    if op.kind in STRUCTURAL or op.kind == "Constant":
        return False
    if not all(o.type.is_static for o in op.outputs):
        return True
    if op.kind == "If":
        return any(may_fail(branch.graph, inner) for branch in bodies(op) for inner in branch.graph.ops())
    if bodies(op):
        return True
    if op.kind in ("Div", "Mod"):
        return not is_float(op.outputs[0].type.dtype)
    if op.kind in ("CumSum", "Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"):
        return body.known(op.inputs[1]) is None
    return op.kind not in SURE and not op.definition.traits.pointwise


def number_of(graph: Graph, value: Value | None) -> int | None:
    """The only element of a known value, as an integer; None for other values."""
    known = graph.known(value)
    return None if known is None or known.dtype == object or known.size != 1 else int(known.reshape(-1)[0])


def goes_on(body: Graph) -> bool:
    """Whether the body leaves the loop's condition true: it returns true, or its own operand."""
    value = body.op(body.outputs[0]).inputs[0]
    while value is not None and body.op(value).kind == "Identity":
        value = body.op(value).inputs[0]
    assert value is not None
    known = body.known(value)
    return value == Value(body.inputs[1]) or (
        known is not None and known.size == 1 and known.reshape(-1)[0] in (True, 1)
    )


def too_much(body: GraphBody, trips: int) -> Miss | None:
    """Why ``trips`` iterations of a body are not unrolled, or None."""
    ops = trips * sum(op.kind not in STRUCTURAL for op in body.graph.ops())
    if trips > MOST_TRIPS:
        return Miss(f"it runs {trips} times; {MOST_TRIPS} are unrolled")
    return Miss(f"unrolled, it would be {ops} ops; {OPS} are the limit") if ops > OPS else None


def _present(values: Sequence[Value | None]) -> list[Value]:
    return [v for v in values if v is not None]


def _inline(patch: Patch, body: Graph, inputs: Sequence[Value | None]) -> list[Value]:
    """The body's outputs for these inputs, its ops added to the patch."""
    place: dict[Value, Value | None] = {Value(i): v for i, v in zip(body.inputs, inputs, strict=True)}
    for op in body.order():
        if op.kind == "Constant":
            place[op.value] = patch.constant(op.attrs.value, op.outputs[0].name)
        elif op.kind not in STRUCTURAL:
            operands = [None if v is None else place[v] for v in op.inputs]
            names = [o.name for o in op.outputs]
            made = patch.add_op(op.kind, operands, op.attrs, names=names, outputs=len(names))
            place.update({Value(op.id, i): Value(made.id, i) for i in range(len(op.outputs))})
    return _present([place[v] for i in body.outputs if (v := body.op(i).inputs[0]) is not None])


def _stacked(patch: Patch, row: Sequence[Value], axis: int) -> Value:
    """Values, concatenated along a new axis."""
    at = normalize_axis(axis, len(patch.type(row[0]).dims) + 1)
    where = integers(patch, [at], "axis")
    parts = [patch.add("Unsqueeze", [v, where]) for v in row]
    return parts[0] if len(parts) == 1 else patch.add("Concat", parts, ConcatAttrs(at))


class Unroll(RulePass):
    name = "unroll"
    rules = (unroll_loop, unroll_scan, single_step, known_branch, branch_for_none, both_branches)
    gpu_only = True  # the libraries of the CPU run loops
