"""Pointwise operators convert between fp32 and 16-bit floats in registers."""

from __future__ import annotations

import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Value
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.fused import PointwiseAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.reduce import ArgAttrs, ReduceAttrs
from optdnn.ops.resize import ResizeAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_conversions import FuseConversions
from optdnn.types import BF16, FP16, FP32, INT64, DType

CUDA = PassContext(target="cuda:sm_90a")


def to(n: Net, x: Value, dtype: DType) -> Value:
    value: Value = n.op("Cast", x, attrs=CastAttrs(dtype))
    return value


@pytest.mark.parametrize("half", [FP16, BF16])
def test_an_operator_between_conversions(half: DType) -> None:
    n = Net()
    x, y = (to(n, n.input(4, 8, name=name), half) for name in "xy")
    graph = n.done(to(n, n.op("Mul", x, y), FP32))
    after, report = check_pass(
        FuseConversions(), graph, changes=2, kinds={"Pointwise": 1}, context=CUDA, promoted_changes=0,
        rules={"converted_in_registers": 2},
    )  # fmt: skip
    (op,) = after.of_kind("Pointwise")
    assert [s.kind for s in op.attrs.epilogue] == ["Cast", "Cast", "Mul", "Cast"]
    assert op.outputs[0].type.dtype == FP32
    assert [f.nodes for f in report.fired][-1] == ("Cast_1", "Cast_2", "Cast_4", "Mul_3")


@pytest.mark.parametrize("half", [FP16, BF16])
def test_an_operator_of_fp32_reads_16_bit_floats(half: DType) -> None:
    """As where a decision depends on it, so that it stays in fp32."""
    n = Net()
    x, y = (n.input(4, 8, dtype=half, name=name) for name in "xy")
    graph = n.done(n.op("Mul", to(n, x, FP32), to(n, n.op("MatMul", y, n.const(n.rng.random((8, 8)), half)), FP32)))
    after, _ = check_pass(
        FuseConversions(), graph, changes=1, kinds={"Pointwise": 1, "MatMul": 1}, context=CUDA, promoted_changes=0,
        rules={"converted_in_registers": 1},
    )  # fmt: skip
    (op,) = after.of_kind("Pointwise")
    assert [s.kind for s in op.attrs.epilogue] == ["Cast", "Cast", "Mul"]
    assert {after.type(v).dtype for v in op.inputs if v is not None} == {half}


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
def test_a_pool_before_an_operator_that_widens(kind: str) -> None:
    """The launch of the pool computes both, and stores fp32."""
    n = Net(FP16)
    x = n.input(2, 8, 4, 4)
    pooled = n.max_pool(x, 3, strides=1, pads=1) if kind == "MaxPool" else n.average_pool(x, 3, strides=1, pads=1)
    graph = n.done(to(n, n.op("Mul", pooled, x), FP32))
    check_pass(FuseConversions(), graph, changes=1, kinds={kind: 1, "Pointwise": 1}, context=CUDA, promoted_changes=0)


def test_stages_before_a_conversion() -> None:
    n = Net(FP16)
    stages = PointwiseAttrs(epilogue=(Stage("Relu", (-1,)), Stage("Mul", (-2, 1))))
    graph = n.done(to(n, n.op("Pointwise", n.input(4, 8), n.random(8), attrs=stages), FP32))
    after, _ = check_pass(FuseConversions(), graph, changes=1, kinds={"Pointwise": 1}, context=CUDA, promoted_changes=0)
    assert [s.kind for s in after.of_kind("Pointwise")[0].attrs.epilogue] == ["Relu", "Mul", "Cast"]


def test_conversions_with_other_readers_stay() -> None:
    n = Net()
    x = to(n, n.input(4, 8), FP16)
    y = n.op("Relu", x)
    z = n.op("MatMul", x, n.const(n.rng.random((8, 8)), FP16))
    graph = n.done(to(n, y, FP32), y, z)
    check_refused(FuseConversions(), graph, because="Cast_1 is also used by MatMul_3", context=CUDA)
    check_refused(FuseConversions(), graph, because="Relu_2 is an output of the network", context=CUDA)


def test_conversions_of_integers_stay() -> None:
    n = Net()
    x = n.op("Cast", n.input(4, 8, dtype=INT64), attrs=CastAttrs(FP16))
    check_untouched(FuseConversions(), n.done(n.op("Relu", x)), context=CUDA)


@pytest.mark.parametrize("kind", ["LayerNormalization", "GlobalAveragePool", "ReduceMax"])
@pytest.mark.parametrize("after", [False, True])
def test_operators_beside_others_that_may_compute_them_stay(kind: str, after: bool) -> None:
    n = Net(FP16)
    x = n.input(2, 8, 4, 4, dtype=FP32) if after else n.input(2, 8, 4, 4)

    def other(value: Value) -> Value:
        found: Value
        if kind == "LayerNormalization":
            found = n.op(kind, value, n.random(4))
        elif kind == "ReduceMax":
            found = n.op(kind, value, n.ints(-1), attrs=ReduceAttrs(keepdims=True))
        else:
            found = n.op(kind, value)
        return found

    graph = n.done(other(n.op("Relu", to(n, x, FP16)))) if after else n.done(to(n, n.op("Relu", other(x)), FP32))
    check_untouched(FuseConversions(), graph, context=CUDA)


def test_networks_of_one_operator_are_one_launch() -> None:
    n = Net()
    x = n.input(4, 64)
    program = check_simulated(n.done(n.op("Mul", n.op("Sigmoid", x), n.random(64))), "fp16")
    assert kinds(program) == ["Pointwise"]


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
def test_a_softmax_stores_fp32(kind: str) -> None:
    n = Net()
    rows = n.op("MatMul", n.input(4, 64), n.random(64, 40, scale=0.2))
    program = check_simulated(n.done(n.op(kind, rows, attrs=SoftmaxAttrs(-1))), "fp16")
    assert kinds(program)[-1] == "ActivatedNorm"


def test_a_softmax_computes_an_activation() -> None:
    n = Net()
    y = n.op("Softmax", n.op("MatMul", n.input(4, 16), n.random(16, 16)), attrs=SoftmaxAttrs(-1))
    program = check_simulated(n.done(n.op("Softmax", n.op("Sigmoid", y), attrs=SoftmaxAttrs(-1))), "fp32")
    assert kinds(program)[-2:] == ["ActivatedNorm", "Softmax"]


# ---------------------------------------------------------------- conversions and views


def patches(n: Net, x: Value, perm: tuple[int, ...] = (0, 2, 4, 1, 3, 5)) -> Value:
    """The 4 x 4 patches of an image as rows."""
    x = n.op("Reshape", x, n.ints(1, 3, 2, 4, 2, 4))
    return n.op("Reshape", n.op("Transpose", x, attrs=TransposeAttrs(perm)), n.ints(1, 4, 48))


def embedded(n: Net, x: Value) -> Value:
    return n.op("MatMul", x, n.const(n.rng.random((48, 16)), FP16))


def test_a_conversion_moves_behind_the_last_transpose() -> None:
    n = Net()
    graph = n.done(embedded(n, patches(n, to(n, n.input(1, 3, 8, 8), FP16))))
    after, _ = check_pass(
        FuseConversions(), graph, changes=1, rules={"conversion_after_views": 1}, context=CUDA, promoted_changes=0,
        kinds={"Cast": 1, "Reshape": 2, "Transpose": 1, "MatMul": 1},
    )  # fmt: skip
    (cast,) = after.of_kind("Cast")
    assert after.op(cast.inputs[0]).kind == "Transpose"  # type: ignore[arg-type]
    assert cast.outputs[0].type.dims == (1, 2, 2, 3, 4, 4)


def test_a_conversion_moves_behind_slices_before_the_transpose() -> None:
    n = Net()
    x = n.sliced(to(n, n.input(1, 3, 8, 11), FP16), 0, 8, 3)
    after, _ = check_pass(
        FuseConversions(), n.done(embedded(n, patches(n, x))), changes=1, rules={"conversion_after_views": 1}, context=CUDA,
        promoted_changes=0, kinds={"Cast": 1, "Slice": 1, "Reshape": 2, "Transpose": 1, "MatMul": 1},
    )  # fmt: skip
    (cast,) = after.of_kind("Cast")
    assert after.op(cast.inputs[0]).kind == "Transpose"  # type: ignore[arg-type]


def test_other_conversions_before_views_stay() -> None:
    n = Net()
    rows = n.sliced(patches(n, to(n, n.input(1, 3, 8, 8), FP16)), 0, 2, 1)
    check_refused(FuseConversions(), n.done(embedded(n, rows)), because="leaves out", context=CUDA)
    n = Net()
    x = to(n, n.input(1, 3, 8, 8), FP16)
    check_refused(
        FuseConversions(), n.done(embedded(n, patches(n, x)), x), because="Cast_1 has other readers", context=CUDA
    )
    n = Net()
    graph = n.done(embedded(n, patches(n, to(n, n.input(1, 3, 8, 8), FP16), (0, 2, 4, 1, 5, 3))))
    check_refused(FuseConversions(), graph, because="exchange neighbors", context=CUDA)
    n = Net()
    rows = n.op("Reshape", to(n, n.input(1, 3, 8, 8), FP16), n.ints(1, 4, 48))
    check_untouched(FuseConversions(), n.done(embedded(n, rows)), context=CUDA)


@pytest.mark.parametrize("width", [32, 35])
def test_the_launches_of_a_patch_embedding(width: int) -> None:
    """Columns that no patch covers cost no launch."""
    n = Net()
    x = n.op(
        "Conv", n.input(1, 3, 32, width), n.random(64, 3, 4, 4, scale=0.1), attrs=ConvAttrs((4, 4), (0,) * 4, (1, 1), 1)
    )
    rows = n.op("Transpose", n.op("Reshape", x, n.ints(1, 64, 64)), attrs=TransposeAttrs((0, 2, 1)))
    y = n.op("LayerNormalization", rows, n.positive(64), n.random(64), attrs=LayerNormAttrs(-1))
    assert kinds(check_simulated(n.done(n.matmul(y, 16)), "fp16"))[:2] == ["Pointwise", "RowMoments"]


@pytest.mark.parametrize("kind", ["ArgMax", "TopK"])
def test_positions_are_found_before_a_conversion(kind: str) -> None:
    n = Net()
    x = to(n, n.input(4, 9, dtype=FP16), FP32)
    found = n.op("ArgMax", x, attrs=ArgAttrs(axis=1)) if kind == "ArgMax" else n.op("TopK", x, n.ints(3), outputs=2)[1]
    check_pass(
        FuseConversions(), n.done(found), changes=1, kinds={kind: 1}, context=CUDA, promoted_changes=0,
        rules={"choice_before_conversion": 1}, depends_on_input=False,
    )  # fmt: skip


def test_elements_that_are_converted_back_are_not_converted() -> None:
    """A router: a softmax weighs its largest scores."""
    n = Net()
    elements, found = n.op("TopK", to(n, n.input(4, 9, dtype=FP16), FP32), n.ints(3), outputs=2)
    weights = n.op("Softmax", to(n, elements, FP16), attrs=SoftmaxAttrs(1))
    check_pass(
        FuseConversions(), n.done(weights, found), changes=1, kinds={"Softmax": 1, "TopK": 1}, context=CUDA,
        promoted_changes=0, rules={"choice_before_conversion": 1},
    )  # fmt: skip


def test_elements_without_their_positions_are_not_converted() -> None:
    """DeepSeek-V3 adds the two best scores of each group of experts."""
    n = Net()
    elements = to(n, n.op("TopK", to(n, n.input(4, 9, dtype=FP16), FP32), n.ints(2)), FP16)
    check_pass(
        FuseConversions(), n.done(n.op("ReduceSum", elements, n.ints(1))), changes=1, kinds={"ReduceSum": 1, "TopK": 1},
        context=CUDA, promoted_changes=0, rules={"choice_before_conversion": 1},
    )  # fmt: skip


@pytest.mark.parametrize("back", [FP32, BF16])
def test_elements_of_another_type_are_converted_first(back: DType) -> None:
    n = Net()
    elements, found = n.op("TopK", to(n, n.input(4, 9, dtype=FP16), FP32), n.ints(3), outputs=2)
    read = n.op("Softmax", elements if back == FP32 else to(n, elements, back), attrs=SoftmaxAttrs(1))
    more = n.op("Softmax", to(n, elements, FP16), attrs=SoftmaxAttrs(1))
    check_refused(FuseConversions(), n.done(read, more, found), because="the elements are read as well", context=CUDA)


def test_elements_that_are_read_are_converted_first() -> None:
    n = Net()
    elements, found = n.op("TopK", to(n, n.input(4, 9, dtype=FP16), FP32), n.ints(3), outputs=2)
    check_refused(FuseConversions(), n.done(elements, found), because="the elements are read as well", context=CUDA)


def resized(n: Net, scale: int) -> Value:
    x = n.input(1, 3, 8, 6, dtype=FP16)
    value: Value = n.op("Resize", x, None, n.const([1, 1, scale, scale]), attrs=ResizeAttrs(mode="linear"))
    return value


def test_fewer_elements_are_converted_before_a_resize() -> None:
    n = Net()
    after, _ = check_pass(
        FuseConversions(), n.done(to(n, resized(n, 2), FP32)), changes=1, kinds={"Cast": 1, "Resize": 1}, context=CUDA,
        promoted_changes=0, rules={"conversion_before_resize": 1},
    )  # fmt: skip
    (op,) = after.of_kind("Resize")
    assert op.outputs[0].type.dtype == FP32


def test_a_resize_that_does_not_enlarge_keeps_its_type() -> None:
    n = Net()
    check_refused(FuseConversions(), n.done(to(n, resized(n, 1), FP32)), because="does not enlarge", context=CUDA)


def test_a_resize_that_others_read_keeps_its_type() -> None:
    n = Net()
    y = resized(n, 2)
    check_untouched(FuseConversions(), n.done(to(n, y, FP32), n.op("Relu", y)), context=CUDA)


def test_the_launches_of_an_upsampled_output() -> None:
    n = Net()
    x = n.conv(n.input(1, 8, 8, 6), 16, 3)
    y = n.op("Resize", x, None, n.const([1, 1, 4, 4]), attrs=ResizeAttrs(mode="linear"))
    assert kinds(check_simulated(n.done(y), "fp16"))[-1] == "Resize", "it stores fp32"
