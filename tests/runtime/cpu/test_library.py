"""Actions of CPU libraries besides running a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from optdnn.runtime.cpu.library import library_module

RUN = """
from optdnn.models import trained
from optdnn.runtime.cpu.library import library_module
path, x, *_ = trained.load("digits_mobile")
library_module("onnxruntime").InferenceSession(str(path)).run(None, {"x": x[:1]})
"""


def test_onnxruntime_reports_nothing_to_its_maker(tmp_path: Path) -> None:
    """With telemetry, the library first writes a machine identifier and a database of events into the home folder."""
    pytest.importorskip("onnxruntime")
    free = {name: value for name, value in os.environ.items() if name not in ("CI", "ORT_DISABLE_TELEMETRY")}
    free |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", RUN], env=free, check=True)
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == []


@pytest.mark.slow
def test_openvino_reports_nothing_to_its_maker(tmp_path: Path) -> None:
    """With telemetry, the library first writes a machine identifier into the home folder."""
    pytest.importorskip("openvino")
    pytest.importorskip("openvino_telemetry")
    free = {name: value for name, value in os.environ.items() if name != "CI"}
    free |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    for made in (
        "from optdnn.runtime.cpu.library import library_module as m; m('openvino').Core(); import openvino_telemetry",
        "from optdnn.runtime.racing.candidates import _library as m; m('openvino').Core()",
    ):
        subprocess.run([sys.executable, "-c", made], env=free, check=True)
        assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == []


def test_the_environments_setting_of_telemetry_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "0")
    library_module("json")
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "0"
