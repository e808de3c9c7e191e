"""The result of a build: the engine and its report. Also joins the builds of several ranks into one engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from optdnn.config import BuildOptions
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import Graph
from optdnn.passes.base import PassReport
from optdnn.passes.support.precision_report import PrecisionOutcome
from optdnn.passes.tensor_parallel import Ports
from optdnn.refitting.record import NETWORK
from optdnn.runtime.cuda.measuring.expected import expected_cliffs
from optdnn.runtime.engine import Engine
from optdnn.runtime.program import Ranks
from optdnn.shapes.plan_base import Blobs
from optdnn.targets import target_for
from optdnn.targets.base import Compiled


@dataclass
class Build:
    """An engine and the report of its build.

    ``passes`` and ``compiled`` explain it. ``seconds`` are wall times per phase. ``precisions`` hold the requested and the actual
    precision of each operator that computes. The engine's ``meta`` holds the deterministic part. The report next to the engine
    file holds everything.
    """

    engine: Engine
    graph: Graph
    passes: list[PassReport]
    compiled: Compiled
    seconds: dict[str, float] = field(default_factory=dict)
    precisions: list[PrecisionOutcome] = field(default_factory=list)
    ports: Ports | None = None
    """How the network's inputs and outputs are split, if this is one rank of several."""

    def __post_init__(self) -> None:
        self.engine.make_report = partial(
            _account, passes=self.passes, compiled=self.compiled, seconds=self.seconds, precisions=self.precisions
        )

    def report(self) -> dict[str, Any]:
        """The whole report, which :meth:`Engine.save` writes next to the engine: also wall times and measurements."""
        return dict(self.engine.report or {})


def _account(
    engine: Engine,
    *,
    passes: Sequence[PassReport],
    compiled: Compiled,
    seconds: Mapping[str, float],
    precisions: Sequence[PrecisionOutcome],
) -> dict[str, Any]:
    from optdnn.runtime.measuring.machine import machine, versions

    cliffs = expected_cliffs(engine.program)
    return {
        **{k: v for k, v in engine.meta.items() if k not in ("graph", NETWORK)},
        **({"cliffs": cliffs} if cliffs else {}),
        "tactics": [m.to_json() for m in compiled.measured],
        "fallbacks": compiled.fallbacks,
        **({"tuning": dict(compiled.tuning)} if compiled.tuning else {}),
        **({"beside_fp32": compiled.beside_fp32.to_json()} if compiled.beside_fp32 else {}),
        **({"first_runs": [t.to_plain() for t in compiled.first_runs]} if compiled.first_runs else {}),
        "precisions": [r.to_json() for r in precisions],
        "executed": [dict(f) for f in engine.facts],
        "seconds": {k: round(v, 4) for k, v in seconds.items()},
        "pass_seconds": [{"pass": p.name, "seconds": round(p.seconds, 4)} for p in passes],
        "machine": machine(),
        "versions": versions(),
    }


def build_ranks(options: BuildOptions, say: Callable[[str], None], build_one: Callable[..., Build]) -> Build:
    """Build the program of each rank, and put all programs into the first rank's engine."""
    builds: list[Build] = []
    for rank in range(options.devices):
        dump = None if options.dump is None else options.dump / f"rank{rank}"
        own = replace(options, dump=dump, streams=1)
        builds.append(build_one(own, lambda text, rank=rank: say(f"rank {rank}: {text}"), rank=rank))
    first = builds[0]
    ports = first.ports
    assert ports is not None
    blobs = Blobs(ConstantCache())
    program, *others = (blobs.take(b.engine.program) for b in builds)
    inputs, outputs = ([spec.name for spec, _ in side] for side in (program.inputs, program.outputs))
    ranks = Ranks(
        tuple(others), tuple(ports.inputs.get(n, -1) for n in inputs), tuple(ports.outputs.get(n, -1) for n in outputs)
    )
    program = replace(program, ranks=ranks)
    target = target_for(replace(options, target=program.target))
    seconds = {k: sum(b.seconds.get(k, 0.0) for b in builds) for b in builds for k in b.seconds}
    return Build(target.load(program), first.graph, first.passes, first.compiled, seconds, first.precisions, ports)
