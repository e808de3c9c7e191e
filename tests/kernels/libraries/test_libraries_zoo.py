"""Every network of the zoo without the vendors' libraries, and on them: a missing one removes tactics, and nothing else."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.simulated import lowered, simulate
from support.sweep import sweep

from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.kernels.libraries import providers
from optdnn.kernels.tactic import PROVIDERS
from optdnn.models import zoo
from optdnn.ops.attention import AttentionAttrs
from optdnn.runtime.program import Program

SMALL: dict[str, dict[str, Any]] = {
    "bert_base": {"sequence_length": 16, "width": 0.17, "depth": 0.1, "vocab_size": 50},
    "vit_b_16": {"image_size": 32, "width": 0.17, "depth": 0.1},
    "inception_v3": {"image_size": 80},
    "lstm": {"sequence_length": 4, "input_size": 16},
    "mlp": {"features": 64},
}
"""Options that make a network small; those of pictures of 32 x 32 where nothing else is said."""
CALLED = frozenset(zoo.NAMES) - {"lstm"}
"""Networks that the libraries have something for."""


@cache
def network(name: str) -> Graph:
    known = zoo.options(name)
    given = {"image_size": 32, "width": 0.25, "depth": 0.34, "num_classes": 16, **SMALL.get(name, {})}
    return import_model(zoo.build(name, **{k: v for k, v in given.items() if k in known}))


def tactics_of(program: Program) -> set[str]:
    return {t["tactic"] for t in program.meta["tactics"]}


@pytest.mark.parametrize("name", sweep(zoo.NAMES, "resnet18", "lstm", "mlp"))
def test_a_missing_library_only_removes_tactics(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = network(name)
    own = lowered(graph, target="cuda:sm_90a", tactics="own", no_cubins=True)
    memory = own.meta["memory"]
    assert memory["live_bytes"] <= memory["arena_bytes"] <= 1.1 * memory["live_bytes"]
    monkeypatch.setattr(providers, "why_not", lambda: None)  # as on a machine with a GPU
    for absent in ({"cudnn", "cublaslt"}, {"cudnn"}, set()):
        for check in ("present", "installed"):
            monkeypatch.setattr(providers, check, lambda library, absent=absent: library not in absent)
        providers.providers_here.cache_clear()
        try:
            assert providers.providers_here() == frozenset(PROVIDERS) - absent
            program = lowered(graph, target="cuda:sm_90a", tactics="cudnn,cublaslt", no_cubins=True)
        finally:
            providers.providers_here.cache_clear()
        used = tactics_of(program)
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
    [({"softcap": 2.0}, "softcap"), ({"left_window_size": 3}, "windows"), ({"size": 12}, "heads of 12 features")],
)
def test_attention_that_the_library_lacks(change: dict[str, Any], why: str) -> None:
    size = change.pop("size", 16)
    n = Net()
    q, k, v = (n.input(1, 2, 8, size, name=name) for name in "qkv")
    program = lowered(n.done(n.op("Attention", q, k, v, attrs=AttentionAttrs(**change))), tactics="cudnn")
    (row,) = [t for t in program.meta["tactics"] if t["kind"] == "Attention"]
    assert any(r["tactic"] == "attention_cudnn" and why in r["reason"] for r in row["refused"])
