"""What cuBLASLt and cuDNN do with our calls on this machine: right results, how many algorithms, microseconds of each.

python benchmarks/gpu/probe_libraries.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from optdnn.runtime.cuda import cublaslt, cudnn
from optdnn.runtime.cuda.calls import Attention, Convolution, MatMul, Norm, Operation
from optdnn.runtime.cuda.device import Device
from optdnn.runtime.cuda.graphs import Graph, Stream, median_ms


def tried(stream: Stream, prepared: Any, tensors: Mapping[str, torch.Tensor], out: str, want: torch.Tensor) -> str:
    """Run alone, then captured; its error and its time."""
    scratch = torch.empty(max(prepared.workspace, 1), dtype=torch.uint8, device="cuda")
    bound = prepared.bind({k: t.data_ptr() for k, t in tensors.items()}, scratch.data_ptr())
    torch.cuda.synchronize()
    tensors[out].fill_(float("nan"))
    torch.cuda.synchronize()
    bound.enqueue(stream.handle)
    stream.synchronize()
    got = tensors[out].float()
    error = float((got - want.float()).abs().max() / want.abs().max())
    tensors[out].fill_(float("nan"))
    torch.cuda.synchronize()
    graph = Graph([bound] * 20, stream)
    us = median_ms(graph, stream, repeats=20) / 20 * 1e3
    again = float((tensors[out].float() - want.float()).abs().max() / want.abs().max())
    return f"error {error:.1e}, captured {again:.1e}, {us:.2f} us, scratch {prepared.workspace}, of {prepared.ranked}"


def show(
    name: str, stream: Stream, handle: Any, call: Operation, tensors: Mapping[str, torch.Tensor], want: torch.Tensor
) -> None:
    """One line about a call; the result is the operand that is written."""
    start = time.perf_counter()
    used = {k: v for k, v in tensors.items() if k in call.extents}
    out = next(k for k in ("d", "y", "out") if k in used)
    try:
        found = tried(stream, handle.prepare(call), used, out, want)
        print(f"{name}: {found}; {time.perf_counter() - start:.2f} s", flush=True)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}"[:500], flush=True)


def attentions(stream: Stream, dnn: Any, rand: Any) -> None:
    """Fused attention, with masks in several forms."""
    functional = torch.nn.functional
    for b, heads, rows, size, masked in ((1, 12, 128, 64, "row"), (1, 12, 128, 64, "stride 0"), (1, 12, 128, 64, "dense"),
                                         (32, 12, 128, 64, "dense"), (32, 12, 197, 64, ""), (1, 12, 197, 64, "")):  # fmt: skip
        # As the layers give them: in [batch, position, head, feature] order.
        t = [rand(b, rows, heads, size).transpose(1, 2) for _ in range(4)]
        mask = {
            "": None,
            "row": rand(b, 1, 1, rows),
            "stride 0": rand(b, 1, 1, rows).expand(b, 1, rows, rows),
            "dense": rand(b, 1, 1, rows).expand(b, 1, rows, rows).contiguous(),
        }[masked]
        wide = None if mask is None else mask.float()
        want = functional.scaled_dot_product_attention(*(x.float() for x in t[:3]), attn_mask=wide)
        attention = Attention("float16", tuple(t[0].shape), tuple(t[1].shape), *(x.stride() for x in t), size**-0.5)
        tensors = dict(zip(("q", "k", "v", "out"), t, strict=True))
        if mask is not None:
            attention = replace(attention, mask_shape=tuple(mask.shape), mask_strides=mask.stride())
            tensors["mask"] = mask
        show(f"attention {b}x{heads}x{rows}x{size} {masked}", stream, dnn, attention, tensors, want)


def depthwise(stream: Stream, dnn: Any, rand: Any) -> None:
    """Depthwise convolutions, plain and with an epilogue."""
    for n, c, h, s in ((1, 96, 112, 2), (128, 144, 56, 1)):
        last = torch.channels_last
        x, w = rand(n, c, h, h).to(memory_format=last), rand(c, 1, 3, 3).to(memory_format=last)
        bias = rand(c)
        want = torch.nn.functional.conv2d(x.float(), w.float(), None, s, 1, 1, c)
        y = want.half().to(memory_format=last)
        call = Convolution(
            "float16", tuple(x.shape), x.stride(), tuple(w.shape), (9, 1, 3, 1), tuple(y.shape), y.stride(), (s, s),
            (1,) * 4, (1, 1),
        )  # fmt: skip
        tensors = {"x": x, "w": w, "y": y, "bias": bias}
        for plan in range(3):
            show(f"depthwise {n}x{c}x{h} #{plan}", stream, dnn, replace(call, plan=plan), tensors, want)
        fused = (want + bias[None, :, None, None]).relu()
        show(f"depthwise {n}x{c}x{h} bias+relu", stream, dnn, replace(call, stages=("bias", "relu")), tensors, fused)


def norms(stream: Stream, dnn: Any, rand: Any) -> None:
    """Layer norms of BERT and ViT, and a root-mean-square norm."""
    functional = torch.nn.functional
    for rows, size, kind in ((128, 768, "layer"), (6304, 768, "layer"), (4096, 1024, "rms")):
        x, scale, bias = rand(rows, size), rand(size).float(), rand(size).float()
        want = functional.layer_norm(x.float(), (size,), scale, bias, 1e-5) if kind == "layer" else (
            functional.rms_norm(x.float(), (size,), scale, 1e-5))  # fmt: skip
        tensors = {"x": x, "scale": scale, "bias": bias, "y": torch.empty_like(x)}
        show(f"{kind} norm {rows}x{size}", stream, dnn, Norm("float16", kind, rows, size, 1e-5), tensors, want)


def main() -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device="cuda")
    Device.open()
    stream = Stream()

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float16)

    if "attention" in sys.argv[1:]:
        handle = cudnn.Handle()
        attentions(stream, handle, rand)
        norms(stream, handle, rand)
        depthwise(stream, handle, rand)
        return
    lt = cublaslt.Handle()
    print("cublasLt", lt.version)
    functional = torch.nn.functional
    for m, n, k in ((128, 768, 768), (4096, 3072, 768), (1, 1000, 2048)):
        a, b, c, bias, d = rand(m, k), rand(n, k) * k**-0.5, rand(m, n), rand(n), rand(m, n)
        tensors = {"a": a, "b": b, "c": c, "bias": bias, "d": d}
        plain = MatMul("float16", m, n, k, k, k, n)
        want = a.float() @ b.float().T
        show(f"matmul {m} {n} {k}", stream, lt, plain, tensors, want)
        full = replace(plain, bias=True, ldc=n, activation="relu")
        for algorithm in range(3):
            chosen = replace(full, algorithm=algorithm)
            show(f"  bias add relu #{algorithm}", stream, lt, chosen, tensors, (want + bias + c).relu())
        gelu = replace(plain, bias=True, activation="gelu_tanh")
        show("  bias gelu", stream, lt, gelu, tensors, functional.gelu(want + bias, approximate="tanh"))
        turned = {**tensors, "b": b.T.contiguous()}
        show("  [k, n]", stream, lt, replace(plain, transposed=False, ldb=n), turned, want)
    q, kt, p = rand(12, 128, 64), rand(12, 128, 64), rand(12, 128, 128)
    batched = MatMul("float16", 128, 128, 64, 64, 64, 128, batch=12, strides=(8192, 8192, 0, 16384))
    show("batched", stream, lt, batched, {"a": q, "b": kt, "d": p}, q.float() @ kt.float().mT)

    dnn = cudnn.Handle()
    print("cudnn", dnn.version)
    sizes = (
        (1, 64, 56, 64, 3, 1, 1),
        (1, 2048, 7, 512, 1, 1, 0),
        (128, 256, 14, 256, 3, 1, 1),
        (8, 3, 224, 64, 7, 2, 3),
    )
    for n, c, h, k, r, s, pad in sizes:
        last = torch.channels_last
        x, w = rand(n, c, h, h).to(memory_format=last), (rand(k, c, r, r) * (c * r * r) ** -0.5).to(memory_format=last)
        bias = rand(k)
        want = functional.conv2d(x.float(), w.float(), None, s, pad)
        y, z = want.half().to(memory_format=last), torch.randn_like(want).half().to(memory_format=last)
        base = Convolution(
            "float16", tuple(x.shape), x.stride(), tuple(w.shape), w.stride(), tuple(y.shape), y.stride(), (s, s),
            (pad,) * 4, (1, 1),
        )  # fmt: skip
        tensors = {"x": x, "w": w, "y": y, "bias": bias, "z": z}
        for stages in (("bias", "relu"), ("bias", "add", "relu"), ("bias", "swish")):
            call = replace(base, stages=stages, z_strides=z.stride() if "add" in stages else ())
            value = want + bias[None, :, None, None] + (z if "add" in stages else 0)
            last_stage = {"relu": functional.relu, "swish": functional.silu}[stages[-1]]
            for plan in range(2):
                name = f"conv {n}x{c}x{h} k{k} r{r} {'+'.join(stages)} #{plan}"
                show(name, stream, dnn, replace(call, plan=plan), tensors, last_stage(value))
    attentions(stream, dnn, rand)


if __name__ == "__main__":
    main()
