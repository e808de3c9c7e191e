"""grouped_parts: parts of a joint projection that lie in groups get columns of their own. Others stay."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.dim import symbol
from optdnn.ir.graph import Value
from optdnn.ops.index import SplitAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import RulePass
from optdnn.passes.rules.grouped_parts import grouped_parts


class GroupedParts(RulePass):
    name = "grouped_parts"
    rules = (grouped_parts,)


PASS = GroupedParts()


def parts(n: Net, x: Value, groups: int, widths: tuple[int, ...], bias: int = 0, gemm: bool = False) -> list[Value]:
    """A joint projection of rows, in groups, and its parts."""
    columns = groups * sum(widths)
    y = n.gemm(x, columns) if gemm else n.matmul(x, columns)
    for _ in range(bias):
        y = n.op("Add", y, n.random(columns))
    split = n.op("Reshape", y, n.ints(*(0 for _ in n.dims(x)[:-1]), groups, sum(widths)))
    axis = len(n.dims(split)) - 1
    found: list[Value] = n.op("Split", split, n.ints(*widths), attrs=SplitAttrs(axis), outputs=len(widths))
    return found


def heads(n: Net, x: Value, count: int) -> Value:
    lead = len(n.dims(x)) - 2
    return n.op("Reshape", x, n.ints(*(0,) * lead, count, -1))


@pytest.mark.parametrize("bias", [0, 2])
@pytest.mark.parametrize("batch", [2, symbol("n")])
def test_codegens_queries_values_and_keys(batch: object, bias: int) -> None:
    n = Net(np.float64)
    x = n.input(batch, 5, 16)  # type: ignore[arg-type]
    graph = n.done(*(heads(n, p, 8) for p in parts(n, x, 4, (12, 12, 12), bias)))
    after, _ = check_pass(PASS, graph, changes=1, sizes={"n": 3})
    (split,) = after.of_kind("Split")
    assert [out.type.dims[-1] for out in split.outputs] == [48] * 3
    assert len(after.of_kind("Add")) == bias


def test_parts_of_other_sizes_and_rows_of_a_gemm() -> None:
    n = Net(np.float64)
    p, q = parts(n, n.input(6, 16), 3, (8, 4), gemm=True)
    graph = n.done(heads(n, p, 2), n.op("Relu", q))
    after, _ = check_pass(PASS, graph, changes=1)
    assert after.kinds()["MatMul"] == 1


def test_heads_that_divide_the_groups_stay() -> None:
    n = Net(np.float64)
    check_untouched(PASS, n.done(*(heads(n, p, 4) for p in parts(n, n.input(2, 5, 16), 4, (12, 12)))))
    n = Net(np.float64)
    x = parts(n, n.input(2, 5, 16), 4, (12, 12))
    finer = [n.op("Reshape", p, n.ints(0, 0, 4, 3, 4)) for p in x]
    check_untouched(PASS, n.done(*finer))


def test_what_is_no_joint_projection_stays() -> None:
    n = Net(np.float64)
    x = n.op("Reshape", n.input(2, 5, 48), n.ints(0, 0, 4, 12))
    halves = n.op("Split", x, n.ints(6, 6), attrs=SplitAttrs(3), outputs=2)
    check_untouched(PASS, n.done(*(heads(n, p, 8) for p in halves)))
    n = Net(np.float64)
    p, q = parts(n, n.input(2, 5, 16), 4, (12, 12))
    check_untouched(PASS, n.done(n.op("Transpose", p, attrs=TransposeAttrs((0, 2, 1, 3))), n.op("Relu", q)))


def test_a_projection_that_others_read_stays() -> None:
    n = Net(np.float64)
    y = n.matmul(n.input(2, 5, 16), 48)
    p, q = n.op("Split", n.op("Reshape", y, n.ints(0, 0, 4, 12)), n.ints(6, 6), attrs=SplitAttrs(3), outputs=2)
    check_untouched(PASS, n.done(heads(n, p, 8), heads(n, q, 8), n.op("Relu", y)))


def test_parts_of_nothing_stay() -> None:
    n = Net(np.float64)
    graph = n.done(*(n.op("Reshape", p, n.ints(0, 5, 8, 6)) for p in parts(n, n.input(0, 5, 16), 4, (12, 12))))
    check_refused(PASS, graph, because="no constant target can express its parts")


def test_two_unknown_sizes() -> None:
    n = Net(np.float64)
    x = n.input(symbol("n"), symbol("m"), 16)
    y = n.op("Reshape", n.matmul(x, 48), n.ints(0, 0, 4, 12))
    halves = n.op("Split", y, n.ints(6, 6), attrs=SplitAttrs(3), outputs=2)
    after, _ = check_pass(PASS, n.done(*(heads(n, p, 8) for p in halves)), changes=1, sizes={"n": 2, "m": 3})
    assert after.kinds()["Split"] == 1


def test_on_a_gpu_nothing_is_copied() -> None:
    n = Net()
    q, v, k = parts(n, n.input(1, 32, 64), 4, (64, 64, 64))
    q, k, v = (n.op("Transpose", heads(n, p, 8), attrs=TransposeAttrs((0, 2, 1, 3))) for p in (q, k, v))
    scores = n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2))))
    y = n.op("MatMul", n.op("Softmax", n.op("Mul", scores, n.const(0.2))), v)
    y = n.op("Reshape", n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 1, 3))), n.ints(0, 0, 256))
    assert "Copy" not in kinds(check_simulated(n.done(n.matmul(y, 64))))
