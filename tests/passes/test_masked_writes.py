"""masked_writes: weights of self-loops among a graph's edges, written to their nodes."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched, from_text
from support.simulated import check_simulated

from optdnn.ir.evaluate import evaluate
from optdnn.passes.base import PassContext
from optdnn.passes.masked_rows import MaskedRows
from optdnn.passes.rules import masked_writes

GPU = PassContext(target="cuda:sm_90a")
TEXT = """<ir_version: 10, opset_import: ["": 18]>
g (float[10,4] w, int64[2,10] edges) => (float[6,4] y)
<int64 zero = {0}, int64 one = {1}, int64[1] flat = {-1}, int64[2] column = {-1, 1}, int64[2] wide = {1, 4}, float base0 = {2},
 int64[2] sizes = {6, 4}>
{ from = Gather(edges, zero) to = Gather(edges, one) mask = Equal(from, to) chosen = NonZero(mask) i = Reshape(chosen, flat)
  rows = Gather(w, i) message = Exp(rows) at = Gather(from, i) at1 = Reshape(at, column) base = Expand(base0, sizes) WRITE }"""
ND = "y = ScatterND(base, at1, message)"
ELEMENTS = "at4 = Expand(at1, wide) y = ScatterElements<axis = 0>(base, at4, message)"


def text(write: str = ND) -> str:
    return TEXT.replace("WRITE", write)


@pytest.mark.parametrize(("write", "kind"), [(ND, "ScatterND"), (ELEMENTS, "ScatterElements")])
def test_rows_are_written_among_all(write: str, kind: str) -> None:
    done, _ = check_pass(MaskedRows(), text(write), changes=1, rules={"masked_writes": 1}, context=GPU)
    kinds = done.kinds()
    assert "NonZero" not in kinds
    assert (kinds[kind], kinds["Where"], kinds["Slice"]) == (1, 1, 1)
    assert all(op.outputs[0].type.is_static for op in done.ops())


def test_the_last_of_several_rows_for_one_place_stays() -> None:
    graph = from_text(text())
    after = graph.copy()
    MaskedRows()(after, GPU)
    rng = np.random.default_rng(0)
    for loops in (0, 5, 10):
        ends = rng.integers(0, 3, 10)
        pairs = np.stack([ends, np.where(np.arange(10) < loops, ends, ends + 1)])
        feeds = {"w": rng.standard_normal((10, 4)).astype(np.float32), "edges": pairs}
        np.testing.assert_array_equal(evaluate(after, feeds)["y"], evaluate(graph, feeds)["y"])


def test_no_row_is_written_on_the_cpu() -> None:
    program = check_simulated(from_text(text()), "fp32")
    assert {s.executor for s in program.steps} <= {"cuda", "view"}


def test_writes_along_another_axis_are_refused() -> None:
    turned = """at4 = Expand(at1, wide) base10 = Expand(base0, square) z = ScatterElements<axis = 1>(base10, at4, message)
      y = Slice(z, zeros, sizes)"""
    given = text(turned).replace(
        "int64[2] sizes = {6, 4}", "int64[2] sizes = {6, 4}, int64[2] square = {10, 6}, int64[2] zeros = {0, 0}"
    )
    check_refused(MaskedRows(), given, because="along another axis", rule="masked_writes", context=GPU)


def test_rows_whose_number_is_known_are_no_candidates() -> None:
    check_untouched(MaskedRows(), text("at0 = Gather(from, flat) y = ScatterND(base, wrong, w)").replace(
        "at0 = Gather(from, flat)", "wrong = Reshape(from, column)"), GPU)  # fmt: skip


EXPERT = """<ir_version: 10, opset_import: ["": 18]>
g (float[6,4] x, float[6,3] weights, bool[3,6] mask, float[6,4] base) => (float[6,4] y)
<int64 three = {3}, int64[1] flat = {-1}, int64[2] column = {-1, 1}, int64[2] wide = {1, 4}, int64[2] half = {1, 2}>
{ chosen = NonZero(mask) pairs = Transpose<perm = [1, 0]>(chosen) c, t = Split<axis = 1, num_outputs = 2>(pairs)
  choice = Reshape(c, flat) token = Reshape(t, flat) rows = Gather(x, token) message = Exp(rows)
  each = Reshape(weights, flat) first = Mul(token, three) at = Add(choice, first) weight = Gather(each, at)
  factor = Reshape(weight, column) scaled = Mul(message, factor) WRITE }"""
"""An expert's results for the tokens that choose it, as a mixture of experts is exported."""
TOKENS = "at4 = Expand(t, wide) y = ScatterElements<axis = 0>(base, at4, scaled)"
"""``t``: a column of the tokens."""


@pytest.mark.parametrize(
    ("write", "kind"), [(TOKENS, "ScatterElements"), ("y = ScatterND(base, t, scaled)", "ScatterND")]
)
def test_rows_at_positions_of_the_mask_are_selected(write: str, kind: str) -> None:
    given = EXPERT.replace("WRITE", write)
    done, _ = check_pass(MaskedRows(), given, changes=1, rules={"masked_writes": 1}, context=GPU)
    kinds = done.kinds()
    assert kinds["Where"] == 3  # one for each choice
    assert not {"NonZero", kind} & set(kinds)
    graph, rng = from_text(given), np.random.default_rng(0)
    for share in (0.0, 0.5, 1.0):  # the last choice of several remains
        feeds = {
            n: rng.standard_normal(s).astype(np.float32)
            for n, s in {"x": (6, 4), "weights": (6, 3), "base": (6, 4)}.items()
        }
        feeds["mask"] = rng.random((3, 6)) < share
        np.testing.assert_array_equal(evaluate(done, feeds)["y"], evaluate(graph, feeds)["y"])


@pytest.mark.parametrize(
    "write",
    [
        "at4 = Expand(c, wide) y = ScatterElements<axis = 0>(base, at4, scaled)",  # the choices are no tokens
        "two = Slice(scaled, begin, end, axis) at2 = Expand(t, half) y = ScatterElements<axis = 0>(base, at2, two)",
    ],
)
def test_other_positions_and_parts_of_rows_are_scattered(write: str) -> None:
    given = EXPERT.replace("WRITE", write).replace(
        "int64[2] half = {1, 2}",
        "int64[2] half = {1, 2}, int64[1] begin = {0}, int64[1] end = {2}, int64[1] axis = {1}",
    )
    done, _ = check_pass(MaskedRows(), given, changes=1, rules={"masked_writes": 1}, context=GPU)
    assert done.kinds()["ScatterElements"] == 1


def test_many_choices_are_scattered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_writes, "MOST_CHOICES", 2)
    done, _ = check_pass(MaskedRows(), EXPERT.replace("WRITE", TOKENS), changes=1, context=GPU)
    assert done.kinds()["ScatterElements"] == 1


def test_experts_run_on_the_gpu() -> None:
    program = check_simulated(from_text(EXPERT.replace("WRITE", TOKENS)), "fp32")
    assert {s.executor for s in program.steps} <= {"cuda", "view"}
