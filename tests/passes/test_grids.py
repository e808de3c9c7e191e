"""Gathers of whole axes and folds without overlap become views. Others stay."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.gather import GatherAttrs, GatherNDAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.signal import Col2ImAttrs
from optdnn.passes.base import RulePass, run_pipeline
from optdnn.passes.canonicalize import Canonicalize
from optdnn.passes.rules.grids import grid_gather_nd


class Positions(RulePass):
    name = "positions"
    rules = (grid_gather_nd,)


def gathered(n: Net, x: Value, table: object, axis: int) -> Value:
    return n.op("Gather", x, n.const(table, np.int64), attrs=GatherAttrs(axis))


def table(windows: int, size: int) -> np.ndarray:
    """PyTorch's: element of the window, then the window."""
    return np.arange(size)[:, None] + size * np.arange(windows)[None]


def folded(n: Net, x: Value, image: tuple[int, int], block: tuple[int, int], **other: tuple[int, ...]) -> Value:
    given = {"strides": block, "pads": (0,) * 4, "dilations": (1, 1), **other}
    return n.op("Col2Im", x, n.ints(*image), n.ints(*block), attrs=Col2ImAttrs(**given))


def test_windows_of_an_image_are_a_view() -> None:
    n = Net()
    x = gathered(n, gathered(n, n.input(2, 3, 6, 8), table(3, 2), 2), table(2, 4), 4)
    rules = {"grid_gather": 2, "sink_transpose": 1, "transpose_chain": 1, "reshape_chain": 1}
    check_pass(Canonicalize(), n.done(x), changes=5, rules=rules, kinds={"Reshape": 1, "Transpose": 1})


@pytest.mark.parametrize(
    "indices",
    [
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
        np.arange(24).reshape(4, 1, 6).transpose(2, 1, 0),
        np.arange(24).reshape(6, 4),
        np.arange(24).reshape(6, 4).T - 24,
    ],
)
def test_grids_of_any_order(indices: np.ndarray) -> None:
    n = Net()
    graph, _ = check_pass(Canonicalize(), n.done(gathered(n, n.input(3, 24, 5), indices, -2)), changes=1)
    assert "Gather" not in graph.kinds()


def _shuffled() -> np.ndarray:
    found = table(6, 4)
    found[0, 0], found[1, 1] = found[1, 1], found[0, 0]
    return found


@pytest.mark.parametrize(
    "indices", [np.arange(24), table(3, 4), np.zeros((4, 6)), _shuffled(), np.arange(24).reshape(4, 6)[:, ::-1]]
)
def test_other_tables_stay(indices: np.ndarray) -> None:
    n = Net()
    check_untouched(Canonicalize(), n.done(gathered(n, n.input(2, 24, 3), indices, 1)))


def test_an_axis_of_unknown_size_stays() -> None:
    n = Net()
    check_untouched(Canonicalize(), n.done(gathered(n, n.input(2, symbol("n"), 3), table(6, 4), 1)))


def test_two_unknown_sizes_that_move_stay() -> None:
    n = Net()
    x = n.input(symbol("n"), 24, symbol("m"), symbol("k"))
    check_refused(Canonicalize(), n.done(gathered(n, x, table(6, 4), 1)), because="no constant target")


def positions(*sizes: int) -> np.ndarray:
    """The positions of all elements of a tensor."""
    return np.stack(np.meshgrid(*map(np.arange, sizes), indexing="ij"), -1)


def picked(n: Net, x: Value, indices: object, batch_dims: int = 0) -> Value:
    return n.op("GatherND", x, n.const(indices, np.int64), attrs=GatherNDAttrs(batch_dims))


@pytest.mark.parametrize(
    ("indices", "kinds"),
    [
        (positions(2, 8), {}),
        (positions(2, 8) - np.array([2, 8]), {}),
        (positions(2, 8)[:, None, None], {"Reshape": 1}),
        (positions(2, 8).transpose(1, 0, 2), {"Transpose": 1}),
        (positions(2, 8).reshape(4, 4, 2), {"Reshape": 1}),
        (np.broadcast_to(positions(2, 8)[:, None, None], (2, 1, 5, 8, 2)), {"Reshape": 1, "Expand": 1}),
        (positions(2)[:, None], {"Reshape": 1}),
    ],
    ids=["whole", "from the end", "axes", "transposed", "blocks", "repeated", "rows"],
)
def test_all_elements_by_their_positions_are_a_view(indices: np.ndarray, kinds: dict[str, int]) -> None:
    n = Net()
    graph, _ = check_pass(
        Positions(), n.done(n.op("Sin", picked(n, n.op("Exp", n.input(2, 8, 3)), indices))), changes=1
    )
    run_pipeline(graph, [Canonicalize()])
    assert graph.kinds() == {"Exp": 1, "Sin": 1, **kinds}


@pytest.mark.parametrize(
    ("rows", "first"), [([[4]], 4), ([[-2]], 6), ([[2], [3], [4]], 2), ([[-3], [-2]], 5), ([[0], [1]], 0)]
)
def test_neighboring_rows_are_a_slice(rows: list[list[int]], first: int) -> None:
    """``x[[-2]]`` after torch.export: Falcon's keys stand among the heads."""
    n = Net(np.float64)
    graph, report = check_pass(Canonicalize(), n.done(picked(n, n.input(8, 3), rows)), changes=1, kinds={"Slice": 1})
    assert [f.rule for f in report.fired] == ["neighboring_rows"]
    (part,) = graph.of_kind("Slice")
    assert graph.constant_value(part.inputs[1]) == first


@pytest.mark.parametrize("rows", [[[1], [0]], [[1], [3]], [[2], [2]], [[[1]], [[2]]], np.zeros((0, 1), np.int64)])
def test_other_rows_stay(rows: object) -> None:
    n = Net()
    check_untouched(Canonicalize(), n.done(picked(n, n.input(8, 3), rows)))


def test_rows_of_an_unknown_number_stay() -> None:
    n = Net()
    check_untouched(Canonicalize(), n.done(picked(n, n.input(symbol("N"), 3), [[-2]])))


@pytest.mark.parametrize(
    "indices", [positions(2, 7), positions(1, 8), positions(2, 8)[:, ::-1], positions(2, 8)[[0, 0]]]
)
def test_other_positions_stay(indices: np.ndarray) -> None:
    n = Net()
    check_untouched(Canonicalize(), n.done(picked(n, n.input(2, 8, 3), indices)))


def test_positions_of_each_item_stay() -> None:
    n = Net()
    check_untouched(Canonicalize(), n.done(picked(n, n.input(2, 8, 3), np.arange(16).reshape(2, 8, 1) % 8, 1)))


def test_positions_along_an_axis_of_unknown_size_stay() -> None:
    n = Net()
    check_untouched(Canonicalize(), n.done(picked(n, n.input(symbol("n"), 8), positions(2, 8))))


def test_repeated_rows_of_unknown_size_stay() -> None:
    n = Net()
    repeated = np.broadcast_to(positions(2, 8)[:, None], (2, 3, 8, 2))
    check_refused(Canonicalize(), n.done(picked(n, n.input(2, 8, symbol("n")), repeated)), because="no constant target")


@pytest.mark.parametrize("batch", [2, symbol("n")])
def test_a_fold_without_overlap_is_a_view(batch: object) -> None:
    n = Net()
    graph = n.done(folded(n, n.input(batch, 3 * 8, 6), (6, 8), (2, 4)))  # type: ignore[arg-type]
    after, _ = check_pass(Canonicalize(), graph, changes=1, rules={"grid_fold": 1}, sizes={"n": 3})
    assert after.kinds() == {"Reshape": 2, "Transpose": 1}


@pytest.mark.parametrize(
    ("image", "other", "columns", "because"),
    [
        ((6, 8), {"strides": (1, 4)}, 10, "overlap, or leave elements out"),
        ((6, 8), {"dilations": (2, 1)}, 6, "overlap, or leave elements out"),
        ((4, 4), {"pads": (1, 2, 1, 2)}, 6, "overlap, or leave elements out"),
        ((7, 8), {}, 6, "do not cover the image"),
    ],
)
def test_other_folds_stay(
    image: tuple[int, int], other: dict[str, tuple[int, ...]], columns: int, because: str
) -> None:
    n = Net()
    check_refused(Canonicalize(), n.done(folded(n, n.input(2, 24, columns), image, (2, 4), **other)), because=because)


def test_a_fold_of_nothing_stays() -> None:
    n = Net()
    check_refused(Canonicalize(), n.done(folded(n, n.input(0, 24, 6), (6, 8), (2, 4))), because="no constant target")


def _unfolded() -> Graph:
    """Transformers' MobileViTV2: patches by gathers, a norm of all of them, and the image by a fold."""
    n = Net()
    x = n.conv(n.input(1, 8, 8, 8), 64, 1, pads=0)
    x = gathered(n, gathered(n, x, table(4, 2), 2), table(4, 2), 4)
    x = n.op("Reshape", n.op("Transpose", x, attrs=TransposeAttrs((0, 1, 2, 4, 3, 5))), n.ints(1, 64, 4, 16))
    y = n.op("Add", x, n.conv(n.op("Tanh", x), 64, 1, pads=0))
    flat = n.op("InstanceNormalization", n.op("Reshape", y, n.ints(1, 1, -1)), n.positive(1), n.random(1))
    y = folded(n, n.op("Reshape", flat, n.ints(1, 256, 16)), (8, 8), (2, 2))
    return n.done(n.conv(y, 8, 1, pads=0))


def test_on_a_gpu_only_the_pixels_move() -> None:
    program = check_simulated(_unfolded(), "fp16")
    kinds = [s.params["op"]["kind"] for s in program.steps]
    assert kinds.count("Copy") == 3, "the input, into patches, and back"
    assert not {"Gather", "Col2Im", "InstanceNormalization"} & {*kinds}


def spread(rows: int, columns: int, height: int = 4, width: int = 6) -> np.ndarray:
    """The pixel that each pixel of a larger image repeats: [height * rows, width * columns, 2]."""
    places = np.meshgrid(np.arange(height * rows) // rows, np.arange(width * columns) // columns, indexing="ij")
    return np.stack(places, -1)


@pytest.mark.parametrize(("factors", "offset"), [((2, 2), 0), ((1, 3), 0), ((2, 1), -4)])
def test_repeated_pixels_are_a_resize(factors: tuple[int, int], offset: int) -> None:
    """PyTorch's dynamo exporter, for an upsampling to exact nearest pixels: the image's axes come first."""
    n = Net(np.float64)
    indices = spread(*factors) + np.array([offset, 0])
    x = n.op("Transpose", n.input(2, 8, 4, 6), attrs=TransposeAttrs((2, 3, 0, 1)))
    x = n.op("GatherND", x, n.const(indices, np.int64), attrs=GatherNDAttrs(0))
    graph = n.done(n.op("Transpose", x, attrs=TransposeAttrs((2, 3, 0, 1))))
    after, report = check_pass(Canonicalize(), graph, changes=3, kinds={"Resize": 1})
    assert {f.rule for f in report.fired} == {"repeated_pixels", "transpose_chain"}
    (resize,) = after.of_kind("Resize")
    assert after.type(resize.value).static_shape == (2, 8, 4 * factors[0], 6 * factors[1])


@pytest.mark.parametrize(
    "indices",
    [spread(2, 2)[::-1], spread(2, 2)[:7], spread(2, 2)[..., ::-1][:, :6], np.roll(spread(2, 2), 1, axis=0)],
)
def test_other_places_of_pixels_stay(indices: np.ndarray) -> None:
    n = Net()
    x = n.op("GatherND", n.input(4, 6, 2, 8), n.const(indices, np.int64), attrs=GatherNDAttrs(0))
    check_untouched(Canonicalize(), n.done(x))
