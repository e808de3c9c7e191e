"""Train the shipped language model: ``python -m benchmarks.training.language``. Needs torch and the extra ``text``.

The text is Python's own language reference, as ``help()`` shows it (``pydoc_data.topics``): half a megabyte. The tokenizer is
byte-pair encoding of 768 tokens, trained on it. A twentieth of the topics is held out.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.training.language_network import Sizes, angles, build
from optdnn.errors import InternalError, MissingDependency
from optdnn.models import trained
from optdnn.types import Array

try:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from torch import Tensor, nn
    from torch.nn import functional
except ImportError as error:
    raise MissingDependency(str(error.name), "train", "to train the shipped language model") from None

END = "<end>"
"""Stands between topics: token 0."""
BATCH, LENGTH = 12, 128


def texts() -> tuple[list[str], list[str]]:
    """Topics to train on, and those held out."""
    from pydoc_data.topics import topics

    found = [text.strip() for _, text in sorted(topics.items())]
    return [t for k, t in enumerate(found) if k % 20 != 7], found[7::20]


def tokenizer(found: list[str], vocabulary: int) -> Any:
    """Byte-pair encoding of these texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted({c for text in found for c in text if ord(c) < 128})
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(found, trainer)
    return made


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight
        return y


class Layer(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.sizes = s
        self.norm1, self.norm2 = Norm(s.width), Norm(s.width)
        self.q, self.out = (nn.Linear(s.width, s.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(s.width, s.groups * s.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(s.width, s.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(s.inner, s.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s, (b, n, _) = self.sizes, x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(b, n, -1, s.size).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        k, v = (t.repeat_interleave(s.heads // s.groups, 1) for t in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, -1))
        y = self.norm2(x)
        z: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return z


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Language(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(s.vocabulary, s.width)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = Norm(s.width)
        turns = torch.from_numpy(angles(s)).float()
        self.register_buffer("cos", turns.cos(), persistent=False)
        self.register_buffer("sin", turns.sin(), persistent=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.6 / math.sqrt(p.shape[1]))
        nn.init.normal_(self.words.weight, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        x, n = self.words(tokens), tokens.shape[1]
        cos, sin = self.get_buffer("cos")[:n], self.get_buffer("sin")[:n]
        for layer in self.layers:
            x = layer(x, cos, sin)
        y: Tensor = self.norm(x) @ self.words.weight.T
        return y


def train(sizes: Sizes, tokens: Array, steps: int, seed: int) -> Language:
    """Train with AdamW and a one-cycle learning rate on random stretches of the text."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    network, text = Language(sizes), torch.from_numpy(tokens)
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3, weight_decay=0.05, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for step in range(steps):
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=generator)
        rows = torch.stack([text[s : s + LENGTH + 1] for s in starts.tolist()])
        loss = functional.cross_entropy(network(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            click.echo(f"step {step}: loss {loss.item():.3f}", err=True)
    network.eval()
    return network


def export(network: Language, sizes: Sizes, path: Path, tokens: Array) -> None:
    """Write the model, and make sure that it computes what torch does. Raises InternalError where it does not."""
    import onnxruntime

    with torch.no_grad():
        for p in network.parameters():
            p.copy_(p.half().float())  # as the file stores them
        wanted = network(torch.from_numpy(tokens[None])).numpy()
    state = {k: v.numpy() for k, v in network.state_dict().items()}
    path.write_bytes(build(sizes, state).SerializeToString(deterministic=True))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {"input_ids": tokens[None], "attention_mask": np.ones((1, len(tokens)), np.int64)}
    for port in session.get_inputs()[2:]:
        feeds[port.name] = np.zeros((1, sizes.groups, 0, sizes.size), np.float32)
    worst = float(np.abs(session.run(["logits"], feeds)[0] - wanted).max())
    if worst > 1e-3:
        raise InternalError(f"{path.name} differs from the trained network by {worst}")


@click.command()
@click.option("--steps", type=int, default=600, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), default=Path(trained.__file__).parent)
def main(steps: int, seed: int, output: Path) -> None:
    """Train the model and its tokenizer, and write them with what is said of them."""
    torch.set_num_threads(1)  # the order of summation, and so the weights, then depend on the processor alone
    sizes, (found, held_out) = Sizes(), texts()
    codes = tokenizer(found, sizes.vocabulary)
    codes.save(str(output / "language.tokenizer.json"), pretty=False)
    stream = np.array([t for text in found for t in (*codes.encode(text).ids, 0)], np.int64)
    network = train(sizes, stream, steps, seed)
    unseen = np.array([t for text in held_out for t in (*codes.encode(text).ids, 0)], np.int64)
    export(network, sizes, output / "language.onnx", unseen[:100])
    rows = torch.from_numpy(unseen[: (len(unseen) - 1) // LENGTH * LENGTH + 1])
    with torch.no_grad():
        logits = network(rows[:-1].view(-1, LENGTH)).flatten(0, 1)
    told = {
        "loss": float(functional.cross_entropy(logits, rows[1:])),
        "next_token": float((logits.argmax(-1) == rows[1:]).float().mean()),
        "held_out_tokens": len(unseen), "training_tokens": len(stream),
        "vocabulary": sizes.vocabulary, "positions": sizes.positions,
        "parameters": sum(p.numel() for p in network.parameters()), "steps": steps, "seed": seed,
        "text": f"pydoc_data.topics of Python {sys.version.split()[0]}", "torch": torch.__version__,
    }  # fmt: skip
    (output / "language.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    click.echo(f"held-out loss {told['loss']:.3f}, {told['next_token']:.1%} of next tokens right")


if __name__ == "__main__":
    main()
