"""The target ``cpu``: OpenVINO and ONNX Runtime on the optimized graph, the faster one by measurement."""

from __future__ import annotations

from dataclasses import replace

from optdnn.config import AUTO, BuildOptions, Progress
from optdnn.lowering.cpu.counterpart import beside_fp32
from optdnn.lowering.cpu.partition import choose, choose_again
from optdnn.targets.base import Compiled, Optimized, Target
from optdnn.tuning.timing_cache import TimingCache


class Cpu(Target):
    """The libraries of the CPU."""

    def compile(self, work: Optimized, options: BuildOptions, cache: TimingCache, progress: Progress) -> Compiled:
        # Of the CPU libraries, only OpenVINO computes some ops in bf16 and others in fp32.
        mixed = work.plan.is_mixture and "bf16" in work.plan.floats and options.tactics == "auto"
        allowed = replace(options, tactics="openvino") if mixed else options
        base = work.plan.library_precision
        if work.like is not None:
            choice = choose_again(work.graph, allowed, work.like, work.meta, progress, base=base, label=work.label)
        else:
            choice = choose(work.graph, allowed, cache, work.meta, progress, base=base, label=work.label)
        beside = None
        if work.label != "fp32" and work.like is None and options.precision != AUTO:  # auto has already compared them
            beside = beside_fp32(work.in_fp32, choice, work.label, options, cache, progress)
        return Compiled(
            choice.engine.program, choice.engine, choice.rows, choice.fallbacks, beside_fp32=beside, ran=choice.ran,
            otherwise=choice.library, base=base,
        )  # fmt: skip
