"""Operators that a GPU's program leaves to the CPU: where their values lie, the copies that this takes, and what it costs.

An operator goes to the host because it must (no kernel, or a size that depends on data), or because it is so small that
fetching its operands costs more than computing it where they are: shape arithmetic does not bounce between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from optdnn.dim import Dim
from optdnn.errors import ShapeError
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.pointwise.pointwise import CPP
from optdnn.ops.base import Call, Result
from optdnn.ops.checks import elements
from optdnn.ops.fused import flops, plain_attrs
from optdnn.runtime.host import COPY, HOST, TO_DEVICE, TO_HOST, copy_step, host_step
from optdnn.runtime.program import Buffer, Program
from optdnn.types import TensorType, dtype_name

COPY_US, COPY_BYTES_PER_US = 7.0, 54_000.0
"""One copy between pinned memory and the GPU: its latency, and bytes per µs (measured on an H200, PCIe 5)."""
CUT_US = 10.0
"""One more cut of the CUDA graph: waiting for the GPU, and launching the next graph."""
NUMPY_US, NUMPY_BYTES_PER_US, NUMPY_FLOPS_PER_US = 9.0, 3_000.0, 4_000.0
"""An operator in NumPy: the call, and what it moves and computes per µs on one core."""
CHEAPER = "its operands are on the host, and it costs less there than a copy"


def plain_shape(t: TensorType) -> tuple[int | str, ...] | None:
    """The shape as a buffer has it: text for a size that depends on data."""
    return None if t.shape is None else tuple(str(d) if isinstance(d, Dim) else d for d in t.shape)


def copy_us(nbytes: float) -> float:
    """Estimated µs of one copy between host and device."""
    return COPY_US + nbytes / COPY_BYTES_PER_US


def host_us(graph: Graph, op: Op) -> float:
    """Estimated µs of an operator on its NumPy kernel; a size that depends on data counts as 1."""
    given = [None if v is None else graph.type(v) for v in op.inputs]
    moved = sum(_nbytes(t) for t in (*(t for t in given if t is not None), *(o.type for o in op.outputs)))
    call = Call(op.kind, op.attrs, tuple(given), (None,) * len(given), len(op.outputs), _no_symbol)
    try:
        work = flops(op.definition, call, Result(tuple(o.type for o in op.outputs)))
    except ShapeError:
        work = 0.0
    return NUMPY_US + moved / NUMPY_BYTES_PER_US + work / NUMPY_FLOPS_PER_US


def _no_symbol(hint: str) -> Dim:
    raise ShapeError("a cost needs no new symbol")


def _nbytes(t: TensorType) -> float:
    return float(elements(t)) * t.dtype.itemsize if t.shape is not None else 0.0


@dataclass(frozen=True)
class HostOp:
    """An operator on the CPU. ``why``: the reason; ``forced``: there was no choice."""

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
    made: set[Value] = field(default_factory=set)
    """Values that are computed on the host."""
    _buffer: dict[Value, int] = field(default_factory=dict)

    _come_back: set[int] = field(default_factory=set)
    """Operators with kernels whose results only the host needs, at once or after others of them."""

    def __post_init__(self) -> None:
        self.b.fetch = self._fetch
        graph = self.b.graph
        for op in reversed(graph.order()):
            if op.kind in STRUCTURAL or self.must(op) is not None:
                continue
            users = [u for i in range(len(op.outputs)) for u in graph.users(Value(op.id, i)) if u.kind != "Output"]
            if users and all(u.id in self._come_back or self.must(u) is not None for u in users):
                self._come_back.add(op.id)

    def must(self, op: Op) -> str | None:
        """Why an operator can only run here, as far as its kind and types tell."""
        for value in op.inputs:
            if value is not None and not self.b.graph.type(value).is_static:
                return f"the size of {self.b.graph.output(value).name!r} depends on data ({self.b.graph.type(value)})"
        for out in op.outputs:
            if not out.type.is_static:
                return f"the size of {out.name!r} depends on data ({out.type})"
        if op.kind not in self.runs:
            return f"there is no kernel for {op.kind}"
        types = [out.type for out in op.outputs] + [self.b.graph.type(v) for v in op.inputs if v is not None]
        strange = next((t.dtype for t in types if t.dtype not in CPP), None)
        return None if strange is None else f"there are no kernels for elements of {dtype_name(strange)}"

    def cheaper(self, op: Op) -> bool:
        """Whether an operator that has a kernel is better run here: all it reads is here, and copies would cost more."""
        graph, b = self.b.graph, self.b
        read = {v for v in op.inputs if v is not None and graph.constant_value(v) is None}
        if not read or any(v not in self._buffer or v in b.place for v in read):
            return False
        copies = sum(copy_us(_nbytes(graph.type(v))) for v in read)
        if op.id in self._come_back:
            copies += sum(copy_us(_nbytes(o.type)) for o in op.outputs) + 2 * CUT_US
        return host_us(graph, op) <= copies

    def run(self, op: Op, why: str, *, forced: bool = True) -> None:
        """Add the step that runs an operator here."""
        b = self.b
        inputs = [-1 if v is None else self.buffer(v) for v in op.inputs]
        outputs = []
        for port, out in enumerate(op.outputs):
            value = Value(op.id, port)
            b.buffers.append(Buffer(out.name, out.type.dtype, plain_shape(out.type)))
            outputs.append(len(b.buffers) - 1)
            self._buffer[value] = outputs[-1]
            self.made.add(value)
            if any(u.kind == "Output" for u in b.graph.users(value)):
                b.reserved.pop(value, None)  # the result is here; what the GPU needs of it goes elsewhere
        b.plan.append(host_step(op.kind, plain_attrs(op.definition, op.attrs), inputs, outputs, sorted(op.src)))
        self.ops.append(HostOp(op, why, forced))

    def buffer(self, value: Value) -> int:
        """The host buffer of a value; one that the GPU makes is copied (once)."""
        found = self._buffer.get(value)
        if found is None:
            found = self._buffer[value] = self._copied(value)
        return found

    def _copied(self, value: Value) -> int:
        b, out = self.b, self.b.graph.output(value)
        p = b.operand(value)
        blob = b.buffers[p.buffer].blob
        if blob is not None:  # a constant, or a view of one: known here
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
        """The place of a value on the GPU, copied there from the host; None for a value that is not here."""
        here, b = self._buffer.get(value), self.b
        if here is None:
            return None
        op, t = b.graph.op(value), b.graph.type(value)
        target = b.target(value)
        staged = target if target.dense else b.new(f"{b.graph.output(value).name}.dense", t.dtype, t.static_shape)
        if target.size:
            b.plan.append(copy_step(TO_DEVICE, here, staged.buffer, staged.offset, sorted(op.src)))
        if staged is not target:
            b.move(op, staged, target)
        return target

    def snapshot(self) -> tuple[int, ...]:
        """The state of the builder before an attempt to place; see :meth:`undo`."""
        b = self.b
        return len(b.plan), len(b.place), len(self._buffer)

    def undo(self, before: Sequence[int]) -> None:
        """Take back what was placed and planned since (dictionaries remember the order of insertion; left-over buffers are pruned)."""
        b = self.b
        del b.plan[before[0] :]
        tables: list[dict[Any, Any]] = [b.place, self._buffer]
        for made, n in zip(tables, before[1:], strict=True):
            while len(made) > n:
                made.popitem()


def summary(graph: Graph, host: HostSide, program: Program) -> dict[str, Any]:
    """What runs on the CPU and why, what is copied, and an estimate of the µs that this adds to each run."""
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
