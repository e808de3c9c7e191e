"""``optdnn verify``: ten engines pass, and each of them fails after one fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support import faults, small_models
from support.cli import Cli
from support.faults import Fault, damage
from support.needs import needs_libraries

import optdnn
from optdnn.errors import EXIT_CODES


@dataclass(frozen=True)
class Engine:
    """An engine, a fault, and the check that must notice it (with the model, or without)."""

    model: Callable[[], onnx.ModelProto]
    target: str
    fault: Fault
    caught_by: str
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Fault | None = None
    case: str = ""


BATCHES = [{"x": "1..2..3x24"}, {"x": "4..5..6x24"}]
ENGINES = {
    "a weight of ONNX Runtime's": Engine(
        small_models.residual, "cpu", faults.weight, "model", {"tactics": "onnxruntime"}
    ),
    "OpenVINO's model": Engine(
        small_models.mlp, "cpu", faults.model_of_a_library(np.float32(0.125).tobytes(), np.float32(0.25).tobytes()), "model",
        {"tactics": "openvino"},
    ),
    "results in the wrong order": Engine(small_models.two_heads, "cpu", faults.swapped_outputs, "model"),
    "an attribute of an operator": Engine(
        small_models.normalized, "reference", faults.attribute("LayerNormalization", "epsilon", 0.5), "model"
    ),
    "operands in the wrong order": Engine(
        small_models.residual, "reference", faults.swapped_inputs("Sub"), "model", {"opt_level": 0}
    ),
    "a weight of a recurrent network": Engine(small_models.recurrent, "simulate", faults.weight, "model"),
    "buffers over one another": Engine(
        small_models.branches, "reference", faults.overlaid, "one by one", {"opt_level": 0}, prepare=faults.planned
    ),
    "the arena of a simulated engine": Engine(
        small_models.branches, "simulate", faults.overlaid, "one by one", {"streams": "1"}
    ),
    "where a step reads": Engine(small_models.residual, "simulate", faults.view("Conv"), "model", {"precision": "fp16"}),
    "a weight of 8 bits": Engine(small_models.quantized, "simulate", faults.weight, "model"),
    "an activation's constant": Engine(
        small_models.normalized, "cuda:sm_90a", faults.constant(0.75, 0.5), "model", {"precision": "fp16", "no_cubins": True}
    ),
    "one plan of several": Engine(
        lambda: small_models.mlp("n"), "cuda:sm_90a", faults.in_last_plan(faults.constant(0.125, 0.5)), "model",
        {"shapes": BATCHES, "no_cubins": True}, case="profile 1 opt",
    ),
    "weights of an attention": Engine(
        small_models.attention, "cuda:sm_90a", faults.weight, "model", {"precision": "fp16", "no_cubins": True}
    ),
}  # fmt: skip
"""Networks on the targets cpu, reference, simulate and (simulated) cuda."""


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_passes_and_one_with_a_fault_does_not(name: str, cli: Cli, tmp_path: Path) -> None:
    made = ENGINES[name]
    if made.target == "cpu":
        needs_libraries()
    simulate = ["--simulate"] if made.target.startswith("cuda") else []
    model, good = small_models.save(made.model(), tmp_path), tmp_path / "good.engine"
    optdnn.build(model, target=made.target, **made.options).save(good)
    if made.prepare is not None:
        damage(good, made.prepare, good)
    code, out, err = cli("verify", good, "--model", model, *simulate)
    assert (code, err) == (0, ""), out
    assert "failed" not in out

    bad = damage(good, made.fault, tmp_path / "bad.engine")
    code, out, err = cli("verify", bad, "--json", *([] if made.caught_by != "model" else ["--model", model]), *simulate)
    assert code == 7, out + err
    assert f"{bad} failed; the first: {made.caught_by}" in err
    report = json.loads(out)
    failed = {(c["check"], c["case"]) for c in report["checks"] if c["status"] == "failed"}
    assert not report["ok"]
    assert (made.caught_by, made.case) in failed


def test_there_are_at_least_ten_engines() -> None:
    assert len(ENGINES) >= 10
    assert {e.target.partition(":")[0] for e in ENGINES.values()} == {"cpu", "reference", "simulate", "cuda"}


# ---------------------------------------------------------------- the command


def test_the_table_shows_each_check_once_where_all_inputs_agree(cli: Cli, tmp_path: Path) -> None:
    model = small_models.save(small_models.mlp("n"), tmp_path)
    optdnn.build(model, target="simulate", shapes=BATCHES).save(tmp_path / "net.engine")
    code, out, err = cli("verify", tmp_path / "net.engine", "--model", model)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["check", "inputs", "result"]
    assert [line.split("  ")[0].strip() for line in lines[1:8]] == [
        "runs", "steps", "one by one", "repeats", "memory", "rows", "model",
    ]  # fmt: skip
    assert "profile 0 min, profile 0 opt, profile 0 max, profile 1 min" in lines[1]
    assert lines[-1].endswith("simulate, fp32, simulated in NumPy; inputs: random, seed 0")


def test_one_fault_among_several_inputs_has_a_line_of_its_own(cli: Cli, tmp_path: Path) -> None:
    model = small_models.save(small_models.mlp("n"), tmp_path)
    optdnn.build(model, target="simulate", shapes=BATCHES).save(tmp_path / "net.engine")
    bad = damage(tmp_path / "net.engine", faults.in_last_plan(faults.constant(0.125, 0.5)), tmp_path / "bad.engine")
    code, out, err = cli("verify", bad, "--model", model)
    assert code == 7
    (line,) = [line for line in out.splitlines() if "failed" in line]
    assert line.split()[:5] == ["model", "profile", "1", "opt", "failed"]
    assert f"error: 1 of 42 checks of {bad} failed; the first: model (profile 1 opt): y is off by" in err


def test_inputs_are_read_from_files(cli: Cli, tmp_path: Path) -> None:
    model = small_models.save(small_models.mlp("n"), tmp_path)
    optdnn.build(model, target="reference").save(tmp_path / "net.engine")
    np.savez(tmp_path / "data.npz", x=np.ones((3, 24), np.float32))
    code, out, _ = cli("verify", tmp_path / "net.engine", "--model", model, "--input", tmp_path / "data.npz")
    assert code == 0
    assert "y float32[3, 10]" in out
    assert out.endswith("inputs: given\n")
    np.savez(tmp_path / "data.npz", x=np.ones((3, 5), np.float32))
    code, out, err = cli("verify", tmp_path / "net.engine", "--input", tmp_path / "data.npz")
    assert (code, out) == (6, "")
    assert "axis 1 is 5 instead of 24" in err
    assert cli("verify", tmp_path / "net.engine", "--size", "q=3").code == 2


def test_files_that_are_no_engine(cli: Cli, tmp_path: Path) -> None:
    assert cli("verify", tmp_path / "none.engine").code == 2
    (tmp_path / "short.engine").write_bytes(b"\x89OPTDNN\n\x01")
    assert cli("verify", tmp_path / "short.engine").code == 5
    optdnn.build(small_models.mlp(), target="reference").save(tmp_path / "net.engine")
    assert cli("verify", tmp_path / "net.engine", "--model", tmp_path / "none.onnx").code in (2, 3)
    assert "verify" in EXIT_CODES[7]
