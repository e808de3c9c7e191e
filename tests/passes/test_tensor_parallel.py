"""tensor_parallel: the ranks together give the results of one GPU; blocks that cannot be split are refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from support.check import from_text
from support.net import Net

from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Graph, Value
from optdnn.ir.verify import verify
from optdnn.ops.attention import AttentionAttrs, RotaryAttrs, TensorScatterAttrs
from optdnn.ops.collective import AllReduceAttrs
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.packed_layout import PackedMatMulAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.base import PassReport
from optdnn.passes.batch_parallel import BatchParallel
from optdnn.passes.tensor_parallel import Ports, TensorParallel
from optdnn.runtime.ranks.exchange import Threads, together
from optdnn.types import Array


def split(graph: Graph, world: int, gathered: int = 1 << 24) -> tuple[list[Graph], PassReport, Ports]:
    """The graph of each rank, and the report and the ports of the last one."""
    graphs = []
    for rank in range(world):
        one = TensorParallel(rank, world, least_weights=1, least_gathered=gathered)
        made = graph.copy()
        report = one(made, None)
        verify(made)
        graphs.append(made)
    return graphs, report, one.ports


def part(arrays: Mapping[str, Array], axes: Mapping[str, int], rank: int, world: int) -> dict[str, Array]:
    return {n: np.split(a, world, axes[n])[rank] if n in axes else a for n, a in arrays.items()}


def check(graph: Graph, world: int, fired: int, **options: int) -> tuple[list[Graph], PassReport, Ports]:
    """All ranks give the results of the whole graph, and each has its part of the weights."""
    graphs, report, ports = split(graph, world, **options)
    assert report.changes == fired, report.refused
    feeds = random_feeds(graph, seed=3)
    want = evaluate(graph, feeds)
    works = [partial(evaluate, g, part(feeds, ports.inputs, r, world)) for r, g in enumerate(graphs)]
    got = together(works, Threads(world))
    for name, whole in want.items():
        for rank in range(world):
            mine = part(want, ports.outputs, rank, world)[name]
            np.testing.assert_allclose(got[rank][name], mine, rtol=1e-9, atol=1e-9 * np.abs(whole).max())
    assert np.abs(next(iter(want.values()))).max() > 0.01
    return graphs, report, ports


def weights(graph: Graph) -> int:
    return sum(op.outputs[0].type.static_shape[0] for op in graph.of_kind("Constant") if op.outputs[0].type.rank == 2)


def heads(n: Net, x: Value, count: int, size: int) -> Value:
    batch, length, _ = n.dims(x)
    return n.op("Transpose", n.op("Reshape", x, n.ints(batch, length, count, size)), attrs=TransposeAttrs((0, 2, 1, 3)))


def joined(n: Net, x: Value) -> Value:
    batch, count, length, size = n.dims(x)
    return n.op(
        "Reshape", n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 1, 3))), n.ints(batch, length, count * size)
    )


def encoder(n: Net, x: Value) -> Value:
    """A layer of BERT, its attention written out as exporters do."""
    q, k, v = (heads(n, n.op("Add", n.matmul(x, 16), n.random(16)), 4, 4) for _ in range(3))
    scores = n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2))))
    y = n.op("MatMul", n.op("Softmax", n.op("Mul", scores, 0.5), attrs=SoftmaxAttrs(-1)), v)
    x = n.op("Add", x, n.op("Add", n.matmul(joined(n, y), 16), n.random(16)))
    x = n.op("LayerNormalization", x, n.positive(16), n.random(16), attrs=LayerNormAttrs(-1))
    y = n.op("Gelu", n.op("Add", n.matmul(x, 64), n.random(64)))
    return n.op("Add", x, n.op("Add", n.matmul(y, 16), n.random(16)))


@pytest.mark.parametrize("world", [2, 4])
def test_an_encoder_is_split_by_heads_and_columns(world: int) -> None:
    n = Net(np.float64)
    graph = n.done(encoder(n, n.input(2, 3, 16)))
    graphs, report, ports = check(graph, world, 2)
    assert graphs[0].kinds()["AllReduce"] == 2
    assert not ports.inputs
    assert not ports.outputs
    whole, each = weights(graph), [weights(g) for g in graphs]
    assert len(set(each)) == 1
    assert each[0] < whole
    assert not report.refused


def test_heads_that_do_not_divide_are_computed_by_every_rank() -> None:
    n = Net(np.float64)
    graph = n.done(encoder(n, n.input(2, 3, 16)))
    _, report, _ = check(graph, 8, 1)  # four heads; 64 columns of the feed-forward network divide
    assert any("4 x 4 along one axis" in r.reason for r in report.refused)


def decoder(groups: int, sinks: bool = False) -> Graph:
    """A layer of Llama over a cache: rotary embeddings, grouped queries, a gated unit whose weights lie side by side."""
    n = Net(np.float64)
    x, at = n.input(2, 1, 32), n.input(2, name="at", dtype=np.int64)
    past = [n.input(2, groups, 6, 8, name=name) for name in ("past_k", "past_v")]
    q = heads(n, n.matmul(x, 32), 4, 8)
    k, v = (heads(n, n.matmul(x, 8 * groups), groups, 8) for _ in range(2))
    cos, sin = n.random(2, 1, 4), n.random(2, 1, 4)
    q, k = (n.op("RotaryEmbedding", y, cos, sin, attrs=RotaryAttrs()) for y in (q, k))
    k, v = (n.op("TensorScatter", p, y, at, attrs=TensorScatterAttrs(2)) for p, y in zip(past, (k, v), strict=True))
    more = [*[None] * 4, n.random(4, offset=1.0)] if sinks else []
    y = n.op("Attention", q, k, v, *more, attrs=AttentionAttrs())
    x = n.op("Add", x, n.matmul(joined(n, y), 32))
    gate, up = n.op("Split", n.matmul(x, 96), attrs=SplitAttrs(-1, 2), outputs=2)
    x = n.op("Add", x, n.matmul(n.op("Mul", n.op("Swish", gate), up), 32))
    return n.done(n.matmul(x, 40), k, v)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_decoder_keeps_the_caches_of_its_own_heads(sinks: bool) -> None:
    graph = decoder(2, sinks)
    feeds_at = {"at": np.array([1, 3])}
    graphs, _, ports = split(graph, 2, 1000)
    assert ports.inputs == {"past_k": 1, "past_v": 1}
    assert len(ports.outputs) == 2
    feeds = random_feeds(graph, seed=1) | feeds_at
    want = evaluate(graph, feeds)
    got = together([partial(evaluate, g, part(feeds, ports.inputs, r, 2)) for r, g in enumerate(graphs)], Threads(2))
    for rank in range(2):
        for name, array in part(want, ports.outputs, rank, 2).items():
            np.testing.assert_allclose(got[rank][name], array, rtol=1e-9, atol=1e-9)
    assert graphs[0].kinds()["AllGather"] == 1  # the head


def test_one_group_of_keys_for_all_queries_is_not_split() -> None:
    graphs, report, ports = split(decoder(1), 2)
    assert graphs[0].kinds()["AllReduce"] == 1  # the gated unit's
    assert any("a group of query heads of 4" in r.reason for r in report.refused)
    assert not ports.inputs


def test_the_bias_of_a_gemm_is_added_once() -> None:
    n = Net(np.float64)
    x = n.op("Relu", n.op("Gemm", n.input(3, 8), n.random(8, 12), n.random(12)))
    y = n.op("Gemm", x, n.random(10, 12), n.random(10), attrs=GemmAttrs(0.5, 2.0, transB=True))
    check(n.done(y), 2, 1)


def kinds_around_sums(graph: Graph) -> list[tuple[str, str]]:
    """For each AllReduce, the kinds of its producers and of its users."""
    sums = graph.of_kind("AllReduce")
    return [(graph.op(op.inputs[0]).kind, graph.users(op.value)[0].kind) for op in sums]  # type: ignore[arg-type]


def test_rank_0_alone_adds_the_residual_and_before_the_sum() -> None:
    n = Net(np.float64)
    graph = n.done(encoder(n, n.input(2, 3, 16)))
    (first, second), _, _ = check(graph, 2, 2)
    assert kinds_around_sums(first) == [("Add", "LayerNormalization"), ("Add", "Output")]
    assert kinds_around_sums(second) == [("MatMul", "LayerNormalization"), ("MatMul", "Output")]
    (total,) = (op for op in graph.of_kind("Add") if any(u.kind == "LayerNormalization" for u in graph.users(op.value)))
    for one in (first, second):  # the sum is the whole result: it has its name and its nodes
        (reduce, _) = one.of_kind("AllReduce")
        assert reduce.outputs[0].name == total.outputs[0].name
        assert total.src <= reduce.src


def feed_forward(n: Net, x: Value) -> Value:
    return n.matmul(n.op("Relu", n.matmul(x, 64)), 16)


def test_sums_beside_one_another_keep_their_additions_behind() -> None:
    """Before the sums, they could change the order of the collectives on one rank."""
    n = Net(np.float64)
    x = n.op("Tanh", n.input(3, 16))
    (first, second), _, _ = check(n.done(n.op("Add", n.op("Add", x, feed_forward(n, x)), feed_forward(n, x))), 2, 2)
    assert kinds_around_sums(first) == kinds_around_sums(second) == [("MatMul", "Add")] * 2


def test_addends_known_only_later_are_added_after_the_sum() -> None:
    n = Net(np.float64)
    y = feed_forward(n, n.input(3, 16))
    graph = n.done(n.op("Add", y, n.op("Exp", n.input(3, 16, name="later"))))
    for one in check(graph, 2, 1)[0]:
        assert kinds_around_sums(one) == [("MatMul", "Add")]


def test_packed_queries_keys_and_values() -> None:
    """As PyTorch's image models have them: one product, a view with the three side by side, one Gather each."""
    n = Net(np.float64)
    qkv = n.op("Reshape", n.matmul(n.input(2, 3, 16), 48), n.ints(2, 3, 3, 4, 4))
    qkv = n.op("Transpose", qkv, attrs=TransposeAttrs((2, 0, 3, 1, 4)))
    q, k, v = (n.op("Squeeze", p, n.ints(0)) for p in n.op("Split", qkv, attrs=SplitAttrs(0, 3), outputs=3))
    y = n.op("Attention", q, k, v, attrs=AttentionAttrs())
    check(n.done(n.matmul(joined(n, y), 16)), 4, 1)


def test_rows_that_may_be_rounded() -> None:
    """Each rank rounds the features that it has, with scales no larger than those of whole rows."""
    n = Net()
    x = n.input(8, 64)

    def product(x: Value, K: int, N: int) -> Value:
        packed = n.const(n.rng.integers(0, 256, (N, K // 2)), np.uint8)
        attrs = PackedMatMulAttrs("uint4", K, 16, rounded_rows=True)
        return n.op("PackedMatMul", x, packed, n.random(N, K // 16), attrs=attrs)

    graph = n.done(product(n.op("Relu", product(x, 64, 96)), 96, 32))
    graphs, report, _ = split(graph, 2)
    assert report.changes == 1, report.refused
    assert [op.attrs.rounded_rows for g in graphs for op in g.of_kind("PackedMatMul")] == [True] * 4
    exact = graph.copy()
    for op in exact.of_kind("PackedMatMul"):
        exact.set_op(replace(op, attrs=replace(op.attrs, rounded_rows=False)))
    feeds = random_feeds(graph, seed=3)
    (want,) = evaluate(exact, feeds).values()
    (whole,) = evaluate(graph, feeds).values()
    works = [partial(evaluate, g, feeds) for g in graphs]
    for (got,) in (found.values() for found in together(works, Threads(2))):
        assert 0 < np.linalg.norm(got - want) < 1.1 * np.linalg.norm(whole - want) < 0.05 * np.linalg.norm(want)


def test_large_columns_are_gathered() -> None:
    n = Net(np.float64)
    x = n.op("Tanh", n.input(3, 8))
    graphs, report, _ = check(n.done(n.op("Gemm", x, n.random(8, 20), n.random(20))), 2, 1, gathered=100)
    assert [f.rule for f in report.fired] == ["split_columns"]
    assert graphs[0].kinds()["AllGather"] == 1


def refused(graph: Graph) -> str:
    graphs, report, _ = split(graph, 2)
    assert "AllReduce" not in graphs[0].kinds()
    return " / ".join(r.reason for r in report.refused)


def test_refusals_say_why() -> None:
    n = Net(np.float64)
    y = n.op("LayerNormalization", n.matmul(n.input(3, 8), 8), n.positive(8), n.random(8), attrs=LayerNormAttrs(-1))
    assert "LayerNormalization 'LayerNormalization_2' runs over the axis that would be split" in refused(
        n.done(n.matmul(y, 8))
    )
    n = Net(np.float64)
    assert "7 features do not divide into 2 equal parts" in refused(n.done(n.matmul(n.op("Relu", n.input(3, 7)), 8)))
    n = Net(np.float64)
    h = n.matmul(n.input(3, 8), 8)
    total = n.op("ReduceSum", h, n.ints(1))
    assert "ReduceSum 'ReduceSum_2' reads 'MatMul_1' whole" in refused(n.done(n.matmul(n.op("Relu", h), 8), total))
    n = Net(np.float64)
    assert "no product of weights makes its features" in refused(n.done(n.matmul(n.op("Relu", n.input(3, 8)), 8)))
    n = Net(np.float64)
    y = n.op("CumSum", n.matmul(n.input(3, 8), 8), n.const(0, np.int64))
    assert "CumSum 'CumSum_2' needs whole operands" in refused(n.done(n.matmul(y, 8)))


def test_small_blocks_are_left() -> None:
    n = Net(np.float64)
    graph = n.done(n.matmul(n.op("Relu", n.matmul(n.input(3, 8), 8)), 8))
    one = TensorParallel(0, 2)
    report = one(graph, None)
    assert "128 weights are too few" in report.refused[-1].reason


def in_batches(graph: Graph, world: int) -> tuple[list[Graph], PassReport, Ports]:
    graphs = []
    for rank in range(world):
        one = BatchParallel(rank, world)
        made = graph.copy()
        report = one(made, None)
        verify(made)
        graphs.append(made)
    return graphs, report, one.ports


def test_a_batch_is_split_without_collectives() -> None:
    n = Net(np.float64)
    x = n.op("Transpose", n.conv(n.input(4, 16, 3, 2), 16), attrs=TransposeAttrs((0, 2, 3, 1)))
    graph = n.done(encoder(n, n.op("Reshape", x, n.ints(4, 6, 16))))
    graphs, report, ports = in_batches(graph, 2)
    assert report.changes == 1
    assert ports.inputs == {"x": 0}
    assert not {"AllReduce", "AllGather"} & graphs[0].kinds().keys()
    feeds = random_feeds(graph, seed=3)
    (want,) = evaluate(graph, feeds).values()
    parts = [evaluate(g, part(feeds, ports.inputs, r, 2)) for r, g in enumerate(graphs)]
    np.testing.assert_allclose(np.concatenate([next(iter(p.values())) for p in parts]), want, rtol=1e-9, atol=1e-9)


def test_batches_whose_rows_meet_are_not_split() -> None:
    def why(graph: Graph) -> str:
        _, report, ports = in_batches(graph, 2)
        assert not report.changes
        assert not ports.inputs
        return report.refused[0].reason

    n = Net(np.float64)
    assert "3 rows of the batch do not divide into 2" in why(n.done(n.op("Relu", n.input(3, 8))))
    n = Net(np.float64)
    assert "runs over the axis" in why(n.done(n.op("Softmax", n.input(4, 8), attrs=SoftmaxAttrs(0))))
    n = Net(np.float64)
    h = n.op("Relu", n.input(4, 8))
    mean = n.op("ReduceMean", h, n.ints(0))
    assert "ReduceMean 'ReduceMean_2' reads 'Relu_1' whole" in why(n.done(n.op("Sub", h, mean)))


MODEL = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
agraph (float[2, 4] x) => (float[2, 4] y, float[4, 4] z) {{
  y = {reduce} (x)
  z = com.microsoft.AllGather <group_size = 2, axis = 0> (x)
}}
"""


@pytest.mark.parametrize(
    "reduce",
    [
        "com.microsoft.AllReduce <group_size = 2>",
        'DistCollective <collective_operation = "ALL_REDUCE", reduce_op = "SUM", nb_rank = 2>',
    ],
)
def test_collectives_of_onnx(reduce: str) -> None:
    graph = from_text(MODEL.format(reduce=reduce))
    assert graph.kinds() == {"AllGather": 1, "AllReduce": 1}
    assert graph.of_kind("AllReduce")[0].attrs == AllReduceAttrs(2)
    given = [np.full((2, 4), r + 1, np.float32) for r in range(2)]
    got = together([partial(evaluate, graph, {"x": x}) for x in given], Threads(2))
    for one in got:
        np.testing.assert_array_equal(one["y"], np.full((2, 4), 3))
        np.testing.assert_array_equal(one["z"], np.concatenate(given))
