"""The target ``reference``: NumPy kernels in the model's own types."""

from __future__ import annotations

from dataclasses import replace

from optdnn.config import BuildOptions, Progress
from optdnn.lowering.steps import lower_reference
from optdnn.targets.base import Compiled, Optimized, Target
from optdnn.tuning.timing_cache import TimingCache


class Reference(Target):
    """Every operator from its NumPy kernel; there is nothing to choose."""

    def compile(self, work: Optimized, options: BuildOptions, cache: TimingCache, progress: Progress) -> Compiled:
        return Compiled(replace(lower_reference(work.graph, work.meta), precision=work.label))
