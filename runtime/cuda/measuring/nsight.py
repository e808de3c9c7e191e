"""NVIDIA's profilers from one call: Nsight Systems for a run, Nsight Compute for the counters of its kernels.

Both start ``optdnn bench --trace`` in a separate process. It launches the kernels of a run one by one, each step in an NVTX range
"NUMBER: ONNX nodes".
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from optdnn.errors import MissingDependency, RunError
from optdnn.runtime.program import Plain

NSYS, NCU = "nsys", "ncu"
SUFFIX = {NSYS: ".nsys-rep", NCU: ".ncu-rep"}
"""The suffix of a report's name."""
NAMES = {NSYS: "Nsight Systems", NCU: "Nsight Compute"}
PAGES = {
    NSYS: "https://developer.nvidia.com/nsight-systems",
    NCU: "https://developer.nvidia.com/nsight-compute",
}
PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute", "/opt/nvidia/nsight-systems")
"""Folders of NVIDIA's packages that contain the tools, besides PATH."""

TIME = "gpu__time_duration.sum"
DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
L2_HITS = "lts__t_sector_hit_rate.pct"
STALLS = "WarpStateStats"
"""The section with the reasons why warps wait."""
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(?P<reason>\w+?)(?<!_not_issued)_per_issue_active\.ratio")
_RANGE = re.compile(r"<default domain>:(?P<step>\d+): ")
_UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
_LAST_LINES = 12


@dataclass(frozen=True)
class Counters:
    """Nsight Compute's counters of one kernel. Percentages are 0 to 100; None: the GPU has no such counter.

    ``dram``: throughput of its memory, as a fraction of the peak; ``tensor``: cycles in which the tensor pipes are active, as a
    fraction of the multiprocessor's active cycles; ``occupancy``: achieved; ``l2_hits``: hit rate of L2; ``stall``: the most
    frequent stall reason of warps, with its share of the time between two instructions of a warp.
    """

    step: int | None
    kernel: str
    us: float
    dram: float | None
    tensor: float | None
    occupancy: float | None
    l2_hits: float | None
    stall: str
    stall_share: float

    def to_plain(self) -> dict[str, Plain]:
        return asdict(self)


def find(tool: str) -> str | None:
    """The path of a tool, or None."""
    if found := shutil.which(tool):
        return found
    folders = [p for place in PLACES for p in (Path(place), *sorted(Path(place).glob("*"), reverse=True))]
    return next((str(f / tool) for f in folders if os.access(f / tool, os.X_OK)), None)


def needed(tool: str) -> str:
    """The path of a tool. Raises MissingDependency."""
    found = find(tool)
    if found is None:
        missing = MissingDependency(f"{NAMES[tool]} ({tool})", "", "to profile an engine")
        missing.hint = f"install it from {PAGES[tool]}, or use --tool trace, which needs nothing"
        raise missing
    return found


def record_run(command: Sequence[str], report: Path) -> None:
    """Run ``command`` under Nsight Systems; ``report`` is its .nsys-rep. Raises MissingDependency, RunError."""
    options = ["profile", "--trace=cuda,nvtx", "--force-overwrite=true", "--output", str(report.with_suffix(""))]
    said = _run([needed(NSYS), *options, *command])
    if not report.exists():  # nsys ends with code 0 even if it cannot write the report
        raise RunError(f"nsys wrote no {report}", hint=_last(said))


def count(command: Sequence[str], steps: Sequence[int], report: Path) -> list[Counters]:
    """Run ``command`` under Nsight Compute, and return the counters of the kernels of these steps (none given: all).

    ``report`` is its .ncu-rep, which Nsight Compute opens. Raises MissingDependency, RunError.
    """
    tool = needed(NCU)
    ranges = [f"^{k}:.*" for k in steps] or ["^[0-9]+:.*"]
    options = ["--force-overwrite", "--export", str(report), "--clock-control", "none", "--nvtx"]
    options += [word for r in ranges for word in ("--nvtx-include", f"regex:{r}/")]
    options += ["--section", STALLS, "--metrics", ",".join((TIME, DRAM, TENSOR, OCCUPANCY, L2_HITS))]
    said = _run([tool, *options, *command])
    if "ERR_NVGPUCTRPERM" in said:
        raise RunError(
            "this user may not read the GPU's counters",
            hint="run as root, or see https://developer.nvidia.com/ERR_NVGPUCTRPERM",
        )
    if not report.exists():
        raise RunError(f"ncu wrote no {report}", hint=_last(said))
    found = counters(_run([tool, "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"]))
    if not found:
        raise RunError("ncu counted no kernel", hint=_last(said))
    return found


def counters(text: str) -> list[Counters]:
    """The counters in the output of ``ncu --csv --page raw``. Raises RunError if it is not such a table."""
    lines = text.splitlines()
    first = next((k for k, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise RunError("ncu printed no table of counters", hint=_last(text))
    header, *rows = csv.reader(io.StringIO("\n".join(lines[first:])))
    if TIME not in header or "Kernel Name" not in header:
        raise RunError(f"ncu's table has no column {TIME}", hint="a newer ncu may have renamed it")
    if not rows:
        return []
    units = dict(zip(header, rows[0], strict=False))
    microsecond = _UNITS.get(units[TIME].replace("econd", ""))
    if microsecond is None:
        raise RunError(f"ncu gives times in {units[TIME]!r}")
    return [_counters(dict(zip(header, row, strict=True)), microsecond) for row in rows[1:] if len(row) == len(header)]


def _counters(row: Mapping[str, str], microsecond: float) -> Counters:
    step = next((m for name, value in row.items() if "Push/Pop" in name and (m := _RANGE.search(value))), None)
    waits: dict[str, float] = {}
    for name, value in row.items():
        if (m := _STALL.fullmatch(name)) and (cycles := _number(value)) is not None:
            waits[m["reason"]] = cycles
    between = sum(waits.values())  # "selected" is no stall: the warp issues its instruction
    longest = max((r for r in waits if r != "selected"), key=lambda r: waits[r], default="")
    hits = _number(row.get(L2_HITS))
    return Counters(
        step=None if step is None else int(step["step"]),
        kernel=row["Kernel Name"],
        us=(_number(row[TIME]) or 0.0) * microsecond,
        dram=_number(row.get(DRAM)),
        tensor=_number(row.get(TENSOR)),
        occupancy=_number(row.get(OCCUPANCY)),
        l2_hits=None
        if hits is None
        else min(hits, 100.0),  # short kernels: hits and lookups of different replays differ
        stall=longest,
        stall_share=waits[longest] / between if between else 0.0,
    )


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:  # "n/a" or nothing
        return None


def _run(words: Sequence[str]) -> str:
    """The output of a command. Raises RunError if the command fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise RunError(f"{words[0]} cannot be started: {error.strerror}") from error
    said = done.stdout + done.stderr
    if done.returncode and "ERR_NVGPUCTRPERM" not in said:
        raise RunError(f"{Path(words[0]).name} ended with code {done.returncode}", hint=_last(said))
    return said


def _last(said: str) -> str:
    return "it said:\n    " + "\n    ".join(said.strip().splitlines()[-_LAST_LINES:])
