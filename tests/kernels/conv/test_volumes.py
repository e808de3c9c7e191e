"""Convolutions over three axes on GPUs: tactics, numbers of launches, and results of their programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.net import Net, built
from support.on_gpu import checked_launches, checked_program
from support.one_config import only_of
from support.simulated import check_not_taken, check_simulated, feeds_of, kinds, lowered, tactics
from support.spills import check_spills
from support.sweep import sweep, turns

from optdnn.config import BuildOptions
from optdnn.errors import InternalError
from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder
from optdnn.kernels.conv import parts_kernel
from optdnn.kernels.conv.parts import PartsVolume
from optdnn.kernels.conv.parts_kernel import PartsConfig
from optdnn.kernels.conv.problem import Depth, Problem, Source
from optdnn.kernels.conv.volume import VolumeConv, volume_of
from optdnn.lowering.choose import TacticChoice
from optdnn.lowering.cuda import Prepared, lower_cuda
from optdnn.ops.conv import ConvAttrs, ConvTransposeAttrs
from optdnn.ops.index import ConcatAttrs, PadAttrs, SplitAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.optimize import optimize
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.cuda.launches.plan import parse
from optdnn.runtime.program import Program
from optdnn.target_name import TargetName


def volume(
    n: Net, x: Value, filters: int, kernel: tuple[int, int, int], strides: Any = (1, 1, 1), **more: Any
) -> Value:
    """conv + bn + relu, padded to keep sizes."""
    channels = n.dims(x)[1]
    assert isinstance(channels, int)
    group = more.pop("group", 1)
    pads = more.pop("pads", tuple(k // 2 for k in kernel) * 2)
    w = n.random(
        filters, channels // group, *kernel, scale=(channels // group * kernel[0] * kernel[1] * kernel[2]) ** -0.5
    )
    attrs = ConvAttrs(strides, pads, more.pop("dilations", (1, 1, 1)), group)
    return n.op("Relu", n.bn(n.op("Conv", x, w, attrs=attrs)))  # type: ignore[no-any-return]


def block(n: Net, x: Value, filters: int, stride: int) -> Value:
    """A residual block of a 3-D ResNet."""
    y = volume(n, x, filters, (3, 3, 3), (stride,) * 3)
    y = n.bn(n.conv(y, filters, 3))
    if stride > 1:
        x = n.bn(n.conv(x, filters, 1, pads=0, strides=stride))
    return n.op("Relu", n.op("Add", y, x))  # type: ignore[no-any-return]


def r3d(n: Net) -> Value:
    x = volume(n, n.input(1, 3, 5, 22, 18), 16, (3, 7, 7), (1, 2, 2))
    return block(n, block(n, x, 16, 1), 32, 2)


def factored(n: Net) -> Value:
    """R(2+1)D: 45 and 57 channels, whose pixels are padded at the end."""
    x = n.input(2, 3, 5, 18, 14)
    for filters in (45, 57):
        x = volume(n, volume(n, x, filters, (1, 3, 3), (1, 2, 2)), 24, (3, 1, 1), (2, 1, 1))
    return x


def u_net(n: Net) -> Value:
    """One level of a U-Net over volumes. The skip connection is concatenated with the upsampled volume."""
    kept = volume(n, volume(n, n.input(2, 16, 4, 10, 12), 16, (3, 3, 3)), 24, (3, 3, 3))
    y = volume(n, n.max_pool(kept, 2), 32, (3, 3, 3))
    attrs = ConvTransposeAttrs((2, 2, 2), (0,) * 6, (1, 1, 1), (0, 0, 0))
    y = n.op("ConvTranspose", y, n.random(32, 24, 2, 2, 2, scale=0.2), n.random(24), attrs=attrs)
    return volume(n, n.op("Concat", kept, y, attrs=ConcatAttrs(1)), 16, (3, 3, 3))


NETS: dict[str, Callable[[Net], Value]] = {
    "a 3-D ResNet": r3d,
    "frames, then depth": factored,
    "asymmetric": lambda n: volume(n, n.input(3, 16, 7, 9, 5), 24, (3, 2, 3), (2, 1, 2), pads=(2, 1, 0, 0, 0, 1)),
    "dilated": lambda n: volume(n, n.input(2, 8, 9, 11, 7), 16, (3, 3, 3), dilations=(2, 2, 1), pads=(2, 2, 1) * 2),
    "odd channels": lambda n: volume(n, volume(n, n.input(1, 5, 4, 6, 7), 21, (3, 3, 3)), 13, (2, 3, 3)),
    "groups": lambda n: volume(n, n.input(3, 32, 5, 7, 6), 64, (3, 3, 3), group=2),
    "pools between": lambda n: n.average_pool(volume(n, n.max_pool(volume(n, n.input(1, 8, 8, 12, 12), 16, (3, 3, 3))), 24, (3, 3, 3))),
    "a U-Net": u_net,
    "gates": lambda n: n.op("Mul", y := volume(n, n.input(2, 8, 4, 6, 5), 16, (3, 3, 3)), n.op("Sigmoid", n.op("GlobalAveragePool", y))),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), turns(NETS, "fp16", "fp32", "bf16"))
def test_programs_compute_the_network(name: str, precision: str) -> None:
    program = check_simulated(built(NETS[name]), precision)
    assert tactics(program, "Conv")
    assert not {"conv_direct", "depthwise"} & set(tactics(program, "Conv")), "no convolution runs one element a thread"


def test_launches_of_a_network() -> None:
    """Each convolution over three axes is one launch, and no frames are copied. The downsampling convolution is a second source
    of another one. Padding, views and residuals cost no launch."""
    found = kinds(lowered(built(r3d), "fp16"))
    assert found[-5:] == ["Conv", "Conv", "Conv", "ConvSum", "Pointwise"]
    before = kinds(lowered(built(r3d), "fp16", "cuda:sm_80"))
    assert before.count("Frames") == 4, "other kernels than Hopper's read copies of the frames"


def test_depth_alone_is_one_launch() -> None:
    n = Net()
    y = volume(n, volume(n, n.input(2, 16, 5, 6, 7), 32, (1, 3, 3)), 16, (3, 1, 1), (2, 1, 1))
    found = kinds(lowered(n.done(n.op("GlobalAveragePool", y)), "fp16"))
    assert found == ["Copies", "Conv", "Conv", "GlobalAveragePool", "Pointwise"], "the copy is of the input"


def joined(n: Net, starts: list[int]) -> Graph:
    x = n.op("Softmax", n.input(2, 9, 4))
    parts = [n.op("Slice", x, n.ints(s), n.ints(s + 5), n.ints(1), n.ints(1)) for s in starts]
    return n.done(n.op("Concat", *parts, attrs=ConcatAttrs(2)))


@pytest.mark.parametrize(
    ("starts", "launch"),
    [([0, 2, 4], "Copy"), ([0, 1, 4], "Concat"), ([4, 3, 2, 1, 0], "Copy"), ([1], "Copy"), ([0, 0], "Copy")],
)
def test_equally_distant_parts_are_copied_at_once(starts: list[int], launch: str) -> None:
    """One launch concatenates other small parts."""
    found = kinds(check_simulated(joined(Net(), starts), "fp32"))
    assert [kind for kind in found if kind in ("Copy", "Concat")] == [launch]


def test_parts_of_a_concatenated_volume_are_written_in_place() -> None:
    """The parts are the frames of a transposed convolution, and those of the skip connection."""
    program = check_simulated(built(u_net))
    found = kinds(program)
    assert (found[0], found.count("Copies"), found.count("Copy")) == ("Copies", 1, 0), "of the input"
    (joined,) = {s.inputs[0] for s in program.steps[-2:-1]}
    assert sum(joined in s.outputs for s in program.steps) == 3, "a convolution, and one for each tap along depth"


WALKS: dict[str, Callable[[Net], Value]] = {
    "three taps": lambda n: volume(n, n.input(3, 24, 5, 9, 13), 40, (3, 3, 3)),
    "five taps": lambda n: volume(n, n.input(2, 64, 6, 7, 8), 72, (5, 1, 3)),
    "strides": lambda n: volume(n, n.input(2, 72, 9, 15, 13), 136, (3, 3, 3), (2, 2, 3)),
    "dilated": lambda n: volume(n, n.input(2, 32, 8, 11, 14), 64, (3, 3, 3), dilations=(3, 2, 1), pads=(3, 2, 1) * 2),
    "no padding": lambda n: volume(n, n.input(2, 128, 6, 9, 8), 64, (3, 2, 2), pads=(0,) * 6),
    "padding at the end": lambda n: volume(n, n.input(3, 16, 5, 8, 8), 64, (2, 3, 3), pads=(0, 1, 1, 1, 1, 1)),
    "two volumes": lambda n: block(n, n.op("Relu", n.input(2, 16, 6, 12, 14)), 72, 2),
    "deep": lambda n: volume(n, n.input(1, 256, 4, 7, 7), 128, (3, 3, 3)),
    "two frames together": lambda n: volume(n, n.input(4, 96, 8, 48, 48), 24, (3, 3, 3)),
    "four frames together": lambda n: volume(n, n.input(2, 16, 16, 46, 49), 16, (3, 3, 3)),
    "two frames together, strides": lambda n: volume(n, n.input(4, 24, 16, 48, 41), 32, (3, 2, 3), (2, 1, 1)),
    "many": lambda n: volume(n, n.input(4, 64, 8, 28, 28), 64, (3, 3, 3)),
}
"""Convolutions over volumes. Each is one launch."""
STEMS: dict[str, Callable[[Net], Value]] = {
    "a video": lambda n: volume(n, n.input(2, 3, 6, 46, 40), 24, (3, 7, 7), (2, 2, 2)),
    "a scan": lambda n: volume(n, n.input(2, 1, 7, 19, 22), 16, (3, 3, 3), pads=(2, 1, 1, 1, 1, 1)),
    "channels last": lambda n: volume(n, n.op("Transpose", n.input(2, 5, 16, 18, 2), attrs=TransposeAttrs((0, 4, 1, 2, 3))), 16, (2, 4, 4), (1, 2, 2), pads=(1, 1, 1, 0, 1, 1)),
    "dilated, odd columns": lambda n: volume(n, n.input(1, 2, 9, 15, 13), 40, (2, 3, 3), (1, 1, 1), dilations=(3, 2, 2)),
}  # fmt: skip
"""First convolutions, whose volumes have few channels."""


@pytest.mark.parametrize("name", STEMS)
@pytest.mark.parametrize("precision", sweep(["fp16", "bf16"], "fp16"))
def test_a_first_volume_is_read_as_it_comes(name: str, precision: str) -> None:
    """One launch casts, changes the layout, and takes the frames under the taps."""
    program = check_simulated(built(STEMS[name]), precision)
    assert kinds(program)[0] == "ImageConv"
    assert program.steps[0].params["tactic"].startswith("conv3d_stem")
    assert len(program.steps) <= 2, "the second one gives the result in fp32"


FIRST: list[tuple[Callable[[Net], Value], str | None]] = [
    (lambda n: volume(n, n.input(1, 1, 4, 8, 9), 8, (3, 3, 3)), None),
    (lambda n: n.op("Add", n.conv(n.input(1, 2, 4, 8, 9), 8, 3), n.input(1, 8, 4, 8, 9, name="r")), "a tensor is added to its result"),
    (lambda n: volume(n, n.input(1, 5, 6, 20, 20), 16, (3, 3, 3), (1, 2, 2)), "up to 4 channels, not 5"),
    (lambda n: volume(n, n.input(1, 3, 6, 20, 20), 16, (3, 3, 3)), "up to 4 channels, not 9"),
    (lambda n: volume(n, n.input(1, 4, 6, 20, 20), 16, (3, 3, 3), (1, 2, 2), group=2), "not made of the frames"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "reason"), FIRST)
def test_first_volumes_that_other_kernels_read(build: Callable[[Net], Value], reason: str | None) -> None:
    program = lowered(built(build), "fp16")
    (row,) = [t for t in program.meta["tactics"] if t["kind"] == "Conv"]
    why = [r["reason"] for r in row.get("refused", []) if r["tactic"] == "conv3d_stem"]
    assert (row["tactic"] == "conv3d_stem") == (reason is None)
    assert reason is None or reason in why[0]


def by_hand(n: Net, *, known: bool = True, stages: bool = False) -> Value:
    """The frames of a volume as channels of images. ``stages``: they are scaled and shifted first. ``known``: constant weights."""
    padded = n.op("Pad", n.input(1, 5, 9, 9, 3), n.ints(0, 1, 0, 0, 0, 0, 1, 0, 0, 0), attrs=PadAttrs())
    taken = [n.op("Slice", padded, n.ints(k), n.ints(k + 5), n.ints(1)) for k in range(3)]
    joined = n.op("Reshape", n.op("Concat", *taken, attrs=ConcatAttrs(4)), n.ints(5, 9, 9, 9))
    x = n.op("Transpose", joined, attrs=TransposeAttrs((0, 3, 1, 2)))
    if stages:
        x = n.op("Relu", n.op("Add", n.op("Mul", x, n.positive(1, 9, 1, 1)), n.random(1, 9, 1, 1)))
    weights = n.random(16, 9, 3, 3) if known else n.input(16, 9, 3, 3, name="w")
    return n.op("Conv", x, weights, attrs=ConvAttrs((1, 1), (1,) * 4, (1, 1)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("options", "tactic", "reason"),
    [
        ({"known": False}, "conv3d_stem", "it is not an ungrouped convolution with constant weights and without a prologue"),
        ({"stages": True}, "conv3d_stem", "it is not an ungrouped convolution with constant weights and without a prologue"),
        ({"stages": True}, "conv3d_sm90", "other stages come before it"),
    ],
)  # fmt: skip
def test_frames_that_are_taken_by_hand(options: dict[str, Any], tactic: str, reason: str) -> None:
    check_not_taken(built(by_hand, **options), tactic, reason, no_cubins=True)


CONFIGURATIONS = (
    "1x1m1n40s4o1b1", "2x1m1n48s3db1", "1x2m1n56s3o2b1", "1x1m1n56s3k3b1", "1x1m2n96s3o1b1a", "2x1m1n80s3o1b1c2x1", "1x1m1n64s3o1b1c1x2",
    "2x1m2n144s2o1b1", "patch1x1t4x7s2r4o1b1", "patch1x2t3x14s2r5o2b1", "patch1x1t4x8s2wo1b1", "patch2x1t2x7s1r4k3b1", "patch1x1t4x8s2r4db1",
)  # fmt: skip
"""Tiles of both kernels: with and without stores by TMA, clusters that share K or loads, alternating warpgroups."""


def in_configurations(graph: Graph, names: Sequence[str]) -> dict[str, Program]:
    """Programs by configuration: one in which the convolutions of volumes use it, if they can; and the one with the predicted
    best."""
    options, target = BuildOptions(target="cuda:sm_90a", precision="fp16"), "cuda:sm_90a"
    copy, found = graph.copy(), {"": lowered(graph, "fp16", target)}
    optimize(copy, options, target)
    for name in names:
        choices: dict[str, TacticChoice] = {}

        def visit(b: Builder, op: Op, key: str, name: str = name, choices: dict[str, TacticChoice] = choices) -> None:
            if op.kind == "Conv" and VolumeConv().refuse(b, op) is None:
                try:
                    VolumeConv().named(b, op, name)
                except InternalError:
                    return
                choices[key] = TacticChoice("conv3d_sm90", name)

        program = lower_cuda(
            copy, options, facts_for(TargetName.parse(target)), {}, prepared=Prepared(choices), visit=visit
        )
        if choices:
            found[name] = program
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(WALKS, *list(WALKS)[::3]))
def test_a_volume_is_read_where_it_lies(name: str) -> None:
    """After the layout changes of the input there is one launch. Its meaning is a convolution over three axes."""
    program = check_simulated(built(WALKS[name]), "fp16")
    *_, step = [s for s in program.steps if s.params["op"]["kind"] in ("Conv", "ConvSum")]
    assert "Frames" not in kinds(program)
    assert len(step.params["reads"][0][2]) == 5
    assert step.params["tactic"].startswith("conv3d_sm90")
    launch: Any = parse(step, program).launch
    generated = program.kernels[launch.kernel].generated["generated.cuh"]
    assert ("TOGETHER 1\n" not in generated) == ("together" in name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(WALKS, *list(WALKS)[::3]))
def test_a_volume_of_fp32_is_read_where_it_lies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartsVolume, "defer", lambda self, b, op: None)
    program = check_simulated(built(WALKS[name]), "fp32", target="cuda:sm_90a")
    *_, step = [s for s in program.steps if s.params["op"]["kind"] == "WeightsInParts"]
    assert "Frames" not in kinds(program)
    assert len(step.params["reads"][0][2]) == 5
    assert step.params["tactic"].startswith("conv3d_parts_sm90")


@pytest.mark.parametrize(("channels", "tactic"), [(32, "conv3d_parts_sm90"), (3, "conv_fp32")])
def test_volumes_of_fp32_on_the_faster_units(channels: int, tactic: str) -> None:
    program = lowered(built(lambda n: volume(n, n.input(1, channels, 8, 28, 28), 32, (3, 3, 3))), "fp32")
    assert [t["tactic"] for t in program.meta["tactics"] if t["kind"] == "Conv"] == [tactic]


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda n: n.conv(n.input(1, 8, 8, 8), 8), "not made of the frames"),
        (
            lambda n: volume(n, n.input(1, 16, 20, 8, 8), 16, (18, 1, 3), pads=(17, 0, 1, 17, 0, 1)),
            "corners of a volume",
        ),
        (
            lambda n: volume(n, n.input(1, 16, 70, 8, 8), 16, (3, 1, 3), dilations=(16, 1, 1), pads=(16, 0, 1) * 2),
            "pixels apart",
        ),
        (lambda n: volume(n, n.input(1, 16, 30, 8, 8), 16, (3, 1, 3), (9, 1, 1)), "steps of at most 8"),
        (lambda n: volume(n, n.input(1, 32, 5, 7, 6), 64, (3, 3, 3), group=2), "not made of the frames"),
        (lambda n: volume(n, n.input(2, 3, 8, 32, 32), 64, (3, 7, 7)), "after copies of its frames"),
    ],
)
def test_volumes_that_are_copied(build: Callable[[Net], Value], reason: str) -> None:
    program = lowered(built(build), "fp16")
    (row,) = [t for t in program.meta["tactics"] if t["kind"] == "Conv"]
    (why,) = [r["reason"] for r in row["refused"] if r["tactic"] == "conv3d_sm90"]
    assert reason in why
    assert row["tactic"] != "conv3d_sm90"


@pytest.mark.nvrtc
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_kernels_compile(precision: str) -> None:
    assert lowered(built(r3d), precision, "cuda:sm_90a", no_cubins=False).kernels


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "config", [PartsConfig(1, 2, 128, 3), PartsConfig(2, 1, 136, 4), PartsConfig(1, 1, 56, 4, 8)], ids=str
)
def test_kernels_of_fp32_compile_without_spills(config: PartsConfig) -> None:
    source = Source(14, 14, 96, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), depth=Depth(8, 8, 3, first=-1))
    problem = Problem(8, 256, (source,), (("bias",), ("add",), ("gelu",)), "float32", selective=True, equalized=True)
    assert parts_kernel.refuse(problem, config) is None
    assert parts_kernel.refuse(problem, PartsConfig(2, 1, 144, 3)) == "not a tile of this kernel"
    check_spills(parts_kernel.recipe(problem, config), parts_kernel.FUNCTION)


@pytest.mark.hopper
@pytest.mark.parametrize(("name", "turn"), [(name, i % 4) for i, name in enumerate(WALKS | STEMS)])
def test_volumes_on_a_gpu_in_several_configurations(name: str, turn: int) -> None:
    graph = built((WALKS | STEMS)[name])
    for program in in_configurations(graph, CONFIGURATIONS[turn::4]).values():
        checked_program(program, feeds_of(graph), 4e-3)


@pytest.mark.hopper
@pytest.mark.parametrize(
    "config", [PartsConfig(2, 1, 24, 3), PartsConfig(1, 2, 16, 3), PartsConfig(1, 1, 40, 3, 2)], ids=str
)
@pytest.mark.parametrize("name", WALKS)
def test_volumes_of_fp32_on_a_gpu(name: str, config: PartsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    only_of(monkeypatch, PartsVolume, config)
    assert checked_launches(built(WALKS[name]), "fp32", 2e-6)


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", NETS)
def test_launches_on_a_gpu_agree_with_their_meaning(name: str, precision: str) -> None:
    graph = built(NETS[name])
    checked_launches(graph, precision, 4e-3)


def taken_of_a_split(depth: int, slices: Sequence[tuple[int, int, int]]) -> tuple[Graph, Op, Value]:
    """A convolution of concatenated single frames, its operator, and the volume of the frames: the second result of a Split."""
    n = Net()
    _, x = n.op("Split", n.input(2, depth, 6, 5, 8), n.ints(1, 1), attrs=SplitAttrs(0), outputs=2)
    parts = [n.op("Slice", x, n.ints(i), n.ints(end), n.ints(1), n.ints(step)) for i, end, step in slices]
    joined = n.op("Concat", *parts, attrs=ConcatAttrs(4))
    image = n.op("Reshape", joined, n.ints(1, 6, 5, 8 * len(slices)))
    y = n.conv(n.op("Transpose", image, attrs=TransposeAttrs((0, 3, 1, 2))), 8)
    return n.graph, n.graph.op(y), x


def test_the_operator_that_computes_a_volume_is_not_included() -> None:
    graph, op, x = taken_of_a_split(3, [(0, 1, 1), (1, 2, 1), (2, 3, 1)])
    found = volume_of(graph, op)
    assert found is not None
    assert (found.x, found.depth.taps, found.depth.out) == (x, 3, 1)
    assert [o.kind for o in found.ops] == ["Slice"] * 3 + ["Concat", "Reshape", "Transpose"]


@pytest.mark.parametrize(("step", "read"), [(1, True), (-1, False)])
def test_frames_that_are_taken_backwards_are_copied(step: int, read: bool) -> None:
    graph, op, _ = taken_of_a_split(1, [(0, 1 if step > 0 else -9, step)] * 2)
    assert (volume_of(graph, op) is not None) is read
