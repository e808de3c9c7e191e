"""Matrix products: MatMul, Gemm, Einsum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.dim import DimLike
from optdnn.errors import ShapeError
from optdnn.ops.base import PRODUCT_TOL, Attrs, Call, Cost, FusedAttrs, Result, promote_types
from optdnn.ops.checks import agree, elements, extent, require_rank, required
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, NodeSpec, Ref
from optdnn.ops.fused import fused_flops, product_flops, with_stages
from optdnn.types import TensorType, broadcast_dims, show_shape


@dataclass(frozen=True)
class MatMulAttrs(FusedAttrs):
    """MatMul has no attributes except its stages."""


@dataclass(frozen=True)
class GemmAttrs(FusedAttrs):
    """``alpha * A' B' + beta * C`` with A and B transposed on request."""

    alpha: float = 1.0
    beta: float = 1.0
    transA: bool = False
    transB: bool = False


@dataclass(frozen=True)
class EinsumAttrs(Attrs):
    """The equation, without spaces."""

    equation: str


def infer_matmul(call: Call) -> Result:
    a, b = call.type(0).dims, call.type(1).dims
    if not a or not b:
        raise ShapeError("MatMul of a scalar; use Mul")
    dtype = promote_types([call.type(0), call.type(1)], call.kind)
    inner = b[-2] if len(b) > 1 else b[0]
    agree(a[-1], inner, f"MatMul of {show_shape(a)} and {show_shape(b)}: the inner sizes differ")
    rows: tuple[DimLike, ...] = a[-2:-1] if len(a) > 1 else ()
    cols: tuple[DimLike, ...] = b[-1:] if len(b) > 1 else ()
    return Result((TensorType(dtype, (*broadcast_dims(a[:-2], b[:-2]), *rows, *cols)),))


def _infer_gemm(call: Call) -> Result:
    a, b = call.type(0), call.type(1)
    require_rank(a, 2, "Gemm operand A")
    require_rank(b, 2, "Gemm operand B")
    dtype = promote_types([call.type(0), call.type(1)], call.kind)
    m, k = a.dims[::-1] if call.attrs.transA else a.dims
    k2, n = b.dims[::-1] if call.attrs.transB else b.dims
    agree(k, k2, f"Gemm of {a} and {b}: the inner sizes differ")
    if call.has(2):
        c = call.type(2)
        if c.dtype != dtype:
            raise ShapeError(f"Gemm operand C is {c}, the others are {b}")
        # C broadcasts to (M, N), never the other way round.
        for size, target in zip(reversed(c.dims), (n, m), strict=False):
            if size != 1:
                agree(size, target, f"Gemm operand C {c} does not broadcast to [{m}, {n}]")
        if len(c.dims) > 2:
            raise ShapeError(f"Gemm operand C {c} has more than 2 dimensions")
    return Result((TensorType(dtype, (m, n)),))


def einsum_terms(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Labels of each operand and of the result; the axes under an ellipsis are labeled ".0", ".1" … from the left."""
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise ShapeError(f"Einsum {equation!r} names {len(terms)} operands, there are {len(ranks)}")
    if any(not (c.isascii() and c.isalpha()) for c in equation.replace("...", "").replace("->", "").replace(",", "")):
        raise ShapeError(f"Einsum equation {equation!r} is malformed")
    hidden = [r - len(t.replace("...", "")) if "..." in t else 0 for t, r in zip(terms, ranks, strict=True)]
    widest = max(hidden, default=0)

    def expand(term: str, count: int) -> list[str]:
        before, dots, after = term.partition("...")
        return [*before, *([f".{i}" for i in range(widest - count, widest)] if dots else []), *after]

    operands = [expand(t, h) for t, h in zip(terms, hidden, strict=True)]
    for labels, rank, term in zip(operands, ranks, terms, strict=True):
        if len(labels) != rank:
            raise ShapeError(f"Einsum {equation!r}: term {term!r} does not fit an operand of rank {rank}")
    if arrow:
        return operands, expand(right, widest)
    flat = [c for labels in operands for c in labels if not c.startswith(".")]
    return operands, [*(f".{i}" for i in range(widest)), *sorted(c for c in set(flat) if flat.count(c) == 1)]


def _einsum_sizes(equation: str, types: Sequence[TensorType]) -> tuple[dict[str, DimLike], list[str]]:
    operands, result = einsum_terms(equation, [len(t.dims) for t in types])
    sizes: dict[str, DimLike] = {}
    for labels, t in zip(operands, types, strict=True):
        for label, size in zip(labels, t.dims, strict=True):
            known = sizes.get(label, 1)
            if label.startswith("."):
                (sizes[label],) = broadcast_dims((known,), (size,))
            elif known == 1:  # NumPy broadcasts a size of 1 here, too
                sizes[label] = size
            elif size != 1:
                sizes[label] = agree(known, size, f"Einsum {equation!r}: sizes of {label!r} differ")
    unknown = [c for c in result if c not in sizes]
    if unknown or len(set(result)) != len(result):
        raise ShapeError(f"Einsum {equation!r}: the result names {', '.join(unknown) or 'a label twice'}")
    return sizes, result


def _infer_einsum(call: Call) -> Result:
    types = [call.type(i) for i in range(len(call.types))]
    dtype = promote_types(types, "Einsum")
    sizes, result = _einsum_sizes(call.attrs.equation, types)
    return Result((TensorType(dtype, tuple(sizes[c] for c in result)),))


def cost_matmul(call: Call, result: Result) -> Cost:
    return Cost(product_flops(call, result) + fused_flops(call, result))


def _cost_gemm(call: Call, result: Result) -> Cost:
    extra = (call.attrs.alpha != 1.0) + (call.has(2) and 1 + (call.attrs.beta != 1.0))
    scaled = extra * elements(result.types[0])
    return Cost(product_flops(call, result) + scaled + fused_flops(call, result))


def _cost_einsum(call: Call, result: Result) -> Cost:
    types = [call.type(i) for i in range(len(call.types))]
    sizes, _ = _einsum_sizes(call.attrs.equation, types)
    return Cost(2 * max(1, len(types) - 1) * extent(*sizes.values()))


def _import_einsum(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    return e.op("Einsum", node.inputs, EinsumAttrs(str(required(node, "equation")).replace(" ", "")))


# A sum of K products in fp32 is off by about sqrt(K) roundoffs of its largest partial sum; K reaches some 10^4.

DEFS: tuple[OpDef, ...] = (
    OpDef(
        "MatMul",
        with_stages(infer_matmul),
        MatMulAttrs,
        cost=cost_matmul,
        tol=PRODUCT_TOL,
        arity=2,
    ),
    OpDef(
        "Gemm",
        with_stages(_infer_gemm),
        GemmAttrs,
        cost=_cost_gemm,
        tol=PRODUCT_TOL,
        arity=3,
    ),
    OpDef("Einsum", _infer_einsum, EinsumAttrs, _import_einsum, cost=_cost_einsum, tol=PRODUCT_TOL),
)
