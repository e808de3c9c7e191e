"""The kernels of attention between channels, and of normalized linear attention: plans, runs on a processor with emulated warps, under NVRTC, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import emulated
from support.attention_cases import bshd, result_on_a_gpu
from support.covering import covering
from support.host import needs_compiler
from support.layout import ATTENTION_FIELDS, check_pointers
from support.spills import check_spills
from support.sweep import sweep

from optdnn.kernels.attention import channels_kernel as channels
from optdnn.kernels.attention.channels_kernel import Config, Divided, Problem
from optdnn.kernels.attention.problem import HeadView
from optdnn.runtime.cuda import gpu_facts
from optdnn.runtime.reference.attention import normalized_linear_attention
from optdnn.runtime.reference.run import run_kernel

HEADERS = ("attention_channels.cuh",)
AMPERE = gpu_facts.of_arch("sm_80")
EPSILON = (1e-12, 0.5)


def merged(batch: int, heads: int, tokens: int, size: int, **options: Any) -> Problem:
    """q, k and v in the output of one joint projection."""
    q, k, v = (bshd(tokens, heads, size, parts=3, part=i) for i in range(3))
    return Problem(batch, heads, size, tokens, q, k, v, bshd(tokens, heads, size), **{"least": EPSILON, **options})


def linear(*sizes: int, epsilon: float = 1e-5, rectified: bool = True, **options: Any) -> Problem:
    """Normalized linear attention. The first part is its values, the last one its queries."""
    return merged(*sizes, least=None, divided=Divided(epsilon, rectified), **options)


CASES: dict[str, tuple[Problem, Config]] = {
    "XCiT": (merged(1, 4, 196, 48), Config(8, 2)),
    "XCiT, four warps": (merged(2, 2, 196, 48), Config(4, 3)),
    "one token": (merged(1, 2, 1, 32), Config(4, 1)),
    "few tokens": (merged(2, 1, 37, 16, dtype="bfloat16"), Config(8, 1)),
    "a ring that turns": (merged(1, 1, 300, 64), Config(4, 2)),
    "a ring of one": (merged(1, 2, 130, 32), Config(4, 1)),
    "heads of 42": (merged(1, 4, 100, 42), Config(8, 1)),
    "heads of 22": (merged(2, 4, 64, 22, dtype="bfloat16"), Config(4, 1)),
    "heads of 12": (merged(1, 3, 70, 12), Config(4, 2)),
    "heads of 8": (merged(1, 3, 70, 8), Config(4, 2)),
    "heads of 25": (merged(1, 3, 70, 25), Config(4, 2)),
    "heads of 9": (merged(2, 3, 40, 9, dtype="bfloat16"), Config(4, 1)),
    "not normalized": (merged(1, 2, 50, 32, least=None), Config(4, 1)),
    "any norm": (merged(1, 2, 50, 32, least=(0.0, 0.0)), Config(4, 1)),
    "EfficientViT": (linear(2, 3, 196, 16), Config(4, 2)),
    "linear, no epsilon": (linear(1, 2, 70, 32, epsilon=0.0, rectified=False), Config(8, 1)),
    "linear, heads of 25": (linear(2, 1, 40, 25, dtype="bfloat16"), Config(4, 1)),
    "linear, a large epsilon": (linear(1, 2, 50, 64, epsilon=30.0, rectified=False), Config(4, 2)),
}
PARTS: dict[str, tuple[Problem, Config]] = {
    "DaViT": (merged(1, 3, 800, 32, least=None), Config(8, 2, 2)),
    "four warps": (merged(2, 2, 300, 48), Config(4, 2, 2)),
    "many parts": (merged(1, 1, 700, 16, dtype="bfloat16"), Config(4, 1, 1)),
    "a last part of one token": (merged(1, 2, 257, 64), Config(8, 2, 2)),
    "a ring that turns": (merged(1, 1, 530, 64), Config(4, 2, 4)),
    "heads of 42": (merged(1, 2, 150, 42), Config(8, 1, 1)),
    "heads of 25": (merged(1, 3, 150, 25), Config(4, 1, 1)),
    "any norm": (merged(1, 2, 130, 32, least=(0.0, 0.0)), Config(4, 1, 1)),
    "Restormer's last stage, two bands": (merged(1, 1, 600, 96), Config(8, 2, 2)),
    "two bands, the second one not full": (merged(2, 1, 150, 72, dtype="bfloat16"), Config(4, 2, 2)),
    "four bands, the last one not full": (merged(1, 2, 140, 104), Config(4, 1, 1)),
    "four bands": (merged(1, 1, 100, 128, least=None), Config(8, 1, 1)),
    "bands, heads of 90": (merged(1, 2, 80, 90), Config(4, 1, 1)),
    "bands, heads of 65": (merged(1, 1, 20, 65), Config(4, 1, 1)),
    "EfficientViT, many tokens": (linear(1, 2, 300, 32), Config(4, 2, 2)),
    "linear, bands": (linear(1, 1, 150, 96, rectified=False, dtype="bfloat16"), Config(4, 1, 1)),
}
"""Cases in two launches."""
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.5e-2}


class Case:
    """Random operands of a problem, and its result in float64. One channel of the queries is zero.

    Linear attention: values of two heads differ by 2^20, and the first token's query is zero if there is an epsilon."""

    def __init__(self, p: Problem):
        self.problem, rng = p, np.random.default_rng(0)
        self.dtype = np.dtype(np.float16 if p.dtype == "float16" else ml_dtypes.bfloat16)
        whole = rng.standard_normal((p.batch, p.tokens, 3, p.heads, p.channels))
        whole *= 0.2 if p.least is None else 3.0
        whole[:, :, 0, :, 1] = 0.0
        if p.divided is not None:
            whole *= 5.0
            whole[:, :, 0, -1] *= 2.0**-10
            whole[:, :, 0, 0] *= 2.0**10
            whole[:, :, 1:] = whole[:, :, 1:] if p.divided.rectified else np.abs(whole[:, :, 1:])
            whole[:, :1, 2] *= not p.divided.epsilon
        self.whole = whole.astype(np.float32).astype(self.dtype)
        self.factors = np.linspace(0.5, 8.0, p.heads).astype(np.float32)
        q, k, v = self.whole.astype(np.float64).transpose(2, 0, 3, 4, 1)
        if p.divided is not None:
            parts = (x.swapaxes(2, 3) for x in (v, k, q))
            made = normalized_linear_attention(*parts, epsilon=p.divided.epsilon, rectified=p.divided.rectified)[0]
            self.want = (made * self.factors[:, None, None]).transpose(0, 2, 1, 3)
            return
        if p.least is not None:
            norms = [
                np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), e) for x, e in zip((q, k), p.least, strict=True)
            ]
            q, k = (x / np.where(n == 0, 1, n) for x, n in zip((q, k), norms, strict=True))
        scores = q @ k.swapaxes(2, 3) * self.factors[:, None, None]
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        self.want = ((weights / weights.sum(-1, keepdims=True)) @ v).transpose(0, 3, 1, 2)

    def poisoned(self) -> np.ndarray:
        """A result full of NaN, with space before and after it."""
        return np.full(self.want.size * 2 + 128, 0xFF, np.uint8)

    def check(self, raw: np.ndarray) -> None:
        assert (raw[:64] == 0xFF).all()
        assert (raw[-64:] == 0xFF).all()
        got = raw[64:-64].view(self.dtype).reshape(self.want.shape).astype(np.float64)
        size = 1 if self.problem.divided is None else 0  # linear attention: heads of different magnitudes
        limits = TOLERANCE[self.problem.dtype] * np.abs(self.want).max((1, 3), keepdims=True, initial=size)
        worst = (np.abs(got - self.want) / limits).max()
        assert worst <= 1, f"{worst:.3g} times the limit"


@needs_compiler
@pytest.mark.parametrize("name", sweep(CASES, *list(CASES)[::6], "linear, no epsilon"))
def test_the_kernel_where_warps_are_emulated(name: str, tmp_path: Path) -> None:
    problem, config = CASES[name]
    assert channels.refuse(problem) is None
    case, made = Case(problem), channels.launch(problem, config, AMPERE)
    library = emulated.compiled(made.recipe, made.function, tmp_path, headers=HEADERS)
    raw, whole, factors = (emulated.aligned(a) for a in (case.poisoned(), case.whole, case.factors))
    operands = dict.fromkeys("qkv", whole.ctypes.data)
    emulated.run(library, made, {**operands, "out": raw.ctypes.data + 64, "factors": factors.ctypes.data})
    case.check(raw)


@needs_compiler
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("name", sweep(PARTS, *list(PARTS)[::6], "EfficientViT, many tokens"))
def test_two_launches_where_warps_are_emulated(
    name: str, turns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, config = PARTS[name]
    if turns:  # one block per head computes all results, one after the other
        monkeypatch.setattr(channels, "_result_blocks", lambda *a: 1)
    case, made = Case(problem), channels.launches(problem, config, AMPERE)
    room = problem.batch * problem.heads * channels.parts(problem, config) * channels.part_floats(problem)
    sums = emulated.aligned(np.full(room, np.nan, np.float32))
    raw, whole, factors = (emulated.aligned(a) for a in (case.poisoned(), case.whole, case.factors))
    operands = dict.fromkeys("qkv", whole.ctypes.data)
    operands |= {"out": raw.ctypes.data + 64, "factors": factors.ctypes.data, "sums": sums.ctypes.data}
    for one in made:
        (folder := tmp_path / one.function).mkdir()
        library = emulated.compiled(one.recipe, one.function, folder, headers=HEADERS)
        emulated.run(library, one, operands)
    case.check(raw)
    check_sums(case, config, sums)


def check_sums(case: Case, config: Config, sums: np.ndarray) -> None:
    """The sums are those of the first launch's meaning, with zeros after the channels."""
    p = case.problem
    q, k = (case.whole.astype(np.float64)[:, :, i].transpose(0, 2, 3, 1) for i in range(2))
    if p.divided is None:
        (want,) = run_kernel("ChannelSums", [q, k], {"span": config.span})
    else:
        attrs = {"span": config.span, "rectified": p.divided.rectified}
        (want,) = run_kernel("LinearSums", [k.swapaxes(2, 3), q.swapaxes(2, 3)], attrs)
    got = sums.reshape(p.batch, p.heads, channels.parts(p, config), 2 + p.filled, p.filled)
    assert not got[..., p.channels :].any()
    np.testing.assert_allclose(
        got[..., : 2 + p.channels, : p.channels], want, rtol=1e-4, atol=2e-6 * np.abs(want).max() + 1e-3
    )


@needs_compiler
def test_the_emulation_notices_a_wrong_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "wrong", (replace(merged(1, 2, 50, 32), least=(100.0, 100.0)), Config(4, 1)))
    right = Case.__init__

    def wrong(self: Case, p: Problem) -> None:
        right(self, replace(p, least=EPSILON))

    monkeypatch.setattr(Case, "__init__", wrong)
    with pytest.raises(AssertionError, match="times the limit"):
        test_the_kernel_where_warps_are_emulated("wrong", tmp_path)


A = merged(2, 4, 196, 48)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (replace(A, channels=129), "129 channels"),
        (replace(A, channels=1), "1 channels"),
        (replace(A, tokens=0), "no tokens"),
        (replace(A, k=HeadView(8, -8, 8)), "k: strides"),
        (replace(A, q=HeadView(8, 8, 1 << 31)), "q: positions are 2147483648 elements apart"),
        (replace(A, batch=70000), "grid"),
    ],
)
def test_refusals(problem: Problem, reason: str) -> None:
    assert channels.refuse(A) is None
    assert reason in (channels.refuse(problem) or "")
    assert channels.candidates(problem, AMPERE) == []


def test_copies_are_as_wide_as_all_strides_allow() -> None:
    assert A.width == 16
    assert replace(A, unit=2).width == merged(1, 4, 100, 42).width == 4
    assert replace(A, out=HeadView(8, 3, 8)).width == merged(1, 4, 100, 25).width == 2


@pytest.mark.parametrize("gpu", [AMPERE, gpu_facts.of_arch("sm_90a")])
def test_many_tokens_are_summed_up_in_parts(gpu: gpu_facts.GpuFacts) -> None:
    """DaViT's first stage, and Restormer's first stage and its last one, for images of 512 x 512 and 128 x 128. Few tokens take one
    launch."""
    davit, restormer = merged(1, 3, 3136, 32, least=None), merged(1, 1, 512 * 512, 48)
    last = merged(1, 1, 128 * 128, 96)
    for problem, most in ((davit, 10e-6), (replace(davit, batch=16), 35e-6), (restormer, 110e-6), (last, 40e-6)):
        best = channels.candidates(problem, gpu)[0]
        assert best.depth
        assert channels.estimate(problem, best, gpu) < most
    assert not channels.candidates(A, gpu)[0].depth


def test_the_queries_of_large_heads_have_bands() -> None:
    """A band is as large as a warp's registers allow. Its block also sums up the squares of its own queries."""
    assert [(p.rows, p.bands) for p in (merged(1, 1, 9, n) for n in (48, 64, 65, 96, 104, 128))] == [
        (48, 1), (64, 1), (48, 2), (48, 2), (32, 4), (32, 4),
    ]  # fmt: skip
    for tokens in (1, 20, 4096):
        found = channels.candidates(merged(1, 1, tokens, 96), AMPERE)
        assert found
        assert all(c.depth for c in found)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.nvrtc
def test_candidates_compile_without_spills(arch: str) -> None:
    gpu, launches = gpu_facts.of_arch(arch), {}
    tested = [A, merged(1, 4, 100, 42, dtype="bfloat16"), merged(1, 8, 784, 64, least=None), merged(1, 8, 150, 25)]
    tested += [merged(1, 1, 4096, size) for size in (65, 96, 128)]
    for problem in tested if arch == "sm_90a" else tested[::3]:
        found = channels.candidates(problem, gpu)
        assert found
        assert len({str(c) for c in found}) == len(found)
        ones, twos = ([c for c in found if bool(c.depth) == two] for two in (False, True))
        for config in (*ones[:1], *twos[:1]):
            made = channels.launches(problem, config, gpu) if config.depth else (channels.launch(problem, config, gpu),)
            launches |= {f"{problem}, {config}, {one.function}": one for one in made}
    for name in covering({name: one.recipe for name, one in launches.items()}):
        kernel = check_spills(launches[name].recipe, launches[name].function)
        assert launches[name].shared + kernel.shared_bytes <= gpu.shared_per_block


LAUNCHES = {
    "one": (lambda: channels.launch(A, Config(4, 1), AMPERE), 5, 4),
    "sums": (lambda: channels.launches(A, Config(4, 1, 1), AMPERE)[0], 3, 2),
    "results": (lambda: channels.launches(A, Config(4, 1, 1), AMPERE)[1], 4, 2),
}


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.nvrtc
def test_the_parameter_block_has_the_kernels_layout(name: str) -> None:
    make, pointers, views = LAUNCHES[name]
    made = make()
    assert len(made.pointers) == pointers
    at = len(made.parameters) - views * 24  # C adds four bytes after the last field of a view
    first = "of_values" if name == "results" else "of_queries"
    check_pointers(made, ATTENTION_FIELDS, f"__INTADDR__(&((Params*)0)->{first}) == {at}")


@pytest.mark.hopper
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, tmp_path: Path) -> None:
    problem, config = CASES[name]
    case = Case(problem)
    made = channels.launch(problem, config, gpu_facts.of_arch("sm_90a"))
    operands = {**dict.fromkeys("qkv", case.whole), "factors": case.factors}
    case.check(result_on_a_gpu(made, operands, case.poisoned(), 64, tmp_path))


@pytest.mark.hopper
@pytest.mark.parametrize("name", PARTS)
def test_two_launches_on_a_gpu(name: str, tmp_path: Path) -> None:
    problem, config = PARTS[name]
    case, gpu = Case(problem), gpu_facts.of_arch("sm_90a")
    first, second = channels.launches(problem, config, gpu)
    room = problem.batch * problem.heads * channels.parts(problem, config) * channels.part_floats(problem)
    empty = np.full(room * 4, 0xFF, np.uint8)
    sums = result_on_a_gpu(first, dict.fromkeys("qk", case.whole), empty, 0, tmp_path, "sums").view(np.float32)
    check_sums(case, config, sums)
    operands = {"v": case.whole, "factors": case.factors, "sums": sums}
    case.check(result_on_a_gpu(second, operands, case.poisoned(), 64, tmp_path))
