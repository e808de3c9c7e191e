"""Programs that may wait for ever are refused, and every own kernel declares what its blocks wait for."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kernels.conv.test_stream_k import network, prefer_stream_k, streamed
from support.net import Net
from support.simulated import lowered

from optdnn.errors import EngineError
from optdnn.ir.graph import Graph
from optdnn.runtime.cuda.compile.nvrtc import template_files
from optdnn.runtime.cuda.launches.plan import CLUSTER, GRID, LOWER, NOTHING, CudaStep, LaunchPlan, ReferenceOp, parse
from optdnn.runtime.cuda.launches.waits import check_room, may_not_end
from optdnn.runtime.cuda.runner import CudaRunner
from optdnn.runtime.file.validate import validate
from optdnn.runtime.program import Program, Slot
from optdnn.runtime.simulate.runner import SimulateRunner
from optdnn.runtime.steps.executor import LoadOptions


def branches() -> Graph:
    """Two products of one input, and their sum."""
    n = Net()
    x = n.input(64, 256)
    return n.done(n.op("Add", n.matmul(x, 128), n.matmul(x, 128)))


def changed(program: Program, step: int, **launch: Any) -> Program:
    """The program with other values in the launch of one step."""
    steps = list(program.steps)
    plain = {**steps[step].params["launch"], **launch}
    steps[step] = replace(steps[step], params={**steps[step].params, "launch": plain})
    return replace(program, steps=tuple(steps))


def refused(program: Program, because: str) -> None:
    """Both runners refuse the program when they are created: at the end of a build, and when an engine is loaded."""
    with pytest.raises(EngineError, match=because):
        SimulateRunner(program)
    with pytest.raises(EngineError, match=because):
        CudaRunner(program, LoadOptions())


def test_a_grid_that_waits_for_itself_is_refused() -> None:
    refused(changed(lowered(branches()), 0, grid=[1000, 1, 1], waits=GRID), "nothing starts all 1000 blocks")


def test_grids_on_two_lanes_that_wait_for_themselves_are_refused() -> None:
    """Each grid fits the GPU alone. Together, each can keep the last blocks of the other from starting."""
    program = lowered(branches())
    program = changed(changed(program, 0, grid=[100, 1, 1], waits=GRID), 1, grid=[100, 1, 1], waits=GRID)
    lanes = (Slot(0), Slot(1), *[Slot(0, (1,))] * (len(program.steps) - 2))
    refused(replace(program, lanes=lanes), "nothing starts all 100 blocks")


def test_a_grid_that_begins_as_a_whole_may_wait_for_itself() -> None:
    """The runtime launches it cooperatively. Clusters of a grid would need room for whole clusters."""
    launch = LaunchPlan(0, (128, 1, 1), 256, b"", (), dependent=False, waits=GRID)
    assert may_not_end(launch, "sm_90a") is None
    assert may_not_end(replace(launch, cluster=2), "sm_90a") is not None
    with pytest.raises(EngineError, match="needs 128 blocks on the GPU at once, and this one runs 80"):
        check_room([CudaStep(launch, ReferenceOp("Recurrence", {}, (), ()), "layer")], 80)
    check_room([CudaStep(launch, ReferenceOp("Recurrence", {}, (), ()), "layer")], 128)


def test_an_early_grid_that_waits_for_itself_is_refused() -> None:
    """It may begin in the room that the launch before it leaves, which may be too small."""
    last = len(lowered(branches()).steps) - 1
    refused(changed(lowered(branches()), last, grid=[132, 1, 1], dependent=True, waits=GRID), "may never end")


@pytest.mark.parametrize(
    ("launch", "because"),
    [
        ({"waits": CLUSTER, "cluster": 1}, "it has no clusters"),
        ({"grid": [9, 1, 1], "cluster": 2}, "9 blocks are not whole clusters of 2"),
        ({"grid": [64, 1, 1], "cluster": 32}, "impossible launch"),
        ({"waits": "somebody"}, "waits for 'somebody'"),
    ],
)
def test_waits_that_cannot_end_are_refused(launch: dict[str, Any], because: str) -> None:
    refused(changed(lowered(branches()), 0, **launch), because)


def test_clusters_before_hopper_are_refused() -> None:
    launch = LaunchPlan(0, (4, 1, 1), 128, b"", (), cluster=2, waits=CLUSTER)
    assert may_not_end(launch, "sm_89") == "it has clusters, and sm_89 does not"
    assert may_not_end(launch, "sm_90a") is None


def test_a_lane_that_waits_for_a_later_step_is_refused() -> None:
    program = lowered(branches())
    lanes = (Slot(0, (1,)), Slot(1), *[Slot(0, (1,))] * (len(program.steps) - 2))
    with pytest.raises(EngineError, match="not earlier ones"):
        validate(replace(program, lanes=lanes))


@pytest.mark.slow
def test_a_build_ends_with_the_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import onnx

    import optdnn
    from optdnn.kernels import launch
    from optdnn.models import zoo

    onnx.save(zoo.build("mlp"), tmp_path / "m.onnx")
    monkeypatch.setattr(launch, "NOTHING", GRID)
    monkeypatch.setattr(launch, "CLUSTER", GRID)
    for target in ("simulate", "cuda:sm_90a"):
        with pytest.raises(EngineError, match="may never end"):
            optdnn.build(tmp_path / "m.onnx", target=target, no_cubins=True)


def test_launches_declare_their_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    program = lowered(network())
    launches = [parse(s, program).launch for s in program.steps]
    assert all(x.waits == (CLUSTER if x.cluster > 1 else NOTHING) for x in launches if isinstance(x, LaunchPlan))
    prefer_stream_k(monkeypatch)
    program = lowered(network())
    waits = {k: parse(s, program).launch.waits for k, s in enumerate(program.steps)}  # type: ignore[union-attr]
    assert {k for k, w in waits.items() if w == LOWER} == set(streamed(program))


def test_resident_blocks_follow_from_the_waits() -> None:
    launch = LaunchPlan(0, (12, 2, 1), 128, b"", (), cluster=4)
    assert [replace(launch, waits=w).resident for w in (NOTHING, CLUSTER, LOWER, GRID)] == [1, 4, 1, 24]


def test_files_without_the_declaration_are_read() -> None:
    program = lowered(branches())
    step = program.steps[0]
    launch = {k: v for k, v in step.params["launch"].items() if k != "waits"}
    for cluster, waits in ((1, NOTHING), (2, CLUSTER)):
        plain = {**step.params, "launch": {**launch, "cluster": cluster}}
        assert parse(replace(step, params=plain), program).launch.waits == waits  # type: ignore[union-attr]


def test_only_known_kernels_wait_for_global_memory() -> None:
    """A kernel with another such loop must declare it, and the checker must know it."""
    waiting = re.compile(
        r"load_acquire\((p\.|rounds)|atomicCAS\(|ld\.(acquire|volatile|relaxed)\.[a-z.]*global|volatile\s*\w+\s*\*"
    )
    found = {name for name, path in template_files().items() if waiting.search(path.read_text(encoding="utf-8"))}
    own = {"all_reduce.cu", "conv_stream.cuh", "grid_meeting.cuh", "packets.cuh", "rnn_grid.cu", "rnn_resident.cu"}
    own |= {"mega_exchange.cuh", "megakernel.cu"}
    assert found == own | {"counts.cuh"}, "which defines load_acquire"
