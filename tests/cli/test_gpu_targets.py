"""Engines for GPUs from the command line, on machines that have none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.cli import Cli

import optdnn
from optdnn.passes.support import trial


def test_build_and_run_simulated(cli: Cli, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.engine"
    shape = optdnn.build(model, target="reference").inputs[0]
    dims = "x".join(str(d) if isinstance(d, int) else "2" for d in shape.shape)
    built = cli(
        "build", model, "-o", out, "--target", "simulate", "--precision", "fp16", "--shape", f"{shape.name}={dims}"
    )
    assert built.code == 0, built.err
    assert ", target simulate\n" in built.out
    assert "precision  fp16" in built.out
    done = cli("run", out, "--output", tmp_path / "y.npz")
    assert done.code == 0, done.err
    assert all(np.isfinite(a).all() for a in np.load(tmp_path / "y.npz").values())


def test_a_build_says_if_it_did_not_look_for_numbers_beyond_fp16(
    cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = optdnn.build(model, target="reference").inputs[0]
    dims = "x".join(str(d) if isinstance(d, int) else "2" for d in shape.shape)
    options = ("--target", "simulate", "--precision", "fp16", "--shape", f"{shape.name}={dims}")
    assert "trial run" not in cli("build", model, *options).err
    monkeypatch.setattr(trial, "MARGIN", 1e9)  # nothing is proven
    monkeypatch.setattr(trial, "TRIAL_FLOPS", 1.0)
    built = cli("build", model, *options)
    assert built.code == 0
    assert "trial run" in built.err


def test_an_engine_for_another_machine_runs_simulated(cli: Cli, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.engine"
    name = optdnn.build(model, target="reference").inputs[0].name
    dims = [d if isinstance(d, int) else 1 for d in optdnn.build(model, target="reference").inputs[0].shape]
    options = ("--target", "cuda:sm_90a", "--no-cubins", "--tactics", "heuristic", "--precision", "bf16")
    built = cli("build", model, "-o", out, *options, "--shape", f"{name}={'x'.join(map(str, dims))}")
    assert built.code == 0, built.err
    assert cli("run", out, "--simulate").code == 0


def test_a_kernel_cache_that_cannot_be_written_is_one_line(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="no cuda-bindings: pip install 'optdnn[cuda]'")
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("OPTDNN_CACHE", str(tmp_path / "file"))
    out = tmp_path / "net.engine"
    name = optdnn.build(model, target="reference").inputs[0].name
    dims = [d if isinstance(d, int) else 1 for d in optdnn.build(model, target="reference").inputs[0].shape]
    shape = ("--shape", f"{name}={'x'.join(map(str, dims))}")
    built = cli("build", model, "-o", out, "--target", "cuda:sm_90a", "--precision", "fp16", *shape)
    assert built.code == 0, built.err
    assert built.err.startswith(
        f"warning: cannot write the kernel cache {tmp_path / 'file' / 'kernels'}: Not a directory"
    )
    assert built.err.count("\n") == 1, "not a line for each kernel, nor Python's source lines"
    assert cli("run", out, "--simulate").code == 0


def test_options_that_do_not_fit_the_target(cli: Cli, model: Path) -> None:
    code, _, err = cli("build", model, "--target", "cpu", "--precision", "fp16")
    assert code == 2
    assert "precision fp16 is for GPUs" in err
    code, _, err = cli("build", model, "--target", "simulate", "--tactics", "openvino")
    assert code == 2
    assert "do not run on target 'simulate'" in err
    code, _, err = cli("build", model, "--target", "cuda:sm_90a")
    assert code == 2
    shape = "1..8..32x3x8x8"
    assert (
        f"not fixed are N\n  hint: a range that may fit: --shape x={shape} (in Python: shapes={{'x': '{shape}'}})\n"
        in err
    )
