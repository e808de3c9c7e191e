"""Products of parts that each have a matrix of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Value
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.grouped_products import GroupedProducts

PASS = GroupedProducts()
KEPT = ReduceAttrs(keepdims=True)


def product(n: Net, x: Value, columns: int, bias: bool = True) -> Value:
    depth = n.dims(x)[-1]
    assert isinstance(depth, int)
    y = n.op("MatMul", x, n.random(depth, columns, scale=0.3), attrs=MatMulAttrs())
    return n.op("Add", y, n.random(columns)) if bias else y


def bands(n: Net, sizes: tuple[int, ...] = (8, 8, 8, 8), rows: int = 5) -> list[Value]:
    x = n.input(2, rows, sum(sizes))
    return n.op("Split", x, n.ints(*sizes), attrs=SplitAttrs(axis=-1), outputs=len(sizes))  # type: ignore[no-any-return]


def joined(n: Net, parts: list[Value]) -> Graph:
    return n.done(n.op("Concat", *parts, attrs=ConcatAttrs(-1)))


def test_bands_are_the_groups_of_a_convolution() -> None:
    n = Net()
    graph, _ = check_pass(
        PASS,
        joined(n, [n.op("Tanh", product(n, band, 6)) for band in bands(n)]),
        changes=1,
        rules={"grouped_products": 1},
    )
    (conv,) = graph.of_kind("Conv")
    assert conv.attrs.group == 4
    assert graph.type(conv.inputs[1]).static_shape == (24, 8, 1)
    assert graph.type(conv.inputs[2]).static_shape == (24,)
    assert not {"MatMul", "Add"} & set(graph.kinds())
    assert graph.kinds()["Tanh"] == 1


def test_each_run_of_bands_of_one_size_is_a_convolution() -> None:
    """BS-RoFormer has bands of seven sizes. Bands that are too few stay products."""
    n = Net()
    graph, _ = check_pass(
        PASS,
        joined(n, [product(n, band, 6) for band in bands(n, (4, 4, 4, 8, 8, 8, 12, 12))]),
        changes=2,
        rules={"grouped_products": 2},
    )
    assert sorted(conv.attrs.group for conv in graph.of_kind("Conv")) == [3, 3]
    assert graph.kinds()["MatMul"] == 2


NORMS: dict[str, Callable[[Net, Value], Value]] = {
    "length": lambda n, x: n.op("Div", x, n.op("Clip", n.op("ReduceL2", x, n.ints(-1), attrs=KEPT), 1e-6)),
    "layer": lambda n, x: n.op("LayerNormalization", x, n.positive(8), n.random(8), attrs=LayerNormAttrs(axis=2)),
    "scale": lambda n, x: n.op("Mul", x, n.positive(8)),
    "softmax": lambda n, x: n.op("Softmax", n.op("Mul", x, n.const(n.rng.uniform(1, 2)))),
}


@pytest.mark.parametrize("kind", NORMS)
def test_operators_between_a_part_and_its_product_are_computed_once(kind: str) -> None:
    n = Net()
    graph, _ = check_pass(
        PASS,
        joined(n, [product(n, NORMS[kind](n, band), 6) for band in bands(n)]),
        changes=1,
        rules={"grouped_products": 1},
    )
    assert len(graph.of_kind("Conv")) == 1
    assert all(count == 1 for k, count in graph.kinds().items() if k not in ("Gather", "Reshape", "Transpose")), (
        graph.kinds()
    )


def band_of_images(n: Net, x: Value, begin: int, size: int) -> Value:
    """Frequencies of a spectrum (item, channel, frequency, frame), as rows of frames."""
    part = n.op("Slice", x, n.ints(begin), n.ints(begin + size), n.ints(2))
    rows = n.op("Transpose", part, attrs=TransposeAttrs((0, 3, 1, 2)))
    return n.op("Reshape", rows, n.ints(2, 5, 3 * size))  # type: ignore[no-any-return]


def test_parts_of_another_axis_may_become_rows() -> None:
    """Music separation by bands of a spectrum: slices of frequencies, transposed and flattened."""
    n = Net()
    x = n.input(2, 3, 12, 5)
    parts = [band_of_images(n, x, 4 * k, 4) for k in range(3)]
    graph, _ = check_pass(
        PASS,
        joined(n, [product(n, n.op("Mul", part, n.positive(12)), 6) for part in parts]),
        changes=1,
        rules={"grouped_products": 1},
    )
    assert [conv.attrs.group for conv in graph.of_kind("Conv")] == [3]
    assert graph.kinds()["Mul"] == 1


def test_parts_of_another_axis_that_are_moved_differently_refuse() -> None:
    n = Net()
    x = n.input(2, 3, 12, 5)
    parts = [band_of_images(n, x, 4 * k, 4) for k in range(3)]
    other = n.op("Transpose", n.op("Slice", x, n.ints(4), n.ints(8), n.ints(2)), attrs=TransposeAttrs((0, 3, 2, 1)))
    parts[1] = n.op("Reshape", other, n.ints(2, 5, 12))
    check_untouched(PASS, joined(n, [product(n, part, 6) for part in parts]))


def gated(n: Net, y: Value) -> Value:
    first, second = n.op("Split", y, attrs=SplitAttrs(axis=-1, num_outputs=2), outputs=2)
    return n.op("Mul", first, n.op("Sigmoid", second))  # type: ignore[no-any-return]


def sliced(n: Net, x: Value, k: int) -> Value:
    return n.op("Squeeze", n.op("Slice", x, n.ints(k), n.ints(k + 1), n.ints(2)), n.ints(2))  # type: ignore[no-any-return]


def gathered(n: Net, x: Value, k: int) -> Value:
    return n.op("Gather", x, n.const(k, np.int64), attrs=GatherAttrs(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("take", [sliced, gathered])
def test_operators_on_the_groups_are_computed_once(take: Callable[[Net, Value, int], Value]) -> None:
    """The masks of BS-RoFormer: two layers and a gate for each position of an axis."""
    n = Net()
    x = n.input(2, 5, 4, 8)
    parts = [take(n, x, k) for k in range(1, 4)]
    graph, _ = check_pass(
        PASS,
        joined(n, [gated(n, product(n, n.op("Tanh", product(n, part, 16)), 12)) for part in parts]),
        changes=5,
        rules={"grouped_products": 2, "grouped_stages": 3},
    )
    assert [conv.attrs.group for conv in graph.of_kind("Conv")] == [3, 3]
    assert graph.kinds()["Mul"] == graph.kinds()["Sigmoid"] == graph.kinds()["Tanh"] == 1


def test_channels_with_a_layer_each_are_groups() -> None:
    """DLinear: a Gemm for each channel of a sequence, whose results are stacked."""
    n = Net()
    x = n.input(4, 16, 3)
    rows = []
    for k in range(3):
        part = n.op("Gather", x, n.const(k, np.int64), attrs=GatherAttrs(2))
        y = n.op("Gemm", part, n.random(6, 16, scale=0.3), n.random(6), attrs=GemmAttrs(transB=True))
        rows.append(n.op("Unsqueeze", y, n.ints(1)))
    graph, _ = check_pass(
        PASS,
        n.done(n.op("Concat", *rows, attrs=ConcatAttrs(1))),
        changes=1,
        rules={"grouped_products": 1},
    )
    assert [conv.attrs.group for conv in graph.of_kind("Conv")] == [3]


def towers(n: Net, count: int, **kept: Any) -> Graph:
    x = n.input(6, 8)
    return n.done(*(product(n, n.op("Relu", product(n, x, 16, **kept)), 4) for _ in range(count)))


def test_towers_of_one_tensor_are_one_product_and_groups() -> None:
    n = Net()
    graph, _ = check_pass(PASS, towers(n, 4), changes=2, rules={"products_of_one": 1, "grouped_products": 1})
    assert graph.kinds()["MatMul"] == graph.kinds()["Relu"] == graph.kinds()["Conv"] == 1
    assert graph.type(graph.of_kind("MatMul")[0].inputs[1]).static_shape == (8, 64)


def test_towers_with_norms_are_groups() -> None:
    """Ensembles of critics (REDQ: Chen et al., 2021) normalize each layer."""
    n = Net()
    x = n.input(6, 8)
    ends = []
    for _ in range(3):
        y = n.op("LayerNormalization", product(n, x, 16), n.positive(16), n.random(16), attrs=LayerNormAttrs(axis=-1))
        ends.append(product(n, n.op("Relu", y), 4))
    graph, _ = check_pass(PASS, n.done(*ends), changes=2, rules={"products_of_one": 1, "grouped_products": 1})
    assert graph.kinds()["LayerNormalization"] == graph.kinds()["Relu"] == graph.kinds()["Conv"] == 1


@pytest.mark.parametrize("bias", [True, False])
def test_groups_of_one_column_are_a_sum(bias: bool) -> None:
    n = Net()
    graph, _ = check_pass(
        PASS,
        joined(n, [n.op("Tanh", product(n, band, 1, bias=bias)) for band in bands(n)]),
        changes=1,
        rules={"grouped_products": 1},
    )
    kinds = graph.kinds()
    assert kinds["Mul"] == kinds["ReduceSum"] == kinds["Tanh"] == 1
    assert kinds.get("Add", 0) == int(bias)
    assert not {"Conv", "MatMul"} & set(kinds)


def test_two_towers_stay_apart() -> None:
    check_untouched(PASS, towers(Net(), 2))


def test_products_with_one_matrix_stay_for_products_of_parts() -> None:
    n = Net()
    w = n.random(8, 6)
    check_untouched(PASS, joined(n, [n.op("MatMul", band, w, attrs=MatMulAttrs()) for band in bands(n)]))


def test_large_products_refuse() -> None:
    n = Net()
    large = joined(n, [product(n, band, 512) for band in bands(n, (512,) * 3, rows=512)])
    check_refused(PASS, large, because="large enough for a launch of its own")


def test_operands_of_any_origin_refuse() -> None:
    n = Net()
    split = bands(n, (8, 8, 8))
    parts = [n.op("Add", band, n.input(2, 5, 8, name=f"other{k}")) for k, band in enumerate(split)]
    check_refused(PASS, joined(n, [product(n, part, 6) for part in parts]), because="computed differently")


def test_what_all_parts_share_is_computed_once() -> None:
    n = Net()
    x, shared = bands(n, (8, 8, 8)), n.input(5, 8, name="shared")
    parts = [n.op("Mul", band, n.op("Exp", shared)) for band in x]
    graph, _ = check_pass(PASS, joined(n, [product(n, part, 6) for part in parts]), changes=1)
    assert graph.kinds()["Exp"] == graph.kinds()["Mul"] == 1


def test_computed_matrices_refuse() -> None:
    n = Net()
    first, *others = bands(n, (8, 8, 8))
    computed = [n.op("MatMul", x, n.input(8, 6, name=f"w{k}"), attrs=MatMulAttrs()) for k, x in enumerate(others)]
    parts = [product(n, first, 6, bias=False), *computed]
    check_refused(PASS, joined(n, parts), because="computed differently")


def test_other_operators_on_some_parts_leave_too_few() -> None:
    n = Net()
    first, second, third = bands(n, (8, 8, 8))
    parts = [first, n.op("Exp", second), third]
    check_untouched(PASS, joined(n, [product(n, part, 6) for part in parts]))


def test_other_operators_on_some_groups_stay() -> None:
    n = Net()
    a, b, c = (product(n, band, 6) for band in bands(n, (8, 8, 8)))
    before = joined(n, [n.op("Exp", a), n.op("Neg", b), n.op("Exp", c)])
    graph, _ = check_pass(PASS, before, changes=1, rules={"grouped_products": 1})
    assert graph.kinds()["Exp"] == 2


def test_a_band_split_takes_a_few_launches() -> None:
    n = Net()
    split = bands(n, (8,) * 6, rows=40)
    masks = [gated(n, product(n, n.op("Tanh", product(n, NORMS["length"](n, band), 32)), 16)) for band in split]
    program = check_simulated(joined(n, masks))
    launches = [step for step in program.steps if step.executor == "cuda"]
    assert len(launches) <= 6, [
        step.params.get("tactic") for step in launches
    ]  # conversions, norm, two convolutions, gate


@pytest.mark.parametrize("depth", [3, 8, 20])
def test_groups_of_any_width_run_on_the_gpu(depth: int) -> None:
    n = Net()
    program = check_simulated(joined(n, [product(n, band, 10) for band in bands(n, (depth,) * 4, rows=9)]))
    assert all(step.executor == "cuda" for step in program.steps)
