"""A Pad moves behind the rounding of its result, to the convolution or average pool that absorbs it."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.rules.window import conv_pads, pool_pads
from optdnn.passes.support.facts import operand, producer, scalar
from optdnn.passes.support.quantized_values import same_scale, zeros_of
from optdnn.types import is_float

_ABSORBED = {"Conv": conv_pads, "AveragePool": pool_pads}


@rule("pad_after_rounding", {"DequantizeLinear"})
def pad_after_rounding(graph: Graph, op: Op) -> Match | Miss | None:
    """Zeros around an image stay zeros if they are rounded: the image is rounded, and convolutions and average pools pad it.

    Networks of TensorFlow pad before their strided convolutions, PyTorch's exporter before average pools. ONNX Runtime quantizes
    the Pad's result, or pads integers."""
    store = producer(graph, op.inputs[0], {"QuantizeLinear"})
    pad = producer(graph, op.inputs[0] if store is None else store.inputs[0], {"Pad"})
    if pad is None:
        return None
    chain = [pad, op] if store is None else [pad, store, op]
    if any(graph.users(one.value) != [user] for one, user in pairwise(chain)):
        return Miss(f"the result of {pad.name} has another reader")
    zeros, scale = zeros_of(graph, op), scalar(graph, operand(op, 1))
    if (
        zeros is None
        or len(zeros) != 1
        or scale is None
        or op.attrs.block_size
        or not np.finfo(np.float32).tiny <= scale < np.inf
    ):
        return Miss("it has several scales, or one that is not a constant normal number")
    if store is not None and not (is_float(graph.type(pad.value).dtype) and same_scale(graph, store, op)):
        return Miss("it has another scale or zero point than the rounding before it")
    zero = zeros.pop() if store is None else 0
    for user in graph.users(op.value) or [op]:
        absorbed = _ABSORBED.get(user.kind)
        if absorbed is None or user.inputs[0] != op.value:
            return Miss(f"{user.name} does not absorb {pad.name}")
        if isinstance(found := absorbed(graph, user, pad, zero), Miss):
            return found
    return Match(tuple(reversed(chain)), partial(_moved, pad, store, op))


def _moved(pad: Op, store: Op | None, op: Op, patch: Patch) -> Value:
    """The rounded image, with zeros around it."""
    y = operand(pad)
    if store is not None:
        y = patch.add("QuantizeLinear", [y, *store.inputs[1:]], store.attrs, src=store.src)
    y = patch.add("DequantizeLinear", [y, *op.inputs[1:]], op.attrs, src=op.src)
    return patch.add("Pad", [y, pad.inputs[1], None, *pad.inputs[3:]], pad.attrs, src=pad.src)
