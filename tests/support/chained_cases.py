"""Two 1x1 convolutions in one launch: each case has a configuration and tests one thing. GPU tests run the cases, compile tests
compile them, and small ones also run on the processor."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from optdnn.kernels.conv.chained_kernel import Config, Integers, Pitches, Problem
from optdnn.kernels.conv.parameters import permuted_rows
from optdnn.ops.requantize import BOUNDS, Requantize, byte_bias
from optdnn.runtime.cuda.compile.render import Stage, uses_residual
from optdnn.runtime.reference.quantized import epilogue
from support.conv_cases import apply_stages

BIAS: tuple[Stage, ...] = (("bias",),)
RELU: tuple[Stage, ...] = (("bias",), ("relu",))
ADD_RELU: tuple[Stage, ...] = (("bias",), ("add",), ("relu",))
ADD: tuple[Stage, ...] = (("bias",), ("add",))
SILU: tuple[Stage, ...] = (("bias",), ("silu",))

CASES: dict[str, tuple[Problem, Config]] = {
    "one chunk": (Problem(1, (4, 4), 64, 64, 64, RELU, RELU), Config(1, 16, 1, 2)),
    "bottlenecks": (Problem(2, (7, 5), 64, 256, 64, ADD_RELU, RELU), Config(2, 16, 2, 3)),
    "wider after it": (Problem(2, (6, 6), 64, 128, 128, ADD_RELU, RELU), Config(2, 32, 1, 2)),
    "a ring of weights": (Problem(3, (6, 6), 128, 320, 128, ADD_RELU, RELU), Config(2, 16, 1, 2, 2)),
    "a perceptron": (Problem(2, (5, 5), 96, 384, 96, SILU, ADD, stored=False), Config(1, 32, 2, 2, 3)),
    "nothing added": (Problem(2, (5, 5), 40, 72, 24, RELU, BIAS), Config(3, 16, 1, 2)),
    "three warpgroups": (Problem(1, (12, 12), 64, 192, 64, ADD_RELU, ADD), Config(3, 32, 2, 2, 2)),
    "four tiles": (Problem(1, (5, 5), 64, 128, 256, ADD_RELU, RELU), Config(1, 16, 1, 4)),
    "pitches": (
        Problem(2, (5, 5), 40, 72, 24, ADD_RELU, ADD, pitches=Pitches(48, 88, 64, 72, 32)), Config(2, 16, 2, 2)
    ),
    "rings of two": (Problem(1, (11, 13), 96, 328, 72, ADD_RELU, ADD), Config(2, 16, 1, 2, 2)),
    "many columns": (Problem(1, (13, 12), 64, 192, 64, ADD_RELU, ADD), Config(1, 80, 1, 3, 3)),
    "bf16": (Problem(1, (6, 6), 64, 128, 64, ADD_RELU, RELU, dtype="bfloat16"), Config(2, 16, 1, 2)),
    "ResNet, first stage": (Problem(8, (56, 56), 64, 256, 64, ADD_RELU, RELU), Config(2, 128, 2, 3)),
    "ResNet, second stage": (Problem(8, (28, 28), 128, 512, 128, ADD_RELU, RELU), Config(2, 128, 1, 3, 2)),
    "ResNet, third stage": (Problem(8, (14, 14), 256, 1024, 256, ADD_RELU, RELU), Config(2, 48, 1, 3, 2)),
    "ResNet, to the second stage": (Problem(8, (56, 56), 64, 256, 128, ADD_RELU, RELU), Config(2, 128, 1, 2)),
}  # fmt: skip

UNSIGNED = Integers("uint8", "uint8", "int8", "uint8")
SIGNED = Integers("int8", "int8", "uint8", "int8", "uint8", (True, True))
LEAKY: tuple[Stage, ...] = (("bias",), ("leaky_relu", 0.125), ("mul_const", 0.75))
BYTES: dict[str, tuple[Problem, Config]] = {
    "one chunk": (Problem(1, (4, 8), 128, 128, 128, BIAS, BIAS, integers=Integers()), Config(1, 32, 1, 2)),
    "half a chunk": (Problem(1, (4, 4), 64, 64, 64, BIAS, BIAS, integers=Integers()), Config(1, 32, 1, 2)),
    "bottlenecks": (Problem(2, (7, 5), 64, 256, 64, ADD, BIAS, integers=UNSIGNED), Config(2, 32, 2, 3)),
    "zero points": (Problem(2, (6, 6), 64, 128, 128, ADD, ADD, integers=SIGNED), Config(2, 32, 1, 2)),
    "a ring of weights": (Problem(3, (6, 6), 160, 400, 144, ADD, BIAS, integers=UNSIGNED), Config(2, 32, 1, 2, 2)),
    "narrow": (
        Problem(2, (13, 11), 48, 160, 48, ADD, BIAS, integers=Integers("int8", "int8", "int8", "int8")), Config(1, 32, 2, 3)
    ),
    "stages": (Problem(2, (5, 5), 48, 144, 80, LEAKY, LEAKY, integers=UNSIGNED), Config(3, 32, 1, 2)),
    "a perceptron": (Problem(2, (5, 5), 96, 384, 96, BIAS, ADD, False, integers=SIGNED), Config(1, 64, 2, 2, 3)),
    "four tiles": (Problem(1, (5, 5), 64, 128, 256, ADD, BIAS, integers=UNSIGNED), Config(1, 32, 1, 4)),
    "pitches": (
        Problem(2, (5, 5), 48, 80, 32, ADD, ADD, pitches=Pitches(64, 96, 64, 80, 48), integers=SIGNED), Config(2, 32, 2, 2)
    ),
    "ResNet, first stage": (Problem(8, (56, 56), 64, 256, 64, ADD, BIAS, integers=UNSIGNED), Config(2, 128, 2, 3)),
    "ResNet, second stage": (Problem(8, (28, 28), 128, 512, 128, ADD, BIAS, integers=UNSIGNED), Config(2, 64, 1, 3)),
    "ResNet, third stage": (Problem(8, (14, 14), 256, 1024, 256, ADD, BIAS, integers=UNSIGNED), Config(2, 64, 1, 3, 2)),
    "ResNet, to the second stage": (Problem(8, (56, 56), 64, 256, 128, ADD, BIAS, integers=UNSIGNED), Config(2, 128, 2, 2)),
}  # fmt: skip
"""Cases of 8-bit integers."""
NUMBERS = (Requantize(0.25, 0.0, -60.0, 90.0, 7), Requantize(0.5, 0.0, -80.0, 70.0, 11))


def numbers(p: Problem) -> tuple[Requantize, Requantize]:
    """The numbers of both epilogues of integers, within the bounds of their types."""
    made, of = [], p.integers
    assert of is not None
    for own, out, added, zero in zip(NUMBERS, (of.middle, of.output), (of.added, of.added_last), of.zeros, strict=True):
        low, high, shift = max(own.low, BOUNDS[out][0]), own.high, own.zero * zero
        made.append(Requantize(own.residual_scale, byte_bias(added) + 3, low, high, shift))
    return made[0], made[1]


def byte_operands(p: Problem, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """The kernel's operands, and both results, exact to the bit."""
    rng, of = np.random.default_rng(seed), p.integers
    assert of is not None
    pitches = p.pitches or Pitches(p.depth, p.middle, p.channels, p.middle, p.channels)

    def rows(channels: int, pitch: int, dtype: str) -> np.ndarray:
        low, high = BOUNDS[dtype]
        made = np.full((p.pixels, pitch), high, dtype)
        made[:, :channels] = rng.integers(low, high + 1, (p.pixels, channels))
        return made

    def layer(x, weight, pairs, added, stages, numbers, dtype):  # type: ignore[no-untyped-def]
        total = (x.astype(np.int64) @ weight.astype(np.int64).T).astype(np.float64)
        own = {"residual_scale": numbers.residual_scale, "residual_zero": 3, "stages": stages, "zero": numbers.zero}
        own |= {"low": numbers.low, "high": numbers.high, "output_dtype": np.dtype(dtype)}
        second = added[:, : len(weight)] if uses_residual(stages) else None
        return epilogue(total, pairs[: len(weight)], second, **own)

    x = rows(p.depth, pitches.image, of.image)
    first, second = (
        rng.integers(-127, 128, shape).astype(np.int8) for shape in ((p.middle, p.depth), (p.channels, p.middle))
    )
    pairs = [
        np.stack([rng.uniform(0.5, 1.5, wide) / depth**0.5 / 100, rng.uniform(-20, 40, wide)], 1).astype(np.float32)
        for wide, depth in ((-(-p.middle // 128) * 128, p.depth), (-(-p.channels // 128) * 128, p.middle))
    ]
    added = rows(p.middle, pitches.added or p.middle, of.added or "int8")
    added_last = rows(p.channels, pitches.added_last or p.channels, of.added_last or "int8")
    own = numbers(p)
    middle = layer(x[:, : p.depth], first, pairs[0], added, p.first, own[0], of.middle)
    want = layer(middle, second, pairs[1], added_last, p.second, own[1], of.output)
    made = {"input": x, "first": permuted_rows(first), "second": permuted_rows(second)}
    made |= {"first_bias": pairs[0], "second_bias": pairs[1]}
    made |= {"added": added} if uses_residual(p.first) else {}
    made |= {"added_last": added_last} if uses_residual(p.second) else {}
    return made, middle, want


def byte_places(p: Problem) -> dict[str, np.ndarray]:
    """The memory for the results, filled with 85."""
    of, pitches = p.integers, p.pitches or Pitches(p.depth, p.middle, p.channels)
    assert of is not None
    made = {"output": np.full((p.pixels, pitches.output), 85, of.output)}
    return made | ({"middle": np.full((p.pixels, pitches.middle), 85, of.middle)} if p.stored else {})


def operands(p: Problem, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """The kernel's operands, and both results in fp32, computed by the definition."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16 if p.dtype == "bfloat16" else np.float16)
    pitches = p.pitches or Pitches(p.depth, p.middle, p.channels, p.middle, p.channels)

    def rows(channels: int, pitch: int) -> np.ndarray:
        made = np.full((p.pixels, pitch), np.nan, dtype)
        made[:, :channels] = rng.standard_normal((p.pixels, channels)).astype(dtype)
        return made

    def matrix(channels: int, depth: int) -> np.ndarray:
        return (rng.standard_normal((channels, depth)) / depth**0.5).astype(dtype)

    x, first, second = rows(p.depth, pitches.image), matrix(p.middle, p.depth), matrix(p.channels, p.middle)
    added, added_last = rows(p.middle, pitches.added or p.middle), rows(p.channels, pitches.added_last or p.channels)
    bias, bias_last = (rng.standard_normal(-(-n // 64) * 64).astype(np.float32) for n in (p.middle, p.channels))

    def layer(
        x: np.ndarray, weight: np.ndarray, bias: np.ndarray, added: np.ndarray, stages: tuple[Stage, ...]
    ) -> np.ndarray:
        y = x.astype(np.float32) @ weight.astype(np.float32).T
        return apply_stages(y, stages, bias[: len(weight)], added[:, : len(weight)].astype(np.float32))

    middle = layer(x[:, : p.depth], first, bias, added, p.first)
    want = layer(middle.astype(dtype), second, bias_last, added_last, p.second)
    made = {
        "input": x, "first": first, "second": second,
        "first_bias": bias, "second_bias": bias_last,
    }  # fmt: skip
    made |= {"added": added} if uses_residual(p.first) else {}
    made |= {"added_last": added_last} if uses_residual(p.second) else {}
    return made, middle, want


def places(p: Problem) -> dict[str, np.ndarray]:
    """The memory for the results, filled with NaN."""
    dtype = np.dtype(ml_dtypes.bfloat16 if p.dtype == "bfloat16" else np.float16)
    pitches = p.pitches or Pitches(p.depth, p.middle, p.channels)
    made = {"output": np.full((p.pixels, pitches.output), np.nan, dtype)}
    return made | ({"middle": np.full((p.pixels, pitches.middle), np.nan, dtype)} if p.stored else {})
