"""A convolution and the pool after it in one launch: results, tiles, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from support.net import Net
from support.simulated import check_not_taken, check_simulated, kinds, lowered

from optdnn.config import BuildOptions
from optdnn.ir.graph import Graph
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import implicit_gemm as conv
from optdnn.kernels.conv import patch_kernel as conv_patch
from optdnn.kernels.conv import pooled as conv_pool
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.hopper import HopperConv
from optdnn.lowering import table
from optdnn.lowering.choose import TacticChoice
from optdnn.lowering.cuda import emit_program
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.pool import MaxPoolAttrs
from optdnn.optimize import optimize
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch


def net(
    channels: int = 64, filters: int = 72, size: tuple[int, int] = (28, 30), *, kernel: int = 3, pool: Any = None, strides: int = 1,
    residual: bool = False, again: bool = False, shifted: bool = False, joined: bool = False,
) -> Graph:  # fmt: skip
    """A block with convolutions before and after the pair, so that images are channels-last."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 8, *size), channels + 4 * shifted, 1, pads=0))
    if shifted:
        x = n.op("Slice", x, n.ints(4), n.ints(channels + 4), n.ints(1))
    y = n.conv(x, filters, kernel, pads=kernel // 2, strides=strides, bias=True)
    if residual:
        y = n.op("Add", y, n.input(2, filters, *size, name="r"))
    y = n.op("Relu", y)
    z = n.op("MaxPool", y, attrs=pool) if pool is not None else n.max_pool(y, 2)
    if joined:
        other = n.op("Relu", n.conv(n.input(2, 8, *n.dims(z)[2:], name="z"), 8, 3))
        z = n.op("Concat", other, z, attrs=ConcatAttrs(1))
    return n.done(n.conv(z, 16, 1, pads=0), *([n.conv(y, 16, 1, pads=0)] if again else []))


def reason(graph: Graph, **options: Any) -> str:
    """The reason for which the tactic refuses the second convolution."""
    program = check_simulated(graph, **options)
    assert "PooledConv" not in kinds(program)
    found = [t for t in program.meta["tactics"] if t["kind"] == "Conv"][1]
    return next(r["reason"] for r in found["refused"] if r["tactic"] == "conv_pool_sm90")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("size", "filters", "kernel"), [((28, 30), 72, 3), ((29, 31), 64, 3), ((56, 56), 128, 3), ((20, 14), 64, 5)]
)
def test_one_launch_computes_both(
    size: tuple[int, int], filters: int, kernel: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conv_pool, "OVERLAP", -1.0)  # fused wherever possible
    program = check_simulated(net(64, filters, size, kernel=kernel), precision)
    assert kinds(program).count("PooledConv") == 1
    assert "MaxPool" not in kinds(program)
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == "PooledConv"]
    assert len([n for n in step.src if "Relu" in n or "Conv" in n or "MaxPool" in n]) == 3
    found = next(t for t in program.meta["tactics"] if t["tactic"] == "conv_pool_sm90")
    assert any("conv_pool_sm90 computes its neighbor" in r["reason"] for r in found["refused"])


class Library(HopperConv):
    """An imagined tactic of a library."""

    name, provider = "library", "cudnn"


def test_a_chosen_convolution_of_a_library_prevents_the_fusion_of_its_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conv_pool, "OVERLAP", -1.0)
    monkeypatch.setitem(table.TACTICS, "Conv", (*table.TACTICS["Conv"], Library()))
    options = BuildOptions(target="cuda:sm_90a", precision="fp16")
    graph = net()
    optimize(graph, options, "cuda:sm_90a")
    keys = {
        d.signature
        for d in emit_program(graph, options, of_arch("sm_90a"), {}).decisions
        if d.choice.tactic == "conv_pool_sm90"
    }
    chosen = emit_program(graph, options, of_arch("sm_90a"), {}, {key: TacticChoice("library") for key in keys})
    assert len(keys) == 1
    assert [d.choice.tactic for d in chosen.decisions if d.signature in keys] == ["library"]
    assert any(d.op.kind == "MaxPool" for d in chosen.decisions)


@pytest.mark.parametrize(
    ("graph", "why"),
    [
        (net(pool=MaxPoolAttrs((3, 3), (2, 2), (1, 1, 1, 1), (1, 1))), "its windows are not of 2 x 2, side by side"),
        (net(size=(29, 31), pool=MaxPoolAttrs((2, 2), (2, 2), (0, 0, 0, 0), (1, 1), ceil_mode=True)), "reach beyond the image"),
        (net(pool=MaxPoolAttrs((2, 2), (2, 2), (0, 0, 1, 1), (1, 1))), "reach beyond the image"),
        (net(residual=True), "its epilogue reads other tensors than constants"),
        (net(shifted=True), "its operand needs a launch before it"),
        (net(again=True), "no max pool is the only reader of the result"),
        (net(strides=2, size=(56, 56)), "no tile of whole windows fits"),
        (net(kernel=1), "no tile of whole windows fits"),
    ],
)  # fmt: skip
def test_refused(graph: Graph, why: str) -> None:
    assert why in reason(graph)


def test_a_part_of_a_joint_buffer_has_gaps() -> None:
    because = "the pool's result is not channels-last without gaps"
    check_not_taken(net(joined=True), "conv_pool_sm90", because, "PooledConv", no_cubins=True)


def test_other_types_are_refused() -> None:
    assert "it is for images of 16-bit floats" in reason(net(), precision="fp32")


def test_pools_that_give_indices_are_refused() -> None:
    n = Net()
    y, attrs = n.conv(n.input(2, 64, 8, 8), 64), MaxPoolAttrs((2, 2), (2, 2), (0,) * 4, (1, 1), indices=True)
    graph = n.done(*n.op("MaxPool", y, attrs=attrs, outputs=2))
    check_not_taken(graph, "conv_pool_sm90", "the pool after it: it gives indices", no_cubins=True)


def test_launches_apart_where_these_are_predicted_to_be_faster() -> None:
    """A deep convolution of few pixels is split over a cluster, whose partial sums do not form a tile."""
    assert "us are predicted for both" in reason(net(512, 512, (14, 14)))


def test_a_row_of_a_batch_must_not_depend_on_its_size() -> None:
    assert "PooledConv" not in kinds(lowered(net(), row_invariant=True))


def problem(pooled: bool = True, **more: Any) -> conv_problem.Problem:
    source = conv_problem.Source(56, 56, 128, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1))
    return conv_problem.Problem(1, 256, (source,), (("bias",), ("relu",)), pooled=pooled, **more)


def test_tiles_are_whole_windows_that_lie_in_shared_memory() -> None:
    offers = hopper_launch.ranked(problem(), of_arch("sm_90a"))
    assert len(offers) >= 8
    for o in offers:
        assert isinstance(o.config, conv_patch.PatchConfig)
        assert o.config.tile_h % 2 == o.config.tile_w % 2 == 0
        assert not o.config.stores_directly
    assert problem().stored_size == (28, 28)
    assert problem(False).bytes - problem().bytes == 3 * 28 * 28 * 256 * 2
    odd = conv_patch.PatchConfig(1, 1, 3, 28, 1)
    assert "cut windows" in str(conv_patch.refuse(problem(), odd))
    assert conv_patch.refuse(problem(False), odd) is None
    split = conv_patch.PatchConfig(1, 1, 2, 28, 1, 0, 1, 1, 2)
    assert "pooling needs 16-bit results in shared memory" in str(conv_patch.refuse(problem(), split))
    added = conv_problem.Problem(1, 256, problem().sources, (("bias",), ("add",)), pooled=True)
    assert "without a residual" in str(conv_patch.refuse(added, offers[0].config))
    assert "patch kernel" in str(conv.refuse(problem(), conv.Config(1, 1, 1, 64, 4)))


@pytest.mark.nvrtc
def test_kernels_do_not_spill() -> None:
    found = problem()
    configs = [o.config for o in hopper_launch.ranked(found, of_arch("sm_90a"))][:2]
    for config in configs:
        (kernel,) = nvrtc.resources(conv_patch.recipe(found, config)).values()
        assert kernel.spill_bytes == 0
        assert conv_patch.shared_bytes(found, config) <= of_arch("sm_90a").shared_per_block
