"""Products along tokens: the matrix becomes the first factor, and both Transposes disappear. Others stay, with the reason."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net, built
from support.simulated import check_simulated

from optdnn.ir.graph import Value
from optdnn.ops.index import SplitAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.shape import ReshapeAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.token_products import TokenProducts

FP16 = PassContext(precision="fp16", target="cuda:sm_90a")
TOKENS, WIDTH = 20, 64


def rows(n: Net, batch: int = 2, width: int = WIDTH) -> Value:
    """Rows that a product makes."""
    return n.op("Tanh", n.matmul(n.input(batch, TOKENS, 24), width))


def norm(n: Net, x: Value) -> Value:
    width = int(n.dims(x)[-1])  # type: ignore[arg-type]
    return n.op("LayerNormalization", x, n.random(width), n.random(width), attrs=LayerNormAttrs(-1, 1e-5))


def mixer(n: Net) -> Value:
    """MLP-Mixer: a perceptron along the tokens, and a residual."""
    x = rows(n)
    y = n.op("Add", n.matmul(n.transposed(norm(n, x), 0, 2, 1), 40), n.random(40))
    y = n.op("Add", n.matmul(n.op("Gelu", y), TOKENS), n.random(TOKENS))
    return n.matmul(norm(n, n.op("Add", x, n.transposed(y, 0, 2, 1))), 72)


def resmlp(n: Net) -> Value:
    """ResMLP: a product, a factor of each channel, and a residual."""
    x = rows(n)
    y = n.op("Add", n.matmul(n.transposed(x, 0, 2, 1), TOKENS), n.random(TOKENS))
    y = n.op("Mul", y, n.random(WIDTH, 1))
    return n.matmul(n.op("Add", x, n.transposed(y, 0, 2, 1)), 72)


def gmlp(n: Net) -> Value:
    """gMLP: one half of the channels gates the other half."""
    u, v = n.op("Split", rows(n, width=2 * WIDTH), n.ints(WIDTH, WIDTH), attrs=SplitAttrs(2), outputs=2)
    y = n.op("Add", n.matmul(n.transposed(norm(n, v), 0, 2, 1), TOKENS), n.random(TOKENS))
    return n.matmul(n.op("Mul", u, n.transposed(y, 0, 2, 1)), 72)


def stem(n: Net, other: bool = False) -> Value:
    """A flattened patch embedding: exporters leave out its Transpose and the one after it."""
    image = n.conv(n.input(2, 3, 16, 20), WIDTH, 4, pads=0, strides=4, bias=True)
    x = n.op("Reshape", image, n.ints(2, WIDTH, TOKENS), attrs=ReshapeAttrs())
    y = n.op("Add", x, n.op("Mul", n.matmul(x, TOKENS), n.random(WIDTH, 1)))
    y = n.matmul(n.transposed(y, 0, 2, 1), 72)
    return n.op("Add", y, n.op("ReduceMean", x, n.ints(1, 2))) if other else y


@pytest.mark.parametrize(("build", "turns"), [(mixer, 0), (resmlp, 0), (gmlp, 0), (stem, 1)])
def test_nothing_is_transposed_along_tokens(build: Callable[[Net], Value], turns: int) -> None:
    graph, _ = check_pass(TokenProducts(), built(build), changes=1, rules={"token_product": 1}, context=FP16)
    assert len(graph.of_kind("Transpose")) == turns
    left = [op for op in graph.of_kind("MatMul") if graph.constant_value(op.inputs[0]) is not None]
    assert len(left) == (2 if build is mixer else 1)


def test_an_exchange_that_others_read_stays_for_them() -> None:
    n = Net()
    x = n.transposed(rows(n), 0, 2, 1)
    y = n.transposed(n.matmul(x, TOKENS), 0, 2, 1)
    graph, _ = check_pass(TokenProducts(), n.done(y, n.op("Relu", x)), changes=1, context=FP16)
    assert len(graph.of_kind("Transpose")) == 1


def _other_axes(n: Net) -> Value:
    x = n.transposed(n.input(TOKENS, 2, WIDTH), 1, 2, 0)
    return n.transposed(n.matmul(x, TOKENS), 0, 2, 1)


def _of_images(n: Net) -> Value:
    x = n.conv(n.input(2, 8, 30), WIDTH)
    return n.transposed(n.matmul(n.transposed(x, 0, 2, 1), 16), 0, 2, 1)


def _of_an_input(n: Net) -> Value:
    return n.transposed(n.matmul(n.transposed(n.input(2, TOKENS, WIDTH), 0, 2, 1), 16), 0, 2, 1)


def _few_channels(n: Net) -> Value:
    return n.transposed(n.matmul(n.transposed(rows(n, width=32), 0, 2, 1), 16), 0, 2, 1)


def _few_tokens(n: Net) -> Value:
    return n.transposed(n.matmul(n.transposed(n.matmul(n.input(2, 8, 24), WIDTH), 0, 2, 1), 16), 0, 2, 1)


@pytest.mark.parametrize(
    ("build", "context", "because"),
    [
        (gmlp, PassContext(precision="fp32", target="cuda:sm_90a"), "no kernel for products from the left in fp32"),
        (gmlp, PassContext(precision="int8+fp16", target="cuda:sm_90a"), r"products from the left in int8\+fp16"),
        (gmlp, PassContext(precision="fp16", target="cuda:sm_80"), "only Hopper has a kernel .*cuda:sm_80 has none"),
        (gmlp, PassContext(precision="fp16", target="reference"), "only Hopper has a kernel .*reference has none"),
        (_other_axes, FP16, "does not exchange the last two axes"),
        (lambda n: stem(n, other=True), FP16, "whose tokens are last, has other readers"),
        (_of_images, FP16, "may be stored with the tokens last"),
        (_few_channels, FP16, "20 tokens of 32 channels do not fill a tile"),
        (_few_tokens, FP16, "8 tokens of 64 channels do not fill a tile"),
        (_of_an_input, FP16, "may be stored with the tokens last"),
    ],
)
def test_refusals(build: Callable[[Net], Value], context: PassContext, because: str) -> None:
    check_refused(TokenProducts(), built(build), because=because, context=context)


def _read_between(n: Net) -> tuple[Value, ...]:
    y = n.matmul(n.transposed(rows(n), 0, 2, 1), TOKENS)
    return n.transposed(y, 0, 2, 1), n.op("Relu", y)


def _of_two(n: Net) -> tuple[Value, ...]:
    y = n.op("Add", n.matmul(n.transposed(rows(n), 0, 2, 1), TOKENS), n.input(2, WIDTH, TOKENS, name="z"))
    return (n.transposed(y, 0, 2, 1),)


def _computed(n: Net) -> tuple[Value, ...]:
    return (n.transposed(n.op("MatMul", n.transposed(rows(n), 0, 2, 1), n.input(TOKENS, TOKENS, name="w")), 0, 2, 1),)


def _widened(n: Net) -> tuple[Value, ...]:
    y = n.op("Add", n.matmul(n.transposed(rows(n, batch=1), 0, 2, 1), TOKENS), n.random(3, 1, TOKENS))
    return (n.transposed(y, 0, 2, 1),)


def _no_product(n: Net) -> tuple[Value, ...]:
    return (n.transposed(n.op("Relu", n.transposed(rows(n), 0, 2, 1)), 0, 2, 1),)


def _heads(n: Net) -> tuple[Value, ...]:
    y = n.op("Reshape", n.matmul(n.transposed(rows(n), 0, 2, 1), TOKENS), n.ints(2, 8, 8, TOKENS))
    return (n.transposed(y, 0, 2, 1, 3),)


@pytest.mark.parametrize("build", [_read_between, _of_two, _computed, _widened, _no_product, _heads])
def test_networks_without_a_candidate(build: Callable[[Net], tuple[Value, ...]]) -> None:
    check_untouched(TokenProducts(), built(build), FP16)


@pytest.mark.parametrize(("build", "launches"), [(mixer, 5), (resmlp, 3), (gmlp, 4), (stem, 4)])
def test_programs_have_no_copies(build: Callable[[Net], Value], launches: int) -> None:
    n = Net(np.float16)
    program = check_simulated(n.done(build(n)))
    tactics = [str(s.params["tactic"]).split()[0] for s in program.steps]
    assert tactics.count("matmul_sm90") == (2 if build is mixer else 1)
    assert len(tactics) == launches, tactics
