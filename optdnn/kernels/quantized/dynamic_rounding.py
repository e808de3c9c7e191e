"""The range of a tensor, and its rounding by that range, in one launch (``dynamic_rounding.cu``).

The launch is emitted where the tensor is rounded. It also stores the scale and the zero point, which products read. The cost model
predicts whether this launch or two are faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView, map_dtype
from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.kernels.pointwise.elementwise import Elementwise
from optdnn.kernels.pointwise.strides import merge
from optdnn.kernels.quantized import dynamic_range
from optdnn.kernels.quantized.quantizer import rounded_range
from optdnn.kernels.ranking import two_are_better
from optdnn.kernels.reduce.means import BATCH_S, LAUNCH_S, LOAD_S, MEET_S
from optdnn.kernels.tactic import Offer, Region
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.types import BF16, FP16, FP32

CLUSTERS, BLOCKS, MOST_ACCESSES = (1, 2, 4, 8, 16), (256, 512, 1024), 8
"""Blocks of a cluster, threads of a block, most accesses of a thread."""
ACCESS = 16
"""Bytes of an access."""
ROUND_S = 0.75e-6
"""Predicted seconds in which a multiprocessor rounds an access of each of 1,024 threads: 170 instructions of 32 warps."""
SIXTEEN_S = 0.3e-6
"""Further seconds of a cluster of sixteen blocks."""
POINTWISE_S = 0.95e-6
"""Predicted seconds of the launch that would round."""


@dataclass(frozen=True)
class Problem:
    """A tensor without gaps as ``accesses`` accesses of 16 bytes, of elements of type ``dtype``."""

    accesses: int
    dtype: str


@dataclass(frozen=True, order=True)
class Config:
    """``cluster`` blocks of ``threads`` threads."""

    cluster: int
    threads: int

    def __str__(self) -> str:
        return f"round{self.cluster}x{self.threads}"

    def vectors(self, problem: Problem) -> int:
        """Accesses of a thread: a power of two."""
        return 1 << (math.ceil(problem.accesses / self.cluster / self.threads) - 1).bit_length()


def refuse(problem: Problem, config: Config, capability: tuple[int, int] = (9, 0)) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if config.cluster > 1 and capability < (9, 0):
        return f"GPUs of capability {capability[0]}.{capability[1]} have no clusters"
    if config.vectors(problem) > MOST_ACCESSES:
        return f"{config.cluster} blocks cannot keep {problem.accesses * ACCESS} bytes in registers"
    return None


def estimate(problem: Problem, config: Config) -> float:
    """Predicted seconds of a dependent launch. Not yet fitted: the constants are those of means in a cluster."""
    together = (MEET_S if config.cluster > 1 else 0.0) + (SIXTEEN_S if config.cluster == CLUSTERS[-1] else 0.0)
    turns = math.ceil(problem.accesses / config.cluster / config.threads)
    rounds = math.ceil(problem.accesses / config.cluster / 32) * 32 / BLOCKS[-1] * ROUND_S
    return LAUNCH_S + BATCH_S + LOAD_S * turns + together + rounds


@lru_cache(maxsize=1024)
def candidates(problem: Problem, capability: tuple[int, int]) -> tuple[Config, ...]:
    """The configurations to time, the best predicted first. No block is without elements."""
    asked = (Config(cluster, threads) for cluster in CLUSTERS for threads in BLOCKS)
    found = [
        c for c in asked
        if refuse(problem, c, capability) is None and (c.cluster == 1 or (c.cluster - 1) * c.threads < problem.accesses)
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda c: (estimate(problem, c), c)))


def recipe(problem: Problem, config: Config, arch: str) -> Recipe:
    """What to compile. The size is a parameter."""
    sizes = {"CLUSTER": config.cluster, "THREADS": config.threads, "VECTORS": config.vectors(problem)}
    text = render.constants(sizes | {"WIDE": int(problem.dtype == "float32")})
    options = template_options(problem.dtype, fast=False)
    return Recipe("dynamic_rounding.cu", arch, {"generated.cuh": f"{text}\n"}, options)


def launch(problem: Problem, config: Config, arch: str) -> Launch:
    """The launch. Operands: ``x``, ``output`` (uint8), ``scale`` (fp32), ``zero`` (uint8)."""
    parameters = Parameters().pointer("x", "output", "scale", "zero").i32(problem.accesses)
    shared = 16 + 8 * (config.threads // 32 + config.cluster)
    made = recipe(problem, config, arch)
    return parameters.launch(
        made, "dynamic_rounding", config.cluster, config.threads, shared=shared, cluster=config.cluster
    )


class DynamicRounding(Elementwise):
    """Tensors of floats without gaps, in the order of the rounded ones."""

    name = "dynamic_rounding"

    def refuse(self, b: Builder, op: Op) -> str | None:
        found = rounded_range(b.graph, op)
        if found is None:
            return "it does not round its operand by the operand's range"
        if not isinstance(b.chosen.get(found.id), dynamic_range.DynamicRange):
            return "the range is computed on the CPU"
        if any(reader.value in b.place for reader in b.graph.readers(found)):
            return "another operator reads the range before the operand is rounded"
        x, out = b.source(op.inputs[0]), b.result(op.value, self.strides(b, op))
        if x.dtype not in (FP16, BF16, FP32):
            return f"the kernel takes 16-bit floats and fp32, not {x.dtype.name}"
        dims, strides = merge(x.shape, [out.strides, x.strides])
        lanes = ACCESS // x.dtype.itemsize
        if x.shape != out.shape or strides != [[1], [1]] or dims[0] % lanes or x.offset % lanes or out.offset % lanes:
            return "the operand or the result has gaps, or they are not whole accesses in the same order"
        problem = _problem(x)
        if not candidates(problem, b.gpu.capability):
            return refuse(problem, Config(CLUSTERS[-1] if b.gpu.capability >= (9, 0) else 1, BLOCKS[-1]))
        return None

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The range."""
        found = rounded_range(graph, op)
        return [] if found is None else [found]

    def region(self, b: Builder, op: Op) -> Region:
        """The range and the rounding."""
        return Region(op, before=(_range(b, op),))

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        problem = _problem(b.source(op.inputs[0]))
        return [Offer(c, estimate(problem, c)) for c in candidates(problem, b.gpu.capability)]

    def defer(self, b: Builder, op: Op) -> str | None:
        """Unmeasured, the cost model decides."""
        two = min(o.predicted for o in dynamic_range.DynamicRange().configs(b, _range(b, op))) + POINTWISE_S
        return two_are_better(self.configs(b, op)[0].predicted, two, 1.0)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        found, x, out = _range(b, op), b.operand(op.inputs[0]), b.target(op.value)
        scale, zero = (b.target(Value(found.id, port)) for port in (0, 1))
        operands = {"x": x, "output": out, "scale": scale, "zero": zero}
        made, covers = launch(_problem(x), config, b.arch), self.region(b, op).src
        b.emit(replace(op, src=covers), made, operands, "DynamicQuantizeLinear", {}, [x], [out, scale, zero])


def _range(b: Builder, op: Op) -> Op:
    """The range of an operator that is not refused."""
    found = rounded_range(b.graph, op)
    assert found is not None
    return found


def _problem(x: TensorView) -> Problem:
    """The kernel's problem for a tensor without gaps."""
    return Problem(x.size * x.dtype.itemsize // ACCESS, map_dtype(x.dtype))
