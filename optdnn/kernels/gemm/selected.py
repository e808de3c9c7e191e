"""Rows that each select a matrix of a constant stack: the launch reads the selected matrices in place. A mixture of experts multiplies
each token with the matrices of its few experts (``weights[experts] @ token``)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.strips import contiguous
from optdnn.kernels.builder import Builder, TensorView, has_tf32, map_dtype, products, row_major
from optdnn.kernels.conv.fp32_kernel import LARGEST
from optdnn.kernels.gemm import gemv_kernel as gemv
from optdnn.kernels.gemm import selected_hopper_kernel as hopper
from optdnn.kernels.gemm import selected_kernel as tiles
from optdnn.kernels.launch import Launch
from optdnn.kernels.pointwise.pointwise import shared_copy
from optdnn.kernels.tactic import Offer, ProblemTactic, TakesBefore, costlier, kernel_offers
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted
from optdnn.types import BF16, FP16, FP32, Array

ALIGNED = 8
"""Rows begin at multiples of so many elements."""
MOST = 65535
"""Most rows, or matrices: a grid has no more blocks along y."""


@dataclass(frozen=True)
class Selection:
    """The Gather that takes a matrix for each row, its place among the product's operands, the rows, and how many neighboring results
    read one row."""

    pick: Op
    slot: int
    rows: Value
    times: int


@dataclass(frozen=True)
class Views:
    """The rows (M, K), the result (M, times, N) and the indices (M, times)."""

    x: TensorView
    out: TensorView
    index: TensorView

    def refuse(self) -> str | None:
        """Why no launch writes the result."""
        if self.out.strides[2] != 1 and self.out.shape[2] > 1:
            return "elements of its result lie apart"
        if self.out.strides[0] != self.out.shape[1] * self.out.strides[1] and 1 not in self.out.shape[:2]:
            return "rows of its result lie apart"
        return None

    @property
    def count(self) -> int:
        """Number of the result's rows."""
        return self.out.shape[0] * self.out.shape[1]

    @property
    def pitch(self) -> int:
        """Elements from one row of the result to the next."""
        return self.out.strides[0] if self.out.shape[1] == 1 else self.out.strides[1]


class _Selected(TakesBefore, ProblemTactic):
    """MatMul of rows, each with its own matrix of a constant stack, and the Gather before it."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        found = selection(b.graph, op)
        if found is None:
            return "it has no matrices that indices select from a constant stack, one for each row"
        if op.attrs.prologue or op.attrs.epilogue:
            return "it has stages"
        return _views(b, op).refuse()

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The operator that selects the matrices."""
        found = selection(graph, op)
        return [] if found is None else [found.pick]

    @abstractmethod
    def launch(self, b: Builder, problem: Any, config: Any, v: Views, weights: TensorView) -> Launch:
        """The launch. ``weights``: the stack as (matrices, N, K)."""

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        found, stack = _stack(b, op)
        problem, v = self.problem(b, op), _made(b, op)
        weights = _weights(b, op, stack, found.slot, along=problem.dtype != "float32")
        launch = self.launch(b, problem, config, v, weights)
        operands = {"x": v.x, "weights": weights, "index": v.index, "output": v.out}
        covers = replace(op, src=op.src | found.pick.src)
        b.emit(covers, launch, operands, "SelectedProduct", {}, [v.x, weights, v.index], [v.out])


class SelectedGemv(_Selected):
    """For few rows of 16-bit floats: each reads its matrix."""

    name = "gemv_selected"
    row_invariant: ClassVar[bool] = False
    """Tiles, which are faster with more rows, sum in another order."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        why = super().refuse(b, op)
        if why is not None:
            return why
        if products(b, op) not in ("float16", "bfloat16"):
            return f"the kernel takes 16-bit floats, not {products(b, op)}"
        v = _views(b, op)
        x = v.x
        if v.count > MOST:
            return f"it is for up to {MOST} rows, not {v.count}"
        if x.shape[1] % ALIGNED:
            return f"16-byte loads need rows of a multiple of {ALIGNED} elements, not {x.shape[1]}"
        return None

    def defer(self, b: Builder, op: Op) -> str | None:
        """To tiles, if they are predicted to be faster."""
        other = next((t for t in (SelectedHopper(), SelectedTiles()) if t.refuse(b, op) is None), None)
        return None if other is None else costlier(b, op, self, other)

    def problem(self, b: Builder, op: Op) -> gemv.Problem:
        v = _views(b, op)
        wide = v.out.dtype == FP32
        return gemv.Problem(1, v.out.shape[2], v.x.shape[1], (), map_dtype(v.x.dtype), wide, selected=v.count)

    def offers(self, problem: gemv.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return kernel_offers(gemv, problem, fitted(gpu))

    def launch(self, b: Builder, problem: Any, config: Any, v: Views, weights: TensorView) -> Launch:
        many, times = weights.shape[0], v.out.shape[1]
        return gemv.launch(problem, config, b.gpu, v.x.strides[0], v.pitch, stack=many, times=times)


class SelectedTiles(_Selected):
    """For any number of rows: those that selected one matrix are multiplied in tiles."""

    name = "selected_tiles"

    def refuse(self, b: Builder, op: Op) -> str | None:
        why = super().refuse(b, op)
        if why is not None:
            return why
        _, stack = _stack(b, op)
        x = _views(b, op).x
        if x.dtype not in (FP16, BF16, FP32):
            return f"the kernel takes floats of 16 or 32 bits, not {x.dtype}"
        if len(stack) > MOST:
            return f"it is for up to {MOST} matrices, not {len(stack)}"
        if x.shape[0] * abs(x.strides[0]) >= LARGEST:
            return "its rows have 2^31 elements or more"
        if x.dtype != FP32 and x.shape[1] % ALIGNED:
            return f"16-byte loads need rows of a multiple of {ALIGNED} elements, not {x.shape[1]}"
        return None

    def problem(self, b: Builder, op: Op) -> tiles.Problem:
        (found, stack), v = _stack(b, op), _views(b, op)
        dtype = map_dtype(v.x.dtype) if v.x.dtype != FP32 else "tfloat32" if has_tf32(op) else "float32"
        columns = v.out.shape[2]
        vectors = columns % 8 == 0 and v.out.offset % 8 == 0 and v.pitch % 8 == 0
        return tiles.Problem(v.count, found.times, len(stack), columns, v.x.shape[1], dtype, v.out.dtype, vectors)

    def offers(self, problem: tiles.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return kernel_offers(tiles, problem, fitted(gpu))

    def launch(self, b: Builder, problem: Any, config: Any, v: Views, weights: TensorView) -> Launch:
        many, column, place = weights.strides
        return tiles.launch(problem, config, b.gpu, (many, place, column), v.x.strides[0], v.pitch)


class SelectedHopper(SelectedTiles):
    """Tiles of 16-bit floats on wgmma."""

    name = "selected_sm90"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if b.arch != "sm_90a":
            return f"it needs Hopper's wgmma and TMA (sm_90a), not {b.arch}"
        if products(b, op) not in ("float16", "bfloat16"):
            return f"the kernel takes 16-bit floats, not {products(b, op)}"
        return super().refuse(b, op)

    def offers(self, problem: tiles.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return kernel_offers(hopper, problem, fitted(gpu))

    def launch(self, b: Builder, problem: Any, config: Any, v: Views, weights: TensorView) -> Launch:
        return hopper.launch(problem, config, b.gpu, v.x.strides[0], v.pitch)


def _views(b: Builder, op: Op) -> Views:
    """What the product reads and writes. Rows and indices that lie apart are copied when the views are made: they are small beside the
    matrices."""
    found = selection(b.graph, op)
    assert found is not None
    x, index = b.source(found.rows), b.operand(found.pick.inputs[1])
    row = _views_of(found, x, b.result(op.value), index).x
    if row.strides[1] != 1 or row.strides[0] % ALIGNED or row.offset % ALIGNED:
        x = shared_copy(b, op, x, "rows", row_major(x.shape))
    if not index.dense:
        index = shared_copy(b, op, index, "index", row_major(index.shape))
    return _views_of(found, x, b.result(op.value), index)


def _made(b: Builder, op: Op) -> Views:
    """:func:`_views`, in memory."""
    b.target(op.value)
    v = _views(b, op)
    return Views(b.made(v.x), b.made(v.out), b.made(v.index))


def _views_of(found: Selection, x: TensorView, out: TensorView, index: TensorView) -> Views:
    axis, rows = found.slot - 2, x.shape[0]  # the axis of a row's elements, and of its results
    return Views(
        x.view((rows, x.shape[axis]), (x.strides[0], x.strides[axis])),
        out.view(
            (rows, found.times, out.shape[axis]),
            (out.strides[0], out.strides[1 if found.times > 1 else 0], out.strides[axis]),
        ),
        index.view((rows, found.times), (index.strides[0], index.strides[-1] if found.times > 1 else 1)),
    )


def _stack(b: Builder, op: Op) -> tuple[Selection, Array]:
    found = selection(b.graph, op)
    assert found is not None
    stack = b.graph.constant_value(found.pick.inputs[0])
    assert stack is not None
    return found, stack


def _weights(b: Builder, op: Op, stack: Array, slot: int, *, along: bool) -> TensorView:
    """The stack as a constant, seen as (matrices, N, K). ``along``: elements along K are neighbors in memory, else columns are, which
    tiles in true fp32 copy together."""
    matrices = stack if (slot == 0) == along else np.swapaxes(stack, 1, 2)
    rows = b.kept.once("selected", [matrices], lambda: contiguous(matrices))
    placed = b.constant(rows, f"{op.outputs[0].name}.weights")
    return placed if along else placed.permuted((0, 2, 1))


def selection(graph: Graph, op: Op) -> Selection | None:
    """What the product selects: ``W[index] @ x`` with columns x (M, K, 1), or ``x @ W[index]`` with rows x (M, 1, K); else None. If a row
    selects several matrices, x is (M, 1, K, 1) or (M, 1, 1, K), and the index (M, times)."""
    for slot in (0, 1):
        value, rows = op.inputs[slot], op.inputs[1 - slot]
        pick = None if value is None else graph.op(value)
        if pick is None or value is None or rows is None or not _picks(graph, pick) or graph.sole_user(value) is None:
            continue
        own, picked = graph.type(rows), graph.type(value)
        if not (own.is_static and picked.is_static and own.rank == picked.rank and own.rank in (3, 4)):
            continue
        many = own.rank == 4
        if own.dims[-1 - slot] == 1 and own.dims[0] == picked.dims[0] and (not many or own.dims[1] == 1):
            return Selection(pick, slot, rows, picked.static_shape[1] if many else 1)
    return None


def _picks(graph: Graph, op: Op) -> bool:
    """Whether an operator takes matrices from a constant stack by int64 indices in memory."""
    table, index = op.input(0), op.input(1)
    if op.kind != "Gather" or table is None or index is None or graph.constant_value(table) is None:
        return False
    if graph.constant_value(index) is not None or graph.type(index).dtype != np.int64:
        return False
    return graph.type(table).rank == 3 and graph.type(index).rank in (1, 2) and op.attrs.axis in (0, -3)
