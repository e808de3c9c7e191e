"""ResNet-50 (torchvision's v1.5: stride in the 3x3) as the convolutions our kernels run, with random folded weights.

The downsample convolution of a stage's first block is the second source of that block's last convolution: one GEMM with a
concatenated K instead of two convolutions and an addition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from optdnn.runtime.cuda.conv_problem import Problem, Source, space_to_depth

RELU = (("bias",), ("relu",))
ADD_RELU = (("bias",), ("add",), ("relu",))
IMAGE = Source(224, 224, 3, (7, 7), (2, 2), (3, 3, 3, 3))  # the stem as it is; it runs on 2x2 pixels in the channels


@dataclass(frozen=True)
class Step:
    """One convolution: buffers by name; ``weights`` are keys into the parameters."""

    name: str
    problem: Problem
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    output: str
    residual: str = ""


def steps(batch: int) -> list[Step]:
    """All convolutions and the FC, in order. Pooling goes after "stem" and before "fc"."""
    found = [Step("stem", Problem(batch, 64, (space_to_depth(IMAGE),), RELU), ("image",), ("stem",), "stem")]
    size, channels, x = 56, 64, "x0"
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            out, y, name = size // stride, "x1" if x == "x0" else "x0", f"layer{stage + 1}.{block}"
            found.append(
                Step(
                    f"{name}.conv1",
                    Problem(batch, width, (Source(size, size, channels),), RELU),
                    (x,),
                    (f"{name}.conv1",),
                    "a",
                )
            )
            three = Source(size, size, width, (3, 3), (stride, stride), (1, 1, 1, 1))
            found.append(Step(f"{name}.conv2", Problem(batch, width, (three,), RELU), ("a",), (f"{name}.conv2",), "b"))
            last = Source(out, out, width)
            if block == 0:
                skip = Source(size, size, channels, (1, 1), (stride, stride))
                problem = Problem(batch, width * 4, (last, skip), RELU)
                found.append(Step(f"{name}.conv3", problem, ("b", x), (f"{name}.conv3", f"{name}.down"), y))
            else:
                found.append(
                    Step(
                        f"{name}.conv3", Problem(batch, width * 4, (last,), ADD_RELU), ("b",), (f"{name}.conv3",), y, x
                    )
                )
            size, channels, x = out, width * 4, y
    found.append(Step("fc", Problem(batch, 1000, (Source(1, 1, 2048),), (("bias",),)), ("pooled",), ("fc",), "logits"))
    return found


def parameters(seed: int = 0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Weight (OIHW, fp16) and bias (fp32) by name: as after batch-norm folding, scaled so that activations keep their size."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    made: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for step in steps(1):
        for key, source in zip(step.weights, (IMAGE,) if step.name == "stem" else step.problem.sources, strict=True):
            fan_in = source.channels * source.kernel[0] * source.kernel[1]
            gain = 0.7 if key.endswith("conv3") else 1.0 if key.endswith("down") else 2.0
            shape = (step.problem.channels, source.channels, *source.kernel)
            weight = torch.randn(shape, generator=generator, device="cuda") * (gain / fan_in) ** 0.5
            made[key] = (weight.half(), torch.randn(shape[0], generator=generator, device="cuda") * 0.1)
    return made


def forward(x: torch.Tensor, params: dict[str, tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """The same network in PyTorch, in ``dtype``: the reference."""
    functional = torch.nn.functional

    def conv(name: str, value: torch.Tensor, stride: int = 1, padding: int = 0) -> torch.Tensor:
        weight, bias = params[name]
        return functional.conv2d(value, weight.to(dtype), bias.to(dtype), stride, padding)

    x = torch.relu(conv("stem", x.to(dtype), 2, 3))
    x = functional.max_pool2d(x, 3, 2, 1)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            name, stride = f"layer{stage + 1}.{block}", 2 if stage > 0 and block == 0 else 1
            y = torch.relu(conv(f"{name}.conv1", x))
            y = torch.relu(conv(f"{name}.conv2", y, stride, 1))
            skip = conv(f"{name}.down", x, stride) if block == 0 else x
            x = torch.relu(conv(f"{name}.conv3", y) + skip)
    weight, bias = params["fc"]
    return functional.linear(x.mean((2, 3)), weight.flatten(1).to(dtype), bias.to(dtype))


def images(batch: int, seed: int) -> torch.Tensor:
    """NCHW fp16 images that differ in more than noise: random low-frequency colour fields, so that logits depend on them."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    coarse = (
        torch.randn((batch, 3, 5, 5), generator=generator, device="cuda") * 2
        + torch.randn((batch, 3, 1, 1), generator=generator, device="cuda") * 2
    )
    fine = torch.randn((batch, 3, 224, 224), generator=generator, device="cuda") * 0.3
    return (torch.nn.functional.interpolate(coarse, (224, 224), mode="bilinear") + fine).half()
