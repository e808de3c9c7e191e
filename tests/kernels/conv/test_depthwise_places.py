"""Depthwise convolutions of sliced channels, with results in a concatenation, and of sequences.

Tested are the kernel that runs them, its refusals, its source on a processor with emulated warps, and all configurations on a
GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conv_cases import convolve, same
from support.covering import covering
from support.depthwise_runs import TOLERANCE, run
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import launch_errors
from support.simulated import check_simulated, kinds, lowered, tactics
from support.sweep import every, sweep

from optdnn.ir.graph import Graph, Value
from optdnn.kernels.conv import depthwise as tactic
from optdnn.kernels.conv import depthwise_bands_kernel as bands
from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv import depthwise_tma_kernel as tma
from optdnn.kernels.conv.problem import Source
from optdnn.lowering.choose import TacticChoice
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.shape import ReshapeAttrs, TransposeAttrs
from optdnn.runtime.cuda.compile import nvrtc, render
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.measuring.cliffs import cliffs
from optdnn.runtime.cuda.measuring.expected import expected_steps
from optdnn.target_name import TargetName

HOPPER = of_arch("sm_90a")
STAGES: tuple[render.Stage, ...] = (("bias",), ("relu",))


def split(n: Net, x: Value, *sizes: int) -> Any:
    return n.op("Split", x, n.ints(*sizes), attrs=SplitAttrs(1), outputs=len(sizes))


def sliced(
    kernel: int | tuple[int, int] = 7,
    sizes: tuple[int, int] = (40, 24),
    size: tuple[int, int] = (14, 14),
    batch: int = 1,
) -> Graph:
    """A convolution of the last channels of a product. Its result follows the other channels in a concatenation."""
    n = Net()
    high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
    pads = (high // 2, wide // 2, high // 2, wide // 2)
    x = n.conv(n.input(batch, 16, *size), sum(sizes), 1, pads=0)
    x = n.op("Relu", x) if sizes[0] % 8 else x  # otherwise `aligned_parts` would put the other part first
    first, last = split(n, x, *sizes)
    own = n.conv(last, sizes[1], kernel, pads=pads, group=sizes[1], bias=True)
    joined = (own, first) if sizes[0] % 8 else (first, own)  # otherwise `outer_part` would exchange the parts
    return n.done(n.conv(n.op("Concat", *joined, attrs=ConcatAttrs(1)), 16, 1, pads=0))


def sequence(
    kernel: int = 9, *, channels: int = 48, length: int = 37, strides: int = 1, dilations: int = 1, turned: bool = True
) -> Graph:
    """A convolution of a sequence, before and after products over its channels, which are rows or channels."""
    n, reach = Net(), (kernel - 1) * dilations
    x = n.op("Tanh", n.input(2, length, channels)) if turned else n.input(2, channels, length)
    x = (
        n.op("Transpose", n.matmul(x, channels), attrs=TransposeAttrs((0, 2, 1)))
        if turned
        else n.conv(x, channels, 1, pads=0)
    )
    y = n.conv(x, channels, kernel, pads=(reach, 0), strides=strides, dilations=dilations, group=channels, bias=True)
    return n.done(n.conv(n.op("Sigmoid", y), channels, 1, pads=0))


def multiplied() -> Graph:
    n = Net()
    first, last = split(n, n.conv(n.input(2, 16, 9, 9), 48, 1, pads=0), 24, 24)
    own = n.conv(last, 24, group=24, bias=True)
    return n.done(n.conv(n.op("Mul", own, first), 16, 1, pads=0))


def rows(batch: int = 2) -> Graph:
    """Gated convolution over rows of channels, as in MambaOut."""
    n = Net()
    gate, first, last = n.op(
        "Split", n.matmul(n.input(batch, 9, 9, 16), 128), n.ints(64, 40, 24), attrs=SplitAttrs(3), outputs=3
    )
    own = n.conv(n.op("Transpose", last, attrs=TransposeAttrs((0, 3, 1, 2))), 24, 7, pads=3, group=24, bias=True)
    both = n.op("Concat", first, n.op("Transpose", own, attrs=TransposeAttrs((0, 2, 3, 1))), attrs=ConcatAttrs(3))
    return n.done(n.matmul(n.op("Mul", n.op("Sigmoid", gate), both), 16))


def relu_before(kernel: int = 3, *, size: tuple[int, int] = (9, 11), batch: int = 2, channels: int = 24) -> Graph:
    """Xception's: a depthwise convolution reads a sum through a ReLU, and the sum is the next shortcut."""
    n = Net()
    x = n.conv(n.input(batch, 16, *size), channels, 1, pads=0)
    y = n.conv(n.op("Relu", x), channels, kernel, pads=kernel // 2, group=channels, bias=True)
    return n.done(n.conv(n.op("Add", y, x), 16, 1, pads=0))


def heads(
    taps: int = 65, *, features: int = 16, added: bool = True, stage: str = "", filters: tuple[int, int] | None = None
) -> Graph:
    """Nyströmformer's: a convolution along the tokens of each head's values, added to their attention."""
    n, (tokens, count) = Net(), (70, 3)
    own = filters or (taps, 1)

    def split(x: Value) -> Value:
        x = n.op("Reshape", n.matmul(x, count * features), n.ints(2, tokens, count, features), attrs=ReshapeAttrs())
        return n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 1, 3)))

    x = n.input(2, tokens, 48)
    v = split(x)
    pads = (own[0] // 2, own[1] // 2, own[0] // 2, own[1] // 2)
    y = n.conv(v, count, own, pads=pads, group=count, bias=True)
    y = n.op("Add", n.op("Attention", split(x), split(x), v), y) if added else y
    y = n.op(stage, y, n.positive(1, 1, 1, features)) if stage else y
    y = n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 1, 3)))
    return n.done(n.matmul(n.op("Reshape", y, n.ints(2, tokens, -1), attrs=ReshapeAttrs()), 16))


def class_token(kernel: int = 3, *, side: int = 21, channels: int = 96, batch: int = 4) -> Graph:
    """CoaT's positions: a convolution of the tokens after the first one is added to them."""
    n, pixels = Net(), side * side
    x = n.matmul(n.input(batch, pixels + 1, 16), channels)
    first, others = n.op("Split", x, n.ints(1, pixels), attrs=SplitAttrs(1), outputs=2)
    others = n.op("Transpose", others, attrs=TransposeAttrs((0, 2, 1)))
    image = n.op("Reshape", others, n.ints(batch, channels, side, side), attrs=ReshapeAttrs())
    y = n.op("Add", n.conv(image, channels, kernel, pads=kernel // 2, group=channels, bias=True), image)
    rows = n.op("Reshape", y, n.ints(batch, channels, pixels), attrs=ReshapeAttrs())
    rows = n.op("Transpose", rows, attrs=TransposeAttrs((0, 2, 1)))
    return n.done(n.matmul(n.op("Concat", first, rows, attrs=ConcatAttrs(1)), 16))


NETS: dict[str, Callable[[], Graph]] = {
    "after a class token": class_token,
    "7x7 after a class token": lambda: class_token(7),
    "heads of tokens": heads,
    "heads of tokens, alone": lambda: heads(9, added=False),
    "heads of tokens, a stage left": lambda: heads(5, stage="Mul"),
    "3x3 of a ReLU": relu_before,
    "7x7 of a ReLU": lambda: relu_before(7, size=(14, 14)),
    "of a ReLU, large batch": lambda: relu_before(batch=64, size=(28, 28), channels=104),
    "7x7 of a slice": sliced,
    "3x3 of a slice": lambda: sliced(3),
    "of a slice, large batch": lambda: sliced(3, batch=64, size=(28, 28)),
    "1x11 of channels in fours": lambda: sliced((1, 11), (20, 12)),
    "11x1 of channels in fours": lambda: sliced((11, 1), (20, 12)),
    "1x31": lambda: sliced((1, 31), (8, 24), (5, 40)),
    "a slice multiplied by a slice": multiplied,
    "rows": rows,
    "three taps": lambda: sequence(3),
    "four taps of the past": lambda: sequence(4, turned=False),
    "nine taps": sequence,
    "31 taps": lambda: sequence(31, channels=80, length=100),
    "a stride": lambda: sequence(5, strides=2),
    "distances": lambda: sequence(5, dilations=3, turned=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_the_fast_kernels_run_it_where_it_lies(name: str) -> None:
    program = check_simulated(NETS[name](), tolerance=1e-2)
    assert tactic.TiledDepthwise.name in tactics(program, "Conv")
    assert "depthwise" not in tactics(program, "Conv")


def test_a_result_that_is_turned_to_rows_lies_in_their_concatenation() -> None:
    assert kinds(check_simulated(rows(), tolerance=1e-2)).count("Copy") == 1  # of the channels that no kernel computes


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("kernel", [3, 7])
def test_images_after_class_tokens_are_read_added_and_joined_in_place(kernel: int, precision: str) -> None:
    program = check_simulated(class_token(kernel), precision, tolerance=1e-2 if precision == "fp16" else 1e-4)
    assert tactics(program, "Conv") == [tactic.TiledDepthwise.name]
    assert kinds(program).count("Copy") == 1  # of the first tokens


def refusal(graph: Graph, precision: str = "fp16") -> str:
    """The reason for which the fast kernels refuse the depthwise convolution."""
    refused = [r for t in lowered(graph, precision).meta["tactics"] if t["tactic"] == "depthwise" for r in t["refused"]]
    return next(str(r["reason"]) for r in refused if r["tactic"] == tactic.TiledDepthwise.name)


def alone(channels: int, *size: int, kernel: int = 3) -> Graph:
    n = Net()
    x = n.conv(n.input(2, 16, *size), channels, 1, pads=0)
    return n.done(n.conv(n.conv(x, channels, kernel, pads=kernel // 2, group=channels), 16, 1, pads=0))


def plain() -> Graph:
    """A channels-first sequence at the edges of the network."""
    n = Net()
    return n.done(n.conv(n.input(2, 24, 40), 24, 3, group=24))


def shifted() -> Graph:
    """A scale per channel before the convolution."""
    n = Net()
    x = n.conv(n.input(2, 16, 9, 9), 24, 1, pads=0)
    y = n.conv(n.op("Relu", n.op("Mul", x, n.positive(1, 24, 1, 1))), 24, group=24)
    return n.done(n.conv(n.op("Add", y, x), 16, 1, pads=0))


def computed_bias() -> Graph:
    n = Net()
    x, bias = n.conv(n.input(2, 16, 9, 9), 24, 1, pads=0), n.op("Abs", n.input(24, name="bias"))
    attrs = ConvAttrs((1, 1), (1, 1, 1, 1), (1, 1), 24)
    return n.done(n.conv(n.op("Conv", x, n.random(24, 1, 3, 3), bias, attrs=attrs), 16, 1, pads=0))


@pytest.mark.parametrize(
    ("graph", "precision", "reason"),
    [
        (lambda: alone(17, 9, 9), "fp16", "its 17 channels are not a multiple of 4"),
        (lambda: heads(filters=(5, 3)), "fp16", "its 3 channels are not a multiple of 4"),
        (lambda: heads(features=15), "fp16", "its 45 channels are not a multiple of 4"),
        (lambda: sliced(3, (22, 24)), "fp16", "do not begin at multiples of 8 bytes"),
        (plain, "fp16", "its input is not channels-last"),
        (shifted, "fp16", "its prologue is more than a ReLU"),
        (computed_bias, "fp16", "its bias is not constant"),
    ],
)
def test_refusals_say_why(graph: Callable[[], Graph], precision: str, reason: str) -> None:
    assert reason in refusal(graph(), precision)


def test_a_cliff_names_the_refusals_of_the_fast_kernels() -> None:
    program = lowered(sliced(3, (22, 24)))
    (k,) = [i for i, s in enumerate(program.steps) if str(s.params.get("tactic", "")).startswith("depthwise")]
    step = program.steps[k]
    slow = {"step": k, "src": list(step.src), "tactic": step.params["tactic"], "executor": step.executor}
    (found,) = cliffs([{**slow, "us": 30.0, "share": 0.3, "roofline": 0.01}], program)
    assert f"{tactic.TiledDepthwise.name} refuses: the pixels of its input" in str(found["why"])


def test_many_taps_in_a_loop_take_their_instructions() -> None:
    """Measured on an H200: 41 us."""
    n = Net()
    graph = n.done(n.conv(n.input(1, 12, 512, 66), 12, (65, 3), pads=(32, 0, 32, 0), group=12))
    found = expected_steps(lowered(graph, target="cuda:h200"))
    assert [s["us"] for s in found if str(s["tactic"]).startswith("depthwise")] == [pytest.approx(3 * 41, rel=0.1)]


FOURS = depthwise.Problem(2, same(9, 9, 24), STAGES, pitches=(28, 36, 0), unit=4)
DC = depthwise.Config(2, 2, 3, 8, 4)


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        (depthwise, DC, "not read 8 at a time"),
        (tma, tma.Config(2, 2, 3, 5, 5, 8, 2), "multiples of 16 bytes"),
        (bands, bands.Config(1, 4, 4, 1, 1, 2, 3, 2), "multiples of 16 bytes"),
    ],
)
def test_kernels_refuse_pixels_at_eight_bytes(family: Any, config: Any, reason: str) -> None:
    assert reason in (family.refuse(FOURS, config) or "")
    assert family.refuse(replace(FOURS, pitches=(32, 40, 0), unit=8), config) is None
    assert depthwise.refuse(FOURS, replace(DC, vectors=6, lanes=4, strips_x=4)) is None
    assert not tma.candidates(FOURS, HOPPER)
    assert not bands.candidates(replace(FOURS, source=same(9, 9, 24, (7, 7))), HOPPER)


def test_a_row_of_31_vectors_fits_four_channels() -> None:
    wide = depthwise.Problem(1, same(5, 40, 24, (1, 31)))
    assert depthwise.refuse(wide, depthwise.Config(1, 2, 6, 4, 1, 4)) is None
    assert "input vectors" in (depthwise.refuse(wide, depthwise.Config(1, 2, 3, 4, 1, 8)) or "")


SEQUENCE = Source(37, 1, 24, (31, 1), (1, 1), (30, 0, 0, 0))
LONG = Source(37, 1, 24, (65, 1), (1, 1), (32, 0, 32, 0))
PLACED: dict[str, tuple[Any, depthwise.Problem, Any]] = {
    "by threads": (depthwise, depthwise.Problem(2, same(9, 10, 24), STAGES, pitches=(40, 32, 0)), DC),
    "by threads, fp32": (
        depthwise, depthwise.Problem(2, same(9, 10, 24), STAGES, "float32", pitches=(40, 32, 0)), replace(DC, vectors=6, lanes=4, strips_x=4),
    ),
    "31 taps by threads, fp32": (depthwise, depthwise.Problem(2, SEQUENCE, STAGES, "float32"), depthwise.Config(2, 1, 6, 1, 16, 4)),
    "a residual, fp32": (
        depthwise, depthwise.Problem(2, same(9, 10, 24), (*STAGES, ("add",)), "float32"), replace(DC, vectors=6, lanes=4, strips_x=4),
    ),
    "the ReLU of the input, fp32": (
        depthwise, depthwise.Problem(2, same(9, 10, 24), STAGES, "float32", relu=True), replace(DC, vectors=6, lanes=4, strips_x=4),
    ),
    "by threads, in fours": (depthwise, FOURS, replace(DC, vectors=6, lanes=4, strips_x=4)),
    "a sequence by threads": (depthwise, depthwise.Problem(2, SEQUENCE, STAGES, pitches=(64, 24, 0)), depthwise.Config(4, 1, 3, 1, 32)),
    "65 taps by threads": (depthwise, depthwise.Problem(2, LONG, STAGES), depthwise.Config(2, 1, 6, 1, 16, 4)),
    "65 taps by TMA": (tma, depthwise.Problem(2, LONG, STAGES), tma.Config(2, 1, 6, 1, 16, 4, 2)),
    "a residual": (
        depthwise, depthwise.Problem(2, same(9, 10, 24), (*STAGES, ("add",)), pitches=(24, 40, 32)), DC,
    ),
    "images apart": (
        depthwise, depthwise.Problem(3, same(9, 10, 24), (*STAGES, ("add",)), pitches=(32, 24, 40), images_apart=(2912, 2184, 3640)), DC,
    ),
    "images apart, fp32": (
        depthwise, depthwise.Problem(2, same(9, 10, 24), (*STAGES, ("add",)), "float32", images_apart=(2184, 2180, 2184), unit=4),
        replace(DC, vectors=6, lanes=4, strips_x=4),
    ),
    "images apart, by TMA": (
        tma, depthwise.Problem(3, same(9, 10, 24), (*STAGES, ("add",)), images_apart=(2184, 2184, 2200)), tma.Config(2, 2, 3, 5, 5, 8, 2),
    ),
    "images apart, tensor cores": (
        bands, depthwise.Problem(3, same(9, 10, 24, (7, 7)), STAGES, pitches=(40, 0, 0), images_apart=(3640, 2184, 0)),
        bands.Config(1, 4, 4, 1, 1, 2, 3, 2),
    ),
    "the ReLU of the input": (
        depthwise, replace(FOURS, pitches=(24, 24, 0), unit=8, relu=True), DC,
    ),
    "the ReLU of the input, bf16": (
        depthwise, replace(FOURS, pitches=(24, 24, 0), unit=8, relu=True, dtype="bfloat16"), DC,
    ),
    "the ReLU of the input, by TMA": (
        tma, depthwise.Problem(2, same(9, 10, 24), STAGES, relu=True), tma.Config(2, 2, 3, 5, 5, 8, 2),
    ),
    "the ReLU of the input, tensor cores": (
        bands, depthwise.Problem(2, same(9, 10, 24, (7, 7)), STAGES, relu=True), bands.Config(1, 4, 4, 1, 1, 2, 3, 2),
    ),
    "TMA": (tma, depthwise.Problem(2, same(9, 10, 24), STAGES, pitches=(40, 32, 0)), tma.Config(2, 2, 3, 5, 5, 8, 2)),
    "49 taps by TMA, fp32": (  # other kernels take the filter in bands
        tma, depthwise.Problem(2, same(9, 10, 24, (7, 7)), STAGES, "float32", band=4), tma.Config(2, 2, 6, 3, 5, 4, 2),
    ),
    "a sequence by TMA": (tma, depthwise.Problem(2, SEQUENCE, STAGES, pitches=(64, 32, 0)), tma.Config(4, 1, 3, 1, 11, 8, 2)),
    "tensor cores": (
        bands, depthwise.Problem(2, same(9, 10, 24, (7, 7)), STAGES, pitches=(40, 32, 0)), bands.Config(1, 4, 4, 1, 1, 2, 3, 2),
    ),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", sweep(PLACED, *list(PLACED)[::3]))
def test_kernels_compute_where_pixels_have_a_pitch(name: str, tmp_path: Path) -> None:
    family, problem, config = PLACED[name]
    ran = run(family, problem, config, tmp_path)
    read_as = np.maximum(ran.x, 0) if problem.relu else ran.x
    want = np.maximum(convolve(read_as, ran.weight[:, :, 0], problem.source) + ran.bias, 0)
    want += ran.residual if problem.residual else 0
    np.testing.assert_allclose(ran.output, want, rtol=0, atol=TOLERANCE[problem.dtype] * np.abs(want).max())


COMPILED: dict[str, nvrtc.Recipe] = {
    f"{name}, {config}": family.recipe(problem, config)
    for name, (family, problem, _) in PLACED.items()
    for config in family.candidates(problem, HOPPER, 1)
}


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", every(2, covering(COMPILED)))
def test_kernels_compile_without_spills(name: str) -> None:
    (kernel,) = nvrtc.resources(COMPILED[name]).values()
    assert kernel.spill_bytes == 0


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("name", NETS)
def test_every_kernel_on_a_gpu_agrees_with_its_meaning(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = NETS[name]()
    facts = facts_for(TargetName.parse("cuda:sm_90a"))
    asked: list[depthwise.Problem] = []
    offers = tactic._offers
    monkeypatch.setattr(tactic, "_offers", lambda problem, gpu: (asked.append(problem), offers(problem, gpu))[1])
    plain = lowered(graph, precision, "cuda:sm_90a")
    (decision,) = [t for t in plain.meta["tactics"] if t["tactic"] == tactic.TiledDepthwise.name]
    for config in [c for family in (depthwise, tma, bands) for c in family.candidates(asked[-1], facts, 3)]:
        choices = {decision["signature"]: TacticChoice(tactic.TiledDepthwise.name, str(config))}
        program = lowered(graph, precision, "cuda:sm_90a", choices=choices)
        assert max(launch_errors(program, graph, "Conv")) < 2e-3, str(config)
