"""The program: a compiled network in the runtime's form. Plain data, no code.

A program is a list of steps over numbered buffers. Constant buffers point at blobs (weights, serialized library models);
other buffers live in an arena at planned offsets, or (offset None) are allocated by the step that writes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optdnn.errors import EngineError, UsageError
from optdnn.ranges import Profile
from optdnn.runtime.mapped import MappedFile
from optdnn.target_name import FAMILIES, TargetName
from optdnn.types import Array, DType, TensorSpec

Plain = Any
"""JSON-like data: None, bool, int, float, str, lists and string-keyed dicts of these (checked by the format's reader)."""


def known_sizes(shape: Sequence[int | str]) -> tuple[int, ...]:
    """The sizes in a shape that are numbers: all of them, if it is fixed."""
    return tuple(d for d in shape if isinstance(d, int))


def agree(a: Sequence[int | str], b: Sequence[int | str]) -> bool:
    """Whether the ranks are equal, and all dimensions that are known in both."""
    known = zip(a, b, strict=False)
    return len(a) == len(b) and all(x == y or isinstance(x, str) or isinstance(y, str) for x, y in known)


@dataclass(frozen=True)
class Buffer:
    """One tensor of the program. ``shape`` holds text for symbolic dimensions; ``blob`` is set for constants."""

    name: str
    dtype: DType
    shape: tuple[int | str, ...] | None
    blob: int | None = None
    offset: int | None = None
    """Byte offset in the arena, for planned buffers (their shape is static)."""

    @property
    def nbytes(self) -> int | None:
        """Size in bytes, or None if a dimension is symbolic."""
        if self.shape is None or not all(isinstance(d, int) for d in self.shape):
            return None
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape, without symbolic dimensions."""
        return known_sizes(self.shape or ())


@dataclass(frozen=True)
class Step:
    """One action. ``executor`` names its executor ("reference", "onnxruntime", "openvino", "cuda", or in a GPU's program "host"
    and "copy", see :mod:`optdnn.runtime.steps.host`); ``params`` are the executor's own.

    ``inputs`` and ``outputs`` are buffer numbers (-1 is an absent operand, or an unused output). ``src`` are the
    step's ONNX nodes.
    """

    executor: str
    params: Mapping[str, Plain]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    src: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slot:
    """When a kernel of a GPU's program may begin: after the previous step in its lane (a stream), and after the earlier steps
    of other lanes in ``after``, in ascending order."""

    lane: int
    after: tuple[int, ...] = ()


LANES = 16
"""The most lanes of a program."""
WRITE_PARTS = ("cuda", "copy")
"""Executors whose steps may write a part of a buffer."""


@dataclass(frozen=True)
class Kernel:
    """The recipe of a GPU kernel: a template of this version of optdnn and the texts rendered for it, never host code.
    :mod:`optdnn.runtime.cuda.kernel_text.allowed` checks kernels from a file.

    ``template`` is a file of ``runtime/cuda/kernels``; ``generated`` maps names of rendered headers to their text; ``source``
    is the SHA-256 over all text that goes into the compilation (a template that has changed since makes the engine stale).
    ``cubin`` is the blob with the compiled code for ``arch``, or None if only the recipe is kept.
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

    ``model`` is the blob with the serialized ModelProto, which declares the initializers in ``weights`` (name -> blob)
    without their elements; ``options`` are the build's options, as plain data: only those of
    :data:`optdnn.runtime.file.plan_options.PLAN_OPTIONS`. ``calibration`` is the blob with the ranges that further plans use
    to quantize (JSON text, :mod:`optdnn.calibration.plan_calibration`), if the build had calibration data.
    """

    model: int
    weights: Mapping[str, int]
    options: Mapping[str, Plain]
    calibration: int | None = None


@dataclass(frozen=True)
class Dynamic:
    """The other plans of an engine for a range of shapes, in addition to the program that contains this object.

    ``inputs`` and ``outputs`` are the engine's, symbolic. ``plans`` are the other programs, each for fixed shapes and with the same
    list of blobs. Further plans are made from ``source``, if the engine has it. ``arena_bytes`` is the largest arena that the
    profiles' minima, optima and maxima need.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    plans: tuple[Program, ...] = ()
    source: Source | None = None
    arena_bytes: int = 0


@dataclass(frozen=True)
class ByValue:
    """Plans for the values of shape inputs (``inputs``: their names): sizes, axes or positions.

    Such an input is read on the host. In the plan for its value, which is made from ``source``, it is a constant.
    """

    inputs: tuple[str, ...]
    source: Source


@dataclass(frozen=True)
class Ranks:
    """The other ranks of a tensor-parallel engine, besides rank 0, whose program contains this object.

    ``programs`` are the programs of the ranks from 1 on, over the same list of blobs. ``inputs`` and ``outputs`` are axes, one for
    each port of the network: the ranks hold equal parts of it along this axis, in rank order (-1: each rank holds all of it).
    """

    programs: tuple[Program, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.programs) + 1


@dataclass(eq=False)
class Program:
    """A compiled network.

    ``inputs`` and ``outputs`` pair the user's tensors with buffer numbers; ``blobs`` are arrays (C-contiguous; possibly
    memory-mapped); ``requires`` lists requirements of the machine (:mod:`optdnn.runtime.file.requires`)
    ("package:onnxruntime>=1.20", "cpu:avx512_bf16"). ``meta`` holds deterministic facts: options, pass reports, tactic
    decisions, provenance. ``kernels`` is the table that steps of the executor "cuda" point into. ``profiles`` hold the sizes
    of symbolic dimensions that it accepts: inside of any profile (without profiles: all sizes).
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
    """Set if this program, of fixed shapes, is the first plan of an engine for the shapes of ``profiles``."""
    by_value: ByValue | None = None
    """Set if plans for the values of some inputs can be made; this program is correct for all values."""
    ranks: Ranks | None = None
    """Set if this program is rank 0 of several that run together, one per GPU."""
    lanes: tuple[Slot, ...] = ()
    """One slot per step if independent steps may run concurrently; empty: each step waits for the previous one. The steps'
    own order is always valid for running them one by one."""
    retained: tuple[int, ...] = ()
    """Buffers outside of the arena, of one step each, that keep their contents from one run of a context to the next. They begin as
    zeros."""
    foreign: bool = field(default=False, repr=False)
    """Whether the program was read from a file: its networks for CPU libraries are examined before the libraries see them."""
    file: MappedFile | None = field(default=None, repr=False)
    """The file from which the blobs are mapped."""
    digests: tuple[tuple[Array, bytes], ...] = field(default=(), repr=False)
    """Arrays read from a file, with their verified SHA-256."""


def programs_of(program: Program) -> tuple[Program, ...]:
    """An engine's program, and all other programs in its file: plans for further shapes, other ranks."""
    plans = program.dynamic.plans if program.dynamic is not None else ()
    return (program, *plans, *(program.ranks.programs if program.ranks is not None else ()))


def target_of(program: Program) -> TargetName:
    """The parsed target of a program, which may come from a file. Raises EngineError if this version does not know the target."""
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
