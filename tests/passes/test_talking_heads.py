"""talking_heads: attention whose heads are mixed before and after the softmax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds, lowered

from optdnn.config import BuildOptions
from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.optimize import optimize
from optdnn.passes.base import PassContext
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.talking_heads import TalkingHeads

SIXTEEN = PassContext(precision="fp16")


def mixed(n: Net, x: Value, matrix: Value, vector: Value | None) -> Value:
    y = n.op("MatMul", x, matrix)
    return y if vector is None else n.op("Add", y, vector)


def talking(
    *, heads: int = 3, mixed_heads: int = 2, size: int = 4, valued: int = 5, first: bool = True, second: bool = True,
    scale: bool = True, axis: int = 2, batch: Any = 2, kept: bool = False, product: bool = True, dtype: Any = np.float64,
) -> Graph:  # fmt: skip
    """Talking heads over 6 queries and 7 keys. Vectors are added before (``first``) and after (``second``) the softmax."""
    n = Net(dtype)
    q, k = n.input(batch, heads, 6, size, name="q"), n.input(batch, heads, 7, size, name="k")
    v = n.input(batch, heads, 7, valued, name="v")
    q = n.op("Mul", q, dtype(0.3)) if scale else q
    scores = n.op("MatMul", q, n.transposed(k, 0, 1, 3, 2))
    scores = scores if product else n.op("Relu", scores)
    maps = mixed(
        n, n.transposed(scores, 0, 2, 3, 1), n.random(heads, mixed_heads), n.random(mixed_heads) if first else None
    )
    maps = n.op("Softmax", maps, attrs=SoftmaxAttrs(axis))
    maps = mixed(n, maps, n.random(mixed_heads, heads), n.random(heads) if second else None)
    y = n.op("MatMul", n.transposed(maps, 0, 3, 1, 2), v)
    return n.done(y, *([n.op("Relu", scores)] if kept else []))


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_heads_become_features(first: bool, second: bool, scale: bool) -> None:
    graph, _ = check_pass(
        TalkingHeads(),
        talking(first=first, second=second, scale=scale),
        changes=1,
        rules={"talking_heads": 1},
        context=SIXTEEN,
    )
    found = graph.kinds()
    assert found["MatMul"] == 3
    assert found["Softmax"] == 1
    assert found.get("ReduceSum", 0) == int(second)


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"heads": 8, "size": 72}, "its 8 heads of 72 features have more than 512 features together"),
        ({"heads": 8, "valued": 65}, "its 8 heads of 65 features"),
        ({"batch": symbol("b")}, "its sizes are not known"),
        ({"product": False}, "not a product of queries and keys"),
        ({"kept": True}, "with no other reader"),
    ],
)
def test_refusals(changes: dict[str, Any], because: str) -> None:
    check_refused(TalkingHeads(), talking(**changes), because=because, context=SIXTEEN)


@pytest.mark.parametrize("axis", [1, 3])
def test_a_softmax_over_another_axis_is_no_candidate(axis: int) -> None:
    check_untouched(TalkingHeads(), talking(axis=axis), context=SIXTEEN)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("plan", [None, PrecisionPlan("fp32")])
def test_in_fp32_the_maps_are_stored_and_multiplied_in_place(
    first: bool, second: bool, plan: PrecisionPlan | None
) -> None:
    graph, _ = check_pass(
        TalkingHeads(),
        talking(first=first, second=second, dtype=np.float32),
        changes=1,
        rules={"talking_products": 1},
        context=PassContext(plan=plan),
    )
    assert len(graph.of_kind("MatMul")) == 4
    assert len(graph.of_kind("Transpose")) == 1, "of the keys"


def test_mixed_precisions_have_one_attention() -> None:
    plan = PrecisionPlan("fp32", {"*": "fp16"})
    check_pass(
        TalkingHeads(),
        talking(dtype=np.float32),
        changes=1,
        rules={"talking_heads": 1},
        context=PassContext(plan=plan),
    )


def test_products_of_other_operands_stay() -> None:
    check_untouched(TalkingHeads(), talking(axis=1, dtype=np.float32))
    check_refused(TalkingHeads(), talking(kept=True, dtype=np.float32), because="with no other reader")


def test_in_fp32_no_map_is_copied() -> None:
    program = check_simulated(talking(heads=4, mixed_heads=4, size=8, valued=8, dtype=np.float32), "fp32")
    assert "Copy" not in kinds(program)


def test_no_map_is_stored() -> None:
    """A network of 16 bits has one attention, and no copies of maps."""
    graph = talking(heads=4, mixed_heads=4, size=8, valued=8, second=False, dtype=np.float32)
    optimize(graph, BuildOptions(target="simulate", precision="fp16"), "simulate")
    (attention,) = graph.of_kind("Attention")
    assert graph.type(attention.inputs[0]).static_shape == (2, 4, 6, 32)  # type: ignore[arg-type]
    assert graph.type(attention.inputs[1]).static_shape == (2, 1, 7, 32)  # type: ignore[arg-type]
    assert "Softmax" not in kinds(lowered(graph))


def convolved(
    *, kernel: int = 1, group: int = 1, bias: bool = False, masked: bool = False, second: bool = True, dynamic: bool = False,
    images: bool = False, kept: bool = False,
) -> Graph:  # fmt: skip
    """Maps of 4 heads that convolutions mix before and, if ``second``, after the softmax. ``images``: nothing makes them maps."""
    n = Net()
    batch = symbol("batch") if dynamic else 2
    q, k, v = (n.input(batch, 4, count, 8, name=name) for count, name in ((6, "q"), (7, "k"), (7, "v")))
    scores = n.op("MatMul", q, n.transposed(k, 0, 1, 3, 2))
    scores = n.op("Relu", scores) if images else n.op("Mul", scores, n.const(0.3))
    maps = n.conv(scores, 4, kernel, pads=kernel // 2, group=group, bias=bias)
    outputs = [n.op("Neg", maps)] if kept else []
    if masked:
        maps = n.op("Where", n.const(np.tril(np.ones((6, 7))), np.bool_), maps, n.const(-1e9))
    maps = n.op("Softmax", maps, attrs=SoftmaxAttrs(-1))
    maps = n.conv(maps, 4, 1, pads=0, bias=bias) if second else maps
    return n.done(n.op("MatMul", maps, v), *outputs)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_convolutions_over_heads_are_products(bias: bool, masked: bool, precision: str) -> None:
    graph, _ = check_pass(
        TalkingHeads(),
        convolved(bias=bias, masked=masked),
        changes=2,
        rules={"mixed_heads": 2},
        context=PassContext(precision=precision),
    )
    assert (len(graph.of_kind("Conv")), len(graph.of_kind("MatMul"))) == (0, 4)


def test_one_convolution_over_heads_is_a_product() -> None:
    check_pass(TalkingHeads(), convolved(second=False), changes=1, rules={"mixed_heads": 1})


@pytest.mark.parametrize(
    "options",
    [{"kernel": 3}, {"group": 2}, {"dynamic": True}, {"images": True}, {"kept": True}],
    ids=["larger filters", "groups", "unknown sizes", "images", "another reader"],
)
def test_other_convolutions_stay(options: dict[str, Any]) -> None:
    check_untouched(TalkingHeads(), convolved(second=False, **options))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_program_of_mixed_maps(precision: str) -> None:
    program = check_simulated(convolved(bias=True, masked=True), precision)
    assert "Conv" not in kinds(program)
