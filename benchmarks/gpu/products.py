"""Large products (and convolutions) on Hopper's tiles, one by one: every configuration checked, then timed.

    python benchmarks/gpu/products.py cases --out DIR          # the new ones of tests/support/conv_cases.py
    python benchmarks/gpu/products.py time --out DIR vit bert  # the products of ViT-B/16 and BERT-base at batch 32
    python benchmarks/gpu/products.py power --out DIR              # random numbers beside zeros
    ncu ... python benchmarks/gpu/products.py profile vit:fc1=2x1m1n240s3,1x1m2n144s4ac2x1

A configuration is written WGMxWGNmMTnBNsSTAGES, then ``a`` where warpgroups take tiles in turn, then ``c`` and the cluster that
loads together.
The networks are those of NETWORKS. Times are medians over replays of a graph of several launches; TFLOP/s count the products alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]
from conv_bench import Bench, Layer, compare, time_layer  # noqa: E402

from optdnn.runtime.cuda import conv, conv_cost, graphs  # noqa: E402
from optdnn.runtime.cuda.conv import Config  # noqa: E402
from optdnn.runtime.cuda.conv_problem import Problem, Source  # noqa: E402

BIAS: tuple[Any, ...] = (("bias",),)
RELU: tuple[Any, ...] = (*BIAS, ("relu",))
ADD: tuple[Any, ...] = (*BIAS, ("add",))


def transformer(rows: int) -> dict[str, Problem]:
    """The products of a layer of 768 features."""
    sizes = {
        "qkv": (2304, 768, BIAS),
        "proj": (768, 768, ADD),
        "fc1": (3072, 768, (*BIAS, ("gelu",))),
        "fc2": (768, 3072, ADD),
    }
    return {name: Problem(rows, n, (Source(1, 1, k),), stages) for name, (n, k, stages) in sizes.items()}


def three_by_three(batch: int) -> dict[str, Problem]:
    """ResNet-50's 3x3 convolutions of stride 1."""
    sizes = {"layer2": (28, 128), "layer3": (14, 256), "layer4": (7, 512)}
    return {k: Problem(batch, c, (Source(n, n, c, (3, 3), (1, 1), (1, 1, 1, 1)),), RELU) for k, (n, c) in sizes.items()}


NETWORKS = {"vit": transformer(32 * 197), "bert": transformer(32 * 128), "resnet128": three_by_three(128),
            "resnet32": three_by_three(32)}  # fmt: skip
SHARES = ((1, 1), (2, 1), (1, 2))
TOGETHER = ((2, 1, 1, 144), (2, 1, 1, 192), (2, 1, 1, 224), (2, 1, 1, 240), (2, 1, 1, 256), (1, 2, 2, 96), (2, 1, 2, 96),
            (2, 1, 2, 112), (2, 1, 2, 128), (2, 1, 2, 144), (2, 1, 2, 160))  # fmt: skip
IN_TURN = ((1, 1, 2, 96), (1, 1, 2, 112), (1, 1, 2, 128), (1, 1, 2, 144), (1, 1, 2, 152), (1, 1, 2, 160), (1, 1, 1, 192),
           (1, 1, 1, 256))  # fmt: skip


def deepest(problem: Problem, config: Config) -> Config | None:
    """With as many stages as fit."""
    for stages in range(8, 1, -1):
        found = replace(config, stages=stages)
        if conv.refuse(problem, found) is None:
            return found
    return None


def trials(problem: Problem, shares: tuple[tuple[int, int], ...]) -> Iterator[Config]:
    """Tiles with and without sharing, together and in turn."""
    for alternate, tiles in ((False, TOGETHER), (True, IN_TURN)):
        for wgm, wgn, mt, bn in tiles:
            for share in shares:
                found = deepest(problem, Config(wgm, wgn, mt, bn, 2, alternate=alternate, share=share))
                if found is not None:
                    yield found


def parse(text: str) -> Config:
    """A configuration by its short name."""
    found = re.fullmatch(r"(\d)x(\d)m(\d)n(\d+)s(\d+)(a?)(?:c(\d)x(\d))?", text)
    if found is None:
        raise SystemExit(f"no configuration: {text}")
    wgm, wgn, mt, bn, stages = map(int, found.groups()[:5])
    share = (int(found[7] or 1), int(found[8] or 1))
    return Config(wgm, wgn, mt, bn, stages, alternate=bool(found[6]), share=share)


def cases(out: Path) -> None:
    """The cases that share or take turns, in checked builds: a fault in the protocol traps."""
    from support.conv_cases import CASES

    bench, rows = Bench(None, checked=True), []
    for name, (problem, config) in CASES.items():
        if not isinstance(config, Config) or not (config.alternate or config.sharers > 1):
            continue
        layer = Layer(problem)
        reference = layer.reference()
        bench.checked = not config.wide
        errors = [compare(bench, layer, config, reference) for _ in range(3)]
        ok = max(errors) < (1e-3 if problem.dtype == "float16" else 6e-3) and len(set(errors)) == 1
        rows.append({"case": name, "config": str(config), "errors": errors, "ok": ok})
        print("ok   " if ok else "WRONG", name, config, errors, flush=True)
        (out / "product-cases.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"cases: {sum(r['ok'] for r in rows)} of {len(rows)} right", flush=True)


def timed(networks: list[str], out: Path, only: list[str], shares: tuple[tuple[int, int], ...]) -> None:
    """Every configuration of every product."""
    bench, rows = Bench(None), []
    jobs = [(n, p, problem) for n in networks for p, problem in NETWORKS[n].items() if not only or p in only]
    recipes = {r.key(): r for _, _, q in jobs for c in trials(q, shares) for r in [conv.recipe(q, c)]}
    bench.cache.get_many(list(recipes.values()), os.cpu_count() or 1)
    print(f"{len(recipes)} kernels", flush=True)
    for network, name, problem in jobs:
        layer = Layer(problem)
        reference, found = layer.reference(), []
        for config in trials(problem, shares):
            predicted = conv_cost.estimate(problem, config, bench.device)
            row = {"network": network, "product": name, "config": str(config), "predicted": round(predicted * 1e6, 2)}
            row["error"] = compare(bench, layer, config, reference)
            if not row["error"] < 1e-3:
                print(f"WRONG {network} {name} {config} {row['error']:.2e}", flush=True)
                rows.append({**row, "us": None})
                continue
            row["us"] = round(time_layer(bench, bench.bind(problem, config, layer.pointers()), predicted), 2)
            rows.append(row)
            found.append((row["us"], str(config), row["predicted"]))
        (out / "products.json").write_text(json.dumps(rows) + "\n")
        print(f"{network} {name} {problem.flops / 1e9:.1f} GFLOP, {problem.bytes / 1e6:.1f} MB", flush=True)
        for us, text, predicted in sorted(found)[:12]:
            print(f"    {us:7.2f} us {problem.flops / us / 1e6:6.0f} TFLOP/s  {text:28s} ({predicted})", flush=True)
        plain = [f for f in sorted(found) if "a" not in f[1] and "c" not in f[1]][:1]
        for us, text, predicted in plain:
            print(
                f"    {us:7.2f} us {problem.flops / us / 1e6:6.0f} TFLOP/s  {text:28s} ({predicted}) plain", flush=True
            )


def power(out: Path) -> None:
    """The same launches on random numbers and on zeros, which switch fewer transistors: where zeros are faster, the clock is what
    limits. And in long rows, which heat."""
    bench, rows = Bench(None), []
    for name, texts in (
        ("fc1", "2x1m1n192s4,1x1m2n144s4a"),
        ("fc2", "2x1m1n144s5"),
        ("qkv", "2x1m1n144s5,2x1m2n144s3"),
    ):
        problem = NETWORKS["vit"][name]
        layer = Layer(problem)
        for text in texts.split(","):
            launch = bench.bind(problem, parse(text), layer.pointers())
            seconds = {"random": time_layer(bench, launch, 4e-5)}
            graph = graphs.Graph([launch] * 200, bench.stream)
            times = graphs.time_runs(lambda g=graph: g.replay(bench.stream), bench.stream, warmup=4, repeats=9)
            seconds["in a row"] = statistics.median(times) / 200 * 1e3
            graph.close()
            rows.append({"product": name, "config": text, **seconds})
        for tensor in (*layer.images, layer.packed):
            tensor.zero_()
        for row, text in zip(rows[-len(texts.split(",")) :], texts.split(","), strict=True):
            row["zeros"] = time_layer(bench, bench.bind(problem, parse(text), layer.pointers()), 4e-5)
            print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    (out / "power.json").write_text(json.dumps(rows) + "\n")


def profile(texts: list[str]) -> None:
    """Launches for a profiler: each configuration twice."""
    bench = Bench(None)
    for text in texts:
        which, _, configs = text.partition("=")
        network, _, name = which.partition(":")
        problem = NETWORKS[network][name]
        layer = Layer(problem)
        for config in configs.split(","):
            for _ in range(2):
                bench.run(bench.bind(problem, parse(config), layer.pointers()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("cases", "time", "power", "profile"))
    parser.add_argument("what", nargs="*")
    parser.add_argument("--only", default="", help="products, separated by commas")
    parser.add_argument("--shares", default="1x1,2x1,1x2", help="clusters, separated by commas")
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_intermixed_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    shares = tuple((int(s[0]), int(s[2])) for s in options.shares.split(","))
    if options.stage == "cases":
        cases(options.out)
    elif options.stage == "time":
        only = options.only.split(",") if options.only else []
        timed(options.what or ["vit"], options.out, only, shares)
    elif options.stage == "power":
        power(options.out)
    else:
        profile(options.what)


if __name__ == "__main__":
    main()
