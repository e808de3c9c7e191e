"""A 1x1 and a depthwise convolution in one launch: each case has a configuration and tests one thing. GPU tests run the cases,
compile tests compile them, and small ones also run on the processor."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv import expanded_kernel as expanded
from optdnn.kernels.conv import separable_kernel as separable
from optdnn.kernels.conv.expanded_kernel import Config, Problem
from optdnn.kernels.conv.problem import Source
from optdnn.runtime.cuda.compile.render import Stage
from support.conv_cases import apply_stages, convolve, same

BIAS: tuple[Stage, ...] = (("bias",),)
RELU6: tuple[Stage, ...] = (("bias",), ("clip", 0.0, 6.0))
BOUNDS: tuple[Stage, ...] = (("bias",), ("clip", -0.1, 0.7))
SILU: tuple[Stage, ...] = (("bias",), ("silu",))


def problem(
    batch: int, depth: int, source: Source, between: tuple[Stage, ...] = SILU, epilogue: tuple[Stage, ...] = SILU, *,
    squeeze: bool = False, dtype: str = "float16", pitches: tuple[int, int] = (0, 0),
) -> Problem:  # fmt: skip
    """``pitches``: of the image and of the result, in elements."""
    filtered = depthwise.Problem(batch, source, epilogue, dtype, squeeze, pitches=(0, pitches[1], 0))
    return Problem(filtered, depth, between, pitches[0])


CASES: dict[str, tuple[Problem, Config]] = {
    "one step": (problem(2, 16, same(9, 10, 32)), Config(1, 16, 1, 3, 32, 2)),
    "half a step more": (problem(2, 24, same(9, 10, 32)), Config(2, 8, 2, 3, 32, 2)),
    "parts of 64 bytes": (problem(2, 96, same(8, 8, 16)), Config(2, 8, 1, 2, 16, 2)),
    "parts of 128 bytes": (problem(1, 128, same(7, 7, 32)), Config(4, 16, 1, 2, 16, 2)),
    "32 channels": (problem(2, 32, same(9, 9, 32), SILU, BIAS), Config(2, 4, 3, 2, 32, 2, 1)),
    "many channels": (problem(1, 88, same(7, 7, 16)), Config(1, 4, 2, 2, 16, 2, 1)),
    "stride 2": (problem(2, 16, Source(15, 13, 48, (3, 3), (2, 2), (1, 1, 1, 1))), Config(1, 8, 1, 2, 48, 1)),
    "stride 2, four strips": (problem(2, 16, Source(16, 18, 32, (3, 3), (2, 2), (0, 0, 1, 1))), Config(4, 4, 3, 1, 32, 2)),
    "5x5": (problem(2, 40, same(9, 9, 48, (5, 5))), Config(2, 16, 1, 5, 16, 4)),
    "5x5, stride 2": (problem(1, 16, Source(14, 14, 32, (5, 5), (2, 2), (1, 2, 2, 1))), Config(2, 8, 1, 2, 16, 2)),
    "2x2": (problem(2, 16, Source(9, 9, 32, (2, 2))), Config(1, 8, 1, 4, 32, 2)),
    "dilated": (problem(1, 16, same(12, 11, 16, (3, 3), dilation=(2, 3))), Config(2, 16, 1, 3, 16, 2)),
    "channels that fill no block": (problem(2, 16, same(6, 6, 40)), Config(1, 8, 1, 3, 32, 2)),
    "pitches": (problem(2, 16, same(9, 10, 24), BOUNDS, SILU, pitches=(24, 40)), Config(1, 16, 1, 3, 32, 2)),
    "sums of tiles": (problem(2, 16, same(9, 10, 40), squeeze=True), Config(1, 8, 1, 2, 32, 2)),
    "means": (problem(3, 16, same(7, 7, 40), squeeze=True), Config(2, 8, 1, 2, 32, 2)),
    "means, stride 2": (
        problem(3, 24, Source(13, 13, 32, (3, 3), (2, 2), (1, 1, 1, 1)), BOUNDS, BOUNDS, squeeze=True), Config(4, 8, 1, 1, 16, 1)
    ),
    "bf16": (problem(2, 24, same(9, 10, 32), squeeze=True, dtype="bfloat16"), Config(2, 8, 2, 3, 32, 2)),
    "ReLU6": (problem(2, 24, same(9, 10, 32), RELU6, RELU6), Config(2, 8, 2, 3, 32, 2)),
    "ReLU6, bf16": (problem(2, 24, same(9, 10, 32), RELU6, RELU6, dtype="bfloat16"), Config(2, 8, 2, 3, 32, 2)),
    "persistent": (problem(40, 24, same(28, 28, 144), RELU6, RELU6), Config(4, 16, 2, 2, 48, 2, 2, 2)),
    "persistent, means": (problem(300, 80, same(7, 7, 480, (5, 5)), squeeze=True), Config(4, 8, 1, 1, 96, 1, 2, 1)),
    "wide": (problem(2, 16, Source(112, 112, 96, (3, 3), (2, 2), (1, 1, 1, 1)), squeeze=True), Config(2, 4, 7, 1, 16, 4, 1, 2)),
}  # fmt: skip


def operands(p: Problem, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The kernel's operands, and its result in fp32, computed by the definition."""
    f, s, rng = p.filtered, p.filtered.source, np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16 if f.dtype == "bfloat16" else np.float16)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    x = np.full((f.batch, s.height, s.width, p.pitch or p.depth), np.nan, dtype)
    x[..., : p.depth] = random(f.batch, s.height, s.width, p.depth).astype(dtype)
    matrix = (random(s.channels, p.depth, 1, 1) / p.depth**0.5).astype(dtype)
    filters = (random(s.channels, 1, *s.kernel) / np.prod(s.kernel) ** 0.5).astype(dtype)
    shifts, bias = random(s.channels), random(s.channels)
    read = x[..., : p.depth].astype(np.float32)
    inner = (
        apply_stages(read @ matrix[:, :, 0, 0].astype(np.float32).T, p.between, shifts).astype(dtype).astype(np.float32)
    )
    want = apply_stages(convolve(inner, filters.astype(np.float32), s), f.epilogue, bias)
    made = {
        "input": x, "expansion": expanded.pack_expansion(matrix), "shifts": shifts,
        "filters": separable.pack_filters(filters), "bias": bias,
    }  # fmt: skip
    return made, want
