"""A Loop that computed values may end early gets a guard: further iterations change nothing, so that all of them can be unrolled.

Generators of text, speech and boxes end at a token or at a threshold, after a known number of iterations at most. On the CPU, each
iteration runs the network of a step. A GPU computes all of them faster, unless a step is light.

The states of an iteration are taken over only if it runs. After the end, the operators compute again what they computed in the
last iteration, from the same states: an operator that did not fail then does not fail later. The rows that the iterations stack are
cut to those of the iterations that ran.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optdnn.ir.body import GraphBody, bodies
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.bodies import LoopAttrs
from optdnn.ops.shape import ReshapeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import integers, operand, reshaped
from optdnn.passes.unroll import TRIPS, goes_on, may_fail, number_of, too_much
from optdnn.types import BOOL, INT64, TensorType, normalize_axis

HEAVY = frozenset({"Attention", "Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "RNN"})
"""A step must have an operator of these kinds. Without one, the CPU is fast enough, and may end early."""


@rule("guarded_loop", {"Loop"})
def guarded_loop(graph: Graph, op: Op) -> Match | Miss | None:
    """A Loop of a known number of iterations at most, whose body computes whether it goes on."""
    body, carried = op.attrs.body.graph, op.attrs.carried
    trips = number_of(graph, op.input(0))
    if trips is None or not 1 < trips <= TRIPS or goes_on(body) or not carried or any(v is None for v in op.inputs[2:]):
        return None
    inner = [o for o in body.order() if o.kind not in STRUCTURAL]
    if not HEAVY.intersection(o.kind for o in inner):
        return Miss("computed values may end it, and its iterations are short")
    if (why := too_much(op.attrs.body, trips)) is not None:
        return why
    if any(bodies(o) or not all(x.type.is_static for x in o.outputs) for o in inner):
        return Miss("computed values may end it, and sizes in its body depend on data")
    given = [graph.type(v) for v in op.inputs[2 : 2 + carried] if v is not None]
    if given != [body.type(operand(body.op(i))) for i in body.outputs[1 : 1 + carried]]:
        return Miss("computed values may end it, and its states change their sizes")
    begins = op.input(1) is None or number_of(graph, op.input(1)) == 1
    if any(may_fail(body, o) for o in inner if not begins or _depends(body, o, Value(body.inputs[0]), trips)):
        return Miss("computed values may end it, and an operator may fail after its end")

    return Match((op,), lambda patch: patch.replace_each(op.values, _results(patch, op, given)))


def _depends(body: Graph, op: Op, number: Value, trips: int) -> bool:
    """Whether an operator depends on the number of the iteration, other than as a place on an axis that is long enough."""
    if op.kind == "Gather" and operand(op, 1) == number:
        dims = body.type(operand(op)).static_shape
        return dims[normalize_axis(op.attrs.axis, len(dims))] < trips
    left, seen = list(op.inputs), set[Value]()
    while left:
        value = left.pop()
        if value == number:
            return True
        if value is not None and value not in seen:
            seen.add(value)
            left += body.op(value).inputs
    return False


def _results(patch: Patch, op: Op, given: Sequence[TensorType]) -> list[Value]:
    """The values that replace the results of the Loop."""
    carried, body = op.attrs.carried, op.attrs.body.graph
    states, captured = op.inputs[2 : 2 + carried], op.inputs[2 + carried :]
    begins = op.input(1)
    going = patch.constant(np.array(True), "going") if begins is None else reshaped(patch, begins, ())
    count = patch.constant(np.array(0, np.int64), "count")
    attrs = LoopAttrs(GraphBody(_guarded(body, carried, given)), 2 * carried + 2)
    rows = len(body.outputs) - 1 - carried
    loop = patch.add_op(
        "Loop", [op.inputs[0], None, *states, *states, going, count, *captured], attrs, outputs=2 * carried + 2 + rows
    )
    ran = reshaped(patch, Value(loop.id, 2 * carried + 1), (1,))
    first, axis = integers(patch, [0], "first"), integers(patch, [0], "axis")
    stacks = [Value(loop.id, 2 * carried + 2 + k) for k in range(rows)]
    return [
        *(Value(loop.id, carried + k) for k in range(carried)),
        *(patch.add("Slice", [stack, first, ran, axis]) for stack in stacks),
    ]


def _guarded(old: Graph, carried: int, given: Sequence[TensorType]) -> Graph:
    """The body with a guard. It carries the states of the last iteration that ran, those after it, whether the next iteration runs,
    and how many ran."""
    body = Graph(old.name)
    body.share_symbols(old)
    names = [old.op(i).name for i in old.inputs]
    number, condition = (
        body.add_input(names[k], t) for k, t in enumerate((TensorType(INT64, ()), TensorType(BOOL, ())))
    )
    before = [body.add_input(names[2 + k], t) for k, t in enumerate(given)]
    after = [body.add_input(f"{names[2 + k]}_after", t) for k, t in enumerate(given)]
    runs, count = body.add_input("runs", TensorType(BOOL, ())), body.add_input("count", TensorType(INT64, ()))
    captured = [body.add_input(old.op(i).name, old.op(i).outputs[0].type) for i in old.inputs[2 + carried :]]
    true = body.add_constant(np.array(True), "true")
    place = dict(zip((Value(i) for i in old.inputs), (number, true, *before, *captured), strict=True))
    for op in old.order():
        if op.kind == "Constant":
            place[op.value] = body.add_constant(op.attrs.value, op.outputs[0].name)
        elif op.kind not in STRUCTURAL:
            read = [None if v is None else place[v] for v in op.inputs]
            labels = [o.name for o in op.outputs]
            made = body.add(op.kind, read, op.attrs, names=labels, outputs=len(labels), src=op.src)
            place.update({v: Value(made.id, v.port) for v in op.values})
    goes, *results = (place[operand(old.op(i))] for i in old.outputs)
    shape = body.add_constant(np.zeros(0, np.int64), "scalar")
    goes = body.add("And", [runs, body.add("Reshape", [goes, shape], ReshapeAttrs()).value]).value
    ran = body.add("Add", [count, body.add("Cast", [runs], CastAttrs(INT64)).value]).value
    nexts = [body.add("Where", [goes, new, v]).value for new, v in zip(results, before, strict=False)]
    finals = [body.add("Where", [runs, new, v]).value for new, v in zip(results, after, strict=False)]
    same = body.add("Identity", [condition]).value
    for k, value in enumerate([same, *nexts, *finals, goes, ran, *results[carried:]]):
        body.add_output(value, f"result_{k}")
    return body


class GuardedLoops(RulePass):
    name = "guarded_loops"
    rules = (guarded_loop,)
    gpu_only = True  # the libraries of the CPU run loops
