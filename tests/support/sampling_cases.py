"""SampleToken alone: graphs, settings of all kinds, and logits for which each setting matters."""

from __future__ import annotations

from typing import Any

import numpy as np

from optdnn.ir.graph import Graph
from optdnn.ops.sampling import SETTINGS
from optdnn.types import DTYPES, FP32, Array, tensor

KINDS = ("greedy", "plain", "top_k", "top_p", "both", "one", "all", "hot", "least")
"""The settings of each row of a batch."""


def graph(vocabulary: int, precision: str = "fp32", batch: int = len(KINDS)) -> Graph:
    """SampleToken with inputs of these sizes."""
    made = Graph()
    operands = [made.add_input("logits", tensor(DTYPES[precision], batch, vocabulary))]
    operands += [made.add_input(name, tensor(dtype, batch)) for name, dtype in SETTINGS.items()]
    made.add_output(made.add("SampleToken", operands).value, "token")
    return made


def settings(vocabulary: int, position: int = 0, seed: int = 7) -> dict[str, Array]:
    """The settings of :data:`KINDS`, in their order."""
    rows: list[tuple[float, int, float]] = [
        (0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, min(40, vocabulary - 1), 1.0), (1.3, 0, 0.9), (0.8, 20, 0.5), (1.0, 1, 0.3),
        (1.0, vocabulary, 1.5), (1e30, -1, 1.0), (1.0, 0, 0.0),
    ]  # fmt: skip
    columns = zip(("temperature", "top_k", "top_p"), zip(*rows, strict=True), strict=True)
    found = {name: np.array(values, SETTINGS[name]) for name, values in columns}
    one = np.ones(len(rows), np.int64)
    return found | {"seed": one * seed + np.arange(len(rows)), "position": one * position}


def feeds(vocabulary: int, precision: str = "fp32", position: int = 0, **changes: Any) -> dict[str, Array]:
    """Logits with ties (rounded to eighths), some of them -inf, and the settings of :data:`KINDS`."""
    rng = np.random.default_rng(vocabulary)
    logits = np.round(rng.standard_normal((len(KINDS), vocabulary)) * 24) / 8
    logits[:, ::7] = -np.inf
    given = {"logits": logits.astype(DTYPES[precision] if precision != "fp32" else FP32)}
    return {**given, **settings(vocabulary, position), **changes}
