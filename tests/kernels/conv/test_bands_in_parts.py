"""Grouped convolutions of fp32 in bands on tensor cores: results, the groups of a band, scales per band, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.grouped_nets import grouped
from support.net import Net
from support.on_gpu import checked_launches
from support.one_config import only_of
from support.simulated import check_simulated, feeds_of, lowered, refusals, tactics
from support.spills import check_spills
from support.sweep import every

from optdnn.ir.evaluate import evaluate, promote, promoted_feeds
from optdnn.ir.graph import Graph
from optdnn.kernels.conv import parts_kernel
from optdnn.kernels.conv.parts import PartsBands
from optdnn.kernels.conv.parts_kernel import PartsConfig, input_shifts
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.ops.conv import ConvAttrs
from optdnn.runtime.engine import Engine

NAME = "conv_bands_parts_sm90"
CONFIGS = (
    PartsConfig(2, 1, 56, 4), PartsConfig(1, 2, 24, 3), PartsConfig(1, 1, 16, 3, 2), PartsConfig(2, 1, 40, 3, 3), PartsConfig(1, 1, 88, 4),
)  # fmt: skip


def scaled(channels: int, groups: int) -> Graph:
    """Input channels whose weights are of very different sizes, in another order in each group."""
    rng, inside, n = np.random.default_rng(0), channels // groups, Net()
    weights = rng.standard_normal((groups, inside, inside, 3, 3))
    for own in weights:
        own *= rng.permutation(10.0 ** np.linspace(-12, 3, inside))[:, None, None]
    weights[1, 3, :5] = 0
    kernel = n.const(weights.reshape(channels, inside, 3, 3).astype(np.float32))
    x = n.op("Relu", n.conv(n.input(2, 8, 9, 10), channels, 1, pads=0))
    y = n.op("Conv", x, kernel, attrs=ConvAttrs((1, 1), (1, 1, 1, 1), (1, 1), group=groups))
    return n.done(n.conv(n.op("Relu", y), 16, 1, pads=0))


NETS: dict[str, tuple[Callable[[], Graph], int]] = {
    "wide": (lambda: grouped(336, 336, 2), 2), "narrow": (lambda: grouped(128, 128, 16), 4),
    "strided": (lambda: grouped(192, 96, 4, strides=2), 2), "line": (lambda: grouped(128, 192, 4, size=(1, 21), axes=1, batch=3), 4),
    "pointwise": (lambda: grouped(160, 320, 4, 1, residual=True), 2), "odd": (lambda: grouped(104, 104, 13), 1),
    "uneven": (lambda: grouped(208, 208, 2, residual=True), 2), "scaled": (lambda: scaled(128, 2), 2),
    "scaled narrow": (lambda: scaled(128, 16), 4),
}  # fmt: skip
"""Networks, and the bands of their grouped convolution."""


def banded(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The launch of the grouped convolution on this tactic. The simulated program gives the right results."""
    monkeypatch.setattr(PartsBands, "defer", lambda self, b, op: None)
    program = check_simulated(NETS[name][0](), "fp32", target="cuda:sm_90a")
    (step,) = [s for s in program.steps if str(s.params.get("tactic", "")).startswith(NAME)]
    return step


@pytest.mark.parametrize("name", NETS)
def test_groups_are_multiplied_in_bands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op: Any = banded(name, monkeypatch).params["op"]
    assert op["kind"] == "WeightsInParts"
    assert op["attrs"]["group"] == NETS[name][1]
    assert op["attrs"]["scaled"] == name.startswith("scaled")


def choice(graph: Graph, **options: Any) -> str:
    """The tactic of the second convolution."""
    program = lowered(graph, "fp32", **{"target": "cuda:sm_90a", **options})
    return str([t["tactic"] for t in program.meta["tactics"] if t["kind"] == "Conv"][1])


@pytest.mark.parametrize("channels", [8, 32, 168])
def test_groups_of_several_widths_take_it(channels: int) -> None:
    assert choice(grouped(8 * channels, 8 * channels, 8, size=(28, 28), batch=8)) == NAME


def test_scalar_units_go_first_if_images_would_be_copied() -> None:
    n = Net()
    program = lowered(n.done(n.conv(n.input(1, 48, 14, 14), 48, 3, group=2)), "fp32", target="cuda:sm_90a")
    assert [t["tactic"] for t in program.meta["tactics"]] == ["conv_fp32"]
    assert any("it is predicted to take" in r for r in refusals(program, NAME))


def test_row_invariant_takes_one_tactic_for_all_batches() -> None:
    """Scalar units, kernels without tiles and tensor cores sum in different orders, and the faster one depends on the batch."""
    seen: dict[bool, set[tuple[str, ...]]] = {False: set(), True: set()}
    for batch in (1, 256):
        graph = grouped(16, 16, 4, size=(28, 28), batch=batch)
        for invariant, found in seen.items():
            program = lowered(graph, "fp32", target="cuda:sm_90a", row_invariant=invariant)
            found.add(tuple(tactics(program, "Conv")))
    assert [set(each) for each in zip(*seen[False], strict=True)] == [
        {"conv_parts_sm90", "conv_fp32"}, {NAME, "conv_direct"}, {"conv_parts_sm90", "conv_fp32"}
    ], "else the test says nothing"  # fmt: skip
    assert seen[True] == {("conv_parts_sm90", NAME, "conv_parts_sm90")}


def test_before_hopper_it_refuses() -> None:
    found = refusals(lowered(grouped(104, 104, 13), "fp32", target="cuda:sm_80"), NAME)
    assert found
    assert all("it needs Hopper's wgmma and TMA" in r for r in found if r != "it has one group")


@pytest.mark.parametrize(("name", "uneven"), [("wide", True), ("narrow", True), ("whole", False)])
def test_threads_look_for_uneven_pixels_where_channels_ignore_some(
    name: str, uneven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Channels ignore other groups of their band, and the next band in the last K step of a tap. Bands of whole steps have neither."""
    monkeypatch.setattr(PartsBands, "defer", lambda self, b, op: None)
    graph = grouped(128, 128, 2) if name == "whole" else NETS[name][0]()
    program = lowered(graph, "fp32", target="cuda:sm_90a")
    kernels = [k.generated["generated.cuh"] for k in program.kernels if "generated.cuh" in k.generated]
    (text,) = [t for t in kernels if "#define BANDED 1" in t]
    assert f"#define UNEVEN {int(uneven)}\n" in text


def test_each_band_has_scales_of_its_own() -> None:
    weights = np.ones((8, 4, 1, 1), np.float32)
    weights[:2, 1], weights[4:, 3] = 2.0**-20, 0  # groups of two channels, two groups in a band
    shifts = input_shifts(weights, 2, 2)
    assert shifts is not None
    assert shifts.tolist() == [[0, -20, 0, 0, 0, 0, 0, 0], [0, 0, 0, -60, 0, 0, 0, -60]]
    apart = weights[[0, 1, 4, 5]]  # the same, without the groups that have no such weights
    assert input_shifts(apart, 2) == pytest.approx(np.array([[0, -20, 0, 0], [0, 0, 0, -60]]))


@pytest.mark.nvrtc
@pytest.mark.parametrize("config", every(2, CONFIGS), ids=str)
def test_bands_compile_without_spills(config: PartsConfig) -> None:
    source = Source(14, 14, 88, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1))
    stages = (("bias",), ("add",), ("gelu",))
    problem = Problem(16, 176, (source,), stages, "float32", bands=2, selective=True, equalized=True)
    assert parts_kernel.refuse(problem, config) is None
    check_spills(parts_kernel.recipe(problem, config), parts_kernel.FUNCTION)


@pytest.mark.hopper
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", NETS)
def test_each_configuration_on_a_gpu(name: str, config: PartsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    only_of(monkeypatch, PartsBands, config)
    assert checked_launches(NETS[name][0](), "fp32", 2e-6)


@pytest.mark.hopper
def test_a_large_group_costs_its_neighbors_no_precision_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of one band, and of two bands that share a K step, differ by up to 10 to the 30th."""
    monkeypatch.setattr(PartsBands, "defer", lambda self, b, op: None)
    for groups, width in ((16, 8), (4, 40)):
        n = Net()
        x = n.op("Mul", n.input(2, groups * width, 9, 10), n.input(groups * width, 1, 1, name="size"))
        graph = n.done(n.conv(x, groups * width, 3, group=groups))
        feeds = feeds_of(graph)
        feeds["size"] = np.repeat(10.0 ** np.linspace(-15, 15, groups), width).reshape(-1, 1, 1).astype(np.float32)
        context: Any = Engine(lowered(graph, "fp32", target="cuda:sm_90a")).context()
        (got,) = context.run(feeds).values()
        (want,) = evaluate(promote(graph), promoted_feeds(feeds)).values()
        for g in range(groups):
            own = slice(g * width, g * width + width)
            assert np.abs(got[:, own] - want[:, own]).max() <= 3e-6 * np.abs(want[:, own]).max()
