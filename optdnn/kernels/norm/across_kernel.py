"""Plans of norms of rows with transposed tensors (``rows_across.cu``): LayerNorm and RMSNorm of [images, rows, length]."""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

OPERATIONS = ("layer_norm", "rms_norm")
LANES = 8
"""Elements of an access, 16 bytes."""
MOST_VECTORS = 6
"""Most accesses of a lane per row: bounds the lane's registers and the tile in shared memory."""
LAUNCH_S, ROUND_S = 1.6e-6, 0.5e-6
"""Seconds of a dependent launch, and of each further row of a warp."""
NEAR, MEMORY = 3.5e12, 4.2e12
"""Bytes per second in pieces of 32 bytes: from L2, of data that the last launch left there, and from memory."""


@dataclass(frozen=True)
class Problem:
    """``images`` times ``rows`` rows of ``length`` 16-bit elements.

    ``add``: a transposed addend is added first, and the sum is also an output, in rows. ``turned``: the input itself is transposed, and
    there is no addend. ``across``: the normalized result is transposed. ``addend_at`` (addend or transposed input) and ``output_at``:
    elements from an image to the next, and from a column to the next.
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
    """A block of ``threads`` threads normalizes ``rows`` rows of an image."""

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
        """Bytes of the tile. Its rows are padded against bank conflicts."""
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
        return f"rows of {problem.length} elements are not 1 to {MOST_VECTORS * 32} vectors of {LANES}"
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
    """The kernel's recipe. The sizes are parameters."""
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
    turned = config.rows * problem.length / config.threads * 2e-10  # the transposition through shared memory
    latency = waves * (rounds * ROUND_S + turned + (0.8e-6 if problem.add or problem.turned else 0.0))
    pieces = min(1.0, 2 * config.rows / 32)  # an access of less than a 32-byte sector costs a whole sector
    memory = problem.bytes / pieces / (NEAR if problem.bytes < gpu.l2_bytes else MEMORY)
    return LAUNCH_S + max(latency, memory) + 0.3 * min(latency, memory)


def candidates(problem: Problem, gpu: GpuFacts) -> list[Config]:
    """The configurations to time, best predicted first. Empty when a row is too long."""
    found = [Config(rows, threads) for rows in (8, 16, 32) for threads in (128, 256, 512)]
    able = [c for c in found if refuse(problem, c, gpu.shared_per_block) is None]
    return sorted(able, key=lambda c: (estimate(problem, c, gpu), c))
