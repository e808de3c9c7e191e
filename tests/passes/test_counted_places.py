"""counted_places: lists of places of which only the length is read become sums; refusals."""

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
