"""``optdnn verify`` on a GPU: engines pass, and each one with a fault in a launch, a meaning or a constant fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support import faults, small_models
from support.faults import Fault, damage
from support.small_models import save, small_model

import optdnn
from optdnn.cli.main import run
from optdnn.compare.checks import PASSED
from optdnn.runtime.program import Program

pytestmark = pytest.mark.hopper


def wide() -> onnx.ModelProto:
    """Enough elements for many blocks of every kernel."""
    return small_model(
        """(float[8,256,512] x) => (float[8,256,512] y) { a = LayerNormalization<axis = -1>(x, scale, bias)
        b = Elu<alpha = 0.75>(a) y = MatMul(b, w) }""",
        scale=np.ones(512, np.float32), bias=np.zeros(512, np.float32), w=(512, 512),
    )  # fmt: skip


def half_a_grid(program: Program) -> Program:
    """The norm's launch with half of its blocks. Each block computes some rows, so the other rows are not written."""
    for k, step in enumerate(program.steps):
        launch = step.params.get("launch")
        norm = step.params.get("op", {}).get("kind") == "ActivatedNorm"
        if launch and norm and launch["cluster"] == 1 and launch["grid"][0] > 1:
            x, y, z = launch["grid"]
            params = {**step.params, "launch": {**launch, "grid": [x // 2, y, z]}}
            return replace(program, steps=(*program.steps[:k], replace(step, params=params), *program.steps[k + 1 :]))
    raise AssertionError("no norm has several blocks")


@dataclass(frozen=True)
class Engine:
    """An engine, a fault, the checks (one must notice it), and whether this needs the model."""

    model: Callable[[], onnx.ModelProto]
    fault: Fault
    caught_by: tuple[str, ...]
    needs_model: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    case: str = ""


BATCHES = [{"x": "1..2..3x24"}, {"x": "4..5..6x24"}]
ENGINES = {
    "half a grid": Engine(wide, half_a_grid, ("steps",)),
    "half a grid, fp16": Engine(wide, half_a_grid, ("steps",), options={"precision": "fp16"}),
    "a meaning that the kernel has not": Engine(small_models.normalized, faults.constant(0.75, 0.5), ("steps",)),
    "a meaning, fp16": Engine(
        small_models.normalized, faults.constant(0.75, 0.5), ("steps",), options={"precision": "fp16"}
    ),
    "a weight": Engine(small_models.residual, faults.weight, ("model",), True, {"precision": "fp16"}),
    "a weight, tf32": Engine(small_models.residual, faults.weight, ("model",), True, {"precision": "tf32"}),
    "a weight of 8 bits": Engine(small_models.quantized, faults.weight, ("model",), True),
    "a weight of an attention": Engine(small_models.attention, faults.weight, ("model",), True, {"precision": "bf16"}),
    "a weight of a recurrent network": Engine(small_models.recurrent, faults.weight, ("model",), True),
    "the arena": Engine(
        small_models.branches, faults.overlaid, ("memory",), False, {"streams": "1"}
    ),
    "one plan of several": Engine(
        lambda: small_models.mlp("n"), faults.in_last_plan(faults.constant(0.125, 0.5)), ("steps",), False,
        {"shapes": BATCHES}, "profile 1 opt",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_passes_and_one_with_a_fault_does_not(name: str, tmp_path: Path) -> None:
    made = ENGINES[name]
    model, good = save(made.model(), tmp_path), tmp_path / "good.engine"
    optdnn.build(model, target="cuda:sm_90a", **{"tactics": "heuristic", **made.options}).save(good)
    found = optdnn.verify(good, model)
    assert found.ok, found.failed
    assert {c.status for c in found.checks if c.name in ("steps", "one by one", "repeats", "memory")} == {PASSED}
    assert run(["verify", str(good)]) == 0

    bad = damage(good, made.fault, tmp_path / "bad.engine")
    wrong = optdnn.verify(bad, model if made.needs_model else None)
    assert any(c.name in made.caught_by and c.case == made.case for c in wrong.failed), wrong.checks
    assert run(["verify", str(bad), *(["--model", str(model)] if made.needs_model else [])]) == 7


def test_rows_of_a_batch_where_that_is_promised(tmp_path: Path) -> None:
    model = save(small_models.mlp("n"), tmp_path)
    engine = optdnn.build(
        model,
        target="cuda:sm_90a",
        precision="fp16",
        tactics="heuristic",
        shapes={"x": "1..4..9x24"},
        row_invariant=True,
    )
    found = optdnn.verify(engine, model)
    rows = {c.case: (c.status, c.text) for c in found.checks if c.name == "rows"}
    assert rows["opt"][0] == rows["max"][0] == PASSED, rows
    assert found.ok
