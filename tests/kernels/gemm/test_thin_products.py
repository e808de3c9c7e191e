"""Products of few rows or columns, and products of very many matrices: threads that compute a few elements each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.host import needs_compiler
from support.net import Net, built
from support.on_gpu import checked_launches
from support.on_processor import compare_steps
from support.simulated import feeds_of, lowered, refusals, tactics

from optdnn.ir.graph import Graph, Value
from optdnn.kernels.builder import TensorView
from optdnn.kernels.gemm.thin import Share, is_thin, thin_parts
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.launches.plan import parse
from optdnn.runtime.program import Kernel, Program
from optdnn.types import FP32


def rows(n: Net) -> Value:
    """The queries of each pixel times its own lambda, which the heads share."""
    left = n.op("Transpose", n.input(2, 4, 1, 40, 64, name="a"), attrs=TransposeAttrs((0, 1, 4, 2, 3)))
    right = n.op("Transpose", n.input(2, 1, 64, 32, 40, name="b"), attrs=TransposeAttrs((0, 1, 2, 4, 3)))
    return n.op("Relu", n.op("Add", n.op("MatMul", left, right), n.input(32, name="r")))


def columns(n: Net) -> Value:
    return n.op("MatMul", n.input(3, 1100, 17, name="a"), n.input(3, 17, 5, name="b"))


def many(n: Net) -> Value:
    """More matrices than a grid has layers of tiles."""
    return n.op("MatMul", n.input(70000, 2, 3, name="a"), n.input(70000, 3, 9, name="b"))


def many_tiles(n: Net) -> Value:
    return n.op("MatMul", n.input(65600, 9, 2, name="a"), n.input(65600, 2, 10, name="b"))


def outlook(n: Net) -> Value:
    """VOLO's weights of 3 x 3 neighbors times their values, with a bias. A thread has all rows of a few columns."""
    product = n.op("MatMul", n.input(6, 800, 9, 9, name="a"), n.input(6, 800, 9, 30, name="b"))
    return n.op("Relu", n.op("Add", product, n.input(30, name="r")))


def tall(n: Net) -> Value:
    """A thread has all columns of a few rows; the second factor's columns do not lie together."""
    right = n.op("Transpose", n.input(4100, 7, 40, name="b"), attrs=TransposeAttrs((0, 2, 1)))
    return n.op("MatMul", n.input(4100, 33, 40, name="a"), right)


def filters(n: Net) -> Value:
    """ConvBERT's filter of each token times its window of nine tokens. The rows of the window begin at multiples of 16 bytes."""
    window = n.op("Slice", n.input(4100, 12, 16, name="a"), n.ints(0), n.ints(9), n.ints(2))
    return n.op("MatMul", window, n.input(4100, 9, 1, name="b"))


NETS: dict[str, Callable[[Net], Value]] = {
    "rows": rows, "columns": columns, "many": many, "many_tiles": many_tiles, "outlook": outlook, "tall": tall, "filters": filters,
}  # fmt: skip


def graph_of(name: str) -> Graph:
    return built(NETS[name])


def product(program: Program) -> Kernel:
    (kernel,) = (k for k in program.kernels if k.function == "matmul")
    return kernel


def is_on_threads(kernel: Kernel) -> bool:
    return any("p.matrices" in text for text in kernel.generated.values())


@pytest.mark.parametrize(("rows", "refused"), [(512, False), (513, True)])
def test_elements_that_threads_cannot_count_are_refused(rows: int, refused: bool) -> None:
    n = Net()
    graph = n.done(n.op("MatMul", n.input(1 << 17, rows, 2, name="a"), n.input(1 << 17, 2, 64, name="b")))
    program = lowered(graph, "fp32")
    reasons = refusals(program)
    assert ("131072 matrices with more than 4294967296 elements exceed a grid" in reasons) == refused


@pytest.mark.parametrize(
    ("name", "alone"), [("many", True), ("many_tiles", True), ("outlook", True), ("columns", False), ("tall", False)]
)
def test_very_many_small_products_fill_no_tiles_of_tensor_cores(name: str, alone: bool) -> None:
    """KBNet's kernels of each pixel: 1,179,648 products of 2 x 18 with 18 x 1."""
    program = lowered(graph_of(name), "fp16")
    assert any("tiles would be nearly empty" in why for why in refusals(program, "matmul_sm90")) == alone
    assert any(k.function == "matmul" and is_on_threads(k) for k in program.kernels) == alone


@needs_compiler
@pytest.mark.parametrize("name", NETS)
def test_threads_compute_shares_of_the_results(name: str, tmp_path: Path) -> None:
    graph = graph_of(name)
    program = lowered(graph, "fp32")
    assert is_on_threads(product(program))
    assert all(max(s.params["launch"]["grid"][1:]) <= 65535 for s in program.steps if s.params.get("launch"))
    assert compare_steps(program, feeds_of(graph), 2e-6, tmp_path) >= 1


def test_sums_do_not_depend_on_the_batch() -> None:
    """Both kernels add up in the same order. Engines whose rows do not depend on the batch may use either."""
    assert is_on_threads(product(lowered(graph_of("rows"), "fp32", row_invariant=True)))


@pytest.mark.parametrize(
    ("shape", "thin"),
    [((1, 64, 16, 16384), True), ((8, 8, 256, 128), True), ((9, 9, 16, 4096), True), ((9, 9, 16, 4095), False),
     ((16, 90, 64, 4096), True), ((9, 9, 65, 4096), False), ((17, 17, 9, 4096), False), ((1, 64, 257, 16384), False),
     ((1, 64, 16, 127), False)],
)  # fmt: skip
def test_which_products_are_thin(shape: tuple[int, int, int, int], thin: bool) -> None:
    assert is_thin(*shape) == thin


@pytest.mark.parametrize(
    ("sizes", "width", "share"),
    [((9, 32, 9, 50176), 8, Share(9, 8, True)), ((9, 32, 9, 50176), 4, Share(9, 8)), ((9, 32, 40, 50176), 8, Share(9, 4, True)),
     ((9, 30, 9, 4800), 2, Share(9, 2, True)), ((33, 7, 40, 4100), 1, Share(2, 7)), ((3137, 8, 8, 64), 8, Share(2, 8, True)),
     ((1, 64, 16, 4096), 1, Share(1, 4)), ((1, 64, 16, 100), 8, Share(1, 1)), ((20, 16, 16, 1 << 20), 16, Share(4, 16, True))],
)  # fmt: skip
def test_threads_take_more_results_while_enough_of_them_remain(
    sizes: tuple[int, int, int, int], width: int, share: Share
) -> None:
    assert Share.of(*sizes, width) == share
    m, n, _, matrices = sizes
    assert share.threads(m, n, matrices) >= min(1 << 16, m * n * matrices)


@pytest.mark.parametrize(
    ("sizes", "width", "share"),
    [((3137, 8, 8, 128), 4, Share(2, 4, True)), ((3137, 8, 8, 128), 1, Share(8, 1)), ((8, 3136, 8, 128), 4, Share(4, 2, True)),
     ((785, 15, 16, 64), 1, Share(8, 1)), ((8, 8, 241, 1664), 4, Share(1, 4, True)), ((8, 8, 241, 1664), 1, Share(1, 4)),
     ((1, 64, 16, 4096), 4, Share(1, 2, True)), ((1, 64, 16, 100), 4, Share(1, 1)), ((2000, 1, 16, 128), 1, Share(8, 1))],
)  # fmt: skip
def test_threads_of_fp32_take_a_few_rows_of_an_access(
    sizes: tuple[int, int, int, int], width: int, share: Share
) -> None:
    assert Share.wide(*sizes, width) == share


@pytest.mark.parametrize(
    ("shape", "thin"), [((785, 16, 16, 64), True), ((785, 17, 16, 64), False), ((785, 16, 17, 64), False)]
)
def test_which_products_of_fp32_are_thin(shape: tuple[int, int, int, int], thin: bool) -> None:
    assert is_thin(*shape, wide=True) == thin
    assert not is_thin(*shape)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((8, 8, 3137, 128), 13),
        ((8, 8, 256, 128), 0),
        ((8, 8, 5000, 128), 0),
        ((24, 24, 3137, 64), 0),
        ((8, 2000, 2000, 2), 0),
    ],
)
def test_long_products_have_thin_parts(shape: tuple[int, int, int, int], parts: int) -> None:
    """The last one is faster in the plain kernel, whose blocks share the terms."""
    *_, m, n, k, count = (1, *shape)
    right = TensorView(0, 0, (count, k, n), (k * n, n, 1), FP32)
    assert thin_parts(m, n, k, count, right, of_arch("sm_90a")) == parts


@pytest.mark.parametrize("name", ["rows", "outlook"])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.nvrtc
def test_it_compiles_without_spills(precision: str, name: str) -> None:
    kernel = product(lowered(graph_of(name), precision, target="cuda:sm_80"))
    assert nvrtc.resources(recipe_of(kernel))["matmul"].spill_bytes == 0


@pytest.mark.hopper
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_on_a_gpu_it_agrees_with_its_meaning(name: str, precision: str) -> None:
    graph = graph_of(name)
    checked_launches(graph, precision, 2e-3 if precision == "fp16" else 2e-6)


@pytest.mark.parametrize(("terms", "threads"), [(9, True), (16, True), (24, False)])
def test_short_products_with_a_vector_need_no_tensor_cores(terms: int, threads: bool) -> None:
    n = Net()
    y = n.op("MatMul", n.input(768, 64, terms, name="a"), n.input(768, terms, 1, name="b"))
    tactics = [s.params["tactic"].split()[0] for s in lowered(n.done(y), "fp16").steps]
    assert ("matmul_tiled" in tactics, "matmul_sm90" in tactics) == (threads, not threads)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("name", ["rows", "outlook"])
def test_thin_products_on_tensor_cores_have_a_grid_of_tiles(name: str, target: str) -> None:
    """Engines whose rows do not depend on the batch run them there, whatever their number."""
    program = lowered(graph_of(name), "fp16", target=target, row_invariant=True)
    steps = [s.params["launch"] for s in program.steps if s.executor == "cuda"]
    found = [s for s in steps if program.kernels[s["kernel"]].template == "matmul_mma.cu"]
    assert found
    for launch in found:
        assert not is_on_threads(program.kernels[launch["kernel"]])
        assert launch["grid"][2] == {"rows": 512, "outlook": 4800}[name]  # a layer of tiles for each matrix


def test_a_constant_of_one_row_that_is_added_is_padded() -> None:
    """Its three elements are no row of eight: a launch would read beyond them."""
    n = Net()
    biased = n.op("Add", n.matmul(n.input(1, 1, 4), 3), n.random(3))
    program = lowered(n.done(n.op("Sub", n.const([[[1.0, 2.0, 3.0]]]), biased)), "fp16")
    assert tactics(program, "MatMul") == ["gemm_sm90"]
    for step in program.steps:
        if step.executor == "cuda":
            parse(step, program)


@pytest.mark.parametrize(("name", "lanes"), [("filters", 4), ("tall", 4), ("outlook", 1)])
def test_aligned_rows_are_read_in_accesses_of_16_bytes(name: str, lanes: int) -> None:
    (text,) = product(lowered(graph_of(name), "fp32")).generated.values()
    assert (f"Pack<f32, {lanes}> held" in text) == (lanes > 1)
