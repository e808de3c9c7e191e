"""Padding that follows from sizes becomes numbers once the sizes are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from optdnn.ir.graph import Graph, Op
from optdnn.ir.patch import Patch
from optdnn.ops.conv import resolved, resolved_transpose
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import operand
from optdnn.runtime.reference.window import resolve_pads


@rule("known_pads", {"Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"})
def known_pads(graph: Graph, op: Op) -> Match | Miss | None:
    """``auto_pad``, or the ``output_shape`` of a transposed convolution, becomes pads.

    The importer does this for images of known sizes. The sizes of others are known when a plan for them is made, or when a pass
    finds them.
    """
    if op.attrs.auto_pad == "NOTSET" and not getattr(op.attrs, "output_shape", ()):
        return None
    attrs = _with_pads(graph, op)
    if attrs is None:
        return Miss("its padding depends on a size that is not known")

    def build(patch: Patch) -> None:
        made = patch.add_op(op.kind, op.inputs, attrs, names=[o.name for o in op.outputs], outputs=len(op.outputs))
        patch.replace_each(op.values, made.values)

    return Match((op,), build)


def _with_pads(graph: Graph, op: Op) -> Any:
    """The attributes with explicit pads; None if a size that they depend on is symbolic."""
    a, x = op.attrs, graph.type(operand(op))
    if x.shape is None:
        return None
    if op.kind == "Conv":
        attrs: Any = resolved(a, x, graph.type(operand(op, 1)))
    elif op.kind == "ConvTranspose":
        attrs = resolved_transpose(a, x, graph.type(operand(op, 1)))
    else:
        pads = resolve_pads(a.auto_pad, a.pads, x.dims[2:], a.kernel_shape, a.strides, a.dilations)
        attrs = a if pads is None else replace(a, pads=pads, auto_pad="NOTSET")
    return None if attrs == a else attrs
