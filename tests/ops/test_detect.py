"""NonMaxSuppression, RoiAlign, MaxRoiPool, GridSample, DeformConv against ONNX Runtime; refusals."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from onenode import Case, check_case, check_export, import_case, normal, onnxruntime_outputs, op_flops, run

from optdnn.errors import ShapeError
from optdnn.ops.base import Unsupported
from optdnn.runtime.reference import suppression
from optdnn.runtime.reference.detect import roi_align
from optdnn.runtime.reference.suppression import non_max_suppression, suppressed_by
from optdnn.types import Array

F = np.float32


def boxes(n: int, count: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    low, size = rng.uniform(0, 10, (n, count, 2)), rng.uniform(1, 5, (n, count, 2))
    return np.concatenate([low, low + size], -1).astype(F)


def nms(limit: int | None, iou: float | None, score: float | None, **attrs: Any) -> Case:
    rng = np.random.default_rng(5)
    b, s = boxes(2, 40), (rng.integers(0, 20, (2, 3, 40)) / 20).astype(F)  # equal scores among them
    operands: list[Array | None] = [b, s, None if limit is None else np.array([limit])]
    operands += [None if v is None else np.array([v], F) for v in (iou, score)]
    while operands[-1] is None:
        operands.pop()
    return Case("NonMaxSuppression", operands, attrs, 11)


@pytest.mark.parametrize("center", [0, 1])
@pytest.mark.parametrize(
    ("limit", "iou", "score"),
    [
        (5, 0.5, 0.2),
        (100, 0.3, None),
        (100, 0.0, 0.5),
        (3, None, None),
        (100, 1.0, None),
        (0, 0.5, 0.1),
        (None, None, None),
    ],
)
def test_non_max_suppression(center: int, limit: int | None, iou: float | None, score: float | None) -> None:
    case = nms(limit, iou, score, center_point_box=center)
    (expected,) = onnxruntime_outputs(case)
    (got,) = run(import_case(case), case.fed)
    np.testing.assert_array_equal(got, expected)
    assert got.dtype == np.int64
    check_export(case)


@pytest.mark.parametrize("limit", [2, 1000])
@pytest.mark.parametrize("classes", [1, 30])
def test_many_boxes(limit: int, classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes of different classes are separate, or all together. Few or all may be kept. They are compared in several pieces."""
    monkeypatch.setattr(suppression, "PAIRS", 5000)
    rng = np.random.default_rng(3)
    b, s = (
        boxes(1, 600) + rng.integers(0, classes, (1, 600, 1)).astype(F) * 20,
        rng.uniform(0, 1, (1, 1, 600)).astype(F),
    )
    case = Case("NonMaxSuppression", [b, s, np.array([limit]), np.array([0.3], F)], {}, 11)
    (expected,) = onnxruntime_outputs(case)
    (got,) = run(import_case(case), case.fed)
    np.testing.assert_array_equal(got, expected)


def one_by_one(corners: Array, group: Array, threshold: float) -> Array:
    """The kept boxes: what a function given to ``suppressed_by`` computes."""
    assert (corners.dtype, group.dtype) == (F, np.int32)
    assert (np.diff(group) >= 0).all()
    kept = np.ones(len(group), np.bool_)
    for i in np.arange(len(group)):
        if not kept[i]:
            continue
        low, high = np.maximum(corners[i, :2], corners[:, :2]), np.minimum(corners[i, 2:], corners[:, 2:])
        both = np.prod(np.maximum(high - low, 0), 1)
        areas = np.prod(corners[:, 2:] - corners[:, :2], 1)
        kept[i + 1 :] &= ~((both / (areas + areas[i] - both) > F(threshold)) & (group == group[i]))[i + 1 :]
    return kept


@pytest.mark.parametrize("score", [None, 0.3])
@pytest.mark.parametrize("limit", [4, 1000])
def test_boxes_of_all_classes_are_compared_at_once(limit: int, score: float | None) -> None:
    rng = np.random.default_rng(4)
    b, s = boxes(2, 90), (rng.integers(-10, 20, (2, 3, 90)) / 20).astype(F)
    s[0, 1, 5:8] = np.nan
    s[1, 2, ::9] = [-0.0, 0.0] * 5
    given = (b, s, np.array([limit]), np.array([0.3], F), None if score is None else np.array([score], F))
    calls = []

    def suppress(corners: Array, group: Array, threshold: float) -> Array:
        calls.append(len(group))
        return one_by_one(corners, group, threshold)

    (expected,) = non_max_suppression(*given)
    with suppressed_by(suppress):
        (got,) = non_max_suppression(*given)
        non_max_suppression(b, s[:, :, :90] - 9, *given[2:4], np.array([0.3], F))  # no candidates
        non_max_suppression(b.astype(np.float64), s, *given[2:])
    np.testing.assert_array_equal(got, expected)
    assert calls == [s.size if score is None else int((s > score).sum())]


def test_more_scores_than_one_sort_can_rank_are_compared_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    b, s = boxes(1, 90), np.random.default_rng(4).uniform(0, 1, (1, 2, 90)).astype(F)
    given = (b, s, np.array([50]), np.array([0.3], F))
    monkeypatch.setattr(suppression, "MOST_SCORES", s.size - 1)

    def never(corners: Array, group: Array, threshold: float) -> Array:
        raise AssertionError("it is called")

    with suppressed_by(never):
        assert len(non_max_suppression(*given)[0])
        monkeypatch.setattr(suppression, "MOST_SCORES", s.size)
        with pytest.raises(AssertionError, match="it is called"):
            non_max_suppression(*given)


def test_boxes_of_nan_suppress_nothing() -> None:
    b = boxes(1, 20)
    b[0, ::3, 1] = np.nan
    found = non_max_suppression(b, np.ones((1, 1, 20), F), np.array([20]), np.array([0.0], F))[0][:, 2]
    assert set(range(0, 20, 3)) <= set(found.tolist())
    assert len(found) < 20


def test_corners_in_any_order_and_boxes_without_area() -> None:
    case = nms(100, 0.4, None)
    b = case.inputs[0]
    assert b is not None
    b[:, ::2] = b[:, ::2][..., [2, 3, 0, 1]]
    b[:, 1::7, 2:] = b[:, 1::7, :2]
    np.testing.assert_array_equal(run(import_case(case), case.fed)[0], onnxruntime_outputs(case)[0])


# ---------------------------------------------------------------- regions


ROIS = np.array([[1, 1, 8, 6], [0, 0, 3.3, 9.7], [-4, -4, 2, 2], [7, 5, 30, 40], [3, 3, 3, 3], [5.5, 2.25, 6, 2.5]], F)


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("ratio", [0, 1, 3])
@pytest.mark.parametrize(("transform", "opset"), [("half_pixel", 16), ("output_half_pixel", 16), (None, 10)])
def test_roi_align(mode: str, ratio: int, transform: str | None, opset: int) -> None:
    attrs = {"output_height": 3, "output_width": 2, "sampling_ratio": ratio, "spatial_scale": 0.75, "mode": mode}
    attrs |= {} if transform is None else {"coordinate_transformation_mode": transform}
    case = Case("RoiAlign", [normal(2, 3, 9, 8), ROIS, np.array([0, 1, 1, 0, 1, 0])], attrs, opset)
    check_case(case, symbolic={0: (0, 2, 3)})
    check_export(case)


def test_roi_align_of_a_single_row() -> None:
    attrs = {"output_height": 2, "output_width": 2, "sampling_ratio": 2}
    check_case(Case("RoiAlign", [normal(1, 2, 1, 9), ROIS, np.zeros(6, np.int64)], attrs, 16))


def test_max_roi_pool() -> None:
    rois = np.concatenate([np.array([[0, 1, 1, 0, 1, 0]], F).T, ROIS], 1)
    case = Case("MaxRoiPool", [normal(2, 3, 9, 8), rois], {"pooled_shape": [3, 2], "spatial_scale": 0.75}, 1)
    check_case(case)
    check_export(case)


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize(
    ("mode", "padding", "align"),
    list(product(["linear", "nearest", "cubic"], ["zeros", "border", "reflection"], [0, 1])),
)
def test_grid_sample(mode: str, padding: str, align: int) -> None:
    grid = np.random.default_rng(1).uniform(-1.6, 1.6, (2, 6, 7, 2)).astype(F)
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": align}
    case = Case("GridSample", [normal(2, 3, 5, 4), grid], attrs, 20)
    check_case(case, symbolic={0: (1, 2), 1: (1, 2)})
    old = Case(
        "GridSample", case.inputs, {**attrs, "mode": {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)}, 16
    )
    check_case(old)
    check_export(case)


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample_of_volumes(mode: str, padding: str) -> None:
    grid = np.random.default_rng(1).uniform(-1.3, 1.3, (2, 4, 5, 6, 3)).astype(F)
    case = Case("GridSample", [normal(2, 3, 5, 4, 3), grid], {"mode": mode, "padding_mode": padding}, 20)
    check_case(case)
    check_export(case)


@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("size", [(2, 3, 5, 6), (2, 3, 4, 5, 6)])
def test_affine_grid(align: int, size: tuple[int, ...]) -> None:
    rank = len(size) - 2
    theta = normal(2, rank, rank + 1)
    check_case(
        Case("AffineGrid", [theta, np.array(size)], {"align_corners": align}, 20, constants=(1,)), symbolic={0: (0,)}
    )
    case = Case("AffineGrid", [theta, np.array(size)], {"align_corners": align}, 20)
    check_export(case)
    with pytest.raises(ShapeError, match="does not go with theta"):
        import_case(Case("AffineGrid", [theta, np.array(size[:-1])], {}, 20))
    with pytest.raises(ShapeError, match="is not affine"):
        import_case(Case("AffineGrid", [theta[..., :-1], np.array(size)], {}, 20))


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("offset_group", [1, 2])
@pytest.mark.parametrize(("bias", "mask"), [(False, False), (True, True)])
def test_deform_conv(group: int, offset_group: int, bias: bool, mask: bool) -> None:
    x, w = normal(2, 4, 8, 7), normal(6, 4 // group, 3, 2, seed=1)
    attrs = {"group": group, "offset_group": offset_group, "strides": [2, 1], "pads": [1, 0, 1, 1], "dilations": [1, 2]}
    oh, ow = (8 + 2 - 3) // 2 + 1, 7 + 1 - 3 + 1
    operands: list[Array | None] = [x, w, normal(2, offset_group * 12, oh, ow, seed=2) * F(1.5)]
    operands += [normal(6, seed=3) if bias else None, normal(2, offset_group * 6, oh, ow, seed=4) if mask else None]
    while operands[-1] is None:
        operands.pop()
    case = Case("DeformConv", operands, attrs, 19)
    check_case(case)
    check_export(case)


def test_costs() -> None:
    graph = import_case(Case("GridSample", [normal(2, 3, 5, 4), normal(2, 6, 7, 2)], {}, 20))
    assert op_flops(graph, graph.of_kind("GridSample")[0]) == 2 * 4 * 2 * 3 * 6 * 7
    graph = import_case(nms(5, 0.5, None))
    assert op_flops(graph, graph.of_kind("NonMaxSuppression")[0]) == 10 * 40 * 40 * 6


X = normal(2, 3, 9, 8)
ONES = np.ones(6, np.int64)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("NonMaxSuppression", [boxes(2, 5), normal(2, 3, 6)], {}, 11), "numbers of boxes and scores"),
        (Case("NonMaxSuppression", [boxes(1, 5), normal(2, 3, 5)], {}, 11), "batches of boxes and scores"),
        (Case("NonMaxSuppression", [boxes(2, 5)[..., :3], normal(2, 3, 5)], {}, 11), "four coordinates"),
        (
            Case("NonMaxSuppression", [boxes(2, 5), normal(2, 3, 5)], {"center_point_box": 2}, 11),
            "center_point_box is 2",
        ),
        (Case("RoiAlign", [X, ROIS[:, :3], ONES], {}, 16), "need 4 columns"),
        (Case("RoiAlign", [X, ROIS, ONES[:5]], {}, 16), "one batch index per region"),
        (Case("RoiAlign", [X, ROIS, ONES], {"mode": "sum"}, 16), "mode is 'sum'"),
        (Case("RoiAlign", [X, ROIS, ONES], {"output_height": 0}, 16), "RoiAlign to 0 x 1"),
        (
            Case("RoiAlign", [X, ROIS, ONES], {"coordinate_transformation_mode": "x"}, 16),
            "coordinate_transformation_mode",
        ),
        (Case("MaxRoiPool", [X, ROIS], {"pooled_shape": [2, 2]}, 22), "need 5 columns"),
        (
            Case("MaxRoiPool", [X, np.ones((6, 5), np.int64)], {"pooled_shape": [2, 2]}, 22),
            "MaxRoiPool rois are .* they must be floats",
        ),
        (Case("MaxRoiPool", [X, normal(6, 5)], {"pooled_shape": [2]}, 22), "pooled_shape"),
        (Case("GridSample", [X, normal(2, 4, 4, 3)], {}, 20), "a coordinate per spatial axis"),
        (Case("GridSample", [X, normal(1, 4, 4, 2)], {}, 20), "batches"),
        (Case("GridSample", [X, normal(2, 4, 4, 2)], {"mode": "quintic"}, 20), "quintic"),
        (Case("DeformConv", [X, normal(4, 3, 3, 3), normal(2, 17, 7, 6)], {}, 19), "offset .* does not fit"),
        (Case("DeformConv", [X, normal(4, 2, 3, 3), normal(2, 18, 7, 6)], {}, 19), "in 1 groups"),
        (Case("DeformConv", [X, normal(4, 3, 3, 3), normal(2, 36, 7, 6)], {"offset_group": 2}, 19), "do not divide 3"),
    ],
)
def test_operands_that_contradict(case: Case, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        import_case(case)


def test_deform_conv_of_other_ranks_is_refused() -> None:
    with pytest.raises(Unsupported, match="two spatial dimensions"):
        import_case(Case("DeformConv", [normal(2, 3, 9), normal(4, 3, 3), normal(2, 3, 7)], {}, 19))


def test_affine_grid_of_another_batch_is_refused() -> None:
    from optdnn.runtime.reference.grid_sample import affine_grid

    with pytest.raises(ValueError, match="the size is for a batch of 1, theta for one of 2"):
        affine_grid(np.zeros((2, 2, 3), np.float32), np.array([1, 1, 4, 4]))


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("corner", [(-400.0, -200.0), (0.5, 1.5), (-897.0, -0.25), (20.0, 20.0)])
def test_a_huge_region_takes_the_samples_inside_of_the_image(mode: str, corner: tuple[float, float]) -> None:
    """Samples outside of the image count as 0. A region of 3e9 pixels would take all memory otherwise."""
    x, one = np.random.default_rng(0).standard_normal((1, 2, 6, 5)).astype(F), np.zeros(1, np.int64)
    rois = np.array([[*corner, *(c + 900 for c in corner)]], F)
    sizes: dict[str, Any] = {"output_height": 3, "output_width": 3, "mode": mode}
    (got,), (want,) = roi_align(x, rois, one, **sizes), roi_align(x, rois, one, **sizes, sampling_ratio=300)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9)
    (huge,) = roi_align(x, np.array([[0, 0, 3e9, 3e9]], F), one, **sizes)
    assert np.isfinite(huge).all()
