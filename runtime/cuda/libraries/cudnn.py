"""Convolutions and attention by cuDNN, through the graph API of its Python frontend (package ``nvidia-cudnn-frontend``).

A graph is built from the operation's own facts (shapes, strides, stages), the library ranks plans for it, and the engine records
the plan to run. Plans with results that depend on the order of atomics are left out.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from optdnn.errors import MissingDependency, RunError
from optdnn.runtime.cuda.libraries.calls import Attention, Called, Convolution, Norm

KEPT = 256
"""The most plans that a process keeps; the least recently used is dropped first."""
_WHY = "by steps that call cuDNN"
_making = threading.Lock()


@cache
def frontend() -> Any:
    """The frontend, with the library loaded. Raises MissingDependency."""
    try:
        module = import_module("cudnn")
        module.backend_version()
    except ImportError as error:
        raise MissingDependency("nvidia-cudnn-frontend", "cuda-libs", _WHY) from error
    except Exception as error:  # without the library, the frontend raises RuntimeError or AttributeError
        raise MissingDependency("nvidia-cudnn-cu13", "cuda-libs", _WHY) from error
    return module


class Handle:
    """A handle of the library; used by one thread at a time."""

    def __init__(self) -> None:
        self.cudnn = frontend()
        self.handle = self.cudnn.create_handle()

    def prepare(self, operation: Convolution | Attention | Norm) -> Prepared:
        """Raises RunError if the library has no plan for it."""
        return Prepared(self, _plan_of(operation))


@lru_cache(maxsize=KEPT)
def _plan_of(operation: Convolution | Attention | Norm) -> PlannedGraph:
    """The graph and its plan, built once for all contexts of the process: a fused kernel takes some tenths of a second."""
    with _making:
        return PlannedGraph(operation)


@cache
def _planning_handle() -> Handle:
    """The handle with which all plans of this process are built."""
    return Handle()


class PlannedGraph:
    """A graph with its plan built. It does not change any more, and each context runs it with its own handle.

    ``workspace``: bytes of scratch memory; ``ranked``: the number of plans that the library offered.
    """

    def __init__(self, operation: Convolution | Attention | Norm):
        self._handle = handle = _planning_handle()
        self.operation = operation
        cudnn = handle.cudnn
        dtype = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT"}[operation.dtype]
        self._dtype = getattr(cudnn.data_type, dtype)
        self.graph = cudnn.pygraph(
            handle=handle.handle, io_data_type=self._dtype, intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )  # fmt: skip
        self.tensors: dict[str, Any] = {}
        self.numbers: dict[Any, np.ndarray[Any, np.dtype[np.float32]]] = {}
        """Tensors passed by value, in host memory."""
        try:
            plan = 0
            if isinstance(operation, Convolution):
                self._convolution(operation)
                plan = operation.plan
            elif isinstance(operation, Attention):
                self._attention(operation)
            else:
                self._norm(operation)
            self.graph.validate()
            self.graph.build_operation_graph()
            self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            notes = cudnn.numerical_note
            exact = [notes.TENSOR_CORE, notes.DOWN_CONVERT_INPUTS] if operation.dtype == "float32" else []
            self.graph.deselect_numeric_notes([notes.NONDETERMINISTIC, *exact])  # fp32 is fp32, not tf32
            self.graph.check_support()
            self.ranked = int(self.graph.get_execution_plan_count())
            self.index = self._build(plan)
            self.workspace = int(self.graph.get_workspace_size_plan_at_index(self.index))
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
            raise RunError(
                f"cuDNN cannot run {operation}: {str(error).splitlines()[0][:300] if str(error) else ''}"
            ) from error

    def _build(self, wanted: int) -> int:
        """Build the plan of this rank (rank 0: the first one that can be built); returns its index."""
        if wanted >= self.ranked:
            raise RuntimeError("the engine asks for a plan that the library does not rank: tune it again")
        failed = ""
        for index in range(self.ranked) if wanted == 0 else (wanted,):
            try:
                self.graph.build_plan_at_index(index)
            except RuntimeError as error:
                failed = str(error)
                continue
            return index
        raise RuntimeError(failed)

    def _tensor(self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any = None) -> Any:
        tensor = self.graph.tensor(name=name, dim=list(shape), stride=list(strides), data_type=dtype or self._dtype)
        self.tensors[name] = tensor
        return tensor

    def _convolution(self, o: Convolution) -> None:
        cudnn, top, left, bottom, right = self._handle.cudnn, *o.pads
        value = self.graph.conv_fprop(
            image=self._tensor("x", o.x_shape, o.x_strides), weight=self._tensor("w", o.w_shape, o.w_strides),
            pre_padding=[top, left], post_padding=[bottom, right], stride=list(o.strides), dilation=list(o.dilations),
            compute_data_type=cudnn.data_type.FLOAT,
        )  # fmt: skip
        channels = o.w_shape[0]
        for stage in o.stages:
            value = self._stage(stage, value, channels, o)
        self._result("y", value, o.y_shape, o.y_strides)

    def _stage(self, stage: str, value: Any, channels: int, o: Convolution) -> Any:
        graph = self.graph
        match stage:
            case "bias":
                bias = self._tensor("bias", (1, channels, 1, 1), (channels, 1, channels, channels))
                return graph.bias(input=value, bias=bias)
            case "add":
                return graph.add(a=value, b=self._tensor("z", o.y_shape, o.z_strides))
            case "relu":
                return graph.relu(input=value)
            case "gelu_tanh":
                return graph.gelu_approx_tanh(input=value)
            case _:  # sigmoid, tanh, swish, gelu: the frontend's names
                return getattr(graph, stage)(input=value)

    def _attention(self, o: Attention) -> None:
        options: dict[str, Any] = {"use_causal_mask": True} if o.causal else {}
        if o.mask_shape:
            options["bias"] = self._tensor("mask", o.mask_shape, o.mask_strides)
        results = self.graph.sdpa(
            q=self._tensor("q", o.q_shape, o.q_strides), k=self._tensor("k", o.k_shape, o.k_strides),
            v=self._tensor("v", o.k_shape, o.v_strides), is_inference=True, attn_scale=o.scale, **options,
        )  # fmt: skip
        self._result("out", results[0], o.q_shape, o.out_strides)

    def _norm(self, o: Norm) -> None:
        cudnn = self._handle.cudnn
        rows, row = ((o.rows, o.size, 1, 1), (1, o.size, 1, 1))
        strides = (o.size, 1, o.size, o.size)
        wide = cudnn.data_type.FLOAT
        epsilon = self.graph.tensor(
            name="epsilon", dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], is_pass_by_value=True, data_type=wide
        )
        self.numbers[epsilon] = np.full(1, o.epsilon, np.float32)
        given = {
            "norm_forward_phase": cudnn.norm_forward_phase.INFERENCE,
            "input": self._tensor("x", rows, strides),
            "scale": self._tensor("scale", row, strides, wide),
            "epsilon": epsilon,
        }
        if o.kind == "layer":
            results = self.graph.layernorm(**given, bias=self._tensor("bias", row, strides, wide))
        else:
            results = self.graph.rmsnorm(**given)
        self._result("y", results[0], rows, strides)

    def _result(self, name: str, value: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        value.set_output(True).set_data_type(self._dtype).set_dim(list(shape)).set_stride(list(strides)).set_name(name)
        self.tensors[name] = value


class Prepared:
    """A planned graph with the handle that runs it."""

    def __init__(self, handle: Handle, plan: PlannedGraph):
        self._handle, self._plan = handle, plan
        self.workspace, self.ranked = plan.workspace, plan.ranked

    def bind(self, addresses: Mapping[str, int], workspace: int) -> Called:
        """The call on these addresses, by the names of the operation's operands."""
        pack = {tensor: addresses[name] for name, tensor in self._plan.tensors.items()}
        pack |= {tensor: array.ctypes.data for tensor, array in self._plan.numbers.items()}
        return Called(partial(self._enqueue, pack, workspace))

    def _enqueue(self, pack: Mapping[Any, int], workspace: int, stream: int) -> None:
        handle, plan = self._handle, self._plan
        try:
            handle.cudnn.set_stream(handle=handle.handle, stream=stream)
            plan.graph.execute_plan_at_index(pack, workspace, plan.index, handle=handle.handle)
        except RuntimeError as error:
            raise RunError(f"cuDNN failed to run {plan.operation}: {error}") from error
