"""Rows that each select a matrix of a constant stack: the launch reads the selected matrices in place. A mixture of experts, at a
decode step, multiplies a token with the matrices of its few experts (``weights[experts] @ token``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.strips import contiguous
from optdnn.kernels.builder import Builder, TensorView, map_dtype, products
from optdnn.kernels.gemm import gemv_kernel as gemv
from optdnn.kernels.tactic import Offer, ProblemTactic, TakesBefore, kernel_offers
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted
from optdnn.types import FP32

MOST = 65535
"""Most rows: a grid has no more blocks along y."""


@dataclass(frozen=True)
class Selection:
    """The Gather that takes a matrix for each row, its place among the product's operands, and the rows."""

    pick: Op
    slot: int
    rows: Value


class SelectedGemv(TakesBefore, ProblemTactic):
    """MatMul of rows of 16-bit floats, each with its own matrix of a constant stack, and the Gather before it."""

    name = "gemv_selected"
    row_invariant: ClassVar[bool] = False
    """With more rows, a product with all matrices, which sums in another order, takes its place."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        found = selection(b.graph, op)
        if found is None:
            return "it has no matrices that indices select from a constant stack, one for each row"
        if op.attrs.prologue or op.attrs.epilogue:
            return "it has stages"
        if products(b, op) not in ("float16", "bfloat16"):
            return f"the kernel takes 16-bit floats, not {products(b, op)}"
        x, out, index = self.views(b, op, found)
        if x.shape[0] > MOST:
            return f"it is for up to {MOST} rows, not {x.shape[0]}"
        if x.shape[1] % 8 or x.strides[1] != 1 or x.strides[0] % 8 or x.offset % 8:
            return "16-byte loads need rows of a multiple of 8 elements that begin at such multiples"
        if (out.strides[1] != 1 and out.shape[1] > 1) or (index.strides[0] != 1 and index.shape[0] > 1):
            return "elements of its result, or indices, lie apart"
        return None

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The operator that selects the matrices."""
        found = selection(graph, op)
        return [] if found is None else [found.pick]

    @staticmethod
    def views(b: Builder, op: Op, found: Selection) -> tuple[TensorView, TensorView, TensorView]:
        """The rows (M, K), the result (M, N) and the indices (M)."""
        unit = 2 - found.slot
        return _without(b.source(found.rows), unit), _without(b.result(op.value), unit), b.operand(found.pick.inputs[1])

    def problem(self, b: Builder, op: Op) -> gemv.Problem:
        found = selection(b.graph, op)
        assert found is not None
        x, out, _ = self.views(b, op, found)
        wide = out.dtype == FP32
        return gemv.Problem(1, out.shape[1], x.shape[1], (), map_dtype(x.dtype), wide, selected=x.shape[0])

    def offers(self, problem: gemv.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return kernel_offers(gemv, problem, fitted(gpu))

    def emit(self, b: Builder, op: Op, config: gemv.Config) -> None:
        found = selection(b.graph, op)
        assert found is not None
        problem, stack = self.problem(b, op), b.graph.constant_value(found.pick.inputs[0])
        assert stack is not None
        b.target(op.value)
        x, out, index = (b.made(v) for v in self.views(b, op, found))
        turned = stack if found.slot == 0 else np.swapaxes(stack, 1, 2)
        rows = b.kept.once("selected", [turned], lambda: contiguous(turned))
        weights = b.constant(rows, f"{op.outputs[0].name}.weights")
        launch = gemv.launch(problem, config, b.gpu, x.strides[0], out.strides[0], stack=len(stack))
        operands = {"x": x, "weights": weights, "index": index, "output": out}
        covers = replace(op, src=op.src | found.pick.src)
        b.emit(covers, launch, operands, "SelectedProduct", {}, [x, weights, index], [out])


def _without(view: TensorView, axis: int) -> TensorView:
    """The view without an axis of size 1."""
    kept = [i for i in range(len(view.shape)) if i != axis]
    return view.view(tuple(view.shape[i] for i in kept), tuple(view.strides[i] for i in kept))


def selection(graph: Graph, op: Op) -> Selection | None:
    """What the product selects: ``W[index] @ x`` with columns x (M, K, 1), or ``x @ W[index]`` with rows x (M, 1, K); else None."""
    for slot in (0, 1):
        value, rows = op.inputs[slot], op.inputs[1 - slot]
        pick = None if value is None else graph.op(value)
        if pick is None or value is None or rows is None or not _picks(graph, pick) or graph.sole_user(value) is None:
            continue
        own, picked = graph.type(rows), graph.type(value)
        fixed = own.is_static and picked.is_static and own.rank == 3
        if fixed and own.dims[2 - slot] == 1 and own.dims[0] == picked.dims[0]:
            return Selection(pick, slot, rows)
    return None


def _picks(graph: Graph, op: Op) -> bool:
    """Whether an operator takes matrices from a constant stack by an int64 vector of indices in memory."""
    table, index = op.input(0), op.input(1)
    if op.kind != "Gather" or table is None or index is None or graph.constant_value(table) is None:
        return False
    if graph.constant_value(index) is not None or graph.type(index).dtype != np.int64:
        return False
    return graph.type(table).rank == 3 and graph.type(index).rank == 1 and op.attrs.axis in (0, -3)
