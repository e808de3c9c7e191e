"""1x1 convolutions of images that are normalized as a whole, without a launch for the norm: results and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.covering import covering
from support.net import Net, built
from support.on_gpu import checked_program
from support.one_config import only
from support.simulated import TOLERANCE, check_simulated, feeds_of, kinds, lowered, refusals, tactics
from support.spills import check_spills

from optdnn.errors import InternalError
from optdnn.ir.graph import Graph, Value
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.normed import NormedConv
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.conv.row_forms import RowNorm
from optdnn.ops.norm import GroupNormAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.program import Program


def _norm(n: Net, x: Value, groups: int = 1) -> Value:
    channels = int(n.dims(x)[1])  # type: ignore[arg-type]
    scale = n.const(1 + 0.2 * np.random.default_rng(channels).standard_normal(channels))
    return n.op("GroupNormalization", x, scale, n.random(channels), attrs=GroupNormAttrs(groups))


def _pixelwise(n: Net, x: Value, channels: int, **options: Any) -> Value:
    return n.conv(x, channels, 1, pads=0, **options)


def block(n: Net, batch: int = 2, width: int = 64, size: tuple[int, int] = (4, 14)) -> Value:
    """A residual, a norm, and a perceptron of each pixel. Its result is normalized for the next convolution."""
    x = n.op("Tanh", _pixelwise(n, n.input(batch, 16, *size), width))
    stream = n.op("Add", _pixelwise(n, x, width), x)
    hidden = n.op("Swish", _pixelwise(n, _norm(n, stream), 2 * width, bias=True))
    return _pixelwise(n, _norm(n, n.op("Add", stream, _pixelwise(n, hidden, width))), 40)


def chain(n: Net) -> Value:
    """A launch that applies moments and computes those of its own images."""
    y = _pixelwise(n, _norm(n, _pixelwise(n, n.input(3, 16, 2, 4), 128)), 64)
    return _pixelwise(n, _norm(n, y), 72)


def moved(n: Net) -> Value:
    """The pixels are reordered between the convolution and the norm."""
    x = _pixelwise(n, n.input(2, 16, 8, 8), 64)
    x = n.op("Reshape", x, n.ints(0, 64, 4, 2, 4, 2))
    x = n.op("Reshape", n.op("Transpose", x, attrs=TransposeAttrs((0, 1, 3, 5, 2, 4))), n.ints(0, 64, 4, 16))
    return n.op("Add", _pixelwise(n, n.op("Swish", _pixelwise(n, _norm(n, x), 64)), 64), x)


def large(n: Net) -> Value:
    """Several tiles per block, and more parts of an image than a warp loads at once."""
    return block(n, 3, 192, (56, 47))


NETS: dict[str, Callable[[Net], Value]] = {f.__name__: f for f in (block, chain, moved, large)}


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NormedConv, "defer", lambda self, b, op: None)


@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize("name", ["block", "chain", "moved"])
def test_no_launch_normalizes(name: str) -> None:
    n = Net(np.float16)
    program = check_simulated(n.done(NETS[name](n)))
    assert tactics(program, "Conv").count("conv_normed_sm90") == (1 if name == "moved" else 2)
    assert {"RowMoments", "NormedProduct"} & {*kinds(program)}
    assert not [k for k in kinds(program) if k.startswith("Group")]


@pytest.mark.usefixtures("wanted")
def test_large_means_cancel() -> None:
    """Images with a mean of 60 times their deviation lose only what 16 bits lose."""
    n = Net()
    x = n.op("Add", _pixelwise(n, n.input(2, 16, 8, 8), 64), n.const(np.full((1, 64, 1, 1), 60.0)))
    program = check_simulated(n.done(_pixelwise(n, _norm(n, x), 64)), tolerance=0.05)
    assert "conv_normed_sm90" in tactics(program, "Conv")


def test_the_cost_model_takes_it() -> None:
    n = Net(np.float16)
    assert tactics(lowered(n.done(block(n))), "Conv").count("conv_normed_sm90") == 2


def test_the_cost_model_leaves_many_tiles_of_many_images() -> None:
    n = Net(np.float16)
    x = _pixelwise(n, n.input(32, 16, 32, 32), 64)
    program = lowered(n.done(_pixelwise(n, _norm(n, x), 1024)))
    assert "conv_normed_sm90" not in tactics(program, "Conv")
    assert any(
        r.startswith("norm and convolution are predicted to take") for r in refusals(program, "conv_normed_sm90")
    )


def _two_readers(n: Net) -> Value:
    x = _norm(n, _pixelwise(n, n.input(2, 16, 4, 8), 64))
    return n.op("Concat", _pixelwise(n, x, 64), n.op("Relu", x))


def _groups(n: Net) -> Value:
    return _pixelwise(n, _norm(n, _pixelwise(n, n.input(2, 16, 4, 8), 64), 2), 64)


def _odd_pixels(n: Net) -> Value:
    return _pixelwise(n, _norm(n, _pixelwise(n, n.input(2, 16, 3, 5), 64)), 64)


def _odd_channels(n: Net) -> Value:
    return _pixelwise(n, _norm(n, _pixelwise(n, n.input(2, 16, 4, 8), 72)), 64)


def _wide_filter(n: Net) -> Value:
    return n.conv(_norm(n, _pixelwise(n, n.input(2, 16, 4, 8), 64)), 64, 3)


def _wide_maker(n: Net) -> Value:
    return _pixelwise(n, _norm(n, n.conv(n.input(2, 56, 4, 8), 64, 3)), 64)


def _of_a_pool(n: Net) -> Value:
    return _pixelwise(n, _norm(n, n.max_pool(n.input(2, 64, 8, 8), 2)), 64)


def _residual(n: Net) -> Value:
    x = _pixelwise(n, n.input(2, 16, 4, 8), 64)
    return n.op("Add", _pixelwise(n, _norm(n, x), 64), x)


def _other_batch(n: Net) -> Value:
    """Halves of an image become separate images."""
    x = n.op("Reshape", _pixelwise(n, n.input(2, 16, 8, 8), 64), n.ints(4, 32, 8, 8))
    return _pixelwise(n, _norm(n, x), 64)


def _tiny_scale(n: Net) -> Value:
    x = _pixelwise(n, n.input(2, 16, 4, 8), 64)
    scale = n.const(np.full(64, 1e-6))
    return _pixelwise(n, n.op("GroupNormalization", x, scale, n.random(64), attrs=GroupNormAttrs(1)), 64)


def _of_a_depthwise(n: Net) -> Value:
    x = n.op("Relu", _pixelwise(n, n.input(2, 16, 4, 8), 64))
    return _pixelwise(n, _norm(n, n.conv(x, 64, group=64)), 64)


def _given_scale(n: Net) -> Value:
    x, scale = _pixelwise(n, n.input(2, 16, 4, 8), 64), n.op("Abs", n.input(64, name="scale"))
    return _pixelwise(n, n.op("GroupNormalization", x, scale, n.random(64), attrs=GroupNormAttrs(1)), 64)


@pytest.mark.parametrize(
    ("build", "because"),
    [
        (_two_readers, "others read the normalized images"),
        (_groups, "its images are not normalized as a whole after another convolution"),
        (_of_a_pool, "its images are not normalized as a whole after another convolution"),
        (_other_batch, "its images are not normalized as a whole after another convolution"),
        (_odd_pixels, "15 pixels of 64 channels are no whole groups of 8 by 64"),
        (_odd_channels, "32 pixels of 72 channels are no whole groups of 8 by 64"),
        (_wide_filter, "it is not a 1x1 convolution of single pixels"),
        (_wide_maker, "does not store the images that are normalized, pixel by pixel"),
        (_residual, "its stages read other tensors"),
        (_of_a_depthwise, "runs by a tactic that gives no moments"),
        (_given_scale, "the norm: its scale and bias are not constant"),
        (_tiny_scale, "the matrix times the norm's scale does not fit 16 bits"),
    ],
)
@pytest.mark.usefixtures("wanted")
def test_refusals(build: Callable[[Net], Value], because: str) -> None:
    program = lowered(built(build))
    assert "conv_normed_sm90" not in tactics(program, "Conv")
    reasons = refusals(program, "conv_normed_sm90")
    assert any(because in reason for reason in reasons), reasons


@pytest.mark.usefixtures("wanted")
def test_refusals_in_other_builds() -> None:
    graph = built(block)
    assert any("it is for 16-bit floats" in r for r in refusals(lowered(graph, "tf32"), "conv_normed_sm90"))
    same_bits = lowered(graph, row_invariant=True)
    assert any("moments are summed in another order" in r for r in refusals(same_bits, "conv_normed_sm90"))


def test_images_are_whole_groups_of_eight_rows() -> None:
    source = (Source(4, 8, 64),)
    for options in (
        {"norm": RowNorm(True, 1e-5, 20)},
        {"norm": RowNorm(False, 1e-5, 32)},
        {"norm": RowNorm(True, 1e-5, 48)},
    ):
        with pytest.raises(InternalError, match="moments of images cover 8 rows each"):
            Problem(2, 64, source, **options)  # type: ignore[arg-type]
    with pytest.raises(InternalError, match="moments of images cover 8 rows each"):
        Problem(2, 64, (Source(3, 5, 64),), moments=True, moment_rows=8)
    Problem(2, 64, source, norm=RowNorm(True, 1e-5, 32), moments=True, moment_rows=8)


CONFIGS = (
    Config(1, 1, 1, 40, 3), Config(2, 1, 1, 64, 2, out_buffers=2), Config(1, 1, 2, 48, 2), Config(1, 1, 1, 104, 3, alternate=True),
    Config(1, 1, 1, 24, 2, direct=True), Config(1, 2, 1, 32, 2), Config(1, 1, 1, 128, 2, share=(2, 1)),
    Config(1, 1, 1, 64, 2, share=(1, 2)), Config(2, 1, 1, 40, 2, direct=True), Config(1, 1, 1, 16, 12, stationary=True, blocks=2),
    Config(1, 1, 1, 8, 3, direct=True, blocks=2),
)  # fmt: skip


def _built(name: str, precision: str = "fp16") -> tuple[Graph, Program]:
    graph = built(NETS[name])
    return graph, lowered(graph, precision, target="cuda:sm_90a")


@pytest.mark.nvrtc
@pytest.mark.usefixtures("wanted")
def test_kernels_compile_without_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {}
    for config in CONFIGS:
        only(monkeypatch, config)
        _, program = _built("block")
        texts = {k: kernel.generated.get("generated.cuh", "") for k, kernel in enumerate(program.kernels)}
        own = [k for k, text in texts.items() if "#define MOMENT_ROWS 8" in text or "#define IMAGE_NORM 1" in text]
        assert len(own) >= 2
        made |= {f"{config}, kernel {k}": recipe_of(program.kernels[k]) for k in own}
    for name in covering(made):
        check_spills(made[name])


@pytest.mark.hopper
@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", NETS)
def test_each_configuration_on_a_gpu(
    name: str, config: Config, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, config)
    graph, program = _built(name, precision)
    found = checked_program(program, feeds_of(graph), TOLERANCE[precision])
    assert {"RowMoments", "NormedProduct"} & {e.kind for e in found}
