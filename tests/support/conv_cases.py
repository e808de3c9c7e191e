"""Convolutions: each case has a configuration and tests one thing. GPU tests run the cases, compile tests compile them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ml_dtypes  # noqa: F401 (names of element types)
import numpy as np

from optdnn.ir.graph import Value
from optdnn.kernels.builder import TensorView, channels_last, row_major
from optdnn.kernels.conv.hopper_launch import family, launch
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.maps import Feed
from optdnn.kernels.conv.parameters import pack_weights
from optdnn.kernels.conv.parts_kernel import PartsConfig
from optdnn.kernels.conv.patch_kernel import PatchConfig
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.conv.space_to_depth import space_to_depth
from optdnn.kernels.launch import Launch
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.render import Stage
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.launches.plan import MAP_BYTES
from support.net import Net

RELU: tuple[Stage, ...] = (("bias",), ("relu",))
ADD: tuple[Stage, ...] = (("bias",), ("add",), ("relu",))
STEM = space_to_depth(Source(64, 64, 3, (7, 7), (2, 2), (3, 3, 3, 3)))
SMALL = space_to_depth(Source(32, 32, 3, (3, 3), (1, 1), (1, 1, 1, 1)))


def same(
    height: int,
    width: int,
    channels: int,
    kernel: tuple[int, int] = (3, 3),
    stride: int = 1,
    dilation: tuple[int, int] = (1, 1),
) -> Source:
    """A source whose output has the same height and width (at stride 1)."""
    pad = [(k - 1) * d // 2 for k, d in zip(kernel, dilation, strict=True)]
    return Source(height, width, channels, kernel, (stride, stride), (pad[0], pad[1], pad[0], pad[1]), dilation)


def convolve(image: np.ndarray, weight: np.ndarray, source: Source) -> np.ndarray:
    """The convolution of an NHWC image and an OIHW weight (I: channels of one group), by the definition, in their precision."""
    groups = image.shape[3] // weight.shape[1]
    if groups > 1:
        parts = zip(np.split(image, groups, 3), np.split(weight, groups, 0), strict=True)
        return np.concatenate([convolve(i, w, source) for i, w in parts], 3)
    top, left, bottom, right = source.padding
    padded = np.pad(image, ((0, 0), (top, max(bottom, 0)), (left, max(right, 0)), (0, 0)))
    out_h, out_w = source.output()
    total = np.zeros((image.shape[0], out_h, out_w, weight.shape[0]), image.dtype)
    for r in range(source.kernel[0]):
        for s in range(source.kernel[1]):
            h0, w0 = r * source.dilation[0], s * source.dilation[1]
            rows = padded[:, h0 : h0 + (out_h - 1) * source.stride[0] + 1 : source.stride[0]]
            total += rows[:, :, w0 : w0 + (out_w - 1) * source.stride[1] + 1 : source.stride[1]] @ weight[:, :, r, s].T
    return total


def apply_stages(
    x: np.ndarray, stages: Sequence[Stage], bias: np.ndarray, residual: np.ndarray | None = None
) -> np.ndarray:
    """The epilogue by its definition, in the precision of the arrays."""
    for name, *values in stages:
        if name == "bias":
            x = x + bias
        elif name == "add":
            x = x + residual
        elif name == "mul":
            x = x * residual
        elif name == "clip":
            x = np.clip(x, *values)
        elif name == "relu":
            x = np.maximum(x, 0)
        elif name == "square":
            x = x * x
        elif name == "silu":
            x = x / (1 + np.exp(-x))
        elif name == "swish":
            x = x / (1 + np.exp(values[0] * -x))
        elif name == "hard_swish":
            x = x * np.clip(x / 6 + 0.5, 0, 1)
        else:
            raise KeyError(name)
    return x


CASES: dict[str, tuple[Problem, Config | PatchConfig]] = {
    "1x1": (Problem(2, 64, (Source(8, 8, 64),), RELU), Config(1, 1, 1, 64, 2)),
    "1x1 squared": (
        Problem(2, 64, (Source(8, 8, 64),), (("bias",), ("relu",), ("square",))),
        Config(1, 1, 1, 64, 2),
    ),
    "1x1 deep": (Problem(2, 128, (Source(9, 7, 512),), RELU), Config(2, 1, 1, 48, 3)),
    "1x1 persistent": (Problem(48, 256, (Source(28, 28, 64),), ADD), Config(2, 1, 1, 128, 3, 1, 2)),
    "1x1 stationary": (Problem(48, 256, (Source(28, 28, 64),), ADD), Config(2, 1, 1, 128, 3, 1, 3, True)),
    "1x1 stationary, two blocks": (
        Problem(48, 128, (Source(28, 28, 128),), RELU),
        Config(1, 1, 1, 64, 3, 1, 2, True, 2),
    ),
    "1x1 split": (Problem(1, 256, (Source(14, 14, 1024),), ADD), Config(1, 1, 1, 56, 2, 8)),
    "1x1 split, two groups": (Problem(1, 256, (Source(14, 14, 1024),), ADD), Config(2, 1, 1, 56, 2, 5)),
    "1x1 split 16": (Problem(1, 256, (Source(7, 7, 2048),), ADD), Config(1, 1, 1, 56, 2, 16)),
    "3x3": (Problem(1, 64, (same(8, 8, 64),), RELU), Config(1, 1, 1, 64, 2)),
    "3x3 over images": (Problem(5, 64, (same(7, 7, 128),), ADD), Config(1, 2, 1, 32, 3)),
    "3x3 stride 2": (Problem(3, 128, (same(14, 14, 64, stride=2),), RELU), Config(2, 1, 1, 56, 3)),
    "3x3 stride 2 odd": (Problem(3, 128, (same(15, 13, 64, stride=2),), RELU), Config(1, 1, 2, 56, 3, 3)),
    "3x3 asymmetric": (
        Problem(2, 64, (Source(12, 10, 64, (3, 3), (2, 2), (0, 0, 1, 1)),), RELU),
        Config(1, 1, 1, 32, 2),
    ),
    "1x7": (Problem(2, 64, (same(12, 9, 64, (1, 7)),), RELU), Config(1, 1, 1, 32, 2)),
    "7x1": (Problem(2, 64, (same(12, 9, 64, (7, 1)),), RELU), Config(1, 1, 1, 32, 2)),
    "5x3 dilated": (Problem(2, 64, (same(16, 14, 64, (5, 3), 1, (2, 3)),), RELU), Config(1, 1, 1, 72, 4)),
    "1x1 stride 2": (Problem(2, 64, (Source(14, 14, 128, (1, 1), (2, 2)),), RELU), Config(1, 1, 1, 56, 2)),
    "two sources": (
        Problem(2, 256, (Source(14, 14, 64), Source(28, 28, 128, (1, 1), (2, 2))), RELU),
        Config(2, 1, 1, 56, 3),
    ),
    "two sources split": (
        Problem(1, 256, (Source(14, 14, 64), Source(28, 28, 256, (1, 1), (2, 2))), RELU),
        Config(1, 2, 1, 56, 3, 4),
    ),
    "24 -> 40 channels": (Problem(2, 40, (Source(10, 10, 24),), RELU), Config(1, 1, 1, 40, 2)),
    "72 -> 200 channels": (Problem(2, 200, (Source(10, 10, 72),), RELU), Config(2, 1, 1, 40, 2)),
    "72 -> 200 channels split": (Problem(2, 200, (same(10, 10, 72),), ADD), Config(2, 1, 1, 40, 2, 4)),
    "fc": (Problem(1, 1000, (Source(1, 1, 2048),), (("bias",),)), Config(1, 1, 1, 8, 4, 8)),
    "fc of a batch": (Problem(37, 1000, (Source(1, 1, 2048),), (("bias",),)), Config(1, 1, 1, 40, 4)),
    "stem im2col": (Problem(2, 64, (STEM,), RELU), Config(1, 1, 1, 112, 4)),
    "stem im2col, unaligned ring": (Problem(2, 64, (STEM,), RELU), Config(1, 1, 1, 200, 7, 1, 2, False, 2)),
    "stem patch": (Problem(2, 64, (STEM,), RELU), PatchConfig(1, 2, 4, 32, 2)),
    "3 channels patch": (Problem(2, 64, (SMALL,), RELU), PatchConfig(1, 1, 7, 32, 2)),
    "patch": (Problem(2, 64, (same(16, 14, 64),), RELU), PatchConfig(1, 1, 4, 14, 2)),
    "patch persistent": (Problem(24, 64, (same(56, 56, 64),), RELU), PatchConfig(1, 2, 4, 56, 1)),
    "patch deep": (Problem(8, 128, (same(28, 28, 128),), RELU), PatchConfig(2, 1, 7, 28, 2, 4)),
    "patch one stage, two blocks": (Problem(4, 128, (same(28, 28, 128),), RELU), PatchConfig(2, 1, 4, 14, 1, 4, 2, 2)),
    "patch many blocks, residual": (Problem(5, 128, (same(28, 28, 256),), ADD), PatchConfig(2, 1, 7, 28, 2, 3)),
    "patch residual buffers": (Problem(32, 64, (same(28, 28, 64),), ADD), PatchConfig(1, 2, 2, 28, 2, 0, 2)),
    "patch clipped": (Problem(3, 72, (same(17, 19, 40),), ADD), PatchConfig(1, 1, 4, 16, 2)),
    "patch 1x7": (Problem(2, 64, (same(12, 24, 64, (1, 7)),), RELU), PatchConfig(1, 1, 3, 24, 2)),
    "patch 5x3 dilated": (Problem(2, 64, (same(16, 14, 64, (5, 3), 1, (2, 3)),), RELU), PatchConfig(1, 1, 4, 14, 1)),
    "patch bf16": (Problem(2, 64, (same(16, 14, 32),), ADD, "bfloat16"), PatchConfig(1, 1, 4, 14, 2)),
    "narrow, odd steps, persistent": (Problem(40, 64, (same(14, 14, 64),), RELU), Config(1, 1, 1, 40, 5, 1, 2)),
    "narrow, four stages": (Problem(3, 128, (same(9, 7, 128),), ADD), Config(2, 1, 1, 48, 4)),
    "narrow, split": (Problem(1, 256, (same(14, 14, 256),), ADD), Config(1, 1, 1, 40, 5, 5)),
    "direct": (Problem(2, 128, (Source(9, 7, 512),), ADD), Config(2, 1, 1, 48, 3, direct=True)),
    "direct, channel tail": (Problem(2, 200, (same(10, 10, 72),), ADD), Config(1, 2, 2, 40, 3, direct=True)),
    "patch direct": (Problem(3, 72, (same(17, 19, 40),), ADD), PatchConfig(1, 1, 4, 16, 2, direct=True)),
    "patch direct, two groups": (Problem(3, 128, (same(7, 7, 128),), RELU), PatchConfig(1, 2, 7, 7, 1, 5, direct=True)),
    "patch split": (Problem(3, 128, (same(7, 7, 512),), ADD), PatchConfig(1, 1, 7, 7, 2, 8, split=4)),
    "patch split, kept weights": (Problem(1, 128, (same(14, 14, 256),), ADD), PatchConfig(2, 1, 2, 14, 1, split=4)),
    "patch split, two groups": (Problem(3, 72, (same(7, 7, 320),), ADD), PatchConfig(1, 2, 7, 7, 2, 6, split=3)),
    "in turns": (Problem(48, 256, (Source(28, 28, 72),), ADD), Config(1, 1, 2, 96, 3, alternate=True)),
    "in turns, one tile each": (Problem(2, 200, (same(9, 7, 64),), RELU), Config(1, 1, 2, 80, 4, 1, 2, alternate=True)),
    "in turns, two buffers": (
        Problem(48, 256, (same(28, 28, 64, stride=2),), ADD),
        Config(1, 1, 1, 40, 5, 1, 2, alternate=True),
    ),
    "sharing pixels": (Problem(48, 328, (Source(28, 28, 72),), ADD), Config(2, 1, 1, 80, 3, share=(2, 1))),
    "sharing pixels, 3x3": (Problem(9, 200, (same(15, 13, 72),), RELU), Config(1, 2, 1, 64, 3, share=(2, 1))),
    "sharing weights": (Problem(48, 328, (Source(28, 28, 72),), ADD), Config(2, 1, 1, 80, 3, share=(1, 2))),
    "sharing weights, 3x3 stride 2": (
        Problem(9, 200, (same(15, 13, 72, stride=2),), ADD),
        Config(2, 1, 2, 56, 3, share=(1, 2)),
    ),
    "sharing pixels in turns": (
        Problem(48, 328, (Source(28, 28, 136),), ADD),
        Config(1, 1, 2, 144, 3, share=(2, 1), alternate=True),
    ),
    "sharing in turns, wide": (
        Problem(40, 328, (Source(28, 28, 512),), ADD),
        Config(1, 1, 2, 144, 4, alternate=True, share=(1, 2)),
    ),
    "sharing, wide": (Problem(40, 640, (Source(28, 28, 512),), ADD), Config(2, 1, 2, 144, 2, share=(2, 1))),
    "sharing, two sources, bf16": (
        Problem(20, 256, (Source(14, 14, 64), Source(28, 28, 128, (1, 1), (2, 2))), RELU, "bfloat16"),
        Config(2, 1, 1, 48, 3, share=(2, 1)),
    ),
    "stream-K, a tile more than multiprocessors": (
        Problem(133, 64, (Source(8, 8, 256),), RELU),
        Config(1, 1, 1, 64, 4, stream=True),
    ),
    "stream-K, one tile": (Problem(1, 64, (Source(7, 7, 1024),), ADD), Config(1, 1, 1, 56, 5, stream=True)),
    "stream-K, two steps a tile": (Problem(133, 64, (Source(8, 8, 128),), ADD), Config(1, 1, 1, 64, 3, stream=True)),
    "stream-K, batched product": (
        Problem(12, 328, (Source(1, 100, 520),), (("bias",), ("add",))),
        Config(2, 1, 1, 80, 4, stream=True),
    ),
    "stream-K 3x3, batch 1": (Problem(1, 512, (same(7, 7, 512),), ADD), Config(2, 1, 1, 56, 5, stream=True)),
    "stream-K 3x3, batch 8": (Problem(8, 200, (same(14, 13, 136),), ADD), Config(1, 2, 2, 40, 4, stream=True)),
    "stream-K 3x3 stride 2, two blocks": (
        Problem(8, 256, (same(28, 28, 128, stride=2),), RELU),
        Config(2, 1, 1, 72, 3, 1, 2, blocks=2, stream=True),
    ),
    "stream-K, many tiles, two buffers": (
        Problem(48, 328, (Source(28, 28, 136),), ADD),
        Config(2, 1, 1, 128, 4, 1, 2, stream=True),
    ),
    "stream-K, wide": (Problem(40, 640, (Source(28, 28, 512),), ADD), Config(2, 1, 2, 144, 3, stream=True)),
    "stream-K, two sources, bf16": (
        Problem(8, 256, (Source(14, 14, 64), Source(28, 28, 128, (1, 1), (2, 2))), RELU, "bfloat16"),
        Config(2, 1, 1, 48, 3, stream=True),
    ),
    "stream-K, 16 channels": (Problem(9, 72, (same(15, 13, 16),), RELU), Config(1, 1, 1, 200, 6, stream=True)),
    "bf16": (Problem(2, 128, (Source(9, 7, 512),), ADD, "bfloat16"), Config(2, 1, 1, 48, 3)),
    "bf16 split": (Problem(1, 256, (Source(14, 14, 1024),), ADD, "bfloat16"), Config(1, 1, 1, 56, 2, 8)),
    "silu": (Problem(2, 128, (Source(9, 7, 64),), (("bias",), ("silu",))), Config(2, 1, 1, 48, 2)),
    "swish": (Problem(2, 128, (Source(9, 7, 64),), (("bias",), ("swish", 1.702))), Config(2, 1, 1, 48, 2)),
    "mul clip": (
        Problem(2, 128, (Source(9, 7, 64),), (("bias",), ("mul",), ("clip", -1.0, 2.0))),
        Config(1, 1, 2, 48, 2),
    ),
    "hard_swish split": (
        Problem(2, 128, (Source(9, 7, 256),), (("bias",), ("hard_swish",), ("add",))),
        Config(1, 1, 2, 48, 2, 3),
    ),
}


@dataclass(frozen=True)
class General:
    """A convolution for the sm_80 kernel, with each of its tiles.

    ``channels`` of the result and ``inside`` (channels of a group's source): the numbers before padding, if the problem is
    padded.
    """

    problem: Problem
    channels: int = 0
    inside: int = 0


GENERAL: dict[str, General] = {
    "1x1": General(Problem(2, 64, (Source(9, 7, 128),), ADD)),
    "3x3": General(Problem(2, 72, (same(11, 13, 40),), RELU)),
    "3x3 stride 2, asymmetric": General(Problem(2, 64, (Source(12, 10, 64, (3, 3), (2, 2), (0, 0, 1, 1)),), RELU)),
    "5x3 dilated": General(Problem(2, 64, (same(16, 14, 64, (5, 3), 1, (2, 3)),), ADD)),
    "stride 9": General(Problem(2, 64, (Source(30, 40, 16, (3, 3), (9, 11)),), RELU)),
    "groups": General(Problem(2, 96, (same(9, 9, 16),), RELU, bands=4)),
    "groups of an odd number of channels": General(Problem(2, 96, (same(9, 9, 16),), ADD, bands=4), channels=68),
    "groups of many channels": General(Problem(2, 256, (same(9, 9, 64),), ADD, bands=2)),
    "odd channels": General(Problem(2, 72, (same(11, 13, 40),), RELU), channels=67, inside=37),
    "deep": General(Problem(2, 80, (same(7, 7, 512),), ADD)),
    "one pixel": General(Problem(3, 1000, (Source(1, 1, 512),), (("bias",),))),
    "bf16": General(Problem(2, 72, (same(11, 13, 40),), RELU, "bfloat16")),
    "tf32": General(Problem(2, 72, (same(11, 13, 40),), ADD, "tfloat32", "float32")),
    "tf32, groups, odd channels": General(
        Problem(2, 96, (same(9, 9, 20),), ADD, "tfloat32", "float32", bands=4), channels=76
    ),
}


def check_no_spills(problem: Problem, config: Config | PartsConfig) -> None:
    """A kernel on wgmma compiles for Hopper, and keeps everything in registers."""
    assert family(config).refuse(problem, config) is None
    (found,) = nvrtc.resources(family(config).recipe(problem, config)).values()
    assert found.spill_bytes == 0, (config, found)


def plain_launch(
    problem: Problem, config: Config | PatchConfig, gpu: GpuFacts, weights: Sequence[np.ndarray]
) -> Launch:
    """The launch of a Hopper kernel on tensors without gaps, with a residual if the problem has one."""

    def view(shape: tuple[int, ...], dtype: np.dtype) -> TensorView:
        return TensorView(0, 0, shape, channels_last(shape, shape[1]), dtype)

    n, dtype, out = problem.batch, weights[0].dtype, np.dtype(problem.out_dtype)
    feeds = [
        Feed(view((n, s.channels, s.height, s.width), dtype), w, s.stride, s.padding, s.dilation)
        for s, w in zip(problem.sources, weights, strict=True)
    ]
    packed = pack_weights(problem, weights)
    result = view((n, problem.channels, *problem.stored_size), out)
    operands = {"weights": TensorView(1, 0, packed.shape, row_major(packed.shape), packed.dtype), "output": result}
    operands |= {"residual": result} if problem.residual else {}
    return launch(problem, config, gpu, feeds, operands)


def in_reverse(made: Launch) -> Launch:
    """The launch with its tiles in reverse order."""
    at = 5 * MAP_BYTES + 3 * 8 + 7 * 4
    assert not any(made.parameters[at : at + 4])
    return replace(made, parameters=made.parameters[:at] + (1).to_bytes(4, "little") + made.parameters[at + 4 :])


def excited(n: Net, x: Value, channels: int) -> Value:
    """A squeeze-and-excitation block: a depthwise convolution, its squeeze, two small products, and the scaling."""
    y = n.op("Swish", n.conv(x, channels, group=channels, bias=True))
    s = n.op("Swish", n.conv(n.op("GlobalAveragePool", y), 8, 1, pads=0, bias=True))
    return n.op("Mul", y, n.op("Sigmoid", n.conv(s, channels, 1, pads=0, bias=True)))
