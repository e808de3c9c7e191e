"""Attention within each part of a sequence becomes one attention, whose items are the parts.

Vision transformers of Qwen (Bai et al., "Qwen2.5-VL", 2025) attend within windows, and within the images of a batch, whose tokens
follow one another. They split queries, keys and values, and call attention for each part: as many launches as there are windows.
"""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import heads_sizes, operand, producer, reshaped, split_along
from optdnn.types import normalize_axis

_PARTS_FIRST = TransposeAttrs((0, 2, 1, 3, 4))
"""Exchanges the heads and the parts; also back."""


@rule("attention_parts", {"Split"})
def attention_parts(graph: Graph, op: Op) -> Match | Miss | None:
    """Attentions that read the parts of a Split as queries, and those of two other Splits as keys and values, along the tokens."""
    items = [graph.sole_user(v) for v in op.values]
    found = [item for item in items if item is not None and item.kind == "Attention"]
    if len(found) < len(items) or len(found) < 2:
        return None
    if any(item.inputs[0] != Value(op.id, port) for port, item in enumerate(found)):
        return None
    first = found[0]
    if any(item.attrs != first.attrs or item.inputs[3:] != first.inputs[3:] for item in found):
        return Miss("its parts are read by attentions of different attributes or masks")
    others = [graph.use_count(v) for item in found for v in item.values[1:]]
    if any(v is not None for v in first.inputs[3:]) or any(others):
        return Miss("an attention of its parts has a mask, a cache or sinks, or gives more than its result")
    splits = [_split_of(graph, [item.inputs[slot] for item in found]) for slot in range(3)]
    sizes = [heads_sizes(graph, item) for item in found]
    if any(split is None for split in splits) or sizes[0] is None:
        return Miss("queries, keys and values are not cut along their tokens alike")
    if any(other != sizes[0] for other in sizes):
        return Miss("its parts have different sizes")
    sources = [operand(split) for split in splits if split is not None]
    batch, heads, tokens, _ = sizes[0][0]
    width = sizes[0][2][3]
    count = len(found)

    def build(patch: Patch) -> None:
        given = [_parts_as_items(patch, source, count) for source in sources]
        y = patch.add("Attention", given, first.attrs)
        y = patch.add("Transpose", [reshaped(patch, y, (batch, count, heads, tokens, width))], _PARTS_FIRST)
        whole = reshaped(patch, y, (batch, heads, count * tokens, width))
        patch.replace_each((item.value for item in found), split_along(patch, whole, 2, [tokens] * count))

    return Match(tuple(found), build)


def _split_of(graph: Graph, parts: Sequence[Value | None]) -> Op | None:
    """The Split along the tokens that has these as all its parts, in order."""
    split = producer(graph, parts[0], {"Split"})
    if split is None or list(parts) != split.values:
        return None
    rank = len(graph.type(operand(split)).dims)
    return split if rank == 4 and normalize_axis(split.attrs.axis, rank) == 2 else None


def _parts_as_items(patch: Patch, x: Value, count: int) -> Value:
    """``(batch, heads, count * tokens, width)`` as ``(batch * count, heads, tokens, width)``."""
    batch, heads, tokens, width = patch.type(x).static_shape
    parts = reshaped(patch, x, (batch, heads, count, tokens // count, width))
    turned = patch.add("Transpose", [parts], _PARTS_FIRST)
    return reshaped(patch, turned, (batch * count, heads, tokens // count, width))


class AttentionParts(RulePass):
    name = "attention_parts"
    rules = (attention_parts,)
