"""Convolutions or matrix products that read one value become one, with their weights side by side, and a Split after it.

The 1x1 branches of an Inception block and the query, key and value projections of attention are such siblings. Merging them
saves launches and reads of the input, and costs the Split's copy. On a CPU (measured with OpenVINO and ONNX Runtime) both are
about equal: 0.94 to 1.04 of the separate time in OpenVINO for Inception and attention blocks. So there siblings are merged only
where a Concat joins the parts again, and no Split is needed.

On GPUs, convolutions of several kernel sizes that a Concat joins (InceptionTime, OmniScaleCNN) get one size, with taps of zeros,
where their launches take longer than the multiplications by zeros.

There too, convolutions that each read one of the parts of such a Split become one grouped convolution. The heads of CenterPoint, 36
pairs of small convolutions of one image, are two convolutions then (Yin et al., 2021). Siblings whose epilogues read parts of one
tensor side by side, and products that read the same factors of rows, are merged as well (:mod:`optdnn.passes.support.siblings`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import Stage
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.rules.concats import stack_of_split
from optdnn.passes.rules.outer_parts import outer_part
from optdnn.passes.rules.rows_of_one_index import rows_of_one_index
from optdnn.passes.support.common_kernel import common_kernel
from optdnn.passes.support.facts import bytes_of, operand, split_along
from optdnn.passes.support.siblings import Family, Member, joined, member_of, side_by_side
from optdnn.target_name import HOPPER, TargetName
from optdnn.types import Array

LAUNCH_BYTES = 4 << 20
"""Bytes of memory traffic that take as long as one kernel launch: about 1.5 microseconds at 3 TB/s."""

LAUNCH_PRODUCTS = {True: 5e7, False: 1e7}
"""Multiplications that take as long as one small launch, by whether tensor cores do them in 8 or 16 bits."""
LEAST_GROUPS = 3
"""Fewest convolutions that become the groups of one: two run side by side."""
MOST_PRODUCTS = 1 << 28
"""A convolution of at least this many multiplications fills a GPU by itself: a grouped one would not be faster."""
ALIGNED = 8
"""Parts of a product whose columns are a multiple of this can be read in place: on GPUs the Split is no copy then."""


@rule("siblings", {"Conv", "Gemm", "MatMul", "PackedMatMul"})
def siblings(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """Convolutions of one geometry, or products of one kind on one operand, with constant weights and equal activations."""
    x = operand(op)
    same_kind = [u for u in graph.users(x) if u.kind == op.kind and u.inputs[0] == x]
    if len(same_kind) < 2:
        return None
    machine = TargetName.parse(context.target)
    mine = member_of(graph, op, tensors=machine.on_gpu)
    if isinstance(mine, str):
        return Miss(mine)
    if machine.on_gpu and (machine.arch or HOPPER) == HOPPER:
        if (why := _with_reader(graph, op)) is not None:
            return Miss(why)
        same_kind = [u for u in same_kind if _with_reader(graph, u) is None]
    taken = [member_of(graph, u, tensors=machine.on_gpu) for u in same_kind]
    found = _biased_alike([m for m in taken if isinstance(m, Member)])
    if op.kind == "Conv" and TargetName.parse(context.target).on_gpu:
        found = _with_one_kernel(graph, mine, found, context)
    (mine,) = [m for m in found if m.op.id == op.id]
    members = [m for m in found if m.key == mine.key]
    if len(members) < 2:
        return Miss(f"no other {op.kind} on {graph.output(x).name} has the same geometry, type and activation")
    family = _family(graph, members)
    if not side_by_side(family.members):
        return Miss("their epilogues read parts of a tensor that are not side by side")
    reason = _unprofitable(graph, x, family, context)
    if reason is not None:
        return Miss(reason)
    ops = (*(m.op for m in members), *([family.concat] if family.concat is not None else []))

    def build(patch: Patch) -> None:
        merged = joined(graph, patch, x, family, context.kept)
        if family.concat is not None:
            _into_concat(patch, family, family.concat, merged)
        else:
            name = f"{family.members[0].op.outputs[0].name}.siblings.sizes"
            parts = split_along(patch, merged, family.axis, [m.width for m in family.members], name)
            patch.replace_each((m.op.value for m in family.members), parts)

    return Match(ops, build)


@rule("grouped_siblings", {"Split"})
def grouped_siblings(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """Convolutions that each read one of the equal parts of a tensor's channels become one grouped convolution, whose groups are as
    wide as the widest of them. Only for 16-bit images on GPUs: there, a grouped convolution takes as long as its work."""
    values = op.values
    readers = [graph.sole_user(v) for v in values]
    alone = all(
        r is not None and r.kind == "Conv" and list(r.inputs).count(v) == 1 and r.inputs[0] == v
        for r, v in zip(readers, values, strict=True)
    )
    if not context.on_gpu or not alone or len(values) < 2:
        return None
    convs = [r for r in readers if r is not None]
    found = [member_of(graph, conv) for conv in convs]
    members = [m for m in found if isinstance(m, Member)]
    if (why := _ungrouped(graph, found, context)) is not None:
        return Miss(why)
    most = max(m.width for m in members)
    groups = tuple(_as_group(m, len(members), most) for m in members)
    family = _family(graph, groups)
    if family.members != groups or any(m.width < most for m in members):
        family = Family(groups, 1, None)

    def build(patch: Patch) -> None:
        merged = joined(graph, patch, operand(op), family, context.kept)
        if family.concat is not None:
            _into_concat(patch, family, family.concat, merged)
            return
        sizes = [n for m in members for n in (m.width, most - m.width) if n]
        parts = iter(split_along(patch, merged, 1, sizes, f"{convs[0].outputs[0].name}.groups.sizes"))
        for m in members:
            patch.replace(m.op.value, next(parts))
            if m.width < most:
                next(parts)

    return Match((op, *convs, *([] if family.concat is None else [family.concat])), build)


def _ungrouped(graph: Graph, found: Sequence[Member | str], context: PassContext) -> str | None:
    """Why the convolutions of a Split's parts do not become one; None if they do."""
    if "16" not in context.precision:
        return "only kernels of 16-bit images compute the groups of a convolution side by side"
    refusals = [m for m in found if isinstance(m, str)]
    if refusals:
        return refusals[0]
    members = [m for m in found if isinstance(m, Member)]
    if len({(m.key, m.weight.shape[1]) for m in members}) > 1:
        return "the convolutions of the parts differ in geometry, type or activation"
    if len(members) < LEAST_GROUPS:
        return "two convolutions run side by side"
    y = graph.type(members[0].op.value)
    if not y.is_static:
        return "the size of the image is not known"
    positions = math.prod(y.static_shape) // members[0].width
    products = [m.weight.size * positions for m in members]
    if context.counted(max(products)) >= MOST_PRODUCTS:
        return "each of the convolutions is large enough for a launch of its own"
    if max(products) * len(products) - sum(products) > (len(products) - 1) * LAUNCH_PRODUCTS[True]:
        return "groups of equal size would multiply many zeros"
    return None


def _as_group(member: Member, groups: int, width: int) -> Member:
    """A convolution as a group of a convolution, with ``width`` output channels. Weights of additional channels are zeros."""
    kind, attrs, *rest = member.key

    more = width - member.width

    def wider(array: Array, fill: float) -> Array:
        return np.pad(array, [(0, more), *[(0, 0)] * (array.ndim - 1)], constant_values=fill)

    return replace(
        member,
        key=(kind, replace(attrs, group=groups), *rest),
        weight=wider(member.weight, 0.0),
        bias=None if member.bias is None else wider(member.bias, 0.0),
        channels=tuple(None if c is None else wider(c, 1.0) for c in member.channels),
        width=width,
    )


def _with_reader(graph: Graph, op: Op) -> str | None:
    """The reason why one launch may compute this convolution and its reader, which shuffles pixels, or is a convolution that
    adds the result before any other stage; else None."""
    reader = graph.sole_user(op.value) if op.kind == "Conv" else None
    if reader is None or (op.attrs.epilogue and reader.kind == "Conv"):
        return None
    if reader.kind == "DepthToSpace":
        return f"one launch computes it and shuffles its pixels ({reader.name})"
    if reader.kind != "Conv" or not reader.attrs.epilogue or reader.attrs.epilogue[0].kind != "Add":
        return None
    slots = [a for a in reader.attrs.epilogue[0].args if a is not None and a >= 0]
    if [reader.inputs[a] for a in slots] != [op.value]:
        return None
    return f"one launch sums it and the convolution {reader.name}"


def _into_concat(patch: Patch, family: Family, concat: Op, merged: Value) -> None:
    """Put the merged value in the place of its members in the Concat, which disappears when it joins nothing else."""
    values = {m.op.value for m in family.members}
    at = concat.inputs.index(family.members[0].op.value)
    inputs = [v for v in concat.inputs if v not in values]
    inputs.insert(at, merged)
    if len(inputs) > 1:
        merged = patch.add("Concat", inputs, concat.attrs)
    patch.replace(concat.value, merged)


def _biased_alike(members: Sequence[Member]) -> list[Member]:
    """The members. A member without stages gets a bias of zeros if a bias is the only stage of another member (Whisper's keys)."""
    keys = {m.key for m in members if m.op.attrs.epilogue}
    return [biased if (biased := _with_bias(m)).key in keys else m for m in members]


def _with_bias(member: Member) -> Member:
    """A member without stages, with a bias of zeros as its stage; any other member unchanged."""
    kind, attrs, *rest = member.key
    if attrs.epilogue or kind != "MatMul":
        return member
    stage = Stage("Add", (-1, member.op.definition.arity))
    key = (kind, replace(attrs, epilogue=(stage,)), *rest[:-3], (None,), (None,), rest[-1])
    zeros = np.zeros(member.width, member.weight.dtype)
    return replace(member, key=key, scalars=(None,), channels=(zeros,), tensors=(None,))


def _with_one_kernel(graph: Graph, mine: Member, members: list[Member], context: PassContext) -> list[Member]:
    """The members. If a Concat joins members with ``mine`` that differ from it only in kernel size and padding, they get one common
    kernel size where that pays."""
    concat = graph.sole_user(mine.op.value)
    result = graph.type(mine.op.value)
    if concat is None or concat.kind != "Concat" or not result.is_static:
        return members
    alike = {m.op.value: m for m in members if _but_kernel(m) == _but_kernel(mine)}
    at, run = concat.inputs.index(mine.op.value), list[Member]()
    for side in (reversed(concat.inputs[:at]), concat.inputs[at:]):
        beside = list(takewhile(lambda v: v in alike and graph.sole_user(v) == concat, side))
        run += [alike[v] for v in beside if v is not None]
    kernels = len({m.key for m in run})
    wide = common_kernel([(m.op.attrs, m.weight) for m in run]) if kernels > 1 else None
    if wide is None:
        return members
    attrs, weights = wide
    zeros = sum(w.size for w in weights) - sum(m.weight.size for m in run)
    positions = math.prod(result.static_shape) // mine.width
    narrow = "16" in context.precision or "8" in context.precision
    if context.counted(zeros * positions) > (kernels - 1) * LAUNCH_PRODUCTS[narrow]:
        return members
    kind, plain, _, *rest = mine.key
    key = (kind, replace(plain, pads=attrs.pads), weights[0].shape[2:], *rest)
    widened = {m.op.id: replace(m, key=key, weight=w) for m, w in zip(run, weights, strict=True)}
    return [widened.get(m.op.id, m) for m in members]


def _but_kernel(member: Member) -> tuple[Any, ...]:
    """A convolution's key without the fields that :func:`common_kernel` changes."""
    kind, plain, _, *rest = member.key
    return (kind, replace(plain, pads=()), *rest)


def _family(graph: Graph, members: Sequence[Member]) -> Family:
    """The members in the order of the Concat that joins them side by side, else in the graph's order, with aligned parts first."""
    op = members[0].op
    rank = len(graph.type(op.value).dims)
    axis = 1 if op.kind == "Conv" else rank - 1
    concat = graph.sole_user(op.value)
    by_part = sorted(members, key=lambda m: m.parts[:1])  # in the order of the parts that their epilogues read
    aligned = tuple(sorted(by_part, key=lambda m: m.width % ALIGNED != 0))  # the parts before others begin at vectors
    if concat is None or concat.kind != "Concat" or concat.attrs.axis % rank != axis:
        return Family(aligned, axis, None)
    slots = {m.op.value: concat.inputs.index(m.op.value) for m in members if graph.sole_user(m.op.value) == concat}
    if len(slots) < len(members) or max(slots.values()) - min(slots.values()) != len(members) - 1:
        return Family(aligned, axis, None)
    return Family(tuple(sorted(members, key=lambda m: slots[m.op.value])), axis, concat)


def _unprofitable(graph: Graph, x: Value, family: Family, context: PassContext) -> str | None:
    """Why merging would not pay. Symbolic dimensions count as 1."""
    if family.concat is not None:
        return None
    target = context.target
    if target in ("cpu", "reference"):
        return f"on {target} the Split's copy costs as much as merging saves"
    rows = TargetName.parse(target).on_gpu and family.members[0].op.kind != "Conv"
    if rows and all(m.width % ALIGNED == 0 for m in family.members):
        return None
    saved = (len(family.members) - 1) * (bytes_of(graph, x) + LAUNCH_BYTES)
    copied = 2 * sum(bytes_of(graph, m.op.value) for m in family.members)
    if context.counted(copied) > saved:
        return f"the Split would copy {copied / 1e6:.1f} MB to save {saved / 1e6:.1f} MB of reading and launching"
    return None


class FuseSiblings(RulePass):
    name = "fuse_siblings"
    rules = (siblings, grouped_siblings, outer_part, rows_of_one_index, stack_of_split)
