"""Chains of operators that only move rows become one Gather of rows.

Attention with shifted windows (Swin: Liu et al., 2021) rolls its image along two axes: two Slices and a Concat for each. A
Reshape, a Transpose and a Reshape cut the image into windows. After the attention all of this is undone. Each Concat would be two
copies, and each Reshape of transposed axes one. If all of these operators keep the elements of a row together, one Gather replaces
them. Its table has the source of each row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.hoist_views import is_added
from optdnn.passes.rules.scatter_rows import scatter_rows
from optdnn.passes.support.data_sizes import depends_on_data
from optdnn.passes.support.facts import RESHAPES, channels_from_last, ints, operand, reshaped, shape_of
from optdnn.passes.support.image_views import OF_IMAGES
from optdnn.passes.support.paths import path_to, value_before
from optdnn.passes.support.pattern import Var, node
from optdnn.passes.support.pattern_rule import pattern_rule
from optdnn.passes.support.products import multiplied, plain_product
from optdnn.types import Array, normalize_axis

MOVES = RESHAPES | {"Concat", "Slice", "Transpose"}
MOST_OPERATORS = 32
"""Most operators of one chain."""
LEAST_ROW_BYTES = 16
"""Fewest bytes of a row: shorter ones would need an access each, and a table as large as the tensor."""
MOST_ROWS = 1 << 20
"""Most rows of a table."""
_BETWEEN = 4
"""Most pointwise operators between the producer of an image and the moves."""


@rule("gather_rows", MOVES)
def gather_rows(graph: Graph, op: Op) -> Match | Miss | None:
    """Operators that move the rows of one tensor, including a Concat, become one Gather with a constant table."""
    if all(u.kind in MOVES and not _joins_tensors(graph, u) for u in graph.users(op.value)):
        return None  # the rule matches the whole chain at a later move
    chain = _chain(graph, op)
    kinds = {o.kind for o in chain}
    if "Concat" not in kinds or kinds <= {"Concat", "Slice"}:
        return None  # views, one copy, or moves along axes of images, which may be between convolutions
    inside = {o.value for o in chain}
    sources = _sources(chain)
    if len(sources) != 1:
        return None  # several tensors are joined
    source = next(iter(sources))
    types = [graph.type(v) for v in (source, *inside)]
    if not all(t.is_static for t in types):
        return Miss("its sizes are not known")
    if any(not t.static_shape or 0 in t.static_shape for t in types):
        return None  # scalars have no rows, and empty tensors need no moves
    if _is_image(graph, source):
        return Miss("it moves parts of a channels-last image")
    slices = {o.id: _positions(graph, o) for o in chain if o.kind == "Slice"}
    taken = {i: positions for i, positions in slices.items() if positions is not None}
    if len(taken) < len(slices):
        return Miss("the bounds of a Slice are not known")
    row = _row(graph, chain, source, taken)
    if row * graph.type(source).dtype.itemsize < LEAST_ROW_BYTES:
        return Miss(f"rows of {row} elements are too short for a table")
    if math.prod(op.outputs[0].type.static_shape) // row > MOST_ROWS * 16:
        return Miss("it has too many rows for a table")
    table = _table(graph, chain, source, row, taken)
    batch = graph.type(source).static_shape[0]
    count = math.prod(graph.type(source).static_shape) // row
    if table.size % batch or count % batch or not _repeats(table, batch, count):
        batch = 1
    if table.size // batch > MOST_ROWS:
        return Miss(f"a table of {table.size // batch} rows is too long")
    own = table[: table.size // batch]

    def build(patch: Patch) -> Value:
        rows = reshaped(patch, source, (batch, count // batch, row))
        if not np.array_equal(own, np.arange(count // batch)):
            rows = patch.add("Gather", [rows, patch.constant(own, "rows")], GatherAttrs(axis=1))
        return reshaped(patch, rows, op.outputs[0].type.static_shape)

    return Match(chain, build)


@pattern_rule(
    "flat_indices", node(RESHAPES, node("Gather", Var("table"), node(RESHAPES, Var("indices")), name="gather"))
)
def flat_indices(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """A Gather by flattened indices, whose result gets the shape of the indices back, becomes a Gather by the original indices."""
    gather: Op = found["gather"]
    table, indices = shape_of(graph, found["table"]), shape_of(graph, found["indices"])
    if table is None or indices is None or normalize_axis(gather.attrs.axis, len(table)):
        return None
    if root.outputs[0].type.shape != (*indices, *table[1:]):
        return None
    readers = graph.users(found["indices"])
    flat = [user for view in readers if view.kind in RESHAPES for user in graph.users(view.value)]
    tuples = [user for user in readers if user.kind == "GatherND"]  # `row_indices` flattens theirs
    if tuples or any(user.kind == "Gather" and user.id != gather.id for user in flat):
        return Miss("other Gathers take rows by the flattened indices, and they become one")
    return Match((root, gather), lambda patch: patch.add("Gather", [found["table"], found["indices"]], gather.attrs))


@rule("row_indices", {"GatherND"})
def row_indices(graph: Graph, op: Op) -> Match | Miss | None:
    """A GatherND with one index per row is a Gather of rows: torch.export writes ``bias[experts]`` so. A pointwise operator can
    take the rows in, and other passes know their form."""
    index = shape_of(graph, operand(op, 1))
    if op.attrs.batch_dims or index is None or index[-1] != 1:
        return None
    if depends_on_data(graph, graph.type(operand(op, 1))):
        return Miss(
            "the number of its rows depends on data, and on the CPU the view of the indices would be a step of its own"
        )

    def build(patch: Patch) -> Value:
        rows = patch.add("Squeeze", [operand(op, 1), patch.constant(np.array([-1], np.int64), "last")])
        return patch.add("Gather", [op.inputs[0], rows], GatherAttrs(0))

    return Match((op,), build)


@rule("gathered_addition", {"Gather"})
def gathered_addition(graph: Graph, op: Op) -> Match | Miss | None:
    """``gather(x @ W + b) + y`` is ``gather(x) @ W + b + y``, whose additions are stages of the product (Swin's shifted windows).

    ``op`` takes rows of a tensor at constant positions. Reshapes that keep the rows may stand before and behind it."""
    table, index, user = operand(op), graph.constant_value(op.inputs[1]), graph.sole_user(op.value)
    end = user if user is not None and user.kind in RESHAPES else op
    rows, after = graph.type(table), end.outputs[0].type
    views, product = path_to(graph, table, RESHAPES), plain_product(graph, value_before(graph, table, RESHAPES))
    if index is None or index.ndim != 1 or product is None or not rows.is_static or not is_added(graph, end):
        return None
    inner, outer = product.matrix.shape
    axis = len(rows.static_shape) - 2
    if normalize_axis(op.attrs.axis, axis + 2) != axis or {rows.static_shape[-1], after.dims[-1]} != {outer}:
        return None
    if any(graph.sole_user(o.value) is None for o in (*views, *product.ops)):
        return Miss(f"{product.ops[-1].name} has other readers")
    if inner > outer or index.size > rows.static_shape[axis]:
        return Miss(f"{product.ops[-1].name} reads more elements than {op.name} gathers")

    def build(patch: Patch) -> Value:
        x = reshaped(patch, product.x, (*rows.static_shape[:-1], inner))
        x = patch.add("Gather", [x, *op.inputs[1:]], op.attrs)
        x = reshaped(patch, x, (*after.static_shape[:-1], inner))
        return multiplied(patch, x, product.weight, product.bias)

    return Match((end, *([] if end is op else [op]), *views, *product.ops), build)


def _moved(op: Op) -> Sequence[Value]:
    """The operands that ``op`` moves."""
    return tuple(v for v in op.inputs if v is not None) if op.kind == "Concat" else (operand(op),)


def _chain(graph: Graph, op: Op) -> tuple[Op, ...]:
    """``op`` and the moves before it whose results only members of the chain read; ``op`` first."""
    found = {op.id: op}
    queue = [op]
    while queue and len(found) < MOST_OPERATORS:
        for value in _moved(queue.pop(0)):
            before = graph.op(value)
            if before.kind in MOVES and before.id not in found:
                found[before.id] = before
                queue.append(before)
    while True:
        outside = [i for i, o in found.items() if o is not op and any(u.id not in found for u in graph.users(o.value))]
        if not outside:
            break
        for i in outside:
            del found[i]
    return tuple(found.values())


def _sources(chain: Sequence[Op]) -> Mapping[Value, None]:
    """The tensors whose elements a chain moves."""
    inside = {o.value for o in chain}
    return dict.fromkeys(v for o in chain for v in _moved(o) if v not in inside)


def _joins_tensors(graph: Graph, op: Op) -> bool:
    """Whether an operator joins moved rows of several tensors: halves of the heads, each with windows of another shape."""
    return op.kind == "Concat" and len(_sources(_chain(graph, op))) > 1


def _is_image(graph: Graph, value: Value) -> bool:
    """Whether ``value`` is an image with its channels on axis 1.

    Kernels write images in channels-last order, and a table would need them in plain order.
    """
    for _ in range(_BETWEEN + 1):
        op = graph.op(value)
        if op.kind == "Transpose":
            return op.attrs.perm is not None and op.attrs.perm == channels_from_last(len(op.attrs.perm))
        if op.kind in STRUCTURAL or op.kind in OF_IMAGES or not op.definition.traits.pointwise:
            return op.kind in OF_IMAGES
        value = operand(op)
    return False


def _positions(graph: Graph, op: Op) -> list[range] | None:
    """The positions that a Slice takes along each axis; None if its bounds are not known."""
    sizes = graph.type(operand(op)).static_shape
    given = [ints(graph, op.input(i)) for i in range(1, 5)]
    if any(op.input(i) is not None and n is None for i, n in enumerate(given, start=1)):
        return None
    starts, ends, axes, steps = given
    assert starts is not None
    assert ends is not None
    taken = [range(n) for n in sizes]
    for i, axis in enumerate(range(len(starts)) if axes is None else axes):
        at = normalize_axis(axis, len(sizes))
        taken[at] = range(sizes[at])[starts[i] : ends[i] : 1 if steps is None else steps[i]]
    return taken


def _row(graph: Graph, chain: Sequence[Op], source: Value, taken: Mapping[int, Sequence[range]]) -> int:
    """The largest number of neighbors along the last axis that every operator keeps together. ``taken``: positions per Slice."""
    row = graph.type(source).static_shape[-1]
    for op in chain:
        before, after = graph.type(operand(op)).static_shape, op.outputs[0].type.static_shape
        if op.kind == "Transpose" and (op.attrs.perm is None or op.attrs.perm[-1] != len(before) - 1):
            return 1
        row = math.gcd(row, after[-1])
        if op.kind == "Slice":
            last = taken[op.id][-1]
            row = math.gcd(row, last.start) if last.step == 1 else 1
        elif op.kind == "Concat":
            row = math.gcd(row, *(graph.type(v).static_shape[-1] for v in _moved(op)))
    return row


def _table(graph: Graph, chain: Sequence[Op], source: Value, row: int, taken: Mapping[int, Sequence[range]]) -> Array:
    """For each row of the result, its number in ``source``: the chain is run on row numbers."""
    shape = graph.type(source).static_shape
    numbers: dict[Value, Array] = {source: np.arange(math.prod(shape) // row).reshape(*shape[:-1], -1)}
    ids = {op.id for op in chain}
    for op in (o for o in graph.order() if o.id in ids):
        given, after = [numbers[v] for v in _moved(op)], op.outputs[0].type.static_shape
        if op.kind == "Concat":
            found = np.concatenate(given, axis=normalize_axis(op.attrs.axis, len(after)))
        elif op.kind == "Transpose":
            found = given[0].transpose(op.attrs.perm)
        elif op.kind == "Slice":
            *outer, last = taken[op.id]
            found = given[0][np.ix_(*outer, range(last.start // row, last.stop // row))]
        else:
            found = given[0].reshape(*after[:-1], after[-1] // row)
        numbers[op.value] = found
    return numbers[chain[0].value].reshape(-1).astype(np.int64)


def _repeats(table: Array, batch: int, count: int) -> bool:
    """Whether the table moves rows only within each item of the batch, in the same order for all items."""
    own = table.reshape(batch, -1)
    return np.array_equal(own, own[0] + np.arange(batch)[:, None] * (count // batch))


class GatherRows(RulePass):
    name = "gather_rows"
    rules = (flat_indices, row_indices, gather_rows, gathered_addition, scatter_rows)
