"""Attention, rotary embedding and cache writes against ONNX's evaluator; decomposed exports; every refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onenode import Case, check_case, check_export, import_case, normal, onnxruntime_run, op_flops, run
from support.net import Net

from optdnn.errors import ShapeError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.ops.attention import AttentionAttrs, RotaryAttrs
from optdnn.runtime.reference.attention import rotary_embedding
from optdnn.types import FP16, FP32, Array

B, H, L, S, D, E = 2, 6, 4, 5, 8, 3


def case(
    *,
    groups: int = 3,
    mask: Array | None = None,
    past: int = 0,
    lengths: Any = None,
    opset: int = 24,
    n: int = 4,
    **attrs: Any,
) -> Case:
    operands: list[Array | None] = [
        normal(B, H, L, D, seed=1),
        normal(B, groups, S, D, seed=2),
        normal(B, groups, S, E, seed=3),
    ]
    operands += [mask, None, None, None if lengths is None else np.array(lengths, np.int64)]
    if past:
        operands[4:6] = [normal(B, groups, past, D, seed=4), normal(B, groups, past, E, seed=5)]
    while operands[-1] is None:
        operands.pop()
    return Case("Attention", operands, attrs, opset, outputs=n)


def boolean(*shape: int, seed: int = 7) -> Array:
    return np.random.default_rng(seed).random(shape) < 0.6


CASES = {
    "plain": case(groups=6),
    "grouped": case(groups=3),
    "one key head": case(groups=1),
    "scaled": case(scale=0.3, softcap=1.5, n=3),  # mode 0 of ONNX's evaluator shows the capped scores
    "causal": case(is_causal=1),
    "causal with a past": case(is_causal=1, past=2),
    "past": case(past=3, mask=normal(L, S + 3)),
    "boolean mask": case(mask=boolean(B, 1, L, S)),
    "mask per head": case(mask=normal(H, L, S)),
    "short mask": case(mask=boolean(L, S - 2)),
    "short added mask": case(mask=normal(B, H, L, S - 1)),
    "causal and masked": case(is_causal=1, mask=boolean(B, H, L, S)),
    "a row without keys": case(mask=np.arange(L)[:, None] != np.ones(S)),
    "lengths": case(lengths=[5, 2]),
    "lengths and causal": case(lengths=[5, 2], is_causal=1),
    "softcap shown": case(softcap=2.0, qk_matmul_output_mode=1),
    "bias shown": case(mask=normal(L, S), qk_matmul_output_mode=2),
    "probabilities shown": case(mask=boolean(L, S), qk_matmul_output_mode=3),
    "precision": case(softmax_precision=11),
    "window": case(opset=25, left_window_size=2, right_window_size=1),
    "causal window": case(opset=25, left_window_size=1, is_causal=1, past=2),
}


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    check_case(CASES[name], "reference", symbolic={0: (0, 2), 1: (0, 2), 2: (0, 2), 4: (0,), 5: (0,)})


@pytest.mark.parametrize("name", CASES)
def test_decomposed_export(name: str) -> None:
    model = check_export(CASES[name])
    found = [n.op_type for n in model.graph.node]
    assert "Attention" not in found
    if name in ("grouped", "one key head"):  # keys and values are not repeated
        assert found.count("Reshape") == 4
        assert not {"Concat", "Expand", "Tile"} & set(found)


def test_heads_packed_in_three_dimensions() -> None:
    q, k, v = normal(B, L, H * D, seed=1), normal(B, S, 3 * D, seed=2), normal(B, S, 3 * E, seed=3)
    packed = Case("Attention", [q, k, v], {"q_num_heads": H, "kv_num_heads": 3, "is_causal": 1}, 24)
    graph = check_case(packed, "reference", symbolic={0: (0, 1), 1: (0, 1), 2: (0, 1)})
    assert graph.kinds() == {"Attention": 1, "Reshape": 4, "Transpose": 4}


def test_half_precision_rounds_once() -> None:
    half = Case("Attention", [x.astype(FP16) for x in CASES["causal"].inputs if x is not None], {"is_causal": 1}, 24)
    wide = Case("Attention", [x.astype(FP32) for x in half.inputs if x is not None], {"is_causal": 1}, 24)
    (got,), (exact,) = run(import_case(half), half.fed), run(import_case(wide), wide.fed)
    assert got.dtype == FP16
    np.testing.assert_array_equal(got, exact.astype(FP16))


def test_cost_counts_both_products() -> None:
    graph = import_case(CASES["past"])
    (op,) = graph.of_kind("Attention")
    assert op_flops(graph, op) == B * H * L * (S + 3) * (2 * D + 2 * E + 6)


SUNK: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, capped": {"groups": 3, "softcap": 1.5, "scale": 0.4},
    "causal, a past": {"past": 3, "is_causal": True},
    "lengths, a window": {"lengths": [5, 2], "is_causal": True, "left_window_size": 2},
    "a row without keys": {"mask": np.arange(L)[:, None] != np.ones(S)},
    "weights shown": {"qk_matmul_output_mode": 3, "outputs": 4},
    "a wider softmax": {"softmax_precision": np.dtype(np.float64)},
}


def with_sinks(
    *,
    groups: int = 6,
    past: int = 0,
    lengths: Any = None,
    mask: Any = None,
    outputs: int = 1,
    sinks: Any = None,
    **attrs: Any,
) -> tuple[Graph, dict[str, Array]]:
    """An Attention with sinks, and its feeds; queries, keys, values and sinks are inputs."""
    n = Net()
    own = np.array([2.0, -1.0, 5.0, -np.inf, 200.0, 0.0], np.float32) if sinks is None else sinks
    feeds = {
        "q": normal(B, H, L, D),
        "k": normal(B, groups, S, D, seed=1),
        "v": normal(B, groups, S, E, seed=2),
        "sinks": own,
    }
    q, k, v, sinks = (n.input(*a.shape, name=name, dtype=a.dtype) for name, a in feeds.items())
    before = [n.const(normal(B, groups, past, x, seed=x)) if past else None for x in (D, E)]
    given = [None if x is None else n.const(x, np.asarray(x).dtype) for x in (mask, lengths)]
    y = n.op("Attention", q, k, v, given[0], *before, given[1], sinks, attrs=AttentionAttrs(**attrs), outputs=outputs)
    return n.done(*(y if outputs > 1 else [y])), feeds


@pytest.mark.parametrize("name", SUNK)
def test_sinks(name: str) -> None:
    """A sink is a further key, visible to every query, with the sink as its score and zeros as its value."""
    graph, feeds = with_sinks(**SUNK[name])
    got = evaluate(graph, feeds)
    model = export_model(graph).proto
    model.ir_version = min(10, model.ir_version)
    for (label, a), b in zip(got.items(), onnxruntime_run(model, feeds), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5, err_msg=label)
    bare, _ = with_sinks(**SUNK[name], sinks=np.full(H, -np.inf, np.float32))
    for options, without in ((feeds, False), ({**feeds, "sinks": np.full(H, -np.inf, np.float32)}, True)):
        (y, plain) = (next(iter(evaluate(g, f).values())) for g, f in ((graph, options), (_unsunk(bare), feeds)))
        assert np.allclose(y, plain, atol=1e-6) == without


def _unsunk(graph: Graph) -> Graph:
    """The graph with the sinks taken from its attention."""
    (op,) = graph.of_kind("Attention")
    graph.set_op(replace(op, inputs=op.inputs[:7]))
    return graph


def test_weights_and_sink_together_are_one() -> None:
    graph, feeds = with_sinks(qk_matmul_output_mode=3, outputs=4)
    *_, weights = evaluate(graph, feeds).values()
    scores = np.einsum("bhld,bhsd->bhls", feeds["q"], feeds["k"]) * D**-0.5
    sinks = feeds["sinks"][:, None, None]
    total = np.exp(scores - np.maximum(sinks, 0)).sum(-1) + np.exp(sinks - np.maximum(sinks, 0))[..., 0]
    np.testing.assert_allclose(weights, np.exp(scores - np.maximum(sinks, 0)) / total[..., None], rtol=1e-4, atol=1e-6)


def test_sinks_that_contradict() -> None:
    for sinks, message in (
        (np.zeros(3, np.float32), "sinks are one number per head"),
        (np.zeros((H, 1), np.float32), "Attention sinks"),
        (np.zeros(H, np.float64), "different types"),
    ):
        with pytest.raises(ShapeError, match=message):
            with_sinks(sinks=sinks)
    given = case(lengths=[5, 2])
    with pytest.raises(ShapeError, match="Attention has 8 operands; ONNX knows 7"):
        import_case(replace(given, inputs=[*given.inputs, np.zeros(H, np.float32)]))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            Case("Attention", [normal(B, H, L, D), normal(B, 4, S, D), normal(B, 4, S, E)], {}, 24),
            "4 heads of K and V do not",
        ),
        (
            Case("Attention", [normal(B, H, L, D), normal(B, 3, S, 7), normal(B, 3, S, E)], {}, 24),
            "head sizes of Q and K",
        ),
        (Case("Attention", [normal(B, H, L, D), normal(B, 3, S, D), normal(B, 3, 4, E)], {}, 24), "lengths of K and V"),
        (Case("Attention", [normal(B, H, L, D), normal(B, S, D), normal(B, S, D)], {}, 24), "3 dimensions or of 4"),
        (Case("Attention", [normal(B, L, 9)] * 3, {"q_num_heads": 2, "kv_num_heads": 2}, 24), "2 heads do not divide"),
        (Case("Attention", [normal(B, L, 9)] * 3, {"q_num_heads": 3}, 24), "needs attribute 'kv_num_heads'"),
        (case(mask=normal(3, S)), "does not broadcast"),
        (case(mask=normal(L, S + 1)), "for 5 keys"),
        (case(mask=np.ones((L, S), np.int32)), "must be bool or of Q's type"),
        (case(qk_matmul_output_mode=4), "qk_matmul_output_mode is 4"),
        (case(opset=25, left_window_size=-2), "must be -1 or more"),
        (case(lengths=[1, 2, 3]), "one length per sample"),
        (case(past=2, lengths=[1, 2]), "past_key and nonpad_kv_seqlen"),
        (Case("Attention", [*case().inputs, None, normal(B, 3, 2, D)], {}, 24), "past_key and past_value, or neither"),
    ],
)
def test_operands_that_contradict(broken: Case, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        import_case(broken)


# ---------------------------------------------------------------- RotaryEmbedding


def rotary(*, flat: bool = False, ids: bool = True, size: int = D, opset: int = 23, **attrs: Any) -> Case:
    x = normal(B, L, H * D) if flat else normal(B, H, L, D)
    if flat:
        attrs["num_heads"] = H
    if size != D:
        attrs["rotary_embedding_dim"] = size
    shape = (10, size // 2) if ids else (B, L, size // 2)
    operands = [x, normal(*shape, seed=1), normal(*shape, seed=2)]
    positions = [np.random.default_rng(3).integers(0, 10, (B, L))] if ids else []
    return Case("RotaryEmbedding", [*operands, *positions], attrs, opset)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("size", [D, 4])
@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embedding(flat: bool, ids: bool, size: int, interleaved: int) -> None:
    given = rotary(flat=flat, ids=ids, size=size, interleaved=interleaved)
    check_case(given, "reference", symbolic={0: (0, 1 if flat else 2)} if ids else None)
    check_export(given)


@pytest.mark.parametrize(
    ("operands", "attrs", "message"),
    [
        ([normal(B, L, D), normal(9, 4), normal(9, 4)], {}, "num_heads"),
        ([normal(B, H, L, D), normal(B, L, 3), normal(B, L, 3)], {}, "does not hold half of 8 angles"),
        ([normal(B, H, L, D), normal(B, L + 1, 4), normal(B, L, 4)], {}, "does not fit the length"),
        (
            [normal(B, H, L, D), normal(B, L, 4), normal(B, L, 4)],
            {"rotary_embedding_dim": 10},
            "RotaryEmbedding of 10 entries",
        ),
        ([normal(B, H, L, 7), normal(B, L, 4), normal(B, L, 4)], {}, "even number"),
    ],
)
def test_rotary_embedding_that_contradicts(operands: list[Array], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        import_case(Case("RotaryEmbedding", operands, attrs, 23))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [0, 4])
def test_rotary_embedding_of_own_angles(interleaved: bool, size: int) -> None:
    """``x * cos + turned * sin``, and its export."""
    n = Net(np.float64)
    x, turning = n.input(2, 3, 5, 8), size or 8
    tables = [n.input(2, 5, turning, name=name) for name in ("cos", "sin")]
    graph = n.done(n.op("RotaryEmbedding", x, *tables, attrs=RotaryAttrs(interleaved, size, own_angles=True)))
    feeds = {name: np.random.default_rng(k).standard_normal(d) for k, (name, d) in enumerate(
        {"x": (2, 3, 5, 8), "cos": (2, 5, turning), "sin": (2, 5, turning)}.items())}  # fmt: skip
    (got,) = evaluate(graph, feeds).values()
    head, rest = feeds["x"][..., :turning], feeds["x"][..., turning:]
    other = np.empty_like(head)
    if interleaved:
        other[..., 0::2], other[..., 1::2] = -head[..., 1::2], head[..., 0::2]
    else:
        other[..., : turning // 2], other[..., turning // 2 :] = -head[..., turning // 2 :], head[..., : turning // 2]
    want = head * feeds["cos"][:, None] + other * feeds["sin"][:, None]
    np.testing.assert_allclose(got, np.concatenate([want, rest], -1), rtol=1e-12)
    again = import_model(export_model(graph).to_bytes())
    (exported,) = evaluate(again, feeds).values()
    np.testing.assert_allclose(exported, got, rtol=1e-12)
    with pytest.raises(ShapeError, match=f"does not hold {turning} angles"):
        n.op(
            "RotaryEmbedding",
            x,
            n.input(2, 5, 2, name="few"),
            tables[1],
            attrs=RotaryAttrs(interleaved, size, own_angles=True),
        )


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("parts", "rest"), [(2, 0), (3, 0), (2, 5)])
def test_rotary_embedding_of_parts(own: bool, parts: int, rest: int) -> None:
    """Each part is rotated like a separate head, also in the export."""
    n, size = Net(np.float64), 4 * parts
    x = n.input(2, 3, 5, size + rest)
    width = 4 if own else 2
    tables = [n.input(1, 5, width * parts, name=name) for name in ("cos", "sin")]
    attrs = RotaryAttrs(False, size if rest else 0, own, parts)
    graph = n.done(n.op("RotaryEmbedding", x, *tables, attrs=attrs))
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((2, 3, 5, size + rest))}
    feeds |= {name: rng.standard_normal((1, 5, width * parts)) for name in ("cos", "sin")}
    (got,) = evaluate(graph, feeds).values()
    turned = [
        rotary_embedding(
            feeds["x"][..., 4 * k : 4 * k + 4],
            *(feeds[name][..., width * k : width * (k + 1)] for name in ("cos", "sin")),
            own_angles=own,
        )[0]
        for k in range(parts)
    ]
    np.testing.assert_allclose(got, np.concatenate([*turned, feeds["x"][..., size:]], -1), rtol=1e-12)
    (exported,) = evaluate(import_model(export_model(graph).to_bytes()), feeds).values()
    np.testing.assert_allclose(exported, got, rtol=1e-12)


@pytest.mark.parametrize("parts", [0, 3])
def test_rotary_embedding_of_odd_parts(parts: int) -> None:
    n = Net()
    tables = [n.input(1, 5, 4, name=name) for name in ("cos", "sin")]
    with pytest.raises(ShapeError, match=f"8 entries in {parts} parts; each must be an even number of them"):
        n.op("RotaryEmbedding", n.input(2, 3, 5, 8), *tables, attrs=RotaryAttrs(parts=parts))


# ---------------------------------------------------------------- TensorScatter


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize(("shape", "axis"), [((B, 3, 6, 4), -2), ((B, 6, 4), 1), ((B, 3, 6), 2)])
@pytest.mark.parametrize("start", [None, [0, 4], [1, 3]])
def test_tensor_scatter(mode: str, shape: tuple[int, ...], axis: int, start: Any) -> None:
    update = list(shape)
    update[axis] = 2
    operands = [normal(*shape), normal(*update, seed=1), *([] if start is None else [np.array(start, np.int64)])]
    if mode == "circular" and start is not None:
        operands[2] = operands[2] + 3
    given = Case("TensorScatter", operands, {"axis": axis, "mode": mode}, 24)
    check_case(given, "reference", symbolic={0: (0,), 1: (0,)})
    check_export(given)


@pytest.mark.parametrize("wrong", [S + 1, -1])
def test_more_keys_than_there_are(wrong: int) -> None:
    from optdnn.errors import RunError

    given = case(lengths=[1, wrong])
    with pytest.raises(RunError, match=rf"nonpad_kv_seqlen holds .* for {S} keys"):
        run(import_case(given), given.fed)


def test_tensor_scatter_beyond_the_end() -> None:
    from optdnn.errors import RunError

    given = Case("TensorScatter", [normal(B, 3, 6, 4), normal(B, 3, 2, 4), np.array([0, 5])], {}, 24)
    with pytest.raises(RunError, match="outside of 6"):
        run(import_case(given), given.fed)


@pytest.mark.parametrize(
    ("update", "attrs", "message"),
    [
        (normal(B, 3, 7, 4), {}, "longer than the cache"),
        (normal(B, 2, 2, 4), {}, "does not fit the cache"),
        (normal(1, 3, 6, 4), {"axis": 0}, "axis is the batch's"),
        (normal(B, 3, 2, 4), {"mode": "ring"}, "mode is 'ring'"),
    ],
)
def test_tensor_scatter_that_contradicts(update: Array, attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        import_case(Case("TensorScatter", [normal(B, 3, 6, 4), update], attrs, 24))
