"""Weights and bias of a linear op absorb the adjacent scales and shifts per channel.

After a linear op: ``W' = W s``, ``b' = b s + t`` along the output channels. Before one: ``W' = W s`` along the input
channels, ``b' = b + W t``, which is an Add where the op holds no bias. A whole chain (BatchNormalization, then a Mul and an
Add, say) is composed in float64 and folded at once, so that weights are rounded once. Convolutions of one value that are added
become one (:mod:`~optdnn.passes.parallel_convs`). A LayerNormalization absorbs what follows it as well. Sums and differences of
a scaled tensor and a linear op take the forms of
:mod:`~optdnn.passes.rules.scaled_residuals`. A second pass writes the remaining BatchNormalizations as Mul and Add; a third
one joins these to a BatchNormalization again, for libraries that run both in one kernel.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.norm import EpsilonAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass, rule
from optdnn.passes.parallel_convs import parallel_convs, parallel_products
from optdnn.passes.rules.concats import activation_of_parts, bn_of_parts
from optdnn.passes.rules.scaled_residuals import lerp, scaled_residual, subtracted_linear
from optdnn.passes.support.affine import IDENTITY, Affine, read, round_to, variable
from optdnn.passes.support.facts import RESHAPES, operand, producer, shape_of
from optdnn.passes.support.linear import LINEAR, Linear


class _FoldChain(Rule):
    """Grows a chain of affine ops from a linear op, as long as each link is the only use of the previous one. An affine op that
    only linear ops read goes into the weights of each of them (queries, keys and values after one norm).

    ``after``: the chain follows the linear op, else precedes it. Two rules share each direction, so that
    BatchNormalizations (``batch_norm``) are counted apart from plain scales and shifts.
    """

    kinds = LINEAR

    def __init__(self, name: str, *, after: bool, batch_norm: bool):
        self.name, self.after, self.batch_norm = name, after, batch_norm

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        linear = Linear.of(graph, op)
        if linear is None:
            return None
        total, chain, miss = IDENTITY, list[Op](), None
        end = op.value if self.after else operand(op)
        while (link := self._link(graph, end)) is not None:
            longer = self._longer(graph, linear, total, end, link)
            if isinstance(longer, Miss):
                miss = longer if self._concerns([link]) else None
                break
            total = longer
            chain.append(link)
            end = link.value if self.after else _variable(graph, link)
        if not chain or not self._concerns(chain):
            return miss
        absorbed = linear.absorb_after(total) if self.after else linear.absorb_before(total)
        if isinstance(absorbed, Miss):
            return absorbed
        x, result = (operand(op), end) if self.after else (end, op.value)
        return Match((op, *chain), lambda patch: absorbed.add_to(patch, x), result)

    def _concerns(self, chain: list[Op]) -> bool:
        return any(op.kind == "BatchNormalization" for op in chain) == self.batch_norm

    def _link(self, graph: Graph, end: Value) -> Op | None:
        """The affine op next to the end of the chain."""
        beside = graph.users(end) if self.after else [graph.op(end)]
        return next((u for u in beside if (x := variable(graph, u)) is not None and (x == end or not self.after)), None)

    def _longer(self, graph: Graph, linear: Linear, total: Affine, end: Value, link: Op) -> Affine | Miss:
        """The chain with ``link`` at its end."""
        name = graph.op(end).name
        if self.after and any(user.kind == "Output" for user in graph.users(end)):
            return Miss(f"the result of {name} is an output of the network")
        if graph.use_count(end) > 1 and (self.after or not _all_absorb(graph, end, link)):
            return Miss(f"the result of {name} is used {graph.use_count(end)} times")
        side = (linear.axis, linear.channels) if self.after else (linear.in_axis, linear.in_channels)
        step = read(graph, link, *side)
        if isinstance(step, Miss):
            return step
        longer = total.then(step) if self.after else step.then(total)
        reason = linear.refuses_after(longer) if self.after else linear.refuses_before(longer)
        return Miss(reason) if reason else longer


def _all_absorb(graph: Graph, value: Value, link: Op) -> bool:
    """Whether each reader of an affine op's result is a linear op that absorbs it, so that it goes away."""
    for user in graph.users(value):
        linear = Linear.of(graph, user)
        if linear is None or operand(user) != value:
            return False
        step = read(graph, link, linear.in_axis, linear.in_channels)
        if isinstance(step, Miss) or linear.refuses_before(step):
            return False
    return True


def _variable(graph: Graph, op: Op) -> Value:
    x = variable(graph, op)
    assert x is not None
    return x


@rule("bn_of_rows", {"BatchNormalization"})
def bn_of_rows(graph: Graph, op: Op) -> Match | Miss | None:
    """``bn(flat(x @ W))`` is ``flat(x @ W * s + t)`` where only leading axes are flattened: the product absorbs s and t (LeViT)."""
    flat = producer(graph, operand(op), RESHAPES, alone=True)
    product = None if flat is None else producer(graph, flat.inputs[0], {"MatMul"}, alone=True)
    if flat is None or product is None or graph.constant_value(product.inputs[1]) is None:
        return None
    before, after = shape_of(graph, product.value), shape_of(graph, flat.value)
    if not before or after is None or len(after) != 2 or before[-1] != after[1] or not isinstance(after[1], int):
        return None
    affine = read(graph, op, 1, after[1])
    if isinstance(affine, Miss):
        return affine
    scale, shift = (round_to(a, op.outputs[0].type.dtype) for a in (affine.scale, affine.shift))
    if scale is None or shift is None:
        return Miss(f"the scale or shift of {op.name} would overflow {op.outputs[0].type.dtype}")

    def build(patch: Patch) -> Value:
        scaled = patch.add("Mul", [product.value, patch.constant(scale.reshape(-1), "scale")])
        shifted = patch.add("Add", [scaled, patch.constant(shift.reshape(-1), "shift")])
        return patch.add(flat.kind, [shifted, *flat.inputs[1:]], flat.attrs)

    return Match((op, flat), build)


@rule("norm_scale_shift", {"LayerNormalization", "RMSNormalization"})
def norm_scale_shift(graph: Graph, op: Op) -> Match | Miss | None:
    """Factors and shifts per channel after a normalization go into its scale and bias (SmoothQuant: Xiao et al., 2023)."""
    user = graph.sole_user(op.value)
    shape = op.outputs[0].type.shape
    if (
        user is None
        or variable(graph, user) != op.value
        or not shape
        or len(op.outputs) > 1
        or user.kind == "BatchNormalization"
    ):
        return None
    given = [a for v in op.inputs[1:] if (a := graph.constant_value(v)) is not None and a.shape == shape[-1:]]
    if len(given) < len(op.inputs) - 1:
        return Miss("its scale or bias is not one constant per channel")
    affine = read(graph, user, len(shape) - 1, given[0].size)
    if isinstance(affine, Miss):
        return None  # other arithmetic, such as an addition of positions
    if affine.shifts and op.kind == "RMSNormalization":
        return Miss("it has no bias for the shift")
    old = [a.astype(np.float64) for a in given]
    new = [old[0] * affine.scale]
    if len(old) > 1 or affine.shifts:
        new.append(np.broadcast_to((old[1] if len(old) > 1 else 0.0) * affine.scale + affine.shift, old[0].shape))
    rounded = [r for a, g in zip(new, (given[0], given[-1]), strict=False) if (r := round_to(a, g.dtype)) is not None]
    if len(rounded) < len(new):
        return Miss(f"its scale or bias would overflow with {user.name}")

    def build(patch: Patch) -> Value:
        constants = [patch.constant(a, name) for a, name in zip(rounded, ("scale", "bias"), strict=False)]
        return patch.add(op.kind, [op.inputs[0], *constants], op.attrs)

    return Match((user, op), build)


class FuseConvBn(RulePass):
    """Weights and bias of a linear op absorb the adjacent scales and shifts per channel."""

    name = "fuse_conv_bn"
    rules = (
        bn_of_rows,
        bn_of_parts,
        _FoldChain("conv_bn", after=True, batch_norm=True),
        _FoldChain("conv_scale_shift", after=True, batch_norm=False),
        _FoldChain("bn_conv", after=False, batch_norm=True),
        _FoldChain("scale_shift_conv", after=False, batch_norm=False),
        activation_of_parts,  # when no scale or shift is left in between
        parallel_convs,  # here, since scales and shifts around a sum of branches fold into what they merge to
        parallel_products,
        lerp,
        scaled_residual,  # after these two, which may add convolutions of one value
        subtracted_linear,  # last of these: the rules above also add and subtract convolutions
        norm_scale_shift,
    )


@rule("bn_scale_shift", {"BatchNormalization"})
def bn_scale_shift(graph: Graph, op: Op) -> Match | Miss | None:
    """A BatchNormalization becomes a Mul and an Add by constants of shape (C, 1, …, 1)."""
    t = op.outputs[0].type
    if t.shape is None:
        return None
    channels = graph.type(operand(op, 1)).size
    affine = read(graph, op, 1, channels if isinstance(channels, int) else 0)
    if isinstance(affine, Miss):
        return affine
    shape = (-1,) + (1,) * (len(t.shape) - 2)
    scale, shift = (round_to(a.reshape(shape), t.dtype) for a in (affine.scale, affine.shift))
    if scale is None or shift is None:
        return Miss(f"the scale or shift of {op.name} would overflow {t.dtype}")

    def build(patch: Patch) -> Value:
        scaled = patch.add("Mul", [operand(op), patch.constant(scale, "scale")])
        return patch.add("Add", [scaled, patch.constant(shift, "shift")])

    return Match((op,), build)


class BnToScaleShift(RulePass):
    """BatchNormalizations that ``fuse_conv_bn`` could not fold become multiplications and additions per channel."""

    name = "bn_to_scale_shift"
    rules = (bn_scale_shift,)


@rule("scale_shift_bn", {"Add"})
def scale_shift_bn(graph: Graph, op: Op) -> Match | Miss | None:
    """A Mul and an Add by one constant for each channel of an image become a BatchNormalization of mean 0, variance 1."""
    scaled = variable(graph, op)
    mul = producer(graph, scaled, {"Mul"})
    x = None if mul is None else variable(graph, mul)
    shape = shape_of(graph, x)
    if scaled is None or mul is None or shape is None or len(shape) < 3 or not isinstance(shape[1], int):
        return None
    if graph.sole_user(scaled) is None:
        return Miss(f"the result of {mul.name} is used {graph.use_count(scaled)} times")
    scale, shift = read(graph, mul, 1, shape[1]), read(graph, op, 1, shape[1])
    if isinstance(scale, Miss) or isinstance(shift, Miss):
        return None  # other arithmetic, such as a mask
    if scale.scale.ndim + shift.shift.ndim == 0:
        return None
    affine, channels, dtype = scale.then(shift), shape[1], op.outputs[0].type.dtype

    def build(patch: Patch) -> Value:
        statistics = (affine.scale, affine.shift, np.zeros(()), np.ones(()))
        wide = [np.broadcast_to(s, (channels,)).astype(dtype) for s in statistics]
        constants = [patch.constant(s, "statistic") for s in wide]
        return patch.add("BatchNormalization", [x, *constants], EpsilonAttrs(0.0))

    return Match((op, mul), build)


class ScaleShiftToBn(RulePass):
    """A multiplication and an addition per channel become a BatchNormalization again.

    For targets whose libraries run a BatchNormalization in one kernel, and a Mul and an Add in two."""

    name = "scale_shift_to_bn"
    rules = (scale_shift_bn,)
