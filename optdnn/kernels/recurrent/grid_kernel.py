"""Plans of the persistent recurrent layer over the whole grid (``rnn_grid.cu``): one layer, all directions and steps.

The recurrent weights stay in registers, and blocks exchange the state through global memory. A layer's matrix may therefore be as
large as the registers of the GPU: 2048 units of a plain RNN in both directions, 1024 units of an LSTM.
"""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.launches.plan import GRID

CELLS = ("LSTM", "GRU", "RNN")
WARPS = 8
THREADS = WARPS * 32
ROW_TILES = (1, 2, 4)
MAX_CHUNKS = 16
"""Most tiles of 16 x 32 weights in the registers of a warp."""
MAX_COLUMN_TILES = 8
"""Most tiles of eight batch entries: a thread keeps the states of its units in registers."""
L2_BANDWIDTH = 6e12
EXCHANGE_S = 0.4e-6
"""Seconds from a store to the load in another block that sees it."""


@dataclass(frozen=True)
class Problem:
    """A layer of ``hidden`` units over ``steps`` x ``batch`` products of inputs, in ``directions`` directions.

    ``relu``: the activation of an RNN (else tanh). ``reverse``: the first direction runs from the last step to the first.
    ``bias``: the recurrence has a bias. ``initial``: initial states are given (zeros otherwise).
    """

    cell: str
    steps: int
    batch: int
    hidden: int
    directions: int = 1
    dtype: str = "float16"
    relu: bool = False
    reverse: bool = False
    bias: bool = True
    initial: bool = False

    @property
    def gates(self) -> int:
        """Rows of the matrix per unit in the kernel."""
        return 1 if self.cell == "RNN" else 4

    @property
    def column_tiles(self) -> int:
        """Tiles of eight batch entries."""
        return -(-self.batch // 8)


@dataclass(frozen=True, order=True)
class Config:
    """A block owns ``row_tiles`` times sixteen rows of the matrix."""

    row_tiles: int

    def __str__(self) -> str:
        return f"grid{self.row_tiles}"


def units(problem: Problem, config: Config) -> int:
    """Units of a block."""
    return 16 * config.row_tiles // problem.gates


def blocks(problem: Problem, config: Config) -> int:
    """Blocks of the launch. All of them wait for one another."""
    return problem.directions * problem.hidden // units(problem, config)


def refuse(problem: Problem, config: Config, *, at_once: int) -> str | None:
    """Why the configuration cannot run the problem, or None. ``at_once``: blocks that the device runs at once, one per
    multiprocessor."""
    if problem.hidden % 256 or problem.hidden < 256:
        return f"{problem.hidden} hidden units (a multiple of 256 is needed)"
    if problem.steps < 1 or problem.batch < 1:
        return "nothing to compute"
    if problem.column_tiles > MAX_COLUMN_TILES:
        return f"a batch of {problem.batch} exceeds {8 * MAX_COLUMN_TILES}"
    if problem.hidden // 256 * config.row_tiles > MAX_CHUNKS or problem.hidden % units(problem, config):
        return "the block's part of the matrix does not fit its registers"
    if blocks(problem, config) > at_once:
        return f"its {blocks(problem, config)} blocks cannot run at once"
    if problem.steps * problem.batch * problem.directions * problem.hidden * problem.gates >= 1 << 31:
        return "it has more elements than the kernel can address"
    return None


def shared_bytes(problem: Problem, config: Config) -> int:
    """Bytes of dynamic shared memory of a block: eight columns of the state, and two buffers of partial sums."""
    share = problem.hidden // WARPS * 2
    pitch = share if share % 128 else share + 64
    return WARPS * 8 * pitch + 2 * WARPS * 8 * (16 * config.row_tiles + 4) * 4


def recipe(problem: Problem, config: Config, arch: str) -> Recipe:
    """The kernel's recipe. Steps and the batch are parameters, except the number of the batch's tiles."""
    defines = {
        "CELL": CELLS.index(problem.cell), "RELU": int(problem.relu), "HIDDEN": problem.hidden, "ROW_TILES": config.row_tiles,
        "DIRECTIONS": problem.directions, "REVERSE": int(problem.reverse), "COLUMN_TILES": problem.column_tiles,
        "COLUMNS": min(problem.batch, 8),
        "HAS_BIAS": int(problem.bias), "HAS_INITIAL": int(problem.initial),
    }  # fmt: skip
    generated = {"generated.cuh": render.constants(defines) + "\n"}
    return Recipe("rnn_grid.cu", arch, generated, template_options(problem.dtype))


def exchange_words(problem: Problem) -> int:
    """32-bit words of the two slots in which blocks exchange the state: each pair of units has a tag."""
    return 2 * problem.directions * problem.batch * problem.hidden


def launch(problem: Problem, config: Config, gpu: GpuFacts) -> Launch:
    """The launch. Operands: ``gates`` [steps, batch, directions, gates, hidden], ``weights`` and ``bias`` in the layout of ONNX's R and B,
    ``initial_h`` and ``initial_c`` [directions, batch, hidden], ``output`` [steps, batch, directions, hidden], ``final_h`` and
    ``final_c``; ``exchange`` and ``epoch``, zeros at first and kept from run to run."""
    lstm = problem.cell == "LSTM"
    parameters = Parameters().pointer("gates", "weights", "bias" if problem.bias else None)
    parameters.pointer("initial_h" if problem.initial else None, "initial_c" if problem.initial and lstm else None)
    parameters.pointer("output", "final_h", "final_c" if lstm else None, "exchange", "epoch")
    parameters.i32(problem.steps, problem.batch)
    return parameters.launch(
        recipe(problem, config, gpu.arch), "rnn_grid", blocks(problem, config), THREADS,
        shared=shared_bytes(problem, config), waits=GRID,
    )  # fmt: skip


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds: each step waits for the state of the step before, then multiplies its rows. Fitted to 2 x 2048 units of an RNN:
    1.0 us per step, 2.3 us with a batch of eight."""
    live = min(problem.batch, 8)
    multiply = 2 * config.row_tiles * problem.hidden // 128 * 8 + 300
    read = blocks(problem, config) * live * problem.hidden * 4 / L2_BANDWIDTH
    tile = multiply / device.clock + read
    return 8e-6 + problem.steps * (EXCHANGE_S + problem.column_tiles * tile)


def candidates(problem: Problem, device: GpuFacts) -> list[Config]:
    """The configurations to time, best predicted first. Empty when the kernel cannot run the problem."""
    configs = [Config(n) for n in ROW_TILES]
    found = [c for c in configs if refuse(problem, c, at_once=device.multiprocessors) is None]
    return sorted(found, key=lambda c: estimate(problem, c, device))
