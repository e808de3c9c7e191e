"""Replays many networks' CUDA graphs thousands of times: nothing may hang, and no result may differ from the first.

    python benchmarks/gpu/soak.py --out soak.jsonl [--shared FOLDER] [--only TEXT,…] [--seconds 540]

The networks are the zoo's, those of ``--shared`` (a folder with ``fill.py`` and ``graphs/``) and architectures of torchvision,
timm, transformers and diffusers with seeded weights. Each is built by the cost model at fp16, fp32 and int8 (calibrated on random
data), at batches from 1 to 64 in turn. Then a process of its own, with a time limit, replays the graph ``REPLAYS`` times alone
and as often beside another stream, which keeps a random share of the multiprocessors busy for a random time. Each replay's
outputs are compared on the GPU with the first run's, bit for bit.

A row is printed and appended to ``--out`` for each network and precision: ``ok``, ``hang``, ``differs``, ``crash`` or
``not built`` with its reason. Rows that are there already are not run again, so a second call goes on where the first ended.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

REPLAYS = 500
"""Of each kind: alone, and beside another stream."""
BUILD_LIMIT_S, LIMIT_S = 240.0, 150.0
"""Seconds that a network's build, and its replays, may take."""
ON_HOST_S = 15.0
"""Seconds after which a network with operators on the CPU stops early: its runs are slow, and the row says how many it had."""
PROCESSES = 4
"""That replay at a time: while one loads, others run."""
DETECTORS = ("rcnn", "ssd")
"""Parts of names of networks that run at batch 1 alone."""
BATCHES = {"fp16": (1, 16, 2, 64, 1, 8, 4, 32), "fp32": (1, 2, 4, 1, 8), "int8": (8, 1, 32, 2, 16, 1, 64, 4)}
"""Batches that networks get in turn. True fp32 is slow, so its batches are small."""
TIMM = (
    "fastvit_t8", "mobilenetv4_conv_small", "xcit_tiny_12_p16_224", "mixer_s16_224", "convnextv2_atto", "ghostnetv2_100",
    "edgenext_xx_small", "efficientformerv2_s0", "repvgg_a0", "hrnet_w18_small",
)  # fmt: skip
TORCHVISION = ("densenet169", "densenet201")


# ---------------------------------------------------------------- networks


def names(shared: Path | None) -> list[str]:
    """``source/name`` of every network."""
    from others import OTHERS, SEGMENTATION, VISION

    from optdnn.models import zoo

    found = [f"zoo/{n}" for n in zoo.NAMES]
    if shared is not None:
        found += [f"shared/{p.stem}" for p in sorted((shared / "graphs").glob("*.onnx"))]
    found += [f"torch/{n}" for n in (*TORCHVISION, *VISION, *SEGMENTATION, *OTHERS)]
    found += [f"timm/{n}" for n in TIMM]
    return [*found, "diffusers/unet", "diffusers/vae_decoder"]


def torch_module(source: str, name: str, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """A PyTorch module in evaluation mode and its inputs."""
    import torch

    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    if source == "torch" and name not in TORCHVISION:
        from others import made

        module, x, _ = made(name, batch)
        return module, (x,)
    if source == "torch":
        from torchvision import models

        return getattr(models, name)(weights=None).eval(), (torch.randn(batch, 3, 224, 224),)
    if source == "timm":
        import timm

        module = timm.create_model(name, pretrained=False).eval()
        return module, (torch.randn(batch, *module.default_cfg["input_size"]),)
    return diffusion(name, batch)


def diffusion(name: str, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """A small UNet with cross attention, or a VAE's decoder, with group norms over large images."""
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from torch import nn

    class Decoder(nn.Module):
        def __init__(self, inner: Any):
            super().__init__()
            self.inner = inner

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return self.inner.decode(z, return_dict=False)[0]  # type: ignore[no-any-return]

    class Sample(nn.Module):
        def __init__(self, inner: Any):
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return self.inner(x, t, text, return_dict=False)[0]  # type: ignore[no-any-return]

    blocks = {"block_out_channels": (64, 128), "layers_per_block": 1}
    if name == "vae_decoder":
        up, down = ("UpDecoderBlock2D",) * 2, ("DownEncoderBlock2D",) * 2
        vae = AutoencoderKL(up_block_types=up, down_block_types=down, latent_channels=4, **blocks)
        return Decoder(vae).eval(), (torch.randn(min(batch, 4), 4, 64, 64),)
    unet = UNet2DConditionModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=128, attention_head_dim=8, sample_size=32, **blocks,
    )  # fmt: skip
    return Sample(unet).eval(), (torch.randn(batch, 4, 32, 32), torch.tensor(7), torch.randn(batch, 20, 128))


def model_of(network: str, batch: int, shared: Path | None, scratch: Path) -> tuple[Any, dict[str, Any]]:
    """An ONNX model (or its file) and inputs for it."""
    import onnx

    source, _, name = network.partition("/")
    if source == "zoo":
        from optdnn.models import zoo

        model = zoo.build(name, batch=batch)
        return model, zoo.example_inputs(model, seed=1)
    if source == "shared":
        from agreement import fill_module

        assert shared is not None
        fill = fill_module(shared)
        model = fill.fill(str(shared / "graphs" / f"{name}.onnx"))
        return model, fill.feeds(model, sizes={"N": batch})
    import torch

    module, inputs = torch_module(source, name, batch)
    file = scratch / f"{network.replace('/', '-')}.{os.getpid()}.onnx"
    torch.onnx.export(module, inputs, str(file), dynamo=False, opset_version=17)
    model = onnx.load(file)
    file.unlink()
    given = {v.name for v in model.graph.input}
    feeds = {v.name: x.numpy() for v, x in zip(model.graph.input, inputs, strict=False)}
    return model, {k: v for k, v in feeds.items() if k in given}


def build(network: str, precision: str, batch: int, shared: Path | None, stem: str) -> None:
    """Export and build without a GPU: ``stem`` is that of the engine's file and of its inputs'."""
    import torch

    import optdnn

    torch.set_num_threads(1)
    model, feeds = model_of(network, batch, shared, Path(stem).parent)
    options: dict[str, Any] = {"target": "cuda:sm_90a", "precision": precision, "tactics": "heuristic"}
    if precision == "int8":
        options["calib"] = calibration(feeds)
    engine = optdnn.build(model, shapes={k: v.shape for k, v in feeds.items()}, **options)
    engine.save(f"{stem}.engine")
    np.savez(f"{stem}.npz", **feeds)


def calibration(feeds: dict[str, Any]) -> dict[str, Any]:
    """A few samples of the inputs' kind."""
    rng = np.random.default_rng(5)
    return {
        k: (v + rng.standard_normal(v.shape).astype(v.dtype) * 0.1).astype(v.dtype) if v.dtype.kind == "f" else v
        for k, v in feeds.items()
    }


# ---------------------------------------------------------------- on the GPU, in a process of its own

BUSY = r"""
extern "C" __global__ void busy(unsigned long long nanoseconds) {
    extern __shared__ int room[];
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - begin < nanoseconds);
    if (now == 0) room[0] = 1;
}
"""


class Neighbour:
    """Another stream's kernels, each of which keeps some multiprocessors to itself for a while."""

    def __init__(self) -> None:
        import cupy

        self.kernel = cupy.RawKernel(BUSY, "busy")
        self.kernel.max_dynamic_shared_size_bytes = self.shared = 200 << 10
        self.stream, self.rng = cupy.cuda.Stream(non_blocking=True), np.random.default_rng()

    def start(self) -> None:
        """Enqueue one."""
        blocks, nanoseconds = int(self.rng.integers(1, 125)), int(self.rng.integers(2_000, 60_000))
        with self.stream:
            self.kernel((blocks,), (128,), (np.uint64(nanoseconds),), shared_mem=self.shared)


def replay(stem: str, replays: int) -> dict[str, Any]:
    """Run an engine ``replays`` times alone and as often beside a neighbour. Each output is compared with the first."""
    import cupy

    import optdnn

    engine = optdnn.load(f"{stem}.engine")
    feeds = {k: cupy.asarray(v) for k, v in np.load(f"{stem}.npz").items()}
    inputs = {s.name: feeds[s.name].astype(s.dtype) for s in engine.inputs}
    bound, stream = engine.context().bind(inputs), cupy.cuda.Stream(non_blocking=True)
    off = cupy.ReductionKernel("T a, T b", "uint64 n", "a != b", "a + b", "n = a", "0", "count_differences")
    found: dict[str, Any] = {"steps": len(engine.program.steps)}
    on_host = any(s.executor != "cuda" for s in engine.program.steps)
    cupy.cuda.Device().synchronize()  # the inputs are there: the stream does not wait for the default one
    with stream:
        first = {k: bits(v).copy() for k, v in bound.run(stream).items()}
        stream.synchronize()
        neighbour = Neighbour()
        for mode in ("alone", "beside"):
            differing, count, begin = cupy.zeros((), cupy.uint64), 0, time.perf_counter()
            while count < replays and not (on_host and time.perf_counter() - begin > ON_HOST_S):
                if mode == "beside":
                    neighbour.start()
                outputs = bound.run(stream)
                count += 1
                for k, v in outputs.items():
                    if isinstance(v, np.ndarray):  # its size depends on data: it came by way of the host
                        differing += int(not np.array_equal(bits(v), first[k]))
                    elif v.size:
                        differing += off(bits(v), first[k])
            stream.synchronize()
            ms = (time.perf_counter() - begin) * 1e3 / count
            found[mode] = {"replays": count, "ms": round(ms, 3), "differing": int(differing)}
    finite = all(np.isfinite(cupy.asnumpy(v).astype(np.float32)).all() for v in outputs.values() if v.dtype.kind == "f")
    return {**found, "finite": bool(finite)}


def bits(array: Any) -> Any:
    """The array's bytes: a NaN equals itself."""
    return array.reshape(-1).view(np.uint8)


def child(*words: str, limit_s: float) -> dict[str, Any]:
    """Run this script in a process of its own for at most ``limit_s``: what it prints last, or a verdict with its reason."""
    try:
        done = subprocess.run(
            [sys.executable, __file__, *words], capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"verdict": "hang", "why": f"no end in {limit_s:g} s"}
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        return {"verdict": "crash", "why": f"exit code {done.returncode}: {said}"[:300]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def row_of(
    network: str, precision: str, batch: int, options: argparse.Namespace, folder: Path, gpu: Any
) -> dict[str, Any]:
    """Build and replay one network. ``gpu`` admits a few processes at a time."""
    row: dict[str, Any] = {"network": network, "precision": precision, "batch": batch}
    stem = str(folder / f"{network.replace('/', '-')}-{precision}")
    shared = [] if options.shared is None else ["--shared", str(options.shared)]
    made = child("--build", network, precision, str(batch), stem, *shared, limit_s=BUILD_LIMIT_S)
    if "verdict" in made:
        return {**row, "verdict": "not built", "why": made["why"]}
    with gpu:
        found = child("--replay", stem, "--replays", str(options.replays), limit_s=LIMIT_S)
    for file in (f"{stem}.engine", f"{stem}.npz"):
        Path(file).unlink(missing_ok=True)
    if "verdict" not in found:
        differs = found["alone"]["differing"] or found["beside"]["differing"]
        found = {"verdict": "differs" if differs else "ok", **found}
    return {**row, **found}


# ---------------------------------------------------------------- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("soak.jsonl"))
    parser.add_argument("--shared", type=Path)
    parser.add_argument("--only", default="", help="parts of names, with commas")
    parser.add_argument("--precisions", default="fp16,int8,fp32")
    parser.add_argument("--replays", type=int, default=REPLAYS)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after this")
    parser.add_argument("--build", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--replay", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replay:
        print(json.dumps(replay(options.replay, options.replays)))
        return
    if options.build:
        network, precision, batch, stem = options.build
        build(network, precision, int(batch), options.shared, stem)
        print("{}")
        return
    begin = time.time()
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.is_file() else []
    finished = {(r["network"], r["precision"]) for r in done}
    jobs = []
    for precision in options.precisions.split(","):
        turn = BATCHES[precision]
        for k, network in enumerate(names(options.shared)):
            batch = 1 if any(part in network for part in DETECTORS) else turn[k % len(turn)]
            if any(part in network for part in options.only.split(",")) and (network, precision) not in finished:
                jobs.append((network, precision, batch))
    rows = run_all(jobs, options, begin)
    counts: dict[str, int] = {}
    for row in (*done, *rows):
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
    print(f"{len(done) + len(rows)} of {len(done) + len(jobs)} networks and precisions: {counts}")


def run_all(jobs: list[tuple[str, str, int]], options: argparse.Namespace, begin: float) -> list[dict[str, Any]]:
    """Build in many processes, replay in a few."""
    rows: list[dict[str, Any]] = []
    gpu = threading.Semaphore(PROCESSES)

    def one(job: tuple[str, str, int]) -> dict[str, Any] | None:
        late = time.time() > begin + options.seconds
        return None if late else row_of(*job, options, Path(scratch), gpu)

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        for future in as_completed([pool.submit(one, job) for job in jobs]):
            row = future.result()
            if row is None:
                continue
            rows.append(row)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{time.time() - begin:6.1f} s {row}", flush=True)
    return rows


if __name__ == "__main__":
    main()
