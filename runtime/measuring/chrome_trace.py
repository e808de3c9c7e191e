"""A run as a trace in Chrome's format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing can show.

The steps are consecutive, each with its measured duration. On a GPU, kernels overlap, and a step's duration is the
time that it adds to the run. So the trace shows the distribution of the time, not when each kernel began.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from optdnn.runtime.program import Plain

LAYERS = 1000
"""The thread number of the layers of CPU libraries. Lower numbers are lanes of a GPU's program."""


def chrome_trace(
    title: str, steps: Sequence[Mapping[str, Any]], layers: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Plain]:
    """The trace of one run from the rows of a profile (``optdnn bench --profile --json``), as JSON-like data.

    ``layers`` are the layers that CPU libraries count, the longest first: they are inside of their step, in that order.
    """
    events: list[Plain] = [_name("process_name", title)]
    begin, begins = 0.0, []
    for s in steps:
        lane = int(s.get("lane") or 0)
        begins.append(begin)
        kept = ("step", "executor", "src", "kind", "tactic", "share", "flops", "bytes", "tflops", "gbs", "roofline")
        length = float(s["median_ms"]) * 1e3
        name = ", ".join(s["src"][:3]) or str(s.get("kind") or s["executor"])
        events.append(_event(name, s["executor"], begin, length, lane, {k: s[k] for k in kept if k in s}))
        begin += length
    lanes = sorted({int(s.get("lane") or 0) for s in steps})
    events += [_name("thread_name", "steps" if lanes == [0] else f"lane {lane}", lane) for lane in lanes]
    filled: dict[int, float] = defaultdict(float)
    for layer in layers:
        step, length = layer["step"], float(layer["median_ms"]) * 1e3
        at = begins[step] + filled[step]
        filled[step] += length
        events.append(_event(layer["name"], layer["kind"], at, length, LAYERS, {"share": layer["share"]}))
    if layers:
        events.append(_name("thread_name", "layers, by the library's counters, the longest first", LAYERS))
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _event(name: str, category: str, begin: float, length: float, thread: int, facts: Mapping[str, Any]) -> Plain:
    """A complete event; times are in microseconds."""
    where = {"ph": "X", "ts": begin, "dur": length, "pid": 1, "tid": thread}
    return {"name": name, "cat": category, **where, "args": dict(facts)}


def _name(what: str, name: str, thread: int = 0) -> Plain:
    return {"name": what, "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}}
