"""How long each op of a graph takes inside of a CPU library: its own counters, read while the whole network runs.

A part that is cut out and timed alone loses the fusions and layouts that it has within the network; the library's counters
keep them. The counters cost time themselves (in a small network more than the work), so the parts are scaled to the network's time
without counters.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optdnn.errors import UnsupportedError
from optdnn.ir.export_onnx import ExportedModel
from optdnn.ir.extract import extract, whole
from optdnn.ir.graph import STRUCTURAL, Graph
from optdnn.lowering.cpu.base import REST_SECONDS
from optdnn.lowering.cpu.library import LIBRARIES
from optdnn.runtime.cpu.huge_pages import settle
from optdnn.runtime.cpu.library import Settings
from optdnn.runtime.cpu.onnxruntime import OnnxRuntimeModel
from optdnn.runtime.cpu.openvino import OpenVinoModel
from optdnn.temporary import temporary_folder
from optdnn.types import Array

WARM_RUNS = 12
MIN_RUNS, MAX_RUNS = 24, 400


@dataclass(frozen=True)
class Profile:
    """One library's account of one graph. Times are microseconds; keys are names of ops' first outputs.

    The sum of ``nodes`` and ``rest_us`` (layout changes, and work that belongs to no op) is ``whole_us``. ``executed`` and
    ``kernels`` have the precision and the primitive of ops for which the library reports them.
    """

    library: str
    precision: str
    threads: int
    whole_us: float
    rest_us: float
    nodes: Mapping[str, float]
    executed: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)


def profile(
    graph: Graph, library: str, precision: str, threads: int, feeds: Mapping[str, Array], seconds: float = 0.4
) -> Profile:
    """Run ``graph`` as one region on ``library`` for about ``seconds``, with its counters on, and once more without.

    Raises UnsupportedError if the library's opset cannot express it, RunError if the library refuses it.
    """
    region = whole(graph)
    exported = LIBRARIES[library].export(extract(graph, region))
    inputs = [graph.output(v).name for v in region.inputs]
    outputs = [graph.output(v).name for v in region.outputs]
    given = [feeds[n] for n in inputs]
    if library not in ("openvino", "onnxruntime"):
        raise UnsupportedError(f"{library} has no counters")
    model, settings = exported.to_bytes(), Settings(threads, precision)
    make = OpenVinoModel if library == "openvino" else OnnxRuntimeModel
    plain = make(model, exported.weights, inputs, outputs, settings).session()
    whole_us = _median_us(plain, given, len(outputs), seconds / 2)
    runs = int(min(MAX_RUNS, max(MIN_RUNS, seconds * 1e6 / max(whole_us, 1.0) / 2)))
    of = _Owners(graph, exported)
    if library == "openvino":
        found = _openvino(
            OpenVinoModel(model, exported.weights, inputs, outputs, settings, counters=True), given, runs, of
        )
    else:
        with temporary_folder() as folder:
            counting = OnnxRuntimeModel(
                model, exported.weights, inputs, outputs, settings, counters=str(Path(folder) / "profile")
            )
            found = _onnxruntime(counting, given, len(outputs), runs, of)
    total = sum(us for us, _, _ in found.values()) or 1.0
    scale = whole_us / total
    keys = {k: v for k, v in found.items() if k is not None}
    rest = found[None][0] * scale if None in found else 0.0
    return Profile(
        library,
        precision,
        threads,
        whole_us,
        rest,
        {k: us * scale for k, (us, _, _) in keys.items()},
        {k: ran for k, (_, ran, _) in keys.items() if ran},
        {k: kernel for k, (_, _, kernel) in keys.items() if kernel},
    )


class _Owners:
    """Maps names of executed nodes to the op (its first output) that they belong to."""

    def __init__(self, graph: Graph, exported: ExportedModel):
        order = [op for op in graph.order() if op.kind not in STRUCTURAL]
        self._graph = graph
        self._rank = {op.outputs[0].name: i for i, op in enumerate(order)}
        self._ops = {op.outputs[0].name: op for op in order}
        self._names = {o.name: op.outputs[0].name for op in order for o in op.outputs}
        self._names |= {node: made for node, (_, made) in exported.owners.items()}
        self._by_length = sorted(self._names, key=len, reverse=True)

    def find(self, names: Sequence[str], *, prefix: bool = False) -> str | None:
        """The first op, in topological order, that one of the names belongs to; with ``prefix``, also by a name's beginning."""
        found = [self._names[n] for n in names if n in self._names]
        if not found and prefix:
            found = [self._names[n] for name in names for n in self._by_length if name.startswith(n)][:1]
        found = [k for k in found if k in self._rank]
        return min(found, key=self._rank.__getitem__) if found else None

    def unowned_before(self, key: str, owned: Collection[str | None]) -> str:
        """The nearest op before ``key`` that is not in ``owned``, if only ops that move elements are between them; otherwise
        ``key`` itself."""
        op = self._ops[key]
        while True:
            sources = [self._graph.op(v) for v in op.inputs if v is not None]
            computing = [s for s in sources if s.kind not in STRUCTURAL]
            for s in computing:
                if s.outputs[0].name not in owned:
                    return s.outputs[0].name
            moving = [s for s in computing if s.definition.traits.movement]
            if not moving:
                return key
            op = moving[0]


_Found = dict[str | None, tuple[float, str, str]]


def _openvino(model: OpenVinoModel, given: Sequence[Array], runs: int, of: _Owners) -> _Found:
    session = model.session()
    outs = [None] * len(model._outputs)
    _warm(session, given, outs)
    before = session.counted()
    for _ in range(runs):
        session.run(given, outs)
    after = session.counted()
    found: _Found = {}
    executed = model.executed()
    owners = {name: of.find(layers or (name,)) for name, (layers, _, _, _) in executed.items()}
    for name in reversed(executed):
        # Of the nodes that the library makes from an operator, only the last one has our name. A nameless node belongs to an
        # unowned operator before the next owned one.
        if owners[name] is None:
            ahead = next((o for u in executed[name][3] if (o := owners.get(u)) is not None), None)
            owners[name] = None if ahead is None else of.unowned_before(ahead, set(owners.values()))
    for name, (_, ran, kernel, _) in executed.items():
        # The library averages over all runs. The first ones compile kernels: subtract them.
        n = WARM_RUNS + runs
        us = max(0.0, (after.get(name, 0.0) * n - before.get(name, 0.0) * WARM_RUNS) / runs)
        key = owners[name]
        old = found.get(key, (0.0, "", ""))
        heavier = us > old[0] or not old[1]
        found[key] = (old[0] + us, ran if heavier else old[1], kernel if heavier else old[2])
    return found


def _onnxruntime(model: OnnxRuntimeModel, given: Sequence[Array], outputs: int, runs: int, of: _Owners) -> _Found:
    session = model.session()
    _warm(session, given, [None] * outputs)
    for _ in range(runs):
        session.run(given, [None] * outputs)
    found: _Found = {}
    for name, times in model.counted().items():
        key = of.find((name,), prefix=True)
        old = found.get(key, (0.0, "", ""))
        found[key] = (old[0] + statistics.median(times[WARM_RUNS:] or times), "", "")
    return found


def _median_us(session: Any, given: Sequence[Array], outputs: int, seconds: float) -> float:
    run, outs = session.run, [None] * outputs
    _warm(session, given, outs)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        run(given, outs)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def _warm(session: Any, given: Sequence[Array], outs: Sequence[None]) -> None:
    """Prepare as before a turn of a race: warm runs, memory in its final place, and idle threads of earlier runs."""
    for _ in range(WARM_RUNS):
        session.run(given, outs)
    settle()
    time.sleep(REST_SECONDS)
