"""``--streams``, and where lanes are shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.net import Net

from optdnn.cli.bench_tables import show_gpu_steps
from optdnn.ir.export_onnx import export_model
from optdnn.lowering import lanes as lanes


@pytest.fixture
def branchy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A network of two branches. Joins cost nothing here, so that even these branches pay as lanes."""
    monkeypatch.setattr(lanes, "JOIN", 0.0)
    n = Net()
    x = n.op("Relu", n.conv(n.input(1, 8, 10, 10), 8, 3))
    a = n.conv(n.op("Relu", n.conv(x, 8, 3)), 8, 3)
    b = n.conv(n.op("Relu", n.conv(x, 16, 5, pads=2)), 8, 1, pads=0)
    export_model(n.done(n.op("Mul", a, b))).save(tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_inspect_shows_the_lane_of_each_step(cli: Any, branchy: Path, tmp_path: Path) -> None:
    for streams, count in (("4", 2), ("1", 1), ("auto", 2)):
        out = tmp_path / f"{streams}.engine"
        assert cli("build", branchy, "-o", out, "--target", "simulate", "--streams", streams).code == 0
        facts = json.loads(cli("inspect", out, "--json").out)
        assert len({s.get("lane", 0) for s in facts["steps"]}) == count
        shown = cli("inspect", out).out
        assert ("waits for" in shown) == (count > 1)
        assert ("2 lanes" in shown) == (count > 1)
        assert facts["options"].get("streams", "auto") == (int(streams) if streams.isdigit() else "auto")
    assert any(s["after"] for s in json.loads(cli("inspect", tmp_path / "4.engine", "--json").out)["steps"])


def test_streams_that_make_no_sense(cli: Any, branchy: Path, tmp_path: Path) -> None:
    code, _, said = cli("build", branchy, "-o", tmp_path / "e", "--target", "simulate", "--streams", "0")
    assert code == 2
    assert "streams must be auto or a number from 1 to 8, not '0'" in said


def test_a_profile_has_a_column_of_lanes_where_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    step = {
        "step": 0,
        "us": 1.5,
        "share": 0.5,
        "tflops": 1.0,
        "flops": 1,
        "gbs": 2.0,
        "roofline": 0.1,
        "tactic": "t",
        "src": [],
    }
    show_gpu_steps([step])
    assert "lane" not in capsys.readouterr().out
    show_gpu_steps([{**step, "lane": 3}, {**step, "lane": 0}])
    assert "lane" in capsys.readouterr().out
