"""Normalizations against ONNX Runtime and ONNX's own evaluator; old opsets; inference; every refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onenode import Case, check_case, check_export, import_case, normal, op_flops, run
from onnx.reference import ReferenceEvaluator
from support import region_cases
from support.net import Net

import optdnn
from optdnn.dim import symbol
from optdnn.errors import ShapeError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.ops.base import EXACT, Tol, Unsupported, attrs_dict
from optdnn.ops.norm import (
    DeviationNormAttrs,
    EpsilonAttrs,
    GroupNormAttrs,
    LayerNormAttrs,
    LpNormAttrs,
    LRNAttrs,
    MeanVarianceAttrs,
)
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import FP16, FP32, FP64, Array, tensor

SHAPES = [(2, 6, 5), (2, 6, 5, 4), (2, 6, 3, 4, 5)]


def _channels(n: int = 6, count: int = 2, dtype: Any = np.float32) -> list[np.ndarray]:
    return [normal(n, seed=i + 1, dtype=dtype) for i in range(count)]


def _statistics(n: int = 6, dtype: Any = np.float32) -> list[np.ndarray]:
    return [*_channels(n, 3, dtype), np.random.default_rng(9).uniform(0.5, 2, n).astype(dtype)]


@pytest.mark.parametrize("shape", [(4, 6), *SHAPES])
@pytest.mark.parametrize("opset", [7, 9, 14, 15])
def test_batch_normalization(shape: tuple[int, ...], opset: int) -> None:
    case = Case("BatchNormalization", [normal(*shape), *_statistics()], {"epsilon": 1e-3}, opset)
    check_case(case, symbolic={0: (0, *range(2, len(shape)))})


def test_batch_normalization_of_mixed_types() -> None:
    x, rest = normal(2, 6, 4, dtype=FP16), _statistics()
    exact = run(import_case(case := Case("BatchNormalization", [x.astype(FP32), *rest])), case.fed)
    check_case(Case("BatchNormalization", [x, *rest]), [exact[0].astype(FP16)], tol=EXACT)
    # fp32 data with fp16 parameters stays fp32.
    half = [v.astype(FP16) for v in rest]
    graph = import_case(case := Case("BatchNormalization", [x.astype(FP32), *half]))
    assert run(graph, case.fed)[0].dtype == FP32


@pytest.mark.parametrize(("shape", "dtype"), [((5, 6), FP32), ((2, 6, 4, 3), FP32), ((2, 6, 4), FP64)])
def test_batch_normalization_in_training_mode(shape: tuple[int, ...], dtype: Any) -> None:
    attrs = {"training_mode": 1, "momentum": 0.7, "epsilon": 1e-3}
    case = Case("BatchNormalization", [normal(*shape, dtype=dtype), *_statistics(dtype=dtype)], attrs, 15, outputs=3)
    check_case(case, "reference", symbolic={0: (0,)})


def test_batch_normalization_in_training_mode_of_half_precision_sums_in_fp32() -> None:
    x, rest = normal(4, 6, 500, dtype=FP16) + FP16.type(8), _statistics(dtype=FP32)
    case = Case("BatchNormalization", [x, *rest], {"training_mode": 1}, 15, outputs=3)
    wide = x.astype(FP64)
    expected = rest[2] * 0.9 + wide.mean((0, 2)) * 0.1, rest[3] * 0.9 + wide.var((0, 2)) * 0.1
    y, mean, var = run(import_case(case), case.fed)
    assert (y.dtype, mean.dtype, var.dtype) == (FP16, FP32, FP32)
    np.testing.assert_allclose([mean, var], expected, rtol=1e-5)


def test_batch_normalization_per_activation() -> None:
    x = normal(2, 3, 4)
    scale, bias, mean = (normal(3, 4, seed=i) for i in (1, 2, 3))
    var = np.random.default_rng(9).uniform(0.5, 2, (3, 4)).astype(np.float32)
    expected = (x - mean) / np.sqrt(var + 1e-5) * scale + bias
    case = Case("BatchNormalization", [x, scale, bias, mean, var], {"spatial": 0}, opset=7)
    graph = check_case(case, [expected.astype(np.float32)])
    assert "BatchNormalization" not in graph.kinds()


@pytest.mark.parametrize(
    ("attrs", "outputs", "opset", "message"),
    [
        ({}, 5, 9, "statistics outputs are used"),
        ({}, 3, 15, "statistics outputs are used"),
    ],
)
def test_training_is_refused(attrs: dict[str, Any], outputs: int, opset: int, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        import_case(Case("BatchNormalization", [normal(2, 6, 4), *_statistics()], attrs, opset, outputs))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("opset", [7, 22])
def test_instance_normalization(shape: tuple[int, ...], opset: int) -> None:
    case = Case("InstanceNormalization", [normal(*shape), *_channels()], {"epsilon": 1e-2}, opset)
    expected: Any = "onnxruntime" if opset == 7 else "reference"
    check_case(case, expected, symbolic={0: (0, *range(2, len(shape)))})


def _group_norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray, groups: int, epsilon: float) -> np.ndarray:
    g = x.astype(np.float64).reshape(x.shape[0], groups, -1)
    g = (g - g.mean(-1, keepdims=True)) / np.sqrt(g.var(-1, keepdims=True) + epsilon)
    column = (-1, *(1,) * (x.ndim - 2))
    return (g.reshape(x.shape) * scale.reshape(column) + bias.reshape(column)).astype(x.dtype)


@pytest.mark.parametrize("shape", [(4, 6), *SHAPES])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("constant", [False, True])
def test_group_normalization_of_both_generations(shape: tuple[int, ...], groups: int, constant: bool) -> None:
    x, (scale, bias) = normal(*shape), _channels()
    attrs = {"num_groups": groups, "epsilon": 1e-3}
    symbolic = {0: (0, *range(2, len(shape)))}
    expected = [_group_norm(x, scale, bias, groups, 1e-3)]
    check_case(Case("GroupNormalization", [x, scale, bias], attrs, opset=21), expected, symbolic=symbolic)
    # Opset 18 has one scale and bias per group.
    scale, bias = scale[:groups], bias[:groups]
    wide = [np.repeat(v, 6 // groups) for v in (scale, bias)]
    case = Case("GroupNormalization", [x, scale, bias], attrs, opset=18, constants=[1, 2] if constant else [])
    graph = check_case(case, [_group_norm(x, *wide, groups, 1e-3)], symbolic=symbolic)
    (op,) = graph.of_kind("GroupNormalization")
    assert graph.type(op.inputs[1]).shape == (6,)
    if constant:
        assert graph.kinds() == {"GroupNormalization": 1}


def test_group_normalization_per_group_needs_known_channels() -> None:
    case = Case("GroupNormalization", [normal(2, 6, 4), *_channels(2)], {"num_groups": 2}, opset=18)
    with pytest.raises(Unsupported, match="symbolic number of channels"):
        import_case(case, {0: (1,)})


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [1, 3])
def test_layer_normalization(axis: int, bias: bool, outputs: int) -> None:
    x = normal(3, 4, 5)
    shape = x.shape[axis % 3 :]
    operands = [x, normal(*shape, seed=1), *([normal(*shape, seed=2)] if bias else [])]
    case = Case("LayerNormalization", operands, {"axis": axis, "epsilon": 1e-3}, 17, outputs)
    check_case(case, "reference" if outputs == 3 else "onnxruntime", symbolic={0: range(3)})


def test_layer_normalization_of_half_keeps_single_statistics() -> None:
    x, (scale, bias) = normal(4, 64, dtype=FP16), _channels(64, dtype=FP16)
    wide = Case("LayerNormalization", [v.astype(FP32) for v in (x, scale, bias)], opset=17, outputs=3)
    y, mean, inverse = run(import_case(wide), wide.fed)
    case = Case("LayerNormalization", [x, scale, bias], opset=17, outputs=3)
    check_case(case, [y.astype(FP16), mean, inverse], tol=EXACT)


def test_engines_give_single_statistics_of_half() -> None:
    case = Case("LayerNormalization", [normal(4, 6).astype(FP16), normal(6).astype(FP16)], opset=17, outputs=3)
    for target in ("reference", "simulate"):
        found = optdnn.build(case.model(), target=target).run(case.fed)
        assert [found[k].dtype for k in ("y0", "y1", "y2")] == [FP16, FP32, FP32]
        np.testing.assert_allclose(found["y1"], case.inputs[0].astype(FP32).mean(1, keepdims=True), rtol=1e-6)


def test_layer_normalization_broadcasts_its_scale() -> None:
    x = normal(3, 4, 5)
    for shape in ((1,), (5,), (4, 1), (1, 4, 5), (3, 4, 5)):
        check_case(Case("LayerNormalization", [x, normal(*shape, seed=1)], {"axis": 1}, 17), "reference")


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_rms_normalization(axis: int) -> None:
    x = normal(3, 4, 5)
    shape = x.shape[axis % 3 :]
    case = Case("RMSNormalization", [x, normal(*shape, seed=1)], {"axis": axis, "epsilon": 1e-3}, 23)
    check_case(case, "reference", symbolic={0: range(axis % 3)})
    # The result has the scale's type.
    mixed = Case("RMSNormalization", [x.astype(FP16), normal(5, seed=1)], {}, 23)
    assert run(import_case(mixed), mixed.fed)[0].dtype == FP32


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("shape", [(2, 6, 5, 4), (2, 3, 4, 4)])
def test_lrn(size: int, shape: tuple[int, ...]) -> None:
    x, attrs = normal(*shape), {"size": size, "alpha": 0.5, "beta": 0.6, "bias": 1.5}
    expected: Any = "onnxruntime"
    if size % 2 == 0:  # ONNX Runtime supports only odd sizes
        expected = [_lrn(x, size)]
    check_case(Case("LRN", [x], attrs), expected, symbolic={0: (0, 2, 3)})


def test_lrn_over_more_channels_than_there_are() -> None:
    """An attacker may give any size: the existing channels are added up, and missing ones cost no time."""
    x = np.ones((1, 3, 2), np.float32)
    (y,) = run_kernel("LRN", [x], {"size": 1 << 40, "alpha": float(1 << 40), "beta": 1.0})
    np.testing.assert_allclose(y, x / 4)


def _lrn(x: np.ndarray, size: int) -> np.ndarray:
    y = np.empty_like(x)
    for c in range(x.shape[1]):
        low, high = max(0, c - (size - 1) // 2), min(x.shape[1] - 1, c + -(-(size - 1) // 2))
        total = (x[:, low : high + 1].astype(np.float64) ** 2).sum(1)
        y[:, c] = x[:, c] / (1.5 + 0.5 / size * total) ** 0.6
    return y


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_lp_normalization(p: int, axis: int) -> None:
    x = normal(3, 4, 5)
    x[:, 1], x[1], x[..., 2] = 0, 0, 0  # a zero norm gives zero
    norm = (np.abs(x) ** p).sum(axis, keepdims=True) ** (1 / p)
    expected = np.divide(x, norm, where=norm > 0, out=np.zeros_like(x))
    check_case(Case("LpNormalization", [x], {"axis": axis, "p": p}), [expected], symbolic={0: (0, 1, 2)})


@pytest.mark.parametrize("p", [1, 2])
def test_lp_normalization_of_a_least_norm(p: int) -> None:
    x = normal(3, 4)
    x[1] *= 1e-3
    norm = np.maximum((np.abs(x) ** p).sum(1, keepdims=True) ** (1 / p), 0.1)
    (y,) = run_kernel("LpNormalization", [x], {"axis": 1, "p": p, "epsilon": 0.1})
    np.testing.assert_allclose(y, x / norm, rtol=1e-6)
    with pytest.raises(ShapeError, match="epsilon is -1"):
        region_cases.infer("LpNormalization", LpNormAttrs(1, p, -1.0), [x])


@pytest.mark.parametrize("p", [1, 2])
def test_a_least_norm_is_exported_as_arithmetic(p: int) -> None:
    n = Net()
    graph = n.done(n.op("LpNormalization", n.input(2, 6), attrs=LpNormAttrs(1, p, 0.5)))
    model = export_model(graph).proto
    onnx.checker.check_model(model, full_check=True)
    x = normal(2, 6) * np.float32([[1], [0.01]])
    (got,) = ReferenceEvaluator(model).run(None, {model.graph.input[0].name: x})
    np.testing.assert_allclose(
        got, run_kernel("LpNormalization", [x], {"axis": 1, "p": p, "epsilon": 0.5})[0], rtol=1e-5
    )


def deviations(x: Array, attrs: DeviationNormAttrs) -> Array:
    axes = tuple(range(attrs.axis % x.ndim, x.ndim))
    d = x - x.mean(axes, keepdims=True) if attrs.about_mean else x
    spread = np.sqrt((d * d).mean(axes, keepdims=True) + attrs.epsilon) + attrs.root_epsilon
    return (d if attrs.centered else x) / spread


DEVIATIONS = [
    DeviationNormAttrs(-1, 0.0, 0.1), DeviationNormAttrs(1, 0.2, 0.1, True, False), DeviationNormAttrs(-1, 0.0, 0.3, False, False),
    DeviationNormAttrs(-1, 0.2, 0.0, True, False),
]  # fmt: skip


@pytest.mark.parametrize("attrs", DEVIATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_deviation_normalization(attrs: DeviationNormAttrs, bias: bool) -> None:
    x, scale, shift = normal(3, 4, 5), normal(5, seed=1), normal(5, seed=2)
    (y,) = run_kernel("DeviationNormalization", [x, scale, *([shift] if bias else [])], attrs_dict(attrs))
    want = deviations(x, attrs) * scale + (shift if bias else 0)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    n = Net()
    model = export_model(
        n.done(n.op("DeviationNormalization", n.input(3, 4, 5), scale, *([shift] if bias else []), attrs=attrs))
    ).proto
    onnx.checker.check_model(model, full_check=True)
    (got,) = ReferenceEvaluator(model).run(None, {model.graph.input[0].name: x})
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("attrs", "match"),
    [
        (DeviationNormAttrs(3), "axis 3 is out of range"),
        (DeviationNormAttrs(about_mean=False), "its variance must be about the mean"),
        (DeviationNormAttrs(root_epsilon=-1.0), "epsilons are 0.0 and -1.0"),
    ],
)
def test_deviation_normalization_errors(attrs: DeviationNormAttrs, match: str) -> None:
    with pytest.raises(ShapeError, match=match):
        region_cases.infer("DeviationNormalization", attrs, [normal(2, 6, 4), normal(4)])


def test_the_scale_of_a_deviation_normalization_has_the_type_of_its_input() -> None:
    with pytest.raises(ShapeError, match="DeviationNormalization scale is"):
        region_cases.infer("DeviationNormalization", DeviationNormAttrs(), [normal(2, 4), normal(4, dtype=FP64)])


@pytest.mark.parametrize("axes", [None, (0, 2, 3), (1,), (2, -1), (0, 1, 2, 3)])
def test_mean_variance_normalization(axes: tuple[int, ...] | None) -> None:
    attrs = {} if axes is None else {"axes": list(axes)}
    case = Case("MeanVarianceNormalization", [normal(2, 3, 4, 5)], attrs, opset=13)
    check_case(case, "reference", symbolic={0: (0, 2, 3)})


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("color", [0.3, 0.7, 1000.7])
def test_a_picture_of_one_color_is_exported_without_nan(dtype: Any, color: float) -> None:
    """ONNX's formula makes the variance negative by rounding: ONNX Runtime gives NaN."""
    graph = import_case(Case("MeanVarianceNormalization", [np.full((2, 3, 8, 8), color, dtype)], opset=13))
    exported = import_model(export_model(graph).proto)
    assert exported.of_kind("MeanVarianceNormalization") == []
    feeds = {"x0": np.full((2, 3, 8, 8), color, dtype)}
    (got,) = evaluate(exported, feeds).values()
    assert got.dtype == dtype
    assert np.isfinite(got).all()
    feeds["x0"] = normal(2, 3, 8, 8).astype(dtype)
    (got,), (want,) = evaluate(exported, feeds).values(), evaluate(graph, feeds).values()
    np.testing.assert_allclose(got, want, rtol=1e-3 if dtype == np.float16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "shapes", "attrs"),
    [
        ("BatchNormalization", [(2, 6, 4), (6,), (6,), (6,), (6,)], EpsilonAttrs()),
        ("InstanceNormalization", [(2, 6, 4), (6,), (6,)], EpsilonAttrs()),
        ("GroupNormalization", [(2, 6, 4), (6,), (6,)], GroupNormAttrs(2)),
        ("LayerNormalization", [(2, 6, 4), (4,), (4,)], LayerNormAttrs(stash_type=FP64)),
        ("RMSNormalization", [(2, 6, 4), (4,)], LayerNormAttrs()),
        ("LRN", [(2, 6, 4)], LRNAttrs(3)),
        ("LpNormalization", [(2, 6, 4)], LpNormAttrs()),
        ("MeanVarianceNormalization", [(2, 6, 4)], MeanVarianceAttrs((0, 2))),
        ("DeviationNormalization", [(2, 6, 4), (4,), (4,)], DeviationNormAttrs(-1, 0.1, 0.1)),
    ],
)
def test_float64_in_float64_out(kind: str, shapes: list[tuple[int, ...]], attrs: Any) -> None:
    """No intermediate value is fp32: scaling the data by 1 + 1e-12 is visible."""
    feeds = {f"x{i}": np.abs(normal(*s, seed=i, dtype=FP64)) for i, s in enumerate(shapes)}
    g = Graph()
    op = g.add(kind, [g.add_input(n, tensor(FP64, *v.shape)) for n, v in feeds.items()], attrs)
    g.add_output(op.value, "y")
    (y,) = run(g, feeds)
    assert y.dtype == FP64
    (moved,) = run(g, {**feeds, "x0": feeds["x0"] + np.eye(6, 4) * 1e-12})
    assert 0 < np.abs(moved - y).max() < 1e-10


@pytest.mark.parametrize(
    ("op", "shapes", "attrs", "message"),
    [
        ("BatchNormalization", [(2, 6, 4), (6,), (6,), (5,), (6,)], {}, "mean and the channels"),
        ("BatchNormalization", [(2, 6, 4), (6, 1), (6,), (6,), (6,)], {}, "scale must have 1"),
        ("BatchNormalization", [(6,), (6,), (6,), (6,), (6,)], {}, "at least 2"),
        ("InstanceNormalization", [(2, 6), (6,), (6,)], {}, "at least 3"),
        ("InstanceNormalization", [(2, 6, 4), (6,), (5,)], {}, "bias and the channels"),
        ("GroupNormalization", [(2, 6, 4), (6,), (6,)], {"num_groups": 4}, "do not divide"),
        ("GroupNormalization", [(2, 6, 4), (6,), (6,)], {"num_groups": 0}, "num_groups is 0"),
        ("GroupNormalization", [(2, 6, 4), (6,), (6,)], {}, "needs attribute 'num_groups'"),
        ("GroupNormalization", [(2, 6, 4), (2,), (2,)], {"num_groups": 2}, "scale and the channels"),
        ("LayerNormalization", [(2, 6, 4), (6,)], {}, "scale .* does not broadcast"),
        ("LayerNormalization", [(2, 6, 1), (4,)], {}, "scale .* does not broadcast"),
        ("LayerNormalization", [(2, 6, 4), (4,), (1, 1, 1, 4)], {}, "bias .* does not broadcast"),
        ("LayerNormalization", [(2, 6, 4), (4,)], {"axis": 3}, "axis 3 is out of range"),
        ("LRN", [(2, 6, 4)], {"size": 0}, "size is 0"),
        ("LRN", [(2, 6, 4)], {}, "needs attribute 'size'"),
        ("LpNormalization", [(2, 6, 4)], {"p": 3}, "p is 3"),
        ("LpNormalization", [(2, 6, 4)], {"axis": 3}, "axis 3 is out of range"),
        ("MeanVarianceNormalization", [(2, 6, 4)], {}, "axis 3 is out of range"),
    ],
)
def test_contradictions_are_refused(
    op: str, shapes: list[tuple[int, ...]], attrs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        import_case(Case(op, [np.ones(s, np.float32) for s in shapes], attrs, opset=23))


def test_per_group_parameters_of_wrong_length_are_refused() -> None:
    for groups, n, message in ((4, 4, "do not divide 6"), (2, 6, "one entry per group")):
        case = Case("GroupNormalization", [normal(2, 6, 4), *_channels(n)], {"num_groups": groups}, opset=18)
        with pytest.raises(ShapeError, match=message):
            import_case(case)


def test_types_must_agree() -> None:
    g = Graph()
    x, s, i = (g.add_input(n, tensor(t, 2, 6, 4)) for n, t in (("x", FP32), ("s", FP64), ("i", np.int32)))
    with pytest.raises(ShapeError, match="LayerNormalization scale is"):
        g.add("LayerNormalization", [x, s], LayerNormAttrs())
    c = g.add_input("c", tensor(FP64, 6))
    with pytest.raises(ShapeError, match="InstanceNormalization scale is"):
        g.add("InstanceNormalization", [x, c, c], EpsilonAttrs())
    with pytest.raises(ShapeError, match="must be floating-point"):
        g.add("LRN", [i], LRNAttrs(3))


def test_stash_type_must_be_a_float() -> None:
    with pytest.raises(Unsupported, match="stash_type 7"):
        import_case(Case("LayerNormalization", [normal(2, 3), normal(3)], {"stash_type": 7}, opset=17))


def test_cost_counts_elements() -> None:
    graph = import_case(Case("LRN", [normal(2, 3, 4)], {"size": 5}))
    assert op_flops(graph, graph.of_kind("LRN")[0]) == 14 * 24
    g = Graph()
    x, c = g.add_input("x", tensor(FP32, symbol("n"), 6, 4)), g.add_input("c", tensor(FP32, 6))
    assert op_flops(g, g.add("BatchNormalization", [x, c, c, c, c], EpsilonAttrs())) == 2 * 24


def test_tolerance_is_tight_enough_to_see_a_wrong_epsilon() -> None:
    x, rest = normal(2, 6, 4), _statistics()
    good = import_case(case := Case("BatchNormalization", [x, *rest], {"epsilon": 1e-5}))
    with pytest.raises(AssertionError, match="error"):
        check_case(Case("BatchNormalization", [x, *rest], {"epsilon": 1e-4}), run(good, case.fed), tol=Tol(1e-5, 2e-6))


def test_export() -> None:
    x = normal(2, 6, 4, 5)
    check_export(Case("BatchNormalization", [x, *_statistics()], {"epsilon": 1e-3}))
    check_export(Case("InstanceNormalization", [x, *_channels()], {"epsilon": 1e-3}))
    check_export(Case("GroupNormalization", [x, *_channels()], {"num_groups": 3, "epsilon": 1e-3}))
    check_export(Case("LayerNormalization", [x, normal(4, 5), normal(4, 5)], {"axis": 2, "epsilon": 1e-3}, 17, 3))
    model = check_export(Case("RMSNormalization", [x, normal(5)], {"epsilon": 1e-3}, 23))
    assert "RMSNormalization" not in {n.op_type for n in model.graph.node}
    check_export(Case("LRN", [x], {"size": 3, "alpha": 0.5}))
    check_export(Case("LpNormalization", [x], {"axis": 1}))
    check_export(Case("MeanVarianceNormalization", [x]))


def test_export_of_half_precision() -> None:
    """Decomposed forms compute in stash_type, like the operators."""
    x = (normal(4, 64) * 300).astype(FP16)  # squares overflow in half precision
    scale = normal(64, dtype=FP16)
    for kind in ("LayerNormalization", "RMSNormalization"):
        check_export(Case(kind, [x, scale], {}, 23))
    check_export(Case("RMSNormalization", [x, scale.astype(FP32)], {}, 23))
