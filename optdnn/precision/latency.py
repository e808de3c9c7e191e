"""What each op costs at each precision, by whatever can tell on this machine: counters of libraries, steps of a GPU, or a model.

The search needs times of single ops, and those of casts between them. They order candidates; what decides in the end is the
time of whole engines, measured side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ops.base import Call
from optdnn.passes.support.precision import key
from optdnn.target_name import HOPPER, TargetName

BYTES: Mapping[str, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8": 1}
STORED_FP32 = frozenset({"fp32", "tf32"})
"""Precisions between which nothing is cast: tf32 rounds the factors of products, and stores fp32."""


@dataclass(frozen=True)
class Timed:
    """Microseconds of one op at one precision, and what would run it there ("openvino brgconv_avx512_bf16")."""

    us: float
    tactic: str = ""


class Latency(Protocol):
    """``source`` says in words where the times are from; ``measured`` is False for those of a model."""

    source: str
    measured: bool

    def times(self) -> Mapping[str, Mapping[str, Timed]]:
        """Op key -> precision -> time; a precision that an op cannot be timed at is absent."""

    def cast(self, a: str, b: str, nbytes: int) -> float:
        """Microseconds to bring a value of ``nbytes`` (at fp32) from precision ``a`` to ``b``."""


@dataclass
class Table:
    """A :class:`Latency` of given times: ``overhead_us`` per cast, and bytes read and written at ``bandwidth`` bytes/µs."""

    source: str
    measured: bool
    table: dict[str, dict[str, Timed]] = field(default_factory=dict)
    overhead_us: float = 2.0
    bandwidth: float = 8e3

    def times(self) -> Mapping[str, Mapping[str, Timed]]:
        return self.table

    def cast(self, a: str, b: str, nbytes: int) -> float:
        if a == b or {a, b} <= STORED_FP32:
            return 0.0
        return self.overhead_us + nbytes / 4 * (BYTES[a] + BYTES[b]) / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """A roofline: operations and bytes per microsecond, and what starting a kernel costs. For targets that are not at hand."""

    name: str
    ops: Mapping[str, float]
    bandwidth: float
    launch_us: float


MACHINES: Mapping[str, Machine] = {
    # NVIDIA's data sheets, dense; half of the peaks, which is what well-tuned kernels reach on networks, and two thirds of the
    # bandwidth. One card stands for its architecture, of which others differ (an L4 has a third of an L40S).
    "sm_90a": Machine(
        "H200", {"fp32": 33e6, "tf32": 247e6, "fp16": 495e6, "bf16": 495e6, "int8": 990e6, "fp8": 990e6}, 3.3e6, 2.0
    ),
    "sm_89": Machine(
        "L40S", {"fp32": 45e6, "tf32": 91e6, "fp16": 181e6, "bf16": 181e6, "int8": 366e6, "fp8": 366e6}, 0.56e6, 2.5
    ),
    "sm_86": Machine("A40", {"fp32": 18e6, "tf32": 37e6, "fp16": 74e6, "bf16": 74e6, "int8": 149e6}, 0.45e6, 2.5),
    "sm_80": Machine("A100", {"fp32": 9.7e6, "tf32": 78e6, "fp16": 156e6, "bf16": 156e6, "int8": 312e6}, 1.0e6, 2.5),
}
CPU = Machine("a CPU", {"fp32": 0.1e6, "bf16": 0.2e6, "int8": 0.4e6}, 1e4, 1.0)


def model(graph: Graph, target: str, precisions: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> Table:
    """Times of a roofline model: the larger of arithmetic and traffic, and a launch; at each op's ``precisions``."""
    machine = MACHINES.get(TargetName.parse(target).arch, MACHINES[HOPPER]) if target != "cpu" else CPU
    found = Table(f"a roofline model of {machine.name}: nothing was measured", False)
    found.overhead_us, found.bandwidth = machine.launch_us, machine.bandwidth
    for op in graph.order():
        if op.kind in STRUCTURAL:
            continue
        flops, traffic = flops_of(graph, op, sizes), bytes_of(graph, op, sizes)
        found.table[key(op)] = {
            p: Timed(
                machine.launch_us + max(flops / machine.ops[p], traffic * BYTES[p] / 4 / machine.bandwidth), "model"
            )
            for p in precisions.get(key(op), ("fp32",))
            if p in machine.ops
        }
    return found


def flops_of(graph: Graph, op: Op, sizes: Mapping[str, int]) -> float:
    """Arithmetic operations of one evaluation (a multiply-add counts as two), with symbols at ``sizes``."""
    from optdnn.ops.base import Result

    definition = op.definition
    types = tuple(None if v is None else graph.type(v) for v in op.inputs)
    out = Result(tuple(o.type for o in op.outputs))
    if definition.cost is not None:
        call = Call(
            op.kind, op.attrs, types, tuple(graph.known(v) for v in op.inputs), len(op.outputs), graph.fresh_symbol
        )
        try:
            return float(definition.cost(call, out).flops)
        except (TypeError, ValueError, AttributeError):  # symbolic sizes
            pass
    return float(sum(elements(graph, Value(op.id, i), sizes) for i in range(len(op.outputs))))


def bytes_of(graph: Graph, op: Op, sizes: Mapping[str, int]) -> int:
    """Bytes read and written, each operand once, at the values' own types."""
    values = [*dict.fromkeys(v for v in op.inputs if v is not None), *(Value(op.id, i) for i in range(len(op.outputs)))]
    return sum(elements(graph, v, sizes) * graph.type(v).dtype.itemsize for v in values)


def elements(graph: Graph, value: Value, sizes: Mapping[str, int]) -> int:
    """Number of elements, with symbols at ``sizes`` (1 where one is not told)."""
    from optdnn.dim import evaluate
    from optdnn.errors import ShapeError

    n = 1
    for d in graph.type(value).shape or ():
        try:
            n *= d if isinstance(d, int) else evaluate(d, {**{s.name: 1 for s in d.symbols()}, **sizes})
        except ShapeError:
            continue
    return n
