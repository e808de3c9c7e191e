"""segment_table: sums of segments by a table of rows, as tf2onnx writes them, become one ScatterND."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper, parser
from support.check import check_pass, check_refused, check_untouched
from support.simulated import check_simulated

from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.passes.canonicalize import Canonicalize

PASS = Canonicalize()
NEUTRAL = {"ReduceSum": 0.0, "ReduceProd": 1.0, "ReduceMax": -np.inf, "ReduceMin": np.inf}


def segments(kind: str = "ReduceSum", **changed: Any) -> Graph:
    """Rows of ``x`` by ids in 0 to 4, from the absolute values of ``z``. ``changed``: other text for parts of the model."""
    part = {
        "extra": NEUTRAL[kind], "axis": 1, "keep": 0, "largest": 0, "count": 8, "empty": -1, "numbers": "0,1,2,3,4,5,6,7",
        "reduction": '"none"', "size": "five", "data": "Concat<axis = 0>(x, additional)",
    } | changed  # fmt: skip
    text = """<ir_version: 9, opset_import: ["": 18]> g (float[8,3] x, float[8] z) => (float[s,3] y)
    <int64[1] five = {{5}}, int64[1] count = {{{count}}}, int64[1] last = {{-1}}, int64[1] zero = {{0}}, int64[1] axis = {{{axis}}},
     float extra1 = {{5}}, int64[{count}] numbers = {{{numbers}}}> {{
        size = Abs(z)
        id = Floor(size)
        some = Mod<fmod = 1>(id, extra1)
        ids = Cast<to = 7>(some)
        order, at = TopK<axis = 0, largest = {largest}>(ids, count)
        unique, first, inverse, counts = Unique<axis = 0>(order)
        most = ReduceMax(counts, zero)
        shape = Concat<axis = 0>({size}, most)
        table = ConstantOfShape<value: tensor = int64[1] {{{empty}}}>(shape)
        own = Gather<axis = 0>(counts, inverse)
        place = Mod(numbers, own)
        a = Unsqueeze(order, last)
        b = Unsqueeze(place, last)
        places = Concat<axis = 1>(a, b)
        rows = ScatterND<reduction = {reduction}>(table, places, at)
        all = {data}
        taken = Gather<axis = 0>(all, rows)
        reduced = {kind}<keepdims = {keep}>(taken, axis)
        y = Atan(reduced)
    }}"""
    proto = parser.parse_model(text.format(kind=kind, **part))
    proto.graph.initializer.append(numpy_helper.from_array(np.full((1, 3), part["extra"], np.float32), "additional"))
    return import_model(proto)


@pytest.mark.parametrize("kind", list(NEUTRAL))
def test_a_table_of_segments_is_one_scatter(kind: str) -> None:
    graph, _ = check_pass(PASS, segments(kind), changes=1, rules={"segment_table": 1})
    (scatter,) = graph.of_kind("ScatterND")
    assert scatter.outputs[0].type.static_shape == (5, 3)
    assert "Unique" not in graph.kinds()


def test_counts_of_segments_have_constant_rows() -> None:
    """``unsorted_segment_mean`` also adds ones."""
    ones = "Constant<value = float[9] {1, 1, 1, 1, 1, 1, 1, 1, 0}>()"
    graph, _ = check_pass(PASS, segments(data=ones), changes=1, rules={"segment_table": 1})
    (scatter,) = graph.of_kind("ScatterND")
    assert graph.constant_value(scatter.inputs[2]).tolist() == [1.0] * 8


@pytest.mark.parametrize(
    ("changed", "because"),
    [
        ({"extra": 1.0}, "the additional row changes results"),
        ({"keep": 1}, "does not reduce the rows of each segment"),
        ({"axis": 2}, "does not reduce the rows of each segment"),
        ({"data": "Concat<axis = 0>(additional, x)"}, "it has no additional row"),
        ({"data": "Concat<axis = 0>(x, x, additional)"}, "it has no additional row"),
    ],
)
def test_refusals(changed: dict[str, Any], because: str) -> None:
    check_refused(PASS, segments(**changed), because=because)


@pytest.mark.parametrize(
    "changed",
    [
        {"empty": 0},
        {"largest": 1},
        {"count": 7, "numbers": "0,1,2,3,4,5,6"},
        {"numbers": "1,2,3,4,5,6,7,8"},
        {"reduction": '"add"'},
    ],
)
def test_other_tables_stay(changed: dict[str, Any]) -> None:
    check_untouched(PASS, segments(**changed))


def test_a_gpu_computes_it_without_the_host() -> None:
    program = check_simulated(segments())
    assert not [step for step in program.steps if step.executor == "host"]
