"""compare --layers and --bisect between two engines: other precisions, other targets; histograms of errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.needs import needs_libraries
from support.onnxnet import save_convnet

import optdnn
from optdnn.compare.comparison import findings_of
from optdnn.compare.divergence import DECADES, Findings, histogram, tolerance_of
from optdnn.compare.subject import load_subject
from optdnn.errors import UsageError
from optdnn.report.words import histogram_text

needs_libraries()

X = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("engines")
    model = save_convnet(found / "net.onnx", batch=2)
    optdnn.build(model, target="reference").save(found / "ref.engine")
    optdnn.build(model, target="simulate", precision="fp16").save(found / "half.engine")
    cpu: dict[str, Any] = {"target": "cpu", "tactics": "openvino", "threads": 1}
    optdnn.build(model, **cpu, precision="int8", calib={"x": X}, calibrator="minmax").save(found / "int8.engine")
    return found


def between(folder: Path, one: str, other: str | None, **data: Any) -> Findings:
    subject = load_subject(folder / one, folder / "net.onnx", 1, **data)
    return findings_of(subject, {"x": X}, None, lambda text: None, None if other is None else folder / other)


def test_two_targets_are_compared_value_by_value_in_onnx_names(folder: Path) -> None:
    found = between(folder, "half.engine", "ref.engine")
    assert [d.node for d in found.divergences][:2] == ["bn1 + conv1 + relu1", "add + bn2 + conv2 + relu2"]
    assert found.other == "ref.engine"
    for d in found.divergences:
        assert d.between_rel_err is not None
        assert d.other_rel_err is not None
        assert 1e-5 < d.between_rel_err < 1e-2  # half precision of one engine
        assert d.other_rel_err < 1e-5
        assert d.between_rel_err == pytest.approx(d.max_rel_err, rel=0.1)
        assert sum(d.histogram) == int(np.prod(d.shape))
    distances = [d.distance for d in found.worst_first]
    assert distances == sorted(distances, reverse=True)
    assert found.first is None
    plain = found.to_plain()
    assert plain["layers_against"] == "ref.engine"
    assert json.loads(json.dumps(plain)) == plain


@pytest.mark.slow
def test_an_int8_engine_needs_its_calibration_data_to_look_inside(folder: Path) -> None:
    with pytest.raises(UsageError, match="built with calibration data"):
        between(folder, "int8.engine", None)
    found = between(folder, "int8.engine", None, calib={"x": X}, calibrator="minmax")
    assert 1e-3 < max(d.max_rel_err for d in found.divergences) < 0.25
    assert found.first is None
    with pytest.raises(UsageError, match="calibration data is not the same"):
        between(folder, "int8.engine", None, calib={"x": 3 * X}, calibrator="minmax")


@pytest.mark.slow
def test_pictures_are_prepared_as_for_the_build(folder: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
    for k, picture in enumerate(np.random.default_rng(1).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)):
        image.fromarray(picture).save(tmp_path / f"{k}.png")
    data = {
        "calib": tmp_path,
        "calibrator": "minmax",
        "images": '{"resize": null, "crop": null, "mean": [0], "std": [1]}',
    }
    cpu: dict[str, Any] = {"target": "cpu", "tactics": "openvino", "threads": 1, "precision": "int8"}
    optdnn.build(folder / "net.onnx", **cpu, **data).save(folder / "pictures.engine")
    assert between(folder, "pictures.engine", None, **data).divergences
    with pytest.raises(UsageError, match="calibration data is not the same"):
        between(folder, "pictures.engine", None, **data | {"images": '{"resize": null, "crop": null}'})


def test_the_first_node_beyond_the_tolerance_is_between_the_engines(folder: Path) -> None:
    subject = load_subject(folder / "half.engine", folder / "net.onnx", 1)
    found = findings_of(subject, {"x": X}, 1e-6, lambda text: None, folder / "ref.engine")
    assert found.first is not None
    assert found.first.node == "bn1 + conv1 + relu1"


def test_histograms_count_every_element_by_decade() -> None:
    want = np.array([1.0, 1.0, 1.0, 1.0, -10.0])
    got = want + np.array([0.0, 5e-6, 0.02, np.nan, 20.0])
    counts = histogram(got, want)
    assert len(counts) == len(DECADES) + 1
    assert sum(counts) == 5
    assert counts[0] == 1  # exact
    assert counts[DECADES.index(-7) + 1] == 1  # 5e-6 of 10
    assert counts[DECADES.index(-3) + 1] == 1  # 0.02 of 10
    assert counts[-1] == 2  # twice as large as the largest, and not finite
    assert histogram(want, want[:2]) == ()
    assert histogram_text([0, 100_000, 1]) == " █▁"


@pytest.mark.parametrize(
    ("precision", "limit"), [("fp32", 1e-4), ("int8+bf16", 0.25), ("bf16+fp32", 0.1), ("auto", 1e-4)]
)
def test_a_mixture_has_the_tolerance_of_its_coarsest(precision: str, limit: float) -> None:
    assert tolerance_of(precision) == limit
