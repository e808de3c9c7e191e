"""Concatenated slices of a padded tensor: one launch if they slide along the padded axis, otherwise other steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import launch_errors
from support.on_processor import compare_steps
from support.simulated import check_simulated, feeds_of, kinds, lowered
from support.sweep import sweep

from optdnn.ir.graph import Graph, Value
from optdnn.kernels.builder import Builder, unmade
from optdnn.kernels.conv.unfold import Unfold
from optdnn.ops.index import ConcatAttrs, PadAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.cuda.gpu_facts import of_arch


def cut(n: Net, x: Value, start: int, end: int, axis: int, step: int = 1) -> Value:
    return n.op("Slice", x, n.ints(start), n.ints(end), n.ints(axis), n.ints(step))  # type: ignore[no-any-return]


def sliding(
    shape: Sequence[int] = (2, 5, 3, 8), *, axis: int = 1, along: int = 3, pads: tuple[int, int] = (1, 1), count: int = 5, step: int = 1,
    starts: Sequence[int] = (0, 1, 2), padded: tuple[int, ...] = (), value: Any = None, mode: str = "constant", others: bool = False,
    lengths: Sequence[int] = (),
) -> Graph:  # fmt: skip
    """Slices of ``count`` positions from ``starts`` on along ``axis``, concatenated along ``along``, between other operators."""
    n = Net()
    rank = len(shape)
    full = list(padded) or [0] * 2 * rank
    full[axis], full[rank + axis] = pads
    given = [] if value is None else [n.const(value)]
    p = n.op("Pad", n.op("Exp", n.input(*shape)), n.ints(*full), *given, attrs=PadAttrs(mode))
    reach = [(k - 1) * step + 1 for k in (lengths or [count] * len(starts))]
    parts = [cut(n, p, s, s + r, axis, step) for s, r in zip(starts, reach, strict=True)]
    y = n.op("Concat", *parts, attrs=ConcatAttrs(along))
    return n.done(n.op("Tanh", y), *([n.op("Tanh", p)] if others else []))


CASES: dict[str, dict[str, Any]] = {
    "three taps": {},
    "odd sizes": {"shape": (1, 5, 3, 7), "pads": (2, 0)},
    "at the end alone": {"pads": (0, 2)},
    "steps": {"shape": (2, 9, 3, 8), "step": 2, "pads": (1, 0), "starts": (0, 1)},
    "distances": {"shape": (2, 5, 2, 16), "pads": (2, 2), "starts": (0, 2, 4)},
    "backwards": {"starts": (2, 1, 0)},
    "the same twice": {"starts": (2, 2)},
    "nothing but padding": {"shape": (2, 1, 3, 8), "pads": (4, 4), "count": 2, "starts": (0, 2, 4, 6)},
    "before the axis": {"axis": 2, "along": 1, "shape": (2, 3, 6, 8), "count": 6},
    "in groups": {"shape": (2, 4, 3, 2, 4), "along": 4, "count": 4},
    "zeros given": {"value": 0.0},
    "a number": {"value": 1.5},
    "minus zero": {"value": -0.0, "pads": (0, 2)},
    "pixels of three channels": {"shape": (2, 8, 3, 3), "pads": (1, 1), "count": 4, "step": 2},
    "pixels of one channel": {"shape": (1, 9, 5, 1), "pads": (3, 3), "count": 9, "starts": range(7), "value": 0.5},
}


@needs_compiler
@pytest.mark.parametrize("precision", sweep(["fp32", "fp16"], "fp16"))
@pytest.mark.parametrize("name", CASES)
def test_slices_of_a_padded_axis_are_one_launch(name: str, precision: str, tmp_path: Path) -> None:
    graph = sliding(**CASES[name])
    program = check_simulated(graph, precision)
    assert kinds(program).count("Frames") == 1
    assert not {"Pad", "Copy"} & set(kinds(program))
    compare_steps(program, feeds_of(graph), 1e-6 if precision == "fp32" else 2e-3, tmp_path)


def test_other_readers_get_a_padded_copy() -> None:
    found = kinds(check_simulated(sliding(others=True), "fp32"))
    assert (found.count("Frames"), found.count("Pad")) == (1, 1)


@pytest.mark.parametrize(
    "other",
    [
        {"value": np.inf},
        {"mode": "edge"},
        {"padded": (0, 0, 1, 0, 0, 0, 0, 0)},
        {"starts": (0, 1, 3), "count": 4, "shape": (2, 6, 3, 8)},
        {"axis": 3, "along": 3, "count": 8},
        {"pads": (1, -1), "count": 3},
        {"starts": (0, 1), "lengths": (3, 4), "axis": 1, "along": 1},
    ],
)
def test_slices_that_do_not_slide_are_padded_and_copied(other: dict[str, Any]) -> None:
    found = kinds(check_simulated(sliding(**other), "fp32"))
    assert "Frames" not in found
    assert "Pad" in found


def test_slices_that_cut_another_axis_are_copied() -> None:
    n = Net()
    p = n.op("Pad", n.op("Exp", n.input(2, 5, 4)), n.ints(0, 1, 0, 0, 1, 0), attrs=PadAttrs())
    parts = [n.op("Slice", p, n.ints(s, 1), n.ints(s + 5, 3), n.ints(1, 2)) for s in (0, 1)]
    found = kinds(check_simulated(n.done(n.op("Concat", *parts, attrs=ConcatAttrs(2))), "fp32"))
    assert "Frames" not in found
    n = Net()
    p = n.op("Pad", n.op("Exp", n.input(2, 5, 4)), n.ints(0, 1, 0, 0, 1, 0), attrs=PadAttrs())
    parts = [cut(n, p, s, s + 2, 2) for s in (0, 1)]
    assert "Frames" not in kinds(check_simulated(n.done(n.op("Concat", *parts, attrs=ConcatAttrs(2))), "fp32"))


def test_a_number_that_is_not_known_is_padded_with() -> None:
    n = Net()
    p = n.op("Pad", n.op("Exp", n.input(2, 5, 4)), n.ints(0, 1, 0, 0, 1, 0), n.input(name="v"), attrs=PadAttrs())
    parts = [cut(n, p, s, s + 5, 1) for s in (0, 1)]
    program = check_simulated(n.done(n.op("Concat", *parts, attrs=ConcatAttrs(2))), "fp32")
    assert not [s for s in program.steps if s.params.get("op", {}).get("kind") == "Frames"]


@pytest.mark.parametrize("value", [None, 0, -7])
def test_integers_move_as_they_are(value: int | None) -> None:
    n = Net()
    x = n.op("Neg", n.input(2, 5, 3, dtype=np.int32))
    given = [] if value is None else [n.const(value, np.int32)]
    p = n.op("Pad", x, n.ints(0, 1, 0, 0, 1, 0), *given, attrs=PadAttrs())
    parts = [cut(n, p, s, s + 5, 1) for s in range(3)]
    graph = n.done(n.op("Concat", *parts, attrs=ConcatAttrs(2)))
    assert "Frames" in kinds(check_simulated(graph, "fp32"))


def test_sixteen_bytes_are_moved_at_once() -> None:
    """16 bytes if the channels allow it. Else a thread stores the channels of all taps of a pixel, in few accesses."""
    program = lowered(sliding((2, 5, 3, 8)), "fp16")
    (kernel,) = (k for k in program.kernels if k.function == "frames")
    assert "Pack<u16, 8>" in kernel.generated["generated.cuh"]
    program = lowered(sliding((2, 5, 3, 7)), "fp16")
    (kernel,) = (k for k in program.kernels if k.function == "frames")
    text = kernel.generated["generated.cuh"]
    assert "u16 held[21];" in text
    assert [text.count(f"Pack<u16, {n}>") for n in (8, 4, 2, 1)] == [2, 1, 0, 1]
    program = lowered(sliding((2, 25, 3, 7), count=16, starts=range(10)), "fp16")
    (kernel,) = (k for k in program.kernels if k.function == "frames")
    assert "Pack<u16, 1>(p.x + from)" in kernel.generated["generated.cuh"]  # 70 elements would not fit its registers


@pytest.mark.nvrtc
@pytest.mark.parametrize(("channels", "taps"), [(3, 3), (3, 7), (1, 64), (9, 7)])
def test_pixels_stay_in_registers(channels: int, taps: int) -> None:
    graph = sliding((2, taps + 4, 3, channels), count=4, pads=(1, 1), starts=range(taps))
    (kernel,) = (k for k in lowered(graph, "fp16", "cuda:sm_90a").kernels if k.function == "frames")
    found = nvrtc.resources(recipe_of(kernel))["frames"]
    assert found.spill_bytes == 0
    assert found.registers <= 128


@pytest.mark.parametrize(
    ("shape", "constant", "reason"),
    [
        ((2, 5, 3, 8), True, "the tensor that is padded is a constant"),
        ((2, 1 << 14, 1 << 8, 1 << 8), False, "too many elements"),
    ],
)
def test_refusals(shape: tuple[int, ...], constant: bool, reason: str) -> None:
    n = Net()
    x = n.random(*shape) if constant else n.input(*shape)
    p = n.op("Pad", x, n.ints(0, 1, 0, 0, 0, 1, 0, 0), attrs=PadAttrs())
    y = n.op("Concat", *(cut(n, p, s, s + shape[1], 1) for s in range(3)), attrs=ConcatAttrs(3))
    b = Builder(n.done(y), of_arch("sm_90a"))
    if not constant:
        b.place[x] = unmade(np.dtype(np.float32), shape)
    assert reason in str(Unfold().refuse(b, b.graph.op(y.op)))


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_launches_on_a_gpu_agree_with_their_meaning(name: str, precision: str) -> None:
    graph = sliding(**CASES[name])
    assert launch_errors(lowered(graph, precision, "cuda:sm_90a"), graph, "Frames") == [0.0]
