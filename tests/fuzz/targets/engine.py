"""Engine files with right digests: read, checked, prepared, and run if their inputs are small.

Programs for GPUs run in ``simulate``; the sources of their kernels are checked as for loading on a GPU. Networks of CPU
libraries are examined, and never reach the library.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import onnx
from support import hostile, onnxnet, small_models

import optdnn
from fuzz.engine_files import mutated_engine
from fuzz.files import in_file
from fuzz.judge import ours
from optdnn.errors import EngineError, InternalError, machine_errors
from optdnn.lowering.cpu.examine import examine
from optdnn.runtime.cuda.kernel_text.allowed import check_kernels
from optdnn.runtime.engine import Engine
from optdnn.runtime.file.format import encode, read
from optdnn.runtime.program import Program, programs_of, target_of
from optdnn.runtime.steps.executor import LibraryPart, LoadOptions

COVERED = ("optdnn.runtime", "optdnn.lowering.cpu")
GOLDEN = Path(__file__).parents[2] / "golden"
MOST_ARENA = 1 << 26
"""The largest arena, in bytes, of an engine that is prepared: files may declare any size."""
MOST_ELEMENTS = 1 << 12
"""The largest input, in bytes, of a program that is run."""
KEPT = ("model", "options", "sizes")
"""The parts of a build's record that seeds keep: the record is the longest part of a small engine."""
LOOPS = ("Loop", "Scan", "If")
"""Kinds of steps that are not run: the time of a hostile engine is not limited."""


class Examined(EngineError):
    """The network passed the examination: the next step would be the library's."""


def examined(part: LibraryPart) -> None:
    examine(part)
    raise Examined(f"a network for {part.library}")


@cache
def seeds() -> list[bytes]:
    """The engines of all versions of the format, programs of several kinds for GPUs, and networks for CPU libraries."""
    found = [path.read_bytes() for path in sorted(GOLDEN.glob("*.engine"))]
    networks = [onnxnet.convnet(), small_models.mlp(2), small_models.residual(), small_models.attention(1)]
    found += [_built(m, target) for m in networks for target in ("simulate", "reference")]
    found.append(_built(small_models.mlp("n"), "simulate", shapes={"x": "1..2..4x24"}))
    found.append(_built(small_models.mlp(2), "simulate", precision="fp16"))
    return [*found, *_for_libraries()]


def _built(model: onnx.ModelProto, target: str, **options: object) -> bytes:
    program = optdnn.build(model, target=target, **options).program
    program.meta = {name: program.meta[name] for name in KEPT if name in program.meta}
    return b"".join(encode(program))


def _for_libraries() -> list[bytes]:
    x, y = ("x", onnx.TensorProto.FLOAT, (1, 4)), ("y", onnx.TensorProto.FLOAT, (1, 4))
    found = []
    for library in ("onnxruntime", "openvino"):
        for nodes in (
            [onnx.helper.make_node("Relu", ["x"], ["a"]), onnx.helper.make_node("Add", ["a", "w"], ["y"])],
            [onnx.helper.make_node("Gather", ["w", "i"], ["g"]), onnx.helper.make_node("Mul", ["x", "g"], ["y"])],
        ):
            at = onnx.numpy_helper.from_array(np.zeros(1, np.int64), "i")
            w = onnx.numpy_helper.from_array(np.ones((1, 4), np.float32), "w")
            model = hostile.model_of(nodes, [x], [y], [w, *([at] if nodes[0].op_type == "Gather" else [])])
            found.append(b"".join(encode(hostile.program_of(library, model, [x], [y]))))
    return found


def mutate(data: bytes, rng: Random) -> bytes:
    return mutated_engine(data, rng)


def one_input(data: bytes) -> None:
    engine = None
    with ours():
        program = read(in_file(data), mmap=False)
        if all(one.arena_bytes <= MOST_ARENA for one in programs_of(program)):
            engine = _made_ready(program)
    if engine is None:
        return
    with ours():
        check_kernels(engine.program, ())
    if _is_small(engine.program):
        with ours(bounded=False):  # the results of a program may be large
            feeds = {s.name: np.ones([d if isinstance(d, int) else 2 for d in s.shape], s.dtype) for s in engine.inputs}
            engine.run(feeds)


def _made_ready(program: Program) -> Engine:
    """Loads it like :func:`optdnn.load`."""
    on_gpu = target_of(program).family == "cuda"
    options = LoadOptions(simulate=on_gpu, huge_pages=False, examine=examined)
    with machine_errors("the engine", EngineError):
        try:
            return Engine(program, options=options)
        except InternalError as error:
            raise EngineError("the engine contradicts itself") from error


def _is_small(program: Program) -> bool:
    """Whether a run takes little time: small inputs, and no loops."""
    sizes = [math.prod(d if isinstance(d, int) else 2 for d in spec.shape) for spec, _ in program.inputs]
    ops = [step.params.get("op", step.params) for step in program.steps]
    kinds = [op.get("kind") for op in ops if isinstance(op, dict)]
    return max(sizes, default=0) <= MOST_ELEMENTS and not any(kind in LOOPS for kind in kinds)
