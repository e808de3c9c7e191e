"""split_products: products whose halves are multiplied with one another become two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.split_products import SplitProducts

HALF = PassContext("cuda:sm_90a", "fp16")


def halves(n: Net, x: Value, axis: int = -1, sizes: tuple[int, int] | None = None) -> list[Value]:
    if sizes is None:
        return list(n.op("Split", x, attrs=SplitAttrs(axis, 2), outputs=2))
    return list(n.op("Split", x, n.ints(*sizes), attrs=SplitAttrs(axis), outputs=2))


def gated(bias: str = "", sizes: tuple[int, int] | None = None) -> Graph:
    n = Net(np.float64)
    x = n.input(4, 6) if bias == "gemm" else n.input(2, 3, 6)
    y = n.gemm(x, 10) if bias == "gemm" else n.matmul(x, 10)
    if bias == "add":
        y = n.op("Add", n.random(10), y)
    a, b = halves(n, y, sizes=sizes)
    return n.done(n.op("Mul", a, n.op("Gelu", b)))


@pytest.mark.parametrize(
    ("graph", "kinds"),
    [
        (gated(), {"MatMul": 2, "Gelu": 1, "Mul": 1}),
        (gated(sizes=(5, 5)), {"MatMul": 2, "Gelu": 1, "Mul": 1}),
        (gated("add"), {"MatMul": 2, "Add": 2, "Gelu": 1, "Mul": 1}),
        (gated("gemm"), {"MatMul": 2, "Add": 2, "Gelu": 1, "Mul": 1}),
    ],
)
def test_a_gated_unit_is_two_products(graph: Graph, kinds: dict[str, int]) -> None:
    after, _ = check_pass(SplitProducts(), graph, changes=1, kinds=kinds)
    check_pass(FuseEpilogue(), after, changes=sum(kinds.values()) - 2, kinds={"MatMul": 2})


def test_halves_that_are_slices_of_any_width() -> None:
    n = Net(np.float64)
    y = n.matmul(n.input(2, 3, 6), 10)
    a, b = (n.op("Slice", y, n.ints(i), n.ints(j), n.ints(2)) for i, j in ((4, 9223372036854775807), (0, 4)))
    padded = n.op("Mul", n.op("Slice", a, n.ints(0), n.ints(4), n.ints(-1)), b)
    check_untouched(SplitProducts(), n.done(padded))  # a part of a part is none
    n = Net(np.float64)
    y = n.matmul(n.input(2, 3, 6), 10)
    a, b = (n.op("Slice", y, n.ints(i), n.ints(j), n.ints(2)) for i, j in ((5, 9223372036854775807), (0, 5)))
    check_pass(
        SplitProducts(),
        n.done(n.op("Mul", n.op("Sigmoid", a), b)),
        changes=1,
        kinds={"MatMul": 2, "Sigmoid": 1, "Mul": 1},
    )


@pytest.mark.parametrize("of", ["part", "product"])
def test_values_with_another_reader_stay(of: str) -> None:
    n = Net(np.float64)
    y = n.matmul(n.input(3, 6), 10)
    a, b = halves(n, y)
    graph = n.done(n.op("Mul", a, n.op("Gelu", b)), n.op("Relu", a if of == "part" else y))
    check_refused(SplitProducts(), graph, because="has another reader")


def test_halves_that_go_apart_and_rows_are_not_seen() -> None:
    n = Net(np.float64)
    a, b = halves(n, n.matmul(n.input(3, 6), 10))
    check_untouched(SplitProducts(), n.done(n.op("Relu", a), n.op("Gelu", b)))
    n = Net(np.float64)
    a, b = halves(n, n.matmul(n.input(4, 6), 10), axis=0)
    check_untouched(SplitProducts(), n.done(n.op("Mul", a, n.op("Gelu", b))))


def test_products_that_are_not_seen() -> None:
    for scaled in (False, True):
        n = Net(np.float64)
        y = n.gemm(n.input(4, 6), 10, alpha=2.0) if scaled else n.op("Relu", n.matmul(n.input(4, 6), 10))
        a, b = halves(n, y)
        check_untouched(SplitProducts(), n.done(n.op("Mul", a, b)))


def test_two_values_of_one_scalar_are_no_halves() -> None:
    n = Net(np.float64)
    x = n.input()
    check_untouched(SplitProducts(), n.done(n.op("Mul", n.op("Unsqueeze", x, n.ints(0)), n.op("Expand", x, n.ints(3)))))


def gate(n: Net, y: Value) -> Value:
    a, b = halves(n, y, axis=1)
    return n.op("Mul", n.op("Tanh", a), n.op("Sigmoid", b))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32", "fp32"])
@pytest.mark.parametrize("dims", [(2, 3, 9), (2, 3, 5, 6)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gate_is_two_convolutions(dims: tuple[int, ...], bias: bool, precision: str) -> None:
    n = Net(np.float64)
    graph = n.done(gate(n, n.conv(n.input(*dims), 10, bias=bias)))
    after, _ = check_pass(
        SplitProducts(), graph, context=replace(HALF, precision=precision), changes=1,
        kinds={"Conv": 2, "Tanh": 1, "Sigmoid": 1, "Mul": 1},
    )  # fmt: skip
    assert all(o.outputs[0].type.dims[1] == 5 for o in after.of_kind("Conv"))
    check_pass(FuseEpilogue(), after, changes=3, kinds={"Conv": 2})


def test_a_gate_of_a_sum_is_four_convolutions() -> None:
    n = Net(np.float64)
    y = n.op("Add", n.conv(n.input(2, 3, 9), 10, bias=True), n.conv(n.input(2, 4, 9, name="m"), 10, 1, pads=0))
    graph = n.done(gate(n, y))
    check_pass(
        SplitProducts(), graph, context=HALF, changes=1, kinds={"Conv": 4, "Add": 2, "Tanh": 1, "Sigmoid": 1, "Mul": 1}
    )


@pytest.mark.parametrize("kind", ["Slice", "Split"])
def test_conditions_of_all_layers_are_divided(kind: str) -> None:
    n = Net(np.float64)
    conditions = n.conv(n.input(2, 4, 9, name="m"), 20, 1, pads=0, bias=True)
    if kind == "Split":
        parts = n.op("Split", conditions, n.ints(10, 10), attrs=SplitAttrs(1), outputs=2)
    else:
        parts = [n.op("Slice", conditions, n.ints(i), n.ints(i + 10), n.ints(1)) for i in (0, 10)]
    x = n.input(2, 3, 9)
    graph = n.done(*(gate(n, n.op("Add", n.conv(x, 10), part)) for part in parts))
    kinds = {"Conv": 8, "Add": 4, "Tanh": 2, "Sigmoid": 2, "Mul": 2}
    check_pass(SplitProducts(), graph, context=HALF, changes=2, kinds=kinds)


@pytest.mark.parametrize("of", ["part", "sum", "term"])
def test_a_gate_with_another_reader_stays(of: str) -> None:
    n = Net(np.float64)
    term = n.conv(n.input(2, 3, 9), 10)
    y = n.op("Add", term, n.conv(n.input(2, 4, 9, name="m"), 10))
    a, b = halves(n, y, axis=1)
    graph = n.done(n.op("Mul", n.op("Tanh", a), b), n.op("Relu", {"part": b, "sum": y, "term": term}[of]))
    check_refused(SplitProducts(), graph, context=HALF, because="has another reader")


def test_convolutions_that_are_refused() -> None:
    n = Net(np.float64)
    graph = n.done(gate(n, n.conv(n.input(2, 4, 9), 12, group=2)))
    check_refused(SplitProducts(), graph, context=HALF, because="has 2 groups")
    n = Net(np.float64)
    y = n.op("Conv", n.input(2, 4, 9), n.input(12, 4, 3, name="w"), attrs=ConvAttrs((1,), (1, 1), (1,)))
    check_refused(SplitProducts(), n.done(gate(n, y)), context=HALF, because="are not constant")


def test_gates_that_are_not_seen() -> None:
    """Parts of rows, unequal parts, conditions that are broadcast, and conditions that something else reads."""
    n = Net(np.float64)
    a, b = halves(n, n.conv(n.input(2, 3, 10), 6), axis=2)
    check_untouched(SplitProducts(), n.done(n.op("Mul", a, b)), context=HALF)
    n = Net(np.float64)
    y = n.conv(n.input(2, 3, 9), 10)
    a, b = (n.op("Slice", y, n.ints(i), n.ints(j), n.ints(1)) for i, j in ((0, 1), (1, 10)))
    check_untouched(SplitProducts(), n.done(n.op("Mul", a, b)), context=HALF)
    n = Net(np.float64)
    y = n.op("Add", n.conv(n.input(2, 3, 9), 10), n.conv(n.input(2, 3, 1, name="m"), 10, 1, pads=0))
    check_untouched(SplitProducts(), n.done(gate(n, y)), context=HALF)
    n = Net(np.float64)
    conditions = n.conv(n.input(2, 3, 9, name="m"), 20, 1, pads=0)
    own = n.op("Slice", conditions, n.ints(0), n.ints(10), n.ints(1))
    y = n.op("Add", n.conv(n.input(2, 3, 9), 10), own)
    check_untouched(SplitProducts(), n.done(gate(n, y), n.op("Relu", conditions)), context=HALF)


@pytest.mark.parametrize(
    "context",
    [PassContext("cuda:sm_90a", "int8"), PassContext("cuda:sm_80", "fp16"), PassContext("cpu", "fp16")],
)
def test_gates_stay_where_no_kernel_computes_both_factors(context: PassContext) -> None:
    n = Net(np.float64)
    check_untouched(SplitProducts(), n.done(gate(n, n.conv(n.input(2, 3, 9), 10))), context=context)


GPU = [("cuda:sm_90a", p) for p in ("fp16", "bf16", "tf32", "fp32")] + [("cuda:sm_80", "fp16"), ("simulate", "fp32")]


@pytest.mark.parametrize(("target", "precision"), GPU)
@pytest.mark.parametrize("dims", [(2, 8, 9), (2, 8, 5, 6)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gate_of_a_depthwise_convolution_is_two(
    dims: tuple[int, ...], bias: bool, target: str, precision: str
) -> None:
    n = Net(np.float64)
    graph = n.done(gate(n, n.conv(n.input(*dims), 8, group=8, bias=bias)))
    kinds = {"Slice": 2, "Conv": 2, "Tanh": 1, "Sigmoid": 1, "Mul": 1}
    after, _ = check_pass(SplitProducts(), graph, context=PassContext(target, precision), changes=1, kinds=kinds)
    assert all(o.attrs.group == o.outputs[0].type.dims[1] == 4 for o in after.of_kind("Conv"))
    check_pass(FuseEpilogue(), after, changes=3, kinds={"Slice": 2, "Conv": 2})


def test_depthwise_gates_that_are_refused() -> None:
    n = Net(np.float64)
    graph = n.done(gate(n, n.conv(n.input(2, 12, 9), 12, group=12)))
    check_refused(SplitProducts(), graph, context=HALF, because="each half has 6 channels, not a multiple of 4")
    n = Net(np.float64)
    a, b = halves(n, n.conv(n.input(2, 8, 9), 8, group=8), axis=1)
    graph = n.done(n.op("Mul", n.op("Tanh", a), b), n.op("Relu", b))
    check_refused(SplitProducts(), graph, context=HALF, because="has another reader")
    n = Net(np.float64)
    attrs = ConvAttrs((1,), (1, 1), (1,), 8)
    y = n.op("Conv", n.input(2, 8, 9), n.random(8, 1, 3), n.input(8, name="bias"), attrs=attrs)
    check_refused(SplitProducts(), n.done(gate(n, y)), context=HALF, because="is not constant")


@pytest.mark.parametrize("context", [PassContext("cuda:sm_90a", "int8"), PassContext("cpu", "fp16")])
def test_depthwise_gates_stay_elsewhere(context: PassContext) -> None:
    n = Net(np.float64)
    check_untouched(SplitProducts(), n.done(gate(n, n.conv(n.input(2, 8, 9), 8, group=8))), context=context)


def residual_and_skip(n: Net, *, group: int = 1, read: str = "", kind: str = "Split", sum_: bool = False) -> Graph:
    """WaveGlow: one half of the channels goes to the next layer, the other half to the end."""
    x, out = n.input(2, 4, 9, name="x"), n.input(2, 4, 9, name="out")
    y = n.conv(n.input(2, 4, 9, name="gate"), 8, 1, pads=0, bias=True, group=group)
    if kind == "Split":
        a, b = halves(n, y, axis=1)
    else:
        a, b = (n.op("Slice", y, n.ints(i), n.ints(i + 4), n.ints(1)) for i in (0, 4))
    if sum_:
        return n.done(n.op("Add", a, b))
    more = [n.op("Relu", a if read == "half" else y)] if read else []
    return n.done(n.op("Add", x, a), n.op("Add", out, b), *more)


@pytest.mark.parametrize("kind", ["Split", "Slice"])
def test_residual_and_skip_are_two_convolutions(kind: str) -> None:
    graph = residual_and_skip(Net(np.float64), kind=kind)
    after, _ = check_pass(SplitProducts(), graph, changes=1, kinds={"Conv": 2, "Add": 2})
    check_pass(FuseEpilogue(), after, changes=2, kinds={"Conv": 2})


def test_residuals_that_are_refused() -> None:
    graph = residual_and_skip(Net(np.float64), group=2)
    check_refused(SplitProducts(), graph, because="has 2 groups")
    graph = residual_and_skip(Net(np.float64), sum_=True)
    check_refused(SplitProducts(), graph, because="are added to one another")


@pytest.mark.parametrize("read", ["half", "whole"])
def test_halves_that_others_read_stay(read: str) -> None:
    check_untouched(SplitProducts(), residual_and_skip(Net(np.float64), read=read))


def test_halves_that_get_a_constant_stay() -> None:
    n = Net(np.float64)
    a, b = halves(n, n.conv(n.input(2, 4, 9), 8), axis=1)
    check_untouched(SplitProducts(), n.done(n.op("Add", a, n.random(2, 4, 9)), n.op("Relu", b)))
    n = Net(np.float64)
    a, b = halves(n, n.conv(n.input(2, 4, 9), 8), axis=1)
    check_untouched(SplitProducts(), n.done(n.op("Add", a, n.random(2, 4, 9)), n.op("Add", b, n.random(2, 4, 9))))
