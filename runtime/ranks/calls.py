"""A bound call of one rank: changing inputs come from the host in each run, and outputs return to the host."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.runtime.contexts.dlpack import import_cupy
from optdnn.types import Array


class HostCall:
    """On this process's CPU."""

    def __init__(self, context: Any, feeds: Mapping[str, Array], state: Mapping[str, str]):
        self._state = state
        kept = set(state.values())
        arrays = {n: np.array(a) for n, a in feeds.items()}  # the caller may change its own arrays
        self._moving = {n: a for n, a in arrays.items() if n not in kept}
        self.bound = context.bind(arrays, state=state)

    def run(self, feeds: Mapping[str, Array], wanted: Container[str] | None = None) -> dict[str, Array]:
        """Run once with these inputs. Returns the outputs ``wanted`` (None: all) that are not state."""
        for name, array in feeds.items():
            np.copyto(self._moving[name], array)
        results = self.bound.run()
        return {n: a for n, a in results.items() if n not in self._state and (wanted is None or n in wanted)}


SMALL = 1 << 14
"""Inputs of up to this many bytes are copied to the GPU together: each separate copy costs the host microseconds."""


class GpuCall:
    """On a GPU, on the context's own stream: copies of inputs, one graph, copies of outputs, one wait."""

    def __init__(self, context: Any, feeds: Mapping[str, Array], state: Mapping[str, str]):
        cupy = import_cupy("to hold state on several GPUs")
        self._state, self._stream = state, context.stream
        kept = set(state.values())
        moving = {n: a for n, a in feeds.items() if n not in kept}
        self._together, self._inputs = _staged(cupy, moving)
        gpu = {n: one.gpu for n, one in self._inputs.items()}
        self.bound = context.bind({n: gpu.get(n, a) for n, a in feeds.items()}, state=state)
        cupy.cuda.get_current_stream().synchronize()  # the stream of the calls does not wait for CuPy's
        self._names: list[str] | None = None
        self._outputs: dict[tuple[str, int], _Staged] = {}

    def run(self, feeds: Mapping[str, Array], wanted: Container[str] | None = None) -> dict[str, Array]:
        """Run once with these inputs, and wait. Returns the outputs ``wanted`` (None: all) that are not state."""
        stream = self._stream
        for name, array in feeds.items():
            one = self._inputs[name]
            np.copyto(one.host, array)
            if one.alone is not None:
                one.alone.enqueue(stream.handle)
        if self._together is not None and feeds:
            self._together.enqueue(stream.handle)
        results = self.bound.run(stream)
        if self._names is None:
            self._names = [n for n in results if n not in self._state]
        found = {}
        for name in self._names if wanted is None else [n for n in self._names if n in wanted]:
            array = results[name]
            found[name] = array if isinstance(array, np.ndarray) else self._to_host(name, array)
        stream.synchronize()
        return {n: a.host.copy() if isinstance(a, _Staged) else a for n, a in found.items()}

    def _to_host(self, name: str, array: Any) -> _Staged:
        key = (name, array.data.ptr)
        if key not in self._outputs:
            self._outputs[key] = _Staged(array, to_host=True)
        staged = self._outputs[key]
        staged.enqueue(self._stream.handle)
        return staged


@dataclass(frozen=True)
class _Input:
    """An input of the network on the GPU and in page-locked host memory, and its copy, if it has a separate one."""

    gpu: Any
    host: Array
    alone: _Staged | None


def _staged(cupy: Any, moving: Mapping[str, Array]) -> tuple[_Staged | None, dict[str, _Input]]:
    """The copy of all small inputs, and every input."""
    places, size = dict[str, slice](), 0
    for name, array in moving.items():
        if 0 < array.nbytes <= SMALL:
            places[name] = slice(size, size + array.nbytes)
            size += -(-array.nbytes // 256) * 256
    together = _Staged(cupy.asarray(np.zeros(size, np.uint8)), to_host=False) if places else None
    found = {}
    for name, array in moving.items():
        if together is None or name not in places:
            alone = _Staged(cupy.asarray(array), to_host=False)
            found[name] = _Input(alone.gpu, alone.host, alone)
            continue
        gpu, host = (
            side[places[name]].view(array.dtype).reshape(array.shape) for side in (together.gpu, together.host)
        )
        host[...] = array
        cupy.copyto(gpu, cupy.asarray(array))
        found[name] = _Input(gpu, host, None)
    return together, found


class _Staged:
    """An array on the GPU, and the page-locked host memory that it is copied from or to."""

    def __init__(self, array: Any, *, to_host: bool):
        from optdnn.runtime.cuda.allocator import PinnedMemory
        from optdnn.runtime.cuda.launches.chain import Transfer

        self._memory, self.gpu = PinnedMemory(array.nbytes), array
        self.host = self._memory.bytes.view(array.dtype).reshape(array.shape)
        gpu, host = array.data.ptr, self._memory.pointer
        target, source = (host, gpu) if to_host else (gpu, host)
        self._transfer = Transfer(target, source, array.nbytes, to_host, "a bound call")

    def enqueue(self, stream: int) -> None:
        """Enqueue the copy."""
        if self.gpu.nbytes:
            self._transfer.enqueue(stream)


def to_host(array: Any) -> Any:
    """A NumPy array, copied if it is on the GPU."""
    return array.get() if hasattr(array, "get") else array
