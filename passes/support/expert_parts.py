"""The parts of a loop over the experts of a mixture: the tokens of each expert, and what it gathers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.support.facts import RESHAPES, ints, operand
from optdnn.types import Shape

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


def _dims(graph: Graph, value: Value) -> Shape:
    """The sizes of a value; none if their number is not known."""
    return graph.type(value).shape or ()


def parts_of(graph: Graph, value: Value) -> tuple[list[Part], list[Value]]:
    """The parts that a value is the sum of, and what else is added to them. There are no parts if anything else is done."""
    found, bases, left = list[Part](), list[Value](), [value]
    shape = graph.type(value).shape
    while left and shape is not None:
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
        elif graph.type(at).shape != shape:
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
    if at is None or len(_dims(graph, operand(op))) != 2:
        return None
    chooser, token = at
    found = _selection(graph, operand(chooser))
    if found is None:
        return None
    selected, expert, first_is_token, wraps = found
    pairs = graph.type(selected).dims
    if graph.type(operand(chooser)).dims != (pairs if first_is_token else pairs[::-1]):
        return None
    if (token == 0) != first_is_token or _dims(graph, operand(op))[0] != pairs[0]:
        return None
    whole = _dims(graph, operand(op, 2))[1:] == _dims(graph, operand(op))[1:]
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
            rank = len(_dims(graph, operand(op))) if op.kind == "NonZero" else 0
            return (op, column) if rank == 2 and column is not None else None
        value = operand(op)
    return None


def _column(graph: Graph, op: Op, value: Value) -> int | None:
    """Which of two coordinates an operator takes from (positions, 2) or (2, positions)."""
    dims = _dims(graph, operand(op))
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
    dims = None if selected is None else _dims(graph, selected)
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
        if wide.kind in RESHAPES and _dims(graph, wide.value)[2:] == (1,):
            return operand(wide)
    return None


def number_of_experts(graph: Graph, chooser: Op) -> int | None:
    pick = _before(graph, operand(chooser), {"Cast", *RESHAPES})
    many = graph.type(operand(pick)).dims[0]
    return many if isinstance(many, int) else None


def _before(graph: Graph, value: Value, kinds: set[str]) -> Op:
    op = graph.op(value)
    while op.kind in kinds:
        op = graph.op(operand(op))
    return op


def below(graph: Graph, value: Value, limit: int) -> bool:
    """Whether integers are known to be places along an axis of ``limit`` elements at most."""
    op = graph.op(value)
    if op.kind in _MOVES:
        return all(below(graph, v, limit) for v in op.inputs[: None if op.kind == "Concat" else 1] if v is not None)
    if not (op.kind in ("ArgMax", "ArgMin") or (op.kind == "TopK" and value.port == 1)):
        return False
    dims = _dims(graph, operand(op))
    size = dims[op.attrs.axis] if dims else None
    return isinstance(size, int) and size <= limit


def _distinct(graph: Graph, value: Value) -> bool:
    """Whether no token selects an expert twice: a scatter that does not add would keep one of its results."""
    op = graph.op(value)
    while op.kind in RESHAPES:
        value = operand(op)
        op = graph.op(value)
    return op.kind == "TopK" and value.port == 1


def gathered_from(graph: Graph, op: Op, part: Part) -> Value | None:
    """What an operator gathers the part's tokens from, or the router's weights of its pairs of token and expert; else None."""
    if op.kind not in ("Gather", "GatherND") or graph.constant_value(op.input(0)) is not None:
        return None
    tokens, times = graph.type(part.selected).dims
    source = graph.type(operand(op))
    if not source.is_static:
        return None
    if reads_pairs(graph, op, part):
        shape = source.static_shape
        flat = shape[0] == tokens * times if isinstance(tokens, int) and isinstance(times, int) else False
        return operand(op) if shape[:2] == (tokens, times) or flat else None
    axis = op.attrs.axis if op.kind == "Gather" else 0
    if op.kind == "GatherND" and (op.attrs.batch_dims or _dims(graph, operand(op, 1))[1:] != (1,)):
        return None
    alone = source.dims[axis] == tokens and all(d == 1 for d in source.dims[:axis])
    return operand(op) if alone and _coordinate(graph, operand(op, 1)) == (part.chooser, part.token) else None


def reads_pairs(graph: Graph, op: Op, part: Part) -> bool:
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
