"""Stream-K on the Hopper convolution kernel: right first, then its time beside that of the other configurations.

    python benchmarks/gpu/stream_k.py cases --out DIR         # the cases of tests/support/conv_cases.py, in checked builds
    python benchmarks/gpu/stream_k.py time --out DIR resnet8  # layers of NETWORKS
    python benchmarks/gpu/stream_k.py compile                 # every kernel of both; needs no GPU

Times are medians over replays of a graph of several launches. ``best``: the fastest of the first ``--others`` configurations that
the cost models rank without stream-K.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]
from support.conv_cases import CASES  # noqa: E402

from optdnn.runtime.cuda import conv, conv_cost, conv_patch, nvrtc  # noqa: E402
from optdnn.runtime.cuda.conv_problem import Problem, Source  # noqa: E402
from optdnn.runtime.cuda.gpu_facts import of_arch  # noqa: E402

BIAS: tuple[Any, ...] = (("bias",),)
ADD: tuple[Any, ...] = (*BIAS, ("add",))


def transformer(rows: int) -> dict[str, Problem]:
    """The products of a layer of 768 features."""
    gelu: tuple[Any, ...] = (*BIAS, ("gelu",))
    sizes = {"qkv": (2304, 768, BIAS), "proj": (768, 768, ADD), "fc1": (3072, 768, gelu), "fc2": (768, 3072, ADD)}
    return {name: Problem(rows, n, (Source(1, 1, k),), stages) for name, (n, k, stages) in sizes.items()}


def resnet(batch: int) -> dict[str, Problem]:
    """ResNet-50's distinct layers, by the first one's name and how many there are."""
    import resnet50

    return {f"{names[0]} x{len(names)}": problem for problem, names in resnet50.distinct(batch).items()}


def networks() -> dict[str, dict[str, Problem]]:
    """What is timed."""
    made = {f"resnet{n}": resnet(n) for n in (1, 8, 32)}
    made |= {f"bert{n}": transformer(128 * n) for n in (1, 8)} | {f"vit{n}": transformer(197 * n) for n in (1, 8, 32)}
    waves = {f"{tiles} tiles": Problem(tiles * 128, 128, (Source(1, 1, 2048),), BIAS) for tiles in (133, 150, 200, 260)}
    return {**made, "waves": waves}


def streamed(problem: Problem, limit: int) -> list[conv.Config]:
    """Stream-K of every tile that leaves a tenth of the multiprocessors idle, the best predicted first."""
    device, found = of_arch("sm_90a"), []
    for wgm, wgn, mt in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2)):
        for bn in conv_cost.WIDTHS:
            for blocks in (2, 1):
                plain = conv.Config(wgm, wgn, mt, bn, 2, blocks=blocks, stream=True)
                places, tiles = device.multiprocessors * blocks, plain.joint_tiles(problem)[1]
                if tiles > 0.9 * places * -(-tiles // places) or 8 * tiles < places or mt * bn > 320 or wgn * bn < 32:
                    continue
                room = (conv_cost.HALF_SHARED if blocks == 2 else 232448) - conv.shared_bytes(problem, plain)
                config = replace(plain, stages=min(8, 2 + room // (sum(plain.tile) * problem.span)))
                if config.stages >= 3 and conv.refuse(problem, config) is None:
                    found.append(config)
    found.sort(key=lambda c: (conv_cost.estimate(problem, c, device), c))
    best = {c.tile: c for c in reversed(found)}
    return [c for c in found if best[c.tile] is c][:limit]


def others(problem: Problem, limit: int) -> list[Any]:
    """What is proposed without stream-K, of both kernels."""
    device = of_arch("sm_90a")
    found = [c for c in conv_cost.candidates(problem, device, limit) if not c.stream]
    return [*found, *conv_patch.candidates(problem, device)[: limit // 3]]


def recipe(problem: Problem, config: Any, checked: bool = False) -> nvrtc.Recipe:
    family = conv_patch if isinstance(config, conv_patch.PatchConfig) else conv
    return family.recipe(problem, config, checked=checked)


def compile_all(problems: list[Problem], options: argparse.Namespace) -> None:
    """Into the cache of kernels that a process on this machine uses."""
    recipes = [recipe(p, c) for p in problems for c in (*streamed(p, options.streams), *others(p, options.others))]
    start = time.perf_counter()
    nvrtc.KernelCache(None).get_many(list({r.key(): r for r in recipes}.values()), os.cpu_count() or 1)
    print(f"{len(recipes)} kernels in {time.perf_counter() - start:.0f} s", flush=True)


def cases(out: Path) -> None:
    """The cases of stream-K, in checked builds: a fault in the protocol traps. Each runs three times and repeats to the bit."""
    from conv_bench import Bench, Layer, compare

    bench, rows = Bench(None, checked=True), []
    chosen = {name: case for name, case in CASES.items() if getattr(case[1], "stream", False)}
    recipes = [recipe(*case, checked=True) for case in chosen.values()]
    bench.cache.get_many(list({r.key(): r for r in recipes}.values()), os.cpu_count() or 1)
    for name, (problem, config) in chosen.items():
        layer = Layer(problem)
        reference, bits = layer.reference(), []
        errors = []
        for _ in range(3):
            errors.append(compare(bench, layer, config, reference))
            bits.append(layer.output.clone())
        same = all(bool((b.view(torch_bits(b)) == bits[0].view(torch_bits(b))).all()) for b in bits)
        ok = same and max(errors) < (1e-3 if problem.dtype == "float16" else 6e-3)
        blocks = conv.grid_blocks(problem, config, bench.device)
        rows.append({"case": name, "config": str(config), "blocks": blocks, "errors": errors, "ok": ok})
        print("ok   " if ok else "WRONG", name, config, blocks, errors, flush=True)
        (out / "stream-cases.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"cases: {sum(r['ok'] for r in rows)} of {len(rows)} right", flush=True)


def torch_bits(tensor: Any) -> Any:
    """The integer type as wide as the tensor's."""
    import torch

    return {2: torch.int16, 4: torch.int32}[tensor.element_size()]


def timed(names: list[str], options: argparse.Namespace) -> None:
    """Both kinds of configurations of every layer."""
    from conv_bench import Bench, Layer, compare, time_layer

    bench, rows = Bench(None), []
    known = networks()
    compile_all([p for n in names for p in known[n].values()], options)
    for network in names:
        total = {"stream": 0.0, "best": 0.0, "first": 0.0}
        for name, problem in known[network].items():
            layer = Layer(problem)
            reference = layer.reference()
            found: dict[str, list[tuple[float, str, float]]] = {"stream": [], "best": []}
            for kind, configs in (
                ("stream", streamed(problem, options.streams)),
                ("best", others(problem, options.others)),
            ):
                for config in configs:
                    predicted = 0.0
                    if isinstance(config, conv.Config):
                        predicted = conv_cost.estimate(problem, config, bench.device) * 1e6
                    error = compare(bench, layer, config, reference)
                    row = {"network": network, "layer": name, "config": str(config), "kind": kind, "error": error}
                    row["predicted"] = round(predicted, 2)
                    if error < 1e-3:
                        us = time_layer(bench, bench.bind(problem, config, layer.pointers()), problem.flops / 4e14)
                        row["us"] = round(us, 2)
                        found[kind].append((us, str(config), predicted))
                    else:
                        print(f"WRONG {network} {name} {config} {error:.2e}", flush=True)
                    rows.append(row)
            (options.out / "stream-k.json").write_text(json.dumps(rows) + "\n")
            count = int(name.rpartition(" x")[2]) if " x" in name else 1
            best, stream = (min(found[k], default=(float("inf"), "none", 0.0)) for k in ("best", "stream"))
            total["best"] += best[0] * count
            total["stream"] += min(best[0], stream[0]) * count
            gain = (best[0] / stream[0] - 1) * 100
            both = "  stream-K ".join(
                f"{us:7.2f} {text:22s} ({predicted:6.2f})" for us, text, predicted in (best, stream)
            )
            print(f"{network:9s} {name:24s} {both} {gain:+.1f} %", flush=True)
        print(f"{network}: {total['best']:.1f} us without, {total['stream']:.1f} with stream-K", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("cases", "time", "compile"))
    parser.add_argument("networks", nargs="*")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--others", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_intermixed_args()
    if options.stage == "cases":
        cases(options.out)
    elif options.stage == "time":
        timed(options.networks or ["vit1"], options)
    else:
        compile_all([p for n in options.networks or networks() for p in networks()[n].values()], options)


if __name__ == "__main__":
    main()
