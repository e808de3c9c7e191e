"""The tactic of attention over a cache: the operators that it fuses, its refusals, and its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.decoder import decoder
from support.net import Net
from support.simulated import TOLERANCE, kinds, lowered, simulate

import optdnn
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.ops.attention import AttentionAttrs, RotaryAttrs, TensorScatterAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.types import FP16, FP64, INT64

CAPACITY, SIZE = 24, 32


def step(
    *, batch: int = 2, heads: int = 4, groups: int = 2, rows: int = 1, turned: bool = True, filled: bool = True, mask: bool = False,
    circular: bool = False, apart: bool = False, read: bool = False, other_angles: bool = False, dtype: Any = FP16, capacity: int = CAPACITY, outputs: int = 1,
    values: int = SIZE, positions: Any = INT64, known: bool = False, own: bool = False, parts: int = 1, sinks: str = "", **attrs: Any,
) -> Graph:  # fmt: skip
    """One step of a decoder over caches of fp16, which are results, too.

    ``known``: the new key is a constant. ``own``: each feature has its own angle. ``sinks``: "constant", "computed" or "strided".
    """
    n = Net(dtype)
    q, k, v = (
        n.op("Abs", n.input(batch, c, rows, size, name=x))
        for x, c, size in zip("qkv", (heads, groups, groups), (SIZE, SIZE, values), strict=True)
    )
    if known:
        k = n.random(batch, groups, rows, SIZE)
    at = n.input(batch, name="at", dtype=positions)
    angles = [n.input(batch, rows, SIZE if own else SIZE // 2, name=x) for x in ("cos", "sin")]
    if turned:
        attributes = RotaryAttrs(own_angles=own, parts=parts)
        q = n.op("RotaryEmbedding", q, *angles, attrs=attributes)
        k = n.op("RotaryEmbedding", k, *(angles[::-1] if other_angles else angles), attrs=attributes)
    where = TensorScatterAttrs(2, "circular" if circular else "linear")
    starts = [at, n.op("Add", at, n.const([1], positions)) if apart else at]
    caches = [
        n.op("TensorScatter", n.input(batch, groups, capacity, size, name=f"past {x}"), new, start, attrs=where)
        for x, new, start, size in zip("kv", (k, v), starts, (SIZE, values), strict=True)
    ]
    rest = [n.input(batch, 1, rows, capacity, name="mask")] if mask else [None]
    length = n.op("Add", at, n.const([rows], positions)) if filled else None
    more = (
        []
        if not sinks
        else [n.random(heads, offset=2.0)]
        if sinks == "constant"
        else [n.op("Abs", n.input(heads, name="sinks"))]
    )
    if sinks == "strided":
        both = n.op("Reshape", n.op("Abs", n.input(2 * heads, name="both")), n.ints(heads, 2))
        more = [n.op("Squeeze", n.op("Split", both, attrs=SplitAttrs(1, 2), outputs=2)[1], n.ints(1))]
    made = n.op(
        "Attention", q, *caches, *rest, None, None, length, *more, attrs=AttentionAttrs(**attrs), outputs=outputs
    )
    return n.done(*(made if outputs > 1 else [made]), *caches, *([n.op("Tanh", caches[0])] if read else []))


def feeds_of(graph: Graph, at: tuple[int, ...] = (5, 17)) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for i in graph.inputs:
        out = graph.op(i).outputs[0]
        feeds[out.name] = rng.standard_normal(out.type.static_shape).astype(out.type.dtype)
    feeds["at"] = np.array(at)
    return feeds


TAKEN: dict[str, Callable[[], Graph]] = {
    "turned": step,
    "not turned": lambda: step(turned=False),
    "angles of their own": lambda: step(other_angles=True),
    "angles of each feature": lambda: step(own=True),
    "angles of two parts": lambda: step(parts=2),
    "a window": lambda: step(is_causal=True, left_window_size=6),
    "a softcap": lambda: step(softcap=2.0, scale=0.3),
    "sinks": lambda: step(sinks="constant"),
    "computed sinks": lambda: step(sinks="computed", is_causal=True, left_window_size=6),
    "sinks that are not contiguous": lambda: step(sinks="strided"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_accepted_networks(name: str) -> None:
    graph = TAKEN[name]()
    program = lowered(graph, "fp16", io_dtype="fp16")
    found = kinds(program)
    assert found.count("CachedAttention") == 1
    assert "TensorScatter" not in found
    assert found.count("RotaryEmbedding") == 2 * name.startswith("angles of")
    feeds = feeds_of(graph)
    got, want = simulate(program, feeds), evaluate(graph, feeds)
    for key, w in want.items():
        scale = float(np.abs(np.asarray(w, np.float32)).max())
        np.testing.assert_allclose(got[key], w, rtol=0, atol=TOLERANCE["fp16"] * scale, err_msg=key)


@pytest.mark.parametrize(
    ("because", "changes"),
    [
        ("the number of filled keys of a cache is unknown", {"filled": False}),
        ("it has a mask", {"mask": True}),
        ("writes no positions of a cache", {"circular": True}),
        ("has other readers", {"read": True}),
        ("keys and values are written at other positions", {"apart": True}),
        ("it is for one new position, not 2", {"rows": 2}),
        ("groups of up to 16 are needed", {"heads": 34}),
        ("its keys, values or weights are also outputs", {"outputs": 4}),
        ("values of 16 features with queries of 32", {"values": 16}),
        ("its softmax is fp32", {"softmax_precision": FP64}),
        ("its positions are not 32-bit or 64-bit integers", {"positions": np.int16}),
        ("its new rows are constant", {"known": True, "turned": False}),
    ],
)
def test_refusals(because: str, changes: dict[str, Any]) -> None:
    program = lowered(step(**changes), "fp16", io_dtype="fp16")
    assert "CachedAttention" not in kinds(program)
    (row,) = (t for t in program.meta["tactics"] if t["kind"] == "Attention")
    assert because in next(r["reason"] for r in row["refused"] if r["tactic"] == "attention_cached")


def test_other_types_run_elsewhere() -> None:
    program = lowered(step(dtype=np.float32), "fp32")
    assert "CachedAttention" not in kinds(program)


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [False, True])
def test_launches_of_a_layer(sinks: bool) -> None:
    """A decoder layer: norm and joint product, attention, product, norm and gated products, product."""
    model = decoder(heads=16, groups=4, size=64, capacity=64, grouped={} if sinks else None, sinks=sinks)
    program = optdnn.build(model, target="cuda:sm_90a", precision="fp16", io_dtype="fp16", no_cubins=True).program
    found = [k for k in kinds(program) if k not in ("Gather", "Copy", "Pointwise", "JointPointwise")]
    layer = ["RowProduct", "CachedAttention", "Conv", "RowProduct", "Conv"]
    assert found == [*layer, *layer, "RMSNormalization", "Conv"]


@pytest.mark.parametrize(("arch", "blocks"), [("sm_80", {1}), ("sm_89", {1}), ("sm_90a", {2})])
def test_blocks_form_clusters_where_the_gpu_has_them(arch: str, blocks: set[int]) -> None:
    model = decoder(heads=8, groups=2, size=64, capacity=512)
    options: dict[str, Any] = {"precision": "fp16", "io_dtype": "fp16", "tactics": "heuristic", "no_cubins": True}
    program = optdnn.build(model, target=f"cuda:{arch}", **options).program
    steps = [s for s in program.steps if s.params["op"]["kind"] == "CachedAttention"]
    assert {s.params["launch"]["cluster"] for s in steps} == blocks
