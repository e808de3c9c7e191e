"""fuse_epilogue: operators after a convolution or matrix product become its stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched, stages
from support.net import Net
from support.simulated import check_simulated

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Attrs
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.unary import GeluAttrs, LeakyReluAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.support.facts import operand
from optdnn.types import FP16

FUSE = FuseEpilogue()


ACTIVATIONS: list[tuple[str, Attrs | None, tuple[Any, ...]]] = [
    ("Relu", None, ()),
    ("LeakyRelu", LeakyReluAttrs(0.2), ()),
    ("PRelu", None, (np.linspace(0.1, 0.4, 4).reshape(4, 1, 1),)),
    ("Snake", None, (np.linspace(0.1, 0.4, 4).reshape(4, 1, 1), np.linspace(1, 2, 4).reshape(1, 4, 1, 1))),
    ("Elu", None, ()),
    ("Clip", None, (0.0, 6.0)),
    ("Clip", None, (None, 0.5)),
    ("Sigmoid", None, ()),
    ("HardSigmoid", None, ()),
    ("HardSwish", None, ()),
    ("Swish", None, ()),
    ("Mish", None, ()),
    ("Tanh", None, ()),
    ("Gelu", GeluAttrs("tanh"), ()),
    ("Softplus", None, ()),
    ("Max", None, (0.25,)),
]


@pytest.mark.parametrize(("kind", "attrs", "more"), ACTIVATIONS, ids=[f"{k}{len(m)}" for k, _, m in ACTIVATIONS])
def test_an_activation(kind: str, attrs: Attrs | None, more: tuple[Any, ...]) -> None:
    n = Net()
    y = n.op(kind, n.conv(n.input(2, 3, 6, 6), 4, bias=True), *more, attrs=attrs)
    graph, _ = check_pass(FUSE, n.done(y), changes=1, kinds={"Conv": 1}, rules={"epilogue_activation": 1})
    assert stages(graph) == [("<Conv>", kind)]
    (conv,) = graph.of_kind("Conv")
    assert conv.attrs.epilogue[0].attrs == n.graph.of_kind(kind)[0].attrs
    assert conv.outputs[0].name == f"{kind}_2"


@pytest.mark.parametrize(("flip", "other"), [(False, "tensor"), (True, "tensor"), (False, "constant")])
def test_a_difference_on_gpus(flip: bool, other: str) -> None:
    n = Net()
    y = n.op("MatMul", n.input(2, 3, 6, name="a"), n.input(2, 6, 4, name="b"))
    x = n.random(2, 3, 4) if other == "constant" else n.input(2, 3, 4, name="t")
    graph, _ = check_pass(
        FUSE, n.done(n.op("Sub", *((y, x) if flip else (x, y)))), changes=1, kinds={"MatMul": 1},
        context=PassContext(target="cuda:sm_90a"),
    )  # fmt: skip
    assert stages(graph) == [("<MatMul>", *(("Sub",) if flip else ("Mul", "Add")))]


@pytest.mark.parametrize("kind", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 1), (3, 1)])
def test_kernels_of_gpus_read_no_smaller_tensors(kind: str, shape: tuple[int, ...]) -> None:
    """The attention of a step times the update gate (DIEN: Zhou et al., 2019)."""
    n = Net()
    y = n.op("MatMul", n.input(2, 3, 6, name="a"), n.input(2, 6, 4, name="b"))
    graph = n.done(n.op(kind, y, n.op("Exp", n.input(*shape, name="t"))))
    context = PassContext(target="cuda:sm_90a", precision="fp16")
    check_refused(FUSE, graph, because="pointwise operators do", context=context)
    check_pass(FUSE, graph, changes=1, context=PassContext(target="cpu"))
    check_pass(FUSE, graph, changes=1, context=PassContext(target="cuda:sm_90a"))


@pytest.mark.parametrize("gated", [False, True])
def test_factors_that_siblings_share_stay_with_them(gated: bool) -> None:
    """The mask of a triangle multiplication (Jumper et al., 2021): `fuse_siblings` joins its products."""
    n = Net(np.float64)
    x, mask = n.input(2, 3, 6), n.input(2, 3, 1, name="mask")
    a, b = (n.op("Mul", n.matmul(x, 4), n.matmul(x, 4)) if gated else n.matmul(x, 4) for _ in range(2))
    graph = n.done(n.op("Mul", a, mask), n.op("Mul", b, mask))
    check_pass(FUSE, graph, changes=4 if gated else 2, context=PassContext(target="cuda:sm_90a", precision="fp16"))


@pytest.mark.parametrize("shape", [(2, 1, 4), (4,)])
def test_kernels_of_gpus_read_factors_of_the_channels_of_images(shape: tuple[int, ...]) -> None:
    n = Net()
    y = n.op("MatMul", n.input(2, 3, 6, name="a"), n.input(2, 6, 4, name="b"))
    graph = n.done(n.op("Mul", y, n.input(*shape, name="gate")))
    check_pass(FUSE, graph, changes=1, context=PassContext(target="cuda:sm_90a", precision="fp16"))


def recurrent(*, readers: int = 1, last: str = "Add") -> Graph:
    """``(1 - z) h + z n``, with the product n and a computed gate z, whose result ``readers`` read."""
    n = Net()
    h, z = n.input(2, 4, name="h"), n.op("Sigmoid", n.input(2, 4, name="z"))
    kept = n.op("Mul", n.op("Sub", 1.0, z), h)
    new = n.op("Mul", n.matmul(n.input(2, 6, name="x"), 4), z)
    total = n.op("Add", kept, new) if last == "Add" else n.op("Softmax", new)
    return n.done(total, *(n.matmul(z, 3) for _ in range(readers - 1)))


def test_a_pointwise_launch_computes_the_tensor_that_a_stage_would_read() -> None:
    gpu = PassContext(target="cuda:sm_90a")
    check_refused(FUSE, recurrent(), because="the pointwise launch of Add_.* computes Mul", context=gpu)
    check_pass(FUSE, recurrent(), changes=2, context=PassContext(target="cpu"))


@pytest.mark.parametrize("options", [{"readers": 2}, {"last": "Softmax"}])
def test_a_stage_reads_a_tensor_that_has_its_own_launch(options: dict[str, Any]) -> None:
    report = FuseEpilogue()(recurrent(**options), PassContext(target="cuda:sm_90a"))
    assert report.changes == 1, report


@pytest.mark.parametrize(("flip", "other"), [(False, "tensor"), (True, "tensor"), (False, "row")])
@pytest.mark.parametrize("target", ["cuda:sm_90a", "cpu"])
def test_a_quotient(flip: bool, other: str, target: str) -> None:
    n = Net()
    y = n.op("Exp", n.op("MatMul", n.input(2, 3, 6, name="a"), n.input(2, 6, 4, name="b")))
    y = n.op("MatMul", y, n.positive(4, 4))
    x = n.random(4) if other == "row" else n.input(2, 3, 4, name="t")
    graph, _ = check_pass(
        FUSE, n.done(n.op("Div", *((y, x) if flip else (x, y)))), changes=1, kinds={"MatMul": 2, "Exp": 1},
        context=PassContext(target=target),
    )  # fmt: skip
    plain = flip or other == "row" or target == "cpu"
    assert stages(graph)[-1] == ("<MatMul>", *(("Div",) if plain else ("Reciprocal", "Mul")))


@pytest.mark.parametrize("op", ["Add", "Sub"])
@pytest.mark.parametrize("rows", [(3, 4), (1, 3, 4), (4,), (2, 3, 4)])
@pytest.mark.parametrize("target", ["cuda:sm_90a", "cpu"])
def test_constant_rows_are_repeated_on_gpus(op: str, rows: tuple[int, ...], target: str) -> None:
    n = Net()
    y = n.op("MatMul", n.input(2, 3, 6, name="a"), n.input(2, 6, 4, name="b"))
    before = n.done(n.op(op, n.random(*rows), y))
    graph, _ = check_pass(FUSE, before, changes=1, kinds={"MatMul": 1}, context=PassContext(target=target))
    (product,) = graph.of_kind("MatMul")
    repeated = target != "cpu" and len(rows) > 1
    assert graph.type(operand(product, -1)).static_shape == ((2, 3, 4) if repeated else rows)


def test_many_constant_rows_are_not_repeated() -> None:
    n = Net()
    y = n.op("MatMul", n.input(2, 256, 6, name="a"), n.input(2, 6, 256, name="b"))
    graph, _ = check_pass(
        FUSE, n.done(n.op("Add", y, n.random(256, 256))), changes=1, context=PassContext(target="cuda:sm_90a")
    )
    assert graph.type(operand(graph.of_kind("MatMul")[0], -1)).static_shape == (256, 256)


@pytest.mark.parametrize("op", ["Add", "Sub"])
def test_a_gpu_adds_constant_rows_in_the_product(op: str) -> None:
    """Iterations for an inverse: ``13 I - x y`` (Nystromformer)."""
    n = Net()
    x, y = (n.op("Tanh", n.input(1, 4, 16, 16, name=name)) for name in ("a", "b"))
    program = check_simulated(n.done(n.op(op, n.const(13 * np.eye(16)), n.op("MatMul", x, y))), "fp16")
    assert [s.params["op"]["kind"] for s in program.steps].count("MatMul") == 1
    assert not any(
        s.params["tactic"].startswith("matmul") and s.params["op"]["kind"] == "Pointwise" for s in program.steps
    )


ANCHORS: dict[str, Callable[[Net], Value]] = {
    "Conv": lambda n: n.conv(n.input(2, 3, 6, 6), 4),
    "ConvTranspose": lambda n: n.conv_transpose(n.input(2, 3, 6, 6), 4, bias=True),
    "Gemm": lambda n: n.gemm(n.input(2, 3), 4),
    "MatMul": lambda n: n.matmul(n.input(2, 5, 3), 4),
}


@pytest.mark.parametrize("kind", ANCHORS)
def test_a_chain_after_each_kind(kind: str) -> None:
    n = Net()
    y = n.op("Relu", n.op("Add", n.op("Mul", ANCHORS[kind](n), 0.5), 0.125))
    graph, _ = check_pass(FUSE, n.done(y), changes=3, kinds={kind: 1})
    assert stages(graph) == [(f"<{kind}>", "Mul", "Add", "Relu")]


@pytest.mark.parametrize("flip", [False, True])
def test_a_residual_in_either_order(flip: bool) -> None:
    n = Net()
    x = n.input(2, 4, 6, 6)
    c = n.conv(x, 4)
    y = n.op("Relu", n.op("Add", *((x, c) if flip else (c, x))))
    graph, _ = check_pass(
        FUSE, n.done(y), changes=2, kinds={"Conv": 1}, rules={"epilogue_add": 1, "epilogue_activation": 1}
    )
    assert stages(graph) == [("<Conv>", "Add", "Relu")]


@pytest.mark.parametrize("flip", [False, True])
def test_a_difference_keeps_its_order(flip: bool) -> None:
    n = Net()
    x = n.input(2, 4, 6, 6)
    c = n.conv(x, 4)
    y = n.op("Sub", *((x, c) if flip else (c, x)))
    graph, _ = check_pass(FUSE, n.done(y), changes=1, kinds={"Conv": 1})
    assert graph.of_kind("Conv")[0].attrs.epilogue[0].args == ((3, -1) if flip else (-1, 3))


def test_a_residual_that_is_computed_after_the_convolution() -> None:
    """The other operand comes later in the ONNX file, and does not depend on the convolution."""
    n = Net()
    x = n.input(2, 4, 6, 6)
    c = n.conv(x, 4)
    r = n.op("Exp", n.op("Neg", x))
    graph, _ = check_pass(FUSE, n.done(n.op("Add", c, r)), changes=1, kinds={"Conv": 1, "Exp": 1, "Neg": 1})
    assert [op.kind for op in graph.order() if op.kind in ("Conv", "Exp")] == ["Exp", "Conv"]


def test_of_two_convolutions_the_later_takes_the_sum() -> None:
    n = Net()
    x = n.input(2, 4, 6, 6)
    main = n.conv(n.op("Relu", n.conv(x, 4)), 4, 1, pads=0)
    shortcut = n.conv(x, 4)
    graph, _ = check_pass(FUSE, n.done(n.op("Relu", n.op("Add", main, shortcut))), changes=3, kinds={"Conv": 3})
    assert sorted(stages(graph)) == [("<Conv>",), ("<Conv>", "Add", "Relu"), ("<Conv>", "Relu")]
    fused = next(op for op in graph.of_kind("Conv") if len(op.attrs.epilogue) == 2)
    assert "Conv_3" in fused.src
    assert "Conv_4" not in fused.src


def test_of_two_equally_deep_convolutions_the_later_in_the_model_takes_the_sum() -> None:
    n = Net()
    x = n.input(2, 4, 6, 6)
    graph, _ = check_pass(FUSE, n.done(n.op("Add", n.conv(x, 4), n.conv(x, 4))), changes=1, kinds={"Conv": 2})
    assert next(op for op in graph.of_kind("Conv") if op.attrs.epilogue).src == {"Conv_2", "Add_3"}


def test_the_earlier_convolution_takes_the_sum_where_the_later_is_refused() -> None:
    n = Net()
    x = n.input(2, 4, 6, 6)
    wide = n.conv(x, 4)
    row = n.conv(n.op("Relu", n.conv(n.input(2, 4, 1, 6, name="r"), 4)), 4)
    graph, _ = check_pass(FUSE, n.done(n.op("Add", wide, row)), changes=2, kinds={"Conv": 3})
    assert next(
        op for op in graph.of_kind("Conv") if op.attrs.epilogue[-1:] and op.attrs.epilogue[-1].kind == "Add"
    ).src == {
        "Conv_1",
        "Add_5",
    }


def test_the_result_used_twice_by_one_op() -> None:
    n = Net()
    c = n.conv(n.input(2, 4, 6, 6), 4)
    graph, _ = check_pass(FUSE, n.done(n.op("Mul", c, c)), changes=1, kinds={"Conv": 1})
    assert graph.of_kind("Conv")[0].attrs.epilogue[0].args == (-1, -1)


def test_an_operand_that_two_stages_read_takes_one_slot() -> None:
    n = Net()
    x = n.input(2, 4, 6, 6)
    y = n.op("Mul", n.op("Add", n.conv(x, 4), x), x)
    graph, _ = check_pass(FUSE, n.done(y), changes=2)
    assert len(graph.of_kind("Conv")[0].inputs) == 4


def test_a_bias_that_is_not_constant() -> None:
    n = Net()
    y = n.op("Add", n.matmul(n.input(2, 5, 3), 4), n.input(4, name="b"))
    check_pass(FUSE, n.done(y), changes=1, kinds={"MatMul": 1}, rules={"epilogue_add": 1})


def test_the_product_of_two_activations_in_attention() -> None:
    n = Net()
    q, k = n.input(2, 5, 3), n.input(2, 3, 5, name="k")
    mask = n.input(1, 5, 5, name="mask")
    y = n.op("Add", n.op("Mul", n.op("MatMul", q, k, attrs=MatMulAttrs()), 0.5), mask)
    graph, _ = check_pass(FUSE, n.done(y), changes=2, kinds={"MatMul": 1})
    assert stages(graph) == [("<MatMul>", "Mul", "Add")]


def test_symbolic_shapes_that_are_the_same() -> None:
    n = Net()
    x = n.input(symbol("n"), 4, symbol("h"), 6)
    y = n.op("Relu", n.op("Add", n.conv(x, 4), x))
    check_pass(FUSE, n.done(y), changes=2, kinds={"Conv": 1}, sizes={"n": 2, "h": 5})


# ---------------------------------------------------------------- refusals


def test_refused_where_symbolic_shapes_may_differ() -> None:
    n = Net()
    c = n.conv(n.input(symbol("n"), 4, 6, 6), 4)
    y = n.op("Add", c, n.input(symbol("m"), 4, 6, 6, name="r"))
    check_refused(FUSE, n.done(y), because="would enlarge", rule="epilogue_add")


@pytest.mark.parametrize("shape", [(2, 4, 6, 6), (1, 2, 4, 1, 6)])
def test_refused_where_broadcasting_enlarges_the_result(shape: tuple[int, ...]) -> None:
    n = Net()
    c = n.conv(n.input(2, 3, 1, 6), 4)
    check_refused(FUSE, n.done(n.op("Add", c, n.input(*shape, name="r"))), because="Add Add_2 would enlarge")


def test_refused_where_the_result_has_other_uses() -> None:
    n = Net()
    c = n.conv(n.input(2, 4, 6, 6), 4)
    graph = n.done(n.op("Relu", c), n.op("MaxPool", c, attrs=n.graph.op(n.max_pool(c)).attrs))
    check_refused(FUSE, graph, because="result of Conv_1 is used by 3 ops")


def test_refused_where_the_result_is_an_output() -> None:
    n = Net()
    c = n.conv(n.input(2, 4, 6, 6), 4)
    check_refused(FUSE, n.done(n.op("Relu", c), c), because="Conv_1 is an output of the network")


def test_refused_where_a_matmul_is_of_integers() -> None:
    n = Net(np.int32)
    y = n.op("MatMul", n.input(2, 3), n.const([[1, 2], [3, 4], [5, 6]]), attrs=MatMulAttrs())
    check_refused(FUSE, n.done(n.op("Add", y, 1)), because="not the floating type")


def test_a_cast_is_no_candidate() -> None:
    n = Net()
    check_untouched(FUSE, n.done(n.op("Cast", n.conv(n.input(2, 3, 6, 6), 4), attrs=CastAttrs(FP16))))


def test_pooling_ends_the_chain() -> None:
    n = Net()
    check_untouched(FUSE, n.done(n.op("Relu", n.max_pool(n.conv(n.input(2, 3, 6, 6), 4)))))
