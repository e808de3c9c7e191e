"""The cliffs that an engine's own record of times shows: in inspect and in the reports, by the rules of profiles only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.net import Net
from support.simulated import lowered

import optdnn
from optdnn.cli import inspect
from optdnn.compare.subject import load_subject
from optdnn.models import zoo
from optdnn.report.markdown import _build
from optdnn.runtime.cuda.measuring.expected import expected_cliffs, expected_steps


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recurrent layer: its steps wait for one another, so it is far from the arithmetic limit."""
    path = tmp_path_factory.mktemp("cliffs") / "lstm.engine"
    optdnn.build(zoo.build("lstm", batch=1), target="simulate", precision="fp16").save(path)
    return path


def test_a_recurrent_layer_is_a_cliff(engine: Path) -> None:
    program = optdnn.load(engine).program
    (cliff,) = expected_cliffs(program)
    assert cliff["source"] == "predicted"
    assert "/LSTM" in cliff["src"]  # type: ignore[operator]
    assert "blocks do not fill 132 multiprocessors" in str(cliff["why"])
    rows: Any = expected_steps(program)
    assert sum(r["share"] for r in rows) == pytest.approx(1.0)
    assert all(0 < r["roofline"] < 1 for r in rows)


def test_inspect_says_where_the_times_are_from(engine: Path) -> None:
    shown = CliRunner().invoke(inspect.command, [str(engine)]).output
    assert "steps below 25% of their roofline that take over 2% of the run, by predicted times" in " ".join(
        shown.split()
    )
    facts = json.loads(CliRunner().invoke(inspect.command, [str(engine), "--json"]).output)
    assert facts["cliffs"] == expected_cliffs(optdnn.load(engine).program)


def test_the_report_of_an_engine_lists_them(engine: Path) -> None:
    record: Any = load_subject(engine, None, 1).record
    (table,) = [part for part in _build(record) if part.startswith("| step | µs")]
    assert "/LSTM" in table
    assert "do not fill 132 multiprocessors" in table
    written = json.loads(engine.with_name(engine.name + ".report.json").read_text(encoding="utf-8"))
    assert written["cliffs"] == record["cliffs"]


def test_copies_and_operators_of_the_cpu_have_a_time() -> None:
    n = Net()
    x = n.input(4, 8, 8)
    program = lowered(n.done(n.op("Relu", n.op("Det", n.op("Relu", x)))), "fp16")
    off: Any = [r for r in expected_steps(program) if r["executor"] != "cuda"]
    assert {r["executor"] for r in off} == {"host", "copy"}
    assert all(r["us"] > 4 and r["roofline"] is None and r["source"] == "predicted" for r in off)
    cliffs: Any = expected_cliffs(program)
    assert {"host", "copy"} == {program.steps[c["step"]].executor for c in cliffs}


def test_an_engine_without_a_record_has_none(engine: Path) -> None:
    program = optdnn.load(engine).program
    del program.meta["step_times"]  # type: ignore[attr-defined]
    assert expected_cliffs(program) == []
