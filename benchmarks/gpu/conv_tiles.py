"""Convolutions of one image: candidates of both Hopper kernels, checked, then timed with weights in L2 and not.

    python benchmarks/gpu/conv_tiles.py --out conv_tiles.json 64x64x224 512x512x14

Shapes are INxOUTxSIDE of a 3x3 convolution of stride 1 that keeps its size; without any, those of VGG-16. ``cold`` times rotate
over copies of the weights that L2 cannot hold, as behind a layer that streams its matrix through it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import conv_bench

from optdnn.runtime.cuda import conv, conv_patch, conv_problem, graphs
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.tactics.cuda.conv_sm90 import ranked

VGG = (
    "8x64x224",
    "64x64x224",
    "64x128x112",
    "128x128x112",
    "128x256x56",
    "256x256x56",
    "256x512x28",
    "512x512x28",
    "512x512x14",
)
COLD = 160 << 20
"""Bytes of weights to rotate over: more than twice the L2."""


def problem_of(shape: str) -> conv_problem.Problem:
    channels, out, side = map(int, shape.split("x"))
    source = conv_problem.Source(side, side, channels, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1))
    return conv_problem.Problem(1, out, (source,), (("bias",), ("relu",)), "float16", "float16")


def time_all(bench: conv_bench.Bench, launches: list[Any], count: int) -> float:
    """Microseconds of a launch, in a graph of ``count`` that goes round the launches."""
    graph = graphs.Graph([launches[i % len(launches)] for i in range(count)], bench.stream)
    times = graphs.time_runs(lambda: graph.replay(bench.stream), bench.stream, warmup=2, repeats=7)
    graph.close()
    return statistics.median(times) / count * 1e3


def chosen_for(problem: conv_problem.Problem, limit: int) -> list[Any]:
    """The best predicted candidates of each kernel."""
    kinds: tuple[type[Any], ...] = (conv.Config, conv_patch.PatchConfig)
    return [
        o
        for kind in kinds
        for o in [o for o in ranked(problem, True, of_arch("sm_90a")) if isinstance(o.config, kind)][:limit]
    ]


def row_of(bench: conv_bench.Bench, shape: str, limit: int) -> dict[str, Any]:
    problem = problem_of(shape)
    chosen = chosen_for(problem, limit)
    layer = conv_bench.Layer(problem)
    reference = layer.reference()
    copies = [layer.packed.clone() for _ in range(min(64, -(-COLD // layer.packed.nbytes)))]
    found: list[list[Any]] = []
    for offer in chosen:
        error = conv_bench.compare(bench, layer, offer.config, reference)
        if not error < 1e-3:
            found.append([None, None, str(offer.config), error])
            continue
        at = layer.pointers()
        one = bench.bind(problem, offer.config, at)
        many = [
            bench.bind(problem, offer.config, type(at)(at.sources, w.data_ptr(), at.bias, at.output)) for w in copies
        ]
        cold = time_all(bench, many, max(24, len(copies)))
        found.append(
            [round(time_all(bench, [one], 24), 2), round(cold, 2), str(offer.config), round(offer.seconds * 1e6, 2)]
        )
    found.sort(key=lambda f: (f[1] is None, f[1]))
    return {"shape": shape, "gflop": problem.flops / 1e9, "weights_mb": layer.packed.nbytes / 1e6, "configs": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=VGG)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=24, help="candidates of each kernel")
    options = parser.parse_args()
    bench = conv_bench.Bench(Path("/tmp/kernels-conv-tiles"))
    problems = [problem_of(shape) for shape in options.shapes]
    recipes = [
        conv_bench.family_of(o.config).recipe(p, o.config) for p in problems for o in chosen_for(p, options.limit)
    ]
    bench.cache.get_many(recipes, os.cpu_count() or 1)
    print(f"{len(recipes)} candidates compiled", flush=True)
    rows = []
    for shape in options.shapes:
        row = row_of(bench, shape, options.limit)
        rows.append(row)
        print(f"{shape}: warm, cold us: {[tuple(c[:4]) for c in row['configs'][:5]]}; "
              f"best warm {sorted(tuple(c[:3]) for c in row['configs'] if c[0])[:3]}; "
              f"{sum(c[0] is None for c in row['configs'])} wrong", flush=True)  # fmt: skip
        options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return int(any(c[0] is None for r in rows for c in r["configs"]))


if __name__ == "__main__":
    sys.exit(main())
