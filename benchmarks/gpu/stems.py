"""First convolutions on a GPU, in one launch (conv_stem) and as a change of layout and a convolution: each checked, then timed.

    python benchmarks/gpu/stems.py --out stems.json                       # all networks, batches and types of images
    python benchmarks/gpu/stems.py --out stems.json resnet50:128:float16

A stem is NETWORK:BATCH:IMAGE; images of uint8 are normalized on their way. Times are those of the autotuner: launches repeated in a
CUDA graph, results held against what they mean first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2] / "tests")]
from support.net import Net  # noqa: E402

from optdnn.config import BuildOptions  # noqa: E402
from optdnn.ir.graph import Graph, Op, Value  # noqa: E402
from optdnn.lower_cuda import emit_program  # noqa: E402
from optdnn.ops.binary import CastAttrs  # noqa: E402
from optdnn.optimizing import optimize  # noqa: E402
from optdnn.runtime.cuda.device import facts_for  # noqa: E402
from optdnn.runtime.cuda.kernels_of import recipe_of  # noqa: E402
from optdnn.runtime.cuda.timer import GpuTimer, TrialFailed  # noqa: E402
from optdnn.tactics.cuda.builder import Builder  # noqa: E402
from optdnn.tactics.cuda.select import Selection  # noqa: E402
from optdnn.tactics.cuda.table import TACTICS  # noqa: E402
from optdnn.tactics.cuda.trials import Trial, trials_of  # noqa: E402
from optdnn.target_name import TargetName  # noqa: E402
from optdnn.types import FP32  # noqa: E402

STEMS: dict[str, tuple[int, int, int, tuple[int, ...], str]] = {  # channels, kernel, stride, pads, activation
    "resnet50": (64, 7, 2, (3, 3, 3, 3), "Relu"),
    "mobilenet_v2": (32, 3, 2, (1, 1, 1, 1), "Clip"),
    "vgg16": (64, 3, 1, (1, 1, 1, 1), "Relu"),
    "efficientnet_b0": (32, 3, 2, (1, 1, 1, 1), "Swish"),
}
DEFAULT = [f"{name}:{batch}:float16" for batch in (1, 128, 8, 32) for name in STEMS]
DEFAULT += [f"{name}:{batch}:{kind}" for batch in (1, 128) for name in STEMS for kind in ("float32", "uint8")]


def graph_of(name: str, batch: int, image: str) -> Graph:
    """The stem, and a convolution that reads it."""
    channels, kernel, strides, pads, activation = STEMS[name]
    n = Net(np.float16 if image == "float16" else np.float32)
    x: Value = n.input(batch, 3, 224, 224, dtype=np.dtype(image))
    if image == "uint8":
        mean, std = (n.const(np.array(v).reshape(1, 3, 1, 1)) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        x = n.op("Div", n.op("Sub", n.op("Div", n.op("Cast", x, attrs=CastAttrs(FP32)), 255.0), mean), std)
    x = n.conv(x, channels, kernel, pads=pads, strides=strides, bias=True)
    x = (
        n.op("Mul", x, n.op("Sigmoid", x))
        if activation == "Swish"
        else n.op(activation, x, *([0.0, 6.0] if activation == "Clip" else []))
    )
    return n.done(n.conv(x, 8, 1, pads=0))


def trials(name: str, batch: int, image: str, limit: int) -> list[Trial]:
    """All candidates of the stem, without those of other tactics that are not among their ``limit`` best predicted."""
    graph = graph_of(name, batch, image)
    options = BuildOptions(target="cuda:sm_90a", precision="fp16", tactics="own", no_cubins=True)
    optimize(graph, options, options.target)
    found: list[Trial] = []

    def visit(b: Builder, op: Op, key: str) -> None:
        if op.kind == "Conv" and not found:
            found.extend(trials_of(b, op, TACTICS["Conv"], Selection.of(options)))

    emit_program(graph, options, facts_for(TargetName.parse(options.target).arch), {}, None, visit)
    counts: dict[str, int] = {}
    kept = []
    for t in sorted(found, key=lambda t: t.seconds or 0.0):
        counts[t.choice.tactic] = counts.get(t.choice.tactic, 0) + 1
        if counts[t.choice.tactic] <= limit or t.choice.tactic == "conv_stem":
            kept.append(t)
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stems", nargs="*", metavar="NETWORK:BATCH:IMAGE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--others", type=int, default=8, help="configurations of the two launches to time")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no stem after so many")
    options = parser.parse_args()
    begin, timer, rows, wrong = time.monotonic(), GpuTimer(), [], 0
    for stem in options.stems or DEFAULT:
        if time.monotonic() - begin > options.seconds:
            print("out of time", flush=True)
            break
        name, batch, image = stem.split(":")
        found = trials(name, int(batch), image, options.others)
        timer.compile([recipe_of(k) for t in found for k in t.program.kernels], os.cpu_count() or 1)
        row: dict[str, Any] = {"stem": stem, "times": [], "failed": []}
        for t in found:
            try:
                us = timer.trial(stem, t.program, cold=False, give_up=1e-2) * 1e6
                row["times"].append([str(t.choice), round(us, 3), round((t.seconds or 0.0) * 1e6, 3)])
            except TrialFailed as error:
                row["failed"].append([str(t.choice), error.message])
        wrong += len(row["failed"])
        row["times"].sort(key=lambda r: r[1])
        rows.append(row)
        for tactic in ("conv_stem", "conv_sm90"):
            best = [r for r in row["times"] if r[0].startswith(tactic)][:3]
            print(
                f"{stem:28s} {tactic} " + ", ".join(f"{r[1]:.2f} us {r[0].split()[1]} (said {r[2]:.2f})" for r in best),
                flush=True,
            )
        for choice, why in row["failed"][:4]:
            print(f"  FAILED {choice}: {why}", flush=True)
        options.out.write_text(json.dumps({"machine": asdict(timer.machine), "stems": rows}, indent=1))
    print(f"{time.monotonic() - begin:.0f} s, {wrong} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
