"""The hook of mkdocs: links out of docs/, and the requirements of a block, in the built site."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support.docs_scripts import docs_script

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hooks() -> ModuleType:
    return docs_script("hooks")


def shown(hooks: ModuleType, markdown: str) -> str:
    """A page of the folder guide/ in the site. Only ``faq.md`` is beside it."""

    class Files:
        def get_file_from_path(self, path: str) -> object:
            excluded = {"faq.md": False, "Containerfile": True}.get(path)
            return (
                None if excluded is None else SimpleNamespace(inclusion=SimpleNamespace(is_excluded=lambda: excluded))
            )

    page = SimpleNamespace(file=SimpleNamespace(src_uri="guide/x.md"))
    config = SimpleNamespace(docs_dir=str(ROOT / "docs"))
    found: str = hooks.on_page_markdown(markdown, page=page, config=config, files=Files())
    return found


def test_links_to_pages_stay_and_others_become_text(hooks: ModuleType) -> None:
    assert shown(hooks, "[a](../faq.md#b) ![c](../d.svg)") == "[a](../faq.md#b) ![c](../d.svg)"
    assert shown(hooks, "[docs/Containerfile](../Containerfile)") == "`docs/Containerfile`"
    assert shown(hooks, "[how](../../CONTRIBUTING.md#x)") == "how (`CONTRIBUTING.md`)"


def test_a_link_to_nothing_is_a_warning(hooks: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        shown(hooks, "[a](../../NOTHING.md)")
    assert "guide/x.md links to NOTHING.md, which does not exist" in caplog.text


def test_needs_of_a_block_are_its_title(hooks: ModuleType) -> None:
    assert shown(hooks, '```python needs="gpu"\nx\n```') == '```python title="needs gpu"\nx\n```'
