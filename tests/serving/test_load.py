"""The load generator of the benchmarks, against a real server process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("tritonclient.grpc", reason="the extra serve is not installed")
pytest.importorskip("benchmarks.harness", reason="an installed copy has no benchmarks")

from benchmarks.__main__ import main


def test_answers_under_load_are_those_of_single_runs(engines: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    load = ["--clients", "3", "--processes", "2", "--rows", "2", "--batches", "2", "--seconds", "2.5"]
    words = [str(engines / "digits.engine"), "--protocols", "engine", "shared", *load, "--out", str(out)]
    assert main(["serve", *words]) == 0
    engine, shared = map(json.loads, out.read_text().splitlines())
    assert engine["rows_per_s"] > 0
    assert shared["rows_per_s"] > 0
    assert shared["errors"] == {}
    assert shared["like_single_runs"]["requests"] == 3
    assert shared["like_single_runs"]["worst"] < 1e-4
    assert shared["memory_mb"]["last"] > 0
