"""Lowering for `cpu` and `reference`: from the optimized graph to a program of steps over buffers.

A step is a region of the graph that a library runs, or one operator on its NumPy kernel. The constants of library steps are blobs
next to the library's model; equal constants share one blob.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optdnn.dim import Dim
from optdnn.errors import UnsupportedError
from optdnn.ir.export_onnx import ExportedModel
from optdnn.ir.extract import Region
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.unknown_ranks import unknown_rank
from optdnn.ops.fused import plain_attrs
from optdnn.runtime.cpu.library import Settings
from optdnn.runtime.program import Buffer, Program, Step
from optdnn.runtime.steps.reference import reference_step
from optdnn.types import Array, TensorSpec, TensorType


@dataclass
class Lowering:
    """A program under construction. Buffers are created on first use; equal constants share one blob."""

    graph: Graph
    target: str
    precision: str
    buffers: list[Buffer] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    blobs: list[Array] = field(default_factory=list)
    _numbers: dict[Value, int] = field(default_factory=dict)
    _blob_of: dict[tuple[str, tuple[int, ...], bytes], int] = field(default_factory=dict)

    def blob(self, array: Array) -> int:
        """The number of the blob with this content."""
        array = np.ascontiguousarray(array).reshape(array.shape)
        digest = hashlib.sha256(array.reshape(-1).view(np.uint8).data if array.size else b"").digest()
        key = (array.dtype.str if array.dtype.kind != "V" else array.dtype.name, array.shape, digest)
        if key not in self._blob_of:
            self._blob_of[key] = len(self.blobs)
            self.blobs.append(array)
        return self._blob_of[key]

    def buffer(self, value: Value) -> int:
        """The number of a value's buffer."""
        if value not in self._numbers:
            out = self.graph.output(value)
            constant = self.graph.constant_value(value)
            self._numbers[value] = len(self.buffers)
            self.buffers.append(
                Buffer(
                    out.name,
                    out.type.dtype,
                    plain_shape(out.type),
                    blob=None if constant is None else self.blob(constant),
                )
            )
        return self._numbers[value]

    def reference_step(self, op: Op) -> None:
        """Add a step: one operator on its NumPy kernel."""
        inputs = tuple(-1 if v is None else self.buffer(v) for v in op.inputs)
        outputs = tuple(self.buffer(v) for v in op.values)
        attrs = plain_attrs(op.definition, op.attrs)
        self.steps.append(reference_step(op.kind, attrs, inputs, outputs, sorted(op.src)))

    def library_step(
        self, library: str, region: Region, model: ExportedModel, settings: Settings, empty: Sequence[str] | None
    ) -> None:
        """Add a step: one region on a CPU library. The model and its weights become blobs. ``empty`` names the inputs that may have
        no elements, for a library that rejects empty tensors (None: it takes them)."""
        params: dict[str, Any] = {
            "model": self.blob(np.frombuffer(model.to_bytes(), np.uint8)),
            "weights": {name: self.blob(array) for name, array in sorted(model.weights.items())},
            "inputs": [self.graph.output(v).name for v in region.inputs],
            "outputs": [self.graph.output(v).name for v in region.outputs],
            **settings.to_plain(),
            **({} if empty is None else {"empty": list(empty)}),
        }
        self.steps.append(
            Step(
                library,
                params,
                tuple(self.buffer(v) for v in region.inputs),
                tuple(self.buffer(v) for v in region.outputs),
                tuple(sorted(frozenset().union(*(op.src for op in region.ops)))),
            )
        )

    def program(self, requires: Sequence[str], meta: dict[str, Any]) -> Program:
        return Program(
            target=self.target,
            precision=self.precision,
            inputs=tuple((port_spec(self.graph, i), self.buffer(self.graph.op(i).value)) for i in self.graph.inputs),
            outputs=tuple(
                (port_spec(self.graph, i), self.buffer(_source(self.graph.op(i)))) for i in self.graph.outputs
            ),
            buffers=tuple(self.buffers),
            steps=tuple(self.steps),
            blobs=self.blobs,
            requires=tuple(requires),
            meta=meta,
            profiles=self.graph.profiles,
        )


def lower_reference(graph: Graph, meta: dict[str, Any]) -> Program:
    """Every operator on its NumPy kernel, in topological order."""
    out = Lowering(graph, "reference", "fp32")
    for op in graph.order():
        if op.kind not in STRUCTURAL:
            out.reference_step(op)
    return out.program((), meta)


def _source(op: Op) -> Value:
    value = op.inputs[0]
    assert value is not None
    return value


def port_spec(graph: Graph, port: int) -> TensorSpec:
    """The program's description of an input or output, the operator ``port``. Raises UnsupportedError if its rank is unknown."""
    op = graph.op(port)
    out = op.outputs[0]
    shape = plain_shape(out.type)
    if shape is None:
        why = unknown_rank(graph, op.inputs)
        raise UnsupportedError(f"output {out.name!r} has an unknown rank" + (f": {why}" if why else ""))
    return TensorSpec(out.name, out.type.dtype, shape)


def plain_shape(t: TensorType) -> tuple[int | str, ...] | None:
    """A shape in a program: symbolic sizes as text. None if the rank is unknown."""
    return None if t.shape is None else tuple(str(d) if isinstance(d, Dim) else d for d in t.shape)
