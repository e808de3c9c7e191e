"""joined_bags: bags of rows of several tables, side by side, become one Gather and one reduction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.joined_tables import JoinedTables
from optdnn.passes.rules import joined_bags
from optdnn.types import INT32, INT64


def bags(
    kind: str = "ReduceSum", *, count: int = 5, size: int = 3, stacked: bool = True, axis: int = 1, dense: bool = True,
    flat: bool = False, keep: bool = False, lengths: tuple[int, ...] = (), widths: tuple[int, ...] = (), used: bool = False,
    of: int = 1, dtype: Any = INT64, signed: bool = False,
) -> Graph:  # fmt: skip
    """Bags of ``size`` rows by inputs of their own (``kind`` "": single rows), stacked or side by side, with other features first.

    ``flat``: the indices are flattened before the Gather, as torch.export does; ``of``: the reduced axis."""
    n = Net(np.float64)
    parts = []
    for k in range(count):
        rows, width = lengths[k] if lengths else size, widths[k] if widths else 4
        index = n.input(6, *([rows] if kind else []), name=f"i{k}", dtype=dtype)
        index = index if signed else n.op("Abs", index)
        if flat:
            index = n.op("Reshape", index, n.ints(-1))
        x = n.op("Gather", n.random(7 + k, width), index, attrs=GatherAttrs(0))
        if flat:
            x = n.op("Reshape", x, n.ints(6, rows, width))
        if used and k == 0:
            other = n.op("Tanh", x)
        if kind:
            x = n.op(kind, x, n.ints(of), attrs=ReduceAttrs(keepdims=keep))
        parts.append(n.op("Unsqueeze", x, n.ints(1)) if stacked and not keep else x)
    if dense:
        parts.insert(0, n.input(6, *([1] if stacked else []), 4, name="dense"))
    y = n.op("Concat", *parts, attrs=ConcatAttrs(axis))
    return n.done(n.op("Relu", y), *([other] if used else []))


@pytest.mark.parametrize("kind", ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", ""])
@pytest.mark.parametrize("form", ["stacked", "side by side", "kept"])
def test_bags_become_one_gather_and_one_reduction(kind: str, form: str) -> None:
    graph = bags(kind, stacked=form != "side by side", keep=form == "kept" and bool(kind))
    after, _ = check_pass(JoinedTables(), graph, changes=1, rules={"joined_bags": 1})
    assert len(after.of_kind("Gather")) == 1
    assert sum(op.kind.startswith("Reduce") for op in after.ops()) == bool(kind)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_forms_of_exporters(flat: bool, dense: bool) -> None:
    after, _ = check_pass(JoinedTables(), bags(flat=flat, dense=dense, axis=-1), changes=1)
    assert len(after.of_kind("ReduceSum")) == 1


def test_indices_of_32_bits() -> None:
    check_pass(JoinedTables(), bags(dtype=INT32), changes=1)


def test_negative_indices_count_from_the_end_of_their_own_table() -> None:
    graph = bags(signed=True, dense=False)
    feeds = {f"i{k}": np.random.default_rng(k).integers(-7 - k, 7 + k, (6, 3)) for k in range(5)}
    (want,) = evaluate(graph, feeds).values()
    assert JoinedTables()(graph).changes == 1
    np.testing.assert_allclose(next(iter(evaluate(graph, feeds).values())), want, rtol=1e-12)


def test_the_longest_run_is_joined() -> None:
    after, _ = check_pass(JoinedTables(), bags(count=6, lengths=(2, 3, 3, 3, 3, 2)), changes=1)
    assert len(after.of_kind("Gather")) == 3


@pytest.mark.parametrize(
    "graph",
    [
        bags(count=3),
        bags(lengths=(2, 3, 2, 3, 2)),
        bags(widths=(4, 8, 4, 8, 4), stacked=False),
        bags(used=True, count=4),
        bags(stacked=False, axis=0),
        bags("ReduceL2"),
        bags(of=2, widths=(3,) * 5, size=4, dense=False),
    ],
    ids=["few", "lengths", "widths", "used", "below one another", "norms", "another axis"],
)
def test_others_stay(graph: Graph) -> None:
    check_untouched(JoinedTables(), graph)


def test_single_rows_may_have_other_readers() -> None:
    """FM and the first product of DeepFM read the same rows. An index that is computed may depend on them, and stays."""
    after, _ = check_pass(JoinedTables(), bags("", used=True, signed=True), changes=1, rules={"joined_bags": 1})
    assert len(after.of_kind("Gather")) == 1
    assert after.kinds()["Split"] == 1
    check_untouched(JoinedTables(), bags("", used=True, count=4))


def test_tables_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_bags, "MOST_BYTES", 100)
    check_refused(JoinedTables(), bags(), because="its tables are too large to be joined")


def test_their_launches() -> None:
    assert kinds(check_simulated(bags(dense=False), "fp16")).count("Gather") == 1
