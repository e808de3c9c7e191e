"""expert_loops: experts that each find, gather and compute their tokens become products with selected matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gather import GatherAttrs, GatherNDAttrs, OneHotAttrs, ScatterElementsAttrs, ScatterNDAttrs
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.sort import TopKAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.expert_loops import ExpertLoops
from optdnn.types import BOOL, INT32, INT64

GPU = PassContext(target="cuda:sm_90a", precision="fp16")
TOKENS, SIZE, WIDTH, TIMES = 6, 8, 16, 2


class Loop:
    """A mixture of experts as PyTorch's exporters write it. ``form``: dynamo or torchscript; ``tokens_first``: the masks' axes."""

    def __init__(
        self,
        form: str = "dynamo",
        *,
        many: int = 3,
        tokens_first: bool = False,
        gemm: bool = False,
    ) -> None:
        self.n, self.form, self.many, self.gemm = Net(), form, many, gemm
        n = self.n
        self.x = n.input(TOKENS, SIZE)
        scores, self.selected = n.op(
            "TopK", n.input(TOKENS, many, name="scores"), n.ints(TIMES), attrs=TopKAttrs(1, True, True), outputs=2
        )
        weights = n.op("Softmax", scores)
        flat = form == "torchscript"
        self.weights = n.op("Reshape", weights, n.ints(-1, 1)) if flat else n.op("Unsqueeze", weights, n.ints(2))
        hot = n.op("Equal", n.op("Unsqueeze", self.selected, n.ints(2)), n.const(np.arange(many), np.int64))
        perm = (2, 0, 1) if tokens_first else (2, 1, 0)
        self.masks = n.op("Transpose", n.op("Cast", hot, attrs=CastAttrs(INT64)), attrs=TransposeAttrs(perm))
        self.places = (0, 1) if tokens_first else (1, 0)  # of the token, and of its expert's number

    def expert(self, e: int, x: Value, weight: Value) -> Value:
        """What an expert computes of its tokens."""
        n = self.n
        if self.gemm:
            y = n.op("Gemm", x, n.random(WIDTH, SIZE), n.random(WIDTH), attrs=GemmAttrs(transB=True))
        else:
            y = n.op(
                "Mul",
                n.op("MatMul", x, n.random(SIZE, WIDTH)),
                n.op("Sigmoid", n.op("MatMul", x, n.random(SIZE, WIDTH))),
            )
        return n.op("Mul", n.op("MatMul", y, n.random(WIDTH, SIZE)), weight)

    def seen(self, mask: Value) -> Value:
        """The mask in which the tokens are found."""
        return mask

    def updates(self, e: int) -> tuple[Value, Value]:
        """The tokens of an expert, as a column, and its results."""
        n = self.n
        mask = n.op(
            "Cast", n.op("Gather", self.masks, n.const(e, np.int64), attrs=GatherAttrs(0)), attrs=CastAttrs(BOOL)
        )
        found = n.op("Transpose", n.op("NonZero", self.seen(mask)), attrs=TransposeAttrs((1, 0)))
        columns = [n.op("Slice", found, n.ints(p), n.ints(p + 1), n.ints(1), n.ints(1)) for p in self.places]
        self.column = columns[0]
        if self.form == "dynamo":
            taken = n.op("GatherND", self.x, columns[0], attrs=GatherNDAttrs())
            pairs = n.op("Concat", *columns, attrs=ConcatAttrs(1))
            weight = n.op("GatherND", self.weights, pairs, attrs=GatherNDAttrs())
        else:
            token, number = (n.op("Squeeze", c, n.ints(1)) for c in columns)
            taken = n.op("Gather", self.x, token, attrs=GatherAttrs(0))
            pair = n.op("Add", number, n.op("Mul", token, n.ints(TIMES)))
            weight = n.op("Gather", self.weights, pair, attrs=GatherAttrs(0))
        return columns[0], self.expert(e, taken, weight)

    def graph(self, *more: Value, base: Value | None = None) -> Graph:
        n, zeros, total = self.n, self.n.const(np.zeros((TOKENS, SIZE))), base
        for e in range(self.many):
            column, updates = self.updates(e)
            if self.form == "dynamo":
                base = zeros if total is None else total
                total = n.op("ScatterND", base, column, updates, attrs=ScatterNDAttrs("add"))
            else:
                index = n.op("Expand", column, n.ints(1, SIZE))
                part = n.op("ScatterElements", zeros, index, updates, attrs=ScatterElementsAttrs(0, "none"))
                total = part if total is None else n.op("Add", total, part)
        assert total is not None
        return n.done(total, *more)


@pytest.mark.parametrize("options", [{}, {"tokens_first": True}, {"gemm": True}], ids=["", "tokens first", "Gemm"])
@pytest.mark.parametrize("form", ["dynamo", "torchscript"])
def test_tokens_select_the_matrices_of_their_experts(form: str, options: dict[str, Any]) -> None:
    after, _ = check_pass(ExpertLoops(), Loop(form, **options).graph(), changes=1, context=GPU)
    assert not {"NonZero", "ScatterND", "ScatterElements"} & set(after.kinds())
    stacks = [op for op in after.of_kind("Gather") if after.type(op.inputs[0]).rank == 3]  # type: ignore[arg-type]
    assert len(stacks) == 2  # the products of the same rows are one
    assert {after.type(op.value).dims[0] for op in stacks} == {TOKENS * TIMES}
    (total,) = after.of_kind("ReduceSum")
    assert total.outputs[0].type.dims == (TOKENS, SIZE)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_whole_network(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.passes.selected_weights.SHORT", 0)
    program = check_simulated(Loop("torchscript").graph(), precision)
    assert kinds(program).count("SelectedProduct") == 2
    assert not {"Copy", "Expand", "Gather", "MatMul"} & set(kinds(program))


def test_other_targets_stay() -> None:
    check_untouched(ExpertLoops(), Loop().graph(), PassContext(target="cpu", precision="fp32"))


def test_a_sum_of_some_of_the_experts_stays() -> None:
    loop = Loop(many=4)
    loop.many = 3
    check_untouched(ExpertLoops(), loop.graph(), GPU)


def test_what_else_reads_a_part_stays() -> None:
    graph = Loop("torchscript").graph()
    part = next(op for op in graph.ops() if op.kind == "ScatterElements")
    graph.add_output(part.value, "part")
    check_untouched(ExpertLoops(), graph, GPU)


def test_experts_that_differ_are_refused() -> None:
    class Different(Loop):
        def expert(self, e: int, x: Value, weight: Value) -> Value:
            y = super().expert(e, x, weight)
            return self.n.op("Relu", y) if e == 1 else y

    check_refused(ExpertLoops(), Different().graph(), because="experts differ at", context=GPU)


def test_rows_that_no_kernel_takes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.passes.expert_loops.ROW", 3)
    check_refused(ExpertLoops(), Loop().graph(), because="no kernel selects the matrices of", context=GPU)


def test_operators_over_several_rows_are_refused() -> None:
    class Mixed(Loop):
        def expert(self, e: int, x: Value, weight: Value) -> Value:
            y = super().expert(e, x, weight)
            return self.n.op("CumSum", y, self.n.const(0, np.int64))

    check_refused(
        ExpertLoops(), Mixed().graph(), because="does not compute each row from a row of a token", context=GPU
    )


def test_numbers_of_other_types_are_refused() -> None:
    loop = Loop()
    loop.selected = loop.n.op("Cast", loop.selected, attrs=CastAttrs(INT32))
    n = loop.n
    hot = n.op("Equal", n.op("Unsqueeze", loop.selected, n.ints(2)), n.const(np.arange(3), np.int32))
    loop.masks = n.op("Transpose", n.op("Cast", hot, attrs=CastAttrs(INT64)), attrs=TransposeAttrs((2, 1, 0)))
    check_refused(ExpertLoops(), loop.graph(), because="not int64", context=GPU)


@pytest.mark.parametrize("kind", ["Equal", "OneHot"])
def test_numbers_of_no_expert_add_nothing(kind: str) -> None:
    loop = Loop()
    n = loop.n
    away = n.const(np.resize([0, -1, 0, 4, -4, 0], (TOKENS, TIMES)), np.int64)
    loop.selected = n.op("Add", loop.selected, away)
    if kind == "Equal":
        hot = n.op("Equal", n.op("Unsqueeze", loop.selected, n.ints(2)), n.const(np.arange(3), np.int64))
    else:  # it counts negative numbers from the end
        values = n.const([0, 1], np.int64)
        hot = n.op("OneHot", loop.selected, n.const(3, np.int64), values, attrs=OneHotAttrs(-1))
    loop.masks = n.op("Transpose", n.op("Cast", hot, attrs=CastAttrs(INT64)), attrs=TransposeAttrs((2, 1, 0)))
    after, _ = check_pass(ExpertLoops(), loop.graph(), changes=1, context=GPU)
    assert len(list(after.of_kind("Where"))) == 2


def test_numbers_of_a_wider_router_add_nothing() -> None:
    loop = Loop(many=4)
    n = loop.n
    hot = n.op("Equal", n.op("Unsqueeze", loop.selected, n.ints(2)), n.const(np.arange(3), np.int64))
    loop.masks = n.op("Transpose", n.op("Cast", hot, attrs=CastAttrs(INT64)), attrs=TransposeAttrs((2, 1, 0)))
    loop.many = 3
    after, _ = check_pass(ExpertLoops(), loop.graph(), changes=1, context=GPU)
    assert len(list(after.of_kind("Where"))) == 2


def test_what_experts_slice_and_clip_by_is_one_for_all_rows() -> None:
    class Sliced(Loop):
        def expert(self, e: int, x: Value, weight: Value) -> Value:
            n, y = self.n, super().expert(e, x, weight)
            part = n.op("Slice", y, n.ints(e), n.ints(e + 1), n.ints(1))
            return n.op("Mul", y, part)

    class Clipped(Loop):
        def expert(self, e: int, x: Value, weight: Value) -> Value:
            y = super().expert(e, x, weight)
            return self.n.op("Clip", y, None, self.n.const(e + 0.5))

    for loop in (Sliced(), Clipped()):
        check_refused(ExpertLoops(), loop.graph(), because="are not one row for each expert", context=GPU)


def test_rows_that_are_added_to_products() -> None:
    class Added(Loop):
        def expert(self, e: int, x: Value, weight: Value) -> Value:
            n = self.n
            y = n.op("Gemm", x, n.random(SIZE, SIZE), x, attrs=GemmAttrs(transB=True))
            return n.op("Mul", y, weight)

    check_pass(ExpertLoops(), Added().graph(), changes=1, context=GPU)


def test_weights_of_the_token_and_of_the_expert() -> None:
    class Both(Loop):
        def expert(self, e: int, x: Value, weight: Value) -> Value:
            n, column = self.n, self.column
            every = n.op("GatherND", self.weights, column, attrs=GatherNDAttrs())
            total = n.op("ReduceSum", every, n.ints(1), attrs=ReduceAttrs(keepdims=False))
            return n.op("Mul", super().expert(e, x, weight), total)

    check_pass(ExpertLoops(), Both().graph(), changes=1, context=GPU)


def test_masks_of_another_shape_stay() -> None:
    class Reshaped(Loop):
        def seen(self, mask: Value) -> Value:
            return self.n.op("Reshape", mask, self.n.ints(TOKENS, TIMES))

    check_untouched(ExpertLoops(), Reshaped().graph(), GPU)


@pytest.mark.parametrize("form", ["dynamo", "torchscript"])
def test_results_are_added_to_another_tensor(form: str) -> None:
    loop = Loop(form)
    after, _ = check_pass(ExpertLoops(), loop.graph(base=loop.n.op("Sigmoid", loop.x)), changes=1, context=GPU)
    assert len(list(after.of_kind("ReduceSum"))) == len(list(after.of_kind("Add"))) == 1


def test_sums_of_another_shape_stay() -> None:
    loop = Loop("torchscript")
    check_untouched(ExpertLoops(), loop.graph(base=loop.n.random(2, 1, SIZE)), GPU)


def test_a_number_that_may_occur_twice_is_not_scattered_without_addition() -> None:
    """Two results of one expert for a token: the scatter keeps one of them, a sum would have both."""

    class Repeated(Loop):
        def __init__(self, form: str) -> None:
            super().__init__(form)
            n = self.n
            self.selected = n.op("Abs", n.input(TOKENS, TIMES, name="numbers", dtype=np.int64))
            hot = n.op("Equal", n.op("Unsqueeze", self.selected, n.ints(2)), n.const(np.arange(3), np.int64))
            self.masks = n.op("Transpose", n.op("Cast", hot, attrs=CastAttrs(INT64)), attrs=TransposeAttrs((2, 1, 0)))

    check_untouched(ExpertLoops(), Repeated("torchscript").graph(), GPU)
    assert ExpertLoops()(Repeated("dynamo").graph(), GPU).changes == 1


def test_values_that_experts_share_in_other_ways_are_refused() -> None:
    """The first expert squares a product, another one multiplies two."""

    class Squared(Loop):
        def expert(self, e: int, x: Value, weight: Value) -> Value:
            n = self.n
            a, b = (n.op("MatMul", x, n.random(SIZE, SIZE)) for _ in range(2))
            return n.op("Mul", n.op("Mul", a, a if e == 0 else b), weight)

    check_refused(ExpertLoops(), Squared().graph(), because="experts differ in what reads", context=GPU)
