"""Separable convolutions: each case has a configuration and tests one thing. GPU tests run the cases, compile tests compile
them."""

from __future__ import annotations

from dataclasses import replace

from optdnn.kernels.conv.problem import Source
from optdnn.kernels.conv.separable_kernel import Config, Problem
from optdnn.runtime.cuda.compile.render import Stage
from support.conv_cases import RELU, same

BIAS: tuple[Stage, ...] = (("bias",),)
RELU6: tuple[Stage, ...] = (("bias",), ("clip", 0.0, 6.0))
SILU: tuple[Stage, ...] = (("bias",), ("silu",))
ADD: tuple[Stage, ...] = (("bias",), ("add",))

CASES: dict[str, tuple[Problem, Config]] = {
    "one chunk": (Problem(2, same(16, 16, 32), 16, RELU6, BIAS), Config(1, 1, 16, 1, 1, 16, 32, 1)),
    "one chunk of 64": (Problem(2, same(16, 16, 64), 16, RELU6, BIAS), Config(1, 1, 16, 1, 1, 16, 64, 1)),
    "one chunk of 16": (Problem(2, same(16, 16, 16), 16, RELU6, BIAS), Config(1, 1, 16, 1, 1, 16, 16, 1)),
    "a ring": (Problem(3, same(16, 16, 192), 64, RELU6, BIAS), Config(1, 1, 16, 1, 1, 64, 64, 2)),
    "a ring of single steps": (Problem(3, same(16, 16, 112), 64, RELU6, BIAS), Config(1, 1, 8, 2, 1, 64, 16, 3)),
    "residual": (Problem(3, same(14, 14, 96), 24, RELU6, ADD), Config(1, 1, 16, 1, 1, 24, 32, 2)),
    "two strips": (Problem(3, same(14, 14, 96), 24, RELU6, ADD), Config(1, 2, 16, 1, 1, 24, 32, 2)),
    "four strips": (Problem(3, same(14, 14, 96), 24, RELU6, ADD), Config(1, 4, 8, 2, 1, 24, 32, 2)),
    "two groups": (Problem(3, same(14, 30, 96), 40, RELU6, ADD), Config(2, 1, 16, 2, 1, 40, 32, 2)),
    "three groups": (Problem(3, same(14, 30, 96), 40, SILU, BIAS), Config(3, 1, 4, 4, 1, 40, 32, 2)),
    "persistent": (Problem(40, same(28, 28, 64), 32, RELU6, ADD), Config(1, 1, 16, 1, 1, 32, 32, 3)),
    "two blocks": (Problem(40, same(28, 28, 64), 32, RELU6, ADD), Config(1, 2, 8, 2, 1, 32, 32, 2, 1, 2)),
    "two parts": (Problem(2, same(7, 7, 64), 320, RELU6, BIAS), Config(1, 1, 8, 1, 2, 160, 16, 3)),
    "tiles of channels": (Problem(2, same(7, 7, 64), 200, RELU6, ADD), Config(1, 1, 8, 1, 1, 64, 32, 2)),
    "stride 2": (
        Problem(3, Source(15, 13, 48, (3, 3), (2, 2), (1, 1, 1, 1)), 24, RELU6, BIAS),
        Config(1, 1, 4, 2, 1, 24, 32, 2),
    ),
    "stride 2, two strips": (
        Problem(3, Source(30, 30, 48, (3, 3), (2, 2), (0, 0, 1, 1)), 24, RELU6, BIAS),
        Config(1, 2, 16, 1, 1, 24, 16, 2),
    ),
    "stride 2 x 1": (
        Problem(2, Source(12, 14, 64, (3, 5), (2, 1), (1, 2, 0, 1)), 24, BIAS, RELU6),
        Config(1, 2, 8, 2, 1, 24, 64, 1),
    ),
    "5x5": (Problem(2, same(14, 14, 80, (5, 5)), 40, SILU, ADD), Config(1, 1, 16, 1, 1, 40, 32, 2)),
    "5x5, stride 2": (
        Problem(2, Source(14, 14, 80, (5, 5), (2, 2), (1, 2, 2, 1)), 40, SILU, BIAS),
        Config(1, 2, 8, 1, 1, 40, 64, 2),
    ),
    "2x2": (Problem(2, Source(9, 9, 32, (2, 2)), 24, BIAS, BIAS), Config(1, 1, 8, 1, 1, 24, 32, 1)),
    "1x3": (Problem(2, same(9, 9, 32, (1, 3)), 24, BIAS, BIAS), Config(1, 2, 8, 1, 1, 24, 32, 1)),
    "3x1": (Problem(2, same(9, 9, 32, (3, 1)), 24, BIAS, BIAS), Config(1, 1, 8, 1, 1, 24, 32, 1)),
    "dilated": (
        Problem(2, same(18, 15, 48, (3, 3), dilation=(2, 3)), 24, RELU6, BIAS),
        Config(1, 4, 16, 1, 1, 24, 32, 2),
    ),
    "odd channels": (Problem(3, same(9, 11, 20), 16, RELU6, BIAS, pitches=(24, 16, 16)), Config(1, 1, 8, 2, 1, 16, 32, 1)),
    "odd channels, wide pitch": (
        Problem(3, same(9, 11, 75), 24, RELU6, ADD, pitches=(80, 40, 32)),
        Config(1, 1, 8, 2, 1, 24, 16, 3),
    ),
    "asymmetric": (
        Problem(2, Source(12, 10, 32, (3, 3), (1, 1), (0, 2, 1, 0)), 24, RELU6, BIAS),
        Config(1, 1, 16, 1, 1, 24, 32, 1),
    ),
    "cropped": (
        Problem(2, Source(12, 10, 32, (3, 3), (1, 1), (0, 1, -2, -3)), 24, RELU6, BIAS),
        Config(1, 1, 16, 1, 1, 24, 32, 1),
    ),
    "split": (Problem(1, same(14, 14, 192), 64, RELU6, ADD), Config(1, 1, 16, 1, 1, 64, 64, 1, 3)),
    "split unevenly": (Problem(2, same(14, 14, 320), 24, RELU6, ADD), Config(1, 1, 16, 1, 1, 24, 64, 2, 4)),
    "split, two strips": (Problem(1, same(14, 14, 192), 64, RELU6, ADD), Config(1, 2, 8, 2, 1, 64, 32, 2, 3)),
    "split, two groups": (Problem(1, same(14, 14, 192), 64, RELU6, ADD), Config(2, 1, 8, 2, 1, 64, 32, 2, 3)),
    "split 16, parts": (Problem(1, same(7, 7, 576), 320, RELU6, ADD), Config(1, 1, 8, 1, 2, 160, 32, 2, 16)),
    "split, tiles of channels": (Problem(1, same(7, 7, 192), 200, RELU6, ADD), Config(1, 1, 8, 1, 1, 64, 32, 2, 3)),
    "bf16": (Problem(3, same(14, 14, 96), 24, RELU6, ADD, "bfloat16"), Config(1, 2, 16, 1, 1, 24, 32, 2)),
    "bounds of other bits": (
        Problem(2, same(9, 9, 32), 24, (("bias",), ("clip", -0.1, 0.7)), BIAS), Config(1, 1, 8, 1, 1, 24, 32, 1),
    ),
    "relu": (Problem(2, same(9, 9, 32), 24, RELU, BIAS), Config(1, 1, 8, 1, 1, 24, 32, 1)),
    "relu in bf16": (Problem(2, same(9, 9, 32), 24, RELU, BIAS, "bfloat16"), Config(1, 1, 8, 1, 1, 24, 32, 1)),
    "relu before": (replace(Problem(3, same(14, 14, 96), 24, BIAS, ADD), relu=True), Config(1, 1, 16, 1, 1, 24, 32, 2)),
    "relu before, 5x5, two strips": (
        replace(Problem(2, same(14, 14, 80, (5, 5)), 40, BIAS, BIAS), relu=True), Config(1, 2, 8, 2, 1, 40, 32, 2),
    ),
    "relu before, bf16": (
        replace(Problem(2, same(9, 9, 32), 24, BIAS, BIAS, "bfloat16"), relu=True), Config(1, 1, 8, 1, 1, 24, 32, 1),
    ),
    "bf16, split": (Problem(1, same(14, 14, 192), 64, RELU6, ADD, "bfloat16"), Config(1, 1, 16, 1, 1, 64, 64, 1, 3)),
}  # fmt: skip
