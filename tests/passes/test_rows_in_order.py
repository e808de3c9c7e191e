"""rows_in_order: features of pictures that take the places of picture tokens, as PyTorch's exporters write them."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched, from_text
from support.simulated import check_simulated, lowered

from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.passes.base import PassContext
from optdnn.passes.masked_rows import MaskedRows

GPU, CPU = PassContext(target="cuda:sm_90a"), PassContext(target="cpu")
HEAD = """<ir_version: 9, opset_import: ["": 18]>
g (float[2,6,4] x, int64[2,6] ids, float[5,4] features) => (float[2,6,4] y)
<int64 token = {3}, int64[1] zero = {0}, int64[1] flat = {-1}, int64[1] last = {2}, int64[3] wide = {2, 6, 4}, int64[1] four = {4}>
{ mask = Equal(ids, token) column = Unsqueeze(mask, last) repeated = Expand(column, wide) """
FORMS = {
    "masked_scatter": """i = NonZero(repeated) at = Transpose<perm = [1, 0]>(i) source = Reshape(features, flat)
        sizes = Shape(at) n = Gather(sizes, zero) rows = Slice(source, zero, n, zero) y = ScatterND(x, at, rows) }""",
    "index_put": """i = NonZero(repeated) at = Transpose<perm = [1, 0]>(i) rows = Reshape(features, flat)
        y = ScatterND(x, at, rows) }""",
    "rows": "i = NonZero(mask) at = Transpose<perm = [1, 0]>(i) y = ScatterND(x, at, features) }",
    "computed mask": """high = Greater(x, low) i = NonZero(high) at = Transpose<perm = [1, 0]>(i) source = Reshape(features, flat)
        sizes = Shape(at) n = Gather(sizes, zero) rows = Slice(source, zero, n, zero) y = ScatterND(x, at, rows) }""",
}
IDS = np.array([[1, 3, 3, 0, 3, 1], [2, 3, 1, 3, 0, 0]])


def text(form: str, *replaced: tuple[str, str]) -> str:
    found = HEAD + FORMS[form]
    for old, new in replaced:
        assert old in found
        found = found.replace(old, new)
    return found.replace("int64 token", "float low = {0.9}, int64 token")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("context", [GPU, CPU], ids=["gpu", "cpu"])
def test_places_read_rows_by_their_numbers(form: str, context: PassContext) -> None:
    graph = from_text(text(form))
    after = graph.copy()
    report = MaskedRows()(after, context)
    assert [f.rule for f in report.fired] == ["rows_in_order"]
    assert not after.of_kind("NonZero", "ScatterND")
    assert all(op.outputs[0].type.is_static for op in after.ops())
    feeds = random_feeds(graph, 3) | {"ids": IDS}
    np.testing.assert_array_equal(evaluate(after, feeds)["y"], evaluate(graph, feeds)["y"])


def test_exact_and_idempotent() -> None:
    """With more features than places, any tokens will do."""
    few = text("masked_scatter", ("float[5,4]", "float[12,4]"))
    check_pass(MaskedRows(), few, changes=1, rules={"rows_in_order": 1}, context=GPU)


def test_a_source_of_other_rows_is_refused() -> None:
    other = text("masked_scatter", ("float[5,4] features", "float[23] features"))
    check_refused(MaskedRows(), other, because="no whole rows", context=GPU)


def test_unknown_sizes_are_refused() -> None:
    other = text(
        "rows", ("float[2,6,4] x, int64[2,6]", "float[N,6,4] x, int64[N,6]"), ("float[2,6,4] y", "float[N,6,4] y")
    )
    check_refused(MaskedRows(), other, because="its sizes are not known", context=GPU)


@pytest.mark.parametrize(
    "replaced",
    [("ScatterND(", 'ScatterND<reduction = "add">('), ("NonZero(mask)", "Identity(places)")],
    ids=["a sum", "given places"],
)
def test_other_scatters_stay(replaced: tuple[str, str]) -> None:
    given = ("float[5,4] features", "float[5,4] features, int64[2,5] places")
    check_untouched(MaskedRows(), text("rows", given, replaced), GPU)


def test_they_run_on_the_gpu_alone() -> None:
    graph = from_text(text("masked_scatter", ("float[5,4]", "float[12,4]")))
    check_simulated(graph)
    assert all(step.executor == "cuda" for step in lowered(graph).steps)
