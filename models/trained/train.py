"""Train the shipped networks: ``python -m optdnn.models.trained.train``. Needs the extra ``train``: scikit-learn and
torch.

A quarter of scikit-learn's digits (1,797 pictures of 8x8 pixels) is held out, the same quarter for each network;
training pictures are shifted by up to a pixel and scaled in contrast. The weights leave torch as arrays;
:mod:`optdnn.models.trained.networks` writes the ONNX files.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click
import numpy as np

from optdnn.errors import InternalError, MissingDependency
from optdnn.models.trained import DATA, NAMES
from optdnn.models.trained.networks import CLASSES, EXPANSION, HIDDEN, MOBILE, RESNET, SQUEEZE, build
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
INPUT = {"digits_resnet": [1, 8, 8], "digits_mobile": [1, 8, 8], "digits_gru": [8, 8]}


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


def module(name: str) -> nn.Module:
    if name == "digits_resnet":
        return Convolutional(Residual, RESNET, functional.relu)
    if name == "digits_mobile":
        return Convolutional(Inverted, MOBILE, functional.silu)
    return Rows()


def split() -> tuple[Array, Array, Array, Array]:
    """Training pictures and digits, held-out pictures and digits: float32 (n, 1, 8, 8) in 0 … 1, int64 (n,)."""
    digits = load_digits()
    x = (digits.images[:, None] / 16.0).astype(np.float32)
    parts = train_test_split(x, digits.target.astype(np.int64), test_size=0.25, random_state=0, stratify=digits.target)
    return parts[0], parts[2], parts[1], parts[3]


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
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x), generator=generator)[: len(x) // batch * batch].split(batch):
            logits = network(augmented(inputs[chosen], generator).reshape(batch, *shape))
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
@click.option("--epochs", type=int, default=120, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(__file__).parent,
    help="Folder to write to.",
)
def main(names: tuple[str, ...], epochs: int, seed: int, output: Path) -> None:
    """Train NAMES (all of them by default) and write them with their data and manifest."""
    torch.set_num_threads(1)  # the order of summation, and so the weights, then depend on the processor alone
    train_x, train_y, test_x, test_y = split()
    output.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(output / DATA, x=test_x, y=test_y, calibration=train_x[:CALIBRATION])
    path = output / "manifest.json"
    entries: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in names or NAMES:
        network = train(name, train_x, train_y, epochs, seed)
        export(network, name, output / f"{name}.onnx", test_x)
        right = int((logits(network, name, test_x).argmax(1) == test_y).sum())
        entries[name] = {
            "accuracy": right / len(test_y),
            "right": right,
            "held_out": len(test_y),
            "parameters": sum(p.numel() for p in network.parameters()),
            "input": INPUT[name],
            "trained": {"epochs": epochs, "seed": seed, "pictures": len(train_y), "torch": torch.__version__},
        }
        click.echo(f"{name}: {right} of {len(test_y)} held-out digits right ({right / len(test_y):.2%})")
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
