"""Parts of a head that rotate by different coordinates become one rotary embedding with concatenated tables.

Pictures and videos have such heads: one part for the rows and one for the columns (CroCo: Weinzaepfel et al., 2022; VGGT; Flux).
Parts of neighboring pairs may have different sizes. Parts whose pairs are halves must be equal: the op counts them
(``RotaryAttrs.parts``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import RESHAPES, in_shape, operand, reshape_target
from optdnn.passes.support.parts import consecutive, is_axis
from optdnn.passes.support.paths import path_to, reshapes_before
from optdnn.passes.support.rotary import ORDERS, PLAIN, rotated
from optdnn.types import Shape


@dataclass(frozen=True)
class _Part:
    """A rotated part: the part of x, its rotation, the order of axes in which it stands, and the operators up to the result."""

    source: Value
    rotary: Op
    order: tuple[int, ...]
    ops: tuple[Op, ...]

    @property
    def rows(self) -> Shape:
        """The axes of the rotated heads before their features, in the order of x."""
        dims = self.rotary.outputs[0].type.dims
        return tuple(dims[i] for i in self.order[:-1])

    @property
    def tables(self) -> tuple[Value, Value]:
        """The cosines and sines."""
        return operand(self.rotary, 1), operand(self.rotary, 2)


def _part(graph: Graph, value: Value) -> _Part | None:
    """The rotation that makes a value, perhaps between Reshapes and two Transposes that give it the shape of its operand."""
    *ops, op = reshapes_before(graph, value)
    order = PLAIN
    if op.kind == "Transpose":
        order, ops, op = op.attrs.perm, [*ops, op], graph.op(operand(op))
    if op.kind != "RotaryEmbedding" or order not in ORDERS:
        return None
    rotary, source = op, operand(op)
    ops.append(op)
    if order != PLAIN:
        there = graph.op(source)
        if there.kind != "Transpose" or there.attrs.perm != order:
            return None
        ops, source = [*ops, there], operand(there)
    chain = path_to(graph, source, RESHAPES)
    source = operand(chain[-1]) if chain else source
    given, made = graph.type(source).dims, graph.type(value).dims
    if given != made or not given or rotary.outputs[0].type.dims[-1] != given[-1]:
        return None
    return _Part(source, rotary, order, (*ops, *chain))


@rule("rotary_parts", {"Concat"})
def rotary_parts(graph: Graph, root: Op) -> Match | Miss | None:
    """``Concat(RotaryEmbedding(x0), RotaryEmbedding(x1), ..., rest)`` of the parts of x along the last axis."""
    inputs = [operand(root, i) for i in range(len(root.inputs))]
    found = [_part(graph, value) for value in inputs]
    parts = [part for part in found if part is not None]
    if len(parts) < 2 or None in found[: len(parts)] or not is_axis(graph, root.value, root.attrs.axis, -1):
        return None
    sources = [part.source for part in parts] + inputs[len(parts) :]
    x = consecutive(graph, sources)
    if x is None:
        return None
    sizes = [n for part in parts if isinstance(n := graph.type(part.source).dims[-1], int)]
    if (why := _refuse(graph, parts, sizes)) is not None:
        return Miss(why)
    first, size, dims = parts[0], sum(sizes), graph.type(x).dims
    attrs = replace(
        first.rotary.attrs,
        rotary_embedding_dim=0 if size == dims[-1] else size,
        parts=1 if first.rotary.attrs.interleaved else len(parts),
    )
    heads = (*first.rows, dims[-1])
    if reshape_target(dims, heads) is None or reshape_target(heads, dims) is None:
        return Miss(f"the size of {graph.output(x).name} {graph.type(x)} cannot be written")
    covered = {op.id: op for op in (root, *(op for part in parts for op in part.ops), *map(graph.op, sources))}

    def build(patch: Patch) -> Value:
        tables = [patch.add("Concat", [part.tables[i] for part in parts], ConcatAttrs(2)) for i in (0, 1)]
        if heads == dims:
            return rotated(patch, x, tables, attrs, first.order)
        return in_shape(patch, rotated(patch, in_shape(patch, x, heads), tables, attrs, first.order), dims)

    return Match(tuple(covered.values()), build)


def _refuse(graph: Graph, parts: Sequence[_Part], sizes: Sequence[int]) -> str | None:
    """Why these parts, of ``sizes`` features, are not one rotation, or None."""
    first, attrs = parts[0], parts[0].rotary.attrs
    if any((p.rotary.attrs, p.order, p.rows) != (attrs, first.order, first.rows) for p in parts):
        return "its parts do not turn alike"
    if attrs.rotary_embedding_dim or attrs.parts > 1 or len(sizes) < len(parts):
        return "its parts do not turn as a whole"
    if not attrs.interleaved and len(set(sizes)) > 1:
        return "its parts, whose pairs are halves, have different sizes"
    if any(len(graph.uses(op.value)) > 1 for p in parts for op in p.ops):
        return "one of its parts is used elsewhere"
    if any(graph.type(v).dims[:2] != graph.type(first.tables[0]).dims[:2] for p in parts for v in p.tables):
        return "the angles of its parts are of different images or positions"
    return None
