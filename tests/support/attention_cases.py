"""Problems of attention for tests of its kernels: random operands, and the results in float64."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from optdnn.kernels.attention.problem import HeadView, Problem, bhsd
from optdnn.kernels.launch import Launch
from optdnn.kernels.quantized.quantized_store import QuantizedStore
from optdnn.ops.requantize import QuantParams
from optdnn.runtime.cuda.compile import nvrtc
from support import emulated


def bshd(positions: int, heads: int, features: int, *, parts: int = 1, part: int = 0) -> HeadView:
    """The view of part ``part`` of a tensor [batch, position, parts, head, feature]."""
    row = parts * heads * features
    return HeadView(positions * row, features, row, part * heads * features)


def merged(batch: int, heads: int, positions: int, features: int, **options: Any) -> Problem:
    """q, k and v in the output of one joint projection."""
    q, k, v = (bshd(positions, heads, features, parts=3, part=i) for i in range(3))
    out = bshd(positions, heads, features)
    return Problem(batch, heads, positions, positions, features, features**-0.5, q, k, v, out, **options)


def apart(batch: int, heads: int, queries: int, keys: int, features: int, shared: int = 0, **options: Any) -> Problem:
    """Separate tensors [batch, head, position, feature]; the result is [batch, position, head, feature]."""
    q, k, out = bhsd(queries, heads, features), bhsd(keys, shared or heads, features), bshd(queries, heads, features)
    return Problem(batch, heads, queries, keys, features, 0.3, q, k, k, out, key_heads=shared, **options)


def wide_values(batch: int, heads: int, positions: int, features: int, values: int, **options: Any) -> Problem:
    """Values with another number of features than keys; tensors are [batch, head, position, feature]."""
    q, v = (bhsd(positions, heads, n) for n in (features, values))
    return Problem(batch, heads, positions, positions, features, 0.3, q, q, v, v, value_features=values, **options)


TO = {"uint8": QuantParams("uint8", 0.02, 121), "int8": QuantParams("int8", 0.015, 3)}
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.5e-2, "float32": 2e-6, "tfloat32": 2e-3}


def dtype_of(problem: Problem) -> Any:
    return np.dtype(ml_dtypes.bfloat16 if problem.dtype == "bfloat16" else problem.dtype)


def seen(flat: np.ndarray, view: HeadView, shape: tuple[int, ...]) -> np.ndarray:
    """A view of a flat array in logical order (batch, head, position, feature)."""
    strides = [s * flat.itemsize for s in (view.batch, view.head, view.position, 1)]
    return np.lib.stride_tricks.as_strided(flat[view.offset :], shape, strides)


def extent(view: HeadView, shape: tuple[int, ...]) -> int:
    steps = (view.batch, view.head, view.position, 1)
    return view.offset + 1 + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))


class Case:
    """Random operands of a problem, and its result in float64.

    ``growing``: later keys have larger scores, so that maxima of rows grow from tile to tile, sometimes by more than the range
    of the exponential function.
    """

    def __init__(self, p: Problem, seed: int = 0, *, growing: bool = False):
        self.problem, rng, dtype = p, np.random.default_rng(seed), dtype_of(p)
        key_heads = p.key_heads or p.heads
        shapes = {"q": (p.batch, p.heads, p.queries, p.features)}
        self.values = p.value_features or p.features
        shapes |= {"k": (p.batch, key_heads, p.keys, p.features), "v": (p.batch, key_heads, p.keys, self.values)}
        views = {"q": p.q, "k": p.k, "v": p.v}
        joint = p.k.offset > 0
        size = max(extent(views[n], shapes[n]) for n in "qkv")
        whole = rng.standard_normal(size).astype(np.float32).astype(dtype)
        self.operands: dict[str, np.ndarray] = {}
        for name in "qkv":
            own = whole if joint else rng.standard_normal(extent(views[name], shapes[name])).astype(np.float32)
            self.operands[name] = own if joint else own.astype(dtype)
        if growing:
            keys, ramp = seen(self.operands["k"], views["k"], shapes["k"]), np.linspace(0.1, 6, p.keys)[:, None]
            ramp[p.keys * 4 // 5 :] *= 20
            keys[...] = (keys.astype(np.float32) * ramp).astype(dtype)
        q, k, v = (seen(self.operands[n], views[n], shapes[n]).astype(np.float64) for n in "qkv")
        k, v = (x.repeat(p.heads // key_heads, 1) for x in (k, v))
        scores = q @ k.swapaxes(2, 3) * p.scale
        if p.softcap:
            scores = p.softcap * np.tanh(scores / p.softcap)
        if p.mask is not None:
            sizes = [n if s else 1 for n, s in zip((p.batch, p.heads, p.queries), p.mask, strict=True)]
            sizes[0] = p.mask_period or sizes[0]
            mask = rng.standard_normal((*sizes, p.keys))
            mask[rng.random(mask.shape) < 0.3] = -np.inf
            mask[..., 0] = 0.5
            mask = mask.astype(np.float32).astype(dtype)
            pitch = p.mask[2] or p.keys
            self.operands["mask"] = np.pad(mask, [(0, 0)] * 3 + [(0, pitch - p.keys)]).reshape(-1)
            scores += np.tile(mask, (p.batch // sizes[0] if p.mask_period else 1, 1, 1, 1)).astype(np.float64)
        columns = np.arange(p.keys)
        hidden = np.zeros((p.batch, 1, p.queries, p.keys), bool)
        positions = np.arange(p.queries)[:, None] + p.causal_offset
        if p.lengths:
            lengths = rng.integers(0, p.keys + 1, p.batch).astype(np.int32)
            lengths[0], lengths[-1] = 0, p.keys
            self.operands["lengths"] = lengths
            hidden |= columns >= lengths[:, None, None, None]
            if p.from_end:
                positions = positions + lengths[:, None, None, None] - p.queries
        if p.causal:
            hidden |= columns > positions
        if p.reach >= 0:
            hidden |= columns < positions - p.reach
        scores[np.broadcast_to(hidden, scores.shape)] = -np.inf
        dead = np.isneginf(scores).all(-1, keepdims=True)
        if p.sinks:
            self.operands["sinks"] = np.resize([3.0, -np.inf, -2.0, 7.0, 300.0, 0.5], p.heads).astype(dtype)
            own = self.operands["sinks"].astype(np.float64)[:, None, None]
            scores = np.concatenate([scores, np.broadcast_to(own, (*scores.shape[:3], 1))], -1)
        top = np.where(dead, 0, scores.max(-1, keepdims=True))
        weights = np.exp(np.where(dead, -np.inf, scores) - top)
        total, weights = weights.sum(-1, keepdims=True), weights[..., : p.keys]
        self.want = (weights / np.where(total == 0, 1, total)) @ v
        self.narrow = QuantizedStore.of(TO[p.narrow]) if p.narrow else None

    @property
    def out_dtype(self) -> Any:
        return np.dtype(self.problem.narrow) if self.problem.narrow else dtype_of(self.problem)

    def poisoned(self) -> np.ndarray:
        """A result full of NaN (of bytes: 0xA5), with space before and after it."""
        p = self.problem
        size = extent(p.out, (p.batch, p.heads, p.queries, self.values))
        return np.full((size + 64) * self.out_dtype.itemsize, 0xA5 if p.narrow else 0xFF, np.uint8)

    def check(self, raw: np.ndarray) -> None:
        p = self.problem
        flat = raw.view(self.out_dtype)
        assert (raw[-32 * self.out_dtype.itemsize :] == (0xA5 if p.narrow else 0xFF)).all()
        assert (raw[: 32 * self.out_dtype.itemsize] == (0xA5 if p.narrow else 0xFF)).all()
        got = seen(flat[32:], p.out, self.want.shape)
        if p.narrow:
            to = TO[p.narrow]
            info = np.iinfo(p.narrow)
            want = np.clip(np.rint(self.want / to.scale) + to.zero, info.min, info.max)
            difference = np.abs(got.astype(np.float64) - want)
            assert difference.max() <= 2 if p.dtype == "bfloat16" else difference.max() <= 1
            assert (difference > 0).mean() < 0.15
            return
        np.testing.assert_allclose(
            got.astype(np.float64),
            self.want,
            rtol=0,
            atol=TOLERANCE["tfloat32" if p.rounded else p.dtype] * max(np.abs(self.want).max(), 1),
        )


def emulated_bytes(case: Case, made: Launch, library: ctypes.CDLL) -> np.ndarray:
    """The bytes of the result of a launch whose kernel is a library of emulated warps."""
    raw = emulated.aligned(case.poisoned())
    held = {name: emulated.aligned(a) for name, a in case.operands.items()}
    held |= dict.fromkeys("qkv", held["q"]) if case.problem.k.offset else {}
    addresses = {name: a.ctypes.data for name, a in held.items()}
    emulated.run(library, made, {**addresses, "out": raw.ctypes.data + 32 * case.out_dtype.itemsize})
    return raw


def result_on_a_gpu(
    made: Launch, operands: Mapping[str, np.ndarray], raw: np.ndarray, start: int, folder: Path, name: str = "out"
) -> np.ndarray:
    """The bytes ``raw`` after a launch whose result ``name`` begins at byte ``start``. Three runs must give the same bits."""
    from optdnn.runtime.cuda.allocator import upload
    from support.bound import bound
    from support.device_memory import Memory

    memory = Memory()
    out = memory.put(raw)
    at = {name: memory.put(array) for name, array in operands.items()} | {name: out + start}
    launch = bound(made, at, nvrtc.KernelCache(folder))
    results = []
    for _ in range(3):
        upload(out, raw)
        memory.run(launch)
        results.append(memory.get(out, raw.shape, np.dtype(np.uint8)))
    memory.free()
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()
    return results[0]
