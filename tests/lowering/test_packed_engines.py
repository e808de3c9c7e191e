"""Packed weights stay packed in engines: the size of the file, the form that CPU libraries get, and GPU programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support.language_models import feeds_of, language_model
from support.sweep import in_turn

import optdnn
from optdnn.compiler import build_verbose
from optdnn.config import BuildOptions
from optdnn.errors import EngineError
from optdnn.importers.onnx import import_model
from optdnn.ir.export_onnx import export_model
from optdnn.lowering.cpu.examine import examine
from optdnn.lowering.cpu.unsafe import openvino_must_not
from optdnn.runtime.steps.executor import LibraryPart

K, N, BLOCK = 512, 1024, 32
ONNXRUNTIME: dict[str, Any] = {"target": "cpu", "tactics": "onnxruntime", "threads": 1}


def linear(packed: bool, bits: int = 4) -> onnx.ModelProto:
    """Two products with MatMulNBits (with zero points), or with float weights of the same shapes."""
    rng, nodes, weights = np.random.default_rng(0), [], []
    x = "x"
    for i, (k, n) in enumerate(((K, N), (N, K))):
        if packed:
            arrays = [
                rng.integers(0, 256, (n, k // BLOCK, BLOCK * bits // 8), np.uint8),
                rng.uniform(0.01, 0.02, (n, k // BLOCK)).astype(np.float32),
                rng.integers(0, 256, (n, k // BLOCK * bits // 8), np.uint8),
            ]
            attrs: Any = {"domain": "com.microsoft", "K": k, "N": n, "bits": bits, "block_size": BLOCK}
        else:
            arrays, attrs = [rng.standard_normal((k, n)).astype(np.float32)], {}
        names = [f"w{i}.{j}" for j in range(len(arrays))]
        weights += [numpy_helper.from_array(a, name) for a, name in zip(arrays, names, strict=True)]
        nodes.append(helper.make_node("MatMulNBits" if packed else "MatMul", [x, *names], [f"y{i}"], f"n{i}", **attrs))
        x = f"y{i}"
    ports = [[helper.make_tensor_value_info(name, 1, [4, K])] for name in ("x", x)]
    graph = helper.make_graph(nodes, "linear", *ports, weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("options", [{"target": "simulate", "precision": "fp16"}, {"target": "reference"}, ONNXRUNTIME])
def test_an_engine_is_as_small_as_its_packed_weights(options: dict[str, Any], tmp_path: Path) -> None:
    if options is ONNXRUNTIME:
        pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")
    sizes = []
    for packed in (True, False):
        path = tmp_path / f"{packed}.engine"
        optdnn.build(linear(packed), **options).save(path)
        sizes.append(path.stat().st_size)
    half = sizes[1] / (1 if "precision" in options else 2)  # the size of the same network in fp16
    assert sizes[0] <= (0.32 if "precision" in options else 0.36) * half, sizes  # scales are fp32, which take more


def test_fp32_programs_unpack_at_run_time() -> None:
    engine = optdnn.build(linear(True), target="simulate")
    assert engine.meta["operators"] == {"Gemm": 2, "PackedGather": 2}
    assert engine.meta["host"]["operators"] == []
    report = next(p for p in engine.meta["passes"] if p["name"] == "unpack_weights")
    assert [f["nodes"] for f in report["fired"]] == [["n0"], ["n1"]]


def test_onnx_runtime_gets_packed_weights(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")
    engine = optdnn.build(linear(True), **ONNXRUNTIME)
    assert [s.executor for s in engine.program.steps] == ["onnxruntime"]
    x = {"x": np.random.default_rng(1).standard_normal((4, K)).astype(np.float32)}
    wanted = optdnn.build(linear(True), target="reference").run(x)
    engine.save(tmp_path / "packed.engine")
    actual = optdnn.load(tmp_path / "packed.engine").run(x)  # loading examines its part
    np.testing.assert_allclose(actual["y1"], wanted["y1"], rtol=1e-4, atol=1e-4)


def levels(engine: optdnn.Engine) -> list[int]:
    """The accuracy levels of an engine's MatMulNBits; 0 for nodes without one."""
    (part,) = [step.params for step in engine.program.steps if step.executor == "onnxruntime"]
    nodes = onnx.load_from_string(engine.program.blobs[part["model"]].tobytes()).graph.node
    found = [{a.name: a.i for a in node.attribute} for node in nodes if node.op_type == "MatMulNBits"]
    return [attributes.get("accuracy_level", 0) for attributes in found]


def test_onnx_runtime_may_round_rows(tmp_path: Path) -> None:
    """The results differ from the reference's, which gives each row one scale. Both are right and pass verification."""
    pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")
    x = {"x": np.random.default_rng(1).standard_normal((4, K)).astype(np.float32)}
    exact = optdnn.build(linear(True), target="reference").run(x)["y1"]
    assert levels(optdnn.build(linear(True), **ONNXRUNTIME)) == [0, 0]
    build = build_verbose(linear(True), BuildOptions(**ONNXRUNTIME, precision="w4a8"))
    assert levels(build.engine) == [4, 4]
    assert build.engine.meta["precision"]["runs"] == {"w4a8": 2}
    report = next(p for p in build.engine.meta["passes"] if p["name"] == "assign_precision")
    assert report["fired"] == [{"rule": "w4a8", "nodes": ["n0"]}, {"rule": "w4a8", "nodes": ["n1"]}]
    build.engine.save(tmp_path / "rounded.engine")
    loaded = optdnn.load(tmp_path / "rounded.engine")  # loading examines its part
    rounded = optdnn.build(linear(True), target="reference", precision="w4a8").run(x)["y1"]
    for one, other in ((loaded.run(x)["y1"], exact), (rounded, exact), (rounded, loaded.run(x)["y1"])):
        assert 1e-4 < np.abs(one - other).max() / np.abs(exact).max() < 0.03
    pinned = optdnn.build(linear(True), **ONNXRUNTIME, precision_map={"n1": "w4a8"})
    assert levels(pinned) == [0, 4]


@pytest.mark.parametrize(
    ("family", "changes", "eight", "target"),
    in_turn([("qwen3", {}, 0), ("mistral", {}, 1), ("llama", {"dequantized": True}, 0)], "simulate", "reference"),
)
def test_products_of_language_models_may_round_rows(
    family: str, changes: dict[str, Any], eight: int, target: str
) -> None:
    """Products with 4-bit weights of the model, as MatMulNBits or as DequantizeLinear in blocks. The head of mistral has 8 bits."""
    model = language_model(family, **changes)
    feeds = feeds_of(model, 3, 2)
    options: dict[str, Any] = {"target": target, "shapes": {name: array.shape for name, array in feeds.items()}}
    plain = optdnn.build(model, **options, precision="fp32" if target == "reference" else "fp16")
    engine = optdnn.build(model, **options, precision="w4a8")
    products = plain.meta["operators"]["PackedMatMul"]
    assert engine.meta["operators"]["PackedMatMul"] == products
    runs = engine.meta["precision"]["runs"]
    assert (runs["w4a8"], runs.get("w8", 0)) == (products - eight, eight)
    if target == "reference":  # the reference rounds the rows of all products
        wanted, found = (e.run(feeds)["logits"] for e in (plain, engine))
        assert 1e-4 < np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.1


def test_rounded_rows_are_verified() -> None:
    pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")
    engine = optdnn.build(linear(True), **ONNXRUNTIME, precision="w4a8")
    checks = {c.name: c for c in optdnn.verify(engine).checks}
    assert checks["steps"].status == "passed", checks["steps"].text
    assert checks["steps"].error is not None
    assert checks["steps"].error > 1e-4, "its steps and their meaning round rows in different blocks"


@pytest.mark.parametrize("library", ["openvino", "onnxruntime"])
def test_the_libraries_take_bytes(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library, reason="the cpu extra is not installed")
    model = linear(True, 8)
    engine = optdnn.build(model, target="cpu", tactics=library, threads=1)
    assert [s.executor for s in engine.program.steps] == [library]
    x = {"x": np.random.default_rng(1).standard_normal((4, K)).astype(np.float32)}
    wanted = optdnn.build(model, target="reference").run(x)["y1"]
    engine.save(tmp_path / "bytes.engine")
    loaded = optdnn.load(tmp_path / "bytes.engine")
    np.testing.assert_allclose(loaded.run(x)["y1"], wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    assert (tmp_path / "bytes.engine").stat().st_size < 1.5 * K * N * 2
    if library == "openvino":  # OpenVINO multiplies by bytes
        assert loaded.facts[0]["executed"] == {"u8": 2}


def test_openvino_gets_no_numbers_of_less_than_a_byte() -> None:
    graph = import_model(linear(True))
    reasons = openvino_must_not(graph)
    assert sorted(reasons) == sorted(op.id for op in graph.of_kind("PackedMatMul"))
    assert all("fewer than 8 bits" in reason for reason in reasons.values())
    assert openvino_must_not(import_model(linear(True, 8))) == {}
    rows = import_model(language_model("qwen3", head_bits=8))
    assert rows.of_kind("PackedGather")[0].id in openvino_must_not(rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 8}, "at least 16"),
        ({"N": N + 1}, "must hold"),
        ({"bits": 3}, "3 bits"),
    ],
)
def test_a_part_that_lies_about_its_weights_is_refused(change: dict[str, int], message: str) -> None:
    model = export_model(import_model(linear(True)), external_weights=True)
    ports = [((name, np.dtype(np.float32), (4, K)),) for name in ("x", "y1")]
    part = LibraryPart("onnxruntime", model.to_bytes(), model.weights, *ports, {})
    examine(part)
    proto = onnx.load_from_string(part.model)
    for attribute in proto.graph.node[0].attribute:
        attribute.i = change.get(attribute.name, attribute.i)
    with pytest.raises(EngineError, match=message):
        examine(replace(part, model=proto.SerializeToString(deterministic=True)))


@pytest.mark.parametrize("options", [{"target": "reference"}, ONNXRUNTIME], ids=["reference", "cpu"])
def test_a_head_that_is_the_embedding_is_stored_once(options: dict[str, Any], tmp_path: Path) -> None:
    if options is ONNXRUNTIME:
        pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")
    vocabulary, path = 20_000, tmp_path / "tied.engine"
    model = language_model("qwen3", vocabulary=vocabulary)
    shapes = {name: array.shape for name, array in feeds_of(model, 1, 3).items()}
    optdnn.build(model, shapes=shapes, **options).save(path)
    table = vocabulary * (64 // 2 + 64 // 32 * (4 + 1))  # numbers, scales in fp32, and zero points
    assert path.stat().st_size < 1.5 * table


def test_sequences_of_any_length_on_the_cpu() -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")
    model = language_model("gemma2")
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    engine = optdnn.build(model, **ONNXRUNTIME)
    for length, past in ((5, 0), (1, 5)):
        feeds = feeds_of(model, length, past)
        wanted = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
        actual = engine.run(feeds)
        for name, array in wanted.items():
            np.testing.assert_allclose(actual[name], array, rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("options", [{"target": "simulate"}, ONNXRUNTIME], ids=["simulate", "cpu"])
def test_mixtures_of_packed_experts(options: dict[str, Any]) -> None:
    if options is ONNXRUNTIME:
        pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")
    rng, experts, width, inner = np.random.default_rng(0), 4, 64, 32
    arrays = {
        "w1": rng.integers(0, 256, (experts, inner, width // 2), np.uint8),
        "s1": rng.uniform(0.01, 0.02, (experts, inner, width // 32)).astype(np.float32),
        "w2": rng.integers(0, 256, (experts, width, inner // 2), np.uint8),
        "s2": rng.uniform(0.01, 0.02, (experts, width, inner // 32)).astype(np.float32),
    }
    attrs = {
        "k": 2,
        "normalize_routing_weights": 1,
        "activation_type": "silu",
        "block_size": 32,
        "expert_weight_bits": 4,
    }
    node = helper.make_node("QMoE", ["x", "p", "w1", "s1", "", "w2", "s2"], ["y"], "n", domain="com.microsoft", **attrs)
    feeds = {n: rng.standard_normal((5, size)).astype(np.float32) for n, size in (("x", width), ("p", experts))}
    ports = [helper.make_tensor_value_info(n, 1, a.shape) for n, a in feeds.items()]
    out = [helper.make_tensor_value_info("y", 1, [5, width])]
    weights = [numpy_helper.from_array(a, n) for n, a in arrays.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", ports, out, weights), opset_imports=opsets, ir_version=10)
    wanted = optdnn.build(model, target="reference").run(feeds)["y"]
    engine = optdnn.build(model, **options)
    np.testing.assert_allclose(engine.run(feeds)["y"], wanted, rtol=1e-4, atol=1e-4)
    if options is ONNXRUNTIME:
        assert [s.executor for s in engine.program.steps] == ["onnxruntime"]
    else:
        assert engine.meta["host"]["operators"] == []
