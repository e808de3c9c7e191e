"""Attention of one new position over a cache, in many forms: sizes, angles, windows, and fill levels of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.kernels.attention.cached_kernel import Places, Problem
from optdnn.kernels.attention.problem import HeadView
from optdnn.runtime.reference.regions import cached_attention
from optdnn.types import BF16, FP16, Array

TYPES = {"float16": FP16, "bfloat16": BF16}
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}


@dataclass(frozen=True)
class Case:
    """A problem, and the number of keys of each sample. The new row is the last of these keys, or the one at ``starts``."""

    problem: Problem
    lengths: tuple[int, ...]
    starts: tuple[int, ...] = ()


def case(
    lengths: Sequence[int], heads: int = 4, key_heads: int = 2, features: int = 64, capacity: int = 300, **more: object
) -> Case:
    """A case in which all features are rotated, unless ``turned`` gives another number."""
    starts = more.pop("starts", ())
    given = {"turned": features, **more}
    problem = Problem(len(lengths), heads, key_heads, capacity, features, features**-0.5, **given)  # type: ignore[arg-type]
    return Case(problem, tuple(lengths), tuple(starts))  # type: ignore[arg-type]


CASES = {
    "one key": case([1]),
    "a full cache": case([300]),
    "lengths of their own": case([1, 17, 64, 65, 130, 300]),
    "heads of 128": case([200, 3], features=128),
    "heads of 80, a part turns": case([100], features=80, turned=32),
    "heads of 96, neighbors": case([77], features=96, interleaved=True),
    "heads of 256": case([90], heads=2, key_heads=1, features=256),
    "heads of 16, none turns": case([40], features=16, turned=0),
    "each its own keys": case([150, 2], heads=3, key_heads=3),
    "groups of 5": case([140], heads=5, key_heads=1),
    "groups of 12": case([129, 5], heads=12, key_heads=1),
    "a window": case([299, 4, 70], reach=60),
    "a softcap": case([90, 300], softcap=1.5),
    "a window and a softcap, bf16": case([222], dtype="bfloat16", reach=100, softcap=2.0),
    "bf16": case([260, 31], dtype="bfloat16"),
    "no key": case([0, 5]),
    "a row elsewhere": case([100, 100], starts=(7, 299)),
    "sinks": case([1, 17, 130, 300], sinks=True),
    "sinks, groups of 12": case([129, 5], heads=12, key_heads=1, sinks=True),
    "sinks, a window and a softcap, bf16": case([222], dtype="bfloat16", reach=100, softcap=2.0, sinks=True),
    "sinks, no key": case([0, 5], heads=6, sinks=True),
}


SINKS = np.array([3.0, -np.inf, -2.0, 7.0, 0.5, 300.0, 1.0, 5.0, -100.0, 2.0, 4.0, 6.0])
"""The sinks of the first heads: below, among and far above the scores, and one that changes nothing."""


@dataclass
class Operands:
    """Operands as the launch reads them, and the expected result, keys and values."""

    held: dict[str, Array]
    places: Places
    wanted: tuple[Array, ...]


def operands_of(c: Case) -> Operands:
    """Seeded operands. After the filled part of the cache there is NaN. Queries, new keys and new values are parts of one row."""
    p, rng = c.problem, np.random.default_rng(0)
    float_type = TYPES[p.dtype]
    kinds = (p.heads, p.key_heads, p.key_heads)
    joint = rng.standard_normal((p.batch, sum(kinds), p.features)).astype(float_type)
    q, new_k, new_v = (part[:, :, None] for part in np.split(joint, np.cumsum(kinds)[:2], axis=1))
    keys, values = (
        rng.standard_normal((p.batch, p.key_heads, p.capacity, p.features)).astype(float_type) for _ in range(2)
    )
    lengths = np.array(c.lengths, np.int64)
    starts = np.array(c.starts or [max(0, n - 1) for n in c.lengths], np.int64)
    for b, n in enumerate(c.lengths):
        keys[b, :, n:], values[b, :, n:] = np.nan, np.nan
    turn = rng.uniform(-3, 3, (p.batch, 1, p.turned // 2))
    angles = [f(turn).astype(float_type) for f in (np.cos, np.sin)] if p.turned else [None, None]
    wide = [None if x is None else x.astype(np.float32) for x in (q, new_k, new_v, *angles)]
    filled = [np.nan_to_num(x.astype(np.float32)) for x in (keys, values)]
    sinks = SINKS[: p.heads].astype(float_type) if p.sinks else None
    attrs = {"scale": p.scale, "softcap": p.softcap, "left_window_size": p.reach, "interleaved": p.interleaved}
    given = None if sinks is None else sinks.astype(np.float32)
    wanted = cached_attention(*wide, starts, lengths, *filled, given, rotary_embedding_dim=p.turned, **attrs)  # type: ignore[arg-type]
    row = sum(kinds) * p.features
    own = HeadView(p.key_heads * p.capacity * p.features, p.capacity * p.features, p.features)
    places = Places(
        HeadView(row, p.features, 0), HeadView(row, p.features, 0, p.heads * p.features),
        HeadView(row, p.features, 0, (p.heads + p.key_heads) * p.features), own, own,
        HeadView(p.heads * p.features, p.features, 0), p.turned, p.turned, 8, 8,
    )  # fmt: skip
    held = {"joint": joint, "starts": starts, "lengths": lengths, "k": keys, "v": values}
    held |= {n: a for n, a in zip(("cosines", "sines"), angles, strict=True) if a is not None}
    held |= {} if sinks is None else {"sinks": sinks}
    held["out"] = np.zeros((p.batch, p.heads, 1, p.features), float_type)
    return Operands(held, places, wanted)


JOINT = dict.fromkeys(("q", "new_k", "new_v"), "joint")
"""The operands in one array."""


def check(c: Case, o: Operands, held: dict[str, Array]) -> None:
    """The expected operands after a launch: the result, the new rows, and all other bytes of the cache unchanged."""
    p, (y, *caches) = c.problem, o.wanted
    bound = TOLERANCE[p.dtype]
    np.testing.assert_allclose(held["out"].astype(np.float32), y, rtol=0, atol=bound * np.abs(y).max())
    for n, want in zip(("k", "v"), caches, strict=True):
        found = held[n].copy()
        for b, at in enumerate(o.held["starts"]):
            np.testing.assert_allclose(found[b, :, at].astype(np.float32), want[b, :, at], rtol=0, atol=4 * bound)
            found[b, :, at] = o.held[n][b, :, at]
        assert found.tobytes() == o.held[n].tobytes()
