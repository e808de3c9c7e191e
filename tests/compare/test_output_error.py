"""The error of an engine compared with its model: figures, inputs, and the reason if it is not known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from support.onnxnet import save_convnet

import optdnn
import optdnn.compare.output_error as subject
from optdnn.compare.output_error import output_error
from optdnn.config import BuildOptions
from optdnn.errors import RunError
from optdnn.runtime.engine import Engine

OPTIONS = BuildOptions(target="reference")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_convnet(tmp_path_factory.mktemp("model") / "net.onnx", batch="N")


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return optdnn.build(model, target="reference")


class Wrong:
    """An engine with changed outputs."""

    def __init__(self, engine: Engine, change: object):
        self.engine, self.change = engine, change

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    def run(self, feeds: object) -> object:
        return {n: self.change(a) for n, a in self.engine.run(feeds).items()}  # type: ignore[operator,arg-type]


def test_a_right_engine_is_near_its_model(engine: Engine, model: Path) -> None:
    found = output_error(engine, model, OPTIONS)
    assert found.max_rel_err is not None
    assert found.input_difference is not None
    assert 0 < found.max_rel_err < 1e-5 < found.input_difference
    assert (found.same_top, found.rows, found.inputs_from) == (1.0, 1, "random inputs, seed 0")
    assert (found.undefined, found.undefined_weights) == ((), ())


def test_a_wrong_one_is_reported(engine: Engine, model: Path) -> None:
    doubled = output_error(Wrong(engine, lambda a: 2 * a), model, OPTIONS)  # type: ignore[arg-type]
    assert doubled.max_rel_err == pytest.approx(1, rel=1e-4)
    assert doubled.rms_rel_err == pytest.approx(1, rel=1e-4)
    turned = output_error(Wrong(engine, lambda a: -a), model, OPTIONS)  # type: ignore[arg-type]
    assert turned.same_top == 0
    broken = output_error(Wrong(engine, lambda a: a * np.nan), model, OPTIONS).to_plain()  # type: ignore[arg-type]
    assert broken["max_rel_err"] is None


def test_a_model_that_gives_nan_is_named(tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["": 21]>
    net (float[2] x) => (float[2] y, float[2] z, int64[2] n) {
        below = Constant<value = float[2] {-1, -1}>()
        y = Log(below)
        z = Add(x, x)
        n = Cast<to = 7>(x)
    }
    """
    path = tmp_path / "nan.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    found = output_error(optdnn.build(path, target="reference"), path, OPTIONS)
    assert (found.max_rel_err, found.undefined, found.undefined_weights) == (0, ("y",), ())
    check = next(c for c in optdnn.verify(optdnn.build(path, target="reference"), path).checks if c.name == "model")
    assert (check.status, check.text.split("; ")[-1]) == ("passed", "the model itself gives NaN in y")


def test_calibration_data_comes_before_random_inputs(engine: Engine, model: Path) -> None:
    x = np.random.default_rng(0).standard_normal((6, 3, 8, 8)).astype(np.float32)
    found = output_error(engine, model, BuildOptions(target="cpu", precision="int8", calib={"x": x}))
    assert (found.rows, found.inputs_from) == (6, "the first batch of the calibration data")


def test_a_model_that_is_much_for_numpy_is_left(engine: Engine, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "MOST_FLOPS", 1000)
    with pytest.raises(RunError, match="GFLOP, too many to evaluate it in NumPy"):
        output_error(engine, model, OPTIONS)
