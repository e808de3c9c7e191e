"""Attention whose constant mask has large numbers that count stays fp32: 16-bit floats would round them too much.

ALiBi adds a slope times the position to each score. In fp16, neighbors near 2,000 differ by 1, and the weights of the nearest keys
would be wrong by that factor. What is far below the largest number of its row has no weight, and may be rounded."""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph
from optdnn.passes.support.attention_mask import HIDDEN_TWICE, LARGE_BIAS

WEIGHTLESS = 30.0
"""A score that is this much below the largest one of its row has no weight."""


def large_biases(graph: Graph) -> dict[int, str]:
    """Op id -> the reason to stay in fp32."""
    found: dict[int, str] = {}
    for op in graph.of_kind("Attention"):
        mask = graph.constant_value(op.input(3))
        if mask is None or mask.dtype == np.bool_ or not mask.size:
            continue
        last = op.attrs.is_causal and mask.shape[-2] == 1  # each key is the last one that some query sees
        counts = mask > (HIDDEN_TWICE if last else mask.max(-1, keepdims=True) - WEIGHTLESS)
        size = np.abs(mask).max(where=counts & np.isfinite(mask), initial=0.0)
        if size > LARGE_BIAS:
            found[op.id] = f"numbers of its mask reach {size:.3g}, which 16 bits round too much"
    return found
