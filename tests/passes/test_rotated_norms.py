"""norm_before_rotary: norms of rotated heads move before the rotation, if all features have one factor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.attention import AttentionAttrs, RotaryAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.passes.fuse_rotary import FuseRotary

FUSE = FuseRotary()
RULE = "norm_before_rotary"
ANGLES = np.random.default_rng(3).standard_normal((1, 5, 4))


def known(n: Net) -> tuple[Value, Value]:
    return n.const(np.cos(ANGLES)), n.const(np.sin(ANGLES))


def computed(n: Net, *, other: bool = False, scaled: bool = False) -> tuple[Value, Value]:
    """Cosines and negated sines of an input: each takes one half of them."""
    angles = n.input(1, 5, 8, name="angles")
    second = n.op("Mul", angles, n.const(0.5)) if other else angles
    c, s = n.op("Cos", angles), n.op("Sin", second)
    c = n.op("Mul", c, n.const(1.5)) if scaled else c
    c, s = (n.op("Slice", v, n.ints(0), n.ints(4), n.ints(-1)) for v in (c, s))
    return c, n.op("Neg", s)


def net(
    n: Net, angles: tuple[Value, Value], *, scale: Any = 0.5, axis: int = -1, twice: bool = False, length: Any = 5, **options: Any
) -> Graph:  # fmt: skip
    x = n.op("RotaryEmbedding", n.input(2, 3, length, 8), *angles, attrs=RotaryAttrs(**options))
    factor = n.const(np.broadcast_to(np.asarray(scale), (8,) if axis == -1 else (length, 8)).copy())
    y = n.op("RMSNormalization", x, factor, attrs=LayerNormAttrs(axis=axis, epsilon=1e-3))
    return n.done(y, n.op("Relu", x)) if twice else n.done(y)


@pytest.mark.parametrize("options", [{}, {"interleaved": True}, {"parts": 2}], ids=str)
def test_the_norm_moves_before_the_embedding(options: dict[str, Any]) -> None:
    n = Net(np.float64)
    graph, _ = check_pass(FUSE, net(n, known(n), **options), changes=1, rules={RULE: 1})
    (rotary,) = graph.of_kind("RotaryEmbedding")
    assert graph.op(rotary.inputs[0]).kind == "RMSNormalization"
    assert rotary.attrs == RotaryAttrs(**options)


def test_features_that_are_not_rotated() -> None:
    n = Net(np.float64)
    angles = n.const(np.cos(ANGLES[..., :2])), n.const(np.sin(ANGLES[..., :2]))
    check_pass(FUSE, net(n, angles, rotary_embedding_dim=4), changes=1, rules={RULE: 1})


def test_angles_that_are_computed() -> None:
    n = Net(np.float64)
    check_pass(FUSE, net(n, computed(n)), changes=1, rules={RULE: 1})


def test_unknown_numbers_of_positions() -> None:
    n = Net(np.float64)
    angles = n.input(1, symbol("t"), 4, name="angles")
    graph = net(n, (n.op("Cos", angles), n.op("Sin", angles)), length=symbol("t"))
    check_pass(FUSE, graph, changes=1, rules={RULE: 1})


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"scale": np.arange(8.0)}, "its scale differs between features"),
        ({"axis": -2}, "it does not normalize each head"),
    ],
)
def test_other_norms_stay(options: dict[str, Any], because: str) -> None:
    n = Net(np.float64)
    check_refused(FUSE, net(n, known(n), **options), because=because, rule=RULE)


@pytest.mark.parametrize("case", ["not of length one", "own angles", "other angles", "scaled", "unknown"])
def test_embeddings_that_may_change_the_sum_stay(case: str) -> None:
    n, options = Net(np.float64), {}
    match case:
        case "not of length one":
            angles = n.const(1.1 * np.cos(ANGLES)), n.const(np.sin(ANGLES))
        case "own angles":
            own = np.concatenate([ANGLES, 2 * ANGLES], -1)
            angles, options = (n.const(np.cos(own)), n.const(np.sin(own))), {"own_angles": True}
        case "unknown":
            angles = n.input(1, 5, 4, name="c"), n.input(1, 5, 4, name="s")
        case _:
            angles = computed(n, other=case == "other angles", scaled=case == "scaled")
    check_refused(FUSE, net(n, angles, **options), because="is not known to rotate by", rule=RULE)


def test_rotated_heads_that_others_read_stay() -> None:
    n = Net(np.float64)
    check_untouched(FUSE, net(n, known(n), twice=True))


def test_queries_and_keys_take_one_launch() -> None:
    """Rotary embeddings of queries and keys, each with a norm after it."""
    n = Net()
    c, s = n.const(np.cos(ANGLES).astype(np.float32)), n.const(np.sin(ANGLES).astype(np.float32))
    heads = []
    for name in "qk":
        x = n.op("RotaryEmbedding", n.op("Relu", n.input(2, 3, 5, 8, name=name)), c, s, attrs=RotaryAttrs())
        heads.append(n.op("RMSNormalization", x, n.const(np.ones(8, np.float32)), attrs=LayerNormAttrs()))
    y = n.op("Attention", *heads, n.input(2, 3, 5, 8, name="v"), attrs=AttentionAttrs(scale=0.3))
    assert kinds(check_simulated(n.done(y))).count("RotaryNormPair") == 1
