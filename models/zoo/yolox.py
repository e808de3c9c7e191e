"""YOLOX-s: Ge et al., "YOLOX: Exceeding YOLO Series in 2021", 2021: CSPDarknet, PAFPN neck, decoupled anchor-free head.

Convolution + BatchNormalization + SiLU throughout; the stem takes every second pixel into channels ("focus"); boxes are
decoded in the graph. ``nms`` adds NonMaxSuppression (ONNX opset 11) after them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from optdnn.models.zoo import probe
from optdnn.models.zoo.builder import Value
from optdnn.models.zoo.common import ImageOptions, image
from optdnn.models.zoo.net import BEFORE_SILU, BRANCH, Net, make_divisible, on_probe

STRIDES = (8, 16, 32)


@dataclass(frozen=True)
class YoloxOptions(ImageOptions):
    nms: bool = False


def yolox_s(net: Net, o: YoloxOptions) -> None:
    """83 convolutions, 74 BatchNormalizations; 8.97 M parameters. ``image_size`` is a multiple of 32.

    Output ``y``, float32 (batch, anchors, 5 + num_classes): center x, center y, width, height in pixels, then
    objectness and class probabilities. With ``nms`` also ``selected``, int64 (boxes, 3): batch, class and anchor of
    each box kept.
    """
    x = image(net, o, multiple=32, probe=(8, 224))
    blocks = _Blocks(net, o)
    channels = [make_divisible(c * 0.5 * o.width) for c in (64, 128, 256, 512, 1024)]
    with net.scope("backbone"):
        with net.scope("backbone"):
            features = blocks.darknet(x, channels)
        features = blocks.neck(features, channels[2:])
    with net.scope("head"):
        y = blocks.head(features, make_divisible(256 * 0.5 * o.width), o.num_classes)
    if o.nms:
        net.output("selected", _select(net, y), TensorProto.INT64)
    net.output("y", y)


class _Blocks:
    def __init__(self, net: Net, options: YoloxOptions) -> None:
        self.net, self.options = net, options

    def unit(
        self,
        x: Value,
        channels: int,
        kernel: int,
        name: str | int,
        *,
        stride: int = 1,
        scales: tuple[float, float] = BEFORE_SILU,
    ) -> Value:
        net, names = self.net, ("conv", "bn", "act")
        with net.scope(name):
            return net.unit(x, channels, kernel, names, net.silu, stride=stride, eps=1e-3, momentum=0.97, scales=scales)

    def csp(self, x: Value, channels: int, blocks: int, name: str | int, *, shortcut: bool = True) -> Value:
        """Cross-stage partial layer: half of the channels pass through bottlenecks, half around them (Wang et al.,
        CSPNet, 2019)."""
        net, hidden = self.net, channels // 2
        with net.scope(name):
            y = self.unit(x, hidden, 1, "conv1")
            around = self.unit(x, hidden, 1, "conv2")
            with net.scope("m"):
                for i in range(self.options.repeats(blocks)):
                    with net.scope(i):
                        z = self.unit(y, hidden, 1, "conv1")
                        z = self.unit(z, hidden, 3, "conv2", scales=BRANCH if shortcut else BEFORE_SILU)
                        y = net.add(z, y) if shortcut else z
            return self.unit(net.concat([y, around]), channels, 1, "conv3")

    def darknet(self, x: Value, channels: list[int]) -> list[Value]:
        """Features at strides 8, 16 and 32."""
        net = self.net
        with net.scope("stem"):
            columns = [net.every_other(x, 3, start) for start in (0, 1)]
            corners = [net.every_other(column, 2, start) for column in columns for start in (0, 1)]
            x = self.unit(net.concat(corners), channels[0], 3, "conv")
        outputs = []
        for i, (out, blocks) in enumerate(zip(channels[1:], (1, 3, 3, 1), strict=True), 2):
            with net.scope(f"dark{i}"):
                x = self.unit(x, out, 3, 0, stride=2)
                x = self.csp(x, out, blocks, 1) if i < 5 else self.csp(self.spp(x, out), out, blocks, 2, shortcut=False)
            outputs.append(x)
        return outputs[1:]

    def spp(self, x: Value, channels: int) -> Value:
        """Spatial pyramid pooling (He et al., 2014) with windows of 5, 9 and 13."""
        net = self.net
        with net.scope(1):
            x = self.unit(x, x.channels // 2, 1, "conv1")
            with net.scope("m"):
                pools = [net.max_pool(x, k, stride=1, padding=k // 2, name=i) for i, k in enumerate((5, 9, 13))]
            return self.unit(net.concat([x, *pools]), channels, 1, "conv2")

    def neck(self, features: list[Value], channels: list[int]) -> list[Value]:
        """Path aggregation (Liu et al., PANet, 2018): top-down, then bottom-up."""
        net, (c3, c4, c5) = self.net, features
        top = self.unit(c5, channels[1], 1, "lateral_conv0")
        p4 = self.csp(net.concat([self.upsample(top), c4]), channels[1], 1, "C3_p4", shortcut=False)
        middle = self.unit(p4, channels[0], 1, "reduce_conv1")
        p3 = self.csp(net.concat([self.upsample(middle), c3]), channels[0], 1, "C3_p3", shortcut=False)
        down = self.unit(p3, channels[0], 3, "bu_conv2", stride=2)
        n4 = self.csp(net.concat([down, middle]), channels[1], 1, "C3_n3", shortcut=False)
        down = self.unit(n4, channels[1], 3, "bu_conv1", stride=2)
        n5 = self.csp(net.concat([down, top]), channels[2], 1, "C3_n4", shortcut=False)
        return [p3, n4, n5]

    def upsample(self, x: Value) -> Value:
        """Twice the size, nearest neighbor (Resize, opset 11, the exporter's attributes)."""
        net = self.net
        with net.scope("upsample"):
            shape = (*x.shape[:2], 2 * x.extent(2), 2 * x.extent(3))
            scales = net.const([1.0, 1.0, 2.0, 2.0], np.float32)
            return net.node(
                "Resize", [x, "", scales], shape, probe=on_probe(probe.double, x), coordinate_transformation_mode="asymmetric",
                cubic_coeff_a=-0.75, mode="nearest", nearest_mode="floor",
            )  # fmt: skip

    def head(self, features: list[Value], hidden: int, classes: int) -> Value:
        """Decoupled head on each level, all levels joined, boxes decoded: (batch, anchors, 5 + classes)."""
        net = self.net
        levels, grids, strides = [], [], []
        for level, (x, stride) in enumerate(zip(features, STRIDES, strict=True)):
            with net.scope("stems"):
                x = self.unit(x, hidden, 1, level)
            cls, reg = self.tower(x, "cls_convs", level), self.tower(x, "reg_convs", level)
            scores = net.sigmoid(self.predict(cls, classes, "cls_preds", level), name=None)
            box = self.predict(reg, 4, "reg_preds", level, spread=0.5)
            seen = net.sigmoid(self.predict(reg, 1, "obj_preds", level), name=None)
            y = net.concat([box, seen, scores])
            height, width = y.extent(2), y.extent(3)
            levels.append(net.reshape(y, (y.shape[0], y.channels, height * width)))
            rows, columns = np.divmod(np.arange(height * width), width)
            grids.append(np.stack([columns, rows], 1))
            strides.append(np.full((height * width, 1), stride))
        y = net.transpose(net.concat(levels, axis=2), 0, 2, 1)
        grid, scale = (
            net.const(np.concatenate(grids)[None], np.float32),
            net.const(np.concatenate(strides)[None], np.float32),
        )
        xy, wh = net.slice(y, 2, 0, 2), net.slice(y, 2, 2, 4)
        center = net.node("Mul", [net.node("Add", [xy, grid], xy.shape), scale], xy.shape)
        extent = net.node("Mul", [net.node("Exp", [wh], wh.shape), scale], wh.shape)
        return net.concat([center, extent, net.slice(y, 2, 4, y.extent(2))], axis=2)

    def tower(self, x: Value, name: str, level: int) -> Value:
        with self.net.scope(name), self.net.scope(level):
            return self.unit(self.unit(x, x.channels, 3, 0), x.channels, 3, 1)

    def predict(self, x: Value, channels: int, name: str, level: int, spread: float = 1.0) -> Value:
        with self.net.scope(name):
            return self.net.conv(x, channels, 1, bias=True, spread=spread, name=level)


def _select(net: Net, y: Value) -> Value:
    """Corners from centers and extents, one score for each class, NonMaxSuppression: at most 100 boxes of each
    class."""
    with net.scope("nms"):
        xy, wh = net.slice(y, 2, 0, 2), net.slice(y, 2, 2, 4)
        half = net.binary("Mul", wh, 0.5)
        boxes = net.concat([net.node("Sub", [xy, half], xy.shape), net.node("Add", [xy, half], xy.shape)], axis=2)
        seen, classes = net.slice(y, 2, 4, 5), net.slice(y, 2, 5, y.extent(2))
        scores = net.transpose(net.node("Mul", [seen, classes], classes.shape), 0, 2, 1)
        limits = [net.const([100]), net.const([0.45], np.float32), net.const([0.25], np.float32)]
        return net.node("NonMaxSuppression", [boxes, scores, *limits], ("boxes", 3), center_point_box=0)
