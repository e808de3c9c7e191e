"""Norms over several last axes are rows of the kernel; softmax and norms of rows that are stored in 8 bits."""

from __future__ import annotations

import numpy as np
import pytest
from support.net import Net
from support.on_gpu import checked_launches
from support.simulated import check_simulated, kinds, lowered, refusals, tactics

from optdnn.ir.graph import Graph
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.quantized.quantizer import quantizer_of
from optdnn.ops import norm, softmax
from optdnn.ops.quant import DequantizeAttrs, QuantizeAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fold_quantized import FoldQuantized
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.types import FP32, INT8


@pytest.mark.parametrize("kept", [False, True])
def test_a_softmax_rounds_in_its_launch(kept: bool) -> None:
    """Attention with Q and DQ rounds its weights (AIMET, Quark). They are integers only if another launch reads the softmax, too."""
    n = Net()
    y = n.op("Softmax", n.matmul(n.input(8, 32), 64), attrs=softmax.SoftmaxAttrs(-1))
    zero = n.const(0, np.int8)
    q = n.op("QuantizeLinear", y, 1 / 127, zero, attrs=QuantizeAttrs(INT8))
    back = n.op("DequantizeLinear", q, 1 / 127, zero, attrs=DequantizeAttrs(FP32))
    values = n.op("Tanh", n.input(64, 16, name="values"))
    program = check_simulated(
        n.done(n.op("MatMul", back, values), *([n.matmul(y, 16)] if kept else [])), tolerance=2e-2
    )
    if kept:
        assert tactics(program, "Softmax") == ["rows_quantized"]
        (step,) = (s for s in program.steps if s.params["op"]["kind"] == "Quantized")
        assert len(step.params["writes"]) == 2
    else:
        assert tactics(program, "Softmax") == ["rows_activated"]
        assert kinds(program).count("ActivatedNorm") == 1
        assert "Quantized" not in kinds(program)


def test_a_softmax_stores_an_output_of_8_bits() -> None:
    """The last operators of a TFLite classifier."""
    n = Net()
    y = n.op("Softmax", n.matmul(n.input(8, 32), 64), attrs=softmax.SoftmaxAttrs(-1))
    graph = n.done(n.op("QuantizeLinear", y, 1 / 32, n.const(-128, np.int8), attrs=QuantizeAttrs(INT8)))
    assert tactics(check_simulated(graph, tolerance=2e-2), "Softmax") == ["rows_quantized"]


@pytest.mark.parametrize(
    ("strides", "offset", "dense"), [((64, 1), 0, True), ((128, 1), 0, False), ((64, 1), 8, False)]
)
def test_places_of_8_bit_rows(strides: tuple[int, int], offset: int, dense: bool) -> None:
    n = Net()
    y = n.op("Softmax", n.input(8, 64), attrs=softmax.SoftmaxAttrs(-1))
    graph = n.done(n.op("QuantizeLinear", y, 1 / 32, n.const(-128, np.int8), attrs=QuantizeAttrs(INT8)))
    FoldQuantized()(graph, PassContext(target="cuda:sm_90a"))
    (softmax_op,), (rounds,) = graph.of_kind("Softmax"), graph.of_kind("Pointwise")
    b = Builder(graph, of_arch("sm_90a"))
    assert quantizer_of(b, softmax_op.value, dense=True) is not None
    b.reserved[rounds.value] = TensorView(0, offset, (8, 64), strides, INT8)
    assert quantizer_of(b, softmax_op.value) is None
    assert (quantizer_of(b, softmax_op.value, dense=True) is not None) is dense


# ---- rows of several axes


def flat(
    shape: tuple[int, ...] = (3, 6, 48),
    axis: int = 1,
    *,
    bias: bool = True,
    scale: tuple[int, ...] = (),
    cut: bool = False,
) -> Graph:
    """A norm over the axes from ``axis`` on. ``scale``: the shape of its scale, if it is another one. ``cut``: of a part of the columns."""
    n = Net()
    x = n.op("Tanh", n.input(*shape[:-1], shape[-1] * (2 if cut else 1)))
    x = n.op("Slice", x, n.ints(0), n.ints(shape[-1]), n.ints(len(shape) - 1)) if cut else x
    own = [n.positive(*(scale or shape[axis:])), *([n.random(*shape[axis:])] if bias else [])]
    return n.done(n.op("LayerNormalization", x, *own, attrs=norm.LayerNormAttrs(axis, 1e-3)))


FLAT = {
    "two axes": flat(),
    "all axes": flat(axis=0),
    "three axes, without a bias": flat((2, 4, 3, 16), bias=False),
    "short rows of odd lengths": flat((4, 3, 5)),
    "a long row": flat((1, 96, 64)),
}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", FLAT)
def test_rows_of_several_axes(name: str, precision: str) -> None:
    program = check_simulated(FLAT[name], precision)
    (tactic,) = tactics(program, "LayerNormalization")
    assert tactic == "rows_flat"


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (flat(axis=2), "its rows are along the last axis alone"),
        (flat(scale=(48,)), "its scale and bias do not have the shape of a row"),
        (flat(cut=True), "its rows are not contiguous and aligned"),
        (flat((2, 512, 512)), "rows of 262144 elements do not fit the registers of a block"),
    ],
    ids=["one axis", "a scale of one axis", "a part of the columns", "too long"],
)
def test_refusals_of_rows_of_several_axes(graph: Graph, reason: str) -> None:
    program = lowered(graph, "fp32")
    assert "rows_flat" not in tactics(program, "LayerNormalization")
    assert reason in "; ".join(refusals(program, kind="LayerNormalization"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FLAT)
def test_rows_of_several_axes_on_a_gpu(name: str) -> None:
    checked_launches(FLAT[name], "fp16")
