"""Plans of the fused attention kernel (``attention_sm90.cu``): ``softmax(scale * q k^T + mask) v`` per batch and head.

The online softmax is that of FlashAttention (Dao et al., 2022); operands are strided, so q, k and v may lie in the output of one
joint projection and the result in [batch, position, head, feature] order without a transposition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from optdnn.errors import InternalError
from optdnn.kernels.attention import few_items
from optdnn.kernels.launch import Launch, Parameters, no_room, template_options, tensor_map
from optdnn.kernels.quantized.quantized_store import QuantizedStore, narrow_kind
from optdnn.kernels.ranking import varied
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.compile.render import values_instruction
from optdnn.runtime.cuda.gpu_facts import GpuFacts

MEMORY = 4.2e12
CLOCK = 1.75e9
LOADING_REGISTERS = 24
"""Registers of a thread of a persistent block's loading warpgroup."""
PRODUCT_REGISTERS = 26
"""Registers of a thread, in addition to the scores, that ptxas needs for a product at the block's initial registers."""
MERGE_REGISTERS = 60
"""Registers of a thread that adds up what warpgroups found, in addition to its results and to maxima and sums."""
ENDS = 2200
"""Cycles of a block's first loads and last store."""
TURNS, IDLE_TURNS = 0.96, 1.02
"""A tile's cycles with turns (warpgroups issue their products one after the other), over its cycles without: where turns help, and
where they do not."""
POLYNOMIAL = 0
EARLY = 0
DEEP = 0
SAMPLED = 64
"""Items of a head whose tiles the model counts."""
_BARRIER_BYTES = 1024


@dataclass(frozen=True)
class HeadView:
    """Where a tensor of logical axes (batch, head, position, feature) lies: offset and strides in elements; features are
    contiguous."""

    batch: int
    head: int
    position: int
    offset: int = 0


def bshd(positions: int, heads: int, features: int, *, parts: int = 1, part: int = 0) -> HeadView:
    """The view of part ``part`` of a tensor [batch, position, parts, head, feature]."""
    row = parts * heads * features
    return HeadView(positions * row, features, row, part * heads * features)


def bhsd(positions: int, heads: int, features: int) -> HeadView:
    """The view of a tensor [batch, head, position, feature]."""
    return HeadView(heads * positions * features, positions * features, features)


@dataclass(frozen=True)
class Factors:
    """A bias of two factors: key k of a query gets ``rows[k // key_width] + columns[k % key_width]``.

    ``rows`` and ``columns``: strides in elements of both tensors, of (batch, head, row of the query, column of the query); queries lie
    in rows of ``query_width``. Their last axes are contiguous.
    """

    rows: tuple[int, int, int, int]
    columns: tuple[int, int, int, int]
    key_width: int
    query_width: int


@dataclass(frozen=True)
class Problem:
    """``batch`` x ``heads`` attentions of ``queries`` over ``keys`` positions of ``features``.

    ``key_heads`` divides ``heads`` (grouped queries). ``mask``: strides (batch, head, query) in elements of an additive 16-bit mask
    whose last axis of ``keys`` elements is contiguous; 0 broadcasts; batch entry n has mask n % ``mask_period`` (0: its own), as
    the windows of a Swin transformer share theirs. ``causal``: query i sees keys up to i + ``causal_offset``.
    ``lengths``: an int32 per batch entry gives the number of keys. A row that sees no key is zero. ``value_features``: of values and
    result (0: ``features``). ``reach``: with a window, query i sees keys from i + ``causal_offset`` - reach on (-1: from the first).
    ``from_end``: positions of queries count from the end of the keys of their batch entry, which ``causal_offset`` is added to.
    ``softcap``: scores x become softcap * tanh(x / softcap) before the mask is added (0: they stay).
    """

    batch: int
    heads: int
    queries: int
    keys: int
    features: int
    scale: float
    q: HeadView
    k: HeadView
    v: HeadView
    out: HeadView
    dtype: str = "float16"
    key_heads: int = 0
    mask: tuple[int, int, int] | None = None
    mask_period: int = 0
    causal: bool = False
    causal_offset: int = 0
    lengths: bool = False
    narrow: str = ""
    """8-bit element type of the result; "": ``dtype``."""
    value_features: int = 0
    reach: int = -1
    from_end: bool = False
    softcap: float = 0.0
    factors: Factors | None = None

    @property
    def widest(self) -> int:
        """The larger one of the features of keys and values."""
        return max(self.features, self.value_features)

    @property
    def out_item(self) -> int:
        """Bytes of an element of the result."""
        return 1 if self.narrow else 2

    @property
    def values(self) -> int:
        """Features of values and result."""
        return self.value_features or self.features

    @property
    def head(self) -> int:
        """Features per head as the kernel computes them: a multiple of 16. TMA fills what keys or values lack with zeros."""
        return -(-self.widest // 16) * 16

    @property
    def span(self) -> int:
        """Bytes per row of a subtile in shared memory."""
        return next(span for span in (128, 64, 32) if self.head * 2 % span == 0)

    @property
    def flops(self) -> int:
        """Both matrix products, multiply-adds counted as two; causal ones in full."""
        return 2 * self.batch * self.heads * self.queries * self.keys * (self.features + self.values)

    @property
    def bytes(self) -> int:
        """Least global traffic: each tensor once."""
        rows = self.queries * self.heads + self.keys * (self.key_heads or self.heads)
        return 2 * self.batch * (self.features + self.values) * rows


@dataclass(frozen=True, order=True)
class Config:
    """``warpgroups`` x 64 queries per item (``split``: 64), tiles of ``keys`` keys in a ring of ``stages``; ``blocks`` per multiprocessor that
    registers must allow. ``persistent``: as many blocks as run at a time take items in turn; otherwise a block takes one. ``turns``: a
    block's warpgroups issue their products in turn. ``split``: a block's warpgroups share 64 queries, and take its tiles of keys in
    turn."""

    warpgroups: int
    keys: int
    stages: int
    blocks: int = 1
    persistent: bool = False
    turns: bool = False
    split: bool = False
    lazy: bool = False
    even: bool = False

    @property
    def queries(self) -> int:
        """Queries of an item."""
        return 64 if self.split else 64 * self.warpgroups

    def own_tiles(self, tiles: int) -> int:
        """Tiles of ``tiles`` that the busiest warpgroup multiplies."""
        return -(-tiles // self.warpgroups) if self.split else tiles

    def __str__(self) -> str:
        flags = "p" * self.persistent + "t" * self.turns + "k" * self.split + "l" * self.lazy + "e" * self.even
        return f"attn{self.warpgroups}n{self.keys}s{self.stages}b{self.blocks}{flags}"


def loader(problem: Problem, config: Config) -> int:
    """Number of loading warps: 0 where all tiles of a block have a stage."""
    return int(config.persistent or -(-problem.keys // config.keys) > config.stages)


def row_items(problem: Problem, config: Config) -> int:
    """Items of one head: ``config.queries`` queries each."""
    return -(-problem.queries // config.queries)


def at_once(problem: Problem, config: Config, device: GpuFacts) -> int:
    """Blocks that a multiprocessor is sure to hold at a time."""
    by_shared = device.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024)
    return max(1, min(by_shared, config.blocks))


def threads(problem: Problem, config: Config) -> int:
    """Threads of a block. A persistent one's loading warp is one of a warpgroup, since registers move between warpgroups."""
    return config.warpgroups * 128 + (128 if config.persistent else 32 * loader(problem, config))


def start_registers(config: Config) -> int:
    """Registers of each thread of a persistent block when it starts."""
    return 512 // config.blocks // (config.warpgroups + 1) // 8 * 8


def register_limit(problem: Problem, config: Config) -> int:
    """Registers a multiplying thread may have. A multiprocessor has 512 warp-wide ones for each of its four partitions."""
    if config.persistent:
        all_groups = start_registers(config) * (config.warpgroups + 1)
        return min(240, (all_groups - LOADING_REGISTERS) // config.warpgroups // 8 * 8)
    return min(255, 512 // -(-threads(problem, config) // 32 * config.blocks // 4) // 8 * 8)


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block."""
    places = 2 if config.persistent else 1
    ring = problem.head * 4 * config.stages * config.keys
    if config.split:  # the ring's place takes what the other warpgroups found
        ring = max(ring, (config.warpgroups - 1) * (problem.head // 8 + 1) * 2048)
    return _BARRIER_BYTES + problem.head * 2 * places * config.queries + ring


def refuse(problem: Problem, config: Config, *, shared: int = 232448) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if problem.softcap:
        return "it has no softcap"
    if (why := _no_factors(problem)) is not None:
        return why
    for features in (problem.features, problem.values):
        if features % 8 or not 8 <= features <= 128:
            return f"heads of {features} features (a multiple of 8 up to 128 is needed)"
    if not problem.scale > 0 or math.isinf(problem.scale):
        return f"a scale of {problem.scale}"
    if problem.heads % (problem.key_heads or problem.heads):
        return f"{problem.heads} heads do not share {problem.key_heads} key heads evenly"
    for name, view in (("q", problem.q), ("k", problem.k), ("v", problem.v), ("out", problem.out)):
        unit = 16 // (problem.out_item if name == "out" else 2)
        if any(x % unit or x < 0 for x in (view.batch, view.head, view.position, view.offset)):
            return f"{name}: TMA needs strides and offsets that are multiples of {unit} elements"
    if config.warpgroups not in (1, 2, 3, 4) or config.keys % 16 or not 16 <= config.keys <= 256 or config.stages < 1:
        return "not a tile of this kernel"
    tiles = -(-problem.keys // config.keys)
    if config.turns and (config.warpgroups == 1 or tiles == 1):
        return "turns of one warpgroup or of one tile"
    if config.split and (why := _no_split(config, tiles)) is not None:
        return why
    if config.even and (problem.causal or problem.reach >= 0 or problem.lengths or not config.persistent or tiles == 1):
        return "even shares of items that differ, of one tile, or of blocks with one item"
    if config.lazy and tiles == 1:
        return "a maximum that is kept for one tile"
    if config.stages > (8 if config.persistent else min(tiles, 8)):
        return f"{config.stages} stages for {tiles} tiles"
    if (why := no_room(shared_bytes(problem, config), shared, config.blocks)) is not None:
        return why
    # Scores, their packed copies (in place of them, of a single tile), results, and the rest: fitted to what the compiler reports.
    scores, rest = (config.keys * 0.62, 44) if config.own_tiles(tiles) == 1 else (config.keys * 0.75, 28)
    mask = 12 + config.keys / 8 * mask_rows(problem) if problem.mask else 0.0
    bias = (mask, config.keys / 2, 36.0)[factor_form(problem, config)]
    merged = problem.head / 2 + 4 * config.warpgroups + MERGE_REGISTERS if config.split else 0.0
    if max(scores + problem.head / 2 + rest + bias, merged) > (limit := register_limit(problem, config)):
        return f"scores and results of a thread exceed {limit} registers"
    if config.persistent and config.keys // 2 + PRODUCT_REGISTERS > start_registers(config):
        return f"the compiler takes no product of {config.keys} keys for threads that start with {start_registers(config)} registers"
    if problem.heads > 65535 or problem.batch > 65535:
        return "the grid is too large"
    return None


def _no_split(config: Config, tiles: int) -> str | None:
    """Why a block's warpgroups cannot share ``tiles`` tiles of keys; None where they can."""
    if config.warpgroups == 1 or config.persistent or config.turns:
        return "one warpgroup, several items of a block or turns, and keys that warpgroups share"
    if tiles < config.warpgroups:
        return f"{tiles} tiles of keys for {config.warpgroups} warpgroups"
    if config.stages < tiles and config.stages % config.warpgroups:
        return f"{config.stages} stages, which {config.warpgroups} warpgroups do not share evenly"
    return None


def _no_factors(problem: Problem) -> str | None:
    """Why the kernel cannot add the factors of a problem; None where it can, or where there are none."""
    f = problem.factors
    if f is None:
        return None
    if problem.mask is not None:
        return "a mask in addition to factors"
    if f.key_width % 2 or problem.keys % f.key_width or problem.queries % f.query_width:
        return f"rows of {f.key_width} keys and {f.query_width} queries, of {problem.keys} and {problem.queries}"
    if any(s % 2 for s in f.columns):
        return "columns are read in pairs, which begin at odd elements"
    return None


def factor_form(problem: Problem, config: Config) -> int:
    """How factors are read: 0: there are none; 1: columns once, where a tile is a row of keys; 2: with each tile."""
    if problem.factors is None:
        return 0
    return 1 if problem.factors.key_width == config.keys else 2


def mask_width(problem: Problem) -> int:
    """Elements of a mask that are read at a time: pairs where every row of it starts at an even one; 0 where there is none."""
    if problem.mask is None:
        return 0
    return 2 if problem.keys % 2 == 0 and all(x % 2 == 0 for x in problem.mask) else 1


def mask_rows(problem: Problem) -> int:
    """Rows of a mask that a thread reads for its two queries: one where all queries share it."""
    return 2 if problem.mask is not None and problem.mask[2] else 1


def recipe(problem: Problem, config: Config, arch: str = "sm_90a", *, checked: bool = False) -> Recipe:
    """What to compile. Lengths, strides and counts are parameters. ``checked``: a wait that never ends traps."""
    defines = {
        "WARPGROUPS": config.warpgroups, "BLOCK_KEYS": config.keys, "STAGES": config.stages,
        "LOADER": loader(problem, config), "ONE_TILE": int(config.own_tiles(-(-problem.keys // config.keys)) == 1),
        "PERSISTENT": int(config.persistent), "TURNS": int(config.turns), "SPLIT": int(config.split), "LAZY": int(config.lazy), "EVEN": int(config.even), "EARLY": EARLY, "DEEP": DEEP, "POLYNOMIAL": POLYNOMIAL, "POLYNOMIAL_PAIRS": max(1, POLYNOMIAL), "REGISTERS": register_limit(problem, config),
        "HEAD": problem.head, "SPAN": problem.span, "MIN_BLOCKS": config.blocks, "CAUSAL": int(problem.causal), "REACH": int(problem.reach >= 0), "FROM_END": int(problem.from_end), "HAS_LENGTHS": int(problem.lengths),
        "MASK": mask_width(problem), "MASK_ROWS": mask_rows(problem),
        "NARROW": narrow_kind(problem.narrow), "FACTORS": factor_form(problem, config),
    }  # fmt: skip
    if problem.factors is not None:
        defines["KEY_WIDTH"] = problem.factors.key_width
    scores = render.wgmma(config.keys, problem.dtype).replace("wgmma_step", "wgmma_scores")
    text = "\n".join([render.constants(defines), scores, values_instruction(problem.head, problem.dtype), ""])
    return Recipe("attention_sm90.cu", arch, {"generated.cuh": text}, template_options(problem.dtype, checked=checked))


def launch(problem: Problem, config: Config, gpu: GpuFacts, narrow: QuantizedStore | None = None) -> Launch:
    """The launch. Operands: ``q``, ``k``, ``v``, ``out``, ``mask``, ``lengths`` (int32 [batch]), ``rows`` and ``columns``. Views carry their offsets, so q,
    k and v may be given the same address."""
    key_heads = problem.key_heads or problem.heads
    if problem.heads % key_heads:
        raise InternalError("query heads do not share key heads evenly")
    parameters = Parameters()
    for name, view, features, heads, positions, rows in (
        ("q", problem.q, problem.features, problem.heads, problem.queries, 64),
        ("k", problem.k, problem.features, key_heads, problem.keys, config.keys),
        ("v", problem.v, problem.values, key_heads, problem.keys, config.keys),
        ("out", problem.out, problem.values, problem.heads, problem.queries, 64),
    ):
        shape = (features, positions, heads, problem.batch)
        # An 8-bit result is stored as plain rows, everything else in swizzled subtiles.
        own = name == "out" and problem.narrow
        item, width, span = (1, problem.head, 0) if own else (2, problem.span // 2, problem.span)
        strides = (view.position * item, view.head * item, view.batch * item)
        dtype = problem.narrow if own else problem.dtype
        box = (width, rows, 1, 1)
        parameters.tensor_map(tensor_map(name, dtype, shape, strides, box, span, offset=view.offset * item))
    parameters.pointer("mask" if problem.mask is not None else None, "lengths" if problem.lengths else None)
    parameters.i64(*(problem.mask or (0, 0, 0)))
    parameters.i32(problem.queries, problem.keys, problem.heads, problem.heads // key_heads, problem.causal_offset)
    rows = row_items(problem, config)
    items = rows * problem.heads * problem.batch
    parameters.i32(max(0, problem.reach))
    parameters.i32(problem.mask_period or problem.batch, items, rows)
    parameters.f32(problem.scale * math.log2(math.e))
    (narrow or QuantizedStore()).put(parameters)
    if (f := problem.factors) is not None:
        parameters.pointer("rows", "columns").i64(*f.rows, *f.columns).i32(f.query_width)
    grid = (rows, problem.heads, problem.batch)
    if config.persistent:
        grid = (blocks(problem, config, gpu), 1, 1)
    if config.even:
        share, more = divmod(items * -(-problem.keys // config.keys), grid[0])
        parameters.pointer("partial", "arrived").i32(share, more)
    return parameters.launch(
        recipe(problem, config, gpu.arch),
        "attention_sm90",
        grid,
        threads(problem, config),
        shared=shared_bytes(problem, config),
    )


def blocks(problem: Problem, config: Config, gpu: GpuFacts) -> int:
    """Blocks of a persistent launch."""
    items = row_items(problem, config) * problem.heads * problem.batch
    tiles = -(-problem.keys // config.keys) if config.even else 1
    return min(items * tiles, gpu.multiprocessors * at_once(problem, config, gpu))


def workspace(problem: Problem, config: Config, gpu: GpuFacts) -> tuple[int, int]:
    """Bytes of the operands ``partial`` and ``arrived`` (zeros at first, and after each launch); both 0 where blocks share no items."""
    if not config.even:
        return 0, 0
    items = row_items(problem, config) * problem.heads * problem.batch
    found = blocks(problem, config, gpu) * 2 * config.warpgroups * (problem.head // 8 + 1) * 2048
    return found, 4 * items * config.warpgroups


def has_few_items(problem: Problem, device: GpuFacts) -> bool:
    """Whether blocks of 64 queries leave multiprocessors idle, or just occupy them."""
    return row_items(problem, Config(1, 16, 1)) * problem.heads * problem.batch <= device.multiprocessors


def order_of_sums(config: Config) -> tuple[int, ...]:
    """What decides in which order a row is summed."""
    return (config.keys, config.warpgroups if config.split else 1)


def tiles_seen(problem: Problem, config: Config) -> float:
    """Tiles of keys that an item's queries see, on average, where all keys are filled."""
    tiles = -(-problem.keys // config.keys)
    if problem.reach < 0:
        square = problem.causal and problem.queries == problem.keys
        return tiles * (min(1.0, 0.5 + 0.5 * config.keys / problem.keys) if square else 1.0)
    ahead = problem.causal_offset + (problem.keys - problem.queries if problem.from_end else 0)
    rows, count = config.queries, row_items(problem, config)
    seen, sampled = 0, range(0, count, -(-count // SAMPLED))
    for item in sampled:
        end = min(problem.keys, max(0, (item + 1) * rows + ahead)) if problem.causal else problem.keys
        last = -(-end // config.keys)
        seen += last - min(last, max(0, item * rows + ahead - problem.reach) // config.keys)
    return seen / len(sampled)


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch."""
    tiles = -(-problem.keys // config.keys)
    seen = tiles_seen(problem, config)
    items = row_items(problem, config) * problem.heads * problem.batch
    by_shared = device.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024)
    registers = min(255, (config.keys + problem.head) // 2 + 60)
    warps = 4 * (512 // registers)
    resident = max(1, min(by_shared, max(config.blocks, warps // (threads(problem, config) // 32))))
    if config.persistent:
        resident = at_once(problem, config, device)
    # Of one warpgroup and tile, in cycles: both products, then the scores' exponentials and their arithmetic.
    multiply = config.keys * problem.head / 16 * 2
    plain = 1 / 16 + 7 / 128
    added = 0 if problem.mask is None else 10 / 128 if problem.mask[2] else 3 / 128
    added += (0, 1, 5)[factor_form(problem, config)] / 128
    if has_few_items(problem, device):
        busiest = math.ceil(seen) if problem.reach >= 0 else tiles  # of one wave, the item with the most tiles decides
        own, work = max(1, config.own_tiles(busiest)), (plain + added) / plain
        groups, split = (1, config.warpgroups) if config.split else (config.warpgroups, 1)
        return few_items.seconds(config.keys, own, groups, problem.head, work, split, ahead=config.stages > split)
    scores = 64 * config.keys * (plain + added) + 150
    alone = 4 * scores * 0.5 + multiply + 300  # one warpgroup uses a quarter of each unit's issue slots well
    if config.stages == 1 and tiles > 1:  # nothing is loaded while it multiplies
        alone += 1000
    slack = 1.03 if config.stages == 2 and tiles > 32 else 1.0
    if config.stages == 2 < min(tiles, config.warpgroups):  # a stage is free when the last one of many has read it
        slack = 1.05
    groups = config.warpgroups * min(resident, -(-items // device.multiprocessors))
    tile = max(groups * max(multiply, scores), alone) / groups * _turns(problem, config, resident)
    waves = items / (device.multiprocessors * resident)
    waves = math.ceil(waves) if waves < 3 else waves + 0.5
    block = groups * seen * tile * slack
    # Loads of persistent blocks run ahead: between items, a block waits only for its last products.
    cycles = waves * (block + 500) + ENDS if config.persistent else waves * (block + ENDS)
    loaded = tiles if problem.reach < 0 else seen
    traffic = items * (2 * config.keys * loaded + 2 * config.queries) * problem.head * 2
    compute, share = cycles / CLOCK, sector_share(problem)
    loads = traffic * share / 5.5e12
    besides = 0.25 * min(compute, loads) if share > 1 or problem.reach >= 0 else 0.0
    return 0.8e-6 + max(compute, problem.bytes / MEMORY, loads) + besides


def _turns(problem: Problem, config: Config, resident: int) -> float:
    """A tile's cycles in this configuration, over its cycles without turns.

    Turns do not help where other blocks share the multiprocessor, where the warpgroups of a causal problem have different tiles, or
    where a bias of factors leaves little time between products."""
    if not config.turns:
        return 1.0
    even = not problem.causal or problem.reach >= 0
    return TURNS if resident == 1 and even and problem.factors is None else IDLE_TURNS


def sector_share(problem: Problem) -> float:
    """Sectors of L2 (32 bytes) that the rows of keys and values touch, over those that they fill: rows of a subtile that do not begin at
    one touch one more."""
    starts = (x for view in (problem.k, problem.v) for x in (view.batch, view.head, view.position, view.offset))
    return 1.0 if all(x % 16 == 0 for x in starts) else 1.0 + 32 / problem.span


def candidates(problem: Problem, device: GpuFacts, limit: int = 6) -> list[Config]:
    """The configurations to time, best predicted first. Empty when the kernel cannot run the problem."""
    found: list[tuple[float, Config]] = []
    for warpgroups in (1, 2, 3, 4):
        for keys in (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 256):
            if keys - 16 >= problem.keys and keys > 32:
                continue
            tiles = -(-problem.keys // keys)
            for form in _forms(problem, warpgroups, keys, device):
                for blocks in (4, 3, 2, 1):  # the most that the registers allow: fewer would not change anything
                    config = replace(form, blocks=blocks)
                    if refuse(problem, config, shared=device.shared_per_block) is None:
                        found += [(estimate(problem, c, device), c) for c in (config, *_in_turn(config, tiles))]
                        break
    return varied(found, lambda c: (c.warpgroups, c.keys, c.persistent, c.turns, c.split), limit)


def _forms(problem: Problem, warpgroups: int, keys: int, device: GpuFacts) -> list[Config]:
    """Blocks with rings of several sizes; persistent ones where there are many items, split ones where there are few."""
    tiles, found = -(-problem.keys // keys), []
    if 64 * (warpgroups - 1) < problem.queries:
        found += [Config(warpgroups, keys, n) for n in sorted({1, min(2, tiles), min(3, tiles), min(4, tiles)})]
        if row_items(problem, found[0]) * problem.heads * problem.batch > device.multiprocessors:
            found += [Config(warpgroups, keys, n, persistent=True) for n in (2, 3)]
    if warpgroups > 1 and has_few_items(problem, device):
        found.append(Config(warpgroups, keys, min(tiles, 2 * warpgroups), split=True))
    return found


def _in_turn(config: Config, tiles: int) -> list[Config]:
    """The configuration whose warpgroups issue their products in turn, where there are several of them, and several tiles."""
    return [replace(config, turns=True)] if config.warpgroups > 1 and tiles > 1 and not config.split else []
