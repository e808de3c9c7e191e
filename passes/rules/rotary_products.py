"""Rotary embeddings written as complex products: ``(a + ib)(c + is)`` has the parts ``a c - b s`` and ``b c + a s``.

``a`` and ``b`` are the halves of each head (flash-attention, ERNIE) or its even and odd features (Llama's own code, Wan). The
results go back to the positions of ``a`` and ``b``. DeepSeek rotates the even and odd features, but stores the results as the two
halves of the head.
"""

from __future__ import annotations

from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.attention import RotaryAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss
from optdnn.passes.support.facts import RESHAPES, in_shape, operand, shape_of
from optdnn.passes.support.parts import is_axis, pair, span, whole
from optdnn.passes.support.paths import value_before
from optdnn.passes.support.pattern import Var, any_of, node
from optdnn.passes.support.pattern_rule import pattern_rule
from optdnn.passes.support.rotary import cache_shape, order_of, rotated
from optdnn.types import Shape, show_shape

A, B, COS, SIN = map(Var, ("a", "b", "cos", "sin"))
_REAL = node("Sub", node("Mul", A, COS), node("Mul", B, SIN))
_IMAGINARY = node("Add", node("Mul", B, COS), node("Mul", A, SIN))


@pattern_rule(
    "rotary_products",
    node("Concat", any_of(_REAL, node(RESHAPES, _REAL)), any_of(_IMAGINARY, node(RESHAPES, _IMAGINARY))),
)
def rotary_products(graph: Graph, root: Op, found: dict[str, Any], ops: frozenset[int]) -> Match | Miss | None:
    """A Concat of the real and the imaginary parts along the last axis becomes one RotaryEmbedding."""
    if len(root.inputs) != 2 or not is_axis(graph, root.value, root.attrs.axis, -1):
        return None
    a, b = found["a"], found["b"]
    parts = shape_of(graph, operand(root))
    if parts is None:
        return None
    in_pairs = parts[-1] == 1  # each real part lies beside its imaginary part
    halves = None if in_pairs else _halves(graph, a, b, graph.type(root.value).dims)
    x = _neighbors(graph, a, b) if halves is None else halves
    if x is None:
        return None
    if halves is None and not in_pairs and (join := _joined(graph, root)) is not None:
        return Miss(
            f"its features change places, and the launch of {join.name}, which joins them with others, computes them"
        )
    rows = parts[:-1] if in_pairs else parts
    if not isinstance(rows[-1], int) or 0 in rows:
        return None
    full = (*rows[:-1], 2 * rows[-1])
    trailing = len(graph.type(a).dims) - len(rows)
    angles = {name: _without(graph.type(found[name]).dims, trailing) for name in ("cos", "sin")}
    order = _order(graph, found, x, rows, angles)
    if isinstance(order, str):
        return Miss(order)

    def build(patch: Patch) -> Value:
        caches = [in_shape(patch, found[name], cache_shape(s, order)) for name, s in angles.items()]
        source = value_before(graph, x, RESHAPES)  # a view would hide that these are the first features of heads (GLM)
        whole_heads = source if graph.type(source).shape == full else in_shape(patch, x, full)
        attrs = RotaryAttrs(interleaved=halves is None)
        y = rotated(patch, whole_heads, caches, attrs, order)
        if halves is None and not in_pairs:  # the results of even features come before those of odd features
            y = in_shape(patch, y, (*full[:-1], rows[-1], 2))
            y = patch.add("Transpose", [y], TransposeAttrs((0, 1, 2, 4, 3)))
        return in_shape(patch, y, graph.type(root.value).dims)

    return Match(tuple(graph.op(i) for i in sorted(ops)), build, root.value)


def _halves(graph: Graph, a: Value, b: Value, heads: Shape) -> Value | None:
    """The tensor of this shape whose halves are ``a`` and ``b``, or its view as rows of halves; None if there is none."""
    x = whole(graph, a, b, even=True)
    if x is not None:
        return x if shape_of(graph, x) == heads else None
    rows = pair(graph, value_before(graph, a, RESHAPES), value_before(graph, b, RESHAPES), axis=-2)
    shape = None if rows is None else shape_of(graph, rows)
    if shape is None or shape[-2:] != (2, graph.type(a).dims[-1]) or graph.type(a).dims[:-1] != shape[:-2]:
        return None
    return rows if shape[:-2] == heads[:-1] else None


def _joined(graph: Graph, op: Op) -> Op | None:
    """The Concat along the features that alone reads a result, perhaps after an Expand and views (multi-head latent attention)."""
    user = graph.sole_user(op.value)
    while user is not None and user.kind in RESHAPES | {"Expand"}:
        user = graph.sole_user(user.value)
    return (
        user if user is not None and user.kind == "Concat" and is_axis(graph, user.value, user.attrs.axis, -1) else None
    )


def _neighbors(graph: Graph, a: Value, b: Value) -> Value | None:
    """The tensor whose even features are ``a`` and whose odd features are ``b``, or None.

    ``a`` and ``b`` are slices with a step of 2, or the two parts or elements along a last axis of size 2."""
    first, second = graph.op(a), graph.op(b)
    x = first.input(0)
    if first.kind == "Slice" and x is not None and second.input(0) == x:
        size = (shape_of(graph, x) or ("",))[-1]
        if isinstance(size, int) and [span(graph, op, size) for op in (first, second)] == [(0, size, 2), (1, size, 2)]:
            return None if size % 2 else x
    pairs = pair(graph, value_before(graph, a, RESHAPES), value_before(graph, b, RESHAPES))
    return pairs if pairs is not None and graph.type(pairs).dims[-1] == 2 else None


def _without(shape: Shape, trailing: int) -> Shape:
    """The shape without its last ``trailing`` axes, which must have size 1; an empty shape if they do not."""
    if trailing == 0:
        return shape
    return shape[:-trailing] if trailing > 0 and all(d == 1 for d in shape[-trailing:]) else ()


def _order(
    graph: Graph, found: dict[str, Any], x: Value, rows: Shape, angles: dict[str, Shape]
) -> tuple[int, ...] | str:
    """The order of axes in which these angles fit parts of shape ``rows``, or the reason why there is none."""
    t, parts = graph.type(x), graph.type(found["a"]).dims
    own = _without(parts, len(parts) - len(rows))
    if len(rows) != 4:
        return f"{graph.output(x).name} {t} does not have four axes"
    if rows != own:
        return f"the results have the shape {show_shape(rows)}, their parts {show_shape(own)}"
    order = order_of(rows, list(angles.values()))
    if order is None:
        wrong = found[next((name for name, shape in angles.items() if order_of(rows, [shape]) is None), "sin")]
        return f"{graph.output(wrong).name} {graph.type(wrong)} is not one angle per position of {t}"
    return order
