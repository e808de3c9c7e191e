"""Helpers of all tables: Markdown, means, and the facts of the runs that measured the rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks.rows import Row

GPU_PACKAGES = {"torch": "torch", "nvidia-cudnn-cu13": "cuDNN", "nvidia-cublas": "cuBLAS"}
CPU_PACKAGES = {"onnxruntime": "onnxruntime", "openvino": "openvino"}
"""Package -> its name in a table's note."""


def table(lines: Sequence[Sequence[str]], said: str = "", *, how: str = "", rows: Sequence[Row] = ()) -> str:
    """A Markdown table, a text after it, and a closed note about how its ``rows`` were measured. The first line is the head;
    numbers are right-aligned."""
    marked = [lines[0], ["---", *["--:"] * (len(lines[0]) - 1)], *lines[1:]]
    parts = ["\n".join(f"| {' | '.join(line)} |" for line in marked), said.strip(), note(how, rows)]
    return "\n\n".join(part for part in parts if part)


def escaped(text: str) -> str:
    """Text for a cell: no bars, no line breaks, no markup."""
    return " ".join("".join(f"\\{c}" if c in r"\`*_|<>" else c for c in text).split())


def note(how: str, rows: Sequence[Row]) -> str:
    """A collapsed note: machine, versions, commits and commands of the rows' runs, those with the most rows first."""
    if not rows:
        return ""
    commands = [command for command, _ in Counter(row["run"]["command"] for row in rows).most_common()]
    text = f"{measured_on(rows)}. {how}".strip()
    block = ["```text", *map(shortened, commands), "```", "", "</details>"]
    return "\n".join(['<details markdown="1">', "<summary>How it was measured</summary>", "", text, "", *block])


SHOWN = 6
"""Most workloads of a command that a note shows."""


def shortened(command: str) -> str:
    """A command of many workloads with only the first few; ``benchmarks/results`` has all of it."""
    words = command.split()
    named = [k for k, word in enumerate(words) if "/" in word and not words[k - 1].startswith("-")]
    left_out = set(named[SHOWN:])
    if not left_out:
        return command
    kept = [word for k, word in enumerate(words) if k not in left_out]
    return " ".join([*kept[: named[SHOWN - 1] + 1], f"(and {len(left_out)} more)", *kept[named[SHOWN - 1] + 1 :]])


def geometric(values: Iterable[float]) -> float:
    """The geometric mean. Raises ValueError if there are no values."""
    logs = [math.log(v) for v in values]
    if not logs:
        raise ValueError("the geometric mean of no values is not defined")
    return math.exp(sum(logs) / len(logs))


def measured_on(rows: Sequence[Row]) -> str:
    """Machine, versions, dates and commits of the rows' runs."""
    runs = [row["run"] for row in rows]
    wanted = GPU_PACKAGES if "gpu" in runs[0]["machine"] else CPU_PACKAGES
    versions = {name: v for run in runs for p, name in wanted.items() if (v := run["versions"].get(p))}
    dates = sorted({run["date"] for run in runs})
    commits = list(dict.fromkeys(run["commit"][:8] for run in runs if run["commit"]))
    parts = [
        *dict.fromkeys(_machine(run) for run in runs),
        ", ".join(f"{name} {v}" for name, v in versions.items()),
        " to ".join(dict.fromkeys([dates[0], dates[-1]])) + (f", commit {', '.join(commits)}" if commits else ""),
    ]
    return "; ".join(part for part in parts if part)


def _machine(run: Row) -> str:
    machine = run["machine"]
    if "gpu" in machine:
        return f"{machine['gpu']}, driver {machine['driver']}"
    return f"{machine['cpu']}, {machine['cores']} cores"
