"""ResNet-50 (torchvision's v1.5: stride in the 3x3) as the convolutions our kernels run.

The downsample convolution of a stage's first block is the second source of that block's last convolution: one GEMM with a
concatenated K instead of two convolutions and an addition.
"""

from __future__ import annotations

from optdnn.runtime.cuda.conv_problem import Problem, Source, space_to_depth

RELU = (("bias",), ("relu",))
ADD_RELU = (("bias",), ("add",), ("relu",))
IMAGE = Source(224, 224, 3, (7, 7), (2, 2), (3, 3, 3, 3))  # the stem as it is; it runs on 2x2 pixels in the channels


def distinct(batch: int) -> dict[Problem, list[str]]:
    """The convolutions and the FC: each problem with the layers that it stands for, in the network's order."""
    found: dict[Problem, list[str]] = {}

    def layer(name: str, channels: int, *sources: Source, stages: tuple[tuple[str], ...] = RELU) -> None:
        found.setdefault(Problem(batch, channels, sources, stages), []).append(name)

    layer("stem", 64, space_to_depth(IMAGE))
    size, channels = 56, 64
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            out, name = size // stride, f"layer{stage + 1}.{block}"
            layer(f"{name}.conv1", width, Source(size, size, channels))
            layer(f"{name}.conv2", width, Source(size, size, width, (3, 3), (stride, stride), (1, 1, 1, 1)))
            last, skip = Source(out, out, width), Source(size, size, channels, (1, 1), (stride, stride))
            if block == 0:
                layer(f"{name}.conv3", width * 4, last, skip)
            else:
                layer(f"{name}.conv3", width * 4, last, stages=ADD_RELU)
            size, channels = out, width * 4
    layer("fc", 1000, Source(1, 1, 2048), stages=(("bias",),))
    return found
