"""cse and dce: equal ops are computed once, dead ops never."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_untouched, from_text, sources
from support.net import Net

from optdnn.ir.graph import Graph
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.table import OPDEFS
from optdnn.ops.unary import LeakyReluAttrs
from optdnn.passes.cse import MANY, CommonSubexpressions, attribute_key
from optdnn.passes.dce import DeadCode

CSE, DCE = CommonSubexpressions(), DeadCode()


def test_equal_chains_merge_from_the_top() -> None:
    n = Net()
    x = n.input(2, 3)
    a, b = (n.op("Sigmoid", n.op("Relu", x)) for _ in range(2))
    kinds = {"Relu": 1, "Sigmoid": 1, "Neg": 1, "Sub": 1}
    graph, _ = check_pass(CSE, n.done(n.op("Sub", a, n.op("Neg", b))), changes=2, kinds=kinds)
    assert graph.of_kind("Relu")[0].src == {"Relu_1", "Relu_3"}


def test_operands_of_commutative_ops_in_any_order() -> None:
    n = Net()
    x, y = n.input(2, 3), n.input(2, 3, name="y")
    graph = n.done(n.op("Sub", n.op("Add", x, y), n.op("Mul", n.op("Add", y, x), x)))
    check_pass(CSE, graph, changes=1, kinds={"Add": 1, "Mul": 1, "Sub": 1})


def test_operands_of_other_ops_keep_their_order() -> None:
    n = Net()
    x, y = n.input(2, 3), n.input(2, 3, name="y")
    check_untouched(CSE, n.done(n.op("Mul", n.op("Sub", x, y), n.op("Sub", y, x))))


def test_attributes_count() -> None:
    n = Net()
    x = n.input(2, 3)
    a, b = (n.op("LeakyRelu", x, attrs=LeakyReluAttrs(k)) for k in (0.1, 0.2))
    check_untouched(CSE, n.done(n.op("Sub", a, b)))


def test_equal_constants_merge_by_content_dtype_and_shape() -> None:
    n = Net()
    x = n.input(3, 3)
    k = np.arange(9.0).reshape(3, 3)
    a, b = n.op("Mul", x, n.const(k)), n.op("Add", x, n.const(k.copy()))
    other_shape = n.op("Add", x, n.const(k.reshape(1, 3, 3)))
    last = k.copy()
    last[2, 2] += 1
    other_value = n.op("Sub", x, n.const(last))
    graph, _ = check_pass(CSE, n.done(a, b, other_shape, other_value), changes=1, rules={"same_constant": 1})
    assert len(graph.of_kind("Constant")) == 3


def test_equal_constants_make_their_users_equal() -> None:
    n = Net()
    x = n.input(3)
    a, b = (n.op("Mul", x, n.const([1.0, 2.0, 3.0])) for _ in range(2))
    graph = n.done(n.op("Sub", n.op("Exp", a), b))
    check_pass(CSE, graph, changes=2, rules={"same_constant": 1, "same_op": 1})


def test_large_constants_that_differ_between_samples_stay_apart() -> None:
    n = Net()
    x = n.input(1000)
    k = np.zeros(1000)
    other = k.copy()
    other[501] = 1.0
    check_untouched(CSE, n.done(n.op("Add", x, n.const(k)), n.op("Add", x, n.const(other))))


def test_every_output_of_an_op_is_merged() -> None:
    n = Net()
    x = n.input(4, 3)
    split = OPDEFS["Split"].attrs
    a, b = (n.op("Split", x, n.ints(1, 3), attrs=split(axis=0), outputs=2) for _ in range(2))
    graph = n.done(n.op("Mul", a[0], b[1]), n.op("Mul", b[0], a[1]))
    check_pass(CSE, graph, changes=3, kinds={"Split": 1, "Mul": 1}, rules={"same_constant": 1, "same_op": 2})


def test_two_outputs_of_the_network_may_come_from_one_op() -> None:
    n = Net()
    x = n.input(3)
    graph, _ = check_pass(CSE, n.done(n.op("Relu", x), n.op("Relu", x)), changes=1, kinds={"Relu": 1})
    assert len(graph.outputs) == 2


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (0.0, -0.0, False),
        (1.5, 1.5, True),
        (float("nan"), float("nan"), True),
        ((1, 2), (1, 2), True),
        (1, 1.0, False),
        (True, 1, False),
        (np.zeros(3), np.zeros(3), True),
        (np.zeros(3), np.zeros(4), False),
        (np.zeros(3, np.float32), np.zeros(3), False),
        ({"a": 1}, {"a": 1}, False),  # unknown and unhashable: never equal
    ],
)
def test_attribute_keys(a: object, b: object, equal: bool) -> None:
    assert (attribute_key(a) == attribute_key(b)) is equal


def test_sizes_that_depend_on_equal_ops_are_written_with_one_symbol() -> None:
    """Two lists of chosen rows have two symbols when they are imported, and their sum the larger of them."""
    graph = from_text("""<ir_version: 9, opset_import: ["": 17]>
      g (bool[9] mask, float[9,4] x) => (float[n,4] y, int64[2] size) <int64[1] flat = {-1}>
      { a = NonZero(mask) b = NonZero(mask) i = Reshape(a, flat) j = Reshape(b, flat)
        u = Gather(x, i) v = Gather(x, j) w = Relu(v) y = Add(u, w) size = Shape(w) }""")
    before = next(op for op in graph.of_kind("Add")).outputs[0].type.dims[0]
    CommonSubexpressions()(graph)
    chosen = graph.of_kind("NonZero")[0].outputs[0].type.dims[1]
    assert before != chosen
    assert {op.outputs[0].type.dims[0] for op in graph.of_kind("Gather", "Relu", "Add")} == {chosen}
    known = graph.of_kind("Shape")[0].outputs[0].known
    assert known is not None
    assert known.tolist() == [chosen, 4]


def test_dead_ops_are_removed_and_inputs_stay() -> None:
    n = Net()
    x, unused = n.input(3), n.input(3, name="unused")
    n.op("Neg", n.op("Relu", unused))
    graph, report = check_pass(
        DCE, n.done(n.op("Sigmoid", x)), changes=2, kinds={"Sigmoid": 1}, drops=["Relu_1", "Neg_2"]
    )
    assert [graph.op(i).outputs[0].name for i in graph.inputs] == ["x", "unused"]
    assert [f.nodes for f in report.fired] == [("Neg_2",), ("Relu_1",)]


def test_a_dead_constant_goes_uncounted() -> None:
    n = Net()
    graph = n.done(n.op("Relu", n.input(3)))
    graph.add_constant(np.zeros(3), "dead")
    after, _ = check_pass(DCE, graph, changes=0)
    assert not after.of_kind("Constant")
    assert sources(after) == {"Relu_1"}


def repeated(times: int) -> Graph:
    """A repeated convolution and activation, as in an unrolled loop, each with its own addition."""
    n = Net()
    x, added = n.input(1, 4, 6, 6), n.input(times, 1, 3, 6, 6, name="added")
    w = n.random(3, 4, 3, 3)
    attrs = ConvAttrs((1, 1), (1,) * 4, (1, 1))
    total = []
    for k in range(times):
        mine = n.op("Gather", added, n.const(k, np.int64), attrs=GatherAttrs(0))
        total.append(n.op("Add", n.op("Relu", n.op("Conv", x, w, attrs=attrs)), mine))
    return n.done(*total)


def test_a_few_equal_convolutions_stay_apart_until_they_are_fused_and_many_are_one() -> None:
    kept = CommonSubexpressions(keep=frozenset({"Conv"}))
    check_untouched(kept, repeated(MANY - 1))
    done, _ = check_pass(kept, repeated(MANY), changes=2 * (MANY - 1))
    assert (done.kinds()["Conv"], done.kinds()["Relu"], done.kinds()["Add"]) == (1, 1, MANY)


def test_axes_that_are_counted_in_two_ways_are_equal() -> None:
    n = Net()
    x = n.input(4, 6, 8)
    means = [n.op("ReduceMean", x, n.ints(axis)) for axis in (2, -1)]
    other = n.op("ReduceMean", x, n.ints(1))
    graph = n.done(*(n.op("Sub", x, m) for m in means), n.op("Sub", x, other))
    check_pass(CommonSubexpressions(), graph, changes=2, kinds={"ReduceMean": 2, "Sub": 2})
