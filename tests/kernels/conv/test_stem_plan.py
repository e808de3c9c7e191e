"""The plan of the convolution of an image in the layout of the input: the order of its sums, refusals, and the compiled kernel.
Tests marked ``gpu`` need a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.conv_cases import ADD, RELU, convolve
from support.spills import check_spills

from optdnn.errors import InternalError
from optdnn.kernels.conv import stem_cost as conv_stem_cost
from optdnn.kernels.conv import stem_kernel as stem
from optdnn.kernels.conv.problem import Depth, Source
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.types import Array, to_tf32

CLIP: tuple[tuple[str | float, ...], ...] = (("bias",), ("clip", -1.0, 2.0))


def problem(
    batch: int, source: Source, channels: int, image: str = "float32", *, last: bool = False, **more: Any
) -> stem.Problem:
    """The source of a dense image: planar, or channels-last (``last``)."""
    c, h, w = source.channels, source.height, source.width
    strides = (h * w * c, 1, w * c, c) if last else (c * h * w, h * w, w, 1)
    return stem.Problem(batch, source, channels, strides, image, **more)


CASES: dict[str, tuple[stem.Problem, stem.Config]] = {
    "7x7/2": (
        problem(2, Source(40, 48, 3, (7, 7), (2, 2), (3, 3, 3, 3)), 64, "float16", epilogue=RELU),
        stem.Config(4, 8, 2, 8, 8),
    ),
    "7x7/2, many tiles, ahead": (
        problem(40, Source(64, 64, 3, (7, 7), (2, 2), (3, 3, 3, 3)), 64, epilogue=RELU),
        stem.Config(4, 32, 2, 4, 8, True),
    ),
    "3x3/2": (
        problem(3, Source(33, 31, 3, (3, 3), (2, 2), (1, 1, 1, 1)), 32, epilogue=CLIP),
        stem.Config(1, 16, 1, 4, 4),
    ),
    "3x3/2, pads at the end": (
        problem(3, Source(32, 32, 3, (3, 3), (2, 2), (0, 0, 1, 1)), 40, "bfloat16", dtype="bfloat16"),
        stem.Config(2, 16, 1, 5, 5),
    ),
    "3x3/1": (
        problem(2, Source(20, 24, 3, (3, 3), (1, 1), (1, 1, 1, 1)), 64, "float16", epilogue=ADD),
        stem.Config(2, 24, 3, 4, 8),
    ),
    "11x11/4, one channel": (
        problem(2, Source(65, 63, 1, (11, 11), (4, 4), (2, 2, 2, 2)), 96),
        stem.Config(4, 16, 2, 6, 12),
    ),
    "5x3 dilated, two channels": (
        problem(2, Source(19, 23, 2, (5, 3), (1, 2), (4, 1, 3, 2), (2, 3)), 24),
        stem.Config(2, 8, 1, 3, 3),
    ),
    "rows dilated, planes": (
        problem(2, Source(30, 20, 4, (3, 3), (2, 2), (3, 0, 2, 1), (3, 1)), 24),
        stem.Config(2, 8, 1, 1, 3, True),
    ),
    "one axis": (
        problem(2, Source(1, 400, 1, (1, 10), (1, 5), (0, 0, 0, 0)), 16, "float16"),
        stem.Config(1, 80, 5, 2, 2),
    ),
    "four channels, blocks of channels": (
        problem(2, Source(18, 16, 4, (4, 4), (2, 2), (1, 2, 1, 0)), 136, epilogue=RELU),
        stem.Config(8, 8, 4, 2, 4),
    ),
    "bytes, normalized": (
        problem(2, Source(30, 32, 3, (3, 3), (2, 2), (1, 1, 1, 1)), 16, "uint8", normalize=True),
        stem.Config(2, 16, 1, 2, 2, True),
    ),
    "bytes as cameras give them": (
        problem(
            2, Source(30, 27, 3, (7, 7), (2, 2), (3, 3, 3, 3)), 24, "uint8", last=True, normalize=True, epilogue=RELU
        ),
        stem.Config(3, 16, 3, 3, 3),
    ),
    "7x7/2, fp32": (
        problem(2, Source(40, 48, 3, (7, 7), (2, 2), (3, 3, 3, 3)), 64, epilogue=RELU, dtype="float32"),
        stem.Config(2, 8, 1, 4, 8),
    ),
    "7x7/2, tf32, many tiles, ahead": (
        problem(40, Source(64, 64, 3, (7, 7), (2, 2), (3, 3, 3, 3)), 64, epilogue=RELU, dtype="tfloat32"),
        stem.Config(2, 32, 2, 4, 8, True),
    ),
    "3x3/1, fp32, a residual": (
        problem(2, Source(20, 24, 3, (3, 3), (1, 1), (1, 1, 1, 1)), 40, epilogue=ADD, dtype="float32"),
        stem.Config(2, 24, 1, 5, 5),
    ),
    "5x3 dilated, fp32": (
        problem(2, Source(19, 23, 2, (5, 3), (1, 2), (4, 1, 3, 2), (2, 3)), 24, dtype="float32"),
        stem.Config(2, 8, 1, 3, 3, True),
    ),
    "3x3/2, tf32 of halves": (
        problem(3, Source(33, 31, 3, (3, 3), (2, 2), (1, 1, 1, 1)), 8, "float16", epilogue=CLIP, dtype="tfloat32"),
        stem.Config(1, 16, 1, 1, 1),
    ),
    "bytes as cameras give them, fp32": (
        problem(
            2, Source(30, 27, 3, (7, 7), (2, 2), (3, 3, 3, 3)), 24, "uint8", last=True, normalize=True, dtype="float32"
        ),
        stem.Config(3, 16, 1, 3, 3),
    ),
    "signed bytes": (
        problem(1, Source(12, 12, 3, (3, 3), (1, 1), (1, 1, 1, 1)), 8, "int8"),
        stem.Config(2, 8, 1, 1, 1),
    ),
}


def emulate(p: stem.Problem, config: stem.Config, image: Array, packed: Array) -> Array:
    """The kernel's order over NCHW images: a tile's pixels as they are in shared memory, then sums over the words of K."""
    s, layout, (out_h, out_w) = p.source, p.layout, p.out_size
    rows, columns = stem.halo(p, config)
    pitch = stem._pitch(p, config)
    offsets = stem._words(p, rows, pitch)
    together = 1 if layout.planes else layout.together
    per_word = 4 // p.item
    first = (p.phase - layout.lead if layout.planes else p.phase * together) // per_word
    out = np.full((p.batch, out_h, out_w, p.channels), np.nan)
    across, down = stem.tiles(p, config)
    for n, ty, tx in itertools.product(range(p.batch), range(down), range(across)):
        top = ty * config.tile_h * s.stride[0] - s.padding[0]
        left = tx * config.tile_w * s.stride[1] - s.padding[1] - p.phase
        assert left % p.vector == 0
        shape = (s.channels, rows, pitch) if layout.planes else (rows, pitch, together)
        shared = np.full(shape, np.nan)
        for c, y, x in itertools.product(range(s.channels), range(rows), range(columns)):
            inside = 0 <= top + y < s.height and 0 <= left + x < s.width
            shared[(c, y, x) if layout.planes else (y, x, c)] = image[n, c, top + y, left + x] if inside else 0
        if not layout.planes:
            shared[:, :columns, s.channels :] = 0
        flat = shared.reshape(-1)
        for y, x in itertools.product(range(config.tile_h), range(config.tile_w)):
            if ty * config.tile_h + y >= out_h or tx * config.tile_w + x >= out_w:
                continue
            base = (y * s.stride[0] * pitch + x * s.stride[1]) * together // per_word + first
            pixels = np.concatenate([flat[per_word * (base + w) : per_word * (base + w + 1)] for w in offsets])
            assert np.isnan(out[n, ty * config.tile_h + y, tx * config.tile_w + x]).all()  # written once
            out[n, ty * config.tile_h + y, tx * config.tile_w + x] = packed @ pixels
    return out


@pytest.mark.parametrize("name", [name for name in CASES if "many" not in name])
def test_words_are_the_window(name: str) -> None:
    p, config = CASES[name]
    s, rng = p.source, np.random.default_rng(0)
    p = replace(p, batch=1)
    assert stem.refuse(p, config) is None
    image = rng.standard_normal((1, s.channels, s.height, s.width))
    weight = rng.standard_normal((p.channels, s.channels, *s.kernel))
    packed = stem.pack_weights(p, weight)
    strides, at = stem.weight_view(p)
    view = np.lib.stride_tricks.as_strided(packed.reshape(-1)[at:], weight.shape, [8 * x for x in strides])
    np.testing.assert_array_equal(view, weight)
    np.testing.assert_allclose(
        emulate(p, config, image, packed), convolve(image.transpose(0, 2, 3, 1), weight, s), rtol=1e-9, atol=1e-9
    )


def test_vectors_are_as_wide_as_every_row_allows() -> None:
    s = Source(32, 48, 3, (7, 7), (2, 2), (3, 3, 3, 3))
    p = problem(2, s, 64, "float16")
    assert (p.vector, p.phase, p.layout.planes, p.layout.steps) == (8, 5, True, 11)
    assert problem(2, s, 64, "float32").vector == 4
    assert problem(2, replace(s, width=44), 64, "float16").vector == 4
    assert replace(p, offset=2).vector == 2
    assert replace(p, strides=(1, *p.strides[1:]), batch=1).vector == 8, "one image has no next"
    assert replace(p, strides=(p.strides[0] + 1, *p.strides[1:])).vector == 1
    assert not problem(2, s, 64, "uint8", last=True).layout.planes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source": Source(32, 32, 5, (3, 3))}, "up to 4 channels, not 5"),
        ({"image": "float64"}, "does not read images of float64"),
        ({"epilogue": (("relu",),)}, "does not begin with the bias"),
        ({"source": Source(32, 32, 3, (3, 3), depth=Depth(5, 5, 1)), "normalize": True}, "volumes take no normalization"),
        ({"source": Source(32, 32, 3, (3, 3), depth=Depth(5, 5, 1)), "dtype": "float32"}, "factors of volumes are 16-bit"),
        ({"source": Source(64, 64, 3, (10, 10)), "dtype": "float32"}, "are longer than 256"),
        ({"channels": 12}, "multiple of 8"),
        ({"source": Source(8, 8, 3, (9, 9))}, "there are no pixels"),
        ({"source": Source(64, 64, 3, (16, 16))}, "are longer than 512"),
        ({"strides": (1 << 32, 1 << 29, 32, 1)}, "more elements than the kernel addresses"),
    ],
)  # fmt: skip
def test_problems_that_no_tile_can_run_are_refused(change: dict[str, Any], reason: str) -> None:
    p = replace(problem(1, Source(32, 32, 3, (3, 3)), 16), **change)
    assert reason in str(stem.no_kernel(p))
    assert reason in str(stem.refuse(p, stem.Config(2, 8, 1, 1, 2)))
    assert not conv_stem_cost.candidates(p, of_arch("sm_90a"))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (stem.Config(2, 12, 1, 1, 2), "not a tile of this kernel"),
        (stem.Config(1, 8, 1, 1, 2), "not a tile of this kernel"),
        (stem.Config(64, 8, 1, 1, 2), "2048 threads are not a block"),
        (stem.Config(8, 16, 8, 8, 8), "more than 128 accumulators per thread"),
        (stem.Config(8, 32, 4, 8, 8, True), "do not fit the registers of a thread"),
        (stem.Config(4, 32, 4, 4, 4, True), "shared memory exceed"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(config: stem.Config, reason: str) -> None:
    p = problem(1, Source(512, 512, 3, (3, 3), (1, 1), (1, 1, 1, 1)), 64)
    assert reason in str(stem.refuse(p, config, shared=5000))


def test_weights_of_another_convolution_are_an_error() -> None:
    with pytest.raises(InternalError, match="another convolution"):
        stem.pack_weights(CASES["3x3/2"][0], np.zeros((32, 3, 5, 5)))


FOCUS = problem(1, Source(640, 640, 3, (6, 6), (2, 2), (2, 2, 2, 2)), 32, "float32", epilogue=(("bias",), ("silu",)))
"""YOLOX reads blocks of 2 x 2 pixels: a convolution of the image after the passes."""


def test_addresses_of_many_taps_need_registers() -> None:
    many = stem.Config(4, 112, 7, 4, 4)
    assert stem.refuse(FOCUS, many) == "its accumulators and inputs do not fit the registers of a thread"
    assert stem.refuse(replace(FOCUS, image="float16"), many) is None


@pytest.mark.nvrtc
def test_first_choices_for_many_taps_do_not_spill() -> None:
    for config in conv_stem_cost.candidates(FOCUS, of_arch("sm_90a"))[:3]:
        check_spills(stem.recipe(FOCUS, config), threads=config.threads)


def test_every_candidate_is_one_and_is_named() -> None:
    for p, _ in CASES.values():
        found = conv_stem_cost.candidates(p, of_arch("sm_90a"))
        assert found
        assert len({str(c) for c in found}) == len(found) <= 16
        assert all(
            stem.refuse(p, c) is None and 1e-6 < conv_stem_cost.estimate(p, c, of_arch("sm_90a")) < 1e-4 for c in found
        )


@pytest.mark.parametrize(
    "name",
    [
        "7x7/2, many tiles, ahead",
        "3x3/1",
        "bytes as cameras give them",
        "11x11/4, one channel",
        "7x7/2, fp32",
        "5x3 dilated, fp32",
    ],
)
@pytest.mark.nvrtc
def test_kernels_do_not_spill(name: str) -> None:
    p, config = CASES[name]
    for arch in ("sm_80", "sm_90a") if name == "3x3/1" else ("sm_90a",):
        check_spills(stem.recipe(p, config, arch), threads=config.threads)


@pytest.mark.parametrize(("dtype", "exact"), [("float32", True), ("tfloat32", False), ("float16", False)])
def test_functions_of_fp32_are_exact(dtype: str, exact: bool) -> None:
    p, config = CASES["7x7/2, fp32"]
    made = stem.recipe(replace(p, dtype=dtype, epilogue=(("bias",), ("gelu",))), config)
    assert ("erff(" in made.generated["generated.cuh"]) == exact
    assert ("--use_fast_math" in made.options) != exact


# ---- on a GPU ----------------------------------------------------------------------------------------------------------------

TYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16)} | dict.fromkeys(("float32", "tfloat32"), np.dtype(np.float32))
BOUNDS = {"bfloat16": 3e-3, "float16": 4e-4, "float32": 1e-6, "tfloat32": 1e-5}
"""Relative errors. The kernel rounds ties away from zero, to_tf32 to even numbers."""


@pytest.fixture
def memory() -> Any:
    from support.device_memory import Memory

    made = Memory()
    yield made
    made.free()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.hopper) for name in CASES])
def test_kernels_compute_the_convolution(memory: Any, name: str) -> None:
    p, config = CASES[name]
    for c in dict.fromkeys((config, *conv_stem_cost.candidates(p, memory.device)[:2])):
        check(memory, p, c)


def check(memory: Any, p: stem.Problem, config: stem.Config) -> None:
    """One launch, compared with the definition in float64 of the same rounded operands. The result was full of NaN before."""
    s, rng, dtype = p.source, np.random.default_rng(1), TYPES.get(p.dtype, np.dtype(np.float16))
    shape = (p.batch, s.channels, s.height, s.width)
    kind, rounded = TYPES.get(p.image) or np.dtype(p.image), to_tf32 if p.dtype == "tfloat32" else np.asarray
    bounds = (0, 256) if p.image == "uint8" else (-128, 128)
    image = (rng.integers(*bounds, shape) if kind.kind in "iu" else rng.standard_normal(shape)).astype(kind)
    factors = rng.uniform(0.01, 0.02, s.channels).astype(np.float32) if p.normalize else ()
    shifts = rng.uniform(-2, 2, s.channels).astype(np.float32) if p.normalize else ()
    seen = image.astype(np.float32)
    if p.normalize:
        seen = seen * np.reshape(factors, (-1, 1, 1)) + np.reshape(shifts, (-1, 1, 1))
    seen = rounded(seen.astype(dtype)).astype(np.float64)
    weight = (rng.standard_normal((p.channels, s.channels, *s.kernel)) / np.sqrt(p.layout.depth)).astype(dtype)
    weight = rounded(weight)
    bias = rng.standard_normal(p.channels).astype(np.float32)
    out = (p.batch, *p.out_size, p.channels)
    residual = rng.standard_normal(out).astype(dtype)
    last = p.strides[1] == 1 and s.channels > 1
    at = {
        "image": memory.put(image.transpose(0, 2, 3, 1) if last else image), "weights": memory.put(stem.pack_weights(p, weight)),
        "bias": memory.put(bias), "residual": memory.put(residual), "output": memory.put(np.full(out, np.nan, dtype)),
    }  # fmt: skip
    from support.bound import bound

    cache, normalization = nvrtc.KernelCache(), ([float(x) for x in factors], [float(x) for x in shifts])
    made = stem.launch(p, config, memory.device, p.channels, p.channels, normalization)
    memory.run(bound(made, at, cache))
    want = convolve(seen.transpose(0, 2, 3, 1), weight.astype(np.float64), s) + bias
    for name, *numbers in p.epilogue[1:]:
        if name == "add":
            want = want + residual.astype(np.float64)
        else:
            want = np.maximum(want, 0) if name == "relu" else np.clip(want, *numbers)
    got = memory.get(at["output"], out, dtype).astype(np.float64)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < BOUNDS[p.dtype], (str(config), error)
