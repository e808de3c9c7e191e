"""Loops over the steps of an LSTM, GRU or plain RNN become layers, for which kernels keep the weights in registers.

JAX's ``lax.scan``, TensorFlow's while loops, Keras's cells and scripts of PyTorch write the arithmetic of a cell in the body of a
Scan or Loop. A loop that is too long to be unrolled would run on the CPU. Unrolled, it would be thousands of operators.

The cell is recognized by the arithmetic of its gates. Its inputs must be known for all steps before the layer begins; they may be
the states of another layer in the same loop. Operators around the cells are computed for all steps at once
(:mod:`optdnn.passes.divided_loops`). States of other forms stay in a loop.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from optdnn.errors import OptdnnError
from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.base import Match, Miss, Pass, PassContext, RulePass, rule
from optdnn.passes.canonicalize_arithmetic import CanonicalizeArithmetic
from optdnn.passes.cse import CommonSubexpressions
from optdnn.passes.dce import DeadCode
from optdnn.passes.divided_loops import Layer, divided, in_parts
from optdnn.passes.einsum_to_matmul import EinsumProducts
from optdnn.passes.fold_constants import FoldConstants
from optdnn.passes.fuse_activation import FuseActivation
from optdnn.passes.support.facts import operand
from optdnn.passes.support.long_steps import LongSteps, steps_of
from optdnn.passes.support.products import PRODUCTS
from optdnn.passes.unrolled_cells import CELLS, LEAST, Step, refused_step, steps_before

CLEAN: tuple[Pass, ...] = (
    *(FoldConstants(), CommonSubexpressions(), EinsumProducts(), CanonicalizeArithmetic(), FuseActivation()),
    *(CanonicalizeArithmetic(), CommonSubexpressions(), DeadCode()),
)
"""The passes that give a body the form in which cells are recognized."""


@rule("looped_cells", {"Loop", "Scan"})
def looped_cells(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A Loop or Scan of known length with the steps of at least one cell."""
    body: Graph = op.attrs.body.graph
    if body.kinds().keys().isdisjoint({*PRODUCTS, "Einsum"}):
        return None
    given = steps_of(graph, op, longer_than=LEAST - 1)
    if not isinstance(given, LongSteps):
        return None  # the passes after this one tell why
    steps = _with_constants(graph, given, context)
    if isinstance(steps, Miss):
        return steps
    layers, why = _layers(steps, context)
    if not layers:
        return why
    parts = divided(steps, layers)
    if not parts.layers:
        return Miss("the input of its cell depends on the step before it")
    if not all(x.type.is_static for o in steps.operators() for x in o.outputs):
        return Miss("sizes in its body are not known")
    return in_parts(graph, op, parts, (*parts.before, *parts.after))


def _layers(steps: LongSteps, context: PassContext) -> tuple[dict[int, Layer], Miss | None]:
    """The states that layers may compute, by their numbers; and why a cell is no layer, if there is one."""
    found, why = dict[int, Layer](), None
    for k, (before, after) in enumerate(zip(steps.states, steps.following, strict=True)):
        op = steps.body.op(after)
        for step in steps_before(steps.body, op) if op.kind in CELLS else ():
            if step.h != before:
                continue
            if (reason := refused_step(step, context)) is not None:
                why = Miss(reason)
            elif step.cells is None:
                found[k] = Layer(step)
            elif step.cells not in (pairs := list(zip(steps.states, steps.following, strict=True))):
                continue
            elif _reads_cell(steps, step, {k, cell := pairs.index(step.cells)}):
                why = Miss("the cells of steps before the last one are read elsewhere")
            else:
                found[k] = Layer(step, cell)
    return found, why


def _reads_cell(steps: LongSteps, step: Step, own: Collection[int]) -> bool:
    """Whether anything but the step of an LSTM, whose states are ``own``, reads its cells: also its gates times a cell, or the
    tanh of a cell. The layer has only the last cell."""
    needed = {v for k, v in enumerate(steps.following) if k not in own} | {v for v, _ in steps.stacked}
    for op in reversed(steps.operators()):
        if op.value != step.op.value and not needed.isdisjoint(op.values):
            needed |= {v for v in op.inputs if v is not None}
    return not needed.isdisjoint(step.cells or ())


def _with_constants(graph: Graph, steps: LongSteps, context: PassContext) -> LongSteps | Miss:
    """The steps with a copy of their body, in which values of the graph that are constants are constants, too."""
    body = Graph("body")
    body.share_symbols(steps.body)
    number = [] if steps.number is None else [steps.number]
    others = [v for v, x in steps.others.items() if graph.constant_value(x) is None]
    inputs = [*steps.states, *steps.sequences, *others, *number]
    place = {v: body.add_input(steps.body.output(v).name, steps.body.type(v)) for v in inputs}
    for v, x in steps.others.items():
        if (array := graph.constant_value(x)) is not None:
            place[v] = body.add_constant(array, steps.body.output(v).name)
    place |= {c.value: body.add_constant(c.attrs.value, c.outputs[0].name) for c in steps.body.of_kind("Constant")}
    for op in steps.operators():
        names = [o.name for o in op.outputs]
        operands = [None if v is None else place[v] for v in op.inputs]
        made = body.add(op.kind, operands, op.attrs, names=names, outputs=len(names), src=op.src)
        place |= {v: Value(made.id, v.port) for v in op.values}
    for k, value in enumerate((*steps.following, *(v for v, _ in steps.stacked))):
        body.add_output(place[value], f"result_{k}")
    try:
        for one in CLEAN:
            one(body, context)
    except OptdnnError as error:
        return Miss(f"its body cannot be rewritten: {error.message}")
    made_inputs = {v: Value(i) for v, i in zip(inputs, body.inputs, strict=True)}
    results = [operand(body.op(i)) for i in body.outputs]
    following, stacked = results[: len(steps.following)], results[len(steps.following) :]
    return replace(
        steps,
        body=body,
        states=[made_inputs[v] for v in steps.states],
        sequences={made_inputs[v]: x for v, x in steps.sequences.items()},
        others={made_inputs[v]: steps.others[v] for v in others},
        following=following,
        stacked=[(v, axis) for v, (_, axis) in zip(stacked, steps.stacked, strict=True)],
        skipped=set(),
        number=None if steps.number is None else made_inputs[steps.number],
    )


class LoopedCells(RulePass):
    name = "looped_cells"
    rules = (looped_cells,)
    gpu_only = True  # the libraries of the CPU run loops
