"""The part of a convolution's channels that a Concat reads becomes an outer part: the convolution writes it into the Concat.

Cross-stage partial networks (C3 of YOLOv5: Wang et al., 2020) split a stage in two. One part is processed and then joined with the
other part. If the other part is the outer one, the processed part lies beside the Concat's memory, and nothing is copied.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, rule
from optdnn.passes.support.channel_order import filters_of, split_channels
from optdnn.passes.support.facts import producer
from optdnn.types import normalize_axis


@rule("outer_part")
def outer_part(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A part that ends a Concat becomes the first part of its Split, and a part that begins a Concat the last one."""
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
    filters = filters_of(graph, conv)
    if isinstance(filters, Miss):
        return filters
    if any((c := graph.constant_value(v)) is None or c.size > 1 for v in conv.inputs[3:] if v is not None):
        return Miss("stages of the convolution read tensors")
    widths = [n for out in op.outputs if isinstance(n := out.type.dims[1], int)]
    if len(widths) < len(op.outputs):
        return None
    numbers = np.split(np.arange(sum(widths)), np.cumsum(np.array(widths))[:-1])

    def build(patch: Patch) -> None:
        parts = split_channels(patch, conv, filters, [numbers[k] for k in order], op.src)
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
