"""Networks that generate sound."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WaveNet(nn.Module):
    """van den Oord et al. (2016): ten dilated layers with gates, conditioned on a spectrogram of as many frames as samples, on
    (batch, 1, samples) and (batch, 80, samples)."""

    def __init__(self, channels: int = 64, skip: int = 256, layers: int = 10) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, channels, 1)
        wide = [2**i for i in range(layers)]
        self.dilated = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 3, dilation=d, padding=d) for d in wide)
        self.conditions = nn.ModuleList(nn.Conv1d(80, 2 * channels, 1) for _ in wide)
        self.residuals = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in wide)
        self.skips = nn.ModuleList(nn.Conv1d(channels, skip, 1) for _ in wide)
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(skip, skip, 1), nn.ReLU(), nn.Conv1d(skip, 256, 1))

    def forward(self, x: Tensor, mel: Tensor) -> Tensor:
        x, total = self.first(x), 0
        for layer in zip(self.dilated, self.conditions, self.residuals, self.skips, strict=True):
            dilated, condition, residual, skip = layer
            a, b = (dilated(x) + condition(mel)).chunk(2, 1)
            gated = a.tanh() * b.sigmoid()
            x, total = x + residual(gated), total + skip(gated)
        return self.last(total)  # type: ignore[no-any-return]


class Snake(nn.Module):
    """An activation at twice the sampling rate, with low-pass filters before and after (BigVGAN: Lee et al., 2023)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.rate, self.gain = (nn.Parameter(torch.rand(1, channels, 1) + 0.5) for _ in range(2))
        self.register_buffer("filter", torch.hann_window(12).expand(channels, 1, 12) / 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (5, 5), mode="replicate")
        x = 2 * F.conv_transpose1d(x, self.filter, stride=2, groups=len(self.filter))[..., 15:-15]
        x = x + torch.sin(x * self.rate).pow(2) / (self.gain + 1e-9)
        return F.conv1d(F.pad(x, (5, 6), mode="replicate"), self.filter, stride=2, groups=len(self.filter))


class BigVGAN(nn.Module):
    """Three stages of a vocoder of 256 channels, on (batch, 80, frames)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, channels = nn.Conv1d(80, 256, 7, padding=3), 256
        self.ups, self.blocks = nn.ModuleList(), nn.ModuleList()
        for up, taps in ((8, 16), (8, 16), (2, 4)):
            channels //= 2
            self.ups.append(nn.ConvTranspose1d(2 * channels, channels, taps, up, padding=(taps - up) // 2))
            self.blocks.append(nn.ModuleList(self._block(channels, k) for k in (3, 7, 11)))
        self.last = nn.Sequential(Snake(channels), nn.Conv1d(channels, 1, 7, padding=3), nn.Tanh())

    @staticmethod
    def _block(channels: int, taps: int) -> nn.ModuleList:
        def part(dilation: int) -> nn.Sequential:
            pads = dilation * (taps - 1) // 2
            first = nn.Conv1d(channels, channels, taps, dilation=dilation, padding=pads)
            second = nn.Conv1d(channels, channels, taps, padding=taps // 2)
            return nn.Sequential(Snake(channels), first, Snake(channels), second)

        return nn.ModuleList(part(dilation) for dilation in (1, 3, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for up, blocks in zip(self.ups, self.blocks, strict=True):
            x, parts = up(x), []
            for block in blocks:
                y = x
                for part in block:
                    y = y + part(y)
                parts.append(y)
            x = sum(parts) / len(parts)
        return self.last(x)  # type: ignore[no-any-return]
