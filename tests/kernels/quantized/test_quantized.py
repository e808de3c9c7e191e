"""8-bit operators on the simulated GPU: equal to the graph to the bit, for each kind and layout."""

from __future__ import annotations

import numpy as np
import pytest
from support.quantized_nets import ADDED, FP8_GROUPS, NETS, QNet, grouped_fp8, residual_block
from support.simulated import check_exact, check_simulated, kinds, results_of, tactics
from support.sweep import sweep

from optdnn.config import BuildOptions
from optdnn.ir.graph import Graph
from optdnn.kernels.conv import hopper_launch
from optdnn.lowering.cuda import lower_cuda
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.pool import MaxPoolAttrs
from optdnn.passes.assign_layout import AssignLayout
from optdnn.passes.base import PassContext
from optdnn.passes.fold_quantized import FoldQuantized
from optdnn.passes.integers import MoveIntegers, ShiftZeroPoints
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.file.validate import validate
from optdnn.runtime.program import Program
from optdnn.target_name import TargetName


def built(graph: Graph, target: str = "simulate") -> tuple[Graph, Program]:
    copy, context = graph.copy(), PassContext(target="cuda:sm_90a" if target == "simulate" else target)
    for one in (ShiftZeroPoints(), MoveIntegers(), FoldQuantized(), AssignLayout()):
        one(copy, context)
    program = lower_cuda(copy, BuildOptions(target=target, no_cubins=True), facts_for(TargetName.parse(target)), {})
    validate(program)
    return copy, program


@pytest.mark.parametrize("target", sweep(["simulate", "cuda:sm_89"], "simulate"))
@pytest.mark.parametrize("name", NETS)
def test_simulate_gives_the_results_of_the_graph(name: str, target: str) -> None:
    n = QNet()
    graph, program = built(n.done(*NETS[name](n)), target)
    check_exact(program, graph)
    assert all(s.executor == "cuda" for s in program.steps)


@pytest.mark.parametrize("name", [*FP8_GROUPS, "fp8 results"])
def test_groups_of_fp8(name: str) -> None:
    graph, program = built(grouped_fp8(128, 16, narrow=True) if name == "fp8 results" else FP8_GROUPS[name]())
    assert tactics(program).count("conv_bands_sm90_8bit") == 1
    check_exact(program, graph)


def test_chains_stay_in_8_bits() -> None:
    n = QNet()
    _, program = built(n.done(residual_block(n, residual_block(n, n.fake(n.input(2, 16, 9, 7), 0.03)))))
    floats = [b for b in program.buffers if b.dtype == np.float32 and b.blob is None]
    assert len(floats) == 2  # the network's input and output
    assert tactics(program).count("conv_sm90_8bit") == 4
    kinds = [s.params["op"]["kind"] for s in program.steps]
    # The input is rounded into the layout of the convolution, from which the output is dequantized.
    assert kinds == ["JointPointwise", *["QuantizedConv"] * 4, "JointPointwise"]


def test_a_part_of_a_wider_image_is_added_to_results_of_fp32() -> None:
    """Such results are stored from registers. The addend needs their layout, so it is copied."""
    n = QNet()
    parts = [n.op("Sigmoid", n.qconv(n.fake(n.input(1, 16, 9, 7, name=k), 0.03), 16)) for k in "xz"]
    joined = n.op("Concat", *parts, attrs=ConcatAttrs(1))
    added = n.qconv(n.fake(n.input(1, 16, 9, 7, name="y"), 0.03), 16, epilogue=ADDED, more=parts[:1])
    graph = n.done(added, n.qconv(n.fake(joined, 0.01), 16), joined)
    _, program = built(graph)
    assert tactics(program).count("conv_sm90_8bit") == 4
    for got, want in results_of(program, graph):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert all(s.executor == "cuda" for s in program.steps)


def test_parts_of_a_concatenation_are_written_in_place() -> None:
    n = QNet()
    _, program = built(n.done(*NETS["concatenation in place"](n)))
    kinds = [s.params["op"]["kind"] for s in program.steps]
    assert kinds.count("QuantizedConv") == 3
    joint = {s.outputs for s in program.steps if s.params["op"]["kind"] == "QuantizedConv"}
    assert len(joint) == 2  # both parts in one buffer, and the result


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("depthwise with its mean", 1),
        ("depthwise with its mean, zero points", 2),
        ("depthwise with its mean of another type", 1),
        ("depthwise with its mean of another type, two launches", 2),
    ],
)
def test_a_depthwise_convolution_sums_its_integers_on_its_way(name: str, steps: int) -> None:
    n = QNet()
    _, program = built(n.done(*NETS[name](n)))
    kinds = [s.params["op"]["kind"] for s in program.steps]
    assert "QuantizedMean" not in kinds
    assert kinds.count("ConvSqueeze") + kinds.count("SqueezeFinish") == steps


def test_a_mean_reads_and_writes_pixels_that_are_filled_up() -> None:
    n = QNet()
    _, program = built(n.done(*NETS["a mean between convolutions of 24 channels"](n)))
    found = [s.params["op"]["kind"] for s in program.steps]
    assert found == ["JointPointwise", "QuantizedConv", "QuantizedMean", "QuantizedConv", "Pointwise"]


def test_single_pixels_are_rows_in_place() -> None:
    n = QNet()
    x = n.fake(n.op("GlobalAveragePool", n.fake(n.qconv(n.fake(n.input(3, 16, 9, 7), 0.03), 24), 0.04)), 0.02)
    rows = n.fake(n.op("Reshape", x, n.ints(3, 24)), 0.02)
    graph, program = built(n.done(n.qgemm(rows, 10)))
    found = [s.params["op"]["kind"] for s in program.steps]
    assert found == [
        "JointPointwise",
        "QuantizedConv",
        "QuantizedMean",
        "QuantizedConv",
        "Copy",
    ]  # at the input and output only
    for got, want in results_of(program, graph):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("zero", [0, 5])
def test_large_images_come_by_tma(zero: int) -> None:
    """Also where the padding is not 0."""
    n = QNet()
    _, program = built(n.done(n.qconv(n.fake(n.input(16, 64, 28, 28), 0.03, zero), 64, 5, group=64)))
    assert "depthwise_sm90.cu" in {k.template for k in program.kernels}


@pytest.mark.parametrize("name", ["a stem", "a stem, zero point"])
def test_a_stem_quantizes_its_image_and_reads_pixels_together(name: str) -> None:
    n = QNet()
    _, program = built(n.done(*NETS[name](n)))
    kinds = [s.params["op"]["kind"] for s in program.steps]
    assert kinds == ["QuantizedBlocks", "QuantizedConv", "MaxPool", "JointPointwise"]
    assert "max_pool_8bit" in tactics(program)


@pytest.mark.parametrize("size", [7, 9, 28])
def test_large_windows_of_integers_are_loops(size: int) -> None:
    """A thread holds all elements of a small window at once. NVRTC did not end for the 3,136 of a pool over a whole image (CBAM)."""
    n = QNet()
    x = n.fake(n.qconv(n.fake(n.input(2, 16, 28, 28), 0.03), 32), 0.03)
    y = n.op("MaxPool", x, attrs=MaxPoolAttrs((size, size), (1, 1), (0, 0, 0, 0), (1, 1), False))
    graph, program = built(n.done(n.qconv(n.fake(y, 0.03), 16, 1)))
    assert ("max_pool_8bit" in tactics(program)) == (size == 7)
    if size > 7:
        refused = [r for t in program.meta["tactics"] for r in t.get("refused", ()) if r["tactic"] == "max_pool_8bit"]  # type: ignore[union-attr]
        assert "its windows have more than 49 elements" in refused[0]["reason"]
    for got, want in results_of(program, graph):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 64])
def test_a_stem_with_a_float_result_has_a_configuration_at_every_batch(batch: int) -> None:
    """fp32 results are stored from registers, so the stem must offer that for many tiles, too."""
    n = QNet()
    graph, program = built(n.done(n.qconv(n.fake(n.input(batch, 3, 64, 64), 0.03), 64, 7, stride=2)))
    assert [s.params["op"]["kind"] for s in program.steps][:2] == ["QuantizedBlocks", "QuantizedConv"]
    if batch == 1:
        for got, want in results_of(program, graph):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("widths", [(1,), (10,), (5, 3), (4, 60), (16, 16)])
@pytest.mark.parametrize("kind", ["rows", "pixels", "integers"])
def test_narrow_heads_of_one_row(rows: int, widths: tuple[int, ...], kind: str) -> None:
    """One row, or one pixel, has no neighbor at the distance of a pitch. Kernels still write whole 16 bytes."""
    n = QNet()
    shape = (rows, 16, 1, 1) if kind == "pixels" else (rows, 16)
    x = n.fake(n.input(*shape), 0.03)
    parts = []
    for width in widths:
        product = [x, n.weights(16, width, axis=1)]
        y = n.qconv(x, width, 1) if kind == "pixels" else n.op("MatMul", *product, attrs=MatMulAttrs())
        parts.append(n.fake(y, 0.05) if kind == "integers" else y)
    y = parts[0] if len(parts) == 1 else n.op("Concat", *parts, attrs=ConcatAttrs(1))
    graph, program = built(n.done(y))
    for got, want in results_of(program, graph):
        np.testing.assert_array_equal(got, want)
    joined = kind == "integers" and set(widths) == {16}  # products of the same data
    assert sum("8bit" in name for name in tactics(program)) >= (1 if joined else len(widths))


def test_a_kernel_without_a_configuration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_launch, "ranked", lambda problem, gpu: ())
    n = QNet()
    graph = n.done(n.qconv(n.fake(n.input(1, 16, 9, 7), 0.03), 16))
    _, program = built(graph)
    assert [s.executor for s in program.steps if "Conv" in str(s.src)] == ["host"], "nothing else runs it"
    for got, want in results_of(program, graph):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("pooled", "first"), [(False, ["QuantizedBlocks"]), (True, ["AveragePool", "Copy"])])
def test_an_image_that_a_pool_rounds_is_not_rounded_again(pooled: bool, first: list[str]) -> None:
    """A convolution of few channels rounds its image while it packs blocks of pixels. A pool that rounds its result does not store
    the image before."""
    n = QNet()
    x = n.input(2, 4, 5, 14)
    x = n.average_pool(x, 3, pads=1, strides=1) if pooled else x
    y = n.qconv(n.fake(x, 0.02, 3), 12, 2, stride=2, pads=(1, 1, 1, 1))
    assert kinds(check_simulated(n.done(y), "fp32", tolerance=5e-2)) == [*first, "QuantizedConv", "Copy"]
