"""Reshapes and transposes: chains become one, shape arithmetic that leads to them disappears."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import ReshapeAttrs, TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rewrite
from optdnn.passes.support.facts import reshape_target
from optdnn.types import Shape

RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
"""Kinds that keep the elements in row-major order."""


def reshaped(patch: Patch, x: Value, target: tuple[int, ...], src: frozenset[str] | None = None) -> Value:
    """Add a Reshape to a constant target."""
    shape = patch.constant(np.asarray(target, dtype=np.int64), "shape")
    return patch.add("Reshape", [x, shape], ReshapeAttrs(), src=src)


class ReshapeChain(Rewrite):
    """A Reshape, Flatten, Squeeze or Unsqueeze of another one becomes a single Reshape."""

    name = "reshape_chain"
    kinds = RESHAPES

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        inner = graph.op(op.inputs[0]) if op.inputs[0] is not None else op
        x = inner.inputs[0] if inner.kind in RESHAPES and inner is not op else None
        if x is None:
            return None
        before, after = graph.type(x).shape, op.outputs[0].type.shape
        if before is None or after is None:
            return Miss("a rank is unknown")
        target = reshape_target(before, after)
        if target is None:
            return Miss("more than one symbolic dimension moves, which no constant target can express")
        return Match((op, inner), lambda patch: reshaped(patch, x, target))


class ConstantTarget(Rewrite):
    """A Reshape or Expand to a computed shape that inference resolves gets a constant target.

    ``Shape -> Gather -> Concat -> Reshape`` over a symbolic batch becomes a Reshape to ``[0, …]`` or ``[-1, …]``.
    """

    name = "constant_target"
    kinds = frozenset({"Reshape", "Expand"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        x = op.inputs[0]
        before, after = None if x is None else graph.type(x).shape, op.outputs[0].type.shape
        if x is None or before is None or after is None or graph.constant_value(op.inputs[1]) is not None:
            return None
        if graph.known(op.inputs[1]) is None:
            return Miss("the target shape depends on data")
        target = reshape_target(before, after) if op.kind == "Reshape" else _expand_target(before, after)
        if target is None:
            return Miss("no constant target can express how symbolic dimensions move")
        if op.kind == "Reshape":
            return Match((op,), lambda patch: reshaped(patch, x, target))
        shape = np.asarray(target, dtype=np.int64)
        return Match((op,), lambda patch: patch.add("Expand", [x, patch.constant(shape, "shape")]))


def _expand_target(before: Shape, after: Shape) -> tuple[int, ...] | None:
    """1 keeps a dimension of an Expand; None where a symbolic one grows."""
    lead = len(after) - len(before)
    target = []
    for i, d in enumerate(after):
        if isinstance(d, int):
            target.append(d)
        elif i >= lead and before[i - lead] == d:
            target.append(1)
        else:
            return None
    return tuple(target)


class TransposeChain(Rewrite):
    """A Transpose of a Transpose becomes one, or nothing where they cancel."""

    name = "transpose_chain"
    kinds = frozenset({"Transpose"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        inner = graph.op(op.inputs[0]) if op.inputs[0] is not None else op
        x = inner.inputs[0] if inner.kind == "Transpose" and inner is not op else None
        if x is None or op.attrs.perm is None or inner.attrs.perm is None:
            return None
        perm = tuple(inner.attrs.perm[p] for p in op.attrs.perm)
        if perm == tuple(range(len(perm))):
            return Match((op, inner), lambda patch: x)
        return Match((op, inner), lambda patch: patch.add("Transpose", [x], TransposeAttrs(perm)))


class TransposeIsReshape(Rewrite):
    """A Transpose that moves only axes of size 1 keeps the order of elements: a Reshape, which is free."""

    name = "transpose_is_reshape"
    kinds = frozenset({"Transpose"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        x, perm = op.inputs[0], op.attrs.perm
        shape = None if x is None else graph.type(x).shape
        if x is None or shape is None or perm is None or perm == tuple(range(len(perm))):
            return None
        moved = [p for p in perm if shape[p] != 1]
        if moved != sorted(moved):
            return None
        target = reshape_target(shape, tuple(shape[p] for p in perm))
        if target is None:
            return Miss("more than one symbolic dimension moves, which no constant target can express")
        return Match((op,), lambda patch: reshaped(patch, x, target))


class GemmTranspose(Rewrite):
    """A transposed operand of a Gemm is read transposed."""

    name = "gemm_transpose"
    kinds = frozenset({"Gemm"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        for slot, flag in ((0, "transA"), (1, "transB")):
            operand = op.inputs[slot]
            inner = graph.op(operand) if operand is not None else op
            if inner.kind != "Transpose" or inner.attrs.perm != (1, 0) or (slot == 0 and op.attrs.prologue):
                continue
            inputs = tuple(inner.inputs[0] if i == slot else v for i, v in enumerate(op.inputs))
            attrs = replace(op.attrs, **{flag: not getattr(op.attrs, flag)})
            return Match((op, inner), lambda patch, i=inputs, a=attrs: patch.add("Gemm", i, a))
        return None
