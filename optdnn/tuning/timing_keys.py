"""Keys of candidates and networks in a timing cache, and the versions under which their times hold."""

from __future__ import annotations

import hashlib
from typing import Any

from optdnn.config import BuildOptions
from optdnn.ir.digest import structure_digest
from optdnn.ir.graph import Graph
from optdnn.lowering.choose import Selection
from optdnn.lowering.cuda import Emitted
from optdnn.runtime.cuda.compile.nvrtc import template_files
from optdnn.runtime.cuda.trials.timer import Machine
from optdnn.tuning.candidates import Trial


def candidate_key(machine: Machine, problem: str, trial: Trial, *, cold: bool) -> str:
    """A candidate's key: device, problem, candidate, kernel sources or library. Driver and compiler versions are not part of it."""
    sources = ",".join(sorted({k.source[:16] for k in trial.program.kernels}))
    library = "" if trial.provider == "own" else f" {trial.provider} {machine.versions.get(trial.provider, '')}"
    regime = "cold" if cold else "warm"
    return f"{machine.device} | {problem} | {trial.choice} | {regime} | {sources}{library}"


def network_key(machine: Machine, graph: Graph, options: BuildOptions, target: str) -> str:
    """A network's key: device, graph, options that restrict the choices, and the sources of all kernels."""
    selection = Selection.of(options)
    facts: list[Any] = [sorted(selection.providers), selection.workspace, selection.row_invariant]
    facts += [str(options.streams), options.strict, target, structure_digest(graph)]
    facts += [(name, path.read_bytes()) for name, path in sorted(template_files().items())]
    return f"{machine.device} | {hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"


def versions_of(machine: Machine, *providers: str) -> dict[str, str]:
    """The versions that times of these providers' kernels depend on: driver, compiler and libraries."""
    relevant = {"driver", "nvrtc", *providers}
    return {k: v for k, v in machine.versions.items() if k in relevant}


def signatures_digest(emitted: Emitted) -> str:
    """A digest of the signatures of all operators of a network."""
    return hashlib.sha256("\n".join(d.signature for d in emitted.decisions).encode()).hexdigest()[:32]
