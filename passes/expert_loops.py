"""Loops over the experts of a mixture become products with selected matrices.

Exports of Mixtral and networks like it have a part for each expert: it finds the tokens that selected the expert, gathers and
computes them, multiplies by the router's weights, and adds the results to their tokens. The number of tokens depends on data, so
all experts would compute all tokens. If the experts differ only in constants, each row (a token, for one of its experts) selects
its constants instead: ``y[r] = x[r / times] @ W[expert[r]]`` (see ``passes/selected_weights.py``). Then the rows of a token are
added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.table import OPDEFS
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.support.facts import RESHAPES, in_shape, integers, ints, operand, reshaped
from optdnn.passes.support.rows import RowOp, copy_of, resized, row_op, rows_of, zero
from optdnn.passes.support.selected_matrices import ROW
from optdnn.types import INT64, Array

_PRODUCTS = {"Gemm", "MatMul"}
_ALIGNED = {"Clip", "FakeQuantize", "Pointwise"}
"""Pointwise operators whose constants have one element, or one for each channel."""
_MOVES = {*RESHAPES, "Concat", "Expand", "Identity", "Slice", "Split", "Transpose"}
"""Operators that keep the numbers of experts, or take some of them."""


@dataclass(frozen=True)
class Part:
    """What a loop adds for one expert: ``updates``, at the tokens that the NonZero ``chooser`` finds."""

    scatter: Op
    updates: Value
    chooser: Op
    selected: Value
    """The experts (tokens, times) that each token selects."""
    expert: int
    token: int
    """The coordinate of the chooser that is the token; the other one counts the token's experts."""
    wraps: bool
    """Whether negative numbers count the experts from the end."""


@rule("expert_loops", {"Add", "ScatterND"})
def expert_loops(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A sum of results of all experts, each scattered to the tokens that selected the expert."""
    if not context.on_gpu:
        return None
    found, bases = _parts(graph, op.value)
    if len(found) < 2:
        return None
    first, *others = parts = sorted(found, key=lambda p: p.expert)
    tokens, times = graph.type(first.selected).dims
    if [p.expert for p in parts] != list(range(len(parts))) or len({p.selected for p in parts}) > 1:
        return None
    experts = _number_of_experts(graph, first.chooser)
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
        self.order: list[RowOp] = []
        self.leaves: dict[Value, Value] = {}
        """A gather's result -> what it gathers from: tokens, or weights of the router."""
        self.constants: dict[Value, list[Array]] = {}
        """A constant of the first expert -> those of all experts, if they differ."""
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
        sources = [_gathered(graph, o, p) for o, p in zip((op, *same), self.parts, strict=True)]
        if sources[0] is not None:
            if len(set(sources)) > 1:
                return f"experts gather from different tensors at {op.name}"
            self.leaves[value] = sources[0]
            return None
        found = row_op(graph, op, self.parts[0].chooser.outputs[0].type.dims[1])
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
        inside = None
        if not _below(self.graph, self.parts[0].selected, len(self.parts)):
            limits = (-len(self.parts) if self.parts[0].wraps else 0, len(self.parts))
            first, end = (patch.constant(np.array(i, np.int64)) for i in limits)
            inside = patch.add("And", [patch.add("GreaterOrEqual", [group, first]), patch.add("Less", [group, end])])
            group = patch.add("Where", [inside, group, zero(patch, INT64)])
        new: dict[Value, Value] = {}
        for value, source in self.leaves.items():
            shape = self.graph.type(value)
            rows = rows_of(shape, self.parts[0].chooser.outputs[0].type.dims[1])
            assert rows is not None
            pairs = _reads_pairs(self.graph, self.graph.op(value), self.parts[0])
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
        turned = op.kind == "Gemm" and op.attrs.transB
        matrices = _chosen(patch, [a.T if turned else a for a in own[weight]], group)
        x = new[operand(op)]
        line = reshaped(patch, x, (count, 1, patch.type(x).static_shape[-1]))
        made = reshaped(patch, patch.add("MatMul", [line, matrices], MatMulAttrs()), (count, -1))
        bias = op.input(2)
        if bias is None:
            return made
        added = _chosen(patch, [a.reshape(-1) for a in own[bias]], group) if bias in own else new.get(bias, bias)
        return patch.add("Add", [made, added])


def _broadcasts(op: Op, slot: int) -> bool:
    """Whether an operand may have a row for each row of the result."""
    if op.kind in ("LayerNormalization", "RMSNormalization"):
        return True
    return (op.kind == "Gemm" and slot == 2) or (OPDEFS[op.kind].traits.pointwise and op.kind not in _ALIGNED)


def _below(graph: Graph, value: Value, limit: int) -> bool:
    """Whether integers are known to be places along an axis of ``limit`` elements at most."""
    op = graph.op(value)
    if op.kind in _MOVES:
        return all(_below(graph, v, limit) for v in op.inputs[: None if op.kind == "Concat" else 1] if v is not None)
    if not (op.kind in ("ArgMax", "ArgMin") or (op.kind == "TopK" and value.port == 1)):
        return False
    size = graph.type(operand(op)).dims[op.attrs.axis]
    return isinstance(size, int) and size <= limit


def _distinct(graph: Graph, value: Value) -> bool:
    """Whether no token selects an expert twice: a scatter that does not add would keep one of its results."""
    op = graph.op(value)
    while op.kind in RESHAPES:
        value = operand(op)
        op = graph.op(value)
    return op.kind == "TopK" and value.port == 1


def _chosen(patch: Patch, arrays: list[Array], group: Value) -> Value:
    """The array of each row's expert."""
    return patch.add("Gather", [patch.constant(np.stack(arrays), "experts"), group], GatherAttrs(0))


# ---------------------------------------------------------------- the parts of a loop


def _parts(graph: Graph, value: Value) -> tuple[list[Part], list[Value]]:
    """The parts that a value is the sum of, and what else is added to them. There are no parts if anything else is done."""
    found, bases, left = list[Part](), list[Value](), [value]
    while left:
        at = left.pop()
        known = graph.constant_value(at)
        if known is not None and not known.any():
            continue
        op = graph.op(at)
        alone = at == value or graph.sole_user(at) is not None
        if op.kind == "Add" and alone:
            left += [operand(op, 0), operand(op, 1)]
        elif op.kind in ("ScatterND", "ScatterElements") and alone and (part := _part(graph, op)) is not None:
            found.append(part)
            left += [operand(op)] if op.attrs.reduction == "add" else []
        elif graph.type(at).dims != graph.type(value).dims:
            return [], []
        else:
            bases.append(at)
    return found, bases


def _part(graph: Graph, op: Op) -> Part | None:
    base = graph.constant_value(operand(op))
    if op.attrs.reduction != "add" and (op.attrs.reduction != "none" or base is None or base.any()):
        return None
    index = operand(op, 1)
    if op.kind == "ScatterElements":
        expand = graph.op(index)
        if op.attrs.axis != 0 or expand.kind != "Expand":
            return None
        index = operand(expand)
    at = _coordinate(graph, index)
    if at is None or len(graph.type(operand(op)).dims) != 2:
        return None
    chooser, token = at
    found = _selection(graph, operand(chooser))
    if found is None:
        return None
    selected, expert, first_is_token, wraps = found
    pairs = graph.type(selected).dims
    if graph.type(operand(chooser)).dims != (pairs if first_is_token else pairs[::-1]):
        return None
    if (token == 0) != first_is_token or graph.type(operand(op)).dims[0] != pairs[0]:
        return None
    whole = graph.type(operand(op, 2)).dims[1:] == graph.type(operand(op)).dims[1:]
    once = op.attrs.reduction == "add" or pairs[1] == 1 or _distinct(graph, selected)
    if not (whole and once):
        return None
    return Part(op, operand(op, 2), chooser, selected, expert, token, wraps)


def _coordinate(graph: Graph, value: Value) -> tuple[Op, int] | None:
    """The NonZero of a mask of two axes, and which coordinate of its positions a vector holds."""
    column: int | None = None
    for _ in range(8):
        op = graph.op(value)
        if op.kind in ("Split", "Slice", "Gather") and column is None:
            column = _column(graph, op, value)
            if column is None:
                return None
        elif op.kind not in RESHAPES and (op.kind != "Transpose" or op.attrs.perm != (1, 0)):
            rank = len(graph.type(operand(op)).dims) if op.kind == "NonZero" else 0
            return (op, column) if rank == 2 and column is not None else None
        value = operand(op)
    return None


def _column(graph: Graph, op: Op, value: Value) -> int | None:
    """Which of two coordinates an operator takes from (positions, 2) or (2, positions)."""
    dims = graph.type(operand(op)).dims
    axis = next((i for i, d in enumerate(dims) if d == 2), None)
    if len(dims) != 2 or axis is None:
        return None
    if op.kind == "Split":
        return value.port if op.attrs.axis % 2 == axis and len(op.outputs) == 2 else None
    if op.kind == "Gather":
        index = ints(graph, op.input(1))
        return index[0] % 2 if op.attrs.axis % 2 == axis and index is not None and len(index) == 1 else None
    starts, ends, axes = (ints(graph, op.input(i)) for i in (1, 2, 3))
    if starts is None or ends is None or axes is None or [a % 2 for a in axes] != [axis]:
        return None
    steps = ints(graph, op.input(4)) if op.input(4) is not None else (1,)
    taken = range(2)[slice(starts[0], ends[0], steps[0] if steps else None)]
    return taken[0] if len(taken) == 1 else None


def _selection(graph: Graph, mask: Value) -> tuple[Value, int, bool, bool] | None:
    """The experts (tokens, times) that tokens select, whose mask this is, whether the mask's first axis is tokens, and whether
    negative numbers count from the end."""
    pick = _before(graph, mask, {"Cast", *RESHAPES})
    expert = ints(graph, pick.input(1)) if pick.kind == "Gather" and pick.attrs.axis == 0 else None
    turned = graph.op(operand(pick)) if expert is not None and len(expert) == 1 else None
    if (
        expert is None
        or turned is None
        or turned.kind != "Transpose"
        or turned.attrs.perm not in ((2, 1, 0), (2, 0, 1))
    ):
        return None
    each = _before(graph, operand(turned), {"Cast"})
    selected = _one_hot(graph, each)
    dims = None if selected is None else graph.type(selected).dims
    if selected is None or dims is None or len(dims) != 2:
        return None
    return selected, expert[0], turned.attrs.perm == (2, 0, 1), each.kind == "OneHot"


def _one_hot(graph: Graph, op: Op) -> Value | None:
    """The numbers (tokens, times) whose one-hot form (tokens, times, experts) ``op`` computes."""
    if op.kind == "OneHot" and op.attrs.axis in (-1, 2):
        values = graph.constant_value(op.input(2))
        return operand(op) if values is not None and values.tolist() == [0, 1] else None
    if op.kind != "Equal":
        return None
    for slot in (0, 1):
        numbers, wide = graph.constant_value(op.input(1 - slot)), graph.op(operand(op, slot))
        if numbers is None or not np.array_equal(numbers.reshape(-1), np.arange(numbers.size)):
            continue
        if wide.kind in RESHAPES and graph.type(wide.value).dims[2:] == (1,):
            return operand(wide)
    return None


def _number_of_experts(graph: Graph, chooser: Op) -> int | None:
    pick = _before(graph, operand(chooser), {"Cast", *RESHAPES})
    many = graph.type(operand(pick)).dims[0]
    return many if isinstance(many, int) else None


def _before(graph: Graph, value: Value, kinds: set[str]) -> Op:
    op = graph.op(value)
    while op.kind in kinds:
        op = graph.op(operand(op))
    return op


# ---------------------------------------------------------------- what a part gathers


def _gathered(graph: Graph, op: Op, part: Part) -> Value | None:
    """What an operator gathers the part's tokens from, or the router's weights of its pairs of token and expert; else None."""
    if op.kind not in ("Gather", "GatherND") or graph.constant_value(op.input(0)) is not None:
        return None
    tokens, times = graph.type(part.selected).dims
    source = graph.type(operand(op))
    if not source.is_static:
        return None
    if _reads_pairs(graph, op, part):
        shape = source.static_shape
        flat = shape[0] == tokens * times if isinstance(tokens, int) and isinstance(times, int) else False
        return operand(op) if shape[:2] == (tokens, times) or flat else None
    axis = op.attrs.axis if op.kind == "Gather" else 0
    if op.kind == "GatherND" and (op.attrs.batch_dims or graph.type(operand(op, 1)).dims[1:] != (1,)):
        return None
    alone = source.dims[axis] == tokens and all(d == 1 for d in source.dims[:axis])
    return operand(op) if alone and _coordinate(graph, operand(op, 1)) == (part.chooser, part.token) else None


def _reads_pairs(graph: Graph, op: Op, part: Part) -> bool:
    """Whether the indices are the part's pairs (token, expert's number among the token's), or ``token * times + number``."""
    index, times = graph.op(operand(op, 1)), graph.type(part.selected).dims[1]
    wanted = [(part.chooser, part.token), (part.chooser, 1 - part.token)]
    if op.kind == "GatherND":
        joined = index.kind == "Concat" and not op.attrs.batch_dims
        return joined and [_coordinate(graph, v) for v in index.inputs if v is not None] == wanted
    while index.kind in RESHAPES:
        index = graph.op(operand(index))
    if op.attrs.axis != 0 or index.kind != "Add":
        return False
    for slot in (0, 1):
        scaled = graph.op(operand(index, slot))
        if scaled.kind != "Mul":
            continue
        for place in (0, 1):
            factor = ints(graph, scaled.input(1 - place))
            if factor is not None and len(factor) == 1 and factor[0] == times:
                found = [_coordinate(graph, operand(scaled, place)), _coordinate(graph, operand(index, 1 - slot))]
                return found == wanted
    return False


class ExpertLoops(RulePass):
    """Runs before :class:`MaskedRows`, which makes every expert compute all tokens."""

    name = "expert_loops"
    rules = (expert_loops,)
