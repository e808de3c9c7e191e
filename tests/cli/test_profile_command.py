"""``profile``: the trace of an engine's own times, the choice of the tool, and the selection of steps by name."""

from __future__ import annotations

import json
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from support.cli import Cli
from support.simulated import lowered

import optdnn
from optdnn.cli.profile import default_tool, show_kernels, steps_named
from optdnn.errors import UsageError
from optdnn.runtime.cuda.measuring import nsight
from optdnn.runtime.measuring import bench
from optdnn.runtime.measuring.chrome_trace import LAYERS, chrome_trace


@pytest.fixture
def engine(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    optdnn.build(model, target="reference").save("net.engine")
    return Path("net.engine")


def test_a_trace_of_every_target(cli: Cli, engine: Path) -> None:
    code, out, err = cli("profile", engine)
    assert (code, "median ms" in out, "written: net.trace.json" in err) == (0, True, True)
    events = json.loads(Path("net.trace.json").read_text())["traceEvents"]
    steps = [e for e in events if e["ph"] == "X"]
    assert len(steps) == len(optdnn.load(engine).program.steps)
    assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"]) for a, b in pairwise(steps))
    assert steps[0]["args"]["src"]
    found = json.loads(cli("profile", engine, "--tool", "trace", "-o", "other.json", "--json").out)
    assert (found["tool"], found["report"]) == ("trace", "other.json")
    assert Path("other.json").exists()


def test_the_command_that_a_profiler_runs(cli: Cli, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(bench, "cuda_context", lambda context, feeds: context)
    monkeypatch.setattr(nsight, "record_run", lambda command, report: given.append(command))
    assert cli("profile", engine, "--tool", "nsys").code == 0
    ((*python, name, path, option),) = given
    assert (name, path, option) == ("bench", "net.engine", "--trace")
    said = subprocess.run([*python, name, "--help"], capture_output=True, text=True, check=True)
    assert option in said.stdout


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (("--tool", "ncu"), "ncu profiles engines of target cuda; this one is for reference"),
        (("--step", "0"), "ncu profiles engines of target cuda"),
        (("--step", "0", "--tool", "nsys"), "--step works only with ncu, not with nsys"),
    ],
)
def test_options_that_a_tool_does_not_have(cli: Cli, engine: Path, words: tuple[str, ...], because: str) -> None:
    code, _, err = cli("profile", engine, *words)
    assert code == UsageError.exit_code
    assert because in err


def test_the_tool_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there: set[str] = set()
    monkeypatch.setattr(nsight, "find", lambda tool: tool if tool in there else None)
    assert [default_tool(steps, True) for steps in (False, True)] == ["trace", "ncu"]
    there.add("nsys")
    assert [default_tool(False, on_gpu) for on_gpu in (False, True)] == ["trace", "nsys"]


def test_lanes_and_layers_of_a_trace() -> None:
    steps = [
        {"step": 0, "executor": "cuda", "src": ["a", "b"], "kind": "Conv", "median_ms": 0.5, "share": 0.5, "lane": 0},
        {"step": 1, "executor": "cuda", "src": [], "kind": "Copy", "median_ms": 0.25, "share": 0.5, "lane": 1},
    ]
    layers = [{"step": 1, "name": n, "kind": "k", "median_ms": 0.1, "share": 0.1} for n in ("x", "y")]
    rows = [e for e in chrome_trace("net", steps, layers)["traceEvents"] if e["ph"] == "X"]  # type: ignore[union-attr, index, call-overload]
    assert [(r["name"], r["ts"], r["dur"], r["tid"]) for r in rows] == [  # type: ignore[index, call-overload]
        ("a, b", 0.0, 500.0, 0), ("Copy", 500.0, 250.0, 1), ("x", 500.0, 100.0, LAYERS), ("y", 600.0, 100.0, LAYERS),
    ]  # fmt: skip


def test_steps_by_number_name_and_pattern(engine: Path) -> None:
    program = optdnn.load(engine).program
    name = program.steps[1].src[0]
    assert steps_named(program, [name]) == steps_named(program, ["1"]) == [1]
    assert steps_named(program, ["*", "0"]) == list(range(len(program.steps)))
    assert steps_named(program, []) == []
    with pytest.raises(UsageError, match=f"no step of the engine is '{name}s'; did you mean '{name}'"):
        steps_named(program, [name + "s"])
    with pytest.raises(UsageError, match="no step of the engine is '999'"):
        steps_named(program, ["999"])


def test_counters_beside_the_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    counted = nsight.Counters(12, "conv_hopper", 12.5, 61.5, None, 18.75, 72.0, "long_scoreboard", 0.375)
    known = {"src": ["conv1"], "tactic": "conv_hopper 128x64", "roofline": 0.8, "added_us": 11.0}
    unknown = dict.fromkeys(known)
    show_kernels([{**counted.to_plain(), **known}, {**counted.to_plain(), "step": None, **unknown}])
    _, first, second = capsys.readouterr().out.splitlines()
    assert "".join(first.split()) == "1212.5062–1972long_scoreboard38%11.0080%conv_hopper128x64conv1"
    assert "".join(second.split()).endswith("––conv_hopperconv_hopper")


@pytest.mark.hopper
@pytest.mark.skipif(nsight.find("ncu") is None, reason="Nsight Compute is not installed")
def test_one_step_under_ncu(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.tuned import network

    from optdnn.runtime.engine import Engine

    monkeypatch.chdir(tmp_path)
    engine = Engine(lowered(network(), "fp16", target="cuda:sm_90a"))
    engine.save("net.engine")
    found = json.loads(cli("profile", "net.engine", "--step", "0", "--json").out)
    assert Path(found["report"]).exists()
    (row,) = found["kernels"]
    assert row["step"] == 0
    assert row["us"] > 0
    assert row["roofline"] is not None
    assert all(0 <= row[k] <= 100 for k in ("dram", "tensor", "occupancy", "l2_hits"))
    assert row["stall"]
    everything = json.loads(cli("profile", "net.engine", "--tool", "ncu", "--json").out)["kernels"]
    assert {r["step"] for r in everything} == set(range(len(engine.program.steps)))
