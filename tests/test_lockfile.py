"""Lockfiles: the same bytes again, or the differences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.onnxnet import convnet
from support.small_models import mlp, retrained, save

import optdnn
from optdnn import lockfile
from optdnn.config import BuildOptions
from optdnn.errors import NotMet, OutputError, UsageError
from optdnn.lockfile import code_digest, data_digest, facts_of
from optdnn.runtime.file.format import encode


def contents(engine: optdnn.Engine) -> bytes:
    return b"".join(map(bytes, encode(engine.program)))


def test_a_locked_build_gives_the_same_bytes(tmp_path: Path) -> None:
    model, lock = save(convnet(), tmp_path), tmp_path / "build.lock"
    options: dict[str, Any] = {
        "target": "simulate", "precision": "int8", "calib": {"x": np.random.default_rng(0).random((2, 3, 8, 8), np.float32)},
        "shapes": {"x": "1x3x8x8"}, "precision_map": {"conv2*": "fp32"},
    }  # fmt: skip
    engine = optdnn.build(model, lock=lock, **options)
    assert contents(optdnn.build(model, locked=lock, **options)) == contents(engine)
    written = json.loads(lock.read_text())
    assert written["facts"].keys() == {"model", "options", "versions", "machine", "seeds", "calibration", "gpu"}
    assert written["facts"]["options"]["precision_map"] == {"conv2*": "fp32"}


def test_a_cpu_build_takes_the_times_of_its_lockfile(tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="needs the extra cpu")
    model, lock = save(mlp(), tmp_path), tmp_path / "build.lock"
    engine = optdnn.build(model, target="cpu", lock=lock)
    said: list[str] = []
    again = optdnn.build(model, target="cpu", locked=lock, progress=said.append)
    assert contents(again) == contents(engine)
    assert not [line for line in said if line.startswith(("time ", "compile "))]


def test_facts_that_differ_are_named_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, lock = save(mlp(), tmp_path), tmp_path / "build.lock"
    optdnn.build(model, target="simulate", lock=lock)
    monkeypatch.setattr("optdnn.compiler._imported", None)
    for change, said in (
        ({"opt_level": 2}, "options.opt_level: locked 3, now 2"),
        ({"precision": "fp16"}, 'options.precision: locked "fp32", now "fp16"'),
        ({"target": "reference"}, "gpu.arch"),
    ):
        with pytest.raises(NotMet) as caught:
            optdnn.build(model, locked=lock, **{"target": "simulate", **change})
        assert said.partition(".")[0] in str(caught.value)
        assert said in str(caught.value) or said == "gpu.arch"
    with pytest.raises(NotMet, match="model: locked"):
        optdnn.build(retrained(mlp()), target="simulate", locked=lock)
    monkeypatch.setattr(lockfile, "versions", lambda: {"onnx": "0.1"})
    with pytest.raises(NotMet, match=r'versions.onnx: locked "[\d.]+", now "0.1"'):
        optdnn.build(model, target="simulate", locked=lock)


def test_an_engine_with_other_bytes_is_refused_and_its_parts_named(tmp_path: Path) -> None:
    model, lock = save(mlp(), tmp_path), tmp_path / "build.lock"
    optdnn.build(model, target="reference", lock=lock)
    optdnn.build(model, target="reference", locked=lock, emit_onnx=tmp_path / "same.onnx")
    assert onnx.load(tmp_path / "same.onnx").graph.node
    data = json.loads(lock.read_text())
    data["engine"]["sha256"] = "0" * 64
    data["engine"]["parts"]["meta.passes"] = "other"
    lock.write_text(json.dumps(data))
    with pytest.raises(NotMet, match=r"These parts differ:\n  meta\.passes\n"):
        optdnn.build(model, target="reference", locked=lock, lock=tmp_path / "new.lock", emit_onnx=tmp_path / "o.onnx")
    assert not (tmp_path / "new.lock").exists()
    assert not (tmp_path / "o.onnx").exists()


@pytest.mark.parametrize(
    "text", ["", "{}", '{"format": "optdnn-lock", "version": 2}', '{"format": "optdnn-lock", "version": 1, "facts": 3}']
)
def test_something_else_than_a_lockfile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.lock").write_text(text)
    with pytest.raises(UsageError, match="is not a lockfile"):
        optdnn.build(mlp(), target="reference", locked=tmp_path / "a.lock")


def test_a_lockfile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no lockfile .*a\.lock\n  hint: write it with --lock$"):
        optdnn.build(mlp(), target="reference", locked=tmp_path / "a.lock")


def test_times_that_are_none_are_refused(tmp_path: Path) -> None:
    model, lock = save(mlp(), tmp_path), tmp_path / "build.lock"
    optdnn.build(model, target="reference", lock=lock)
    data = json.loads(lock.read_text())
    data["timings"]["entries"] = {"a": -1}
    lock.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="holds something that is not a time"):
        optdnn.build(model, target="reference", locked=lock)


def test_options_that_contradict(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="take the times of their lockfile"):
        BuildOptions(locked=tmp_path / "a.lock", timing_cache=tmp_path / "t.json")
    with pytest.raises(OutputError):
        optdnn.build(mlp(), target="reference", lock=tmp_path / "absent" / "a.lock")


def test_a_model_is_identified_by_its_contents(tmp_path: Path) -> None:
    """The result is the same for weights in the model and beside it."""
    inside = save(mlp(), tmp_path)
    onnx.save(mlp(), tmp_path / "beside.onnx", save_as_external_data=True, size_threshold=0)
    options = BuildOptions(target="reference")
    assert facts_of(inside, options) == facts_of(tmp_path / "beside.onnx", options) == facts_of(mlp(), options)


def test_calibration_data_is_identified_by_its_contents(tmp_path: Path) -> None:
    array = np.arange(6.0).reshape(2, 3)
    np.savez(tmp_path / "a.npz", x=array)
    assert data_digest(array) == data_digest(array.copy()) != data_digest(array + 1)
    assert data_digest({"x": array}) != data_digest({"y": array})
    assert data_digest([{"x": array}]) == data_digest([{"x": array}])
    assert data_digest(tmp_path / "a.npz") == data_digest(str(tmp_path / "a.npz"))
    before = data_digest(tmp_path)
    (tmp_path / "b.npz").write_bytes(b"")
    assert data_digest(tmp_path) != before
    with pytest.raises(UsageError, match="cannot be read"):
        data_digest(tmp_path / "absent.npz")

    def once() -> Iterator[Any]:
        yield {"x": array}

    with pytest.raises(UsageError, match="cannot record calibration data of type generator"):
        data_digest(once())


def test_the_code_has_one_digest() -> None:
    assert code_digest() == code_digest.__wrapped__()
