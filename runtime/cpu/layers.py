"""The time of each layer of a CPU engine: the libraries' own counters, read while the whole program runs.

The counters cost time themselves (in a small network more than the work), so a step's layers are scaled to the step's time
without counters.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optdnn.errors import UsageError
from optdnn.runtime.contexts.stepwise import StepRunner
from optdnn.runtime.cpu.onnxruntime import TOKEN, OnnxRuntimeModel
from optdnn.runtime.cpu.openvino import OpenVinoModel, without_endings
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LoadOptions, Session, prepare
from optdnn.temporary import temporary_folder

WARM_RUNS = 10
LAYOUT = "layout changes"
FUSED = "fused by the library"
"""Name of the library's work besides the model's nodes, and of nodes that it fused under its own name."""


@dataclass(frozen=True)
class Layer:
    """One layer's part of a run. ``name``: the model's nodes, :data:`LAYOUT` or :data:`FUSED`; ``kind``: the library's name of it;
    ``share`` is the fraction of the whole run."""

    step: int
    name: str
    kind: str
    median_ms: float
    share: float


def layer_times(
    program: Program, feeds: Mapping[str, Any], step_ms: Sequence[float], threads: int | None, runs: int
) -> list[Layer]:
    """The layers of each step, the slowest first. ``step_ms`` are the steps' times without counters (milliseconds), ``threads``
    the engine's threads (None: as built). A step that is one NumPy kernel is one layer.

    Raises UsageError for a program of another target than cpu."""
    if program.target != "cpu":
        raise UsageError(f"layers are counted by the libraries of target cpu; this engine is for {program.target}")
    total = max(sum(step_ms), 1e-12)
    layers: list[Layer] = []
    with temporary_folder() as folder:
        # The program was examined when it was loaded.
        executors = prepare(replace(program, foreign=False), LoadOptions(threads, huge_pages=False, counters=folder))
        context = StepRunner(program, executors).context()
        for _ in range(WARM_RUNS):
            context.run(feeds)
        before = [_snapshot(s) for s in context.sessions]
        for _ in range(runs):
            context.run(feeds)
        for k, (executor, session) in enumerate(zip(executors, context.sessions, strict=True)):
            if isinstance(executor, OpenVinoModel):
                rows = _openvino(executor, before[k], _snapshot(session), runs)
            elif isinstance(executor, OnnxRuntimeModel):
                rows = _onnxruntime(executor)
            else:
                rows = [(" + ".join(program.steps[k].src), "NumPy", 1.0)]
            scale = step_ms[k] / (sum(us for _, _, us in rows) or 1.0)
            layers += [Layer(k, name, kind, us * scale, us * scale / total) for name, kind, us in _merged(rows)]
    return sorted(layers, key=lambda layer: -layer.median_ms)


_Row = tuple[str, str, float]


def _merged(rows: Iterable[_Row]) -> list[_Row]:
    """Rows of the same name merged into one, with the kind of the longest; rows without time are left out."""
    merged: dict[str, list[_Row]] = {}
    for row in rows:
        if row[2] > 0:
            merged.setdefault(row[0], []).append(row)
    return [(name, max(own, key=lambda r: r[2])[1], sum(r[2] for r in own)) for name, own in merged.items()]


def _snapshot(session: Session) -> dict[str, float]:
    counted = getattr(session, "counted", None)
    return {} if counted is None else dict(counted())


def _openvino(model: OpenVinoModel, before: Mapping[str, float], after: Mapping[str, float], runs: int) -> list[_Row]:
    """The library averages over all runs, and the first ones compile kernels. The rows cover only the warm runs."""
    rows = []
    for name, (layers, _, kernel, _) in model.executed().items():
        us = (after.get(name, 0.0) * (WARM_RUNS + runs) - before.get(name, 0.0) * WARM_RUNS) / runs
        rows.append((_of_model(layers), kernel, max(0.0, us)))
    return rows


def _of_model(layers: Sequence[str]) -> str:
    """The model's nodes among the names of a fused node: the others repeat one of these with a suffix."""
    names = list(dict.fromkeys(map(without_endings, layers)))
    own = [n for n in names if not any(n != other and n.startswith(f"{other}/") for other in names)]
    return " + ".join(own) or LAYOUT


def _onnxruntime(model: OnnxRuntimeModel) -> list[_Row]:
    counted = [(_written(name), model.kinds[name], times) for name, times in model.counted().items()]
    names = {name for name, _, _ in counted}
    rows = []
    for name, kind, times in counted:
        own = operator_of(name, names)
        if kind.startswith("Reorder"):
            own = LAYOUT
        elif own == kind:
            own = FUSED
        rows.append((own, kind, statistics.median(times[WARM_RUNS:] or times)))
    return rows


def _written(name: str) -> str:
    """A node's name without the library's additions."""
    name = TOKEN.sub("", f"{name}_kernel_time").removesuffix("_kernel_time")
    return name.partition("/MatMulScaleFusion")[0].removesuffix("_nchwc")


def operator_of(name: str, names: Collection[str]) -> str:
    """The operator of ``names`` that a node belongs to, or ``name`` itself. Exported, an operator with a bias or an activation is
    several nodes (``conv``, ``conv/Relu``): the names of the others are the first one's with a suffix."""
    head, slash, _ = name.rpartition("/")
    return head if slash and head in names else name
