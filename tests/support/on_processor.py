"""The generated kernels of a network on the processor, launch by launch (see support.host)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph
from optdnn.runtime.program import Program
from optdnn.runtime.simulate.runner import SimulateContext, SimulateRunner, strided
from optdnn.types import is_float
from support.host import HostKernels
from support.simulated import feeds_of, lowered


def compare_graph(graph: Graph, precision: str, folder: Path, **options: Any) -> int:
    """:func:`compare_steps` of a network with random inputs, in the tolerance of the precision. ``options``: of the build."""
    tolerance = {"fp32": 3e-6, "fp16": 1.2e-3, "bf16": 9e-3}[precision]
    return compare_steps(lowered(graph, precision, **options), feeds_of(graph), tolerance, folder)


def compare_steps(
    program: Program,
    feeds: dict[str, Any],
    tolerance: float,
    folder: Path,
    made: Callable[[Program, Path], Any] = HostKernels,
) -> int:
    """Run every generated kernel of the program on the results of earlier steps. Returns the number of compared steps.
    ``made``: the object that runs the kernels."""
    kernels, compared = made(program, folder), 0

    class Compared(SimulateContext):
        def run_step(self, k: int, action: Any) -> None:
            given = [np.array(self._flat[i]) for i in action.operands]  # the result may overwrite an operand
            for flat, i in zip(given, action.operands, strict=True):
                if i in program.retained:  # zeros before the first run
                    flat.view(np.uint8)[:] = 0
            super().run_step(k, action)
            compare(action, given)

    context = Compared(SimulateRunner(program), poison=True)

    def compare(action: Any, given: list[Any]) -> None:
        nonlocal compared
        if not kernels.runs(action.step):
            return
        flat = list(given)
        wanted = [np.array(context._view(action, v)) for v in action.step.meaning.writes if v is not None]
        number = {i: k for k, i in enumerate(action.operands)}
        for v in action.step.meaning.writes:
            if (
                v is not None and action.operands[v.operand] not in action.operands[: v.operand]
            ):  # it reads retained memory
                target = flat[v.operand]
                target.view(np.uint8)[:] = 0xFF
        for k, i in enumerate(action.operands):  # an operand that is both read and written is one array
            flat[k] = flat[number[i]] if number[i] == k else flat[k]
        kernels.run(action.step, flat)
        for v, want in zip((v for v in action.step.meaning.writes if v is not None), wanted, strict=True):
            got = strided(flat[v.operand], v)
            label = f"{action.step.meaning.kind} of {action.step.label}"
            if not is_float(got.dtype):
                np.testing.assert_array_equal(got, want, err_msg=label)
                continue
            a, e = got.astype(np.float64), want.astype(np.float64)
            scale = np.abs(e[np.isfinite(e)]).max(initial=1e-30)
            np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance * scale, err_msg=label)
        compared += 1

    context.run(feeds)
    assert compared
    return compared
