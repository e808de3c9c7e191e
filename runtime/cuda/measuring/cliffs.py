"""Cliffs: steps of a measured run that take far longer than their work needs, and the reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optdnn.runtime.program import Plain, Program

BELOW, OVER = 0.25, 0.02
"""A cliff reaches less than this fraction of its roofline, and takes more than this fraction of the run."""
LAUNCH_US = 4.0
"""Microseconds below which a step's launch, not its work, determines its time."""
BEST = "no other tactic is faster, and its best configuration is no faster"
"""The reason if nothing else is known."""
MOST_OF_A_GPU = 0.8
"""Blocks for this fraction of the multiprocessors leave hardly any of the GPU idle."""


def cliffs(steps: Sequence[Mapping[str, Any]], program: Program) -> list[dict[str, Plain]]:
    """The cliffs among the ``steps`` of a profile, the largest possible gain first.

    Each is a mapping of step, src, tactic, us, share, roofline (None on the CPU), ``gain_us`` and ``why``; and ``source``, if the
    steps record the origin of their times. ``gain_us`` is the saving if the step reached :data:`BELOW` of its roofline; of a step
    on the CPU, its whole time.
    """
    found: list[dict[str, Plain]] = []
    for s in steps:
        share = s["roofline"]
        slow = s["executor"] != "cuda" if share is None else share < BELOW
        if slow and s["share"] > OVER and s["us"] > LAUNCH_US:
            gain = s["us"] * (1 - (share or 0.0) / BELOW)
            kept: dict[str, Plain] = {k: s[k] for k in ("step", "src", "tactic", "us", "share", "roofline")}
            kept |= {"source": s["source"]} if "source" in s else {}
            found.append({**kept, "gain_us": gain, "why": _why(s, program)})
    return sorted(found, key=lambda c: -float(c["gain_us"]))


def _of_one_wave(blocks: int, multiprocessors: int) -> str:
    """Why a launch is slow if its blocks all run at once."""
    if blocks < MOST_OF_A_GPU * multiprocessors:
        few = "1 block does" if blocks == 1 else f"{blocks} blocks do"
        return f"{few} not fill {multiprocessors} multiprocessors"
    return f"its {blocks} blocks all run at once, so the latency of one block sets its time"


def _why(step: Mapping[str, Any], program: Program) -> str:
    """Why the step is slow, as far as the plan knows."""
    src = set(step["src"])
    if step["executor"] == "copy":
        return "it copies between the GPU and the host, where operators of the CPU need it"
    if step["executor"] != "cuda":
        rows: Any = program.meta.get("host", {}).get("operators", ())
        return next((str(o["why"]) for o in rows if src & set(o["nodes"])), "it runs on the CPU")
    launch = program.steps[step["step"]].params.get("launch")
    blocks = 0 if launch is None else int(launch["grid"][0]) * int(launch["grid"][1]) * int(launch["grid"][2])
    planned: Any = program.meta.get("gpu")
    reasons = []
    if planned and 0 < blocks <= planned["multiprocessors"]:
        reasons.append(_of_one_wave(blocks, planned["multiprocessors"]))
    decisions: Any = program.meta.get("tactics", ())
    tactic = str(step["tactic"]).partition(" ")[0]
    if tactic.endswith("_sm90"):  # the fastest family: refusals of others explain nothing
        return reasons[0] if reasons else BEST
    mine = [
        d
        for d in decisions
        if d["tactic"] == tactic and not d.get("dropped") and src & {*d["nodes"], *d.get("with", ())}
    ]
    refusals = mine[0].get("refused", ()) if mine else ()
    family = [r for r in refusals if r["tactic"].partition("_")[0] == tactic.partition("_")[0]]
    for refused in (family or refusals)[:3]:  # other families are often for other patterns of operators
        reasons.append(f"{refused['tactic']} refuses: {refused['reason']}")
    return "; ".join(reasons) or BEST
