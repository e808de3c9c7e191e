"""Fused stages: inference, plain form, evaluation, cost, export; the kind Pointwise; and the promises of the traits of kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from known import infer, infer_value
from onenode import normal, onnxruntime_run

from optdnn.dim import symbol
from optdnn.errors import InternalError, RunError, ShapeError
from optdnn.ir.evaluate import evaluate
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.ops import binary, unary
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.fused import STAGE_KINDS, PointwiseAttrs, export_stages, infer_stages, plain_attrs, stages_flops
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.table import OPDEFS
from optdnn.ops.unary import AlphaAttrs, GeluAttrs
from optdnn.runtime.reference.run import PlainStage, run_kernel
from optdnn.types import BF16, BOOL, FP16, FP32, INT64, Array, DType, tensor

N = symbol("n", 1)
# y = swish(x) * s + x, with s an operand: register 0 is read twice, so the chain is a small DAG.
DAG = (
    Stage("Swish", (~0,), AlphaAttrs(1.0)),
    Stage("Mul", (~1, 1)),
    Stage("Add", (~2, ~0)),
)


def pointwise(stages: tuple[Stage, ...], *operands: Any) -> Graph:
    graph = Graph()
    refs = [graph.add_input(f"x{i}", t) for i, t in enumerate(operands)]
    graph.add_output(graph.add("Pointwise", refs, PointwiseAttrs(epilogue=stages)).value, "y")
    return graph


def test_inference_broadcasts_through_the_stages() -> None:
    assert infer_stages(DAG, tensor(FP32, N, 1, 4), [None, tensor(FP32, 3, 1)]) == tensor(FP32, N, 3, 4)
    assert infer_stages((), tensor(FP32, N), []) == tensor(FP32, N)
    graph = pointwise(DAG, tensor(FP32, N, 4), tensor(FP32))
    assert graph.op(graph.outputs[0]).outputs[0].type == tensor(FP32, N, 4)
    half = (*DAG, Stage("Cast", (~3,), CastAttrs(FP16)))
    assert infer_stages(half, tensor(FP32, N), [None, tensor(FP32)]).dtype == FP16


def test_known_values_pass_through_fused_shape_arithmetic() -> None:
    stages = (Stage("Mul", (~0, 1)), Stage("Sub", (~1, 2)))
    value = infer_value("Pointwise", [N, 2], [3], [1], attrs=PointwiseAttrs(epilogue=stages))
    assert list(value) == [3 * N - 1, 5]


REFUSED = [
    ((Stage("Add", (~0, 1)),), [tensor(FP32, 3)], r"stage 0 \(Add\): shapes \[2\] and \[3\] do not broadcast"),
    ((Stage("Relu", (~0,)), Stage("And", (~1, ~0))), [], r"stage 1 \(And\): And needs bool operands"),
    ((Stage("Concat", (~0,), ConcatAttrs(0)),), [], "Concat cannot be a fused stage"),
    ((Stage("Blur", (~0,)),), [], "Blur cannot be a fused stage"),
    ((Stage("Relu", (~1,)),), [], "of 1 registers"),
    ((Stage("Add", (~0, 4)),), [], "1 operands"),
]


@pytest.mark.parametrize(("stages", "more", "because"), REFUSED)
def test_refused(stages: tuple[Stage, ...], more: list, because: str) -> None:
    with pytest.raises(ShapeError, match=because):
        infer_stages(stages, tensor(FP32, 2), [tensor(FP32, 2), *more])


def test_every_pointwise_operator_may_be_a_stage() -> None:
    pointwise = {kind for kind, d in OPDEFS.items() if d.traits.pointwise}
    assert STAGE_KINDS.keys() == pointwise - {"Pointwise"}


def test_plain_form() -> None:
    attrs = PointwiseAttrs(epilogue=(Stage("Swish", (~0,), AlphaAttrs(2.0)),))
    assert plain_attrs(OPDEFS["Pointwise"], attrs) == {
        "prologue": (),
        "epilogue": (PlainStage("Swish", (~0,), {"alpha": 2.0}),),
        "arity": 1,
    }
    assert plain_attrs(OPDEFS["Concat"], ConcatAttrs(2)) == {"axis": 2}


def test_evaluation() -> None:
    x, s = normal(5, 4), normal(4, seed=1)
    graph = pointwise(DAG, tensor(FP32, 5, 4), tensor(FP32, 4))
    y = evaluate(graph, {"x0": x, "x1": s})["y"]
    np.testing.assert_allclose(y, x / (1 + np.exp(-x)) * s + x, rtol=1e-5, atol=1e-6)
    (same,) = OPDEFS["Pointwise"].kernel(x, s, **plain_attrs(OPDEFS["Pointwise"], PointwiseAttrs(epilogue=DAG)))
    assert np.array_equal(same, y)


def test_half_precision_is_rounded_once_at_the_end() -> None:
    x, s = normal(200).astype(np.float16), normal(200, seed=1).astype(np.float16)
    graph = pointwise(DAG, tensor(FP16, 200), tensor(FP16, 200))
    y = evaluate(graph, {"x0": x, "x1": s})["y"]
    wide = evaluate(pointwise(DAG, tensor(FP32, 200), tensor(FP32, 200)), {"x0": x.astype("f4"), "x1": s.astype("f4")})
    assert y.dtype == np.float16
    assert np.array_equal(y, wide["y"].astype(np.float16))


def test_a_cast_inside_keeps_the_inferred_type() -> None:
    """Widening for half precision must not convert a result back that a stage has cast to float32."""
    stages = (Stage("Cast", (~0,), CastAttrs(FP32)), Stage("Mul", (~1, 1)))
    graph = pointwise(stages, tensor(FP16, 3), tensor(FP32, 3))
    x, s = np.array([1, 2, 3], np.float16), np.array([1 / 3] * 3, np.float32)
    y = evaluate(graph, {"x0": x, "x1": s})["y"]
    assert y.dtype == np.float32
    assert np.array_equal(y, x.astype(np.float32) * s)


@pytest.mark.parametrize("narrow", [FP16, BF16])
@pytest.mark.parametrize("kind", ["Gelu", "HardSwish", "Erf"])
def test_stages_after_a_conversion_compute_in_fp32(kind: str, narrow: DType) -> None:
    attrs = {"attrs": GeluAttrs("none")} if kind == "Gelu" else {}
    stages = (Stage("Cast", (~0,), CastAttrs(narrow)), Stage(kind, (~1,), **attrs), Stage("Tanh", (~2,)))
    x = normal(100)
    y = evaluate(pointwise(stages, tensor(FP32, 100)), {"x0": x})["y"]
    (want,) = run_kernel(kind, [x.astype(narrow).astype(np.float32)], plain_attrs(OPDEFS[kind], stages[1].attrs))
    assert y.dtype == narrow
    assert np.array_equal(y, np.tanh(want).astype(narrow))


def test_cost_counts_every_stage() -> None:
    flops = stages_flops(DAG, tensor(FP32, 10, 4), [None, tensor(FP32)])
    assert flops == 40 * (5 + 1 + 1)
    call_types = (tensor(FP32, 10, 4), tensor(FP32))
    attrs = PointwiseAttrs(epilogue=DAG)
    result = infer("Pointwise", *call_types, attrs=attrs)
    from optdnn.ops.base import Call

    cost = OPDEFS["Pointwise"].cost
    assert cost is not None
    assert cost(Call("Pointwise", attrs, call_types, (None, None), 1, symbol), result).flops == flops


def test_export_as_separate_nodes() -> None:
    stages = (*DAG, Stage("Gelu", (~3,), GeluAttrs()), Stage("Clip", (~4, None, 2)), Stage("HardSwish", (~5,)))
    types = [tensor(FP32, 5, 4), tensor(FP32, 4), tensor(FP32)]
    graph = pointwise(stages, *types)
    feeds = {"x0": normal(5, 4), "x1": normal(4, seed=1), "x2": np.array(0.5, np.float32)}
    proto = export_model(graph).proto
    onnx.checker.check_model(proto, full_check=True)
    expected = evaluate(graph, feeds)["y"]
    np.testing.assert_allclose(onnxruntime_run(proto, feeds)[0], expected, rtol=1e-5, atol=1e-6)
    from optdnn.importers.onnx import import_model

    np.testing.assert_allclose(evaluate(import_model(proto), feeds)["y"], expected, rtol=1e-5, atol=1e-6)


def test_export_knows_the_types_between_stages() -> None:
    """Constants of a decomposed stage take the type of the value they meet, here after a cast to float16."""

    class Names:
        def __init__(self) -> None:
            self.made: list[str] = []
            self.types: dict[str, Any] = {}
            self.consts: list[Array] = []

        def node(self, op_type: str, inputs: Any, outputs: int = 1, *, domain: str = "", **attrs: Any) -> Any:
            self.made.append(op_type)
            return (f"v{len(self.made)}",)

        def const(self, value: Array, hint: str = "c") -> str:
            self.consts.append(value)
            return f"c{len(self.consts)}"

        def type(self, name: str) -> Any:
            return self.types[name]

        def declare(self, name: str, type: Any) -> None:
            self.types[name] = type

        def value(self, name: str) -> None:
            return None

    e = Names()
    stages = (Stage("Cast", (~0,), CastAttrs(FP16)), Stage("Swish", (~1,), AlphaAttrs(2.0)))
    assert export_stages(stages, "x", tensor(FP32, 3), [""], e) == f"v{len(e.made)}"
    assert e.made[:2] == ["Cast", "Mul"]
    assert {c.dtype for c in e.consts} == {np.dtype(np.float16)}


# ---------------------------------------------------------------- the runner


def test_operands_that_contradict_give_a_typed_error() -> None:
    with pytest.raises(RunError, match=r"Add of float32\[2\], float32\[3\]: operands could not be broadcast"):
        run_kernel("Add", [np.zeros(2, np.float32), np.zeros(3, np.float32)], {})
    with pytest.raises(InternalError, match="no NumPy kernel for Blur"):
        run_kernel("Blur", [], {})


# ---------------------------------------------------------------- traits

GRID = np.linspace(-3, 3, 61)


def _accepts(kind: str, count: int, t: Any) -> bool:
    try:
        return len(infer(kind, *[t] * count).types) == 1
    except ShapeError:
        return False


UNARY = [d.kind for d in unary.DEFS if _accepts(d.kind, 1, tensor(FP32, 2))]


@pytest.mark.parametrize("kind", [k for k, d in OPDEFS.items() if d.traits.monotone and k in UNARY])
def test_monotone(kind: str) -> None:
    x = GRID if kind not in ("Acosh", "Atanh", "Asin") else np.linspace(1, 4, 61) if kind == "Acosh" else GRID / 3.2
    (y,) = run_kernel(
        kind, [np.abs(x) if kind in ("Log", "Sqrt") else x], plain_attrs(OPDEFS[kind], OPDEFS[kind].attrs())
    )
    order = np.argsort(np.abs(x), kind="stable") if kind in ("Log", "Sqrt") else np.arange(len(x))
    assert (np.diff(y[order]) >= 0).all()
    assert len(np.unique(y)) > 1


def test_only_monotone_operators_are_called_so() -> None:
    falling = []
    for kind in UNARY:
        (y,) = run_kernel(kind, [GRID], plain_attrs(OPDEFS[kind], OPDEFS[kind].attrs()))
        if y.dtype == np.float64 and (np.diff(y[np.isfinite(y)]) < -1e-12).any():
            falling.append(kind)
    assert {"Gelu", "Swish", "Mish", "HardSwish", "Neg", "Abs", "Cosh", "Sin", "Cos", "Acos", "Reciprocal"} <= set(
        falling
    )
    assert not [k for k in falling if OPDEFS[k].traits.monotone]


@pytest.mark.parametrize("kind", [k for k, d in OPDEFS.items() if d.traits.commutative])
def test_commutative(kind: str) -> None:
    t = next(t for t in (FP32, INT64, BOOL) if _accepts(kind, 2, tensor(t, 2)))
    a, b = ((4 * normal(40, seed=s)).astype(t) for s in (1, 2))
    assert np.array_equal(run_kernel(kind, [a, b], {})[0], run_kernel(kind, [b, a], {})[0])


def test_subtraction_and_its_like_are_not_commutative() -> None:
    for kind in ("Sub", "Div", "Pow", "Mod", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "BitShift", "PRelu"):
        assert not OPDEFS[kind].traits.commutative


def test_pointwise_kinds_are_the_pointwise_modules() -> None:
    own = {d.kind for d in (*unary.DEFS, *binary.DEFS)} | {"Pointwise", "Identity"}
    assert {k for k, d in OPDEFS.items() if d.traits.pointwise} == own
    assert all(type(OPDEFS[k].attrs()) is OPDEFS[k].attrs for k in own)
    assert isinstance(OPDEFS["Add"].attrs(), Attrs)
