"""Plans of attention between channels (``attention_channels.cu``): mma.sync, every GPU from sm_80 on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.kernels.attention.hopper_kernel import HeadView
from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

MOST_CHANNELS = 64
"""Most channels of a head: the scores of all of them lie in a warp's registers."""
MOST_TOKENS = 1024
"""Most tokens: each block of a head sums over all of them. An assumption, not measured."""
RATE = 512
"""Multiply-adds of 16 bits that mma.sync does per cycle and multiprocessor, at least."""
CLOCK = 1.4e9


@dataclass(frozen=True)
class Problem:
    """``batch`` x ``heads`` attentions between ``channels`` over ``tokens``.

    Views: a position is a token, and its channels are contiguous. ``least``: the least norms of queries and keys that are divided by;
    None: they are not normalized. ``unit``: elements that the operands begin at multiples of.
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

    @property
    def filled(self) -> int:
        """Channels as the kernel computes them."""
        return -(-self.channels // 16) * 16

    @property
    def width(self) -> int:
        """Bytes of a copy."""
        views = (self.q, self.k, self.v)
        numbers = [n for v in views for n in (v.batch, v.head, v.position, v.offset)]
        return 16 if math.gcd(self.channels, self.unit, *numbers) % 8 == 0 else 4


@dataclass(frozen=True, order=True)
class Config:
    """``warps`` of a block, each with a ring of ``slots`` sixteens of tokens."""

    warps: int
    slots: int

    def __str__(self) -> str:
        return f"channels{self.warps}s{self.slots}"


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block: values, weights, squares; rings, or the sums in their place."""
    channels, warps = problem.filled, config.warps
    row = (channels + 8) * 2
    rings = max(warps * config.slots * 2 * 16 * row, warps * channels * row * 2)
    return warps * 16 * row + channels * row + warps * 2 * channels * 4 + rings


def refuse(problem: Problem) -> str | None:
    """Why the kernel cannot run the problem, or None."""
    if problem.channels % 2 or not 2 <= problem.channels <= MOST_CHANNELS:
        return f"heads of {problem.channels} channels (an even number up to {MOST_CHANNELS} is needed)"
    if not 0 < problem.tokens <= MOST_TOKENS:
        return f"{problem.tokens} tokens (up to {MOST_TOKENS} are worth to be summed up by each block)"
    for name, view in (("q", problem.q), ("k", problem.k), ("v", problem.v), ("out", problem.out)):
        if any(x % 2 or x < 0 for x in (view.batch, view.head, view.position, view.offset)):
            return f"{name}: pairs of elements are copied: strides and offsets must be even"
        if view.position >= 1 << 31:
            return f"{name}: positions are {view.position} elements apart"
    if problem.heads > 65535 or problem.batch > 65535:
        return "the grid is too large"
    return None


def launch(problem: Problem, config: Config, gpu: GpuFacts) -> Launch:
    """The launch. Operands: ``q``, ``k``, ``v``, ``out``, ``factors`` (fp32 [heads])."""
    defines = {
        "WARPS": config.warps, "CHANNELS": problem.filled, "SLOTS": config.slots, "WIDTH": problem.width,
        "NORMALIZE": int(problem.least is not None),
    }  # fmt: skip
    text = "\n".join([render.constants(defines), render.mma(problem.dtype), ""])
    recipe = Recipe("attention_channels.cu", gpu.arch, {"generated.cuh": text}, template_options(problem.dtype))
    views = {"q": problem.q, "k": problem.k, "v": problem.v, "out": problem.out}
    parameters = Parameters()
    for name, view in views.items():
        parameters.pointer(name, offset=view.offset * 2)
    parameters.pointer("factors")
    parameters.i32(problem.tokens, problem.channels).f32(*(problem.least or (0.0, 0.0)))
    for view in views.values():
        parameters.i64(view.batch, view.head).i32(view.position)
    grid = (-(-problem.tokens // (16 * config.warps)), problem.heads, problem.batch)
    return parameters.launch(
        recipe, "attention_channels", grid, 32 * config.warps, shared=shared_bytes(problem, config)
    )


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch: it ranks configurations. Not fitted to measurements."""
    rounds = -(-problem.tokens // (16 * config.warps))
    blocks = rounds * problem.heads * problem.batch
    resident = max(
        1, min(gpu.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024), 2048 // (32 * config.warps))
    )
    waves = math.ceil(blocks / (gpu.multiprocessors * resident))
    products = 16 * config.warps * problem.filled**2 * (rounds + 1) * min(resident, blocks) / RATE
    rows = 30 * problem.filled / config.warps * (1 + config.warps / 8)
    return 2e-6 + waves * (products + rows + 400 * max(1, rounds - config.slots) + 2000) / CLOCK


def candidates(problem: Problem, gpu: GpuFacts) -> list[Config]:
    """The configurations to time, best predicted first. Empty when the kernel cannot run the problem."""
    if refuse(problem) is not None:
        return []
    found: list[Config] = []
    for warps in (4, 8):
        steps = -(-problem.tokens // (16 * warps))
        for slots in range(1, min(4, steps) + 1):
            config = Config(warps, slots)
            if shared_bytes(problem, config) <= gpu.shared_per_block:
                found.append(config)
    return sorted(found, key=lambda c: (estimate(problem, c, gpu), -c.slots))
