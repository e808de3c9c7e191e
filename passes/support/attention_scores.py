"""The path from the softmax of an attention back to the product of queries and keys, with its scales, masks and biases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from optdnn.dim import DimLike
from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.base import Miss
from optdnn.passes.support.attention_mask import HIDDEN_TWICE, Bias
from optdnn.passes.support.facts import RESHAPES, exchange_last, operand, producer, shape_of
from optdnn.passes.support.facts import scalar as constant_scalar
from optdnn.passes.support.views import View, keeps_last_two, trace
from optdnn.types import DType, Shape, is_float

DEPTH = 32
"""Most ops between a softmax and its product of queries and keys."""


@dataclass(frozen=True)
class Scores:
    """The path from a softmax back to the product of queries and keys."""

    product: Op
    factor: float = 1.0
    softcap: float = 0.0
    biases: tuple[Bias, ...] = ()
    ops: tuple[Op, ...] = ()
    leads: tuple[Shape, ...] = ()
    rows: tuple[tuple[str, Bias], ...] = ()
    """Factors of each query's scores: (Mul or Div, the factors)."""
    exchanged: bool = False
    """Whether the product is ``k q^T``, and its result is transposed (Keras)."""
    groups: DimLike = 1
    """Heads whose queries are rows of one matrix in the product, and a separate axis after it (grouped queries in JAX)."""


def find_scores(graph: Graph, start: Value | None, dtype: DType) -> Scores | Miss:
    """The path that ends at ``start``, the operand of a softmax. ``dtype`` is the dtype of the attention's values."""
    assert start is not None
    ops: tuple[Op, ...] = ()
    cast = producer(graph, start, {"Cast"})
    if cast is not None and graph.type(operand(cast)).dtype == dtype:
        start, ops = operand(cast), (cast,)
    found = _path(graph, start, 1.0, DEPTH)
    if found is None:
        return Miss("the softmax does not read only a product of queries and keys with scales and masks")
    if graph.type(found.product.value).dtype != dtype:
        return Miss(f"the scores are {graph.type(found.product.value).dtype}, the values {dtype}")
    return replace(found, ops=(*ops, *found.ops))


def _path(graph: Graph, value: Value, factor: float, depth: int) -> Scores | None:
    """The path that ends at ``factor * value``; None unless scales, masks and Reshapes lead back to a product."""
    op, shape = graph.op(value), graph.type(value).shape
    if depth == 0 or shape is None or len(shape) < 2 or len(op.outputs) != 1 or not op.inputs:
        return None
    lead = shape[:-2]
    if op.kind == "MatMul":
        ranks = [graph.type(v).rank for v in op.inputs[:2] if v is not None]
        return None if has_stages(op) or min(r or 0 for r in ranks) < 2 else Scores(op, factor, leads=(lead,))
    if op.kind == "Transpose" and op.attrs.perm == exchange_last(len(shape)):
        product = producer(graph, operand(op), {"MatMul"})
        found = None if product is None else _path(graph, product.value, factor, depth - 1)
        return None if found is None else replace(found, ops=(op,), exchanged=True)

    def further(inner: Value, scale: float = 1.0, *biases: Bias) -> Scores | None:
        """The path that continues at ``inner``, an operand of ``op``."""
        found = _path(graph, inner, factor * scale, depth - 1)
        if found is None:
            return None
        leads = (lead, *found.leads) if biases else found.leads
        return replace(found, biases=(*biases, *found.biases), ops=(op, *found.ops), leads=leads)

    if op.kind in RESHAPES:
        groups = row_groups(shape_of(graph, op.inputs[0]), shape)
        if groups is not None:
            found = further(operand(op))
            inside = (
                found is None or found.biases or found.rows or found.softcap or found.groups != 1 or found.exchanged
            )
            return None if found is None or inside else replace(found, groups=groups)
        return further(operand(op)) if keeps_last_two(shape_of(graph, op.inputs[0]), shape) else None
    if op.kind in ("Mul", "Div"):
        scaling = factor_of(graph, op)
        if scaling is None:
            return _scaled_rows(graph, op, shape, further)
        tanh = producer(graph, scaling[0], {"Tanh"})
        if op.kind == "Mul" and tanh is not None:
            return _softcap(graph, op, tanh, scaling[1], factor, depth)
        return further(*scaling)
    if op.kind in ("Add", "Sub"):
        for i in (0, 1) if op.kind == "Add" else (0,):
            inner, other = operand(op, i), operand(op, 1 - i)
            if graph.type(inner).shape != shape:
                continue
            found = further(inner, 1.0, Bias(other, lead, factor if op.kind == "Add" else -factor))
            if found is not None:
                return found
    if op.kind == "Where":
        for i in (1, 2):
            inner, hidden = operand(op, i), operand(op, 3 - i)
            low = constant_scalar(graph, hidden)
            if low is None or graph.type(inner).shape != shape:
                continue
            if factor > 0 and factor * low <= HIDDEN_TWICE:
                return further(inner, 1.0, Bias(hidden, lead, factor, operand(op), keeps=i == 1))
    return None


def row_groups(rows: Shape | None, heads: Shape | None) -> DimLike | None:
    """R of a Reshape between ``rows`` (B, G, R * L, S) and ``heads`` (B, G, R, L, S), with or without G; None for another one."""
    if rows is None or heads is None or len(rows) not in (3, 4) or len(heads) != len(rows) + 1:
        return None
    same = rows[:-2] == heads[:-3] and rows[-2] == heads[-3] * heads[-2] and rows[-1] == heads[-1]
    return heads[-3] if same else None


def factor_of(graph: Graph, op: Op) -> tuple[Value, float] | None:
    """The operand that a Mul or Div scales by a constant with one element, and the factor; None for any other op.

    The operand has the shape of the result. A constant of 0 does not count.
    """
    for i in {"Mul": (0, 1), "Div": (0,)}.get(op.kind, ()):
        inner, array = operand(op, i), graph.constant_value(op.inputs[1 - i])
        if array is None or array.size != 1 or not is_float(array.dtype) or not array.any():
            continue
        if graph.type(inner).shape == graph.type(op.value).shape:
            number = float(array.reshape(-1)[0])
            return inner, number if op.kind == "Mul" else 1.0 / number
    return None


def unscaled(graph: Graph, value: Value) -> tuple[Value, float]:
    """The value before multiplications by scalar constants, and the product of these constants."""
    factor = 1.0
    for _ in range(DEPTH):
        scaling = factor_of(graph, graph.op(value))
        if scaling is None:
            break
        value, factor = scaling[0], factor * scaling[1]
    return value, factor


def scaled_view(graph: Graph, view: View) -> tuple[View, float]:
    """A view past scalings that follow its moves."""
    factor = 1.0
    for _ in range(DEPTH):
        base, number = unscaled(graph, view.base)
        if base == view.base:
            break
        factor *= number
        inner = trace(graph, base)
        if inner is None:
            break
        view = inner.moved(view.moves)
    return view, factor


def _scaled_rows(graph: Graph, op: Op, shape: Shape, further: Callable[[Value], Scores | None]) -> Scores | None:
    """Scores times one number per head or query (cosine attention of Swin V2, XCiT). This factor can move to the queries."""
    for i in (0, 1) if op.kind == "Mul" else (0,):
        inner, rows = operand(op, i), operand(op, 1 - i)
        own = graph.type(rows).shape
        if graph.type(inner).shape != shape or not own or own[-1] != 1 or len(own) > len(shape):
            continue
        found = further(inner)
        if found is not None and not found.biases and not found.softcap:
            lead = shape[:-2]
            return replace(found, rows=((op.kind, Bias(rows, lead, 1.0)), *found.rows), leads=(lead, *found.leads))
    return None


def _softcap(graph: Graph, outer: Op, tanh: Op, cap: float, factor: float, depth: int) -> Scores | None:
    """The path of ``cap * tanh(s / cap)``."""
    found = _path(graph, operand(tanh), 1.0, depth - 1)
    if found is None or found.biases or found.softcap or found.rows or factor != 1.0 or cap <= 0:
        return None
    return replace(found, factor=found.factor * cap, softcap=cap, ops=(outer, tanh, *found.ops))


def has_stages(op: Op) -> bool:
    """Whether stages are fused into a product ``op``."""
    return bool(op.attrs.prologue or op.attrs.epilogue)
