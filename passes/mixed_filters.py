"""Depthwise convolutions of the parts of an image, side by side, become one convolution of the image.

CoaT (Xu et al., 2021) filters the channels of its heads by 3x3, 5x5 and 7x7 windows: parts of 54, 81 and 81 channels. Kernels take
four or eight neighboring channels at a time, which such parts do not have, but the whole image has. Smaller filters get zeros
around them. Parts that kernels take as they are (MixNet: Tan and Le, 2019) stay separate: a larger filter costs more.

An infinity or NaN of the input reaches all results under the largest window: 0 times it is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.widths import has_stages_or_factors
from optdnn.passes.support.facts import operand, producer, sizes_of
from optdnn.types import Array, normalize_axis

TOGETHER = 4
"""Channels that the kernels of depthwise convolutions take at a time, at least."""


@rule("mixed_filters", {"Concat"})
def mixed_filters(graph: Graph, op: Op) -> Match | Miss | None:
    """``concat(conv(a), conv'(b), …)`` where a, b, … are the parts of a Split of channels, in this order."""
    convs = [producer(graph, v, {"Conv"}, alone=True) for v in op.inputs]
    split = None if convs[0] is None else graph.op(operand(convs[0]))
    if split is None or split.kind != "Split" or len(split.outputs) != len(convs):
        return None
    found = [conv for conv in convs if conv is not None]
    parts = [Value(split.id, port) for port in range(len(convs))]
    if len(found) < len(convs) or [conv.inputs[0] for conv in found] != parts:
        return None
    rank = len(op.outputs[0].type.dims)
    if normalize_axis(op.attrs.axis, rank) != 1 or normalize_axis(split.attrs.axis, rank) != 1:
        return None
    weights = [graph.constant_value(conv.inputs[1]) for conv in found]
    filters = [w for w, conv in zip(weights, found, strict=True) if w is not None and _is_depthwise(graph, conv, w)]
    if len(filters) < len(found):
        return None
    widths = [len(w) for w in filters]
    if not any(n % TOGETHER for n in widths):
        return Miss(f"kernels take parts of {', '.join(map(str, widths))} channels as they are")
    if sum(widths) % TOGETHER:
        return Miss(f"the image has {sum(widths)} channels, not a multiple of {TOGETHER} either")
    joined = _joined(graph, found, filters)
    if joined is None:
        return Miss(f"the strides, dilations or pads of {found[0].name} and the others do not fit together")
    weight, pads = joined
    bias = _bias(graph, found, widths)
    attrs = replace(found[0].attrs, pads=pads, group=sum(widths), auto_pad="NOTSET")

    def build(patch: Patch) -> Value:
        more = [] if bias is None else [patch.constant(bias, "bias")]
        return patch.add("Conv", [split.inputs[0], patch.constant(weight, "weight"), *more], attrs)

    return Match((op, *found, split), build)


def _is_depthwise(graph: Graph, conv: Op, weight: Array) -> bool:
    """Whether a Conv without stages has a filter for each channel, and a constant bias if any."""
    bias = conv.input(2)
    return (
        weight.shape[1] == 1
        and conv.attrs.group == len(weight)
        and conv.attrs.auto_pad == "NOTSET"
        and not has_stages_or_factors(conv)
        and (bias is None or graph.constant_value(bias) is not None)
    )


def _joined(graph: Graph, convs: Sequence[Op], filters: Sequence[Array]) -> tuple[Array, tuple[int, ...]] | None:
    """The filters, placed in windows of one size, and the pads of the windows; None if no window suits all of them."""
    a, axes = convs[0].attrs, range(filters[0].ndim - 2)
    before, after = sizes_of(graph, operand(convs[0])), sizes_of(graph, convs[0].value)
    if before is None or after is None or any(d != 1 for conv in convs for d in conv.attrs.dilations):
        return None
    if any(conv.attrs.strides != a.strides for conv in convs):
        return None
    begins = [max(conv.attrs.pads[k] for conv in convs) for k in axes]
    shifts = [[begins[k] - conv.attrs.pads[k] for k in axes] for conv in convs]
    window = [max(s[k] + w.shape[2 + k] for s, w in zip(shifts, filters, strict=True)) for k in axes]
    ends = [max(0, (after[2 + k] - 1) * a.strides[k] + window[k] - before[2 + k] - begins[k]) for k in axes]
    if any((before[2 + k] + begins[k] + ends[k] - window[k]) // a.strides[k] + 1 != after[2 + k] for k in axes):
        return None
    weight = np.zeros((sum(map(len, filters)), 1, *window), filters[0].dtype)
    first = 0
    for shift, own in zip(shifts, filters, strict=True):
        inside = tuple(slice(s, s + n) for s, n in zip(shift, own.shape[2:], strict=True))
        weight[(slice(first, first + len(own)), slice(None), *inside)] = own
        first += len(own)
    return weight, (*begins, *ends)


def _bias(graph: Graph, convs: Sequence[Op], widths: Sequence[int]) -> Array | None:
    """The biases, with zeros where a convolution has none; None if none has one."""
    given = [graph.constant_value(conv.input(2)) for conv in convs]
    known = next((b for b in given if b is not None), None)
    if known is None:
        return None
    return np.concatenate([np.zeros(n, known.dtype) if b is None else b for b, n in zip(given, widths, strict=True)])


class MixedFilters(RulePass):
    name = "mixed_filters"
    rules = (mixed_filters,)
