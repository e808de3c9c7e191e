"""``--html`` of ``build``, ``bench``, ``compare`` and ``diff``: one file with the network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.cli import Cli
from support.onnxnet import save_convnet

import optdnn


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("html")
    model = save_convnet(folder / "net.onnx")
    optdnn.build(model, target="simulate").save(folder / "net.engine")
    optdnn.build(model, target="simulate", precision="fp16").save(folder / "half.engine")
    return folder


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"))
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def sections(page: Path) -> list[str]:
    return re.findall(r'<section id="(\w+)">', page.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_build_writes_its_report(cli: Cli, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    done = cli("build", folder / "net.onnx", "--target", "simulate", "-o", tmp_path / "n.engine", "--html", page)
    assert done.code == 0
    assert f"written: {page}" in done.err
    assert sections(page) == ["findings", "network", "timeline", "memory", "operators", "passes", "machine"]
    nodes = data_of(page)["nodes"]
    assert [n["label"] for n in nodes if n["role"] == "operator"] == [
        "ImageConv + Relu",
        "Conv + Add + Relu",
        "GlobalAveragePool",
        "Conv",
    ]
    assert "predicted by the cost model" in page.read_text()
    measured = cli(
        "build", folder / "net.onnx", "--target", "simulate", "-o", tmp_path / "n.engine", "--bench", "--html", page
    )
    assert measured.code == 0
    assert "latency" in sections(page)
    assert "measured in a run" in page.read_text()


def test_bench_times_the_steps_for_its_report(cli: Cli, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    done = cli("bench", folder / "net.engine", "--iterations", 3, "--warmup", 1, "--html", page, "--json")
    assert done.code == 0
    assert "profile" in json.loads(done.out)
    assert {"network", "timeline", "memory", "latency", "machine"} <= set(sections(page))
    reported = [fact for n in data_of(page)["nodes"] for fact in n["facts"]]
    assert sum(name == "time" and "measured in a run" in text for name, text in reported) == 4
    assert "optdnn bench" in page.read_text()


@pytest.mark.slow
def test_compare_draws_the_subject_with_errors(cli: Cli, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    race = ("--against", "reference", "--duration", "0.05", "--rounds", 2, "--layers", "--html", page)
    done = cli("compare", folder / "half.engine", "--model", folder / "net.onnx", *race)
    assert done.code == 0
    assert {"results", "network", "timeline", "divergence", "accuracy"} <= set(sections(page))
    modes = {m["key"]: m for m in data_of(page)["modes"]}
    assert any(c.startswith("q") for c in modes["error"]["classes"])


def test_diff_draws_b_with_the_changes(cli: Cli, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    assert cli("diff", folder / "net.engine", folder / "half.engine", "--no-run", "--html", page).code == 0
    assert data_of(page)["modes"][0]["key"] == "change"
    assert "<h2>Times of steps (µs)</h2>" in page.read_text()
    assert cli("diff", folder / "net.onnx", folder / "net.onnx", "--no-run", "--html", page).code == 0
    assert "<script" not in page.read_text()  # two models: there is nothing to draw


def test_a_malformed_record_is_an_error_of_the_engine(cli: Cli, folder: Path, tmp_path: Path) -> None:
    engine = optdnn.load(folder / "net.engine")
    engine.program.meta["passes"] = [7]
    engine.save(tmp_path / "odd.engine")
    done = cli("bench", tmp_path / "odd.engine", "--iterations", 1, "--html", tmp_path / "r.html")
    assert done.code == 5
    assert "malformed" in done.err
    assert not (tmp_path / "r.html").exists()


def test_a_place_that_cannot_be_written_is_refused_before_the_work(cli: Cli, folder: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere" / "r.html"
    for command in (
        ("build", folder / "net.onnx", "--target", "simulate", "-o", tmp_path / "n.engine"),
        ("bench", folder / "net.engine"),
    ):
        assert cli(*command, "--html", nowhere).code == 9
    assert not (tmp_path / "n.engine").exists()
