"""Data that builders share: a weight is packed and hashed once, and never confused with another."""

from __future__ import annotations

import hashlib

import numpy as np
from support.net import Net

from optdnn.ir.constant_cache import ConstantCache
from optdnn.types import Array


def graph_with(*weights: Array) -> tuple[ConstantCache, list[Array]]:
    n = Net()
    x = n.input(1, 4)
    for w in weights:
        x = n.op("MatMul", x, n.const(w))
    graph = n.done(x)
    return ConstantCache().of(graph), [op.attrs.value for op in graph.of_kind("Constant")]


def test_views_of_constants_are_packed_once() -> None:
    kept, (w, other) = graph_with(np.eye(4, dtype=np.float32), 2 * np.eye(4, dtype=np.float32))
    made: list[Array] = []

    def pack(a: Array) -> Array:
        made.append(np.ascontiguousarray(a.T) + 1)
        return made[-1]

    first = kept.once("t", [w], lambda: pack(w))
    assert kept.once("t", [w[:, :]], lambda: pack(w)) is first
    for key, a in (("u", w), ("t", other), ("t", w.T), ("t", w[1:])):
        assert kept.once(key, [a], lambda a=a: pack(a)) is not first  # type: ignore[misc]
    assert len(made) == 5
    assert kept.once(0, [first], lambda: pack(first)) is kept.once(0, [first], lambda: pack(first)), "and what was made"


def test_computed_values_are_made_each_time() -> None:
    kept, (w,) = graph_with(np.eye(4, dtype=np.float32))
    for _ in range(3):
        passing = w * 3
        assert kept.once("t", [passing], lambda a=passing: a + 1)[0, 0] == 4  # type: ignore[misc]
    assert not kept._made


def test_digests_are_of_the_content() -> None:
    kept, (w,) = graph_with(np.arange(16, dtype=np.float32).reshape(4, 4))
    for a in (w, w[2:], w.reshape(-1), w * 2, w[:0]):
        wanted = hashlib.sha256(a.tobytes()).digest() if a.size else b""
        assert kept.digest(a) == kept.digest(a) == wanted
    assert len(kept._digests) == 3


def test_shared_data_come_first_and_outlive_own_data() -> None:
    weight, own = np.arange(400, dtype=np.float32).reshape(20, 20), np.ones((30, 30), np.float32)
    packed = np.ascontiguousarray(weight.T)
    engine = ConstantCache()
    engine.hold(weight)
    engine.hold(packed, hashlib.sha256(packed.tobytes()).digest())  # in the form of an engine's file
    made: list[str] = []

    def turned(a: Array) -> Array:
        made.append("turned")
        return np.ascontiguousarray(a.T)

    for _ in range(2):  # two plans
        plan = ConstantCache(shared=engine)
        plan.hold(own)
        assert plan.has("t", [weight]) == bool(made)
        assert plan.once("t", [weight], lambda: turned(weight), final=True) is packed, "the array of that content"
        assert plan.has("t", [weight])
        assert not plan.has("u", [weight])
        assert not plan.has("t", [own])
        assert plan.same(packed.copy())[1] is packed
        assert plan.once("t", [own], lambda: turned(own)) is plan.once("t", [own], lambda: turned(own))
    assert len(made) == 3, "the weight's once for both, and each plan its own"
    assert not engine.knows([own])
    assert len(engine._made) == 1


def test_small_operands_go_by_their_content() -> None:
    kept, w = ConstantCache(), np.arange(400, dtype=np.float32).reshape(20, 20)
    kept.hold(w)
    products = [kept.once("x", [w, np.float32([k])], lambda k=k: w * np.float32(k)) for k in (2, 3, 2)]  # type: ignore[misc]
    assert products[0] is products[2]
    assert products[1][1, 1] == 63
    assert not kept.knows([np.float32([2])]), "and alone they are made anew"
    large = np.ones(1000, np.float32)
    assert not kept.knows([w, large])
