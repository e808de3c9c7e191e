"""Faults in engine files that stay well formed. ``optdnn verify`` must find them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from optdnn.runtime.file.format import read, write
from optdnn.runtime.program import Program, Step

Fault = Callable[[Program], Program]


def damage(engine: Path, fault: Fault, to: Path) -> Path:
    """A copy of an engine file with a fault."""
    write(fault(read(engine, mmap=False)), to)
    return to


def weight(program: Program) -> Program:
    """The largest constant of floats or 8-bit integers has changed bits (and the right digest)."""
    held = {s.params["model"] for s in program.steps if "model" in s.params}
    held |= {k.cubin for k in program.kernels if k.cubin is not None}
    sizes = {
        i: a.nbytes for i, a in enumerate(program.blobs) if (i not in held and a.dtype.kind != "i") or a.itemsize == 1
    }
    largest = max(sizes.keys() - held, key=lambda i: sizes[i])
    blobs = list(program.blobs)
    changed = np.array(blobs[largest])
    flat = changed.reshape(-1).view(np.uint8)
    flat[changed.itemsize - 1 :: 7 * changed.itemsize] ^= 0x80  # the sign of one element in seven
    blobs[largest] = changed
    return _plans(program, blobs=blobs)


def swapped_outputs(program: Program) -> Program:
    """The last step with two outputs has them in the other order."""
    k = max(k for k, s in enumerate(program.steps) if len(s.outputs) > 1)
    step = program.steps[k]
    return _with_step(program, k, replace(step, outputs=step.outputs[::-1]))


def swapped_inputs(kind: str) -> Fault:
    """A step of this kind has its first two operands in the other order."""

    def fault(program: Program) -> Program:
        k, step = _step(program, kind)
        a, b, *rest = step.inputs
        return _with_step(program, k, replace(step, inputs=(b, a, *rest)))

    return fault


def attribute(kind: str, name: str, value: Any) -> Fault:
    """An attribute of a step's operator has another value."""

    def fault(program: Program) -> Program:
        k, step = _step(program, kind)
        params = _copied(step.params)
        attrs = params["op"]["attrs"] if "op" in params else params["attrs"]
        assert attrs.get(name) != value
        attrs[name] = value
        return _with_step(program, k, replace(step, params=params))

    return fault


def constant(old: float, new: float) -> Fault:
    """A number in the attributes of a step (of an activation, for example) has another value."""

    def fault(program: Program) -> Program:
        for k, step in enumerate(program.steps):
            params = _copied(step.params)
            if _replace_number(params.get("op", params), old, new):
                return _with_step(program, k, replace(step, params=params))
        raise AssertionError(f"no step has the number {old}")

    return fault


def view(kind: str) -> Fault:
    """A step reads its first operand from the end of a row on, with reversed last strides."""

    def fault(program: Program) -> Program:
        k, step = _step(program, kind)
        params = _copied(step.params)
        operand, offset, shape, strides = params["reads"][0]
        axis = max((n, i) for i, n in enumerate(shape))[1]
        offset, strides[axis] = offset + (shape[axis] - 1) * strides[axis], -strides[axis]
        params["reads"][0] = [operand, offset, shape, strides]
        return _with_step(program, k, replace(step, params=params))

    return fault


def overlaid(program: Program) -> Program:
    """A buffer has the place of another one that is written while the first is still needed."""
    made = {i: k for k, s in enumerate(program.steps) for i in s.outputs}
    read = {i: max(k for k, s in enumerate(program.steps) if i in s.inputs) for i in _read(program)}
    for i, written in made.items():
        for j, other in made.items():
            a, b = program.buffers[i], program.buffers[j]
            lives = i in read and written < other < read[i] and i not in program.steps[other].inputs
            if lives and None not in (a.offset, b.offset):
                size = max((a.offset or 0) + (b.nbytes or 0), program.arena_bytes)
                buffers = tuple(replace(b, offset=a.offset) if n == j else c for n, c in enumerate(program.buffers))
                return replace(program, buffers=buffers, arena_bytes=size)
    raise AssertionError("no two buffers live at once")


def planned(program: Program) -> Program:
    """Buffers of a stepwise program in an arena, with a separate place for each."""
    outside = {i for _, i in (*program.inputs, *program.outputs)}
    made = {i for s in program.steps for i in s.outputs}
    end, buffers = 0, []
    for i, b in enumerate(program.buffers):
        if i in made - outside and b.nbytes:
            b, end = replace(b, offset=end), end + -(-b.nbytes // 64) * 64
        buffers.append(b)
    return replace(program, buffers=tuple(buffers), arena_bytes=end)


def in_last_plan(fault: Fault) -> Fault:
    """Only the last of an engine's plans has the fault."""

    def wrapped(program: Program) -> Program:
        assert program.dynamic is not None
        *plans, last = program.dynamic.plans
        return replace(program, dynamic=replace(program.dynamic, plans=(*plans, fault(last))))

    return wrapped


def model_of_a_library(old: bytes, new: bytes) -> Fault:
    """The ONNX model of a CPU library has other bytes."""

    def fault(program: Program) -> Program:
        number = next(s.params["model"] for s in program.steps if "model" in s.params)
        data = program.blobs[number].tobytes()
        assert data.count(old) == 1
        assert len(old) == len(new)
        blobs = list(program.blobs)
        blobs[number] = np.frombuffer(data.replace(old, new), np.uint8)
        return _plans(program, blobs=blobs)

    return fault


def _plans(program: Program, blobs: list[Any]) -> Program:
    changed = replace(program, blobs=blobs)
    if program.dynamic is not None:
        plans = tuple(replace(p, blobs=blobs) for p in program.dynamic.plans)
        changed = replace(changed, dynamic=replace(program.dynamic, plans=plans))
    return changed


def _with_step(program: Program, k: int, step: Step) -> Program:
    return replace(program, steps=(*program.steps[:k], step, *program.steps[k + 1 :]))


def _step(program: Program, kind: str) -> tuple[int, Step]:
    found = [(k, s) for k, s in enumerate(program.steps) if s.params.get("op", s.params).get("kind") == kind]
    assert found, [s.params.get("op", s.params).get("kind") for s in program.steps]
    return found[-1]


def _read(program: Program) -> Iterator[int]:
    return iter({i for s in program.steps for i in s.inputs if i >= 0 and program.buffers[i].blob is None})


def _copied(value: Any) -> Any:
    if hasattr(value, "items"):
        return {k: _copied(v) for k, v in value.items()}
    return [_copied(v) for v in value] if isinstance(value, (list, tuple)) else value


def _replace_number(value: Any, old: float, new: float) -> bool:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, v in list(items):
        if isinstance(v, float) and abs(v - old) < 1e-6:
            value[key] = new
            return True
        if _replace_number(v, old, new):
            return True
    return False
