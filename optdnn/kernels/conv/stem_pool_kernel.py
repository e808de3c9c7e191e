"""Plans of the convolution of an image in its given layout and the max pool behind it (``conv_stem_pool.cu``): see
:mod:`optdnn.kernels.conv.stem_kernel`. Windows of the pool are 2 x 2 or 3 x 3, with a stride of 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from optdnn.kernels.conv import stem_cost
from optdnn.kernels.conv import stem_kernel as stem
from optdnn.kernels.conv.stem_kernel import Config
from optdnn.kernels.launch import Launch
from optdnn.kernels.ranking import varied
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

MOST_COLUMNS = 256
"""The widest result of the convolution: a tile is as wide."""

MOST_THREADS = 512
"""Of a block: all columns of an image's row are its own."""


@dataclass(frozen=True)
class Problem:
    """``conv``: the convolution; the pool's ``window`` (rows and columns, of a stride of 2), its padding ``top`` and ``left``, and the
    ``size`` of its result."""

    conv: stem.Problem
    window: int
    top: int
    left: int
    size: tuple[int, int]

    @property
    def bytes(self) -> int:
        """Least global traffic: each tensor once."""
        c = self.conv
        return c.bytes - 2 * c.batch * c.channels * (math.prod(c.out_size) - math.prod(self.size))


def no_kernel(problem: Problem) -> str | None:
    """Why no configuration can run the problem, or None."""
    p = problem
    if (why := stem.no_kernel(p.conv)) is not None:
        return why
    if p.conv.residual or p.conv.source.depth is not None:
        return "nothing is added to the result, and it is no volume"
    if p.window not in (2, 3) or max(p.top, p.left) > (p.window == 3):
        return f"windows of {p.window} x {p.window} with a padding of {max(p.top, p.left)} are none of 2 x 2 or 3 x 3"
    if p.conv.out_size[1] > MOST_COLUMNS:
        return f"{p.conv.out_size[1]} columns exceed a tile's {MOST_COLUMNS}"
    for n, size, pad in zip(p.size, p.conv.out_size, (p.top, p.left), strict=True):
        if n < 1 or (n - 1) * 2 - pad >= size:
            return "a window lies wholly in the padding"
    return None


def refuse(problem: Problem, config: Config, shared: int = stem.SHARED) -> str | None:
    """Why the configuration cannot run the problem, or None. ``shared``: bytes that a block can have."""
    if (why := no_kernel(problem)) is not None:
        return why
    pairs = config.tile_h // 2
    if (
        config.tile_h % 2
        or config.tile_w < problem.conv.out_size[1]
        or config.m % pairs
        or config.tile_w % (8 * config.m // pairs)
    ):
        return "its tile is not of whole rows, two by two, with the same columns for a warp"
    if (why := stem.refuse(problem.conv, config, shared, MOST_THREADS)) is not None:
        return why
    if registers(problem, config) > min(255, 65536 // (-(-config.threads // 128) * 128)):
        return "its sums and inputs do not fit the registers of a thread"
    if (needed := shared_bytes(problem, config)) > shared:
        return f"{needed} bytes of shared memory exceed {shared}"
    return None


def registers(problem: Problem, config: Config) -> int:
    """About how many registers a thread needs: the row before stays in some."""
    return stem.registers(problem.conv, config) + 2 * config.m // config.tile_h * config.n * (problem.window == 3)


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block: as of the convolution, and the largest elements of a tile's columns."""
    return stem.shared_bytes(problem.conv, config) + config.tile_h // 2 * config.tile_w * (config.columns * 16 + 16)


def resident(problem: Problem, config: Config, device: GpuFacts) -> int:
    """Blocks on a multiprocessor, by shared memory and registers."""
    shared = device.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024)
    return max(1, min(shared, stem.blocks_by_registers(problem.conv, config)))


def tiles(problem: Problem, config: Config) -> int:
    """Of an image."""
    return -(-problem.size[0] // (config.tile_h // 2))


def band(problem: Problem, config: Config, device: GpuFacts) -> int:
    """Tiles of an image that a block takes: so many that the blocks end first."""
    slots = device.multiprocessors * resident(problem, config, device)
    most = tiles(problem, config)

    def turns(count: int) -> int:
        return -(-problem.conv.batch * -(-most // count) * _parts(problem, config) // slots) * _walked(
            problem, config, count
        )

    return min(range(1, most + 1), key=lambda count: (turns(count), -count))


def _parts(problem: Problem, config: Config) -> int:
    """Blocks that share a tile's channels."""
    return -(-problem.conv.channels // (config.columns * 8))


def _walked(problem: Problem, config: Config, count: int) -> int:
    """Tiles that a block multiplies for ``count``: its first windows of three rows want a row of the one before, unless it is padding."""
    return count + (problem.window == 3 and (problem.top == 0 or count < tiles(problem, config)))


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile. Sizes of images and tensors are parameters."""
    more = {"IN_BANDS": 1, "POOL": problem.window, "POOL_TOP": problem.top, "POOL_LEFT": problem.left}
    return stem.recipe_with(problem.conv, config, "conv_stem_pool.cu", arch, more)


def launch(
    problem: Problem, config: Config, gpu: GpuFacts, pitch: int,
    normalization: tuple[Sequence[float], Sequence[float]] = ((), ()),
) -> Launch:  # fmt: skip
    """The launch. Operands and ``normalization`` as of :func:`optdnn.kernels.conv.stem_kernel.launch`, without a residual; ``pitch``:
    elements from pixel to pixel of the pooled result."""
    p, conv = problem, problem.conv
    count, whole = band(p, config, gpu), tiles(p, config)
    bands = -(-whole // count)
    # Of windows of three rows, the first tile begins behind the padding of the pool, and with the second row.
    skipped = (1 - p.top) * conv.source.stride[0] if p.window == 3 else 0
    made = stem.parameters(conv, (1, whole, conv.batch), (0, 1, 0), pitch, 0, normalization, skipped)
    made.i32(*p.size, count, bands)
    grid = (conv.batch * bands, _parts(p, config), 1)
    return made.launch(
        recipe(p, config, gpu.arch), "conv_stem_pool", grid, config.threads, shared=shared_bytes(p, config)
    )


APART, KEPT, SAVED = 0.12, 0.83, 0.6e-6
"""What each further block that loads the same pixels, for other channels, adds; of the convolution's predicted seconds, what a launch takes that
does not store its result (50 timings on an H200 at batch 1 to 128: a part of them, less a constant)."""


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch: by the model of the convolution alone, :data:`KEPT` and :data:`SAVED`, and :data:`APART` (63
    timings on an H200)."""
    p, count, at_once = problem, band(problem, config, device), resident(problem, config, device)
    blocks, walked = p.conv.batch * -(-tiles(p, config) // count) * _parts(p, config), _walked(p, config, count)
    turns = -(-blocks // (device.multiprocessors * at_once))
    work = (blocks * walked, turns * walked, turns)
    seconds = stem_cost.seconds(p.conv, config, device, at_once, work, p.bytes)
    return (seconds * KEPT - SAVED) * (1 + APART * (_parts(p, config) - 1))


def candidates(problem: Problem, device: GpuFacts, limit: int = 8) -> list[Config]:
    """The configurations to time, best predicted first."""
    if no_kernel(problem) is not None:
        return []
    found = [(estimate(problem, c, device), c) for c in _configs(problem)]
    return varied(found, lambda c: (c.m, c.columns), limit)


def _configs(problem: Problem) -> Iterator[Config]:
    eights, wide = problem.conv.channels // 8, -(-problem.conv.out_size[1] // 8)
    columns = sorted(
        {eights // k for k in range(1, eights + 1) if eights % k == 0 and eights // k <= 8} | {min(eights, 8)}
    )
    for pairs, runs, each, parts, ahead in product((1, 2, 4), (1, 2, 4), columns[-3:], (1, 2, 4), (False, True)):
        if each % parts:
            continue
        config = Config(2 * pairs, -(-wide // runs) * runs * 8, pairs * runs, each // parts, each, ahead)
        if refuse(problem, config) is None:
            yield config
