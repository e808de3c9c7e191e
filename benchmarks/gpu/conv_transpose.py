"""Transposed convolutions of decoders (U-Net, DCGAN) in one layer each, beside PyTorch channels-last (cuDNN).

    python benchmarks/gpu/conv_transpose.py --out conv_transpose.json --precision fp16

A layer is the transposed convolution with its bias and ReLU, from channels-last to channels-last; PyTorch's is two kernels or more.
Ours is what is measured best of ``--configs`` configurations. ``--direct`` times the general kernel, too. Needs a GPU and PyTorch.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conv_fp32_tiles import torch_us

from optdnn.config import BuildOptions
from optdnn.ir.graph import Graph
from optdnn.lower_cuda import lower_cuda
from optdnn.ops.conv import ConvTransposeAttrs
from optdnn.optimizing import optimize
from optdnn.runtime.cuda import graphs
from optdnn.runtime.cuda.check import check_steps
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.cuda.runner import CudaRunner
from optdnn.runtime.executor import LoadOptions
from optdnn.tactics.cuda.builder import Builder
from optdnn.tactics.cuda.select import Choice, Selection, alternatives
from optdnn.tactics.cuda.table import TACTICS
from optdnn.target_name import TargetName

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.net import Net

LAYERS = {
    "unet 1024->512 28": (1024, 512, 28, 2, 2, 0, 0),
    "unet 512->256 56": (512, 256, 56, 2, 2, 0, 0),
    "unet 128->64 224": (128, 64, 224, 2, 2, 0, 0),
    "dcgan 512->256 8": (512, 256, 8, 4, 2, 1, 0),
    "dcgan 256->128 16": (256, 128, 16, 4, 2, 1, 0),
    "dcgan 128->64 32": (128, 64, 32, 4, 2, 1, 0),
    "dcgan 64->3 64": (64, 3, 64, 4, 2, 1, 0),
    "3x3 256->128 56": (256, 128, 56, 3, 2, 1, 1),
    "5x5 by 3 128->64 40": (128, 64, 40, 5, 3, 1, 0),
    "3x3 by 1 128->128 28": (128, 128, 28, 3, 1, 1, 0),
}
"""Name -> channels, filters, size, kernel, stride, pads, output padding."""
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}


def graph_of(batch: int, layer: tuple[int, ...]) -> Graph:
    """The layer between two ReLUs, so that it finds and leaves its images channels-last (a mean ends the network)."""
    channels, filters, size, kernel, stride, pad, extra = layer
    n = Net()
    x = n.op("Relu", n.conv(n.input(batch, 8, size, size), channels, 1, pads=0))
    w = n.random(channels, filters, kernel, kernel, scale=1 / math.sqrt(channels * kernel))
    attrs = ConvTransposeAttrs((stride,) * 2, (pad,) * 4, (1, 1), (extra,) * 2)
    y = n.op("Relu", n.op("ConvTranspose", x, w, n.random(filters), attrs=attrs))
    return n.done(n.op("GlobalAveragePool", y))


def ours(
    graph: Graph, precision: str, configs: int, only: str, stream: graphs.Stream
) -> list[tuple[float, str, float]]:
    """(microseconds, tactic and configuration, largest error of a launch) of each, the fastest first."""
    options = BuildOptions(target="cuda:sm_90a", precision=precision)
    copy = graph.copy()
    optimize(copy, options, options.target)
    listed: list[Choice] = []
    key = ""

    def visit(b: Builder, op: Any, signature: str) -> None:
        nonlocal key
        if op.kind == "ConvTranspose":
            key = signature
            found = alternatives(b, op, TACTICS[op.kind], Selection(providers=frozenset({"own"})))
            listed[:] = [Choice(t.name, "" if o is None else o.name) for t, o in found]

    lower_cuda(copy, replace_cubins(options), facts_for(TargetName.parse(options.target).arch), {}, visit=visit)
    picked = [c for c in listed if c.tactic.startswith("subpixel")][:configs]
    if only:
        picked = [Choice(only, "")]
    rng = np.random.default_rng(1)
    found = []
    for choice in picked:
        program = lower_cuda(copy, options, facts_for(TargetName.parse(options.target).arch), {}, choices={key: choice})
        context: Any = CudaRunner(program, LoadOptions()).context()
        feeds = {s.name: rng.standard_normal(s.shape).astype(s.dtype) for s, _ in program.inputs}
        error = (
            max(e.error for e in check_steps(context, feeds))
            if choice == picked[0] and program.arena_bytes < 1 << 27
            else 0.0
        )
        context.run(feeds)
        launches = context.launches({})
        mine = [k for k, s in enumerate(program.steps) if str(s.params.get("tactic", "")).startswith(choice.tactic)]
        graph_ = graphs.Graph([launches[k] for _ in range(10) for k in mine], stream)
        us = statistics.median(graphs.time_runs(lambda g=graph_: g.replay(stream), stream, warmup=1, repeats=5)) * 100
        graph_.close()
        found.append((round(us, 2), f"{choice} ({len(mine)} launches)", error))
    return sorted(found)


def replace_cubins(options: BuildOptions) -> BuildOptions:
    """Without compiling."""
    return BuildOptions(target=options.target, precision=options.precision, no_cubins=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--configs", type=int, default=6)
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9)
    options = parser.parse_args()
    start, rows = time.perf_counter(), []
    torch.zeros(1, device="cuda")
    stream = graphs.Stream()
    dtype = TYPES[options.precision]
    torch.backends.cudnn.allow_tf32 = options.precision == "tf32"
    for name, layer in LAYERS.items():
        for batch in map(int, options.batches.split(",")):
            if time.perf_counter() - start > options.seconds:
                break
            channels, filters, size, kernel, stride, pad, extra = layer
            graph = graph_of(batch, layer)
            found = ours(graph, options.precision, options.configs, "", stream)
            direct = ours(graph, options.precision, 1, "conv_transpose_direct", stream) if options.direct else []
            x = (
                torch.randn((batch, channels, size, size), device="cuda")
                .to(dtype)
                .to(memory_format=torch.channels_last)
            )
            w = (
                torch.randn((channels, filters, kernel, kernel), device="cuda")
                .to(dtype)
                .to(memory_format=torch.channels_last)
            )
            bias = torch.randn(filters, device="cuda").to(dtype)
            theirs = torch_us(
                lambda: torch.relu_(torch.nn.functional.conv_transpose2d(x, w, bias, stride, pad, extra))  # noqa: B023
            )
            best = found[0]
            flops = 2 * batch * size * size * channels * filters * kernel * kernel
            row = {"layer": name, "batch": batch, "ours": found, "direct": direct, "torch_us": round(theirs, 2)}
            rows.append({**row, "gflop": flops / 1e9})
            slow = f"; direct {direct[0][0]:9.2f}" if direct else ""
            print(
                f"{name:22s} x{batch:2d}: {best[0]:8.2f} us {best[1]:44s} {flops / best[0] / 1e6:6.1f} TF; torch {theirs:8.2f} "
                f"({theirs / best[0]:5.2f}x){slow}; error {max(f[2] for f in found):.1e}",
                flush=True,
            )
            result = {"device": torch.cuda.get_device_name(), "precision": options.precision, "rows": rows}
            options.out.write_text(json.dumps(result, indent=1))
    ratio = statistics.geometric_mean(r["torch_us"] / r["ours"][0][0] for r in rows)
    print(f"geometric mean over {len(rows)} layers: {ratio:.2f}x of PyTorch", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
