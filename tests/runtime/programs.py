"""Small programs for the tests of the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optdnn.runtime.program import Buffer, Program, Step
from optdnn.runtime.steps.reference import reference_step
from optdnn.types import Array, TensorSpec

F32 = np.dtype(np.float32)


def program(
    inputs: Sequence[tuple[str, Any, tuple[int | str, ...]]],
    outputs: Sequence[tuple[str, int]],
    steps: Sequence[Step],
    intermediates: Sequence[tuple[Any, tuple[int | str, ...]]] = (),
    constants: Sequence[Array] = (),
    **more: Any,
) -> Program:
    """A program whose buffers are numbered: inputs, then constants, then intermediates."""
    buffers = [Buffer(name, np.dtype(dtype), shape) for name, dtype, shape in inputs]
    buffers += [Buffer(f"c{i}", c.dtype, c.shape, blob=i) for i, c in enumerate(constants)]
    buffers += [Buffer(f"t{i}", np.dtype(dtype), shape) for i, (dtype, shape) in enumerate(intermediates)]
    more.setdefault("target", "reference")
    more.setdefault("precision", "fp32")
    return Program(
        inputs=tuple((TensorSpec(name, np.dtype(d), shape), i) for i, (name, d, shape) in enumerate(inputs)),
        outputs=tuple((TensorSpec(name, buffers[i].dtype, buffers[i].shape or ()), i) for name, i in outputs),
        buffers=tuple(buffers),
        steps=tuple(steps),
        blobs=list(constants),
        **more,
    )


def mlp(seed: int = 0, n: int | str = "n") -> Program:
    """relu(x @ w + b) @ v for x: fp32[n, 5]; the hidden activation is the second output."""
    rng = np.random.default_rng(seed)
    w, b, v = (rng.standard_normal(s).astype(np.float32) for s in ((5, 8), (8,), (8, 3)))
    return program(
        [("x", F32, (n, 5))],
        [("y", 7), ("hidden", 6)],
        [
            reference_step("MatMul", {}, (0, 1), (4,), ("dense1",)),
            reference_step("Add", {}, (4, 2), (5,), ("dense1",)),
            reference_step("Relu", {}, (5,), (6,), ("relu1",)),
            reference_step("MatMul", {}, (6, 3), (7,), ("dense2",)),
        ],
        [(F32, (n, 8)), (F32, (n, 8)), (F32, (n, 8)), (F32, (n, 3))],
        [w, b, v],
        meta={"passes": [{"name": "fold_constants", "changes": 2}], "bound": float("inf")},
    )


def mlp_expected(p: Program, x: Array) -> dict[str, Array]:
    """The expected results of the MLP, computed with NumPy."""
    w, b, v = p.blobs
    hidden = np.maximum(x @ w + b, 0)
    return {"y": hidden @ v, "hidden": hidden}
