"""Providers of kernels that a build may use: this project always, a library if it is installed."""

from __future__ import annotations

from functools import cache

from optdnn.kernels.tactic import PROVIDERS
from optdnn.runtime.cuda.libraries.find import installed, present
from optdnn.runtime.cuda.usable import why_not


@cache
def providers_here(*, sure: bool = False) -> frozenset[str]:
    """The providers with kernels that run on this machine; all of them if it has no GPU, since engines are then for another machine.

    ``sure``: load the libraries whole (this may take seconds), and leave out a broken one.
    """
    if why_not() is not None:
        return frozenset(PROVIDERS)
    found = present if sure else installed
    return frozenset(name for name in PROVIDERS if name == "own" or found(name))
