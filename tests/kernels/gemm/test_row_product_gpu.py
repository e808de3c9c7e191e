"""Products of a few rows on a GPU, with norms in front of them and products beside them: each launch does what its step means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels.gemm.test_row_product import NETS, PROBLEMS, expected_of, held_of  # type: ignore[import-not-found]
from support.needs import why_no_hopper
from support.net import Net
from support.simulated import feeds_of, lowered

from optdnn.kernels.gemm import gemv_kernel as gemv
from optdnn.kernels.gemm import staged_kernel as staged
from optdnn.kernels.gemm.gemv import planned
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.trials.check import check_arena, check_steps
from optdnn.runtime.engine import Engine

TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", NETS)
def test_each_form(name: str, precision: str) -> None:
    n = Net()
    graph = n.done(NETS[name](n))
    context: Any = Engine(lowered(graph, precision, target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    found = check_steps(context, feeds)
    assert "RowProduct" in {e.kind for e in found}
    assert not [e for e in found if not e.error < TOLERANCE[precision]]
    assert not check_arena(context.runner, feeds)
    first, second = context.run(feeds), context.run(feeds)
    assert all(first[k].tobytes() == second[k].tobytes() for k in first)


GPU, FENCE = of_arch("sm_90a"), 4096
GATED = PROBLEMS["norm, gated"]
CASES = {
    **PROBLEMS,
    "norm, bf16, four rows": gemv.Problem(4, 3072, 2048, norm=True, dtype="bfloat16"),
    "gated, several groups": replace(GATED, rows=2, columns=8195, depth=2048),
    "deep, residual": gemv.Problem(1, 2048, 8192, (("bias",), ("add",))),
    "many columns": gemv.Problem(1, 33000, 520, norm=True),
}


def configurations(p: gemv.Problem) -> list[Any]:
    """The first of each kernel, and rings of other depths."""
    made = [*gemv.candidates(p, GPU, 1), *staged.candidates(p, GPU)[::2]]
    return [*made, *(c for c in (staged.Config(2, 8, 1),) if staged.refuse(p, c, GPU) is None)]


@pytest.mark.parametrize("name", CASES)
def test_every_configuration(name: str, tmp_path: Path) -> None:
    """Against float64; nothing is written outside, and three runs give the same bits."""
    from support.bound import bound
    from support.device_memory import Memory

    from optdnn.runtime.cuda.allocator import fill

    p, memory, cache = CASES[name], Memory(), nvrtc.KernelCache(tmp_path)
    held = held_of(p)
    want, size = expected_of(p, held), held["output"].nbytes
    raw = memory.put(np.zeros(size + 2 * FENCE, np.uint8))
    at = {n: memory.put(a) for n, a in held.items()} | {"output": raw + FENCE}
    for config in configurations(p):
        made = planned(p, config, GPU, p.depth, p.columns, epsilon=1e-3, largest=4.0)
        launch, results = bound(made, {n: at[n] for n in made.operands}, cache), []
        for _ in range(3):
            fill(raw, 0xFF, size + 2 * FENCE)
            memory.run(launch)
            around = memory.get(raw, (size + 2 * FENCE,), np.dtype(np.uint8))
            assert (around[:FENCE] == 0xFF).all()
            assert (around[-FENCE:] == 0xFF).all()
            results.append(around[FENCE:-FENCE])
        got = results[0].view(held["output"].dtype).reshape(want.shape).astype(np.float64)
        error = np.abs(got - want).max() / np.abs(want).max()
        assert error < (3e-3 if p.dtype == "float16" else 1.5e-2), f"{config}: {error}"
        assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes(), str(config)
    memory.free()
