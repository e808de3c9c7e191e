"""plane_transforms: the two transforms of a small plane are one product; refused with the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Graph
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.signal import DFTAttrs
from optdnn.passes import plane_transforms
from optdnn.passes.base import PassContext
from optdnn.passes.plane_transforms import PlaneTransforms

PASS = PlaneTransforms()
FP16 = PassContext(target="cuda:sm_90a", precision="fp16")


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane_transforms, "LEAST", 0)


def there(
    shape: tuple[Any, ...] = (2, 3, 4, 6, 1), axes: tuple[int, int] = (3, 2), *, onesided: bool = True, between: float = 1.0
) -> Graph:  # fmt: skip
    n = Net()
    x = n.op("DFT", n.op("Div", n.input(*shape), 2.0), attrs=DFTAttrs(axes[0], onesided=onesided))
    x = n.op("Mul", x, between) if between != 1 else x
    return n.done(n.op("Div", n.op("DFT", x, attrs=DFTAttrs(axes[1])), 3.0))


def matrices(graph: Graph) -> list[tuple[Any, ...]]:
    """The shapes of the products' matrices."""
    values = (v for op in graph.of_kind("MatMul") for v in op.inputs if v is not None)
    return [graph.type(v).dims for v in values if graph.constant_value(v) is not None]


@pytest.mark.parametrize(
    ("shape", "axes", "onesided", "matrix"),
    [
        ((2, 3, 4, 6, 1), (3, 2), True, (24, 32)),
        ((2, 3, 4, 6, 2), (3, 2), False, (48, 48)),
        ((2, 3, 4, 6, 2), (2, 3), False, (48, 48)),
        ((2, 4, 6, 16, 1), (2, 1), True, (32, 24)),
        ((4, 6, 5, 4, 2), (1, 0), False, (48, 48)),
    ],
)
def test_forms(shape: tuple[int, ...], axes: tuple[int, int], onesided: bool, matrix: tuple[int, int]) -> None:
    graph, _ = check_pass(PASS, there(shape, axes, onesided=onesided), changes=1, context=FP16)
    assert matrices(graph) == [matrix]
    assert not {"DFT", "Div"} & {*graph.kinds()}


def test_a_factor_between_is_in_the_matrix() -> None:
    graph, _ = check_pass(PASS, there(between=0.5), changes=1, context=FP16)
    assert "Mul" not in graph.kinds()


@pytest.mark.parametrize("length", [None, 4, 6, 7, 12])
def test_the_way_back(length: int | None) -> None:
    """Inverse transforms, the last one of half a spectrum; a shorter length takes fewer frequencies, a longer one adds zeros."""
    n = Net()
    real, imaginary = (n.input(2, 3, 4, 4, 1, name=name) for name in ("real", "imaginary"))
    x = n.op("DFT", n.op("Concat", real, imaginary, attrs=ConcatAttrs(4)), attrs=DFTAttrs(2, inverse=True))
    more = [] if length is None else [n.const(length, np.int64)]
    y = n.op("DFT", x, *more, attrs=DFTAttrs(3, inverse=True, onesided=True))
    graph, _ = check_pass(PASS, n.done(y), changes=1, context=FP16)
    points = 6 if length is None else length
    assert matrices(graph) == [(2 * 4 * min(4, points // 2 + 1), 4 * points)]


@pytest.mark.parametrize("taken", [(0, 1), (1, 0), (0,), (1,)])
def test_readers_of_parts_read_blocks(taken: tuple[int, ...]) -> None:
    n = Net()
    x = n.op("DFT", n.op("DFT", n.input(2, 3, 4, 6, 1), attrs=DFTAttrs(3)), attrs=DFTAttrs(2))
    parts = [n.op("Slice", x, n.ints(p), n.ints(p + 1), n.ints(4)) for p in taken]
    graph, _ = check_pass(PASS, n.done(*parts), changes=1, context=FP16)
    assert matrices(graph) == [(24, 24 * len(taken))]


@pytest.mark.parametrize(("channels", "matrix"), [(16, (24, 12)), (12, (12, 24))])
def test_channels_of_an_image_stay_last(channels: int, matrix: tuple[int, int]) -> None:
    n = Net()
    x = n.op("Unsqueeze", n.conv(n.input(2, 4, 4, 3), channels), n.ints(4))
    graph = n.done(n.op("DFT", n.op("DFT", x, attrs=DFTAttrs(3)), attrs=DFTAttrs(2)))
    graph, _ = check_pass(PASS, graph, changes=1, context=FP16)
    assert matrices(graph) == [matrix]


def test_any_batch() -> None:
    graph = there((symbol("N"), symbol("C"), 4, 6, 1))
    check_pass(PASS, graph, changes=1, context=FP16, sizes={"N": 2, "C": 3})


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (there((2, 3, 17, 16, 1)), "more than 256 points"),
        (there((2, 3, 4, 6, 1), (3, 1)), "not neighbors"),
        (there((2, 4, 6, 3, 1), (2, 1)), "few numbers follow"),
        (there((2, 4, 6, symbol("C"), 1), (2, 1)), "few numbers follow"),
        (there((2, 3, symbol("H"), 6, 1)), "length is not known"),
    ],
)
def test_refusals(graph: Graph, reason: str) -> None:
    check_refused(PASS, graph, because=reason, context=FP16)


def test_small_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane_transforms, "LEAST", 1 << 16)
    check_refused(PASS, there(), because="too few multiplications", context=FP16)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_wide_precisions_keep_two_products(precision: str) -> None:
    check_untouched(PASS, there(), context=PassContext(precision=precision))


def test_a_transform_with_other_readers_stays() -> None:
    n = Net()
    x = n.op("DFT", n.input(2, 3, 4, 6, 1), attrs=DFTAttrs(3))
    check_untouched(PASS, n.done(n.op("DFT", x, attrs=DFTAttrs(2)), n.op("Exp", x)), context=FP16)
