"""NumPy kernel. The next token of each sequence, drawn from logits with a counter-based random generator."""

from __future__ import annotations

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.types import Array

MASS_BITS = 28
"""The most probable token has a mass of ``2 ** MASS_BITS - 1``. Masses are integers, so their sums do not depend on the order."""
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF
_LOG2_E = np.float32(1.4426950408889634)


def philox(seed: int, position: int) -> int:
    """64 random bits: the first two words of Philox4x32-10 with ``seed`` as key and ``position`` as counter.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
    """
    counter = [position & _WORD, position >> 32 & _WORD, 0, 0]
    key = [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(_ROUNDS):
        one, other = _MULTIPLIERS[0] * counter[0], _MULTIPLIERS[1] * counter[2]
        counter = [other >> 32 ^ counter[1] ^ key[0], other & _WORD, one >> 32 ^ counter[3] ^ key[1], one & _WORD]
        key = [(k + w) & _WORD for k, w in zip(key, _WEYL, strict=True)]
    return counter[0] | counter[1] << 32


def sample_token(
    logits: Array, temperature: Array, top_k: Array, top_p: Array, seed: Array, position: Array
) -> tuple[Array]:
    """The next token of each sequence: logits [batch, vocabulary], the others [batch], to [batch, 1] of int64.

    See :mod:`optdnn.ops.sampling` for the meaning of the settings.
    """
    rows = zip(logits.astype(np.float32), temperature, top_k, top_p, seed, position, strict=True)
    tokens = [_token(x, np.float32(t), int(k), np.float32(p), philox(int(s), int(at))) for x, t, k, p, s, at in rows]
    return (np.array(tokens, np.int64).reshape(-1, 1),)


def _token(x: Array, temperature: np.float32, top_k: int, top_p: np.float32, random: int) -> int:
    highest = x.max(initial=np.float32(-np.inf))  # NaN if there is one
    if not np.isfinite(highest):
        return -1
    if not temperature > 0 or top_k == 1:
        return int(x.argmax())
    with np.errstate(over="ignore"):
        shares = np.exp2((x - highest) * np.minimum(_LOG2_E / temperature, np.float32(3e38)))
    masses = np.minimum(np.floor(shares * np.float32(1 << MASS_BITS)), (1 << MASS_BITS) - 1).astype(np.uint64)
    if 1 < top_k < x.size:
        masses[x < np.partition(x, -top_k)[-top_k]] = 0
    if top_p < 1:
        masses[x < _nucleus(x, masses, top_p)] = 0
    sums = np.cumsum(masses)
    return int(np.searchsorted(sums, np.uint64(random * int(sums[-1]) >> 64), side="right"))


def _nucleus(x: Array, masses: Array, top_p: np.float32) -> np.float32:
    """The lowest logit such that the tokens with at least this logit have the fraction ``top_p`` of all masses."""
    order = np.argsort(-x, kind="stable")
    sums = np.cumsum(masses[order])
    total = int(sums[-1])
    wanted = min(max(int(np.ceil(float(top_p) * float(total))), 1), total)
    least: np.float32 = x[order[np.searchsorted(sums, np.uint64(wanted), side="left")]]
    return least


KERNELS: dict[str, Kernel] = {"SampleToken": sample_token}
