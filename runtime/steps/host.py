"""Steps of a GPU's program on the CPU: operators without a GPU kernel, and the copies around them.

A step of the executor "host" runs one operator with its NumPy kernel; its params are like a "reference" step's (``kind`` and
``attrs``). Its results are host buffers outside of the arena, with symbolic shapes if their sizes depend on data.
A step of the executor "copy" moves a dense tensor between a host buffer and a device buffer; its params are

``to``
    "host" or "device".
``offset``
    The beginning of the tensor in the device buffer, in elements; its shape is the host buffer's.

The steps determine the buffers on the host: the outputs of host steps and of copies to the host, and inputs of the network
that only host steps read. Constants are stored wherever they are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.errors import EngineError, OptdnnError, RunError
from optdnn.runtime.program import Plain, Program, Step, agree
from optdnn.runtime.reference.run import run_kernel
from optdnn.runtime.steps.attrs import attrs_from_plain, attrs_to_plain, check_kind
from optdnn.types import Array, DType, dtype_name

HOST, COPY = "host", "copy"
TO_HOST, TO_DEVICE = "host", "device"


def host_step(kind: str, attrs: Any, inputs: Sequence[int], outputs: Sequence[int], src: Sequence[str]) -> Step:
    """The step that runs one operator on the CPU; ``attrs`` in the form of ``run_kernel``."""
    return Step(HOST, {"kind": kind, "attrs": attrs_to_plain(attrs)}, tuple(inputs), tuple(outputs), tuple(src))


def copy_step(to: str, source: int, target: int, offset: int, src: Sequence[str]) -> Step:
    """The step that copies between host and device; ``offset`` counts elements of the device buffer."""
    return Step(COPY, {"to": to, "offset": offset}, (source,), (target,), tuple(src))


def is_copy(step: Step, to: str) -> bool:
    """Whether a step copies in this direction."""
    return step.executor == COPY and step.params.get("to") == to


def host_buffers(program: Program) -> frozenset[int]:
    """The buffers in the CPU's memory (without constants)."""
    written = {i for s in program.steps if s.executor == HOST or is_copy(s, TO_HOST) for i in s.outputs if i >= 0}
    on_device = {i for s in program.steps if s.executor != HOST and not is_copy(s, TO_DEVICE) for i in s.inputs}
    read = {i for s in program.steps if s.executor == HOST or is_copy(s, TO_DEVICE) for i in s.inputs if i >= 0}
    fed = {i for _, i in program.inputs if i in read and i not in on_device}
    return frozenset(written | fed)


@dataclass(frozen=True)
class CopyPlan:
    """A parsed copy step. ``shape`` is the tensor's, ``offset`` its beginning in buffer ``device``, in elements."""

    to: str
    host: int
    device: int
    offset: int
    shape: tuple[int, ...]
    dtype: DType
    label: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class HostPlan:
    """A parsed host step: one operator. ``shapes`` are its results' (None: unknown rank), text for a size that depends on data."""

    kind: str
    attrs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dtypes: tuple[DType, ...]
    shapes: tuple[tuple[int | str, ...] | None, ...]
    label: str

    def run(self, operands: Sequence[Array | None]) -> list[Array]:
        """The results. Raises RunError if the operator cannot be evaluated or its result has another type than declared."""
        results = run_kernel(self.kind, operands, self.attrs, self.dtypes)
        checked = []
        for i, (port, dtype, shape) in enumerate(zip(self.outputs, self.dtypes, self.shapes, strict=True)):
            if port < 0:
                checked.append(np.empty(0))
                continue
            a = results[i]
            if a.dtype != dtype or not (shape is None or agree(shape, a.shape)):
                raise RunError(
                    f"{self.kind} {self.label} gives {dtype_name(a.dtype)}{list(a.shape)} for "
                    f"{dtype_name(dtype)}{list(shape or ())}"
                )
            checked.append(a)
        return checked


def parse_copy(step: Step, program: Program, on_host: frozenset[int]) -> CopyPlan:
    """A copy step, checked: it stays inside of both buffers and copies from one memory to the other. Raises EngineError."""
    p = step.params
    to, offset = p.get("to"), p.get("offset")
    _need(
        set(p) - {"tactic"} == {"to", "offset"} and to in (TO_HOST, TO_DEVICE),
        "has other params than a direction and an offset",
    )
    _need(type(offset) is int and offset >= 0, f"begins at {offset!r}")
    _need(len(step.inputs) == len(step.outputs) == 1 and min(*step.inputs, *step.outputs) >= 0, "is not of one tensor")
    (source,), (target,) = step.inputs, step.outputs
    host, device = (target, source) if to == TO_HOST else (source, target)
    h, d = program.buffers[host], program.buffers[device]
    _need((host in on_host or h.blob is not None) and device not in on_host, "does not go from one memory to the other")
    _need(h.nbytes is not None and d.nbytes is not None, "is of a tensor without a fixed size")
    _need(h.dtype == d.dtype, "changes the element type")
    assert isinstance(offset, int)
    _need(offset * d.dtype.itemsize + (h.nbytes or 0) <= (d.nbytes or 0), "goes beyond its buffer")
    return CopyPlan(str(to), host, device, offset, h.sizes, h.dtype, ", ".join(step.src[:3]) or h.name)


def parse_host(step: Step, program: Program, on_host: frozenset[int]) -> HostPlan:
    """A host step, checked. Raises EngineError for a kind without a NumPy kernel, malformed attributes, or an operand
    in the GPU's memory."""
    kind = step.params.get("kind")
    _need(
        set(step.params) - {"tactic"} == {"kind", "attrs"} and isinstance(kind, str),
        "holds other params than a kind and attributes",
    )
    check_kind(str(kind))
    buffers = program.buffers
    there = all(i < 0 or i in on_host or buffers[i].blob is not None for i in step.inputs)
    _need(there, "reads the GPU's memory")
    outputs = [buffers[i] if i >= 0 else None for i in step.outputs]
    return HostPlan(
        str(kind), attrs_from_plain(step.params["attrs"]), step.inputs, step.outputs,
        tuple(np.dtype(np.float32) if b is None else b.dtype for b in outputs),
        tuple(None if b is None else b.shape for b in outputs), ", ".join(step.src[:3]) or str(kind),
    )  # fmt: skip


def run_host(plan: HostPlan, values: list[Array | None]) -> None:
    """Run a host step on the host's values by buffer; the list has one more entry, which stays None (operand -1).

    Raises RunError naming the nodes.
    """
    try:
        results = plan.run([values[i] for i in plan.inputs])
    except RunError as error:
        raise RunError(f"{plan.label}: {error.message}", hint=error.hint) from error
    except OptdnnError:
        raise
    except Exception as error:
        raise RunError(f"{plan.kind} {plan.label} failed: {type(error).__name__}: {error}") from error
    for i, a in zip(plan.outputs, results, strict=True):
        if i >= 0:
            values[i] = a


def facts(plan: HostPlan | CopyPlan) -> dict[str, Plain]:
    """The facts of a step, for reports."""
    if isinstance(plan, CopyPlan):
        return {"executor": COPY, "to": plan.to, "bytes": plan.nbytes}
    return {"executor": HOST, "library": "numpy", "version": np.__version__, "op": plan.kind}


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise EngineError(f"a step on the host {message}")
