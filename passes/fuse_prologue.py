"""What scales and shifts the input of a convolution or matrix product, per channel, becomes stages of its prologue.

This is what remains of a BatchNormalization that could not be folded (DenseNet's and the pre-activation ResNet's: its
activation stands between it and the convolution, or the value before it is shared), and the channel gate of
squeeze-and-excitation. A prologue is applied as operand 0 is read, before padding. Runs after fuse_epilogue: what a producer
can do to its own result is cheaper there.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass
from optdnn.passes.support import affine
from optdnn.passes.support.linear import LINEAR, Linear
from optdnn.passes.support.stages import ACTIVATIONS, Slots, refuses, with_stages


class _Prologue(Rule):
    """Grows a chain upwards from operand 0, each link the only use of the one before, that begins with ``_starts``."""

    kinds = LINEAR

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        linear = Linear.of(graph, op)
        value = op.inputs[0]
        if linear is None or linear.weight is None or value is None or op.attrs.prologue:
            return None  # a product of two computed values (attention) has kernels of its own
        chain: list[tuple[Op, Value]] = []
        kept = 0
        miss: Miss | None = None
        while True:
            producer = graph.op(value)
            x, starts = self._link(graph, linear, producer)
            if x is None:
                break
            miss = self._refusal(graph, linear, producer, x, value)
            if miss is not None:
                break
            chain.append((producer, x))
            kept = len(chain) if starts else kept
            value = x
        if not kept:
            return miss if miss is not None and self._reaches(graph, linear, value) else None
        return Match((op, *(p for p, _ in chain[:kept])), tuple(reversed(chain[:kept])))

    def _reaches(self, graph: Graph, linear: Linear, value: Value) -> bool:
        """True if the chain, refusals aside, has a link that a prologue starts with."""
        while True:
            x, starts = self._link(graph, linear, graph.op(value))
            if x is None or starts:
                return starts
            value = x

    def _link(self, graph: Graph, linear: Linear, op: Op) -> tuple[Value | None, bool]:
        """The operand that ``op`` passes on, and whether a prologue may start with ``op``; (None, False): not a link."""
        raise NotImplementedError

    def _refusal(self, graph: Graph, linear: Linear, op: Op, x: Value, value: Value) -> Miss | None:
        if graph.sole_user(value) is None:
            return Miss(f"the result of {op.name} is used {graph.use_count(value)} times")
        return refuses(graph, op, x)

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        op = match.ops[0]
        slots = Slots(op)
        stages = [slots.stage(link, x, k) for k, (link, x) in enumerate(match.data)]
        patch = Patch(graph, match.ops)
        inputs = slots.inputs(match.data[0][1])
        patch.replace(op.value, patch.add(op.kind, inputs, with_stages(op.attrs, prologue=stages)))
        return patch


class PrologueScaleShift(_Prologue):
    """``[Mul] [Add] [activation]`` by constants per channel."""

    name = "prologue_scale_shift"

    def _link(self, graph: Graph, linear: Linear, op: Op) -> tuple[Value | None, bool]:
        x = affine.variable(graph, op)
        if x is not None and op.kind != "BatchNormalization":
            known = affine.read(graph, op, linear.in_axis, linear.in_channels)
            return (x, True) if isinstance(known, affine.Affine) else (None, False)
        return (op.inputs[0], False) if op.kind in ACTIVATIONS and len(op.inputs) == 1 else (None, False)


class PrologueGate(_Prologue):
    """A Mul by a value per image and channel, before a convolution whose kernel is one point."""

    name = "prologue_gate"
    kinds = frozenset({"Conv"})

    def _link(self, graph: Graph, linear: Linear, op: Op) -> tuple[Value | None, bool]:
        if op.kind != "Mul":
            return None, False
        for x, gate in (op.inputs, op.inputs[::-1]):
            if x is None or gate is None or graph.constant_value(gate) is not None:
                continue
            shape, full = graph.type(gate).shape, graph.type(x).shape
            if shape is None or full is None or len(shape) != len(full) or shape == full:
                continue
            if shape[1] == full[1] and all(d == 1 for d in shape[2:]):
                return x, True
        return None, False

    def _refusal(self, graph: Graph, linear: Linear, op: Op, x: Value, value: Value) -> Miss | None:
        kernel = graph.type(linear.op.inputs[1]).static_shape[2:] if linear.op.inputs[1] is not None else ()
        name, group = linear.op.name, linear.op.attrs.group
        if any(k != 1 for k in kernel):
            return Miss(
                f"{name} has a kernel of {'x'.join(map(str, kernel))}: it would apply the gate once for each tap"
            )
        if group != 1:
            return Miss(f"{name} has {group} groups: too little work to hide the gate behind")
        return super()._refusal(graph, linear, op, x, value)


class FusePrologue(RulePass):
    name = "fuse_prologue"
    rules = (PrologueScaleShift(), PrologueGate())
