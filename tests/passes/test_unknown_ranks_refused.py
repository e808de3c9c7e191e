"""Rewrites that need the rank of a tensor, where the model does not give it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_refused
from support.net import Net

from optdnn.ir.graph import Value
from optdnn.passes.base import Pass
from optdnn.passes.canonicalize import Canonicalize
from optdnn.passes.fuse_pointwise import FusePointwise
from optdnn.passes.fuse_siblings import FuseSiblings
from optdnn.types import TensorType

CASES: dict[str, tuple[Pass, Callable[[Net, Value], list[Value]], str]] = {
    "reshape_chain": (
        Canonicalize(), lambda n, x: [n.op("Squeeze", n.op("Unsqueeze", x, n.ints(0)), n.ints(1))], "a rank is unknown",
    ),
    "pointwise": (FusePointwise(), lambda n, x: [n.op("Sqrt", n.op("Sigmoid", x))], "the rank of the result is unknown"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_needs_a_rank(name: str) -> None:
    one, build, because = CASES[name]
    n = Net()
    x = n.graph.add_input("x", TensorType(np.dtype(np.float32), None))
    check_refused(one, n.done(*build(n, x)), because=because)


def test_products_of_a_vector_stay_apart() -> None:
    n = Net()
    x = n.input(8)
    check_refused(
        FuseSiblings(), n.done(*(n.op("MatMul", x, n.random(8, 8)) for _ in range(2))), because="it multiplies a vector"
    )
