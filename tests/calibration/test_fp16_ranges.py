"""fp16 builds with calibration data: operators whose values leave fp16's range on the data stay fp32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import optdnn
from optdnn.cli.main import run
from optdnn.errors import InputError
from optdnn.passes.support import trial
from optdnn.runtime.file.format import encode
from optdnn.types import Array

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _too_large_for_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRIAL_FLOPS", 0.0)


def large(rows: int | str = 4) -> onnx.ModelProto:
    """Two products; the first one's results exceed 65504, those of the second one do not."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], "up"), helper.make_node("MatMul", ["h", "v"], ["y"], "down")]
    weights = {
        name: (RNG.standard_normal((32, 32)) * size).astype(np.float32) for name, size in (("w", 9e3), ("v", 1e-6))
    }
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (rows, 32)) for name in "xy"]
    graph = helper.make_graph(
        nodes, "g", ports[:1], ports[1:], [numpy_helper.from_array(a, n) for n, a in weights.items()]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def samples(rows: int = 4) -> Array:
    return RNG.standard_normal((rows, 32)).astype(np.float32)


def error(engine: optdnn.Engine, model: onnx.ModelProto, x: Array) -> float:
    want = optdnn.build(model, target="reference", shapes={"x": x.shape}).run({"x": x})["y"]
    return float(np.abs(engine.run({"x": x})["y"] - want).max() / np.abs(want).max())


def test_data_keep_a_network_finite() -> None:
    model, x = large(), samples()
    plain = optdnn.build(model, target="simulate", precision="fp16")
    assert not np.isfinite(plain.run({"x": x})["y"]).all()
    engine = optdnn.build(model, target="simulate", precision="fp16", calib={"x": samples(8)})
    assert error(engine, model, x) < 2e-3
    kept = {node for row in engine.meta["precision"]["differs"] for node in row["nodes"]}
    assert kept == {"up", "down"}


def test_values_that_are_not_finite_are_left_out() -> None:
    """As in networks that select among quotients: 0 / 0 is no reason to refuse the data."""
    model, data = large(), samples()
    data[0, 0] = 0.0
    model.graph.node.append(helper.make_node("Div", ["x", "x"], ["q"]))
    model.graph.output.append(helper.make_tensor_value_info("q", TensorProto.FLOAT, (4, 32)))
    engine = optdnn.build(model, target="simulate", precision="fp16", calib={"x": data})
    assert error(engine, model, samples()) < 2e-3


def test_int8_takes_no_ranges_of_fp16_from_a_cache(tmp_path: Path) -> None:
    """Constant data are no error for fp16. They are one for int8, also after a build in fp16."""
    options = {
        "target": "simulate",
        "calib": {"x": np.ones((8, 32), np.float32)},
        "calib_cache": tmp_path / "cache.json",
    }
    optdnn.build(large(), precision="fp16", **options)
    with pytest.raises(InputError, match="every element is the same"):
        optdnn.build(large(), precision="int8", calibrator="minmax", **options)


def test_other_sizes_use_the_ranges_of_the_first() -> None:
    model = large("n")
    engine = optdnn.build(
        model, target="simulate", precision="fp16", calib={"x": samples(8)}, shapes={"x": "1..4..8x32"}
    )
    for rows in (1, 4, 7):
        assert error(engine, model, samples(rows)) < 2e-3


def test_a_refit_without_data_uses_the_ranges_of_the_build() -> None:
    engine = optdnn.build(large(), target="simulate", precision="fp16", calib={"x": samples(8)}, refit=True)
    before = [bytes(part) for part in encode(engine.program)]
    engine.refit()
    assert [bytes(part) for part in encode(engine.program)] == before


@pytest.mark.slow
def test_a_look_inside_needs_the_data_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, engine, data = (str(tmp_path / name) for name in ("m.onnx", "e", "data.npz"))
    onnx.save(large(), model)
    np.savez(data, x=samples(8))
    assert run(["build", model, "--target", "simulate", "--precision", "fp16", "--calib", data, "-o", engine]) == 0
    look = ["compare", engine, "--model", model, "--layers", "--json", "--duration", "0.05"]
    capsys.readouterr()
    assert run(look) != 0
    assert "--calib" in capsys.readouterr().out
    assert run([*look, "--calib", data]) == 0
    assert json.loads(capsys.readouterr().out)


def test_a_build_without_data_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(large(), tmp_path / "m.onnx")
    made = ["build", str(tmp_path / "m.onnx"), "--target", "simulate", "-o", str(tmp_path / "e"), "--precision"]
    assert run([*made, "fp16"]) == 0
    assert "with samples (--calib DATA), a build keeps such operators in fp32" in capsys.readouterr().out
    assert run([*made, "bf16"]) == 0
    assert "--calib" not in capsys.readouterr().out
