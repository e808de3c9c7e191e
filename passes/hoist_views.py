"""Reshapes and transposes of rows move in front of the product of these rows with a matrix, and merge with the views there.

PyTorch transposes an attention's result, multiplies it by a matrix, and transposes or reshapes it again before it adds the
residual. The second view, between product and addition, would keep the addition out of the product's epilogue. In front of the
product it merges with the first view. The other rules:

- In ConvNeXt a Transpose turns the product's rows into an image, to which a residual is added: the addition moves in front of the
  Transpose. So does an addition of rows to a transposed convolution.
- A Gemm between reshapes of leading axes becomes a MatMul of the unflattened tensor.
- A Split of a joint projection moves in front of a Reshape, which would copy the whole projection.
- A norm of rows, and the addition after it, move in front of a Reshape of transposed rows (Swin V2's windows), and read the rows
  without a copy.
- Sums are ordered again (`ordered_sums`): views may have hidden the products that compute their terms.
- A product to which several constants are added is computed once for each constant, as its bias.
- Alternating parts of a product's columns are reordered to be contiguous.
- Activations, scalar arithmetic and gates of heads move in front of a Reshape or a pixel shuffle, to the product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.ordered_sums import order_sum
from optdnn.passes.rules.early_stages import gate_before_reshape, stage_before_reshape
from optdnn.passes.rules.ordered_columns import ordered_columns
from optdnn.passes.rules.own_products import own_products
from optdnn.passes.rules.transpose import is_after_anchor
from optdnn.passes.support.facts import (
    NORMS,
    VIEWS,
    channels_from_last,
    channels_to_last,
    operand,
    producer,
    reshaped,
    shape_of,
    sizes_of,
)
from optdnn.passes.support.pattern import ConstantVar, Var, node
from optdnn.passes.support.pattern_rule import pattern_rule
from optdnn.passes.support.products import PRODUCTS, added_vector, constant_matrix, multiplied
from optdnn.passes.support.views import trace
from optdnn.types import Array, normalize_axis

IMAGES = frozenset({"Conv", "ConvTranspose"})
"""Operators whose results have channels last in memory: a Transpose that moves the channels last is a view."""
_MOST_ADDITIONS = 4
_MOST_AXES = 4
"""Most axes that the rows of a transposed tensor may span: the limit of the norms' kernels."""


@rule("hoist_view", VIEWS)
def hoist_view(graph: Graph, op: Op) -> Match | Miss | None:
    """``view(view(x) @ W + b)`` is ``view(view(x)) @ W + b`` if the outer view keeps the last axis.

    In addition, the views must merge, so that one copy replaces two, or an addition must follow that the product can absorb.
    """
    value = operand(op)
    before, after = shape_of(graph, value), op.outputs[0].type.shape
    if not before or not after or before[-1] != after[-1]:
        return None
    if op.kind == "Transpose" and (op.attrs.perm is None or op.attrs.perm[-1] != len(before) - 1):
        return None
    ops, vectors = [op], list[Array]()
    while (addition := producer(graph, value, {"Add"}, alone=True)) is not None:
        found = added_vector(graph, addition)
        if found is None or len(vectors) == _MOST_ADDITIONS:
            return None
        value = found[0]
        vectors.insert(0, found[1])
        ops.append(addition)
    product = producer(graph, value, PRODUCTS, alone=True)
    matrix = None if product is None else constant_matrix(graph, product)
    if product is None or matrix is None or producer(graph, product.inputs[0], VIEWS) is None:
        return None
    view = trace(graph, operand(product))
    if view is None:
        return None
    count = len(view.moves)
    shape = (*after[:-1], view.shape[-1])
    view = view.reshape(shape) if op.kind != "Transpose" else view.transpose(op.attrs.perm)
    if (len(view.moves) > count and not is_added(graph, op)) or not view.expressible:
        return Miss(f"it does not merge with the views that {product.name} reads")

    def build(patch: Patch) -> Value:
        rows = view.add_to(patch)
        assert rows is not None
        return multiplied(patch, rows, matrix.add_to(patch), matrix.bias, *vectors)

    return Match((*ops, product), build)


def is_added(graph: Graph, op: Op) -> bool:
    """Whether an addition follows the view, directly or after further views, that the product before the view could absorb."""
    user = graph.sole_user(op.value)
    while user is not None and user.kind in VIEWS:
        op, user = user, graph.sole_user(user.value)
    return (
        user is not None
        and user.kind == "Add"
        and all(graph.type(v).dims == op.outputs[0].type.dims for v in user.inputs if v)
    )


@pattern_rule(
    "add_before_reshape",
    node("Add", node("Reshape", Var("x"), Var("target"), name="reshape", alone=True), ConstantVar("bias")),
)
def add_before_split(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """``reshape(x @ W, [..., heads, size]) + b`` is ``reshape(x @ W + flat(b), ...)``: in Keras, biases have an axis for heads."""
    x, reshape, bias = found["x"], found["reshape"], graph.op(found["bias"]).attrs.value
    before, after = shape_of(graph, x), reshape.outputs[0].type.shape
    if producer(graph, x, PRODUCTS, alone=True) is None or before is None or after is None:
        return None
    own = bias.shape[next((i for i, n in enumerate(bias.shape) if n != 1), bias.ndim) :]
    if root.outputs[0].type.shape != after or len(own) < 2:
        return None
    if own != after[len(after) - len(own) :] or bias.size != before[-1]:
        return None

    def build(patch: Patch) -> Value:
        y = patch.add("Add", [x, patch.constant(bias.reshape(-1), "bias")])
        return patch.add("Reshape", [y, found["target"]], reshape.attrs)

    return Match((root, reshape), build)


@rule("split_before_reshape", {"Split"})
def split_before_reshape(graph: Graph, op: Op) -> Match | Miss | None:
    """``split(reshape(transpose(x)))`` is ``reshape(split(transpose(x)))`` if the Reshape keeps the split axis and those before it.

    The parts are views of x, and their Reshapes merge with the Reshapes after them. The joint Reshape would copy all of x.
    """
    reshape = producer(graph, op.inputs[0], {"Reshape"}, alone=True)
    transpose = None if reshape is None else producer(graph, reshape.inputs[0], {"Transpose"}, alone=True)
    if reshape is None or transpose is None:
        return None
    before, after = sizes_of(graph, transpose.value), sizes_of(graph, reshape.value)
    if before is None or after is None:
        return Miss("its sizes are not known")
    axis = normalize_axis(op.attrs.axis, len(after))
    if before[: axis + 1] != after[: axis + 1]:
        return Miss("the reshape changes the axis that is split, or one before it")

    def build(patch: Patch) -> None:
        parts = patch.add_op(
            "Split", [transpose.value, *op.inputs[1:]], replace(op.attrs, axis=axis), outputs=len(op.outputs)
        )
        for port, out in enumerate(op.outputs):
            part = Value(parts.id, port)
            shape = tuple(n for n in out.type.dims if isinstance(n, int))
            patch.replace(Value(op.id, port), reshaped(patch, part, shape))

    return Match((op, reshape), build)


@rule("add_before_transpose", {"Add"})
def add_before_transpose(graph: Graph, op: Op) -> Match | Miss | None:
    """``transpose(x @ W) + image`` is ``transpose(x @ W + back(image))``. The Transpose puts the channels, the last axis, second.

    The addition becomes a stage of the product. Instead of the product there may be a norm of rows, whose kernel can add too.
    ``back(image)`` costs nothing: the image comes from a convolution, with channels last in memory, or from such a Transpose, or
    from a pointwise operator of whose result such rows are read already.
    """
    for slot in (0, 1):
        transpose = producer(graph, op.inputs[slot], {"Transpose"}, alone=True)
        image = operand(op, 1 - slot)
        if transpose is None or transpose.value == image:
            continue
        if not is_after_anchor(graph, transpose) and producer(graph, transpose.inputs[0], NORMS, alone=True) is None:
            continue
        rank = op.outputs[0].type.rank
        if rank is None or rank < 3 or transpose.attrs.perm != channels_from_last(rank):
            continue
        if graph.type(image).shape != graph.type(transpose.value).shape:
            return None  # a bias, or an addition that would enlarge the product
        return _added_in_rows(graph, op, transpose, image)
    return None


def _added_in_rows(graph: Graph, op: Op, transpose: Op, image: Value) -> Match | Miss:
    perm, source = transpose.attrs.perm, graph.op(image)
    back = TransposeAttrs(channels_to_last(len(perm)))
    transposed = source.kind == "Transpose" and source.attrs.perm == perm
    read = source.pointwise and any(user.kind == "Transpose" and user.attrs == back for user in graph.users(image))
    if not transposed and not read and source.kind not in IMAGES:
        return Miss(f"the other addend comes from {source.kind}, and would be transposed to be added to rows")
    if source.kind in IMAGES and graph.sole_user(image) is op:
        return Miss(f"the epilogue of {source.name} adds the rows, and takes the operators after the sum")

    def build(patch: Patch) -> Value:
        rows = operand(source) if transposed else patch.add("Transpose", [image], back)
        return patch.add("Transpose", [patch.add("Add", [transpose.inputs[0], rows])], TransposeAttrs(perm))

    return Match((op, transpose), build)


@rule("add_before_rows", {"Add"})
def add_before_rows(graph: Graph, op: Op) -> Match | Miss | None:
    """``transpose(conv(x)) + rows`` is ``transpose(conv(x) + image(rows))``. The Transpose puts the channels last.

    The addition becomes a stage of the convolution (the feed-forward part of Retinexformer: Cai et al., 2023). ``image(rows)``
    costs nothing: in the memory order that the convolution has, it is the rows.
    """
    for slot in (0, 1):
        transpose, rows = producer(graph, op.inputs[slot], {"Transpose"}, alone=True), operand(op, 1 - slot)
        conv = producer(graph, operand(transpose), IMAGES, alone=True) if transpose is not None else None
        rank = op.outputs[0].type.rank
        if transpose is None or conv is None or rank is None or transpose.attrs.perm != channels_to_last(rank):
            continue
        if graph.type(rows).shape != graph.type(transpose.value).shape or graph.constant_value(rows) is not None:
            continue
        if is_after_anchor(graph, replace(op, inputs=(rows,))) or producer(graph, rows, NORMS, alone=True) is not None:
            # `add_before_transpose` writes this form.
            return Miss("the operator that computes the rows can add the image")
        back, turn = TransposeAttrs(channels_from_last(rank)), transpose.attrs
        return Match((op, transpose), partial(_added_to_image, conv=conv, rows=rows, back=back, turn=turn))
    return None


def _added_to_image(patch: Patch, conv: Op, rows: Value, back: TransposeAttrs, turn: TransposeAttrs) -> Value:
    image = patch.add("Add", [conv.value, patch.add("Transpose", [rows], back)])
    return patch.add("Transpose", [image], turn)


@rule("norm_before_reshape", NORMS)
def norm_before_reshape(graph: Graph, op: Op) -> Match | Miss | None:
    """``norm(reshape(transpose(x)))`` is ``reshape(norm(transpose(x)))`` if no view changes the rows: this saves their copy."""
    reshape = producer(graph, op.inputs[0], {"Reshape"}, alone=True)
    transpose = None if reshape is None else producer(graph, reshape.inputs[0], {"Transpose"}, alone=True)
    if reshape is None or transpose is None:
        return None
    before, after = sizes_of(graph, transpose.value), sizes_of(graph, op.value)
    if before is None or after is None:
        return Miss("its sizes are not known")
    if before[-1] != after[-1] or transpose.attrs.perm is None or transpose.attrs.perm[-1] != len(before) - 1:
        return Miss("the views do not keep its rows together")
    if normalize_axis(op.attrs.axis, len(after)) != len(after) - 1 or len(op.outputs) > 1:
        return Miss("it normalizes more than rows, or keeps their statistics")
    if any(len(graph.type(v).dims) > 1 for v in op.inputs[1:] if v is not None):
        return Miss("its scale or bias differs between rows")
    if _spread(graph.type(operand(transpose)).static_shape, transpose.attrs.perm) > _MOST_AXES:
        return Miss("its rows are spread over too many axes")

    def build(patch: Patch) -> Value:
        y = patch.add(op.kind, [transpose.value, *op.inputs[1:]], replace(op.attrs, axis=-1))
        return reshaped(patch, y, after)

    return Match((op, reshape), build)


@rule("transpose_before_norm", {"Transpose"})
def transpose_before_norm(graph: Graph, op: Op) -> Match | Miss | None:
    """``transpose(reshape(norm(x)))`` is ``norm(transpose(reshape(x)))`` if the views keep the rows: norms can write windows."""
    reshape = producer(graph, op.inputs[0], {"Reshape"}, alone=True)
    norm = producer(graph, op.inputs[0] if reshape is None else reshape.inputs[0], NORMS, alone=True)
    if norm is None or op.attrs.perm is None:
        return None
    rank, rows = len(op.attrs.perm), shape_of(graph, norm.value)
    if rows is None or op.attrs.perm[-1] != rank - 1 or graph.type(operand(op)).dims[-1] != rows[-1]:
        return None
    if any(not isinstance(n, int) for n in (*rows, *graph.type(operand(op)).dims)):
        return Miss("its sizes are not known")
    if (why := _beyond_rows(graph, norm, rows)) is not None:
        return Miss(why)
    shape = graph.type(operand(op)).static_shape
    if _spread(shape, op.attrs.perm) > _MOST_AXES:
        return Miss("its rows are spread over too many axes")
    added = producer(graph, norm.inputs[0], {"Add"}, alone=True)
    if added is not None and not _adds_product(graph, added):
        return Miss(f"one launch already computes {added.name} and {norm.name}")

    def build(patch: Patch) -> Value:
        x = operand(norm) if reshape is None else reshaped(patch, operand(norm), shape)
        transposed = patch.add("Transpose", [x], op.attrs)
        return patch.add(norm.kind, [transposed, *norm.inputs[1:]], replace(norm.attrs, axis=-1))

    return Match((op, norm) if reshape is None else (op, reshape, norm), build)


@rule("flat_rows_before_norm", {"Reshape"})
def flat_rows_before_norm(graph: Graph, op: Op) -> Match | Miss | None:
    """``reshape(norm(x)) @ W`` is ``norm(reshape(x)) @ W`` if rows stay whole: the product then reads the norm, and may apply it.

    PyTorch's nn.MultiheadAttention puts the sequence first. For a batch of one image that is a Reshape.
    """
    norm, user = producer(graph, operand(op), NORMS, alone=True), graph.sole_user(op.value)
    if norm is None or user is None or user.kind not in PRODUCTS or user.inputs[0] != op.value:
        return None
    before, after = sizes_of(graph, norm.value), sizes_of(graph, op.value)
    if before is None or after is None:
        return Miss("its sizes are not known")
    if before[-1] != after[-1]:
        return Miss("it splits or joins rows")
    if (why := _beyond_rows(graph, norm, before)) is not None:
        return Miss(why)
    if (source := graph.op(operand(norm))).kind not in PRODUCTS and not _adds_product(graph, source):
        return Miss(f"no product computes the rows of {norm.name}")
    back = graph.sole_user(user.value)
    if back is not None and back.kind == "Reshape" and back.outputs[0].type.dims[:-1] == before[:-1]:
        return Miss(f"{back.name} restores the axes after {user.name}, so both reshapes can be removed instead")

    def build(patch: Patch) -> Value:
        x = reshaped(patch, operand(norm), after)
        return patch.add(norm.kind, [x, *norm.inputs[1:]], replace(norm.attrs, axis=-1))

    return Match((op, norm), build)


def _beyond_rows(graph: Graph, norm: Op, rows: Sequence[Any]) -> str | None:
    """Why a norm does more than normalize each row by itself, or None."""
    if normalize_axis(norm.attrs.axis, len(rows)) != len(rows) - 1 or len(norm.outputs) > 1:
        return f"{norm.name} normalizes more than rows, or keeps their statistics"
    if any(len(graph.type(v).dims) > 1 for v in norm.inputs[1:] if v is not None):
        return f"the scale or bias of {norm.name} differs between rows"
    return None


def _adds_product(graph: Graph, op: Op) -> bool:
    """Whether an addition can be a stage of one of its operands, a product."""
    return op.kind == "Add" and any(is_after_anchor(graph, replace(op, inputs=(v,))) for v in op.inputs)


def _spread(shape: tuple[int, ...], perm: Sequence[int]) -> int:
    """The number of axes that the rows of a transposed tensor span; axes that are adjacent in memory count as one."""
    order = [p for p in perm[:-1] if shape[p] != 1]
    between = [math.prod(shape[p + 1 : q]) if q > p else 0 for p, q in pairwise(order)]
    return len(order) - sum(n == 1 for n in between)


@rule("add_before_reshape_of_norm", {"Add"})
def add_before_reshape_of_norm(graph: Graph, op: Op) -> Match | Miss | None:
    """``reshape(norm(transpose(x))) + y`` is ``reshape(norm(transpose(x)) + reshape(y))``: one launch normalizes and adds."""
    for slot in (0, 1):
        reshape = producer(graph, op.inputs[slot], {"Reshape"}, alone=True)
        norm = None if reshape is None else producer(graph, reshape.inputs[0], NORMS, alone=True)
        if reshape is None or norm is None or producer(graph, norm.inputs[0], {"Transpose"}) is None:
            continue
        other, (before, after) = operand(op, 1 - slot), (sizes_of(graph, v) for v in (norm.value, op.value))
        if before is None or after is None:
            return Miss("its sizes are not known")
        if before[-1] != after[-1] or shape_of(graph, other) != after or shape_of(graph, reshape.value) != after:
            return Miss("the other addend has rows of another shape")

        def build(
            patch: Patch, norm: Op = norm, other: Value = other, before: Any = before, after: Any = after
        ) -> Value:
            y = patch.add("Add", [norm.value, reshaped(patch, other, before)])
            return reshaped(patch, y, after)

        return Match((op, reshape), build)
    return None


class HoistViews(RulePass):
    name = "hoist_views"
    rules = (
        own_products, hoist_view, add_before_split, split_before_reshape, add_before_transpose, add_before_rows,
        norm_before_reshape, transpose_before_norm, flat_rows_before_norm, add_before_reshape_of_norm, order_sum, ordered_columns,
        stage_before_reshape, gate_before_reshape,
    )  # fmt: skip
