"""The tables of the documents: their rows. ``tests/docs`` compares the documents with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks.harness", reason="an installed copy has no benchmarks")

from benchmarks import figures
from benchmarks.__main__ import main
from benchmarks.figures import checks, cpu, decoding, gpu, waits, wide
from benchmarks.figures.markdown import geometric, measured_on, note, shortened
from benchmarks.rows import RESULTS, read

RUN = {
    "run": "r", "command": "python x", "commit": "12345678ab", "date": "2026-11-20",
    "machine": {"cpu": "C", "cores": 2, "gpu": "NVIDIA H200", "driver": "580"}, "versions": {"torch": "2.11", "numpy": "2"},
}  # fmt: skip


def test_every_table_has_its_results() -> None:
    assert set(figures.tables(RESULTS)) == set(figures.TABLES)


def test_results_are_small() -> None:
    assert sum(p.stat().st_size for p in RESULTS.glob("*")) < 600_000


def test_without_results_there_are_no_tables(tmp_path: Path) -> None:
    assert figures.tables(tmp_path) == {}
    with pytest.raises(ValueError, match="mean of no values"):
        geometric([])


def test_the_readmes_tables() -> None:
    rows = [
        row("zoo/lstm:1@fp16", times=ms(ours=0.1, libraries=0.2, eager=0.4)),
        row("zoo/lstm:1@fp16", "cuda:sm_90a ours,compile", times=ms(ours=0.1, compile=0.5, compile_max=0.3)),
        row("zoo/resnet50:1@fp16", times=ms(ours=0.15, eager=0.4)),
    ]
    assert gpu.readme(rows).splitlines()[2:] == [
        "| resnet50, 1 | 0.150 | – | – | 0.400 |",
        "| lstm, 1 | 0.100 | 0.200 | 0.300 | 0.400 |",
    ]
    over = {"onnxruntime": 2.0, "openvino": 1.0}
    found = [row(w, "cpu onnxruntime,openvino", times=ms(optdnn=2.0), over=over) for w in cpu.README[1:3]]
    lines = cpu.readme(found).splitlines()
    assert "| resnet50 | bf16 | 2.00 | 2.00× | 1.00× |" in lines
    assert lines[-1] == "| geometric mean of 1 | fp32 |  | 2.00× | 1.00× |"


def row(workload: str, setup: str = "cuda:sm_90a ours,eager", what: str = "speed", **more: Any) -> dict[str, Any]:
    return {"workload": workload, "what": what, "setup": setup, "run": RUN, "checks": {}, **more}


def ms(**times: float) -> dict[str, Any]:
    return {n.replace("_max", "-max"): {"ms": t} for n, t in times.items()}


def test_the_table_of_targets() -> None:
    rows = [
        row("zoo/resnet50:8@fp16", times=ms(ours=0.25, eager=1.2)),
        row(
            "zoo/resnet50:1@fp16",
            times=ms(ours=0.5, eager=1.7, untuned=0.4, libraries=0.8),
            builds={"libraries": {"library_steps": 3}},
        ),
        row(
            "zoo/resnet50:1@fp16",
            "cuda:sm_90a ours,compile",
            times=ms(ours=9.0, eager=9.0, compile=1.2, compile_max=1.0),
        ),
        row("zoo/lstm:1@fp16", times=ms(ours=9.0, eager=9.0)),
        row("zoo/resnet50:128@int8+fp16", times=ms(ours=3.0, eager=9.0)),
        row("zoo/vgg16:1@fp16", error="lost"),
    ]
    rows[3]["checks"] = {"ours": {"wrong": "0.5", "error_rel": 0.5}}
    rows[4]["checks"] = {"ours": {"wrong": "0.3", "error_rel": 0.3}}
    text = gpu.targets(rows)
    lines = text.splitlines()
    assert (
        "| network, batch | optdnn ms | not tuned ms | libraries ms | eager ms | torch.compile ms | to reach |" in lines
    )
    assert "| resnet50, 1 | 0.500 | 0.400 | 0.800 | 1.700 | 1.000 | 0.135 |" in lines
    assert "| resnet50, 8 | **0.250** | – | – | 1.200 | – | 0.26 |" in lines
    assert "| lstm, 1 | 9.000 (wrong) | – | – | 9.000 | – | 0.11 |" in lines
    assert "| resnet50, 128, int8+fp16 | 3.000 (off by 0.30) | – | – | 9.000 | – | 1.45 |" in lines
    assert "are 2.00 times as fast as the libraries alone in geometric mean over 1 rows (the least: 2.00)" in text
    assert "is 2.00 times as fast as torch.compile in geometric mean over 1 rows" in text
    assert "vgg16" not in text


def test_rows_of_other_gpus_have_a_table_of_their_own() -> None:
    other = {**RUN, "machine": {**RUN["machine"], "gpu": "NVIDIA H100 80GB HBM3"}}
    rows = [
        row("zoo/resnet50:1@fp16", times=ms(ours=0.25, eager=1.0)),
        row("zoo/resnet50:1@fp16", "cuda ours,eager", times=ms(ours=0.5, eager=1.5)) | {"run": other},
    ]
    assert "| resnet50, 1 | 0.500 | 1.500 | 3.0× |" in gpu.h100(rows)
    assert "| resnet50, 1 | 0.250 | 1.000 | 0.135 |" in gpu.targets(rows)
    assert gpu.h100(rows[:1]) == ""


MIXER, SIGLIP, BERT = (
    "timm/mixer_b16_224:16@fp16",
    "transformers/siglip_vision:8@fp16",
    "transformers/bert_large:16@fp16",
)
WHY = "norm refuses: its rows | are <odd>"
WORDS = [
    {"word": w, "share": s, "at_roofline": r}
    for w, s, r in (("products", 0.6, 0.5), ("norms", 0.38, 0.1), ("moves", 0.02, 0.3))
]


def wide_rows() -> list[dict[str, Any]]:
    """Rows of two runs: one with torch.compile and an older one without it, with the longest search, and profiles."""
    other = {**RUN, "run": "s", "commit": "abcdef0123"}
    cliff = {"step": 3, "tactic": "layer_norm", "us": 40.0, "share": 0.4, "roofline": 0.05, "gain_us": 32.0, "gain": 0.32,
             "why": WHY, "nodes": "/norm"}  # fmt: skip
    return [
        row(BERT, "cuda:sm_90a ours,eager,compile", times=ms(ours=4.0, eager=9.0, compile=8.0)),
        row(MIXER, times=ms(ours=9.0, eager=9.0)),
        row(MIXER, "cuda:sm_90a ours,eager,compile", times=ms(ours=1.2, eager=2.4, compile=1.8)) | {"run": other},
        row(SIGLIP, "cuda:sm_90a ours,eager,compile", times=ms(ours=1.0, eager=1.5, compile=0.9)),
        row(SIGLIP, "cuda:sm_90a ours,eager,compile-max", times=ms(ours=1.0, eager=1.5, compile_max=0.75)),
        row("timm/hrnet_w18_small:1@fp16", "cuda:sm_90a ours,eager,compile", error="measure: no end in 400 s"),
        row("zoo/lstm:1@fp16", "cuda:sm_90a ours,eager,compile", times=ms(ours=9.0, eager=9.0, compile=9.0)),
        row(SIGLIP, "cuda:sm_90a", "roofline", at_roofline=0.25, cliffs=[cliff], count=60, words=WORDS),
        row(BERT, "cuda:sm_90a", "roofline", at_roofline=0.5, cliffs=[], count=80, times=ms(ours=4.0), words=WORDS),
        row(MIXER, "cuda:sm_90a predicted", "roofline", at_roofline=0.9, cliffs=[cliff], count=60, words=WORDS),
    ]


def test_the_page_of_the_wide_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "EXPLAINED", {MIXER: "Its products have odd sizes"})
    text = wide.page(wide_rows())
    assert "optdnn is **1.39 times** as fast as torch.compile (default mode) in geometric mean of 3 pairs." in text
    assert "Slower: 1. Under 2 times: 2 (the least: 0.90)." in text
    readme = wide.readme(wide_rows())
    assert "has 3 pairs" in readme
    assert "optdnn is 1.39 times as fast as `torch.compile` in geometric mean, and slower on 1." in readme
    assert "Without a result: hrnet_w18_small, 1 (measure: no end in 400 s)." in text
    lines = text.splitlines()
    assert "| mixer_b16_224, 16 | 1.200 | 1 |" in lines
    assert "| bert_large, 16 | **4.000** | 6.2 |" in lines
    slow = [line for line in lines if (line.endswith("|") and "takes" in line) or "odd sizes" in line]
    reason = "norm refuses: its rows \\| are \\<odd\\>"
    assert slow == [
        "| siglip_vision, 8 | 0.90× | 25% | 60 launches: products 60% (50%), norms 38% (10%). "
        f"layer\\_norm takes 40% at 5% of its roofline: {reason} |",
        "| mixer_b16_224, 16 | 1.50× | – | Its products have odd sizes |",
    ]
    assert "| mixer_b16_224, 16 | 1.200 | 2.400 | 1.800 | 1.50× |" in lines, "the newer row, beside torch.compile"
    assert "| siglip_vision, 8 | 1.000 | 0.750 | 0.75× |" in lines
    assert f"| siglip_vision, 8 | 32% | 40% | 5% | layer\\_norm | {reason} |" in lines
    assert "1 steps of 1 pairs are below" in text
    assert "commit abcdef01, 12345678" in text, "the facts of both runs"
    assert "lstm" not in text


def test_kept_rows_of_several_runs_become_the_page(tmp_path: Path) -> None:
    kept, every = tmp_path / "kept", wide_rows()
    kept.mkdir()
    for r in every:
        r["checks"] = {"ours": {"error_rel": 0.001}}
    for k, rows in enumerate((every[1:2], [every[0], every[2]], every[3:9])):
        runs = {r["run"]["run"]: r["run"] for r in rows}
        lines = [*runs.values(), *({**r, "run": r["run"]["run"]} for r in rows)]
        file = tmp_path / f"{k}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        assert main(["keep", str(file), "--folder", str(kept)]) == 0
    found = figures.tables(kept)["wide"]
    assert found.splitlines()[:20] == wide.page(every).splitlines()[:20]
    assert "commit abcdef01, 12345678" in found, "the facts of both runs"
    setups = {r["setup"] for r in read(kept / "speed.jsonl") if r["workload"] == MIXER}
    assert setups == {"cuda:sm_90a ours,eager,compile"}, "the older row without torch.compile went"


def test_a_pair_without_slow_steps_is_explained_by_its_kinds_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "EXPLAINED", {})
    quick = row(SIGLIP, "cuda:sm_90a", "roofline", count=80, times=ms(ours=0.2), cliffs=[], words=WORDS)
    assert wide.explanation(SIGLIP, quick) == "80 launches: products 60% (50%), norms 38% (10%)"
    assert wide.explanation(SIGLIP, None) == "not looked into"


def test_pages_show_the_kinds_that_have_rows() -> None:
    beside_eager = wide.page([row(MIXER, times=ms(ours=1.0, eager=3.0)), *wide_rows()[-1:]])
    assert "Compared with eager PyTorch, it is 3.00 times as fast in geometric mean of 1 pairs" in beside_eager
    for absent in ("torch.compile (default mode)", "## Under", "## Slow steps", "## Beside"):
        assert absent not in beside_eager
    shaken = row(MIXER, times=ms(ours=1.0, eager=3.0), disturbed=True) | {"checks": {"ours": {"wrong": "inf"}}}
    assert "The GPU was not quiet before: mixer_b16_224, 16." in wide.page([shaken])
    assert "Errors beyond rounding, or not finite: mixer_b16_224, 16." in wide.page([shaken])
    assert wide.page(wide_rows()[-3:]) == wide.readme(wide_rows()[-3:]) == ""


def test_a_newer_row_takes_the_time_of_torch_compile_from_an_earlier_run() -> None:
    newer = row(BERT, times=ms(ours=2.0, eager=9.9)) | {"run": {**RUN, "run": "n", "commit": "fedcba9876"}}
    text = wide.page([*wide_rows(), newer])
    assert "| bert_large, 16 | 2.000 | 9.900 | 8.000 | 4.00× |" in text.splitlines()
    assert "For 1 pairs, torch.compile's times are from an earlier run" in text
    assert "(eager PyTorch took 1.100 times as long in our run, median)." in text
    assert "fedcba98" in text
    again = row(BERT, "cuda:sm_90a ours,eager,compile", times=ms(ours=2.0, eager=9.0, compile=7.0))
    assert "from an earlier run" not in wide.page([*wide_rows(), newer, again])


def test_the_tables_of_lanes_and_growth() -> None:
    lanes = [
        row("zoo/yolox_s:4@fp16", times=ms(ours=0.2, one_lane=0.3), builds={"ours": {"lanes": 3, "aside": 9}}),
        row("zoo/lstm:1@fp16", times=ms(ours=0.2, one_lane=0.2), builds={"ours": {"lanes": 1}}),
    ]
    text = gpu.lanes(lanes)
    assert "| yolox_s, 4 | 300.0 | 200.0 | 1.50× | 3 | 9 |" in text
    assert "Not the same bits: yolox_s, 4; lstm, 1. No independent steps worth a lane: lstm, 1." in text
    alike = [{**r, "checks": {"one_lane": {"same_bits": True}}} for r in lanes]
    assert "Results are the same bits. No" in gpu.lanes(alike)
    assert gpu.lanes(lanes[1:]) == ""
    name = "zoo/bert_base:1:max_positions=2048:sequence_length=64@fp16"
    assert "| bert_base, 64 | 0.200 | 0.600 | 3.0× |" in gpu.growth([row(name, times=ms(ours=0.2, eager=0.6))])


def test_the_table_of_checks() -> None:
    steps = {"count": 1000, "worst": [1e-7]}
    rows = [
        row("zoo/a:1@fp32", "cuda:sm_90a", "correctness", verdict="right", steps=steps),
        row("zoo/b:1@fp32", "cuda:sm_90a", "correctness", verdict="wrong", steps={"count": 5, "worst": [0.5]}),
        row("zoo/c:1@fp32", "cuda:sm_90a", "correctness", verdict="right"),
        row("zoo/c:1@fp32", "cuda:sm_80 compiled for sm_90a", "correctness", verdict="wrong"),
        row("cases/all@fp32", "cuda", "cases", tried=3, wrong=[{}]),
        row("kernels/x", "memcheck", "sanitize", verdict="clean"),
        row("kernels/y", "memcheck", "sanitize", verdict="reported"),
        row("kernels/seeded_fault", "memcheck", "sanitize", verdict="caught"),
        row("zoo/a:1@fp16", "cuda 1,9", "invariance", verdict="right", rows={"control": {"1": 3}}),
    ]
    text = checks.correctness(rows)
    assert "| fp32 | 2 of 3 | 1,005 | 1e-07 | 2 of 3 |" in text
    assert "Not launch by launch: c. Not right: b, 1, fp32." in text
    assert "memcheck 1 of 2; each caught the fault seeded for it." in text
    assert "the rows of 1 of 1 networks have the same bits" in text
    missed = [r if r["workload"] != "kernels/seeded_fault" else {**r, "verdict": "missed"} for r in rows]
    assert "the fault seeded for memcheck was not caught." in checks.correctness(missed)


def test_the_table_of_waits() -> None:
    name = "zoo/resnet50:1@fp16"
    rows = [
        row(name, "cuda:sm_90a build", "waits", cold={"seconds": 61.25}, warm={"seconds": 3.5}, the_same_bytes=True),
        row(name, "cuda:sm_90a load", "waits", error="no"),
        row(name, "cuda:sm_90a call", "waits", bound={"call_us": 3.04}),
        row(name, "cuda:sm_90a retune", "waits", before_ms=0.2, after_ms=0.1, seconds=21.0),
        row(name, "cuda:sm_90a plan", "waits", import_s=0.4, lengths=[
            {"first_s": 1.5, "kernels_compiled": 0}, {"first_s": 0.3, "kernels_compiled": 0},
            {"first_s": 2.0, "kernels_compiled": 6},
        ]),
    ]  # fmt: skip
    lines = waits.waits(rows).splitlines()
    assert "| the same, caches warm | 3.5 s, the same bytes | 5 s |" in lines
    assert "| Python's part of a call with bound buffers | 3.0 µs | 20 µs |" in lines
    assert not [line for line in lines if "first result" in line]
    assert "| at a further such length, no kernel compiled | 0.30 s | 0.5 s |" in lines
    assert "| at a further such length, 6 kernels compiled | 2.00 s |  |" in lines
    assert [line for line in lines if line.endswith("the first of a process | 1.9 s |  |")]


def test_the_tables_of_the_cpu() -> None:
    times = ms(optdnn=2.0, onnxruntime=4.0, openvino=2.0)
    over = {"onnxruntime": 2.0, "openvino": 1.0}
    text = cpu.speed("fp32", [row("light/x:1@fp32", "cpu onnxruntime,openvino", times=times, over=over, threads=2)])
    assert "| light_x | 2.00 | 2.00× | 1.00× | 1.00× |" in text
    auto = {"chosen": "int8", "bound": 0.5, "declined": ["int8 declined: it is slower", "bf16 declined: x"]}
    configurations = {
        "fp32": {"accuracy": 99.0, "ms": 0.2, "engine_bytes": 2000, "precision": "fp32"},
        "int8": {"error": "no"},
        "auto 0.5": {"accuracy": 98.8, "ms": 0.1, "engine_bytes": 1000, "precision": "int8", "auto": auto,
                     "over_best": {"verdict": "faster", "speedup": 2.0, "single": "fp32"}},
    }  # fmt: skip
    text = cpu.precision("cpu", [row("trained/net:32@auto", "cpu", "precision", configurations=configurations)])
    assert "### net" in text
    assert "| fp32 | 99.00 % | 0.200 | 2 |  |  |" in text
    assert "| **auto 0.5** | 98.80 % | 0.100 | 1 | int8 | 2.00× fp32 |" in text
    assert "- net: int8 declined: it is slower." in text
    assert "bf16 declined" not in text


def test_runs_are_reported_once() -> None:
    other = {**RUN, "commit": "", "date": "2026-11-22", "command": "python y"}
    rows = [{"run": RUN}, {"run": RUN}, {"run": other}]
    assert measured_on(rows) == "NVIDIA H200, driver 580; torch 2.11; 2026-11-20 to 2026-11-22, commit 12345678"
    assert "```text\npython x\npython y\n```" in note("So.", rows)
    assert note("So.", []) == ""


def test_the_table_of_decoders() -> None:
    name = "decoders/llama_8b:16:layers={}:bits=4@fp16"
    rows = [
        row(name.format(2), "cuda:sm_90a beside PyTorch", "decode", times=ms(ours=0.4, torch=0.8)),
        row(name.format(2), "cuda:sm_90a", "decode", times=ms(ours=0.3)),
        row(name.format(4), "cuda:sm_90a", "decode", times=ms(ours=0.5, torch=1.2)),
        row(
            "decoders/llama_8b:1:layers=2@fp16", "cuda:sm_90a", "decode", times=ms(ours=0.3)
        ),  # a row without it has no figure for 32
        row("decoders/llama_1b:1@fp16", "cuda:sm_90a", "decode", times=ms(ours=0.8)),
        row(
            "decoders/llama_8b:1:layers=4:tokens=2048@fp16",
            "cuda:sm_90a",
            "decode",
            times=ms(ours=5.0),
            tflop_per_s=540.4,
        ),
    ]
    text = decoding.decoding(rows)
    lines = text.splitlines()
    assert lines[2].startswith("| Llama 3 8B | 4 bits | 16 | 3.300 | 4,848 | "), "0.3 + 30 * 0.1"
    assert lines[2].endswith(" | 6.80 |")
    assert lines[3].startswith("| Llama 3.2 1B | fp16 | 1 | 0.800 | 1,250 | 73% | – |")
    assert lines[4] == ""
    assert (
        "A prompt of 2,048 tokens through 4 layers and the head of Llama 3 8B (fp16) takes 5.00 ms: 540 TFLOP/s."
        in text
    )
    assert decoding.decoding(rows[:1]) == ""


def test_a_command_of_many_workloads_is_shortened() -> None:
    few = "python -m benchmarks speed zoo/lstm:1 torch/bi_gru:1 --out out/rows.jsonl"
    assert shortened(few) == few
    names = [f"timm/net{k}:1" for k in range(9)]
    many = ["python -m benchmarks speed", *names, "--shared data/shared --jobs 4"]
    assert shortened(" ".join(many)) == " ".join([many[0], *names[:6], "(and 3 more)", many[-1]])
