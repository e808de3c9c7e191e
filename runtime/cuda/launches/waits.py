"""Proves that every launch of a program ends: no block waits for a block that may find no room on the GPU.

Each launch declares the waits of its blocks while they hold their room (registers, shared memory, a place on a
multiprocessor):

``nothing``
    No other block of the grid. Counted arrivals belong here: the last block to arrive continues, and the others end.
``cluster``
    The peers of their cluster. The hardware starts all blocks of a cluster together.
``lower``
    Blocks of the grid with a lower index, as in stream-K. The hardware starts blocks in ascending order, so the lower blocks
    already hold their room.
``grid``
    Any block of the grid. A part of the grid could fill the GPU and wait for blocks that find no room, alone or together with
    another launch or another context in the same situation. A cooperative launch rules this out: it begins with all its blocks,
    and the driver refuses it if they find no room on an empty GPU. So the runtime launches such a grid cooperatively. It must not
    be ``dependent``: it would begin while earlier launches still run.

Launches also wait for earlier launches. A launch with ``dependent`` may begin while the launches before it still run, and waits
for them in the kernel (``griddepcontrol.wait``). It begins only when every block of these launches has begun and executed
``griddepcontrol.launch_dependents``. So the launches that it waits for already hold their room. By induction, the same is true for
every launch that these wait for. Lanes do not change this: a launch that joins lanes begins when every block of each of its
predecessors has begun. A launch without an order to it shares the GPU with it, but both end on their own and then free their room.

A block of a collective over peer memory (``flagged.cu``, ``all_reduce.cu``) waits for the block with the same number on each other
GPU. That block waits only for earlier launches on its own GPU, so it begins. The wait has a limit, because the other GPU's
process may have ended. Such launches are not part of a program, so they are not checked here.

These are all waits between blocks. The other waits are within a block or cluster, on mbarriers, and depend on no room.
"""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.errors import EngineError
from optdnn.runtime.cuda.gpu_facts import HOPPER, capability_of
from optdnn.runtime.cuda.launches.plan import CLUSTER, GRID, CudaStep, LaunchPlan
from optdnn.runtime.cuda.libraries.calls import LibraryCall
from optdnn.runtime.program import Program


def check_waits(program: Program, steps: Sequence[object]) -> None:
    """Check that every launch of ``program`` ends; ``steps`` are its steps, parsed.

    Raises EngineError that names the first launch that may wait forever.
    """
    for step in steps:
        if not isinstance(step, CudaStep) or isinstance(step.launch, LibraryCall):
            continue
        why = may_not_end(step.launch, program.kernels[step.launch.kernel].arch)
        if why is not None:
            raise EngineError(
                f"the kernel for {step.label} may never end: {why}",
                hint="rebuild the engine with this version of optdnn",
            )


def may_not_end(launch: LaunchPlan, arch: str) -> str | None:
    """Why a launch may wait forever on a GPU of this architecture, such as ``sm_90a``; None if it ends."""
    if launch.waits == GRID and (launch.dependent or launch.cluster > 1):
        return f"its blocks wait for one another, and nothing starts all {launch.resident} blocks of the grid together"
    if launch.cluster == 1:
        return (
            "its blocks wait for the peers of their cluster, but it has no clusters"
            if launch.waits == CLUSTER
            else None
        )
    if capability_of(arch)[0] < HOPPER:
        return f"it has clusters, and {arch} does not"
    if launch.grid[0] % launch.cluster:
        return f"its {launch.grid[0]} blocks are not whole clusters of {launch.cluster}"
    return None


def check_room(steps: Sequence[object], blocks: int) -> None:
    """Check that a GPU that certainly runs ``blocks`` at once (one per multiprocessor) holds every grid whose blocks wait for
    each other.

    A part of a run gets no more blocks than there is room for, but needs at least ``least``. Raises EngineError that names the
    first launch that may find no room: the driver would refuse it.
    """
    for step in steps:
        if not isinstance(step, CudaStep) or isinstance(step.launch, LibraryCall):
            continue
        if step.launch.waits == GRID and step.launch.resident > blocks:
            raise EngineError(
                f"the kernel for {step.label} needs {step.launch.resident} blocks on the GPU at once, and this one runs {blocks}",
                hint="build the engine for this GPU",
            )
