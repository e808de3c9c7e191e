"""attention_parts: attentions on the parts of a sequence become one; others stay, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.attention_parts import AttentionParts

PASS = AttentionParts()
SWAP = TransposeAttrs((0, 2, 1, 3))


def windows(
    sizes: tuple[int, ...] = (8, 8, 8), *, batch: int = 1, heads: int = 2, shared: int | None = None, axis: int = 2,
    keys: tuple[int, ...] | None = None, order: tuple[int, ...] | None = None, mask: bool = False,
    scales: tuple[float, ...] | None = None, relu: bool = False, twice: bool = False, **attrs: Any,
) -> Graph:  # fmt: skip
    """Queries, keys and values that products make, cut along ``axis``, and attention within each part. ``keys``: the sizes of
    their parts; ``order``: of the values' parts; ``relu``: one part of the queries is changed; ``twice``: it is read once more."""
    n = Net()
    tokens, of_keys = sum(sizes), keys or sizes

    def cut(count: int, parts: tuple[int, ...], name: str) -> list[Value]:
        x = n.matmul(n.input(batch, sum(parts), 16, name=name), count * 16)
        x = n.op("Transpose", n.op("Reshape", x, n.ints(batch, sum(parts), count, 16)), attrs=SWAP)
        if axis != 2:
            parts = (16 // len(parts),) * len(parts)
        found = n.op("Split", x, n.ints(*parts), attrs=SplitAttrs(axis), outputs=len(parts))
        return list(found)

    q, k, v = cut(heads, sizes, "q"), cut(shared or heads, of_keys, "k"), cut(shared or heads, of_keys, "v")
    q = [n.op("Relu", q[0]), *q[1:]] if relu else q
    v = [v[i] for i in order] if order else v
    found = []
    for i in range(len(sizes)):
        own = AttentionAttrs(**(attrs | ({} if scales is None else {"scale": scales[i]})))
        given = [q[i], k[i], v[i], *([n.random(sizes[i], of_keys[i])] if mask else [])]
        y = n.op("Attention", *given, attrs=own)
        found.append(n.op("Transpose", y, attrs=SWAP))
    y = n.op("Reshape", n.op("Concat", *found, attrs=ConcatAttrs(1)), n.ints(batch, tokens, -1))
    return n.done(n.matmul(y, 16), *([n.op("Relu", q[0])] if twice else []))


@pytest.mark.parametrize(
    ("options", "items"),
    [
        ({}, 3),
        ({"batch": 2}, 6),
        ({"heads": 4, "shared": 2}, 3),
        ({"keys": (5, 5, 5)}, 3),
        ({"sizes": (16, 16), "is_causal": True}, 2),
        ({"scale": 0.3, "softcap": 5.0}, 3),
    ],
)
def test_the_parts_are_items_of_one(options: dict[str, Any], items: int) -> None:
    graph, _ = check_pass(PASS, windows(**options), changes=1)
    (op,) = graph.of_kind("Attention")
    assert [graph.type(v).dims[0] for v in op.inputs if v is not None] == [items] * 3


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_one_launch_reads_the_parts_where_they_lie(batch: int, precision: str) -> None:
    found = kinds(check_simulated(windows(batch=batch), precision))
    assert found.count("Attention") == 1
    assert not {"Split", "Concat", "Transpose"} & set(found)


REFUSED: dict[str, Graph] = {
    "queries, keys and values are not cut along their tokens alike": windows(order=(1, 0, 2)),
    "not cut along their tokens": windows(axis=3, sizes=(8, 8)),
    "its parts have different sizes": windows((8, 16)),
    "its parts have different .*sizes": windows(keys=(8, 8, 5)),
    "different attributes or masks": windows(scales=(0.3, 0.3, 0.5)),
    "attributes or masks": windows(mask=True),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str) -> None:
    check_refused(PASS, REFUSED[why], because=why)


@pytest.mark.parametrize("more", ["mask", "sinks"])
def test_one_mask_is_refused(more: str) -> None:
    n = Net()
    x = n.input(1, 2, 16, 8)
    given = [n.random(8, 8)] if more == "mask" else [*[None] * 4, n.random(2)]
    parts = n.op("Split", x, n.ints(8, 8), attrs=SplitAttrs(2), outputs=2)
    others = n.op("Split", n.op("Relu", x), n.ints(8, 8), attrs=SplitAttrs(2), outputs=2)
    graph = n.done(
        *(n.op("Attention", p, o, o, *given, attrs=AttentionAttrs()) for p, o in zip(parts, others, strict=True))
    )
    check_refused(PASS, graph, because="has a mask, a cache or sinks")


@pytest.mark.parametrize("options", [{"relu": True}, {"twice": True}], ids=["changed", "read elsewhere"])
def test_parts_that_others_read_stay(options: dict[str, Any]) -> None:
    check_untouched(PASS, windows(**options))
