"""The benchmarks' own machinery, which must outlive what it measures: rows that fail, processes that die, tables and drawings."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.scripts import FOLDER, module


@pytest.fixture(scope="module")
def targets() -> ModuleType:
    return module("gpu/targets.py")


def options(**changed: Any) -> argparse.Namespace:
    given = {
        "tune": 0.0,
        "no_torch": True,
        "compile": False,
        "turn": 0.01,
        "rounds": 1,
        "flush_l2": False,
        "row_budget": 20.0,
    }
    return argparse.Namespace(**{**given, **changed})


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


IMPORTED = """
import importlib, importlib.util, sys
from unittest.mock import MagicMock
for absent in [n for n in ("torch", "cupy") if importlib.util.find_spec(n) is None]:
    sys.modules.update({f"{absent}{part}": MagicMock() for part in ("", ".nn", ".nn.functional")})
for folder, name in zip(sys.argv[1::2], sys.argv[2::2]):
    before = list(sys.path)
    sys.path.insert(0, folder)  # as for a script
    importlib.import_module(name)
    sys.path[:] = before
"""


def test_every_script_imports_what_it_needs() -> None:
    """Those that need PyTorch with a stand-in for it, where it is not installed."""
    scripts = sorted([*FOLDER.glob("*.py"), *FOLDER.glob("gpu/*.py")])
    if not scripts:
        pytest.skip("an installed copy has no benchmarks")
    assert len({p.stem for p in scripts}) == len(scripts), "two scripts of one name: one would import the other"
    given = [text for p in scripts for text in (str(p.parent), p.stem)]
    done = subprocess.run([sys.executable, "-c", IMPORTED, *given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_rows_have_names_of_their_own_and_networks_of_the_zoo(targets: ModuleType) -> None:
    from optdnn.models import zoo

    rows = [*targets.ROWS, *(r for series in targets.GROWTH.values() for r in series)]
    assert len({r.name for r in targets.ROWS}) == len(targets.ROWS)
    for row in rows:
        assert {"batch", *row.settings} <= set(zoo.options(row.model))
    assert all(row.reach > (row.moonshot or 0) >= 0 for row in targets.ROWS)


def test_the_torch_modules_are_those_of_the_rows(targets: ModuleType) -> None:
    pytest.importorskip("torch")
    assert set(module("gpu/torch_modules.py").FACTORIES) >= {r.model for r in targets.ROWS}


def stub(folder: Path, text: str, targets: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A measuring process that runs ``text`` for each line of its input."""
    (folder / "measure_row.py").write_text(
        f"import json, os, sys, time\nprint('UP', flush=True)\nfor line in sys.stdin:\n    order = json.loads(line)\n    {text}\n"
    )
    monkeypatch.setattr(targets, "HERE", folder)
    return targets.Measurer()


ANSWER = 'print("noise\\nANSWER " + json.dumps({"candidates": {"ours": {"median_ms": 0.5}}}), flush=True)'


def test_a_row_is_measured(targets: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurer = stub(tmp_path, ANSWER, targets, monkeypatch)
    row = targets.Row("resnet50", 1, reach=0.4)
    built = {"ours": {"build_s": 1.0}, "libraries": {"error": "UsageError: no"}}
    try:
        for reach, met in ((0.4, False), (0.6, True)):
            row = targets.Row("resnet50", 1, reach=reach)
            found = targets.measured(row, done(built), tmp_path, measurer, options())
            assert found["met"] is met
            assert found["candidates"]["ours"] == {"median_ms": 0.5, "build_s": 1.0}
            assert found["candidates"]["libraries"] == {"error": "UsageError: no"}
            assert "ours 0.5000, libraries: UsageError: no" in targets.line({"name": row.name, **found})
    finally:
        measurer.close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("os._exit(3)", "ended with code 3"),
        ("os.kill(os.getpid(), 9)", "ended with code -9"),
        ("time.sleep(60)", "limit 0.5 s"),
    ],
)
def test_a_process_that_dies_or_hangs_costs_one_row(
    targets: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    measurer = stub(tmp_path, f'{text} if order["row"]["batch"] == 2 else {ANSWER}', targets, monkeypatch)
    try:
        rows = [targets.Row("resnet50", n) for n in (2, 1)]
        limit = options(row_budget=0.5 if "sleep" in text else 20.0)
        first = targets.measured(rows[0], done({"ours": {}}), tmp_path, measurer, limit)
        assert why in first["error"]
        second = targets.measured(rows[1], done({"ours": {}}), tmp_path, measurer, options())
        assert second["candidates"]["ours"]["median_ms"] == 0.5
    finally:
        measurer.close()


def test_what_cannot_be_built_is_a_row_with_its_error(targets: ModuleType, tmp_path: Path) -> None:
    found = targets.measured(
        targets.Row("resnet50", 1), done(RuntimeError("building failed")), tmp_path, None, options()
    )
    assert found == {"error": "RuntimeError: building failed"}


# ---------------------------------------------------------------- what is drawn and written


def result(**changed: Any) -> dict[str, Any]:
    sizes = [(n, {"ours": {"median_ms": 0.1 * n}, "eager": {"median_ms": 0.3 * n + 0.5}}) for n in (1, 4, 16)]
    rows = [
        {"name": f"resnet50:{n}", "model": "resnet50", "batch": n, "reach": 0.5, "met": 0.1 * n <= 0.5, "candidates": c}
        for n, c in sizes
    ]
    broken = {
        "name": "vgg16:1",
        "model": "vgg16",
        "batch": 1,
        "reach": 0.2,
        "error": "CudaError: lost",
        "candidates": {},
    }
    wrong = {
        "name": "lstm:1",
        "model": "lstm",
        "batch": 1,
        "candidates": {"ours": {"median_ms": 9.0, "error": "wrong: 0.5"}},
    }
    versions = {"torch": "2.11", "nvidia-cudnn-cu13": "9.19", "nvidia-cublas": "13.1"}
    facts = {
        "gpu": "NVIDIA H200",
        "driver": "580",
        "date": "2026-11-20",
        "command": "python x",
        "l2": "warm",
        "versions": versions,
    }
    return {**facts, "rows": [*rows, broken, wrong], **changed}


def test_the_table_of_the_target_rows(tmp_path: Path) -> None:
    figures = module("figures_gpu.py")
    (tmp_path / "t.json").write_text(json.dumps(result()))
    lines = figures.targets(tmp_path / "t.json").splitlines()
    assert "| network, batch | optdnn ms | eager ms | to reach |" in lines
    assert "| resnet50, 4 | **0.400** | 1.700 | 0.5 |" in lines
    assert "| resnet50, 16 | 1.600 | 5.300 | 0.5 |" in lines
    assert "| vgg16, 1 | – | – | 0.2 |" in lines
    assert "| lstm, 1 | 9.000 (wrong) | – |  |" in lines


def test_our_kernels_over_the_libraries_in_geometric_mean(tmp_path: Path) -> None:
    figures = module("figures_gpu.py")
    times = [(0.1, 0.4, 3), (0.2, 0.2, 1), (0.1, 9.0, 0)]  # the last ran on our kernels alone: no library had anything
    rows = [
        {
            "name": f"x:{k}",
            "candidates": {
                "ours": {"median_ms": 0.01},
                "untuned": {"median_ms": ours},
                "libraries": {"median_ms": theirs, "library_steps": n},
            },
        }
        for k, (ours, theirs, n) in enumerate(times)
    ]
    (tmp_path / "t.json").write_text(json.dumps(result(rows=rows, tune_s=12)))
    text = figures.targets(tmp_path / "t.json")
    assert (
        "not tuned, are 2.00 times as fast as the libraries alone in geometric mean over 2 rows (the least: 1.00)"
        in text
    )


def test_the_tables_of_compiled_rows_and_of_waits(tmp_path: Path) -> None:
    figures = module("figures_gpu.py")
    found = {"ours": {"median_ms": 0.2}, "compile": {"median_ms": 0.5, "prepare_s": 243.2}, "eager": {"median_ms": 0.9}}
    late = {"name": "vgg16:1", "error": "torch.compile had not ended when its time was over"}
    data = result(rows=[{"name": "resnet50:1", "candidates": found}, late], at_once=6, cores=16, seconds=490.2)
    (tmp_path / "c.json").write_text(json.dumps(data))
    text = figures.compiled(tmp_path / "c.json")
    assert "| resnet50, 1 | 0.200 | 0.500 | 0.900 | 2.50× | 243 s |" in text
    assert "Not compiled and measured within the 490 s of the call: vgg16, 1." in text

    def row(name: str, ms: float | None) -> dict[str, Any]:
        return {"name": name, "median_ms": ms, "error": None if ms else "no room"}

    parts = {
        "build": {"cold": {"seconds": 61.25}, "warm": {"seconds": 3.5}, "the_same_bytes": True},
        "load": {"error": "RuntimeError: no"},
        "call": {"bound": {"call_us": 3.04}},
        "compare": [
            {
                "command": "optdnn compare a.onnx",
                "code": 0,
                "rows": [row("optdnn", 0.1), row("torch", 0.8), row("own", None)],
            },
            {"command": "optdnn compare b.onnx", "code": 8, "err": "onnxruntime-gpu is needed"},
        ],
    }
    (tmp_path / "w.json").write_text(json.dumps({**result(), "rows": [], **parts}))
    lines = figures.waits(tmp_path / "w.json").splitlines()
    assert "| the same, caches warm | 3.5 s, the same bytes | 5 s |" in lines
    assert "| Python's part of a call with bound buffers | 3.0 µs | 20 µs |" in lines
    assert not [line for line in lines if "first result" in line]
    text = figures.compared(tmp_path / "w.json")
    assert "| a | 0.100 | no room |  | 0.800 |  |" in text
    assert "optdnn compare a.onnx" in text
    assert "b.onnx" not in text


def test_new_rows_take_the_place_of_old_ones() -> None:
    merge = module("gpu/merge.py")
    old = result(commit="a", date="yesterday")
    new = result(
        commit="b",
        rows=[
            {"name": "resnet50:4", "candidates": {"ours": {"median_ms": 0.3}}},
            {"name": "resnet50:1", "error": "lost"},
        ],
    )
    made = merge.merged(old, [new])
    rows = {r["name"]: r for r in made["rows"]}
    assert list(rows) == ["resnet50:1", "resnet50:4", "resnet50:16", "lstm:1"], "vgg16 was never measured"
    assert rows["resnet50:4"]["candidates"] == {"ours": {"median_ms": 0.3}}
    assert [rows[n]["commit"] for n in rows] == ["a", "b", "a", "a"], (
        "one that fails does not take a measured one's place"
    )
    tuned = {"name": "resnet50:1", "candidates": {"ours": {"median_ms": 0.1}, "untuned": {"median_ms": 0.2}}}
    rows = {r["name"]: r["candidates"] for r in merge.merged(old, [result(tune_s=8, rows=[tuned])])["rows"]}
    assert rows["resnet50:1"] == tuned["candidates"]
    assert "ours" not in rows["resnet50:16"], "it was not tuned"
    assert rows["resnet50:16"]["untuned"]["median_ms"] == 1.6
    with pytest.raises(ValueError, match="different machines"):
        merge.merged(old, [result(gpu="NVIDIA A100")])


def test_parts_of_waits_take_the_place_of_parts() -> None:
    merge = module("gpu/merge.py")
    old = {"commit": "a", "command": "all", "date": "1", "build": {"warm": 9}, "load": {"median_s": 0.5}, "compare": []}
    made = merge.parts(
        old, [{"commit": "b", "command": "load", "date": "2", "load": {"median_s": 0.3}, "call": {"error": "lost"}}]
    )
    assert (made["commit"], made["build"], made["load"], "call" in made) == ("b", {"warm": 9}, {"median_s": 0.3}, False)
    assert {p: r["commit"] for p, r in made["runs"].items()} == {"build": "a", "load": "b", "compare": "a"}
    again = merge.parts(made, [{"commit": "c", "command": "build", "date": "3", "build": {"warm": 4}}])
    assert {p: r["commit"] for p, r in again["runs"].items()} == {"build": "c", "load": "b", "compare": "a"}


def test_lengths_take_the_place_of_lengths() -> None:
    merge = module("gpu/merge.py")

    def run(commit: str, *lengths: int, tuned: float = 0.0) -> dict[str, Any]:
        rows = [{"row": "lstm:1", "length": n, "ratio": 1.0} for n in lengths]
        return {"commit": commit, "tuned_seconds": tuned, "rows": [*rows, {"row": "bert", "error": "lost"}]}

    made = merge.lengths(run("a", 64, 128), [run("b", 64, 96), run("c", 64, tuned=9.0)])
    found = [(r["length"], r["commit"]) for r in made["rows"]]
    assert found == [(64, "b"), (128, "a"), (96, "b"), (64, "c")]
    assert merge.lengths(made, [run("d", 128)])["rows"][1]["commit"] == "d"


def test_of_timing_caches_what_was_chosen_is_kept(tmp_path: Path) -> None:
    merge = module("gpu/merge.py")
    from optdnn.tactics.timing_cache import TimingCache

    cache = TimingCache(tmp_path / "t.json")
    for n in range(9):
        cache.note(f"GPU | p | conv tile{n} | warm | source{n}", 1e-6 * (9 - n), {"driver": "1"})
    cache.note("GPU | p | conv odd | warm | source", None, {"driver": "1"}, "wrong result")
    cache.note("GPU | p | conv tile0 | cold | source0", 5e-6, {"driver": "1"})
    cache.note_network("GPU | n", {"p": ("conv", "tile8")}, 0.5, {"driver": "1"})
    cache.save()
    made = merge.times([json.loads((tmp_path / "t.json").read_text())] * 2)
    (tmp_path / "t.json").write_text(json.dumps(made))
    kept = TimingCache.open(tmp_path / "t.json")
    assert sorted(k.split(" | ")[2] for k in kept.candidates) == ["conv tile0", *(f"conv tile{n}" for n in range(5, 9))]
    network = kept.network("GPU | n")
    assert network is not None
    assert network.choices == {"p": ("conv", "tile8")}


def test_a_series_that_was_not_measured_is_named(tmp_path: Path) -> None:
    figures = module("figures_gpu.py")
    (tmp_path / "growth-h200.json").write_text(json.dumps(result()))
    text = figures.growth(tmp_path / "growth-h200.json")
    assert text.startswith("![Latency of ResNet-50 over batch](growth-h200.svg)")
    assert "BERT over sequence: not measured yet." in text


def test_growth_is_drawn_without_what_failed() -> None:
    growth = module("gpu/growth.py")
    drawing = growth.draw(result())
    assert drawing.count("<polyline") == 2
    assert drawing.count("<circle") == 6
    assert "optdnn" in drawing
    assert "lstm" not in drawing
    with pytest.raises(ValueError, match="no measurement"):
        growth.draw(result(rows=[]))


def test_a_round_goes_on_where_a_step_fails_or_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    round_ = module("gpu/round.py")
    made = round_.steps(tmp_path, 10.0, 590.0, tmp_path / "times.json")
    assert [s.name for s in made] == ["tests", "rows", "growth", "waits"], "what is wrong need not be timed"
    assert sum(s.limit for s in made) <= 590
    commands = {
        "a": "print('fine')",
        "b": "raise SystemExit(3)",
        "c": "import time; time.sleep(60)",
        "d": "print('last')",
    }
    short = [round_.Step(n, [sys.executable, "-c", text], 0.5 if n == "c" else 20) for n, text in commands.items()]
    monkeypatch.setattr(round_, "steps", lambda *given: short)
    monkeypatch.setattr(sys, "argv", ["round.py", "--out", str(tmp_path)])
    assert round_.main() == 1
    report = json.loads((tmp_path / "round.json").read_text())
    assert {n: found["code"] for n, found in report.items()} == {"a": 0, "b": 3, "c": None, "d": 0}
    assert report["d"]["tail"] == ["last"]
    assert "== c: code None" in capsys.readouterr().out


def test_tables_are_made_of_the_results_that_are_there(tmp_path: Path) -> None:
    figures = module("figures.py")
    assert figures.tables(tmp_path) == {}
    row = {"accuracy": 99.5, "ms": 0.25, "engine_bytes": 2000, "precision": "fp32"}
    over = {"single": "bf16", "speedup": 1.5, "verdict": "faster"}
    auto = {"metric": {"bound": 0.5}, "chosen": "fp32", "candidates": [{"name": "fp32", "single": True}], "samples": {}}
    entry = {
        "network": "n",
        "pictures": 9,
        "rows": {"fp32": row, "auto 0.5": {**row, "ms": 0.125, "over_best": over, "auto": auto}},
    }
    about = {"date": "today", "command": "python x", "batch": 1, "target": "cuda", "machine": {"device": "GPU"}}
    (tmp_path / "precision-h200.json").write_text(json.dumps({**about, "networks": [entry]}))
    made = figures.tables(tmp_path)
    assert list(made) == ["precision-h200"]
    assert "### n\n\n| precision | accuracy | latency ms |" in made["precision-h200"]
    assert "| **auto 0.5** | 99.50 % | 0.125 | 2 | fp32 | 1.50× bf16 |" in made["precision-h200"]
    assert "<br>" not in made["precision-h200"]
