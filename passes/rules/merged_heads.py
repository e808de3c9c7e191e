"""Attention whose heads are part of the batch gets its heads back: its operands are then views of the projection, without copies.

SAM and ViTDet reshape queries, keys and values to (windows * heads, positions, features), and split the result again. So do the
attentions of vit-pytorch whose projections are convolutions. PyTorch's MultiheadAttention, with positions in front of the batch,
joins batch and heads in the projection's result, and exchanges them with the positions.
"""

from __future__ import annotations

from functools import partial

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, rule
from optdnn.passes.support.facts import RESHAPES, in_shape, operand, producer
from optdnn.passes.support.parts_of_axes import Chain, chain_of, one_turn
from optdnn.passes.support.paths import path_from
from optdnn.passes.support.views import View, trace, transposed

_DEPTH = 6
"""Most views between a projection's transposed result and an attention."""


@rule("merged_heads", {"Attention"})
def merged_heads(graph: Graph, op: Op) -> Match | None:
    """Attention of ``B * H`` items with one head each, which views of its result split, becomes attention with batch B and H heads.

    The operands are views of the projections: of rows, also with positions in front of the batch, or of images."""
    if len(op.outputs) > 1 or any(v is not None for v in op.inputs[4:]):
        return None
    views = _until_turned(graph, op.value)
    chain = chain_of(graph, views[-1].value) if views else None
    if chain is None or not all(graph.type(v).is_static for v in op.inputs if v is not None):
        return None
    (items, one), heads = graph.type(op.value).static_shape[:2], _heads(chain)
    if one != 1 or heads == 1 or any(graph.type(v).dims[:2] != (items, 1) for v in op.inputs[:3] if v is not None):
        return None
    lead = items // heads, heads
    apart = [_split_items(graph, operand(op, k), lead) for k in range(3)]
    found = [view for view in apart if view is not None]
    if len(found) < len(apart):
        return None
    return Match((op, *views), partial(_with_heads, graph, op, chain, found, lead), views[-1].value)


def _until_turned(graph: Graph, value: Value) -> list[Op]:
    """The Reshapes that alone read a value, the Transpose that alone reads their result, and the Reshapes after it."""
    views = path_from(graph, value, RESHAPES)
    turn = graph.sole_user(views[-1].value if views else value)
    if turn is None or turn.kind != "Transpose":
        return views
    return [*views, turn, *path_from(graph, turn.value, RESHAPES)]


def _heads(chain: Chain) -> int:
    """The number of heads that views split the items of an attention's result into: the last part of the items.

    Items that are not split are the heads of one image, if an axis joins them with the features; otherwise 1."""
    items, features = chain.axes[0][0], chain.axes[0][3][:1]
    if not items:
        return 1
    joined = any((items[-1], *features) == axis[k : k + 2] for axis in chain.axes[-1] for k in range(len(axis) - 1))
    return chain.sizes[items[-1]] if len(items) > 1 or joined else 1


def _split_items(graph: Graph, value: Value, lead: tuple[int, int]) -> View | None:
    """The view (B, H, positions, features) of what an operand with ``B * H`` items is a view of; None if it is no plain view."""
    view = trace(graph, value)
    if view is None:
        return None
    apart = view.reshape((*lead, *graph.type(value).dims[2:]))
    return apart if apart.expressible and (_is_turned_last(apart) or _joins(graph, value, lead)) else None


def _is_turned_last(view: View) -> bool:
    """Whether a view ends with its only Transpose, after at most one Reshape."""
    return 1 <= len(view.moves) <= 2 and view.moves[-1].perm is not None


def _joins(graph: Graph, value: Value, lead: tuple[int, int]) -> bool:
    """Whether a Reshape of a Transpose joined axes of these sizes into the batch, which is otherwise only moved by views."""
    for _ in range(_DEPTH):
        op = graph.op(value)
        before = producer(graph, operand(op), {"Transpose"}) if op.kind in RESHAPES else None
        if before is not None:
            dims = before.outputs[0].type.dims
            return any(dims[i : i + 2] == lead for i in range(len(dims) - 1))
        if op.kind not in (*RESHAPES, "Split", "Gather", "Slice"):
            return False
        value = operand(op)
    return False


def _with_heads(graph: Graph, op: Op, chain: Chain, operands: list[View], lead: tuple[int, int], patch: Patch) -> Value:
    """The attention with heads, in the shape after ``chain``."""
    inputs = [view.add_to(patch) for view in operands]
    mask = op.input(3)
    if mask is not None:
        dims = graph.type(mask).dims
        own = len(dims) == 4 and dims[:2] == (lead[0] * lead[1], 1)  # others are shared by all items
        inputs.append(in_shape(patch, mask, (*lead, *dims[2:])) if own else mask)
    y = patch.add("Attention", inputs, op.attrs)
    starts = {chain.axes[0][0][-1], *(axis[0] for axis in chain.axes[0] if axis)}
    sizes, perm = one_turn(chain.sizes, chain.parts, chain.taken, starts)
    return in_shape(patch, transposed(patch, in_shape(patch, y, sizes), perm), chain.shapes(chain.sizes)[-1])


@rule("split_items", {"Attention"})
def split_items(graph: Graph, op: Op) -> Match | None:
    """Operands whose ``B * H`` items were exchanged with the positions before they were split: split first, then permuted.

    PyTorch's MultiheadAttention, exported with ONNX's Attention."""
    views = {v: view for v in op.inputs[:3] if v is not None and (view := _split_last(graph, v)) is not None}
    if not views:
        return None

    def build(patch: Patch) -> None:
        inputs = [v if v is None or v not in views else views[v].add_to(patch) for v in op.inputs]
        made = patch.add_op("Attention", inputs, op.attrs, outputs=len(op.outputs), names=[o.name for o in op.outputs])
        patch.replace_each(op.values, made.values)

    return Match((op,), build)


def _split_last(graph: Graph, value: Value) -> View | None:
    """The view (B, H, positions, features) of what an operand is a view of, if Reshapes split its items after a Transpose."""
    if graph.op(value).kind not in RESHAPES or graph.type(value).rank != 4 or 1 in graph.type(value).dims[:2]:
        return None
    view = trace(graph, value)
    return view if view is not None and view.expressible and _is_turned_last(view) else None


_HEADS_LAST = TransposeAttrs((0, 2, 1, 3, 4))
"""Exchanges the heads and the parts; also back."""


@rule("heads_before_parts", {"Attention"})
def heads_before_parts(graph: Graph, op: Op) -> Match | None:
    """Attention within the parts of each image, with heads before the parts: ``(images, heads, parts, tokens, features)``.

    It was fused as attention of ``images * heads`` items, with a head for each part. In the projections, the parts are next to the
    images. So ``images * parts`` items with the true heads are views of them (NesT: Zhang et al., 2022)."""
    if len(op.outputs) > 1 or len(op.inputs) < 3 or not all(v is None for v in op.inputs[3:]):
        return None
    found = [_heads_and_parts(graph, v) for v in op.inputs[:3]]
    first = found[0]
    if first is None or any(other is None or other[1] != first[1] for other in found):
        return None
    images, heads, parts = first[1]

    def build(patch: Patch) -> Value:
        inputs = []
        for v, source in zip(op.inputs[:3], (f[0] for f in found if f is not None), strict=True):
            _, _, tokens, features = graph.type(v).dims  # type: ignore[arg-type]
            apart = in_shape(patch, source, (images, heads, parts, tokens, features))
            turned = patch.add("Transpose", [apart], _HEADS_LAST)
            inputs.append(in_shape(patch, turned, (images * parts, heads, tokens, features)))
        _, _, tokens, features = op.outputs[0].type.dims
        y = in_shape(patch, patch.add("Attention", inputs, op.attrs), (images, parts, heads, tokens, features))
        return in_shape(patch, patch.add("Transpose", [y], _HEADS_LAST), op.outputs[0].type.dims)

    return Match((op,), build)


def _heads_and_parts(graph: Graph, value: Value | None) -> tuple[Value, tuple[int, int, int]] | None:
    """The operand before a Reshape joined images and heads, and the numbers of images, heads and parts; None for other operands.

    A Transpose put the heads between images and parts, which were neighbors before it."""
    join = producer(graph, value, RESHAPES)
    if join is None or not join.outputs[0].type.is_static:
        return None
    source = operand(join)
    turn = graph.op(source)
    if turn.kind in ("Split", "Slice"):
        turn = graph.op(operand(turn))
    if turn.kind != "Transpose" or not turn.attrs.perm or not graph.type(source).is_static:
        return None
    lead, dims = join.outputs[0].type.static_shape[:2], graph.type(source).static_shape
    if len(join.outputs[0].type.dims) != 4 or len(turn.attrs.perm) != len(dims) or _is_turned(graph, operand(turn)):
        return None
    axes = [(size, axis) for size, axis in zip(dims, turn.attrs.perm, strict=True) if size > 1][:-2]
    (images, first), (heads, _), (parts, last) = (
        axes if len(axes) == 3 else (*axes, (1, -1)) if len(axes) == 2 else [(1, 0)] * 3
    )
    if min(images, heads) == 1 or lead != (images * heads, parts) or (parts > 1 and last != first + 1):
        return None
    return source, (images, heads, parts)


def _is_turned(graph: Graph, value: Value) -> bool:
    """Whether a value is a view of a Transpose's result, or of a part of one."""
    for _ in range(_DEPTH):
        op = graph.op(value)
        if op.kind not in RESHAPES:
            return op.kind in ("Slice", "Split", "Transpose")
        value = operand(op)
    return True
