"""The first runs of a finished program, in a separate process, and the fallbacks of the build.

The program runs launch by launch, then many times as a CUDA graph. If the graph hangs, crashes or gives other results
than the single launches, the build tries the program in one lane, then without early launches, and keeps the first form
whose graph runs. If a single launch fails, its operator gets the next candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from optdnn.config import BuildOptions
from optdnn.errors import EngineError, GpuFault, RunError
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder
from optdnn.lowering.choose import Selection, TacticChoice, alternatives
from optdnn.lowering.cubins import cubins_of
from optdnn.lowering.cuda import Prepared, lower_cuda
from optdnn.lowering.table import TACTICS
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.file.validate import collectives
from optdnn.runtime.program import Plain, Program, Step
from optdnn.target_name import TargetName
from optdnn.tuning.earlier_choices import DECIDED, EarlierChoices
from optdnn.tuning.result import Tuned

KEY = "first_run"
"""Key of a program's ``meta``: the form that was kept, and the refused forms and candidates. Absent if the first form runs."""
REPLACED = 5
"""The build gives up after this many candidates whose launches fail."""
AS_BUILT, ONE_LANE, NOT_EARLY = "as built", "one lane", "one lane, no early launches"


@dataclass
class Tried:
    """The outcome of a program's first runs.

    ``form`` is the form that was kept, ``replays`` the number of runs of its graph, ``same``: its launches repeat to
    the bit. ``refused``: earlier form -> reason. ``lost``: candidates that were replaced (kind, nodes, candidate, why).
    ``skipped``: the reason if nothing ran.
    """

    form: str = AS_BUILT
    replays: int = 0
    same: bool = True
    refused: dict[str, str] = field(default_factory=dict)
    lost: list[dict[str, Plain]] = field(default_factory=list)
    skipped: str | None = None

    def to_plain(self) -> dict[str, Plain]:
        """For the build's report."""
        row: dict[str, Plain] = {"form": self.form, "replays": self.replays}
        row |= {} if self.skipped is None else {"skipped": self.skipped}
        row |= {} if self.same else {"results": "its launches do not repeat to the bit"}
        row |= {"refused": dict(self.refused)} if self.refused else {}
        return row | ({"lost": list(self.lost)} if self.lost else {})

    @property
    def warnings(self) -> list[str]:
        """A line for each fallback; empty if the program runs as it was built."""
        lines = [f"another candidate was taken for {_lost_candidate(row)}" for row in self.lost]
        if self.refused:
            lines.append(
                f"the program's graph does not run as it was built; it is kept with {self.form} ({self.refusals})"
            )
        if self.skipped is not None:
            lines.append(f"the program was not run before it was kept: {self.skipped}")
        return lines

    @property
    def refusals(self) -> str:
        """The refused forms with their reasons, in one line."""
        return "; ".join(f"{form}: {why}" for form, why in self.refused.items())


def _lost_candidate(lost: Mapping[str, Any]) -> str:
    """A lost candidate and its fault, for a message."""
    return f"{lost['kind']} {' + '.join(lost['nodes'])} than {lost['candidate']}: {lost['why']}"


def forms(program: Program) -> Iterator[tuple[str, Program]]:
    """The program, then its fallbacks. All have the same steps, buffers and arena: the order of the steps is valid in one lane."""
    yield AS_BUILT, program
    if program.lanes:
        note = {**program.meta.get("streams", {}), "lanes": 1, "why": "the graph with lanes did not run"}
        program = replace(program, lanes=(), meta={**program.meta, "streams": note})
        yield ONE_LANE, program
    steps = tuple(map(_without_early_launch, program.steps))
    if steps != program.steps:
        yield NOT_EARLY, replace(program, steps=steps)


def _without_early_launch(step: Step) -> Step:
    """The step, with a launch that starts only after the previous launches have ended."""
    launch = step.params.get("launch")
    if launch is None or not launch["dependent"]:
        return step
    return replace(step, params={**step.params, "launch": {**launch, "dependent": False}})


def runs_here(target: str) -> bool:
    """Whether this machine has a GPU for programs of ``target``."""
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
    constants: ConstantCache | None = None,
    like: Program | None = None,
) -> tuple[Program, Tried | None]:
    """Lower an optimized graph with the result of tuning, and run the program for the first time.

    Returns the program and the outcome of its first runs (None: this machine has no such GPU). ``like`` is a program with the same
    kernels that has run: it gives its compiled kernels and its form, and nothing is run. A candidate whose launch hangs,
    crashes or writes outside of its memory is replaced by the next one. Raises GpuFault if there is none, and the errors of
    :func:`~optdnn.lowering.cuda.lower_cuda`.
    """
    earlier = None if like is None else EarlierChoices(like)
    choices = earlier.choices if earlier is not None else {} if tuned is None else dict(tuned.choices)
    streams = earlier.lanes if earlier is not None else None if tuned is None else tuned.streams
    prepared = Prepared(choices, streams, None if tuned is None else tuned.emitted)
    if like is not None:
        prepared = replace(prepared, cubins=cubins_of([like]))
    refused: dict[str, set[TacticChoice]] = {}
    faults: dict[str, GpuFault] = {}
    lost: list[dict[str, Plain]] = []

    def visit(b: Builder, op: Op, key: str) -> None:
        if earlier is not None:
            earlier(b, op, key)
        if key in refused:
            replacement = _next_candidate(b, op, options, refused[key])
            if replacement is None:
                raise faults[key]
            choices[key] = replacement

    while True:
        program = lower_cuda(graph, options, gpu, dict(meta), say, prepared, visit, constants)
        if choices or streams is not None:
            program.meta[DECIDED] = {"lanes": None if streams is None else streams.to_plain()}
        if like is not None and earlier is not None:
            earlier.keep_record(program)
            return _in_form_of(program, like), None
        if collectives(program):
            return program, Tried(skipped="it runs on several GPUs together")
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
            faults[row["signature"]] = fault
            lost.append({"kind": row["kind"], "nodes": row["nodes"], "candidate": str(choice), "why": fault.message})
            say(f"first run: another candidate for {_lost_candidate(lost[-1])}")
            prepared = replace(prepared, emitted=None)
            continue
        tried.lost = lost
        if lost:
            program.meta[KEY] = {**program.meta.get(KEY, {"form": tried.form}), "lost": list(lost)}
        return program, tried


def _in_form_of(program: Program, like: Program) -> Program:
    """The program in the form that the first runs of another one with the same steps kept."""
    noted = like.meta.get(KEY)
    if noted is not None:
        known = dict(forms(program))
        if noted.get("form") not in known:
            raise EngineError("the engine's record of its first runs is malformed", hint="build it again")
        program = known[noted["form"]]
        program.meta[KEY] = noted
    if "nvrtc" in like.meta and program.kernels:
        program.meta.setdefault("nvrtc", like.meta["nvrtc"])  # if nothing was compiled
    return program


def _next_candidate(
    b: Builder, op: Op, options: BuildOptions, refused: Collection[TacticChoice]
) -> TacticChoice | None:
    """The first candidate of an operator that is not refused; None if there is none."""
    for tactic, offer in alternatives(b, op, TACTICS[op.kind], Selection.of(options)):
        choice = TacticChoice(tactic.name, "" if offer is None else offer.name)
        if choice not in refused:
            return choice
    return None


def _decision(program: Program, step: int | None) -> Any:
    """The row of ``meta["tactics"]`` of the decision that emitted the step; None if there is none."""
    if step is None:
        return None
    nodes, tactic = set(program.steps[step].src), program.steps[step].params.get("tactic")
    for row in program.meta.get("tactics", ()):
        name = f"{row['tactic']} {row.get('config', row.get('variant', ''))}".rstrip()
        if name == tactic and nodes.intersection(row["nodes"]):
            return row
    return None


def first_run(program: Program, say: Callable[[str], None]) -> tuple[Program, Tried]:
    """The program in the first form that runs, and the outcome. The machine must have its GPU (:func:`runs_here`).

    Raises GpuFault if a single launch fails, or if no form's graph runs.
    """
    from optdnn.runtime.cuda.trials.process import GraphFault, StepFault, TrialTimer, gpu_process

    tried = Tried()
    with gpu_process() as process:
        try:
            timer: Any = TrialTimer(process)
        except RunError as error:  # for example, no memory is free: the build itself needs no GPU
            tried.skipped = error.message
            return program, tried
        for form, candidate in forms(program):
            say(f"first run: {form}")
            try:
                outcome = timer.first_run(candidate)
            except StepFault as fault:
                raise GpuFault(
                    f"the program does not run on this GPU: {fault.message}",
                    hint="try other kernels (--tactics); if the kernel is not your own, please report it",
                    step=fault.step,
                ) from fault
            except GraphFault as fault:
                tried.refused[form] = fault.message
                say(f"first run: {form}: {fault.message}")
                continue
            tried.form, tried.replays, tried.same, tried.skipped = form, outcome.replays, outcome.same, outcome.skipped
            if tried.refused:
                candidate.meta[KEY] = {"form": form, "refused": dict(tried.refused)}
            return candidate, tried
    raise GpuFault(
        f"the program's launches run one by one on this GPU, but their graph does not: {tried.refusals}",
        hint="please report it",
    )
