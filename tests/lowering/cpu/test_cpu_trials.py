"""Candidates of the target cpu in separate processes: one that crashes or hangs is refused, and the build continues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.needs import needs_libraries
from test_cpu import assert_right, network, options

from optdnn.errors import OutputError, RunError, UnsupportedError
from optdnn.ir.evaluate import random_feeds
from optdnn.ir.graph import Graph
from optdnn.lowering.cpu import partition as cpu
from optdnn.lowering.cpu import trials as cpu_trials
from optdnn.lowering.cpu.library import LIBRARIES, Contender
from optdnn.lowering.cpu.partition import choose, compile_with
from optdnn.lowering.cpu.trials import TrialLost, Trials, kept
from optdnn.tuning.timing_cache import TimingCache

needs_libraries()


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that sets the fault of later candidates. Their workers are new, since workers inherit the environment."""
    monkeypatch.setattr(cpu_trials, "_kept", None)
    monkeypatch.setattr(Trials, "opener", "support.faulty:opener")

    def set_fault(text: str) -> None:
        monkeypatch.setenv("FAULT", text)

    return set_fault


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("SIGSEGV open", "its process was ended by SIGSEGV when it was compiled"),
        pytest.param("SIGFPE run", "its process was ended by SIGFPE when it ran", marks=pytest.mark.slow),
        pytest.param("hang run", "took longer than 5 s and was stopped when it ran", marks=pytest.mark.slow),
        pytest.param("SIGABRT turn", "its process was ended by SIGABRT when it was timed", marks=pytest.mark.slow),
    ],
)
def test_a_candidate_that_crashes_or_hangs_is_refused(
    fault: Any, text: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(text)
    if text.startswith("hang"):
        monkeypatch.setattr(cpu_trials, "LIMIT_S", 5.0)
        monkeypatch.setattr(cpu_trials, "LIMIT_S_PER_GIB", 0.0)
    graph, cache = network(), TimingCache()
    choice = choose(graph, options(), cache, {})
    assert {r.name: r.refused for r in choice.rows if r.refused} == {"openvino/1t": reason}
    assert choice.engine.meta["tactic"]["library"] == "onnxruntime"
    assert_right(choice.engine, graph)
    if not text.startswith("hang"):  # a candidate that hangs would take its time again
        with pytest.raises(UnsupportedError, match=reason):
            choose(graph, options(tactics="openvino"), TimingCache(), {})
    monkeypatch.setattr(cpu_trials, "WorkerProcess", None)  # the cache knows it: no process is started
    again = choose(graph, options(), cache, {})
    assert {r.name: r.refused for r in again.rows if r.refused} == {"openvino/1t": reason}


@pytest.mark.slow
def test_a_process_that_the_system_ended_is_tried_again_next_time(fault: Any) -> None:
    fault("SIGKILL run")
    graph, cache = network(), TimingCache()
    choose(graph, options(), cache, {})
    fault("none")
    assert not [r for r in choose(graph, options(), cache, {}).rows if r.refused]


@pytest.mark.slow
def test_compile_with_tries_first(fault: Any) -> None:
    fault("SIGSEGV open")
    with pytest.raises(RunError, match="SIGSEGV"):
        compile_with(network(), "openvino", "fp32", 1)
    fault("none")
    assert_right(compile_with(network(), "openvino", "fp32", 1), network())


def test_a_filled_cache_needs_no_process_and_other_weights_need_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = TimingCache.open(tmp_path / "cache.json")
    choose(network(), options(), cache, {})
    cache.save()
    started: list[object] = []
    real = Trials.open
    monkeypatch.setattr(Trials, "open", lambda self, *args, **rest: started.append(args) or real(self, *args, **rest))
    cache = TimingCache.open(tmp_path / "cache.json")
    assert all(r.cached for r in choose(network(), options(), cache, {}).rows)
    assert not started
    other = network()
    (w,) = other.of_kind("Constant")
    other.set_op(replace(w, attrs=replace(w.attrs, value=-w.attrs.value)))
    choice = choose(other, options(), cache, {})
    assert all(r.cached for r in choice.rows), "times hold for other weights"
    assert len(started) == 2, "that they are right does not"
    assert_right(choice.engine, other)


def test_operators_that_the_cache_knows_to_be_refused_are_cut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that a trial found to be refused is also cut out of later builds, which open the engine without a trial."""

    class Refusing(Trials):
        def open(self, program: Any, threads: int, *, custom: bool = False) -> Any:
            models = [program.blobs[s.params["model"]].tobytes() for s in program.steps if s.executor == "openvino"]
            if any(b"Softsign" in m for m in models):
                raise RunError("no Softsign here")
            return super().open(program, threads, custom=custom)

    monkeypatch.setattr(cpu, "Trials", Refusing)
    graph, cache = network(), TimingCache()
    first = choose(graph, options(tactics="openvino"), cache, {})
    assert [s.executor for s in first.engine.program.steps] == ["openvino", "reference", "openvino"]
    monkeypatch.setattr(Refusing, "open", None)
    again = choose(graph, options(tactics="openvino"), cache, {})
    assert [s.executor for s in again.engine.program.steps] == ["openvino", "reference", "openvino"]
    assert again.fallbacks == first.fallbacks


def test_operators_that_one_library_must_not_run_the_other_runs() -> None:
    graph = Graph()
    x = graph.add_input("x", network().type(network().of_kind("Input")[0].value))
    a = graph.add("Sigmoid", [x], src=["sigmoid"])
    b = graph.add("NonZero", [graph.add("Floor", [a.value]).value], src=["positions"])
    graph.add_output(b.value, "y")
    contender = Contender(graph, LIBRARIES["openvino"], "fp32", helper=LIBRARIES["onnxruntime"])
    assert [(f["operator"], f["library"]) for f in contender.fallbacks] == [("NonZero", "onnxruntime")]
    program = contender.program(1)
    assert [s.executor for s in program.steps] == ["openvino", "onnxruntime"]
    assert [r.split(">")[0] for r in program.requires] == ["package:onnxruntime", "package:openvino"]
    alone = Contender(graph, LIBRARIES["openvino"], "fp32")
    assert [s.executor for s in alone.program(1).steps] == ["openvino", "reference"]


def positions() -> Graph:
    graph = Graph()
    x = graph.add_input("x", network().type(network().of_kind("Input")[0].value))
    graph.add_output(graph.add("NonZero", [x], src=["positions"]).value, "y")
    return graph


def test_if_nothing_is_left_to_a_library_the_other_does_not_run_in_its_name() -> None:
    contender = Contender(positions(), LIBRARIES["openvino"], "fp32", helper=LIBRARIES["onnxruntime"])
    assert [s.executor for s in contender.program(1).steps] == ["reference"]
    assert [f.get("library") for f in contender.fallbacks] == [None]


def test_if_the_other_library_fails_numpy_kernels_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **rest: Any) -> Any:
        raise RunError("not on this input")

    class Failing(Trials):
        def open(self, program: Any, threads: int, *, custom: bool = False) -> Any:
            trial = super().open(program, threads, custom=custom)
            if any(s.executor == "onnxruntime" for s in program.steps):
                monkeypatch.setattr(trial, "run", fails)
            return trial

    monkeypatch.setattr(cpu, "Trials", Failing)
    graph = positions()
    source = graph.op(graph.inputs[0]).value
    graph.add_output(graph.add("Sigmoid", [source]).value, "z")
    choice = choose(graph, options(), TimingCache(), {})
    assert sorted(s.executor for s in choice.engine.program.steps) == ["openvino", "reference"]
    assert {r.name: r.refused for r in choice.rows} == {"openvino/1t": None, "onnxruntime/1t": "not on this input"}
    assert_right(choice.engine, graph)


def test_a_trial_runs_with_poisoned_memory_and_ends_with_its_process() -> None:
    graph = network()
    program = Contender(graph, LIBRARIES["openvino"], "fp32").program(1)
    feeds = random_feeds(graph, seed=2)
    with Trials(1) as trials:
        trial = trials.open(program, 1)
        first, second = trial.run(feeds), trial.run(feeds, poison=True)
        assert np.array_equal(first["y"], second["y"])
        assert len(trial.turn(0.01)) >= 1
        with pytest.raises(RunError, match="InputError"):
            trial.run({"x": feeds["x"][:1]})
        trial._worker._process.kill()  # type: ignore[attr-defined]
        with pytest.raises(TrialLost, match="SIGKILL"):
            trial.run(feeds)
        with pytest.raises(TrialLost, match="has ended"):
            trial.run(feeds)
        trial.close()


def test_workers_are_reused_by_later_builds_only_inside_of_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_trials, "_kept", None)
    with Trials(1) as trials:
        trials.start(1)
        (worker,) = trials._idle
    assert worker._process.returncode is not None
    with kept():
        with Trials(1) as trials:
            trials.start(1)
            (worker,) = trials._idle
        assert worker._process.poll() is None
        with Trials(2) as other, Trials(1) as again:
            assert not other._idle
            assert again._idle == [worker]
    assert worker._process.returncode is not None


def test_no_process_or_no_room_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_trials, "_kept", None)
    program = Contender(network(), LIBRARIES["openvino"], "fp32").program(1)

    def never(*args: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with Trials(1) as trials:
        trials.start(1)
        monkeypatch.setattr(cpu_trials, "encode", never)
        with pytest.raises(OutputError, match=r"cannot be written to .*\n  hint: .*TMPDIR"):
            trials.open(program, 1)
        monkeypatch.setattr(cpu_trials, "WorkerProcess", never)
        with pytest.raises(RunError, match="no process can be started"):
            trials._started()
