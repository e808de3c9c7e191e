"""The candidates of a race, each opened in its worker process: an engine, or a rival library on a model file.

The rivals are used as their own documentation recommends, at their best for one request at a time: all optimizations, the
same number of threads, precision requested explicitly. All candidates provide the same service: NumPy arrays in, new NumPy
arrays out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from optdnn.errors import UsageError
from optdnn.runtime.contexts.base import BaseContext
from optdnn.runtime.contexts.stepwise import poison
from optdnn.runtime.program import Plain, known_sizes, target_of
from optdnn.types import BF16, Array, TensorSpec, is_float


@dataclass(frozen=True)
class Candidate:
    """One contender.

    ``kind`` is "engine" (``path`` is an engine file; the reference target is one of these), "onnxruntime" or "openvino"
    (``path`` is an ONNX file), or "module:function", which is called as an opener (see OPENERS). ``shapes`` fixes the input
    shapes of a library's model, as a build with the same ``--shape`` does.
    """

    name: str
    kind: str
    path: str
    precision: str = "fp32"
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)


Sampler = Callable[[float | None, int | None, int], "array[int]"]
"""``sampler(seconds, most, warmup)`` -> nanoseconds of each run: ``most`` runs, or as many as fit into ``seconds``."""


@dataclass
class Opened:
    """A prepared candidate. ``run`` maps input names to arrays, and returns the outputs in ONNX order."""

    run: Callable[[Mapping[str, Array]], Sequence[Array]]
    outputs: Sequence[str]
    facts: Mapping[str, Plain]
    inputs: Sequence[TensorSpec] | None = None
    """If given, floating-point feeds are converted to these dtypes before the race (an engine built with --io-dtype)."""
    sampler: Callable[[Mapping[str, Array]], Sampler] | None = None
    """If given, it times runs on these inputs itself: on a GPU, with the arrays there. Otherwise ``run`` is timed."""
    poisoned: Callable[[Mapping[str, Array]], Sequence[Array]] | None = None
    """If given, ``run`` with the memory of results overwritten first, so that no result of an earlier run is left in it."""
    clock: str = "gpu"
    """The clock of a sampler: "gpu" (events on the stream) or "host"."""


Opener = Callable[[Candidate, int], Opened]
"""``opener(candidate, threads) -> Opened``."""


def open_engine(candidate: Candidate, threads: int) -> Opened:
    """An engine file, with the threads of the race; it runs in one context."""
    # Imported by name, like any other opener of a candidate: the examination for CPU libraries is a layer above the runtime.
    engine = import_module("optdnn.loading").load(candidate.path, threads=threads)
    context = engine.context()
    steps = [dict(f) for f in engine.facts]
    distinct = [f for k, f in enumerate(steps) if f not in steps[:k]]
    facts = {"target": engine.target, "precision": engine.precision, "steps": distinct}
    on_gpu = target_of(engine.program).family == "cuda"
    return Opened(
        lambda feeds: list(context.run(feeds).values()),
        [s.name for s in engine.outputs],
        facts,
        engine.inputs,
        partial(_on_gpu, context) if on_gpu else None,
        None if on_gpu else partial(_poisoned, context, engine.outputs),
    )


POISON = 0xA5
"""The byte that overwrites the memory of results: an implausible value in every type."""


def _poisoned(context: Any, outputs: Sequence[TensorSpec], feeds: Mapping[str, Array]) -> Sequence[Array]:
    """Run into memory that holds no result: the library's own memory is overwritten, and results of fixed shape get new arrays."""
    context.poison(POISON)
    out = {}
    for spec in outputs:
        shape = known_sizes(spec.shape)
        if len(shape) == len(spec.shape):
            out[spec.name] = array = np.empty(shape, spec.dtype)
            poison(array, POISON)
    return list(context.run(feeds, out).values())


def _on_gpu(context: BaseContext, feeds: Mapping[str, Array]) -> Sampler:
    """The sampler of an engine on a GPU."""
    from optdnn.runtime.cuda.measuring.measure import sampler_of
    from optdnn.runtime.measuring.bench import cuda_context

    gpu_context = cuda_context(context, feeds)
    assert gpu_context is not None
    sampler: Sampler = sampler_of(gpu_context, context.innermost(feeds)[1])
    return sampler


def open_onnxruntime(candidate: Candidate, threads: int) -> Opened:
    """ONNX Runtime's CPU provider at full optimization. It has only fp32 (or the model's own types)."""
    ort = _library("onnxruntime")
    if candidate.precision != "fp32":
        raise UsageError(f"onnxruntime has no {candidate.precision} on the CPU")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if candidate.shapes:
        plain = ort.SessionOptions()
        plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        plain.log_severity_level = 3
        for i in ort.InferenceSession(candidate.path, plain, providers=["CPUExecutionProvider"]).get_inputs():
            for symbol, size in zip(i.shape, candidate.shapes.get(i.name, ()), strict=False):
                if isinstance(symbol, str):
                    options.add_free_dimension_override_by_name(symbol, size)
    session = ort.InferenceSession(candidate.path, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    facts = {"library": "onnxruntime", "version": ort.__version__, "precision": "fp32", "threads": threads}
    return Opened(lambda feeds: session.run(names, feeds), names, facts)


def open_openvino(candidate: Candidate, threads: int) -> Opened:
    """OpenVINO's CPU plugin, latency hint, one stream; the real precision is read back."""
    ov = _library("openvino")
    hints = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
    if candidate.precision not in hints:
        raise UsageError(f"openvino has no precision {candidate.precision}")
    core = ov.Core()
    model = core.read_model(candidate.path)
    if candidate.shapes:
        model.reshape({name: list(shape) for name, shape in candidate.shapes.items()})
    compiled = core.compile_model(
        model,
        "CPU",
        {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": str(threads),
            "INFERENCE_PRECISION_HINT": hints[candidate.precision],
        },
    )
    request = compiled.create_infer_request()
    n = len(compiled.outputs)
    bf16 = [o.get_element_type() == ov.Type.bf16 for o in compiled.outputs]

    def run(feeds: Mapping[str, Array]) -> Sequence[Array]:
        given = {
            k: ov.Tensor(a.view(np.uint16), list(a.shape), ov.Type.bf16) if a.dtype == BF16 else a
            for k, a in feeds.items()
        }
        results = request.infer(given, share_inputs=True)
        return [results[i].view(BF16) if bf16[i] else results[i] for i in range(n)]

    facts = {
        "library": "openvino",
        "version": ov.__version__,
        "precision": str(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()),
        "threads": int(compiled.get_property("INFERENCE_NUM_THREADS")),
    }
    return Opened(run, [o.get_any_name() for o in compiled.outputs], facts)


OPENERS: dict[str, Opener] = {
    "engine": open_engine,
    "onnxruntime": open_onnxruntime,
    "openvino": open_openvino,
}


def open_candidate(candidate: Candidate, threads: int) -> Opened:
    """Open by kind. Raises UsageError for an unknown kind, MissingDependency for a missing library, and the errors of openers."""
    opener = OPENERS.get(candidate.kind)
    if opener is None:
        module, colon, function = candidate.kind.partition(":")
        if not colon:
            raise UsageError(f"candidate kind {candidate.kind!r} is not one of {', '.join(OPENERS)} or MODULE:FUNCTION")
        try:
            opener = getattr(import_module(module), function)
        except (ImportError, AttributeError) as e:
            raise UsageError(f"candidate kind {candidate.kind!r} cannot be imported: {e}") from e
    return opener(candidate, threads)


def converted(feeds: Mapping[str, Array], inputs: Sequence[TensorSpec] | None) -> dict[str, Array]:
    """Feeds with floating-point arrays converted to the dtypes of ``inputs``, if given."""
    wanted = {s.name: s.dtype for s in inputs or ()}
    return {
        name: a.astype(wanted[name]) if name in wanted and is_float(a.dtype) and is_float(wanted[name]) else a
        for name, a in feeds.items()
    }


def _library(name: str) -> Any:
    from optdnn.runtime.cpu.library import library_module

    return library_module(name, "to compare with it")
