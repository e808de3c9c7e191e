"""``--json`` after an error: one JSON object with the error, where the result would have been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.cli import Cli, strict

from optdnn.cli.main import COMMANDS
from optdnn.errors import UsageError

MAIN = "from optdnn.cli.main import main; main()"


def wrong_model(path: Path, nodes: list[onnx.NodeProto]) -> Path:
    weight = numpy_helper.from_array(np.zeros((4, 4), np.float32), "w")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "wrong", [x], [y], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_gives_a_usage_error_as_json(cli: Cli, command: str) -> None:
    code, out, err = cli(command, "--no-such-option", "--json")
    error = strict(out)["error"]
    assert (code, error["type"], error["exit_code"], error["hint"], error["nodes"]) == (2, "UsageError", 2, None, [])
    assert "--no-such-option" in error["message"]
    assert error["message"] in err
    assert cli(command, "--no-such-option").out == ""


@pytest.mark.parametrize(
    "command", ["build", "check", "inspect", "explain", "run", "bench", "compare", "verify", "refit"]
)
def test_a_missing_file(cli: Cli, tmp_path: Path, command: str) -> None:
    more = {"explain": ["node"], "refit": [tmp_path / "absent.onnx", "-o", tmp_path / "new"]}.get(command, [])
    code, out, err = cli(command, tmp_path / "absent", *more, "--json")
    error = strict(out)["error"]
    assert error["exit_code"] == code != 0
    assert "absent" in error["message"]
    assert error["message"] in err


def test_a_model_error_names_its_node(cli: Cli, tmp_path: Path) -> None:
    model = wrong_model(tmp_path / "m.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")])
    code, out, _ = cli("build", model, "--target", "reference", "--json")
    error = strict(out)["error"]
    (node,) = error["nodes"]
    assert (code, error["type"]) == (3, "ShapeError")
    assert {**node, "reason": ""} == {"node": "product", "op_type": "MatMul", "domain": "", "opset": 17, "reason": ""}
    assert node["reason"] in error["message"]
    assert "2, 3" in node["reason"]


def test_errors_of_edges_name_their_nodes(cli: Cli, tmp_path: Path) -> None:
    def named(*nodes: onnx.NodeProto) -> list[str]:
        error = strict(cli("inspect", wrong_model(tmp_path / "m.onnx", list(nodes)), "--json").out)["error"]
        assert error["type"] == "ModelError"
        return [n["node"] for n in error["nodes"]]

    reader = helper.make_node("Relu", ["absent"], ["y"], name="reader")
    first, second = (
        helper.make_node("Relu", ["x"], ["y"], name="first"),
        helper.make_node("Neg", ["x"], ["y"], name="second"),
    )
    one, two = helper.make_node("Add", ["x", "y"], ["a"], name="one"), helper.make_node("Neg", ["a"], ["y"], name="two")
    assert named(reader) == ["reader"]
    assert named(first, second) == ["second"]
    assert sorted(named(one, two)) == ["one", "two"]


def test_all_unsupported_nodes_are_listed(cli: Cli, tmp_path: Path) -> None:
    nodes = [helper.make_node("One", ["x"], ["a"], name="one"), helper.make_node("Two", ["a"], ["y"], name="two")]
    code, out, _ = cli("check", wrong_model(tmp_path / "m.onnx", nodes), "--json")
    error = strict(out)["error"]
    assert (code, error["type"]) == (4, "UnsupportedError")
    assert [(n["node"], n["op_type"]) for n in error["nodes"]] == [("one", "One"), ("two", "Two")]


def test_the_file_of_json_gets_the_error(cli: Cli, engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert cli("inspect", engine, "--json", file).code == 0
    code, out, err = cli("inspect", tmp_path / "absent", "--json", file)
    assert (code, out) == (2, "")
    assert strict(file.read_text())["error"]["message"] in err
    config = tmp_path / "options.toml"
    config.write_text(f'json = "{tmp_path / "other.json"}"\n')
    assert cli("build", tmp_path / "absent", "--config", config).code == 2
    assert strict((tmp_path / "other.json").read_text())["error"]["type"] == "UsageError"


def test_a_file_that_cannot_be_written_leaves_the_first_error(cli: Cli, engine: Path, tmp_path: Path) -> None:
    code, out, err = cli("inspect", engine, "--json", tmp_path / "nowhere" / "r.json")
    assert (code, out) == (9, "")
    assert err.count("error:") == 1


def test_no_error_follows_a_report(cli: Cli, engine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing(*args: object) -> None:
        raise UsageError("after the report")

    monkeypatch.setattr("optdnn.cli.run.write_outputs", failing)
    code, out, err = cli("run", engine, "--json", "-o", tmp_path / "y.npz")
    assert (code, "outputs" in strict(out)) == (2, True)  # strict: a second document would be an error
    assert "after the report" in err


def test_a_word_after_two_dashes_is_no_option(cli: Cli) -> None:
    assert cli("inspect", "--", "--json").out == ""


@pytest.mark.parametrize(
    ("raised", "code", "kind"),
    [
        ("KeyError('x')", 70, "InternalError"),
        ("MemoryError('8 GiB')", 6, "RunError"),
        ("KeyboardInterrupt", 130, "Ended"),
        (f"ending.Ended({signal.SIGTERM:d})", 143, "Ended"),
    ],
)
def test_other_ends(raised: str, code: int, kind: str) -> None:
    program = f"""
from optdnn.cli import ending, main
def failing(name):
    raise {raised}
main.quick_import = failing
main.main(["env", "--json"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=os.environ)
    error = strict(done.stdout)["error"]
    assert (done.returncode, error["exit_code"], error["type"]) == (code, code, kind)


def test_a_reader_that_has_ended_is_no_error(tmp_path: Path) -> None:
    command = f"'{sys.executable}' -c '{MAIN}' inspect {tmp_path / 'absent'} --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["2"]
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
