"""Networks whose data are quantized with their range in each run (ONNX Runtime's dynamic quantization)."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.covering import covering
from support.net import Net, built
from support.on_gpu import checked_launches
from support.simulated import check_simulated, kinds, lowered, refusals, tactics

from optdnn.errors import InternalError, ShapeError
from optdnn.ir.graph import Graph, Value
from optdnn.kernels.conv import hopper_launch, implicit_gemm, patch_kernel
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.ops.quant import IntegerConvAttrs
from optdnn.ops.quantized import RequantizeAttrs
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.dynamic_quantization import DynamicQuantization
from optdnn.passes.support.precision_report import PrecisionLog
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.types import FP32


def scaled(n: Net, kind: str, x: Value, weights: Any, zero: int, **more: Any) -> Value:
    """A dynamic product in the form of ONNX Runtime's tools: ``Cast(kind(q, w, p, zero)) * (s * scale)``."""
    q, s, p = n.op("DynamicQuantizeLinear", x, outputs=3)
    dtype = weights.dtype
    total = n.op(kind, q, n.const(weights, dtype), p, n.const(np.array(zero, dtype), dtype), **more)
    return n.op("Mul", n.op("Cast", total), n.op("Mul", s, 0.01))


def drawn(n: Net, *shape: int, dtype: Any = np.int8) -> Any:
    info = np.iinfo(dtype)
    return n.rng.integers(info.min, info.max, shape, endpoint=True).astype(dtype)


def rows(n: Net) -> Value:
    x = n.op("Relu", n.op("Add", scaled(n, "MatMulInteger", n.input(3, 20, 64), drawn(n, 64, 96), 0), n.random(96)))
    return scaled(n, "MatMulInteger", x, drawn(n, 96, 40, dtype=np.uint8), 121)


def image(n: Net) -> Value:
    padded, plain = IntegerConvAttrs((2, 2), (1, 1, 1, 1), (1, 1)), IntegerConvAttrs((1, 1), (0, 0, 0, 0), (1, 1))
    x = scaled(n, "ConvInteger", n.input(2, 16, 12, 10), drawn(n, 32, 16, 3, 3), 0, attrs=padded)
    return scaled(n, "ConvInteger", n.op("Relu", x), drawn(n, 24, 32, 1, 1, dtype=np.uint8), 130, attrs=plain)


NETS = {"rows": rows, "image": image}


def network(name: str) -> Graph:
    return built(NETS[name])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", NETS)
def test_their_products_run_on_tensor_cores(name: str, precision: str) -> None:
    found = kinds(check_simulated(network(name), precision, tolerance=2e-2 if precision == "fp16" else 2e-6))
    assert found.count("QuantizedConv") == 2  # a product is a 1 x 1 convolution; the second one also adds up the data
    assert not {"MatMulInteger", "ConvInteger"} & set(found)


@pytest.mark.hopper
@pytest.mark.parametrize("name", NETS)
def test_launches_on_a_gpu_agree_with_their_meaning(name: str) -> None:
    graph = network(name)
    checked_launches(graph, "fp32", 1e-5)


@pytest.mark.nvrtc
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_products_compile_without_spills(target: str) -> None:
    made = {}
    for name, precision in itertools.product(NETS, ["fp32", "fp16"]):
        program = lowered(network(name), precision, target=target)
        found = [k for k in program.kernels if "DYNAMIC 1" in k.generated["generated.cuh"]]
        assert found, "a product reads the scale of its data"
        made |= {f"{name}, {precision}, {k}": recipe_of(kernel) for k, kernel in enumerate(found)}
    for name in covering(made):
        assert all(kernel.spill_bytes == 0 for kernel in nvrtc.resources(made[name]).values()), name


@pytest.mark.nvrtc
@pytest.mark.parametrize("out", ["float16", "float32", "int8"])
def test_tiles_compile_without_spills(out: str) -> None:
    """The largest tiles with room for their sums, and those that share K."""
    sources = (Source(14, 14, 256, (3, 3), padding=(1, 1, 1, 1)),)
    problem = Problem(8, 256, sources, (("bias",), ("relu",)), "uint8", out, dynamic=True)
    offers = hopper_launch.ranked(problem, of_arch("sm_90a"))
    largest = sorted(
        {o.config for o in offers}, key=lambda c: (-math.prod(c.tile), str(c)) if isinstance(c, Config) else (0, str(c))
    )
    for config in (
        *largest[:2],
        *[o.config for o in offers if isinstance(o.config, Config) and o.config.split > 1][:1],
        offers[0].config,
    ):
        family = patch_kernel if isinstance(config, patch_kernel.PatchConfig) else implicit_gemm
        recipe = family.recipe(problem, config, "sm_90a")
        assert nvrtc.resources(recipe)[family.FUNCTION].spill_bytes == 0, str(config)


def test_large_tiles_leave_room_for_the_terms_of_a_zero_point() -> None:
    problem = Problem(8, 256, (Source(14, 14, 256, (5, 5)),), (("bias",),), "uint8", "float32")
    config = Config.read("2x1m1n224s2k16b1")
    assert config is not None
    assert implicit_gemm.refuse(problem, config) is None
    assert "exceed" in (implicit_gemm.refuse(replace(problem, dynamic=True), config) or "")


def test_only_integers_have_such_scales() -> None:
    with pytest.raises(InternalError, match="only 8-bit integers without scales per row have a computed scale"):
        Problem(8, 256, (Source(14, 14, 256),), (("bias",),), "float16", dynamic=True)


@pytest.mark.parametrize(("slot", "shape", "dtype"), [(5, (3,), np.float32), (5, (), np.float16), (6, (), np.int8)])
def test_the_scale_and_the_zero_point_are_one_number_each(slot: int, shape: tuple[int, ...], dtype: Any) -> None:
    n = Net()
    x, w, channel = n.input(3, 32, dtype=np.uint8), n.const(np.ones((16, 32)), np.int8), n.const(np.ones((16, 3)))
    operands = [x, w, channel, None, None, n.input(name="s"), n.input(name="z", dtype=np.uint8)]
    operands[slot] = n.input(*shape, name="other", dtype=dtype)
    with pytest.raises(ShapeError, match=f"operand {slot} is .*; it must be one number"):
        n.op("QuantizedMatMul", *operands, attrs=RequantizeAttrs(output_dtype=FP32))


def test_depthwise_kernels_refuse_them() -> None:
    n = Net()
    attrs = IntegerConvAttrs((1, 1), (0, 0, 0, 0), (1, 1), 32)
    y = scaled(n, "ConvInteger", n.input(2, 32, 12, 10), drawn(n, 32, 1, 3, 3), 0, attrs=attrs)
    program = lowered(n.done(y), "fp16")
    assert "the scale of its data is computed" in refusals(program, "depthwise_8bit")
    assert "conv_bands_sm90_8bit" in tactics(program)


def test_floats_between_products_are_no_hazard() -> None:
    """Their range is computed from floats."""
    log = PrecisionLog()
    graph = network("rows")
    for one in (DynamicQuantization(), AssignPrecision()):
        one(graph, PassContext(target="cuda:sm_90a", precision_log=log))
    assert graph.kinds()["MatMul"] == 1
    assert not log.hazards
