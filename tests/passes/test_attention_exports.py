"""Small transformers from both of torch's exporters, sizes symbolic: each attention ends as one node, which computes the same.

And a block of Keras by tf2onnx, transformers of the zoo, and the shared graphs. (The first two kinds are made by
tests/golden/make_attention_exports.py and make_keras_exports.py.)
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.shared import needs_shared_graphs, shared_network
from support.sweep import in_turn

from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate, promote
from optdnn.ir.graph import Graph
from optdnn.models import zoo
from optdnn.passes.base import PassContext, run_pipeline
from optdnn.passes.pipelines import PIPELINE
from optdnn.types import Array

TARGET = "cuda:sm_90a"
FILES = [Path(__file__).parents[1] / "golden" / f"{name}_exports.tar.xz" for name in ("attention", "keras")]
ATTENTIONS = {
    "vit": 1,
    "swin": 2,  # plain and shifted windows
    "bert": 1,
    "gpt2": 1,
    "llama": 1,  # grouped queries, rotary positions
    "t5": 6,  # two layers: relative positions, in encoder and decoder, and cross attention
    "whisper": 3,
    "clip": 2,  # text and pictures
    "deberta": 1,  # content to position and position to content
}


@pytest.fixture(scope="module")
def exports() -> dict[str, onnx.ModelProto]:
    found = {}
    for file in FILES:
        with tarfile.open(file) as tar:
            found |= {m.name: onnx.load_model_from_string(tar.extractfile(m).read()) for m in tar}  # type: ignore[union-attr]
    return found


def feeds(names: list[str]) -> dict[str, Array]:
    """Three samples of other lengths than the export's, the last of them padded."""
    rng = np.random.default_rng(0)
    mask, later = np.ones((3, 9), np.int64), np.ones((3, 4), np.int64)
    mask[2, 6:] = later[2, 3:] = 0
    found = {
        "input_ids": rng.integers(1, 50, (3, 9)),
        "attention_mask": mask,
        "decoder_input_ids": rng.integers(1, 50, (3, 4)),
        "decoder_attention_mask": later,
        "pixel_values": rng.standard_normal((3, 3, 16, 16)),
        "input_features": rng.standard_normal((3, 4, 20)),
    }
    return {n: found[n] for n in names}


@pytest.mark.parametrize(("name", "form"), in_turn(ATTENTIONS, "ts", "dyn"))
def test_one_node_per_attention(exports: dict[str, onnx.ModelProto], name: str, form: str) -> None:
    graph = import_model(exports[f"{name}.{form}.onnx"])
    before = promote(graph)
    run_pipeline(graph, PIPELINE(3, TARGET), PassContext(TARGET))
    kinds = graph.kinds()
    assert {k: kinds.get(k, 0) for k in ("Attention", "Softmax")} == {"Attention": ATTENTIONS[name], "Softmax": 0}
    assert kinds.get("RotaryEmbedding", 0) == (2 if name == "llama" else 0)
    given = feeds([graph.op(i).outputs[0].name for i in graph.inputs])
    (want,), (got,) = (evaluate(g, given).values() for g in (before, promote(graph)))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batch", ["fixed", "any"])
def test_a_block_of_keras(exports: dict[str, onnx.ModelProto], batch: str) -> None:
    """Products by Einsum's parts, causal order by a product with a mask, means by pools."""
    sizes = {"x": (2, 7, 8), "m": (2, 5, 8)}  # the export gives each input a batch of its own
    graph = import_model(exports[f"keras.{batch}.onnx"], shapes=sizes if batch == "any" else {})
    before = promote(graph)
    run_pipeline(graph, PIPELINE(3, TARGET), PassContext(TARGET))
    kinds = graph.kinds()
    wanted = {"Attention": 2, "Softmax": 0, "LayerNormalization": 3}
    assert {k: kinds.get(k, 0) for k in wanted} == wanted
    assert [op.attrs.is_causal for op in graph.of_kind("Attention")] == [True, False]
    given = {n: np.random.default_rng(0).standard_normal(s) for n, s in sizes.items()}
    (want,), (got,) = (evaluate(g, given).values() for g in (before, promote(graph)))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- networks of the zoo, and shared ones


def counted(graph: Graph) -> dict[str, int]:
    run_pipeline(graph, PIPELINE(3, TARGET), PassContext(TARGET), verify=True)
    return {k: n for k, n in graph.kinds().items() if k in ("Attention", "Softmax")}


@pytest.mark.parametrize(("name", "layers"), [("vit_b_16", 2), ("bert_base", 2)])
def test_one_node_per_attention_in_the_zoo(name: str, layers: int) -> None:
    graph = import_model(zoo.build(name, batch=2, depth=layers / 12, width=0.25))
    assert counted(graph) == {"Attention": layers}
    assert graph.kinds()["LayerNormalization"] == 2 * layers + 1


def test_the_cpu_target_keeps_the_decomposed_form() -> None:
    graph = import_model(zoo.build("bert_base", batch=2, depth=1 / 12, width=0.25))
    run_pipeline(graph, PIPELINE(3, "cpu"), PassContext("cpu"))
    assert graph.kinds()["Softmax"] == 1


SHARED = {
    "bert": 4, "distilbert": 3, "clipvision": 3, "t5enc": 3, "whisperenc": 3, "swin_t": 12,
}  # fmt: skip
ONLY_DYNAMO = {"gpt2": 3, "llama": 2, "vit_b_16": 12}
EXPORTS = [
    *((f"{n}.{e}", c) for n, c in SHARED.items() for e in ("ts", "dyn")),
    *((f"{n}.dyn", c) for n, c in ONLY_DYNAMO.items()),
]


@pytest.mark.slow
@needs_shared_graphs
@pytest.mark.parametrize(("name", "count"), EXPORTS)
def test_one_node_per_attention_in_exports(name: str, count: int, tmp_path: Path) -> None:
    model = shared_network(name, tmp_path)
    sizes = {
        v.name: [d.dim_value or (2 if i == 0 else 24) for i, d in enumerate(v.type.tensor_type.shape.dim)]
        for v in model.graph.input
    }
    graph = import_model(model, shapes=sizes)
    assert counted(graph) == {"Attention": count}
    if name == "swin_t.dyn":
        assert counted(import_model(model)) == {"Attention": count}, "with a symbolic batch"
