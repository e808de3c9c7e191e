"""ResNet-50's distinct convolutions in true fp32: the tiled kernel, checked and timed, beside PyTorch (no tf32).

    python benchmarks/gpu/conv_fp32_tiles.py --out conv_fp32.json --batches 1,32 --configs 16

A layer is convolution, bias and ReLU in one launch; PyTorch's is the convolution with its bias alone, in the faster of both orders
of axes. ``--all`` times every configuration. Needs a GPU and PyTorch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from optdnn.runtime.cuda import conv_fp32, describe, graphs, nvrtc
from optdnn.runtime.cuda.device import Device

torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
torch.backends.cudnn.benchmark = True
TOLERANCE = 2e-6  # relative to the norm
PEAK = 132 * 256 * 1.98e9  # of an H200, at its highest clock


def layers() -> list[tuple[int, int, int, int, int, int]]:
    """(count, size, channels, filters, kernel, stride) of ResNet-50 (v1.5)."""
    found = [(1, 224, 3, 64, 7, 2)]
    channels, size = 64, 56
    for wide, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        stride = 1 if wide == 64 else 2
        small = size // stride
        found += [
            (1, size, channels, wide, 1, 1),
            (1, size, wide, wide, 3, stride),
            (1, size, channels, wide * 4, 1, stride),
        ]
        found += [
            (blocks, small, wide, wide * 4, 1, 1),
            (blocks - 1, small, wide * 4, wide, 1, 1),
            (blocks - 1, small, wide, wide, 3, 1),
        ]
        channels, size = wide * 4, small
    merged: dict[tuple[int, ...], int] = {}
    for count, *layer in found:
        merged[tuple(layer)] = merged.get(tuple(layer), 0) + count
    return [(count, *layer) for layer, count in merged.items()]  # type: ignore[misc]


def problem_of(batch: int, size: int, channels: int, filters: int, kernel: int, stride: int) -> conv_fp32.Problem:
    """A layer as the kernel's problem: channels-last, but for the network's image."""
    out = (size + 2 * (kernel // 2) - kernel) // stride + 1
    plane = size * size if channels == 3 else 1
    at = (channels * size * size, size, 1) if channels == 3 else (channels * size * size, size * channels, channels)
    return conv_fp32.Problem(
        batch, size, size, channels, filters, (kernel, kernel), conv_fp32.Strides(*at),
        conv_fp32.Strides(out * out * filters, out * filters, filters), (stride, stride), (kernel // 2,) * 4,
        epilogue=(("bias",), ("relu",)), plane=plane,
    )  # fmt: skip


def torch_us(run: Callable[[], Any]) -> float:
    """Microseconds of a replay of ten runs, each."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            run()
    times = []
    for k in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times += [begin.elapsed_time(end) * 100] if k else []
    return statistics.median(times)


def picked(options: argparse.Namespace, problem: conv_fp32.Problem, device: Device) -> list[conv_fp32.Config]:
    """The configurations to time."""
    found = conv_fp32.candidates(problem, device)
    return found if options.all else found[: options.configs]


def layer(
    options: argparse.Namespace, device: Device, stream: graphs.Stream, cache: nvrtc.KernelCache, batch: int, shape: Any
) -> dict[str, Any]:
    """One row: every configuration's error and time, and PyTorch's time."""
    count, size, channels, filters, kernel, stride = shape
    problem = problem_of(batch, *shape[1:])
    x = torch.randn((batch, channels, size, size), device="cuda")
    w = torch.randn((filters, channels, kernel, kernel), device="cuda") / (channels * kernel * kernel) ** 0.5
    bias = torch.randn(filters, device="cuda")
    last = x.to(memory_format=torch.channels_last)
    want = torch.relu(torch.nn.functional.conv2d(last[:2].double(), w.double(), bias.double(), stride, kernel // 2))
    theirs = {}
    if not options.no_torch:
        weights = w.to(memory_format=torch.channels_last)
        for name, a, f in (("nhwc", last, weights), ("nchw", x, w)):
            theirs[name] = torch_us(lambda a=a, f=f: torch.nn.functional.conv2d(a, f, bias, stride, kernel // 2))
    packed = torch.from_numpy(conv_fp32.pack_weights(w.cpu().numpy(), planar=problem.planar)).cuda()
    out = torch.empty((batch, filters, *problem.out_size), device="cuda", memory_format=torch.channels_last)
    pixels = x if problem.planar else last
    at = {"pixels": pixels.data_ptr(), "weights": packed.data_ptr(), "bias": bias.data_ptr(), "output": out.data_ptr()}
    configs = picked(options, problem, device)
    found = []
    for config in configs:
        made = conv_fp32.describe(problem, config)
        function = describe.load(conv_fp32.recipe(problem, config), made, cache)
        launch = describe.bind(made, function, at)
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        launch.enqueue(stream.handle)
        stream.synchronize()
        error = float((out[:2].double() - want).norm() / want.norm()) if not out.isnan().any() else float("nan")
        graph = graphs.Graph([launch] * 10, stream)
        us = statistics.median(graphs.time_runs(lambda g=graph: g.replay(stream), stream, warmup=1, repeats=4)) * 100
        graph.close()
        found.append((round(us, 2), str(config), error, round(conv_fp32.estimate(problem, config, device) * 1e6, 2)))
    first = found[0]
    found.sort()
    best = found[0]
    wrong = [f for f in found if not f[2] < TOLERANCE]
    row = {
        "layer": [batch, *shape[1:]],
        "count": count,
        "gflop": problem.flops / 1e9,
        "configs": found,
        "torch_us": theirs,
    }
    row |= {"first_ranked": first, "wrong": len(wrong)}
    fastest = min(theirs.values(), default=float("nan"))
    print(
        f"{batch:3d}x{size:3d} {channels:4d}->{filters:4d} k{kernel}s{stride} x{count}: {best[0]:8.2f} us {best[1]:22s} "
        f"{problem.flops / best[0] / 1e6:5.1f} TF ({problem.flops / best[0] * 1e6 / PEAK:4.0%}), predicted {best[3]:8.2f}; "
        f"ranked first {first[0]:8.2f} {first[1]:20s}; torch {fastest:8.2f} ({fastest / best[0]:4.2f}x); "
        f"error {max(f[2] for f in found):.1e}, {len(wrong)} wrong of {len(found)}",
        flush=True,
    )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--configs", type=int, default=12)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9)
    options = parser.parse_args()
    start = time.perf_counter()
    torch.zeros(1, device="cuda")
    device, stream, cache = Device.open(0), graphs.Stream(), nvrtc.KernelCache()
    rows: list[dict[str, Any]] = []
    for batch in map(int, options.batches.split(",")):
        recipes = {}
        for shape in layers():
            problem = problem_of(batch, *shape[1:])
            for config in picked(options, problem, device):
                made = conv_fp32.recipe(problem, config)
                recipes[made.key()] = made
        cache.get_many(list(recipes.values()), 16)
        print(f"batch {batch}: {len(recipes)} kernels, {time.perf_counter() - start:.1f} s", flush=True)
        for shape in layers():
            if time.perf_counter() - start > options.seconds:
                print("out of time", flush=True)
                break
            rows.append(layer(options, device, stream, cache, batch, shape))
            options.out.write_text(json.dumps({"device": device.name, "rows": rows}, indent=1))
        mine = [r for r in rows if r["layer"][0] == batch]
        ours = sum(r["count"] * r["configs"][0][0] for r in mine)
        theirs = sum(r["count"] * min(r["torch_us"].values(), default=0.0) for r in mine)
        flops = sum(r["count"] * r["gflop"] for r in mine)
        print(f"batch {batch}: all layers {ours:.0f} us, {flops / ours * 1e3:.1f} TF; torch {theirs:.0f} us; "
              f"{time.perf_counter() - start:.1f} s", flush=True)  # fmt: skip
    return 1 if any(r["wrong"] for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
