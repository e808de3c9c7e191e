"""Preprocessing and postprocessing as operators of the network: adds these operators to an ONNX model.

Each preprocessed input and each postprocessed output gets a local function with its own opset, so that models of any opset
can use it. Its nodes are called ``preprocess/INPUT/resize`` and the like, and every report shows these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import helper

from optdnn.answer_spec import CLASSES, AnswerSpec
from optdnn.errors import UsageError
from optdnn.image_spec import PICTURE_DTYPES, ImageSpec, channels_of
from optdnn.importers.model import Model, Source, open_model
from optdnn.importers.picture_nodes import Nodes, answering, preparing
from optdnn.importers.tensors import element_type
from optdnn.ops.base import Unsupported
from optdnn.ops.exchange import onnx_number
from optdnn.types import dtype_name, is_float

DOMAIN = "optdnn.pictures"
OPSET = 19


def with_pictures(
    source: Source | Model, preprocess: Mapping[str, ImageSpec], postprocess: Mapping[str, AnswerSpec]
) -> Model:
    """The model whose inputs ``preprocess`` take pictures and whose outputs ``postprocess`` give answers, under the same names.

    Raises UsageError for a name that the model does not have, and for an input or output that does not fit the spec.
    """
    model = source if isinstance(source, Model) else open_model(source)
    if not preprocess and not postprocess:
        return model
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    around = _Around(model, proto)
    for name, spec in preprocess.items():
        around.prepare(name, spec)
    for name, answer in postprocess.items():
        around.answer(name, answer, preprocess)
    return replace(model, proto=proto, functions={**model.functions, **around.functions})


class _Around:
    """A copy of a model that gets functions around its inputs and outputs."""

    def __init__(self, model: Model, proto: onnx.ModelProto):
        self.name, self.proto, self.graph = model.name, proto, proto.graph
        self.functions: dict[tuple[str, str, str], onnx.FunctionProto] = {}
        held = {t.name for t in self.graph.initializer}
        self.inputs = {v.name: v for v in self.graph.input if v.name not in held}
        self.names = set(_value_names(self.graph))

    def prepare(self, name: str, spec: ImageSpec) -> None:
        """Input ``name`` becomes the picture, and all its readers read the prepared picture."""
        port = self.inputs.get(name)
        if port is None:
            raise self._unknown("input", name, self.inputs)
        dtype, dims = self._image(port, spec)
        prepared = self._fresh(f"{name}.prepared")
        _rename(self.graph, name, prepared, ports=False)
        nodes = preparing(spec, dtype)
        self.graph.node.insert(0, self._call(f"preprocess/{name}", nodes, {"picture": name}, {"prepared": prepared}))
        port.type.CopyFrom(_picture_type(name, spec, dims))

    def answer(self, name: str, spec: AnswerSpec, preprocess: Mapping[str, ImageSpec]) -> None:
        """Output ``name`` becomes the answer; top-k adds a further output after it."""
        ports = {v.name: v for v in self.graph.output}
        port = ports.get(name)
        if port is None:
            raise self._unknown("output", name, ports)
        dtype = element_type(port.type.tensor_type.elem_type or onnx.TensorProto.FLOAT)
        if not is_float(dtype):
            raise UsageError(
                f"output {name!r} of {self.name} has {dtype_name(dtype)}: postprocessing is for floating-point numbers"
            )
        if name in self.inputs:
            raise UsageError(f"output {name!r} of {self.name} is an input: there is nothing to postprocess")
        if not (spec.softmax or spec.top_k or spec.argmax or spec.boxes):
            return  # only labels
        image = self._image_of_boxes(name, spec, preprocess)
        raw = self._fresh(f"{name}.raw")
        _rename(self.graph, name, raw, ports=False)
        nodes, outputs = answering(spec, dtype, None if image is None else preprocess[image])
        results = [name, *([self._fresh(name + CLASSES)] if len(outputs) > 1 else [])]
        read = {"raw": raw, **({"picture": image} if image else {})}
        made = dict(zip(outputs, results, strict=True))
        self.graph.node.append(self._call(f"postprocess/{name}", nodes, read, made))
        place = [v.name for v in self.graph.output].index(name)
        ends = [onnx.ValueInfoProto(name=n) for n in results]  # their types follow from the nodes
        kept = list(self.graph.output)
        del self.graph.output[:]
        self.graph.output.extend([*kept[:place], *ends, *kept[place + 1 :]])

    def _image_of_boxes(self, name: str, spec: AnswerSpec, preprocess: Mapping[str, ImageSpec]) -> str | None:
        if spec.boxes is None:
            return None
        image = spec.input or (next(iter(preprocess)) if len(preprocess) == 1 else None)
        if image is None or image not in preprocess:
            had = ", ".join(map(repr, preprocess)) or "none"
            raise UsageError(
                f"output {name!r}: boxes need the picture that they are of; preprocessed inputs are {had}",
                hint="--preprocess INPUT=SPEC, and boxes:xyxy,input=INPUT if there are several",
            )
        return image

    def _image(self, port: onnx.ValueInfoProto, spec: ImageSpec) -> tuple[np.dtype[Any], list[Any]]:
        """The element type of an input that takes pictures, and its dimensions as pictures, height and width, channels."""
        tensor = port.type.tensor_type
        try:
            dtype = element_type(tensor.elem_type)
        except Unsupported as error:
            raise UsageError(f"input {port.name!r} of {self.name} takes no pictures: {error}") from error
        dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim]
        if not is_float(dtype) or len(dims) != 4:
            raise UsageError(
                f"input {port.name!r} of {self.name} takes no pictures: it is {dtype_name(dtype)} of {len(dims)} dimensions",
                hint="preprocessing is for inputs of four dimensions in floating point",
            )
        order = (0, 2, 3, 1) if spec.layout == "chw" else (0, 1, 2, 3)
        batch, high, wide, channels = (dims[i] for i in order)
        if isinstance(channels, int) and channels != channels_of(spec.color):
            raise UsageError(
                f"input {port.name!r} of {self.name} has {channels} channels, pictures in {spec.color} have "
                f"{channels_of(spec.color)}",
                hint=f"its dimensions are {dims}; give another color or layout",
            )
        made = spec.out_size
        if made is not None and any(isinstance(a, int) and a != b for a, b in zip((high, wide), made, strict=True)):
            raise UsageError(
                f"input {port.name!r} of {self.name} is {high}x{wide}, the preprocessing makes {made[0]}x{made[1]}",
                hint=f'give "resize" and "crop" that end in [{high}, {wide}]',
            )
        same = spec.resize is None and spec.crop is None
        top, left, bottom, right = spec.pads
        free = [
            n - pad if isinstance(n, int) and same else None for n, pad in ((high, top + bottom), (wide, left + right))
        ]
        if any(n is not None and n < 1 for n in free):
            raise UsageError(f"input {port.name!r} of {self.name} is {high}x{wide}: pad {spec.pad!r} leaves no picture")
        return dtype, [batch, *free]

    def _unknown(self, what: str, name: str, known: Iterable[str]) -> UsageError:
        return UsageError(
            f"{self.name} has no {what} {name!r} to {'pre' if what == 'input' else 'post'}process",
            hint=f"its {what}s are {', '.join(map(repr, known))}",
        )

    def _fresh(self, name: str) -> str:
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name

    def _call(self, name: str, nodes: Nodes, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> onnx.NodeProto:
        """A call, of this name, of a new function. ``inputs`` and ``outputs`` map the function's ports to the model's values."""
        read = dict(inputs)
        for tensor in nodes.constants:
            read[tensor.name] = self._fresh(f"{name}/{tensor.name}")
            own = self.graph.initializer.add()
            own.CopyFrom(tensor)
            own.name = read[tensor.name]
        kind = name.replace("/", "_")
        opsets = [helper.make_opsetid("", OPSET)]
        function = helper.make_function(DOMAIN, kind, list(read), list(outputs), nodes.made, opsets)
        self.functions[(DOMAIN, kind, "")] = function
        self.proto.functions.append(function)
        return helper.make_node(kind, list(read.values()), list(outputs.values()), name=name, domain=DOMAIN)


def _picture_type(name: str, spec: ImageSpec, dims: Sequence[Any]) -> onnx.TypeProto:
    batch, high, wide = dims
    sides = [high or f"{name}.height", wide or f"{name}.width"]
    channels = spec.input.channels
    shape = [batch, *sides, channels] if spec.input.layout == "hwc" else [batch, channels, *sides]
    return helper.make_tensor_type_proto(onnx_number(PICTURE_DTYPES[spec.input.dtype]), shape)


def _value_names(graph: onnx.GraphProto) -> Iterable[str]:
    for v in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        yield v.name
    for node in graph.node:
        yield from node.input
        yield from node.output
        for a in node.attribute:
            for body in (a.g, *a.graphs):
                yield from _value_names(body)


def _rename(graph: onnx.GraphProto, old: str, new: str, *, ports: bool) -> None:
    """Rename a value wherever nodes read or produce it; with ``ports``, also in the graph's lists."""
    for node in graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                if name == old:
                    names[i] = new
        for a in node.attribute:
            for body in (a.g, *a.graphs):
                _rename(body, old, new, ports=True)
    for v in (*graph.value_info, *((*graph.input, *graph.output) if ports else ())):
        if v.name == old:
            v.name = new
