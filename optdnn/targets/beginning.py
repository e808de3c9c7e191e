"""What begins before a build that may use a GPU. Other builds do not import the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from optdnn.config import BuildOptions
from optdnn.target_name import TargetName


@contextmanager
def beginning(options: BuildOptions) -> Iterator[None]:
    """Starts the slow parts in parallel with a build that may use a GPU: the process of the trials, and the loading of libraries.
    The process ends with the block."""
    name = TargetName.parse(options.target)
    if name.family not in ("auto", "cuda"):
        yield
        return
    from optdnn.runtime.cuda import start
    from optdnn.runtime.cuda.trials.process import gpu_process

    with gpu_process() as process:
        start.begin_trials(process, options.target)
        if "heuristic" not in options.tactics.split(",") or not name.arch:
            wanted = ("cudnn", "cublaslt") if options.tactics == "auto" else options.tactics.split(",")
            start.load_libraries(*(name for name in wanted if name in ("cudnn", "cublaslt")))
        yield
