"""ResNet-50 in int8 on our CUDA kernels: each layer's configurations checked to the bit and timed, then the whole chain.

    python benchmarks/gpu/resnet_int8.py --batches 8,128 --out RESULTS_FOLDER

Scales are chosen such that activations fill their range; the chain's logits are compared, to the bit of fp16, with the same
integer arithmetic done by PyTorch. The downsample convolutions are layers of their own: their scales differ from those of the sums
they are added to.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from conv_bench import Bench, family_of, machine, time_layer, timing

from optdnn.runtime.cuda import conv_cost, conv_params, conv_patch, describe, graphs, pool_int8, quantized
from optdnn.runtime.cuda.conv_problem import Problem, Source
from optdnn.runtime.cuda.device import Launch
from optdnn.runtime.cuda.quantized import Affine

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.enabled = False  # its fp32 algorithms are not exact on integers; im2col and a product are
IMAGE = Source(224, 224, 3, (7, 7), (2, 2), (3, 3, 3, 3))
STEP = 0.05
"""Scale of every activation."""


@dataclass(frozen=True)
class Step:
    """One convolution: buffers by name. ``relu`` and the residual are part of the problem's epilogue and bounds."""

    name: str
    problem: Problem
    source: str
    output: str
    relu: bool
    residual: str = ""


def steps(batch: int, together: int) -> list[Step]:
    """All convolutions and the FC, in order. Pooling goes after "stem" and before "fc"."""

    def plain(channels: int, source: Source, out: str = "") -> Problem:
        return Problem(batch, channels, (source,), (("bias",),), "int8", out)

    found = [Step("stem", plain(64, quantized.overlapped(IMAGE, together)), "image", "stem", True)]
    size, channels, x = 56, 64, "x0"
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            out, y, name = size // stride, "x1" if x == "x0" else "x0", f"layer{stage + 1}.{block}"
            found.append(Step(f"{name}.conv1", plain(width, Source(size, size, channels)), x, "a", True))
            three = Source(size, size, width, (3, 3), (stride, stride), (1, 1, 1, 1))
            found.append(Step(f"{name}.conv2", plain(width, three), "a", "b", True))
            skip = x
            if block == 0:
                down = plain(width * 4, Source(size, size, channels, (1, 1), (stride, stride)))
                found.append(Step(f"{name}.down", down, x, "d", False))
                skip = "d"
            problem = replace(plain(width * 4, Source(out, out, width)), epilogue=(("bias",), ("add",)))
            found.append(Step(f"{name}.conv3", problem, "b", y, True, skip))
            size, channels, x = out, width * 4, y
    found.append(Step("fc", plain(1000, Source(1, 1, 2048), "float16"), "pooled", "logits", False))
    return found


class Parameters:
    """int8 weights and the numbers of the epilogue, on the device; deterministic by the layer's name."""

    def __init__(self, step: Step):
        problem, source = step.problem, step.problem.sources[0]
        generator = torch.Generator(device="cuda").manual_seed(sum(map(ord, step.name)))
        shape = (problem.channels, source.channels, *source.kernel)
        self.weight = torch.randint(-127, 128, shape, generator=generator, device="cuda", dtype=torch.int8)
        if source.pitch:  # lanes beyond the twelve of 2 x 2 x 3 are always zero in the image
            self.weight.view(shape[0], -1, 16, *shape[2:])[:, :, 12:] = 0
        fan_in = source.channels * source.kernel[0] * source.kernel[1]
        rng = np.random.default_rng(1)
        scale = rng.uniform(0.7, 1.3, problem.channels) * (2.0 / fan_in) ** 0.5 / 73.0 * STEP
        bias = rng.standard_normal(problem.channels) * 0.1
        out = None if problem.out_dtype == "float16" else Affine("int8", STEP)
        residual = Affine("int8", STEP) if problem.residual else None
        stages = [("add",)] if problem.residual else []
        if step.relu:
            stages.append(("relu",))
        made = quantized.scaling(stages, scale, bias, out=out, residual=residual)
        assert made.stages == problem.epilogue, (made.stages, problem.epilogue)
        self.requantize = made.requantize
        packed = conv_params.pack_weights(problem, [self.weight.cpu().numpy()])
        self.packed = torch.from_numpy(packed).to("cuda")
        self.channel = torch.from_numpy(quantized.pad_channels(made.channel)).to("cuda")


def seen(problem: Problem, image: torch.Tensor) -> torch.Tensor:
    """The NHWC source as the convolution reads it: pixels that overlap where it has a pitch."""
    source = problem.sources[0]
    if not source.pitch:
        return image
    n, h, width, pitch = image.shape
    row = width * pitch
    return image.as_strided((n, h, source.width, source.channels), (h * row, row, pitch, 1))


def reference(problem: Problem, params: Parameters, image: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The layer in integer arithmetic (fp32 sums stay below 2^24) and one fp32 rounding per step."""
    source, q = problem.sources[0], params.requantize
    top, left, bottom, right = source.padding
    x = torch.nn.functional.pad(seen(problem, image).float().permute(0, 3, 1, 2), (left, right, top, bottom))
    total = torch.nn.functional.conv2d(x, params.weight.float(), None, source.stride, 0, source.dilation).permute(
        0, 2, 3, 1
    )
    channel = params.channel[: problem.channels]
    x = total * channel[:, 0]
    x = x + channel[:, 1]
    if residual is not None:
        x = x + residual.float() * q.residual_scale
    return x.half() if problem.out_dtype == "float16" else x.clamp(q.low, q.high).round().to(torch.int8)


def image_shape(problem: Problem) -> tuple[int, int, int, int]:
    """NHWC of the source in memory."""
    source = problem.sources[0]
    pitch = source.pitch or source.channels
    return (problem.batch, source.height, source.width + source.channels // pitch - 1, pitch)


def candidates(problem: Problem, bench: Bench, limit: int) -> list[Any]:
    gemm = [] if problem.sources[0].pitch else conv_cost.candidates(problem, bench.device, limit)
    return [*conv_patch.candidates(problem, bench.device)[:limit], *gemm]


def distinct(batch: int, together: int) -> dict[tuple[Problem, bool], list[Step]]:
    found: dict[tuple[Problem, bool], list[Step]] = {}
    for step in steps(batch, together):
        found.setdefault((step.problem, step.relu), []).append(step)
    return found


def layers(bench: Bench, batch: int, options: argparse.Namespace, record: Any) -> dict[str, list[tuple[float, Any]]]:
    """Step name -> (us, configuration), fastest first."""
    found: dict[str, list[tuple[float, Any]]] = {}
    for (problem, _), same in distinct(batch, options.together).items():
        params = Parameters(same[0])
        generator = torch.Generator(device="cuda").manual_seed(3)
        low = 0 if same[0].source != "image" else -127
        image = torch.randint(low, 128, image_shape(problem), generator=generator, device="cuda", dtype=torch.int8)
        h, w = problem.out_size
        shape = (batch, h, w, problem.channels)
        residual = (
            torch.randint(-127, 128, shape, generator=generator, device="cuda", dtype=torch.int8)
            if problem.residual
            else None
        )
        expected = reference(problem, params, image, residual)
        output = torch.empty(shape, dtype=expected.dtype, device="cuda")
        pointers = conv_params.Pointers(
            (image.data_ptr(),), params.packed.data_ptr(), params.channel.data_ptr(), output.data_ptr(),
            residual.data_ptr() if residual is not None else 0,
        )  # fmt: skip
        rows: list[tuple[float, Any]] = []
        for config in candidates(problem, bench, options.limit):
            output.view(torch.uint8).fill_(0x7F)
            launch = bench.bind(problem, config, pointers, requantize=params.requantize)
            bench.run(launch)
            wrong = int((output != expected).sum())
            row = {
                "batch": batch,
                "layer": same[0].name,
                "count": len(same),
                "config": str(config),
                "fields": asdict(config),
            }
            if wrong:
                record({**row, "wrong": wrong})
                print(f"WRONG b{batch} {same[0].name} {config}: {wrong} of {output.numel()}", flush=True)
                continue
            us = time_layer(bench, launch, 4e-6 if batch <= 8 else 3e-5)
            rows.append((us, config))
            record({**row, "us": us})
        if not rows:
            raise SystemExit(f"no configuration of {same[0].name} is right")
        rows.sort(key=lambda item: item[0])
        for step in same:
            found[step.name] = rows
        us, config = rows[0]
        print(f"b{batch:<4d}{same[0].name:16s} x{len(same)} {us:8.2f} us {problem.flops / us / 1e6:7.1f} TOP/s "
              f"{problem.bytes / us / 1e3:6.0f} GB/s  {config!s:24s} then {[(round(u, 2), str(c)) for u, c in rows[1:3]]}",
              flush=True)  # fmt: skip
    return found


class Chain:
    """The network of one batch size, in named buffers."""

    def __init__(self, bench: Bench, batch: int, together: int):
        self.bench, self.batch, self.together = bench, batch, together
        self.steps = steps(batch, together)
        self.params = {s.name: Parameters(s) for s in self.steps}
        generator = torch.Generator(device="cuda").manual_seed(5)
        coarse = torch.randn((batch, 3, 6, 6), generator=generator, device="cuda") * 2
        fine = torch.randn((batch, 3, 224, 224), generator=generator, device="cuda") * 0.5
        self.image = (torch.nn.functional.interpolate(coarse, (224, 224), mode="bilinear") + fine).half()
        byte = {"dtype": torch.int8, "device": "cuda"}
        self.buffers = {
            "image": torch.empty(image_shape(self.steps[0].problem), **byte),
            "stem": torch.empty((batch, 112, 112, 64), **byte),
            "pooled": torch.empty((batch, 1, 1, 2048), **byte),
            "logits": torch.empty((batch, 1000), dtype=torch.float16, device="cuda"),
        }
        for name in ("a", "b", "d", "x0", "x1"):
            size = max(s.problem.pixels * s.problem.channels for s in self.steps if s.output == name)
            self.buffers[name] = torch.empty(size, **byte)

    def _described(
        self, made: describe.Description, source: torch.Tensor, target: torch.Tensor, **options: Any
    ) -> Launch:
        recipe = pool_int8.recipe("int8", "sm_90a", image="float16", **options)
        addresses = {"input": source.data_ptr(), "output": target.data_ptr()}
        return describe.bind(made, describe.load(recipe, made, self.bench.cache), addresses, label=made.entry)

    def launches(self, configs: dict[str, Any], snake: bool) -> list[Launch]:
        at, affine = self.buffers, Affine("int8", STEP)
        made = [
            self._described(pool_int8.pack_image(self.batch, IMAGE, self.together, affine), self.image, at["image"])
        ]
        for i, step in enumerate(self.steps):
            params = self.params[step.name]
            if step.name == "fc":
                factor = pool_int8.mean_factor(49, affine, affine)
                pool = pool_int8.global_average_pool((self.batch, 7, 7, 2048), 0, factor, (-128.0, 127.0), 0)
                made.append(self._described(pool, at[self.steps[i - 1].output], at["pooled"]))
            pointers = conv_params.Pointers(
                (at[step.source].data_ptr(),), params.packed.data_ptr(), params.channel.data_ptr(), at[step.output].data_ptr(),
                at[step.residual].data_ptr() if step.residual else 0,
            )  # fmt: skip
            made.append(self.bench.bind(step.problem, configs[step.name], pointers, requantize=params.requantize,
                                        reverse=snake and i % 2 == 1, label=step.name))  # fmt: skip
            if step.name == "stem":
                made.append(
                    self._described(
                        pool_int8.max_pool((self.batch, 112, 112, 64), (3, 3), (2, 2), (1, 1, 1, 1)),
                        at["stem"],
                        at["x0"],
                    )
                )
        return made

    def reference(self, count: int) -> torch.Tensor:
        """The logits of the first images."""
        made = self.steps[0].problem.sources[0]
        q = (self.image[:count].float() / np.float32(STEP)).round().clamp(-128, 127)
        before, inside, width = quantized.row_padding(IMAGE, self.together)
        blocks = torch.zeros((count, made.height, width, 16), device="cuda")
        for dy in range(2):
            for dx in range(2):
                lane = (dy * 2 + dx) * 3
                blocks[:, :, before : before + inside, lane : lane + 3] = q[:, :, dy::2, dx::2].permute(0, 2, 3, 1)
        at = {"image": blocks.to(torch.int8)}
        for i, step in enumerate(self.steps):
            if step.name == "fc":
                mean = at[self.steps[i - 1].output].float().sum((1, 2), keepdim=True)
                factor = pool_int8.mean_factor(49, Affine("int8", STEP), Affine("int8", STEP))
                at["pooled"] = (mean * factor).round().clamp(-128, 127).to(torch.int8)
            residual = at[step.residual] if step.residual else None
            at[step.output] = reference(step.problem, self.params[step.name], at[step.source], residual)
            if step.name == "stem":
                pooled = torch.nn.functional.max_pool2d(at["stem"].float().permute(0, 3, 1, 2), 3, 2, 1)
                at["x0"] = pooled.permute(0, 2, 3, 1).to(torch.int8)
        return at["logits"].reshape(count, 1000)


def chain(
    bench: Bench, batch: int, options: argparse.Namespace, measured: dict[str, list[tuple[float, Any]]], record: Any
) -> None:
    made = Chain(bench, batch, options.together)
    configs = {name: rows[0][1] for name, rows in measured.items()}
    expected = made.reference(min(8, batch))

    def measure(trial: dict[str, Any], repeats: int = 11) -> float:
        graph = graphs.Graph(made.launches(trial, snake=batch >= 32), bench.stream)
        times = graphs.time_runs(lambda: graph.replay(bench.stream), bench.stream, warmup=3, repeats=repeats)
        graph.close()
        return statistics.median(times)

    first = {s.name: same[0].name for same in distinct(batch, options.together).values() for s in same}
    best = begin = measure(configs)
    deadline = time.time() + options.refine
    for name in sorted(set(first.values()), key=lambda n: -measured[n][0][0] * sum(f == n for f in first.values())):
        for us, option in measured[name][1:3]:
            if us > 1.15 * measured[name][0][0] or time.time() > deadline:
                break
            trial = {s: option if first[s] == name else c for s, c in configs.items()}
            if (ms := measure(trial)) < best * 0.9985:
                best, configs = ms, trial
    print(f"refined b{batch}: {begin:.4f} -> {best:.4f} ms", flush=True)
    launches = made.launches(configs, snake=batch >= 32)
    for tensor in made.buffers.values():
        tensor.view(torch.uint8).fill_(0x55)
    torch.cuda.synchronize()
    graph = graphs.Graph(launches, bench.stream)
    graph.replay(bench.stream)
    bench.stream.synchronize()
    found = made.buffers["logits"][: len(expected)]
    wrong = int((found != expected).sum())
    spread = float((expected[0].float() - expected[-1].float()).norm() / expected[0].float().norm())
    flush = graphs.Flush(2 * bench.device.l2_bytes, bench.stream)
    row = {
        "batch": batch, "kernels": len(launches), "wrong_logits": wrong, "logits": expected.numel(), "another_input": spread,
        "configs": {n: str(c) for n, c in configs.items()}, **timing(lambda: graph.replay(bench.stream), bench, flush),
    }  # fmt: skip
    record(row)
    speed = f"{row['median_ms']:.4f} ms = {batch / row['median_ms'] * 1e3:.0f} img/s"
    print(f"chain int8 b{batch}: {speed} (back to back {row['back_to_back_ms']:.4f}), {wrong} of {expected.numel()} logits differ; "
          f"two images differ by {spread:.2f}", flush=True)  # fmt: skip
    for end in range(1, len(launches) + 1):  # each step alone, in place
        if options.prefix:
            part = graphs.Graph(launches[:end], bench.stream)
            us = (
                statistics.median(
                    graphs.time_runs(lambda g=part: g.replay(bench.stream), bench.stream, warmup=2, repeats=7)
                )
                * 1e3
            )
            part.close()
            record({"batch": batch, "prefix": launches[end - 1].label, "us": us})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="8,128", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/kernels-int8"))
    parser.add_argument("--limit", type=int, default=6, help="candidates per layer and kernel")
    parser.add_argument("--together", type=int, default=2, choices=(2, 4), help="pixels of the stem read as one")
    parser.add_argument(
        "--refine", type=float, default=4.0, help="seconds for the choice among near-equals in the chain"
    )
    parser.add_argument("--prefix", action="store_true", help="also time every prefix of the chain")
    options = parser.parse_args()
    bench, fast = Bench(options.cache, checked=True), Bench(options.cache)
    begin = time.time()
    recipes = [
        family_of(c).recipe(p, c, checked=checked)
        for checked in (True, False)
        for b in options.batches
        for p, _ in distinct(b, options.together)
        for c in candidates(p, bench, options.limit)
    ]
    bench.cache.get_many(list({r.key(): r for r in recipes}.values()), os.cpu_count() or 1)
    print(f"{len(recipes)} kernels in {time.time() - begin:.1f} s", flush=True)
    with (options.out / "resnet50-int8.jsonl").open("a") as handle:

        def record(row: dict[str, Any]) -> None:
            handle.write(json.dumps(row) + "\n")
            handle.flush()

        record(machine(bench))
        for batch in options.batches:
            measured = layers(bench, batch, options, record)
            chain(fast, batch, options, measured, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
