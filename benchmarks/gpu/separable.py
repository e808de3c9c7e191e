"""Depthwise and 1x1 convolutions in one launch (``separable_sm90.cu``): every case against fp32 arithmetic, then the pairs of
MobileNetV2 beside the two launches they replace.

    python benchmarks/gpu/separable.py --out separable.json [--batches 1,8,128] [--most 12] [--seconds 60]

Times are of chains of launches with programmatic dependent launch in one graph, as a network has them, by launch (or pair).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional

from optdnn.runtime.cuda import (
    conv,
    conv_cost,
    conv_params,
    depthwise,
    depthwise_tma,
    describe,
    graphs,
    nvrtc,
    separable,
)
from optdnn.runtime.cuda import separable_cost as cost
from optdnn.runtime.cuda.conv_problem import Problem as ConvProblem
from optdnn.runtime.cuda.conv_problem import Source
from optdnn.runtime.cuda.device import Device
from optdnn.runtime.cuda.gpu_facts import of_arch

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS)]
RELU6 = (("bias",), ("clip", 0.0, 6.0))
PLAIN, ADD = (("bias",),), (("bias",), ("add",))
RELU = (("bias",), ("relu",))
PAIRS: dict[str, tuple[Any, tuple[tuple[int, int, int, int, int, Any], ...]]] = {
    "mobilenet_v2": (RELU6, (
        (112, 32, 3, 1, 16, PLAIN), (112, 96, 3, 2, 24, PLAIN), (56, 144, 3, 1, 24, ADD), (56, 144, 3, 2, 32, PLAIN),
        (28, 192, 3, 1, 32, ADD), (28, 192, 3, 2, 64, PLAIN), (14, 384, 3, 1, 64, ADD), (14, 384, 3, 1, 96, PLAIN),
        (14, 576, 3, 1, 96, ADD), (14, 576, 3, 2, 160, PLAIN), (7, 960, 3, 1, 160, ADD), (7, 960, 3, 1, 320, PLAIN),
    )),
    "mobilenet_v1": (RELU, (
        (112, 32, 3, 1, 64, RELU), (112, 64, 3, 2, 128, RELU), (56, 128, 3, 1, 128, RELU), (28, 256, 3, 1, 256, RELU),
        (14, 512, 3, 1, 512, RELU), (7, 1024, 3, 1, 1024, RELU),
    )),
    "others": (RELU, (
        (28, 240, 5, 2, 80, PLAIN), (14, 480, 5, 1, 112, PLAIN), (19, 728, 3, 1, 728, RELU), (52, 96, 5, 1, 96, RELU),
    )),
}  # fmt: skip
"""Stages between, then for each pair: size, channels between, kernel, stride, channels of the result, its epilogue."""


class Tensors:
    """The operands of a problem on the GPU, and what it should give."""

    def __init__(self, p: separable.Problem, seed: int = 0):
        s, (out_h, out_w) = p.source, p.out_size
        dtype = torch.bfloat16 if p.dtype == "bfloat16" else torch.float16
        g = torch.Generator("cuda").manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", generator=g)

        wide = [a or b for a, b in zip(p.pitches, (-(-p.inner // 8) * 8, p.channels, p.channels), strict=True)]
        self.x = torch.full((p.batch, s.height, s.width, wide[0]), float("nan"), device="cuda", dtype=dtype)
        self.x[..., : p.inner] = random(p.batch, s.height, s.width, p.inner).to(dtype)
        self.filter = (random(p.inner, 1, *s.kernel) / p.taps**0.5).to(dtype)
        self.weight = (random(p.channels, p.inner, 1, 1) / p.inner**0.5).to(dtype)
        self.shift, self.bias = random(p.inner), random(p.channels)
        self.residual = random(p.batch, out_h, out_w, wide[2]).to(dtype)
        self.out = torch.full((p.batch, out_h, out_w, wide[1]), float("nan"), device="cuda", dtype=dtype)
        at_least = (-(-p.inner // 64) * 64, p.filter_row)
        self.filters = torch.zeros(at_least, device="cuda", dtype=dtype)
        self.filters[: p.inner, : p.taps] = self.filter.reshape(p.inner, -1)
        self.shifts = torch.zeros(at_least[0], device="cuda")
        self.shifts[: p.inner] = self.shift
        self.weights = torch.zeros((p.channels, -(-p.inner // 8) * 8), device="cuda", dtype=dtype)
        self.weights[:, : p.inner] = self.weight.reshape(p.channels, -1)
        self.p = p

    def addresses(self) -> dict[str, int]:
        names = {"input": self.x, "output": self.out, "residual": self.residual, "filters": self.filters}
        names |= {"shifts": self.shifts, "weights": self.weights, "bias": self.bias}
        return {name: t.data_ptr() for name, t in names.items()}

    def wanted(self) -> torch.Tensor:
        p, s = self.p, self.p.source
        x = self.x[..., : p.inner].float().permute(0, 3, 1, 2)
        top, left, bottom, right = s.padding
        x = functional.pad(x, (left, right, top, bottom))
        y = functional.conv2d(x, self.filter.float(), None, s.stride, 0, s.dilation, p.inner)
        y = _stages(p.between, y, self.shift, None).to(self.out.dtype).float()
        y = torch.einsum("nchw,oc->nhwo", y, self.weight.reshape(p.channels, -1).float())
        return _stages(p.epilogue, y.permute(0, 3, 1, 2), self.bias, self.residual[..., : p.channels]).permute(
            0, 2, 3, 1
        )

    def error(self) -> float:
        """Of the largest magnitude of the result; infinite where something was not written, or too much."""
        p = self.p
        want, got = self.wanted(), self.out[..., : p.channels].float()
        if not torch.isfinite(got).all() or not self.out[..., p.channels :].isnan().all():
            return float("inf")
        return float((got - want).abs().max() / want.abs().max())


def _stages(stages: Any, y: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    for name, *numbers in stages:
        if name == "bias":
            y = y + bias[:, None, None]
        elif name == "add":
            assert residual is not None
            y = y + residual.float().permute(0, 3, 1, 2)
        elif name == "clip":
            y = y.clamp(*numbers)
        elif name == "silu":
            y = functional.silu(y)
        elif name == "relu":
            y = functional.relu(y)
        else:
            raise ValueError(name)
    return y


def launch(
    p: separable.Problem, c: separable.Config, t: Tensors, cache: nvrtc.KernelCache, checked: bool = False
) -> Any:
    made = separable.describe(p, c, of_arch("sm_90a"))
    return describe.bind(
        made, describe.load(separable.recipe(p, c, checked=checked), made, cache), t.addresses(), label=str(c)
    )


def cases(cache: nvrtc.KernelCache, stream: graphs.Stream) -> list[dict[str, Any]]:
    from support.separable_cases import CASES

    cache.get_many([separable.recipe(p, c, checked=True) for p, c in CASES.values()], 16)
    rows = []
    for name, (p, c) in CASES.items():
        why = separable.refuse(p, c)
        row: dict[str, Any] = {"case": name, "config": str(c)}
        if why is not None:
            row["error"] = why
        else:
            t = Tensors(p)
            found = launch(p, c, t, cache, checked=True)
            torch.cuda.synchronize()
            found.enqueue(stream.handle)
            stream.synchronize()
            row["error"] = t.error()
            first = t.out.clone()
            t.out.fill_(float("nan"))
            torch.cuda.synchronize()
            found.enqueue(stream.handle)
            stream.synchronize()
            row["repeats"] = bool(torch.equal(first.view(torch.int16), t.out.view(torch.int16)))
        good = (
            isinstance(row["error"], float)
            and row["error"] < (2e-2 if p.dtype == "bfloat16" else 3e-3)
            and row["repeats"]
        )
        row["good"] = good
        print("" if good else "WRONG ", name, c, row["error"], row.get("repeats"), flush=True)
        rows.append(row)
    return rows


def microseconds(launches: list[Any], count: int, stream: graphs.Stream, repeats: int = 7) -> float:
    graph = graphs.Graph(launches, stream)
    times = graphs.time_runs(lambda: graph.replay(stream), stream, warmup=2, repeats=repeats)
    graph.close()
    return statistics.median(times) / count * 1e3


def rivals(p: separable.Problem, most: int) -> tuple[Any, list[tuple[Any, Any]], Any, list[Any]]:
    """The two problems of separate launches, and the configurations to try."""
    device = of_arch("sm_90a")
    first = depthwise.Problem(p.batch, p.source, p.between, p.dtype)
    second = ConvProblem(p.batch, p.channels, (Source(*p.out_size, p.inner),), p.epilogue, p.dtype)
    firsts = [(family, c) for family in (depthwise, depthwise_tma) for c in family.candidates(first, device)[:most]]
    return first, firsts, second, conv_cost.candidates(second, device, most + 2)


def separate(
    p: separable.Problem, t: Tensors, cache: nvrtc.KernelCache, stream: graphs.Stream, most: int, chain: int
) -> dict[str, Any]:
    """The best two launches that do the same."""
    device = of_arch("sm_90a")
    first, first_configs, second, second_configs = rivals(p, most)
    middle = torch.empty((p.batch, *p.out_size, p.inner), device="cuda", dtype=t.x.dtype)
    packed = torch.from_numpy(depthwise.pack_weights(t.filter.cpu().numpy())).cuda()
    at = {
        "input": t.x.data_ptr(),
        "output": middle.data_ptr(),
        "weights": packed.data_ptr(),
        "bias": t.shift.data_ptr(),
    }
    firsts: list[tuple[float, str, Any]] = []
    for family, c in first_configs:
        made = family.describe(first, c, *([of_arch("sm_90a")] if family is depthwise_tma else []))
        found = describe.bind(made, describe.load(family.recipe(first, c), made, cache), at)
        firsts.append((microseconds([found] * chain, chain, stream), str(c), found))
    weights = torch.from_numpy(conv_params.pack_weights(second, [t.weight.cpu().numpy()])).cuda()
    pointers = conv.Pointers((middle.data_ptr(),), weights.data_ptr(), t.bias.data_ptr(), t.out.data_ptr(),
                             t.residual.data_ptr() if p.residual else 0)  # fmt: skip
    seconds: list[tuple[float, str, Any]] = []
    for c in second_configs:
        found = conv.bind(second, c, device, conv.load(second, c, cache), pointers)
        seconds.append((microseconds([found] * chain, chain, stream), str(c), found))
    both: list[tuple[float, str]] = []
    for a in sorted(firsts, key=lambda i: i[0])[:2]:
        for b in sorted(seconds, key=lambda i: i[0])[:2]:
            both.append((microseconds([a[2], b[2]] * chain, chain, stream), f"{a[1]} {b[1]}"))
    torch.cuda.synchronize()
    best = min(both)
    return {
        "us": best[0],
        "configs": best[1],
        "depthwise_us": min(firsts)[0] if firsts else None,
        "pointwise_us": min(seconds)[0],
    }


def spread(found: list[separable.Config], most: int) -> list[separable.Config]:
    """The first ones, and the first of each kind: what the cost model does not know is to be seen."""
    picked = dict.fromkeys(found[:2])
    kinds = (
        lambda c: (c.strip_w, c.block),
        lambda c: (c.strips, c.warpgroups),
        lambda c: (c.split, c.blocks),
    )
    rest = [list({kind(c): c for c in reversed(found)}.values()) for kind in kinds]
    for one in rest:
        one.sort(key=found.index)
    for k in range(max(map(len, rest))):
        for one in rest:
            if k < len(one) and len(picked) < most:
                picked[one[k]] = None
    return list(picked)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", default="1,128,8")
    parser.add_argument("--most", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--networks", default="mobilenet_v2")
    parser.add_argument("--pairs", default="", help="numbers of a network's pairs, from 0")
    parser.add_argument("--no-cases", action="store_true")
    parser.add_argument("--no-separate", action="store_true", help="without the two launches")
    parser.add_argument("--rivals", type=int, default=3, help="configurations of each kind of the two launches")
    parser.add_argument("--profile", default="", help="launch this configuration alone, for a profiler")
    options = parser.parse_args()
    begin = time.time()
    torch.zeros(1, device="cuda")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    Device.open(0)
    stream, cache = graphs.Stream(), nvrtc.KernelCache(Path("/tmp/kernels-separable"))
    result: dict[str, Any] = {"cases": [] if options.no_cases else cases(cache, stream), "pairs": []}
    options.out.write_text(json.dumps(result, indent=1))
    wrong = sum(not r["good"] for r in result["cases"])
    print(f"{len(result['cases'])} cases, {wrong} wrong, {time.time() - begin:.1f} s", flush=True)
    device = of_arch("sm_90a")
    numbers = [int(n) for n in options.pairs.split(",") if n]
    problems = [
        separable.Problem(n, Source(h, h, c, (k, k), (t, t), (k // 2,) * 4), o, between, end)
        for n in map(int, options.batches.split(","))
        for between, pairs in (PAIRS[name] for name in options.networks.split(","))
        for i, (h, c, k, t, o, end) in enumerate(pairs)
        if not numbers or i in numbers
    ]
    if options.profile:
        (p,) = problems
        (config,) = [c for c in cost.candidates(p, device, 1000) if str(c) == options.profile]
        found = launch(p, config, Tensors(p), cache)
        for _ in range(3):
            found.enqueue(stream.handle)
        stream.synchronize()
        return 0
    chosen = {p: spread(cost.candidates(p, device, 400), options.most) for p in problems}
    recipes = {r.key(): r for p, found in chosen.items() for r in (separable.recipe(p, c) for c in found)}
    for p in [] if options.no_separate else problems:
        first, firsts, second, seconds = rivals(p, options.rivals)
        made = [family.recipe(first, c) for family, c in firsts] + [conv.recipe(second, c) for c in seconds]
        recipes |= {r.key(): r for r in made}
    cache.get_many(list(recipes.values()), 16)
    print(f"{len(recipes)} kernels, {time.time() - begin:.1f} s", flush=True)
    for p in problems:
        if time.time() - begin > options.seconds:
            print("out of time")
            break
        chain = 24 if p.batch == 1 else 12 if p.batch < 64 else 3
        t = Tensors(p)
        rows = []
        for c in chosen[p]:
            try:
                found = launch(p, c, t, cache)
                t.out.fill_(float("nan"))
                torch.cuda.synchronize()
                us = microseconds([found] * chain, chain, stream)
                rows.append((us, str(c), cost.estimate(p, c, device) * 1e6, t.error()))
            except Exception as error:
                print("FAILED", p, c, error, flush=True)
                rows.append((float("inf"), str(c), 0.0, float("inf")))
        base: dict[str, Any] = {}
        if not options.no_separate:
            base = separate(p, t, cache, stream, options.rivals, chain)
        s = p.source
        order = [r[1] for r in rows]
        rows.sort()
        wrong += sum(not r[3] < 3e-3 for r in rows)
        row = {"batch": p.batch, "size": s.height, "inner": p.inner, "kernel": s.kernel[0], "stride": s.stride[0]}
        result["pairs"].append({**row, "channels": p.channels, "separate": base, "one": rows, "ranked": order})
        options.out.write_text(json.dumps(result, indent=1))
        bad = " WRONG" if any(not r[3] < 3e-3 for r in rows) else ""
        two = f"separate {base['us']:.2f} = {base['depthwise_us']:.2f} + {base['pointwise_us']:.2f}; " if base else ""
        ranked = next(r[0] for r in rows if r[1] == order[0])
        print(f"{p.batch:3d} {s.height}x{p.inner}/{s.stride[0]}->{p.channels}: one {rows[0][0]:.2f} ({rows[0][1]}, predicted "
              f"{rows[0][2]:.2f}), {two}memory {p.bytes / 4.2e6:.1f}; first {ranked:.2f}; "
              f"next {[(round(r[0], 2), r[1]) for r in rows[1:]]}{bad}", flush=True)  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
