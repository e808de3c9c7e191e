"""Convolutions of 8-bit operands, and their comparison on a GPU with the meaning in NumPy. Each tests one thing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from optdnn.kernels.conv import general_kernel as conv_general
from optdnn.kernels.conv import implicit_gemm as conv
from optdnn.kernels.conv import parameters as conv_params
from optdnn.kernels.conv import patch_kernel as conv_patch
from optdnn.kernels.conv.general_kernel import GeneralConfig
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.patch_kernel import PatchConfig
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.quantized import stem as quantized
from optdnn.ops import requantize
from optdnn.ops.requantize import QuantParams
from optdnn.runtime.cuda.compile.render import Stage
from optdnn.runtime.reference import quantized as meaning
from support.conv_cases import same

FP8 = QuantParams("float8_e4m3fn", 0.01)
DTYPES = {
    "int8": np.dtype(np.int8), "uint8": np.dtype(np.uint8), "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
RELU: tuple[Stage, ...] = (("relu",),)
ADD: tuple[Stage, ...] = (("add",), ("relu",))
IMAGE = Source(64, 64, 3, (7, 7), (2, 2), (3, 3, 3, 3))


@dataclass(frozen=True)
class Case:
    """A layer: ``batch`` images of ``source``, ``channels`` filters, stages in real units, and the types of its tensors."""

    batch: int
    channels: int
    source: Source
    stages: tuple[Stage, ...]
    config: Config | PatchConfig | GeneralConfig
    dtype: str = "int8"
    out: QuantParams | None = field(default_factory=lambda: QuantParams("int8", 0.037))
    float_out: str = "float16"
    residual: QuantParams | None = None
    groups: int = 1
    """``source`` has the channels of one group."""
    pixel_zero: int = 0
    """Zero point that pads the pixels."""

    @property
    def problem(self) -> Problem:
        """The problem, with the numbers of :meth:`scaling` in its epilogue."""
        return replace(self._plain, epilogue=self.scaling().stages)

    @property
    def _plain(self) -> Problem:
        out = self.out.dtype if self.out else self.float_out
        residual = self.residual.dtype if self.residual else ""
        zero = self.out is not None and self.out.zero != 0
        return Problem(
            self.batch, self.channels, (self.source,), (("bias",),), self.dtype, out, residual, zero, bands=self.groups,
            edged=self.pixel_zero != 0,
        )  # fmt: skip

    def scaling(self) -> requantize.Scaling:
        """Scales for which results fill their range."""
        rng = np.random.default_rng(7)
        depth = self.source.channels * self.source.kernel[0] * self.source.kernel[1]
        typical = 60.0 * 60.0 * depth**0.5 if self.dtype != "float8_e4m3fn" else depth**0.5
        scale = rng.uniform(0.5, 1.5, self.channels) * 2.0 / typical
        bias = rng.standard_normal(self.channels)
        return requantize.scaling(self.stages, scale, bias, out=self.out, residual=self.residual)

    def data(self, name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
        """Random numbers that fill the type."""
        rng = np.random.default_rng(seed)
        if name in requantize.BOUNDS and "int" in name:
            low, high = requantize.BOUNDS[name]
            return rng.integers(low, high + 1, shape).astype(DTYPES[name])
        return rng.standard_normal(shape).astype(DTYPES[name])


_A, _R = QuantParams("int8", 0.037), QuantParams("int8", 0.021)
CASES: dict[str, Case] = {
    "1x1": Case(2, 64, Source(8, 8, 64), RELU, Config(1, 1, 1, 64, 2)),
    "1x1, 32 channels": Case(3, 32, Source(9, 7, 32), (), Config(1, 1, 1, 48, 2)),
    "1x1, 16 channels": Case(3, 16, Source(9, 7, 16), (), Config(1, 1, 1, 24, 2)),
    "1x1 deep": Case(2, 128, Source(9, 7, 512), RELU, Config(2, 1, 1, 48, 3)),
    "1x1, 48 -> 80 channels": Case(3, 80, Source(9, 7, 48), (), Config(2, 1, 1, 24, 2)),
    "1x1 persistent": Case(48, 256, Source(28, 28, 64), ADD, Config(2, 1, 1, 128, 3, 1, 2), residual=_R),
    "1x1 stationary": Case(48, 256, Source(28, 28, 64), ADD, Config(2, 1, 1, 128, 3, 1, 3, True), residual=_R),
    "1x1 two tiles of channels": Case(3, 256, Source(28, 28, 64), ADD, Config(1, 1, 2, 80, 3, 1, 2), residual=_R),
    "1x1 wide": Case(9, 64, Source(28, 28, 256), RELU, Config(1, 2, 1, 256, 2)),
    "1x1, 144 sums a thread": Case(6, 512, Source(28, 28, 256), ADD, Config(2, 1, 2, 144, 3), residual=_R),
    "1x1, 160 sums a thread": Case(3, 256, Source(28, 28, 128), RELU, Config(1, 2, 2, 160, 3)),
    "1x1 split": Case(1, 256, Source(14, 14, 1024), ADD, Config(1, 1, 1, 48, 2, 8), residual=_R),
    "1x1 split, two groups": Case(1, 256, Source(14, 14, 1024), ADD, Config(2, 1, 1, 64, 2, 5), residual=_R),
    "1x1 split 16": Case(1, 256, Source(7, 7, 2048), ADD, Config(1, 1, 1, 48, 2, 16), residual=_R),
    "direct, tail of channels": Case(2, 208, same(10, 10, 80), ADD, Config(1, 2, 2, 32, 3, direct=True), residual=_R),
    "3x3 over images": Case(5, 64, same(7, 7, 128), ADD, Config(1, 2, 1, 32, 3), residual=_R),
    "3x3 stride 2 odd": Case(3, 128, same(15, 13, 64, stride=2), RELU, Config(1, 1, 2, 64, 3, 3)),
    "3x3 asymmetric": Case(2, 64, Source(12, 10, 64, (3, 3), (2, 2), (0, 0, 1, 1)), RELU, Config(1, 1, 1, 32, 2)),
    "5x3 dilated": Case(2, 64, same(16, 14, 128, (5, 3), 1, (2, 3)), (), Config(1, 1, 1, 80, 4)),
    "1x1 stride 2": Case(2, 64, Source(14, 14, 128, (1, 1), (2, 2)), RELU, Config(1, 1, 1, 96, 2)),
    "8 columns": Case(1, 1008, Source(1, 1, 2048), (), Config(1, 1, 1, 8, 4, 8)),
    "8 columns, fp16 out": Case(1, 1000, Source(1, 1, 2048), (), Config(1, 1, 1, 8, 4, 8), out=None),
    "fp32 out": Case(37, 1000, Source(1, 1, 2048), RELU, Config(1, 1, 1, 48, 4, direct=True), out=None, float_out="float32"),
    "fp32 out, split, residual": Case(
        2, 40, same(9, 7, 256), ADD, Config(1, 1, 2, 32, 4, 3), out=None, float_out="float32", residual=QuantParams("float32", 1.0)
    ),
    "patch, fp32 out": Case(2, 72, same(16, 14, 64), RELU, PatchConfig(1, 1, 4, 14, 2, direct=True), out=None, float_out="float32"),
    "fp16 out": Case(37, 1000, Source(1, 1, 2048), (), Config(1, 1, 1, 48, 4), out=None),
    "bf16 out, residual": Case(
        3, 136, same(9, 9, 64), ADD, Config(2, 1, 1, 48, 4), out=None, float_out="bfloat16", residual=QuantParams("bfloat16", 1.0)
    ),
    "clip": Case(2, 64, Source(9, 7, 64), (("clip", 0.0, 3.0),), Config(1, 1, 1, 64, 2)),
    "clip from above zero": Case(2, 64, Source(9, 7, 64), (("clip", 0.5, 3.0), ("relu",)), Config(1, 1, 1, 64, 2)),
    "leaky relu": Case(2, 64, Source(9, 7, 64), (("leaky_relu", 0.1),), Config(1, 1, 1, 64, 2)),
    "silu": Case(2, 64, Source(9, 7, 64), (("silu",),), Config(1, 1, 1, 64, 2)),
    "silu, its gate rounded": Case(2, 64, Source(9, 7, 64), (("rounded_silu", 250.0, 255.0, 0.004),), Config(1, 1, 1, 64, 2)),
    "hard swish, its gate rounded": Case(
        2, 64, Source(9, 7, 64), (("rounded_hard_swish", 250.0, 200.0, 0.004),), Config(1, 1, 1, 64, 2)
    ),
    "swish": Case(2, 64, Source(9, 7, 64), (("swish", -1.702),), Config(1, 1, 1, 64, 2)),
    "add, then constants": Case(
        2, 64, Source(9, 7, 64), (("add",), ("mul_const", 0.5), ("add_const", 0.3)), Config(1, 1, 1, 64, 2), residual=_R
    ),
    "multiplied": Case(2, 64, Source(9, 7, 64), (("mul",),), Config(1, 1, 1, 64, 2), residual=_R),
    "uint8": Case(
        2, 64, same(9, 7, 64), ADD, Config(1, 1, 1, 64, 2), "uint8", QuantParams("uint8", 0.03), residual=QuantParams("uint8", 0.02)
    ),
    "uint8 with zero points": Case(
        2, 128, Source(9, 7, 64), (("add",),), Config(1, 2, 1, 24, 2), "uint8", QuantParams("uint8", 0.03, 117),
        residual=QuantParams("uint8", 0.02, 131),
    ),
    "uint8 out of int8, residual int8, zero point": Case(
        2, 64, same(9, 7, 64), (("add",),), Config(1, 1, 1, 80, 2, 3), "int8", QuantParams("uint8", 0.03, 128),
        residual=QuantParams("int8", 0.02, -3),
    ),
    "int8 out of uint8, zero point": Case(
        2, 64, same(9, 7, 64), (), Config(1, 1, 1, 80, 2), "uint8", QuantParams("int8", 0.03, -7)
    ),
    "patch": Case(2, 64, same(16, 14, 64), RELU, PatchConfig(1, 1, 4, 14, 2)),
    "patch of 32 channels": Case(2, 48, same(16, 14, 32), RELU, PatchConfig(1, 1, 4, 14, 2)),
    "patch persistent": Case(24, 64, same(56, 56, 64), RELU, PatchConfig(1, 2, 4, 56, 1)),
    "patch deep": Case(8, 128, same(28, 28, 128), RELU, PatchConfig(2, 1, 7, 28, 2, 4)),
    "patch one stage, two blocks": Case(4, 128, same(28, 28, 256), RELU, PatchConfig(2, 1, 4, 14, 1, 4, 2, 2)),
    "patch many blocks, residual": Case(5, 128, same(28, 28, 256), ADD, PatchConfig(2, 1, 7, 28, 2, 3), residual=_R),
    "patch residual buffers": Case(32, 64, same(28, 28, 64), ADD, PatchConfig(1, 2, 2, 28, 2, 0, 2), residual=_R),
    "patch clipped": Case(3, 80, same(17, 19, 48), ADD, PatchConfig(1, 1, 4, 16, 2), residual=_R),
    "patch direct": Case(3, 80, same(17, 19, 48), ADD, PatchConfig(1, 1, 4, 16, 2, direct=True), residual=_R),
    "patch split": Case(3, 128, same(7, 7, 512), ADD, PatchConfig(1, 1, 7, 7, 2, 8, split=4), residual=_R),
    "patch, fp16 out": Case(2, 72, same(16, 14, 64), RELU, PatchConfig(1, 1, 4, 14, 2), out=None),
    "stem, pairs of pixels": Case(2, 64, quantized.overlapped(IMAGE, 2), RELU, PatchConfig(1, 2, 4, 32, 2)),
    "stem, fours of pixels": Case(2, 64, quantized.overlapped(IMAGE, 4), RELU, PatchConfig(1, 1, 8, 32, 2)),
    "fp8, 160 sums a thread, fp16 out": Case(
        1500, 512, Source(1, 1, 256), (), Config(2, 1, 2, 160, 2), "float8_e4m3fn", None
    ),
    "fp8, 144 sums a thread": Case(
        1500, 256, Source(1, 1, 384), (), Config(1, 2, 2, 144, 3), "float8_e4m3fn", FP8
    ),
    "fp8": Case(2, 128, Source(9, 7, 512), ADD, Config(2, 1, 1, 48, 3), "float8_e4m3fn", FP8,
                residual=QuantParams("float8_e4m3fn", 0.5)),
    "fp8 split, fp16 out": Case(1, 256, same(14, 14, 256), RELU, Config(1, 1, 1, 56, 2, 8), "float8_e4m3fn", None),
    "fp8 patch": Case(2, 64, same(16, 14, 64), RELU, PatchConfig(1, 1, 4, 14, 2), "float8_e4m3fn", FP8),
    "1x1 in turn": Case(48, 256, Source(28, 28, 64), ADD, Config(1, 1, 2, 112, 3, alternate=True), residual=_R),
    "3x3 in turn": Case(40, 128, same(14, 14, 128), RELU, Config(1, 1, 2, 96, 3, alternate=True)),
    "fp8 in turn, 160 sums a thread, fp16 out": Case(
        9000, 768, Source(1, 1, 256), (), Config(1, 1, 2, 160, 3, alternate=True), "float8_e4m3fn", None
    ),
    "fp8 gelu in turn": Case(
        9000, 640, Source(1, 1, 384), (("gelu",),), Config(1, 1, 2, 144, 4, alternate=True), "float8_e4m3fn",
        FP8
    ),
    "fp8 gelu, bf16 out": Case(
        100, 768, Source(1, 1, 768), (("gelu",),), Config(2, 1, 1, 80, 3), "float8_e4m3fn", None, "bfloat16"
    ),
}  # fmt: skip


_FULL = same(11, 13, 80)
GENERAL: dict[str, Case] = {
    f"{name}, {config}": replace(case, config=config)
    for config in conv_general.CONFIGS
    for name, case in {
        "mma": Case(2, 80, _FULL, ADD, config, residual=_R),
        "mma deep": Case(2, 96, same(7, 7, 512), ADD, config, residual=_R),
        "mma 1x1, one pixel": Case(3, 1008, Source(1, 1, 512), (), config, out=None),
        "mma stride 9": Case(2, 64, Source(30, 40, 16, (3, 3), (9, 11)), RELU, config),
        "mma 5x3 dilated": Case(2, 64, same(16, 14, 64, (5, 3), 1, (2, 3)), (("silu",),), config),
        "mma groups": Case(2, 192, same(9, 9, 32), ADD, config, residual=_R, groups=4),
        "mma stem": Case(2, 64, quantized.overlapped(IMAGE, 4), RELU, config),
        "mma uint8, zero points": Case(
            2, 128, _FULL, (("add",),), config, "uint8", QuantParams("uint8", 0.03, 117), residual=QuantParams("int8", 0.02, -3)
        ),
        "mma padded by a zero point": Case(
            2, 80, same(11, 13, 80, stride=2), (), config, "uint8", QuantParams("uint8", 0.03, 117), pixel_zero=131
        ),
        "mma deep, padded by a zero point": Case(2, 96, same(7, 7, 512), ADD, config, residual=_R, pixel_zero=-9),
        "mma groups, padded by a zero point": Case(2, 192, same(9, 9, 32), (), config, groups=4, pixel_zero=-9),
        "mma, fp32 out": Case(2, 72, _FULL, RELU, config, out=None, float_out="float32"),
        "mma, bf16 out, residual": Case(
            2, 72, _FULL, ADD, config, out=None, float_out="bfloat16", residual=QuantParams("bfloat16", 1.0)
        ),
        "mma fp8": Case(
            2, 80, _FULL, ADD, config, "float8_e4m3fn", FP8, residual=QuantParams("float8_e4m3fn", 0.5)
        ),
        "mma fp8, fp16 out": Case(37, 80, Source(1, 1, 272), (("gelu",),), config, "float8_e4m3fn", None),
    }.items()
    if conv_general.refuse(case.problem, config) is None
}  # fmt: skip
"""Cases for the general kernel, which run with each of its tiles."""


def family(case: Case) -> Any:
    """The module that plans the case's kernel."""
    return conv_patch if isinstance(case.config, PatchConfig) else conv


def attrs_of(case: Case) -> dict[str, Any]:
    """The attributes of the meaning."""
    scaled, source = case.scaling(), case.source
    r = scaled.requantize
    out = case.out.dtype if case.out else case.float_out
    return {
        "strides": source.stride, "pads": source.padding, "dilations": source.dilation, "group": case.groups,
        "stages": scaled.stages, "input_zero": case.pixel_zero,
        "residual_scale": r.residual_scale, "residual_zero": case.residual.zero if case.residual else 0,
        "low": r.low, "high": r.high, "zero": r.zero, "output_dtype": DTYPES[out],
    }  # fmt: skip


@dataclass
class Arrays:
    """The operands of a case in NHWC (``image`` as it is in memory), and the expected result."""

    image: np.ndarray
    weight: np.ndarray
    packed: np.ndarray
    channel: np.ndarray
    residual: np.ndarray | None
    expected: np.ndarray


def arrays(case: Case) -> Arrays:
    """Random operands and the exact result, NHWC."""
    source, problem = case.source, case.problem
    n, (h, w) = case.batch, problem.out_size
    pitch = source.pitch or source.channels * case.groups
    extra = source.channels // source.pitch - 1 if source.pitch else 0
    image = case.data(case.dtype, (n, source.height, source.width + extra, pitch), 1)
    seen = image
    if extra:
        rows = image.reshape(n, source.height, -1)
        view = np.lib.stride_tricks.sliding_window_view(rows, source.channels, 2)[:, :, ::pitch]
        seen = view[:, :, : source.width]
    weights_dtype = "float8_e4m3fn" if case.dtype == "float8_e4m3fn" else "int8"
    weight = case.data(weights_dtype, (case.channels, source.channels, *source.kernel), 2)
    out = case.out.dtype if case.out else case.float_out
    residual = case.data(case.residual.dtype, (n, h, w, case.channels), 3) if case.residual else None
    channel = case.scaling().channel
    operands = [
        seen.transpose(0, 3, 1, 2),
        weight,
        channel,
        None if residual is None else residual.transpose(0, 3, 1, 2),
    ]
    (expected,) = meaning.conv(*operands, **attrs_of(case))
    expected = np.ascontiguousarray(expected.transpose(0, 2, 3, 1)).astype(DTYPES[out])
    general = isinstance(case.config, GeneralConfig)
    packed = conv_general.pack_weights(weight) if general else conv_params.pack_weights(problem, [weight])
    return Arrays(image, weight, packed, requantize.pad_channels(channel), residual, expected)


def compare(case: Case, found: np.ndarray, expected: np.ndarray) -> str:
    """ "" for a right result, else the fault."""
    if found.dtype.itemsize == 1 and "float8" not in case.dtype:
        steps = np.abs(found.astype(np.int64) - expected.astype(np.int64)).max(initial=0)
        allowed = 1 if any(s[0] in ("silu", "rounded_silu", "swish", "gelu") for s in case.stages) else 0
        return (
            ""
            if steps <= allowed
            else f"{(found != expected).mean():.2%} of the results differ, by up to {steps} steps"
        )
    a, b = found.astype(np.float64), expected.astype(np.float64)
    error = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    limit = 2e-2 if "float8" in case.dtype and case.out else 6e-3 if case.float_out == "bfloat16" else 1e-3
    if "float8" not in case.dtype and not any(s[0] in ("silu", "rounded_silu", "swish", "gelu") for s in case.stages):
        limit = 0.0  # sums are exact, and there is one rounding
    return "" if error <= limit else f"relative error {error:.2e} exceeds {limit:.0e}"
