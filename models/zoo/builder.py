"""Emission of one ONNX graph: scopes, names, parameters, constants, shape arithmetic.

Names are those of ``torch.onnx.export`` (``/layer1/layer1.0/conv1/Conv``, ``layer1.0.conv1.weight``): users meet them in
practice, and a ``state_dict`` of the same architecture fits without renaming. :mod:`optdnn.models.zoo.net` defines the layers
and draws their weights.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from optdnn.errors import UsageError
from optdnn.types import Array

Dims: TypeAlias = tuple["int | str", ...]
Init: TypeAlias = Callable[[np.random.Generator, tuple[int, ...]], Array]
Label: TypeAlias = "str | int"

OPSETS = range(13, onnx.defs.onnx_opset_version() + 1)
"""The opsets a network can be written for: from 13 on, axes of Squeeze and Unsqueeze are inputs."""


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the graph: its name, its shape (a string is a symbolic dimension), and, if the network uses a probe, its value
    for the probe's pictures (:mod:`optdnn.models.zoo.probe`)."""

    name: str
    shape: Dims
    probe: Array | None = None

    @property
    def channels(self) -> int:
        """Extent of axis 1."""
        return self.extent(1)

    def extent(self, axis: int) -> int:
        """The fixed extent of ``axis``; UsageError where it is symbolic, since weights depend on it."""
        dim = self.shape[axis]
        if isinstance(dim, str):
            raise UsageError(f"axis {axis} of {self.name} {self.shape} is symbolic where its extent is needed")
        return dim


class GraphBuilder:
    """Collects nodes, parameters, inputs and outputs, and returns them as a ``ModelProto``.

    ``seed`` fixes all weights: each parameter has a generator of its own, seeded with ``seed`` and the parameter's
    name, so that it does not depend on the order in which layers are added. ``state`` (name -> array), where given,
    supplies every parameter instead; a missing, a wrongly shaped and an unused entry are UsageErrors.
    """

    def __init__(
        self, name: str, *, opset: int = 17, seed: int = 0, state: Mapping[str, Array] | None = None, doc: str = ""
    ) -> None:
        if opset not in OPSETS:
            raise UsageError(
                f"opset {opset} is not one the zoo writes", hint=f"take one from {OPSETS.start} to {OPSETS[-1]}"
            )
        self.name, self.opset, self.seed, self.doc = name, opset, seed, doc
        self._state = state
        self._nodes: list[onnx.NodeProto] = []
        self._params: dict[str, Array] = {}
        self._taken: set[str] = set()
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._labels: list[str] = []
        self._path: list[str] = []
        self._used: Counter[str] = Counter()
        self._rename: dict[str, str] = {}

    # -- scopes and names --------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self, label: Label | None) -> Iterator[None]:
        """A module: its nodes are named ``/…/label/OpType``, its parameters ``….label.weight``.

        An integer is a child of a Sequential (labeled ``parent.0``), None no module of its own (a functional call).
        The second use of one module gets the suffix ``_1`` in node names, not in parameter names.
        """
        if label is None:
            yield
            return
        text = f"{self._labels[-1]}.{label}" if isinstance(label, int) and self._labels else str(label)
        place = "/".join([*self._path, text])
        uses = self._used[place]
        self._used[place] += 1
        self._labels.append(text)
        self._path.append(f"{text}_{uses}" if uses else text)
        try:
            yield
        finally:
            self._labels.pop()
            self._path.pop()

    def _node_name(self, op_type: str) -> str:
        base = "/" + "/".join([*self._path, op_type])
        uses = self._used[base]
        self._used[base] += 1
        return f"{base}_{uses}" if uses else base

    @property
    def seeded(self) -> bool:
        """Whether weights are drawn (and a probe is of use), not given."""
        return self._state is None

    # -- nodes -------------------------------------------------------------------------------------------------------

    def node(
        self, op_type: str, inputs: Sequence[Value | str], *shapes: Dims, probe: Array | None = None, **attrs: Any
    ) -> Value:
        """Add a node with one output of the first of ``shapes``; ``probe`` is that output's."""
        return self.nodes(op_type, inputs, *shapes, probe=probe, **attrs)[0]

    def nodes(
        self, op_type: str, inputs: Sequence[Value | str], *shapes: Dims, probe: Array | None = None, **attrs: Any
    ) -> tuple[Value, ...]:
        """Add a node with one output for each of ``shapes``. A string among ``inputs`` is a tensor's name ("" leaves
        one out)."""
        name = self._node_name(op_type)
        outputs = [f"{name}_output_{i}" for i in range(len(shapes))]
        names = [v.name if isinstance(v, Value) else v for v in inputs]
        self._nodes.append(helper.make_node(op_type, names, outputs, name=name, **attrs))
        return tuple(
            Value(o, s, probe if i == 0 else None) for i, (o, s) in enumerate(zip(outputs, shapes, strict=True))
        )

    def const(self, value: Any, dtype: Any = np.int64) -> Value:
        """A small constant (a shape, a bound, an index) as a Constant node, as the exporter writes it."""
        array = np.asarray(value, dtype)
        return self.node("Constant", [], array.shape, value=numpy_helper.from_array(array))

    def draw(self, leaf: str, shape: Sequence[int], init: Init) -> tuple[str, Array]:
        """The parameter ``leaf`` of the current module, drawn by ``init`` or taken from ``state``. Returns its key
        and value (float32)."""
        key, dims = ".".join([*(label.rsplit(".", 1)[-1] for label in self._labels), leaf]), tuple(shape)
        self._taken.add(key)
        if self._state is None:
            rng = np.random.default_rng([self.seed, zlib.crc32(key.encode())])
            array = np.ascontiguousarray(init(rng, dims), np.float32)
        elif key in self._state:
            array = np.ascontiguousarray(self._state[key], np.float32)
        else:
            raise UsageError(f"{self.name} needs the parameter {key}, which the given state lacks")
        if array.shape != dims:
            raise UsageError(f"parameter {key} has shape {array.shape}, and {self.name} needs {dims}")
        return key, array

    def param(self, leaf: str, shape: Sequence[int], init: Init) -> tuple[str, Array]:
        """:meth:`draw` a parameter and store it under its key."""
        key, array = self.draw(leaf, shape, init)
        return self.weight(key, array), array

    def weight(self, name: str, array: Array) -> str:
        """Store ``array`` as the initializer ``name``."""
        if name in self._params:
            raise UsageError(f"parameter {name} is defined twice in {self.name}")
        self._params[name] = np.ascontiguousarray(array)
        return name

    # -- shape arithmetic --------------------------------------------------------------------------------------------

    def dims(self, source: Value, dims: Dims) -> Value:
        """``dims`` as an int64 vector: a constant, or, where one is symbolic, read from ``source`` with
        Shape -> Gather -> Unsqueeze -> Concat as the exporter does."""
        if not any(isinstance(d, str) for d in dims):
            return self.const(dims)
        parts = []
        for d in dims:
            if isinstance(d, str):
                parts.append(self.node("Unsqueeze", [self.dim(source, d), self.const([0])], (1,)))
            else:
                parts.append(self.const([d]))
        return self.node("Concat", parts, (len(dims),), axis=0)

    def dim(self, source: Value, symbol: str) -> Value:
        """The run-time extent of the axis of ``source`` that carries ``symbol``, as an int64 scalar."""
        shape = self.node("Shape", [source], (len(source.shape),))
        return self.node("Gather", [shape, self.const(source.shape.index(symbol))], (), axis=0)

    def reshape(self, x: Value, dims: Dims, probe: Array | None = None) -> Value:
        """Reshape to ``dims``, whose symbols must be among those of ``x``."""
        fixed = [math.prod(d for d in s if not isinstance(d, str)) for s in (x.shape, dims)]
        symbols = [sorted(d for d in s if isinstance(d, str)) for s in (x.shape, dims)]
        if fixed[0] != fixed[1] or symbols[0] != symbols[1]:
            raise UsageError(f"{x.name} of shape {x.shape} cannot be reshaped to {dims}")
        return self.node("Reshape", [x, self.dims(x, dims)], dims, probe=probe)

    def transpose(self, x: Value, *perm: int) -> Value:
        return self.node("Transpose", [x], tuple(x.shape[p] for p in perm), perm=perm)

    # -- inputs, outputs, the model ----------------------------------------------------------------------------------

    def input(self, name: str, shape: Dims, dtype: Any = np.float32, probe: Array | None = None) -> Value:
        self._inputs.append(
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
        )
        return Value(name, shape, probe)

    def output(self, name: str, value: Value, elem_type: int = TensorProto.FLOAT) -> None:
        """Give ``value`` the public name ``name`` and make it an output."""
        self._rename[value.name] = name
        self._outputs.append(helper.make_tensor_value_info(name, elem_type, value.shape))

    def model(self) -> onnx.ModelProto:
        """The finished model, with the lowest IR version that its opset allows."""
        if self._state is not None and (unused := sorted(set(self._state) - self._taken)):
            raise UsageError(f"the given state has parameters that {self.name} does not: {', '.join(unused[:5])}")
        for node in self._nodes:
            for names in (node.input, node.output):
                for i, name in enumerate(names):
                    names[i] = self._rename.get(name, name)
        opset = helper.make_opsetid("", self.opset)
        model = onnx.ModelProto(
            ir_version=helper.find_min_ir_version_for([opset]), opset_import=[opset], producer_name="optdnn.models"
        )
        graph = model.graph
        graph.name, graph.doc_string = self.name, self.doc
        graph.node.extend(self._nodes)
        graph.input.extend(self._inputs)
        graph.output.extend(self._outputs)
        for name, array in self._params.items():  # in place: VGG-16's weights are 553 MB, and each copy as much again
            tensor = graph.initializer.add(
                name=name, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype)
            )
            tensor.raw_data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        return model
