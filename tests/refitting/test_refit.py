"""Engines with other weights equal the engine of a new build with the same tactics, on every target."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.language_models import language_model
from support.net import Net
from support.onnxnet import convnet
from support.small_models import attention, mlp, normalized, recurrent, residual, retrained, small_model
from support.timer import FakeTimer
from support.tuned import timed_without_gpu

import optdnn
from optdnn.errors import EngineError, UnsupportedError, UsageError
from optdnn.ir.embedded_graph import held
from optdnn.ir.export_onnx import export_model
from optdnn.refitting.held_model import HELD_MODEL
from optdnn.refitting.record import NETWORK
from optdnn.refitting.weights import merge
from optdnn.runtime.file.format import encode
from optdnn.runtime.program import Program
from optdnn.tuning.earlier_choices import DECIDED
from optdnn.types import Array

GPU = "cuda:sm_90a"


def contents(program: Program) -> bytes:
    return b"".join(map(bytes, encode(program)))


def weight(model: onnx.ModelProto, name: str) -> Array:
    return next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == name)


def wide_products() -> onnx.ModelProto:
    return small_model(
        "(float[4,128] x) => (float[4,128] y) { a = MatMul(x, w1) b = Relu(a) y = MatMul(b, w2) }",
        w1=(128, 128), w2=(128, 128),
    )  # fmt: skip


PICTURES = {"x": np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)}
CASES: list[tuple[Any, str, dict[str, Any]]] = [
    (convnet, "simulate", {}),  # batch normalization is folded into convolutions
    (convnet, "reference", {}),
    (
        convnet,
        GPU,
        {"precision": "int8", "calib": PICTURES, "no_cubins": True},
    ),  # other scales, also in attributes
    (wide_products, GPU, {"precision": "w4", "no_cubins": True}),  # packed again
    (attention, GPU, {"precision": "fp16", "no_cubins": True}),
    (normalized, "simulate", {}),
    (recurrent, "simulate", {}),
    (residual, GPU, {"shapes": {"x": "2x8x12x12"}, "streams": 2, "no_cubins": True}),
    (lambda: mlp("N"), "simulate", {"shapes": {"x": "1..4..8x24"}}),  # plans for a range
]


@pytest.mark.parametrize(("network", "target", "options"), CASES)
def test_a_refitted_engine_is_a_fresh_one(network: Any, target: str, options: dict[str, Any]) -> None:
    model = network()
    engine = optdnn.build(model, target=target, **options)
    calib = {k: v for k, v in options.items() if k == "calib"}
    before = contents(engine.program)
    engine.refit(model=retrained(model), **calib)
    assert (
        contents(engine.program) == contents(optdnn.build(retrained(model), target=target, **options).program) != before
    )


@pytest.mark.parametrize(
    "option", [{"memory_limit": 1 << 30}, {"nearest_tactics": False}, {"strict_precision": True}, {"no_cubins": True}]
)
def test_a_refit_keeps_the_options_of_later_plans(option: dict[str, Any]) -> None:
    made: dict[str, Any] = {"target": "simulate", "shapes": {"x": "1..4..8x24"}, "precision": "fp16", **option}
    engine, new = optdnn.build(mlp("N"), **made), retrained(mlp("N"))
    engine.refit(model=new)
    assert contents(engine.program) == contents(optdnn.build(new, **made).program)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"precision": "int8", "calib": PICTURES}, marks=pytest.mark.slow)]
)
def test_a_refit_of_a_cpu_engine_takes_its_library(options: dict[str, Any]) -> None:
    pytest.importorskip("openvino", reason="needs the extra cpu")
    model = convnet()
    engine = optdnn.build(model, target="cpu", tactics="openvino", threads=1, **options)
    engine.refit(model=retrained(model), **{k: v for k, v in options.items() if k == "calib"})
    fresh = optdnn.build(retrained(model), target="cpu", tactics="openvino", threads=1, **options)
    assert contents(engine.program) == contents(fresh.program)
    np.testing.assert_array_equal(engine.run({"x": PICTURES["x"][:1]})["y"], fresh.run({"x": PICTURES["x"][:1]})["y"])


def test_weights_and_adapters_are_tables() -> None:
    engine = optdnn.build(mlp(), target="reference", refit=True)
    with pytest.raises(UsageError, match="weights must map names of initializers to arrays, not list"):
        engine.refit([1])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"adapters must map names of initializers to \(A, B\), not list"):
        engine.refit(adapters=[1])  # type: ignore[arg-type]


def test_packed_weights_of_a_language_model() -> None:
    model = language_model("llama")
    engine = optdnn.build(model, target="reference")
    engine.refit(model=retrained(model))
    assert contents(engine.program) == contents(optdnn.build(retrained(model), target="reference").program)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeTimer:
    return timed_without_gpu(monkeypatch)


@pytest.mark.nvrtc
def test_measured_choices_stay(gpu: FakeTimer, tmp_path: Any) -> None:
    """No candidate is measured again. Lanes and times of steps are the measured ones, and compiled kernels are kept."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(1, 64, 14, 14), 64, 3))
    model = export_model(n.done(n.conv(x, 32, 1, pads=0))).proto
    options: dict[str, Any] = {"target": GPU, "precision": "fp16", "timing_cache": tmp_path / "times.json"}
    optdnn.build(model, **options)
    engine = optdnn.build(model, **options)
    fresh = optdnn.build(retrained(model), **options)
    count = len(gpu.trials)
    engine.refit(model=retrained(model))
    assert len(gpu.trials) == count
    assert engine.meta[DECIDED] == fresh.meta[DECIDED] != {}
    assert contents(engine.program) == contents(fresh.program)


@pytest.mark.nvrtc
def test_measured_choices_stay_where_scales_change(gpu: FakeTimer) -> None:
    """New scales give quantized operators new signatures. Their choices are found by the nodes."""
    model = convnet()
    engine = optdnn.build(model, target=GPU, precision="int8", calib=PICTURES, no_cubins=True)
    before, count = engine.meta["tactics"], len(gpu.trials)
    assert count
    engine.refit(model=retrained(model), calib=PICTURES)
    assert len(gpu.trials) == count
    rows = [
        [(row["nodes"], row["tactic"], row.get("config")) for row in rows] for rows in (before, engine.meta["tactics"])
    ]
    assert rows[0] == rows[1]
    assert [row["signature"] for row in before] != [row["signature"] for row in engine.meta["tactics"]]
    assert "measured" in {source for *_, source in engine.meta["step_times"]["steps"]}


# ---------------------------------------------------------------- single weights, adapters


def test_single_weights_and_adapters_over_the_model_that_the_engine_holds(tmp_path: Any) -> None:
    model, rng = mlp(), np.random.default_rng(1)
    optdnn.build(model, target="simulate", refit=True).save(tmp_path / "net.engine")
    engine = optdnn.load(tmp_path / "net.engine")
    before, x = contents(engine.program), rng.standard_normal((4, 24)).astype(np.float32)
    first = engine.run(x)["y"]
    a, b = rng.standard_normal((2, 48)).astype(np.float32), rng.standard_normal((24, 2)).astype(np.float32)

    engine.refit(adapters={"w1": (a, b, 0.5)})
    merged = onnx.ModelProto()
    merged.CopyFrom(model)
    by_hand = (weight(model, "w1") + np.float32(0.5) * (b @ a)).astype(np.float32)
    next(t for t in merged.graph.initializer if t.name == "w1").CopyFrom(numpy_helper.from_array(by_hand, "w1"))
    np.testing.assert_array_equal(engine.run(x)["y"], optdnn.build(merged, target="simulate").run(x)["y"])

    engine.refit()  # the adapter is replaced
    assert contents(engine.program) == before
    engine.refit({"w1": by_hand})  # this one stays
    engine.refit({"w2": weight(model, "w2") * np.float32(2)})
    np.testing.assert_allclose(engine.run(x)["y"], 2 * optdnn.build(merged, target="simulate").run(x)["y"], rtol=1e-5)
    assert not np.allclose(first, engine.run(x)["y"])


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_the_graph_reads_the_weights_of_the_model_that_an_engine_holds(precision: str) -> None:
    """Without the model, it has what the kernels' weights lack."""
    n = Net()
    x = n.op("Relu", n.conv(n.op("Relu", n.input(1, 136, 14, 14)), 144, 3))
    model = export_model(n.done(n.conv(x, 144, 3))).proto
    made = [optdnn.build(model, target=GPU, no_cubins=True, precision=precision, refit=r) for r in (False, True)]
    plain, refit = (engine.program for engine in made)
    corrections = [b.nbytes for b in plain.blobs if b.dtype in (np.uint8, np.int16) and b.nbytes > 10_000]
    assert len(corrections) == 2
    kernels = sum(b.nbytes for b in plain.blobs) - sum(corrections)
    assert sum(b.nbytes for b in refit.blobs) < 2.02 * kernels
    for a, b in zip(held(refit).of_kind("Constant"), held(plain).of_kind("Constant"), strict=True):
        assert a.attrs.value.tobytes() == b.attrs.value.tobytes()


def test_options_that_change_the_model_are_applied_again() -> None:
    """In the new engine, too, pictures are prepared, answers are made, and inputs have their values."""
    pictures = {"target": "simulate", "shapes": {"x": (1, 12, 12, 3)}, "preprocess": {"x": {"resize": 8, "crop": 8}}}
    pictures["postprocess"] = {"y": "softmax+top-k:2"}
    text = "(float[2,6] x, int64[2] s) => (float[3,4] y) { a = MatMul(x, w) y = Reshape(a, s) }"
    values = {"target": "simulate", "values": {"s": [3, 4]}, "refit": True}
    for model, options in ((convnet(), pictures), (small_model(text, w=(6, 6)), values)):
        engine = optdnn.build(model, **options)
        new = retrained(model)
        if "refit" in options:
            engine.refit({"w": weight(new, "w")})
        else:
            engine.refit(model=new)
        assert contents(engine.program) == contents(optdnn.build(new, **options).program)


def test_contexts_that_were_made_before_end_with_the_old_weights() -> None:
    engine, x = optdnn.build(mlp(), target="reference", refit=True), np.ones((4, 24), np.float32)
    context, old = engine.context(), engine.run(x)["y"]
    engine.refit({"w2": weight(mlp(), "w2") * np.float32(3)})
    np.testing.assert_array_equal(context.run({"x": x})["y"], old)
    np.testing.assert_allclose(engine.run(x)["y"], 3 * old, rtol=1e-5)


def test_kept_ranges_and_new_data() -> None:
    """Without data, an engine that holds its model quantizes new weights with the ranges of its build."""
    model = convnet()
    engine = optdnn.build(model, target="simulate", precision="int8", calib=PICTURES, refit=True)
    before = contents(engine.program)
    engine.refit()
    assert contents(engine.program) == before
    engine.refit(model=retrained(model))
    kept = engine.meta["operators"], contents(engine.program)
    engine.refit(model=retrained(model), calib=PICTURES)
    assert contents(engine.program) != kept[1]


# ---------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def built() -> Any:
    return optdnn.build(mlp(), target="simulate", refit=True)


def refused(engine: Any, error: type[Exception], **asked: Any) -> str:
    """The message of a refused refit, which leaves the engine unchanged."""
    before = contents(engine.program)
    with pytest.raises(error) as caught:
        engine.refit(**asked)
    assert contents(engine.program) == before
    return str(caught.value)


def test_arrays_that_do_not_fit_are_named(built: Any) -> None:
    wrong = {"w1": np.ones((24, 47), np.float32), "w2": np.ones((48, 10)), "w3": np.ones(1, np.float32)}
    said = refused(built, UsageError, weights=wrong)
    assert "'w1' is fp32[24, 48] in the network, the given array float32[24, 47]" in said
    assert "'w2' is fp32[48, 10] in the network, the given array float64[48, 10]" in said
    assert "'w3' is not an initializer" in said


@pytest.mark.parametrize(
    "adapter", [(np.ones((2, 48)),), (np.ones((2, 48)), np.ones((24, 3))), (np.ones(48), np.ones(24))]
)
def test_adapters_that_do_not_fit_are_named(built: Any, adapter: Any) -> None:
    assert "'w1'" in refused(built, UsageError, adapters={"w1": adapter})
    assert "'w9' is not an initializer" in refused(built, UsageError, adapters={"w9": (1, 1)})


def test_an_adapter_of_integers_is_refused() -> None:
    with pytest.raises(ValueError, match="for weights of floats"):
        merge(np.ones((2, 2), np.int8), (np.ones((1, 2)), np.ones((2, 1))))


def test_an_adapter_is_summed_wide() -> None:
    w = np.full((2, 2), 2048, np.float16)
    found = merge(w, (np.ones((1, 2), np.float16), np.full((2, 1), 0.9, np.float16), 2.0))
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, np.full((2, 2), 2050, np.float16))


def test_another_network_is_named(built: Any) -> None:
    other = mlp()
    other.graph.node[1].attribute[0].f = 0.25
    said = refused(built, UnsupportedError, model=other)
    assert "node 'b': LeakyRelu: has other attributes or operands" in said
    other = mlp()
    other.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.ones((48, 11), np.float32), "w2"))
    other.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 11
    said = refused(built, UnsupportedError, model=other)
    assert "weight 'w2': initializer: is fp32[48, 11]; the engine was built with fp32[48, 10]" in said
    sized = optdnn.build(mlp("N"), target="simulate", shapes={"x": (4, 24)})
    other = mlp("N")
    del other.graph.input[0].type.tensor_type.shape.dim[0]
    said = refused(sized, UnsupportedError, model=other)
    assert "the model is another network than the engine's: at the engine's shapes, " in said
    assert "they differ in rank" in said


def test_weights_that_are_optimized_otherwise_are_named() -> None:
    """A multiplication by ones disappears, and other weights would need it."""
    text = "(float[2,8] x) => (float[2,8] y) { a = Mul(x, s) b = Exp(a) y = Mul(b, t) }"
    one = small_model(text, s=np.float32(1), t=np.arange(8, dtype=np.float32))
    engine = optdnn.build(one, target="reference", refit=True)
    said = refused(engine, UnsupportedError, weights={"s": np.array(1.5, np.float32)})
    assert "these weights are optimized otherwise than the engine's" in said
    assert "node 'Mul_0'" in said


def test_an_engine_without_its_model_asks_for_it() -> None:
    engine = optdnn.build(mlp(), target="simulate")
    assert "give the model" in refused(engine, UsageError, weights={"w1": weight(mlp(), "w1")})


def test_a_calibrated_engine_without_ranges_asks_for_data() -> None:
    engine = optdnn.build(convnet(), target="simulate", precision="int8", calib=PICTURES)
    assert "--calib" in refused(engine, UsageError, model=convnet())


def test_an_engine_for_another_gpu_is_refused() -> None:
    engine = optdnn.build(mlp(), target=GPU, no_cubins=True)
    engine.program.meta["gpu"] = {"name": "another", "multiprocessors": 7}
    assert "was built for another" in refused(engine, EngineError, model=mlp())


def test_other_kernels_are_named() -> None:
    engine = optdnn.build(mlp(), target="simulate")
    engine.program.steps[0].params["tactic"] = "another"
    said = refused(engine, UnsupportedError, model=mlp())
    assert "node 'LeakyRelu_1 + MatMul_0': cuda: other kernels would run it" in said


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (NETWORK, None, "does not record its network"),
        (NETWORK, {"nodes": 1, "weights": {}}, "does not record its network"),
        (HELD_MODEL, {"model": 99, "weights": {}}, "blob 99"),
        (HELD_MODEL, {"weights": 3}, "cannot be read"),
        (DECIDED, {"lines": None}, "record of its tactics is malformed"),
        ("first_run", {"form": "upside down"}, "record of its first runs is malformed"),
        ("options", {"precision": 3}, "record of its options is malformed"),
    ],
)
def test_a_malformed_record_is_refused(built: Any, key: str, value: Any, said: str) -> None:
    before = built.program.meta.get(key)
    built.program.meta[key] = value
    try:
        assert said in refused(built, EngineError)
    finally:
        if before is None:
            del built.program.meta[key]
        else:
            built.program.meta[key] = before


def test_a_malformed_record_of_the_passes_is_refused() -> None:
    engine = optdnn.build(mlp(), target="reference")
    engine.program.meta["model"]["structure"] = "another"
    engine.program.meta["passes"] = [{"fired": [3]}]
    assert "record of its build is malformed" in refused(engine, EngineError, model=mlp())


def test_precision_auto_is_refused(built: Any) -> None:
    built.program.meta["options"]["precision"] = "auto"
    try:
        assert "precision auto" in refused(built, UsageError)
    finally:
        built.program.meta["options"]["precision"] = "fp32"
