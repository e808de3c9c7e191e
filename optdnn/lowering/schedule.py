"""The order of a program's steps: as few changes as possible between GPU and CPU.

Each change of side costs a wait and a graph launch (:data:`optdnn.lowering.host.CUT_US`). So one side runs all its
ready steps before the other side starts. With two sides, this greedy order has the fewest changes.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from optdnn.runtime.program import Program, Step
from optdnn.runtime.steps.host import HOST, TO_HOST, is_copy


def group_steps(program: Program) -> Program:
    """The program with its steps in this order; unchanged if nothing runs on the host."""
    if not any(s.executor == HOST for s in program.steps):
        return program
    before = _dependencies(program.steps)
    after: list[list[int]] = [[] for _ in program.steps]
    for k, deps in enumerate(before):
        for d in deps:
            after[d].append(k)
    missing = [len(deps) for deps in before]
    ready: dict[bool, list[int]] = {False: [], True: []}
    for k, n in enumerate(missing):
        if not n:
            ready[program.steps[k].executor == HOST].append(k)
    order: list[int] = []
    side = not ready[False]
    while ready[False] or ready[True]:
        while ready[side]:
            k = heapq.heappop(ready[side])
            order.append(k)
            for j in after[k]:
                missing[j] -= 1
                if not missing[j]:
                    heapq.heappush(ready[program.steps[j].executor == HOST], j)
        side = not side
    return replace(program, steps=tuple(program.steps[k] for k in order))


def _dependencies(steps: tuple[Step, ...]) -> list[set[int]]:
    """For each step its predecessors: writers of the buffers it reads, readers and writers of the buffers it writes.

    Several steps may write parts of one buffer (a concatenation in place); they stay in order.
    """
    writers: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    before: list[set[int]] = []
    for k, step in enumerate(steps):
        deps: set[int] = set()
        for i in step.inputs:
            if i >= 0:
                deps.update(writers.get(i, ())[-1:])
                readers.setdefault(i, []).append(k)
        for i in step.outputs:
            if i >= 0:
                deps.update(writers.get(i, ())[-1:])
                deps.update(readers.get(i, ()))
                writers.setdefault(i, []).append(k)
        deps.discard(k)
        before.append(deps)
    return before


def keep_inputs_on_host(program: Program) -> Program:
    """Turn inputs of the network that only the host reads into host buffers, without a copy to the GPU and back."""
    inputs = list(program.inputs)
    renamed: dict[int, int] = {}
    for k, (spec, i) in enumerate(inputs):
        readers = [s for s in program.steps if i in s.inputs]
        if readers and all(
            is_copy(s, TO_HOST) and program.buffers[s.outputs[0]].shape == program.buffers[i].shape for s in readers
        ):
            here = readers[0].outputs[0]
            renamed.update({s.outputs[0]: here for s in readers})
            inputs[k] = (spec, here)
    if not renamed:
        return program
    steps = [
        replace(s, inputs=tuple(renamed.get(i, i) for i in s.inputs))
        for s in program.steps
        if not (is_copy(s, TO_HOST) and s.outputs[0] in renamed)
    ]
    return replace(program, inputs=tuple(inputs), steps=tuple(steps))
