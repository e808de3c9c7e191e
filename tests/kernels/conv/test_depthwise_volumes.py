"""Depthwise convolutions of volumes, and transposed ones of images, sequences and volumes: the kernels that run them, refusals, the
kernels' source on a processor with emulated warps, and all configurations on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.covering import covering
from support.depthwise_runs import TOLERANCE, run
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import launch_errors
from support.simulated import check_simulated, kinds, lowered
from support.sweep import every, sweep, turns

from optdnn.ir.graph import Graph
from optdnn.kernels.conv import depthwise as tactic
from optdnn.kernels.conv import depthwise_bands_kernel as bands
from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv import depthwise_tma_kernel as tma
from optdnn.kernels.conv.depthwise_transpose import TiledDepthwiseTranspose
from optdnn.kernels.conv.problem import Depth, Source
from optdnn.lowering.choose import TacticChoice
from optdnn.ops.conv import ConvTransposeAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.runtime.cuda.compile import nvrtc, render
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.reference.conv import conv, conv_transpose
from optdnn.target_name import TargetName

HOPPER = of_arch("sm_90a")
STAGES: tuple[render.Stage, ...] = (("bias",), ("relu",))
Pairs = tuple[int, ...]


def volume(
    kernel: Pairs, size: Pairs = (5, 9, 10), *, channels: int = 24, batch: int = 2, added: bool = False, **attrs: Any
) -> Graph:
    """A convolution between two 1x1x1 ones, so that its volumes are channels-last."""
    n = Net()
    x = n.conv(n.input(batch, 8, *size), channels, 1, pads=0)
    pads = attrs.pop("pads", tuple(k // 2 for k in kernel) * 2)
    y = n.op("Relu", n.conv(x, channels, kernel, pads=pads, group=channels, bias=True, **attrs))
    return n.done(n.conv(n.op("Add", y, x) if added else y, 8, 1, pads=0))


def squeezed(kernel: Pairs, size: Pairs = (5, 9, 10), *, channels: int = 24, strides: int = 1) -> Graph:
    """Squeeze-and-excitation of a volume."""
    n = Net()
    x = n.conv(n.input(2, 8, *size), channels, 1, pads=0)
    y = n.conv(x, channels, kernel, pads=tuple(k // 2 for k in kernel) * 2, strides=strides, group=channels, bias=True)
    means = n.op("Relu", n.conv(n.op("GlobalAveragePool", y), 8, 1, pads=0, bias=True))
    gate = n.op("Sigmoid", n.conv(means, channels, 1, pads=0, bias=True))
    return n.done(n.conv(n.op("Mul", y, gate), 8, 1, pads=0))


def transposed(
    kernel: Pairs, strides: Pairs, pads: Pairs, size: Pairs = (4, 5), extra: Pairs = (), *, channels: int = 24, auto_pad: str = "NOTSET"
) -> Graph:  # fmt: skip
    """A transposed convolution between two 1x1 ones."""
    n = Net()
    x, rank = n.conv(n.input(2, 8, *size), channels, 1, pads=0), len(kernel)
    attrs = ConvTransposeAttrs(strides, pads, (1,) * rank, extra or (0,) * rank, channels, auto_pad=auto_pad)
    y = n.op("ConvTranspose", x, n.random(channels, 1, *kernel), n.random(channels), attrs=attrs)
    return n.done(n.conv(n.op("Relu", y), 8, 1, pads=0))


VOLUMES: dict[str, Callable[[], Graph]] = {
    "3x3x3": lambda: volume((3, 3, 3)),
    "3x3x3, with a residual": lambda: volume((3, 3, 3), added=True),
    "5x5x5": lambda: volume((5, 5, 5), channels=40),
    "7x7x7": lambda: volume((7, 7, 7), channels=16),
    "7x7x7, larger": lambda: volume((7, 7, 7), (11, 16, 17), channels=16, batch=1),
    "of even sizes": lambda: volume((2, 4, 2), pads=(0, 2, 1, 1, 1, 0)),
    "strides": lambda: volume((3, 3, 3), strides=2),
    "5x5x5 by 2": lambda: volume((5, 5, 5), strides=2, pads=2),
    "7x7x7 by 2, few results": lambda: volume((7, 7, 7), (6, 6, 6), channels=64, strides=2, pads=3),
    "holes": lambda: volume((3, 3, 3), dilations=2, pads=2),
    "no taps along the columns": lambda: volume((3, 3, 1), pads=(1, 1, 0, 1, 1, 0)),
    "channels in fours": lambda: volume((3, 3, 3), channels=12),
}
TRANSPOSED: dict[str, Callable[[], Graph]] = {
    "4x4 by 2": lambda: transposed((4, 4), (2, 2), (1, 1, 1, 1)),
    "3x3 by 2, output padding": lambda: transposed((3, 3), (2, 2), (1, 1, 1, 1), (6, 7), (1, 1)),
    "8x8 by 4": lambda: transposed((8, 8), (4, 4), (2, 2, 2, 2)),
    "2x2 by 2": lambda: transposed((2, 2), (2, 2), (0, 0, 0, 0)),
    "2x2 by 3": lambda: transposed((2, 2), (3, 3), (1, 0, 0, 1), (4, 5), (2, 0)),
    "5x3 by 1 and 2": lambda: transposed((5, 3), (1, 2), (2, 1, 2, 1)),
    "3x3 by 1": lambda: transposed((3, 3), (1, 1), (1, 1, 1, 1)),
    "more pads than taps": lambda: transposed((3, 3), (2, 2), (3, 4, 3, 2), (7, 8)),
    "same": lambda: transposed((4, 5), (2, 2), (0, 0, 0, 0), auto_pad="SAME_UPPER"),
    "a sequence": lambda: transposed((4,), (2,), (1, 1), (9,)),
    "7x7x7 by 2": lambda: transposed((7, 7, 7), (2, 2, 2), (3, 3, 3, 3, 3, 3), (3, 4, 5), channels=16),
    "a volume by 1, 2 and 2": lambda: transposed((3, 4, 4), (1, 2, 2), (1, 1, 1, 1, 1, 1), (3, 4, 5)),
    "a volume by 3": lambda: transposed((3, 3, 3), (3, 3, 3), (1, 0, 1, 0, 2, 1), (3, 4, 5), (1, 2, 0)),
}


SQUEEZED: dict[str, Callable[[], Graph]] = {
    "squeezed": lambda: squeezed((3, 3, 3)),
    "squeezed, strides": lambda: squeezed((3, 3, 3), (6, 12, 12), channels=40, strides=2),
    "squeezed, 5x5x5": lambda: squeezed((5, 5, 5), (7, 20, 20), channels=16),
}


def image(kernel: Pairs, size: Pairs, *, channels: int = 24, **attrs: Any) -> Graph:
    return volume(kernel, size, channels=channels, **attrs)


LARGE_FILTERS: dict[str, Callable[[], Graph]] = {
    "13x13": lambda: image((13, 13), (14, 15)),
    "31x31": lambda: image((31, 31), (28, 20), channels=16),
    "51x5": lambda: image((51, 5), (20, 20)),
    "5x51": lambda: image((5, 51), (20, 20)),
    "13x13 by 2, with a residual": lambda: image((13, 13), (20, 21), strides=2),
    "13x13, holes": lambda: image((13, 13), (20, 20), dilations=2, pads=12),
    "a line of 200 taps": lambda: image((200,), (300,), pads=(199, 0)),
    "7x13x13": lambda: image((3, 13, 13), (4, 9, 9), channels=16),
}


def chosen(program: Any) -> set[str]:
    return {t["tactic"] for t in program.meta["tactics"] if "depthwise" in t["tactic"]}


@pytest.mark.parametrize(("name", "precision"), turns(VOLUMES, "fp16", "fp32"))
def test_volumes_run_by_tiles(name: str, precision: str) -> None:
    program = check_simulated(VOLUMES[name](), precision, tolerance=1e-2)
    assert chosen(program) == {tactic.TiledDepthwise.name}
    assert "Conv" in kinds(program)


@pytest.mark.parametrize(("name", "precision"), turns(LARGE_FILTERS, "fp16", "fp32"))
def test_bands_of_large_filters_follow_one_another(name: str, precision: str) -> None:
    program = check_simulated(LARGE_FILTERS[name](), precision, tolerance=1e-2)
    assert chosen(program) == {"depthwise" if name == "5x51" else tactic.TiledDepthwise.name}


def test_bands_waste_few_rows() -> None:
    assert depthwise.rows_at_a_time((7, 7), 2) == 0
    assert depthwise.rows_at_a_time((13, 13), 2) == 3
    assert depthwise.rows_at_a_time((31, 31), 2) == 1
    assert depthwise.rows_at_a_time((7, 7), 4) == 4
    assert depthwise.rows_at_a_time((5, 51), 4) == 0
    packed = depthwise.pack_weights(np.ones((8, 1, 2, 7, 3), np.float32), 4)
    assert packed.shape == (2 * 8 * 3, 8)
    assert (packed.reshape(2, 8, 3, 8)[:, 7] == 0).all()


@pytest.mark.parametrize(("name", "precision"), turns(TRANSPOSED, "fp16", "fp32"))
def test_transposed_ones_run_by_tiles(name: str, precision: str) -> None:
    program = check_simulated(TRANSPOSED[name](), precision, tolerance=1e-2)
    wide = precision == "fp32" and name in ("8x8 by 4", "7x7x7 by 2")
    assert chosen(program) == {"depthwise_transpose" if wide else TiledDepthwiseTranspose.name}
    assert "ConvTranspose" in kinds(program)


@pytest.mark.parametrize("name", SQUEEZED)
def test_the_means_of_a_volume_take_no_launch(name: str) -> None:
    program = check_simulated(SQUEEZED[name](), tolerance=1e-2)
    found = kinds(program)
    assert (found.count("ConvSqueeze"), found.count("ExcitationGate")) == (1, 1)
    assert not {"GlobalAveragePool", "SqueezeFinish"} & set(found)


def test_means_with_another_reader_have_a_launch_that_adds_sums() -> None:
    n = Net()
    x = n.conv(n.input(2, 8, 5, 9, 10), 24, 1, pads=0)
    y = n.conv(x, 24, 3, group=24)
    found = kinds(check_simulated(n.done(n.conv(y, 8, 1, pads=0), n.op("GlobalAveragePool", y)), tolerance=1e-2))
    assert (found.count("ConvSqueeze"), found.count("SqueezeFinish")) == (1, 1)


def of_first_frames() -> Graph:
    """Some frames of a volume: between two volumes there are others."""
    n = Net()
    x = n.conv(n.input(2, 8, 6, 5, 5), 24, 1, pads=0)
    x = n.op("Slice", x, n.ints(0), n.ints(5), n.ints(2), n.ints(1))
    return n.done(n.conv(n.conv(x, 24, 3, group=24), 8, 1, pads=0))


def of_heads(first: int = 0) -> Graph:
    """Volumes that are heads of tokens, interleaved in memory, after a class token; the results go behind it (MViT). ``first``: of each
    token's features."""
    n = Net()
    rows = n.op("MatMul", n.input(1, 61, 32), n.random(32, 56 + first))
    rows = n.op("Slice", rows, n.ints(first), n.ints(56 + first), n.ints(2), n.ints(1))
    heads = n.transposed(n.op("Reshape", rows, n.ints(1, 61, 2, 28)), 0, 2, 1, 3)
    token, others = (n.op("Slice", heads, n.ints(a), n.ints(b), n.ints(2), n.ints(1)) for a, b in ((0, 1), (1, 61)))
    volumes = n.op("Reshape", n.transposed(others, 0, 1, 3, 2), n.ints(2, 28, 3, 4, 5))
    y = n.op("Reshape", n.conv(volumes, 28, 3, pads=1, group=28), n.ints(1, 2, 28, 60))
    return n.done(n.op("Concat", token, n.transposed(y, 0, 1, 3, 2), attrs=ConcatAttrs(2)))


def unaligned() -> Graph:
    return of_heads(2)


@pytest.mark.parametrize("graph", [of_first_frames, of_heads])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_volumes_may_have_gaps_between_them(graph: Callable[[], Graph], precision: str) -> None:
    program = check_simulated(graph(), precision, tolerance=1e-2)
    assert chosen(program) == {tactic.TiledDepthwise.name}


def with_holes() -> Graph:
    n = Net()
    x = n.conv(n.input(2, 8, 4, 5), 24, 1, pads=0)
    attrs = ConvTransposeAttrs((2, 2), (1, 1, 1, 1), (2, 1), (0, 0), 24)
    return n.done(n.conv(n.op("ConvTranspose", x, n.random(24, 1, 3, 3), attrs=attrs), 8, 1, pads=0))


def cut() -> Graph:
    """Negative pads: zeros around the result."""
    n = Net()
    x = n.conv(n.input(2, 8, 4, 5), 24, 1, pads=0)
    attrs = ConvTransposeAttrs((2, 2), (-1, 1, 1, 1), (1, 1), (0, 0), 24)
    return n.done(n.conv(n.op("ConvTranspose", x, n.random(24, 1, 3, 3), attrs=attrs), 8, 1, pads=0))


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (unaligned, "do not begin at multiples of 8 bytes"),
        (lambda: image((1, 131), (3, 140)), "a row of its filter has 131 taps, more than 128"),
        (with_holes, "its filter has holes"),
        (cut, "its pads are negative"),
        (lambda: transposed((4, 4), (2, 2), (1, 1, 1, 1), channels=18), "its 18 channels are not a multiple of 4"),
    ],
)
def test_refusals_say_why(graph: Callable[[], Graph], reason: str) -> None:
    found = [
        str(r["reason"])
        for t in lowered(graph(), "fp16").meta["tactics"]
        for r in t["refused"]
        if r["tactic"] in (tactic.TiledDepthwise.name, TiledDepthwiseTranspose.name)
    ]
    assert any(reason in x for x in found), found


DEPTH = Depth(5, 5, 3, 1, -1)
VOLUME = depthwise.Problem(10, Source(9, 10, 16, (3, 3), (1, 1), (1, 1, 1, 1), depth=DEPTH), STAGES)
LARGE = replace(VOLUME, source=replace(VOLUME.source, kernel=(5, 5), padding=(2, 2, 2, 2), depth=Depth(5, 5, 5, 1, -2)))
STRIDED = replace(VOLUME, batch=6, source=replace(VOLUME.source, stride=(2, 2), depth=Depth(5, 3, 3, 2, -1)))
INTERLEAVED = replace(VOLUME, pitches=(32, 32, 0), gaps=(16 - 5 * 90 * 32,) * 2 + (0,))
HOLES = replace(
    VOLUME,
    batch=6,
    source=replace(VOLUME.source, dilation=(2, 2), padding=(2, 2, 2, 2), depth=Depth(5, 3, 3, 1, -1, 2)),
)
GROWN = depthwise.Problem(2, Source(5, 6, 16, (4, 4), (2, 2), (1, 1, 1, 1)), STAGES, grown=(10, 12))
ODD = depthwise.Problem(2, Source(5, 6, 16, (5, 3), (3, 2), (2, 0, 0, 1)), STAGES, grown=(15, 12))
GROWN_VOLUME = depthwise.Problem(
    14, Source(4, 5, 16, (5, 5), (2, 2), (2, 2, 2, 2), depth=Depth(4, 7, 5, 2, -2)), STAGES, grown=(7, 9)
)
WIDE = depthwise.Problem(2, Source(9, 10, 16, (13, 13), (1, 1), (6, 6, 6, 6)), STAGES, band=3)
HALF = replace(WIDE, source=replace(WIDE.source, stride=(2, 2), dilation=(1, 2), padding=(6, 12, 6, 12)))
TILE = depthwise.Config(2, 2, 2, 4, 4)
FOURS = replace(TILE, vectors=4, lanes=4, strips_y=2)
FRAMES = bands.Config(1, 4, 2, 2, 1, 2, 2, 2)
SOURCES: dict[str, tuple[Any, depthwise.Problem, Any]] = {
    "a volume": (depthwise, VOLUME, TILE),
    "a volume, threads that share frames": (depthwise, VOLUME, replace(TILE, sharers=3)),
    "a volume in fp32": (
        depthwise,
        replace(VOLUME, dtype="float32", pitches=(20, 16, 0)),
        replace(TILE, vectors=4, lanes=4),
    ),
    "a volume, with a residual": (depthwise, replace(VOLUME, epilogue=(*STAGES, ("add",))), replace(TILE, sharers=2)),
    "a volume with strides": (depthwise, STRIDED, TILE),
    "volumes apart": (
        depthwise,
        replace(STRIDED, epilogue=(*STAGES, ("add",)), gaps=(48, 32, 16)),
        replace(TILE, sharers=2),
    ),
    "interleaved volumes": (depthwise, INTERLEAVED, TILE),
    "a volume with sums": (depthwise, replace(VOLUME, squeeze=True), TILE),
    "a volume with sums, shared frames": (depthwise, replace(STRIDED, squeeze=True), replace(TILE, sharers=2)),
    "a volume with sums on tensor cores": (bands, replace(VOLUME, squeeze=True), FRAMES),
    "a volume with holes": (depthwise, HOLES, replace(TILE, sharers=2)),
    "a volume on tensor cores": (bands, VOLUME, FRAMES),
    "5x5x5 on tensor cores": (
        bands,
        replace(LARGE, pitches=(32, 24, 0)),
        replace(FRAMES, images=4, groups=2, grid_y=3),
    ),
    "single frames on tensor cores": (bands, LARGE, replace(FRAMES, images=1, groups=4, across=4, rows=2, grid_y=1)),
    "a large filter": (depthwise, WIDE, replace(FOURS, sharers=3)),
    "a large filter by 2 with holes": (depthwise, HALF, replace(FOURS, tile_w=1, vectors=2)),
    "a large filter in fp32": (
        depthwise,
        replace(WIDE, dtype="float32", band=2),
        replace(FOURS, tile_w=1, strips_y=2, sharers=7),
    ),
    "a volume in bands": (depthwise, replace(VOLUME, band=2), replace(TILE, sharers=6)),
    "transposed": (depthwise, GROWN, TILE),
    "transposed, odd": (depthwise, ODD, replace(TILE, tile_h=3, strips_y=2, lanes=4, vectors=4)),
    "a transposed volume": (depthwise, GROWN_VOLUME, TILE),
    "a transposed volume, shared frames": (depthwise, GROWN_VOLUME, replace(TILE, sharers=3)),
}


def expected(problem: depthwise.Problem, x: Any, weight: Any, bias: Any) -> Any:
    """The result in fp32: frames (or images), rows, columns, channels. ``x``: likewise."""
    s, depth = problem.source, problem.source.depth or Depth(1, 1, 1)
    x = np.moveaxis(x.reshape(-1, depth.size, *x.shape[1:]), -1, 1)
    strides, dilations = (depth.stride, *s.stride), (depth.dilation, *s.dilation)
    (top, left, bottom, right), sizes = s.padding, (depth.out, *problem.out_size)
    begins, ends = (-depth.first, top, left), (depth.pads[1], bottom, right)
    more: dict[str, Any] = {"strides": strides, "dilations": dilations, "group": s.channels}
    if problem.grown is None:
        (y,) = conv(x, weight, bias, pads=(*begins, *ends), **more)
    else:
        axes = zip(sizes, x.shape[2:], weight.shape[2:], strides, begins, strict=True)
        ends = tuple((n - 1) * stride + k - begin - out for out, n, k, stride, begin in axes)
        (y,) = conv_transpose(x, weight, bias, pads=(*begins, *ends), output_padding=(0, 0, 0), **more)
    return np.maximum(np.moveaxis(y, 1, -1), 0).reshape(problem.batch, *problem.out_size, s.channels)


@needs_compiler
@pytest.mark.parametrize("name", sweep(SOURCES, *list(SOURCES)[::3]))
def test_kernels_compute_what_they_mean(name: str, tmp_path: Path) -> None:
    family, problem, config = SOURCES[name]
    ran = run(family, problem, config, tmp_path)
    want = expected(problem, ran.x, ran.weight, ran.bias)
    want = want + ran.residual if problem.residual else want
    np.testing.assert_allclose(ran.output, want, rtol=0, atol=TOLERANCE[problem.dtype] * np.abs(want).max())
    if problem.squeeze:
        sums = ran.output.reshape(len(ran.sums), -1, problem.channels).sum(1)
        np.testing.assert_allclose(ran.sums.sum(1), sums, rtol=0, atol=1e-3 * np.abs(sums).max())


@pytest.mark.parametrize(
    ("family", "problem", "config", "reason"),
    [
        (depthwise, VOLUME, replace(TILE, sharers=4), "4 threads cannot share 3 steps"),
        (depthwise, GROWN_VOLUME, replace(TILE, tile_h=1), "do not begin at multiples of the stride"),
        (depthwise, replace(GROWN, squeeze=True), TILE, "without means"),
        (
            depthwise,
            replace(GROWN, dtype="int8", out="int8"),
            TILE,
            "volumes, transposed convolutions and filters in bands are of floats",
        ),
        (bands, STRIDED, FRAMES, "have a stride"),
        (
            bands,
            replace(VOLUME, source=replace(VOLUME.source, depth=Depth(5, 3, 3, 2, -1))),
            FRAMES,
            "one after another",
        ),
        (bands, GROWN, FRAMES, "transposed"),
        (bands, replace(VOLUME, gaps=(16, 0, 0)), FRAMES, "its volumes do not follow one another in memory"),
        (tma, VOLUME, tma.Config(2, 2, 2, 4, 4), "it is for images"),
        (tma, GROWN, tma.Config(2, 2, 2, 4, 4), "not transposed"),
    ],
)
def test_kernels_refuse_what_they_cannot_run(family: Any, problem: depthwise.Problem, config: Any, reason: str) -> None:
    assert reason in (family.refuse(problem, config) or "")


def test_a_transposed_result_reads_only_the_taps_that_meet_it() -> None:
    assert depthwise.reach(GROWN, (2, 2)) == (3, 3)
    assert depthwise.reach(ODD, (3, 2)) == (2, 2)
    assert GROWN_VOLUME.frames == 3
    assert VOLUME.frames == 3
    assert replace(VOLUME, source=replace(VOLUME.source, depth=None)).frames == 1


COMPILED: dict[str, nvrtc.Recipe] = {
    f"{name}, {config}": family.recipe(problem, config)
    for name, (family, problem, own) in SOURCES.items()
    for config in [own, *family.candidates(problem, HOPPER, 1)]
}


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", every(2, covering(COMPILED)))
def test_kernels_compile_without_spills(name: str) -> None:
    (kernel,) = nvrtc.resources(COMPILED[name]).values()
    assert kernel.spill_bytes == 0


@pytest.mark.hopper
@pytest.mark.parametrize(
    "name", [*VOLUMES, *TRANSPOSED, *SQUEEZED, *(name for name in LARGE_FILTERS if name != "5x51")]
)
def test_every_kernel_on_a_gpu_agrees_with_its_meaning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph: Graph = {**VOLUMES, **TRANSPOSED, **SQUEEZED, **LARGE_FILTERS}[name]()
    facts = facts_for(TargetName.parse("cuda:sm_90a"))
    asked: list[depthwise.Problem] = []
    offers = tactic._offers
    monkeypatch.setattr(tactic, "_offers", lambda problem, gpu: (asked.append(problem), offers(problem, gpu))[1])
    plain = lowered(graph, "fp16", "cuda:sm_90a")
    own = (tactic.TiledDepthwise.name, TiledDepthwiseTranspose.name)
    (decision,) = [t for t in plain.meta["tactics"] if t["tactic"] in own]
    for config in [c for family in (depthwise, bands) for c in family.candidates(asked[-1], facts, 6)]:
        choices = {decision["signature"]: TacticChoice(decision["tactic"], str(config))}
        program = lowered(graph, "fp16", "cuda:sm_90a", choices=choices)
        assert max(launch_errors(program, graph, decision["kind"], "ConvSqueeze", "ExcitationGate")) < 2e-3, str(config)
