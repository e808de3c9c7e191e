"""Plans of norms of rows some of whose tensors lie transposed (``rows_across.cu``): LayerNorm and RMSNorm of [images, rows, length]."""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.kernels.norm.rows_kernel import MEMORY
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

OPERATIONS = ("layer_norm", "rms_norm")
LANES = 8
"""Elements of an access, 16 bytes."""
MOST_VECTORS = 6
"""Accesses of a lane that a row takes: bounds its registers, and the tile in shared memory."""
LAUNCH_S, ROUND_S = 1.6e-6, 0.5e-6
"""Seconds of a launch after another one, and of a row that a warp takes after another one."""
NEAR = 3.5e12
"""Bytes per second of what the last launch left in L2, in pieces of 32 bytes."""


@dataclass(frozen=True)
class Problem:
    """``images`` times ``rows`` rows of ``length`` 16-bit elements.

    ``add``: an addend that lies across is added first, and the sum is also an output, in rows. ``turned``: the input itself lies across,
    and there is no addend. ``across``: the normalized result lies across. The strides are elements from an image, and from a column, to
    the next, of what is read across and of the result.
    """

    operation: str
    images: int
    rows: int
    length: int
    dtype: str = "float16"
    add: bool = False
    across: bool = False
    scale: bool = True
    bias: bool = True
    epsilon: float = 1e-5
    turned: bool = False
    addend_at: tuple[int, int] = (0, 0)
    output_at: tuple[int, int] = (0, 0)

    @property
    def bytes(self) -> int:
        """Least global traffic: each tensor once."""
        return 2 * self.images * self.rows * self.length * (4 if self.add else 2) + 8 * self.length


@dataclass(frozen=True, order=True)
class Config:
    """``rows`` of an image for a block of ``threads``."""

    rows: int
    threads: int

    def __str__(self) -> str:
        return f"across{self.rows}t{self.threads}"

    def tiles(self, problem: Problem) -> int:
        """Blocks of an image."""
        return -(-problem.rows // self.rows)

    def blocks(self, problem: Problem) -> int:
        """Blocks of the grid."""
        return problem.images * self.tiles(problem)

    def shared_bytes(self, problem: Problem) -> int:
        """The tile, whose rows have a gap against bank conflicts."""
        return 2 * self.rows * (problem.length + LANES)


def refuse(problem: Problem, config: Config, shared: int) -> str | None:
    """Why the configuration cannot run the problem, or None. ``shared``: bytes that a block may have."""
    if problem.operation not in OPERATIONS:
        return f"no operation {problem.operation!r}"
    if not problem.add and not problem.across and not problem.turned:
        return "no operand is transposed"
    if min(problem.images, problem.rows, problem.length) < 1 or problem.images * problem.rows >= 1 << 31:
        return "no rows, or more rows than the kernel can count"
    if problem.length % LANES or problem.length > MOST_VECTORS * 32 * LANES:
        return f"rows of {problem.length} elements are not up to {MOST_VECTORS * 32} vectors of {LANES}"
    reads = problem.add or problem.turned
    used = [at for at, there in ((problem.addend_at, reads), (problem.output_at, problem.across)) if there]
    if any(step % LANES or step < 1 for at in used for step in at):
        return "columns do not begin at multiples of 16 bytes"
    if config.rows not in (8, 16, 32) or config.threads not in (128, 256, 512) or config.rows * 32 % config.threads:
        return f"{config.threads} threads do not share {config.rows} rows"
    if (needed := config.shared_bytes(problem)) > shared:
        return f"{needed} bytes of shared memory exceed {shared}"
    return None


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile. The sizes are parameters."""
    defines = {
        "OPERATION": OPERATIONS.index(problem.operation), "VECTORS": -(-problem.length // (32 * LANES)), "ROWS": config.rows,
        "THREADS": config.threads, "HAS_ADD": int(problem.add), "INPUT_ACROSS": int(problem.turned), "OUTPUT_ACROSS": int(problem.across),
        "HAS_SCALE": int(problem.scale), "HAS_BIAS": int(problem.bias),
    }  # fmt: skip
    text = render.constants(defines) + "\n"
    return Recipe("rows_across.cu", arch, {"generated.cuh": text}, template_options(problem.dtype))


def launch(problem: Problem, config: Config, gpu: GpuFacts) -> Launch:
    """The launch. Operands: ``input``, ``addend``, ``scale`` and ``bias`` (fp32 [length]), ``output``, ``sum``."""
    rows, across = (None, "input") if problem.turned else ("input", "addend" if problem.add else None)
    present = {"scale": problem.scale, "bias": problem.bias, "output": True, "sum": problem.add}
    parameters = Parameters().pointer(rows, across, *(name if there else None for name, there in present.items()))
    parameters.i32(problem.rows, problem.length, config.tiles(problem)).f32(problem.epsilon, 1.0 / problem.length)
    parameters.i64(*problem.addend_at, *problem.output_at)
    made = recipe(problem, config, gpu.arch)
    return parameters.launch(
        made, "rows_across", config.blocks(problem), config.threads, shared=config.shared_bytes(problem)
    )


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch."""
    room = min(2048 // config.threads, gpu.shared_per_multiprocessor // (config.shared_bytes(problem) + 1024))
    waves = -(-config.blocks(problem) // (max(1, room) * gpu.multiprocessors))
    rounds = config.rows * 32 // config.threads
    turned = config.rows * problem.length / config.threads * 2e-10  # a thread's way through shared memory
    latency = waves * (rounds * ROUND_S + turned + (0.8e-6 if problem.add or problem.turned else 0.0))
    pieces = min(1.0, 2 * config.rows / 32)  # less than a sector of 32 bytes is read or written as one
    memory = problem.bytes / pieces / (NEAR if problem.bytes < gpu.l2_bytes else MEMORY)
    return LAUNCH_S + max(latency, memory) + 0.3 * min(latency, memory)


def candidates(problem: Problem, gpu: GpuFacts) -> list[Config]:
    """The configurations to time, best predicted first. Empty when a row is too long."""
    found = [Config(rows, threads) for rows in (8, 16, 32) for threads in (128, 256, 512)]
    able = [c for c in found if refuse(problem, c, gpu.shared_per_block) is None]
    return sorted(able, key=lambda c: (estimate(problem, c, gpu), c))
