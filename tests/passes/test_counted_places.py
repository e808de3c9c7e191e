"""counted_places: lists of places become sums where only their length is read, and scatters where they are padded; refusals."""

from __future__ import annotations

import pytest
from support.check import check_pass, check_refused, check_untouched

from optdnn.passes.counted_places import CountedPlaces


def listed(rest: str, outputs: str = "int64[1] n", shape: str = "3,40", source: str = "bool") -> str:
    return f"""<ir_version: 9, opset_import: ["": 17]>
    g (float[{shape}] x) => ({outputs}) <float zero = {{0}}>
    {{ {"mask = Greater(x, zero)" if source == "bool" else "mask = Relu(x)"} places = NonZero(mask) {rest} }}"""


@pytest.mark.parametrize("source", ["bool", "float"])
@pytest.mark.parametrize("ends", ["start = 1", "start = 1, end = 2", "start = -1"])
def test_the_length_of_a_list_is_a_sum(ends: str, source: str) -> None:
    text = listed(f"n = Shape<{ends}>(places)", source=source)
    graph, _ = check_pass(CountedPlaces(), text, changes=1)
    assert (len(graph.of_kind("NonZero")), len(graph.of_kind("ReduceSum"))) == (0, 1)


def test_several_readers_share_the_sum() -> None:
    text = listed("n = Shape<start = 1>(places) m = Shape<start = 1, end = 2>(places)", "int64[1] n, int64[1] m")
    graph, _ = check_pass(CountedPlaces(), text, changes=1)
    assert len(graph.of_kind("ReduceSum")) == 1


def test_lists_that_are_read_are_untouched() -> None:
    check_untouched(CountedPlaces(), listed("n = Shape<start = 1>(places) y = Neg(places)", "int64[1] n, int64[2,m] y"))
    check_untouched(CountedPlaces(), listed("n = Shape<start = 1>(places)", shape="k,40"))


def test_other_parts_of_the_shape_are_refused() -> None:
    check_refused(CountedPlaces(), listed("n = Shape(places)", "int64[2] n"), because="its rows is read as well")


def padded(
    *, source: str = "mask = Greater(x, limit)", limit: float = 0.0, size: int = 12, first: int = 0, least: int = 1,
    joint: str = "Concat<axis = 1>(places, spare)", more: str = "", outputs: str = "",
) -> str:  # fmt: skip
    """The places of the elements above ``limit``, repeated to 12 columns, and their number."""
    numbers = ", ".join(str(k) for k in range(first, first + 12))
    return f"""<ir_version: 9, opset_import: ["": 17]>
    g (float[{size}] x) => (int64[1,12] y, int64[1] n{outputs}) <float limit = {{{limit}}}, int64[1,1] spare = {{3}},
        int64[1] least = {{{least}}}, int64[12] numbers = {{{numbers}}}>
    {{ {source} places = NonZero(mask) n = Shape<start = 1>(places) row = {joint} there = Max(n, least)
       at = Mod(numbers, there) y = Gather<axis = 1>(row, at) {more} }}"""


@pytest.mark.parametrize("source", ["mask = Greater(x, limit)", "mask = Relu(x)"])
def test_a_padded_list_is_a_scatter(source: str) -> None:
    graph, _ = check_pass(CountedPlaces(), padded(source=source), changes=1, rules={"padded_places": 1})
    assert (len(graph.of_kind("NonZero")), len(graph.of_kind("ScatterElements"))) == (0, 1)


@pytest.mark.parametrize("limit", [-100.0, 100.0], ids=["all of them", "none of them"])
def test_a_padded_list_of_all_places_and_of_none(limit: float) -> None:
    check_pass(CountedPlaces(), padded(limit=limit), changes=1, depends_on_input=False)


@pytest.mark.parametrize(
    "text",
    [
        padded(first=-1),
        padded(least=0),
        padded(joint="Concat<axis = 1>(spare, places)"),
        padded(more="z = Neg(places)", outputs=", int64[1,m] z"),
        padded(more="z = Neg(row)", outputs=", int64[1,m] z"),
    ],
    ids=["negative numbers", "a divisor of zero", "a place in front", "the list is read", "all of the row is read"],
)
def test_lists_that_are_read_otherwise_are_untouched(text: str) -> None:
    check_untouched(CountedPlaces(), text)


def test_long_lists_stay() -> None:
    check_refused(CountedPlaces(), padded(size=20000), because="a scan of more than 16384 takes longer than the CPU")
