"""HTML of results for notebooks: small tables, every text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any


class Report(dict[str, Any]):
    """A build's report: a dictionary that a notebook shows as tables."""

    def _repr_html_(self) -> str:
        options: Mapping[str, Any] = self.get("options", {})
        facts = [(name, options[name]) for name in ("target", "precision", "shapes", "tactics") if options.get(name)]
        passes = [(p.get("pass"), p.get("changes")) for p in self.get("passes", ()) if p.get("changes")]
        seconds = [(name, f"{s:.2f}") for name, s in self.get("seconds", {}).items()]
        parts = [table(facts), table(passes, ("pass", "changes")), table(seconds, ("phase", "seconds"))]
        return "\n".join(part for part in parts if part)


def table(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> str:
    """An HTML table, without rows ""."""
    body = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    if not body:
        return ""
    first = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>" if head else ""
    return f"<table>{first}{''.join(f'<tr>{row}</tr>' for row in body)}</table>"
