"""Models with random operators, and the numbers that they must draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser

from optdnn.importers.draws import with_draws
from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.types import Array

ALL = """g (float[3, N] x) => (float[3, N] n, float[3, N] u, float[2, 9000] r, double[9000] d, float[3, N] b, int32[3, 40] k) {
    n = RandomNormalLike<mean = 2.0, scale = 3.0>(x)
    u = RandomUniformLike<low = -1.3, high = 4.1>(x)
    r = RandomNormal<shape = [2, 9000]>()
    d = RandomUniform<shape = [9000], dtype = 11>()
    p = Sigmoid(x)
    b = Bernoulli(p)
    few = Slice(x, zero, four, one)
    k = Multinomial<sample_size = 40>(few)
}"""
"""Every random operator; N is at least 4."""


def model(text: str = ALL, opset: int = 17, functions: str = "", more_opsets: str = "") -> onnx.ModelProto:
    """A model of the text; the slices of :data:`ALL` have their constants."""
    header = f'<ir_version: 10, opset_import: ["" : {opset}{more_opsets}]>'
    made = onnx.parser.parse_model(f"{header}\n{text}\n{functions}")
    for name, value in (("zero", 0), ("four", 4), ("one", 1)) if text == ALL else ():
        made.graph.initializer.append(onnx.numpy_helper.from_array(np.array([value], np.int64), name))
    return made


def graph(text: str = ALL, seed: int = 3, shapes: dict[str, Any] | None = None, **options: Any) -> Graph:
    """The graph of such a model with its draws."""
    return import_model(with_draws(model(text, **options), seed), shapes=shapes)


def feed(n: int = 7000) -> dict[str, Array]:
    return {"x": np.random.default_rng(0).standard_normal((3, n)).astype(np.float32)}


FAMILY = """g (float[3, 7000] x) => (float[3, 7000] y, float[3, 7000] z, int32[3, 40] k) {
    n = RandomNormalLike<mean = 2.0, scale = 3.0>(x)
    u = RandomUniform<shape = [3, 7000], dtype = 11, low = -1.3, high = 4.1>()
    w = CastLike(u, x)
    factor = Add(n, w)
    y = Mul(x, factor)
    zero = Constant<value = float {0.0}>()
    less = Less(x, zero)
    one = CastLike(less, x)
    half = Constant<value = float {0.5}>()
    p = Mul(one, half)
    b = Bernoulli(p)
    z = Mul(b, x)
    start = Constant<value_ints = [0]>()
    end = Constant<value_ints = [4]>()
    axis = Constant<value_ints = [1]>()
    few = Slice(x, start, end, axis)
    even = Sub(few, few)
    k = Multinomial<sample_size = 40>(even)
}"""
"""Random draws at sizes that are not folded. No draw depends on the rounding of an input."""


def family() -> Graph:
    return graph(FAMILY)
