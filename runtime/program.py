"""The program: a compiled network as the runtime takes it. Plain data, no code.

A program is a list of steps over numbered buffers. Constant buffers point at blobs (weights, serialized library models);
other buffers live in an arena at planned offsets, or (offset None) are allocated by the step that writes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optdnn.errors import EngineError, UsageError
from optdnn.ranges import Profile
from optdnn.runtime.file.plan_options import check_plan_options
from optdnn.target_name import FAMILIES, TargetName
from optdnn.types import Array, DType, TensorSpec

Plain = Any
"""JSON-like data: None, bool, int, float, str, lists and string-keyed dicts of these (checked by the format's reader)."""


def known_sizes(shape: Sequence[int | str]) -> tuple[int, ...]:
    """The sizes in a shape that are numbers: all of them, where it is fixed."""
    return tuple(d for d in shape if isinstance(d, int))


def agree(a: Sequence[int | str], b: Sequence[int | str]) -> bool:
    """True if the ranks are equal and so are the dimensions that both know."""
    known = zip(a, b, strict=False)
    return len(a) == len(b) and all(x == y or isinstance(x, str) or isinstance(y, str) for x, y in known)


@dataclass(frozen=True)
class Buffer:
    """One tensor of the program. ``shape`` holds text where a dimension is symbolic; ``blob`` is set for constants."""

    name: str
    dtype: DType
    shape: tuple[int | str, ...] | None
    blob: int | None = None
    offset: int | None = None
    """Byte offset in the arena, for planned buffers (their shape is static)."""

    @property
    def nbytes(self) -> int | None:
        """Size in bytes, or None while a dimension is symbolic."""
        if self.shape is None or not all(isinstance(d, int) for d in self.shape):
            return None
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape, but for symbolic dimensions."""
        return known_sizes(self.shape or ())


@dataclass(frozen=True)
class Step:
    """One action. ``executor`` names who runs it ("reference", "onnxruntime", "openvino", "cuda", or in a GPU's program "host"
    and "copy", see :mod:`optdnn.runtime.steps.host`); ``params`` is its own.

    ``inputs`` and ``outputs`` are buffer numbers (-1 is an absent operand, or an output that nobody wants). ``src`` are the
    ONNX nodes it does.
    """

    executor: str
    params: Mapping[str, Plain]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    src: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slot:
    """When a kernel of a GPU's program may begin: after the step before it in its lane (a stream), and after the earlier steps
    of other lanes in ``after``, in ascending order."""

    lane: int
    after: tuple[int, ...] = ()


LANES = 16
"""Most lanes of a program."""
WRITE_PARTS = ("cuda", "copy")
"""Executors whose steps may write a part of a buffer."""


@dataclass(frozen=True)
class Kernel:
    """How a GPU kernel is made: a template of this version of optdnn and the texts rendered for it, never host code.
    :mod:`optdnn.runtime.cuda.kernel_text.allowed` checks kernels from a file.

    ``template`` is a file of ``runtime/cuda/kernels``; ``generated`` maps names of rendered headers to their text; ``source``
    is the SHA-256 over all text that goes into the compilation (a template that has changed since makes the engine stale).
    ``cubin`` is the blob with the compiled code for ``arch``, or None where only the recipe is kept.
    """

    template: str
    function: str
    arch: str
    generated: Mapping[str, str]
    options: tuple[str, ...]
    source: str
    cubin: int | None = None


@dataclass(frozen=True)
class Source:
    """The model that a program was made from, to make plans for further shapes: data, no code.

    ``model`` is the blob with the serialized ModelProto, in which initializers named in ``weights`` (name -> blob) are declared
    without their elements; ``options`` are those of the build, as plain data: only those of
    :data:`optdnn.runtime.file.plan_options.PLAN_OPTIONS`. ``calibration`` is the blob with the ranges that further plans
    quantize by (JSON text, :mod:`optdnn.calibration.plan_calibration`), where the build had calibration data.
    """

    model: int
    weights: Mapping[str, int]
    options: Mapping[str, Plain]
    calibration: int | None = None


@dataclass(frozen=True)
class Dynamic:
    """The other plans of an engine for a range of shapes, beside the program that holds this.

    ``inputs`` and ``outputs`` are the engine's, symbolic. ``plans`` are the other programs, each for fixed shapes and with the same
    list of blobs. Further plans are made from ``source``, where the engine holds it. ``arena_bytes`` is the largest arena that the
    profiles' minima, optima and maxima need.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    plans: tuple[Program, ...] = ()
    source: Source | None = None
    arena_bytes: int = 0


@dataclass(frozen=True)
class ByValue:
    """Plans for the values of ``inputs`` (names) that only say sizes, axes or places.

    Such an input is read on the host. In the plan for its value, which is made from ``source``, it is a constant.
    """

    inputs: tuple[str, ...]
    source: Source


@dataclass(eq=False)
class Program:
    """A compiled network.

    ``inputs`` and ``outputs`` pair the user's tensors with buffer numbers; ``blobs`` are arrays (C-contiguous; possibly
    memory-mapped); ``requires`` lists requirements of the machine (:mod:`optdnn.runtime.file.requires`)
    ("package:onnxruntime>=1.20", "cpu:avx512_bf16"). ``meta`` holds deterministic facts: options, pass reports, tactic
    decisions, provenance. ``kernels`` is the table that steps of the executor "cuda" point into. ``profiles`` hold the sizes
    of symbolic dimensions that it takes: those inside of any (all, where there are none).
    """

    target: str
    precision: str
    inputs: tuple[tuple[TensorSpec, int], ...]
    outputs: tuple[tuple[TensorSpec, int], ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    blobs: list[Array]
    arena_bytes: int = 0
    requires: tuple[str, ...] = ()
    meta: dict[str, Plain] = field(default_factory=dict)
    kernels: tuple[Kernel, ...] = ()
    profiles: tuple[Profile, ...] = ()
    dynamic: Dynamic | None = None
    """Set where this program, of fixed shapes, is the first plan of an engine for the shapes of ``profiles``."""
    by_value: ByValue | None = None
    """Set where plans for the values of some inputs can be made; this program is right for all values."""
    lanes: tuple[Slot, ...] = ()
    """One for each step where independent steps may run side by side; empty: each step waits for the one before. The steps'
    own order is always one in which they can be run one by one."""
    retained: tuple[int, ...] = ()
    """Buffers outside of the arena, of one step each, that keep their contents from one run of a context to the next. They begin as
    zeros."""
    foreign: bool = field(default=False, repr=False)
    """Read from a file: its networks for CPU libraries are examined before these see them."""
    digests: tuple[tuple[Array, bytes], ...] = field(default=(), repr=False)
    """Arrays of a file that was read, with their SHA-256 as it was verified."""


def target_of(program: Program) -> TargetName:
    """The parsed target of a program, which may be from a file. Raises EngineError where this version knows no such target."""
    try:
        name = TargetName.parse(program.target)
    except UsageError:
        name = TargetName("")
    if name.family not in FAMILIES:
        raise EngineError(
            f"the engine is for target {program.target!r}; this installation runs {', '.join(FAMILIES)}",
            hint="rebuild it for one of these: optdnn build MODEL --target cpu",
        )
    return name


def validate(program: Program) -> None:
    """Check that the program can be run without looking outside of itself; raises EngineError naming the first fault.

    Every number refers to something. Every buffer is written once, before it is read. The types of inputs, outputs and blobs agree
    with their buffers. Planned buffers lie inside the arena. Steps of a GPU's program may write different parts of one buffer (a
    concatenation in place); their executor checks the parts.
    """
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
        _require(not strange, f"a profile gives a range to {strange[:1]}, which is no dimension of an input")
    if program.dynamic is not None:
        _check_plans(program, program.dynamic)
    if program.by_value is not None:
        fixed = {s.name for s in specs if all(isinstance(d, int) for d in s.shape)}
        strange = sorted(set(program.by_value.inputs) - fixed)
        named = not strange and program.by_value.inputs != ()
        _require(named, f"plans by the value of {strange[:1]}, no input of fixed shape")
        _check_source(program, program.by_value.source)


def _check_buffers(program: Program) -> set[int]:
    """Constants agree with their blobs, and planned buffers lie inside the arena. Returns the constants' numbers."""
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
            _require(inside, f"{where} at offset {b.offset} lies outside of the arena of {program.arena_bytes} bytes")
    return constants


def _check_kernels(program: Program) -> None:
    for k, cubin in ((k, kernel.cubin) for k, kernel in enumerate(program.kernels) if kernel.cubin is not None):
        _require(0 <= cubin < len(program.blobs), f"kernel {k} points at blob {cubin}, which does not exist")
        _require(_is_bytes(program.blobs[cubin]), f"the cubin of kernel {k} is not a run of bytes")


def _check_steps(program: Program, written: set[int]) -> None:
    """Every buffer is written once, and before it is read; the outputs of steps are added to ``written``."""
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
    """A retained buffer is an output of one step, read by nobody else, and lies in memory of its own."""
    ports = {i for _, i in (*program.inputs, *program.outputs)}
    _require(list(program.retained) == sorted(set(program.retained)), "the retained buffers are not in ascending order")
    for i in program.retained:
        _require(0 <= i < len(program.buffers), f"buffer {i}, which is retained, does not exist")
        b = program.buffers[i]
        own = b.blob is None and b.offset is None and b.nbytes is not None and i not in ports
        _require(own, f"buffer {i} ({b.name!r}), which is retained, has no memory of its own")
        users = [s.outputs.count(i) - s.inputs.count(i) for s in program.steps if i in (*s.inputs, *s.outputs)]
        _require(users == [1], f"buffer {i} ({b.name!r}), which is retained, is not one step's alone")


def _check_lanes(program: Program) -> None:
    """Each step has a slot, lanes are numbered as they begin, and steps wait for earlier steps of other lanes alone."""
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
    """Each plan is a valid program for fixed shapes that fit the engine's; the source's blobs exist."""
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
                _require(fits and agree(own.shape, spec.shape), f"plan {k}: {what} {own} is no case of {spec}")
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
