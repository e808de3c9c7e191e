"""Results that may share memory with an input: caches that a network changes in a few places (TensorScatter) and returns.

Such an output begins as a copy of the input, by a separate launch. If the caller gives both the same memory, that launch is
omitted. No other result may overlap an input.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from optdnn.errors import InputError
from optdnn.runtime.cuda.launches.plan import CudaStep
from optdnn.runtime.program import Program, Step
from optdnn.runtime.steps.host import CopyPlan, HostPlan


def kept_in_place(program: Program, steps: Sequence[CudaStep | HostPlan | CopyPlan]) -> dict[int, int]:
    """Output -> input buffer, if both may be one: the whole input is copied to the output, and nothing else reads it."""
    inputs, outputs = ([i for _, i in ports] for ports in (program.inputs, program.outputs))
    reads = Counter(i for s in program.steps for i in s.inputs) + Counter(outputs)
    in_place: dict[int, int] = {}
    for step, parsed in zip(program.steps, steps, strict=True):
        if not isinstance(parsed, CudaStep) or parsed.meaning.kind != "Copy":
            continue
        (source,), (target,) = parsed.meaning.reads, parsed.meaning.writes
        if len(step.inputs) != 1 or len(step.outputs) != 1 or source is None or target is None:
            continue
        i, o = step.inputs[0], step.outputs[0]
        if i not in inputs or o not in outputs or reads[i] > 1:
            continue
        a, b = program.buffers[i], program.buffers[o]
        same = (source.offset, source.shape, source.strides) == (target.offset, target.shape, target.strides)
        if same and a.dtype == b.dtype and a.nbytes == b.nbytes == math.prod(source.shape) * a.dtype.itemsize:
            in_place[o] = i
    return in_place


def stays(step: Step, given: Mapping[int, int], in_place: Mapping[int, int]) -> bool:
    """Whether a step would copy an input onto itself. ``given``: the addresses of the caller's arrays by buffer."""
    if len(step.inputs) != 1 or len(step.outputs) != 1:
        return False
    (i,), (o,) = step.inputs, step.outputs
    return in_place.get(o) == i and bool(given.get(i)) and given[i] == given.get(o)


def check_overlap(program: Program, given: Mapping[int, int], in_place: Mapping[int, int]) -> None:
    """Raises InputError if the memory given for a result overlaps the memory of an input or of another result."""
    sizes = {i: b.nbytes or 0 for i, b in enumerate(program.buffers)}
    outs = [i for _, i in program.outputs]
    for k, o in enumerate(outs):
        for other in (*(i for _, i in program.inputs), *outs[:k]):
            a, b = given.get(o, 0), given.get(other, 0)
            apart = a + sizes[o] <= b or b + sizes[other] <= a
            if not a or not b or apart or o == other or (a == b and in_place.get(o) == other):
                continue
            raise InputError(
                f"the buffer for {program.buffers[o].name!r} overlaps that for {program.buffers[other].name!r}",
                hint="give each its own memory; a cache may be its own successor if only TensorScatter changes it",
            )
