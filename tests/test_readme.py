"""The README tells the truth: its table is the code's, its commands exist, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from optdnn.cli.main import COMMANDS, cli
from optdnn.ops import support
from optdnn.ops.support import BEGIN, NOT_DONE, missing, table, updated

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def text() -> str:
    if not README.exists():
        pytest.skip("an installed copy has no README.md")
    return README.read_text(encoding="utf-8")


def test_the_operator_table_is_the_codes() -> None:
    assert updated(text()) == text(), "run: python -m optdnn.ops.support README.md"
    assert "| convolution | Conv, ConvTranspose" in table()


def test_what_is_not_done_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "RandomNormal" in missing()["random: a compiled network gives the same result for the same input"]
    monkeypatch.setattr(support, "NOT_DONE", {k: v for k, v in NOT_DONE.items() if k != "ImageDecoder"})
    with pytest.raises(ValueError, match="ImageDecoder does not import, and there is no reason"):
        missing()
    monkeypatch.setattr(support, "NOT_DONE", {**NOT_DONE, "Conv": "too hard"})
    with pytest.raises(ValueError, match="Conv matches nothing that is not done"):
        missing()


def test_a_text_without_the_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no place"):
        updated(text().replace(BEGIN, ""))


def test_set_up_holds_exactly_two_commands() -> None:
    section = re.search(r"^## Set up\n(.*?)(?=^## )", text(), re.S | re.M)
    assert section is not None
    assert len(re.findall(r"^```bash\n", section[1], re.M)) == 2


def test_every_command_and_option_shown_exists() -> None:
    import click

    for line in re.findall(r"^ *(?:\.venv/bin/)?optdnn ([a-z].*)$", text(), re.M):
        name, *words = line.split()
        assert name in COMMANDS, line
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        used = {w.split("=")[0] for w in words if w.startswith("-") and w != "-"}
        assert used <= known, f"{line}: {used - known}"


def test_the_figures_are_the_newest_results(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "benchmarks" / "figures.py"
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location("figures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.updated(text()) == text(), "run: python benchmarks/figures.py README.md"


def test_links_to_files_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", text()):
        assert (ROOT / target).exists(), target


def use_section() -> str:
    found = re.search(r"^## Use\n(.*?)(?=^## )", text(), re.S | re.M)
    assert found is not None
    return found[1].replace("224", "8")


def test_the_commands_of_use_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("onnxruntime", "openvino", "jinja2"):
        pytest.importorskip(package)
    from support.onnxnet import convnet

    from optdnn.cli.main import run
    from optdnn.runtime.cpu.openvino import refuses

    monkeypatch.chdir(tmp_path)
    onnx.save(convnet(batch="N"), "model.onnx")
    np.save("image.npy", np.ones((1, 3, 8, 8), np.float32))
    rng = np.random.default_rng(0)
    np.savez("data.npz", x=rng.standard_normal((8, 3, 8, 8)).astype(np.float32), labels=rng.integers(0, 5, 8))
    commands = [line.split("#")[0].split() for line in re.findall(r"^    optdnn (.*)$", use_section(), re.M)]
    assert len(commands) >= 8
    for words in commands:
        if "bf16" in words and refuses("bf16"):
            continue
        if words[0] in ("bench", "compare"):
            words += ["--duration", "0.1"]
        if "auto" in words:
            words += ["--max-drop", "100", "--tactics", "onnxruntime", "--threads", "1", "--budget", "1"]
        if words[0] == "compare":
            words += ["--rounds", "2"]
        assert run(words) == 0, words
    assert {"model.engine", "model.engine.report.json", "y.npz", "report.html"} <= {p.name for p in tmp_path.iterdir()}


def test_the_python_of_use_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    from support.onnxnet import convnet

    monkeypatch.chdir(tmp_path)
    onnx.save(convnet(batch="N"), "model.onnx")
    code = re.search(r"^```python\n(.*?)^```", use_section(), re.S | re.M)
    assert code is not None
    names = {"array": np.ones((1, 3, 8, 8), np.float32), "buffer": np.zeros((1, 5), np.float32)}
    exec(code[1], names)
    assert names["buffer"].any()
    np.testing.assert_array_equal(names["y"], names["buffer"])
