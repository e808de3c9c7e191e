"""Plans of the fused attention kernel of fp32 on Hopper (``attention_parts_sm90.cu``): wgmma on parts of fp16, or on numbers rounded to
11 bits (tf32).

It runs the problems of ``attention_fp32.cu`` with heads of up to 256 features.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from optdnn.kernels.attention import general_kernel as general
from optdnn.kernels.attention.fp32_kernel import UNIT, operands
from optdnn.kernels.attention.problem import Problem, mask_width, span_of
from optdnn.kernels.launch import BLOCK_SHARED, Launch, no_room, template_options
from optdnn.kernels.quantized.quantized_store import QuantizedStore
from optdnn.kernels.ranking import varied
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

WIDEST = 256
"""Most features of a head: a thread has results, and sums of a tile."""
AHEAD = 2
"""Tiles that are loaded ahead."""
MOST_FOURS = 16
"""Most times that a dividing thread loads four numbers of a tile: they stay in registers."""
_BARRIER_BYTES = 1024


@dataclass(frozen=True, order=True)
class Config:
    """A block has ``warpgroups`` x 64 queries, in registers (``kept``) or in shared memory. Tiles of ``keys`` keys and values pass through a
    ring of ``stages``. Registers must allow ``blocks`` blocks per multiprocessor."""

    warpgroups: int
    keys: int
    stages: int
    blocks: int = 1
    kept: bool = True

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of a block: one more warpgroup divides keys and values."""
        return 128 * (self.warpgroups + 1)

    def __str__(self) -> str:
        return f"parts{self.warpgroups}n{self.keys}s{self.stages}b{self.blocks}{'q' * self.kept}"


def head(problem: Problem) -> int:
    """Features per head in the kernel: a multiple of 16, of 32 above 64, and of 64 above 128, so that rows have few subtiles."""
    unit = 16 if problem.widest <= 64 else 32 if problem.widest <= 128 else 64
    return -(-problem.widest // unit) * unit


def columns(problem: Problem) -> int:
    """Features of values that are multiplied at a time: their sums take registers."""
    return 64 if head(problem) > 96 else head(problem)


def parts(problem: Problem) -> int:
    """Parts of a number."""
    return 1 if problem.rounded else 2


def start_registers(config: Config) -> int:
    """Registers of each thread when a block starts."""
    return 512 // config.blocks // (config.warpgroups + 1) // 8 * 8


def fours(problem: Problem, config: Config) -> int:
    """Times that a thread that divides tiles loads four numbers of one."""
    return -(-config.keys // (512 // head(problem)))


def loading_registers(problem: Problem, config: Config) -> int:
    """Registers of a thread that divides tiles: its part of a tile, and addresses."""
    wide, own = head(problem), 4 * fours(problem, config)
    needed = own + (36 if wide <= 64 else 44) + (8 if 512 % wide or own > 32 else 0)
    return min(start_registers(config), -(-needed // 8) * 8)


def register_limit(problem: Problem, config: Config) -> int:
    """Most registers of a multiplying thread. Each of a multiprocessor's four partitions has 512 warp-wide registers."""
    rest = start_registers(config) * config.threads // 128 - loading_registers(problem, config)
    return min(240, rest // config.warpgroups // 8 * 8)


def registers(problem: Problem, config: Config) -> int:
    """Registers that a multiplying thread needs."""
    wide, own = head(problem), parts(problem)
    sums = max(config.keys / 4 * own + columns(problem) / 2, config.keys / 2 + 8)
    sums += config.keys / 4 if config.keys > 64 else 0
    kept = wide / 4 * own if config.kept else 0
    mask = 12 if problem.mask is not None else 0
    order = 8 if problem.causal or problem.reach >= 0 or problem.softcap else 0
    return int(wide / 2 + sums + kept + (44 if wide <= 64 else 54) + mask + order)


def shared_bytes(problem: Problem, config: Config) -> int:
    """Bytes of dynamic shared memory of a block: barriers, queries, and the ring."""
    own = head(problem) * 2 * parts(problem)
    queries = 0 if config.kept else own * config.queries
    return _BARRIER_BYTES + queries + 2 * (config.stages * config.keys * own + AHEAD * 2048 * fours(problem, config))


def refuse(problem: Problem, config: Config, *, shared: int = BLOCK_SHARED) -> str | None:
    """Why the configuration cannot run the problem, or None. ``shared``: most bytes of shared memory of a block."""
    if (why := general.unsuitable(problem, UNIT, WIDEST)) is not None:
        return why
    if config.warpgroups not in (1, 2, 3) or config.blocks not in (1, 2) or not 1 <= config.stages <= 4:
        return "not a tile of this kernel"
    if config.keys % 16 or not 16 <= config.keys <= 256:
        return f"tiles of {config.keys} keys"
    if fours(problem, config) > MOST_FOURS:
        return f"a thread cannot load its part of {config.keys} x {head(problem)} numbers at a time"
    if (why := no_room(shared_bytes(problem, config), shared, config.blocks)) is not None:
        return why
    if registers(problem, config) > (limit := register_limit(problem, config)):
        return f"scores and results of a thread exceed {limit} registers"
    return None


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """The kernel's recipe. Lengths, strides and counts are parameters."""
    wide = head(problem)
    defines = {
        "WARPGROUPS": config.warpgroups, "BLOCK_KEYS": config.keys, "STAGES": config.stages, "MIN_BLOCKS": config.blocks, "HEAD": wide, "COLUMNS": columns(problem), "SPAN": span_of(wide),
        "KEEP": int(config.kept), "REGISTERS": register_limit(problem, config), "LOADING_REGISTERS": loading_registers(problem, config),
        "CAUSAL": int(problem.causal), "WINDOW": int(problem.reach >= 0), "FROM_END": int(problem.from_end), "SOFTCAP": int(problem.softcap > 0),
        "HAS_LENGTHS": int(problem.lengths), "MASK": mask_width(problem), "ROUNDED": int(problem.rounded), "SHARED_BYTES": shared_bytes(problem, config), **general.sinks(problem),
    }  # fmt: skip
    scores = (
        render.pixels_instruction(config.keys, "float16", name="wgmma_kept"),
        render.wgmma(config.keys, "float16", name="wgmma_scores"),
    )
    values = render.pixels_instruction(columns(problem), "float16", across=True, name="wgmma_features")
    text = "\n".join([render.constants(defines), *scores, values, ""])
    return Recipe("attention_parts_sm90.cu", arch, {"generated.cuh": text}, template_options(problem.dtype))


def launch(problem: Problem, config: Config, gpu: GpuFacts, narrow: QuantizedStore | None = None) -> Launch:
    """The launch. Operands are the general kernel's, in fp32; ``narrow`` is ignored: the result is never 8-bit."""
    return operands(problem).launch(
        recipe(problem, config, gpu.arch),
        "attention_parts_sm90",
        general.grid_of(problem, config.queries),
        config.threads,
        shared=shared_bytes(problem, config),
    )


def order_of_sums(config: Config) -> tuple[int, ...]:
    """Key of the order in which a row is summed: equal keys, equal order."""
    return (config.keys,)


CLOCK = 1.755e9
CHAIN, CHAIN_KEY, CHAIN_MASK, CHAIN_PRODUCTS, CHAIN_FEATURE = 320, 9.0, 17.7, 1.3, 1.7
"""Cycles in which a warpgroup computes a tile that it has for itself: in all, for each key, for each key with a mask, for each cycle of its
products, and for each feature."""
PRODUCTS, SHARED_QUERIES, KEY, FEATURE = 0.34, 2.3, 5.9, 1.4
"""Cycles of a multiprocessor for each warpgroup and tile: for each cycle of its products, times ``SHARED_QUERIES`` if queries are not kept
in registers; for each key; for each feature and part."""
DIVIDE, DIVIDE_FOUR = 350, 49
"""Cycles in which a block's keys or values are divided: in all, and for each four numbers of a thread and each number that it writes."""
LONG = 1.16
"""Slowdown of tiles of more than 64 keys."""
START, START_FEATURE = 2850, 24
"""Cycles of a block before and after its tiles: in all, and for each feature and warpgroup. The constants are fitted to 480 timings of 54
problems on an H200: 8 % off (median); the first choices are 2.4 % behind the best."""


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch: it ranks configurations."""
    wide, own, keys = head(problem), parts(problem), config.keys
    waves = math.prod(general.grid_of(problem, config.queries)) / (device.multiprocessors * config.blocks)
    held = config.blocks if waves >= 1 else min(config.blocks, math.ceil(waves * config.blocks))
    products = (2 * own - 1) * keys * wide / 16
    chain = CHAIN + keys * (CHAIN_KEY + (CHAIN_MASK if problem.mask is not None else 0))
    chain += CHAIN_PRODUCTS * products + CHAIN_FEATURE * wide
    shared = PRODUCTS * products * (1 if config.kept else SHARED_QUERIES) + KEY * keys + FEATURE * wide * own
    divided = DIVIDE + DIVIDE_FOUR * fours(problem, config) * (1 + own)
    tile = math.hypot(chain, held * config.warpgroups * shared, held * divided) * (LONG if keys > 64 else 1.0)
    tiles = -(-problem.keys // keys)
    cycles = START + START_FEATURE * wide * config.warpgroups + tiles * seen_part(problem, config) * tile
    return (math.ceil(waves) if waves <= 4 else waves) * cycles / CLOCK


def seen_part(problem: Problem, config: Config) -> float:
    """The part of all tiles that a block multiplies, on average."""
    seen = (
        0.5 + 0.5 * (config.queries + config.keys) / problem.keys
        if problem.causal and problem.queries == problem.keys
        else 1.0
    )
    if problem.reach >= 0:
        seen = min(seen, (problem.reach + config.queries + config.keys) / problem.keys)
    return min(1.0, seen)


def candidates(problem: Problem, device: GpuFacts, limit: int = 6) -> list[Config]:
    """The configurations to time, best predicted first. Empty when the kernel cannot run the problem."""
    found: list[tuple[float, Config]] = []
    for warpgroups, keys in itertools.product((1, 2, 3), (16, 32, 48, 64, 96, 128)):
        if (warpgroups - 1) * 64 >= problem.queries or (keys - 16 >= problem.keys and keys > 16):
            continue  # warpgroups without queries, or products without keys
        for blocks in (2, 1):
            forms = (Config(warpgroups, keys, stages, blocks, kept) for kept in (True, False) for stages in (2, 1))
            fit = (c for c in forms if refuse(problem, c, shared=device.shared_per_block) is None)
            found += [(estimate(problem, c, device), c) for c in itertools.islice(fit, 1)]
    return varied(found, lambda c: (c.warpgroups, c.keys, c.blocks), limit)
