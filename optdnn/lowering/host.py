"""The host's part of a GPU program: operators on the CPU, the places of their values, copies, and an estimate of the cost.

An operator runs on the host if it must (no kernel, or a size that depends on data), or if its operands are there and
copying them costs more than computing it. So shape arithmetic does not move between the two sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from optdnn.dim import INF, Dim, DimLike
from optdnn.errors import ShapeError
from optdnn.ir.body import GraphBody, bodies
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.index import suppression
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.lowering.steps import plain_shape
from optdnn.ops.base import Call, Result
from optdnn.ops.checks import elements, extent
from optdnn.ops.fused import flops, plain_attrs
from optdnn.runtime.program import Buffer, Program
from optdnn.runtime.steps.host import COPY, HOST, TO_DEVICE, TO_HOST, copy_step, host_step
from optdnn.types import TensorType, dtype_name

COPY_US, COPY_BYTES_PER_US = 7.0, 54_000.0
"""A copy between pinned memory and the GPU: latency in µs, and bytes per µs (measured on an H200, PCIe 5)."""
CUT_US = 10.0
"""A cut of the CUDA graph, in µs: wait for the GPU and launch the next graph."""
NUMPY_US, NUMPY_BYTES_PER_US, NUMPY_FLOPS_PER_US = 9.0, 3_000.0, 4_000.0
"""An operator in NumPy on one core: µs per call, bytes per µs, operations per µs."""
MOST_TRIPS = 10_000
"""Iterations that an estimate counts at most: a condition ends a Loop that names a larger number."""
LARGE_US = 100.0
"""A larger operator is not computed on the host for the sake of others: its operands are needed on the GPU."""
CHEAPER = "its operands are on the host, and it costs less there than a copy"


def copy_us(nbytes: float) -> float:
    """Estimated µs of one copy between host and device."""
    return COPY_US + nbytes / COPY_BYTES_PER_US


def host_us(graph: Graph, op: Op) -> float:
    """Estimated µs of an operator on its NumPy kernel. A size that depends on data counts as 1."""
    if _is_view(graph, op):
        return NUMPY_US
    if inside := bodies(op):
        return NUMPY_US + _trips(graph, op) * max(map(_body_us, inside))
    given = [None if v is None else graph.type(v) for v in op.inputs]
    moved = sum(_nbytes(t) for t in (*(t for t in given if t is not None), *(o.type for o in op.outputs)))
    known = tuple(None if v is None else graph.known(v) for v in op.inputs)
    call = Call(op.kind, op.attrs, tuple(given), known, len(op.outputs), _no_symbol)
    try:
        work = flops(op.definition, call, Result(tuple(o.type for o in op.outputs)))
    except ShapeError:
        work = 0.0
    return NUMPY_US + moved / NUMPY_BYTES_PER_US + work / NUMPY_FLOPS_PER_US


def _body_us(body: GraphBody) -> float:
    return sum(host_us(body.graph, op) for op in body.graph.ops() if op.kind not in STRUCTURAL)


def _trips(graph: Graph, op: Op) -> float:
    """How often a body runs; 1 if that depends on data."""
    if op.kind == "Scan":
        scanned = graph.type(op.inputs[op.attrs.states])
        return 1 if scanned.shape is None else extent(scanned.shape[op.attrs.scan_input_axes[0]])
    known = graph.known(op.input(0)) if op.kind == "Loop" else None
    return 1 if known is None or known.dtype == object else min(max(int(known.reshape(-1)[0]), 0), MOST_TRIPS)


def _is_view(graph: Graph, op: Op) -> bool:
    """Whether NumPy returns its operand's memory: reshapes, and the first rows."""
    if op.kind != "Slice":
        return op.kind in ("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
    starts, axes, steps = graph.known(op.input(1)), graph.known(op.input(3)), graph.known(op.input(4))
    first = starts is not None and starts.tolist() == [0] and axes is not None and axes.tolist() == [0]
    return first and (op.input(4) is None or (steps is not None and steps.tolist() == [1]))


def _no_symbol(hint: str, most: DimLike = INF) -> Dim:
    raise ShapeError("a cost estimate cannot create a symbol")


def _nbytes(t: TensorType) -> float:
    return float(elements(t)) * t.dtype.itemsize if t.shape is not None else 0.0


@dataclass(frozen=True)
class HostOp:
    """An operator on the CPU. ``why``: the reason; ``forced``: the GPU cannot run it."""

    op: Op
    why: str
    forced: bool


@dataclass
class HostSide:
    """The CPU's part of a program under construction."""

    b: Builder
    runs: frozenset[str]
    """Kinds that have kernels, or are views."""
    ops: list[HostOp] = field(default_factory=list)
    computed: set[Value] = field(default_factory=set)
    """Values that are computed on the host."""
    _buffer: dict[Value, int] = field(default_factory=dict)
    """Value -> its host buffer."""
    _for_host: set[int] = field(default_factory=set)
    """Operators with kernels, not too large for the host, whose results only it needs, directly or through others of this set."""

    def __post_init__(self) -> None:
        self.b.fetch = self._fetch
        graph = self.b.graph
        for op in reversed(graph.order()):
            if op.kind in STRUCTURAL or self.must(op) is not None or host_us(graph, op) > LARGE_US:
                continue
            users = [u for v in op.values for u in graph.users(v) if u.kind != "Output"]
            if users and all(u.id in self._for_host or self.must(u) is not None for u in users):
                self._for_host.add(op.id)

    def must(self, op: Op) -> str | None:
        """Why an operator can only run on the host, by its kind and types; None if it may have a kernel."""
        for value in op.inputs:
            if value is not None and not self.b.graph.type(value).is_static:
                return f"the size of {self.b.graph.output(value).name!r} depends on data ({self.b.graph.type(value)})"
        for out in op.outputs:
            if not out.type.is_static:
                return f"the size of {out.name!r} depends on data ({out.type})"
        if op.kind not in self.runs:
            return f"there is no kernel for {op.kind}"
        types = [out.type for out in op.outputs] + [self.b.graph.type(v) for v in op.inputs if v is not None]
        unknown = next((t.dtype for t in types if t.dtype not in CPP), None)
        return None if unknown is None else f"there are no kernels for elements of {dtype_name(unknown)}"

    def cheaper(self, op: Op) -> bool:
        """Whether an operator with a kernel is cheaper on the host: all its operands are there, and copies would cost more."""
        graph, b = self.b.graph, self.b
        read = {v for v in op.inputs if v is not None and graph.constant_value(v) is None}
        if not read or any(v not in self._buffer or v in b.place for v in read):
            return False
        copies = sum(copy_us(_nbytes(graph.type(v))) for v in read)
        if op.id in self._for_host:
            copies += sum(copy_us(_nbytes(o.type)) for o in op.outputs) + 2 * CUT_US
        return host_us(graph, op) <= copies

    def run(self, op: Op, why: str, *, forced: bool = True) -> None:
        """Add a step that runs an operator on the host."""
        b = self.b
        inputs = [-1 if v is None else self.buffer(v) for v in op.inputs]
        outputs = []
        for port, out in enumerate(op.outputs):
            value = Value(op.id, port)
            b.buffers.append(Buffer(out.name, out.type.dtype, plain_shape(out.type)))
            outputs.append(len(b.buffers) - 1)
            self._buffer[value] = outputs[-1]
            self.computed.add(value)
            if any(u.kind == "Output" for u in b.graph.users(value)):
                b.reserved.pop(value, None)  # the output is a host buffer; a copy on the GPU needs another place
        b.plan.append(host_step(op.kind, plain_attrs(op.definition, op.attrs), inputs, outputs, sorted(op.src)))
        if suppression.compares_boxes(op):
            b.kernel(suppression.launch(b.arch))  # the runtime finds it by its name
        self.ops.append(HostOp(op, why, forced))

    def buffer(self, value: Value) -> int:
        """The host buffer of a value. A value from the GPU is copied once."""
        if value not in self._buffer:
            self._buffer[value] = self._copied(value)
        return self._buffer[value]

    def _copied(self, value: Value) -> int:
        """A new host buffer, and the step that copies the value there; a constant needs no step."""
        b, out = self.b, self.b.graph.output(value)
        p = b.operand(value)
        blob = b.buffers[p.buffer].blob
        if blob is not None:  # a constant, or a view of one
            flat = b.blobs[blob].reshape(-1)[p.offset :]
            whole = p.dense and not p.offset and b.buffers[p.buffer].shape == p.shape
            strides = [s * flat.itemsize for s in p.strides]
            return p.buffer if whole else b.constant(np.array(as_strided(flat, p.shape, strides)), out.name).buffer
        if not p.dense:
            dense = b.new(f"{out.name}.dense", p.dtype, p.shape)
            b.move(b.graph.op(value), p, dense)
            p = dense
        b.buffers.append(Buffer(f"{out.name}.host", p.dtype, p.shape))
        here = len(b.buffers) - 1
        b.plan.append(copy_step(TO_HOST, p.buffer, here, p.offset, sorted(b.graph.op(value).src)))
        return here

    def _fetch(self, value: Value) -> TensorView | None:
        """Copy a value from the host to the GPU, and return its place there; None if the host does not have it."""
        here, b = self._buffer.get(value), self.b
        if here is None:
            return None
        op, t = b.graph.op(value), b.graph.type(value)
        if 0 in t.static_shape:
            return b.place_empty(value)
        target = b.target(value)
        staged = target if target.dense else b.new(f"{b.graph.output(value).name}.dense", t.dtype, t.static_shape)
        b.plan.append(copy_step(TO_DEVICE, here, staged.buffer, staged.offset, sorted(op.src)))
        if staged is not target:
            b.move(op, staged, target)
        return target

    def snapshot(self) -> tuple[int, ...]:
        """The state before an operator is planned, for :meth:`undo`."""
        b = self.b
        return len(b.plan), len(b.place), len(self._buffer)

    def undo(self, before: Sequence[int]) -> None:
        """Undo everything that was placed and planned since the snapshot ``before``. Left-over buffers are removed later."""
        b = self.b
        del b.plan[before[0] :]
        tables: list[dict[Any, Any]] = [b.place, self._buffer]
        for entries, n in zip(tables, before[1:], strict=True):
            while len(entries) > n:
                entries.popitem()  # the newest entry


def summary(graph: Graph, host: HostSide, program: Program) -> dict[str, Any]:
    """The operators on the CPU with reasons, the copies, and the estimated µs that they add to each run."""
    operators: list[dict[str, Any]] = [
        {"nodes": sorted(h.op.src) or [h.op.name], "kind": h.op.kind, "why": h.why, "forced": h.forced,
         "us": round(host_us(graph, h.op), 1)} for h in host.ops
    ]  # fmt: skip
    copies: list[dict[str, Any]] = []
    sides = [step.executor == HOST for step in program.steps]
    cuts = sum(int(a != b) for a, b in pairwise(sides))
    for step in program.steps:
        if step.executor == COPY:
            b = program.buffers[step.outputs[0] if step.params["to"] == TO_HOST else step.inputs[0]]
            nbytes = b.nbytes or 0
            copies.append({"to": step.params["to"], "tensor": b.name, "bytes": nbytes, "us": round(copy_us(nbytes), 1)})
    kinds = len(graph)
    total = sum(o["us"] for o in operators) + sum(c["us"] for c in copies) + cuts * CUT_US
    return {
        "operators": operators, "copies": copies, "cuts": cuts, "estimated_us": round(total, 1),
        "coverage": {"operators": kinds, "device": kinds - len(operators), "host": len(operators)},
    }  # fmt: skip
