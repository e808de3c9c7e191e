"""State on the GPU: nothing is copied between runs.

A state that the network writes in place (a cache of fixed capacity, by TensorScatter) is one array, and a run is the replay of one
CUDA graph that writes the new rows alone. Other states have two arrays that take turns, and two graphs. One that grows has two
arrays of the largest size that the engine takes, and is the beginning of one of them; each length is a plan of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from optdnn.errors import InputError
from optdnn.runtime.cuda.memory.arrays import import_cupy
from optdnn.runtime.signature import Signature
from optdnn.runtime.state import check_state, checked_values


class Binds(Protocol):
    """A context that binds calls on the GPU."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any] | None = None) -> Any: ...

    @property
    def in_place(self) -> Mapping[str, str]: ...


class Streaming:
    """A call whose outputs become inputs of the next; ``outputs`` are the arrays of the last run.

    Each state has one or two CuPy arrays; the initial values are copied into one when it is made and by :meth:`reset` alone.
    """

    def __init__(
        self,
        context: Binds,
        signature: Signature,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any] | None,
        state: Mapping[str, str],
    ):
        cupy = import_cupy("to hold state on the GPU")
        self._pairs = check_state(signature, state, outputs or {})
        missing = [t for t in self._pairs.values() if t not in inputs]
        if missing:
            raise InputError(f"input {missing[0]!r} is state and has no initial value")
        self._initial = {t: cupy.asarray(inputs[t]) for t in self._pairs.values()}
        alone = {self._pairs[o] for o, i in context.in_place.items() if self._pairs.get(o) == i}
        reads = {t: cupy.empty_like(a) for t, a in self._initial.items()}
        writes = {t: a if t in alone else cupy.empty_like(a) for t, a in reads.items()}
        self._buffers = (reads, writes)
        first = context.bind({**inputs, **reads}, {**(outputs or {}), **self._named(writes)})
        second = first
        if len(alone) < len(reads):
            rest = {n: a for n, a in first.outputs.items() if n not in self._pairs and a is not None}
            second = context.bind({**inputs, **writes}, {**rest, **self._named(reads)})
        self._calls, self._turn = (first, second), 0
        self.outputs: dict[str, Any] = {}
        self.reset()

    def _named(self, buffers: Mapping[str, Any]) -> dict[str, Any]:
        return {name: buffers[target] for name, target in self._pairs.items()}

    @property
    def state(self) -> dict[str, Any]:
        """Input -> the array that the next run reads there."""
        return dict(self._buffers[self._turn])

    def run(self, stream: object = None) -> dict[str, Any]:
        """Enqueue one run on ``stream`` (default: the null stream); does not wait."""
        self.outputs = self._calls[self._turn].run(stream)
        self._turn ^= 1
        return self.outputs

    def reset(self, values: Mapping[str, Any] | None = None) -> None:
        """Begin again from the initial state; ``values`` (by input name) are the initial state from now on."""
        cupy = import_cupy("to hold state on the GPU")
        self._initial.update({t: cupy.asarray(a) for t, a in checked_values(self._initial, values).items()})
        for target, array in self._initial.items():
            cupy.copyto(self._buffers[self._turn][target], array)
        cupy.cuda.get_current_stream().synchronize()
