"""A product of gathered rows is computed before the Gather, if the Gather repeats rows.

Networks of points and of graphs multiply edge features: the features of an edge's ends, or their difference, side by side
(EdgeConv: Wang et al., 2019; PointNet++: Qi et al., 2017; message passing: Gilmer et al., 2017). There are many more edges than
points. A product with a constant matrix commutes with operators that move rows, with sums, and with a Concat of columns: each part
of the Concat has its own rows of the matrix. So each point is multiplied once, and the products are gathered and added.

Features that many rows have in common are multiplied once, too: those of a whole picture or shape beside those of its pixels or
points (PointNet: Qi et al., 2017; DeepLab: Chen et al., 2017; DPT: Ranftl et al., 2021), or those of two objects beside each other
(Relation Networks: Santoro et al., 2017). Their product is added to the product of the other features.

Rows of a constant table are multiplied when the network is built. Audio codecs project the codes of a vector quantizer (DAC: Kumar
et al., 2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.rules.rows_by_index import gather_by_one_index, rows_by_one_index
from optdnn.passes.rules.widths import has_stages_or_factors
from optdnn.passes.support.facts import (
    RESHAPES,
    in_shape,
    integers,
    operand,
    producer,
    shape_of,
    sizes_of,
)
from optdnn.passes.support.products import multiplied
from optdnn.types import Array, normalize_axis

MOVES = RESHAPES | {"Expand", "Gather", "GatherElements", "Transpose"}
"""Kinds that move rows of operand 0."""
LESS = 2
"""Smallest ratio of the numbers of multiplications before and after."""
LEAST_SAVED = 300_000_000
"""Fewest multiplications that a separate product of common features saves: they take about as long as two launches at 16 bits."""
ADDITION = 300
"""So many multiplications take about as long as reading and writing an element: the sum of products may be a launch."""
DEPTH = 12
"""Most operators between a product and its gathered rows. Shortcuts and the steps of loops are chains of hundreds of sums."""
TABLE = 1 << 20
"""Most elements of the product of a constant table."""


@dataclass(frozen=True)
class _Term:
    """A part of the product's operand: the channels of ``value`` along ``axis``, moved by ``moves`` in this order.

    The part enters a sum with ``sign``, and is multiplied by the matrix's rows from ``first`` on.
    """

    value: Value
    axis: int
    first: int
    sign: int = 1
    moves: tuple[tuple[Op, int], ...] = ()
    """Operators, and the axis of the channels in their results."""

    @property
    def key(self) -> _Term:
        """A key that is equal for all parts that can share a product. An Expand at the end is left to the sum."""
        last = self.moves[-1][0] if self.moves else None
        repeated = last is not None and last.kind == "Expand" and len(self.moves) > 1
        return replace(self, first=0, sign=1, moves=self.moves[:-1] if repeated else self.moves)


@dataclass(frozen=True)
class _Product:
    """A product of the channels along ``axis`` with a constant matrix ``[inside, outside]``, with a bias or None."""

    op: Op
    axis: int
    matrix: Array
    bias: Array | None

    @property
    def whole(self) -> _Term:
        """All of the operand."""
        return _Term(operand(self.op), self.axis, 0)


def _product(graph: Graph, op: Op) -> _Product | None:
    """``op`` as a product that multiplies each row, or pixel, by itself; None for other operators."""
    weight, bias = graph.constant_value(op.input(1)), graph.constant_value(op.input(2))
    shape, a = sizes_of(graph, operand(op)), op.attrs
    if weight is None or shape is None or 0 in shape or has_stages_or_factors(op):
        return None
    if op.input(2) is not None and (bias is None or bias.ndim != 1):
        return None
    if op.kind == "MatMul":
        return _Product(op, len(shape) - 1, weight, None) if weight.ndim == 2 else None
    if op.kind == "Gemm":
        plain = a.alpha == a.beta == 1 and not a.transA
        return _Product(op, 1, weight.T if a.transB else weight, bias) if plain else None
    alone = (
        a.group == 1
        and {*weight.shape[2:], *a.strides} == {1}
        and not any(a.pads)
        and a.auto_pad in ("NOTSET", "VALID")
    )
    return _Product(op, 1, weight.reshape(weight.shape[:2]).T, bias) if alone else None


def _terms(graph: Graph, term: _Term, depth: int = DEPTH) -> list[_Term]:
    """The parts of a value, traced as far back as a product can move, by at most ``depth`` operators."""
    if not depth:
        return [term]
    op, dims = graph.op(term.value), graph.type(term.value).dims
    if op.kind == "Concat" and normalize_axis(op.attrs.axis, len(dims)) == term.axis:
        found, first = [], term.first
        for part in op.inputs:
            assert part is not None
            found += _terms(graph, replace(term, value=part, first=first), depth - 1)
            first += graph.type(part).static_shape[term.axis]
        return found
    if op.kind in ("Add", "Sub") and _has_channels(graph, op, term.axis) and _goes_before(graph, op, term.moves):
        signs = (1, -1 if op.kind == "Sub" else 1)
        parts = [replace(term, value=operand(op, i), sign=term.sign * s) for i, s in enumerate(signs)]
        found = [t for part in parts for t in _terms(graph, part, depth - 1)]
        return found if not term.moves or _fit(graph, found, term) else [term]
    before = _axis_before(graph, op, term.axis)
    if before is None:
        return [term]
    sum_repeats = op.kind == "Expand" and bool(term.moves) and _all_transposes(term.moves) and before == term.axis
    moves = term.moves if sum_repeats else ((op, term.axis), *term.moves)
    inner = _terms(graph, replace(term, value=operand(op), axis=before, moves=moves), depth - 1)
    return inner if _fit(graph, inner, term) else [term]


def _fit(graph: Graph, inner: Sequence[_Term], term: _Term) -> bool:
    """Whether products can multiply the parts of ``term``, and they have no more rows than it."""
    fit = all(t.axis in (1, len(graph.type(t.value).dims) - 1) for t in inner)
    return fit and sum(_rows(graph, t) for t in inner) <= _rows(graph, term)


def _all_transposes(moves: Sequence[tuple[Op, int]]) -> bool:
    return all(op.kind == "Transpose" for op, _ in moves)


def _goes_before(graph: Graph, op: Op, moves: Sequence[tuple[Op, int]]) -> bool:
    """Whether each operand of the sum ``op`` can be moved in place of the sum: moves that repeat rows would be done twice."""
    whole = all(v is not None and graph.type(v).dims == op.outputs[0].type.dims for v in op.inputs)
    return _all_transposes(moves) or (whole and all(move.kind in RESHAPES | {"Transpose"} for move, _ in moves))


def _has_channels(graph: Graph, op: Op, axis: int) -> bool:
    """Whether both operands of a sum have all channels, and neither is a constant."""
    dims = op.outputs[0].type.dims
    return all(
        v is not None and graph.constant_value(v) is None and len(graph.type(v).dims) == len(dims)
        and graph.type(v).dims[axis] == dims[axis]
        for v in op.inputs
    )  # fmt: skip


def _rows(graph: Graph, term: _Term) -> int:
    return _elements(graph, term) // graph.type(term.value).static_shape[term.axis]


def _elements(graph: Graph, term: _Term) -> int:
    return math.prod(graph.type(term.value).static_shape)


def _axis_before(graph: Graph, op: Op, axis: int) -> int | None:
    """The axis of a move's operand that holds all channels of its result in order; None if there is none."""
    before = sizes_of(graph, operand(op)) if op.kind in MOVES else None
    if before is None:
        return None
    after = op.outputs[0].type.static_shape
    found = _place(graph, op, axis, before, after)
    return found if found is not None and 0 <= found < len(before) and before[found] == after[axis] else None


def _place(graph: Graph, op: Op, axis: int, before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
    if op.kind in RESHAPES:
        ends = (i for i in range(len(before)) if math.prod(before[:i]) == math.prod(after[:axis]))
        return next((i for i in ends if before[i] == after[axis]), None)
    if op.kind == "Transpose":
        return int(op.attrs.perm[axis])
    if op.kind == "Expand":
        return axis - len(after) + len(before)
    at = normalize_axis(op.attrs.axis, len(before))
    if op.kind == "GatherElements":
        return axis if at != axis and _index(graph, op, axis) is not None else None
    added = len(graph.type(operand(op, 1)).dims)
    return axis if axis < at else axis - added + 1 if axis >= at + added else None


def _index(graph: Graph, op: Op, axis: int) -> Value | None:
    """The index of a GatherElements that is the same for all channels, before it is repeated for them."""
    expanded = producer(graph, op.input(1), {"Expand"})
    shape = None if expanded is None else shape_of(graph, expanded.inputs[0])
    rank = len(op.outputs[0].type.dims)
    return None if expanded is None or shape is None or len(shape) != rank or shape[axis] != 1 else expanded.inputs[0]


@rule("gathered_products", {"Conv", "Gemm", "MatMul"})
def gathered_products(graph: Graph, op: Op) -> Match | Miss | None:
    """A product with a constant matrix, of rows that are gathered from fewer rows."""
    product = _product(graph, op)
    if product is None:
        return None
    terms = _terms(graph, product.whole)
    if terms == [product.whole] or not any(
        move.kind in ("Gather", "GatherElements") for t in terms for move, _ in t.moves
    ):
        return None
    width = {t: graph.type(t.value).static_shape[t.axis] for t in terms}
    fewer = sum(_rows(graph, t) * width[t] for t in {t.key: t for t in terms}.values())
    if LESS * fewer > _rows(graph, product.whole) * len(product.matrix):
        return Miss("the rows that it is made of are not half as many")
    if graph.sole_user(operand(op)) is None:
        return Miss("its rows are also read by others")
    return Match((op, *_between(graph, operand(op), terms)), lambda patch: _build(patch, product, terms, width))


@rule("common_features", {"Conv", "Gemm", "MatMul"})
def common_features(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A product with a constant matrix, of rows that have features in common. The other features stay side by side."""
    product = _product(graph, op)
    if product is None:
        return None
    common, own, saved = list[_Term](), list[_Term](), 0
    for part in _parts(graph, product.whole):
        terms, elements = _terms(graph, part), _elements(graph, part)
        fewer = sum(_elements(graph, t) for t in terms)
        if LESS * fewer <= elements and any(move.kind == "Expand" for t in terms for move, _ in t.moves):
            common += map(_broadcast, terms)
            saved += (elements - fewer) * product.matrix.shape[1]
        else:
            own.append(part)
    if not common:
        return None
    if own:
        saved -= ADDITION * math.prod(op.outputs[0].type.static_shape)
    if saved <= 0 or context.counted(saved) < LEAST_SAVED:
        return Miss("what it would save takes less time than a launch that adds the products")
    if graph.sole_user(operand(op)) is None:
        return Miss("its rows are also read by others")
    width = {t: graph.type(t.value).static_shape[t.axis] for t in (*common, *own)}

    def build(patch: Patch) -> Value:
        total = _sum(patch, product, common, width)
        if own:
            values, attrs = [t.value for t in own], ConcatAttrs(product.axis)
            rest = replace(product.whole, value=values[0] if len(values) == 1 else patch.add("Concat", values, attrs))
            matrix = np.concatenate([product.matrix[t.first : t.first + width[t]] for t in own])
            total = patch.add("Add", [_multiplied(patch, rest, matrix, None), total])
        return _filled(patch, product, total)

    return Match((op, *_between(graph, operand(op), [*common, *own])), build)


def _parts(graph: Graph, whole: _Term) -> list[_Term]:
    """The operands of a Concat of channels; otherwise the value itself."""
    op, found, first = graph.op(whole.value), list[_Term](), 0
    if op.kind != "Concat" or normalize_axis(op.attrs.axis, len(op.outputs[0].type.dims)) != whole.axis:
        return [whole]
    for value in op.inputs:
        assert value is not None
        found.append(replace(whole, value=value, first=first))
        first += graph.type(value).static_shape[whole.axis]
    return found


def _broadcast(term: _Term) -> _Term:
    """The term without an Expand at the end: an addition repeats its operands."""
    last = term.moves[-1][0] if term.moves else None
    return replace(term, moves=term.moves[:-1]) if last is not None and last.kind == "Expand" else term


@rule("products_of_tables", {"Conv", "Gemm", "MatMul"})
def products_of_tables(graph: Graph, op: Op) -> Match | Miss | None:
    """A product with a constant matrix, of rows that are gathered from a constant table."""
    product = _product(graph, op)
    if product is None:
        return None
    term = product.whole
    while (before := _axis_before(graph, move := graph.op(term.value), term.axis)) is not None:
        term = replace(term, value=operand(move), axis=before, moves=((move, term.axis), *term.moves))
    if graph.constant_value(term.value) is None or not any(move.kind == "Gather" for move, _ in term.moves):
        return None
    if term.axis not in (1, len(graph.type(term.value).dims) - 1):
        return None
    if (size := _rows(graph, term) * product.matrix.shape[1]) > TABLE:
        return Miss(f"the product of its table would have {size} elements, more than {TABLE}")
    if graph.sole_user(operand(op)) is None:
        return Miss("its rows are also read by others")
    return Match(
        (op, *_between(graph, operand(op), [term])),
        lambda patch: _build(patch, product, [term], {term: len(product.matrix)}),
    )


def _between(graph: Graph, value: Value, terms: Sequence[_Term]) -> list[Op]:
    """The operators between the terms and the product."""
    ends, found, waiting = {t.value for t in terms}, dict[int, Op](), [value]
    while waiting:
        v = waiting.pop()
        if v in ends or v.op in found or graph.constant_value(v) is not None:
            continue
        op = found[v.op] = graph.op(v)
        waiting += [v for v in (op.inputs[:1] if op.kind in MOVES else op.inputs) if v is not None]
    return list(found.values())


def _build(patch: Patch, product: _Product, terms: Sequence[_Term], width: dict[_Term, int]) -> Value:
    return _filled(patch, product, _sum(patch, product, terms, width))


def _filled(patch: Patch, product: _Product, total: Value) -> Value:
    """The result of a product, repeated for all its rows."""
    dims = product.op.outputs[0].type.static_shape
    return total if patch.type(total).dims == dims else patch.add("Expand", [total, integers(patch, dims, "shape")])


def _sum(patch: Patch, product: _Product, terms: Sequence[_Term], width: dict[_Term, int]) -> Value:
    """The sum of the products of the terms, and the bias."""
    matrices: dict[_Term, Array] = {}
    for t in terms:
        rows = t.sign * product.matrix[t.first : t.first + width[t]]
        matrices[t.key] = matrices[t.key] + rows if t.key in matrices else rows
    total, bias = None, product.bias
    for t, matrix in matrices.items():
        y = _moved(patch, t, _multiplied(patch, t, matrix, bias), matrix.shape[1])
        total, bias = y if total is None else patch.add("Add", [total, y]), None
    assert total is not None
    return total


def _multiplied(patch: Patch, term: _Term, matrix: Array, bias: Array | None) -> Value:
    """The product of a term's channels."""
    rank = len(patch.type(term.value).dims)
    if term.axis == rank - 1:
        return multiplied(patch, term.value, np.ascontiguousarray(matrix), bias)
    spatial = rank - 2
    filters = patch.constant(np.ascontiguousarray(matrix.T).reshape(*matrix.T.shape, *(1,) * spatial), "filters")
    more = [] if bias is None else [patch.constant(bias, "bias")]
    ones = (1,) * spatial
    return patch.add("Conv", [term.value, filters, *more], ConvAttrs(ones, (0,) * (2 * spatial), ones))


def _moved(patch: Patch, term: _Term, y: Value, channels: int) -> Value:
    """The products, moved as the term's channels were."""
    for op, axis in term.moves:
        after = [*op.outputs[0].type.static_shape]
        after[axis] = channels
        if op.kind in RESHAPES:
            y = in_shape(patch, y, tuple(after), op.src)
        elif op.kind == "Expand":
            y = patch.add("Expand", [y, integers(patch, after, "shape")], src=op.src)
        elif op.kind == "GatherElements":
            index = _index(patch.graph, op, axis)
            wide = patch.add("Expand", [index, integers(patch, after, "shape")], src=op.src)
            y = patch.add(op.kind, [y, wide], op.attrs, src=op.src)
        else:
            y = patch.add(op.kind, [y, *op.inputs[1:]], op.attrs, src=op.src)
    return y


class GatheredProducts(RulePass):
    name = "gathered_products"
    rules = (products_of_tables, gathered_products, common_features, gather_by_one_index, rows_by_one_index)
