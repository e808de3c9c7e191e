"""Concatenated bags of rows of several tables become one Gather and one reduction (DLRM: Naumov et al., 2019).

Each table has an input of its own with the numbers of its rows: (B, L) for bags of L rows, or (B) for one row. The numbers of
single rows may also be columns of one tensor (DeepFM: Guo et al., 2017), which one Gather reads.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.rules.tables_of_columns import takes_all_tables
from optdnn.passes.support.facts import RESHAPES, integers, ints, operand, reshaped, shape_of
from optdnn.passes.support.paths import reshapes_before, value_before
from optdnn.passes.support.tables import LEAST, MOST_BYTES, column_of, columns_of, rows_of_tables
from optdnn.types import INT64, Array, normalize_axis

KINDS = frozenset({"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"})


@dataclass(frozen=True)
class _Bag:
    """Rows ``index`` of ``table``, each bag of ``size`` rows reduced by ``kind`` ("": single rows)."""

    index: Value
    table: Array
    kind: str
    size: int
    ops: tuple[Op, ...]

    @property
    def form(self) -> tuple[object, ...]:
        """Bags of the same form can be joined."""
        return self.kind, self.size, self.table.shape[1], self.table.dtype


def longest_run(forms: Sequence[Hashable | None]) -> tuple[int, int]:
    """The longest run of equal forms: its first position, and the one after it. None is no form; (0, 0): there is no run."""
    best, start = (0, 0), 0
    for form, alike in groupby(forms):
        end = start + len(list(alike))
        if form is not None and end - start > best[1] - best[0]:
            best = (start, end)
        start = end
    return best


def with_joined(patch: Patch, op: Op, run: tuple[int, int], joined: Value, axis: int) -> Value:
    """The result of a Concat ``op`` along ``axis`` whose operands ``run`` are replaced by the one value ``joined``."""
    start, end = run
    if end - start == len(op.inputs):
        return joined
    return patch.add("Concat", [*op.inputs[:start], joined, *op.inputs[end:]], ConcatAttrs(axis))


@rule("joined_bags", {"Concat"})
def joined_bags(graph: Graph, op: Op) -> Match | Miss | None:
    """A Concat of bags of rows, each from a table of its own by an index of its own."""
    shape = shape_of(graph, op.value)
    if not shape or not isinstance(shape[0], int) or len(shape) < 2:
        return None
    axis = normalize_axis(op.attrs.axis, len(shape))
    if axis != len(shape) - 1 and (axis, len(shape)) != (1, 3):
        return None
    found = [_bag(graph, v, shape[0]) for v in op.inputs]
    start, end = longest_run([None if bag is None else bag.form for bag in found])
    run = [bag for bag in found[start:end] if bag is not None]
    if len(run) < LEAST:
        return None
    if sum(bag.table.nbytes for bag in run) > MOST_BYTES:
        return Miss("its tables are too large to be joined")
    images, width = shape[0], run[0].table.shape[1]
    part = (images, *(1,) * (len(shape) - 2), len(run) * width) if axis == len(shape) - 1 else (images, len(run), width)

    def build(patch: Patch) -> Value:
        rows = rows_of_tables(patch, _indices(patch, run, images), [bag.table for bag in run])
        if run[0].kind:
            rows = patch.add(run[0].kind, [rows, integers(patch, [2], "axes")], ReduceAttrs(keepdims=False))
        shared = [(k, bag.ops[-1]) for k, bag in enumerate(run) if graph.use_count(bag.ops[-1].value) > 1]
        if shared:
            split = patch.add_op("Split", [rows], SplitAttrs(1, len(run)), outputs=len(run))
            for k, gather in shared:
                patch.replace(gather.value, reshaped(patch, Value(split.id, k), gather.outputs[0].type.static_shape))
        return with_joined(patch, op, (start, end), reshaped(patch, rows, part), axis)

    covered = {x.id: x for x in (op, *(x for bag in run for x in bag.ops))}
    return Match(tuple(covered.values()), build)


def _indices(patch: Patch, bags: Sequence[_Bag], images: int) -> Value:
    """The indices of all bags, (B, K, size), or (B, K) of single rows by columns of one matrix."""
    columns = [column_of(patch.graph, bag.index) for bag in bags if not bag.kind]
    found = [c for c in columns if c is not None]
    if len(found) == len(bags) and len({source for source, _ in found}) == 1:
        return columns_of(patch, found[0][0], [number for _, number in found])
    each = [reshaped(patch, bag.index, (images, 1, bag.size)) for bag in bags]
    wide = [v if patch.type(v).dtype == INT64 else patch.add("Cast", [v], CastAttrs(INT64)) for v in each]
    return patch.add("Concat", wide, ConcatAttrs(1))


def _bag(graph: Graph, value: Value | None, images: int) -> _Bag | None:
    """The bags whose results are a part of a Concat, (B, width) or (B, 1, width); None for other parts."""
    if value is None:
        return None
    part, (*ops, last) = shape_of(graph, value), reshapes_before(graph, value)
    reduction = last if last.kind in KINDS else None
    kind, size = "", 1
    if reduction is not None:
        bags = shape_of(graph, operand(reduction))
        if ints(graph, reduction.input(1)) not in ((1,), (-2,)) or bags is None or len(bags) != 3:
            return None
        if not isinstance(bags[1], int):
            return None
        kind, size = reduction.kind, bags[1]
        *views, gather = reshapes_before(graph, operand(reduction))
        ops = [*ops, reduction, *views]
    else:
        gather = last
    table = graph.constant_value(gather.input(0)) if gather.kind == "Gather" else None
    if table is None or table.ndim != 2 or normalize_axis(gather.attrs.axis, 2):
        return None
    if not kind and takes_all_tables(graph, gather):
        return None
    ops = [*ops, gather]
    index = value_before(graph, operand(gather, 1), RESHAPES)
    # Single rows may have other readers, which get a part of the joined rows. Then no index may depend on rows.
    single = not kind and _is_given(graph, index)
    if any(len(graph.uses(x.value)) > 1 for x in (ops[:-1] if single else ops)):
        return None
    dims, width = shape_of(graph, index), table.shape[1]
    sizes = [d for d in dims or () if isinstance(d, int)]
    if graph.constant_value(index) is not None or dims is None or len(sizes) < len(dims):
        return None
    ones = part is not None and part[0] == images and part[-1] == width and all(d == 1 for d in part[1:-1])
    if not ones or math.prod(sizes) != images * size:
        return None
    return _Bag(index, table, kind, size, tuple(ops))


def _is_given(graph: Graph, index: Value) -> bool:
    """Whether an index is an input of the network, or its conversion."""
    return graph.op(value_before(graph, index, RESHAPES | {"Cast"})).kind == "Input"
