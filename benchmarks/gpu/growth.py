"""Draws the growth series of ``targets.py --growth`` as an SVG: latency over batch or sequence, both axes logarithmic.

python benchmarks/gpu/growth.py benchmarks/results/growth-h200.json benchmarks/results/growth-h200.svg
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 430, 330
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 34, 44
TITLES = {"resnet50": ("ResNet-50, fp16", "batch"), "bert_base": ("BERT-base, fp16, batch 1", "tokens")}
COLOURS = {"ours": "#1b6ca8", "own": "#7a5195", "libraries": "#2a9d5c", "eager": "#d1495b"}
NAMES = {"ours": "optdnn", "own": "our kernels alone", "libraries": "the libraries alone",
         "eager": "PyTorch eager in a graph"}  # fmt: skip


def series(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Network -> candidate -> (size, milliseconds), of the rows that were measured."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        size = row.get("settings", {}).get("sequence_length", row["batch"])
        for name, candidate in row.get("candidates", {}).items():
            if candidate.get("median_ms") is not None and "error" not in candidate:
                found.setdefault(row["model"], {}).setdefault(name, []).append((size, candidate["median_ms"]))
    return found


def panel(model: str, lines: Mapping[str, Sequence[tuple[int, float]]], x0: float) -> list[str]:
    """One plot at ``x0``."""
    sizes = sorted({n for points in lines.values() for n, _ in points})
    times = [t for points in lines.values() for _, t in points]
    low, high = 10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times)))

    def at(size: float, ms: float) -> tuple[float, float]:
        wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        x = math.log(size / sizes[0]) / (math.log(sizes[-1] / sizes[0]) or 1)
        y = math.log(ms / low) / math.log(high / low)
        return round(x0 + LEFT + x * wide, 1), round(TOP + (1 - y) * tall, 1)

    title, unit = TITLES.get(model, (model, "size"))
    out = [f'<text x="{x0 + LEFT}" y="20" class="t">{escape(title)}: ms over {unit}</text>']
    decade = low
    while decade <= high * 1.001:
        for k in range(1, 10) if decade < high else (1,):
            (left, y), (right, _) = at(sizes[0], decade * k), at(sizes[-1], decade * k)
            out.append(f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" class="{"g" if k == 1 else "h"}"/>')
            if k == 1:
                out.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{decade:g}</text>')
        decade *= 10
    for n in sizes:
        x, y = at(n, low)
        out.append(f'<text x="{x}" y="{y + 16}" text-anchor="middle">{n}</text>')
    for k, (name, points) in enumerate(lines.items()):
        colour = COLOURS.get(name, "#555")
        path = " ".join(f"{x},{y}" for x, y in (at(n, t) for n, t in sorted(points)))
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in (at(n, t) for n, t in points)]
        y = HEIGHT - 8
        x = x0 + LEFT + k * 125
        out.append(f'<rect x="{x}" y="{y - 8}" width="10" height="10" fill="{colour}"/>')
        out.append(f'<text x="{x + 14}" y="{y}">{escape(NAMES.get(name, name))}</text>')
    return out


def draw(data: Mapping[str, Any]) -> str:
    """The SVG of a result of ``targets.py --growth``. Raises ValueError where nothing was measured."""
    found = series(data["rows"])
    if not found:
        raise ValueError("the file holds no measurement")
    parts = [text for k, (model, lines) in enumerate(found.items()) for text in panel(model, lines, k * WIDTH)]
    style = "text{font:11px sans-serif;fill:#333}.t{font-weight:bold;font-size:13px}.g{stroke:#999}.h{stroke:#e4e4e4}"
    size = f'width="{WIDTH * len(found)}" height="{HEIGHT}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    target.write_text(draw(json.loads(source.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
