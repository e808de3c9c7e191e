"""Joined launches of one run: which launches are joined, and their parameters."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from support.decoder import decoder

import optdnn
from optdnn.errors import EngineError
from optdnn.lowering import megakernels
from optdnn.runtime.cuda.launches.plan import CudaStep, LaunchPlan, ReferenceOp, RunPart, parse
from optdnn.runtime.cuda.launches.runs import grouped, joined_parameters, part_of
from optdnn.runtime.cuda.launches.waits import check_room
from optdnn.runtime.program import Program

PART = RunPart(3, 0, 4, 16, 8, 114)


def step(part: RunPart | None) -> CudaStep:
    launch = LaunchPlan(0, (132, 1, 1), 640, b"", (), dependent=False, waits="grid", part=part)
    return CudaStep(launch, ReferenceOp("Conv", {}, (), ()))


def run(*numbers: int, of: int = 3) -> list[CudaStep]:
    return [step(replace(PART, run=of, number=n)) for n in numbers]


def test_neighbors_of_a_run_are_one_launch() -> None:
    steps: list[object] = [step(None), *run(0, 1, 2), step(None), *run(3), *run(0, 1, of=5), "on the host"]
    assert grouped(steps) == [[0], [1, 2, 3], [4], [5], [6, 7], [8]]
    assert grouped(steps, joined=False) == [[k] for k in range(9)]
    assert part_of("on the host") is None


def test_a_launch_has_no_more_jobs_than_its_parameters_hold() -> None:
    assert grouped(run(*range(10))) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_the_parameters_of_two_jobs() -> None:
    def block(first: int, job: bytes) -> bytes:
        return b"addressX" + first.to_bytes(4, "little") + (1).to_bytes(4, "little") + job

    joined = joined_parameters(replace(PART, number=2), [block(2, b"job two."), block(3, b"job thre")])
    assert joined == b"addressX" + b"\2\0\0\0" + b"\2\0\0\0" + b"job two.job thre" + bytes(16)
    assert len(joined) == 16 + 4 * 8


def test_a_part_needs_no_room_beyond_the_gpu() -> None:
    """The runtime gives a part as many blocks as the GPU has room for. Another grid that waits for itself must fit."""
    check_room(run(0), 114)
    with pytest.raises(EngineError, match="needs 114 blocks on the GPU at once, and this one runs 78"):
        check_room(run(0), 78)
    with pytest.raises(EngineError, match="needs 132 blocks on the GPU at once, and this one runs 114"):
        check_room([step(None)], 114)


@pytest.fixture(scope="module")
def with_a_part() -> Program:
    """A program with a megakernel, which tests only read."""
    model = decoder(heads=16, groups=4, size=64)
    options: Any = {"target": "cuda:h200", "precision": "fp16", "io_dtype": "fp16", "no_cubins": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megakernels, "gains", lambda run, gpu: True)
        return optdnn.build(model, **options).program


@pytest.mark.parametrize(
    ("message", "part"),
    [
        ("a job of another size than its launch", lambda p: [*p[:4], p[4] + 8, p[5]]),
        ("a job of another size than its launch", lambda p: [*p[:3], 4, p[4] + 12, p[5]]),
        ("more blocks than it has", lambda p: [*p[:5], 133]),
        ("more blocks than it has", lambda p: [*p[:5], 0]),
        ("more jobs than parameters hold", lambda p: [*p[:2], 1000, *p[3:]]),
        ("more jobs than parameters hold", lambda p: [*p[:2], 0, *p[3:]]),
        ("holds -1 for a size", lambda p: [-1, *p[1:]]),
        ("malformed", lambda p: p[:3]),
    ],
)
def test_parts_of_a_file_are_checked(message: str, part: Any, with_a_part: Program) -> None:
    program = with_a_part
    k = next(k for k, s in enumerate(program.steps) if "part" in s.params["launch"])
    params = copy.deepcopy(dict(program.steps[k].params))
    params["launch"]["part"] = part(params["launch"]["part"])
    with pytest.raises(EngineError, match=message):
        parse(replace(program.steps[k], params=params), program)
