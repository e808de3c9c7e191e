"""Which operators of a mixture such as ``int8+fp16`` run in 8 bits on a GPU: those for which the cost model predicts a gain.

8 bits halve the bytes and the arithmetic, but they need launches that quantize, and some fusions exist for floats only. So the
network is lowered twice, with all products in 8 bits and with none. Operators that share a launch in either program are one
block. Each block is run as in one of the two programs, and a value that passes from a float block to an 8-bit block costs one more
launch. The choice with the least total is a minimum cut. A third program is that of the float precision alone, for which some exact
passes do more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
from networkx.utils import UnionFind

from optdnn.config import QUANTIZED, BuildOptions
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import STRUCTURAL, Graph, Op
from optdnn.optimize import plan_of
from optdnn.passes.support.facts import bytes_of
from optdnn.passes.support.precision import ANCHORS, PrecisionPlan, key
from optdnn.passes.support.precision_report import PrecisionLog
from optdnn.passes.support.ranges import Calibration
from optdnn.precision.predicted import lowered, microseconds, step_times
from optdnn.precision.targets import assigned
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.program import Program

MIXTURE = "mixture"
"""Key of a program's ``meta`` for the choice between the two precisions of a mixture."""
QUANTIZE_US = 1.3
"""Microseconds that a launch adds which quantizes a small value, besides its traffic."""
LEAST_GAIN = 0.03
"""Least predicted gain, as a fraction of the float precision's time, for which 8 bits are taken: they are less accurate."""
FLOAT, EIGHT = "float", "eight"
"""The two ends of the cut."""


def offers_choice(options: BuildOptions) -> bool:
    """Whether a build asks for a mixture of 8 bits with a 16-bit precision, and leaves the choice to us
    (``strict_precision`` does not)."""
    plan = plan_of(options)
    mixed = plan.default in QUANTIZED and plan.base in ("fp16", "bf16")
    return mixed and not options.strict_precision and options.stop_after is None and options.calib is not None


@dataclass
class Mixture:
    """Chooses for one build. ``gpu``: the GPU whose times are predicted; ``base_us``: the predicted time of the whole network in
    the float precision alone (None: pins forbid that). After a call, ``plan`` is the choice, and ``times`` are the predicted
    microseconds of what was compared. ``reasons``: node -> why it is in the float precision."""

    options: BuildOptions
    gpu: GpuFacts
    base_us: float | None
    plan: PrecisionPlan | None = None
    times: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def __call__(self, graph: Graph, plan: PrecisionPlan, calibration: Calibration) -> PrecisionPlan:
        """``plan`` with the products of ``graph`` that are faster in its float precision ``in_base``. The exact passes on ``graph``
        are done, and its precisions are not assigned."""
        kept, log = ConstantCache().of(graph), PrecisionLog()
        eight = self._lowered(graph, plan, calibration, kept, log)
        found = {plan.default: (plan, microseconds(eight))}
        products = [op for op in graph.order() if _free(op, plan) and key(op) not in log.refused]
        if products:
            none = self._lowered(graph, in_base(plan, products), calibration, kept)
            blocks = Blocks(graph, eight, none)
            floats = blocks.floats(self.gpu)
            slower = [op for op in products if blocks.of(op) in floats]
            if 0 < len(slower) < len(products):
                mixed, both = in_base(plan, slower), f"{plan.default}+{plan.base}"
                found[both] = mixed, microseconds(self._lowered(graph, mixed, calibration, kept))
                self.reasons = blocks.reasons(slower, plan)
        self.times = {name: us for name, (_, us) in found.items()}
        self.plan = min(found.values(), key=lambda one: one[1])[0]
        return self.plan

    @property
    def all_in_base(self) -> bool:
        """Whether the float precision alone is predicted to be the fastest, or nearly so."""
        if self.base_us is None or not self.times:
            return False
        return (1.0 - LEAST_GAIN) * self.base_us <= min(self.times.values())

    def to_plain(self) -> dict[str, Any]:
        """For the engine's record of its build."""
        alone = {} if self.base_us is None else {plan_of(self.options).base: self.base_us}
        return {
            "asked": self.options.precision,
            "predicted_us": {k: round(us, 1) for k, us in {**self.times, **alone}.items()},
            **({"nodes": self.reasons} if self.plan is not None and self.plan.in_base and not self.all_in_base else {}),
        }

    def _lowered(
        self,
        graph: Graph,
        plan: PrecisionPlan,
        calibration: Calibration,
        kept: ConstantCache,
        log: PrecisionLog | None = None,
    ) -> Program:
        """The program that the cost model chooses for a plan, not compiled."""
        target, level = self.options.target, self.options.opt_level
        typed, _ = assigned(graph, plan, target, calibration, level, log, kept=kept)
        return lowered(typed, self.options, self.gpu, ConstantCache(shared=kept))


def _free(op: Op, plan: PrecisionPlan) -> bool:
    """Whether the mixture chooses for an op: a product that the plan puts in 8 bits, and that no pin names."""
    return op.kind in ANCHORS and not plan.named(op) and plan.of(op) in QUANTIZED


def in_base(plan: PrecisionPlan, ops: list[Op]) -> PrecisionPlan:
    """``plan`` with these ops in its float precision."""
    return replace(plan, in_base=frozenset(map(key, ops)))


def _whole(us: float) -> int:
    """Picoseconds: sums of whole numbers do not depend on their order, and so neither does the cut."""
    return round(us * 1e6)


class Blocks:
    """Sets of ONNX nodes such that no launch of two programs computes nodes of several sets, with their times in both."""

    def __init__(self, graph: Graph, eight: Program, none: Program):
        self.graph, self._sets = graph, UnionFind()
        ops = [op for op in graph.order() if op.kind not in STRUCTURAL and op.src]
        for nodes in (*(op.src for op in ops), *(s.src for p in (eight, none) for s in p.steps)):
            self._sets.union(*nodes)
        self.ops = ops
        self.times = {EIGHT: self._times(eight), FLOAT: self._times(none)}

    def of(self, op: Op) -> str:
        """The block of an op, by the name of one of its nodes."""
        return str(self._sets[next(iter(op.src))])

    def _times(self, program: Program) -> Mapping[str, float]:
        """Block -> predicted microseconds of its launches in a program."""
        found: dict[str, float] = {}
        for step, us in zip(program.steps, step_times(program), strict=True):
            for node in sorted(step.src)[:1]:
                block = self._sets[node]
                found[block] = found.get(block, 0.0) + us
        return found

    def floats(self, gpu: GpuFacts) -> set[str]:
        """The blocks that are computed as in the program without 8 bits, if the total is to be least."""
        cut = nx.DiGraph()
        for block in dict.fromkeys(map(self.of, self.ops)):
            cut.add_edge(FLOAT, (block,), capacity=_whole(self.times[EIGHT].get(block, 0.0)))
            cut.add_edge((block,), EIGHT, capacity=_whole(self.times[FLOAT].get(block, 0.0)))
        for op in self.ops:
            for value in dict.fromkeys(v for v in op.inputs if v is not None):
                source = self.graph.op(value)
                if source.src and source.kind not in STRUCTURAL and self.of(source) != self.of(op):
                    us = QUANTIZE_US + 0.75 * bytes_of(self.graph, value) * 1e6 / gpu.bandwidth
                    cut.add_edge((self.of(source),), (self.of(op),), capacity=_whole(us))
        _, (side, _) = nx.minimum_cut(cut, FLOAT, EIGHT)
        return {block for node in side if node != FLOAT for block in node}

    def reasons(self, ops: list[Op], plan: PrecisionPlan) -> dict[str, str]:
        """Node -> why the op of ``ops`` that it became is not in 8 bits."""
        found: dict[str, str] = {}
        for op in ops:
            us, slow = (self.times[side].get(self.of(op), 0.0) for side in (FLOAT, EIGHT))
            why = f"its launches are predicted to take {us:.1f} us in {plan.base}, {slow:.1f} in {plan.default}"
            if us >= slow:
                why = f"a neighbor is faster in {plan.base}, and quantizing its result takes a launch"
            found |= dict.fromkeys(sorted(op.src), why)
        return found
