"""ResNet-50 on our CUDA kernels alone: check every layer, time every candidate, time the whole chain, beside PyTorch with cuDNN.

    python benchmarks/gpu/resnet_layers.py all --batches 1,8,32,128 --out RESULTS_FOLDER

Stages: ``compile`` (all candidates, in parallel), ``layers`` (each distinct layer: every candidate configuration is compared with
an fp32 reference, then timed), ``chain`` (the network in one CUDA graph with the fastest configurations), ``torch`` (eager and
cuDNN-fused baselines in CUDA graphs). Each stage runs in a process of its own: a fault in one kernel ends only that process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import resnet50

from optdnn.runtime.cuda import conv, conv_cost, conv_params, conv_patch, conv_problem, graphs, nvrtc, pool
from optdnn.runtime.cuda.device import Device, Function, Launch

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
TOLERANCE = {"float16": 1e-3, "bfloat16": 6e-3}  # relative to the norm; rounding the result alone costs a third of it
TORCH_DTYPE = {"float16": torch.float16, "bfloat16": torch.bfloat16}


Config = conv.Config | conv_patch.PatchConfig


def family_of(config: Config) -> Any:
    """The module that plans this kind of configuration."""
    return conv_patch if isinstance(config, conv_patch.PatchConfig) else conv


def candidates(problem: conv_problem.Problem, device: Device, limit: int) -> list[Config]:
    """Both kernels' configurations, at most ``limit`` of each."""
    return [*conv_patch.candidates(problem, device)[:limit], *conv_cost.candidates(problem, device, limit)]


class Bench:
    """The device, a stream, and the kernels loaded so far."""

    def __init__(self, cache: Path | None, *, checked: bool = False):
        self.checked = checked
        torch.zeros(1, device="cuda")
        self.device = Device.open(0)
        self.stream = graphs.Stream()
        self.cache = nvrtc.KernelCache(cache)
        self.functions: dict[tuple[str, int], Function] = {}
        self.partial = torch.empty(0, dtype=torch.uint8, device="cuda")
        self.arrived = torch.zeros(4096, dtype=torch.int32, device="cuda")

    def function(self, problem: conv_problem.Problem, config: Config) -> Function:
        family = family_of(config)
        key = (family.recipe(problem, config, checked=self.checked).key(), family.shared_bytes(problem, config))
        if key not in self.functions:
            self.functions[key] = family.load(problem, config, self.cache, checked=self.checked)
        return self.functions[key]

    def bind(
        self, problem: conv_problem.Problem, config: Config, pointers: conv_params.Pointers, **options: Any
    ) -> Launch:
        if getattr(config, "stream", False):
            size = conv.workspace(problem, config, self.device)[0]
            if self.partial.numel() < size:
                self.partial = torch.empty(size, dtype=torch.uint8, device="cuda")
            pointers = replace(pointers, partial=self.partial.data_ptr(), arrived=self.arrived.data_ptr())
        return family_of(config).bind(problem, config, self.device, self.function(problem, config), pointers, **options)

    def run(self, launch: Launch) -> None:
        torch.cuda.synchronize()
        launch.enqueue(self.stream.handle)
        self.stream.synchronize()


class Layer:
    """One problem's tensors, and its fp32 reference."""

    def __init__(self, problem: conv_problem.Problem, seed: int = 0):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        dtype = TORCH_DTYPE[problem.dtype]

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda")

        self.problem = problem
        n, (h, w) = problem.batch, problem.out_size
        self.images = [random(n, s.height, s.width, s.channels).to(dtype) for s in problem.sources]
        fan_in = sum(s.channels * s.kernel[0] * s.kernel[1] for s in problem.sources)
        self.weights = [
            (random(problem.channels, s.channels, *s.kernel) / fan_in**0.5).to(dtype) for s in problem.sources
        ]
        self.bias = random(-(-problem.channels // 4) * 4)
        self.residual = random(n, h, w, problem.channels).to(dtype) if problem.residual else None
        self.output = torch.empty((n, h, w, problem.channels), dtype=dtype, device="cuda")
        packed = conv_params.pack_weights(problem, [weight.float().cpu().numpy() for weight in self.weights])
        self.packed = torch.from_numpy(packed).to("cuda", dtype)

    def pointers(self) -> conv_params.Pointers:
        return conv_params.Pointers(
            tuple(t.data_ptr() for t in self.images), self.packed.data_ptr(), self.bias.data_ptr(), self.output.data_ptr(),
            self.residual.data_ptr() if self.residual is not None else 0,
        )  # fmt: skip

    def reference(self) -> torch.Tensor:
        total: Any = 0.0
        for image, weight, s in zip(self.images, self.weights, self.problem.sources, strict=True):
            top, left, bottom, right = s.padding
            padded = torch.nn.functional.pad(image.float().permute(0, 3, 1, 2), (left, right, top, bottom))
            total = total + torch.nn.functional.conv2d(padded, weight.float(), None, s.stride, 0, s.dilation)
        return apply_stages(
            total.permute(0, 2, 3, 1), self.problem.epilogue, self.bias[: self.problem.channels], self.residual
        )


def apply_stages(x: torch.Tensor, stages: Any, bias: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The epilogue in fp32."""
    for name, *values in stages:
        if name == "bias":
            x = x + bias
        elif name == "add":
            x = x + residual.float()  # type: ignore[union-attr]
        elif name == "mul":
            x = x * residual.float()  # type: ignore[union-attr]
        elif name == "clip":
            x = x.clamp(*values)
        else:
            known = {"relu": torch.relu, "silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid,
                     "gelu": torch.nn.functional.gelu, "hard_swish": torch.nn.functional.hardswish}  # fmt: skip
            x = known[name](x)
    return x


def compare(bench: Bench, layer: Layer, config: Config, reference: torch.Tensor) -> float:
    """Relative error of one run into a poisoned output (NaN if an element was not written)."""
    problem = layer.problem
    layer.output.fill_(float("nan"))
    bench.run(bench.bind(problem, config, layer.pointers()))
    return float((layer.output.float() - reference).norm() / reference.norm())


# ---- stages --------------------------------------------------------------------------------------------------------------


def distinct(batch: int) -> dict[conv_problem.Problem, list[str]]:
    found: dict[conv_problem.Problem, list[str]] = {}
    for step in resnet50.steps(batch):
        found.setdefault(step.problem, []).append(step.name)
    return found


def all_candidates(batches: list[int], device: Device, limit: int) -> dict[str, nvrtc.Recipe]:
    recipes: dict[str, nvrtc.Recipe] = {}
    for batch in batches:
        for problem in distinct(batch):
            for config in candidates(problem, device, limit):
                made = family_of(config).recipe(problem, config, checked=True)
                recipes[made.key()] = made
    return recipes


def time_layer(bench: Bench, launch: Launch, estimate: float) -> float:
    count = 40 if estimate < 8e-6 else 16 if estimate < 3e-5 else 6
    graph = graphs.Graph([launch] * count, bench.stream)
    times = graphs.time_runs(lambda: graph.replay(bench.stream), bench.stream, warmup=2, repeats=7)
    graph.close()
    return statistics.median(times) / count * 1e3


def stage_layers(bench: Bench, batch: int, limit: int, record: Any, tried: set[tuple[str, str]]) -> None:
    for problem, names in distinct(batch).items():
        layer = Layer(problem)
        reference = layer.reference()
        best = None
        for config in candidates(problem, bench.device, limit):
            if (names[0], str(config)) in tried:
                continue
            record({"layer": names[0], "config": str(config), "trying": True})
            try:
                error = compare(bench, layer, config, reference)
            except nvrtc.KernelError as failure:
                record({"layer": names[0], "config": str(config), "failure": str(failure)})
                print(f"FAILED {names[0]} {config}: does not compile", flush=True)
                continue
            estimate = (
                conv_cost.estimate(problem, config, bench.device)
                if isinstance(config, conv.Config)
                else problem.flops / 4e14 + 2e-6
            )
            row = {
                "batch": batch,
                "layer": names[0],
                "count": len(names),
                "config": str(config),
                "fields": asdict(config),
                "error": error,
                "kernel": "patch" if isinstance(config, conv_patch.PatchConfig) else "gemm",
            }
            if not error < TOLERANCE[problem.dtype]:
                record({**row, "us": None})
                print(f"WRONG {names[0]} {config} {error:.2e}", flush=True)
                continue
            launch = bench.bind(problem, config, layer.pointers())
            us = time_layer(bench, launch, estimate)
            record({**row, "us": us, "predicted_us": estimate * 1e6})
            if best is None or us < best[0]:
                best = (us, config, estimate)
        if best:
            print(f"b{batch:<4d}{names[0]:16s} x{len(names)} {best[0]:8.2f} us  {problem.flops / best[0] / 1e6:7.1f} TFLOP/s "
                  f"{problem.bytes / best[0] / 1e3:7.0f} GB/s  {best[1]!s:24s} (predicted {best[2] * 1e6:.1f})",
                  flush=True)  # fmt: skip
        del layer, reference


def best_configs(folder: Path, batch: int) -> dict[str, list[tuple[float, Config]]]:
    """Layer name -> (us, configuration), fastest first, as measured."""
    found: dict[str, list[tuple[float, conv.Config]]] = {}
    for line in (folder / f"layers-{batch}.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("us"):
            kind = conv_patch.PatchConfig if row["kernel"] == "patch" else conv.Config
            found.setdefault(row["layer"], []).append((row["us"], kind(**row["fields"])))
    return {name: sorted(rows, key=lambda item: item[0]) for name, rows in found.items()}


class Chain:
    """ResNet-50 of one batch size, in one arena of named buffers."""

    def __init__(self, bench: Bench, batch: int, seed: int = 0):
        self.bench, self.batch = bench, batch
        self.params = resnet50.parameters(seed)
        self.steps = resnet50.steps(batch)
        half = {"dtype": torch.float16, "device": "cuda"}
        stem = self.steps[0].problem.sources[0]
        self.image = resnet50.images(batch, seed + 1)
        self.buffers = {
            "image": torch.empty((batch, stem.height, stem.width, stem.channels), **half),
            "stem": torch.empty((batch, 112, 112, 64), **half),
            "pooled": torch.empty((batch, 2048), **half),
            "logits": torch.empty((batch, 1000), **half),
        }
        for name in ("a", "b", "x0", "x1"):
            size = max(s.problem.pixels * s.problem.channels for s in self.steps if s.output == name)
            self.buffers[name] = torch.empty(size, **half)
        self.packed: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for step in self.steps:
            weights = [self.params[key][0].float().cpu().numpy() for key in step.weights]
            if step.name == "stem":
                weights = [conv_problem.space_to_depth_weights(resnet50.IMAGE, weights[0])]
            packed = torch.from_numpy(conv_params.pack_weights(step.problem, weights)).to("cuda", torch.float16)
            self.packed[step.name] = packed, torch.stack([self.params[key][1] for key in step.weights]).sum(0)

    def launches(self, configs: dict[str, Config], *, snake: bool, dependent: bool = True) -> list[Launch]:
        bench, at = self.bench, {name: t.data_ptr() for name, t in self.buffers.items()}
        arch, cache, made = "sm_90a", bench.cache, []
        made.append(
            pool.image_to_depth(cache, arch, "float16", self.batch, resnet50.IMAGE, self.image.data_ptr(), at["image"])
        )
        last = ""
        for i, step in enumerate(self.steps):
            config = configs[step.name]
            if step.name == "fc":
                made.append(
                    pool.global_average_pool(cache, arch, "float16", (self.batch, 7, 7, 2048), at[last], at["pooled"])
                )
            packed, bias = self.packed[step.name]
            pointers = conv_params.Pointers(
                tuple(at[name] for name in step.inputs), packed.data_ptr(), bias.data_ptr(), at[step.output],
                at[step.residual] if step.residual else 0,
            )  # fmt: skip
            made.append(
                bench.bind(
                    step.problem, config, pointers, reverse=snake and i % 2 == 1, dependent=dependent, label=step.name
                )
            )
            if step.name == "stem":
                made.append(
                    pool.max_pool(
                        cache,
                        arch,
                        "float16",
                        (self.batch, 112, 112, 64),
                        (3, 3),
                        (2, 2),
                        (1, 1, 1, 1),
                        at["stem"],
                        at["x0"],
                    )
                )
            last = step.output
        return made

    def error(self) -> tuple[float, float]:
        """Relative error of the logits, and the relative difference that another input makes (what the error must be far below)."""
        reference = resnet50.forward(self.image[:8], self.params, torch.float32)
        other = resnet50.forward(resnet50.images(min(8, self.batch), 99), self.params, torch.float32)
        ours = self.buffers["logits"][:8].float()
        return float((ours - reference).norm() / reference.norm()), float((other - reference).norm() / reference.norm())


def timing(run: Any, bench: Bench, flush: Any) -> dict[str, float]:
    single = graphs.time_runs(run, bench.stream, warmup=10, repeats=60)
    flushed = graphs.time_runs(run, bench.stream, warmup=2, repeats=20, between=flush)
    back = graphs.time_runs(run, bench.stream, warmup=2, repeats=7, inner=10)
    return {"median_ms": statistics.median(single), "min_ms": min(single), "p90_ms": sorted(single)[int(len(single) * 0.9)],
            "flushed_ms": statistics.median(flushed), "back_to_back_ms": statistics.median(back)}  # fmt: skip


def refine(
    chain: Chain, configs: dict[str, Config], shortlist: dict[str, list[Config]], first: dict[str, str]
) -> dict[str, Config]:
    """The choice among near-equals, made in the whole network: neighbours overlap, and share L2."""
    bench = chain.bench

    def measure(trial: dict[str, Config]) -> float:
        graph = graphs.Graph(chain.launches(trial, snake=chain.batch >= 32), bench.stream)
        times = graphs.time_runs(
            lambda: graph.replay(bench.stream), bench.stream, warmup=3, repeats=25 if chain.batch <= 8 else 11
        )
        graph.close()
        return statistics.median(times)

    best = measure(configs)
    begin = best
    for name, options in shortlist.items():
        for option in options[1:]:
            trial = {step: option if first[step] == name else config for step, config in configs.items()}
            if (ms := measure(trial)) < best * 0.9985:
                best, configs = ms, trial
    print(f"refined b{chain.batch}: {begin:.4f} -> {best:.4f} ms", flush=True)
    return configs


def stage_chain(bench: Bench, batch: int, folder: Path, record: Any) -> None:
    measured = best_configs(folder, batch)
    first = {name: names[0] for names in distinct(batch).values() for name in names}
    chain = Chain(bench, batch)
    flush = graphs.Flush(2 * bench.device.l2_bytes, bench.stream)
    configs = {step.name: measured[first[step.name]][0][1] for step in chain.steps}
    shortlist = {
        name: [c for us, c in measured[name] if us < 1.25 * measured[name][0][0]][:4] for name in set(first.values())
    }
    needed = [family_of(c).recipe(step.problem, c) for step in chain.steps for c in shortlist[first[step.name]]]
    bench.cache.get_many(list({r.key(): r for r in needed}.values()), os.cpu_count() or 1)
    configs = refine(chain, configs, shortlist, first)
    record({"batch": batch, "configs": {name: str(config) for name, config in configs.items()}})
    for snake, dependent in ((False, True), (True, True), (False, False)):
        launches = chain.launches(configs, snake=snake, dependent=dependent)
        for tensor in chain.buffers.values():
            tensor.view(torch.uint8).fill_(0xFF)  # NaN
        torch.cuda.synchronize()
        graph = graphs.Graph(launches, bench.stream)
        graph.replay(bench.stream)
        bench.stream.synchronize()
        error, scale = chain.error()
        row = {"batch": batch, "snake": snake, "dependent": dependent, "kernels": len(launches),
               "error": error, "another_input": scale,
               **timing(lambda g=graph: g.replay(bench.stream), bench, flush)}  # fmt: skip
        record(row)
        print(f"chain b{batch} snake={snake} pdl={dependent}: {row['median_ms']:.4f} ms "
              f"(back to back {row['back_to_back_ms']:.4f}, "
              f"L2 flushed {row['flushed_ms']:.4f}) error {error:.1e} of {scale:.2f}", flush=True)  # fmt: skip
        graph.close()
    if batch <= 8:  # what every prefix costs: the difference is a step's share of the whole
        launches = chain.launches(configs, snake=False)
        marks = []
        for end in range(1, len(launches) + 1):
            graph = graphs.Graph(launches[:end], bench.stream)
            marks.append(
                statistics.median(
                    graphs.time_runs(lambda g=graph: g.replay(bench.stream), bench.stream, warmup=3, repeats=15)
                )
                * 1e3
            )
            graph.close()
        shares = [b - a for a, b in zip([0.0, *marks], marks, strict=False)]
        record(
            {
                "batch": batch,
                "prefix_us": [[launch.label, round(us, 2)] for launch, us in zip(launches, shares, strict=True)],
            }
        )
        print(" ".join(f"{launch.label}:{us:.1f}" for launch, us in zip(launches, shares, strict=True)), flush=True)


def stage_profile(bench: Bench, batch: int, folder: Path, names: list[str]) -> None:
    """Launches some layers' fastest configurations alone, under a profiler such as ``ncu --clock-control none -k regex:conv``."""
    measured = best_configs(folder, batch)
    for problem, layers in distinct(batch).items():
        if layers[0] in names:
            layer = Layer(problem)
            for _, config in measured[layers[0]][:1]:
                print(f"profile b{batch} {layers[0]} {config}", flush=True)
                for _ in range(2):
                    bench.run(bench.bind(problem, config, layer.pointers()))


def stage_marks(bench: Bench, batch: int, folder: Path, record: Any) -> None:
    """Where a layer's time goes: mean nanoseconds between the kernels' time marks, over the blocks of one launch in a chain."""
    import numpy as np

    from optdnn.runtime.cuda.device import check, driver

    cu, measured = driver(), best_configs(folder, batch)
    for problem, layers in distinct(batch).items():
        layer, config = Layer(problem), measured[layers[0]][0][1]
        family = family_of(config)
        made = family.recipe(problem, config)
        cubin, _ = nvrtc.compile_recipe(replace(made, options=(*made.options, "-DPROFILE")))
        name = "conv_patch_sm90" if family is conv_patch else "conv_sm90"
        function = Function(
            cubin, name, shared=family.shared_bytes(problem, config), wide_cluster=getattr(config, "split", 1) > 8
        )
        launch = family.bind(problem, config, bench.device, function, layer.pointers())
        graph = graphs.Graph([launch] * 20, bench.stream)
        graph.replay(bench.stream)
        bench.stream.synchronize()
        address, _ = check("cuModuleGetGlobal", cu.cuModuleGetGlobal(function._module, b"profile_log"))
        log = np.zeros((2048, 16), np.uint64)
        check("cuMemcpyDtoH", cu.cuMemcpyDtoH(log.ctypes.data, address, log.nbytes))
        log = log[: min(launch.grid[0], 2048)].astype(np.int64)
        names = ["ready", "wait", "issued", "first", "mma", "pushed", "reduced", "end", *(f"k{i}" for i in range(8))]
        times = {n: int((log[:, i] - log[:, 1]).mean()) for i, n in enumerate(names) if log[:, i].any()}
        spread = int(log[:, 7].max() - log[:, 1].min())
        record({"batch": batch, "layer": layers[0], "config": str(config), "marks": times, "wait_to_last_end": spread})
        print(f"marks b{batch} {layers[0]:16s} {config!s:24s} {times} last end {spread} ns", flush=True)
        graph.close()


def stage_torch(bench: Bench, batch: int, record: Any) -> None:
    params = {k: (w.to(memory_format=torch.channels_last), b.half()) for k, (w, b) in resnet50.parameters().items()}
    x = torch.randn((batch, 3, 224, 224), device="cuda").half().to(memory_format=torch.channels_last)
    torch.backends.cudnn.benchmark = True
    ops = torch.ops.aten

    def fused(x: torch.Tensor) -> torch.Tensor:
        def conv_relu(v: torch.Tensor, name: str, stride: int, padding: int) -> torch.Tensor:
            w, b = params[name]
            return ops.cudnn_convolution_relu(v, w, b, [stride, stride], [padding, padding], [1, 1], 1)

        x = torch.nn.functional.max_pool2d(conv_relu(x, "stem", 2, 3), 3, 2, 1)
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                name, stride = f"layer{stage + 1}.{block}", 2 if stage > 0 and block == 0 else 1
                y = conv_relu(conv_relu(x, f"{name}.conv1", 1, 0), f"{name}.conv2", stride, 1)
                skip = torch.nn.functional.conv2d(x, *params[f"{name}.down"], stride) if block == 0 else x
                w, b = params[f"{name}.conv3"]
                x = ops.cudnn_convolution_add_relu(y, w, skip, 1.0, b, [1, 1], [0, 0], [1, 1], 1)
        w, b = params["fc"]
        return torch.nn.functional.linear(x.mean((2, 3)), w.flatten(1), b)

    def eager(x: torch.Tensor) -> torch.Tensor:
        return resnet50.forward(x, params, torch.float16)

    for name, function in (("cudnn_fused", fused), ("eager", eager)):
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(3):
                function(x)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                function(x)
            times = []
            for _ in range(10):
                graph.replay()
            for _ in range(60):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record(stream)
                graph.replay()
                end.record(stream)
                times.append((begin, end))
            stream.synchronize()
        ms = statistics.median(a.elapsed_time(b) for a, b in times)
        record({"batch": batch, "torch": name, "median_ms": ms})
        print(f"torch {name} b{batch}: {ms:.4f} ms", flush=True)


# ---- driver --------------------------------------------------------------------------------------------------------------


def machine(bench: Bench) -> dict[str, Any]:
    return {"device": asdict(bench.device), "nvrtc": nvrtc.version(), "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "python": sys.version.split()[0], "command": " ".join(sys.argv), "commit": os.environ.get("COMMIT", "")}  # fmt: skip


def worker(options: argparse.Namespace) -> int:
    bench = Bench(options.cache, checked=options.stage == "layers")  # a deadlock must trap, not hang
    file = options.out / (f"{options.stage}-{options.batch}.jsonl" if options.batch else f"{options.stage}.jsonl")
    tried: set[tuple[str, str]] = set()
    if file.exists():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        tried = {(row["layer"], row["config"]) for row in rows if "config" in row and "layer" in row}
    with file.open("a") as handle:

        def record(row: dict[str, Any]) -> None:
            handle.write(json.dumps(row) + "\n")
            handle.flush()

        record(machine(bench))
        if options.stage == "compile":
            recipes = list(all_candidates(options.batches, bench.device, options.limit).values())
            begin = time.time()
            try:
                bench.cache.get_many(recipes, os.cpu_count() or 1)
            except nvrtc.KernelError as failure:
                print(failure, flush=True)
            print(f"{len(recipes)} kernels, {bench.cache.misses} compiled in {time.time() - begin:.1f} s", flush=True)
        elif options.stage == "layers":
            stage_layers(bench, options.batch, options.limit, record, tried)
        elif options.stage == "profile":
            stage_profile(bench, options.batch, options.out, options.layers.split(","))
        elif options.stage == "marks":
            stage_marks(bench, options.batch, options.out, record)
        elif options.stage == "chain":
            stage_chain(bench, options.batch, options.out, record)
        else:
            stage_torch(bench, options.batch, record)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("all", "compile", "layers", "chain", "torch", "profile", "marks"))
    parser.add_argument("--batches", default="1,8,32,128", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--batch", type=int, default=0, help="of one worker")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--cache", type=Path, default=None, help="kernel cache folder")
    parser.add_argument("--limit", type=int, default=10, help="candidates per layer")
    parser.add_argument("--layers", default="stem,layer1.0.conv2", help="of stage profile")
    parser.add_argument("--stages", default="compile,layers,chain,torch", help="of stage all")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage != "all":
        return worker(options)

    def sub(stage: str, batch: int, seconds: int) -> int:
        command = [sys.executable, __file__, stage, "--out", str(options.out), "--limit", str(options.limit), "--batch", str(batch),
                   "--batches", ",".join(map(str, options.batches))]  # fmt: skip
        begin = time.time()
        try:
            code = subprocess.run(
                [*command, *(["--cache", str(options.cache)] if options.cache else [])], timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
        print(f"[{stage} {batch or ''} {time.time() - begin:.1f} s, exit {code}]", flush=True)
        return code

    for stage in options.stages.split(","):
        if stage == "profile":
            continue
        if stage == "compile":
            sub(stage, 0, 100)
            continue
        for batch in options.batches:
            for _ in range(4 if stage == "layers" else 1):  # a faulty kernel ends its process: go on behind it
                if sub(stage, batch, 60) == 0:
                    break
    return 0


if __name__ == "__main__":
    sys.exit(main())
