"""Seeded random inputs for an engine, where the user gives none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from optdnn.errors import UsageError
from optdnn.ranges import Profile
from optdnn.types import Array, TensorSpec, random_array


def random_feeds(
    inputs: Sequence[TensorSpec],
    *,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    profiles: Sequence[Profile] = (),
) -> dict[str, Array]:
    """An array per input (:func:`optdnn.types.random_array`); the same for the same seed.

    A symbolic dimension takes its size from ``sizes``, else the first profile's optimum, else it is 1.
    Raises UsageError for a size of no symbol.
    """
    rng = np.random.default_rng(seed)
    sizes = dict(sizes or {})
    symbols = {d for s in inputs for d in s.shape if isinstance(d, str)}
    if unknown := sorted(sizes.keys() - symbols):
        raise UsageError(
            f"no input has a dimension {', '.join(unknown)}; there are {', '.join(sorted(symbols)) or 'none'}"
        )
    sizes = {**{n: r.opt for p in profiles[:1] for n, r in p.items()}, **sizes}
    feeds: dict[str, Array] = {}
    for spec in inputs:
        shape = tuple(d if isinstance(d, int) else sizes.get(d, 1) for d in spec.shape)
        feeds[spec.name] = random_array(rng, spec.dtype, shape)
    return feeds
