"""Sliding windows: the elements under several taps are loaded before the first of them is added."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels.generated_cases import mixed
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_launches
from support.on_processor import compare_steps
from support.quantized_nets import QNet
from support.simulated import check_simulated, feeds_of, kinds, lowered

from optdnn.ir.graph import Graph
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.fused import PointwiseAttrs
from optdnn.ops.pool import AveragePoolAttrs, LpPoolAttrs, MaxPoolAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.program import Program
from optdnn.types import FP16, FP32


def text_of(program: Program) -> str:
    (text,) = (text for k in program.kernels for text in k.generated.values() if " window(" in text)
    return text


@pytest.mark.parametrize(("kernel", "loads"), [(3, [9]), (5, [5] * 5), (7, [7] * 7)])
def test_loads_are_together(kernel: int, loads: list[int]) -> None:
    n = Net()
    program = check_simulated(
        n.done(n.average_pool(n.op("Relu", n.input(2, 16, 12, 11)), kernel, pads=kernel // 2)), "fp16"
    )
    text = text_of(program)
    found = re.findall(r" v\d+\(|\} v\d+;|if \(od", text)
    runs = "".join("a" if "if" in x else "l" for x in found)
    assert [len(run) for run in re.findall("l+", runs)] == loads
    assert "continue" not in text


@pytest.mark.parametrize("kernel", [8, 10])
def test_many_taps_are_a_loop(kernel: int) -> None:
    """More lines than those of 49 taps would not be faster."""
    n = Net()
    program = check_simulated(n.done(n.max_pool(n.op("Tanh", n.input(1, 16, 12, 12)), kernel, strides=1)), "fp16")
    assert "continue" in text_of(program)


@pytest.mark.parametrize("kind", ["AveragePool", "MaxPool"])
def test_threads_share_a_large_window(kind: str) -> None:
    """No copy is needed, and one thread per window would take 20 times as long."""
    n = Net()
    x = n.conv(n.input(1, 16, 96, 96), 16, 3, pads=1)
    pool = (n.average_pool if kind == "AveragePool" else n.max_pool)(x, 32, strides=32)
    program = check_simulated(n.done(n.conv(pool, 16)), "fp16")
    assert ("reduce", kind) in {(s.params["tactic"], s.params["op"]["kind"]) for s in program.steps}
    names = kinds(program)
    assert names[names.index(kind) - 1].endswith("Conv")
    assert names[names.index(kind) + 1] == "Conv"


LONG = {
    "segments": ("AveragePool", (100,), {"strides": (100,), "ceil_mode": True}),  # CAM++: the mean of each second
    "counted": ("AveragePool", (60,), {"strides": (7,), "pads": (20, 20), "count_include_pad": True}),
    "plane": ("MaxPool", (9, 8), {"strides": (2, 3), "pads": (4, 2, 4, 2)}),
    "powers": ("LpPool", (9, 9), {"strides": (5, 5)}),
}


@needs_compiler
@pytest.mark.parametrize("channels", [16, 5])
@pytest.mark.parametrize("name", LONG)
def test_a_warp_shares_the_taps_of_a_long_window(name: str, channels: int, tmp_path: Path) -> None:
    kind, kernel, options = LONG[name]
    made = {"AveragePool": AveragePoolAttrs, "MaxPool": MaxPoolAttrs, "LpPool": LpPoolAttrs}[kind]
    n, size = Net(), (149,) if len(kernel) == 1 else (21, 19)
    given = {"pads": (0,) * (2 * len(size)), "dilations": (1,) * len(size), **options}
    attrs = made(kernel_shape=kernel, **given)
    graph = n.done(n.op(kind, n.conv(n.input(1, 8, *size), channels, (1,) * len(size), pads=0), attrs=attrs))
    program = lowered(graph, "fp16", target="cuda:sm_90a")
    assert "__shfl_xor_sync" in text_of(program)
    assert compare_steps(program, feeds_of(graph), 1e-3, tmp_path) >= 1


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16, np.float32])
def test_a_shared_window_of_any_type_compiles(dtype: Any) -> None:
    """The shuffle of an 8-bit integer gives an int."""
    n = Net()
    attrs = MaxPoolAttrs(kernel_shape=(8, 8), pads=(0,) * 4, dilations=(1, 1), strides=(8, 8))
    program = lowered(
        n.done(n.op("MaxPool", n.input(1, 5, 16, 16, dtype=dtype), attrs=attrs)), "fp32", target="cuda:sm_90a"
    )
    (kernel,) = [k for k in program.kernels if "__shfl_xor_sync" in k.generated["generated.cuh"]]
    nvrtc.resources(recipe_of(kernel))


def test_many_results_have_a_thread_each() -> None:
    n = Net()
    program = lowered(n.done(n.max_pool(n.op("Tanh", n.input(4, 16, 60, 60)), 8, strides=1)), "fp16")
    assert "__shfl_xor_sync" not in text_of(program)


def mixing(*, last: bool = True) -> Graph:
    """Token mixing of an image, with or without a convolution before it."""
    n = Net()
    x = n.input(2, 8, 9, 7)
    return n.done(n.conv(mixed(n, n.conv(x, 8)), 8) if last else mixed(n, n.op("Relu", x)))


def test_a_pool_includes_the_pointwise_operator_after_it() -> None:
    program = check_simulated(mixing(), "fp16")
    assert "window_pool_staged" in {t["tactic"] for t in program.meta["tactics"]}  # type: ignore[union-attr,index,call-overload]
    names = kinds(program)
    assert names[names.index("AveragePool") + 1] == "Conv"
    found = re.findall(r"Pack<f16, \d> [qv]\d", text_of(program))
    assert found[2:] == [f"Pack<f16, 8> v{k}" for k in range(9)]  # the operands are loaded together with the first taps
    assert found[:2] == ["Pack<f16, 8> q1", "Pack<f16, 8> q2"]


def test_operands_in_another_order_are_read_one_by_one() -> None:
    program = check_simulated(mixing(last=False), "fp16")
    assert "AveragePool" in kinds(program)
    assert "q1" not in text_of(program)


@needs_compiler
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_the_staged_pool_on_the_processor(precision: str, tmp_path: Path) -> None:
    program = lowered(mixing(), precision)
    assert compare_steps(program, feeds_of(mixing()), {"fp32": 3e-6, "fp16": 2e-3, "bf16": 1.6e-2}[precision], tmp_path)


def sixteen_bits(kind: str) -> Graph:
    """A pool of 16-bit quantized values, between two convolutions."""
    n = QNet()
    x = n.fake(n.op("Relu", n.qconv(n.input(2, 8, 9, 7), 8)), 2e-4, 0, np.uint16)
    return n.done(
        n.qconv(n.fake((n.average_pool if kind == "AveragePool" else n.max_pool)(x, 3), 3e-4, 0, np.uint16), 8)
    )


@pytest.mark.parametrize("kind", ["AveragePool", "MaxPool"])
def test_a_pool_includes_16_bit_quantization_of_its_result(kind: str) -> None:
    """Its constants are fp32, as are the values between its casts."""
    program = check_simulated(sixteen_bits(kind), "fp16")
    assert "window_pool_staged" in {t["tactic"] for t in program.meta["tactics"]}  # type: ignore[union-attr,index,call-overload]


@needs_compiler
@pytest.mark.parametrize("kind", ["AveragePool", "MaxPool"])
def test_16_bit_quantization_on_the_processor(kind: str, tmp_path: Path) -> None:
    graph = sixteen_bits(kind)
    assert compare_steps(lowered(graph, "fp16"), feeds_of(graph), 2e-3, tmp_path)


def eight_bits(kind: str, zero: int = 0, *, stored: bool = True, dtype: Any = np.int8) -> Graph:
    """A pool between a convolution and 8-bit values. ``stored``: its operand has 8 bits, and another convolution reads it
    (ResNet-D)."""
    n = QNet()
    x = n.op("Relu", n.qconv(n.fake(n.input(2, 8, 9, 7), 0.03), 16))
    x = n.fake(x, 0.02, zero, dtype) if stored else x
    attrs = {"AveragePool": AveragePoolAttrs, "LpPool": LpPoolAttrs, "MaxPool": MaxPoolAttrs}[kind]
    y = n.op(kind, x, attrs=attrs((3, 3), (2, 2), (1, 1, 1, 1), (1, 1)))
    return n.done(n.qconv(n.fake(y, 0.06 if kind == "LpPool" else 0.015, zero, dtype), 8), n.qconv(x, 8))


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("kind", ["AveragePool", "LpPool", "MaxPool"])
def test_a_pool_before_8_bit_values_is_one_launch(kind: str, stored: bool, precision: str) -> None:
    """It stores 8 bits. If its operand is stored in 8 bits, it reads them."""
    program = check_simulated(eight_bits(kind, stored=stored), precision)
    if kind == "MaxPool" and stored:
        return  # it compares integers
    (step,) = (s for s in program.steps if s.params.get("op", {}).get("kind") == kind)
    assert step.params["tactic"] == "window_pool_staged"
    assert ("const i8* x;" in text_of(program)) == stored
    assert "i8* y;" in text_of(program)


def test_integers_that_two_pools_read_are_dequantized_once() -> None:
    """Their launch is there anyway: the pools read its floats."""
    n = QNet()
    x = n.fake(n.qconv(n.fake(n.input(2, 8, 9, 7), 0.03), 16), 0.02)
    pools = [n.average_pool(x, k, strides=1, pads=k // 2) for k in (3, 5)]
    program = check_simulated(n.done(n.qconv(x, 8), *(n.qconv(n.fake(p, 0.01), 8) for p in pools)), "fp16")
    assert kinds(program).count("AveragePool") == 2
    assert "i8* x;" not in "".join(t for k in program.kernels for t in k.generated.values() if " window(" in t)


@needs_compiler
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize(("zero", "dtype"), [(0, np.int8), (-7, np.int8), (130, np.uint8)])
@pytest.mark.parametrize("stored", [True, False])
def test_8_bit_pools_on_the_processor(stored: bool, zero: int, dtype: Any, precision: str, tmp_path: Path) -> None:
    """All bits are those of the meaning."""
    graph = eight_bits("AveragePool", zero, stored=stored, dtype=dtype)
    assert compare_steps(lowered(graph, precision), feeds_of(graph), 1e-3, tmp_path)


def peaks(*, pooled_first: bool = True, last: bool = False) -> Graph:
    """The peaks of a heat map: its elements that equal the largest one around them (CenterNet). ``last``: with a convolution after it."""
    n = Net()
    heat = n.op("Sigmoid", n.conv(n.input(2, 8, 9, 7), 8))
    pooled = n.max_pool(heat, 3, strides=1, pads=1)
    same = n.op("Equal", *((pooled, heat) if pooled_first else (heat, pooled)))
    y = n.op("Mul", heat, n.op("Cast", same, attrs=CastAttrs(to=FP32)))
    return n.done(n.conv(y, 8) if last else y)


@pytest.mark.parametrize("pooled_first", [True, False])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_peaks_are_found_by_the_launch_of_their_pool(pooled_first: bool, last: bool, precision: str) -> None:
    """The launch also stores fp32, if the peaks are the network's output."""
    program = check_simulated(peaks(pooled_first=pooled_first, last=last), precision)
    names = kinds(program)
    assert names.count("MaxPool") == 1
    assert names[names.index("MaxPool") + 1 :][:1] == (["Conv"] if last else [])
    assert "window_pool_staged" in {t["tactic"] for t in program.meta["tactics"]}  # type: ignore[union-attr,index,call-overload]


def test_a_pool_in_16_bits_before_operands_in_fp32() -> None:
    """A stage may read operands alone. They have one type, also where it is not the pool's."""
    n = Net()
    pooled = n.max_pool(n.op("Cast", n.input(1, 8, 9, 9), attrs=CastAttrs(to=FP16)), 3, strides=1, pads=1)
    stages = (
        Stage("Cast", (-1,), CastAttrs(to=FP32)), Stage("Equal", (1, -2)), Stage("Greater", (1, 2)), Stage("And", (-3, -4)),
        Stage("Where", (-5, 1, 3)),
    )  # fmt: skip
    operands = [n.input(1, 8, 9, 9, name="z"), n.const(np.float32(0.5)), n.input(1, 8, 9, 9, name="w")]
    y = n.op("Pointwise", pooled, *operands, attrs=PointwiseAttrs(epilogue=stages))
    program = check_simulated(n.done(y), "fp32")
    assert "window_pool_staged" in {t["tactic"] for t in program.meta["tactics"]}  # type: ignore[union-attr,index,call-overload]


def test_a_pool_stores_fp32_at_once() -> None:
    n = Net()
    program = check_simulated(n.done(n.max_pool(n.conv(n.input(1, 16, 12, 12), 16), 5, strides=1, pads=2)), "fp16")
    assert kinds(program)[-1] == "MaxPool"


@needs_compiler
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("pooled_first", [True, False])
def test_peaks_on_the_processor(precision: str, pooled_first: bool, tmp_path: Path) -> None:
    graph = peaks(pooled_first=pooled_first)
    assert compare_steps(lowered(graph, precision), feeds_of(graph), {"fp32": 3e-6, "fp16": 2e-3}[precision], tmp_path)


def another(kind: str) -> Graph:
    """A pool whose launch includes no pointwise operator."""
    n = Net()
    x = n.op("Relu", n.input(2, 8, 9, 3 if kind == "broadcast" else 9))
    y = n.op("GlobalAveragePool", x) if kind == "global" else n.average_pool(x)
    stages = (Stage("Mul", (-1, 1)), Stage("Add", (-2, 1)))
    z = n.op("Pointwise", y, n.input(2, 8, 4, 4, name="z"), attrs=PointwiseAttrs(epilogue=stages))
    return n.done(n.op("Softmax", z), *([n.op("Exp", y)] if kind == "kept" else []))


@pytest.mark.parametrize(
    ("kind", "because"),
    [
        ("global", "none of its operands is a pool"),
        ("kept", "the pool's own result is read elsewhere"),
        ("broadcast", "it changes the shape of the pool's result, or does not compute floats"),
    ],
)
def test_operators_that_stay_after_a_pool(kind: str, because: str) -> None:
    tactics = check_simulated(another(kind), "fp16").meta["tactics"]
    found = [r["reason"] for t in tactics for r in t.get("refused", ()) if r["tactic"] == "window_pool_staged"]  # type: ignore[union-attr]
    assert because in found


@pytest.mark.hopper
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("make", [mixing, peaks])
def test_the_staged_pool_agrees_with_its_meaning(make: Callable[..., Graph], last: bool) -> None:
    checked_launches(make(last=last), "fp16")
