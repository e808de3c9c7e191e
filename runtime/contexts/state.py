"""Repeated calls with the same arrays, and state that one call passes to the next: recurrent networks, KV caches.

    bound = engine.context().bind(inputs={"token": token, "past": cache}, state={"present": "past"})
    for token[:] in tokens:
        logits = bound.run()["logits"]

The result ``present`` of a run is the input ``past`` of the next: the same memory, nothing is copied. A state of constant size has
two buffers that take turns. A state that grows is the array of the last result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.errors import InputError
from optdnn.runtime.contexts.signature import Signature
from optdnn.runtime.program import agree
from optdnn.types import Array


@dataclass(frozen=True)
class Binding:
    """The arrays of a repeated call, by name, as the caller gave them. ``state``: output -> the input of the next
    run that it becomes."""

    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    state: Mapping[str, str]

    def checked_state(self, signature: Signature) -> dict[str, str]:
        """``state``, checked. Raises InputError for names or types that do not fit together."""
        ins, outs = {s.name: s for s in signature.inputs}, {s.name: s for s in signature.outputs}
        if not isinstance(self.state, Mapping):
            raise InputError(f"state must map names of outputs to names of inputs, not {type(self.state).__name__}")
        for name, target in self.state.items():
            source, into = outs.get(name), ins.get(target)
            if source is None or into is None:
                what, known = ("output", outs) if source is None else ("input", ins)
                raise InputError(
                    f"state {name!r} -> {target!r}: there is no {what} {name if source is None else target!r}",
                    hint=f"the {what}s are {', '.join(known)}",
                )
            if source.dtype != into.dtype or not agree(source.shape, into.shape):
                raise InputError(f"state {name!r} -> {target!r}: the output is {source}, the input {into}")
            if name in self.outputs:
                raise InputError(f"output {name!r} is state: its buffers are the binding's own, none can be given")
        taken: dict[str, str] = {}
        for name, target in self.state.items():
            if (other := taken.setdefault(target, name)) != name:
                raise InputError(f"outputs {other!r} and {name!r} are both state of input {target!r}")
        return dict(self.state)


def checked_values(initial: Mapping[str, Any], values: Mapping[str, Any] | None) -> dict[str, Any]:
    """``values``, the new initial state. Raises InputError for a name that is not in ``initial``."""
    values = dict(values or {})
    if unknown := sorted(values.keys() - initial.keys()):
        raise InputError(f"{unknown[0]!r} is not state; there are {', '.join(initial)}")
    return values


class Bound:
    """A call on host arrays; made by ``Context.bind``. ``outputs``: the results of the last run by name."""

    def __init__(self, run: Callable[..., dict[str, Any]], signature: Signature, given: Binding):
        """``run`` is the context's."""
        self._run, self._out = run, dict(given.outputs)
        self._pairs = given.checked_state(signature)
        arrays = signature.arrays(given.inputs)
        sizes = signature.sizes(arrays)
        if not self._pairs:
            signature.out_buffers(self._out, sizes, arrays)
        checked = {s.name: a for s, a in zip(signature.inputs, arrays, strict=True)}
        # A contiguous copy would not follow the caller's changes.
        moved = [n for n, a in checked.items() if isinstance(given.inputs[n], np.ndarray) and a is not given.inputs[n]]
        if moved and moved[0] not in self._pairs.values():
            raise InputError(f"input {moved[0]!r} is not C-contiguous and aligned, so it cannot be read in place")
        self._inputs = checked
        self._initial = {target: checked[target] for target in self._pairs.values()}
        self._spare: dict[str, Array] = {}
        self.outputs: dict[str, Array] = {}

    @property
    def state(self) -> dict[str, Array]:
        """Input -> the array that the next run reads for it. It belongs to the binding: copy it to keep it."""
        return {target: self._inputs[target] for target in self._pairs.values()}

    def run(self, stream: object = None) -> dict[str, Array]:
        """Run once on the bound arrays with their present contents. A result that is state is overwritten by the run after the
        next."""
        out = dict(self._out)
        for name, target in self._pairs.items():
            spare = self._spare.get(name)
            if spare is not None and spare.shape == self._inputs[target].shape:
                out[name] = spare
        results = self._run(self._inputs, out or None, stream)
        for name, target in self._pairs.items():
            before = self._inputs[target]
            self._inputs[target] = results[name]
            if before is not self._initial[target]:  # the initial array belongs to the caller
                self._spare[name] = before
            elif results[name].shape == before.shape and any(self._spare.get(name) is a for a in (None, results[name])):
                self._spare[name] = np.empty_like(before)
        self.outputs = results
        return results

    def reset(self, values: Mapping[str, Array] | None = None) -> None:
        """Restart from the initial state; ``values`` (by input name) become the initial state from now on."""
        self._initial.update(checked_values(self._initial, values))
        self._inputs.update(self._initial)
