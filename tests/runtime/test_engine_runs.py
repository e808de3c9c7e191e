"""Runs of an engine: threads, failing steps, results that are not what the program says, lifetimes of arrays, cost."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from programs import F32, mlp, mlp_expected, program
from support.processor import assert_quick, seconds

from optdnn import Engine
from optdnn.errors import RunError, UsageError
from optdnn.runtime.program import Step

RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 5)).astype(np.float32)


@pytest.fixture
def engine() -> Engine:
    return Engine(mlp())


def test_threads_share_an_engine(engine: Engine) -> None:
    inputs = [RNG.standard_normal((n + 1, 5)).astype(np.float32) for n in range(8)]
    failures: list[str] = []

    def work(x: Any) -> None:
        want = mlp_expected(engine.program, x)["y"]
        for _ in range(50):
            if not np.array_equal(engine.run({"x": x})["y"], want):
                failures.append(f"wrong for {x.shape}")

    threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_contexts_are_pooled_and_made_per_concurrent_call(fake: Any) -> None:
    inside, go = threading.Barrier(3), threading.Event()

    def run(inputs: Any, outs: Any) -> Any:
        if inputs[0][0] == 1:
            inside.wait(5)
            go.wait(5)
        return [inputs[0] + 1]

    made = fake(run)
    steps = [Step("fake", {}, (0,), (1,))]
    e = Engine(program([("x", F32, (1,))], [("y", 1)], steps, [(F32, (1,))]))
    for _ in range(3):
        e(np.zeros(1, np.float32))
    assert made.sessions == 1
    threads = [threading.Thread(target=e, args=(np.ones(1, np.float32),)) for _ in range(2)]
    for t in threads:
        t.start()
    inside.wait(5)  # both run concurrently, each in its own session
    assert made.sessions == 2
    go.set()
    for t in threads:
        t.join()


def test_a_context_refuses_a_second_thread(fake: Any) -> None:
    entered, go = threading.Event(), threading.Event()

    def run(inputs: Any, outs: Any) -> Any:
        entered.set()
        go.wait(5)
        return [inputs[0] + 1]

    fake(run)
    steps = [Step("fake", {}, (0,), (1,))]
    context = Engine(program([("x", F32, (1,))], [("y", 1)], steps, [(F32, (1,))])).context()
    feeds = {"x": np.zeros(1, np.float32)}
    t = threading.Thread(target=context.run, args=(feeds,))
    t.start()
    entered.wait(5)
    with pytest.raises(RunError, match="running in another thread"):
        context.run(feeds)
    go.set()
    t.join()
    assert context.run(feeds)["y"] == 1


def test_a_failing_step_is_named(fake: Any) -> None:
    def run(inputs: Any, outs: Any) -> Any:
        raise ValueError("no such tile")

    fake(run)
    steps = [Step("fake", {}, (0,), (1,), ("conv1", "relu1", "c", "d", "e"))]
    e = Engine(program([("x", F32, (1,))], [("y", 1)], steps, [(F32, (1,))]))
    message = r"step 0 \(fake: conv1, relu1, c, d and 1 more\) failed: ValueError: no such tile"
    with pytest.raises(RunError, match=message):
        e(np.zeros(1, np.float32))


def test_running_out_of_memory_is_a_run_error(fake: Any) -> None:
    def run(inputs: Any, outs: Any) -> Any:
        raise MemoryError("12 GiB")

    fake(run)
    steps = [Step("fake", {}, (0,), (1,))]
    e = Engine(program([("x", F32, (1,))], [("y", 1)], steps, [(F32, (1,))]))
    with pytest.raises(RunError, match=r"step 0 .* ran out of memory: 12 GiB"):
        e(np.zeros(1, np.float32))


@pytest.mark.parametrize("wrong", [np.zeros(1), np.zeros((1, 1), np.float32)])
def test_an_executor_that_gives_another_type_is_caught(fake: Any, wrong: Any) -> None:
    fake(lambda inputs, outs: [wrong])
    steps = [Step("fake", {}, (0,), (1,))]
    e = Engine(program([("x", F32, (1,))], [("y", 1)], steps, [(F32, (1,))]))
    with pytest.raises(RunError, match=r"step 0 .* computed 't0' as float.*; it should be fp32\[1\]"):
        e(np.zeros(1, np.float32))


def test_a_result_is_compared_with_sizes_that_follow_from_the_inputs(fake: Any) -> None:
    """A size without a value in a call (a division by an empty dimension), or one that depends on data, is not checked."""
    fake(lambda inputs, outs: [np.zeros((6, 2, 5), np.float32)])
    steps = [Step("fake", {}, (0,), (1,))]
    e = Engine(program([("x", F32, ("n", "m"))], [("y", 1)], steps, [(F32, ("2*n", "floor(n/m)", "k"))]))
    assert e(np.zeros((3, 1), np.float32)[:, :0]).shape == (6, 2, 5)
    for shape, why in (((3, 1), r"\[6, 3, \?\]"), ((2, 1), r"\[4, 2, \?\]")):
        with pytest.raises(RunError, match=rf"computed 't0' as float32\[6, 2, 5\]; it should be fp32{why}"):
            e(np.zeros(shape, np.float32))


def test_an_executor_that_gives_too_few_results_is_caught(fake: Any) -> None:
    fake(lambda inputs, outs: [])
    e = Engine(program([("x", F32, (1,))], [("y", 1)], [Step("fake", {}, (0,), (1,))], [(F32, (1,))]))
    with pytest.raises(RunError, match=r"step 0 .* gave 0 results, it has 1 outputs"):
        e(np.zeros(1, np.float32))


@pytest.mark.slow
def test_buffers_are_dropped_after_their_last_use(fake: Any) -> None:
    import gc
    import weakref

    alive: list[int] = []
    made: list[Any] = []

    def run(inputs: Any, outs: Any) -> Any:
        del inputs  # the list that the engine made
        gc.collect()
        alive.append(sum(r() is not None for r in made))
        a = np.zeros(4, np.float32)
        made.append(weakref.ref(a))
        return [a]

    fake(run)
    steps = [Step("fake", {}, (k,), (k + 1,)) for k in range(5)]
    Engine(program([("x", F32, (4,))], [("y", 5)], steps, [(F32, (4,))] * 5))(np.zeros(4, np.float32))
    # the caller's list holds the step's own operand while it runs; all older arrays are freed
    assert alive == [0, 1, 1, 1, 1]


def test_absent_operands_and_unwanted_outputs(fake: Any) -> None:
    seen: list[Any] = []

    def run(inputs: Any, outs: Any) -> Any:
        seen.extend(inputs)
        return [inputs[0] * 3, inputs[0]]

    fake(run)
    steps = [Step("fake", {}, (0, -1), (1, -1)), Step("fake", {}, (1, -1), (2, -1))]
    e = Engine(program([("x", F32, (1,))], [("y", 2)], steps, [(F32, (1,))] * 2))
    assert e(np.ones(1, np.float32)) == 9
    assert seen[1] is None
    assert seen[3] is None


def test_buffers_of_a_step_whose_results_have_another_order(fake: Any) -> None:
    fake(lambda inputs, outs: [inputs[0] + 1, inputs[0] + 2])
    ports = [("y", 1), ("z", 2)]
    e = Engine(program([("x", F32, (2,))], ports, [Step("fake", {}, (0,), (2, 1))], [(F32, (2,))] * 2))
    y = np.zeros(2, np.float32)
    for out in ({"y": y}, {"z": np.zeros(2, np.float32), "y": y}):
        got = e.context().run({"x": np.zeros(2, np.float32)}, out)
        assert list(got) == ["y", "z"]
        assert got["y"] is y
        assert got["z"] is out.get("z", got["z"])
        assert (y.tolist(), got["z"].tolist()) == ([2, 2], [1, 1])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_pickled(engine: Engine, copied: Any) -> None:
    with pytest.raises(UsageError, match=r"neither pickled nor copied: .*\n  hint: save it, and optdnn.load the file"):
        copied(engine)


def test_profile_times_every_step(engine: Engine) -> None:
    outputs, times = engine.context().profile({"x": X})
    np.testing.assert_array_equal(outputs["y"], engine.run({"x": X})["y"])
    assert len(times) == 4
    assert all(t > 0 for t in times)


@pytest.mark.parametrize("reuse", [False, True])
def test_a_call_of_one_step_costs_under_twenty_microseconds(fake: Any, reuse: bool) -> None:
    """The engine's share of the processor time besides the library's, in the best of several batches of calls."""
    result = np.zeros((4, 3), np.float32)
    fake(lambda inputs, outs: [result if outs[0] is None else outs[0]])
    e = Engine(program([("x", F32, ("n", 5))], [("y", 1)], [Step("fake", {}, (0,), (1,))], [(F32, ("n", 3))]))
    context, feeds, out = e.context(), {"x": X}, {"y": np.zeros((4, 3), np.float32)} if reuse else None

    def calls() -> None:
        for _ in range(200):
            context.run(feeds, out)

    assert_quick(lambda: seconds(calls, 20) / 200, 20e-6)
