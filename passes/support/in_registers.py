"""Pointwise ops absorb the casts around them: they read and store 16-bit floats, convert in registers and compute in fp32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Output, Value
from optdnn.ops.base import Attrs
from optdnn.passes.fuse_pointwise import first_operand
from optdnn.passes.support.facts import is_pointwise
from optdnn.passes.support.guards import Guards
from optdnn.passes.support.open_stages import OpenStage, body, outside, steps_of
from optdnn.passes.support.precision_report import FP16_LARGEST
from optdnn.types import BF16, FP16, FP32

NARROW = (FP16, BF16)


def in_registers(graph: Graph, guarded: Guards) -> set[int]:
    """Let the pointwise ops of ``guarded`` absorb the casts of their operands, and a cast that is the only reader of their result.

    Results that must saturate are clipped before the cast. Casts that nothing reads any more are removed. Returns the ids of the
    ops that store 16-bit floats.
    """
    pointwise = [i for i in guarded.reasons if i in graph and is_pointwise(graph.op(i))]
    for i in pointwise:
        if i in graph:  # an op may be a cast of the model, which another op has absorbed
            _absorb(graph, graph.op(i), i in guarded.saturates)
    return {i for i in pointwise if i in graph and graph.op(i).outputs[0].type.dtype in NARROW}


def _absorb(graph: Graph, op: Op, saturates: bool) -> None:
    casts = {v: graph.op(v) for v in op.inputs if v is not None and graph.op(v).kind == "Cast"}
    entering = {v: c for v, c in casts.items() if graph.type(c.inputs[0]).dtype in NARROW and c.attrs.to == FP32}  # type: ignore[arg-type]
    users = graph.users(op.value)
    alone = len(users) == 1 and users[0].kind == "Cast" and users[0].attrs.to in NARROW
    leaving = users[0] if alone and op.outputs[0].type.dtype == FP32 else None
    if not entering and leaving is None:
        return
    steps = [OpenStage("Cast", c.attrs, c.inputs) for c in entering.values()]
    by, step_of = len(steps), {v: k for k, v in enumerate(entering)}
    steps += [replace(s, args=tuple(_shifted(a, step_of, by) for a in s.args)) for s in steps_of(op)]
    out = op.outputs[0]
    if leaving is not None:
        out = Output(out.name, out.type.with_dtype(leaving.attrs.to), out.known)
        if saturates and leaving.attrs.to == FP16:
            low, high = (graph.add_constant(np.asarray(s * FP16_LARGEST, np.float32), "fp16_largest") for s in (-1, 1))
            steps.append(OpenStage("Clip", Attrs(), (len(steps) - 1, low, high)))
        steps.append(OpenStage("Cast", leaving.attrs, (len(steps) - 1,)))
    steps = _without_expansion(graph, steps, op)
    first = first_operand(graph, steps, op, on_gpu=True)
    if first is None:  # it reads only constants
        return
    operands, attrs = body(steps, first)
    if leaving is not None:
        graph.replace_uses(leaving.value, op.value)
    before = [v.op for v in op.inputs if v is not None]
    graph.set_op(replace(op, kind="Pointwise", inputs=tuple(operands), attrs=attrs, outputs=(out,)))
    graph.remove_dead([*before, *([leaving.id] if leaving is not None else [])])


def _shifted(a: Value | int | None, step_of: dict[Value, int], by: int) -> Value | int | None:
    """The argument ``a`` of a step after ``by`` casts were added before it; ``step_of``: cast value -> step of its Cast."""
    if isinstance(a, Value):
        return step_of.get(a, a)
    return None if a is None else a + by


def _without_expansion(graph: Graph, steps: list[OpenStage], op: Op) -> list[OpenStage]:
    """Steps that read the operands of Expands instead of their results, since the kernel broadcasts.

    An Expand to the result's shape stays if no other operand has that shape.
    """
    for v in outside(steps):
        source = graph.op(v)
        if source.kind != "Expand" or graph.type(v).shape != op.outputs[0].type.shape:
            continue
        narrow = [replace(s, args=tuple(source.inputs[0] if a == v else a for a in s.args)) for s in steps]
        if first_operand(graph, narrow, op, on_gpu=False) is not None:
            steps = narrow
    return steps
