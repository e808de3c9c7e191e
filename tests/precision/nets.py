"""A small network for tests of automatic precision, and data that it classifies."""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph
from optdnn.ops.base import Stage
from optdnn.ops.gemm import GemmAttrs
from optdnn.types import Array, tensor

WIDTH, CLASSES, SAMPLES = 16, 4, 64


def perceptron(scale: float = 1.0) -> Graph:
    """x -> Gemm + Relu ("first") -> Gemm + Relu ("second") -> Gemm ("head"), with a symbolic batch. ``scale`` multiplies the
    result of "second" and divides the head's weights."""
    from optdnn.dim import symbol

    rng = np.random.default_rng(3)
    g = Graph("perceptron")
    x = g.add_input("x", tensor(np.float32, symbol("N"), WIDTH))
    value = x
    for name, out, factor in (("first", WIDTH, 1.0), ("second", WIDTH, scale), ("head", CLASSES, 1 / scale)):
        w = (rng.standard_normal((WIDTH, out)) * factor / 4).astype(np.float32)
        b = (rng.standard_normal(out) * factor / 4).astype(np.float32) if name != "head" else np.zeros(out, np.float32)
        stages = () if name == "head" else (Stage("Relu", (~0,)),)
        op = g.add(
            "Gemm",
            [value, g.add_constant(w, f"{name}.w"), g.add_constant(b, f"{name}.b")],
            GemmAttrs(epilogue=stages),
            names=[f"{name}.out"],
            src=[name],
        )
        value = op.value
    g.add_output(value, "y")
    return g


def data() -> dict[str, Array]:
    """Inputs, and the classes that the network itself gives them as labels."""
    from optdnn.ir.evaluate import evaluate

    x = np.random.default_rng(5).standard_normal((SAMPLES, WIDTH)).astype(np.float32)
    return {"x": x, "labels": evaluate(perceptron(), {"x": x})["y"].argmax(axis=1)}
