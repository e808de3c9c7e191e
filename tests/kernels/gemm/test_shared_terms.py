"""Products of long rows with few results: blocks share the terms, and a second launch adds the sums of the parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.host import needs_compiler
from support.net import Net, built
from support.on_gpu import checked_launches
from support.on_processor import compare_graph
from support.simulated import check_simulated, lowered

from optdnn.ir.graph import Value
from optdnn.kernels.gemm import terms
from optdnn.kernels.gemm.tiles import MatrixTile, Tile, Way
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.program import Program

HOPPER = of_arch("sm_90a")


def channels(n: Net) -> Value:
    """Scores of 16 channels over 3,136 tokens, whose channels are contiguous."""
    q, k = (n.op("Transpose", n.input(2, 3136, 16, name=name), attrs=TransposeAttrs((0, 2, 1))) for name in "qk")
    return n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 2, 1))))


def tokens(n: Net) -> Value:
    """The same for 8 channels of two heads over 3,137 tokens (CoaT): the products of equal parts are thin, and a term is left over."""
    q, k = (n.op("Transpose", n.input(2, 3137, 8, name=name), attrs=TransposeAttrs((0, 2, 1))) for name in "qk")
    return n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 2, 1))))


def left_over(n: Net) -> Value:
    """A product of a prime number of terms, with a scale, a residual and an activation after it."""
    y = n.op("MatMul", n.input(3, 20, 1009, name="a"), n.input(1009, 24, name="b"))
    y = n.op("Add", n.op("Mul", y, n.const(0.5)), n.input(3, 20, 24, name="r"))
    return n.op("Relu", y)


def staged(n: Net) -> Value:
    """A product of a shared matrix, with a scale, a residual and an activation after it."""
    y = n.op("MatMul", n.input(3, 20, 1000, name="a"), n.input(1000, 24, name="b"))
    y = n.op("Add", n.op("Mul", y, n.const(0.5)), n.input(3, 20, 24, name="r"))
    return n.op("Relu", y)


def gemm(n: Net) -> Value:
    return n.op(
        "Gemm", n.input(512, 40, name="a"), n.input(40, 512, name="b"), n.input(40, name="c"),
        attrs=GemmAttrs(transA=True, transB=True),
    )  # fmt: skip


NETS: dict[str, Callable[[Net], Value]] = {"channels": channels, "staged": staged, "gemm": gemm}
ODD: dict[str, Callable[[Net], Value]] = {"tokens": tokens, "left over": left_over}


def products(program: Program) -> list[str]:
    """The functions of the launches, without those that only copy."""
    return [program.kernels[s.params["launch"]["kernel"]].function for s in program.steps]


def program_of(make: Callable[[Net], Value], precision: str = "fp32", **options: Any) -> Program:
    return lowered(built(make), precision, **options)


@pytest.mark.parametrize("name", NETS)
def test_two_launches_share_the_terms(name: str) -> None:
    found = products(program_of(NETS[name]))
    assert found[-2] == "matmul"
    assert found.count("matmul") == 1
    assert products(program_of(NETS[name], row_invariant=True)).count("matmul") == 1
    assert len(products(program_of(NETS[name], row_invariant=True))) == len(found) - 1


@pytest.mark.parametrize("name", ODD)
def test_the_second_launch_multiplies_the_terms_that_are_left_over(name: str) -> None:
    program = check_simulated(built(ODD[name]), "fp32", tolerance=2e-6)
    assert products(program)[-2:] == ["matmul"] * 2
    assert products(program).count("matmul") == 2
    assert products(program_of(ODD[name], row_invariant=True)).count("matmul") == 1


@needs_compiler
@pytest.mark.parametrize("name", NETS | ODD)
def test_both_launches_on_a_processor_agree_with_their_meaning(name: str, tmp_path: Path) -> None:
    assert compare_graph(built((NETS | ODD)[name]), "fp32", tmp_path) >= 2


TRUE, MATRIX = Tile(64, 64, True), MatrixTile(64, 64, "tfloat32", Way(True, 16), Way(True, 16))


@pytest.mark.parametrize(
    ("k", "blocks", "tile", "parts"),
    [
        (3136, 24, None, 16), (3136, 24, TRUE, 16), (3136, 24, MATRIX, 16), (196, 32, None, 7), (196, 32, TRUE, 4),
        (196, 32, MATRIX, 1), (3136, 100, None, 4), (3136, 200, None, 1), (111, 1, None, 1), (3137, 1, None, 16), (1009, 1, None, 16),
    ],
)  # fmt: skip
def test_the_number_of_parts(k: int, blocks: int, tile: Any, parts: int) -> None:
    assert terms.parts_of(k, blocks, tile, HOPPER) == parts


def test_parts_shrink_with_the_gpu() -> None:
    assert terms.parts_of(3136, 24, None, replace(HOPPER, multiprocessors=24)) == 4


def vector(n: Net) -> Value:
    return n.op("MatMul", n.input(20, 1000, name="a"), n.input(1000, name="b"))


def scaled(n: Net) -> Value:
    return n.op("Gemm", n.input(20, 1000, name="a"), n.input(1000, 24, name="b"), attrs=GemmAttrs(alpha=0.5))


@pytest.mark.parametrize("make", [vector, scaled])
def test_one_launch_where_sums_cannot_be_added_later(make: Callable[[Net], Value]) -> None:
    assert products(program_of(make)) == ["matmul"]


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("name", NETS | ODD)
def test_both_launches_on_a_gpu_agree_with_their_meaning(name: str, precision: str) -> None:
    checked_launches(built((NETS | ODD)[name]), precision, 2e-6 if precision == "fp32" else 2e-3)
