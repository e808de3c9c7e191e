"""The steps of a GPU's program, parsed: kernels and library calls, operators on the CPU, and copies between the two memories."""

from __future__ import annotations

from collections.abc import Mapping

from optdnn.errors import EngineError
from optdnn.runtime.contexts.base import Runner
from optdnn.runtime.contexts.signature import Signature
from optdnn.runtime.cuda.launches.plan import CudaStep, parse
from optdnn.runtime.cuda.launches.waits import check_waits
from optdnn.runtime.program import Plain, Program, Step
from optdnn.runtime.steps.host import COPY, HOST, CopyPlan, HostPlan, facts, host_buffers, parse_copy, parse_host
from optdnn.runtime.steps.lanes import check_lanes, waits_of

ParsedStep = CudaStep | HostPlan | CopyPlan


class GpuProgramRunner(Runner):
    """The common part of the runners "cuda" and "simulate": a GPU's program, its steps parsed and checked. Raises EngineError."""

    refusal: str
    """The message about executors that a GPU's program cannot contain."""

    def __init__(self, program: Program):
        if others := sorted({s.executor for s in program.steps} - {"cuda", HOST, COPY}):
            raise EngineError(f"{self.refusal} {', '.join(others)}")
        self.program, self.signature = program, Signature.of(program)
        self.on_host = host_buffers(program)
        """The buffers in the CPU's memory."""
        self.steps = [_parsed(step, program, self.on_host) for step in program.steps]
        check_waits(program, self.steps)
        check_lanes(program)
        self.waits = waits_of(program.lanes)
        self._facts = tuple(
            {**self._step_facts(s), "op": s.meaning.kind} if isinstance(s, CudaStep) else facts(s) for s in self.steps
        )

    def _step_facts(self, step: CudaStep) -> Mapping[str, Plain]:
        """The executor of a kernel's step."""
        raise NotImplementedError


def _parsed(step: Step, program: Program, on_host: frozenset[int]) -> ParsedStep:
    if step.executor == HOST:
        return parse_host(step, program, on_host)
    if step.executor == COPY:
        return parse_copy(step, program, on_host)
    parsed = parse(step, program)
    if any(i in on_host for i in (*step.inputs, *step.outputs)):
        raise EngineError(f"a kernel of {parsed.label} reads or writes the host's memory")
    return parsed
