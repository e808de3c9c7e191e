"""Engine files that are well formed, with right digests, and hostile: an attacker could write them with optdnn's own functions."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
from onnx import TensorProto, helper

from optdnn.runtime.file import format as file_format
from optdnn.runtime.file.header import canonical
from optdnn.runtime.program import Buffer, Program, Step
from optdnn.types import Array, TensorSpec

ELEMENTS = {TensorProto.FLOAT: np.float32, TensorProto.INT64: np.int64, TensorProto.INT32: np.int32}
Port = tuple[str, int, Sequence[int | str]]
"""Name, element type (TensorProto.DataType) and shape."""


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    initializers: Sequence[TensorProto] = (),
    opset: int = 21,
) -> onnx.ModelProto:
    """A model in the form of the exporter: every node has a name."""
    for k, node in enumerate(nodes):
        node.name = node.name or f"node{k}"
    ports = [[helper.make_tensor_value_info(*p) for p in side] for side in (inputs, outputs)]
    graph = helper.make_graph(list(nodes), "g", *ports, list(initializers))
    return onnx.ModelProto(
        ir_version=10, producer_name="optdnn", graph=graph, opset_import=[helper.make_opsetid("", opset)]
    )


def program_of(
    library: str,
    model: onnx.ModelProto | bytes,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    weights: Mapping[str, Array] | None = None,
    params: Mapping[str, Any] | None = None,
) -> Program:
    """A program for the target cpu with one step, which gives ``model`` to ``library``. ``params`` replace the step's own."""
    data = model if isinstance(model, bytes) else model.SerializeToString(deterministic=True)
    weights = weights or {}
    buffers = [Buffer(name, np.dtype(ELEMENTS[t]), tuple(shape)) for name, t, shape in (*inputs, *outputs)]
    specs = [TensorSpec(b.name, b.dtype, b.shape or ()) for b in buffers]
    count = len(inputs)
    step = Step(
        library,
        {
            "model": 0,
            "weights": {name: k for k, name in enumerate(weights, 1)},
            "inputs": [p[0] for p in inputs],
            "outputs": [p[0] for p in outputs],
            "threads": 1,
            "precision": "fp32",
            **(params or {}),
        },
        tuple(range(count)),
        tuple(range(count, len(buffers))),
    )
    return Program(
        target="cpu",
        precision="fp32",
        inputs=tuple((s, k) for k, s in enumerate(specs[:count])),
        outputs=tuple((s, k) for k, s in enumerate(specs[count:], count)),
        buffers=tuple(buffers),
        steps=(step,),
        blobs=[np.frombuffer(data, np.uint8), *weights.values()],
    )


def write(program: Program, path: Path) -> Path:
    """Writes the file without the check that a build makes of its program."""
    with mock.patch.object(file_format, "validate", return_value=None):
        file_format.write(program, path)
    return path


def changed_header(data: bytes, change: Callable[[Any], None]) -> bytes:
    """The contents of an engine file after an in-place change of its header as plain data. Its digests are right."""
    text, end, minor = file_format._checked_header(memoryview(data))
    plain = json.loads(text)
    blobs = data[file_format._data_at(end - file_format.HEADER_AT, len(plain["blobs"])) :]
    change(plain)
    header = canonical(plain).encode()
    entries = plain.get("blobs")
    data_at = file_format._data_at(len(header), len(entries) if isinstance(entries, list) else 0)
    prefix = file_format.PREFIX.pack(
        file_format.MAGIC, file_format.VERSION[0], minor, len(header), data_at + len(blobs), 0
    )
    digest = hashlib.sha256(prefix + header).digest()
    return prefix + digest + header + bytes(data_at - file_format.HEADER_AT - len(header)) + blobs


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all parts of plain data."""
    yield path
    for k, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        yield from places(inner, (*path, k))


VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2, 7, 64, 1 << 20, 1 << 40, 1 << 61, 1.5, "", "x", "[/red]", "relu"),
    *([], {}, [[]], {"a": 1}, [None], ["x"], [1, 2, 3]),
)


def mutate(plain: Any, at: tuple[Any, ...], rng: np.random.Generator) -> None:
    """Change one part of plain data in place. Does nothing if an earlier change has removed the part."""
    try:
        inner = plain
        for k in at[:-1]:
            inner = inner[k]
        old, how = inner[at[-1]], rng.random()
        if how < 0.15:
            del inner[at[-1]]
        elif how < 0.45 and type(old) is int:
            inner[at[-1]] = old + int(rng.choice((-1, 1, 16, 1000, -2 * old)))
        elif how < 0.55 and isinstance(old, list) and old:
            old.append(old[0])
        else:
            inner[at[-1]] = VALUES[int(rng.integers(len(VALUES)))]
    except (KeyError, IndexError, TypeError):
        return


_CHILD = """
import json, sys
import numpy as np
import optdnn
for path in json.load(sys.stdin):
    try:
        engine = optdnn.load(path)
        rng = np.random.default_rng(0)
        feeds = {s.name: np.ones([d if isinstance(d, int) else 2 for d in s.shape], s.dtype) for s in engine.inputs}
        engine.run(feeds)
        said = ["none", ""]
    except optdnn.OptdnnError as error:
        said = [type(error).__name__, error.message]
    print(json.dumps(said), flush=True)
"""


def load_in_child(paths: Sequence[Path], folder: Path) -> list[tuple[str, str]]:
    """Load and run engines in another process. Returns (class of the error, message) of each; fewer if the process died."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=json.dumps([str(p) for p in paths]),
        capture_output=True, text=True, timeout=300, cwd=folder, check=False,
    )  # fmt: skip
    return [(line[0], line[1]) for line in map(json.loads, done.stdout.splitlines())]
