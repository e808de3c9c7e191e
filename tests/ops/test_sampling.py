"""SampleToken: probabilities, ties, edges of the settings, repeatable randomness; and builds that add it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from known import infer
from support.sampling_cases import graph

import optdnn
from optdnn.errors import ShapeError, UnsupportedError, UsageError
from optdnn.importers.sampling import with_sampling
from optdnn.ir.export_onnx import export_model
from optdnn.runtime.reference.sampling import philox, sample_token
from optdnn.types import FP16, FP32, INT64, Array, tensor

F = np.float32


def tokens(
    logits: Any, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, draws: int = 1
) -> Array:
    """The tokens of the first positions of one sequence."""
    one = np.ones(draws, np.int64)
    rows = np.broadcast_to(np.asarray(logits, F), (draws, len(logits)))
    (found,) = sample_token(rows, F(temperature) * one.astype(F), one * top_k, F(top_p) * one.astype(F), one * seed,
                            np.arange(draws))  # fmt: skip
    return found[:, 0]


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [(0, 0, (0x6627E8D5, 0xE169C58D)), (-1, -1, None), (1 << 40 | 5, 3, None)],
)
def test_random_bits_are_those_of_philox(key: int, counter: int, words: Any) -> None:
    """The published vector. Every bit of key and counter matters."""
    bits = philox(key, counter)
    if words is not None:
        assert (bits & 0xFFFFFFFF, bits >> 32) == words
    assert bits not in {philox(key ^ 1 << k, counter) for k in range(64)}
    assert bits not in {philox(key, counter ^ 1 << k) for k in range(64)}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.6, 7, 1.0), (1.7, 0, 0.8), (0.9, 9, 0.75)]
)
def test_the_share_of_each_token(temperature: float, top_k: int, top_p: float) -> None:
    """A chi-squared test of 4,000 draws of 20 tokens. By chance, one seed in a million exceeds the bound."""
    logits = np.random.default_rng(5).standard_normal(20) * 2
    shares = np.exp(logits / temperature)
    order = np.argsort(-shares)
    kept = order[: top_k or None]
    shares /= shares[kept].sum()
    kept = kept[np.cumsum(shares[kept]) - shares[kept] < top_p]
    wanted = np.zeros(20)
    wanted[kept] = shares[kept] / shares[kept].sum()
    draws = 4000
    found = np.bincount(tokens(logits, temperature, top_k, top_p, draws=draws), minlength=20)
    assert not found[wanted == 0].any()
    expected = wanted[kept] * draws
    assert ((found[kept] - expected) ** 2 / expected).sum() < len(kept) + 6.5 * np.sqrt(2 * len(kept)) + 10
    assert len(kept) > 2


def test_ties() -> None:
    tied = [1.0, 3.0, 3.0, 2.0, 3.0]
    assert tokens(tied, temperature=0).tolist() == [1], "greedy takes the first"
    assert set(tokens(tied, top_k=1, draws=50)) == {1}
    assert set(tokens(tied, top_k=2, draws=99)) == {1, 2, 4}, "as large as the second one"
    assert set(tokens(tied, top_p=0.01, draws=99)) == {1, 2, 4}, "as probable as the last one"
    assert set(tokens([0.0, -0.0], top_k=1, draws=9)) == {0}


def test_edges_of_the_settings() -> None:
    logits = np.random.default_rng(0).standard_normal(50)
    best = int(logits.argmax())
    for settings in ({"temperature": 0.0}, {"temperature": -1.0}, {"temperature": np.nan}, {"top_k": 1}, {"top_p": 0.0},
                     {"temperature": 1e-40}):  # fmt: skip
        assert set(tokens(logits, draws=20, **settings)) == {best}, settings
    for settings in ({"top_p": 1.0}, {"top_p": 2.0}, {"top_k": -3}, {"top_k": 50}, {"top_k": 1000}):
        np.testing.assert_array_equal(tokens(logits, draws=40, **settings), tokens(logits, draws=40))
    assert tokens([0.0, np.nan]).tolist() == tokens([np.inf, 0.0]).tolist() == tokens([-np.inf] * 3).tolist() == [-1]
    assert set(tokens([-np.inf, 1.0, 0.0], draws=40)) == {1, 2}


def test_seed_and_position_alone_decide() -> None:
    logits = np.random.default_rng(0).standard_normal(1000)
    first = tokens(logits, draws=30)
    np.testing.assert_array_equal(first, tokens(logits, draws=30))
    np.testing.assert_array_equal(first[:10], tokens(logits, draws=10))
    assert (first != tokens(logits, draws=30, seed=1)).mean() > 0.8
    assert len(set(first)) > 20


def test_what_does_not_fit() -> None:
    good = [tensor(FP32, 2, 9), tensor(FP32, 2), tensor(INT64, 2), tensor(FP32, 2), tensor(INT64, 2), tensor(INT64, 2)]
    assert infer("SampleToken", *good).types == (tensor(INT64, 2, 1),)
    for slot, wrong, message in (
        (0, tensor(INT64, 2, 9), "floating-point"), (0, tensor(FP32, 2, 3, 9), "2 dimensions"), (0, tensor(FP32, 2, 0), "no token"),
        (1, tensor(INT64, 2), "temperature is int64"), (3, tensor(FP32, 3), "one number per sequence"), (4, tensor(INT64), "1 dim"),
    ):  # fmt: skip
        with pytest.raises(ShapeError, match=message):
            infer("SampleToken", *good[:slot], wrong, *good[slot + 1 :])
    with pytest.raises(UnsupportedError, match="no library samples"):
        export_model(graph(9))


def scorer(shape: str = "batch, length, 11", extra: str = "") -> onnx.ModelProto:
    """Logits are rows of a table."""
    table = np.random.default_rng(3).standard_normal((11, 11)).astype(F) * 2
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        scorer (int64[batch, length] ids{extra}) => (float[{shape}] logits) {{ logits = Gather(table, ids) }}""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    return model


@pytest.mark.parametrize("target", ["reference", "cpu", "simulate"])
def test_a_build_samples_the_row_that_counts(target: str) -> None:
    engine = optdnn.build(scorer(), target=target, shapes={"ids": (2, 3)}, sample="logits")
    assert [s.name for s in engine.outputs] == ["next_token"]
    assert engine.outputs[0].shape == (2, 1)
    ids, two = np.array([[1, 2, 3], [4, 5, 6]]), np.ones(2, np.int64)
    given = {"ids": ids, "sample.row": np.array([2, 0]), "sample.temperature": np.array([0, 1], F), "sample.top_k": 0 * two,
             "sample.top_p": two.astype(F), "sample.seed": two, "sample.position": two}  # fmt: skip
    table = onnx.numpy_helper.to_array(scorer().graph.initializer[0])
    wanted = [int(table[3].argmax()), int(tokens(table[4], seed=1, draws=2)[1])]
    assert engine.run(given)["next_token"].tolist() == [[t] for t in wanted]
    assert engine.meta["options"]["sample"] == "logits"


def test_settings_keep_their_types() -> None:
    engine = optdnn.build(
        scorer(), target="simulate", precision="fp16", io_dtype="fp16", shapes={"ids": (1, 1)}, sample="logits"
    )
    assert {s.name: s.dtype for s in engine.inputs if s.name.startswith("sample.t")} == {
        "sample.temperature": FP32, "sample.top_k": INT64, "sample.top_p": FP32,
    }  # fmt: skip
    (step,) = (s for s in engine.program.steps if s.params["op"]["kind"] == "SampleToken")
    assert engine.program.buffers[step.inputs[0]].dtype == FP16


def test_a_build_with_ranges_makes_plans_that_sample() -> None:
    shapes = {"ids": (1, optdnn.DimRange(1, 1, 4))}
    engine = optdnn.build(scorer(), target="simulate", shapes=shapes, sample="logits")
    one = np.ones(1, np.int64)
    given = {"sample.row": one, "sample.temperature": np.zeros(1, F), "sample.top_k": one, "sample.top_p": np.ones(1, F),
             "sample.seed": one, "sample.position": one}  # fmt: skip
    table = onnx.numpy_helper.to_array(scorer().graph.initializer[0])
    assert engine.run({"ids": np.array([[5, 7, 1]]), **given})["next_token"].tolist() == [[int(table[7].argmax())]]


def test_outputs_that_are_no_logits() -> None:
    with pytest.raises(UsageError, match=r"no output 'logit'.*\n.*did you mean 'logits'"):
        with_sampling(scorer(), "logit")
    flat = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> m (float[3] x) => (float[3] y) { y = Abs(x) }'
    )
    with pytest.raises(UsageError, match="output 'y' has 1 axes"):
        with_sampling(flat, "y")
    twice = scorer(extra=", float[2] next_token")
    with pytest.raises(UsageError, match="'next_token' already"):
        with_sampling(twice, "logits")
    with pytest.raises(UsageError, match="sample must name an output"):
        optdnn.build(scorer(), sample=3)  # type: ignore[arg-type]
