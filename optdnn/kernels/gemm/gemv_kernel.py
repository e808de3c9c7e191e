"""Plans of the product of a few rows with a matrix (``gemv.cu``): one to four rows, bound by reading the matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.kernels.problem import WithEpilogue
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

MAX_ROWS = 4
MEMORY = 4.2e12  # bytes/s
PASSING = 32 << 20
"""Bytes from which on a matrix would fill half of L2. Its loads then evict first, to keep in L2 the tensors that fit."""
BLOCK_S = 2.2e-6
"""Seconds of a block, however short its columns: of rows that each have a matrix there are many."""
DEEP = 1 << 14
"""Elements of a column beyond which a block has two columns instead of four. Such blocks take long. 1,024 of them, eight on some
multiprocessors and seven on others, leave memory idle at the end (VGG-16, batch 1, on an H200 in turns: 169.5 us, 166.7
with 2,048)."""


@dataclass(frozen=True)
class Problem(WithEpilogue):
    """``rows`` rows of ``depth`` elements times ``columns`` columns; ``wide``: the result is fp32. Pitches count elements.

    ``norm``: the rows are normalized first (RMSNormalization). ``beside``: stages of a second product, whose result the
    epilogue reads. ``selected``: the number of products of ``rows``, each with a matrix that an index selects; 0 if there is one matrix.
    """

    rows: int
    columns: int
    depth: int
    epilogue: tuple[render.Stage, ...] = (("bias",),)
    dtype: str = "float16"
    wide: bool = False
    norm: bool = False
    beside: tuple[render.Stage, ...] | None = None
    selected: int = 0


@dataclass(frozen=True, order=True)
class Config:
    """A block has ``columns`` columns, and ``warps`` warps share their depth. ``ahead``: loads per column that a lane has in
    flight."""

    columns: int
    warps: int
    ahead: int

    def __str__(self) -> str:
        return f"gemv{self.columns}w{self.warps}a{self.ahead}"


def refuse(problem: Problem, config: Config) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if not 1 <= problem.rows <= MAX_ROWS:
        return f"it is for up to {MAX_ROWS} rows, not {problem.rows}"
    if problem.depth % 8:
        return f"16-byte loads need a depth that is a multiple of 8, not {problem.depth}"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"the kernel takes 16-bit floats, not {problem.dtype}"
    if (
        config.columns * problem.matrices * config.ahead > 16
        or config.columns * problem.rows > 32 * config.warps
        or config.warps > 16
    ):
        return "not a tile of this kernel"
    return None


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile. All sizes except the rows are parameters."""
    defines = {
        "ROWS": problem.rows, "COLUMNS": config.columns, "WARPS": config.warps, "DEPTH": config.ahead,
        "PASSING": int(problem.matrices * problem.columns * problem.depth * 2 >= PASSING), "HAS_RESIDUAL": int(problem.residual),
        "RESULT_FLOAT": int(problem.wide), "NORM": int(problem.norm), "PAIRED": problem.matrices - 1,
    }  # fmt: skip
    defines |= {"SELECTED": 1} if problem.selected else {}
    beside = [] if problem.beside is None else [render.epilogue(problem.beside, "epilogue_beside")]
    text = "\n".join([render.constants(defines), render.epilogue(problem.epilogue), *beside, ""])
    return Recipe("gemv.cu", arch, {"generated.cuh": text}, template_options(problem.dtype))


def launch(
    problem: Problem,
    config: Config,
    gpu: GpuFacts,
    x_pitch: int,
    out_pitch: int,
    *,
    epsilon: float = 0.0,
    stack: int = 0,
    times: int = 1,
) -> Launch:
    """The launch. Operands: ``x``, ``weights`` (``[columns, depth]``), ``bias`` (fp32 ``[columns]``), ``residual``, ``output``;
    ``beside`` and ``beside_bias`` of a second product; ``scale`` (fp32 ``[depth]``) of a norm. With selected matrices: ``weights``
    (``[stack, columns, depth]``) and ``index`` (int64 ``[selected]``), and no bias; ``times`` neighboring ones read one row of ``x``."""
    bias = None if problem.selected else "bias"
    parameters = Parameters().pointer("x", "weights", bias, "residual" if problem.residual else None, "output")
    parameters.pointer(*(("beside", "beside_bias") if problem.matrices > 1 else (None, None)))
    parameters.pointer("scale" if problem.norm else None)
    parameters.i32(problem.columns, problem.depth, x_pitch, out_pitch).f32(epsilon)
    blocks = -(-problem.columns // config.columns)
    if problem.selected:
        parameters.pointer("index").i64(stack).i32(times)
    grid = (blocks, problem.selected, 1) if problem.selected else blocks
    return parameters.launch(recipe(problem, config, gpu.arch), "gemv", grid, config.warps * 32)


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch: the matrix at the bandwidth that the loads in flight allow, and latency."""
    matrices = problem.matrices * max(1, problem.selected)
    blocks = -(-problem.columns // config.columns) * max(1, problem.selected)
    resident = max(1, min(2048 // (config.warps * 32), 32))
    waves = -(-blocks // (device.multiprocessors * resident))
    busy = min(blocks, device.multiprocessors * resident) / waves if waves == 1 else device.multiprocessors * resident
    steps = -(-problem.depth // (config.warps * 256))
    in_flight = busy * config.warps * 32 * config.columns * problem.matrices * min(config.ahead, steps) * 16
    rate = min(MEMORY, in_flight / 1.3e-6)
    uneven = (
        -(-blocks // device.multiprocessors) * device.multiprocessors / blocks
        if blocks < 4 * device.multiprocessors
        else 1.0
    )
    # Every block reads the rows, from L1 or L2: on an H200, 4096 columns of depth 25088 take as long in blocks of 1 as of 8.
    rows = blocks * problem.rows * problem.depth * 2 / 400e12
    read = matrices * problem.columns * problem.depth * 2 * min(uneven, 2.0) / rate + rows
    return 1.4e-6 + max(read, waves * BLOCK_S if problem.selected else 0.0)


def candidates(problem: Problem, device: GpuFacts, limit: int = 6) -> list[Config]:
    """The configurations to time, best predicted first.

    Among predictions within 2 %, eight warps on four columns, counted over all matrices, come first: with four columns, decoders of
    2,048 and 4,096 columns took 0.5 to 6.5 % less time on an H200 than with two. Beyond a depth of :data:`DEEP`, two
    columns come first."""
    found = [Config(c, w, a) for c in (1, 2, 4, 8) for w in (2, 4, 8) for a in (1, 2, 4, 8)]
    fitting = [c for c in found if refuse(problem, c) is None]

    def rank(c: Config) -> tuple[int, int, int, int]:
        return (
            round(50 * math.log(estimate(problem, c, device))),
            -c.warps,
            abs(c.columns * problem.matrices - (2 if problem.depth > DEEP else 4)),
            c.ahead,
        )

    return sorted(fitting, key=rank)[:limit]
