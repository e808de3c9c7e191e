"""The checks of a program: it never accesses anything outside of itself, and its kernels have names that builds write."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from optdnn.errors import EngineError
from optdnn.runtime.file.plan_options import check_plan_options
from optdnn.runtime.program import LANES, WRITE_PARTS, Buffer, Dynamic, Kernel, Program, Ranks, Source, Step, agree
from optdnn.types import Array, TensorSpec

GENERATED = "generated.cuh"
"""The only rendered header of a kernel."""
OPTIONS = frozenset(("--std=c++17", "--use_fast_math", "--fmad=false", "-DDTYPE_BF16", "-DNARROW", "-DWIDE"))
"""The compiler options of kernels in engines. None of them names a file."""
COLLECTIVES = ("AllReduce", "AllGather")
"""Kinds of steps that all ranks run together."""
_TEMPLATE = re.compile(r"[a-z][a-z0-9_]*\.cu", re.ASCII)
_FUNCTION = re.compile(r"[A-Za-z]\w{0,99}", re.ASCII)
_ARCH = re.compile(r"sm_[1-9]\d{1,2}[af]?", re.ASCII)


def validate(program: Program) -> None:
    """Check that the program can be run without access outside of itself; raises EngineError naming the first fault.

    Every number refers to something. Every buffer is written once, before it is read. The types of inputs, outputs and blobs agree
    with their buffers. Planned buffers are inside the arena. Steps of a GPU's program may write different parts of one buffer (a
    concatenation in place); their executor checks the parts.
    """
    _check_meta(program)
    written = _check_buffers(program)
    _check_ports("input", program.inputs, program.buffers)
    _check_ports("output", program.outputs, program.buffers)
    for spec, i in program.inputs:
        _require(i not in written, f"input {spec.name!r} shares buffer {i} with a constant or another input")
        written.add(i)
    _check_kernels(program)
    _check_steps(program, written)
    for spec, i in program.outputs:
        _require(i in written, f"nothing writes output {spec.name!r}")
    _check_lanes(program)
    _check_retained(program)
    specs = [spec for spec, _ in program.inputs] if program.dynamic is None else program.dynamic.inputs
    symbols = {d for spec in specs for d in spec.shape if isinstance(d, str)}
    for profile in program.profiles:
        strange = sorted(profile.keys() - symbols)
        _require(not strange, f"a profile gives a range to {strange[:1]}, which is not a dimension of an input")
    if program.dynamic is not None:
        _check_plans(program, program.dynamic)
    if program.ranks is not None:
        _check_ranks(program, program.ranks)
    if program.by_value is not None:
        fixed = {s.name for s in specs if all(isinstance(d, int) for d in s.shape)}
        strange = sorted(set(program.by_value.inputs) - fixed)
        named = not strange and program.by_value.inputs != ()
        _require(named, f"plans by the value of {strange[:1]}, no input of fixed shape")
        _check_source(program, program.by_value.source)


META: Mapping[str, type] = {
    **dict.fromkeys(("auto", "bounds", "first_run", "gpu", "host", "kernels", "model", "operators", "options"), dict),
    **dict.fromkeys(("precision", "sizes", "streams", "tactic"), dict),
    **dict.fromkeys(("passes", "tactics"), list),
}
"""Entry of ``meta`` that this package reads -> its type, if the entry is present. Its contents are shown, not relied on."""


def _check_meta(program: Program) -> None:
    for name, kind in META.items():
        found = program.meta.get(name)
        _require(found is None or isinstance(found, kind), f"the entry {name!r} of its account is no {kind.__name__}")
    sizes = program.meta.get("sizes") or {}
    _require(all(type(n) is int and n >= 0 for n in sizes.values()), "its record has an invalid size")


def _check_buffers(program: Program) -> set[int]:
    """Check that constants agree with their blobs, and that planned buffers are inside the arena. Returns the constants'
    numbers."""
    constants = set()
    for i, b in enumerate(program.buffers):
        where = f"buffer {i} ({b.name!r})"
        if b.blob is not None:
            _require(0 <= b.blob < len(program.blobs), f"{where} points at blob {b.blob}, which does not exist")
            blob = program.blobs[b.blob]
            fits = blob.dtype == b.dtype and blob.shape == b.shape
            _require(fits, f"{where} is {b.dtype}{b.shape}, its blob {blob.dtype}{blob.shape}")
            _require(b.offset is None, f"{where} is both constant and in the arena")
            constants.add(i)
        if b.offset is not None:
            size = b.nbytes
            _require(size is not None, f"{where} is in the arena but its shape is not static")
            inside = size is not None and 0 <= b.offset <= program.arena_bytes - size
            _require(inside, f"{where} at offset {b.offset} is outside of the arena of {program.arena_bytes} bytes")
    return constants


def _check_kernels(program: Program) -> None:
    for k, cubin in ((k, kernel.cubin) for k, kernel in enumerate(program.kernels) if kernel.cubin is not None):
        _require(0 <= cubin < len(program.blobs), f"kernel {k} points at blob {cubin}, which does not exist")
        _require(_is_bytes(program.blobs[cubin]), f"the cubin of kernel {k} is not a run of bytes")


def _check_steps(program: Program, written: set[int]) -> None:
    """Check that every buffer is written once, and before it is read; the outputs of steps are added to ``written``."""
    n = len(program.buffers)
    parts: set[int] = set()
    for k, step in enumerate(program.steps):
        for i in step.inputs:
            _require(-1 <= i < n, f"step {k} reads buffer {i}, which does not exist")
            _require(i < 0 or i in written, f"step {k} reads buffer {i} before it is written")
        for i in step.outputs:
            _require(-1 <= i < n, f"step {k} writes buffer {i}, which does not exist")
            if i >= 0:
                shared = step.executor in WRITE_PARTS and i in parts
                _require(shared or i not in written, f"step {k} writes buffer {i}, which is written already")
                written.add(i)
                if step.executor in WRITE_PARTS:
                    parts.add(i)


def _check_retained(program: Program) -> None:
    """Check retained buffers: each is an output of one step, or of the steps of one run, no other step reads it, and it has its own
    memory."""
    ports = {i for _, i in (*program.inputs, *program.outputs)}
    _require(list(program.retained) == sorted(set(program.retained)), "the retained buffers are not in ascending order")
    for i in program.retained:
        _require(0 <= i < len(program.buffers), f"buffer {i}, which is retained, does not exist")
        b = program.buffers[i]
        own = b.blob is None and b.offset is None and b.nbytes is not None and i not in ports
        _require(own, f"buffer {i} ({b.name!r}), which is retained, has no memory of its own")
        users = [s for s in program.steps if i in (*s.inputs, *s.outputs)]
        written = all(s.outputs.count(i) == 1 and i not in s.inputs for s in users)
        runs = {_run_of(s) for s in users}
        alone = len(users) == 1 or (len(runs) == 1 and None not in runs)
        _require(written and alone, f"buffer {i} ({b.name!r}), which is retained, is not one step's alone")


def _run_of(step: Step) -> int | None:
    """The run that a step's launch is a part of (:class:`optdnn.runtime.cuda.launches.plan.RunPart`), or None."""
    part = step.params.get("launch", {}).get("part")
    return int(part[0]) if part else None


def _check_lanes(program: Program) -> None:
    """Check that each step has a slot, that lanes are numbered as they begin, and that steps wait only for earlier steps of other
    lanes."""
    lanes, known = program.lanes, 0
    _require(len(lanes) in (0, len(program.steps)), f"{len(lanes)} slots in lanes for {len(program.steps)} steps")
    for k, slot in enumerate(lanes):
        _require(0 <= slot.lane <= min(known, LANES - 1), f"step {k} is in lane {slot.lane}, which nothing begins")
        known = max(known, slot.lane + 1)
        ascending = all(a < b for a, b in zip(slot.after, slot.after[1:], strict=False))
        earlier = all(0 <= d < k for d in slot.after)
        _require(
            ascending and earlier, f"step {k} waits for steps {list(slot.after)}, which are not earlier ones in order"
        )
        own = [d for d in slot.after if lanes[d].lane == slot.lane]
        _require(not own, f"step {k} waits for step {own[:1]} of its own lane, as it does anyway")
    _require(known != 1, "all steps are in one lane: that needs no slots")


def _check_plans(program: Program, dynamic: Dynamic) -> None:
    """Check that each plan is a valid program for fixed shapes that fit the engine's, and that the source's blobs exist."""
    _require(program.profiles != (), "an engine of several plans has no profiles")
    for k, plan in enumerate((program, *dynamic.plans)):
        for what, specs, ports in (
            ("input", dynamic.inputs, plan.inputs),
            ("output", dynamic.outputs, plan.outputs),
        ):
            names = [(s.name, s.dtype) for s in specs]
            _require(names == [(s.name, s.dtype) for s, _ in ports], f"plan {k} has other {what}s than the engine")
            for spec, (own, _) in zip(specs, ports, strict=True):
                fits = what == "output" or all(isinstance(d, int) for d in own.shape)  # an output's may depend on data
                _require(fits and agree(own.shape, spec.shape), f"plan {k}: {what} {own} does not fit {spec}")
    for k, plan in enumerate(dynamic.plans, 1):
        nested = (
            plan.dynamic is not None
            or plan.by_value is not None
            or plan.profiles != ()
            or plan.target != program.target
        )
        _require(not nested and plan.blobs is program.blobs, f"plan {k} is not one of this engine")
        validate(plan)
    if dynamic.source is not None:
        _check_source(program, dynamic.source)


WORLD_LIMIT = 64
"""The most ranks of an engine."""


def _check_ranks(program: Program, ranks: Ranks) -> None:
    """Check that each rank is a valid program, with the same ports and the same collectives in the same order."""
    _require(2 <= ranks.world <= WORLD_LIMIT, f"the engine has {ranks.world} ranks")
    _require(program.dynamic is None and program.by_value is None, "an engine of several ranks has several plans")
    for what, ports, axes in (("input", program.inputs, ranks.inputs), ("output", program.outputs, ranks.outputs)):
        _require(len(axes) == len(ports), f"{len(axes)} axes are given for {len(ports)} {what}s")
        for (spec, _), axis in zip(ports, axes, strict=True):
            split = axis < 0 or (axis < len(spec.shape) and isinstance(spec.shape[axis], int))
            _require(split, f"{what} {spec} cannot be split along axis {axis}")
    own = collectives(program)
    _require(all(c.world == ranks.world for c in own), "a collective is of another number of ranks than the engine")
    specs = [[spec for spec, _ in side] for side in (program.inputs, program.outputs)]
    for k, one in enumerate(ranks.programs, 1):
        nested = any(x is not None for x in (one.dynamic, one.by_value, one.ranks)) or one.target != program.target
        _require(not nested and one.blobs is program.blobs, f"rank {k} is not one of this engine")
        same = [[spec for spec, _ in side] for side in (one.inputs, one.outputs)] == specs
        _require(same, f"rank {k} has other inputs or outputs than rank 0")
        _require(collectives(one) == own, f"rank {k} has other collectives than rank 0")
        validate(one)


class CollectiveStep(NamedTuple):
    """A collective of a program: its kind, its number of ranks, and the shapes of its operands."""

    kind: str
    world: int
    shapes: tuple[Any, ...]


def collectives(program: Program) -> list[CollectiveStep]:
    """The collectives of a program in the order of its steps. Raises EngineError for an impossible number of ranks."""
    found: list[CollectiveStep] = []
    for step in program.steps:
        op = step.params.get("op", step.params)
        kind = op.get("kind") if isinstance(op, Mapping) else None
        if kind in COLLECTIVES:
            attrs = op.get("attrs")
            world = attrs.get("world") if isinstance(attrs, Mapping) else None
            _require(type(world) is int and 2 <= world <= WORLD_LIMIT, f"a collective is of {world!r} ranks")
            shapes = tuple(program.buffers[i].shape for i in step.inputs if i >= 0)
            found.append(CollectiveStep(str(kind), int(world or 0), shapes))
    return found


def _check_source(program: Program, s: Source) -> None:
    n = len(program.blobs)
    texts = [s.model, *([] if s.calibration is None else [s.calibration])]
    _require(all(0 <= b < n for b in (*texts, *s.weights.values())), "the model in the engine names a missing blob")
    _require(all(_is_bytes(program.blobs[b]) for b in texts), "the model in the engine is not a run of bytes")
    check_plan_options(s.options, program.target)


def _check_ports(what: str, ports: Sequence[tuple[TensorSpec, int]], buffers: Sequence[Buffer]) -> None:
    names = [spec.name for spec, _ in ports]
    _require(len(set(names)) == len(names), f"two {what}s have one name")
    for spec, i in ports:
        _require(0 <= i < len(buffers), f"{what} {spec.name!r} is buffer {i}, which does not exist")
        b = buffers[i]
        fits = b.dtype == spec.dtype and (b.shape is None or agree(b.shape, spec.shape))
        _require(fits, f"{what} {spec} and its buffer, {b.dtype}{b.shape}, have different types")


def _is_bytes(blob: Array) -> bool:
    return blob.dtype == np.uint8 and blob.ndim == 1


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise EngineError(message)


def check_names(kernel: Kernel) -> Kernel:
    """The kernel, after a check that builds could have written its names and options. Raises EngineError."""
    if not _TEMPLATE.fullmatch(kernel.template):
        raise EngineError(f"a kernel's template is {kernel.template[:80]!r}, which names no optdnn template")
    if not _FUNCTION.fullmatch(kernel.function):
        raise EngineError(f"a kernel's function is {kernel.function[:80]!r}, which is not a function name")
    where = f"the kernel {kernel.function}"
    if not _ARCH.fullmatch(kernel.arch):
        raise EngineError(f"{where} is for {kernel.arch[:80]!r}, which is not an architecture")
    if strange := sorted(kernel.generated.keys() - {GENERATED}):
        raise EngineError(f"{where} brings a source called {strange[0][:80]!r}; kernels have none but {GENERATED}")
    if strange := [o for o in kernel.options if o not in OPTIONS]:
        raise EngineError(
            f"{where} is to be compiled with {strange[0][:80]!r}, which is not an option of optdnn's kernels",
            hint="rebuild the engine with this version of optdnn",
        )
    if len(set(kernel.options)) != len(kernel.options):
        raise EngineError(f"{where} is to be compiled with an option given twice")
    return kernel
