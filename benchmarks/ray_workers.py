"""Ray Data on the GPUs of this machine: pictures per second with one worker and with several.

    python -m benchmarks.ray_workers --workers 1 2

Each worker has its own GPU and runs the same engine, from decoded uint8 pictures to classes. Decoding is left out: its speed
depends on the cores. Only the time in which all workers run counts: after the last one has started, and until the first one has
no work left. Prints a row of JSON for the engine alone (``engine.run`` on NumPy arrays, one thread), and one for each number of
workers.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import optdnn
from optdnn.models import zoo

SIZE = 224


def pictures(batch: dict[str, Any]) -> dict[str, Any]:
    """Noise, the same for each batch."""
    rng = np.random.default_rng(0)
    return {"x": rng.integers(0, 256, (len(batch["id"]), SIZE, SIZE, 3), dtype=np.uint8)}


def engine_file(folder: Path, network: str, width: float, batch: int, target: str) -> tuple[Path, str]:
    """An engine that takes pictures, and the name of its input."""
    model = zoo.build(network, batch=batch, width=width)
    (port,), (answer,) = model.graph.input, model.graph.output
    gpu: Any = {"precision": "fp16", "tactics": "heuristic"} if target.startswith("cuda") else {}
    engine = optdnn.build(
        model, target=target, preprocess={port.name: {"resize": None, "crop": None}}, shapes={port.name: (batch, SIZE, SIZE, 3)},
        postprocess={answer.name: "softmax+top-k:5"}, **gpu,
    )  # fmt: skip
    engine.save(folder / "network.engine")
    return folder / "network.engine", port.name


def alone(file: Path, batch: int, seconds: float) -> float:
    """Pictures per second of the engine alone."""
    engine = optdnn.load(file)
    feeds = pictures({"id": range(batch)})["x"]
    for _ in range(3):
        engine.run(feeds)
    began, runs = time.monotonic(), 0
    while time.monotonic() < began + seconds:
        engine.run(feeds)
        runs += 1
    return runs * batch / (time.monotonic() - began)


class Timed(optdnn.Predictor):
    """A predictor that adds its process and the times of each call to the rows."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        found = super().__call__(batch)
        facts = {"process": os.getpid(), "began": began, "ended": time.monotonic()}
        rows = len(next(iter(found.values())))
        return {**found, **{n: np.full(rows, v) for n, v in facts.items()}}


@dataclass(frozen=True)
class Call:
    """A call of a worker's predictor."""

    process: int
    began: float
    ended: float
    rows: int


def calls_of(parts: Iterable[dict[str, Any]]) -> list[Call]:
    """The calls that answered these rows, in the order of their beginnings."""
    rows: dict[tuple[int, float, float], int] = {}
    for part in parts:
        for key in zip(part["process"].tolist(), part["began"].tolist(), part["ended"].tolist(), strict=True):
            rows[key] = rows.get(key, 0) + 1
    return sorted((Call(*key, n) for key, n in rows.items()), key=lambda c: c.began)


def summary(calls: Sequence[Call]) -> dict[str, Any]:
    """Pictures per second while all workers ran: from the latest end of a worker's first call to the earliest beginning of a
    worker's last call. ``idle_ms``: the time per call in which a worker ran no call; this is Ray's own time."""
    by_worker = {c.process: [d for d in calls if d.process == c.process] for c in calls}
    first = max(min(c.ended for c in mine) for mine in by_worker.values())
    last = min(max(c.began for c in mine) for mine in by_worker.values())
    if last <= first:
        raise SystemExit("no time in which all workers ran: give more --batches, or smaller blocks")
    shares = [max(0.0, min(c.ended, last) - max(c.began, first)) / (c.ended - c.began) for c in calls]
    return {
        "pictures_per_second": round(sum(c.rows * s for c, s in zip(calls, shares, strict=True)) / (last - first)),
        "seconds": round(last - first, 2),
        "rows_per_call": max(c.rows for c in calls),
        "call_ms": round(1e3 * float(np.median([c.ended - c.began for c in calls])), 2),
        "idle_ms": round(1e3 * sum(map(idle, by_worker.values())) / len(calls), 2),
    }


def idle(calls: Sequence[Call]) -> float:
    """Seconds between a worker's first and last call in which no call ran. ``calls``: by their beginning."""
    found, until = 0.0, calls[0].ended
    for c in calls:
        found += max(0.0, c.began - until)
        until = max(until, c.ended)
    return found


def measured(file: Path, port: str, workers: int, args: argparse.Namespace) -> dict[str, Any]:
    """A dataset through ``workers``."""
    import ray

    rows = args.batches * args.batch * workers
    blocks = ray.data.range(rows, override_num_blocks=max(1, rows // args.block))
    blocks = blocks.map_batches(pictures).materialize()  # before the clock starts
    answers = blocks.map_batches(
        Timed,
        fn_constructor_args=[str(file)],
        fn_constructor_kwargs={"columns": {port: "x"}},
        batch_size=args.rows,
        num_gpus=int(args.target.startswith("cuda")),
        compute=ray.data.ActorPoolStrategy(
            size=workers, max_concurrent_calls_per_actor=args.calls, enable_true_multi_threading=args.calls > 1
        ),
    )
    calls = calls_of(answers.iter_batches(batch_size=None))
    return {"workers": workers, **summary(calls)}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--network", default="vit_b_16", help="of the zoo (%(default)s)")
    parser.add_argument("--width", type=float, default=2.0, help="of the network's layers (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="of the engine (%(default)s)")
    parser.add_argument("--batches", type=int, default=240, help="for each worker (%(default)s)")
    parser.add_argument(
        "--block", type=int, default=832, help="pictures of a block of the dataset (%(default)s: 125 MB)"
    )
    parser.add_argument("--rows", type=int, default=832, help="Ray's batch_size (%(default)s)")
    parser.add_argument("--calls", type=int, default=1, help="calls of a worker at once (%(default)s)")
    parser.add_argument("--target", default="cuda")
    args = parser.parse_args(words)
    import ray

    with tempfile.TemporaryDirectory(prefix="optdnn-ray-") as folder:
        file, port = engine_file(Path(folder), args.network, args.width, args.batch, args.target)
        by_itself = alone(file, args.batch, 2)
        print(json.dumps({"engine": round(by_itself)}), flush=True)
        ray.init(include_dashboard=False, log_to_driver=False)
        one = None
        for workers in args.workers:
            found = measured(file, port, workers, args)
            each = found["pictures_per_second"] / workers
            one = one or each
            found |= {"of_one": round(found["pictures_per_second"] / one, 2), "of_engine": round(each / by_itself, 2)}
            print(json.dumps(found), flush=True)
        ray.shutdown()


if __name__ == "__main__":
    main()
