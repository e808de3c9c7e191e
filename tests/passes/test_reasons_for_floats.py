"""Why operators between Q and DQ compute floats, as the report on precisions tells it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.quantized_nets import QNet, folded

from optdnn.compiler import build_verbose
from optdnn.config import BuildOptions
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvTransposeAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.quant import DequantizeAttrs


def product(weights: Callable[[QNet], Value]) -> Graph:
    n = QNet()
    return n.done(n.op("MatMul", n.fake(n.input(3, 8), 0.03), weights(n), attrs=MatMulAttrs()))


def stored(n: QNet, dtype: str = "int8", scale: Value | None = None, zero: int = 0, **attrs: int) -> Value:
    array = np.arange(64).reshape(8, 8) * (3 if dtype == "uint8" else 1)
    operands = [n.const(array, dtype), scale or n.const(0.01), n.const(zero, dtype)]
    return n.op("DequantizeLinear", *operands, attrs=DequantizeAttrs(**{"axis": 1, **attrs}))


def in_blocks(n: QNet) -> Value:
    operands = [n.const(np.ones((8, 8)), np.int8), n.const(np.full((2, 8), 0.01), np.float32)]
    return n.op("DequantizeLinear", *operands, attrs=DequantizeAttrs(0, block_size=4))


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (product(lambda n: n.random(8, 8)), "its second operand is not a quantized constant"),
        (
            product(lambda n: n.fake(n.input(8, 8, name="b"), 0.03)),
            "there is no kernel that multiplies computed integers",
        ),
        (product(in_blocks), "its weights have a scale per block"),
        (product(lambda n: stored(n, "int16")), "its weights are int16"),
        (product(lambda n: stored(n, "uint8", zero=10)), "its weights minus their zero points exceed 8 bits"),
        (product(lambda n: stored(n, scale=n.input(name="s"))), "the scales of its weights are computed"),
    ],
    ids=["floats", "computed", "blocks", "int16", "zero point", "computed scale"],
)
def test_products(graph: Graph, because: str) -> None:
    _, report = folded(graph)
    assert any(because in r.reason for r in report.refused if r.rule == "quantized_product")


def reported(graph: Graph) -> dict[str, tuple[str, str, str | None]]:
    """Kind -> the requested and the actual precision in a build for a GPU, and the reason."""
    options = BuildOptions(target="simulate", precision="fp16")
    rows = build_verbose(export_model(graph).proto.SerializeToString(), options).precisions
    return {r.asked.kind: (r.asked.precision, r.runs, r.reason) for r in rows}


def test_a_convolution_behind_a_max_pool_was_asked_for_int8() -> None:
    """The pool only compares integers: it has no row of its own."""
    n = QNet()
    rows = reported(n.done(n.qconv(n.pool(n.fake(n.input(2, 8, 9, 9), 0.03)), 8)))
    assert rows == {"Conv": ("int8", "int8", None)}


def test_an_average_between_integers_is_one_of_floats() -> None:
    n = QNet()
    y = n.average_pool(n.fake(n.qconv(n.fake(n.input(2, 8, 9, 9), 0.03), 8), 0.04), 3)
    rows = reported(n.done(n.qconv(n.fake(y, 0.02), 8)))
    assert rows["AveragePool"][:2] == ("int8", "fp16")
    assert "it reads and stores integers" in str(rows["AveragePool"][2])


def test_a_transposed_convolution_has_no_kernel_on_integers() -> None:
    n = QNet()
    w = n.weights(8, 4, 2, 2, axis=1)
    y = n.op(
        "ConvTranspose",
        n.fake(n.input(2, 8, 6, 6), 0.03),
        w,
        attrs=ConvTransposeAttrs((2, 2), (0,) * 4, (1, 1), (0, 0), 1),
    )
    rows = reported(n.done(n.fake(y, 0.02)))
    assert rows["ConvTranspose"] == ("int8", "fp16", "there is no kernel for it on integers")
