"""Products over windows read a transposed tensor, whose windows are views; others stay, with the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Value
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import PadAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.window_products import MOST_TERMS, WindowProducts


def taken(n: Net, x: Value, taps: int, axis: int, *, step: int = 1, first: int = 0, order: Any = None) -> Value:
    """The positions within a window, before the positions of the windows."""
    count = (n.dims(x)[axis] - first - taps) // step + 1
    index = first + np.arange(taps)[:, None] + step * np.arange(count)[None, :]
    return n.op(
        "Gather", x, n.const(index if order is None else index[:, order], np.int64), attrs=GatherAttrs(axis=axis)
    )


def dynamic(
    taps: int = 3, *, length: int = 8, heads: int = 2, size: int = 4, padded: bool = True, columns: int = 1, readers: int = 1,
    dtype: Any = np.float64, **options: Any,
) -> Graph:  # fmt: skip
    """A dynamic convolution as exporters write it: the windows of [1, channels, length], and a vector per position and head."""
    n = Net(dtype)
    x = n.op("Tanh", n.input(1, heads * size, length))
    if padded:
        half = taps // 2
        x = n.op("Pad", x, n.ints(0, 0, half, 0, 0, taps - 1 - half), attrs=PadAttrs())
    windows = taken(n, x, taps, 2, **options)
    count = n.dims(windows)[-1]
    rows = n.op("Reshape", windows, n.ints(1, heads * size * taps, count))
    rows = n.op("Transpose", rows, attrs=TransposeAttrs(perm=(0, 2, 1)))
    rows = n.op("Reshape", rows, n.ints(heads * count, size, taps))
    vector = n.op("Softmax", n.input(heads * count, taps, columns, name="v"))
    y = n.op("MatMul", rows, vector)
    return n.done(y, n.op("Relu", rows)) if readers > 1 else n.done(y)


@pytest.mark.parametrize("options", [{}, {"taps": 5}, {"padded": False}, {"step": 2}, {"heads": 1}], ids=str)
def test_windows_are_taken_from_a_turned_tensor(options: dict[str, Any]) -> None:
    graph, _ = check_pass(WindowProducts(), dynamic(**options), changes=1)
    (product,) = graph.of_kind("MatMul")
    assert [op.kind for op in graph.ops()].count("Gather") == 2  # the windows, and the features in their order
    assert graph.of_kind("Pad") or not options.get("padded", True)
    assert product.inputs[0] is not None


def test_windows_of_an_image() -> None:
    n = Net(np.float64)
    x = n.op("Tanh", n.input(1, 6, 5, 7))
    windows = taken(n, taken(n, x, 3, 2), 3, 4)  # [1, 6, 3, 3, 3, 5]: channels, taps, rows, taps, columns
    rows = n.op("Transpose", windows, attrs=TransposeAttrs(perm=(0, 3, 5, 1, 2, 4)))
    rows = n.op("Reshape", rows, n.ints(15, 6, 9))
    check_pass(WindowProducts(), n.done(n.op("MatMul", rows, n.input(15, 9, 1, name="v"))), changes=1)


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"taps": MOST_TERMS + 1, "length": 80}, "more than 64"),
        ({"readers": 2}, "have other readers"),
        ({"first": 1}, "do not begin at equal distances"),
        ({"order": [1, 0, 2, 3, 4, 5, 6, 7]}, "do not begin at equal distances"),
        ({"length": 4096, "size": 64, "heads": 8}, "elements"),
    ],
)
def test_windows_that_stay(options: dict[str, Any], because: str) -> None:
    check_refused(WindowProducts(), dynamic(**options), because=because)


def test_windows_that_leave_places_out() -> None:
    n = Net()
    x = n.op("Tanh", n.input(2, 4, 8))
    first = n.op("Gather", x, n.const(np.asarray(0), np.int64), attrs=GatherAttrs(axis=0))
    rows = n.op("Transpose", taken(n, first, 3, 1), attrs=TransposeAttrs(perm=(2, 0, 1)))
    check_refused(
        WindowProducts(), n.done(n.op("MatMul", rows, n.input(6, 3, 1, name="v"))), because="leave positions out"
    )


def test_others_are_no_candidates() -> None:
    check_untouched(WindowProducts(), dynamic(columns=2))
    n = Net()
    x = n.op("Transpose", n.input(4, 3, 8), attrs=TransposeAttrs(perm=(0, 2, 1)))
    check_untouched(WindowProducts(), n.done(n.op("MatMul", x, n.input(4, 3, 1, name="v"))))  # no windows
    n = Net()
    rows = n.op("Transpose", taken(n, n.op("Tanh", n.input(8, 4)), 3, 0), attrs=TransposeAttrs(perm=(1, 2, 0)))
    check_untouched(WindowProducts(), n.done(n.op("MatMul", rows, n.input(6, 3, 1, name="v"))))  # in order already


def test_a_gpu_copies_no_windows() -> None:
    program = check_simulated(dynamic(9, length=128, heads=6, size=64, dtype=np.float32), "fp16")
    tactics = [s.params["tactic"].split()[0] for s in program.steps]
    assert "matmul_tiled" in tactics
    assert tactics.count("copy") <= 1
