"""What benchmarks check on a GPU: what is compared, what the sanitizers see, what is kept of it and told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scripts import module


@pytest.mark.slow
def test_every_kernel_of_engines_is_run_under_the_sanitizers() -> None:
    from support.simulated import lowered

    from optdnn.runtime.cuda.nvrtc import KERNELS

    cases = module("gpu/sanitize_cases.py")
    left = {p.name for p in KERNELS.glob("*.cu")} - {"timer.cu"}  # of the tuner
    for name, (build, precision) in cases.graphs().items():
        if left and name not in cases.GENERAL and precision != "bf16":
            with cases.forced(name):
                program = lowered(build(), precision, target="cuda:sm_90a", no_cubins=True)
            left -= {k.template for k in program.kernels}
    assert not left


def test_boxes_are_compared_as_a_set() -> None:
    boxes, labels = np.arange(20, dtype=np.float32).reshape(5, 4), np.array([1, 2, 1, 2, 1])
    scores, masks = np.linspace(0.9, 0.5, 5, dtype=np.float32), np.arange(10.0).reshape(5, 2)
    want, other = [boxes, labels, scores, masks], [4, 2, 0, 1, 3]
    agreement = module("gpu/agreement.py")
    assert agreement.same_boxes([a[other] for a in want], want) == {"same": 5, "of": 5, "errors": [0.0] * 4}
    assert agreement.same_boxes([a[1:] for a in want], want)["same"] == 4, "one is missing"
    assert agreement.same_boxes([boxes, labels, scores + 0.01, masks], want)["same"] == 0
    assert agreement.same_boxes([boxes, np.array([1, 1, 1, 2, 2]), scores, masks], want)["same"] == 3, "by their labels"
    assert agreement.same_boxes([np.repeat(a[:1], 5, 0) for a in want], want)["same"] == 1, "each stands for one alone"
    moved = agreement.same_boxes([boxes, labels, scores, masks[::-1]], want)
    assert moved["same"] == 5
    assert moved["errors"][3] == pytest.approx(8 / 9), "the masks are those of other boxes"
    assert agreement.same_boxes([masks], [masks]) is None


ABOUT = {
    "commit": "12345678ab",
    "date": "2026-01-01",
    "command": "python x",
    "gpu": "H200",
    "driver": "1",
    "versions": {},
}


def checked(error: float = 1e-7, **changed: Any) -> dict[str, Any]:
    steps = {"count": 1000, "worst": [error, "Conv", "conv.cu"], "wrong": []}
    return {
        "errors": [error],
        "repeats": True,
        "agrees": True,
        "singly": True,
        "arena": [],
        "steps": steps,
        "right": True,
        **changed,
    }


def test_checks_on_a_gpu_are_kept_by_precision_and_told(tmp_path: Path) -> None:
    merge, figures = module("gpu/merge_checks.py"), module("figures_checks.py")
    first = {
        **ABOUT,
        "rows": [{"network": n, "another_input": [1.0], "fp32": checked(), "fp16": checked(2e-3)} for n in "ab"],
    }
    late = {"network": "b", "failed": "not begun within 9 s"}
    second = {**ABOUT, "commit": "ffff", "rows": [{"network": "a", "fp16": checked(5e-3, right=False)}, late]}
    made = merge.networks(merge.networks(None, [first]), [second])
    found = {r["network"]: {p: r[p]["commit"] for p in ("fp32", "fp16")} for r in made["rows"]}
    assert found == {"a": {"fp32": "12345678", "fp16": "ffff"}, "b": {"fp32": "12345678", "fp16": "12345678"}}
    (tmp_path / "networks-h200.json").write_text(merge.text(made))
    tool = {"tool": "memcheck", "family": "x"}
    run = {**ABOUT, "engines": [{"family": "x"}], "rows": [
        {**tool, "clean": True}, {**tool, "family": "y", "begun": False}, {**tool, "family": "int8, seeded fault", "caught": True},
    ]}  # fmt: skip
    kept = merge.sanitizer(None, run)
    assert kept["tools"]["memcheck"] == {
        "clean": 1, "of": 2, "reported": [], "not begun": ["y"], "seeded fault": "caught",
    }  # fmt: skip
    part = {**ABOUT, "commit": "eeee", "engines": [{"family": "z"}], "rows": [{**tool, "family": "z", "clean": True}]}
    kept = merge.sanitizer(kept, part)
    (tmp_path / "sanitizer-h200.json").write_text(merge.text(kept))
    wrong = {
        **ABOUT,
        "cases": 3,
        "operators": ["Add"],
        "tried": {"fp32": 3, "fp16": 3},
        "wrong": [{"precision": "fp16"}],
    }
    (tmp_path / "cases-h200.json").write_text(merge.text(merge.cases(wrong)))
    text = figures.correctness(tmp_path)
    assert "| fp32 | 2 of 2 | 2,000 | 1e-07 | 3 of 3 |" in text
    assert "| fp16 | 1 of 2 | 2,000 | 2e-03 | 2 of 3 |" in text
    assert "memcheck 1 of 1; each caught the fault seeded for it. Newer kernels (commit eeee): memcheck 1 of 1." in text
    assert figures.correctness(tmp_path / "none") == ""


def test_sizes_of_a_network_take_their_place_among_those_of_its_target() -> None:
    merge = module("gpu/merge_checks.py")
    kept = [
        {"what": "cuda", "rows": [{"network": "b", "matched": True, "errors": [1e-6]}]},
        {"what": "cpu", "rows": []},
    ]
    sizes = [{"size": [2], "error": 2e-6, "another_input": 0.5, "first_s": 0.1}]
    row = {"network": "a", "shape": "1..2..5x3", "matched": True, "sizes": sizes, "build_s": 3}
    found = merge.sizes(kept, [{"what": "cuda", "commit": "c", "rows": [row]}])
    assert found[1] == kept[1]
    assert {k: found[0][k] for k in ("networks", "matched", "largest_error")} == {
        "networks": 2,
        "matched": 2,
        "largest_error": 2e-6,
    }
    assert found[0]["rows"][0] == {
        "network": "a", "shape": "1..2..5x3", "matched": True, "sizes": [[2]], "errors": [2e-6], "another_input": [0.5],
        "first_s": [0.1], "commit": "c",
    }  # fmt: skip
    assert json.loads(merge.text(found)) == found
