"""fold_quantized: what follows the rounding of a product's result is a part of the product, with the rounding in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.host import needs_compiler
from support.on_processor import compare_steps
from support.quantized_nets import FP8, QNet, folded, within
from support.simulated import calibrated, feeds_of

from optdnn.ir.graph import Graph, Value
from optdnn.ops import requantize
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.fused import PointwiseAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.unary import HardSigmoidAttrs
from optdnn.runtime.cuda.compile import render
from optdnn.types import FP16, FP32

SHAPE = (2, 16, 9, 7)


def network(
    after: Callable[[QNet, Value], Value], *, zero: int | None = None, dtype: Any = np.int8, used: bool = False,
    product: str = "conv", inner: float = 0.04, end: bool = True,
) -> Graph:  # fmt: skip
    """A product of rounded data, whose result is rounded, then ``after``, whose result is rounded again."""
    n = QNet()
    x = n.fake(n.input(*SHAPE), 0.03)
    made = n.qconv(x, 16) if product == "conv" else n.qmatmul(n.fake(n.input(3, 8, 16, name="rows"), 0.03), 16)
    y = n.fake(made, inner, zero, dtype)
    z = after(n, y)
    outputs = [n.fake(z, 0.05, zero, dtype) if end else z]
    return n.done(*outputs, *([n.op("Tanh", y)] if used else []))


def shortcut(n: QNet, y: Value) -> Value:
    return n.op("Add", y, n.fake(n.input(*n.dims(y), name="b"), 0.02, 3))


def silu(n: QNet, y: Value, zero: int | None = None, dtype: Any = np.uint8) -> Value:
    return n.op("Mul", y, n.fake(n.op("Sigmoid", y), 0.004, zero, dtype))


def hard_swish(n: QNet, y: Value, alpha: float = 1 / 6) -> Value:
    """ONNX Runtime writes it as two operators before it quantizes them."""
    gate = n.op("HardSigmoid", y, attrs=HardSigmoidAttrs(alpha, 0.5))
    return n.op("Mul", n.fake(gate, 0.004, -128, np.int8), y)


FORMS: dict[str, tuple[Callable[[QNet, Value], Value], list[str]]] = {
    "another grid": (lambda n, y: y, []),  # as before a Concat, whose result has a scale of its own
    "gelu": (lambda n, y: n.op("Gelu", y), ["gelu"]),
    "relu": (lambda n, y: n.op("Relu", y), ["relu"]),
    "clip": (lambda n, y: n.op("Clip", y, n.const(0.0), n.const(1.5)), ["clip"]),
    "shortcut": (shortcut, ["add"]),
    "shortcut first": (lambda n, y: n.op("Add", n.fake(n.input(*n.dims(y), name="b"), 0.02), y), ["add"]),
    "shortcut and relu": (lambda n, y: n.op("Relu", shortcut(n, y)), ["add", "relu"]),
    "silu": (silu, ["rounded_silu"]),
    "hard swish": (hard_swish, ["rounded_hard_swish"]),
}
ROUND = ["mul_const", "round", "clip", "mul_const"]


@pytest.mark.parametrize("product", ["conv", "matmul"])
@pytest.mark.parametrize("name", FORMS)
def test_it_is_a_part_of_the_product(name: str, product: str) -> None:
    after, stages = FORMS[name]
    graph = network(after, product=product)
    done, _ = folded(graph)
    (made,) = (op for op in done.ops() if op.kind in ("QuantizedConv", "QuantizedMatMul"))
    assert [s[0] for s in made.attrs.stages if s[0] != "bias"][: len(ROUND) + len(stages)] == ROUND + stages
    assert made.outputs[0].type.dtype == np.int8
    within(graph, done, 0.0501)


def joined(*stages: Stage, other: int = 1) -> Callable[[QNet, Value], Value]:
    """One Pointwise of the result and a shortcut. ``other``: the operand that is the shortcut."""

    def after(n: QNet, y: Value) -> Value:
        given = [y, n.fake(n.input(*n.dims(y), name="b"), 0.02)]
        return n.op("Pointwise", *(given if other else given[::-1]), attrs=PointwiseAttrs(epilogue=stages))

    return after


RELU, ADD = Stage("Relu", (-2,)), Stage("Add", (-1, 1))
JOINED: dict[str, tuple[Callable[[QNet, Value], Value], list[str]]] = {
    "shortcut and relu": (joined(ADD, RELU), ["add", "relu"]),
    "shortcut first": (joined(ADD, RELU, other=0), ["add", "relu"]),
    "relu and shortcut": (joined(Stage("Relu", (-1,)), Stage("Add", (-2, 1))), ["relu", "add"]),
    "with a cast": (joined(ADD, Stage("Cast", (-2,), CastAttrs(FP32)), Stage("Relu", (-3,))), ["add", "relu"]),
    "read twice": (joined(ADD, Stage("Mul", (-2, -1))), []),
    "of a register": (joined(ADD, RELU, Stage("Mul", (-3, -2))), []),
    "no sum": (joined(Stage("Mul", (-1, 1)), RELU), []),
    "twice the shortcut": (joined(ADD, Stage("Add", (-2, 1))), []),
}


@pytest.mark.parametrize("name", JOINED)
def test_pointwise_operators_that_are_one_already(name: str) -> None:
    """NNCF and PyTorch round the result of a convolution, and then what follows the shortcut's activation."""
    after, stages = JOINED[name]
    graph = network(after)
    done, _ = folded(graph)
    (made,) = done.of_kind("QuantizedConv")
    expected = [*ROUND, *stages, "mul_const"] if stages else []
    assert [s[0] for s in made.attrs.stages][1:] == expected
    within(graph, done, 0.0501)


def numbers(n: QNet, y: Value) -> Value:
    """A bias that ONNX Runtime has quantized like any other tensor."""
    stored = n.const(n.rng.integers(-100, 100, n.dims(y)[-1]).astype(np.int8), np.int8)
    return n.op("Add", n.dq(stored, 0.01, 7), y)


NUMBERS: dict[str, tuple[Callable[[QNet, Value], Value], list[str]]] = {
    "floats": (lambda n, y: n.op("Add", y, n.random(16)), ["channel_add"]),
    "integers": (numbers, ["channel_add"]),
    "and gelu": (lambda n, y: n.op("Gelu", numbers(n, y)), ["channel_add", "gelu"]),
    "and a shortcut": (lambda n, y: shortcut(n, n.fake(numbers(n, y), 0.045)), ["channel_add", *ROUND, "add"]),
    "of rows in a row": (lambda n, y: numbers(n, n.op("Reshape", y, n.ints(24, 16))), ["channel_add"]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_added_to_columns(name: str) -> None:
    after, stages = NUMBERS[name]
    graph = network(after, product="matmul")
    done, _ = folded(graph)
    (made,) = done.of_kind("QuantizedMatMul")
    assert [s[0] for s in made.attrs.stages][1:] == [*ROUND, *stages, "mul_const"]
    assert done.type(made.inputs[2]).static_shape == (16, 3)  # type: ignore[arg-type]
    within(graph, done, 0.0501)


@pytest.mark.parametrize(
    ("after", "count"),
    [
        (lambda n, y: numbers(n, n.fake(numbers(n, y), 0.045)), 1),
        (lambda n, y: n.op("Add", y, n.random(8, 1)), 0),
        (lambda n, y: n.op("Add", n.op("Reshape", y, n.ints(3, 16, 8)), n.random(8)), 0),
    ],
    ids=["two", "rows", "other columns"],
)
def test_numbers_that_stay(after: Callable[[QNet, Value], Value], count: int) -> None:
    graph = network(after, product="matmul")
    done, _ = folded(graph)
    (made,) = done.of_kind("QuantizedMatMul")
    assert [s[0] for s in made.attrs.stages].count("channel_add") == count
    within(graph, done, 0.0501)


def test_numbers_of_channels_stay_after_a_convolution() -> None:
    done, _ = folded(network(lambda n, y: n.op("Add", y, n.random(16, 1, 1))))
    assert "channel_add" not in [s[0] for s in done.of_kind("QuantizedConv")[0].attrs.stages]


@pytest.mark.parametrize(("zero", "dtype"), [(5, np.int8), (120, np.uint8), (0, np.uint8)])
def test_zero_points(zero: int, dtype: Any) -> None:
    graph = network(shortcut, zero=zero, dtype=dtype)
    done, _ = folded(graph)
    assert len(done.of_kind("QuantizedConv")[0].attrs.stages) == 1 + len(ROUND) + 2
    within(graph, done, 0.0501)


def test_the_rounding_in_between_is_kept() -> None:
    """With steps of 0.5, few values are left."""
    graph = network(lambda n, y: n.op("Relu", y), inner=0.5)
    done, _ = folded(graph)
    within(graph, done, 0.0501)


@pytest.mark.parametrize(("zero", "dtype", "most"), [(0, np.uint8, 255), (-128, np.int8, 255), (3, np.int8, 124)])
def test_the_rounding_of_a_gate_is_kept(zero: int, dtype: Any, most: int) -> None:
    """With steps of 0.3, a gate has four values. The zero point only moves the largest one."""

    def coarse(n: QNet, y: Value) -> Value:
        return n.op("Mul", y, n.fake(n.op("Sigmoid", y), 0.3, zero, dtype))

    graph = network(coarse)
    done, _ = folded(graph)
    (made,) = done.of_kind("QuantizedConv")
    step = float(np.float32(0.3))
    assert ("rounded_silu", *(float(np.float32(v)) for v in (1 / step, most, step))) in made.attrs.stages
    within(graph, done, 0.0501)


def test_a_rounding_that_needs_too_many_constants_is_left_out() -> None:
    """A rounding takes four constants, the step of the result one. Three roundings would need thirteen: more than kernels hold."""
    graph = network(lambda n, y: shortcut(n, n.fake(n.op("Relu", n.fake(n.op("Relu", y), 0.03)), 0.04)))
    done, _ = folded(graph)
    (made,) = done.of_kind("QuantizedConv")
    assert [s[0] for s in made.attrs.stages].count("round") == 2
    assert len(render.constants_of(made.attrs.stages)) == 9 <= requantize.MAX_CONSTANTS
    assert len(done.of_kind("Pointwise")) == 2  # the rounding of the input, and what follows the product
    within(graph, done, 0.0501)


def test_a_shortcut_after_a_quantized_silu() -> None:
    """A block of YOLO: the most constants that kernels hold."""
    graph = network(lambda n, y: shortcut(n, n.fake(silu(n, y), 0.03)))
    done, _ = folded(graph)
    (made,) = done.of_kind("QuantizedConv")
    assert [s[0] for s in made.attrs.stages] == ["bias", *ROUND, "rounded_silu", *ROUND, "add", "mul_const"]
    assert len(render.constants_of(made.attrs.stages)) == requantize.MAX_CONSTANTS
    within(graph, done, 0.0501)


def test_only_one_tensor_is_added() -> None:
    def twice(n: QNet, y: Value) -> Value:
        return n.op("Add", n.fake(shortcut(n, y), 0.05), n.fake(n.input(*n.dims(y), name="c"), 0.02))

    graph = network(twice)
    done, _ = folded(graph)
    (made,) = done.of_kind("QuantizedConv")
    assert [s[0] for s in made.attrs.stages].count("add") == 1
    within(graph, done, 0.0501)


@pytest.mark.parametrize("name", FORMS)
def test_reshapes_in_between(name: str) -> None:
    """Products of ONNX Runtime's preprocessing are Gemms between Reshapes."""
    n = QNet()
    rows = n.q(n.qmatmul(n.fake(n.input(24, 16), 0.03), 16), 0.04)
    y = n.dq(n.op("Reshape", rows, n.ints(3, 8, 16)), 0.04)
    y = n.op("Reshape", FORMS[name][0](n, y), n.ints(24, 16))
    graph = n.done(n.fake(y, 0.05))
    done, _ = folded(graph)
    (made,) = done.of_kind("QuantizedMatMul")
    assert [s[0] for s in made.attrs.stages if s[0] != "bias"][: len(ROUND) + len(FORMS[name][1])] == ROUND + FORMS[
        name
    ][1]
    within(graph, done, 0.0501)


def test_a_reshape_after_it() -> None:
    graph = network(lambda n, y: n.op("Reshape", n.op("Gelu", y), n.ints(2, 16, 63)))
    done, _ = folded(graph)
    assert "gelu" in [s[0] for s in done.of_kind("QuantizedConv")[0].attrs.stages]
    within(graph, done, 0.0501)


def computed(n: QNet, y: Value) -> Value:
    return n.op("Add", y, n.op("Softmax", n.input(*n.dims(y), name="b")))


def one_per_channel(n: QNet, y: Value) -> Value:
    return n.op("Add", y, n.fake(n.input(16, 1, 1, name="b"), 0.02))


def mean(n: QNet, y: Value) -> Value:
    return n.op("ReduceMean", y, n.ints(2, 3), attrs=ReduceAttrs())


def gate_read_twice(n: QNet, y: Value) -> Value:
    gate = n.fake(n.op("Sigmoid", y), 0.004, None, np.uint8)
    return n.op("Mul", n.op("Mul", y, gate), gate)


def gate_of_another(n: QNet, y: Value) -> Value:
    other = n.fake(n.input(*n.dims(y), name="b"), 0.02)
    return n.op("Add", n.op("Mul", other, n.fake(n.op("Sigmoid", y), 0.004, None, np.uint8)), y)


def float_gate(n: QNet, y: Value) -> Value:
    return n.op("Mul", y, n.op("Sigmoid", y))


@pytest.mark.parametrize(
    "graph",
    [
        network(lambda n, y: n.op("Relu", y), used=True),
        network(lambda n, y: n.op("Relu", y), end=False),
        network(lambda n, y: n.op("Add", y, y)),
        network(computed),
        network(one_per_channel),
        network(mean),
        network(lambda n, y: n.op("Ceil", y)),
        network(silu, used=True),
        network(silu, end=False),
        network(gate_read_twice),
        network(gate_of_another),
        network(float_gate),
        network(lambda n, y: hard_swish(n, y, 0.2)),
    ],
    ids=[
        *("used", "no rounding", "of itself", "floats", "broadcast", "another shape", "no stage"),
        *("silu, used", "silu, no rounding", "gate read twice", "gate of another", "gate of floats", "another gate"),
    ],
)
def test_what_stays_after_it(graph: Graph) -> None:
    done, _ = folded(graph)
    (made,) = done.of_kind("QuantizedConv")
    assert "round" not in [s[0] for s in made.attrs.stages]
    assert made.outputs[0].type.dtype == np.int8
    within(graph, done, 0.0501)


def test_fp8_is_not_rounded_to_integers() -> None:
    n = QNet()
    x = n.fake(n.input(*SHAPE), 0.03, None, FP8)
    y = n.fake(n.qconv(x, 16, dtype=FP8), 0.04, None, FP8)
    done, _ = folded(n.done(n.fake(n.op("Relu", y), 0.05, None, FP8)))
    assert "round" not in [s[0] for s in done.of_kind("QuantizedConv")[0].attrs.stages]


def test_casts_to_half_in_between() -> None:
    def half(n: QNet, y: Value) -> Value:
        return n.op("Gelu", n.op("Cast", y, attrs=CastAttrs(FP16)))

    n = QNet()
    y = n.fake(n.qconv(n.fake(n.input(*SHAPE), 0.03), 16), 0.04)
    z = n.op("Cast", half(n, y), attrs=CastAttrs(np.dtype(np.float32)))
    graph = n.done(n.fake(z, 0.05))
    done, _ = folded(graph)
    assert "gelu" in [s[0] for s in done.of_kind("QuantizedConv")[0].attrs.stages]
    within(graph, done, 0.0501)


@needs_compiler
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize(
    ("after", "product"),
    [(lambda n, y: n.op("Relu", shortcut(n, y)), "conv"), (silu, "conv"), (hard_swish, "conv"), (numbers, "matmul")],
    ids=["add", "silu", "hard swish", "numbers"],
)
def test_the_launch_on_the_processor(
    after: Callable[[QNet, Value], Value], product: str, target: str, tmp_path: Any
) -> None:
    graph = network(after, product=product)
    _, program = calibrated(graph, "fp16", target)
    assert [k.template for k in program.kernels]
    compare_steps(program, feeds_of(graph), 1e-3, tmp_path)
