"""The steps of a GPU's program, parsed: kernels and library calls, operators on the CPU, and copies between the two memories."""

from __future__ import annotations

from optdnn.errors import EngineError
from optdnn.runtime.cuda.launches.plan import CudaStep, parse
from optdnn.runtime.program import Program, Step
from optdnn.runtime.steps.host import COPY, HOST, CopyPlan, HostPlan, parse_copy, parse_host

ParsedStep = CudaStep | HostPlan | CopyPlan


def other_executors(program: Program) -> list[str]:
    """The executors among a program's steps that are not of a GPU's program."""
    return sorted({s.executor for s in program.steps} - {"cuda", HOST, COPY})


def parse_steps(program: Program, on_host: frozenset[int]) -> list[ParsedStep]:
    """All steps, checked; ``on_host``: the buffers that lie on the host. Raises EngineError."""
    return [_parsed(step, program, on_host) for step in program.steps]


def _parsed(step: Step, program: Program, on_host: frozenset[int]) -> ParsedStep:
    if step.executor == HOST:
        return parse_host(step, program, on_host)
    if step.executor == COPY:
        return parse_copy(step, program, on_host)
    parsed = parse(step, program)
    if any(i in on_host for i in (*step.inputs, *step.outputs)):
        raise EngineError(f"a kernel of {parsed.label} reads or writes the host's memory")
    return parsed
