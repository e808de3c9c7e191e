"""The load generator of the benchmarks, against a real server process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("tritonclient.grpc", reason="the extra serve is not installed")
pytest.importorskip("benchmarks.harness", reason="an installed copy has no benchmarks")

from benchmarks.__main__ import main


def test_answers_under_load_equal_those_of_single_runs(engines: Path, tmp_path: Path) -> None:
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
    assert sorted(name.split()[0] for name in shared["memory_mb"]) == ["server", "worker"]
    assert all(found["last"] > 0 for found in shared["memory_mb"].values())


@pytest.mark.slow
def test_memory_does_not_grow_under_load_and_a_killed_worker_loses_only_its_requests(
    engines: Path, tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    load = ["--clients", "8", "--processes", "1", "--rows", "3", "--seconds", "25", "--kill"]
    words = [str(engines / "digits.engine"), "--protocols", "http", "grpc", *load, "--serve=--frontends 2"]
    main(["serve", *words, "--out", str(out)])
    for row in map(json.loads, out.read_text().splitlines()):
        assert row["rows_per_s"] > 0
        assert sum(row["errors"].values()) <= 8
        assert all("has died" in text for text in row["errors"])
        memory = {name: found for name, found in row["memory_mb"].items() if found}
        assert sorted(name.split()[0] for name in memory) == ["front", "front", "server", "worker", "worker"]
        for name, found in memory.items():
            assert found["last"] - found["first"] < 3, (name, found)
