"""Plans of recurrent layers with weights that stay in registers (``rnn_resident.cu``): one layer, all directions and steps.

One block holds the recurrent matrix of a small layer. Several blocks share a larger matrix and exchange the state through L2. Any number
of hidden units, any activations, fp32 and 16-bit floats.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from optdnn.kernels.launch import GENERAL, Launch, Parameters
from optdnn.ops.rnn import GATES
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.launches.plan import GRID, NOTHING

CELLS = ("LSTM", "GRU", "RNN")
LANES = (1, 2, 4, 8, 16, 32)
COLUMNS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
REGISTERS = 65536
"""Registers of a multiprocessor."""
MOST_ROUNDS = 4
L2_BANDWIDTH = 6e12
EXCHANGE_S = 0.5e-6
"""Seconds from a store to the load in another block that sees it."""
FETCH_CYCLES = 650
"""Latency of loading the products of a step's inputs: the least time of a step."""


@dataclass(frozen=True)
class Problem:
    """A layer of ``hidden`` units over ``steps`` x ``batch`` vectors of ``inputs`` elements, in ``directions`` directions.

    ``dtype``: type of weights and results. ``wide_gates``: the products of the inputs are fp32. ``functions``: C++ functions of the
    activations. ``reverse``: the first direction runs from the last step to the first. ``bias``: the recurrence has a bias.
    ``reset_first``: a GRU's reset gate comes before the product. ``coupled``: an LSTM's forget gate is one minus its input gate.
    """

    cell: str
    steps: int
    batch: int
    inputs: int
    hidden: int
    directions: int = 1
    dtype: str = "float16"
    wide_gates: bool = True
    functions: str = ""
    reverse: bool = False
    bias: bool = True
    peepholes: bool = False
    lengths: bool = False
    initial: bool = False
    reset_first: bool = False
    coupled: bool = False

    @property
    def gates(self) -> int:
        """Rows of the matrix per unit."""
        return GATES[self.cell]


@dataclass(frozen=True, order=True)
class Config:
    """``parts`` blocks share the units, and ``lanes`` threads share a unit. A block takes ``columns`` entries of the batch."""

    parts: int
    columns: int
    lanes: int

    def __str__(self) -> str:
        return f"resident{self.parts}x{self.columns}l{self.lanes}"


def units(problem: Problem, config: Config) -> int:
    """Units of a block; the last block may have fewer."""
    return -(-problem.hidden // config.parts)


def threads(problem: Problem, config: Config) -> int:
    """Threads of a block."""
    return -(-units(problem, config) * config.lanes // 32) * 32


def groups(problem: Problem, config: Config) -> int:
    """Number of parts of the batch."""
    return -(-problem.batch // config.columns)


def items(problem: Problem, config: Config) -> int:
    """Number of items: directions times parts of the batch."""
    return problem.directions * groups(problem, config)


def blocks(problem: Problem, config: Config, gpu: GpuFacts) -> int:
    """Blocks of the launch. If they wait for one another, no more than can run at once."""
    count = items(problem, config)
    return count if config.parts == 1 else config.parts * min(count, gpu.multiprocessors // config.parts)


def slices(problem: Problem, config: Config) -> int:
    """Groups of four weights per gate that a lane holds."""
    return -(-problem.hidden // (4 * config.lanes))


def rounds(config: Config) -> int:
    """Number of batch entries for which a lane computes cells."""
    return -(-config.columns // config.lanes)


def registers(problem: Problem, config: Config) -> int:
    """Registers that a thread needs for its weights, its batch entries, and the values of a step."""
    weights = 4 * problem.gates * slices(problem, config)
    return weights + (rounds(config) - 1) * (problem.gates + 20) + 5 * problem.gates + 48


def shared_bytes(problem: Problem, config: Config) -> int:
    """Bytes of dynamic shared memory of a block: the states (two buffers if blocks do not exchange them), and a GRU's states times its
    reset gates."""
    pitch = 4 * config.lanes * slices(problem, config)
    buffers = (2 if config.parts == 1 else 1) + problem.reset_first
    return buffers * config.columns * pitch * 4


def refuse(problem: Problem, config: Config, gpu: GpuFacts) -> str | None:
    """Why the configuration cannot run the problem on this GPU, or None."""
    if problem.steps < 1 or problem.batch < 1 or problem.hidden < 1:
        return "nothing to compute"
    block = threads(problem, config)
    most = min(
        255, REGISTERS // (-(-block // 128) * 128) // 8 * 8
    )  # each of a multiprocessor's four partitions has a quarter of the registers
    if block > 1024 or registers(problem, config) > most:
        return f"the weights of {problem.hidden} hidden units do not fit the registers of {config.parts} blocks"
    if rounds(config) > MOST_ROUNDS or (config.columns > 1 and config.columns >= 2 * problem.batch):
        return f"its batch of {problem.batch} does not suit {config.columns} entries per block"
    if shared_bytes(problem, config) > gpu.shared_per_block:
        return f"the states of {config.columns} entries do not fit the shared memory of a block"
    if (config.parts - 1) * units(
        problem, config
    ) >= problem.hidden:  # no block waits for an empty one: tags would advance before it starts
        return f"one of {config.parts} blocks would have none of {problem.hidden} hidden units"
    if config.parts > gpu.multiprocessors:
        return f"its {config.parts} blocks cannot run at once"
    return None


def exchange_pairs(problem: Problem, config: Config) -> int:
    """Number of (value, tag) pairs in the two slots through which blocks exchange states; 0 if one block holds all units."""
    kinds = 2 if problem.reset_first else 1
    return 2 * kinds * problem.directions * problem.batch * problem.hidden if config.parts > 1 else 0


def recipe(problem: Problem, config: Config, arch: str) -> Recipe:
    """The kernel's recipe. Steps and the batch are parameters."""
    defines = {
        "CELL": CELLS.index(problem.cell), "HIDDEN": problem.hidden, "DIRECTIONS": problem.directions,
        "REVERSE": int(problem.reverse), "UNITS": units(problem, config), "PARTS": config.parts, "LANES": config.lanes,
        "COLUMNS": config.columns, "THREADS": threads(problem, config), "WIDE": int(problem.dtype == "float32"),
        "BFLOAT": int(problem.dtype == "bfloat16"), "WIDE_GATES": int(problem.wide_gates), "HAS_BIAS": int(problem.bias),
        "HAS_PEEPHOLES": int(problem.peepholes), "HAS_LENGTHS": int(problem.lengths), "HAS_INITIAL": int(problem.initial),
        "COUPLED": int(problem.coupled), "RESET_FIRST": int(problem.reset_first),
    }  # fmt: skip
    text = f"{render.constants(defines)}\n{problem.functions}\n"
    return Recipe("rnn_resident.cu", arch, {"generated.cuh": text}, GENERAL)


def launch(problem: Problem, config: Config, gpu: GpuFacts) -> Launch:
    """The launch. Operands: ``gates`` [steps, batch, directions, gates, hidden]; ``weights``, ``bias`` and ``peepholes`` in the layout of
    ONNX's R, B and P; ``lengths`` [batch]; ``initial_h`` and ``initial_c`` [directions, batch, hidden]; ``output`` [steps, batch,
    directions, hidden], ``final_h`` and ``final_c``. If several blocks share the units: ``exchange`` and ``epoch``, zeros at first and kept
    from run to run."""
    lstm, shared = problem.cell == "LSTM", config.parts > 1
    parameters = Parameters().pointer("gates", "weights", "bias" if problem.bias else None)
    parameters.pointer("peepholes" if problem.peepholes else None, "lengths" if problem.lengths else None)
    parameters.pointer("initial_h" if problem.initial else None, "initial_c" if problem.initial and lstm else None)
    parameters.pointer("output", "final_h", "final_c" if lstm else None)
    parameters.pointer("exchange" if shared else None, "epoch" if shared else None)
    parameters.i32(problem.steps, problem.batch)
    return parameters.launch(
        recipe(problem, config, gpu.arch), "rnn_resident", blocks(problem, config, gpu), threads(problem, config),
        shared=shared_bytes(problem, config), waits=GRID if shared else NOTHING,
    )  # fmt: skip


def _product_seconds(problem: Problem, device: GpuFacts) -> float:
    """Predicted seconds of the product of all inputs."""
    rows = problem.directions * problem.gates * problem.hidden
    flops = 2 * problem.steps * problem.batch * problem.inputs * rows
    per_clock = device.matrix_ops // 4
    if problem.wide_gates:  # fp32 on tensor cores is three products
        per_clock = per_clock // 3 if device.hopper and problem.dtype == "float32" else device.lanes
    rate = device.multiprocessors * device.clock * per_clock
    return 3e-6 + flops / rate


def _step_cycles(problem: Problem, config: Config, resident: int) -> float:
    """Predicted cycles of a step with ``resident`` blocks per multiprocessor."""
    columns = min(config.columns, problem.batch)
    folds = config.lanes.bit_length() - 1
    warps = -(-threads(problem, config) * resident // 128)  # per partition of the multiprocessor
    one = slices(problem, config) * (4 * problem.gates + 4) + 2 * problem.gates * folds
    product = max(columns * warps * one, columns * 16 * slices(problem, config)) + 40 + 30 * folds
    cells = min(rounds(config), columns) * warps * 40 + (220 if problem.dtype != "float32" else 400)
    extra = 300 if problem.reset_first else 0
    busy = product + cells + extra + 80
    return max(busy, FETCH_CYCLES) + busy / 8


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds: the product of the inputs, then dependent steps, in waves of blocks."""
    per = max(
        1, min(2048 // threads(problem, config), REGISTERS // threads(problem, config) // registers(problem, config))
    )
    count = blocks(problem, config, device)
    resident = min(per, -(-count // device.multiprocessors)) if config.parts == 1 else 1
    waves = -(-items(problem, config) * config.parts // (min(count, device.multiprocessors * resident)))
    step = _step_cycles(problem, config, resident) / device.clock
    if config.parts > 1:
        read = count * min(config.columns, problem.batch) * problem.hidden * 8 / L2_BANDWIDTH
        step += (2 if problem.reset_first else 1) * (EXCHANGE_S + read)
    load = 8 * 4 * problem.gates * slices(problem, config) / device.clock
    start = (8e-6 if config.parts > 1 else 4e-6) + load
    return start + waves * problem.steps * step + _product_seconds(problem, device)


def candidates(problem: Problem, device: GpuFacts, limit: int = 6) -> list[Config]:
    """The configurations to time, best predicted first. Empty when the kernel cannot run the problem."""
    shares = {
        -(-problem.hidden // n): n for n in range(device.multiprocessors, 0, -1)
    }  # fewest parts for each number of units per block
    found = [
        config
        for config in itertools.starmap(Config, itertools.product(shares.values(), COLUMNS, LANES))
        if refuse(problem, config, device) is None
    ]
    return sorted(found, key=lambda c: (estimate(problem, c, device), c))[:limit]
