"""Products with packed weights on a GPU: every kernel in many configurations against float64, and the launches of networks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.needs import why_no_hopper
from support.packed_cases import CASES, GATED, TOLERANCE, TYPES, Case, drawn, expected, network, operands_of, pitch_of
from support.simulated import feeds_of, lowered

from optdnn.kernels.packed import gemv_kernel
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.trials.check import check_arena, check_steps
from optdnn.runtime.engine import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]

GPU = of_arch("sm_90a")
FENCE = 4096
ROWS = (1, 2, 3, 4, 5, 8)
LARGE = {
    **{f"{rows} rows": Case(rows, 4096, 4096) for rows in ROWS},
    **{f"{rows} rows, by channel": Case(rows, 1040, 2064, "uint8", 0) for rows in ROWS},
    "2048": Case(1, 2048, 2048),
    "14336 deep": Case(1, 4096, 14336, zeros="uint8", stages=(("add",),)),
    "14336 deep, 8 rows": Case(8, 1024, 14336, "uint8", 128, "uint8"),
    "14336 wide": Case(4, 14336, 4096, block=32, stages=GATED),
    "odd": Case(3, 4001, 3003, block=64, zeros="uint8", dtype="bfloat16", scale="bfloat16"),
    "passing through L2": Case(1, 16384, 8192),
}
NETWORKS = ("4 bits", "gated", "an odd depth", "by channel", "8 bits, bf16", "2 bits", "8-bit floats, bf16")


def configurations(case: Case) -> list[tuple[Any, Any]]:
    """(kernel, configuration): all that run a case."""
    return [(gemv_kernel, c) for c in gemv_kernel.CONFIGS if gemv_kernel.refuse(case.problem, c) is None]


@pytest.mark.parametrize("name", CASES | LARGE)
def test_every_configuration(name: str, tmp_path: Path) -> None:
    """Against float64; nothing is written outside, and three runs give the same bits."""
    from support.bound import bound
    from support.device_memory import Memory

    from optdnn.runtime.cuda.allocator import fill

    case = (CASES | LARGE)[name]
    p, o, memory = case.problem, drawn(case), Memory()
    want, dtype = expected(case, o), np.dtype(TYPES[case.dtype])
    raw = memory.put(np.zeros(want.size * 2 + 2 * FENCE, np.uint8))
    at = {key: memory.put(a) for key, a in operands_of(case, o).items()} | {"output": raw + FENCE}
    found, size = configurations(case), want.size * 2
    cache, few = nvrtc.KernelCache(tmp_path), 8 if name in CASES else 4
    assert found
    for kernel, config in found[:: max(1, len(found) // few)]:
        launch = bound(kernel.launch(p, config, GPU, pitch_of(case), p.columns), at, cache)
        results = []
        for _ in range(3):
            fill(raw, 0xFF, size + 2 * FENCE)
            memory.run(launch)
            around = memory.get(raw, (size + 2 * FENCE,), np.dtype(np.uint8))
            assert (around[:FENCE] == 0xFF).all()
            assert (around[-FENCE:] == 0xFF).all()
            results.append(around[FENCE:-FENCE])
        got = results[0].view(dtype).reshape(want.shape).astype(np.float64)
        error = np.abs(got - want).max() / np.abs(want).max()
        assert error < TOLERANCE[case.dtype], f"{config}: {error}"
        assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes(), str(config)
    memory.free()


@pytest.mark.parametrize("rows", [1, 4, 7, 9, 16, 17, 33, 64, 65, 300])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, rows: int) -> None:
    case = replace(CASES[name], rows=rows)
    graph = network(case)
    precision = "bf16" if case.dtype == "bfloat16" else "fp16"
    engine = Engine(lowered(graph, precision, target="cuda:sm_90a"))
    context: Any = engine.context()
    feeds = feeds_of(graph)
    found = check_steps(context, feeds)
    assert {"TiledPackedMatMul", "UnpackedTiles"} & {e.kind for e in found}
    assert not [e for e in found if not e.error < {"fp16": 4e-3, "bf16": 3e-2}[precision]]
    assert not check_arena(context.runner, feeds)
    first, second = context.run(feeds), context.run(feeds)
    assert all(first[k].tobytes() == second[k].tobytes() for k in first)
