"""Plans of attention between channels: mma.sync, every GPU from sm_80 on.

In one launch (``attention_channels.cu``), each block sums the scores of its head over all tokens. With many tokens there are two
launches: the blocks of the first share out the tokens (``channel_sums.cu``); the blocks of the second add up the partial sums and
compute the results (``channel_results.cu``). Heads of more than 64 channels take two launches, and the blocks of the first also share out
the channels of the queries, in bands.

The kernels also compute normalized linear attention (:class:`Divided`), which has the same two products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.kernels.attention.problem import HeadView
from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

MOST_CHANNELS = 128
"""Most channels of a head: the scores of 32 channels with all others must fit a warp's registers."""
MOST_SCORES = 48 * 96
"""Most scores in a warp's registers: 144 for each lane."""
RATE = 512
"""Least number of 16-bit multiply-adds of mma.sync per cycle and multiprocessor."""
CLOCK = 1.4e9
LOADED = 40
"""Bytes that a multiprocessor loads per cycle. An assumption, not measured."""


@dataclass(frozen=True)
class Divided:
    """Normalized linear attention: ``factor * q (k^T v) / (q (k^T 1) + epsilon)``. ``rectified``: of q and k, negative elements are
    replaced by 0."""

    epsilon: float
    rectified: bool


@dataclass(frozen=True)
class Problem:
    """``batch`` x ``heads`` attentions between ``channels`` over ``tokens``.

    Views: a position is a token, and its channels are contiguous. ``least``: lower bounds of the norms by which queries and keys are
    divided; None: they are not normalized. ``unit``: the operands begin at multiples of this number of elements. ``divided``: linear
    attention instead, whose values are the kernel's queries ``q``, and whose queries are its values ``v``.
    """

    batch: int
    heads: int
    channels: int
    tokens: int
    q: HeadView
    k: HeadView
    v: HeadView
    out: HeadView
    least: tuple[float, float] | None
    dtype: str = "float16"
    unit: int = 8
    divided: Divided | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """The kernels' two last numbers."""
        return (self.divided.epsilon, 0.0) if self.divided else self.least or (0.0, 0.0)

    @property
    def filled(self) -> int:
        """Channels in the kernel: padded to a multiple of 16."""
        return -(-self.channels // 16) * 16

    @property
    def rows(self) -> int:
        """Channels of the queries whose scores a warp sums up: all, or a band of as many as its registers hold."""
        return min(self.filled, MOST_SCORES // self.filled // 16 * 16)

    @property
    def bands(self) -> int:
        """Bands of channels of the queries."""
        return -(-self.filled // self.rows)

    @property
    def width(self) -> int:
        """Bytes of a copy into shared memory."""
        views = (self.q, self.k, self.v, self.out)
        numbers = [n for v in views for n in (v.batch, v.head, v.position, v.offset)]
        common = math.gcd(self.channels, self.unit, *numbers)
        return 16 if common % 8 == 0 else 4 if common % 2 == 0 else 2


@dataclass(frozen=True, order=True)
class Config:
    """A block has ``warps`` warps, each with a ring of ``slots`` tiles of 16 tokens.

    ``depth``: with two launches, tiles of 16 tokens that a warp of the first one sums up; 0: one launch.
    """

    warps: int
    slots: int
    depth: int = 0

    def __str__(self) -> str:
        return f"channels{self.warps}s{self.slots}" + (f"d{self.depth}" if self.depth else "")

    @property
    def span(self) -> int:
        """Tokens that a block of the first of two launches sums up."""
        return 16 * self.warps * self.depth


def parts(problem: Problem, config: Config) -> int:
    """Number of parts of the tokens that the first of two launches sums up separately."""
    return -(-problem.tokens // config.span)


def part_floats(problem: Problem) -> int:
    """Floats of a part: squares of queries and keys, and scores, of ``filled`` channels."""
    return (2 + problem.filled) * problem.filled


def _sums_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory to sum scores: squares, and the rings, which the sums overwrite."""
    channels, rows, warps = problem.filled, problem.rows, config.warps
    pitch = channels + 8
    return warps * 2 * channels * 4 + max(warps * config.slots * 16 * (rows + 8 + pitch) * 2, warps * rows * pitch * 4)


def _weights_bytes(problem: Problem) -> int:
    """Bytes of the matrix that multiplies the values. Linear attention: 16 rows more, and the factors of the rows."""
    rows = problem.filled + (16 if problem.divided else 0)
    return rows * (problem.filled + 8) * 2 + (rows * 4 if problem.divided else 0)


def _results_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory to compute results from parts: two tiles of 16 values per warp, weights, squares and scores."""
    channels = problem.filled
    row = (channels + 8) * 2
    return config.warps * 2 * 16 * row + _weights_bytes(problem) + 2 * channels * 4 + channels * row * 2


def shared_bytes(problem: Problem, config: Config) -> int:
    """Bytes of dynamic shared memory of a block (with two launches: the larger need)."""
    if config.depth:
        return max(_sums_bytes(problem, config), _results_bytes(problem, config))
    row = (problem.filled + 8) * 2
    return config.warps * 16 * row + _weights_bytes(problem) + _sums_bytes(problem, config)


def refuse(problem: Problem) -> str | None:
    """Why the kernels cannot run the problem, or None."""
    if not 2 <= problem.channels <= MOST_CHANNELS:
        return f"heads of {problem.channels} channels (2 to {MOST_CHANNELS} are possible)"
    if problem.tokens <= 0:
        return "it has no tokens"
    for name, view in (("q", problem.q), ("k", problem.k), ("v", problem.v), ("out", problem.out)):
        if any(x < 0 for x in (view.batch, view.head, view.position, view.offset)):
            return f"{name}: strides must not be negative"
        if view.position >= 1 << 31:
            return f"{name}: positions are {view.position} elements apart"
    if problem.heads > 65535 or problem.batch > 65535:
        return "the grid is too large"
    return None


def _recipe(problem: Problem, config: Config, gpu: GpuFacts, name: str) -> Recipe:
    defines = {
        "WARPS": config.warps, "CHANNELS": problem.filled, "ROWS": problem.rows, "SLOTS": config.slots, "WIDTH": problem.width,
        "NORMALIZE": int(problem.least is not None), "LINEAR": int(problem.divided is not None),
        "RECTIFY": int(problem.divided is not None and problem.divided.rectified), **({"DEPTH": config.depth} if config.depth else {}),
    }  # fmt: skip
    text = "\n".join([render.constants(defines), render.mma(problem.dtype), ""])
    return Recipe(f"{name}.cu", gpu.arch, {"generated.cuh": text}, template_options(problem.dtype))


def _views(parameters: Parameters, *views: HeadView) -> Parameters:
    for view in views:
        parameters.i64(view.batch, view.head).i32(view.position)
    return parameters


def launch(problem: Problem, config: Config, gpu: GpuFacts) -> Launch:
    """The one launch. Operands: ``q``, ``k``, ``v``, ``out``, ``factors`` (fp32 [heads])."""
    views = {"q": problem.q, "k": problem.k, "v": problem.v, "out": problem.out}
    parameters = Parameters()
    for name, view in views.items():
        parameters.pointer(name, offset=view.offset * 2)
    parameters.pointer("factors")
    parameters.i32(problem.tokens, problem.channels).f32(*problem.bounds)
    _views(parameters, *views.values())
    grid = (-(-problem.tokens // (16 * config.warps)), problem.heads, problem.batch)
    recipe = _recipe(problem, config, gpu, "attention_channels")
    return parameters.launch(
        recipe, "attention_channels", grid, 32 * config.warps, shared=shared_bytes(problem, config)
    )


def launches(problem: Problem, config: Config, gpu: GpuFacts) -> tuple[Launch, Launch]:
    """Both launches. Operands of the first: ``q``, ``k``, ``sums`` (fp32 [batch][head][part][2 + filled][filled]). Operands of the
    second: ``sums``, ``v``, ``out``, ``factors`` (fp32 [heads])."""
    many, threads = parts(problem, config), 32 * config.warps
    first = Parameters().pointer("q", offset=problem.q.offset * 2).pointer("k", offset=problem.k.offset * 2)
    first.pointer("sums").i32(problem.tokens, problem.channels)
    second = Parameters().pointer("sums").pointer("v", offset=problem.v.offset * 2)
    second.pointer("out", offset=problem.out.offset * 2).pointer("factors")
    second.i32(problem.tokens, problem.channels, many).f32(*problem.bounds)
    blocks = many * problem.bands, _result_blocks(problem, config, gpu)
    grids = [(n, problem.heads, problem.batch) for n in blocks]
    return (
        _views(first, problem.q, problem.k).launch(
            _recipe(problem, config, gpu, "channel_sums"), "channel_sums", grids[0], threads,
            shared=_sums_bytes(problem, config),
        ),
        _views(second, problem.v, problem.out).launch(
            _recipe(problem, config, gpu, "channel_results"), "channel_results", grids[1], threads,
            shared=_results_bytes(problem, config),
        ),
    )  # fmt: skip


def _resident(config: Config, shared: int, gpu: GpuFacts) -> int:
    """Resident blocks per multiprocessor."""
    return max(1, min(gpu.shared_per_multiprocessor // (shared + 1024), 2048 // (32 * config.warps)))


def _summing(problem: Problem, config: Config, gpu: GpuFacts) -> int:
    """Resident blocks per multiprocessor in the launch that sums up scores, with the scores in registers."""
    registers = min(255, 48 + 3 * problem.rows * problem.filled // 64)
    return max(1, min(_resident(config, _sums_bytes(problem, config), gpu), 65536 // (32 * config.warps * registers)))


def _result_blocks(problem: Problem, config: Config, gpu: GpuFacts) -> int:
    """Blocks of a head in the second launch: one for each WARPS x 16 tokens, or as many as run at once."""
    needed = -(-problem.tokens // (16 * config.warps))
    room = gpu.multiprocessors * _resident(config, _results_bytes(problem, config), gpu)
    rounds = -(-needed // max(1, min(needed, room // (problem.heads * problem.batch))))
    return -(-needed // rounds)


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch, or of two: it ranks configurations. Within 25 % of 12 steps on an H200, except for many
    heads of few tokens in one launch (8.4 us measured, 6.0 predicted)."""
    if config.depth:
        return 4e-6 + (_sums_cycles(problem, config, gpu) + _results_cycles(problem, config, gpu)) / CLOCK
    rounds = -(-problem.tokens // (16 * config.warps))
    blocks = rounds * problem.heads * problem.batch
    resident = _resident(config, shared_bytes(problem, config), gpu)
    waves = math.ceil(blocks / (gpu.multiprocessors * resident))
    products = 16 * config.warps * problem.filled**2 * (rounds + 1) * min(resident, blocks) / RATE
    rows = 30 * problem.filled / config.warps * (1 + config.warps / 8)
    turns = 400 * max(1, rounds - config.slots) + rounds * _narrow_copies(problem)
    return 2e-6 + waves * (1.3 * (products + rows + turns) + 2250) / CLOCK


def _narrow_copies(problem: Problem) -> int:
    """Cycles that a warp waits for a tile of 16 tokens if its copies are smaller than 16 bytes. Eight copies of 2 bytes, or all copies
    of 4 bytes, are in flight at once."""
    if problem.width == 16:
        return 0
    return 1000 * (-(-problem.filled // 16) if problem.width == 2 else 1)


def _in_waves(blocks: int, resident: int, gpu: GpuFacts) -> tuple[int, int]:
    """Number of waves, and number of blocks that share a multiprocessor."""
    return math.ceil(blocks / (gpu.multiprocessors * resident)), min(resident, -(-blocks // gpu.multiprocessors))


def _sums_cycles(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Cycles of the first of two launches."""
    blocks = parts(problem, config) * problem.bands * problem.heads * problem.batch
    waves, together = _in_waves(blocks, _summing(problem, config, gpu), gpu)
    products = config.span * problem.rows * problem.filled / RATE
    loads = 2 * config.span * (min(problem.rows, problem.channels) + problem.channels) / LOADED
    added = 3 * config.warps * problem.rows * problem.filled / 32
    turns = 400 * max(0, config.depth - config.slots) + config.depth * _narrow_copies(problem)
    return waves * (2000 + together * (max(products, loads) + added) + turns)


def _results_cycles(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Cycles of the second of two launches."""
    blocks = _result_blocks(problem, config, gpu)
    rounds = math.ceil(problem.tokens / (16 * config.warps * blocks))
    total = blocks * problem.heads * problem.batch
    waves, together = _in_waves(total, _resident(config, _results_bytes(problem, config), gpu), gpu)
    sums = 4 * parts(problem, config) * part_floats(problem) / LOADED
    rows = 30 * problem.filled / config.warps
    tokens = 16 * config.warps * (4 * problem.channels / LOADED + problem.filled**2 / RATE)
    return waves * (2000 + together * (sums + rounds * tokens) + rows + 400 * rounds)


def candidates(problem: Problem, gpu: GpuFacts) -> list[Config]:
    """The configurations to time, best predicted first. Empty when the kernels cannot run the problem."""
    if refuse(problem) is not None:
        return []
    found: list[Config] = []
    for warps in (4, 8):
        steps = -(-problem.tokens // (16 * warps))
        if problem.bands == 1:
            found += [Config(warps, slots) for slots in range(1, min(4, steps) + 1)]
        depths = [2**n for n in range(steps.bit_length()) if 2**n < steps or problem.bands > 1]
        found += [Config(warps, min(4, depth), depth) for depth in depths]
    found = [c for c in found if shared_bytes(problem, c) <= gpu.shared_per_block]
    return sorted(found, key=lambda c: (estimate(problem, c, gpu), -c.slots))
