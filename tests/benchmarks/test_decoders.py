"""The decoders of the benchmark: they build, count their bytes, and decode with caches in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import optdnn
from benchmarks import decoders
from benchmarks.workloads import group, parse


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 4])
def test_a_token_beside_the_reference(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small = decoders.Decoder(128, 256, 4, 2, 32, 1, 128, 16, 5)
    monkeypatch.setitem(decoders.DECODERS, "tiny", small)
    (workload,) = parse(f"decoders/tiny:2:bits={bits}:layers=2")
    model, feeds = decoders.model(workload), decoders.feeds(workload, 1)
    engines = [optdnn.build(model, target=t, precision=p) for t, p in (("simulate", "fp16"), ("reference", "fp32"))]
    got, want = (
        e.run({k: v.astype(s.dtype) for k, v in feeds.items() for s in e.inputs if s.name == k}) for e in engines
    )
    for name, w in want.items():
        wide: Any = np.asarray(w, np.float32)
        np.testing.assert_allclose(
            got[name].astype(np.float32), wide, rtol=0, atol=0.02 * np.abs(wide).max(), err_msg=name
        )
    assert set(decoders.states(workload)) < set(got)
    assert engines[0].meta["operators"]["Attention"] == 2


def test_the_same_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.torch_decoder import Model

    monkeypatch.setitem(decoders.DECODERS, "tiny", decoders.Decoder(128, 256, 4, 2, 32, 2, 128, 16, 5))
    (workload,) = parse("decoders/tiny:2")
    model, feeds = decoders.model(workload), decoders.feeds(workload, 1)
    engine = optdnn.build(model, target="reference", precision="fp32")
    want = engine.run({k: v.astype(s.dtype) for k, v in feeds.items() for s in engine.inputs if s.name == k})["logits"]
    module = Model(decoders.Decoder.of(workload), model, feeds, device="cpu")
    with torch.no_grad():
        got = module(torch.from_numpy(feeds["token"]), torch.from_numpy(feeds["at"][:1])).float().numpy()
    np.testing.assert_allclose(got, want.astype(np.float32), rtol=0, atol=0.02 * np.abs(want).max())


def test_a_prompt_is_its_tokens_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    small = decoders.Decoder(128, 256, 4, 2, 32, 2, 128, 16)
    monkeypatch.setitem(decoders.DECODERS, "tiny", small)
    prompt, one = (parse(f"decoders/tiny:2:{setting}")[0] for setting in ("tokens=5", "position=0"))
    whole, step = (optdnn.build(decoders.model(w), target="reference", precision="fp32") for w in (prompt, one))
    feeds = decoders.feeds(prompt, 1)
    assert not feeds["at"].any()
    got = whole.run({k: v.astype(s.dtype) for k, v in feeds.items() for s in whole.inputs if s.name == k})
    given, out = dict(feeds), {}
    for k in range(5):
        given |= {"token": feeds["token"][:, k : k + 1], "at": np.full(2, k)}
        out = step.run({k: v.astype(s.dtype) for k, v in given.items() for s in step.inputs if s.name == k})
        given |= {i: out[o] for o, i in decoders.states(one).items()}
    np.testing.assert_allclose(got["logits"], out["logits"], rtol=0, atol=2e-3 * np.abs(out["logits"]).max())


def test_operations() -> None:
    layer, keys = 4096 * (4096 + 2048) + 4096**2 + 3 * 4096 * 14336, 2 * 4096 * 1024
    products = 2048 * (31 * layer + keys) + layer - keys + 4096 * 128256
    attention = 2 * 4096 * (31 * (2048 * 2049 // 2) + 2048)
    assert decoders.Decoder.of(parse("decoders/llama_8b:1:tokens=2048")[0]).flops == 2 * (products + attention)
    (one,) = parse("decoders/llama_8b:1:position=0")
    assert decoders.Decoder.of(one).flops == 2 * (32 * layer + 4096 * 128256 + 32 * 2 * 4096)


def test_bytes() -> None:
    (whole,) = parse("decoders/llama_8b:1")
    assert 15.0e9 < decoders.Decoder.of(whole).nbytes < 15.3e9
    (packed,) = parse("decoders/llama_8b:1:bits=4")
    assert 0.25 < decoders.Decoder.of(packed).nbytes / decoders.Decoder.of(whole).nbytes < 0.28
    assert {w.source for w in group("decoders")} == {"decoders"}
