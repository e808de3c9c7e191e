"""weighted_maps: values under a sum of attention maps become a sum of products; other sums stay, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.sequence_cases import heads, merged
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.support.facts import depends_on_inputs, operand
from optdnn.passes.weighted_maps import WeightedMaps

PASS = WeightedMaps()
HEADS, TOKENS, SIZE = 2, 12, 16


def gated(
    form: str = "gate * a + p", *, divided: str = "", axis: int = -1, width: int = SIZE, gate: tuple[int, ...] = (1, HEADS, 1, 1),
    maps: tuple[int, ...] = (1, HEADS, TOKENS, TOKENS), read: str = "", mask: str = "",
) -> Graph:  # fmt: skip
    """Values under a sum of maps.

    ``form``: a Python expression of the softmaxes ``a``, ``b``, ``d`` and ``e``, the constant maps ``p`` and ``c`` (a softmax),
    ``gate``, and ``x``, which is computed.
    ``divided``: by the sums of the rows, "keep" or "view". ``read``: "sum" or "maps" are a second output."""
    n = Net()
    source = n.input(2, TOKENS, 24)

    def softmax() -> Value:
        q, k = heads(n, source, HEADS, SIZE), heads(n, source, HEADS, SIZE)
        scores = n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2))))
        scores = n.op("Sin", scores) if mask else n.op("Mul", scores, 0.25)
        return n.op("Softmax", scores, attrs=SoftmaxAttrs(axis))

    first = softmax()
    names: dict[str, Any] = {
        "a": first,
        "gate": n.op("Sigmoid", n.random(*gate)),
        "p": n.op("Sigmoid", n.random(*maps)),
    }
    names["c"] = n.op("Softmax", n.random(*maps), attrs=SoftmaxAttrs(-1))
    names |= {name: softmax() for name in "bde" if name in form.replace("gate", "").split()}
    if "x" in form:
        names["x"] = n.op("Relu", n.input(2, HEADS, TOKENS, TOKENS, name="x"))
    total = evaluated(n, form, names)
    y, more = total, {"sum": [total], "maps": [first]}.get(read, [])
    if divided == "keep":
        y = n.op("Div", total, n.op("ReduceSum", total, n.ints(-1), attrs=ReduceAttrs(True)))
    elif divided:
        sums = n.op("ReduceSum", total, n.ints(-1), attrs=ReduceAttrs(False))
        y = n.op("Div", total, n.op("Unsqueeze", sums, n.ints(-1)))
    return n.done(merged(n, n.op("MatMul", y, heads(n, source, HEADS, width))), *(n.op("Relu", v) for v in more))


def evaluated(n: Net, form: str, names: dict[str, Any]) -> Value:
    """The value of an expression of sums and products, without parentheses."""
    result: Any = None
    for sign, term in zip(["+", *(c for c in form if c in "+-")], form.replace("-", "+").split("+"), strict=True):
        factors = [names[name.strip()] for name in term.split("*")]
        value = factors[0] if len(factors) == 1 else n.op("Mul", *factors)
        result = value if result is None else n.op("Add" if sign == "+" else "Sub", result, value)
    return result


@pytest.mark.parametrize(
    ("options", "products"),
    [
        ({}, 2),
        ({"form": "p + a * gate"}, 2),
        ({"divided": "keep"}, 2),
        ({"divided": "view", "form": "a + p"}, 2),
        ({"divided": "keep", "form": "gate * p + gate * a - p"}, 2),
        ({"form": "a - gate * b"}, 2),
        ({"form": "p - a - b"}, 3),
        ({"divided": "view", "form": "a - gate * b + p"}, 3),
        ({"maps": (TOKENS, TOKENS), "gate": (1,), "divided": "keep"}, 2),
        ({"gate": (HEADS, TOKENS, 1)}, 2),
        ({"form": "gate * a + gate * c", "divided": "keep"}, 2),
        ({"form": "c - a"}, 2),
        ({"form": "a - p - c"}, 2),
        ({"form": "a + p + b + p * gate - p", "divided": "keep"}, 3),
    ],
)
def test_products_are_taken_apart(options: dict[str, Any], products: int) -> None:
    before = gated(**options)
    graph, _ = check_pass(PASS, before, changes=1)
    assert not list(graph.of_kind("Div")) or options.get("divided")
    assert len(list(graph.of_kind("MatMul"))) == len(list(before.of_kind("MatMul"))) + products - 1
    maps = [operand(op) for op in graph.of_kind("MatMul")]
    assert not [v for v in maps if graph.op(v).kind in ("Add", "Sub") and depends_on_inputs(graph, v)]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(("form", "attentions"), [("gate * a + p", 1), ("a - gate * b", 2)])
def test_attention_takes_the_softmaxes(form: str, attentions: int, precision: str) -> None:
    found = kinds(check_simulated(gated(form, divided="keep" if "p" in form else ""), precision))
    assert found.count("Attention") == attentions
    assert not {"Softmax", "ReduceSum", "Reduce"} & set(found)


def test_constant_maps_may_cancel() -> None:
    """Maps in the thousands, with a difference of about one, and two softmaxes between them."""
    n = Net()
    source = n.input(2, TOKENS, 24)

    def softmax() -> Value:
        q, k = heads(n, source, HEADS, SIZE), heads(n, source, HEADS, SIZE)
        scores = n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2))))
        return n.op("Softmax", scores, attrs=SoftmaxAttrs(-1))

    first, second = (n.random(1, HEADS, TOKENS, TOKENS, scale=0.5, offset=4096.0) for _ in range(2))
    maps = n.op("Sub", n.op("Sub", n.op("Add", softmax(), first), softmax()), second)
    graph = n.done(merged(n, n.op("MatMul", maps, heads(n, source, HEADS, SIZE))))
    assert kinds(check_simulated(graph, "fp16")).count("Attention") == 2


REFUSED: dict[str, Graph] = {
    "others that are not constant maps": gated("a + x"),
    "a softmax and others that are not": gated("a + gate"),
    "a sum that takes 5 products": gated("a + p + b - d + gate * e"),
    "rows of at most 256 features": gated(width=264),
    "not over the keys": gated(axis=-2),
    "differs from key to key": gated(gate=(1, HEADS, 1, TOKENS)),
    "does not read only a product of queries and keys": gated(mask="sin"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str) -> None:
    check_refused(PASS, REFUSED[why], because=why)


@pytest.mark.parametrize(
    "graph",
    [
        gated("p + x"),
        gated("x - gate * x"),
        gated(read="sum", divided="keep"),
        gated("a", divided="keep"),
        gated("a + p", read="maps"),
    ],
    ids=["no softmax", "products", "the sum is read", "one softmax", "the maps are read"],
)
def test_other_sums_stay(graph: Graph) -> None:
    check_untouched(PASS, graph)
