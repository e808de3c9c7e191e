"""scatter_rows: if a model expands one index over each row, whole rows are scattered."""

from __future__ import annotations

import pytest
from support.check import check_pass, check_untouched, from_text

from optdnn.passes.base import PassContext
from optdnn.passes.gather_rows import GatherRows

GPU = PassContext(target="cuda:sm_90a")
TEXT = """<ir_version: 10, opset_import: ["": 18]>
g (float[7,5] x, float[7,5] u, float[7] at, bool[7,1] some) => (float[7,5] y)
<int64[2] column = {7, 1}, int64[2] wide = {7, 5}, int64[2] flip = {5, 7}, int64 last = {5}>
{ s = Sigmoid(at) i = Cast<to = 7>(s) c = Reshape(i, column) PLACES
  y = ScatterElements<axis = 0, reduction = "add">(x, p, u) }"""
FORMS = {
    "an Expand": "p = Expand(c, wide)",
    "a choice": "e = Expand(c, wide) p = Where(some, e, last)",
    "choices": "e = Expand(c, wide) w = Where(some, e, c) p = Where(some, last, w)",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("axis", [0, -2])
def test_an_expanded_number(form: str, axis: int) -> None:
    graph = from_text(TEXT.replace("PLACES", FORMS[form]).replace("axis = 0", f"axis = {axis}"))
    done, _ = check_pass(GatherRows(), graph, changes=1, rules={"scatter_rows": 1}, context=GPU)
    (scatter,) = done.of_kind("ScatterND")
    assert scatter.attrs.reduction == "add"
    places = scatter.inputs[1]
    assert places is not None
    assert done.type(places).static_shape == (7, 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("PLACES", "e = Expand(c, wide) row = Reshape(e, flip) p = Reshape(row, wide)"),
        ("axis = 0", "axis = 1"),
        ("float[7,5] x, float[7,5] u, float[7] at, bool[7,1] some) => (float[7,5]", None),
    ],
    ids=["other numbers", "another axis", "a part of each row"],
)
def test_others_are_no_candidates(old: str, new: str | None) -> None:
    wider = old.replace("float[7,5] x", "float[7,6] x").replace("=> (float[7,5]", "=> (float[7,6]")
    given = TEXT.replace(old, wider if new is None else new).replace("PLACES", FORMS["an Expand"])
    check_untouched(GatherRows(), from_text(given), GPU)
