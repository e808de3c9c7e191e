"""pointwise_of_parts: an op of joined pointwise results is computed with each part; so is the conversion of an output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_conversions import FuseConversions
from optdnn.passes.fuse_pointwise import FusePointwise
from optdnn.passes.rules import pointwise_parts
from optdnn.types import FP16, FP32

CUDA = PassContext(target="cuda:sm_90a")


def joined(n: Net, parts: Sequence[str] = ("Exp", "Tanh"), axis: int = 1) -> Value:
    values = (
        [n.op(kind, n.input(2, 3 + k, 6, name=f"x{k}")) for k, kind in enumerate(parts)]
        if axis == 1
        else [n.op(kind, n.input(2, 5, 3 + k, name=f"x{k}")) for k, kind in enumerate(parts)]
    )
    return n.op("Concat", *values, attrs=ConcatAttrs(axis))


@pytest.mark.parametrize("factor", [(), (6,), (7, 1), (7, 6), (2, 7, 6), (1, 1, 6)])
def test_each_part_is_multiplied_by_its_part_of_a_constant(factor: tuple[int, ...]) -> None:
    n = Net(np.float64)
    graph = n.done(n.op("Mul", joined(n), n.random(*factor)))
    rules = {"pointwise_of_parts": 1, "pointwise": 2}
    check_pass(FusePointwise(), graph, changes=3, rules=rules, kinds={"Pointwise": 2, "Concat": 1}, context=CUDA)


def test_parts_along_the_last_axis() -> None:
    n = Net(np.float64)
    graph = n.done(n.op("Sub", n.random(5, 7), joined(n, axis=-1)))
    rules = {"pointwise_of_parts": 1, "pointwise": 2}
    check_pass(FusePointwise(), graph, changes=3, rules=rules, kinds={"Pointwise": 2, "Concat": 1}, context=CUDA)


def test_parts_that_are_joined_themselves() -> None:
    n = Net(np.float64)
    whole = n.op("Concat", joined(n), n.op("Sin", n.input(2, 4, 6, name="z")), attrs=ConcatAttrs(1))
    graph = n.done(n.op("Mul", whole, n.random(11, 1)))
    rules = {"pointwise_of_parts": 2, "pointwise": 3}
    check_pass(FusePointwise(), graph, changes=5, rules=rules, kinds={"Pointwise": 3, "Concat": 2}, context=CUDA)


def test_a_view_of_a_part_moves_behind_the_op() -> None:
    n = Net(np.float64)
    view = n.op("Reshape", joined(n), n.ints(2, 42, 1))
    whole = n.op("Concat", view, n.op("Sin", n.input(2, 4, 1, name="z")), attrs=ConcatAttrs(1))
    rules = {"pointwise_of_parts": 2, "pointwise": 3}
    left = {"Pointwise": 3, "Concat": 2, "Reshape": 1}
    graph = n.done(n.op("Mul", whole, n.const(np.array(0.5))))
    check_pass(FusePointwise(), graph, changes=5, rules=rules, kinds=left, context=CUDA)


def test_a_view_of_a_part_moves_in_front_of_it_before_an_op_of_several_numbers() -> None:
    n = Net(np.float64)
    view = n.op("Reshape", n.op("Exp", n.input(2, 6, 7)), n.ints(2, 42, 1))
    whole = n.op("Concat", view, n.op("Sin", n.input(2, 4, 1, name="z")), attrs=ConcatAttrs(1))
    graph = n.done(n.op("Mul", whole, n.random(46, 1)))
    rules = {"pointwise_of_parts": 1, "view_before": 1, "pointwise": 2}
    left = {"Pointwise": 2, "Concat": 1, "Reshape": 1}
    check_pass(FusePointwise(), graph, changes=4, rules=rules, kinds=left, context=CUDA)


@pytest.mark.parametrize("read", [False, True])
def test_one_part_may_be_another_result(read: bool) -> None:
    n = Net(np.float64)
    a, b = n.op("Exp", n.input(2, 3, 6)), n.op("MatMul", n.input(2, 3, 4, name="b"), n.random(4, 6))
    y = n.op("Relu", n.op("Concat", a, b, attrs=ConcatAttrs(1)))
    graph = n.done(y, n.op("Sin", b)) if read else n.done(y)
    rules = {"pointwise_of_parts": 1, "pointwise": 1}
    check_pass(FusePointwise(), graph, changes=2, rules=rules, context=CUDA)


def test_on_a_cpu_it_stays() -> None:
    n = Net(np.float64)
    check_untouched(FusePointwise(), n.done(n.op("Mul", joined(n), n.random(6))))


def test_other_ops_and_parts_stay() -> None:
    n = Net(np.float64)
    y = joined(n)
    graph = n.done(n.op("Mul", y, n.random(6)), n.op("MatMul", y, n.random(6, 2)))
    check_refused(FusePointwise(), graph, because="Concat_3 is read elsewhere", context=CUDA)
    n = Net(np.float64)
    parts = [n.op("MatMul", n.input(2, 3, 4, name=f"x{k}"), n.random(4, 6)) for k in range(2)]
    graph = n.done(n.op("Relu", n.op("Concat", *parts, n.op("Exp", n.input(2, 3, 6)), attrs=ConcatAttrs(1))))
    check_refused(FusePointwise(), graph, because="more than one part of Concat_4 is not the result", context=CUDA)
    n = Net(np.float64)
    parts = [n.op("Exp", n.input(2, 3, 6, name=f"x{k}")) for k in range(2)]
    y = n.op("Relu", n.op("Concat", *parts, attrs=ConcatAttrs(1)))
    graph = n.done(y, *(n.op("MatMul", p, n.random(6, 2)) for p in parts))
    check_refused(FusePointwise(), graph, because="more than one part of Concat_3 is not the result", context=CUDA)
    n = Net(np.float64)
    graph = n.done(n.op("Mul", joined(n), n.input(2, 7, 6, name="factor")))
    check_untouched(FusePointwise(), graph, context=CUDA)
    n = Net(np.float64)
    graph = n.done(n.op("Mul", joined(n), n.random(3, 2, 7, 6)))  # the result has more axes
    check_untouched(FusePointwise(), graph, context=CUDA)


def gated(n: Net, widths: tuple[int, ...] = (8, 16), chain: bool = True) -> tuple[Value, Value]:
    """``gelu(gate) * concat(part, exp(part))``, whose parts and gate are parts of one product (MambaOut); and the Concat."""
    whole = sum(widths)
    x = n.op("MatMul", n.input(2, 5, 4), n.random(4, 2 * whole))
    gate, *parts = n.op("Split", x, n.ints(whole, *widths), attrs=SplitAttrs(2), outputs=1 + len(widths))
    if chain:
        gate = n.op("Gelu", n.op("Mul", gate, 0.5))
    parts[-1] = n.op("Softmax", parts[-1])
    y = n.op("Concat", *parts, attrs=ConcatAttrs(2))
    return n.op("Mul", gate, y), y


@pytest.fixture
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates of small tensors are applied to parts, too."""
    monkeypatch.setattr(pointwise_parts, "LEAST_GATED", 0)


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize("chain", [False, True])
def test_a_gate_is_applied_to_each_part(chain: bool) -> None:
    n = Net(np.float64)
    y, _ = gated(n, chain=chain)
    graph = n.done(n.op("MatMul", y, n.random(24, 3)))
    rules = {"gated_parts": 1} | ({"pointwise": 4} if chain else {})
    found = {"MatMul": 2, "Split": 1, "Softmax": 1, "Concat": 1, "Slice": 2, "Pointwise" if chain else "Mul": 2}
    check_pass(FusePointwise(), graph, changes=sum(rules.values()), rules=rules, kinds=found, context=CUDA)


def test_small_gates_stay() -> None:
    n = Net(np.float64)
    y, _ = gated(n, chain=False)
    graph = n.done(n.op("MatMul", y, n.random(24, 3)))
    check_refused(FusePointwise(), graph, because="a copy of its few elements takes no longer", context=CUDA)


@pytest.mark.usefixtures("of_any_size")
def test_other_gates_stay() -> None:
    n = Net(np.float64)
    y, parts = gated(n, chain=False)
    check_refused(
        FusePointwise(), n.done(n.op("MatMul", y, n.random(24, 3)), parts), because="is read elsewhere", context=CUDA
    )
    n = Net(np.float64)
    y, _ = gated(n, chain=False)
    report = FusePointwise()(n.done(n.op("Relu", y)), CUDA)
    assert [r.rule for r in report.fired] == ["pointwise"]  # one launch computes both
    n = Net(np.float64)
    y, _ = gated(n, (4, 20), chain=False)
    check_refused(
        FusePointwise(), n.done(n.op("MatMul", y, n.random(24, 3))), because="cannot write in place", context=CUDA
    )
    n = Net(np.float64)
    y, _ = gated(n, chain=False)
    check_untouched(FusePointwise(), n.done(n.op("MatMul", y, n.random(24, 3))))  # on a CPU


@pytest.mark.usefixtures("of_any_size")
def test_gated_parts_are_not_copied() -> None:
    n = Net()
    y, _ = gated(n)
    program = check_simulated(n.done(n.op("MatMul", y, n.random(24, 3))), "fp16")
    assert "Concat" not in kinds(program)


def converted(n: Net, last: Any = None) -> Graph:
    parts = [n.op("Exp", n.input(2, 3, 6)), n.op("Tanh", n.input(2, 4, 6, name="b"))]
    if last is not None:
        parts[1] = last(n, parts[1])
    return n.done(n.op("Cast", n.op("Concat", *parts, attrs=ConcatAttrs(1)), attrs=CastAttrs(FP32)))


def test_the_conversion_of_an_output() -> None:
    rules = {"pointwise_of_parts": 1, "converted_in_registers": 2}
    done, _ = check_pass(
        FuseConversions(), converted(Net(FP16)), changes=3, rules=rules, kinds={"Pointwise": 2, "Concat": 1}, context=CUDA,
        promoted_changes=1,
    )  # fmt: skip
    assert done.of_kind("Concat")[0].outputs[0].type.dtype == FP32


def test_parts_beside_reductions_stay() -> None:
    n = Net(FP16)
    parts = [
        n.op("Sin", n.op("ReduceMax", n.input(2, 4, 6, name=f"x{k}"), n.ints(-1), attrs=ReduceAttrs(keepdims=True)))
        for k in range(2)
    ]
    graph = n.done(n.op("Cast", n.op("Concat", *parts, attrs=ConcatAttrs(1)), attrs=CastAttrs(FP32)))
    check_refused(FuseConversions(), graph, because="more than one part of Concat_5 is not the result", context=CUDA)


@pytest.mark.parametrize("axis", [1, 2])
def test_on_a_gpu_all_parts_share_a_launch(axis: int) -> None:
    n = Net()
    program = check_simulated(n.done(n.op("Mul", joined(n, axis=axis), n.random(7 if axis == 2 else 6))), "fp16")
    assert kinds(program) == ["JointPointwise"]
