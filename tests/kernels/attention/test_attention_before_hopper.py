"""Fused attention on mma.sync as a tactic: before Hopper, and on Hopper for heads that its own kernel does not support."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.quantized_nets import FP8, attention_network
from support.sequence_cases import ATTENTION, attention
from support.simulated import check_simulated, feeds_of, kinds, lowered, refusals, results_of, simulate, tactics
from support.sweep import sweep

from optdnn.config import BuildOptions
from optdnn.ir.evaluate import evaluate
from optdnn.kernels.attention.general import GeneralAttention
from optdnn.kernels.attention.hopper import offers_of
from optdnn.lowering.cuda import lower_cuda
from optdnn.lowering.table import TACTICS
from optdnn.ops.attention import AttentionAttrs
from optdnn.optimize import optimize
from optdnn.passes.base import PassContext
from optdnn.passes.fold_quantized import FoldQuantized
from optdnn.passes.pad_heads import PadHeads
from optdnn.runtime.cuda import gpu_facts
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.launches.plan import parse
from optdnn.runtime.file.validate import validate
from optdnn.runtime.program import Program
from optdnn.types import FP64

ARCHS = ("sm_80", "sm_86", "sm_89")


def reasons(program: Program) -> str:
    return "; ".join(refusals(program))


@pytest.mark.parametrize("name", sweep(ATTENTION, *list(ATTENTION)[::3]))
def test_before_hopper(name: str) -> None:
    build, tactic = ATTENTION[name]
    arch = ARCHS[len(name) % 3]
    program = check_simulated(build(), "bf16" if arch == "sm_86" else "fp16", target=f"cuda:{arch}")
    assert set(tactics(program, "Attention")) == {tactic.replace("sm90", "sm80").replace("factors_", "")}
    launches = [launch for s in program.steps if (launch := parse(s, program).launch) is not None]
    own = [launch for launch in launches if program.kernels[launch.kernel].template == "attention_sm80.cu"]
    assert len(own) == (tactic != "attention_steps")
    for launch in own:
        assert launch.shared <= gpu_facts.of_arch(arch).shared_per_block
        assert not launch.dependent
    if own:
        assert "Hopper's wgmma" in reasons(program)
        assert "MaskedSoftmax" not in kinds(program)


@pytest.mark.parametrize(
    ("build", "target", "precision", "reason"),
    [
        (attention, "cuda:sm_90a", "fp16", "Hopper's own kernel runs it"),
        (attention, "cuda:sm_80", "fp32", "it is for 16-bit floats"),
        (lambda: attention(softmax_precision=FP64), "cuda:sm_80", "fp16", "its softmax is fp32"),
        (lambda: attention(outputs=4), "cuda:sm_80", "fp16", "weights are also an output"),
        (
            lambda: attention(mask="short", lengths=True),
            "cuda:sm_80",
            "fp16",
            "its mask has fewer columns than there are keys",
        ),
        (lambda: attention(value_size=20, size=16), "cuda:sm_80", "fp16", "heads of 20 features"),
        (lambda: attention(size=20), "cuda:sm_80", "fp16", "heads of 20 features"),
        (lambda: attention(size=520, count=1), "cuda:sm_90a", "fp16", "heads of 520 features"),
        (lambda: attention(scale=0.0), "cuda:sm_80", "fp16", "a scale of 0.0"),
    ],
)
def test_refusals(build: Any, target: str, precision: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PadHeads, "rules", ())  # heads would have 24 features
    program = lowered(build(), precision, target=target)
    refused = refusals(program, "attention_sm80")
    assert refused
    assert all(reason in r for r in refused)


def test_hoppers_own_kernel_leaves_wide_heads_to_this_one() -> None:
    program = lowered(attention(size=264, count=1), "fp16", target="cuda:sm_90a")
    assert set(tactics(program, "Attention")) == {"attention_sm80"}
    assert "heads of 264 features" in reasons(program)


def test_nothing_to_do_is_refused() -> None:
    n = Net(np.float16)
    q, k, v = (n.input(2, 4, size, 16, name=name) for name, size in (("q", 0), ("k", 5), ("v", 5)))
    y = n.op("Attention", q, k, v, attrs=AttentionAttrs())
    asked: Any = SimpleNamespace(graph=n.done(y), arch="sm_80")
    assert GeneralAttention().refuse(asked, asked.graph.op(y.op)) == "it has nothing to do"


def test_other_architectures_are_refused() -> None:
    copy, options = attention().copy(), BuildOptions(target="cuda:sm_80", precision="fp16", no_cubins=True)
    optimize(copy, options, "cuda:sm_80")
    program = lower_cuda(copy, options, replace(of_arch("sm_80"), capability=(7, 5)), {})
    assert set(tactics(program, "Attention")) == {"attention_steps"}
    assert f"it is compiled for {', '.join(gpu_facts.ARCHS)}, not sm_75" in reasons(program)


@pytest.mark.parametrize("arch", ARCHS)
def test_results_of_8_bits(arch: str) -> None:
    """Results in integers on all GPUs; in fp8 only if an instruction rounds to it, otherwise by a separate launch."""
    for dtype in (np.dtype(np.int8), FP8):
        graph = attention_network(dtype=dtype)
        copy = graph.copy()
        FoldQuantized()(copy, PassContext(target="cuda:sm_90a"))
        program = lower_cuda(copy, BuildOptions(target=f"cuda:{arch}", no_cubins=True), of_arch(arch), {})
        validate(program)
        assert set(tactics(program, "Attention")) == {"attention_sm80"}
        taken = [s.params["op"]["attrs"]["of"] for s in program.steps if s.params["op"]["kind"] == "Quantized"]
        assert ("Attention" in taken) == (dtype != FP8 or arch == "sm_89")
        for got, want in results_of(program, graph):
            np.testing.assert_allclose(got, want, rtol=0.13, atol=0.02)


def test_some_offers_sum_in_the_order_of_a_large_batch() -> None:
    from optdnn.kernels.attention import general_kernel as attention_general
    from optdnn.kernels.attention.problem import Problem, bhsd

    view, seen = bhsd(197, 12, 64), set()
    for batch in (1, 8, 64):
        problem = Problem(batch, 12, 197, 197, 64, 0.125, view, view, view, view)
        offers = offers_of(attention_general, problem, of_arch("sm_80"))
        assert len(offers) > 3
        alike = {o.config.keys for o in offers if o.row_invariant}
        assert len(alike) == 1
        assert {o.config.keys for o in offers} > alike
        seen |= alike
        large = offers_of(attention_general, replace(problem, heads=11), of_arch("sm_86"))
        assert all(attention_general.shared_bytes(problem, o.config) <= 101376 for o in large)
    assert len(seen) == 1


def test_its_place_is_before_the_three_launches() -> None:
    names = [t.name for t in TACTICS["Attention"]]
    assert names.index("attention_sm90") < names.index(GeneralAttention.name) < names.index("attention_steps")


@pytest.mark.nvrtc
def test_it_compiles_as_part_of_a_program() -> None:
    program = lowered(attention(mask="bool"), "fp16", target="cuda:sm_86", no_cubins=False)
    assert "attention_sm80.cu" in {k.template for k in program.kernels}
    assert all(k.arch == "sm_86" and k.cubin is not None for k in program.kernels)


@pytest.mark.parametrize("target", ["simulate", "cuda:sm_80"])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_attention_to_no_keys_is_zero(precision: str, target: str) -> None:
    """As for rows whose keys are all masked."""
    n = Net()
    q, k, v = (n.input(2, 4, size, 32, name=name) for name, size in (("q", 5), ("k", 0), ("v", 0)))
    graph = n.done(n.op("Attention", q, k, v, attrs=AttentionAttrs()))
    program = lowered(graph, precision, target=target)
    feeds = feeds_of(graph)
    for got in (*simulate(program, feeds).values(), *evaluate(graph, feeds).values()):
        np.testing.assert_array_equal(got, np.zeros((2, 4, 5, 32)))
