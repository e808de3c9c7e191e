"""Runs of depthwise kernels on a processor with emulated warps, on random operands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from optdnn.kernels.conv import depthwise_bands_kernel as bands
from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import of_arch
from support import emulated

TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-3, "float32": 2e-6}
"""Largest difference by element type, of the largest expected element."""


@dataclass(frozen=True)
class Run:
    """Operands and results. ``x`` [images, height, width, channels], ``weight`` [channels, 1, frames, rows, columns], ``bias`` and
    ``residual`` are what the kernel read, in fp32; ``sums`` are the squeeze's."""

    x: Any
    weight: Any
    bias: Any
    residual: Any
    output: Any
    sums: Any


def images_of(held: Any, count: int, size: tuple[int, ...], places: tuple[int, int], channels: int) -> Any:
    """[count, height, width, channels] of a buffer. ``places``: elements from a pixel, and from an image, to the next."""
    return volumes_of(held, (1, count), size, (*places, 0), channels)[0]


def volumes_of(
    held: Any, count: tuple[int, int], size: tuple[int, ...], places: tuple[int, int, int], channels: int
) -> Any:
    """[volumes, frames, height, width, channels] of a buffer; ``count``: volumes, and frames of each. ``places``: elements from a
    pixel, and from a frame, to the next, and from the end of a volume to the next."""
    pitch, apart, gap = places
    strides = (n * held.itemsize for n in (count[1] * apart + gap, apart, size[1] * pitch, pitch, 1))
    return np.lib.stride_tricks.as_strided(held, (*count, *size, channels), tuple(strides))


def run(family: Any, problem: depthwise.Problem, config: Any, folder: Path) -> Run:
    """The kernel's results. It must not write between the pixels and the images of the result."""
    assert family.refuse(problem, config) is None
    s, rng = problem.source, np.random.default_rng(3)
    made = family.launch(problem, config, of_arch("sm_90a"))
    text = made.recipe.generated["generated.cuh"]
    text = text.replace(render.mma(problem.dtype), "") if family is bands else text
    rendered = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    of_bands = (), ("tile_walk.cuh", "vectors.cuh")
    first, headers = of_bands if family is bands else (("vectors.cuh",), ("conv_element.cuh", "depthwise_core.cuh"))
    library = emulated.compiled(made.recipe, made.function, folder, rendered=rendered, headers=headers, first=first)
    dtype = np.dtype(ml_dtypes.bfloat16 if problem.dtype == "bfloat16" else problem.dtype)
    taps = 1 if s.depth is None else s.depth.taps
    read, written, added = problem.apart
    volumes = 1 if s.depth is None else problem.batch // s.depth.out
    gaps = [max(0, volumes * gap) for gap in problem.gaps]
    x = rng.standard_normal(problem.images * read + gaps[0]).astype(dtype)
    weight = (rng.standard_normal((s.channels, 1, taps, *s.kernel)) / problem.taps**0.5).astype(dtype)
    bias = rng.standard_normal(s.channels).astype(np.float32)
    residual = rng.standard_normal(problem.batch * added + gaps[2]).astype(dtype)
    _, *tiles = family.tiles(problem, config)
    count, images = problem.averaged
    arrays = {
        "input": x, "weights": depthwise.pack_weights(weight, problem.band), "bias": bias, "residual": residual,
        "output": np.full(problem.batch * written + gaps[1], 7, dtype),
        "sums": np.zeros((count, images * int(np.prod(tiles)), s.channels), np.float32),
    }  # fmt: skip
    held = {key: emulated.aligned(array) for key, array in arrays.items()}
    emulated.run(library, made, {key: a.ctypes.data for key, a in held.items()})
    sizes = (s.height, s.width), problem.out_size, problem.out_size
    names = {"input": problem.images, "output": problem.batch, "residual": problem.batch}
    seen = {
        name: volumes_of(held[name], (volumes, count // volumes), size, places, s.channels)
        for (name, count), size, places in zip(
            names.items(), sizes, zip(problem.pitch, problem.apart, problem.gaps, strict=True), strict=True
        )
    }
    flat = {name: images.reshape(-1, *images.shape[2:]) for name, images in seen.items()}
    given = (flat["input"], weight, bias, flat["residual"], flat["output"], held["sums"])
    found = Run(*(a.astype(np.float32) for a in given))
    seen["output"][:] = 7
    assert (held["output"] == 7).all()
    return found
