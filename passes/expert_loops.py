"""Loops over the experts of a mixture become products with selected matrices.

Exports of Mixtral and networks like it have a part for each expert: it finds the tokens that selected the expert, gathers and
computes them, multiplies by the router's weights, and adds the results to their tokens. The number of tokens depends on data, so
all experts would compute all tokens. If the experts differ only in constants, each row (a token, for one of its experts) selects
its constants instead: ``y[r] = x[r / times] @ W[expert[r]]`` (see ``passes/selected_weights.py``). Then the rows of a token are
added.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.table import OPDEFS
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.support.expert_parts import Part, below, gathered_from, number_of_experts, parts_of, reads_pairs
from optdnn.passes.support.facts import in_shape, integers, operand, reshaped, sliced
from optdnn.passes.support.rows import RowOp, copy_of, resized, row_op, rows_of, zero
from optdnn.passes.support.selected_matrices import ROW
from optdnn.types import INT64, Array

_PRODUCTS = {"Gemm", "MatMul"}
_ALIGNED = {"Clip", "FakeQuantize", "Pointwise"}
"""Pointwise operators whose constants have one element, or one for each channel."""


@rule("expert_loops", {"Add", "ScatterND"})
def expert_loops(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A sum of results of all experts, each scattered to the tokens that selected the expert."""
    if not context.on_gpu:
        return None
    found, bases = parts_of(graph, op.value)
    if len(found) < 2:
        return None
    first, *others = parts = sorted(found, key=lambda p: p.expert)
    tokens, times = graph.type(first.selected).dims
    if [p.expert for p in parts] != list(range(len(parts))) or len({p.selected for p in parts}) > 1:
        return None
    experts = number_of_experts(graph, first.chooser)
    if experts != len(parts):
        return None  # the sum of some of the experts
    if not isinstance(tokens, int) or not isinstance(times, int):
        return None
    if graph.type(first.selected).dtype != INT64:
        return Miss(f"the numbers of experts are {graph.type(first.selected).dtype}, not int64")
    loop = _Loop(graph, parts, bases, tokens, times)
    if (why := loop.read(first.updates, [p.updates for p in others])) is not None:
        return Miss(why)
    replaced = {o.id: o for p in parts for o in (p.scatter, graph.op(p.updates))}
    return Match((op, *(o for o in replaced.values() if o.id != op.id)), loop.build)


class _Loop:
    """The operators of the first expert, from the gathered tokens to the updates, with the constants of all experts."""

    def __init__(self, graph: Graph, parts: list[Part], bases: list[Value], tokens: int, times: int) -> None:
        self.graph, self.parts, self.bases, self.tokens, self.times = graph, parts, bases, tokens, times
        self.found = parts[0].chooser.outputs[0].type.dims[1]
        """The number of tokens that selected the first expert, which depends on data."""
        self.order: list[RowOp] = []
        self.leaves: dict[Value, Value] = {}
        """A gather's result -> what it gathers from: tokens, or weights of the router."""
        self.constants: dict[Value, list[Array]] = {}
        """A constant of the first expert -> those of all experts, if they differ."""
        self.products: dict[Value, Value] = {}
        """The result of a product of the first expert -> that of all rows."""
        self.seen: dict[Value, list[Value]] = {}
        """A value of the first expert -> those of the others."""

    def read(self, value: Value, others: list[Value]) -> str | None:
        """Read the operators before ``value``, and compare them with those of the other experts. Returns the reason if they differ,
        or an operator does not compute each row by itself."""
        graph, op = self.graph, self.graph.op(value)
        if value in self.seen:
            return None if self.seen[value] == others else f"experts differ in what reads {op.name} ({op.kind})"
        same = [graph.op(v) for v in others]
        if any(o.kind != op.kind or o.attrs != op.attrs or len(o.inputs) != len(op.inputs) for o in same):
            return f"experts differ at {op.name} ({op.kind})"
        self.seen[value] = others
        sources = [gathered_from(graph, o, p) for o, p in zip((op, *same), self.parts, strict=True)]
        if sources[0] is not None:
            if len(set(sources)) > 1:
                return f"experts gather from different tensors at {op.name}"
            self.leaves[value] = sources[0]
            return None
        found = row_op(graph, op, self.found)
        if found is None or len(op.outputs) > 1:
            return f"{op.name} ({op.kind}) does not compute each row from a row of a token"
        for slot, v in enumerate(op.inputs):
            theirs = [o.inputs[slot] for o in same]
            if v is None or all(t == v for t in theirs):
                continue
            if found.operand_rows[slot] is not None:
                if any(t is None for t in theirs):
                    return f"experts differ at {op.name} ({op.kind})"
                if (why := self.read(v, [t for t in theirs if t is not None])) is not None:
                    return why
            elif (why := self._read_constant(op, slot, v, theirs)) is not None:
                return why
        self.order.append(found)
        return None

    def _read_constant(self, op: Op, slot: int, value: Value, theirs: list[Value | None]) -> str | None:
        arrays = [self.graph.constant_value(v) for v in (value, *theirs)]
        known = [a for a in arrays if a is not None]
        if len(known) < len(arrays) or len({(a.shape, a.dtype) for a in known}) > 1:
            return f"constants of experts differ in form at {op.name} ({op.kind})"
        if all(np.array_equal(a, known[0]) for a in known[1:]):
            return None
        rows, rank = known[0], len(op.outputs[0].type.dims)
        if op.kind in _PRODUCTS and slot == 1:
            size = rows.shape[1 if op.kind == "Gemm" and op.attrs.transB else 0] if rows.ndim == 2 else 0
            plain = rank == 2 and not op.attrs.prologue and not op.attrs.epilogue
            if op.kind == "Gemm":
                plain = plain and GemmAttrs(transB=op.attrs.transB) == op.attrs
            if rows.ndim != 2 or size % ROW or not plain:
                return f"no kernel selects the matrices of {op.name} ({op.kind}) in place"
        elif not _broadcasts(op, slot) or rank != 2 or rows.ndim > 2 or (rows.ndim == 2 and rows.shape[0] != 1):
            return f"constants of {op.name} ({op.kind}) are not one row for each expert"
        self.constants[value] = known
        return None

    def build(self, patch: Patch) -> Value:
        count = self.tokens * self.times
        group = reshaped(patch, self.parts[0].selected, (count,))
        inside, self.products = None, {}
        if not below(self.graph, self.parts[0].selected, len(self.parts)):
            limits = (-len(self.parts) if self.parts[0].wraps else 0, len(self.parts))
            first, end = (patch.constant(np.array(i, np.int64)) for i in limits)
            inside = patch.add("And", [patch.add("GreaterOrEqual", [group, first]), patch.add("Less", [group, end])])
            group = patch.add("Where", [inside, group, zero(patch, INT64)])
        new: dict[Value, Value] = {}
        for value, source in self.leaves.items():
            shape = self.graph.type(value)
            rows = rows_of(shape, self.found)
            assert rows is not None
            pairs = reads_pairs(self.graph, self.graph.op(value), self.parts[0])
            every = source if pairs else self._repeated(patch, source)
            new[value] = in_shape(patch, every, resized(shape.dims, rows, count))
        for r in self.order:
            made = self._copied(patch, r, new, group, count)
            new[r.op.value] = made
        y = new[self.parts[0].updates]
        if inside is not None:  # numbers that are none of the experts' add nothing
            y = patch.add("Where", [reshaped(patch, inside, (count, 1)), y, zero(patch, patch.type(y).dtype)])
        y = reshaped(patch, y, (self.tokens, self.times, -1))
        total = patch.add("ReduceSum", [y, integers(patch, [1], "axes")], ReduceAttrs(keepdims=False))
        for base in self.bases:
            total = patch.add("Add", [total, base])
        return total

    def _repeated(self, patch: Patch, source: Value) -> Value:
        """The elements of each token, once for each of its experts."""
        size = int(np.prod(self.graph.type(source).static_shape)) // self.tokens
        tokens = reshaped(patch, source, (self.tokens, 1, size))
        return patch.add("Expand", [tokens, integers(patch, [self.tokens, self.times, size], "shape")])

    def _copied(self, patch: Patch, r: RowOp, new: Mapping[Value, Value], group: Value, count: int) -> Value:
        op = r.op
        own = {v: self.constants[v] for v in op.inputs if v is not None and v in self.constants}
        weight = op.inputs[1] if op.kind in _PRODUCTS else None
        if weight is None or weight not in own:
            taken = {v: _chosen(patch, [a.reshape(-1) for a in arrays], group) for v, arrays in own.items()}
            return copy_of(patch, r, {**new, **taken}, count).value
        if op.value not in self.products:
            self._multiply(patch, new[operand(op)], operand(op), group)
        made, bias = self.products[op.value], op.input(2)
        if bias is None:
            return made
        added = _chosen(patch, [a.reshape(-1) for a in own[bias]], group) if bias in own else new.get(bias, bias)
        return patch.add("Add", [made, added])

    def _multiply(self, patch: Patch, x: Value, rows: Value, group: Value) -> None:
        """Add one product for all products of ``rows``, whose copies are ``x``, with matrices of the experts."""
        found = [r.op for r in self.order if r.op.kind in _PRODUCTS and operand(r.op) == rows]
        ops = [op for op in found if op.inputs[1] in self.constants]
        stacks = [[_matrix(op, a) for a in self.constants[operand(op, 1)]] for op in ops]
        matrices = _chosen(patch, [np.concatenate(each, axis=1) for each in zip(*stacks, strict=True)], group)
        count, size = patch.type(x).static_shape
        line = patch.add("MatMul", [reshaped(patch, x, (count, 1, size)), matrices], MatMulAttrs())
        every, begin = reshaped(patch, line, (count, -1)), 0
        for op, own in zip(ops, stacks, strict=True):
            end = begin + own[0].shape[1]
            self.products[op.value] = every if len(ops) == 1 else sliced(patch, every, begin, end, 1)
            begin = end


def _matrix(op: Op, weight: Array) -> Array:
    """An operand 1 of the product as (in, out)."""
    return weight.T if op.kind == "Gemm" and op.attrs.transB else weight


def _broadcasts(op: Op, slot: int) -> bool:
    """Whether an operand may have a row for each row of the result."""
    if op.kind in ("LayerNormalization", "RMSNormalization"):
        return True
    return (op.kind == "Gemm" and slot == 2) or (OPDEFS[op.kind].traits.pointwise and op.kind not in _ALIGNED)


def _chosen(patch: Patch, arrays: list[Array], group: Value) -> Value:
    """The array of each row's expert."""
    return patch.add("Gather", [patch.constant(np.stack(arrays), "experts"), group], GatherAttrs(0))


class ExpertLoops(RulePass):
    """Runs before :class:`MaskedRows`, which makes every expert compute all tokens."""

    name = "expert_loops"
    rules = (expert_loops,)
