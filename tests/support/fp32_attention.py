"""Problems of attention in fp32 and tf32, for tests of its kernels."""

from __future__ import annotations

from dataclasses import replace

from optdnn.kernels.attention.general_kernel import Config
from optdnn.kernels.attention.problem import Problem
from support.attention_cases import apart, merged, wide_values

CASES: dict[str, tuple[Problem, Config]] = {
    "one tile": (merged(1, 1, 16, 16, dtype="float32"), Config(1, 1, 16, 2)),
    "tails": (merged(2, 3, 37, 64, dtype="float32"), Config(2, 1, 16, 3)),
    "ring of four": (merged(1, 2, 70, 32, dtype="float32"), Config(1, 1, 16, 4)),
    "four eights of keys": (merged(1, 2, 70, 32, dtype="float32"), Config(2, 1, 64, 2)),
    "warps without queries": (merged(1, 1, 20, 32, dtype="float32"), Config(4, 1, 16, 2)),
    "a head filled up": (merged(1, 2, 30, 36, dtype="float32"), Config(2, 1, 16, 2)),
    "a head of 4": (merged(1, 2, 30, 4, dtype="float32"), Config(1, 1, 32, 2)),
    "a head of 80": (merged(1, 2, 33, 80, dtype="float32"), Config(2, 1, 48, 2)),
    "a head of 192": (merged(1, 1, 20, 192, dtype="float32"), Config(1, 1, 16, 2)),
    "causal": (merged(2, 2, 70, 32, causal=True, dtype="float32"), Config(2, 1, 16, 3)),
    "causal, long tiles": (merged(1, 2, 70, 32, causal=True, dtype="float32"), Config(1, 1, 48, 2)),
    "causal after a past": (
        apart(1, 2, 5, 50, 40, causal=True, causal_offset=45, dtype="float32"),
        Config(1, 1, 32, 2),
    ),
    "causal, some see nothing": (
        apart(1, 2, 40, 20, 32, causal=True, causal_offset=-20, dtype="float32"),
        Config(2, 1, 16, 2),
    ),
    "lengths": (merged(4, 2, 50, 32, lengths=True, dtype="float32"), Config(2, 1, 16, 4)),
    "row mask": (merged(2, 2, 34, 32, mask=(34, 0, 0), dtype="float32"), Config(2, 1, 16, 2)),
    "full mask of odd rows": (merged(1, 2, 33, 32, mask=(0, 33 * 33, 33), dtype="float32"), Config(2, 1, 16, 2)),
    "a mask of pairs": (merged(2, 1, 40, 16, mask=(1600, 0, 40), dtype="float32"), Config(1, 1, 48, 2)),
    "masks of windows": (
        merged(4, 2, 18, 16, mask=(2 * 18 * 18, 18 * 18, 18), mask_period=2, dtype="float32"),
        Config(2, 1, 16, 3),
    ),
    "grouped queries": (apart(2, 4, 20, 37, 32, 2, mask=(0, 0, 37), dtype="float32"), Config(1, 1, 16, 3)),
    "wide values": (wide_values(2, 2, 33, 24, 72, dtype="float32"), Config(2, 1, 16, 2)),
    "narrow values": (wide_values(1, 2, 33, 96, 60, dtype="float32"), Config(4, 1, 32, 2)),
    "a window of both sides": (
        merged(1, 2, 90, 32, reach=3, causal=True, causal_offset=5, dtype="float32"),
        Config(2, 1, 16, 3),
    ),
    "causal from the end": (
        merged(4, 2, 40, 32, lengths=True, causal=True, from_end=True, dtype="float32"),
        Config(2, 1, 16, 2),
    ),
    "softcap": (merged(1, 2, 40, 32, softcap=1.5, dtype="float32"), Config(2, 1, 16, 2)),
    "sinks": (merged(2, 5, 37, 32, sinks=True, dtype="float32"), Config(2, 1, 16, 2)),
    "sinks, a softcap and a mask": (
        merged(2, 2, 33, 32, softcap=0.8, mask=(33, 0, 0), sinks=True, dtype="float32"),
        Config(1, 1, 32, 2),
    ),
    "sinks, some see nothing": (
        apart(1, 4, 40, 20, 32, 2, causal=True, causal_offset=-20, sinks=True, dtype="float32"),
        Config(2, 1, 16, 2),
    ),
    "softcap and a mask": (merged(2, 2, 33, 32, softcap=0.8, mask=(33, 0, 0), dtype="float32"), Config(1, 1, 32, 2)),
    "two warps share keys": (merged(1, 2, 70, 32, dtype="float32"), Config(2, 1, 32, 2, split=2)),
    "two sets of two warps": (merged(2, 3, 37, 64, dtype="float32"), Config(4, 1, 64, 3, split=2)),
    "four warps share keys": (merged(1, 1, 130, 80, dtype="float32"), Config(4, 1, 64, 2, split=4)),
    "warps without keys": (merged(1, 2, 10, 16, dtype="float32"), Config(4, 1, 64, 2, split=4)),
    "shared keys, causal": (
        apart(1, 2, 40, 20, 32, causal=True, causal_offset=-20, dtype="float32"),
        Config(4, 1, 64, 2, split=4),
    ),
    "shared keys, lengths, a window": (
        merged(4, 2, 90, 32, reach=3, causal=True, lengths=True, dtype="float32"),
        Config(4, 1, 32, 2, split=2),
    ),
    "shared keys, sinks, a softcap and a mask": (
        merged(2, 2, 33, 32, softcap=0.8, mask=(33, 0, 0), sinks=True, dtype="float32"),
        Config(2, 1, 32, 2, split=2),
    ),
}
CASES |= {
    f"rounded, {name}": (replace(CASES[name][0], rounded=True), CASES[name][1])
    for name in ("tails", "causal", "a head of 80", "lengths", "softcap and a mask", "two sets of two warps")
}
"""Problems, each with a configuration of ``attention_fp32.cu`` that meets its edges."""
COMPILED: dict[str, Problem] = {
    "ViT": merged(32, 12, 197, 64, dtype="float32"),
    "BERT": merged(32, 12, 128, 64, mask=(128, 0, 0), dtype="float32"),
    "Swin": merged(64, 3, 49, 32, mask=(0, 49 * 49, 49), dtype="float32"),
    "causal": merged(2, 4, 700, 128, causal=True, lengths=True, dtype="float32"),
    "window, softcap": merged(2, 8, 1000, 80, causal=True, reach=200, softcap=30.0, dtype="float32"),
    "widest": merged(2, 8, 300, 192, dtype="float32"),
    "wide, a mask": merged(2, 8, 300, 160, mask=(300 * 300, 0, 300), dtype="float32"),
    "narrow": merged(2, 8, 49, 16, dtype="float32"),
    "sinks": merged(2, 8, 300, 64, causal=True, sinks=True, dtype="float32"),
    "ViT, rounded": replace(merged(32, 12, 197, 64, dtype="float32"), rounded=True),
    "wide, a mask, rounded": replace(merged(2, 8, 300, 160, mask=(300 * 300, 0, 300), dtype="float32"), rounded=True),
}
"""Problems of networks, to be compiled."""
