"""TensorScatter: rows of whole words of eight bytes are moved in words. Scatters of many updates write each to its place."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.host import needs_compiler
from support.net import Net
from support.on_processor import compare_steps
from support.simulated import feeds_of, lowered
from support.sweep import in_turn

from optdnn.ir.graph import Graph
from optdnn.kernels.index import scatters
from optdnn.ops.attention import TensorScatterAttrs
from optdnn.ops.gather import ScatterElementsAttrs, ScatterNDAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.launches.plan import parse
from optdnn.runtime.cuda.trials.check import check_steps
from optdnn.runtime.engine import Engine
from optdnn.runtime.program import Program
from optdnn.types import BF16, FP16, FP32, FP64, INT64

UNPOOLED = (4096, 8192)
"""Updates and results of a scatter that is large enough to be written directly."""
R = np.random.default_rng(4)


def many(kind: str, index: Any = None, reduction: str = "none", dtype: Any = FP16) -> tuple[Graph, dict[str, Any]]:
    """Updates of distinct positions: the elements of a vector, rows of a matrix, or elements along axis 1 of a picture."""
    n: Any = Net(dtype)
    count, size = UNPOOLED
    order = R.permutation(size)[:count] - R.integers(0, 2, count) * size  # some are counted from the end
    if kind == "rows":
        places, x, u, attrs = (
            order.reshape(64, 64, 1),
            n.input(size, 24),
            n.input(64, 64, 24),
            ScatterNDAttrs(reduction),
        )
    elif kind == "pairs":
        places = np.stack([order // 64 % 128, order % 64], -1)
        x, u, attrs = n.input(128, 64), n.input(count), ScatterNDAttrs(reduction)
    elif kind == "vector":
        places, x, u, attrs = order, n.input(size), n.input(count), ScatterElementsAttrs(0, reduction)
    else:
        places = np.stack([R.permutation(size)[:count] for _ in range(3)], 1)[None]
        x, u, attrs = n.input(1, size, 3), n.input(1, count, 3), ScatterElementsAttrs(1, reduction)
    given = n.input(*places.shape, name="i", dtype=INT64) if index is None else n.const(index(places), INT64)
    op = "ScatterND" if isinstance(attrs, ScatterNDAttrs) else "ScatterElements"
    graph = n.done(n.op(op, x, given, u, attrs=attrs))
    return graph, feeds_of(graph) | ({"i": places} if index is None else {})


KINDS = ["rows", "pairs", "vector", "axis"]


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_many_updates_are_written_to_their_places(kind: str, tmp_path: Path) -> None:
    graph, feeds = many(kind)
    program = lowered(graph)
    scatters = [s for s in program.steps if s.params["op"]["kind"].startswith("Scatter")]
    assert [s.executor for s in scatters] == ["cuda"]
    assert compare_steps(program, feeds, 0.0, tmp_path) >= 1


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_update_of_a_known_place_counts(kind: str, tmp_path: Path) -> None:
    known: list[Callable[[Any], Any]] = [lambda i: i, lambda i: i // 3, np.zeros_like]
    for index in known:
        graph, feeds = many(kind, index)
        assert _written_directly(graph)
        assert compare_steps(lowered(graph), feeds, 0.0, tmp_path) >= 1


@needs_compiler
def test_places_that_meet_from_both_ends(tmp_path: Path) -> None:
    """0 and -8192 are the same position."""
    graph, feeds = many("vector", lambda i: np.concatenate([[0, -8192], np.arange(1, len(i) - 1)]))
    assert compare_steps(lowered(graph), feeds, 0.0, tmp_path) >= 1


def test_only_sums_are_added_where_they_belong() -> None:
    assert _written_directly(many("vector", reduction="add")[0])
    assert not _written_directly(many("vector", reduction="max")[0])


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_many_sums(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in float64, the additions, and a copy back."""
    monkeypatch.setattr(scatters, "DIRECT", 0)
    graph, feeds = meeting(kind, "add", FP16)
    program = lowered(graph)
    assert FP64 in [b.dtype for b in program.buffers]
    assert compare_steps(program, feeds, 0.0, tmp_path) == 3


@pytest.mark.parametrize(("dtype", "precision"), [(FP32, "fp32"), (BF16, "bf16")], ids=["fp32", "bf16"])
def test_sums_that_depend_on_the_order_keep_it(dtype: Any, precision: str) -> None:
    graph, _ = many("vector", reduction="add", dtype=dtype)
    assert _points(lowered(graph, precision)) == 32 * UNPOOLED[1]


def _written_directly(graph: Graph) -> bool:
    """Whether the launch runs over the updates: one thread per update, not per result."""
    points = _points(lowered(graph))
    (updates,) = [graph.type(op.inputs[2]).static_shape for op in graph.of_kind("ScatterND", "ScatterElements")]
    return bool(points == np.prod(updates))


def _points(program: Program) -> int:
    """The number of threads of a scatter's launch."""
    (step,) = [s for s in program.steps if s.params["op"]["kind"].startswith("Scatter")]
    launch = parse(step, program).launch
    assert launch is not None
    return int(struct.unpack_from("<I", launch.parameters, 8 * len(launch.relocations))[0])


@pytest.mark.hopper
@pytest.mark.parametrize("kind", KINDS)
def test_many_updates_on_a_gpu(kind: str) -> None:
    graph, feeds = many(kind)
    found = check_steps(Engine(lowered(graph, "fp16", target="cuda:sm_90a")).context(), feeds)
    assert [e.error for e in found if e.kind.startswith("Scatter")] == [0.0]


def meeting(kind: str, reduction: str, dtype: Any, count: int = 300) -> tuple[Graph, dict[str, Any]]:
    """Several updates have one position: rows, pairs of coordinates, a vector, or elements along the first of two axes."""
    n: Any = Net(dtype)
    size = 12
    if kind == "rows":
        places, x, u, attrs = (count, 1), n.input(size, 24), n.input(count, 24, name="u"), ScatterNDAttrs(reduction)
    elif kind == "pairs":
        places, x, u, attrs = (count, 2), n.input(size, size, 3), n.input(count, 3, name="u"), ScatterNDAttrs(reduction)
    elif kind == "vector":
        places, x, u, attrs = (count,), n.input(size), n.input(count, name="u"), ScatterElementsAttrs(0, reduction)
    else:
        places, x, u, attrs = (
            (count, 4),
            n.input(size, 5),
            n.input(count, 4, name="u"),
            ScatterElementsAttrs(0, reduction),
        )
    op = "ScatterND" if isinstance(attrs, ScatterNDAttrs) else "ScatterElements"
    graph = n.done(n.op(op, x, n.input(*places, name="i", dtype=INT64), u, attrs=attrs))
    feeds = feeds_of(graph) | {"i": R.integers(-size, size, places)}
    if reduction == "mul":  # products of many numbers near 1
        feeds["u"] = (1 + 0.01 * R.standard_normal(feeds["u"].shape)).astype(feeds["u"].dtype)
    return graph, feeds


@needs_compiler
@pytest.mark.parametrize(("kind", "reduction"), in_turn(KINDS, "add", "mul", "max", "min"))
def test_a_warp_reduces_updates_that_meet(kind: str, reduction: str, tmp_path: Path) -> None:
    graph, feeds = meeting(kind, reduction, np.float32)
    program = lowered(graph, "fp32")
    assert _points(program) == 32 * {"rows": 12 * 3, "pairs": 12 * 12 * 3, "vector": 12, "axis": 12 * 5}[kind]
    assert compare_steps(program, feeds, 1e-5 if reduction in ("add", "mul") else 0.0, tmp_path) >= 1


def test_searches_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few updates, updates that replace, and many results with indices that are not contiguous."""
    alone = 12 * 5
    assert _points(lowered(meeting("axis", "add", np.float32, count=127)[0])) == alone
    assert _points(lowered(meeting("axis", "none", np.float32)[0])) == alone
    monkeypatch.setattr(scatters, "FEW_RESULTS", alone - 1)
    assert _points(lowered(meeting("axis", "add", np.float32)[0])) == alone
    assert _points(lowered(meeting("vector", "add", np.float32)[0])) == 12 * 32


@pytest.mark.hopper
@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
@pytest.mark.parametrize("kind", KINDS)
def test_updates_that_meet_on_a_gpu(kind: str, reduction: str) -> None:
    graph, feeds = meeting(kind, reduction, FP16, count=20000 if reduction != "mul" else 300)
    found = check_steps(Engine(lowered(graph, "fp16", target="cuda:sm_90a")).context(), feeds)
    assert max(e.error for e in found if e.kind.startswith("Scatter")) <= (2e-3 if reduction in ("add", "mul") else 0.0)


@pytest.mark.hopper
@pytest.mark.parametrize("kind", KINDS)
def test_many_sums_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of atomic additions does not matter: all runs give the same bits."""
    monkeypatch.setattr(scatters, "DIRECT", 0)
    graph, feeds = meeting(kind, "add", FP16, count=20000)
    context: Any = Engine(lowered(graph, "fp16", target="cuda:sm_90a")).context()
    found = check_steps(context, feeds)
    assert [e.error for e in found if e.kind.startswith("Scatter")] == [0.0]
    (first,) = context.run(feeds).values()
    for _ in range(10):
        (again,) = context.run(feeds).values()
        assert again.tobytes() == first.tobytes()


def network(features: int, axis: int, turned: bool, length: int = 6, count: int = 2) -> Graph:
    """A write of ``count`` positions of a cache of ``length``. ``turned``: the new rows have positions before heads."""
    n: Any = Net(FP16)
    shape, update = [2, 3, length, features], [2, 3, length, features]
    update[axis] = count
    if turned:
        given = n.input(update[0], update[2], update[1], features, name="u")
        u = n.op("Transpose", given, attrs=TransposeAttrs((0, 2, 1, 3)))
    else:
        u = n.input(*update, name="u")
    y = n.op("TensorScatter", n.input(*shape), u, n.input(2, name="at", dtype=INT64), attrs=TensorScatterAttrs(axis))
    return n.done(y)


@needs_compiler
@pytest.mark.parametrize(
    ("features", "axis", "turned", "count"),
    [
        (8, 2, False, 2 * 3 * 2 * 2),
        (8, 2, True, 2 * 3 * 2 * 2),
        (6, 2, False, 2 * 3 * 2 * 6),  # it writes along rows
        (8, 3, False, 2 * 3 * 6 * 2),  # it writes along rows
    ],
)
def test_in_words(features: int, axis: int, turned: bool, count: int, tmp_path: Path) -> None:
    graph = network(features, axis, turned)
    program = lowered(graph)
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == "TensorScatter"]
    launch = parse(step, program).launch
    assert launch is not None
    pointers = 8 * len(launch.relocations)
    assert struct.unpack_from("<I", launch.parameters, pointers) == (count,)
    feeds = {**feeds_of(graph), "at": np.array([0, 3])}
    assert compare_steps(program, feeds, 0.0, tmp_path) >= 1


@pytest.mark.hopper
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("features", [6, 8, 128])
def test_on_a_gpu(features: int, turned: bool) -> None:
    graph = network(features, 2, turned, length=600, count=200)
    feeds = {**feeds_of(graph), "at": np.array([0, 377])}
    found = check_steps(Engine(lowered(graph, "fp16", target="cuda:sm_90a")).context(), feeds)
    assert [e.error for e in found if e.kind == "TensorScatter"] == [0.0]
