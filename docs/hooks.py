"""A hook of mkdocs: links to files of the repository outside of docs/ work on GitHub; in the built pages they become text."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>\.\./[^)#\s]+)(?:#[^)\s]*)?\)")
LOG = logging.getLogger("mkdocs.hooks")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page with such links replaced. A link to a file that does not exist is a warning, which ``--strict`` refuses."""
    docs = Path(config.docs_dir).resolve()
    folder = (docs / page.file.src_uri).parent

    def shown(found: re.Match[str]) -> str:
        target = (folder / found["target"]).resolve()
        if target.is_relative_to(docs):
            return found[0]
        path = target.relative_to(docs.parent).as_posix() if target.is_relative_to(docs.parent) else str(target)
        if not target.exists():
            LOG.warning("%s links to %s, which does not exist", page.file.src_uri, path)
        text = found["text"]
        return f"`{path}`" if text.strip("`") in (path, target.name) else f"{text} (`{path}`)"

    return LINK.sub(shown, markdown)
