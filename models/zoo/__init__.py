"""Builders of real architectures with seeded weights: ONNX models to test, optimize and time without downloading
anything.

    from optdnn.models import zoo
    model = zoo.build("resnet50", batch="N", seed=0)        # an onnx.ModelProto
    feeds = zoo.example_inputs(model, seed=1)                # {"x": float32 (2, 3, 224, 224)}

Channel counts, strides and block counts are the papers' (each builder names its source); convolution and
BatchNormalization are separate nodes, and node names are those of torch's exporter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from math import inf
from typing import Any

import onnx

from optdnn.errors import UsageError
from optdnn.models.zoo import (
    bert,
    densenet,
    efficientnet,
    inception,
    mlp,
    mobilenet,
    recurrent,
    resnet,
    squeezenet,
    unet,
    vgg,
    vit,
    yolox,
)
from optdnn.models.zoo.common import ImageOptions, Options
from optdnn.models.zoo.inputs import example_inputs
from optdnn.models.zoo.net import Net
from optdnn.types import Array

__all__ = ["BUILDERS", "NAMES", "build", "example_inputs", "options"]

PICTURES = ImageOptions()
BUILDERS: dict[str, tuple[Callable[[Net, Any], None], Options]] = {
    "resnet18": (resnet.resnet18, PICTURES),
    "resnet50": (resnet.resnet50, PICTURES),
    "mobilenet_v2": (mobilenet.mobilenet_v2, PICTURES),
    "efficientnet_b0": (efficientnet.efficientnet_b0, PICTURES),
    "vgg16": (vgg.vgg16, PICTURES),
    "vgg16_bn": (vgg.vgg16_bn, PICTURES),
    "densenet121": (densenet.densenet121, PICTURES),
    "inception_v3": (inception.inception_v3, ImageOptions(image_size=299)),
    "squeezenet1_1": (squeezenet.squeezenet1_1, PICTURES),
    "unet": (unet.unet, ImageOptions(image_size=256, num_classes=2)),
    "yolox_s": (yolox.yolox_s, yolox.YoloxOptions(image_size=640, num_classes=80)),
    "vit_b_16": (vit.vit_b_16, vit.VitOptions()),
    "bert_base": (bert.bert_base, bert.BertOptions()),
    "lstm": (recurrent.lstm, recurrent.LstmOptions()),
    "mlp": (mlp.mlp, mlp.MlpOptions()),
}
"""Name -> the function that builds the network, and its options with their defaults."""
NAMES = tuple(BUILDERS)


def options(name: str) -> dict[str, Any]:
    """The options of a builder with their defaults (``batch``, ``image_size``, ``width``, …); UsageError for an
    unknown name."""
    if name not in BUILDERS:
        raise UsageError(f"there is no network {name!r} in the zoo", hint=f"take one of {', '.join(NAMES)}")
    return asdict(BUILDERS[name][1])


def build(
    name: str, *, seed: int = 0, opset: int = 17, state: Mapping[str, Array] | None = None, **settings: Any
) -> onnx.ModelProto:
    """Build a network of the zoo.

    ``settings`` are those that :func:`options` lists for it: ``batch`` (an int, or a name such as "N" for a symbolic dimension),
    ``image_size``, ``num_classes``, ``width`` and ``depth`` (scales of channels and of block counts, for small
    variants in tests), and the network's own options. Equal arguments give byte-identical models. ``state`` (name ->
    array, a torch ``state_dict`` of the same architecture) replaces the seeded weights. Raises UsageError for an
    unknown name, setting or opset.
    """
    known = options(name)
    if unknown := sorted(set(settings) - set(known)):
        raise UsageError(f"{name} has no option {', '.join(unknown)}", hint=f"its options are {', '.join(known)}")
    builder, defaults = BUILDERS[name]
    symbolic = {f.name for f in fields(defaults) if f.type == "Batch"}
    for key, value in settings.items():
        if not (key in symbolic and isinstance(value, str)):
            _check(key, value, known[key])
    net = Net(name, opset=opset, seed=seed, state=state, doc=inspect.getdoc(inspect.getmodule(builder)) or "")
    builder(net, replace(defaults, **settings))
    return net.model()


def _check(key: str, value: Any, usual: Any) -> None:
    """Raise UsageError for a value of another kind than the setting's default: sizes and scales are positive numbers."""
    kinds = {bool: "true or false", int: "a positive integer", float: "a positive number"}
    wanted = kinds.get(type(usual))
    if wanted is None or (type(usual) is int and usual <= 0):
        return
    fits = isinstance(value, (int, float) if type(usual) is float else type(usual))
    if not fits or (type(usual) is not bool and (isinstance(value, bool) or not 0 < value < inf)):
        raise UsageError(f"{key} must be {wanted}, not {value!r}")
