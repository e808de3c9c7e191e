"""Megakernels: neighboring products of a few rows and attention over a cache become jobs of one persistent launch, if that is
predicted to be faster (:mod:`optdnn.kernels.megakernel`).

A decoder's token is such a chain. As separate launches, each reads its weights only after the previous one has ended. As jobs,
weights are read without a pause. Each job remains a step with a launch of its own, for checks and profiles; a run joins the steps
(:mod:`optdnn.runtime.cuda.launches.runs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from optdnn.kernels.megakernel import jobs
from optdnn.kernels.megakernel.jobs import EXCHANGE, Job, Source
from optdnn.kernels.megakernel.kernel import (
    HEADER,
    MOST_KINDS,
    THREADS,
    AttentionKind,
    Kinds,
    ProductKind,
    recipe,
    refuse_attention,
    refuse_product,
    slots,
)
from optdnn.runtime.cuda.gpu_facts import GpuFacts, on_every_gpu
from optdnn.runtime.cuda.launches.plan import GRID, LaunchPlan, Pointer, RunPart, parse
from optdnn.runtime.cuda.libraries.calls import LibraryCall
from optdnn.runtime.program import Buffer, Kernel, Program, Step
from optdnn.runtime.steps.lanes import dependencies
from optdnn.types import UINT8

LEAST_JOBS = 4
"""The fewest jobs that are worth a launch whose blocks wait for one another."""
LAUNCHED, PRODUCT_LAUNCH, ATTENTION_LAUNCH = 0.9, 2.6e-6, 3e-6
"""The fraction of the memory's nominal bandwidth that launches reach, and further seconds per launch. On an H200, a layer of width
2,048 takes 27.7 us, a layer of Llama 3.2 1B 41, and a layer of Llama 3 8B 115 to 119."""
JOINED, MEGAKERNEL = 0.73, 8e-6
"""The fraction of the same bandwidth that a megakernel reaches, and the seconds of its launch. These layers take 20.2, 37 and 130
us."""
PRODUCT_SECONDS, ATTENTION_SECONDS = 2.9e-6, 5e-6
"""The least seconds between the results of one job and the results of the next."""
STATE_BYTES = 256
"""Bytes of the exchange that hold the number of launches so far."""
ALIGN = 64


@dataclass(frozen=True)
class Run:
    """Steps (by number) that become one megakernel, and their jobs."""

    steps: tuple[int, ...]
    jobs: tuple[Job, ...]

    @property
    def kinds(self) -> Kinds:
        """The kinds of all jobs."""
        products = dict.fromkeys(j.kind for j in self.jobs if isinstance(j.kind, ProductKind))
        attention = next((j.kind for j in self.jobs if isinstance(j.kind, AttentionKind)), None)
        return Kinds(tuple(products), attention, self.jobs[0].dtype)


def with_megakernels(program: Program, gpu: GpuFacts) -> tuple[Program, dict[int, int]]:
    """The program with its megakernels, and for each of its steps the number of the step in ``program``. Both are unchanged if
    nothing is gained."""
    same = {k: k for k in range(len(program.steps))}
    if not gpu.hopper or any(s.executor != "cuda" for s in program.steps):
        return program, same
    deps = dependencies(program)
    found = [_job(step, program, gpu) for step in program.steps]
    order, runs = planned(deps, found)
    runs = [run for run in (trimmed(run, gpu) for run in runs) if gains(run, gpu)]
    if not runs:
        return program, same
    ordered = replace(program, steps=tuple(program.steps[k] for k in order))
    number = {k: i for i, k in enumerate(order)}
    for run in runs:
        ordered = _joined(ordered, replace(run, steps=tuple(number[k] for k in run.steps)), gpu)
    return ordered, dict(enumerate(order))


def _job(step: Step, program: Program, gpu: GpuFacts) -> Job | str:
    launch = parse(step, program).launch
    if isinstance(launch, LibraryCall):
        return "a library runs it"
    job = jobs.job_of(step, launch, program)
    if isinstance(job, str):
        return job
    if isinstance(job.kind, AttentionKind):
        return refuse_attention(job.kind, gpu) or job
    return refuse_product(job.kind, job.constants["weights"].at, gpu) or job


def planned(deps: Sequence[set[int]], found: Sequence[Job | str]) -> tuple[list[int], list[Run]]:
    """The order of the steps, and the runs: the jobs of each run are neighbors in this order.

    Steps that need no result of a run come before it; steps that do come after it. A job that needs such a later step begins a
    new run.
    """
    order: list[int] = []
    runs: list[Run] = []
    run: list[int] = []
    late: list[int] = []

    def close() -> None:
        nonlocal run, late
        if len(run) >= LEAST_JOBS:
            jobs = tuple(j for k in run if isinstance(j := found[k], Job))
            runs.append(Run(tuple(run), jobs))
            order.extend((*run, *late))
        else:
            order.extend(sorted((*run, *late)))
        run, late = [], []

    for k, job in enumerate(found):
        if isinstance(job, Job) and not deps[k].intersection(late):
            if run and not _together([found[r] for r in run], job):
                close()
            run.append(k)
        elif run and deps[k].intersection((*run, *late)):
            if isinstance(job, Job):
                close()
                run.append(k)
            else:
                late.append(k)
        else:
            order.append(k)
    close()
    return order, runs


def _together(run: Sequence[Job | str], job: Job) -> bool:
    """Whether one kernel can have all these kinds, and each operand that the job reads from the run is whole rows of one earlier
    job."""
    before = [j for j in run if isinstance(j, Job)]
    kinds = {j.kind for j in (*before, job)}
    products = sum(isinstance(k, ProductKind) for k in kinds)
    made = {j.out.buffer for j in before}
    rows = all(p.buffer not in made or any(j.out.holds(p) for j in before) for p in job.rows.values())
    others = made.isdisjoint(p.buffer for p in job.constants.values())
    same = all(j.dtype == job.dtype for j in before)
    return same and rows and others and products <= MOST_KINDS and len(kinds) - products <= 1


def gains(run: Run, gpu: GpuFacts) -> bool:
    """Whether the run is predicted to take less time as a megakernel."""
    return len(run.jobs) >= LEAST_JOBS and joined_seconds(run.jobs, gpu) < sum(launch_seconds(j, gpu) for j in run.jobs)


def launch_seconds(job: Job, gpu: GpuFacts) -> float:
    """Predicted seconds of a job as a launch between others."""
    if isinstance(job.kind, AttentionKind):
        return ATTENTION_LAUNCH
    return job.kind.nbytes / (LAUNCHED * gpu.bandwidth) + PRODUCT_LAUNCH


def reading_seconds(job: Job, gpu: GpuFacts) -> float:
    """Predicted seconds in which a megakernel reads a job's weights."""
    return job.kind.nbytes / (JOINED * gpu.bandwidth) if isinstance(job.kind, ProductKind) else 0.0


def joined_seconds(jobs: Sequence[Job], gpu: GpuFacts) -> float:
    """Predicted seconds of a megakernel."""
    chain = sum(PRODUCT_SECONDS if isinstance(j.kind, ProductKind) else ATTENTION_SECONDS for j in jobs)
    return MEGAKERNEL + max(sum(reading_seconds(j, gpu) for j in jobs), chain)


def trimmed(run: Run, gpu: GpuFacts) -> Run:
    """The run without the jobs at its ends that read for so long that launches are faster: a head with a large vocabulary."""
    keeps = [reading_seconds(j, gpu) <= launch_seconds(j, gpu) for j in run.jobs]
    inside = [n for n, keep in enumerate(keeps) if keep] or [0]
    begin, end = inside[0], inside[-1] + 1
    return Run(run.steps[begin:end], run.jobs[begin:end])


# ---------------------------------------------------------------- the steps of a megakernel


@dataclass(frozen=True)
class _Layout:
    """The exchange in bytes: the offset of each job's packets, the offset of the packets of a head's blocks, and the total size."""

    packets: tuple[int, ...]
    partial: int
    nbytes: int


def _layout(run: Run, gpu: GpuFacts) -> _Layout:
    at, packets = STATE_BYTES, []
    for job in run.jobs:
        packets.append(at)
        at += -(-job.out.nbytes * 2 // ALIGN) * ALIGN
    attention = run.kinds.attention
    return _Layout(tuple(packets), at, at + (attention.partial_bytes(on_every_gpu(gpu)) if attention else 0))


def _sources(run: Run, n: int, layout: _Layout) -> dict[str, Source]:
    """The jobs before job ``n`` that write its rows, and the places of their packets."""
    found: dict[str, Source] = {}
    for name, place in run.jobs[n].rows.items():
        for k, job in enumerate(run.jobs[:n]):
            if job.out.holds(place):
                found[name] = Source(layout.packets[k] + (place.at - job.out.at) * 2, k)
    return found


def _joined(program: Program, run: Run, gpu: GpuFacts) -> Program:
    """The program with the launches of a run's steps as jobs."""
    kinds, layout = run.kinds, _layout(run, gpu)
    made = recipe(kinds, len(run.jobs), gpu)
    kernel = Kernel(made.name, "megakernel", made.arch, dict(made.generated), tuple(made.options), made.digest())
    exchange = Buffer(f"{EXCHANGE}.{len(program.kernels)}", UINT8, (layout.nbytes,))
    number, buffer = len(program.kernels), len(program.buffers)
    blocks, shared = gpu.multiprocessors, slots(kinds, gpu)[1]
    most = min(len(run.jobs), kinds.most_jobs)
    steps = list(program.steps)
    for n, (k, job) in enumerate(zip(run.steps, run.jobs, strict=True)):
        step = steps[k]
        last = len(step.inputs) + len(step.outputs)
        block, pointers = jobs.parameters(job, kinds, n, _sources(run, n, layout), layout.packets[n], layout.partial)
        relocations = tuple(
            Pointer(p.at, last if p.operand == EXCHANGE else int(p.operand), p.offset) for p in pointers
        )
        part = RunPart(number, n, most, HEADER, kinds.job_bytes + 16, on_every_gpu(gpu))
        plan = LaunchPlan(
            number, (blocks, 1, 1), THREADS, block, relocations, shared, dependent=False, waits=GRID, part=part
        )
        params = {**step.params, "launch": plan.to_plain(), "tactic": "megakernel"}
        steps[k] = replace(step, params=params, outputs=(*step.outputs, buffer))
    return replace(
        program, steps=tuple(steps), kernels=(*program.kernels, kernel), buffers=(*program.buffers, exchange),
        retained=(*program.retained, buffer), meta={**program.meta, "runs": _facts(program, run)},
    )  # fmt: skip


def _facts(program: Program, run: Run) -> list[dict[str, Any]]:
    """The facts about the megakernels for reports."""
    before: list[dict[str, Any]] = list(program.meta.get("runs", ()))
    return [*before, {"first": run.steps[0], "jobs": len(run.steps)}]
