"""``python -m benchmarks random``: its plan, resuming, ending, merging, and the summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("benchmarks.harness", reason="an installed copy has no benchmarks")

from benchmarks.kinds import random as command


def ran(out: Path, *args: str) -> tuple[int, dict[str, Any]]:
    code = command.main(["--jobs", "1", "--family", "recurrent", "--out", str(out), *args])
    return code, json.loads(Path(f"{out}.summary.json").read_text())


@pytest.mark.slow
def test_a_run_resumes_ends_and_merges(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    settings = ("--settings", "reference fp32,simulate fp16")
    code, found = ran(one, *settings, "--seeds", "0:2", "--budget", "1e-9")
    assert (code, found["trials"], found["left"]) == (0, 0, 4)
    code, found = ran(one, *settings, "--seeds", "0:1")
    assert (code, found["trials"], found["left"]) == (0, 2, 0)
    assert set(found["counts"]) == {"reference fp32", "simulate fp16"}
    code, found = ran(one, *settings, "--seeds", "0:1")
    assert (found["trials"], found["trials_per_second"]) == (2, 0.0)
    code, found = ran(two, *settings, "--seeds", "1:2", "--merge", str(one))
    assert (found["trials"], len(two.read_text().splitlines())) == (4, 3), "the facts of the run, and two trials"


def test_the_processors_settings() -> None:
    asked = command.parser().parse_args(["--settings", "processor", "--out", "x"])
    assert [" ".join(filter(None, s)) for s in command.settings(asked)] == list(command.PROCESSOR)
    assert len(command.PROCESSOR) == 7


def row(name: str, verdict: str, detail: str) -> dict[str, Any]:
    return {"name": name, "setting": "cpu fp32", "family": "conv", "verdict": verdict, "detail": detail}


def test_the_summary_says_why() -> None:
    rows = [
        row("conv-1", "refused", "build: UnsupportedError: differs by 4.3e+05 of 'y' [cpu.py:300]"),
        row("conv-2", "refused", "build: UnsupportedError: differs by 12 of 'v7' [cpu.py:311]"),
        row("conv-3", "explained", "roundings: y: 0.1"),
        row("conv-4", "oracle", "y: 0.1"),
        row("conv-5", "wrong", "y: 0.5"),
        row("conv-6", "right", ""),
    ]
    found = command.summary(rows, 1.0, 6, {})
    assert [r["name"] for r in found["failing"]] == ["conv-5"]
    assert found["explained"] == {"roundings": {"cpu fp32": ["conv-3"]}, "oracle": {"cpu fp32": ["conv-4"]}}
    (why,) = found["refused"]
    assert why["reason"] == "refused: build: UnsupportedError: differs by # of '…'"
    assert (why["trials"], why["first"]) == (2, ["conv-1", "conv-2"])
    assert json.loads(command.written(found)) == json.loads(json.dumps(found))
