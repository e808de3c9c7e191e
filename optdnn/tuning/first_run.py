"""The first runs of a program that a build has finished, in a process of their own, and what the build falls back to.

A program runs launch by launch, then as its graph, many times. Where the graph hangs, crashes or gives something else than its
launches one by one, the program is tried in one lane, then without early launches, and the first form whose graph runs is kept.
Where a launch fails alone, no form helps: its operator gets the next candidate, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from optdnn.config import BuildOptions
from optdnn.errors import GpuFault, RunError
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder
from optdnn.lowering.choose import Selection, TacticChoice, alternatives
from optdnn.lowering.cuda import lower_cuda
from optdnn.lowering.table import TACTICS
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.program import Plain, Program, Step
from optdnn.target_name import TargetName
from optdnn.tuning.result import Tuned

KEY = "first_run"
"""In a program's ``meta``: which form was kept, what was wrong with those before it, and with candidates. Absent where all was
well at first."""
REPLACED = 5
"""Most candidates that a finished program loses before the build gives up."""
AS_BUILT, ONE_LANE, NOT_EARLY = "as built", "one lane", "one lane, no early launches"


@dataclass
class Tried:
    """How a program's first runs went: ``form`` is the one that is kept, ``replays`` how often its graph ran, ``same`` whether its
    launches repeat to the bit; ``refused`` are the forms before it, each with why, ``lost`` the candidates that were replaced by
    others (kind, nodes, candidate, why); ``skipped``: why nothing ran."""

    form: str = AS_BUILT
    replays: int = 0
    same: bool = True
    refused: dict[str, str] = field(default_factory=dict)
    lost: list[dict[str, Plain]] = field(default_factory=list)
    skipped: str | None = None

    def to_plain(self) -> dict[str, Plain]:
        """For the build's report."""
        found: dict[str, Plain] = {"form": self.form, "replays": self.replays}
        found |= {} if self.skipped is None else {"skipped": self.skipped}
        found |= {} if self.same else {"results": "its launches do not repeat to the bit"}
        found |= {"refused": dict(self.refused)} if self.refused else {}
        return found | ({"lost": list(self.lost)} if self.lost else {})

    @property
    def warnings(self) -> list[str]:
        """What the user is to know, a line each; none where all is well."""
        found = [f"another candidate was taken for {_told(row)}" for row in self.lost]
        if self.refused:
            why = "; ".join(f"{form}: {why}" for form, why in self.refused.items())
            found.append(f"the program's graph does not run as it was built; it is kept with {self.form} ({why})")
        if self.skipped is not None:
            found.append(f"the program was not run before it was kept: {self.skipped}")
        return found


def _told(lost: Mapping[str, Any]) -> str:
    """A lost candidate in words."""
    return f"{lost['kind']} {' + '.join(lost['nodes'])} than {lost['candidate']}: {lost['why']}"


def forms(program: Program) -> Iterator[tuple[str, Program]]:
    """The program, then its fallbacks. Steps, buffers and the arena are the same: the steps' own order is always one that runs."""
    yield AS_BUILT, program
    if program.lanes:
        note = {**program.meta.get("streams", {}), "lanes": 1, "why": "the graph with lanes did not run"}
        program = replace(program, lanes=(), meta={**program.meta, "streams": note})
        yield ONE_LANE, program
    steps = tuple(map(_late, program.steps))
    if steps != program.steps:
        yield NOT_EARLY, replace(program, steps=steps)


def _late(step: Step) -> Step:
    """The step, its launch not before those before it have ended."""
    launch = step.params.get("launch")
    if launch is None or not launch["dependent"]:
        return step
    return replace(step, params={**step.params, "launch": {**launch, "dependent": False}})


def runs_here(target: str) -> bool:
    """Whether a program for ``target`` runs on the GPU of this machine."""
    name = TargetName.parse(target)
    if name.family != "cuda":
        return False
    from optdnn.runtime.cuda.device import arch_here
    from optdnn.runtime.cuda.usable import why_not

    return why_not() is None and arch_here() == name.arch


def finish(
    graph: Graph,
    options: BuildOptions,
    gpu: GpuFacts,
    meta: dict[str, Any],
    say: Callable[[str], None] = lambda text: None,
    tuned: Tuned | None = None,
    kept: ConstantCache | None = None,
) -> tuple[Program, Tried | None]:
    """The program of an optimized graph after its first runs, and how these went (None: its GPU is not here).

    :func:`~optdnn.lowering.cuda.lower_cuda` makes the program with what was ``tuned``.

    A candidate whose launch hangs, crashes or writes outside of its memory is replaced by the next one. Raises GpuFault where there
    is none, and what lowering raises.
    """
    choices = {} if tuned is None else dict(tuned.choices)
    streams, emitted = (None, None) if tuned is None else (tuned.streams, tuned.emitted)
    refused: dict[str, set[TacticChoice]] = {}
    lost: list[dict[str, Plain]] = []

    def visit(b: Builder, op: Op, key: str) -> None:
        if key in refused:
            offered = alternatives(b, op, TACTICS[op.kind], Selection.of(options))
            named = (TacticChoice(tactic.name, "" if offer is None else offer.name) for tactic, offer in offered)
            other = next((c for c in named if c not in refused[key]), None)
            if other is None:
                raise failed[key]
            choices[key] = other

    failed: dict[str, GpuFault] = {}
    while True:
        program = lower_cuda(graph, options, gpu, dict(meta), say, choices, streams, visit, kept, emitted)
        if not runs_here(options.target):
            return program, None
        try:
            program, tried = first_run(program, say)
        except GpuFault as fault:
            row = _decision(program, fault.step)
            if row is None or len(lost) >= REPLACED:
                raise
            choice = TacticChoice(row["tactic"], row.get("config", ""))
            refused.setdefault(row["signature"], set()).add(choice)
            failed[row["signature"]] = fault
            lost.append({"kind": row["kind"], "nodes": row["nodes"], "candidate": str(choice), "why": fault.message})
            say(f"first run: another candidate for {_told(lost[-1])}")
            emitted = None
            continue
        tried.lost = lost
        if lost:
            program.meta[KEY] = {**program.meta.get(KEY, {"form": tried.form}), "lost": list(lost)}
        return program, tried


def _decision(program: Program, step: int | None) -> Any:
    """The row of ``meta["tactics"]`` that a step comes from; None where it is of none."""
    if step is None:
        return None
    nodes, tactic = set(program.steps[step].src), program.steps[step].params.get("tactic")
    for row in program.meta.get("tactics", ()):
        name = f"{row['tactic']} {row.get('config', row.get('variant', ''))}".rstrip()
        if name == tactic and nodes.intersection(row["nodes"]):
            return row
    return None


def first_run(program: Program, say: Callable[[str], None]) -> tuple[Program, Tried]:
    """The program in the first form that runs (see :func:`runs_here`), and how that went.

    Raises GpuFault where a launch fails alone, or the graph of no form runs.
    """
    from optdnn.runtime.cuda.trials.process import GraphFault, StepFault, TrialTimer, gpu_process

    tried = Tried()
    with gpu_process() as process:
        try:
            timer: Any = TrialTimer(process)
        except RunError as error:  # full of another process's work, say: the build itself does not need it
            tried.skipped = error.message
            return program, tried
        for form, candidate in forms(program):
            say(f"first run: {form}")
            try:
                found = timer.first_run(candidate)
            except StepFault as fault:
                raise GpuFault(
                    f"the program does not run on this GPU: {fault.message}",
                    hint="other kernels may do: --tactics; if the kernel is not your own, please report it",
                    step=fault.step,
                ) from fault
            except GraphFault as fault:
                tried.refused[form] = fault.message
                say(f"first run: {form}: {fault.message}")
                continue
            tried.form, tried.replays, tried.same, tried.skipped = form, found.replays, found.same, found.skipped
            if tried.refused:
                candidate.meta[KEY] = {"form": form, "refused": dict(tried.refused)}
            return candidate, tried
    told = "; ".join(f"{form}: {why}" for form, why in tried.refused.items())
    raise GpuFault(
        f"the program's launches run one by one on this GPU, but their graph does not: {told}",
        hint="please report it",
    )
