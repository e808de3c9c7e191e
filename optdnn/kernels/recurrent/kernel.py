"""Plans of the persistent LSTM and GRU (``rnn_sm90.cu``): all layers and time steps in one launch.

A cluster has ``hidden / 32`` blocks. In each layer, one cluster multiplies the inputs, and one cluster per part of the batch computes
the recurrence. Weights stay in registers. Gates are in ONNX's order (LSTM: input, output, forget, cell; GRU: update, reset, hidden,
with ``linear_before_reset``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.reference.packed_rnn import pack_matrix
from optdnn.types import Array

CELLS = ("lstm", "gru")
CLOCK = 1.75e9
THREADS = 384
INPUT_STAGES = 3
MAX_BATCH = 32
VECTOR = 8
"""Elements of a row of inputs that a thread loads at once."""


@dataclass(frozen=True)
class Problem:
    """``layers`` stacked one-directional recurrent layers over [steps, batch, inputs] (16-bit) with ``hidden`` units each.

    ``initial``: initial states are given (zeros otherwise). ``reverse``: all layers run from the last step to the first.
    """

    cell: str
    steps: int
    batch: int
    inputs: int
    hidden: int
    layers: int = 1
    dtype: str = "float16"
    initial: bool = False
    reverse: bool = False

    @property
    def ranks(self) -> int:
        """Blocks of a cluster."""
        return self.hidden // 32


@dataclass(frozen=True, order=True)
class Config:
    """A cluster of the recurrence takes ``columns`` (a multiple of 8) entries of the batch."""

    columns: int

    def __str__(self) -> str:
        return f"rnn{self.columns}"


def groups(problem: Problem, config: Config) -> int:
    """Number of parts of the batch."""
    return -(-problem.batch // config.columns)


def clusters(problem: Problem, config: Config) -> int:
    """Clusters of the launch."""
    return problem.layers * (1 + groups(problem, config))


def refuse(problem: Problem, config: Config, *, most_clusters: int = 7) -> str | None:
    """Why the configuration cannot run the problem, or None. ``most_clusters``: clusters of 16 blocks that run at once on the device."""
    if problem.cell not in CELLS:
        return f"no cell {problem.cell!r}"
    if problem.hidden % 32 or not 32 <= problem.hidden <= 512:
        return f"{problem.hidden} hidden units do not fit a cluster (a multiple of 32 up to 512 is needed)"
    if problem.inputs % VECTOR or not VECTOR <= problem.inputs <= 512:
        return f"{problem.inputs} inputs do not fit a cluster (a multiple of {VECTOR} up to 512 is needed)"
    if problem.steps < 1 or problem.batch < 1 or problem.layers < 1:
        return "nothing to compute"
    if problem.batch > MAX_BATCH:
        return f"a batch of {problem.batch} exceeds {MAX_BATCH}, the tile of the input projection"
    if config.columns % 8 or not 8 <= config.columns <= 32:
        return "not a tile of this kernel"
    if clusters(problem, config) > most_clusters:
        return f"{clusters(problem, config)} clusters cannot run at once"
    if problem.steps * problem.batch * problem.hidden * problem.layers >= 1 << 31:
        return "it has more elements than the kernel can address"
    return None


def shared_bytes(problem: Problem, config: Config) -> int:
    """Bytes of dynamic shared memory of a block: in the recurrence, two buffers of h and two of the block's own part; in the projection,
    the ring of inputs."""
    chunks = max(-(-problem.inputs // 32), problem.ranks)
    project = INPUT_STAGES * -(-problem.batch // 8) * 8 * (chunks * 64 + 64)
    return 128 + max(project, (2 * problem.ranks + 2) * config.columns * 64)


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """The kernel's recipe. Steps and layers are parameters."""
    defines = {
        "CELL": CELLS.index(problem.cell), "RANKS": problem.ranks, "INPUT_CHUNKS": -(-problem.inputs // 32),
        "TILES": config.columns // 8, "INPUT_TILES": -(-problem.batch // 8), "INPUT_STAGES": INPUT_STAGES,
        "HAS_INITIAL": int(problem.initial), "REVERSE": int(problem.reverse),
    }  # fmt: skip
    return Recipe(
        "rnn_sm90.cu",
        arch,
        {"generated.cuh": render.constants(defines) + "\n"},
        template_options(problem.dtype),
    )


def pack_weights(problem: Problem, w: Sequence[Array], r: Sequence[Array]) -> Array:
    """Each layer's W [gates * hidden, inputs] and R [gates * hidden, hidden] -> one flat array for the kernel."""
    parts = []
    for own_w, own_r in zip(w, r, strict=True):
        parts += [pack_matrix(own_w, problem.hidden).ravel(), pack_matrix(own_r, problem.hidden).ravel()]
    return np.concatenate(parts)


def pack_bias(problem: Problem, w: Sequence[Array], r: Sequence[Array]) -> Array:
    """Each layer's biases Wb and Rb [gates * hidden] -> fp32 [layers, hidden, 4].

    The reset gate multiplies a GRU's recurrent bias of the hidden gate. This bias is therefore separate, in the fourth place.
    """
    packed = np.zeros((problem.layers, problem.hidden, 4), np.float32)
    for layer, (own_w, own_r) in enumerate(zip(w, r, strict=True)):
        both = (own_w.astype(np.float64), own_r.astype(np.float64))
        gates = [a.reshape(-1, problem.hidden) for a in both]
        total = gates[0] + gates[1]
        if problem.cell == "gru":
            total = np.stack([total[0], total[1], gates[0][2], gates[1][2]])
        packed[layer] = total.T
    return packed


def workspace(problem: Problem, config: Config) -> dict[str, int]:
    """Bytes of the workspaces ``hidden`` (inner layers' outputs), ``gates`` and ``progress`` (flags)."""
    outputs = problem.steps * problem.batch * problem.hidden
    return {
        "hidden": max(16, 2 * (problem.layers - 1) * outputs),
        "gates": 16 * problem.layers * outputs,
        "progress": 4 * clusters(problem, config) * problem.ranks,
    }


def launch_reset(problem: Problem, config: Config, gpu: GpuFacts) -> Launch:
    """The launch that clears ``progress``, before the main launch."""
    count = workspace(problem, config)["progress"] // 4
    return Parameters().pointer("progress").i32(count).launch(recipe(problem, config, gpu.arch), "rnn_reset", 1, 256)


def launch(problem: Problem, config: Config, gpu: GpuFacts) -> Launch:
    """The launch. Operands: ``input``, ``weights`` and ``bias`` (packed), ``initial_h`` and ``initial_c`` [layers, batch, hidden],
    ``output`` [steps, batch, hidden] of the last layer, ``final_h`` and ``final_c`` [layers, batch, hidden], and the workspaces."""
    lstm = problem.cell == "lstm"
    parameters = Parameters().pointer("input", "weights", "bias")
    parameters.pointer("initial_h" if problem.initial else None, "initial_c" if problem.initial and lstm else None)
    parameters.pointer("hidden", "output", "final_h", "final_c" if lstm else None, "gates", "progress")
    parameters.i32(problem.steps, problem.batch, problem.inputs, problem.layers, groups(problem, config))
    return parameters.launch(
        recipe(problem, config, gpu.arch), "rnn_sm90", clusters(problem, config) * problem.ranks, THREADS,
        shared=shared_bytes(problem, config), cluster=problem.ranks,
    )  # fmt: skip


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of the launch: the dependent steps of the slowest cluster, and the delay of each further layer."""
    columns = min(config.columns, problem.batch)
    tiles = -(-columns // 8)
    reads = 8 * problem.ranks * tiles * max(1.0, min(columns, 8) / 2)  # shared memory cycles for h
    multiply = max(reads, 64 * problem.ranks * tiles / 4, 8 * tiles * 33)
    exchange = problem.ranks * columns * 64 / 12  # received bytes over the bytes per cycle between multiprocessors
    step = multiply + exchange + tiles * 60 + 900
    project = 80 * problem.ranks * -(-problem.batch // 8) + 200  # measured: 0.75 us for eight columns and K = 512
    span = max(1, 8 // problem.batch)  # time steps that a projection handles at once
    offset = span * step * 1.5 + 3000
    return 12e-6 + (problem.steps * max(step, project / span) + (problem.layers - 1) * offset) / CLOCK


def candidates(problem: Problem, device: GpuFacts, limit: int = 4) -> list[Config]:
    """The configurations to time, best predicted first. Empty when the kernel cannot run the problem."""
    if refuse(problem, Config(8), most_clusters=1 << 30) is not None:
        return []
    most = (device.multiprocessors // 16 - 1) * (
        16 // problem.ranks
    )  # an H200 runs seven clusters of 16 blocks at once
    found = [
        (estimate(problem, Config(columns), device), Config(columns))
        for columns in (8, 16, 24, 32)
        if (columns == 8 or columns - 8 < problem.batch)
        and refuse(problem, Config(columns), most_clusters=most) is None
    ]
    return [config for _, config in sorted(found)[:limit]]
