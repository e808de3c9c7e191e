"""Calibration caches, finished and unfinished: opened, merged with the results of a batch, and written again."""

from __future__ import annotations

import json
from random import Random

import numpy as np

from fuzz.files import in_file
from fuzz.judge import ours
from fuzz.trees import mutated_json
from optdnn.calibration.cache import FORMAT, CalibrationCache, Extremes

COVERED = ("optdnn.calibration", "optdnn.passes.support.ranges", "optdnn.runtime.file")
KEY = {"graph": "g", "data": "d", "method": "max"}


def seeds() -> list[bytes]:
    extremes = Extremes.of(np.ones((2, 3, 4), np.float32)).to_plain()
    done = {"batches": 2, "done": True, "table": {"a": extremes, "b": extremes}}
    counts = {"batches": 1, "done": False, "table": {"a": [1, 2, 3]}}
    result = {
        "method": "max", "ranges": {"a": [0, 1]}, "seen": {"a": [0, 1.5]}, "channels": {"a": [1, 2]}, "means": {"a": [0.5]},
        "samples": 4,
    }  # fmt: skip
    entries = [
        {"key": KEY, "progress": {"extremes": done, "counts": counts}},
        {"key": KEY, "result": result},
        {"key": {**KEY, "graph": "other"}, "result": result},
    ]
    return [json.dumps({"format": FORMAT, "entries": [e, entries[-1]]}).encode() for e in entries]


def mutate(data: bytes, rng: Random) -> bytes:
    return mutated_json(data, rng)


def one_input(data: bytes) -> None:
    with ours():
        cache = CalibrationCache.open(in_file(data), **KEY)
        if cache.progress is not None:
            cache.save(cache.progress)
        if cache.result is not None:
            cache.finish(cache.result)
