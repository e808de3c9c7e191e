"""Resize and Upsample against ONNX Runtime and ONNX's own evaluator, over every mode; inference; every refusal."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from onenode import Case, check_case, check_export, import_case, normal, op_flops, run

from optdnn.dim import evaluate, symbol
from optdnn.errors import ShapeError, UnsupportedError
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.ops.base import EXACT, Tol, Unsupported
from optdnn.ops.resize import COORDINATES, NEAREST, ResizeAttrs
from optdnn.types import tensor

Json = dict[str, Any]
MODES = [m for m in COORDINATES if m not in ("tf_half_pixel_for_nn", "tf_crop_and_resize")]


def _sizes(x: np.ndarray, sizes: list[int], attrs: Json, opset: int = 19) -> Case:
    return Case("Resize", [x, None, None, np.array(sizes)], attrs, opset, constants=[3])


def _scales(x: np.ndarray, scales: list[float], attrs: Json, opset: int = 19) -> Case:
    return Case("Resize", [x, None, np.array(scales, np.float32)], attrs, opset, constants=[2])


@pytest.mark.parametrize("transform", MODES)
@pytest.mark.parametrize("nearest", NEAREST)
@pytest.mark.parametrize("size", [(9, 14), (3, 4), (10, 3), (5, 7)])
def test_nearest(transform: str, nearest: str, size: tuple[int, int]) -> None:
    x = normal(2, 3, 5, 7)
    attrs = {"coordinate_transformation_mode": transform, "nearest_mode": nearest}
    check_case(_sizes(x, [2, 3, *size], attrs), [_by_definition(x, size, attrs)], symbolic={0: (0, 1)}, tol=EXACT)


def _by_definition(x: np.ndarray, size: tuple[int, int], attrs: Json) -> np.ndarray:
    """Nearest neighbors in rational arithmetic."""
    from fractions import Fraction as Q
    from math import ceil, floor

    def source(i: int, n: int, out: int) -> int:
        t = attrs["coordinate_transformation_mode"]
        at = (Q(i) + Q(1, 2)) * n / out - Q(1, 2)
        if t == "align_corners":
            at = Q(i * (n - 1), out - 1) if out > 1 else Q(0)
        elif t == "asymmetric":
            at = Q(i * n, out)
        picked = {
            "floor": floor(at),
            "ceil": ceil(at),
            "round_prefer_ceil": floor(at + Q(1, 2)),
            "round_prefer_floor": ceil(at - Q(1, 2)),
        }[attrs["nearest_mode"]]
        return min(max(picked, 0), n - 1)

    rows, columns = ([source(i, n, o) for i in range(o)] for n, o in zip(x.shape[2:], size, strict=True))
    return x[:, :, rows][..., columns]


@pytest.mark.parametrize("transform", MODES)
@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("size", [(9, 14), (3, 4), (10, 3)])
@pytest.mark.parametrize("exclude", [0, 1])
def test_interpolation(transform: str, mode: str, size: tuple[int, int], exclude: int) -> None:
    attrs = {"mode": mode, "coordinate_transformation_mode": transform}
    if mode == "cubic":
        attrs |= {"exclude_outside": exclude, "cubic_coeff_a": -0.5 if exclude else -0.75}
    case = _sizes(normal(2, 3, 5, 7), [2, 3, *size], attrs)
    check_case(case, "reference", symbolic={0: (0, 1)})
    check_case(case, "onnxruntime")


def test_interpolation_to_one_element() -> None:
    for mode, transform in itertools.product(
        ("linear", "cubic"), ("pytorch_half_pixel", "align_corners", "half_pixel")
    ):
        case = _sizes(normal(1, 1, 5, 6), [1, 1, 1, 1], {"mode": mode, "coordinate_transformation_mode": transform})
        check_case(case)


@pytest.mark.parametrize("scales", [[2.0, 3.0], [0.5, 0.6], [1.5, 0.7], [1 / 3, 1.0]])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("transform", ["half_pixel", "asymmetric", "half_pixel_symmetric"])
def test_scales(scales: list[float], mode: str, transform: str) -> None:
    x = normal(1, 2, 9, 10)
    case = _scales(x, [1, 1, *scales], {"mode": mode, "coordinate_transformation_mode": transform})
    # Not compared with ONNX's evaluator, which computes 10 * 0.7 in float64 (6.9999998, so 6; its own shape inference gives 7).
    check_case(case, symbolic={0: (0, 1)})


def test_nearest_with_a_decimal_scale() -> None:
    """17 / 1.7 is 10. With 1.7 rounded to fp32 it is slightly less."""
    attrs = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    x = normal(1, 1, 1, 12)
    case = _scales(x, [1, 1, 1, 1.7], attrs)
    check_case(case, "onnxruntime")
    check_case(case, [x[..., [i * 10 // 17 for i in range(20)]]], tol=EXACT)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("size", [(3, 4), (2, 9), (11, 3)])
@pytest.mark.parametrize("exclude", [0, 1])
def test_antialias(mode: str, size: tuple[int, int], exclude: int) -> None:
    attrs = {"mode": mode, "antialias": 1, "exclude_outside": exclude}
    check_case(_sizes(normal(1, 2, 10, 12), [1, 2, *size], attrs), "reference")


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
def test_aspect_ratio(mode: str, policy: str) -> None:
    attrs = {"mode": mode, "keep_aspect_ratio_policy": policy, "axes": [2, 3]}
    case = Case("Resize", [normal(1, 2, 5, 8), None, None, np.array([9, 10])], attrs, 18, constants=[3])
    graph = check_case(case, "reference")
    shape = graph.of_kind("Resize")[0].outputs[0].type.shape
    assert shape == ((1, 2, 6, 10) if policy == "not_larger" else (1, 2, 9, 14))
    loose = import_case(case, {0: (2,)})
    assert not loose.of_kind("Resize")[0].outputs[0].type.is_static


@pytest.mark.parametrize("axes", [[2, 3], [3, 2], [-1], [1, 3]])
def test_axes(axes: list[int]) -> None:
    sizes = [11, 3][: len(axes)]
    x, attrs = normal(1, 4, 5, 6), {"mode": "linear", "axes": axes}
    case = Case("Resize", [x, None, None, np.array(sizes)], attrs, 18, constants=[3])
    check_case(case, "reference" if len(axes) > 1 else "onnxruntime")
    scales = np.array([2.0, 0.5][: len(axes)], np.float32)
    case = Case("Resize", [x, None, scales], attrs, 18, constants=[2])
    check_case(
        case, "reference" if axes == [1, 3] else "onnxruntime"
    )  # ONNX Runtime does not interpolate over channels


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("roi", [[0, 0, 0.2, 0.1, 1, 1, 0.9, 0.7], [0, 0, -0.3, 0.4, 1, 1, 1.4, 1.25]])
def test_crop(mode: str, roi: list[float]) -> None:
    attrs = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 7.0}
    x = normal(1, 2, 6, 7)
    case = Case("Resize", [x, np.array(roi, np.float32), None, np.array([1, 2, 5, 9])], attrs, 19, constants=[3])
    check_case(case, "reference")


def test_roi_matters_only_for_crop() -> None:
    x, roi = normal(1, 1, 4, 4), np.array([0, 0, 0.5, 0.5, 1, 1, 1, 1], np.float32)
    case = Case("Resize", [x, roi, None, np.array([1, 1, 8, 8])], {}, 13, constants=[3])
    (op,) = import_case(case).of_kind("Resize")
    assert op.inputs[1] is None
    check_case(case)


@pytest.mark.parametrize("nearest", NEAREST)
def test_tf_half_pixel_for_nn(nearest: str) -> None:
    attrs = {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": nearest}
    x, empty = normal(1, 2, 5, 7), np.zeros(0, np.float32)
    case = Case("Resize", [x, empty, empty, np.array([1, 2, 9, 4])], attrs, 11, constants=[1, 2, 3])
    graph = check_case(case)
    kept = graph.of_kind("Resize")[0].attrs.coordinate_transformation_mode == "tf_half_pixel_for_nn"
    assert kept == (nearest in ("ceil", "round_prefer_ceil"))


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(
    ("op", "scales"),
    [
        ("Upsample", [1, 1, 2, 3]),
        ("Upsample", [1, 1, 1.5, 2.5]),
        ("Resize", [1, 1, 2, 3]),
        ("Resize", [1, 1, 0.6, 0.6]),
        ("Resize", [1, 1, 2.0, 0.5]),
    ],
)
def test_before_opset_11(op: str, mode: str, scales: list[float]) -> None:
    x, s = normal(1, 2, 5, 6), np.array(scales, np.float32)
    graph = check_case(Case(op, [x, s], {"mode": mode}, 9 if op == "Upsample" else 10, constants=[1]))
    mixed = min(scales) < 1 < max(scales) and mode == "nearest"
    assert graph.kinds() == {"Resize": 2 if mixed else 1}
    if op == "Upsample":
        check_case(Case(op, [x], {"mode": mode, "scales": [float(v) for v in scales]}, 7))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.float16, np.float64])
def test_types(dtype: Any) -> None:
    x = (normal(1, 2, 5, 6) * 40 + (100 if dtype == np.uint8 else 0)).astype(dtype)
    check_case(_sizes(x, [1, 2, 9, 4], {}), "reference", tol=EXACT)
    check_case(_sizes(x, [1, 2, 9, 4], {"mode": "linear"}), "reference", tol=Tol(1e-5, 1e-5))


def test_booleans() -> None:
    x = normal(1, 2, 4, 4) > 0
    case = _sizes(x, [1, 2, 8, 8], {})
    (y,) = run(import_case(case), case.fed)
    assert np.array_equal(y, x.repeat(2, 2).repeat(2, 3))


def test_symbolic_sizes_and_scales() -> None:
    n, h = symbol("n", 1), symbol("h", 1)
    g = Graph()
    x = g.add_input("x", tensor(np.float32, n, 3, h, 8))

    def shape(scales: list[float]) -> tuple[Any, ...]:
        s = g.add_constant(np.array(scales, np.float32))
        return g.add("Resize", [x, None, s], ResizeAttrs()).outputs[0].type.dims

    assert shape([1, 1, 2, 2]) == (n, 3, 2 * h, 16)
    assert shape([1, 1, 0.5, 0.5]) == (n, 3, h // 2, 4)
    odd = shape([1, 1, 0.3, 0.3])
    assert odd[3] == 2
    assert odd[2] not in (h, 0)
    assert evaluate(shape([1, 1, 2.75, 1])[2], {"h": 9}) == 24


def test_unknown_operands_give_fresh_symbols() -> None:
    case = Case("Resize", [normal(1, 2, 4, 4), None, None, np.array([1, 2, 7, 7])], {}, 13)
    graph = import_case(case)
    assert not graph.of_kind("Resize")[0].outputs[0].type.is_static
    assert run(graph, case.fed)[0].shape == (1, 2, 7, 7)


@pytest.mark.parametrize(
    ("inputs", "attrs", "opset", "message"),
    [
        ([None, None, None], {}, 19, "scales or sizes"),
        ([None, [1, 1, 2, 2], [1, 1, 8, 8]], {}, 19, "scales or sizes"),
        ([None, [1, 1, 2], None], {}, 19, "scales has shape"),
        ([None, None, [1, 8, 8]], {}, 19, "sizes has shape"),
        ([None, [1, 1, 2, -2], None], {}, 19, "must be positive"),
        ([None, None, [1, 1, 8, -8]], {}, 19, "size of -8"),
        ([None, None, [8]], {"axes": [4]}, 19, "axis 4 is out of range"),
        ([None, None, [8, 8]], {"axes": [3, -1]}, 19, "name one axis twice"),
        ([None, None, [1, 1, 8, 8]], {"coordinate_transformation_mode": "tf_crop_and_resize"}, 19, "needs a roi"),
        ([[0, 1], None, [1, 1, 8, 8]], {"coordinate_transformation_mode": "tf_crop_and_resize"}, 19, "roi has shape"),
        ([None, None, [1, 1, 8, 8]], {"mode": "lanczos"}, 19, "mode is 'lanczos'"),
        ([None, None, [1, 1, 8, 8]], {"nearest_mode": "up"}, 19, "nearest_mode is 'up'"),
        ([None, None, [1, 1, 8, 8]], {"coordinate_transformation_mode": "x"}, 19, "transformation_mode is 'x'"),
        ([None, None, [1, 1, 8, 8]], {"keep_aspect_ratio_policy": "x"}, 19, "policy is 'x'"),
        ([], {}, 10, "needs operand 1"),
    ],
)
def test_contradictions_are_refused(inputs: list[Any], attrs: Json, opset: int, message: str) -> None:
    types = (np.float32, np.float32, np.int64)
    operands = [None if v is None else np.array(v, t) for v, t in zip(inputs, types, strict=False)]
    with pytest.raises(ShapeError, match=message):
        import_case(Case("Resize", [normal(1, 1, 4, 4), *operands], attrs, opset, constants=[1, 2, 3]))


def test_cases_that_onnx_leaves_undefined_are_unsupported() -> None:
    x = normal(1, 1, 4, 4)
    with pytest.raises(Unsupported, match="antialias"):
        import_case(_sizes(x, [1, 1, 8, 8], {"antialias": 1}))
    with pytest.raises(Unsupported, match="rounding depends"):
        import_case(Case("Resize", [x, np.array([1, 1, 2, 2], np.float32)], {}, 10))
    with pytest.raises(ShapeError, match="mode linear of bool"):
        import_case(_sizes(x > 0, [1, 1, 8, 8], {"mode": "linear"}))


def test_cost() -> None:
    graph = import_case(_sizes(normal(1, 2, 4, 4), [1, 2, 8, 8], {"mode": "linear"}))
    assert op_flops(graph, graph.of_kind("Resize")[0]) == 2 * 2 * 2 * 128
    graph = import_case(_sizes(normal(1, 2, 4, 4), [1, 2, 8, 8], {}))
    assert op_flops(graph, graph.of_kind("Resize")[0]) == 0


def test_export() -> None:
    x = normal(1, 2, 5, 6)
    for mode, transform in itertools.product(
        ("nearest", "linear", "cubic"), ("half_pixel", "align_corners", "asymmetric")
    ):
        attrs = {"mode": mode, "coordinate_transformation_mode": transform, "nearest_mode": "floor"}
        check_export(_sizes(x, [1, 2, 9, 4], attrs))
    check_export(_scales(x, [1, 1, 2, 0.5], {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1}))
    some = {"axes": [3, 2], "mode": "linear"}
    check_export(Case("Resize", [x, None, np.array([2, 0.5], np.float32)], some, 18, constants=[2]))
    check_export(Case("Resize", [x, None, None, np.array([9, 4])], some, 18, constants=[3]), by="reference")
    roi = np.array([0.1, 0.2, 0.8, 0.7], np.float32)
    crop = {"axes": [2, 3], "mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}
    check_export(Case("Resize", [x, roi, None, np.array([4, 4])], crop, 18, constants=[1, 3]), by="reference")


def test_export_of_further_attributes() -> None:
    x, sizes = normal(1, 2, 8, 8), [1, 2, 4, 4]
    for attrs in (
        {"mode": "linear", "antialias": 1},
        {"keep_aspect_ratio_policy": "not_larger"},
        {"coordinate_transformation_mode": "half_pixel_symmetric"},
    ):
        check_export(_sizes(x, sizes, attrs), by="reference")
    linear_tf = {"mode": "linear", "coordinate_transformation_mode": "tf_half_pixel_for_nn"}
    with pytest.raises(UnsupportedError, match="opsets 11 and 12 only"):
        check_export(_sizes(x, sizes, linear_tf, 11))
    open_sizes = Case("Resize", [x, None, None, np.array([4, 4])], {"axes": [2, 3]}, 18)
    check_export(open_sizes, by="reference")


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("scales", [[2, 3], [0.6, 1.4], [2.3, 0.55], [0.2, 0.3]])
def test_export_of_aligned_corners_with_fractional_scales(mode: str, scales: list[float]) -> None:
    attrs = {"mode": mode, "coordinate_transformation_mode": "align_corners"}
    case = _scales(normal(1, 2, 5, 6), [1, 1, *scales], attrs)
    by_sizes = not all(float(s).is_integer() for s in scales)
    (node,) = check_export(case).graph.node
    assert (len(node.input) == 4) == by_sizes
    check_case(case, "reference")
    if by_sizes:
        with pytest.raises(UnsupportedError, match="sizes that are not known"):
            export_model(import_case(case, {0: (2,)}))
