"""Arithmetic that exporters write into the names of dimensions: ``past_sequence_length + 1``, ``2*s0``, ``floor(s/2)``.

Such a text is an expression where every symbol in it is also the whole of another dimension of an input, whose arrays then give
it its size. Any other text is a symbol of that name, whatever it looks like: one that appears in expressions alone is not
solved for, so that these expressions stay symbols of their own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import reduce
from typing import NoReturn

from optdnn.dim import INF, Dim, DimLike, Symbol, dim_max, dim_min, floordiv, mod, symbol
from optdnn.errors import ShapeError

TEXT_LIMIT = 128
"""Longest text that is read, in characters."""
SIZE_LIMIT = 256
"""Most symbols, functions and terms of what a text may come to, each counted wherever it stands: powers of powers are longer
than their text, and the text may come from anybody."""
POWER_LIMIT = 8
_TOKEN = re.compile(r"\s*(?:(\d{1,18})(?![\w.])|([^\W\d][\w.]*)|(\*\*|//|[-+*%(),/]))")
_NAME = re.compile(r"[^\W\d][\w.]*")
_FLOOR, _CEIL = ("floor",), ("ceil", "ceiling")
_BINARY = {"floordiv": floordiv, "mod": mod}
_EXTREMES = {"min": dim_min, "max": dim_max}


class _NoExpression(Exception):
    """The text is not an expression."""


def parse_dim(text: str) -> Dim | None:
    """The expression in ``text``, over symbols without ranges; None for what is none, or is a number.

    Python's precedence; ``+ - * // % **``, parentheses, ``floor(a/b)``, ``ceil(a/b)``, ``min``, ``max``, ``mod`` and
    ``floordiv`` (in any case: SymPy's are capitalized). A division that is not rounded is none. What ``str`` writes of a
    :class:`~optdnn.dim.Dim` reads as the same, where its symbols have plain names (letters, digits, ``_`` and ``.``).
    """
    if len(text) > TEXT_LIMIT:
        return None
    try:
        found = _Parser(text).whole()
    except (_NoExpression, ShapeError, RecursionError):  # ShapeError: a division by zero
        return None
    return found if isinstance(found, Dim) else None


def expressions(dims: Iterable[object], plain: Collection[str] = ()) -> dict[str, Dim]:
    """The texts among ``dims`` that are arithmetic on others of them, as this.

    ``plain`` are symbols for certain (those that have a range). Dimensions that are no texts are passed over.
    """
    texts = {d: None for d in dims if isinstance(d, str)}
    known = {d for d in texts if d in plain or _NAME.fullmatch(d)}
    parsed = ((d, parse_dim(d)) for d in texts if d not in known)
    return {d: e for d, e in parsed if e is not None and all(s.name in known for s in e.symbols())}


def lone(d: DimLike) -> str | None:
    """The name of the symbol that a dimension is, and nothing else; None for an integer or an expression."""
    if isinstance(d, Dim) and len(d.terms) == 1:
        ((monomial, coefficient),) = d.terms
        if coefficient == 1 and len(monomial) == 1 and isinstance(monomial[0], Symbol):
            return monomial[0].name
    return None


class _Parser:
    def __init__(self, text: str):
        self._tokens: list[str] = []
        at, text = 0, text.rstrip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                self._refuse()
            self._tokens.append(found[0].strip())
            at = found.end()
        self._at = 0

    def whole(self) -> DimLike:
        found = self._sum()
        return found if self._at == len(self._tokens) else self._refuse()

    @staticmethod
    def _refuse() -> NoReturn:
        raise _NoExpression

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, *wanted: str) -> str:
        """The next token where it is one of these, else ""."""
        token = self._peek()
        if token not in wanted:
            return ""
        self._at += 1
        return token

    def _expect(self, wanted: str) -> None:
        if not self._take(wanted):
            self._refuse()

    def _sum(self) -> DimLike:
        total = self._product()
        while sign := self._take("+", "-"):
            total = total + self._product() if sign == "+" else total - self._product()
        return total

    def _product(self) -> DimLike:
        total = self._factor()
        while operator := self._take("*", "//", "%"):
            right = self._factor()
            rounded = floordiv if operator == "//" else mod
            total = _times(total, right) if operator == "*" else _bounded(rounded(total, right))
        return total

    def _factor(self) -> DimLike:
        if self._take("-"):
            return -self._factor()
        base = self._atom()
        if not self._take("**"):
            return base
        power = self._atom()
        if not isinstance(power, int) or not 1 <= power <= POWER_LIMIT:
            self._refuse()
        return reduce(_times, [base] * power)

    def _atom(self) -> DimLike:
        if self._take("("):
            found = self._sum()
            self._expect(")")
            return found
        token = self._peek()
        self._at += 1
        if token[:1].isdecimal():
            return int(token)
        if not _NAME.fullmatch(token):
            self._refuse()
        return self._function(token.lower()) if self._take("(") else symbol(token)

    def _function(self, name: str) -> DimLike:
        """The value of a function whose name and opening parenthesis are read."""
        if name in _FLOOR or name in _CEIL:
            a = self._quotient(down=name in _FLOOR)
            self._expect(")")
            return a
        operands = [self._sum()]
        while self._take(","):
            operands.append(self._sum())
        self._expect(")")
        if name in _EXTREMES:
            return _bounded(reduce(_EXTREMES[name], operands))
        if name in _BINARY and len(operands) == 2:
            return _bounded(_BINARY[name](operands[0], operands[1]))
        return self._refuse()

    def _quotient(self, *, down: bool) -> DimLike:
        """What is rounded: a product over a product; nothing else rounds to the same whatever it is a part of."""
        above = self._product()
        below = self._factor() if self._take("/") else 1
        return _bounded(floordiv(above, below) if down else -floordiv(-above, below))


def _times(a: DimLike, b: DimLike) -> DimLike:
    if isinstance(a, Dim) and isinstance(b, Dim) and len(a.terms) * len(b.terms) > SIZE_LIMIT:
        raise _NoExpression
    return _bounded(a * b)


def _bounded(d: DimLike) -> DimLike:
    if _size(d) > SIZE_LIMIT or any(abs(c) > INF for c in ([d] if isinstance(d, int) else (c for _, c in d.terms))):
        raise _NoExpression
    return d


def _size(d: DimLike) -> int:
    if isinstance(d, int):
        return 1
    atoms = (atom for monomial, _ in d.terms for atom in monomial)
    return len(d.terms) + sum(1 if isinstance(a, Symbol) else 1 + _size(a.a) + _size(a.b) for a in atoms)
