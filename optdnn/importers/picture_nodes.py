"""The operators that prepare pictures and compute answers, as ONNX nodes of functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from optdnn.answer_spec import AnswerSpec
from optdnn.image_spec import PICTURE_DTYPES, ImageSpec, channels_of, pair
from optdnn.ops.exchange import onnx_number

GRAY = (0.299, 0.587, 0.114)
"""Shares of red, green and blue in the luminance (ITU-R BT.601), the same as in Pillow."""
CUBIC_PILLOW, CUBIC_PLAIN = -0.5, -0.75
"""The cubic filter's coefficient: with antialias as in Pillow and PyTorch, without antialias as in PyTorch and OpenCV."""
_NCHW_OF_HWC, _HWC_OF_NCHW = (0, 3, 1, 2), (0, 2, 3, 1)


@dataclass
class Nodes:
    """The nodes of a function under construction. Its constants become initializers of the model, which the call passes."""

    made: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def op(self, kind: str, inputs: Iterable[str], name: str, **attributes: Any) -> str:
        """The name of the only output of a new node."""
        out = f"{name}.{len(self.made)}"
        self.made.append(helper.make_node(kind, list(inputs), [out], name=name, **attributes))
        return out

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        name = f"constant.{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def ending(self, value: str, name: str) -> Nodes:
        """These nodes, with ``value`` renamed to ``name``; an Identity is added if the last node does not compute ``value``."""
        if self.made and self.made[-1].output[0] == value:
            self.made[-1].output[0] = name
        else:
            self.made.append(helper.make_node("Identity", [value], [name], name=name))
        return self


@dataclass
class Geometry:
    """The placement of a picture by a spec. ``size``, [height, width], and all results are names of int64 values of two
    elements."""

    nodes: Nodes
    spec: ImageSpec
    size: str

    def resized(self) -> str:
        """The size after ``resize``."""
        spec, op, const = self.spec, self.nodes.op, self.nodes.const
        if spec.resize is None:
            return self.size
        if isinstance(spec.resize, int):  # the other side rounded half up
            short = op("ReduceMin", [self.size], "size", keepdims=1)
            twice = op("Mul", [self.size, const([2 * spec.resize])], "size")
            return op("Div", [op("Add", [twice, short], "size"), op("Mul", [short, const([2])], "size")], "size")
        if spec.fit == "stretch":
            return const(spec.resize)
        across = op("Gather", [self.size, const([1, 0])], "size", axis=0)
        twice = op("Mul", [self.size, const([2 * spec.resize[1], 2 * spec.resize[0]])], "size")
        kept = op("Div", [op("Add", [twice, across], "size"), op("Mul", [across, const([2])], "size")], "size")
        return op("Max", [op("Min", [kept, const(spec.resize)], "size"), const([1])], "size")

    def before(self, resized: str) -> str | None:
        """Pixels before a resized picture that has to fill a larger one (``fit`` contain)."""
        if self.spec.fit != "contain" or not isinstance(self.spec.resize, tuple):
            return None
        const, op = self.nodes.const, self.nodes.op
        return op("Div", [op("Sub", [const(self.spec.resize), resized], "size"), const([2])], "size")

    def cropped(self, held: str) -> str | None:
        """The first pixel that ``crop`` keeps of a picture of size ``held``."""
        if self.spec.crop is None:
            return None
        const, op = self.nodes.const, self.nodes.op
        return op("Div", [op("Sub", [held, const(pair(self.spec.crop))], "size"), const([2])], "size")

    def held(self, resized: str) -> str:
        """The size after ``resize`` and its padding."""
        whole = self.spec.fit == "contain" and isinstance(self.spec.resize, tuple)
        return self.nodes.const(self.spec.resize) if whole else resized


def preparing(spec: ImageSpec, dtype: np.dtype[Any]) -> Nodes:
    """The nodes from the value ``picture`` to ``prepared``, which has this dtype. Arithmetic is fp32 (fp64 for an fp64 result)."""
    nodes = Nodes()
    op, const, given = nodes.op, nodes.const, spec.input
    work = np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)
    x = op("Transpose", ["picture"], "transpose", perm=_NCHW_OF_HWC) if given.layout == "hwc" else "picture"
    if {given.color, spec.color} == {"RGB", "BGR"}:  # another view of the picture
        x = op("Gather", [x, const([2, 1, 0])], "color", axis=1)
    if PICTURE_DTYPES[given.dtype] != work:
        x = op("Cast", [x], "cast", to=onnx_number(work))
    x = _grayed(nodes, x, given.color, spec.color, work)
    x = _placed(nodes, x, spec, work)
    mean, scale = _shift_and_scale(spec, work)
    if mean.any():
        x = op("Sub", [x, const(mean, work)], "mean")
    if (scale != 1).any():
        x = op("Mul", [x, const(scale, work)], "scale")
    if dtype != work:
        x = op("Cast", [x], "cast", to=onnx_number(dtype))
    if spec.layout == "hwc":
        x = op("Transpose", [x], "transpose", perm=_HWC_OF_NCHW)
    return nodes.ending(x, "prepared")


def _shift_and_scale(spec: ImageSpec, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """``(x * scale - mean) / std`` as ``(x - shift) * factor``, per channel: with any padding, the factor can move into weights."""
    channels = channels_of(spec.color)
    mean, std = (np.broadcast_to(np.asarray(v, np.float64), (channels,)) for v in (spec.mean, spec.std))
    shape = (1, channels, 1, 1)
    return (mean / spec.scale).astype(dtype).reshape(shape), (spec.scale / std).astype(dtype).reshape(shape)


def _grayed(nodes: Nodes, x: str, given: str, wanted: str, dtype: np.dtype[Any]) -> str:
    """Colors of NCHW as gray, or gray as colors, if the network needs the other one."""
    op, const = nodes.op, nodes.const
    if (given == "L") == (wanted == "L"):
        return x
    if given == "L":
        return op("Concat", [x, x, x], "color", axis=1)
    shares = GRAY if given == "RGB" else GRAY[::-1]
    shared = op("Mul", [x, const(np.reshape(shares, (1, 3, 1, 1)), dtype)], "color")
    return op("ReduceSum", [shared, const([1])], "color", keepdims=1)


def _placed(nodes: Nodes, x: str, spec: ImageSpec, dtype: np.dtype[Any]) -> str:
    """NCHW resized, cropped and padded."""
    op, const = nodes.op, nodes.const
    geometry = Geometry(nodes, spec, op("Shape", [x], "size", start=2, end=4))
    resized = geometry.resized()
    fill = const(spec.pad_value, dtype)
    if spec.resize is not None:
        modes = _resize_modes(spec)
        x = op("Resize", [x, "", "", resized], "resize", axes=(2, 3), **modes)
    before = geometry.before(resized)
    if before is not None:
        after = op("Sub", [op("Sub", [geometry.held(resized), resized], "size"), before], "size")
        pads = op("Concat", [before, after], "size", axis=0)
        x = op("Pad", [x, pads, fill, const([2, 3])], "fit", mode="constant")
    start = geometry.cropped(geometry.held(resized))
    if start is not None and spec.crop is not None:
        size = pair(spec.crop)
        end = op("Add", [start, const(size)], "size")
        x = op("Slice", [x, start, end, const([2, 3])], "crop")
        x = op("Reshape", [x, const([0, 0, *size])], "size")  # its size is fixed, for any size of the picture
    elif spec.fit == "contain" and isinstance(spec.resize, tuple):
        x = op("Reshape", [x, const([0, 0, *spec.resize])], "size")
    if any(spec.pads):
        operands = [x, const(spec.pads), fill, const([2, 3])]
        x = op("Pad", operands, "pad", mode=spec.pad_mode)
    return x


def _resize_modes(spec: ImageSpec) -> dict[str, Any]:
    """Attributes of Resize: the filters of Pillow; without antialias, PyTorch's."""
    if spec.interpolation == "nearest":
        return {"mode": "nearest", "coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"}
    common: dict[str, Any] = {"mode": spec.interpolation, "coordinate_transformation_mode": "half_pixel"}
    if spec.interpolation == "cubic":
        common["cubic_coeff_a"] = CUBIC_PILLOW if spec.antialias else CUBIC_PLAIN
    return {**common, "antialias": 1, "exclude_outside": 1} if spec.antialias else common


def answering(spec: AnswerSpec, dtype: np.dtype[Any], image: ImageSpec | None) -> tuple[Nodes, list[str]]:
    """The nodes from ``raw`` (and, for boxes, ``picture``) to the answer's outputs, and the names of these outputs."""
    nodes = Nodes()
    x = "raw"
    if spec.softmax:
        x = nodes.op("Softmax", [x], "softmax", axis=-1 if spec.axis is None and not spec.argmax else _axis(spec))
    if spec.top_k is not None:
        operands = [x, nodes.const([spec.top_k])]
        top = helper.make_node("TopK", operands, ["answer", "classes"], name="top_k", axis=_axis(spec))
        nodes.made.append(top)
        return nodes, ["answer", "classes"]
    if spec.argmax:
        x = nodes.op("ArgMax", [x], "argmax", axis=_axis(spec), keepdims=0)
    if spec.boxes is not None and image is not None:
        x = _scaled_back(nodes, x, spec, image, dtype)
    return nodes.ending(x, "answer"), ["answer"]


def _axis(spec: AnswerSpec) -> int:
    return spec.axis if spec.axis is not None else 1 if spec.argmax else -1


def _scaled_back(nodes: Nodes, boxes: str, spec: AnswerSpec, image: ImageSpec, dtype: np.dtype[Any]) -> str:
    """Boxes in the network's picture as boxes in the original picture, in pixels and clipped to its borders."""
    op, const = nodes.op, nodes.const
    start = 1 if image.input.layout == "hwc" else 2
    geometry = Geometry(nodes, image, op("Shape", ["picture"], "size", start=start, end=start + 2))
    resized = geometry.resized()
    held = geometry.held(resized)
    corner = const([0, 0])  # the corner of the network's picture in the resized one
    for moved, kind in ((geometry.cropped(held), "Add"), (geometry.before(resized), "Sub")):
        if moved is not None:
            corner = op(kind, [corner, moved], "size")
    corner = op("Sub", [corner, const(image.pads[:2])], "size")
    size = const(pair(image.crop)) if image.crop is not None else held
    top, left, bottom, right = image.pads
    whole = op("Add", [size, const([top + bottom, left + right])], "size")

    def along(value: str) -> str:
        """[height, width] as floats in the order of a box's coordinates."""
        order = [0, 1] if spec.boxes == "yxyx" else [1, 0]
        ordered = op("Gather", [value, const(order)], "size", axis=0)
        return op("Cast", [ordered], "size", to=onnx_number(dtype))

    factor = op("Div", [along(geometry.size), along(resized)], "size")
    first, second = (op("Slice", [boxes, const([k]), const([k + 2]), const([-1])], "boxes") for k in (0, 2))
    corners = spec.boxes in ("xyxy", "yxyx")
    if spec.relative:
        first, second = (op("Mul", [part, along(whole)], "boxes") for part in (first, second))
    first = op("Mul", [op("Add", [first, along(corner)], "boxes"), factor], "boxes")
    second = op("Mul", [op("Add", [second, along(corner)], "boxes") if corners else second, factor], "boxes")
    zero, border = const(0, dtype), along(geometry.size)
    if corners:
        first, second = (op("Min", [op("Max", [part, zero], "boxes"), border], "boxes") for part in (first, second))
    return op("Concat", [first, second], "boxes", axis=-1)
