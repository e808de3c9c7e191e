"""rows_of_gemm: a Gemm between two Reshapes becomes a product of the rows as they are, which a Transpose can pass."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_untouched
from support.net import Net

from optdnn.ir.graph import Graph
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.shape import ReshapeAttrs, TransposeAttrs
from optdnn.passes.canonicalize import Canonicalize

CANON = Canonicalize()
BATCH, TOKENS, C = 3, 5, 8


def rows(
    *,
    perm: tuple[int, ...] = (1, 0, 2),
    after: tuple[int, ...] = (TOKENS, BATCH, 6),
    bias: str = "one",
    alpha: float = 1.0,
) -> Graph:
    """``reshape(gemm(reshape(transpose(x))))``, as onnxslim writes the projection of PyTorch's MultiheadAttention."""
    n = Net(np.float64)
    x = n.op("Transpose", n.op("Tanh", n.input(BATCH, TOKENS, C)), attrs=TransposeAttrs(perm))
    k = n.dims(x)[-1]
    assert isinstance(k, int)
    joined = n.op("Reshape", x, n.ints(-1, k))
    more = {"": [], "one": [n.random(6)], "each": [n.random(TOKENS * BATCH, 6)]}[bias]
    y = n.op("Gemm", joined, n.random(6, k), *more, attrs=GemmAttrs(transB=True, alpha=alpha))
    return n.done(n.op("Sin", n.op("Reshape", y, n.ints(*after))))


@pytest.mark.parametrize("bias", ["", "one"])
@pytest.mark.parametrize("after", [(TOKENS, BATCH, 6), (1, TOKENS, BATCH, 2, 3)])
def test_rows_keep_their_axes(bias: str, after: tuple[int, ...]) -> None:
    graph, _ = check_pass(CANON, rows(after=after, bias=bias), changes=1, rules={"rows_of_gemm": 1})
    assert not graph.of_kind("Gemm")
    assert graph.type(graph.of_kind("MatMul")[0].value).static_shape == (TOKENS, BATCH, 6)
    assert len(graph.of_kind("Reshape")) == (len(after) > 3)


def test_other_gemms_stay() -> None:
    check_untouched(CANON, rows(after=(BATCH, TOKENS, 6)))
    check_pass(CANON, rows(bias="each"), changes=1, rules={"gemm_addend": 1})
    check_untouched(CANON, rows(alpha=2.0))


@pytest.mark.parametrize(("batch", "depth", "changes"), [(0, 4, 1), (2, 0, 0)])
def test_empty_tensors(batch: int, depth: int, changes: int) -> None:
    """Rows without elements can be split in any way: a Gemm may have more of them."""
    n = Net(np.float64)
    rows = 4 if depth == 0 else 0
    joined = n.op(
        "Reshape", n.op("Tanh", n.input(batch, 3, depth)), n.ints(rows, depth), attrs=ReshapeAttrs(allowzero=True)
    )
    y = n.op("Gemm", joined, n.random(depth, 6), n.random(6), attrs=GemmAttrs())
    y = n.op("Reshape", y, n.ints(batch, 3, *((6,) if changes else (4,))), attrs=ReshapeAttrs(allowzero=True))
    check_pass(CANON, n.done(n.op("Sin", y)), changes=changes, depends_on_input=False)


def test_heads_are_joined_before_the_product() -> None:
    n = Net(np.float64)
    y = n.op("Transpose", n.op("Tanh", n.input(BATCH, 2, TOKENS, C)), attrs=TransposeAttrs((0, 2, 1, 3)))
    y = n.gemm(n.op("Reshape", y, n.ints(BATCH * TOKENS, 2 * C)), 6)
    y = n.op("Sin", n.op("Reshape", y, n.ints(BATCH, TOKENS, 6)))
    graph, _ = check_pass(
        CANON, n.done(y), changes=1, kinds={"Reshape": 1, "MatMul": 1, "Add": 1, "Transpose": 1, "Tanh": 1, "Sin": 1}
    )
    assert graph.type(graph.of_kind("Reshape")[0].value).static_shape == (BATCH, TOKENS, 2 * C)
