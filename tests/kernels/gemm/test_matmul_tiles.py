"""Large products of computed fp32 operands run in tiles: the choice, compilation, and results on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.net import Net, built
from support.on_gpu import checked_launches
from support.simulated import lowered

from optdnn.ir.graph import Value
from optdnn.kernels.gemm import tiles
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.program import Kernel, Program


def together(n: Net) -> Value:
    return n.op("Relu", n.op("MatMul", n.input(3, 200, 136, name="a"), n.input(3, 136, 132, name="b")))


def across(n: Net) -> Value:
    right = n.op("Transpose", n.input(3, 129, 135, name="b"), attrs=TransposeAttrs((0, 2, 1)))
    return n.op("Add", n.op("MatMul", n.input(3, 199, 135, name="a"), right), n.input(129, name="r"))


def broadcast(n: Net) -> Value:
    return n.op("MatMul", n.input(2, 3, 96, 160, name="a"), n.input(160, 96, name="b"))


def in_reverse(n: Net) -> Value:
    """Rows of the left operand and columns of the right one from the last to the first."""
    left, right = (
        n.op("Slice", n.input(3, 200, 136, name=name), n.ints(-1), n.ints(-201), n.ints(1), n.ints(-1)) for name in "ab"
    )
    return n.op("MatMul", left, n.op("Transpose", right, attrs=TransposeAttrs((0, 2, 1))))


def turned(n: Net) -> Value:
    """Neighboring rows of the left operand are contiguous, as those of queries of attention between channels."""
    left = n.op("Transpose", n.input(3, 140, 196, name="a"), attrs=TransposeAttrs((0, 2, 1)))
    return n.op("MatMul", left, n.input(3, 140, 132, name="b"))


def turned_odd(n: Net) -> Value:
    """The same with rows that begin at odd places."""
    left = n.op("Transpose", n.input(3, 140, 197, name="a"), attrs=TransposeAttrs((0, 2, 1)))
    return n.op("MatMul", left, n.input(3, 140, 132, name="b"))


NETS: dict[str, Callable[[Net], Value]] = {
    "together": together, "across": across, "broadcast": broadcast, "in reverse": in_reverse,
    "turned": turned, "turned, odd": turned_odd,
}  # fmt: skip


def kernels(program: Program) -> list[Kernel]:
    return [k for k in program.kernels if k.function == "matmul"]


@pytest.fixture
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles run products whose blocks do not occupy the GPU, too."""
    monkeypatch.setattr(tiles, "FEWEST", 0)


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("name", NETS)
@pytest.mark.nvrtc
def test_large_products_run_in_tiles_that_compile_without_spills(name: str) -> None:
    (kernel,) = kernels(lowered(built(NETS[name]), "fp32", target="cuda:sm_80"))
    assert kernel.template == "matmul_fp32.cu"
    assert f"#define COLUMNS_TOGETHER {int(name not in ('across', 'in reverse'))}" in kernel.generated["generated.cuh"]
    assert f"#define ROWS_TOGETHER {int(name == 'turned')}" in kernel.generated["generated.cuh"]
    assert nvrtc.resources(recipe_of(kernel))["matmul"].spill_bytes == 0


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("options", [{"row_invariant": True}, {"precision": "fp64"}, {"rows": 20}, {"depth": 8}])
def test_others_run_on_the_plain_kernel(options: dict[str, Any]) -> None:
    n = Net()
    dtype = options.get("precision", "fp32").replace("fp", "float")
    rows, depth = options.get("rows", 200), options.get("depth", 160)
    y = n.op("MatMul", n.input(3, rows, depth, name="a", dtype=dtype), n.input(3, depth, 132, name="b", dtype=dtype))
    more = {k: v for k, v in options.items() if k == "row_invariant"}
    (kernel,) = kernels(lowered(n.done(y), "fp32", **more))
    assert kernel.template == "general.cu"


@pytest.mark.parametrize(
    ("precision", "sizes", "template"),
    [
        ("fp32", (98, 128, 40, 128), "general.cu"),
        ("fp32", (99, 128, 40, 128), "matmul_fp32.cu"),
        ("tf32", (255, 32, 32, 16), "general.cu"),
        ("tf32", (256, 32, 32, 16), "matmul_mma.cu"),
    ],
)
def test_products_that_are_too_small_for_tiles(precision: str, sizes: tuple[int, ...], template: str) -> None:
    """fp32: 99 matrices of four tiles of 64 threads are 192 threads for each of 132 multiprocessors. tf32: 4 million multiply-adds."""
    count, rows, depth, columns = sizes
    n = Net()
    y = n.op("MatMul", n.input(count, rows, depth, name="a"), n.input(count, depth, columns, name="b"))
    (kernel,) = kernels(lowered(n.done(y), precision, target="cuda:h200", no_cubins=True))
    assert kernel.template == template


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.hopper
@pytest.mark.parametrize("name", NETS)
def test_tiles_on_a_gpu_agree_with_their_meaning(name: str) -> None:
    graph = built(NETS[name])
    checked_launches(graph, "fp32", 2e-6)
