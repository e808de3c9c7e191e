"""The README tells the truth: its table is the code's, its commands exist, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from optdnn.cli.main import COMMANDS, cli
from optdnn.ops.support import BEGIN, table, updated

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def text() -> str:
    if not README.exists():
        pytest.skip("an installed copy has no README.md")
    return README.read_text(encoding="utf-8")


def test_the_operator_table_is_the_codes() -> None:
    assert updated(text()) == text(), "run: python -m optdnn.ops.support README.md"
    assert "| convolution | Conv, ConvTranspose" in table()


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


def test_the_figures_are_the_newest_results() -> None:
    path = ROOT / "benchmarks" / "figures.py"
    spec = importlib.util.spec_from_file_location("figures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.updated(text()) == text(), "run: python benchmarks/figures.py README.md"


def test_links_to_files_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", text()):
        assert (ROOT / target).exists(), target
