"""How far is fp32 on the GPU from the truth, and how far is ONNX Runtime's fp32? The truth is the same network in float64.

    python benchmarks/gpu/fp32_truth.py OUT.json [--target cuda] [--names NAME,NAME]

Of each network of the zoo (batch 1): max |error| over max |output| of both, and of one against the other. Where a network amplifies
rounding, two right fp32 runs differ by more than a bound that holds elsewhere; this tells it from a kernel that loses bits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from agreement import onnxruntime_results

import optdnn
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate, promote
from optdnn.models import zoo
from optdnn.runtime.feeds import random_feeds

NAMES = ("yolox_s", "inception_v3", "vgg16", "resnet50")


def row(name: str, target: str) -> dict[str, Any]:
    """The errors of one network."""
    model = zoo.build(name, batch=1)
    engine = optdnn.build(model, target=target, tactics="heuristic")
    feeds = random_feeds(engine.inputs, seed=1)
    wide = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in feeds.items()}
    truth = list(evaluate(promote(import_model(model)), wide).values())
    ours, theirs = list(engine.run(feeds).values()), onnxruntime_results(model, feeds)

    def far(a: list[Any], b: list[Any]) -> float:
        return max(
            float(np.abs(np.float64(x) - y).max() / np.abs(t).max()) for x, y, t in zip(a, b, truth, strict=True)
        )

    return {
        "network": name,
        "ours": far(ours, truth),
        "onnxruntime": far(theirs, truth),
        "one_another": far(ours, theirs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--names", default=",".join(NAMES), help="of the zoo, with commas")
    parser.add_argument("--target", default="cuda")
    args = parser.parse_args()
    rows = []
    for name in args.names.split(","):
        rows.append(row(name, args.target))
        print(json.dumps(rows[-1]), flush=True)
        found = {"what": "fp32 against the same network in float64", "target": args.target, "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
