"""Small ONNX models of several families, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper


def small_model(text: str, seed: int = 0, **weights: Any) -> onnx.ModelProto:
    """A model from ONNX's text form; ``weights`` are arrays, or shapes of random ones that keep the variance."""
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g {text}')
    rng = np.random.default_rng(seed)
    for name, value in weights.items():
        if isinstance(value, tuple):
            fan_in = int(np.prod(value[1:])) if len(value) > 2 else value[0]
            value = (rng.standard_normal(value) / np.sqrt(fan_in)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    onnx.checker.check_model(model)
    return model


def save(model: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    """The model as a file."""
    onnx.save(model, folder / name)
    return folder / name


def mlp(batch: int | str = 4) -> onnx.ModelProto:
    return small_model(
        f"(float[{batch},24] x) => (float[{batch},10] y) {{ a = MatMul(x, w1) b = LeakyRelu<alpha = 0.125>(a) y = MatMul(b, w2) }}",
        w1=(24, 48), w2=(48, 10),
    )  # fmt: skip


def residual() -> onnx.ModelProto:
    return small_model(
        """(float[2,8,12,12] x) => (float[2,8,12,12] y) {
        a = Conv<pads = [1,1,1,1]>(x, w1) b = Relu(a) c = Conv<pads = [1,1,1,1]>(b, w2) d = Sigmoid(c) y = Sub(d, x) }""",
        w1=(8, 8, 3, 3), w2=(8, 8, 3, 3),
    )  # fmt: skip


def two_heads() -> onnx.ModelProto:
    return small_model(
        """(float[4,16] x) => (float[4,8] y, float[4,8] z) { a = MatMul(x, w) b = Relu(a)
        y = MatMul(b, w1) z = MatMul(b, w2) }""",
        w=(16, 32), w1=(32, 8), w2=(32, 8),
    )  # fmt: skip


def attention(batch: int | str = 2) -> onnx.ModelProto:
    n = batch
    return small_model(
        f"""(float[{n},16,32] x) => (float[{n},16,32] y)
        <int64[4] split = {{0, 16, 2, 16}}, int64[3] joined = {{0, 16, 32}}, float scale = {{0.25}}> {{
        q0 = MatMul(x, wq) k0 = MatMul(x, wk) v0 = MatMul(x, wv)
        q1 = Reshape(q0, split) k1 = Reshape(k0, split) v1 = Reshape(v0, split)
        q = Transpose<perm = [0,2,1,3]>(q1) k = Transpose<perm = [0,2,3,1]>(k1) v = Transpose<perm = [0,2,1,3]>(v1)
        s0 = MatMul(q, k) s1 = Mul(s0, scale) s = Softmax<axis = -1>(s1) o = MatMul(s, v)
        t = Transpose<perm = [0,2,1,3]>(o) r = Reshape(t, joined) y = MatMul(r, wo) }}""",
        wq=(32, 32), wk=(32, 32), wv=(32, 32), wo=(32, 32),
    )  # fmt: skip


def recurrent() -> onnx.ModelProto:
    return small_model(
        """(float[6,2,8] x) => (float[6,1,2,16] y, float[1,2,16] h) { y, h = GRU<hidden_size = 16>(x, w, r, b) }""",
        w=(1, 48, 8), r=(1, 48, 16), b=np.full((1, 96), 0.1, np.float32),
    )  # fmt: skip


def normalized() -> onnx.ModelProto:
    return small_model(
        """(float[4,6,32] x) => (float[4,6,32] y) { a = LayerNormalization<axis = -1>(x, scale, bias)
        b = MatMul(a, w) c = Elu<alpha = 0.75>(b) y = Add(c, x) }""",
        scale=np.linspace(0.5, 2, 32, dtype=np.float32), bias=np.linspace(-1, 1, 32, dtype=np.float32), w=(32, 32),
    )  # fmt: skip


def quantized() -> onnx.ModelProto:
    rng = np.random.default_rng(5)
    return small_model(
        """(float[2,16,8,8] x) => (float[2,16,8,8] y) <float s = {0.03}, int8 z = {0}, float sw = {0.002}, float so = {0.05}> {
        xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z) wd = DequantizeLinear(w, sw, z)
        c = Conv<pads = [1,1,1,1]>(xd, wd) cq = QuantizeLinear(c, so, z) cd = DequantizeLinear(cq, so, z) y = Relu(cd) }""",
        w=rng.integers(-127, 128, (16, 16, 3, 3)).astype(np.int8),
    )  # fmt: skip


def branches() -> onnx.ModelProto:
    return small_model(
        """(float[1,4,8,8] x) => (float[1,4,16,16] y) <float[0] roi = {}, float[4] scales = {1, 1, 2, 2}> {
        a = Conv<pads = [1,1,1,1]>(x, w) b = AveragePool<kernel_shape = [3,3], pads = [1,1,1,1]>(a)
        c = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1]>(a) d = Conv(b, v) e = Conv<pads = [1,1,1,1]>(c, w)
        f = Sub(d, e) y = Resize<mode = "nearest">(f, roi, scales) }""",
        w=(4, 4, 3, 3), v=(4, 4, 1, 1),
    )  # fmt: skip


def retrained(model: onnx.ModelProto, seed: int = 5) -> onnx.ModelProto:
    """The model after more training: each element of its float weights times a factor of 0.5 to 1.5."""
    other = onnx.ModelProto()
    other.CopyFrom(model)
    rng = np.random.default_rng(seed)
    for t in other.graph.initializer:
        array = numpy_helper.to_array(t)
        if array.dtype.kind == "f" and array.size > 1:
            t.CopyFrom(
                numpy_helper.from_array((array * rng.uniform(0.5, 1.5, array.shape)).astype(array.dtype), t.name)
            )
    return other
