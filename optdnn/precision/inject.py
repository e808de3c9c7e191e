"""Error injection: the network in fp32 with an error added at a chosen value, at the speed of a library.

Each chosen value v becomes v + e; e is a further input, zero by default. So one compiled engine carries the errors of every
op and precision to the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from optdnn.errors import OptdnnError
from optdnn.ir.evaluate import values
from optdnn.ir.graph import Graph, Value
from optdnn.lowering.cpu.library import LIBRARIES
from optdnn.lowering.cpu.partition import compile_with
from optdnn.lowering.steps import lower_reference
from optdnn.runtime.engine import Engine
from optdnn.runtime.measuring.machine import usable_cores
from optdnn.types import Array, is_float


class Injector:
    """``graph`` on ``feeds`` (one batch), with an error at any of ``places`` (fp32 values).

    ``library`` is the name of the library that runs it, or "numpy" if none is installed or accepts the network.
    """

    def __init__(self, graph: Graph, places: Sequence[Value], beside: Sequence[Value], feeds: Mapping[str, Array]):
        self._feeds = dict(feeds)
        wanted = list(dict.fromkeys((*places, *beside)))
        arrays = values(graph, feeds, wanted)
        self.recorded: dict[str, Array] = {graph.output(v).name: a for v, a in zip(wanted, arrays, strict=True)}
        """The undisturbed values at ``places`` and at ``beside``."""
        probed, self._inputs = _probed(graph, places)
        self._zeros = {name: np.zeros_like(self.recorded[name]) for name in self._inputs}
        self._engine, self.library = _engine(probed)
        self._context = self._engine.context()
        self.clean = self.outputs()

    def outputs(self, place: str | None = None, error: Array | None = None) -> dict[str, Array]:
        """The network's outputs with ``error`` (of the value's shape) added at ``place``; without ``place``, undisturbed."""
        given = dict(self._feeds)
        for name, port in self._inputs.items():
            given[port] = error if name == place and error is not None else self._zeros[name]
        return dict(self._context.run(given))


def _probed(graph: Graph, places: Sequence[Value]) -> tuple[Graph, dict[str, str]]:
    """A copy with an addition after each place; value name -> name of the input with its error."""
    out = graph.copy()
    inputs: dict[str, str] = {}
    for v in places:
        name, t = out.output(v).name, out.type(v)
        users = out.uses(v)
        error = out.add_input(out.fresh_name(f"error of {name}"), t)
        inputs[name] = out.output(error).name
        added = out.add("Add", [v, error], names=[f"{name} with its error"])
        for use in users:
            user = out.op(use.op)
            slots = tuple(added.value if i == use.slot else x for i, x in enumerate(user.inputs))
            out.set_op(replace(user, inputs=slots))
    return out, inputs


def _engine(graph: Graph) -> tuple[Engine, str]:
    for library in LIBRARIES:
        try:
            if LIBRARIES[library].version() is not None:
                return compile_with(graph, library, "fp32", usable_cores()), library
        except OptdnnError:
            continue
    return Engine(lower_reference(graph, {})), "numpy"


def noise(outputs: Mapping[str, Array], clean: Mapping[str, Array]) -> float:
    """Power of the difference over power of the clean outputs' variation, over all floating-point outputs; inf if an element is
    not finite that is finite in the clean outputs.

    The variation (around each output's mean over samples, if there are several) is used rather than the power: an output that
    hardly depends on its input has no room for error.
    """
    worst = 0.0
    for name, reference in clean.items():
        if not is_float(reference.dtype):
            continue
        a, b = np.asarray(outputs[name], np.float64), np.asarray(reference, np.float64)
        finite = np.isfinite(b)
        if not np.array_equal(np.isfinite(a), finite):
            return float("inf")
        if not finite.any():
            continue
        centered = b - b.mean(axis=0, keepdims=True) if len(b) > 1 and finite.all() else b
        power = float(np.mean(np.square(centered[finite]))) or float(np.mean(np.square(b[finite]))) or 1.0
        worst = max(worst, float(np.mean(np.square((a - b)[finite]))) / power)
    return worst
