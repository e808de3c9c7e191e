"""A bar chart in the terminal: plain text, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 79
_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(value: float, scale: float, cells: int) -> str:
    """A bar of ``value / scale`` of ``cells`` character cells, to an eighth of a cell."""
    eighths = max(1, round(8 * cells * max(0.0, min(1.0, value / scale))))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def chart(rows: Sequence[tuple[str, str, float, str]]) -> list[str]:
    """Lines of (group, name, value, text after the bar); a group's name is on its first line, and its longest bar is full.

    Bars of different groups are not to be compared: each group has its own scale."""
    groups = max(len(g) for g, *_ in rows)
    names = max(len(n) for _, n, *_ in rows)
    texts = max(len(t) for *_, t in rows)
    cells = max(10, WIDTH - groups - names - texts - 4)
    scale = {g: max(v for other, _, v, _ in rows if other == g) for g, *_ in rows}
    lines, last = [], None
    for group, name, value, text in rows:
        shown = "" if group == last else group
        drawn = bar(value, scale[group] or 1.0, cells)
        lines.append(f"{shown:<{groups}}  {name:<{names}} {drawn:<{cells}} {text:>{texts}}".rstrip())
        last = group
    return lines
