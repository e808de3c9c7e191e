"""fuse_pointwise: groups that become one op, the wiring of their stages, and the reasons why others stay separate."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.dim import symbol
from optdnn.ir.graph import Graph
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.unary import LeakyReluAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.dce import DeadCode
from optdnn.passes.fuse_pointwise import FusePointwise
from optdnn.passes.support.open_stages import MAX_OPERANDS, MAX_STAGES
from optdnn.types import BOOL, FP32

UNARY = ("Sin", "Tanh", "Neg")
KINDS = (*UNARY, "Add", "Sub", "Mul", "Max", "ReduceSum")


def test_a_chain() -> None:
    n = Net(np.float64)
    y = n.op("Tanh", n.op("LeakyRelu", n.op("Add", n.input(2, 3), n.random(3)), attrs=LeakyReluAttrs(0.1)))
    graph, report = check_pass(FusePointwise(), n.done(y), changes=1, kinds={"Pointwise": 1})
    (op,) = graph.of_kind("Pointwise")
    assert op.attrs.epilogue == (
        Stage("Add", (-1, 1)),
        Stage("LeakyRelu", (-2,), LeakyReluAttrs(0.1)),
        Stage("Tanh", (-3,)),
    )
    assert len(op.inputs) == 2
    assert op.src == {"Add_1", "LeakyRelu_2", "Tanh_3"}
    assert report.fired[0].nodes == ("Add_1", "LeakyRelu_2", "Tanh_3")


def test_a_diamond() -> None:
    n = Net(np.float64)
    a = n.op("Exp", n.input(2, 3))
    y = n.op("Mul", n.op("Neg", a), n.op("Sqrt", a))
    graph, _ = check_pass(FusePointwise(), n.done(y), changes=1, kinds={"Pointwise": 1})
    stages = graph.of_kind("Pointwise")[0].attrs.epilogue
    assert [s.kind for s in stages] == ["Exp", "Neg", "Sqrt", "Mul"]
    assert stages[3].args == (-3, -4)


def test_a_value_read_twice_is_one_operand() -> None:
    n = Net(np.float64)
    x, b = n.input(2, 3), n.input(2, 3, name="b")
    y = n.op("Sub", n.op("Mul", n.op("Add", x, b), b), x)
    graph, _ = check_pass(FusePointwise(), n.done(y), changes=1, kinds={"Pointwise": 1})
    (op,) = graph.of_kind("Pointwise")
    assert len(op.inputs) == 2
    assert [s.args for s in op.attrs.epilogue] == [(-1, 1), (-2, 1), (-3, -1)]


def test_register_0_is_an_operand_of_full_shape() -> None:
    n = Net(np.float64)
    y = n.op("Relu", n.op("Sub", n.random(3), n.input(2, 3)))
    graph, _ = check_pass(FusePointwise(), n.done(y), changes=1, kinds={"Pointwise": 1})
    (op,) = graph.of_kind("Pointwise")
    assert graph.type(op.inputs[0]).shape == (2, 3)
    assert op.attrs.epilogue[0].args == (1, -1)


def test_types_may_differ_inside() -> None:
    n = Net(np.float64)
    x, z = n.input(2, 3), n.input(2, 3, name="z")
    y = n.op("Where", n.op("Greater", x, z), n.op("Neg", x), n.op("Cast", z, attrs=CastAttrs(np.dtype(np.float64))))
    graph, _ = check_pass(FusePointwise(), n.done(y), changes=1, kinds={"Pointwise": 1})
    assert {s.kind for s in graph.of_kind("Pointwise")[0].attrs.epilogue} == {"Where", "Greater", "Neg", "Cast"}


def test_integers_to_floats() -> None:
    n = Net(np.float32)
    y = n.op("Mul", n.op("Cast", n.input(2, 3, dtype=np.uint8), attrs=CastAttrs(FP32)), 1 / 255)
    check_pass(FusePointwise(), n.done(y), changes=1, kinds={"Pointwise": 1})


def test_an_absent_operand_stays_absent() -> None:
    n = Net(np.float64)
    y = n.op("Clip", n.op("Neg", n.input(2, 3)), None, 1.0)
    graph, _ = check_pass(FusePointwise(), n.done(y), changes=1, kinds={"Pointwise": 1})
    assert graph.of_kind("Pointwise")[0].attrs.epilogue[1].args == (-2, None, 1)


def test_a_symbolic_shape() -> None:
    n = Net(np.float64)
    y = n.op("Relu", n.op("Add", n.input(symbol("N"), 3), n.random(3)))
    check_pass(FusePointwise(), n.done(y), changes=1, kinds={"Pointwise": 1}, sizes={"N": 4})


def test_a_pointwise_grows_by_operators_before_it() -> None:
    n = Net(np.float64)
    graph, _ = check_pass(
        FusePointwise(), n.done(n.op("Relu", n.op("Neg", n.input(4)))), changes=1, kinds={"Pointwise": 1}
    )
    m = Net(np.float64)
    attrs = graph.of_kind("Pointwise")[0].attrs
    y = m.op("Tanh", m.op("Pointwise", m.op("Sin", m.input(4)), attrs=attrs))
    graph, _ = check_pass(FusePointwise(), m.done(y), changes=1, kinds={"Pointwise": 1})
    assert [s.kind for s in graph.of_kind("Pointwise")[0].attrs.epilogue] == ["Sin", "Neg", "Relu", "Tanh"]


def test_two_fused_ops_become_one() -> None:
    n = Net(np.float64)
    a = n.op("Neg", n.op("Add", n.input(4), 1.0))
    first, _ = check_pass(FusePointwise(), n.done(a), changes=1, kinds={"Pointwise": 1})
    (op,) = first.of_kind("Pointwise")
    m = Net(np.float64)
    x = m.input(4)
    inner = m.op("Pointwise", m.op("Exp", x), 1.0, attrs=op.attrs)
    outer = m.op("Pointwise", inner, x, attrs=op.attrs)
    graph, _ = check_pass(FusePointwise(), m.done(outer), changes=1, kinds={"Pointwise": 1})
    stages = graph.of_kind("Pointwise")[0].attrs.epilogue
    assert [s.kind for s in stages] == ["Exp", "Add", "Neg", "Add", "Neg"]


def test_one_op_alone_stays() -> None:
    n = Net(np.float64)
    check_untouched(FusePointwise(), n.done(n.op("Relu", n.input(2, 3))))


def test_a_value_used_elsewhere_stays_outside() -> None:
    n = Net(np.float64)
    a = n.op("Exp", n.input(2, 3))
    graph = n.done(n.op("Neg", a), n.op("ReduceSum", a, n.ints(1)))
    check_refused(FusePointwise(), graph, because="Exp_1 is also used by ReduceSum_3")


def test_a_path_that_leaves_and_comes_back_makes_no_cycle() -> None:
    n = Net(np.float64)
    a = n.op("Exp", n.input(3, 3))
    round_about = n.op("MatMul", a, n.random(3, 3))
    graph = n.done(n.op("Add", a, round_about))
    check_refused(FusePointwise(), graph, because="Exp_1 is also used by MatMul_2")


def test_a_smaller_value_is_not_computed_again() -> None:
    n = Net(np.float64)
    gate = n.op("Sigmoid", n.input(2, 3, 1, 1, name="g"))
    graph = n.done(n.op("Mul", n.input(2, 3, 4, 4), gate))
    check_refused(FusePointwise(), graph, because=r"Sigmoid_1 has \[2, 3, 1, 1\], the result \[2, 3, 4, 4\]")


ON_GPU = PassContext(target="cuda:sm_90a")


def response_norm(size: int) -> Graph:
    """The last steps of a global response normalization (ConvNeXt V2): x * (r / (mean + epsilon)) + x."""
    n = Net()
    x, r, mean = n.input(2, 3, size, size), n.input(2, 3, 1, 1, name="r"), n.input(2, 1, 1, 1, name="mean")
    factor = n.op("Div", r, n.op("Add", n.op("Abs", mean), 0.5))
    return n.done(n.op("Add", n.op("Mul", x, factor), x))


def test_a_gpu_computes_small_values_again() -> None:
    check_pass(FusePointwise(), response_norm(4), changes=1, kinds={"Pointwise": 1}, context=ON_GPU)
    check_pass(FusePointwise(), response_norm(4), changes=2, kinds={"Div": 1, "Pointwise": 2})


def test_a_gpu_converts_a_mask_of_keys_for_each_query() -> None:
    n = Net()
    keys = n.op("Cast", n.input(2, 1, 1, 8, name="keys"), attrs=CastAttrs(BOOL))
    mask = n.op("Where", n.op("And", n.const(np.tri(8) > 0, np.bool_), keys), n.const(0.0), n.const(-100.0))
    graph, done = n.done(mask), {"Pointwise": 1}
    check_pass(FusePointwise(), graph, changes=1, kinds=done, context=ON_GPU, depends_on_input=False)


def test_a_gpu_does_not_compute_them_for_many_elements() -> None:
    graph = response_norm(512)
    report = FusePointwise()(graph, ON_GPU)
    assert graph.kinds() == {"Pointwise": 2}  # the factor is computed once for each channel
    assert any("would be computed again" in r.reason for r in report.refused)


def test_an_outer_product_has_no_operand_of_full_shape() -> None:
    n = Net(np.float64)
    y = n.op("Neg", n.op("Add", n.input(2, 1), n.input(1, 3, name="z")))
    check_refused(FusePointwise(), n.done(y), because=r"no operand has the result's shape \[2, 3\]")


@pytest.mark.parametrize("constant", [False, True])
def test_a_gpu_repeats_all_operands_of_an_outer_product(constant: bool) -> None:
    n = Net(np.float64)
    line = n.const([[1.0, 2, 3]]) if constant else n.input(1, 3, name="z")
    graph = n.done(n.op("Neg", n.op("Add", line, n.input(4, 2, 1))))
    made, _ = check_pass(FusePointwise(), graph, changes=1, kinds={"Pointwise": 1}, context=ON_GPU)
    (fused,) = made.of_kind("Pointwise")
    assert [made.type(v).shape for v in fused.inputs if v is not None] == [(4, 2, 1), (1, 3)]


def test_an_output_stays_an_output() -> None:
    n = Net(np.float64)
    a = n.op("Exp", n.input(2))
    check_refused(FusePointwise(), n.done(n.op("Neg", a), a), because="Exp_1 is an output of the network")


def test_stages_are_bounded() -> None:
    n = Net(np.float64)
    x = n.input(2)
    for _ in range(MAX_STAGES + 2):
        x = n.op("Neg", x)
    graph, report = check_pass(FusePointwise(), n.done(x), changes=2, kinds={"Pointwise": 2})
    assert [len(op.attrs.epilogue) for op in graph.of_kind("Pointwise")] == [2, MAX_STAGES]
    assert f"stages, more than {MAX_STAGES}" in report.refused[0].reason


def test_operands_are_bounded() -> None:
    n = Net(np.float64)
    x = n.input(2)
    for i in range(MAX_OPERANDS):
        x = n.op("Add", n.op("Mul", x, 2.0), n.input(2, name=f"b{i}"))
    graph, report = check_pass(FusePointwise(), n.done(x), changes=2, kinds={"Pointwise": 2})
    tensors = [v for v in graph.of_kind("Pointwise")[1].inputs if graph.constant_value(v) is None]
    assert len(tensors) == MAX_OPERANDS
    assert f"tensors, more than {MAX_OPERANDS}" in report.refused[0].reason


@pytest.mark.parametrize("count", [2, 5])
def test_known_shape_arithmetic_is_left_alone(count: int) -> None:
    n = Net(np.float64)
    shape = n.op("Shape", n.input(symbol("N"), 3))
    for _ in range(count):
        shape = n.op("Add", shape, n.ints(1, 1))
    check_untouched(FusePointwise(), n.done(shape))


def test_dead_ops_go_away() -> None:
    n = Net(np.float64)
    x = n.input(4)
    n.op("Sin", n.op("Neg", x))
    check_pass(FusePointwise(), n.done(n.op("Relu", x)), changes=1, kinds={"Relu": 1}, drops=["Neg_1", "Sin_2"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 50), st.integers(0, 50)), min_size=2, max_size=24))
def test_random_dags_keep_their_values(ops: list[tuple[str, int, int]]) -> None:
    """Any DAG of pointwise ops and row sums over tensors that broadcast: equal results, bounds held, nothing left to fuse."""
    n = Net(np.float64)
    values = [n.input(3, 4), n.input(4, name="row"), n.input(3, 1, name="column"), n.const(0.5)]
    for kind, a, b in ops:
        operands = [values[a % len(values)], values[b % len(values)]]
        if kind == "ReduceSum":
            values.append(n.op("ReduceSum", operands[0], n.ints(-1) if len(n.dims(operands[0])) else n.ints()))
        else:
            values.append(n.op(kind, *operands[: 1 if kind in UNARY else 2]))
    graph = n.done(*values[-2:])
    DeadCode()(graph)
    after = graph.copy()
    report = FusePointwise()(after)
    check_pass(FusePointwise(), graph, changes=report.changes, seeds=(1,), depends_on_input=False)
    for op in after.of_kind("Pointwise"):
        assert 2 <= len(op.attrs.epilogue) <= MAX_STAGES
        assert after.type(op.inputs[0]).shape == op.outputs[0].type.shape  # type: ignore[arg-type]


def shared(*readers: str, rows: int = 4, first: str = "Tanh", output: bool = False) -> Graph:
    """An op with several readers, among them "ReduceSum", "MatMul" and "Rows", which repeats it. ``first``: an op of one tensor,
    "Mul" of two, a difference from a "constant", or the maximum of "three" tensors."""
    n = Net(np.float64)
    a = n.input(rows, 6)
    if first == "three":
        a = n.op("Max", a, n.input(rows, 6, name="z"), n.input(rows, 6, name="y"))
    elif first == "constant":
        a = n.op("Sub", n.random(rows, 6), a)
    else:
        a = n.op(first, a, *([n.input(rows, 6, name="z")] if first == "Mul" else []))
    made = {
        "ReduceSum": lambda: n.op("ReduceSum", a, n.ints(1)),
        "MatMul": lambda: n.op("MatMul", a, n.random(6, 6)),
        "Rows": lambda: n.op("Add", n.input(3, rows, 6, name="many"), a),
    }
    ends = [
        made[kind]() if kind in made else n.op(kind, a, n.input(rows, 6, name=f"r{k}"))
        for k, kind in enumerate(readers)
    ]
    return n.done(*ends, *([a] if output else []))


@pytest.mark.parametrize("readers", [("Mul", "Add"), ("Mul", "Add", "Sub"), ("Rows", "Mul")])
def test_a_gpu_computes_an_op_in_each_of_its_readers(readers: tuple[str, ...]) -> None:
    graph, report = check_pass(
        FusePointwise(), shared(*readers), changes=1, rules={"computed_again": 1}, kinds={"Pointwise": len(readers)}, context=ON_GPU
    )  # fmt: skip
    assert all({"Tanh_1"} < op.src for op in graph.of_kind("Pointwise"))
    assert "Tanh_1" in report.fired[0].nodes
    check_refused(FusePointwise(), shared(*readers), because="Tanh_1 is also used by")


@pytest.mark.parametrize("first", ["constant", "Mul"])
def test_a_small_op_may_read_constants_or_a_second_tensor(first: str) -> None:
    """Boxes of a detector: differences from constant centers, which several sums read."""
    kinds = {"Pointwise": 2}
    graph = shared("Mul", "Add", first=first)
    check_pass(FusePointwise(), graph, changes=1, rules={"computed_again": 1}, kinds=kinds, context=ON_GPU)


def test_the_op_stays_for_a_reduction_that_computes_its_operand() -> None:
    kinds = {"Pointwise": 1, "Tanh": 1, "ReduceSum": 1}
    check_pass(FusePointwise(), shared("Mul", "ReduceSum"), changes=1, kinds=kinds, context=ON_GPU)


def masked_columns(*, table: bool = False, pool: bool = False) -> Graph:
    """The right and the left end of a large mask, from the numbers of its columns (``table``: one for each element of the mask)."""
    n = Net()
    mask = n.op("Greater", n.input(1, 48, 160, 160), n.const(0.0))
    numbers = n.random(1, 48, 160, 160) if table else n.const(np.arange(160, dtype=np.float32))
    masked = n.op("Mul", n.op("Cast", mask, attrs=CastAttrs(FP32)), numbers)
    left = n.op("ReduceMin", n.op("Where", mask, masked, n.const(1e8)), n.ints(2, 3))
    right = n.op("GlobalMaxPool", masked) if pool else n.op("ReduceMax", masked, n.ints(2, 3))
    return n.done(right, left)


@pytest.mark.parametrize("pool", [False, True])
def test_a_large_op_that_reads_less_than_it_writes_is_computed_again(pool: bool) -> None:
    """The mask has one byte per element, the numbers that a reduction and a selection read have four."""
    kinds = {"Greater": 1, "Pointwise": 2, "GlobalMaxPool" if pool else "ReduceMax": 1, "ReduceMin": 1}
    after, _ = check_pass(
        FusePointwise(), masked_columns(pool=pool), changes=2, rules={"pointwise": 1, "computed_again": 1},
        kinds=kinds, context=ON_GPU, depends_on_input=False,
    )  # fmt: skip
    assert sorted(len(op.attrs.epilogue) for op in after.of_kind("Pointwise")) == [2, 3]


def test_a_large_op_that_reads_as_much_as_it_writes_stays() -> None:
    graph = masked_columns(table=True)
    kinds = {"Greater": 1, "Pointwise": 1, "Where": 1, "ReduceMax": 1, "ReduceMin": 1}
    check_pass(
        FusePointwise(), graph, changes=1, rules={"pointwise": 1}, kinds=kinds, context=ON_GPU, depends_on_input=False
    )


@pytest.mark.parametrize("first", ["Tanh", "three"])
@pytest.mark.parametrize("moved", [False, True])
def test_an_output_of_few_elements_is_also_computed_in_its_readers(first: str, moved: bool) -> None:
    """The cell of an LSTM is an output, and the gate multiplies its tanh: one launch computes both."""
    n = Net()
    x = [n.input(2, 6, name=name) for name in "xyz"]
    cell = n.op("Max", *x) if first == "three" else n.op("Tanh", x[0])
    state = n.op("Mul", n.op("Relu", cell), x[1])
    out = n.op("Concat", n.op("Unsqueeze", cell, n.ints(0)), n.input(1, 2, 6, name="other"), attrs=ConcatAttrs(0))
    graph = n.done(state, out if moved else cell)
    after, _ = check_pass(
        FusePointwise(), graph, changes=2, rules={"pointwise": 1, "computed_again": 1}, context=ON_GPU
    )
    (fused,) = after.of_kind("Pointwise")
    assert len(fused.attrs.epilogue) == 3
    assert any(op.kind == ("Max" if first == "three" else "Tanh") for op in after.ops())


def test_its_readers_grow_further() -> None:
    n = Net(np.float64)
    a = n.op("Tanh", n.op("Exp", n.input(4, 6)))
    graph = n.done(n.op("Neg", n.op("Mul", a, n.input(4, 6, name="r"))), n.op("Sqrt", n.op("Abs", a)))
    check_pass(FusePointwise(), graph, changes=4, kinds={"Pointwise": 2}, context=ON_GPU)


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (shared("Mul", "MatMul"), "Tanh_1 is also used by MatMul"),
        (shared("Mul", "ReduceSum", "ReduceSum"), "Tanh_1 is also used by ReduceSum"),
        (shared("Mul", "Add", rows=1 << 15, output=True), "Tanh_1 is (also used by|an output)"),
        (shared("Mul", "Add", first="Mul", rows=1 << 15), "Mul_1 is also used by"),
        (shared("Mul", "Add", first="three"), "Max_1 is also used by"),
        (shared("Rows", "Mul", rows=1 << 18), "would be computed again for each element"),
    ],
    ids=[
        "a product reads it",
        "two reductions",
        "an output",
        "of two large tensors",
        "of three tensors",
        "for more elements",
    ],
)
def test_an_op_is_computed_once_where_its_result_is_needed(graph: Graph, because: str) -> None:
    report = FusePointwise()(graph, ON_GPU)
    assert report.changes == 0
    assert any(re.search(because, miss.reason) for miss in report.refused), report.refused


def test_halves_that_change_places_take_one_launch_each() -> None:
    """Couplings of a flow: one launch for each perceptron, one for the coupling, and the density."""
    n = Net()
    x, terms = n.input(64, 16), []
    for _ in range(3):
        a, b = n.op("Split", x, n.ints(8, 8), outputs=2, attrs=SplitAttrs(1))
        made = n.matmul(n.op("Relu", n.matmul(a, 32)), 16)
        scale, shift = n.op("Split", made, n.ints(8, 8), outputs=2, attrs=SplitAttrs(1))
        scale = n.op("Tanh", scale)
        x = n.op("Concat", n.op("Add", n.op("Mul", b, n.op("Exp", scale)), shift), a, attrs=ConcatAttrs(1))
        terms.append(n.op("ReduceSum", scale, n.ints(1), attrs=ReduceAttrs(keepdims=False)))
    program = check_simulated(n.done(x, n.op("Add", n.op("Add", terms[0], terms[1]), terms[2])))
    tactics = [str(s.params["tactic"]).split()[0] for s in program.steps]
    assert tactics.count("gemv_pair_sm90") == 3
    assert sum(t.startswith("reduce") for t in tactics) == 1
    assert len(tactics) <= 3 + 3 + 1 + 4, tactics  # with a copy of one half, and casts


def parts(*kinds: str, sizes: tuple[int, ...] = (8, 16, 8), number: float = 0.5) -> Graph:
    """Parts of a product's columns, each read by a product, and by an op of these kinds ("": none) before another product."""
    n = Net(np.float64)
    made = n.op("Split", n.matmul(n.input(3, 6), sum(sizes)), n.ints(*sizes), outputs=len(sizes), attrs=SplitAttrs(1))
    ends = []
    for k, (part, kind) in enumerate(zip(made, kinds, strict=True)):
        more = {"Mul": (part,), "Add": (number if k else 0.5,)}.get(kind, ())
        ends += [n.matmul(part, 4), *([n.matmul(n.op(kind, part, *more), 4)] if kind else [])]
    return n.done(*ends)


@pytest.mark.parametrize(("kinds", "ops"), [(("Mul",) * 3, 1), (("Add", "Add", ""), 1), (("Tanh", "Mul", "Tanh"), 2)])
def test_the_same_op_of_several_parts_is_one(kinds: tuple[str, ...], ops: int) -> None:
    graph, _ = check_pass(FusePointwise(), parts(*kinds), changes=1, rules={"parts_together": 1}, context=ON_GPU)
    (fused,) = graph.of_kind("Pointwise")
    assert graph.op(fused.inputs[0]).kind == "MatMul"  # type: ignore[arg-type]
    assert graph.kinds()["Split"] == 2
    assert len([op for op in graph.ops() if op.kind in ("Pointwise", "Mul", "Add", "Tanh")]) == ops


@pytest.mark.parametrize(
    "graph",
    [
        parts("Mul", "Tanh", ""),
        parts("Add", "Add", "", number=0.25),
        parts("Mul", "Mul", "", sizes=(8, 8, 64)),
        parts("Mul", "Mul", "Mul", sizes=(8, 4, 4)),
    ],
    ids=["different ops", "different numbers", "small parts of the tensor", "parts that would be copied"],
)
def test_other_ops_of_parts_stay(graph: Graph) -> None:
    check_untouched(FusePointwise(), graph, context=ON_GPU)
    check_untouched(FusePointwise(), parts("Mul", "Mul", "Mul"))
