"""Networks of pictures and videos."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NormOfChannels(nn.LayerNorm):
    """Layer normalization over the channels of (batch, channels, h, w)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class NAFBlock(nn.Module):
    """Chen et al. (2022): gates that multiply two halves of the channels, and no other activation."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([NormOfChannels(n), NormOfChannels(n)])
        self.mix = nn.Sequential(nn.Conv2d(n, 2 * n, 1), nn.Conv2d(2 * n, 2 * n, 3, padding=1, groups=2 * n))
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(n, n, 1))
        self.project, self.grow, self.shrink = nn.Conv2d(n, n, 1), nn.Conv2d(n, 2 * n, 1), nn.Conv2d(n, n, 1)
        self.beta, self.gamma = (nn.Parameter(torch.full((1, n, 1, 1), 0.5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.mix(self.norms[0](x)).chunk(2, 1)
        y = a * b
        x = x + self.project(y * self.scale(y)) * self.beta
        a, b = self.grow(self.norms[1](x)).chunk(2, 1)
        return x + self.shrink(a * b) * self.gamma  # type: ignore[no-any-return]


class NAFNet(nn.Module):
    """A U of NAF blocks that restores pictures of (batch, 3, h, w)."""

    def __init__(self, width: int = 32, encoder: tuple[int, ...] = (1, 1, 2), middle: int = 2) -> None:
        super().__init__()
        self.intro, self.ending = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        widths = [width << k for k in range(len(encoder))]
        self.down = nn.ModuleList(
            nn.Sequential(*(NAFBlock(n) for _ in range(k))) for n, k in zip(widths, encoder, strict=True)
        )
        self.shrink = nn.ModuleList(nn.Conv2d(n, 2 * n, 2, 2) for n in widths)
        self.middle = nn.Sequential(*(NAFBlock(2 * widths[-1]) for _ in range(middle)))
        self.grow = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * n, 4 * n, 1, bias=False), nn.PixelShuffle(2)) for n in reversed(widths)
        )
        self.up = nn.ModuleList(NAFBlock(n) for n in reversed(widths))

    def forward(self, x: Tensor) -> Tensor:
        y, kept = self.intro(x), []
        for level, shrink in zip(self.down, self.shrink, strict=True):
            kept.append(level(y))
            y = shrink(kept[-1])
        y = self.middle(y)
        for grow, level in zip(self.grow, self.up, strict=True):
            y = level(grow(y) + kept.pop())
        return self.ending(y) + x  # type: ignore[no-any-return]


class Restormer(nn.Module):
    """Zamir et al. (2022), one level: attention between channels, and gated depthwise convolutions."""

    class Block(nn.Module):
        def __init__(self, n: int, heads: int) -> None:
            super().__init__()
            self.heads, inner = heads, int(n * 2.66)
            self.norms = nn.ModuleList([NormOfChannels(n), NormOfChannels(n)])
            self.qkv = nn.Sequential(nn.Conv2d(n, 3 * n, 1), nn.Conv2d(3 * n, 3 * n, 3, padding=1, groups=3 * n))
            self.heat = nn.Parameter(torch.ones(heads, 1, 1))
            self.project, self.shrink = nn.Conv2d(n, n, 1), nn.Conv2d(inner, n, 1)
            self.grow = nn.Sequential(
                nn.Conv2d(n, 2 * inner, 1), nn.Conv2d(2 * inner, 2 * inner, 3, padding=1, groups=2 * inner)
            )

        def forward(self, x: Tensor) -> Tensor:
            b, c, h, w = x.shape
            q, k, v = (t.reshape(b, self.heads, -1, h * w) for t in self.qkv(self.norms[0](x)).chunk(3, 1))
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            y = ((q @ k.transpose(-2, -1)) * self.heat).softmax(-1) @ v
            x = x + self.project(y.reshape(b, c, h, w))
            a, g = self.grow(self.norms[1](x)).chunk(2, 1)
            return x + self.shrink(F.gelu(a) * g)  # type: ignore[no-any-return]

    def __init__(self, n: int = 48, heads: int = 2, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv2d(3, n, 3, padding=1), *(self.Block(n, heads) for _ in range(depth)))
        self.ending = nn.Conv2d(n, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.ending(self.blocks(x)) + x  # type: ignore[no-any-return]


class RRDBNet(nn.Module):
    """Wang et al. (2018), ESRGAN: residual dense blocks, then four times the size."""

    class Dense(nn.Module):
        def __init__(self, n: int, grow: int) -> None:
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(n + k * grow, grow if k < 4 else n, 3, padding=1) for k in range(5))

        def forward(self, x: Tensor) -> Tensor:
            parts = [x]
            for conv in self.convs[:-1]:
                parts.append(F.leaky_relu(conv(torch.cat(parts, 1)), 0.2))
            return self.convs[-1](torch.cat(parts, 1)) * 0.2 + x  # type: ignore[no-any-return]

    def __init__(self, n: int = 64, grow: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.first, self.body_end = nn.Conv2d(3, n, 3, padding=1), nn.Conv2d(n, n, 3, padding=1)
        self.body = nn.ModuleList(nn.Sequential(*(self.Dense(n, grow) for _ in range(3))) for _ in range(depth))
        self.ends = nn.ModuleList(nn.Conv2d(n, n, 3, padding=1) for _ in range(3))
        self.last = nn.Conv2d(n, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        y = first
        for block in self.body:
            y = y + 0.2 * block(y)
        y = first + self.body_end(y)
        for conv in self.ends[:2]:
            y = F.leaky_relu(conv(F.interpolate(y, scale_factor=2.0, mode="nearest")), 0.2)
        return self.last(F.leaky_relu(self.ends[2](y), 0.2))  # type: ignore[no-any-return]


def conv(
    inner: int, outer: int, size: int = 1, stride: int = 1, act: type[nn.Module] = nn.SiLU, dilation: int = 1
) -> nn.Module:
    """A convolution, a batch normalization and an activation."""
    return nn.Sequential(
        nn.Conv2d(inner, outer, size, stride, size // 2 * dilation, dilation, bias=False), nn.BatchNorm2d(outer), act()
    )


class YoloV8(nn.Module):
    """YOLOv8n: the backbone, the path aggregation and the decoded boxes of three levels, on (batch, 3, 640, 640)."""

    class C2f(nn.Module):
        def __init__(self, inner: int, outer: int, depth: int, shortcut: bool) -> None:
            super().__init__()
            n, self.shortcut = outer // 2, shortcut
            self.first, self.last = conv(inner, outer), conv((2 + depth) * n, outer)
            self.parts = nn.ModuleList(nn.Sequential(conv(n, n, 3), conv(n, n, 3)) for _ in range(depth))

        def forward(self, x: Tensor) -> Tensor:
            found = list(self.first(x).chunk(2, 1))
            for part in self.parts:
                found.append(part(found[-1]) + found[-1] if self.shortcut else part(found[-1]))
            return self.last(torch.cat(found, 1))  # type: ignore[no-any-return]

    def __init__(self, n: int = 16, classes: int = 80, size: int = 640) -> None:
        super().__init__()
        c2f = self.C2f
        self.one = nn.Sequential(
            conv(3, n, 3, 2), conv(n, 2 * n, 3, 2), c2f(2 * n, 2 * n, 1, True), conv(2 * n, 4 * n, 3, 2),
            c2f(4 * n, 4 * n, 2, True),
        )  # fmt: skip
        self.two = nn.Sequential(conv(4 * n, 8 * n, 3, 2), c2f(8 * n, 8 * n, 2, True))
        self.three = nn.Sequential(conv(8 * n, 16 * n, 3, 2), c2f(16 * n, 16 * n, 1, True))
        self.pools = nn.ModuleList([conv(16 * n, 8 * n), conv(32 * n, 16 * n)])
        self.up = nn.ModuleList([c2f(24 * n, 8 * n, 1, False), c2f(12 * n, 4 * n, 1, False)])
        self.shrink = nn.ModuleList([conv(4 * n, 4 * n, 3, 2), conv(8 * n, 8 * n, 3, 2)])
        self.down = nn.ModuleList([c2f(12 * n, 8 * n, 1, False), c2f(24 * n, 16 * n, 1, False)])
        widths, inner = (4 * n, 8 * n, 16 * n), max(4 * n, classes)
        self.boxes, self.names = (
            nn.ModuleList(nn.Sequential(conv(c, k, 3), conv(k, k, 3), nn.Conv2d(k, o, 1)) for c in widths)
            for k, o in ((64, 64), (inner, classes))
        )
        places, strides = [], []
        for stride in (8, 16, 32):
            m = size // stride
            y, x = torch.meshgrid(torch.arange(m) + 0.5, torch.arange(m) + 0.5, indexing="ij")
            places.append(torch.stack([x.flatten(), y.flatten()]))
            strides.append(torch.full((m * m,), float(stride)))
        self.register_buffer("places", torch.cat(places, 1))
        self.register_buffer("strides", torch.cat(strides))
        self.register_buffer("bins", torch.arange(16.0))

    def forward(self, x: Tensor) -> Tensor:
        a = self.one(x)
        b = self.two(a)
        parts = [self.pools[0](self.three(b))]
        for _ in range(3):
            parts.append(F.max_pool2d(parts[-1], 5, 1, 2))
        c = self.pools[1](torch.cat(parts, 1))
        d = self.up[0](torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
        e = self.up[1](torch.cat([F.interpolate(d, scale_factor=2.0), a], 1))
        f = self.down[0](torch.cat([self.shrink[0](e), d], 1))
        g = self.down[1](torch.cat([self.shrink[1](f), c], 1))
        levels = (e, f, g)
        boxes = torch.cat([head(t).flatten(2) for head, t in zip(self.boxes, levels, strict=True)], 2)
        names = torch.cat([head(t).flatten(2) for head, t in zip(self.names, levels, strict=True)], 2)
        sides = (boxes.reshape(len(x), 4, 16, -1).softmax(2) * self.bins[:, None]).sum(2)
        low, high = self.places - sides[:, :2], self.places + sides[:, 2:]
        return torch.cat([(low + high) / 2 * self.strides, (high - low) * self.strides, names.sigmoid()], 1)


class BiFPN(nn.Module):
    """Tan et al. (2020): weighted sums of feature maps, up and down, with separable convolutions; five levels of ``n`` channels
    made of one map (batch, n, h, w)."""

    class Layer(nn.Module):
        def __init__(self, n: int, levels: int) -> None:
            super().__init__()
            counts = [2] * (levels - 1) + [3] * (levels - 1)  # numbers of maps that are added, top-down and bottom-up
            self.weights = nn.ParameterList(nn.Parameter(torch.rand(count) + 0.5) for count in counts)
            self.convs = nn.ModuleList(
                nn.Sequential(
                    nn.Conv2d(n, n, 3, padding=1, groups=n, bias=False), nn.Conv2d(n, n, 1), nn.BatchNorm2d(n)
                )
                for _ in range(2 * (levels - 1))
            )

        def mixed(self, k: int, *parts: Tensor) -> Tensor:
            w = self.weights[k].relu()
            w = w / (w.sum() + 1e-4)
            return self.convs[k](F.silu(sum(w[i] * p for i, p in enumerate(parts))))  # type: ignore[no-any-return]

        def forward(self, *given: Tensor) -> list[Tensor]:
            up, last = [given[-1]], len(given) - 1
            for k in range(last - 1, -1, -1):
                up.insert(0, self.mixed(last - 1 - k, given[k], F.interpolate(up[0], scale_factor=2.0)))
            down = [up[0]]
            for k in range(1, last + 1):
                parts = (given[k], up[k]) if k < last else (given[k], given[k])
                down.append(self.mixed(last - 1 + k, *parts, F.max_pool2d(down[-1], 3, 2, 1)))
            return down

    def __init__(self, n: int = 64, depth: int = 3, anchors: int = 9) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(n, 5) for _ in range(depth))
        self.head = nn.Sequential(
            *(
                part
                for _ in range(3)
                for part in (nn.Conv2d(n, n, 3, padding=1, groups=n), nn.Conv2d(n, n, 1), nn.SiLU())
            ),
            nn.Conv2d(n, anchors * 4, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        levels = [x]
        for _ in range(4):
            levels.append(F.max_pool2d(levels[-1], 3, 2, 1))
        for layer in self.layers:
            levels = layer(*levels)
        return torch.cat([self.head(t).flatten(2) for t in levels], 2)


class CRNN(nn.Module):
    """Shi et al. (2017): text of a line (batch, 1, 32, w) by convolutions and two bidirectional LSTM layers."""

    def __init__(self, letters: int = 97) -> None:
        super().__init__()
        act = nn.ReLU
        self.picture = nn.Sequential(
            conv(1, 64, 3, act=act), nn.MaxPool2d(2), conv(64, 128, 3, act=act), nn.MaxPool2d(2), conv(128, 256, 3, act=act),
            conv(256, 256, 3, act=act), nn.MaxPool2d((2, 1)), conv(256, 512, 3, act=act), conv(512, 512, 3, act=act),
            nn.MaxPool2d((2, 1)), nn.Conv2d(512, 512, (2, 1)), nn.ReLU(),
        )  # fmt: skip
        self.rnn, self.head = nn.LSTM(512, 256, 2, batch_first=True, bidirectional=True), nn.Linear(512, letters)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.picture(x).squeeze(2).transpose(1, 2))[0])  # type: ignore[no-any-return]


class StyleGan2(nn.Module):
    """Karras et al. (2020), the synthesis of (batch, 512) styles up to 128 x 128: convolutions whose weights depend on the
    style."""

    class Layer(nn.Module):
        def __init__(self, inner: int, outer: int, size: int, up: bool) -> None:
            super().__init__()
            self.style, self.up = nn.Linear(512, inner), up
            self.weight = nn.Parameter(torch.randn(outer, inner, size, size) * (inner * size * size) ** -0.5)
            self.bias = nn.Parameter(torch.zeros(outer))

        def forward(self, x: Tensor, w: Tensor, norm: bool = True) -> Tensor:
            b = len(x)
            weight = self.weight[None] * (self.style(w) + 1)[:, None, :, None, None]
            if norm:
                weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
            if self.up:
                x = F.interpolate(x, scale_factor=2.0, mode="bilinear")
            size = self.weight.shape[-1]
            y = F.conv2d(x.reshape(1, -1, *x.shape[2:]), weight.flatten(0, 1), padding=size // 2, groups=b)
            y = y.reshape(b, -1, *x.shape[2:]) + self.bias[:, None, None]
            return F.leaky_relu(y, 0.2) * 2**0.5 if norm else y

    def __init__(self, levels: int = 6) -> None:
        super().__init__()
        widths = [min(512, 2048 >> max(0, k - 2)) for k in range(levels)]
        self.start = nn.Parameter(torch.randn(1, widths[0], 4, 4))
        self.up = nn.ModuleList(self.Layer(widths[max(0, k - 1)], n, 3, k > 0) for k, n in enumerate(widths))
        self.same = nn.ModuleList(self.Layer(n, n, 3, False) for n in widths)
        self.rgb = nn.ModuleList(self.Layer(n, 3, 1, False) for n in widths)
        self.mapping = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(512, 512), nn.LeakyReLU(0.2))))

    def forward(self, z: Tensor) -> Tensor:
        w = self.mapping(z * (z.square().mean(1, keepdim=True) + 1e-8).rsqrt())
        x, picture = self.start.expand(len(z), -1, -1, -1), None
        for up, same, rgb in zip(self.up, self.same, self.rgb, strict=True):
            x = same(up(x, w), w)
            colors = rgb(x, w, norm=False)
            picture = colors if picture is None else colors + F.interpolate(picture, scale_factor=2.0, mode="bilinear")
        assert picture is not None
        return picture


class Board(nn.Module):
    """A tower of residual blocks with squeeze and excitation on boards of (batch, 112, 8, 8), with the heads of a policy and a
    value."""

    class Block(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                conv(n, n, 3, act=nn.ReLU), nn.Conv2d(n, n, 3, padding=1, bias=False), nn.BatchNorm2d(n)
            )
            self.squeeze = nn.Sequential(nn.Linear(n, 32), nn.ReLU(), nn.Linear(32, 2 * n))

        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x)
            scale, shift = self.squeeze(y.mean((2, 3)))[..., None, None].chunk(2, 1)
            return F.relu(y * scale.sigmoid() + shift + x)

    def __init__(self, n: int = 128, depth: int = 10) -> None:
        super().__init__()
        self.tower = nn.Sequential(conv(112, n, 3, act=nn.ReLU), *(self.Block(n) for _ in range(depth)))
        self.policy = nn.Sequential(conv(n, n, 3, act=nn.ReLU), nn.Conv2d(n, 73, 3, padding=1), nn.Flatten())
        self.value = nn.Sequential(
            conv(n, 32, act=nn.ReLU), nn.Flatten(), nn.Linear(2048, 128), nn.ReLU(), nn.Linear(128, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.tower(x)
        return torch.cat([self.policy(x), self.value(x).softmax(-1)], 1)


class UNet3d(nn.Module):
    """The 3D U-Net of Çiçek et al. (2016), with half of its channels: four levels of two convolutions, on (batch, 1, d, h, w)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.block(1, 16, 32), self.block(32, 32, 64), self.block(64, 64, 128)])
        self.down.append(self.block(128, 128, 256))
        self.up = nn.ModuleList([self.block(384, 128, 128), self.block(192, 64, 64), self.block(96, 32, 32)])
        self.grow = nn.ModuleList([nn.ConvTranspose3d(n, n, 2, stride=2) for n in (256, 128, 64)])
        self.head = nn.Conv3d(32, 3, 1)

    @staticmethod
    def block(inner: int, *outer: int) -> nn.Module:
        parts: list[nn.Module] = []
        for n in outer:
            parts += [nn.Conv3d(inner, n, 3, padding=1), nn.BatchNorm3d(n), nn.ReLU()]
            inner = n
        return nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level in self.down[:-1]:
            x = level(x)
            kept.append(x)
            x = F.max_pool3d(x, 2)
        x = self.down[-1](x)
        for grow, level in zip(self.grow, self.up, strict=True):
            x = level(torch.cat([kept.pop(), grow(x)], 1))
        return self.head(x)  # type: ignore[no-any-return]


class X3D(nn.Module):
    """Feichtenhofer (2020), two stages: inverted bottlenecks with depthwise convolutions in three dimensions, on
    (batch, 3, frames, h, w)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv3d(3, 24, (1, 3, 3), (1, 2, 2), (0, 1, 1), bias=False),
            nn.Conv3d(24, 24, (5, 1, 1), padding=(2, 0, 0), groups=24, bias=False), nn.BatchNorm3d(24), nn.ReLU(),
        )  # fmt: skip
        self.blocks = nn.ModuleList()
        self.short = nn.ModuleList()
        for inner, outer, depth in ((24, 24, 3), (24, 48, 4)):
            for k in range(depth):
                n, a, stride = int(outer * 2.25), inner if k == 0 else outer, 2 if k == 0 else 1
                self.blocks.append(
                    nn.Sequential(
                        nn.Conv3d(a, n, 1, bias=False), nn.BatchNorm3d(n), nn.ReLU(),
                        nn.Conv3d(n, n, 3, (1, stride, stride), 1, groups=n, bias=False), nn.BatchNorm3d(n), nn.SiLU(),
                        nn.Conv3d(n, outer, 1, bias=False), nn.BatchNorm3d(outer),
                    )
                )  # fmt: skip
                self.short.append(nn.Conv3d(a, outer, 1, (1, 2, 2), bias=False) if k == 0 else nn.Identity())
        self.head = nn.Linear(48, 400)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block, short in zip(self.blocks, self.short, strict=True):
            x = F.relu(block(x) + short(x))
        return self.head(x.mean((2, 3, 4)))  # type: ignore[no-any-return]
