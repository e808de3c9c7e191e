"""MatMul, Gemm and Einsum against ONNX Runtime; inference with symbolic sizes; every refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onenode import Case, check_case, check_export, import_case, normal, op_flops, run

from optdnn.errors import ShapeError
from optdnn.ir.graph import Graph
from optdnn.ops.base import EXACT, Attrs, Stage, Tol
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.types import FP16, tensor

MATMULS = [
    ((3, 4), (4, 5)),
    ((2, 3, 4), (4, 5)),
    ((3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (6, 4, 5)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((2, 3, 4), (4,)),
    ((4,), (4,)),
]


@pytest.mark.parametrize(("a", "b"), MATMULS)
def test_matmul(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    check_case(Case("MatMul", [normal(*a), normal(*b, seed=1)]), symbolic={0: range(len(a)), 1: range(len(b))})


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64, np.float64])
def test_matmul_types(dtype: Any) -> None:
    a, b = np.arange(12).reshape(3, 4).astype(dtype), np.arange(20).reshape(4, 5).astype(dtype)
    check_case(Case("MatMul", [a, b], opset=9), "reference")


def test_half_precision_accumulates_in_single() -> None:
    a, b = normal(8, 64, dtype=FP16), normal(64, 8, seed=1, dtype=FP16)
    exact = (a.astype(np.float32) @ b.astype(np.float32)).astype(FP16)
    check_case(Case("MatMul", [a, b]), [exact], tol=EXACT)


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("c", [None, (), (1,), (5,), (1, 5), (3, 1), (3, 5)])
def test_gemm(trans_a: int, trans_b: int, c: tuple[int, ...] | None) -> None:
    operands = [normal(*((4, 3) if trans_a else (3, 4))), normal(*((5, 4) if trans_b else (4, 5)), seed=1)]
    if c is not None:
        operands.append(normal(*c, seed=2) if c else np.full((), 0.7, np.float32))
    attrs = {"transA": trans_a, "transB": trans_b, "alpha": 0.5, "beta": 0.25}
    check_case(Case("Gemm", operands, attrs), symbolic={0: (0, 1), 1: (0, 1)})
    check_case(Case("Gemm", operands, {"transA": trans_a, "transB": trans_b}))


def test_gemm_old_opset_and_integers() -> None:
    check_case(Case("Gemm", [normal(3, 4), normal(4, 5), normal(5)], opset=7))
    a, b, c = (np.arange(n).reshape(s).astype(np.int32) for n, s in ((12, (3, 4)), (20, (4, 5)), (5, (5,))))
    (graph,) = [import_case(Case("Gemm", [a, b, c], {"alpha": 2.0}))]
    (y,) = run(graph, {"x0": a, "x1": b, "x2": c})
    assert y.dtype == np.int32
    assert np.array_equal(y, 2 * (a @ b) + c)


EINSUMS = [
    ("ij,jk->ik", [(3, 4), (4, 5)]),
    ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
    ("ij->ji", [(3, 4)]),
    ("ij->i", [(3, 4)]),
    ("ij", [(3, 4)]),
    ("ji", [(3, 4)]),
    ("ii->i", [(3, 3)]),
    ("ii", [(3, 3)]),
    ("i,j->ij", [(3,), (4,)]),
    ("...ij,...jk->...ik", [(2, 1, 3, 4), (5, 4, 6)]),
    ("...ij->...ji", [(2, 3, 4)]),
    ("b h i d , b h j d -> b h i j", [(2, 3, 4, 5), (2, 3, 6, 5)]),
    ("bhwc,hkc->bhwk", [(2, 3, 4, 5), (3, 6, 5)]),
    ("ij,jk,kl->il", [(3, 4), (4, 5), (5, 2)]),
    ("Aa,aB->AB", [(3, 4), (4, 5)]),
    ("ij,ij->", [(3, 4), (3, 4)]),
]


@pytest.mark.parametrize(("equation", "shapes"), EINSUMS)
def test_einsum(equation: str, shapes: list[tuple[int, ...]]) -> None:
    operands = [normal(*s, seed=i) for i, s in enumerate(shapes)]
    symbolic = {i: [a for a in range(len(s)) if s[a] > 1] for i, s in enumerate(shapes)}
    # ONNX Runtime lacks the diagonal with implicit output; NumPy's einsum is the definition.
    expected = [np.asarray(np.einsum(equation.replace(" ", ""), *operands))]
    check_case(Case("Einsum", operands, {"equation": equation}), expected, symbolic=symbolic, tol=Tol(1e-5, 3e-6))


@pytest.mark.parametrize("equation", ["ij,jk->ik", "bij,bjk->bik", "...ij->...ji", "ij,jk,kl->il"])
def test_einsum_on_onnxruntime(equation: str) -> None:
    shapes = dict(EINSUMS)[equation]
    check_case(Case("Einsum", [normal(*s, seed=i) for i, s in enumerate(shapes)], {"equation": equation}))


@pytest.mark.parametrize(
    ("op", "shapes", "attrs", "message"),
    [
        ("MatMul", [(3, 4), (5, 6)], {}, "inner sizes differ"),
        ("MatMul", [(2, 3, 4), (3, 4, 5)], {}, "do not broadcast"),
        ("MatMul", [(), (4,)], {}, "scalar"),
        ("Gemm", [(3, 4), (5, 6)], {}, "inner sizes differ"),
        ("Gemm", [(3, 4), (4, 6)], {"transB": 1}, "inner sizes differ"),
        ("Gemm", [(2, 3, 4), (4, 6)], {}, "must have 2 dimensions"),
        ("Gemm", [(3, 4), (4,)], {}, "must have 2 dimensions"),
        ("Gemm", [(3, 4), (4, 6), (5,)], {}, "does not broadcast"),
        ("Gemm", [(1, 4), (4, 6), (3, 6)], {}, "does not broadcast"),
        ("Gemm", [(3, 4), (4, 6), (1, 3, 6)], {}, "more than 2 dimensions"),
        ("Einsum", [(3, 4)], {"equation": "ij,jk->ik"}, "names 2 operands"),
        ("Einsum", [(3, 4), (5, 6)], {"equation": "ij,jk->ik"}, "sizes of 'j' differ"),
        ("Einsum", [(3, 4)], {"equation": "ijk->i"}, "does not fit"),
        ("Einsum", [(3, 4)], {"equation": "ij->k"}, "names k"),
        ("Einsum", [(3, 4)], {"equation": "ij->ii"}, "label twice"),
        ("Einsum", [(3, 4)], {"equation": "i1->i"}, "malformed"),
        ("Einsum", [(3, 4)], {}, "needs attribute 'equation'"),
    ],
)
def test_contradictions_are_refused(
    op: str, shapes: list[tuple[int, ...]], attrs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        import_case(Case(op, [np.zeros(s, np.float32) for s in shapes], attrs))


def test_types_must_agree() -> None:
    g = Graph()
    a, b = g.add_input("a", tensor(np.float32, 3, 3)), g.add_input("b", tensor(np.float64, 3, 3))
    for kind, inputs, attrs in (
        ("MatMul", [a, b], MatMulAttrs()),
        ("Gemm", [a, b], GemmAttrs()),
        ("Gemm", [a, a, b], GemmAttrs()),
    ):
        with pytest.raises(ShapeError, match=r"different types|the others"):
            g.add(kind, inputs, attrs)


def test_stages_are_inferred_run_and_counted() -> None:
    g = Graph()
    a, b = g.add_input("a", tensor(np.float32, 3, 4)), g.add_input("b", tensor(np.float32, 4, 5))
    r = g.add_input("r", tensor(np.float32, 3, 5))
    attrs = MatMulAttrs(
        prologue=(Stage("Relu", (-1,), Attrs()),),
        epilogue=(Stage("Add", (-1, 2), Attrs()), Stage("Relu", (-2,), Attrs())),
    )
    op = g.add("MatMul", [a, b, r], attrs)
    g.add_output(op.value, "y")
    feeds = {"a": normal(3, 4), "b": normal(4, 5, seed=1), "r": normal(3, 5, seed=2)}
    (y,) = run(g, feeds)
    np.testing.assert_allclose(y, np.maximum(np.maximum(feeds["a"], 0) @ feeds["b"] + feeds["r"], 0), rtol=1e-5)
    assert op_flops(g, op) == 2 * 3 * 4 * 5 + 3 * 4 + 2 * 3 * 5
    wide = g.add_input("wide", tensor(np.float32, 7, 3, 5))
    with pytest.raises(ShapeError, match="must keep the shape"):
        g.add("MatMul", [a, b, wide], MatMulAttrs(epilogue=(Stage("Add", (-1, 2), Attrs()),)))
    wide = g.add_input("wide", tensor(np.float32, 7, 3, 4))
    with pytest.raises(ShapeError, match="prologue of a MatMul"):
        g.add("MatMul", [a, b, wide], MatMulAttrs(prologue=(Stage("Add", (-1, 2), Attrs()),)))


def test_cost() -> None:
    graph = import_case(Case("MatMul", [normal(2, 3, 4), normal(4, 5)]))
    assert op_flops(graph, graph.of_kind("MatMul")[0]) == 2 * 2 * 3 * 4 * 5
    graph = import_case(Case("Gemm", [normal(4, 3), normal(4, 5), normal(5)], {"transA": 1, "alpha": 0.5, "beta": 0.5}))
    assert op_flops(graph, graph.of_kind("Gemm")[0]) == 2 * 3 * 4 * 5 + 3 * 15
    graph = import_case(Case("Einsum", [normal(2, 3, 4), normal(2, 4, 5)], {"equation": "bij,bjk->bik"}))
    assert op_flops(graph, graph.of_kind("Einsum")[0]) == 2 * 2 * 3 * 4 * 5


def test_export() -> None:
    check_export(Case("MatMul", [normal(2, 3, 4), normal(4, 5)]))
    check_export(Case("Gemm", [normal(4, 3), normal(5, 4), normal(5)], {"transA": 1, "transB": 1, "alpha": 0.5}))
    check_export(Case("Gemm", [normal(3, 4), normal(4, 5)], {"beta": 0.5}))
    check_export(Case("Einsum", [normal(2, 3, 4), normal(2, 4, 5)], {"equation": "b i j, b j k -> b i k"}))
