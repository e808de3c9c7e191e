"""Suggestions in errors: which of the known names a wrong one was most likely meant to be."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """The known name that is most like ``wrong``, or None where none is much like it."""
    from difflib import get_close_matches

    found = get_close_matches(wrong.lower(), list(known), n=1, cutoff=0.7)
    return found[0] if found else None


def did_you_mean(wrong: str, known: Iterable[str]) -> str | None:
    """``did you mean 'NAME'?``, for an error's hint; None where no name is much like ``wrong``."""
    found = nearest(wrong, known)
    return None if found is None else f"did you mean {found!r}?"
