"""Normalized keys are transposed before they are normalized, as queries are: kernels of attention normalize both as they read them.

PyTorch's ``normalize(k, dim=-1)`` is exported with the transposition of the keys after it.
"""

from __future__ import annotations

from dataclasses import replace

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import operand, producer
from optdnn.types import normalize_axis


@rule("normalized_keys", {"Attention"})
def normalized_keys(graph: Graph, op: Op) -> Match | Miss | None:
    """``transpose(normalize(k))`` is ``normalize(transpose(k))``, along the axis that becomes the last one."""
    turned = producer(graph, op.inputs[1], {"Transpose"}, alone=True)
    norm = None if turned is None else producer(graph, operand(turned), {"LpNormalization"}, alone=True)
    if turned is None or norm is None or turned.attrs.perm is None:
        return None
    axis = turned.attrs.perm.index(normalize_axis(norm.attrs.axis, len(turned.attrs.perm)))
    if axis != len(turned.attrs.perm) - 1:
        return None

    def build(patch: Patch) -> Value:
        x = patch.add("Transpose", [operand(norm)], TransposeAttrs(turned.attrs.perm))
        return patch.add("LpNormalization", [x], replace(norm.attrs, axis=axis))

    return Match((turned, norm), build)
