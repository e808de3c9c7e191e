"""What benchmarks of single convolutions share: a layer with its fp32 reference, launches of configurations, and their times."""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from optdnn.runtime.cuda import conv, conv_cost, conv_params, conv_patch, conv_problem, graphs, nvrtc
from optdnn.runtime.cuda.device import Device, Function, Launch

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
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


def time_layer(bench: Bench, launch: Launch, estimate: float) -> float:
    count = 40 if estimate < 8e-6 else 16 if estimate < 3e-5 else 6
    graph = graphs.Graph([launch] * count, bench.stream)
    times = graphs.time_runs(lambda: graph.replay(bench.stream), bench.stream, warmup=2, repeats=7)
    graph.close()
    return statistics.median(times) / count * 1e3


def timing(run: Any, bench: Bench, flush: Any) -> dict[str, float]:
    single = graphs.time_runs(run, bench.stream, warmup=10, repeats=60)
    flushed = graphs.time_runs(run, bench.stream, warmup=2, repeats=20, between=flush)
    back = graphs.time_runs(run, bench.stream, warmup=2, repeats=7, inner=10)
    return {"median_ms": statistics.median(single), "min_ms": min(single), "p90_ms": sorted(single)[int(len(single) * 0.9)],
            "flushed_ms": statistics.median(flushed), "back_to_back_ms": statistics.median(back)}  # fmt: skip


def machine(bench: Bench) -> dict[str, Any]:
    return {"device": asdict(bench.device), "nvrtc": nvrtc.version(), "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "python": sys.version.split()[0], "command": " ".join(sys.argv), "commit": os.environ.get("COMMIT", "")}  # fmt: skip
