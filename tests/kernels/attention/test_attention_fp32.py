"""The fused attention kernel of fp32: plans, runs on a processor with emulated warps, under NVRTC, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import emulated
from support.attention_cases import Case, apart, emulated_bytes, merged, result_on_a_gpu
from support.fp32_attention import CASES, COMPILED
from support.host import needs_compiler
from support.layout import ATTENTION_FIELDS, check_pointers
from support.needs import why_no_hopper
from support.net import Net
from support.sequence_cases import ATTENTION, attention
from support.simulated import check_simulated, kinds, lowered, refusals, tactics
from support.spills import check_launch
from support.sweep import sweep

from optdnn.kernels.attention import fp32_kernel as kernel
from optdnn.kernels.attention.general_kernel import Config
from optdnn.kernels.attention.problem import HeadView, Problem
from optdnn.kernels.launch import Launch
from optdnn.passes.pad_heads import PadHeads
from optdnn.runtime.cuda import gpu_facts
from optdnn.types import FP64

AMPERE = gpu_facts.of_arch("sm_80")
QUICK = (
    "rounded, tails",
    "rounded, softcap and a mask",
    "tails",
    "four eights of keys",
    "softcap and a mask",
    "causal from the end",
    "masks of windows",
    "sinks, some see nothing",
    "two sets of two warps",
    "four warps share keys",
    "shared keys, causal",
    "shared keys, lengths, a window",
    "shared keys, sinks, a softcap and a mask",
)
COMBINED = (
    *("causal", "softcap", "sinks", "sinks, a softcap and a mask", "two warps share keys"),
    *("rounded, causal", "rounded, a head of 80", "rounded, lengths"),
)
"""A GPU runs these. Emulated cases hold what they have in combination with more."""


LEAST = -3.4028234663852886e38


def emulated_result(case: Case, made: Launch, folder: Path) -> np.ndarray:
    """The bytes of the result, computed by emulated warps."""
    library = emulated.compiled(made.recipe, made.function, folder, headers=("attention_mma.cuh", "attention_fp32.cuh"))
    return emulated_bytes(case, made, library)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", sweep((name for name in CASES if name not in COMBINED), *QUICK))
def test_the_kernel_computes_attention_where_warps_are_emulated(name: str, tmp_path: Path) -> None:
    problem, config = CASES[name]
    assert kernel.refuse(problem, config, shared=232448) is None
    case = Case(problem)
    case.check(emulated_result(case, kernel.launch(problem, config, AMPERE), tmp_path))


@needs_compiler
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


@needs_compiler
def test_a_row_whose_keys_all_have_the_least_finite_mask_is_their_mean(tmp_path: Path) -> None:
    problem = apart(1, 1, 16, 24, 16, mask=(0, 0, 24), dtype="float32")
    case = Case(problem)
    case.operands["mask"] = np.full(16 * 24, LEAST, np.float32)
    raw = emulated_result(case, kernel.launch(problem, Config(1, 1, 16, 2), AMPERE), tmp_path)
    case.want = np.broadcast_to(case.operands["v"].reshape(1, 1, 24, 16).mean(2, keepdims=True), (1, 1, 16, 16))
    case.check(raw)


@needs_compiler
def test_keys_are_hidden_where_the_unit_of_scores_underflows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ``attention_parts_sm90.cu``, the unit of a query of zeros is 0. Then every key that it sees has the same weight."""
    emulated.change_source(monkeypatch, "attention_fp32.cu", "{1.0f, 1.0f}", "{0.0f, 0.0f}")
    problem = apart(1, 1, 20, 20, 16, causal=True, dtype="float32")
    case = Case(problem)
    raw = emulated_result(case, kernel.launch(problem, Config(2, 1, 16, 2), AMPERE), tmp_path)
    v = case.operands["v"].reshape(20, 16)
    case.want = (np.cumsum(v, axis=0) / np.arange(1, 21)[:, None])[None, None]
    case.check(raw)


@needs_compiler
def test_without_the_rests_it_would_not_be_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rests = "multiply(small[n], a.first, b[n][0].rest, b[n][1].rest);"
    emulated.change_source(monkeypatch, "attention_fp32.cu", rests, ";")
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
    assert set(tactics(program, "Attention")) <= (
        {"attention_steps"} if steps else {"attention_fp32", "attention_parts_sm90"}
    )
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


@pytest.mark.parametrize(
    ("name", "arch"),
    sweep(
        [(name, ("sm_86", "sm_80", "sm_90a")[k % 3]) for k, name in enumerate(COMPILED)],
        ("causal", "sm_86"),
        ("window, softcap", "sm_80"),
        ("widest", "sm_90a"),
        ("sinks", "sm_90a"),
    ),
)  # fmt: skip
@pytest.mark.nvrtc
def test_candidates_compile_without_spills(name: str, arch: str) -> None:
    problem, gpu = COMPILED[name], gpu_facts.of_arch(arch)
    for config in kernel.candidates(problem, gpu, limit=1):
        made = kernel.launch(problem, config, gpu)
        check_launch(made, gpu, config.blocks)


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
