"""axis_filters: filters as long as an axis are products with a banded matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, tactics

from optdnn.ir.graph import Graph
from optdnn.ops.conv import ConvAttrs
from optdnn.passes.axis_filters import AxisFilters


def filtered(
    x: tuple[int, ...] = (2, 1, 64, 5), filters: int = 3, taps: int = 65, pads: tuple[int, int] = (32, 32), *, stride: int = 1,
    dilation: int = 1, bias: str = "constant", dtype: type = np.float64, width: int = 1, group: int = 1, auto_pad: str = "NOTSET",
) -> Graph:  # fmt: skip
    n = Net(dtype)
    rest = len(x) - 3
    weight = n.random(filters, x[1] // group, taps, *(width,) * rest, scale=taps**-0.5)
    more = {"none": [], "constant": [n.random(filters)]}.get(bias) or (
        [n.input(filters, name="b")] if bias == "input" else []
    )
    own = (pads[0], *(0,) * rest, pads[1], *(0,) * rest) if auto_pad == "NOTSET" else (0,) * (2 + 2 * rest)
    attrs = ConvAttrs((stride, *(1,) * rest), own, (dilation, *(1,) * rest), group, auto_pad=auto_pad)
    return n.done(n.op("Conv", n.input(*x), weight, *more, attrs=attrs))


FIRES: dict[str, dict[str, Any]] = {
    "an image": {},
    "no bias": {"bias": "none"},
    "three channels": {"x": (2, 3, 40, 5)},
    "a stride and uneven pads": {"stride": 3, "pads": (20, 9)},
    "holes": {"taps": 33, "dilation": 2, "pads": (33, 32)},
    "pads beyond the axis": {"pads": (80, 70)},
    "a volume": {"x": (1, 2, 48, 3, 4)},
}


@pytest.mark.parametrize("name", FIRES)
def test_the_matrix_is_the_first_factor(name: str) -> None:
    after, _ = check_pass(AxisFilters(), filtered(**FIRES[name]), changes=1)
    assert {k: c for k, c in after.kinds().items() if k not in ("Constant", "Input", "Output", "Reshape")} == {
        "MatMul": 1, **({} if name == "no bias" else {"Add": 1}),
    }  # fmt: skip


def test_the_positions_of_a_line_are_a_row() -> None:
    after, _ = check_pass(AxisFilters(), filtered((4, 1, 64)), changes=1)
    (product,) = after.of_kind("MatMul")
    assert after.constant_value(product.input(1)) is not None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": (1, 1, 800, 5)}, "its axis is much longer than its filters: most of the matrix would be zeros"),
        ({"x": (1, 1, 512, 5), "filters": 40, "taps": 513, "pads": (256, 256)}, "its matrix would have more than 4194304 elements"),
        ({"bias": "input"}, "its bias is computed"),
    ],
)  # fmt: skip
def test_refused(change: dict[str, Any], reason: str) -> None:
    check_refused(AxisFilters(), filtered(**change), because=reason)


@pytest.mark.parametrize(
    "change", [{"taps": 31}, {"width": 2}, {"x": (2, 2, 64, 5), "filters": 2, "group": 2}, {"auto_pad": "SAME_UPPER"}]
)
def test_other_convolutions_are_left(change: dict[str, Any]) -> None:
    check_untouched(AxisFilters(), filtered(**change))


@pytest.mark.parametrize("build", [lambda: filtered(dtype=np.float32), lambda: filtered((4, 1, 64), dtype=np.float32)])
def test_programs_multiply_on_tensor_cores(build: Callable[[], Graph]) -> None:
    program = check_simulated(build(), "fp16")
    assert not tactics(program, "Conv")
