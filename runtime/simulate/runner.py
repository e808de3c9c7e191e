"""The runner "simulate": each step's meaning, evaluated in NumPy on the views that the step's kernel reads and writes.

Arithmetic is fp32 and results are rounded at the store, as in the kernels. Memory is the program's own: one arena whose
buffers share addresses at different times, so a wrong lifetime, offset or stride gives wrong results, as on the GPU. Steps that may
run concurrently run in a different valid order in each run, so that a result that depends on the order shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from optdnn.errors import InternalError, OptdnnError, RunError
from optdnn.runtime.contexts.base import HostContext, hand_over
from optdnn.runtime.cuda.launches.plan import TF32, CudaStep, OperandView
from optdnn.runtime.cuda.launches.steps import GpuProgramRunner
from optdnn.runtime.program import Plain, Program, known_sizes
from optdnn.runtime.reference.binary import cast
from optdnn.runtime.reference.run import run_kernel
from optdnn.runtime.steps.attrs import attrs_from_plain, attrs_to_plain, check_kind
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.runtime.steps.host import TO_HOST, CopyPlan, HostPlan, run_host
from optdnn.types import Array, DType, dtype_name, to_tf32

FENCE = 256
"""Bytes before and after the arena; a write to them is an error."""
_FENCE_BYTE = 0xA5


@dataclass(frozen=True)
class _Action:
    step: CudaStep
    operands: tuple[int, ...]
    run: Callable[[Sequence[Array | None]], Sequence[Array]]


class SimulateRunner(GpuProgramRunner):
    """A prepared program; immutable, shared by threads."""

    refusal = "simulate runs the steps of a GPU's program, not those of"

    def __init__(self, program: Program):
        super().__init__(program)
        self.actions = [
            _Action(parsed, (*step.inputs, *step.outputs), evaluator(parsed))
            if isinstance(parsed, CudaStep)
            else parsed
            for step, parsed in zip(program.steps, self.steps, strict=True)
        ]

    def _step_facts(self, step: CudaStep) -> Mapping[str, Plain]:
        return {"executor": "simulate", "library": "numpy", "version": np.__version__}

    def context(self, arena: object = None) -> SimulateContext:
        return SimulateContext(self)


def evaluator(step: CudaStep) -> Callable[[Sequence[Array | None]], Sequence[Array]]:
    """The step's operator in NumPy: operands to results, narrow floats computed (and left) in fp32. Raises EngineError."""
    m = step.meaning
    attrs = attrs_from_plain(dict(m.attrs))
    if (slots := attrs.pop(TF32, None)) is not None:
        return _rounded(evaluator(replace(step, meaning=replace(m, attrs=attrs_to_plain(attrs)))), frozenset(slots))
    check_kind(m.kind)
    return lambda operands: run_kernel(m.kind, operands, attrs, [np.dtype(np.float32)] * len(m.writes))


def _rounded(run: Callable[[Sequence[Array | None]], Sequence[Array]], slots: frozenset[int]) -> Callable[..., Any]:
    """``run`` with the operands in ``slots`` rounded to tf32: the factors of a tensor core's products."""
    return lambda operands: run([to_tf32(x) if i in slots and x is not None else x for i, x in enumerate(operands)])


def strided(flat: Array, view: OperandView) -> Array:
    """A view of a flat buffer. It is made on the buffer's bytes, because NumPy's own as_strided does not know every 8-bit float."""
    if 0 in view.shape:
        return np.empty(view.shape, flat.dtype)
    size = flat.itemsize
    return np.ndarray(view.shape, flat.dtype, flat.view(np.uint8), view.offset * size, [s * size for s in view.strides])


def some_order(waits: Sequence[Sequence[int]], random: Random) -> list[int]:
    """A random order of steps in which each step follows the steps that it waits for. Some orders run one branch far ahead."""
    missing = [len(w) for w in waits]
    after: list[list[int]] = [[] for _ in waits]
    for k, before in enumerate(waits):
        for d in before:
            after[d].append(k)
    ready = [k for k, n in enumerate(missing) if not n]
    far, found = random.random() < 0.5, []  # far: continue with the steps that have just become ready
    while ready:
        k = ready.pop(-1 if far and random.random() < 0.9 else random.randrange(len(ready)))
        found.append(k)
        for j in random.sample(after[k], len(after[k])):
            missing[j] -= 1
            if not missing[j]:
                ready.append(j)
    return found


def _new_array(shape: tuple[int, ...], dtype: DType, what: str) -> Array:
    """An uninitialized array. Raises RunError if there is no memory for it."""
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:  # ValueError: larger than the address space
        raise RunError(f"there is no memory for {what}, {dtype_name(dtype)}{list(shape)}") from error


class SimulateContext(HostContext):
    """One thread's arena. ``poison`` fills it with NaN before each run, so that reads of unwritten elements show; ``seed``
    determines the orders of the steps of a program with lanes."""

    def __init__(self, runner: SimulateRunner, *, poison: bool = False, seed: int = 0):
        super().__init__(runner.program, runner.signature)
        self._runner, self.poison = runner, poison
        self._random = Random(seed)
        p = runner.program
        self._raw = _new_array((p.arena_bytes + 2 * FENCE,), np.dtype(np.uint8), "the arena")
        self._raw.fill(_FENCE_BYTE)
        arena = self._raw[FENCE : FENCE + p.arena_bytes]
        self._flat: list[Array | None] = [None] * len(p.buffers)
        outside = {i for _, i in (*p.inputs, *p.outputs)}
        for i, b in enumerate(p.buffers):
            if b.blob is not None:
                self._flat[i] = np.ascontiguousarray(p.blobs[b.blob]).reshape(-1)
            elif b.offset is not None:
                self._flat[i] = arena[b.offset : b.offset + (b.nbytes or 0)].view(b.dtype)
            elif i not in outside and i not in runner.on_host and b.nbytes is not None:
                self._flat[i] = _new_array((b.nbytes // b.dtype.itemsize,), b.dtype, b.name)
        self._arena = arena
        self._host: list[Array | None] = []
        """The values on the host in a run; the last entry stays None, for absent operands."""

    def _run_timed(
        self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None, times: list[int] | None
    ) -> dict[str, Any]:
        p = self._runner.program
        arrays, given = self.signature.checked(feeds, out)
        self._host = [None if b.blob is None else p.blobs[b.blob] for b in p.buffers]
        self._host.append(None)
        for (_, i), a in zip(p.inputs, arrays, strict=True):
            self._flat[i] = a.reshape(-1)
            self._host[i] = a
        results: dict[str, Any] = {}
        for (spec, i), buffer in zip(p.outputs, given, strict=True):
            if i in self._runner.on_host:
                results[spec.name] = None  # known when it is computed
                continue
            result = buffer if buffer is not None else _new_array(known_sizes(spec.shape), spec.dtype, spec.name)
            self._flat[i] = result.reshape(-1)
            results[spec.name] = result
        if self.poison:
            self._arena[:] = 0xFF  # NaN in every floating type, -1 in the integers
        self._steps(times)
        self._check_fences()
        for (spec, i), buffer in zip(p.outputs, given, strict=True):
            if i in self._runner.on_host:
                results[spec.name] = hand_over(spec, self._host[i], buffer)
        return results

    def _order(self) -> list[int]:
        """The steps in a valid order for their lanes."""
        waits = self._runner.waits
        return list(range(len(self._runner.actions))) if waits is None else some_order(waits, self._random)

    def _steps(self, times: list[int] | None) -> None:
        if times is not None:
            times += [0] * len(self._runner.actions)
        for k in self._order():
            action, start = self._runner.actions[k], time.perf_counter_ns()
            if isinstance(action, _Action):
                self.run_step(k, action)
            else:
                self._on_host(action)
            if times is not None:
                times[k] = time.perf_counter_ns() - start

    def run_step(self, k: int, action: _Action) -> None:
        """Run the operator of step ``k``, a kernel's, on copies of its operands."""
        m = action.step.meaning
        try:
            operands = [None if v is None else self._view(action, v).copy() for v in m.reads]
            with np.errstate(all="ignore"):
                for view, result in zip(m.writes, action.run(operands), strict=False):
                    if view is not None:
                        self._store(self._view(action, view), result)
        except (OptdnnError, AssertionError):
            raise
        except Exception as e:
            raise RunError(f"step {k} ({action.step.label}) failed: {type(e).__name__}: {e}") from e

    def _on_host(self, plan: HostPlan | CopyPlan) -> None:
        if isinstance(plan, HostPlan):
            run_host(plan, self._host)
            return
        flat = self._flat[plan.device]
        if flat is None:
            raise InternalError(f"the copy of {plan.label} is of a buffer without memory")
        part = flat[plan.offset : plan.offset + plan.size]
        if plan.to == TO_HOST:
            self._host[plan.host] = part.reshape(plan.shape).copy()
            return
        value = self._host[plan.host]
        if value is None or value.shape != plan.shape:
            raise InternalError(f"the copy of {plan.label} is of {None if value is None else list(value.shape)}")
        part[:] = value.reshape(-1)

    def _view(self, action: _Action, view: OperandView) -> Array:
        flat = self._flat[action.operands[view.operand]]
        if flat is None:
            raise InternalError(f"{action.step.label} uses a buffer without memory")
        return strided(flat, view)

    @staticmethod
    def _store(target: Array, result: Array) -> None:
        if target.shape != result.shape:
            raise InternalError(
                f"a step computes {dtype_name(result.dtype)}{list(result.shape)} for {list(target.shape)}"
            )
        np.copyto(target, result if result.dtype == target.dtype else cast(result, target.dtype)[0])

    def _check_fences(self) -> None:
        if (self._raw[:FENCE] != _FENCE_BYTE).any() or (self._raw[-FENCE:] != _FENCE_BYTE).any():
            raise InternalError("a step wrote outside of the arena")


def prepare(program: Program, options: LoadOptions) -> SimulateRunner:
    """Raises EngineError for a program that is not one of cuda steps."""
    return SimulateRunner(program)
