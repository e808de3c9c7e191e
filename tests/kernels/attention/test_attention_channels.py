"""The kernel of attention between channels: its plans, the very kernel on a processor that emulates warps, under NVRTC, on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import emulated
from support.attention_cases import result_on_a_gpu
from support.host import COMPILER, WHY_NOT
from support.needs import why_no_hopper
from support.sweep import sweep

from optdnn.kernels.attention import channels_kernel as channels
from optdnn.kernels.attention.channels_kernel import Config, Problem
from optdnn.kernels.attention.hopper_kernel import HeadView, bshd
from optdnn.runtime.cuda import gpu_facts
from optdnn.runtime.cuda.compile import nvrtc

AMPERE = gpu_facts.of_arch("sm_80")
EPSILON = (1e-12, 0.5)


def merged(batch: int, heads: int, tokens: int, size: int, **options: Any) -> Problem:
    """q, k and v in the output of one joint projection."""
    q, k, v = (bshd(tokens, heads, size, parts=3, part=i) for i in range(3))
    return Problem(batch, heads, size, tokens, q, k, v, bshd(tokens, heads, size), **{"least": EPSILON, **options})


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
    "not normalized": (merged(1, 2, 50, 32, least=None), Config(4, 1)),
    "any norm": (merged(1, 2, 50, 32, least=(0.0, 0.0)), Config(4, 1)),
}
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.5e-2}


class Case:
    """Random operands of a problem, and what float64 makes of them. A channel of the queries is zero."""

    def __init__(self, p: Problem):
        self.problem, rng = p, np.random.default_rng(0)
        self.dtype = np.dtype(np.float16 if p.dtype == "float16" else ml_dtypes.bfloat16)
        whole = rng.standard_normal((p.batch, p.tokens, 3, p.heads, p.channels))
        whole *= 0.2 if p.least is None else 3.0
        whole[:, :, 0, :, 1] = 0.0
        self.whole = whole.astype(np.float32).astype(self.dtype)
        self.factors = np.linspace(0.5, 8.0, p.heads).astype(np.float32)
        q, k, v = self.whole.astype(np.float64).transpose(2, 0, 3, 4, 1)
        if p.least is not None:
            norms = [
                np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), e) for x, e in zip((q, k), p.least, strict=True)
            ]
            q, k = (x / np.where(n == 0, 1, n) for x, n in zip((q, k), norms, strict=True))
        scores = q @ k.swapaxes(2, 3) * self.factors[:, None, None]
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        self.want = ((weights / weights.sum(-1, keepdims=True)) @ v).transpose(0, 3, 1, 2)

    def poisoned(self) -> np.ndarray:
        """A result full of NaN, with room at both ends."""
        return np.full(self.want.size * 2 + 128, 0xFF, np.uint8)

    def check(self, raw: np.ndarray) -> None:
        assert (raw[:64] == 0xFF).all()
        assert (raw[-64:] == 0xFF).all()
        got = raw[64:-64].view(self.dtype).reshape(self.want.shape).astype(np.float64)
        limit = TOLERANCE[self.problem.dtype] * max(np.abs(self.want).max(), 1)
        np.testing.assert_allclose(got, self.want, rtol=0, atol=limit)


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
@pytest.mark.parametrize("name", sweep(CASES, *list(CASES)[::3]))
def test_the_kernel_where_warps_are_emulated(name: str, tmp_path: Path) -> None:
    problem, config = CASES[name]
    assert channels.refuse(problem) is None
    case, made = Case(problem), channels.launch(problem, config, AMPERE)
    library = emulated.compiled(made.recipe, made.function, tmp_path)
    raw, whole, factors = (emulated.aligned(a) for a in (case.poisoned(), case.whole, case.factors))
    operands = dict.fromkeys("qkv", whole.ctypes.data)
    emulated.run(library, made, {**operands, "out": raw.ctypes.data + 64, "factors": factors.ctypes.data})
    case.check(raw)


def test_the_emulation_notices_a_wrong_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if COMPILER is None:
        pytest.skip(str(WHY_NOT))
    monkeypatch.setitem(CASES, "wrong", (replace(merged(1, 2, 50, 32), least=(100.0, 100.0)), Config(4, 1)))
    right = Case.__init__

    def wrong(self: Case, p: Problem) -> None:
        right(self, replace(p, least=EPSILON))

    monkeypatch.setattr(Case, "__init__", wrong)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        test_the_kernel_where_warps_are_emulated("wrong", tmp_path)


A = merged(2, 4, 196, 48)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (replace(A, channels=47), "47 channels"),
        (replace(A, channels=66), "66 channels"),
        (replace(A, tokens=2000), "2000 tokens"),
        (replace(A, k=HeadView(8, 3, 8)), "k: pairs"),
        (replace(A, q=HeadView(8, 8, 1 << 31)), "q: positions are 2147483648 elements apart"),
        (replace(A, batch=70000), "grid"),
    ],
)
def test_what_it_cannot_run_it_refuses(problem: Problem, reason: str) -> None:
    assert channels.refuse(A) is None
    assert reason in (channels.refuse(problem) or "")
    assert channels.candidates(problem, AMPERE) == []


def test_copies_are_as_wide_as_all_strides_allow() -> None:
    assert A.width == 16
    assert replace(A, unit=2).width == merged(1, 4, 100, 42).width == 4


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.nvrtc
def test_candidates_compile_without_spills(arch: str) -> None:
    gpu = gpu_facts.of_arch(arch)
    for problem in (A, merged(1, 4, 100, 42, dtype="bfloat16"), merged(1, 8, 784, 64, least=None)):
        found = channels.candidates(problem, gpu)
        assert found
        assert len({str(c) for c in found}) == len(found)
        for config in found[:2]:
            made = channels.launch(problem, config, gpu)
            kernel = nvrtc.resources(made.recipe)[made.function]
            assert kernel.spill_bytes == kernel.stack_bytes == 0, (config, kernel)
            assert made.shared + kernel.shared_bytes <= gpu.shared_per_block


@pytest.mark.nvrtc
def test_the_parameter_block_has_the_kernels_layout() -> None:
    made = channels.launch(A, Config(4, 1), AMPERE)
    recipe = made.recipe
    names = {"q": "queries", "k": "keys", "v": "values", "out": "output"}
    lines = [f"static_assert(sizeof(Params) == {len(made.parameters)});"]
    lines += [
        f"static_assert(__INTADDR__(&((Params*)0)->{names.get(p.operand, p.operand)}) == {p.at});"
        for p in made.pointers
    ]
    at = len(made.parameters) - 4 * 24  # after a view's last field C leaves four bytes
    lines += [f"static_assert(__INTADDR__(&((Params*)0)->of_queries) == {at});"]
    assert len(made.pointers) == 5
    text = "\n".join([f'#include "{recipe.name}"', *lines, ""])
    nvrtc.compile_recipe(replace(recipe, name="check.cu", generated={**recipe.generated, "check.cu": text}))


@pytest.mark.gpu
@pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, tmp_path: Path) -> None:
    problem, config = CASES[name]
    case = Case(problem)
    made = channels.launch(problem, config, gpu_facts.of_arch("sm_90a"))
    operands = {**dict.fromkeys("qkv", case.whole), "factors": case.factors}
    case.check(result_on_a_gpu(made, operands, case.poisoned(), 64, tmp_path))
