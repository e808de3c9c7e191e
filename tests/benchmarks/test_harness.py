"""The harness: rows of successful and failed workloads, resuming, budgets, turns, and the format of results."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks.harness", reason="an installed copy has no benchmarks")

from benchmarks import children, rows
from benchmarks.__main__ import main

TESTS = str(Path(__file__).parents[1])
FAKE = "support.fake_kind"


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children use the fake kind."""
    monkeypatch.setenv("PYTHONPATH", TESTS)


def measured(out: Path, *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and the rows by the name of the network."""
    code = main([FAKE, *words, "--out", str(out), "--jobs", "2"])
    return code, {r["workload"].partition("/")[2].partition(":")[0]: r for r in rows.lines(out) if "workload" in r}


@pytest.mark.slow
def test_a_workload_that_fails_costs_its_row_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("unbuildable", "raises", "exits", "killed", "hangs", "good")
    code, found = measured(tmp_path / "out.jsonl", *(f"fake/{n}" for n in names), "--limit", "4")
    assert set(found) == set(names)
    assert found["unbuildable"]["error"] == "ValueError: it cannot be built"
    assert found["raises"]["error"] == "RuntimeError: no such thing"
    assert "exit code 3" in found["exits"]["error"]
    assert "a last word" in found["exits"]["error"]
    assert "SIGKILL" in found["killed"]["error"]
    assert (found["hangs"]["error"], found["hangs"]["verdict"]) == ("measure: no end in 4 s", "hang")
    assert found["good"]["times"] == {"ours": {"ms": 1.5}}
    assert (found["good"]["what"], found["good"]["setup"], found["good"]["build_s"]) == ("fake", "cuda:sm_90a", 0.5)
    assert code == 1, "a crash and a hang are faults"
    said = capsys.readouterr().out
    assert "fake/good:1@fp16 cuda:sm_90a: ours 1.5000 ms right" in said
    assert "fake: 6 of 6: " in said


@pytest.mark.slow
def test_a_second_call_measures_only_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    assert measured(out, "fake/good", "fake/raises")[0] == 0
    before = rows.lines(out)
    out.write_text(out.read_text(encoding="utf-8") + '{"workload": "fake/half', encoding="utf-8")
    code, _ = measured(out, "fake/good", "fake/raises", "fake/other@fp32")
    after = rows.lines(out)
    assert code == 0
    assert after[: len(before)] == before, "a line that was cut off is gone, and nothing else"
    assert [r["workload"] for r in after[len(before) :] if "workload" in r] == ["fake/other:1@fp32"]
    again = measured(out, "fake/good", "fake/raises", "--again")[1]
    assert "error" in again["raises"]
    assert sum(r.get("workload") == "fake/raises:1@fp16" for r in rows.lines(out)) == 2
    assert {r["run"] for r in after if "workload" in r} == {r["run"] for r in after if "workload" not in r}


def test_the_budget_leaves_the_rest_for_the_next_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = measured(tmp_path / "out.jsonl", "fake/good", "--budget", "0.5")
    assert (code, found) == (0, {})
    assert "1 are left: call again" in capsys.readouterr().out


def test_faults_give_the_exit_code(tmp_path: Path) -> None:
    assert measured(tmp_path / "out.jsonl", "fake/wrong")[0] == 1


@pytest.mark.slow
def test_timed_workloads_have_the_machine_alone(tmp_path: Path) -> None:
    names = [f"fake/timed{k}" for k in range(4)]
    code, found = measured(tmp_path / "out.jsonl", *names, "--at-once", "2")
    assert code == 0
    spans = sorted(r["interval"] for r in found.values())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert len({r["pid"] for r in found.values()}) == 2, "two children set up side by side"


@pytest.mark.slow
def test_children_that_work_are_stopped_while_one_times(tmp_path: Path) -> None:
    names = ("fake/works", "fake/timed0_late", "fake/timed1_late")
    code, found = measured(tmp_path / "out.jsonl", *names, "--at-once", "3")
    assert code == 0
    beats = found["works"]["beats"]
    spans = [r["interval"] for name, r in found.items() if name.startswith("timed")]
    assert any(beats[0] < begin and end < beats[-1] for begin, end in spans), "else the test says nothing"
    for begin, end in spans:
        assert not [t for t in beats if begin + 0.01 < t < end]


@pytest.mark.slow
def test_a_child_may_have_several_turns(tmp_path: Path) -> None:
    names = ("fake/twice0", "fake/twice1", "fake/timed")
    code, found = measured(tmp_path / "out.jsonl", *names, "--at-once", "3")
    assert code == 0
    turns = sorted([*(r["interval"] for r in found.values()), *(r["first"] for r in found.values() if "first" in r)])
    assert len(turns) == 5
    assert all(end <= begin for (_, end), (begin, _) in pairwise(turns))


@pytest.mark.slow
def test_time_that_a_child_is_stopped_is_not_of_its_limit() -> None:
    worker = children.Worker()
    worker.start()
    try:
        worker.stop()
        worker.stop()
        time.sleep(1.5)
        worker.send(json.dumps({"kind": "no such kind", "waits": False}))
        threading.Timer(1.0, worker.go_on).start()
        assert "UsageError" in worker.answer(("ANSWER ",), 1.5)
        assert 2.4 < worker.stopped_seconds() < 4
        with pytest.raises(children.OutOfTime):
            worker.answer(("ANSWER ",), 0.2)
    finally:
        worker.close()


def test_a_child_that_starts_while_one_times_is_stopped_at_once() -> None:
    worker = children.Worker()
    worker.stop()
    threading.Timer(0.5, worker.go_on).start()
    begin = time.monotonic()
    worker.start()
    assert time.monotonic() - begin >= 0.5
    worker.close()


@pytest.mark.slow
def test_each_gpu_has_children_of_its_own(tmp_path: Path) -> None:
    names = [f"fake/timed{k}" for k in range(4)]
    code, found = measured(tmp_path / "out.jsonl", *names, "--devices", "0,1")
    assert code == 0
    of = {device: sorted(r["interval"] for r in found.values() if r["device"] == device) for device in "01"}
    assert all(of.values())
    assert sum(map(len, of.values())) == 4
    assert all(end <= begin for spans in of.values() for (_, end), (begin, _) in pairwise(spans))


def test_unknown_kinds_and_workloads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spede"]) == 2
    assert main([FAKE, "no workload", "--list"]) == 2
    assert main([FAKE, "--groups", "none", "--list"]) == 2
    said = capsys.readouterr().out
    for text in ("there is no kind of measurement 'spede'", "'no workload' is no workload", "there is no group 'none'"):
        assert text in said


# ---------------------------------------------------------------- the format


def row(workload: str, run: str, **more: Any) -> dict[str, Any]:
    return {"workload": workload, "what": "speed", "setup": "cuda", "run": run, **more}


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_kept_results_are_the_newest_without_details(tmp_path: Path) -> None:
    runs = [{"run": name, "commit": name, "machine": {}} for name in "abc"]
    kept = written(tmp_path / "speed.jsonl", runs[0], row("x", "a", times={"ours": {"ms": 1.0}}), row("y", "a"))
    times = {"ours": {"ms": 0.123456789, "rounds_ms": [1.0]}}
    new = written(tmp_path / "new.jsonl", runs[1], row("x", "b", times=times), row("y", "b", error="lost"), runs[2])
    other = written(tmp_path / "soak.jsonl.part", {**row("x", "c"), "what": "soak"}, runs[2])
    assert [p.name for p in rows.keep([new, other], tmp_path)] == ["soak.jsonl", "speed.jsonl"]
    found = {r["workload"]: r for r in rows.read(kept)}
    assert found["x"]["times"] == {"ours": {"ms": 0.123457}}
    assert (found["x"]["run"]["commit"], found["y"]["run"]["commit"]) == ("b", "a"), "an error takes no result's place"
    assert "error" not in found["y"]
    assert [r["run"]["commit"] for r in rows.read(tmp_path / "soak.jsonl")] == ["c"]


def test_kept_rows_leave_out_entries_of_the_row_before(tmp_path: Path) -> None:
    given = [row("x", "a"), row("y", "a"), {**row("z", "b"), "setup": "cpu"}, {**row("w", "b"), "setup": ""}]
    (kept,) = rows.keep([written(tmp_path / "new.jsonl.part", {"run": "a"}, {"run": "b"}, *given)], tmp_path)
    text = kept.read_text(encoding="utf-8")
    assert text.splitlines()[3] == '{"workload":"y"}'
    assert [{**r, "run": r["run"]["run"]} for r in rows.read(kept)] == given
    rows.keep([kept], tmp_path)
    assert kept.read_text(encoding="utf-8") == text, "kept once more, nothing changes"


def test_rows_of_another_gpu_stay() -> None:
    def row(gpu: str, ms: float) -> rows.Row:
        times = {"ours": {"ms": ms}}
        return {
            "what": "speed",
            "workload": "zoo/a:1@fp16",
            "setup": "cuda ours",
            "times": times,
            "run": {"machine": {"gpu": gpu}},
        }

    kept = rows.replaced(rows.newest([row("H200", 1.0), row("H100", 2.0), row("H200", 3.0)]))
    assert [(rows.gpu_of(r), r["times"]["ours"]["ms"]) for r in kept] == [("H100", 2.0), ("H200", 3.0)]
    assert rows.gpu_of({"run": "an id"}) == ""


def test_rows_with_more_candidates_replace_those_of_older_runs(tmp_path: Path) -> None:
    def timed(workload: str, run: str, setup: str, *names: str) -> dict[str, Any]:
        return row(workload, run, times={n: {"ms": 1.0} for n in names}) | {"setup": setup}

    two, three = ("ours", "eager"), ("ours", "eager", "compile")
    old = [timed(w, "a", "cuda ours,eager", *two) for w in ("timm/x", "timm/y", "zoo/x")]
    old.append(timed("timm/x", "a", "cuda ours,eager tuned 10 s", *two))
    new = [timed(w, "b", "cuda ours,eager,compile", *three) for w in ("timm/x", "zoo/x")]
    new.append(timed("timm/x", "b", "cuda ours,eager,compile-max", "ours", "eager", "compile-max"))
    kept = written(tmp_path / "speed.jsonl", {"run": "a"}, *old)
    rows.keep([written(tmp_path / "new.jsonl", {"run": "b"}, *new)], tmp_path)
    found = {(r["workload"], r["setup"], r["run"]["run"]) for r in rows.read(kept)}
    assert ("timm/x", "cuda ours,eager", "a") not in found
    assert len(found) == 6, "another way of building, another network, and what serves several tables stay"


def test_a_broken_line_inside_of_a_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"run": 1}\n{"wor\n{"run": 2}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 2 is no JSON"):
        rows.lines(path)


def test_facts_name_the_run_and_no_folders() -> None:
    about = rows.facts(["speed", "--out", "/somewhere/else/out.jsonl"])
    assert about["command"] == "python -m benchmarks speed --out out.jsonl"
    assert about["run"] == rows.run_id({k: v for k, v in about.items() if k != "run"})
    assert about["machine"]["cores"] >= 1
