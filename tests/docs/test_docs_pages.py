"""Generated parts of README.md and docs/ are up to date."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from support.docs_scripts import docs_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return docs_script("generate")


def test_every_page_is_up_to_date(generate: ModuleType) -> None:
    made = generate.parts()
    texts = {p: p.read_text(encoding="utf-8") for p in generate.pages()}
    stale = [str(p.relative_to(ROOT)) for p, text in texts.items() if generate.updated(text, made) != text]
    assert stale == [], "run: python docs/generate.py"
    used = {m["name"] for text in texts.values() for m in generate.PART.finditer(text)}
    assert used == set(made), "made, and on no page"


def test_a_part_that_nothing_makes_is_refused(generate: ModuleType) -> None:
    text = "<!-- generated: nothing -->\nold\n<!-- end of nothing -->"
    with pytest.raises(ValueError, match="no generated part 'nothing'"):
        generate.updated(text, {"cli": "x"})
    assert generate.updated(text, {"nothing": "new"}).splitlines()[1] == "new"


def test_every_public_name_has_its_place(generate: ModuleType) -> None:
    import optdnn

    listed = {name for names in generate.GROUPS.values() for name in names if "." not in name}
    assert listed == set(optdnn.__all__) - set(optdnn._ERRORS.split())


def test_docstrings_become_markdown(generate: ModuleType) -> None:
    assert generate.prose("see :func:`~a.b.c` or ``d``", fill=True) == "see `c` or `d`"
    assert generate.table(["a"], [["x | y"]]) == "| a |\n| --- |\n| x \\| y |"


def test_getting_started_lists_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = re.findall(r"^\| `([a-z-]+)` \| ", (ROOT / "docs/getting-started.md").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(project["optional-dependencies"])


def test_internals_pages_are_short(generate: ModuleType) -> None:
    """A page that grows beyond this has several subjects. Its generated parts do not count."""
    pages = sorted((ROOT / "docs" / "internals").glob("*.md"))
    sizes = {p.name: len(generate.PART.sub("", p.read_text(encoding="utf-8")).encode()) for p in pages}
    assert {name: size for name, size in sizes.items() if size > 20_000} == {}


def test_every_page_about_kernels_is_listed() -> None:
    folder = ROOT / "docs" / "internals"
    index = (folder / "kernels.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| \[[^]]+\]\((kernels-[a-z0-9-]+\.md)\) \|", index, re.M))
    assert listed == {p.name for p in folder.glob("kernels-*.md")}
