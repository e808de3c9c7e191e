"""The zoo: published architectures, valid models, activations of order one, outputs that depend on the input."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
from support import zoo_manifest as manifest
from support.sweep import sweep

from optdnn.errors import UsageError
from optdnn.models import zoo
from optdnn.models.zoo.builder import GraphBuilder

QUICK = ("resnet18", "bert_base", "lstm", "mlp")
# A variant of each network that runs in milliseconds, with its layers in the same order.
SMALL = {
    "resnet18": {"image_size": 64, "width": 0.25},
    "resnet50": {"image_size": 64, "width": 0.25},
    "mobilenet_v2": {"image_size": 64, "width": 0.25},
    "efficientnet_b0": {"image_size": 64, "width": 0.25},
    "vgg16": {"image_size": 32, "width": 0.125},
    "vgg16_bn": {"image_size": 32, "width": 0.125},
    "densenet121": {"image_size": 32, "width": 0.25, "depth": 0.34},
    "inception_v3": {"image_size": 96, "width": 0.25},
    "squeezenet1_1": {"image_size": 64, "width": 0.5},
    "unet": {"image_size": 32, "width": 0.125},
    "yolox_s": {"image_size": 64, "width": 0.25},
    "vit_b_16": {"image_size": 64, "width": 0.17, "depth": 0.34},
    "bert_base": {"sequence_length": 24, "width": 0.17, "depth": 0.34, "vocab_size": 500},
    "lstm": {"sequence_length": 20, "width": 0.125},
    "mlp": {"width": 0.1},
}


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in model.graph.output], session.run(None, feeds), strict=True))


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(n.op_type for n in model.graph.node)


def dims(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(d.dim_value if d.HasField("dim_value") else d.dim_param for d in value.type.tensor_type.shape.dim)


def digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@pytest.fixture
def hollow(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, ...]]:
    """Builds whole networks with zeros as weights and without the probe (VGG-16 has 553 MB of weights). Collects names and
    shapes."""
    drawn: dict[str, tuple[int, ...]] = {}
    original = GraphBuilder.draw

    def draw(self: GraphBuilder, leaf: str, shape, init) -> tuple[str, np.ndarray]:
        key, array = original(self, leaf, shape, lambda rng, dims: np.zeros(dims, np.float32))
        drawn[key] = array.shape
        return key, array

    monkeypatch.setattr(GraphBuilder, "draw", draw)
    monkeypatch.setattr(GraphBuilder, "seeded", property(lambda self: False))
    return drawn


# Digests of the originals, torchvision 0.28 and transformers (BertModel) with torch 2.13: of "OpType name" of all nodes but
# Identity and Constant that torch.onnx.export (opset 17, training=PRESERVE, dynamo=False) writes, in order, and of "name shape"
# of the state_dict's entries, sorted. With those state_dicts the builders' outputs equaled the originals' to float32 rounding.
ORIGINALS = {
    "resnet18": ("ad41734749b43f31", "2bb53b15765c4651"),
    "resnet50": ("8e049c582b05f611", "cf11dad974eadeaa"),
    "mobilenet_v2": ("1bdc0c3e79c3b755", "d613ea65450d5318"),
    "efficientnet_b0": ("270fb2ba118e8e48", "b5ec7b4b5e4fedbb"),
    "vgg16": ("b69825ca7841658f", "ba63c2556d912509"),
    "vgg16_bn": ("702c0031e6546c8c", "d8308b804a50efac"),
    "densenet121": ("1e8a89c584ed2e75", "222a58d1fd8d2818"),
    "inception_v3": ("fbe65a92e92864da", "5beceaea5a4204b9"),
    "squeezenet1_1": ("650220d5122ddb08", "3fbd2a746421cada"),
    "vit_b_16": (None, "2c2360f6707280a8"),  # the exporter's shape arithmetic is folded in ours
    "bert_base": (None, "7c984fc4b78ff000"),
    "lstm": (None, "8da11cd08b269376"),
}


@pytest.mark.parametrize("name", sweep(zoo.NAMES, *(n for n in zoo.NAMES if not n.startswith(("vgg", "vit", "bert")))))
def test_whole_network(name: str, hollow: dict[str, tuple[int, ...]]) -> None:
    """At full size: the counts of the manifest; and node for node, parameter for parameter the original, if there is one."""
    model = zoo.build(name)
    assert manifest.describe(model) == manifest.load()[name]
    nodes, parameters = ORIGINALS.get(name, (None, None))
    if nodes:
        assert digest(f"{n.op_type} {n.name}" for n in model.graph.node if n.op_type != "Constant") == nodes
    if parameters:
        assert digest(sorted(f"{key} {shape}" for key, shape in hollow.items())) == parameters


def test_manifest_has_every_network() -> None:
    assert tuple(manifest.load()) == zoo.NAMES


# Published figures: torchvision's model pages (parameters, GFLOPS as multiply-adds), the papers and their repositories.
# Parameters, multiply-adds in units of 1e9 (None where the source gives none), convolutions, BatchNormalizations.
PUBLISHED = {
    "resnet18": (11_689_512, 1.814, 20, 20),
    "resnet50": (25_557_032, 4.089, 53, 53),
    "mobilenet_v2": (3_504_872, 0.301, 52, 52),
    "efficientnet_b0": (5_288_548, 0.386, 81, 49),
    "vgg16": (138_357_544, 15.47, 13, 0),
    "vgg16_bn": (138_365_992, 15.47, 13, 13),
    "densenet121": (7_978_856, 2.834, 120, 121),
    "inception_v3": (23_834_568, 5.713, 94, 94),
    "squeezenet1_1": (1_235_496, 0.349, 26, 0),
    "unet": (31_037_698, None, 19, 18),
    "yolox_s": (8_968_255, 13.4, 83, 74),
    "vit_b_16": (86_567_656, 17.564, 1, 0),
    "bert_base": (109_482_240, None, 0, 0),
    "lstm": (2 * 4 * (2 * 512 * 512 + 2 * 512), 128 * 2 * 4 * 2 * 512 * 512 / 1e9, 0, 0),
    "mlp": (11_972_510, None, 0, 0),
}


@pytest.mark.parametrize("name", zoo.NAMES)
def test_architecture_is_the_published_one(name: str) -> None:
    parameters, multiply_adds, convolutions, norms = PUBLISHED[name]
    entry = manifest.load()[name]
    assert entry["parameters"] == parameters
    assert multiply_adds is None or entry["flops"] / 2e9 == pytest.approx(multiply_adds, rel=5e-3)
    assert (entry["operators"].get("Conv", 0), entry["operators"].get("BatchNormalization", 0)) == (convolutions, norms)


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(zoo.NAMES, *QUICK))
def test_small_variant(name: str) -> None:
    """The model is valid and deterministic, has exact shapes and finite values, and its output depends on the input."""
    model = zoo.build(name, seed=1, **SMALL[name])
    onnx.checker.check_model(model, full_check=True)
    names = [n.name for n in model.graph.node]
    assert all(names)
    assert len(set(names)) == len(names)

    again, other = (zoo.build(name, seed=s, **SMALL[name]) for s in (1, 2))
    assert model.SerializeToString(deterministic=True) == again.SerializeToString(deterministic=True)
    assert model.SerializeToString(deterministic=True) != other.SerializeToString(deterministic=True)

    results = [run(model, zoo.example_inputs(model, seed)) for seed in (1, 2)]
    for value in model.graph.output:
        first, second = (r[value.name] for r in results)
        assert first.shape == dims(value)
        assert np.isfinite(first).all()
        if name == "yolox_s":  # boxes are near their anchors; scores must depend on the picture
            first, second = first[..., 4:], second[..., 4:]
        # The effect of another input is compared with the output: an engine that ignores its input would get the rest right.
        assert np.abs(first - second).mean() > 0.2 * np.abs(first - first.mean()).mean()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, SMALL[name]) for name in ("densenet121", "yolox_s")),
        *(
            pytest.param(name, settings, marks=pytest.mark.slow)
            for name, settings in (
                ("mobilenet_v2", SMALL["mobilenet_v2"]),
                ("unet", SMALL["unet"]),
                ("efficientnet_b0", SMALL["efficientnet_b0"]),
                ("inception_v3", SMALL["inception_v3"]),
            )
        ),
    ],
)
def test_activations_stay_of_order_one(name: str, settings: dict) -> None:
    """For pictures that the builder did not see, the spread of each BatchNormalization's output is near its scales."""
    model = zoo.build(name, **settings)
    outputs = [n.output[0] for n in model.graph.node if n.op_type == "BatchNormalization"]
    scales = [
        np.abs(_initializer(model, n.input[1])).mean() for n in model.graph.node if n.op_type == "BatchNormalization"
    ]
    model.graph.output.extend(onnx.ValueInfoProto(name=o) for o in outputs)
    runs = [run(model, zoo.example_inputs(model, seed)) for seed in range(6)]
    for output, scale in zip(outputs, scales, strict=True):
        values = np.stack([r[output] for r in runs])
        assert 0.3 * scale < values.std() < 4 * scale, output
        assert abs(values.mean()) < 0.5 * scale, output


def _initializer(model: onnx.ModelProto, name: str) -> np.ndarray:
    return next(onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name == name)


@pytest.mark.slow
def test_running_statistics_are_not_trivial() -> None:
    model = zoo.build("resnet18", **SMALL["resnet18"])
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            scale, shift, mean, var = (_initializer(model, name) for name in node.input[1:])
            assert (var > 0).all()
            assert all(p.std() > 0.01 for p in (scale, shift, mean))
            assert (var.std() / var.mean()) > 0.05


@pytest.mark.parametrize("name", sweep(zoo.NAMES, *QUICK))
def test_symbolic_batch(name: str) -> None:
    """A batch "N" runs at several sizes, and the result of each picture is the same as alone."""
    model = zoo.build(name, batch="N", **SMALL[name])
    onnx.checker.check_model(model, full_check=True)
    feeds = zoo.example_inputs(model, sizes={"N": 3})
    axis = 1 if name == "lstm" else 0
    whole = run(model, feeds)
    part = run(model, {k: np.take(v, [1], axis) for k, v in feeds.items()})
    for key, value in whole.items():
        np.testing.assert_allclose(np.take(value, [1], axis), part[key], rtol=1e-3, atol=1e-3 * np.abs(value).max())


def test_symbolic_sequence_length() -> None:
    model = zoo.build("bert_base", **{**SMALL["bert_base"], "sequence_length": "S"}, batch="N")
    assert {"Shape", "Gather", "Concat"} <= set(operators(model))
    for length in (5, 17):
        result = run(model, zoo.example_inputs(model, sizes={"N": 2, "S": length}))
        assert result["last_hidden_state"].shape[:2] == (2, length)


@cache
def small_run(name: str) -> tuple[dict, dict, dict]:
    """A shallow variant's settings, inputs and results, in the default form of the zoo."""
    settings = {**SMALL[name], "depth": 0.1}
    model = zoo.build(name, **settings)
    feeds = zoo.example_inputs(model, 1)
    return settings, feeds, run(model, feeds)


@pytest.mark.parametrize("opset", [13, 18, 22])
@pytest.mark.parametrize(
    "name",
    sweep(("resnet18", "mobilenet_v2", "yolox_s", "vit_b_16", "bert_base", "lstm"), "bert_base", "lstm"),
)
def test_opsets(name: str, opset: int) -> None:
    """The same weights give the same results at every opset."""
    settings, feeds, want = small_run(name)
    model = zoo.build(name, opset=opset, **settings)
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == opset
    got = run(model, feeds)
    for key, value in want.items():
        np.testing.assert_allclose(got[key], value, atol=1e-4 * np.abs(value).max())


@pytest.mark.parametrize("name", ["bert_base", "vit_b_16"])
def test_decomposed_and_whole_operators_agree(name: str) -> None:
    forms = [zoo.build(name, opset=20, decomposed=d, **SMALL[name]) for d in (True, False)]
    layers = 2 * 5
    norms = layers + 1
    assert operators(forms[0])["ReduceMean"] == 2 * norms
    assert "LayerNormalization" not in operators(forms[0])
    assert operators(forms[1])["LayerNormalization"] == norms
    assert operators(forms[1])["Gelu"] == layers // 2
    results = [run(m, zoo.example_inputs(forms[0])) for m in forms]
    for key, value in results[0].items():
        np.testing.assert_allclose(results[1][key], value, atol=1e-5 * np.abs(value).max(), rtol=1e-3)


def test_mask_hides_tokens() -> None:
    model = zoo.build("bert_base", **SMALL["bert_base"])
    feeds = zoo.example_inputs(model)
    feeds["attention_mask"][:] = np.arange(24) < 12
    changed = {**feeds, "input_ids": np.where(np.arange(24) < 12, feeds["input_ids"], 7)}
    np.testing.assert_array_equal(*(run(model, f)["pooler_output"] for f in (feeds, changed)))


def test_yolox_boxes_and_suppression() -> None:
    model = zoo.build("yolox_s", nms=True, **SMALL["yolox_s"])
    result = run(model, zoo.example_inputs(model))
    boxes, selected = result["y"][0], result["selected"]
    anchors = sum((64 // s) ** 2 for s in (8, 16, 32))
    assert boxes.shape == (anchors, 85)
    assert (boxes[:, 2:4] > 0).all()
    assert ((boxes[:, 4:] >= 0) & (boxes[:, 4:] <= 1)).all()
    assert np.abs(boxes[:, :2] - 32).max() < 128  # centers are around the picture
    assert 0 < len(selected) <= 80 * 100
    assert selected[:, 2].max() < anchors


@pytest.mark.slow
def test_state_replaces_the_weights_and_is_checked() -> None:
    seeded = zoo.build("resnet18", seed=3, **SMALL["resnet18"])
    state = {t.name: onnx.numpy_helper.to_array(t) for t in seeded.graph.initializer}
    copy = zoo.build("resnet18", state=state, **SMALL["resnet18"])
    assert copy.SerializeToString(deterministic=True) == seeded.SerializeToString(deterministic=True)
    short = {k: v for k, v in state.items() if k != "bn1.bias"}
    with pytest.raises(UsageError, match=r"needs the parameter bn1\.bias"):
        zoo.build("resnet18", state=short, **SMALL["resnet18"])
    with pytest.raises(UsageError, match=r"fc\.bias has shape \(3,\)"):
        zoo.build("resnet18", state={**state, "fc.bias": np.zeros(3)}, **SMALL["resnet18"])
    with pytest.raises(UsageError, match="extra"):
        zoo.build("resnet18", state={**state, "extra": np.zeros(3)}, **SMALL["resnet18"])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("resnet51", {}, "no network 'resnet51'"),
        ("resnet50", {"color": 1}, "no option color"),
        ("resnet50", {"opset": 12}, "opset 12"),
        ("vgg16", {"image_size": 50}, "multiples of 32"),
        ("unet", {"image_size": 8}, "multiples of 16"),
        ("unet", {"image_size": 0}, "image_size must be a positive integer, not 0"),
        pytest.param("inception_v3", {"image_size": 50}, "does not fit", marks=pytest.mark.slow),
        ("bert_base", {"sequence_length": 600}, "more than the 512 positions"),
    ],
)
def test_wrong_arguments_are_refused(name: str, settings: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        zoo.build(name, **settings)


def test_builder_refuses_a_parameter_defined_twice() -> None:
    builder = GraphBuilder("g")
    builder.weight("w", np.zeros(2))
    with pytest.raises(UsageError, match="w is defined twice"):
        builder.weight("w", np.zeros(2))


def test_builder_refuses_a_reshape_that_loses_elements() -> None:
    builder = GraphBuilder("g")
    x = builder.input("x", ("N", 4))
    with pytest.raises(UsageError, match="cannot be reshaped"):
        builder.reshape(x, ("N", 5))


def test_example_inputs_suit_the_network() -> None:
    model = zoo.build("bert_base", **SMALL["bert_base"], batch="N")
    feeds = zoo.example_inputs(model, 5, sizes={"N": 8})
    assert feeds["input_ids"].max() > 400
    assert feeds["input_ids"].max() < 500
    assert feeds["input_ids"].dtype == np.int64
    assert set(np.unique(feeds["token_type_ids"])) == {0, 1}
    lengths = feeds["attention_mask"].sum(1)
    assert (np.diff(feeds["attention_mask"]) <= 0).all()
    assert lengths.min() >= 12
    assert len(set(lengths)) > 1
    np.testing.assert_array_equal(feeds["input_ids"], zoo.example_inputs(model, 5, sizes={"N": 8})["input_ids"])


def test_pictures_are_smooth_and_differ_when_averaged() -> None:
    model = zoo.build("resnet18", batch="N", image_size=64, width=0.125)
    x = zoo.example_inputs(model, sizes={"N": 64})["x"]
    assert abs(x.mean()) < 0.1
    assert 0.8 < x.std() < 1.2
    steps = np.diff(x, axis=3).std()
    assert steps < 0.7 * x.std()  # white noise: 1.41
    assert x.mean((2, 3)).std() > 0.2  # white noise: 0.016


def test_command_writes_a_model(tmp_path) -> None:
    path = tmp_path / "small.onnx"
    command = [
        sys.executable,
        "-m",
        "optdnn.models",
        "mlp",
        "-o",
        str(path),
        "--batch",
        "N",
        "--width",
        "0.1",
        "--set",
        "features=64",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "11 nodes" in done.stdout
    model = onnx.load(path)
    assert model == zoo.build("mlp", batch="N", width=0.1, features=64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet"], "Invalid value"),
        ([], "Missing argument"),
        (["mlp", "--set", "x"], "not NAME=VALUE"),
        (["mlp", "--image-size", "4"], "no option"),
        (["mlp", "--batch", "-3"], "batch must be a positive integer, not -3"),
        (["mlp", "--batch", "1.5"], "batch must be a positive integer, not 1.5"),
        (["mlp", "--set", "features=a"], "features must be a positive integer, not 'a'"),
        (["mlp", "--width", "nan"], "width must be a positive number, not nan"),
        (["bert_base", "--set", "decomposed=2"], "decomposed must be true or false, not 2"),
        (["mlp", "--seed", "-1"], "is not in the range"),
    ],
)
def test_command_refuses(arguments: list[str], message: str) -> None:
    from click.testing import CliRunner

    from optdnn.models.__main__ import main

    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_command_says_why_it_cannot_write(tmp_path) -> None:
    from click.testing import CliRunner

    from optdnn.models.__main__ import main

    result = CliRunner().invoke(main, ["mlp", "--width", "0.1", "-o", str(tmp_path / "none" / "m.onnx")])
    assert result.exit_code == 9
    assert "m.onnx cannot be written: No such file" in result.output


def test_importing_the_package_does_not_import_onnx() -> None:
    code = "import sys, optdnn.models; sys.exit('onnx' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
