"""The one format of results: JSON lines.

A line with ``workload`` is a row: ``{"workload", "what", "setup", "run", ...}``. ``what`` is the kind of measurement,
``setup`` the variant of it (target, candidates), and the three together are the row's key. ``times`` maps a candidate to its
milliseconds, ``checks`` holds what was compared, ``error`` says why there is no result. A line without ``workload``
describes a run: its id (``run``), command, commit, date, machine and versions. Rows name their run by its id, so these facts
are stored once in a file. A row may leave out ``what``, ``setup`` and ``run`` if they equal those of the previous row.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from optdnn.runtime.measuring.machine import machine

Row = dict[str, Any]
Key = tuple[str, str, str]
"""``what``, ``workload``, ``setup``."""

REPEATED = ("what", "setup", "run")
"""The fields that a row may take from the row before it."""

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = (
    "numpy", "onnx", "onnxruntime", "openvino", "torch", "torchvision", "timm", "transformers", "diffusers", "torchaudio",
    "cupy-cuda13x", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "nvidia-cublas",
)  # fmt: skip


def facts(command: Sequence[str]) -> Row:
    """The facts of a run. ``command``: the words after ``python -m benchmarks``, without this machine's folders."""
    found = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    here = machine()
    commit = os.environ.get("OPTDNN_COMMIT") or subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    ).stdout.strip()  # fmt: skip
    gpus: Any = here.get("gpus") or []
    gpu = {"gpu": gpus[0], "driver": here["gpu_driver"]} if gpus else {}
    words = [Path(w).name if w.startswith("/") else w for w in command]
    about: Row = {
        "command": " ".join(["python -m benchmarks", *words]),
        "commit": commit,
        "date": time.strftime("%F"),
        "machine": {"cpu": here["cpu"], "cores": here["usable_cores"], **gpu},
        "versions": found,
    }
    return {"run": run_id(about), **about}


def run_id(about: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits that name a run by its facts."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]


def key(row: Mapping[str, Any]) -> Key:
    """The key of a row: workload, kind and setup."""
    return row["what"], row["workload"], row.get("setup", "")


def lines(path: Path) -> list[Row]:
    """The lines of a file, each row with all of its fields. An incomplete last line is left out. Raises ValueError for any other
    broken line."""
    found: list[Row] = []
    before: Row = {}
    text = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(text, 1):
        try:
            row = json.loads(line)
        except ValueError:
            if number < len(text):
                raise ValueError(f"{path}: line {number} is no JSON") from None
            break
        if "workload" in row:
            row = before = {**{k: before[k] for k in REPEATED if k in before}, **row}
        found.append(row)
    return found


def read(*paths: Path) -> list[Row]:
    """The rows of files, each with the facts of its run in place of the id."""
    every = [line for path in paths for line in lines(path)]
    runs = {line["run"]: line for line in every if "workload" not in line}
    return [{**line, "run": runs[line["run"]]} for line in every if "workload" in line]


def gpu_of(row: Row) -> str:
    """The GPU that a row was measured on; "" for none."""
    run = row.get("run")
    return str(run.get("machine", {}).get("gpu", "")) if isinstance(run, Mapping) else ""


def newest(rows: Iterable[Row], gpu: Callable[[Row], str] = gpu_of) -> list[Row]:
    """One row for each key and GPU, in the order of measurement: the last one, but an error does not replace a result."""
    found: dict[tuple[Key, str], Row] = {}
    for row in rows:
        at = key(row), gpu(row)
        known = found.get(at)
        if known is None or "error" not in row or "error" in known:
            found.pop(at, None)
            found[at] = row
    return list(found.values())


ALONE = ("zoo/",)
"""Workloads whose rows serve several tables: rows with fewer candidates are not replaced."""


def replaced(rows: Sequence[Row], gpu: Callable[[Row], str] = gpu_of) -> list[Row]:
    """The rows that no later row replaces: of the same workload and GPU, built in the same way, with the same
    candidates and more."""
    found: list[Row] = []
    later: dict[tuple[str, str, str, str], list[set[str]]] = {}
    for row in reversed(rows):
        target, _, rest = row.get("setup", "").partition(" ")
        built = row["what"], row["workload"], f"{target} {rest.partition(' ')[2]}", gpu(row)
        candidates = set(row.get("times", {}))
        if not any(candidates < more for more in later.get(built, ())) or row["workload"].startswith(ALONE):
            found.append(row)
        later.setdefault(built, []).append(candidates)
    return found[::-1]


def merged(paths: Sequence[Path], what: str) -> str:
    """The text of one file with the newest rows of a kind from several files, compact, and the runs that these rows name."""
    every = [line for path in paths for line in lines(path)]
    gpus = {line["run"]: gpu_of({"run": line}) for line in every if "workload" not in line}

    def gpu(row: Row) -> str:
        return gpus.get(row["run"], "")

    rows = replaced(newest((line for line in every if line.get("what") == what), gpu), gpu)
    used = {row["run"] for row in rows}
    runs = {line["run"]: line for line in every if "workload" not in line and line["run"] in used}
    found, before = [*map(compact, runs.values())], Row()
    for row in map(compact, rows):
        row.setdefault("setup", "")
        found.append({k: v for k, v in row.items() if k not in REPEATED or before.get(k) != v})
        before = row
    return "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in found)


DETAIL: Mapping[str, str] = {
    "": "rounds_ms runs tuning stages further_steps took_s clocks_held_by sm_mhz flops bytes",
    "correctness": "errors repeats",
    "ranges": "sizes shape",
    "decode": "verdict checks launches arena_bytes",
    "roofline": "times step us gain_us",
    "sanitize": "tactics launches kernels family",
    "speed": "verdict another_input min_ms p99_ms load_s repeats build_s steps kernels arena_bytes",
}
"""Kind -> the fields of its rows that no table shows ("": for all kinds)."""
KEPT_CLIFFS, WHY = 3, 160
"""Most slow steps in a kept row, and most characters of the first reason of each step."""
VERSIONS = ("torch", "nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-cuda-nvrtc", "onnxruntime", "openvino")
"""The packages whose versions are kept with a run."""


def compact(line: Row) -> Row:
    """A row or a run without details and empty fields, its numbers with six digits."""
    if "workload" not in line:
        versions = line.get("versions", {})
        return {**line, "versions": {name: versions[name] for name in VERSIONS if name in versions}}
    found: Row = _without(line, {*DETAIL[""].split(), *DETAIL.get(line["what"], "").split()})
    if "cliffs" in found:
        longest = sorted(found["cliffs"], key=lambda c: -float(c["gain"]))[:KEPT_CLIFFS]
        found["cliffs"] = [{**c, "why": c["why"].partition("; ")[0][:WHY]} for c in longest]
    if line["what"] == "speed":
        # Shown: the size of an error beyond the bound, torch.compile's seconds, and builds beside one lane or the libraries.
        shown = {n: c if "wrong" in c else _without(c, {"error_rel"}) for n, c in found.get("checks", {}).items()}
        found["checks"] = {n: c if n.startswith("compile") else _without(c, {"prepare_s"}) for n, c in shown.items()}
        if {"one_lane", "libraries"}.isdisjoint(found.get("times", {})):
            found.pop("builds", None)
        found = _without(found, set())
    return found


def _without(value: Any, dropped: set[str]) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        found = {k: _without(v, dropped) for k, v in value.items() if k not in dropped}
        return {k: v for k, v in found.items() if v is not None and v != [] and v != {}}
    return [_without(v, dropped) for v in value] if isinstance(value, list) else value


class Results:
    """A file to which several threads append rows. ``done``: the keys that need no further measurement."""

    def __init__(self, path: Path, command: Sequence[str], *, again: bool = False):
        """``again``: rows with an error are measured once more."""
        self.path, self.about = path, facts(command)
        _mend(path)
        self.rows = [line for line in lines(path) if "workload" in line]
        self.done = {key(row) for row in self.rows if not (again and "error" in row)}
        self._lock, self._begun = threading.Lock(), False

    def add(self, row: Row) -> None:
        """Append a row; the first one of a run is preceded by the run's facts."""
        made = {**row, "run": self.about["run"]}
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                for line in ([] if self._begun else [self.about]) + [made]:
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._begun = True
            self.rows.append(made)
            self.done.add(key(made))


def _mend(path: Path) -> None:
    """Remove an incomplete last line from a file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text and not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")


def keep(paths: Sequence[Path], folder: Path = RESULTS) -> list[Path]:
    """Put the rows of files into those under ``folder``, a file for each kind. Returns the files that were written."""
    written = []
    for what in sorted({row["what"] for path in paths for row in lines(path) if "workload" in row}):
        target = folder / f"{what}.jsonl"
        target.write_text(merged([target, *paths], what), encoding="utf-8")
        written.append(target)
    return written


def command_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """The options of a command or a kind."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=about, formatter_class=raw)


def error_text(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def say(text: str) -> None:
    """Print a line at once."""
    print(text, file=sys.stdout, flush=True)
