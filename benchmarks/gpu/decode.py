"""Decoding on a GPU, a token a call: caches of fixed capacity kept in place, in two arrays that take turns, and caches that grow.

    python benchmarks/gpu/decode.py --out decode.json [--layers 12 --heads 16 --groups 4 --size 64 --capacity 4096]

All three ways are checked against each other (logits of a few seeded tokens), then the first two are timed: microseconds of a
token, replays between events, the ways in turns. Of caches that grow it tells how long the plan of a new length takes to make.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.decoder import decoder, empty, states, tokens

import optdnn
from optdnn.runtime.cuda.device import Device
from optdnn.runtime.cuda.graphs import time_runs

STEPS = 4


class _Stream:
    def __init__(self, stream: Any):
        self.handle = stream.ptr
        self.synchronize = stream.synchronize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    for name, value in (("layers", 12), ("heads", 16), ("groups", 4), ("size", 64), ("capacity", 4096)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    import cupy

    shape = {n: getattr(args, n) for n in ("layers", "heads", "groups", "size", "capacity")}
    device = Device.open()
    how: dict[str, Any] = {
        "target": f"cuda:{device.arch}",
        "precision": "fp16",
        "io_dtype": "fp16",
        "tactics": "heuristic",
    }
    fixed, growing = decoder(**shape), decoder(**shape, grows=True)
    pairs = states(args.layers)
    ranged = dict.fromkeys(pairs.values(), f"1x{args.groups}x0..16..64x{args.size}")
    started = time.perf_counter()
    engines = {"fixed": optdnn.build(fixed, **how), "grows": optdnn.build(growing, shapes=ranged, **how)}
    built = time.perf_counter() - started
    given = {"token": cupy.zeros((1, 1), np.int64), "at": cupy.zeros(1, np.int64)}
    calls: dict[str, Any] = {}
    for name, model, engine in (("in place", fixed, engines["fixed"]), ("grows", growing, engines["grows"])):
        caches = {n: cupy.asarray(a) for n, a in empty(model, 0, np.float16).items()}
        context: Any = engine.context()
        calls[name] = context.bind({**given, **caches}, state=pairs)
    # Two sets of arrays that take turns: what a network needs whose caches are not kept in place.
    context = engines["fixed"].context()  # type: ignore[assignment]
    sets = [{n: cupy.asarray(a) for n, a in empty(fixed, 0, np.float16).items()} for _ in range(2)]
    turns = [context.bind({**given, **sets[k]}, {o: sets[1 - k][i] for o, i in pairs.items()}) for k in range(2)]
    worst = 0.0
    seconds = []
    for k, token in enumerate(tokens(STEPS)):
        given["at"][:], given["token"][:] = k, cupy.asarray(token)
        logits = cupy.asnumpy(turns[k % 2].run()["logits"]).astype(np.float64)
        for call in calls.values():
            started = time.perf_counter()
            own = cupy.asnumpy(call.run()["logits"]).astype(np.float64)
            seconds.append(time.perf_counter() - started)
            worst = max(worst, float(np.abs(own - logits).max() / np.abs(logits).max()))
    given["at"][:] = args.capacity - 1
    stream = cupy.cuda.Stream(non_blocking=True)
    times: dict[str, list[float]] = {"in place": [], "take turns": []}
    for _ in range(5):
        times["in place"] += time_runs(lambda: calls["in place"].run(stream), _Stream(stream), repeats=10, inner=6)
        times["take turns"] += time_runs(
            lambda: [turn.run(stream) for turn in turns], _Stream(stream), repeats=10, inner=3
        )
    medians = {n: statistics.median(t) * 1e3 / (2 if n == "take turns" else 1) for n, t in times.items()}
    report = {
        "gpu": device.name, "commit": os.environ.get("OPTDNN_COMMIT", ""), "command": "python " + " ".join(sys.argv),
        "decoder": shape, "precision": "fp16", "us_per_token": {n: round(t, 2) for n, t in medians.items()},
        "cache_bytes": sum(a.nbytes for a in sets[0].values()), "difference": worst, "build_seconds": round(built, 2),
        "first_run_of_a_length_s": [round(s, 3) for s in seconds[1::2]], "steps": len(engines["fixed"].program.steps),
    }  # fmt: skip
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
