"""masked_rows: the best scores of each class, selected in a loop that an exporter unrolled; refusals."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, from_text

from optdnn.ir.evaluate import evaluate
from optdnn.passes.base import PassContext
from optdnn.passes.masked_rows import MaskedRows

GPU = PassContext(target="cuda:sm_90a")
HEAD = """<ir_version: 9, opset_import: ["": 17]>
g (float[40,5] scores, float[40,4] boxes) => (float[n] s, float[n,4] b, int64[n] l)
<float t = {0.2}, float u = {0.3}, int64[1] flat = {-1}, int64[2] tall = {-1, 1}, int64[1] most = {9}, int64[1] few = {5},
 int64 c1 = {1}, int64 c2 = {2}, int64 c4 = {4}, int64[1] zero = {0}>
"""
CLASS = """x{c} = Gather<axis = 1>(scores, c{c}) above{c} = Greater(x{c}, {t}) chosen{c} = NonZero(above{c})
  i{c} = Reshape(chosen{c}, tall) y{c} = GatherND(x{c}, i{c}) rows{c} = GatherND(boxes, i{c})
  size{c} = Shape(y{c}) pair{c} = Concat<axis = 0>({k}, size{c}) least{c} = ReduceMin<keepdims = 0>(pair{c})
  k{c} = Reshape(least{c}, flat) v{c}, j{c} = TopK<axis = 0, largest = {largest}>(y{c}, k{c})
  best{c} = Gather(rows{c}, j{c}) shape{c} = Shape(v{c}) label{c} = ConstantOfShape<value = int64[1] {{{c}}}>(shape{c})
"""
JOINED = "s = Concat<axis = 0>({v}) b = Concat<axis = 0>({best}) l = Concat<axis = 0>({label})"


def loop(classes: tuple[int, ...] = (1, 2, 4), last: dict[str, str] | None = None) -> str:
    """As in SSD: scores above a threshold, at most nine per class. ``last``: a difference in the last class."""
    plain = {"t": "t", "k": "most", "largest": "1"}
    parts = [CLASS.format(c=c, **(plain | (last or {}) if c == classes[-1] else plain)) for c in classes]
    names = {name: ", ".join(f"{name}{c}" for c in classes) for name in ("v", "best", "label")}
    return HEAD + "{" + "".join(parts) + JOINED.format(**names) + "}"


def scores(seed: int) -> dict[str, np.ndarray]:
    """A class with few scores above the threshold, one with many, equal ones, and one with none at all."""
    rng = np.random.default_rng(seed)
    found = rng.uniform(0, 1, (40, 5)) * np.array([1, 0.25, 1, 1, 1])
    found[:, 4] = np.round(found[:, 4], 1)
    found[:, 2] *= seed % 2
    return {"scores": found.astype(np.float32), "boxes": rng.standard_normal((40, 4)).astype(np.float32)}


def test_a_loop_over_classes_is_one_selection() -> None:
    after, _ = check_pass(
        MaskedRows(), loop(), changes=1, rules={"best_of_classes": 1}, context=GPU, depends_on_input=False
    )
    kinds = after.kinds()
    assert (kinds["TopK"], kinds["NonZero"]) == (1, 1)
    assert "GatherND" not in kinds


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_it_selects_the_same(seed: int) -> None:
    graph = from_text(loop())
    after = graph.copy()
    MaskedRows()(after, GPU)
    expected, found = evaluate(graph, scores(seed)), evaluate(after, scores(seed))
    assert expected["s"].size
    for name, want in expected.items():
        np.testing.assert_array_equal(found[name], want)


@pytest.mark.parametrize(
    ("last", "because"),
    [({"k": "few"}, "do not select equally many scores"), ({"t": "u"}, "no common constant threshold")],
)
def test_refusals(last: dict[str, str], because: str) -> None:
    check_refused(MaskedRows(), loop(last=last), because=because, context=GPU)


def test_the_least_scores_stay() -> None:
    because = "its indices do not only select the positions"  # of the other classes, whose boxes they pick
    check_refused(MaskedRows(), loop(last={"largest": "0"}), because=because, rule="best_rows", context=GPU)
