"""Compares an engine on a GPU with its meaning: each launch alone, on the GPU's own operands, with NumPy's result; single launches
with their graph; and runs on memory with different contents, between fences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from optdnn.runtime.cuda.allocator import DeviceMemory, download, fill, upload
from optdnn.runtime.cuda.compile.render import INEXACT
from optdnn.runtime.cuda.device import Launch, check, driver
from optdnn.runtime.cuda.launches.chain import do
from optdnn.runtime.cuda.launches.plan import CudaStep, ReferenceOp
from optdnn.runtime.cuda.libraries.calls import Called, LibraryCall
from optdnn.runtime.cuda.memory.shared import Arena
from optdnn.runtime.cuda.runner import CudaContext, CudaRunner
from optdnn.runtime.program import Program
from optdnn.runtime.reference.run import PlainStage
from optdnn.runtime.simulate.runner import evaluator, strided
from optdnn.runtime.steps.attrs import attrs_from_plain
from optdnn.types import Array, DType, is_float

NEAR_ZERO = 1e-3
"""A fraction of the largest magnitude: two roundings of 16-bit factors."""
FAR = 1e-2
"""A fraction of the largest magnitude, for results of values that are rounded to 8 bits inside of a launch."""


@dataclass(frozen=True)
class StepError:
    """One step's largest error, relative to its result's largest magnitude; inf if a NaN or an infinity is misplaced.

    Integers are exact (0, otherwise inf). Integers that are rounded from floats, fp8, and floats that are rounded to the grid of
    an 8-bit type may be one step off. Their error is the fraction of such elements, and inf if one is farther off. Near zero,
    steps of fp8 are finer than steps of the 16-bit values that it comes from: a difference within :data:`NEAR_ZERO` of the
    largest counts as one step. For attention that rounds inside, it is the fraction of elements that are far off (:data:`FAR`).
    """

    step: int
    kind: str
    kernel: str
    nodes: str
    error: float


def check_steps(context: CudaContext, feeds: Mapping[str, Any]) -> list[StepError]:
    """Run the program launch by launch on ``feeds`` (NumPy arrays) and compare each result with NumPy's on the same operands.

    Results are filled with NaN first, so that elements that a kernel does not write show. Raises CudaError if a launch fails.
    """
    runner = context.runner
    program = runner.program
    context.run(feeds)  # the inputs are on the GPU now
    stream = context.stream
    errors: list[StepError] = []
    for k, (step, parsed, launch) in enumerate(zip(program.steps, runner.steps, context.items({}), strict=True)):
        if not isinstance(parsed, CudaStep) or not isinstance(launch, (Launch, Called)):
            do(launch, context.stream)  # steps on the host, and copies, feed the launches after them
            stream.synchronize()
            continue
        operands = (*step.inputs, *step.outputs)
        before = [context.memory.download(i) for i in operands]
        meaning = parsed.meaning
        read = {context.memory.address(i, {}) for i in step.inputs}  # a result may share an operand's memory
        for v in meaning.writes:
            if v is not None and context.memory.address(operands[v.operand], {}) not in read:
                poisoned = before[v.operand].copy()
                strided(poisoned, v)[...] = np.nan if is_float(poisoned.dtype) else 0
                upload(context.memory.address(operands[v.operand], {}), poisoned)
        launch.enqueue(stream.handle)
        stream.synchronize()
        with np.errstate(all="ignore"):
            wanted = evaluator(parsed)(
                [None if v is None else strided(before[v.operand], v).copy() for v in meaning.reads]
            )
        error, grid = 0.0, _grid(meaning)
        for v, want in zip(meaning.writes, wanted, strict=False):
            if v is None:
                continue
            got, wanted_array = strided(context.memory.download(operands[v.operand]), v), np.asarray(want)
            if grid is not None:
                error = max(error, _share_off(_steps(got, grid), _steps(wanted_array, grid)))
            else:
                error = max(error, _measure(meaning, got.dtype)(got, wanted_array))
        errors.append(StepError(k, meaning.kind, _source(parsed, program), parsed.label, error))
    return errors


def run_singly(context: CudaContext, feeds: Mapping[str, Any]) -> dict[str, Array]:
    """The results of ``feeds`` by single launches, each waited for. The graph's results must equal them to the bit."""
    runner, p = context.runner, context.runner.program
    context.run(feeds)  # the inputs are on the GPU now
    given = {i for _, i in p.inputs}
    for _, i in p.outputs:
        if i not in runner.on_host and i not in given:
            context.memory.fill(i, 0xFF)
    for item in context.items({}):
        do(item, context.stream)
        context.stream.synchronize()
    context.memory.copy_out(context.stream.handle)
    context.stream.synchronize()
    return {s.name: context.memory.pinned(i).copy() for s, i in p.outputs if i not in runner.on_host}


FENCE = 4096
"""Bytes before and after the arena, and each buffer outside of it."""
OWN = 0xA5
"""The byte in the fences of buffers outside of the arena."""
FILLS = (0xFF, 0x3C)
"""Bytes that fill the arena before runs: NaN in every floating type and -1 in the integers; then a number near 1 in fp16."""


class FencedMemory(DeviceMemory):
    """Device memory between fences: ``pointer`` is the address of the ``size`` bytes between them."""

    def __init__(self, size: int, what: str):
        self._whole = DeviceMemory(size + 2 * FENCE, what)
        self.size, self.pointer = size, self._whole.pointer + FENCE

    def guard(self, byte: int) -> None:
        for fence in self._fences():
            _fill(fence, FENCE, byte)

    def intact(self, byte: int) -> bool:
        """Whether the fences are unchanged since :meth:`guard`."""
        return all((download(fence, np.empty(FENCE, np.uint8)) == byte).all() for fence in self._fences())

    def _fences(self) -> tuple[int, int]:
        return self._whole.pointer, self.pointer + self.size


class FencedArena(Arena):
    """An arena between fences. The context's buffers outside of the arena are between fences, too."""

    def __init__(self, size: int):
        super().__init__(size)
        self.size = size
        self._inside = FencedMemory(size, "an arena between fences")
        self._others: list[FencedMemory] = []

    @property
    def pointer(self) -> int:
        """The address after the first fence."""
        return self._inside.pointer

    def at_least(self, size: int) -> Any:
        return self

    def own(self, size: int, what: str) -> FencedMemory:
        memory = FencedMemory(size, what)
        memory.guard(OWN)
        self._others.append(memory)
        return memory

    def fill(self, byte: int) -> None:
        """Fill the arena with a byte, its fences with another; the other fences are rewritten."""
        self._inside.guard(byte ^ 0x5A)
        _fill(self.pointer, self.size, byte)
        for memory in self._others:
            memory.guard(OWN)

    def intact(self, byte: int) -> bool:
        """Whether all fences are unchanged; the arena's since :meth:`fill`."""
        return self._inside.intact(byte ^ 0x5A) and all(m.intact(OWN) for m in self._others)


def check_arena(runner: CudaRunner, feeds: Mapping[str, Any]) -> list[str]:
    """The faults in the program's use of memory, in words: results that depend on the arena's contents before the run, or writes
    outside of the arena."""
    p, faults = runner.program, []
    arena = FencedArena(p.arena_bytes)
    context = runner.context(arena)
    fresh = {i for _, i in p.outputs if i not in runner.on_host} - {i for _, i in p.inputs}
    results: list[dict[str, Array]] = []
    for byte in FILLS:
        arena.fill(byte)
        for i in fresh:
            if p.buffers[i].blob is None:
                context.memory.fill(i, byte)
        results.append(context.run(feeds))
        if not arena.intact(byte):
            faults.append("something is written outside of the arena")
    for name, first in results[0].items():
        if first.tobytes() != results[1][name].tobytes():
            faults.append(f"{name!r} depends on the earlier contents of memory")
    return sorted(set(faults))


def _fill(pointer: int, size: int, byte: int) -> None:
    if size:
        check("cuCtxSynchronize", driver().cuCtxSynchronize())  # a running kernel may still read it
        fill(pointer, byte, size)


def _source(step: CudaStep, program: Program) -> str:
    launch = step.launch
    return launch.operation.library if isinstance(launch, LibraryCall) else program.kernels[launch.kernel].template


def _measure(meaning: ReferenceOp, dtype: DType) -> Callable[[Array, Array], float]:
    """How results of a type are compared."""
    if "RoundedAttention" in (meaning.kind, meaning.attrs.get("of")):
        return _share_far
    rounded = dtype.itemsize == 1 if is_float(dtype) else _rounds_floats(meaning)
    return _share_off if rounded else relative_error


def _steps(x: Array, grid: float) -> Array:
    """Floats on a grid, in steps."""
    return np.asarray(np.rint(x.astype(np.float64) / grid).astype(np.int32))


def _rounds_floats(meaning: ReferenceOp) -> bool:
    """Whether integers of a step are rounded from floats, so that two computations may give different integers."""
    stages = meaning.attrs.get("stages", ())
    # Stages of scans, sums of segments and joint launches are mappings or lists of them: these kernels compute as NumPy does.
    names = [s[0] for s in stages if s and not isinstance(s, Mapping)]
    inexact = any(isinstance(name, str) and name in INEXACT for name in names)
    # A multiplication and an addition may be one instruction with one rounding.
    pointwise = meaning.kind == "Pointwise" and any(stage.kind == "Round" for stage in _epilogue(meaning))
    return meaning.kind == "Quantized" or inexact or pointwise


def _epilogue(meaning: ReferenceOp) -> Sequence[PlainStage]:
    """The stages after an operator, or of a pointwise launch."""
    stages = attrs_from_plain({"epilogue": meaning.attrs.get("epilogue", [])})["epilogue"]
    return [stage for stage in stages if isinstance(stage, PlainStage)]


def _grid(meaning: ReferenceOp) -> float | None:
    """The step of the grid that the last stage of a launch rounds its only result to, or None."""
    stages = _epilogue(meaning)
    rounds = len(meaning.writes) == 1 and stages and stages[-1].kind == "FakeQuantize"
    return float(stages[-1].attrs["scale"]) if rounds else None


def _share_off(got: Array, want: Array) -> float:
    a, e = (_ordinals(x) for x in (got, want.astype(got.dtype)))
    with np.errstate(all="ignore"):
        odd = np.isnan(want.astype(np.float64))
    if is_float(got.dtype) and not np.array_equal(np.isnan(got.astype(np.float64)), odd):
        return float("inf")
    off = np.abs(a - e)
    if is_float(got.dtype):
        x, y = got.astype(np.float64), want.astype(got.dtype).astype(np.float64)
        small = np.abs(x - y) <= NEAR_ZERO * np.abs(y[~odd]).max(initial=0.0)
        off = np.where(small, np.minimum(off, 1), off)
    off = off[~odd]
    return float("inf") if off.max(initial=0) > 1 else float((off > 0).mean()) if off.size else 0.0


def _share_far(got: Array, want: Array) -> float:
    """The fraction of elements that are farther off than one integer, or than :data:`FAR`. A score or weight at the edge between
    two steps, rounded to the other one, changes a whole row of the result."""
    a, e = got.astype(np.float64), want.astype(got.dtype).astype(np.float64)
    bound = FAR * np.abs(e).max(initial=0.0) if is_float(got.dtype) else 1.0
    return float((~(np.abs(a - e) <= bound)).mean()) if got.size else 0.0


def _ordinals(x: Array) -> Array:
    """8-bit values numbered in their order; fp8 by sign and magnitude."""
    if not is_float(x.dtype):
        return x.astype(np.int32)
    bits = np.ascontiguousarray(x).view(np.uint8).astype(np.int32)
    return np.where(bits & 128, -(bits & 127), bits & 127)


def relative_error(got: Array, want: Array) -> float:
    """Largest difference, relative to the largest magnitude of ``want``, or to the smallest normal number if all are smaller: below
    it, a step of the type no longer shrinks with the numbers. If ``want`` is all zeros: the difference itself.

    ``want`` is rounded to the element type of ``got`` first. inf if a NaN or an infinity is misplaced; for integers 0 or inf.
    """
    if not got.size:
        return 0.0
    if not is_float(got.dtype):
        return 0.0 if np.array_equal(got, want.astype(got.dtype)) else float("inf")
    with np.errstate(all="ignore"):
        a, e = got.astype(np.float64), want.astype(got.dtype).astype(np.float64)
    odd = ~np.isfinite(e)
    if not np.array_equal(a[odd], e[odd], equal_nan=True) or not np.isfinite(a[~odd]).all():
        return float("inf")
    scale = float(np.abs(e[~odd]).max(initial=0.0))
    error = float(np.abs(a[~odd] - e[~odd]).max(initial=0.0))
    return error / max(scale, float(ml_dtypes.finfo(got.dtype).smallest_normal)) if scale else error  # type: ignore[no-untyped-call]
