"""Few kernels that stand for many: a test that compiles them sees every constant and every function of all."""

from __future__ import annotations

from collections.abc import Mapping

from optdnn.runtime.cuda.compile.nvrtc import Recipe


def covering(recipes: Mapping[str, Recipe]) -> list[str]:
    """Names of recipes that together have every template, option and generated line of all. Greedy: the next recipe is the one with
    the most that is missing."""
    own = {
        name: {(r.name, r.arch, line) for text in (*r.options, *r.generated.values()) for line in text.splitlines()}
        for name, r in recipes.items()
    }
    missing, chosen = set().union(*own.values()), []
    while missing:
        best = max(own, key=lambda name: len(own[name] & missing))
        missing -= own[best]
        chosen.append(best)
    return chosen
