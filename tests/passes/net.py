"""Small graphs for the tests of passes, and what every rewrite has to hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optdnn.ir.evaluate import evaluate, promote, random_feeds
from optdnn.ir.graph import Graph, Value
from optdnn.ir.verify import verify
from optdnn.ops.base import Attrs
from optdnn.ops.table import OPDEFS
from optdnn.passes.base import Pass, PassContext, PassReport
from optdnn.types import DimLike, TensorType


class Net:
    """Builds a graph; every op gets a provenance name of its own, and default attributes. Numbers become constants of ``dtype``."""

    def __init__(self, dtype: Any = np.float64):
        self.graph, self.dtype, self.count = Graph("test"), np.dtype(dtype), 0

    def input(self, *shape: DimLike, name: str = "x", dtype: Any = None) -> Value:
        return self.graph.add_input(name, TensorType(np.dtype(dtype or self.dtype), tuple(shape)))

    def const(self, value: Any, dtype: Any = None) -> Value:
        return self.graph.add_constant(np.asarray(value, dtype=dtype or self.dtype))

    def random(self, *shape: int, seed: int = 1) -> Value:
        return self.const(np.random.default_rng(seed).standard_normal(shape))

    def ints(self, *values: int) -> Value:
        return self.const(values, np.int64)

    def op(self, kind: str, *inputs: Any, attrs: Attrs | None = None, outputs: int = 1) -> Any:
        values = [v if isinstance(v, Value) or v is None else self.const(v) for v in inputs]
        self.count += 1
        name = f"{kind}_{self.count}"
        attrs = OPDEFS[kind].attrs() if attrs is None else attrs
        op = self.graph.add(kind, values, attrs, names=[name], outputs=outputs, src=[name])
        return op.value if outputs == 1 else [Value(op.id, i) for i in range(outputs)]

    def done(self, *outputs: Value) -> Graph:
        for i, v in enumerate(outputs):
            self.graph.add_output(v, f"y{i}")
        verify(self.graph)
        return self.graph


def rewritten(
    before: Graph,
    one: Pass,
    *,
    changes: int,
    kinds: dict[str, int] | None = None,
    context: PassContext | None = None,
    sizes: dict[str, int] | None = None,
    rtol: float = 1e-9,
) -> tuple[Graph, PassReport]:
    """Run a pass; assert the number of rewrites, the kinds left, invariants, idempotence, provenance and equal results."""
    after = before.copy()
    report = one(after, context)
    refusals = [r.reason for r in report.refused]
    assert report.changes == changes, f"{report.changes} rewrites, not {changes}; refused: {refusals}"
    verify(after)
    if kinds is not None:
        assert after.kinds() == dict(sorted(kinds.items()))
    again = one(after, context)
    assert again.changes == 0, f"not idempotent: {again.fired}"
    assert sources(after) == sources(before), "provenance was lost"
    feeds = random_feeds(before, seed=5, sizes=sizes)
    wide = {k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in feeds.items()}
    want, got = evaluate(promote(before), wide), evaluate(promote(after), wide)
    assert list(want) == list(got)
    for name, a in want.items():
        assert got[name].shape == a.shape
        assert got[name].dtype == a.dtype
        if a.dtype.kind == "f":
            scale = float(np.abs(a).max()) or 1.0
            assert float(np.abs(got[name] - a).max()) <= rtol * scale, name
        else:
            assert np.array_equal(got[name], a), name
    return after, report


def refused(before: Graph, one: Pass, *, because: str, context: PassContext | None = None) -> PassReport:
    """Run a pass; assert that it changes nothing and gives this reason."""
    after = before.copy()
    report = one(after, context)
    assert report.changes == 0, report.fired
    reasons = [r.reason for r in report.refused]
    assert any(because in r for r in reasons), reasons
    assert after.kinds() == before.kinds()
    return report


def untouched(before: Graph, one: Pass, context: PassContext | None = None) -> None:
    """Run a pass; assert that it sees no candidate at all."""
    after = before.copy()
    report = one(after, context)
    assert (report.changes, report.refused) == (0, [])
    assert after.kinds() == before.kinds()


def sources(graph: Graph) -> set[str]:
    return set().union(*(op.src for op in graph.ops()))


def operand_constants(graph: Graph, kind: str) -> list[Sequence[Any]]:
    """For the one op of ``kind``: its constant operands (None for the others)."""
    (op,) = graph.of_kind(kind)
    return [graph.constant_value(v) for v in op.inputs]
