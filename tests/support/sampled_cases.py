"""Images sampled between their pixels: graphs for tests of GridSample, SampledSum and deformable convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.detect import DeformConvAttrs, GridSampleAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from support.net import Net, built

QUERIES, POINTS = 10, 4


def pixels(n: Net, heads: int, width: int, sizes: Sequence[tuple[int, int]]) -> list[Value]:
    """Images [heads, width, H, W] of several sizes. Their channels are contiguous in the rows of one product."""
    rows = [h * w for h, w in sizes]
    x = n.matmul(n.input(1, sum(rows), 16), heads * width)
    parts = n.op("Split", x, n.ints(*rows), outputs=len(rows), attrs=SplitAttrs(1)) if len(rows) > 1 else [x]
    images = []
    for part, (h, w) in zip(parts, sizes, strict=True):
        turned = n.op("Transpose", part, attrs=TransposeAttrs((0, 2, 1)))
        images.append(n.op("Reshape", turned, n.ints(heads, width, h, w)))
    return images


def attention(
    n: Net,
    *,
    heads: int = 2,
    width: int = 8,
    sizes: Sequence[tuple[int, int]] = ((6, 5), (3, 3)),
    stacked: bool = True,
    weighted: bool = True,
    turned: bool = False,
    attrs: GridSampleAttrs | None = None,
    keepdims: bool = False,
) -> list[Value]:
    """Multi-scale deformable attention. ``stacked``: levels are stacked along a separate axis. ``turned``: weights come first."""
    images, found = pixels(n, heads, width, sizes), []
    for k, image in enumerate(images):
        places = n.op("Mul", n.op("Tanh", n.input(heads, QUERIES, POINTS, 2, name=f"places{k}")), 1.2)
        y = n.op("GridSample", image, places, attrs=attrs or GridSampleAttrs())
        found.append(n.op("Unsqueeze", y, n.ints(3)) if stacked else y)
    y = n.op("Concat", *found, attrs=ConcatAttrs(3)) if len(found) > 1 else found[0]
    if stacked:
        y = n.op("Reshape", y, n.ints(heads, width, QUERIES, len(images) * POINTS))
    if weighted:
        scores = n.input(heads, 1, QUERIES, len(images) * POINTS, name="scores")
        weights = n.op("Softmax", scores, attrs=SoftmaxAttrs(3))
        y = n.op("Mul", *((weights, y) if turned else (y, weights)))
    return [n.op("ReduceSum", y, n.ints(-1), attrs=ReduceAttrs(keepdims=keepdims))]


def pictures(n: Net, *, joined: bool | str = False, batch: int = 3, weights: bool = True) -> list[Value]:
    """Deformable attention of several pictures, whose heads are items of the images. ``joined``: they are before the levels are
    split (D-FINE), else after (Deformable DETR). "channels": after, and pixels come last in what is split."""
    heads, width, sizes = 4, 8, ((6, 5), (3, 3))
    rows = [h * w for h, w in sizes]
    x = n.matmul(n.input(batch, sum(rows), 16), heads * width)
    if joined == "channels":
        x = n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 1)))
        x = n.op("Reshape", n.op("Relu", n.op("Reshape", x, n.ints(batch, -1))), n.ints(batch, heads * width, -1))
    elif joined:
        x = n.op("Reshape", x, n.ints(batch, sum(rows), heads, width))
        x = n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 3, 1)))
        x = n.op("Reshape", x, n.ints(batch * heads, width, sum(rows)))
    parts, found = n.op("Split", x, n.ints(*rows), outputs=2, attrs=SplitAttrs(2 if joined else 1)), []
    for k, (part, (h, w)) in enumerate(zip(parts, sizes, strict=True)):
        turned = part if joined else n.op("Transpose", part, attrs=TransposeAttrs((0, 2, 1)))
        image = n.op("Reshape", turned, n.ints(batch * heads, width, h, w))
        places = n.op("Tanh", n.input(batch, QUERIES, heads, POINTS, 2, name=f"places{k}"))
        places = n.op("Transpose", places, attrs=TransposeAttrs((0, 2, 1, 3, 4)))
        places = n.op("Reshape", places, n.ints(batch * heads, QUERIES, POINTS, 2))
        found.append(n.op("GridSample", image, places, attrs=GridSampleAttrs()))
    y = n.op("Concat", *found, attrs=ConcatAttrs(3))
    if weights:
        scores = n.op("Softmax", n.input(batch, QUERIES, heads, 2 * POINTS, name="scores"), attrs=SoftmaxAttrs(3))
        scores = n.op("Transpose", scores, attrs=TransposeAttrs((0, 2, 1, 3)))
        y = n.op("Mul", y, n.op("Reshape", scores, n.ints(batch * heads, 1, QUERIES, 2 * POINTS)))
    y = n.op("ReduceSum", y, n.ints(-1), attrs=ReduceAttrs(False))
    y = n.op("Transpose", n.op("Reshape", y, n.ints(batch, heads * width, QUERIES)), attrs=TransposeAttrs((0, 2, 1)))
    return [n.matmul(y, 16)]


def deformed(
    n: Net,
    *,
    channels: int = 16,
    units: int = 24,
    kernel: tuple[int, int] = (3, 3),
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    group: int = 1,
    mask: bool = True,
    bias: bool = True,
    batch: int = 2,
) -> list[Value]:
    """A deformable convolution. Two other convolutions predict its offsets and its mask."""
    x = n.conv(n.input(batch, 8, 9, 7), channels)
    taps = kernel[0] * kernel[1] * groups
    pads = tuple(dilation * (k // 2) for k in kernel) * 2
    attrs = ConvAttrs((stride, stride), pads, (dilation, dilation))

    def predicted(count: int) -> Value:
        w = n.random(count, channels, *kernel, scale=0.1)
        return n.op("Conv", x, w, attrs=attrs)  # type: ignore[no-any-return]

    given = [x, n.random(units, channels // group, *kernel, scale=0.1), predicted(2 * taps)]
    given += [n.random(units) if bias else None] if bias or mask else []
    given += [n.op("Sigmoid", predicted(taps))] if mask else []
    deform = DeformConvAttrs((stride, stride), pads, (dilation, dilation), group, groups)
    return [n.conv(n.op("Relu", n.op("DeformConv", *given, attrs=deform)), 8)]


def warped(n: Net, channels: int = 16, **attrs: Any) -> list[Value]:
    """Features that are moved by a flow, between convolutions."""
    x = n.conv(n.input(2, 8, 6, 5), channels)
    places = n.op("Mul", n.op("Tanh", n.input(2, 4, 3, 2, name="places")), 1.3)
    return [n.conv(n.op("GridSample", x, places, attrs=GridSampleAttrs(**attrs)), 8)]


def nearest(n: Net) -> list[Value]:
    """ "nearest" is not continuous: positions keep away from the edges of pixels."""
    x = n.conv(n.input(1, 8, 6, 5), 16)
    places = n.op("Div", n.op("Floor", n.op("Mul", n.input(1, 4, 3, 2, name="places"), 3.0)), 4.0)
    return [n.conv(n.op("GridSample", x, places, attrs=GridSampleAttrs("nearest", "border", True)), 8)]


CASES: dict[str, Callable[[Net], list[Value]]] = {
    "levels": attention,
    "joined": lambda n: attention(n, stacked=False, turned=True),
    "one_level": lambda n: attention(n, sizes=((6, 5),), width=4, keepdims=True),
    "plain_sum": lambda n: attention(n, weighted=False),
    "odd_channels": lambda n: attention(n, width=5),
    "border": lambda n: attention(n, attrs=GridSampleAttrs("linear", "border", True)),
    "reflection": lambda n: attention(n, attrs=GridSampleAttrs("cubic", "reflection")),
    "pictures": pictures,
    "pictures_joined": lambda n: pictures(n, joined=True),
    "pictures_channels": lambda n: pictures(n, joined="channels"),
    "pictures_plain": lambda n: pictures(n, weights=False),
    "deformed": deformed,
    "no_mask": lambda n: deformed(n, mask=False),
    "no_bias": lambda n: deformed(n, bias=False, kernel=(3, 1), stride=2),
    "offset_groups": lambda n: deformed(n, groups=2, dilation=2),
    "offset_groups_of_one": lambda n: deformed(n, groups=4, batch=1),
    "warped": warped,
    "warped_cubic": lambda n: warped(n, mode="cubic", align_corners=True),
    "warped_border": lambda n: warped(n, padding_mode="border"),
    "warped_reflection": lambda n: warped(n, 8, padding_mode="reflection"),
    "nearest": nearest,
}


def graph_of(name: str) -> Graph:
    return built(CASES[name])
