"""The tables of the documents, made from the rows under ``benchmarks/results``.

``python docs/generate.py`` writes them into the README and ``docs/performance/``; a test compares the documents with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.figures import checks, cpu, decoding, gpu, waits, wide
from benchmarks.rows import Row, newest, read

TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "readme-gpu": gpu.readme,
    "readme-cpu": cpu.readme,
    "readme-wide": wide.readme,
    **{f"cpu-{precision}": partial(cpu.speed, precision) for precision in ("fp32", "int8", "bf16")},
    "precision-cpu": partial(cpu.precision, "cpu"),
    "precision-h200": partial(cpu.precision, "cuda"),
    "checks": checks.correctness,
    "random": checks.random,
    "soak": checks.soak,
    "targets": gpu.targets,
    "h100": gpu.h100,
    "later": gpu.later,
    "wide-fp32": gpu.stored_in_fp32,
    "decoding": decoding.decoding,
    "streams": gpu.lanes,
    "waits": waits.waits,
    "growth": gpu.growth,
    "wide": wide.page,
}
"""Name -> function from all rows to Markdown; it returns "" if there are no rows for the table."""


def tables(results: Path) -> dict[str, str]:
    """Name -> Markdown of each table that the result files in a folder have rows for."""
    rows = newest(read(*sorted(results.glob("*.jsonl"))))
    return {name: text for name, make in TABLES.items() if (text := make(rows))}
