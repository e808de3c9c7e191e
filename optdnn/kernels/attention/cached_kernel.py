"""Plans of attention of one new position over a cache (``attention_cached.cu``): every GPU from sm_80 on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.kernels.attention.problem import HeadView
from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted

MEMORY = 4.0e12  # bytes/s
LATENCY = 1.3e-6
"""Seconds from a load to its use."""
FIXED = 3.5e-6
"""Seconds of a launch with one tile per block and no merge of partial sums."""
EXCHANGE, SENT = 1.5e-6, 0.2e-6
"""Seconds of an exchange of partial sums between blocks: through memory, and in a cluster."""
CLUSTERS = 2, 4, 8
"""Possible numbers of blocks in a cluster."""
EXPECTED = 4
"""The cost model assumes that 1 / EXPECTED of a cache is filled."""
MOST_GROUP = 16
"""Most queries that share a head of keys."""
WIDEST = 256
"""Most features of a head."""


@dataclass(frozen=True)
class Problem:
    """``batch`` new positions, each of ``heads`` queries that share ``key_heads`` heads of a cache of ``capacity`` positions.

    The first ``turned`` features of queries and of the new key get rotary embeddings (0: none). ``reach``: number of keys before the new
    one that it sees (-1: all). ``sinks``: each query head's softmax has one more logit, which no value belongs to. ``given``: all
    keys and values are in memory, and the launch writes none. ``mask``: a number is added to each score.
    """

    batch: int
    heads: int
    key_heads: int
    capacity: int
    features: int
    scale: float
    dtype: str = "float16"
    turned: int = 0
    interleaved: bool = False
    reach: int = -1
    softcap: float = 0.0
    sinks: bool = False
    given: bool = False
    mask: bool = False

    @property
    def group(self) -> int:
        """Queries that share a head of keys."""
        return self.heads // self.key_heads

    @property
    def tiles(self) -> int:
        """Tiles of eight queries in a group."""
        return -(-self.group // 8)

    def bytes(self, positions: int) -> int:
        """Bytes of the cache that a launch reads if ``positions`` positions are filled."""
        seen = positions if self.reach < 0 else min(positions, self.reach + 1)
        return 4 * self.batch * self.key_heads * self.features * seen


@dataclass(frozen=True)
class Places:
    """Views of queries, new keys and values, keys, values and result (strides in elements), and the distances in bytes between samples
    of the angles, positions and lengths. ``mask``: distances of its samples and heads in elements."""

    q: HeadView
    new_k: HeadView
    new_v: HeadView
    k: HeadView
    v: HeadView
    out: HeadView
    cosines: int = 0
    sines: int = 0
    start: int = 0
    length: int = 0
    mask: tuple[int, int] = (0, 0)


@dataclass(frozen=True, order=True)
class Config:
    """A block has ``warps`` warps of 16 keys each; ``splits`` blocks share the keys of a head. ``cluster``: these blocks form a cluster."""

    warps: int
    splits: int
    cluster: bool = False

    def __str__(self) -> str:
        return f"cached{self.warps}x{self.splits}{'c' if self.cluster else ''}"


def refuse(problem: Problem, config: Config, *, shared: int = 101376) -> str | None:
    """Why the configuration cannot run the problem, or None. ``shared``: most bytes of shared memory of a block (99 KB on sm_86)."""
    p = problem
    if p.dtype not in ("float16", "bfloat16"):
        return f"it is for 16-bit floats, not {p.dtype}"
    if p.features % 16 or not 16 <= p.features <= WIDEST:
        return f"heads of {p.features} features (a multiple of 16 up to {WIDEST} is needed)"
    if p.heads % p.key_heads or p.group > MOST_GROUP:
        return f"{p.heads} queries of {p.key_heads} key heads (groups of up to {MOST_GROUP} are needed)"
    if p.turned % 4 or p.turned > p.features:
        return f"{p.turned} features have rotary embeddings (a multiple of 4 is needed)"
    if not p.scale > 0 or math.isinf(p.scale) or p.softcap < 0 or math.isinf(p.softcap):
        return f"a scale of {p.scale} and a softcap of {p.softcap}"
    if p.tiles * p.features > WIDEST:
        return f"results of {p.group} queries of {p.features} features exceed the registers"
    if p.batch > 65535 or p.key_heads > 65535:
        return "the grid is too large"
    if config.warps not in (1, 2, 4, 8) or not 1 <= config.splits <= 64:
        return "not a tile of this kernel"
    if config.cluster and config.splits not in CLUSTERS:
        return f"{config.splits} blocks do not form a cluster"
    if (needed := shared_bytes(p, config)) > shared:
        return f"{needed} bytes of shared memory exceed {shared}"
    return None


def _found(problem: Problem) -> int:
    """Floats of the partial result of a warp or block."""
    return -(-problem.group * (problem.features + 2) // 4) * 4


def shared_bytes(problem: Problem, config: Config) -> int:
    """Bytes of dynamic shared memory of a block: queries and the new rows, sinks, the partial result of each warp, a word, and the
    partial results that a cluster sends."""
    sent = 4 * config.splits * problem.group * (problem.features + 4) if config.cluster else 0
    sinks = -(-problem.group // 4) * 16 if problem.sinks else 0
    return (
        2 * (8 * problem.tiles + 2) * (problem.features + 32) + sinks + 4 * config.warps * _found(problem) + 16 + sent
    )


def workspace(problem: Problem, config: Config) -> tuple[int, int]:
    """Bytes of the operands ``partial`` and ``arrived`` (zeros at first); both 0 if a head has one block or a cluster."""
    if config.splits == 1 or config.cluster:
        return 0, 0
    pairs = problem.batch * problem.key_heads
    return 4 * pairs * config.splits * _found(problem), 4 * pairs


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """The kernel's recipe. Capacity, strides and counts are parameters."""
    defines = {
        "WARPS": config.warps, "SPLITS": config.splits, "CLUSTER": int(config.cluster), "GROUP": problem.group, "HEAD": problem.features, "TURNED": problem.turned,
        "INTERLEAVED": int(problem.interleaved), "WINDOW": int(problem.reach >= 0), "SOFTCAP": int(problem.softcap > 0),
        **{n: 1 for n, has in (("SINKS", problem.sinks), ("GIVEN", problem.given), ("MASK", problem.mask)) if has},
    }  # fmt: skip
    text = "\n".join([render.constants(defines), render.mma(problem.dtype), ""])
    return Recipe("attention_cached.cu", arch, {"generated.cuh": text}, template_options(problem.dtype))


def launch(
    problem: Problem, config: Config, gpu: GpuFacts, places: Places, *, starts: bool = True, lengths: bool = True
) -> Launch:
    """The launch. Operands: ``q``, ``new_k`` and ``new_v`` (unless ``given``), ``cosines`` and ``sines`` (with rotary embeddings),
    ``starts`` (if ``starts``), ``lengths`` (if ``lengths``), ``k``, ``v``, ``out``, the operands of :func:`workspace`, ``sinks``
    (contiguous) and ``mask`` (if the problem has them)."""
    p, turns, splits = problem, problem.turned > 0, config.splits > 1 and not config.cluster
    parameters = Parameters()
    for name, view in (("q", places.q), ("new_k", places.new_k), ("new_v", places.new_v)):
        parameters.pointer(None if p.given and name != "q" else name, offset=2 * view.offset)
    parameters.pointer(*(("cosines", "sines") if turns else (None, None)))
    parameters.pointer("starts" if starts else None, "lengths" if lengths else None, "k", "v", "out")
    parameters.pointer(*(("partial", "arrived") if splits else (None, None)))
    for view in (places.q, places.new_k, places.new_v, places.k, places.v, places.out):
        parameters.i64(view.batch, view.head)
    parameters.i64(places.k.position, places.v.position, places.cosines // 2, places.sines // 2)
    parameters.i64(places.start // 4, places.length // 4)
    parameters.i32(p.capacity, p.reach)
    cap = (2 * math.log2(math.e) * p.scale / p.softcap, p.softcap * math.log2(math.e)) if p.softcap else (0.0, 0.0)
    parameters.f32(p.scale * math.log2(math.e), *cap)
    parameters.pointer(*(("sinks",) if p.sinks else ()))
    if p.mask:
        parameters.pointer("mask")
        parameters.i64(*places.mask)
    grid = (config.splits, p.key_heads, p.batch)
    shared = shared_bytes(p, config)
    return parameters.launch(
        recipe(p, config, gpu.arch), "attention_cached", grid, config.warps * 32, shared=shared,
        cluster=config.splits if config.cluster else 1,
    )  # fmt: skip


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch, for a cache filled to 1 / :data:`EXPECTED`, or for all given keys."""
    gpu = fitted(gpu)
    # Includes the new position: it begins a tile of its own if the others fill theirs.
    positions = problem.capacity if problem.given else min(problem.capacity // EXPECTED + 1, problem.capacity)
    seen = positions if problem.reach < 0 else min(positions, problem.reach + 1)
    tiles = -(-seen // (16 * config.warps))
    active = min(config.splits, tiles)
    turns = -(-tiles // active)
    blocks = problem.batch * problem.key_heads * active
    resident = gpu.multiprocessors * max(1, 16 // config.warps)
    waves = -(-blocks // resident)
    streaming = problem.bytes(positions) / min(MEMORY, gpu.bandwidth)
    latency = LATENCY * turns * waves
    idle = 0.02e-6 * (problem.batch * problem.key_heads * config.splits / gpu.multiprocessors)
    exchange = 0.0 if active == 1 else SENT if config.cluster else EXCHANGE
    return FIXED + exchange + max(streaming, latency) + idle


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 8) -> list[Config]:
    """The configurations to time, best predicted first. Blocks form clusters if the clusters of all heads run at once."""
    heads = problem.batch * problem.key_heads
    fitting = {s for s in CLUSTERS if gpu.clusters and gpu.clusters_at_once(s) >= heads}
    found = [Config(w, s, s in fitting) for w in (4, 8) for s in (1, 2, 4, 8, 16, 32)]
    usable = [c for c in found if refuse(problem, c) is None]
    return sorted(usable, key=lambda c: (estimate(problem, c, gpu), c.splits, c.warps))[:limit]
