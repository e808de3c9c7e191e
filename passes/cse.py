"""Common subexpression elimination: ops of equal kind, attributes and operands are computed once."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np

from optdnn.ir.graph import STRUCTURAL, Graph, Op
from optdnn.ir.patch import Patch
from optdnn.ops.reduce import reduced_axes
from optdnn.passes.base import Fired, Pass, PassContext, PassReport, node_names
from optdnn.passes.rules.transpose import REDUCTIONS
from optdnn.passes.support.facts import ints, operand
from optdnn.types import Array

_SAMPLE = 64
"""Elements of two constants that are compared before a digest of all elements."""

MANY = 4
"""Fewest equal ops of the kinds in ``keep`` that are merged nevertheless: one op and the ops of its readers are faster then."""


class CommonSubexpressions(Pass):
    """One sweep in topological order: operands are merged before the ops that read them are compared.

    Constants are equal when their dtype, shape and bytes are. The operands of commutative ops (``Traits.commutative``)
    are compared in any order, and axes of reductions however they are counted.

    ``keep``: kinds that are not merged yet. Two equal convolutions with different ops after them are better fused with these ops
    than merged into one value with two uses. A second run, after fusion, merges those that are still equal. ``MANY`` or more equal
    ops are merged in any case: an unrolled loop repeats them (the keys and values of attention in each step of a decoder).
    """

    name = "cse"

    def __init__(self, keep: frozenset[str] = frozenset()):
        self.keep = keep

    def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
        self._constants(graph, report)
        while self._sweep(graph, report):
            pass

    def _sweep(self, graph: Graph, report: PassReport) -> bool:
        """Run one sweep. Returns whether ops of the kinds in ``keep`` were merged: ops after them may be equal now."""
        seen: dict[Hashable, Op] = {}
        kept: dict[Hashable, list[Op]] = {}
        for visited in graph.order():
            if visited.kind in STRUCTURAL:
                continue
            op = graph.op(visited.id)
            key = (op.kind, attribute_key(op.attrs), _operands(graph, op), len(op.outputs))
            if op.kind in self.keep:
                kept.setdefault(key, []).append(op)
                continue
            first = seen.setdefault(key, op)
            if first is not op:
                self._merge(graph, op, first, "same_op", report)
        many = [group for group in kept.values() if len(group) >= MANY]
        for first, *others in many:
            for op in others:
                self._merge(graph, op, first, "same_op", report)
        return bool(many)

    def _constants(self, graph: Graph, report: PassReport) -> None:
        groups: dict[Hashable, list[Op]] = {}
        for op in graph.of_kind("Constant"):
            groups.setdefault(_glance(op.attrs.value), []).append(op)
        for group in groups.values():
            seen: dict[bytes, Op] = {}
            for op in group if len(group) > 1 else ():
                first = seen.setdefault(digest(op.attrs.value), op)
                if first is not op:
                    self._merge(graph, op, first, "same_constant", report)

    @staticmethod
    def _merge(graph: Graph, op: Op, first: Op, rule: str, report: PassReport) -> None:
        first = graph.op(first.id)
        patch = Patch(graph, [op])
        for old, new in zip(op.values, first.values, strict=False):
            patch.replace(old, new)
        patch.apply()
        report.fired.append(Fired(rule, node_names([first, op])))


def _operands(graph: Graph, op: Op) -> tuple[Hashable, ...]:
    """The operands as a key for equality. Axes of reductions count from the front: exporters write an axis as 2 or as -1."""
    operands = list(op.inputs)
    if op.definition.traits.commutative:
        operands.sort(key=lambda v: (v is None, v))
    if op.kind in REDUCTIONS and op.input(1) is not None:
        axes, shape = ints(graph, op.input(1)), graph.type(operand(op)).shape
        if axes is not None and shape is not None:
            return (operand(op), reduced_axes(op.attrs, axes, len(shape), op.kind))
    return tuple(operands)


def digest(array: Array) -> bytes:
    """Digest of the bytes of an array (its dtype and shape not included)."""
    return hashlib.blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).digest()


def _glance(array: Array) -> Hashable:
    """Cheap necessary condition of equality: dtype, shape, and some elements spread over the array."""
    flat = array.reshape(-1)
    return array.dtype, array.shape, flat[:: max(1, flat.size // _SAMPLE)].tobytes()


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


def attribute_key(value: Any) -> Hashable:
    """A key that is equal exactly for attributes of equal meaning: arrays by content, floats by bits (-0.0 is not 0.0)."""
    if isinstance(value, int | str | type(None)):  # most fields; bool and int compare equal, their types do not
        return type(value), value
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(attribute_key(getattr(value, name)) for name in _field_names(type(value)))
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, digest(value)
    if isinstance(value, float):
        return "float", value.hex()
    if isinstance(value, tuple | list):
        return tuple(attribute_key(v) for v in value)
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return type(value), value
