"""The parts of an engine that the reports of all commands draw: its network, findings, lanes and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optdnn.report.explanation import Explanations
from optdnn.report.findings import Finding, findings, slower_steps
from optdnn.report.network import SOURCES, Network, add_errors, add_times, network_of
from optdnn.report.picture import picture
from optdnn.report.timeline import Memory, Timeline, memory_of, time_by_kind, timeline_of
from optdnn.report.words import duration, layer_error
from optdnn.runtime.cuda.measuring.expected import expected_steps
from optdnn.runtime.program import Program


@dataclass(frozen=True)
class Drawing:
    """``data`` is the picture (:func:`optdnn.report.picture.picture`); ``source`` is where the times are from, "" where there are
    none; ``rows`` is the table of the operators: number, step, operator, time, roofline, precision, tactic, ONNX nodes."""

    data: dict[str, Any]
    findings: tuple[Finding, ...]
    timeline: Timeline | None
    memory: Memory | None
    kinds: tuple[tuple[str, int, float, float], ...]
    source: str
    rows: tuple[tuple[int, str, str, str, str, str, str, str], ...]
    plans: int


def draw(
    program: Program, report: Mapping[str, Any], *, measured: Mapping[str, Any] | None = None,
    changes: Sequence[Mapping[str, Any]] = (),
) -> Drawing:  # fmt: skip
    """Draw a program. ``report`` is that of the command (of a comparison with its ``build``); ``measured`` the profile of a run
    (``profile``, perhaps ``layers`` and ``cliffs``), else the times are those that the plan expects. ``changes``: the times that
    ``optdnn diff`` found to differ."""
    record = {**program.meta, **report.get("build", report)}
    net = network_of(program)
    if measured is not None:
        add_times(net, measured["profile"], measured.get("layers", ()))
    else:
        add_times(net, expected_steps(program))
    if "layers_against" not in report and "bisect" in report:
        add_errors(net, report.get("layers") or (), layer_error)
    known = Explanations(program, record)
    told = {**record, **report}
    if measured is not None:  # the layers of a comparison are errors, and the cliffs of a build are by expected times
        told |= {"layers": measured.get("layers", ()), "cliffs": measured.get("cliffs", ())}
    found = [*slower_steps(changes, net), *findings(net, told)]
    return Drawing(
        picture(net, known, _changes(changes, net)),
        tuple(sorted(found, key=lambda f: (f.gain_us is None, -(f.gain_us or 0.0)))),
        timeline_of(net, program),
        memory_of(program),
        tuple(time_by_kind(net)),
        " and ".join(dict.fromkeys(SOURCES.get(n.source, n.source) for _, n in net.operators() if n.us is not None)),
        tuple(_rows(net)),
        1 + (0 if program.dynamic is None else len(program.dynamic.plans)),
    )


def _changes(changes: Sequence[Mapping[str, Any]], net: Network) -> dict[int, tuple[float, float]]:
    rows = {c["name"]: (c["a"], c["b"]) for c in changes if c["a"] is not None and c["b"] is not None}
    return {k: rows[n.name] for k, n in net.operators() if n.name in rows}


def _rows(net: Network) -> list[tuple[int, str, str, str, str, str, str, str]]:
    return [
        (
            k,
            "–" if n.step is None else str(n.step),
            n.label,
            "–" if n.us is None else duration(n.us),
            "–" if n.roofline is None else f"{n.roofline:.0%}",
            n.precision,
            n.tactic,
            n.name,
        )
        for k, n in net.operators()
    ]
