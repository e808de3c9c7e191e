"""The process that tries GPU programs, with a made-up GPU. A program that hangs, crashes or corrupts memory costs one worker,
and is reported."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from support.fake_gpu import VARIABLE, pretend
from support.net import Net
from support.simulated import lowered
from support.timer import hashed, tactics_of

from optdnn.errors import EngineStale, RunError
from optdnn.runtime.cuda.compile.nvrtc import KernelCache
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.cuda.device import gpu_count
from optdnn.runtime.cuda.trials import process as trial_process
from optdnn.runtime.cuda.trials.gpu_worker import fault_text
from optdnn.runtime.cuda.trials.process import (
    CandidateLost,
    GpuProcess,
    GraphFault,
    NetworkLost,
    StepFault,
    TrialTimer,
    gpu_process,
)
from optdnn.runtime.cuda.trials.sent import PROGRAM, Receiver, Sender
from optdnn.runtime.cuda.trials.timer import TrialFailed
from optdnn.runtime.program import Program
from optdnn.runtime.workers import process
from optdnn.types import Array

pytestmark = pytest.mark.nvrtc


def program(channels: int = 8) -> Program:
    n = Net()
    return lowered(n.done(n.op("Softmax", n.op("Relu", n.conv(n.input(1, 8, 6, 6), channels, 3, bias=True)))))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuProcess]:
    pretend(monkeypatch)
    with gpu_process() as found:
        yield found


# ---------------------------------------------------------------- programs on their way


def test_programs_arrive_as_they_were_with_their_code() -> None:
    sent, cubins = program(), dict[tuple[object, ...], Array]()
    sender, receiver = Sender(KernelCache(), cubins), Receiver()
    message, arrays = sender.pack(sent)
    got = receiver.unpack(message, arrays)
    assert (got.steps, got.buffers, got.inputs, got.outputs) == (sent.steps, sent.buffers, sent.inputs, sent.outputs)
    assert (got.arena_bytes, got.lanes, got.retained) == (sent.arena_bytes, sent.lanes, sent.retained)
    for theirs, ours in zip(got.kernels, sent.kernels, strict=True):
        assert theirs.cubin is not None
        assert got.blobs[theirs.cubin].tobytes()[:4] == b"\x7fELF"
        assert (theirs.function, theirs.generated) == (ours.function, {})
    for theirs_b, ours_b in zip(got.buffers, sent.buffers, strict=True):
        if ours_b.blob is not None:
            assert theirs_b.blob is not None
            np.testing.assert_array_equal(got.blobs[theirs_b.blob], sent.blobs[ours_b.blob])


def test_shared_data_of_programs_are_sent_once_and_freed_with_them() -> None:
    sent = program()
    sender, receiver = Sender(KernelCache(), {}), Receiver()
    message, arrays = sender.pack(sent)
    weights = len(arrays) - 1 - len(sent.kernels)
    assert weights >= 2
    receiver.unpack(message, through_the_pipe(arrays))
    again, arrays = sender.pack(replace(sent, precision="fp16"))
    assert list(arrays) == [PROGRAM]
    assert receiver.unpack(again, arrays).precision == "fp16"
    del sent
    gc.collect()
    other, arrays = sender.pack(program(16))
    assert len(other["dropped"]) == weights, "what was compiled is kept"
    receiver.unpack(other, through_the_pipe(arrays))
    assert len(receiver._arrays) == len({*message["blobs"], *other["blobs"]}) - weights


def through_the_pipe(arrays: dict[str, Array]) -> dict[str, Array]:
    return {name: a.copy() for name, a in arrays.items()}


# ---------------------------------------------------------------- candidates


FAULTS = {
    "sleeps": "^hung: no answer in 2 s",
    "hangs": "^hung: it has not ended after 10 s",
    "segfaults": "^crashed: its process was ended by SIGSEGV",
    "traps": "^crashed: an illegal instruction was encountered",
    "corrupts": "^it writes outside of its buffers",
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_candidate_that_hangs_crashes_or_corrupts_costs_one_worker(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = program(8), program(16)
    name = tactics_of(bad)[-1]
    assert name
    good = replace(
        good, steps=(*good.steps[:-1], replace(good.steps[-1], params={**good.steps[-1].params, "tactic": "good"}))
    )
    pretend(monkeypatch, ("trial", name, how), answers_s=1.0)
    with gpu_process() as found:
        timer = TrialTimer(found)
        assert timer.trial("a", good, cold=False, give_up=float("inf")) == hashed("good")
        begin = time.monotonic()
        with pytest.raises(CandidateLost, match=FAULTS[how]):
            timer.trial("a", bad, cold=False, give_up=1.0)
        assert time.monotonic() - begin < 20
        assert found.losses
        assert timer.trial("a", good, cold=False, give_up=1.0) == hashed("good")
        assert found.generation == 2


def test_a_wrong_candidate_costs_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ("trial", "", "wrong"))
    with gpu_process() as found:
        with pytest.raises(TrialFailed, match="wrong result") as caught:
            TrialTimer(found).trial("a", program(), cold=False, give_up=1.0)
        assert not isinstance(caught.value, CandidateLost)
        assert found.generation == 1


def test_a_kernel_that_does_not_compile_is_a_failed_candidate(started: GpuProcess) -> None:
    good = program()
    broken = replace(good.kernels[0], options=("--no-such-option",))
    broken = replace(broken, source=recipe_of(broken).digest())
    with pytest.raises(TrialFailed):
        TrialTimer(started).trial("a", replace(good, kernels=(broken, *good.kernels[1:])), cold=False, give_up=1.0)
    assert started.losses == []


def test_kernels_of_other_templates_are_not_compiled_for_it(started: GpuProcess) -> None:
    good = program()
    stale = replace(good, kernels=(replace(good.kernels[0], source="0" * 64), *good.kernels[1:]))
    with pytest.raises(EngineStale):
        TrialTimer(started).load(stale)


def test_a_gpu_that_loses_every_program_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ("trial", "", "hangs"))
    monkeypatch.setattr(trial_process, "LOSSES", 2)
    with gpu_process() as found:
        timer = TrialTimer(found)
        for _ in range(2):
            with pytest.raises(CandidateLost):
                timer.trial("a", program(), cold=False, give_up=1.0)
        with pytest.raises(RunError, match="2 programs hung or crashed") as caught:
            timer.trial("a", program(), cold=False, give_up=1.0)
        assert not isinstance(caught.value, TrialFailed)


def test_a_gpu_that_cannot_be_used_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ("open", "", "segfaults"))
    with gpu_process() as found, pytest.raises(RunError, match=r"cannot use the GPU: its process was ended by SIGSEGV"):
        TrialTimer(found)


def test_the_worker_itself_reports_that_there_is_no_gpu() -> None:
    if gpu_count() > 0:
        pytest.skip("a GPU is there")
    with gpu_process() as found, pytest.raises(RunError, match="cannot use the GPU: CudaError"):
        TrialTimer(found)


# ---------------------------------------------------------------- networks


def test_networks_are_loaded_again_after_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ("load", "lanes", "hangs"))
    net = program()
    bad = replace(
        net, steps=(*net.steps[:-1], replace(net.steps[-1], params={**net.steps[-1].params, "tactic": "lanes"}))
    )
    with gpu_process() as found:
        timer = TrialTimer(found)
        good, other = timer.load(net), timer.load(program(16))
        before = timer.race([good, other], 2)
        with pytest.raises(NetworkLost, match="hung: it has not ended") as caught:
            timer.load(bad)
        assert caught.value.network not in (good, other)
        other.close()
        assert timer.race([good], 1) == before[:1]
        good.close()
        good.close()
        assert found.generation == 2


# ---------------------------------------------------------------- first runs


def test_the_first_runs_of_a_program(started: GpuProcess) -> None:
    found = TrialTimer(started).first_run(program())
    assert (found.replays, found.same, found.skipped) == (trial_process.REPLAYS, True, None)


@pytest.mark.parametrize("how", FAULTS)
def test_a_launch_that_fails_when_it_runs_alone_is_named(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = program()
    name = net.steps[1].params["tactic"]
    pretend(monkeypatch, ("step", name, how), answers_s=1.0)
    with gpu_process() as found:
        with pytest.raises(StepFault, match=FAULTS[how].strip("^")) as caught:
            TrialTimer(found).first_run(net)
        assert found.losses
    if how in ("sleeps", "segfaults"):
        assert caught.value.step is None
    else:
        assert caught.value.step == 1
        assert f"step 1, Conv ({' + '.join(net.steps[1].src)}), by {name}" in str(caught.value)


@pytest.mark.parametrize("how", FAULTS)
def test_a_graph_that_does_not_run_is_reported(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ("graph", "", how), answers_s=2.0)
    with gpu_process() as found, pytest.raises(GraphFault, match=FAULTS[how].strip("^")):
        TrialTimer(found).first_run(program())


@pytest.mark.parametrize("where", ["step", "graph"])
def test_results_that_made_up_inputs_cannot_judge_are_reported(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (where, "", "host"))
    with gpu_process() as found:
        skipped = TrialTimer(found).first_run(program()).skipped
        assert skipped == "an operator on the CPU refuses its made-up inputs"
        assert found.losses == []


# ---------------------------------------------------------------- the process


def test_an_interrupted_request_leaves_no_answer_for_the_next_one(
    started: GpuProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = TrialTimer(started)
    receive = process.receive

    def interrupted(stream: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        timer.trial("a", program(), cold=False, give_up=1.0)
    monkeypatch.setattr(process, "receive", receive)
    assert timer.trial("a", program(), cold=False, give_up=1.0) > 0
    assert started.generation == 2
    assert started.losses == []


def test_one_worker_serves_all_of_a_build_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    with gpu_process() as found:
        with gpu_process() as inner:
            assert inner is found
            found.open()
        assert found.alive(1)
    assert not found.alive(1)
    found.begin()
    assert not found.alive(1), "it is closed"


ORPHAN = """
import sys, threading
sys.path[:0] = {path!r}
from optdnn.runtime.cuda.trials.process import GpuProcess
found = GpuProcess("support.fake_gpu:main")
found.begin()
print(found._worker._process.pid, flush=True)
found.open()
"""


def test_a_worker_that_hangs_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, VARIABLE: '[["open", "", "sleeps"]]'}
    code = ORPHAN.format(path=sys.path)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        time.sleep(2.0)  # it hangs by now, or will soon
        os.kill(parent.pid, signal.SIGKILL)
    end = time.monotonic() + 60
    while time.monotonic() < end and running(worker):
        time.sleep(0.1)
    assert not running(worker)


def running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_faults_in_words() -> None:
    assert fault_text("KernelHangs", "it") == "hung: it"
    assert fault_text("KernelCrashes", "it") == "crashed: it"
    assert fault_text("MemoryCorrupted", "it writes") == "it writes"
