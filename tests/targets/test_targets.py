"""Targets: the one that options select, its purpose, and the GPU whose facts programs use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_api import ONE, model

import optdnn
from optdnn.config import BuildOptions
from optdnn.errors import EngineError, InternalError
from optdnn.passes.support.precision_report import PrecisionLog
from optdnn.runtime.cuda.gpu_facts import named
from optdnn.target_name import FAMILIES
from optdnn.targets import target_for
from optdnn.targets.base import Source
from optdnn.targets.cuda import Cuda


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_its_target(family: str) -> None:
    target = target_for(BuildOptions(target="cuda:sm_80" if family == "cuda" else family))
    assert type(target).__name__.lower() == family
    assert target.one_size == (family in ("cuda", "simulate"))


@pytest.mark.slow
def test_builds_for_the_cpu_import_no_kernels_of_gpus() -> None:
    """They are 250 modules, whose import would take as long as a small build."""
    code = "import sys, optdnn.compiler, optdnn.targets.cpu; sys.exit('optdnn.lowering.table' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_gpu_that_is_not_here_is_a_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.runtime.cuda.device._facts_here", lambda: None)
    for name, gpu in (
        ("simulate", "h200"),
        ("cuda:sm_90a", "h200"),
        ("cuda:sm_80", "a100"),
        ("cuda:l4", "l4"),
    ):
        target = target_for(BuildOptions(target=name))
        assert isinstance(target, Cuda)
        assert target.gpu == named(gpu)


def test_a_target_for_all_sizes_makes_no_plans() -> None:
    arguments: Any = (Source(b""), None, BuildOptions(), None, PrecisionLog(), None, print)
    with pytest.raises(InternalError, match="programs of cpu take all sizes"):
        target_for(BuildOptions(target="cpu")).plan_sizes(*arguments)


def test_only_programs_of_launches_are_simulated(tmp_path: Path) -> None:
    optdnn.build(model(ONE), target="reference").save(tmp_path / "m.engine")
    with pytest.raises(EngineError, match="for target 'reference', which has no launches to simulate"):
        optdnn.load(tmp_path / "m.engine", simulate=True)


@pytest.mark.slow
def test_kept_programs_are_those_of_the_gpu_that_they_were_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer multiprocessors, a kernel that fills the GPU has fewer blocks. The results are the same."""
    from optdnn.models import zoo

    network = zoo.build("mobilenet_v2", batch=8, image_size=64, width=0.5, num_classes=16)
    feeds = zoo.example_inputs(network, seed=1)
    grids, results = [], []
    for count in (132, 20):
        facts = named("h200")
        here = type(facts)(**{**vars(facts), "name": "a GPU", "multiprocessors": count})
        monkeypatch.setattr("optdnn.runtime.cuda.device._facts_here", lambda here=here: here)
        engine = optdnn.build(network, target="simulate", precision="fp16")
        launches = [s.params["launch"] for s in engine.program.steps if "launch" in s.params]
        grids.append([launch["grid"] for launch in launches])
        results.append(next(iter(engine.run(feeds).values())))
    assert grids[0] != grids[1]
    assert np.abs(results[0] - results[1]).max() <= 4e-3 * np.abs(results[0]).max()


def test_a_report_of_a_build_is_a_dictionary() -> None:
    report = optdnn.build(model(ONE), target="reference").report
    assert report is not None
    assert dict(report)["options"]["target"] == "reference"
