"""Engines of several ranks without a GPU: threads and processes, files, launchers, and failures of each kind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.ranks import decoder, mlp

import optdnn
from optdnn.config import BuildOptions
from optdnn.errors import EngineError, InputError, RankError, RunError, UnsupportedError, UsageError
from optdnn.runtime.engine import Engine
from optdnn.runtime.file.format import VERSION, encode, read
from optdnn.runtime.file.validate import validate
from optdnn.runtime.measuring.bench import bench
from optdnn.runtime.ranks.exchange import Threads, together
from optdnn.runtime.ranks.group import Group, Hub, join
from optdnn.runtime.ranks.place import Place, meet, place_of
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.types import Array

X = {"x": np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)}


@cache
def built(target: str = "simulate", devices: int = 2) -> Engine:
    return optdnn.build(mlp(4), target=target, devices=devices, split="weights")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "mlp.engine"
    built().save(path)
    return path


@pytest.mark.parametrize("target", ["reference", "simulate"])
@pytest.mark.parametrize("devices", [2, 4])
def test_several_ranks_give_the_results_of_one(target: str, devices: int) -> None:
    one = optdnn.build(mlp(4), target=target).run(X)["y"]
    engine = built(target, devices)
    several = engine.run(X)["y"]
    np.testing.assert_allclose(several, one, rtol=1e-5, atol=1e-5)
    assert np.array_equal(engine.run(X)["y"], several)
    assert engine.meta["options"]["devices"] == devices
    with pytest.raises(UsageError, match="steps are timed on one device"):
        engine.context().profile(X)
    with pytest.raises(UsageError, match="ranks in threads have no times"):
        engine.context().gpu_times(X)  # type: ignore[attr-defined]
    assert bench(engine, X, duration=0.01)["iterations"] >= 1


def test_the_batch_may_be_split_instead() -> None:
    engine = optdnn.build(mlp(4), target="simulate", devices=2, split="batch")
    np.testing.assert_array_equal(engine.run(X)["y"], optdnn.build(mlp(4), target="simulate").run(X)["y"])
    assert engine.program.ranks is not None
    assert engine.program.ranks.inputs == (0,)
    with pytest.raises(UsageError, match="split 'heads' is not one of auto, weights, batch"):
        BuildOptions(devices=2, split="heads")


def test_a_file_holds_split_weights_once_for_each_rank_and_whole_ones_once(file: Path) -> None:
    program = read(file)
    assert program.ranks is not None
    assert program.ranks.world == 2
    whole = sum(b.nbytes for b in optdnn.build(mlp(4), target="simulate").program.blobs)
    assert sum(b.nbytes for b in program.blobs) < 1.02 * whole
    assert bytes(encode(program)[0])[10] == VERSION[1] == 7
    np.testing.assert_array_equal(optdnn.load(file).run(X)["y"], built().run(X)["y"])
    with pytest.raises(RankError, match="the engine is for 2 devices, not for 3"):
        optdnn.load(file, devices=3)
    assert optdnn.load(file, devices=2).program.ranks is not None
    with pytest.raises(EngineError, match="an engine of several devices takes no other weights"):
        optdnn.load(file).refit({}, model=mlp(4))


def test_ranks_that_do_not_fit_together_are_refused() -> None:
    program = built().program
    ranks = program.ranks
    assert ranks is not None
    (other,) = ranks.programs
    for wrong, said in (
        (replace(ranks, inputs=()), "axes are given"),
        (replace(ranks, inputs=(5,)), "cannot be split along axis 5"),
        (replace(ranks, programs=(replace(other, steps=other.steps[:-1]),)), "other collectives|nothing writes"),
        (replace(ranks, programs=(replace(other, target="reference"),)), "is not one of this engine"),
        (replace(ranks, programs=(other, other)), "another number of ranks"),
        (replace(ranks, programs=()), "the engine has 1 ranks"),
    ):
        with pytest.raises(EngineError, match=said):
            validate(replace(program, ranks=wrong))


@pytest.mark.slow
def test_caches_stay_with_their_ranks() -> None:
    model, feeds, state = decoder()
    found = []
    for devices in (1, 2):
        engine = optdnn.build(model, target="simulate", precision="fp16", devices=devices)
        given = {n: a.copy() for n, a in feeds.items()}
        bound = engine.context().bind(given, state=state)
        tokens = []
        for _ in range(4):
            given["token"][:] = bound.run()["logits"].argmax()
            given["at"] += 1
            tokens.append(int(given["token"][0, 0]))
        kept = {n: np.asarray(a).copy() for n, a in bound.state.items()}
        bound.reset({n: np.zeros_like(a) for n, a in kept.items()})
        empty = bound.state["key.0.past"]
        assert not np.asarray(empty).any()
        found.append((tokens, kept))
    assert found[0][0] == found[1][0]
    for name, array in found[0][1].items():
        np.testing.assert_allclose(found[1][1][name], array, rtol=2e-2, atol=2e-2)


# ---------------------------------------------------------------- processes


@pytest.fixture
def apart(file: Path) -> Iterator[Engine]:
    engine = Engine(read(file), options=LoadOptions(processes=True))
    yield engine
    engine._runner.team.close()  # type: ignore[attr-defined]


def processes(engine: Engine) -> list[Any]:
    found: list[Any] = engine._runner.team.processes  # type: ignore[attr-defined]
    return found


def test_a_process_for_each_rank(apart: Engine) -> None:
    np.testing.assert_array_equal(apart.run(X)["y"], built().run(X)["y"])
    out = np.zeros((4, 64), np.float32)
    assert apart.context().run(X, out={"y": out})["y"] is out
    with pytest.raises(InputError):
        apart.run({"x": np.zeros((3, 64), np.float32)})
    np.testing.assert_array_equal(apart.run(X)["y"], out)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_runs_of_all(apart: Engine) -> None:
    child = processes(apart)[0]._process
    threading.Timer(0.3, child.kill).start()
    start = time.monotonic()

    def runs() -> None:
        for _ in range(100000):
            apart.run(X)

    with pytest.raises(RankError, match="rank 1"):
        runs()
    assert time.monotonic() - start < 10
    with pytest.raises(RankError, match="rank 1"):
        apart.run(X)


def test_ranks_end_with_the_process_that_started_them(file: Path) -> None:
    code = (
        "import sys, time; from optdnn.runtime.engine import Engine; from optdnn.runtime.file.format import read\n"
        "from optdnn.runtime.steps.executor import LoadOptions\n"
        "e = Engine(read(sys.argv[1]), options=LoadOptions(processes=True))\n"
        "print(e._runner.team.processes[0]._process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    end = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < end, "a rank is left"
        time.sleep(0.1)


def test_a_rank_that_cannot_start_is_an_error_of_the_first(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.runtime.ranks.processes._plain", lambda options: {"no_such_option": 1})
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 could not start|rank 1 failed"):
        Engine(read(file), options=LoadOptions(processes=True))
    assert time.monotonic() - start < 10


# ---------------------------------------------------------------- launchers

PROGRAM = """
import sys, numpy as np, optdnn
engine = optdnn.load(sys.argv[1])
x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
print("sum", float(np.abs(engine.run({"x": x})["y"]).sum()), flush=True)
if len(sys.argv) > 2 and engine._runner.team._rank == 1:
    import os; os._exit(3)
engine.run({"x": x})
"""


def launched(engine: Path, rank: int, world: int, at: Path, *more: str) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "OPTDNN_RENDEZVOUS": str(at),
    }
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(engine), *more], env=env, stdout=pipe, stderr=pipe, text=True
    )


def test_ranks_of_a_launcher(file: Path, tmp_path: Path) -> None:
    want = float(np.abs(built().run(X)["y"]).sum())
    for process in [launched(file, r, 2, tmp_path / "at") for r in range(2)]:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert float(out.split()[1]) == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
def test_a_rank_of_a_launcher_that_ends(file: Path, tmp_path: Path) -> None:
    first, second = (launched(file, r, 2, tmp_path / "at", "end") for r in range(2))
    _, err = first.communicate(timeout=30)
    assert "RankError: rank 1 of 2 ended while others ran" in err
    assert second.wait(10) == 3


def test_another_number_of_ranks_than_the_engine_has(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match="the engine is for 2 ranks, and the launcher started 3"):
        optdnn.load(file)


def test_places() -> None:
    assert place_of({}) is None
    assert place_of({"RANK": "0", "WORLD_SIZE": "1"}) is None
    torch = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29400"}
    assert place_of(torch) == Place(3, 4, 1, "host:29401")
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OPTDNN_RENDEZVOUS": "/shared/at"}
    assert place_of(mpi) == Place(1, 2, 1, "/shared/at")
    for wrong, said in (
        ({"RANK": "one", "WORLD_SIZE": "2"}, "is not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK is 2 and WORLD_SIZE 2"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "nothing says where rank 0 is"),
    ):
        with pytest.raises(UsageError, match=said):
            place_of(wrong)


# ---------------------------------------------------------------- groups


def grouped(world: int) -> list[Group]:
    hub = Hub(world)
    found: list[Any] = [None] * world
    threads = [
        threading.Thread(target=lambda r=r: found.__setitem__(r, join(hub.address, r, world, hub.token)))
        for r in range(1, world)
    ]
    for thread in threads:
        thread.start()
    found[0] = hub.accept(limit=10)
    for thread in threads:
        thread.join()
    return found


def test_a_group_exchanges_in_the_order_of_ranks() -> None:
    groups = grouped(3)
    found: list[Any] = [None] * 3

    def work(r: int) -> None:
        found[r] = groups[r].gather(np.full(2, r, np.float16))

    threads = [threading.Thread(target=work, args=(r,)) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    for one in found:
        assert [a.tolist() for a in one] == [[0, 0], [1, 1], [2, 2]]
    for group in groups:
        group.close()
    assert all(group.lost is None for group in groups)


def test_one_failure_is_reported_to_every_rank() -> None:
    groups = grouped(3)
    reported = [threading.Event(), threading.Event()]
    groups[0].when_lost(reported[0].set)
    groups[2].when_lost(reported[1].set)
    groups[1].fail("rank 1 ran out of memory")
    for group in (groups[0], groups[2]):
        with pytest.raises(RankError, match="rank 1 ran out of memory"):
            group.exchange({})
    assert all(event.wait(5) for event in reported), "each in the thread that learned of it"


def test_hubs_refuse() -> None:
    with pytest.raises(RankError, match=r"ranks 1, 2 did not connect within 0\.3 s"):
        Hub(3).accept(limit=0.3)
    hub = Hub(2)
    errors: list[str] = []

    def other() -> None:
        try:
            join(hub.address, 1, 4, hub.token, limit=5)
        except RankError as error:
            errors.append(error.message)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(RankError, match="rank 1 was started as one of 4 ranks, rank 0 as one of 2"):
        hub.accept(limit=5)
    thread.join()
    assert "one of 4 ranks" in errors[0]
    with pytest.raises(RankError, match="does not answer"):
        join(hub.address, 1, 2, hub.token, limit=0.2)
    with pytest.raises(RankError, match="wrote no address"):
        meet(Place(1, 2, 1, "/nowhere/at"), 0.2)


# ---------------------------------------------------------------- collectives by themselves

SUM = """<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
    agraph (float[2, 4] x) => (float[2, 4] y) { y = com.microsoft.AllReduce <group_size = 2> (x) }"""


def test_the_model_of_one_rank_runs_only_with_the_others() -> None:
    engine = optdnn.build(onnx.parser.parse_model(SUM), target="simulate")
    x = np.ones((2, 4), np.float32)
    with pytest.raises(RunError, match="a collective of 2 ranks runs on one rank"):
        engine.run({"x": x})
    runs = [lambda k=k: engine.context().run({"x": x * k})["y"] for k in (1, 2)]
    for y in together(runs, Threads(2)):
        np.testing.assert_array_equal(y, 3 * x)


def test_a_rank_that_fails_in_a_thread_frees_the_others() -> None:
    def fails() -> Array:
        raise InputError("of its own")

    engine = optdnn.build(onnx.parser.parse_model(SUM), target="reference")
    with pytest.raises(InputError, match="of its own"):
        together([lambda: engine.context().run({"x": np.ones((2, 4), np.float32)})["y"], fails], Threads(2))


# ---------------------------------------------------------------- builds


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": "cpu"}, "target cpu has none"),
        ({"target": "simulate", "streams": 2}, "no streams"),
        ({"target": "simulate", "devices": 0}, "devices must be 1 to 64"),
        ({"target": "simulate", "shapes": {"x": (optdnn.DimRange(1, 2, 4), 64)}}, "no ranges of shapes"),
        ({"target": "simulate", "calib": X, "precision": "int8"}, "no calib"),
    ],
)
def test_builds_that_have_no_devices(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        BuildOptions(**{"devices": 2, **options})


def test_a_network_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"split for 3 devices:\n  up\.0: 64 features do not divide",
    ):
        optdnn.build(mlp(4), target="simulate", devices=3)
