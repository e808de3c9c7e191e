"""The network of a report: operators and their times, findings in order of their gain, lanes and memory, and the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.onnxnet import HOSTILE, save_convnet

import optdnn
from optdnn.errors import EngineError
from optdnn.report.drawing import Drawing, draw
from optdnn.report.explanation import Explanations
from optdnn.report.findings import Finding, findings, slower_steps
from optdnn.report.html import bench_html, build_html
from optdnn.report.network import Network, Node, add_errors, add_times, label_of, network_of
from optdnn.report.page import render, source_of
from optdnn.report.picture import picture
from optdnn.report.timeline import memory_of, time_by_kind, timeline_of
from optdnn.runtime.measuring.bench import bench
from optdnn.runtime.program import Buffer, Program, Slot, Step
from optdnn.types import TensorSpec

FP32 = np.dtype(np.float32)


def program_of(*steps: Step, lanes: tuple[Slot, ...] = (), buffers: int = 8, **meta: Any) -> Program:
    """Steps over buffers of 1 KiB. Buffer 0 is the input, the last one the output."""
    made = [
        Buffer(f"b{k}", FP32, (256,), offset=None if k in (0, buffers - 1) else 1024 * (k - 1)) for k in range(buffers)
    ]
    spec = TensorSpec("x", FP32, (256,))
    return Program(
        "cuda:sm_90a", "fp16", ((spec, 0),), ((spec, buffers - 1),), tuple(made), steps, [], 1024 * (buffers - 2),
        lanes=lanes, meta=meta,
    )  # fmt: skip


def step(kind: str, reads: tuple[int, ...], writes: int, *src: str, executor: str = "cuda", **attrs: Any) -> Step:
    return Step(
        executor, {"op": {"kind": kind, "attrs": attrs}, "tactic": f"{kind.lower()}_half a1"}, reads, (writes,), src
    )


def row(k: int, us: float, roofline: float | None = None, **more: Any) -> dict[str, Any]:
    return {"step": k, "us": us, "share": us / 100, "roofline": roofline, **more}


def chain(*kinds: str, executors: dict[int, str] | None = None, **meta: Any) -> Program:
    given = executors or {}
    steps = [step(kind, (k,), k + 1, f"n{k}", executor=given.get(k, "cuda")) for k, kind in enumerate(kinds)]
    return program_of(*steps, buffers=len(kinds) + 1, **meta)


def found_in(program: Program, rows: list[dict[str, Any]], **report: Any) -> list[Finding]:
    net = network_of(program)
    add_times(net, rows)
    return findings(net, report)


# ---------------------------------------------------------------- the network


def test_steps_are_operators_and_buffers_are_edges() -> None:
    program = program_of(
        step("Conv", (0,), 1, "a", epilogue=[{"stage": ["Relu", [-1], {}]}]),
        step("Conv", (1,), 2, "b"),
        step("Pointwise", (1, 2), 7, "c", epilogue=[{"stage": ["Mul", [-1, 0], {}]}, {"stage": ["Add", [-1, 0], {}]}]),
    )
    net = network_of(program)
    assert [n.label for n in net.nodes] == ["x", "Conv + Relu", "Conv", "Mul + Add", "x"]
    assert [n.role for n in net.nodes] == ["input", "operator", "operator", "operator", "output"]
    assert list(net.edges) == [(0, 1), (1, 2), (1, 3), (2, 3), (3, 4)]
    assert net.nodes[1].result == "fp32[256]"
    many = step("Conv", (0,), 1, epilogue=[{"stage": [k, [-1], {}]} for k in "abcde"])
    assert label_of(many) == "Conv + a + b + c …"


def test_a_librarys_step_shows_its_operators(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    engine = optdnn.build(save_convnet(tmp_path / "net.onnx"), target="cpu", threads=1, tactics="openvino")
    net = network_of(engine.program)
    assert [n.label for _, n in net.operators()] == [
        "Conv + Relu",
        "Conv + Add + Relu",
        "GlobalAveragePool",
        "Flatten",
        "Gemm",
    ]
    assert {n.step for _, n in net.operators()} == {0}
    assert net.nodes[1].src == ("bn1", "conv1", "relu1")
    layers = [
        {"step": 0, "name": "bn1 + conv1 + relu1", "kind": "brgconv", "median_ms": 0.5, "share": 0.5},
        {"step": 0, "name": "head + flatten", "kind": "gemm", "median_ms": 0.25, "share": 0.25},
        {"step": 0, "name": "layout changes", "kind": "reorder", "median_ms": 0.25, "share": 0.25},
    ]
    steps = [{"step": 0, "median_ms": 1.0, "share": 1.0}]
    add_times(net, steps, layers)
    times = {n.label: (n.us, n.tactic) for _, n in net.operators() if n.us is not None}
    assert times == {"Conv + Relu": (500.0, "brgconv"), "Gemm": (250.0, "gemm")}
    assert [f.text for f in findings(net, {"layers": layers})] == [
        "The library changes layouts between its kernels: 0.25 ms, 25.0% of the run."
    ]
    engine.program.blobs[int(engine.program.steps[0].params["model"])] = np.frombuffer(b"\xff\xff\xff", np.uint8)
    with pytest.raises(EngineError, match="not ONNX"):
        network_of(engine.program)


def test_errors_belong_to_the_operators_that_hold_their_nodes() -> None:
    net = Network()
    a = net.add(Node("operator", "Conv", ("conv", "bn", "relu"), 0), ())
    b = net.add(Node("operator", "Gemm", ("head",), 1), [a])
    layers = [
        {"node": "bn + conv", "e": 1e-3},
        {"node": "bn + conv + relu", "e": 1e-5},
        {"node": "head", "e": None},
        {"node": "head + other", "e": 9.0},
    ]
    add_errors(net, layers, lambda layer: layer["e"])
    assert net.nodes[a].error == 1e-3
    assert net.nodes[b].error == "not finite"


# ---------------------------------------------------------------- findings


def test_conversions_and_copies_are_counted_together() -> None:
    program = chain("Cast", "Conv", "Cast", "Transpose")
    casts, moves = found_in(program, [row(0, 3, 0.9), row(1, 80, 0.9), row(2, 9, 0.9), row(3, 8, 0.9)])
    assert casts.text == "2 conversions between precisions: 12.0 µs, 12.0% of the run."
    assert (casts.gain_us, casts.nodes) == (12.0, (1, 3))
    assert "--io-dtype" in casts.advice
    assert moves.text.startswith("1 operator only moves data (Transpose): 8.0 µs")


def test_operators_on_the_cpu_come_with_their_copies_and_the_reason() -> None:
    steps = [
        step("Conv", (0,), 1, "a"),
        Step("copy", {"to": "host"}, (1,), (2,), ()),
        step("NonZero", (2,), 3, "odd", executor="host"),
    ]
    host = {"operators": [{"nodes": ["odd"], "why": "its size is not known"}]}
    (cpu,) = found_in(program_of(*steps, buffers=4), [row(0, 60, 0.8), row(1, 10), row(2, 30)], host=host)
    assert cpu.text == "1 operator runs on the CPU: with the copies 40.0 µs, 40.0% of the run."
    assert cpu.advice.startswith("The reason of most: its size is not known.")
    assert cpu.nodes == (2, 3)


def test_slow_steps_of_one_reason_are_one_finding() -> None:
    rows = [row(k, 30.0, r) for k, r in enumerate((0.1, 0.2, 0.9))]
    cliffs = [{**rows[k], "gain_us": 10.0 * (k + 1), "why": "4 blocks do not fill it"} for k in (0, 1)]
    (slow,) = found_in(chain("Conv", "Conv", "Conv"), rows, cliffs=cliffs)
    assert slow.text == "2 steps of Conv reach 10% to 20% of the roofline: 60.0 µs, 66.7% of the run."
    assert slow.advice.startswith("4 blocks do not fill it. At 25% of the roofline the run gains 30.0 µs")
    assert slow.gain_us == 30.0


def test_short_launches_and_predicted_times_are_reported() -> None:
    rows = [row(k, 2.0, 0.1, source="predicted") for k in range(3)]
    short, predicted = found_in(chain("Conv", "Conv", "Gemm"), rows)
    assert short.text == "3 kernels are so short that their launches set their time: 6.0 µs, 100.0% of the run."
    assert short.gain_us == pytest.approx(5.4)
    assert predicted.gain_us is None
    assert "retune" in predicted.advice
    assert found_in(chain("Conv"), [row(0, 2.0, 0.1)]) == []  # a single one


def test_whole_runs_refusals_and_precisions_are_found_in_order_of_the_gain() -> None:
    stats = {"median": 0.1}
    report = {
        "subject": "own",
        "rows": [{"name": "own", "median_ms": 1.5}, {"name": "other", "median_ms": 1.0}],
        "versus": [{"against": "other", "speedup": 0.667, "verdict": "slower"}, {"against": "third", "verdict": "faster"}],
        "gpu": {"h2d_ms": {"median": 0.2}, "d2h_ms": {"median": 0.1}, "gpu_compute_ms": stats},
        "beside_fp32": {
            "slower": True, "precision": "int8",
            "own": {"median_ms": 1.5, "tactic": "a"}, "fp32": {"median_ms": 0.7, "tactic": "b"},
        },
        "auto": {"nodes": [{"nodes": ["n0"], "precision": "fp32", "us": {"fp32": 60.0, "fp16": 20.0}}]},
        "passes": [{"name": "p", "refused": [{"rule": "r", "nodes": ["n0"], "reason": "it is used twice"}]}],
    }  # fmt: skip
    net = network_of(chain("Conv", "Gemm"))
    add_times(net, [row(0, 60, 0.9), row(1, 40, 0.9)])
    found = findings(net, report)
    assert [f.gain_us and round(f.gain_us) for f in found] == [800, 500, 300, 40, None]
    texts = [f.text for f in found]
    assert texts[0].startswith("Int8 is slower than fp32")
    assert texts[1] == "other is 1.50× as fast: it takes 1 ms."
    assert texts[2] == "Copies to and from the GPU take 0.3 ms, its own work 0.1 ms."
    assert texts[3] == "1 operator stays in fp32 to keep the accuracy: 40.0 µs."
    assert texts[4] == "1 rewrite by p/r refused, at operators that take 60.0% of the run."
    assert found[4].advice == "The reason: it is used twice."


def test_steps_of_little_cost_are_not_reported() -> None:
    assert found_in(chain("Cast", "Conv"), [row(0, 0.1, 0.9), row(1, 99.9, 0.9)]) == []


def test_of_two_engines_the_slower_steps_are_reported() -> None:
    net = network_of(chain("Conv", "Gemm"))
    changes = [
        {"name": "n0", "a": 2.0, "b": 1.0},
        {"name": "n1", "a": 1.0, "b": 4.0},
        {"name": "gone", "a": 1.0, "b": None},
    ]
    (slower,) = slower_steps(changes, net)
    assert (slower.gain_us, slower.nodes) == (3.0, (2,))
    drawing = draw(chain("Conv", "Gemm"), {}, changes=changes)
    mode = drawing.data["modes"][0]
    assert (mode["key"], mode["classes"]) == ("change", ["", "d4", "d0", ""])


# ---------------------------------------------------------------- lanes and memory


def test_a_step_begins_after_its_lane_and_its_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        step("Conv", (0,), 1, "a"),
        step("Conv", (0,), 2, "b"),
        step("Conv", (0,), 3, "c"),
        step("Add", (1, 2, 3), 7, "d"),
    ]
    lanes = (Slot(0), Slot(1), Slot(1), Slot(0, (2,)))
    program = program_of(*steps, lanes=lanes)
    net = network_of(program)
    add_times(net, [row(0, 10), row(1, 20), row(2, 20), row(3, 10)])
    timeline = timeline_of(net, program)
    assert timeline is not None
    assert timeline.total_us == 50.0
    assert [name for name, _ in timeline.lanes] == ["lane 0", "lane 1"]
    assert [[(b.begin, b.length) for b in bars] for _, bars in timeline.lanes] == [
        [(0, 20), (80, 20)],
        [(0, 40), (40, 40)],
    ]
    assert time_by_kind(net) == [("Conv", 3, 50.0, 100.0), ("Add", 1, 10.0, 20.0)]
    monkeypatch.setattr("optdnn.report.timeline.MOST_KINDS", 1)
    assert time_by_kind(net) == [("2 other kinds", 4, 60.0, 100.0)]
    assert timeline_of(network_of(program), program) is None


def test_memory_is_the_live_part_of_the_arena() -> None:
    program = program_of(step("A", (0,), 1), step("B", (1,), 2), step("C", (1, 2), 3), step("D", (3,), 7))
    memory = memory_of(program)
    assert memory is not None
    assert (memory.peak_bytes, memory.peak_step) == (3 * 1024, 2)
    assert [(t.x, t.width) for t in memory.tensors] == [(0, 75), (25, 50), (50, 50)]
    assert [round(y * 6 / 100) for _, y in memory.live] == [1, 1, 2, 2, 3, 3, 1, 1]
    assert memory_of(program_of(step("A", (0,), 7))) is None


# ---------------------------------------------------------------- facts and the page


def test_candidates_and_refusals_of_an_operator_are_reported() -> None:
    tactics = [
        {
            "kind": "Conv",
            "nodes": ["n0"],
            "tactic": "conv_half",
            "config": "a1",
            "refused": [{"tactic": "other", "reason": "too wide"}],
        }
    ]
    passes = [
        {"name": "fuse_epilogue", "fired": [{"rule": "epilogue_add", "nodes": ["n0", "gone"]}],
         "refused": [{"rule": "siblings", "nodes": ["n0"], "reason": "no other"}]}
    ]  # fmt: skip
    precision = {"nodes": {"fp16": ["n0"]}, "plan": {"default": "fp16", "nodes": {}}}
    program = chain("Conv", "Gemm", tactics=tactics, passes=passes, precision=precision)
    tuning = {
        "problems": [{"nodes": ["n0"], "chosen": "a1", "us": {"a1": 1.5, "b2": 2.5}, "failed": {"c3": "it hung"}}]
    }
    data = picture(network_of(program), Explanations(program, {"tuning": tuning}))
    node = data["nodes"][1]
    lists = {title: [data["texts"][k] for k in lines] for title, lines in node["lists"]}
    assert node["candidates"] == [["a1", 1.5, True], ["b2", 2.5, False]]
    assert lists["Rewrites made"] == ["fuse_epilogue: additions fused into the kernel before them, with gone"]
    assert lists["Rewrites refused"] == ["fuse_epilogue: products of one operand merged into one: no other"]
    assert lists["Tactics that refused"] == ["other: too wide"]
    assert lists["Candidates that failed"] == ["c3: it hung"]
    assert lists["Precision"] == ["fp16: as asked of the whole network"]
    assert ["precision", "none of its own"] in data["nodes"][2]["facts"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Drawing, dict[str, Any], Any]:
    names = {**HOSTILE, "pool": "</script><script>document.title='owned'</script>", "relu1": "<!--\u202e<script>"}
    engine = optdnn.build(
        save_convnet(tmp_path_factory.mktemp("net") / "net.onnx", names=names), target="simulate", precision="fp16"
    )
    report = dict(engine.report or {})
    return draw(engine.program, report), report, engine


def test_no_name_leaves_the_data_of_the_page(drawn: tuple[Drawing, dict[str, Any], Any]) -> None:
    drawing, report, _ = drawn
    text = build_html(report, drawing, "net.onnx")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert data is not None
    assert not set("<>&\u202e") & set(data[1])
    assert json.loads(data[1]) == drawing.data
    assert "\u202e" not in text
    assert len(re.findall(r"<script\b", text)) == 5  # the data, the library, three scripts of ours
    assert "document.title='owned'" not in text.replace(data[1], "")  # the tables escape the quotes
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].count("sha256-") == 4
    assert "unsafe-inline" not in policy[1].partition("script-src")[2]
    assert "Copyright (c) 2012-2014 Chris Pettitt" in text
    assert "sourceMappingURL" not in text


def test_sections_without_data_are_left_out(drawn: tuple[Drawing, dict[str, Any], Any]) -> None:
    drawing, report, _ = drawn
    full = re.findall(r'<section id="(\w+)">', build_html(report, drawing, "net"))
    assert full == ["findings", "network", "timeline", "memory", "operators", "passes", "machine"]
    program = chain("Conv", "Gemm")
    program.buffers = tuple(Buffer(b.name, b.dtype, b.shape) for b in program.buffers)
    bare = {
        "seconds": {},
        "options": {"target": "cuda", "precision": "fp16"},
        "machine": {},
        "versions": {"optdnn": "1"},
    }
    assert re.findall(r'<section id="(\w+)">', build_html(bare, draw(program, bare), "net")) == ["network", "machine"]
    assert "<script" not in render(
        "precision.html.j2", title="", heading="", sentences=[], plot=None, columns=[], rows=[], nodes=[], chosen=""
    )


def test_a_measurement_shows_its_distribution(drawn: tuple[Drawing, dict[str, Any], Any]) -> None:
    _, _, engine = drawn
    measured = {
        **bench(engine, {"x": np.zeros((1, 3, 8, 8), np.float32)}, iterations=12, with_profile=True),
        "precision_text": "fp16",
    }
    assert len(measured["distribution"]["quantiles_ms"]) == 101
    assert len(measured["distribution"]["round_medians_ms"]) == 5
    text = bench_html(measured, draw(engine.program, measured, measured=measured), "net.engine")
    assert text.count('class="chart latency"') == 1
    assert "measured in a run" in text
    stats = {"median": 0.1, "p99": 0.2}
    gpu = dict.fromkeys(("gpu_compute_ms", "latency_ms", "enqueue_ms", "h2d_ms", "d2h_ms"), stats)
    gpu |= {
        "distributions": dict.fromkeys(gpu, measured["distribution"]),
        "remarks": ["only 12 runs"],
        "throughput_per_s": 9.0,
    }
    text = bench_html({**measured, "gpu": gpu}, draw(engine.program, measured, measured=measured), "net.engine")
    assert text.count('class="chart latency"') == 4
    assert "only 12 runs" in text


def test_the_layout_library_is_the_one_that_its_readme_names() -> None:
    import hashlib

    digest = hashlib.sha256(source_of("vendor/dagre.min.js").encode()).hexdigest()
    assert digest in source_of("vendor/README.md")
    assert "Permission is hereby granted" in source_of("vendor/dagre.min.js.LEGAL.txt")
    for name in ("vendor/dagre.min.js", "layout.js", "details.js", "network.js"):
        assert "</script" not in source_of(name)
        assert "<!--" not in source_of(name)


def test_a_large_network_stays_small_and_quick() -> None:
    kinds = ["Conv", "Add", "Relu"] * 400
    program = chain(*kinds)
    drawing = draw(program, {}, measured={"profile": [row(k, 1.0, 0.5) for k in range(len(kinds))]})
    assert len(json.dumps(drawing.data)) < 700 * len(kinds)
