"""The shipped trained networks: files, held-out data and the claimed accuracy."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from optdnn.errors import UsageError
from optdnn.models import trained


@pytest.mark.parametrize("name", trained.NAMES)
def test_accuracy_is_the_one_claimed(name: str) -> None:
    path, x, y, accuracy = trained.load(name)
    assert x.dtype == np.float32
    assert y.dtype == np.int64
    assert len(x) == len(y) == (150 if name == "digits_segment" else 450)
    assert 0 <= x.min() < x.max() <= 1
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    logits = session.run(["logits"], {"x": x})[0]
    measured = float((logits.argmax(1) == y).mean())
    assert measured == pytest.approx(accuracy, abs=1e-9)
    assert measured > 0.96
    assert trained.manifest()[name]["right"] == round(accuracy * y.size)


@pytest.mark.parametrize("name", trained.NAMES)
def test_file_is_small_valid_and_built_by_us(name: str) -> None:
    path = trained.load(name).path
    assert path.stat().st_size < 600_000
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert model.producer_name == "optdnn.models"
    assert all(n.name for n in model.graph.node)
    assert [i.name for i in model.graph.input] == ["x"]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"


def test_every_network_is_shipped() -> None:
    assert set(trained.NAMES) == set(trained.manifest())


def test_normalization_is_still_separate() -> None:
    counts = {name: Counter(n.op_type for n in onnx.load(trained.load(name).path).graph.node) for name in trained.NAMES}
    assert (counts["digits_resnet"]["Conv"], counts["digits_resnet"]["BatchNormalization"]) == (10, 10)
    assert (counts["digits_mobile"]["Conv"], counts["digits_mobile"]["BatchNormalization"]) == (16, 10)
    assert counts["digits_gru"]["GRU"] == 1


def test_the_transformers_normalizations_have_outliers() -> None:
    """With one scale per tensor, weak channels lose most. SmoothQuant helps against this."""
    model = onnx.load(trained.load("digits_transformer").path)
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    norms = [n for n in model.graph.node if n.op_type == "LayerNormalization"]
    assert len(norms) == 7
    ratios = [np.abs(weights[n.input[1]]).max() / np.abs(weights[n.input[1]]).min() for n in norms[:-1]]
    assert min(ratios) > 8


def test_scenes_hold_several_digits_and_empty_space() -> None:
    found = trained.load("digits_segment")
    assert found.y.shape == (150, 24, 24)
    assert set(np.unique(found.y)) == set(range(11))
    assert 0.05 < (found.y > 0).mean() < 0.4
    assert (found.x[:, 0][found.y > 0] >= 4 / 16).all()
    assert trained.manifest()["digits_segment"]["mean_iou"] > 0.9
    held_out = {picture.tobytes() for picture in found.x}
    assert not held_out & {picture.tobytes() for picture in trained.calibration("digits_segment")}


def test_mobile_network_has_the_ranges_that_make_it_hard() -> None:
    """With one scale per tensor, the weakest channels of a depthwise weight would round to zero."""
    model = onnx.load(trained.load("digits_mobile").path)
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    makers = {n.output[0]: n for n in model.graph.node}
    ratios = []
    for norm in (n for n in model.graph.node if n.op_type == "BatchNormalization"):
        conv = makers[norm.input[0]]
        if next(a.i for a in conv.attribute if a.name == "group") > 1:
            factor = weights[norm.input[1]] / np.sqrt(weights[norm.input[4]] + 1e-5)
            ranges = np.abs(weights[conv.input[1]] * factor[:, None, None, None]).max((1, 2, 3))
            ratios.append(ranges.max() / ranges.min())
    assert len(ratios) == 3
    assert min(ratios) > 100


@pytest.mark.slow
def test_split_is_scikit_learns_and_calibration_is_not_held_out() -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    digits = datasets.load_digits()
    known = {
        image.tobytes(): int(label)
        for image, label in zip((digits.images / 16).astype(np.float32), digits.target, strict=True)
    }
    _, x, y, _ = trained.load("digits_gru")
    held_out = [image.tobytes() for image in x]
    assert [known[image] for image in held_out] == list(y)
    calibration = {image.tobytes() for image in trained.calibration("digits_gru")}
    assert len(calibration) > 200
    assert calibration <= set(known)
    assert not calibration & set(held_out)


def test_shapes_follow_the_networks_inputs() -> None:
    assert trained.load("digits_resnet").x.shape[1:] == trained.calibration("digits_mobile").shape[1:] == (1, 8, 8)
    assert trained.load("digits_gru").x.shape[1:] == (8, 8)


def test_unknown_name_is_refused() -> None:
    for ask in (trained.load, trained.calibration):
        with pytest.raises(UsageError, match="no trained network 'digits'"):
            ask("digits")


def test_loading_needs_neither_onnx_nor_torch() -> None:
    code = """import sys; from optdnn.models import trained; trained.load('digits_gru')
sys.exit('onnx' in sys.modules or 'torch' in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_language_model_is_small_and_has_the_claimed_accuracy() -> None:
    found = trained.language()
    assert found.path.stat().st_size + found.tokenizer.stat().st_size < 1_000_000
    model = onnx.load(found.path)
    embedding = max((t.dims[0], t.name) for t in model.graph.initializer if len(t.dims) == 2)
    assert found.facts["vocabulary"] == embedding[0]
    assert found.facts["next_token"] > 0.4


def test_the_language_model_continues_text() -> None:
    """The share of right next tokens for a held-out topic."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra text is not installed")
    from pydoc_data.topics import topics

    found = trained.language()
    codes = tokenizers.Tokenizer.from_file(str(found.tokenizer))
    text = [t.strip() for _, t in sorted(topics.items())][7]
    tokens = np.array(codes.encode(text).ids[: found.facts["positions"]], np.int64)
    session = onnxruntime.InferenceSession(found.path, providers=["CPUExecutionProvider"])
    feeds = {"input_ids": tokens[None], "attention_mask": np.ones((1, len(tokens)), np.int64)}
    caches = {p.name: np.zeros((1, *p.shape[1:2], 0, p.shape[3]), np.float32) for p in session.get_inputs()[2:]}
    logits = session.run(["logits"], feeds | caches)[0][0]
    assert (logits[:-1].argmax(1) == tokens[1:]).mean() > 0.3
