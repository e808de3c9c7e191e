"""Timing caches: opened, asked for all of their contents, and written again."""

from __future__ import annotations

import json
from random import Random

from fuzz.files import in_file
from fuzz.judge import ours
from fuzz.trees import mutated_json
from optdnn.tuning.timing_cache import FORMAT, VERSION, TimingCache

COVERED = ("optdnn.tuning.timing_cache", "optdnn.runtime.file", "optdnn.text_file")


def seeds() -> list[bytes]:
    versions = {"driver": "13000", "nvrtc": "13.0"}
    network = {"choices": {"s": ["gemv", "t32"]}, "ms": 0.5, "versions": versions}
    full = {
        "format": FORMAT,
        "version": VERSION,
        "entries": {"a" * 16: 0.25, "key": 3},
        "candidates": {"k": {"us": 1.5, "versions": versions}, "l": {"failed": "it hangs", "versions": versions}},
        "networks": {"n": {**network, "seconds": 1.0, "streams": [1, 2], "problems": "p"}},
        "tried": {"t": {"refused": "it crashes"}, "u": {"cut": {"y": "no kernel"}}},
    }
    return [json.dumps(full).encode(), json.dumps({**full, "candidates": {}, "networks": {}, "tried": {}}).encode()]


def mutate(data: bytes, rng: Random) -> bytes:
    return mutated_json(data, rng)


def one_input(data: bytes) -> None:
    with ours():
        cache = TimingCache.open(in_file(data))
        for key in list(cache.entries):
            cache.get(key)
        for key in list(cache.candidates):
            cache.measured(key)
        for key in list(cache.networks):
            cache.network(key)
        for key in list(cache.tried):
            cache.outcome(key)
        cache.excerpt()
        cache.put("fuzz", 1.0)
        cache.save()
        TimingCache.open(cache.path)
