"""Reports of a comparison and its build, as a table, as Markdown and as one self-contained HTML file.

All of them show the same plain data (:meth:`optdnn.compare.comparison.Comparison.to_plain`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from optdnn.report.html import to_html
from optdnn.report.markdown import to_markdown
from optdnn.report.page import require_jinja
from optdnn.report.words import error_cells, problems, sentences, speedup_text
from optdnn.runtime.file.atomic import check_writable, write_atomic
from optdnn.runtime.program import Plain

if TYPE_CHECKING:
    from optdnn.report.drawing import Drawing

__all__ = [
    "check_outputs",
    "error_cells",
    "problems",
    "sentences",
    "speedup_text",
    "to_html",
    "to_markdown",
    "write_reports",
]


def check_outputs(files: Mapping[str, Path | None]) -> None:
    """Refuse, before any work, files that could not be written at its end: form ("html", …) -> path.

    Raises OutputError, and MissingDependency where HTML is requested and jinja2 is absent.
    """
    for form, path in files.items():
        if path is not None:
            check_writable(path)
            if form == "html":
                require_jinja()


def write_reports(
    report: Mapping[str, Plain], files: Mapping[str, Path | None], drawing: Drawing | None = None
) -> list[Path]:
    """Write the report in each form that has a path; returns the paths. ``drawing`` is the network in HTML. Raises OutputError."""
    forms: dict[str, Callable[[Mapping[str, Plain]], str]] = {
        "html": partial(to_html, drawing=drawing),
        "markdown": to_markdown,
    }
    written = {form: path for form, path in files.items() if path is not None}
    for form, path in written.items():
        write_atomic(path, [forms[form](report).encode()])
    return list(written.values())
