"""Few kernels that stand for many: a test that compiles them sees every constant and every function of all."""

from __future__ import annotations

from collections.abc import Mapping

from optdnn.runtime.cuda.compile.nvrtc import Recipe


def lines(recipe: Recipe) -> set[tuple[str, str, str]]:
    """The options and generated lines of a recipe, each with its template and architecture."""
    texts = (*recipe.options, *recipe.generated.values())
    return {(recipe.name, recipe.arch, line) for text in texts for line in text.splitlines()}


def covering(recipes: Mapping[str, Recipe]) -> list[str]:
    """Names of recipes that together have every template, option and generated line of all. Greedy: the next recipe is the one with
    the most that is missing."""
    own = {name: lines(recipe) for name, recipe in recipes.items()}
    missing, chosen = set().union(*own.values()), []
    while missing:
        best = max(own, key=lambda name: len(own[name] & missing))
        missing -= own[best]
        chosen.append(best)
    return chosen
