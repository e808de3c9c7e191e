"""The fused attention kernel of fp32: plans, runs on a processor with emulated warps, under NVRTC, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import emulated
from support.attention_cases import Case, apart, merged, result_on_a_gpu, wide_values
from support.host import COMPILER, WHY_NOT
from support.layout import ATTENTION_FIELDS, check_pointers
from support.needs import why_no_hopper
from support.net import Net
from support.sequence_cases import ATTENTION, attention
from support.simulated import check_simulated, kinds, lowered, refusals, tactics
from support.sweep import sweep

from optdnn.kernels.attention import fp32_kernel as kernel
from optdnn.kernels.attention.general_kernel import Config
from optdnn.kernels.attention.problem import HeadView, Problem
from optdnn.kernels.launch import Launch
from optdnn.passes.pad_heads import PadHeads
from optdnn.runtime.cuda import gpu_facts
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.types import FP64

AMPERE = gpu_facts.of_arch("sm_80")
CASES: dict[str, tuple[Problem, Config]] = {
    "one tile": (merged(1, 1, 16, 16, dtype="float32"), Config(1, 1, 16, 2)),
    "tails": (merged(2, 3, 37, 64, dtype="float32"), Config(2, 1, 16, 3)),
    "ring of four": (merged(1, 2, 70, 32, dtype="float32"), Config(1, 1, 16, 4)),
    "four eights of keys": (merged(1, 2, 70, 32, dtype="float32"), Config(2, 1, 64, 2)),
    "warps without queries": (merged(1, 1, 20, 32, dtype="float32"), Config(4, 1, 16, 2)),
    "a head filled up": (merged(1, 2, 30, 36, dtype="float32"), Config(2, 1, 16, 2)),
    "a head of 4": (merged(1, 2, 30, 4, dtype="float32"), Config(1, 1, 32, 2)),
    "a head of 80": (merged(1, 2, 33, 80, dtype="float32"), Config(2, 1, 48, 2)),
    "a head of 192": (merged(1, 1, 20, 192, dtype="float32"), Config(1, 1, 16, 2)),
    "causal": (merged(2, 2, 70, 32, causal=True, dtype="float32"), Config(2, 1, 16, 3)),
    "causal, long tiles": (merged(1, 2, 70, 32, causal=True, dtype="float32"), Config(1, 1, 48, 2)),
    "causal after a past": (
        apart(1, 2, 5, 50, 40, causal=True, causal_offset=45, dtype="float32"),
        Config(1, 1, 32, 2),
    ),
    "causal, some see nothing": (
        apart(1, 2, 40, 20, 32, causal=True, causal_offset=-20, dtype="float32"),
        Config(2, 1, 16, 2),
    ),
    "lengths": (merged(4, 2, 50, 32, lengths=True, dtype="float32"), Config(2, 1, 16, 4)),
    "row mask": (merged(2, 2, 34, 32, mask=(34, 0, 0), dtype="float32"), Config(2, 1, 16, 2)),
    "full mask of odd rows": (merged(1, 2, 33, 32, mask=(0, 33 * 33, 33), dtype="float32"), Config(2, 1, 16, 2)),
    "a mask of pairs": (merged(2, 1, 40, 16, mask=(1600, 0, 40), dtype="float32"), Config(1, 1, 48, 2)),
    "masks of windows": (
        merged(4, 2, 18, 16, mask=(2 * 18 * 18, 18 * 18, 18), mask_period=2, dtype="float32"),
        Config(2, 1, 16, 3),
    ),
    "grouped queries": (apart(2, 4, 20, 37, 32, 2, mask=(0, 0, 37), dtype="float32"), Config(1, 1, 16, 3)),
    "wide values": (wide_values(2, 2, 33, 24, 72, dtype="float32"), Config(2, 1, 16, 2)),
    "narrow values": (wide_values(1, 2, 33, 96, 60, dtype="float32"), Config(4, 1, 32, 2)),
    "a window of both sides": (
        merged(1, 2, 90, 32, reach=3, causal=True, causal_offset=5, dtype="float32"),
        Config(2, 1, 16, 3),
    ),
    "causal from the end": (
        merged(4, 2, 40, 32, lengths=True, causal=True, from_end=True, dtype="float32"),
        Config(2, 1, 16, 2),
    ),
    "softcap": (merged(1, 2, 40, 32, softcap=1.5, dtype="float32"), Config(2, 1, 16, 2)),
    "sinks": (merged(2, 5, 37, 32, sinks=True, dtype="float32"), Config(2, 1, 16, 2)),
    "sinks, a softcap and a mask": (
        merged(2, 2, 33, 32, softcap=0.8, mask=(33, 0, 0), sinks=True, dtype="float32"),
        Config(1, 1, 32, 2),
    ),
    "sinks, some see nothing": (
        apart(1, 4, 40, 20, 32, 2, causal=True, causal_offset=-20, sinks=True, dtype="float32"),
        Config(2, 1, 16, 2),
    ),
    "softcap and a mask": (merged(2, 2, 33, 32, softcap=0.8, mask=(33, 0, 0), dtype="float32"), Config(1, 1, 32, 2)),
    "two warps share keys": (merged(1, 2, 70, 32, dtype="float32"), Config(2, 1, 32, 2, split=2)),
    "two sets of two warps": (merged(2, 3, 37, 64, dtype="float32"), Config(4, 1, 64, 3, split=2)),
    "four warps share keys": (merged(1, 1, 130, 80, dtype="float32"), Config(4, 1, 64, 2, split=4)),
    "warps without keys": (merged(1, 2, 10, 16, dtype="float32"), Config(4, 1, 64, 2, split=4)),
    "shared keys, causal": (
        apart(1, 2, 40, 20, 32, causal=True, causal_offset=-20, dtype="float32"),
        Config(4, 1, 64, 2, split=4),
    ),
    "shared keys, lengths, a window": (
        merged(4, 2, 90, 32, reach=3, causal=True, lengths=True, dtype="float32"),
        Config(4, 1, 32, 2, split=2),
    ),
    "shared keys, sinks, a softcap and a mask": (
        merged(2, 2, 33, 32, softcap=0.8, mask=(33, 0, 0), sinks=True, dtype="float32"),
        Config(2, 1, 32, 2, split=2),
    ),
}
CASES |= {
    f"rounded, {name}": (replace(CASES[name][0], rounded=True), CASES[name][1])
    for name in ("tails", "causal", "a head of 80", "lengths", "softcap and a mask", "two sets of two warps")
}
QUICK = (
    "rounded, tails",
    "rounded, softcap and a mask",
    "tails",
    "four eights of keys",
    "softcap and a mask",
    "causal from the end",
    "masks of windows",
    "sinks",
    "sinks, some see nothing",
    "two sets of two warps",
    "four warps share keys",
    "shared keys, causal",
    "shared keys, lengths, a window",
    "shared keys, sinks, a softcap and a mask",
)


LEAST = -3.4028234663852886e38


def emulated_result(case: Case, made: Launch, folder: Path) -> np.ndarray:
    """The bytes of the result, computed by emulated warps."""
    library = emulated.compiled(made.recipe, made.function, folder, headers=("attention_mma.cuh",))
    raw = emulated.aligned(case.poisoned())
    held = {name: emulated.aligned(a) for name, a in case.operands.items()}
    held |= dict.fromkeys("qkv", held["q"]) if case.problem.k.offset else {}
    addresses = {name: a.ctypes.data for name, a in held.items()}
    emulated.run(library, made, {**addresses, "out": raw.ctypes.data + 32 * case.out_dtype.itemsize})
    return raw


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
@pytest.mark.parametrize("name", sweep(CASES, *QUICK))
def test_the_kernel_computes_attention_where_warps_are_emulated(name: str, tmp_path: Path) -> None:
    problem, config = CASES[name]
    assert kernel.refuse(problem, config, shared=232448) is None
    case = Case(problem)
    case.check(emulated_result(case, kernel.launch(problem, config, AMPERE), tmp_path))


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
def test_rounded_numbers_are_not_exact(tmp_path: Path) -> None:
    problem, config = CASES["rounded, tails"]
    case = Case(problem)
    raw = emulated_result(case, kernel.launch(problem, config, AMPERE), tmp_path)
    case.check(raw)
    case.problem = replace(problem, rounded=False)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        case.check(raw)


def test_attention_at_tf32_is_one_product_of_rounded_numbers() -> None:
    program = check_simulated(attention(), "tf32")
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == "Attention"]
    assert step.params["op"]["attrs"]["tf32"]
    assert "factors" not in step.params["op"]["attrs"]
    assert not any("tf32" in s.params["op"]["attrs"] for s in check_simulated(attention(), "fp32").steps)
    (exact, config), (rounded, _) = CASES["tails"], CASES["rounded, tails"]
    assert kernel.estimate(rounded, config, AMPERE) < kernel.estimate(exact, config, AMPERE)


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
def test_a_row_whose_keys_all_have_the_least_finite_mask_is_their_mean(tmp_path: Path) -> None:
    problem = apart(1, 1, 16, 24, 16, mask=(0, 0, 24), dtype="float32")
    case = Case(problem)
    case.operands["mask"] = np.full(16 * 24, LEAST, np.float32)
    raw = emulated_result(case, kernel.launch(problem, Config(1, 1, 16, 2), AMPERE), tmp_path)
    case.want = np.broadcast_to(case.operands["v"].reshape(1, 1, 24, 16).mean(2, keepdims=True), (1, 1, 16, 16))
    case.check(raw)


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
def test_without_the_rests_it_would_not_be_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = nvrtc.Recipe.sources

    def changed(recipe: nvrtc.Recipe) -> dict[str, str]:
        texts = sources(recipe)
        name, product = "attention_fp32.cu", "multiply(small[n], a.first, b[n][0].rest, b[n][1].rest);"
        assert texts[name].count(product) == 1, "a product of a rest"
        return {**texts, name: texts[name].replace(product, ";")}

    monkeypatch.setattr(nvrtc.Recipe, "sources", changed)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        test_the_kernel_computes_attention_where_warps_are_emulated("tails", tmp_path)


# ---------------------------------------------------------------- plans

A, AC = merged(2, 4, 300, 64, dtype="float32"), Config(4, 1, 32, 2)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (merged(2, 4, 300, 38, dtype="float32"), AC, "38 features (a multiple of 4 up to 192 is needed)"),
        (merged(2, 4, 300, 196, dtype="float32"), AC, "196 features"),
        (replace(A, k=HeadView(8, 8, 2)), AC, "k: strides and offsets must be multiples of 4"),
        (A, replace(AC, keys=80), "not a tile"),
        (A, replace(AC, warps=3), "not a tile"),
        (A, replace(AC, split=4), "not a tile"),
        (A, replace(AC, warps=1, split=2), "1 warps and 32 keys do not split into 2 equal parts"),
        (merged(2, 4, 300, 192, dtype="float32"), Config(8, 1, 16, 2), "bytes of shared memory exceed 101376"),
        (A, replace(AC, blocks=6), "that many blocks"),
        (merged(2, 4, 300, 192, dtype="float32"), Config(1, 1, 32, 2), "registers"),
        (A, replace(AC, tiles=2), "not a tile"),
        (replace(A, batch=70000), AC, "grid"),
    ],
)
def test_problems_that_the_kernel_refuses(problem: Problem, config: Config, reason: str) -> None:
    assert kernel.refuse(A, AC) is None
    assert reason in (kernel.refuse(problem, config) or "")


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_120"])
def test_candidates_are_such_that_run(arch: str) -> None:
    gpu = gpu_facts.of_arch(arch)
    for problem in (A, merged(1, 1, 4, 16, dtype="float32"), merged(1, 8, 4096, 64, dtype="float32")):
        found = kernel.candidates(problem, gpu)
        assert found
        assert all(kernel.refuse(problem, c, shared=gpu.shared_per_block) is None for c in found)
    assert kernel.candidates(merged(1, 8, 300, 196, dtype="float32"), gpu) == []


# ---------------------------------------------------------------- the tactic


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("name", sweep(ATTENTION, *list(ATTENTION)[::5]))
def test_attention_of_fp32(name: str, target: str) -> None:
    build, of_halves = ATTENTION[name]
    program = check_simulated(build(), "fp32", target=target)
    steps = of_halves == "attention_steps" or name in WIDE
    assert set(tactics(program, "Attention")) == {"attention_steps" if steps else "attention_fp32"}
    assert ("MaskedSoftmax" in kinds(program)) == steps


WIDE = ("widest heads", "heads of 264")


@pytest.mark.parametrize(
    ("build", "precision", "reason"),
    [
        (attention, "fp16", "it is for fp32"),
        (lambda: attention(softmax_precision=FP64), "fp32", "its softmax is fp32"),
        (lambda: attention(outputs=4), "fp32", "weights are also an output"),
        (lambda: attention(size=18), "fp32", "heads of 18 features"),
        (lambda: attention(size=196, count=1), "fp32", "heads of 196 features"),
    ],
)
def test_operators_that_the_tactic_refuses(
    build: Any, precision: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PadHeads, "rules", ())  # heads would have 24 features
    refused = refusals(lowered(build(), precision, target="cuda:sm_80"), "attention_fp32")
    assert refused
    assert all(reason in r for r in refused)


@pytest.mark.parametrize(("precision", "kernel_name"), [("fp32", "attention_fp32"), ("fp16", "attention_sm90")])
def test_values_of_another_type_are_refused(precision: str, kernel_name: str) -> None:
    """ONNX's Attention allows them."""
    n = Net()
    q, k = (n.input(1, 2, 8, 16, name=name, dtype=np.float32 if precision == "fp32" else np.float16) for name in "qk")
    values = n.input(1, 2, 8, 16, name="v", dtype=np.float16 if precision == "fp32" else np.float64)
    graph = n.done(n.op("Attention", q, k, values))
    program = check_simulated(graph, precision, target="cuda:sm_90a", tolerance=4e-3)
    assert set(tactics(program, "Attention")) == {"attention_steps"}
    assert "queries, keys and values are of several types" in refusals(program, kernel_name)


# ---------------------------------------------------------------- under NVRTC

COMPILED: dict[str, Problem] = {
    "ViT": merged(32, 12, 197, 64, dtype="float32"),
    "BERT": merged(32, 12, 128, 64, mask=(128, 0, 0), dtype="float32"),
    "Swin": merged(64, 3, 49, 32, mask=(0, 49 * 49, 49), dtype="float32"),
    "causal": merged(2, 4, 700, 128, causal=True, lengths=True, dtype="float32"),
    "window, softcap": merged(2, 8, 1000, 80, causal=True, reach=200, softcap=30.0, dtype="float32"),
    "widest": merged(2, 8, 300, 192, dtype="float32"),
    "wide, a mask": merged(2, 8, 300, 160, mask=(300 * 300, 0, 300), dtype="float32"),
    "narrow": merged(2, 8, 49, 16, dtype="float32"),
    "sinks": merged(2, 8, 300, 64, causal=True, sinks=True, dtype="float32"),
    "ViT, rounded": replace(merged(32, 12, 197, 64, dtype="float32"), rounded=True),
    "wide, a mask, rounded": replace(merged(2, 8, 300, 160, mask=(300 * 300, 0, 300), dtype="float32"), rounded=True),
}


@pytest.mark.parametrize(
    ("name", "arch"),
    [(name, ("sm_86", "sm_80", "sm_90a")[k % 3]) for k, name in enumerate(COMPILED)],
)
@pytest.mark.nvrtc
def test_candidates_compile_without_spills(name: str, arch: str) -> None:
    problem, gpu = COMPILED[name], gpu_facts.of_arch(arch)
    for config in kernel.candidates(problem, gpu, limit=1):
        made = kernel.launch(problem, config, gpu)
        found = nvrtc.resources(made.recipe)[made.function]
        assert found.spill_bytes == found.stack_bytes == 0, (config, found)
        assert found.registers * made.block * config.blocks <= 65536
        assert made.shared + found.shared_bytes <= gpu.shared_per_block


@pytest.mark.nvrtc
def test_the_parameter_block_has_the_kernels_layout() -> None:
    problem = merged(2, 4, 128, 64, mask=(128, 0, 0), lengths=True, sinks=True, dtype="float32")
    made = kernel.launch(problem, AC, AMPERE)
    assert len(made.pointers) == 7
    check_pointers(made, ATTENTION_FIELDS)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, *COMPILED])
def test_on_a_gpu(name: str, tmp_path: Path) -> None:
    gpu = gpu_facts.of_arch("sm_90a" if why_no_hopper() is None else "sm_80")
    problem = CASES[name][0] if name in CASES else COMPILED[name]
    case = Case(problem)
    for config in dict.fromkeys((*([CASES[name][1]] if name in CASES else []), *kernel.candidates(problem, gpu))):
        raw, made = case.poisoned(), kernel.launch(problem, config, gpu)
        case.check(result_on_a_gpu(made, case.operands, raw, 32 * case.out_dtype.itemsize, tmp_path))
