"""The way from the softmax of an attention back to the product of queries and keys: scales, masks and biases on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.base import Miss
from optdnn.passes.rules.shape import RESHAPES
from optdnn.passes.support.attention_mask import HIDDEN, Bias
from optdnn.passes.support.facts import scalar as constant_scalar
from optdnn.passes.support.views import keeps_last_two
from optdnn.types import DType, Shape, is_float

DEPTH = 32
"""How many ops may stand between a softmax and its product of queries and keys."""


@dataclass(frozen=True)
class Scores:
    """The way from a softmax back to the product of queries and keys."""

    product: Op
    factor: float = 1.0
    softcap: float = 0.0
    biases: tuple[Bias, ...] = ()
    ops: tuple[Op, ...] = ()
    leads: tuple[Shape, ...] = ()
    rows: tuple[tuple[str, Bias], ...] = ()
    """What the scores of a query are multiplied or divided by: (Mul or Div, the factors)."""


def find_scores(graph: Graph, start: Value | None, dtype: DType) -> Scores | Miss:
    assert start is not None
    op = graph.op(start)
    ops: tuple[Op, ...] = ()
    if op.kind == "Cast" and op.inputs[0] is not None and graph.type(op.inputs[0]).dtype == dtype:
        start, ops = op.inputs[0], (op,)
    found = _way(graph, start, 1.0, DEPTH)
    if found is None:
        return Miss("what the softmax reads is no product of queries and keys with scales and masks alone")
    if graph.type(found.product.value).dtype != dtype:
        return Miss(f"the scores are {graph.type(found.product.value).dtype}, the values {dtype}")
    return replace(found, ops=(*ops, *found.ops))


def _way(graph: Graph, value: Value, factor: float, depth: int) -> Scores | None:
    """The scores behind ``factor * value``; None where no chain of scales, masks and regroupings leads to a product."""
    op, shape = graph.op(value), graph.type(value).shape
    if depth == 0 or shape is None or len(shape) < 2 or len(op.outputs) != 1 or not op.inputs:
        return None
    lead = shape[:-2]
    if op.kind == "MatMul":
        ranks = [graph.type(v).rank for v in op.inputs[:2] if v is not None]
        return None if staged(op) or ranks != [len(shape)] * 2 else Scores(op, factor, leads=(lead,))

    def behind(inner: Value, scale: float = 1.0, *biases: Bias) -> Scores | None:
        found = _way(graph, inner, factor * scale, depth - 1)
        if found is None:
            return None
        return replace(
            found,
            biases=(*biases, *found.biases),
            ops=(op, *found.ops),
            leads=(*((lead,) if biases else ()), *found.leads),
        )

    if op.kind in RESHAPES:
        inner = op.inputs[0]
        assert inner is not None
        return behind(inner) if keeps_last_two(graph.type(inner).shape, shape) else None
    if op.kind in ("Mul", "Div"):
        for i in (0, 1) if op.kind == "Mul" else (0,):
            number, inner = one_number(graph, op.inputs[1 - i]), op.inputs[i]
            if number is None or inner is None or graph.type(inner).shape != shape:
                continue
            if op.kind == "Mul" and graph.op(inner).kind == "Tanh":
                return _softcap(graph, op, graph.op(inner), number, factor, depth)
            return behind(inner, number if op.kind == "Mul" else 1.0 / number)
        return _scaled_rows(graph, op, shape, behind)
    if op.kind in ("Add", "Sub"):
        for i in (0, 1) if op.kind == "Add" else (0,):
            inner, other = op.inputs[i], op.inputs[1 - i]
            if inner is None or other is None or graph.type(inner).shape != shape:
                continue
            found = behind(inner, 1.0, Bias(other, lead, factor if op.kind == "Add" else -factor))
            if found is not None:
                return found
        return None
    if op.kind == "Where":
        condition = op.inputs[0]
        for i in (1, 2):
            inner, low = op.inputs[i], constant_scalar(graph, op.inputs[3 - i])
            if condition is None or inner is None or low is None or graph.type(inner).shape != shape:
                continue
            if factor > 0 and (factor * low <= HIDDEN):
                hidden = op.inputs[3 - i]
                assert hidden is not None
                return behind(inner, 1.0, Bias(hidden, lead, factor, condition, keeps=i == 1))
    return None


def _scaled_rows(graph: Graph, op: Op, shape: Shape, behind: Callable[[Value], Scores | None]) -> Scores | None:
    """Scores times a number for each head or query (cosine attention of Swin V2, XCiT), which the queries can be multiplied by."""
    for i in (0, 1) if op.kind == "Mul" else (0,):
        inner, rows = op.inputs[i], op.inputs[1 - i]
        if inner is None or rows is None or graph.type(inner).shape != shape:
            continue
        own = graph.type(rows).shape
        if not own or own[-1] != 1 or len(own) > len(shape):
            continue
        found = behind(inner)
        if found is not None and not found.biases and not found.softcap:
            lead = shape[:-2]
            return replace(found, rows=((op.kind, Bias(rows, lead, 1.0)), *found.rows), leads=(lead, *found.leads))
    return None


def _softcap(graph: Graph, outer: Op, tanh: Op, cap: float, factor: float, depth: int) -> Scores | None:
    """``cap * tanh(s / cap)``."""
    value = tanh.inputs[0]
    assert value is not None
    found = _way(graph, value, 1.0, depth - 1)
    if found is None or found.biases or found.softcap or found.rows or factor != 1.0 or cap <= 0:
        return None
    return replace(found, factor=found.factor * cap, softcap=cap, ops=(outer, tanh, *found.ops))


def one_number(graph: Graph, value: Value | None) -> float | None:
    """A floating constant of one element that is not 0."""
    array = graph.constant_value(value)
    if array is None or array.size != 1 or not is_float(array.dtype):
        return None
    return float(array.reshape(-1)[0]) or None


def staged(op: Op) -> bool:
    """Whether stages are fused into a product."""
    return bool(op.attrs.prologue or op.attrs.epilogue)
