"""The time of a launch of ``attention_sm90.cu`` with at most one block per multiprocessor: latency is the bound.

Fitted to chains of twelve attentions of 128 to 577 tokens with heads of 64 features on an H200, fp16 (us; "share": the
warpgroups share the keys of 64 queries, in tiles of the bracketed number of keys):

| heads x tokens | one warpgroup | two | two share | three share | four share |
|---|---|---|---|---|---|
| 12 x 128 | 2.60 | 3.41 | 2.64 (64) | 2.89 (48) | 3.01 (32) |
| 12 x 197 | 3.44 | 4.47 | 3.25 (112) | 3.45 (80) | 3.69 (64) |
| 12 x 257 | | 4.94 | 3.63 (144) | 3.71 (96) | 4.06 (80) |
| 12 x 576 | | 7.18 | | 5.42 (96) | 5.89 (80) |
| 6 x 577 | 6.16 | 8.11 | 5.74 (160) | 5.80 (128) | 5.76 (80) |
"""

from __future__ import annotations

START = 1.26e-6
"""Seconds of a dependent launch without its tiles."""
SCORE, PRODUCT = 5.9e-9, 4.6e-9
"""Seconds per key of a warpgroup's first tile: its scores, and its products with heads of 64 features."""
NEXT, NEXT_SCORE, NEXT_PRODUCT = 0.45e-6, 2.4e-9, 2.0e-9
"""Seconds of a further tile, and per key of it: its scores and products. Its products overlap the softmax of the tile before."""
WAIT = 1.2e-6
"""Seconds that a further tile waits if its ring stage is free only after the tile before has been multiplied."""
BESIDE, BESIDE_TILE = 0.4e-6, 0.45e-6
"""Seconds of a further warpgroup with its own queries on the multiprocessor, and of each of its tiles."""
SHARED, SHARED_PART, LOADED = 0.25e-6, 0.33e-6, 0.9e-9
"""Seconds if warpgroups share the keys of 64 queries: of the final sum, of each further warpgroup's part of it, and of each loaded
key."""


def seconds(
    keys: int, tiles: int, groups: int, head: int, scores: float, split: int = 1, *, ahead: bool = True
) -> float:
    """Predicted seconds of a dependent launch.

    ``keys``: keys of a tile. ``tiles``: tiles of the busiest warpgroup. ``groups``: warpgroups on a multiprocessor with queries of
    their own. ``head``: features. ``scores``: work of a score with its mask over the work of one without. ``split``: warpgroups
    that share the keys of 64 queries. ``ahead``: a warpgroup's next tile is loaded while it multiplies the current one."""
    wide = head / 64
    first = keys * (SCORE * scores + PRODUCT * wide)
    further = NEXT + (0.0 if ahead else WAIT) + keys * (NEXT_SCORE * scores + NEXT_PRODUCT * wide)
    alone = START + first + (tiles - 1) * further + (groups - 1) * (BESIDE + BESIDE_TILE * tiles)
    if split == 1:
        return alone
    return alone + SHARED + (split - 1) * wide * (SHARED_PART + LOADED * keys * tiles * split)


MEET, SENT = 1.0e-6, 42e9
"""Seconds in which the blocks of a cluster meet, and bytes per second that one of them receives. With eight blocks, 16 x 16,384 and
64 x 4,096 took 12.3 and 7.0 us on an H200 (13.4 and 8.2 by this model)."""


def shared(sharers: int, warps: int, head: int) -> float:
    """Further seconds if so many blocks of a cluster share queries: the first block adds the results of the others, of so many warps
    each. ``head``: features."""
    return 0.0 if sharers == 1 else MEET + (sharers - 1) * warps * (head / 8 + 1) * 512 / SENT
