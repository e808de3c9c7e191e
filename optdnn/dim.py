"""Symbolic dimensions: canonical integer arithmetic over named symbols with ranges.

A :class:`Dim` is a polynomial with integer coefficients over *atoms*; an atom is a named :class:`Symbol` or an opaque
integer function (floor division, modulo, minimum, maximum) of other dimensions. Every operation returns a plain ``int``
if its value is known, so ``int | Dim`` is the type of a shape entry. Two equal expressions compare equal
(``(n + 1) * 2 == 2 * n + 2``) because each has one canonical form.

All symbols are non-negative (they are sizes); a symbol's range ``lo..hi`` only sharpens :func:`bounds`.

Expressions come from models, which may be hostile, and a few products can write out a huge polynomial. So an expression has at
most :data:`optdnn.limits.DIM_PARTS` parts, and coefficients of at most 128 bits; a larger one raises DimTooLarge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, Union

from optdnn.errors import ShapeError
from optdnn.limits import DIM_PARTS

DimLike: TypeAlias = Union[int, "Dim"]
INF = 1 << 62
"""Stands for "no upper bound" in :func:`bounds`."""
COEFFICIENT_LIMIT = 1 << 128
"""Largest coefficient of an expression."""
RELATED_PARTS = 64
"""The bounds of an expression with at most this many parts are sharpened by relations between its terms."""


class DimTooLarge(ShapeError):
    """An expression would grow beyond its limit."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A named size with an inclusive range."""

    name: str
    lo: int = 0
    hi: int = INF

    @property
    def parts(self) -> int:
        return 1

    def key(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Function:
    """An integer function that does not reduce to a polynomial; ``op`` is one of floordiv, mod, min, max."""

    op: str
    a: DimLike
    b: DimLike

    @property
    def parts(self) -> int:
        return 1 + parts_of(self.a) + parts_of(self.b)

    def key(self) -> str:
        return f"{self.op}({self.a},{self.b})"


Atom: TypeAlias = Symbol | Function
Monomial: TypeAlias = tuple[Atom, ...]


class Dim:
    """A symbolic integer in canonical form. Build one with :func:`symbol` and arithmetic."""

    __slots__ = ("_hash", "parts", "terms")

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]):
        self.terms = terms
        self.parts = len(terms) + sum(atom.parts for monomial, _ in terms for atom in monomial)
        """Number of terms, symbols and functions, with repetitions."""
        _check_parts(self.parts)
        self._hash = hash(terms)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dim) and self._hash == other._hash and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        parts: list[str] = []
        for monomial, coefficient in self.terms:
            alone = len(monomial) == 1 and (coefficient == 1 or (coefficient == -1 and bool(parts)))
            factors = [a.name if isinstance(a, Symbol) else _show(a, alone) for a in monomial]
            if not factors:
                parts.append(str(coefficient))
            else:
                parts.append(
                    ("" if coefficient == 1 else "-" if coefficient == -1 else f"{coefficient}*") + "*".join(factors)
                )
        return " + ".join(parts).replace("+ -", "- ")

    # Arithmetic. Each returns an int when the result is constant.
    def __add__(self, other: DimLike) -> DimLike:
        return _sum(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: DimLike) -> DimLike:
        return _sum(self, other, -1)

    def __rsub__(self, other: DimLike) -> DimLike:
        return _sum(-self, other, 1)

    def __neg__(self) -> DimLike:
        return _build({m: -c for m, c in self.terms})

    def __mul__(self, other: DimLike) -> DimLike:
        if not isinstance(other, (int, Dim)) and not hasattr(other, "__index__"):
            return NotImplemented
        if isinstance(other, Dim):
            _check_parts(self.parts * len(other.terms))  # before the work: terms may cancel, but few do
        out: dict[Monomial, int] = {}
        for ma, ca in self.terms:
            for mb, cb in _terms(other):
                m = tuple(sorted(ma + mb, key=_atom_key))
                out[m] = out.get(m, 0) + ca * cb
        return _build(out)

    __rmul__ = __mul__

    def __floordiv__(self, other: DimLike) -> DimLike:
        return floordiv(self, other)

    def __rfloordiv__(self, other: DimLike) -> DimLike:
        return floordiv(other, self)

    def __mod__(self, other: DimLike) -> DimLike:
        return mod(self, other)

    def __rmod__(self, other: DimLike) -> DimLike:
        return mod(other, self)

    def __bool__(self) -> bool:
        raise TypeError(f"the truth of symbolic dimension {self} is unknown; compare with == or ask bounds()")

    def symbols(self) -> frozenset[Symbol]:
        """Every symbol that the expression depends on."""
        found: set[Symbol] = set()
        for atom in (atom for monomial, _ in self.terms for atom in monomial):
            if isinstance(atom, Symbol):
                found.add(atom)
            else:
                found.update(*(part.symbols() for part in (atom.a, atom.b) if isinstance(part, Dim)))
        return frozenset(found)


def symbol(name: str, lo: int = 0, hi: int = INF) -> Dim:
    """The dimension called ``name`` with its inclusive range."""
    return Dim((((Symbol(name, lo, hi),), 1),))


def _atom_key(atom: Atom) -> str:
    return atom.key()


def _show(atom: Function, alone: bool) -> str:
    """``alone``: the function is a whole term, so it needs no parentheses."""
    infix = {"floordiv": "//", "mod": "%"}.get(atom.op)
    if infix is None:
        return f"{atom.op}({atom.a}, {atom.b})"
    text = f"{_operand(atom.a)}{infix}{_operand(atom.b)}"
    return text if alone else f"({text})"


def _operand(x: DimLike) -> str:
    """A number or a symbol as it is, anything else in parentheses."""
    plain = isinstance(_only_atom(x), Symbol) if isinstance(x, Dim) else x >= 0
    return str(x) if plain else f"({x})"


def parts_of(x: DimLike) -> int:
    """The size of an expression: its terms, symbols and functions, with repetitions; 1 for a number."""
    return x.parts if isinstance(x, Dim) else 1


def _check_parts(parts: int) -> None:
    if parts > 64 and parts > DIM_PARTS.value:  # the limit is only looked up for large expressions
        raise DimTooLarge(f"a symbolic size would have {parts} parts", hint=DIM_PARTS.hint)


def _terms(x: DimLike) -> tuple[tuple[Monomial, int], ...]:
    if isinstance(x, Dim):
        return x.terms
    return (((), int(x)),) if x else ()


def _build(terms: Mapping[Monomial, int]) -> DimLike:
    kept = {m: c for m, c in terms.items() if c}
    if any(abs(c) > COEFFICIENT_LIMIT for c in kept.values()):
        raise DimTooLarge("a symbolic size would have a number of more than 128 bits")
    if not kept:
        return 0
    if len(kept) == 1 and () in kept:
        return kept[()]
    # Highest degree first, the constant last: "2*n + 1" is the usual notation.
    return Dim(tuple(sorted(kept.items(), key=lambda t: (-len(t[0]), [_atom_key(a) for a in t[0]]))))


def _sum(a: DimLike, b: DimLike, sign: int) -> DimLike:
    if not isinstance(b, (int, Dim)) and not hasattr(b, "__index__"):
        return NotImplemented
    out = dict(_terms(a))
    for m, c in _terms(b):
        out[m] = out.get(m, 0) + sign * c
    return _build(out)


def _atom(op: str, a: DimLike, b: DimLike) -> DimLike:
    return Dim((((Function(op, a, b),), 1),))


def _only_atom(x: DimLike) -> Atom | None:
    """The symbol or function that an expression consists of; None for any other expression."""
    if isinstance(x, Dim) and len(x.terms) == 1:
        ((monomial, coefficient),) = x.terms
        if coefficient == 1 and len(monomial) == 1:
            return monomial[0]
    return None


def floordiv(a: DimLike, b: DimLike) -> DimLike:
    """``a // b``; exact multiples cancel and nested divisions by constants merge."""
    if b == 0:
        raise ShapeError("division of a dimension by zero")
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if a == b:
        return 1
    if isinstance(b, int) and b > 0:
        return _floordiv_by_number(a, b)
    exact = _exact_quotient(a, b)
    return exact if exact is not None else _atom("floordiv", a, b)


def _floordiv_by_number(a: DimLike, b: int) -> DimLike:
    """``a // b`` for a positive ``b``: the multiples of ``b`` among the coefficients are divided alone."""
    if b == 1:
        return a
    divided = {m: divmod(c, b) for m, c in _terms(a)}
    whole, remainder = (_build({m: parts[k] for m, parts in divided.items()}) for k in (0, 1))
    if isinstance(remainder, int):
        return whole + remainder // b
    lo, hi = bounds(remainder)
    if lo >= 0 and hi < b:
        return whole
    constant = dict(_terms(remainder)).get((), 0)
    inner = _only_atom(remainder - constant)
    if isinstance(inner, Function) and inner.op == "floordiv" and isinstance(inner.b, int):
        return whole + floordiv(inner.a + constant * inner.b, inner.b * b)
    return whole + _atom("floordiv", remainder, b)


def _exact_quotient(a: DimLike, b: DimLike) -> DimLike | None:
    """The polynomial ``q`` with ``a == q * b``, otherwise None: long division by the leading term of ``b``.

    Terms are kept in graded lexicographic order, an admissible monomial order, so the division is exact or fails immediately.
    """
    divisor = _terms(b)
    if not divisor or not _terms(a):
        return None
    (lead, scale), *_ = divisor
    quotient: DimLike = 0
    left = a
    while left != 0:
        (monomial, coefficient), *_ = _terms(left)
        atoms = list(monomial)
        for atom in lead:
            if atom not in atoms:
                return None
            atoms.remove(atom)
        if coefficient % scale:
            return None
        term = _build({tuple(atoms): coefficient // scale})
        quotient, left = quotient + term, left - term * b
    return quotient


def mod(a: DimLike, b: DimLike) -> DimLike:
    """``a % b`` (non-negative for positive ``b``, as in Python)."""
    if b == 0:
        raise ShapeError("modulo of a dimension by zero")
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    if isinstance(b, int) and b > 0:
        a = _build({m: c % b for m, c in _terms(_without_moduli(a, b))})
        if isinstance(a, int):
            return a % b
        lo, hi = bounds(a)
        if lo >= 0 and hi < b:
            return a
        if b == 2 or all(2 * c > b for m, c in a.terms if m):  # (-x) % b fills x up to a multiple: b * ceil(x / b) - x
            x = _build({m: b - c for m, c in a.terms})
            return floordiv(x + b - 1, b) * b - x
    if _exact_quotient(a, b) is not None:
        return 0
    return _atom("mod", a, b)


def _without_moduli(a: DimLike, b: int) -> DimLike:
    """``a`` with terms ``x % d`` replaced by ``x`` where ``d`` is a multiple of ``b``: the remainder by ``b`` is the same."""
    total: DimLike = a
    for monomial, c in _terms(a):
        atom = _only_atom(Dim(((monomial, 1),)))
        if isinstance(atom, Function) and atom.op == "mod" and isinstance(atom.b, int) and atom.b % b == 0:
            total = total + c * (atom.a - Dim(((monomial, 1),)))
    return total


def dim_min(a: DimLike, b: DimLike) -> DimLike:
    """The smaller of two dimensions, symbolic if their ranges overlap."""
    return _extreme("min", a, b)


def dim_max(a: DimLike, b: DimLike) -> DimLike:
    """The larger of two dimensions, symbolic if their ranges overlap."""
    return _extreme("max", a, b)


def _extreme(op: str, a: DimLike, b: DimLike) -> DimLike:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b) if op == "min" else max(a, b)
    lo, hi = bounds(a - b)
    if lo == hi == 0:
        return min(a, b, key=parts_of)
    if lo >= 0:  # a >= b always
        return b if op == "min" else a
    if hi <= 0:
        return a if op == "min" else b
    for x, y in ((a, b), (b, a)):
        if _absorbs(op, x, y):
            return x
    first, second = sorted((a, b), key=str)
    return _atom(op, first, second)


def _parts(op: str, x: DimLike) -> list[DimLike]:
    """The operands of nested applications of ``op``: ``max(max(a, b), c)`` -> a, b, c."""
    atom = _only_atom(x)
    if isinstance(atom, Function) and atom.op == op:
        return _parts(op, atom.a) + _parts(op, atom.b)
    return [x]


def _absorbs(op: str, x: DimLike, y: DimLike) -> bool:
    """True when ``op(x, y) == x`` by the lattice laws: ``max(max(a, b), a)`` and ``max(a, min(a, b))``."""
    dual = "min" if op == "max" else "max"
    have = _parts(op, x)
    return all(p in have or any(q in have for q in _parts(dual, p)) for p in _parts(op, y))


@lru_cache(maxsize=65536)
def bounds(x: DimLike) -> tuple[int, int]:
    """Inclusive (lowest, highest) value, by interval arithmetic; ``±INF`` if unbounded."""
    if isinstance(x, int):
        return x, x
    low = high = 0
    for monomial, coefficient in x.terms:
        lo, hi = 1, 1
        for atom in monomial:
            a_lo, a_hi = _atom_bounds(atom)
            corners = [_clip(p * q) for p in (lo, hi) for q in (a_lo, a_hi)]
            lo, hi = min(corners), max(corners)
        lo, hi = _clip(lo * coefficient), _clip(hi * coefficient)
        low, high = _clip(low + min(lo, hi)), _clip(high + max(lo, hi))
    if 1 < len(x.terms) <= 8 and x.parts <= RELATED_PARTS:
        low, high = _related_bounds(x, low, high)
    return low, high


def _related_bounds(x: Dim, low: int, high: int) -> tuple[int, int]:
    """``low, high`` sharpened if a function atom and the other terms depend on the same symbols (``n - n // 2``).

    ``a // b`` is ``(a - r) / b`` with ``0 <= r < b``; ``a % b`` lies in ``0..b - 1``; a minimum or maximum is one of its two
    operands. The largest function comes first: smaller ones may be parts of its operands.
    """
    for monomial, c in sorted(x.terms, key=lambda term: -sum(atom.parts for atom in term[0])):
        if len(monomial) != 1 or not isinstance(monomial[0], Function):
            continue
        atom = monomial[0]
        rest = x - _build({monomial: c})
        if atom.op == "floordiv" and isinstance(atom.b, int) and atom.b > 0:
            base_low, base_high = bounds(rest * atom.b + c * atom.a)
            slack = c * (atom.b - 1)
            if base_low > -INF:
                low = max(low, -((max(slack, 0) - base_low) // atom.b))
            if base_high < INF:
                high = min(high, (base_high - min(slack, 0)) // atom.b)
            break
        if atom.op == "mod" and isinstance(atom.b, Dim) and bounds(atom.b)[0] >= 0:  # 0 is no divisor
            least, most = bounds(rest), bounds(rest + c * (atom.b - 1))
            low, high = max(low, min(least[0], most[0])), min(high, max(least[1], most[1]))
            break
        if atom.op in ("min", "max"):
            (p_low, p_high), (q_low, q_high) = bounds(rest + c * atom.a), bounds(rest + c * atom.b)
            low, high = max(low, min(p_low, q_low)), min(high, max(p_high, q_high))
            if (atom.op == "max") == (c > 0):
                low = max(low, p_low, q_low)
            else:
                high = min(high, p_high, q_high)
            break
    return low, high


def _clip(v: int) -> int:
    return max(-INF, min(INF, v))


def _atom_bounds(atom: Atom) -> tuple[int, int]:
    if isinstance(atom, Symbol):
        return atom.lo, atom.hi
    (a_lo, a_hi), (b_lo, b_hi) = bounds(atom.a), bounds(atom.b)
    if atom.op == "min":
        return min(a_lo, b_lo), min(a_hi, b_hi)
    if atom.op == "max":
        return max(a_lo, b_lo), max(a_hi, b_hi)
    if b_lo > 0:
        if atom.op == "mod":
            return 0, min(b_hi - 1, a_hi if a_lo >= 0 else INF)
        corners = [p // q for p in (a_lo, a_hi) for q in (b_lo, b_hi)]
        return (-INF if a_lo == -INF else min(corners)), (INF if a_hi == INF else max(corners))
    return -INF, INF


def evaluate(x: DimLike, sizes: Mapping[str, int]) -> int:
    """The value of ``x`` with each symbol replaced from ``sizes``.

    Raises ShapeError naming the symbol that has no size.
    """
    result = substitute(x, sizes)
    if isinstance(result, Dim):
        missing = sorted(s.name for s in result.symbols())
        raise ShapeError(f"dimension {x} needs a size for {', '.join(missing)}")
    return result


def substitute(x: DimLike, sizes: Mapping[str, DimLike]) -> DimLike:
    """``x`` with the symbols named in ``sizes`` replaced (by integers or other dimensions)."""
    if isinstance(x, int):
        return x
    total: DimLike = 0
    for monomial, coefficient in x.terms:
        product: DimLike = coefficient
        for atom in monomial:
            if isinstance(atom, Symbol):
                product = product * sizes.get(atom.name, Dim((((atom,), 1),)))
            else:
                product = product * _FUNCTIONS[atom.op](substitute(atom.a, sizes), substitute(atom.b, sizes))
        total = total + product
    return total


_FUNCTIONS: dict[str, Callable[[DimLike, DimLike], DimLike]] = {
    "floordiv": floordiv,
    "mod": mod,
    "min": dim_min,
    "max": dim_max,
}
