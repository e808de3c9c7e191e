"""The part of a convolution's channels that a Concat reads becomes an outer part: the convolution writes it into the Concat.

Cross-stage partial networks (C3 of YOLOv5: Wang et al., 2020) split a stage in two. One part is processed and then joined with the
other part. If the other part is the outer one, the processed part lies beside the Concat's memory, and nothing is copied.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, Rule
from optdnn.passes.support.facts import operand, producer
from optdnn.types import normalize_axis


class OuterPart(Rule):
    """A part that ends a Concat becomes the first part of its Split, and a part that begins a Concat the last one."""

    name = "outer_part"

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        if not context.on_gpu or op.kind != "Split" or op.outputs[0].type.rank != 4 or op.attrs.axis not in (1, -3):
            return None
        conv = producer(graph, op.inputs[0], {"Conv"}, alone=True)
        ports = range(len(op.outputs))
        places = {port: place for port in ports if (place := _place(graph, op, port)) is not None}
        if conv is None or len(places) != 1:
            return None
        ((port, first),) = places.items()
        others = [k for k in ports if k != port]
        order = [port, *others] if first else [*others, port]
        if order == list(ports):
            return None
        weight, bias = graph.constant_value(operand(conv, 1)), conv.input(2) and graph.constant_value(operand(conv, 2))
        if weight is None or (conv.input(2) is not None and bias is None) or conv.attrs.group != 1:
            return Miss("its filters are not constant, or they are grouped")
        if any((c := graph.constant_value(v)) is None or c.size > 1 for v in conv.inputs[3:] if v is not None):
            return Miss("stages of the convolution read tensors")
        widths = [n for out in op.outputs if isinstance(n := out.type.dims[1], int)]
        if len(widths) < len(op.outputs):
            return None
        ends = np.cumsum(np.array(widths))
        channels = np.concatenate([np.split(np.arange(ends[-1]), ends[:-1])[k] for k in order])

        def build(patch: Patch) -> None:
            own = [operand(conv), patch.constant(weight[channels].copy(), "weight")]
            own += [] if bias is None else [patch.constant(bias[channels].copy(), "bias")]
            y = patch.add("Conv", [*own, *conv.inputs[len(own) :]], conv.attrs, src=conv.src)
            sizes = patch.constant(np.array([widths[k] for k in order], np.int64), "sizes")
            parts = patch.add_op("Split", [y, sizes], op.attrs, outputs=len(order), src=op.src)
            for k, old in enumerate(order):
                patch.replace(Value(op.id, old), Value(parts.id, k))

        return Match((op, conv), build)


def _place(graph: Graph, split: Op, port: int) -> bool | None:
    """Whether a Concat reads the part so that it should be the first one of its Split (True) or the last one (False); else None."""
    for concat in graph.users(Value(split.id, port)):
        if concat.kind != "Concat" or normalize_axis(concat.attrs.axis, 4) != 1:
            continue
        own = [k for k, v in enumerate(concat.inputs) if v is not None and v.op == split.id]
        if len(own) == 1 and own[0] in (0, len(concat.inputs) - 1) and len(concat.inputs) > 1:
            return own[0] > 0
    return None
