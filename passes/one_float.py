"""A network of 16-bit floats with parts in fp32 becomes a network of fp32, if the build rounds all of it to 16 bits anyway.

Converters and mixed-precision training (Micikevicius et al., 2018) keep norms, softmaxes and sums in fp32. Conversions then stand
between a product and the bias, residual or activation that its launch could compute, and the passes that merge these do not see
through them. In the end :mod:`optdnn.passes.assign_precision` rounds fp32 as the build asks, and no conversion is left.
"""

from __future__ import annotations

from dataclasses import replace

from optdnn.ir.body import bodies, with_dtypes
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ops.binary import CastAttrs
from optdnn.passes.base import Fired, Pass, PassContext, PassReport, Refused, node_names
from optdnn.passes.fuse_conversions import HALVES
from optdnn.passes.support.facts import operand
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.types import FP32

MOST_BYTES = 1 << 30
"""Most bytes of 16-bit constants: until they are rounded again, they take twice as many."""


class OneFloat(Pass):
    name = "one_float"

    def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
        plan = context.plan or PrecisionPlan.of_option(context.precision)
        if not context.on_gpu or plan.quantizes or plan.packs or plan.floats not in (("fp16",), ("bf16",)):
            return
        widening = [op for op in graph.ops() if _widens(graph, op)]
        if not widening:
            return
        if (why := _refusal(graph)) is not None:
            report.refused.append(Refused("one_float", node_names(widening[:1]), why))
            return
        for op in graph.order():
            _widen(graph, graph.op(op.id))  # its current form: an input before it may have a conversion now
        report.fired.append(Fired("one_float", node_names(widening)))


def _is_half(graph: Graph, value: Value | None) -> bool:
    return value is not None and graph.type(value).dtype in HALVES


def _widens(graph: Graph, op: Op) -> bool:
    """Whether 16-bit floats become fp32 between computed values: in a Cast, or in a norm with a scale in fp32 (Gemma)."""
    source = op.input(0)
    if op.kind in STRUCTURAL or not _is_half(graph, source) or op.outputs[0].type.dtype != FP32:
        return False
    inside = graph.op(operand(op)).kind not in ("Input", "Constant") or op.kind != "Cast"
    return inside and any(u.kind != "Output" for u in graph.users(op.value))


def _refusal(graph: Graph) -> str | None:
    """Why the network keeps its floats; None if they can be fp32."""
    size = 0
    for op in graph.ops():
        if op.kind in STRUCTURAL:
            size += op.attrs.value.nbytes if op.kind == "Constant" and op.outputs[0].type.dtype in HALVES else 0
            continue
        halves = any(_is_half(graph, v) for v in op.inputs) or any(o.type.dtype in HALVES for o in op.outputs)
        if halves and (op.definition.traits.own_precision or bodies(op)):
            return f"{op.name} ({op.kind}) computes in the types of its operands"
    return f"its 16-bit constants have {size} bytes, more than {MOST_BYTES}" if size > MOST_BYTES else None


def _widen(graph: Graph, op: Op) -> None:
    """Give an operator fp32 in the place of 16-bit floats. Inputs and outputs of the network keep their types."""
    if op.kind == "Input":
        if _is_half(graph, op.value):
            users = [(u, k) for u in graph.users(op.value) for k, v in enumerate(u.inputs) if v == op.value]
            wide = graph.add("Cast", [op.value], CastAttrs(FP32), names=[f"{op.name}.fp32"], src=op.src).value
            for user, slot in users:
                _read(graph, graph.op(user.id), slot, wide)
        return
    if op.kind == "Output":
        declared, source = op.outputs[0].type.dtype, operand(op)
        if declared in HALVES and graph.type(source).dtype == FP32:
            name = f"{graph.output(source).name}.{declared.name}"
            narrow = graph.add("Cast", [source], CastAttrs(declared), names=[name], src=graph.op(source).src).value
            _read(graph, op, 0, narrow)
        return
    outputs = tuple(replace(o, type=o.type.with_dtype(FP32)) if o.type.dtype in HALVES else o for o in op.outputs)
    attrs = with_dtypes(op.attrs, lambda t: FP32 if t in HALVES else t, lambda body: body)
    if attrs is not op.attrs or outputs != op.outputs:
        graph.set_op(replace(op, attrs=attrs, outputs=outputs))


def _read(graph: Graph, op: Op, slot: int, value: Value) -> None:
    graph.set_op(replace(op, inputs=(*op.inputs[:slot], value, *op.inputs[slot + 1 :])))
