"""OpenVINO as a library of the cpu target."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optdnn.errors import RunError
from optdnn.runtime.cpu.library import Settings, library_module
from optdnn.types import BF16, Array

_HINT = {"fp32": "f32", "bf16": "bf16"}
_core_lock = threading.Lock()
_core: Any = None


def core() -> Any:
    """The process's one ``openvino.Core`` (it loads the CPU plugin once)."""
    global _core
    with _core_lock:
        if _core is None:
            _core = library_module("openvino").Core()
        return _core


def has_bf16() -> bool:
    """Whether the processor has native bf16 arithmetic that OpenVINO uses."""
    return "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


class OpenVinoModel:
    """A compiled OpenVINO model over ONNX bytes in which each weight is declared as a graph *input*.

    After reading, every such input is replaced by a constant that shares the array's memory: nothing is written to disk
    or copied, and the reader sees a file of kilobytes. Precision is always asked for explicitly and read back, because
    OpenVINO's default on bf16 processors is bf16. Raises RunError with the library's message when it refuses.
    """

    name = "openvino"

    def __init__(
        self,
        model: bytes,
        weights: Mapping[str, Array],
        inputs: Sequence[str],
        outputs: Sequence[str],
        settings: Settings,
    ):
        ov = library_module("openvino")
        hint = _HINT[settings.precision]
        if hint == "bf16" and not has_bf16():
            raise RunError("this processor has no native bf16 arithmetic")
        config = {
            "INFERENCE_PRECISION_HINT": hint,
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": str(settings.threads),
            # Two more defaults that would lower the precision of some operators without a word.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            "KV_CACHE_PRECISION": hint,
        }
        self._weights = dict(weights)
        try:
            network = core().read_model(model)
            self._share_weights(ov, network)
            parameters = {name: p for p in network.get_parameters() for name in p.output(0).get_names()}
            self._inputs = [network.get_parameter_index(parameters[n]) for n in inputs]
            results = {name: i for i, o in enumerate(network.outputs) for name in o.get_names()}
            self._outputs = [results[n] for n in outputs]
            self._compiled: Any = core().compile_model(network, "CPU", config)
        except Exception as error:
            raise RunError(f"openvino does not take this network: {_first_line(error)}") from None
        ran = str(self._compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())
        if ran != hint:
            raise RunError(f"openvino was asked for {hint} and would run {ran}")
        self._static = [self._compiled.outputs[i].get_partial_shape().is_static for i in self._outputs]

    def _share_weights(self, ov: Any, network: Any) -> None:
        parameters = {name: p for p in network.get_parameters() for name in p.output(0).get_names()}
        for name, array in self._weights.items():
            parameter = parameters.get(name)
            if parameter is None:
                continue  # the reader dropped it: nothing uses it
            tensor = _tensor(ov, array)
            constant = ov.op.Constant(tensor) if array.dtype == BF16 else ov.op.Constant(array, shared_memory=True)
            constant.set_friendly_name(name)
            parameter.output(0).replace(constant.output(0))
            network.remove_parameter(parameter)
        network.validate_nodes_and_infer_types()

    def request(self) -> _OpenVinoRequest:
        return _OpenVinoRequest(self)

    def executed(self) -> dict[str, int]:
        """Executed operators per runtime precision ("f32", "bf16", "i8", …), read back from the compiled graph."""
        counts: Counter[str] = Counter()
        for op in self._compiled.get_runtime_model().get_ops():
            info = op.get_rt_info()
            if "runtimePrecision" in info and info["layerType"].astype(str) not in ("Input", "Output", "Const"):
                counts[str(info["runtimePrecision"].astype(str))] += 1
        return dict(sorted(counts.items()))


class _OpenVinoRequest:
    def __init__(self, model: OpenVinoModel):
        self._ov = library_module("openvino")
        self._model = model
        self._request = model._compiled.create_infer_request()
        self._types = [model._compiled.outputs[i].get_element_type() for i in model._outputs]
        self._shapes = [
            tuple(model._compiled.outputs[i].get_shape()) if static else None
            for i, static in zip(model._outputs, model._static, strict=True)
        ]
        self._dtypes = [BF16 if t == self._ov.Type.bf16 else np.dtype(t.to_dtype()) for t in self._types]

    def run(self, inputs: Sequence[Array], outs: Sequence[Array | None]) -> list[Array]:
        try:
            request, ov = self._request, self._ov
            for index, array in zip(self._model._inputs, inputs, strict=True):
                request.set_input_tensor(index, _tensor(ov, array))
            results: list[Array | None] = []
            for index, shape, dtype, out in zip(self._model._outputs, self._shapes, self._dtypes, outs, strict=True):
                # A result of known shape is written straight into the caller's (or a fresh) array.
                target = out if out is not None else None if shape is None else np.empty(shape, dtype)
                if target is not None and shape is not None:
                    request.set_output_tensor(index, _tensor(ov, target))
                results.append(target if shape is not None else None)
            request.infer()
            for i, (index, out) in enumerate(zip(self._model._outputs, outs, strict=True)):
                if results[i] is None:
                    data = _array(request.get_output_tensor(index), self._dtypes[i])
                    if out is None:
                        results[i] = data.copy()
                    else:
                        out[...] = data
                        results[i] = out
            return [r for r in results if r is not None]
        except Exception as error:
            raise RunError(f"openvino failed: {_first_line(error)}") from None


def _tensor(ov: Any, array: Array) -> Any:
    """An OpenVINO tensor over the array's memory."""
    if array.dtype == BF16:  # not a dtype that the binding knows: pass the bits with the type beside them
        return ov.Tensor(array.view(np.uint16), list(array.shape), ov.Type.bf16)
    return ov.Tensor(array, shared_memory=True)


def _array(tensor: Any, dtype: Any) -> Array:
    data: Array = tensor.data
    return data.view(dtype) if data.dtype != dtype else data


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # OpenVINO's first lines name its source files; the last one says what is wrong.
    return lines[-1] if lines else type(error).__name__
