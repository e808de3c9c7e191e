"""Decisions of a build for several GPUs: the split with the smaller predicted time, and whether an engine fits the memory."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from support.ranks import decoder, mlp

import optdnn
from optdnn.config import BuildOptions
from optdnn.devices import chosen_split, memory_of, seconds_of, split_for
from optdnn.errors import NotMet, UsageError
from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.kernels.libraries.collective import predicted_seconds
from optdnn.runtime.cuda.gpu_facts import named

GPU = named("h200")
OPTIONS = BuildOptions(target="simulate", precision="fp16", devices=2)


def wide(rows: int, world: int = 2, **options: Any) -> tuple[str, str]:
    """The split of a large feed-forward network."""
    graph = import_model(mlp(rows, 2048, 4096, blocks=1))
    return chosen_split(graph, replace(OPTIONS, devices=world, **options), GPU)


@pytest.mark.slow
def test_many_rows_are_split_by_the_batch_and_few_by_weights() -> None:
    """For many rows, the sums take longer than the weights that each GPU reads; for few rows, the weights take longer."""
    assert wide(16384)[0] == "batch"
    split, why = wide(4)
    assert split == "weights"
    assert re.fullmatch(r"predicted: batch [\d.]+ ms, weights [\d.]+ ms", why)


@pytest.mark.slow
def test_the_only_split_that_there_is() -> None:
    assert wide(3) == ("weights", "split by batch, " + wide(3)[1].partition(", ")[2])
    assert "3 rows of the batch do not divide into 2 equal parts" in wide(3)[1]
    convolution = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
        agraph (float[6, 3, 4, 4] x, float[6, 3, 1, 1] w) => (float[6, 3, 4, 4] y) { y = Relu (x) }""")
    split, why = chosen_split(import_model(convolution), OPTIONS, GPU)
    assert split == "batch"
    assert "no products of weights" in why


def test_whole_weights_that_do_not_fit_are_split() -> None:
    split, why = wide(16384, memory_limit=10_000_000)
    assert split == "weights"
    assert why == "all weights, 33.6 MB, are more than the 10 MB that are allowed on a GPU"


def test_a_build_reports_its_split() -> None:
    said: list[str] = []
    model, _, _ = decoder()
    engine = optdnn.build(model, target="simulate", precision="fp16", devices=2, progress=said.append)
    assert engine.meta["options"]["split"] == "weights"
    assert any(line.startswith("split weights: split by batch, ") for line in said)
    engine = optdnn.build(mlp(4), target="reference", devices=2)
    assert engine.meta["options"]["split"] == "batch"


def rank_0(graph: Graph, split: str) -> Graph:
    made = graph.copy()
    split_for(made, replace(OPTIONS, split=split), 0)
    return made


def test_times_have_the_collectives() -> None:
    graph = import_model(mlp(4096, 1024, 4096, blocks=2))
    whole, batch, weights = (
        seconds_of(g, OPTIONS, GPU) for g in (graph, rank_0(graph, "batch"), rank_0(graph, "weights"))
    )
    assert 0.4 * whole < batch < 0.7 * whole
    sums = 2 * predicted_seconds("AllReduce", 4096 * 1024 * 2, 2)
    assert weights == pytest.approx(whole / 2 + sums, rel=0.2)


def test_the_faster_way_of_a_sum_is_predicted() -> None:
    for kind, nbytes, two, four in (
        ("AllReduce", 8192, 2.3e-6, 2.8e-6),
        ("AllReduce", 16384, 2.5e-6, 2.9e-6),
        ("AllReduce", 65536, 2.8e-6, 3.9e-6),
        ("AllGather", 256512, 3.1e-6, 4.0e-6),
    ):
        for world, seconds in ((2, two), (4, four)):
            assert predicted_seconds(kind, nbytes, world) == pytest.approx(seconds, rel=0.2)
    assert predicted_seconds("AllReduce", 25e6, 2) == pytest.approx(107e-6, rel=0.01)
    assert predicted_seconds("AllReduce", 16384, 64) > 7e-6  # kernels over peer memory support at most 8
    assert predicted_seconds("AllGather", 25e6, 2) < predicted_seconds("AllReduce", 25e6, 2)


# ---------------------------------------------------------------- memory


def test_weights_beyond_the_memory_of_one_gpu_run_on_two() -> None:
    model = mlp(4, 256, 1024)
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 256)).astype(np.float32)}
    whole = optdnn.build(model, target="simulate")
    weights, context = memory_of(whole.program)
    assert weights >= 2 * 2 * 256 * 1024 * 4
    limit = 3 * weights // 4
    needs = r"needs 4\.\d+ MB of memory on a GPU, 4\.\d+ MB for weights; 3\.\d+ MB are allowed"
    with pytest.raises(NotMet, match=needs + r"\n(.*)--devices 2$"):
        optdnn.build(model, target="simulate", memory_limit=limit)
    two = optdnn.build(model, target="simulate", devices=2, memory_limit=limit)
    np.testing.assert_allclose(two.run(feeds)["y"], whole.run(feeds)["y"], rtol=1e-4, atol=1e-4)
    assert two.meta["options"] | {"split": "weights", "memory_limit": limit} == two.meta["options"]
    optdnn.build(model, target="simulate", memory_limit=weights + context)


def test_further_advice_where_memory_is_short() -> None:
    model = mlp(4, 256, 1024)
    with pytest.raises(NotMet, match=r"on each GPU(?s:.*)--split weights"):
        optdnn.build(model, target="simulate", devices=2, split="batch", memory_limit=3_000_000)
    with pytest.raises(NotMet, match=r"on each GPU(?s:.*)--devices 4"):
        optdnn.build(model, target="simulate", devices=2, memory_limit=2_000_000)
    with pytest.raises(NotMet, match="use a smaller batch"):
        optdnn.build(model, target="simulate", memory_limit=1)


def test_limits_that_no_build_has() -> None:
    with pytest.raises(UsageError, match="memory_limit must be positive, not 0"):
        BuildOptions(memory_limit=0)
    with pytest.raises(UsageError, match="memory_limit is for GPUs, not for target 'cpu'"):
        BuildOptions(target="cpu", memory_limit=1)
