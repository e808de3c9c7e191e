"""PyTorch's tensor parallel of :mod:`benchmarks.ranks`: torch.distributed and torch.compile, a process for each GPU."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.nn import functional

TOKENS = 200
"""Tokens that are timed."""


def reduced(x: Tensor) -> Tensor:
    """The sum over the ranks, as an operator that torch.compile keeps in its graph."""
    if dist.get_world_size() == 1:
        return x
    return collectives.wait_tensor(collectives.all_reduce(x, "sum", dist.group.WORLD))


def linear(depth: int, columns: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(depth, columns, bias=bias, device="cuda", dtype=torch.float16)


class BertLayer(nn.Module):
    """A rank's part of a layer of BERT-large."""

    def __init__(self, world: int):
        super().__init__()
        self.heads = 16 // world
        self.qkv, self.out = linear(1024, 3072 // world, True), linear(1024 // world, 1024)
        self.up, self.down = linear(1024, 4096 // world, True), linear(4096 // world, 1024)
        self.norms = nn.ModuleList([nn.LayerNorm(1024, device="cuda", dtype=torch.float16) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, self.heads, 64).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, -1)
        x = self.norms[0](x + reduced(self.out(y)))
        return self.norms[1](x + reduced(self.down(functional.gelu(self.up(x)))))


class LlamaLayer(nn.Module):
    """A rank's part of a layer of Llama 3 8B, for one token over a cache with 1024 filled positions."""

    def __init__(self, world: int):
        super().__init__()
        self.heads, self.groups = 32 // world, 8 // world
        self.qkv, self.out = linear(4096, (self.heads + 2 * self.groups) * 128), linear(self.heads * 128, 4096)
        self.gates, self.down = linear(4096, 2 * 14336 // world), linear(14336 // world, 4096)
        self.norms = nn.ModuleList([nn.RMSNorm(4096, device="cuda", dtype=torch.float16) for _ in range(2)])
        shape = (2, 1, self.groups, 4096, 128)
        self.cache = nn.Buffer(torch.randn(shape, device="cuda", dtype=torch.float16))
        self.turns = nn.Buffer(torch.randn(2, 1, 1, 1, 128, device="cuda", dtype=torch.float16))

    def turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.turns[0] + torch.cat((-b, a), -1) * self.turns[1]

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.heads * 128, self.groups * 128, self.groups * 128]
        q, k, v = (t.view(1, 1, -1, 128).transpose(1, 2) for t in self.qkv(self.norms[0](x)).split(parts, -1))
        self.cache[0, :, :, 1024:1025] = self.turned(k)
        self.cache[1, :, :, 1024:1025] = v
        keys, values = (c[:, :, :1025] for c in self.cache)
        y = functional.scaled_dot_product_attention(self.turned(q), keys, values, enable_gqa=True)
        x = x + reduced(self.out(y.transpose(1, 2).reshape(1, 1, -1)))
        gate, up = self.gates(self.norms[1](x)).chunk(2, -1)
        return x + reduced(self.down(functional.silu(gate) * up))


class Head(nn.Module):
    """The last norm, and a rank's columns of the head."""

    def __init__(self, world: int, vocabulary: int):
        super().__init__()
        self.norm, self.head = nn.RMSNorm(4096, device="cuda", dtype=torch.float16), linear(4096, vocabulary // world)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.norm(x))
        if dist.get_world_size() == 1:
            return y
        return collectives.wait_tensor(collectives.all_gather_tensor(y.flatten(), 0, dist.group.WORLD))


class Decoder(nn.Module):
    """A model from a token to the next token."""

    def __init__(self, world: int, layers: int, vocabulary: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 4096, device="cuda", dtype=torch.float16)
        self.layers, self.head = nn.Sequential(*(LlamaLayer(world) for _ in range(layers))), Head(world, vocabulary)

    def forward(self, token: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(token))).argmax().view(1, 1)


def captured(model: nn.Module, x: Tensor, *, feed_back: bool) -> torch.cuda.CUDAGraph:
    """A graph of the compiled model; ``feed_back``: its result is the next input."""
    compiled = torch.compile(model)

    def run() -> None:
        y = compiled(x)
        if feed_back:
            x.copy_(y)

    for _ in range(5):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events meanwhile
        run()
    return graph


def gpu_ms(graph: torch.cuda.CUDAGraph) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(120)]
    for _ in range(10):
        graph.replay()
    dist.barrier()
    for k in range(60):
        events[2 * k].record()
        graph.replay()
        events[2 * k + 1].record()
    torch.cuda.synchronize()
    return statistics.median(events[2 * k].elapsed_time(events[2 * k + 1]) for k in range(60))


def wall_ms(graph: torch.cuda.CUDAGraph, token: Tensor) -> float:
    """Milliseconds of a token by the wall clock, each read by the host."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(TOKENS):
        graph.replay()
        token.item()
    return 1000 * (time.perf_counter() - start) / TOKENS


def main() -> None:
    network, vocabulary, *layers = sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    world, rows = dist.get_world_size(), []
    with torch.inference_mode():
        for count in layers:
            torch._dynamo.reset()
            row: dict[str, Any] = {"name": f"torch {network}:{count}", "devices": world}
            if network == "bert":
                model: nn.Module = nn.Sequential(*(BertLayer(world) for _ in range(count)))
                x = torch.randn(32, 384, 1024, device="cuda", dtype=torch.float16)
                row["ms"] = round(gpu_ms(captured(model, x, feed_back=False)), 4)
            else:
                token = torch.ones(1, 1, device="cuda", dtype=torch.int64)
                graph = captured(Decoder(world, count, vocabulary), token, feed_back=True)
                row |= {"ms": round(gpu_ms(graph), 4), "decode_ms": round(wall_ms(graph, token), 4)}
            rows.append(row)
    if network == "llama" and len(rows) == 2:
        made: dict[str, Any] = {"name": "torch llama, 32 layers", "devices": world}
        for name in ("ms", "decode_ms"):
            layer = (rows[1][name] - rows[0][name]) / (layers[1] - layers[0])
            made[f"layers_32_{name}"] = round(rows[0][name] + (32 - layers[0]) * layer, 3)
        rows.append(made | {"layers_32_tokens_per_s": round(1000 / made["layers_32_decode_ms"], 1)})
    if dist.get_rank() == 0:
        for row in rows:
            print(json.dumps(row), flush=True)
    dist.barrier()
    os._exit(0)  # closing the group would wait for all graphs with its calls, and torch.compile keeps some of these


if __name__ == "__main__":
    main()
