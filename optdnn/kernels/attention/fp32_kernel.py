"""Plans of the fused attention kernel of fp32 (``attention_fp32.cu``): mma.sync on the tf32 parts of each value, or on values
rounded to tf32.

It runs the problems of the general kernel (:mod:`optdnn.kernels.attention.general_kernel`) with fp32 operands and heads of up to
192 features.
"""

from __future__ import annotations

import itertools
import math

from optdnn.kernels.attention import general_kernel as general
from optdnn.kernels.attention.general_kernel import Config
from optdnn.kernels.attention.problem import Problem, mask_width
from optdnn.kernels.launch import Launch, Parameters, no_room, template_options
from optdnn.kernels.quantized.quantized_store import QuantizedStore
from optdnn.kernels.ranking import varied
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

KEPT = 64
"""Most features of a head for which a warp keeps its queries in registers."""
WIDEST = 192
"""Most features of a head: the results of 16 queries must fit the registers of a warp."""
UNIT = 4
"""Strides and offsets are multiples of this number of elements: 16 bytes."""
_RATES = {(8, 0): (512, 64), (9, 0): (734, 128)}
"""By compute capability, per cycle and multiprocessor: tf32 multiply-adds of mma.sync, and fp32 operations (other capabilities:
256, 128)."""

SLOWER, SHORT = {1: 1.07, 2: 1.04, 8: 1.1}, {16: 1.26}
"""Slowdown of a tile by its warps, and by the keys of a warp."""
LATE = {2: 1440, 3: 150, 4: 0}
"""Cycles that a warp waits for the loads of a ring of so many slots. All are fitted to 866 timings of 13 problems on an H200."""


def head(problem: Problem) -> int:
    """Features per head in the kernel: a multiple of 16."""
    return -(-problem.widest // 16) * 16


def registers(problem: Problem, config: Config) -> int:
    """Registers that a thread needs, fitted to the point where the compiler begins to spill."""
    wide, kept = head(problem), keeps(problem)
    needed = config.keys // config.split + 0.9 * wide + 56 + (wide / 2 + (-24 if problem.rounded else 6) if kept else 0)
    more = 24 if (problem.mask is not None and not (kept and problem.rounded)) or wide > 128 else 10
    return int(needed + (more if problem.mask is not None or problem.reach >= 0 or problem.lengths else 0))


def keeps(problem: Problem) -> bool:
    """Whether a warp keeps its queries in registers: at most 32 registers per thread."""
    return head(problem) <= KEPT


def shared_bytes(problem: Problem, config: Config) -> int:
    """Bytes of dynamic shared memory of a block: queries and the ring. At the end, the results that warps add take their place."""
    wide = head(problem)
    pitch = wide + (16 if wide % 32 == 0 else 0)
    added = config.warps // config.split * (config.split - 1) * (wide // 8 + 1) * 512
    return max(4 * (config.queries * pitch + config.slots * config.keys * max(pitch, wide + 4)), added)


def refuse(problem: Problem, config: Config, *, shared: int = 101376) -> str | None:
    """Why the configuration cannot run the problem, or None. ``shared``: most bytes of shared memory of a block (99 KB on sm_86)."""
    if (why := general.unsuitable(problem, UNIT, WIDEST)) is not None:
        return why
    if (
        config.warps not in (1, 2, 4, 8) or config.tiles != 1 or config.keys // config.split not in (16, 32, 48, 64)
        or config.slots not in (2, 3, 4)
    ):  # fmt: skip
        return "not a tile of this kernel"
    if config.split not in (1, 2, 4) or config.warps % config.split or config.keys % config.split:
        return f"{config.warps} warps and {config.keys} keys do not split into {config.split} equal parts"
    if (why := no_room(shared_bytes(problem, config), shared, config.blocks)) is not None:
        return why
    if registers(problem, config) > (limit := general.register_limit(config)):
        return f"scores and results of a thread exceed {limit} registers"
    return None


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """The kernel's recipe. Lengths, strides and counts are parameters."""
    defines = {
        "WARPS": config.warps, "SPLIT": config.split, "BLOCK_KEYS": config.keys, "SLOTS": config.slots, "HEAD": head(problem),
        "KEEP": int(keeps(problem)), "MIN_BLOCKS": config.blocks, "CAUSAL": int(problem.causal), "WINDOW": int(problem.reach >= 0),
        "FROM_END": int(problem.from_end), "SOFTCAP": int(problem.softcap > 0), "HAS_LENGTHS": int(problem.lengths), "MASK": mask_width(problem), "OPERAND_ITEM": 4,
        "ROUNDED": int(problem.rounded), **general.sinks(problem),
    }  # fmt: skip
    text = "\n".join([render.constants(defines), render.mma("tfloat32"), ""])
    return Recipe("attention_fp32.cu", arch, {"generated.cuh": text}, template_options(problem.dtype))


def operands(problem: Problem) -> Parameters:
    """The parameters of a kernel of fp32: the general kernel's, and the scale."""
    parameters = general.operands(problem)
    parameters.f32(problem.scale, problem.cap[0], problem.softcap)
    return parameters.pointer(*(("sinks",) if problem.sinks else ()))


def launch(problem: Problem, config: Config, gpu: GpuFacts, narrow: QuantizedStore | None = None) -> Launch:
    """The launch. Operands are the general kernel's, in fp32; ``narrow`` is ignored: the result is never 8-bit."""
    parameters = operands(problem)
    made = recipe(problem, config, gpu.arch)
    grid = general.grid_of(problem, config.queries)
    return parameters.launch(made, "attention_fp32", grid, config.threads, shared=shared_bytes(problem, config))


order_of_sums = general.order_of_sums


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch: it ranks configurations."""
    products, lanes = _RATES.get(device.capability, (256, 128))
    rows, keys, wide = 16, config.keys // config.split, head(problem)
    blocks = math.prod(general.grid_of(problem, config.queries))
    # Warps of a block that have queries.
    working = -(-problem.queries // rows) * problem.heads * problem.batch / blocks * config.split
    resident = general.blocks_at_once(config, device, shared_bytes(problem, config), registers(problem, config))
    # Cycles of a multiprocessor per warp and tile: tf32 products; exponentials and the split into tf32 parts; fragments.
    multiply = (1 if problem.rounded else 3) * 2 * rows * keys * wide / products
    parts = (1 if problem.rounded else 0.25) * (2 * keys * wide + rows * wide + rows * keys * wide / 32)
    scores = rows * keys * (1 / 16 + (12 + (6 if problem.softcap else 0)) / lanes) + parts / lanes + 42
    fragments = 4 * (2 * keys * wide + (0 if keeps(problem) else rows * wide)) / 128
    held = min(resident, -(-blocks // device.multiprocessors))
    units = [working * held * x for x in (multiply, scores, fragments)]
    alone, late = 7.8 * (multiply + scores) + fragments, LATE[config.slots]
    tile = max(max(units) + 0.5 * sum(units) + late / (4 * held), alone + late)
    tile *= SLOWER.get(config.warps, 1.0) * SHORT.get(keys, 1.0)
    return general.launch_seconds(problem, config, device, tile, resident, wide)


def candidates(problem: Problem, device: GpuFacts, limit: int = 8) -> list[Config]:
    """The configurations to time, best predicted first. Empty when the kernel cannot run the problem."""
    found: list[tuple[float, Config]] = []
    for warps, split, each in itertools.product((1, 2, 4, 8), (1, 2, 4), (16, 32, 48, 64)):
        keys = each * split
        if warps % split or (warps // split - 1) * 16 >= problem.queries:
            continue  # warps without queries
        if keys - 16 >= problem.keys and keys > 16:
            continue  # warps or products without keys
        own: list[tuple[float, Config]] = []  # rings for this tile: the best one is kept
        for slots in (2, 4):
            for blocks in (4, 3, 2, 1):  # the most that fit: fewer blocks would not change the kernel
                config = Config(warps, 1, keys, slots, blocks, split)
                if refuse(problem, config, shared=device.shared_per_block) is None:
                    own.append((estimate(problem, config, device), config))
                    break
        found += sorted(own)[:1]
    return varied(found, lambda c: (c.keys, c.split), limit)
