"""Products with packed weights on a GPU: every kernel in many configurations compared with float64, and the launches of
networks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.on_gpu import checked_launches
from support.packed_cases import CASES, GATED, TOLERANCE, TYPES, Case, drawn, expected, network, operands_of, pitch_of
from support.traps import trapping

from optdnn.kernels.packed import digits_kernel, gemv_kernel, mma_kernel, resident_kernel, wgmma_kernel
from optdnn.kernels.packed.gemm import PackedGemm
from optdnn.lowering.table import TACTICS
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch

pytestmark = pytest.mark.hopper

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
MANY = {
    **{
        f"{rows} rows of 4 bits": Case(rows, 1040, 2064, block=64, zeros="uint8")
        for rows in (9, 16, 17, 33, 64, 65, 130, 256)
    },
    **{f"{rows} rows of 8 bits": Case(rows, 520, 4096, "uint8", 0, stages=GATED) for rows in (9, 16, 40, 64)},
    "16 rows, 4096": Case(16, 4096, 4096),
    "16 rows, 14336 deep": Case(16, 4096, 14336, stages=(("add",),)),
    "15 rows, odd": Case(15, 1003, 4100, block=64, zeros="uint8", dtype="bfloat16", scale="bfloat16"),
    "64 rows, 4096": Case(64, 4096, 4096, dtype="bfloat16", scale="bfloat16"),
    "64 rows, 14336 deep": Case(64, 1024, 14336, stages=(("add",),)),
    "20 rows, odd": Case(20, 1003, 2049, block=32, zeros="float16"),
    "48 rows, 8-bit floats": Case(48, 512, 2048, "fp8_e4m3", 128, "", "float32"),
}
MORE = {
    **{name: case.of_rows(100) for name, case in CASES.items()},
    "300 rows, odd": Case(300, 1003, 2051, block=32, zeros="uint8", stages=(("add",), ("relu",))),
    "512 rows": Case(512, 1024, 4096),
    "1000 rows": Case(1000, 2048, 2048, "uint8", 0, dtype="bfloat16", scale="bfloat16"),
    "2048 rows": Case(2048, 1024, 1024, block=64, zeros="uint8", stages=GATED),
}
NETWORKS = ("4 bits", "gated", "an odd depth", "by channel", "8 bits, bf16", "2 bits", "8-bit floats, bf16")


KERNELS = {
    "digits": digits_kernel,
    "gemv": gemv_kernel,
    "mma": mma_kernel,
    "resident": resident_kernel,
    "wgmma": wgmma_kernel,
}


def configurations(kernel: Any, case: Case) -> list[Any]:
    """Some of all configurations that run a case, and the one of an untuned build."""
    facts = (GPU,) if kernel in (digits_kernel, resident_kernel) else ()
    found = [c for c in kernel.CONFIGS if kernel.refuse(case.problem, c, *facts) is None]
    few = 4 if case in CASES.values() or kernel is resident_kernel else 2
    if kernel is resident_kernel:  # some of each kind
        kinds = ([c for c in found if c.cluster == kind] for kind in (False, True))
        return [*kernel.candidates(case.problem, GPU, 1), *(c for own in kinds for c in own[:: max(1, len(own) // 3)])]
    clusters = [c for c in found if kernel is wgmma_kernel and c.split > 1][::11]
    return [*kernel.candidates(case.problem, GPU, 1), *found[:: max(1, len(found) // few)], *clusters]


def runs() -> list[tuple[str, str]]:
    """Kernels with the cases that they can run, in some configuration."""
    return [
        *(("digits", name) for name, c in (CASES | LARGE).items() if digits_kernel.unfit(c.problem, GPU) is None),
        *(("gemv", name) for name in CASES | LARGE),
        *(("mma", name) for name in CASES | LARGE | MANY if name != "passing through L2"),
        *(("resident", name) for name, c in (CASES | MANY).items() if resident_kernel.unfit(c.problem, GPU) is None),
        *(("wgmma", name) for name in MANY | MORE),
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """When a GPU runs them: finding the cases takes seconds."""
    if {"kind", "name"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("kind", "name"), runs())


def test_every_configuration(kind: str, name: str, tmp_path: Path) -> None:
    """Compared with float64. Nothing else is written, and three runs give the same bits."""
    from support.bound import bound
    from support.device_memory import Memory

    from optdnn.runtime.cuda.allocator import fill

    case, kernel = (CASES | LARGE | MANY | (MORE if kind == "wgmma" else {}))[name], KERNELS[kind]
    p, o, memory = case.problem, drawn(case), Memory()
    want, dtype = expected(case, o), np.dtype(TYPES[case.dtype])
    raw = memory.put(np.zeros(want.size * 2 + 2 * FENCE, np.uint8))
    at = {key: memory.put(a) for key, a in operands_of(case, o).items()} | {"output": raw + FENCE}
    cache, size, bound_of = (
        nvrtc.KernelCache(tmp_path),
        want.size * 2,
        TOLERANCE[case.dtype] * (1 if kind in ("digits", "gemv") else 2),
    )
    for config in configurations(kernel, case):
        facts = (GPU,) if kernel is resident_kernel else ()
        partial, arrived = (0, 0) if kind in ("digits", "gemv", "wgmma") else kernel.workspace(p, config, *facts)
        given = {
            **at,
            "partial": memory.put(np.full(partial, 0xFF, np.uint8)),
            "arrived": memory.put(np.zeros(arrived, np.uint8)),
        }
        launch = kernel.launch(p, config, GPU, pitch_of(case), p.columns)
        if kind == "wgmma":
            launch = replace(launch, recipe=trapping(launch.recipe))
        launch = bound(launch, given, cache)
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
        assert error < bound_of, f"{config}: {error}"
        assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes(), str(config)
    memory.free()


@pytest.mark.parametrize(
    ("rows", "unpacked"),
    [*((n, False) for n in (1, 7, 16, 65, 300)), *((n, True) for n in (17, 1000))],
)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, rows: int, unpacked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if unpacked:
        monkeypatch.setitem(TACTICS, "PackedMatMul", (PackedGemm(),))
    case = replace(CASES[name], rows=rows)
    graph = network(case)
    precision = "bf16" if case.dtype == "bfloat16" else "fp16"
    found = checked_launches(graph, precision)
    assert ({"UnpackedTiles"} if unpacked else {"TiledPackedMatMul", "UnpackedTiles"}) & {e.kind for e in found}
