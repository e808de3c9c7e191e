"""An addition of one vector of channels per image before a group normalization, whose kernels can also run the addition."""

from __future__ import annotations

from dataclasses import dataclass
from operator import contains

from optdnn.ir.graph import Graph, Op, Value

GROUP_NORMS = frozenset({"GroupNormalization", "InstanceNormalization"})


@dataclass(frozen=True)
class NormAddition:
    """``images`` (N, C, *) plus ``vectors`` (N or 1, C, 1, …); only ``norm`` reads the sum."""

    images: Value
    vectors: Value
    norm: Op


def norm_addition(graph: Graph, op: Op) -> NormAddition | str:
    """The addition ``op`` before its normalization, or why it is not such an addition."""
    norm = graph.sole_user(op.value)
    if norm is None or norm.kind not in GROUP_NORMS or norm.inputs[0] != op.value:
        return "no group normalization is the only reader of the sum"
    shape = op.outputs[0].type.shape
    if shape is None or len(shape) < 3 or len(op.inputs) != 2:
        return "the sum is not an image"
    per_image = ((shape[0], 1), (shape[1],), *((1,) for _ in shape[2:]))
    for images, vectors in (op.inputs, op.inputs[::-1]):
        if images is None or vectors is None or graph.constant_value(vectors) is not None:
            continue
        given = graph.type(vectors)
        same = graph.type(images).shape == shape and given.dtype == op.outputs[0].type.dtype
        if same and len(given.dims) == len(shape) and all(map(contains, per_image, given.dims)):
            return NormAddition(images, vectors, norm)
    return "neither operand is one vector of channels for each image"
