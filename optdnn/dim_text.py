"""Arithmetic that exporters write into the names of dimensions: ``past_sequence_length + 1``, ``2*s0``, ``floor(s/2)``.

Such a text is an expression if every symbol in it is also a whole dimension of an input, whose arrays then determine
its size. Any other text is a symbol of that name, whatever it looks like: a symbol that appears only in expressions is not solved
for, so these expressions stay separate symbols.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import reduce
from itertools import pairwise

from optdnn.dim import INF, Dim, DimLike, Symbol, dim_max, dim_min, floordiv, mod, parts_of, symbol
from optdnn.errors import ShapeError

TEXT_LIMIT = 128
"""Longest text that is read, in characters."""
SIZE_LIMIT = 256
"""The most symbols, functions and terms of an expression, with repetitions: a short text of nested powers can be huge, and the
text is untrusted."""
POWER_LIMIT = 8
_TOKEN = re.compile(r"[0-9]{1,18}(?![\w.])|[^\W\d][\w.]*|\*\*|//|[-+*%(),/]")
_NAME = re.compile(r"[^\W\d][\w.]*")
_BINARY = {"floordiv": floordiv, "mod": mod}
_EXTREMES = {"min": dim_min, "max": dim_max}


_OPERATORS: dict[type, Callable[[DimLike, DimLike], DimLike]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: _times(a, b),
    ast.FloorDiv: floordiv,
    ast.Mod: mod,
}


class _NoExpression(Exception):
    """The text is not an expression."""


def parse_dim(text: str) -> Dim | None:
    """The expression in ``text``, over symbols without ranges; None for any other text, and for a number.

    Python's precedence; ``+ - * // % **``, parentheses, ``floor(a/b)``, ``ceil(a/b)``, ``min``, ``max``, ``mod`` and
    ``floordiv`` (in any case: SymPy's are capitalized). A division must be rounded. The ``str`` of a
    :class:`~optdnn.dim.Dim` parses to the same dimension if its symbols have plain names (letters, digits, ``_`` and ``.``).
    """
    if len(text) > TEXT_LIMIT:
        return None
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != "".join(text.split()) or (",", ")") in pairwise(tokens):
        return None
    names = [t for t in tokens if _NAME.fullmatch(t)]
    numbers = iter(range(len(names)))
    plain = " ".join(f"_{next(numbers)}" if _NAME.fullmatch(t) else t for t in tokens)
    try:
        found = _evaluated(ast.parse(plain, mode="eval").body, names)
    except (_NoExpression, ShapeError, SyntaxError):  # ShapeError: a division by zero
        return None
    return found if isinstance(found, Dim) else None


def expressions(dims: Iterable[object], plain: Collection[str] = ()) -> dict[str, Dim]:
    """The texts among ``dims`` that are arithmetic on other dimensions among them, parsed.

    ``plain`` are known symbols (with ranges). Dimensions that are not texts are skipped.
    """
    texts = {d: None for d in dims if isinstance(d, str)}
    known = {d for d in texts if d in plain or _NAME.fullmatch(d)}
    parsed = ((d, parse_dim(d)) for d in texts if d not in known)
    return {d: e for d, e in parsed if e is not None and all(s.name in known for s in e.symbols())}


def lone(d: DimLike) -> str | None:
    """The name of a dimension that is a single symbol; None for an integer or an expression."""
    if isinstance(d, Dim) and len(d.terms) == 1:
        ((monomial, coefficient),) = d.terms
        if coefficient == 1 and len(monomial) == 1 and isinstance(monomial[0], Symbol):
            return monomial[0].name
    return None


def _evaluated(node: ast.AST, names: Sequence[str]) -> DimLike:
    """The value of a parsed expression with numbered symbols: ``_0`` is ``names[0]``."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return symbol(names[int(name[1:])])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluated(operand, names)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, power = _evaluated(left, names), _evaluated(right, names)
            if isinstance(power, int) and 1 <= power <= POWER_LIMIT:
                return reduce(_times, [base] * power)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            return _bounded(_OPERATORS[type(operator)](_evaluated(left, names), _evaluated(right, names)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if args:
            return _bounded(_call(names[int(name[1:])].lower(), args, names))
    raise _NoExpression


def _call(function: str, args: Sequence[ast.AST], names: Sequence[str]) -> DimLike:
    if function in ("floor", "ceil", "ceiling") and len(args) == 1:
        match args[0]:
            case ast.BinOp(left=above, op=ast.Div(), right=below):
                a, b = _evaluated(above, names), _evaluated(below, names)
            case above:
                a, b = _evaluated(above, names), 1
        return floordiv(a, b) if function == "floor" else -floordiv(-a, b)
    operands = [_evaluated(a, names) for a in args]
    if function in _EXTREMES:
        return reduce(_EXTREMES[function], operands)
    if function in _BINARY and len(operands) == 2:
        return _BINARY[function](*operands)
    raise _NoExpression


def _times(a: DimLike, b: DimLike) -> DimLike:
    if isinstance(a, Dim) and isinstance(b, Dim) and len(a.terms) * len(b.terms) > SIZE_LIMIT:
        raise _NoExpression
    return _bounded(a * b)


def _bounded(d: DimLike) -> DimLike:
    if parts_of(d) > SIZE_LIMIT or any(abs(c) > INF for c in ([d] if isinstance(d, int) else (c for _, c in d.terms))):
        raise _NoExpression
    return d
