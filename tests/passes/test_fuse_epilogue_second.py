"""fuse_epilogue: a second tensor that a chain would read, rows and images that repeat, and sums that stay apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, stages
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph
from optdnn.ops.norm import GroupNormAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.support.precision import PrecisionPlan

FUSE = FuseEpilogue()


def _vectors_before(kind: str, *, op: str = "Add", readers: int = 1, shape: tuple[int, ...] = (2, 4, 1, 1)) -> Net:
    """A convolution's images plus vectors, and a reader of the sum. ``op``: another operator instead of the addition."""
    n = Net()
    total = n.op(op, n.conv(n.input(2, 3, 6, 6), 4), n.input(*shape, name="t"))
    attrs = GroupNormAttrs(2, 1e-3) if kind == "GroupNormalization" else None
    more = (n.positive(4), n.random(4)) if attrs else ()
    n.done(n.op(kind, total, *more, attrs=attrs), *(n.op("Tanh", total) for _ in range(readers - 1)))
    return n


def test_vectors_that_a_group_normalization_adds_stay_apart() -> None:
    apart, graph = FuseEpilogue(norms_add=True), _vectors_before("GroupNormalization").graph
    check_refused(
        apart, graph, because="the normalization GroupNormalization_.* adds Add_.* itself", rule="epilogue_add"
    )
    check_pass(FUSE, graph, changes=1, kinds={"Conv": 1, "GroupNormalization": 1}, rules={"epilogue_add": 1})


@pytest.mark.parametrize(
    "kept",
    [
        {"kind": "Softmax"},
        {"readers": 2},
        {"shape": (2, 4, 6, 6)},
        {"shape": (1, 1, 1, 1)},
        {"op": "Sub"},
        {"op": "Mul"},
    ],
)
def test_other_sums_do_not_stay_apart(kept: dict[str, Any]) -> None:
    graph = _vectors_before(**{"kind": "GroupNormalization", **kept}).graph
    rule = "epilogue_scale" if kept.get("op") == "Mul" else "epilogue_add"
    check_pass(FuseEpilogue(norms_add=True), graph, changes=1, rules={rule: 1})


def gated(other: str = "tensor") -> Graph:
    """A cell's candidate: ``g * tanh(conv(x)) + other``."""
    n = Net()
    x, g, h = n.input(2, 4, 6, 6), n.input(2, 4, 6, 6, name="g"), n.input(2, 4, 6, 6, name="h")
    y = n.op("Mul", n.op("Tanh", n.conv(x, 4)), g)
    added = n.op("Mul", n.op("Sigmoid", h), h) if other == "tensor" else n.random(4, 1, 1)
    return n.done(n.op("Clip", n.op("Add", added, y), -1.0, 1.0))


def test_a_second_tensor_is_left_to_pointwise_operators_on_gpus() -> None:
    """Kernels read one tensor: the addition is part of the launch that computes its other operand."""
    graph, _ = check_pass(FuseEpilogue(), gated(), changes=2, context=PassContext(target="cuda:sm_90a"))
    assert stages(graph) == [("<Conv>", "Tanh", "Mul")]
    check_pass(FuseEpilogue(), gated(), changes=4)
    program = check_simulated(gated())
    assert len(kinds(program)) == 3, "conversions, the convolution, and one launch after it"


def test_a_second_tensor_has_a_reason() -> None:
    graph = gated()
    report = FuseEpilogue()(graph, PassContext(target="cuda:sm_90a"))
    assert any("reads a tensor already, and its kernel cannot read that of Add" in r.reason for r in report.refused)


def test_a_gated_unit_takes_a_tensor_too() -> None:
    """One launch computes both products: the tensor that it adds is its only one."""
    n = Net()
    x = n.input(8, 16)
    unit = n.op("Mul", n.op("Sigmoid", n.matmul(x, 16)), n.matmul(x, 16))
    check_pass(FuseEpilogue(), n.done(n.op("Add", unit, x)), changes=3, context=PassContext(target="cuda:sm_90a"))


def test_constants_after_a_tensor_are_stages() -> None:
    check_pass(FuseEpilogue(), gated("constant"), changes=4, context=PassContext(target="cuda:sm_90a"))


def test_rows_that_repeat_are_left_to_the_norm_after_them() -> None:
    """On GPUs, kernels of products do not read repeated rows; a residual, which has all rows, is a stage."""
    for shape, changes in (((1, 5, 4), 0), ((5, 4), 0), ((2, 5, 4), 1), ((4,), 1)):
        n = Net(np.float64)
        y = n.op("Add", n.matmul(n.input(2, 5, 6), 4), n.random(*shape))
        graph = n.done(y, n.op("LayerNormalization", y, n.random(4), n.random(4)))
        check_pass(FUSE, graph, changes=1)
        if changes:
            check_pass(FuseEpilogue(norms_add=True), graph, changes=1)
        else:
            check_refused(FuseEpilogue(norms_add=True), graph, because="the normalization .* adds Add_.* itself")


@pytest.mark.parametrize(("constant", "changes"), [(False, 1), (True, 0)])
def test_a_residual_of_one_image_is_a_stage(constant: bool, changes: int) -> None:
    n = Net(np.float64)
    rows = n.random(1, 5, 4) if constant else n.input(1, 5, 4, name="r")
    y = n.op("Add", n.matmul(n.input(1, 5, 6), 4), rows)
    graph = n.done(y, n.op("LayerNormalization", y, n.random(4), n.random(4)))
    check_pass(FuseEpilogue(norms_add=True), graph, changes=changes)


@pytest.mark.parametrize("norm", [True, False])
def test_a_second_tensor_is_left_to_the_norm_after_it(norm: bool) -> None:
    """A gate, then a residual: kernels of products read one tensor, those of norms add the other."""
    n = Net(np.float64)
    x = n.input(2, 5, 4)
    gated = n.op("Mul", n.matmul(x, 4), n.op("Softmax", n.input(2, 5, 4, name="gate")))
    y = n.op("Add", gated, x)
    graph = n.done(y, n.op("LayerNormalization", y, n.random(4), n.random(4)) if norm else n.op("Tanh", y))
    done, report = check_pass(FuseEpilogue(norms_add=True), graph, changes=1 if norm else 2)
    assert stages(done) == [("<MatMul>", "Mul") if norm else ("<MatMul>", "Mul", "Add")]
    assert any("adds Add_" in miss.reason for miss in report.refused) == norm


def _flow(bias: bool = False) -> Graph:
    """A layer that moves pixel positions, at which an image is then sampled. ``bias``: it adds one number per axis instead."""
    n = Net()
    x = n.input(1, 2, 8, 8)
    moved = n.op("Add", n.conv(x, 2), n.random(2, 1, 1) if bias else n.input(1, 2, 8, 8, name="pixels"))
    at = n.op("Transpose", moved, attrs=TransposeAttrs((0, 2, 3, 1)))
    return n.done(n.op("GridSample", x, at))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8+fp16"])
def test_places_are_not_added_where_the_sum_is_rounded(precision: str) -> None:
    context = PassContext(target="cuda:sm_90a", precision=precision)
    check_refused(FUSE, _flow(), because="it computes positions that GridSample .* reads, in fp32", context=context)
    check_refused(FUSE, _flow(), because="in fp32", context=PassContext(target="simulate", plan=PrecisionPlan("fp16")))


@pytest.mark.parametrize(
    ("target", "precision", "bias"),
    [
        ("cuda:sm_90a", "fp32", False),
        ("cuda:sm_90a", "tf32", False),
        ("cpu", "fp16", False),
        ("cuda:sm_90a", "fp16", True),
    ],
)
def test_other_sums_before_places_are_stages(target: str, precision: str, bias: bool) -> None:
    graph, _ = check_pass(FUSE, _flow(bias), changes=1, context=PassContext(target=target, precision=precision))
    assert not graph.of_kind("Add")
