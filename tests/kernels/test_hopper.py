"""The launches of Hopper's kernels: their reads and writes, configurations, and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.net import Net
from support.simulated import check_simulated, lowered

from optdnn.ir.graph import Graph
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import implicit_gemm as conv
from optdnn.kernels.conv import parameters as conv_params
from optdnn.kernels.conv import patch_kernel as conv_patch
from optdnn.kernels.conv import problem as conv_problem
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.launches.plan import MAP_BYTES, LaunchPlan, Pointer, TensorMap, parse


def networks() -> dict[str, Graph]:
    n = Net()
    x = n.conv(n.input(2, 64, 14, 14), 32, 3, strides=2, bias=True)
    plain = n.done(n.op("Relu", x))
    n = Net()
    x = n.conv(n.input(1, 64, 14, 14), 64, 1, pads=0)
    residual = n.done(n.op("Relu", n.op("Add", n.conv(x, 64, 3, dilations=2, pads=2), x)))
    n = Net()
    stem = n.done(n.conv(n.input(1, 3, 30, 30), 16, 7, strides=2, pads=3))
    n = Net()
    product = n.done(n.gemm(n.op("Relu", n.input(3, 512)), 1000))
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 48, 14, 14), 48, 1, pads=0))
    joined = n.op(
        "Add", n.conv(n.op("Relu", n.conv(x, 24, 3, strides=2)), 32, 1, pads=0), n.conv(x, 32, 1, pads=0, strides=2)
    )
    projection = n.done(n.op("Relu", joined))
    return {"plain": plain, "residual": residual, "stem": stem, "product": product, "projection": projection}


@pytest.mark.parametrize("name", networks())
def test_launches_read_the_sources_and_write_the_result(name: str) -> None:
    """The maps and pointers of each launch are at the offsets of the parameter block, with the operands of its meaning."""
    program = lowered(networks()[name])
    found = [
        parse(s, program)
        for s in program.steps
        if program.kernels[s.params["launch"]["kernel"]].function in (conv.FUNCTION, conv_patch.FUNCTION)
    ]
    assert found or name == "stem"
    assert name != "projection" or "ConvSum" in [parsed.meaning.kind for parsed in found]
    for parsed in found:
        assert isinstance(parsed.launch, LaunchPlan)
        maps = [r for r in parsed.launch.relocations if isinstance(r, TensorMap)]
        assert [m.at for m in maps] == [MAP_BYTES * i for i in range(5)]
        reads, (out,) = parsed.meaning.reads, parsed.meaning.writes
        assert out is not None
        sources = 2 if parsed.meaning.kind == "ConvSum" else 1
        assert {m.operand for m in maps[:3]} == {r.operand for r in reads[: 2 * sources] if r is not None}
        pointers = {r.at: r.operand for r in parsed.launch.relocations if isinstance(r, Pointer)}
        assert pointers[5 * MAP_BYTES + 8] == maps[3].operand == out.operand
        assert maps[4].operand == pointers.get(5 * MAP_BYTES + 16, out.operand)


def test_split_kernels_need_stores_from_registers() -> None:
    """Blocks that share K store from registers. If such stores cannot reach the result, blocks do not share K."""
    problem = conv_problem.Problem(1, 64, (conv_problem.Source(7, 7, 512, (3, 3), (1, 1), (1, 1, 1, 1)),), (("bias",),))
    dense, joint = (
        hopper_launch.ranked(replace(problem, dense=dense), of_arch("sm_90a"))[0].config for dense in (True, False)
    )
    assert dense.split > 1
    assert joint.split == 1


def test_refusals() -> None:
    ok = [((3, 3), (1, 1), (1, 1, 1, 1), (1, 1))]
    assert hopper_launch.refuse("sm_90a", "float16", ok) is None
    assert "wgmma" in str(hopper_launch.refuse("sm_80", "float16", ok))
    assert "16 or 8 bits" in str(hopper_launch.refuse("sm_90a", "float32", ok))
    assert "steps of at most 8" in str(hopper_launch.refuse("sm_90a", "float16", [((3, 3), (9, 1), (0,) * 4, (1, 1))]))
    assert "corners" in str(hopper_launch.refuse("sm_90a", "float16", [((3, 3), (1, 1), (0,) * 4, (70, 70))]))


def test_weights_lie_where_the_views_say() -> None:
    weights = np.arange(5 * 3 * 2 * 2, dtype=np.float32).reshape(5, 3, 2, 2)
    problem = conv_problem.Problem(1, 8, (conv_problem.Source(4, 4, 8, (2, 2)),))
    packed = conv_params.pack_weights(problem, [weights])
    depth, lane = problem.k_steps * problem.block, 16
    view = np.lib.stride_tricks.as_strided(packed, weights.shape, [s * 4 for s in (depth, 1, 2 * lane, lane)])
    np.testing.assert_array_equal(view, weights)


def test_patches_are_chosen_where_they_win_and_can() -> None:
    wide = conv_problem.Problem(
        8, 64, (conv_problem.Source(56, 56, 64, (3, 3), (1, 1), (1, 1, 1, 1)),), (("bias",), ("relu",))
    )
    assert isinstance(hopper_launch.ranked(wide, of_arch("sm_90a"))[0].config, conv_patch.PatchConfig)
    strided = conv_problem.Problem(
        8, 64, (conv_problem.Source(56, 56, 64, (3, 3), (2, 2), (1, 1, 1, 1)),), (("bias",), ("relu",))
    )
    assert isinstance(hopper_launch.ranked(strided, of_arch("sm_90a"))[0].config, conv.Config)


def test_rows_after_a_transpose_hold_their_padding() -> None:
    """The result has the operand's order: its second axis is the outermost one, and the buffer includes the last row's padding."""
    n = Net()
    x = n.op("Transpose", n.op("Relu", n.input(2, 3, 32)), attrs=TransposeAttrs((1, 0, 2)))
    graph = n.done(n.op("Sigmoid", n.op("MatMul", x, n.random(32, 2, scale=0.2))))
    program = lowered(graph, "fp16")
    assert any(s.params["tactic"].startswith("gemm_sm90") for s in program.steps)
    for step in program.steps:
        parse(step, program)  # refuses a tensor map outside of its buffer
    check_simulated(graph, "fp16")
