"""Attention, recurrent layers and group normalization on the simulated GPU: the right tactic runs each, and rightly."""

from __future__ import annotations

import pytest
from support.sequence_cases import ATTENTION, GROUP_NORM, RECURRENT
from support.simulated import check_simulated

KINDS = {"Attention", "RNN", "GRU", "LSTM", "GroupNormalization", "InstanceNormalization"}
CASES = {**ATTENTION, **RECURRENT, **GROUP_NORM}


@pytest.mark.parametrize("name", CASES)
def test_half_precision(name: str) -> None:
    build, tactic = CASES[name]
    program = check_simulated(build())
    assert {t["tactic"] for t in program.meta["tactics"] if t["kind"] in KINDS} == {tactic}


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("long", "wide heads", "odd head")])
def test_fp32(name: str) -> None:
    program = check_simulated(CASES[name][0](), "fp32")
    assert {t["tactic"] for t in program.meta["tactics"] if t["kind"] in KINDS} <= {"attention_steps", "rnn", "rows"}
