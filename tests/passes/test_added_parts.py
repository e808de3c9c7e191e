"""Tensors that are put together from their own parts, one of them with an addition: ``x[:, 1:] += r``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.gather import ScatterNDAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.index import ConcatAttrs, PadAttrs, SplitAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.canonicalize import Canonicalize
from optdnn.passes.rules import added_parts

CANON = Canonicalize()


def concat(n: Net, *parts: Value, axis: int) -> Value:
    return n.op("Concat", *parts, attrs=ConcatAttrs(axis))  # type: ignore[no-any-return]


def test_all_parts_in_order_are_the_tensor() -> None:
    n = Net()
    x = n.op("Exp", n.input(2, 6, 4))
    first, second = n.op("Split", n.sliced(x, 2, 6, 1), n.ints(1, 3), attrs=SplitAttrs(axis=1), outputs=2)
    y = concat(n, n.sliced(x, 0, 2, 1), first, second, axis=1)
    check_pass(CANON, n.done(n.op("Neg", y)), changes=2, kinds={"Exp": 1, "Neg": 1}, rules={"concat_of_split": 2})


def test_parts_of_parts_in_order_are_the_tensor() -> None:
    n = Net()
    x = n.op("Exp", n.input(2, 6, 4))
    y = concat(n, n.sliced(x, 0, 2, 1), n.sliced(n.sliced(x, 1, 6, 1), 1, 5, 1), axis=1)
    check_pass(CANON, n.done(n.op("Neg", y)), changes=1, kinds={"Exp": 1, "Neg": 1}, rules={"concat_of_parts": 1})


def test_some_parts_in_order_are_a_slice() -> None:
    n = Net()
    x = n.op("Exp", n.input(2, 6, 4))
    y = concat(n, n.sliced(x, 1, 2, 1), n.sliced(x, 2, 4, 1), axis=1)
    check_pass(CANON, n.done(y), changes=1, kinds={"Exp": 1, "Slice": 1})


def test_parts_may_be_transposed_on_either_side() -> None:
    """PyTorch's exporter writes slices of an axis as scatters of the transposed tensor."""
    n = Net()
    x, turned = n.op("Exp", n.input(2, 3, 6, 5)), TransposeAttrs((3, 1, 2, 0))
    first = n.sliced(n.op("Transpose", x, attrs=turned), 0, 1, 0)
    second = n.op("Transpose", n.sliced(x, 1, 5, 3), attrs=turned)
    y = concat(n, first, second, axis=0)
    graph, _ = check_pass(CANON, n.done(n.op("Neg", y)), changes=1, kinds={"Exp": 1, "Neg": 1, "Transpose": 1})
    assert graph.of_kind("Transpose")[0].attrs == turned


@pytest.mark.parametrize("order", [(1, 0), (0, 0)])
def test_parts_in_another_order_stay(order: tuple[int, int]) -> None:
    n = Net()
    x = n.op("Exp", n.input(2, 6, 4))
    parts = [n.sliced(x, 0, 3, 1), n.sliced(x, 3, 6, 1)]
    check_untouched(CANON, n.done(concat(n, *(parts[k] for k in order), axis=1)))


def test_parts_with_steps_stay() -> None:
    n = Net()
    x = n.op("Exp", n.input(2, 6, 4))
    parts = [n.op("Slice", x, n.ints(k), n.ints(6), n.ints(1), n.ints(2)) for k in (0, 1)]
    check_untouched(CANON, n.done(concat(n, *parts, axis=1)))


def test_parts_of_unknown_sizes_stay() -> None:
    n = Net()
    x = n.op("Exp", n.input(2, symbol("length"), 4))
    check_untouched(CANON, n.done(concat(n, n.sliced(x, 0, 3, 1), n.sliced(x, 3, 6, 1), axis=1)))


def test_parts_of_a_tensor_of_unknown_batch_size_are_the_tensor() -> None:
    n = Net()
    x = n.op("Exp", n.input(symbol("batch"), 6, 4))
    y = concat(n, n.sliced(x, 0, 3, 1), n.sliced(x, 3, 6, 1), axis=1)
    rules = {"concat_of_split": 1}
    check_pass(CANON, n.done(n.op("Neg", y)), changes=1, kinds={"Exp": 1, "Neg": 1}, rules=rules, sizes={"batch": 2})


def multiplied(n: Net) -> Value:
    return n.op("MatMul", n.input(2, 6, 3), n.input(2, 3, 4, name="w"), attrs=MatMulAttrs())  # type: ignore[no-any-return]


def added(n: Net, x: Value, r: Value, swap: bool = False) -> Value:
    part = n.sliced(x, 1, 6, 1)
    total = n.op("Add", r, part) if swap else n.op("Add", part, r)
    return concat(n, n.sliced(x, 0, 1, 1), total, axis=1)


@pytest.mark.parametrize("swap", [False, True])
def test_an_addition_to_a_part_is_one_to_the_tensor(swap: bool) -> None:
    n = Net()
    y = added(n, multiplied(n), n.input(2, 5, 4, name="r"), swap)
    graph, _ = check_pass(CANON, n.done(y), changes=1, kinds={"MatMul": 1, "Pad": 1, "Add": 1}, rules={"added_part": 1})
    (pad,) = graph.of_kind("Pad")
    assert graph.constant_value(pad.inputs[1]).tolist() == [0, 1, 0, 0, 0, 0]  # type: ignore[union-attr]


def scores(n: Net, turned: bool) -> Graph:
    """Scores of attention: positions of all tokens but the first are added to queries and keys."""
    q, k, v = (n.input(1, 2, 9, 16, name=name) for name in "qkv")
    x = n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2))), attrs=MatMulAttrs())
    r = n.input(1, 2, 8, 8, name="r")
    rows = n.sliced(x, 1, 9, 2)
    part = n.op("Add", n.sliced(rows, 1, 9, 3), r)
    if turned:
        perm = TransposeAttrs((3, 1, 2, 0))
        first = n.sliced(n.op("Transpose", rows, attrs=perm), 0, 1, 0)
        inner = concat(n, first, n.op("Transpose", part, attrs=perm), axis=0)
        inner = n.op("Transpose", inner, attrs=perm)
    else:
        inner = concat(n, n.sliced(rows, 0, 1, 3), part, axis=3)
    y = concat(n, n.sliced(x, 0, 1, 2), inner, axis=2)
    return n.done(n.op("MatMul", n.op("Softmax", y), v, attrs=MatMulAttrs()))


@pytest.mark.parametrize("turned", [False, True])
def test_positions_of_all_tokens_but_one_are_a_mask_of_attention(turned: bool) -> None:
    """Multiscale vision transformers with a class token."""
    program = check_simulated(scores(Net(), turned))
    launches = [kind for kind in kinds(program) if kind in ("Attention", "MatMul", "Softmax", "Pad", "Concat")]
    assert sorted(launches) == ["Attention", "Pad"]


def test_two_paddings_are_one() -> None:
    n = Net()
    x = n.op("Pad", n.op("Exp", n.input(2, 5)), n.ints(0, 1, 0, 0), attrs=PadAttrs())
    y = n.op("Pad", x, n.ints(1, 2), 0.0, n.ints(0), attrs=PadAttrs())
    graph, _ = check_pass(CANON, n.done(y), changes=1, kinds={"Exp": 1, "Pad": 1}, rules={"pad_of_pad": 1})
    assert graph.constant_value(graph.of_kind("Pad")[0].inputs[1]).tolist() == [1, 1, 2, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("value", "mode", "pads"), [(1.0, "constant", (0, 1)), (0.0, "edge", (0, 1)), (0.0, "constant", (0, -1))]
)
def test_other_paddings_stay_apart(value: float, mode: str, pads: tuple[int, int]) -> None:
    n = Net()
    x = n.op("Pad", n.op("Exp", n.input(2, 5)), n.ints(1, 0, 1, 0), attrs=PadAttrs())
    y = n.op("Pad", x, n.ints(*pads), value, n.ints(1), attrs=PadAttrs(mode))
    check_untouched(CANON, n.done(y))


def padded_part(
    begins: tuple[int, ...], ends: tuple[int, ...], step: int = 1, readers: int = 1, value: float = 0.0
) -> Graph:
    """A part, from ``begins`` to ``ends``, of a (4, 5) tensor with two rows before it, and two columns after it."""
    n = Net()
    x = n.op("Pad", n.op("Exp", n.input(4, 5)), n.ints(2, 0, 0, 2), value, attrs=PadAttrs())
    y = n.op("Slice", x, n.ints(*begins), n.ints(*ends), n.ints(0, 1), n.ints(step, 1))
    return n.done(n.op("Neg", y), *(n.op("Abs", x) for _ in range(readers - 1)))


@pytest.mark.parametrize(
    ("begins", "ends", "kinds"),
    [((2, 0), (6, 5), {}), ((3, 1), (5, -2), {"Slice": 1}), ((1, 0), (6, 6), {"Pad": 1})],
    ids=["all of it", "inside", "fewer zeros"],
)
def test_a_part_of_a_padded_tensor(begins: Any, ends: Any, kinds: dict[str, int]) -> None:
    expected = {"Exp": 1, "Neg": 1, **kinds}
    check_pass(CANON, padded_part(begins, ends), changes=1, kinds=expected, rules={"part_of_pad": 1})


def test_a_part_of_the_padding_is_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    n = Net()
    x = n.op("Pad", n.op("Exp", n.input(4, 5)), n.ints(2, 0, 0, 2), attrs=PadAttrs())
    y = n.op("Max", n.sliced(x, 0, 2, 0), n.input(2, 7, name="y"))
    graph = n.done(y)
    check_pass(CANON, graph, changes=1, kinds={"Max": 1}, rules={"part_of_pad": 1}, drops=["Exp_1", "Pad_2", "Slice_3"])
    monkeypatch.setattr(added_parts, "MOST_ZEROS", 13)
    check_untouched(CANON, graph)


@pytest.mark.parametrize(
    "graph",
    [
        padded_part((1, 0), (4, 6)),
        padded_part((2, 0), (6, 5), readers=2),
        padded_part((2, 0), (6, 5), step=2),
        padded_part((2, 0), (6, 5), value=1.0),
    ],
    ids=["cut and padded", "padded too", "a step", "ones"],
)
def test_other_parts_of_a_padded_tensor_stay(graph: Graph) -> None:
    check_untouched(CANON, graph)


def test_a_part_of_another_tensor_at_its_place_is_selected() -> None:
    """The rest of pooled queries in MViT: ``x[:, 1:] += q[:, 1:]``. Infinities outside of the part stay out."""
    n = Net()
    q = n.op("Exp", n.input(2, 6, 4, name="q"))
    y = added(n, multiplied(n), n.sliced(q, 1, 6, 1))
    graph, _ = check_pass(
        CANON,
        n.done(y),
        changes=2,
        kinds={"Exp": 1, "MatMul": 1, "Where": 1, "Add": 1},
        rules={"added_part": 1, "part_of_zeros": 1},
    )
    mask = graph.constant_value(graph.of_kind("Where")[0].inputs[0])
    assert mask is not None
    assert (mask.shape, mask.ravel().tolist()) == ((1, 6, 1), [False] + [True] * 5)


@pytest.mark.parametrize(("begin", "pads"), [(0, (0, 1, 0, 0, 0, 0)), (1, (0, 0, 0, 0, 1, 0))])
def test_a_part_at_another_place_stays_padded(begin: int, pads: tuple[int, ...]) -> None:
    n = Net()
    x = n.op("Pad", n.sliced(n.op("Exp", n.input(2, 6, 4)), begin, begin + 5, 1), n.ints(*pads), attrs=PadAttrs())
    check_untouched(CANON, n.done(n.op("Add", x, n.input(2, 6, 4, name="r"))))


def test_a_repeated_tensor_refuses() -> None:
    n = Net()
    y = added(n, multiplied(n), n.input(4, name="r"))
    check_refused(CANON, n.done(y), because="repeated along an axis")


def test_tensors_that_no_product_computes_refuse() -> None:
    """The operator that computes the addend adds, and writes its part in place."""
    n = Net()
    y = added(n, n.op("Exp", n.input(2, 6, 4)), n.input(2, 5, 4, name="r"))
    check_refused(CANON, n.done(y), because="no product computes the tensor")


def test_a_sum_with_other_readers_stays() -> None:
    n = Net()
    x, r = multiplied(n), n.input(2, 5, 4, name="r")
    total = n.op("Add", n.sliced(x, 1, 6, 1), r)
    check_untouched(CANON, n.done(concat(n, n.sliced(x, 0, 1, 1), total, axis=1), n.op("Neg", total)))


def writes(same: bool, reduction: str = "none") -> Graph:
    n = Net()
    x, u = n.input(6, 4), n.input(3, 4, name="u")
    first = n.op("ScatterND", x, n.const(np.array([[0], [2], [5]]), np.int64), u, attrs=ScatterNDAttrs(reduction))
    rows = [[0], [2], [5]] if same else [[0], [2], [4]]
    second = n.op(
        "ScatterND", first, n.const(np.array(rows), np.int64), n.op("Exp", u), attrs=ScatterNDAttrs(reduction)
    )
    return n.done(second, n.op("Neg", first))


def test_a_write_to_the_same_positions_reads_what_was_there_before() -> None:
    graph, _ = check_pass(CANON, writes(same=True), changes=1, rules={"hidden_write": 1}, seeds=(1, 2))
    assert all(graph.op(op.inputs[0]).kind == "Input" for op in graph.of_kind("ScatterND"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("same", "reduction"), [(False, "none"), (True, "add")])
def test_writes_elsewhere_and_sums_read_the_previous_one(same: bool, reduction: str) -> None:
    copy = writes(same, reduction).copy()
    report = CANON(copy)
    assert "hidden_write" not in {fired.rule for fired in report.fired}
