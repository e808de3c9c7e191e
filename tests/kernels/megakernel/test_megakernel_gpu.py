"""Megakernels on a GPU: single jobs compared with their meaning, all jobs in one launch, and generated tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.decoder import decoder, empty, generated, states, tokens

import optdnn
from optdnn.lowering import megakernels
from optdnn.runtime.cuda.trials.check import check_arena, check_steps, run_singly

pytestmark = pytest.mark.hopper


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks get megakernels, too."""
    monkeypatch.setattr(megakernels, "gains", lambda run, gpu: True)


def engine_of(model: Any, precision: str = "fp16", **options: Any) -> Any:
    return optdnn.build(
        model, **{"target": "cuda", "precision": precision, "io_dtype": precision, "tactics": "heuristic", **options}
    )


def options_of(grouped: dict[str, Any] | None) -> dict[str, Any]:
    """Options of a decoder: the attributes of its GroupQueryAttention (None: it has none), and whether it has sinks."""
    own = None if grouped is None else {k: v for k, v in grouped.items() if k != "sinks"}
    return {"grouped": own, "sinks": bool(grouped and grouped.get("sinks"))}


@pytest.mark.parametrize(
    ("heads", "groups", "size", "capacity", "at", "grouped"),
    [
        (32, 8, 64, 2048, 1500, None), (14, 2, 64, 600, 599, None), (12, 2, 128, 1000, 700, None),
        (32, 8, 64, 2048, 1500, {"local_window_size": 300, "rotary_interleaved": 1}),
        (14, 2, 64, 600, 50, {"local_window_size": 100, "softcap": 20.0}),
        (12, 2, 128, 1000, 999, {"softcap": 5.0, "rotary_interleaved": 1}),
        (64, 8, 64, 1000, 700, {"sinks": True, "local_window_size": 128}), (14, 2, 64, 600, 3, {"sinks": True, "softcap": 9.0}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_decoder_job_by_job_and_in_one_launch(
    heads: int, groups: int, size: int, capacity: int, at: int, grouped: dict[str, Any] | None, precision: str
) -> None:
    model = decoder(heads=heads, groups=groups, size=size, capacity=capacity, **options_of(grouped))
    context = engine_of(model, precision).context()
    assert context.program.meta["runs"][0]["jobs"] >= 10
    assert max(map(len, context.runner.groups)) >= 10
    rng = np.random.default_rng(0)
    wanted = {s.name: s.dtype for s in context.signature.inputs}
    feeds = {n: rng.standard_normal(a.shape).astype(wanted[n]) for n, a in empty(model, 0).items()}
    feeds |= {"token": np.full((1, 1), 5), "at": np.array([at])}
    found = check_steps(context, feeds)
    assert not [e for e in found if not e.error < (4e-3 if precision == "fp16" else 3e-2)]
    joined, alone, again = context.run(feeds), run_singly(context, feeds), context.run(feeds)
    for name, y in joined.items():
        assert y.tobytes() == alone[name].tobytes() == again[name].tobytes(), name
    assert not check_arena(context.runner, feeds)


@pytest.mark.parametrize(
    "grouped", [None, {"local_window_size": 7, "softcap": 10.0, "rotary_interleaved": 1}, {"sinks": True}]
)
def test_tokens_of_a_decoder(grouped: dict[str, Any] | None) -> None:
    """Caches in place: the graph of bound arrays has the joined launch, too."""
    cupy = pytest.importorskip("cupy")
    model = decoder(heads=16, groups=4, size=64, **options_of(grouped))
    want = generated(optdnn.build(model, target="reference"), model, 20)
    context = engine_of(model).context()
    assert context.program.meta["runs"]
    given = {"token": cupy.zeros((1, 1), np.int64), "at": cupy.zeros(1, np.int64)}
    caches = {name: cupy.asarray(a) for name, a in empty(model, 0, np.float16).items()}
    bound = context.bind({**given, **caches}, state=states())
    for k, token in enumerate(tokens(20)):
        given["at"][:], given["token"][:] = k, cupy.asarray(token)
        y = cupy.asnumpy(bound.run()["logits"]).astype(np.float32)
        np.testing.assert_allclose(y, want[k], rtol=0, atol=0.03 * np.abs(want[k]).max())
