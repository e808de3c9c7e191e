"""Constant scales and shifts merge with each other, and move to weights that absorb them.

The rewrites are exact in real arithmetic. A rewrite that changes a rounding is refused if a step function after it (Floor, a
comparison, a cast to integers) could then give another integer: ``49 * (1 / 49)`` is less than 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.affine import ONE, ZERO, Affine, round_to
from optdnn.passes.support.facts import RESHAPES, VIEWS, operand, producer, same_shape
from optdnn.passes.support.linear import LINEAR, Linear, absorb_scalars
from optdnn.passes.support.paths import path_to, repeated
from optdnn.types import FP64, Array, is_float

_STEPS = frozenset(
    {
        *("Floor", "Ceil", "Round", "Sign", "Mod", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
        *("ArgMax", "ArgMin", "TopK", "Hardmax", "Unique", "QuantizeLinear"),
    }
)
"""Step functions: a small change of an operand may change the result by 1."""
_LOOK_AHEAD = 9
"""Most operators that the search for a step function passes."""


def feeds_step(graph: Graph, value: Value) -> Op | None:
    """A step function that reads ``value``, directly or through a few pointwise ops and data movements."""
    level, seen = [value], {value}
    for _ in range(_LOOK_AHEAD):
        users = [u for v in level for u in graph.users(v)]
        for user in users:
            if user.kind in _STEPS or (user.kind == "Cast" and not is_float(user.attrs.to)):
                return user
        passing = [u for u in users if u.kind != "Output" and _passes_on(u)]
        level = [v for u in passing for v in u.values if v not in seen]
        seen.update(level)
    return None


def _passes_on(op: Op) -> bool:
    return op.definition.traits.pointwise or op.definition.traits.movement


def step_miss(graph: Graph, op: Op) -> Miss | None:
    """A Miss if a step function reads the result of ``op``, so that another rounding could change the step; else None."""
    step = feeds_step(graph, op.value)
    return None if step is None else Miss(f"another rounding could change the result of {step.kind} {step.name}")


def constant_of(graph: Graph, op: Op | None) -> Array | None:
    """Operand 1 of ``op``, if it is a floating-point constant and operand 0 is not constant; else None."""
    if op is None or len(op.inputs) < 2 or graph.constant_value(op.inputs[0]) is not None:
        return None
    c = graph.constant_value(op.inputs[1])
    return c if c is not None and is_float(c.dtype) else None


@rule("sub_is_add", {"Sub"})
def sub_is_add(graph: Graph, op: Op) -> Match | Miss | None:
    """``x - c`` becomes ``x + (-c)``, which is exactly the same."""
    c = constant_of(graph, op)
    if c is None:
        return None
    return Match((op,), lambda patch: patch.add("Add", [op.inputs[0], patch.constant(-c, "shift")]))


@rule("div_is_mul", {"Div"})
def div_is_mul(graph: Graph, op: Op) -> Match | Miss | None:
    """``x / c`` becomes ``x * (1 / c)``."""
    c = constant_of(graph, op)
    if c is None:
        return None
    if np.any(c == 0):
        return Miss("it divides by zero")
    inverse = _rounded(1.0 / c.astype(FP64), c)
    if isinstance(inverse, Miss):
        return inverse
    powers_of_two = not np.any(np.frexp(c.astype(FP64))[0] % 0.5)
    miss = None if powers_of_two else step_miss(graph, op)
    return miss or Match((op,), lambda patch: patch.add("Mul", [op.inputs[0], patch.constant(inverse, "scale")]))


@rule("merge_constants", {"Add", "Mul"})
def merge_constants(graph: Graph, op: Op) -> Match | Miss | None:
    """``(x + a) + b`` becomes ``x + (a + b)``; the same for Mul."""
    inner = producer(graph, op.inputs[0], {op.kind}, alone=True)
    a, b = constant_of(graph, inner), constant_of(graph, op)
    if inner is None or a is None or b is None:
        return None
    merged = _merged(op.kind, a.astype(FP64), b.astype(FP64), a)
    if isinstance(merged, Miss):
        return merged
    x = inner.inputs[0]
    return step_miss(graph, op) or Match(
        (op, inner), lambda patch: patch.add(op.kind, [x, patch.constant(merged, "merged")])
    )


@rule("scale_first", {"Mul"})
def scale_first(graph: Graph, op: Op) -> Match | Miss | None:
    """``(x + b) * s`` becomes ``x * s + b s`` if the scale or the shift then merges with a neighbor.

    There are three such cases: x is scaled by a constant; x is the result of a linear op whose weights absorb the scale; a constant
    is added to the result.
    """
    add = producer(graph, op.inputs[0], {"Add"}, alone=True)
    b, s = constant_of(graph, add), constant_of(graph, op)
    if add is None or s is None or b is None:
        return None
    x = operand(add)
    if graph.type(x).shape != op.outputs[0].type.shape or not _merges(graph, op, x):
        return None
    shift = _merged("Mul", b.astype(FP64), s.astype(FP64), b, factor=False)
    if isinstance(shift, Miss):
        return shift

    def build(patch: Patch) -> Value:
        return patch.add("Add", [patch.add("Mul", [x, op.inputs[1]]), patch.constant(shift, "shift")])

    return step_miss(graph, op) or Match((op, add), build)


def _merges(graph: Graph, op: Op, x: Value) -> bool:
    """Whether the scale merges with an op before ``x``, or the shift with an op after ``op``."""
    if constant_of(graph, producer(graph, x, {"Mul"}, alone=True)) is not None:
        return True
    product = producer(graph, x, LINEAR, alone=True)
    linear = None if product is None else Linear.of(graph, product)
    if linear is not None and linear.weight is not None:
        return True
    user = graph.sole_user(op.value)
    return user is not None and user.kind in ("Add", "Sub") and constant_of(graph, user) is not None


@rule("hoist_scale", {"Mul"})
def hoist_scale(graph: Graph, op: Op) -> Match | Miss | None:
    """A scalar scale moves in front of reshapes and transposes to the linear op before them, whose weights absorb it.

    Attention scales its queries and keys after ``MatMul, Add, Reshape, Transpose``, where the scale would cost another launch.
    """
    c = constant_of(graph, op)
    if c is None or c.size != 1 or not same_shape(graph, op):
        return None
    moves = path_to(graph, operand(op), VIEWS, alone=True)
    value = operand(moves[-1]) if moves else operand(op)
    if not moves or graph.sole_user(value) is None or not _absorbs(graph, graph.op(value)):
        return None

    def build(patch: Patch) -> Value:
        scaled = patch.add("Mul", [value, patch.constant(c.reshape(()), "scale")], src=op.src)
        return repeated(patch, scaled, moves)

    return step_miss(graph, op) or Match((op, *moves), build)


def _absorbs(graph: Graph, product: Op) -> bool:
    """Whether ``product`` is a linear op whose weights absorb a scale, or the addition of a constant after one."""
    if product.kind == "Add" and constant_of(graph, product) is not None:
        x = operand(product)
        if graph.sole_user(x) is None:
            return False
        product = graph.op(x)
    linear = Linear.of(graph, product) if product.kind in LINEAR else None
    return linear is not None and linear.refuses_after(Affine(2 * ONE, ZERO)) is None


@rule("gemm_scalars", {"Gemm"})
def gemm_scalars(graph: Graph, op: Op) -> Match | Miss | None:
    """A Gemm's alpha and beta are multiplied into its constant weights and bias."""
    absorbed = absorb_scalars(graph, op)
    if absorbed is None or isinstance(absorbed, Miss):
        return absorbed
    return Match((op,), lambda patch: absorbed.add_to(patch, operand(op)))


@rule("gemm_addend", {"Gemm"})
def gemm_addend(graph: Graph, op: Op) -> Match | None:
    """The addend of a Gemm leaves it, unless it is a vector of constants. Any kernel of products can add it in its epilogue.

    tf2onnx writes such a Gemm for each addition after a product, also where the product has other readers (a GELU by its formula).
    """
    a, addend, dims = op.attrs, op.input(2), op.outputs[0].type.dims
    if addend is None or a.prologue or a.epilogue or not is_float(op.outputs[0].type.dtype):
        return None
    constant = graph.constant_value(addend)
    if constant is not None and constant.size == (constant.shape[-1] if constant.ndim else 1):
        return None
    view = producer(graph, addend, RESHAPES)
    if view is not None and dims == (1, *graph.type(addend).dims) == graph.type(operand(view)).dims:
        addend = operand(view)  # tf2onnx makes a vector of one row, which other rules would not see as the row
    plain = not a.transA and not a.transB and a.alpha == 1.0
    same = (
        u for u in graph.users(operand(op)) if u.kind == "MatMul" and u.inputs == op.inputs[:2] and not u.attrs.prologue
    )
    made = next((u.value for u in same if plain and not u.attrs.epilogue), None)

    def build(patch: Patch) -> Value:
        kind, attrs = ("MatMul", MatMulAttrs()) if plain else ("Gemm", a)
        product = patch.add(kind, op.inputs[:2], attrs) if made is None else made
        if a.beta == 0.0:  # such an addend is not read, even if it has NaN
            return product
        factor = patch.constant(np.array(a.beta, patch.type(addend).dtype), "beta")
        return patch.add("Add", [product, addend if a.beta == 1.0 else patch.add("Mul", [addend, factor])])

    return Match((op,), build)


def _merged(kind: str, a: Array, b: Array, like: Array, *, factor: bool | None = None) -> Array | Miss:
    """The sum or product (``kind``) of ``a`` and ``b`` (float64), rounded to the type of ``like``.

    A Miss if the result is larger than both or cannot be rounded. ``factor``: see :func:`_rounded`."""
    merged = a + b if kind == "Add" else a * b
    if merged.size > max(a.size, b.size):
        return Miss(f"the merged constant of {merged.size} elements would be larger than both")
    return _rounded(merged, like, factor=kind == "Mul" if factor is None else factor)


def _rounded(value: Any, like: Array, *, factor: bool = True) -> Array | Miss:
    """``value`` rounded to the type of ``like``; a Miss if it overflows, or if a factor loses accuracy by underflow."""
    value = np.asarray(value)
    rounded = round_to(value, like.dtype)
    if rounded is None:
        return Miss(f"the constant would overflow {like.dtype}")
    if factor and np.any(np.abs(rounded.astype(FP64) - value) > 2.0**-7 * np.abs(value)):
        return Miss(f"the constant would underflow {like.dtype}")
    return rounded
