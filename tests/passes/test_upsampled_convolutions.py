"""upsampled_convolutions: a convolution of repeated pixels is a transposed convolution of the pixels themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph
from optdnn.ops.resize import ResizeAttrs
from optdnn.passes.upsampled_convolutions import UpsampledConvolutions

UPSAMPLED = UpsampledConvolutions()
ASYMMETRIC = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}


def decoder(
    *, scales: Sequence[float] = (2, 2), sizes: bool = False, kernel: int | Sequence[int] = 3, pads: int | Sequence[int] = 1,
    readers: int = 1, channels: int = 4, inside: int = 8, strides: int = 1, dilations: int = 1,
    group: int = 1, bias: bool = True, auto_pad: str = "NOTSET", batch_scale: float = 1.0, **resize: Any,
) -> Graph:  # fmt: skip
    n = Net()
    shape = (2, inside, *(5, 6, 3)[: len(scales)])
    x = n.input(*shape)
    all_scales = np.asarray((batch_scale, 1.0, *scales), np.float32)
    given = (
        [None, None, n.ints(*(int(a * b) for a, b in zip(shape, all_scales, strict=True)))]
        if sizes
        else [None, all_scales]
    )
    y = n.op("Resize", x, *given, attrs=ResizeAttrs(**{**ASYMMETRIC, **resize}))
    others = [n.op("Neg", y) for _ in range(readers - 1)]
    made = n.conv(
        y, channels, kernel, pads=pads, strides=strides, dilations=dilations, group=group, bias=bias, auto_pad=auto_pad
    )
    return n.done(n.op("Relu", made), *others)


@pytest.mark.parametrize(
    ("options", "strides", "cuts", "taps"),
    [
        ({}, (2, 2), (1, 1, 1, 1), (4, 4)),
        ({"bias": False}, (2, 2), (1, 1, 1, 1), (4, 4)),
        ({"sizes": True}, (2, 2), (1, 1, 1, 1), (4, 4)),
        (
            {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_floor"},
            (2, 2),
            (1,) * 4,
            (4, 4),
        ),
        ({"kernel": 5, "pads": 2}, (2, 2), (2,) * 4, (6, 6)),
        ({"kernel": 3, "pads": 0}, (2, 2), (2,) * 4, (4, 4)),
        ({"kernel": 4, "pads": (1, 1, 2, 2)}, (2, 2), (2, 2, 1, 1), (5, 5)),
        ({"kernel": 3, "pads": (0, 2, 1, 0)}, (2, 2), (2, 0, 1, 2), (4, 4)),
        ({"kernel": 3, "auto_pad": "SAME_UPPER", "pads": 0}, (2, 2), (1,) * 4, (4, 4)),
        ({"scales": (3, 3)}, (3, 3), (1,) * 4, (5, 5)),
        ({"scales": (4, 2)}, (4, 2), (1,) * 4, (6, 4)),
        ({"scales": (1, 2)}, (1, 2), (1,) * 4, (3, 4)),
        ({"scales": (2, 1), "kernel": (3, 1), "pads": (1, 0, 1, 0)}, (2, 1), (1, 0, 1, 0), (4, 1)),
        ({"scales": (2, 2), "kernel": (3, 1), "pads": (1, 0, 1, 0)}, (2, 2), (1, 0, 1, 0), (4, 2)),
        ({"group": 8, "channels": 8}, (2, 2), (1,) * 4, (4, 4)),
        ({"scales": (2,)}, (2,), (1, 1), (4,)),
    ],
)
def test_the_image_is_not_enlarged(
    options: dict[str, Any], strides: tuple[int, ...], cuts: tuple[int, ...], taps: tuple[int, ...]
) -> None:
    graph, _ = check_pass(UPSAMPLED, decoder(**options), changes=1, kinds={"ConvTranspose": 1, "Relu": 1})
    (made,) = (op for op in graph.ops() if op.kind == "ConvTranspose")
    assert (made.attrs.strides, made.attrs.pads) == (strides, cuts)
    assert graph.constant_value(made.inputs[1]).shape[2:] == taps
    assert (made.input(2) is not None) == options.get("bias", True)


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"readers": 2}, "is used 2 times"),
        ({"scales": (8, 8)}, "enlarges the image 8 times"),
        ({"strides": 2}, "strides or dilations"),
        ({"dilations": 2}, "strides or dilations"),
        ({"group": 2}, "2 groups of channels"),
        ({"pads": 3}, "wider than its filter"),
    ],
)
def test_refusals(options: dict[str, Any], because: str) -> None:
    check_refused(UPSAMPLED, decoder(**options), because=because)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "linear"},
        {"scales": (1.5, 1.5)},
        {"scales": (0.2, 0.5)},
        {"nearest_mode": "ceil"},
        {"coordinate_transformation_mode": "align_corners"},
        {"batch_scale": 2.0},
        {"kernel": 1, "pads": 0},
        {"scales": (2, 2, 2)},
    ],
)
def test_other_networks_stay(options: dict[str, Any]) -> None:
    check_untouched(UPSAMPLED, decoder(**options))


@pytest.mark.parametrize(
    ("precision", "target"), [("fp16", "cuda:sm_90a"), ("fp16", "cuda:sm_80"), ("fp32", "cuda:sm_90a")]
)
def test_the_program_enlarges_no_image(precision: str, target: str) -> None:
    n = Net()
    y = n.conv(n.input(1, 16, 16, 16), 32)
    y = n.op("Resize", y, None, np.asarray((1, 1, 2, 2), np.float32), attrs=ResizeAttrs(**ASYMMETRIC))
    program = check_simulated(n.done(n.conv(n.op("Relu", n.conv(y, 32, bias=True)), 8)), precision, target=target)
    found = kinds(program)
    assert "Resize" not in found
    assert ("BlocksToSpace" in found) == (target == "cuda:sm_80")
    if target == "cuda:sm_90a":
        assert found.count("ConvBlocks") == 1
