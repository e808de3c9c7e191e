"""Every network of the zoo with and without the vendors' libraries: a missing library removes tactics, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.simulated import check_not_taken, lowered, simulate, tactics
from support.sweep import sweep

from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph, Value
from optdnn.kernels.libraries import providers
from optdnn.kernels.tactic import PROVIDERS
from optdnn.models import zoo
from optdnn.ops.attention import AttentionAttrs

SMALL: dict[str, dict[str, Any]] = {
    "bert_base": {"sequence_length": 16, "width": 0.17, "depth": 0.1, "vocab_size": 50},
    "vit_b_16": {"image_size": 32, "width": 0.17, "depth": 0.1},
    "inception_v3": {"image_size": 80},
    "lstm": {"sequence_length": 4, "input_size": 16},
    "mlp": {"features": 64},
}
"""Options that make a network small. Others get pictures of 32 x 32."""
CALLED = frozenset(zoo.NAMES) - {"lstm"}
"""Networks with operators for which the libraries have tactics."""


UNLIKE = ("resnet18", "lstm", "mlp", "inception_v3", "mobilenet_v2", "vit_b_16", "yolox_s")
"""Networks with unlike operators."""


@cache
def network(name: str) -> Graph:
    known = zoo.options(name)
    given = {"image_size": 32, "width": 0.25, "depth": 0.34, "num_classes": 16, **SMALL.get(name, {})}
    return import_model(zoo.build(name, **{k: v for k, v in given.items() if k in known}))


@pytest.mark.parametrize("name", sweep(UNLIKE, "resnet18", "lstm", "mlp"))
def test_a_missing_library_only_removes_tactics(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = network(name)
    own = lowered(graph, target="cuda:sm_90a", tactics="own")
    memory = own.meta["memory"]
    assert memory["live_bytes"] <= memory["arena_bytes"] <= 1.1 * memory["live_bytes"]
    monkeypatch.setattr(providers, "why_not", lambda: None)  # simulates a machine with a GPU
    for absent in ({"cudnn", "cublaslt"}, {"cudnn"}, set()):
        for check in ("present", "installed"):
            monkeypatch.setattr(providers, check, lambda library, absent=absent: library not in absent)
        providers.providers_here.cache_clear()
        try:
            assert providers.providers_here() == frozenset(PROVIDERS) - absent
            program = lowered(graph, target="cuda:sm_90a", tactics="cudnn,cublaslt")
        finally:
            providers.providers_here.cache_clear()
        used = set(tactics(program))
        if absent == {"cudnn", "cublaslt"}:
            assert program.steps == own.steps
        assert not any(t.endswith(library) for t in used for library in absent)
        if not absent:
            assert any(t.endswith(("cudnn", "cublaslt")) for t in used) == (name in CALLED), used


@pytest.mark.parametrize(("name", "masked"), [("bert_base", True), ("vit_b_16", False)])
def test_attention_by_the_library_means_the_same(name: str, masked: bool) -> None:
    graph = network(name)
    program = lowered(graph, tactics="cudnn,cublaslt")
    found = [s.params["call"]["operation"] for s in program.steps if "call" in s.params]
    heads = [o for o in found if o["name"] == "attention"]
    assert heads
    assert all(bool(o["mask_shape"]) is masked for o in heads)
    feeds = zoo.example_inputs(zoo.build(name, **SMALL[name]))
    want, got = simulate(lowered(graph), feeds), simulate(program, feeds)
    for key, expected in want.items():
        np.testing.assert_allclose(got[key], expected, rtol=0, atol=4e-3 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"softcap": 2.0}, "softcap"),
        ({"left_window_size": 3}, "windows"),
        ({"sinks": True}, "lengths of samples or sinks"),
        ({"size": 12}, "heads of 12 features"),
        ({"mask": 5}, "its mask has fewer columns than there are keys"),
    ],
)
def test_attention_that_the_library_lacks(change: dict[str, Any], why: str) -> None:
    attrs = {k: v for k, v in change.items() if k not in ("size", "mask", "sinks")}
    n = Net()
    q, k, v = (n.input(1, 2, 8, change.get("size", 16), name=name) for name in "qkv")
    mask = [n.input(8, change["mask"], name="mask")] if "mask" in change else []
    mask = [*[None] * 4, n.random(2)] if "sinks" in change else mask
    graph = n.done(n.op("Attention", q, k, v, *mask, attrs=AttentionAttrs(**attrs)))
    check_not_taken(graph, "attention_cudnn", why, tactics="cudnn", no_cubins=True)


@pytest.mark.parametrize(
    ("build", "tactic"),
    [
        (lambda n: n.conv(n.input(2, 16, 9, 9), 16), "conv_cudnn"),
        (lambda n: n.gemm(n.input(8, 16), 16), "gemm_cublaslt"),
        (lambda n: n.op("LayerNormalization", n.input(4, 16), n.random(16)), "norm_cudnn"),
    ],
)
def test_doubles_are_for_other_kernels(build: Callable[[Net], Value], tactic: str) -> None:
    n = Net(np.float64)
    graph = n.done(build(n))
    check_not_taken(graph, tactic, "its type is not fp16, bf16 or fp32", tactics="cudnn,cublaslt", no_cubins=True)
