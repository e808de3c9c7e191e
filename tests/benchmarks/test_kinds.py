"""The kinds of measurement: options, tables, and their logic on targets that need no GPU."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("benchmarks.harness", reason="an installed copy has no benchmarks")

from support.agreement import same_boxes
from support.sweep import sweep

import optdnn
from benchmarks.__main__ import main
from benchmarks.harness import Job, parser_of
from benchmarks.kinds import (
    COMMANDS,
    KINDS,
    command_of,
    correctness,
    invariance,
    kind_of,
    precision,
    roofline,
    soak,
    speed,
)
from benchmarks.models import SHARED, onnx_of
from benchmarks.rows import read
from benchmarks.workloads import Workload, parse

GELU = Workload("operator/gelu", 1, "fp32")


def job(name: str, workload: Workload, folder: Path, *words: str) -> Job:
    """A job in the form in which the harness gives it to a child."""
    kind = kind_of(name)
    options = parser_of(kind).parse_args(list(words))
    made = Job(workload, kind.setups(options, workload)[0], options, folder)
    if kind.prepare is None or not kind.prepares(options):
        return made
    return Job(workload, made.setup, options, folder, kind.prepare(made))


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_lists_its_workloads(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARED, "")  # the settings of --shared end with this test
    assert main([name, "--list", "--out", str(tmp_path / "out.jsonl"), "--shared", str(tmp_path)]) in (0, 2)
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"python -m benchmarks {name} " in capsys.readouterr().out
    assert kind_of(name).name == name


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_of(name)(["--help"])
    assert ended.value.code == 0
    assert f"python -m benchmarks {name}" in capsys.readouterr().out


def test_without_words_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in (*KINDS, *COMMANDS))


def test_modules_for_gpus_import_without_one() -> None:
    pytest.importorskip("torch")
    importlib.import_module("benchmarks.race")
    importlib.import_module("benchmarks.torch_modules")


# ---------------------------------------------------------------- speed


def test_candidates_are_built_and_one_that_cannot_be_is_reported(tmp_path: Path) -> None:
    words = ("--target", "simulate", "--rivals", "ours,ours@fp16,one_lane,libraries,eager")
    found = job("speed", GELU, tmp_path, *words).prepared["builds"]
    assert found["ours"]["steps"] == found["one_lane"]["steps"] == found["one_lane"]["lanes"] == 1
    assert found["ours@fp16"]["steps"] == 1, "it converts the input and the result itself"
    assert "eager" not in found
    assert {p.name for p in tmp_path.glob("*.engine")} >= {"ours.engine", "ours@fp16.engine", "one_lane.engine"}
    assert set(np.load(tmp_path / "in.npz")) == {"x0"}
    assert not np.array_equal(np.load(tmp_path / "in.npz")["x0"], np.load(tmp_path / "other.npz")["x0"])
    wrong = job("speed", GELU, tmp_path, "--target", "simulate", "--rivals", "ours@fp3,ours").prepared["builds"]
    assert "fp3" in wrong["ours@fp3"]["error"]
    assert wrong["ours"]["steps"] == 1


def test_the_setup_describes_the_measurement() -> None:
    def setup(*words: str) -> str:
        return speed.setups(parser_of(speed.KIND).parse_args(list(words)), GELU)[0]

    assert setup() == "cuda:sm_90a ours,eager"
    assert setup("--target", "cpu") == "cpu onnxruntime,openvino"
    assert setup("--tune", "10", "--flush-l2", "--rivals", "own") == "cuda:sm_90a own tuned 10 s L2 flushed"


def test_a_verdict_is_of_our_engines() -> None:
    good = {"error_rel": 0.01, "repeats": True}
    assert speed.verdict({"ours": good, "eager": {"error": "no"}}, GELU) == {"verdict": "right"}
    assert speed.verdict({"ours": {**good, "wrong": "0.5"}}, GELU) == {"verdict": "wrong"}
    assert speed.verdict({"ours": {**good, "repeats": False}}, GELU) == {"verdict": "wrong"}
    eight = parse("zoo/mlp@int8+fp16")[0]
    assert speed.verdict({"ours": {**good, "wrong": "0.5"}}, eight) == {"verdict": "right"}
    assert speed.verdict({"ours": {"error": "no room"}}, GELU) == {"verdict": "failed", "error": "no room"}
    assert speed.verdict({"ours": {"error": "no room"}, "own": good}, GELU) == {"verdict": "failed"}


def test_a_rival_is_over_ours_by_the_median_of_rounds() -> None:
    times = {"optdnn": {"rounds_ms": [1.0, 2.0, 1.0]}, "b": {"rounds_ms": [2.0, 4.0, 9.0]}, "c": {"rounds_ms": []}}
    assert speed.over(times, "optdnn") == {"b": 2.0}


@pytest.mark.slow
def test_rivals_on_the_cpu_are_compared(tmp_path: Path) -> None:
    found = speed.measure(job("speed", GELU, tmp_path, "--target", "cpu", "--duration", "0.2"))
    assert found["times"].keys() == {"optdnn", "onnxruntime", "openvino"}
    assert found["over"].keys() == {"onnxruntime", "openvino"}
    assert all(check["error_rel"] < 1e-3 for check in found["checks"].values())


# ---------------------------------------------------------------- what is right


@pytest.mark.parametrize("precision", sweep(["fp32", "fp16", "int8+fp16"], "int8+fp16"))
def test_a_right_network_is_right(precision: str, tmp_path: Path) -> None:
    workload = Workload("operator/linear_768_3072", 1, precision)
    found = correctness.measure(job("correctness", workload, tmp_path, "--target", "simulate"))
    assert found["verdict"] == "right"
    assert 0 < max(found["errors"]) < {"fp32": 1e-5, "fp16": 1e-2}.get(precision, 0.1)


def test_a_wrong_result_is_wrong(tmp_path: Path) -> None:
    made = job("correctness", GELU, tmp_path, "--target", "simulate")
    want = dict(np.load(tmp_path / "want.npz"))
    np.savez(tmp_path / "want.npz", **{k: v + 0.1 for k, v in want.items()})
    assert correctness.measure(made)["verdict"] == "wrong"


def test_faults_of_an_engine() -> None:
    good: dict[str, Any] = {"repeats": True, "agrees": True, "singly": True, "arena": [], "steps": {"wrong": []}}
    assert correctness.right(good)
    for fault in (
        {"repeats": False},
        {"agrees": False},
        {"singly": False},
        {"arena": ["x"]},
        {"steps": {"wrong": [1]}},
    ):
        assert not correctness.right({**good, **fault})
    assert correctness.agrees({"errors": [1e-4]}, [1.0], "fp32")
    assert not correctness.agrees({"errors": [1e-3]}, [1.0], "fp32")
    assert correctness.agrees({"errors": [0.2]}, [0.3], "fp16")
    assert not correctness.agrees({"errors": [0.2]}, [0.1], "fp16")
    boxes = {"same": 9, "of": 12, "rounded": 10}
    assert correctness.agrees({"errors": [9.0], "boxes_as_a_set": boxes}, [0.1], "fp16")
    assert not correctness.agrees({"errors": [9.0], "boxes_as_a_set": {**boxes, "same": 8}}, [0.1], "fp16")


def test_boxes_are_compared_as_a_set() -> None:
    boxes, labels = np.arange(20, dtype=np.float32).reshape(5, 4), np.array([1, 2, 1, 2, 1])
    scores, masks = np.linspace(0.9, 0.5, 5, dtype=np.float32), np.arange(10.0).reshape(5, 2)
    want, other = [boxes, labels, scores, masks], [4, 2, 0, 1, 3]
    assert same_boxes([a[other] for a in want], want) == {"same": 5, "of": 5, "errors": [0.0] * 4}
    assert same_boxes([a[1:] for a in want], want)["same"] == 4, "one is missing"
    assert same_boxes([boxes, labels, scores + 0.01, masks], want)["same"] == 0
    assert same_boxes([boxes, np.array([1, 1, 1, 2, 2]), scores, masks], want)["same"] == 3, "by their labels"
    assert same_boxes([np.repeat(a[:1], 5, 0) for a in want], want)["same"] == 1, "each stands for one alone"
    moved = same_boxes([boxes, labels, scores, masks[::-1]], want)
    assert moved["same"] == 5
    assert moved["errors"][3] == pytest.approx(8 / 9), "the masks are those of other boxes"
    assert same_boxes([masks], [masks]) is None


def test_replays_that_differ_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = job("soak", GELU, tmp_path, "--target", "simulate", "--replays", "3")
    found = soak.measure(made)
    assert (found["verdict"], found["alone"]["replays"], found["alone"]["differing"]) == ("ok", 3, 0)
    drifting = iter(np.arange(12, dtype=np.float32).reshape(4, 3))

    class Engine:
        inputs = ()
        program = argparse.Namespace(steps=[1])

        def run(self, feeds: Any) -> Any:
            return {"y": next(drifting)}

    monkeypatch.setattr("optdnn.load", lambda path: Engine())
    assert soak.measure(made)["verdict"] == "differs"


def test_networks_with_operators_on_the_cpu_soak_for_a_time() -> None:
    options = parser_of(kind_of("soak")).parse_args(["--replays", "10", "--host-seconds", "5"])
    assert soak.more(options, 9, 100.0, on_host=False)
    assert soak.more(options, 9, 4.0, on_host=True)
    assert not soak.more(options, 9, 6.0, on_host=True)
    assert not soak.more(options, 10, 1.0, on_host=False)


def test_eager_is_set_up_alone_before_compiling_rivals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = ["ours", "compile-max", "eager", "compile"]
    assert speed.in_turn(asked, crowded=False) == ["compile-max", "compile", "eager"]
    assert speed.in_turn(asked, crowded=True) == ["eager", "compile-max", "compile"]
    order: list[str] = []
    monkeypatch.setattr(speed, "turn", lambda: order.append("turn"))
    monkeypatch.setattr(speed, "release", lambda: order.append("release"))
    assert speed.searched(lambda: order.append("search") or 3, "test") == 3  # type: ignore[func-returns-value]
    with pytest.raises(RuntimeError):
        speed.searched(lambda: (_ for _ in ()).throw(RuntimeError("no memory")), "test")
    assert order == ["turn", "search", "release", "turn", "release"]


def test_timing_waits_until_the_gpu_is_quiet() -> None:
    pytest.importorskip("torch")
    from benchmarks import race

    now = [0.0]

    def trips(busy_until: float) -> Any:
        def trip() -> float:
            took = 2e-3 if now[0] < busy_until else 2e-5
            now[0] += took
            return took

        return trip

    assert race.settled(trips(1.0), lambda: now[0])
    assert 1.0 < now[0] < 1.2
    now[0] = 0.0
    assert not race.settled(trips(100.0), lambda: now[0])
    assert now[0] >= race.SETTLE_S


def test_candidates_take_turns_at_being_the_first() -> None:
    pytest.importorskip("torch")
    from benchmarks import race

    assert race.orders(["a", "b"], 3) == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert race.orders([], 3) == [], "torch exports some networks neither to ONNX nor into a graph"


def test_networks_soak_at_batches_in_turn() -> None:
    found = soak.adjusted([Workload(f"zoo/n{k}", 1, p) for p in ("fp16", "fp32") for k in range(4)])
    assert [w.batch for w in found] == [1, 16, 2, 64, 1, 2, 4, 1]
    assert soak.adjusted([Workload("shared/maskrcnn.ts"), Workload("shared/fasterrcnn.ts")])[1].batch == 1


@pytest.mark.slow
def test_rows_of_a_batch_are_compared_in_all_places(tmp_path: Path) -> None:
    workload = Workload("zoo/mlp", 1, "fp32")
    found = invariance.measure(job("invariance", workload, tmp_path, "--target", "simulate", "--sizes", "1,3"))
    assert found["rows"]["heuristic"]["1"] == found["rows"]["heuristic"]["3"] == 0
    assert found["verdict"] == "right"


def test_the_batch_axis_of_a_network_whose_outputs_have_no_shape() -> None:
    one, two = (optdnn.build(onnx_of(Workload("trained/digits_gru", n, "fp32")), target="simulate") for n in (1, 2))
    axes = invariance.batch_axes(one, two)
    assert set(axes) == {spec.name for spec in (*one.inputs, *one.outputs)}
    assert set(axes.values()) == {0}


@pytest.mark.nvrtc
def test_cliffs_of_all_networks_are_those_of_the_product(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, found, lines = tmp_path / "r.jsonl", tmp_path / "c.json", [{"run": "r"}]
    for workload in (Workload("zoo/lstm"), Workload("operator/gelu")):
        (folder := tmp_path / workload.file).mkdir()
        made = job("roofline", workload, folder, "--target", "cuda:h200", "--predicted")
        facts = {"workload": workload.name, "what": "roofline", "setup": made.setup, "run": "r"}
        lines.append(facts | roofline.measure(made))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert main(["cliffs", str(file), "--json", str(found)]) == 0
    said = capsys.readouterr().out
    assert said.endswith("1 cliffs in 1 of 2 runs\n")
    assert "64 blocks do not fill 132 multiprocessors" in said
    (cliff,) = json.loads(found.read_text(encoding="utf-8"))
    row = next(r for r in read(file) if r["workload"] == "zoo/lstm:1@fp16")
    assert (cliff["workload"], cliff["why"]) == (row["workload"], row["cliffs"][0]["why"])
    assert cliff["gain"] == pytest.approx(cliff["gain_us"] / row["times"]["ours"]["ms"] / 1e3, rel=0.01)
    assert row["cliffs"][0]["us"] == row["further_steps"][0]["us"]
    assert row["words"][0]["word"] == "recurrence"
    assert sum(w["share"] for w in row["words"]) == pytest.approx(1, abs=0.01)
    assert 0 < row["at_roofline"] < 0.1


def test_steps_are_summed_by_name() -> None:
    steps = [
        {"kind": kind, "tactic": tactic, "us": us, "roofline": at}
        for kind, tactic, us, at in (
            ("Conv", "gemm_sm90 1x1", 6.0, 0.5), ("MatMul", "bands", 2.0, 1.5), ("Conv", "depthwise", 1.0, None),
            ("Copy", "copy", 1.0, 0.1),
        )
    ]  # fmt: skip
    assert roofline.summary(steps) == [
        {"word": "products", "share": 0.8, "at_roofline": 0.625},
        {"word": "depthwise convolutions", "share": 0.1, "at_roofline": 0.0},
        {"word": "moves", "share": 0.1, "at_roofline": 0.1},
    ]
    jumped = [{"kind": "Softmax", "tactic": "rows", "us": us, "roofline": 2.0 / us} for us in (4.0, 40.0, 4.0)]
    assert roofline.summary([*jumped, *steps])[0] == {"word": "norms", "share": 0.545, "at_roofline": 0.5}
    assert roofline.word("ChannelAttention", "attention_channels") == "attention"
    assert roofline.word("ConvSqueeze", "conv_grouped_sm90") == "convolutions"


def test_cliffs_that_gain_most_of_their_run_come_first() -> None:
    many = [
        {"workload": w, "cliffs": [{"gain": g} for g in of]} for w, of in (("a", [0.5, 0.1]), ("b", [0.3]), ("c", []))
    ]
    assert [(c["workload"], c["gain"]) for c in roofline.listed([*many, {"workload": "d"}])] == [
        ("a", 0.5),
        ("b", 0.3),
        ("a", 0.1),
    ]


def test_first_runs_of_a_length_count_compilations() -> None:
    from benchmarks.kinds import waits

    assert set(waits.PARTS) == {"build", "load", "call", "retune", "plan"}
    pytest.importorskip("cuda.bindings.nvrtc")
    assert callable(importlib.import_module("optdnn.runtime.cuda.compile.nvrtc").compile_recipe), (
        "the program of PLAN counts its calls"
    )


@pytest.mark.slow
def test_a_build_and_a_load_are_timed_on_the_cpu(tmp_path: Path) -> None:
    from benchmarks.kinds import waits

    for part in ("build", "load"):
        made = job("waits", GELU, tmp_path, "--target", "cpu", "--parts", part)
        found = waits.measure(made)
        assert found["the_same_bytes"] if part == "build" else found["median_s"] > 0


@pytest.mark.slow
def test_precisions_are_scored_in_simulation(tmp_path: Path) -> None:
    workload = Workload("trained/digits_gru", 32, "auto")
    found = precision.measure(job("precision", workload, tmp_path, "--target", "simulate", "--configurations", "fp"))
    assert set(found["configurations"]) == {"fp32", "fp16"}
    assert all(c["accuracy"] > 95 and "ms" not in c for c in found["configurations"].values())


# ---------------------------------------------------------------- kernels


FIRST = frozenset(
    {
        "8 bits, padded: a stem, last column not read", "8 bits: attention to fp8",
        "a first convolution and its pool", "a first convolution and its pool, by wgmma",
        "a grid that keeps an image", "attention between channels", "attention between channels over many tokens",
        "attention in parts, tf32: sinks", "attention of fp32: full mask", "attention over a cache",
        "attention: heads of 264", "chained convolutions", "depthwise by TMA", "depthwise by TMA, whole images",
        "depthwise tf32", "dynamic scales: rows", "experts fp16", "experts fp32", "far strides fp8",
        "filtered gates fp32: large filters",
        "groups: groups of large images and vectors", "groups: instances in plain order",
        "groups: instances of images and a vector", "layers in one launch", "norms across",
        "norms and rotary: tokens, grouped", "packed weights: by gemv", "packed weights: by mma",
        "packed weights: by resident", "packed weights: gated", "packed weights: in 8 bits",
        "packed weights: teams in clusters", "padded operators: wrapped", "recurrent: grid rnn both",
        "recurrent: gru other", "recurrent: lstm stacked", "rotary: neighbors", "sampling 32000 tokens",
        "scalar tiles", "separable", "stacks fp32: turned, odd", "stacks tf32: rows", "stems fp16",
        "suppression of boxes", "top rows, equal elements",
    }
)  # fmt: skip
"""Networks that together reach every kernel; the others are lowered only if one of these no longer does."""


@pytest.mark.slow
def test_every_kernel_of_engines_is_run_under_the_sanitizers() -> None:
    from support import sanitizer_nets
    from support.simulated import lowered

    from optdnn.runtime.cuda.compile.nvrtc import template_files

    left = {name for name in template_files() if name.endswith(".cu")} - {
        "timer.cu",
        "all_reduce.cu",
        "flagged.cu",
    }  # by the tuner, for several GPUs
    for name, (build, at) in sorted(sanitizer_nets.graphs().items(), key=lambda item: item[0] not in FIRST):
        if left and name not in sanitizer_nets.GENERAL and at != "bf16":
            with sanitizer_nets.forced(name):
                program = lowered(build(), at, target="cuda:sm_90a", no_cubins=True)
            left -= {k.template for k in program.kernels}
    assert not left


def test_reports_of_a_sanitizer_are_rows(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.kinds import sanitize

    text = "ran a b: 1 launches\nInvalid write at global_average_pool\nHost Frame: x"
    both = sanitize.rows_of("memcheck", f"a b{sanitize.AND}c", 0, True, text)
    assert [(r["workload"], r["verdict"]) for r in both] == [("kernels/a_b", "clean"), ("kernels/c", "clean")]
    (reported,) = sanitize.rows_of("memcheck", "a", 0, False, text)
    assert reported["reported"] == text.splitlines()[:2]
    (caught,) = sanitize.rows_of("memcheck", "int8", 1, False, text)
    (missed,) = sanitize.rows_of("memcheck", "int8", 1, True, text)
    assert (caught["verdict"], missed["verdict"]) == ("caught", "missed")
    assert sanitize.summarize([*both, caught], ["memcheck"], ["a b", "c"]) == 0
    assert sanitize.summarize([*both, missed], ["memcheck"], ["a b", "c", "int8"]) == 1
    assert sanitize.summarize([reported], ["memcheck"], ["a"]) == 1
    assert "memcheck a: REPORTED" in capsys.readouterr().out


@pytest.mark.slow
def test_random_networks_resume_in_the_one_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["random", "--target", "reference", "--family", "soup", "--jobs", "1", "--out", str(tmp_path / "r.jsonl")]
    assert main([*words, "--seeds", "0:1"]) == 0
    assert main([*words, "--seeds", "0:2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 trials in ")
    found = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [r["workload"] for r in found if "workload" in r] == ["random/soup-0", "random/soup-1"]
