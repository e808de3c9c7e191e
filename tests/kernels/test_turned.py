"""Copies between tensors that are contiguous along different axes, run on the processor unchanged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.host import HostKernels, needs_compiler
from support.net import Net
from support.on_processor import compare_steps
from support.simulated import check_simulated, feeds_of, lowered

from optdnn.ir.graph import Graph
from optdnn.kernels.builder import TensorView
from optdnn.kernels.pointwise import turned
from optdnn.lowering.assemble import overwritable
from optdnn.ops.binary import CastAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.cuda.launches.plan import CudaStep, parse
from optdnn.types import BF16, FP16, FP32, DType


def moved(shape: tuple[int, ...], perm: tuple[int, ...]) -> Graph:
    """A Transpose that becomes a copy because of the Reshape after it."""
    n = Net()
    x = n.op("Transpose", n.input(*shape), attrs=TransposeAttrs(perm))
    flat = n.op("Reshape", x, n.ints(-1))
    return n.done(n.op("Mul", flat, 2.0), flat)


def converted(shape: tuple[int, ...], perm: tuple[int, ...], dtype: DType, to: DType) -> Graph:
    """A pointwise operator with a conversion, of a tensor in another order."""
    n = Net()
    x = n.op("Transpose", n.input(*shape, dtype=dtype), attrs=TransposeAttrs(perm))
    y = n.op("Cast", n.op("Relu", x), attrs=CastAttrs(to))
    return n.done(n.op("Reshape", y, n.ints(-1)))


def view(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, dtype: DType = FP16) -> TensorView:
    return TensorView(0, offset, shape, strides, dtype)


CASES = [
    ((2, 64, 48, 64), (0, 3, 1, 2)),
    ((4, 64, 1500), (0, 2, 1)),
    ((3, 49, 7, 256), (0, 3, 1, 2)),
    ((512, 2048), (1, 0)),
    ((2, 24, 49, 120), (0, 2, 3, 1)),
]


@needs_compiler
@pytest.mark.parametrize(("shape", "perm"), CASES)
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_tiles(shape: tuple[int, ...], perm: tuple[int, ...], precision: str, tmp_path: Path) -> None:
    graph = moved(shape, perm)
    program = lowered(graph, precision, opt_level=2)
    assert "turned" in [k.function for k in program.kernels]
    check_simulated(graph, precision)
    assert compare_steps(program, feeds_of(graph), 1e-6, tmp_path) >= 1


@needs_compiler
@pytest.mark.parametrize(("dtype", "to"), [(FP16, FP32), (FP32, FP16), (FP32, BF16)])
@pytest.mark.parametrize(("shape", "perm"), CASES[:2])
def test_conversions_and_operators(
    shape: tuple[int, ...], perm: tuple[int, ...], dtype: DType, to: DType, tmp_path: Path
) -> None:
    graph = converted(shape, perm, dtype, to)
    program = lowered(graph, "fp32", opt_level=2)
    assert [k.function for k in program.kernels].count("turned") == 1
    check_simulated(graph, "fp32")
    assert compare_steps(program, feeds_of(graph), 1e-6, tmp_path) == len(program.steps)


@pytest.mark.nvrtc
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_conversion_alone_compiles(precision: str) -> None:
    """fp32 images whose channels become the last axis, in 16 bits. (The processor's compiler would convert by itself.)"""
    n = Net()
    images = n.conv(n.input(64, 16, 28, 28), 64, 1, pads=0)
    program = lowered(n.done(n.conv(images, 8, 1, pads=0)), precision, "cuda:sm_90a")
    kernels = [k for k in program.kernels if k.function == "turned"]
    assert len(kernels) == 2
    for kernel in kernels:
        assert nvrtc.resources(recipe_of(kernel))["turned"].spill_bytes == 0


def combined(*shapes: tuple[int, ...], slot: int = 0, size: tuple[int, ...] = (4, 64, 1500)) -> Graph:
    """A pointwise operator on a transposed tensor and others. ``slot``: of the transposed tensor."""
    n = Net()
    x = n.op("Transpose", n.input(*size), attrs=TransposeAttrs((0, 2, 1)))
    for k, shape in enumerate(shapes):
        other = n.input(*shape, name=f"y{k}")
        x = n.op("Sub", other, x) if slot == k + 1 else n.op("Mul", x, other)
    return n.done(n.op("Reshape", x, n.ints(-1)))


@needs_compiler
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize(
    "graph",
    [
        combined((4, 1500, 64)),
        combined((4, 1500, 64), slot=1),
        combined((1, 1500, 1), (4, 1500, 64)),
        combined((64,), (4, 1, 64), slot=2),
        combined((1,)),
        combined((4, 1500, 61), size=(4, 61, 1500)),
    ],
    ids=["one", "it is the second", "one for a row", "for columns", "a scalar", "odd rows"],
)
def test_other_operands_are_read_where_the_tile_is_written(graph: Graph, precision: str, tmp_path: Path) -> None:
    program = lowered(graph, precision, opt_level=2)
    functions = [k.function for k in program.kernels]
    assert functions.count("turned") == 1
    check_simulated(graph, precision)
    assert compare_steps(program, feeds_of(graph), 1e-6, tmp_path) >= 1


@needs_compiler
@pytest.mark.parametrize("slot", [0, 1])
def test_results_overwrite_the_other_operand(slot: int, tmp_path: Path) -> None:
    """Not the transposed one, which a thread reads in another order than it writes."""
    n = Net()
    x = n.op("Softmax", n.input(4, 64, 1500), attrs=SoftmaxAttrs(1))
    y = n.op("Softmax", n.input(4, 1500, 64, name="y"), attrs=SoftmaxAttrs(-1))
    both = [n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 1))), y]
    z = n.op("Sub", *(reversed(both) if slot else both))
    program = lowered(n.done(n.op("Softmax", z, attrs=SoftmaxAttrs(-1))), "fp32")
    (step,) = [s for s in program.steps if program.kernels[s.params["launch"]["kernel"]].function == "turned"]
    ((out, other),) = overwritable(program, step)
    assert step.inputs.index(other) == 1 - slot
    assert program.buffers[out].offset == program.buffers[other].offset
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(4 * 64 * 1500, np.float32) for _ in range(2)]
    left, right = (
        a.reshape(4, 64, 1500).swapaxes(1, 2) if k == slot else a.reshape(4, 1500, 64) for k, a in enumerate(given)
    )
    want = left - right
    parsed = parse(step, program)
    assert isinstance(parsed, CudaStep)
    HostKernels(program, tmp_path).run(parsed, [*given, given[1 - slot]])
    np.testing.assert_array_equal(given[1 - slot].reshape(want.shape), want)


@needs_compiler
@pytest.mark.parametrize("channels", [150, 21])
def test_the_last_tile_may_read_padding(channels: int, tmp_path: Path) -> None:
    """Scores of 150 classes, whose pixels lie 152 elements apart, become planes."""
    n, side = Net(), 42 if channels > 100 else 112
    graph = n.done(n.op("Softplus", n.conv(n.input(1, 16, side, side), channels, 1, pads=0)))
    program = lowered(graph, "fp16", target="cuda:sm_90a")
    (text,) = [k.generated["generated.cuh"] for k in program.kernels if k.function == "turned"]
    assert f"< {channels})" in text
    check_simulated(graph, "fp16")
    assert compare_steps(program, feeds_of(graph), 1e-6, tmp_path) >= 1


def test_padding_belongs_to_the_rows() -> None:
    planes = view((64, 64, 150), (64, 1, 4096))
    padded = turned.turn_of(view((64, 64, 150), (64 * 152, 152, 1)), planes)
    assert padded is not None
    assert (padded.wide, padded.limit) == (8, 150)
    assert turned.turn_of(view((64, 64, 150), (64 * 150, 150, 1)), planes) is None
    second = turned.turn_of(view((64, 64, 150), (64 * 304, 304, 1), 152), planes)
    assert second is not None
    assert turned.turn_of(view((64, 64, 150), (64 * 304, 304, 1), 160), planes) is None


def test_tiles_leave_enough_threads() -> None:
    small = turned.turn_of(view((512, 1024), (1, 512)), view((512, 1024), (1024, 1)))
    large = turned.turn_of(view((8192, 8192), (1, 8192)), view((8192, 8192), (8192, 1)))
    assert small is not None
    assert large is not None
    assert (small.wide, small.high) == (8, 1)
    assert (large.wide, large.high) == (8, 8)


def to_planes(channels: int, pixels: int) -> turned.Turn:
    """The copy of channels-last pixels to a plane per channel."""
    shape = (channels, pixels)
    found = turned.turn_of(view(shape, (1, channels)), view(shape, (pixels, 1)))
    assert found is not None
    return found


def test_a_warp_writes_whole_lines_and_reads_neighboring_tiles() -> None:
    turn = to_planes(64, 1 << 20)
    assert turn.dims == (1 << 14, 2, 8, 4)
    assert turn.target[2:] == (8, 8 << 20), "8 tiles are 128 bytes of a row of the target"
    assert turn.source[1:] == (32, 8 * 64, 8), (
        "4 tiles are 64 bytes of a row of the source; the next warp reads the rest"
    )


@pytest.mark.parametrize(
    ("channels", "pixels", "dims"),
    [
        (128, 3137, (16, 3137)),  # rows of the target that no access of more than an element divides
        (320, 10000, (20, 2500, 2)),  # ten tiles of eight bytes, the largest divisor up to 16, are less than a line
        (24, 1 << 16, (1024, 3, 32)),  # an odd number of tiles in a row of the source
    ],
)
def test_rows_that_no_warp_fills(channels: int, pixels: int, dims: tuple[int, ...]) -> None:
    assert to_planes(channels, pixels).dims == dims


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (view((512, 512), (512, 1)), view((512, 512), (512, 1))),  # the same order
        (view((16, 512), (1, 16)), view((16, 512), (512, 1))),  # small
        (view((510, 1024), (1, 510)), view((510, 1024), (1024, 1))),  # rows that begin anywhere
        (view((512, 1024), (1, 512), 1), view((512, 1024), (1024, 1))),
        (view((512, 1024), (2, 1024)), view((512, 1024), (1024, 1))),  # no axis is contiguous
    ],
)
def test_other_copies_are_left(source: TensorView, target: TensorView) -> None:
    assert turned.turn_of(source, target) is None


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (view((512, 1024), (1024, 1)), True),
        (view((512, 1), (1, 1)), True),
        (view((1024,), (1,)), True),
        (view((512, 1024), (1, 512)), False),  # transposed, too
        (view((512, 1024), (2048, 2)), False),
    ],
)
def test_others_are_contiguous_where_the_target_is(other: TensorView, found: bool) -> None:
    source, target = view((512, 1024), (1, 512)), view((512, 1024), (1024, 1))
    assert (turned.turn_of(source, target, [other]) is not None) is found


@pytest.mark.parametrize(("dtype", "others", "tile"), [(FP16, 2, (8, 8)), (FP16, 3, (8, 4)), (FP32, 8, (4, 2))])
def test_many_operands_make_tiles_smaller(dtype: DType, others: int, tile: tuple[int, int]) -> None:
    shape = (8192, 8192)
    target, row = view(shape, (8192, 1), dtype=dtype), view((8192, 1), (1, 1), dtype=dtype)
    turn = turned.turn_of(view(shape, (1, 8192), dtype=dtype), target, [target] * others + [row] * 9)
    assert turn is not None
    assert (turn.wide, turn.high) == tile


@pytest.mark.nvrtc
@pytest.mark.parametrize("others", [4, 8])
def test_many_operands_stay_in_registers(others: int) -> None:
    target = view((8192, 8192), (8192, 1))
    turn = turned.turn_of(view((8192, 8192), (1, 8192)), target, [target] * others)
    assert turn is not None
    source, *more = (turned.Operand(k, "f16", "float") for k in range(others + 1))
    lines = [
        "const float r0 = erff(v0);",
        *(f"const float r{k} = r{k - 1} * erff(v{k});" for k in range(1, others + 1)),
    ]
    elements = turned.Elements(source, "f16", tuple(lines), f"r{others}", tuple(more))
    found = nvrtc.resources(turned.launch("sm_90a", turn, elements).recipe)["turned"]
    assert found.spill_bytes == 0
    assert found.registers <= 128


@pytest.mark.nvrtc
@pytest.mark.parametrize("shape", [(8192, 8192), (512, 1024)])
def test_tiles_stay_in_registers(shape: tuple[int, int]) -> None:
    target = view(shape, (shape[1], 1))
    turn = turned.turn_of(view(shape, (1, shape[0])), target)
    assert turn is not None
    found = nvrtc.resources(
        turned.launch("sm_90a", turn, turned.Elements(turned.Operand(0, "f16", "float"), "f16")).recipe
    )["turned"]
    assert found.spill_bytes == 0
    assert found.registers <= 96
