"""Attention over a cache on a GPU: the kernel compared with its meaning, and decoders launch by launch and token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cached_cases import CASES, JOINT, case, check, operands_of
from support.decoder import decoder, empty, generated, states, tokens
from support.language_models import feeds_of as language_feeds
from support.language_models import language_model
from support.on_gpu import checked_program

import optdnn
from optdnn.kernels.attention import cached_kernel as cached
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch

pytestmark = pytest.mark.hopper

LARGE = {
    "Llama 3, batch 1": case([1025], 32, 8, 128, 4096),
    "Llama 3, batch 16": case([1 + 250 * n for n in range(16)], 32, 8, 128, 4096),
    "Llama 3.2, batch 3": case([4096, 1, 2000], 32, 8, 64, 4096, dtype="bfloat16"),
    "gpt-oss": case([3000, 100], 12, 2, 64, 4096, reach=127, dtype="bfloat16", sinks=True),
}
CONFIGS = [
    cached.Config(4, 1), cached.Config(4, 8), cached.Config(8, 16), cached.Config(8, 8, True), cached.Config(4, 2, True),
    cached.Config(4, 4, True),
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", CASES | LARGE)
def test_the_kernel(name: str, config: cached.Config, tmp_path: Path) -> None:
    from support.bound import bound
    from support.device_memory import Memory

    from optdnn.runtime.cuda.allocator import upload

    c = (CASES | LARGE)[name]
    p, o, memory = c.problem, operands_of(c), Memory()
    made = cached.launch(p, config, of_arch("sm_90a"), o.places)
    partial, arrived = cached.workspace(p, config)
    given = {**o.held, "partial": np.full(partial, 0xFF, np.uint8), "arrived": np.zeros(arrived, np.uint8)}
    at = {n: memory.put(a) for n, a in given.items()}
    launch = bound(made, {n: at[JOINT.get(n, n)] for n in made.operands}, nvrtc.KernelCache(tmp_path))
    results = []
    for _ in range(3):
        upload(at["out"], np.full_like(o.held["out"], np.nan))
        memory.run(launch)
        held = {n: memory.get(at[n], o.held[n].shape, o.held[n].dtype) for n in ("out", "k", "v")}
        results.append(held["out"].tobytes())
    assert not memory.get(at["arrived"], (arrived,), np.dtype(np.uint8)).any()
    memory.free()
    assert results[0] == results[1] == results[2]
    check(c, o, held)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_decoder_launch_by_launch(sinks: bool) -> None:
    model = decoder(heads=8, groups=2, size=64, capacity=64, grouped={} if sinks else None, sinks=sinks)
    engine = optdnn.build(model, target="cuda:sm_90a", precision="fp16", io_dtype="fp16", tactics="heuristic")
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal(a.shape).astype(np.float16) for n, a in empty(model, 0).items()}
    feeds |= {"token": np.full((1, 1), 5), "at": np.array([37])}
    assert sum(e.kind == "CachedAttention" for e in checked_program(engine.program, feeds, 4e-3)) == 2


@pytest.mark.parametrize("sinks", [False, True])
def test_tokens_of_a_decoder(sinks: bool) -> None:
    cupy = pytest.importorskip("cupy")
    model = decoder(heads=8, groups=2, size=32, grouped={} if sinks else None, sinks=sinks)
    want = generated(optdnn.build(model, target="reference"), model, 20)
    engine = optdnn.build(model, target="cuda:sm_90a", precision="fp16", io_dtype="fp16", tactics="heuristic")
    given = {"token": cupy.zeros((1, 1), np.int64), "at": cupy.zeros(1, np.int64)}
    caches = {name: cupy.asarray(a) for name, a in empty(model, 0, np.float16).items()}
    context: Any = engine.context()
    bound = context.bind({**given, **caches}, state=states())
    for k, token in enumerate(tokens(20)):
        given["at"][:], given["token"][:] = k, cupy.asarray(token)
        y = cupy.asnumpy(bound.run()["logits"]).astype(np.float32)
        np.testing.assert_allclose(y, want[k], rtol=0, atol=0.03 * np.abs(want[k]).max())


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "qwen3", "gptoss", "phi2"])
def test_a_language_model_launch_by_launch(family: str) -> None:
    model = language_model(family, size=16)
    feeds = language_feeds(model, 1, 7)
    capacity = {n: (*a.shape[:2], 16, a.shape[3]) for n, a in feeds.items() if n.startswith("past")}
    feeds |= {n: np.zeros(s, np.float16) for n, s in capacity.items()}
    feeds["attention_mask"] = np.ones((1, 16), np.int64)
    feeds["attention_mask"][:, 8:] = 0
    shapes = {n: a.shape for n, a in feeds.items()}
    engine = optdnn.build(
        model, target="cuda:sm_90a", precision="fp16", io_dtype="fp16", tactics="heuristic", shapes=shapes
    )
    assert sum(e.kind == "CachedAttention" for e in checked_program(engine.program, feeds, 8e-3)) == 2
