"""Real exported networks for tests: the ``light_*`` graphs of the onnx wheel, and skeleton graphs beside the repository.

Skeletons come from ``../shared/graphs.tar.xz`` (weights refilled from a seed by ``../shared/fill.py``) where that folder
exists; tests that need it are skipped with the reason elsewhere.
"""

from __future__ import annotations

import functools
import importlib.util
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest

from optdnn.types import Array

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
LIGHT_MODELS = tuple(sorted(p.stem for p in LIGHT.glob("light_*.onnx")))
CONVOLUTIONAL = (
    "resnet18 resnet50 resnext50_32x4d mobilenet_v2 mobilenet_v3_large efficientnet_b0 convnext_tiny googlenet "
    "squeezenet1_1 vgg16_bn alexnet fcn_resnet50 deeplabv3_mobilenet_v3_large"
).split()
"""The shared architectures whose operators this release covers."""
EXPORTERS = ("ts", "dyn")


@functools.cache
def fill() -> ModuleType:
    """The module that refills skeletons; skips the test where it is absent."""
    path = SHARED / "fill.py"
    if not path.exists():
        pytest.skip("the shared graphs are not beside the repository (../shared)")
    spec = importlib.util.spec_from_file_location("fill", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shared(name: str, folder: Path) -> onnx.ModelProto:
    """The shared graph ``resnet50.ts`` and so on, with its seeded weights."""
    filler = fill()
    with tarfile.open(SHARED / "graphs.tar.xz") as tar:
        for member in (f"graphs/{name}.onnx", f"graphs/{name}.json"):
            tar.extract(member, folder, filter="data")
    model: onnx.ModelProto = filler.fill(str(folder / "graphs" / f"{name}.onnx"))
    return model


def light(name: str, seed: int = 7) -> onnx.ModelProto:
    """A ``light_*`` graph with its constant weights replaced by seeded ones: as shipped they hold one value each."""
    model = onnx.load(LIGHT / f"{name}.onnx")
    rng = np.random.default_rng(seed)
    tensors = {t.name: t for t in model.graph.initializer}
    roles: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            roles.update(zip(node.input[1:], ("one", "zero", "zero", "one"), strict=False))
    made: dict[str, Array] = {}
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape":
            roles.setdefault(node.output[0], "weight")
    shapes = {t.name: tuple(onnx.numpy_helper.to_array(t)) for t in tensors.values() if t.data_type == 7}
    keep = []
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in shapes:
            made[node.output[0]] = _weights(rng, shapes[node.input[0]], roles.get(node.output[0], "weight"))
        else:
            keep.append(node)
    del model.graph.node[:]
    model.graph.node.extend(keep)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in made.items())
    return model


def _weights(rng: np.random.Generator, shape: tuple[int, ...], role: str) -> Array:
    if role == "one":
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    if role == "zero" or len(shape) < 2:
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)
    fan_in = int(np.prod(shape[1:])) if len(shape) > 2 else max(shape)
    return (rng.standard_normal(shape) * (2 / fan_in) ** 0.5).astype(np.float32)


def picture(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """A smooth random picture: white noise would leave every pooled feature nearly the same, whatever the input."""
    h, w = shape[-2:]
    coarse = rng.standard_normal((*shape[:-2], 5, 5)) * rng.uniform(0.5, 2.0, (*shape[:-2], 1, 1))
    y, x = np.minimum(np.arange(h) * 5 // h, 4), np.minimum(np.arange(w) * 5 // w, 4)
    return (coarse[..., y, :][..., x] + 0.3 * rng.standard_normal(shape)).astype(np.float32)


def relative_error(got: dict[str, Array], want: list[Any]) -> float:
    """Largest difference over the largest magnitude of each output, worst output."""
    worst = 0.0
    for a, b in zip(got.values(), want, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        worst = max(worst, float(np.abs(a.astype(np.float64) - b).max()) / max(float(np.abs(b).max()), 1e-30))
    return worst
