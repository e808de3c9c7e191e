"""best_rows: the best of the scores above a threshold are selected from all scores, so that their readers have known sizes."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched, from_text
from support.sweep import all_pairs

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.passes.base import PassContext
from optdnn.passes.fold_constants import FoldConstants
from optdnn.passes.masked_rows import MaskedRows
from optdnn.passes.pad_rows import MANY, PadRows

GPU = PassContext(target="cuda:sm_90a")
LEVEL = """<ir_version: 9, opset_import: ["": 17]>
g (float[12] SCORES, float[12,4] boxes) => (float[n] best, float[n,4] found, int64[n] numbers)
<float t = {THRESHOLD}, int64[1] flat = {-1}, int64[2] tall = {-1, 1}, int64[1] most = {MOST}>
{ SIZE above = Greater(scores, t) chosen = NonZero(above) i = Reshape(chosen, flat) column = Reshape(chosen, tall)
  kept = GatherND(scores, column) size = Shape(kept) pair = Concat<axis = 0>(most, size)
  least = ReduceMin<keepdims = 0>(pair) k = Reshape(least, flat)
  best, j = TopK<axis = 0, largest = LARGEST>(kept, k) numbers = Gather(i, j)
  rows = Gather(boxes, numbers) DECODE }
"""
SHORT = "found = Exp(rows)"
LONG = "soft = Softmax(rows) "
LONG += " ".join(f"r{k} = {'Sin' if k % 2 else 'Exp'}({f'r{k - 1}' if k else 'soft'})" for k in range(MANY))
LONG += f" found = Neg(r{MANY - 1})"


LATER = """both = Constant<value_floats = [3.0, 4.0]>() halves = Constant<value_floats = [2.0, 1.5]>()
  whole = MatMul(both, halves) n12 = Cast<to = 7>(whole) all = Reshape(n12, flat)
  none = Constant<value_ints = [0]>() scores = Slice(x, none, all)"""
"""A size that is known after folding: no bound of what is chosen follows from it."""


def level(*, threshold: str = "0.2", most: int = 5, largest: int = 1, decode: str = SHORT, later: bool = False) -> str:
    """One level of RetinaNet: at most ``most`` scores above a threshold, and operators on their boxes."""
    text = LEVEL.replace("THRESHOLD", threshold).replace("MOST", str(most)).replace("LARGEST", str(largest))
    text = text.replace("float[12] SCORES", "float[30] x" if later else "float[12] scores").replace(
        "SIZE", LATER if later else ""
    )
    return text.replace("DECODE", decode)


def folded(text: str) -> Graph:
    graph = from_text(text)
    FoldConstants()(graph, GPU)
    return graph


def feeds(count: int) -> dict[str, np.ndarray]:
    """``count`` scores above the threshold, some of them equal."""
    rng = np.random.default_rng(count)
    scores = rng.permutation(np.where(np.arange(12) < count, np.round(rng.uniform(0.3, 1, 12), 1), 0.1))
    return {"scores": scores.astype(np.float32), "boxes": rng.standard_normal((12, 4)).astype(np.float32)}


@all_pairs(
    {
        "count": [0, 1, 5, 12],
        "most": [5, 12, 20],
        "later": [False, True],
        "decode": [SHORT, LONG],
    }
)
def test_it_takes_the_same(count: int, most: int, decode: str, later: bool) -> None:
    graph = folded(level(most=most, decode=decode, later=later))
    after = graph.copy()
    MaskedRows()(after, GPU)
    PadRows()(after, GPU)
    assert ("Pad" in after.kinds()) == (later and most > 12)
    given = feeds(count)
    if later:
        given["x"] = np.pad(given.pop("scores"), (0, 18), constant_values=9)
    expected, found = evaluate(graph, given), evaluate(after, given)
    assert len(expected["best"]) == min(count, most)
    for name, want in expected.items():
        np.testing.assert_array_equal(found[name], want)


@pytest.mark.parametrize("most", [5, 20])
def test_missing_scores_are_the_last(most: int) -> None:
    graph = folded(level(most=most, later=True))
    rules = {"best_rows": 1, "taken_last": 1}
    after, _ = check_pass(MaskedRows(), graph, changes=2, rules=rules, context=GPU, depends_on_input=False)
    (top,) = after.of_kind("TopK")
    assert top.outputs[0].type.dims == (most,)


@pytest.mark.parametrize("most", [5, 20])
def test_all_scores_are_ordered(most: int) -> None:
    rules = {"best_rows": 1, "taken_last": 1}
    after, _ = check_pass(MaskedRows(), level(most=most), changes=2, rules=rules, context=GPU, depends_on_input=False)
    (top,) = after.of_kind("TopK")
    assert top.outputs[0].type.dims == (min(most, 12),)
    assert "GatherND" not in after.kinds()


@pytest.mark.parametrize("most", [5, 20])
def test_many_operators_get_a_known_size(most: int) -> None:
    graph = from_text(level(most=most, decode=LONG))
    MaskedRows()(graph, GPU)
    after, _ = check_pass(PadRows(), graph, changes=1, context=GPU, depends_on_input=False)
    assert all(op.outputs[0].type.dims == (min(most, 12), 4) for op in after.of_kind("Exp", "Sin", "Neg"))
    assert "Mod" not in after.kinds(), "the rows after the first ones exist already"


def test_a_few_operators_stay() -> None:
    graph = from_text(level())
    MaskedRows()(graph, GPU)
    check_untouched(PadRows(), graph, GPU)


@pytest.mark.parametrize(
    ("text", "because"),
    [
        (level(threshold="-70000.0"), "its threshold is no constant of fp16"),
        (level(decode=SHORT + " others = Cast<to = 1>(j)").replace("int64[n] numbers)", "int64[n] numbers, float[n] others)"),
         "its indices do not only select"),
        (level().replace("Concat<axis = 0>(most, size)", "Concat<axis = 0>(most, size, more)").replace("MOST", "5")
         .replace("int64[1] flat", "int64[1] more = {4}, int64[1] flat").replace("(most, size, more)", "(size)")
         .replace("least = ReduceMin<keepdims = 0>(pair)", "half = Div(pair, two) least = ReduceMin<keepdims = 0>(half)")
         .replace("int64[1] more = {4}", "int64[1] two = {2}"), "it does not take all scores above the threshold"),
    ],
)  # fmt: skip
def test_refusals(text: str, because: str) -> None:
    check_refused(MaskedRows(), text, because=because, rule="best_rows", context=GPU)


def test_any_number_is_refused() -> None:
    """All of any number of scores above the threshold, in order."""
    text = level().replace("pair = Concat<axis = 0>(most, size)", "pair = Identity(size)")
    text = text.replace("float[12] scores, float[12,4]", "float[m] scores, float[m,4]")
    check_refused(MaskedRows(), text, because="their number is unknown", rule="best_rows", context=GPU)


@pytest.mark.parametrize("old_new", [("Greater(scores, t)", "Greater(t, scores)"), ("LARGEST", "0")])
def test_other_selections_are_no_candidates(old_new: tuple[str, str]) -> None:
    text = level(largest=0) if old_new[0] == "LARGEST" else level().replace(*old_new)
    check_untouched(MaskedRows(), text, GPU)
