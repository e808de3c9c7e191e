"""Architectures beyond the target rows: PyTorch modules by way of ``optdnn.from_torch``, beside eager in a CUDA graph.

    python benchmarks/gpu/others.py --out others.json                          # all, batches 1 and 16: five minutes
    python benchmarks/gpu/others.py --out others.json --only swin_t,gpt2 --batches 1 --profile 0

Modules are torchvision's and transformers' own with seeded weights, exported by torch where this runs. Engines are built in
parallel, at fp16, by the cost model (nothing is tuned); each is right first (against the module in fp32, beside what another input
changes), then takes turns with eager. ``slow``: what takes the longest in those that gain little. What fails is a row with its
error.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import nn

import optdnn

PIXELS = {"inception_v3": 299}
"""Sides of pictures that are not 224."""
VISION = (
    "convnext_tiny", "swin_t", "swin_v2_t", "regnet_y_400mf", "regnet_x_800mf", "mnasnet1_0", "shufflenet_v2_x1_0", "maxvit_t",
    "efficientnet_v2_s", "resnext50_32x4d", "inception_v3", "googlenet", "mobilenet_v3_large", "squeezenet1_1", "resnet18",
    "wide_resnet50_2",
)  # fmt: skip
SEGMENTATION = ("deeplabv3_resnet50", "lraspp_mobilenet_v3_large")
VIDEO = ("r3d_18",)
LENGTH = 128
MOST = 8
"""Steps that are told of a network."""


class First(nn.Module):
    """The first output of a module that gives a dictionary, or a tuple."""

    def __init__(self, inner: nn.Module, **fixed: Any):
        super().__init__()
        self.inner, self.fixed = inner, fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.inner(x, **self.fixed)
        return found[0] if isinstance(found, tuple) else next(iter(found.values()))


def _tokens(batch: int, seed: int) -> torch.Tensor:
    return torch.randint(5, 1000, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def _normal(*shape: int) -> Callable[[int, int], torch.Tensor]:
    return lambda batch, seed: torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    return First(GPT2Model(GPT2Config()), use_cache=False)


def _t5() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    return First(T5EncoderModel(T5Config()))


def _distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertModel

    return First(DistilBertModel(DistilBertConfig()))


def _albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertModel

    return First(AlbertModel(AlbertConfig(hidden_size=768, num_attention_heads=12, intermediate_size=3072)))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
    return First(LlamaModel(LlamaConfig(num_key_value_heads=4, vocab_size=8192, **sizes)), use_cache=False)


def _whisper() -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return First(
        WhisperEncoder(WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536))
    )


def _segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    return First(SegformerForSemanticSegmentation(SegformerConfig()))


def _clip() -> nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return First(CLIPVisionModel(CLIPVisionConfig()))


def _wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    return First(Wav2Vec2Model(Wav2Vec2Config(num_hidden_layers=4)))


class Recurrent(nn.Module):
    """Two bidirectional layers and a classifier of every step, on (batch, steps, 256)."""

    def __init__(self, kind: type[nn.RNNBase]):
        super().__init__()
        self.rnn = kind(256, 256, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(512, 80)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0])  # type: ignore[no-any-return]


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], torch.Tensor]]] = {
    "gpt2": (_gpt2, _tokens),
    "t5_encoder": (_t5, _tokens),
    "distilbert": (_distilbert, _tokens),
    "albert": (_albert, _tokens),
    "llama_8x1024": (_llama, _tokens),
    "whisper_tiny_encoder": (_whisper, _normal(80, 3000)),
    "segformer_b0": (_segformer, _normal(3, 512, 512)),
    "clip_vision": (_clip, _normal(3, 224, 224)),
    "wav2vec2_4": (_wav2vec2, _normal(16000)),
    "bi_lstm": (lambda: Recurrent(nn.LSTM), _normal(LENGTH, 256)),
    "bi_gru": (lambda: Recurrent(nn.GRU), _normal(LENGTH, 256)),
    "r3d_18": (lambda: _vision("r3d_18"), _normal(3, 8, 112, 112)),
}


def _vision(name: str) -> nn.Module:
    from torchvision import models

    plain: dict[str, Any] = {"weights": None}
    if name in SEGMENTATION:
        return First(getattr(models.segmentation, name)(**plain, weights_backbone=None))
    if name in VIDEO:
        return getattr(models.video, name)(**plain)  # type: ignore[no-any-return]
    more = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return getattr(models, name)(**plain, **more)  # type: ignore[no-any-return]


def made(name: str, batch: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The module (evaluation mode, fp32, the same in every process), inputs, and others."""
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    if name in OTHERS:
        make, inputs = OTHERS[name]
        module = make()
    else:
        side = PIXELS.get(name, 224)
        module, inputs = _vision(name), _normal(3, side, side)
    x, other = inputs(batch, 1), inputs(batch, 2)
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if norms:  # as training leaves them: signals stay of one size through the depth
        module.eval()
        for part in norms:
            part.momentum, part.training = 1.0, True
        module(inputs(2, 3))
    return module.eval(), x, other


def build(name: str, batch: int, folder: Path, without: str) -> dict[str, Any]:
    """Export and build, in a process of its own, without a GPU."""
    from without import forbidden

    torch.set_num_threads(1)
    module, x, _ = made(name, batch)
    begin = time.perf_counter()
    options = {"target": "cuda:sm_90a", "precision": "fp16", "io_dtype": "fp16", "tactics": "heuristic"}
    engine = optdnn.from_torch(module, x, **options)
    engine.save(folder / f"{name}.{batch}.ours.engine")
    if without:
        with forbidden(without):
            optdnn.from_torch(module, x, **options).save(folder / f"{name}.{batch}.without.engine")
    return {"export_and_build_s": round(time.perf_counter() - begin, 1)}


def measured(name: str, batch: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One row: is it right, and the race."""
    from measure_row import bind, errors, flat, race, torch_graph

    from optdnn.runtime.bench import cuda_context
    from optdnn.runtime.cuda.graphs import Stream
    from optdnn.runtime.cuda.measure import profile_gpu

    module, x, other = made(name, batch)
    module, x, other = module.cuda(), x.cuda(), other.cuda()
    want = flat(module(x))
    moved = errors(flat(module(other)), want)
    stream = Stream()
    half = x.half() if x.is_floating_point() else x
    candidates: dict[str, dict[str, Any]] = {}
    replays = {}
    try:
        replays["eager"], outputs = torch_graph(
            module, [half], torch.cuda.ExternalStream(stream.handle), compiled=False
        )
        candidates["eager"] = {"error_rel": errors(outputs(), want)}
    except Exception as error:
        torch.cuda.synchronize()
        candidates["eager"] = {"error": f"{type(error).__name__}: {error}"[:200]}
    kept = []
    for which in ("ours", "without") if options.without else ("ours",):
        engine = optdnn.load(folder / f"{name}.{batch}.{which}.engine")
        context: Any = engine.context()
        bound, out = bind(engine, context, {engine.inputs[0].name: half})
        bound.run(stream)
        stream.synchronize()
        candidates[which] = {
            "error_rel": errors([*out.values()][: len(want)], want),
            "steps": len(engine.program.steps),
            "on_cpu": sorted({o["kind"] for o in engine.meta.get("host", {}).get("operators", [])}),
        }
        replays[which] = lambda bound=bound: bound.run(stream)
        kept.append((engine, context, out))
    engine, context, _ = kept[0]
    found = {"another_input": moved, "candidates": candidates}
    order = {"flush_l2": False, "rounds": 3, "turn": 0.03}
    found |= race(replays, candidates, stream, torch.cuda.ExternalStream(stream.handle), order)
    if candidates["ours"]["median_ms"] > options.profile * candidates["eager"].get("median_ms", 0.0):
        feeds = {engine.inputs[0].name: half.cpu().numpy()}
        on_gpu = cuda_context(context, feeds)
        if on_gpu is not None:
            shares = sorted(profile_gpu(on_gpu, feeds), key=lambda share: -share.us)[:MOST]
            found["slow"] = [[round(s.us, 1), s.kind, s.tactic, s.src[:1], s.roofline] for s in shares]
    return found


def main() -> None:
    from targets import facts

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("others.json"))
    parser.add_argument("--only", default="", help="parts of names, with commas")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument(
        "--without", default="", metavar="TACTIC", help="also engines that must not use it, in turn with the others"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="measure nothing that is ready after this")
    parser.add_argument(
        "--profile",
        type=float,
        default=0.7,
        metavar="SHARE",
        help="tell the steps of those that take more than this of eager's time",
    )
    parser.add_argument("--no-gpu", action="store_true", help="only export and build")
    options = parser.parse_args()
    begin, about = time.time(), facts()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    names = [n for n in (*VISION, *SEGMENTATION, *OTHERS) if any(part in n for part in options.only.split(","))]
    wanted = [(n, int(b)) for b in options.batches.split(",") for n in names]
    rows: list[dict[str, Any]] = []
    workers = max(1, (os.cpu_count() or 2) * 3 // 4)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(workers, context) as pool:
        folder = Path(scratch)
        futures = {pool.submit(build, *one, folder, options.without): one for one in wanted}
        for future in as_completed(futures):
            name, batch = futures[future]
            row: dict[str, Any] = {"name": f"{name}:{batch}"}
            try:
                row |= future.result()
                if time.time() > begin + options.seconds:
                    row["error"] = "not measured in time"
                elif not options.no_gpu:
                    row |= measured(name, batch, folder, options)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:600]
            for file in folder.glob(f"{name}.{batch}.*.engine"):
                file.unlink()
            rows.append(row)
            found = {
                n: {k: c.get(k) for k in ("median_ms", "error_rel", "error") if c.get(k) is not None}
                for n, c in row.get("candidates", {}).items()
            }
            print(
                f"{time.time() - begin:6.1f} s {name}:{batch} {row.get('export_and_build_s')} {found} {row.get('error', '')}",
                flush=True,
            )
            options.out.write_text(json.dumps({**about, "l2": "warm", "rows": rows}, indent=1) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
