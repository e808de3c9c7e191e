"""A run over time: when each step begins on its lane, and the tensors in the arena at that time."""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.report.charts import Axis, linear_axis
from optdnn.report.network import Network
from optdnn.report.words import bytes_text
from optdnn.runtime.program import Program

MOST_KINDS = 12
"""Rows of the table of times by kind of operator."""


@dataclass(frozen=True)
class Bar:
    """A step on its lane: the number of its operator, where it begins and how long it is (percent of the run)."""

    node: int
    begin: float
    length: float
    hint: str


@dataclass(frozen=True)
class Timeline:
    lanes: tuple[tuple[str, tuple[Bar, ...]], ...]
    axis: Axis
    unit: str
    total_us: float


def timeline_of(net: Network, program: Program) -> Timeline | None:
    """When each operator begins, if it waits for those before it in its lane and for the steps that its slot names.

    The lengths are times of a profile. None where nothing is known of them.
    """
    ends: dict[int, float] = {}
    free: dict[int, float] = {}
    placed: list[tuple[int, int, float, float]] = []
    for k, node in net.operators():
        if node.us is None or node.step is None:
            continue
        slot = program.lanes[node.step] if program.lanes else None
        lane = 0 if slot is None else slot.lane
        begin = max([free.get(lane, 0.0), *(ends.get(s, 0.0) for s in (slot.after if slot else ()))])
        ends[node.step] = free[lane] = begin + node.us
        placed.append((lane, k, begin, node.us))
    if not placed:
        return None
    total = max(max(ends.values()), 1e-9)
    names = sorted({lane for lane, *_ in placed})
    lanes = tuple(
        (
            "steps" if len(names) == 1 else f"lane {lane}",
            tuple(
                Bar(k, 100 * begin / total, 100 * us / total, _hint(net, k))
                for own, k, begin, us in placed
                if own == lane
            ),
        )
        for lane in names
    )
    unit, scale = ("ms", 1e-3) if total >= 2000 else ("µs", 1.0)
    return Timeline(lanes, linear_axis(0.0, total * scale), unit, total)


def _hint(net: Network, k: int) -> str:
    node = net.nodes[k]
    return f"{node.label}: {node.us:.4g} µs, {node.name}"


def time_by_kind(net: Network) -> list[tuple[str, int, float, float]]:
    """Kind of operator, how many there are, their microseconds and their part of the longest; the others as one."""
    sums: dict[str, tuple[int, float]] = {}
    for _, node in net.operators():
        if node.us is not None:
            n, us = sums.get(node.label, (0, 0.0))
            sums[node.label] = (n + 1, us + node.us)
    rows = sorted(((label, n, us) for label, (n, us) in sums.items()), key=lambda r: -r[2])
    if len(rows) > MOST_KINDS:
        rest = rows[MOST_KINDS - 1 :]
        rows = [*rows[: MOST_KINDS - 1], (f"{len(rest)} other kinds", sum(r[1] for r in rest), sum(r[2] for r in rest))]
    longest = max((us for _, _, us in rows), default=0.0) or 1.0
    return [(label, n, us, 100 * us / longest) for label, n, us in rows]


# ---------------------------------------------------------------- memory


@dataclass(frozen=True)
class Tensor:
    """A buffer of the arena as a rectangle: steps across, bytes upwards (percent)."""

    x: float
    width: float
    y: float
    height: float
    hint: str


@dataclass(frozen=True)
class Memory:
    """``live``: (percent of the steps, percent of the arena) of a line; ``ticks``: (percent, label) of bytes upwards."""

    tensors: tuple[Tensor, ...]
    live: tuple[tuple[float, float], ...]
    arena_bytes: int
    peak_bytes: int
    peak_step: int
    steps: int
    ticks: tuple[tuple[float, str], ...]


def memory_of(program: Program) -> Memory | None:
    """The arena over the steps of a run. None where the program plans none."""
    lives: dict[int, tuple[int, int]] = {}
    for k, step in enumerate(program.steps):
        for b in {*step.inputs, *step.outputs}:
            if b >= 0 and program.buffers[b].offset is not None:
                lives[b] = (lives.get(b, (k, k))[0], k)
    steps, arena = len(program.steps), program.arena_bytes
    if not lives or not arena:
        return None
    held = [0] * steps
    tensors = []
    for b, (first, last) in lives.items():
        buffer = program.buffers[b]
        size, offset = buffer.nbytes or 0, buffer.offset or 0
        for k in range(first, last + 1):
            held[k] += size
        hint = f"{buffer.name}: {bytes_text(size)} from step {first} to {last}"
        tensors.append(
            Tensor(
                100 * first / steps, 100 * (last + 1 - first) / steps, 100 * offset / arena, 100 * size / arena, hint
            )
        )
    live = tuple((100 * x / steps, 100 * h / arena) for k, h in enumerate(held) for x in (k, k + 1))
    axis = linear_axis(0.0, arena / 2**20)
    peak = max(held)
    return Memory(tuple(tensors), live, arena, peak, held.index(peak), steps, axis.ticks)
