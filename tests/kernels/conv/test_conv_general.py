"""The general convolution kernel on a processor with emulated warps: the same source, its plans and its parameter block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import emulated
from support.conv_cases import GENERAL, apply_stages, convolve
from support.host import needs_compiler
from support.quantized_cases import GENERAL as QUANTIZED
from support.quantized_cases import arrays, compare
from support.sweep import sweep

from optdnn.kernels.conv import general_kernel as conv_general
from optdnn.kernels.conv.general_kernel import GeneralConfig
from optdnn.kernels.conv.padding import EDGES, edges
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.ops.requantize import Requantize, pad_channels
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.reference.quantized import conv as quantized_conv
from optdnn.types import to_tf32

pytestmark = needs_compiler
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
TOLERANCE = {"float16": 4e-4, "bfloat16": 3e-3, "float32": 2e-5}
PLAIN, SHARED = GeneralConfig(64, 64, 3), GeneralConfig(64, 128, 4, 2)
"""A tile for all cases (GPU tests run all tiles), and one whose blocks share K, for deep cases."""


def launched(
    problem: Problem, config: GeneralConfig, operands: dict[str, np.ndarray], output: np.ndarray, folder: Path,
    requantize: Requantize | None = None, **sizes: int,
) -> np.ndarray:  # fmt: skip
    """The kernel's result in ``output``, after two runs where blocks share K. The counts must be zero again after the first."""
    made = conv_general.launch(problem, config, of_arch("sm_80"), requantize=requantize, **sizes)
    recipe = made.recipe
    text = recipe.generated["generated.cuh"].replace(render.mma(problem.dtype), "")
    rendered = "\n".join(line for line in text.splitlines() if not line.startswith("#define"))
    options = ["-DPIXELS_UNSIGNED"] if problem.dtype == "uint8" else []
    library = emulated.compiled(
        recipe,
        made.function,
        folder,
        rendered=rendered,
        headers=["conv_element.cuh", "conv_edges.cuh"],
        options=options,
    )
    partial, arrived = conv_general.workspace(problem, config, sizes.get("channels", 0))
    held = {name: emulated.aligned(a) for name, a in operands.items()}
    held["output"] = emulated.aligned(output)
    held["partial"], held["arrived"] = emulated.aligned(np.full(partial, 0xFF, np.uint8)), np.zeros(arrived, np.uint8)
    for _ in range(2 if arrived else 1):
        held["output"][...] = output
        emulated.run(library, made, {name: a.ctypes.data for name, a in held.items()})
        assert not held["arrived"].any()
    return held["output"]


@pytest.mark.parametrize(
    ("name", "config"),
    sweep(
        [*((name, PLAIN) for name in GENERAL if name != "deep"), ("deep", SHARED), ("tf32", SHARED)],
        ("groups", PLAIN),
    ),
    ids=str,
)
def test_convolutions_of_floats(name: str, config: GeneralConfig, tmp_path: Path) -> None:
    case, rng = GENERAL[name], np.random.default_rng(6)
    problem, source = case.problem, case.problem.sources[0]
    assert conv_general.refuse(problem, config) is None
    dtype = np.dtype(TYPES[problem.out_dtype])
    channels, inside = case.channels or problem.channels, case.inside or source.channels
    pitched = (problem.batch, *problem.out_size, -(-channels // 8) * 8)
    image = rng.standard_normal((problem.batch, source.height, source.width, source.channels * problem.bands)).astype(
        dtype
    )
    image[..., inside * problem.bands :] = np.nan  # after the channels
    weight = (
        rng.standard_normal((channels, inside, *source.kernel)) / (inside * np.prod(source.kernel)) ** 0.5
    ).astype(dtype)
    bias, residual = (
        rng.standard_normal(-(-channels // 4) * 4).astype(np.float32),
        rng.standard_normal(pitched).astype(dtype),
    )
    read = image[..., : inside * problem.bands]
    factors = [to_tf32(f) if problem.dtype == "tfloat32" else f for f in (read, weight)]
    total = convolve(factors[0].astype(np.float64), factors[1].astype(np.float64), source)
    want = apply_stages(
        total, problem.epilogue, bias[:channels].astype(np.float64), residual[..., :channels].astype(np.float64)
    )
    operands = {
        "pixels": image,
        "weights": conv_general.pack_weights(factors[1]),
        "channel": bias,
        "residual": residual,
    }
    sizes = {"channels": channels, "inside": inside, "pitch": pitched[3]}
    got = launched(problem, config, operands, np.full(pitched, 7.0, dtype), tmp_path, **sizes).astype(np.float64)
    assert (got[..., channels:] == 7.0).all(), "nothing is written after the channels"
    assert np.linalg.norm(got[..., :channels] - want) < TOLERANCE[problem.out_dtype] * np.linalg.norm(want)


SMALL = [
    name
    for name, case in QUANTIZED.items()
    if "float8" not in case.dtype and (case.config == PLAIN or (case.config == SHARED and "deep" in name))
]


@pytest.mark.parametrize("name", sweep(SMALL, *(n for n in SMALL if "residual" in n or "padded" in n)))
def test_convolutions_of_integers_are_exact(name: str, tmp_path: Path) -> None:
    case = QUANTIZED[name]
    data, problem = arrays(case), case.problem
    operands = {"pixels": data.image, "weights": data.packed, "channel": data.channel}
    operands |= {"residual": data.residual} if data.residual is not None else {}
    if problem.edged:
        operands |= dict(zip(EDGES, edges(problem, data.weight, case.pixel_zero), strict=True))
    config: Any = case.config
    row, numbers = data.image[0, 0].size, case.scaling().requantize
    got = launched(problem, config, operands, np.zeros_like(data.expected), tmp_path, numbers, row=row)
    assert compare(case, got, data.expected) == ""


@pytest.mark.slow
def test_the_emulation_notices_channels_in_another_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.change_source(monkeypatch, "conv_sm80.cu", "(row & 6) << 1 | (row & 8) >> 2", "row & 14")
    with pytest.raises(AssertionError, match="differ"):
        test_convolutions_of_integers_are_exact(SMALL[0], tmp_path)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize(("channels", "config"), [(24, PLAIN), (19, PLAIN), (24, SHARED)], ids=str)
def test_the_scale_of_data_may_be_computed(dtype: str, channels: int, config: GeneralConfig, tmp_path: Path) -> None:
    """Sums minus the zero point times the sums of weights, in integers; then one rounding per step."""
    rng, source = np.random.default_rng(8), Source(6, 5, 64, (3, 3))
    problem = Problem(2, 24, (source,), (("bias",), ("relu",)), dtype, "float32", dynamic=True)
    info = np.iinfo(dtype)
    image = rng.integers(info.min, info.max, (2, 6, 5, 64), endpoint=True).astype(dtype)
    weight = rng.integers(-128, 128, (channels, 64, 3, 3)).astype(np.int8)
    numbers = np.stack([rng.uniform(0.001, 0.01, channels), rng.standard_normal(channels), weight.sum((1, 2, 3))], 1)
    channel = pad_channels(numbers.astype(np.float32))
    scale, zero = np.array(0.0371, np.float32), np.array(info.max - 90, dtype)
    geometry: dict[str, Any] = {"strides": (1, 1), "pads": (0,) * 4, "dilations": (1, 1)}
    plain: dict[str, Any] = {"residual_scale": 1.0, "residual_zero": 0, "low": 0.0, "high": 0.0, "zero": 0}
    (want,) = quantized_conv(
        image.transpose(0, 3, 1, 2), weight, numbers.astype(np.float32), scale=scale, data_zero=zero,
        stages=problem.epilogue, output_dtype=np.dtype(np.float32), **plain, **geometry,
    )  # fmt: skip
    operands = {
        "pixels": image, "weights": conv_general.pack_weights(weight), "channel": channel, "data_scale": scale, "data_zero": zero,
    }  # fmt: skip
    out = np.zeros((2, 4, 3, 24), np.float32)
    sizes = {"channels": channels, "inside": 64, "pitch": 24}
    got = launched(problem, config, operands, out, tmp_path, Requantize(), **sizes)
    np.testing.assert_array_equal(got[..., :channels].transpose(0, 3, 1, 2), want)
    assert (want == 0).mean() < 0.9
    assert not got[..., channels:].any()
