"""The table of workloads: its groups, its form, and the results of its sources."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("benchmarks.harness", reason="an installed copy has no benchmarks")

import optdnn
from benchmarks import models, products
from benchmarks.workloads import EXPLAINED, GROUPS, NETWORKS, REACH, Network, Workload, chosen, group, parse
from optdnn.errors import UsageError
from optdnn.models import zoo

SOURCES = {"cases", "zoo", "trained", "light", "shared", "operator", "products", "decoders", *models.TORCH}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_hold_workloads_that_can_be_made(name: str) -> None:
    found = group(name, shared=["bert.ts"])
    assert found
    for w in found:
        assert w.source in SOURCES
        assert parse(w.name) == [w]
        if w.source == "zoo":
            assert {"batch", *dict(w.settings)} <= set(zoo.options(w.short))
        if w.source in ("operator", "torch"):
            assert w.network in NETWORKS


def test_the_wide_group_holds_120_pairs_of_five_libraries() -> None:
    found = group("wide")
    assert len(found) >= 120
    assert {"torchvision", "timm", "transformers", "diffusers", "torchaudio"} <= {w.source for w in found}
    assert all(w.network in NETWORKS for w in found if w.source in ("transformers", "diffusers", "torch"))


def test_workloads_to_be_reached_are_targets() -> None:
    assert {w.name for w in group("targets")} < set(REACH)
    assert set(REACH) <= {w.name for w in [*group("targets"), *group("wide")]}
    assert set(EXPLAINED) <= {w.name for w in group("wide")}


def test_the_longest_search_of_torch_compile_is_for_15_of_the_wide_pairs() -> None:
    assert len(group("wide-max")) == 15
    assert set(group("wide-max")) <= set(group("wide"))


def test_a_network_that_this_timm_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = SimpleNamespace(__version__="1.2.3", get_pretrained_cfg=lambda name: None)
    monkeypatch.setitem(sys.modules, "timm", timm)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has no network 'newer'"):
        models.inputs_of(Workload("timm/newer"))


def test_functions_and_classes_of_a_library_make_a_network_or_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    class Codec:
        def __init__(self, width: int = 1) -> None:
            self.decoder = f"decoder of {width}"

    def built() -> str:
        return "built"

    monkeypatch.setitem(sys.modules, "torchaudio.models", SimpleNamespace(Codec=Codec, built=built))  # type: ignore[arg-type]
    monkeypatch.setitem(NETWORKS, "torchaudio/part", Network("Codec.decoder", options={"width": 3}))
    assert models._made(Workload("torchaudio/built")) == "built"
    assert models._made(Workload("torchaudio/part")) == "decoder of 3"


def test_a_workload_says_network_batch_settings_and_precision() -> None:
    w = Workload("zoo/bert_base", 32, "fp8+fp16", (("sequence_length", 128),))
    assert w.name == "zoo/bert_base:32:sequence_length=128@fp8+fp16"
    assert (w.source, w.short, w.label) == ("zoo", "bert_base", "bert_base, 32, 128, fp8+fp16")
    assert [x.name for x in parse("timm/a_b:1,16")] == ["timm/a_b:1@fp16", "timm/a_b:16@fp16"]
    assert [x.name for x in chosen(["shared/{a,b}.{ts,dyn}@bf16"], [])] == [
        "shared/a.ts:1@bf16", "shared/a.dyn:1@bf16", "shared/b.ts:1@bf16", "shared/b.dyn:1@bf16",
    ]  # fmt: skip
    assert [x.short for x in chosen([], ["zoo"], only="18,mlp")] == ["resnet18", "mlp"]
    with pytest.raises(UsageError, match="is no workload"):
        parse("resnet50:8")


@pytest.mark.parametrize("name", ["gelu", "resize_2x", "top_k", "layer_norm_768", "conv_groups_32", "scores_12x128"])
def test_a_single_operator_is_a_model(name: str) -> None:
    workload = Workload(f"operator/{name}", 2, "fp32")
    model = models.onnx_of(workload)
    feeds = models.feeds_of(workload, model)
    assert all(v.shape[0] == 2 for v in feeds.values())
    found = optdnn.build(model, target="reference").run(feeds)
    assert all(np.isfinite(v).all() and v.shape[0] == 2 for v in found.values())


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_chain_of_products_agrees_with_the_exact_result(bits: int) -> None:
    torch = pytest.importorskip("torch")
    settings = (("bits", bits), ("depth", 64), ("columns", 96), ("block", 32), ("turns", 2))
    workload = Workload("products/chain", 3, "fp32", settings)
    model = models.onnx_of(workload)
    assert len(model.graph.node) == 4
    feeds = models.feeds_of(workload, model)
    (found,) = optdnn.build(model, target="reference").run(feeds).values()
    (want,) = products.truth(workload, torch.from_numpy(feeds["x"]))
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
    assert 0.2 < found.std() < 2, "the weights keep the variance"
    scales = 0 if bits == 16 else 2 / 32
    assert products.Chain.of(workload).nbytes == 4 * 64 * 96 * (bits / 8 + scales)
    assert products.of_bandwidth(workload, {"ours": {"ms": 1.0}})["ours"] < 1e-3


def test_chains_do_not_fit_the_cache() -> None:
    for workload in group("packed"):
        chain = products.Chain.of(workload)
        assert products.CACHE <= chain.nbytes < 2**31


def test_unknown_sources_and_inputs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="'nowhere' is no source"):
        models.onnx_of(Workload("nowhere/x"))
    monkeypatch.delenv(models.SHARED, raising=False)
    with pytest.raises(UsageError, match="--shared FOLDER"):
        models.onnx_of(Workload("shared/bert.ts"))
    pytest.importorskip("torch")
    monkeypatch.setitem(NETWORKS, "torch/odd", Network("LSTM", inputs=(("smell", 3),)))
    with pytest.raises(UsageError, match="'smell' is no kind of input"):
        models.tensors_of(Workload("torch/odd"), 1)


def test_pictures_of_another_size() -> None:
    (sized,) = parse("torchvision/resnet18:2:size=96")
    assert models.inputs_of(sized) == [("normal", 3, 96, 96)]
    assert models.inputs_of(Workload("torchvision/resnet18")) == [("normal", 3, 224, 224)]
    (named,) = parse("timm/vit_small_patch16_224:img_size=896")
    assert (named.side, named.name) == (896, "timm/vit_small_patch16_224:1:img_size=896@fp16")
    text = replace(Workload("transformers/bert_base"), settings=(("size", 96),))
    assert [kind[0] for kind in models.inputs_of(text)] == ["tokens"], "only pictures have this size"


def test_shared_graphs_have_a_fixed_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", "S", 4])
    node = helper.make_node("Relu", ["x"], ["y"])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "S", 4])
    model = helper.make_model(helper.make_graph([node], "g", [value], [result]))
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / "small.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "fill.py").write_text("import onnx\nfill = onnx.load\n", encoding="utf-8")
    monkeypatch.setenv(models.SHARED, str(tmp_path))
    assert models.shared_names() == ["small"]
    found = models.onnx_of(Workload("shared/small", 3))
    dims = [d.dim_value or d.dim_param for d in found.graph.input[0].type.tensor_type.shape.dim]
    assert dims == [3, "S", 4]


def test_torch_modules_are_the_same_in_every_process() -> None:
    torch = pytest.importorskip("torch")
    workload = Workload("torch/bi_gru", 2)
    a, b = (models.module_of(workload)(*models.tensors_of(workload, 1)) for _ in range(2))
    assert torch.equal(a, b)
    assert a.shape == (2, 128, 80)
    assert not torch.equal(a, models.module_of(workload)(*models.tensors_of(workload, 2)))
    assert list(models.feeds_of(workload)) == ["x0"]


def test_a_range_of_lengths_stands_in_the_shapes() -> None:
    _, dims = models.ranged(Workload("zoo/lstm", 4))
    assert dims == {"x": [models.LENGTHS, "4", "512"]}


def test_a_forbidden_tactic_is_not_used() -> None:
    from optdnn.lowering import table

    name = table.TACTICS["Conv"][0].name
    with models.forbidden(name):
        assert name not in [t.name for t in table.TACTICS["Conv"]]
    assert table.TACTICS["Conv"][0].name == name
