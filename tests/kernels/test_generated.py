"""The generated kernels, run on the processor unchanged, agree with the meanings of their steps (see support.host)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels.generated_cases import FAMILIES, graph_of
from support.host import needs_compiler
from support.net import Net
from support.on_processor import compare_graph, compare_steps
from support.quantized_nets import QNet
from support.simulated import check_simulated, feeds_of, lowered
from support.sweep import sweep

from optdnn.config import BuildOptions
from optdnn.kernels.layout import tap_forms
from optdnn.kernels.pointwise import joint as joint_launches
from optdnn.lowering.cuda import lower_cuda
from optdnn.ops import conv, reduce, resize, shape
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.fused import PointwiseAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fold_quantized import FoldQuantized
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.launches.plan import parse
from optdnn.runtime.program import Program
from optdnn.types import DTYPES, FP16, FP32


@pytest.mark.parametrize("family", FAMILIES)
def test_meanings(family: str) -> None:
    """Every family lowers, and the meanings of its steps give the graph's values."""
    check_simulated(graph_of(family), "fp32", tolerance=2e-5)


@needs_compiler
@pytest.mark.parametrize(
    ("family", "precision"),
    sweep(
        [
            *((f, "fp32") for f in FAMILIES),
            *((f, p) for f in ("norms", "pools", "convolutions", "unaries") for p in ("fp16", "bf16")),
        ],
        *((f, "fp32") for f in list(FAMILIES)[::4]),
        ("norms", "bf16"),
    ),
)
def test_kernels(family: str, precision: str, tmp_path: Path) -> None:
    """Each generated kernel, run on the processor with its own parameters and grid, agrees with its step's meaning."""
    compare_graph(graph_of(family), precision, tmp_path, opt_level=2)


@pytest.mark.slow
def test_blocks_share_long_lines_of_running_sums() -> None:
    for sizes, blocks in (((2, 1024, 9), True), ((2, 1000, 9), False), ((600, 1024, 1), False)):
        n = Net()
        program = lowered(n.done(n.op("CumSum", n.op("Exp", n.input(*sizes)), n.ints(1))), "fp32")
        assert any("totals[warp]" in text for k in program.kernels for text in k.generated.values()) == blocks


@pytest.mark.parametrize(
    ("shape", "axis", "warps"),
    [((4, 128), 1, True), ((4, 12), 1, False), ((64, 9000), 0, False), ((64, 90), 0, True)],
)
def test_warps_share_the_lines_of_running_sums(shape: tuple[int, ...], axis: int, warps: bool) -> None:
    n = Net()
    program = lowered(n.done(n.op("CumSum", n.op("Exp", n.input(*shape)), n.ints(axis))), "fp32")
    assert any("__shfl_up_sync" in text for k in program.kernels for text in k.generated.values()) == warps


@needs_compiler
@pytest.mark.parametrize(("channels", "planes"), [(4, True), (12, True), (6, False)])
def test_a_thread_resizes_several_channels_of_a_pixel(channels: int, planes: bool, tmp_path: Path) -> None:
    """If they are contiguous in the operand, and planes in the result."""
    n = Net()
    x = n.op("Transpose", n.input(2, 5, 6, channels), attrs=shape.TransposeAttrs((0, 3, 1, 2)))
    sizes = n.ints(2, channels, 20, 13)
    graph = n.done(n.op("Resize", x, None, None, sizes, attrs=resize.ResizeAttrs("linear", "half_pixel")))
    program = lowered(graph, "fp32", opt_level=0)
    assert compare_steps(program, feeds_of(graph), 3e-6, tmp_path) >= 1
    assert any("i64(v) * p.sy[1]" in text for k in program.kernels for text in k.generated.values()) == planes


@needs_compiler
@pytest.mark.parametrize(
    ("height", "mode", "runs"),
    [(24, "linear", True), (13, "linear", False), (16, "cubic", True), (16, "nearest", False)],
)
def test_a_thread_resizes_several_pixels_of_a_column(height: int, mode: str, runs: bool, tmp_path: Path) -> None:
    n = Net()
    x = n.op("Exp", n.input(2, 3, 5, 6))
    sizes = n.ints(2, 3, height, 11)
    kinds = [resize.ResizeAttrs(mode, c) for c in ("half_pixel", "align_corners")]
    graph = n.done(*[n.op("Resize", x, None, None, sizes, attrs=a) for a in kinds])
    program = lowered(graph, "fp32")
    assert compare_steps(program, feeds_of(graph), 3e-6, tmp_path) >= 2
    assert any("places[j]" in text for k in program.kernels for text in k.generated.values()) == runs


@needs_compiler
@pytest.mark.parametrize(
    ("width", "attrs", "precision", "runs"),
    [
        (24, resize.ResizeAttrs("linear", "half_pixel"), "fp32", True),
        (48, resize.ResizeAttrs("linear", "half_pixel"), "fp16", True),
        (32, resize.ResizeAttrs("linear", "align_corners"), "fp32", True),
        (40, resize.ResizeAttrs("cubic", "half_pixel"), "fp16", True),
        (26, resize.ResizeAttrs("linear", "half_pixel"), "fp32", False),  # its rows are no whole number of strips
        (
            4,
            resize.ResizeAttrs("linear", "half_pixel", antialias=True),
            "fp32",
            False,
        ),  # a strip reads too many elements
        (24, resize.ResizeAttrs("nearest", "half_pixel"), "fp32", False),
    ],
)
def test_a_thread_resizes_several_pixels_of_a_row(
    width: int, attrs: resize.ResizeAttrs, precision: str, runs: bool, tmp_path: Path
) -> None:
    """Each element is read once for all neighbors that need it. An infinite element affects no others."""
    n = Net()
    x = n.op("Neg", n.input(2, 3, 5, 12))
    graph = n.done(n.op("Resize", x, None, None, n.ints(2, 3, 9, width), attrs=attrs))
    program = lowered(graph, precision)
    feeds = feeds_of(graph)
    if (
        attrs.coordinate_transformation_mode == "half_pixel"
    ):  # with align_corners some weights are 0, and NumPy's 0 * inf is NaN
        next(iter(feeds.values()))[0, 0, 2, 7] = np.inf
    assert compare_steps(program, feeds, 3e-6 if precision == "fp32" else 3e-3, tmp_path) >= 1
    assert any("line[s]" in text for k in program.kernels for text in k.generated.values()) == runs


@needs_compiler
@pytest.mark.parametrize(
    ("sizes", "attrs", "precision", "runs"),
    [
        ((10, 24, 8), resize.ResizeAttrs("linear", "half_pixel"), "fp32", True),
        ((10, 24, 8), resize.ResizeAttrs("linear", "align_corners"), "fp16", True),
        ((7, 48, 8), resize.ResizeAttrs("linear", "half_pixel"), "fp16", True),
        ((5, 24, 8), resize.ResizeAttrs("linear", "half_pixel"), "fp16", True),  # only rows
        ((9, 24, 8), resize.ResizeAttrs("cubic", "half_pixel"), "fp32", True),
        (
            (10, 26, 8),
            resize.ResizeAttrs("linear", "half_pixel"),
            "fp16",
            False,
        ),  # its rows are no whole number of strips
        ((10, 8, 8), resize.ResizeAttrs("linear", "half_pixel"), "fp16", False),  # neighbors share few pixels
        ((10, 24, 8), resize.ResizeAttrs("nearest", "half_pixel"), "fp16", False),
    ],
)
def test_a_thread_resizes_several_pixels_with_their_channels(
    sizes: tuple[int, int, int], attrs: resize.ResizeAttrs, precision: str, runs: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each pixel is read once for all neighbors that need it. An infinite element affects no others."""
    monkeypatch.setattr(tap_forms, "MANY_THREADS", 0)
    n = Net()
    graph = n.done(n.op("Resize", n.op("Neg", n.input(2, 5, 12, 8)), None, None, n.ints(2, *sizes), attrs=attrs))
    program = lowered(graph, precision)
    feeds = feeds_of(graph)
    if attrs.coordinate_transformation_mode == "half_pixel" and sizes[0] != 5:
        next(iter(feeds.values()))[0, 2, 7, 3] = np.inf
    assert compare_steps(program, feeds, 3e-6 if precision == "fp32" else 3e-3, tmp_path) >= 1
    assert any("line[s * " in text for k in program.kernels for text in k.generated.values()) == runs


@needs_compiler
def test_a_resized_image_of_few_pixels_keeps_a_pixel_per_thread() -> None:
    n = Net()
    x, attrs = n.op("Neg", n.input(1, 32, 32, 256)), resize.ResizeAttrs("linear", "half_pixel")
    sizes = (n.ints(1, s, s, 256) for s in (64, 60))
    graph = n.done(*[n.op("Neg", n.op("Resize", x, None, None, s, attrs=attrs)) for s in sizes])
    texts = [text for k in lowered(graph, "fp16").kernels for text in k.generated.values()]
    assert [("line[s * " in text) for text in texts if " taps(" in text] == [True, False]


@needs_compiler
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(("dtype", "zero"), [(np.int8, None), (np.int8, -20), (np.uint8, 120)])
def test_pointwise_work_on_8_bit_integers_is_exact(
    dtype: Any, zero: int | None, joint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divisions by scales, rounding, zero points and saturation, exact to the bit; in launches of their own, and in a joint one."""
    if not joint:
        monkeypatch.setattr(joint_launches, "MOST_ELEMENTS", 0)
    n = QNet()
    x, y = (n.fake(n.input(2, 16, 9, 7, name=name), 0.013, zero, dtype) for name in ("x", "y"))
    scaled = n.op("Mul", x, n.fake(n.input(2, 16, 1, 1, name="s"), 0.02))
    graph = n.done(n.q(scaled, 0.0173, zero, dtype), n.q(n.op("Relu", n.op("Add", x, y)), 0.0291, zero, dtype))
    FoldQuantized()(graph, PassContext(target="cuda:sm_90a"))
    program = lower_cuda(graph, BuildOptions(target="simulate"), of_arch("sm_90a"), {})
    feeds = feeds_of(graph)
    feeds["x"].reshape(-1)[:3] = 1e30, -1e30, np.inf
    compare_steps(program, feeds, 0.0, tmp_path)
    texts = [text for k in program.kernels for text in k.generated.values()]
    assert sum("quotient(" in text for text in texts) >= 3 or joint
    assert any("joint(" in text for text in texts) == joint


@pytest.mark.parametrize(("zero", "high"), [(3.5, 127.0), (3.0, 100.5), (3.0, 1000.0), (3.0, np.inf)])
def test_other_roundings_are_no_quantization(zero: float, high: float) -> None:
    """Zero points that are not whole, and bounds beyond a byte, are computed as written."""
    n = Net()
    steps = n.op("Add", n.op("Round", n.op("Div", n.input(4, 6), n.const(0.1))), n.const(zero))
    graph = n.done(n.op("Cast", n.op("Clip", steps, n.const(-128.0), n.const(high)), attrs=CastAttrs(DTYPES["int8"])))
    program = lowered(graph, "fp32")
    assert len(program.kernels) == 1
    assert not any("quantized(" in text for k in program.kernels for text in k.generated.values())


@needs_compiler
def test_the_comparison_notices_another_kernel(tmp_path: Path) -> None:
    (tmp_path / "right").mkdir()
    n = Net()
    graph = n.done(n.op("Exp", n.input(3, 4)))
    program = lowered(graph, "fp32", opt_level=0)
    kernel = program.kernels[0]
    generated = {k: v.replace("exp(", "sinh(") for k, v in kernel.generated.items()}
    broken = replace(program, kernels=(replace(kernel, generated=generated),))
    compare_steps(program, feeds_of(graph), 3e-6, tmp_path / "right")
    with pytest.raises(AssertionError, match="Pointwise of Exp"):
        compare_steps(broken, feeds_of(graph), 3e-6, tmp_path)


@needs_compiler
def test_long_sums_in_fp32_do_not_lose_bits(tmp_path: Path) -> None:
    """Products are added up in runs. One chain of 6,000 additions would be off by 2e-6."""
    n = Net()
    x, a = n.op("Abs", n.input(1, 6000, 2, 3)), n.op("Abs", n.input(3, 6000, name="a"))
    w = np.random.default_rng(3).uniform(0.5, 1.5, (6000, 3)).astype(np.float32)
    one, none = (1, 1), (0, 0, 0, 0)
    graph = n.done(
        n.op("Conv", x, w.T[..., None, None], attrs=conv.ConvAttrs(one, none, one)),
        n.op("ConvTranspose", x, w[..., None, None], attrs=conv.ConvTransposeAttrs(one, none, one, (0, 0))),
        n.op("MatMul", a, w),
    )
    assert compare_steps(lowered(graph, "fp32"), feeds_of(graph), 5e-7, tmp_path) >= 2


@needs_compiler
def test_a_chain_with_casts_rounds_where_it_says(tmp_path: Path) -> None:
    stages = (
        Stage("Mul", (-1, 1)),
        Stage("Cast", (-2,), CastAttrs(FP16)),
        Stage("Cast", (-3,), CastAttrs(FP32)),
        Stage("Add", (-4, 1)),
    )
    n = Net()
    x = n.input(64)
    graph = n.done(n.op("Pointwise", x, n.random(64), attrs=PointwiseAttrs(epilogue=stages)))
    program = lowered(graph, "fp32", opt_level=0)
    compare_steps(program, feeds_of(graph), 1e-6, tmp_path)


@needs_compiler
@pytest.mark.parametrize(("size", "strides"), [(16, 2), (15, 2), (16, 4)])
def test_the_layout_of_a_stem(size: int, strides: int, tmp_path: Path) -> None:
    n = Net(seed=3)
    program = lowered(n.done(n.conv(n.input(2, 3, size, size), 16, 11, strides=strides, pads=5)), "tf32")
    assert "SpaceToDepthImage" in [s.params["op"]["kind"] for s in program.steps]
    compare_steps(program, feeds_of_program(program), 1e-3, tmp_path)


def feeds_of_program(program: Program) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    return {s.name: rng.standard_normal(s.shape).astype(s.dtype) for s, _ in program.inputs}


@pytest.mark.parametrize(
    ("kind", "terms", "blocks"),
    [
        *(("ReduceLogSumExp", *sizes) for sizes in ((3, 1), (32, 1), (50, 2), (300, 6), (1100, 21))),
        pytest.param("ReduceLogSumExp", 5000, 21, marks=pytest.mark.slow),
        *((kind, *sizes) for kind in ("ReduceL2", "ReduceMax") for sizes in ((50, 2), (300, 6), (301, 21))),
    ],
)
def test_outputs_of_few_terms_share_a_block(kind: str, terms: int, blocks: int, tmp_path: Path) -> None:
    n = Net()
    rows, columns, wide = (
        n.op(kind, x, n.ints(1), attrs=reduce.ReduceAttrs())
        for x in (n.input(41, terms), n.input(2, terms, 9, name="w"), n.input(2, terms, 24, name="v"))
    )
    program = lowered(n.done(rows, columns, wide), "fp32")
    compare_steps(program, feeds_of(n.graph), 3e-6, tmp_path)
    (step,) = [s for s in (parse(s, program) for s in program.steps) if s.meaning.reads[0].shape == (41, terms)]
    assert step.launch.grid == (blocks, 1, 1)
