"""A hook of mkdocs, for what GitHub shows well and the built site would not.

Links to files of the repository that are no pages become text. What a block of code needs (``needs="gpu"``, see
tests/docs/test_guides.py) becomes its title.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>\.\./[^)#\s]+)(?:#[^)\s]*)?\)")
NEEDS = re.compile(r"^(```\w+) needs=\"([\w,]+)\"$", re.M)
LOG = logging.getLogger("mkdocs.hooks")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page as the site shows it. A link to a file that does not exist is a warning, which ``--strict`` refuses."""
    docs = Path(config.docs_dir).resolve()
    folder = (docs / page.file.src_uri).parent

    def shown(found: re.Match[str]) -> str:
        target = (folder / found["target"]).resolve()
        page_there = target.is_relative_to(docs) and files.get_file_from_path(target.relative_to(docs).as_posix())
        if page_there and not page_there.inclusion.is_excluded():
            return found[0]
        path = target.relative_to(docs.parent).as_posix() if target.is_relative_to(docs.parent) else str(target)
        if not target.exists():
            LOG.warning("%s links to %s, which does not exist", page.file.src_uri, path)
        text = found["text"]
        return f"`{path}`" if text.strip("`") in (path, target.name) else f"{text} (`{path}`)"

    return LINK.sub(shown, NEEDS.sub(r'\1 title="needs \2"', markdown))
