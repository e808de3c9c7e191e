"""The models, seen from a front end: every method is a call to the server's process. Tensors stay in shared memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from optdnn.serving.frontends.arena import Arena
from optdnn.serving.frontends.channel import Channel
from optdnn.serving.refusals import Refusal
from optdnn.serving.regions import NamedPart
from optdnn.serving.service import GivenTensor, InferCall, OutputTensor, Service, WantedOutput
from optdnn.serving.tensors import RegionSlice
from optdnn.types import DTYPES, dtype_name, raw_bytes

PLAIN = ("metadata", "ready", "model_metadata", "model_ready", "index", "load", "unload", "register", "unregister",
         "region_status", "register_cuda", "unregister_cuda", "cuda_status", "metrics_text")  # fmt: skip
"""Methods of the service whose arguments and values are JSON."""


def _remote(method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """One of the methods in :data:`PLAIN`: the server's process does it."""

    async def call(self: RemoteCore, *arguments: Any) -> Any:
        return await self.channel.call(method, *arguments)

    return call


class RemoteCore(Service):
    """The models in the server's process. ``requests`` is memory that this process takes parts of, ``answers`` is the server's."""

    channel: Channel

    def __init__(self, requests: Arena, answers: Arena):
        self._requests, self._answers = requests, answers

    metadata = _remote("metadata")
    ready = _remote("ready")
    model_metadata = _remote("model_metadata")
    model_ready = _remote("model_ready")
    index = _remote("index")
    load = _remote("load")
    unload = _remote("unload")
    register = _remote("register")
    unregister = _remote("unregister")
    region_status = _remote("region_status")
    register_cuda = _remote("register_cuda")
    unregister_cuda = _remote("unregister_cuda")
    cuda_status = _remote("cuda_status")
    metrics_text = _remote("metrics_text")

    async def infer(self, call: InferCall) -> list[OutputTensor]:
        held: list[memoryview] = []  # the tensors' memory, until the answer is here
        found = await self.channel.call("infer", self._plain_call(call, held))
        outputs = [self._output(*row) for row in found["outputs"]]
        self.free(found)
        return outputs

    def buffer(self, nbytes: int) -> memoryview:
        return self._requests.take(nbytes)

    def count(self, model: str, protocol: str, status: str, seconds: float) -> None:
        self.channel.tell("count", model, protocol, status, seconds)

    def free(self, answer: Any) -> None:
        """Tell the server that an answer of :meth:`infer` has been read, or is not wanted any more."""
        if isinstance(answer, dict) and answer.get("places"):
            self.channel.tell("free", answer["places"])

    def _plain_call(self, call: InferCall, held: list[memoryview]) -> dict[str, Any]:
        """JSON-like. Tensors outside of shared memory are copied there, and kept in ``held``."""
        inputs = []
        for g in call.inputs:
            where: Any = plain_part(g.data) if isinstance(g.data, NamedPart) else None
            if where is None:
                assert isinstance(g.data, memoryview)
                place, view = self._requests.place(g.data), g.data
                if place is None:
                    view = self._requests.put(g.data)
                    place = self._requests.place(view)
                held.append(view)
                where = [place, view.nbytes]
            inputs.append([g.name, g.datatype, list(g.shape), where])
        outputs = [[w.name, None if w.region is None else plain_part(w.region)] for w in call.outputs]
        return {
            "model": call.model, "version": call.version, "inputs": inputs, "outputs": outputs,
            "parameters": call.parameters, "timeout_s": call.timeout_s,
        }  # fmt: skip

    def _output(self, name: str, kind: str, shape: Sequence[int], place: int | None) -> OutputTensor:
        dtype, dims = DTYPES[kind], tuple(shape)
        if place is None:
            return OutputTensor(name, dtype, dims, None)
        shown = self._answers.show(place, math.prod(dims) * dtype.itemsize)
        return OutputTensor(name, dtype, dims, np.frombuffer(shown, dtype).reshape(dims).copy())


def plain_part(part: NamedPart) -> dict[str, Any]:
    """JSON-like."""
    return {"region": part.region, "offset": part.offset, "nbytes": part.nbytes}


def call_from(plain: Mapping[str, Any], requests: int) -> InferCall:
    """The call that a front end made, whose tensors lie in the arena of descriptor ``requests``. Raises Refusal."""
    inputs = []
    for name, kind, shape, where in plain["inputs"]:
        data = NamedPart(**where) if isinstance(where, dict) else RegionSlice(requests, *where)
        inputs.append(GivenTensor(name, kind, shape, data))
    outputs = [WantedOutput(name, None if part is None else NamedPart(**part)) for name, part in plain["outputs"]]
    return InferCall(plain["model"], plain["version"], inputs, outputs, plain["parameters"], plain["timeout_s"])


def plain_answer(outputs: Sequence[OutputTensor], answers: Arena, held: dict[int, memoryview]) -> dict[str, Any]:
    """The answer to a front end. Its tensors are put into the arena and kept in ``held`` by their places."""
    rows, places = [], []
    for o in outputs:
        place = None
        if o.data is not None and o.nbytes:
            part = answers.put(raw_bytes(o.data))
            place = answers.place(part)
            assert place is not None
            held[place] = part
            places.append(place)
        elif o.data is not None:
            place = 0
        rows.append([o.name, dtype_name(o.dtype), o.shape, place])
    return {"outputs": rows, "places": places}


def unknown(method: str) -> Refusal:
    """The error of a call that there is not."""
    return Refusal(f"there is no call {method!r:.40}")
