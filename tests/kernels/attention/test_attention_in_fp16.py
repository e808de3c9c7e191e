"""The fused attention kernel of fp32 on Hopper, in parts of fp16: plans, under NVRTC, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import emulated
from support.attention_cases import Case, apart, emulated_bytes, merged, result_on_a_gpu, seen
from support.fp32_attention import CASES, COMPILED
from support.host import HERE, needs_compiler
from support.layout import ATTENTION_FIELDS, check_pointers
from support.sequence_cases import attention
from support.simulated import check_simulated, lowered, refusals, tactics
from support.spills import check_launch
from support.sweep import sweep

from optdnn.config import BuildOptions
from optdnn.kernels.attention import fp32_kernel
from optdnn.kernels.attention import parts_kernel as kernel
from optdnn.kernels.attention.parts_kernel import Config
from optdnn.kernels.attention.problem import HeadView, Problem
from optdnn.lowering.cuda import lower_cuda
from optdnn.optimize import optimize
from optdnn.passes.pad_heads import PadHeads
from optdnn.runtime.cuda import gpu_facts
from optdnn.types import FP64

H200 = gpu_facts.of_arch("sm_90a")
PROBLEMS = {name: problem for name, (problem, _) in CASES.items() if not name.startswith(("shared", "two warps"))}
PROBLEMS |= {
    "several tiles": merged(1, 2, 300, 64, dtype="float32"),
    "a head of 48": merged(1, 2, 150, 48, dtype="float32"),
    "a head of 96": merged(1, 2, 150, 96, dtype="float32"),
    "a head of 128": merged(1, 2, 200, 128, causal=True, dtype="float32"),
    "a head of 256": merged(1, 1, 70, 256, dtype="float32"),
    "three warpgroups, some without queries": apart(1, 2, 130, 500, 64, dtype="float32"),
}
PROBLEMS |= {
    f"rounded, {n}": replace(PROBLEMS[n], rounded=True) for n in ("several tiles", "a head of 96", "a head of 256")
}

# ---------------------------------------------------------------- plans

A = merged(2, 4, 300, 64, dtype="float32")


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (merged(2, 4, 300, 38, dtype="float32"), Config(1, 64, 1), "38 features (a multiple of 4 up to 256 is needed)"),
        (merged(2, 4, 300, 260, dtype="float32"), Config(1, 16, 1), "260 features"),
        (replace(A, k=HeadView(8, 8, 2)), Config(1, 64, 1), "k: strides and offsets must be multiples of 4"),
        (A, Config(4, 64, 1), "not a tile"),
        (A, Config(1, 64, 0), "not a tile"),
        (A, Config(1, 24, 1), "tiles of 24 keys"),
        (A, Config(1, 144, 1), "a thread cannot load its part of 144 x 64 numbers"),
        (A, Config(3, 64, 2), "scores and results of a thread exceed 144 registers"),
        (merged(2, 4, 300, 256, dtype="float32"), Config(1, 32, 1, kept=False), "bytes of shared memory exceed"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(problem: Problem, config: Config, reason: str) -> None:
    assert reason in (kernel.refuse(problem, config) or "")


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("size", [4, 16, 40, 64, 80, 128, 192, 256])
def test_candidates_are_such_that_run(size: int, rounded: bool) -> None:
    for problem in (merged(1, 8, 1000, size, dtype="float32"), merged(1, 1, 4, size, dtype="float32")):
        found = kernel.candidates(replace(problem, rounded=rounded), H200)
        assert found
        for c in found:
            assert kernel.refuse(replace(problem, rounded=rounded), c) is None
            # setmaxnreg would wait forever for registers that the block did not start with.
            total = c.warpgroups * kernel.register_limit(problem, c) + kernel.loading_registers(problem, c)
            assert total <= (c.warpgroups + 1) * kernel.start_registers(c)


def test_one_product_of_rounded_numbers_is_predicted_to_be_faster() -> None:
    config = Config(2, 64, 1)
    assert kernel.estimate(replace(A, rounded=True), config, H200) < kernel.estimate(A, config, H200)


def test_causal_order_and_windows_skip_tiles() -> None:
    whole = apart(1, 2, 1024, 1024, 64, dtype="float32")
    causal, window = replace(whole, causal=True), replace(whole, causal=True, reach=100)
    config = Config(2, 64, 1)
    parts = [kernel.seen_part(p, config) for p in (whole, causal, window)]
    assert parts == [1.0, 0.5 + 0.5 * 192 / 1024, (100 + 128 + 64) / 1024]


# ---------------------------------------------------------------- the tactic


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_attention_on_hopper_is_in_parts_of_fp16(precision: str) -> None:
    program = check_simulated(attention(length=300), precision, target="cuda:sm_90a")
    assert set(tactics(program, "Attention")) == {"attention_parts_sm90"}
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == "Attention"]
    assert bool(step.params["op"]["attrs"].get("tf32")) == (precision == "tf32")


def test_elsewhere_it_refuses() -> None:
    program = lowered(attention(), "fp32", target="cuda:sm_80")
    assert refusals(program, "attention_parts_sm90") == ["it needs Hopper's wgmma (sm_90a), not sm_80"]
    assert set(tactics(program, "Attention")) == {"attention_fp32"}


def test_it_defers_to_the_other_kernel_where_that_is_predicted_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp32_kernel, "estimate", lambda *_: 1e-9)
    program = lowered(attention(length=308), "fp32", target="cuda:sm_90a")
    assert set(tactics(program, "Attention")) == {"attention_fp32"}
    (why,) = refusals(program, "attention_parts_sm90")
    assert why.startswith("it is predicted to take")


@pytest.mark.parametrize(
    ("build", "precision", "reason"),
    [
        (attention, "fp16", "it is for fp32"),
        (lambda: attention(softmax_precision=FP64), "fp32", "its softmax is fp32"),
        (lambda: attention(outputs=4), "fp32", "weights are also an output"),
        (lambda: attention(size=18), "fp32", "heads of 18 features"),
        (lambda: attention(size=260, count=1), "fp32", "heads of 260 features"),
    ],
)
def test_operators_that_the_tactic_refuses(
    build: Any, precision: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PadHeads, "rules", ())  # heads would be padded
    refused = refusals(lowered(build(), precision, target="cuda:sm_90a"), "attention_parts_sm90")
    assert refused
    assert all(reason in r for r in refused)


@pytest.mark.parametrize("batch", [1, 8, 128])
def test_row_invariant_builds_take_one_kernel_for_all_batch_sizes(batch: int) -> None:
    options = BuildOptions(target="simulate", precision="fp32", row_invariant=True)
    graph = attention(batch=batch, length=20)
    optimize(graph, options, "simulate")
    program = lower_cuda(graph, options, H200, {})
    assert set(tactics(program, "Attention")) == {"attention_parts_sm90"}


@pytest.mark.parametrize("window", [{"left_window_size": 1 << 40}, {"right_window_size": (1 << 31) - 1}])
@pytest.mark.parametrize("others", [{}, {"lengths": True}, {"past": 20, "length": 4, "mask": "short"}])
def test_positions_of_wide_windows_do_not_overflow(
    window: dict[str, int], others: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    problems, launch = list[Problem](), kernel.launch

    def recorded(problem: Problem, *rest: Any) -> Any:
        problems.append(problem)
        return launch(problem, *rest)

    monkeypatch.setattr(kernel, "launch", recorded)
    check_simulated(attention(**window, **others), "fp32", target="cuda:sm_90a")
    (p,) = problems
    last = p.keys - 1
    if p.causal:
        assert last <= p.causal_offset - p.from_end * p.queries < 1000, "the first query sees the last key"
    else:
        assert p.queries + p.causal_offset - 1 <= p.reach < 1000, "the last query sees the first key"


# ---------------------------------------------------------------- under NVRTC


@pytest.mark.parametrize("name", sweep(COMPILED, "causal", "widest", "wide, a mask, rounded", "sinks"))
@pytest.mark.nvrtc
def test_candidates_compile_without_spills(name: str) -> None:
    problem = COMPILED[name]
    for config in kernel.candidates(problem, H200, limit=2):
        made = kernel.launch(problem, config, H200)
        check_launch(made, H200, config.blocks)


@pytest.mark.nvrtc
def test_the_parameter_block_has_the_kernels_layout() -> None:
    problem = merged(2, 4, 128, 64, mask=(128, 0, 0), lengths=True, sinks=True, dtype="float32")
    made = kernel.launch(problem, Config(1, 64, 1), H200)
    assert len(made.pointers) == 7
    check_pointers(made, ATTENTION_FIELDS)


# ---------------------------------------------------------------- on a processor

EMULATED: dict[str, Config] = {
    "one tile": Config(1, 16, 2),
    "tails": Config(1, 32, 1),
    "several tiles": Config(2, 64, 2),
    "a head filled up": Config(1, 32, 2),
    "a head of 48": Config(2, 48, 1),
    "a head of 96": Config(1, 32, 2, kept=False),
    "a head of 128": Config(1, 32, 1, kept=False),
    "causal, long tiles": Config(2, 16, 2),
    "causal, some see nothing": Config(1, 16, 2),
    "causal from the end": Config(1, 32, 2),
    "lengths": Config(1, 32, 2),
    "masks of windows": Config(1, 16, 1),
    "grouped queries": Config(1, 16, 2, kept=False),
    "narrow values": Config(1, 32, 1, kept=False),
    "a window of both sides": Config(1, 16, 2),
    "sinks, a softcap and a mask": Config(1, 32, 2),
    "rounded, tails": Config(1, 32, 2),
    "rounded, several tiles": Config(3, 64, 1, kept=False),
}
QUICK = (
    "several tiles",
    "a head of 96",
    "causal, some see nothing",
    "sinks, a softcap and a mask",
    "rounded, several tiles",
)


def emulated_result(case: Case, config: Config, folder: Path) -> np.ndarray:
    """The bytes of the result, computed by emulated warps."""
    made = kernel.launch(case.problem, config, H200)
    products = (HERE / "host_attention.hpp").read_text(encoding="utf-8")
    first, headers = ("fp16_parts.cuh",), ("attention_mma.cuh", "attention_fp32.cuh", "attention_tiles.cuh")
    library = emulated.compiled(made.recipe, made.function, folder, rendered=products, first=first, headers=headers)
    return emulated_bytes(case, made, library)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", sweep(EMULATED, *QUICK))
def test_the_kernel_computes_attention_where_warps_are_emulated(name: str, tmp_path: Path) -> None:
    case, config = Case(PROBLEMS[name]), EMULATED[name]
    assert kernel.refuse(case.problem, config) is None
    case.check(emulated_result(case, config, tmp_path))


@needs_compiler
def test_without_the_rests_it_would_not_be_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first_times_rests = "product(0, 1, false)"  # of keys and of values
    emulated.change_source(monkeypatch, "attention_parts_sm90.cu", first_times_rests, "(void)0", times=2)
    case = Case(PROBLEMS["tails"])
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        case.check(emulated_result(case, EMULATED["tails"], tmp_path))


@needs_compiler
def test_an_infinity_in_a_key_spoils_no_other_query(tmp_path: Path) -> None:
    """Key 40 is seen by queries from 40 on, in causal order."""
    problem = apart(1, 1, 60, 60, 16, causal=True, dtype="float32")
    case = Case(problem)
    case.operands["k"].reshape(60, 16)[40, 3] = np.inf
    raw = emulated_result(case, Config(1, 32, 1), tmp_path)
    got = seen(raw.view(np.float32)[32:], problem.out, case.want.shape)
    np.testing.assert_allclose(got[..., :40, :], case.want[..., :40, :], rtol=0, atol=4e-6)
    assert not np.isfinite(got[..., 40:, :]).all()


# ---------------------------------------------------------------- on a GPU


def result(case: Case, config: Config, folder: Path) -> np.ndarray:
    made = kernel.launch(case.problem, config, H200)
    return result_on_a_gpu(made, case.operands, case.poisoned(), 32 * case.out_dtype.itemsize, folder)


@pytest.mark.hopper
@pytest.mark.parametrize("name", [*PROBLEMS, *COMPILED])
def test_on_a_gpu(name: str, tmp_path: Path) -> None:
    problem = PROBLEMS.get(name) or COMPILED[name]
    case = Case(problem)
    for config in kernel.candidates(problem, H200, limit=12):
        case.check(result(case, config, tmp_path))


@pytest.mark.hopper
@pytest.mark.parametrize("name", ["several tiles", "a head of 96"])
def test_maxima_that_grow_on_a_gpu(name: str, tmp_path: Path) -> None:
    """Scores reach 500: weights are as exact as those of NumPy's fp32."""
    problem = PROBLEMS[name]
    case = Case(problem, growing=True)
    shape = (problem.batch, problem.heads, problem.queries, problem.features)
    q, k, v = (
        seen(case.operands[n], view, shape) for n, view in zip("qkv", (problem.q, problem.k, problem.v), strict=True)
    )
    scores = q @ k.swapaxes(2, 3) * np.float32(problem.scale)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    error = np.abs(weights / weights.sum(-1, keepdims=True) @ v - case.want).max()
    for config in kernel.candidates(problem, H200, limit=4):
        got = seen(result(case, config, tmp_path).view(np.float32)[32:], problem.out, shape)
        assert np.abs(got - case.want).max() < error


@pytest.mark.hopper
def test_numbers_of_all_sizes_on_a_gpu(tmp_path: Path) -> None:
    """Scales of queries, keys and values are far from 1, and differ from tile to tile."""
    problem = replace(apart(1, 2, 70, 200, 64, dtype="float32"), scale=1.0)
    case = Case(problem)
    q, k, v = (case.operands[n].reshape(2, -1, 64) for n in "qkv")
    powers = np.repeat([2.0**40, 2.0**-12, 2.0**30, 2.0**38], 50).astype(np.float32)[:, None]
    q *= np.float32(2.0**-41)
    k *= powers
    v *= np.float32(2.0**100)
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(1, 2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    case.want = ((weights / weights.sum(-1, keepdims=True)) @ v.astype(np.float64))[None]
    for config in kernel.candidates(problem, H200, limit=4):
        raw = result(case, config, tmp_path)
        got = seen(raw.view(np.float32)[32:], problem.out, case.want.shape)
        np.testing.assert_allclose(got, case.want, rtol=0, atol=2e-6 * np.abs(case.want).max())


@pytest.mark.hopper
@pytest.mark.parametrize("zeros", ["q", "k", "qk"])
@pytest.mark.parametrize("causal", [False, True])
def test_zeros_see_all_keys_alike_on_a_gpu(zeros: str, causal: bool, tmp_path: Path) -> None:
    """Scores of zeros are zero also where keys are hidden, behind the last one or in causal order."""
    problem = apart(1, 2, 150, 150, 64, causal=causal, dtype="float32")
    case = Case(problem)
    for name in zeros:
        case.operands[name][...] = 0
    v = case.operands["v"].reshape(2, 150, 64).astype(np.float64)
    mean = np.broadcast_to(v.mean(axis=1, keepdims=True), v.shape)
    case.want = (np.cumsum(v, axis=1) / np.arange(1, 151)[:, None] if causal else mean)[None]
    for config in kernel.candidates(problem, H200, limit=4):
        got = seen(result(case, config, tmp_path).view(np.float32)[32:], problem.out, case.want.shape)
        np.testing.assert_allclose(got, case.want, rtol=0, atol=4e-6)


@pytest.mark.hopper
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_spoils_no_other_query_on_a_gpu(value: float, tmp_path: Path) -> None:
    """Key 90 is seen by queries from 90 on, in causal order. The queries before have their results."""
    problem = apart(1, 1, 150, 150, 64, causal=True, dtype="float32")
    case = Case(problem)
    case.operands["k"].reshape(150, 64)[90, 3] = value
    for config in kernel.candidates(problem, H200, limit=4):
        got = seen(result(case, config, tmp_path).view(np.float32)[32:], problem.out, case.want.shape)
        np.testing.assert_allclose(got[..., :90, :], case.want[..., :90, :], rtol=0, atol=4e-6)
        assert np.isnan(got[..., 90:, :]).any()
