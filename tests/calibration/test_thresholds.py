"""Ranges: equal to those of ONNX Runtime's quantizer on the same data, and plausible for every method."""

from __future__ import annotations

import numpy as np
import pytest

from optdnn.calibration.thresholds import Histogram, entropy, mse, percentile
from optdnn.passes.support.ranges import Range, integer_parameters
from optdnn.types import Array

BINS = 512
DATA = {
    "normal": lambda rng: rng.standard_normal(20_000),
    "relu": lambda rng: np.maximum(rng.standard_normal(20_000), 0),
    "heavy tail": lambda rng: rng.standard_t(2.5, 20_000),
    "shifted": lambda rng: rng.standard_normal(20_000) * 0.1 + 3,
    "sparse": lambda rng: np.where(rng.random(20_000) < 0.99, 0, rng.standard_normal(20_000) * 8),
}


def sample(name: str) -> Array:
    return np.asarray(DATA[name](np.random.default_rng(3)), np.float32)


def histogram(x: Array, bins: int = BINS) -> Histogram:
    top = np.abs(x).max()
    counts, edges = np.histogram(x, bins, range=(-top, top))
    return Histogram(counts, edges, float(x.min()), float(x.max()))


def theirs(x: Array, method: str) -> Range:
    calibrate = pytest.importorskip("onnxruntime.quantization.calibrate", reason="the cpu extra is not installed")
    collector = calibrate.HistogramCollector(method, False, BINS, 128, 99.9, "same")
    collector.collect({"x": x})
    low, high = collector.compute_collection_result()["x"][:2]
    return Range(float(low), float(high))


@pytest.mark.parametrize("method", ["percentile", "entropy"])
@pytest.mark.parametrize("name", DATA)
def test_scales_agree_with_onnx_runtime(name: str, method: str) -> None:
    x = sample(name)
    h = histogram(x)
    ours, zero = integer_parameters(percentile(h, 99.9) if method == "percentile" else entropy(h))
    wanted, wanted_zero = _their_parameters(theirs(x, method))
    assert float(ours) == pytest.approx(wanted, rel=1e-5)
    assert int(zero) == wanted_zero


def _their_parameters(r: Range) -> tuple[float, int]:
    from onnxruntime.quantization.quant_utils import compute_scale_zp

    bounds = [np.asarray(v, np.float32) for v in (r.low, r.high)]
    zero, scale = compute_scale_zp(*bounds, np.asarray(0, np.uint8), np.asarray(255, np.uint8), False)
    return float(scale), int(zero)


def test_outliers_are_cut_off() -> None:
    x = sample("normal")
    x[7] = 500.0
    h = histogram(x, bins=8192)
    for chosen in (percentile(h, 99.9), entropy(h)):
        assert 2 < chosen.high < 60
    assert percentile(h, 100.0).high == pytest.approx(500, rel=1e-3)


@pytest.mark.parametrize("name", ["heavy tail", "normal", "relu"])
def test_mse_finds_the_least_error(name: str) -> None:
    x = sample(name)

    def error(r: Range) -> float:
        scale, zero = integer_parameters(r)
        q = np.clip(np.rint(x / scale) + int(zero), 0, 255)
        return float(np.square((q - int(zero)) * scale - x).mean())

    low, high = float(x.min()), float(x.max())
    best = min(error(Range(low * part, high * part)) for part in np.linspace(0.05, 1.0, 60))
    assert error(mse(histogram(x, bins=2048))) <= best * 1.05
    if name == "heavy tail":
        assert best < error(Range(low, high)) * 0.97


def test_all_in_one_bin() -> None:
    x = np.full(100, 2.0, np.float32)
    h = histogram(x)
    for chosen in (percentile(h), entropy(h), mse(h)):
        assert np.isfinite([chosen.low, chosen.high]).all()
        assert chosen.high <= 2.0
