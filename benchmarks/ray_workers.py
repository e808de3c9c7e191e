"""Ray Data on the GPUs of this machine: pictures per second with one worker and with several.

    python -m benchmarks.ray_workers --workers 1 2

Each worker has a GPU of its own and runs the same engine, from decoded uint8 pictures to classes. Decoding is left out: its speed
is that of the cores. The start of the workers is left out, too. A row of JSON for each number of workers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
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


def rate(file: Path, port: str, workers: int, batch: int, batches: int, gpus: int) -> float:
    """Pictures per second of ``workers``, once all of them run: of the second half of the batches, without the last ones."""
    import ray

    blocks = ray.data.range(batches * batch, override_num_blocks=batches)
    blocks = blocks.map_batches(pictures, batch_size=batch).materialize()  # before the clock starts
    answers = blocks.map_batches(
        optdnn.Predictor,
        fn_constructor_args=[str(file)],
        fn_constructor_kwargs={"columns": {port: "x"}},
        batch_size=batch,
        num_gpus=gpus,
        compute=ray.data.ActorPoolStrategy(size=workers),
    )
    ends = [(time.perf_counter(), len(next(iter(part.values())))) for part in answers.iter_batches(batch_size=None)]
    first, last = len(ends) // 2, len(ends) * 19 // 20
    return sum(rows for _, rows in ends[first + 1 : last + 1]) / (ends[last][0] - ends[first][0])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--network", default="vit_b_16", help="of the zoo (%(default)s)")
    parser.add_argument("--width", type=float, default=2.0, help="of the network's layers (%(default)s)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=160, help="for each worker (%(default)s)")
    parser.add_argument("--target", default="cuda")
    args = parser.parse_args(words)
    import ray

    with tempfile.TemporaryDirectory(prefix="optdnn-ray-") as folder:
        file, port = engine_file(Path(folder), args.network, args.width, args.batch, args.target)
        ray.init(include_dashboard=False, log_to_driver=False)
        one = None
        for workers in args.workers:
            gpus = int(args.target.startswith("cuda"))
            found = rate(file, port, workers, args.batch, args.batches * workers, gpus)
            one = one or found / workers
            print(
                json.dumps({"workers": workers, "pictures_per_second": round(found), "of_one": round(found / one, 2)}),
                flush=True,
            )
        ray.shutdown()


if __name__ == "__main__":
    main()
