"""A step of the executor "cuda" as plain data: one kernel launch, and its meaning.

A step's params are a table with

``launch``
    ``kernel`` (number in the program's table), ``grid`` and ``block`` (three and one numbers), ``shared`` (dynamic shared
    bytes), ``cluster`` (blocks per cluster along x), ``dependent`` (programmatic dependent launch), ``parameters`` (the kernel's
    only parameter block, in hexadecimal), ``relocations``: the addresses that the runner writes into the block, and
    ``waits``: the waits of its blocks (:data:`WAITS`; files before version 1.6 leave it out), and ``part`` (may be absent):
    :class:`RunPart`.
``call`` (in place of ``launch``)
    A call of a vendor's library: see :mod:`optdnn.runtime.cuda.libraries.calls`.
``tactic`` (may be absent)
    The tactic that made the step, and its configuration: for display only.
``op``, ``reads``, ``writes``
    The operator that the launch computes: its kind and attributes in the form of the reference kernels, and the place of each of
    its logical operands and results in its buffer (None: absent). The executor "simulate" runs these in NumPy.

So an engine contains no host code, and both ways of running it use the same offsets and strides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from optdnn.errors import EngineError
from optdnn.runtime.cuda.libraries.calls import RESULTS, LibraryCall, parse_call
from optdnn.runtime.program import Plain, Program, Step

MAP_BYTES = 128
"""Size of a tensor map in a parameter block."""
GRID_LIMIT = (1 << 31, 1 << 16)
"""A grid has fewer blocks than this along x, and along y and z."""
SHARED_LIMIT = 227 << 10
"""The most shared bytes of a block, on any architecture (CUDA C++ Programming Guide, "Compute Capabilities")."""
TF32 = "tf32"
"""Key of a meaning's attributes: numbers of the operands whose elements are rounded to tf32 before they are multiplied."""
NOTHING, CLUSTER, LOWER, GRID = "nothing", "cluster", "lower", "grid"
WAITS = (NOTHING, CLUSTER, LOWER, GRID)
"""The waits of a launch's blocks, besides waits for earlier launches: :mod:`optdnn.runtime.cuda.launches.waits` defines them."""
PARAMETERS_LIMIT = 32764
"""The most bytes of a kernel's parameters (CUDA C++ Programming Guide, from compute capability 7.0 on)."""
MAP_ITEM = {"float16": 2, "bfloat16": 2, "float32": 4, "tfloat32": 4, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}
"""Element type of a tensor map -> its bytes."""


Operand = TypeVar("Operand", int, str)
"""A launch's reference to an operand: its number in a program, or its name before it has an address
(:mod:`optdnn.kernels.launch`)."""


@dataclass(frozen=True)
class OperandView:
    """A tensor in the step's operand number ``operand`` (inputs, then outputs); ``offset`` and ``strides`` count elements."""

    operand: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def to_plain(self) -> Plain:
        return [self.operand, self.offset, list(self.shape), list(self.strides)]


@dataclass(frozen=True)
class Pointer(Generic[Operand]):
    """Relocation: write the address of byte ``offset`` of an operand at byte ``at`` of the parameter block."""

    at: int
    operand: Operand
    offset: int = 0

    def to_plain(self) -> Plain:
        return ["pointer", self.at, self.operand, self.offset]


@dataclass(frozen=True)
class TensorMap(Generic[Operand]):
    """Encode a tensor map of an operand at byte ``at``; see the driver's cuTensorMapEncodeTiled and …Im2col.

    ``shape`` and ``box`` count elements, innermost first; ``strides`` are bytes, for all dimensions except the innermost. With
    ``corners`` (lower, then upper, innermost spatial dimension first) the map is an im2col map: ``box`` is then (channels,
    pixels) and ``steps`` the traversal strides of every dimension.
    """

    at: int
    operand: Operand
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    corners: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()

    def to_plain(self) -> Plain:
        numbers: list[tuple[int, ...]] = [self.shape, self.strides, self.box, self.corners, self.steps]
        return ["map", self.at, self.operand, self.offset, self.dtype, self.swizzle, *[list(x) for x in numbers]]


@dataclass(frozen=True)
class Ahead:
    """Write at byte ``at`` the address of byte ``offset`` of a constant: buffer number ``buffer`` of the program. A later
    launch reads ``bytes`` of it. The launch may load them into L2. Its result does not depend on them, so the constant is not an
    operand."""

    at: int
    buffer: int
    offset: int
    bytes: int

    def to_plain(self) -> Plain:
        return ["ahead", self.at, self.buffer, self.offset, self.bytes]


Relocation = Pointer[int] | TensorMap[int] | Ahead


@dataclass(frozen=True)
class RunPart:
    """The part of a launch that may be joined with its neighbors: job ``number`` of run ``run``.

    The kernel's parameters are ``header`` bytes (which end with the first job's number and the number of jobs, ``int`` each) and
    up to ``most`` jobs of ``size`` bytes. The launch alone has one job. It needs ``least`` blocks, and uses up to its grid's
    number.
    """

    run: int
    number: int
    most: int
    header: int
    size: int
    least: int

    def to_plain(self) -> Plain:
        return [self.run, self.number, self.most, self.header, self.size, self.least]


@dataclass(frozen=True)
class LaunchPlan:
    """One kernel launch, without addresses.

    ``dependent``: it may begin before the launches that it depends on have ended, and then waits for them itself. ``waits``: what
    its blocks wait for besides that (one of :data:`WAITS`).
    """

    kernel: int
    grid: tuple[int, int, int]
    block: int
    parameters: bytes
    relocations: tuple[Relocation, ...]
    shared: int = 0
    cluster: int = 1
    dependent: bool = True
    waits: str = NOTHING
    part: RunPart | None = None

    @property
    def resident(self) -> int:
        """The number of its blocks that must be on the GPU at once so that its waits end."""
        grid = math.prod(self.grid) if self.part is None else self.part.least
        return {CLUSTER: self.cluster, GRID: grid}.get(self.waits, 1)

    def to_plain(self) -> Plain:
        return {
            "kernel": self.kernel,
            "grid": list(self.grid),
            "block": self.block,
            "parameters": self.parameters.hex(),
            "relocations": [r.to_plain() for r in self.relocations],
            "shared": self.shared,
            "cluster": self.cluster,
            "dependent": self.dependent,
            "waits": self.waits,
            **({} if self.part is None else {"part": self.part.to_plain()}),
        }


@dataclass(frozen=True)
class ReferenceOp:
    """The operator that a launch computes. ``attrs`` are plain (see :mod:`optdnn.runtime.steps.attrs`)."""

    kind: str
    attrs: Mapping[str, Plain]
    reads: tuple[OperandView | None, ...]
    writes: tuple[OperandView | None, ...]

    @property
    def label(self) -> str:
        """The kind to show: if weights are in parts, that of the operator which reads them."""
        return str(self.attrs["of"]) if self.kind == "WeightsInParts" else self.kind


@dataclass(frozen=True)
class CudaStep:
    """A parsed step."""

    launch: LaunchPlan | LibraryCall
    meaning: ReferenceOp
    label: str = field(default="", compare=False)
    tactic: str = field(default="", compare=False)
    """The tactic that made it, and its configuration."""

    def to_params(self) -> dict[str, Plain]:
        m = self.meaning
        return {
            "call" if isinstance(self.launch, LibraryCall) else "launch": self.launch.to_plain(),
            "op": {"kind": m.kind, "attrs": dict(m.attrs)},
            "reads": [None if v is None else v.to_plain() for v in m.reads],
            "writes": [None if v is None else v.to_plain() for v in m.writes],
            **({"tactic": self.tactic} if self.tactic else {}),
        }


# ---------------------------------------------------------------- reading


def parse(step: Step, program: Program) -> CudaStep:
    """The step, with every number checked: views and pointers stay inside their buffers, relocations inside the block.

    Raises EngineError for anything else.
    """
    try:
        p = step.params
        doing = "call" if "call" in p else "launch"
        _need(set(p) - {"tactic"} == {doing, "op", "reads", "writes"}, "has unexpected or missing parts")
        tactic = p.get("tactic", "")
        _need(isinstance(tactic, str), "has a tactic that is not a name")
        kind, attrs = p["op"]["kind"], p["op"]["attrs"]
        _need(
            set(p["op"]) == {"kind", "attrs"} and isinstance(kind, str) and isinstance(attrs, dict),
            "has a malformed op",
        )
        operands = (*step.inputs, *step.outputs)
        sizes = [_elements(program, i) for i in operands]
        n = len(step.inputs)
        reads = tuple(_view(v, sizes) for v in p["reads"])
        writes = tuple(_view(v, sizes) for v in p["writes"])
        _need(all(v is None or v.operand >= n for v in writes), "writes one of its inputs")
        launch: LaunchPlan | LibraryCall
        if doing == "call":
            launch = parse_call(p["call"], [n * item for n, item in sizes])
            written = {v.operand for v in writes if v is not None}
            results = {place[0] for name, place in launch.operands.items() if name in RESULTS}
            _need(results == written, "has a call that writes something else than declared")
        else:
            launch = _launch(p["launch"], program, operands)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"a cuda step is malformed: {type(error).__name__}: {error}") from error
    label = ", ".join(step.src[:3]) or kind
    return CudaStep(launch, ReferenceOp(kind, attrs, reads, writes), label, tactic)


def _elements(program: Program, buffer: int) -> tuple[int, int]:
    """Elements of a buffer, and their size in bytes."""
    _need(buffer >= 0, "has an absent operand")
    b = program.buffers[buffer]
    if b.nbytes is None:
        raise EngineError(f"buffer {b.name!r} of a cuda step has no fixed size")
    return b.nbytes // b.dtype.itemsize, b.dtype.itemsize


def _view(value: Plain, sizes: Sequence[tuple[int, int]]) -> OperandView | None:
    if value is None:
        return None
    operand, offset, shape, strides = value
    view = OperandView(_int(operand), _int(offset), tuple(map(_int, shape)), tuple(map(_signed, strides)))
    _need(view.operand < len(sizes) and len(shape) == len(strides), "has a malformed view")
    low = high = view.offset
    for n, s in zip(view.shape, view.strides, strict=True):
        low, high = low + min(0, (n - 1) * s), high + max(0, (n - 1) * s)
    if 0 not in view.shape and (low < 0 or high >= sizes[view.operand][0]):
        raise EngineError(f"a cuda step has a view of elements {low} to {high} of a buffer of {sizes[view.operand][0]}")
    return view


def _launch(p: Any, program: Program, operands: Sequence[int]) -> LaunchPlan:
    keys = {"kernel", "grid", "block", "parameters", "relocations", "shared", "cluster", "dependent"}
    _need(isinstance(p, dict) and set(p) - {"waits", "part"} == keys, "has a malformed launch")
    block = bytes.fromhex(p["parameters"])
    relocations = tuple(_relocation(r, program, operands, len(block)) for r in p["relocations"])
    x, y, z = map(_int, p["grid"])
    kernel = _int(p["kernel"])
    _need(kernel < len(program.kernels), f"names kernel {kernel}, which does not exist")
    _need(isinstance(p["dependent"], bool) and len(block) <= 4096, "has a malformed launch")
    numbers = (_int(p["block"]), _int(p["shared"]), _int(p["cluster"]))
    _need(1 <= numbers[0] <= 1024 and 1 <= numbers[2] <= 16 and min(x, y, z) >= 1, "has an impossible launch")
    _need(x < GRID_LIMIT[0] and max(y, z) < GRID_LIMIT[1] and numbers[1] <= SHARED_LIMIT, "has an impossible launch")
    waits = p.get("waits", CLUSTER if numbers[2] > 1 else NOTHING)
    _need(waits in WAITS, f"waits for {waits!r}, which is none of {', '.join(WAITS)}")
    part = _part(p["part"], block, x) if "part" in p else None
    return LaunchPlan(
        kernel, (x, y, z), numbers[0], block, relocations, numbers[1], numbers[2], p["dependent"], waits, part
    )


def _part(p: Any, block: bytes, blocks: int) -> RunPart:
    part = RunPart(*map(_int, p))
    _need(part.header >= 8 and len(block) == part.header + part.size, "has a job of another size than its launch")
    _need(1 <= part.most <= (PARAMETERS_LIMIT - part.header) // part.size, "has more jobs than parameters hold")
    _need(1 <= part.least <= blocks, "needs more blocks than it has")
    return part


def _relocation(p: Any, program: Program, operands: Sequence[int], size: int) -> Relocation:
    kind, at, operand, offset = p[0], _int(p[1]), _int(p[2]), _int(p[3])
    if kind == "ahead":
        return _ahead(Ahead(at, operand, offset, _int(p[4])), program, size)
    buffer = program.buffers[operands[operand]]
    _need(offset <= (buffer.nbytes or 0), "points outside of its buffer")
    if kind == "pointer":
        _need(len(p) == 4 and at + 8 <= size, "has a relocation outside of its parameters")
        return Pointer(at, operand, offset)
    _, _, _, _, dtype, swizzle, *lists = p
    shape, strides, box, corners, steps = (tuple(map(_signed, x)) for x in lists)
    fits = kind == "map" and at + MAP_BYTES <= size and dtype in MAP_ITEM and swizzle in (0, 32, 64, 128)
    _need(fits and 1 <= len(shape) <= 5 and len(strides) == len(shape) - 1, "has a malformed tensor map")
    item = MAP_ITEM[dtype]
    span = shape[0] * item + sum((n - 1) * s for n, s in zip(shape[1:], strides, strict=True))
    _need(
        min(*shape, 1) >= 1 and min(*strides, 0) >= 0 and offset + span <= (buffer.nbytes or 0),
        "has a tensor map outside of its buffer",
    )
    return TensorMap(at, operand, offset, dtype, shape, strides, box, _int(swizzle), corners, steps)


def _ahead(ahead: Ahead, program: Program, size: int) -> Ahead:
    _need(ahead.buffer < len(program.buffers), "loads a buffer into L2 that does not exist")
    buffer = program.buffers[ahead.buffer]
    inside = buffer.blob is not None and ahead.offset + ahead.bytes <= (buffer.nbytes or 0)
    whole = ahead.offset % 16 == ahead.bytes % 16 == 0 and ahead.bytes < 1 << 32
    _need(inside and whole, "loads something other than a part of a constant into L2")
    _need(ahead.at + 12 <= size, "has a relocation outside of its parameters")
    return ahead


def _int(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:  # hot: without a call that would first format its message
        raise EngineError(f"a cuda step holds {value!r} for a size")
    return value


def _signed(value: Any) -> int:
    if type(value) is not int or not abs(value) < 1 << 62:
        raise EngineError(f"a cuda step holds {value!r} for a stride")
    return value


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise EngineError(f"a cuda step {message}")


def tf32_nodes(program: Program) -> frozenset[str]:
    """The ONNX nodes whose kernels round factors to tf32, according to the steps' meanings."""
    meanings: list[tuple[Any, Step]] = [(s.params.get("op", {}), s) for s in program.steps]
    return frozenset(n for op, s in meanings if TF32 in op.get("attrs", {}) for n in s.src)
