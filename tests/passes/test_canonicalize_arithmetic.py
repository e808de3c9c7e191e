"""canonicalize_arithmetic: constants merge, sums are additions, bounds are clips; step functions see no other rounding."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.graph import Graph, Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.ops.shape import ReshapeAttrs, TransposeAttrs
from optdnn.passes.canonicalize_arithmetic import CanonicalizeArithmetic
from optdnn.passes.fuse_conv_bn import FuseConvBn
from optdnn.types import INT64

ARITHMETIC = CanonicalizeArithmetic()


def chain(*links: tuple[Any, ...], dtype: Any = np.float32, dims: tuple[int, ...] = (2, 4, 3, 3)) -> Graph:
    """A chain of ops. "x" among the operands of an op is the previous value, which is operand 0 by default."""
    n = Net(dtype)
    value = n.input(*dims)
    for kind, *operands in links:
        given = operands if any(isinstance(o, str) for o in operands) else ["x", *operands]
        value = n.op(kind, *(value if isinstance(o, str) else o for o in given))
    return n.done(value)


CHANNELS = np.linspace(0.5, 2.0, 4).reshape(4, 1, 1)


def test_constants_come_last() -> None:
    graph, _ = check_pass(
        ARITHMETIC,
        chain(("Mul", 2.0, "x"), ("Sub", 1.0, "x")),
        changes=1,
        kinds={"Mul": 1, "Sub": 1},
        rules={"constant_last": 1},
    )
    (mul,) = graph.of_kind("Mul")
    assert graph.constant_value(mul.inputs[1]) is not None


@pytest.mark.parametrize("first", ["Mul", "Add"])
@pytest.mark.parametrize("flip", [False, True])
def test_scales_and_shifts_merge(first: str, flip: bool) -> None:
    a, b = (CHANNELS, 0.25) if flip else (0.25, CHANNELS)
    graph, _ = check_pass(
        ARITHMETIC, chain((first, a), (first, b)), changes=1, kinds={first: 1}, rules={"merge_constants": 1}
    )
    (op,) = graph.of_kind(first)
    merged = graph.constant_value(op.inputs[1])
    assert merged.shape == (4, 1, 1)
    expected = (CHANNELS * 0.25 if first == "Mul" else CHANNELS + 0.25).astype(np.float32)
    assert np.array_equal(merged, expected)


def test_differences_and_quotients_join_the_chain() -> None:
    graph = chain(("Sub", 0.5), ("Add", CHANNELS), ("Div", 3.0), ("Mul", 1.5))
    check_pass(
        ARITHMETIC,
        graph,
        changes=4,
        kinds={"Add": 1, "Mul": 1},
        rules={"sub_is_add": 1, "div_is_mul": 1, "merge_constants": 2},
    )


def test_a_scale_goes_before_a_shift_where_it_merges() -> None:
    graph = chain(("Mul", 2.0), ("Add", CHANNELS), ("Mul", 0.25), ("Add", 1.5))
    check_pass(ARITHMETIC, graph, changes=3, kinds={"Add": 1, "Mul": 1}, rules={"scale_first": 1, "merge_constants": 2})


def test_a_scale_after_the_bias_of_a_matrix_product_goes_to_the_product() -> None:
    n = Net()
    y = n.op("Mul", n.op("Add", n.matmul(n.input(2, 5, 6), 4), n.random(4)), 0.125)
    graph, _ = check_pass(ARITHMETIC, n.done(y), changes=1, rules={"scale_first": 1})
    assert graph.op(graph.of_kind("Mul")[0].inputs[0]).kind == "MatMul"


def test_a_scale_after_a_shift_stays_where_nothing_merges() -> None:
    check_untouched(ARITHMETIC, chain(("Add", CHANNELS), ("Mul", 0.25)))


def heads(n: Net, x: Value, *perm: int) -> Value:
    return n.op("Transpose", n.op("Reshape", x, np.asarray([0, 0, 3, 4], np.int64)), attrs=TransposeAttrs(perm))


@pytest.mark.parametrize("bias", [False, True])
def test_the_scale_of_attention_goes_up_to_the_weights(bias: bool) -> None:
    n = Net()
    y = n.matmul(n.input(2, 5, 6), 12)
    y = heads(n, n.op("Add", y, n.random(12)) if bias else y, 0, 2, 3, 1)
    graph, _ = check_pass(
        ARITHMETIC,
        n.done(n.op("Mul", y, n.const([[0.25]]))),
        changes=2 if bias else 1,
        rules={"hoist_scale": 1, "scale_first": 1} if bias else {"hoist_scale": 1},
    )
    (mul,) = graph.of_kind("Mul")
    assert graph.op(mul.inputs[0]).kind == "MatMul"
    FuseConvBn()(graph)
    assert "Mul" not in graph.kinds()


def assert_unchanged(graph: Graph) -> None:
    """No rewrite (the Transpose among the moves is refused by another rule)."""
    assert ARITHMETIC(graph).changes == 0


def test_a_scale_stays_where_no_weights_take_it() -> None:
    n = Net()
    assert_unchanged(n.done(n.op("Mul", heads(n, n.input(2, 5, 12), 0, 2, 1, 3), 0.25)))
    n = Net()
    y = heads(n, n.op("MatMul", n.input(2, 5, 6), n.input(6, 12, name="w")), 0, 2, 1, 3)
    assert_unchanged(n.done(n.op("Mul", y, 0.25)))
    n = Net()
    y = heads(n, n.op("Add", n.op("Exp", n.input(2, 5, 12)), n.random(12)), 0, 2, 1, 3)
    assert_unchanged(n.done(n.op("Mul", y, 0.25)))


def test_a_scale_of_a_value_with_other_uses_stays() -> None:
    for shared in range(4):
        n = Net()
        chain = [n.matmul(n.input(2, 5, 6), 12)]
        chain.append(n.op("Add", chain[-1], n.random(12)))
        chain.append(n.op("Reshape", chain[-1], np.asarray([0, 0, 3, 4], np.int64)))
        chain.append(n.op("Transpose", chain[-1], attrs=TransposeAttrs((0, 2, 1, 3))))
        assert_unchanged(n.done(n.op("Mul", chain[-1], 0.25), n.op("Exp", chain[shared])))


def test_a_scale_in_front_of_a_step_stays() -> None:
    n = Net()
    y = n.op("Floor", n.op("Mul", heads(n, n.matmul(n.input(2, 5, 6), 12), 0, 2, 1, 3), 0.3))
    check_refused(ARITHMETIC, n.done(y), because="another rounding could change", rule="hoist_scale")


def test_merged_constants_never_grow() -> None:
    rows = np.linspace(1, 2, 3).reshape(3, 1)
    graph = chain(("Mul", CHANNELS), ("Mul", rows))
    check_refused(ARITHMETIC, graph, because="of 12 elements would be larger", rule="merge_constants")


def test_constants_of_values_with_other_uses_stay() -> None:
    n = Net()
    a = n.op("Mul", n.input(3), 2.0)
    check_untouched(ARITHMETIC, n.done(n.op("Mul", a, 3.0), n.op("Exp", a)))


@pytest.mark.parametrize(
    ("links", "because"),
    [
        ((("Mul", 2e38), ("Mul", 4.0)), "would overflow float32"),
        ((("Mul", 1e-30), ("Mul", 1e-30)), "would underflow float32"),
        ((("Div", np.float32(1e-45)),), "would overflow float32"),
        ((("Div", 0.0),), "divides by zero"),
        ((("Mul", 1.0), ("Add", 3e38), ("Mul", 4.0), ("Add", 1.0)), "would overflow float32"),
    ],
)
def test_constants_out_of_range_are_refused(links: tuple[tuple[Any, ...], ...], because: str) -> None:
    graph = chain(*links)
    report = ARITHMETIC(graph.copy())
    assert [r for r in report.refused if because in r.reason]


def test_a_shift_that_underflows_is_nothing() -> None:
    graph = chain(("Mul", 1e-30), ("Add", 1e-30), ("Mul", 1e-20), ("Add", 1.0))
    report = ARITHMETIC(graph)
    assert "scale_first" in {f.rule for f in report.fired}


@pytest.mark.parametrize(
    ("links", "rule"),
    [
        ((("Div", 49.0), ("Floor",)), "div_is_mul"),
        ((("Mul", 3.0), ("Mul", 0.1), ("Ceil",)), "merge_constants"),
        ((("Add", 3.0), ("Add", 0.1), ("Abs",), ("Round",)), "merge_constants"),
        ((("Mul", 3.0), ("Add", 3.0), ("Mul", 0.1), ("Sign",)), "scale_first"),
    ],
)
def test_step_functions_see_no_other_rounding(links: tuple[tuple[Any, ...], ...], rule: str) -> None:
    check_refused(ARITHMETIC, chain(*links), because="another rounding could change", rule=rule)


def test_a_cast_to_integers_is_a_step() -> None:
    n = Net()
    y = n.op(
        "Cast", n.op("Reshape", n.op("Div", n.input(4), 49.0), np.asarray([2, 2], np.int64)), attrs=CastAttrs(INT64)
    )
    check_refused(ARITHMETIC, n.done(y), because="could change the result of Cast Cast_3")


def test_the_reason_why() -> None:
    """49 / 49 is 1, 49 * (1 / 49) is less, in both precisions that are compared."""
    x = np.float64(49.0)
    assert np.floor(x / 49) == 1
    assert np.floor(x * (1 / x)) == 0


def test_a_quotient_by_a_power_of_two_is_exact_before_a_step_too() -> None:
    check_pass(ARITHMETIC, chain(("Div", 0.25), ("Floor",)), changes=1, kinds={"Mul": 1, "Floor": 1})


def test_integers_stay_as_they_are() -> None:
    check_untouched(ARITHMETIC, chain(("Sub", 3), ("Div", 2), ("Mul", 3), ("Mul", 5), dtype=np.int32))


def test_sums_are_additions_from_the_left() -> None:
    n = Net()
    x, y, z = (n.input(2, 3, name=k) for k in "xyz")
    graph, _ = check_pass(
        ARITHMETIC, n.done(n.op("Sum", x, y, z)), changes=1, kinds={"Add": 2}, rules={"sum_is_add": 1}
    )
    last = graph.op(graph.op(graph.outputs[0]).inputs[0])
    assert graph.op(last.inputs[1]).outputs[0].name == "z"


def test_reciprocals() -> None:
    check_pass(ARITHMETIC, chain(("Exp",), ("Div", 1.0, "x")), changes=1, kinds={"Exp": 1, "Reciprocal": 1})
    check_untouched(ARITHMETIC, chain(("Exp",), ("Div", 2.0, "x")))
    check_untouched(ARITHMETIC, chain(("Exp",), ("Div", np.ones((5, 1, 1, 1, 1)), "x")))
    for flip in (False, True):
        n = Net()
        x, y = n.input(2, 3), n.op("Exp", n.input(2, 3, name="y"))
        operands = (n.op("Reciprocal", y), x) if flip else (x, n.op("Div", 1.0, y))
        check_pass(ARITHMETIC, n.done(n.op("Mul", *operands)), changes=1 + (not flip), kinds={"Div": 1, "Exp": 1})


def test_negations() -> None:
    n = Net()
    x, y = n.input(2, 3), n.input(2, 3, name="y")
    check_pass(ARITHMETIC, n.done(n.op("Add", x, n.op("Neg", y))), changes=1, kinds={"Sub": 1}, rules={"negation": 1})
    n = Net()
    x, y = n.input(2, 3), n.input(2, 3, name="y")
    check_pass(ARITHMETIC, n.done(n.op("Add", n.op("Neg", y), x)), changes=1, kinds={"Sub": 1})
    n = Net()
    x, y = n.input(2, 3), n.input(2, 3, name="y")
    check_pass(ARITHMETIC, n.done(n.op("Sub", x, n.op("Neg", y))), changes=1, kinds={"Add": 1})
    check_pass(ARITHMETIC, chain(("Exp",), ("Neg",), ("Neg",)), changes=1, kinds={"Exp": 1})
    n = Net()
    m = n.op("Neg", n.input(2, 3))
    check_untouched(ARITHMETIC, n.done(n.op("Add", n.input(2, 3, name="y"), m), m))


@pytest.mark.parametrize("flip", [False, True])
def test_straight_through(flip: bool) -> None:
    """Quantizers add the difference of the quantized value and their input to the input."""
    n = Net()
    x = n.input(2, 3)
    q = n.op("Exp", x)
    terms = (n.op("Sub", q, x), x) if flip else (x, n.op("Sub", q, x))
    graph = n.done(n.op("Add", *terms))
    check_pass(ARITHMETIC, graph, changes=1, kinds={"Exp": 1}, rules={"straight_through": 1})


def test_other_differences_stay() -> None:
    n = Net()
    x, y = n.input(2, 3), n.input(2, 3, name="y")
    check_untouched(ARITHMETIC, n.done(n.op("Add", x, n.op("Sub", x, y))))
    n = Net()
    x, row = n.input(2, 3), n.input(3, name="y")  # the result has the shape of x
    check_untouched(ARITHMETIC, n.done(n.op("Add", x, n.op("Sub", n.op("Exp", row), x))))
    n = Net()
    x, q = n.input(2, 3, dtype=np.int64), n.input(2, 3, name="q", dtype=np.int64)
    check_untouched(ARITHMETIC, n.done(n.op("Add", x, n.op("Sub", q, x))))


@pytest.mark.parametrize(
    ("exponent", "kinds"),
    [
        (2.0, {"Mul": 1}),
        (3.0, {"Mul": 2}),
        (0.5, {"Sqrt": 1}),
        (-0.5, {"Reciprocal": 1, "Sqrt": 1}),
        (-1.0, {"Reciprocal": 1}),
        (1.0, {}),
    ],
)
def test_powers(exponent: float, kinds: dict[str, int]) -> None:
    check_pass(ARITHMETIC, chain(("Exp",), ("Pow", exponent)), changes=1, kinds={"Exp": 1, **kinds})


def test_powers_by_integers_and_others() -> None:
    check_pass(ARITHMETIC, chain(("Pow", "x", np.asarray([2], np.int64))), changes=1, kinds={"Mul": 1})
    check_untouched(ARITHMETIC, chain(("Exp",), ("Pow", 1.5)))
    check_untouched(ARITHMETIC, chain(("Exp",), ("Pow", CHANNELS)))


# ---------------------------------------------------------------- bounds

INF = float(np.inf)
BOUNDS: dict[str, tuple[tuple[tuple[Any, ...], ...], tuple[float, float]]] = {
    "Max": ((("Max", -0.5),), (-0.5, INF)),
    "Min, constant first": ((("Min", 0.5, "x"),), (-INF, 0.5)),
    "Max then Min": ((("Max", -0.5), ("Min", 0.5)), (-0.5, 0.5)),
    "Relu, Relu": ((("Relu",), ("Relu",)), (0, INF)),
    "Relu, Clip above": ((("Relu",), ("Clip", None, 0.5)), (0, 0.5)),
    "Relu, Clip": ((("Relu",), ("Clip", -1.0, 0.5)), (0, 0.5)),
    "Clip, Relu": ((("Clip", -0.25, 0.5), ("Relu",)), (0, 0.5)),
    "Clip, Clip": ((("Clip", -0.25, 0.75), ("Clip", -0.5, 0.5)), (-0.25, 0.5)),
    "Clip, Clip beside it": ((("Clip", -0.25, -0.125), ("Clip", 0.125, 0.25)), (0.125, 0.125)),
    "Clip from 0": ((("Clip", 0.0),), (0, INF)),
    "Clip from 0 to the largest number": ((("Clip", 0.0, float(np.finfo(np.float32).max)),), (0, INF)),
    "Max with 0": ((("Max", 0.0),), (0, INF)),
}


@pytest.mark.parametrize(("links", "bounds"), BOUNDS.values(), ids=BOUNDS.keys())
def test_bounds_become_one(links: tuple[tuple[Any, ...], ...], bounds: tuple[float, float]) -> None:
    graph = chain(*links)
    result = graph.copy()
    changes = ARITHMETIC(result).changes
    kind = "Relu" if bounds == (0, INF) else "Clip"
    check_pass(ARITHMETIC, graph, changes=changes, kinds={kind: 1}, depends_on_input=bounds[0] != bounds[1])
    (op,) = result.of_kind(kind)
    assert len(op.src) == len(links)
    if kind == "Clip":
        found = [result.constant_value(op.input(i)) for i in (1, 2)]
        assert [v if c is None else float(c) for c, v in zip(found, (-INF, INF), strict=True)] == list(bounds)


def test_bounds_that_are_not_one_number_stay() -> None:
    check_untouched(ARITHMETIC, chain(("Max", CHANNELS)))
    check_untouched(ARITHMETIC, chain(("Max", np.zeros((1, 1, 1, 1, 1)))))
    check_untouched(ARITHMETIC, chain(("Max", np.nan)))
    n = Net()
    check_untouched(ARITHMETIC, n.done(n.op("Clip", n.op("Relu", n.input(3)), None, n.input(name="high"))))


def test_bounds_of_values_with_other_uses_stay() -> None:
    n = Net()
    r = n.op("Clip", n.input(3), -0.5, 0.5)
    check_untouched(ARITHMETIC, n.done(n.op("Clip", r, 0.0, 1.0), n.op("Exp", r)))


def test_bounds_in_half_precision() -> None:
    check_pass(ARITHMETIC, chain(("Relu",), ("Min", 0.5), dtype=ml_dtypes.bfloat16), changes=2, kinds={"Clip": 1})


# ---------------------------------------------------------------- interpolations


def lerp(condition: tuple[int, ...] = (3,), last: str = "b") -> Graph:
    """PyTorch's ``lerp(a, b, w)``, as its dynamo exporter writes it. ``last``: the other end of the second form."""
    n = Net()
    a, b, w = (n.input(3, name=name) for name in "abw")
    c = w if condition == (3,) else n.input(*condition, name="c")
    way = n.op("Sub", b, a)
    near = n.op("Add", a, n.op("Mul", w, way))
    far = n.op("Sub", {"a": a, "b": b}[last], n.op("Mul", way, n.op("Sub", 1.0, w)))
    return n.done(n.op("Where", n.op("Less", n.op("Abs", c), 0.5), near, far))


def test_of_two_equal_interpolations_one_remains() -> None:
    kinds = {"Add": 1, "Mul": 1, "Sub": 1}
    check_pass(ARITHMETIC, lerp(), changes=1, kinds=kinds, rules={"interpolation": 1})


def test_other_selections_stay() -> None:
    check_untouched(ARITHMETIC, lerp(last="a"))
    check_refused(ARITHMETIC, lerp((2, 3)), because="the condition enlarges the result")


# ---------------------------------------------------------------- Gemm


def test_alpha_and_beta_go_into_the_constants() -> None:
    n = Net()
    y = n.gemm(n.input(2, 6), 4, alpha=0.5, beta=3.0)
    graph, _ = check_pass(ARITHMETIC, n.done(y), changes=1, kinds={"Gemm": 1}, rules={"gemm_scalars": 1})
    assert graph.of_kind("Gemm")[0].attrs == GemmAttrs()


def test_a_computed_value_keeps_its_factor() -> None:
    n = Net()
    y = n.op("Gemm", n.input(2, 6), n.input(6, 4, name="w"), n.random(4), attrs=GemmAttrs(0.5, 3.0))
    graph, _ = check_pass(ARITHMETIC, n.done(y), changes=1)
    assert graph.of_kind("Gemm")[0].attrs == GemmAttrs(0.5)
    n = Net()
    y = n.op("Gemm", n.input(2, 6), n.input(6, 4, name="w"), n.input(4, name="c"), attrs=GemmAttrs(0.5, 3.0))
    graph, _ = check_pass(ARITHMETIC, n.done(y), changes=1, kinds={"Gemm": 1, "Mul": 1, "Add": 1})
    assert graph.of_kind("Gemm")[0].attrs.alpha == 0.5


@pytest.mark.parametrize(("rows", "shape"), [(2, (2, 4)), (2, (4,)), (2, (2, 1)), (2, (1, 4)), (2, ()), (1, (1, 4))])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_computed_addend_leaves_the_gemm(rows: int, shape: tuple[int, ...], transposed: bool) -> None:
    n = Net()
    weight = n.random(4, 6) if transposed else n.random(6, 4)
    y = n.op("Gemm", n.input(rows, 6), weight, n.input(*shape, name="c"), attrs=GemmAttrs(transB=transposed))
    kinds = {"Gemm" if transposed else "MatMul": 1, "Add": 1}
    check_pass(ARITHMETIC, n.done(y), changes=1, kinds=kinds, rules={"gemm_addend": 1})


def test_constants_that_are_no_vector_leave_the_gemm() -> None:
    n = Net()
    y = n.op("Gemm", n.input(2, 6), n.random(6, 4), n.random(2, 4), attrs=GemmAttrs())
    check_pass(ARITHMETIC, n.done(y), changes=1, kinds={"MatMul": 1, "Add": 1}, rules={"gemm_addend": 1})


def test_an_addend_times_zero_is_not_read() -> None:
    """ONNX Runtime does not read it either: NaN times zero would be NaN."""
    n = Net()
    y = n.op("Gemm", n.input(3, 6), n.random(6, 4), n.op("Log", n.input(3, 4, name="c")), attrs=GemmAttrs(beta=0.0))
    check_pass(ARITHMETIC, n.done(y), changes=1, kinds={"MatMul": 1}, rules={"gemm_addend": 1})


def test_vectors_of_constants_stay_in_the_gemm() -> None:
    n = Net()
    check_untouched(ARITHMETIC, n.done(n.op("Gemm", n.input(2, 6), n.random(6, 4), n.random(1, 4), attrs=GemmAttrs())))


def test_a_scaled_addend_of_a_product_with_other_readers() -> None:
    """The formula of a GELU, as tf2onnx writes it: ``u + 0.044715 u^3`` is a Gemm, which computes u once more."""
    n = Net()
    x, w = n.input(2, 6), n.random(6, 4)
    u = n.op("MatMul", x, w, attrs=MatMulAttrs())
    cube = n.op("Mul", n.op("Mul", u, u), u)
    y = n.op("Gemm", x, w, cube, attrs=GemmAttrs(beta=0.044715))
    kinds = {"MatMul": 1, "Mul": 3, "Add": 1}
    check_pass(ARITHMETIC, n.done(y), changes=1, kinds=kinds, rules={"gemm_addend": 1})


def test_a_view_of_one_row_is_left_out_of_the_sum() -> None:
    """Rows of one LSTM step, as tf2onnx writes them for a batch of 1."""
    n = Net()
    other = n.op("Reshape", n.op("Exp", n.input(1, 4, name="c")), n.ints(4), attrs=ReshapeAttrs())
    y = n.op("Gemm", n.input(1, 6), n.random(6, 4), other, attrs=GemmAttrs())
    check_pass(ARITHMETIC, n.done(y), changes=1, kinds={"MatMul": 1, "Exp": 1, "Add": 1})


def test_factors_that_overflow_stay() -> None:
    n = Net(np.float16)
    check_refused(ARITHMETIC, n.done(n.gemm(n.input(2, 6), 4, alpha=1e6)), because="would overflow float16")
