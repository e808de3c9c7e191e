"""Weights ahead of their use: launches that leave memory idle bring into L2 what later launches will read.

A network whose weights do not fit L2 reads all of them from memory in every run, and at batch 1 its convolutions and products wait
for them, while those that are bound by arithmetic or latency leave memory idle. So a launch of a Hopper convolution takes along up to
two pieces of the constants of later launches: an address and a size in its parameters. Nothing depends on them.

Which pieces is a matter of three numbers: what memory can bring while a launch runs, how much of L2 may hold what has not been used
yet, and the order of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from optdnn.kernels.conv import parameters as conv_params
from optdnn.kernels.conv.cost import MEMORY
from optdnn.lowering.lanes import load_of
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.launches.plan import Ahead, CudaStep, LaunchPlan, parse
from optdnn.runtime.program import Program, Step

CARRIERS = {"conv_sm90": conv_params.AHEAD, "conv_patch_sm90": conv_params.AHEAD}
"""Kernels that bring weights into L2 for others -> where in their parameters these are named."""
WINDOW = 8 << 20
"""Bytes of L2 that may hold what has not been used yet (``ahead-h200.json``: more gains next to nothing)."""
SHARE = 0.7
"""Part of the memory's bandwidth, beside what a launch reads itself, that it may take."""
WAITED = 0.1
"""Part of a launch's time that reading its constant from memory takes, from which on it is worth bringing: at large batches its loads hide
behind its products."""
LEAST = 256 << 10
"""Bytes of a constant, or of a piece of one, that are worth asking for."""


@dataclass(frozen=True)
class Piece:
    """``bytes`` from byte ``offset`` on of a constant (a buffer's number)."""

    buffer: int
    offset: int
    bytes: int


def with_ahead(program: Program, gpu: GpuFacts, seconds: Mapping[int, float], window: int = WINDOW) -> Program:
    """The program whose launches bring weights of later ones into L2; as it is where all constants fit L2 anyway.

    ``seconds``: predicted or measured times of steps by number. ``meta["ahead_bytes"]`` says how much is brought so."""
    constants = sum(b.nbytes or 0 for b in program.buffers if b.blob is not None)
    if not gpu.hopper or constants <= gpu.l2_bytes:
        return program
    pieces = planned(program, gpu, seconds, window)
    steps = [_carrying(s, program, pieces[k]) if k in pieces else s for k, s in enumerate(program.steps)]
    brought = sum(p.bytes for found in pieces.values() for p in found)
    return replace(program, steps=tuple(steps), meta={**program.meta, "ahead_bytes": brought})


def planned(
    program: Program, gpu: GpuFacts, seconds: Mapping[int, float], window: int = WINDOW
) -> dict[int, list[Piece]]:
    """Step number -> the pieces that its launch brings: of constants in the order of their use, each after the step itself and, if there
    is room, long before its own."""
    parsed = [parse(s, program) if s.executor == "cuda" else None for s in program.steps]
    needs = [_constant(s, p, program) for s, p in zip(program.steps, parsed, strict=True)]
    loads = [
        0.0 if p is None else load_of(s, program, gpu, seconds.get(k)).seconds
        for k, (s, p) in enumerate(zip(program.steps, parsed, strict=True))
    ]
    seen: set[int] = set()
    for k, need in enumerate(needs):  # what several launches read is there when the first has read it
        if need is None:
            continue
        if need[0] in seen or need[1] / MEMORY < WAITED * loads[k]:
            needs[k] = None
        seen.add(need[0])
    found: dict[int, list[Piece]] = {}
    brought = [0] * len(needs)
    target = waiting = 0
    for k, p in enumerate(parsed):
        waiting -= brought[k]
        kernel = program.kernels[p.launch.kernel].function if p is not None and isinstance(p.launch, LaunchPlan) else ""
        if kernel not in CARRIERS:
            continue
        own, target = needs[k], max(target, k + 1)
        spare = loads[k] * MEMORY * SHARE - (own[1] - brought[k] if own else 0)
        room = min(spare, window - waiting)
        pieces: list[Piece] = []
        while target < len(needs) and len(pieces) < len(CARRIERS[kernel]) and room >= LEAST:
            need = needs[target]
            left = need[1] - brought[target] if need else 0
            if need is None or left < LEAST:
                target += 1
                continue
            size = left if room >= left else int(room) // 4096 * 4096
            pieces.append(Piece(need[0], brought[target], size))
            brought[target] += size
            waiting += size
            room -= size
        if pieces:
            found[k] = pieces
    return found


def _constant(step: Step, parsed: CudaStep | None, program: Program) -> tuple[int, int] | None:
    """The largest constant that a launch reads, and its bytes (whole units of 16), if it is worth it."""
    sizes = [
        (program.buffers[i].nbytes or 0, i)
        for i in (step.inputs if parsed is not None else ())
        if i >= 0 and program.buffers[i].blob is not None
    ]
    size, buffer = max(sizes, default=(0, -1))
    return (buffer, size // 16 * 16) if size >= LEAST else None


def _carrying(step: Step, program: Program, pieces: list[Piece]) -> Step:
    """The step with these pieces among the relocations of its launch."""
    launch: dict[str, Any] = dict(step.params["launch"])
    places = CARRIERS[program.kernels[launch["kernel"]].function]
    more = [Ahead(at, p.buffer, p.offset, p.bytes).to_plain() for at, p in zip(places, pieces, strict=False)]
    launch["relocations"] = [*launch["relocations"], *more]
    return replace(step, params={**step.params, "launch": launch})
