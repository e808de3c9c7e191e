"""Plans of the row kernels (``rows.cu``): LayerNorm, RMSNorm, L2 norm, Softmax and LogSoftmax over the last, contiguous axis.

Statistics are fp32 and computed from registers: each row is read once. Norms may add a residual first, and store that sum as a
second output (the residual stream of a transformer).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.kernels.layout.row_places import ACCESS, MOST_AXES
from optdnn.kernels.norm.templates import FloatElements
from optdnn.kernels.problem import WithEpilogue
from optdnn.kernels.quantized.quantized_store import QuantizedStore, narrow_kind
from optdnn.ops.requantize import QuantParams, byte_bias
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

OPERATIONS = ("layer_norm", "rms_norm", "softmax", "log_softmax", "l2_norm")
"""An L2 norm divides by the larger one of a row's length and ``epsilon``. It has no bias."""
_SOFTMAX = OPERATIONS[2:4]
MEMORY, CLOCK, LATENCY = 3.3e12, 1.75e9, 1.13e-6
BLOCK_START = 67e-9  # seconds from one block's start on a multiprocessor to the next one's
MAX_ELEMENTS = 32
"""Most elements of a row in one thread's registers; 24 in blocks of more than 512 threads."""


@dataclass(frozen=True)
class FirstNorm:
    """A norm of the input before the addition: one of the first two :data:`OPERATIONS`, and its parameters."""

    operation: str
    scale: bool
    bias: bool
    epsilon: float


@dataclass(frozen=True)
class Modulated:
    """After a norm: each feature is multiplied by a factor plus ``plus``, and a shift is added. ``rows`` rows share their factors and
    shifts. ``factor``, ``shift``: elements from the vector of these rows to the vector of the next rows (None: no shift)."""

    rows: int
    factor: int
    shift: int | None
    plus: float


@dataclass(frozen=True)
class Problem(FloatElements, WithEpilogue):
    """``rows`` rows of ``length`` elements of ``dtype``: 16-bit floats or fp32.

    ``add``: a second input is added first, or to the result (``last``), there by a stage of ``epilogue`` if one reads it. ``sum``: the operand of the norm is also an output. ``scale``,
    ``bias``: the norm has these fp32 parameters of ``length`` elements. ``factor`` multiplies softmax's input.
    """

    operation: str
    rows: int
    length: int
    dtype: str = "float16"
    add: bool = False
    sum: bool = False
    scale: bool = True
    bias: bool = True
    epsilon: float = 1e-5
    factor: float = 1.0
    period: int = 0
    """Number of rows of an addend that repeats; 0: it has a row for each row."""
    narrow: str = ""
    """Type of a narrower result: an 8-bit type of 16-bit rows, which is quantized, or "float16" of fp32 rows; "": there is none."""
    wide: bool = True
    """Whether the result is stored in ``dtype``."""
    widened: bool = False
    """Whether the result of 16-bit rows is stored in fp32."""
    last: bool = False
    walk: tuple[tuple[int, int], ...] = ()
    """Iteration over the input's rows: (size, stride in elements) of up to :data:`MOST_AXES` axes, the slowest first; (): contiguous
    rows."""
    pitches: tuple[int, int] = (0, 0)
    """Elements from a row to the next, of the addend and of the results of ``dtype``; 0: ``length``."""
    epilogue: tuple[render.Stage, ...] = ()
    """Stages after the norm. The addend of a :attr:`last` addition may be their only operand."""
    first: FirstNorm | None = None
    """A norm of the input before the addition, or before the norm if there is no addend."""
    modulated: Modulated | None = None
    root_epsilon: float | None = None
    """An epsilon that is added to the deviation of a row; None: the norm is one of ONNX's."""
    uncentered: bool = False
    """Whether a layer norm leaves the mean of a row in its result."""
    stored: str = ""
    """8-bit integer type of the input, whose elements are dequantized to ``dtype``; "": its elements are of ``dtype``."""

    @property
    def bytes(self) -> int:
        """Least global traffic: each tensor once."""
        parameters = 0 if self.operation in _SOFTMAX else 4 * self.length * (self.scale + self.bias)
        written = self.itemsize * (self.wide * (1 + self.widened) + self.sum) + (
            self.itemsize // 2 if self.narrow else 0
        )
        added = (self.period or self.rows) * self.length * self.itemsize if self.add else 0
        read = 1 if self.stored else self.itemsize
        return self.rows * self.length * (read + written) + added + parameters


@dataclass(frozen=True, order=True)
class Config:
    """``group`` threads share a row; each takes ``vectors`` accesses of ``lanes`` elements. A block has ``threads`` threads."""

    group: int
    vectors: int
    lanes: int
    threads: int

    def __str__(self) -> str:
        return f"rows{self.group}x{self.vectors}x{self.lanes}t{self.threads}"

    def blocks(self, problem: Problem) -> int:
        """Blocks of the grid."""
        return -(-problem.rows // (self.threads // self.group))


def refuse(problem: Problem, config: Config) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if problem.operation not in OPERATIONS:
        return f"no operation {problem.operation!r}"
    if problem.operation not in OPERATIONS[:2] and (problem.sum or (problem.add and not problem.last)):
        return "softmax and L2 norms add no residual"
    if problem.operation in _SOFTMAX and problem.add:
        return "softmax adds no residual"
    deviation = problem.root_epsilon is not None or problem.uncentered
    if deviation and (problem.operation not in OPERATIONS[:2] or problem.modulated is not None):
        return "only layer and RMS norms without factors divide by other deviations"
    if problem.uncentered and problem.operation != "layer_norm":
        return "only a layer norm has a mean"
    if problem.period and not problem.add:
        return "a period needs an addend"
    if problem.last and (not problem.add or problem.sum or (problem.narrow and problem.wide)):
        return "a last addition needs an addend, and its sum must be the only result"
    if problem.first is not None and (not problem.sum or problem.operation not in OPERATIONS[:2]):
        return "a norm before the addition needs a norm of the sum, and the sum must be stored"
    early = problem.add and not problem.last
    quantized = problem.narrow not in ("", "float16")
    if problem.epilogue and (quantized or early):
        return "stages after the norm allow no addend before it and no quantization"
    if (problem.residual and not problem.last) or ("bias",) in problem.epilogue:
        return "the stages after a norm have no operands, except an addend"
    if problem.modulated is not None and (problem.operation in _SOFTMAX or quantized or early):
        return "factors after the norm allow no addend before it and no quantization"
    if problem.widened and (problem.itemsize != 2 or problem.narrow or problem.sum or not problem.wide):
        return "an fp32 result must be the only result, of 16-bit rows"
    if problem.sum and not problem.add and problem.first is None:
        return "a sum needs an addend"
    if not problem.wide and not problem.narrow:
        return "there is no result"
    if problem.stored and (problem.itemsize != 2 or problem.add or problem.first is not None):
        return "integers are read as 16-bit rows of a norm alone"
    if problem.walk and (len(problem.walk) > MOST_AXES or math.prod(n for n, _ in problem.walk) != problem.rows):
        return "its axes do not hold its rows"
    if any(stride % config.lanes for stride in (*(s for _, s in problem.walk), *problem.pitches, *_vectors(problem))):
        return f"rows do not begin at multiples of {config.lanes} elements"
    if problem.rows < 1 or problem.length < 1 or problem.rows >= 1 << 31:
        return "no rows, or more rows than the kernel can count"
    if config.lanes not in (1, 2, 4, 8) or problem.length % config.lanes:
        return f"rows of {problem.length} elements are not vectors of {config.lanes}"
    if config.lanes * problem.itemsize > ACCESS:
        return f"{config.lanes} elements exceed an access of {ACCESS} bytes"
    if problem.narrow and (problem.narrow == "float16") != (problem.itemsize == 4):
        return "results of 16-bit rows are quantized, those of fp32 rows converted to fp16"
    if config.group & (config.group - 1) if config.group <= 32 else config.group % 32 or config.group != config.threads:
        return f"{config.group} threads are not a valid group of a block of {config.threads}"
    if not 32 <= config.threads <= 1024 or config.threads % 32:
        return f"{config.threads} threads are not a valid block"
    if config.group * config.vectors * config.lanes < problem.length:
        return f"a row of {problem.length} elements does not fit {config.group} threads"
    if config.vectors * config.lanes > (most := MAX_ELEMENTS if config.threads <= 512 else 24):
        return f"more than {most} elements a thread"
    if problem.last and config.threads > 512 and config.vectors * config.lanes > 16:
        return "row and addend exceed a thread's registers"
    return None


def _vectors(problem: Problem) -> tuple[int, ...]:
    """Strides of factors and of shifts, in elements."""
    m = problem.modulated
    return () if m is None else (m.factor, m.shift or 0)


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """The kernel's recipe. The sizes are parameters."""
    norm, wide, l2 = problem.operation not in _SOFTMAX, problem.itemsize == 4, problem.operation == "l2_norm"
    defines = {
        "OPERATION": 1 if l2 else OPERATIONS.index(problem.operation), "L2": int(l2), "WIDE": int(wide), "LANES": config.lanes, "VECTORS": config.vectors,
        "GROUP": config.group, "THREADS": config.threads,
        "HAS_ADD": int(problem.add), "ADD_LAST": int(problem.last), "RESIDUAL": int(problem.residual), "HAS_SUM": int(problem.sum), "PERIODIC": int(problem.period > 0),
        "HAS_SCALE": int(norm and problem.scale), "HAS_BIAS": int(norm and problem.bias),
        "NARROW": narrow_kind(problem.narrow), "HAS_OUTPUT": int(problem.wide), "WIDENED": int(problem.widened), "WALKED": int(bool(problem.walk)), "EPILOGUE": int(bool(problem.epilogue)),
        "FIRST": 0 if problem.first is None else 1 + OPERATIONS.index(problem.first.operation),
        "HAS_FIRST_SCALE": int(problem.first is not None and problem.first.scale), "HAS_FIRST_BIAS": int(problem.first is not None and problem.first.bias),
    }  # fmt: skip
    if problem.modulated is not None:
        defines |= {"MODULATED": 1, "HAS_SHIFT": int(problem.modulated.shift is not None)}
    if problem.root_epsilon is not None:
        defines["ROOT"] = 1
    if problem.uncentered:
        defines["UNCENTERED"] = 1
    if problem.stored:
        defines |= {"BYTES": 1, "INPUT_UNSIGNED": int(problem.stored == "uint8")}
    stages = [render.epilogue(problem.epilogue, exact=wide)] if problem.epilogue else []
    text = "\n".join([render.constants(defines), *stages, ""])
    return Recipe("rows.cu", arch, {"generated.cuh": text}, template_options(problem.dtype, fast=not wide))


def launch(
    problem: Problem,
    config: Config,
    gpu: GpuFacts,
    narrow: QuantizedStore | None = None,
    stored: QuantParams | None = None,
) -> Launch:
    """The launch. ``narrow``: how the narrower result is stored. ``stored``: the parameters of an 8-bit input. Operands: ``input``, ``addend``, ``scale`` and ``bias`` (fp32 [length]), ``output``, ``sum``, ``narrow``; ``first_scale``
    and ``first_bias`` of the norm before the addition; ``factor`` and ``shift`` of :class:`Modulated`."""
    norm = problem.operation not in _SOFTMAX
    present = {
        "input": True, "addend": problem.add, "scale": norm and problem.scale, "bias": norm and problem.bias,
        "output": problem.wide, "sum": problem.sum, "narrow": problem.narrow,
    }  # fmt: skip
    parameters = Parameters().pointer(*(name if there else None for name, there in present.items()))
    parameters.i32(problem.rows, problem.length).f32(problem.epsilon, 1.0 / problem.length, problem.factor)
    (narrow or QuantizedStore()).put(parameters)
    sizes, strides = zip(*((1, 0),) * (MOST_AXES - len(problem.walk)), *problem.walk, strict=True)
    pitches = (pitch or problem.length for pitch in problem.pitches)
    parameters.i32(problem.period, *pitches, *sizes[1:]).i64(*strides)
    first = problem.first or FirstNorm("rms_norm", scale=False, bias=False, epsilon=0.0)
    parameters.pointer("first_scale" if first.scale else None, "first_bias" if first.bias else None).f32(first.epsilon)
    if (m := problem.modulated) is not None:
        parameters.pointer("factor", "shift" if m.shift is not None else None).i32(m.rows, m.factor, m.shift or 0).f32(
            m.plus
        )
    if problem.root_epsilon is not None:
        parameters.f32(problem.root_epsilon)
    if stored is not None:
        parameters.f32(byte_bias(stored.dtype) + stored.zero, stored.scale)
    return parameters.launch(recipe(problem, config, gpu.arch), "rows", config.blocks(problem), config.threads)


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch. The constants fit chains of norms on an H100 (``docs/internals/kernels-norms.md``)."""
    elements, blocks = config.vectors * config.lanes, config.blocks(problem)
    cycles = 9 * elements + 100 * max(0, elements - 16)
    latency = LATENCY + cycles / CLOCK
    latency += 0.3e-6 + elements * 6 / CLOCK if problem.first is not None else 0.0
    memory = max(problem.bytes / MEMORY, BLOCK_START * blocks / device.multiprocessors)
    work = blocks * config.threads * (2 * elements + 20 + 22 * math.log2(max(2, config.group)))
    compute = work / min(blocks, device.multiprocessors) / 128 / CLOCK
    return latency + max(memory, compute) + 0.06 * min(memory, compute)


def candidates(problem: Problem, device: GpuFacts, limit: int = 6) -> list[Config]:
    """The configurations to time, best predicted first. Empty when a row is too long."""
    lanes = problem.lanes(problem.length)
    found: list[tuple[float, Config]] = []
    for group in (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024):
        vectors = -(-problem.length // (group * lanes))
        for threads in (32, 64, 128, 256) if group <= 32 else (group,):
            config = Config(group, vectors, lanes, threads)
            if refuse(problem, config) is None:
                found.append((estimate(problem, config, device), config))
    found.sort(
        key=lambda item: (round(item[0] * 5e7), abs(item[1].threads - 160), item[1])
    )  # among near-equal estimates: blocks of 128 to 192
    return [config for _, config in found[:limit]]
