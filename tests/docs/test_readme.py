"""The README is true: its commands exist and work, its links have targets, and it stays short."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks import supported
from benchmarks.supported import NOT_DONE, missing, table
from optdnn.cli.main import COMMANDS, cli

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def text() -> str:
    if not README.exists():
        pytest.skip("an installed copy has no README.md")
    return README.read_text(encoding="utf-8")


def test_it_is_short() -> None:
    assert len(text().splitlines()) <= 200
    assert len(text().encode()) <= 12_000


def test_the_operator_table_is_the_codes() -> None:
    assert "| convolution | Conv, ConvTranspose" in table()
    assert "With a seed (`--random-seed`), also the random operators: Bernoulli, Multinomial," in table()


def test_unsupported_nodes_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing()["files of pictures are decoded before the network"] == ["ImageDecoder"]
    monkeypatch.setattr(supported, "NOT_DONE", {k: v for k, v in NOT_DONE.items() if k != "ImageDecoder"})
    with pytest.raises(ValueError, match="ImageDecoder does not import, and there is no reason"):
        missing()
    monkeypatch.setattr(supported, "NOT_DONE", {**NOT_DONE, "Conv": "too hard"})
    with pytest.raises(ValueError, match="Conv matches nothing that is not done"):
        missing()


def test_set_up_holds_exactly_two_commands() -> None:
    section = re.search(r"^## Set up\n(.*?)(?=^## )", text(), re.S | re.M)
    assert section is not None
    assert len(re.findall(r"^```bash\n", section[1], re.M)) == 2


def pages() -> list[Path]:
    """The README and every page of the documentation."""
    text()
    return [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", pages() if README.exists() else [], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_command_and_option_shown_exists(page: Path) -> None:
    import click

    content = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"^```[^\n]*\n(.*?)^```|^    (\S[^\n]*)$", content, re.S | re.M)  # fenced or indented
    code = "\n".join("".join(pair) for pair in found)
    for line in re.findall(r"^(?:\.venv/bin/)?optdnn ([a-z].*)$", code, re.M):
        name, *words = line.partition(" #")[0].replace("[OPTIONS]", "").split()
        assert name in COMMANDS, line
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        used = {w.split("=")[0] for w in words if w.startswith("-") and w != "-"}
        assert used <= known, f"{line}: {used - known}"


@pytest.mark.parametrize("page", pages() if README.exists() else [], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target, heading in re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not heading or linked.suffix != ".md" or heading in anchors(linked), f"{target}#{heading}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings: lower case, hyphens for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def use_section() -> str:
    found = re.search(r"^## First use\n(.*?)(?=^## )", text(), re.S | re.M)
    assert found is not None
    return found[1].replace("224", "8").replace("/conv1/Conv", "conv1")


@pytest.mark.slow
def test_the_commands_of_first_use_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("onnxruntime", "openvino"):
        pytest.importorskip(package)
    from support.onnxnet import convnet

    from optdnn.cli.main import run

    monkeypatch.chdir(tmp_path)
    onnx.save(convnet(batch="N"), "model.onnx")
    np.savez("data.npz", x=np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32))
    commands = [line.split("#")[0].split() for line in re.findall(r"^    optdnn (.*)$", use_section(), re.M)]
    commands = [words for words in commands if "cuda" not in words]  # needs a GPU
    assert len(commands) >= 9
    for words in commands:
        if words[0] in ("bench", "compare"):
            words += ["--duration", "0.1"]
        if words[0] == "compare":
            words += ["--rounds", "2"]
        if "cuda:sm_90a" in words:
            words += ["--shape", "x=1x3x8x8", "--no-cubins"]
        assert run(words) == 0, words
    assert {"model.engine", "model.engine.report.json", "y.npz"} <= {p.name for p in tmp_path.iterdir()}


def test_the_python_of_first_use_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
