"""Linear recurrences that exporters unroll step by step are computed for all steps at once (Mamba: Gu and Dao, 2023).

``s[t] = a[t] * s[t - 1] + b[t]`` takes as many dependent operators as there are steps. For few steps, one launch loops
over them (PointwiseScan). For more steps, rounds on whole tensors are faster. A pair (a, b) is a step from one state to another,
and two consecutive steps are one step: (a2 * a1, a2 * b1 + b2). So each round doubles the length of the computed prefixes (Hillis
and Steele, 1986): 10 rounds for 1,024 steps. Products of each state with a vector of its step become one batched product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.checks import elements
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.doubled_prefixes import doubled_prefixes
from optdnn.passes.rules.segment_decays import segment_decays
from optdnn.passes.rules.substitutions import substitution
from optdnn.passes.support.facts import RESHAPES, ints, is_filled, operand, producer, reshaped, shape_of, sliced
from optdnn.passes.support.recurrences import is_looped, looped
from optdnn.types import normalize_axis

LEAST = 8
"""Fewest steps: a shorter recurrence has hardly more operators than the rounds."""
MOST = 1 << 24
"""Most elements of all states: each round reads and writes them all, while the steps do so only once."""


@dataclass(frozen=True)
class _Slice:
    """Position ``index`` of ``whole`` along ``axis``, taken by the Gather ``op``."""

    whole: Value
    axis: int
    index: int
    op: Op


def _taken(graph: Graph, value: Value | None) -> _Slice | None:
    """The position of another tensor that a Gather takes as this value, or None."""
    op = producer(graph, value, {"Gather"})
    index, shape = (None, None) if op is None else (ints(graph, op.input(1)), shape_of(graph, op.inputs[0]))
    if op is None or index is None or not shape or graph.type(operand(op, 1)).rank != 0:
        return None
    axis = normalize_axis(op.attrs.axis, len(shape))
    return _Slice(operand(op), axis, index[0], op)


@dataclass(frozen=True)
class _Step:
    """``add`` = ``factor`` * ``before`` + ``term``."""

    add: Op
    mul: Op
    factor: _Slice
    term: _Slice
    before: Value


def _step(graph: Graph, op: Op) -> _Step | None:
    """The step of a recurrence that ends in the Add ``op``, or None."""
    for scaled, rest in (op.inputs, op.inputs[::-1]):
        mul, term = producer(graph, scaled, {"Mul"}, alone=True), _taken(graph, rest)
        for a, before in () if mul is None or term is None else (mul.inputs, mul.inputs[::-1]):
            factor = _taken(graph, a)
            if factor is None or before is None or mul is None or term is None or term.index != factor.index:
                continue
            if (before_op := graph.op(before)).kind == "Gather" or (term.index > 0 and before_op.kind != "Add"):
                continue
            return _Step(op, mul, factor, term, before)
    return None


@rule("linear_recurrence", {"Add"})
def linear_recurrence(graph: Graph, op: Op) -> Match | Miss | None:
    """Compute all states of a recurrence that begins with zeros. The rule starts at the last step."""
    last = _step(graph, op)
    shape = None if last is None else shape_of(graph, last.factor.whole)
    if last is None or shape is None or any(not isinstance(n, int) for n in shape):
        return None
    axis, count = last.factor.axis, shape[last.factor.axis]
    if (
        last.factor.index != count - 1
        or shape_of(graph, last.term.whole) != shape
        or last.term.axis != axis
        or not isinstance(count, int)
    ):
        return None
    steps = [last]
    while steps[-1].factor.index > 0:
        found = _step(graph, graph.op(steps[-1].before))
        if found is None or (found.factor.whole, found.term.whole) != (last.factor.whole, last.term.whole):
            return Miss(f"the state before {steps[-1].add.name} is not a step of the same recurrence")
        if (found.factor.axis, found.term.axis, found.factor.index) != (axis, axis, steps[-1].factor.index - 1):
            return Miss(f"{found.add.name} is not the step before {steps[-1].add.name}")
        steps.append(found)
    steps.reverse()
    if count < LEAST:
        return Miss(f"{count} steps take no more operators than the rounds of their prefixes")
    if elements(graph.type(last.factor.whole)) > MOST:
        return Miss("its states are so large that the rounds of their prefixes would take longer than the steps")
    if not is_filled(graph.known(steps[0].before), 0) and not is_filled(graph.constant_value(steps[0].before), 0):
        return Miss("its first state is not zero")
    taken = [s.op for step in steps for s in (step.factor, step.term) if graph.sole_user(s.op.value) is not None]
    ops = (*(x for step in reversed(steps) for x in (step.add, step.mul)), *taken)

    def build(patch: Patch) -> None:
        made = looped if is_looped(count, elements(graph.type(last.factor.whole))) else _prefixes
        states = made(patch, last.factor.whole, last.term.whole, axis, count)
        for step in steps:
            index = step.factor.op.inputs[1]
            patch.replace(step.add.value, patch.add("Gather", [states, index], GatherAttrs(axis)))

    return Match(ops, build)


def _prefixes(patch: Patch, factors: Value, terms: Value, axis: int, count: int) -> Value:
    """All states along ``axis``, by rounds on whole tensors. The rounds have the steps as the first axis: parts are contiguous."""
    rank = len(patch.type(factors).dims)
    out = (axis, *(i for i in range(rank) if i != axis))
    back = tuple(out.index(i) for i in range(rank))
    a, b = (patch.add("Transpose", [x], TransposeAttrs(out)) if axis else x for x in (factors, terms))

    def part(x: Value, start: int, end: int) -> Value:
        return sliced(patch, x, start, end, 0)

    done = 1
    while done < count:
        late = part(a, done, count)
        scaled = patch.add("Mul", [late, part(b, 0, count - done)])
        states = patch.add("Add", [scaled, part(b, done, count)])
        if 2 * done < count:
            a = patch.add(
                "Concat", [part(a, 0, done), patch.add("Mul", [late, part(a, 0, count - done)])], ConcatAttrs(0)
            )
        b = patch.add("Concat", [part(b, 0, done), states], ConcatAttrs(0))
        done *= 2
    return patch.add("Transpose", [b], TransposeAttrs(back)) if axis else b


@rule("stacked_products", {"Concat"})
def stacked_products(graph: Graph, op: Op) -> Match | Miss | None:
    """The Concat of ``x[:, :, t] @ y[:, t]`` over all t along the last axis is one batched product. x (N, D, T, S), y (N, T, S)."""
    shape = op.outputs[0].type.shape
    if (
        shape is None
        or len(shape) != 3
        or normalize_axis(op.attrs.axis, 3) != 2
        or shape[2] != len(op.inputs)
        or len(op.inputs) < LEAST
    ):
        return None
    wholes: list[tuple[Value, Value]] = []
    ops: list[Op] = []
    for index, value in enumerate(op.inputs):
        product, between = _reshaped_product(graph, value)
        if product is None:
            return None
        left, right = _taken(graph, product.inputs[0]), _vector(graph, product.inputs[1])
        if left is None or right is None or (left.axis, right.axis, left.index, right.index) != (2, 1, index, index):
            return Miss(f"{product.name} does not multiply position {index} of both tensors")
        wholes.append((left.whole, right.whole))
        ops += [*between, product]
    if len(set(wholes)) > 1:
        return Miss("its parts are products of different tensors")
    states, vectors = wholes[0]
    before, other = shape_of(graph, states), shape_of(graph, vectors)
    if (
        before is None
        or other is None
        or len(before) != 4
        or before[2] != len(op.inputs)
        or any(not isinstance(n, int) for n in before)
    ):
        return Miss("its products do not cover all positions, or the number of positions is not known")
    n, d, t, s = (size for size in before if isinstance(size, int))
    if other != (n, t, s):
        return Miss("there is not one vector per position")

    def build(patch: Patch) -> Value:
        stack = patch.add("Transpose", [states], TransposeAttrs((0, 2, 1, 3)))
        y = patch.add("MatMul", [stack, reshaped(patch, vectors, (n, t, s, 1))], MatMulAttrs())
        return patch.add("Transpose", [reshaped(patch, y, (n, t, d))], TransposeAttrs((0, 2, 1)))

    return Match((op, *ops), build)


def _reshaped_product(graph: Graph, value: Value | None) -> tuple[Op | None, Sequence[Op]]:
    """The product that reshapes turn into this value, and these reshapes; all have one reader. (None, ()) for other values."""
    between: list[Op] = []
    while value is not None and graph.sole_user(value) is not None:
        op = graph.op(value)
        if op.kind == "MatMul":
            plain = not op.attrs.prologue and not op.attrs.epilogue
            return (op if plain else None), between
        size = shape_of(graph, op.inputs[0]) if op.inputs else None
        alone = (found := _taken(graph, value)) is not None and size is not None and size[found.axis] == 1
        if op.kind not in RESHAPES and not alone:
            break
        between.append(op)
        value = op.inputs[0]
    return None, ()


def _vector(graph: Graph, value: Value | None) -> _Slice | None:
    """The position of another tensor that is reshaped to the column ``value`` (…, S, 1), or None."""
    op, shape = producer(graph, value, RESHAPES), shape_of(graph, value)
    return None if op is None or not shape or shape[-1] != 1 else _taken(graph, op.inputs[0])


class UnrolledScans(RulePass):
    name = "unrolled_scans"
    rules = (linear_recurrence, doubled_prefixes, stacked_products, substitution, segment_decays)
