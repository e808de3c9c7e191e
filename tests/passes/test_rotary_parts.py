"""rotary_parts: parts of a head that rotate by different coordinates become one op; other parts stay, with the reason."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.graph import Graph
from optdnn.ops.attention import RotaryAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.fuse_rotary import FuseRotary


def parts(
    *, sizes: tuple[int, ...] = (4, 6, 4), rest: int = 2, own: bool = True, split: bool = False, interleaved: bool = True,
    order: tuple[int, ...] | None = None, batch: int = 1, used: bool = False, axis: int = -1, swapped: str = "",
    views: tuple[int, ...] = (), turned: int = 0, counts: tuple[int, ...] = (1, 1, 1),
) -> Graph:  # fmt: skip
    """Parts of a head that are rotated by angles of different coordinates, and the other features after them.

    ``swapped``: the parts (by their digits) that are rotated between two Transposes; ``views``: the shape of heads and positions
    that Reshapes give to each part before its rotation."""
    n = Net(np.float64)
    widths = (*sizes, *([rest] if rest else []))
    x = n.input(2, 3, 5, sum(widths))
    ends = np.cumsum(widths)
    if split:
        cut = n.op("Split", x, n.ints(*widths), attrs=SplitAttrs(-1), outputs=len(widths))
    else:
        cut = [n.op("Slice", x, n.ints(e - w), n.ints(e), n.ints(3)) for w, e in zip(widths, ends, strict=True)]
    found = []
    for k, (part, size) in enumerate(zip(cut, sizes, strict=False)):
        swaps, length = str(k) in swapped, 3 if swapped else 5
        tables = [n.random(batch if k else 1, length, (turned or size) // (1 if own else 2)) for _ in range(2)]
        attrs = RotaryAttrs(interleaved, turned, own, counts[k])
        part = n.op("Reshape", part, n.ints(*views, size)) if views else part
        part = n.op("Transpose", part, attrs=TransposeAttrs((0, 2, 1, 3))) if swaps else part
        part = n.op("RotaryEmbedding", part, *tables, attrs=attrs)
        part = n.op("Transpose", part, attrs=TransposeAttrs((0, 2, 1, 3))) if swaps else part
        found.append(n.op("Reshape", part, n.ints(2, 3, 5, size)) if views else part)
    joined = [*found, *cut[len(sizes) :]]
    y = n.op("Concat", *(joined[k] for k in order or range(len(joined))), attrs=ConcatAttrs(axis))
    return n.done(y, *([n.op("Relu", found[0])] if used else []))


@pytest.mark.parametrize(
    ("graph", "turned"),
    [(parts(), 14), (parts(split=True), 14), (parts(rest=0), 0), (parts(own=False, sizes=(4, 8)), 12)],
)
def test_parts_that_turn_by_different_coordinates(graph: Graph, turned: int) -> None:
    after, _ = check_pass(FuseRotary(), graph, changes=1, kinds={"RotaryEmbedding": 1, "Concat": 2})
    (op,) = after.of_kind("RotaryEmbedding")
    assert (op.attrs.rotary_embedding_dim, op.attrs.parts) == (turned, 1)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("sizes", "rest"), [((4, 4), 0), ((6, 6, 6), 0), ((4, 4, 4), 3)])
def test_equal_parts_whose_pairs_are_halves(own: bool, sizes: tuple[int, ...], rest: int) -> None:
    graph = parts(sizes=sizes, rest=rest, interleaved=False, own=own, split=True)
    after, _ = check_pass(FuseRotary(), graph, changes=1, kinds={"RotaryEmbedding": 1, "Concat": 2})
    (op,) = after.of_kind("RotaryEmbedding")
    assert (op.attrs.rotary_embedding_dim, op.attrs.parts) == (sum(sizes) if rest else 0, len(sizes))


@pytest.mark.parametrize("interleaved", [False, True])
def test_parts_after_views(interleaved: bool) -> None:
    one = {"sizes": (4, 4), "rest": 0, "interleaved": interleaved, "split": True}
    check_pass(FuseRotary(), parts(**one, views=(2, 3, 5)), changes=1, kinds={"RotaryEmbedding": 1, "Concat": 2})
    graph = parts(**one, views=(1, 6, 5))
    check_pass(FuseRotary(), graph, changes=1, kinds={"RotaryEmbedding": 1, "Concat": 2, "Reshape": 2})
    swapped = parts(**one, swapped="01")
    check_pass(FuseRotary(), swapped, changes=1, kinds={"RotaryEmbedding": 1, "Concat": 2, "Transpose": 2})


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (parts(interleaved=False), "its parts, whose pairs are halves, have different sizes"),
        (parts(turned=2, own=False), "its parts do not turn as a whole"),
        (parts(sizes=(4, 4), counts=(2, 2), interleaved=False), "its parts do not turn as a whole"),
        (parts(sizes=(4, 4), counts=(1, 2), interleaved=False), "its parts do not turn alike"),
        (parts(used=True), "one of its parts is used elsewhere"),
        (parts(batch=2), "the angles of its parts are of different images or positions"),
    ],
)
def test_parts_that_are_refused(graph: Graph, because: str) -> None:
    check_refused(FuseRotary(), graph, because=because)


@pytest.mark.parametrize(
    "graph",
    [parts(order=(1, 0, 2, 3)), parts(order=(0, 1, 3, 2)), parts(order=(0, 2, 3)), parts(sizes=(4, 4), rest=0, axis=1)],
)
def test_other_parts_stay(graph: Graph) -> None:
    check_untouched(FuseRotary(), graph)
