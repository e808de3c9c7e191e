"""The table of a user's waiting times."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.figures.markdown import table
from benchmarks.rows import Row
from benchmarks.workloads import parse

CALLS = {
    "bound": "Python's part of a call with bound buffers",
    "engine_with_gpu_arrays": "Python's part of `engine.run` with GPU arrays",
}


def waits(rows: Sequence[Row]) -> str:
    """Builds, loading, plans for further sizes, calls and retuning."""
    mine = [r for r in rows if r["what"] == "waits" and "error" not in r and r["setup"].startswith("cuda")]
    parts = {r["setup"].split()[-1]: r for r in mine}
    lines = [["what", "measured", "to reach"]]
    if build := parts.get("build"):
        network = parse(build["workload"])[0].label
        same = ", the same bytes" if build.get("the_same_bytes") else ""
        lines.append([f"build of {network}, full autotune, caches cold", f"{build['cold']['seconds']:.1f} s", "120 s"])
        lines.append(["the same, caches warm", f"{build['warm']['seconds']:.1f} s{same}", "5 s"])
    if load := parts.get("load"):
        lines.append(["`optdnn.load` to the first result, a fresh process", f"{load['median_s']:.2f} s", "0.5 s"])
    lines += _plans(parts.get("plan"))
    for key, what in CALLS.items():
        if key in parts.get("call", {}):
            lines.append([what, f"{parts['call'][key]['call_us']:.1f} µs", "20 µs"])
    if tuned := parts.get("retune"):
        network = parse(tuned["workload"])[0].label
        gained = f"{tuned['before_ms']:.4f} → {tuned['after_ms']:.4f} ms, {tuned['seconds']:.0f} s"
        lines.append([f"`optdnn retune` of {network}, built with the GPU hidden", gained, ""])
    if len(lines) == 1:
        return ""
    return table(lines, how="Seconds are those of the whole command.", rows=mine)


def _plans(row: Row | None) -> list[list[str]]:
    """What the first run of a further length takes."""
    if row is None:
        return []
    first, *later = row["lengths"]
    what = "the first run of BERT-base at a length that its engine holds no plan for, the first of a process"
    lines = [[what, f"{row['import_s'] + first['first_s']:.1f} s", ""]]
    for compiled in sorted({r["kernels_compiled"] for r in later}):
        times = sorted(r["first_s"] for r in later if r["kernels_compiled"] == compiled)
        kernels = f"{compiled} kernel{'s' * (compiled > 1)} compiled" if compiled else "no kernel compiled"
        lines.append(
            [f"at a further such length, {kernels}", f"{times[len(times) // 2]:.2f} s", "0.5 s" * (not compiled)]
        )
    return lines
