"""State on the GPU that grows from run to run: caches to which a network appends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from optdnn.dim import bounds, substitute, symbol
from optdnn.errors import InputError
from optdnn.runtime.cuda.memory.arrays import import_cupy
from optdnn.runtime.signature import Signature
from optdnn.runtime.state import check_state, checked_values
from optdnn.types import TensorSpec


class Runs(Protocol):
    """A context of an engine for ranges of shapes."""

    def run(self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None, stream: object = None) -> Any: ...

    def outputs_for(self, feeds: Mapping[str, Any]) -> Sequence[TensorSpec]: ...


def grows(signature: Signature, state: Mapping[str, str]) -> bool:
    """Whether a state changes its size from run to run: the output's dimensions are not the input's."""
    ins, outs = {s.name: s.shape for s in signature.inputs}, {s.name: s.shape for s in signature.outputs}
    return any(outs.get(o) != ins.get(i) for o, i in state.items())


class Growing:
    """A call whose outputs become larger inputs of the next.

    Each state is the beginning of one of two CuPy arrays with room for the largest size that the engine takes, which take turns: a
    run reads one and writes the other (the network itself copies what it appends to). Every size is a plan of its own, made
    when it first comes; where that is too slow, use a network with a cache of fixed capacity (TensorScatter).
    """

    def __init__(
        self,
        context: Runs,
        signature: Signature,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any] | None,
        state: Mapping[str, str],
    ):
        cupy = import_cupy("to hold state on the GPU")
        self._context, self._signature = context, signature
        self._pairs = check_state(signature, state, outputs or {})
        targets = self._pairs.values()
        missing = [s.name for s in signature.inputs if s.name not in inputs]
        if missing:
            raise InputError(f"input {missing[0]!r} is missing")
        self._inputs = {n: a for n, a in inputs.items() if n not in targets}
        self._initial = {t: cupy.asarray(inputs[t]) for t in targets}
        specs = {s.name: s for s in signature.inputs}
        room = {t: _largest(specs[t], signature) for t in targets}
        self._room = [{t: cupy.empty(n, cupy.uint8) for t, n in room.items()} for _ in range(2)]
        self._given, self._made = dict(outputs or {}), dict[Any, Any]()
        self._turn = 0
        self._state: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        self.reset()

    @property
    def state(self) -> dict[str, Any]:
        """Input -> the array that the next run reads there. It belongs to the binding: copy what is to be kept."""
        return dict(self._state)

    def run(self, stream: object = None) -> dict[str, Any]:
        """Enqueue one run on ``stream`` (default: the null stream). Raises InputError where the state has become too large."""
        feeds = {**self._inputs, **self._state}
        out = {}
        for spec in self._context.outputs_for(feeds):
            if spec.name in self._pairs:
                out[spec.name] = self._placed(spec, self._room[self._turn ^ 1][self._pairs[spec.name]])
            elif spec.name in self._given:
                out[spec.name] = self._given[spec.name]
            elif all(isinstance(n, int) for n in spec.shape):  # else its size depends on data
                out[spec.name] = self._kept(spec)
        self.outputs = self._context.run(feeds, out, stream)
        self._turn ^= 1
        self._state = {target: self.outputs[name] for name, target in self._pairs.items()}
        return self.outputs

    def reset(self, values: Mapping[str, Any] | None = None) -> None:
        """Begin again from the initial state; ``values`` (by input name) are the initial state from now on."""
        cupy = import_cupy("to hold state on the GPU")
        self._initial.update({t: cupy.asarray(a) for t, a in checked_values(self._initial, values).items()})
        specs = {s.name: s for s in self._signature.inputs}
        for target, array in self._initial.items():
            spec = TensorSpec(target, specs[target].dtype, tuple(array.shape))
            if array.dtype != spec.dtype:
                raise InputError(f"the state {target!r} is {array.dtype}, not {specs[target]}")
            self._state[target] = self._placed(spec, self._room[self._turn][target])
            cupy.copyto(self._state[target], array)
        cupy.cuda.get_current_stream().synchronize()

    @staticmethod
    def _placed(spec: TensorSpec, room: Any) -> Any:
        """An array of this size at the beginning of ``room``; elsewhere where it is larger (the next run refuses it)."""
        cupy = import_cupy("to hold state on the GPU")
        shape = tuple(n for n in spec.shape if isinstance(n, int))
        if math.prod(shape) * spec.dtype.itemsize > room.nbytes:
            return cupy.empty(shape, spec.dtype)
        return cupy.ndarray(shape, spec.dtype, memptr=room.data)

    def _kept(self, spec: TensorSpec) -> Any:
        """The array of a result of this size: the same in each run, so that graphs are."""
        cupy = import_cupy("to hold results on the GPU")
        key = (spec.name, spec.shape)
        if key not in self._made:
            self._made[key] = cupy.empty(spec.shape, spec.dtype)
        return self._made[key]


def _largest(spec: TensorSpec, signature: Signature) -> int:
    """Bytes of an input where its symbolic dimensions are as large as any profile allows."""
    profiles = signature.profiles
    most = {name: max(p[name].max for p in profiles if name in p) for p in profiles for name in p}
    ranged = {name: symbol(name, 0, n) for name, n in most.items()}
    most |= {text: bounds(substitute(d, ranged))[1] for text, d in signature.derived.items()}
    return math.prod(n if isinstance(n, int) else most[n] for n in spec.shape) * spec.dtype.itemsize
