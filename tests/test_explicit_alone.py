"""Each quantized operator of ONNX Runtime's quantizer, alone, within one step of its last scale: on every target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from optdnn.compiler import build_verbose
from optdnn.config import BuildOptions
from optdnn.types import Array, is_float

pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")
pytest.importorskip("openvino", reason="the cpu extra is not installed")
quantizer = pytest.importorskip("support.quantizer")

FORMS = {
    "QDQ, uint8 and int8 per channel": ("QDQ", "QUInt8 QInt8", {}),
    "QDQ, symmetric int8": ("QDQ", "QInt8 QInt8", {"ActivationSymmetric": True}),
    "QDQ, uint8, weights with zero points": ("QDQ", "QUInt8 QUInt8", {}),
    "QLinear operators": ("QOperator", "QUInt8 QInt8", {}),
}
TARGETS = (("cpu", "openvino"), ("cpu", "onnxruntime"), ("reference", "auto"), ("simulate", "auto"))


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from onnxruntime.quantization.shape_inference import quant_pre_process

    folder = tmp_path_factory.mktemp("quantizer")
    onnx.save(quantizer.many_operators(), folder / "float.onnx")
    quant_pre_process(str(folder / "float.onnx"), str(folder / "clean.onnx"), skip_symbolic_shape=True)
    return folder / "clean.onnx"


def steps(got: Array, want: Array) -> float:
    """The largest difference in steps of integers; of floats, in steps of 255 over their range."""
    step = np.ptp(want.astype(np.float64)) / 255 if is_float(want.dtype) else 1.0
    return float(np.abs(got.astype(np.float64) - want.astype(np.float64)).max() / step)


@pytest.mark.parametrize("form", FORMS)
def test_each_operator_is_within_a_step(form: str, clean: Path) -> None:
    rng = np.random.default_rng(1)
    feeds = [{"x": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)} for _ in range(4)]
    layout, types, extra = FORMS[form]
    written = quantizer.quantize(clean, clean.with_name("quantized.onnx"), feeds, layout, types, **extra)
    model = onnx.load(written)
    parts, given, want = quantizer.side_by_side(model, quantizer.values_of(model, feeds[0]))
    assert len(want) >= 17
    for target, tactics in TARGETS:
        options = BuildOptions(target=target, tactics=tactics, threads=1 if target == "cpu" else None)
        got = build_verbose(parts, options).engine.run(given)
        far = {n: steps(got[n], want[n]) for n in want}
        assert {n: s for n, s in far.items() if s > 1.0001} == {}, (target, tactics)
        assert [got[n].dtype for n in want] == [want[n].dtype for n in want], (target, tactics)


def test_a_result_two_steps_away_is_seen() -> None:
    want = np.array([1, 2, 3], np.int8)
    assert steps(want + np.int8(2), want) == 2.0
    assert steps(want * np.float32(1.01), want.astype(np.float32)) > 1
