"""Refusing keywords that a function does not have, by name and with the nearest one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from optdnn.errors import UsageError
from optdnn.suggest import did_you_mean

P = ParamSpec("P")
Result = TypeVar("Result")


def checked_keywords(function: Callable[P, Result]) -> Callable[P, Result]:
    """The function, which raises UsageError for a keyword that it does not have."""
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.POSITIONAL_ONLY]

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Result:
        for name in kwargs:
            if name not in known:
                raise UsageError(
                    f"{function.__name__} has no option {name!r}",
                    hint=did_you_mean(name, known) or f"its options are {', '.join(known[1:])}",
                )
        return function(*args, **kwargs)

    return checked
