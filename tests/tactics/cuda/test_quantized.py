"""8-bit operators on the simulated GPU: to the bit what the graph says, for each kind and layout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.quantized_nets import QNet
from support.simulated import feeds_of, simulate

from optdnn.config import BuildOptions
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph, Value
from optdnn.lower_cuda import lower_cuda
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.assign_layout import AssignLayout
from optdnn.passes.base import PassContext
from optdnn.passes.fold_quantized import FoldQuantized
from optdnn.passes.integers import MoveIntegers, RecentreIntegers
from optdnn.runtime.program import Program, validate
from optdnn.types import FP16

HOPPER = PassContext(target="cuda:sm_90a")


def built(graph: Graph) -> tuple[Graph, Program]:
    copy = graph.copy()
    RecentreIntegers()(copy, HOPPER)
    MoveIntegers()(copy, HOPPER)
    FoldQuantized()(copy, HOPPER)
    AssignLayout()(copy, HOPPER)
    program = lower_cuda(copy, BuildOptions(target="simulate"), "simulate", {})
    validate(program)
    return copy, program


def residual_block(n: QNet, x: Value) -> Value:
    a = n.fake(n.qconv(x, 24, epilogue=(Stage("Relu", (-1,)),)), 0.03)
    return n.fake(n.qconv(a, 16, 1, epilogue=(Stage("Add", (-1, 3)), Stage("Relu", (-2,))), more=[x]), 0.04)


NETS: dict[str, Callable[[QNet], tuple[Value, ...]]] = {
    "a residual block": lambda n: (residual_block(n, n.fake(n.input(2, 16, 9, 7), 0.03)),),
    "odd channels": lambda n: (n.fake(n.qconv(n.fake(n.qconv(n.fake(n.input(2, 3, 9, 7), 0.03), 21), 0.04), 5), 0.05),),
    "a strided convolution, float result": lambda n: (n.qconv(n.fake(n.input(2, 16, 9, 7), 0.03), 24, stride=2),),
    "pools": lambda n: (
        n.fake(n.op("GlobalAveragePool", n.fake(n.pool(n.fake(n.qconv(n.fake(n.input(2, 16, 9, 9), 0.03), 32), 0.04)), 0.04)), 0.02),
    ),
    "concatenation in place": lambda n: (
        n.qconv(
            n.fake(
                n.op("Concat", *(n.fake(n.qconv(x, c), 0.04) for x in [n.fake(n.input(2, 16, 6, 6), 0.03)] for c in (16, 24)),
                     attrs=ConcatAttrs(1)),
                0.04,
            ),
            16,
        ),
    ),
    "a stem": lambda n: (n.fake(n.pool(n.fake(n.qconv(n.fake(n.input(2, 3, 34, 30), 0.03), 16, 7, stride=2), 0.04)), 0.04),),
    "depthwise": lambda n: (
        n.fake(n.qconv(n.fake(n.qconv(n.fake(n.input(2, 32, 9, 7), 0.03), 32, group=32), 0.04), 32, 5, stride=2, group=32), 0.04),
    ),
    "depthwise, float result": lambda n: (
        n.op("Relu", n.op("Cast", n.qconv(n.fake(n.input(2, 16, 9, 7), 0.03), 16, group=16), attrs=CastAttrs(FP16))),
    ),
    "a perceptron": lambda n: (n.qgemm(n.fake(n.op("Relu", n.qgemm(n.fake(n.input(5, 33), 0.03), 40)), 0.03), 10),),
    "rows of three axes": lambda n: (n.fake(n.qmatmul(n.fake(n.input(3, 5, 32), 0.03), 24), 0.04),),
    "addition": lambda n: (
        n.q(n.op("Add", n.fake(n.input(2, 16, 5, 5), 0.03), n.fake(n.input(2, 16, 5, 5, name="b"), 0.05)), 0.06),
    ),
    "uint8": lambda n: (
        n.fake(n.qconv(n.fake(n.input(2, 16, 9, 7), 0.03, 0, np.uint8), 32), 0.04, 100, np.uint8),
    ),
    "zero points": lambda n: (
        n.fake(
            n.qconv(n.fake(n.qconv(n.fake(n.input(2, 3, 9, 7), 0.03, 117, np.uint8), 32, stride=2), 0.04, 90, np.uint8), 20),
            0.04, -3,
        ),
    ),
    "zero points, depthwise": lambda n: (
        n.fake(
            n.qconv(n.fake(n.qconv(n.fake(n.input(2, 32, 9, 7), 0.03, 117, np.uint8), 32, group=32), 0.04, -9), 32, 5, stride=2, group=32),
            0.04,
        ),
    ),
    "zero points, a perceptron": lambda n: (
        n.qgemm(n.fake(n.op("Relu", n.qgemm(n.fake(n.input(5, 33), 0.03, 80, np.uint8), 40)), 0.03, -128), 10),
    ),
    "zero points, a residual block and pools": lambda n: (
        n.fake(n.op("GlobalAveragePool", n.fake(n.pool(n.fake(n.qconv(
            n.fake(n.qconv(x, 24, 1), 0.03, 121, np.uint8), 16, 3, epilogue=(Stage("Add", (-1, 3)),), more=[x]), 0.04, 140, np.uint8)),
            0.04, 140, np.uint8)), 0.02, 133, np.uint8)
        for x in [n.fake(n.input(2, 16, 9, 9), 0.03, 125, np.uint8)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_simulate_computes_what_the_graph_says(name: str) -> None:
    n = QNet()
    graph, program = built(n.done(*NETS[name](n)))
    feeds, other = feeds_of(graph), feeds_of(graph, 2)
    got = simulate(program, feeds)
    different = evaluate(graph, other)
    for output, want in evaluate(graph, feeds).items():
        np.testing.assert_array_equal(got[output], want)
        assert (got[output] != different[output]).mean() > 0.2
    assert all(s.executor == "cuda" for s in program.steps)


def tactics(program: Program) -> list[str]:
    return [t["tactic"] for t in program.meta["tactics"]]


def test_chains_stay_in_8_bits() -> None:
    n = QNet()
    _, program = built(n.done(residual_block(n, residual_block(n, n.fake(n.input(2, 16, 9, 7), 0.03)))))
    floats = [b for b in program.buffers if b.dtype == np.float32 and b.blob is None]
    assert len(floats) == 2  # the network's input and output
    assert tactics(program).count("conv_sm90_8bit") == 4
    kinds = [s.params["op"]["kind"] for s in program.steps]
    assert kinds == ["Pointwise", "Copy", *["QuantizedConv"] * 4, "Copy", "Pointwise"]  # copies: the border's order


def test_parts_of_a_concatenation_are_written_in_place() -> None:
    n = QNet()
    _, program = built(n.done(*NETS["concatenation in place"](n)))
    kinds = [s.params["op"]["kind"] for s in program.steps]
    assert kinds.count("QuantizedConv") == 3
    joint = {s.outputs for s in program.steps if s.params["op"]["kind"] == "QuantizedConv"}
    assert len(joint) == 2  # both parts in one buffer, and the result


def test_a_stem_quantizes_its_image_and_reads_pixels_together() -> None:
    n = QNet()
    _, program = built(n.done(*NETS["a stem"](n)))
    kinds = [s.params["op"]["kind"] for s in program.steps]
    assert kinds == ["QuantizedBlocks", "QuantizedConv", "MaxPool", "Copy", "Pointwise"]
    assert "max_pool_8bit" in tactics(program)
