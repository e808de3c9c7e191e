"""window_sums: sums of products with shifted images become one sum over the windows of the image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds
from support.sweep import all_pairs

from optdnn.dim import symbol
from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Graph, Value
from optdnn.ops.gather import ScatterNDAttrs
from optdnn.ops.index import ConcatAttrs, PadAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.window_sums import WindowSums

PASS = WindowSums()
SIZE = 5


def taken(n: Net, x: Value, begin: Sequence[int], size: int = SIZE) -> Value:
    """A box of an image, by one Slice per axis."""
    for axis, start in zip((2, 3), begin, strict=True):
        x = n.op("Slice", x, n.ints(start), n.ints(start + size), n.ints(axis))
    return x


def volume(
    shifts: Sequence[tuple[int, int]],
    *,
    kind: str = "ReduceMean",
    stacked: bool = False,
    turned: bool = False,
    between: int | None = None,
) -> Graph:
    """Correlations of an image with another one at these shifts. ``stacked``: sums without their axis, stacked again; ``turned``:
    the shifted image comes first; ``between``: the position of another part."""
    n = Net()
    x, y = n.input(2, 8, SIZE, SIZE), n.input(2, 8, SIZE + 4, SIZE + 4, name="y")
    parts = []
    for begin in shifts:
        shifted = taken(n, y, begin)
        total = n.op(
            kind, n.op("Mul", *((shifted, x) if turned else (x, shifted))), n.ints(1), attrs=ReduceAttrs(not stacked)
        )
        parts.append(n.op("Unsqueeze", total, n.ints(1)) if stacked else total)
    if between is not None:
        parts.insert(between, x)
    return n.done(n.op("Concat", *parts, attrs=ConcatAttrs(1)))


ALL = [(i, j) for i in range(3) for j in range(4)]


@pytest.mark.parametrize(
    "shifts",
    [
        ALL,
        [(0, j) for j in range(5)],
        [(1, 4 - j) for j in range(4)],
        [(2 * i, 2 * j + 1) for i in range(2) for j in range(2)],
    ],
)
@pytest.mark.parametrize(("kind", "stacked", "turned"), [("ReduceMean", False, True), ("ReduceSum", True, False)])
def test_shifts_are_windows(shifts: list[tuple[int, int]], kind: str, stacked: bool, turned: bool) -> None:
    graph, _ = check_pass(PASS, volume(shifts, kind=kind, stacked=stacked, turned=turned), changes=1)
    assert len(graph.of_kind(kind)) == len(graph.of_kind("Mul")) == 1
    assert not graph.of_kind("Concat", "Slice")


@pytest.mark.parametrize("place", [0, len(ALL)])
def test_other_parts_stay_beside_them(place: int) -> None:
    graph, _ = check_pass(PASS, volume(ALL, between=place), changes=1)
    (joined,) = graph.of_kind("Concat")
    assert len(joined.inputs) == 2


def test_zeros_around_each_shift_are_added_once() -> None:
    """Stereo: disparities to the left. Each part has its own Pad, except the first one."""
    n = Net()
    x, y = n.input(2, 8, SIZE, SIZE), n.input(2, 8, SIZE, SIZE, name="y")
    parts = []
    for k in range(1, 5):
        moved = n.op("Pad", y, n.ints(0, 0, 0, k, 0, 0, 0, 0), attrs=PadAttrs())
        moved = n.op("Slice", moved, n.ints(0), n.ints(SIZE), n.ints(3))
        parts.append(n.op("ReduceSum", n.op("Mul", x, moved), n.ints(1), attrs=ReduceAttrs()))
    graph, _ = check_pass(PASS, n.done(n.op("Concat", *parts, attrs=ConcatAttrs(1))), changes=1)
    (pad,) = graph.of_kind("Pad")
    assert graph.constant_value(pad.inputs[1]).tolist() == [0, 0, 0, 4, 0, 0, 0, 0]  # type: ignore[union-attr]


def stereo(
    shifts: Sequence[tuple[int, int]], *, groups: int | None = None, kind: str = "ReduceMean", turned: bool = False, off: int = 0,
    filler: float = 0.0, more: int = 0, beside: tuple[int, int] = (0, 0),
) -> Graph:  # fmt: skip
    """Two images, cut to the part that they share at each shift, in a volume of zeros.

    ``groups``: a sum for each group of channels. ``off``: zeros that are moved by as much. ``filler``: the number around the sums.
    ``more``: zeros behind each sum. ``beside``: sums, or groups of them, of zeros before and behind.
    """
    n = Net()
    x, y = n.input(2, 8, SIZE, SIZE), n.input(2, 8, SIZE, SIZE, name="y")
    parts = []
    for shift in shifts:
        own, other, before, after = x, y, [0, 0], [0, more]
        for axis, d in enumerate(shift):
            if d:
                a, b = (n.ints(abs(d)), n.ints(SIZE)), (n.ints(0), n.ints(SIZE - abs(d)))
                own = n.op("Slice", own, *(a if d > 0 else b), n.ints(axis + 2))
                other = n.op("Slice", other, *(b if d > 0 else a), n.ints(axis + 2))
                before[axis], after[axis] = (d - off, off + more) if d > 0 else (off, -d - off + after[axis])
        product = n.op("Mul", *((other, own) if turned else (own, other)))
        if groups:
            sizes = [SIZE - abs(d) for d in shift]
            product = n.op("Reshape", product, n.ints(2, groups, 8 // groups, *sizes))
        part = n.op(kind, product, n.ints(2 if groups else 1), attrs=ReduceAttrs())
        if any([*before, *after]):
            first, last = ([0, b, *([0] if groups else [])] for b in beside)
            pads = n.ints(*first, *before, *last, *after)
            part = n.op("Pad", part, pads, n.const(np.float32(filler)), attrs=PadAttrs())
        parts.append(part)
    return n.done(n.op("Concat", *parts, attrs=ConcatAttrs(2 if groups else 1)))


@all_pairs(
    {
        "kind, turned": [("ReduceMean", False), ("ReduceSum", True)],
        "groups": [None, 2, 8],
        "shifts": [
            [(0, k) for k in range(5)],
            [(0, -k) for k in range(4)],
            [(0, k) for k in range(-2, 3)],
            [(i, 2 * j) for i in (-1, 0, 1) for j in (-1, 0, 1)],
        ],
    }
)
def test_images_cropped_to_their_common_part(
    shifts: list[tuple[int, int]], groups: int | None, kind: str, turned: bool
) -> None:
    graph, _ = check_pass(PASS, stereo(shifts, groups=groups, kind=kind, turned=turned), changes=1)
    assert len(graph.of_kind(kind)) == len(graph.of_kind("Mul")) == len(graph.of_kind("Pad")) == 1
    assert not graph.of_kind("Concat", "Slice")


@pytest.mark.parametrize("groups", [None, 2])
def test_no_number_beside_the_images_is_multiplied(groups: int | None) -> None:
    """A zero of the volume stays a zero where the image that is not shifted is infinite."""
    graph = stereo([(0, k) for k in range(4)], groups=groups)
    feeds = random_feeds(graph, 3)
    feeds["x"][:, :, :, 0] = np.inf
    before = evaluate(graph, feeds)
    PASS(graph)
    for name, y in evaluate(graph, feeds).items():
        np.testing.assert_allclose(y, before[name], rtol=1e-5)


def test_sums_elsewhere_are_no_candidates() -> None:
    shifts = [(0, k) for k in range(1, 5)]
    check_untouched(PASS, stereo(shifts, filler=0.5))
    check_untouched(PASS, stereo(shifts, more=1))
    check_refused(
        PASS, stereo(shifts, off=1), because="sums of 1 shifts"
    )  # the first one lies where the other image has it


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("beside", [(1, 0), (0, 1)])
def test_zeros_beside_the_sums_are_no_candidates(groups: int | None, beside: tuple[int, int]) -> None:
    check_untouched(PASS, stereo([(0, k) for k in range(1, 5)], groups=groups, beside=beside))


def test_groups_that_other_axes_are_part_of_are_no_candidates() -> None:
    n = Net()
    x, y = n.input(2, 8, SIZE, SIZE), n.input(2, 8, SIZE + 4, SIZE + 4, name="y")
    parts = [n.op("Reshape", n.op("Mul", x, taken(n, y, s)), n.ints(4, 4, SIZE, SIZE)) for s in ALL[:4]]
    sums = [n.op("ReduceSum", p, n.ints(1), attrs=ReduceAttrs()) for p in parts]
    check_untouched(PASS, n.done(n.op("Concat", *sums, attrs=ConcatAttrs(1))))


def test_a_stereo_volume_takes_few_launches() -> None:
    n = Net()
    x, y = (n.conv(n.input(1, 8, 6, 6, name=name), 16) for name in "xy")
    base = n.const(np.zeros((1, 2, 5, 6, 6), np.float32))
    for k in range(5):
        own = n.op("Slice", x, n.ints(k), n.ints(6), n.ints(3))
        other = n.op("Slice", y, n.ints(0), n.ints(6 - k), n.ints(3))
        split = n.op("Reshape", n.op("Mul", own, other), n.ints(1, 2, 8, 6, 6 - k))
        total = n.op("ReduceMean", split, n.ints(2), attrs=ReduceAttrs())
        places = np.stack(np.meshgrid([0], range(2), [k], range(6), range(k, 6), indexing="ij"), -1)
        base = n.op("ScatterND", base, places, total, attrs=ScatterNDAttrs())
    program = check_simulated(n.done(base))
    assert kinds(program).count("ReduceMean") == 1
    assert not {"ScatterND", "Concat", "Slice", "Mul"} & set(kinds(program))


def test_parts_of_the_channels_are_taken_once() -> None:
    n = Net()
    x, y = n.input(2, 4, SIZE, SIZE), n.input(2, 8, SIZE + 4, SIZE + 4, name="y")
    half = n.op("Slice", y, n.ints(-4), n.ints(8), n.ints(1))
    parts = [n.op("ReduceMean", n.op("Mul", x, taken(n, half, s)), n.ints(1), attrs=ReduceAttrs()) for s in ALL]
    check_pass(PASS, n.done(n.op("Concat", *parts, attrs=ConcatAttrs(1))), changes=1)


def test_it_is_one_launch_between_convolutions() -> None:
    """Windows are read in place, and the sums are pixels in channels-last order."""
    n = Net()
    x = n.conv(n.input(1, 8, 6, 6), 16)
    y = n.op("Pad", n.conv(n.input(1, 8, 6, 6, name="z"), 16), n.ints(0, 0, 1, 1, 0, 0, 1, 1), attrs=PadAttrs())
    shifts = [(i, j) for i in range(3) for j in range(3)]
    parts = [n.op("ReduceMean", n.op("Mul", x, taken(n, y, s, 6)), n.ints(1), attrs=ReduceAttrs()) for s in shifts]
    program = check_simulated(n.done(n.conv(n.op("Relu", n.op("Concat", *parts, attrs=ConcatAttrs(1))), 8)))
    assert kinds(program).count("ReduceMean") == 1
    assert not {"Transpose", "Concat", "Slice", "Mul"} & set(kinds(program))


def test_it_refuses() -> None:
    check_refused(PASS, volume(ALL[:3]), because="sums of 3 shifts, fewer than 4")
    check_refused(PASS, volume([*ALL[1:], ALL[0]]), because="do not form a grid with equal distances")
    check_refused(PASS, volume([ALL[0]] * 2 + ALL[2:4]), because="do not form a grid")
    n = Net()
    x, y = n.input(2, 4, SIZE, SIZE), n.input(2, 8, SIZE, SIZE, name="y")
    parts = [n.op("Slice", y, n.ints(k), n.ints(k + 4), n.ints(1)) for k in range(4)]
    sums = [n.op("ReduceSum", n.op("Mul", x, p), n.ints(1), attrs=ReduceAttrs()) for p in parts]
    graph = n.done(n.op("Concat", *sums, attrs=ConcatAttrs(1)))
    check_refused(PASS, graph, because="shifted along the axis that they sum over")


def test_other_parts_are_no_candidates() -> None:
    def joined(n: Net, *parts: Value) -> Graph:
        return n.done(n.op("Concat", *parts, attrs=ConcatAttrs(1)))

    n = Net()
    x, y = n.input(2, 8, SIZE, SIZE), n.input(2, 8, SIZE + 4, SIZE + 4, name="y")
    products = [n.op("Mul", x, taken(n, y, s)) for s in ALL[:4]]
    check_untouched(PASS, joined(n, *products))
    check_untouched(PASS, joined(n, *(n.op("ReduceSum", p, n.ints(2), attrs=ReduceAttrs()) for p in products)))
    n = Net()
    x, y = n.input(2, 8, SIZE, SIZE), n.input(2, 8, SIZE, SIZE, name="y")
    modes = [n.op("Pad", y, n.ints(0, 0, 0, k, 0, 0, 0, -k), attrs=PadAttrs("edge")) for k in range(1, 5)]
    check_untouched(
        PASS, joined(n, *(n.op("ReduceSum", n.op("Mul", x, p), n.ints(1), attrs=ReduceAttrs()) for p in modes))
    )
    n = Net()
    x, y = n.input(2, 8, SIZE, SIZE), n.input(2, 8, 2 * SIZE, SIZE, name="y")
    steps = [n.op("Slice", y, n.ints(0), n.ints(2 * SIZE), n.ints(2), n.ints(2)) for _ in range(4)]
    check_untouched(
        PASS, joined(n, *(n.op("ReduceSum", n.op("Mul", x, s), n.ints(1), attrs=ReduceAttrs()) for s in steps))
    )
    n = Net()
    m = symbol("m", 1, 8)
    x, y = n.input(m, 8, SIZE, SIZE), n.input(m, 8, SIZE + 4, SIZE + 4, name="y")
    found = [n.op("ReduceSum", n.op("Mul", x, taken(n, y, s)), n.ints(1), attrs=ReduceAttrs()) for s in ALL]
    graph = joined(n, *found)
    assert PASS(graph.copy()).changes == 0
