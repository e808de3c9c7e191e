"""The general fused attention kernel: plans, runs on a processor with emulated warps, under NVRTC, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import emulated
from support.attention_cases import TO, Case, apart, merged, result_on_a_gpu, wide_values
from support.host import needs_compiler
from support.layout import ATTENTION_FIELDS, check_pointers
from support.spills import check_launch
from support.sweep import sweep

from optdnn.errors import InternalError
from optdnn.kernels.attention import general_kernel as general
from optdnn.kernels.attention.general_kernel import Config
from optdnn.kernels.attention.problem import HeadView, Problem
from optdnn.kernels.quantized.quantized_store import QuantizedStore
from optdnn.runtime.cuda import gpu_facts

CASES: dict[str, tuple[Problem, Config]] = {
    "one tile": (merged(1, 1, 16, 16), Config(1, 1, 16, 2)),
    "tails": (merged(2, 3, 37, 64), Config(2, 1, 16, 3)),
    "ring of four": (merged(1, 2, 70, 32, dtype="bfloat16"), Config(1, 1, 16, 4)),
    "two tiles a warp": (merged(1, 2, 70, 64), Config(2, 2, 32, 2)),
    "warps without queries": (merged(1, 1, 20, 32), Config(4, 1, 16, 2)),
    "a head filled up": (merged(1, 2, 30, 40), Config(2, 1, 16, 2)),
    "a head of 8": (merged(1, 2, 30, 8), Config(1, 1, 32, 2)),
    "a head of 80": (merged(1, 2, 33, 80, dtype="bfloat16"), Config(2, 1, 48, 2)),
    "a head of 96": (merged(1, 2, 33, 96), Config(4, 1, 16, 3)),
    "a head of 128, queries from memory": (merged(1, 1, 40, 128), Config(1, 2, 16, 2)),
    "a head of 256": (merged(1, 1, 20, 256), Config(1, 1, 16, 2)),
    "causal": (merged(2, 2, 70, 32, causal=True), Config(2, 1, 16, 3)),
    "causal, two tiles a warp": (merged(1, 2, 70, 32, causal=True, dtype="bfloat16"), Config(1, 2, 32, 2)),
    "causal after a past": (apart(1, 2, 5, 50, 40, causal=True, causal_offset=45), Config(1, 1, 32, 2)),
    "causal, some see nothing": (apart(1, 2, 40, 20, 32, causal=True, causal_offset=-20), Config(2, 1, 16, 2)),
    "lengths": (merged(4, 2, 50, 32, lengths=True), Config(2, 1, 16, 4)),
    "causal, lengths": (merged(4, 2, 50, 32, causal=True, lengths=True), Config(2, 1, 32, 3)),
    "row mask": (merged(2, 2, 34, 32, mask=(34, 0, 0)), Config(2, 1, 16, 2)),
    "full mask of odd rows": (merged(1, 2, 33, 32, mask=(0, 33 * 33, 33)), Config(2, 1, 16, 2)),
    "a mask of pairs, two tiles": (merged(2, 1, 40, 64, mask=(1600, 0, 40)), Config(1, 2, 48, 2)),
    "masks of windows": (merged(4, 2, 18, 16, mask=(2 * 18 * 18, 18 * 18, 18), mask_period=2), Config(2, 1, 16, 3)),
    "grouped queries": (apart(2, 4, 20, 37, 32, 2, mask=(0, 0, 37)), Config(1, 1, 16, 3)),
    "a shared head of 512": (merged(1, 1, 40, 512), Config(4, 1, 64, 2, 1, 4)),
    "a shared head of 264": (merged(1, 2, 37, 264, dtype="bfloat16"), Config(4, 2, 32, 3, 1, 2)),
    "a shared head of 320, sets": (merged(1, 1, 70, 320, mask=(70, 0, 0)), Config(8, 1, 64, 2, 1, 4)),
    "a shared head of 192, causal": (merged(1, 2, 70, 192, causal=True, lengths=True), Config(4, 2, 32, 2, 1, 2)),
    "a shared head of 160, bytes": (merged(1, 2, 37, 160, narrow="uint8"), Config(2, 2, 32, 2, 1, 2)),
    "wide values": (wide_values(2, 2, 33, 24, 72), Config(2, 1, 16, 2)),
    "narrow values": (wide_values(1, 2, 33, 192, 128), Config(4, 1, 32, 2, 1, 2)),
    "a window": (merged(1, 2, 90, 32, reach=20), Config(2, 1, 16, 2)),
    "a window of both sides": (merged(1, 2, 90, 32, reach=3, causal=True, causal_offset=5), Config(2, 1, 16, 3)),
    "a window, kept queries": (merged(1, 1, 90, 64, reach=7, causal=True), Config(1, 2, 16, 2)),
    "a window of a shared head": (merged(1, 1, 90, 288, reach=9, causal=True), Config(4, 1, 32, 2, 1, 2)),
    "causal from the end": (merged(4, 2, 40, 32, lengths=True, causal=True, from_end=True), Config(2, 1, 16, 2)),
    "a window from the end": (
        merged(4, 2, 40, 32, lengths=True, causal=True, from_end=True, reach=6),
        Config(2, 1, 16, 2),
    ),
    "softcap": (merged(1, 2, 40, 32, softcap=1.5), Config(2, 1, 16, 2)),
    "softcap and a mask": (merged(2, 2, 33, 64, softcap=0.8, mask=(33, 0, 0)), Config(1, 2, 32, 2)),
    "softcap of a shared head": (merged(1, 2, 40, 256, softcap=2.0, causal=True), Config(4, 1, 32, 2, 1, 2)),
    "sinks": (merged(2, 5, 37, 32, sinks=True), Config(2, 1, 16, 3)),
    "sinks, two tiles a warp": (merged(2, 4, 40, 64, sinks=True, mask=(1600, 0, 40)), Config(1, 2, 48, 2)),
    "sinks, some see nothing": (
        apart(1, 4, 40, 20, 32, 2, causal=True, causal_offset=-20, sinks=True),
        Config(2, 1, 16, 2),
    ),
    "sinks of a shared head": (merged(1, 4, 40, 256, softcap=2.0, causal=True, sinks=True), Config(4, 1, 32, 2, 1, 2)),
    "sinks, bytes": (merged(2, 2, 37, 24, narrow="uint8", sinks=True), Config(2, 1, 16, 2)),
    "bytes": (merged(2, 2, 37, 24, narrow="uint8"), Config(2, 1, 16, 2)),
    "bytes with signs": (merged(1, 2, 37, 64, narrow="int8", dtype="bfloat16"), Config(1, 2, 32, 2)),
}
QUICK = (
    *(
        "a shared head of 264",
        "softcap and a mask",
        "a window from the end",
        "masks of windows",
        "sinks, bytes",
        "sinks, some see nothing",
        "sinks of a shared head",
    ),
)
COMBINED = (
    *("a head of 96", "causal", "causal, lengths", "causal from the end", "a mask of pairs, two tiles"),
    *(
        "a shared head of 192, causal",
        "a window, kept queries",
        "softcap",
        "softcap of a shared head",
        "sinks",
        "bytes",
    ),
)
"""A GPU runs these. Emulated cases hold what they have in combination with more: their masks, windows and lengths with one another,
with a softcap, with sinks, with bytes, and with shared heads."""


# ---------------------------------------------------------------- the very kernel, warps emulated


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", sweep((name for name in CASES if name not in COMBINED), *QUICK))
def test_the_kernel_computes_attention_where_warps_are_emulated(name: str, tmp_path: Path) -> None:
    problem, config = CASES[name]
    assert general.refuse(problem, config, shared=232448) is None
    case, made = (
        Case(problem),
        general.launch(problem, config, AMPERE, QuantizedStore.of(TO[problem.narrow]) if problem.narrow else None),
    )
    library = emulated.compiled(made.recipe, made.function, tmp_path, headers=("attention_mma.cuh",))
    raw = emulated.aligned(case.poisoned())
    held = {name: emulated.aligned(a) for name, a in case.operands.items()}
    held |= dict.fromkeys("qkv", held["q"]) if problem.k.offset else {}
    addresses = {name: a.ctypes.data for name, a in held.items()}
    emulated.run(library, made, {**addresses, "out": raw.ctypes.data + 32 * case.out_dtype.itemsize})
    case.check(raw)


@needs_compiler
def test_the_emulation_notices_a_wrong_fragment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.change_source(monkeypatch, "attention_sm80.cu", "a[m], b[2], b[3]);", "a[m], b[3], b[2]);", times=2)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        test_the_kernel_computes_attention_where_warps_are_emulated("tails", tmp_path)


# ---------------------------------------------------------------- plans

AMPERE = gpu_facts.of_arch("sm_80")
A, AC = merged(2, 4, 300, 64), Config(4, 1, 64, 2)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (merged(2, 4, 300, 36), AC, "36 features"),
        (merged(2, 4, 300, 520), AC, "520 features"),
        (wide_values(2, 4, 300, 64, 20), AC, "20 features"),
        (replace(A, softcap=float("inf")), AC, "a softcap of inf"),
        (A, replace(AC, split=3), "into 3 equal parts"),
        (A, replace(AC, warps=2, split=4), "into 4 equal parts"),
        (A, replace(AC, keys=32, split=4), "into 4 equal parts"),
        (replace(A, scale=0.0), AC, "a scale of 0.0"),
        (replace(A, scale=float("inf")), AC, "a scale of inf"),
        (replace(A, key_heads=3), AC, "do not share 3 key heads"),
        (replace(A, k=HeadView(8, 8, 4)), AC, "k: strides and offsets must be multiples of 8"),
        (replace(A, v=HeadView(8, 8, -8)), AC, "v: strides and offsets must be multiples of 8"),
        (replace(A, q=HeadView(8, 8, 1 << 23)), AC, "q: positions are 8388608 elements apart"),
        (A, replace(AC, keys=40), "not a tile"),
        (A, replace(AC, warps=3), "not a tile"),
        (A, replace(AC, tiles=3), "not a tile"),
        (A, replace(AC, slots=5), "not a tile"),
        (merged(2, 4, 30, 64), replace(AC, slots=3), "3 slots for 2 parts"),
        (merged(2, 4, 3000, 256), Config(8, 1, 64, 4), "196608 bytes of shared memory exceed 101376"),
        (A, replace(AC, blocks=6), "that many blocks"),
        (A, Config(4, 2, 128, 2), "registers"),
        (replace(A, batch=70000), AC, "grid"),
        (replace(A, heads=70000), AC, "grid"),
    ],
)
def test_refusals(problem: Problem, config: Config, reason: str) -> None:
    assert general.refuse(A, AC) is None
    assert reason in (general.refuse(problem, config) or "")


def test_describing_an_operator_without_shared_heads_is_a_defect() -> None:
    with pytest.raises(InternalError, match="share key heads"):
        general.launch(replace(A, key_heads=3), AC, AMPERE)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a"])
@pytest.mark.parametrize("batch", [1, 32])
def test_candidates_can_run_and_are_ranked(batch: int, arch: str) -> None:
    gpu = gpu_facts.of_arch(arch)
    for positions, features in ((5, 64), (128, 64), (197, 64), (2048, 128), (300, 256)):
        problem = merged(batch, 12, positions, features, mask=(positions, 0, 0))
        found = general.candidates(problem, gpu)
        assert len(found) > (3 if positions > 16 else 0)
        assert all(general.refuse(problem, c, shared=gpu.shared_per_block) is None for c in found)
        assert all(general.shared_bytes(problem, c) <= gpu.shared_per_block for c in found)
        seconds = [general.estimate(problem, c, gpu) for c in found]
        assert seconds == sorted(seconds)
        assert len({str(c) for c in found}) == len(found)
    assert general.candidates(merged(batch, 12, 300, 36), gpu) == []


def test_names() -> None:
    assert str(Config(4, 2, 64, 3, 2)) == "attn4m32n64s3b2"
    assert (AC.queries, AC.threads) == (64, 128)


# ---------------------------------------------------------------- under NVRTC

COMPILED: dict[str, Problem] = {
    "ViT": merged(32, 12, 197, 64),
    "BERT": merged(32, 12, 128, 64, mask=(128, 0, 0), dtype="bfloat16"),
    "causal": merged(2, 16, 2048, 128, causal=True, lengths=True),
    "bytes": merged(8, 12, 197, 64, causal=True, narrow="int8"),
    "widest": merged(1, 1, 4096, 512),
    "widest, a mask": merged(2, 4, 300, 320, mask=(300 * 300, 0, 300)),
    "window, softcap": merged(2, 8, 1000, 128, causal=True, reach=200, softcap=30.0, dtype="bfloat16"),
    "window of a wide head": merged(2, 8, 1000, 256, causal=True, reach=200, lengths=True),
    "wide": merged(2, 8, 300, 256, mask=(300 * 300, 0, 300)),
    "narrow": merged(2, 8, 49, 32, mask=(0, 49 * 49, 49)),
    "sinks": merged(2, 16, 2048, 64, causal=True, lengths=True, reach=128, sinks=True),
    "sinks of wide heads": merged(2, 8, 300, 256, mask=(300 * 300, 0, 300), sinks=True),
}


ARCHS = ("sm_80", "sm_86", "sm_90a", "sm_89")
"""GPUs with much shared memory and with little. Problems use them in turn."""


@pytest.mark.parametrize(
    ("name", "arch"),
    sweep(
        [(name, ARCHS[k % len(ARCHS)]) for k, name in enumerate(COMPILED)],
        ("bytes", "sm_89"), ("widest", "sm_80"), ("widest, a mask", "sm_86"), ("window, softcap", "sm_90a"),
    ),
)  # fmt: skip
@pytest.mark.nvrtc
def test_candidates_compile_without_spills(name: str, arch: str) -> None:
    problem, gpu = COMPILED[name], gpu_facts.of_arch(arch)
    for config in general.candidates(problem, gpu, limit=1):
        made = general.launch(problem, config, gpu)
        check_launch(made, gpu, config.blocks)
        assert not made.maps


@pytest.mark.nvrtc
def test_the_parameter_block_has_the_kernels_layout() -> None:
    problem = merged(2, 4, 128, 64, mask=(128, 0, 0), lengths=True, sinks=True)
    made = general.launch(problem, AC, AMPERE)
    assert len(made.pointers) == 7
    check_pointers(made, ATTENTION_FIELDS)


# ---------------------------------------------------------------- on a GPU

LARGE: dict[str, tuple[Problem, Config]] = {
    f"{name}, {config}": (problem, config)
    for name, problem in (
        ("ViT", merged(32, 12, 197, 64)),
        ("BERT", merged(32, 12, 128, 64, mask=(128, 0, 0))),
        ("causal", merged(2, 8, 513, 128, causal=True, dtype="bfloat16")),
        ("heads of 80", merged(9, 9, 100, 80, mask=(0, 100 * 100, 100))),
        ("wide heads", merged(2, 4, 150, 200)),
        *(
            (f"heads of {n}", merged(2, 3, 150, n, dtype="bfloat16" if n % 3 else "float16"))
            for n in (8, 176, 256, 264, 320, 384, 504)
        ),
        ("the widest heads", merged(1, 1, 1100, 512)),
        ("a mask of wide heads", merged(2, 2, 150, 320, mask=(150 * 150, 0, 150))),
        ("a window", merged(2, 4, 700, 64, causal=True, reach=130)),
        ("a window of wide heads", merged(1, 2, 700, 288, reach=50, causal=True, causal_offset=60)),
        ("from the end", merged(4, 2, 200, 128, lengths=True, causal=True, from_end=True, reach=33)),
        ("softcap", merged(2, 4, 333, 128, softcap=3.0, mask=(333, 0, 0))),
        ("softcap of wide heads", merged(2, 2, 333, 256, softcap=3.0, causal=True)),
        ("sinks", merged(2, 5, 333, 64, causal=True, sinks=True)),
        ("sinks of wide heads", merged(2, 4, 333, 256, reach=100, causal=True, sinks=True)),
        ("wide values", wide_values(2, 4, 333, 192, 128)),
        ("far keys", apart(1, 2, 5, 1000, 40, causal=True, causal_offset=995)),
        ("grouped, lengths", apart(5, 4, 70, 333, 64, 2, mask=(0, 0, 333), lengths=True)),
    )
    for config in general.candidates(problem, gpu_facts.of_arch("sm_86"), limit=4)
}


@pytest.mark.hopper
@pytest.mark.parametrize("name", CASES | LARGE)
def test_on_a_gpu(name: str, tmp_path: Any) -> None:
    problem, config = (CASES | LARGE)[name]
    case = Case(problem)
    made = general.launch(problem, config, gpu_facts.of_arch("sm_90a"), case.narrow)
    start = 32 * case.out_dtype.itemsize
    case.check(result_on_a_gpu(made, case.operands, case.poisoned(), start, tmp_path))
