"""Scales and shifts per channel disappear into the weights and bias of the linear op beside them.

After a linear op: ``W' = W s``, ``b' = b s + t`` along the output channels. Before one: ``W' = W s`` along the input
channels, ``b' = b + W t``. A whole chain (BatchNormalization, then a Mul and an Add, say) is composed in float64 and
folded at once, so that weights are rounded once. What is left over becomes a Mul and an Add by the second pass here, and, for
libraries that run both in one kernel, a BatchNormalization again by the third.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.norm import EpsilonAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass
from optdnn.passes.support.affine import IDENTITY, Affine, read, round_to, variable
from optdnn.passes.support.linear import LINEAR, Linear


class _FoldChain(Rule):
    """Grows a chain of affine ops from a linear op, as long as each link is the only use of the one before.

    Two rules share each direction so that BatchNormalizations are counted apart from plain scales and shifts.
    """

    kinds = LINEAR
    batch_norm: bool

    def _concerns(self, chain: list[Op]) -> bool:
        return any(op.kind == "BatchNormalization" for op in chain) == self.batch_norm


class _FoldAfter(_FoldChain):
    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        linear = Linear.of(graph, op)
        if linear is None:
            return None
        total, chain, value, miss = IDENTITY, list[Op](), op.value, None
        while user := next((u for u in graph.users(value) if variable(graph, u) == value), None):
            step = _after(graph, linear, value, user, total)
            if isinstance(step, Miss):
                miss = step if self._concerns([user]) else None
                break
            total, value = total.then(step), user.value
            chain.append(user)
        if not chain or not self._concerns(chain):
            return miss
        absorbed = linear.absorb_after(total)
        return absorbed if isinstance(absorbed, Miss) else Match((op, *chain), (value, op.inputs[0], absorbed))

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        value, x, absorbed = match.data
        patch = Patch(graph, match.ops)
        patch.replace(value, absorbed.add_to(patch, x))
        return patch


def _after(graph: Graph, linear: Linear, value: Value, user: Op, total: Affine) -> Affine | Miss:
    uses = graph.uses(value)
    last = graph.op(value).name
    if any(graph.op(u.op).kind == "Output" for u in uses):
        return Miss(f"the result of {last} is an output of the network")
    if len(uses) > 1:
        return Miss(f"the result of {last} is used {len(uses)} times")
    step = read(graph, user, linear.axis, linear.channels)
    if isinstance(step, Miss):
        return step
    reason = linear.refuses_after(total.then(step))
    return Miss(reason) if reason else step


class _FoldBefore(_FoldChain):
    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        linear = Linear.of(graph, op)
        value = op.inputs[0]
        if linear is None or value is None:
            return None
        total, chain, miss = IDENTITY, list[Op](), None
        while (x := variable(graph, graph.op(value))) is not None:
            step = _before(graph, linear, value, total)
            if isinstance(step, Miss):
                miss = step if self._concerns([graph.op(value)]) else None
                break
            chain.append(graph.op(value))
            total, value = step.then(total), x
        if not chain or not self._concerns(chain):
            return miss
        absorbed = linear.absorb_before(total)
        return absorbed if isinstance(absorbed, Miss) else Match((op, *chain), (op.value, value, absorbed))

    rewrite = _FoldAfter.rewrite


def _before(graph: Graph, linear: Linear, value: Value, total: Affine) -> Affine | Miss:
    producer = graph.op(value)
    if graph.sole_user(value) is None:
        return Miss(f"the result of {producer.name} is used {graph.use_count(value)} times")
    step = read(graph, producer, linear.in_axis, linear.in_channels)
    if isinstance(step, Miss):
        return step
    reason = linear.refuses_before(step.then(total))
    return Miss(reason) if reason else step


class ConvBn(_FoldAfter):
    name = "conv_bn"
    batch_norm = True


class ConvScaleShift(_FoldAfter):
    name = "conv_scale_shift"
    batch_norm = False


class BnConv(_FoldBefore):
    name = "bn_conv"
    batch_norm = True


class ScaleShiftConv(_FoldBefore):
    name = "scale_shift_conv"
    batch_norm = False


class FuseConvBn(RulePass):
    name = "fuse_conv_bn"
    rules = (ConvBn(), ConvScaleShift(), BnConv(), ScaleShiftConv())


class BnScaleShift(Rule):
    """A BatchNormalization becomes a Mul and an Add by constants of shape (C, 1, …, 1)."""

    name = "bn_scale_shift"
    kinds = frozenset({"BatchNormalization"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        x = op.inputs[0]
        t = op.outputs[0].type
        if x is None or t.shape is None:
            return None
        channels = graph.type(op.inputs[1]).size if op.inputs[1] is not None else 0
        affine = read(graph, op, 1, channels if isinstance(channels, int) else 0)
        if not isinstance(affine, Affine):
            return affine
        shape = (-1,) + (1,) * (len(t.shape) - 2)
        scale, shift = (round_to(a.reshape(shape), t.dtype) for a in (affine.scale, affine.shift))
        if scale is None or shift is None:
            return Miss(f"the scale or shift of {op.name} would overflow {t.dtype}")
        return Match((op,), (x, scale, shift))

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        (op,) = match.ops
        x, scale, shift = match.data
        patch = Patch(graph, match.ops)
        scaled = patch.add("Mul", [x, patch.constant(scale, "scale")])
        patch.replace(op.value, patch.add("Add", [scaled, patch.constant(shift, "shift")]))
        return patch


class BnToScaleShift(RulePass):
    """Runs after :class:`FuseConvBn` had its chance, so that what it counts is what could not be folded."""

    name = "bn_to_scale_shift"
    rules = (BnScaleShift(),)


class ScaleShiftBn(Rule):
    """A Mul and an Add by one constant for each channel of an image become a BatchNormalization of mean 0, variance 1."""

    name = "scale_shift_bn"
    kinds = frozenset({"Add"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        scaled = variable(graph, op)
        mul = graph.op(scaled) if scaled is not None else op
        x = variable(graph, mul) if mul.kind == "Mul" else None
        shape = None if x is None else graph.type(x).shape
        if scaled is None or x is None or shape is None or len(shape) < 3 or not isinstance(shape[1], int):
            return None
        if graph.sole_user(scaled) is None:
            return Miss(f"the result of {mul.name} is used {graph.use_count(scaled)} times")
        scale, shift = read(graph, mul, 1, shape[1]), read(graph, op, 1, shape[1])
        if not isinstance(scale, Affine) or not isinstance(shift, Affine):
            return None  # other arithmetic, such as a mask
        if scale.scale.ndim + shift.shift.ndim == 0:
            return None
        return Match((op, mul), (x, shape[1], scale.then(shift)))

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        op = match.ops[0]
        x, channels, affine = match.data
        dtype = op.outputs[0].type.dtype
        patch = Patch(graph, match.ops)
        statistics = (affine.scale, affine.shift, np.zeros(()), np.ones(()))
        constants = [patch.constant(np.broadcast_to(s, (channels,)).astype(dtype), "statistic") for s in statistics]
        patch.replace(op.value, patch.add("BatchNormalization", [x, *constants], EpsilonAttrs(0.0)))
        return patch


class ScaleShiftToBn(RulePass):
    """For targets whose libraries run a BatchNormalization in one go and a Mul and an Add in two."""

    name = "scale_shift_to_bn"
    rules = (ScaleShiftBn(),)
