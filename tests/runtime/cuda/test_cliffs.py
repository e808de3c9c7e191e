"""Cliffs of a profile: the steps that count as slow for their work, and their reasons in a plan."""

from __future__ import annotations

from typing import Any

import pytest

import optdnn
from optdnn.models import zoo
from optdnn.runtime.cuda.measuring.cliffs import cliffs
from optdnn.runtime.program import Program


@pytest.fixture(scope="module")
def program() -> Program:
    network = zoo.build("mobilenet_v2", batch=1, image_size=32, width=0.35, num_classes=16)
    return optdnn.build(network, target="simulate", precision="fp16").program


def row(program: Program, k: int, **changes: Any) -> dict[str, Any]:
    step = program.steps[k]
    found = {"step": k, "src": list(step.src), "tactic": step.params.get("tactic", ""), "executor": step.executor}
    return {**found, "us": 20.0, "share": 0.1, "roofline": 0.1, **changes}


@pytest.mark.parametrize("changes", [{"roofline": 0.3}, {"share": 0.01}, {"us": 3.0}], ids=str)
def test_other_steps_are_no_cliffs(changes: dict[str, Any], program: Program) -> None:
    assert cliffs([row(program, 0, **changes)], program) == []


def test_the_step_with_the_largest_possible_gain_comes_first(program: Program) -> None:
    found = cliffs([row(program, 1, us=10.0), row(program, 2, us=40.0, roofline=0.05)], program)
    assert [c["step"] for c in found] == [2, 1]
    assert [c["gain_us"] for c in found] == pytest.approx([32.0, 6.0])


def test_few_blocks_are_a_reason(program: Program) -> None:
    why = str(cliffs([row(program, 3)], program)[0]["why"])
    blocks = program.steps[3].params["launch"]["grid"]  # type: ignore[index,call-overload]
    assert why.startswith(f"{blocks[0] * blocks[1] * blocks[2]} blocks do not fill 132 multiprocessors")


def test_one_wave_is_a_reason(program: Program) -> None:
    launch: Any = program.steps[3].params["launch"]
    blocks = launch["grid"][0] * launch["grid"][1] * launch["grid"][2]
    gpu: Any = program.meta["gpu"]
    before, gpu["multiprocessors"] = gpu["multiprocessors"], blocks
    try:
        why = str(cliffs([row(program, 3)], program)[0]["why"])
        tactic = str(cliffs([row(program, 3, tactic="gemm_sm90 1x1")], program)[0]["why"])
    finally:
        gpu["multiprocessors"] = before
    wave = f"its {blocks} blocks all run at once, so the latency of one block sets its time"
    assert why.startswith(wave)
    assert tactic == wave


def test_refusals_of_other_tactics_are_reasons(program: Program) -> None:
    decisions: Any = program.meta["tactics"]
    refused = {r["tactic"] for d in decisions for r in d.get("refused", ())}
    every = cliffs([row(program, k) for k in range(len(program.steps))], program)
    assert any(f"{tactic} refuses: " in str(c["why"]) for c in every for tactic in refused)


def test_steps_on_the_cpu_are_cliffs(program: Program) -> None:
    on_cpu = row(program, 0, executor="host", roofline=None)
    assert [c["why"] for c in cliffs([on_cpu], program)] == ["it runs on the CPU"]
    program.meta["host"]["operators"].append(
        {"nodes": on_cpu["src"], "kind": "Unique", "why": "there is no kernel for Unique"}
    )  # type: ignore[index,call-overload,union-attr]
    assert [c["why"] for c in cliffs([on_cpu], program)] == ["there is no kernel for Unique"]
    copy = row(program, 0, executor="copy", roofline=None)
    assert "it copies between the GPU and the host" in str(cliffs([copy], program)[0]["why"])
