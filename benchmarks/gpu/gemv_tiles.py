"""Fully connected layers at batch 1: every configuration of the GEMV kernel, checked and timed cold and warm, beside cuBLAS.

python benchmarks/gpu/gemv_tiles.py --out gemv.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

from optdnn.runtime.cuda import describe, gemv, graphs, nvrtc
from optdnn.runtime.cuda.device import Device

SHAPES = ((1, 4096, 25088), (1, 4096, 4096), (1, 1000, 4096), (1, 1000, 2048), (1, 1000, 1280), (4, 4096, 25088))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.zeros(1, device="cuda")
    device, stream, cache = Device.open(0), graphs.Stream(), nvrtc.KernelCache(Path("/tmp/kernels-gemv"))
    rows = []
    for m, n, k in SHAPES:
        problem = gemv.Problem(m, n, k, (("bias",), ("relu",)))
        copies = max(2, (160 << 20) // (n * k * 2))  # so that L2 does not hold the next matrix
        weights = [torch.randn((n, k), device="cuda").half() / k**0.5 for _ in range(copies)]
        x, bias = torch.randn((m, k), device="cuda").half(), torch.randn(n, device="cuda")
        out = torch.empty((m, n), dtype=torch.float16, device="cuda")
        found = []
        configs = gemv.candidates(problem, device, 100)
        cache.get_many([gemv.recipe(problem, c) for c in configs], 16)
        for config in configs:
            made = gemv.describe(problem, config, k, n)
            function = describe.load(gemv.recipe(problem, config), made, cache)

            at = {"x": x.data_ptr(), "bias": bias.data_ptr(), "output": out.data_ptr()}
            launches = [describe.bind(made, function, {**at, "weights": w.data_ptr()}) for w in weights]
            out.fill_(float("nan"))
            torch.cuda.synchronize()
            launches[0].enqueue(stream.handle)
            stream.synchronize()
            want = torch.relu(x.float() @ weights[0].float().T + bias)
            error = float((out.float() - want).norm() / want.norm())
            graph = graphs.Graph(launches * max(1, 8 // copies), stream)
            count = len(launches) * max(1, 8 // copies)
            us = (
                statistics.median(graphs.time_runs(lambda g=graph: g.replay(stream), stream, warmup=2, repeats=9))
                / count
                * 1e3
            )
            graph.close()
            found.append((us, str(config), error, gemv.estimate(problem, config, device) * 1e6))
        found.sort()
        wrong = [f for f in found if not f[2] < 1e-3]
        rows.append({"shape": [m, n, k], "configs": found, "wrong": len(wrong)})
        best = found[0]
        print(f"{m}x{k} -> {n}: {best[0]:.2f} us, {n * k * 2 / best[0] / 1e3:.0f} GB/s, {best[1]} (predicted {best[3]:.1f}); first "
              f"ranked {[(round(f[0], 2), f[1]) for f in found if f[1] == str(configs[0])]}; {len(wrong)} wrong; "
              f"then {[(round(f[0], 2), f[1]) for f in found[1:4]]}", flush=True)  # fmt: skip
        options.out.write_text(json.dumps(rows, indent=1))
    return 1 if any(r["wrong"] for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
