"""Parts of a joint projection that lie in groups: the columns of its matrix are put in the order in which they are read.

CodeGen (Nijkamp et al., 2022) keeps queries, values and keys side by side for each quarter of the heads, as its training on several
devices had them. A Reshape of a part to heads would copy it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import integers, operand, producer, reshape_target, reshaped, shape_of
from optdnn.passes.support.products import PRODUCTS, added_vector, constant_matrix
from optdnn.types import Array, normalize_axis

_MOST_ADDITIONS = 4


@rule("grouped_parts", {"Split"})
def grouped_parts(graph: Graph, op: Op) -> Match | Miss | None:
    """``split(reshape(x W, [..., groups, parts]))`` whose parts' groups are joined again: ``split(x W')``, each part by itself."""
    reshape = producer(graph, op.inputs[0], {"Reshape"}, alone=True)
    found = None if reshape is None else _product(graph, reshape)
    if reshape is None or found is None:
        return None
    before, after = shape_of(graph, operand(reshape)), reshape.outputs[0].type.shape
    if before is None or after is None or len(after) != len(before) + 1 or before[:-1] != after[:-2]:
        return None
    if normalize_axis(op.attrs.axis, len(after)) != len(after) - 1 or not isinstance(after[-2], int):
        return None
    groups, sizes = after[-2], [out.type.dims[-1] for out in op.outputs]
    if not any(_joins(graph, Value(op.id, port), groups) for port in range(len(op.outputs))):
        return None
    widths = [int(n) for n in sizes if isinstance(n, int)]
    targets = [reshape_target((*before[:-1], groups * n), (*before[:-1], groups, n)) for n in widths]
    if len(widths) < len(sizes) or None in targets:
        return Miss("no constant target can express its parts")
    product, ops, (weight, vectors) = found
    columns = _columns(groups, widths)

    def build(patch: Patch) -> None:
        y = patch.add("MatMul", [operand(product), patch.constant(weight[:, columns], "weight")], MatMulAttrs())
        for vector in vectors:
            ordered = vector if vector.size == 1 else vector[columns]
            y = patch.add("Add", [y, patch.constant(ordered, "bias")])
        lengths = integers(patch, [groups * n for n in widths], "sizes")
        attrs = replace(op.attrs, axis=len(before) - 1, num_outputs=None)
        parts = patch.add_op("Split", [y, lengths], attrs, outputs=len(widths))
        for port, target in enumerate(targets):
            assert target is not None
            patch.replace(Value(op.id, port), reshaped(patch, Value(parts.id, port), target))

    return Match((op, reshape, *ops), build)


def _product(graph: Graph, reshape: Op) -> tuple[Op, list[Op], tuple[Array, list[Array]]] | None:
    """The product before a Reshape, it and the additions of vectors between them, the matrix and the vectors."""
    value, ops, vectors = operand(reshape), list[Op](), list[Array]()
    while (addition := producer(graph, value, {"Add"}, alone=True)) is not None:
        found = added_vector(graph, addition)
        if found is None or len(vectors) == _MOST_ADDITIONS:
            return None
        value = found[0]
        vectors.insert(0, found[1])
        ops.append(addition)
    product = producer(graph, value, PRODUCTS, alone=True)
    matrix = None if product is None else constant_matrix(graph, product)
    if product is None or matrix is None:
        return None
    weight, bias = matrix
    array = graph.constant_value(weight) if isinstance(weight, Value) else weight
    assert array is not None
    return product, [*ops, product], (array, [*([] if bias is None else [bias]), *vectors])


def _joins(graph: Graph, part: Value, groups: int) -> bool:
    """Whether a Reshape of a part, (..., groups, size), leaves no axis of the groups."""
    shape = graph.type(part).dims
    for user in graph.users(part):
        after = user.outputs[0].type.dims
        if user.kind != "Reshape" or after[: len(shape) - 2] != shape[:-2]:
            continue
        own = [n for n in after[len(shape) - 2 :] if isinstance(n, int)]
        if len(own) == len(after) - len(shape) + 2 and groups not in itertools.accumulate(own, lambda a, b: a * b):
            return True
    return False


def _columns(groups: int, widths: list[int]) -> Array:
    """The columns of the matrix, part by part, in each group by group."""
    whole = np.arange(groups * sum(widths)).reshape(groups, -1)
    starts = itertools.accumulate(widths, initial=0)
    return np.concatenate([whole[:, at : at + n].reshape(-1) for at, n in zip(starts, widths, strict=False)])
