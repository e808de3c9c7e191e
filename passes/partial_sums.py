"""An addition to some channels of a convolution becomes an addition to all of them, a stage of its epilogue.

ReXNet (Han et al., 2021) adds its shortcut to the first channels and keeps the others; a dual path network (Chen et al., 2017)
adds some channels of a result and appends the others. Slices, the addition and a Concat are launches between two convolutions.
Here the added tensor has zeros in the other channels. A convolution whose channels go to separate ranges has filters of zeros
between them. (Zero times infinity is NaN: an element that has overflowed spoils the other channels of its pixel.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.channel_shuffles import PRECISIONS, conv, weights_of
from optdnn.passes.support.facts import operand, producer
from optdnn.passes.support.parts import PARTS, span
from optdnn.types import Array, normalize_axis

MOST_FILTERS = 4
"""Largest ratio of filters after and before: filters of zeros are multiplied too."""


@dataclass
class Term:
    """One tensor's contribution to the channels of a Concat.

    ``rows``: for each channel of the Concat the tensor's channel, or -1. ``takers``: id -> operator that takes parts of the
    tensor."""

    source: Value
    rows: Array
    takers: dict[int, Op] = field(default_factory=dict)


@rule("partial_sum", {"Concat"})
def partial_sum(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A Concat of parts of two tensors, some of them added, becomes the sum of both tensors with zeros elsewhere."""
    if len(op.outputs[0].type.dims) != 4 or normalize_axis(op.attrs.axis, 4) != 1:
        return None
    if not all(v is not None and graph.type(v).is_static for v in op.inputs):
        return None
    additions = [a for v in op.inputs if (a := producer(graph, v, {"Add"}, alone=True)) is not None]
    terms = _terms(graph, op, {a.id for a in additions}) if additions else None
    if terms is None:
        return None
    convolutions = [_convolution(graph, term) for term in terms]
    if not any(convolutions):
        return Miss("neither tensor comes from a convolution with constant weights and no other reader")
    if context.precision not in PRECISIONS:
        return Miss(f"products with zeros are not for {context.precision}")
    for term, convolution in zip(terms, convolutions, strict=True):
        channels = graph.type(term.source).static_shape[1]
        if convolution is None and not _in_order(term.rows, channels):
            return Miss(f"the channels of {graph.op(term.source).name} go to several ranges")
        if convolution is not None and len(term.rows) > MOST_FILTERS * channels:
            return Miss(f"{convolution.name} would have more than {MOST_FILTERS} times as many filters")
    covered = {x.id: x for x in (op, *additions, *(c for c in convolutions if c))}
    for term, convolution in zip(terms, convolutions, strict=True):
        covered |= term.takers if convolution is not None else {}

    def build(patch: Patch) -> Value:
        sides = [
            _padded(patch, term) if convolution is None else _spread(graph, patch, convolution, term.rows)
            for term, convolution in zip(terms, convolutions, strict=True)
        ]
        return patch.add("Add", sides)

    return Match(tuple(covered.values()), build)


def _terms(graph: Graph, op: Op, additions: set[int]) -> list[Term] | None:
    """The two tensors whose channels, or sums of channels, a Concat joins. None if it joins anything else."""
    terms: dict[Value, Term] = {}
    at, whole = 0, op.outputs[0].type.static_shape[1]
    for slot in range(len(op.inputs)):
        value = operand(op, slot)
        size = graph.type(value).static_shape[1]
        made_by = graph.op(value)
        for part in made_by.inputs if made_by.id in additions else (value,):
            if (
                part is None
                or graph.constant_value(part) is not None
                or graph.type(part).dims != graph.type(value).dims
            ):
                return None
            source, begin, taker = _part(graph, part)
            term = terms.setdefault(source, Term(source, np.full(whole, -1)))
            if (term.rows[at : at + size] >= 0).any():
                return None
            term.rows[at : at + size] = begin + np.arange(size)
            if taker is not None:
                term.takers[taker.id] = taker
        at += size
    return list(terms.values()) if len(terms) == 2 else None


def _part(graph: Graph, value: Value) -> tuple[Value, int, Op | None]:
    """The tensor from which ``value`` is a range of channels, its first channel, and the operator that takes the range.

    The operator is None if ``value`` is the whole tensor."""
    op = producer(graph, value, PARTS)
    if op is None or not graph.type(operand(op)).is_static:
        return value, 0, None
    if op.kind == "Split":
        begin = sum(out.type.static_shape[1] for out in op.outputs[: value.port])
        return (operand(op), begin, op) if normalize_axis(op.attrs.axis, 4) == 1 else (value, 0, None)
    found = span(graph, op, graph.type(operand(op)).static_shape[1], axis=-3)
    return (operand(op), found[0], op) if found is not None and found[2] == 1 else (value, 0, None)


def _convolution(graph: Graph, term: Term) -> Op | None:
    """The convolution of a term, if its filters can be spread: only the term's parts read its result, each part once."""
    op = producer(graph, term.source, {"Conv"})
    if op is None or op.attrs.group != 1 or weights_of(graph, op) is None:
        return None
    parts = [v for t in term.takers.values() for v in t.values]
    alone = {u.id for u in graph.users(term.source)} <= term.takers.keys() and all(
        graph.use_count(v) == 1 for v in parts
    )
    return op if alone or (not parts and graph.use_count(term.source) == 1) else None


def _in_order(rows: Array, channels: int) -> bool:
    """Whether all channels of a tensor appear once and in order."""
    return bool((rows[rows >= 0] == np.arange(channels)).all()) if (rows >= 0).sum() == channels else False


def _spread(graph: Graph, patch: Patch, op: Op, rows: Array) -> Value:
    """The convolution with its filters at ``rows``, and filters of zeros elsewhere."""
    constants = weights_of(graph, op)
    assert constants is not None
    weight, bias = (
        None if a is None else np.where((rows < 0).reshape(-1, *(1,) * (a.ndim - 1)), 0, a[rows]) for a in constants
    )
    assert weight is not None
    return conv(patch, operand(op), weight, bias, op.attrs)


def _padded(patch: Patch, term: Term) -> Value:
    """A tensor with channels of zeros before and after its own."""
    filled = np.flatnonzero(term.rows >= 0)
    batch, _, *size = patch.type(term.source).static_shape
    parts: list[Value] = [term.source]
    for count, at in ((int(filled[0]), 0), (len(term.rows) - 1 - int(filled[-1]), 1)):
        if count:
            zeros = np.zeros((batch, count, *size), patch.type(term.source).dtype)
            parts.insert(at * len(parts), patch.constant(zeros, "zeros"))
    return parts[0] if len(parts) == 1 else patch.add("Concat", parts, ConcatAttrs(axis=1))


class PartialSums(RulePass):
    name = "partial_sums"
    rules = (partial_sum,)
