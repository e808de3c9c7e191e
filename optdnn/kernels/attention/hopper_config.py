"""Configurations of ``attention_sm90.cu``: the work, registers and shared memory of a block, and the problems that it can run."""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.kernels.attention.problem import Problem, mask_rows, unsuitable
from optdnn.kernels.launch import BLOCK_SHARED, no_room
from optdnn.runtime.cuda.gpu_facts import GpuFacts

LOADING_REGISTERS, MASK_LOADING_REGISTERS = 24, 32
"""Registers per thread of a persistent block's loading warpgroup: in general, and if it loads masks."""
PRODUCT_REGISTERS, WIDE_PRODUCT_REGISTERS = 26, 40
"""Registers per thread, in addition to the scores, that ptxas needs for a product at the block's initial registers; with heads of more
than ``TWO_PLACES`` features."""
MERGE_REGISTERS = 60
"""Registers of a thread that merges the results of warpgroups, in addition to its own results, maxima and sums."""
WIDE_REGISTERS = 18
"""Registers per thread for heads of more than ``TWO_PLACES`` features."""
SOFTCAP_REGISTERS = 14
"""Registers per thread for softcaps."""
SINK_REGISTERS = 2
"""Registers per thread for a head's sink."""
MOST_SPREAD = 80.0
"""Largest difference of two rounded scores: weights begin at the largest score of the grid, and fp32 ends at e^-87."""
MOST_FEATURES = 256
"""Features of the widest head: the columns of wgmma's widest product with values."""
TWO_PLACES = 128
"""Features of the widest head whose persistent blocks have two buffers of queries: with wider heads, the room is for keys."""
_BARRIER_BYTES = 1024


@dataclass(frozen=True, order=True)
class Config:
    """An item has ``warpgroups`` x 64 queries (``split``: 64). Tiles of ``keys`` keys pass through a ring of ``stages``. Registers must
    allow ``blocks`` blocks per multiprocessor. ``persistent``: one wave of blocks takes all items in turn; otherwise a block takes
    one item. ``turns``: a block's warpgroups issue their products in turn. ``split``: a block's warpgroups share 64 queries and take
    its tiles of keys in turn. ``sharers``: so many blocks of a cluster share these queries, each with a part of the tiles. ``tiled``: TMA loads
    the tiles of a mask per query to shared memory; otherwise threads load it to registers."""

    warpgroups: int
    keys: int
    stages: int
    blocks: int = 1
    persistent: bool = False
    turns: bool = False
    split: bool = False
    sharers: int = 1
    tiled: bool = False

    @property
    def queries(self) -> int:
        """Queries of an item."""
        return 64 if self.split else 64 * self.warpgroups

    def block_tiles(self, tiles: int) -> int:
        """Number of the ``tiles`` tiles that a block loads."""
        return -(-tiles // self.sharers)

    def own_tiles(self, tiles: int) -> int:
        """Number of the ``tiles`` tiles that the busiest warpgroup multiplies."""
        return -(-self.block_tiles(tiles) // self.warpgroups) if self.split else tiles

    def __str__(self) -> str:
        flags = "p" * self.persistent + "t" * self.turns + "k" * self.split + "m" * self.tiled
        flags += f"c{self.sharers}" if self.sharers > 1 else ""
        return f"attn{self.warpgroups}n{self.keys}s{self.stages}b{self.blocks}{flags}"


def loader(problem: Problem, config: Config) -> int:
    """Number of loading warps: 0 if each tile of a block has its own stage."""
    return int(config.persistent or config.block_tiles(-(-problem.keys // config.keys)) > config.stages)


def live_warps(problem: Problem) -> int:
    """Warps of a warpgroup that have queries, 16 each."""
    return min(4, -(-problem.queries // 16))


def row_items(problem: Problem, config: Config) -> int:
    """Items of one head: ``config.queries`` queries each."""
    return -(-problem.queries // config.queries)


def at_once(problem: Problem, config: Config, device: GpuFacts) -> int:
    """Number of blocks that are certain to be resident on a multiprocessor."""
    by_shared = device.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024)
    return max(1, min(by_shared, config.blocks))


def threads(problem: Problem, config: Config) -> int:
    """Threads of a block. A persistent block has a whole loading warpgroup, since registers move between warpgroups."""
    return config.warpgroups * 128 + (128 if config.persistent else 32 * loader(problem, config))


def start_registers(config: Config) -> int:
    """Registers of each thread of a persistent block when it starts."""
    return 512 // config.blocks // (config.warpgroups + 1) // 8 * 8


def register_limit(problem: Problem, config: Config) -> int:
    """Most registers of a multiplying thread. Each of a multiprocessor's four partitions has 512 warp-wide registers."""
    if config.persistent:
        all_groups = start_registers(config) * (config.warpgroups + 1)
        loading = MASK_LOADING_REGISTERS if config.tiled else LOADING_REGISTERS
        return min(240, (all_groups - loading) // config.warpgroups // 8 * 8)
    return min(255, 512 // -(-threads(problem, config) // 32 * config.blocks // 4) // 8 * 8)


def mask_span(config: Config) -> int:
    """Bytes per row of a subtile of a mask in shared memory."""
    return 64 if config.keys % 64 else 128


def query_places(problem: Problem, config: Config) -> int:
    """Buffers of a block's queries. With two, a persistent block loads the next item's queries ahead."""
    return 2 if config.persistent and problem.head <= TWO_PLACES else 1


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block."""
    masks = config.queries * 2 if config.tiled else 0
    ring = (problem.head * 4 + masks) * config.stages * config.keys
    if config.split:  # the results of the other warpgroups overwrite the ring
        ring = max(ring, (config.warpgroups - 1) * (problem.head // 8 + 1) * 2048)
        ring = max(ring, (config.sharers - 1) * (problem.head // 8 + 1) * 512 * live_warps(problem))
    return _BARRIER_BYTES + problem.head * 2 * query_places(problem, config) * config.queries + ring


def refuse(problem: Problem, config: Config, *, shared: int = BLOCK_SHARED) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    return unfit(problem) or refuse_config(problem, config, shared)


def unfit(problem: Problem) -> str | None:
    """Why no configuration can run the problem, as far as that does not depend on the configuration, or None."""
    if (why := _no_factors(problem) or unsuitable(problem, 8, MOST_FEATURES)) is not None:
        return why
    for name, view in (("q", problem.q), ("k", problem.k), ("v", problem.v), ("out", problem.out)):
        unit = 16 // (problem.out_item if name == "out" else 2)
        if any(x % unit or x < 0 for x in (view.batch, view.head, view.position, view.offset)):
            return f"{name}: TMA needs strides and offsets that are multiples of {unit} elements"
    return None


def refuse_config(problem: Problem, config: Config, shared: int) -> str | None:
    """Why the configuration cannot run a problem that others may run, or None."""
    if (why := _no_grids(problem, config)) is not None:
        return why
    if config.warpgroups not in (1, 2, 3, 4) or config.keys % 16 or not 16 <= config.keys <= 256 or config.stages < 1:
        return "not a tile of this kernel"
    tiles = -(-problem.keys // config.keys)
    if config.turns and (config.warpgroups == 1 or tiles == 1):
        return "turns need several warpgroups and several tiles"
    if (why := _no_split(config, tiles)) is not None:
        return why
    if config.tiled and (why := _no_tiles(problem, config)) is not None:
        return why
    if config.stages > (8 if config.persistent else min(config.block_tiles(tiles), 8)):
        return f"{config.stages} stages for {config.block_tiles(tiles)} tiles"
    if (why := no_room(shared_bytes(problem, config), shared, config.blocks)) is not None:
        return why
    # Scores, their packed copies (in place with a single tile), results and the rest: fitted to the compiler's reports.
    scores, rest = (config.keys * 0.62, 44) if config.own_tiles(tiles) == 1 else (config.keys * 0.75, 28)
    mask = 12 + (0 if config.tiled else config.keys / 8 * mask_rows(problem)) if problem.mask else 0.0
    bias = (mask, config.keys / 2, 36.0)[factor_form(problem, config)]
    wide = WIDE_REGISTERS if problem.head > TWO_PLACES else 0
    bias += (SOFTCAP_REGISTERS if problem.softcap else 0) + (SINK_REGISTERS if problem.sinks else 0)
    merged = (
        problem.head / 2 + 4 * max(config.warpgroups, config.sharers) + MERGE_REGISTERS + wide if config.split else 0.0
    )
    if max(scores + problem.head / 2 + rest + bias + wide, merged) > (limit := register_limit(problem, config)):
        return f"scores and results of a thread exceed {limit} registers"
    widest = max(config.keys, problem.head)
    beside = PRODUCT_REGISTERS if problem.head <= TWO_PLACES else WIDE_PRODUCT_REGISTERS
    if config.persistent and widest // 2 + beside > start_registers(config):
        return f"a product of {widest} columns does not compile for threads that start with {start_registers(config)} registers"
    return None


def _no_tiles(problem: Problem, config: Config) -> str | None:
    """Why TMA cannot load tiles of a problem's mask, or None."""
    if mask_rows(problem) < 2 or problem.grids[1] is not None:
        return "tiles are of masks per query, and not for rounded weights"
    if config.keys % 32:
        return f"a tile of a mask has {config.keys} keys (a multiple of 32 is needed)"
    if problem.keys < 64:
        return f"rows of {problem.keys} keys leave most of a tile of a mask empty"
    if not problem.mask_aligned:
        return "TMA needs rows of the mask that begin at multiples of 16 bytes"
    own, groups = config.block_tiles(-(-problem.keys // config.keys)), config.warpgroups if config.split else 1
    if config.stages < min(own, 2 * groups):
        return "a mask comes with its tile's values, which need another stage than the values of the tile before"
    return None


def _no_split(config: Config, tiles: int) -> str | None:
    """Why a block's warpgroups, or the blocks of a cluster, cannot share ``tiles`` tiles of keys, or None."""
    if config.sharers > 1 and not config.split:
        return "blocks share queries whose warpgroups share them, too"
    if config.sharers not in (1, 2, 4, 8):
        return f"{config.sharers} blocks do not form a cluster"
    if not config.split:
        return None
    own = config.block_tiles(tiles)
    if (config.sharers - 1) * own >= tiles:
        return f"{tiles} tiles of keys for {config.sharers} blocks"
    if config.warpgroups == 1 or config.persistent or config.turns:
        return "warpgroups that share keys need several warpgroups, one item per block and no turns"
    if own < config.warpgroups:
        return f"{own} tiles of keys for {config.warpgroups} warpgroups"
    if config.stages < own and config.stages % config.warpgroups:
        return f"{config.stages} stages, which {config.warpgroups} warpgroups do not share evenly"
    return None


def _no_grids(problem: Problem, config: Config) -> str | None:
    """Why the kernel cannot round scores and weights to a problem's grids, or None (also without grids)."""
    scores, weights = problem.grids
    if weights is None:
        return None if scores is None else "scores are rounded, and weights are not"
    if problem.factors is not None or problem.causal or problem.reach >= 0 or problem.softcap or problem.sinks:
        return "rounded weights have no causal order, window, factors, softcap or sinks"
    if config.turns or config.split:
        return "rounded weights need whole rows, and no turns"
    if not 0 < weights.high <= 256 or weights.low > 0:
        return f"weights of {weights.low} to {weights.high} steps"
    if scores is not None and (problem.mask is not None or problem.lengths):
        return "a mask would follow the rounding of the scores"
    if scores is not None and (scores.high - scores.low) * scores.scale > MOST_SPREAD:
        return f"exponentials of rounded scores that may differ by more than e^{MOST_SPREAD}"
    return None


def _no_factors(problem: Problem) -> str | None:
    """Why the kernel cannot add the factors of a problem, or None (also without factors)."""
    f = problem.factors
    if f is None:
        return None
    if problem.mask is not None:
        return "a mask in addition to factors"
    if f.key_width % 2 or problem.keys % f.key_width or problem.queries % f.query_width:
        whole = f"{problem.keys} keys and {problem.queries} queries are not whole rows"
        return f"{whole} of {f.key_width} (an even number is needed) and {f.query_width}"
    if any(s % 2 for s in f.columns):
        return "columns are read in pairs, but begin at odd elements"
    return None


def factor_form(problem: Problem, config: Config) -> int:
    """How factors are read. 0: there are none. 1: the columns once, if a tile is a row of keys. 2: with each tile."""
    if problem.factors is None:
        return 0
    return 1 if problem.factors.key_width == config.keys else 2
