"""A norm of each rotated head moves before the rotary embedding: a rotation does not change the sum of squares.

Some networks normalize queries and keys after their rotary embedding (nanochat, Llama 4). Most others do it before, and there one
launch computes both (``optdnn.kernels.index.rotary_norm``).
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import operand, producer
from optdnn.types import normalize_axis

_MOVES = frozenset({"Cast", "Expand", "Gather", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
"""Kinds that may stand between angles and the embedding: they do the same to cosines and sines."""
_DEPTH = 12
"""Most of them."""


@rule("norm_before_rotary", {"RMSNormalization"})
def norm_before_rotary(graph: Graph, op: Op) -> Match | Miss | None:
    """Exchanges a rotary embedding and a root-mean-square norm of whole heads after it that has one factor for all features."""
    rotary = producer(graph, op.inputs[0], {"RotaryEmbedding"}, alone=True)
    if rotary is None:
        return None
    x, rank = operand(rotary), len(op.outputs[0].type.dims)
    scale = graph.constant_value(op.input(1))
    if rank != 4 or normalize_axis(op.attrs.axis, rank) != rank - 1:
        return Miss("it does not normalize each head")
    if scale is None or not scale.size or scale.min() != scale.max():
        return Miss("its scale differs between features, which the embedding mixes")
    if (
        rotary.attrs.own_angles
        or len(rotary.inputs) != 3
        or not _of_one_angle(graph, operand(rotary, 1), operand(rotary, 2))
    ):
        return Miss(f"{rotary.name} is not known to rotate by cosines and sines of the same angles")
    return Match(
        (op, rotary),
        lambda patch: patch.add(
            "RotaryEmbedding", [patch.add(op.kind, [x, *op.inputs[1:]], op.attrs), *rotary.inputs[1:]], rotary.attrs
        ),
    )


def _of_one_angle(graph: Graph, cos: Value, sin: Value) -> bool:
    """Whether the squares of two values add up to one: constants to the precision of their type, or cosine and sine of a value."""
    for _ in range(_DEPTH):
        a, b = graph.constant_value(cos), graph.constant_value(sin)
        if a is not None and b is not None:
            squares = a.astype(np.float64) ** 2 + b.astype(np.float64) ** 2 if a.shape == b.shape else np.zeros(1)
            return bool(np.allclose(squares, 1.0, rtol=0, atol=4 * float(np.finfo(a.dtype).eps)))
        p, q = graph.op(cos), graph.op(sin)
        if q.kind == "Neg":  # turned the other way
            sin = operand(q)
            continue
        if (p.kind, q.kind) == ("Cos", "Sin"):
            return p.inputs == q.inputs
        if (
            p.kind != q.kind
            or p.kind not in _MOVES
            or p.attrs != q.attrs
            or not _same(graph, p.inputs[1:], q.inputs[1:])
        ):
            return False
        cos, sin = operand(p), operand(q)
    return False


def _same(graph: Graph, first: tuple[Value | None, ...], second: tuple[Value | None, ...]) -> bool:
    """Whether operands are the same values, or equal constants."""
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        one, other = graph.constant_value(a), graph.constant_value(b)
        if a != b and (one is None or other is None or not np.array_equal(one, other)):
            return False
    return True
