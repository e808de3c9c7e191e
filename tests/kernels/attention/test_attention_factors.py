"""attention_factors_sm90: a bias of two factors inside the attention. test_sequence.py and GPU tests check its numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.attention_cases import bshd
from support.quantized_nets import QNet
from support.sequence_cases import attention, attention_of_image
from support.simulated import check_not_taken, kinds, lowered, refusals

from optdnn.ir.graph import Graph
from optdnn.kernels.attention import hopper_config
from optdnn.kernels.attention import hopper_kernel as plans
from optdnn.kernels.attention.problem import Factors, Problem
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch

GPU = of_arch("sm_90a")
VIEW = bshd(196, 12, 64, parts=3)
FACTORS = Factors((12 * 3136, 3136, 224, 16), (12 * 3136, 3136, 16, 224), 14, 14)
WINDOWS = Problem(25, 12, 196, 196, 64, 0.125, VIEW, VIEW, VIEW, bshd(196, 12, 64), factors=FACTORS)
WHOLE = replace(WINDOWS, batch=1, queries=4096, keys=4096, factors=replace(FACTORS, key_width=64, query_width=64))


def test_the_bias_is_not_stored() -> None:
    program = lowered(attention_of_image())
    assert kinds(program).count("FactoredAttention") == 1
    assert not [
        s
        for s in program.steps
        if any("Add" in name for name in s.src) and s.params["op"]["kind"] != "FactoredAttention"
    ]
    assert max(x.nbytes or 0 for x in program.buffers) < 3 * 2 * 196 * 196 * 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"size": (14, 7)}, "whole rows of 7"),
        ({"readers": 2}, "its mask is not a sum, or has other readers"),
    ],
)
def test_other_biases_are_stored(options: dict[str, Any], reason: str) -> None:
    assert any(reason in r for r in refusals(lowered(attention_of_image(**options)), "attention_factors_sm90"))


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ("", "it has no mask"),
        ("row", "its mask is not a sum, or has other readers"),
        ("full", "its mask is not a sum, or has other readers"),
    ],
)
def test_other_masks_are_none_of_its_own(mask: str, reason: str) -> None:
    assert refusals(lowered(attention(mask=mask)), "attention_factors_sm90") == [reason]


def of_given_factors(
    *, of_image: bool = True, key_columns: int = 1, lengths: bool = False, outputs: int = 1, narrow: bool = False, turned: bool = False,
    sinks: bool = False,
) -> Graph:  # fmt: skip
    """4 x 4 queries and keys with given factors.

    ``key_columns``: size of the last axis of the factor of rows. ``narrow``: the result is quantized. ``turned``: the factor of
    rows has the columns of queries first. Without ``of_image``, the bias is a sum of two masks.
    """
    n = QNet(np.float16)
    q, k, v = (n.input(1, 2, 16, 32, name=name) for name in "qkv")
    if of_image:
        rows = n.input(2, 4, 4, 4, key_columns, name="rows")
        rows = n.op("Transpose", rows, attrs=TransposeAttrs((0, 1, 3, 2, 4))) if turned else rows
        bias = n.op("Reshape", n.op("Add", rows, n.input(2, 4, 4, 1, 4, name="columns")), n.ints(1, 2, 16, 16))
    else:
        bias = n.op("Add", n.input(1, 2, 16, 16, name="full"), n.input(1, 2, 16, 1, name="rows"))
    more = [None, None, n.input(1, name="lengths", dtype=np.int64)] if lengths else []
    more = [None, None, None, n.random(2)] if sinks else more
    made = n.op("Attention", q, k, v, bias, *more, attrs=AttentionAttrs(), outputs=outputs)
    results = made if outputs > 1 else [made]
    return n.done(*(n.op("Relu", n.dq(n.q(y, 0.01), 0.01)) if narrow else y for y in results))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"of_image": False}, "its mask is not a sum over rows and columns of queries and keys"),
        ({"key_columns": 4}, "its mask is not the sum of a factor of rows and a factor of columns"),
        ({"lengths": True}, "its keys have a past or lengths, or its keys or values are results"),
        ({"outputs": 3}, "its keys have a past or lengths, or its keys or values are results"),
        ({"sinks": True}, "its softmax has sinks"),
        ({"narrow": True}, "its result is stored in 8 bits"),
        ({"turned": True}, "the factors' last axes are not contiguous, or begin at odd elements"),
    ],
)
def test_further_refusals(options: dict[str, Any], reason: str) -> None:
    assert "FactoredAttention" in kinds(lowered(of_given_factors(), io_dtype="fp16"))
    graph = of_given_factors(**options)
    check_not_taken(graph, "attention_factors_sm90", reason, "FactoredAttention", no_cubins=True, io_dtype="fp16")


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (replace(WINDOWS, mask=(0, 0, 196)), "a mask in addition to factors"),
        (replace(WINDOWS, factors=replace(FACTORS, key_width=12)), "whole rows of 12"),
        (replace(WINDOWS, factors=replace(FACTORS, query_width=12)), "and 12"),
        (replace(WINDOWS, factors=replace(FACTORS, columns=(1, 2, 2, 2))), "odd elements"),
    ],
)
def test_the_kernel_refuses(problem: Problem, reason: str) -> None:
    assert plans.refuse(WINDOWS, plans.Config(1, 80, 3)) is None
    assert reason in (plans.refuse(problem, plans.Config(1, 80, 3)) or "")


def test_columns_stay_in_registers_where_a_tile_is_a_row() -> None:
    best = plans.candidates(WHOLE, GPU)[0]
    assert (best.keys, plans.factor_form(WHOLE, best)) == (64, 1)
    assert {plans.factor_form(WINDOWS, c) for c in plans.candidates(WINDOWS, GPU)} == {2}
    assert plans.factor_form(replace(WINDOWS, factors=None), best) == 0


@pytest.mark.nvrtc
@pytest.mark.parametrize(("problem", "spilled"), [(WINDOWS, 0), (WHOLE, 40)], ids=["windows", "whole"])
def test_candidates_compile(problem: Problem, spilled: int) -> None:
    """With columns in registers, besides a tile's weights and the next scores, ten words per thread spill to local memory."""
    for config in plans.candidates(problem, GPU, 2):
        kernel = nvrtc.resources(plans.recipe(problem, config))["attention_sm90"]
        assert kernel.spill_bytes <= spilled, (config, kernel)
        assert kernel.registers <= hopper_config.register_limit(problem, config)
