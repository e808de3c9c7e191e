"""Two products of one pixel per image in one launch: where it is used, refusals with their reasons, and results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import emulated
from support.host import COMPILER, WHY_NOT
from support.net import Net, built
from support.on_gpu import launch_errors
from support.simulated import (
    OTHER_MACHINES_AND_TYPES,
    check_not_taken,
    check_simulated,
    kinds,
    lowered,
    refusals,
)
from support.sweep import sweep

from optdnn.ir.graph import Graph, Value
from optdnn.kernels.conv.depthwise import DepthwiseTactic
from optdnn.kernels.gemm import gemv_pair as tactic
from optdnn.kernels.gemm import gemv_pair_kernel as pair
from optdnn.lowering.choose import TacticChoice
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.measuring.expected import expected_steps
from optdnn.runtime.program import Program

HOPPER = of_arch("sm_90a")


def excited(
    channels: int = 64, hidden: int = 16, *, images: int = 2, activation: str = "Relu", gate: str = "Sigmoid",
    bias: bool = True, out: int = 0, size: tuple[int, int] = (9, 7),
) -> Graph:  # fmt: skip
    """Squeeze-and-excitation (Hu et al., 2018) behind a depthwise convolution."""
    n = Net()
    x = n.conv(n.conv(n.input(images, 8, *size), channels), channels, group=channels)
    y = n.conv(n.op("GlobalAveragePool", x), hidden, 1, pads=0, bias=bias)
    y = n.op(gate, n.conv(n.op(activation, y), out or channels, 1, pads=0, bias=bias))
    return n.done(y if out else n.conv(n.op("Mul", x, y), 16, 1, pads=0))


NETS: dict[str, Callable[[], Graph]] = {
    "squeeze-and-excitation": excited,
    "one image": lambda: excited(images=1),
    "many channels": lambda: excited(480, 24, images=1, activation="Swish"),
    "hard sigmoid": lambda: excited(96, 24, gate="HardSigmoid"),
    "no bias": lambda: excited(bias=False),
    "five images": lambda: excited(images=5),
    "other channels": lambda: excited(out=20),
    "ten hidden": lambda: excited(hidden=10, activation="Swish"),
    "sums": lambda: excited(images=1, size=(40, 36)),
    "sums, many channels": lambda: excited(240, 10, images=2, size=(40, 36), activation="Swish"),
}


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the cost model choose one launch everywhere."""
    monkeypatch.setattr(tactic.GemvPair, "defer", lambda *given: None)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("precision", sweep(["fp16", "bf16"], "fp16"))
@pytest.mark.usefixtures("chosen")
def test_one_launch_gives_the_results_of_two(name: str, precision: str) -> None:
    program = check_simulated(NETS[name](), precision)
    (step,) = [s for s in program.steps if str(s.params["tactic"]).startswith("gemv_pair")]
    assert sum(node.startswith("Conv") for node in step.src) == 2, "both convolutions are named"
    tiled = any(s.params["op"]["kind"] == "ConvSqueeze" and s.params["op"]["attrs"]["tile"] for s in program.steps)
    assert tiled or not name.startswith("sums")
    assert step.params["op"]["kind"] == ("ExcitationGate" if tiled else "SeparableConv")
    assert "SqueezeFinish" not in kinds(program), "the gate makes the means of the tiles' sums"


@pytest.mark.usefixtures("chosen")
def test_means_that_others_read_keep_their_launch() -> None:
    n = Net()
    x = n.op("GlobalAveragePool", n.conv(n.conv(n.input(1, 8, 40, 36), 64), 64, group=64))
    program = check_simulated(n.done(n.conv(n.conv(x, 16, 1, pads=0), 64, 1, pads=0), n.op("Tanh", x)))
    assert {"SqueezeFinish", "ExcitationGate"} <= set(kinds(program))


@pytest.mark.usefixtures("chosen")
def test_a_convolution_whose_second_launch_is_gone_keeps_its_predicted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = DepthwiseTactic.offers
    slow = lambda *given: [replace(o, seconds=0.25) for o in offers(*given)]  # noqa: E731
    monkeypatch.setattr(DepthwiseTactic, "offers", slow)
    program = lowered(NETS["sums"](), "fp16")
    (step,) = [i for i, kind in enumerate(kinds(program)) if kind == "ConvSqueeze"]
    assert expected_steps(program)[step]["us"] == pytest.approx(0.25e6, rel=1e-4)


@pytest.mark.usefixtures("chosen")
def test_sums_of_more_channels_than_threads_keep_their_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "CLUSTERS", (1,))
    program = check_simulated(excited(520, 16, images=1, size=(40, 36)))
    assert {"SqueezeFinish", "SeparableConv"} <= set(kinds(program))


def reasons(program: Program, name: str = "gemv_pair_sm90") -> list[str]:
    return refusals(program, name)


def pixels(n: Net, channels: int = 64) -> Value:
    return n.op("GlobalAveragePool", n.conv(n.input(2, 8, 9, 7), channels))


def two_readers(n: Net) -> list[Value]:
    y = n.conv(pixels(n), 16, 1, pads=0)
    return [n.conv(y, 32, 1, pads=0), n.op("Tanh", y)]


def added(n: Net) -> list[Value]:
    x = pixels(n)
    return [n.op("Add", n.conv(n.conv(x, 16, 1, pads=0), 64, 1, pads=0), x)]


def scaled(n: Net) -> list[Value]:
    x = n.op("Mul", n.op("Abs", pixels(n)), n.positive(1, 64, 1, 1))
    return [n.conv(n.conv(x, 16, 1, pads=0), 64, 1, pads=0), x]


def images(n: Net) -> list[Value]:
    return [n.conv(n.conv(n.conv(n.input(2, 8, 9, 7), 64), 16, 1, pads=0), 24, 1, pads=0)]


def unknown_bias(n: Net) -> list[Value]:
    y = n.conv(pixels(n), 16, 1, pads=0)
    return [n.op("Conv", y, n.random(24, 16, 1, 1), n.input(24, name="b"), attrs=n.graph.op(y).attrs)]


REFUSED: dict[str, tuple[Callable[[Net], list[Value]], str]] = {
    "images": (images, "not a 1x1 convolution of one pixel"),
    "one alone": (lambda n: [n.conv(pixels(n), 24, 1, pads=0)], "not the result of a 1x1 convolution of one pixel"),
    "another reader": (two_readers, "has another reader"),
    "an addition": (added, "more than an activation"),
    "odd sizes": (
        lambda n: [n.conv(n.conv(pixels(n, 68), 12, 1, pads=0), 24, 1, pads=0)],
        "vectors of 68 and 16 elements",
    ),
    "large": (lambda n: [n.conv(n.conv(pixels(n, 4096), 1024, 1, pads=0), 24, 1, pads=0)], "of shared memory exceed"),
    "a bias": (unknown_bias, "a bias is not constant"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("chosen")
def test_refused_with_its_reason(name: str) -> None:
    build, reason = REFUSED[name]
    check_not_taken(built(build), "gemv_pair_sm90", reason, "SeparableConv")


@pytest.mark.parametrize(("options", "reason"), OTHER_MACHINES_AND_TYPES)
@pytest.mark.usefixtures("chosen")
def test_other_machines_and_types_are_refused(options: dict[str, Any], reason: str) -> None:
    check_not_taken(excited(), "gemv_pair_sm90", reason, "SeparableConv", **options)


@pytest.mark.parametrize("faster", [False, True])
def test_unmeasured_the_cost_model_decides(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tactic, "_apart", lambda problem, gpu: 1.0 if faster else 1e-9)
    program = lowered(excited(1024, 32))
    assert ("SeparableConv" in kinds(program)) == faster
    assert faster or any("two launches are predicted" in r for r in reasons(program))


@pytest.mark.parametrize(
    ("given", "reason"),
    [({"images": tactic.FEW + 1}, "more than 4 images"), ({"channels": 512}, f"fewer than {tactic.SMALL} products")],
)
def test_launches_that_were_not_faster_are_for_tuning(
    given: dict[str, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tactic, "_apart", lambda problem, gpu: 1.0)
    images, channels = given.get("images", 2), given.get("channels", 1024)

    def build(n: Net) -> list[Value]:
        x = n.op("GlobalAveragePool", n.conv(n.input(images, 8, 9, 7), channels))
        return [n.conv(n.conv(x, 32, 1, pads=0), 24, 1, pads=0)]

    check_not_taken(built(build), "gemv_pair_sm90", reason, "SeparableConv")


P = pair.Problem(2, 64, 16, 64)


@pytest.mark.parametrize(
    ("problem", "cluster", "reason"),
    [
        (replace(P, dtype="float32"), 8, "16-bit floats"),
        (replace(P, depth=60), 8, "multiples of 8"),
        (replace(P, epilogue=(("bias",), ("add",))), 8, "nothing is added"),
        (P, 3, "no cluster of this kernel"),
        (replace(P, depth=4096, hidden=256), 4, "shared memory exceed"),
        (replace(P, depth=1032, pixels=49, tiles=2), 1, "too many for the threads"),
    ],
)
def test_refusals(problem: pair.Problem, cluster: int, reason: str) -> None:
    assert pair.refuse(P, pair.Config(8)) is None
    assert reason in (pair.refuse(problem, pair.Config(cluster)) or "")
    assert "no clusters" in (pair.refuse(P, pair.Config(8), capability=(8, 0)) or "")
    found = pair.candidates(P, HOPPER)
    assert [pair.estimate(P, c, HOPPER) for c in found] == sorted(pair.estimate(P, c, HOPPER) for c in found)


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("depth", "hidden", "channels"), [(64, 16, 64), (264, 40, 72), (2048, 128, 2048)])
def test_the_kernel_on_a_processor(depth: int, hidden: int, channels: int, dtype: str, tmp_path: Path) -> None:
    problem = pair.Problem(2, depth, hidden, channels, (("bias",), ("relu",)), (("bias",), ("sigmoid",)), dtype)
    if depth > 2000:
        problem = replace(problem, hidden=16, channels=200)
    rng, kind = np.random.default_rng(0), np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    made = pair.launch(problem, pair.Config(1), HOPPER, depth + 8, problem.channels + 8)
    text = made.recipe.generated["generated.cuh"]
    rendered = "\n".join(line for line in text.splitlines() if not line.startswith("#define"))
    library = emulated.compiled(made.recipe, made.function, tmp_path, rendered=rendered, headers=["vectors.cuh"])
    x = rng.standard_normal((2, depth + 8)).astype(kind)
    first = (rng.standard_normal((problem.hidden, depth)) / depth**0.5).astype(kind)
    second = (rng.standard_normal((problem.channels, problem.hidden)) / problem.hidden**0.5).astype(kind)
    biases = [rng.standard_normal(size).astype(np.float32) for size in (problem.hidden, problem.channels)]
    arrays = {"x": x, "first": first, "second": second, "first_bias": biases[0], "second_bias": biases[1],
              "output": np.full((2, problem.channels + 8), 7, kind)}  # fmt: skip
    held = {name: emulated.aligned(a) for name, a in arrays.items()}
    emulated.run(library, made, {name: held[name].ctypes.data for name in made.operands})
    between = np.maximum(x[:, :depth].astype(np.float32) @ first.astype(np.float32).T + biases[0], 0)
    sums = between.astype(kind).astype(np.float32) @ second.astype(np.float32).T + biases[1]
    got = held["output"].astype(np.float32)
    tolerance = 1e-2 if dtype == "bfloat16" else 2e-3
    np.testing.assert_allclose(got[:, : problem.channels], 1 / (1 + np.exp(-sums)), rtol=0, atol=tolerance)
    assert (got[:, problem.channels :] == 7).all()


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
@pytest.mark.parametrize(("depth", "pixels", "tiles"), [(24, 3, 1), (96, 784, 56), (136, 500, 31), (240, 784, 8)])
def test_means_on_a_processor(
    depth: int, pixels: int, tiles: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "POOLING_WARPS", 8)  # the emulator has no larger blocks
    problem = pair.Problem(2, depth, 16, 40, pixels=pixels, tiles=tiles)
    assert pair.refuse(problem, pair.Config(1)) is None
    rng = np.random.default_rng(0)
    made = pair.launch(problem, pair.Config(1), HOPPER, depth, 40)
    text = made.recipe.generated["generated.cuh"]
    rendered = "\n".join(line for line in text.splitlines() if not line.startswith("#define"))
    library = emulated.compiled(made.recipe, made.function, tmp_path, rendered=rendered, headers=["vectors.cuh"])
    x = (rng.standard_normal((2, tiles, depth)) + 1).astype(np.float32)
    first = (rng.standard_normal((16, depth)) / depth**0.5).astype(np.float16)
    second = (rng.standard_normal((40, 16)) / 4).astype(np.float16)
    biases = [rng.standard_normal(size).astype(np.float32) for size in (16, 40)]
    arrays = {"x": x, "first": first, "second": second, "first_bias": biases[0], "second_bias": biases[1]}
    arrays["output"] = np.zeros((2, 40), np.float16)
    held = {name: emulated.aligned(a) for name, a in arrays.items()}
    emulated.run(library, made, {name: held[name].ctypes.data for name in made.operands})
    means = (x.sum(1) / pixels).astype(np.float16).astype(np.float32)
    between = (means @ first.astype(np.float32).T + biases[0]).astype(np.float16).astype(np.float32)
    want = between @ second.astype(np.float32).T + biases[1]
    np.testing.assert_allclose(held["output"].astype(np.float32), want, rtol=0, atol=4e-3 * np.abs(want).max())


@pytest.mark.nvrtc
@pytest.mark.parametrize("config", [pair.Config(c) for c in (1, 8, 16)], ids=str)
def test_kernels_compile_without_spills(config: pair.Config) -> None:
    for more in ({"dtype": "bfloat16"}, {"pixels": 784, "tiles": 56}):
        (kernel,) = nvrtc.resources(pair.recipe(replace(P, **more), config)).values()
        assert kernel.spill_bytes == 0


@pytest.mark.hopper
@pytest.mark.parametrize("name", NETS)
@pytest.mark.usefixtures("chosen")
def test_every_cluster_on_a_gpu_agrees_with_its_meaning(name: str) -> None:
    graph = NETS[name]()
    plain = lowered(graph, "fp16", "cuda:sm_90a")
    (decision,) = [t for t in plain.meta["tactics"] if t["tactic"].startswith("gemv_pair") and not t.get("dropped")]
    for cluster in pair.CLUSTERS if "many channels" not in name else pair.CLUSTERS[2:]:
        choices = {decision["signature"]: TacticChoice(decision["tactic"], str(pair.Config(cluster)))}
        program = lowered(graph, "fp16", "cuda:sm_90a", choices=choices)
        assert max(launch_errors(program, graph, "SeparableConv", "ExcitationGate")) < 2e-3, cluster
