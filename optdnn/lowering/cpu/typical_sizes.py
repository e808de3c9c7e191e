"""Typical sizes for the dimensions that a model leaves open."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from optdnn.dim import INF, Dim, DimLike, Function, Symbol, evaluate, substitute, symbol
from optdnn.dim_text import lone
from optdnn.errors import ShapeError
from optdnn.ir.graph import STRUCTURAL, Graph
from optdnn.ir.inference import infer
from optdnn.ops.checks import agreements


def typical_sizes(graph: Graph) -> dict[str, int]:
    """A size per symbol for timing: the first profile's optimum; otherwise 1 for a leading (batch) dimension and 32 for any
    other. A size is doubled until every tensor has elements: a second of sound has more than 32 samples. A symbol that broadcasts
    with another size takes that size: an attention mask is as long as the cache and the new tokens together. So does a symbol
    that must equal another size (:func:`tied_sizes`)."""
    fixed: dict[str, int] = {name: r.opt for p in graph.profiles[:1] for name, r in p.items()}
    tied = tied_sizes(graph)
    free: dict[str, Symbol] = {}
    for i in graph.inputs:
        for axis, d in enumerate(graph.op(i).outputs[0].type.shape or ()):
            for s in d.symbols() if isinstance(d, Dim) else ():
                if axis == 0:
                    fixed.setdefault(s.name, max(s.lo, min(s.hi, 1)))
                elif s.name not in fixed:
                    free[s.name] = s
    wanted = _sizes_of_all(graph, {*fixed, *free}) if free else {}
    met = _met(wanted, free)
    tried: list[dict[str, int]] = []
    for size in _SIZES:
        sizes = {**{n: max(s.lo, min(s.hi, size)) for n, s in free.items()}, **fixed}
        for name, other in met.items():
            if _positive(other, sizes):
                sizes[name] = max(free[name].lo, min(free[name].hi, evaluate(other, sizes)))
        sizes.update({name: evaluate(size, sizes) for name, size in tied.items() if _positive(size, sizes)})
        tried.append(sizes)
        if all(_positive(d, sizes) for d in wanted):
            return sizes
    return tried[0]


_SIZES = tuple(32 << k for k in range(12))
"""The sizes to try for unknown dimensions: 32 to 65,536."""


def _met(dims: Collection[Dim], free: Mapping[str, Symbol]) -> dict[str, Dim]:
    """Each free symbol that broadcasts with another size (the result's size is ``max(symbol, size)``) that does not contain it."""
    met: dict[str, Dim] = {}
    used: set[str] = set()
    for d in dims:
        for atom in (a for monomial, _ in d.terms for a in monomial if isinstance(a, Function) and a.op == "max"):
            for own, other in ((atom.a, atom.b), (atom.b, atom.a)):
                name = next((n for n, s in free.items() if own == Dim((((s,), 1),))), None)
                if name is None or name in met or name in used or not isinstance(other, Dim):
                    continue
                names = {s.name for s in other.symbols()}
                if name not in names and not names & met.keys():
                    met[name] = other
                    used |= names
                    break
    return met


def _positive(d: DimLike, sizes: Mapping[str, int]) -> bool:
    try:
        return evaluate(d, sizes) > 0
    except ShapeError:  # a division by a size that is 0
        return False


def _sizes_of_all(graph: Graph, symbols: Collection[str]) -> dict[Dim, None]:
    """The dimensions of all tensors that depend only on ``symbols``, each once."""
    dims = (d for op in graph.ops() for out in op.outputs for d in out.type.shape or ())
    return {d: None for d in dims if isinstance(d, Dim) and all(s.name in symbols for s in d.symbols())}


def tied_sizes(graph: Graph) -> dict[str, DimLike]:
    """The symbols of inputs that must equal another size: the rows of a product's second matrix are its first one's columns.

    A symbol's size never depends on tied symbols. Of two symbols of inputs, the leading dimension is tied (or the later one)."""
    leading, others = dict[str, None](), dict[str, None]()
    for i in graph.inputs:
        for axis, d in enumerate(graph.op(i).outputs[0].type.shape or ()):
            for s in d.symbols() if isinstance(d, Dim) else ():
                (others if axis else leading).setdefault(s.name)
    given = {name for p in graph.profiles[:1] for name in p}
    rank = {name: k for k, name in enumerate([*given, *others, *(n for n in leading if n not in others)])}
    tied: dict[str, DimLike] = {}
    for pair in _equal_sizes(graph) if len(rank) > len(given) else ():
        first, second = (substitute(d, tied) for d in pair)
        if first == second or not _names(first) | _names(second) <= rank.keys():
            continue
        choices = [(name, b) for a, b in ((first, second), (second, first)) if (name := lone(a)) is not None]
        choices = [(n, b) for n, b in choices if n not in given and n not in _names(b)]
        if choices:
            name, other = max(choices, key=lambda c: rank[c[0]])
            tied = {**{n: substitute(d, {name: other}) for n, d in tied.items()}, name: other}
    return tied


def _equal_sizes(graph: Graph) -> list[tuple[DimLike, DimLike]]:
    """The pairs of different sizes that the inference of types takes as equal."""
    with agreements() as pairs:
        for op in graph.order():
            types, values = graph.known_of(op.inputs)
            if op.kind in STRUCTURAL or not any(
                isinstance(d, Dim) for t in types if t is not None for d in t.shape or ()
            ):
                continue
            infer(op.kind, op.attrs, types, values, len(op.outputs), _unknown)
    return pairs


def _names(d: DimLike) -> set[str]:
    return {s.name for s in d.symbols()} if isinstance(d, Dim) else set()


def _unknown(hint: str, most: DimLike = INF) -> Dim:
    """A size that depends on data: no symbol of an input has its name."""
    return symbol(f"{hint}?")
