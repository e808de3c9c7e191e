"""long_top_k: lines are sorted as far as they are read, and long lines by their parts; refusals."""

from __future__ import annotations

import pytest
from support.check import check_pass, check_refused, check_untouched, from_text

from optdnn.passes import long_top_k
from optdnn.passes.long_top_k import LongTopK


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_top_k, "HELD", 64)


def top(shape: str, kept: int = 3, *, axis: int = -1, largest: int = 1) -> str:
    """Many of the elements are equal."""
    return f"""<ir_version: 9, opset_import: ["": 17]>
    g (float[{shape}] x) => (float y, int64 i) <int64[1] k = {{{kept}}}, float few = {{2}}>
    {{ scaled = Mul(x, few) whole = Floor(scaled) y, i = TopK<axis = {axis}, largest = {largest}>(whole, k) }}"""


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("shape", ["1000", "2,3,1000", "1,1024"])
def test_parts_of_lines_are_selected_first(shape: str, largest: int) -> None:
    graph, _ = check_pass(LongTopK(), top(shape, largest=largest), changes=1)
    first, second = graph.of_kind("TopK")
    assert graph.type(first.inputs[0]).static_shape[-2:] == (16, 64 if "1024" in shape else 62)  # type: ignore[arg-type]
    assert graph.type(second.inputs[0]).static_shape[-1] == (48 if "1024" in shape else 48 + 8)  # type: ignore[arg-type]


def test_parts_may_be_selected_from_again() -> None:
    graph, _ = check_pass(LongTopK(), top("40000"), changes=2, rules={"long_top_k": 2}, depends_on_input=False)
    assert len(graph.of_kind("TopK")) == 3


def test_values_alone() -> None:
    graph, _ = check_pass(LongTopK(), top("1000").replace(", int64 i)", ")"), changes=1)
    assert not graph.of_kind("GatherElements")


@pytest.mark.parametrize(("shape", "axis"), [("600", -1), ("1000,2", 0), ("n,1000", 1), ("50,900", 0)])
def test_other_lines_are_untouched(shape: str, axis: int) -> None:
    check_untouched(LongTopK(), top(shape, axis=axis))


def test_parts_that_would_keep_most_elements_are_refused() -> None:
    check_refused(LongTopK(), top("200", 40), because="would keep most")


def sorted_lines(*ends: int, first: int = 0, axis: int = 2, kept: int = 20, port: str = "i", more: str = "") -> str:
    """A sort along axis 1 whose results are read by Slices."""
    reads = " ".join(f"s{e} = Slice({port}, from, e{e}, at)" for e in ends)
    sizes = ", ".join(f"int64[1] e{e} = {{{e}}}" for e in ends)
    outputs = ", ".join(f"{'float' if port == 'y' else 'int64'} s{e}" for e in ends)
    return f"""<ir_version: 9, opset_import: ["": 17]>
    g (float[2,20,3] x) => ({outputs}{more})
    <int64[1] k = {{{kept}}}, int64[1] from = {{{first}}}, int64[1] at = {{{axis - 1}}}, {sizes}>
    {{ y, i = TopK<axis = 1, largest = 0>(x, k) {reads} }}"""


@pytest.mark.parametrize("port", ["y", "i"])
@pytest.mark.parametrize("ends", [(5,), (5, 2), (7, 1, 3)])
def test_only_elements_that_are_read_are_sorted(ends: tuple[int, ...], port: str) -> None:
    graph, _ = check_pass(LongTopK(), sorted_lines(*ends, port=port), changes=1, rules={"first_of_sorted": 1})
    (op,) = graph.of_kind("TopK")
    assert op.outputs[0].type.static_shape == (2, max(ends), 3)
    assert graph.kinds().get("Slice", 0) == len(ends) - 1


@pytest.mark.parametrize(
    "text",
    [
        sorted_lines(5, first=1),
        sorted_lines(2, axis=3),
        sorted_lines(20),
        sorted_lines(5, more=", float[2,20,3] y"),
        top("60").replace("scaled", "s"),
    ],
    ids=["not the first ones", "another axis", "all", "an output", "no slices"],
)
def test_elements_that_are_read_stay(text: str) -> None:
    check_untouched(LongTopK(), text)


def again(
    *, largest: int = 1, second: int = 1, axis: int = 0, other: int = 0, kept: int = 6, values: str = "Gather(whole, i)",
    order: int = 1, shape: str = "6",
) -> str:  # fmt: skip
    """Elements that one TopK sorts, and another one sorts again, plus their places. Some of them are equal."""
    return f"""<ir_version: 9, opset_import: ["": 17]>
    g (float[{shape}] x) => (float sum) <int64[1] k = {{6}}, int64[1] few = {{{kept}}}, float two = {{2}}, int64 one = {{1}},
       int64[6] numbers = {{5, 0, 1, 2, 3, 4}}>
    {{ scaled = Mul(x, two) whole = Floor(scaled) y, i = TopK<axis = {axis}, largest = {largest}, sorted = {order}>(whole, k)
       s = {values} z, j = TopK<axis = {other}, largest = {second}>(s, few) places = Cast<to = 1>(j) sum = Add(z, places) }}"""


@pytest.mark.parametrize("values", ["Gather", "GatherElements<axis = 0>", ""])
@pytest.mark.parametrize(("largest", "kept"), [(1, 6), (0, 6), (1, 4)])
def test_sorted_elements_are_not_sorted_again(values: str, largest: int, kept: int) -> None:
    text = again(values=f"{values}(whole, i)", largest=largest, second=largest, kept=kept)
    if not values:
        text = text.replace("s = (whole, i) ", "").replace("(s, few)", "(y, few)")
    drops = () if kept < 6 else (f"{values.partition('<')[0]}_3", "TopK_4") if values else ("TopK_3",)
    rules = {"sorted_again": 1} | ({"first_of_sorted": 1} if kept < 6 else {})
    graph, _ = check_pass(LongTopK(), text, changes=len(rules), rules=rules, drops=drops)
    assert len(graph.of_kind("TopK")) == 1


@pytest.mark.parametrize("places", [0, 1])
def test_only_the_elements_or_only_their_places_are_read(places: int) -> None:
    """An operator has no result for places that nothing reads."""
    text = again().replace("sum = Add(z, places)", f"sum = Neg({'places' if places else 'z'})")
    text = text if places else text.replace("places = Cast<to = 1>(j)", "").replace("z, j = TopK", "z = TopK")
    drops = ("Mul_0", "Floor_1", "TopK_2", "Gather_3", "TopK_4") if places else ()
    graph, _ = check_pass(
        LongTopK(), text, changes=1, rules={"sorted_again": 1}, drops=drops, depends_on_input=not places
    )
    assert len(graph.of_kind("TopK")) == 1 - places


def test_sorted_lines() -> None:
    text = again(values="GatherElements<axis = 1>(whole, i)", axis=1, other=1, shape="3,6")
    check_pass(LongTopK(), text, changes=1, rules={"sorted_again": 1}, drops=("GatherElements_3", "TopK_4"))


@pytest.mark.parametrize(
    "text",
    [
        again(second=0),  # in the opposite order
        again(order=0),
        again(values="GatherElements<axis = 1>(whole, i)", axis=1, other=0, shape="6,6"),  # along another axis
        again(values="Gather(scaled, i)"),  # other elements
        again(values="Gather(whole, numbers)"),
        again(values="Gather<axis = 1>(whole, numbers)", axis=1, other=1, shape="6,6"),
        again(values="Gather(y, i)"),
    ],
)
def test_other_elements_are_sorted(text: str) -> None:
    report = LongTopK()(from_text(text), None)
    assert "sorted_again" not in {fired.rule for fired in report.fired}
