"""Norms of short rows: the rows that share a warp, and the operators that are fused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_launches
from support.on_processor import compare_steps
from support.simulated import check_simulated, feeds_of, kinds, lowered
from support.sweep import sweep
from support.timer import FakeTimer, hashed
from support.tuned import tuned

from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Move, TensorView
from optdnn.kernels.norm import short_rows
from optdnn.kernels.norm.short_rows import ShortRows
from optdnn.kernels.tactic import Region
from optdnn.lowering.choose import Site
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.ops.norm import LayerNormAttrs, LpNormAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.program import Step
from optdnn.types import FP16


def norms(
    size: int = 32, axis: int = -1, p: int = 2, epsilon: float = 1e-12, factor: Any = None, offset: int = 0
) -> Graph:
    """Heads of the columns of a product. Each of their rows is normalized. ``factor``: a factor of the result."""
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
    """Rows of a part of the columns of a product, with gaps between them."""
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
        (lambda: norms(24), "a power of two of lanes cannot share rows of 24 elements"),
        (lambda: norms(512), "cannot share rows of 512 elements"),
        (lambda: norms(offset=4), "its rows do not consist of aligned accesses of 16 bytes"),
    ],
)
def test_other_rows_are_refused(graph: Any, because: str) -> None:
    program = lowered(graph(), "fp16", target="cuda:sm_90a")
    (row,) = [t for t in program.meta["tactics"] if t["kind"] == "LpNormalization"]
    assert row["tactic"] == ("rows_once" if "cannot share" in because else "rows")
    assert because in next(r["reason"] for r in row["refused"] if r["tactic"] == "short_rows")


def test_a_computed_factor_stays_after_the_norm() -> None:
    n = Net()
    x = n.op("Relu", n.matmul(n.input(4, 24), 32))
    y = n.op("Mul", n.op("LpNormalization", x, attrs=LpNormAttrs(-1, 2, 1e-12)), n.op("Exp", n.input(4, 1, name="f")))
    program = check_simulated(n.done(n.matmul(y, 8)))
    assert "LpNormalization" in kinds(program)


def pair(
    kind: str = "LpNormalization", size: int = 32, *, groups: int = 3, factor: bool = False, second: float = 1e-12, between: bool = False
) -> Graph:  # fmt: skip
    """Queries and keys of one product, with norms of their heads (Swin V2, YOSO).

    ``factor``: queries are multiplied by a temperature. ``between``: an operator reads the queries before the keys are
    normalized.
    """
    n = Net()
    whole = n.matmul(n.input(2, 5, 24), (3 + groups) * size)
    parts = n.op("Split", whole, n.ints(3 * size, groups * size), attrs=SplitAttrs(2), outputs=2)
    q, k = (
        n.op("Transpose", n.op("Reshape", x, n.ints(2, 5, -1, size)), attrs=TransposeAttrs((0, 2, 1, 3)))
        for x in parts  # type: ignore[union-attr]
    )
    rows = kind != "LpNormalization"
    q, k = (
        n.op(
            kind,
            x,
            *([n.positive(size)] if rows else []),
            attrs=LayerNormAttrs(epsilon=e) if rows else LpNormAttrs(-1, 2, e),
        )
        for x, e in ((q, 1e-12), (k, second))
    )
    q = n.op("Mul", q, n.const(TEMPERATURE)) if factor else q
    return n.done(n.op("Exp", n.op("ReduceSum", q)) if between else n.op("Exp", q), n.op("Tanh", k))


def selected() -> Graph:
    """Queries, keys and values of one product, stacked along an axis from which Gathers select (torchvision's Swin V2)."""
    n = Net()
    whole = n.op("Reshape", n.matmul(n.input(2, 5, 24), 3 * 3 * 32), n.ints(2, 5, 3, 3, 32))
    turned = n.op("Transpose", whole, attrs=TransposeAttrs((2, 0, 3, 1, 4)))
    q, k = (n.op("Gather", turned, n.const(np.array(i), np.int64), attrs=GatherAttrs(0)) for i in (0, 1))
    q, k = (n.op("LpNormalization", x, attrs=LpNormAttrs(-1, 2, 1e-12)) for x in (q, k))
    return n.done(n.op("Exp", q), n.op("Tanh", k))


PAIRS = {
    "pair": pair(),
    "selected": selected(),
    "pair, a temperature": pair(factor=True),
    "pair, grouped": pair(size=64, groups=1),
    "pair of RMS norms": pair("RMSNormalization", 128),
    "pair of layer norms": pair("LayerNormalization", 8),
}


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("name", PAIRS)
def test_two_norms_share_a_launch(name: str, precision: str) -> None:
    program = check_simulated(PAIRS[name], precision)
    assert kinds(program).count("NormPair") == 1
    assert not {"ActivatedNorm", "LpNormalization", "RMSNormalization", "LayerNormalization"} & set(kinds(program))


@pytest.mark.nvrtc
def test_tuning_where_the_first_norm_has_a_factor_after_it() -> None:
    """The pair's launch replaces that of the first norm, which includes the factor: an operator without candidates of its own."""
    found, _ = tuned(FakeTimer(hashed), graph=PAIRS["pair, a temperature"].copy())
    assert any(t.choice.tactic == "short_rows_pair" for p in found.problems for t in p.trials)


@needs_compiler
@pytest.mark.parametrize("name", sweep([*PAIRS, *CASES], *list(PAIRS)[::3], *list(CASES)[::3]))
def test_the_kernel_on_the_processor(name: str, tmp_path: Path) -> None:
    graph = (PAIRS | CASES)[name]
    compare_steps(lowered(graph, opt_level=2), feeds_of(graph), 4e-3, tmp_path)


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (lambda: norms(), "no other norm of the same form reads another part of its tensor"),
        (lambda: pair(second=1e-6), "no other norm of the same form reads another part of its tensor"),
        (lambda: pair(), "the other norm comes after it"),
    ],
)
def test_norms_that_keep_launches_of_their_own(graph: Any, because: str) -> None:
    found = [
        r for t in lowered(graph()).meta["tactics"] for r in t.get("refused", ()) if r["tactic"] == "short_rows_pair"
    ]
    assert because in {r["reason"] for r in found}


def test_the_results_readers_in_between_keep_norms_apart() -> None:
    n = Net()
    q = n.op("Tanh", n.input(4, 32))
    graph = n.done(n.op("Exp", q))
    norm, reader = (graph.of_kind(kind)[0] for kind in ("Tanh", "Exp"))
    result, other = (TensorView(k, 0, (4, 32), (32, 1), FP16) for k in (5, 6))

    def site(op: Op) -> Site:
        return Site(Region(op), "", ShortRows(), None, [])

    def read(*entries: Any) -> bool:
        b: Any = SimpleNamespace(
            plan=[Move(reader, (result,), other), site(norm), *entries], place={norm.value: result}
        )
        return short_rows._is_read(b, norm, result)

    assert not read()
    assert not read(Move(reader, (other,), result))
    assert read(Move(reader, (result,), other))
    assert read(site(reader))
    assert read(Step("host", {}, (5,), (6,)))
    assert not read(Step("host", {}, (6,), (5,)))


@pytest.mark.parametrize("rows", [False, True])
def test_results_lie_in_the_order_in_which_they_are_read(rows: bool) -> None:
    """YOSO concatenates the heads of normalized results without a copy. If heads stay separate, the result is dense anyway."""
    n = Net()
    x = n.op("Transpose", n.op("Tanh", n.input(1, 5, 3, 32)), attrs=TransposeAttrs((0, 2, 1, 3)))
    y = n.op("LpNormalization", n.op("Reshape", x, n.ints(3, 5, 32)), attrs=LpNormAttrs(-1, 2, 1e-12))
    if rows:
        y = n.op("Transpose", n.op("Reshape", y, n.ints(1, 3, 5, 32)), attrs=TransposeAttrs((0, 2, 1, 3)))
        y = n.matmul(n.op("Reshape", y, n.ints(1, 5, 96)), 8)
    program = check_simulated(n.done(n.op("ReduceSum", y)))
    assert "LpNormalization" in kinds(program)
    assert kinds(program).count("Copy") == 0


@pytest.mark.hopper
@pytest.mark.parametrize("name", [*CASES, *APART, *PAIRS])
def test_every_launch_agrees_with_its_meaning(name: str) -> None:
    graph = (CASES | APART | PAIRS)[name]
    checked_launches(graph, "fp16")


@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization"])
def test_windows_of_fp32_rows_are_stored_in_fp16(kind: str) -> None:
    """The product in tf32 that reads them reads fp16 (half_factors)."""
    n = Net()
    y = n.op(kind, n.input(2, 4, 4, 64), n.positive(64), *([n.random(64)] if kind == "LayerNormalization" else []))
    y = n.op("Transpose", n.op("Reshape", y, n.ints(2, 2, 2, 2, 2, 64)), attrs=TransposeAttrs((0, 1, 3, 2, 4, 5)))
    program = check_simulated(n.done(n.matmul(n.op("Reshape", y, n.ints(8, 4, 64)), 64)), "tf32")
    assert program.steps[0].params["tactic"] == "short_rows"
    assert len(program.steps) == 2
