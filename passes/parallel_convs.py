"""Convolutions or products of one value whose results are added become one, with the sum of their weights.

RepVGG, MobileOne, FastViT and RepLKNet add branches of several kernel sizes, and the value itself, scaled per channel:
``conv3x3(x) + conv1x1(x) + x * s + t`` is one 3x3 convolution of x. A smaller kernel's taps are placed among those of the largest
one; a scale per channel is a depthwise 1x1 convolution. Weights are added in float64 and rounded once.

Adapters that were not merged before the export (LoRA: Hu et al., 2021) add the product of two small matrices to a larger one:
``x W + x A B`` is ``x (W + A B)``. Experts that the network selects by a constant (ViTPose++) add products of one value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.conv import ConvAttrs
from optdnn.passes.base import Match, Miss, PassContext, rule
from optdnn.passes.support.affine import IDENTITY, Affine, read, round_to, variable
from optdnn.passes.support.facts import operand, producer, shape_of
from optdnn.passes.support.products import PlainProduct, multiplied, plain_product
from optdnn.types import FP64, Array, Shape, is_float

SUMS = frozenset({"Add", "Sub"})
MOST_TERMS = 64
"""Most terms of a sum."""


@dataclass(frozen=True)
class Term:
    """A value that a sum adds (``sign`` 1.0) or subtracts (-1.0)."""

    value: Value
    sign: float


@dataclass(frozen=True)
class Branch:
    """A term of a sum, as a convolution of ``x`` without stages. ``weight`` and ``bias`` are float64.

    ``ops``: the ops of the branch, each the only reader of the previous one.
    """

    x: Value
    attrs: ConvAttrs
    weight: Array
    bias: Array
    ops: tuple[Op, ...]

    def offsets(self, axis: int) -> range:
        """The positions of the taps along an axis, relative to the result's pixel times the stride."""
        begin, step = -self.attrs.pads[axis], self.attrs.dilations[axis]
        return range(begin, begin + step * self.weight.shape[2 + axis], step)

    @property
    def axes(self) -> range:
        return range(self.weight.ndim - 2)

    def fits(self, base: Branch) -> bool:
        """Whether a convolution with the taps and groups of ``base`` can compute this branch."""
        return (
            self.attrs.strides == base.attrs.strides
            and self.attrs.group % base.attrs.group == 0
            and all(set(self.offsets(axis)) <= set(base.offsets(axis)) for axis in self.axes)
        )

    def within(self, base: Branch) -> Array:
        """The weights in the shape of ``base``'s weights, with zeros at taps and channels that this branch does not have."""
        outer, inner, *kernel = base.weight.shape
        per_group = self.attrs.group // base.attrs.group
        shape = (base.attrs.group, per_group, outer // self.attrs.group, per_group, inner // per_group, *kernel)
        wide = np.zeros(shape, FP64)
        own = self.weight.reshape(base.attrs.group, per_group, *shape[2:3], *self.weight.shape[1:])
        positions = tuple(_positions(self.offsets(axis), base.offsets(axis)) for axis in self.axes)
        for k in range(per_group):
            wide[:, k, :, k][(slice(None),) * 3 + positions] = own[:, k]
        return wide.reshape(base.weight.shape)


def _positions(taps: range, among: range) -> slice:
    """The indices of ``taps`` within ``among``, which has all of them."""
    first, step = among.index(taps[0]), max(1, taps.step // among.step)
    return slice(first, first + step * len(taps), step)


@rule("parallel_convs", SUMS)
def parallel_convs(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """Merges the terms of a sum that are convolutions of one value with constant weights, or this value itself, scaled or not."""
    if not is_float(op.outputs[0].type.dtype) or op.outputs[0].type.shape is None:
        return None
    if _inside(graph, op):
        return None
    terms, sums = _terms(graph, op)
    convs = [c for t in terms if (c := _convolution(graph, t)) is not None]
    found = [_together(graph, terms, base) for base in convs]
    best = max(found, key=len, default=[])
    if sum(bool(b.ops) for _, b in best) < 2:  # small weights beside ones lose digits: a residual connection stays one
        shared = len({c.x for c in convs}) < len(convs)
        return Miss(f"the convolutions that {op.name} adds differ in strides, groups or taps") if shared else None
    if "8" in context.precision:
        return Miss(f"in 8 bits, the sum of the branches' weights of {op.name} is less accurate than each branch")
    merged = _sum_of(convs[found.index(best)], [b for _, b in best])
    if isinstance(merged, Miss):
        return merged
    weight, bias, attrs = merged
    used = {t.value for t, _ in best}
    rest = [t for t in terms if t.value not in used]
    ops = (*sums, *(o for _, b in best for o in b.ops))

    def build(patch: Patch) -> Value:
        more = [patch.constant(bias, "bias")] if bias.any() else []
        total = patch.add("Conv", [best[0][1].x, patch.constant(weight, "weight"), *more], attrs)
        for term in rest:
            total = patch.add("Add" if term.sign > 0 else "Sub", [total, term.value])
        return total

    return Match(ops, build)


@rule("parallel_products", SUMS)
def parallel_products(graph: Graph, op: Op) -> Match | Miss | None:
    """Merges the terms of a sum that are products of one value with constant matrices, or with two matrices in turn."""
    if not is_float(op.outputs[0].type.dtype) or op.outputs[0].type.shape is None or _inside(graph, op):
        return None
    terms, sums = _terms(graph, op)
    found = [(t, p, _factorized(graph, p)) for t in terms if (p := _product(graph, t.value)) is not None]
    groups = [
        [(t, p if p.x == x else wide) for t, p, wide in found if p.x == x or (wide is not None and wide.x == x)]
        for x in dict.fromkeys(p.x for _, p, _ in found)
    ]
    best = [(t, p) for t, p in max(groups, key=len, default=[]) if p is not None]
    if len(best) < 2:
        return None
    dtype, shape = op.outputs[0].type.dtype, best[0][1].weight.shape
    weight = round_to(np.asarray(sum(t.sign * p.weight.astype(FP64) for t, p in best)), dtype)
    shifts = [t.sign * p.bias.astype(FP64) for t, p in best if p.bias is not None]
    bias = round_to(np.broadcast_to(sum(shifts), shape[1:]), dtype) if shifts else None
    if weight is None or (shifts and bias is None):
        return Miss(f"the sum of the matrices of {op.name} would overflow {dtype}")
    used = {t.value for t, _ in best}

    def build(patch: Patch) -> Value:
        total = multiplied(patch, best[0][1].x, weight, bias)
        for term in terms:
            if term.value not in used:
                total = patch.add("Add" if term.sign > 0 else "Sub", [total, term.value])
        return total

    return Match((*sums, *(o for _, p in best for o in p.ops)), build)


def _product(graph: Graph, value: Value) -> PlainProduct | None:
    """The product with a constant matrix that computes a value with one reader, or None."""
    return None if graph.sole_user(value) is None else plain_product(graph, value)


@dataclass(frozen=True)
class _Factorized:
    """Two products, one after the other, as one: the fields of a :class:`PlainProduct`. ``weight`` is their product in float64."""

    x: Value
    weight: Array
    bias: Array | None
    ops: tuple[Op, ...]


def _factorized(graph: Graph, product: PlainProduct) -> _Factorized | None:
    """``(x A + a) B + b`` as the product ``x (A B) + (a B + b)``, if nothing else reads ``x A + a``; None for other products."""
    inner = _product(graph, product.x)
    if inner is None:
        return None
    second = product.weight.astype(FP64)
    shifts = [] if inner.bias is None else [inner.bias.astype(FP64) @ second]
    shifts += [] if product.bias is None else [product.bias.astype(FP64)]
    bias = np.asarray(sum(shifts)) if shifts else None
    return _Factorized(inner.x, inner.weight.astype(FP64) @ second, bias, (*product.ops, *inner.ops))


def _inside(graph: Graph, op: Op) -> bool:
    """Whether a sum is a term of another sum, which the rule matches with all terms."""
    user = graph.sole_user(op.value)
    return user is not None and _adds(graph, user, op.outputs[0].type.shape)


def _adds(graph: Graph, op: Op, shape: Shape | None) -> bool:
    """Whether an operator adds two computed values of this shape. A constant is no branch: the merged operator absorbs it."""
    whole = all(v is not None and shape_of(graph, v) == shape for v in op.inputs)
    return op.kind in SUMS and whole and all(graph.constant_value(v) is None for v in op.inputs)


def _terms(graph: Graph, root: Op) -> tuple[list[Term], list[Op]]:
    """The terms that a tree of additions adds, and the additions. Each addition but the root has one reader."""
    shape, sums, terms = root.outputs[0].type.shape, list[Op](), list[Term]()
    left = [Term(root.value, 1.0)]
    while left:
        term = left.pop()
        op = graph.op(term.value)
        inside = _adds(graph, op, shape)
        alone = op is root or graph.sole_user(term.value) is not None
        if inside and alone and len(terms) + len(left) < MOST_TERMS:
            sums.append(op)
            left.append(Term(operand(op, 1), term.sign if op.kind == "Add" else -term.sign))
            left.append(Term(operand(op, 0), term.sign))
        else:
            terms.append(term)
    return terms, sums


def _convolution(graph: Graph, term: Term) -> Branch | None:
    """A term as a branch, if it is a convolution without stages or other readers, with constant weights and bias; else None."""
    op = producer(graph, term.value, {"Conv"}, alone=True)
    if op is None or len(op.inputs) > 3 or op.attrs.prologue or op.attrs.epilogue or op.attrs.auto_pad != "NOTSET":
        return None
    weight, bias = graph.constant_value(op.inputs[1]), graph.constant_value(op.input(2))
    if weight is None or (bias is None and op.input(2) is not None):
        return None
    shift = np.zeros(weight.shape[0]) if bias is None else bias.astype(FP64)
    return Branch(operand(op), op.attrs, term.sign * weight.astype(FP64), term.sign * shift, (op,))


def _branch(graph: Graph, term: Term, base: Branch) -> Branch | None:
    """The term as a branch of the value that ``base`` reads, or None."""
    conv = _convolution(graph, term)
    if conv is not None:
        return conv if conv.x == base.x else None
    channels, rank = base.weight.shape[0], base.weight.ndim
    for value, affine, ops in _scaled(graph, term.value, channels):
        if value == base.x:
            shape = (channels, *(1,) * (rank - 1))
            scale = np.broadcast_to(affine.scale, (channels,)).reshape(shape)
            ones, none = (1,) * (rank - 2), (0,) * (2 * (rank - 2))
            attrs = replace(base.attrs, strides=ones, pads=none, dilations=ones, group=channels)
            shift = np.broadcast_to(affine.shift, (channels,))
            return Branch(value, attrs, term.sign * scale, term.sign * shift, ops)
    return None


def _together(graph: Graph, terms: Sequence[Term], base: Branch) -> list[tuple[Term, Branch]]:
    """The terms that one convolution with the taps and groups of ``base`` can compute, with their branches."""
    return [(t, b) for t in terms if (b := _branch(graph, t, base)) is not None and b.fits(base)]


def _scaled(graph: Graph, value: Value, channels: int) -> Iterator[tuple[Value, Affine, tuple[Op, ...]]]:
    """``value`` itself, then each earlier value that it scales and shifts per channel: the value, scale and shift, ops between."""
    total, ops = IDENTITY, list[Op]()
    while True:
        yield value, total, tuple(ops)
        op = graph.op(value)
        before = None if graph.sole_user(value) is None else variable(graph, op)
        step = None if before is None else read(graph, op, 1, channels)
        if before is None or step is None or isinstance(step, Miss):
            return
        total, value = step.then(total), before
        ops.append(op)


def _sum_of(base: Branch, branches: Sequence[Branch]) -> tuple[Array, Array, ConvAttrs] | Miss:
    """Weights, bias and attributes of the convolution that computes the sum of branches that fit ``base``."""
    dtype = base.ops[0].outputs[0].type.dtype
    wide = (sum(b.within(base) for b in branches), sum(b.bias for b in branches))
    weight, bias = (round_to(np.asarray(w), dtype) for w in wide)
    if weight is None or bias is None:
        return Miss(f"the sum of the weights of the branches would overflow {dtype}")
    return weight, bias, base.attrs
