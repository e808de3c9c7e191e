"""Networks of sequences, points, graphs and tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.networks.pictures import conv


class Recurrent(nn.Module):
    """Two bidirectional layers (``kind``: LSTM or GRU) and a classifier of every step, on (batch, steps, 256)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(256, 256, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(512, 80)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])  # type: ignore[no-any-return]


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)  # type: ignore[no-any-return]


class PairBlock(nn.Module):
    """Two blocks of AlphaFold's pair stack (Jumper et al., 2021), on (batch, residues, residues, n): products over triangles,
    attention along each axis with a bias of the pairs, and a transition."""

    class Triangle(nn.Module):
        def __init__(self, n: int, outgoing: bool) -> None:
            super().__init__()
            self.norm, self.after, self.outgoing = nn.LayerNorm(n), nn.LayerNorm(n), outgoing
            self.values, self.gates = nn.Linear(n, 2 * n), nn.Linear(n, 2 * n)
            self.gate, self.project = nn.Linear(n, n), nn.Linear(n, n)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            a, b = (self.values(y) * self.gates(y).sigmoid()).chunk(2, -1)
            form = "bikc,bjkc->bijc" if self.outgoing else "bkic,bkjc->bijc"
            return x + self.project(self.after(torch.einsum(form, a, b))) * self.gate(y).sigmoid()  # type: ignore[no-any-return]

    class Attention(nn.Module):
        def __init__(self, n: int, heads: int, rows: bool) -> None:
            super().__init__()
            self.norm, self.heads, self.rows = nn.LayerNorm(n), heads, rows
            self.qkv, self.bias = nn.Linear(n, 3 * n, bias=False), nn.Linear(n, heads, bias=False)
            self.gate, self.project = nn.Linear(n, n), nn.Linear(n, n)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x if self.rows else x.transpose(1, 2))
            q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)
            bias = self.bias(y).permute(0, 3, 1, 2)[:, None]
            found = F.scaled_dot_product_attention(q, k, v, bias.expand(-1, q.shape[1], -1, -1, -1))
            y = self.project(found.transpose(2, 3).flatten(-2) * self.gate(y).sigmoid())
            return x + (y if self.rows else y.transpose(1, 2))  # type: ignore[no-any-return]

    def __init__(self, n: int = 128, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(depth):
            parts += [self.Triangle(n, True), self.Triangle(n, False)]
            parts += [self.Attention(n, heads, True), self.Attention(n, heads, False)]
            parts.append(Residual(nn.LayerNorm(n), nn.Linear(n, 4 * n), nn.ReLU(), nn.Linear(4 * n, n)))
        self.blocks = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]


class DGCNN(nn.Module):
    """Wang et al. (2019): convolutions over the edges to each point's nearest neighbors, found anew in each layer, on
    (batch, 3, points)."""

    def __init__(self, near: int = 20) -> None:
        super().__init__()
        self.near = near
        self.convs = nn.ModuleList(
            conv(2 * a, b, act=nn.LeakyReLU) for a, b in ((3, 64), (64, 64), (64, 128), (128, 256))
        )
        self.last = nn.Sequential(nn.Conv1d(512, 1024, 1, bias=False), nn.BatchNorm1d(1024), nn.LeakyReLU())
        self.head = nn.Sequential(nn.Linear(2048, 512), nn.LeakyReLU(), nn.Linear(512, 40))

    def edges(self, x: Tensor) -> Tensor:
        b, c, n = x.shape
        square = (x * x).sum(1)
        near = (2 * x.transpose(1, 2) @ x - square[:, None] - square[:, :, None]).topk(self.near, -1).indices
        there = x.gather(2, near.reshape(b, 1, -1).expand(-1, c, -1)).reshape(b, c, n, self.near)
        here = x[..., None].expand(-1, -1, -1, self.near)
        return torch.cat([there - here, here], 1)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.convs:
            x = layer(self.edges(x)).amax(-1)
            found.append(x)
        x = self.last(torch.cat(found, 1))
        return self.head(torch.cat([x.amax(-1), x.mean(-1)], 1))  # type: ignore[no-any-return]


class GraphAttention(nn.Module):
    """Three layers of attention along seeded edges, on (batch, nodes, n): gathers and scattered sums."""

    def __init__(self, nodes: int = 2048, edges: int = 16384, n: int = 128) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.register_buffer("source", torch.randint(nodes, (edges,), generator=generator))
        self.register_buffer("target", torch.randint(nodes, (edges,), generator=generator))
        self.layers = nn.ModuleList(nn.Linear(n, n) for _ in range(3))
        self.own = nn.ModuleList(nn.Linear(n, n) for _ in range(3))
        self.scores = nn.ParameterList(nn.Parameter(torch.randn(2, n) * n**-0.5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer, own, score in zip(self.layers, self.own, self.scores, strict=True):
            y = layer(x)
            heat = (y @ score[0])[:, self.source] + (y @ score[1])[:, self.target]
            weight = F.leaky_relu(heat, 0.2).exp()
            whole = torch.zeros_like(y[..., 0]).index_add(1, self.target, weight)
            sent = y[:, self.source] * (weight / whole[:, self.target])[..., None]
            x = (own(x) + torch.zeros_like(y).index_add(1, self.target, sent)).relu()
        return x


class DLRM(nn.Module):
    """Naumov et al. (2019): embeddings of 26 features, products of all pairs, two perceptrons, on (batch, 13) and (batch, 26)."""

    def __init__(self, rows: int = 1000, n: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, n) for _ in range(26))
        self.bottom = self.perceptron(13, 512, 256, n)
        self.register_buffer("pairs", torch.tensor([i * 27 + j for i in range(27) for j in range(i)]))
        self.top = self.perceptron(n + len(self.pairs), 512, 256)
        self.last = nn.Linear(256, 1)

    @staticmethod
    def perceptron(inner: int, *outer: int) -> nn.Module:
        sizes = (inner, *outer)
        layers = (nn.Linear(a, b) for a, b in zip(sizes, outer, strict=False))
        return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        parts = torch.stack([x, *(table(ids[:, k]) for k, table in enumerate(self.tables))], 1)
        pairs = (parts @ parts.transpose(1, 2)).flatten(1)[:, self.pairs]
        return self.last(self.top(torch.cat([x, pairs], 1))).sigmoid()  # type: ignore[no-any-return]


class KAN(nn.Module):
    """Liu et al. (2024): three layers of sums of splines (cubic, on a grid), on (batch, 784)."""

    class Layer(nn.Module):
        def __init__(self, inner: int, outer: int, grid: int = 5, order: int = 3) -> None:
            super().__init__()
            self.order, step = order, 2 / grid
            self.register_buffer("knots", torch.arange(-order, grid + order + 1) * step - 1)
            self.base, self.spline = (
                nn.Linear(inner, outer, bias=False),
                nn.Linear(inner * (grid + order), outer, bias=False),
            )

        def forward(self, x: Tensor) -> Tensor:
            t, y = self.knots, x[..., None]
            found = ((y >= t[:-1]) & (y < t[1:])).to(x.dtype)
            for k in range(1, self.order + 1):
                left = (y - t[: -k - 1]) / (t[k:-1] - t[: -k - 1]) * found[..., :-1]
                found = left + (t[k + 1 :] - y) / (t[k + 1 :] - t[1:-k]) * found[..., 1:]
            return self.base(F.silu(x)) + self.spline(found.flatten(-2))  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(self.Layer(784, 256), self.Layer(256, 64), self.Layer(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.tanh())  # type: ignore[no-any-return]


class CouplingFlow(nn.Module):
    """Dinh et al. (2017): eight affine couplings of (batch, 64) with perceptrons, and the density that they give."""

    def __init__(self, n: int = 64, depth: int = 8, width: int = 256) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(n // 2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, n))
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.zeros_like(x[:, 0])
        for part in self.parts:
            a, b = x.chunk(2, 1)
            scale, shift = part(a).chunk(2, 1)
            scale = scale.tanh()
            x, whole = torch.cat([b * scale.exp() + shift, a], 1), whole + scale.sum(1)
        return whole - 0.5 * x.square().sum(1)


class SignalNet(nn.Module):
    """A residual network of one dimension for signals of (batch, 12, steps), such as electrocardiograms: wide kernels."""

    def __init__(self, n: int = 64, depth: int = 8, size: int = 17) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(12, n, size, padding=size // 2, bias=False), nn.BatchNorm1d(n), nn.ReLU())
        self.blocks, self.short, inner = nn.ModuleList(), nn.ModuleList(), n
        for k in range(depth):
            outer, stride = n * (1 + k // 2), 1 + k % 2
            self.blocks.append(
                nn.Sequential(
                    nn.Conv1d(inner, outer, size, stride, size // 2, bias=False), nn.BatchNorm1d(outer), nn.ReLU(),
                    nn.Conv1d(outer, outer, size, padding=size // 2, bias=False), nn.BatchNorm1d(outer),
                )
            )  # fmt: skip
            self.short.append(nn.Sequential(nn.MaxPool1d(stride), nn.Conv1d(inner, outer, 1, bias=False)))
            inner = outer
        self.head = nn.Linear(inner, 26)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block, short in zip(self.blocks, self.short, strict=True):
            x = F.relu(block(x) + short(x))
        return self.head(x.mean(2))  # type: ignore[no-any-return]


class ConvLstm(nn.Module):
    """Shi et al. (2015): a convolutional LSTM over the frames of (batch, frames, 1, h, w), for the weather to come."""

    def __init__(self, n: int = 64) -> None:
        super().__init__()
        self.n, self.first = n, nn.Conv2d(1, n, 3, padding=1)
        self.cell, self.last = nn.Conv2d(2 * n, 4 * n, 3, padding=1), nn.Conv2d(n, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(self.first(x[:, 0]))
        for k in range(x.shape[1]):
            i, f, o, g = self.cell(torch.cat([self.first(x[:, k]), h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.last(h)  # type: ignore[no-any-return]
