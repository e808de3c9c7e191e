"""doubled_prefixes: rounds on whole tensors that compute a linear recurrence become one loop over its steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.passes.unrolled_scans import UnrolledScans

PASS = UnrolledScans()


def part(n: Net, x: Value, begin: int, end: int) -> Value:
    return n.op("Slice", x, n.ints(begin), n.ints(end), n.ints(1))  # type: ignore[no-any-return]


def shift(n: Net, x: Value, distance: int, fill: float, form: str) -> Value:
    """``x`` moved by ``distance`` positions along axis 1."""
    size = n.dims(x)[1]
    assert isinstance(size, int)
    value = [n.const(fill)] if fill else []
    if form == "crop":
        return n.op("Pad", x, n.ints(0, distance, 0, 0, -distance, 0), *value)  # type: ignore[no-any-return]
    if form == "split":
        rest = n.op("Split", x, n.ints(size - distance, distance), attrs=SplitAttrs(1), outputs=2)[0]
    else:
        rest = part(n, x, 0, size - distance)
    if form == "axes":
        return n.op("Pad", rest, n.ints(distance, 0), value[0] if value else None, n.ints(-2))  # type: ignore[no-any-return]
    if form == "pad":
        return n.op("Pad", rest, n.ints(0, distance, 0, 0, 0, 0), *value)  # type: ignore[no-any-return]
    first = n.const(np.full((2, distance, n.dims(x)[2]), fill))
    return n.op("Concat", first, rest, attrs=ConcatAttrs(1))  # type: ignore[no-any-return]


def rounds(
    form: str = "pad", *, count: int = 11, width: int = 4, fill: float = 1.0, before: float = 0.0, last: int = 16,
    order: int = 0, distance: int = 2,
) -> Graph:  # fmt: skip
    """All states of a recurrence. ``form``: how tensors are moved, or "parts" (rounds on the positions that change). ``width``:
    features of the factors; ``fill``, ``before``: what stands before the factors and the terms; ``last``: the end of the rounds;
    ``distance``: the distance of the second round."""
    n = Net()
    a, b = n.op("Sigmoid", n.input(2, count, width, name="a")), n.input(2, count, 4, name="b")
    d = 1
    while d < min(count, last):
        at = distance if d == 2 else d
        if form == "parts":
            late = part(n, a, at, count)
            scaled = n.op("Mul", late, part(n, b, 0, count - at))
            states = n.op("Add", scaled, part(n, b, at, count))
            b = n.op("Concat", part(n, b, 0, at), states, attrs=ConcatAttrs(1))
            if 2 * d < count:
                later = n.op("Mul", late, part(n, a, 0, count - at))
                a = n.op("Concat", part(n, a, 0, at), later, attrs=ConcatAttrs(1))
        else:
            scaled = n.op("Mul", *(a, shift(n, b, at, before, form))[:: -1 if order else 1])
            b = n.op("Add", *(scaled, b)[:: -1 if order else 1])
            if 2 * d < count:
                a = n.op("Mul", *(a, shift(n, a, at, fill, form))[:: -1 if order else 1])
        d *= 2
    return n.done(b)


@pytest.mark.parametrize("form", ["pad", "axes", "crop", "fill", "split", "parts"])
@pytest.mark.parametrize("order", [0, 1])
def test_rounds_are_one_loop_over_the_steps(form: str, order: int) -> None:
    graph, _ = check_pass(PASS, rounds(form, order=order), changes=1, rules={"doubled_prefixes": 1})
    (scan,) = graph.of_kind("PointwiseScan")
    assert (scan.attrs.steps, scan.attrs.axes, scan.attrs.result_axes) == (11, (1, 1), (1,))
    assert not any(graph.of_kind(kind) for kind in ("Add", "Mul", "Pad", "Concat"))


@pytest.mark.parametrize("count", [5, 8, 9])
def test_any_number_of_steps(count: int) -> None:
    check_pass(PASS, rounds(count=count), changes=1, rules={"doubled_prefixes": 1})


def test_factors_of_all_features() -> None:
    graph, _ = check_pass(PASS, rounds(width=1), changes=1, rules={"doubled_prefixes": 1})
    assert len(graph.of_kind("PointwiseScan")) == 1


def test_long_recurrences_keep_their_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.passes.rules.doubled_prefixes.is_looped", lambda count, size: False)
    check_refused(PASS, rounds(), because="a loop over its 11 steps would take longer", rule="doubled_prefixes")


@pytest.mark.parametrize("fill", [0.0, 2.0])
def test_factors_of_other_products_stay(fill: float) -> None:
    check_refused(PASS, rounds(fill=fill), because="are not the products of those", rule="doubled_prefixes")


@pytest.mark.parametrize(
    "options",
    [{"before": 1.0}, {"last": 8}, {"distance": 3}, {"count": 4}],
    ids=["no zeros before", "windows of 8 steps", "distance of 3", "two rounds"],
)
@pytest.mark.parametrize("form", ["pad", "parts"])
def test_other_rounds_are_no_candidates(form: str, options: dict[str, Any]) -> None:
    if form == "parts" and "before" in options:
        return
    check_untouched(PASS, rounds(form, **options))
