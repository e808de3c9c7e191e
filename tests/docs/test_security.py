"""SECURITY.md: each promise names an existing test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))
UNTESTED = ("A model runs no code",)
"""A promise about something absent. Every other promise names its test."""


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_the_test_of_a_promise_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {d.name for d in tree.body if isinstance(d, ast.FunctionDef)}


def test_every_promise_names_a_test() -> None:
    promised = [part.partition("\n\nWe do not promise")[0] for part in TEXT.split("We promise:\n\n")[1:]]
    promises = [p for part in promised for p in re.split(r"^- ", part, flags=re.M)[1:]]
    assert len(promises) > 30
    assert [p for p in promises if "`tests/" not in p and not p.startswith(UNTESTED)] == []
