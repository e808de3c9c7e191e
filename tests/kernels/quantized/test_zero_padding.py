"""8-bit images padded by a zero point other than 0: accumulators begin with what the taps outside of the image add."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.conv_cases import plain_launch, same
from support.covering import covering
from support.layout import compile_checks
from support.on_gpu import checked_launches
from support.quantized_nets import QNet, added_in_groups, grouped
from support.simulated import kinds, lowered, results_of
from support.spills import check_spills

from optdnn.errors import InternalError
from optdnn.ir.graph import Graph, Value
from optdnn.kernels.conv import general_kernel, implicit_gemm, patch_kernel
from optdnn.kernels.conv.general_kernel import GeneralConfig
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.padding import edges
from optdnn.kernels.conv.patch_kernel import PatchConfig
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.quantized.hopper import HopperQuantizedConv
from optdnn.kernels.tactic import Offer
from optdnn.ops.requantize import Requantize
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.reference.conv import conv

ZERO = 117
SOURCES = {
    "3x3": same(9, 7, 16),
    "stride 2": same(15, 13, 16, stride=2),
    "asymmetric": Source(12, 10, 16, (3, 3), (2, 2), (0, 0, 1, 1)),
    "5x3 dilated": same(16, 14, 16, (5, 3), 1, (2, 3)),
    "one axis": Source(1, 11, 16, (1, 5), (1, 1), (0, 2, 0, 2)),
    "one pixel": same(1, 1, 16, (5, 5)),
    "taps beyond the whole image": Source(2, 2, 16, (3, 3), (1, 1), (3, 3, 3, 3)),
    "1x1, padded": Source(4, 4, 16, (1, 1), (1, 1), (1, 1, 1, 1)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sums_are_what_taps_outside_add(name: str) -> None:
    source, rng = SOURCES[name], np.random.default_rng(3)
    weight = rng.integers(-127, 128, (24, source.channels, *source.kernel))
    problem = Problem(2, 32, (source,), dtype="uint8", edged=True)
    kinds, sums = edges(problem, weight.astype(np.int8), ZERO)
    assert (kinds.dtype, sums.dtype, sums.shape[1]) == (np.uint16, np.int32, 32)
    assert sorted(set(kinds.reshape(-1))) == [*([0] if (kinds == 0).any() else []), *range(1, len(sums) + 1)]
    around = ((0, 0), (0, 0), (source.padding[0], source.padding[2]), (source.padding[1], source.padding[3]))
    outside = np.pad(np.zeros((1, source.channels, source.height, source.width)), around, constant_values=ZERO)
    walk: Any = {"strides": source.stride, "pads": (0, 0, 0, 0), "dilations": source.dilation}
    (want,) = conv(outside, weight.astype(np.float64), None, **walk)
    found = np.concatenate([np.zeros((1, 32), np.int32), sums])[kinds]
    np.testing.assert_array_equal(found[..., :24].transpose(2, 0, 1), want[0])
    assert not found[..., 24:].any()


def test_a_filter_of_three_has_nine_kinds_of_pixels() -> None:
    kinds, sums = edges(
        Problem(1, 16, (same(5, 4, 16),), dtype="int8", edged=True), np.ones((16, 16, 3, 3), np.int8), 1
    )
    assert kinds.tolist() == [[1, 3, 3, 2], [7, 0, 0, 8], [7, 0, 0, 8], [7, 0, 0, 8], [4, 6, 6, 5]]
    assert sums[:, 0].tolist() == [16 * n for n in (5, 5, 3, 5, 5, 3, 3, 3)]


def test_only_integers_are_padded_by_a_zero_point() -> None:
    with pytest.raises(InternalError, match="padded by a zero point"):
        Problem(1, 16, (same(4, 4, 16),), edged=True)
    with pytest.raises(InternalError, match="padded by a zero point"):
        Problem(1, 16, (same(4, 4, 16),) * 2, dtype="int8", edged=True)


def padded(n: QNet, x: Value, channels: int, **geometry: Any) -> Value:
    """A convolution of values with a zero point, and its quantized SiLU."""
    y = n.qconv(x, channels, **geometry)
    return n.fake(n.op("Mul", y, n.op("Sigmoid", y)), 0.02, 14, np.uint8)


NETS: dict[str, Any] = {
    "3x3": lambda n: padded(n, n.fake(n.input(2, 32, 9, 7), 0.03, ZERO, np.uint8), 48),
    "stride 2, int8": lambda n: padded(n, n.fake(n.input(3, 64, 15, 13), 0.03, -5, np.int8), 64, stride=2),
    "a fp16 result": lambda n: n.qconv(n.fake(n.input(2, 64, 20, 20), 0.03, ZERO, np.uint8), 70),
    "one axis": lambda n: padded(n, n.fake(n.input(2, 32, 30), 0.03, ZERO, np.uint8), 64, kernel=5),
    "groups with a residual": lambda n: added_in_groups(n, n.fake(n.input(2, 16, 9, 7), 0.03), 192, 48, 131, np.uint8),
    "small groups": lambda n: grouped(n, n.fake(n.input(2, 16, 9, 7), 0.03), 64, 16, zero=(ZERO, np.uint8)),
    "a stem": lambda n: padded(n, n.fake(n.input(3, 3, 65, 61), 0.03, ZERO, np.uint8), 32, stride=2),
    "a stem, last row not read": lambda n: padded(
        n, n.fake(n.input(2, 3, 33, 32), 0.03, ZERO, np.uint8), 32, kernel=4, stride=2, pads=(2, 2, 0, 0)
    ),
    "a stem, last column not read": lambda n: padded(
        n, n.fake(n.input(2, 1, 12, 32), 0.03, ZERO, np.uint8), 32, kernel=4, stride=3, pads=(1, 1, 0, 0)
    ),
    "dilated": lambda n: padded(n, n.fake(n.input(2, 64, 20, 18), 0.03, ZERO, np.uint8), 64, dilations=(2, 2)),
}


def network(name: str) -> Graph:
    n = QNet()
    return n.done(NETS[name](n))


@pytest.mark.parametrize("target", ["simulate", "cuda:sm_80"])
@pytest.mark.parametrize("name", NETS)
def test_no_launch_pads(name: str, target: str) -> None:
    graph = network(name)
    program = lowered(graph, "fp16", target)
    assert "Pad" not in kinds(program)
    assert sum("#define EDGED 1" in k.generated.get("generated.cuh", "") for k in program.kernels) == 1
    for got, want in results_of(program, graph):
        steps = np.abs(got - want) / 0.02
        assert steps.max() < 3.0
        assert (steps > 0.5).mean() < 0.02


CONFIGS = (
    Config(1, 1, 1, 64, 3), Config(2, 1, 1, 32, 2), Config(1, 1, 2, 48, 2), Config(1, 1, 1, 8, 4, direct=True),
    Config(1, 2, 1, 32, 3, direct=True), Config(1, 1, 1, 16, 2, split=3), Config(1, 1, 1, 96, 3, 1, 2, alternate=True),
    Config(1, 2, 1, 256, 2), Config(1, 1, 1, 64, 3, stationary=True),
    PatchConfig(1, 1, 4, 20, 2), PatchConfig(1, 2, 4, 10, 1), PatchConfig(1, 1, 4, 20, 2, direct=True), PatchConfig(1, 1, 4, 10, 2, 4, split=2),
)  # fmt: skip
"""Each way to begin, split and store sums, of both kernels."""


def image(size: int = 20, channels: int = 256) -> Graph:
    n = QNet()
    return n.done(
        n.fake(n.qconv(n.fake(n.input(2, channels, size, size), 0.03, ZERO, np.uint8), 96), 0.02, 14, np.uint8)
    )


def _only(monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    """Makes this configuration the only one of 8-bit convolutions."""
    monkeypatch.setattr(HopperQuantizedConv, "offers", lambda self, problem, gpu: [Offer(config, 1e-6)])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_each_configuration_runs_them(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, config)
    program = lowered(image(), "fp16")
    module = patch_kernel if isinstance(config, PatchConfig) else implicit_gemm
    assert module.refuse(Problem(2, 96, (same(20, 20, 256),), dtype="uint8", edged=True), config) is None
    assert [row.get("config") for row in program.meta["tactics"]].count(str(config)) == 1


@pytest.mark.nvrtc
def test_they_compile_without_spills() -> None:
    problem = Problem(
        2, 96, (same(20, 20, 256),), (("bias",), ("silu",), ("mul_const", 2.0)), "uint8", zero_point=True, edged=True
    )
    modules: dict[Any, Any] = {c: patch_kernel if isinstance(c, PatchConfig) else implicit_gemm for c in CONFIGS}
    made = {str(config): module.recipe(problem, config) for config, module in modules.items()}
    for name in covering(made):
        check_spills(made[name])


@pytest.mark.nvrtc
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[-1], GeneralConfig(64, 64, 3)], ids=str)
def test_the_parameter_blocks_have_the_layouts_of_the_kernels(config: Any) -> None:
    problem, gpu = Problem(2, 96, (same(20, 20, 256),), dtype="uint8", edged=True), of_arch("sm_90a")
    if isinstance(config, GeneralConfig):
        made = general_kernel.launch(problem, config, gpu, requantize=Requantize())
    else:
        made = plain_launch(problem, config, gpu, [np.zeros((96, 256, 3, 3), np.int8)])
    places = {p.operand: p.at for p in made.pointers}
    fields = {
        "edges.kinds": places["edge_kinds"],
        "edges.sums": places["edge_sums"],
        "edges.channels": places["edge_sums"] + 8,
    }
    compile_checks(made, fields, f"sizeof(Params) == {len(made.parameters)}")


# ---------------------------------------------------------------- on a GPU


@pytest.mark.hopper
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_each_configuration_on_a_gpu(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, config)
    assert checked_launches(image(), "fp16")


@pytest.mark.hopper
@pytest.mark.parametrize("name", NETS)
def test_networks_on_a_gpu(name: str) -> None:
    assert checked_launches(network(name), "fp16")


@pytest.mark.hopper
@pytest.mark.parametrize(("batch", "size"), [(64, 2), (40, 3), (1, 80), (33, 20)])
def test_images_of_all_sizes_on_a_gpu(batch: int, size: int) -> None:
    """Many images in a tile, and images of many tiles."""
    n = QNet()
    x = n.fake(n.input(batch, 64, size, size), 0.03, ZERO, np.uint8)
    assert checked_launches(n.done(n.fake(n.qconv(x, 64), 0.02, 14, np.uint8)), "fp16")
