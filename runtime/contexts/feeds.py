"""Seeded random inputs for an engine, if the user gives none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from optdnn.dim import evaluate
from optdnn.dim_text import expressions
from optdnn.errors import UsageError
from optdnn.ranges import Profile
from optdnn.runtime.contexts.sampled import TYPICAL
from optdnn.types import Array, TensorSpec, is_float, random_array


def random_feeds(
    inputs: Sequence[TensorSpec],
    *,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    profiles: Sequence[Profile] = (),
    given: Mapping[str, Array] | None = None,
    typical: Mapping[str, int] | None = None,
) -> dict[str, Array]:
    """An array per input that is not ``given`` (:func:`optdnn.types.random_array`); the same for the same seed. Inputs of an
    engine that samples take values that fit every size.

    A symbol's size is the first of these: its size in ``sizes``, in the given arrays, the first profile's optimum, the
    ``typical`` size (of the build's measurements: ``engine.meta["sizes"]``), 1. Expressions of symbols take their value from
    these.
    Raises UsageError for a size of an unknown symbol.
    """
    rng = np.random.default_rng(seed)
    sizes, given = dict(sizes or {}), given or {}
    derived = expressions((d for s in inputs for d in s.shape), {n for p in profiles for n in p})
    symbols = {d for s in inputs for d in s.shape if isinstance(d, str) and d not in derived}
    if unknown := sorted(sizes.keys() - symbols):
        raise UsageError(
            f"no input has a dimension {', '.join(unknown)}; there are {', '.join(sorted(symbols)) or 'none'}"
        )
    pairs = ((d, n) for s in inputs if s.name in given for d, n in zip(s.shape, given[s.name].shape, strict=False))
    held = {d: n for d, n in pairs if isinstance(d, str) and d in symbols}
    usual = {n: size for n, size in (typical or {}).items() if n in symbols}
    optimum = {n: r.opt for p in profiles[:1] for n, r in p.items()}
    sizes = {**dict.fromkeys(symbols, 1), **usual, **optimum, **held, **sizes}
    sizes |= {text: evaluate(expression, sizes) for text, expression in derived.items()}
    feeds: dict[str, Array] = {}
    for spec in (s for s in inputs if s.name not in given):
        shape = tuple(d if isinstance(d, int) else sizes[d] for d in spec.shape)
        if any(d < 0 for d in shape):
            raise UsageError(f"input {spec} has a negative dimension at these sizes: {list(shape)}")
        made = random_array(rng, spec.dtype, shape)
        feeds[spec.name] = np.full_like(made, TYPICAL[spec.name]) if spec.name in TYPICAL else made
    return feeds


def fractions(feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs with floats from 0 to 1, as pixels are."""
    return {n: np.mod(np.abs(a), 1).astype(a.dtype) if is_float(a.dtype) else a for n, a in feeds.items()}
