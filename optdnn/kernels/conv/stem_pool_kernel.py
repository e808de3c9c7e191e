"""Plans of the convolution of an image in its given layout and the max pool after it (``conv_stem_pool.cu``): see
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
"""Most columns of the convolution's result. A tile has all columns."""

MOST_THREADS = 512
"""Most threads of a block, which takes all columns of an image's row."""


@dataclass(frozen=True)
class Problem:
    """``conv``: the convolution. ``window``: rows and columns of the pool's windows, which have a stride of 2; ``top``
    and ``left``: the pool's padding; ``size``: the size of its result."""

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
        return "it takes no residual and no volumes"
    if p.window not in (2, 3) or max(p.top, p.left) > (p.window == 3):
        return f"windows of {p.window} x {p.window} with a padding of {max(p.top, p.left)} are not those of this kernel"
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
        return "its tile is not pairs of whole rows with equal numbers of columns per warp"
    if (why := stem.refuse(problem.conv, config, shared, MOST_THREADS)) is not None:
        return why
    if registers(problem, config) > min(255, 65536 // (-(-config.threads // 128) * 128)):
        return "its accumulators and inputs do not fit the registers of a thread"
    if (needed := shared_bytes(problem, config)) > shared:
        return f"{needed} bytes of shared memory exceed {shared}"
    return None


def registers(problem: Problem, config: Config) -> int:
    """Estimated registers of a thread. The previous row stays in some of them."""
    return stem.registers(problem.conv, config) + 2 * config.m // config.tile_h * config.n * (problem.window == 3)


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block: that of the convolution, and the maxima of a tile's columns."""
    return stem.shared_bytes(problem.conv, config) + config.tile_h // 2 * config.tile_w * (config.columns * 16 + 16)


def resident(problem: Problem, config: Config, device: GpuFacts) -> int:
    """Blocks per multiprocessor, limited by shared memory and registers."""
    shared = device.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024)
    return max(1, min(shared, stem.blocks_by_registers(problem.conv, config)))


def tiles(problem: Problem, config: Config) -> int:
    """Tiles of an image."""
    return -(-problem.size[0] // (config.tile_h // 2))


def band(problem: Problem, config: Config, device: GpuFacts) -> int:
    """Tiles of an image per block: the number with which the launch is predicted to end first."""
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
    """Tiles that a block multiplies to store ``count``. Its first windows of three rows also need a row of the previous
    tile, unless that row is padding."""
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
    # With windows of three rows, the first tile begins after the pool's padding, with the second row.
    skipped = (1 - p.top) * conv.source.stride[0] if p.window == 3 else 0
    made = stem.parameters(conv, (1, whole, conv.batch), (0, 1, 0), pitch, 0, normalization, skipped)
    made.i32(*p.size, count, bands)
    grid = (conv.batch * bands, _parts(p, config), 1)
    return made.launch(
        recipe(p, config, gpu.arch), "conv_stem_pool", grid, config.threads, shared=shared_bytes(p, config)
    )


APART, KEPT, SAVED = 0.12, 0.83, 0.6e-6
"""APART: fraction that each further block with the same pixels and other channels adds. KEPT, SAVED: a launch that does
not store the convolution's result takes KEPT times the convolution's predicted seconds, minus SAVED (50 timings on an
H200 at batch 1 to 128)."""


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch: the model of the convolution alone, corrected by :data:`KEPT`,
    :data:`SAVED` and :data:`APART` (63 timings on an H200)."""
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
