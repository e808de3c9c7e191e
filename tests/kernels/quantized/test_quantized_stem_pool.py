"""The first convolution of an 8-bit network, the quantization of its image and its max pool in one launch: plans, the kernel on the processor
and on a GPU to the bit, and networks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels.conv.test_stem_plan import problem  # type: ignore[import-not-found]
from kernels.conv.test_stem_pool_kernel import LARGE, RESNET, with_pool
from kernels.quantized.test_quantized import built
from support import emulated
from support.host import COMPILER, HERE, WHY_NOT
from support.needs import why_no_hopper
from support.quantized_nets import QNet
from support.simulated import feeds_of, kinds, refusals, simulate

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Value
from optdnn.kernels.conv import stem_kernel as stem
from optdnn.kernels.conv import stem_pool_sm90_kernel as sm90
from optdnn.kernels.conv.problem import Source
from optdnn.kernels.conv.stem_pool_kernel import Problem
from optdnn.kernels.conv.stem_pool_sm90_kernel import Config
from optdnn.kernels.quantized import stem_pool
from optdnn.ops.requantize import QuantParams, Requantize
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.reference.conv_regions import pooled_quantized_image
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import Array

DEVICE = of_arch("sm_90a")
LEAKY = (("bias",), ("leaky_relu", 0.125))


def pooled(batch: int, source: Source, channels: int, image: str = "float16", window: int = 3, **given: Any) -> Problem:
    made = with_pool(problem(batch, source, channels, image, **given), window, (1,) * 4 if window == 3 else (0,) * 4)
    return sm90.of(replace(made, quantized=True))


SIGNED, UNSIGNED = Requantize(low=-90.0, high=120.0), Requantize(low=-7.0, high=230.0, zero=7)
CASES: dict[str, tuple[Problem, Config, str, Requantize]] = {
    "ResNet": (pooled(2, RESNET, 64), Config(5), "int8", replace(SIGNED, low=0.0)),
    "fp32, zero points": (pooled(1, RESNET, 80, "float32"), Config(10), "int8", UNSIGNED),
    "2x2": (pooled(2, Source(28, 28, 1, (5, 5), (2, 2)), 16, window=2), Config(2), "uint8", SIGNED),
    "stages": (pooled(1, Source(33, 31, 3, (3, 3), (2, 2), (1,) * 4), 32, epilogue=LEAKY), Config(3), "int8", SIGNED),
    "many": (pooled(16, LARGE, 64), Config(14), "int8", replace(SIGNED, low=0.0)),
}  # fmt: skip
SMALL = [name for name in CASES if name != "many"]


def operands(p: Problem, pixels: QuantParams, numbers: Requantize) -> tuple[dict[str, Array], Array]:
    """The kernel's operands, and its result to the bit."""
    rng, s = np.random.default_rng(3), p.conv.source
    image = (rng.standard_normal((p.conv.batch, s.channels, s.height, s.width)) * 3).astype(p.conv.image)
    weight = rng.integers(-127, 128, (p.conv.channels, s.channels, *s.kernel)).astype(np.float16)
    low, high = (np.sqrt(np.prod(weight.shape[1:])) * k for k in (3e-5, 6e-5))
    pairs = np.stack([rng.uniform(low, high, len(weight)), rng.uniform(-20, 60, len(weight))], 1).astype(np.float32)
    kind = np.dtype(np.uint8 if numbers.high > 127 else np.int8)
    (want,) = pooled_quantized_image(
        run_kernel, image, weight, pairs, scale=pixels.scale, dtype=np.dtype(pixels.dtype), window=p.window,
        begins=(p.top, p.left), size=p.size, strides=s.stride, pads=s.padding, dilations=s.dilation,
        stages=p.conv.epilogue, residual_scale=1.0, residual_zero=0, low=numbers.low, high=numbers.high, zero=numbers.zero,
        output_dtype=kind,
    )  # fmt: skip
    assert len(np.unique(want)) > 40, "a case that tells results apart"
    made = {"image": image, "weights": stem.pack_weights(p.conv, weight), "bias": pairs}
    return made, want.transpose(0, 2, 3, 1)


def place(p: Problem) -> Array:
    """Where the result goes, with sixteen channels of each pixel that stay as they are."""
    return np.full((p.conv.batch, *p.size, p.conv.channels + 16), 85, np.uint8)


def check(p: Problem, found: Array, want: Array) -> None:
    np.testing.assert_array_equal(found[..., : p.conv.channels].view(want.dtype), want)
    assert (found[..., p.conv.channels :] == 85).all(), "nothing else is written"


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
@pytest.mark.parametrize("name", SMALL)
def test_the_kernel_on_the_processor(name: str, tmp_path: Path) -> None:
    p, config, dtype, numbers = CASES[name]
    pixels = QuantParams(dtype, 0.047)
    assert sm90.refuse(p, config) is None
    arrays, want = operands(p, pixels, numbers)
    launch = sm90.launch(p, config, DEVICE, p.conv.channels + 16, numbers=(pixels, numbers))
    generated = launch.recipe.generated["generated.cuh"]
    rendered = generated[generated.index("DEVICE float epilogue") :]
    instructions = (HERE / "host_stem.hpp").read_text(encoding="utf-8")
    library = emulated.compiled(
        launch.recipe, launch.function, tmp_path, rendered=instructions + rendered, headers=["stem_pixels.cuh"]
    )
    held = {key: emulated.aligned(a) for key, a in {**arrays, "output": place(p)}.items()}
    emulated.run(library, launch, {key: a.ctypes.data for key, a in held.items()})
    check(p, held["output"], want)


P, C = CASES["ResNet"][:2]


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (replace(P, conv=replace(P.conv, dtype="bfloat16")), "exact in fp16 alone"),
        (replace(P, conv=replace(P.conv, normalize=True)), "are not normalized"),
        (replace(P, conv=replace(P.conv, epilogue=(("bias",), *[("clip", 0.0, 1.0)] * 5))), "more than 8 constants"),
        (replace(P, conv=replace(P.conv, epilogue=(("bias",), ("add",)))), "nothing is added"),
    ],
)
def test_refused(made: Problem, reason: str) -> None:
    assert sm90.refuse(P, C) is None
    assert reason in (sm90.refuse(made, C) or "")


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_without_spills(name: str) -> None:
    p = CASES[name][0]
    (kernel,) = nvrtc.resources(sm90.recipe(p)).values()
    assert kernel.spill_bytes == kernel.stack_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, tmp_path: Any) -> None:
    from support.bound import bound
    from support.device_memory import Memory

    p, config, dtype, numbers = CASES[name]
    pixels, memory, out = QuantParams(dtype, 0.047), Memory(), place(p)
    arrays, want = operands(p, pixels, numbers)
    at = {key: memory.put(a) for key, a in {**arrays, "output": out}.items()}
    launch = sm90.launch(p, config, memory.device, p.conv.channels + 16, numbers=(pixels, numbers))
    memory.run(bound(launch, at, nvrtc.KernelCache(tmp_path)))
    check(p, memory.get(at["output"], out.shape, out.dtype), want)
    memory.free()


# ---------------------------------------------------------------- networks


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the cost model were for one launch everywhere."""
    monkeypatch.setattr(stem_pool.QuantizedPooledStem, "_slower", lambda *given: None)


def first(n: QNet, channels: int = 16, kernel: int = 7, **more: Any) -> Value:
    return n.fake(n.qconv(n.fake(n.input(2, 3, 34, 30), 0.03), channels, kernel, stride=2, **more), 0.04)


@pytest.mark.parametrize("channels", [16, 20])
@pytest.mark.usefixtures("chosen")
def test_networks_compute_the_same(channels: int) -> None:
    n = QNet()
    graph, program = built(n.done(n.fake(n.pool(first(n, channels)), 0.04)))
    assert kinds(program)[0] == "PooledQuantizedImage"
    feeds, other = feeds_of(graph), feeds_of(graph, 2)
    got = simulate(program, feeds)
    for output, want in evaluate(graph, feeds).items():
        np.testing.assert_array_equal(got[output], want)
        assert (got[output] != evaluate(graph, other)[output]).mean() > 0.2


def not_of_floats(n: QNet) -> Value:
    x = n.fake(n.qconv(n.fake(n.input(2, 16, 34, 30), 0.03), 3), 0.03)
    return n.fake(n.pool(n.fake(n.qconv(x, 16, 7, stride=2), 0.04)), 0.04)


def grouped(n: QNet) -> Value:
    return n.fake(n.pool(first(n, 48, group=3)), 0.04)


REFUSED = {
    "no pool": (lambda n: first(n), "no max pool"),
    "not of floats": (not_of_floats, "no float image"),
    "groups": (grouped, "no ungrouped convolution"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("chosen")
def test_refused_with_its_reason(name: str) -> None:
    build, reason = REFUSED[name]
    n = QNet()
    _, program = built(n.done(build(n)))
    found = refusals(program, "conv_stem_pool_8bit")
    assert any(reason in why for why in found), found
