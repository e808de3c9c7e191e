"""wide_products: 16-bit products whose results become fp32 store fp32 directly; so do norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds, lowered, tactics

from optdnn.ir.graph import Graph
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.shape import ReshapeAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.wide_products import WideProducts
from optdnn.types import FP32, FP64

GPU = PassContext(precision="fp16", target="cuda:sm_90a")


def net(
    *, rows: int = 5, columns: int = 24, dtype: Any = np.float16, to: Any = FP32, kind: str = "gemm", reader: bool = False,
    reshapes: int = 0, residual: bool = False, constant: bool = True,
) -> Graph:  # fmt: skip
    """A product with a bias and an activation, or a residual, as stages, and its conversion."""
    n = Net(dtype)
    x = n.input(rows, 16)
    if not constant:
        y = n.op("Gemm", x, n.input(16, columns, name="w"), attrs=GemmAttrs())
    else:
        y = n.gemm(x, columns) if kind == "gemm" else n.matmul(x, columns)
    y = n.op("Add", y, n.input(rows, columns, name="r")) if residual else n.op("Tanh", y)
    made = y
    for k in range(reshapes):
        made = n.op("Reshape", made, n.ints(*(1,) * (k + 1), rows, columns), attrs=ReshapeAttrs())
    graph = n.done(n.op("Cast", made, attrs=CastAttrs(to)), *([n.op("Relu", y)] if reader else []))
    FuseEpilogue()(graph)
    return graph


@pytest.mark.parametrize("kind", ["gemm", "matmul"])
@pytest.mark.parametrize("reshapes", [0, 2])
def test_the_conversion_is_the_last_stage(kind: str, reshapes: int) -> None:
    graph, _ = check_pass(WideProducts(), net(kind=kind, reshapes=reshapes), changes=1, promoted_changes=0, context=GPU)
    assert "Cast" not in graph.kinds()
    assert graph.kinds().get("Reshape", 0) == reshapes
    (product,) = graph.of_kind("Gemm", "MatMul")
    assert [s.kind for s in product.attrs.epilogue] == ["Tanh", "Cast"]
    assert product.outputs[0].type.dtype == FP32


@pytest.mark.parametrize(
    "given", [{"dtype": np.float32, "to": FP64}, {"to": FP64}, {"reader": True}, {"constant": False}]
)
def test_other_products_stay(given: dict[str, Any]) -> None:
    check_untouched(WideProducts(), net(**given), context=GPU)


def test_why_products_stay() -> None:
    for rows in (2, 5):
        check_refused(WideProducts(), net(rows=rows, columns=20), because="not a multiple of 8", context=GPU)
    check_refused(WideProducts(), net(residual=True), because="read r, which is not fp32", context=GPU)


def test_a_row_of_any_number_of_columns() -> None:
    """A policy's actions."""
    check_pass(WideProducts(), net(rows=1, columns=20), changes=1, promoted_changes=0, context=GPU)


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "target", "tactic"),
    [
        (1, 1024, 1000, "simulate", "gemv"),
        (1, 64, 13, "simulate", "gemv"),
        (3, 1024, 520, "simulate", "gemv"),
        (40, 64, 104, "simulate", "gemm_sm90"),
        (40, 60, 104, "simulate", "gemm_sm90"),
        (300, 64, 1000, "simulate", "gemm_sm90"),
        (40, 64, 104, "cuda:sm_80", "gemm_sm80"),
    ],
)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_one_launch_makes_fp32(rows: int, depth: int, columns: int, target: str, tactic: str, precision: str) -> None:
    n = Net()
    program = check_simulated(
        n.done(n.op("Relu", n.gemm(n.op("Relu", n.input(rows, depth)), columns))), precision, target=target
    )
    assert tactics(program, "Gemm") == [tactic]
    last = program.steps[-1]
    assert last.params["op"]["kind"] == "Conv"


def test_norms_store_fp32() -> None:
    n = Net()
    x = n.op("Relu", n.input(20, 96))
    program = check_simulated(n.done(n.op("LayerNormalization", x, n.random(96), n.random(96), attrs=LayerNormAttrs())))
    assert kinds(program)[-1] == "ActivatedNorm"


def test_an_activation_between_stays_in_the_norms_launch() -> None:
    n = Net()
    x = n.op("Relu", n.input(20, 96))
    y = n.op("LayerNormalization", x, n.random(96), n.random(96), attrs=LayerNormAttrs())
    assert kinds(lowered(n.done(n.op("Tanh", y))))[-2:] == ["ActivatedNorm", "Pointwise"]
