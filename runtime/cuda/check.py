"""Holds every kernel of an engine against its meaning: each launch alone, on the GPU's own operands, beside NumPy's result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.runtime.cuda.caller import Called
from optdnn.runtime.cuda.calls import LibraryCall
from optdnn.runtime.cuda.device import Launch, check, driver
from optdnn.runtime.cuda.memory import upload
from optdnn.runtime.cuda.plan import CudaStep
from optdnn.runtime.cuda.runner import CudaContext
from optdnn.runtime.program import Program
from optdnn.runtime.simulate.runner import evaluator, strided
from optdnn.types import Array, is_float


@dataclass(frozen=True)
class StepError:
    """One step's largest error, of the largest magnitude of its result; inf where a NaN or an infinity is out of place."""

    step: int
    kind: str
    kernel: str
    nodes: str
    error: float


def check_steps(context: CudaContext, feeds: Mapping[str, Any]) -> list[StepError]:
    """Run the program launch by launch on ``feeds`` (NumPy arrays) and compare each result with NumPy's on the same operands.

    Results are filled with NaN first, so that what a kernel leaves out shows. Raises CudaError where a launch fails.
    """
    runner = context.runner
    program = runner.program
    context.run(feeds)  # the inputs are on the GPU now
    stream = context.stream
    found: list[StepError] = []
    for k, (step, parsed, launch) in enumerate(zip(program.steps, runner.steps, context.items({}), strict=True)):
        if not isinstance(parsed, CudaStep) or not isinstance(launch, (Launch, Called)):
            context.do(launch)  # steps on the host, and copies, feed the launches behind them
            continue
        operands = (*step.inputs, *step.outputs)
        before = [_download(context, i) for i in operands]
        meaning = parsed.meaning
        read = {context.address(i, {}) for i in step.inputs}  # a result may lie over an operand
        for v in meaning.writes:
            if v is not None and context.address(operands[v.operand], {}) not in read:
                poisoned = before[v.operand].copy()
                strided(poisoned, v)[...] = np.nan if is_float(poisoned.dtype) else 0
                upload(context.address(operands[v.operand], {}), poisoned)
        launch.enqueue(stream.handle)
        stream.synchronize()
        with np.errstate(all="ignore"):
            wanted = evaluator(parsed)(
                [None if v is None else strided(before[v.operand], v).copy() for v in meaning.reads]
            )
        error = 0.0
        for v, want in zip(meaning.writes, wanted, strict=False):
            if v is not None:
                error = max(error, _error(strided(_download(context, operands[v.operand]), v), np.asarray(want)))
        found.append(StepError(k, meaning.kind, _source(parsed, program), parsed.label, error))
    return found


def _source(step: CudaStep, program: Program) -> str:
    launch = step.launch
    return launch.operation.library if isinstance(launch, LibraryCall) else program.kernels[launch.kernel].template


def _download(context: CudaContext, buffer: int) -> Array:
    b = context.runner.program.buffers[buffer]
    flat = np.empty((b.nbytes or 0) // b.dtype.itemsize, b.dtype)
    if flat.nbytes:
        check("cuMemcpyDtoH", driver().cuMemcpyDtoH(flat.ctypes.data, context.address(buffer, {}), flat.nbytes))
    return flat


def _error(got: Array, want: Array) -> float:
    if not got.size:
        return 0.0
    if not is_float(got.dtype):
        return 0.0 if np.array_equal(got, want.astype(got.dtype)) else float("inf")
    with np.errstate(all="ignore"):
        a, e = got.astype(np.float64), want.astype(got.dtype).astype(np.float64)
    odd = ~np.isfinite(e)
    if not np.array_equal(a[odd], e[odd], equal_nan=True) or not np.isfinite(a[~odd]).all():
        return float("inf")
    scale = np.abs(e[~odd]).max(initial=0.0)
    return float(np.abs(a[~odd] - e[~odd]).max(initial=0.0) / scale) if scale else 0.0
