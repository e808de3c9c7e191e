"""Inputs, float64 references and PyTorch's own way for each of ops_cases.py's problems, on the GPU."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ops_cases import SILU, module_of

from optdnn.runtime.cuda import attention, depthwise, describe, graphs, group_norm, nvrtc, rnn, rows
from optdnn.runtime.cuda.device import Device, Function, Launch


class Bench:
    """The device, a stream, kernels loaded so far, and random tensors."""

    def __init__(self, cache: Path | None):
        import torch

        self.torch = torch
        torch.zeros(1, device="cuda")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self.device = Device.open(0)
        self.stream = graphs.Stream()
        self.cache = nvrtc.KernelCache(cache)
        self.functions: dict[tuple[str, str, int], Function] = {}
        self.generator = torch.Generator(device="cuda").manual_seed(int.from_bytes(os.urandom(4)))
        self.keep: list[Any] = []

    def dtype(self, name: str) -> Any:
        return {"float16": self.torch.float16, "bfloat16": self.torch.bfloat16, "float32": self.torch.float32}[name]

    def random(self, *shape: int, dtype: str = "float16", scale: float = 1.0) -> Any:
        return (self.torch.randn(shape, generator=self.generator, device="cuda") * scale).to(self.dtype(dtype))

    def poisoned(self, *shape: int, dtype: str = "float16") -> Any:
        """NaN, with 8 KB of NaN behind it, which :meth:`intact` looks at."""
        count = int(np.prod(shape))
        whole = self.torch.full((count + 4096,), float("nan"), dtype=self.dtype(dtype), device="cuda")
        self.keep.append(whole)
        return whole[:count].view(shape)

    def intact(self) -> bool:
        return all(bool(whole[-4096:].isnan().all()) for whole in self.keep)

    def launch(self, recipe: nvrtc.Recipe, made: describe.Description, tensors: dict[str, Any]) -> Launch:
        key = (recipe.key(), made.entry, made.shared)
        if key not in self.functions:
            self.functions[key] = describe.load(recipe, made, self.cache)
        return describe.bind(made, self.functions[key], {name: t.data_ptr() for name, t in tensors.items()})

    def run(self, launches: list[Launch]) -> None:
        self.torch.cuda.synchronize()
        for launch in launches:
            launch.enqueue(self.stream.handle)
        self.stream.synchronize()

    def time(self, launches: list[Launch], estimate: float) -> float:
        """Microseconds of one pass, replayed back to back in a graph."""
        count = 40 if estimate < 8e-6 else 12 if estimate < 5e-5 else 3
        graph = graphs.Graph(launches * count, self.stream)
        times = graphs.time_runs(lambda: graph.replay(self.stream), self.stream, warmup=2, repeats=9)
        graph.close()
        return statistics.median(times) / count * 1e3

    def time_torch(self, run: Callable[[], Any], estimate: float) -> float:
        """The same of PyTorch operators, captured."""
        torch = self.torch
        count = 40 if estimate < 8e-6 else 12 if estimate < 5e-5 else 3
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(3):
                run()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(count):
                    run()
            times = []
            for _ in range(11):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                graph.replay()
                end.record()
                times.append((begin, end))
            stream.synchronize()
        return statistics.median(b.elapsed_time(e) for b, e in times[2:]) / count * 1e3


# A family's case: (named tensors, its outputs, the reference in float64, PyTorch's own way to do it).
Case = tuple[dict[str, Any], list[str], Callable[[], dict[str, Any]], Callable[[], Any]]


def depthwise_case(bench: Bench, p: depthwise.Problem, config: Any) -> Case:
    torch, s = bench.torch, p.source
    out_h, out_w = p.out_size
    weight = bench.random(p.channels, 1, *s.kernel, dtype=p.dtype, scale=0.3)
    tensors = {
        "input": bench.random(p.batch, s.height, s.width, p.channels, dtype=p.dtype),
        "weights": weight.reshape(p.channels, -1).t().contiguous(),
        "bias": bench.random(p.channels, dtype="float32"),
        "output": bench.poisoned(p.batch, out_h, out_w, p.channels, dtype=p.dtype),
    }
    if p.residual:
        tensors["residual"] = bench.random(p.batch, out_h, out_w, p.channels, dtype=p.dtype)
    if p.squeeze:
        tensors["means"] = bench.poisoned(p.batch, p.channels, dtype=p.dtype)
        _, x, y = module_of("depthwise", config).tiles(p, config)
        tensors["sums"] = bench.poisoned(p.batch, x * y, p.channels, dtype="float32")
    names = ["output", "means"] if p.squeeze else ["output"]

    def reference() -> dict[str, Any]:
        top, left, bottom, right = s.padding
        x = torch.nn.functional.pad(tensors["input"].double().permute(0, 3, 1, 2), (left, right, top, bottom))
        y = torch.nn.functional.conv2d(x, weight.double(), None, s.stride, 0, s.dilation, p.channels).permute(
            0, 2, 3, 1
        )
        for name, *values in p.epilogue:
            if name == "bias":
                y = y + tensors["bias"].double()
            elif name == "add":
                y = y + tensors["residual"].double()
            else:
                y = {"silu": torch.nn.functional.silu, "clip": lambda v, *a: v.clamp(*a)}[str(name)](y, *values)
        return {"output": y, "means": y.mean((1, 2))}

    x = tensors["input"].permute(0, 3, 1, 2)
    bias = tensors["bias"].to(bench.dtype(p.dtype))
    wide = weight.contiguous(memory_format=torch.channels_last)
    act = torch.nn.functional.silu if p.epilogue == SILU else torch.nn.functional.relu6

    def own() -> Any:
        return act(
            torch.nn.functional.conv2d(x, wide, bias, s.stride, s.padding[:2], s.dilation, p.channels), inplace=True
        )

    return tensors, names, reference, own


def rows_case(bench: Bench, p: rows.Problem, config: rows.Config) -> Case:
    torch = bench.torch
    tensors = {"input": bench.random(p.rows, p.length, dtype=p.dtype, scale=2.0) + 1.5}
    tensors["output"] = bench.poisoned(p.rows, p.length, dtype=p.dtype)
    if p.add:
        tensors["addend"] = bench.random(p.rows, p.length, dtype=p.dtype)
    if p.sum:
        tensors["sum"] = bench.poisoned(p.rows, p.length, dtype=p.dtype)
    tensors["scale"], tensors["bias"] = bench.random(p.length, dtype="float32"), bench.random(p.length, dtype="float32")

    def reference() -> dict[str, Any]:
        x = tensors["input"].double()
        if p.add:
            x = x + tensors["addend"].double()
        total = x
        if "softmax" in p.operation:
            y = torch.softmax(x * p.factor, 1) if p.operation == "softmax" else torch.log_softmax(x * p.factor, 1)
        else:
            centred = x - x.mean(1, keepdim=True) if p.operation == "layer_norm" else x
            y = centred / (centred.square().mean(1, keepdim=True) + p.epsilon).sqrt()
            y = y * tensors["scale"].double() if p.scale else y
            y = y + tensors["bias"].double() if p.bias else y
        return {"output": y, "sum": total}

    scale, bias = tensors["scale"].half(), tensors["bias"].half()

    def own() -> Any:
        x = tensors["input"] + tensors["addend"] if p.add else tensors["input"]
        if p.operation == "softmax":
            return torch.softmax(x, 1)
        return torch.nn.functional.layer_norm(x, (p.length,), scale, bias, p.epsilon)

    return tensors, ["output", "sum"] if p.sum else ["output"], reference, own


def group_norm_case(bench: Bench, p: group_norm.Problem, config: group_norm.Config) -> Case:
    torch = bench.torch
    tensors = {"input": bench.random(p.batch, p.pixels, p.channels, dtype=p.dtype, scale=2.0) + 1.5}
    tensors["output"] = bench.poisoned(p.batch, p.pixels, p.channels, dtype=p.dtype)
    tensors["scale"], tensors["bias"] = (
        bench.random(p.channels, dtype="float32"),
        bench.random(p.channels, dtype="float32"),
    )
    act = {(): lambda y: y, (("silu",),): torch.nn.functional.silu, (("relu",),): torch.relu}[p.epilogue]

    def reference() -> dict[str, Any]:
        x = tensors["input"].double().transpose(1, 2)
        y = torch.nn.functional.group_norm(x, p.groups, tensors["scale"].double(), tensors["bias"].double(), p.epsilon)
        return {"output": act(y).transpose(1, 2)}

    x, scale, bias = tensors["input"].transpose(1, 2), tensors["scale"].half(), tensors["bias"].half()

    def own() -> Any:
        return act(torch.nn.functional.group_norm(x, p.groups, scale, bias, p.epsilon))

    return tensors, ["output"], reference, own


def attention_case(bench: Bench, p: attention.Problem, config: Any) -> Case:
    torch = bench.torch
    key_heads = p.key_heads or p.heads
    joint = p.k.offset > 0
    if joint:
        buffer = bench.random(p.batch, p.queries, 3, p.heads, p.features, dtype=p.dtype)
        tensors = {"q": buffer, "k": buffer, "v": buffer}
    else:
        tensors = {"q": bench.random(p.batch, p.heads, p.queries, p.features, dtype=p.dtype)}
        for name in "kv":
            tensors[name] = bench.random(p.batch, key_heads, p.keys, p.features, dtype=p.dtype)
    tensors["out"] = bench.poisoned(p.batch, p.queries, p.heads, p.features, dtype=p.dtype)
    if p.mask is not None:
        sizes = [n if stride else 1 for n, stride in zip((p.batch, p.heads, p.queries), p.mask, strict=True)]
        mask = bench.random(*sizes, p.keys, dtype=p.dtype)
        mask = mask.masked_fill(torch.rand(mask.shape, generator=bench.generator, device="cuda") < 0.3, float("-inf"))
        mask[..., 0] = 0.5  # no row without a key
        tensors["mask"] = mask.contiguous()
    if p.lengths:
        tensors["lengths"] = torch.randint(
            1, p.keys, (p.batch,), dtype=torch.int32, generator=bench.generator, device="cuda"
        )

    def logical(name: str, view: attention.View, heads: int, positions: int) -> Any:
        shape, strides = (p.batch, heads, positions, p.features), (view.batch, view.head, view.position, 1)
        return torch.as_strided(tensors[name], shape, strides, view.offset)

    q, k = logical("q", p.q, p.heads, p.queries), logical("k", p.k, key_heads, p.keys)
    v = logical("v", p.v, key_heads, p.keys)

    def reference() -> dict[str, Any]:
        group = p.heads // key_heads
        scores = q.double() @ k.double().repeat_interleave(group, 1).transpose(-1, -2) * p.scale
        if p.mask is not None:
            scores = scores + tensors["mask"].double()
        columns = torch.arange(p.keys, device="cuda")
        if p.causal:
            seen = columns[None] <= torch.arange(p.queries, device="cuda")[:, None] + p.causal_offset
            scores = scores.masked_fill(~seen, float("-inf"))
        if p.lengths:
            scores = scores.masked_fill(columns >= tensors["lengths"][:, None, None, None], float("-inf"))
        return {"out": (scores.softmax(-1) @ v.double().repeat_interleave(group, 1)).transpose(1, 2)}

    def own() -> Any:
        mask = tensors.get("mask")
        if mask is not None:
            mask = mask.expand(p.batch, p.heads, p.queries, p.keys)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=p.causal, scale=p.scale)

    return tensors, ["out"], reference, own


def rnn_case(bench: Bench, p: rnn.Problem, config: rnn.Config) -> Case:
    torch = bench.torch
    gates, scale = (4 if p.cell == "lstm" else 3), p.hidden**-0.5
    ws = [
        bench.random(gates * p.hidden, p.hidden if i else p.inputs, dtype=p.dtype, scale=scale) for i in range(p.layers)
    ]
    rs = [bench.random(gates * p.hidden, p.hidden, dtype=p.dtype, scale=scale) for _ in range(p.layers)]
    wb, rb = ([bench.random(gates * p.hidden, dtype="float32", scale=0.3) for _ in range(p.layers)] for _ in range(2))

    def host(values: list[Any]) -> list[Any]:
        return [value.float().cpu().numpy() for value in values]

    sizes = rnn.workspace(p, config)
    packed = torch.from_numpy(rnn.pack_weights(p, host(ws), host(rs))).to("cuda", bench.dtype(p.dtype))
    tensors = {
        "input": bench.random(p.steps, p.batch, p.inputs, dtype=p.dtype), "weights": packed,
        "bias": torch.from_numpy(rnn.pack_bias(p, host(wb), host(rb))).cuda(),
        "output": bench.poisoned(p.steps, p.batch, p.hidden, dtype=p.dtype),
        "final_h": bench.poisoned(p.layers, p.batch, p.hidden, dtype=p.dtype),
        "hidden": bench.poisoned(sizes["hidden"] // 2, dtype=p.dtype),
        "gates": bench.poisoned(sizes["gates"] // 4, dtype="float32"),
        "progress": torch.full((sizes["progress"] // 4,), 12345, dtype=torch.int32, device="cuda"),
    }  # fmt: skip
    if p.cell == "lstm":
        tensors["final_c"] = bench.poisoned(p.layers, p.batch, p.hidden, dtype=p.dtype)
    if p.initial:
        for name in ("initial_h", "initial_c"):
            tensors[name] = bench.random(p.layers, p.batch, p.hidden, dtype=p.dtype, scale=0.5)

    def reference() -> dict[str, Any]:
        x, last_h, last_c = tensors["input"].double(), [], []
        for i in range(p.layers):
            zeros = torch.zeros(p.batch, p.hidden, dtype=torch.float64, device="cuda")
            h = tensors["initial_h"][i].double() if p.initial else zeros
            c = tensors["initial_c"][i].double() if p.initial else zeros
            outputs: list[Any] = [None] * p.steps
            from_x = x @ ws[i].double().t() + wb[i].double()
            for t in reversed(range(p.steps)) if p.reverse else range(p.steps):
                a = from_x[t].chunk(gates, 1)
                b = (h @ rs[i].double().t() + rb[i].double()).chunk(gates, 1)
                if p.cell == "lstm":
                    gi, go, gf = (torch.sigmoid(a[j] + b[j]) for j in range(3))
                    c = gf * c + gi * torch.tanh(a[3] + b[3])
                    h = go * torch.tanh(c)
                else:
                    z, r = torch.sigmoid(a[0] + b[0]), torch.sigmoid(a[1] + b[1])
                    h = (1 - z) * torch.tanh(a[2] + r * b[2]) + z * h
                outputs[t] = h
            x = torch.stack(outputs)
            last_h.append(h)
            last_c.append(c)
        return {"output": x, "final_h": torch.stack(last_h), "final_c": torch.stack(last_c)}

    kind = torch.nn.LSTM if p.cell == "lstm" else torch.nn.GRU
    module = kind(p.inputs, p.hidden, p.layers).cuda().to(bench.dtype(p.dtype)).eval()
    names = ["output", "final_h", "final_c"] if p.cell == "lstm" else ["output", "final_h"]
    return tensors, names, reference, lambda: module(tensors["input"])


CASES: dict[str, Callable[..., Case]] = {
    "depthwise": depthwise_case, "rows": rows_case, "group_norm": group_norm_case,
    "attention": attention_case, "attention_general": attention_case, "rnn": rnn_case,
}  # fmt: skip
