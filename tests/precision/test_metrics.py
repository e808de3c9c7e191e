"""Metrics of automatic precision: definitions of the drop, its unit, and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from optdnn.errors import OptdnnError, RunError, UsageError
from optdnn.precision.metrics import metric_of
from optdnn.types import Array

LABELS = np.array([0, 1, 2, 1])


def scores(*classes: int) -> dict[str, Array]:
    return {"y": np.eye(3, dtype=np.float32)[list(classes)]}


def test_top1_with_labels_is_accuracy_in_points() -> None:
    metric = metric_of("top1", LABELS)
    right, one_wrong = scores(0, 1, 2, 1), scores(0, 1, 2, 0)
    assert metric.drop(one_wrong, right, LABELS) == 25.0
    assert metric.drop(right, one_wrong, LABELS) == -25.0  # a gain
    assert metric.unit == "points of top-1 accuracy"
    assert metric.bound(None) == 0.5


def test_labels_and_scores_may_have_axes_of_one() -> None:
    """A classifier that ends in a convolution gives (samples, classes, 1, 1); labels of (samples, 1) are one each."""
    right = {"y": scores(0, 1, 2, 1)["y"][:, :, None, None]}
    wrong = {"y": scores(0, 1, 2, 0)["y"][:, :, None, None]}
    for labels in (LABELS, LABELS[:, None]):
        assert metric_of("top1", labels).drop(wrong, right, labels) == 25.0


def test_top1_without_labels_is_agreement_with_fp32() -> None:
    metric = metric_of("top1", None)
    assert metric.drop(scores(0, 1, 2, 0), scores(0, 1, 2, 1), None) == 25.0
    assert "no labels" in metric.unit


def test_a_sample_with_nan_is_never_right() -> None:
    bad = scores(0, 1, 2, 1)
    bad["y"][0, 2] = np.nan
    assert metric_of("top1", LABELS).drop(bad, scores(0, 1, 2, 1), LABELS) == 25.0


def test_top1_counts_every_pixel_of_a_segmentation() -> None:
    y = np.zeros((2, 3, 4, 4), np.float32)
    y[:, 1] = 1
    labels = np.full((2, 4, 4), 1)
    labels[0, 0, 0] = 2
    right = y.copy()
    right[0, 2, 0, 0] = 2
    assert metric_of("top1", labels).drop({"y": y}, {"y": right}, labels) == pytest.approx(100 / 32)


def test_mse_and_cosine_are_zero_for_the_same_and_grow() -> None:
    y = {"y": np.arange(6, dtype=np.float32).reshape(2, 3)}
    off = {"y": y["y"] + 2}
    assert metric_of("mse", None).drop(y, y, None) == 0.0
    assert metric_of("mse", None).drop(off, y, None) == 4.0
    cosine = metric_of("cosine", None)
    assert cosine.drop(y, y, None) == pytest.approx(0.0, abs=1e-12)
    a, b = y["y"][0].astype(np.float64), off["y"][0].astype(np.float64)
    want = [1 - float(p @ q / np.sqrt((p @ p) * (q @ q))) for p, q in zip(y["y"], off["y"], strict=True)]
    assert cosine.drop(off, y, None) == pytest.approx(np.mean(want), abs=1e-6)
    assert a @ b > 0
    assert cosine.bound(None) == 1e-3


@pytest.mark.parametrize("name", ["mse", "cosine"])
def test_infinite_losses_exceed_every_bound(name: str) -> None:
    y = {"y": np.ones((2, 3), np.float32)}
    bad = {"y": np.array([[1, 1, np.nan], [1, 1, np.inf]], np.float32)}
    assert metric_of(name, None).drop(bad, y, None) >= 1.0


def test_metrics_without_a_usual_bound_want_one() -> None:
    with pytest.raises(UsageError, match="no usual bound") as error:
        metric_of("mse", None).bound(None)
    assert "squared units" in (error.value.hint or "")
    assert metric_of("mse", None).bound(0.25) == 0.25
    with pytest.raises(UsageError, match="0 or more"):
        metric_of("top1", None).bound(-1.0)


def test_a_function_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_metric_a.py").write_text("def score(outputs, labels):\n    return float(outputs['y'].sum())\n")
    monkeypatch.chdir(tmp_path)
    metric = metric_of("my_metric_a:score", None)
    assert metric.drop({"y": np.ones(3)}, {"y": np.ones(5)}, None) == 2.0
    assert "my_metric_a:score" in metric.unit
    assert metric_of(lambda y, labels: 1.0, None).drop({}, {}, None) == 0.0


def raises(outputs: object, labels: object) -> float:
    raise KeyError("boxes")


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ("f1", UsageError, "not one of top1, mse, cosine"),
        ("no_such_module_x:f", UsageError, "cannot be imported: ModuleNotFoundError"),
        ("math:no_such", UsageError, "cannot be imported: AttributeError"),
        ("math:pi", UsageError, "not a function"),
        (raises, RunError, "the metric raises raised KeyError"),
        (lambda y, labels: float("nan"), RunError, "gave NaN"),
        (lambda y, labels: "high", RunError, "raised ValueError"),
    ],
)
def test_metrics_that_fail(given: object, kind: type[OptdnnError], message: str) -> None:
    with pytest.raises(kind, match=message):
        metric_of(given, None).drop(scores(0), scores(0), None)  # type: ignore[arg-type]


def test_labels_and_outputs_that_top1_cannot_read() -> None:
    with pytest.raises(UsageError, match="integer labels"):
        metric_of("top1", np.ones(3)).drop(scores(0, 1, 2), scores(0, 1, 2), np.ones(3))
    with pytest.raises(UsageError, match=r"a label for each of \[3\] predictions; here labels are \[3, 2\]"):
        metric_of("top1", LABELS).drop(scores(0, 1, 2), scores(0, 1, 2), np.zeros((3, 2), int))
    with pytest.raises(UsageError, match="shape"):
        metric_of("top1", None).drop({"y": np.ones(3)}, {"y": np.ones(3)}, None)
    with pytest.raises(UsageError, match="floating-point output"):
        metric_of("top1", None).drop({"y": np.ones((2, 2), int)}, {"y": np.ones((2, 2), int)}, None)
