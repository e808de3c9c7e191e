"""The page of the wide benchmark: untuned networks compared with eager PyTorch and torch.compile, and their slow steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.figures.gpu import NAMES, ms, speeds, workload
from benchmarks.figures.markdown import escaped, geometric, table
from benchmarks.kinds.roofline import listed
from benchmarks.models import TORCH
from benchmarks.rows import Row
from benchmarks.workloads import EXPLAINED, REACH, group

GOAL = 2.0
"""The speed relative to torch.compile that every pair should reach."""
SHOWN_CLIFFS, SHOWN_REASONS = 40, 2
"""Most cliffs in the list over all networks, and most that explain one network."""
PART = 0.08
"""The least share of a run of the kinds of steps that explain a network."""
WHY = 160
"""Most characters of a reason."""


@dataclass(frozen=True)
class Pairs:
    """Rows of a network at a batch each, in the order of the group, and the newest rows with their cliffs by workload.

    ``older``: rows of earlier runs that gave a newer row of ``rows`` the time of torch.compile.
    """

    rows: Sequence[Row]
    cliffs: dict[str, Row]
    older: Sequence[Row] = ()

    def over(self, row: Row) -> float | None:
        """torch.compile's time over ours."""
        theirs, ours = ms(row, "compile"), ms(row, "ours")
        return theirs / ours if theirs and ours else None

    @property
    def ratios(self) -> list[float]:
        """The speedups of all pairs that torch.compile ran, too."""
        return [over for r in self.rows if (over := self.over(r)) is not None]


def readme(rows: Sequence[Row]) -> str:
    """The README's two sentences; "" without rows beside torch.compile."""
    ratios = _pairs(rows, _mine(rows)).ratios
    if not ratios:
        return ""
    slower = sum(ratio < 1 for ratio in ratios) or "none"
    return (
        f"[The wide benchmark](docs/performance/wide.md) has {len(ratios)} pairs of a network and a batch size. Nothing was tuned "
        "for them: the cost model chose\n"
        f"the kernels. optdnn is {geometric(ratios):.2f} times as fast as `torch.compile` in geometric mean, and slower on "
        f"{slower}."
    )


def page(rows: Sequence[Row]) -> str:
    """The page: each part that has rows, under a heading."""
    mine = _mine(rows)
    if not mine:
        return ""
    pairs = _pairs(rows, mine)
    parts = {
        "": _summary(pairs, rows),
        "Goals": named(pairs),
        f"Under {GOAL:g} times torch.compile": slow(pairs),
        "Every pair": every(pairs),
        "Compared with max-autotune": most_tuned(mine),
        "Slow steps": cliffs(pairs),
    }
    return "\n\n".join(f"## {head}\n\n{text}" if head else text for head, text in parts.items() if text)


def _mine(rows: Sequence[Row]) -> list[Row]:
    """The times of networks of PyTorch's packages, beside PyTorch's own. Those stored in fp32 have a table of their own."""
    others = {w.name for w in group("wide-fp32")}
    mine = [r for r in speeds(rows) if workload(r).source in TORCH and r["workload"] not in others]
    return [r for r in mine if "ours" in r["times"] and _beside_torch(r)]


def _pairs(rows: Sequence[Row], mine: Sequence[Row]) -> Pairs:
    """The pairs of the times ``mine``, with the profiles among ``rows``."""
    profiled = {
        r["workload"]: r for r in rows if r["what"] == "roofline" and "words" in r and "predicted" not in r["setup"]
    }
    return joined([r for r in mine if "compile-max" not in r["times"]], profiled)


def _beside_torch(row: Row) -> bool:
    """Whether PyTorch was requested in the same run, even if it failed there."""
    asked = row["setup"].split(" ")[1] if " " in row["setup"] else ""
    return not {"eager", "compile", "compile-max"}.isdisjoint([*asked.split(","), *row["times"]])


def joined(rows: Iterable[Row], profiled: dict[str, Row]) -> Pairs:
    """The newest row for each workload. If its run had no torch.compile, that time comes from an earlier run."""
    best, older = {}, {}
    for row in rows:
        name = row["workload"]
        known = best.get(name)
        best[name] = row
        if known is not None and "compile" in known["times"] and "compile" not in row["times"]:
            best[name] = {**row, "times": {**row["times"], "compile": known["times"]["compile"]}}
            older.setdefault(name, known)
        elif "compile" in row["times"]:
            older.pop(name, None)
    return Pairs(_ordered(best), profiled, _ordered(older))


def _newest(rows: Iterable[Row]) -> list[Row]:
    """The last row for each workload."""
    return _ordered({row["workload"]: row for row in rows})


def _ordered(rows: dict[str, Row]) -> list[Row]:
    """Rows by workload in the order of the group, then all others."""
    order = [w.name for w in group("wide")]
    return [rows[name] for name in dict.fromkeys([*order, *rows]) if name in rows]


def _summary(pairs: Pairs, rows: Sequence[Row]) -> str:
    """Means, counts, and pairs that are not right."""
    ratios = pairs.ratios
    eager = [r["times"]["eager"]["ms"] / r["times"]["ours"]["ms"] for r in pairs.rows if "eager" in r["times"]]
    said = []
    if ratios:
        slower, below = sum(ratio < 1 for ratio in ratios), sum(ratio < GOAL for ratio in ratios)
        said += [
            f"optdnn is **{geometric(ratios):.2f} times** as fast as torch.compile (default mode) in geometric mean of",
            f"{len(ratios)} pairs. Slower: {slower}. Under {GOAL:g} times: {below} (the least: {min(ratios):.2f}).",
        ]
    if pairs.older:
        said.append(_apart(pairs))
    if eager:
        said.append(
            f"Compared with eager PyTorch, it is {geometric(eager):.2f} times as fast in geometric mean of {len(eager)} pairs, "
            f"{min(eager):.2f} at least."
        )
    if wrong := [workload(r).label for r in pairs.rows if "wrong" in r.get("checks", {}).get("ours", {})]:
        said.append(f"Errors beyond rounding, or not finite: {'; '.join(wrong)}.")
    known, wanted = {r["workload"] for r in pairs.rows}, {w.name for w in group("wide")}
    lost = [r for r in rows if r["what"] == "speed" and "error" in r and r["workload"] in wanted - known]
    if lines := [f"{workload(r).label} ({escaped(r['error'][:WHY])})" for r in lost]:
        said.append(f"Without a result: {'; '.join(lines)}.")
    return " ".join(said)


def _apart(pairs: Pairs) -> str:
    """The number of torch.compile's times from earlier runs, and the change of eager PyTorch's times between the two runs."""
    now = {r["workload"]: ms(r, "eager") for r in pairs.rows}
    both = [(now[r["workload"]], ms(r, "eager")) for r in pairs.older]
    moved = [new / old for new, old in both if new and old]
    between = f" (eager PyTorch took {statistics.median(moved):.3f} times as long in our run, median)" if moved else ""
    return (
        f"For {len(pairs.older)} pairs, torch.compile's times are from an earlier run on the same kind of GPU{between}."
    )


def named(pairs: Pairs) -> str:
    """The pairs that have a goal in milliseconds."""
    mine = [r for r in pairs.rows if r["workload"] in REACH]
    lines = [["network, batch", "optdnn ms", "to reach ms"]]
    for row in mine:
        ours, goal = row["times"]["ours"]["ms"], REACH[row["workload"]]
        lines.append([workload(row).label, f"**{ours:.3f}**" if ours <= goal else f"{ours:.3f}", f"{goal:g}"])
    return table(lines, "**Bold**: reached.") if mine else ""


def slow(pairs: Pairs) -> str:
    """The pairs under the goal, the slowest first, each with an explanation."""
    below = [(over, r) for r in pairs.rows if (over := pairs.over(r)) is not None and over < GOAL]
    found = sorted(below, key=lambda pair: pair[0])
    lines = [["network, batch", "over torch.compile", "at roofline", "why"]]
    for over, row in found:
        steps = pairs.cliffs.get(row["workload"])
        share = "–" if steps is None else f"{steps['at_roofline']:.0%}"
        lines.append([workload(row).label, f"{over:.2f}×", share, explanation(row["workload"], steps)])
    said = (
        "At roofline: the share of the run that would remain if each step ran at its roofline. Why: the kinds of steps with their "
        "share of the run, and in brackets the share of their own time that would remain at the roofline. These texts are "
        "of profiles, some of them older than the times: today's program may have fewer launches."
    )
    profiled = [pairs.cliffs[r["workload"]] for _, r in found if r["workload"] in pairs.cliffs]
    return table(lines, said, rows=profiled) if found else ""


def explanation(name: str, profiled: Row | None) -> str:
    """The reasons why a pair is not faster: the sentence in ``workloads.toml``, then the steps far from their roofline."""
    parts = [EXPLAINED[name]] if name in EXPLAINED else []
    if profiled is not None:
        kinds = [
            f"{w['word']} {w['share']:.0%} ({w['at_roofline']:.0%})" for w in profiled["words"] if w["share"] >= PART
        ]
        parts.append(f"{profiled['count']} launches: {', '.join(kinds)}")
        parts += [
            f"{escaped(c['tactic'] or c['nodes'])} takes {c['share']:.0%} {_at(c)}: {escaped(c['why'])}"
            for c in profiled.get("cliffs", ())[:SHOWN_REASONS]
        ]
    return ". ".join(parts) or "not looked into"


def _at(cliff: Row) -> str:
    return "on the CPU" if cliff["roofline"] is None else f"at {cliff['roofline']:.0%} of its roofline"


def every(pairs: Pairs) -> str:
    """All pairs compared with eager and torch.compile."""
    lines = [["network, batch", "optdnn ms", f"{NAMES['eager']} ms", f"{NAMES['compile']} ms", "over torch.compile"]]
    for row in pairs.rows:
        times, over = [ms(row, n) for n in ("ours", "eager", "compile")], pairs.over(row)
        cells = ["–" if t is None else f"{t:.3f}" for t in times]
        lines.append([workload(row).label, *cells, "–" if over is None else f"{over:.2f}×"])
    shaken = [workload(r).label for r in pairs.rows if r.get("disturbed")]
    said = f"The GPU was not quiet before: {'; '.join(shaken)}." if shaken else ""
    libraries = ", ".join(sorted({workload(r).source for r in pairs.rows}))
    how = (
        f"Modules of {libraries} with seeded weights through `optdnn.from_torch`, fp16, by the cost model. Eager and "
        "torch.compile: fp16, channels last, frozen weights, in a CUDA graph. Each result was compared with the module in fp32 "
        "(within 0.03 of the largest output, or twice eager's error)."
    )
    return table(lines, said, how=how, rows=[*pairs.rows, *pairs.older])


def most_tuned(rows: Sequence[Row]) -> str:
    """The pairs for which torch.compile's longest search was tried."""
    mine = _newest(r for r in rows if "compile-max" in r["times"])
    lines = [["network, batch", "optdnn ms", "max-autotune ms", "over max-autotune"]]
    for row in mine:
        ours, theirs = row["times"]["ours"]["ms"], row["times"]["compile-max"]["ms"]
        lines.append([workload(row).label, f"{ours:.3f}", f"{theirs:.3f}", f"{theirs / ours:.2f}×"])
    return table(lines, rows=mine) if mine else ""


def cliffs(pairs: Pairs) -> str:
    """The steps of all networks that are far from their roofline; the largest gain, as a share of the run, comes first."""
    profiled = [pairs.cliffs[w.name] for w in group("wide") if w.name in pairs.cliffs]
    found = listed(profiled)
    if not found:
        return ""
    lines = [["network, batch", "would gain", "of the run", "of roofline", "step", "why"]]
    for c in found[:SHOWN_CLIFFS]:
        at = "CPU" if c["roofline"] is None else f"{c['roofline']:.0%}"
        step = escaped(c["tactic"] or c["nodes"])
        lines.append([workload(c).label, f"{c['gain']:.0%}", f"{c['share']:.0%}", at, step, escaped(c["why"])])
    said = (
        f"{len(found)} steps of {len({c['workload'] for c in found})} pairs are below 25 % of their roofline and take over "
        f"2 % of their run; {len(profiled)} pairs were profiled. Would gain: the share of the run that each "
        "step would save at 25 % of its roofline."
    )
    return table(lines, said, rows=profiled)
