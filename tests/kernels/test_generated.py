"""The generated kernels, run on the processor as they are, give what their steps say they mean (see support.host)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.host import WHY_NOT, HostKernels
from support.net import Net
from support.pictures import resized
from support.positions import FAMILIES as POSITIONS
from support.quantized_nets import QNet
from support.simulated import check_simulated, feeds_of, lowered

from optdnn.config import BuildOptions
from optdnn.ir.graph import Graph
from optdnn.lowering.cuda import lower_cuda
from optdnn.ops import conv, gather, index, norm, pool, reduce, resize, shape, softmax, unary
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.fused import PointwiseAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fold_quantized import FoldQuantized
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.launches.plan import parse
from optdnn.runtime.program import Program
from optdnn.runtime.simulate.runner import SimulateContext, SimulateRunner, strided
from optdnn.types import DTYPES, FP16, FP32, INT64, is_float


def softmaxes(n: Net) -> list[Any]:
    x = n.input(3, 5, 40)
    return [n.op("Softmax", x, attrs=softmax.SoftmaxAttrs(a)) for a in (-1, 1)] + [
        n.op("LogSoftmax", x, attrs=softmax.SoftmaxAttrs(0)), n.op("Softmax", n.input(2, 700, name="wide"))]  # fmt: skip


def norms(n: Net) -> list[Any]:
    x = n.input(2, 12, 5, 3)
    row, channel = (n.random(3), n.random(3)), (n.positive(12), n.random(12))
    return [
        n.op("LayerNormalization", x, *row),
        n.op("LayerNormalization", x, n.random(5, 3), attrs=norm.LayerNormAttrs(2, 1e-3)),
        n.op("RMSNormalization", x, row[0]),
        n.op("InstanceNormalization", x, *channel),
        n.op("GroupNormalization", x, *channel, attrs=norm.GroupNormAttrs(4)),
        n.op("LpNormalization", x, attrs=norm.LpNormAttrs(1, 1)),
        n.op("LpNormalization", x, attrs=norm.LpNormAttrs(1, 2)),
        n.op("LpNormalization", x, attrs=norm.LpNormAttrs(-1, 2, 1.5)),
        n.op("MeanVarianceNormalization", x),
        n.op("LRN", x, attrs=norm.LRNAttrs(5, 0.3, 0.75, 2.0)),
        n.bn(x),
    ]


def reductions(n: Net) -> list[Any]:
    x = n.op("Abs", n.op("Add", n.input(3, 4, 17), 0.1))
    kinds = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")
    found = [n.op(f"Reduce{k}", x, n.ints(2), attrs=reduce.ReduceAttrs()) for k in kinds]
    return [
        *found,
        n.op("ReduceSum", x, n.ints(0, 2), attrs=reduce.ReduceAttrs(False)),
        n.op("ReduceMax", x, n.ints(0)),
        *(
            n.op(f"Reduce{k}", x, n.ints(), attrs=reduce.ReduceAttrs(True, True))
            for k in ("SumSquare", "LogSum", "Sum")
        ),
    ]


def extremes(n: Net) -> list[Any]:
    x = n.input(3, 5, 7)
    whole = n.op("Round", x)  # equal elements
    return [
        n.op("ArgMax", x, attrs=reduce.ArgAttrs(1)),
        n.op("ArgMin", x, attrs=reduce.ArgAttrs(-1, keepdims=False)),
        n.op("ArgMax", whole, attrs=reduce.ArgAttrs(2, select_last_index=True)),
        n.op("ArgMin", whole, attrs=reduce.ArgAttrs(0)),
    ]


def integer_reductions(n: Net) -> list[Any]:
    x = n.input(3, 40, dtype=INT64)
    return [n.op(f"Reduce{k}", x, n.ints(1)) for k in ("Sum", "Max", "Min", "Prod", "L1")]


def pools(n: Net) -> list[Any]:
    x = n.input(2, 8, 9, 7)
    lp = pool.LpPoolAttrs((3, 3), (2, 2), (1, 1, 1, 1), (1, 1), p=2)
    return [
        n.max_pool(x), n.max_pool(x, pads=1, ceil_mode=True), n.average_pool(x, pads=1), n.average_pool(x, pads=1, include_pad=True),
        n.op("LpPool", x, attrs=lp), n.op("GlobalAveragePool", x), n.op("GlobalMaxPool", x), n.max_pool(n.input(2, 3, 9, name="one")),
    ]  # fmt: skip


def convolutions(n: Net) -> list[Any]:
    x = n.input(2, 8, 7, 9)
    deep = n.conv(x, 8, group=8, bias=True)
    return [
        deep, n.op("Swish", n.conv(x, 8, 5, pads=2, strides=2, group=8), attrs=unary.AlphaAttrs(1.0)),
        n.op("Add", n.op("Relu", n.conv(x, 12, group=4, dilations=2, pads=2, bias=True)), n.random(12, 1, 1)),
        n.conv(n.input(1, 2, 4, 5, 6, name="volume"), 3), n.conv_transpose(x, 6, bias=True), n.conv_transpose(x, 8, 2, group=4, pads=1),
        n.conv(n.input(2, 6, 11, name="line"), 6, group=6), n.op("Mul", n.conv(x, 16, group=8), n.op("Sigmoid", n.conv(x, 16, group=2))),
    ]  # fmt: skip


def products(n: Net) -> list[Any]:
    a, b = n.input(2, 3, 20, 33), n.input(3, 33, 70, name="b")
    v = n.input(33, name="v")
    square = n.op("Slice", a, n.ints(0, 0), n.ints(1, 1), n.ints(0, 1))
    flat = n.op("Reshape", square, n.ints(20, 33))
    return [
        n.op("MatMul", a, b), n.op("MatMul", a, v), n.op("MatMul", n.op("Reshape", v, n.ints(33)), n.op("Transpose", flat)),
        n.op("Relu", n.op("Gemm", flat, n.op("Transpose", flat), n.random(20), attrs=_gemm(0.5, 2.0))), n.op("MatMul", v, v),
        n.op("Gemm", flat, flat, attrs=_gemm(1.0, 1.0, True, False)),
    ]  # fmt: skip


def _gemm(alpha: float, beta: float, a: bool = False, b: bool = False) -> Any:
    from optdnn.ops.gemm import GemmAttrs

    return GemmAttrs(alpha, beta, a, b)


def resizes(n: Net) -> list[Any]:
    x = n.input(2, 3, 6, 7)
    sizes, scales = n.ints(2, 3, 11, 5), n.const([1, 1, 2, 2.5], np.float32)
    found = [n.op("Resize", x, None, None, sizes, attrs=resize.ResizeAttrs(m, c)) for m, c in (
        ("linear", "half_pixel"), ("linear", "align_corners"), ("cubic", "half_pixel"), ("nearest", "asymmetric"))]  # fmt: skip
    return [
        *found,
        n.op("Resize", x, None, scales),
        n.op("Resize", x, None, None, sizes, attrs=resize.ResizeAttrs("linear", antialias=True)),
    ]


def pictures(n: Net) -> list[Any]:
    return [*resized(n), *resized(n, channels=1, crop=False, name="gray")]


def paddings(n: Net) -> list[Any]:
    x = n.input(2, 3, 5, 6)
    pads = n.ints(0, 1, 2, 1, 0, 0, 3, 2)
    found = [n.op("Pad", x, pads, n.const(0.5), attrs=index.PadAttrs(m)) for m in ("constant", "edge")]
    inner = n.ints(0, 1, 2, 1, 0, 0, 3, 2)
    return [
        *found,
        n.op("Pad", x, inner, attrs=index.PadAttrs("reflect")),
        n.op("Pad", x, n.ints(0, 0, -1, 1, 0, 0, 0, -2)),
    ]


def gathers(n: Net) -> list[Any]:
    x, i = n.input(5, 6, 7), n.input(2, 3, name="i", dtype=INT64)
    three = n.op("Reshape", i, n.ints(3, 2))
    elements = n.op("Expand", n.op("Reshape", i, n.ints(1, 6, 1)), n.ints(2, 6, 7))
    return [
        n.op("Gather", x, i, attrs=gather.GatherAttrs(1)), n.op("Gather", x, i), n.op("GatherND", x, three),
        n.op("GatherElements", x, elements, attrs=gather.GatherAttrs(0)),
    ]  # fmt: skip


def movements(n: Net) -> list[Any]:
    x = n.input(2, 8, 4, 6)
    turned = n.op("Transpose", x, attrs=shape.TransposeAttrs((2, 0, 3, 1)))
    return [
        n.op("Reshape", turned, n.ints(4, -1)), n.op("DepthToSpace", x, attrs=index.BlockAttrs(2)), n.op("Tile", x, n.ints(1, 2, 1, 3)),
        n.op("DepthToSpace", x, attrs=index.BlockAttrs(2, "CRD")), n.op("SpaceToDepth", x, attrs=index.BlockAttrs(2)), n.op("SpaceToDepth", x, attrs=index.BlockAttrs(2, "CRD")),
        n.op("Slice", x, n.ints(7, -1), n.ints(0, -100), n.ints(1, 3), n.ints(-3, -1)),
        n.op("Concat", x, turned_back(n, turned), attrs=index.ConcatAttrs(2)),
        *n.op("Split", x, n.ints(3, 5), attrs=index.SplitAttrs(1), outputs=2),
    ]  # fmt: skip


def turned_back(n: Net, x: Any) -> Any:
    return n.op("Transpose", x, attrs=shape.TransposeAttrs((1, 3, 0, 2)))


UNARY = [
    "Relu",
    "Elu",
    "Selu",
    "Celu",
    "Sigmoid",
    "HardSigmoid",
    "HardSwish",
    "Tanh",
    "Softplus",
    "Softsign",
    "Mish",
    "Gelu",
    "Neg",
    "Abs",
    "Sign",
    "Ceil",
    "Floor",
    "Round",
    "Erf",
    "Sin",
    "Cos",
    "Atan",
    "Sinh",
    "Cosh",
    "Asinh",
    "Exp",
    "ThresholdedRelu",
    "LeakyRelu",
    "Swish",
    "Shrink",
]


def unaries(n: Net) -> list[Any]:
    x = n.input(3, 37)
    positive = n.op("Add", n.op("Abs", x), 0.5)
    small = n.op("Mul", n.op("Tanh", x), 0.9)
    found = [n.op(k, x) for k in UNARY]
    found += [n.op(k, positive) for k in ("Sqrt", "Log", "Reciprocal")]
    found += [n.op(k, small) for k in ("Asin", "Acos", "Atanh", "Tan")] + [n.op("Acosh", n.op("Add", positive, 0.6))]
    return [*found, n.op("Gelu", x, attrs=unary.GeluAttrs("tanh"))]


def binaries(n: Net) -> list[Any]:
    x, y = n.input(3, 1, 16), n.input(5, 16, name="y")
    positive = n.op("Add", n.op("Abs", x), 0.5)
    found = [n.op(k, x, y) for k in ("Add", "Sub", "Mul", "Min", "Max", "Sum", "Mean")] + [
        n.op("PRelu", y, n.random(16))
    ]
    test = n.op("Less", x, y)
    return [
        *found, n.op("Div", y, positive), n.op("Pow", positive, y), n.op("Mod", y, positive, attrs=_fmod()),
        n.op("Mod", y, n.op("Sub", x, 0.1)), n.op("Mod", n.op("Floor", y), n.const([np.inf, -np.inf, 2, -2] * 4)), n.op("Where", test, x, y),
        n.op("Clip", x, -0.5, 0.25), n.op("Clip", x, None, 0.25), test, n.op("GreaterOrEqual", x, y), n.op("And", test, n.op("Not", test)),
    ]  # fmt: skip


def _fmod() -> Any:
    from optdnn.ops.binary import ModAttrs

    return ModAttrs(True)


def integers(n: Net) -> list[Any]:
    x, y = n.input(4, 9, dtype=INT64), n.input(9, name="y", dtype=INT64)
    one = n.op("Add", y, n.const([1], np.int64))
    small = n.op("Cast", x, attrs=CastAttrs(DTYPES["int8"]))
    return [
        n.op("Add", x, y), n.op("Div", n.op("Neg", x), one), n.op("Mod", n.op("Neg", x), one), n.op("Pow", x, y), n.op("Equal", x, y),
        n.op("BitwiseAnd", x, y), n.op("BitwiseXor", x, y), n.op("BitwiseNot", x), small, n.op("Cast", x, attrs=CastAttrs(DTYPES["bool"])),
        n.op("Max", x, y), n.op("Cast", x, attrs=CastAttrs(FP32)), n.op("Where", n.op("Equal", x, y), x, y),
    ]  # fmt: skip


FAMILIES: dict[str, Callable[[Net], list[Any]]] = {
    f.__name__: f
    for f in (
        softmaxes,
        norms,
        reductions,
        extremes,
        integer_reductions,
        pools,
        convolutions,
        products,
        resizes,
        pictures,
        paddings,
        gathers,
        movements,
        unaries,
        binaries,
        integers,
    )
} | POSITIONS


def graph_of(family: str) -> Graph:
    n = Net(seed=5)
    return n.done(*FAMILIES[family](n))


@pytest.mark.parametrize("family", FAMILIES)
def test_meanings(family: str) -> None:
    """Every family lowers, and its steps' meanings give the graph's own values."""
    check_simulated(graph_of(family), "fp32", tolerance=2e-5)


@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        *((f, "fp32") for f in FAMILIES),
        *((f, p) for f in ("norms", "pools", "convolutions", "unaries") for p in ("fp16", "bf16")),
    ],
)
def test_kernels(family: str, precision: str, tmp_path: Path) -> None:
    """Each generated kernel, run on the processor with its own parameters and grid, writes what its step means."""
    graph = graph_of(family)
    tolerance = {"fp32": 3e-6, "fp16": 1.2e-3, "bf16": 9e-3}[precision]
    program = lowered(graph, precision, opt_level=2)
    compare_steps(program, feeds_of(graph), tolerance, tmp_path)


def compare_steps(program: Program, feeds: dict[str, Any], tolerance: float, folder: Path) -> int:
    """Run every generated kernel of the program on what precedes it; returns how many were compared."""
    runner = SimulateRunner(program)
    context = SimulateContext(runner, poison=True)
    kernels, compared = HostKernels(program, folder), 0
    given: list[Any] = []

    def before(action: Any) -> None:
        given[:] = [np.array(context._flat[i]) for i in action.operands]

    def hook(action: Any, outputs: list[Any]) -> None:
        nonlocal compared
        if not kernels.runs(action.step):
            return
        flat = list(given)
        wanted = [np.array(context._view(action, v)) for v in action.step.meaning.writes if v is not None]
        number = {i: k for k, i in enumerate(action.operands)}
        for v in action.step.meaning.writes:
            if v is not None and action.operands[v.operand] not in action.operands[: v.operand]:  # it reads what stays
                target = flat[v.operand]
                target.view(np.uint8)[:] = 0xFF
        for k, i in enumerate(action.operands):  # an operand that is both read and written is one memory
            flat[k] = flat[number[i]] if number[i] == k else flat[k]
        kernels.run(action.step, flat)
        for v, want in zip((v for v in action.step.meaning.writes if v is not None), wanted, strict=True):
            got = strided(flat[v.operand], v)
            label = f"{action.step.meaning.kind} of {action.step.label}"
            if not is_float(got.dtype):
                np.testing.assert_array_equal(got, want, err_msg=label)
                continue
            a, e = got.astype(np.float64), want.astype(np.float64)
            scale = np.abs(e[np.isfinite(e)]).max(initial=1e-30)
            np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance * scale, err_msg=label)
        compared += 1

    context.before_step, context.after_step = before, hook
    context.run(feeds)
    assert compared
    return compared


@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
@pytest.mark.parametrize(("channels", "planes"), [(4, True), (12, True), (6, False)])
def test_a_thread_resizes_several_channels_of_a_pixel(channels: int, planes: bool, tmp_path: Path) -> None:
    """Where they are neighbours in the operand, and planes of the result."""
    n = Net()
    x = n.op("Transpose", n.input(2, 5, 6, channels), attrs=shape.TransposeAttrs((0, 3, 1, 2)))
    sizes = n.ints(2, channels, 20, 13)
    graph = n.done(n.op("Resize", x, None, None, sizes, attrs=resize.ResizeAttrs("linear", "half_pixel")))
    program = lowered(graph, "fp32", opt_level=0)
    assert compare_steps(program, feeds_of(graph), 3e-6, tmp_path) >= 1
    assert any("i64(v) * p.sy[1]" in text for k in program.kernels for text in k.generated.values()) == planes


@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
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


@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
@pytest.mark.parametrize(("dtype", "zero"), [(np.int8, None), (np.int8, -20), (np.uint8, 120)])
def test_pointwise_work_on_8_bit_integers_is_exact(dtype: Any, zero: int | None, tmp_path: Path) -> None:
    """Divisions by scales, roundings, zero points and saturation, to the bit."""
    n = QNet()
    x, y = (n.fake(n.input(2, 16, 9, 7, name=name), 0.013, zero, dtype) for name in ("x", "y"))
    scaled = n.op("Mul", x, n.fake(n.input(2, 16, 1, 1, name="s"), 0.02))
    graph = n.done(n.q(scaled, 0.0173, zero, dtype), n.q(n.op("Relu", n.op("Add", x, y)), 0.0291, zero, dtype))
    FoldQuantized()(graph, PassContext(target="cuda:sm_90a"))
    program = lower_cuda(graph, BuildOptions(target="simulate"), of_arch("sm_90a"), {})
    feeds = feeds_of(graph)
    feeds["x"].reshape(-1)[:3] = 1e30, -1e30, np.inf
    compare_steps(program, feeds, 0.0, tmp_path)
    assert sum("quotient(" in text for k in program.kernels for text in k.generated.values()) >= 3


@pytest.mark.parametrize(("zero", "high"), [(3.5, 127.0), (3.0, 100.5), (3.0, 1000.0), (3.0, np.inf)])
def test_other_roundings_are_no_quantization(zero: float, high: float) -> None:
    """Numbers that are not whole, or beyond a byte, are computed as they are written."""
    n = Net()
    steps = n.op("Add", n.op("Round", n.op("Div", n.input(4, 6), n.const(0.1))), n.const(zero))
    graph = n.done(n.op("Cast", n.op("Clip", steps, n.const(-128.0), n.const(high)), attrs=CastAttrs(DTYPES["int8"])))
    program = lowered(graph, "fp32")
    assert len(program.kernels) == 1
    assert not any("quantized(" in text for k in program.kernels for text in k.generated.values())


@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
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


@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
def test_long_sums_in_fp32_do_not_lose_bits(tmp_path: Path) -> None:
    """Products are added up in runs: one chain of 6,000 additions is 2e-6 off."""
    n = Net()
    x, a = n.op("Abs", n.input(1, 6000, 2, 3)), n.op("Abs", n.input(3, 6000, name="a"))
    w = np.random.default_rng(3).uniform(0.5, 1.5, (6000, 3)).astype(np.float32)
    one, none = (1, 1), (0, 0, 0, 0)
    graph = n.done(
        n.op("Conv", x, w.T[..., None, None], attrs=conv.ConvAttrs(one, none, one)),
        n.op("ConvTranspose", x, w[..., None, None], attrs=conv.ConvTransposeAttrs(one, none, one, (0, 0))),
        n.op("MatMul", a, w),
    )
    assert compare_steps(lowered(graph, "fp32"), feeds_of(graph), 5e-7, tmp_path) >= 3


@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
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


@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
@pytest.mark.parametrize(("size", "strides"), [(16, 2), (15, 2), (16, 4)])
def test_the_layout_of_a_stem(size: int, strides: int, tmp_path: Path) -> None:
    n = Net(seed=3)
    program = lowered(n.done(n.conv(n.input(2, 3, size, size), 16, 7, strides=strides, pads=3)), "tf32")
    assert "SpaceToDepthImage" in [s.params["op"]["kind"] for s in program.steps]
    compare_steps(program, feeds_of_program(program), 1e-3, tmp_path)


def feeds_of_program(program: Program) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    return {s.name: rng.standard_normal(s.shape).astype(s.dtype) for s, _ in program.inputs}


@pytest.mark.parametrize(
    ("kind", "terms", "blocks"),
    [
        *(("ReduceLogSumExp", *sizes) for sizes in ((3, 1), (32, 2), (50, 3), (300, 21), (1100, 21), (5000, 41))),
        *((kind, *sizes) for kind in ("ReduceL2", "ReduceMax") for sizes in ((50, 3), (300, 21))),
    ],
)
def test_outputs_of_few_terms_share_a_block(kind: str, terms: int, blocks: int, tmp_path: Path) -> None:
    n = Net()
    rows, columns, wide = (
        n.op(kind, x, n.ints(1), attrs=reduce.ReduceAttrs())
        for x in (n.input(41, terms), n.input(2, terms, 9, name="w"), n.input(2, terms, 24, name="v"))
    )
    program = lowered(n.done(rows, columns, wide), "fp32", no_cubins=True)
    compare_steps(program, feeds_of(n.graph), 3e-6, tmp_path)
    (step,) = [s for s in (parse(s, program) for s in program.steps) if s.meaning.reads[0].shape == (41, terms)]
    assert step.launch.grid == (blocks, 1, 1)
