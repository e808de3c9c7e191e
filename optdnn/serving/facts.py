"""A model as the server sees it: inputs and outputs, the sizes that it has plans for, and whether requests may share a batch.

Requests share a batch where the first dimension of every input and output is one symbol, and where the rows of a batch do not
depend on one another. A trial shows the second: a batch runs twice, and all its rows but the first change in between. The first row
of each output must keep its bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.dim_text import parse_dim
from optdnn.errors import OptdnnError
from optdnn.ranges import DimRange, Profile
from optdnn.runtime.contexts.feeds import random_feeds
from optdnn.runtime.engine import Engine
from optdnn.runtime.program import known_sizes
from optdnn.types import DTYPES, Array, TensorSpec, dtype_name

Shapes = tuple[tuple[int, ...], ...]
"""The shape of each input, in order."""


@dataclass(frozen=True)
class ModelFacts:
    """The facts of one model, as its worker reports them."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[Profile, ...]
    plans: tuple[Shapes, ...]
    """Shapes of the inputs that the engine holds plans for. Empty: it runs all sizes equally well."""
    target: str
    batch: str | None
    """The symbol of the rows of a batch. None: requests run one by one."""
    alone: str
    """Why requests run one by one; "" where they share batches."""
    device_memory: bool = False
    """Whether a run reads and writes memory of clients on the GPU."""

    def to_plain(self) -> dict[str, Any]:
        """JSON-like."""
        return {
            "inputs": [_plain(s) for s in self.inputs],
            "outputs": [_plain(s) for s in self.outputs],
            "profiles": [{n: [r.min, r.opt, r.max] for n, r in p.items()} for p in self.profiles],
            "plans": [[list(shape) for shape in shapes] for shapes in self.plans],
            "target": self.target,
            "batch": self.batch,
            "alone": self.alone,
            "device_memory": self.device_memory,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ModelFacts:
        """The inverse of :meth:`to_plain`."""
        return cls(
            tuple(_spec(row) for row in plain["inputs"]),
            tuple(_spec(row) for row in plain["outputs"]),
            tuple({n: DimRange(*r) for n, r in p.items()} for p in plain["profiles"]),
            tuple(tuple(tuple(shape) for shape in shapes) for shapes in plain["plans"]),
            plain["target"],
            plain["batch"],
            plain["alone"],
            plain["device_memory"],
        )


def facts_of(engine: Engine) -> ModelFacts:
    """The facts of a loaded engine. It runs twice where its shapes allow batches."""
    plans = plans_of(engine)
    symbol, alone = batch_symbol(engine.inputs, engine.outputs)
    if symbol is not None:
        alone = why_rows_depend(engine, symbol, plans)
    batch = None if alone else symbol
    return ModelFacts(engine.inputs, engine.outputs, engine.profiles, plans, engine.target, batch, alone)


def plans_of(engine: Engine) -> tuple[Shapes, ...]:
    """The shapes of the inputs that an engine holds plans for; none where it runs all sizes equally well."""
    dynamic = engine.program.dynamic
    programs = () if dynamic is None else (engine.program, *dynamic.plans)
    return tuple(tuple(known_sizes(spec.shape) for spec, _ in p.inputs) for p in programs)


def batch_symbol(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> tuple[str | None, str]:
    """The symbol that is the first dimension of every input and output and occurs nowhere else; or None, and why."""
    specs = (*inputs, *outputs)
    first = {spec.shape[0] if spec.shape else None for spec in specs}
    symbol = next(iter(first)) if len(first) == 1 else None
    if not isinstance(symbol, str):
        return None, "the first dimension of all inputs and outputs is not one symbol"
    for spec in specs:
        if any(symbol in _symbols(d) for d in spec.shape[1:]):
            return None, f"{symbol} is also in another dimension of {spec.name!r}"
    return symbol, ""


def why_rows_depend(engine: Engine, symbol: str, plans: Sequence[Shapes]) -> str:
    """Why the rows of a batch depend on one another, as a trial shows; "" if they do not."""
    ranges = [p[symbol] for p in engine.profiles if symbol in p]
    if ranges and max(r.max for r in ranges) < 2:
        return "the engine takes only batches of one row"
    held = {shapes[0][0] for shapes in plans if shapes[0][0] > 1}
    rows = min(held) if held else max(2, ranges[0].min) if ranges else 2
    try:
        before = random_feeds(engine.inputs, seed=0, sizes={symbol: rows}, profiles=engine.profiles)
        other = random_feeds(engine.inputs, seed=1, sizes={symbol: rows}, profiles=engine.profiles)
        after = {n: np.concatenate([a[:1], other[n][1:]]) for n, a in before.items()}
        one, two = engine.run(before), engine.run(after)
    except OptdnnError as error:
        return f"the trial with a batch of {rows} failed: {error.message}"
    for name, a in one.items():
        if a.shape[:1] != (rows,) or two[name].shape[:1] != (rows,):
            return f"output {name!r} does not have a row for each row of the inputs"
        if not _same_bits(a[0], two[name][0]):
            return f"the first row of {name!r} changes with the other rows of the batch"
    return ""


def _same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def _symbols(dim: int | str) -> set[str]:
    if isinstance(dim, int):
        return set()
    expression = parse_dim(dim)
    return {dim} if expression is None else {s.name for s in expression.symbols()}


def _plain(spec: TensorSpec) -> list[Any]:
    return [spec.name, dtype_name(spec.dtype), list(spec.shape)]


def _spec(row: Sequence[Any]) -> TensorSpec:
    return TensorSpec(row[0], DTYPES[row[1]], tuple(row[2]))
