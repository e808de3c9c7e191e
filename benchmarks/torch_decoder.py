"""The benchmark's decoders in PyTorch, written as in gpt-fast: caches of a fixed length in place, one compiled function per token.

Weights are those of the ONNX model. Products of 4 bits call PyTorch's own kernel for them, which takes bf16; otherwise all is
fp16. The caches end soon after the position that is decoded: PyTorch's attention reads them whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional

from benchmarks.decoders import BLOCK, Decoder
from optdnn.types import Array

ROUNDED = 128
"""The caches' length is a multiple of this."""


class Linear4(nn.Module):
    """A product with weights of 4 bits in blocks of 128, without zero points.

    ``packed``: [columns, depth // 128, 64] uint8 as MatMulNBits has it, ``scales``: [columns, depth // 128].
    """

    def __init__(self, packed: Array, scales: Array, device: str):
        super().__init__()
        low_first = torch.from_numpy(packed.reshape(len(packed), -1)).to(device)
        swapped = (low_first << 4) | (low_first >> 4)  # this kernel wants the first number in the high bits
        self.weight = torch.ops.aten._convert_weight_to_int4pack(swapped, 8)
        scale = _placed(scales, torch.bfloat16, device).T
        self.scales = torch.stack([scale, torch.zeros_like(scale)], dim=-1).contiguous()
        self.columns = len(packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.ops.aten._weight_int4pack_mm(x.reshape(-1, x.shape[-1]), self.weight, BLOCK, self.scales)
        return rows.reshape(*x.shape[:-1], self.columns)


class Layer(nn.Module):
    """Attention over a cache, and a gated MLP."""

    def __init__(
        self,
        decoder: Decoder,
        number: int,
        tensors: Mapping[str, Array],
        caches: Mapping[str, torch.Tensor],
        device: str,
    ):
        super().__init__()
        self.decoder = decoder
        self.qkv = linear(tensors, device, *(f"{n}.{number}" for n in "qkv"))
        self.o, self.down = (linear(tensors, device, f"{n}.{number}") for n in ("o", "down"))
        self.gate, self.up = (linear(tensors, device, f"{n}.{number}") for n in ("gate", "up"))
        self.keys, self.values = (caches[f"{n}.{number}.past"] for n in ("key", "value"))

    def forward(
        self, x: torch.Tensor, at: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor
    ) -> torch.Tensor:
        d = self.decoder
        sizes = [n * d.size for n in (d.heads, d.groups, d.groups)]
        parts = self.qkv(normalized(x)).split(sizes, dim=-1)
        q, k, v = (p.view(d.batch, 1, -1, d.size).transpose(1, 2) for p in parts)
        q, k = turned(q, angles), turned(k, angles)
        self.keys[:, :, at] = k
        self.values[:, :, at] = v
        keys, values = (c.repeat_interleave(d.heads // d.groups, dim=1) for c in (self.keys, self.values))
        y = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + self.o(y.transpose(1, 2).reshape(d.batch, 1, -1))
        y = normalized(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """``token`` [batch, 1] and ``at`` [1] -> logits [batch, 1, vocabulary]. All sequences are at one position."""

    def __init__(self, decoder: Decoder, model: onnx.ModelProto, feeds: Mapping[str, Array], device: str = "cuda"):
        super().__init__()
        tensors = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        dtype = torch.float16 if decoder.bits == 16 else torch.bfloat16
        length = min(decoder.capacity, -(-(decoder.position + 1) // ROUNDED) * ROUNDED)
        caches = {n: _placed(a[:, :, :length], dtype, device) for n, a in feeds.items() if n.endswith(".past")}
        self.layers = nn.ModuleList(Layer(decoder, i, tensors, caches, device) for i in range(decoder.layers))
        self.embedding, self.head = _placed(tensors["embedding"], dtype, device), linear(tensors, device, "head")
        self.cos, self.sin = (_placed(tensors[n], dtype, device) for n in ("cos", "sin"))
        self.visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()

    def forward(self, token: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x, mask = self.embedding[token], self.visible[None, None, at]
        for layer in self.layers:
            x = layer(x, at, (self.cos[at], self.sin[at]), mask)
        return self.head(normalized(x))


def linear(tensors: Mapping[str, Array], device: str, *names: str) -> nn.Module:
    """One product for the nodes of these names."""
    weights = [tensors[f"{n}.weight"] for n in names]
    if weights[0].dtype == np.uint8:
        return Linear4(np.concatenate(weights), np.concatenate([tensors[f"{n}.scale"] for n in names]), device)
    made = nn.Linear(1, 1, bias=False)
    made.weight = nn.Parameter(_placed(np.concatenate(weights, axis=1).T, torch.float16, device), requires_grad=False)
    return made


def normalized(x: torch.Tensor) -> torch.Tensor:
    """RMS norm with a scale of ones, in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def turned(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary positions: the first half of the features with the second."""
    (cos, sin), (a, b) = angles, x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def compiled(decoder: Decoder, model: onnx.ModelProto, feeds: Mapping[str, Array]) -> tuple[Any, list[torch.Tensor]]:
    """The compiled function, and its arguments on the GPU."""
    import torch._inductor.config as inductor

    inductor.coordinate_descent_tuning = True  # as gpt-fast does
    run = torch.compile(Model(decoder, model, feeds).eval(), fullgraph=True)
    return run, [torch.from_numpy(feeds["token"]).cuda(), torch.from_numpy(feeds["at"][:1]).cuda()]


def _placed(array: Array, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.tensor(array, device=device).to(dtype)  # a copy: several caches begin as one array
