"""``optdnn diff``, and ``optdnn compare OLD NEW`` as a gate."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli import Cli, strict
from support.small_models import mlp, retrained, save

import optdnn
from optdnn.cli import compare
from optdnn.errors import NotMet, RunError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models ``a.onnx`` and ``b.onnx`` with other weights; ``a.engine`` in fp32 and ``b.engine`` in fp16, both for
    ``simulate``; ``numpy.engine`` of ``a`` for the target ``reference``."""
    folder = tmp_path_factory.mktemp("built")
    save(mlp(), folder, "a.onnx")
    save(retrained(mlp()), folder, "b.onnx")
    optdnn.build(folder / "a.onnx", target="simulate").save(folder / "a.engine")
    optdnn.build(folder / "b.onnx", target="simulate", precision="fp16").save(folder / "b.engine")
    optdnn.build(folder / "a.onnx", target="reference").save(folder / "numpy.engine")
    return folder


def names(report: dict[str, list[dict[str, object]]], table: str) -> set[object]:
    return {row["name"] for row in report.get(table, [])}


@pytest.mark.slow
def test_two_engines(cli: Cli, folder: Path) -> None:
    found = strict(cli("diff", folder / "a.engine", folder / "b.engine", "--json", "--duration", "0.1").out)
    tables = found["tables"]
    assert tables["options"] == [{"name": "precision", "a": "fp32", "b": "fp16"}]
    assert "weights digest" in names(tables, "facts")
    assert {"name": "fp16", "a": None, "b": "all nodes"} in tables["precisions"]
    assert "MatMul MatMul_2" in names(tables, "tactics")
    assert any(str(name).startswith("assign_precision: cast") for name in names(tables, "fusions"))
    assert "times" in tables
    assert {"nodes", "weights", "inputs"}.isdisjoint(tables)
    assert 0.1 < found["outputs"]["max_rel_err"] < 1
    assert found["race"].keys() == {"a_ms", "b_ms", "speedup", "range", "verdict"}
    assert found["not_run"] is None


def test_two_models(cli: Cli, folder: Path, tmp_path: Path) -> None:
    found = strict(cli("diff", folder / "a.onnx", folder / "b.onnx", "--json").out)
    assert found["tables"].keys() == {"elements"}
    assert names(found["tables"], "elements") == {"w1", "w2"}
    assert found["race"] is None
    other = mlp()
    other.graph.node[1].attribute[0].f = 0.5
    found = strict(cli("diff", folder / "a.onnx", save(other, tmp_path), "--no-run", "--json").out)
    assert found["tables"].keys() == {"nodes"}
    assert (names(found["tables"], "nodes"), found["not_run"]) == ({"b"}, "not asked for")


def test_a_model_and_its_engine_agree(cli: Cli, folder: Path) -> None:
    reported = cli("diff", folder / "a.onnx", folder / "numpy.engine")
    assert reported.code == 0
    assert "On the same random inputs (seed 0), the outputs are equal to the bit." in reported.out
    assert "weights\n" not in reported.out


def test_html_and_refusals(cli: Cli, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="needs the extra report")
    evil = mlp()
    evil.graph.initializer[0].name = evil.graph.node[0].input[1] = "<script>alert(1)</script>"
    page = tmp_path / "diff.html"
    reported = cli("diff", folder / "a.onnx", save(evil, tmp_path), "--no-run", "--html", page)
    assert reported.code == 0
    text = page.read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert cli("diff", folder / "a.onnx", tmp_path / "absent.onnx").code == 2
    wider = mlp()
    wider.graph.input[0].name = wider.graph.node[0].input[0] = "z"
    reported = cli("diff", folder / "a.onnx", save(wider, tmp_path))
    assert "They were not run: their inputs have other names or types." in reported.out


@pytest.mark.slow
def test_the_gate(cli: Cli, folder: Path) -> None:
    old, new = folder / "numpy.engine", folder / "a.engine"
    short = ("--duration", "0.2", "--rounds", "6")
    assert cli("compare", old, old, "--fail-if-slower", "900%", "--fail-if-error", "0", *short).code == 0
    slower = cli("compare", old, new, "--fail-if-slower", "3%", *short)
    assert slower.code == 7, slower
    assert "longer than numpy.engine (95 %), not within +3.0%" in slower.err
    wrong = cli("compare", old, folder / "b.engine", "--fail-if-error", "1e-3", *short)
    assert wrong.code == 7
    assert "not within 0.001" in wrong.err
    assert "a.onnx is not an engine: NEW races against an engine" in cli("compare", folder / "a.onnx", new, *short).err
    for text in ("-1%", "x", "1000%"):
        assert "is not a percentage or fraction" in cli("compare", old, new, "--fail-if-slower", text).err


@pytest.mark.parametrize(
    ("speedups", "outcome"), [((1.1, 1.2), "faster"), ((0.95, 1.2), "warned"), ((0.8, 0.96), NotMet), (None, RunError)]
)
def test_the_confidence_interval_decides(speedups: object, outcome: object, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"name": "new", "speedup_range": speedups}
    if isinstance(outcome, type):
        with pytest.raises(outcome, match="new"):
            compare._judge_time(row, "old", 0.03)
        return
    compare._judge_time(row, "old", 0.03)
    assert ("is not decided" in capsys.readouterr().err) == (outcome == "warned")


@pytest.mark.slow
def test_engines_of_one_name_are_distinguished(cli: Cli, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "numpy.engine").write_bytes((folder / "numpy.engine").read_bytes())
    reported = cli("compare", folder / "numpy.engine", tmp_path / "numpy.engine", "--duration", "0.1", "--json")
    assert [row["name"] for row in strict(reported.out)["rows"]] == ["numpy.engine", str(folder / "numpy.engine")]
