"""means_sm90: sums, means and norms over the pixels of images, computed by clusters of blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import emulated
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_launches
from support.quantized_nets import QNet
from support.simulated import check_simulated, kinds, lowered
from support.sweep import every

from optdnn.ir.graph import Graph
from optdnn.kernels.quantized.quantized_store import QuantizedStore
from optdnn.kernels.reduce import means
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.requantize import QuantParams
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch

GPU = of_arch("sm_90a")


def gate(
    kind: str = "GlobalAveragePool",
    *,
    size: int = 28,
    channels: int = 72,
    batch: int = 2,
    keep: bool = True,
    axes: Any = (2, 3),
) -> Graph:
    """Means of an image, which are its gate."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(batch, 16, size, size), channels, 1, pads=0))
    y = n.op(kind, x) if kind == "GlobalAveragePool" else n.op(kind, x, n.ints(*axes), attrs=ReduceAttrs(keepdims=keep))
    y = y if keep else n.op("Reshape", y, n.ints(batch, channels, 1, 1))
    return n.done(n.conv(n.op("Mul", x, n.op("Sigmoid", y)), 16, 1, pads=0))


def rows(kind: str = "ReduceL2") -> Graph:
    """Norms of the channels of an image in rows of channels (global response norms), which are its gate."""
    n = Net()
    x = n.op("Relu", n.matmul(n.input(2, 20, 28, 16), 72))
    y = n.op(kind, x, n.ints(1, 2), attrs=ReduceAttrs())
    return n.done(n.matmul(n.op("Mul", x, n.op("Sigmoid", n.op("Mul", y, 0.01))), 16))


def tokens(kind: str = "ReduceMean", axis: int = 1) -> Graph:
    """Means of tokens (batch, tokens, channels), which gate them."""
    n = Net()
    x = n.op("Relu", n.matmul(n.input(2, 2000, 16), 72))
    y = n.op(kind, x, n.ints(axis), attrs=ReduceAttrs())
    return n.done(n.matmul(n.op("Mul", x, n.op("Sigmoid", n.op("Mul", y, 0.01))), 16))


def video(frames: int = 8, pixels: int = 14) -> Graph:
    """Means over the positions of a video, from a convolution over three axes."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 16, frames, pixels, pixels), 72, 3, pads=1))
    return n.done(n.op("Mul", x, n.op("Sigmoid", n.op("GlobalAveragePool", x))))


NETS = {
    "tokens": tokens(),
    "squares of tokens": tokens("ReduceSumSquare"),
    "videos": video(),
    "means": gate(),
    "norms": gate("ReduceL2"),
    "squares": gate("ReduceSumSquare", channels=40, batch=3),
    "norms of rows": rows(),
    "sums": gate("ReduceSum", channels=40, batch=3),
    "means without axes": gate("ReduceMean", keep=False, size=57),
    "wide": gate(channels=256, batch=1, size=56),
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", NETS)
def test_images_are_summed_by_clusters(name: str, precision: str) -> None:
    program = check_simulated(NETS[name], precision, tolerance=6e-2 if precision == "bf16" else 1e-2)
    assert "means_sm90" in {t["tactic"] for t in program.meta["tactics"]}
    assert {"GlobalAveragePool", *means.KINDS} & set(kinds(program))


@pytest.mark.parametrize(
    ("graph", "precision", "target", "because"),
    [
        (gate, "fp32", "cuda:sm_90a", "it is for means, sums and norms of 16-bit floats"),
        (gate, "fp16", "cuda:sm_80", "it needs clusters of blocks"),
        (lambda: gate("ReduceMean", axes=(1,)), "fp16", "cuda:sm_90a", "it is not over the pixels of images"),
        (
            lambda: tokens(axis=2),
            "fp16",
            "cuda:sm_90a",
            "the image or its means are not channels-last at multiples of 16 bytes",
        ),
        (lambda: gate("ReduceMean", axes=(0, 2, 3)), "fp16", "cuda:sm_90a", "it is not over the pixels of images"),
        (
            lambda: gate(channels=17),
            "fp16",
            "cuda:sm_90a",
            "its number of channels is not a multiple of 8",
        ),
        (
            lambda: gate(size=512, batch=1, channels=8),
            "fp16",
            "cuda:sm_90a",
            "the general kernels are predicted to be as fast",
        ),
    ],
)
def test_refusals(graph: Callable[[], Graph], precision: str, target: str, because: str) -> None:
    tactics = lowered(graph(), precision, target).meta["tactics"]
    found = [r["reason"] for t in tactics for r in t.get("refused", ()) if r["tactic"] == "means_sm90"]
    assert because in found


@pytest.mark.parametrize("shape", [(56, 192, 16), (7, 2048, 128), (7, 1024, 512), (14, 1024, 128), (56, 256, 128)])
def test_large_images_are_summed_by_clusters(shape: tuple[int, int, int]) -> None:
    """10 images of 10 to 200 MB took 5 to 40 % less time than with the general kernel."""
    size, channels, batch = shape
    n = Net()
    x = n.op("Relu", n.conv(n.input(batch, 16, size, size), channels, 1, pads=0))
    tactics = lowered(n.done(n.op("GlobalAveragePool", x)), target="cuda:sm_90a").meta["tactics"]
    (found,) = [t for t in tactics if t["kind"] == "GlobalAveragePool"]
    assert found["tactic"] == "means_sm90"


def squeezed(channels: int = 72, *, used: bool = False, dtype: Any = np.int8, flat: bool = False) -> Graph:
    """Means of an image that a quantized product reads, as TensorRT's tools quantize squeeze-and-excitation."""
    n = QNet()
    x = n.op("Relu", n.qconv(n.fake(n.input(2, 16, 28, 28), 0.03), channels, 1))
    mean = n.op("GlobalAveragePool", x)
    y = n.fake(n.op("Reshape", mean, n.ints(2, channels)) if flat else mean, 0.01, -3 if dtype == np.int8 else 4, dtype)
    if flat:
        return n.done(n.qgemm(y, 16))
    gated = n.op("Mul", x, n.op("Sigmoid", n.qconv(y, channels, 1)))
    return n.done(gated, *([n.op("Tanh", mean)] if used else []))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("channels", "dtype"), [(64, np.int8), (72, np.uint8)])
def test_quantized_means_are_one_launch(channels: int, dtype: Any, flat: bool) -> None:
    """Also if the convolution wants its image in rows of a multiple of 16 channels."""
    program = check_simulated(squeezed(channels, dtype=dtype, flat=flat), "fp16")
    (step,) = (s for s in program.steps if str(s.params.get("tactic")).startswith("means_quantized"))
    assert step.params["op"]["kind"] == "Quantized"


def activated() -> Graph:
    """Means of an activation that their launch can compute: its result was not rounded."""
    n = QNet()
    x = n.fake(n.qconv(n.fake(n.input(2, 16, 28, 28), 0.03), 72, 1), 0.02)
    y = n.qconv(n.fake(n.op("GlobalAveragePool", n.op("Exp", x)), 0.01), 72, 1)
    return n.done(y, n.qconv(x, 16))


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (squeezed(used=True), "nothing quantizes its result, or it has other readers"),
        (activated(), "the operator before it is computed in its launch, which saves more bytes"),
    ],
    ids=["used", "activated"],
)
def test_means_that_are_not_quantized(graph: Graph, because: str) -> None:
    tactics = lowered(graph, "fp16", "cuda:sm_90a").meta["tactics"]
    found = [r["reason"] for t in tactics for r in t.get("refused", ()) if r["tactic"] == "means_quantized"]
    assert found == [because]


P = means.Problem(2, 784, 72, 80)


def test_the_kernel_refuses() -> None:
    assert means.refuse(P, means.Config(8)) is None
    assert means.refuse(P, means.Config(3)) == "3 blocks are not a cluster of this kernel"
    assert means.refuse(P, means.Config(1, 96)) == "96 threads are not a block of this kernel"
    assert means.refuse(P, means.Config(1, channels=48)) == "48 channels are not a block of this kernel"
    assert (
        means.refuse(replace(P, channels=64), means.Config(1, channels=128))
        == "half of a block of 128 channels would be idle"
    )
    assert means.refuse(replace(P, channels=8), means.Config(1)) is None
    assert means.refuse(means.Problem(2, 5, 20, 24), means.Config(1)) == "its number of channels is not a multiple of 8"
    assert means.refuse(means.Problem(2, 5, 72, 72), means.Config(4)) == "a block would have no pixels"
    assert (
        means.refuse(means.Problem(1 << 16, 5, 72, 72), means.Config(1))
        == "no images, or more images than the kernel can count"
    )


@needs_compiler
@pytest.mark.parametrize(
    ("squares", "root", "threads", "channels"),
    [(False, False, 256, 32), (True, False, 512, 64), (True, True, 256, 128), (False, False, 512, 128)],
)
def test_the_kernel_on_the_processor(tmp_path: Path, squares: bool, root: bool, threads: int, channels: int) -> None:
    problem = replace(P, squares=squares, root=root)
    made = means.launch(problem, means.Config(1, threads, channels), 1 / P.pixels, GPU)
    library = emulated.compiled(made.recipe, made.function, tmp_path, headers=["vectors.cuh"])
    x = np.random.default_rng(3).standard_normal((2, P.pixels, P.pitch)).astype(np.float16)
    held = {"x": emulated.aligned(x), "output": emulated.aligned(np.full((2, P.channels), 7, np.float16))}
    emulated.run(library, made, {name: a.ctypes.data for name, a in held.items()})
    wanted = (x[..., : P.channels].astype(np.float64) ** (2 if squares else 1)).mean(1)
    np.testing.assert_allclose(held["output"], np.sqrt(wanted) if root else wanted, rtol=2e-3, atol=1e-5)


@needs_compiler
def test_the_quantizing_kernel_on_the_processor(tmp_path: Path) -> None:
    """It rounds the mean to 16 bits first: all bits are those of the two launches. Gaps between rows stay as they are."""
    problem, to = replace(P, narrow="uint8", row=80), QuantParams("uint8", 0.001, 120)
    made = means.launch(problem, means.Config(1, 256, 32), 1 / P.pixels, GPU, QuantizedStore.of(to))
    library = emulated.compiled(made.recipe, made.function, tmp_path, headers=["vectors.cuh"])
    x = np.random.default_rng(3).standard_normal((2, P.pixels, P.pitch)).astype(np.float16)
    held = {"x": emulated.aligned(x), "output": emulated.aligned(np.full((2, 80), 7, np.uint8))}
    emulated.run(library, made, {name: a.ctypes.data for name, a in held.items()})
    mean = x[..., : P.channels].astype(np.float64).mean(1).astype(np.float16).astype(np.float32)
    wanted = np.rint(np.clip(mean * np.float32(1000), -120, 135)) + 120
    assert np.abs(held["output"][:, :72] - wanted).max() <= 1
    assert (held["output"][:, :72] == wanted).mean() > 0.97  # the sums have another order
    assert len(np.unique(wanted)) > 20
    assert (held["output"][:, 72:] == 7).all()


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("cluster", "threads", "channels", "root"),
    every(7, product(means.CLUSTERS, means.THREADS, means.WIDTHS, (False, True))),
)
def test_the_kernel_compiles_without_spills(cluster: int, threads: int, channels: int, root: bool) -> None:
    problem = replace(P, pixels=8 * 784, squares=root, root=root, narrow="int8" if root else "")
    config = means.Config(cluster, threads, channels)
    (kernel,) = nvrtc.resources(means.launch(problem, config, 1.0, GPU).recipe).values()
    assert kernel.spill_bytes == 0


@pytest.mark.hopper
def test_quantized_means_do_what_their_step_means() -> None:
    checked_launches(squeezed(), "fp16")


@pytest.mark.hopper
@pytest.mark.parametrize("name", NETS)
def test_every_launch_does_what_its_step_means(name: str) -> None:
    checked_launches(NETS[name], "fp16")
