"""The demo: its output, and its failure if an accuracy or an error misses its bound. Stand-ins keep it quick."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.cli import Cli
from support.needs import needs_libraries
from support.onnxnet import save_convnet

import optdnn
import optdnn.models
from optdnn.cli import demo
from optdnn.cli.main import run
from optdnn.models import zoo

Facts = dict[str, Any]


def stand_ins(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Replaces ResNet-50 by a quick one, and the trained networks by "good" and "odd"."""
    build = zoo.build
    patch.setattr(
        zoo, "build", lambda name, **o: build(name, **o, image_size=32, width=0.25, depth=0.3, num_classes=10)
    )
    for name, quick in (("ROUNDS", 2), ("SECONDS", 0.1), ("RESNET_SECONDS", 0.2)):
        patch.setattr(demo, name, quick)
    path = save_convnet(folder / "good.onnx", batch="N")
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 4]) for n in "xy"]
    nodes = [helper.make_node("Frobnicate", ["x"], ["a"]), helper.make_node("Wobble", ["a"], ["y"])]
    graph = helper.make_graph(nodes, "odd", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), folder / "odd.onnx")
    x = np.random.default_rng(0).standard_normal((40, 3, 8, 8)).astype(np.float32)
    y = optdnn.build(path, target="reference")(x).argmax(axis=1)  # type: ignore[union-attr]
    y[:10] = (y[:10] + 1) % 5
    module: Any = ModuleType("optdnn.models.trained")
    module.NAMES = ("good", "odd")
    module.load = lambda name: (folder / f"{name}.onnx", x, y, 0.75)
    patch.setitem(sys.modules, "optdnn.models.trained", module)
    patch.setattr(optdnn.models, "trained", module, raising=False)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """The facts of one real run of the demo on the stand-ins."""
    needs_libraries()
    pytest.importorskip("jinja2")
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        stand_ins(patch, folder)
        argv = ["demo", "--threads", "1", "-q", "--json", folder / "facts.json", "-o", folder / "report.html"]
        assert run([str(a) for a in argv]) == 0
    found: Facts = json.loads((folder / "facts.json").read_text())
    return found | {"report": (folder / "report.html").read_text()}


@pytest.fixture
def replay(facts: Facts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Facts:
    """Lets the demo find a copy of the same facts again. Returns the copy, which a test may change."""
    again: Facts = json.loads(json.dumps(facts))
    module: Any = ModuleType("optdnn.models.trained")
    module.NAMES = ("good", "odd")
    monkeypatch.setitem(sys.modules, "optdnn.models.trained", module)
    monkeypatch.setattr(optdnn.models, "trained", module, raising=False)
    by_name = {n["name"]: n for n in again["networks"]}
    monkeypatch.setattr(demo, "_trained", lambda name, *rest: by_name[name])
    monkeypatch.setattr(demo, "_resnet", lambda *rest: again["resnet50"])
    monkeypatch.chdir(tmp_path)
    return again


@pytest.mark.slow
def test_the_facts_of_the_demo(facts: Facts) -> None:
    good, odd = facts["networks"]
    assert (good["right"], good["pictures"], good["recorded_accuracy"]) == (30, 40, 0.75)
    assert (good["operators_before"], good["operators_after"]) == (10, 5)
    assert good["max_rel_err"] < 1e-5
    assert odd["unsupported"] == ["Frobnicate", "Wobble"]
    resnet = facts["resnet50"]
    assert (resnet["bn_before"], resnet["bn_after"], resnet["operators_after"]) == (23, 0, 26)
    assert 0 < resnet["max_rel_err"] < 1e-4 < resnet["input_difference"]
    assert resnet["median_ms"] > 0
    assert resnet["onnxruntime_median_ms"] > 0


def test_the_output_of_the_demo(cli: Cli, replay: Facts) -> None:
    code, out, err = cli("demo")
    assert (code, err) == (0, "")
    good = next(line.split() for line in out.splitlines() if line.startswith("good "))
    assert good[1:9] == ["30", "of", "40", "75.00%", "75.00%", "10", "→", "5"]
    assert "odd: its Frobnicate, Wobble come in a later release" in out
    assert "operators 75 → 26: 23 of 23 BatchNormalizations folded" in out
    assert "of ONNX Runtime's" in out
    assert "optdnn build your.onnx" in out
    assert "optdnn compare your.onnx --html report.html" in out
    assert "The whole comparison of ResNet-50, with charts: optdnn-demo.html" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_report_of_the_demo_is_written(facts: Facts) -> None:
    assert "<svg" in facts["report"]
    assert "resnet50" in facts["report"]


def test_the_longest_bar_is_the_slowest(cli: Cli, replay: Facts) -> None:
    replay["resnet50"] |= {"median_ms": 10.0, "onnxruntime_median_ms": 20.0}
    replay["resnet50"]["versus"] = {"speedup": 2.0, "range": [1.9, 2.1], "verdict": "faster"}
    lines = cli("demo").out.splitlines()
    k = next(k for k, line in enumerate(lines) if line.startswith("resnet50"))
    ours, other = (line.count("█") for line in lines[k : k + 2])
    assert abs(2 * ours - other) <= 1
    assert lines[k].endswith("2.00×")


def test_without_the_extra_the_demo_names_it_and_recommends_what_works(
    cli: Cli, replay: Facts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    code, out, _ = cli("demo")
    assert code == 0
    assert "pip install 'optdnn[report]'" in out
    assert "--html" not in out
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("optdnn.report.page.find_spec", lambda name: None)
    code, _, err = cli("demo", "-o", tmp_path / "asked.html")
    assert code == 8
    assert "pip install 'optdnn[report]'" in err


@pytest.mark.parametrize(
    ("network", "changes", "message"),
    [
        ("good", {"right": 28}, "good gets 28 of 40 right, less than 75.00%"),
        ("good", {"max_rel_err": None}, "good: outputs differ from ONNX Runtime's by None, allowed is 0.0001"),
        ("resnet50", {"max_rel_err": 2e-4}, "resnet50: outputs differ from ONNX Runtime's by 0.0002"),
        ("resnet50", {"input_difference": 1e-5}, "another picture changes the outputs by only 1e-05"),
    ],
)
def test_a_missed_bound_fails_the_demo(
    cli: Cli, replay: Facts, network: str, changes: dict[str, Any], message: str
) -> None:
    (replay["resnet50"] if network == "resnet50" else replay["networks"][0]).update(changes)
    code, out, err = cli("demo")
    assert code == 7
    assert message in err
    assert "Next, with a model of your own" in out  # all results are shown first


def test_one_picture_may_be_a_tie(cli: Cli, replay: Facts) -> None:
    replay["networks"][0]["right"] = 29
    assert cli("demo").code == 0


def test_an_undecided_or_failed_comparison_is_shown(cli: Cli, replay: Facts) -> None:
    replay["resnet50"]["versus"] = {"speedup": 1.0, "range": [0.8, 1.3], "verdict": "unstable"}
    out = cli("demo").out
    assert "0.80–1.30×" in out
    assert "it is not clear which is faster" in out
    replay["resnet50"] |= {"versus": None, "median_ms": None, "error": "it crashed"}
    code, out, err = cli("demo")
    assert code == 7
    assert "resnet50: optdnn – ms: it crashed" in out
    assert "resnet50: it crashed" in err


def test_without_onnxruntime_it_says_what_to_install(cli: Cli, replay: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.compare.rivals.find_spec", lambda name: None)
    code, out, err = cli("demo")
    assert (code, out) == (8, "")
    assert "pip install 'optdnn[cpu]'" in err
