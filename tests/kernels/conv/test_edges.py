"""Depthwise and transposed convolutions with repeated edges of the input (BigVGAN's activations), each in one launch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_launches
from support.on_processor import compare_steps
from support.simulated import check_simulated, feeds_of, kinds, lowered, refusals, tactics
from support.sweep import in_turn

from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs, ConvTransposeAttrs
from optdnn.ops.index import PadAttrs


def padded(
    n: Net, x: Value, begins: tuple[int, ...], ends: tuple[int, ...], mode: str = "edge", axes: bool = False
) -> Value:
    if axes:
        which = range(2, 2 + len(begins))
        return n.op("Pad", x, n.ints(*begins, *ends), None, n.ints(*which), attrs=PadAttrs(mode))
    return n.op("Pad", x, n.ints(0, 0, *begins, 0, 0, *ends), attrs=PadAttrs(mode))


def down(
    begins: tuple[int, ...] = (5,), ends: tuple[int, ...] = (6,), *, channels: int = 16, size: int = 21, taps: int = 12, stride: int = 2,
    pads: int = 0, **more: Any,
) -> Graph:  # fmt: skip
    """A depthwise convolution of the padded tensor."""
    n, axes = Net(), len(begins)
    x = padded(n, n.op("Tanh", n.input(2, channels, *(size,) * axes)), begins, ends, **more)
    w = n.random(channels, 1, *(taps,) * axes)
    attrs = ConvAttrs((stride,) * axes, (pads,) * 2 * axes, (1,) * axes, channels)
    return n.done(n.op("Relu", n.op("Conv", x, w, n.random(channels), attrs=attrs)))


def up(begins: int = 5, ends: int = 5, *, channels: int = 16, taps: int = 12, cut: int = 15, size: int = 11) -> Graph:
    """A transposed depthwise convolution of the padded tensor, cropped, and an activation."""
    n = Net()
    x = padded(n, n.op("Tanh", n.input(2, channels, size)), (begins,), (ends,))
    w = n.random(channels, 1, taps)
    y = n.op("ConvTranspose", x, w, attrs=ConvTransposeAttrs((2,), (0, 0), (1,), (0,), channels))
    long = (size + begins + ends - 1) * 2 + taps
    y = n.op("Slice", y, n.ints(cut), n.ints(long - cut), n.ints(2))
    wave = n.op("Sin", n.op("Mul", y, n.positive(channels, 1)))
    return n.done(n.op("Add", y, n.op("Mul", n.op("Mul", wave, wave), n.positive(channels, 1))))


NETS: dict[str, Callable[[], Graph]] = {
    "down": down,
    "few taps": lambda: down((1,), (2,), taps=3, stride=1),
    "an image": lambda: down((1, 2), (3, 0), taps=3, size=9),
    "by axes": lambda: down(axes=True),
    "zeros around edges": lambda: down(pads=3, stride=1),
    "odd channels": lambda: down(channels=13),
    "edges longer than the tensor": lambda: down((9,), (9,), size=4),
    "up": up,
    "up, one side": lambda: up(0, 4, cut=3),
}


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", NETS)
def test_edges_are_repeated_without_a_launch(name: str, precision: str) -> None:
    program = check_simulated(NETS[name](), precision)
    assert kinds(program).count("EdgePadded") == 1
    assert not {"Pad", "Conv", "ConvTranspose", "Slice"} & set(kinds(program))
    (found,) = tactics(program, "Conv", "ConvTranspose")
    assert found == ("depthwise_transpose_edges" if name.startswith("up") else "depthwise_edges")


@needs_compiler
@pytest.mark.parametrize(("name", "precision", "tolerance"), in_turn(NETS, ("fp16", 1.2e-3), ("fp32", 3e-6)))
def test_the_kernels_on_the_processor(name: str, precision: str, tolerance: float, tmp_path: Path) -> None:
    graph = NETS[name]()
    program = lowered(graph, precision)
    assert "EdgePadded" in kinds(program)
    compare_steps(program, feeds_of(graph), tolerance, tmp_path)


def others(kind: str) -> Graph:
    n = Net()
    x = n.op("Tanh", n.input(2, 16, 21))
    if kind == "channels":
        y = n.op("Pad", x, n.ints(0, 1, 5, 0, 1, 6), attrs=PadAttrs("edge"))
    elif kind == "crop":
        y = padded(n, x, (5,), (-1,))
    else:
        y = padded(n, x, (5,), (6,), "reflect" if kind == "reflect" else "edge")
    channels = 18 if kind == "channels" else 16
    z = n.op("Conv", y, n.random(channels, 1, 12), attrs=ConvAttrs((2,), (0, 0), (1,), channels))
    return n.done(z, *([n.op("Relu", y)] if kind == "read" else []))


@pytest.mark.parametrize(
    ("graph", "tactic", "because"),
    [
        (others("reflect"), "depthwise_edges", "no Pad before it repeats edges"),
        (others("read"), "depthwise_edges", "the padded tensor has other readers"),
        (others("channels"), "depthwise_edges", "it pads images or channels, or crops them"),
        (others("crop"), "depthwise_edges", "it pads images or channels, or crops them"),
        (up(channels=13), "depthwise_transpose_edges", "no two of its channels are neighbors in memory"),
    ],
)
def test_refusals(graph: Graph, tactic: str, because: str) -> None:
    program = lowered(graph, "fp16")
    assert because in refusals(program, tactic)
    assert "EdgePadded" not in kinds(program)


def test_pads_of_all_axes_by_number() -> None:
    n = Net()
    x = n.op("Tanh", n.input(2, 16, 21))
    y = n.op("Pad", x, n.ints(0, 5, 0, 6), None, n.ints(1, -1), attrs=PadAttrs("edge"))
    y = n.op("Conv", y, n.random(16, 1, 12), attrs=ConvAttrs((2,), (0, 0), (1,), 16))
    assert "EdgePadded" in kinds(check_simulated(n.done(y)))


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", NETS)
def test_every_launch_does_what_its_step_means(name: str, precision: str) -> None:
    checked_launches(NETS[name](), precision)
