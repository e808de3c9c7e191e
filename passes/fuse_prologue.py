"""Scales and shifts per channel of the input of a convolution become stages of its prologue.

Such scales and shifts come from the channel gates of squeeze-and-excitation, and from BatchNormalizations that could not be folded:
in DenseNet and pre-activation ResNets an activation is in between, or the normalized value has several readers. The kernel applies
the prologue when it reads operand 0, before padding. The kernels of matrix products have no prologue: TMA brings their operands to
tensor cores as they are. This pass runs after fuse_epilogue: a stage is cheaper in the epilogue of the
producer. On GPUs it is also cheaper in the launch of a pointwise operator that computes operand 0, unless that operator only
converts the bytes of a picture.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass
from optdnn.passes.support import affine
from optdnn.passes.support.facts import is_pointwise, operand, resized_picture, shape_of
from optdnn.passes.support.linear import Linear
from optdnn.passes.support.stages import ACTIVATIONS, Slots, refuses, with_stages


class _Prologue(Rule):
    """Grows a chain of ops backwards from operand 0, each read only by the next one, up to an op that may start a prologue."""

    kinds = frozenset({"Conv", "ConvTranspose"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        linear, value = Linear.of(graph, op), operand(op)
        if linear is None or linear.weight is None or op.attrs.prologue:
            return None
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
        links = chain[:kept][::-1]
        first = graph.op(links[0][1])
        alone = is_pointwise(first) and graph.sole_user(links[0][1]) is not None
        if context.on_gpu and alone and first.kind != "Cast":  # kernels convert the bytes of pictures themselves
            return Miss(f"{links[0][0].name} joins the launch of the pointwise operator {first.name} before it")

        def build(patch: Patch) -> Value:
            slots = Slots(op)
            stages = [slots.stage(link, x, k) for k, (link, x) in enumerate(links)]
            return patch.add(op.kind, slots.inputs(links[0][1]), with_stages(op.attrs, prologue=stages))

        return Match((op, *(p for p, _ in chain[:kept])), build)

    def _reaches(self, graph: Graph, linear: Linear, value: Value) -> bool:
        """Whether the chain from ``value`` on, without regard to refusals, has a link that may start a prologue."""
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


class PrologueScaleShift(_Prologue):
    """``[Mul] [Add] [activation]`` by constants per channel."""

    name = "prologue_scale_shift"

    def _link(self, graph: Graph, linear: Linear, op: Op) -> tuple[Value | None, bool]:
        x = affine.variable(graph, op)
        if x is not None and op.kind != "BatchNormalization":
            known = affine.read(graph, op, linear.in_axis, linear.in_channels)
            return (x, True) if isinstance(known, affine.Affine) else (None, False)
        return (op.inputs[0], False) if op.kind in ACTIVATIONS and len(op.inputs) == 1 else (None, False)

    def _refusal(self, graph: Graph, linear: Linear, op: Op, x: Value, value: Value) -> Miss | None:
        if op.kind == "Add" and (resize := resized_picture(graph, x)) is not None:
            return Miss(f"{resize.name}, which resizes a picture, adds it in its own launch")
        return super()._refusal(graph, linear, op, x, value)


class PrologueGate(_Prologue):
    """A Mul by a value per image and channel, perhaps with scales and shifts per channel after it, before a 1x1 convolution."""

    name = "prologue_gate"
    kinds = frozenset({"Conv"})

    def _link(self, graph: Graph, linear: Linear, op: Op) -> tuple[Value | None, bool]:
        if op.kind != "Mul":
            return PrologueScaleShift()._link(graph, linear, op)[0], False
        for x, gate in (op.inputs, op.inputs[::-1]):
            if x is None or gate is None or graph.constant_value(gate) is not None:
                continue
            shape, full = shape_of(graph, gate), shape_of(graph, x)
            if shape is None or full is None or len(shape) != len(full) or shape == full:
                continue
            if shape[1] == full[1] and all(d == 1 for d in shape[2:]):
                return x, True
        return PrologueScaleShift()._link(graph, linear, op)[0], False

    def _refusal(self, graph: Graph, linear: Linear, op: Op, x: Value, value: Value) -> Miss | None:
        kernel = graph.type(operand(linear.op, 1)).static_shape[2:]
        name, group = linear.op.name, linear.op.attrs.group
        if any(k != 1 for k in kernel):
            return Miss(
                f"{name} has a kernel of {'x'.join(map(str, kernel))}: it would apply the gate once for each tap"
            )
        if group != 1:
            return Miss(f"{name} has {group} groups: too little work to hide the gate")
        return super()._refusal(graph, linear, op, x, value)


class FusePrologue(RulePass):
    name = "fuse_prologue"
    rules = (PrologueGate(), PrologueScaleShift())
