"""Factors, shifts and slopes per column after a residual or an activation: part of the product's launch on Hopper."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.net import Net, built
from support.on_gpu import checked_program
from support.simulated import check_simulated, feeds_of, kinds, lowered, tactics
from support.spills import check_spills

from optdnn.ir.graph import Value
from optdnn.kernels.conv import implicit_gemm
from optdnn.kernels.conv.hopper_launch import ranked
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.ops.norm import LayerNormAttrs
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import of_arch


def affine(n: Net, x: Value, *, shift: bool = True) -> Value:
    y = n.op("Mul", x, n.random(64))
    return n.op("Add", y, n.random(64)) if shift else y


def unnormed(n: Net, rows: int = 24, *, shift: bool = True) -> Value:
    """Two residual layers with a factor and a shift in place of a norm (MobileBERT's NoNorm). Their sums have other readers."""
    x = n.op("Tanh", n.input(2, rows // 2, 64))
    for _ in range(2):
        x = affine(n, n.op("Add", n.op("Add", n.matmul(x, 64), n.random(64)), x), shift=shift)
    return n.op("Add", n.matmul(n.op("Relu", n.matmul(x, 64)), 64), x)


def one_row(n: Net) -> Value:
    return unnormed(n, 2)


def factors_alone(n: Net) -> Value:
    return unnormed(n, shift=False)


def activated(n: Net) -> Value:
    """A batch norm after an activation. Others read its result, so that no product takes it in."""
    x = n.op("Tanh", n.input(24, 64))
    y = affine(n, n.op("Relu", n.gemm(x, 64)))
    return n.op("Add", n.gemm(y, 64), y)


def with_slopes(n: Net) -> Value:
    x = n.op("Tanh", n.input(24, 64))
    y = n.op("PRelu", n.gemm(x, 64), n.random(64))
    return n.op("Add", n.gemm(y, 64), y)


def before_a_norm(n: Net) -> Value:
    """The launch also writes the moments of its rows, which the next product normalizes."""
    x = n.op("Tanh", n.input(96, 64))
    y = affine(n, n.op("Add", n.matmul(x, 64), x))
    z = n.op("LayerNormalization", y, n.random(64), n.random(64), attrs=LayerNormAttrs())
    return n.op("Add", n.matmul(n.op("Relu", n.matmul(z, 128)), 64), y)


def after_a_norm(n: Net) -> Value:
    """A product of normalized rows leaves the factors to a launch that normalizes nothing."""
    x = n.op("Tanh", n.input(96, 64))
    y = n.op("Add", n.matmul(x, 64), x)
    z = n.op("LayerNormalization", y, n.random(64), n.random(64), attrs=LayerNormAttrs())
    y = affine(n, n.op("Add", n.matmul(z, 64), y))
    return n.op("Add", n.matmul(y, 64), y)


NETS: tuple[Callable[[Net], Value], ...] = (
    unnormed, factors_alone, one_row, activated, with_slopes, before_a_norm, after_a_norm,
)  # fmt: skip
TOLERANCES = {"fp16": 1e-2, "bf16": 6e-2}


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("build", NETS, ids=lambda f: f.__name__)
def test_products_with_stages_per_column(build: Callable[[Net], Value], precision: str) -> None:
    check_simulated(built(build), precision, tolerance=TOLERANCES.get(precision))


@pytest.mark.parametrize("build", [unnormed, factors_alone, activated, with_slopes], ids=lambda f: f.__name__)
def test_no_launch_follows_the_product(build: Callable[[Net], Value]) -> None:
    program = lowered(built(build), "fp16")
    assert set(tactics(program, "MatMul", "Gemm")) == {"gemm_sm90"}
    assert kinds(program).count("Conv") == len(tactics(program, "MatMul", "Gemm"))
    assert kinds(program).count("Pointwise") == 2  # the input's Tanh, and the result as fp32


SOURCE = Source(1, 1, 128)
STAGES: tuple[tuple[render.Stage, ...], ...] = (
    (("bias",), ("add",), render.SCALE_SHIFT),
    (("bias",), ("relu",), ("affine",)),
    (("bias",), ("prelu",)),
)


@pytest.mark.nvrtc
@pytest.mark.parametrize("stages", STAGES, ids=str)
def test_the_kernels_compile_without_spills(stages: tuple[render.Stage, ...]) -> None:
    problem = Problem(384, 128, (SOURCE,), stages, "float16", "float16")
    offers = [o for o in ranked(problem, of_arch("sm_90a")) if isinstance(o.config, implicit_gemm.Config)]
    check_spills(implicit_gemm.recipe(problem, offers[0].config), implicit_gemm.FUNCTION)


@pytest.mark.hopper
@pytest.mark.parametrize("build", NETS, ids=lambda f: f.__name__)
def test_every_launch_agrees_with_its_meaning(build: Callable[[Net], Value]) -> None:
    graph = built(build)
    checked_program(lowered(graph, "fp16", target="cuda:sm_90a"), feeds_of(graph), 4e-3)
