"""Products of any operands on tensor cores (``matmul_mma.cuh``): tiles, the kernels on emulated warps, and on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.covering import covering
from support.emulated import MatrixProducts
from support.host import needs_compiler
from support.net import Net, built
from support.on_gpu import checked_program
from support.on_processor import compare_steps
from support.simulated import feeds_of, lowered
from support.sweep import sweep, turns

from optdnn.ir.graph import Graph, Value
from optdnn.kernels.gemm import matmul
from optdnn.kernels.gemm.hopper_matmul import HopperMatMul
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.program import Kernel, Program

TOLERANCE = {"fp16": 1.2e-3, "bf16": 9e-3, "tf32": 2e-3}


def turned(n: Net, x: Value) -> Value:
    rank = len(n.dims(x))
    return n.op("Transpose", x, attrs=TransposeAttrs((*range(rank - 2), rank - 1, rank - 2)))


def part(n: Net, *shape: int, begin: int) -> Value:
    """The last columns of an input: its rows are not padded for the product."""
    x = n.input(*shape[:-1], begin + shape[-1], name="a")
    return n.op("Slice", x, n.ints(begin), n.ints(begin + shape[-1]), n.ints(len(shape) - 1))


def rows(n: Net) -> Value:
    return n.op("MatMul", n.input(3, 70, 40, name="a"), n.input(3, 40, 72, name="b"))


def both_turned(n: Net) -> Value:
    return n.op("MatMul", turned(n, n.input(40, 72, name="a")), turned(n, n.input(70, 40, name="b")))


def odd_sizes(n: Net) -> Value:
    return n.op("MatMul", part(n, 2, 33, 37, begin=2), n.input(2, 37, 31, name="b"))


def odd_and_turned(n: Net) -> Value:
    return n.op("MatMul", turned(n, part(n, 37, 33, begin=2)), turned(n, n.input(31, 37, name="b")))


def one_matrix_for_all(n: Net) -> Value:
    x = n.op("MatMul", n.input(2, 3, 20, 64, name="a"), n.input(64, 24, name="b"))
    return n.op("Relu", n.op("Add", x, n.input(24, name="r")))


def many_columns(n: Net) -> Value:
    return n.op("MatMul", n.input(40, 136, 16, name="a"), n.input(40, 16, 300, name="b"))


def even_sizes(n: Net) -> Value:
    return n.op("MatMul", part(n, 3, 34, 38, begin=2), n.input(3, 38, 70, name="b"))


def apart(n: Net) -> Value:
    """Neither rows nor columns of the left operand are contiguous."""
    x = n.op("Transpose", n.input(20, 36, 3, name="a"), attrs=TransposeAttrs((2, 0, 1)))
    return n.op("MatMul", x, n.input(3, 36, 44, name="b"))


NETS: dict[str, Callable[[Net], Value]] = {
    f.__name__: f
    for f in (rows, both_turned, odd_sizes, odd_and_turned, one_matrix_for_all, many_columns, even_sizes, apart)
}
WAYS = {
    "rows": (1, 16, 0, 16), "both_turned": (0, 16, 1, 16), "odd_sizes": (1, 0, 0, 0), "odd_and_turned": (0, 0, 1, 0),
    "one_matrix_for_all": (1, 16, 0, 16), "many_columns": (1, 16, 0, 8), "even_sizes": (1, 4, 0, 4), "apart": (1, 0, 0, 8),
}  # fmt: skip
"""For the left and the right operand in 16 bits: whether it is contiguous along K, and the bytes of an access."""


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor cores run small products of tf32, too."""
    monkeypatch.setattr(matmul, "LEAST", 0)


def program_of(name: str, precision: str, target: str = "cuda:sm_80", **options: Any) -> tuple[Graph, Program]:
    graph = built(NETS[name])
    return graph, lowered(graph, precision, target=target, **options)


def kernel_of(program: Program) -> Kernel:
    (kernel,) = (k for k in program.kernels if k.function == "matmul")
    return kernel


@pytest.mark.parametrize("name", NETS)
def test_how_operands_come_to_shared_memory(name: str) -> None:
    text = kernel_of(program_of(name, "fp16", no_cubins=True)[1]).generated["generated.cuh"]
    found = [
        re.search(rf"#define {side}_{way} (\d+)", text) for side in ("LEFT", "RIGHT") for way in ("ALONG", "PIECE")
    ]
    assert [int(x[1]) for x in found if x] == list(WAYS[name])


@pytest.mark.parametrize(
    ("rows", "columns", "tile"),
    [(196, 48, (128, 64)), (48, 196, (64, 128)), (256, 256, (128, 128)), (196, 72, (128, 128)), (72, 160, (128, 64))],
)
def test_tiles_have_few_empty_rows_and_columns(rows: int, columns: int, tile: tuple[int, int]) -> None:
    n = Net()
    y = n.op("MatMul", n.input(300, rows, 64, name="a"), n.input(300, 64, columns, name="b"))
    text = kernel_of(lowered(n.done(y), "tf32", no_cubins=True)).generated["generated.cuh"]
    assert [f"#define BM {tile[0]}" in text, f"#define BN {tile[1]}" in text] == [True, True]


@needs_compiler
def test_operands_of_stages_are_loaded_before_results_are_stored(tmp_path: Path) -> None:
    n = Net()
    y = n.op("MatMul", n.input(8, 200, 64, name="a"), n.input(8, 64, 200, name="b"))
    y = n.op("Relu", n.op("Add", y, n.input(8, 200, 200, name="c")))
    (program, feeds) = (lowered(n.done(y), "tf32", no_cubins=True), feeds_of(n.graph))
    text = kernel_of(program).generated["generated.cuh"]
    assert text.index("v2_of[u] = ") < text.index("const float v2 = v2_of[u];") < text.index("p.y[")
    assert compare_steps(program, feeds, TOLERANCE["tf32"], tmp_path, MatrixProducts) == 1


@needs_compiler
@pytest.mark.parametrize(
    ("name", "precision"),
    sweep(
        [*turns(NETS, "fp16", "bf16"), *((n, "tf32") for n in NETS)],
        *(("rows", "fp16"), ("both_turned", "tf32"), ("odd_and_turned", "bf16")),
    ),
)
def test_kernels_on_a_processor(name: str, precision: str, tmp_path: Path) -> None:
    graph, program = program_of(name, precision, no_cubins=True)
    assert kernel_of(program).template == "matmul_mma.cu"
    assert compare_steps(program, feeds_of(graph), TOLERANCE[precision], tmp_path, MatrixProducts) == 1


@pytest.mark.nvrtc
@pytest.mark.parametrize("precision", TOLERANCE)
def test_kernels_compile_without_spills(precision: str) -> None:
    made = {name: recipe_of(kernel_of(program_of(name, precision, no_cubins=True)[1])) for name in NETS}
    for name in covering(made):
        assert nvrtc.resources(made[name])["matmul"].spill_bytes == 0, name


def test_a_row_has_the_same_sums_in_every_batch() -> None:
    """Every tile adds up along K in the same order, so ``row_invariant`` needs no other kernel."""
    for count in (1, 3, 400):
        n = Net()
        y = n.op("MatMul", n.input(count, 64, 256, name="a"), n.input(256, 96, name="b"))
        kernel = kernel_of(lowered(n.done(y), "fp16", target="cuda:sm_80", row_invariant=True))
        assert kernel.template == "matmul_mma.cu"


@pytest.mark.parametrize(("precision", "template"), [("fp32", "general.cu"), ("fp16", "matmul_mma.cu")])
def test_true_fp32_stays(precision: str, template: str) -> None:
    assert kernel_of(program_of("odd_sizes", precision, no_cubins=True)[1]).template == template


@pytest.mark.hopper
@pytest.mark.parametrize(("name", "precision"), [(n, p) for n in NETS for p in TOLERANCE])
def test_kernels_on_a_gpu(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HopperMatMul, "refuse", lambda *_: "left out here")
    graph, program = program_of(name, precision, "cuda:sm_90a")
    assert kernel_of(program).template == "matmul_mma.cu"
    checked_program(program, feeds_of(graph), TOLERANCE[precision])
