"""From bytes of JPEGs to classes: pictures per second of an engine's own pipeline, and of PyTorch's.

    python -m benchmarks pictures --target cuda --network resnet50 --batch 64 --count 4096

Makes a folder of 500x375 JPEGs. Rows: the engine on pictures that are decoded and prepared already, the same engine on decoded
uint8 pictures (the cost of preprocessing), nvImageCodec alone, the pipeline's decoders without the engine, the pipeline from files
to classes, and torchvision.io.decode_jpeg on the GPU, alone and with a compiled network that prepares its pictures. If a library is
missing, its rows are left out, with a message.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import optdnn
from benchmarks.rows import Row, command_parser, say
from optdnn.errors import MissingDependency
from optdnn.models import zoo

SIZE = (375, 500)
DISTINCT = 64
"""Number of different pictures; the folder's files repeat them."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def main(words: Sequence[str]) -> int:
    """From bytes of JPEGs to classes: pictures per second of the engine, of the decoder alone and of PyTorch."""
    parser = command_parser("pictures", __doc__ or "")
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--network", default="resnet50", help="of the zoo (%(default)s)")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--tactics", default="auto")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--count", type=int, default=4096, help="files in the folder (%(default)s)")
    parser.add_argument("--turns", type=int, default=50, help="timed runs of an engine alone (%(default)s)")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="optdnn-pictures-") as name:
        files = write_jpegs(Path(name), options.count)
        for row in measured(files, options):
            say("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    return 0


def write_jpegs(folder: Path, count: int) -> list[Path]:
    """Files of 500x375 JPEGs in quality 90, about 84 kB each: as detailed photographs have."""
    from PIL import Image

    rng = np.random.default_rng(0)
    blobs = []
    for _ in range(min(count, DISTINCT)):
        coarse = rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize(SIZE[::-1], Image.Resampling.BICUBIC), np.float64)
        pixels = np.clip(smooth + rng.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "jpeg", quality=90)
        blobs.append(buffer.getvalue())
    paths = [folder / f"{k:05d}.jpg" for k in range(count)]
    for k, path in enumerate(paths):
        path.write_bytes(blobs[k % len(blobs)])
    return paths


def measured(files: Sequence[Path], options: argparse.Namespace) -> Iterator[Row]:
    """A row for each configuration."""
    model = zoo.build(options.network, batch=options.batch)
    (port,), (answer,) = model.graph.input, model.graph.output
    common = {"target": options.target, "precision": options.precision, "tactics": options.tactics}
    plain = optdnn.build(model, io_dtype="fp16" if options.precision == "fp16" else "model", **common)
    shapes = {port.name: (options.batch, *SIZE, 3)}
    whole = optdnn.build(
        model, preprocess={port.name: {}}, postprocess={answer.name: "softmax+top-k:5"}, shapes=shapes, **common
    )
    seconds = {name: engine_seconds(engine, options.turns) for name, engine in (("plain", plain), ("whole", whole))}
    yield _row("engine alone, prepared input", options.batch, seconds["plain"])
    cost = 100 * (seconds["whole"] / seconds["plain"] - 1)
    yield {**_row("engine with preprocessing, uint8 pictures", options.batch, seconds["whole"]), "cost_percent": cost}
    ways: dict[str, Callable[[], float]] = {
        "nvImageCodec alone": lambda: codec_seconds(files, options.batch),
        "the pipeline's decoders alone": lambda: decoders_seconds(whole, files),
        "files to classes, decoded on the GPU": lambda: pipeline_seconds(whole, files, "gpu"),
        "files to classes, decoded on the CPU": lambda: pipeline_seconds(whole, files, "cpu"),
        "files to classes, decoded by DALI on the GPU": lambda: dali_seconds(whole, files),
        "torchvision's decoder alone": lambda: torch_seconds(None, files, options.batch),
        "torchvision on the GPU, torch.compile": lambda: torch_seconds(options.network, files, options.batch),
    }
    for name, way in ways.items():
        try:
            yield _row(name, len(files), way())
        except (ImportError, MissingDependency, RuntimeError, optdnn.UsageError) as error:
            yield {"way": name, "missing": str(error).splitlines()[0]}


def _row(way: str, pictures: int, seconds: float) -> Row:
    return {"way": way, "pictures_per_second": pictures / seconds, "ms": 1e3 * seconds}


def engine_seconds(engine: optdnn.Engine, turns: int) -> float:
    """The median time of runs on random arrays in the memory of the engine's device."""
    from optdnn.runtime.contexts.feeds import random_feeds

    feeds: dict[str, Any] = random_feeds(engine.inputs)
    context, wait = engine.context(), lambda: None
    if engine.target.startswith("cuda"):
        import cupy

        feeds = {n: cupy.asarray(a) for n, a in feeds.items()}
        wait = cupy.cuda.Device().synchronize
    bound = context.bind(feeds)
    times = []
    for k in range(turns + 3):
        wait()
        start = time.perf_counter()
        bound.run()
        wait()
        times += [time.perf_counter() - start] if k >= 3 else []
    return float(np.median(times))


def decoders_seconds(engine: optdnn.Engine, files: Sequence[Path]) -> float:
    """Files to pictures on the GPU by the pipeline of an engine that computes nothing."""
    from optdnn.runtime.pictures.on_gpu import GpuPictures
    from optdnn.runtime.pictures.port import PicturePort

    class Nothing:
        takes_device_arrays = True

        def run(self, feeds: object, out: object, stream: object) -> dict[str, Any]:
            return {}

    idle: Any = SimpleNamespace(context=Nothing, program=None)
    pictures, batch = GpuPictures(idle, PicturePort.of(engine)), int(engine.inputs[0].shape[0])
    for part in (files[: 16 * batch], files):  # the first run creates decoders and allocates memory
        start = time.perf_counter()
        assert sum(len(names) for names, _, _ in pictures.runs(part, batch)) == len(part)
    return time.perf_counter() - start


def codec_seconds(files: Sequence[Path], batch: int) -> float:
    """Files to pictures on the GPU by one decoder of nvImageCodec, batch after batch."""
    import cupy
    from nvidia import nvimgcodec

    decoder, stream = nvimgcodec.Decoder(), cupy.cuda.Stream(non_blocking=True)

    def once(part: Sequence[Path]) -> None:
        decoder.decode([nvimgcodec.CodeStream(str(p)) for p in part], cuda_stream=stream.ptr)

    once(files[:batch])
    stream.synchronize()
    start = time.perf_counter()
    for k in range(0, len(files), batch):
        once(files[k : k + batch])
    stream.synchronize()
    return time.perf_counter() - start


def pipeline_seconds(engine: optdnn.Engine, files: Sequence[Path], decoder: str) -> float:
    """Files to classes. The first batches, which create graphs and allocate memory, are not timed."""
    batch = engine.inputs[0].shape[0]
    for _ in optdnn.picture_answers(engine, files[: (16 if decoder == "gpu" else 2) * int(batch)], decoder=decoder):
        pass
    start = time.perf_counter()
    count = sum(1 for _ in optdnn.picture_answers(engine, files, decoder=decoder))
    assert count == len(files)
    return time.perf_counter() - start


def dali_seconds(engine: optdnn.Engine, files: Sequence[Path]) -> float:
    """Files to classes: a pipeline of DALI's decodes on the GPU, and the engine runs on its stream. The second epoch counts."""
    from nvidia.dali import fn, pipeline_def, types

    from optdnn.integrations.dali import DaliBatches

    (port,) = engine.inputs

    @pipeline_def(batch_size=int(port.shape[0]), num_threads=8, device_id=0)  # type: ignore[untyped-decorator]
    def pictures() -> Any:
        data, _ = fn.readers.file(files=[str(f) for f in files], name="files")
        return fn.decoders.image(data, device="mixed", output_type=types.RGB)

    batches, context = DaliBatches(pictures(), [port.name], reader="files"), engine.context()
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        for batch in batches:
            context.run(batch.feeds(engine), stream=batches.stream)
        batches.stream.synchronize()
        seconds = time.perf_counter() - start
    return seconds


def torch_seconds(network: str | None, files: Sequence[Path], batch: int) -> float:
    """torchvision reads files in threads and decodes them on the GPU; one compiled function prepares and classifies them. With no
    network, they are decoded alone."""
    import torch
    from torchvision import models
    from torchvision.io import ImageReadMode, decode_jpeg, read_file
    from torchvision.transforms.v2 import functional as F

    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU")
    net = getattr(models, network or "resnet18")(weights=None).eval().half().cuda()
    net = net.to(memory_format=torch.channels_last)
    mean, std = (torch.tensor(v, device="cuda").view(1, 3, 1, 1) for v in (MEAN, STD))

    def classes(pictures: Any) -> Any:
        x = F.center_crop(F.resize(pictures.float(), [256], antialias=True), [224])
        x = ((x / 255 - mean) / std).half().contiguous(memory_format=torch.channels_last)
        return net(x).softmax(1).topk(5)

    def corner(pictures: Any) -> Any:
        return pictures[:, 0, :2, :2], pictures[:, 0, 0, 0]

    compiled = torch.compile(classes, mode="reduce-overhead") if network else corner

    def run(some: Sequence[Path]) -> None:
        parts = [some[k : k + batch] for k in range(0, len(some) // batch * batch, batch)]
        with torch.inference_mode(), ThreadPoolExecutor(8) as pool:
            ahead = [pool.submit(lambda part: [read_file(str(p)) for p in part], part) for part in parts[:2]]
            for k in range(len(parts)):
                data = ahead.pop(0).result()
                if k + 2 < len(parts):
                    ahead.append(pool.submit(lambda part: [read_file(str(p)) for p in part], parts[k + 2]))
                pictures = torch.stack(decode_jpeg(data, mode=ImageReadMode.RGB, device="cuda"))
                values, places = compiled(pictures)
                values.cpu(), places.cpu()

    run(files[: 6 * batch])
    start = time.perf_counter()
    run(files)
    return (time.perf_counter() - start) * len(files) / (len(files) // batch * batch)
