"""Norms of short rows: which rows the lanes of a warp share, and what goes along."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.needs import why_no_hopper
from support.net import Net
from support.simulated import check_simulated, feeds_of, kinds, lowered

from optdnn.ir.graph import Graph
from optdnn.ops.norm import LpNormAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.trials.check import check_steps
from optdnn.runtime.engine import Engine


def norms(
    size: int = 32, axis: int = -1, p: int = 2, epsilon: float = 1e-12, factor: Any = None, offset: int = 0
) -> Graph:
    """Heads of the columns of a product, each row of which is normalized; ``factor``: what multiplies them."""
    n = Net()
    batch, tokens, heads = 2, 5, 3
    whole = n.matmul(n.input(batch, tokens, 24), offset + heads * size)
    if offset:
        whole = n.op("Slice", whole, n.ints(offset), n.ints(offset + heads * size), n.ints(2))
    x = n.op(
        "Transpose", n.op("Reshape", whole, n.ints(batch, tokens, heads, size)), attrs=TransposeAttrs((0, 2, 1, 3))
    )
    y = n.op("LpNormalization", x, attrs=LpNormAttrs(axis, p, epsilon))
    if factor is not None:
        y = n.op("Mul", y, n.const(factor))
    return n.done(n.op("MatMul", y, n.op("Transpose", n.op("Relu", x), attrs=TransposeAttrs((0, 1, 3, 2)))))


TEMPERATURE = np.array([1.5, 0.5, 2.0], np.float32).reshape(3, 1, 1)
CASES = {
    "plain": norms(),
    "part of columns": norms(64, offset=16, epsilon=0.0),
    "temperature": norms(factor=TEMPERATURE),
    "each feature": norms(8, factor=np.linspace(0.5, 2, 8, dtype=np.float32)),
    "widest": norms(128, factor=TEMPERATURE),
}


def apart(kind: str, size: int = 64) -> Graph:
    """Rows of a part of the columns of a product, which do not lie one after the other."""
    n = Net()
    whole = n.matmul(n.input(3, 7, 24), 2 * size)
    x = n.op("Slice", whole, n.ints(size), n.ints(2 * size), n.ints(2))
    y = n.op(kind, x, n.positive(size), *([n.random(size)] if kind == "LayerNormalization" else []))
    return n.done(n.matmul(y, 8))


APART = {kind: apart(kind) for kind in ("LayerNormalization", "RMSNormalization")}


@pytest.mark.parametrize("kind", APART)
def test_other_norms_of_rows_that_lie_apart(kind: str) -> None:
    program = check_simulated(APART[kind])
    assert "short_rows" in {t["tactic"] for t in program.meta["tactics"] if t["kind"] == kind}


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_rows_that_lanes_share(name: str, precision: str) -> None:
    program = check_simulated(CASES[name], precision)
    assert "short_rows" in {t["tactic"] for t in program.meta["tactics"] if t["kind"] == "LpNormalization"}
    scaled = "Mul" in {op.kind for op in CASES[name].order()}
    assert ("ActivatedNorm" if scaled else "LpNormalization") in kinds(program)


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (lambda: norms(p=1), "it is for norms"),
        (lambda: norms(axis=2), "its rows are not along the last axis"),
        (lambda: norms(24), "rows of 24 elements are not shared by a power of two of lanes"),
        (lambda: norms(512), "rows of 512 elements are not shared"),
        (lambda: norms(offset=4), "its rows do not lie in whole accesses of 16 bytes"),
    ],
)
def test_other_rows_are_refused(graph: Any, because: str) -> None:
    program = lowered(graph(), "fp16", target="cuda:sm_90a", no_cubins=True)
    (row,) = [t for t in program.meta["tactics"] if t["kind"] == "LpNormalization"]
    assert row["tactic"] == "rows"
    assert because in row["refused"][0]["reason"]


def test_a_factor_that_is_computed_stays_behind() -> None:
    n = Net()
    x = n.op("Relu", n.matmul(n.input(4, 24), 32))
    y = n.op("Mul", n.op("LpNormalization", x, attrs=LpNormAttrs(-1, 2, 1e-12)), n.op("Exp", n.input(4, 1, name="f")))
    program = check_simulated(n.done(n.matmul(y, 8)))
    assert "LpNormalization" in kinds(program)


@pytest.mark.gpu
@pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")
@pytest.mark.parametrize("name", [*CASES, *APART])
def test_every_launch_does_what_its_step_means(name: str) -> None:
    graph = (CASES | APART)[name]
    context: Any = Engine(lowered(graph, "fp16", target="cuda:sm_90a")).context()
    assert not [e for e in check_steps(context, feeds_of(graph)) if not e.error < 4e-3]
