"""The target ``cuda``: launches of kernels for one architecture of NVIDIA GPUs, for given sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

from optdnn.calibration.plan_calibration import SharedCalibration
from optdnn.config import AUTO, BuildOptions, Progress
from optdnn.errors import EngineError, UsageError
from optdnn.importers.values import size_inputs
from optdnn.ir.embedded_graph import hold
from optdnn.ir.graph import Graph
from optdnn.optimize import optimize, plan_of
from optdnn.passes.support.precision_report import PrecisionLog, on_gpu
from optdnn.precision.mixture import Mixture, offers_choice
from optdnn.precision.predicted import lowered, microseconds
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.launches.plan import tf32_nodes
from optdnn.runtime.engine import Engine
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.shapes.plan_base import plans_of
from optdnn.shapes.plans import Planned, by_value, optimum, plan_profiles, replan
from optdnn.shapes.profile_sizes import shape_text
from optdnn.targets.base import Compiled, Meta, Optimized, Source, Target
from optdnn.tuning.autotuner import tune
from optdnn.tuning.first_run import Tried, finish
from optdnn.tuning.timing_cache import TimingCache


class Cuda(Target):
    """Our kernels, and the kernels of cuDNN and cuBLASLt if they are faster: by measurement if the GPU is present."""

    one_size = True
    retunable = True
    """Whether engines keep their graph, so that their tactics can be chosen again."""

    @cached_property
    def gpu(self) -> GpuFacts:
        """The GPU that programs are made for: this machine's if it has the architecture, otherwise a named one."""
        return facts_for(self.name)

    def size_inputs(self, graph: Graph) -> Sequence[str]:
        return size_inputs(graph)

    def plan_sizes(
        self,
        source: Source,
        symbolic: Graph,
        options: BuildOptions,
        meta: Meta,
        precision_log: PrecisionLog,
        cache: TimingCache,
        progress: Progress,
        like: Program | None = None,
    ) -> Planned:
        if options.precision == AUTO:
            fixed = " ".join(f"--shape {name}={shape_text(dims, str)}" for name, dims in optimum(symbolic).items())
            raise UsageError("precision auto on a GPU needs fixed shapes", hint=f"give one size for each: {fixed}")
        share = replace(options, budget=options.budget and options.budget / len(symbolic.profiles))
        tuner = partial(tune, options=share, gpu=self.gpu, cache=cache, say=progress)
        sized = replace(options, calib=SharedCalibration.of(options.calib))
        prior = () if like is None else plans_of(like)
        return plan_profiles(source.model, symbolic, sized, self.gpu, meta, progress, tuner, precision_log, prior)

    def mixture(self, graph: Graph, options: BuildOptions) -> Mixture | None:
        if not offers_choice(options):
            return None
        base = replace(options, precision=plan_of(options).base, calib=None, dump=None)
        if plan_of(base).quantizes:  # a pin asks for 8 bits
            return Mixture(options, self.gpu, None)
        alone = graph.copy()
        optimize(alone, base, base.target)
        return Mixture(options, self.gpu, microseconds(lowered(alone, base, self.gpu)))

    def compile(self, work: Optimized, options: BuildOptions, cache: TimingCache, progress: Progress) -> Compiled:
        if work.like is not None:
            self._check_gpu(work.like)
        if work.planned is None:
            compiled = self._one(work, options, cache, progress)
        else:
            program = by_value(work.graph, work.planned.program, work.source.sizes, work.source.model, options)
            compiled = Compiled(program, first_runs=work.planned.first_runs)
        compiled.ran = on_gpu(work.graph, tf32_nodes(compiled.program))
        compiled.otherwise = f"no kernel of {self.name} has that precision for it: another"
        return compiled

    def _one(self, work: Optimized, options: BuildOptions, cache: TimingCache, progress: Progress) -> Compiled:
        """The program for fixed sizes."""
        like = work.like
        tuned = tune(work.graph, options, self.gpu, cache, progress) if like is None else None
        program, tried = finish(work.graph, options, self.gpu, work.meta, progress, tuned, like=like)
        program = replace(program, precision=work.label)
        if options.precision != AUTO:
            program = by_value(work.graph, program, work.source.sizes, work.source.model, options)
        if self.retunable and program.by_value is None and options.devices == 1:
            program = hold(work.graph, program)
        first_runs: list[Tried] = [] if tried is None else [tried]
        tuning = None if tuned is None else tuned.to_plain()
        return Compiled(program, fallbacks=self._on_cpu(program), tuning=tuning, first_runs=first_runs)

    def _check_gpu(self, like: Program) -> None:
        """Raise EngineError if grids would be chosen for another GPU than the program's."""
        made_for = like.meta.get("gpu", {})
        here = {"name": self.gpu.name, "multiprocessors": self.gpu.multiprocessors}
        if made_for != here:
            raise EngineError(
                f"the engine was built for {made_for.get('name')}; programs are made here for {self.gpu.name}",
                hint="do this on a machine with that GPU, or without one",
            )

    def _on_cpu(self, program: Program) -> dict[str, list[dict[str, str]]]:
        """The operators that run on the CPU, each with the reason."""
        operators = program.meta["host"]["operators"]
        rows = [{"operator": o["kind"], "node": " + ".join(o["nodes"]), "reason": o["why"]} for o in operators]
        return {str(self.name): rows}

    def load(self, program: Program) -> Engine:
        # The building machine need not be the running machine: requirements on the GPU are checked on first use.
        return Engine(program, options=LoadOptions(defer=True, trust_cubins=True, planner=replan))
