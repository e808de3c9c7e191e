"""short_attention: items of few tokens share a tile of attention, and one key needs none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.short_attention_cases import frames
from support.simulated import check_simulated, kinds

from optdnn.dim import symbol
from optdnn.ops.attention import AttentionAttrs
from optdnn.passes import short_attention
from optdnn.passes.short_attention import ShortAttention

PASS = ShortAttention()


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_attention, "FEWEST_ITEMS", 8)


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ({}, 2),
        ({"queries": 5, "keys": 16}, 3),
        ({"queries": 16, "keys": 5}, 3),
        ({"count": 4, "shared": 2, "scale": 0.3}, 2),
        ({"batch": 10}, 2),
        ({"softcap": 5.0}, 2),
    ],
)
def test_neighboring_items_are_one(options: dict[str, Any], batch: int) -> None:
    graph, _ = check_pass(PASS, frames(**options), changes=1, rules={"packed_items": 1})
    (op,) = graph.of_kind("Attention")
    assert graph.type(op.inputs[0]).dims[0] == batch  # type: ignore[arg-type]


def test_they_are_views_of_the_projections() -> None:
    found = kinds(check_simulated(frames(count=4)))
    assert found.count("Attention") == 1
    assert not {"Copy", "Transpose", "Concat"} & set(found)


@pytest.mark.parametrize("queries", [1, 8, 40])
def test_one_key_is_its_value(queries: int) -> None:
    graph, _ = check_pass(PASS, frames(queries=queries, keys=1), changes=1, rules={"one_key": 1})
    assert not graph.of_kind("Attention")


def test_it_refuses() -> None:
    check_refused(PASS, frames(batch=3), because="6 items of 8 tokens are not enough")
    check_refused(PASS, frames(batch=11), because="11 items cannot be put together")
    check_refused(PASS, frames(keys=1, count=4), because="its heads share values")


@pytest.mark.parametrize(
    "options",
    [{"queries": 17}, {"mask": True}, {"is_causal": True}, {"left_window_size": 2}, {"batch": symbol("n", 1, 64)}],
)
def test_others_are_no_candidates(options: dict[str, Any]) -> None:
    check_untouched(PASS, frames(**options))


@pytest.mark.parametrize("keys", [1, 8])
def test_attention_with_sinks_stays(keys: int) -> None:
    """The weight of one key is not 1."""
    n = Net()
    q, k, v = (n.input(12, 2, size, 8, name=name) for name, size in (("q", 8), ("k", keys), ("v", keys)))
    check_untouched(PASS, n.done(n.op("Attention", q, k, v, *[None] * 4, n.random(2), attrs=AttentionAttrs())))


def test_scores_that_are_read_stay() -> None:
    n = Net()
    q, k, v = (n.input(12, 2, 8, 8, name=name) for name in "qkv")
    y, _, _, scores = n.op("Attention", q, k, v, None, None, None, attrs=AttentionAttrs(), outputs=4)
    check_untouched(PASS, n.done(y, scores))


def test_masks_separate_items() -> None:
    graph, _ = check_pass(PASS, frames(), changes=1)
    (op,) = graph.of_kind("Attention")
    mask = graph.constant_value(op.inputs[3])
    assert mask is not None
    assert mask.shape == (1, 1, 48, 48)
    np.testing.assert_array_equal(np.isfinite(mask[0, 0, :9, :9]), np.kron(np.eye(2), np.ones((8, 8)))[:9, :9] == 1)
