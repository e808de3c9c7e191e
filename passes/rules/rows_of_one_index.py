"""Gathers of rows of several computed tensors by the same indices become one Gather from the tensors side by side.

Gaussian splatting (Kerbl et al., 2023) sorts positions, covariances, colors and opacities by depth; networks of point clouds take
several features of each point's neighbors. The producers of the tensors write their rows side by side, so that nothing is copied
for it.
"""

from __future__ import annotations

import networkx as nx

from optdnn.ir.graph import Graph, Op
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import Match, Miss, PassContext, rule
from optdnn.passes.support.facts import in_shape, is_pointwise, operand, split_along
from optdnn.types import is_float, normalize_axis

LEAST = 3
"""The fewest Gathers: of two, one launch is saved, and one copy of rows from an input may be added."""
MOST_BYTES = 1 << 20
"""Most bytes of the tensors: copying them takes less time than the launch of a Gather."""


@rule("rows_of_one_index", {"Gather"})
def rows_of_one_index(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """All Gathers of rows by one list of indices, from tensors of the same dtype and number of rows."""
    rows = _rows(graph, op)
    if not context.on_gpu or rows is None or graph.type(operand(op, 1)).rank != 1:
        return None
    index, dtype = operand(op, 1), graph.type(op.value).dtype
    if not graph.type(index).is_static:
        return None  # it runs on the CPU: a Split costs as much as a Gather
    readers = [(u, _rows(graph, u)) for u in graph.users(index) if u.value != index]
    alike = [(u, r[1]) for u, r in readers if r and r[0] == rows[0] and graph.type(u.value).dtype == dtype]
    members, widths = [u for u, _ in alike], [n for _, n in alike]
    if len(members) < LEAST or len({u.input(0) for u in members}) < len(members):
        return None
    if rows[0] * sum(widths) * dtype.itemsize > MOST_BYTES:
        return Miss(f"the rows take over {MOST_BYTES >> 20} MiB: putting them side by side would take longer")
    if sum(not _in_registers(graph, u) for u in members) < LEAST:
        return Miss("pointwise operators take most of the rows as they read them")
    ids = {u.id for u in members}
    if any(nx.ancestors(graph.nx, u.id) & ids for u in members):
        return Miss("the rows of one Gather are computed from those of another one")

    def build(patch: Patch) -> None:
        columns = [in_shape(patch, operand(u), (rows[0], n)) for u, n in zip(members, widths, strict=True)]
        taken = patch.add("Gather", [patch.add("Concat", columns, ConcatAttrs(1)), index], GatherAttrs(0))
        for u, part in zip(members, split_along(patch, taken, 1, widths), strict=True):
            patch.replace(u.value, in_shape(patch, part, graph.type(u.value).dims))

    return Match(tuple(members), build)


def _in_registers(graph: Graph, op: Op) -> bool:
    """Whether pointwise operators are the only readers of the rows of a matrix: their kernels gather them."""
    return graph.type(operand(op)).rank == 2 and all(is_pointwise(u) for u in graph.users(op.value))


def _rows(graph: Graph, op: Op) -> tuple[int, int] | None:
    """Number and width of the rows of a computed vector or matrix of floats that a Gather takes; None for other operators."""
    if op.kind != "Gather" or op.input(0) is None:
        return None
    t = graph.type(operand(op))
    if (
        not t.is_static
        or len(t.dims) not in (1, 2)
        or not is_float(t.dtype)
        or normalize_axis(op.attrs.axis, len(t.dims))
    ):
        return None
    if graph.constant_value(operand(op)) is not None:
        return None
    number, *width = t.static_shape
    return number, width[0] if width else 1
