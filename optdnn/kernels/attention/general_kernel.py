"""Plans of the general fused attention kernel (``attention_sm80.cu``): mma.sync fed by cp.async, every GPU from sm_80 on.

It runs the problems of Hopper's kernel (:mod:`optdnn.kernels.attention.hopper_kernel`), and also heads of up to 512 features.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.errors import InternalError
from optdnn.kernels.attention import problem as problems
from optdnn.kernels.attention.problem import Problem, mask_width
from optdnn.kernels.launch import Launch, Parameters, no_room, template_options
from optdnn.kernels.quantized.quantized_store import QuantizedStore, narrow_kind
from optdnn.kernels.ranking import varied
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

WIDEST = 512
"""Most features of a head."""
ONE_WARP = 256
"""Most features of a head for which the results fit the registers of one warp."""
UNIT = 8
"""Strides and offsets are multiples of this number of elements: 16 bytes of an operand, 8 bytes of an 8-bit result."""

CLOCK = 1.4e9
MEMORY = 1.5e12
L2_PER_CLOCK = 28.0  # bytes per cycle and multiprocessor
_RATES = {(8, 0): (1024, 64), (9, 0): (1200, 128)}
"""By compute capability, per cycle and multiprocessor: 16-bit multiply-adds of mma.sync, and fp32 operations (other capabilities:
512, 128). Source: CUDA C++ Programming Guide, arithmetic throughput. Hopper's rate is an assumption: 60 % of wgmma's."""


@dataclass(frozen=True, order=True)
class Config:
    """A block has ``warps`` warps in sets of ``split``. A set computes ``tiles`` x 16 queries; its warps share out keys and features.
    Tiles of ``keys`` keys or values pass through a ring of ``slots``. Registers must allow ``blocks`` blocks per multiprocessor."""

    warps: int
    tiles: int
    keys: int
    slots: int
    blocks: int = 1
    split: int = 1

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return 16 * self.warps // self.split * self.tiles

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    def __str__(self) -> str:
        name = f"attn{self.warps}m{16 * self.tiles}n{self.keys}s{self.slots}b{self.blocks}"
        return name + (f"x{self.split}" if self.split > 1 else "")


def head(problem: Problem, config: Config) -> int:
    """Features per head in the kernel: a multiple of 16 for each warp of a set."""
    unit = 16 * config.split
    return -(-problem.widest // unit) * unit


def keeps(problem: Problem, config: Config) -> bool:
    """Whether a warp keeps its queries in registers: at most 32 registers per thread."""
    return config.split == 1 and head(problem, config) * config.tiles <= 128


def registers(problem: Problem, config: Config) -> int:
    """Registers that a thread needs for scores, results, queries, prefetched mask elements and the rest. Fitted to the point where
    the compiler begins to spill."""
    two, kept, wide = config.tiles == 2, keeps(problem, config), head(problem, config)
    if config.split > 1:
        columns = wide // config.split
        needed = config.tiles * (config.keys / config.split * 0.7 + columns / 2 + 12) + 56
        needed += max(32 if columns > 192 else 0, 24 if problem.mask is not None else 0)
        return int(needed + (8 if problem.causal or problem.reach >= 0 else 0))
    own = wide * (7 / 16 if two else 1 / 4) if kept else 44 if wide > 128 else 12
    needed = config.tiles * (config.keys * (0.6 if two and not kept else 0.5) + wide / 2 + own) + 40
    if problem.softcap or problem.reach >= 0 or problem.from_end:
        needed += 12
    if wide % 32:  # chunks of a row are swapped in pairs
        needed += 30 if two and problem.mask is not None else 6
    if problem.mask is not None:
        needed += (
            max(22, 0.92 * config.keys - 28) + (0 if kept else 16)
            if two
            else max(44 if kept else 0, 0.6 * config.keys + 6)
        )
    elif problem.causal or problem.lengths or wide > 128:
        needed += 16 + (wide // 16 if kept else 0)
    return int(needed)


def register_limit(config: Config) -> int:
    """Most registers of a thread. Each of a multiprocessor's four partitions has 512 warp-wide registers."""
    return min(255, 512 // -(-config.warps * config.blocks // 4) // 8 * 8)


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block."""
    exchanged = (
        config.queries * (2 * config.keys + 4 * config.split) if config.split > 1 else 0
    )  # weights, and values per row
    return head(problem, config) * 2 * (config.queries + config.slots * config.keys) + exchanged


def unsuitable(problem: Problem, unit: int, widest: int) -> str | None:
    """Why no configuration can run the problem, or None. Features, strides and offsets must be multiples of ``unit`` elements.
    ``widest``: most features of a head."""
    if (why := problems.unsuitable(problem, unit, widest)) is not None:
        return why
    for name, view in (("q", problem.q), ("k", problem.k), ("v", problem.v), ("out", problem.out)):
        if any(x % unit or x < 0 for x in (view.batch, view.head, view.position, view.offset)):
            return f"{name}: strides and offsets must be multiples of {unit} elements, the size of a copy"
        if view.position >= 1 << 23:
            return f"{name}: positions are {view.position} elements apart"
    return None


def refuse(problem: Problem, config: Config, *, shared: int = 101376) -> str | None:
    """Why the configuration cannot run the problem, or None. ``shared``: most bytes of shared memory of a block (99 KB on sm_86)."""
    return unsuitable(problem, UNIT, WIDEST) or _refuse_config(problem, config, shared)


def _refuse_config(problem: Problem, config: Config, shared: int) -> str | None:
    """Why the configuration cannot run a problem that others may run, or None."""
    if (
        config.warps not in (1, 2, 4, 8) or config.tiles not in (1, 2) or config.keys % 16
        or not 16 <= config.keys <= 256 or config.slots not in (2, 3, 4)
    ):  # fmt: skip
        return "not a tile of this kernel"
    if config.split not in (1, 2, 4) or config.warps % config.split or config.keys % (16 * config.split):
        return f"{config.warps} warps and {config.keys} keys do not split into {config.split} equal parts"
    parts = 2 * -(-problem.keys // config.keys)
    if config.slots > parts:
        return f"{config.slots} slots for {parts} parts"
    if (why := no_room(shared_bytes(problem, config), shared, config.blocks)) is not None:
        return why
    if registers(problem, config) > (limit := register_limit(config)):
        return f"scores and results of a thread exceed {limit} registers"
    return None


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """The kernel's recipe. Lengths, strides and counts are parameters."""
    defines = {
        "WARPS": config.warps, "SPLIT": config.split, "TILES": config.tiles, "BLOCK_KEYS": config.keys, "SLOTS": config.slots, "HEAD": head(problem, config),
        "KEEP": int(keeps(problem, config)), "MIN_BLOCKS": config.blocks, "CAUSAL": int(problem.causal),
        "WINDOW": int(problem.reach >= 0), "FROM_END": int(problem.from_end), "SOFTCAP": int(problem.softcap > 0),
        "HAS_LENGTHS": int(problem.lengths), "MASK": mask_width(problem), "NARROW": narrow_kind(problem.narrow), **sinks(problem),
    }  # fmt: skip
    text = "\n".join([render.constants(defines), render.mma(problem.dtype), ""])
    return Recipe("attention_sm80.cu", arch, {"generated.cuh": text}, template_options(problem.dtype))


def sinks(problem: Problem) -> dict[str, int]:
    """The constant of a kernel with sinks. Kernels without them do not have it, so that their text stays the same."""
    return {"SINKS": 1} if problem.sinks else {}


def grid_of(problem: Problem, queries: int) -> tuple[int, int, int]:
    """Blocks along queries (``queries`` each), heads and the batch."""
    return -(-problem.queries // queries), problem.heads, problem.batch


def operands(problem: Problem) -> Parameters:
    """The parameters before the scale: addresses and strides of the operands, and sizes."""
    key_heads = problem.key_heads or problem.heads
    if problem.heads % key_heads:
        raise InternalError("query heads do not share key heads evenly")
    parameters = Parameters()
    views = {"q": problem.q, "k": problem.k, "v": problem.v, "out": problem.out}
    for name, view in views.items():
        parameters.pointer(name, offset=view.offset * (problem.out_item if name == "out" else problem.item))
    parameters.pointer("mask" if problem.mask is not None else None, "lengths" if problem.lengths else None)
    for view in views.values():
        parameters.i64(view.batch, view.head).i32(view.position)
    parameters.i64(*(problem.mask or (0, 0, 0)))
    parameters.i32(problem.queries, problem.keys, problem.features, problem.value_features or problem.features)
    parameters.i32(problem.heads // key_heads, problem.causal_offset, problem.reach)
    parameters.i32(problem.mask_period or problem.batch)
    return parameters


def launch(problem: Problem, config: Config, gpu: GpuFacts, narrow: QuantizedStore | None = None) -> Launch:
    """The launch. Operands: ``q``, ``k``, ``v``, ``out``, ``mask``, ``lengths`` (int32 [batch]), ``sinks``. Views carry their offsets,
    so q, k and v may be given the same address."""
    parameters = operands(problem)
    parameters.f32(problem.scale * math.log2(math.e), *problem.cap)
    (narrow or QuantizedStore()).put(parameters)
    parameters.pointer(*(("sinks",) if problem.sinks else ()))
    return parameters.launch(
        recipe(problem, config, gpu.arch),
        "attention_sm80",
        grid_of(problem, config.queries),
        config.threads,
        shared=shared_bytes(problem, config),
    )


def order_of_sums(config: Config) -> tuple[int, ...]:
    """Key of the order in which a row is summed: equal keys, equal order."""
    return config.keys, config.split


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch: it ranks configurations."""
    products, lanes = _RATES.get(device.capability, (512, 128))
    rows, keys, wide, split = 16 * config.tiles, config.keys, head(problem, config), config.split
    blocks = math.prod(grid_of(problem, config.queries))
    working = (
        -(-problem.queries // rows) * problem.heads * problem.batch / blocks * split
    )  # warps of a block that have queries
    resident = blocks_at_once(config, device, shared_bytes(problem, config), registers(problem, config))
    # Cycles of a multiprocessor per warp and tile: both products; exponentials and arithmetic of the scores; fragments.
    multiply = 2 * rows * keys * wide / products / split
    own = 8 + (4 if problem.mask is not None else 0) + (6 if problem.softcap else 0)
    scores = rows * keys / split * ((2 if problem.softcap else 1) / 16 + own / lanes) + rows * wide / split / lanes
    scores += 25 + 20 * config.tiles + (60 if split > 1 else 0)  # maxima, barriers
    read = 4 * keys * wide / split + (0 if keeps(problem, config) else 2 * rows * wide)
    fragments = (read + (2 * rows * keys * (1 + 1 / split) if split > 1 else 0)) / 128
    copies = 4 * keys * wide / 128  # of a block
    held = min(resident, -(-blocks // device.multiprocessors))
    units = [working * held * x for x in (multiply, scores)] + [held * (working * fragments + copies)]
    alone = 4 * (multiply + scores) + fragments + 250
    tile = tile_cycles(config, units, alone, held)
    return launch_seconds(problem, config, device, tile, resident, wide)


def blocks_at_once(config: Config, device: GpuFacts, shared: int, needed: int) -> int:
    """Resident blocks per multiprocessor: a block has ``shared`` bytes, a thread ``needed`` registers."""
    by_shared = device.shared_per_multiprocessor // (shared + 1024)
    by_registers = 65536 // (config.threads * min(255, -(-needed // 8) * 8))
    return max(1, min(by_shared, max(config.blocks, by_registers), 1536 // config.threads))


def tile_cycles(config: Config, units: Sequence[float], alone: float, held: int) -> float:
    """Cycles of a tile of keys. ``units``: cycles of each unit of a multiprocessor with ``held`` blocks. ``alone``: cycles of a warp
    without others."""
    late = {2: 500, 3: 150, 4: 0}[config.slots]  # stall on loads that the ring does not hide
    return max(max(units) + 0.25 * sum(units) + late / (4 * held), alone + late)


def launch_seconds(problem: Problem, config: Config, device: GpuFacts, tile: float, resident: int, wide: int) -> float:
    """Seconds of a launch with heads of ``wide`` features; a tile of keys takes ``tile`` cycles."""
    keys = config.keys
    tiles, blocks = -(-problem.keys // keys), math.prod(grid_of(problem, config.queries))
    waves = blocks / (device.multiprocessors * resident)
    waves = math.ceil(waves) if waves < 3 else waves + 0.5
    seen = min(1.0, 0.5 + 0.5 * keys / problem.keys) if problem.causal and problem.queries == problem.keys else 1.0
    if problem.reach >= 0:
        seen = min(seen, (problem.reach + config.queries + keys) / problem.keys)
    compute = waves * (tiles * seen * tile + 2000) / CLOCK
    brought = blocks * wide * problem.item * (2 * keys * tiles * seen + config.queries)
    return 2e-6 + max(compute, problem.bytes / MEMORY, brought / (L2_PER_CLOCK * device.multiprocessors * CLOCK))


def candidates(problem: Problem, device: GpuFacts, limit: int = 8) -> list[Config]:
    """The configurations to time, best predicted first. Empty when the kernel cannot run the problem."""
    if unsuitable(problem, UNIT, WIDEST) is not None:
        return []
    found: list[tuple[float, Config]] = []
    splits = (1,) if problem.widest <= 128 else (1, 2, 4)
    for warps, tiles, split in itertools.product((1, 2, 4, 8), (1, 2), splits):
        if (warps // split - 1) * 16 * tiles >= problem.queries or (tiles - 1) * 16 >= problem.queries:
            continue  # warps without queries
        for keys in (16, 32, 48, 64, 80, 96, 112, 128):
            if keys - 16 >= problem.keys and keys > 16:
                continue
            own: list[tuple[float, Config]] = []  # rings for this tile: the best one is kept
            for slots in (2, 3, 4):
                for blocks in (8, 6, 4, 3, 2, 1):  # the most that fit: fewer blocks would not change the kernel
                    config = Config(warps, tiles, keys, slots, blocks, split)
                    if _refuse_config(problem, config, device.shared_per_block) is None:
                        own.append((estimate(problem, config, device), config))
                        break
            found += sorted(own)[:1]
    shared_out = problem.widest > ONE_WARP // 2  # several set sizes are timed: no rule finds the best one
    return varied(found, lambda c: (c.keys, c.split, c.warps) if shared_out else c.keys, limit)
