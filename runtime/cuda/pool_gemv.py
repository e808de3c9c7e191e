"""Plans of the mean of an image's pixels and its product with a matrix in one launch (``kernels/pool_gemv.cu``)."""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.runtime.cuda import gemv, render
from optdnn.runtime.cuda.describe import Description, ParameterBlock
from optdnn.runtime.cuda.device import Device
from optdnn.runtime.cuda.nvrtc import Recipe

MAX_IMAGES = 2
"""Each image's blocks read the matrix: of more images, rows that share it are faster."""
LEVEL2 = 5e12  # bytes/s that all multiprocessors read from L2
EXCHANGE = 0.6e-6  # s: means on their way to the peers of a cluster
REGISTERS = 16
"""Vectors of weights that a thread holds while it waits."""


@dataclass(frozen=True)
class Problem:
    """``images`` of ``pixels`` x ``channels`` (a multiple of 8) elements, and ``columns``."""

    images: int
    pixels: int
    channels: int
    columns: int
    epilogue: tuple[render.Stage, ...] = (("bias",),)
    dtype: str = "float16"


@dataclass(frozen=True, order=True)
class Config:
    """``columns`` columns and ``warps`` warps of a block; ``cluster``: blocks that sum an image's channels together."""

    columns: int
    warps: int
    cluster: int

    def __str__(self) -> str:
        return f"pool{self.columns}w{self.warps}c{self.cluster}"


def refuse(problem: Problem, config: Config) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if not 1 <= problem.images <= MAX_IMAGES:
        return f"it is for up to {MAX_IMAGES} images, not {problem.images}"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"its operands are 16-bit floats, not {problem.dtype}"
    if problem.channels % 8:
        return f"16-byte loads need a multiple of 8 channels, not {problem.channels}"
    if render.uses_residual(problem.epilogue):
        return "it adds no other tensor"
    threads, vectors = config.warps * 32, problem.channels // 8
    if config.cluster not in (2, 4, 8) or not 1 <= config.warps <= 16 or config.columns > threads:
        return "not a tile of this kernel"
    share = -(-vectors // config.cluster)
    if 2 * share > threads:
        return f"{share} vectors of channels are more than the threads of a block can send"
    if -(-vectors // threads) * config.columns > REGISTERS:
        return "the weights of its columns do not fit a thread's registers"
    if shared_bytes(problem, config) > 48 << 10:
        return "its sums do not fit static shared memory"
    return None


def shared_bytes(problem: Problem, config: Config) -> int:
    """Static shared memory of a block."""
    threads = config.warps * 32
    share = -(-problem.channels // 8 // config.cluster)
    return (threads // share * share * 8 + problem.channels + config.warps * config.columns) * 4 + 8


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile; columns and pitches are parameters."""
    defines = {
        "CHANNELS": problem.channels, "PIXELS": problem.pixels, "COLUMNS": config.columns, "WARPS": config.warps,
        "CLUSTER": config.cluster,
    }  # fmt: skip
    text = "\n".join([render.constants(defines), render.epilogue(problem.epilogue), ""])
    options = ("--std=c++17", "--use_fast_math", *(("-DDTYPE_BF16",) if problem.dtype == "bfloat16" else ()))
    return Recipe("pool_gemv.cu", arch, {"generated.cuh": text}, options)


def describe(problem: Problem, config: Config, image_pitch: int, pixel_pitch: int, out_pitch: int) -> Description:
    """The launch; pitches count elements. Operands: ``x``, ``weights`` (``[columns, channels]``), ``bias`` (fp32), ``output``."""
    block = ParameterBlock().pointer("x").pointer("weights").pointer("bias").pointer("output")
    block.i64(image_pitch).i32(pixel_pitch, problem.columns, out_pitch)
    blocks = -(-problem.columns // config.columns)
    grid = (-(-blocks // config.cluster) * config.cluster, problem.images, 1)
    return block.describe("pool_gemv", grid, config.warps * 32, cluster=config.cluster)


def estimate(problem: Problem, config: Config, device: Device) -> float:
    """Predicted seconds of one dependent launch."""
    blocks = -(-problem.columns // config.columns)
    clusters = -(-blocks // config.cluster)
    image = problem.pixels * problem.channels * 2
    threads = config.warps * 32
    share = -(-problem.channels // 8 // config.cluster)
    loads = -(-problem.pixels // max(1, threads // share))
    waves = -(-clusters * config.cluster * problem.images // (device.multiprocessors * max(1, 2048 // threads // 2)))
    reading = max(image * clusters * problem.images / LEVEL2, -(-loads // 8) * 0.6e-6)
    weights = problem.columns * problem.channels * 2 / gemv.MEMORY
    products = config.columns * -(-problem.channels // 8 // threads) * 12 / 1.75e9 * config.warps / 4
    return 1.2e-6 + waves * (reading + EXCHANGE + products + config.columns * 8e-9) + weights


def candidates(problem: Problem, device: Device, limit: int = 8) -> list[Config]:
    """The configurations to time, best predicted first."""
    found = [Config(c, w, n) for c in (2, 4, 6, 8, 12, 16) for w in (4, 8, 16) for n in (4, 8)]
    fitting = [c for c in found if refuse(problem, c) is None]
    return sorted(fitting, key=lambda c: (estimate(problem, c, device), c))[:limit]
