"""Lockfiles: read, compared with the facts of a build, and their timings used."""

from __future__ import annotations

import json
from random import Random

from fuzz.files import in_file
from fuzz.judge import ours
from fuzz.targets import timing_cache
from fuzz.trees import mutated_json
from optdnn.lockfile import FORMAT, VERSION, Lockfile, engine_digests
from optdnn.runtime.program import Program
from optdnn.tuning.timing_cache import TimingCache

COVERED = ("optdnn.lockfile", "optdnn.tuning.timing_cache", "optdnn.runtime.file")
FACTS = {
    "model": "a" * 64,
    "options": {"target": "cpu", "opt_level": 2, "shapes": {"x": [1, "n"]}, "io_dtype": None, "values": {}},
    "versions": {"optdnn": "1", "code": "c" * 64},
    "machine": {"cpu": "x", "flags": ["avx2"]},
    "seeds": {"inputs": 1},
}
PROGRAM = Program("reference", "fp32", (), (), (), (), [])


def seeds() -> list[bytes]:
    timings = json.loads(timing_cache.seeds()[0])
    plain = {
        "format": FORMAT,
        "version": VERSION,
        "facts": FACTS,
        "timings": timings,
        "engine": engine_digests(PROGRAM),
    }
    other = {**plain, "engine": {**plain["engine"], "sha256": "0" * 64}}
    return [json.dumps(p).encode() for p in (plain, other)]


def mutate(data: bytes, rng: Random) -> bytes:
    return mutated_json(data, rng)


def one_input(data: bytes) -> None:
    with ours():
        lock = Lockfile.read(in_file(data))
        TimingCache.of_sections(lock.timings, "a lockfile")
        with ours():
            lock.check_facts(FACTS)
        lock.check_engine(PROGRAM)
