"""The ``light_*`` graphs of the onnx wheel with real weights, smooth pictures, and the error of a result against another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx

from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Value
from optdnn.ops.fused import plain_attrs
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import Array

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
LIGHT_MODELS = tuple(sorted(p.stem for p in LIGHT.glob("light_*.onnx")))


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
    shapes = {t.name: _narrow(onnx.numpy_helper.to_array(t)) for t in tensors.values() if t.data_type == 7}
    keep = []
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in shapes:
            made[node.output[0]] = _weights(rng, shapes[node.input[0]], roles.get(node.output[0], "weight"))
        else:
            keep.append(node)
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(keep)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in made.items())
    if keep[-1].op_type == "Softmax":  # logits say more than probabilities: one of these may be 1
        model.graph.output[0].name = keep[-1].input[0]
        del model.graph.node[-1]
    return _calibrated(model, rng)


def _narrow(dims: Array) -> tuple[int, ...]:
    """AlexNet, VGG and ZFNet have most of their weights in the wide layers after the convolutions. A sixteenth of these is
    enough."""
    return tuple(256 if d == 4096 else int(d) for d in dims)


def _calibrated(model: onnx.ModelProto, rng: np.random.Generator) -> onnx.ModelProto:
    """The model with statistics of each BatchNormalization set to those of its input on a picture, as training would set them.

    Otherwise deep networks with random weights saturate, or forget their input.
    """
    graph = import_model(model)
    results: dict[Value, Array] = {}
    statistics: dict[str, Array] = {}
    for op in graph.order():
        if op.kind == "Input":
            results[op.value] = picture(rng, graph.type(op.value).static_shape)
        elif op.kind == "Constant":
            results[op.value] = op.attrs.value
        elif op.kind != "Output":
            operands = [None if v is None else results[v] for v in op.inputs]
            if op.kind == "BatchNormalization" and operands[0] is not None:
                axes = tuple(a for a in range(operands[0].ndim) if a != 1)
                for slot, array in ((3, operands[0].mean(axes)), (4, operands[0].var(axes) + 1e-3)):
                    value = op.inputs[slot]
                    assert value is not None
                    operands[slot] = statistics[graph.output(value).name] = array.astype(np.float32)
            outputs = run_kernel(op.kind, operands, plain_attrs(op.definition, op.attrs))
            results.update({Value(op.id, i): a for i, a in enumerate(outputs)})
    for t in model.graph.initializer:
        if t.name in statistics:
            t.CopyFrom(onnx.numpy_helper.from_array(statistics[t.name], t.name))
    return model


def _weights(rng: np.random.Generator, shape: tuple[int, ...], role: str) -> Array:
    if role == "one":
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    if role == "zero" or len(shape) < 2:
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)
    fan_in = int(np.prod(shape[1:])) if len(shape) > 2 else max(shape)
    return rng.standard_normal(shape, np.float32) * np.float32((2 / fan_in) ** 0.5)


def picture(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """A smooth random picture. With white noise, all pooled features would be nearly equal for every input."""
    h, w = shape[-2:]
    coarse = rng.standard_normal((*shape[:-2], 5, 5)) * rng.uniform(0.5, 2.0, (*shape[:-2], 1, 1))
    y, x = np.minimum(np.arange(h) * 5 // h, 4), np.minimum(np.arange(w) * 5 // w, 4)
    return (coarse[..., y, :][..., x] + 0.3 * rng.standard_normal(shape)).astype(np.float32)


def relative_error(got: dict[str, Array], want: list[Any]) -> float:
    """The largest relative error of all outputs: the largest difference over the output's largest magnitude."""
    worst = 0.0
    for a, b in zip(got.values(), want, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        worst = max(worst, float(np.abs(a.astype(np.float64) - b).max()) / max(float(np.abs(b).max()), 1e-30))
    return worst
