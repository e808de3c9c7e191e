"""Attention of one query over all keys: plans, the kernel on a processor with emulated warps, under NVRTC and on a GPU, and the tactic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import emulated
from support.attention_cases import Case, apart, merged, result_on_a_gpu, wide_values
from support.host import needs_compiler
from support.layout import ATTENTION_FIELDS, check_pointers
from support.net import Net
from support.quantized_nets import attention_network
from support.sequence_cases import attention
from support.simulated import check_not_taken, check_simulated, lowered, tactics
from support.spills import check_spills
from support.sweep import sweep

from optdnn.config import BuildOptions
from optdnn.ir.graph import Graph
from optdnn.kernels.attention import cached_kernel
from optdnn.kernels.attention import one_query_kernel as plans
from optdnn.kernels.attention.cached_kernel import Config
from optdnn.kernels.attention.problem import Problem
from optdnn.kernels.megakernel.jobs import job_of
from optdnn.lowering.cuda import lower_cuda
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.optimize import optimize
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.launches.plan import parse
from optdnn.types import FP16, FP32

CASES: dict[str, tuple[Problem, Config]] = {
    "one tile": (apart(1, 2, 1, 10, 64), Config(4, 1)),
    "few keys, many blocks": (apart(2, 4, 1, 37, 64, 2), Config(4, 4)),
    "a mask of keys": (apart(2, 8, 1, 129, 64, 2, mask=(129, 0, 0)), Config(4, 2)),
    "a mask of heads, bf16": (apart(2, 6, 1, 150, 32, 2, mask=(6 * 150, 150, 0), dtype="bfloat16"), Config(4, 3)),
    "a mask of groups of 12": (apart(2, 12, 1, 131, 64, 1, mask=(12 * 131, 131, 0)), Config(2, 3)),
    "one mask": (apart(3, 4, 1, 90, 128, mask=(0, 0, 0)), Config(8, 1)),
    "lengths": (apart(4, 4, 1, 200, 48, 2, lengths=True), Config(4, 2)),
    "lengths and a mask": (apart(4, 4, 1, 200, 64, 2, lengths=True, mask=(200, 0, 0)), Config(4, 3)),
    "causal at the last key": (apart(2, 4, 1, 70, 64, causal=True, causal_offset=69), Config(4, 2)),
    "a window": (apart(2, 4, 1, 170, 64, 2, causal=True, causal_offset=169, reach=40), Config(4, 2)),
    "a window from the end": (
        apart(4, 4, 1, 170, 64, 2, lengths=True, causal=True, from_end=True, reach=40),
        Config(4, 2),
    ),
    "a softcap and a mask": (apart(2, 4, 1, 100, 64, 2, softcap=1.5, mask=(100, 0, 0)), Config(4, 2)),
    "sinks and a mask": (apart(2, 4, 1, 100, 64, 2, sinks=True, mask=(100, 0, 0)), Config(4, 2)),
    "heads of 256": (apart(1, 4, 1, 90, 256, 1, mask=(0, 0, 0)), Config(4, 2)),
}


def operands(case: Case, config: Config) -> dict[str, np.ndarray]:
    partial, arrived = cached_kernel.workspace(plans.cached_problem(case.problem), config)
    return {**case.operands, "partial": np.full(partial, 0xFF, np.uint8), "arrived": np.zeros(arrived, np.uint8)}


@needs_compiler
@pytest.mark.parametrize(
    "name", sweep(CASES, "a mask of keys", "a mask of groups of 12", "a softcap and a mask", "a window", "lengths")
)
def test_the_kernel_on_a_processor(name: str, tmp_path: Path) -> None:
    problem, config = CASES[name]
    assert plans.refuse(problem, config) is None
    case, made = Case(problem), plans.launch(problem, config, of_arch("sm_90a"))
    library = emulated.compiled(made.recipe, made.function, tmp_path, inside=["attention_cached.cuh"])
    raw = emulated.aligned(case.poisoned())
    held = {n: emulated.aligned(a) for n, a in operands(case, config).items()}
    emulated.run(library, made, {n: a.ctypes.data for n, a in held.items()} | {"out": raw.ctypes.data + 64})
    case.check(raw)


@pytest.mark.hopper
@pytest.mark.parametrize("config", [None, Config(8, 8), Config(8, 8, True), Config(4, 2, True)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_on_a_gpu(name: str, config: Config | None, tmp_path: Path) -> None:
    problem, own = CASES[name]
    case, config = Case(problem), config or own
    made = plans.launch(problem, config, of_arch("sm_90a"))
    case.check(result_on_a_gpu(made, operands(case, config), case.poisoned(), 64, tmp_path))


@pytest.mark.parametrize(
    ("problem", "because"),
    [
        (merged(1, 2, 2, 64), "one query, not 2"),
        (wide_values(1, 2, 1, 64, 32), "values of 32 features"),
        (apart(1, 2, 1, 20, 64, causal=True), "not at the last key"),
        (apart(1, 2, 1, 20, 64, reach=3, lengths=True, causal_offset=1, from_end=True), "not at the last key"),
        (apart(4, 2, 1, 20, 64, mask=(20, 0, 0), mask_period=2), "in turn"),
        (apart(1, 2, 1, 20, 40), "heads of 40 features"),
    ],
)
def test_refusals(problem: Problem, because: str) -> None:
    assert because in str(plans.refuse(problem, Config(4, 1)))


@pytest.mark.nvrtc
@pytest.mark.parametrize("config", [Config(8, 8, True), Config(4, 8)], ids=str)
def test_the_parameter_block_has_the_kernels_layout(config: Config) -> None:
    made = plans.launch(replace(CASES["sinks and a mask"][0], lengths=True), config, of_arch("sm_90a"))
    assert len(made.pointers) == (7 if config.cluster else 9)
    check_pointers(made, ATTENTION_FIELDS)


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100", "sm_120"])
def test_kernels_do_not_spill(arch: str) -> None:
    problems = (
        apart(1, 16, 1, 2048, 128, 1, mask=(0, 2048, 0), softcap=1.0, sinks=True),
        apart(1, 32, 1, 2048, 128, 8, mask=(0, 0, 0)),
        apart(1, 8, 1, 2048, 256, 1, mask=(0, 0, 0), dtype="bfloat16"),
    )
    for problem in problems if arch == "sm_90a" else problems[:1]:
        for config in (Config(4, 1), Config(8, 8, True)) if arch.startswith("sm_90") else (Config(4, 1),):
            check_spills(cached_kernel.recipe(plans.cached_problem(problem), config, arch))


# ---------------------------------------------------------------- the tactic


def step(
    *, keys: int = 1500, heads: int = 4, groups: int = 2, size: int = 64, rows: int = 1, masked: str = "", past: bool = False,
    batch: int = 2, filled: bool = False, dtype: Any = FP16, **attrs: Any,
) -> Graph:  # fmt: skip
    """A query of ``rows`` rows over keys that are a Concat of a cache and new rows, or (``past``) operands of the attention."""
    n = Net(dtype)
    q = n.op("Abs", n.input(batch, heads, rows, size, name="q"))
    new, old = ([n.op("Abs", n.input(batch, groups, c, size, name=f"{x}{c}")) for x in "kv"] for c in (1, keys - 1))
    k, v = new if past else (n.op("Concat", a, b, attrs=ConcatAttrs(2)) for a, b in zip(old, new, strict=True))
    mask = None
    if masked:
        shape = {"keys": (batch, 1, 1, keys), "heads": (batch, heads, 1, keys), "bool": (batch, 1, 1, keys)}[masked]
        mask = n.op("Neg", n.op("Abs", n.input(*shape, name="mask")))
        mask = n.op("Greater", mask, n.const([-1.0])) if masked == "bool" else mask
    length = [n.const(np.arange(keys - batch, keys), np.int64)] if filled else []
    more = [mask, *(old if past else (None, None)), *length]
    return n.done(n.op("Attention", q, k, v, *more, attrs=AttentionAttrs(**attrs)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"masked": "keys"},
        {"masked": "heads", "softcap": 2.0},
        {"masked": "bool"},
        {"past": True, "is_causal": True},
        {"past": True, "left_window_size": 900},
        {"groups": 4, "scale": 0.2},
        {"filled": True, "is_causal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("target", ["simulate", "cuda:sm_80"])
def test_one_query_over_many_keys(options: dict[str, Any], target: str) -> None:
    program = check_simulated(step(**options), target=target)
    assert tactics(program, "Attention") == ["attention_query"]


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"rows": 2}, "one query, not 2"),
        ({"keys": 33}, "it is predicted to take"),
        ({"is_causal": True}, "not at the last key"),
        ({"size": 40}, "heads of 40 features"),
    ],
    ids=str,
)
def test_other_attentions(options: dict[str, Any], because: str) -> None:
    check_not_taken(step(**options), "attention_query", because)


def test_fp32_has_another_kernel() -> None:
    check_not_taken(step(dtype=FP32), "attention_query", "it is for 16-bit floats", precision="fp32")


def test_a_quantized_result() -> None:
    """This kernel stores no integers; the kernel that does is preferred."""
    program = check_simulated(attention_network(np.int8, size=64, rows=1, keys=1500))
    assert tactics(program, "Attention") == ["attention_sm90"]


def test_it_is_no_job_of_a_megakernel() -> None:
    program = lowered(step(masked="keys"), target="cuda:h200")
    plans = [(s, launch) for s in program.steps if (launch := parse(s, program).launch) is not None]
    ((one, launch),) = ((s, x) for s, x in plans if program.kernels[x.kernel].function == "attention_cached")
    assert job_of(one, launch, program) == "it writes no row of a cache"


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("keys", [40, 1024])
def test_row_invariant_builds_take_one_kernel_for_all_batch_sizes(batch: int, keys: int) -> None:
    options = BuildOptions(target="simulate", precision="fp16", row_invariant=True)
    graph = attention(batch=batch, length=1, keys=keys, size=64)
    optimize(graph, options, "simulate")
    assert set(tactics(lower_cuda(graph, options, of_arch("sm_90a"), {}), "Attention")) == {"attention_query"}
