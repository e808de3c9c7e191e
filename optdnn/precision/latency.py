"""The time of each operator at each precision, and of casts between precisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from optdnn.config import PACKED_WEIGHTS
from optdnn.ir.graph import STRUCTURAL, Graph, Op
from optdnn.ops.base import Call, Result
from optdnn.ops.checks import elements
from optdnn.ops.fused import flops
from optdnn.passes.support.precision import key
from optdnn.runtime.cuda.gpu_facts import GpuFacts

BYTES: Mapping[str, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8": 1}
STORED_FP32 = frozenset({"fp32", "tf32"})
"""Precisions without casts between them: tf32 rounds the factors of products, but stores fp32."""
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
    """Operations and bytes per microsecond of one GPU.

    Well-tuned kernels reach about half of a GPU's peaks on networks, and two thirds of its bandwidth.
    """

    ops: Mapping[str, float]
    bandwidth: float

    @classmethod
    def of(cls, gpu: GpuFacts) -> Roofline:
        """The roofline of a GPU, from its facts."""
        cycles = gpu.multiprocessors * gpu.clock * 1e-6 / 2
        matrix = cycles * gpu.matrix_ops
        integers = cycles * gpu.integer_ops
        ops = {"fp32": cycles * 2 * gpu.lanes, "tf32": matrix / 2, "fp16": matrix, "bf16": matrix, "int8": integers}
        if gpu.capability >= FIRST_WITH_FP8:
            ops["fp8"] = 2 * matrix
        return cls(ops, gpu.bandwidth * 1e-6 * 2 / 3)


def by_operator(
    launches: Iterable[tuple[Iterable[str], float]], owners: Mapping[str, str], work: Mapping[str, float]
) -> dict[str, float]:
    """Op key -> its microseconds, of ``launches`` given as ONNX nodes and microseconds. ``owners``: node -> op key.

    The ops of one launch share its time in proportion to their ``work`` (:func:`work_of_ops`). So sums are right even if launches
    compute several ops, and not the same ones in each precision.
    """
    found: dict[str, float] = {}
    for nodes, us in launches:
        keys = list(dict.fromkeys(owners[n] for n in nodes if n in owners))
        total = sum(work.get(k, 0.0) for k in keys)
        for k in keys:
            share = work.get(k, 0.0) / total if total else 1 / len(keys)
            if share:
                found[k] = found.get(k, 0.0) + share * us
    return found


def work_of_ops(graph: Graph, gpu: GpuFacts) -> dict[str, float]:
    """Op key -> microseconds that its arithmetic or its traffic takes in 16 bits, by the GPU's roofline.

    Pointwise ops are left out: in a launch with others they cost almost nothing."""
    machine = Roofline.of(gpu)
    found: dict[str, float] = {}
    for op in graph.order():
        if op.kind not in STRUCTURAL and not op.pointwise:
            traffic = _bytes_of(graph, op) * BYTES["fp16"] / 4
            found[key(op)] = max(flops_of(graph, op) / machine.ops["fp16"], traffic / machine.bandwidth)
    return found


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
