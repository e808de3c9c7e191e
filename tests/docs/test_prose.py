"""Phrases that the project avoids in its code and pages: another form of such a sentence is easier to read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("optdnn", "passes", "runtime", "cli", "models", "benchmarks", "docs")
BAD = re.compile(r"(?<!each )(?<!most )(?<!all )(?<!none )(?<!some )(?<!one )(?<!two )(?<!half )\bof which\b")
"""For "pixels of which eight are empty", say "eight of the pixels are empty", or begin a new sentence."""


def found(text: str) -> list[str]:
    return [match[0] for match in BAD.finditer(" ".join(text.split()))]


@pytest.mark.parametrize("folder", FOLDERS)
def test_clumsy_turns_of_phrase(folder: str) -> None:
    files = [p for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".md"} and "CHANGELOG" not in p.name]
    assert files
    assert {str(p.relative_to(ROOT)): bad for p in files if (bad := found(p.read_text(encoding="utf-8")))} == {}


def test_faults_that_are_noticed() -> None:
    assert found("blocks of pixels of\nwhich eight are one") == ["of which"]
    assert found("Images, of which some are kept.") == ["of which"]
    assert found("two launches, each of which reads the input") == []
