"""The GPU on which a rank works: every call of a member, with a CuPy that only knows the current GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optdnn.errors import RunError
from optdnn.runtime.contexts.signature import Signature
from optdnn.runtime.contexts.state import Binding
from optdnn.runtime.cuda.libraries.ranks import handle, using
from optdnn.runtime.cuda.memory.state import Streaming
from optdnn.runtime.ranks import calls
from optdnn.runtime.ranks.member import Member
from optdnn.types import TensorSpec

OWN, STREAM = 1, 7
"""The GPU of the rank, and the stream of its context."""


class Gpus:
    """The current GPU, and the GPUs on which arrays and graphs were made."""

    def __init__(self) -> None:
        self.current, self.made = 0, list[int]()

    def array(self, given: Any) -> Any:
        self.made.append(self.current)
        return np.array(given).view(OnGpu)


class OnGpu(np.ndarray):
    """An array that counts as one on a GPU."""

    def get(self) -> np.ndarray:
        return np.asarray(self)


class FakeStaged:
    """Host memory of a GPU's array. The copy is made immediately."""

    def __init__(self, array: OnGpu, *, to_host: bool):
        self.host, self.gpu = np.asarray(array).copy(), array

    def enqueue(self, stream: int) -> None:
        assert stream == STREAM
        np.copyto(self.gpu, self.host)


class FakeContext:
    """A context whose state grows in each run by the sum of its other inputs."""

    def __init__(self, gpus: Gpus, *names: str):
        self.signature = Signature([_spec(n) for n in names], [_spec("new")])
        self.in_place: dict[str, str] = {}
        self.stream = SimpleNamespace(handle=STREAM, synchronize=lambda: None)
        self._gpus = gpus
        gpus.made.append(gpus.current)

    def bind(self, inputs: Any, outputs: Any = None, state: Any = None) -> Any:
        if state:
            return Streaming(self, Binding(inputs, outputs or {}, state))
        assert all(isinstance(a, OnGpu) for a in inputs.values())
        self._gpus.made.append(self._gpus.current)

        def run(stream: object = None) -> dict[str, Any]:
            assert stream is self.stream
            self._gpus.made.append(self._gpus.current)
            outputs["new"][...] = sum(inputs.values())
            return dict(outputs)

        return SimpleNamespace(run=run, outputs=outputs)


def _spec(name: str) -> TensorSpec:
    return TensorSpec(name, np.dtype(np.float32), (2,))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    state, cupy = Gpus(), ModuleType("cupy")
    vars(cupy).update(
        asarray=lambda a: a if isinstance(a, OnGpu) else state.array(a), empty_like=state.array, copyto=np.copyto,
        cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(calls, "_Staged", FakeStaged)
    return state


def member(gpus: Gpus, *names: str) -> Member:
    """A member whose contexts have these inputs."""

    @contextmanager
    def here() -> Iterator[None]:
        gpus.current = OWN
        yield
        gpus.current = 0  # other code of the process may choose another GPU between calls

    one: Any = object.__new__(Member)
    one.group = SimpleNamespace(check=lambda: None, begin=lambda: None, end=lambda: None)
    one._communicator = SimpleNamespace(
        here=here, check=lambda: None, make_current=lambda: setattr(gpus, "current", OWN)
    )
    one.runner = SimpleNamespace(context=lambda: FakeContext(gpus, *names))
    one._contexts, one._bound = [], {}
    made: Member = one
    return made


def test_all_objects_of_a_rank_are_made_on_its_own_gpu(gpus: Gpus) -> None:
    one = member(gpus, "x", "past")
    number = one.context()
    one.bind(number, {"x": np.full(2, 3, np.float32), "past": np.zeros(2, np.float32)}, {"new": "past"})
    assert one.step(number, {"x": np.full(2, 4, np.float32)}) == {}
    one.step(number, {})
    np.testing.assert_array_equal(one.state(number)["past"], [8, 8])
    one.reset(number, {"past": np.ones(2, np.float32)})
    np.testing.assert_array_equal(one.state(number)["past"], [1, 1])
    assert len(gpus.made) > 6
    assert set(gpus.made) == {OWN}


def test_state_without_other_inputs_is_on_the_own_gpu_too(gpus: Gpus) -> None:
    one = member(gpus, "past")
    one.bind(one.context(), {"past": np.zeros(2, np.float32)}, {"new": "past"})
    assert len(gpus.made) > 3
    assert set(gpus.made) == {OWN}


def test_small_inputs_go_to_the_gpu_in_one_copy(gpus: Gpus) -> None:
    given = {
        "token": np.full((1, 1), 7),
        "x": np.arange(70, dtype=np.float32).reshape(7, 10),
        "picture": np.ones(calls.SMALL // 4 + 1, np.float32),
        "none": np.zeros((0, 3), np.float32),
        "flag": np.array([True]),
    }
    together, found = calls._staged(sys.modules["cupy"], given)
    assert together is not None
    assert together.gpu.nbytes == 256 + 512 + 256
    assert [n for n, one in found.items() if one.alone is None] == ["token", "x", "flag"]
    for name, array in given.items():
        np.testing.assert_array_equal(found[name].gpu, array)
        np.testing.assert_array_equal(found[name].host, array)
        assert found[name].gpu.dtype == array.dtype
    found["token"].host[...], found["x"].host[6, 9], found["flag"].host[...] = 9, 5, False
    together.enqueue(STREAM)
    assert (found["token"].gpu.item(), found["x"].gpu[6, 9], found["x"].gpu[0, 1]) == (9, 5, 1)
    assert not found["flag"].gpu[0]


def test_collectives_belong_to_the_running_engine() -> None:
    with using("first"):
        with using("second"):
            assert handle() == "second"
        assert handle() == "first"
    with pytest.raises(RunError, match="one rank of several"):
        handle()
