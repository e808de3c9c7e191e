"""The time of each operator at each precision, and of casts between precisions: measured, or by a roofline model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from optdnn.config import PACKED_WEIGHTS, ROUNDED_ROWS
from optdnn.ir.graph import STRUCTURAL, Graph, Op
from optdnn.ops.base import Call, Result
from optdnn.ops.checks import elements
from optdnn.ops.fused import flops
from optdnn.passes.support.block_rounding import BLOCK
from optdnn.passes.support.facts import operand
from optdnn.passes.support.precision import key
from optdnn.runtime.cuda.gpu_facts import GpuFacts, launches_early

BYTES: Mapping[str, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8": 1}
STORED_FP32 = frozenset({"fp32", "tf32"})
"""Precisions without casts between them: tf32 rounds the factors of products, but stores fp32."""
PACKED_BYTES: Mapping[str, float] = {"w8": 1 + 3 / BLOCK, "w4": 0.5 + 3 / BLOCK, ROUNDED_ROWS: 0.5 + 3 / BLOCK}
"""Bytes of a packed weight, with its share of a 16-bit scale and of a zero point."""
PACKED_RATE = 0.95
"""The rate of arithmetic with packed weights, as a fraction of the float rate: weights are unpacked first."""
FIRST_WITH_FP8 = (8, 9)
"""The first compute capability whose tensor cores multiply fp8."""


@dataclass(frozen=True)
class Timed:
    """Microseconds of one operator at one precision, and the kernel that ran ("openvino brgconv_avx512_bf16")."""

    us: float
    tactic: str = ""


@dataclass
class OperatorTimes:
    """Times of a network's operators in one library, or in the target's own kernels.

    ``library`` is its name, ``source`` describes the origin of the times. ``table``: op key -> precision -> time; a
    precision at which an op cannot be timed is absent. A cast takes ``cast_us`` and its traffic at ``bandwidth`` bytes/µs.
    ``beside``: the float precision of activations beside packed weights.
    """

    library: str
    source: str
    precisions: tuple[str, ...] = ()
    table: dict[str, dict[str, Timed]] = field(default_factory=dict)
    cast_us: float = 2.0
    bandwidth: float = 8e3
    beside: str = "fp32"

    def cast(self, a: str, b: str, nbytes: int) -> float:
        """Microseconds to convert a value of ``nbytes`` (at fp32) from precision ``a`` to ``b``."""
        a, b = (self.beside if p in PACKED_WEIGHTS else p for p in (a, b))
        if a == b or {a, b} <= STORED_FP32:
            return 0.0
        return self.cast_us + nbytes / 4 * (BYTES[a] + BYTES[b]) / self.bandwidth


@dataclass(frozen=True)
class Roofline:
    """Operations and bytes per microsecond of one GPU, and the microseconds that a kernel launch costs.

    Well-tuned kernels reach about half of a GPU's peaks on networks, and two thirds of its bandwidth.
    """

    ops: Mapping[str, float]
    bandwidth: float
    launch_us: float

    @classmethod
    def of(cls, gpu: GpuFacts) -> Roofline:
        """The roofline of a GPU, from its facts."""
        cycles = gpu.multiprocessors * gpu.clock * 1e-6 / 2
        matrix = cycles * gpu.matrix_ops
        integers = cycles * gpu.integer_ops
        ops = {"fp32": cycles * 2 * gpu.lanes, "tf32": matrix / 2, "fp16": matrix, "bf16": matrix, "int8": integers}
        if gpu.capability >= FIRST_WITH_FP8:
            ops["fp8"] = 2 * matrix
        return cls(ops, gpu.bandwidth * 1e-6 * 2 / 3, 2.0 if launches_early(gpu.arch) else 2.5)


def predicted_times(
    graph: Graph, target: str, gpu: GpuFacts, precisions: Mapping[str, Sequence[str]], beside: str = "fp32"
) -> OperatorTimes:
    """Times of a GPU that is not present: for each op the larger of arithmetic and traffic, plus a launch, at its ``precisions``.

    ``beside``: the float precision of activations beside packed weights.
    """
    machine = Roofline.of(gpu)
    found = OperatorTimes(target, f"a roofline model of {gpu.name}: nothing was measured")
    found.cast_us, found.bandwidth, found.beside = machine.launch_us, machine.bandwidth, beside
    for op in graph.order():
        if op.kind in STRUCTURAL:
            continue
        work, traffic = flops_of(graph, op), _bytes_of(graph, op)
        us = {p: max(work / rate, traffic * BYTES[p] / 4 / machine.bandwidth) for p, rate in machine.ops.items()}
        asked = precisions.get(key(op), ("fp32",))
        for p in PACKED_WEIGHTS.intersection(asked):
            weights = elements(graph.type(operand(op, 1)))
            moved = (traffic - 4 * weights) * BYTES[beside] / 4 + weights * PACKED_BYTES[p]
            us[p] = max(work / machine.ops[beside] / PACKED_RATE, moved / machine.bandwidth)
            if p == ROUNDED_ROWS:
                us[p] = min(us[p], _with_rounded_rows(graph, op, work, moved, machine, beside))
        found.table[key(op)] = {p: Timed(machine.launch_us + us[p], "model") for p in asked if p in us}
    return found


def _with_rounded_rows(graph: Graph, op: Op, work: float, moved: float, machine: Roofline, beside: str) -> float:
    """Microseconds of a product of ``work`` operations and ``moved`` bytes if a separate launch rounds its rows to int8."""
    rows = elements(graph.type(operand(op)))
    rounding = machine.launch_us + rows * (BYTES[beside] + BYTES["int8"]) / machine.bandwidth
    product = moved - rows * (BYTES[beside] - BYTES["int8"])
    return rounding + max(work / machine.ops["int8"] / PACKED_RATE, product / machine.bandwidth)


def flops_of(graph: Graph, op: Op) -> float:
    """Arithmetic operations of one evaluation. A multiply-add counts as two, a symbolic size as its lowest value."""
    types = tuple(None if v is None else graph.type(v) for v in op.inputs)
    known = tuple(graph.known(v) for v in op.inputs)
    call = Call(op.kind, op.attrs, types, known, len(op.outputs), graph.fresh_symbol)
    return float(flops(op.definition, call, Result(tuple(o.type for o in op.outputs))))


def _bytes_of(graph: Graph, op: Op) -> float:
    """Bytes read and written, each operand once, at the values' own types."""
    operands = [graph.type(v) for v in dict.fromkeys(op.inputs) if v is not None]
    return sum(elements(t) * t.dtype.itemsize for t in (*operands, *(o.type for o in op.outputs)))
