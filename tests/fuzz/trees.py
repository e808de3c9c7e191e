"""Mutations of JSON: of its values if it is valid, otherwise of its bytes."""

from __future__ import annotations

import json
from collections.abc import Collection
from random import Random
from typing import Any

INTEGERS = (
    *(0, 1, -1, 2, 3, 4, 7, 8, 16, 17, 63, 64, 65, 127, 128, 255, 256, 1000, 4096, 1 << 15, 1 << 16, 1 << 20),
    *((1 << 31) - 1, 1 << 31, 1 << 32, 1 << 33, 1 << 40, 1 << 61, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64),
    *(-2, -(1 << 31), -(1 << 63), 10**30, 10**400),
)
FLOATS = (0.0, -0.0, 0.5, 1.0, 1e-300, 1e300, -1e300, 3e38, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    *("", "x", "y", "n", "n + 1", "0", "fp32", "fp16", "int8", "int64", "relu", "Relu", "cuda", "reference", "auto"),
    *("../x", "/dev/zero", "[/red]", "\x1b[2J", "\u202e", "\0", "\ud800", "x" * 300, "None", "$float", "{}", "é"),
)


def mutated_json(data: bytes, rng: Random, skip: Collection[str] = ()) -> bytes:
    """The text with a few changed values, sometimes with changed bytes. ``skip``: keys at the top that mostly stay."""
    if rng.random() < 0.05:
        return mutated_bytes(data, rng)
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError):
        return mutated_bytes(data, rng)
    plain = mutated_tree(plain, rng, skip)
    return json.dumps(plain).encode() if rng.random() < 0.5 else encoded(plain)


def encoded(plain: Any) -> bytes:
    """Plain data in the form of an engine's header. Half of a surrogate pair is written unchanged."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def mutated_tree(plain: Any, rng: Random, skip: Collection[str] = ()) -> Any:
    """Plain data with one to four changes, in place if possible."""
    root = [plain]
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        _change(root, rng, skip)
    return root[0]


def _change(root: list[Any], rng: Random, skip: Collection[str]) -> None:
    inner, key = place(root, rng, skip)
    old, how = inner[key], rng.random()
    if how < 0.2:
        donor, at = place(root, rng, ())
        inner[key] = copied(donor[at])
    elif how < 0.3:
        inner[key] = anything(rng)
    elif how < 0.38 and inner is not root:
        del inner[key]
    elif how < 0.46 and inner is not root:
        if isinstance(inner, list):
            inner.insert(rng.randrange(len(inner) + 1), copied(old))
        else:
            inner[rng.choice((key + "x", *TEXTS[:20]))] = copied(old)
    else:
        inner[key] = like(old, rng)


def place(root: Any, rng: Random, skip: Collection[str]) -> tuple[Any, Any]:
    """A part of plain data: its container and its key there. Parts of large lists are no more likely than others."""
    inner: Any = root
    while True:
        if isinstance(inner, dict):
            keys = list(inner)
            key = keys[rng.randrange(len(keys))]
            if (key in skip or not isinstance(inner[key], (dict, list))) and rng.random() < 0.7:
                key = keys[rng.randrange(len(keys))]
        else:
            key = rng.randrange(len(inner))
        child = inner[key]
        if not isinstance(child, (dict, list)) or not child or (inner is not root and rng.random() < 0.15):
            return inner, key
        inner = child


def copied(value: Any) -> Any:
    """A copy that shares no list or table."""
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return [copied(v) for v in value] if isinstance(value, list) else value


def anything(rng: Random) -> Any:
    kind = rng.randrange(7)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind == 1:
        return rng.choice(FLOATS)
    if kind == 2:
        return rng.choice(TEXTS)
    if kind == 3:
        return [rng.choice(INTEGERS) for _ in range(rng.randrange(5))]
    if kind == 4:
        return {rng.choice(TEXTS): rng.choice(INTEGERS) for _ in range(rng.randrange(3))}
    if kind == 5:
        return rng.choice(([[]], [None], ["x"], {"a": {}}, [[1], [2]], [0] * 100))
    return rng.choice(INTEGERS)


def like(old: Any, rng: Random) -> Any:
    """Another value of the same type."""
    if isinstance(old, bool) or old is None:
        return rng.choice((None, True, False, 0, 1))
    if isinstance(old, int):
        return number(old, rng)
    if isinstance(old, float):
        return rng.choice((*FLOATS, old * 2, -old, old + 1, int(min(max(old, -9e9), 9e9)) if old == old else 0))
    if isinstance(old, str):
        return text(old, rng)
    if isinstance(old, list):
        made = list(old)
        how = rng.randrange(6)
        if how == 0:
            rng.shuffle(made)
        elif how == 1 and made:
            made = made * rng.choice((2, 2, 3, 70 if len(made) < 20 else 2))
        elif how == 2:
            made = made[: len(made) // 2]
        elif how == 3:
            made = []
        elif how == 4:
            made.append(anything(rng))
        else:
            made = [like(x, rng) for x in made[:50]]
        return made
    return rng.choice(({}, [old], list(old.values()) if isinstance(old, dict) else old))


def number(old: int, rng: Random) -> int:
    """An integer near the given one, or a value that often makes arithmetic fail."""
    how = rng.randrange(8)
    if how < 3:
        return old + rng.choice((1, -1, 2, -2, 16, 64))
    if how == 3:
        return rng.choice((old * 2, old // 2, -old, old * 1000, ~old))
    return rng.randrange(10) if how < 6 else rng.choice(INTEGERS)


def text(old: str, rng: Random) -> str:
    """A text near the given one, or one with a special meaning somewhere."""
    how, at = rng.randrange(5), rng.randrange(len(old) + 1)
    if how == 0:
        return old[:at] + old[at + 1 :]
    if how == 1:
        return old[:at] + rng.choice("09azAZ_ .,:;+-*/()[]{}<>=\"'\\\n\0\u202e☃#$%&|!~^@?") + old[at:]
    if how == 2:
        return old[:at] + str(rng.choice(INTEGERS)) + old[at:]
    return old + old[at:] if how == 3 else rng.choice(TEXTS)


def mutated_bytes(data: bytes, rng: Random) -> bytes:
    """Bytes with some flipped, removed, added or copied."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        how, at = rng.randrange(5), rng.randrange(len(made) + 1)
        n = rng.choice((1, 1, 2, 4, 8, 32))
        if how == 0 and at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        elif how == 1 and at < len(made):
            made[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x5B, 0x7B, rng.randrange(256)))
        elif how == 2:
            del made[at : at + n]
        elif how == 3:
            made[at:at] = rng.randbytes(n)
        else:
            source = rng.randrange(len(made) + 1)
            made[at:at] = made[source : source + n]
    return bytes(made)
