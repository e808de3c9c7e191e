"""Two products of one pixel per image in one launch: where it is used, refusals with their reasons, and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import emulated
from support.host import needs_compiler
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
from support.sweep import turns

from optdnn.ir.graph import Graph, Value
from optdnn.kernels.conv.depthwise import DepthwiseTactic
from optdnn.kernels.gemm import gemv_pair as tactic
from optdnn.kernels.gemm import gemv_pair_kernel as pair
from optdnn.kernels.tactic import Offer
from optdnn.lowering.choose import TacticChoice
from optdnn.ops.gemm import GemmAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.measuring.expected import expected_steps
from optdnn.types import Array

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


def perceptron(*shape: int, hidden: int = 24, out: int = 40, matmul: bool = False, **attrs: Any) -> Graph:
    """Two products of rows with constant matrices."""
    n = Net()
    x = n.op("Tanh", n.input(*shape))
    for size, activation in ((hidden, "Relu"), (out, "Sigmoid")):
        x = n.op(activation, n.matmul(x, size) if matmul else n.gemm(x, size, **attrs))
    return n.done(x)


def dense_gate(images: int = 2) -> Graph:
    """Squeeze-and-excitation whose products are of rows, as Keras and many PyTorch networks write it."""
    n = Net()
    x = n.conv(n.conv(n.input(images, 8, 40, 36), 64), 64, group=64)
    y = n.op("Reshape", n.op("GlobalAveragePool", x), n.ints(images, 64))
    y = n.op("Sigmoid", n.gemm(n.op("Relu", n.gemm(y, 16)), 64, trans_b=True))
    return n.done(n.conv(n.op("Mul", x, n.op("Reshape", y, n.ints(images, 64, 1, 1))), 16, 1, pads=0))


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
    "rows": lambda: perceptron(5, 72),
    "rows, scaled": lambda: perceptron(3, 72, out=33, trans_b=True, alpha=2.0, beta=0.5),
    "rows of a sequence": lambda: perceptron(2, 3, 64, matmul=True),
    "one row": lambda: perceptron(1, 776, hidden=100, out=2, bias=False),
    "sums, products of rows": dense_gate,
    "ten images": lambda: excited(images=10, size=(24, 20)),
    "sums, many channels": lambda: excited(240, 10, images=2, size=(40, 36), activation="Swish"),
}


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the cost model choose one launch everywhere."""
    monkeypatch.setattr(tactic.VectorPair, "defer", lambda *given: None)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), turns(NETS, "fp16", "bf16"))
@pytest.mark.usefixtures("chosen")
def test_one_launch_gives_the_results_of_two(name: str, precision: str) -> None:
    program = check_simulated(NETS[name](), precision)
    (step,) = [s for s in program.steps if str(s.params["tactic"]).startswith("gemv_pair")]
    assert sum(node.startswith(("Conv", "Gemm", "MatMul")) for node in step.src) == 2, "both products are named"
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


def pixels(n: Net, channels: int = 64) -> Value:
    return n.op("GlobalAveragePool", n.conv(n.input(2, 8, 9, 7), channels))


def two_readers(n: Net) -> list[Value]:
    y = n.conv(pixels(n), 16, 1, pads=0)
    return [n.conv(y, 32, 1, pads=0), n.op("Tanh", y)]


def added(n: Net) -> list[Value]:
    x = pixels(n)
    return [n.op("Add", n.conv(n.conv(x, 16, 1, pads=0), 64, 1, pads=0), x)]


def images(n: Net) -> list[Value]:
    return [n.conv(n.conv(n.conv(n.input(2, 8, 9, 7), 64), 16, 1, pads=0), 24, 1, pads=0)]


def unknown_bias(n: Net) -> list[Value]:
    y = n.conv(pixels(n), 16, 1, pads=0)
    return [n.op("Conv", y, n.random(24, 16, 1, 1), n.input(24, name="b"), attrs=n.graph.op(y).attrs)]


def normed(n: Net) -> list[Value]:
    x = n.gemm(n.op("Tanh", n.input(128, 64)), 512)
    x = n.op("LayerNormalization", x, n.random(512), n.random(512))
    return [n.gemm(n.op("Relu", n.gemm(x, 64)), 64)]


def gated(n: Net) -> list[Value]:
    x = n.input(4, 64)
    return [n.gemm(n.op("Mul", n.op("Swish", n.gemm(x, 64)), n.gemm(x, 64)), 64)]


REFUSED: dict[str, tuple[Callable[[Net], list[Value]], str]] = {
    "images": (images, "not a 1x1 convolution of one pixel"),
    "one alone": (lambda n: [n.conv(pixels(n), 24, 1, pads=0)], "not the result of a 1x1 convolution of one pixel"),
    "another reader": (two_readers, "has another reader"),
    "an addition": (added, "more than an activation"),
    "odd sizes": (
        lambda n: [n.conv(n.conv(pixels(n, 17), 12, 1, pads=0), 24, 1, pads=0)],
        "vectors of 17 elements",
    ),
    "large": (
        lambda n: [n.conv(n.conv(pixels(n, 4096), 1024, 1, pads=0), 24, 1, pads=0)],
        "chunks of weights are too many",
    ),
    "a bias": (unknown_bias, "a bias is not constant"),
    "rows: a computed matrix": (
        lambda n: [n.op("MatMul", n.gemm(n.input(4, 64), 64), n.input(64, 8, name="w"))],
        "with constant weights",
    ),
    "rows: a transposed operand": (
        lambda n: [n.gemm(n.op("Gemm", n.input(64, 4), n.random(64, 16), attrs=GemmAttrs(transA=1)), 8)],
        "its first operand is transposed",
    ),
    "rows: one alone": (lambda n: [n.gemm(n.input(4, 64), 64)], "not the result of a matrix product"),
    "rows: an addition": (
        lambda n: [n.op("Add", n.gemm(n.gemm(n.input(4, 64), 64), 64), n.input(4, 64, name="z"))],
        "more than an activation",
    ),
    "rows: odd sizes": (lambda n: [n.gemm(n.gemm(n.input(4, 63), 64), 64)], "vectors of 63 elements"),
    "rows: a norm": (normed, "the norm before it takes no launch"),
    "rows: gated": (gated, "another product of the same rows multiplies"),
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
    assert faster or any("two launches are predicted" in r for r in refusals(program, "gemv_pair_sm90"))


P = pair.Problem(2, 64, 16, 64)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (replace(P, dtype="float32"), pair.Config(8), "16-bit floats"),
        (replace(P, depth=60), pair.Config(8), "multiples of 8"),
        (replace(P, epilogue=(("bias",), ("add",))), pair.Config(8), "nothing is added"),
        (replace(P, out="int8"), pair.Config(8), "does not store int8"),
        (P, pair.Config(3), "3 blocks are no configuration"),
        (P, pair.Config(1, cluster=True), "1 blocks are no configuration"),
        (replace(P, hidden=264), pair.Config(8), "272 elements of the hidden vector are too many"),
        (replace(P, depth=4096, hidden=256), pair.Config(4, cluster=True), "chunks of weights are too many"),
        (replace(P, depth=32 * 1024, hidden=8), pair.Config(1, images=8), "chunks of weights are too many"),
    ],
)
def test_refusals(problem: pair.Problem, config: pair.Config, reason: str) -> None:
    assert pair.refuse(P, pair.Config(8)) is None
    assert reason in (pair.refuse(problem, config) or "")
    assert "of shared memory exceed" in (pair.refuse(replace(P, tiles=2), pair.Config(8), shared=8192) or "")
    assert "no clusters" in (pair.refuse(P, pair.Config(8), capability=(8, 0)) or "")
    found = pair.candidates(P, HOPPER)
    assert [pair.estimate(P, c, HOPPER) for c in found] == sorted(pair.estimate(P, c, HOPPER) for c in found)


def test_terms_of_equal_size_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, config = replace(P, depth=512, tiles=2), pair.Config(2, cluster=True)
    before = pair.estimate(problem, config, HOPPER)
    changes = {name: 1.0 - getattr(pair, name) for name in ("MEET_S", "CLUSTER_S", "MEANS_S", "SIXTEEN_S")}
    for name in changes:
        monkeypatch.setattr(pair, name, 1.0)
    assert pair.estimate(problem, config, HOPPER) - before == pytest.approx(sum(changes.values()))


@pytest.mark.parametrize(
    ("rows", "depth", "warps", "parts"),
    [
        (16, 24, 8, (1, 1, 1)),
        (16, 256, 8, (2, 1, 4)),
        (84, 336, 8, (1, 1, 11)),
        (84, 336, 16, (2, 1, 6)),
        (336, 84, 16, (1, 2, 3)),
    ],
)
def test_warps_share_a_tile_if_it_has_many_chunks(rows: int, depth: int, warps: int, parts: tuple[int, ...]) -> None:
    assert pair.divided(rows, depth, warps) == pair.Part(*parts)


def computed(problem: pair.Problem, config: pair.Config, x: Array, vectors: Array, folder: Path) -> tuple[Array, Array]:
    """The launch's result on a processor for random weights, with eight more columns of sevens, and the expected one."""
    rng, kind = np.random.default_rng(0), np.dtype(ml_dtypes.bfloat16 if problem.dtype == "bfloat16" else np.float16)
    depth, hidden, channels, images = problem.depth, problem.hidden, problem.channels, problem.images
    made = pair.launch(problem, config, HOPPER, x.shape[-1], channels + 8)
    result = np.float32 if problem.out else kind
    text = made.recipe.generated["generated.cuh"].split("DEVICE void multiply")[0]
    rendered = "\n".join(line for line in text.splitlines() if not line.startswith("#define"))
    library = emulated.compiled(made.recipe, made.function, folder, rendered=rendered, headers=["vectors.cuh"])
    first = (rng.standard_normal((hidden, depth)) / depth**0.5).astype(kind)
    second = np.full((channels, -(-hidden // 8) * 8), 0, kind)
    second[:, :hidden] = rng.standard_normal((channels, hidden)) / hidden**0.5
    biases = [rng.standard_normal(size).astype(np.float32) for size in (hidden, channels)]
    arrays = {"x": x, "first": first, "second": second, "first_bias": biases[0], "second_bias": biases[1],
              "output": np.full((images, channels + 8), 7, result)}  # fmt: skip
    held = {name: emulated.aligned(a) for name, a in arrays.items()}
    emulated.run(library, made, {name: held[name].ctypes.data for name in made.operands})
    between = np.maximum(vectors.astype(np.float32) @ first.astype(np.float32).T + biases[0], 0)
    sums = between.astype(kind).astype(np.float32) @ second[:, :hidden].astype(np.float32).T + biases[1]
    return held["output"].astype(np.float32), 1 / (1 + np.exp(-sums))


STAGES = (("bias",), ("relu",)), (("bias",), ("sigmoid",))


@needs_compiler
@pytest.mark.parametrize(
    ("sizes", "config", "dtype"),
    turns(
        [
            ((2, 64, 16, 64), pair.Config(1, warps=8)),
            ((2, 264, 42, 72), pair.Config(2, warps=8)),
            ((3, 264, 42, 72), pair.Config(2, cluster=True)),
            ((9, 336, 84, 200), pair.Config(2, images=8)),
            ((9, 336, 84, 200), pair.Config(4, cluster=True, images=8, warps=8)),
            ((2, 2048, 128, 2048), pair.Config(16, cluster=True, warps=8)),
            ((1, 40, 8, 600), pair.Config(1)),
            ((3, 72, 24, 2), pair.Config(1, warps=8)),
        ],
        "float16",
        "bfloat16",
    ),
)
def test_the_kernel_on_a_processor(sizes: tuple[int, ...], config: pair.Config, dtype: str, tmp_path: Path) -> None:
    out = "float32" if sizes[-1] == 2 else ""
    problem, kind = (
        pair.Problem(*sizes, *STAGES, dtype, out=out),
        ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16,
    )
    assert pair.refuse(problem, config) is None
    x = np.random.default_rng(1).standard_normal((problem.images, problem.depth + 8)).astype(kind)
    got, want = computed(problem, config, x, x[:, : problem.depth], tmp_path)
    np.testing.assert_allclose(got[:, : problem.channels], want, rtol=0, atol=1e-2 if dtype == "bfloat16" else 2e-3)
    assert (got[:, problem.channels :] == 7).all()


@needs_compiler
@pytest.mark.parametrize(
    ("images", "depth", "pixels", "tiles", "config"),
    [
        (2, 24, 3, 1, pair.Config(1)),
        (2, 96, 784, 56, pair.Config(1, warps=8)),
        (2, 136, 500, 31, pair.Config(2, cluster=True)),
        (9, 240, 784, 8, pair.Config(1, images=8)),
        (9, 1032, 49, 2, pair.Config(2, images=8)),
        (9, 1032, 49, 2, pair.Config(2, cluster=True, images=8, warps=8)),
    ],
)
def test_means_on_a_processor(
    images: int, depth: int, pixels: int, tiles: int, config: pair.Config, tmp_path: Path
) -> None:
    problem = pair.Problem(images, depth, 16, 40, *STAGES, pixels=pixels, tiles=tiles)
    assert pair.refuse(problem, config) is None
    x = (np.random.default_rng(1).standard_normal((images, tiles, depth)) + 1).astype(np.float32)
    got, want = computed(problem, config, x, (x.sum(1) / pixels).astype(np.float16), tmp_path)
    np.testing.assert_allclose(got[:, :40], want, rtol=0, atol=2e-3)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (replace(P, dtype="bfloat16"), pair.Config(1)),
        (pair.Problem(1, 336, 84, 336, *STAGES, pixels=196, tiles=7), pair.Config(2)),
        (pair.Problem(8, 1152, 48, 1152, *STAGES, pixels=49, tiles=2), pair.Config(4, images=8, warps=8)),
        (pair.Problem(1, 2048, 128, 2048, *STAGES), pair.Config(16, cluster=True, warps=8)),
    ],
    ids=str,
)
def test_kernels_compile_without_spills(problem: pair.Problem, config: pair.Config) -> None:
    assert pair.refuse(problem, config) is None
    (kernel,) = nvrtc.resources(pair.recipe(problem, config)).values()
    assert kernel.spill_bytes == 0


@pytest.mark.hopper
@pytest.mark.parametrize("name", NETS)
@pytest.mark.usefixtures("chosen")
def test_every_configuration_on_a_gpu_agrees_with_its_meaning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, offered, configs = NETS[name](), set[str](), tactic.VectorPair.configs

    def noted(*given: Any) -> Sequence[Offer]:
        found = configs(*given)
        offered.update(str(o.config) for o in found)
        return found

    monkeypatch.setattr(tactic.VectorPair, "configs", noted)
    plain = lowered(graph, "fp16", "cuda:sm_90a")
    (decision,) = [t for t in plain.meta["tactics"] if t["tactic"].startswith("gemv_pair") and not t.get("dropped")]
    assert len(offered) > 4
    for config in sorted(offered):
        choices = {decision["signature"]: TacticChoice(decision["tactic"], config)}
        program = lowered(graph, "fp16", "cuda:sm_90a", choices=choices)
        assert max(launch_errors(program, graph, "SeparableConv", "ExcitationGate")) < 2e-3, config
