"""Gates of filtered features: two depthwise convolutions in one launch, on the processor and on a GPU, and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import emulated
from support.conv_cases import convolve, same
from support.covering import covering
from support.depthwise_runs import images_of
from support.host import needs_compiler
from support.net import Net, built
from support.on_gpu import checked_launches
from support.simulated import check_simulated, kinds, lowered, refusals, tactics
from support.sweep import all_pairs, every

from optdnn.ir.graph import Value
from optdnn.kernels.conv import depthwise_bands_kernel as bands
from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv import depthwise_tma_kernel as tma
from optdnn.kernels.conv.depthwise_kernel import Config, Problem
from optdnn.kernels.conv.depthwise_paired import PairedDepthwise
from optdnn.kernels.tactic import Offer
from optdnn.ops.index import SplitAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch

HOPPER = of_arch("sm_90a")
GATE: dict[str, Any] = {"epilogue": (("bias",), ("gelu",), ("mul",)), "beside": (("bias",), ("relu",))}


def gated(n: Net, y: Value, acts: tuple[str, str] = ("Gelu", "")) -> Value:
    halves = n.op("Split", y, attrs=SplitAttrs(1, 2), outputs=2)
    return n.op("Mul", *(n.op(a, h) if a else h for a, h in zip(acts, halves, strict=True)))


def image(kernel: int = 3, half: int = 24, **attrs: Any) -> Callable[[Net], Value]:
    def build(n: Net) -> Value:
        x = n.conv(n.input(2, 16, 9, 11), 2 * half, 1, pads=0)
        y = gated(n, n.conv(x, 2 * half, kernel, pads=kernel // 2, group=2 * half, bias=True, **attrs))
        return n.conv(y, 16, 1, pads=0)

    return build


def line(n: Net) -> Value:
    x = n.conv(n.input(2, 16, 37), 48, 1, pads=0)
    return n.conv(gated(n, n.conv(x, 48, 9, pads=(8, 0), group=48), ("Tanh", "Sigmoid")), 16, 1, pads=0)


def squeezed(n: Net) -> Value:
    """NAFNet's block: the gated features are weighted by their means."""
    x = n.conv(n.input(2, 16, 9, 11), 48, 1, pads=0)
    y = gated(n, n.conv(x, 48, 3, group=48, bias=True), ("", ""))
    weights = n.conv(n.op("GlobalAveragePool", y), 24, 1, pads=0, bias=True)
    return n.conv(n.op("Mul", y, weights), 16, 1, pads=0)


def two_images(n: Net) -> Value:
    x, y = (n.conv(n.input(2, 16, 9, 11, name=name), 24, 1, pads=0) for name in "xy")
    return n.op("Mul", n.op("Swish", n.conv(x, 24, group=24)), n.conv(y, 24, group=24, bias=True))


NETS: dict[str, Callable[[Net], Value]] = {
    "image": image(), "large filters": image(5), "strides": image(strides=2), "dilations": image(dilations=2), "line": line,
    "squeezed": squeezed, "two images": two_images,
}  # fmt: skip


@all_pairs(
    {
        "name": NETS,
        "precision": ["fp16", "tf32", "fp32"],
        "target": ["cuda:sm_90a", "cuda:sm_80"],
    }
)
def test_a_gate_is_one_launch(name: str, precision: str, target: str) -> None:
    program = check_simulated(built(NETS[name]), precision, target=target)
    assert tactics(program, "Conv").count("depthwise_paired") == 1
    found = kinds(program)
    assert found.count("GatedConv") + sum(s.params["op"]["attrs"].get("of") == "GatedConv" for s in program.steps) == 1
    assert not {"Slice", "Split", "Mul"} & set(found)
    assert found.count("Copy") <= len(program.inputs) + len(program.outputs)  # changes of layout
    if name == "squeezed":
        assert "ConvSqueeze" in found


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_sums_of_tiles_are_added_up_by_a_second_launch(precision: str) -> None:
    n = Net()
    x = n.conv(n.input(1, 16, 70, 66), 48, 1, pads=0)
    y = gated(n, n.conv(x, 48, 3, group=48))
    y = n.conv(n.op("Mul", y, n.op("GlobalAveragePool", y)), 16, 1, pads=0)
    found = kinds(check_simulated(n.done(y), precision))
    assert found.count("ConvSqueeze") == found.count("SqueezeFinish") == 1


def changed(change: str) -> Callable[[Net], Value]:
    """``Relu(conv(x)) * conv(y)`` of two images. One convolution is changed."""

    def build(n: Net) -> Value:
        wide = 12 if change == "size" else 11  # both have results of six columns
        x, y = (n.conv(n.input(2, 16, 9, w, name=name), 24, 1, pads=0) for name, w in (("x", 11), ("y", wide)))
        strides = 2 if change == "size" else 1
        one = n.op("Relu", n.conv(x, 24, group=24, strides=strides))
        y = n.op("Relu", y) if change == "relu" else y
        size = 5 if change == "kernel" else 3
        other = n.conv(y, 24, size, pads=size // 2, group=24, strides=strides)
        if change == "relu":
            y = n.op("Add", y, n.op("Sigmoid", y))
        if change == "scaled":
            other = n.op("Mul", n.op("Tanh", other), n.const(3.0))
        if change == "residual":
            other = n.op("Add", n.op("Tanh", other), x)
        return n.op("Add" if change == "sum" else "Mul", one, other)

    return build


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ("sum", "it is not multiplied by another depthwise convolution of its form"),
        ("kernel", "it is not multiplied by another depthwise convolution of its form"),
        ("size", "it is not multiplied by another depthwise convolution of its form"),
        ("scaled", "its stages have constants"),
        ("residual", "is more than an activation"),
    ],
)
def test_refusals(change: str, because: str) -> None:
    program = lowered(built(changed(change)))
    assert any(because in reason for reason in refusals(program, "depthwise_paired"))
    assert "GatedConv" not in kinds(program)


def test_a_gate_of_channels_that_come_in_no_fours_is_refused() -> None:
    n = Net()
    x, y = (n.conv(n.input(2, 16, 9, 11, name=name), 18, 1, pads=0) for name in "xy")
    program = lowered(n.done(n.op("Mul", n.conv(x, 18, group=18), n.conv(y, 18, group=18))))
    assert any("its 18 channels are not a multiple of 4" in reason for reason in refusals(program, "depthwise_paired"))


def test_gates_of_large_filters_stay_apart_where_tensor_cores_are_faster() -> None:
    n = Net()
    x = n.conv(n.input(4, 16, 64, 64), 192, 1, pads=0)
    program = lowered(n.done(n.conv(gated(n, n.conv(x, 192, 7, pads=3, group=192)), 16, 1, pads=0)))
    assert any("two launches are predicted to take" in reason for reason in refusals(program, "depthwise_paired"))
    assert "GatedConv" not in kinds(program)


def test_both_patches_come_by_tma() -> None:
    """256 x 256, 32 + 32 channels, batch 4: 20.4 us on an H200, 30 by threads."""
    problem = Problem(4, same(256, 256, 32), pitches=(64, 0, 0), second_places=(96, 0), **GATE)
    config = tma.candidates(problem, HOPPER)[0]
    one, other = tma.launch(problem, config, HOPPER).maps
    assert (one.operand, other.operand) == ("input", "second")
    assert (one.box, one.shape) == (other.box, other.shape)
    assert (one.strides[0], other.strides[0]) == (128, 192)
    assert tma.estimate(problem, config, HOPPER) * 1e6 == pytest.approx(20.4, rel=0.3)
    single = replace(problem, beside=None, epilogue=(("bias",),))
    patch = math.prod(tma.patch(problem, config)) * config.vectors * config.lanes * 2
    assert (
        tma.shared_bytes(problem, config) - tma.shared_bytes(single, config) == config.stages * -(-patch // 128) * 128
    )
    by_threads = depthwise.candidates(problem, HOPPER)[0]
    assert tma.estimate(problem, config, HOPPER) < depthwise.estimate(problem, by_threads, HOPPER)


PROBLEM = Problem(2, same(9, 10, 24), **GATE)
CONFIG = Config(2, 1, 3, 8, 4)


def test_other_kernels_take_no_pairs() -> None:
    plain = replace(PROBLEM, epilogue=(("bias",),), beside=None)
    assert tma.refuse(PROBLEM, tma.candidates(PROBLEM, HOPPER)[0]) is None
    assert bands.refuse(plain, tile := bands.Config(1, 4, 4, 1, 1, 2, 3, 2)) is None
    assert "with nothing added" in (bands.refuse(PROBLEM, tile) or "")
    assert (
        depthwise.no_kernel(replace(PROBLEM, relu=True))
        == "pairs of convolutions are for floats without a ReLU before them"
    )
    assert (
        depthwise.no_kernel(replace(PROBLEM, dtype="int8", out="float16"))
        == "pairs of convolutions are for floats without a ReLU before them"
    )
    assert depthwise.refuse(PROBLEM, replace(CONFIG, tile_w=4)) == "more than 64 accumulators per thread"
    assert not PROBLEM.residual


CASES: dict[str, tuple[Problem, Config]] = {
    "fp16": (PROBLEM, CONFIG),
    "bf16": (replace(PROBLEM, dtype="bfloat16"), CONFIG),
    "fp32": (replace(PROBLEM, dtype="float32"), replace(CONFIG, vectors=6, lanes=4, strips_x=4)),
    "shared weights": (Problem(2, same(9, 10, 24, (5, 5)), **GATE), CONFIG),
    "shared weights, fp32": (Problem(2, same(9, 10, 24, (5, 5)), dtype="float32", **GATE), replace(CONFIG, vectors=6, lanes=4, strips_x=4)),
    "pitches": (replace(PROBLEM, pitches=(48, 40, 0), images_apart=(5000, 4400, 0), second_places=(56, 5608)), CONFIG),
    "means": (Problem(2, same(8, 8, 32), squeeze=True, **GATE), Config(2, 1, 4, 8, 4)),
    "means, fp32": (Problem(2, same(8, 8, 32), dtype="float32", squeeze=True, **GATE), Config(2, 2, 8, 4, 4, 4)),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", every(2, CASES))
def test_the_kernel_on_a_processor(name: str, tmp_path: Path) -> None:
    problem, config = CASES[name]
    assert depthwise.refuse(problem, config) is None
    s, rng, sizes = problem.source, np.random.default_rng(3), (problem.apart[0], problem.second[1])
    kind = np.dtype({"bfloat16": ml_dtypes.bfloat16}.get(problem.dtype, problem.dtype))
    launch = depthwise.launch(problem, config, HOPPER)
    text = launch.recipe.generated["generated.cuh"]
    rendered = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    library = emulated.compiled(
        launch.recipe, launch.function, tmp_path, rendered=rendered, headers=("conv_element.cuh", "depthwise_core.cuh"),
        first=("vectors.cuh",),
    )  # fmt: skip
    images = [rng.standard_normal(2 * size).astype(kind) for size in sizes]
    weights = [(rng.standard_normal((s.channels, 1, *s.kernel)) / 5).astype(kind) for _ in range(2)]
    biases = [rng.standard_normal(s.channels).astype(np.float32) for _ in range(2)]
    arrays = {"input": images[0], "second": images[1], "bias": biases[0], "second_bias": biases[1],
              "weights": depthwise.pack_weights(weights[0]), "second_weights": depthwise.pack_weights(weights[1]),
              "output": np.full(2 * problem.apart[1], 7, kind), "means": np.zeros((2, s.channels), kind)}  # fmt: skip
    held = {key: emulated.aligned(arrays[key]) for key in launch.operands}
    emulated.run(library, launch, {key: a.ctypes.data for key, a in held.items()})
    places = (problem.pitch[0], problem.apart[0]), problem.second
    seen = (images_of(x, 2, (s.height, s.width), at, s.channels) for x, at in zip(images, places, strict=True))
    one, other = (
        convolve(x.astype(np.float64), w.astype(np.float64), s) + bias
        for x, w, bias in zip(seen, weights, biases, strict=True)
    )
    gelu = one * 0.5 * (1 + np.vectorize(math.erf)(one / 2**0.5))
    want = gelu * np.maximum(other, 0)
    tolerance = {"bfloat16": 2e-2, "float16": 2e-3, "float32": 3e-6}[problem.dtype] * np.abs(want).max()
    out = images_of(held["output"], 2, problem.out_size, (problem.pitch[1], problem.apart[1]), s.channels)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=tolerance)
    out[:] = 7
    assert (held["output"] == 7).all()
    if problem.squeeze:
        assert depthwise.squeeze_mode(problem, config) == 2
        np.testing.assert_allclose(held["means"].astype(np.float64), want.mean((1, 2)), rtol=0, atol=tolerance)


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_candidates_compile_without_spills(dtype: str) -> None:
    """One convolution, one with a residual, and two that are multiplied."""
    made = {}
    for kernel, last in product((3, 5), ("gelu", "add", "mul")):
        stages: Any = (("bias",), ("gelu",), *((last,),) * (last != "gelu"))
        beside = (("bias",),) if last == "mul" else None
        problem = Problem(1, same(64, 64, 64, (kernel, kernel)), stages, dtype, squeeze=True, beside=beside)
        for family in (depthwise, tma):
            for config in family.candidates(problem, HOPPER, 1 if dtype == "float32" else 2):
                made[f"{problem}, {config}"] = family.recipe(problem, config)
    for name in covering(made):
        (found,) = nvrtc.resources(made[name]).values()
        assert found.spill_bytes == 0, name


# ---------------------------------------------------------------- on a GPU

TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2, "tf32": 4e-3, "fp32": 4e-6}


def large(n: Net) -> Value:
    """More tiles than multiprocessors, and incomplete last tiles."""
    x = n.conv(n.input(2, 16, 97, 101), 144, 1, pads=0)
    y = gated(n, n.conv(x, 144, 3, group=144, bias=True))
    return n.conv(n.op("Mul", y, n.op("GlobalAveragePool", y)), 16, 1, pads=0)


@pytest.mark.hopper
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", [*NETS, "large"])
def test_each_tile_on_a_gpu(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, configs = built({**NETS, "large": large}[name]), PairedDepthwise.configs
    for k in range(4):

        def one(self: Any, b: Any, op: Any, k: int = k) -> list[Offer]:
            return [configs(self, b, op)[k % len(configs(self, b, op))]]

        monkeypatch.setattr(PairedDepthwise, "configs", one)
        assert checked_launches(graph, precision, TOLERANCE[precision])
