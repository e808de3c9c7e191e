"""``optdnn.retune``: tunes an engine on this GPU and replaces its file if that makes it faster."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from optdnn.config import AUTO, BuildOptions
from optdnn.errors import EngineError, EngineStale, UsageError
from optdnn.ir.embedded_graph import KEY, held, hold
from optdnn.lowering.choose import Selection, TacticChoice
from optdnn.refitting.held_model import keep_model
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.cuda.gpu_lock import alone
from optdnn.runtime.cuda.kernel_text.allowed import without_code
from optdnn.runtime.cuda.measuring.expected import STEP_TIMES
from optdnn.runtime.cuda.trials.process import GpuProcess, NetworkLost, gpu_process
from optdnn.runtime.engine import Engine, saved_report
from optdnn.runtime.file.atomic import check_writable
from optdnn.runtime.file.format import read
from optdnn.runtime.notebook import table
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.target_name import TargetName
from optdnn.tuning.autotuner import Tuner
from optdnn.tuning.earlier_choices import DECIDED
from optdnn.tuning.first_run import KEY as FIRST_RUN
from optdnn.tuning.first_run import Tried, finish
from optdnn.tuning.result import Timer, Tuned
from optdnn.tuning.timing_cache import TimingCache

ROUNDS = 5
"""Turns in which the old and the new engine are measured."""
LOWERED = (
    "arch", "bounds", DECIDED, FIRST_RUN, "gpu", "host", "memory", "nvrtc", STEP_TIMES, "streams", "tactics", KEY,
)  # fmt: skip
"""Keys of ``meta`` that lowering writes."""


@dataclass(frozen=True)
class Retuned:
    """The result of :func:`retune`.

    ``before_ms`` (None: the old engine does not run here) and ``after_ms`` are milliseconds of one inference, measured in turns.
    ``replaced``: the file was replaced. ``tuning`` has the measurements, as in a build's report. ``warnings`` are those
    of the first runs.
    """

    before_ms: float | None
    after_ms: float
    replaced: bool
    tuning: Mapping[str, Any]
    warnings: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        """For notebooks."""
        before = "does not run here" if self.before_ms is None else f"{self.before_ms:.4f} ms"
        outcome = "replaced" if self.replaced else "left as it is"
        rows = [("before", before), ("after", f"{self.after_ms:.4f} ms"), *(("warning", w) for w in self.warnings)]
        return table(rows, ("engine", outcome))


def retune(
    path: str | os.PathLike[str],
    *,
    budget: float | None = None,
    tactics: str | None = None,
    timing_cache: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Retuned:
    """Tune an engine on the GPU of this machine, and replace its file (atomically) if the result is faster.

    The engine contains its graph, so the model is not needed. ``budget`` bounds the tuning in seconds; Ctrl-C ends it as well, and
    the best result so far is used. ``tactics`` is as for :func:`optdnn.build` (None: those of the build, measured).
    ``timing_cache`` is a file of measured times, which is read and extended.

    Raises EngineError if the file is not an engine for GPUs or has kernels that :func:`optdnn.load` refuses, UsageError without a
    GPU of its architecture, OutputError if the file cannot be written.
    """
    say = progress or (lambda text: None)
    check_writable(path)
    program = read(path, mmap=False)
    old = without_code(program)
    options = options_of(program, tactics, budget)
    graph = held(program)
    gpu = facts_for(
        TargetName("cuda", TargetName.parse(program.target).arch)
    )  # the GPU of this machine: it is measured
    cache = TimingCache.open(None if timing_cache is None else Path(os.fspath(timing_cache)))
    with gpu_process() as process:
        timer = _timer(process, gpu.arch, options)
        turn = partial(alone, timer.machine.place, say)
        tuned = Tuner(graph, options, gpu, timer, cache, say, alone=turn).run(choices_of(program))
        cache.save()
        say("lower")
        meta = {k: v for k, v in program.meta.items() if k not in LOWERED}
        meta["options"] = {**meta.get("options", {}), "tactics": options.tactics}
        new, tried = finish(graph, options, gpu, meta, say, replace(tuned, emitted=None))
        new = replace(new, precision=program.precision)
        keep_model(program, new)
        new = hold(graph, new)
        with turn():
            before, after = _race(timer, old, new, say)
    better = before is None or after < before
    if better:
        _save(new, tuned, tried, path)
    return Retuned(before, after, better, tuned.to_plain(), tuple(tried.warnings if tried is not None else ()))


def options_of(program: Program, tactics: str | None, budget: float | None) -> BuildOptions:
    """The build options that affect lowering. The graph has the precisions.

    Raises EngineError for an engine that cannot be tuned.
    """
    if TargetName.parse(program.target).family != "cuda":
        raise EngineError(
            f"the engine is for target {program.target}; tuning is for GPUs", hint="give an engine of --target cuda"
        )
    if program.dynamic is not None:
        raise EngineError(
            "the engine is for ranges of shapes; each of its plans has its own build",
            hint="build it again, on the GPU",
        )
    built = program.meta.get("options", {})
    tactics_then = str(built.get("tactics", "auto"))
    chosen = tactics or ",".join(t for t in tactics_then.split(",") if t != "heuristic") or "auto"
    if "heuristic" in chosen.split(","):
        raise UsageError(
            "tuning measures tactics: with tactics 'heuristic' there is nothing to measure",
            hint="leave 'heuristic' out",
        )
    return BuildOptions(
        target=program.target, tactics=chosen, budget=budget,
        workspace=built.get("workspace"), row_invariant=bool(built.get("row_invariant", False)),
        strict=bool(built.get("strict", False)), streams=built.get("streams", AUTO),
        no_cubins=all(k.cubin is None for k in program.kernels),
    )  # fmt: skip


def choices_of(program: Program) -> dict[str, TacticChoice]:
    """The engine's choices by signature."""
    rows = program.meta.get("tactics", [])
    return {r["signature"]: TacticChoice(r["tactic"], r.get("config", "")) for r in rows if "signature" in r}


def _timer(process: GpuProcess, arch: str, options: BuildOptions) -> Any:
    from optdnn.runtime.cuda.usable import why_not

    if why := why_not():
        raise UsageError(f"tuning needs a GPU: {why}")
    from optdnn.runtime.cuda.device import arch_here
    from optdnn.runtime.cuda.trials.process import TrialTimer

    if (here := arch_here()) != arch:
        raise UsageError(
            f"the engine is for {arch}; this GPU is {here}",
            hint=f"build it again: optdnn build MODEL --target cuda:{here}",
        )
    return TrialTimer(process, Selection.of(options).providers)


def _race(timer: Timer, old: Program, new: Program, say: Callable[[str], None]) -> tuple[float | None, float]:
    """Milliseconds of both programs, measured in turns; None for the old one if it does not run."""
    say("compare with the engine as it was")
    nets: list[Any] = []
    try:
        try:
            nets.append(timer.load(old))
            timer.race(nets, 1)
        except (EngineStale, NetworkLost) as error:
            say(f"the engine as it was does not run: {error.message}")
            for net in nets:
                net.close()
            nets[:] = [timer.load(new)]
            return None, timer.race(nets, ROUNDS)[0]
        nets.append(timer.load(new))
        before, after = timer.race(nets, ROUNDS)
        return before, after
    finally:
        for net in nets:
            net.close()


def _save(program: Program, tuned: Tuned, tried: Tried | None, path: str | os.PathLike[str]) -> None:
    """Save the engine, and its report with the new measurements."""
    engine = Engine(program, options=LoadOptions(defer=True, trust_cubins=True))
    known = saved_report(path)
    meta = {k: v for k, v in program.meta.items() if k != KEY}
    ran = {} if tried is None else {"first_runs": [tried.to_plain()]}
    engine.make_report = lambda e: {**known, **meta, "tuning": tuned.to_plain(), **ran}
    engine.save(path)
