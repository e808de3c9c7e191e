"""Buffers of padded tensors contain everything that a tensor map reads of the last row, for any order of the axes."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import from_text
from support.net import Net
from support.simulated import check_simulated, feeds_of, kinds, lowered, simulate

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.kernels.builder import Builder, channels_last
from optdnn.ops.index import SplitAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.types import FP16


@pytest.mark.parametrize(
    ("shape", "strides", "elements"),
    [
        ((5, 3, 12), (48, 16, 1), 240),
        ((3, 5, 12), (16, 48, 1), 240),  # steps of a sequence before the batch
        ((2, 3, 4, 4), channels_last((2, 3, 4, 4), 8), 256),
        ((3, 4), (1, 3), 12),
        ((), (), 1),
    ],
)
def test_padded_rows_are_whole(shape: tuple[int, ...], strides: tuple[int, ...], elements: int) -> None:
    b = Builder(Graph("g"), of_arch("sm_90a"))
    b.new("x", FP16, shape, strides)
    (buffer,) = b.buffers
    assert buffer.nbytes == 2 * elements


def test_patches_are_cut_at_the_pitch_that_products_read() -> None:
    """14 x 14 pixels of three channels are 588 elements: no second launch adds space between rows."""
    n = Net()
    x = n.conv(n.input(2, 3, 28, 28), 16, 14, strides=14, pads=0)
    rows = n.op("Transpose", n.op("Reshape", x, n.ints(2, 16, 4)), attrs=TransposeAttrs((0, 2, 1)))
    program = check_simulated(n.done(rows))
    assert kinds(program) == ["Pointwise", "Conv"]  # it casts, too


def outputs(graph: Graph) -> None:
    """Lower and run a network, and compare its results with the reference."""
    program = lowered(graph, "fp32", "simulate")
    feeds = feeds_of(graph)
    expected, got = evaluate(graph, feeds), simulate(program, feeds)
    for name, want in expected.items():
        np.testing.assert_allclose(got[name], want, rtol=1e-5, equal_nan=True)


def test_a_result_without_elements_is_written_by_the_step_of_the_others() -> None:
    """A norm of no features has means and deviations, and a result without elements."""
    n = Net()
    x = n.input(2, 0)
    y, mean, deviation = n.op("LayerNormalization", x, n.const([]), attrs=LayerNormAttrs(axis=-1), outputs=3)
    outputs(n.done(y, mean, deviation))


def test_a_result_without_elements_that_no_step_writes_is_a_constant() -> None:
    n = Net()
    outputs(n.done(*n.op("Split", n.input(2, 4), n.ints(0, 4), attrs=SplitAttrs(-1), outputs=2)))


def test_a_result_without_elements_that_the_host_computes_is_a_constant() -> None:
    """A loop of no iterations runs on the host. A kernel reads its empty rows; the carried value has elements."""
    graph = from_text("""<ir_version: 8, opset_import: ["": 17]>
        g (float[2,4] x) => (float[2,4] last, float[2,4] sum, float[1,2,4] rows)
        <int64 n = {0}, bool go = {1}, int64[1] axis = {0}> {
            last, made = Loop(n, go, x) <body = b (int64 i, bool c, float[2,4] h) => (bool c2, float[2,4] h2, float[2,4] e) {
                c2 = Identity(c)  h2 = Tanh(h)  e = Neg(h2)
            }>
            sum = ReduceSum<keepdims = 0>(made, axis)
            one = Unsqueeze(x, axis)
            rows = Concat<axis = 0>(made, one)
        }""")
    outputs(graph)
