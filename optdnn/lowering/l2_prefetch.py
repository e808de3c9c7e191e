"""L2 prefetch: launches that leave memory bandwidth unused load the weights of later launches into L2.

A network whose weights do not fit L2 reads them from memory in every run. At batch 1, some convolutions and matrix
products wait for their weights, while others are bound by arithmetic or latency and leave memory idle. So a launch of a
Hopper convolution prefetches up to two pieces of constants of later launches: an address and a size in its parameters.
No result depends on them.

Three numbers decide which pieces: the bytes that memory can deliver while a launch runs, the part of L2 that may hold
unused data, and the order of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from optdnn.kernels.conv import parameters as conv_params
from optdnn.kernels.conv.cost_terms import MEMORY
from optdnn.lowering.lanes import load_of
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.launches.plan import Ahead, CudaStep, LaunchPlan, parse
from optdnn.runtime.program import Program, Step

CARRIERS = {"conv_sm90": conv_params.AHEAD, "conv_patch_sm90": conv_params.AHEAD}
"""Kernels that can prefetch -> the places of addresses and sizes in their parameters."""
WINDOW = 8 << 20
"""Bytes of L2 that may hold data before its use (``ahead-h200.json``: more gains almost nothing)."""
SHARE = 0.7
"""The fraction of the memory's bandwidth that a launch may use, its own reads included."""
WAITED = 0.1
"""A constant is prefetched if reading it takes at least this fraction of its launch's time. At large batches the products hide the
loads."""
LEAST = 256 << 10
"""The fewest bytes of a constant, or of a piece, that are prefetched."""


@dataclass(frozen=True)
class Piece:
    """``bytes`` of a constant (``buffer``: its number), from byte ``offset`` on."""

    buffer: int
    offset: int
    bytes: int


def with_ahead(program: Program, gpu: GpuFacts, seconds: Mapping[int, float], window: int = WINDOW) -> Program:
    """The program with prefetches; unchanged if all constants fit L2 or the GPU is not a Hopper.

    ``seconds``: predicted or measured times of steps by number. ``meta["ahead_bytes"]``: the bytes that are prefetched."""
    constants = sum(b.nbytes or 0 for b in program.buffers if b.blob is not None)
    if not gpu.hopper or constants <= gpu.l2_bytes:
        return program
    pieces = planned(program, gpu, seconds, window)
    steps = [_carrying(s, program, pieces[k]) if k in pieces else s for k, s in enumerate(program.steps)]
    total = sum(p.bytes for of_step in pieces.values() for p in of_step)
    return replace(program, steps=tuple(steps), meta={**program.meta, "ahead_bytes": total})


def planned(
    program: Program, gpu: GpuFacts, seconds: Mapping[int, float], window: int = WINDOW
) -> dict[int, list[Piece]]:
    """Step number -> the pieces that its launch prefetches: constants of later steps in the order of use, as early as there is room."""
    parsed = [parse(s, program) if s.executor == "cuda" else None for s in program.steps]
    needs = [_constant(s, p, program) for s, p in zip(program.steps, parsed, strict=True)]
    loads = [
        0.0 if p is None else load_of(s, program, gpu, seconds.get(k)).seconds
        for k, (s, p) in enumerate(zip(program.steps, parsed, strict=True))
    ]
    seen: set[int] = set()
    for k, need in enumerate(needs):  # a constant of several launches is in L2 after the first one
        if need is None:
            continue
        if need[0] in seen or need[1] / MEMORY < WAITED * loads[k]:
            needs[k] = None
        seen.add(need[0])
    planned_pieces: dict[int, list[Piece]] = {}
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
            planned_pieces[k] = pieces
    return planned_pieces


def _constant(step: Step, parsed: CudaStep | None, program: Program) -> tuple[int, int] | None:
    """The largest constant that a launch reads, and its bytes (rounded down to 16); None if it is small."""
    sizes = [
        (program.buffers[i].nbytes or 0, i)
        for i in (step.inputs if parsed is not None else ())
        if i >= 0 and program.buffers[i].blob is not None
    ]
    size, buffer = max(sizes, default=(0, -1))
    return (buffer, size // 16 * 16) if size >= LEAST else None


def _carrying(step: Step, program: Program, pieces: list[Piece]) -> Step:
    """The step with these pieces in the relocations of its launch."""
    launch: dict[str, Any] = dict(step.params["launch"])
    places = CARRIERS[program.kernels[launch["kernel"]].function]
    more = [Ahead(at, p.buffer, p.offset, p.bytes).to_plain() for at, p in zip(places, pieces, strict=False)]
    launch["relocations"] = [*launch["relocations"], *more]
    return replace(step, params={**step.params, "launch": launch})
