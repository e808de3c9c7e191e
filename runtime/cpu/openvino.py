"""OpenVINO as a library of the cpu target."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from optdnn.errors import MissingDependency, RunError
from optdnn.runtime.cpu.huge_pages import NewMemory
from optdnn.runtime.cpu.library import EXACT_INTEGER, Settings, library_module, prepare_step
from optdnn.runtime.cpu.onnxruntime import OnnxRuntimeModel
from optdnn.runtime.program import Program, Step
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.types import BF16, Array

_HINT = {"fp32": "f32", "bf16": "bf16"}
_PRECISIONS = {"f32": "fp32", "bf16": "bf16", "f16": "fp16", "u8": "int8", "i8": "int8"}
_NOT_COMPUTING = ("Input", "Output", "Const", "Reorder")
RENAMED = ("/DequantizationMultiply", "/WithoutBiases")
"""Suffixes that OpenVINO's rewrites append to the names of nodes."""
_RUNTIME_FACTS = ("layerType", "originalLayersNames", "runtimePrecision", "primitiveType")
_SAME = {"q": np.dtype(np.int64), "Q": np.dtype(np.uint64)}
"""NumPy's "long long", by the names under which the binding knows these types (it may be "long" as well)."""
_KEPT_AS_INT32 = frozenset(map(np.dtype, (np.int64, np.uint64, np.uint32)))
_core_lock = threading.Lock()
_core: Any = None


def core() -> Any:
    """The process's only ``openvino.Core`` (it loads the CPU plugin once)."""
    global _core
    with _core_lock:
        if _core is None:
            _core = library_module("openvino").Core()
        return _core


def refuses(precision: str) -> str | None:
    """Why OpenVINO cannot run in ``precision`` on this machine, or None."""
    if precision == "bf16" and "BF16" not in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        return "this processor has no native bf16 arithmetic"
    return None


class OpenVinoModel:
    """A compiled OpenVINO model over ONNX bytes that declare each weight as a graph *input*.

    After reading, every such input is replaced by a constant that shares the array's memory: nothing is written to disk
    or copied, and the reader sees a file of kilobytes. Precision is always requested explicitly and read back, because
    OpenVINO's default on bf16 processors is bf16. Raises RunError with the library's message if it refuses.
    """

    name = "openvino"
    memory: NewMemory | None = None
    empty: frozenset[str] = frozenset()

    def __init__(
        self,
        model: bytes,
        weights: Mapping[str, Array],
        inputs: Sequence[str],
        outputs: Sequence[str],
        settings: Settings,
        *,
        counters: bool = False,
    ):
        ov = library_module("openvino")
        hint = _HINT[settings.precision]
        if (reason := refuses(settings.precision)) is not None:
            raise RunError(reason)
        config = {
            "INFERENCE_PRECISION_HINT": hint,
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": str(settings.threads),
            # Two more defaults that would lower the precision of some operators silently.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            "KV_CACHE_PRECISION": hint,
            **({"PERF_COUNT": "YES"} if counters else {}),
        }
        self._weights = dict(weights)
        self._names = (list(inputs), list(outputs))
        self._other: OnnxRuntimeModel | None = None
        self._making = threading.Lock()
        self._model = model  # small initializers stay in the model's memory
        self._facts = {"library": self.name, "version": ov.get_version(), **settings.to_plain()}
        try:
            network = core().read_model(model)
            self._share_weights(ov, network)
            parameters = {name: p for p in network.get_parameters() for name in p.output(0).get_names()}
            self._inputs = [network.get_parameter_index(parameters[n]) for n in inputs]
            results = {name: i for i, o in enumerate(network.outputs) for name in o.get_names()}
            self._outputs = [results[n] for n in outputs]
            direct = _written_directly(network)
            self._compiled: Any = core().compile_model(network, "CPU", config)
        except Exception as error:
            raise RunError(f"openvino does not take this network: {_first_line(error)}") from None
        ran = str(self._compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())
        if ran != hint:
            raise RunError(f"openvino was asked for {hint} and would run {ran}")
        self._direct = [direct[i] and self._compiled.outputs[i].get_partial_shape().is_static for i in self._outputs]

    def _share_weights(self, ov: Any, network: Any) -> None:
        parameters = {name: p for p in network.get_parameters() for name in p.output(0).get_names()}
        for name, array in self._weights.items():
            parameter = parameters.get(name)
            if parameter is None:
                continue  # the reader dropped it: nothing uses it
            if array.dtype == BF16:
                constant = ov.op.Constant(_tensor(ov, array))
            else:
                constant = ov.op.Constant(_writable(array), shared_memory=True)
            constant.set_friendly_name(name)
            parameter.output(0).replace(constant.output(0))
            network.remove_parameter(parameter)
        network.validate_nodes_and_infer_types()

    aliases = False

    @property
    def facts(self) -> dict[str, Any]:
        """The facts, read back: ``executed`` counts operators per runtime precision ("f32", "bf16", "i8", …)."""
        counts = Counter(
            info["runtimePrecision"]
            for op, info in self._computing()
            if not op.inputs()
            or not all(_is_constant(i) for i in op.inputs())  # those are computed once, when compiled
        )
        return {**self._facts, "executed": dict(sorted(counts.items()))}

    def _computing(self) -> Iterator[tuple[Any, dict[str, str]]]:
        """The executed operators that compute in a precision, with their facts."""
        for op in self._compiled.get_runtime_model().get_ordered_ops():
            info = _facts_of(op)
            if "runtimePrecision" in info and info["layerType"] not in _NOT_COMPUTING:
                yield op, info

    def layers(self) -> dict[str, str]:
        """ONNX node name -> the precision in which the plugin runs it ("fp32", "bf16", "fp16", "int8"), read back."""
        return {
            without_endings(name): _PRECISIONS[info["runtimePrecision"]]
            for _, info in self._computing()
            if info["runtimePrecision"] in _PRECISIONS
            for name in info["originalLayersNames"].split(",")
        }

    def elsewhere(self, inputs: Sequence[Array | None], outs: Sequence[Array | None]) -> list[Array]:
        """Run the model on ONNX Runtime, compiled on first use. This is for calls with empty tensors, for which OpenVINO would
        return an earlier call's results, and for calls with integers that it cannot hold. Raises RunError if ONNX
        Runtime refuses the model, too."""
        names, results = self._names
        with self._making:
            if self._other is None:
                try:
                    settings = Settings(int(self._facts["threads"]))
                    self._other = OnnxRuntimeModel(self._model, {}, [*names, *self._weights], results, settings)
                except (RunError, MissingDependency) as error:
                    raise RunError(
                        "openvino accepts neither empty tensors nor such integers here, and onnxruntime cannot be "
                        f"asked: {error.message}"
                    ) from None
        return self._other.session().run([*inputs, *self._weights.values()], outs)

    def session(self) -> _OpenVinoSession:
        return _OpenVinoSession(self)

    def executed(self) -> dict[str, tuple[tuple[str, ...], str, str, tuple[str, ...]]]:
        """Each executed node by its name, in topological order: the names of the model's nodes that it computes, its precision, its
        primitive, and the nodes that read its results."""
        nodes = {}
        for op in self._compiled.get_runtime_model().get_ordered_ops():
            info = _facts_of(op)
            if info.get("layerType") not in ("Input", "Output", "Const"):
                nodes[str(op.get_friendly_name())] = (
                    tuple(n for n in info.get("originalLayersNames", "").split(",") if n),
                    info.get("runtimePrecision", ""),
                    info.get("primitiveType", ""),
                    tuple(str(t.get_node().get_friendly_name()) for o in op.outputs() for t in o.get_target_inputs()),
                )
        return nodes


def _facts_of(op: Any) -> dict[str, str]:
    return {k: str(v.astype(str)) for k, v in op.get_rt_info().items() if k in _RUNTIME_FACTS}


def without_endings(name: str) -> str:
    """A node's name without OpenVINO's suffixes."""
    for ending in RENAMED:
        name = name.removesuffix(ending)
    return name


def _is_constant(operand: Any) -> bool:
    return bool(operand.get_source_output().get_node().get_rt_info()["layerType"].astype(str) == "Const")


def _written_directly(network: Any) -> list[bool]:
    """For each result, whether the plugin writes it to a tensor of the caller.

    It does not if the result is an unchanged constant or input, nor for further results of one value (seen in
    2026.4: the tensor keeps its old values); these are copied out instead.
    """
    seen: set[tuple[str, int]] = set()
    direct = []
    for result in network.get_results():
        source = result.input_value(0)
        node = source.get_node()
        key = (node.get_name(), source.get_index())
        direct.append(key not in seen and node.get_type_name() not in ("Constant", "Parameter"))
        seen.add(key)
    return direct


class _OpenVinoSession:
    def __init__(self, model: OpenVinoModel):
        self._ov = library_module("openvino")
        self._model = model
        self._memory = NewMemory(model.memory is not None and model.memory.wanted)
        self._request = model._compiled.create_infer_request()
        self._may_be_empty = [name in model.empty for name in model._names[0]]
        self._types = [model._compiled.outputs[i].get_element_type() for i in model._outputs]
        self._shapes = [
            tuple(model._compiled.outputs[i].get_shape()) if direct else None
            for i, direct in zip(model._outputs, model._direct, strict=True)
        ]
        self._dtypes = [BF16 if t == self._ov.Type.bf16 else np.dtype(t.to_dtype()) for t in self._types]

    def counted(self) -> dict[str, float]:
        """Microseconds of each executed node, averaged by the library over all runs so far (for a model with ``counters``)."""
        return {p.node_name: p.real_time.total_seconds() * 1e6 for p in self._request.get_profiling_info()}

    def poison(self, byte: int) -> None:
        """Overwrite the results of the last run in the library's own memory."""
        for index, shape in zip(self._model._outputs, self._shapes, strict=True):
            if shape is None and (tensor := self._request.get_output_tensor(index)).get_size():
                tensor.data.reshape(-1).view(np.uint8)[...] = byte

    def run(self, inputs: Sequence[Array | None], outs: Sequence[Array | None]) -> list[Array]:
        for array, may in zip(inputs, self._may_be_empty, strict=True):
            if array is not None and ((not array.size and not may) or _is_wide(array)):
                return self._model.elsewhere(inputs, outs)
        try:
            request, ov = self._request, self._ov
            for index, array in zip(self._model._inputs, inputs, strict=True):
                if array is not None:
                    request.set_input_tensor(index, _tensor(ov, array))
            results: list[Array | None] = []
            for index, shape, dtype, out in zip(self._model._outputs, self._shapes, self._dtypes, outs, strict=True):
                # A computed result of known shape is written directly into the caller's (or a new) array.
                target = out if out is not None else None if shape is None else np.empty(shape, dtype)
                if target is not None and shape is not None:
                    request.set_output_tensor(index, _tensor(ov, target))
                results.append(target if shape is not None else None)
            request.infer()
            for memory in (self._model.memory, self._memory):
                if memory is not None:
                    memory.after_run()
            for i, (index, out) in enumerate(zip(self._model._outputs, outs, strict=True)):
                if results[i] is None:
                    data = _array(request.get_output_tensor(index), self._dtypes[i])
                    if out is not None and out.shape == data.shape:
                        out[...] = data
                        results[i] = out
                    else:
                        results[i] = data.copy()
            return [r for r in results if r is not None]
        except Exception as error:
            raise RunError(f"openvino failed: {_first_line(error)}") from None


def prepare(step: Step, program: Program, options: LoadOptions) -> OpenVinoModel:
    """Prepare an engine's step; see ``library.prepare_step``."""
    make = partial(OpenVinoModel, counters=options.counters is not None)
    return cast(OpenVinoModel, prepare_step(make, step, program, options))


def _is_wide(array: Array) -> bool:
    """Whether an array holds integers that are not exact in OpenVINO, which keeps 64-bit integers as int32."""
    if array.dtype not in _KEPT_AS_INT32 or not array.size:
        return False
    return bool(array.max() > EXACT_INTEGER or array.min() < -EXACT_INTEGER)


def _tensor(ov: Any, array: Array) -> Any:
    """An OpenVINO tensor over the array's memory (the caller keeps the array alive)."""
    if array.dtype == BF16:  # not a dtype that the binding knows: pass the bits and the type
        return ov.Tensor(_writable(array.view(np.uint16)), list(array.shape), ov.Type.bf16)
    array = array.view(_SAME.get(array.dtype.char, array.dtype))
    return ov.Tensor(_writable(array), shared_memory=True)


def _writable(array: Array) -> Array:
    """The same memory as a writable array: the binding accepts no other, although it only reads inputs and constants."""
    if array.flags.writeable:
        return array
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    return np.frombuffer(memoryview(memory).cast("B"), array.dtype).reshape(array.shape)


def _array(tensor: Any, dtype: Any) -> Array:
    data: Array = tensor.data
    return data.view(dtype) if data.dtype != dtype else data


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # OpenVINO's first lines name its source files; the last one states the error.
    return lines[-1] if lines else type(error).__name__
