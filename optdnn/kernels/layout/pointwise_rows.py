"""A pointwise operator and the Gathers of rows that it reads in one launch: the sum of a token's, a position's and a segment's embedding
(BERT: Devlin et al., 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Launch, Parameters
from optdnn.kernels.layout.gather import GatherBy
from optdnn.kernels.pointwise.before import stages_of
from optdnn.kernels.pointwise.elementwise import Elementwise
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.kernels.pointwise.neighbors import THREADS, kernel, load, place, walk
from optdnn.kernels.pointwise.strides import STRIDES_LIMIT, broadcast, vector
from optdnn.kernels.tactic import TakesBefore
from optdnn.ops.base import Stage
from optdnn.ops.fused import plain_stages
from optdnn.types import TensorType, normalize_axis


class PointwiseRows(TakesBefore, Elementwise):
    """A pointwise operator that reads rows of tables, which Gathers take for it alone."""

    name = "pointwise_rows"

    def refuse(self, b: Builder, op: Op) -> str | None:
        found = self.neighbors(b.graph, op)
        if not found:
            return "it reads no rows that are gathered for it alone"
        if any(not isinstance(b.chosen.get(x.id), GatherBy) or x.value in b.reserved for x in found):
            return "the rows that it reads are stored, or are views"
        if len(op.outputs[0].type.dims) > STRIDES_LIMIT:
            return "it has too many axes"
        return super().refuse(b, op)

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The Gathers before it."""
        rows = [_rows(graph, v) for v in dict.fromkeys(op.inputs)]
        last = op.outputs[0].type.dims[-1:]
        return [x for x in rows if x is not None and x.outputs[0].type.dims[-1:] == last]

    def place(self, b: Builder, op: Op) -> None:
        """Place the result."""
        b.target(op.value)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        gathers = {x.value: x for x in self.neighbors(b.graph, op)}
        tables: list[TensorView | None] = []
        indices: dict[int, TensorView] = {}
        for slot, value in enumerate(op.inputs):
            gather = gathers.get(value) if value is not None else None
            if gather is not None:
                indices[slot] = b.operand(gather.inputs[1])
            source = value if gather is None else gather.inputs[0]
            tables.append(None if source is None else b.operand(source))
        rows = Rows(tuple(tables), indices, tuple(stages_of(op)), b.target(op.value))
        made, placed = rows.launch(b.arch)
        attrs = {"rows": tuple(indices), "stages": plain_stages(rows.stages)}
        covers = replace(op, src=op.src.union(*(x.src for x in gathers.values())))
        b.emit(covers, made, placed, "PointwiseOfRows", attrs, [*tables, *indices.values()], [rows.out])


def _rows(graph: Graph, value: Value | None) -> Op | None:
    """The Gather of rows of a matrix that computes a value for one reader; None for other values."""
    op = None if value is None else graph.op(value)
    if value is None or op is None or op.kind != "Gather" or graph.sole_user(value) is None:
        return None
    table = graph.type(op.inputs[0])  # type: ignore[arg-type]
    return op if len(table.dims) == 2 and normalize_axis(op.attrs.axis, 2) == 0 else None


@dataclass(frozen=True)
class Rows:
    """``out = stages(operands)``. Operands broadcast to ``out``'s shape. The operand of a slot in ``indices`` is a table: its rows of
    these indices are read."""

    operands: tuple[TensorView | None, ...]
    indices: dict[int, TensorView]
    stages: tuple[Stage, ...]
    out: TensorView

    @property
    def present(self) -> dict[int, TensorView]:
        """The operands by slot."""
        return {i: x for i, x in enumerate(self.operands) if x is not None}

    def strides(self, slot: int) -> tuple[int, ...]:
        """The strides of an operand in the result's shape; of a table, those of its row in any axis but the last."""
        x, shape = self.present[slot], self.out.shape
        if slot not in self.indices:
            return broadcast(x, shape)
        return (*[x.strides[0]] * (len(shape) - 1), x.strides[1])

    def launch(self, arch: str) -> tuple[Launch, dict[str, TensorView]]:
        """The launch, and its operands by name."""
        shape, present = self.out.shape, self.present
        axes = sorted(range(len(shape)), key=lambda i: (-self.out.strides[i], i))
        dims = [shape[i] for i in axes]
        strides = [[s[i] for i in axes] for s in (self.out.strides, *map(self.strides, present))]
        wide = vector([self.out, *present.values()], dims, strides) if axes[-1] == len(shape) - 1 else 1
        placed = {"y": self.out, **{f"x{i}": x for i, x in present.items()}}
        placed |= {f"n{i}": x for i, x in self.indices.items()}
        count = math.prod(dims) // wide
        parameters = Parameters().pointer(*placed).u32(count).i64(*(s for each in strides for s in each))
        for x in self.indices.values():
            at = (*broadcast(x, shape[:-1]), 0)
            parameters.i64(*(at[i] for i in axes))
        text = self._source(axes, dims, wide)
        return parameters.generated(arch, text, "pointwise_rows", -(-count // THREADS), THREADS), placed

    def _source(self, axes: Sequence[int], dims: Sequence[int], wide: int) -> str:
        """The kernel's text. A thread computes ``wide`` neighbors along the last of ``axes``."""
        rank, out, present, column = len(axes), CPP[self.out.dtype], self.present, axes.index(len(axes) - 1)
        fields = [f"{out}* y;", *(f"const {CPP[x.dtype]}* x{i};" for i, x in present.items())]
        fields += [f"const {CPP[x.dtype]}* n{i};" for i, x in self.indices.items()]
        fields += ["u32 count;", f"i64 sy[{rank}];", *(f"i64 s{i}[{rank}];" for i in present)]
        fields += [f"i64 q{i}[{rank}];" for i in self.indices]
        loads, values = ["bool ok = true;"], []
        for i in self.indices:
            size = present[i].shape[0]
            loads.append(f"i64 k{i} = i64(p.n{i}[{place(f'q{i}', rank)}]); k{i} += k{i} < 0 ? {size}LL : 0;")
            loads.append(f"ok = ok && k{i} >= 0 && k{i} < {size}LL;")
        loads.append("if (!ok) return;     // an index out of range leaves the element as it was")
        for i, x in present.items():
            at = place(f"s{i}", rank)
            if i in self.indices:
                at = f"k{i} * {x.strides[0]}LL + i64(o{column}) * p.s{i}[{column}]"
            made, value = load(i, x, at, wide, wide > 1 and self.strides(i)[axes[-1]] == 1)
            loads.append(made)
            values.append(value)
        types = [TensorType(self.out.dtype, ())] * len(self.operands)
        for i, x in present.items():  # a table has the shape of its rows; a bound of a Clip is one number
            types[i] = TensorType(x.dtype, self.out.shape if i in self.indices else x.shape)
        before = walk(dims, wide)
        return kernel("pointwise_rows", fields, before, loads, values, self.stages, types, self.out.dtype, rank, wide)
