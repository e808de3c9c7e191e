"""The race: turns, verdicts, and candidates that fail in every way; and real libraries on a real model."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import mlp
from support.needs import needs_libraries
from support.sweep import sweep

from optdnn import Engine
from optdnn.errors import InternalError, UsageError
from optdnn.runtime.measuring.accuracy import errors_between
from optdnn.runtime.racing.candidates import Candidate
from optdnn.runtime.racing.race import Race as RaceResult
from optdnn.runtime.racing.race import Row, _measure_energy, median_interval, race
from optdnn.runtime.workers.process import WorkerFailure
from optdnn.runtime.workers.wire import receive, send
from optdnn.types import BF16

X = np.array([1, 2, 3], np.float32)
QUICK: dict[str, Any] = {"rounds": 3, "turn_s": 0.02, "settle_s": 0.0, "threads": 1}


def contender(name: str, opener: str, path: object) -> Candidate:
    return Candidate(name, f"contenders:{opener}", str(path))


# ---------------------------------------------------------------- what it finds out


@pytest.fixture(scope="module")
def speeds() -> RaceResult:
    candidates = [
        contender("slow", "sleeper", 0.008),
        contender("quick", "sleeper", 0.002),
        contender("snail", "sleeper", 0.1),  # one call is longer than a turn
    ]
    return race(candidates, {"x": X}, **{**QUICK, "rounds": 8, "turn_s": 0.05}, speedup_reference="slow")


@pytest.mark.slow
def test_faster_and_slower_are_reported(speeds: RaceResult) -> None:
    slow, quick, snail = speeds.rows
    assert (slow.verdict, slow.speedup) == ("baseline", 1)
    assert quick.verdict == "faster"
    assert quick.speedup is not None
    assert 1.5 < quick.speedup < 6
    assert quick.speedup_range is not None
    assert 1.02 < quick.speedup_range[0] <= quick.speedup_range[1]
    assert snail.verdict == "slower"
    assert snail.stats is not None
    assert 3 <= snail.stats.n <= 8
    assert quick.stats is not None
    assert 2 <= quick.stats.median < 8  # milliseconds


def test_candidates_on_a_gpu_time_themselves() -> None:
    candidates = [contender("host", "sleeper", 0.004), contender("device", "on_device", 1_000_000)]
    outcome = race(candidates, {"x": X}, **QUICK, speedup_reference="host")
    host, device = outcome.rows
    assert (host.clock, device.clock) == ("host", "gpu")
    assert device.stats is not None
    assert device.stats.median == 1.0
    assert device.error is None
    assert device.max_abs_err == 0.0, "outputs without names are compared in their order"
    assert device.speedup is not None
    assert device.speedup > 3.5
    assert device.to_plain()["clock"] == "gpu"


def test_any_two_can_be_held_against_each_other(speeds: RaceResult) -> None:
    versus = speeds.versus("quick", "snail")
    assert versus is not None
    assert versus.verdict == "faster"
    assert versus.speedup > 10
    own = speeds.versus("quick", "slow")
    assert own is not None
    assert (own.speedup, own.range) == (speeds.row("quick").speedup, speeds.row("quick").speedup_range)


def test_the_distribution_is_kept(speeds: RaceResult) -> None:
    quick = speeds.row("quick").to_plain()
    assert len(quick["round_medians_ms"]) == 8
    assert len(quick["quantiles_ms"]) == 101
    assert quick["quantiles_ms"] == sorted(quick["quantiles_ms"])
    assert quick["quantiles_ms"][50] == pytest.approx(quick["median_ms"], abs=1e-5)


def test_all_get_the_same_threads(speeds: RaceResult) -> None:
    assert [r.facts for r in speeds.rows] == [{"threads": 1, "omp": "1"}] * 3


def test_the_report_names_its_references(speeds: RaceResult) -> None:
    report = json.loads(json.dumps(speeds.to_plain()))
    assert (report["speedup_reference"], report["error_reference"], report["threads"]) == ("slow", "slow", 1)
    assert {"name", "median_ms", "p99_ms", "throughput_per_s", "speedup", "max_abs_err", "max_rel_err"} <= set(
        report["rows"][0]
    )
    assert report["machine"]["cpu"]
    assert report["versions"]["numpy"]
    assert report["rows"][0]["error"] is None


@pytest.mark.slow
def test_outputs_are_compared_with_the_reference() -> None:
    candidates = [
        contender("exact", "off_by", 0),
        contender("off", "off_by", 0.5),
        contender("two", "two_outputs", ""),
        contender("half", "half_io", ""),
    ]
    got = race(candidates, {"x": X}, **QUICK, other_feeds={"x": -X}, error_reference="exact", timing=False)
    assert got.row("exact").outputs is not None
    assert got.row("exact").outputs["z"].tolist() == [2, 4, 6]  # type: ignore[index]
    assert (got.row("exact").max_abs_err, got.row("exact").max_rel_err) == (0, 0)
    assert got.row("off").max_abs_err == 0.5
    assert got.row("off").max_rel_err == pytest.approx(0.5 / 6)
    assert got.row("half").max_abs_err == 0
    assert got.row("two").error == "it has 2 outputs, exact has 1"
    assert got.input_difference == 2  # |-6 - 6| / 6
    assert got.speedup_reference is None
    assert got.row("off").stats is None


def test_a_reference_of_nan_alone_says_nothing_of_other_inputs() -> None:
    broken = [contender("broken", "off_by", float("nan")), contender("exact", "off_by", 0)]
    got = race(broken, {"x": X}, **QUICK, other_feeds={"x": -X}, error_reference="broken", timing=False)
    assert got.input_difference is None
    assert got.row("exact").max_rel_err == math.inf


@pytest.mark.slow
def test_candidates_take_turns_and_never_run_concurrently(tmp_path: Path) -> None:
    log = tmp_path / "log"
    race([contender(n, "logger", log) for n in "abc"], {"x": X}, **{**QUICK, "rounds": 4})
    calls = sorted((int(start), int(end), name) for name, start, end in map(str.split, log.read_text().splitlines()))
    for (_, end, _), (start, _, _) in itertools.pairwise(calls):
        assert end <= start
    turns: list[str] = []
    for _, _, name in calls:
        if not turns or turns[-1] != name:
            turns.append(name)
    # opening and first runs in order, then four rounds in rotating order
    assert "".join(turns) == "abc" + "abc" + "bca" + "cab" + "abc"


# ---------------------------------------------------------------- candidates that fail


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("raise 0", "ValueError: no such tile"),
        pytest.param("typed 0", "UsageError: wrong option", marks=pytest.mark.slow),
        pytest.param("raise 1", "ValueError: no such tile", marks=pytest.mark.slow),
        ("raise 4", "ValueError: no such tile"),
        ("exit 0", "its process ended with code 3: fatal: out of cheese"),
        pytest.param("exit 4", "its process ended with code 3: fatal: out of cheese", marks=pytest.mark.slow),
        ("kill 2", "its process was ended by SIGKILL (out of memory?)"),
        pytest.param("interrupt 2", "KeyboardInterrupt: no message", marks=pytest.mark.slow),
        pytest.param("hang 4", "took longer than 2 s and was stopped", marks=pytest.mark.slow),
    ],
)
def test_a_failing_candidate_is_a_row_and_the_others_go_on(path: str, message: str) -> None:
    candidates = [contender("bad", "failing", path), contender("good", "sleeper", 0.001)]
    got = race(candidates, {"x": X}, **QUICK, timeout_s=2)
    bad, good = got.rows
    assert bad.error == message
    assert bad.stats is None
    assert bad.verdict is None
    assert good.error is None
    assert good.verdict == "baseline"
    assert got.speedup_reference == "good"
    assert got.error_reference == ("good" if path[-1] in "012" else "bad")


def test_when_all_fail_there_is_no_reference() -> None:
    got = race([contender("bad", "failing", "raise 0")], {"x": X}, **QUICK)
    assert (got.error_reference, got.speedup_reference) == (None, None)
    assert got.rows[0].error


def test_output_of_a_candidate_does_not_disturb_the_race() -> None:
    got = race([contender("loud", "chatty", 0.001)], {"x": X}, **QUICK)
    assert got.rows[0].error is None
    assert got.rows[0].outputs is not None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("abacus", "candidate kind 'abacus' is not one of engine, onnxruntime, openvino or MODULE:FUNCTION"),
        ("nowhere:f", "candidate kind 'nowhere:f' cannot be imported"),
        ("contenders:nothing", "candidate kind 'contenders:nothing' cannot be imported"),
        ("engine", "there is no engine file missing.engine"),
    ],
)
def test_a_candidate_that_cannot_be_opened_gives_the_reason(kind: str, message: str) -> None:
    got = race([Candidate("c", kind, "missing.engine")], {"x": X}, **QUICK)
    assert message in (got.rows[0].error or "")


def test_names_must_differ_and_references_exist() -> None:
    a = contender("a", "sleeper", 0)
    with pytest.raises(UsageError, match="candidates need different names: a, a"):
        race([a, a], {"x": X})
    with pytest.raises(UsageError, match="there are none"):
        race([], {"x": X})
    with pytest.raises(UsageError, match="the reference 'b' is not one of a"):
        race([a], {"x": X}, error_reference="b")


@pytest.mark.slow
def test_no_process_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    from optdnn.runtime.workers import process

    started: list[Any] = []
    popen = process.subprocess.Popen
    monkeypatch.setattr(process.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])

    def stop(text: str) -> None:
        if "round" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race([contender("a", "sleeper", 0.001), contender("b", "failing", "exit 0")], {"x": X}, **QUICK, progress=stop)
    assert len(started) == 2
    assert all(p.returncode is not None for p in started)


def test_a_folder_named_optdnn_in_the_current_folder_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "optdnn").mkdir()
    (tmp_path / "optdnn" / "__init__.py").write_text("raise SystemExit('the wrong optdnn')")
    monkeypatch.chdir(tmp_path)
    got = race([contender("a", "sleeper", 0.001)], {"x": X}, **QUICK)
    assert got.rows[0].error is None


# ---------------------------------------------------------------- statistics


def test_the_interval_of_a_median() -> None:
    assert median_interval([3, 1, 2]) == (1, 3)
    assert median_interval(list(range(1, 7))) == (1, 6)
    assert median_interval(list(range(1, 11))) == (2, 9)  # binomial: P(<= 1 of 10) = 1.1 %, P(<= 2) = 5.5 %
    assert median_interval(list(range(1, 101))) == (40, 61)


def test_the_interval_covers_the_median_with_its_confidence() -> None:
    rng = np.random.default_rng(0)
    samples = rng.lognormal(size=(2000, 10))
    inside = [low <= 1 <= high for low, high in map(median_interval, samples.tolist())]
    assert 0.96 < np.mean(inside) < 0.99


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [((1.05, 1.4), "faster"), ((0.5, 0.9), "slower"), ((0.99, 1.01), "equal"), ((0.9, 1.2), "unstable")],
)
def test_verdicts(interval: tuple[float, float], verdict: str) -> None:
    from optdnn.runtime.racing.race import _verdict

    assert _verdict(interval) == verdict


# ---------------------------------------------------------------- accuracy


def test_errors_are_absolute_and_relative_to_the_scale() -> None:
    want = [np.array([0.0, 1e-9, -4.0]), np.array([10.0])]
    got = [np.array([0.0, 0.02, -4.0]), np.array([10.01])]
    absolute, relative = errors_between(got, want)
    assert absolute == pytest.approx(0.02)
    assert relative == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("got", "want", "expected"),
    [
        ([np.nan, np.inf, 1], [np.nan, np.inf, 1], (0, 0)),
        ([np.nan, 1], [1, 1], (np.inf, np.inf)),
        ([1, 1], [np.nan, 1], (np.inf, np.inf)),
        ([-np.inf], [np.inf], (np.inf, np.inf)),
        ([1, 2], [1], (np.inf, np.inf)),
        ([], [], (0, 0)),
        ([0.5, 0], [0, 0], (0.5, 0.5)),
        ([np.nan], [np.nan], (0, 0)),
    ],
)
def test_errors_of_special_values(got: Any, want: Any, expected: tuple[float, float]) -> None:
    assert errors_between([np.array(got)], [np.array(want)]) == expected


def test_errors_of_other_types() -> None:
    big = 1 << 60
    assert errors_between([np.array([big + 1])], [np.array([big])])[0] == 1
    assert errors_between([np.array([True])], [np.array([False])]) == (1, 1)
    assert errors_between([np.array([200], np.uint8)], [np.array([100], np.uint8)]) == (100, 1)
    assert errors_between([np.array([1], BF16)], [np.array([2], BF16)]) == (1, 0.5)
    assert errors_between([np.array([1j])], [np.array([1 + 0j])])[0] == pytest.approx(2**0.5)


# ---------------------------------------------------------------- the wire


def test_frames_carry_every_dtype_and_shape() -> None:
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2],
        "ä": np.array(7, np.int64),
        "e": np.empty((0, 3), np.int8),
        "b": np.array([1, 2], BF16),
    }
    stream = io.BytesIO()
    send(stream, {"command": "x", "n": [1, None]}, arrays)
    send(stream, {})
    stream.seek(0)
    first = receive(stream)
    assert first is not None
    assert first[0] == {"command": "x", "n": [1, None]}
    for name, a in arrays.items():
        np.testing.assert_array_equal(first[1][name], a)
        assert first[1][name].dtype == a.dtype
        assert first[1][name].flags.writeable
    assert receive(stream) == ({}, {})
    assert receive(stream) is None


def test_a_broken_stream_ends_or_is_refused() -> None:
    stream = io.BytesIO()
    send(stream, {"command": "x"}, {"a": np.ones(3)})
    whole = stream.getvalue()
    for n in range(len(whole)):
        assert receive(io.BytesIO(whole[:n])) is None
    with pytest.raises(InternalError, match="not a frame"):
        receive(io.BytesIO(b"hello from C, and more than a frame's head"))


# ---------------------------------------------------------------- real candidates


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The MLP of `programs` as an engine file and as an ONNX model."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    folder = tmp_path_factory.mktemp("race")
    p = mlp()
    Engine(p).save(folder / "mlp.engine")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Relu", ["c"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "v"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 5])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3]),
            helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["n", 8]),
        ],
        [numpy_helper.from_array(a, n) for a, n in zip(p.blobs, "wbv", strict=True)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder / "mlp.onnx")
    return str(folder / "mlp.engine"), str(folder / "mlp.onnx")


@pytest.mark.parametrize("shapes", sweep([{}, {"x": (4, 5)}], {"x": (4, 5)}))
def test_engine_against_the_libraries(files: tuple[str, str], shapes: Any) -> None:
    needs_libraries()
    engine, model = files
    candidates = [
        Candidate("ours", "engine", engine),
        Candidate("onnxruntime", "onnxruntime", model, shapes=shapes),
        Candidate("openvino", "openvino", model, shapes=shapes),
    ]
    rng = np.random.default_rng(0)
    x, other = (rng.standard_normal((4, 5)).astype(np.float32) for _ in range(2))
    got = race(candidates, {"x": x}, **QUICK, other_feeds={"x": other}, error_reference="onnxruntime")
    assert [r.error for r in got.rows] == [None] * 3
    facts: defaultdict[str, Any] = defaultdict(dict, {r.name: r.facts for r in got.rows})
    assert facts["onnxruntime"]["threads"] == facts["openvino"]["threads"] == 1
    assert facts["openvino"]["precision"] == "f32"
    assert facts["ours"]["target"] == "reference"
    assert got.input_difference is not None
    for row in got.rows:
        assert row.max_rel_err is not None
        assert row.max_rel_err < 1e-5 < got.input_difference
        assert row.stats is not None
        assert list(row.outputs or {}) == ["y", "hidden"]


@pytest.mark.slow
def test_precisions_that_a_library_lacks_are_refused(files: tuple[str, str]) -> None:
    needs_libraries()
    candidates = [
        Candidate("ort", "onnxruntime", files[1], precision="bf16"),
        Candidate("ov", "openvino", files[1], precision="int4"),
    ]
    got = race(candidates, {"x": np.ones((1, 5), np.float32)}, **QUICK)
    assert got.row("ort").error == "UsageError: onnxruntime has no bf16 on the CPU"
    assert got.row("ov").error == "UsageError: openvino has no precision int4"


def test_environment_of_the_caller_is_kept() -> None:
    before = dict(os.environ)
    race([contender("a", "sleeper", 0)], {"x": X}, **QUICK)
    assert dict(os.environ) == before


def test_energies_are_measured_after_the_race_and_failures_are_rows() -> None:
    class Answers:
        def __init__(self, answer: Any):
            self.answer, self.closed = answer, False

        def ask(self, message: dict[str, Any]) -> Any:
            assert message == {"command": "energy"}
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer, {}

        def close(self) -> None:
            self.closed = True

    rows = {name: Row(name, "engine") for name in ("one", "other")}
    workers: dict[str, Any] = {
        "one": Answers({"joules": 1.5}),
        "other": Answers(WorkerFailure("RunError", "no counter")),
    }
    _measure_energy(rows, workers, lambda text: None)
    assert rows["one"].energy == {"joules": 1.5}
    assert rows["one"].to_plain()["energy"] == {"joules": 1.5}
    assert (rows["other"].energy, rows["other"].error) == (None, "RunError: no counter")
    assert workers.keys() == {"one"}
