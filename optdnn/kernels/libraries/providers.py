"""Whose kernels a build may use: this project's own always, a library's where it is."""

from __future__ import annotations

from functools import cache

from optdnn.kernels.tactic import PROVIDERS
from optdnn.runtime.cuda.libraries.find import installed, present
from optdnn.runtime.cuda.usable import why_not


@cache
def providers_here(*, sure: bool = False) -> frozenset[str]:
    """The providers whose kernels run on this machine; all of them where it has no GPU, since engines are then for another.

    ``sure``: libraries are loaded whole, which may take seconds, and one that is broken does not count.
    """
    if why_not() is not None:
        return frozenset(PROVIDERS)
    found = present if sure else installed
    return frozenset(name for name in PROVIDERS if name == "own" or found(name))
