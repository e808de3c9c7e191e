"""Joined launches: the jobs of neighboring steps in one launch of their kernel.

A step of a run (:class:`~optdnn.runtime.cuda.launches.plan.RunPart`) has its own launch of one job, for checks and profiles.
A graph has one launch of all jobs: rows pass from job to job without the end of a launch between them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from optdnn.runtime.cuda.launches.plan import CudaStep, LaunchPlan, RunPart


def part_of(step: object) -> RunPart | None:
    """A parsed step's part of a run, or None."""
    launch = step.launch if isinstance(step, CudaStep) else None
    return launch.part if isinstance(launch, LaunchPlan) else None


def grouped(steps: Sequence[object], *, joined: bool = True) -> list[list[int]]:
    """The numbers of the steps of each launch, in order. ``joined``: neighbors of one run are one launch."""
    groups: list[list[int]] = []
    for k, step in enumerate(steps):
        part = part_of(step)
        before = part_of(steps[groups[-1][-1]]) if groups else None
        follows = part is not None and before is not None and (part.run, part.number) == (before.run, before.number + 1)
        if joined and follows and part is not None and len(groups[-1]) < part.most:
            groups[-1].append(k)
        else:
            groups.append([k])
    return groups


def joined_parameters(part: RunPart, blocks: Sequence[bytes]) -> bytes:
    """The parameters of one launch of several jobs. ``blocks``: the parameters of their own launches; ``part``: the first one's."""
    header = blocks[0][: part.header - 4] + struct.pack("<i", len(blocks))
    jobs = b"".join(block[part.header :] for block in blocks)
    return (header + jobs).ljust(part.header + part.most * part.size, b"\0")
