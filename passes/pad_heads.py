"""Attention heads get a multiple of 8 features, as the kernels of 16-bit attention need.

Zeros after the features of queries and keys do not change the scores, and zeros after the features of values give columns that
nothing reads. The weights of projections get the zeros: as columns in the projections that compute the heads, as rows in the one
that reads the result. So no launch is added. If no projection reads the result, a Slice takes its first features.

Heads cannot be widened if other operators read the same projection (halves of DAT's heads with windows of two shapes). A launch
pads such heads if it takes less time than attention without such a kernel, which writes and reads all scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import PadAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass, rule
from optdnn.passes.rules.widths import Readers, Widths
from optdnn.passes.support.facts import heads_sizes, integers, operand, sliced
from optdnn.types import FP32

UNIT = 8
WIDEST = 512
"""Most features per head for which a kernel exists."""
LEAST_SCORES = 1 << 21
"""Fewest bytes of scores, written and read, that take longer than a launch that pads heads."""
HALVES = 2
"""Bytes of an element of attention in 16 bits."""


def _wide(features: int) -> int:
    return -(-features // UNIT) * UNIT


@rule("pad_heads", {"Attention"})
def pad_heads(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """Attention over ``features`` features as attention over the next multiple of 8."""
    shapes = heads_sizes(graph, op)
    if shapes is None:
        return None
    q, k, v = shapes
    features, valued = q[3], v[3]
    if not (features % UNIT or valued % UNIT) or not 0 < max(features, valued) <= WIDEST or k[2] == 0:
        return None
    if any(i is not None for i in op.inputs[4:6]) or any(graph.users(v) for v in op.values[1:]):
        return Miss("its keys and values are also outputs")
    sources = [
        Widths(graph, op, operand(op, i), 3, n, _wide(n), together=features == valued) if n % UNIT else None
        for i, n in enumerate((features, features, valued))
    ]
    readers = Readers(graph, op, 3, valued) if valued % UNIT else None
    scores = 2 * FP32.itemsize * math.prod((*q[:3], k[2]))  # written and read again
    copied = [n for s, n in zip(sources, shapes, strict=True) if s is not None and s.copied]
    moved = sum(HALVES * math.prod((*n[:3], n[3] + _wide(n[3]))) for n in copied)
    if copied and (moved > scores or len(copied) * LEAST_SCORES > context.counted(scores)):
        return Miss(
            "its queries, keys or values do not all come from projections whose weights can be padded, and copies would take "
            "longer than its scores"
        )
    if readers is not None and readers.sink is None and 2 * HALVES * math.prod((*q[:3], valued)) > scores:
        return Miss("a copy of its result would take longer than its scores")
    return Match(_covered(op, sources, readers), lambda patch: _rewrite(patch, op, sources, readers))


def _covered(op: Op, sources: Sequence[Widths | None], readers: Readers | None) -> tuple[Op, ...]:
    found = {op.id: op}
    found |= {o.id: o for s in sources if s is not None for o in s.traced}
    if readers is not None:
        found |= {o.id: o for o in readers.chain}
    return tuple(found.values())


def _rewrite(patch: Patch, op: Op, sources: Sequence[Widths | None], readers: Readers | None) -> None:
    made: dict[tuple[Value, int], Value] = {}
    inputs = list(op.inputs)
    for i, source in enumerate(sources):
        if source is not None and source.copied:
            inputs[i] = _padded(patch, source)
        elif source is not None:
            inputs[i] = source.rebuilt(patch, made)
    scale = op.attrs.scale
    if scale is None:
        scale = patch.graph.type(operand(op)).static_shape[-1] ** -0.5
    y = patch.add_op("Attention", inputs, replace(op.attrs, scale=scale)).value
    if readers is None:
        patch.replace(op.value, y)
    elif readers.sink is None:
        patch.replace(op.value, sliced(patch, y, 0, readers.size, 3))
    else:
        patch.replace(readers.sink.value, readers.rebuilt(patch, y, _wide(readers.size)))


def _padded(patch: Patch, source: Widths) -> Value:
    """The features of a source, padded by a launch."""
    rank = len(patch.graph.type(source.x).dims)
    pads = [0] * 2 * rank
    pads[rank + source.axis] = source.wide - source.size
    return patch.add("Pad", [source.x, integers(patch, pads, "pads")], PadAttrs())


class PadHeads(RulePass):
    name = "pad_heads"
    rules = (pad_heads,)

    def rules_for(self, graph: Graph, context: PassContext) -> Sequence[Rule]:
        """Attention in fp32 has no kernel that needs it."""
        sixteen = any(
            graph.type(v).dtype.itemsize == HALVES for op in graph.of_kind("Attention") for v in op.inputs[:1] if v
        )
        return self.rules if sixteen or context.only_precision not in ("fp32", "fp64") else ()
