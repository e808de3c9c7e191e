"""Patterns written as formulas, and the matcher that finds them in a graph.

Exporters write a decomposed GELU or layer norm in many ways: ``0.5`` first or last, a division by ``sqrt(2)`` or a
multiplication by its reciprocal, ``Pow(x, 2)`` or ``x * x``, ``1 / sqrt(v)`` or ``Pow(v, -0.5)``. So a pattern describes the
computation, not the nodes. :class:`Product` flattens a tree of Mul, Div, Neg, Reciprocal, Sqrt and Pow. :class:`Sum` flattens a
tree of Add, Sub, Neg and Sum. Both gather the scalar constants into one coefficient, and match the remaining operands in any order.
All other operators are matched as they are (:class:`Node`); the operands of a commutative operator match in any order.

A constant matches a mathematical constant if the two differ by at most the rounding of the constant's dtype: the fp32 ``1.4142135``
is ``sqrt(2)``. This is the only tolerance; everything else that a pattern matches is equal in exact arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import ml_dtypes

from optdnn.ir.graph import Graph, Op, Value
from optdnn.types import DType, is_float

_DEPTH = 8
"""The depth to which a Product or Sum flattens a tree of Mul or Add."""
_PRODUCTS = frozenset({"Mul", "Div", "Neg", "Reciprocal", "Sqrt", "Pow"})
_SUMS = frozenset({"Add", "Sub", "Neg", "Sum"})
_VARIADIC = frozenset({"Concat", "Einsum", "Max", "Mean", "Min", "Sum"})
"""Kinds with any number of operands."""


# ---------------------------------------------------------------- the parts of a pattern


@dataclass(frozen=True)
class Var:
    """Any value; the same name must be the same value everywhere."""

    name: str


@dataclass(frozen=True)
class Scalar:
    """A constant with one element that equals ``value`` up to rounding (None: any number). It is bound to ``name`` as a float."""

    value: float | None = None
    name: str = ""


@dataclass(frozen=True)
class ConstantVar:
    """Any constant. It is bound to ``name`` as a Value."""

    name: str


@dataclass(frozen=True)
class Node:
    """An op of one of ``kinds`` with one result. ``name`` binds the op, so that the rule can check its attributes.

    ``args`` may omit trailing operands, but not those of kinds that have any number. ``alone``: the result must have a single use.
    """

    kinds: frozenset[str]
    args: tuple[Pattern | None, ...]
    name: str = ""
    alone: bool = False


@dataclass(frozen=True)
class Power:
    """A factor of a Product: ``base ** exponent`` (exponent -1, 0.5 or -0.5)."""

    base: Pattern
    exponent: float


@dataclass(frozen=True)
class Collected:
    """A constant and operands, which match in any order and nesting."""

    constant: float | Scalar
    operands: tuple[Pattern | Power, ...]

    @cached_property
    def begin_with(self) -> tuple[frozenset[str], ...]:
        """For each operand that must be the result of an operator: the kinds that this operator may have."""
        return tuple(kinds for o in self.operands if (kinds := _first_kinds(o)) is not None)


class Product(Collected):
    """``coefficient * factor * factor …``, written with Mul, Div, Neg, Reciprocal, Sqrt, Pow."""


class Sum(Collected):
    """``constant + term + term …``, written with Add, Sub, Neg, Sum."""


@dataclass(frozen=True)
class AnyOf:
    """Any of ``options``; they are tried in order."""

    options: tuple[Pattern, ...]


def _first_kinds(pattern: Pattern | Power) -> frozenset[str] | None:
    """The kinds that the root operator of a pattern may have; None if the pattern may match a value without any operator."""
    if isinstance(pattern, Power):
        return _first_kinds(pattern.base)
    if isinstance(pattern, Node):
        return pattern.kinds
    if isinstance(pattern, Product | Sum) and len(pattern.operands) > 1:
        return _PRODUCTS if isinstance(pattern, Product) else _SUMS
    if isinstance(pattern, AnyOf):
        options = [_first_kinds(p) for p in pattern.options]
        known = [o for o in options if o is not None]
        return frozenset().union(*known) if len(known) == len(options) else None
    return None


Pattern = Var | Scalar | ConstantVar | Node | Product | Sum | AnyOf


def root_kinds(pattern: Pattern) -> frozenset[str]:
    """The kinds an op must have to be the root of a match."""
    if isinstance(pattern, AnyOf):
        return frozenset(itertools.chain.from_iterable(root_kinds(p) for p in pattern.options))
    if isinstance(pattern, Node):
        return pattern.kinds
    if isinstance(pattern, Product):
        return _PRODUCTS
    if isinstance(pattern, Sum):
        return _SUMS
    raise TypeError(f"{pattern} cannot be the root of a pattern")


def node(kinds: str | frozenset[str], *args: Pattern | None, name: str = "", alone: bool = False) -> Node:
    """A pattern for one op. ``kinds``: a kind, or several."""
    return Node(frozenset({kinds}) if isinstance(kinds, str) else kinds, args, name, alone)


def product(coefficient: float | Scalar, *factors: Pattern | Power) -> Product:
    """A pattern for ``coefficient`` times all ``factors``."""
    return Product(coefficient, factors)


def total(constant: float | Scalar, *terms: Pattern) -> Sum:
    """A pattern for ``constant`` plus all ``terms``."""
    return Sum(constant, terms)


def any_of(*options: Pattern) -> AnyOf:
    """A pattern that matches if one of ``options`` does."""
    return AnyOf(options)


# ---------------------------------------------------------------- matching


class Bindings(NamedTuple):
    """One match of a pattern: the Value, float or Op of each name, and the ids of the matched ops."""

    bound: dict[str, Any]
    ops: frozenset[int]

    def bind(self, name: str, value: Any) -> Bindings | None:
        """The state with one more name; None if the name is already bound to something else."""
        if not name:
            return self
        if name in self.bound:
            return self if self.bound[name] == value else None
        return Bindings({**self.bound, name: value}, self.ops)

    def cover(self, *ops: int) -> Bindings:
        return Bindings(self.bound, self.ops.union(ops))


def find(graph: Graph, value: Value, pattern: Pattern) -> Iterator[Bindings]:
    """Every match of ``pattern`` whose root is ``value``."""
    yield from _match(graph, value, 1, pattern, Bindings({}, frozenset()))


def scalar(graph: Graph, value: Value | None) -> float | None:
    """The value of a floating-point constant with one element, else None."""
    array = graph.constant_value(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 and is_float(array.dtype) else None


def _match(graph: Graph, value: Value, sign: int, pattern: Pattern, state: Bindings) -> Iterator[Bindings]:
    """Every match of ``pattern`` with ``sign * value``."""
    if isinstance(pattern, AnyOf):
        for option in pattern.options:
            yield from _match(graph, value, sign, option, state)
    elif isinstance(pattern, Product) or (isinstance(pattern, Sum) and sign == 1):
        yield from _match_flat(graph, value, sign, pattern, state)
    elif isinstance(pattern, Node) and sign == 1:
        yield from _match_node(graph, value, pattern, state)
    elif sign == 1 and (after := _bind(graph, value, pattern, state)) is not None:
        yield after


def _bind(graph: Graph, value: Value, pattern: Pattern, state: Bindings) -> Bindings | None:
    """``state`` with the name of a Var, Scalar or ConstantVar bound."""
    if isinstance(pattern, Scalar):
        number = scalar(graph, value)
        return None if number is None else _bind_number(number, rounding(graph.type(value).dtype), pattern, state)
    assert isinstance(pattern, Var | ConstantVar)
    constant = isinstance(pattern, Var) or graph.constant_value(value) is not None
    return state.bind(pattern.name, value) if constant else None


def _match_node(graph: Graph, value: Value, pattern: Node, state: Bindings) -> Iterator[Bindings]:
    op = graph.op(value)
    if op.kind not in pattern.kinds or len(op.outputs) != 1 or (pattern.alone and graph.sole_user(value) is None):
        return
    after = state.cover(op.id).bind(pattern.name, op)
    if after is None:
        return
    n = len(pattern.args)
    if op.kind in _VARIADIC and n != len(op.inputs):
        return
    operands = op.inputs[:n] + (None,) * (n - len(op.inputs))
    orders = [operands]
    if n == 2 and op.definition.traits.commutative and operands[0] != operands[1]:
        orders.append(operands[::-1])
    for order in orders:
        yield from _match_all(graph, order, pattern.args, after)


def _match_all(
    graph: Graph, values: tuple[Value | None, ...], patterns: tuple[Pattern | None, ...], state: Bindings
) -> Iterator[Bindings]:
    if not patterns:
        yield state
    elif patterns[0] is None or values[0] is None:
        if patterns[0] is None and values[0] is None:
            yield from _match_all(graph, values[1:], patterns[1:], state)
    else:
        for after in _match(graph, values[0], 1, patterns[0], state):
            yield from _match_all(graph, values[1:], patterns[1:], after)


def _bind_number(number: float, error: float, pattern: float | Scalar, state: Bindings) -> Bindings | None:
    if not isinstance(pattern, Scalar):
        pattern = Scalar(pattern)
    if pattern.value is not None and not abs(number - pattern.value) <= error * abs(pattern.value):
        return None
    return state.bind(pattern.name, number)


def rounding(dtype: DType) -> float:
    """The largest relative error of a rounded constant of this dtype: one unit in the last place."""
    return float(ml_dtypes.finfo(dtype).eps) if is_float(dtype) else 0.0  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- flattened products and sums


class _Flat(NamedTuple):
    """A value written as ``constant ∘ leaf ∘ leaf …``. Each leaf has a number: its exponent (product) or its sign (sum)."""

    constant: float
    rounding: float
    leaves: tuple[tuple[Value, float], ...]
    ops: frozenset[int]


def _match_flat(graph: Graph, value: Value, sign: int, pattern: Product | Sum, state: Bindings) -> Iterator[Bindings]:
    wanted, signed = pattern.operands, isinstance(pattern, Sum)
    if not is_float(graph.type(value).dtype) or not _may_match(graph, value, pattern):
        return
    seen: set[Any] = set()
    for flat in _views(graph, value, 1, len(wanted), _DEPTH, signed):
        if len(flat.leaves) != len(wanted) or (not flat.ops and len(wanted) > 1):
            continue
        after = _bind_number(sign * flat.constant, flat.rounding, pattern.constant, state)
        if after is None:
            continue
        for found in _assign(graph, flat.leaves, wanted, after.cover(*flat.ops), signed):
            key = (tuple((k, v.id if isinstance(v, Op) else v) for k, v in sorted(found.bound.items())), found.ops)
            if key not in seen:
                seen.add(key)
                yield found


def _may_match(graph: Graph, value: Value, pattern: Product | Sum) -> bool:
    """Whether the operators that the pattern's operands need are close enough to ``value``.

    This is checked before views are enumerated. A chain of Mul or Neg has hundreds of views, and each operator of a long network
    may be the root of some. But most patterns need an operator that is absent."""
    wanted = pattern.begin_with
    if not wanted and len(pattern.operands) < 2:
        return True
    kinds = _SUMS if isinstance(pattern, Sum) else _PRODUCTS
    found: set[str] = set()
    seen, level, forks = {value}, [value], False
    for _ in range(_DEPTH + 1):
        inner = []
        for v in level:
            op = graph.op(v)
            found.add(op.kind)
            if op.kind in kinds:
                inputs = [x for x in op.inputs if x is not None]
                forks = forks or len(inputs) > 1
                inner += [x for x in inputs if x not in seen]
                seen.update(inputs)
        level = inner
    return (forks or len(pattern.operands) < 2) and all(not found.isdisjoint(w) for w in wanted)


def _assign(
    graph: Graph, leaves: tuple[tuple[Value, float], ...], wanted: tuple[Any, ...], state: Bindings, signed: bool
) -> Iterator[Bindings]:
    """Assign a different leaf to each pattern of ``wanted``."""
    if not wanted:
        yield state
        return
    first = wanted[0]
    base, exponent = (first.base, first.exponent) if isinstance(first, Power) else (first, 1.0)
    for i, (value, number) in enumerate(leaves):
        if not signed and number != exponent:
            continue
        for after in _match(graph, value, int(number) if signed else 1, base, state):
            yield from _assign(graph, leaves[:i] + leaves[i + 1 :], wanted[1:], after, signed)


def _views(graph: Graph, value: Value, number: float, limit: int, depth: int, signed: bool) -> Iterator[_Flat]:
    """Ways to write ``value ** number`` as a product, or (``signed``) ``number * value`` as a sum, of at most ``limit`` leaves."""
    constant = scalar(graph, value)
    if constant is not None:
        if signed or constant != 0:
            flat = number * constant if signed else constant**number
            yield _Flat(flat, rounding(graph.type(value).dtype), (), frozenset())
        return
    if limit < 1:
        return
    op = graph.op(value)
    if depth and op.kind in (_SUMS if signed else _PRODUCTS):
        yield from (_sum_of if signed else _product_of)(graph, op, number, limit, depth)
    leaf = ((value, number),)
    yield _Flat(float(not signed), 0.0, leaf, frozenset())  # last: the widest view of an expression comes first


def _joined(graph: Graph, op: Op, numbers: Sequence[float], limit: int, depth: int, signed: bool) -> Iterator[_Flat]:
    """Ways to write the operands of ``op``, with a number for each, as one product or sum."""

    def rest(i: int, room: int) -> Iterator[_Flat]:
        """Ways to write the operands from number ``i`` on."""
        if i == len(numbers):
            yield _Flat(float(not signed), 0.0, (), frozenset({op.id}))
            return
        operand = op.inputs[i]
        assert operand is not None
        for a in _views(graph, operand, numbers[i], room, depth - 1, signed):
            for b in rest(i + 1, room - len(a.leaves)):
                constant = a.constant + b.constant if signed else a.constant * b.constant
                error = max(a.rounding, b.rounding) if signed else a.rounding + b.rounding
                yield _Flat(constant, error, a.leaves + b.leaves, a.ops | b.ops)

    yield from rest(0, limit)


def _product_of(graph: Graph, op: Op, exponent: float, limit: int, depth: int) -> Iterator[_Flat]:
    """Ways to write ``op ** exponent`` (exponent ±1) as a product of its operands."""
    a = op.inputs[0]
    assert a is not None
    power: float | None = {"Sqrt": 0.5}.get(op.kind)
    if op.kind in ("Mul", "Div"):
        yield from _joined(graph, op, (exponent, exponent if op.kind == "Mul" else -exponent), limit, depth, False)
    elif op.kind in ("Neg", "Reciprocal"):
        sign, inner = (-1, exponent) if op.kind == "Neg" else (1, -exponent)
        for flat in _joined(graph, op, (inner,), limit, depth, False):
            yield flat._replace(constant=sign * flat.constant)
    elif op.kind == "Pow":
        known = graph.constant_value(op.inputs[1])  # ONNX lets Pow take an integer exponent
        power = None if known is None or known.size != 1 else float(known.reshape(-1)[0])
    if power in (2.0, 3.0) and int(power) <= limit:
        yield _Flat(1.0, 0.0, ((a, exponent),) * int(power), frozenset({op.id}))
    elif power in (-1.0, 0.5, -0.5):
        yield _Flat(1.0, 0.0, ((a, power * exponent),), frozenset({op.id}))


def _sum_of(graph: Graph, op: Op, sign: float, limit: int, depth: int) -> Iterator[_Flat]:
    """Ways to write ``sign * op`` as a sum of its operands."""
    signs = {"Neg": (-sign,), "Sub": (sign, -sign)}.get(op.kind, (sign,) * len(op.inputs))
    yield from _joined(graph, op, signs, limit, depth, True)
