"""Train the shipped networks: ``python -m benchmarks.training.digits``. Needs the extra ``train``: scikit-learn and
torch.

A quarter of scikit-learn's digits (1,797 pictures of 8x8 pixels) is held out, the same quarter for each network;
training pictures are shifted by up to a pixel and scaled in contrast. The weights leave torch as arrays;
:mod:`benchmarks.training.networks` writes the ONNX files.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.training.networks import (
    CLASSES,
    EXPANSION,
    HEAD,
    HEADS,
    HIDDEN,
    LAYERS,
    MOBILE,
    RESNET,
    SEGMENT,
    SQUEEZE,
    build,
)
from optdnn.errors import InternalError, MissingDependency
from optdnn.models import trained
from optdnn.models.trained import DATA, NAMES, SCENES, TRAINING
from optdnn.types import Array

try:
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch import Tensor, nn
    from torch.nn import functional
except ImportError as error:
    raise MissingDependency(str(error.name), "train", "to train the shipped networks") from None

CALIBRATION = 256
SPREAD = 14.0
"""Factor up and down from 1 within which the scales before a depthwise convolution start, evenly in their logarithm. Long training
leaves MobileNets with such ranges (Nagel et al., "Data-Free Quantization", 2019, figure 2); 120 epochs of digits would not."""
NORM_SPREAD = 4.0
"""The same for the scales of the transformer's LayerNormalizations."""
INPUT = {
    "digits_resnet": [1, 8, 8],
    "digits_mobile": [1, 8, 8],
    "digits_gru": [8, 8],
    "digits_transformer": [1, 8, 8],
    "digits_segment": [1, 24, 24],
}
SCENE = 24
HELD_OUT_SCENES = 150
INK = 4
"""Sixteenths from which on a pixel belongs to its digit."""


class Residual(nn.Module):
    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = None
        if stride != 1 or inputs != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class Excite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, SQUEEZE, 1)
        self.fc2 = nn.Conv2d(SQUEEZE, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.fc2(functional.silu(self.fc1(x.mean((2, 3), keepdim=True)))))


class Inverted(nn.Module):
    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        hidden = EXPANSION * inputs
        self.expand = nn.Conv2d(inputs, hidden, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(hidden)
        nn.init.uniform_(self.bn1.weight, -math.log(SPREAD), math.log(SPREAD)).data.exp_()
        self.depthwise = nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False)
        self.bn2 = nn.BatchNorm2d(hidden)
        self.se = Excite(hidden)
        self.project = nn.Conv2d(hidden, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.shortcut = stride == 1 and inputs == channels

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(self.bn1(self.expand(x)))
        y = self.bn3(self.project(self.se(functional.silu(self.bn2(self.depthwise(y))))))
        return y + x if self.shortcut else y


class Convolutional(nn.Module):
    """A stem, blocks, global average pooling, a classifier."""

    def __init__(self, block: type[nn.Module], plan: tuple[tuple[int, int], ...], activation: Any) -> None:
        super().__init__()
        self.conv, self.bn, self.activation = nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), activation
        inputs = [16, *(channels for channels, _ in plan)]
        self.blocks = nn.Sequential(
            *(block(i, channels, stride) for i, (channels, stride) in zip(inputs, plan, strict=False))
        )
        self.fc = nn.Linear(inputs[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.activation(self.bn(self.conv(x)))).mean((2, 3)))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.fc = nn.GRU(8, HIDDEN, batch_first=True), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.gru(x)[1][0])


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        hidden = HEADS * HEAD
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        for norm in (self.norm1, self.norm2):
            nn.init.uniform_(norm.weight, -math.log(NORM_SPREAD), math.log(NORM_SPREAD)).data.exp_()
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).reshape(-1, 16, HEADS, HEAD).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = (q @ k.transpose(2, 3)) * HEAD**-0.5
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 16, HEADS * HEAD))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden = HEADS * HEAD
        self.patches = nn.Conv2d(1, hidden, 2, 2)
        self.position = nn.Parameter(torch.randn(1, 16, hidden) * 0.02)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.fc = nn.LayerNorm(hidden), nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.fc(self.norm(self.layers(x)).mean(1))


class Twice(nn.Module):
    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x))))))


class Up(Twice):
    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__(2 * channels, channels)
        self.up = nn.ConvTranspose2d(inputs, channels, 2, 2)

    def join(self, skip: Tensor, x: Tensor) -> Tensor:
        return self(torch.cat([skip, self.up(x)], 1))


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for level, channels in enumerate(SEGMENT):
            self.add_module(f"down{level}", Twice(SEGMENT[level - 1] if level else 1, channels))
        for level in range(len(SEGMENT) - 1):
            self.add_module(f"up{level}", Up(SEGMENT[level + 1], SEGMENT[level]))
        self.head = nn.Conv2d(SEGMENT[0], CLASSES + 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level in range(len(SEGMENT)):
            if level:
                skips.append(x)
                x = functional.max_pool2d(x, 2, 2)
            x = self.get_submodule(f"down{level}")(x)
        for level in reversed(range(len(skips))):
            x = getattr(self, f"up{level}").join(skips[level], x)
        return self.head(x)


def module(name: str) -> nn.Module:
    if name == "digits_resnet":
        return Convolutional(Residual, RESNET, functional.relu)
    if name == "digits_mobile":
        return Convolutional(Inverted, MOBILE, functional.silu)
    if name == "digits_transformer":
        return Transformer()
    return Segmenter() if name == "digits_segment" else Rows()


def split() -> tuple[Array, Array, Array, Array]:
    """Training pictures and digits, held-out pictures and digits: float32 (n, 1, 8, 8) in 0 … 1, int64 (n,)."""
    digits = load_digits()
    x = (digits.images[:, None] / 16.0).astype(np.float32)
    parts = train_test_split(x, digits.target.astype(np.int64), test_size=0.25, random_state=0, stratify=digits.target)
    return parts[0], parts[2], parts[1], parts[3]


def scenes(x: Array, y: Array, count: int, seed: int) -> tuple[Array, Array]:
    """Pictures of two to five digits that do not touch: uint8 sixteenths (count, 1, 24, 24), and each pixel's class, uint8."""
    rng = np.random.default_rng(seed)
    pictures = np.zeros((count, 1, SCENE, SCENE), np.uint8)
    classes = np.zeros((count, SCENE, SCENE), np.uint8)
    for k in range(count):
        taken = np.zeros((SCENE, SCENE), bool)
        for _ in range(rng.integers(2, 6)):
            i, j = rng.integers(0, SCENE - 8 + 1, 2)
            window = (slice(i, i + 8), slice(j, j + 8))
            if taken[window].any():
                continue
            taken[window] = True
            chosen = rng.integers(len(x))
            digit = np.rint(x[chosen, 0] * 16).astype(np.uint8)
            pictures[(k, 0, *window)] = digit
            classes[(k, *window)] = np.where(digit >= INK, y[chosen] + 1, 0)
    return pictures, classes


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each picture shifted by -1, 0 or 1 pixel each way, its contrast scaled by 0.8 to 1.2."""
    padded = functional.pad(x, (1, 1, 1, 1))
    offsets = torch.randint(0, 3, (len(x), 2), generator=generator)
    shifted = torch.stack([p[:, i : i + 8, j : j + 8] for p, (i, j) in zip(padded, offsets.tolist(), strict=True)])
    return shifted * torch.empty(len(x), 1, 1, 1).uniform_(0.8, 1.2, generator=generator)


def train(name: str, x: Array, y: Array, epochs: int, seed: int) -> nn.Module:
    """Train ``name`` with AdamW, a one-cycle learning rate and label smoothing. The last epoch's weights count: none
    is picked by its accuracy."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    network, shape = module(name), INPUT[name]
    batch, inputs, targets = 64, torch.from_numpy(x), torch.from_numpy(y)
    steps = epochs * (len(x) // batch)
    rate = 1.5e-3 if name == "digits_transformer" else 5e-3
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x), generator=generator)[: len(x) // batch * batch].split(batch):
            given = inputs[chosen] if name == "digits_segment" else augmented(inputs[chosen], generator)
            logits = network(given.reshape(batch, *shape))
            loss = functional.cross_entropy(logits, targets[chosen], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return network.eval()


def logits(network: nn.Module, name: str, x: Array) -> Array:
    with torch.no_grad():
        return np.asarray(network(torch.from_numpy(x.reshape(len(x), *INPUT[name]))).numpy())


def mean_iou(found: Array, wanted: Array) -> float:
    """Intersection over union of each class, averaged."""
    both = [
        ((found == c) & (wanted == c)).sum() / max(1, ((found == c) | (wanted == c)).sum()) for c in range(CLASSES + 1)
    ]
    return float(np.mean(both))


def export(network: nn.Module, name: str, path: Path, x: Array) -> None:
    """Write the trained network as ONNX and make sure that it computes what torch does: InternalError if it does
    not."""
    import onnxruntime

    state = {k: v.numpy() for k, v in network.state_dict().items() if not k.endswith("num_batches_tracked")}
    path.write_bytes(build(name, state).SerializeToString(deterministic=True))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    want, got = logits(network, name, x), session.run(None, {"x": x.reshape(len(x), *INPUT[name])})[0]
    if (worst := float(np.abs(want - got).max())) > 1e-3:
        raise InternalError(f"{path.name} differs from the trained network by {worst}")


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option(
    "--epochs", type=int, default=None, help="Default: 120; 240 for digits_transformer, 30 for digits_segment."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(trained.__file__).parent,
    help="Folder to write to.",
)
def main(names: tuple[str, ...], epochs: int | None, seed: int, output: Path) -> None:
    """Train NAMES (all of them by default) and write them with their data and manifest."""
    torch.set_num_threads(1)  # the order of summation, and so the weights, then depend on the processor alone
    train_x, train_y, test_x, test_y = split()
    output.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(output / DATA, x=test_x, y=test_y, calibration=train_x[:CALIBRATION])
    scene_x, scene_y = scenes(train_x, train_y, 2048, seed=1)
    held_x, held_y = scenes(test_x, test_y, HELD_OUT_SCENES, seed=2)
    np.savez_compressed(output / SCENES, x=held_x, y=held_y, calibration=scene_x[:CALIBRATION])
    sixteenths = np.rint(train_x * 16).astype(np.uint8)
    classes = scene_y[:CALIBRATION]
    np.savez_compressed(
        output / TRAINING, x=sixteenths, y=train_y.astype(np.uint8), scenes=scene_x[:CALIBRATION], classes=classes
    )
    digits = (train_x, train_y, test_x, test_y)
    several = ((scene_x / 16).astype(np.float32), scene_y.astype(np.int64), (held_x / 16).astype(np.float32), held_y)
    path = output / "manifest.json"
    entries: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in names or NAMES:
        segments = name == "digits_segment"
        fit_x, fit_y, test_x, test_y = several if segments else digits
        passes = epochs or {"digits_segment": 30, "digits_transformer": 240}.get(name, 120)
        network = train(name, fit_x, fit_y, passes, seed)
        export(network, name, output / f"{name}.onnx", test_x)
        right = int((logits(network, name, test_x).argmax(1) == test_y).sum())
        entries[name] = {
            "accuracy": right / test_y.size,
            "right": right,
            "held_out": test_y.size,
            "parameters": sum(p.numel() for p in network.parameters()),
            "input": INPUT[name],
            "trained": {"epochs": passes, "seed": seed, "pictures": len(fit_y), "torch": torch.__version__},
            **(
                {"data": SCENES, "mean_iou": mean_iou(logits(network, name, test_x).argmax(1), test_y)}
                if segments
                else {}
            ),
        }
        what = "pixels" if segments else "digits"
        click.echo(f"{name}: {right} of {test_y.size} held-out {what} right ({right / test_y.size:.2%})")
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
