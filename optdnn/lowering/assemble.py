"""The last passes over a cuda program: remove unused parts, number the rest, plan the arena."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from optdnn.lowering.memory import place_buffers
from optdnn.runtime.cuda.suppression import TEMPLATE as SUPPRESS
from optdnn.runtime.program import Buffer, Program, Step
from optdnn.runtime.steps.host import host_buffers
from optdnn.runtime.steps.lanes import earlier

ALIGNMENT = 256
"""Alignment of every buffer in the arena, in bytes: the same as cudaMalloc's."""
SITE = "site"
"""A step's parameter with the number of its site. It exists only while steps are moved and removed."""


def placed(program: Program) -> Program:
    """The program with its arena."""
    before = _before(program)
    program, plan = place_buffers(
        program,
        ALIGNMENT,
        partial(overwritable, program),
        outside=host_buffers(program).union(program.retained),
        before=before,
    )
    program.meta["memory"] = {"arena_bytes": plan.arena_bytes, "live_bytes": plan.live_bytes}
    return program


def _before(program: Program) -> list[int] | None:
    """For each step the set (as bits) of the steps that have ended when it begins; None if steps run one by one. Jobs of a run
    begin together: a fast block may write a result while a slow one still reads for an earlier job."""
    runs = [step.params.get("launch", {}).get("part") for step in program.steps]
    if not any(runs):
        return earlier(program) if program.lanes else None
    before = earlier(program)
    return [
        mask if part is None else mask & ((1 << (k - part[1])) - 1)
        for k, (mask, part) in enumerate(zip(before, runs, strict=True))
    ]


def overwritable(program: Program, step: Step) -> list[tuple[int, int]]:
    """The (output, input) buffers of a step that may share memory.

    A pointwise kernel reads each element in the thread that writes it, also if it transposes another operand. So its result may
    overwrite an operand that it reads in the same order.
    """
    launch = step.params.get("launch")
    if launch is None or program.kernels[launch["kernel"]].function not in ("pointwise", "turned"):
        return []
    operands = (*step.inputs, *step.outputs)
    (write,) = step.params["writes"]
    out = operands[write[0]]
    reads: dict[int, list[Any]] = {}
    for read in step.params["reads"]:
        if read is not None:
            reads.setdefault(operands[read[0]], []).append(read[1:])
    width = program.buffers[out].dtype.itemsize
    return [
        (out, i)
        for i, views in reads.items()
        if i != out and program.buffers[i].dtype.itemsize == width and all(view == write[1:] for view in views)
    ]


def pruned(program: Program) -> Program:
    """The program without steps whose results nothing reads."""
    read = {i for _, i in program.outputs}
    steps: list[Step] = []
    for step in reversed(program.steps):
        if read.intersection(step.outputs):
            steps.append(step)
            read.update(step.inputs)
    return replace(program, steps=tuple(reversed(steps)))


def without_sites(program: Program) -> tuple[Program, list[int | None]]:
    """The program without the parameter :data:`SITE`, and the number of each step's site."""
    sites = [s.params.get(SITE) for s in program.steps]
    steps = [replace(s, params={k: v for k, v in s.params.items() if k != SITE}) for s in program.steps]
    return replace(program, steps=tuple(steps)), sites


def compact(program: Program) -> Program:
    """The program without unused buffers, kernels and blobs.

    The others are numbered by first use in inputs, outputs and steps. So equal steps give equal programs.
    """
    ports = [i for _, i in (*program.inputs, *program.outputs)]
    named = dict.fromkeys([*ports, *(i for s in program.steps for i in (*s.inputs, *s.outputs) if i >= 0)])
    buffer = {-1: -1, **{old: new for new, old in enumerate(named)}}
    old_blobs = dict.fromkeys(b for i in named if (b := program.buffers[i].blob) is not None)
    blob = {old: new for new, old in enumerate(old_blobs)}
    used = dict.fromkeys(s.params["launch"]["kernel"] for s in program.steps if "launch" in s.params)
    # No step launches the kernel that steps on the host use.
    used |= dict.fromkeys(i for i, k in enumerate(program.kernels) if k.template == SUPPRESS)
    kernel = {old: new for new, old in enumerate(used)}

    def moved(b: Buffer) -> Buffer:
        return b if b.blob is None else replace(b, blob=blob[b.blob])

    def step(s: Step) -> Step:
        params = s.params
        if "launch" in params:
            params = {**params, "launch": {**params["launch"], "kernel": kernel[params["launch"]["kernel"]]}}
        return replace(s, params=params, inputs=_mapped(s.inputs, buffer), outputs=_mapped(s.outputs, buffer))

    return replace(
        program,
        buffers=tuple(moved(program.buffers[i]) for i in named),
        inputs=tuple((spec, buffer[i]) for spec, i in program.inputs),
        outputs=tuple((spec, buffer[i]) for spec, i in program.outputs),
        steps=tuple(map(step, program.steps)),
        blobs=[program.blobs[i] for i in old_blobs],
        kernels=tuple(program.kernels[i] for i in used),
        retained=tuple(buffer[i] for i in program.retained if i in named),
    )


def _mapped(numbers: Iterable[int], to: dict[int, int]) -> tuple[int, ...]:
    return tuple(to[i] for i in numbers)
