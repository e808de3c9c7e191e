"""Products of packed weights with rows rounded to int8: networks, refusals, and the kernels on the processor, exact to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import emulated
from support.host import needs_compiler
from support.net import Net, built
from support.packed_cases import CASES, GATED, TYPES, Case, drawn, network, tiled
from support.simulated import check_not_taken, check_simulated, kinds, tactics
from support.spills import check_spills
from support.sweep import sweep

from optdnn.errors import InternalError
from optdnn.ir.graph import Graph
from optdnn.kernels.conv import hopper_launch, implicit_gemm
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.packed import dense_kernel as dense
from optdnn.kernels.packed import row_bytes_kernel as row_bytes
from optdnn.kernels.packed.eight_bits import PackedBytes, column_magnitudes, inverted
from optdnn.kernels.packed.tiles import tiled_scales
from optdnn.ops.packed_layout import PackedMatMulAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.reference.packed import row_numbers, unpacked_bytes

GPU = of_arch("sm_90a")
FORMS = {
    **{name: replace(case, rows=70, stages=()) for name, case in CASES.items() if case.zeros in ("", "uint8")},
    "activated": Case(100, 128, 512, stages=(("relu",),)),
    "with a residual, odd": Case(33, 61, 333, zeros="uint8", stages=(("add",),)),
    "gated": Case(64, 96, 768, block=64, stages=GATED, dtype="bfloat16", scale="bfloat16"),
}


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedBytes, "defer", lambda self, b, op: None)


def _precision(case: Case) -> str:
    return "bf16" if case.dtype == "bfloat16" else "fp16"


@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize("name", FORMS)
def test_networks(name: str) -> None:
    """Rows and weights become bytes before the product. Its results are within the rounding of the graph's own."""
    case = FORMS[name]
    program = check_simulated(network(case, rounded=True), _precision(case), tolerance=0.02)
    assert "packed_8bit" in tactics(program, "PackedMatMul")
    assert {"RowBytes", "UnpackedBytes", "QuantizedMatMul"} <= {*kinds(program)}


def _same_rows(n: Net) -> list[Any]:
    x = n.op("Abs", n.input(40, 256))
    made = []
    for block in (128, 32):  # products whose weights have one form become one product
        o = drawn(Case(40, 128, 256, block=block))
        attrs = PackedMatMulAttrs("uint4", 256, block, rounded_rows=True)
        made.append(n.op("PackedMatMul", x, n.const(o.packed, np.uint8), n.const(o.scales, np.float16), attrs=attrs))
    return made


@pytest.mark.usefixtures("wanted")
def test_products_of_the_same_rows_round_them_once() -> None:
    found = kinds(check_simulated(built(_same_rows), tolerance=0.02))
    assert (found.count("RowBytes"), found.count("UnpackedBytes"), found.count("QuantizedMatMul")) == (1, 2, 2)


@pytest.mark.slow
def test_the_cost_model_takes_it_for_many_rows() -> None:
    many, few = (network(Case(rows, 4096, 4096), rounded=True) for rows in (1024, 16))
    from support.simulated import lowered

    assert "packed_8bit" in tactics(lowered(many), "PackedMatMul")
    assert "packed_8bit" not in tactics(lowered(few), "PackedMatMul")


def _many_constants(n: Net) -> Graph:
    """A product whose stages have fourteen constants."""
    o = drawn(Case(40, 64, 512))
    x = n.op("Abs", n.input(40, 512))
    attrs = PackedMatMulAttrs("uint4", 512, 128, rounded_rows=True)
    y = n.op("PackedMatMul", x, n.const(o.packed, np.uint8), n.const(o.scales, np.float16), attrs=attrs)
    for _ in range(7):
        y = n.op("Tanh", n.op("Clip", y, np.float32(-0.5), np.float32(0.75)))
    return n.done(y)


REFUSED: dict[str, tuple[Graph, str]] = {
    "its rows must not be rounded to 8 bits (w4a8 lets them)": (network(Case(64)), "simulate"),
    "it needs Hopper's wgmma and TMA (sm_90a), not sm_80": (network(Case(64), rounded=True), "cuda:sm_80"),
    "it is for 9 rows and more, not 8": (network(Case(8), rounded=True), "simulate"),
    "its rows have 65552 elements; 65536 are the most": (network(Case(9, 16, 65552), rounded=True), "simulate"),
    "its zero points are floats: their differences from codes would be rounded": (
        network(replace(CASES["zero points that are no integers"], rows=64), rounded=True),
        "simulate",
    ),
    "its stages have too many constants": (_many_constants(Net()), "simulate"),
}


@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason: str) -> None:
    graph, target = REFUSED[reason]
    check_not_taken(graph, "packed_8bit", reason, target=target, no_cubins=True)


def test_problems_that_there_are_not() -> None:
    for fields in ({"dtype": "float16"}, {"dtype": "int8", "out": "int8"}, {"dtype": "int8", "out": "float32"}):
        with pytest.raises(InternalError, match="have a scale per row"):
            Problem(64, 64, (Source(1, 1, 64),), row_scale=True, **fields)


def test_configurations_that_there_are_not() -> None:
    p = Problem(512, 4096, (Source(1, 1, 4096),), dtype="int8", out="float16", row_scale=True)
    split = implicit_gemm.Config(1, 1, 1, 64, 4, split=2)
    assert implicit_gemm.refuse(p, split) == "scales per row are applied to whole sums: K is not split"
    assert "exceed the registers" in str(implicit_gemm.refuse(p, implicit_gemm.Config(2, 1, 2, 128, 3)))
    assert implicit_gemm.refuse(p, implicit_gemm.Config(1, 1, 1, 128, 4, share=(1, 2))) is None


@needs_compiler
@pytest.mark.parametrize(
    ("depth", "dtype"), [(512, "float16"), (333, "bfloat16"), (4100, "float16"), (20000, "float16")]
)
def test_rows_on_a_processor(depth: int, dtype: str, tmp_path: Path) -> None:
    rng, rows, stored, pitch = np.random.default_rng(5), 6, -(-depth // 16) * 16, -(-depth // 8) * 8
    x = np.full((rows, pitch), np.nan, TYPES[dtype])
    x[:, :depth] = rng.standard_normal((rows, depth)) * np.logspace(-4, 4, rows)[:, None]
    x[1] = 0
    x[2, depth // 2], x[3, depth - 1] = np.inf, np.nan
    held = {"x": emulated.aligned(x), "numbers": emulated.aligned(np.full((rows, stored), 77, np.int8))}
    held["scales"] = emulated.aligned(np.full(rows, -1, np.float32))
    made = row_bytes.launch(rows, depth, pitch, stored, dtype, "sm_90a")
    library = emulated.compiled(made.recipe, made.function, tmp_path)
    emulated.run(library, made, {name: held[name].ctypes.data for name in made.operands})
    numbers, scales = row_numbers(x[:, :depth])
    np.testing.assert_array_equal(held["scales"], scales)
    np.testing.assert_array_equal(held["numbers"][:, :depth], numbers)
    assert not held["numbers"][:, depth:].any()
    assert not np.isfinite(scales[2:4]).any()


@needs_compiler
@pytest.mark.parametrize("name", sweep(FORMS, "blocks of 16", "an odd depth", "8 bits, bf16", "2 bits"))
def test_weights_as_bytes_on_a_processor(name: str, tmp_path: Path) -> None:
    case = FORMS[name]
    p, o, pitch = case.problem, drawn(case), -(-case.depth // 128) * 128
    attrs = PackedMatMulAttrs(p.code, p.depth, p.block)
    magnitudes = column_magnitudes(o.packed, o.scales, o.zeros, attrs)
    np.testing.assert_allclose(magnitudes, np.abs(o.weights).max(axis=1), rtol=1e-6)
    inverse = np.zeros(-(-p.columns // 16) * 16, np.float32)
    inverse[: p.columns] = inverted(magnitudes)
    made = dense.launch(p, GPU, pitch)
    held = {key: emulated.aligned(a) for key, a in {**tiled(case, o), "inverse": inverse}.items()}
    held["output"] = emulated.aligned(np.zeros((p.columns, pitch), np.int8))
    library = emulated.compiled(made.recipe, made.function, tmp_path, headers=["packed.cuh"])
    emulated.run(library, made, {key: held[key].ctypes.data for key in made.operands})
    sizes = (p.columns, p.depth, p.bits, p.block)
    zeros = None if o.zeros is None else tiled_scales(o.zeros, *sizes)
    parts = (held["tiles"], held["scales"], zeros, inverse[: p.columns])
    (want,) = unpacked_bytes(*parts, code=p.code, K=p.depth, N=p.columns, block_size=p.block)
    np.testing.assert_array_equal(held["output"][:, : p.depth], want)
    np.testing.assert_allclose(
        want * (magnitudes[:, None] / 127), o.weights, rtol=0, atol=0.51 * magnitudes.max() / 127
    )


@pytest.mark.nvrtc
def test_the_kernels_compile_without_spills() -> None:
    for rows in (128, 2048):
        for stages in ((), (("silu",),), (("mul",),)):
            p = Problem(rows, 4096, (Source(1, 1, 4096),), (("bias",), *stages), "int8", "float16", row_scale=True)
            for offer in hopper_launch.ranked(p, GPU)[:1]:
                (kernel,) = nvrtc.resources(implicit_gemm.recipe(p, offer.config)).values()  # type: ignore[arg-type]
                assert kernel.spill_bytes == 0, str(offer.config)
    for stored in (512, 14336, 65536):
        check_spills(row_bytes.recipe(stored, "float16", "sm_90a"))
    for name in ("4 bits", "8 bits, bf16", "2 bits"):
        check_spills(dense.recipe(CASES[name].problem, "sm_90a", eight_bits=True))
