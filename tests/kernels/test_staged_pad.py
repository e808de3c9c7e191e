"""Pads that compute their own operands: the networks that use the kernel, those that do not, and results on the processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_launches
from support.on_processor import compare_graph, compare_steps
from support.simulated import check_simulated, feeds_of, lowered, step_tactics
from support.sweep import turns

from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.index import PadAttrs, SplitAttrs
from optdnn.ops.unary import AlphaAttrs


def padded(n: Net, x: Value, *pads: int, mode: str = "reflect") -> Value:
    return n.op("Pad", x, n.ints(*pads), attrs=PadAttrs(mode))


def conv1d(n: Net, x: Value, channels: int) -> Value:
    """A convolution of width 1."""
    weights = n.random(channels, n.dims(x)[1], 1, scale=0.3)  # type: ignore[arg-type]
    return n.op("Conv", x, weights, attrs=ConvAttrs((1,), (0, 0), (1,), 1))


def codec(channels: int = 16, mode: str = "reflect") -> Graph:
    """A residual unit of an audio codec: its first convolution reads an activated, padded sequence."""
    n = Net()
    x = conv1d(n, n.input(2, 8, 21), channels)
    y = padded(n, n.op("Elu", x, attrs=AlphaAttrs(0.7)), 0, 0, 3, 0, 0, 2, mode=mode)
    y = n.op("Conv", y, n.random(channels, channels, 3, scale=0.2), attrs=ConvAttrs((1,), (0, 0), (2,), 1))
    return n.done(n.op("Softmax", x), n.op("Softmax", y))


def parts() -> Graph:
    """Speaker embeddings: a part of the channels and the result of the part before it are added and padded."""
    n = Net()
    x = n.op("Relu", conv1d(n, n.input(1, 8, 19), 32))
    first, second = n.op("Split", x, n.ints(16, 16), attrs=SplitAttrs(1), outputs=2)
    y = n.op("Relu", conv1d(n, first, 16))
    z = padded(n, n.op("Add", second, y), 0, 0, 4, 0, 0, 4)
    return n.done(n.op("Softmax", y), n.op("Softmax", conv1d(n, z, 16)))


def image(mode: str) -> Graph:
    """Both axes of an image, without channels last; a factor per row; a crop at one end."""
    n = Net()
    y = n.op("Mul", n.op("Tanh", n.input(3, 9, 8)), n.random(9, 1))
    return n.done(n.op("Softmax", padded(n, y, 0, 2, 5, 0, -1, 7, mode=mode)))


CASES: dict[str, Callable[[], Graph]] = {
    "codec": codec,
    "channels that are not aligned": lambda: codec(12),
    "wrapped": lambda: codec(mode="wrap"),
    "parts": parts,
    **{f"image, {mode}": lambda mode=mode: image(mode) for mode in ("reflect", "edge", "wrap")},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", CASES)
def test_meanings(name: str) -> None:
    """One launch computes and pads, and its meaning gives the graph's values."""
    found = step_tactics(check_simulated(CASES[name](), "fp32", tolerance=2e-5))
    assert found.count("pad_staged") == 1
    assert not {"taps", "pointwise"}.intersection(found)


@pytest.mark.parametrize("kind", ["reflect", "edge", "wrap"])
def test_the_indices(kind: str) -> None:
    """Against NumPy's own padding."""
    n = Net()
    x = n.input(2, 5)
    program = lowered(n.done(n.op("Softmax", padded(n, n.op("Exp", x), 0, 3, 1, 4, mode=kind))), "fp32")
    (step,) = (s for s in program.steps if s.params.get("tactic") == "pad_staged")
    tables = {b.name: program.blobs[b.blob] for b in program.buffers if b.blob is not None and ".index" in b.name}
    rows, columns = (np.pad(np.arange(size), ends, mode=kind) for size, ends in ((2, (0, 1)), (5, (3, 4))))  # type: ignore[call-overload]
    assert [t.tolist() for _, t in sorted(tables.items())] == [rows.tolist(), columns.tolist()]
    assert step.params["op"]["attrs"]["arity"] == 2


def shared(n: Net) -> Value:
    y = n.op("Tanh", n.op("Softmax", n.input(2, 8)))
    return n.op("Add", n.op("Softmax", padded(n, y, 0, 1, 0, 1)), n.op("Softmax", padded(n, y, 0, 0, 0, 2)))


def edges(n: Net) -> Value:
    y = padded(n, n.op("Tanh", n.op("Softmax", n.input(1, 8, 20))), 0, 0, 3, 0, 0, 3, mode="edge")
    return n.op("Conv", y, n.random(8, 1, 5), attrs=ConvAttrs((1,), (0, 0), (1,), 8))


REFUSED: dict[str, Callable[[Net], Value]] = {
    "it pads with a constant": lambda n: padded(n, n.op("Cos", n.input(2, 8)), 0, 1, 0, 1, mode="constant"),
    "its operand is not the result of a pointwise operator": lambda n: padded(n, n.input(2, 8), 0, 1, 0, 1),
    "its operand has other readers": shared,
    "the convolution after it may repeat the edges itself": edges,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason: str) -> None:
    n = Net()
    program = lowered(n.done(n.op("Softmax", REFUSED[reason](n))), "fp32")
    found = [t for t in program.meta["tactics"] if t["kind"] == "Pad"]  # type: ignore[union-attr, index, call-overload]
    assert {r["tactic"]: r["reason"] for r in found[0]["refused"]}["pad_staged"] == reason  # type: ignore[union-attr, index, call-overload]


@needs_compiler
@pytest.mark.parametrize(("name", "precision"), turns(CASES, "fp32", "fp16", "bf16"))
def test_kernels(name: str, precision: str, tmp_path: Path) -> None:
    assert compare_graph(CASES[name](), precision, tmp_path)


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_launches_on_a_gpu(name: str, precision: str) -> None:
    checked_launches(CASES[name](), precision)


@needs_compiler
@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap", "constant"])
def test_negative_pads_crop_first(mode: str, tmp_path: Path) -> None:
    n = Net()
    y = padded(n, n.op("Softmax", n.input(4, 9)), -1, 3, 2, -2, mode=mode)
    graph = n.done(n.op("Softmax", y))
    program = lowered(graph, "fp32")
    assert "taps" in step_tactics(program)
    compare_steps(program, feeds_of(graph), 3e-6, tmp_path)
