"""State on the GPU: outputs of one run that are inputs of the next, without a copy between runs.

A state that the network writes in place (a cache of fixed capacity, by TensorScatter) is one array, and a run is the replay of one
CUDA graph that writes only the new rows. Other states of fixed size have two arrays that take turns, and two graphs. A state that
grows has two arrays of the largest size that the engine accepts, and occupies the beginning of one of them; each length has its own
plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from optdnn.dim import bounds, substitute, symbol
from optdnn.errors import InputError
from optdnn.runtime.contexts.dlpack import import_cupy
from optdnn.runtime.contexts.signature import Signature
from optdnn.runtime.contexts.state import Binding, checked_values
from optdnn.runtime.program import known_sizes
from optdnn.types import TensorSpec


def grows(signature: Signature, state: Mapping[str, str]) -> bool:
    """Whether a state changes its size from run to run: the output's dimensions are not the input's."""
    ins, outs = {s.name: s.shape for s in signature.inputs}, {s.name: s.shape for s in signature.outputs}
    return any(outs.get(o) != ins.get(i) for o, i in state.items())


class _StateOnGpu:
    """A call with outputs that become inputs of the next call; ``outputs`` are the arrays of the last run.

    The initial values are copied into its own arrays when it is created, and by :meth:`reset`.
    """

    def __init__(self, signature: Signature, given: Binding):
        self._cupy = import_cupy("to hold state on the GPU")
        self._pairs = given.checked_state(signature)
        missing = [t for t in self._pairs.values() if t not in given.inputs]
        if missing:
            raise InputError(f"input {missing[0]!r} is state and has no initial value")
        self._initial = {t: self._cupy.asarray(given.inputs[t]) for t in self._pairs.values()}
        self._turn = 0
        self.outputs: dict[str, Any] = {}

    def reset(self, values: Mapping[str, Any] | None = None) -> None:
        """Restart from the initial state; ``values`` (by input name) become the initial state from now on."""
        cupy = self._cupy
        self._initial.update({t: cupy.asarray(a) for t, a in checked_values(self._initial, values).items()})
        for target, array in self._initial.items():
            cupy.copyto(self._first_array(target, array), array)
        cupy.cuda.get_current_stream().synchronize()

    def _first_array(self, target: str, initial: Any) -> Any:
        """The array that the next run reads for an input, of the size of its initial value."""
        raise NotImplementedError


class Streaming(_StateOnGpu):
    """State of fixed size, in one or two CuPy arrays each."""

    def __init__(self, context: Any, given: Binding):
        """``context``: a :class:`optdnn.runtime.cuda.runner.CudaContext`."""
        super().__init__(context.signature, given)
        alone = {self._pairs[o] for o, i in context.in_place.items() if self._pairs.get(o) == i}
        reads = {t: self._cupy.empty_like(a) for t, a in self._initial.items()}
        writes = {t: a if t in alone else self._cupy.empty_like(a) for t, a in reads.items()}
        self._buffers = (reads, writes)
        first = context.bind({**given.inputs, **reads}, {**given.outputs, **self._named(writes)})
        second = first
        if len(alone) < len(reads):
            rest = {n: a for n, a in first.outputs.items() if n not in self._pairs and a is not None}
            second = context.bind({**given.inputs, **writes}, {**rest, **self._named(reads)})
        self._calls = (first, second)
        self.reset()

    def _named(self, buffers: Mapping[str, Any]) -> dict[str, Any]:
        return {name: buffers[target] for name, target in self._pairs.items()}

    @property
    def state(self) -> dict[str, Any]:
        """Input -> the array that the next run reads for it."""
        return dict(self._buffers[self._turn])

    def run(self, stream: object = None) -> dict[str, Any]:
        """Enqueue one run on ``stream`` (default: the null stream); does not wait."""
        self.outputs = self._calls[self._turn].run(stream)
        self._turn ^= 1
        return self.outputs

    def _first_array(self, target: str, initial: Any) -> Any:
        return self._buffers[self._turn][target]


class Growing(_StateOnGpu):
    """State that grows from run to run: caches to which a network appends.

    Each state occupies the beginning of one of two CuPy arrays with room for the largest size that the engine accepts. The two take
    turns: a run reads one and writes the other (the network itself copies the state that it appends to). Every size has its own
    plan, made when the size first occurs; if that is too slow, use a network with a cache of fixed capacity (TensorScatter).
    """

    def __init__(self, context: Any, given: Binding):
        """``context``: a :class:`optdnn.runtime.plans.by_shape.PlansContext`."""
        super().__init__(context.signature, given)
        self._context = context
        self._inputs = {n: a for n, a in given.inputs.items() if n not in self._initial}
        self._specs = {s.name: s for s in context.signature.inputs}
        sizes = {t: _largest(self._specs[t], context.signature) for t in self._initial}
        self._room = [{t: self._cupy.empty(n, self._cupy.uint8) for t, n in sizes.items()} for _ in range(2)]
        self._given, self._results = given.outputs, dict[Any, Any]()
        self._state: dict[str, Any] = {}
        self.reset()

    @property
    def state(self) -> dict[str, Any]:
        """Input -> the array that the next run reads for it. It belongs to the binding: copy it to keep it."""
        return dict(self._state)

    def run(self, stream: object = None) -> dict[str, Any]:
        """Enqueue one run on ``stream`` (default: the null stream). Raises InputError if the state has become too large."""
        feeds = {**self._inputs, **self._state}
        out = {}
        for spec in self._context.outputs_for(feeds):
            if spec.name in self._pairs:
                out[spec.name] = self._placed(spec, self._room[self._turn ^ 1][self._pairs[spec.name]])
            elif spec.name in self._given:
                out[spec.name] = self._given[spec.name]
            elif all(isinstance(n, int) for n in spec.shape):  # otherwise its size depends on data
                out[spec.name] = self._result(spec)
        self.outputs = self._context.run(feeds, out, stream)
        self._turn ^= 1
        self._state = {target: self.outputs[name] for name, target in self._pairs.items()}
        return self.outputs

    def _first_array(self, target: str, initial: Any) -> Any:
        spec = TensorSpec(target, self._specs[target].dtype, tuple(initial.shape))
        if initial.dtype != spec.dtype:
            raise InputError(f"the state {target!r} is {initial.dtype}, not {self._specs[target]}")
        self._state[target] = self._placed(spec, self._room[self._turn][target])
        return self._state[target]

    def _placed(self, spec: TensorSpec, room: Any) -> Any:
        """An array of this size at the beginning of ``room``; outside of it if it is larger (the next run refuses it)."""
        shape = known_sizes(spec.shape)
        if math.prod(shape) * spec.dtype.itemsize > room.nbytes:
            return self._cupy.empty(shape, spec.dtype)
        return self._cupy.ndarray(shape, spec.dtype, memptr=room.data)

    def _result(self, spec: TensorSpec) -> Any:
        """The array of a result of this size: the same one in each run, so that the graph can be reused."""
        key = (spec.name, spec.shape)
        if key not in self._results:
            self._results[key] = self._cupy.empty(spec.shape, spec.dtype)
        return self._results[key]


def _largest(spec: TensorSpec, signature: Signature) -> int:
    """Bytes of an input with its symbolic dimensions at the largest size that any profile allows."""
    profiles = signature.profiles
    most = {name: max(p[name].max for p in profiles if name in p) for p in profiles for name in p}
    ranged = {name: symbol(name, 0, n) for name, n in most.items()}
    most |= {text: bounds(substitute(d, ranged))[1] for text, d in signature.derived.items()}
    return math.prod(n if isinstance(n, int) else most[n] for n in spec.shape) * spec.dtype.itemsize
