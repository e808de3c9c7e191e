"""benchmarks/program_fingerprints.py: equal programs have equal fingerprints, and each difference is reported with its place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optdnn.runtime.program import Program

script = pytest.importorskip("benchmarks.program_fingerprints", reason="an installed copy has no benchmarks")


def program() -> Program:
    return script.build(script.Case("mlp", "fp16"))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_the_same_build_twice_has_one_fingerprint() -> None:
    first, second = (script.fingerprint(program()) for _ in range(2))
    assert first["steps"]
    assert list(script.differences(first, second)) == []


def with_launch(one: Program, step: int, **changed: Any) -> Program:
    steps = list(one.steps)
    params = dict(steps[step].params)
    steps[step] = replace(steps[step], params={**params, "launch": {**params["launch"], **changed}})
    return replace(one, steps=tuple(steps))


@pytest.mark.slow
def test_each_part_of_a_program_counts() -> None:
    before = program()
    last = len(before.steps) - 1
    kernel = before.steps[last].params["launch"]["kernel"]
    kernels = list(before.kernels)
    kernels[kernel] = replace(kernels[kernel], generated={"generated.cuh": "// other"})
    weight = max(range(len(before.blobs)), key=lambda i: before.blobs[i].size)
    blobs = [np.zeros_like(b) if i == weight else b for i, b in enumerate(before.blobs)]
    cases = {
        "grid was": with_launch(before, last, grid=[7, 1, 1]),
        "parameters was": with_launch(before, last, parameters="00" * 16),
        "launch was": with_launch(before, last, waits="grid"),
        "source was": replace(before, kernels=tuple(kernels)),
        "steps before": replace(before, steps=before.steps[:-1]),
        "buffers: was": replace(before, blobs=blobs),
        "arena_bytes: was": replace(before, arena_bytes=before.arena_bytes + 256),
    }
    first = script.fingerprint(before)
    for said, after in cases.items():
        lines = list(script.differences(first, script.fingerprint(after)))
        assert len([line for line in lines if said in line]) == 1, (said, lines)


def test_the_first_differing_step_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    only = ["--only", "lstm:1 fp32"]
    assert script.main(["--out", str(one), *only]) == 0
    assert script.main(["--compare", str(one), *only]) == 0
    assert "1 cases, 0 differ: none" in capsys.readouterr().out
    kept = json.loads(one.read_text())
    (case,) = kept
    kept[case]["steps"][2]["grid"] = [99, 1, 1]
    two.write_text(json.dumps(kept))
    assert script.main(["--compare", str(two), *only]) == 1
    said = capsys.readouterr().out
    assert "step 2 (" in said
    assert "grid was [99, 1, 1], is [" in said
    assert f"1 cases, 1 differ: {case}" in said
    two.write_text("{}")
    assert script.main(["--compare", str(two), *only]) == 1
    assert "not in the file to compare with" in capsys.readouterr().out
