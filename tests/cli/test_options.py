"""What all commands share: groups of options, ``--json``, ``--config``, ``--quiet``, suggestions, completion in a shell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from support.cli import Cli

import optdnn
from optdnn.cli.build_options import parse_pins
from optdnn.cli.common import stdout, table
from optdnn.cli.foreign_options import ADVICE, OTHER_WORDS
from optdnn.cli.main import COMMANDS, completion_line
from optdnn.cli.options import SIZE, json_with_its_file

ROOT = Path(__file__).parents[2]


def options_of(name: str) -> dict[str, click.Parameter]:
    command = import_module("optdnn.cli." + name.replace("-", "_")).command
    return {o: p for p in command.params if isinstance(p, click.Option) for o in p.opts}


# ---------------------------------------------------------------- help and spelling


def test_options_are_grouped_and_options_for_gpus_are_marked(cli: Cli) -> None:
    out = cli("build", "--help").out
    groups = ["Network:", "Target and tuning:", "Precision:", "Calibration (int8, fp8, auto):", "Precision auto:"]
    places = [out.index(f"\n{g}\n") for g in (*groups, "Look inside:", "Results:", "General:")]
    assert places == sorted(places)
    assert "[GPU] Bound the scratch memory" in out
    assert "[GPU] Bound tuning" not in out  # this option has a meaning on the CPU, too


def test_options_of_one_meaning_have_one_spelling() -> None:
    every = {name: options_of(name) for name in COMMANDS}
    for name, options in every.items():
        assert "--json" in options, name
        assert "--quiet" in options, name
        assert ("--output" in options) == ("-o" in options), name
        assert not options.keys() & OTHER_WORDS.keys(), name
    assert [n for n, o in every.items() if "--output" in o] == ["build", "refit", "run", "profile", "demo"]


def test_check_offers_only_what_it_uses() -> None:
    extra = options_of("check").keys() - options_of("build").keys()
    assert not extra
    for name in ("--threads", "--timing-cache", "--budget", "--metric", "--labels", "--no-cubins"):
        assert name not in options_of("check")
    assert {"--precision", "--shape", "--strict", "--value"} <= options_of("check").keys()


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["buid", "m.onnx"], "did you mean 'build'?"),
        (["benchmark"], "did you mean 'bench'?"),
        (["m.onnx"], "did you mean optdnn build m.onnx?"),
        (["m.engine"], "did you mean optdnn run m.engine?"),
        (["my model.ONNX"], "did you mean optdnn build 'my model.ONNX'?"),
        (["bench", "--loops", "3", "e"], "Did you mean '--iterations'?"),
        (["build", "--precison", "int8", "m.onnx"], "'--precision'"),
        (["run", "--out", "y.npz", "e"], "Did you mean '--output'?"),
    ],
)
def test_a_misspelled_option_gets_a_suggestion(cli: Cli, argv: list[str], meant: str) -> None:
    code, out, err = cli(*argv)
    assert (code, out) == (2, "")
    assert meant in err


@pytest.mark.parametrize(
    "name",
    [
        "--onnx=a.onnx",
        "--minShapes=x:1x3",
        "--shapes=x:1x3",
        "--useDLACore=0",
        "--noTF32",
        "--fp16",
        "--best",
        "--versionCompatible",
        "--sparsity=enable",
    ],
)
def test_an_option_of_trtexec_gets_advice(cli: Cli, name: str) -> None:
    word = name.partition("=")[0]
    code, _, err = cli("build", name)
    assert code == 2
    assert f"No such option {word!r}. {ADVICE[word.lower()]}." in err


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_calibration_data_that_is_not_there_ends_the_build_first(
    cli: Cli, model: Path, tmp_path: Path, precision: str
) -> None:
    argv = ("build", model, "-o", tmp_path / "e", "--target", "simulate", "--precision", precision)
    code, _, err = cli(*argv, "--calib", tmp_path / "no.npz")
    assert (code, err) == (2, f"error: there is no calibration data {tmp_path / 'no.npz'}\n")
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("1k", 1024),
        ("1.5M", 1536 * 1024),
        ("4GiB", 2**32),
        ("2 tb", 2**41),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert SIZE.convert(text, None, None) == size


def test_no_help_shows_a_bound_that_is_not_there(cli: Cli) -> None:
    for name in COMMANDS:
        assert "None" not in cli(name, "--help").out, name


@pytest.mark.parametrize("text", ["0", "-1", "4X", "G", "", "0.1", "1e9", "nan", "9" * 400])
def test_texts_that_are_no_size(cli: Cli, text: str) -> None:
    code, _, err = cli("build", "m.onnx", "--workspace", text)
    assert code == 2
    assert f"{text!r} is not a number of bytes, such as 1048576, 512M or 4G" in err


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "a"])
@pytest.mark.parametrize(
    "words",
    ["build m --budget", "bench e --duration", "compare e --max-error", "generate e --top-p", "verify e --tolerance"],
)
def test_numbers_are_finite(cli: Cli, words: str, text: str) -> None:
    code, out, err = cli(*words.split(), text)
    assert (code, out) == (2, "")
    assert re.search(f"'?{text}'? is not (a finite number|in the range|a valid number)", err), err


def test_options_for_calibration_data_need_them(cli: Cli, model: Path, tmp_path: Path) -> None:
    for option, value in (("--images", "{}"), ("--calib-cache", tmp_path / "ranges.json")):
        code, _, err = cli("build", model, "-o", tmp_path / "e", "--target", "reference", option, value)
        assert (code, err.splitlines()[0]) == (2, f"error: {option} is of no use without calibration data")
    assert not (tmp_path / "e").exists()


def test_more_threads_than_cores_are_warned_of(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optdnn.runtime.measuring.machine.usable_cores", lambda: 2)
    argv = ("build", model, "-o", tmp_path / "e", "--target", "reference", "--threads")
    assert "warning: --threads 3: this machine has 2 usable cores" in cli(*argv, 3).err
    assert "usable cores" not in cli(*argv, 2).err


def test_an_option_unlike_all_others_gets_no_suggestion(cli: Cli) -> None:
    assert "did you mean" not in cli("zzz").err
    assert "Did you mean" not in cli("bench", "--zzzzzz", "e").err


# ---------------------------------------------------------------- --json [FILE]


def test_json_takes_a_file_only_where_it_looks_like_one() -> None:
    assert json_with_its_file(["--json", "m.onnx"]) == ["--json=-", "m.onnx"]
    assert json_with_its_file(["--json", "r.JSON", "m.onnx"]) == ["--json=r.JSON", "m.onnx"]
    assert json_with_its_file(["m.onnx", "--json", "-"]) == ["m.onnx", "--json=-"]
    assert json_with_its_file(["m.onnx", "--json"]) == ["m.onnx", "--json=-"]
    assert json_with_its_file(["--json=r", "--", "--json", "x.json"]) == ["--json=r", "--", "--json", "x.json"]


def test_json_in_a_file_leaves_the_text(cli: Cli, engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    code, out, err = cli("inspect", engine, "--json", file)
    assert code == 0
    assert err == f"written: {file}\n"
    assert out == cli("inspect", engine).out
    assert json.loads(file.read_text()) == json.loads(cli("inspect", "--json", engine).out)


def test_json_that_cannot_be_written_is_reported_before_the_work(cli: Cli, engine: Path, tmp_path: Path) -> None:
    code, out, _ = cli("bench", engine, "--json", tmp_path / "nowhere" / "r.json")
    assert (code, out) == (9, "")


# ---------------------------------------------------------------- --quiet


@pytest.mark.parametrize("place", ["before", "after"])
def test_quiet_prints_results_and_nothing_else(cli: Cli, model: Path, tmp_path: Path, place: str) -> None:
    argv = ["build", model, "-o", tmp_path / "e", "--target", "reference"]
    code, out, err = cli(*(["-q", *argv] if place == "before" else [*argv, "--quiet"]))
    assert (code, out, err) == (0, f"{tmp_path / 'e'}\n", "")
    quiet = cli("run", tmp_path / "e", "-q")
    assert (quiet.code, quiet.err) == (0, "")
    assert "[1, 5]" in quiet.out
    assert "random inputs" in cli("run", tmp_path / "e").err  # -q of one command does not affect the next one


def test_quiet_leaves_warnings_and_errors(cli: Cli, engine: Path, tmp_path: Path) -> None:
    assert cli("bench", engine, "--iterations", 3, "-q").err.startswith("warning: ")
    assert cli("run", tmp_path / "absent", "-q").err.startswith("error: ")


# ---------------------------------------------------------------- --config


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        (tmp_path / "c.toml").write_text(text)
        return tmp_path / "c.toml"

    return write


def test_a_config_file_gives_options_and_the_command_line_wins(
    cli: Cli, model: Path, config: Any, tmp_path: Path
) -> None:
    e = tmp_path / "e"
    file = config(f'target = "reference"\nopt-level = 1\ncheck = false\noutput = "{e}"\n[shape]\nx = "2x3x8x8"\n')
    code, out, err = cli("build", model, "--config", file, "--json")
    assert (code, err) == (0, "")
    made = json.loads(out)
    assert (made["options"]["target"], made["options"]["opt_level"]) == ("reference", 1)
    assert made["engine"] == str(e)
    assert made["error"] == {"not_measured": "--no-check"}
    assert [str(s) for s in optdnn.load(e).inputs] == ["x: fp32[2, 3, 8, 8]"]
    won = json.loads(cli("build", model, "--config", file, "--json", "-O", 3, "-o", tmp_path / "f").out)
    assert (won["options"]["opt_level"], won["engine"]) == (3, str(tmp_path / "f"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("precison = 'int8'", "optdnn build has no option 'precison'; did you mean 'precision'?"),
        ("zzzzzz = 1", "optdnn build has no option 'zzzzzz'\n"),
        ("model = 'm.onnx'", "has no option 'model'"),
        ("config = 'c.toml'", "has no option 'config'"),
        ("strict = 'yes'", "strict takes true or false, not 'yes'"),
        ("threads = [1, 2]", "threads takes one value, not [1, 2]"),
        ("threads = true", "threads takes one value, not True"),
        ("shape = [['x']]", "shape takes a list of values"),
        ("threads = 'two'", "'two' is not a valid int"),
        ("target = ", "is not TOML"),
    ],
)
def test_a_config_file_that_is_wrong_says_where(
    cli: Cli, model: Path, config: Any, text: str, message: str, tmp_path: Path
) -> None:
    code, out, err = cli("build", model, "-o", tmp_path / "e", "--config", config(text))
    assert (code, out) == (2, "")
    assert message in err
    assert not (tmp_path / "e").exists()


def test_a_config_file_that_is_absent(cli: Cli, model: Path, tmp_path: Path) -> None:
    code, _, err = cli("build", model, "--config", tmp_path / "absent.toml")
    assert code == 2
    assert f"cannot read {tmp_path / 'absent.toml'}" in err


# ---------------------------------------------------------------- completion


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("optdnn b", ["plain,build", "plain,bench"]),
        ("optdnn build --precision fp", ["plain,fp32", "plain,fp16", "plain,fp8"]),
        ("optdnn bench --inst", ["plain,--instances"]),
    ],
)
def test_a_shell_completes_commands_options_and_values(words: str, found: list[str]) -> None:
    env = {**os.environ, "_OPTDNN_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    program = [sys.executable, "-c", "from optdnn.cli.main import main; main()"]
    done = subprocess.run(program, capture_output=True, text=True, env=env, cwd=ROOT, timeout=60)
    assert done.stdout.split() == found, done.stderr


def test_help_says_how_to_have_it(cli: Cli) -> None:
    out = " ".join(cli("--help").out.split())
    for shell in ("bash", "zsh", "fish"):
        assert completion_line(shell) in out


# ---------------------------------------------------------------- tables


def test_a_table_that_is_cut_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stdout, "_force_terminal", True)
    monkeypatch.setattr(stdout, "_width", 60)
    monkeypatch.setattr(stdout, "_height", 25)
    monkeypatch.setattr(stdout, "_color_system", None)
    rows = [[k, f"{k / 7:.6f}", "short", "a long name " * k] for k in range(1, 12)]
    columns = ["number", "value", "kind", "name"]
    stdout.print(table(None, columns, rows, right=[0, 1], clip=[2, 3]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(rows)
    assert max(map(len, lines)) <= 60
    assert all(f"{k / 7:.6f} short " in line for k, line in zip(range(1, 12), lines[1:], strict=True))
    assert lines[-1].rstrip().endswith("…")
    monkeypatch.setattr(stdout, "_width", 20)
    stdout.print(table(None, columns, rows, right=[0, 1], clip=[2, 3]))
    narrow = capsys.readouterr().out
    assert all(f"{k / 7:.6f}" in narrow for k in range(1, 12))  # figures are never cut
    monkeypatch.setattr(stdout, "_force_terminal", False)
    stdout.print(table(None, columns, rows, clip=[3]))
    assert ("a long name " * 11).rstrip() in capsys.readouterr().out  # not cut in a file


def test_a_pin_given_again_takes_the_later_place() -> None:
    """The last pattern counts, so a pattern that is given twice must not keep its first place."""
    assert list(parse_pins(["a*=fp16", "b=fp32", "a*=fp32"]).items()) == [("b", "fp32"), ("a*", "fp32")]
