"""Convolutions of 8-bit operands: numbers, packing, and refusals. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.conv_cases import same
from support.quantized_cases import CASES, IMAGE, arrays, compare, family
from support.spills import check_spills

from optdnn.errors import InternalError
from optdnn.kernels.conv import configs
from optdnn.kernels.conv import implicit_gemm as conv
from optdnn.kernels.conv import parameters as conv_params
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.quantized import pool_kernel as pool_int8
from optdnn.kernels.quantized import stem as quantized
from optdnn.ops import requantize
from optdnn.ops.requantize import QuantParams
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.reference.conv import conv as reference_conv
from optdnn.runtime.reference.quantized import epilogue


def test_relu_becomes_a_bound_and_constants_are_in_steps_of_the_result() -> None:
    scale, bias = np.array([0.5, 0.25]), np.array([3.0, -1.0])
    found = requantize.scaling(
        (("add",), ("relu",)), scale, bias, out=QuantParams("int8", 0.5), residual=QuantParams("int8", 0.125)
    )
    assert found.stages == (("bias",), ("add",))
    assert (found.requantize.low, found.requantize.high, found.requantize.residual_scale) == (0.0, 127.0, 0.25)
    np.testing.assert_array_equal(found.channel, [[1.0, 6.0], [0.5, -2.0]])


def test_a_stage_that_scales_do_not_pass_stays_in_real_units() -> None:
    found = requantize.scaling(
        (("silu",), ("clip", -1.0, 2.0)), np.ones(1), np.ones(1), out=QuantParams("uint8", 0.5, 10)
    )
    assert found.stages == (("bias",), ("silu",), ("clip", -1.0, 2.0), ("mul_const", 2.0))
    assert (found.requantize.low, found.requantize.high) == (-10.0, 245.0)


def test_bounds_that_leave_nothing_stay_in_order() -> None:
    found = requantize.scaling((("clip", 200.0, 300.0),), np.ones(1), np.ones(1), out=QuantParams("int8", 1.0))
    assert found.requantize.low == found.requantize.high == 127.0


def test_results_round_half_to_even_and_saturate() -> None:
    total = np.array([1, 3, 5, 1000, -1000, -1]).reshape(1, 1, -1)
    found = epilogue(
        total, np.array([[0.5, 0.0]], np.float32), None, stages=(("bias",),), residual_scale=1.0, residual_zero=0,
        low=-128.0, high=127.0, zero=0, output_dtype=np.dtype(np.int8),
    )  # fmt: skip
    assert found.reshape(-1).tolist() == [0, 2, 2, 127, -128, 0]


@pytest.mark.parametrize("together", [2, 4])
def test_reading_neighboring_pixels_together_computes_the_stem(together: int) -> None:
    rng = np.random.default_rng(0)
    image, weight = rng.integers(-9, 9, (1, 3, 64, 64)), rng.integers(-9, 9, (8, 3, 7, 7))
    options = {"strides": IMAGE.stride, "pads": IMAGE.padding, "dilations": (1, 1)}
    (expected,) = reference_conv(image.astype(np.float64), weight.astype(np.float64), None, **options)
    made, (left, _, width) = quantized.overlapped(IMAGE, together), quantized.row_padding(IMAGE, together)
    rows = np.zeros((made.height, width, 16))
    for dy in range(2):
        for dx in range(2):
            lane = (dy * 2 + dx) * 3
            rows[:, left : left + 32, lane : lane + 3] = image[0, :, dy::2, dx::2].transpose(1, 2, 0)
    view = np.lib.stride_tricks.sliding_window_view(rows.reshape(made.height, -1), made.channels, 1)[:, ::16][
        :, : made.width
    ]
    packed = quantized.overlapped_weights(IMAGE, weight, together).astype(np.float64)
    (found,) = reference_conv(
        view.transpose(2, 0, 1)[None], packed, None, strides=made.stride, pads=made.padding, dilations=made.dilation
    )
    np.testing.assert_array_equal(found, expected)


def test_packed_rows_put_neighboring_channels_eight_apart() -> None:
    problem = Problem(1, 32, (Source(1, 1, 32),), dtype="int8")
    weight = np.arange(32, dtype=np.int8).reshape(32, 1, 1, 1).repeat(32, 1)
    assert conv_params.pack_weights(problem, [weight])[:16, 0].tolist() == [
        0,
        2,
        4,
        6,
        8,
        10,
        12,
        14,
        1,
        3,
        5,
        7,
        9,
        11,
        13,
        15,
    ]


def test_integer_tiles_wider_than_32_columns_come_in_sixteens() -> None:
    problem = Problem(1, 64, (Source(8, 8, 64),), dtype="int8")
    assert "no tile of 40 columns" in str(conv.refuse(problem, Config(1, 1, 1, 40, 1)))
    assert conv.refuse(problem, Config(1, 1, 1, 48, 1)) is None
    with pytest.raises(InternalError, match="no tile of 40 columns of int8"):
        render.wgmma(40, "int8")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ((24, "int8", ""), "multiples of 8"),
        ((32, "float16", "int8"), "no kernel turns float16"),
        ((32, "int32", ""), "no kernel turns"),
    ],
)
def test_a_problem_that_no_kernel_runs_is_an_error(fields: tuple[int, str, str], reason: str) -> None:
    channels, dtype, out = fields
    with pytest.raises(InternalError, match=reason):
        Problem(1, channels, (Source(4, 4, 32),), dtype=dtype, out=out)


@pytest.mark.parametrize(
    "name", ["1x1 split", "uint8 with zero points", "patch residual buffers", "stem, pairs of pixels", "fp8"]
)
@pytest.mark.nvrtc
def test_cases_compile_without_spills(name: str) -> None:
    case = CASES[name]
    check_spills(family(case).recipe(case.problem, case.config))


def test_configurations_of_integers_are_found() -> None:
    for problem in (
        Problem(128, 64, (same(56, 56, 64),), dtype="int8"),
        Problem(1, 1008, (Source(1, 1, 2048),), dtype="int8"),
    ):
        found = configs.candidates(problem, of_arch("sm_90a"), 4)
        assert found
        assert all(conv.refuse(problem, c) is None for c in found)


def test_tiles_in_turn_are_not_proposed_for_8_bits() -> None:
    problem = Problem(4096, 3072, (Source(1, 1, 768),), (("bias",), ("gelu",)), "float8_e4m3fn")
    assert not any(c.alternate for c in configs.candidates(problem, of_arch("sm_90a"), 50))
    assert any(c.alternate for c in configs.candidates(replace(problem, dtype="float16"), of_arch("sm_90a"), 50))


def test_a_comparison_sees_one_wrong_step() -> None:
    case = CASES["1x1"]
    data = arrays(case)
    wrong = data.expected.copy()
    wrong.reshape(-1)[5] ^= 1
    assert compare(case, data.expected, data.expected) == ""
    assert "differ" in compare(case, wrong, data.expected)


@pytest.mark.parametrize(("channels", "pitches"), [(18, None), (16, (18, 16)), (16, (16, 18)), (16, (12, 16))])
def test_a_mean_is_of_words_of_four_channels(channels: int, pitches: tuple[int, int] | None) -> None:
    with pytest.raises(InternalError, match="are not multiples of 4"):
        pool_int8.global_average_pool("int8", "sm_90a", (2, 7, 7, channels), 0, 0.1, (-128.0, 127.0), 0, pitches)
