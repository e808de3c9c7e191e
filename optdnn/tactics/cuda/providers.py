"""Whose kernels a build may use: this project's own always, a library's where it is."""

from __future__ import annotations

from functools import cache

from optdnn.runtime.cuda.libraries import present
from optdnn.runtime.cuda.usable import why_not
from optdnn.tactics.cuda.tactic import PROVIDERS


@cache
def providers_here() -> frozenset[str]:
    """The providers whose kernels run on this machine; all of them where it has no GPU, since engines are then for another."""
    if why_not() is not None:
        return frozenset(PROVIDERS)
    return frozenset(name for name in PROVIDERS if name == "own" or present(name))
