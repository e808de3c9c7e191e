"""Pointwise operators that gather their operands: the networks that use the kernel, those that do not, and results on the processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.host import needs_compiler
from support.net import Net, built
from support.on_gpu import checked_launches
from support.on_processor import compare_graph
from support.simulated import check_simulated, lowered, step_tactics
from support.sweep import turns

from optdnn.ir.graph import Graph, Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.types import INT32, INT64

WORDS = 40


def tokens(n: Net, *shape: int, name: str = "ids", wide: bool = True) -> Value:
    """Indices that are computed from an input, some of them negative."""
    x = n.op("Floor", n.op("Mul", n.op("Sin", n.input(*shape, name=name)), n.const(WORDS / 2 - 1.0)))
    return n.op("Cast", x, attrs=CastAttrs(INT64 if wide else INT32))


def rows(n: Net, at: Value, width: int, axis: int = 0) -> Value:
    return n.op("Gather", n.random(WORDS, width), at, attrs=GatherAttrs(axis))


def embeddings(width: int = 16, *, last: str = "Softmax", wide: bool = True) -> Graph:
    """BERT's sum of a token's, a segment's and a position's embedding."""
    n = Net()
    word, kind = (rows(n, tokens(n, 2, 6, name=name, wide=wide), width) for name in ("ids", "kinds"))
    return n.done(n.op(last, n.op("Add", n.op("Add", word, kind), n.random(6, width))))


def positions() -> Graph:
    """A position's row is the same for the whole batch, a factor has a number for each token, and another one is a scalar."""
    n = Net()
    y = n.op("Mul", rows(n, tokens(n, 3, 5), 12), n.input(3, 5, 1, name="mask"))
    y = n.op("Mul", y, n.input(name="scale"))
    return n.done(n.op("Softmax", n.op("Add", y, rows(n, tokens(n, 5, name="at"), 12))))


def scaled() -> Graph:
    """Gemma's embedding: rows times a number, which a norm and a residual read."""
    n = Net()
    x = n.op("Mul", rows(n, tokens(n, 2, 6), 16), n.const(4.0))
    return n.done(n.op("Add", n.op("MatMul", n.op("Softmax", x), n.random(16, 16)), x))


def clipped() -> Graph:
    """A quantizer's bounds of the sum, which are operands of one number."""
    n = Net()
    word, kind = (rows(n, tokens(n, 2, 6, name=name), 16) for name in ("ids", "kinds"))
    y = n.op("Clip", n.op("Add", word, kind), n.const(-0.8), n.const(0.9))
    return n.done(n.op("Softmax", n.op("Mul", y, 3.0)))


CASES: dict[str, Callable[[], Graph]] = {
    "embeddings": embeddings,
    "rows that are not aligned": lambda: embeddings(13),
    "indices of 32 bits": lambda: embeddings(wide=False),
    "positions": positions,
    "rows times a number": scaled,
    "bounds of one number": clipped,
}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_meanings(name: str, precision: str) -> None:
    """One launch gathers and adds, and its meaning gives the graph's values."""
    program = check_simulated(CASES[name](), precision)
    found = step_tactics(program)
    assert found.count("pointwise_rows") == 1
    assert "gather" not in found
    (step,) = (s for s in program.steps if s.params.get("tactic") == "pointwise_rows")
    assert step.params["op"]["kind"] == "PointwiseOfRows"


@pytest.mark.parametrize(
    ("gathers", "tactics_of_sum"), [(2, ["pointwise_rows", "rows_once"]), (1, ["gather", "add_norm"])]
)
def test_a_norm_of_two_gathered_rows_adds_nothing(gathers: int, tactics_of_sum: list[str]) -> None:
    """GPT-2's embedding of a token and of its position; the sum is also the first shortcut."""
    n = Net()
    word = rows(n, tokens(n, 2, 6), 16)
    other = rows(n, tokens(n, 2, 6, name="at"), 16) if gathers == 2 else n.input(2, 6, 16, name="given")
    x = n.op("Add", word, other)
    y = n.op("LayerNormalization", x, n.positive(16), n.random(16), attrs=LayerNormAttrs(-1))
    found = step_tactics(check_simulated(n.done(n.op("Add", x, n.matmul(y, 16))), "fp16"))
    assert [t for t in found if t in ("pointwise_rows", "gather", "rows_once", "add_norm")] == tactics_of_sum


def shared(n: Net) -> list[Value]:
    y = rows(n, tokens(n, 2, 6), 16)
    return [n.op("Softmax", n.op("Add", y, n.input(16, name="b"))), n.op("Softmax", y)]


def columns(n: Net) -> list[Value]:
    y = n.op("Gather", n.random(16, WORDS), tokens(n, 16), attrs=GatherAttrs(1))
    return [n.op("Softmax", n.op("Add", y, n.input(16, name="b")))]


def known(n: Net) -> list[Value]:
    y = n.op("Softmax", n.input(WORDS, 16), attrs=SoftmaxAttrs(0))
    y = n.op("Gather", y, n.ints(1, 3, 5), attrs=GatherAttrs(0))
    return [n.op("Softmax", n.op("Add", y, n.input(16, name="b")))]


REFUSED: dict[str, tuple[Callable[[Net], list[Value]], str]] = {
    "other readers": (shared, "no rows that are gathered for it alone"),
    "columns": (columns, "no rows that are gathered for it alone"),
    "a view": (known, "are views"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    made, because = REFUSED[name]
    program = lowered(built(made), "fp32", opt_level=2)
    found: Any = [t for t in program.meta["tactics"] if t["kind"] in ("Add", "Pointwise")]  # type: ignore[union-attr, index, call-overload]
    reasons = [r["reason"] for t in found for r in t.get("refused", ()) if r["tactic"] == "pointwise_rows"]
    assert any(because in r for r in reasons), reasons
    assert "pointwise_rows" not in step_tactics(program)


@needs_compiler
@pytest.mark.parametrize(("name", "precision"), turns(CASES, "fp32", "fp16", "bf16"))
def test_kernels(name: str, precision: str, tmp_path: Path) -> None:
    assert compare_graph(CASES[name](), precision, tmp_path)


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_launches_on_a_gpu(name: str, precision: str) -> None:
    checked_launches(CASES[name](), precision)
